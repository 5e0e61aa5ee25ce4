"""Properties of examples/train_with_trainer.py. test_trainer_example.py checks them in one process,
this file in several:

    torchrun --nproc-per-node 2 tests/trainer_runs.py FOLDER

A property takes a folder for all runs and further arguments of the command line.
"""

import contextlib
import functools
import io
import math
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file
from training import ask_all

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
RANK, PROCESSES = (int(os.environ.get(*name)) for name in (("RANK", 0), ("WORLD_SIZE", 1)))


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


class Stopped(Exception):
    """A run that was killed."""


def updates(arguments, stop=None):
    """Train, stop in update `stop`; the updates that were made, and the Trainer."""
    step, done, trainer = example.MatrixDecay.training_step, [], None

    def counted(self, model, inputs, *rest):
        if self.state.global_step == stop:
            raise Stopped
        assert len(inputs["input_ids"]) == BATCH // PROCESSES, "each process reads its share"
        done.append(self.state.global_step)
        return step(self, model, inputs, *rest)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Stopped):
        patch.setattr(example.MatrixDecay, "training_step", counted)
        trainer = example.main(arguments)
    if dist.is_initialized():
        dist.barrier()  # all processes have written
    return done, trainer


@functools.cache
def whole(folder, *more):
    """A run from its start to its end, made once: its Trainer, its folder, what it prints."""
    own = folder / f"whole{''.join(more)}"
    own.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        done, trainer = updates(words(own, *more))
    assert done == [*range(STEPS)] and trainer.args.world_size == PROCESSES
    return trainer, own, said.getvalue()


def logged(trainer, name):
    """The values that the Trainer logged under a name."""
    return torch.tensor([row[name] for row in trainer.state.log_history if name in row])


def written(folder):
    """The parameters in a run's directory, by their names in CausalLM."""
    tensors = load_file(folder / "run" / "model.safetensors")
    return {name.removeprefix("model."): t for name, t in tensors.items() if "lm_head" not in name}


# --- properties -------------------------------------------------------------------------------


def trains_as_by_hand(folder, *more):
    """Losses, learning rates, parameters, and the held-out loss: four times and at the end."""
    trainer, own, _ = whole(folder, *more)
    if "--sharded" in more:
        pairs = [(p.to_local().numel(), p.numel()) for p in trainer.model.parameters()]
        share = sum(here for here, _ in pairs) / sum(n for _, n in pairs)
        assert abs(share - 1 / PROCESSES) < 0.05, f"{share:.2f} of all numbers are held"
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
    """A run that is stopped goes on from its newest whole checkpoint, to the last bit as one that
    was never stopped; one that is at its end does nothing more.
    """
    other, elsewhere, _ = whole(folder)
    own = folder / "stopped"
    own.mkdir(exist_ok=True)
    arguments = words(own)
    assert updates(arguments, stop=10)[0] == [*range(10)]
    kept = sorted(path.name for path in (own / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-6", "checkpoint-9"], kept
    # As if the run had been killed while it wrote a checkpoint.
    shutil.copytree(own / "run/checkpoint-9", own / "run/checkpoint-10")
    (own / "run/checkpoint-10/trainer_state.json").unlink()
    done, trainer = updates(arguments)
    assert done == [9, 10, 11], f"it makes updates {done}"
    for name in ("loss", "eval_loss"):
        check(name, logged(trainer, name), logged(other, name))
    for name, p in written(elsewhere).items():
        check(name, written(own)[name], p)
    assert updates(arguments)[0] == [], "it trains beyond its end"


HELD = [(trains_as_by_hand,), (trains_as_by_hand, "--sharded")]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Accelerator.end_training = lambda _: None  # Gloo does not begin anew within one process
    to = Path(sys.argv[1])
    ask_all({f"{f.__name__} {more}": partial(f, to, *more) for f, *more in HELD}, to)
