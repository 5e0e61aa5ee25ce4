"""Training: the schedule, the update and the evaluation by hand, and planted mistakes.

Runs that are killed and resumed are in test_checkpoint.py, what both share in training.py.
"""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from training import (
    a_model,
    a_text,
    config,
    everything,
    same,
    trained,
)

import cheems_ref.train as train
from cheems_ref.verify import check

# --- the learning rate ------------------------------------------------------------------------

# By hand, as shares of the largest: 3 updates up; then 7 in which the cosine takes 6 steps of 30°.
RISING = [1 / 3, 2 / 3, 1]
COSINE = [1, 0.1 + 0.9 * (1 + 3**0.5 / 2) / 2, 0.775, 0.55, 0.325]
COSINE += [0.1 + 0.9 * (1 - 3**0.5 / 2) / 2, 0.1]
BY_HAND = [
    (dict(steps=10, warmup=0.3), RISING + COSINE),
    (dict(steps=10, warmup=0.21), RISING + COSINE),  # 2.1 updates: rounded up
    (dict(steps=7, warmup=0.0), COSINE),
    (dict(steps=7, warmup=0.0, min_lr_ratio=0.0), [(share - 0.1) / 0.9 for share in COSINE]),
    (dict(steps=3, warmup=1.0), RISING),
    (dict(steps=2, warmup=0.0), [1, 0.1]),
    *((dict(steps=1, warmup=warmup), [1]) for warmup in (0.0, 0.5, 1.0)),
    # Over a schedule: for fewer updates than it has, for all, for more.
    *((dict(steps=n, decay_steps=7, warmup=0.0), [*COSINE, 0.1, 0.1][:n]) for n in (4, 7, 9)),
    (dict(steps=5, decay_steps=3, warmup=1.0), [*RISING, 1, 1]),
]


def rates(m, **changes):
    c = config(m, **changes)
    return torch.tensor([m.learning_rate(i, c) for i in range(c.steps)], dtype=torch.float64)


def rates_are_those_by_hand(m):
    for changes, shares in BY_HAND:
        want = torch.tensor(shares, dtype=torch.float64)
        got = rates(m, learning_rate=2e-3, **changes)
        check(f"learning rate by hand, {changes}", got / 2e-3, want)


def rises_evenly_and_falls_to_its_end(m):
    for steps, warmup, final in itertools.product((2, 3, 50), (0.0, 0.1, 0.34), (0.0, 0.1, 1.0)):
        rate = rates(m, steps=steps, warmup=warmup, min_lr_ratio=final, learning_rate=3.0)
        rising, where = math.ceil(warmup * steps), f"{steps} steps, warm-up {warmup}, end {final}"
        assert rate.max() == 3, f"the largest rate is {rate.max()}, not 3: {where}"
        up = 3 * torch.arange(1, rising + 1, dtype=torch.float64) / max(1, rising)
        check(f"even steps up, {where}", rate[:rising], up)
        assert (rate[rising:].diff() <= 0).all(), f"not monotone: {where}"
        if steps - rising > 1:
            check(f"the end, {where}", rate[-1:], torch.full_like(rate[-1:], 3.0 * final))
            half = (rate[rising:] + rate[rising:].flip(0)) / 2  # a cosine is odd about its middle
            check(f"half-way, {where}", half, torch.full_like(half, 1.5 * (1 + final)))


# --- the update -------------------------------------------------------------------------------


def decays_what_has_two_axes(m):
    model = a_model(pattern="SCIEAK", tie_embeddings=False)
    optimizer = m.make_optimizer(model, config(m, weight_decay=0.3, betas=(0.8, 0.9)))
    decay = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(decay)
    parameters = dict(model.named_parameters())
    assert decay.keys() == {*parameters.values()}, "not every parameter is trained"
    assert {p.ndim for p in parameters.values()} == {1, 2, 3, 4}
    for name, p in parameters.items():
        assert decay[p] == (0.3 if p.ndim >= 2 else 0), f"decay {decay[p]} of {name}: {p.ndim} axes"
    assert all(g["betas"] == (0.8, 0.9) for g in optimizer.param_groups), "betas are not handed on"


def updates_by_hand(m, model, ids, c):
    """The losses, and after each update the parameters: clipped gradients, AdamW in its formulas.

    m = β₁ m + (1 - β₁) g,  v = β₂ v + (1 - β₂) g²,  p ← p - η λ p - η m̂ / (√v̂ + 10⁻⁸)
    """
    parameters, generator = [*model.parameters()], torch.Generator().manual_seed(c.seed)
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    training, (b1, b2) = ids[: len(ids) - math.ceil(c.eval_fraction * len(ids))], c.betas
    for i in range(1, c.steps + 1):
        windows = m.random_windows(training, c, generator)
        logits = model(windows[:, :-1])[0]
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        grads = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(g.square().sum().item() for g in grads))
        grads = [g * min(1, c.max_grad_norm / (norm + 1e-6)) for g in grads]  # 1e-6 is torch's own
        rate = m.learning_rate(i - 1, c)
        with torch.no_grad():
            for p, g, mean, square in zip(parameters, grads, first, second, strict=True):
                mean.copy_(b1 * mean + (1 - b1) * g)
                square.copy_(b2 * square + (1 - b2) * g * g)
                if p.ndim >= 2:
                    p -= rate * c.weight_decay * p
                p -= rate * mean / (1 - b1**i) / ((square / (1 - b2**i)).sqrt() + 1e-8)
        yield loss.item(), grads, [p.detach().clone() for p in parameters]


def updates_are_adamw(m):
    for clip in (1e-5, 1e9):
        c = config(m, steps=4, warmup=0.5, learning_rate=0.02, weight_decay=0.5, max_grad_norm=clip)
        models = [a_model(dtype=torch.float64, pattern="SM") for _ in range(2)]
        want, got = updates_by_hand(m, models[0], a_text(), c), []

        def compare(run, want=want, got=got, clip=clip):
            loss, grads, parameters = next(want)
            got.append(loss)
            named = run.model.named_parameters()
            for (name, p), g, w in zip(named, grads, parameters, strict=True):
                where = f"{name}, clip {clip:g}, update {run.step}"
                check(f"gradient = clipped by hand: {where}", p.grad / clip, g / clip)
                check(f"AdamW by hand: {where}", p.detach(), w)

        run = m.train(models[1], a_text(), c, progress_bar=False, after_step=compare)
        check("losses by hand", *(torch.tensor(t, dtype=torch.float64) for t in (run.losses, got)))


def clips_all_gradients_together(m):
    norms = {clip: [] for clip in (1e9, 1e-3)}
    for clip, found in norms.items():

        def note(run, found=found):
            grads = torch.cat([p.grad.flatten() for p in run.model.parameters()])
            found.append(grads.double().norm().item())

        m.train(
            a_model(), a_text(), config(m, max_grad_norm=clip), progress_bar=False, after_step=note
        )
    assert min(norms[1e9]) > 2e-3, "nothing to clip"
    check("norm = clip", torch.tensor(norms[1e-3]), torch.full((12,), 1e-3), tol=2e-6)


def follows_the_schedule(m):
    """In both groups of the optimizer, and `after_step` comes after each update, once."""
    c, seen = config(m), []

    def note(run):
        lr = {group["lr"] for group in run.optimizer.param_groups}
        seen.append((run.step, len(run.losses), *lr))

    m.train(a_model(), a_text(), c, progress_bar=False, after_step=note)
    assert seen == [(i + 1, i + 1, m.learning_rate(i, c)) for i in range(12)]


# --- texts and windows ------------------------------------------------------------------------


def the_end_is_held_out(m):
    for n, share in itertools.product((0, 1, 2, 10, 101), (0.001, 0.1, 0.5, 0.999)):
        ids = torch.arange(n)
        training, held_out = m.split_text(ids, share)
        assert torch.equal(torch.cat([training, held_out]), ids), "not one part after the other"
        assert len(held_out) == math.ceil(share * n), f"{len(held_out)} of {n} tokens for {share}"


def windows_are_any_of_the_text(m):
    """Each a piece of the text; every piece can be drawn, the first and the last among them."""
    for n in (10, 12, 30):
        c, generator = config(m, batch_size=50), torch.Generator().manual_seed(0)
        starts = set()
        for _ in range(20):
            try:
                windows = m.random_windows(3 * torch.arange(n), c, generator)
            except IndexError as error:
                raise AssertionError("a window reaches past the end") from error
            assert windows.shape == (50, 9), f"{tuple(windows.shape)}, not (batch, length + 1)"
            assert (windows.diff() == 3).all(), "a window is not a piece of the text"
            starts |= {*windows[:, 0].tolist()}
        assert starts == {*range(0, 3 * (n - 8), 3)}, f"windows start at {sorted(starts)}, n = {n}"


def trains_on_one_part_and_evaluates_on_the_other(m):
    """The held-out text has letters of its own. Every letter of both parts is read."""
    ids, read = torch.cat([a_text(190, vocab=8), 8 + a_text(20, vocab=8)]), {True: [], False: []}
    model = a_model()

    def note(module, inputs):
        read[torch.is_grad_enabled()] += inputs[0].flatten().tolist()

    model.register_forward_pre_hook(note)
    trained(m, model=model, ids=ids, steps=60, evaluate_every=30, eval_fraction=20 / 210)
    assert {*read[True]} == {*range(8)}, "updates read the held-out text, or not all of the other"
    assert {*read[False]} == {*range(8, 16)}, "evaluations read the text that is trained on"


# --- evaluation -------------------------------------------------------------------------------


def decided(**changes):
    """A model with an opinion: its logits are far from each other."""
    model = a_model(**changes)
    with torch.no_grad():
        model.embedding.weight.mul_(50)
    return model


def one_by_one(model, ids, length):
    """Token t is predicted from those since the last multiple of `length` before it."""
    total = 0.0
    for t in range(1, len(ids)):
        before = ids[(t - 1) // length * length : t]
        logits = model(before[None])[0][0, -1].double()
        total += (logits.exp().sum().log() - logits[ids[t]]).item()
    return total / (len(ids) - 1)


def evaluation_is_one_by_one(m):
    model = decided(dtype=torch.float64)
    for n in (2, 3, 8, 9, 10, 16, 17, 18, 61):
        ids = a_text(n, seed=n)
        with torch.no_grad():
            want = torch.tensor(one_by_one(model, ids, 8))
        for batch_size in (1, 2, 3, 16):
            got = torch.tensor(m.evaluate(model, ids, seq_len=8, batch_size=batch_size))
            check(f"evaluation one by one: {n} tokens, {batch_size} windows at a time", got, want)


def evaluation_changes_nothing(m):
    for mode in (True, False):
        model = a_model().train(mode)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = copy.deepcopy([*model.parameters()])
        random = torch.get_rng_state()
        nats = m.evaluate(model, a_text(), seq_len=8)
        assert isinstance(nats, float)
        assert all(module.training is mode for module in model.modules()), "the mode is changed"
        grads = [p.grad for p in model.parameters()]
        assert all(g is not None and (g == 1).all() for g in grads), "gradients are changed"
        assert torch.equal(torch.get_rng_state(), random), "random numbers are taken"
        for p, q in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, q), "parameters are changed"


# --- training ---------------------------------------------------------------------------------


def test_a_text_that_repeats_itself_is_learned():
    ids = torch.tensor(list(b"the cat sat on the mat, and the dog lay on the log. " * 60))
    model = a_model(pattern="SM", vocab_size=256, d_model=32, d_ff=64)
    sizes = dict(steps=100, batch_size=4, seq_len=32, learning_rate=1e-2, evaluate_every=100)
    run = trained(train, model=model, ids=ids, **sizes)
    assert run.losses[0] == pytest.approx(math.log(256), abs=0.3), "a model knows nothing at first"
    reached = max(run.losses[-1], run.evaluations[-1][1])
    assert reached < 0.1 * math.log(256), f"{reached:.3f} nats"


def second_order(n=4000, v=5):
    """Each token is looked up by the two before it; one in ten is any."""
    generator = torch.Generator().manual_seed(0)
    table = torch.stack([torch.randperm(v, generator=generator) for _ in range(v)]).tolist()
    any_token = torch.randint(v, (n,), generator=generator).tolist()
    ids = [0, 1]
    for noise in (torch.rand(n, generator=generator) < 0.1).tolist():
        ids.append(any_token.pop() if noise else table[ids[-2]][ids[-1]])
    return torch.tensor(ids)


def entropies(ids, v=5):
    """Of a token, and of a token given the one before it, counted in the text itself, in nats."""
    pairs = torch.zeros(v, v, dtype=torch.float64)
    pairs.index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1).double(), accumulate=True)
    pairs /= pairs.sum()
    joint, single = (-torch.special.xlogy(p, p).sum().item() for p in (pairs, pairs.sum(1)))
    return single, joint - single


def test_more_is_learned_of_a_held_out_text_than_pairs_of_tokens_tell():
    ids = second_order()
    model = a_model(pattern="SM", vocab_size=5, d_model=32, d_ff=64, d_state=8, position="conv")
    sizes = dict(steps=120, batch_size=8, seq_len=32, learning_rate=1e-2, evaluate_every=60)
    run = trained(train, model=model, ids=ids, **sizes)
    _, pairs = entropies(train.split_text(ids, 0.1)[1])
    reached = run.evaluations[-1][1]
    assert pairs > 0.7, "pairs of tokens tell all"
    assert reached < 0.7 * pairs, f"{reached:.3f} nats, pairs of tokens {pairs:.3f}"


def seeds_decide(m):
    """The seed of the run decides all, and torch's own random numbers nothing."""
    runs = []
    for seed, global_seed in ((0, 0), (0, 5), (1, 0)):
        model = a_model()
        torch.manual_seed(global_seed)
        runs.append(trained(m, model=model, seed=seed))
    same("the same seed", everything(runs[1]), everything(runs[0]))
    assert not {*runs[2].losses} & {*runs[0].losses}, "another seed has the same losses"


def bfloat16_is_near(m):
    runs = {p: trained(m, precision=p, learning_rate=1e-3) for p in ("auto", "float32", "bfloat16")}
    losses = {p: torch.tensor(run.losses) for p, run in runs.items()}
    check("auto on a CPU is float32", losses["auto"], losses["float32"])
    check("losses in bfloat16", losses["bfloat16"], losses["float32"], tol=5e-3)
    assert (losses["bfloat16"] != losses["float32"]).all(), "both have the same losses"
    assert {p.dtype for p in runs["bfloat16"].model.parameters()} == {torch.float32}


# --- devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [torch.device("cuda"), torch.device("mps"), None])
def test_the_fastest_device_there_is(monkeypatch, gpu):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: gpu)
    assert train.default_device() == (gpu or torch.device("cpu"))


# --- bad input --------------------------------------------------------------------------------


def training(ids=None, **changes):
    return partial(trained, train, ids=ids, model=a_model(), **changes)


def evaluating(n=20, **options):
    return partial(train.evaluate, a_model(), a_text(n), **options)


NAN = math.nan
# fmt: off
IN = "must be a number in"
BAD = [
    *((partial(train.TrainConfig, **{name: value}), f"{name} must be at least 1, got {value}")
      for name in ("steps", "batch_size", "seq_len", "evaluate_every", "checkpoint_every",
                   "decay_steps")
      for value in (0, -3)),
    *((partial(train.TrainConfig, **{name: value}), rf"{name} {IN} \(0, inf\), got {value}")
      for name in ("learning_rate", "max_grad_norm") for value in (0.0, -1.0, math.inf, NAN)),
    *((partial(train.TrainConfig, **{name: value}), rf"{name} {IN} \[0, 1\], got {value}")
      for name in ("min_lr_ratio", "warmup") for value in (-0.1, 1.5, NAN)),
    *((partial(train.TrainConfig, eval_fraction=value), rf"fraction {IN} \(0, 1\), got {value}")
      for value in (0.0, 1.0, -0.1, NAN)),
    *((partial(train.TrainConfig, weight_decay=value), rf"decay {IN} \[0, inf\), got {value}")
      for value in (-0.1, NAN, math.inf)),
    *((partial(train.TrainConfig, betas=betas), rf"betas\[{i}\] {IN} \[0, 1\), got {got}")
      for betas, i, got in (((1.0, 0.9), 0, 1), ((0.9, 1.0), 1, 1), ((-0.1, 0.9), 0, -0.1),
                            ((0.9, NAN), 1, NAN))),
    *((partial(train.TrainConfig, betas=betas), r"betas must be two numbers, got \(0\.9,")
      for betas in ((0.9,), (0.9, 0.9, 0.9))),
    (partial(train.TrainConfig, precision="float16"), "precision must be .*, got 'float16'"),
    (partial(train.TrainConfig, steps=1.5), r"steps must be a whole number, got 1\.5"),
    *((partial(train.TrainConfig, seed=value), rf"seed must be a number in \[-.*, got {value}$")
      for value in (2**64, -(2**63) - 1, 10**20)),
    *((partial(train.TrainConfig, seed=value), rf"seed must be a whole number, got {value!r}")
      for value in (0.5, True, "0")),
    # 11 tokens: 9 to train on are one window, 2 held out
    (training(a_text(11)), r"11 tokens: too few for windows of seq_len \+ 1 = 9 .* 10%"),
    (training(a_text(30), eval_fraction=0.01), "30 tokens: too few .* part of 1%"),
    (training(a_text(1)), "1 tokens: too few"),
    (training(a_text(0)), "0 tokens: too few"),
    (training(a_text(200), seq_len=180), r"200 tokens: too few for .* \+ 1 = 181"),
    (training(a_text(200).float()), r"ids must be torch\.int64 or .* got torch\.float32"),
    (training(a_text(200)[None]), r"ids must be \(l,\), got shape \(1, 200\)"),
    (training(a_text(200) + 1), r"ids must be in \[0, 16\) everywhere, got .*, 16\]"),
    (evaluating(1), "nothing to predict in a text of 1 tokens"),
    (evaluating(0), "nothing to predict in a text of 0 tokens"),
    *((evaluating(**{name: value}), f"{name} must be at least 1, got {value}")
      for name in ("seq_len", "batch_size") for value in (0, -1)),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("function", "message"), BAD)
def test_bad_input_is_refused_with_its_name_and_numbers(function, message):
    with pytest.raises((TypeError, ValueError), match=message):
        function()


@pytest.mark.usefixtures("unchecked")
def test_the_shortest_texts_are_enough():
    assert trained(train, ids=a_text(12)).step == 12  # two windows, and one token to predict
    assert train.evaluate(a_model(), a_text(2)) > 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_a_text_of_other_integers_is_trained_on_without_a_copy(monkeypatch, dtype):
    ids, read, draw = a_text().to(dtype), [], train.random_windows
    monkeypatch.setattr(train, "random_windows", lambda t, *rest: read.append(t) or draw(t, *rest))
    run, want = trained(train, ids=ids), trained(train)
    assert all(part.data_ptr() == ids.data_ptr() for part in read[:12]), "the text is copied"
    assert run.losses == pytest.approx(want.losses, rel=1e-5)
    assert run.evaluations[-1] == pytest.approx(want.evaluations[-1], rel=1e-5)


def test_a_gradient_that_is_no_number_stops_the_run():
    model, before = a_model(), []

    def spoil(run):
        before[:] = [everything(run)]
        if run.step == 5:
            run.model.norm.weight.register_hook(lambda grad: grad * NAN)

    with pytest.raises(FloatingPointError, match=r"diverged in update 6: .* gradient nan"):
        train.train(model, a_text(), config(train, steps=6), progress_bar=False, after_step=spoil)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.usefixtures("unchecked")
def test_configurations_are_values():
    c = train.TrainConfig(betas=[0.9, 0.98])
    assert c.betas == (0.9, 0.98) and c == train.TrainConfig(betas=(0.9, 0.98))
    with pytest.raises(AttributeError):
        c.steps = 3
