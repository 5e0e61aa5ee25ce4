"""Models trained alike: the same windows in the same order, with several seeds.

A run is one row with one seed: an ordinary training run (training.py). DIRECTORY/comparison.json
holds the settings of each row, and the evaluations of each finished run. A comparison that was
stopped resumes from there: finished runs are read, an unfinished one resumes from its last
checkpoint, and you can add rows and seeds. `cheems_ref.compare` has the intervals, `cheems compare
--help` the command.
"""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cheems_lab.training import locked, train, write_json
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.text import fingerprint
from cheems_ref.train import Run, Text, TrainConfig

FILE = "comparison.json"


class Row(NamedTuple):
    """A model to compare; a learning_rate of None is the learning rate of the comparison."""

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
        rows: the models, by names that a directory can have.
        ids: the text, as for `train`.
        config: the training. `seeds` replaces its seed, a row's own learning rate replaces its.
        seeds: of the weights and the windows.
        directory: of comparison.json, and of the checkpoints of a run until it is finished.
        device: where models are trained.
        progress_bar: as for `train`.
        at_start, after_step: called as by `train`, with the name of the row before the run.

    Returns:
        All evaluations of these rows and seeds, in the order of seeds, rows and steps.

    Raises:
        ValueError: the directory holds a run of a row of this name with another model, another text
            or another training.
    """
    directory, text = Path(directory), fingerprint(ids)
    settings = {name: _settings(row, config, text) for name, row in rows.items()}
    with locked(directory):
        before = _read(directory)
        _check_same(directory, before["rows"], settings)
        settings = before["rows"] | settings
        runs = list(itertools.product(seeds, rows))
        for seed, name in runs:
            done = read_evaluations(directory)
            if any((e.row, e.seed) == (name, seed) for e in done):
                continue
            torch.manual_seed(seed)
            run = train(
                CausalLM(rows[name].config).to(device),
                ids,
                _with(config, rows[name], seed),
                directory=run_directory(directory, name, seed),
                progress_bar=progress_bar,
                at_start=at_start and (lambda run, name=name: at_start(name, run)),
                after_step=after_step and (lambda run, name=name: after_step(name, run)),
            )
            done += [Evaluation(name, seed, step, nats) for step, nats in run.evaluations]
            write_json(directory / FILE, {"rows": settings, "evaluations": done})
            shutil.rmtree(run_directory(directory, name, seed))
    found = [e for e in read_evaluations(directory) if (e.seed, e.row) in runs]
    return sorted(found, key=lambda e: (runs.index((e.seed, e.row)), e.step))


def read_evaluations(directory: str | Path) -> list[Evaluation]:
    """Read the evaluations of all finished runs of a comparison."""
    return [Evaluation(*values) for values in _read(directory)["evaluations"]]


def last_losses(evaluations: Sequence[Evaluation]) -> dict[str, dict[int, float]]:
    """For every row and seed the nats of its last evaluation."""
    last = {}
    for e in sorted(evaluations, key=lambda e: e.step):
        last.setdefault(e.row, {})[e.seed] = e.nats
    return last


def run_directory(directory: str | Path, row: str, seed: int) -> Path:
    """Return where the checkpoints of a run are until it is finished."""
    return Path(directory) / "runs" / row / f"seed-{seed}"


def _read(directory):
    path = Path(directory) / FILE
    if not path.exists():
        return {"rows": {}, "evaluations": []}
    return json.loads(path.read_text(encoding="utf-8"))


def _settings(row, config, text):
    """The settings that decide the losses of a row, beside the seed, as in JSON."""
    training = dataclasses.asdict(_with(config, row, seed=0))
    for name in ("seed", "evaluate_every", "checkpoint_every"):
        del training[name]
    parts = dict(model=dataclasses.asdict(row.config), training=training, text={"text": text})
    return json.loads(json.dumps(parts))


def _with(config, row, seed):
    rate = config.learning_rate if row.learning_rate is None else row.learning_rate
    return dataclasses.replace(config, learning_rate=rate, seed=seed)


def _check_same(directory, before, settings):
    """Raise ValueError for a row that has another model, training or text than before."""
    for name, mine in settings.items():
        for part, values in before.get(name, mine).items():
            keys = [key for key in values | mine[part] if values.get(key) != mine[part].get(key)]
            if keys:
                listed = (f"{key} = {values.get(key)}, now {mine[part].get(key)}" for key in keys)
                raise ValueError(
                    f"row {name} of {directory} had another {part}: {', '.join(listed)}; give it "
                    "another name, or another directory"
                )
