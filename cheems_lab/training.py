"""Training runs that live in a directory: saved, locked, resumed, on one process or on several.

The loop is `cheems_ref.train`'s. A resumed run goes through the same losses as one that was never
stopped: to the last digit on as many processes, but for rounding on another number.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
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
        ValueError: the processes have other models, settings, texts or directories.
        OSError: the directory cannot be made, or a checkpoint cannot be written.
        FloatingPointError: as `cheems_ref.train.train`; the last checkpoint stays.
    """
    rank, world_size = processes.rank_and_world_size(model)
    run = start(model, ids, config, rank=rank, world_size=world_size)
    with locked(directory) if directory and rank == 0 else contextlib.nullcontext():
        if world_size > 1:
            dist.barrier()  # the first process has made the lock
            shared = directory is None or (Path(directory) / LOCK).exists()
            mine = dict(model=vars(model.config), settings=vars(config), text=run.text)
            processes.check_agreement(**mine, directory=shared)
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
    try:
        with FileLock(directory / LOCK).acquire(timeout=0):
            yield
    except Timeout as error:
        raise RunningError(
            f"another process is training in {directory}: wait for it, stop it, or take another "
            "directory (--run)"
        ) from error


def write_json(path: Path, data: Any) -> None:
    """Replace a file by data as JSON, completely or not at all."""
    partial = path.with_name(f"partial-{path.name}")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
