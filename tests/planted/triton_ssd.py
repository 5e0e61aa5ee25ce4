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
KEPT, HANDED = "tl.store(states + place * n * p + entry, ", "state, inside)"
PLACE = "place = tensor + rows[:, None] * "

# fmt: off
MISTAKES = [] if not STATUS.available else mistakes([
    (is_the_recurrence, SHAPES["ragged"], {
        "no mask at the ragged end": [
            ("tl.load(dt + rows, inside, 0.0)", "tl.load(dt + rows * inside)")],
        "decay on the wrong side": [(TO_END, FROM_START)],
        "the decay of one token": [("whole = tl.min(since)", "whole = tl.max(since)")],
        "what a chunk wrote instead of what it is handed": [
            (KEPT + HANDED, KEPT + "write, inside)")],
        "the carried state does not decay": [
            ("state = tl.load(decays + place) * state + write", "state = state + write")],
        "a state that is decayed once more": [
            ("before_chunk = decay * tl.dot(", "before_chunk = decay * decay * tl.dot(")],
        "reads without decay": [("before_chunk = decay * tl.dot(", "before_chunk = tl.dot(")],
        "decay of the whole chunk": [
            ("decay = tl.exp(since.to(", "decay = tl.exp((since * 0 + tl.min(since)).to(")],
        "blind to itself": [("t[:, None] >= t[None, :]", "t[:, None] > t[None, :]")],
        "sees ahead": [("t[:, None] >= t[None, :]", "t[:, None] <= t[None, :]")],
        "no step in the chunk": [("tl.dot(scores, steps[:, None] * X", "tl.dot(scores, X")],
        "tokens before the chunk forgotten": [("inside_chunk + before_chunk", "inside_chunk")],
        "a wrong stride": [(PLACE + "n_columns", PLACE + "(n_columns - 1)")]}),
    (is_the_recurrence, SHAPES["groups"], {
        "groups in turn": [("+ head // (h // g)", "+ head % g", 2)],
        "one row of the batch": [("mine = row * tl.num_programs(0) + head", "mine = head")],
        "a row as short as a chunk": [("(row * l + t) * h", "(row * q + t) * h", 2)]}),
    (is_the_recurrence, SHAPES["odd sizes"], {
        "the last column left out": [("(column < n_columns)", "(column < n_columns - 1)")]}),
    (large_steps_lose_no_digits, {
        "sums of float32": [("steps.to(tl.float64) * tl.load(A + head).to(tl.float64)",
                             "steps * tl.load(A + head)")]}),
    (is_the_recurrence, SHAPES["long chunks"], {
        "the state of the first chunk": [("place * n + i, p, i < n, P)", "i, p, i < n, P)")]}),
])
