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

# fmt: off
MISTAKES = mistakes([
    (operators_move_what_they_read_and_write, {
        "results are not written": [("(*read, *written))", "(*read,))")],
        "tensors are not read": [("(*read, *written))", "(*written,))")],
        "a repeated row counts in full": [("strict=True) if step)", "strict=True))")],
        "whole tables are read": [("if name in GATHERS:", "if name in ():")],
        "a row for each bag": [("entries = indices.numel()", "entries = indices.shape[0]")],
        "a bag reads its table": [("for t in tensors if t is not table)", "for t in tensors)")],
        "views move": [("and not _is_view(function)", "")],
        "two bytes": [("entries * t.element_size()", "entries * 2")]}),
    (attention_counts_allowed_pairs, {
        "all pairs": [('if given.get("is_causal") else l * s', "if False else l * s")],
        "nobody sees itself": [("l * (l - 1) // 2 if", "l * (l + 1) // 2 if")],
        "backward as forward": [('5 if "grad_out" in given else 2', "2")],
        "one head": [("products * b * h * p", "products * b * p")]}),
    *((passes_compute_what_the_budget_counts, "SHSRAH", {what: [edit]}) for what, edit in (
        ("products are not counted", ("flop_registry.get(function.overloadpacket)", "None")),
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
