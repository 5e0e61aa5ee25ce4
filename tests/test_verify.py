"""The verifier: what it lets pass, what it refuses, and that its lines are the same everywhere."""

import pytest
import torch
from torch import nn

from cheems_ref import ssd, verify
from cheems_ref.verify import TOLERANCE, check, check_gradients, must_differ

TRUTH = torch.tensor([[1.0, -200.0, 3.0], [0.0, 5.0, 6.0]], dtype=torch.float64)
ZERO, NAN, INF = torch.zeros_like(TRUTH), torch.nan, torch.inf


def off(by, at=(1, 2)):
    wrong = TRUTH.clone()
    wrong[at] += by
    return wrong


def all_say(error, rows):
    """Each call is refused with this error and a message."""
    for call, message in rows:
        with pytest.raises(error, match=message):
            call()


# --- equality -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tolerance_is_relative_to_the_largest_entry(dtype):
    truth = torch.tensor([1.0, -200.0], dtype=torch.float64)
    allowed = torch.tensor([TOLERANCE[dtype] * 200, 0], dtype=torch.float64)
    check("inside", (truth + allowed * 0.9).to(dtype), truth.to(dtype))
    with pytest.raises(AssertionError, match="outside"):
        check("outside", (truth + allowed * 3).to(dtype), truth.to(dtype))


def test_small_truths_are_compared_relatively_too():
    for small in (1e-11 * TRUTH, 1e-200 * TRUTH):
        check("equal", small * (1 + 1e-12), small)
        with pytest.raises(AssertionError, match="opposite"):
            check("opposite", -small, small)
        assert must_differ("opposite", -small, small) == 2


def test_an_absolute_error_is_allowed_by_atol(capsys):
    noise = 1e-12 * TRUTH
    check("zero", ZERO, ZERO)
    check("noise", noise, ZERO, atol=1e-9)
    check_gradients("noise", lambda a: 1e-12 * a, lambda a: 0 * a, (TRUTH,), atol=1e-9)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "✓ noise  [float64, tolerance 1e-10, atol 1e-09]",
        "✓ noise: 1 gradient  [float64, tolerance 1e-10, atol 1e-09]",
    ]
    rows = [
        (lambda: check("noise", noise, ZERO), r"zero everywhere: give atol$"),
        (lambda: check("noise", noise, ZERO, atol=1e-11), "allowed is 1e-11"),
        (lambda: check("relative", off(1.0), TRUTH, atol=1e-11), "allowed is 2e-08"),
    ]
    all_say(AssertionError, rows)


def test_the_line_holds_the_claim_and_the_tolerance_but_no_measurement(capsys):
    check("a = b", TRUTH, TRUTH)
    check("a = b", off(1e-11), TRUTH)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == "✓ a = b  [float64, tolerance 1e-10]"


BYTES = torch.tensor([[1], [2]], dtype=torch.uint8)
COMPLEX = torch.tensor([1 + 2j, 3 - 4j])
DIFFER = [
    (off(0.25), TRUTH, r"y: .*0\.25, at index \(1, 2\): 6\.25 instead of 6"),
    (TRUTH[:1], TRUTH, r"shape \(1, 3\), not \(2, 3\)"),
    (TRUTH.float(), TRUTH, r"dtype torch\.float32, not torch\.float64"),
    (off(NAN, (0, 1)), TRUTH, r"actual: 1 entries .* \(0, 1\)"),
    (TRUTH, off(-INF, (0, 1)), r"expected: 1 entries .* \(0, 1\)"),
    (off(INF), off(INF), "NaN or infinite"),
    (torch.arange(3), torch.tensor([0, 1, 3]), "up to 1"),
    (torch.tensor([True]), torch.tensor([False]), "up to 1"),
    (torch.tensor([2**53]), torch.tensor([2**53 + 1]), "up to 1"),  # equal in float64
    (COMPLEX, COMPLEX.conj(), "up to 8"),
]


def test_what_differs_is_refused_with_the_largest_error_and_its_place():
    all_say(AssertionError, [(lambda a=a, e=e: check("y", a, e), text) for a, e, text in DIFFER])
    for same in (torch.arange(3), torch.tensor([True]), COMPLEX):
        check("y", same, same)


def test_a_tolerance_that_would_let_all_pass_is_refused():
    for name in ("tol", "atol"):
        for tol in (NAN, INF, -1.0):
            with pytest.raises(ValueError, match="a tolerance is"):
                check("y", off(1.0), TRUTH, **{name: tol})
        with pytest.raises(ValueError, match="exactly"):
            check("integers", torch.tensor([1]), torch.tensor([2]), **{name: 1.0})
    with pytest.raises(AssertionError):
        must_differ("nothing planted", TRUTH, TRUTH, at_least=NAN)


def product(a, b):
    return a * b, a.sin()


def test_gradients_are_compared_of_outputs_that_match(capsys):
    check_gradients("f = f", product, lambda a, b: (b * a, a.sin()), (TRUTH, TRUTH + 1))
    assert capsys.readouterr().out == "✓ f = f: 2 gradients  [float64, tolerance 1e-10]\n"
    rows = [
        (lambda a, b: (a * b.detach() + b - b, a.sin()), "gradient of input 1"),
        (lambda a, b: (a * b, a.sin().detach()), "gradient of input 0"),
        (lambda a, b: (a * b.detach(), a.sin()), "input 1: the input does not reach"),
        (lambda a, b: (a * b, a.cos()), "gradient of input 0"),
        (lambda a, b: (a * b, a.mT), r"output 1: shape \(3, 2\), not \(2, 3\)"),
        (lambda a, b: a * b, "1 outputs, not 2"),
    ]
    for wrong, message in rows:
        with pytest.raises(AssertionError, match=message):
            check_gradients("f = g", wrong, product, (TRUTH, TRUTH + 1))
    with pytest.raises(AssertionError, match="gradient of input 0"):
        check_gradients("small", lambda a: 1e-200 * a, lambda a: -1e-200 * a, (TRUTH,))


def test_planted_mistake_must_be_seen(capsys):
    assert must_differ("planted", off(10.0), TRUTH) == pytest.approx(10 / 200)
    assert must_differ("planted", off(NAN), TRUTH) == INF
    assert capsys.readouterr().out.startswith("✗ planted: caught  [differs by more than 0.001]\n")
    assert must_differ("a truth of zero", off(10.0) - TRUTH, ZERO) == 10
    assert must_differ("bytes", *BYTES.unbind()) == 0.5
    assert must_differ("the conjugate", COMPLEX.conj(), COMPLEX) == pytest.approx(8 / 5)
    must_differ("a mask", torch.tensor([True]), torch.tensor([False]))
    rows = [
        (lambda: must_differ("too small", off(1e-6), TRUTH), "would not catch it"),
        (lambda: must_differ("no truth", TRUTH, off(NAN)), "right one"),
        (lambda: must_differ("blunt", off(10.0), TRUTH, at_least=1e-11), "within the tolerance"),
        (lambda: must_differ("shapes", TRUTH[:1], TRUTH), "shape"),
    ]
    all_say(AssertionError, rows)


# --- six questions to a module ------------------------------------------------------------------

CAUSAL, ROWS = verify.is_causal, verify.rows_are_independent
PIECES, PADDING = verify.pieces_equal_one_pass, verify.padding_changes_nothing
SHIFT, LEARNS = verify.shift_changes_nothing, verify.every_parameter_learns
QUESTIONS = [CAUSAL, ROWS, PIECES, PADDING, SHIFT]


def mean(x):
    return x.mean(1, keepdim=True)


def reads_the_next_chunk(y, x, real):
    y[:, 63:-1:64] += x[:, 64::64]
    return y


# What is made of y at the end, and the question that must see it.
AT_THE_END = {
    "length": (CAUSAL, lambda y, x, real: y / x.shape[1]),
    "a little later": (CAUSAL, lambda y, x, real: y + 1e-7 * mean(x)),
    "later, beside large numbers": (
        CAUSAL,
        lambda y, x, real: torch.cat([y + mean(x), torch.full_like(y, -1e30)], dim=-1),
    ),
    "writes into x": (CAUSAL, lambda y, x, real: x.copy_(x.amax(1, True).expand_as(x)) * 1.0),
    "the last of a chunk reads the next": (CAUSAL, reads_the_next_chunk),
    "rows": (ROWS, lambda y, x, real: y - x.mean(0, keepdim=True)),
    "pads behind": (
        PADDING,
        lambda y, x, real: y + mean(x) * bool(real[:, 0].all() and not real.all()),
    ),
    "NaN without padding": (PADDING, lambda y, x, real: y / 0 * 0 if len(x) == 1 else y),
    "padding of a chunk": (
        PADDING,
        lambda y, x, real: y + ((1 - real).sum(1) == 64)[:, None, None],
    ),
}
FAULTS = [(ask, fault) for fault, (ask, _) in AT_THE_END.items()] + [
    (ROWS, "positions of row 0"),
    (PIECES, "forgets the cache"),
    (PIECES, "a whole chunk is forgotten"),
    (PADDING, "pads in front"),
    (SHIFT, "position"),
]


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
        if self.fault == "position":
            y = y + 1e-3 * position_ids[..., None]
        if self.fault == "a whole chunk is forgotten":
            total = total * (x.shape[1] % 64 > 0)
        if self.fault in AT_THE_END:
            y = AT_THE_END[self.fault][1](y, x, real)
        return y, total[:, -1]


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
    """Three parameters, of which y makes its own use of the last."""

    def __init__(self, use):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(3)
        )
        self.use = use

    def forward(self, x):
        return self.use(x * self.a + self.b, self.c)


def names_what_does_not_learn(m):
    for use, message in (
        (lambda y, c: y, "a gradient of zero for c"),
        (lambda y, c: y + 0 * c, "a gradient of zero for c"),
        (lambda y, c: (y @ (y + c).mT).softmax(-1) @ y, "a gradient of zero for c"),  # rounding
        (lambda y, c: y + (c - 1).sqrt(), "NaN or infinity for c"),
    ):
        with pytest.raises(AssertionError, match=f"learns: {message}$"):
            m.every_parameter_learns(Parameters(use), 4)
    for use in (  # of a table, some rows are enough
        lambda y, c: y + c[0],
        lambda y, c: torch.cat([y[:, :64], y[:, 64:] * c], dim=1),
    ):
        assert m.every_parameter_learns(Parameters(use), 4) == 3
    frozen = Parameters(lambda y, c: y)
    frozen.c.requires_grad_(False)
    assert m.every_parameter_learns(frozen, 4) == 2


def test_what_does_not_learn_is_named():
    names_what_does_not_learn(verify)


@pytest.mark.parametrize(("chunks", "chunk_size"), [(1, 4), (1, 100), (ssd.CHUNKS_PER_BLOCK, 4)])
def test_a_leak_from_chunk_to_chunk_or_from_block_to_block_is_seen(chunks, chunk_size):
    """The last token of each reads the first of the next; a block is 16 chunks."""

    class Leaks(ssd.SSD):
        def _mix(self, x, dt, A, B, C, state):
            y, state = super()._mix(x, dt, A, B, C, state)
            n = chunks * min(chunk_size, x.shape[1])
            y = y.clone()
            y[:, n - 1 : -1 : n] += x[:, n::n]
            return y, state

    sound, wrong = (
        layer(8, n_heads=2, d_state=4, chunk_size=chunk_size).double() for layer in (ssd.SSD, Leaks)
    )
    CAUSAL(sound, 8)
    with pytest.raises(verify.Refuted, match=r"the first [0-9]+ tokens alone"):
        CAUSAL(wrong, 8)


def test_borders_are_looked_for_in_submodules():
    for name in verify.BORDERS:
        layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        setattr(layer[1], name, 100)
        with pytest.raises(AssertionError, match=r"\(3, 305\), got shape"):
            CAUSAL(nn.Sequential(layer, nn.Flatten(0, 1)), 4)
        setattr(layer[1], name, 1000)
        with pytest.raises(ValueError, match="Sequential has a border at 1000 tokens: give an x"):
            CAUSAL(layer, 4)
        CAUSAL(layer, torch.randn(2, 5, 4))


def test_complex_outputs_are_compared_whole():
    CAUSAL(lambda x: torch.complex(x, x.cumsum(1)), 4)
    with pytest.raises(verify.Refuted):
        CAUSAL(lambda x: torch.complex(x, mean(x).expand_as(x)), 4)


def test_another_default_device_changes_nothing():
    """As on a machine where tensors are made on a GPU unless one says otherwise."""
    layer = Layer()
    with torch.device("meta"):
        check_gradients("f = f", product, product, (TRUTH, TRUTH))
        must_differ("planted", off(10.0), TRUTH)
        for ask in [*QUESTIONS, LEARNS]:
            ask(layer, 4)


def test_questions_that_say_nothing_and_inputs_that_do_not_fit_are_refused():
    linear = nn.Linear(4, 4)
    all_say(AssertionError, [
        (lambda: CAUSAL(lambda x: 0 * x, 4), "does not depend on x"),
        (lambda: CAUSAL(nn.Dropout(0.5), 4), "is there dropout"),
        (lambda: CAUSAL(lambda x: x.sum(1), 4), r"y must be .* = \(3, 197\), got shape"),
        (lambda: CAUSAL(linear, 4, call=lambda *given: ("no tensor", None)), "got str"),
        (lambda: CAUSAL(lambda x: x if x.shape[1] == 197 else x * NAN, 4), "differs by inf"),
        (lambda: ROWS(lambda x: x / 0 * 0, 4), "y has NaN"),
    ])  # fmt: skip
    all_say(ValueError, [
        (lambda: LEARNS(nn.Identity(), 4), "Identity has no parameter"),
        (lambda: SHIFT(linear, 4), r"positions do not change what .* gives"),
        (lambda: SHIFT(Layer(), 4, by=()), "by must contain a number other than 0"),
        (lambda: SHIFT(Layer(), 4, by=(0,)), "by must contain a number other than 0"),
        (lambda: PIECES(linear, 4), "returns no cache"),
        (lambda: PADDING(linear, 4), "takes no padding_mask"),
        (lambda: ROWS(Layer(), torch.randn(1, 5, 4)), r"b ≥ 2, l ≥ 1, got shape \(1, 5, 4\)"),
        (lambda: PIECES(Layer(), torch.randn(2, 3, 4)), r"l ≥ 5, got shape \(2, 3, 4\)"),
        (lambda: CAUSAL(Layer(), torch.randn(5)), r"got shape \(5,\)"),
        (lambda: CAUSAL(Layer(), 0), "at least 1, got 0"),
        (lambda: CAUSAL(nn.Embedding(3, 4), torch.zeros(2, 5).long()), "tokens that differ"),
        (lambda: CAUSAL(linear, 4, call=lambda module, x, *_: module(x)), "returns y and a cache"),
        *((lambda cuts=cuts: PIECES(Layer(), 4, cuts=cuts), "cuts must ascend")
          for cuts in ((3, 3), (0,), (197,), (-1,))),
    ])  # fmt: skip


@pytest.mark.usefixtures("unchecked")  # torch traces no type checker
def test_wrapped_modules_are_seen_through():
    compiled = torch.compile(Layer(), backend="eager")
    assert CAUSAL(compiled, torch.randn(2, 3, 4).double()) < 1e-10


def test_the_input_is_left_alone():
    x = torch.randn(3, 12, 4)
    before = x.clone()
    CAUSAL(nn.LeakyReLU(inplace=True), x)
    assert torch.equal(x, before)


def test_another_call_is_translated():
    """Here only the cache is another: a dict."""

    def translated(module, x, position_ids, padding_mask=None, cache=None):
        kept = None if cache is None else cache["kept"]
        y, kept = module(x, position_ids, padding_mask=padding_mask, cache=kept)
        return y, {"kept": kept}

    for ask in [*QUESTIONS, LEARNS]:
        ask(Layer(), 4, call=translated)
