"""Choosing ids, and text."""

import itertools
import math

import pytest
import torch
import whole as model
from models import ask, built, ids, properties_in, refused
from properties import normal, rows

from cheems_ref.verify import check

# --- choosing an id: properties of a module m -------------------------------------------------


def probabilities(logits, temperature, top_k, top_p):
    """By the words of the docstring, one row, in Python's own numbers."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    share = [w / sum(weights) for w in weights]
    kept = len(order)
    if top_p is not None:
        kept = next(n for n in range(1, kept + 1) if sum(share[:n]) >= top_p or n == kept)
    p = [0.0] * len(logits)
    for i, s in zip(order[:kept], share, strict=False):
        p[i] = s / sum(share[:kept])
    return p


def chosen_ids(m, logits, seed=1, **choice):
    try:
        generator = torch.Generator().manual_seed(seed)
        return m.sample(logits, m.Sampling(generator=generator, **choice))
    except RuntimeError as error:
        raise AssertionError(f"nothing can be drawn from {logits.dtype} with {choice}") from error


def draws_follow(m, rows, temperature=1.0, top_k=None, top_p=None, n=4000, dtype=torch.float64):
    """Every id is drawn as often as it should be, within five sigma, in each of the rows."""
    logits = torch.tensor(rows, dtype=dtype).repeat(n, 1)
    got = chosen_ids(m, logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert got.dtype == torch.int64 and got.shape == (n * len(rows),)
    for row, drawn in zip(rows, got.view(n, -1).unbind(1), strict=True):
        count = torch.bincount(drawn, minlength=len(row)).tolist()
        want = probabilities(row, temperature, top_k, top_p)
        for i, (c, p) in enumerate(zip(count, want, strict=True)):
            off, sigma = abs(c - n * p), math.sqrt(n * p * (1 - p))
            assert off <= 5 * sigma + 1e-6, (
                f"id {i} of {row} at T = {temperature}, k = {top_k}, p = {top_p}: "
                f"drawn {c} times, not about {n * p:.0f}"
            )


ROWS = [[0.3, -1.0, 1.1, 0.4, -0.2, 0.9], [2.0, 0.5, -math.inf, 1.5, 1.0, -3.0]]
# Whole numbers as weights, and p between two of their sums, where rounding cannot matter.
WEIGHTS = [[math.log(w) for w in (4, 1, 8, 2, 1)], [math.log(w) for w in (1, 1, 5, 6, 3)]]
CHOICES = (
    (ROWS, {}),
    (ROWS, dict(temperature=0.4)),
    (ROWS, dict(temperature=3.0, top_k=5)),
    (ROWS, dict(top_k=99)),
    (WEIGHTS, dict(top_p=0.3)),
    (WEIGHTS, dict(top_p=14.5 / 16)),
    (WEIGHTS, dict(top_p=1.0)),
    (WEIGHTS, dict(top_k=3, top_p=12.5 / 14)),  # of 8, 4 and 2: all three; without k two of five
    (WEIGHTS, dict(temperature=2.0, top_k=4, top_p=0.6)),
)
# Probabilities and sums that are exact: p is reached exactly, and what follows is left out.
EXACT = {0.25: 1, 0.5: 2, 0.75: 3, 1.0: 4, 0.250001: 2, 0.749999: 3}


def draws_follow_every_choice(m):
    for weights, choice in CHOICES:
        draws_follow(m, weights, **choice)


def top_p_keeps_the_token_that_crosses(m):
    for p, kept in EXACT.items():
        got = {*chosen_ids(m, torch.zeros(500, 4), top_p=p).tolist()}
        assert got == {*range(kept)}, f"top_p = {p} keeps {got}"


def the_smallest_top_p_keeps_the_best(m):
    """Also one that is 0 in the dtype of the logits, which would otherwise keep no id at all."""
    logits = normal(4, 9, seed=5).float()
    for top_p in (1e-30, 1e-46, 1e-300):
        try:
            chosen = m.sample(logits, m.Sampling(1.0, None, top_p))
        except RuntimeError as error:
            raise AssertionError(f"top_p = {top_p} keeps no id") from error
        assert torch.equal(chosen, logits.argmax(-1)), top_p


def temperature_0_takes_the_first_of_the_largest(m):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0], [-1e4, -math.inf, 1e4, 0.0]])
    for choice in ({}, dict(top_k=3, top_p=0.9)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            got = m.sample(logits.to(dtype), m.Sampling(temperature=0, **choice))
            assert got.tolist() == [1, 0, 2] and got.dtype == torch.int64, f"{got}, {choice}"


def top_k_of_1_and_the_cold_are_greedy(m):
    """Also where the probabilities round to equal ones."""
    logits = normal(50, 30, dtype=torch.float32)
    for temperature, scale in ((1e-3, 1.0), (1.0, 1.0), (30.0, 1.0), (1e12, 1.0), (1.0, 1e-9)):
        got = m.sample(scale * logits, m.Sampling(temperature=temperature, top_k=1))
        assert torch.equal(got, logits.argmax(-1)), f"T = {temperature}, {scale} times"
    for temperature in (1e-6, 1e-40, 5e-324):
        got = chosen_ids(m, logits, temperature=temperature)
        assert torch.equal(got, logits.argmax(-1)), f"T = {temperature} is not greedy"


def extremes_are_drawn(m):
    """The largest, by 1e4 and more, in every dtype, and at temperatures down to 2e-38."""
    rows = [[1e4, -1e4, 0.0], [-math.inf, 0.0, -math.inf], [-6e4, -5e4, -math.inf], [0.0, 0.0, 6e4]]
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    choices = ({}, dict(top_k=2), dict(top_p=0.5), dict(top_k=3, top_p=1.0))
    for dtype, choice, t in itertools.product(dtypes, choices, (1.0, 1e-6, 2e-38)):
        got = chosen_ids(m, torch.tensor(rows, dtype=dtype), temperature=t, **choice)
        assert got.tolist() == [0, 1, 1, 2], f"{dtype}, T = {t}, {choice}"
    hot = chosen_ids(m, torch.tensor(rows).repeat(99, 1), temperature=1e9).view(-1, 4)
    assert {*hot[:, 0].tolist()} == {0, 1, 2} and {*hot[:, 1].tolist()} == {1}


def sixteen_bits_are_summed_in_float32(m):
    """Of 650 equal ids top_p takes 453; sums of bfloat16 would make it 449."""
    logits = torch.zeros(15 * 453, 650, dtype=torch.bfloat16)
    got = chosen_ids(m, logits, top_p=452.5 / 650)
    assert {*got.tolist()} == {*range(453)}, f"ids up to {got.max()}, not 452"


def a_seed_decides(m):
    logits = torch.zeros(64, 1000)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    one, again, two = (chosen_ids(m, logits, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again), "the same seed gives other ids"
    assert not torch.equal(one, two), "another seed gives the same ids"
    assert torch.equal(torch.random.get_rng_state(), state), "torch's own generator has moved"
    first = m.sample(logits)
    assert not torch.equal(m.sample(logits), first)
    torch.manual_seed(5)
    assert torch.equal(m.sample(logits), first), "torch.manual_seed does not decide"


# --- text: properties of a module m -----------------------------------------------------------


def lengths(*numbers, side):
    """A padding mask of rows with so many tokens, filled up to the longest."""
    columns = torch.arange(max(numbers))
    counts = torch.tensor(numbers)[:, None]
    return columns < counts if side == "right" else columns >= max(numbers) - counts


def greedy_is_one_pass(m, case, length=5, new=9, b=2):
    """Step by step the logits, and so the ids, of one pass over prompt and text."""
    net = built(m, case)
    prompt, seen, logits = ids(b, length), [], net.logits
    net.logits = lambda x: seen.append(logits(x)) or seen[-1]
    got = m.generate(net, prompt, new, m.Sampling(temperature=0))
    del net.logits
    assert got.shape == (b, new) and got.dtype == torch.int64
    with torch.no_grad():
        want = net(torch.cat([prompt, got[:, :-1]], dim=1))[0][:, length - 1 :]
    largest = want.topk(2, dim=-1).values
    gap = (largest[..., 0] - largest[..., 1]).min().item()
    assert gap > 1e-9, f"two ids are as likely, up to {gap}: nothing is shown"
    check("logits of every step = of one pass", torch.stack(seen, dim=1), want)
    assert torch.equal(got, want.argmax(dim=-1)), "other ids than those of one pass"


def prompts_of_different_lengths_do_not_meet(m, case):
    """Filled up on either side or in the middle, each row goes on as it does alone."""
    net, ragged = built(m, case), rows("#.##..#", "#######", ".#....#")
    greedy = m.Sampling(temperature=0)
    for real in (*(lengths(3, 6, 5, side=side) for side in ("left", "right")), ragged):
        prompt = ids(*real.shape)
        got = m.generate(net, prompt, 8, greedy, padding_mask=real)
        for i, row in enumerate(real):
            want = m.generate(net, prompt[i : i + 1, row], 8, greedy)[0]
            assert torch.equal(got[i], want), f"{case}: row {i} writes {got[i]}, alone {want}"
        other = torch.where(real, prompt, (prompt + 1) % net.config.vocab_size)
        again = m.generate(net, other, 8, greedy, padding_mask=real)
        assert torch.equal(again, got), f"{case}: ids at padding are looked at"


def writes(m, net, new=12, seed=0, temperature=5.0, eos_id=None, **choice):
    """Three texts; these models are so sure of themselves that they need some heat to vary."""
    choice |= dict(generator=torch.Generator().manual_seed(seed), temperature=temperature)
    return m.generate(net, ids(3, 4), new, m.Sampling(**choice), eos_id=eos_id)


def a_row_that_ends_goes_on_ending(m, case="SEIE"):
    """Rows write on until they have written eos_id, and all stop when all have."""
    net = built(m, case)
    free, stopped = writes(m, net, 24), set()
    for eos in (None, *free.unique().tolist()[:6]):
        ends = [row.index(eos) if eos in row else len(row) for row in free.tolist()]
        got = writes(m, net, 24, eos_id=eos)
        stopped.add(got.shape[1])
        assert got.shape[1] == min(max(ends) + 1, free.shape[1]), f"eos {eos} after {ends}"
        for row, want, end in zip(got, free, ends, strict=True):
            assert torch.equal(row[: end + 1], want[: got.shape[1]][: end + 1]), "before its end"
            assert eos is None or (row[end:] == eos).all(), "a row that has ended writes on"
    assert len(stopped) > 2, "no text ended before another"


def text_is_sampled_as_asked(m, case="SEIE"):
    """Every option of `generate` reaches `sample`."""
    net = built(m, case)
    free, greedy = writes(m, net), writes(m, net, temperature=0)
    assert torch.equal(writes(m, net), free), "the same seed writes another text"
    assert not torch.equal(writes(m, net, seed=1), free), "another seed writes the same text"
    assert not torch.equal(free, greedy)
    for option in (
        dict(top_k=1),
        dict(top_p=1e-6),
        dict(top_p=1e-300),  # 0 in float32
        dict(temperature=1e-6),
    ):
        assert torch.equal(writes(m, net, **option), greedy), f"{option} is not greedy"
    generator = torch.Generator().manual_seed(0)
    streamed = m.stream(net, ids(3, 4), 12, m.Sampling(5.0, generator=generator))
    assert torch.equal(torch.stack([*streamed], dim=1), free), "stream writes another text"


def text_comes_as_it_is_written(m, case="SHSRAH"):
    """One pass over the prompt, then one over each new id, and none before it is asked for."""
    net, passes = built(m, case), []
    net.embedding.register_forward_hook(lambda layer, args, y: passes.append(tuple(args[0].shape)))
    steps = m.stream(net, ids(2, 5), 4, m.Sampling(temperature=0))
    assert passes == [], "the model runs before anything is asked for"
    for n in range(1, 5):
        assert next(steps).shape == (2,)
        assert passes == [(2, 5), *[(2, 1)] * (n - 1)], f"{passes} for {n} ids"
    assert next(steps, None) is None
    assert m.generate(net, ids(2, 5), 0).shape == (2, 0) and len(passes) == 4


def no_graph_is_kept(m, case="SEIE"):
    """Writing builds no graph; what it yields, and the model after it, can still be learnt from."""
    net, graphs = built(m, case), []
    hook = net.norm.register_forward_hook(lambda layer, args, y: graphs.append(y.requires_grad))
    steps = m.stream(net, ids(2, 5), 3)
    new = next(steps)
    assert graphs == [False], "the pass keeps its graph"
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    hook.remove()
    net(new[:, None])[0].sum().backward()  # autograd would refuse an id of inference
    assert all(p.grad is not None for p in net.parameters())


# --- bad input --------------------------------------------------------------------------------


FIVE = ids(2, 5)
EVERY_ROW = "every row of the prompt needs at least one real token"

# fmt: off
# fmt: on


def a_bad_call_is_refused_at_once(m):
    """Before the first id is asked for."""
    net, gated, routed = (built(m, case) for case in ("SEIE", "IDSP", "SHSRAH"))
    ragged = lengths(3, 20, side="right")
    need = "prompt needs 21 positions, but mask='gate' has max_positions = 20"
    for asked, message, arguments in (
        (gated, need, dict(prompt=ids(2, 20), max_new_tokens=2)),
        (gated, need, dict(prompt=ids(2, 20), max_new_tokens=2, padding_mask=ragged)),
        (net, "max_new_tokens must be at least 0, got -1", dict(max_new_tokens=-1)),
        (net, "max_new_tokens must be a whole number, got 0.0", dict(max_new_tokens=0.0)),
        (net, EVERY_ROW, dict(prompt=FIVE[:, :0])),
        (net, r"eos_id must be a number in \[0, 19\), got 19", dict(eos_id=19)),
        (net, "eos_id must be at least 0, got -1", dict(eos_id=-1)),
        (net, "eos_id must be a whole number, got 3.0", dict(eos_id=3.0)),
        (net, r"eos_id must be a whole number, got \[3\]", dict(eos_id=[3])),
        (net, "eos_id must be a whole number, got tensor", dict(eos_id=torch.tensor(3))),
        (net, EVERY_ROW, dict(padding_mask=rows("..#..", "....."))),
        (net, r"prompt must be in \[0, 19\)", dict(prompt=FIVE + 15)),
        (routed, r"compile=True is not for routed layers.* \['H', 'R'\]", dict(compile=True)),
    ):
        given = dict(prompt=FIVE, max_new_tokens=3) | arguments
        refused((ValueError, TypeError), message, m.stream, asked, **given)


def the_table_may_be_filled(m, case="IDSP"):
    """No place is needed for the last id, for padding, and for a prompt that is not read."""
    net = built(m, case)
    real = torch.cat([torch.zeros(2, 30).bool(), lengths(3, 5, side="left")], dim=1)
    for b, length, new, mask in ((2, 5, 16, None), (2, 35, 16, real), (2, 25, 0, None)):
        try:
            assert m.generate(net, ids(b, length), new, padding_mask=mask).shape == (b, new)
        except ValueError as error:
            raise AssertionError(f"{length} tokens and {new} new ones: refused") from error


@pytest.mark.usefixtures("unchecked")
def test_a_wrong_choice_is_refused():
    for choice, message in (
        (dict(temperature=-0.5), "temperature must be .*, got -0.5"),
        (dict(temperature=math.inf), "temperature must be .*, got inf"),
        (dict(top_k=0), "top_k must be at least 1, got 0"),
        (dict(top_p=0), r"top_p must be a number in \(0, 1\], got 0"),
        (dict(top_p=1.5), r"top_p must be a number in \(0, 1\], got 1.5"),
    ):
        refused(ValueError, message, model.Sampling, **choice)


def test_no_rows_write_as_many_ids_as_any():
    for temperature, mask in ((0, None), (1.0, None), (1.0, torch.ones(0, 5).bool())):
        choice = model.Sampling(temperature)
        got = model.generate(built(model, "SEIE"), ids(0, 5), 3, choice, padding_mask=mask)
        assert got.shape == (0, 3)


# --- the package has them ---------------------------------------------------------------------

HELD = properties_in(globals(), cases=("SEIE", "SHSRAH", "SGIM"))


@pytest.mark.parametrize("has_property, case", HELD.values(), ids=HELD)
def test_the_model_has_the_property(has_property, case):
    ask(has_property, case)
