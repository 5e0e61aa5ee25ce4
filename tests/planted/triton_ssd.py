"""Mistakes that the properties of test_triton_ssd.py must catch."""

from planting import mistakes
from test_triton_ssd import (
    SHAPES,
    STATUS,
    is_the_recurrence,
    large_steps_lose_no_digits,
    triton_ssd,
)

ROOMS = (triton_ssd,)
TO_END, FROM_START = "(whole - since).to(tl.float32)", "since.to(tl.float32)"
PLACE = "place = tensor + rows[:, None] * "

# fmt: off
MISTAKES = [] if not STATUS.available else mistakes([
    (is_the_recurrence, SHAPES["ragged"], {
        "no mask at the ragged end": [
            ("tl.load(dt + rows, inside, 0.0)", "tl.load(dt + rows * inside)")],
        "decay on the wrong side": [(TO_END, FROM_START)]}),
    (is_the_recurrence, SHAPES["groups"], {
        "tiled groups": [("+ head // (h // g)", "+ head % g", 2)]}),
    (large_steps_lose_no_digits, {
        "sums of float32": [("steps.to(tl.float64) * tl.load(A + head).to(tl.float64)",
                             "steps * tl.load(A + head)")]}),
])

HELD = [mistake.asked() for mistake in MISTAKES]  # by test_triton_ssd.py
