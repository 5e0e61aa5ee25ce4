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
        "the whole is asked again": [("probe.y(probe.x[:, :t]), probe.whole",
                                      "probe.whole[:, :t], probe.whole")]}),
    (refuses, "is_causal", "later, beside large numbers", {
        "rounding of the largest": [("32 * eps * wide.abs())", "32 * eps * _largest(wide))")]}),
    (refuses, "is_causal", "writes into x", {
        "x itself is handed out": [("self.call(self.module, x.clone()", "self.call(self.module, x")]
        }),
    (refuses, "is_causal", "the last of a chunk reads the next", {"twelve tokens": [TWELVE]}),
    (refuses, "rows_are_independent", "positions of row 0", {
        "positions alike": [("probe.ids * torch.arange(1,", "probe.ids * torch.ones(1,"),
                            ("len(probe.x) + 1, device", "device")]}),
    (refuses, "padding_changes_nothing", "pads in front", {
        "behind alone": [('"on the left": place >= length - n, ', "")]}),
    (refuses, "padding_changes_nothing", "NaN without padding", {
        "NaN is passed over": [("nan_to_num(torch.inf)", "nan_to_num(0.0)")]}),
    (names_what_does_not_learn, {
        "zero is enough": [("if size <= rounding]", "if False]")]}),
])
