"""Mistakes in verify: a question that no longer sees the fault it is for."""

from planting import mistakes
from test_verify import FAULTS, names_what_does_not_learn, refuses

from cheems_ref import verify

ROOMS = (verify,)
TWELVE = ("_random((3, 3 * border + 5, width), 0)", "_random((3, 12, width), 0)")
HELD = {f"refuses, {ask.__name__}, {fault}" for ask, fault in FAULTS}


# fmt: off
MISTAKES = mistakes([
    (refuses, "is_causal", "length", {
        "the whole is asked again": [("asked.y(asked.x[:, :t]), asked.whole",
                                      "asked.whole[:, :t], asked.whole")],
        "what is apart is passed": [("if not worst <= allowed:\n            say",
                                     "if worst < 0:\n            say")]}),
    (refuses, "is_causal", "later, beside large numbers", {
        "rounding of the largest": [("32 * eps * wide.abs())", "32 * eps * _largest(wide))")]}),
    (refuses, "is_causal", "a little later", {
        "a difference as such": [("32 * eps * wide.abs()", "1e-6")]}),
    (refuses, "is_causal", "writes into x", {
        "x itself is handed out": [("self.call(self.module, x.clone(), ids.clone(), None, None)",
                                    "self.call(self.module, x, ids, None, None)")]}),
    (refuses, "rows_are_independent", "batch", {
        "the whole is asked again": [("asked.y(asked.x[one], ids[one])", "whole[one]")],
        "the wrong row": [("asked.y(asked.x[one], ids[one])", "asked.y(asked.x[:1], ids[:1])")]}),
    (refuses, "rows_are_independent", "positions of row 0", {
        "positions alike": [("asked.ids * (torch.arange", "asked.ids * (0 * torch.arange")]}),
    (refuses, "pieces_equal_one_pass", "forgets the cache", {
        "one piece": [("for piece in pairwise((0, *cuts, length))",
                       "for piece in ((0, length),)")]}),
    (refuses, "padding_changes_nothing", "pads in front", {
        "behind alone": [('"in front": at >= length - n, ', "")],
        "the mask is forgotten": [(".clamp(min=0), real, None)", ".clamp(min=0), None, None)")],
        "no row is shorter": [("[length - n for n in (0, *cut", "[length for n in (0, *cut")]}),
    (refuses, "padding_changes_nothing", "pads behind", {
        "in front alone": [(', "behind": at < n', "")]}),
    (refuses, "padding_changes_nothing", "NaN without padding", {
        "NaN is passed over": [("nan_to_num(torch.inf)", "nan_to_num(0.0)")]}),
    (refuses, "shift_changes_nothing", "position", {
        "no shift": [("asked.ids + n", "asked.ids")]}),
    (refuses, "is_causal", "the last of a chunk reads the next", {
        "twelve tokens": [TWELVE],
        "between borders alone": [("tried.union(self.near(1, 2, 3, 16, 32, 48))", "tried"),
                                  ("*range(0, length, 16), ", "")]}),
    (refuses, "rows_are_independent", "rows, after a chunk", {"twelve tokens": [TWELVE]}),
    (refuses, "pieces_equal_one_pass", "a whole chunk is forgotten", {
        "twelve tokens": [TWELVE]}),
    (refuses, "padding_changes_nothing", "padding of a chunk", {
        "by one and two tokens alone": [(", *asked.near(1), *(length", ", *(length")]}),
    (refuses, "shift_changes_nothing", "position, after a chunk", {"twelve tokens": [TWELVE]}),
    (names_what_does_not_learn, {
        "twelve tokens": [TWELVE],
        "zero is enough": [("if seen[n] <= rounding]", "if False]")],
        "no gradient is enough": [("for n, size in sizes.items() if size is None]",
                                   "for n, size in sizes.items() if False]")],
        "NaN is enough": [("if not seen[n] < torch.inf]", "if False]")]}),
])
