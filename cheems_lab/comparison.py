"""Models trained alike: the same windows in the same order, with several seeds.

A run is one row with one seed: an ordinary training run (training.py). Every evaluation is a line
in DIRECTORY/evaluations.jsonl as soon as it is made. A comparison that was stopped resumes from
there: finished runs are read, an unfinished one resumes from its last checkpoint, and further rows
and seeds can be added. `cheems_ref.compare` has the intervals, `cheems compare --help` the command.
"""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cheems_lab.training import locked, train
from cheems_ref import check
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.text import fingerprint
from cheems_ref.train import Run, Text, TrainConfig


class Row(NamedTuple):
    """One of the models that are compared; learning_rate None for that of the comparison."""

    config: ModelConfig
    learning_rate: float | None = None


class Evaluation(NamedTuple):
    """A held-out loss: nats per token after `step` updates of a row with a seed."""

    row: str
    seed: int
    step: int
    nats: float


def compare(
    rows: Mapping[str, Row],
    ids: Text,
    config: TrainConfig,
    *,
    seeds: Sequence[int],
    directory: str | Path,
    device: torch.device | str = "cpu",
    progress_bar: bool | None = False,
    at_start: Callable[[str, Run], None] | None = None,
    after_step: Callable[[str, Run], None] | None = None,
) -> list[Evaluation]:
    """Train every row with every seed on the same windows; all rows with the first seed come first.

    Args:
        rows: what is compared, by names that can be those of directories.
        ids: the text, as for `train`.
        config: how all are trained. Its seed is taken by `seeds`, its learning rate by a row's own.
        seeds: of the weights and the windows.
        directory: where evaluations are kept, and the checkpoints of a run until it is finished.
        device: where models are trained.
        progress_bar: as for `train`.
        at_start, after_step: called as by `train`, with the name of the row before the run.

    Returns:
        All evaluations of these rows and seeds, in the order of seeds, rows and steps.

    Raises:
        ValueError: a name that is none, no row, a seed twice; or the directory holds a run of a row
            of this name with another model, another text or another training.
    """
    _must_be_comparable(rows, seeds)
    directory, text = Path(directory), fingerprint(ids)
    settings = {name: _settings(row, config, text) for name, row in rows.items()}
    hooks = dict(progress_bar=progress_bar, at_start=at_start, after_step=after_step)
    with locked(directory):
        _must_be_the_same(directory, settings)
        done = read_evaluations(directory)
        for seed in seeds:
            for name, row in rows.items():
                if not any(e[:3] == (name, seed, config.steps) for e in done):
                    _run(name, row, seed, ids, config, directory, device, **hooks)
                    done = read_evaluations(directory)
    order = {(name, seed): i for i, (seed, name) in enumerate(itertools.product(seeds, rows))}
    found = [e for e in done if (e.row, e.seed) in order]
    return sorted(found, key=lambda e: (order[e.row, e.seed], e.step))


def read_evaluations(directory: str | Path) -> list[Evaluation]:
    """Read all evaluations that a comparison has made so far; a line cut short is left out."""
    path = Path(directory) / "evaluations.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Evaluation(**json.loads(line)) for line in lines if line.endswith("\n")]


def last_losses(evaluations: Sequence[Evaluation]) -> dict[str, dict[int, float]]:
    """For every row and seed the nats of its last evaluation."""
    last = {}
    for e in sorted(evaluations, key=lambda e: e.step):
        last.setdefault(e.row, {})[e.seed] = e.nats
    return last


def run_directory(directory: str | Path, row: str, seed: int) -> Path:
    """Return where the checkpoints of a run are until it is finished."""
    return Path(directory) / "runs" / row / f"seed-{seed}"


def _must_be_comparable(rows, seeds):
    if not rows:
        raise ValueError("there is no row to compare")
    for name in rows:
        if not name or Path(name).name != name or name in (".", ".."):
            raise ValueError(f"a row's name must be one that a directory can have, got {name!r}")
    if not len(seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one; got {list(seeds)}")
    check.numbers("(0, inf)", **{
        f"learning_rate of {name}": row.learning_rate
        for name, row in rows.items() if row.learning_rate is not None
    })  # fmt: skip


def _settings(row, config, text):
    """All that decides the losses of a row, beside the seed, as JSON has it."""
    training = dataclasses.asdict(_with(config, row, seed=0))
    for name in ("seed", "evaluate_every", "checkpoint_every"):
        del training[name]
    parts = dict(model=dataclasses.asdict(row.config), training=training, text=text)
    return json.loads(json.dumps(parts))


def _with(config, row, seed):
    rate = config.learning_rate if row.learning_rate is None else row.learning_rate
    return dataclasses.replace(config, learning_rate=rate, seed=seed)


def _must_be_the_same(directory, settings):
    """Refuse rows that are others than those of their name before; keep what is new."""
    path = directory / "rows.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, mine in settings.items():
        for part, values in before.get(name, mine).items():
            if values != mine[part]:
                what = _differing(values, mine[part])
                raise ValueError(
                    f"row {name} of {directory} had another {part}: {what}; give it another name, "
                    "or another directory"
                )
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(before | settings, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _differing(before, now):
    if not isinstance(before, dict):
        return "it is not this one"
    return ", ".join(
        f"{key} = {before.get(key)}, now {now.get(key)}"
        for key in sorted(before | now)
        if before.get(key) != now.get(key)
    )


def _run(name, row, seed, ids, config, directory, device, *, progress_bar, at_start, after_step):
    """Train one row with one seed, and keep its evaluations; its checkpoints go when it is done."""
    home, kept = run_directory(directory, name, seed), directory / "evaluations.jsonl"
    _drop_a_cut_line(kept)
    known = {e.step for e in read_evaluations(directory) if (e.row, e.seed) == (name, seed)}

    def keep(run):
        for step, nats in run.evaluations:
            if step not in known:
                known.add(step)
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(Evaluation(name, seed, step, nats)._asdict()) + "\n")

    def note(run):
        keep(run)
        if after_step is not None:
            after_step(name, run)

    torch.manual_seed(seed)
    model = CausalLM(row.config).to(device)
    start = None if at_start is None else (lambda run: at_start(name, run))
    hooks = dict(progress_bar=progress_bar, at_start=start, after_step=note)
    keep(train(model, ids, _with(config, row, seed), directory=home, **hooks))
    shutil.rmtree(home)


def _drop_a_cut_line(path):
    """Take away a last line that was not finished, else the next would be written behind it."""
    if path.exists() and not (text := path.read_text(encoding="utf-8")).endswith("\n") and text:
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
