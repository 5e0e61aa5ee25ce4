"""Mistakes that the properties of test_roofline.py must catch."""

from planting import mistakes
from test_roofline import HELD as HELD
from test_roofline import attention_counts_allowed_pairs, operators_move_what_they_read_and_write

from cheems_ref import roofline

ROOMS = (roofline,)

# fmt: off
MISTAKES = mistakes([
    (operators_move_what_they_read_and_write, {
        "a repeated row counts in full": [("strict=True) if step)", "strict=True))")],
        "whole tables are read": [("if name in GATHERS:", "if name in ():")],
        "views move": [(" and not call.is_view()", "")]}),
    (attention_counts_allowed_pairs, {
        "all pairs": [('(causal if self.given.get("is_causal") else l * s)', "l * s")]}),
])
