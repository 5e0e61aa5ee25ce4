"""The verifier: what it lets pass, what it refuses, and that its lines are the same everywhere."""

import pytest
import torch

from cheems_ref.verify import TOLERANCE, check, check_gradients, must_differ

TRUTH = torch.tensor([[1.0, -200.0, 3.0], [0.0, 5.0, 6.0]], dtype=torch.float64)


def off(by, at=(1, 2)):
    wrong = TRUTH.clone()
    wrong[at] += by
    return wrong


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tolerance_is_relative_to_the_largest_entry(dtype):
    truth = torch.tensor([1.0, -200.0], dtype=torch.float64)
    allowed = TOLERANCE[dtype] * 200
    inside, outside = (
        truth + torch.tensor([allowed * 0.9, 0]),
        truth + torch.tensor([allowed * 3, 0]),
    )
    check("inside", inside.to(dtype), truth.to(dtype))
    with pytest.raises(AssertionError, match="outside"):
        check("outside", outside.to(dtype), truth.to(dtype))


def test_small_truths_are_compared_absolutely():
    small = torch.tensor([1e-12], dtype=torch.float64)
    check("far below one", small, torch.zeros_like(small))


def test_message_names_the_largest_error_and_its_place():
    with pytest.raises(AssertionError, match=r"y: .*0\.25, at index \(1, 2\): 6\.25 instead of 6"):
        check("y", off(0.25), TRUTH)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["actual", "expected"])
def test_not_finite_is_refused_even_where_both_sides_agree(bad, side):
    with pytest.raises(AssertionError, match=rf"{side}: 1 entries .* \(0, 1\)"):
        pair = {"actual": TRUTH, "expected": TRUTH} | {side: off(bad, at=(0, 1))}
        check("y", **pair)
    with pytest.raises(AssertionError, match="NaN or infinite"):
        check("y", off(bad), off(bad))


def test_shape_and_dtype_are_not_broadcast_or_promoted():
    with pytest.raises(AssertionError, match=r"shape \(1, 3\), not \(2, 3\)"):
        check("y", TRUTH[:1], TRUTH)
    with pytest.raises(AssertionError, match=r"dtype torch\.float32, not torch\.float64"):
        check("y", TRUTH.float(), TRUTH)


def test_integers_and_booleans_are_compared_exactly():
    check("integers", torch.arange(3), torch.arange(3))
    with pytest.raises(AssertionError, match="up to 1"):
        check("integers", torch.arange(3), torch.tensor([0, 1, 3]))
    with pytest.raises(AssertionError):
        check("booleans", torch.tensor([True]), torch.tensor([False]))


def test_the_line_holds_the_claim_and_the_tolerance_but_no_measurement(capsys):
    check("a = b", TRUTH, TRUTH)
    check("a = b", off(1e-11), TRUTH)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == "✓ a = b  [float64, tolerance 1e-10]"


def test_large_integers_and_masks_are_told_apart():
    with pytest.raises(AssertionError):
        check("beyond float64", torch.tensor([2**53]), torch.tensor([2**53 + 1]))
    with pytest.raises(ValueError, match="exactly"):
        check("integers", torch.tensor([1]), torch.tensor([2]), tol=1.0)
    must_differ("a mask", torch.tensor([True]), torch.tensor([False]))
    assert must_differ("bytes", *torch.tensor([[1], [2]], dtype=torch.uint8).unbind()) == 0.5


def test_complex_numbers_are_compared_whole():
    truth = torch.tensor([1 + 1j])
    check("complex", truth, truth)
    with pytest.raises(AssertionError, match="up to 4"):
        check("complex", torch.tensor([1 + 5j]), truth)
    must_differ("phase", 1j * truth, truth)


@pytest.mark.parametrize("tol", [torch.nan, torch.inf, -1.0])
def test_a_tolerance_that_would_let_all_pass_is_refused(tol):
    with pytest.raises(ValueError, match="a tolerance is"):
        check("y", off(1.0), TRUTH, tol=tol)
    with pytest.raises(AssertionError):
        must_differ("nothing planted", TRUTH, TRUTH, at_least=torch.nan)


def test_gradients_are_compared_of_outputs_that_match():
    with pytest.raises(AssertionError, match=r"output 0: shape \(3, 2\), not \(2, 3\)"):
        check_gradients("f = g", lambda a: a.mT, lambda a: a, (TRUTH,))
    with pytest.raises(AssertionError, match="2 outputs, not 1"):
        check_gradients("f = g", lambda a: (a, a), lambda a: a, (TRUTH,))


def test_empty_tensors_agree():
    check("nothing", torch.zeros(0, 3), torch.zeros(0, 3))


def product(a, b):
    return a * b, a.sin()


def test_gradients_of_equal_functions_agree(capsys):
    check_gradients("f = f", product, lambda a, b: (b * a, a.sin()), (TRUTH, TRUTH + 1))
    assert capsys.readouterr().out == "✓ f = f: 2 gradients  [float64, tolerance 1e-10]\n"


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda a, b: (a * b.detach() + b - b, a.sin()), "gradient of input 1"),
        (lambda a, b: (a * b, a.sin().detach()), "gradient of input 0"),
        (lambda a, b: (a * b.detach(), a.sin()), "input 1: the input does not reach"),
        (lambda a, b: (a * b, a.cos()), "gradient of input 0"),
    ],
)
def test_gradients_that_differ_or_are_missing_are_refused(wrong, message):
    with pytest.raises(AssertionError, match=message):
        check_gradients("f = g", wrong, product, (TRUTH, TRUTH + 1))


def test_planted_mistake_must_be_seen(capsys):
    assert must_differ("planted", off(10.0), TRUTH) == pytest.approx(10 / 200)
    assert must_differ("planted", off(torch.nan), TRUTH) == torch.inf
    assert capsys.readouterr().out.startswith("✗ planted: caught  [differs by more than 0.001]\n")
    with pytest.raises(AssertionError, match="would not catch it"):
        must_differ("too small", off(1e-6), TRUTH)
    with pytest.raises(AssertionError, match="right one"):
        must_differ("no truth", TRUTH, off(torch.nan))
    with pytest.raises(AssertionError, match="within the tolerance"):
        must_differ("blunt", off(10.0), TRUTH, at_least=1e-11)
    with pytest.raises(AssertionError, match="shape"):
        must_differ("shapes", TRUTH[:1], TRUTH)
