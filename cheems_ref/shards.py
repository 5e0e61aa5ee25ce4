"""Training over several processes: torch's fully_shard, and its checkpoints without pickle.

    torchrun --nproc-per-node 2 -m -- cheems_ref train --run DIRECTORY ...

Every process draws the same windows and reads its share of them. `spread` makes a model's
parameters DTensors on a mesh of (replicas, shards) processes, so that one engine does both:
"sharded" is (1, n), where each process holds a part of every parameter and of its moments; "data"
is (n, 1), where each holds all of them, and gradients are averaged.

A checkpoint of such a run is a folder: one safetensors file from each process, written by
torch.distributed.checkpoint, and record.json with a SHA-256 of each and of itself. Any number of
processes can go on from it, in either way, and one alone can read it.
"""

import hashlib
import json
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cheems_ref import check

Parallel = Literal["sharded", "data"]
RECORD = "record.json"
BLANK = "0" * 64  # stands in a record while its digest is taken
PATIENCE = timedelta(minutes=30)  # for what only one process does, such as the digests of a run


def place(model: nn.Module) -> tuple[int, int]:
    """Return this process's number among those that a model is spread over, and how many there are.

    A model that is not spread has one, number 0.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which takes a second to import
    if fsdp is None or not isinstance(model, fsdp.FSDPModule):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def begin(device: torch.device) -> None:
    """Join the processes that torchrun has started, over NCCL on CUDA and Gloo elsewhere."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)


def end() -> None:
    """Leave them."""
    if dist.is_initialized():
        dist.destroy_process_group()


def spread(model: nn.Module, parallel: Parallel) -> None:
    """Spread a model over all processes, in place; make its optimiser afterwards.

    Args:
        model: with `blocks`, the same on every process, on the device where it is to be trained.
        parallel: "sharded" for a part of each parameter on each process, "data" for all of it.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: a process has other weights; make the model after the same `manual_seed`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    check.choice(Parallel, parallel=parallel)
    n, device = dist.get_world_size(), next(model.parameters()).device.type
    if n == 1:
        return
    must_agree(weights=sum(p.detach().double().sum().item() for p in model.parameters()))
    shape = (1, n) if parallel == "sharded" else (n, 1)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # also where no gradient follows


def summed(value: float, model: nn.Module) -> float:
    """Add up a number over the processes of a model."""
    parameter = next(model.parameters())
    if place(model)[1] == 1:
        return value
    wide = torch.float32 if parameter.device.type == "mps" else torch.float64
    total = torch.tensor(value, dtype=wide, device=parameter.device)
    dist.all_reduce(total)
    return total.item()


def must_agree(**mine: Any) -> None:
    """Raise ValueError on all processes where one of them has something else than process 0."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for rank, theirs in enumerate(found):
        if differ := [name for name in mine if theirs[name] != found[0][name]]:
            raise ValueError(f"process {rank} has other {' and '.join(differ)} than process 0")


def must_share(directory: Path) -> None:
    """Raise ValueError on all processes where one of them does not see the same directory."""
    (token,) = names = [secrets.token_hex(8)]
    dist.broadcast_object_list(names)
    mark = directory / f"partial-{names[0]}"
    if token == names[0]:
        mark.touch()
    dist.barrier()
    seen = mark.exists()
    dist.barrier()
    if token == names[0]:
        mark.unlink()
    must_agree(**{"files in the directory of the run, which all must share,": seen})


def on_first(model: nn.Module, action: Callable[[], Any]) -> Any:
    """Let process 0 do something, while all others wait, and return what it returned on all.

    Raises:
        OSError: that was raised; on all processes.
    """
    rank, n = place(model)
    told = [None, None]  # what it returned, and what was wrong
    if rank == 0:
        try:
            told[0] = action()
        except OSError as failed:
            told[1] = failed
    if n > 1:
        dist.broadcast_object_list(told)
    if told[1] is not None:
        raise told[1]
    return told[0]


def write(
    tensors: Mapping[str, Tensor], record: dict[str, Any], final: Path, model: nn.Module
) -> None:
    """Write a checkpoint of all processes, complete or not at all.

    Raises:
        OSError: it cannot be written, on every process.
    """
    import torch.distributed.checkpoint as dcp

    def new_folder():  # with a name of its own, which no other run writes to
        folder = final.with_name(f"partial-{final.name}-{secrets.token_hex(4)}")
        folder.mkdir()
        return folder

    partial = on_first(model, new_folder)
    writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer)
        on_first(model, lambda: _finish(partial, final, record))
    except (OSError, dcp.CheckpointException) as failed:  # on every process, what any of them met
        if place(model)[0] == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise failed if isinstance(failed, OSError) else OSError(_what_failed(failed)) from failed


def read(path: Path) -> dict[str, Any]:
    """Return the record of a checkpoint, every file of which is as it was written.

    Raises:
        OSError, ValueError: a file is missing, cannot be read or is not what was written.
    """
    said = (path / RECORD).read_text(encoding="utf-8")
    record = json.loads(said)
    if _digest_of(said.replace(record["sha256"], BLANK)) != record["sha256"]:
        raise ValueError(f"{RECORD} is not what was written (its SHA-256 differs)")
    there = {file.name for file in path.glob("*.safetensors")}
    if strange := there ^ set(record["files"]):
        raise ValueError(f"its files are not those that were written: {', '.join(sorted(strange))}")
    for name, digest in record["files"].items():
        if _digest(path / name) != digest:
            raise ValueError(f"{name} is not what was written (its SHA-256 differs)")
    return record


def kinds(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and the dtype of every tensor in a checkpoint."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    metadata = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: (tuple(m.size), m.properties.dtype) for name, m in metadata.items()}


def load(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors that are spread as others are: of each the part that this process holds.

    Args:
        path: of a checkpoint.
        like: for each name a tensor of its shape and dtype, a DTensor or an ordinary one.
    """
    import torch.distributed.checkpoint as dcp

    tensors = {name: torch.empty_like(t) for name, t in like.items()}
    alone = not any(hasattr(t, "device_mesh") for t in tensors.values())
    reader = dcp.HuggingFaceStorageReader(str(path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # off, as it is to be where alone
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=alone)
        except dcp.CheckpointException as failed:
            raise OSError(_what_failed(failed)) from failed
    return tensors


def as_is(whole: Tensor, like: Tensor) -> Tensor:
    """Spread a tensor that every process has whole as another one is."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), mesh, like.placements, src_data_rank=None)


def _what_failed(failed):
    """Of a CheckpointException, which is no Exception."""
    return "; ".join(f"process {rank}: {cause}" for rank, (cause, _) in failed.failures.items())


def _finish(partial, final, record):
    """Seal the parts with their digests, and give the folder its name."""
    files = sorted(path for path in partial.iterdir() if path.suffix == ".safetensors")
    for path in files:
        to_disk(path)
    record = record | {"files": {path.name: _digest(path) for path in files}, "sha256": BLANK}
    said = json.dumps(record)
    (partial / RECORD).write_text(said.replace(BLANK, _digest_of(said)), encoding="utf-8")
    to_disk(partial / RECORD)
    to_disk(partial)
    if final.exists():
        drop(final)
    partial.rename(final)


def drop(path: Path) -> None:
    """Remove a checkpoint, of which nothing is left under its name at any moment."""
    aside = path.with_name(f"partial-dropped-{path.name}")
    path.rename(aside)
    shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no directories, and has renamed by now
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()
