"""Checkpoints: a run's whole state in a folder, written by one process or by many.

    DIRECTORY/step-00000200/
        shard-*.safetensors    one file per process:
                                   model.NAME                        parameters
                                   exp_avg.NAME, exp_avg_sq.NAME     AdamW's moments
                                   losses, random_state              of the run
        record.json            configs, options, fingerprint of the text, step, evaluations, and a
                               SHA-256 of each file and of itself

torch.distributed.checkpoint writes and reads the tensors, so a run may resume on any number of
processes. Nothing is pickled. A checkpoint gets its name when all of it is on the disk, so a run
killed at any moment leaves its last checkpoint whole.

A checkpoint that is damaged, or of another run, raises CheckpointError, which says what is wrong
and what to do, and changes neither the run nor the files. A folder whose name tells another step
than its record is refused, too. A save removes the checkpoint before the last, and what a killed
save has left; it knows both by their contents, and leaves everything else in the directory alone.
Whether a run resumes, and with which settings, is decided in `training`.

Two equal runs write files of other bytes, because the safetensors library orders a file's metadata
at random. So a SHA-256 tells whether a file has changed, not whether two runs agree.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from cheems_lab.files import holds_only, read_json, remove_files, sync, write_json
from cheems_lab.processes import any_rank, rank_and_world_size, run_on_first
from cheems_lab.runs import LabRun
from cheems_ref.config import from_saved
from cheems_ref.model import CausalLM
from cheems_ref.train import TrainConfig

FORMAT = "cheems_lab checkpoint 5"
RECORD = "record.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
NAMED = re.compile(r"step-\d{8,}")
# What a save makes: a folder until it has its name, or while it is dropped; and the files in it.
UNFINISHED = re.compile(r"partial-(dropped-)?step-\d{8,}(-\d+)?")
FILES = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors|\.?record\.json(\.partial)?")
# These change the loss only by rounding, as does the number of processes.
MAY_CHANGE = ("steps", "evaluate_every", "micro_batch_size")
KINDS = dict(model=dict, training=dict, options=dict, files=dict, evaluations=list, step=int)
KINDS |= dict(dtype=str, text=str, sha256=str)
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES |= {torch.uint8: "U8"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that belongs to another run."""


def save(run: LabRun, directory: str | Path) -> Path:
    """Write a checkpoint of a run, complete or not at all, and return its path.

    The directory keeps its last two checkpoints; one of this step that is there already stays.

    Raises:
        OSError: it cannot be written, for want of space say; earlier checkpoints stay.
        CheckpointError: its name is taken by something else.
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
    final = checkpoint_path(directory, run.step)
    rank, world_size = rank_and_world_size(run.model)
    if run_on_first(run.model, lambda: _is_there(final)):  # each step is reached in one way only
        return final
    try:
        partial = run_on_first(run.model, lambda: _begin(final))
        writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.save(tensors, storage_writer=writer, no_dist=world_size == 1)
        run_on_first(run.model, lambda: _finish(partial, final, _record(run)))
    except (OSError, dcp.CheckpointException) as error:  # the same on all
        if rank == 0:
            with contextlib.suppress(OSError):
                _remove_unfinished(final.parent)
        raise OSError(
            f"step {run.step} cannot be written to {directory} ({_causes(error)}); the last whole "
            f"checkpoint is {newest_checkpoint(directory)}"
        ) from error
    return final


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """Return where a run's checkpoint after so many steps is, or would be."""
    return Path(directory) / f"step-{step:08d}"


def _record(run):
    return {
        "format": FORMAT,
        "model": dataclasses.asdict(run.model.config),
        "dtype": str(run.model.embedding.weight.dtype).removeprefix("torch."),
        "training": dataclasses.asdict(run.config),
        "options": run.options,
        "text": run.text,
        "step": run.step,
        "evaluations": run.evaluations,
    }


def _is_there(final):
    """Whether a checkpoint has been written; what else has its name is refused."""
    if not final.exists():
        return False
    read_record(final)
    return True


def _begin(final):
    """Make the folder that a checkpoint is written to until it gets its name."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(final.parent)  # of a run that was killed
    partial = _free(final.with_name(f"partial-{final.name}"))
    partial.mkdir()
    return partial


def _free(path):
    """A path, with a number behind it if something that is not ours has its name."""
    found, number = path, 2
    while found.exists():
        found, number = path.with_name(f"{path.name}-{number}"), number + 1
    return found


def _finish(partial, final, record):
    """Write the record, wait for the disk, give the folder its name, and drop older ones."""
    record["files"] = _digests(partial)
    record["sha256"] = _seal(record)
    write_json(partial / RECORD, record)  # torch has synced the tensors
    partial.rename(final)
    sync(final.parent)
    for old in _written_before(final)[:-1]:
        _drop(old)


def _remove_unfinished(directory):
    """Remove folders that a save had begun to write or to drop, and nothing else."""
    for folder in directory.iterdir():
        if UNFINISHED.fullmatch(folder.name) and holds_only(folder, FILES):
            remove_files(folder, FILES)


def _written_before(final):
    """The checkpoints of fewer steps, oldest first; a folder with such a name alone is none."""
    found = []
    for path in _checkpoints(final.parent):
        with contextlib.suppress(CheckpointError):
            if read_record(path)["step"] < int(final.name[5:]):
                found.append(path)
    return found


def _drop(checkpoint):
    aside = _free(checkpoint.with_name(f"partial-dropped-{checkpoint.name}"))
    checkpoint.rename(aside)  # so that no half bears its name
    remove_files(aside, FILES)


def remove_checkpoints(directory: Path) -> None:
    """Remove all checkpoints of a run, and what a killed save has left."""
    for path in _checkpoints(directory):
        with contextlib.suppress(CheckpointError):
            read_record(path)
            _drop(path)
    _remove_unfinished(directory)


def newest_checkpoint(directory: str | Path) -> Path | None:
    """Return the checkpoint of the most steps in a run's directory; None if there is none."""
    found = _checkpoints(Path(directory))
    return found[-1] if found else None


def read_record(checkpoint: str | Path) -> dict[str, Any]:
    """Return what a checkpoint records of its run, once the record itself is seen to be whole.

    Its keys are "model" and "training" (the two configurations), "options", "dtype", "text" (a
    fingerprint), "step" (steps done) and "evaluations". `restore` and `load_model` check the files
    of tensors as well.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another step or version.
    """
    path = Path(checkpoint)
    if not NAMED.fullmatch(path.name) or not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: neither a run nor one of its checkpoints")
    try:
        record = read_json(path / RECORD)
        if not isinstance(record, dict) or "format" not in record:
            raise ValueError(f"{path / RECORD} is not the record of a checkpoint")
        if (version := record["format"]) == FORMAT:
            _check_record(path, record)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has the format {version!r}; this version reads {FORMAT!r}. Resume with the "
            "version that wrote it, or take another directory (--run)"
        )
    if record["step"] != int(path.name[5:]):
        raise CheckpointError(
            f"{path} has the name of step {int(path.name[5:])}, and holds step {record['step']}: "
            "move it away, or give it its own name back"
        )
    try:
        from_saved(record["model"])
        TrainConfig(**record["training"])
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no model of this version: {error}") from error
    return record


def restore(run: LabRun, checkpoint: str | Path) -> None:
    """Set a run, its model and its optimiser to the state that a checkpoint holds.

    Settings without effect on the loss may differ: the steps between two evaluations, the size of a
    micro-batch, and the number of steps, as long as the learning rate keeps its schedule.

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
    _check_files(path, record)
    _load(path, tensors, run.model)

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
    _check_files(path, record)
    try:
        config, dtype = from_saved(record["model"]), getattr(torch, record["dtype"])
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no model of this version: {error}") from error
    _check_shapes(path, config)
    model = CausalLM(config).to(dtype)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    _load(path, tensors, model)
    return model.to(device)


# --- reading --------------------------------------------------------------------------------------


def _check_files(path, record):
    """Raise CheckpointError if a file of tensors is not the one of the record."""
    try:
        _check_digests(path, record)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


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
                f"{path} does not fit the model: model.{name} is {found.get(name, 'missing')}, and "
                f"its record says {wanted.get(name, 'nothing of it')}"
            )


def _load(path, tensors, model):
    """Read tensors in place, each process its part; their dtypes before, their numbers after."""
    import torch.distributed.checkpoint as dcp

    try:
        _check_dtypes(path, tensors)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    reader = dcp.HuggingFaceStorageReader(str(path))
    alone = not any(hasattr(t, "device_mesh") for t in tensors.values())
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(tensors, storage_reader=reader, no_dist=alone)
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{path} does not fit the model: {_causes(error)}") from error
    wrong = [name for name, t in tensors.items() if not _is_finite(t)]
    if any_rank(bool(wrong), model):
        where = ", ".join(wrong[:3]) or "the part of another process"
        raise _damaged(path, f"not all of its numbers are finite ({where})")


def _is_finite(tensor):
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return not held.is_floating_point() or bool(held.isfinite().all())


def _check_dtypes(path, tensors):
    """Raise ValueError for a file that is no safetensors file, or a tensor of another dtype."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names = opened.keys()
                kinds = {name: opened.get_slice(name).get_dtype() for name in names}
        except SafetensorError as error:
            raise ValueError(f"{file.name} is no safetensors file: {error}") from error
        for name, found in kinds.items():
            if name in tensors and found != (wanted := DTYPES[tensors[name].dtype]):
                raise ValueError(f"{name} in {file.name} has dtype {found}, not {wanted}")


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


# --- what is written ------------------------------------------------------------------------------


def _digests(path):
    """The SHA-256 of each file of tensors, by its name."""
    digests = {}
    for file in sorted(path.glob("*.safetensors")):
        if not file.is_file():  # a pipe would be waited for
            raise ValueError(f"{file.name} is not a regular file")
        with file.open("rb") as opened:
            digests[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return digests


def _seal(record):
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _check_record(path, record):
    """Raise ValueError unless a record is as it was written, with values of the right kinds."""
    for key, kind in KINDS.items():
        if type(record.get(key)) is not kind:  # True is no int here
            raise ValueError(f"{key} in {path / RECORD} is {str(record.get(key))[:40]!r}")
    unsealed = {key: value for key, value in record.items() if key != "sha256"}
    if record["sha256"] != _seal(unsealed):
        raise ValueError(f"{RECORD} differs from what was written (SHA-256)")
    if record["dtype"] not in ("float64", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype in {path / RECORD} is {record['dtype'][:40]!r}")
    for pair in record["evaluations"]:
        numbers = isinstance(pair, list) and [type(number) for number in pair] == [int, float]
        if not numbers or not math.isfinite(pair[1]):
            raise ValueError(f"evaluations in {path / RECORD} have {str(pair)[:40]}")


def _check_digests(path, record):
    """Raise ValueError unless the files of tensors are as they were written."""
    written, found = record["files"], _digests(path)
    if differ := [name for name in written | found if written.get(name) != found.get(name)]:
        raise ValueError(f"{', '.join(differ)} differs from what was written (SHA-256)")
