"""Checkpoints: a run's whole state in a folder, written by one process or by many.

    DIRECTORY/step-00000200/
        shard-*.safetensors    one file per process:
                                   model.NAME                        parameters
                                   exp_avg.NAME, exp_avg_sq.NAME     AdamW's moments
                                   losses, random_state              of the run
        record.json            configs, fingerprint of the text, step, evaluations, and a SHA-256 of
                               each file and of itself

torch.distributed.checkpoint writes and reads the tensors, so a run may resume on any number of
processes. Nothing is pickled. A checkpoint gets its name when all of it is on the disk, so a run
killed at any moment leaves its last checkpoint whole.

A checkpoint that is damaged, or of another run, raises CheckpointError, which says what is wrong
and what to do, and changes neither the run nor the files.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from cheems_lab.processes import rank_and_world_size, run_on_first
from cheems_ref.config import from_saved
from cheems_ref.model import CausalLM
from cheems_ref.train import Run

FORMAT = "cheems_lab checkpoint 4"
RECORD = "record.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
NAMED = re.compile(r"step-\d{8,}")
# These change the loss only by rounding, as does the number of processes.
MAY_CHANGE = ("steps", "evaluate_every", "checkpoint_every", "micro_batch_size")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that belongs to another run."""


def save(run: Run, directory: str | Path) -> Path:
    """Write a checkpoint of a run, complete or not at all, and return its path.

    The directory keeps its last two checkpoints; one of this step that is there already stays.

    Raises:
        OSError: it cannot be written, for want of space say; earlier checkpoints stay.
    """
    import torch.distributed.checkpoint as dcp

    tensors = {
        "random_state": run.generator.get_state(),
        "losses": torch.tensor(run.losses, dtype=torch.float64),
    }
    for name, parameter in run.model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        held = run.optimizer.state.get(parameter, {})
        tensors |= {f"{moment}.{name}": held[moment] for moment in MOMENTS if moment in held}
    final = Path(directory) / f"step-{run.step:08d}"
    partial = final.with_name(f"partial-{final.name}")
    rank, world_size = rank_and_world_size(run.model)
    if run_on_first(run.model, final.exists):  # a run reaches each step in one way only
        return final
    try:
        run_on_first(run.model, lambda: _begin(partial))
        writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.save(tensors, storage_writer=writer, no_dist=world_size == 1)
        run_on_first(run.model, lambda: _finish(partial, final, _record(run)))
    except (OSError, dcp.CheckpointException) as error:  # the same on all
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            f"step {run.step} cannot be written to {directory} ({_causes(error)}); the last whole "
            f"checkpoint is {newest_checkpoint(directory)}"
        ) from error
    return final


def _record(run):
    return {
        "format": FORMAT,
        "model": dataclasses.asdict(run.model.config),
        "dtype": str(run.model.embedding.weight.dtype).removeprefix("torch."),
        "training": dataclasses.asdict(run.config),
        "text": run.text,
        "step": run.step,
        "evaluations": run.evaluations,
    }


def _begin(partial):
    partial.parent.mkdir(parents=True, exist_ok=True)
    for leftover in partial.parent.glob("partial-*"):  # of a run that was killed
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    partial.mkdir()


def _finish(partial, final, record):
    """Write the record, wait for the disk, give the folder its name, and drop older ones."""
    record["files"] = _digests(partial)
    record["sha256"] = _seal(record)
    (partial / RECORD).write_text(json.dumps(record), encoding="utf-8")
    _fsync(partial / RECORD)  # torch has synced the tensors
    _fsync(partial)
    partial.rename(final)
    _fsync(final.parent)
    for old in _checkpoints(final.parent)[:-2]:
        aside = old.with_name(f"partial-dropped-{old.name}")  # so that no half bears its name
        old.rename(aside)
        shutil.rmtree(aside)


def newest_checkpoint(directory: str | Path) -> Path | None:
    """Return the checkpoint of the most steps in a run's directory; None if there is none."""
    found = _checkpoints(Path(directory))
    return found[-1] if found else None


def read_record(checkpoint: str | Path) -> dict[str, Any]:
    """Return what a checkpoint records of its run, once all of its files are seen to be whole.

    Its keys are "model" and "training" (the two configurations), "dtype", "text" (a fingerprint),
    "step" (steps done) and "evaluations".

    Raises:
        CheckpointError: there is none, or it is damaged, or of another version.
    """
    path = Path(checkpoint)
    if not NAMED.fullmatch(path.name) or not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: neither a run nor one of its checkpoints")
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        if (version := record["format"]) == FORMAT:
            _check_digests(path, record)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, error) from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has the format {version!r}; this version reads {FORMAT!r}. Resume with the "
            "version that wrote it, or take another directory (--run)"
        )
    return record


def restore(run: Run, checkpoint: str | Path) -> None:
    """Set a run, its model and its optimiser to the state that a checkpoint holds.

    Settings without effect on the loss may differ: the steps between two evaluations and between
    two checkpoints, the size of a micro-batch, and the number of steps, as long as the learning
    rate keeps its schedule.

    Raises:
        CheckpointError: it is damaged, or of another model, text or configuration.
    """
    path = Path(checkpoint)
    record = read_record(path)
    mine, theirs = _deciding(json.loads(json.dumps(_record(run)))), _deciding(record)
    if differ := [key for key in mine | theirs if mine.get(key) != theirs.get(key)]:
        listed = ", ".join(f"{key} ({theirs.get(key)}, now {mine.get(key)})" for key in differ)
        raise CheckpointError(
            f"{path} is of another run; what differs: {listed}. Resume with its settings, or take "
            "another directory (--run)"
        )
    parameters = dict(run.model.named_parameters())
    learning = {name: p for name, p in parameters.items() if p.requires_grad}
    tensors = {f"model.{name}": torch.empty_like(p) for name, p in parameters.items()}
    for moment in MOMENTS:
        tensors |= {f"{moment}.{name}": torch.empty_like(p) for name, p in learning.items()}
    tensors["random_state"] = torch.empty_like(run.generator.get_state())
    tensors["losses"] = torch.empty(record["step"], dtype=torch.float64)
    _load(path, tensors)

    # Everything has been checked; only from here on is the run changed.
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"model.{name}"])
    for name, parameter in learning.items():
        moments = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}
        step = torch.tensor(float(record["step"]), dtype=torch.float32)
        run.optimizer.state[parameter] = {"step": step, **moments}
    run.generator.set_state(tensors["random_state"])
    run.losses[:], run.evaluations[:] = tensors["losses"].tolist(), record["evaluations"]


def load_model(path: str | Path, *, device: str | torch.device = "cpu") -> CausalLM:
    """Return the model of a checkpoint, or of the newest one in a run's directory, in its dtype."""
    path = newest_checkpoint(path) or Path(path)
    record = read_record(path)
    try:
        config = from_saved(record["model"])
        _check_shapes(path, config)
        model = CausalLM(config).to(getattr(torch, record["dtype"]))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no model of this version: {error}") from error
    _load(path, {f"model.{name}": p.detach() for name, p in model.named_parameters()})
    return model.to(device)


# --- reading --------------------------------------------------------------------------------------


def _check_shapes(path, config):
    """Raise CheckpointError if the stored shapes are not the model's, without memory for it."""
    import torch.distributed.checkpoint as dcp

    try:
        stored = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(path, error) from error
    found = {
        name.removeprefix("model."): tuple(tensor.size)
        for name, tensor in stored.items()
        if name.startswith("model.")
    }
    layers = len({name.split(".")[1] for name in found if name.startswith("blocks.")})
    if layers != len(config.pattern):
        raise CheckpointError(
            f"{path} does not fit the model: it has {layers} layers, and the pattern of the record "
            f"has {len(config.pattern)}"
        )
    with torch.device("meta"):
        model = CausalLM(config)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in found | wanted:
        if found.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{path} does not fit the model: {name} is {found.get(name, 'missing')}, and its "
                f"record says {wanted.get(name, 'nothing of it')}"
            )


def _load(path, tensors):
    """Read tensors in place, each process its part."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(path))
    alone = not any(hasattr(t, "device_mesh") for t in tensors.values())
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(tensors, storage_reader=reader, no_dist=alone)
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{path} does not fit the model: {_causes(error)}") from error


def _checkpoints(directory):
    """A run's checkpoints, oldest first."""
    found = [path for path in directory.glob("step-*") if NAMED.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem[5:]))


def _damaged(path, cause):
    """The error for a damaged checkpoint, with the way back."""
    found = _checkpoints(path.parent)
    way = "There is none before it: start again in another directory (--run)"
    if path in found[1:]:
        way = f"Move it away to resume from the one before it, {found[found.index(path) - 1]}"
    return CheckpointError(f"{path} is damaged: {cause}. {way}")


def _deciding(record):
    """The settings that decide the losses of a run; `steps` does only through the schedule."""
    training = record["training"]
    kept = {name: value for name, value in training.items() if name not in MAY_CHANGE}
    kept["decay_steps"] = training["decay_steps"] or training["steps"]
    return record["model"] | kept | {"dtype": record["dtype"], "text": record["text"][:8]}


def _causes(error):
    """The message of a CheckpointException, which is not an Exception subclass."""
    if not hasattr(error, "failures"):
        return str(error)
    return "; ".join(f"process {rank}: {cause}" for rank, (cause, _) in error.failures.items())


# --- files ----------------------------------------------------------------------------------------


def _fsync(path):
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open directories
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digests(path):
    """The SHA-256 of each file of tensors, by its name."""
    digests = {}
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            digests[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return digests


def _seal(record):
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _check_digests(path, record):
    """Raise ValueError unless the files of a checkpoint are as they were written."""
    written, found = record["files"], _digests(path)
    differ = [name for name in written | found if written.get(name) != found.get(name)]
    differ += [RECORD] if record.pop("sha256") != _seal(record) else []
    if differ:
        raise ValueError(f"{', '.join(differ)} differs from what was written (SHA-256)")
