"""Tools for the checks below the exercises.

Some exercises forbid a function: a delta rule in chunks is no exercise if the answer calls the
package's delta rule. Others ask for one: "with a single call". Both kinds of check watch the calls
while the answer runs:

    with forbidden(delta_rule):
        y = delta_in_chunks(q, k, v, beta, 8)

    with calls_of(linear_attention) as returned:
        y = normalised(q, k, v)
    assert len(returned) == 1, "one call to linear_attention"

Nothing is replaced. Python tells a profiler about every call (`sys.setprofile`), and ours compares
the function that is called with those it watches. So another name for a function changes nothing,
and neither does a helper that calls it.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def forbidden(*functions: Callable) -> Iterator[None]:
    """Run a block in which these functions must not be called.

    Args:
        functions: written in Python, or functions of a C module such as `torch.linalg.pinv`.
            Methods written in C, such as `Tensor.sum`, can't be watched.

    Raises:
        AssertionError: one of them was called; the message names it.
    """
    watched = _watched(functions)

    def refuse(frame: Any, event: str, called: Any) -> None:
        name = watched.get(_key(frame, event, called))
        if name and event in ("call", "c_call"):
            raise AssertionError(f"your answer calls {name}; here you write that part yourself")

    before = sys.getprofile()
    sys.setprofile(refuse)
    try:
        yield
        _must_still_watch(refuse)
    finally:
        sys.setprofile(before)


@contextmanager
def calls_of(*functions: Callable) -> Iterator[list]:
    """Run a block and collect what these functions return, in the order in which they return.

    Args:
        functions: written in Python.

    Yields:
        The list of returned values, which fills while the block runs.
    """
    watched, returned = _watched(functions), []

    def note(frame: Any, event: str, value: Any) -> None:
        if event == "return" and _key(frame, event, value) in watched:
            returned.append(value)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield returned
        _must_still_watch(note)
    finally:
        sys.setprofile(before)


class LargestTensor(TorchDispatchMode):
    """Remember the largest tensor that an operator writes while a block runs.

    Attributes:
        entries: how many numbers it has. Whole numbers and truth values don't count, nor do views.
    """

    entries = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:  # a view writes nothing
            for made in out if isinstance(out, tuple | list) else [out]:
                if isinstance(made, Tensor) and made.is_floating_point():
                    self.entries = max(self.entries, made.numel())
        return out


def depth(made: Tensor) -> int:
    """The longest chain of operations from a tensor back to what it was computed from.

    Operations in such a chain have to wait for one another, however many processors there are.

    Args:
        made: the result of a computation whose inputs require gradients.
    """
    level, steps = {made.grad_fn}, 0
    while level := {before for step in level if step for before, _ in step.next_functions}:
        steps += 1
    return steps


def check_numbers(given: Any, wanted: Mapping[str, float], *, tol: float = 1e-9) -> None:
    """Check numbers found with pencil and paper: say which are wrong, not what they should be.

    Args:
        given: the numbers in order, in lists, tuples, arrays or tensors, nested or not.
        wanted: each number under its name.
        tol: allowed error, relative to the number or to 1, whichever is larger.

    Raises:
        AssertionError: too few or too many numbers, or wrong ones; the message names them.
    """
    found, names = _flat(given), list(wanted)
    if len(found) != len(names):
        raise AssertionError(f"{len(names)} asked for ({', '.join(names)}), {len(found)} returned")
    wrong = [
        name
        for (name, right), mine in zip(wanted.items(), found, strict=True)
        if not abs(mine - right) <= tol * max(1.0, abs(right))
    ]
    if wrong:
        raise AssertionError(f"not right yet: {', '.join(wrong)}")
    print(f"✓ {', '.join(names)}")


def not_none(answer: Any) -> Any:
    """What an answer returns, unless that's nothing at all.

    Raises:
        AssertionError: it's None, as it is where a `return` is missing.
    """
    if answer is None:
        raise AssertionError("your answer returns None; is a `return` missing?")
    return answer


def as_tensor(given: Any) -> Tensor:
    """Numbers as float64, from a list, a tuple, a range, a NumPy array or a tensor of any dtype.

    Where a task asks for numbers, their container is no part of the answer.

    Raises:
        AssertionError: `given` holds something else, such as the None of a missing `return`.
    """
    if isinstance(given, Tensor):
        return given.double()
    if isinstance(given, list | tuple | range):
        parts = [as_tensor(part) for part in given]
        return torch.stack(parts) if parts else torch.empty(0, dtype=torch.float64)
    if isinstance(given, Real):  # a Fraction, too, and the numbers of NumPy
        return torch.tensor(float(given), dtype=torch.float64)
    if hasattr(given, "tolist"):
        return as_tensor(given.tolist())
    raise AssertionError(f"numbers are asked for, and your answer returns {given!r}")


def _watched(functions: tuple[Callable, ...]) -> dict[int, str]:
    """The name of each function, under the identity of its code."""
    return {id(getattr(inspect.unwrap(f), "__code__", f)): f.__name__ for f in functions}


def _must_still_watch(profiler: Callable) -> None:
    """Refuse an answer that has taken the profiler away."""
    if sys.getprofile() is not profiler:
        raise AssertionError("your answer calls sys.setprofile, by which this check watches calls")


def _key(frame: Any, event: str, called: Any) -> int:
    """The identity of what an event is about: a function of C, or the code of one in Python."""
    return id(called) if event == "c_call" else id(frame.f_code)


def _flat(given: Any) -> list[float]:
    """All numbers of nested lists, tuples, arrays and tensors, in order."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, list | tuple | range):
        return [number for part in given for number in _flat(part)]
    if isinstance(given, Real):
        return [float(given)]
    raise AssertionError(f"numbers are asked for, and your answer returns {given!r}")
