"""Mistakes that the properties of test_roofline.py must catch."""

from planting import mistakes
from test_roofline import (
    HELD as HELD,
)
from test_roofline import (
    a_machine_takes_the_larger_of_two_times,
    attention_counts_allowed_pairs,
    layers_count_as_often_as_they_stand,
    operators_are_those_of_a_real_pass,
    operators_move_what_they_read_and_write,
    passes_compute_what_the_budget_counts,
)

from cheems_ref import budget, roofline

ROOMS = (budget, roofline)

READ, COPIED = "sum(map(_size, self.read))", 'copied = 0 if name.endswith("_") else'
UNNAMED = " or _tensors([given.get(name) for name in changed])"
PAIRS = "own * (own + 1) // 2 + (l - own) * s"

# fmt: off
MISTAKES = mistakes([
    (operators_move_what_they_read_and_write, {
        "results are not written": [(READ + " + written", READ)],
        "tensors are not read": [(READ + " + written", "written")],
        "a repeated row counts in full": [("strict=True) if step)", "strict=True))")],
        "whole tables are read": [("if name in GATHERS:", "if name in ():")],
        "whole targets are changed": [('if name.rstrip("_") in SCATTERS', "if name in ()")],
        "a copy costs nothing": [(COPIED, "copied = 0 if True else")],
        "what is overwritten is read": [("if name in OVERWRITERS:", "if name in ():")],
        "a shape is read": [('name in MAKERS or name.startswith("new_")', "name in MAKERS")],
        "a result that is there is read": [("if name not in out]", "]")],
        "without a result nothing is done": [(UNNAMED, "")],
        "a row for each bag": [("entries = indices.numel()", "entries = indices.shape[0]")],
        "a bag reads its table": [("for t in self.read if t is not table)", "for t in self.read)")],
        "views move": [(" and not call.is_view()", "")],
        "two bytes": [("entries * t.element_size()", "entries * 2")]}),
    (attention_counts_allowed_pairs, {
        "all pairs": [('(causal if self.given.get("is_causal") else l * s)', "l * s")],
        "aligned at the end": [(PAIRS, "l * s - l * (l - 1) // 2")],
        "backward as forward": [('5 if "grad_out" in self.given else 2', "2")],
        "one head": [("products * b * h * p", "products * b * p")]}),
    *((passes_compute_what_the_budget_counts, "SHSRAH", {what: [edit]}) for what, edit in (
        ("products are not counted", ("flop_registry.get(self.function.overloadpacket)", "None")),
        ("no backward pass", ("if training:", "if False:")),
        ("one row", ("config, (batch, length)", "config, (1, length)")))),
    *((operators_are_those_of_a_real_pass, "SEIE", {what: [edit]}) for what, edit in (
        ("a layer without its norm", ("functional_call(norm, own[0], x)", "x")),
        ("a layer without the sum", ("return x + functional_call", "return functional_call")),
        ("another batch", ("config, (batch, length)", "config, (1, length)")))),
    (a_machine_takes_the_larger_of_two_times, {
        "both times": [("max(one.flops / self.flops, one.moved / self.bandwidth)",
                        "one.flops / self.flops + one.moved / self.bandwidth")],
        "the smaller": [("max(one.flops", "min(one.flops")],
        "a call for nothing": [("self.launch + ", "")]}),
    (layers_count_as_often_as_they_stand, {
        "each letter once": [("max(1, config.pattern.count(part)) * ", "")]}),
])
