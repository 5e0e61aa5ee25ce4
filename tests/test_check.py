"""What the package refuses, and how it says so; every line of the tables can be lost by a mistake.

As in test_ssd.py, the properties are functions of a module. The positive tests hand them
`cheems_ref.check`, the negative controls a copy of it with one planted mistake.
"""

import math
import sys
from functools import partial
from typing import Literal

import pytest
import torch
from planting import plant
from properties import questions

from cheems_ref import check

pytestmark = pytest.mark.usefixtures("unchecked")

X, IDS = torch.zeros(2, 5, 8), torch.arange(10).view(2, 5)
REAL, ROWS = torch.ones(2, 5, dtype=torch.bool), {"b": 2, "l": 5}
LISTED = "torch.int64 or torch.int32 or torch.int16 or torch.int8 or torch.uint8"
Colour = Literal["red", "green"]


def entry(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# Per function, calls that it lets pass: its positional arguments and those with a name.
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
    "sizes": [((), dict(n_heads=1, d_head=None, d_state=2**40))],
    "numbers": [
        (("(0, 1]",), dict(share=1, other=1.0, least=5e-324)),
        (("[0, 1)",), dict(share=0, other=0.999)),
        (("(-inf, inf)",), dict(position=-1e308)),
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
        ((X, 8, IDS.float(), None), {}, f"position_ids must be {LISTED} here, got torch.float32"),
        ((X, 8, REAL, None), {}, f"position_ids must be {LISTED} here, got torch.bool"),
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
        ((), dict(n_heads="2"), "n_heads must be a whole number, got '2'")],
    "numbers": [
        (("(0, inf)",), dict(base="2"), "base must be a number, got '2'"),
        (("(0, inf)",), dict(base=True), "base must be a number, got True"),
        (("(0, inf)",), dict(base=None), "base must be a number, got None")],
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


# --- negative controls ------------------------------------------------------------------------

planted = partial(plant, check)

# fmt: off
BELOW, ABOVE = 'low <= value if interval[0] == "["', 'value <= high if interval[-1] == "]"'
TENSORS = "        if t is not None and t.numel() and not t.is_meta:"
WHILE_COMPILING = "    if torch.compiler.is_compiling():\n        return\n"
BOUND = "sizes.setdefault(letter, size) == size"

# One row, one mistake: what it is, the property and the function that must fail, the edits.
PLANTED = [
    ("the first tensor binds nothing", refuses, "shapes",
     (BOUND, "sizes.get(letter, size) == size")),
    ("the last tensor binds", refuses, "shapes", (BOUND, "sizes.update({letter: size}) is None")),
    ("letters of the caller bind nothing", refuses, "shapes", ("dict(known or {})", "{}")),
    ("axes too many or too few", refuses, "shapes",
     ("fits, bound = t.ndim == len(letters)", "fits, bound = True")),
    ("only the last axis counts", refuses, "shapes", ("fits = fits and ", "fits = ")),
    ("the tensor's own sizes are called for", refuses, "shapes",
     ("bound.get(letter, letter)", "sizes.get(letter, letter)")),
    ("no numbers", refuses, "shapes", ("any(letter in bound for letter in letters)", "False")),
    ("None ends the check", refuses, "shapes", ("            continue\n", "            break\n")),
    ("None is a tensor", takes, "shapes",
     ("        if t is None:\n            continue\n", "")),
    ("writes into the caller's sizes", returns_the_sizes, "shapes",
     ("sizes = dict(known or {})", "sizes = known if known is not None else {}")),
    ("a tuple of one without its comma", refuses, "shapes",
     ('f"({parts[0]},)" if len(parts) == 1', 'f"({parts[0]})" if len(parts) == 1')),
    ("the axis before the last", refuses, "width", ("x.shape[-1] != d", "x.shape[-2] != d")),
    ("a number has no last axis", refuses, "width", ("x.ndim == 0 or ", "")),
    ("dtypes of the first tensor alone", refuses, "dtypes",
     ('got {t.dtype}")\n\n\ndef floating', 'got {t.dtype}")\n        break\n\n\ndef floating')),
    ("the same dtype named twice", refuses, "dtypes",
     ("dict.fromkeys(map(str, allowed))", "map(str, allowed)")),
    ("None has no dtype", takes, "dtypes",
     ("t is not None and t.dtype not in", "t.dtype not in")),
    ("complex numbers are floats", refuses, "floating",
     ("not dtype.is_floating_point", "not (dtype.is_floating_point or dtype.is_complex)")),
    ("None is no float", takes, "floating", ("dtype is not None and ", "")),
    ("closed below is open", takes, "entries", (BELOW, BELOW.replace("<=", "<"))),
    ("closed above is open", takes, "entries", (ABOVE, ABOVE.replace("<=", "<"))),
    ("open below is closed", refuses, "entries", ("else low < value", "else low <= value")),
    ("open above is closed", refuses, "entries", ("else value < high", "else value <= high")),
    ("closed below is open, numbers", takes, "numbers", (BELOW, BELOW.replace("<=", "<"))),
    ("closed above is open, numbers", takes, "numbers", (ABOVE, ABOVE.replace("<=", "<"))),
    ("open below is closed, numbers", refuses, "numbers",
     ("else low < value", "else low <= value")),
    ("open above is closed, numbers", refuses, "numbers",
     ("else value < high", "else value <= high")),
    ("NaN is let through", refuses, "entries",
     ("return above and below and not math.isnan(value)",
      "return not (value < low or value > high) if math.isnan(value) else above and below")),
    ("NaN is let through, numbers", refuses, "numbers",
     ("return above and below and not math.isnan(value)",
      "return math.isnan(value) or (above and below)")),
    ("only the smallest entry", refuses, "entries",
     ("_inside(low, interval) and _inside(high, interval)", "_inside(low, interval)")),
    ("only the largest entry", refuses, "entries",
     ("_inside(low, interval) and _inside(high, interval)", "_inside(high, interval)")),
    ("the first tensor alone", refuses, "entries",
     (TENSORS, TENSORS.replace("if ", "if name == next(iter(named)) and "))),
    ("no entry is an entry", takes, "entries", (" and t.numel() and not", " and not")),
    ("None has entries", takes, "entries", ("t is not None and t.numel()", "t.numel()")),
    ("values in a compiled graph", looks_at_values_at_the_door_alone, "entries",
     (WHILE_COMPILING, "")),
    ("ids in a compiled graph", looks_at_values_at_the_door_alone, "token_ids",
     (WHILE_COMPILING, "")),
    ("values break the graph", compiles, "all", (WHILE_COMPILING, "")),
    ("one question for each entry", looks_at_values_at_the_door_alone, "entries",
     ("(end.item() for end in t.detach().aminmax())",
      "min(ends := [end.item() for end in t.flatten()]), max(ends)")),
    ("a mixer looks at its positions", looks_at_no_value, "mixer_call",
     ('    shapes(known, position_ids=(position_ids, "b l"))\n',
      '    shapes(known, position_ids=(position_ids, "b l"))\n'
      '    entries("(-inf, inf)", position_ids=position_ids)\n')),
    ("one is too few", takes, "sizes", ("size < 1", "size <= 1")),
    ("none is enough", refuses, "sizes", ("size < 1", "size < 0")),
    ("2.0 is a whole number", refuses, "sizes",
     ("not isinstance(size, int)", "not isinstance(size, int | float)")),
    ("True is a size", refuses, "sizes", (" or isinstance(size, bool)", "")),
    ("None is no size", takes, "sizes",
     ("size is not None and (not", "(not"), ("size is not None and size < 1", "size < 1")),
    ("True is a number", refuses, "numbers", (" or isinstance(value, bool)", "")),
    ("a whole number is none", takes, "numbers",
     ("isinstance(value, float | int)", "isinstance(value, float)")),
    ("divided the wrong way", refuses, "multiple", ("a % b", "b % a")),
    ("a multiple of nothing", refuses, "multiple", ("b < 1 or ", "b and ")),
    ("a multiple of what is negative", refuses, "multiple", ("b < 1 or ", "b == 0 or ")),
    ("one divides nothing", takes, "multiple", ("b < 1", "b <= 1")),
    ("a tuple is a Literal", takes, "choice",
     ("options if isinstance(options, tuple) else get_args(options)", "get_args(options)")),
    ("None is always a choice", refuses, "choice",
     ("if value not in options", "if value is not None and value not in options")),
    ("the options are not named", refuses, "choice",
     ("', '.join(map(repr, options))", "len(options)")),
    ("a mask of numbers", refuses, "padding_mask",
     ("        dtypes([torch.bool], padding_mask=mask)\n", "")),
    ("a mask of any shape", refuses, "padding_mask",
     ('        shapes(known, padding_mask=(mask, "b l"))\n', "")),
    ("any width", refuses, "mixer_call", ('shapes({"d": d}, x=', "shapes(x=")),
    ("positions of any dtype", refuses, "mixer_call",
     ("    dtypes(INTEGERS, position_ids=position_ids)\n", "")),
    ("positions of any shape", refuses, "mixer_call",
     ('    shapes(known, position_ids=(position_ids, "b l"))\n', "")),
    ("the mask is not looked at", refuses, "mixer_call", ("    padding_mask(known, mask)\n", "")),
    ("int64 alone", takes, "mixer_call",
     ("(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)", "(torch.int64,)")),
    ("the vocabulary ends one too late", refuses, "token_ids",
     ('entries(f"[0, {vocab_size})"', 'entries(f"[0, {vocab_size}]"')),
    ("ids of any shape", refuses, "token_ids", ('        shapes(**{name: (ids, "b l")})\n', "")),
    ("ids of any dtype", refuses, "token_ids", ("        dtypes(INTEGERS, **{name: ids})\n", "")),
]
# fmt: on


@pytest.mark.parametrize("row", PLANTED, ids=lambda row: row[0])
def test_planted_mistake_is_caught(row, monkeypatch):
    _, has_property, name, *edits = row
    mutant = planted(*edits)
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)  # for torch.compile
    with pytest.raises(AssertionError):
        has_property(mutant, name)


@pytest.mark.parametrize("has_property, name", {row[1:3]: None for row in PLANTED})
def test_check_has_every_property_that_a_mistake_breaks(has_property, name):
    has_property(check, name)
