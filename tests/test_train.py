"""Training: the schedule, the update and the evaluation by hand, and planted mistakes.

Runs that are killed and resumed are in test_checkpoint.py, what both share in training.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from models import ask, properties_in
from training import a_model, a_text, config, everything, same, trained

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


def follows_the_schedule(m):
    """In both groups of the optimizer, and `after_step` comes after each update, once."""
    c, seen = config(m), []

    def note(run):
        lr = {group["lr"] for group in run.optimizer.param_groups}
        seen.append((run.step, len(run.losses), *lr))

    m.train(a_model(), a_text(), c, progress_bar=False, after_step=note)
    assert seen == [(i + 1, i + 1, m.learning_rate(i, c)) for i in range(12)]


# --- texts and windows ------------------------------------------------------------------------


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
    draws = []
    for device in ("cpu", "meta"):  # as torch's default
        generator, ids = torch.Generator().manual_seed(0), torch.arange(30)
        with torch.device(device):
            draws.append(m.random_windows(ids, c, generator))
    assert torch.equal(*draws), "the default device decides what is drawn"


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
    for n in (2, 8, 9, 10, 17, 61):
        ids = a_text(n, seed=n)
        with torch.no_grad():
            want = torch.tensor(one_by_one(model, ids, 8))
        for batch_size in (1, 3, 16):
            got = torch.tensor(m.evaluate(model, ids, seq_len=8, batch_size=batch_size))
            check(f"evaluation one by one: {n} tokens, {batch_size} windows at a time", got, want)


# --- training ---------------------------------------------------------------------------------


def test_a_text_that_repeats_itself_is_learned():
    ids = torch.tensor(list(b"the cat sat on the mat, and the dog lay on the log. " * 60))
    model = a_model(pattern="SM", vocab_size=256, d_model=32, d_ff=64)
    sizes = dict(steps=100, batch_size=4, seq_len=32, learning_rate=1e-2, evaluate_every=100)
    run = trained(train, model=model, ids=ids, **sizes)
    assert run.losses[0] == pytest.approx(math.log(256), abs=0.3), "a model knows nothing at first"
    reached = max(run.losses[-1], run.evaluations[-1][1])
    assert reached < 0.1 * math.log(256), f"{reached:.3f} nats"


def seeds_decide(m):
    """The seed of the run decides all, and torch's own random numbers nothing."""
    runs = []
    for seed, global_seed in ((0, 0), (0, 5), (1, 0)):
        model = a_model()
        torch.manual_seed(global_seed)
        runs.append(trained(m, model=model, seed=seed))
    same("the same seed", everything(runs[1]), everything(runs[0]))
    assert not {*runs[2].losses} & {*runs[0].losses}, "another seed has the same losses"


def test_bfloat16_is_near():
    kinds = ("auto", "float32", "bfloat16")
    runs = {p: trained(train, precision=p, learning_rate=1e-3) for p in kinds}
    losses = {p: torch.tensor(run.losses) for p, run in runs.items()}
    check("auto on a CPU is float32", losses["auto"], losses["float32"])
    check("losses in bfloat16", losses["bfloat16"], losses["float32"], tol=5e-3)
    assert (losses["bfloat16"] != losses["float32"]).all(), "both have the same losses"
    assert {p.dtype for p in runs["bfloat16"].model.parameters()} == {torch.float32}


HELD = properties_in(globals())


@pytest.mark.parametrize("has_property, case", HELD.values(), ids=HELD)
def test_the_loop_has_the_property(has_property, case):
    ask(has_property, case, train)


# --- devices ----------------------------------------------------------------------------------


def test_the_fastest_device_there_is(monkeypatch):
    for gpu in (torch.device("mps"), None):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda gpu=gpu, **_: gpu)
        assert train.default_device() == (gpu or torch.device("cpu"))


# --- bad input --------------------------------------------------------------------------------

# fmt: off
SETTINGS = [  # beside those of test_refusals.py: the ends of the intervals
    *(({name: value}, f"{name} must be a number in {within}, got {value}")
      for name, value, within in (
          ("learning_rate", 0.0, r"\(0, inf\)"), ("max_grad_norm", math.inf, r"\(0, inf\)"),
          ("warmup", 1.5, r"\[0, 1\]"), ("min_lr_ratio", -0.1, r"\[0, 1\]"),
          ("eval_fraction", 1.0, r"\(0, 1\)"), ("weight_decay", -0.1, r"\[0, inf\)"))),
    (dict(steps=0), "steps must be at least 1, got 0"),
    (dict(betas=(0.9, 1.0)), r"betas\[1\] must be a number in \[0, 1\), got 1"),
    (dict(betas=(0.9,)), r"betas must be two numbers, got \(0\.9,"),
    (dict(precision="float16"), "precision must be .*, got 'float16'"),
    (dict(seed=2**64), r"seed must be a number in \[-.*, got 18446744073709551616$"),
    (dict(seed=True), "seed must be a whole number, got True"),
]
TEXTS = [  # 11 tokens: 9 to train on are one window, 2 held out
    (a_text(11), {}, r"11 tokens: too few for windows of seq_len \+ 1 = 9 .* 10%"),
    (a_text(30), dict(eval_fraction=0.01), "30 tokens: too few .* part of 1%"),
    (a_text(0), {}, "0 tokens: too few"),
    (a_text(200) + 1, {}, r"ids must be in \[0, 16\) everywhere, got .*, 16\]"),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
def test_settings_and_texts_that_do_not_do_are_refused():
    for changes, message in SETTINGS:
        with pytest.raises((TypeError, ValueError), match=message):
            train.TrainConfig(**changes)
    for ids, changes, message in TEXTS:
        with pytest.raises(ValueError, match=message):
            trained(train, ids=ids, **changes)
    with pytest.raises(ValueError, match="nothing to predict in a text of 1 tokens"):
        train.evaluate(a_model(), a_text(1))
    assert trained(train, ids=a_text(12)).step == 12  # two windows, and one token to predict
    assert train.evaluate(a_model(), a_text(2)) > 0


@pytest.mark.usefixtures("unchecked")
def test_a_configuration_from_json_is_the_same_value():
    assert train.TrainConfig(betas=[0.9, 0.98]) == train.TrainConfig(betas=(0.9, 0.98))


@pytest.mark.usefixtures("unchecked")
def test_a_text_of_other_integers_is_trained_on_without_a_copy(monkeypatch):
    ids, read, draw = a_text().to(torch.uint8), [], train.random_windows
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
            run.model.norm.weight.register_hook(lambda grad: grad * math.nan)

    with pytest.raises(FloatingPointError, match=r"diverged in update 6: .* gradient nan"):
        train.train(model, a_text(), config(train, steps=6), progress_bar=False, after_step=spoil)
    assert all(p.isfinite().all() for p in model.parameters())
