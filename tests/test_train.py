"""Training: the schedule, the update and the evaluation by hand, runs that are killed and resumed,
damaged and foreign checkpoints, and planted mistakes.

As in test_ssd.py, the properties are functions of a module `m`, and of an empty folder if they
write. The positive tests hand them `cheems_ref.train`, the negative controls a copy of it with one
planted mistake.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from planting import plant
from safetensors.torch import load_file, save_file

import cheems_ref.train as train
from cheems_ref.__main__ import main
from cheems_ref.model import CausalLM, ModelConfig
from cheems_ref.verify import check

ROOT = Path(__file__).parent.parent
RECORD = "checkpoint.json"
MODELS = {
    "tied": {},
    "untied": dict(tie_embeddings=False),
    "a shared matrix": dict(pattern="SC"),
    "retrieval": dict(pattern="SEIK"),
    "float64": dict(dtype=torch.float64),
    "bfloat16": dict(dtype=torch.bfloat16),
}


def a_model(seed=0, **changes):
    """A new one, of one layer that mixes tokens and one that does not, about 800 parameters."""
    return copy.deepcopy(made(seed, **changes))


@functools.cache
def made(seed, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    sizes = dict(pattern="AM", vocab_size=16, d_model=8, n_heads=2, d_ff=8, d_state=4, chunk_size=4)
    sizes |= dict(n_values=4, n_neurons=16, d_query=8)
    return CausalLM(ModelConfig(**sizes | changes)).to(dtype)


def config(m, **changes):
    sizes = dict(steps=12, batch_size=2, length=8, evaluate_every=3, checkpoint_every=4)
    return m.TrainConfig(**sizes | changes)


def a_text(n=200, seed=0, vocab=16):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed))


class Stopped(Exception):
    """A run that was killed."""


def trained(m, folder=None, *, stop=None, model=None, ids=None, bar=False, **changes):
    """A run, as it is at its end or just after update `stop`."""
    runs = []

    def after_step(run):
        runs.append(run)
        if run.step == stop:
            raise Stopped

    model, ids = a_model() if model is None else model, a_text() if ids is None else ids
    options = dict(directory=folder, bar=bar, after_step=after_step)
    with contextlib.suppress(Stopped):
        runs.append(m.train(model, ids, config(m, **changes), **options))
    return runs[-1]


def everything(run):
    """Copies of all that the next update depends on, and of what the run went through."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    held = {f"parameter {name}": p.detach().clone() for p, name in names.items()}
    for parameter, state in run.optimizer.state.items():
        held |= {f"{key} of {names[parameter]}": t.clone() for key, t in state.items()}
    held["random state"] = run.generator.get_state()
    held["losses"] = torch.tensor(run.losses, dtype=torch.float64)
    held["evaluations"] = torch.tensor(run.evaluations, dtype=torch.float64)
    return held


def same(name, got, want):
    """To the last bit."""
    assert got.keys() == want.keys(), f"{name}: what is held is not the same"
    for key, t in want.items():
        if got[key].dtype != t.dtype or not torch.equal(got[key], t):
            check(f"{name}: {key}", got[key], t, tol=0.0 if t.is_floating_point() else None)


def content(folder):
    """Of all files below."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- the learning rate ------------------------------------------------------------------------

# By hand, as shares of the largest: 3 updates up; then 7 in which the cosine takes 6 steps of 30°.
RISING = [1 / 3, 2 / 3, 1]
COSINE = [1, 0.1 + 0.9 * (1 + 3**0.5 / 2) / 2, 0.775, 0.55, 0.325]
COSINE += [0.1 + 0.9 * (1 - 3**0.5 / 2) / 2, 0.1]
BY_HAND = [
    (dict(steps=10, warmup=0.3), RISING + COSINE),
    (dict(steps=10, warmup=0.21), RISING + COSINE),  # 2.1 updates: rounded up
    (dict(steps=7, warmup=0.0), COSINE),
    (dict(steps=7, warmup=0.0, final=0.0), [(share - 0.1) / 0.9 for share in COSINE]),
    (dict(steps=3, warmup=1.0), RISING),
    (dict(steps=2, warmup=0.0), [1, 0.1]),
    *((dict(steps=1, warmup=warmup), [1]) for warmup in (0.0, 0.5, 1.0)),
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
        rate = rates(m, steps=steps, warmup=warmup, final=final, learning_rate=3.0)
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
    training, (b1, b2) = ids[: len(ids) - math.ceil(c.held_out * len(ids))], c.betas
    for i in range(1, c.steps + 1):
        windows = m.random_windows(training, c, generator)
        logits = model(windows[:, :-1])[0]
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        grads = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(g.square().sum().item() for g in grads))
        grads = [g * min(1, c.clip / (norm + 1e-6)) for g in grads]  # 1e-6 is torch's own
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
        c = config(m, steps=4, warmup=0.5, learning_rate=0.02, weight_decay=0.5, clip=clip)
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

        run = m.train(models[1], a_text(), c, bar=False, after_step=compare)
        check("losses by hand", *(torch.tensor(t, dtype=torch.float64) for t in (run.losses, got)))


def clips_all_gradients_together(m):
    norms = {clip: [] for clip in (1e9, 1e-3)}
    for clip, found in norms.items():

        def note(run, found=found):
            grads = torch.cat([p.grad.flatten() for p in run.model.parameters()])
            found.append(grads.double().norm().item())

        m.train(a_model(), a_text(), config(m, clip=clip), bar=False, after_step=note)
    assert min(norms[1e9]) > 2e-3, "nothing to clip"
    check("norm = clip", torch.tensor(norms[1e-3]), torch.full((12,), 1e-3), tol=2e-6)


def follows_the_schedule(m):
    """In both groups of the optimizer, and `after_step` comes after each update, once."""
    c, seen = config(m), []

    def note(run):
        lr = {group["lr"] for group in run.optimizer.param_groups}
        seen.append((run.step, len(run.losses), *lr))

    m.train(a_model(), a_text(), c, bar=False, after_step=note)
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
    trained(m, model=model, ids=ids, steps=60, evaluate_every=30, held_out=20 / 210)
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
            got = torch.tensor(m.evaluate(model, ids, length=8, batch_size=batch_size))
            check(f"evaluation one by one: {n} tokens, {batch_size} windows at a time", got, want)


def evaluation_changes_nothing(m):
    for mode in (True, False):
        model = a_model().train(mode)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = copy.deepcopy([*model.parameters()])
        random = torch.get_rng_state()
        nats = m.evaluate(model, a_text(), length=8)
        assert isinstance(nats, float)
        assert all(module.training is mode for module in model.modules()), "the mode is changed"
        grads = [p.grad for p in model.parameters()]
        assert all(g is not None and (g == 1).all() for g in grads), "gradients are changed"
        assert torch.equal(torch.get_rng_state(), random), "random numbers are taken"
        for p, q in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, q), "parameters are changed"


def evaluates_and_saves_when_told(m, folder):
    """After every so many updates and after the last; of checkpoints the last two are kept."""
    c, seen = config(m, steps=11), []

    def note(run):
        seen.append([run.step, m.evaluate(run.model, run.ids[-20:], length=8)])
        assert (folder / f"step-{run.step:08d}").exists() == (run.step in (4, 8, 11))

    run = m.train(a_model(), a_text(), c, directory=folder, bar=False, after_step=note)
    assert run.evaluations == [pair for pair in seen if pair[0] in (3, 6, 9, 11)]
    assert names(folder) == ["step-00000008", "step-00000011"], "the last two, and nothing else"
    assert m.newest_checkpoint(folder) == folder / "step-00000011"


# --- training ---------------------------------------------------------------------------------


def test_a_text_that_repeats_itself_is_learned():
    ids = torch.tensor(list(b"the cat sat on the mat, and the dog lay on the log. " * 60))
    model = a_model(pattern="SM", vocab_size=256, d_model=32, d_ff=64)
    sizes = dict(steps=100, batch_size=4, length=32, learning_rate=1e-2, evaluate_every=100)
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
    sizes = dict(steps=120, batch_size=8, length=32, learning_rate=1e-2, evaluate_every=60)
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


def stops_at_a_loss_that_is_no_number(m, folder):
    """Parameters, moments and files are those after update 6."""
    kept = []

    def overflow(run):
        if run.step == 6:
            with torch.no_grad():
                run.model.norm.weight.fill_(3e38)
            kept.append((run, everything(run), content(folder)))

    options = dict(directory=folder, bar=False, after_step=overflow)
    with pytest.raises(FloatingPointError, match=r"loss of update 6 is (nan|inf).* than 0.002 may"):
        m.train(a_model(), a_text(), config(m), **options)
    run, before, files = kept[-1]
    after = everything(run) | {"random state": before["random state"]}  # windows were drawn
    same("after a loss that is no number", after, before)
    assert content(folder) == files and names(folder) == ["step-00000004"]


def bfloat16_is_near(m):
    runs = {p: trained(m, precision=p, learning_rate=1e-3) for p in ("auto", "float32", "bfloat16")}
    losses = {p: torch.tensor(run.losses) for p, run in runs.items()}
    assert torch.equal(losses["auto"], losses["float32"]), "auto on a CPU is float32"
    check("losses in bfloat16", losses["bfloat16"], losses["float32"], tol=5e-3)
    assert (losses["bfloat16"] != losses["float32"]).all(), "both have the same losses"
    assert {p.dtype for p in runs["bfloat16"].model.parameters()} == {torch.float32}


class Terminal(io.StringIO):
    """Standard error that says whether it is a terminal."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def the_bar_is_as_told(m, folder):
    """Its numbers too: a clock that goes on by half a second when it is read gives 16 / 0.5."""
    trained(m, folder, stop=6)  # so that the bar starts at 4
    told = ((False, True, ""), (False, False, ""), (None, False, ""))
    for bar, terminal, want in (*told, (None, True, "12/12"), (True, False, "12/12")):
        place = folder / f"{bar} {terminal}"
        shutil.copytree(folder / "step-00000004", place / "step-00000004")
        clock = itertools.count(0, 0.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "perf_counter", lambda clock=clock: next(clock))
            with contextlib.redirect_stderr(Terminal(terminal)) as shown:
                run = trained(m, place, bar=bar)
        shown = shown.getvalue()
        assert bool(shown) == bool(want) and want in shown, f"bar={bar}, terminal: {terminal}"
        if want:
            last = f"loss={run.losses[-1]:.3f}, tokens=32/s, "
            last += f"held_out={run.evaluations[-1][1]:.3f}"
            assert last in shown, f"the bar shows {shown!r}, not {last}"


# --- checkpoints ------------------------------------------------------------------------------


def goes_on_as_if_never_stopped(m, folder, kind="tied"):
    """In a new model, with other numbers in it, to the last bit."""
    train_it = partial(trained, m, evaluate_every=2)
    whole = train_it(folder / "whole", model=a_model(**MODELS[kind]))
    for stop in (4, 6, 11):
        place = folder / f"stopped at {stop}"
        train_it(place, stop=stop, model=a_model(**MODELS[kind]))
        try:
            again = train_it(place, model=a_model(seed=9, **MODELS[kind]))
        except FloatingPointError as error:
            raise AssertionError("a resumed run has losses that are no numbers") from error
        same(f"stopped at {stop}, resumed", everything(again), everything(whole))
    assert content(place) == content(folder / "whole"), "files of a resumed run"


def a_finished_run_is_left_as_it_is(m, folder):
    run = trained(m, folder)
    files = content(folder)
    assert run.step == 12
    same("run again", everything(trained(m, folder, model=a_model(9))), everything(run))
    assert content(folder) == files


def restores_all(m, folder):
    """Into a run that is elsewhere: parameters, moments, random numbers, losses."""
    run, other = trained(m, stop=7), trained(m, stop=10, model=a_model(9))
    m.restore(other, m.save(run, folder))
    same("restored", everything(other), everything(run))
    windows = [m.random_windows(a_text(), r.config, r.generator) for r in (run, other)]
    assert torch.equal(*windows), "the next windows differ"


def loads_the_same_model(m, folder, kind="tied"):
    """From the run, from its checkpoint, and from an older one."""
    logits, text = {}, a_text()[None]

    def note(run):
        logits[run.step] = run.model(text)[0].detach()

    model = a_model(**MODELS[kind])
    m.train(model, text[0], config(m), directory=folder, bar=False, after_step=note)
    for path, step in ((folder, 12), (folder / "step-00000012", 12), (folder / "step-00000008", 8)):
        loaded = m.load_model(path)
        assert loaded.config == model.config and loaded.training
        assert all(p.requires_grad for p in loaded.parameters())
        assert len([*loaded.parameters()]) == len([*model.parameters()]), "what is shared is not"
        check(f"logits of update {step}", loaded(text)[0].detach(), logits[step], tol=0.0)
    assert m.load_model(str(folder)).config == model.config


class Crash(Exception):
    """What a kill is to a process."""


def crash_in_save(m, run, folder, at):
    """Save, killed in the middle of the at-th thing that it does; False if it does fewer."""
    calls = itertools.count(1)

    def crashing(function, half):
        def call(*arguments, **options):
            if next(calls) == at:
                half(*arguments)
                raise Crash
            return function(*arguments, **options)

        return call

    def nothing(*_):
        pass

    def half_a_tree(path):
        for file in [*path.iterdir()][:1]:
            file.unlink()

    things = [
        (m, "save_file", lambda _, path: path.write_bytes(b"torn")),
        (json, "dumps", nothing),
        (os, "fsync", nothing),
        (shutil, "rmtree", half_a_tree),
        (Path, "mkdir", nothing),
        (Path, "rename", nothing),
        (Path, "replace", nothing),
        (Path, "write_text", lambda path, text: path.write_bytes(text[: len(text) // 2].encode())),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for where, name, half in things:
            patch.setattr(where, name, crashing(getattr(where, name), half))
        try:
            m.save(run, folder)
        except Crash:
            return True
    return False


def whole_ones(m, folder, other):
    """The updates of the checkpoints in a folder, all of which can be read."""
    found = []
    for path in sorted(folder.glob("step-*")):
        try:
            m.restore(other, path)
        except m.CheckpointError as error:
            raise AssertionError(f"half a checkpoint: {error}") from error
        assert path.name == f"step-{other.step:08d}"
        found.append(other.step)
    return found


def later(run, steps):
    """A run as if it had gone on."""
    run.losses += [1.0] * (steps - run.step)
    return run


def save_again(m, run, folder):
    try:
        m.save(run, folder)
    except OSError as error:
        raise AssertionError(f"it cannot be saved again: {error}") from error


def survives_a_crash_anywhere_in_save(m, folder):
    run, other = trained(m, stop=4), trained(m, stop=1, model=a_model(9))
    base = folder / "base"
    for steps in (4, 8):
        m.save(later(run, steps), base)
    later(run, 12)
    (base / "partial-step-00000002").mkdir()
    (base / "partial-step-00000002" / RECORD).write_text("{")
    for at in itertools.count(1):
        place = folder / str(at)
        shutil.copytree(base, place)
        crashed = crash_in_save(m, run, place, at)
        found = whole_ones(m, place, other)
        assert found in ([4, 8], [4, 8, 12], [8, 12]), f"after a crash there are {found}"
        assert m.newest_checkpoint(place).name == f"step-{found[-1]:08d}"
        if not crashed:
            break
        save_again(m, run, place)
        assert names(place) == ["step-00000008", "step-00000012"]
    assert at > 12, f"save does only {at - 1} things"


def survives_a_crash_when_it_is_saved_again(m, folder):
    """The only checkpoint, in whatever way: there is one to go on from, and it is whole."""
    run, other = trained(m, stop=4), trained(m, stop=1, model=a_model(9))
    m.save(run, folder / "base")
    for at in itertools.count(1):
        place = folder / str(at)
        shutil.copytree(folder / "base", place)
        crashed = crash_in_save(m, run, place, at)
        newest = m.newest_checkpoint(place)
        assert newest is not None, f"crash {at}: the only checkpoint is gone"
        try:
            m.restore(other, newest)
        except m.CheckpointError as error:
            raise AssertionError(f"crash {at}: half a checkpoint: {error}") from error
        assert other.step == 4
        if not crashed:
            break


def may_be_saved_twice(m, folder):
    """And the second counts."""
    run, other = trained(m, stop=6), trained(m, stop=1, model=a_model(9))
    m.save(run, folder)
    first = content(folder)
    save_again(m, run, folder)
    assert content(folder) == first, "the same run is saved otherwise"
    with torch.no_grad():
        run.model.norm.weight.add_(1)
    save_again(m, run, folder)
    assert whole_ones(m, folder, other) == [6] and names(folder) == ["step-00000006"]
    same("saved twice", everything(other), everything(run))


def is_on_the_disk_before_it_has_its_name(m, folder):
    """All files are written through, then the directory is renamed, then written through."""
    done = []
    sync, rename = os.fsync, Path.rename

    def note_sync(descriptor):
        done.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def note_rename(path, target):
        done.append("renamed")
        return rename(path, target)

    run = trained(m, stop=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note_sync)
        patch.setattr(Path, "rename", note_rename)
        checkpoint = m.save(run, folder)
    before, after = done[: done.index("renamed")], done[done.index("renamed") + 1 :]
    assert {path.stat().st_ino for path in checkpoint.iterdir()} <= {*before}, "a file is not"
    assert folder.stat().st_ino in after, "the new name is not"


def partial_checkpoints_are_never_read(m, folder):
    run = trained(m, folder / "other", stop=8, seed=7)
    shutil.copytree(folder / "other" / "step-00000008", folder / "run" / "partial-step-00000008")
    assert m.newest_checkpoint(folder / "run") is None, "half a checkpoint is taken for one"
    run = trained(m, folder / "run", stop=5)
    assert names(folder / "run") == ["step-00000004"], "what is left of a killed run stays"
    assert run.losses == trained(m, stop=5).losses


EVIL = "unpickled"


class Evil:
    def __reduce__(self):
        return (os.mkdir, (os.path.join(os.environ["EVIL_FOLDER"], EVIL),))


def nothing_is_unpickled(m, folder):
    """Neither by a run, nor where a pickle has the name of the tensors, and their checksum."""

    def refuse(*_, **__):
        raise AssertionError("something is unpickled")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVIL_FOLDER", str(folder))
        for where, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
            patch.setattr(where, name, refuse)
        patch.setattr(torch, "load", refuse)
        trained(m, folder / "run", stop=6)
        trained(m, folder / "run", model=a_model(9), stop=9)
        m.load_model(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVIL_FOLDER", str(folder))
        checkpoint = m.newest_checkpoint(folder / "run")
        for name in train.FILES:
            (checkpoint / name).write_bytes(pickle.dumps(Evil()))
        forge(checkpoint, checksums=True)
        for read in (m.load_model, partial(m.restore, trained(m, stop=1))):
            said = complaint(m, partial(read, checkpoint))
            assert f"{checkpoint / train.FILES[0]} is damaged" in said
            assert not (folder / EVIL).exists(), "a pickle is unpickled"


def test_a_run_is_the_same_with_and_without_checkpoints(tmp_path):
    want = everything(trained(train))
    for place in (tmp_path / "as" / "deep", str(tmp_path / "text")):
        same("with checkpoints", everything(trained(train, place)), want)


def test_a_checkpoint_is_complete_and_plain(tmp_path):
    run = trained(train, tmp_path, model=a_model(tie_embeddings=False))
    checkpoint = tmp_path / "step-00000012"
    assert names(checkpoint) == [RECORD, *sorted(train.FILES)]
    parameters, moments = (load_file(checkpoint / name) for name in train.FILES)
    assert parameters.keys() == dict(run.model.named_parameters()).keys()
    assert moments.keys() == {f"{k}.{m}" for k in parameters for m in ("exp_avg", "exp_avg_sq")}
    record = json.loads((checkpoint / RECORD).read_text(encoding="utf-8"))
    assert record["losses"] == run.losses and record["step"] == 12
    for key, c in (("training", run.config), ("model", run.model.config)):
        assert record[key] == json.loads(json.dumps(dataclasses.asdict(c)))
    for name in train.FILES:
        sha = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        assert record["sha256"][name] == sha


# --- checkpoints that are refused -------------------------------------------------------------


def forge(checkpoint, change=lambda record: None, *, checksums=False):
    """Change the record, as one would who knows how it is made."""
    path = checkpoint / RECORD
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    for name in train.FILES if checksums else ():
        record["sha256"][name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    if isinstance(record, dict) and "checksum" in record:
        record["checksum"] = train._checksum(record)
    path.write_text(json.dumps(record), encoding="utf-8")


def complaint(m, read):
    """What the CheckpointError says; any other end is a failure of the property."""
    try:
        read()
    except m.CheckpointError as error:
        return str(error)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        name = type(error).__name__
        raise AssertionError(f"it is refused with a {name}, not a CheckpointError") from error
    raise AssertionError("it is not refused")


def refused(m, run, checkpoint, *messages):
    """With a CheckpointError that says so; the run and the files are left as they were."""
    before, files = everything(run), content(checkpoint)
    random = torch.get_rng_state()
    said = complaint(m, partial(m.restore, run, checkpoint))
    for message in (re.escape(str(checkpoint)), *messages):
        assert re.search(message, said), f"{message!r} is not said in: {said}"
    same("refused", everything(run), before)
    assert content(checkpoint) == files, "the files are changed"
    assert torch.equal(torch.get_rng_state(), random)


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip(path, at=0.5):
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)


def replace_by(data):
    return lambda path: path.write_bytes(data)


DAMAGE = {
    "cut short": cut,
    "one bit flipped": flip,
    "first bit flipped": partial(flip, at=0),
    "last bit flipped": lambda path: flip(path, 1 - 1 / len(path.read_bytes())),
    "empty": replace_by(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "missing": Path.unlink,
    "a pickle": replace_by(pickle.dumps({"embedding.weight": [1.0]})),
}


def damaged_tensors_are_refused(m, folder, damages=tuple(DAMAGE)):
    checkpoint = m.save(trained(m, stop=7), folder / "run")
    for name, damage in itertools.product(train.FILES, damages):
        place = folder / f"{damage}, {name}" / checkpoint.name
        shutil.copytree(checkpoint, place)
        DAMAGE[damage](place / name)
        refused(m, trained(m, stop=3), place, re.escape(name), "incomplete|damaged")


def files_that_do_not_fit_are_refused(m, folder):
    """With the right checksums: what was forged, or written by a mistake of ours."""
    checkpoint = m.save(trained(m, stop=7), folder / "run")

    def change(tensors, key, kind):
        t = tensors.pop(key)
        if kind == "other shape":
            tensors[key] = t[:-1].clone()
        elif kind == "other name":
            tensors[key + "x"] = t

    ends = ("", ".exp_avg_sq")
    for (name, end), kind in itertools.product(
        zip(train.FILES, ends, strict=True), ("missing", "other name", "other shape")
    ):
        key, place = f"norm.weight{end}", folder / f"{kind}, {name}" / checkpoint.name
        shutil.copytree(checkpoint, place)
        tensors = load_file(place / name)
        change(tensors, key, kind)
        save_file(tensors, place / name)
        forge(place, checksums=True)
        refused(m, trained(m, stop=3), place, re.escape(name), f"not fit.*{re.escape(key)}")


def other_runs_are_refused(m, folder):
    """Another model, configuration or text: the message names what differs, then and now."""
    checkpoint = m.save(trained(m, stop=7), folder)

    def fresh(model=None, ids=None, **changes):
        return trained(m, stop=3, model=model, ids=ids, **changes)

    text = a_text()
    text[-1] = (text[-1] + 1) % 16
    for run, message in (
        (fresh(a_model(pattern="SM")), r"pattern \(AM, now SM\)"),
        (fresh(a_model(d_ff=12)), r"d_ff \(8, now 12\)"),
        (fresh(a_model(tie_embeddings=False)), r"tie_embeddings \(True, now False\)"),
        (fresh(a_model(norm_eps=1e-5, rope_base=7)), r"rope_base \(.*7\), norm_eps \(1e-06, now"),
        (fresh(steps=13), r"steps \(12, now 13\)"),
        (fresh(betas=(0.9, 0.98)), r"betas \(\[0\.9, 0\.999\], now \[0\.9, 0\.98\]\)"),
        (fresh(seed=3, clip=0.5), r"clip \(1\.0, now 0\.5\), seed \(0, now 3\)"),
        (fresh(ids=text), "another text"),
        (fresh(ids=a_text(201)), "another text"),
    ):
        refused(m, run, checkpoint, message)


def without(key):
    def change(record):
        del record[key]

    return change


def having(**changes):
    return lambda record: record.update(changes)


def inside(key, **changes):
    return lambda record: record[key].update(changes)


def longer(key):
    return lambda record: record[key].append(record[key][-1])


def emptied(record):
    record.clear()


# One row, one record that is not ours: how it is changed, and what has to be said.
# fmt: off
RECORDS = {
    "nothing in it": (emptied, "does not say"),
    "another format": (having(format="cheems_ref checkpoint 0"), "does not say"),
    "a format that is a list": (having(format=["cheems_ref checkpoint 1"]), "does not say"),
    "no format": (without("format"), "does not say"),
    "a model of another version": (inside("model", n_wings=2), r"n_wings \(2, now None\)"),
    "a run of another version": (inside("training", wind=0.5), r"wind \(0\.5, now None\)"),
    "a model without d_ff": (lambda record: record["model"].pop("d_ff"), r"d_ff \(None, now 8"),
    "a run without a seed": (lambda record: record["training"].pop("seed"), r"seed \(None, now 0"),
    "no checksum": (inside("sha256", **{"model.safetensors": None}), r"model\.safetensors"),
}
UNREADABLE = {
    **{f"no {key}": without(key) for key in (
        "model", "training", "text", "step", "losses", "evaluations", "random_state", "sha256")},
    "a model that is a list": having(model=["AM"]),
    "a training that is a number": having(training=3),
    "checksums that are a list": having(sha256=[]),
    "checksums of one file": lambda record: record["sha256"].pop("optimizer.safetensors"),
    "a step that is a word": having(step="seven"),
    "more updates than losses": having(step=8),
    "losses that are words": having(losses=["one"] * 7),
    "losses that are a number": having(losses=7),
    "evaluations that are a number": having(evaluations=7),
    "a random state cut short": having(random_state="AAAA"),
    "a random state that is no base64": having(random_state="A"),
    "a random state that is a number": having(random_state=7),
}
UNLOADABLE = ("no model", "no sha256", "a model that is a list", "checksums that are a list")
# fmt: on


def changed_record(m, folder, change):
    checkpoint = m.save(trained(m, stop=7), folder)
    forge(checkpoint, change)
    return checkpoint


def foreign_records_are_refused(m, folder):
    for name, (change, message) in RECORDS.items():
        refused(m, trained(m, stop=3), changed_record(m, folder / name, change), message)


def unreadable_records_are_refused(m, folder):
    wrong = []
    for name, change in UNREADABLE.items():
        try:
            checkpoint = changed_record(m, folder / name, change)
            refused(m, trained(m, stop=3), checkpoint, RECORD)
            if name in UNLOADABLE:
                complaint(m, partial(m.load_model, checkpoint))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


def test_records_that_cannot_be_read_are_refused(tmp_path):
    unreadable_records_are_refused(train, tmp_path)


TEXTS = {
    "cut short": cut,
    "first bit flipped": partial(flip, at=0),
    "empty": replace_by(b""),
    "zeros": DAMAGE["zeros"],
    "missing": Path.unlink,
    "a pickle": DAMAGE["a pickle"],
    "a list": replace_by(b"[1, 2]"),
    "null": replace_by(b"null"),
    "a word": replace_by(b'"cheems_ref checkpoint 1"'),
    "other JSON": replace_by(b'{"model": {}}'),
    "not UTF-8": replace_by(b'{"format": "\xff"}'),
}


def damaged_records_are_refused(m, folder):
    checkpoint = m.save(trained(m, stop=7), folder / "run")
    for name, damage in TEXTS.items():
        place = folder / name / checkpoint.name
        shutil.copytree(checkpoint, place)
        damage(place / RECORD)
        refused(m, trained(m, stop=3), place, re.escape(RECORD))
        assert str(place) in complaint(m, partial(m.load_model, place))


@pytest.mark.parametrize("key", ["step", "losses", "evaluations", "random_state"])
def test_one_changed_character_of_the_record_is_seen(tmp_path, key):
    checkpoint = train.save(trained(train, stop=7), tmp_path)
    text = (checkpoint / RECORD).read_text(encoding="utf-8")
    start = text.index(f'"{key}"') + len(key) + 2
    start += 40 if key == "random_state" else 0
    place = re.compile("[1-8A-Ya-y]").search(text, start).start()
    changed = text[:place] + chr(ord(text[place]) + 1) + text[place + 1 :]
    (checkpoint / RECORD).write_text(changed, encoding="utf-8")
    json.loads(changed)
    refused(train, trained(train, stop=3), checkpoint)


@pytest.mark.parametrize("name", [*train.FILES, RECORD])
@pytest.mark.parametrize("damage", [cut, DAMAGE["missing"], DAMAGE["a pickle"]])
def test_a_run_does_not_go_on_from_a_damaged_checkpoint(tmp_path, name, damage):
    trained(train, tmp_path, stop=9)
    damage(tmp_path / "step-00000008" / name)
    files, model = content(tmp_path), a_model(9)
    before = copy.deepcopy(model)
    with pytest.raises(train.CheckpointError, match=re.escape(name)):
        trained(train, tmp_path, model=model)
    assert content(tmp_path) == files, "the files are changed"
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q) and p.grad is None, "the model is changed"
    shutil.rmtree(tmp_path / "step-00000008")  # moving it away, as the message says
    want = everything(trained(train))
    same("from the one before it", everything(trained(train, tmp_path, model=model)), want)


def test_a_damaged_checkpoint_is_moved_away_by_giving_it_another_name(tmp_path):
    trained(train, tmp_path, stop=9)
    cut(tmp_path / "step-00000008" / "model.safetensors")
    (tmp_path / "step-00000008").rename(tmp_path / "step-00000008-damaged")
    assert train.newest_checkpoint(tmp_path) == tmp_path / "step-00000004"


def test_no_model_is_loaded_where_there_is_none(tmp_path):
    (tmp_path / "file").write_text("text")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(train.CheckpointError, match=f"{path} holds no checkpoint"):
            train.load_model(path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_model_is_loaded_from_damaged_tensors(tmp_path, damage):
    trained(train, tmp_path, stop=4)
    DAMAGE[damage](tmp_path / "step-00000004" / "model.safetensors")
    with pytest.raises(train.CheckpointError, match=r"step-00000004.*model\.safetensors"):
        train.load_model(tmp_path)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (dict(n_wings=2), "n_wings"),
        (dict(pattern="Q"), "unknown letter 'Q'"),
        (dict(d_model="8"), "d_model must be a whole number"),
    ],
)
def test_a_model_of_another_version_is_refused_with_the_reason(tmp_path, model, message):
    checkpoint = changed_record(train, tmp_path, inside("model", **model))
    with pytest.raises(train.CheckpointError, match=f"no model of this version.*{message}"):
        train.load_model(checkpoint)


def test_checkpoint_errors_are_value_errors():
    assert issubclass(train.CheckpointError, ValueError)


# --- real processes ---------------------------------------------------------------------------

# As a sitecustomize.py, this makes every write-through take so long that a kill can strike it.
SLOW_DISK = """
import os, time
sync = os.fsync
def slow(descriptor):
    time.sleep(0.1)
    sync(descriptor)
os.fsync = slow
"""


def start(arguments, log, path=""):
    """The command line, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "cheems_ref", *arguments],
        cwd=ROOT,
        env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(path)),
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def kill_when(condition, process, log):
    """With SIGKILL, which no process can answer."""
    until = time.monotonic() + 60
    while not (seen := condition()) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL and seen, Path(log.name).read_text()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_a_killed_process_started_again_ends_as_one_that_was_never_killed(tmp_path, capsys):
    """Killed in training, then killed while it writes a checkpoint."""
    text, run, slow = (tmp_path / name for name in ("text", "run", "slow"))
    text.write_text("the cat sat on the mat, and the dog lay on the log. " * 20)
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_DISK)
    arguments = ["train", "--text", str(text), "--pattern", "SM", "--steps", "90"]
    arguments += ["--batch-size", "4", "--length", "16", "--checkpoint-every", "10"]
    arguments += ["--evaluate-every", "10", "--device", "cpu", "--no-bar"]
    for setting in ("d_model=16", "d_ff=16", "d_state=4", "chunk_size=8"):
        arguments += ["--set", setting]
    assert main([*arguments, "--run", str(tmp_path / "whole")]) == 0
    arguments += ["--run", str(run)]

    def step():
        newest = train.newest_checkpoint(run)
        return 0 if newest is None else int(newest.name[5:])

    with (tmp_path / "log").open("w") as log:
        kill_when(lambda: step() >= 20, start(arguments, log), log)
        killed = step()
        assert 20 <= killed < 90
        process = start(arguments, log, slow)
        kill_when(lambda: any(run.glob("partial-*/model.safetensors")), process, log)
        assert any(run.glob("partial-*")), "the kill came too late to strike the writing"
        assert killed <= step() < 90
        process = start(arguments, log)
        try:
            assert process.wait(120) == 0, Path(log.name).read_text()
        finally:
            process.kill()
    assert names(run) == ["step-00000080", "step-00000090"]
    record, want = (
        json.loads((folder / "step-00000090" / RECORD).read_text())
        for folder in (run, tmp_path / "whole")
    )
    assert len(record["losses"]) == 90 and len(record["evaluations"]) == 9
    assert record == want
    assert content(run) == content(tmp_path / "whole")
    assert f"going on from {run / 'step-'}" in Path(log.name).read_text()


# --- negative controls ------------------------------------------------------------------------


planted = partial(plant, train)


def hold(has_property, m, folder, *arguments):
    takes_folder = "folder" in inspect.signature(has_property).parameters
    has_property(m, *[folder] * takes_folder, *arguments)


# fmt: off
NEWEST = "newest_checkpoint(path) or path"
COPY = "            parameter.copy_(weights[name])\n            run.optimizer"
MOMENT = 'moments[f"{name}.{key}"].to(parameter)'
STEP = 'torch.tensor(float(record["step"]), dtype=torch.float32)'
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)"
UNCLIPPED = "torch.zeros(())"
FINITE = "if not (math.isfinite(value := loss.item()) and bool(norm.isfinite())):"
PARTIAL = 'directory / f"partial-{final.name}"'
PRUNE = 'old.rename(old.with_name(f"partial-old-{old.name}"))'
SAVE = "save_file({key: t.contiguous().cpu() for key, t in tensors.items()}, partial / name)"
WHEN_SAVED = """\
            if directory is not None and (run.step % config.checkpoint_every == 0 or last):
                save(run, directory)
"""
KEYS = 'keys = ("exp_avg", "exp_avg_sq")\n'

# A property; and mistakes that break it: what each is, and the edits.
PLANTED = [
    (rates_are_those_by_hand, {
        "warm-up starts at 0": ("* (step + 1) / rising", "* step / rising"),
        "warm-up rounded down": ("math.ceil(config.warmup", "int(config.warmup"),
        "the last step does not reach the end": ("config.steps - 1 - rising",
                                                 "config.steps - rising"),
        "a straight line": ("(1 + math.cos(math.pi * progress)) / 2", "(1 - progress)")}),
    (rises_evenly_and_falls_to_its_end, {
        "cosine reversed": ("(1 + math.cos", "(1 - math.cos"),
        "the end is 0": ("config.final + (1 - config.final) *", "1.0 *"),
        "the end is not a share": ("share = config.final +", "share = config.final / 2 +")}),
    (decays_what_has_two_axes, {
        "decay on vectors": ("weight_decay=0.0", "weight_decay=config.weight_decay"),
        "no decay on three axes": ("parameter.ndim >= 2", "parameter.ndim == 2"),
        "betas of torch": ("        betas=config.betas,\n", "")}),
    (updates_are_adamw, {
        "decay on vectors": ("weight_decay=0.0", "weight_decay=config.weight_decay"),
        "Adam": ("torch.optim.AdamW(\n", "torch.optim.Adam(\n"),
        "no clip": (CLIP, UNCLIPPED),
        "every gradient clipped by itself": (
            CLIP, CLIP.replace("model.parameters()", "[p]").replace("torch", "[torch", 1)
            + " for p in model.parameters()][0]"),
        "clipped after the update": (
            (CLIP, UNCLIPPED),
            ("run.optimizer.step()\n", f"run.optimizer.step()\n            {CLIP}\n")),
        "gradients pile up": ("run.optimizer.zero_grad()", "pass"),
        "targets not moved": ("windows[:, 1:].flatten()", "windows[:, :-1].flatten()"),
        "loss after the update": ("append(value)", "append(_loss(model, windows).item())")}),
    (clips_all_gradients_together, {
        "values clipped": (CLIP, f"{UNCLIPPED}\n            {CLIP.replace('norm_', 'value_')}"),
        "no clip": (CLIP, UNCLIPPED)}),
    (follows_the_schedule, {
        "rate not set": ('group["lr"] = learning_rate(run.step, config)', "pass"),
        "rate of the next update": ("learning_rate(run.step, config)",
                                    "learning_rate(run.step + 1, config)"),
        "rate of matrices only": ("in run.optimizer.param_groups:",
                                  "in run.optimizer.param_groups[:1]:"),
        "after_step left out": ("after_step(run)", "pass"),
        "after_step only with a checkpoint": (
            "if after_step is not None", "if after_step is not None and run.step % 4 == 0")}),
    (the_end_is_held_out, {
        "the start is held out": ("return ids[:n], ids[n:]",
                                  "return ids[len(ids) - n :], ids[: len(ids) - n]"),
        "a token in both": ("return ids[:n], ids[n:]", "return ids[: n + 1], ids[n:]"),
        "rounded down": ("math.ceil(held_out", "int(held_out")}),
    (windows_are_any_of_the_text, {
        "beyond the end": ("torch.randint(len(ids) - config.length,",
                           "torch.randint(len(ids) - config.length + 1,"),
        "the last window is never drawn": ("torch.randint(len(ids) - config.length,",
                                           "torch.randint(len(ids) - config.length - 1,"),
        "the first window is never drawn": ("torch.randint(len(ids)", "torch.randint(1, len(ids)"),
        "one start for all": ("(config.batch_size,), generator", "(1,), generator"),
        "nothing to predict": ("torch.arange(config.length + 1)", "torch.arange(config.length)")}),
    (trains_on_one_part_and_evaluates_on_the_other, {
        "windows of the whole text": ("random_windows(training,", "random_windows(ids,"),
        "evaluates on what is trained on": ("evaluate(model, held_out,",
                                            "evaluate(model, training,"),
        "evaluates on all": ("evaluate(model, held_out,", "evaluate(model, ids,")}),
    (evaluation_is_one_by_one, {
        "targets not moved": ("windows[:, 1:].flatten()", "windows[:, :-1].flatten()"),
        "windows overlap": ("range(0, len(ids) - 1, length)", "range(0, len(ids) - 1, length - 1)"),
        "tokens between windows left out": (
            "range(0, len(ids) - 1, length)", "range(0, len(ids) - 1, length + 1)"),
        "the end left out": ("[*batches, rest] if rest else batches", "batches"),
        "the end counted twice": ("[*batches, rest] if", "[*batches, rest, rest] if"),
        "the first token counted": ("return total / (len(ids) - 1)", "return total / len(ids)"),
        "a mean of means": ('reduction="sum").item()',
                            'reduction="mean").item() * (len(ids) - 1) / len(windows)'),
        "bits": ("return total / (len(ids)", "return total / math.log(2) / (len(ids)"),
        "the first windows only": ("range(0, len(whole), batch_size)",
                                   "range(0, len(whole) // batch_size * batch_size, batch_size)")}),
    (evaluation_changes_nothing, {
        "evaluation mode stays": ("    total = 0.0\n", "    total = 0.0\n    model.eval()\n"),
        "gradients are dropped": ("    total = 0.0\n", "    total = 0.0\n    model.zero_grad()\n"),
        "some windows at random": ("    total = 0.0\n", "    total = torch.rand(1).item() * 0\n")}),
    (evaluates_and_saves_when_told, {
        "not evaluated at the end": ("% config.evaluate_every == 0 or last:",
                                     "% config.evaluate_every == 0:"),
        "not saved at the end": ("config.checkpoint_every == 0 or last)",
                                 "config.checkpoint_every == 0)"),
        "evaluated when saved": ("run.step % config.evaluate_every",
                                 "run.step % config.checkpoint_every"),
        "in other windows": ("held_out, length=config.length)", "held_out)"),
        "all are kept": ("_checkpoints(directory)[:-2]", "[]"),
        "one is kept": ("_checkpoints(directory)[:-2]", "_checkpoints(directory)[:-1]"),
        "the first two are kept": ("_checkpoints(directory)[:-2]", "_checkpoints(directory)[2:]"),
        "the oldest is the newest": ("return found[-1]", "return found[0]")}),
    (seeds_decide, {
        "one seed for all": (".manual_seed(config.seed)", ".manual_seed(0)"),
        "no generator": (", generator=generator)\n    return", ")\n    return")}),
    (stops_at_a_loss_that_is_no_number, {
        "not looked at": (FINITE, "if (value := loss.item()) is None or norm is None:"),
        "looked at after the update": (
            (FINITE, "run.optimizer.step()\n            " + FINITE),
            ("            run.optimizer.step()\n            run.losses", "            run.losses")),
        "looked at after the loss is noted": (
            (FINITE, "run.losses.append(loss.item())\n            " + FINITE),
            ("            run.losses.append(value)\n", "")),
        "saved before it is looked at": (
            FINITE, "directory is None or save(run, directory)\n            " + FINITE)}),
    (bfloat16_is_near, {
        "left out": ('precision == "bfloat16" or', "False or"),
        "always": ('precision == "bfloat16" or', "True or")}),
    (the_bar_is_as_told, {
        "the wrong way": ("else not bar", "else bar"),
        "always shown": ("None if bar is None else not bar", "False"),
        "never by itself": ("return None if bar is None", "return True if bar is None"),
        "starts at 0": ("initial=run.step, ", ""),
        "tokens that are not predicted counted": ("windows[:, 1:].numel()", "windows.numel()"),
        "without numbers": ("progress.set_postfix(shown, refresh=False)", "pass")}),
    (goes_on_as_if_never_stopped, {
        "windows from the start again": ("run.generator.set_state(",
                                         "torch.Generator().set_state("),
        "bias correction from the start again": (STEP, "torch.tensor(0.0)"),
        "moments exchanged": (
            MOMENT, 'moments[f"{name}.{keys[1 - keys.index(key)]}"].to(parameter)'),
        "moments from the start again": (MOMENT, "torch.zeros_like(parameter)"),
        "moments left out": ("            run.optimizer.state[parameter] = {", "            _ = {"),
        "parameters left out": (COPY, "            run.optimizer"),
        "losses left out": ("= record[\"losses\"], record[", "= [0.0] * record[\"step\"], record["),
        "evaluations left out": (', record["evaluations"]\n', ", []\n"),
        "no run goes on": ("        restore(run, newest)", "        pass"),
        "saved before it is evaluated": (
            (WHEN_SAVED, ""), ("            last = run", "            last = False\n" + WHEN_SAVED
                               + "            last = run"))}),
    (a_finished_run_is_left_as_it_is, {
        "one more update": ("while run.step < config.steps:",
                            "while run.step <= config.steps:")}),
    (restores_all, {
        "the random state is that of torch": ("run.generator.get_state().numpy",
                                              "torch.get_rng_state().numpy"),
        "the second moments are the first": (
            "state[parameter][moment]\n", 'state[parameter]["exp_avg"].clone()\n')}),
    (loads_the_same_model, {
        "the oldest": (NEWEST, "next(iter(_checkpoints(path)), path)"),
        "always the newest": (NEWEST, "newest_checkpoint(path) or newest_checkpoint(path.parent)"),
        "without its parameters": (
            "            parameter.copy_(weights[name])\n    return model.to",
            "            pass\n    return model.to")}),
    (survives_a_crash_anywhere_in_save, {
        "written in its place": (
            (PARTIAL, "final"), ("partial.mkdir()", "partial.mkdir(exist_ok=True)"),
            ("if final.exists():", "if False:"), ("partial.rename(final)", "pass")),
        "renamed before the record": (
            ('    record = {\n        "format"',
             '    partial.rename(final)\n    partial = final\n    record = {\n        "format"'),
            ("    partial.rename(final)\n    _to_disk", "    _to_disk"),
            ("if final.exists():", "if False:")),
        "old ones are dropped first": (
            ("    final = directory /",
             "    for old in _checkpoints(directory)[:-1]:\n        shutil.rmtree(old)\n"
             "    final = directory /")),
        "old ones are dropped in their place": (PRUNE, "shutil.rmtree(old)"),
        "leftovers stay": ("shutil.rmtree(leftover)", "pass")}),
    (may_be_saved_twice, {
        "the first is in the way": ("if final.exists():", "if False:"),
        "the second is left out": ("    partial.mkdir()\n", "    if final.exists():\n"
                                   "        return final\n    partial.mkdir()\n")}),
    (is_on_the_disk_before_it_has_its_name, {
        "files": ("        _to_disk(path)\n", "        pass\n"),
        "the name": ("    _to_disk(directory)\n", "")}),
    (partial_checkpoints_are_never_read, {
        "all names": (
            ('directory.glob("step-*")', 'directory.glob("*step-*")'),
            ("named.fullmatch(path.name)", "True"), ("int(path.name[5:])", "path.name[-8:]")),
        "leftovers stay": ("shutil.rmtree(leftover)", "pass")}),
    (nothing_is_unpickled, {
        "torch's own files": (
            "from safetensors.torch import load_file, save_file",
            "save_file, load_file = torch.save, lambda path: torch.load(path, weights_only=False)"),
        "torch's own files, if they are": (
            "tensors = load_file(path)",
            "tensors = (load_file(path) if path.read_bytes()[:1] != b'\\x80' "
            "else __import__('pickle').loads(path.read_bytes()))")}),
    (damaged_tensors_are_refused, {
        "checksums not compared": ('if _sha256(path) != record["sha256"][name]:', "if False:"),
        "sizes only": ('if _sha256(path) != record["sha256"][name]:',
                       "if not path.stat().st_size:"),
        "parameters change before the moments are read": (
            KEYS, KEYS + "    [p.data.copy_(weights[k]) for k, p in parameters.items()]\n"),
        "a damaged file is removed": (
            '        raise CheckpointError(\n            f"{path} is damaged: it is not what',
            "        path.unlink()\n"
            '        raise CheckpointError(\n            f"{path} is damaged: it is not what')}),
    (files_that_do_not_fit_are_refused, {
        "names only": ("strange = strange or [", "_ = strange or ["),
        "shapes of what is named": ("sorted({*tensors} ^ {*like})", "[]")}),
    (other_runs_are_refused, {
        "texts not compared": ('if record["text"] != _fingerprint(run.ids):', "if False:"),
        "lengths of texts compared": ("ids.to(torch.int64).cpu()", "torch.tensor(len(ids))"),
        "configurations not compared": ("        if differ:", "        if False:"),
        "models not compared": ('(("model", run.model.config), ("training", run.config))',
                                '(("training", run.config),)'),
        "runs not compared": ('(("model", run.model.config), ("training", run.config))',
                              '(("model", run.model.config),)'),
        "only the first that differs": ("key in differ)", "key in differ[:1])")}),
    (foreign_records_are_refused, {
        "formats not compared": (' or record.get("format") != FORMAT:', ":"),
        "only what is known is compared": ("for key in {**mine, **theirs} if",
                                           "for key in mine if")}),
    (damaged_records_are_refused, {
        "anything is a record": ("not isinstance(record, dict) or record", "record and record")}),
]
# fmt: on

MISTAKES = {
    f"{has_property.__name__}: {what}": (has_property, edits)
    for has_property, mistakes in PLANTED
    for what, edits in mistakes.items()
}


@pytest.mark.parametrize(("has_property", "edits"), MISTAKES.values(), ids=MISTAKES)
def test_planted_mistake_is_caught(tmp_path, has_property, edits):
    mutant = planted(*(edits if isinstance(edits[0], tuple) else [edits]))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        hold(has_property, mutant, tmp_path)


@pytest.mark.parametrize("has_property", [row[0] for row in PLANTED], ids=lambda f: f.__name__)
def test_training_has_every_property_that_a_mistake_breaks(tmp_path, has_property):
    hold(has_property, train, tmp_path)


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_goes_on_as_if_never_stopped(tmp_path, kind):
    goes_on_as_if_never_stopped(train, tmp_path, kind)


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_is_loaded_as_it_was(tmp_path, kind):
    loads_the_same_model(train, tmp_path, kind)


def test_a_crash_while_the_same_update_is_saved_again_leaves_it_whole(tmp_path):
    survives_a_crash_when_it_is_saved_again(train, tmp_path)


# --- devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "mps", "device"),
    [(True, False, "cuda"), (True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_the_fastest_device_there_is(monkeypatch, cuda, mps, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert train.default_device() == torch.device(device)


# --- bad input --------------------------------------------------------------------------------


def training(ids=None, **changes):
    return partial(trained, train, ids=ids, model=a_model(), **changes)


def evaluating(n=20, **options):
    return partial(train.evaluate, a_model(), a_text(n), **options)


NAN = math.nan
# fmt: off
BAD = [
    *((partial(train.TrainConfig, **{name: value}), f"{name} must be at least 1, got {value}")
      for name in ("steps", "batch_size", "length", "evaluate_every", "checkpoint_every")
      for value in (0, -3)),
    *((partial(train.TrainConfig, **{name: value}), f"{name} must be a positive .*, got {value}")
      for name in ("learning_rate", "clip") for value in (0.0, -1.0, math.inf, NAN)),
    *((partial(train.TrainConfig, **{name: value}), rf"{name} must be in \[0, 1\], got {value}")
      for name in ("final", "warmup") for value in (-0.1, 1.5, NAN)),
    *((partial(train.TrainConfig, held_out=value), rf"held_out must be in \(0, 1\), got {value}")
      for value in (0.0, 1.0, -0.1, NAN)),
    (partial(train.TrainConfig, weight_decay=-0.1), r"weight_decay must be .* ≥ 0, got -0\.1"),
    *((partial(train.TrainConfig, betas=betas), r"betas must be .* in \[0, 1\), got .*\(")
      for betas in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN))),
    (partial(train.TrainConfig, precision="float16"), "precision must be .*, got 'float16'"),
    *((partial(train.TrainConfig, **{name: value}), name)
      for name, value in (("weight_decay", NAN), ("weight_decay", math.inf), ("betas", (0.9,)),
                          ("betas", (0.9, 0.9, 0.9)), ("steps", 1.5))),
    # 11 tokens: 9 to train on are one window, 2 held out
    (training(a_text(11)), r"11 tokens: too few for windows of length \+ 1 = 9 .* 10%"),
    (training(a_text(30), held_out=0.01), "30 tokens: too few .* part of 1%"),
    (training(a_text(1)), "1 tokens: too few"),
    (training(a_text(0)), "0 tokens: too few"),
    (training(a_text(200), length=180), r"200 tokens: too few for .* \+ 1 = 181"),
    (training(a_text(200).float()), r"ids must be integers \(l,\), got torch\.float32 \(200,\)"),
    (training(a_text(200)[None]), r"ids must be integers \(l,\), got torch\.int64 \(1, 200\)"),
    (training(a_text(200) + 1), r"in \[0, 16\), the vocabulary; got .* to 16"),
    (evaluating(1), "nothing to predict in a text of 1 tokens"),
    (evaluating(0), "nothing to predict in a text of 0 tokens"),
    *((evaluating(**{name: value}), name)
      for name in ("length", "batch_size") for value in (0, -1)),
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
def test_a_text_of_other_integers_is_trained_on_or_refused(dtype):
    try:
        run = trained(train, ids=a_text().to(dtype))
    except ValueError as error:
        assert "ids" in str(error)
    else:
        assert run.losses == trained(train).losses


def test_a_gradient_that_is_no_number_stops_the_run():
    model, before = a_model(), []

    def spoil(run):
        before[:] = [everything(run)]
        if run.step == 5:
            run.model.norm.weight.register_hook(lambda grad: grad * NAN)

    with pytest.raises(FloatingPointError, match="update 5"):
        train.train(model, a_text(), config(train, steps=6), bar=False, after_step=spoil)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_place_that_is_a_file_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("text")
    done = []
    with pytest.raises((OSError, ValueError), match="file"):
        train.train(
            a_model(),
            a_text(),
            config(train),
            directory=tmp_path / "file",
            bar=False,
            after_step=done.append,
        )
    assert not done, f"{len(done)} updates were done for nothing"


@pytest.mark.usefixtures("unchecked")
def test_configurations_are_values():
    c = train.TrainConfig(betas=[0.9, 0.98])
    assert c.betas == (0.9, 0.98) and c == train.TrainConfig(betas=(0.9, 0.98))
    with pytest.raises(AttributeError):
        c.steps = 3


def test_shapes_in_signatures_are_checked_in_this_run(request):
    if not request.config.getoption("--jaxtyping-packages", default=None):
        pytest.skip("pytest runs without --jaxtyping-packages")
    with pytest.raises(jaxtyping.TypeCheckError):
        train.split_text(a_text()[None], 0.1)
