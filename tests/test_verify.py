"""The verifier: what it lets pass, what it refuses, and that its lines are the same everywhere."""

import pytest
import torch
from planting import plant
from torch import nn

from cheems_ref import ssd, verify
from cheems_ref.attention import QCAttn
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


@pytest.mark.parametrize("scale", [1e-11, 1e-200])
def test_small_truths_are_compared_relatively_too(scale):
    small = scale * TRUTH
    check("equal", small * (1 + 1e-12), small)
    with pytest.raises(AssertionError, match="opposite"):
        check("opposite", -small, small)
    with pytest.raises(AssertionError, match="gradient of input 0"):
        check_gradients("opposite", lambda a: scale * a, lambda a: -scale * a, (TRUTH,))
    assert must_differ("opposite", -small, small) == 2


def test_an_absolute_error_is_allowed_by_atol(capsys):
    noise, zero = 1e-12 * TRUTH, torch.zeros_like(TRUTH)
    check("zero", zero, zero)
    with pytest.raises(AssertionError, match=r"zero everywhere: give atol$"):
        check("noise", noise, zero)
    with pytest.raises(AssertionError, match="allowed is 1e-11"):
        check("noise", noise, zero, atol=1e-11)
    with pytest.raises(AssertionError, match=r"allowed is 2e-08 .tolerance 1e-10.$"):
        check("relative, whatever atol", off(1.0), TRUTH, atol=1e-11)
    capsys.readouterr()
    check("noise", noise, zero, atol=1e-9)
    check_gradients("noise", lambda a: 1e-12 * a, lambda a: 0 * a, (TRUTH,), atol=1e-9)
    assert capsys.readouterr().out.splitlines() == [
        "✓ noise  [float64, tolerance 1e-10, atol 1e-09]",
        "✓ noise: 1 gradient  [float64, tolerance 1e-10, atol 1e-09]",
    ]
    assert must_differ("a truth of zero", off(10.0) - TRUTH, zero) == 10


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
    with pytest.raises(ValueError, match="exactly"):
        check("integers", torch.tensor([1]), torch.tensor([2]), atol=1.0)
    must_differ("a mask", torch.tensor([True]), torch.tensor([False]))
    assert must_differ("bytes", *torch.tensor([[1], [2]], dtype=torch.uint8).unbind()) == 0.5


@pytest.mark.parametrize("tol", [torch.nan, torch.inf, -1.0])
def test_a_tolerance_that_would_let_all_pass_is_refused(tol):
    with pytest.raises(ValueError, match="a tolerance is"):
        check("y", off(1.0), TRUTH, tol=tol)
    with pytest.raises(ValueError, match="a tolerance is"):
        check("y", off(1.0), TRUTH, atol=tol)
    with pytest.raises(AssertionError):
        must_differ("nothing planted", TRUTH, TRUTH, at_least=torch.nan)


def test_gradients_are_compared_of_outputs_that_match():
    with pytest.raises(AssertionError, match=r"output 0: shape \(3, 2\), not \(2, 3\)"):
        check_gradients("f = g", lambda a: a.mT, lambda a: a, (TRUTH,))
    with pytest.raises(AssertionError, match="2 outputs, not 1"):
        check_gradients("f = g", lambda a: (a, a), lambda a: a, (TRUTH,))


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


# --- six questions to a module ------------------------------------------------------------------

SEQUENCE = {
    "SSD": lambda: ssd.SSD(8, n_heads=2, n_groups=2, d_state=4, chunk_size=4),
    "QCAttn": lambda: QCAttn(8, n_heads=2, n_kv_heads=1),
}
ASKED_OF_TEXT = [verify.is_causal, verify.rows_are_independent]
ASKED_OF_CALLS = [verify.pieces_equal_one_pass, verify.padding_changes_nothing]


def made(make):
    torch.manual_seed(0)
    return make().double()


class Layer(nn.Module):
    """Sums over the text, plain and weighted by the cosine of a distance, with a fault."""

    def __init__(self, fault=None):
        super().__init__()
        self.fault = fault
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.offset = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x, position_ids, *, padding_mask=None, cache=None):
        real = torch.ones_like(x[..., 0]) if padding_mask is None else padding_mask.double()
        if self.fault == "pads in front" and real[:, -1].all():
            real = torch.ones_like(real)
        p = position_ids[:1] if self.fault == "positions of row 0" else position_ids
        p = p.double()
        turn = torch.stack([torch.ones_like(p), p.cos(), p.sin()], dim=-1)[..., None]
        before = 0 if cache is None or self.fault == "forgets the cache" else cache[:, None]
        total = before + (turn * (x * real[..., None])[:, :, None]).cumsum(1)
        y = self.scale * (turn * total).sum(2) + self.offset
        if self.fault == "length":
            y = y / x.shape[1]
        if self.fault == "later":
            y = y + x.mean(1, keepdim=True)
        if self.fault == "a little later":
            y = y + 1e-7 * x.mean(1, keepdim=True)
        if self.fault == "later, beside large numbers":
            y = torch.cat([y + x.mean(1, keepdim=True), torch.full_like(y, -1e30)], dim=-1)
        if self.fault == "pads behind" and real[:, 0].all() and not real.all():
            y = y + x.mean(1, keepdim=True)
        if self.fault == "NaN without padding" and len(x) == 1:
            y = y / 0 * 0
        if self.fault == "batch":
            y = y * x.shape[0]
        if self.fault == "rows":
            y = y - x.mean(0, keepdim=True)
        if self.fault == "position":
            y = y + 1e-3 * position_ids[..., None]
        if self.fault == "the last of a chunk reads the next":
            y[:, 63:-1:64] += x[:, 64::64]
        if self.fault == "rows, after a chunk":
            y[:, 64:] -= x[:, 64:].mean(0)
        if self.fault == "position, after a chunk":
            y[:, 64:] += 1e-3 * position_ids[:, 64:, None]
        if self.fault == "padding of a chunk":
            y = y + (real.shape[1] - real.sum(1) == 64)[:, None, None]
        if self.fault == "a whole chunk is forgotten":
            total = total * (x.shape[1] % 64 > 0)
        if self.fault == "writes into x":
            y = x.copy_(x.amax(1, keepdim=True).expand_as(x)) * 1.0
        return y, total[:, -1]


FAULTS = [
    (verify.is_causal, "length"),
    (verify.is_causal, "later"),
    (verify.is_causal, "a little later"),
    (verify.is_causal, "later, beside large numbers"),
    (verify.is_causal, "writes into x"),
    (verify.rows_are_independent, "batch"),
    (verify.rows_are_independent, "rows"),
    (verify.rows_are_independent, "positions of row 0"),
    (verify.pieces_equal_one_pass, "forgets the cache"),
    (verify.padding_changes_nothing, "pads in front"),
    (verify.padding_changes_nothing, "pads behind"),
    (verify.padding_changes_nothing, "NaN without padding"),
    (verify.shift_changes_nothing, "position"),
    (verify.is_causal, "the last of a chunk reads the next"),
    (verify.rows_are_independent, "rows, after a chunk"),
    (verify.pieces_equal_one_pass, "a whole chunk is forgotten"),
    (verify.padding_changes_nothing, "padding of a chunk"),
    (verify.shift_changes_nothing, "position, after a chunk"),
]


def refuses(m, name, fault):
    """The question passes on the layer without the fault, and refuses the one that has it."""
    ask = getattr(m, name)
    ask(Layer(), 4)
    with pytest.raises(m.Refuted) as caught:
        ask(Layer(fault), 4)
    assert caught.value.difference > 1e-9, "it says how far apart"


@pytest.mark.parametrize(("ask", "fault"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_layer_with_a_fault_is_refused(ask, fault):
    refuses(verify, ask.__name__, fault)


class Parameters(nn.Module):
    """Three parameters, of which the last has a fault."""

    def __init__(self, fault):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(3)
        )
        self.fault = fault

    def forward(self, x):
        y = x * self.a + self.b
        if self.fault == "not used":
            return y
        if self.fault == "multiplied by zero":
            return y + 0 * self.c
        if self.fault == "the root of zero":
            return y + (self.c - 1).sqrt()
        if self.fault == "after a chunk":
            return torch.cat([y[:, :64], y[:, 64:] * self.c], dim=1)
        return y + self.c[0] if self.fault == "in part" else y * self.c


def names_what_does_not_learn(m):
    for fault, message in {
        "not used": "a gradient of zero for c",
        "multiplied by zero": "a gradient of zero for c",
        "the root of zero": "NaN or infinity for c",
    }.items():
        with pytest.raises(AssertionError, match=f"learns: {message}$"):
            m.every_parameter_learns(Parameters(fault), 4)
    for fault in ("in part", "after a chunk", None):  # of a table, some rows are enough
        assert m.every_parameter_learns(Parameters(fault), 4) == 3
    frozen = Parameters("not used")
    frozen.c.requires_grad_(False)
    assert m.every_parameter_learns(frozen, 4) == 2


def test_what_does_not_learn_is_named():
    names_what_does_not_learn(verify)


class Leaks(ssd.SSD):
    """The last token of every chunk reads the first of the next."""

    def forward(self, x, position_ids):
        y, cache = super().forward(x, position_ids)
        y[:, self.chunk_size - 1 : -1 : self.chunk_size] += x[:, self.chunk_size :: self.chunk_size]
        return y, cache


@pytest.mark.parametrize("chunk_size", [4, 50, 64, 100])
def test_a_leak_from_chunk_to_chunk_is_seen(chunk_size):
    sizes = dict(n_heads=4, n_groups=2, d_state=16, chunk_size=chunk_size)
    verify.is_causal(made(lambda: ssd.SSD(64, **sizes)), 64)
    with pytest.raises(verify.Refuted, match=r"the first [0-9]+ tokens alone"):
        verify.is_causal(made(lambda: Leaks(64, **sizes)), 64)


@pytest.mark.parametrize("name", verify.BORDERS)
def test_borders_are_looked_for_in_submodules(name):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    setattr(layer[1], name, 100)
    with pytest.raises(AssertionError, match=r"\(3, 305\), got shape"):
        verify.is_causal(nn.Sequential(layer, nn.Flatten(0, 1)), 4)
    setattr(layer[1], name, 1000)
    with pytest.raises(ValueError, match="Sequential has a border at 1000 tokens: give an x"):
        verify.is_causal(layer, 4)
    verify.is_causal(layer, torch.randn(2, 5, 4))


def test_a_leak_from_block_to_block_is_seen():
    """ssd_chunked computes 16 chunks at a time: here the last token of them reads the next."""
    line = '"b c l g i p -> b (c l) (g i) p")[:, : x.shape[1]]\n'
    leak = "    n = CHUNKS_PER_BLOCK * size\n    y[:, n - 1 : -1 : n] += x[:, n::n]\n"
    leaks = plant(ssd, (line, line + leak))
    sizes = dict(n_heads=2, d_state=4, chunk_size=4)
    verify.is_causal(made(lambda: ssd.SSD(8, **sizes)), 8)
    with pytest.raises(verify.Refuted):
        verify.is_causal(made(lambda: leaks.SSD(8, **sizes)), 8)


def test_another_default_device_changes_nothing():
    """As on a machine where tensors are made on a GPU unless one says otherwise."""
    layer = made(SEQUENCE["SSD"])
    with torch.device("meta"):
        check_gradients("f = f", product, product, (TRUTH, TRUTH))
        check("y", TRUTH, TRUTH)
        must_differ("planted", off(10.0), TRUTH)
        for ask in [*ASKED_OF_TEXT, *ASKED_OF_CALLS, verify.shift_changes_nothing]:
            ask(layer, 8)
        verify.every_parameter_learns(layer, 8)


def test_a_question_that_says_nothing_is_refused():
    with pytest.raises(ValueError, match="Identity has no parameter"):
        verify.every_parameter_learns(nn.Identity(), 4)
    with pytest.raises(AssertionError, match="does not depend on x"):
        verify.is_causal(lambda x: torch.zeros_like(x), 4)
    with pytest.raises(AssertionError, match="is there dropout"):
        verify.is_causal(nn.Dropout(0.5), 4)
    for layer in (nn.Linear(4, 4), ssd.SSD(4, n_heads=2, position="decay")):
        with pytest.raises(ValueError, match=r"positions do not change what .* gives"):
            verify.shift_changes_nothing(layer, 4)
    with pytest.raises(ValueError, match="returns no cache"):
        verify.pieces_equal_one_pass(nn.Linear(4, 4), 4)
    with pytest.raises(ValueError, match="takes no padding_mask"):
        verify.padding_changes_nothing(nn.Linear(4, 4), 4)
    for by in ((), (0,)):
        with pytest.raises(ValueError, match="by must contain a number other than 0"):
            verify.shift_changes_nothing(Layer(), 4, by=by)


def test_inputs_that_are_too_small_or_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"b ≥ 2, l ≥ 1, got shape \(1, 5, 4\)"):
        verify.rows_are_independent(Layer(), torch.randn(1, 5, 4))
    with pytest.raises(ValueError, match=r"l ≥ 5, got shape \(2, 3, 4\)"):
        verify.pieces_equal_one_pass(Layer(), torch.randn(2, 3, 4))
    with pytest.raises(ValueError, match=r"got shape \(5,\)"):
        verify.is_causal(Layer(), torch.randn(5))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        verify.is_causal(Layer(), 0)
    with pytest.raises(ValueError, match="tokens that differ"):
        verify.is_causal(nn.Embedding(3, 4), torch.zeros(2, 5, dtype=torch.long))
    for cuts in ((3, 3), (5, 2), (0,), (197,), (-1,)):
        with pytest.raises(ValueError, match="cuts must ascend"):
            verify.pieces_equal_one_pass(Layer(), 4, cuts=cuts)


def test_an_output_of_another_shape_is_refused():
    with pytest.raises(AssertionError, match=r"y must be \(b, l, \.\.\.\) = \(3, 197\), got shape"):
        verify.is_causal(lambda x: x.sum(1), 4)
    with pytest.raises(AssertionError, match="got str"):
        verify.is_causal(nn.Identity(), 4, call=lambda *given: ("no tensor", None))
    for call in (lambda module, x, *given: module(x), lambda module, x, *given: (x, x, x)):
        with pytest.raises(ValueError, match="give a `call` that returns y and a cache"):
            verify.is_causal(nn.Identity(), 4, call=call)


@pytest.mark.usefixtures("unchecked")  # torch traces no type checker
def test_wrapped_modules_are_seen_through():
    layer = made(SEQUENCE["QCAttn"])
    compiled = torch.compile(layer, backend="eager")
    assert verify.is_causal(compiled, 8) < 1e-10


def test_nan_is_no_agreement():
    with pytest.raises(verify.Refuted, match="inf") as caught:
        verify.is_causal(lambda x: x if x.shape[1] == 197 else x * torch.nan, 4)
    assert caught.value.difference == torch.inf
    with pytest.raises(AssertionError, match="y has NaN"):
        verify.rows_are_independent(lambda x: x / 0 * 0, 4)


def test_the_input_is_left_alone():
    x = torch.randn(3, 12, 4)
    before = x.clone()
    verify.is_causal(nn.LeakyReLU(inplace=True), x)
    assert torch.equal(x, before)


def test_what_is_only_rounding_is_no_gradient():
    """A bias that a softmax takes off again: its gradient is zero but for rounding."""

    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.bias = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x):
            keys = x * self.scale + self.bias
            return (x @ keys.mT).softmax(-1) @ x

    with pytest.raises(AssertionError, match=r"a gradient of zero for bias$"):
        verify.every_parameter_learns(Bias(), 4)


def test_another_call_is_translated():
    """Here only the cache is another: a dict."""

    def translated(module, x, position_ids, padding_mask=None, cache=None):
        kept = None if cache is None else cache["kept"]
        y, kept = module(x, position_ids, padding_mask=padding_mask, cache=kept)
        return y, {"kept": kept}

    for ask in [*ASKED_OF_TEXT, *ASKED_OF_CALLS, verify.shift_changes_nothing]:
        ask(Layer(), 4, call=translated)
    verify.every_parameter_learns(Layer(), 4, call=translated)
