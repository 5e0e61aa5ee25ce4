"""What is asked of examples/train_with_trainer.py, by test_trainer_example.py in one process and by
this file in several:

    torchrun --nproc-per-node 2 tests/trainer_runs.py FOLDER

A property is a function of `m`, the example or a copy with a mistake, and of an empty folder. Of
several processes, the first writes to FOLDER/verdicts.json what is said against each property: ""
where it holds.
"""

import contextlib
import functools
import io
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.text import read_text
from cheems_ref.train import evaluate
from cheems_ref.verify import check

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import train_with_trainer as example  # noqa: E402

PATTERN, WIDTH, LENGTH, BATCH, STEPS, RATE = "SEIM", 16, 16, 4, 12, 1e-2
TEXT = read_text()[:6000]
ROUNDING = 1e-5
RANK, PROCESSES = (int(os.environ.get(*name)) for name in (("RANK", 0), ("WORLD_SIZE", 1)))


def words(folder, *more):
    """The arguments of a small run on real text, with a rate at which all is felt."""
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
    """Losses, held-out losses and parameters of the same training, in torch alone."""
    ids = torch.tensor(list(TEXT.encode("utf-8")))
    training, held_out = ids.tensor_split([len(ids) - math.ceil(len(ids) / 10)])
    held_out = held_out[: (len(held_out) - 1) // (BATCH * LENGTH) * BATCH * LENGTH + 1]
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(pattern=PATTERN, d_model=WIDTH))
    groups = [
        dict(params=[p for p in model.parameters() if p.ndim >= 2], weight_decay=0.01),
        dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    generator = torch.Generator().manual_seed(0)
    losses, evaluations = [], []
    for step in range(STEPS):
        starts = torch.randint(len(training) - LENGTH, (BATCH,), generator=generator)
        windows = training[starts[:, None] + torch.arange(LENGTH + 1)]
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
            evaluations.append(evaluate(model, held_out, seq_len=LENGTH))
    return losses, evaluations, {name: p.detach() for name, p in model.named_parameters()}


def run(m, arguments):
    """What the example does, until all processes have done it."""
    trainer = m.main(arguments)
    together()
    return trainer


class Stopped(Exception):
    """A run that was killed."""


def updates(m, arguments, stop=None):
    """Train, stop in update `stop`: which updates are made, and how many windows are read here."""
    step, done = m.MatrixDecay.training_step, []

    def counted(trainer, model, inputs, *rest):
        if trainer.state.global_step == stop:
            raise Stopped
        done.append((trainer.state.global_step, len(inputs["input_ids"])))
        return step(trainer, model, inputs, *rest)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Stopped):
        patch.setattr(m.MatrixDecay, "training_step", counted)
        return done, run(m, arguments)
    return done, None


RUNS = {}


def whole(m, folder, *more):
    """A run from its start to its end, made once: its Trainer, its updates, where it is."""
    if (m, more) not in RUNS:
        done, trainer = updates(m, words(folder, *more))
        RUNS[m, more] = trainer, done, folder
    return RUNS[m, more]


def together():
    """Wait for the other processes, where there are any."""
    if dist.is_initialized():
        dist.barrier()


def logged(trainer, name):
    """What the Trainer has written down under a name."""
    return torch.tensor([row[name] for row in trainer.state.log_history if name in row])


def written(folder):
    """The parameters in a run's directory, by their names in CausalLM."""
    tensors = load_file(folder / "run" / "model.safetensors")
    return {name.removeprefix("model."): t for name, t in tensors.items() if "lm_head" not in name}


# --- properties -------------------------------------------------------------------------------


def trains_as_by_hand(m, folder, *more):
    """Losses, learning rates and parameters."""
    trainer, _, folder = whole(m, folder, *more)
    losses, _, parameters = by_hand()
    rates = torch.tensor([rate(step) for step in range(STEPS)])
    check("learning rates", logged(trainer, "learning_rate"), rates, tol=1e-9)
    check("losses", logged(trainer, "loss"), torch.tensor(losses), tol=ROUNDING)
    got = written(folder)
    assert got.keys() == parameters.keys()
    for name, p in parameters.items():
        check(name, got[name], p, tol=ROUNDING)


def evaluates_as_by_hand(m, folder, *more):
    """Loss per byte of the held-out text, four times while it trains and once at the end."""
    trainer, _, _ = whole(m, folder, *more)
    losses = by_hand()[1]
    want = torch.tensor([*losses, losses[-1]])
    check("held-out losses", logged(trainer, "eval_loss"), want, tol=ROUNDING)


def goes_on(m, folder, *more):
    """A run that is stopped goes on from its newest whole checkpoint, to the last bit as one that
    was never stopped; one that is at its end does nothing more.
    """
    arguments = words(folder, *more)
    done, _ = updates(m, arguments, stop=10)
    assert [update for update, _ in done] == [*range(10)]
    together()
    kept = sorted(path.name for path in (folder / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-6", "checkpoint-9"], kept
    together()
    if RANK == 0:  # as if it had been killed while it wrote
        shutil.copytree(folder / "run/checkpoint-9", folder / "run/checkpoint-10")
        (folder / "run/checkpoint-10/trainer_state.json").unlink()
    together()
    try:
        done, trainer = updates(m, arguments)
    except FileNotFoundError as error:
        raise AssertionError(f"it does not go on: {error}") from error
    assert [update for update, _ in done] == [9, 10, 11], f"it makes updates {done}"
    (folder / "other").mkdir(exist_ok=True)
    other, _, elsewhere = whole(m, folder / "other", *more)
    for name in ("loss", "eval_loss", "learning_rate"):
        check(name, logged(trainer, name), logged(other, name))
    for name, p in written(elsewhere).items():
        check(name, written(folder)[name], p)
    assert updates(m, arguments)[0] == [], "it trains beyond its end"


def says_how_it_is_loaded(m, folder):
    """The lines that are printed give the model that was trained, and a tokenizer is beside it."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trained = m.main(words(folder)).model.eval()
    load = said.getvalue().rpartition("bits\n")[2]
    names = {}
    exec(load, names)
    assert "from transformers import AutoModelForCausalLM" in load
    ids = torch.tensor([list(TEXT[:40].encode("utf-8"))])
    with torch.no_grad():
        check("logits", names["model"](ids).logits, trained(ids).logits)
    assert names["model"].config.use_cache, "it writes without a cache"
    assert (folder / "run/tokenizer.json").is_file(), "it lacks a tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(folder / "run")
    assert tokenizer(TEXT[:40])["input_ids"] == ids[0].tolist()


def says_the_loss_per_byte(m, folder):
    """In nats and in bits."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        m.main(words(folder))
    nats = by_hand()[1][-1]
    want = f"held-out loss per byte: {nats:.3f} nats, {nats / math.log(2):.3f} bits\n"
    assert want in said.getvalue(), said.getvalue()


def refuses(m, folder, message, *more):
    """In one line, and writes nothing."""
    arguments = [*words(folder), *more]
    before = sorted(folder.rglob("*"))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            m.main(arguments)
        except SystemExit as end:
            assert end.code == 2
        except (ValueError, RuntimeError) as error:
            raise AssertionError("it is refused too late") from error
        else:
            raise AssertionError("it is taken")
    lines = said.getvalue().splitlines()
    assert len(lines) == 1 and re.search(message, lines[0]), lines
    assert sorted(folder.rglob("*")) == before, "it writes"


def keeps_runs_apart(m, folder):
    """In a directory of another run, or of something else, it does nothing."""
    run, short = folder / "run", "--steps=2"
    run.mkdir()
    (run / "model.safetensors").touch()
    refuses(m, folder, "run holds something else", short)
    (run / "model.safetensors").unlink()
    m.main(words(folder, short))
    for name, value in dict(pattern="SE", d_model=32, steps=3, seq_len=8).items():
        option = f"--{name.replace('_', '-')}={value}"
        refuses(m, folder, f"a run with another .*{name}", short, option)
    (folder / "other").write_text(TEXT[:-1] + "!", encoding="utf-8")
    refuses(m, folder, "a run with another text:", short, f"--text={folder / 'other'}")
    (run / "run.json").write_text("{")
    refuses(m, folder, "line 1 column 2", short)


# --- several processes ------------------------------------------------------------------------


def each_reads_its_share(m, folder, *more):
    """Of the windows of each update."""
    trainer, done, _ = whole(m, folder, *more)
    want = [(update, BATCH // PROCESSES) for update in range(STEPS)]
    assert done == want and trainer.args.world_size == PROCESSES, done


def each_holds(m, folder, part, *more):
    """Of each parameter and of each of its moments all rows, or a part of them."""
    trainer, _, _ = whole(m, folder, *more)
    held = dict(trainer.model.named_parameters())
    for name, p in [*held.items()]:
        state = trainer.optimizer.state[p]
        held |= {f"{key} of {name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    for name, t in held.items():
        assert isinstance(t, DTensor) == (part == "part"), name
    here = sum((t.to_local() if part == "part" else t).numel() for t in held.values())
    share = here / sum(t.numel() for t in held.values())
    bounds = (0.45, 0.55) if part == "part" else (1.0, 1.0)
    assert bounds[0] <= share <= bounds[1], f"{share:.2f} of all numbers are held"


HELD = [
    (trains_as_by_hand,),
    (trains_as_by_hand, "--sharded"),
    (evaluates_as_by_hand,),
    (evaluates_as_by_hand, "--sharded"),
    (goes_on,),
    (each_reads_its_share,),
    (each_reads_its_share, "--sharded"),
    (each_holds, "all"),
    (each_holds, "part", "--sharded"),
]


def main(folder):
    verdicts = {}
    for i, (has_property, *arguments) in enumerate(HELD):
        title = f"{has_property.__name__} {arguments}"
        own, said = folder / str(i), [""] * PROCESSES
        own.mkdir(exist_ok=True)
        try:
            has_property(example, own, *arguments)
        except AssertionError as error:
            said[RANK] = str(error) or "AssertionError"
        dist.all_gather_object(said, said[RANK])
        verdicts[title] = next(filter(None, said), "")
    if RANK == 0:
        (folder / "verdicts.json").write_text(json.dumps(verdicts), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    Accelerator.end_training = lambda _: None  # Gloo does not begin anew within one process
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
