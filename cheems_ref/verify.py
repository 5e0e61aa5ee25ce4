"""The one verifier: every equality that a notebook or a test claims goes through `check`.

A check is named for the theorem it shows. It compares against a tolerance declared per dtype,
relative to the largest entry of the truth:

    max |actual - expected|  ≤  tol · max(1, max |expected|)

What it prints holds the claim and the declared tolerance, never the measured error, so that the
line is the same on every machine. `must_differ` is the control: a planted mistake has to be seen.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.complex128: 1e-10,
    torch.complex64: 1e-5,
}


def check(name: str, actual: Tensor, expected: Tensor, *, tol: float | None = None) -> None:
    """Check that two tensors are equal up to rounding, and print one line that says so.

    Args:
        name: the theorem, such as "quadratic form = recurrence".
        actual: any shape.
        expected: same shape and dtype as `actual`.
        tol: relative to max(1, largest |expected|); None for the dtype's entry of `TOLERANCE`.
            Booleans and integers are compared exactly, and take none.

    Raises:
        ValueError: `tol` is negative, NaN or infinite, or given for booleans or integers.
        AssertionError: shape or dtype differ, an entry is NaN or infinite, or an error is above
            the tolerance; the message holds the largest error and its index.
    """
    _must_agree(name, actual, expected, tol)
    print(f"✓ {name}  [{_precision(actual, tol)}]")


def check_gradients(
    name: str,
    actual: Callable[..., Tensor | tuple[Tensor, ...]],
    expected: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    *,
    tol: float | None = None,
) -> None:
    """Check that two functions have the same gradient with respect to every input.

    Both are called on copies of `inputs`; their outputs, all of them, are weighted with the same
    random numbers and summed, and the sum is differentiated.

    Args:
        name: the theorem.
        actual: a function of the inputs that returns a tensor or a tuple of tensors.
        expected: the function that it should equal.
        inputs: floating-point tensors.
        tol: as in `check`, for each gradient.

    Raises:
        AssertionError: the outputs differ in number, shape or dtype, an input does not reach the
            output of one function, or the gradients differ; the message says for which input.
        ValueError: as in `check`.
    """
    (outputs, got), (wanted, want) = _gradients(actual, inputs), _gradients(expected, inputs)
    if len(outputs) != len(wanted):
        raise AssertionError(f"{name}: {len(outputs)} outputs, not {len(wanted)}")
    for i, (a, e) in enumerate(zip(outputs, wanted, strict=True)):
        _tolerance(f"{name}, output {i}", a, e, None)
    for i, (a, e) in enumerate(zip(got, want, strict=True)):
        label = f"{name}, gradient of input {i}"
        if a is None or e is None:
            raise AssertionError(f"{label}: the input does not reach the output")
        _must_agree(label, a, e, tol)
    print(f"✓ {name}: {len(got)} gradient{'s' * (len(got) > 1)}  [{_precision(got[0], tol)}]")


def must_differ(name: str, wrong: Tensor, right: Tensor, *, at_least: float = 1e-3) -> float:
    """Check that a planted mistake is seen: the two tensors must differ by a wide margin.

    Args:
        name: what was planted, such as "sum over the wrong axis".
        wrong: what the mistake gives.
        right: same shape and dtype as `wrong`.
        at_least: smallest difference that counts, relative to max(1, largest |right|). It has to
            lie above the tolerance of `check`, or the check would not have seen the mistake.

    Returns:
        The largest difference, relative to max(1, largest |right|); infinity if `wrong` holds an
        entry that is NaN or infinite.

    Raises:
        AssertionError: shape or dtype differ, `right` is not finite, or the difference is smaller.
    """
    if at_least <= _tolerance(name, wrong, right, None):
        raise AssertionError(f"{name}: at_least = {at_least:g} is within the tolerance of a check")
    _refuse_non_finite(f"{name}: the right one", right)
    scale = max(1.0, _largest(right))
    if not wrong.isfinite().all():
        difference = torch.inf
    else:
        difference = _largest(_wide(wrong) - _wide(right)) / scale
    if not difference >= at_least:
        raise AssertionError(
            f"{name}: the planted mistake changes no entry by more than {difference:.3g} "
            f"(relative), less than {at_least:g}: a check would not catch it"
        )
    print(f"✗ {name}: caught  [differs by more than {at_least:g}]")
    return difference


def _tolerance(name, actual, expected, tol):
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, not {expected.dtype}")
    if tol is None:
        return TOLERANCE.get(actual.dtype, 0.0)
    if actual.dtype not in TOLERANCE:
        raise ValueError(f"{name}: {actual.dtype} is compared exactly, without a tolerance")
    if not 0 <= tol < torch.inf:
        raise ValueError(f"{name}: a tolerance is a finite number of at least 0, got {tol}")
    return tol


def _must_agree(name, actual, expected, tol):
    """Raise where the largest |actual - expected| is above the tolerance, and say where that is."""
    tol = _tolerance(name, actual, expected, tol)
    _refuse_non_finite(f"{name}: actual", actual)
    _refuse_non_finite(f"{name}: expected", expected)
    if actual.numel() == 0:
        return
    error = (_wide(actual) - _wide(expected)).abs()
    if actual.dtype not in TOLERANCE:
        error = error.maximum((actual != expected).double())  # float64 rounds large integers
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    worst, allowed = error[index].item(), tol * max(1.0, _largest(expected))
    if not worst <= allowed:
        raise AssertionError(
            f"{name}: entries differ by up to {worst:.3g}, at index {index}: "
            f"{actual[index].item():.6g} instead of {expected[index].item():.6g}; "
            f"allowed is {allowed:.3g} (tolerance {tol:g})"
        )


def _wide(t):
    """t in a dtype that holds every other, so that sixteen-bit differences do not round away."""
    return t.detach().to(torch.complex128 if t.is_complex() else torch.float64)


def _largest(t):
    return _wide(t).abs().max().item() if t.numel() else 0.0


def _refuse_non_finite(name, t):
    bad = ~t.isfinite()
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        count = int(bad.sum())
        raise AssertionError(f"{name}: {count} entries are NaN or infinite, the first at {index}")


def _gradients(function, inputs):
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum(
            (y * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)).sum()
            for y in outputs
        )
        return outputs, torch.autograd.grad(total, inputs, allow_unused=True)


def _precision(t, tol):
    dtype = str(t.dtype).removeprefix("torch.")
    tol = TOLERANCE.get(t.dtype, 0.0) if tol is None else tol
    return f"{dtype}, tolerance {tol:g}" if t.dtype in TOLERANCE else f"{dtype}, exact"
