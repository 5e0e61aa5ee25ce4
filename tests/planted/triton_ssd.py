"""Mistakes that the properties of test_triton_ssd.py must catch."""

from planting import mistakes
from test_triton_ssd import (
    SHAPES,
    STATUS,
    is_differentiable,
    is_the_recurrence,
    large_steps_lose_no_digits,
    triton_ssd,
)

ROOMS = (triton_ssd,)
TO_END, FROM_START = "(whole - since).to(tl.float32)", "since.to(tl.float32)"

# fmt: off
MISTAKES = [] if not STATUS.available else mistakes([
    (is_the_recurrence, SHAPES["ragged"], {
        "no mask at the ragged end": [
            ("tl.load(decay + rows, inside, 0.0)", "tl.load(decay + rows * inside)")],
        "decay on the wrong side": [(TO_END, FROM_START)]}),
    (is_the_recurrence, SHAPES["several tiles"], {
        "every tile has the first channels": [("part * P + tl.arange", "tl.arange")],
        "only the last entries of the state are read": [
            ("tl.trans(K), scores, ", "tl.trans(K), tl.zeros_like(scores), ")]}),
    (is_the_recurrence, SHAPES["groups"], {
        "tiled groups": [("+ head // (h // g)", "+ head % g")]}),
    (large_steps_lose_no_digits, {
        "sums of float32": [("inside, 0.0).to(tl.float64)", "inside, 0.0)")]}),
    (is_differentiable, SHAPES["ragged"], {
        "backwards, but with each token's own decay": [
            ("F.pad(decay[:, 1:], (0, 0, 0, 1))", "decay")],
        "dC reads with x": [("decay, x, to_y, state.mT", "decay, to_y, x, state.mT")],
        "A's gradient counts what was written later": [(" - dt * written", "")],
        "the final state has no gradient": [("dfinal.mT, ctx.q", "0 * dfinal.mT, ctx.q")]}),
    (is_differentiable, SHAPES["groups"], {
        "one head's gradient for its group": [(".sum(3) for t", ".select(3, 0) for t")]}),
])

HELD = [mistake.asked() for mistake in MISTAKES]  # by test_triton_ssd.py
