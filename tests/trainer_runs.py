"""What is asked of examples/train_with_trainer.py, by test_trainer_example.py in one process and by
this file in several:

    torchrun --nproc-per-node 2 tests/trainer_runs.py FOLDER

A property is a function of `m`, the example or a copy with a mistake, and of an empty folder. Of
several processes, each writes to FOLDER/verdicts.json what it says against a property: "" is none.
"""

import functools
import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from planting import mistakes, plant
from safetensors.torch import load_file

from cheems_ref.model import CausalLM, ModelConfig
from cheems_ref.text import read_text
from cheems_ref.train import evaluate
from cheems_ref.verify import check

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import train_with_trainer as example  # noqa: E402

PATTERN, WIDTH, LENGTH, BATCH, STEPS, RATE = "SEIM", 16, 16, 4, 12, 1e-2
TEXT = read_text()[:6000]
ROUNDING = 1e-5


def words(folder, *more):
    """The arguments of a small run on real text, with a rate at which all is felt."""
    text = folder / "text"
    text.write_text(TEXT, encoding="utf-8")
    sizes = dict(pattern=PATTERN, d_model=WIDTH, length=LENGTH, batch_size=BATCH, steps=STEPS)
    given = dict(out=folder / "run", text=text, learning_rate=RATE, **sizes)
    options = [[f"--{name.replace('_', '-')}", str(value)] for name, value in given.items()]
    return [*sum(options, []), *map(str, more)]


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
            evaluations.append(evaluate(model, held_out, length=LENGTH))
    return losses, evaluations, {name: p.detach() for name, p in model.named_parameters()}


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
    trainer = m.main(words(folder, *more))
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
    trainer = m.main(words(folder, *more))
    losses = by_hand()[1]
    want = torch.tensor([*losses, losses[-1]])
    check("held-out losses", logged(trainer, "eval_loss"), want, tol=ROUNDING)
