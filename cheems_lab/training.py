"""Training runs that live in a directory: saved, locked, resumed, on one process or on several.

The loop is `cheems_ref.train`'s. A resumed run goes through the same losses as one that was never
stopped: to the last digit on as many processes, but for rounding on another number.

The settings of a run are in its newest checkpoint's record. From the start of a command to its
first checkpoint they are in DIRECTORY/options.json, so that a run that is killed in between resumes
with the settings that it was last started with.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from filelock import FileLock, Timeout

from cheems_lab import processes
from cheems_lab.checkpoint import newest_checkpoint, read_record, restore, save
from cheems_lab.files import read_json, write_json
from cheems_lab.parser import CHECKPOINT_EVERY
from cheems_lab.runs import LabRun
from cheems_ref import check
from cheems_ref.config import ModelConfig, from_saved
from cheems_ref.model import CausalLM
from cheems_ref.train import Text, TrainConfig, resume, start

LOCK = ".lock"
OPTIONS = "options.json"


def train(
    model: CausalLM,
    ids: Text,
    config: TrainConfig,
    *,
    directory: str | Path | None = None,
    checkpoint_every: int = CHECKPOINT_EVERY,
    options: dict[str, Any] | None = None,
    progress_bar: bool | None = None,
    at_start: Callable[[LabRun], None] | None = None,
    after_step: Callable[[LabRun], None] | None = None,
    stop_requested: Callable[[], bool] | None = None,
) -> LabRun:
    """Train a model on a text, in place, as `cheems_ref.train.train`; save and resume the run.

    Args:
        model: on the device where it is to be trained. If it is sharded over several processes
            (`processes.shard_model`), all of them call this; each reads its share of the windows.
        ids, config, progress_bar: as in `cheems_ref.train.train`.
        directory: where the run is saved; if it holds a checkpoint, the run resumes from it. None
            to save nothing.
        checkpoint_every: steps between two checkpoints; the last step is always saved.
        options: what a command wants to find again when it resumes the run (`saved_settings`).
        at_start: called once before the first step, after the run has been restored.
        after_step: called after every step, and after the checkpoint of this step.
        stop_requested: asked after every step whether to save and stop.

    Raises:
        KeyboardInterrupt: stop_requested returned True; the step is saved.
        ReportError: after_step raised an OSError, ValueError, RuntimeError or MemoryError; the step
            is saved.
        CheckpointError: the directory holds a checkpoint that is damaged, or of another run.
        RunningError: another process is training in the directory.
        ValueError: the processes have other models, settings, texts or directories.
        OSError: the directory cannot be made, or a checkpoint cannot be written.
        FloatingPointError: as `cheems_ref.train.train`; the last checkpoint stays.
    """
    check.sizes(checkpoint_every=checkpoint_every)
    rank, world_size = processes.rank_and_world_size(model)
    new = start(model, ids, config)
    if config.batch_size < world_size:
        raise ValueError(f"batch_size = {config.batch_size} is too few for {world_size} processes")
    run = LabRun(model, config, ids, new.optimizer, new.generator, options=options or {})
    with locked(directory) if directory and rank == 0 else contextlib.nullcontext():
        if world_size > 1:
            dist.barrier()  # the first process has made the lock
            shared = directory is None or (Path(directory) / LOCK).exists()
            settings = vars(config) | {"checkpoint_every": checkpoint_every}
            processes.check_agreement(
                model=vars(model.config), settings=settings, text=run.text, directory=shared
            )
        if directory is not None and (newest := newest_checkpoint(directory)) is not None:
            restore(run, newest)
        if directory is not None and options is not None and rank == 0:
            _write_settings(run, Path(directory))
        if at_start is not None:
            at_start(run)

        def step_done(run):
            due = run.is_due(checkpoint_every) or any_asks_to_stop()
            if directory is not None and due:  # what is printed comes after it
                _save(run, directory, rank)
            failure = None if after_step is None else _failure_of(after_step, run)
            if any_asks_to_stop(failure):
                _stop(run, directory, rank, failure)

        def any_asks_to_stop(failure=None):
            mine = failure is not None or (stop_requested is not None and stop_requested())
            return processes.any_rank(mine, model)

        shown = progress_bar if rank == 0 else False
        resume(run, progress_bar=shown, after_step=step_done)
    return run


def _save(run, directory, rank):
    """Save a checkpoint; its record takes the place of options.json."""
    path = save(run, directory)
    if rank == 0:
        (Path(directory) / OPTIONS).unlink(missing_ok=True)
    return path


def _failure_of(after_step, run):
    """Call after_step; return what kept it from reporting, such as a full disk, or None."""
    try:
        after_step(run)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        return error
    return None


def _stop(run, directory, rank, failure):
    """Save a run that is asked to stop, on all processes, and leave it unless it is finished."""
    where = "" if directory is None else f", saved in {_save(run, directory, rank)}"
    if failure is not None:
        said = f"{failure}; the run has stopped after step {run.step}{where}"
        raise ReportError(said) from failure
    if run.step < run.config.steps:
        raise KeyboardInterrupt


def _write_settings(run, directory):
    """Keep the settings of a run until its next checkpoint; a finished run writes none."""
    path = directory / OPTIONS
    if run.step < run.config.steps:
        model, training = dataclasses.asdict(run.model.config), dataclasses.asdict(run.config)
        write_json(path, dict(options=run.options, model=model, training=training))
    else:
        path.unlink(missing_ok=True)


class Settings(NamedTuple):
    """What a run was last started with: two configurations, options, and its newest checkpoint.

    step is the number of steps that the checkpoint has done; 0 without a checkpoint.
    """

    model: ModelConfig
    training: TrainConfig
    options: dict[str, Any]
    checkpoint: Path | None
    step: int


def saved_settings(directory: str | Path) -> Settings | None:
    """Return the settings of the run in a directory; None if there is no run.

    Raises:
        CheckpointError: the newest checkpoint is damaged, or of another version.
        ValueError: options.json is damaged.
    """
    newest, path = newest_checkpoint(directory), Path(directory) / OPTIONS
    record = {"step": 0} if newest is None else read_record(newest)
    if newest is None and not path.exists():
        return None
    try:
        settings = read_json(path) if path.exists() else record
        model = from_saved(settings["model"])
        training = TrainConfig(**settings["training"])
        options = dict(settings["options"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        way = "to start again" if newest is None else f"to resume with the settings of {newest}"
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it {way}"
        ) from error
    return Settings(model, training, options, newest, record["step"])


class ReportError(OSError):
    """The output of a run cannot be written; the run has been saved."""


class RunningError(OSError):
    """Another process is training in the same directory."""


@contextlib.contextmanager
def locked(directory: str | Path):
    """Keep a run's directory to this process; make it if it is not there.

    The operating system frees the lock when the process ends, however it ends.

    Raises:
        RunningError: another process holds the lock.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / LOCK).acquire(timeout=0):
            yield
    except Timeout as error:
        raise RunningError(
            f"another process is training in {directory}: wait for it, stop it, or take another "
            "directory (--run)"
        ) from error
