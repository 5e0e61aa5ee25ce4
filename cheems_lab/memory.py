"""Whether a training run fits into memory, before any of it is allocated."""

import contextlib
import math
from pathlib import Path

import psutil
import torch

from cheems_lab.console import si
from cheems_ref.budget import training_memory
from cheems_ref.config import ModelConfig
from cheems_ref.train import TrainConfig, check_length, n_micro_batches


def check_memory(
    config: ModelConfig,
    training: TrainConfig,
    device: torch.device,
    world_size: int = 1,
    parallel: str | None = None,
    *,
    text_bytes: int = 0,
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
        text_bytes: memory that each process takes for the text, as `check_text` returns it.
    """
    rows = math.ceil(training.batch_size / world_size)
    rows = math.ceil(rows / n_micro_batches(rows, training.micro_batch_size))
    dtype = torch.bfloat16 if training.precision == "bfloat16" else torch.float32
    shards = 1 if parallel == "data" else world_size
    needed = training_memory(config, training.seq_len, batch=rows, dtype=dtype, processes=shards)
    size = needed.total() - needed.activations
    if device.type == "cpu":
        size = (needed.total() + text_bytes) * world_size
    if size > (free := free_memory(device)):
        raise ValueError(
            f"training needs {si(size, 'B')} of memory (parameters, gradients and AdamW "
            f"{si(needed.parameters, 'B')}, activations {si(needed.activations, 'B')}, "
            f"logits {si(needed.logits, 'B')}, the text {si(text_bytes, 'B')}), and {device} has "
            f"{si(free, 'B')} free: take a smaller model, --micro-batch-size, --batch-size or "
            "--seq-len"
        )


def check_text(path: str | Path | None, training: TrainConfig, *, recorded: bool = False) -> int:
    """Return how many bytes of memory a text takes, by its size on the disk, before it is read.

    Args:
        path: of a file, or of a folder of texts; None for Python's manual.
        training: settings of the run.
        recorded: whether the path is from an earlier start of the run.

    Raises:
        FileNotFoundError: a recorded text that is not there any more.
        ValueError: a file too short for a window of the training.
    """
    if path is None:
        return 0
    path = Path(path)
    if recorded and not path.exists():
        raise FileNotFoundError(
            f"{path}, the text of this run, is not there; if it has moved, --text FILE says where"
        )
    if path.is_dir():  # the texts, both sides of the split, and both together, twice
        return 4 * sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if not path.is_file():  # a pipe, for example, whose length nobody knows
        return 0
    size = path.stat().st_size
    if size:  # an empty file is refused by its name when it is read
        check_length(size, training)
    return size


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
