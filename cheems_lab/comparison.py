"""Models trained alike: the same windows in the same order, with several seeds.

A run is one row with one seed: an ordinary training run (training.py). DIRECTORY/comparison.json
holds the settings of each row, and the evaluations of each finished run. A comparison that was
stopped resumes from there: finished runs are read, an unfinished one resumes from its last
checkpoint, and you can add rows and seeds. `cheems_ref.compare` has the intervals, `cheems compare
--help` the command.

The checkpoints of a run are in DIRECTORY/runs/ROW/seed-N, a folder that the comparison makes and
marks. A folder without the mark is somebody else's: it is refused, and never removed.
"""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cheems_lab.checkpoint import remove_checkpoints
from cheems_lab.files import check_name, read_json, write_json
from cheems_lab.training import CHECKPOINT_EVERY, LOCK, locked, train
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.text import fingerprint
from cheems_ref.train import Run, Text, TrainConfig

FILE = "comparison.json"
MARK = ".comparison"  # in the folder of each run


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
    checkpoint_every: int = CHECKPOINT_EVERY,
    progress_bar: bool | None = False,
    at_start: Callable[[str, Run], None] | None = None,
    after_step: Callable[[str, Run], None] | None = None,
    stop_requested: Callable[[], bool] | None = None,
) -> list[Evaluation]:
    """Train every row with every seed on the same windows; all rows with the first seed come first.

    Args:
        rows: the models, by their names (`check_name`).
        ids: the text, as for `train`.
        config: the training. `seeds` replaces its seed, a row's own learning rate replaces its.
        seeds: of the weights and the windows.
        directory: of comparison.json, and of the checkpoints of a run until it is finished.
        device: where models are trained.
        checkpoint_every, progress_bar, stop_requested: as for `train`.
        at_start, after_step: called as by `train`, with the name of the row before the run.

    Returns:
        All evaluations of these rows and seeds, in the order of seeds, rows and steps.

    Raises:
        ValueError: a name that `check_name` refuses; the directory holds a run of a row of this
            name with another model, another text or another training, or a folder that this
            comparison did not make; comparison.json is damaged.
    """
    for name in rows:
        check_name(name)
    directory, text = Path(directory), fingerprint(ids)
    settings = {name: _settings(row, config, text) for name, row in rows.items()}
    with locked(directory):
        before = _read(directory)
        _check_same(directory, before["rows"], settings)
        settings = before["rows"] | settings
        runs = list(itertools.product(seeds, rows))
        done = [Evaluation(*values) for values in before["evaluations"]]
        finished = {(e.seed, e.row) for e in done}
        for seed, name in runs:
            if (seed, name) not in finished:
                _check_folder(directory, run_directory(directory, name, seed))
        for seed, name in runs:
            folder = run_directory(directory, name, seed)
            if (seed, name) in finished:
                _remove_run(folder)  # if it was killed before it could
                continue
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARK).touch()
            torch.manual_seed(seed)
            run = train(
                CausalLM(rows[name].config).to(device),
                ids,
                _with(config, rows[name], seed),
                directory=folder,
                checkpoint_every=checkpoint_every,
                progress_bar=progress_bar,
                at_start=at_start and (lambda run, name=name: at_start(name, run)),
                after_step=after_step and (lambda run, name=name: after_step(name, run)),
                stop_requested=stop_requested,
            )
            done += [Evaluation(name, seed, step, nats) for step, nats in run.evaluations]
            write_json(directory / FILE, {"rows": settings, "evaluations": done})
            _remove_run(folder)
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


def _check_folder(directory, folder):
    """Raise ValueError for the folder of a run that this comparison did not make."""
    inside = folder.resolve().is_relative_to(directory.resolve())  # a link may lead elsewhere
    made = (folder / MARK).is_file() or not folder.exists()
    if not inside or not (made or (folder.is_dir() and not any(folder.iterdir()))):
        raise ValueError(
            f"{folder} was not made by this comparison: move it away, give the row another name, "
            "or take another directory (--run)"
        )


def _remove_run(folder):
    """Remove what a finished run has made in its folder; anything else in it stays."""
    if not (folder / MARK).is_file():
        return
    remove_checkpoints(folder)
    for name in (LOCK, MARK):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it
        folder.rmdir()


def _read(directory):
    """What comparison.json holds: the settings by rows, and the evaluations."""
    path = Path(directory) / FILE
    if not path.exists():
        return {"rows": {}, "evaluations": []}
    found = read_json(path)
    if not _is_comparison(found):
        raise ValueError(
            f"{path} is damaged: it must hold rows with their settings, and evaluations "
            "[row, seed, step, nats]. Move it away, or take another directory (--run)"
        )
    return found


def _is_comparison(found):
    if not isinstance(found, dict) or not isinstance(found.get("rows"), dict):
        return False
    for settings in found["rows"].values():
        if not isinstance(settings, dict) or settings.keys() != {"model", "training", "text"}:
            return False
        if not all(isinstance(part, dict) for part in settings.values()):
            return False
    evaluations = found.get("evaluations")
    return isinstance(evaluations, list) and all(map(_is_evaluation, evaluations))


def _is_evaluation(values):
    kinds = [type(value) for value in values] if isinstance(values, list) else []
    return kinds == [str, int, int, float] and math.isfinite(values[3])


def _settings(row, config, text):
    """The settings that decide the losses of a row, beside the seed, as in JSON."""
    training = dataclasses.asdict(_with(config, row, seed=0))
    for name in ("seed", "evaluate_every"):
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
