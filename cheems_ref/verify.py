"""The one verifier: every equality that a notebook or a test claims goes through `check`.

A check is named for the theorem it shows. It compares against a tolerance declared per dtype,
relative to the largest entry of the truth:

    max |actual - expected|  ≤  max(atol, tol · max |expected|)

`atol` is 0 unless it is given: for a truth that is zero, or so small that the rounding of larger
numbers decides its digits. What a check prints holds the claim and the declared tolerance, never
the measured error, so that the line is the same on every machine. `must_differ` is the control: a
planted mistake has to be seen.

Six properties ask a layer, or a whole model, what needs no second definition to compare with:

    is_causal, rows_are_independent, pieces_equal_one_pass, padding_changes_nothing,
    shift_changes_nothing, every_parameter_learns

each `(module, x)`, x being (b, l, d), token ids (b, l), or a width d for random x. They take any
module with the package's own calls, `(x)` or `(x, position_ids, *, padding_mask, cache)`, whose
forward need not have all of these; for another, `call` translates: see `common_call`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
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
# Names under which a module may hold how many tokens its chunks or windows have.
BORDERS = ("chunk_size", "window", "window_size", "sliding_window", "top_k")

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
            Booleans and integers are compared exactly, and take none.
        atol: an error up to this size is allowed in any case. Give it where `expected` is zero,
            or the rounding of larger numbers.

    Raises:
        ValueError: `tol` or `atol` is negative, NaN or infinite, or given for booleans or integers.
        AssertionError: shape or dtype differ, an entry is NaN or infinite, or an error is above
            the tolerance; the message holds the largest error and its index.
    """
    _must_agree(name, actual, expected, tol, atol)
    print(f"✓ {name}  [{_precision(actual, tol, atol)}]")


def check_gradients(
    name: str, actual: Map, expected: Map, inputs: Tensors, *, tol: Tol = None, atol: float = 0
) -> None:
    """Check that two functions have the same gradient with respect to every input.

    Both are called on copies of `inputs`; their outputs, all of them, are weighted with the same
    random numbers and summed, and the sum is differentiated.

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
    """Check that a planted mistake is seen: the two tensors must differ by a wide margin.

    Args:
        name: what was planted, such as "sum over the wrong axis".
        wrong: what the mistake gives.
        right: same shape and dtype as `wrong`.
        at_least: smallest difference that counts, relative to the largest |right|, or to 1 if
            `right` is zero everywhere. It has to lie above the tolerance of `check`, or the check
            would not have seen the mistake.

    Returns:
        The largest difference, relative in the same way; infinity if `wrong` holds an entry that
        is NaN or infinite.

    Raises:
        AssertionError: shape or dtype differ, `right` is not finite, or the difference is smaller.
    """
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
    """A property that a module does not have; `difference` says by how much, as `is_causal`."""

    difference: float = torch.inf


def common_call(
    module: Callable, x: Tensor, position_ids: Tensor, padding_mask: Mask = None, cache: Any = None
) -> tuple[Tensor, Any]:
    """Call a module as this package calls its layers; a function like this one adapts another.

    `position_ids` goes to a module whose forward names it, `padding_mask` and `cache` where they
    are not None. A result that is a pair is taken for (y, cache), a tensor for y without a cache.

    Args:
        module: the layer or model.
        x: (b, l, d), or token ids (b, l).
        position_ids: (b, l), integers.
        padding_mask: (b, l), bool, True for a real token; None for real tokens alone.
        cache: what the call before has returned; None for the first.

    Returns:
        y (b, l, ...) and the cache, or None.

    Raises:
        ValueError: a padding mask or a cache is given, and the forward does not name it; what it
            takes cannot be seen; or the result is neither a tensor nor a pair.
    """
    takes = _takes(module)
    given = dict(padding_mask=padding_mask, cache=cache)
    given = {name: value for name, value in given.items() if value is not None}
    for name in given.keys() - takes:
        raise ValueError(f"{_name(module)} takes no {name}: the question cannot be put")
    if "position_ids" in takes:
        given["position_ids"] = position_ids
    result = module(x, **given)
    if isinstance(result, tuple) and len(result) == 2:
        return result
    if isinstance(result, Tensor):
        return result, None
    what = f"{len(result)} results" if isinstance(result, tuple) else type(result).__name__
    raise ValueError(f"{_name(module)} returns {what}: give a `call` that returns y and a cache")


def is_causal(module: Callable, x: X, *, call: Callable = common_call, tol: Tol = None) -> float:
    """Check that what follows a token changes nothing at it or before it.

    The beginning of a text, read alone, must give what it gives as a part of the whole. We try
    1 to 24 tokens, all but the last one, every multiple of 10 and of 16, and, where chunks or
    windows have n tokens, n, 2n, 3n, 16n, 32n and 48n tokens, one fewer and one more. n is every
    whole number that the module or one of its submodules holds under a name in `BORDERS`, and 64
    if there is none. A leak across a border goes unseen if x ends before the border. So an x of
    your own must be longer than a chunk or a window. `ssd_chunked` also computes 16 chunks at a
    time: to reach the end of such a block too, ask a layer with a chunk_size of at most 12.

    The property is one of finite inputs. A NaN or an infinity in a later token may reach earlier
    outputs as 0 · NaN, in attention and in the quadratic and chunked forms.

    Args:
        module: without dropout, such as after `module.eval()`, and in float64 where that can be: in
            float32 what is smaller than its rounding passes.
        x: (b, l, d), token ids (b, l), or a width d for random x of 3 rows and 3n + 5 tokens, n
            being the largest as above, and at least 64; l ≥ 2.
        call: how to call the module, with the arguments of `common_call`.
        tol: None for the entry of `TOLERANCE` for y's dtype.

    Returns:
        The largest difference beyond rounding, relative to the largest that another x makes.

    Raises:
        Refuted: the property does not hold; the message says where, and by how much.
        AssertionError: two calls with the same x differ, y does not depend on x, has NaN, or is no
            tensor of x's rows and tokens.
        ValueError: x is too small for the question, or a width where some n exceeds 512, or the
            module does not take what the question needs.
        TypeError: x is neither a tensor nor a width.
    """
    asked = _Asked(module, x, call, tokens=2)

    def pairs():
        for t in asked.places():
            yield f"the first {t} tokens alone", asked.y(asked.x[:, :t]), asked.whole[:, :t]

    return asked.must_hold("is causal", pairs(), tol)


def rows_are_independent(
    module: Callable, x: X, *, call: Callable = common_call, tol: Tol = None
) -> float:
    """Check that no row of a batch changes another.

    Each row, read alone, must give what it gives in the batch; the positions of row i are multiples
    of i + 1. Arguments, result and errors are those of `is_causal`, with b ≥ 2.
    """
    asked = _Asked(module, x, call, rows=2)
    ids = asked.ids * (torch.arange(asked.x.shape[0], device=asked.x.device) + 1)[:, None]

    def pairs():
        whole = asked.y(asked.x, ids)
        for i in range(asked.x.shape[0]):
            one = slice(i, i + 1)
            yield f"row {i} alone", asked.y(asked.x[one], ids[one]), whole[one]

    return asked.must_hold("rows are independent", pairs(), tol)


def pieces_equal_one_pass(
    module: Callable, x: X, *, cuts: Ints = (), call: Callable = common_call, tol: Tol = None
) -> float:
    """Check that calls which hand the cache on give what one call gives.

    Arguments, result and errors are those of `is_causal`, with l ≥ 5, and

    Args:
        cuts: the tokens at which a further call begins, ascending. If none are given, we try two
            pieces, cut after each of the lengths that `is_causal` tries; pieces of 1, n - 1, n and
            n + 1 tokens; and one token, two prompts, and two single tokens.
    """
    asked = _Asked(module, x, call, tokens=2 if cuts else 5)
    length = asked.x.shape[1]
    if not all(a < b for a, b in pairwise((0, *cuts, length))):
        raise ValueError(f"cuts must ascend between 0 and l = {length}, got {tuple(cuts)}")
    ways = [(1, length // 2, length - 2, length - 1), *((t,) for t in asked.places())]
    ways += [range(n, length, n) for n in {1, *asked.near(1)} if 0 < n < length]
    ways = [cuts] if cuts else ways

    def pairs():
        cache = None
        for start, stop in (piece for cuts in ways for piece in pairwise((0, *cuts, length))):
            x, ids = asked.x[:, start:stop], asked.ids[:, start:stop]
            y, cache = asked.call(module, x.clone(), ids.clone(), None, cache if start else None)
            if cache is None:
                raise ValueError(f"{_name(module)} returns no cache: the question cannot be put")
            yield f"tokens {start} to {stop - 1}", y.clone(), asked.whole[:, start:stop]

    return asked.must_hold("pieces = one pass", pairs(), tol)


def padding_changes_nothing(
    module: Callable, x: X, *, call: Callable = common_call, tol: Tol = None
) -> float:
    """Check that rows of unequal length, padded in front or behind, give what each gives alone.

    The first row stays whole. The others are shortened by 1, 2 ... tokens, and in further calls by
    n - 1, n and n + 1 tokens and to as many, n as in `is_causal`. Other tokens stand in the
    padding, and positions count real tokens. What goes on from a cache of padded rows is not asked.
    Arguments, result and errors are those of `is_causal`, with b ≥ 2.
    """
    asked = _Asked(module, x, call, rows=2, tokens=2)
    rows, length = asked.x.shape[:2]
    cut = [*range(1, max(rows, 3)), *asked.near(1), *(length - n for n in asked.near(1))]
    cut = [n for n in dict.fromkeys(cut) if 0 < n < length]
    at = torch.arange(length, device=asked.x.device)

    def pairs():
        for start in range(0, len(cut), rows - 1):
            lengths = [length - n for n in (0, *cut[start : start + rows - 1], *[0] * rows)][:rows]
            n = torch.tensor(lengths, device=at.device)[:, None]
            alone = [asked.y(asked.x[i : i + 1, :n])[0] for i, n in enumerate(lengths)]
            for side, real in {"in front": at >= length - n, "behind": at < n}.items():
                padded = asked.other.clone()
                padded[real] = asked.x[at < n]
                y, _ = call(module, padded, (real.cumsum(1) - 1).clamp(min=0), real, None)
                yield f"rows of {lengths} tokens, padded {side}", y[real], torch.cat(alone)

    return asked.must_hold("padding changes nothing", pairs(), tol)


def shift_changes_nothing(
    module: Callable, x: X, *, by: Ints = (1, 1000), call: Callable = common_call, tol: Tol = None
) -> float:
    """Check that all positions may be moved: the output depends on differences of positions alone.

    Arguments, result and errors are those of `is_causal`, and

    Args:
        by: numbers to add to all positions.

    Raises:
        ValueError: positions have no effect on the output, so that there is nothing to shift.
    """
    asked = _Asked(module, x, call)
    if torch.equal(asked.y(asked.x, asked.ids.flip(1)), asked.whole):
        raise ValueError(f"positions do not change what {_name(module)} gives: nothing to shift")
    if not any(by):
        raise ValueError(f"by must hold a number other than 0, got {by}")
    pairs = ((f"by {n}", asked.y(asked.x, asked.ids + n), asked.whole) for n in by)
    return asked.must_hold("shift changes nothing", pairs, tol)


def every_parameter_learns(module: nn.Module, x: X, *, call: Callable = common_call) -> int:
    """Check that every parameter receives a gradient: finite, and not zero everywhere.

    Zero is what is no larger than rounding of the largest gradient of all. Of a table of which a
    call reads some rows, those rows are enough.

    Args:
        module, x, call: as in `is_causal`; parameters that require no gradient are passed over.

    Returns:
        How many parameters were asked.

    Raises:
        AssertionError: some have none; the message names them.
        TypeError: the module is none.
        ValueError: it has no parameter that requires a gradient.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError(f"{_name(module)} has no parameter that requires a gradient")
    asked = _Asked(module, x, call)
    with torch.enable_grad():
        y, _ = call(module, asked.x.clone(), asked.ids.clone(), None, None)
        if not y.requires_grad:
            raise AssertionError("every parameter learns: the output has no gradient")
        weighted = y * _random(y.shape, 2).to(y)
        grads = torch.autograd.grad(weighted.sum(), list(named.values()), allow_unused=True)
    sizes = {n: None if g is None else _largest(g) for n, g in zip(named, grads, strict=True)}
    seen = {n: size for n, size in sizes.items() if size is not None}
    largest = max((size for size in seen.values() if size < torch.inf), default=0.0)
    rounding = 16 * torch.finfo(y.dtype).eps * largest
    faults = {
        "no gradient": [n for n, size in sizes.items() if size is None],
        "a gradient of zero": [n for n in seen if seen[n] <= rounding],
        "NaN or infinity": [n for n in seen if not seen[n] < torch.inf],
    }
    found = [f"{what} for {', '.join(names)}" for what, names in faults.items() if names]
    if found:
        raise AssertionError("every parameter learns: " + "; ".join(found))
    print(f"✓ every parameter learns  [{len(named)} parameters]")
    return len(named)


class _Asked:
    """A module, its input, another input of that shape, and what one call gives."""

    def __init__(self, module, x, call, rows=1, tokens=1):
        if isinstance(x, bool) or not isinstance(x, int | Tensor):
            raise TypeError(f"x must be a tensor or a width, got {type(x).__name__}")
        self.module, self.call, self.borders = module, call, _borders(module)
        self.x = _input(module, x, max(64, *self.borders)) if isinstance(x, int) else x.detach()
        shape = tuple(self.x.shape)
        if len(shape) < 2 or shape[0] < rows or shape[1] < tokens:
            raise ValueError(f"x must be (b, l, ...), b ≥ {rows}, l ≥ {tokens}, got shape {shape}")
        self.other = self.x.flip(0, 1)  # other tokens at every place, of the same kind
        if torch.equal(self.other, self.x):
            raise ValueError("x must hold tokens that differ")
        self.ids = torch.arange(self.x.shape[1], device=self.x.device).repeat(len(self.x), 1)
        self.whole = self.y(self.x)
        if self.whole.isnan().any():
            raise AssertionError("y has NaN")
        self.change = _apart(self.y(self.other), self.whole).max().item()
        if not self.change > 0:
            raise AssertionError("the output does not depend on x")
        if _apart(self.y(self.x), self.whole).max() > 1e-3 * self.change:
            raise AssertionError("two calls with the same x differ: is there dropout?")

    def near(self, *multiples):
        """The last token of some chunks, the first of the next, and the token after that."""
        return [m * n + i for n in self.borders for m in multiples for i in (-1, 0, 1)]

    def places(self):
        """The lengths after which to cut, as the docstring of `is_causal` has them."""
        length = self.x.shape[1]
        tried = {*range(25), *range(0, length, 10), *range(0, length, 16), length - 1}
        return sorted(t for t in tried.union(self.near(1, 2, 3, 16, 32, 48)) if 0 < t < length)

    @torch.no_grad()
    def y(self, x, ids=None):
        """What the module gives for a copy of x; the copy and the result are its own."""
        ids = self.ids[: x.shape[0], : x.shape[1]] if ids is None else ids
        result = self.call(self.module, x.clone(), ids.clone(), None, None)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError("call must return a pair, y and a cache")
        y = result[0]
        if not isinstance(y, Tensor) or y.shape[:2] != x.shape[:2]:
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise AssertionError(f"y must be (b, l, ...) = {tuple(x.shape[:2])}, got {got}")
        return y.detach().clone()

    @torch.no_grad()
    def must_hold(self, name, pairs: Iterator, tol):
        """Print that all pairs are equal, or raise for the one that is furthest apart."""
        worst, place = -1.0, ""
        for where, actual, expected in pairs:
            allowed = _tolerance(f"{name}: {where}", actual, expected, tol)
            apart = (_apart(actual, expected).max() / self.change).nan_to_num(torch.inf).item()
            worst, place = max((worst, place), (apart, where))
        if not place:
            raise ValueError(f"{name}: there is nothing to compare")
        if not worst <= allowed:
            say = f"{name}: {place}: differs by {worst:.3g} (relative); allowed is {allowed:g}"
            (refuted := Refuted(say)).difference = worst
            raise refuted
        print(f"✓ {name}  [{_precision(expected, tol)}]")
        return worst


def _apart(actual, expected):
    """|actual - expected| beyond rounding, entry by entry; equal infinities are equal."""
    actual, wide = _wide(actual), _wide(expected)
    eps = torch.finfo(expected.dtype).eps if expected.dtype in TOLERANCE else 0.0
    beyond = ((actual - wide).abs() - 32 * eps * wide.abs()).clamp(min=0)
    return torch.where(actual == wide, torch.zeros_like(beyond), beyond)


def _takes(module):
    """The names of the arguments of a module's forward, of one that is wrapped too."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return _takes(module.module)
    if hasattr(module, "_orig_mod"):  # of torch.compile
        return _takes(module._orig_mod)
    try:
        takes = inspect.signature(getattr(module, "forward", module)).parameters
    except ValueError as error:
        raise ValueError(f"what {_name(module)} takes cannot be seen: give a `call`") from error
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        raise ValueError(f"{_name(module)} takes **{[*takes][-1]}, any name at all: give a `call`")
    return takes.keys()


def _name(module):
    return getattr(module, "__name__", type(module).__name__)


def _borders(module):
    """Tokens per chunk or window, of all that a module names; 64 if it names none."""
    modules = module.modules() if isinstance(module, nn.Module) else [module]
    named = [getattr(m, name, None) for m in modules for name in BORDERS]
    return sorted({n for n in named if type(n) is int and n > 0}) or [64]


def _input(module, width, border):
    if width < 1:
        raise ValueError(f"a width must be at least 1, got {width}")
    if border > 512:
        raise ValueError(f"{_name(module)} has a border at {border} tokens: give an x beyond it")
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    like = next((p for p in parameters if p.is_floating_point()), None)
    x = _random((3, 3 * border + 5, width), 0)
    return x if like is None else x.to(like)


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
    """Raise where the largest |actual - expected| is above the tolerance, and say where that is."""
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
