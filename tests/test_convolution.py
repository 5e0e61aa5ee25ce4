"""The short convolution: against a loop, and planted mistakes that must show."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import cheems_ref.convolution as convolution_module
from cheems_ref.convolution import short_convolution
from cheems_ref.verify import check, check_gradients, must_differ


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


def rounds_once(m, dtype=torch.bfloat16):
    """Every entry lies within half a unit in its last place of what float64 gives."""
    u, weight, history, mask = inputs(length=200, dtype=dtype)
    y, newest = m.short_convolution(u, weight, padding_mask=mask, history=history)
    assert y.dtype == newest.dtype == dtype
    want = convolution(u.double(), weight.double(), mask, history.double())[0][mask]
    error = (y.double()[mask] - want).abs()
    assert (error <= 0.51 * torch.finfo(dtype).eps * want.abs() + 1e-6).all()


def is_causal(m):
    """Moving token j moves y_j, changes no bit of what came before, and no other row or channel."""
    u, weight, history, _ = inputs()
    before, _ = m.short_convolution(u, weight, history=history)
    for j, i in itertools.product(range(9), range(3)):
        moved = u.clone()
        moved[0, j, i] += 1
        after, _ = m.short_convolution(moved, weight, history=history)
        check(f"token {j} moves nothing before it", after[0, :j], before[0, :j])
        check(f"token {j} moves no other row", after[1], before[1])
        others = [k for k in range(3) if k != i]
        check(f"channel {i} moves no other", after[..., others], before[..., others])
        must_differ(f"token {j} moved", after[0, j, i], before[0, j, i])


def history_keeps_nothing_else(m):
    """It is no view of the channels, which would keep all of them in memory with it."""
    u, weight, history, mask = inputs()
    for padding in (None, mask):
        _, newest = m.short_convolution(u, weight, padding_mask=padding, history=history)
        assert newest.untyped_storage().nbytes() == newest.nbytes


@pytest.mark.parametrize("length", [0, 1, 2, 9])
@pytest.mark.parametrize("d_conv", [1, 2, 4])
def test_short_convolution_is_the_loop(d_conv, length):
    is_the_loop(convolution_module, d_conv, length)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_convolution_rounds_to_sixteen_bits_once(dtype):
    rounds_once(convolution_module, dtype)


def test_nothing_before_a_token_moves_with_it():
    is_causal(convolution_module)


def test_history_keeps_nothing_else_in_memory():
    history_keeps_nothing_else(convolution_module)


def test_short_convolution_is_that_of_torch():
    u, weight, *_ = inputs()
    padded = F.pad(u.mT, (weight.shape[1] - 1, 0))
    want = F.silu(F.conv1d(padded, weight[:, None], groups=u.shape[2])).mT
    check("short convolution = grouped conv1d", short_convolution(u, weight)[0], want)


# --- bad input --------------------------------------------------------------------------------


# One argument, what is done to a good one, and what the message says.
# fmt: off
BAD = [
    ("u", lambda t: t[0], r"u must be \(b, l, d\), got shape \(9, 3\)"),
    ("u", lambda t: t.long(), r"u must be floating-point, got torch\.int64"),
    ("weight", lambda t: t[0], r"weight must be \(d, d_conv\).*got shape \(4,\)"),
    ("weight", lambda t: t[:2], r"weight must be \(d, d_conv\) = \(3, d_conv\), got .*\(2, 4\)"),
    ("weight", lambda t: t[:, :0], "d_conv must be at least 1, got 0"),
    ("weight", lambda t: t.long(), r"weight must be floating-point, got torch\.int64"),
    ("padding_mask", lambda t: t.float(), r"padding_mask must be torch\.bool here.*float32"),
    ("padding_mask", lambda t: t[:, 1:], r"padding_mask must be .* = \(2, 9\).*\(2, 8\)"),
    ("history", lambda t: t.float(), r"history must be torch\.float64 here.*float32"),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize(("name", "change", "message"), BAD)
    def test_is_refused_with_its_name_and_numbers(self, name, change, message):
        good = dict(zip(("u", "weight", "history", "padding_mask"), inputs(), strict=True))
        with pytest.raises(ValueError, match=message):
            short_convolution(**good | {name: change(good[name])})

    @pytest.mark.parametrize("shape", [(2, 4, 3), (2, 2, 3), (1, 3, 3), (2, 3, 1), (3, 3)])
    def test_history_of_another_shape(self, shape):
        u, weight, *_ = inputs()
        numbers = ", ".join(map(str, shape))
        with pytest.raises(ValueError, match=rf"history must be .*\(2, 3, 3\).*\({numbers}\)"):
            short_convolution(u, weight, history=u.new_zeros(shape))
