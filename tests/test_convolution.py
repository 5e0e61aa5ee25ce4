"""The short convolution: against a loop, and planted mistakes that must show."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import cheems_ref.convolution as convolution_module
from cheems_ref.convolution import short_convolution
from cheems_ref.verify import check, check_gradients


def convolution(u, weight, mask=None, history=None):
    """silu(Σ_i w_i u_{t-i}) and the history, one row, token and tap at a time; 0 at padding."""
    (b, length, d), d_conv = u.shape, weight.shape[1]
    mask = torch.ones(b, length).bool() if mask is None else mask
    history = u.new_zeros(b, d_conv - 1, d) if history is None else history
    y, newest = [], []
    for i in range(b):
        past = list(history[i])
        for t in range(length):
            total = torch.zeros_like(u[i, t])
            if mask[i, t]:
                past.append(u[i, t])
                total = sum(weight[:, -1 - k] * past[-1 - k] for k in range(d_conv))
            y.append(total * total.sigmoid())
        newest += past[len(past) - (d_conv - 1) :]
    y = torch.stack(y).view_as(u) if y else u
    return y, torch.stack(newest).view_as(history) if newest else history


def inputs(d_conv=4, length=9, dtype=torch.float64):
    """u, weight, history and a mask under which row 0 starts with padding and row 1 does not."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, length, 3), (3, d_conv), (2, d_conv - 1, 3))
    tensors = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    mask = torch.rand(2, length, generator=generator) < 0.6
    mask[:, :1] = torch.tensor([[False], [True]])
    return *tensors, mask


def is_the_loop(m, d_conv=4, length=9):
    """In both results and their gradients, with and without history and padding of any content."""
    u, weight, history, mask = inputs(d_conv, length)
    for padding, past in itertools.product((None, mask), ((), (history,))):
        ignored = torch.zeros_like(mask) if padding is None else ~padding

        def actual(u, weight, *past, padding=padding, ignored=ignored):
            past = past[0] if past else None
            y, newest = m.short_convolution(u, weight, padding_mask=padding, history=past)
            return y.masked_fill(ignored[..., None], 0), newest

        def expected(u, weight, *past, padding=padding):
            return convolution(u, weight, padding, *past)

        given = (u.masked_fill(ignored[..., None], math.nan), weight, *past)
        versions = [t._version for t in given]
        results = actual(*given)
        assert versions == [t._version for t in given], "an input is written into"
        for name, a, e in zip(("y", "history"), results, expected(*given), strict=True):
            check(f"short convolution = loop, {name}", a, e)
        if length:
            check_gradients("short convolution = loop", actual, expected, given)


def rounds_once(m, dtype):
    """Every entry lies within half a unit in its last place of what float64 gives."""
    u, weight, history, mask = inputs(length=200, dtype=dtype)
    y, newest = m.short_convolution(u, weight, padding_mask=mask, history=history)
    assert y.dtype == newest.dtype == dtype
    want = convolution(u.double(), weight.double(), mask, history.double())[0][mask]
    error = (y.double()[mask] - want).abs()
    assert (error <= 0.51 * torch.finfo(dtype).eps * want.abs() + 1e-6).all()


def history_keeps_nothing_else(m):
    """It is no view of the channels, which would keep all of them in memory with it."""
    u, weight, history, mask = inputs()
    for padding in (None, mask):
        _, newest = m.short_convolution(u, weight, padding_mask=padding, history=history)
        assert newest.untyped_storage().nbytes() == newest.nbytes


@pytest.mark.parametrize("d_conv", [1, 2, 4])
def test_short_convolution_is_the_loop(d_conv):
    for length in (0, 1, 2, 9):
        is_the_loop(convolution_module, d_conv, length)


def test_history_keeps_nothing_else_and_sixteen_bits_are_rounded_once():
    history_keeps_nothing_else(convolution_module)
    rounds_once(convolution_module, torch.float16)


def test_short_convolution_is_that_of_torch():
    u, weight, *_ = inputs()
    padded = F.pad(u.mT, (weight.shape[1] - 1, 0))
    want = F.silu(F.conv1d(padded, weight[:, None], groups=u.shape[2])).mT
    check("short convolution = grouped conv1d", short_convolution(u, weight)[0], want)


@pytest.mark.usefixtures("unchecked")
def test_a_convolution_of_no_taps_is_refused():
    u, weight, *_ = inputs()
    with pytest.raises(ValueError, match="d_conv must be at least 1, got 0"):
        short_convolution(u, weight[:, :0])
