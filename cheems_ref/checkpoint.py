"""Checkpoints: one file that holds all that a run's next update depends on.

    run/step-00000200.safetensors    model.NAME                       the parameters
                                     exp_avg.NAME, exp_avg_sq.NAME    AdamW's moments of each
                                     losses, random_state             of the run
                                     record, its metadata             JSON: configs, text, digest

It is written beside its place and renamed into it, so that a run killed at any moment leaves its
last checkpoint whole. A SHA-256 over the whole file guards every byte. Nothing is unpickled.

A run of several processes (shards.py) writes a folder, step-00000200, with the same tensors in one
file from each process, and the record in record.json. Either is read by any number of processes.

A file that is damaged, or that belongs to another run, raises CheckpointError, which says which
file and what is wrong with it, and changes neither the run nor the files.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cheems_ref import shards
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM

FORMAT = "cheems_ref checkpoint 2"
MOMENTS = ("exp_avg", "exp_avg_sq")
NAMED = re.compile(r"step-\d{8,}(\.safetensors)?")  # without ending: in parts, or of format 1
# Settings that change no loss; the last one does by rounding, as the number of processes does.
FREE = ("steps", "evaluate_every", "checkpoint_every", "micro_batch")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that is not one of this run."""


@dataclass
class Run:
    """A training run: what it trains, how far it is, and what it went through.

    model, config (a TrainConfig) and ids are the caller's; losses holds the loss of every update,
    evaluations pairs (updates done, held-out loss), both in nats per token.
    """

    model: CausalLM
    config: Any  # TrainConfig belongs to the room above, `train`
    ids: Tensor
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    losses: list[float] = field(default_factory=list)
    evaluations: list[list[float]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Number of updates done."""
        return len(self.losses)

    @functools.cached_property
    def text(self) -> str:
        """The fingerprint of the ids, computed once: they do not change during a run."""
        return fingerprint(self.ids)


def save(run: Run, directory: str | Path) -> Path:
    """Write a checkpoint of a run, complete or not at all, and return its path.

    Of the checkpoints in the directory the last two are kept.

    Raises:
        OSError: it cannot be written, for want of room say; those that are there stay.
    """
    directory = Path(directory)
    tensors = {
        "random_state": run.generator.get_state(),
        "losses": torch.tensor(run.losses, dtype=torch.float64),  # too many for a header in the end
    }
    for name, parameter in run.model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        held = run.optimizer.state.get(parameter, {})
        tensors |= {f"{moment}.{name}": held[moment] for moment in MOMENTS if moment in held}
    record = {
        "format": FORMAT,
        "model": dataclasses.asdict(run.model.config),
        "dtype": str(run.model.embedding.weight.dtype).removeprefix("torch."),
        "training": dataclasses.asdict(run.config),
        "text": run.text,
        "step": run.step,
        "evaluations": run.evaluations,
        "sha256": shards.BLANK,
    }
    final = directory / f"step-{run.step:08d}"
    try:
        shards.on_first(run.model, lambda: _sweep(directory))
        if shards.place(run.model)[1] > 1:
            shards.write(tensors, record, final, run.model)
        else:
            final = final.with_suffix(".safetensors")
            _write(tensors, record, final)
    except (OSError, SafetensorError) as error:
        last = newest_checkpoint(directory)
        raise OSError(
            f"the checkpoint of update {run.step} cannot be written to {directory} ({error}); "
            + (f"the last one is whole: {last}" if last else "there is none before it")
        ) from error
    shards.on_first(run.model, lambda: _keep_two(directory))
    return final


def _write(tensors, record, final):
    """One file, beside its place and then renamed into it."""
    partial = final.with_name(f"partial-{final.name}")
    # One entry of metadata: safetensors writes several in any order, and equal runs shall be equal.
    metadata = {"record": json.dumps(record)}
    try:
        partial.touch()
        mode = partial.stat().st_mode  # as the umask has it; safetensors makes files of one's own
        save_file({k: t.contiguous().cpu() for k, t in tensors.items()}, partial, metadata)
        partial.chmod(mode)
        _seal(partial)
        partial.replace(final)  # in one step, also where there is one of this name
    except (OSError, SafetensorError):
        partial.unlink(missing_ok=True)
        raise


def _sweep(directory):
    """Make the directory, and drop what a run that was killed has left there."""
    directory.mkdir(parents=True, exist_ok=True)
    # safetensors too writes beside the place, under .tmp and six letters
    for leftover in (*directory.glob("partial-*"), *directory.glob(".tmp??????")):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _keep_two(directory):
    """Of this format's checkpoints the last two."""
    shards.to_disk(directory)
    mine = [path for path in _checkpoints(directory) if path.is_file() or _in_parts(path)]
    for old in mine[:-2]:
        shards.drop(old)


def _in_parts(path):
    return (path / shards.RECORD).is_file()


def newest_checkpoint(directory: str | Path) -> Path | None:
    """Return the checkpoint of the most updates in a run's directory; None if there is none."""
    found = _checkpoints(Path(directory))
    return found[-1] if found else None


def restore(run: Run, checkpoint: str | Path) -> None:
    """Set a run, its model and its optimiser to where they were when a checkpoint was written.

    One of another model, text or configuration is refused, and what differs is named. What changes
    no loss may differ: how often is evaluated and saved, and how many updates are made, as long as
    the learning rate keeps its schedule.
    """
    checkpoint = Path(checkpoint)
    record, found, load = _read(checkpoint)
    mine = json.loads(json.dumps(dataclasses.asdict(run.model.config)))
    _must_agree(checkpoint, mine, record["model"])
    mine = json.loads(json.dumps(dataclasses.asdict(run.config)))
    _must_agree(checkpoint, _deciding(mine), _deciding(record["training"]))
    if record["text"] != run.text:
        raise CheckpointError(
            f"{checkpoint} is of a run on another text; go on with its text, or take another "
            "directory (--run)"
        )
    parameters = dict(run.model.named_parameters())
    learning = {k: p for k, p in parameters.items() if p.requires_grad}  # which have moments
    like = {f"model.{k}": p for k, p in parameters.items()}
    like |= {f"{moment}.{k}": p for k, p in learning.items() for moment in MOMENTS}
    like |= {"random_state": run.generator.get_state()}
    losses = {"losses": ((record["step"],), torch.float64)}
    _must_fit(checkpoint, found, _kinds(like) | losses)
    tensors = load(like | {"losses": torch.empty(record["step"], dtype=torch.float64)})

    # All that can be wrong was looked for; from here on the run is changed.
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"model.{name}"])
        for name, parameter in learning.items():
            run.optimizer.state[parameter] = {
                "step": torch.tensor(float(record["step"]), dtype=torch.float32),
                # copied, because a tensor that was read is a view of the file
                **{k: tensors[f"{k}.{name}"].to(parameter, copy=True) for k in MOMENTS},
            }
    run.generator.set_state(tensors["random_state"])
    run.losses[:], run.evaluations[:] = tensors["losses"].tolist(), record["evaluations"]


def read_record(checkpoint: str | Path) -> dict[str, Any]:
    """Return what a checkpoint says of its run, without reading the numbers that it holds.

    Its keys are "model" and "training" (the two configurations), "dtype", "text" (a digest),
    "step" (updates done) and "evaluations".
    """
    path = Path(checkpoint)
    if _in_parts(path):
        return _record_in_parts(path)
    if (path / "checkpoint.json").is_file():
        raise CheckpointError(
            f"{path} is a directory, of the format 'cheems_ref checkpoint 1'; this version reads "
            f"{FORMAT!r}, one file. Go on with the version that wrote it, or train anew elsewhere"
        )
    if path.is_dir() and NAMED.fullmatch(path.name):
        raise CheckpointError(f"{path} is damaged: it has no {shards.RECORD}. {_way_back(path)}")
    if not path.is_file():
        raise CheckpointError(f"{path} holds no checkpoint: it is no file, nor holds a step-* file")
    try:
        with safe_open(path, "pt") as file:
            record = json.loads((file.metadata() or {}).get("record", "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, or no checkpoint: {error}. {_way_back(path)}"
        ) from error
    return _of_this_format(path, record)


def _record_in_parts(path):
    try:
        record = json.loads((path / shards.RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. {_way_back(path)}") from error
    return _of_this_format(path, record)


def _of_this_format(path, record):
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{path} does not say {FORMAT!r}: it was not written by this package")
    kinds = dict(model=dict, dtype=str, training=dict, text=str, step=int, evaluations=list)
    wrong = [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]
    if wrong:
        raise CheckpointError(f"{path} lacks {', '.join(wrong)}, or holds something else there")
    return record


def load_model(path: str | Path, *, device: str | torch.device = "cpu") -> CausalLM:
    """Return the model of a checkpoint, or of the newest one in a run's directory, in its dtype."""
    path = Path(path)
    checkpoint = newest_checkpoint(path) or path
    record, found, load = _read(checkpoint)
    try:
        model = CausalLM(ModelConfig(**record["model"])).to(getattr(torch, record["dtype"]))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} holds no model of this version: {error}") from error
    parameters = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    found = {name: kind for name, kind in found.items() if name.startswith("model.")}
    _must_fit(checkpoint, found, _kinds(parameters))
    weights = load({name: parameter.detach() for name, parameter in parameters.items()})
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model.to(device)


def _checkpoints(directory):
    """All of a run, those of fewer updates first."""
    found = [path for path in directory.glob("step-*") if NAMED.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem[5:]))


def _read(path) -> tuple[dict, dict, Callable]:
    """The record of a checkpoint, every byte of which is as it was written; the shapes and dtypes
    of its tensors; and what loads tensors, spread as those that it is handed.
    """
    record = read_record(path)
    if _in_parts(path):
        try:
            shards.read(path)
            found = shards.kinds(path)
        except (OSError, ValueError, TypeError, AttributeError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged: {error}. {_way_back(path)}") from error
        return record, found, lambda like: shards.load(path, like)
    if _sha256(path, str(record.get("sha256"))) != record.get("sha256"):
        raise CheckpointError(
            f"{path} is damaged: it is not what was written (its SHA-256 differs). "
            + _way_back(path)
        )
    tensors = load_file(path)
    return (
        record,
        _kinds(tensors),
        lambda like: {k: shards.as_is(tensors[k], t) for k, t in like.items()},
    )


def _way_back(path):
    """What to do about a damaged checkpoint."""
    found = _checkpoints(path.parent)
    if path in found[1:]:
        return f"Move it away to go back to the one before it, {found[found.index(path) - 1]}"
    return "There is none before it: begin anew, in another directory (--run)"


def _deciding(training):
    """Of the settings of a run those that decide its losses; its steps do by their schedule."""
    kept = {name: value for name, value in training.items() if name not in FREE}
    return kept | {"schedule": training.get("schedule") or training.get("steps")}


def _must_agree(path, mine, theirs):
    differ = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if differ:
        listed = ", ".join(f"{key} ({theirs.get(key)}, now {mine.get(key)})" for key in differ)
        raise CheckpointError(
            f"{path} is of another run; what differs: {listed}. Go on with its settings, or take "
            "another directory (--run)"
        )


def _kinds(tensors):
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def _must_fit(path, found, wanted):
    strange = sorted({name for name, _ in found.items() ^ wanted.items()})
    if strange:
        raise CheckpointError(f"{path} does not fit the model, at {', '.join(strange[:3])}")


def _sha256(path, own):
    """Of a file in which its own digest is blanked."""
    with path.open("rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little")).replace(
            own.encode(), shards.BLANK.encode()
        )
        start = hashlib.sha256(size + header)
        return hashlib.file_digest(file, lambda: start).hexdigest()


def _seal(path):
    """Put its digest into a new file, and wait until all of it is on the disk."""
    digest = _sha256(path, shards.BLANK)
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        file.seek(8 + file.read(size).index(shards.BLANK.encode()))
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


def fingerprint(ids: Tensor) -> str:
    """Return the SHA-256 of a text's ids as int64, whatever integers they are kept in."""
    digest = hashlib.sha256()
    for piece in ids.split(2**20):  # so that no more than 8 MiB are widened at a time
        digest.update(piece.to("cpu", torch.int64).numpy().tobytes())
    return digest.hexdigest()
