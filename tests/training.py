"""What the tests of training, checkpoints and the command line share.

`m` is `cheems_ref.train`, a copy of it with a planted mistake, or `cheems_lab.training`.
"""

import contextlib
import copy
import functools
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.verify import check

ROOT = Path(__file__).parent.parent

# --- models, texts, runs ----------------------------------------------------------------------

MODELS = {
    "tied": {},
    "untied": dict(tie_embeddings=False),
    "a shared matrix": dict(pattern="SC"),
    "retrieval": dict(pattern="SEIK"),
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
    sizes = dict(steps=12, batch_size=2, seq_len=8, evaluate_every=3)
    return m.TrainConfig(**sizes | changes)


def a_text(n=200, seed=0, vocab=16):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed))


class Stopped(Exception):
    """A run that was killed."""


def trained(m, folder=None, *, stop=None, model=None, ids=None, progress_bar=False, **changes):
    """A run, as it is at its end or just after update `stop`."""
    runs = []

    def after_step(run):
        runs.append(run)
        if run.step == stop:
            raise Stopped

    model, ids = a_model() if model is None else model, a_text() if ids is None else ids
    options = dict(progress_bar=progress_bar, after_step=after_step)
    options |= {} if folder is None else {"directory": folder, "checkpoint_every": 4}
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
    """To the last bit, which a run that goes on owes a run that was never stopped: in one process,
    with numbers that torch copied into memory of its own, both add in the same order.
    """
    assert got.keys() == want.keys(), f"{name}: what is held is not the same"
    for key, t in want.items():
        if got[key].dtype != t.dtype or not torch.equal(got[key], t):
            check(f"{name}: {key}", got[key], t, tol=0.0 if t.is_floating_point() else None)


# --- files ------------------------------------------------------------------------------------


def content(folder):
    """The bytes of all files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def names(folder):
    """What is in a folder, beside the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def step(n):
    """The name of the checkpoint after step n."""
    return f"step-{n:08d}"


def tensors_of(path):
    """All tensors of a checkpoint that one process wrote."""
    (file,) = path.glob("*.safetensors")
    return load_file(file)


def record_of(path):
    """What a checkpoint says of its run, its losses too."""
    record = json.loads((path / "record.json").read_text(encoding="utf-8"))
    return record | {"losses": tensors_of(path)["losses"].tolist()}


# --- screens and processes --------------------------------------------------------------------


class Screen(io.StringIO):
    """What is written to: it notes each write, where it was flushed, and may be a terminal."""

    def __init__(self, terminal=False):
        super().__init__()
        self.terminal, self.writes, self.flushed = terminal, [], []

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.writes.append(text)
        return super().write(text)

    def flush(self):
        self.flushed.append(self.getvalue())


class Broken(Screen):
    """What cannot be written any more from a word on, as a pipe that is closed or a full disk."""

    def __init__(self, error, word):
        super().__init__()
        self.error, self.word, self.broken = error, word, False

    def write(self, text):
        self.broken |= self.word in text
        if self.broken:
            raise self.error
        return super().write(text)


def process(*arguments, path=""):
    """The command line in a process of its own, which looks for modules in `path` first. Its output
    is bytes: as text, what it writes as \\r would be read as a new line.
    """
    environment = dict(OMP_NUM_THREADS="1", PYTHONIOENCODING="utf-8", PYTHONPATH=str(path))
    return subprocess.Popen(
        [sys.executable, "-m", "cheems_lab", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def until(there, seconds=100):
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.001)
    assert there(), "it does not come"


# --- several processes ------------------------------------------------------------------------


def ask_all(questions, folder):
    """Ask on every process, and write to FOLDER/verdicts.json: "" where a property holds, else what
    the first process that objects says.
    """
    verdicts = {}
    for title, question in questions.items():
        mine = ""
        try:
            question()
        except (AssertionError, RuntimeError, pytest.fail.Exception) as error:
            mine = str(error) or type(error).__name__
        said = [None] * dist.get_world_size()  # a property may be what initialises them
        dist.all_gather_object(said, mine)
        verdicts[title] = next(filter(None, said), "")
    if dist.get_rank() == 0:
        (folder / "verdicts.json").write_text(json.dumps(verdicts), encoding="utf-8")
    dist.destroy_process_group()
