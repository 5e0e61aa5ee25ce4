"""Whether a training run fits into memory, before any of it is allocated."""

import contextlib
import math
import os
from pathlib import Path

import torch

from cheems_lab.console import print_once
from cheems_ref.budget import training_memory
from cheems_ref.config import ModelConfig
from cheems_ref.train import TrainConfig, n_micro_batches

try:
    import resource
except ImportError:  # Windows
    resource = None

NOTABLE = 10**9  # bytes, from which on unknown memory is worth a line


def check_memory(
    config: ModelConfig,
    training: TrainConfig,
    device: torch.device,
    world_size: int = 1,
    parallel: str | None = None,
) -> None:
    """Raise ValueError if training needs more memory than is free, or positions that don't exist.

    On a CPU it counts all that `cheems budget` counts; on a GPU, whose kernels keep less for the
    backward pass, without that part.

    Args:
        config: of the model.
        training: how it is trained.
        device: where.
        world_size: number of processes. On a CPU they share its memory.
        parallel: "data" if each has all parameters; else they share them.
    """
    if config.mask == "gate" and "I" in config.pattern and training.seq_len > config.max_positions:
        raise ValueError(
            f"--seq-len {training.seq_len} is longer than the table of mask=gate, max_positions = "
            f"{config.max_positions}"
        )
    rows = math.ceil(training.batch_size / world_size)
    rows = math.ceil(rows / n_micro_batches(training, world_size))
    dtype = torch.bfloat16 if training.precision == "bfloat16" else torch.float32
    shards = 1 if parallel == "data" else world_size
    needed = training_memory(config, training.seq_len, batch=rows, dtype=dtype, processes=shards)
    size = needed.total() if device.type == "cpu" else needed.total() - needed.activations
    if device.type == "cpu":
        size *= world_size
    free = free_memory(device)
    text = (
        f"training needs {_gigabytes(size)} of memory (parameters, gradients and AdamW "
        f"{_gigabytes(needed.parameters)}, activations {_gigabytes(needed.activations)}, logits "
        f"{_gigabytes(needed.logits)})"
    )
    if free is None and size >= NOTABLE:
        print_once(f"{text}; the free memory of {device} could not be determined")
    if free is not None and size > free:
        raise ValueError(
            f"{text}, and {device} has {_gigabytes(free)} free: take a smaller model, "
            "--micro-batch-size, --batch-size or --seq-len"
        )


def free_memory(device: torch.device) -> int | None:
    """Return how many bytes a process may still take on a device; None if it cannot be seen."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return None
    limits = []
    with contextlib.suppress(OSError, ValueError, KeyError):  # Linux
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = dict(line.split(":") for line in lines)["MemAvailable"].split()[0]
        limits.append(1024 * int(kilobytes))
    if not limits and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if resource is not None and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) > 0:
        limits.append(limit)
    with contextlib.suppress(OSError, ValueError):  # a container's; "max" if there is no limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        limits.append(limit - int((group / "memory.current").read_text()))
    return min(limits, default=None)


def _gigabytes(n):
    return f"{n / 1e9:,.1f} GB"
