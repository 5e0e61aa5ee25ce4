"""Training runs that live in a directory: saved, locked, resumed, on one process or on several.

The loop is `cheems_ref.train`'s. A resumed run goes through the same losses, to the last digit, as
one that was never stopped.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from cheems_lab import processes
from cheems_lab.checkpoint import newest_checkpoint, restore, save
from cheems_ref.model import CausalLM
from cheems_ref.train import Run, Text, TrainConfig, resume, start

LOCK = ".lock"


def train(
    model: CausalLM,
    ids: Text,
    config: TrainConfig,
    *,
    directory: str | Path | None = None,
    progress_bar: bool | None = None,
    at_start: Callable[[Run], None] | None = None,
    after_step: Callable[[Run], None] | None = None,
) -> Run:
    """Train a model on a text, in place, as `cheems_ref.train.train`; save and resume the run.

    Args:
        model: on the device where it is to be trained. If it is sharded over several processes
            (`processes.shard_model`), all of them call this; each reads its share of the windows.
        ids, config, progress_bar, after_step: as in `cheems_ref.train.train`.
        directory: where the run is saved, every `checkpoint_every` steps and at its end; if it
            holds a checkpoint, the run resumes from it. None to save nothing.
        at_start: called once before the first step, after the run has been restored.

    Raises:
        CheckpointError: the directory holds a checkpoint that is damaged, or of another run.
        RunningError: another process is training in the directory.
        OSError: the directory cannot be made, or a checkpoint cannot be written.
        FloatingPointError: as `cheems_ref.train.train`; the last checkpoint stays.
    """
    rank, world_size = processes.rank_and_world_size(model)
    run = start(model, ids, config, rank=rank, world_size=world_size)
    with locked(directory) if directory and rank == 0 else contextlib.nullcontext():
        if world_size > 1:
            _check_processes(run, directory)
        if directory is not None and (newest := newest_checkpoint(directory)) is not None:
            restore(run, newest)
        if at_start is not None:
            at_start(run)

        def step_done(run):
            if directory is not None and run.is_due(config.checkpoint_every):
                save(run, directory)
            if after_step is not None:
                after_step(run)

        resume(run, progress_bar=progress_bar, after_step=step_done)
    return run


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
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunningError(
            f"another process is training in {directory}: wait for it, stop it, or take another "
            "directory (--run)"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _check_processes(run, directory):
    """Raise ValueError on all processes unless they train the same run in the same directory."""
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        processes.check_shared_directory(Path(directory))
    processes.check_agreement(
        model=vars(run.model.config), settings=vars(run.config), text=run.text
    )
