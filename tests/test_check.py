"""Argument validation: accepted and rejected calls, with the whole message.

The properties are functions of a module m: planted/ hands them copies with a mistake.
"""

import dataclasses
import json
import math
from typing import Literal

import numpy as np
import pytest
import torch
from properties import questions
from torch import nn

from cheems_ref import check
from cheems_ref.config import ModelConfig
from cheems_ref.train import TrainConfig

pytestmark = pytest.mark.usefixtures("unchecked")

X, IDS = torch.zeros(2, 5, 8), torch.arange(10).view(2, 5)
REAL, ROWS = torch.ones(2, 5, dtype=torch.bool), {"b": 2, "l": 5}
Colour = Literal["red", "green"]


class Int8(nn.Module):
    """A linear map whose weights are whole numbers, as a quantised one keeps them."""

    def __init__(self, d, e):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(e, d, dtype=torch.int8), requires_grad=False)


def entry(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def call(*args, **kwargs):
    return args, kwargs


# Calls that a function accepts.
TAKEN = {
    "shapes": [
        call(x=(X, "b l d"), y=(X[0], "l d"), z=(X[:, 0], "b d"), none=(None, "b l")),
        call({"b": 2}, x=(X[:, :2, 0], "b b"), number=(torch.tensor(1.0), "")),
    ],
    "tensors": [call(x=X, ids=IDS), call()],
    "width": [call(X, 8), call(X[0, 0], 8)],
    "dtypes": [call([torch.int64, torch.float32], x=X, y=IDS, none=None)],
    "floating": [call(x=X, y=X.half(), z=X.bfloat16(), none=None, dtype=torch.float64)],
    "entries": [
        call("[0, inf)", x=entry(0.0, 1e300).requires_grad_(), none=None, empty=entry()),
        call("(-inf, 0]", x=entry(0.0, -1e300)),
        call("(0, 1]", x=entry(1e-300, 1.0)),
        call("[0, 10)", ids=IDS, narrow=X.bfloat16()),
    ],
    "sizes": [call(n_heads=1, d_head=None, d_state=np.int64(128), k=np.uint8(1)), call(0, n=0)],
    "numbers": [
        call("(0, 1]", share=1, other=np.float32(1e-3), least=5e-324),
        call("[0, 1)", share=0, other=0.999),
        call("(-inf, inf)", position=-1e308),
    ],
    "multiple": [call(h=6, g=3), call(h=1, g=1)],
    "choice": [call(Colour, colour="red"), call((None, "gate"), mask=None, other="gate")],
    "padding_mask": [call(ROWS, REAL), call(ROWS, None)],
    "mixer_call": [
        call(X, 8, IDS, None),
        call(X, 8, IDS.int() - 3, REAL),
        call(X[:0], 8, IDS[:0], REAL[:0]),
    ],
    "fits_weights": [
        call(X, nn.Linear(8, 2)),
        call(X.half(), nn.Linear(8, 2).half()),
        call(X, nn.Linear(8, 2, device="meta")),  # offloaded: its values come when it is called
        call(X, nn.Identity()),  # quantised: without weights to compare with
        call(X, Int8(8, 2)),
    ],
    "token_ids": [call(10, input_ids=IDS), call(10, ids=IDS.to(torch.uint8), none=IDS[:0])],
}
EVERYWHERE = "must be in [0, inf) everywhere, got entries in"
INDICES = "torch.int64 or torch.int32"
LISTED = f"{INDICES} or torch.int16 or torch.int8 or torch.uint8"
# And calls that it refuses, by all that it says.
REFUSED = {
    "shapes": {
        "x must be (b, l), got shape (2, 5, 8)": call(x=(X, "b l")),
        "A must be (d,) = (8,), got shape (3,)": call(x=(X, "b l d"), A=(X[0, 0, :3], "d")),
        "B must be (b, s, n) = (2, s, n), got shape (1, 5, 8)":
            call(x=(X, "b l d"), B=(X[:1], "b s n")),
        "y must be (l, d) = (5, 8), got shape (2, 8)":
            call(x=(X[0], "l d"), none=(None, "b l d"), y=(X[:, 0], "l d")),
        "x must be (b, l, d) = (b, l, 9), got shape (2, 5, 8)": call({"d": 9}, x=(X, "b l d")),
        "square must be (r, r), got shape (5, 8)": call(square=(X[0], "r r")),
    },
    "width": {
        "x must be (..., d) with d = 5, got shape (2, 5, 8)": call(X, 5),
        "x must be (..., d) with d = 1, got shape ()": call(X[0, 0, 0], 1),
    },
    "dtypes": {
        "x must be torch.float64 or torch.float16 here, got torch.float32":
            call([torch.float64, torch.float16, torch.float64], x=X),
    },
    "floating": {
        "ids must be floating-point, got torch.int64": call(x=X, ids=IDS),
        "x must be floating-point, got torch.complex64": call(x=X + 1j),
        "dtype must be floating-point, got torch.int32": call(dtype=torch.int32),
    },
    "entries": {
        f"dt {EVERYWHERE} [-0.5, 1]": call("[0, inf)", dt=entry(1.0, -0.5)),
        f"dt {EVERYWHERE} [1, inf]": call("[0, inf)", dt=entry(1.0, math.inf)),
        f"dt {EVERYWHERE} [nan, nan]": call("[0, inf)", x=X, dt=entry(1.0, math.nan, 2.0)),
        "x must be in (0, 1] everywhere, got entries in [0, 0]": call("(0, 1]", x=entry(0.0)),
    },
    "sizes": {"n_heads must be at least 1, got 0": call(d_model=8, n_heads=0)},
    "numbers": {
        "base must be a number in (0, inf), got 0.0": call("(0, inf)", base=0.0),
        "base must be a number in (0, inf), got nan": call("(0, inf)", base=math.nan),
        "t must be a number in (-inf, inf), got -inf": call("(-inf, inf)", t=-math.inf),
        "b must be a number in [0, 1), got 1": call("[0, 1)", a=0.5, b=1),
    },
    "multiple": {
        "n_heads = 4 must be a multiple of n_groups = 3": call(n_heads=4, n_groups=3),
        "h = 4 must be a multiple of g = 0": call(h=4, g=0),
    },
    "choice": {
        "colour must be one of 'red', 'green', got None": call(Colour, colour=None),
        "mask must be one of None, 'gate', got 'static'": call((None, "gate"), mask="static"),
    },
    "padding_mask": {
        "padding_mask must be torch.bool here, got torch.float32": call(ROWS, X[..., 0]),
        "padding_mask must be (b, l) = (2, 5), got shape (1, 5)": call(ROWS, REAL[:1]),
    },
    "mixer_call": {
        "x must be (b, l, d) = (b, l, 9), got shape (2, 5, 8)": call(X, 9, IDS, None),
        f"position_ids must be {INDICES} here, got torch.uint8":
            call(X, 8, IDS.to(torch.uint8), None),
        "position_ids must be (b, l) = (2, 5), got shape (1, 5)": call(X, 8, IDS[:1], None),
        "padding_mask must be (b, l) = (2, 5), got shape (2, 4)": call(X, 8, IDS, REAL[:, 1:]),
        "position_ids must be on cpu as x is, got a tensor on meta":
            call(X, 8, IDS.to("meta"), None),
        "padding_mask must be on cpu as x is, got a tensor on meta":
            call(X, 8, IDS, REAL.to("meta")),
    },
    "tensors": {},
    "fits_weights": {
        "x must be torch.float32 as the weights are, got torch.int64": call(IDS, nn.Linear(5, 2)),
        "x must be torch.float32 as the weights are, got torch.float64":
            call(X.double(), nn.Linear(8, 2)),
        "x must be torch.bfloat16 as the weights are, got torch.float32":
            call(X, nn.Linear(8, 2).bfloat16()),
        "x must be on cpu as the weights are, got a tensor on meta":
            call(X.to("meta"), nn.Linear(8, 2)),
    },
    "token_ids": {
        "input_ids must be (b, l), got shape (5,)": call(10, input_ids=IDS[0]),
        f"input_ids must be {LISTED} here, got torch.float32": call(10, input_ids=IDS.float()),
        "input_ids must be in [0, 9) everywhere, got entries in [0, 9]": call(9, input_ids=IDS),
    },
}  # fmt: skip
OF_ANOTHER_TYPE = {
    "tensors": {
        "x must be a tensor, got list": call(x=[[1.0]]),
        "x must be a tensor, got ndarray": call(x=X.numpy()),
        "x must be a tensor, got NoneType": call(x=None),
    },
    "shapes": {"A must be a tensor, got float": call(A=(-1.0, "h"))},
    "width": {"x must be a tensor, got ndarray": call(X.numpy(), 8)},
    "dtypes": {"x must be a tensor, got list": call([torch.float32], x=[1.0])},
    "floating": {"x must be a tensor, got list": call(x=[1.0])},
    "mixer_call": {
        "position_ids must be a tensor, got NoneType": call(X, 8, None, None),
        "position_ids must be a tensor, got list": call(X, 8, [[0, 1]], None),
        "x must be a tensor, got ndarray": call(X.numpy(), 8, IDS, None),
    },
    "token_ids": {"input_ids must be a tensor, got list": call(9, input_ids=[[1, 2]])},
    "sizes": {
        "n_heads must be a whole number, got 2.0": call(n_heads=2.0),
        "n_heads must be a whole number, got True": call(n_heads=True),
        "n_heads must be a whole number, got np.float64(2.0)": call(n_heads=np.float64(2)),
    },
    "numbers": {
        "base must be a number, got '2'": call("(0, inf)", base="2"),
        "base must be a number, got True": call("(0, inf)", base=True),
        "base must be a number, got np.True_": call("(0, inf)", base=np.True_),
    },
}


# --- properties of a module m -----------------------------------------------------------------


def takes(m, name):
    for args, kwargs in TAKEN[name]:
        getattr(m, name)(*args, **kwargs)


def refuses(m, name):
    for table, kind in ((REFUSED, ValueError), (OF_ANOTHER_TYPE, TypeError)):
        for message, (args, kwargs) in table.get(name, {}).items():
            with pytest.raises(kind) as caught:
                getattr(m, name)(*args, **kwargs)
            assert str(caught.value) == message


def looks_at_values_at_the_door_alone(m, name):
    """Two questions for each tensor that has entries, none while torch compiles."""
    bad = {"entries": ("[0, inf)",), "token_ids": (5,)}[name]
    with questions() as asked:
        getattr(m, name)(*bad, some=IDS % 5, none=IDS[:0])
    assert len(asked) == 2, asked
    with pytest.MonkeyPatch.context() as patched, questions() as asked:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        getattr(m, name)(*bad, ids=IDS - 1)
    assert not asked, asked


def looks_at_no_value(m, name):
    with questions() as asked:
        takes(m, name)
        refuses(m, name)
    assert not asked, asked


def compiles(m):
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


def test_functions_take_what_they_may_and_refuse_the_rest_in_these_words():
    for name in TAKEN:
        takes(check, name)
        refuses(check, name)


def test_every_public_function_stands_in_the_tables():
    here = {k for k, f in vars(check).items() if getattr(f, "__module__", "") == check.__name__}
    here -= {"plain_numbers", "values_can_be_read"}  # which refuse nothing
    assert {k for k in here if not k.startswith("_")} == TAKEN.keys() == REFUSED.keys()


def test_shapes_returns_what_it_has_bound():
    known = {"d": 8}
    n = check.shapes(known, x=(X, "b l d"), none=(None, "b k"), y=(X[:, :3, 0], "b s"))
    assert n == dict(d=8, b=2, l=5, s=3) and known == {"d": 8}


def test_the_device_is_asked_for_values_at_the_door_alone():
    for name in TAKEN:
        (looks_at_values_at_the_door_alone if name in VALUES else looks_at_no_value)(check, name)


def test_checks_may_stand_in_a_compiled_function():
    compiles(check)


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
