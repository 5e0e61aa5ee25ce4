"""Argument validation: accepted and rejected calls, with the whole message.

As in test_ssd.py, the properties are functions of a module. The positive tests hand them
`cheems_ref.check`, the negative controls a copy of it with one planted mistake.
"""

import dataclasses
import json
import math
from typing import Literal

import numpy as np
import pytest
import torch
from properties import questions

from cheems_ref import check
from cheems_ref.config import ModelConfig
from cheems_ref.train import TrainConfig

pytestmark = pytest.mark.usefixtures("unchecked")

X, IDS = torch.zeros(2, 5, 8), torch.arange(10).view(2, 5)
REAL, ROWS = torch.ones(2, 5, dtype=torch.bool), {"b": 2, "l": 5}
INDICES = "torch.int64 or torch.int32"
LISTED = f"{INDICES} or torch.int16 or torch.int8 or torch.uint8"
Colour = Literal["red", "green"]


def entry(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# Accepted calls per function: positional and keyword arguments.
TAKEN = {
    "shapes": [
        ((), dict(x=(X, "b l d"), y=(X[0], "l d"), z=(X[:, 0], "b d"))),
        ((), dict(x=(X, "b l d"), y=(None, "b l"))),
        (({"b": 2},), dict(x=(X, "b l d"))),
        ((), dict(square=(X[:, :2, 0], "r r"))),
        ((), dict(number=(torch.tensor(1.0), ""), none=(X[:0], "b l d"))),
    ],
    "width": [((X, 8), {}), ((X[0, 0], 8), {})],
    "dtypes": [
        (([torch.float32],), dict(x=X, y=None)),
        (([torch.int64, torch.float32],), dict(x=X, y=IDS)),
    ],
    "floating": [
        ((), dict(x=X, y=X.half(), z=X.bfloat16(), none=None)),
        ((), dict(dtype=torch.float64)),
    ],
    "entries": [
        (("[0, inf)",), dict(x=entry(0.0, 1e300), none=None, empty=entry())),
        (("(-inf, 0]",), dict(x=entry(0.0, -1e300))),
        (("(0, 1]",), dict(x=entry(1e-300, 1.0))),
        (("[0, 10)",), dict(ids=IDS)),
        (("[0, inf)",), dict(x=entry(0.5).requires_grad_(), narrow=X.bfloat16())),
    ],
    "sizes": [
        ((), dict(n_heads=1, d_head=None, d_state=2**40)),
        ((), dict(n_heads=np.int64(128), d_head=np.uint8(1))),
    ],
    "numbers": [
        (("(0, 1]",), dict(share=1, other=1.0, least=5e-324)),
        (("[0, 1)",), dict(share=0, other=0.999)),
        (("(-inf, inf)",), dict(position=-1e308)),
        (("(0, 1]",), dict(share=np.float32(1e-3), other=np.int64(1))),
    ],
    "multiple": [((), dict(h=6, g=3)), ((), dict(h=3, g=3)), ((), dict(h=1, g=1))],
    "choice": [
        ((Colour,), dict(colour="red", other="green")),
        (((None, "gate"),), dict(mask=None, other="gate")),
    ],
    "padding_mask": [((ROWS, REAL), {}), ((ROWS, None), {})],
    "mixer_call": [
        ((X, 8, IDS, None), {}),
        ((X, 8, IDS.int(), REAL), {}),
        ((X, 8, IDS - 3, REAL), {}),
        ((X[:0], 8, IDS[:0], REAL[:0]), {}),
    ],
    "token_ids": [
        ((10,), dict(input_ids=IDS)),
        ((10,), dict(ids=IDS.to(torch.uint8), none=IDS[:0])),
    ],
}

# And calls that it refuses, with all that it says.
# fmt: off
REFUSED = {
    "shapes": [
        ((), dict(x=(X, "b l")), "x must be (b, l), got shape (2, 5, 8)"),
        ((), dict(x=(X, "b l d e")), "x must be (b, l, d, e), got shape (2, 5, 8)"),
        ((), dict(x=(X, "b l d"), A=(X[0, 0, :3], "d")), "A must be (d,) = (8,), got shape (3,)"),
        ((), dict(x=(X, "b l d"), B=(X[:1], "b s n")),
         "B must be (b, s, n) = (2, s, n), got shape (1, 5, 8)"),
        ((), dict(x=(X, "b l d"), y=(X, "d l b")),
         "y must be (d, l, b) = (8, 5, 2), got shape (2, 5, 8)"),
        ((), dict(x=(X[0], "l d"), y=(X, "l d")),
         "y must be (l, d) = (5, 8), got shape (2, 5, 8)"),
        ((), dict(x=(X[0], "l d"), none=(None, "b l d"), y=(X[:, 0], "l d")),
         "y must be (l, d) = (5, 8), got shape (2, 8)"),
        (({"d": 9},), dict(x=(X, "b l d")), "x must be (b, l, d) = (b, l, 9), got shape (2, 5, 8)"),
        ((), dict(square=(X[0], "r r")), "square must be (r, r), got shape (5, 8)"),
        ((), dict(x=(X[0, 0, 0], "d")), "x must be (d,), got shape ()")],
    "width": [
        ((X, 9), {}, "x must be (..., d) with d = 9, got shape (2, 5, 8)"),
        ((X, 5), {}, "x must be (..., d) with d = 5, got shape (2, 5, 8)"),
        ((X[0, 0, 0], 1), {}, "x must be (..., d) with d = 1, got shape ()")],
    "dtypes": [
        (([torch.bool],), dict(real=X), "real must be torch.bool here, got torch.float32"),
        (([torch.float32],), dict(x=X, y=IDS), "y must be torch.float32 here, got torch.int64"),
        (([torch.float64, torch.float16],), dict(x=X),
         "x must be torch.float64 or torch.float16 here, got torch.float32"),
        (([torch.float64] * 2,), dict(x=X), "x must be torch.float64 here, got torch.float32")],
    "floating": [
        ((), dict(x=X, ids=IDS), "ids must be floating-point, got torch.int64"),
        ((), dict(x=REAL), "x must be floating-point, got torch.bool"),
        ((), dict(x=X + 1j), "x must be floating-point, got torch.complex64"),
        ((), dict(dtype=torch.int32), "dtype must be floating-point, got torch.int32")],
    "entries": [
        (("[0, inf)",), dict(dt=entry(1.0, -0.5)),
         "dt must be in [0, inf) everywhere, got entries in [-0.5, 1]"),
        (("[0, inf)",), dict(dt=entry(1.0, math.inf)),
         "dt must be in [0, inf) everywhere, got entries in [1, inf]"),
        (("[0, inf)",), dict(x=entry(1.0), dt=entry(1.0, math.nan, 2.0)),
         "dt must be in [0, inf) everywhere, got entries in [nan, nan]"),
        (("(-inf, 0]",), dict(A=entry(-1.0, 0.25)),
         "A must be in (-inf, 0] everywhere, got entries in [-1, 0.25]"),
        (("(-inf, 0]",), dict(A=entry(-math.inf)),
         "A must be in (-inf, 0] everywhere, got entries in [-inf, -inf]"),
        (("(0, 1]",), dict(x=entry(0.0)), "x must be in (0, 1] everywhere, got entries in [0, 0]"),
        (("[0, 9)",), dict(ids=IDS), "ids must be in [0, 9) everywhere, got entries in [0, 9]")],
    "sizes": [
        ((), dict(d_model=8, n_heads=0), "n_heads must be at least 1, got 0"),
        ((), dict(n_heads=-3), "n_heads must be at least 1, got -3")],
    "numbers": [
        (("(0, inf)",), dict(base=0.0), "base must be a number in (0, inf), got 0.0"),
        (("(0, inf)",), dict(base=math.inf), "base must be a number in (0, inf), got inf"),
        (("(0, inf)",), dict(base=math.nan), "base must be a number in (0, inf), got nan"),
        (("(-inf, inf)",), dict(t=-math.inf), "t must be a number in (-inf, inf), got -inf"),
        (("[0, 1)",), dict(a=0.5, b=1), "b must be a number in [0, 1), got 1"),
        (("[0, 1]",), dict(a=-1e-9), "a must be a number in [0, 1], got -1e-09"),
        (("[0, 1]",), dict(a=1.5), "a must be a number in [0, 1], got 1.5")],
    "multiple": [
        ((), dict(n_heads=4, n_groups=3), "n_heads = 4 must be a multiple of n_groups = 3"),
        ((), dict(h=2, g=4), "h = 2 must be a multiple of g = 4"),
        ((), dict(h=4, g=0), "h = 4 must be a multiple of g = 0"),
        ((), dict(h=4, g=-2), "h = 4 must be a multiple of g = -2")],
    "choice": [
        ((Colour,), dict(colour="blue"), "colour must be one of 'red', 'green', got 'blue'"),
        ((Colour,), dict(colour=None), "colour must be one of 'red', 'green', got None"),
        (((None, "gate"),), dict(mask="static"), "mask must be one of None, 'gate', got 'static'")],
    "padding_mask": [
        ((ROWS, X[..., 0]), {}, "padding_mask must be torch.bool here, got torch.float32"),
        ((ROWS, REAL[:1]), {}, "padding_mask must be (b, l) = (2, 5), got shape (1, 5)"),
        ((ROWS, REAL[0]), {}, "padding_mask must be (b, l) = (2, 5), got shape (5,)")],
    "mixer_call": [
        ((X, 9, IDS, None), {}, "x must be (b, l, d) = (b, l, 9), got shape (2, 5, 8)"),
        ((X[0], 8, IDS, None), {}, "x must be (b, l, d) = (b, l, 8), got shape (5, 8)"),
        ((X, 8, IDS.float(), None), {}, f"position_ids must be {INDICES} here, got torch.float32"),
        ((X, 8, REAL, None), {}, f"position_ids must be {INDICES} here, got torch.bool"),
        ((X, 8, IDS.to(torch.uint8), None), {},
         f"position_ids must be {INDICES} here, got torch.uint8"),
        ((X, 8, IDS.short(), None), {}, f"position_ids must be {INDICES} here, got torch.int16"),
        ((X, 8, IDS[:1], None), {}, "position_ids must be (b, l) = (2, 5), got shape (1, 5)"),
        ((X, 8, IDS[0], None), {}, "position_ids must be (b, l) = (2, 5), got shape (5,)"),
        ((X, 8, IDS, IDS), {}, "padding_mask must be torch.bool here, got torch.int64"),
        ((X, 8, IDS, REAL[:, 1:]), {}, "padding_mask must be (b, l) = (2, 5), got shape (2, 4)")],
    "token_ids": [
        ((10,), dict(input_ids=IDS[0]), "input_ids must be (b, l), got shape (5,)"),
        ((10,), dict(input_ids=IDS.float()), f"input_ids must be {LISTED} here, got torch.float32"),
        ((10,), dict(input_ids=IDS - 1),
         "input_ids must be in [0, 10) everywhere, got entries in [-1, 8]"),
        ((9,), dict(input_ids=IDS),
         "input_ids must be in [0, 9) everywhere, got entries in [0, 9]"),
        ((10,), dict(a=IDS, b=IDS + 1),
         "b must be in [0, 10) everywhere, got entries in [1, 10]")],
}
NO_NUMBERS = {
    "sizes": [
        ((), dict(n_heads=2.0), "n_heads must be a whole number, got 2.0"),
        ((), dict(n_heads=True), "n_heads must be a whole number, got True"),
        ((), dict(n_heads="2"), "n_heads must be a whole number, got '2'"),
        ((), dict(n_heads=np.float64(2)), "n_heads must be a whole number, got np.float64(2.0)"),
        ((), dict(n_heads=np.True_), "n_heads must be a whole number, got np.True_")],
    "numbers": [
        (("(0, inf)",), dict(base="2"), "base must be a number, got '2'"),
        (("(0, inf)",), dict(base=True), "base must be a number, got True"),
        (("(0, inf)",), dict(base=None), "base must be a number, got None"),
        (("(0, inf)",), dict(base=np.True_), "base must be a number, got np.True_")],
}
# fmt: on


# What it raises, and what it would stumble over.
FAULTS = (ValueError, TypeError, IndexError, AttributeError, RuntimeError)


# --- properties of a module m -----------------------------------------------------------------


def takes(m, name):
    for args, kwargs in TAKEN[name]:
        try:
            getattr(m, name)(*args, **kwargs)
        except FAULTS as error:
            raise AssertionError(f"{args} {kwargs} is refused") from error


def refuses(m, name):
    for table, kind in ((REFUSED, ValueError), (NO_NUMBERS, TypeError)):
        for args, kwargs, message in table.get(name, ()):
            try:
                getattr(m, name)(*args, **kwargs)
            except FAULTS as error:
                assert (type(error), str(error)) == (kind, message)
            else:
                raise AssertionError(f"{message}: let through")


def returns_the_sizes(m, name="shapes"):
    known = {"d": 8}
    n = getattr(m, name)(known, x=(X, "b l d"), none=(None, "b k"), y=(X[:, :3, 0], "b s"))
    assert n == dict(d=8, b=2, l=5, s=3) and known == {"d": 8}


def looks_at_values_at_the_door_alone(m, name):
    """Two questions for each tensor that has entries, none while torch compiles."""
    bad = {"entries": ("[0, inf)",), "token_ids": (5,)}[name]
    with questions() as asked:
        getattr(m, name)(*bad, some=IDS % 5, none=IDS[:0])
    assert len(asked) == 2, asked
    with pytest.MonkeyPatch.context() as patched, questions() as asked:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        try:
            getattr(m, name)(*bad, ids=IDS - 1)
        except ValueError as error:
            raise AssertionError("values are looked at in a compiled graph") from error
    assert not asked, asked


def looks_at_no_value(m, name):
    with questions() as asked:
        takes(m, name)
        refuses(m, name)
    assert not asked, asked


def compiles(m, name):
    """A function that checks, entries among the rest, is one graph."""

    def run(x, ids):
        n = m.shapes(x=(x, "b l d"), ids=(ids, "b l"))
        m.dtypes(m.INTEGERS, ids=ids)
        m.floating(x=x)
        m.width(x, 8)
        m.entries("[0, inf)", x=x)
        m.mixer_call(x, 8, ids, None)
        m.sizes(l=n["l"])
        return x * n["b"]

    torch._dynamo.reset()
    run = torch.compile(run, fullgraph=True, backend="eager")
    for batch in (2, 3, 4):  # from the second on, the size is a symbol
        x, ids = torch.ones(batch, 5, 8), torch.zeros(batch, 5, dtype=torch.int64)
        try:
            assert torch.equal(run(x, ids), batch * x)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise AssertionError("more than one graph") from error


# --- the room has them ------------------------------------------------------------------------

VALUES = ("entries", "token_ids")


@pytest.mark.parametrize("name", TAKEN)
def test_function_takes_what_it_may_and_refuses_the_rest_in_these_words(name):
    takes(check, name)
    refuses(check, name)


def test_every_public_function_stands_in_the_tables():
    here = {k for k, f in vars(check).items() if getattr(f, "__module__", "") == check.__name__}
    here -= {"plain_numbers"}  # which refuses nothing
    assert {k for k in here if not k.startswith("_")} == TAKEN.keys() == REFUSED.keys()


def test_shapes_returns_what_it_has_bound():
    returns_the_sizes(check)


@pytest.mark.parametrize("name", VALUES)
def test_values_are_looked_at_at_the_door_alone(name):
    looks_at_values_at_the_door_alone(check, name)


@pytest.mark.parametrize("name", [name for name in TAKEN if name not in VALUES])
def test_shapes_and_dtypes_ask_the_device_nothing(name):
    looks_at_no_value(check, name)


def test_checks_may_stand_in_a_compiled_function():
    compiles(check, "all")


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (ModelConfig, dict(d_model=np.int64(64), n_heads=np.int32(2), norm_eps=np.float32(1e-5))),
        (TrainConfig, dict(steps=np.int64(3), learning_rate=np.float32(1e-3), seed=np.int16(2))),
        (TrainConfig, dict(betas=np.array([0.5, 0.75], dtype=np.float32))),
    ],
)
def test_configurations_take_numbers_of_numpy_and_keep_python_s(config, fields):
    made, want = config(**fields), {k: value.tolist() for k, value in fields.items()}
    assert json.loads(json.dumps(dataclasses.asdict(made))).items() >= want.items()
    assert repr(made) == repr(config(**want))
