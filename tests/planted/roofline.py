"""Mistakes that the properties of test_roofline.py must catch."""

from planting import mistakes
from test_roofline import (
    HELD as HELD,
)
from test_roofline import (
    a_machine_takes_the_larger_of_two_times,
    attention_counts_allowed_pairs,
    backward_passes_compute_twice_the_forward,
    operators_are_those_of_a_real_pass,
    operators_move_what_they_read_and_write,
)

from cheems_ref import roofline

ROOMS = (roofline,)

# fmt: off
MISTAKES = mistakes([
    (operators_move_what_they_read_and_write, {
        "results are not written": [("sum(map(_size, self.read)) + written",
                                     "sum(map(_size, self.read))")],
        "a repeated row counts in full": [("strict=True) if step)", "strict=True))")],
        "whole tables are read": [("if name in GATHERS:", "if name in ():")],
        "a bag reads its table": [("for t in self.read if t is not table)", "for t in self.read)")],
        "views move": [(" and not call.is_view()", "")]}),
    (attention_counts_allowed_pairs, {
        "all pairs": [('(causal if self.given.get("is_causal") else l * s)', "l * s")]}),
    (backward_passes_compute_twice_the_forward, "SHSRAH", {
        "no backward pass": [("if training:", "if False:")]}),
    (operators_are_those_of_a_real_pass, "SEIE", {
        "a layer without its norm": [("functional_call(norm, of_norm, x)", "x")]}),
    (a_machine_takes_the_larger_of_two_times, {
        "both times": [("max(one.flops / self.flops, one.moved / self.bandwidth)",
                        "one.flops / self.flops + one.moved / self.bandwidth")]}),
])
