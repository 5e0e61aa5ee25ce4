"""Mistakes in verify: a question that no longer sees the fault it is for."""

from planting import mistakes
from test_verify import FAULTS, names_what_does_not_learn, refuses

from cheems_ref import verify

ROOMS = (verify,)
HELD = {f"refuses, {ask.__name__}, {fault}" for ask, fault in FAULTS}


# fmt: off
MISTAKES = mistakes([
    (refuses, "is_causal", "length", {
        "the whole is asked again": [("asked.y(asked.x[:, :t]), asked.whole",
                                      "asked.whole[:, :t], asked.whole")],
        "what is apart is passed": [("if not worst <= allowed:\n        raise Refuted",
                                     "if worst < 0:\n        raise Refuted")]}),
    (refuses, "rows_are_independent", "batch", {
        "the whole is asked again": [("asked.y(asked.x[i : i + 1])", "asked.whole[i : i + 1]")],
        "the wrong row": [("asked.y(asked.x[i : i + 1])", "asked.y(asked.x[:1])")]}),
    (refuses, "pieces_equal_one_pass", "forgets the cache", {
        "one piece": [("in pairwise((0, *cuts, length)):\n            y, cache",
                       "in ((0, length),):\n            y, cache")],
        "the cache is not handed on": [("None, cache)\n            if",
                                        "None, None)\n            if")]}),
    (refuses, "padding_changes_nothing", "pads in front", {
        "behind alone": [('("in front", "behind")', '("behind",)')],
        "the mask is forgotten": [(".clamp(min=0), real, None)", ".clamp(min=0), None, None)")],
        "no row is shorter": [("length - min(i, length - 1)", "length")]}),
    (refuses, "padding_changes_nothing", "pads behind", {
        "in front alone": [('("in front", "behind")', '("in front",)')]}),
    (refuses, "shift_changes_nothing", "position", {
        "no shift": [("asked.ids + shift", "asked.ids")]}),
    (names_what_does_not_learn, {
        "zero is enough": [("g is not None and not g.any()", "False")],
        "no gradient is enough": [("zip(named, grads, strict=True) if g is None]",
                                   "zip(named, grads, strict=True) if False]")],
        "NaN is enough": [("not g.isfinite().all()\n        ],", "False\n        ],")],
        "the whole table": [("not g.any()", "not g.all()")]}),
])
