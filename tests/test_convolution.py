"""The short convolution: padding, its history, torch's. The table of operators asks the rest."""

import math

import definitions
import torch
import torch.nn.functional as F
from properties import normal, rows

import cheems_ref.convolution as convolution
from cheems_ref.verify import check, check_gradients

TENSORS = U, WEIGHT, HISTORY = normal(2, 9, 3), normal(3, 4, seed=1), normal(2, 3, 3, seed=2)
PADDED = rows("..#.##.##", "#.##...#."), rows(".........", "########.")


def skips_padding(m):
    """Real tokens and the history are those of the row without its padding, of any content."""
    for real in PADDED:

        def ours(u, weight, history, real=real):
            u = u.masked_fill(~real[..., None], math.nan)
            y, newest = m.short_convolution(u, weight, padding_mask=real, history=history)
            return y[real], newest

        def loop(u, weight, history, real=real):
            ends = history.split(1)
            pairs = [
                definitions.convolution(u[i : i + 1, row], weight, ends[i])
                for i, row in enumerate(real)
            ]
            return torch.cat([y[0] for y, _ in pairs]), torch.cat([newest for _, newest in pairs])

        for name, a, e in zip(("y", "history"), ours(*TENSORS), loop(*TENSORS), strict=True):
            check(f"padded = alone, {name}", a, e)
        check_gradients("padded = alone", ours, loop, TENSORS)


def history_keeps_nothing_else(m):
    """It is no view of the channels, which would keep all of them in memory with it."""
    for padding in (None, PADDED[0]):
        _, newest = m.short_convolution(U, WEIGHT, padding_mask=padding, history=HISTORY)
        assert newest.untyped_storage().nbytes() == newest.nbytes


def test_short_convolution_skips_padding():
    skips_padding(convolution)


def test_history_keeps_nothing_else():
    history_keeps_nothing_else(convolution)


def test_short_convolution_is_that_of_torch():
    want = F.silu(F.conv1d(F.pad(U.mT, (3, 0)), WEIGHT[:, None], groups=3)).mT
    check("short convolution = conv1d", convolution.short_convolution(U, WEIGHT)[0], want)
