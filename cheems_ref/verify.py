"""Verification: every equality claimed in a notebook or a test is checked by `check`.

A check is named for the theorem it shows. It compares against a tolerance declared per dtype,
relative to the largest entry of the truth:

    max |actual - expected|  ≤  max(atol, tol · max |expected|)

`atol` is 0 by default. Give it for a truth that is zero, or so small that the rounding of larger
numbers decides its digits. A check prints the claim and the declared tolerance, never the measured
error, so the line is the same on every machine. `must_differ` is the control: a planted mistake has
to be seen.

Six properties test a layer, or a whole model, without a second definition to compare with:

    is_causal, rows_are_independent, pieces_equal_one_pass, padding_changes_nothing,
    shift_changes_nothing, every_parameter_learns

Each takes `(module, x)`; x is (b, l, d), token ids (b, l), or a width d for random x. The module is
called as `(x)` or `(x, position_ids, *, padding_mask, cache)`, with the arguments that its forward
names. For any other module, pass a `call` such as `common_call`.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.complex128: 1e-10,
    torch.complex64: 1e-5,
}
# Attributes that hold the tokens per chunk or window of a module.
BORDERS = ("chunk_size", "window", "window_size", "sliding_window", "k_keys", "top_k")

X = Tensor | int  # x, or the width of random x
Ints, Tol, Mask = Sequence[int], float | None, Tensor | None
Map, Tensors = Callable[..., Tensor | tuple[Tensor, ...]], Sequence[Tensor]


def check(name: str, actual: Tensor, expected: Tensor, *, tol: Tol = None, atol: float = 0) -> None:
    """Check that two tensors are equal up to rounding, and print one line that says so.

    Args:
        name: the theorem, such as "quadratic form = recurrence".
        actual: any shape.
        expected: same shape and dtype as `actual`.
        tol: relative to the largest |expected|; None for the dtype's entry of `TOLERANCE`.
            Booleans and integers are compared exactly, without one.
        atol: absolute error that is always allowed, for an `expected` that is zero or consists of
            rounding.

    Raises:
        ValueError: `tol` or `atol` is negative, NaN or infinite, or given for booleans or integers.
        AssertionError: `actual` is None, shape or dtype differ, an entry is NaN or infinite, or an
            error is above the tolerance; the message holds the largest error and its index.
    """
    __tracebackhide__ = True  # IPython and pytest leave this frame out
    if actual is None:
        raise AssertionError(f"{name}: None instead of a tensor; is a `return` missing?")
    _must_agree(name, actual, expected, tol, atol)
    print(f"✓ {name}  [{_precision(actual, tol, atol)}]")


def check_gradients(
    name: str, actual: Map, expected: Map, inputs: Tensors, *, tol: Tol = None, atol: float = 0
) -> None:
    """Check that two functions have the same gradient with respect to every input.

    Both are called on copies of `inputs`. All outputs are weighted with the same random numbers and
    summed, and the sum is differentiated.

    Args:
        name: the theorem.
        actual: a function of the inputs that returns a tensor or a tuple of tensors.
        expected: the function that it should equal.
        inputs: floating-point tensors.
        tol, atol: as in `check`. Each gradient is compared relative to its own largest entry.

    Raises:
        AssertionError: the outputs differ in number, shape or dtype, an input does not reach the
            output of one function, or the gradients differ; the message says for which input.
        ValueError: as in `check`.
    """
    __tracebackhide__ = True  # IPython and pytest leave this frame out
    (outputs, got), (wanted, want) = _gradients(actual, inputs), _gradients(expected, inputs)
    if len(outputs) != len(wanted):
        raise AssertionError(f"{name}: {len(outputs)} outputs, not {len(wanted)}")
    for i, (a, e) in enumerate(zip(outputs, wanted, strict=True)):
        _tolerance(f"{name}, output {i}", a, e, None)
    for i, (a, e) in enumerate(zip(got, want, strict=True)):
        label = f"{name}, gradient of input {i}"
        if a is None or e is None:
            raise AssertionError(f"{label}: the input does not reach the output")
        _must_agree(label, a, e, tol, atol)
    how = _precision(got[0], tol, atol)
    print(f"✓ {name}: {len(got)} gradient{'s' * (len(got) > 1)}  [{how}]")


def must_differ(name: str, wrong: Tensor, right: Tensor, *, at_least: float = 1e-3) -> float:
    """Check that a planted mistake shows: the two tensors must differ by a wide margin.

    Args:
        name: the mistake, such as "sum over the wrong axis".
        wrong: its result.
        right: same shape and dtype as `wrong`.
        at_least: smallest difference that counts, relative to the largest |right|, or to 1 if
            `right` is zero everywhere. It must exceed the tolerance of `check`, or the check would
            miss the mistake.

    Returns:
        The largest difference, relative in the same way; infinity if `wrong` holds an entry that
        is NaN or infinite.

    Raises:
        AssertionError: shape or dtype differ, `right` is not finite, or the difference is smaller.
    """
    __tracebackhide__ = True  # IPython and pytest leave this frame out
    if at_least <= _tolerance(name, wrong, right, None):
        raise AssertionError(f"{name}: at_least = {at_least:g} is within the tolerance of a check")
    _refuse_non_finite(f"{name}: the right one", right)
    difference = _largest(_wide(wrong) - _wide(right)) / (_largest(right) or 1.0)
    difference = difference if wrong.isfinite().all() else torch.inf
    if not difference >= at_least:
        raise AssertionError(
            f"{name}: the planted mistake changes no entry by more than {difference:.3g} "
            f"(relative), less than {at_least:g}: a check would not catch it"
        )
    print(f"✗ {name}: caught  [differs by more than {at_least:g}]")
    return difference


class Refuted(AssertionError):
    """A property that a module lacks; `difference` is its size, as `is_causal` returns it."""

    difference: float = torch.inf


def common_call(
    module: Callable, x: Tensor, position_ids: Tensor, padding_mask: Mask = None, cache: Any = None
) -> tuple[Tensor, Any]:
    """Call a module as this package calls its layers; to adapt another, write such a function.

    The module gets `position_ids` if its forward names it, and `padding_mask` and `cache` if they
    are not None. A result that is no tuple is taken for y.

    Args:
        module: the layer or model.
        x: (b, l, d), or token ids (b, l).
        position_ids: (b, l), integers.
        padding_mask: (b, l), bool, True for a real token; None if all are.
        cache: returned by the previous call; None for the first.

    Returns:
        y (b, l, ...) and the cache, or None.

    Raises:
        ValueError: a padding mask or a cache is given, but the forward does not name it; or the
            module has no signature.
    """
    plain = getattr(module, "_orig_mod", module)  # of torch.compile
    takes = inspect.signature(getattr(plain, "forward", plain)).parameters
    given = dict(position_ids=position_ids) if "position_ids" in takes else {}
    if padding_mask is not None:
        given["padding_mask"] = padding_mask
    if cache is not None:
        given["cache"] = cache
    for name in given.keys() - takes:
        raise ValueError(f"{_name(module)} takes no {name}: give a `call` that passes it")
    result = module(x, **given)
    return result if isinstance(result, tuple) else (result, None)


def is_causal(module: Callable, x: X, *, call: Callable = common_call, tol: Tol = None) -> float:
    """Check that the output at a token does not depend on later tokens.

    The beginning of a text, read alone, must equal its part of the whole. We try 1 to 24 tokens,
    all but the last one, every multiple of 10 and of 16, and, where chunks or windows have n
    tokens, n, 2n, 3n, 16n, 32n and 48n tokens, one fewer and one more. n is every whole number that
    the module or one of its submodules has under a name in `BORDERS`, and 64 if there is none. A
    leak across a border is missed if x ends before the border, so your own x must be longer than a
    chunk or a window. `ssd_chunked` also computes 16 chunks at a time. To reach the end of such a
    block, test a layer with a chunk_size of at most 12.

    The property holds for finite inputs. A NaN or an infinity in a later token may reach earlier
    outputs as 0 · NaN, in attention and in the quadratic and chunked forms.

    Args:
        module: without dropout, such as after `module.eval()`, and in float64 if possible: a
            difference below the rounding of the dtype passes.
        x: (b, l, d), token ids (b, l), or a width d for random x of 3 rows and 3n + 5 tokens, n
            being the largest as above, and at least 64; l ≥ 2.
        call: how to call the module, with the arguments of `common_call`.
        tol: None for the entry of `TOLERANCE` for y's dtype.

    Returns:
        The largest difference beyond rounding, relative to the largest that another x makes.

    Raises:
        Refuted: the property does not hold; the message says where, and by how much.
        AssertionError: two calls with the same x differ, y does not depend on x, has NaN, or is not
            a tensor with the rows and tokens of x.
        ValueError: x is too small, or a width where some n exceeds 512, or the module does not take
            the arguments that the property needs.
        TypeError: x is neither a tensor nor a width.
    """
    probe = _Probe("is causal", module, x, call, tol, tokens=2)
    for t in probe.lengths():
        probe.compare(f"the first {t} tokens alone", probe.y(probe.x[:, :t]), probe.whole[:, :t])
    return probe.verdict()


def rows_are_independent(
    module: Callable, x: X, *, call: Callable = common_call, tol: Tol = None
) -> float:
    """Check that no row of a batch changes another.

    Each row, read alone, must equal its row of the batch. The positions of row i are multiples of
    i + 1. Arguments, result and errors as for `is_causal`, with b ≥ 2.
    """
    probe = _Probe("rows are independent", module, x, call, tol, rows=2)
    ids = probe.ids * torch.arange(1, len(probe.x) + 1, device=probe.ids.device)[:, None]
    whole = probe.y(probe.x, ids)
    for i in range(len(whole)):
        row = slice(i, i + 1)
        probe.compare(f"row {i} alone", probe.y(probe.x[row], ids[row]), whole[row])
    return probe.verdict()


def pieces_equal_one_pass(
    module: Callable, x: X, *, cuts: Ints = (), call: Callable = common_call, tol: Tol = None
) -> float:
    """Check that several calls, each with the cache of the previous one, equal a single call.

    Arguments, result and errors as for `is_causal`, with l ≥ 5, and

    Args:
        cuts: the first token of each further call, ascending. By default we try two pieces,
            cut after each of the lengths that `is_causal` tries; pieces of 1, n - 1, n and n + 1
            tokens; and one token, two prompts, and two single tokens.
    """
    probe = _Probe("pieces = one pass", module, x, call, tol, tokens=2 if cuts else 5)
    length = probe.x.shape[1]
    if not all(a < b for a, b in pairwise((0, *cuts, length))):
        raise ValueError(f"cuts must ascend between 0 and l = {length}, got {tuple(cuts)}")
    ways = [cuts] if cuts else [(1, length // 2, length - 2, length - 1)]
    if not cuts:
        ways += [(t,) for t in probe.lengths()]
        ways += [range(n, length, n) for n in {1, *probe.near(1)} if 0 < n < length]
    for way in ways:
        cache = None
        for start, stop in pairwise((0, *way, length)):
            piece = slice(start, stop)
            y, cache = probe.run(probe.x[:, piece], probe.ids[:, piece], None, cache)
            if cache is None:
                raise ValueError(f"{_name(module)} returns no cache, so it cannot be continued")
            probe.compare(f"tokens {start} to {stop - 1}", y, probe.whole[:, piece])
    return probe.verdict()


def padding_changes_nothing(
    module: Callable, x: X, *, call: Callable = common_call, tol: Tol = None
) -> float:
    """Check that rows of unequal length, padded on the left or right, equal each row alone.

    The first row stays whole. The others lose 1, 2 ... tokens, and in further calls n - 1, n and
    n + 1 tokens, or all but as many, n as in `is_causal`. The padding contains other tokens, and
    positions count real tokens. Calls that continue from a cache of padded rows are not tested.
    Arguments, result and errors as for `is_causal`, with b ≥ 2.
    """
    probe = _Probe("padding changes nothing", module, x, call, tol, rows=2, tokens=2)
    rows, length = probe.x.shape[:2]
    cut = [*range(1, max(rows, 3)), *probe.near(1), *(length - n for n in probe.near(1))]
    cut = [n for n in dict.fromkeys(cut) if 0 < n < length]
    place = torch.arange(length, device=probe.x.device)
    for start in range(0, len(cut), rows - 1):
        missing = [0, *cut[start : start + rows - 1]]  # the first row stays whole
        missing += [0] * (rows - len(missing))  # and so does any row that is left over
        lengths = [length - n for n in missing]
        n = torch.tensor(lengths, device=place.device)[:, None]
        alone = torch.cat([probe.y(probe.x[i : i + 1, :n])[0] for i, n in enumerate(lengths)])
        for side, real in {"on the left": place >= length - n, "on the right": place < n}.items():
            padded = probe.other.clone()
            padded[real] = probe.x[place < n]
            y, _ = probe.run(padded, (real.cumsum(1) - 1).clamp(min=0), real)
            probe.compare(f"rows of {lengths} tokens, padded {side}", y[real], alone)
    return probe.verdict()


def shift_changes_nothing(
    module: Callable, x: X, *, by: Ints = (1, 1000), call: Callable = common_call, tol: Tol = None
) -> float:
    """Check that the output depends on differences of positions alone: all may be shifted.

    Arguments, result and errors as for `is_causal`, and

    Args:
        by: numbers to add to all positions.

    Raises:
        ValueError: positions have no effect on the output, so there is nothing to shift.
    """
    probe = _Probe("shift changes nothing", module, x, call, tol)
    if torch.equal(probe.y(probe.x, probe.ids.flip(1)), probe.whole):
        raise ValueError(f"positions do not change what {_name(module)} gives: nothing to shift")
    if not any(by):
        raise ValueError(f"by must contain a number other than 0, got {by}")
    for n in by:
        probe.compare(f"by {n}", probe.y(probe.x, probe.ids + n), probe.whole)
    return probe.verdict()


def every_parameter_learns(module: nn.Module, x: X, *, call: Callable = common_call) -> int:
    """Check that every parameter receives a gradient: finite, and not zero everywhere.

    A gradient within the rounding of the largest one counts as zero. Of a table, the rows that a
    call reads are enough.

    Args:
        module, x, call: as in `is_causal`; parameters that require no gradient are left out.

    Returns:
        The number of parameters checked.

    Raises:
        AssertionError: some receive none; the message names them.
        TypeError: `module` is not an nn.Module.
        ValueError: no parameter requires a gradient.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError(f"{_name(module)} has no parameter that requires a gradient")
    probe = _Probe("every parameter learns", module, x, call)
    with torch.enable_grad():
        y, _ = call(module, probe.x.clone(), probe.ids.clone(), None, None)
        if not y.requires_grad:
            raise AssertionError("every parameter learns: the output has no gradient")
        weighted = y * _random(y.shape, 2).to(y)
        grads = torch.autograd.grad(weighted.sum(), list(named.values()), materialize_grads=True)
    sizes = dict(zip(named, map(_largest, grads), strict=True))
    finite = [size for size in sizes.values() if size < torch.inf]
    rounding = 16 * torch.finfo(y.dtype).eps * max(finite, default=0.0)
    faults = {
        "a gradient of zero": [name for name, size in sizes.items() if size <= rounding],
        "NaN or infinity": [name for name, size in sizes.items() if not size < torch.inf],
    }
    if found := [f"{fault} for {', '.join(names)}" for fault, names in faults.items() if names]:
        raise AssertionError(f"every parameter learns: {'; '.join(found)}")
    print(f"✓ every parameter learns  [{len(named)} parameters]")
    return len(named)


class _Probe:
    """A module, an input x, another input of that shape, and the output for x.

    `compare` collects comparisons; `verdict` prints that all of them held, or raises for the worst.
    """

    def __init__(self, name, module, x, call, tol=None, *, rows=1, tokens=1):
        if isinstance(x, bool) or not isinstance(x, int | Tensor):
            raise TypeError(f"x must be a tensor or a width, got {type(x).__name__}")
        self.name, self.module, self.call, self.tol = name, module, call, tol
        self.borders, self.worst = _borders(module), (-1.0, "")
        self.x = x.detach() if isinstance(x, Tensor) else self.random_input(x)
        shape = tuple(self.x.shape)
        if len(shape) < 2 or shape[0] < rows or shape[1] < tokens:
            raise ValueError(f"x must be (b, l, ...), b ≥ {rows}, l ≥ {tokens}, got shape {shape}")
        self.other = self.x.flip(0, 1)
        if torch.equal(self.other, self.x):
            raise ValueError("x must hold tokens that differ")
        self.ids = torch.arange(shape[1], device=self.x.device).repeat(shape[0], 1)
        self.whole = self.y(self.x)
        self.allowed = _tolerance(name, self.whole, self.whole, tol)
        if self.whole.isnan().any():
            raise AssertionError("y has NaN")
        self.change = _error_beyond_rounding(self.y(self.other), self.whole).max().item()
        if not self.change > 0:
            raise AssertionError("the output does not depend on x")
        if _error_beyond_rounding(self.y(self.x), self.whole).max() > 1e-3 * self.change:
            raise AssertionError("two calls with the same x differ: is there dropout?")

    def random_input(self, width):
        """Random x beyond three borders, with the dtype and device of the parameters."""
        if width < 1:
            raise ValueError(f"a width must be at least 1, got {width}")
        if (border := max(64, *self.borders)) > 512:
            name = _name(self.module)
            raise ValueError(f"{name} has a border at {border} tokens: give an x beyond it")
        parameters = self.module.parameters() if isinstance(self.module, nn.Module) else ()
        like = next((p for p in parameters if p.is_floating_point()), None)
        x = _random((3, 3 * border + 5, width), 0)
        return x if like is None else x.to(like)

    def near(self, *multiples):
        """The last token of some chunks, the first of the next, and the token after that."""
        return [m * n + i for n in self.borders for m in multiples for i in (-1, 0, 1)]

    def lengths(self):
        """The lengths listed in the docstring of `is_causal`."""
        length = self.x.shape[1]
        tried = {*range(25), *range(0, length, 10), *range(0, length, 16), length - 1}
        return sorted(t for t in tried.union(self.near(1, 2, 3, 16, 32, 48)) if 0 < t < length)

    @torch.no_grad()
    def run(self, x, ids, padding_mask=None, cache=None):
        """Call the module on copies, which it may overwrite; return y and the cache."""
        result = self.call(self.module, x.clone(), ids.clone(), padding_mask, cache)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"{_name(self.module)}: give a `call` that returns y and a cache")
        y, cache = result
        if not isinstance(y, Tensor) or y.shape[:2] != x.shape[:2]:
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise AssertionError(f"y must be (b, l, ...) = {tuple(x.shape[:2])}, got {got}")
        return y.detach().clone(), cache

    def y(self, x, ids=None):
        """The output for x alone; positions from 0 by default."""
        return self.run(x, self.ids[: len(x), : x.shape[1]] if ids is None else ids)[0]

    def compare(self, where, actual, expected):
        """Keep the largest difference, relative to `change`, and where it is."""
        _tolerance(f"{self.name}: {where}", actual, expected, self.tol)
        error = _error_beyond_rounding(actual, expected).max() / self.change
        self.worst = max(self.worst, (error.nan_to_num(torch.inf).item(), where))

    def verdict(self):
        """Print that the property holds, or raise."""
        difference, where = self.worst
        if not difference <= self.allowed:
            error = Refuted(
                f"{self.name}: {where}: differs by {difference:.3g} (relative); "
                f"allowed is {self.allowed:g}"
            )
            error.difference = difference
            raise error
        print(f"✓ {self.name}  [{_precision(self.whole, self.tol)}]")
        return difference


def _error_beyond_rounding(actual, expected):
    """|actual - expected| beyond rounding, entry by entry. Equal infinities do not differ."""
    actual, wide = _wide(actual), _wide(expected)
    eps = torch.finfo(expected.dtype).eps if expected.dtype in TOLERANCE else 0.0
    beyond = ((actual - wide).abs() - 32 * eps * wide.abs()).clamp(min=0)
    return torch.where(actual == wide, torch.zeros_like(beyond), beyond)


def _name(module):
    return getattr(module, "__name__", type(module).__name__)


def _borders(module):
    """The tokens per chunk or window of a module and its submodules; 64 by default."""
    modules = module.modules() if isinstance(module, nn.Module) else [module]
    named = [getattr(m, name, None) for m in modules for name in BORDERS]
    return sorted({n for n in named if type(n) is int and n > 0}) or [64]


def _random(shape, seed):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _tolerance(name, actual, expected, tol, atol=0.0):
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, not {expected.dtype}")
    if actual.dtype not in TOLERANCE and (tol is not None or atol):
        raise ValueError(f"{name}: {actual.dtype} is compared exactly, without a tolerance")
    tol = TOLERANCE.get(actual.dtype, 0.0) if tol is None else tol
    for given in (tol, atol):
        if not 0 <= given < torch.inf:
            raise ValueError(f"{name}: a tolerance is a finite number of at least 0, got {given}")
    return tol


def _must_agree(name, actual, expected, tol, atol):
    """Raise if max |actual - expected| exceeds the tolerance, naming the index."""
    tol = _tolerance(name, actual, expected, tol, atol)
    _refuse_non_finite(f"{name}: actual", actual)
    _refuse_non_finite(f"{name}: expected", expected)
    if actual.numel() == 0:
        return
    error = (_wide(actual) - _wide(expected)).abs()
    if actual.dtype not in TOLERANCE:
        error = error.maximum((actual != expected).double())  # float64 rounds large integers
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    worst, allowed = error[index].item(), max(atol, tol * _largest(expected))
    if not worst <= allowed:
        hint = "; expected is zero everywhere: give atol" if tol and not allowed else ""
        raise AssertionError(
            f"{name}: entries differ by up to {worst:.3g}, at index {index}: "
            f"{actual[index].item():.6g} instead of {expected[index].item():.6g}; "
            f"allowed is {allowed:.3g} (tolerance {tol:g}){hint}"
        )


def _wide(t):
    """Widen t to float64 or complex128, so that sixteen-bit differences do not round away."""
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
    with torch.enable_grad():
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum((y * _random(y.shape, i).to(y)).sum() for i, y in enumerate(outputs))
        return outputs, torch.autograd.grad(total, inputs, allow_unused=True)


def _precision(t, tol, atol=0.0):
    dtype = str(t.dtype).removeprefix("torch.")
    tol = TOLERANCE.get(t.dtype, 0.0) if tol is None else tol
    tol = f"tolerance {tol:g}" + f", atol {atol:g}" * (atol > 0)
    return f"{dtype}, {tol}" if t.dtype in TOLERANCE else f"{dtype}, exact"
