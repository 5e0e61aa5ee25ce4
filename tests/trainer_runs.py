"""Runs of examples/train_with_trainer.py, and the same training by hand."""

import contextlib
import functools
import io
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from cheems_ref import train
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.text import read_text, text_to_ids
from cheems_ref.verify import check

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import train_with_trainer as example  # noqa: E402

PATTERN, WIDTH, LENGTH, BATCH, STEPS, RATE = "SEIM", 16, 16, 4, 12, 1e-2
TEXT = read_text()[:6000]
ROUNDING = 1e-5


def words(folder, *more):
    """The arguments of a small run on real text; the learning rate is high, so errors show."""
    text = folder / "text"
    text.write_bytes(TEXT.encode("utf-8"))
    sizes = dict(pattern=PATTERN, d_model=WIDTH, seq_len=LENGTH, batch_size=BATCH, steps=STEPS)
    given = dict(out=folder / "run", text=text, learning_rate=RATE, **sizes)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return [*options, *map(str, more)]


# --- by hand ----------------------------------------------------------------------------------


def rate(step):
    """WM App. C.2's, of the library's kind: from 0, and the last update is short of the end."""
    rising = math.ceil(STEPS / 10)
    if step < rising:
        return RATE * step / rising
    share = (1 + math.cos(math.pi * (step - rising) / (STEPS - rising))) / 2
    return RATE / 10 + (RATE - RATE / 10) * share


@functools.cache
def by_hand():
    """Losses, held-out losses and parameters of the same training, without the library."""
    config = train.TrainConfig(batch_size=BATCH, seq_len=LENGTH)
    training, held_out = train.split_text(text_to_ids(TEXT), 0.1)
    held_out = held_out[: (len(held_out) - 1) // (BATCH * LENGTH) * BATCH * LENGTH + 1]
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(pattern=PATTERN, d_model=WIDTH))
    optimizer = train.make_optimizer(model, config)
    generator = torch.Generator().manual_seed(0)
    losses, evaluations = [], []
    for step in range(STEPS):
        windows = train.random_windows(training, config, generator)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        logits, _ = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % (STEPS // 4) == 0:
            evaluations.append(train.evaluate(model, held_out, seq_len=LENGTH))
    return losses, evaluations, {name: p.detach() for name, p in model.named_parameters()}


def updates(arguments):
    """Train; the updates that were made, and the Trainer."""
    step, done = example.MatrixDecay.training_step, []

    def counted(self, model, inputs, *rest):
        done.append(self.state.global_step)
        return step(self, model, inputs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.MatrixDecay, "training_step", counted)
        return done, example.main(arguments)


@functools.cache
def whole(folder):
    """A run from its start to its end, made once: its Trainer, its folder, what it prints."""
    own = folder / "whole"
    own.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        done, trainer = updates(words(own))
    assert done == [*range(STEPS)]
    return trainer, own, said.getvalue()


def logged(trainer, name):
    """The values that the Trainer logged under a name."""
    return torch.tensor([row[name] for row in trainer.state.log_history if name in row])


def written(folder):
    """The parameters in a run's directory, by their names in CausalLM."""
    tensors = load_file(folder / "run" / "model.safetensors")
    return {name.removeprefix("model."): t for name, t in tensors.items() if "lm_head" not in name}


# --- properties -------------------------------------------------------------------------------


def trains_as_by_hand(folder):
    """Losses, learning rates, parameters, and the held-out loss: four times and at the end."""
    trainer, own, _ = whole(folder)
    losses, evaluations, parameters = by_hand()
    rates = torch.tensor([rate(step) for step in range(STEPS)])
    check("learning rates", logged(trainer, "learning_rate"), rates, tol=1e-9)
    check("losses", logged(trainer, "loss"), torch.tensor(losses), tol=ROUNDING)
    held_out = torch.tensor([*evaluations, evaluations[-1]])
    check("held-out losses", logged(trainer, "eval_loss"), held_out, tol=ROUNDING)
    got = written(own)
    assert got.keys() == parameters.keys()
    for name, p in parameters.items():
        check(name, got[name], p, tol=ROUNDING)


def goes_on(folder):
    """A finished run does nothing more; without its last checkpoints it goes on from the newest
    whole one, and ends with the same losses and parameters.
    """
    other, own, _ = whole(folder)
    arguments, losses, parameters = words(own), logged(other, "loss"), written(own)
    assert updates(arguments)[0] == [], "it trains beyond its end"
    shutil.rmtree(own / "run/checkpoint-12")
    (own / "run/checkpoint-9").rename(own / "run/checkpoint-10")
    shutil.copytree(own / "run/checkpoint-10", own / "run/checkpoint-9")
    (own / "run/checkpoint-10/trainer_state.json").unlink()  # as if killed while it was written
    done, trainer = updates(arguments)
    assert done == [9, 10, 11], f"it makes updates {done}"
    check("losses", logged(trainer, "loss"), losses)
    for name, p in parameters.items():
        check(name, written(own)[name], p)
