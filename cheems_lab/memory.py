"""Whether a training run fits into memory, before any of it is allocated."""

import contextlib
import math
from pathlib import Path

import psutil
import torch

from cheems_lab.console import si
from cheems_ref.budget import training_memory
from cheems_ref.config import ModelConfig
from cheems_ref.train import TrainConfig, n_micro_batches


def check_memory(
    config: ModelConfig,
    training: TrainConfig,
    device: torch.device,
    world_size: int = 1,
    parallel: str | None = None,
) -> None:
    """Raise ValueError if training needs more memory than is free.

    On a CPU it counts all that `cheems budget` counts; on a GPU, whose kernels keep less for the
    backward pass, without that part.

    Args:
        config: of the model.
        training: its settings.
        device: of the training.
        world_size: number of processes. On a CPU they share its memory.
        parallel: "data" if each has all parameters; else they share them.
    """
    rows = math.ceil(training.batch_size / world_size)
    rows = math.ceil(rows / n_micro_batches(rows, training.micro_batch_size))
    dtype = torch.bfloat16 if training.precision == "bfloat16" else torch.float32
    shards = 1 if parallel == "data" else world_size
    needed = training_memory(config, training.seq_len, batch=rows, dtype=dtype, processes=shards)
    size = needed.total() - needed.activations
    if device.type == "cpu":
        size = needed.total() * world_size
    if size > (free := free_memory(device)):
        raise ValueError(
            f"training needs {si(size, 'B')} of memory (parameters, gradients and AdamW "
            f"{si(needed.parameters, 'B')}, activations {si(needed.activations, 'B')}, "
            f"logits {si(needed.logits, 'B')}), and {device} has {si(free, 'B')} free: take "
            "a smaller model, --micro-batch-size, --batch-size or --seq-len"
        )


def free_memory(device: torch.device) -> int:
    """Return how many bytes a process may still allocate on a device."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # a container's limit; "max" without one
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free
