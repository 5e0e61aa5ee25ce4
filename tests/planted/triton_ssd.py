"""Mistakes that the properties of test_triton_ssd.py must catch."""

from planting import mistakes
from test_triton_ssd import SHAPES, is_the_recurrence, triton_ssd

ROOMS = (triton_ssd,)
WRITTEN, DECAYED = "(to_end * steps)[:, None]", "(tl.exp(tl.cumsum(log_decay)) * steps)[:, None]"
KEPT, HANDED = "tl.store(states + place * n * p + entry, ", "state, inside)"
PLACE = "place = tensor + rows[:, None] * "

# fmt: off
MISTAKES = [] if triton_ssd is None else mistakes([
    (is_the_recurrence, SHAPES["ragged"], {
        "no mask at the ragged end": [
            ("tl.load(dt + rows, inside, 0.0)", "tl.load(dt + rows * inside)")],
        "decay on the wrong side": [(WRITTEN, DECAYED)],
        "the decay of one token": [("tl.exp(tl.sum(log_decay)))", "tl.exp(tl.max(log_decay)))")],
        "what a chunk wrote instead of what it is handed": [
            (KEPT + HANDED, KEPT + "write, inside)")],
        "the carried state does not decay": [
            ("state = tl.load(decays + place) * state + write", "state = state + write")],
        "reads without decay": [("tl.exp(since)[:, None] * tl.dot(Q", "tl.dot(Q")],
        "decay from the token before": [
            ("tl.exp(since)[:, None]", "tl.exp(since - log_decay)[:, None]")],
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
    (is_the_recurrence, SHAPES["long chunks"], {
        "the state of the first chunk": [("place * n + i, p, i < n, P)", "i, p, i < n, P)")]}),
])
