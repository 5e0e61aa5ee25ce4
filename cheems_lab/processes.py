"""Training over several processes, with torch's fully_shard.

    torchrun --nproc-per-node 2 -m cheems_lab train --run DIRECTORY ...

Every process draws the same windows and reads its share of them. `shard_model` makes a model's
parameters DTensors on a mesh of (replicas, shards) processes, so that one engine does both:
"sharded" is (1, n), where each process holds a part of every parameter and of its moments; "data"
is (n, 1), where each holds all of them, and gradients are averaged.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from cheems_ref import check

Parallel = Literal["sharded", "data"]
TIMEOUT = timedelta(minutes=30)  # for what only one process does, such as hashing a checkpoint


def rank_and_world_size(model: nn.Module) -> tuple[int, int]:
    """Return (rank, world size) of the processes of a model; (0, 1) if it is not sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which takes a second to import
    if fsdp is None or not isinstance(model, fsdp.FSDPModule):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def started_by_torchrun() -> int:
    """Return the number of processes that torchrun has started, this one included; else 0."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def init_processes(device: torch.device) -> None:
    """Join the processes that torchrun has started, over NCCL on CUDA and Gloo elsewhere."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)


def shard_model(model: nn.Module, parallel: Parallel) -> None:
    """Shard a model over all processes, in place; make its optimiser afterwards.

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
    check_agreement(weights=sum(p.detach().double().sum().item() for p in model.parameters()))
    shape = (1, n) if parallel == "sharded" else (n, 1)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # evaluation has no backward pass


def any_rank(flag: bool, model: nn.Module) -> bool:
    """Return whether a flag is set on any process of a model."""
    if rank_and_world_size(model)[1] == 1:
        return flag
    total = torch.tensor(float(flag), device=next(model.parameters()).device)
    dist.all_reduce(total)
    return bool(total)


def check_agreement(**mine: Any) -> None:
    """Raise ValueError on all processes if one of them has other values than process 0."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for rank, theirs in enumerate(found):
        if differ := [name for name in mine if theirs[name] != found[0][name]]:
            raise ValueError(f"process {rank} has other {' and '.join(differ)} than process 0")


def run_on_first(model: nn.Module, action: Callable[[], Any]) -> Any:
    """Run an action on process 0 while the others wait; return its result on all of them.

    Raises:
        OSError, ValueError: the action raised it; on all processes.
    """
    rank, n = rank_and_world_size(model)
    outcome = [None, None]  # the result, and the error
    if rank == 0:
        try:
            outcome[0] = action()
        except (OSError, ValueError) as error:
            outcome[1] = error
    if n > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
