"""Mistakes that the properties of test_convolution.py must catch."""

import test_convolution as tests
from planting import mistakes

from cheems_ref import convolution

ROOMS = (convolution,)


# fmt: off
MISTAKES = mistakes([
    (tests.skips_padding, {
        "history ends with the padding": [
            ("newest = padding_mask.sum(", "newest = (padding_mask | True).sum(")],
        "taps reversed": [("weight.unbind(1)", "weight.flip(1).unbind(1)")]}),
])
# fmt: on
HELD = {mistake.asked() for mistake in MISTAKES}  # test_convolution.py asks all of them
