"""cheems_ref.exercises: what the checks below exercises are made of."""

import sys
from functools import partial

import pytest
import torch

from cheems_ref import linear_attention, ssd
from cheems_ref.exercises import as_tensor, calls_of, check_numbers, forbidden
from cheems_ref.linear_attention import RULES, delta_rule

ONE = torch.ones(1, 3, 1, 2)
ASKED = {"a half": 0.5, "three": 3.0, "a thousand": 1000.0}


def call_delta_rule(rule=delta_rule):
    return rule(ONE, ONE, ONE, torch.ones(1, 3, 1))


ROUTES = {
    "its name": call_delta_rule,
    "its module": lambda: call_delta_rule(linear_attention.delta_rule),
    "a table": lambda: call_delta_rule(RULES["DeltaNet"].function),
    "an older name": partial(call_delta_rule, partial(delta_rule, chunk_size=2)),
    "a callback": lambda: [*map(call_delta_rule, [delta_rule])],
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_a_forbidden_function_is_seen_on_every_route(route):
    with pytest.raises(AssertionError, match="your answer calls delta_rule"), forbidden(delta_rule):
        route()
    assert sys.getprofile() is None
    route()  # and is allowed afterwards


def test_a_block_without_it_passes_and_other_errors_come_through():
    with forbidden(delta_rule, torch.linalg.pinv):
        call_delta_rule(linear_attention.longhorn)
    with pytest.raises(ZeroDivisionError), forbidden(delta_rule):
        _ = 1 / 0
    assert sys.getprofile() is None


def test_functions_of_c_and_methods_are_seen_too():
    with pytest.raises(AssertionError, match="pinv"), forbidden(torch.linalg.pinv):
        torch.linalg.pinv(torch.eye(2))
    layer = ssd.SSD(8, n_heads=2)
    x, ids = torch.ones(1, 4, 8), torch.arange(4)[None]
    with pytest.raises(AssertionError, match="forward"), forbidden(ssd.SSD.forward):
        layer(x, ids)


@pytest.mark.parametrize(
    "route",
    [
        lambda x: x.sum().backward(),
        lambda x: torch.autograd.grad(x.sum(), x),
        lambda x: torch.func.grad(torch.sum)(x),
        lambda x: torch.func.jacrev(torch.sin)(x),
        lambda x: torch.autograd.functional.jacobian(torch.sin, x),
    ],
)
def test_two_names_stand_for_all_of_reverse_autograd(route):
    with pytest.raises(AssertionError), forbidden(torch.autograd.grad, torch.autograd.backward):
        route(torch.ones(3, requires_grad=True))


def test_calls_are_collected_with_what_they_return():
    with calls_of(delta_rule, ssd.ssd) as returned:
        first = call_delta_rule()
        call_delta_rule(partial(delta_rule, return_final_state=True))
        assert len(returned) == 2
    call_delta_rule()
    assert len(returned) == 2 and returned[0] is first and isinstance(returned[1], tuple)
    assert sys.getprofile() is None
    with calls_of(delta_rule), forbidden(ssd.ssd):  # the inner one watches
        pass
    assert sys.getprofile() is None


@pytest.mark.parametrize(
    "given",
    [
        (0.5, 3, 1000),
        [0.5, [3.0, 1000.0]],
        torch.tensor([0.5, 3, 1000]),
        [torch.tensor(0.5), 3, 1e3],
    ],
)
def test_numbers_may_come_in_any_container(given, capsys):
    check_numbers(given, ASKED)
    assert capsys.readouterr().out == "✓ a half, three, a thousand\n"


@pytest.mark.parametrize(
    "given, said",
    [
        ((0.5, 3.1, 1000), "not right yet: three"),
        ((0.6, 3, 1000.1), "not right yet: a half, a thousand"),
        ((0.5, float("nan"), 1000), "not right yet: three"),
        ((0.5, 3), r"3 asked for \(a half, three, a thousand\), 2 returned"),
        (None, "your answer returns None"),
        (("0.5", 3, 1000), "your answer returns '0.5'"),
    ],
)
def test_wrong_numbers_are_named_and_right_ones_not_given_away(given, said):
    with pytest.raises(AssertionError, match=said) as caught:
        check_numbers(given, ASKED)
    assert "0.50" not in str(caught.value) and "3.0" not in str(caught.value)


def test_a_tolerance_is_relative_or_absolute_whichever_is_larger():
    check_numbers(1009.0, {"a": 1000.0}, tol=0.01)
    check_numbers(0.009, {"a": 0.0}, tol=0.01)
    for mine, right in ((1011.0, 1000.0), (0.011, 0.0), (0.51, 0.499)):
        with pytest.raises(AssertionError):
            check_numbers(mine, {"a": right}, tol=0.01)


def test_numbers_become_float64():
    wanted = torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
    one = torch.tensor([2.0, 3.0])
    for given in ([[0, 1], [2, 3]], [range(2), one], ((0, True), one), wanted.half()):
        torch.testing.assert_close(as_tensor(given), wanted, rtol=0, atol=0)
    assert as_tensor([]).shape == as_tensor(range(0)).shape == (0,)
    for given in (None, [1, None], "12"):
        with pytest.raises(AssertionError, match="your answer returns"):
            as_tensor(given)
