"""A run of the lab: the plain loop of `cheems_ref.train`, shared by the processes of a model.

Every process draws the same windows and reads its share of them. Its loss is scaled so that the
mean of the processes' gradients is the gradient of all windows.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cheems_lab.processes import rank_and_world_size
from cheems_ref.text import fingerprint
from cheems_ref.train import (
    Run,
    autocast,
    evaluation_windows,
    n_micro_batches,
    next_token_loss,
)


@dataclass
class LabRun(Run):
    """A training run that can be saved, on one process or on several.

    options is what a command wants to find again when it resumes the run: values of JSON, by name.
    """

    options: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def text(self) -> str:
        """The fingerprint of the ids, computed once."""
        return fingerprint(self.ids)

    def backward(self, windows: Tensor) -> float:
        """Compute the mean loss of a step's windows and its gradient, each process its share.

        All processes read equally many micro-batches, some perhaps empty, because every process
        takes part whenever a sharded model runs.
        """
        rank, world_size = rank_and_world_size(self.model)
        if world_size == 1:
            return super().backward(windows)
        device, total = self.model.embedding.weight.device, 0.0
        mine = windows.tensor_split(world_size)[rank].to(device)
        largest = math.ceil(len(windows) / world_size)
        n_targets = windows[:, 1:].numel()
        n = n_micro_batches(largest, self.config.micro_batch_size)
        for batch in mine.tensor_split(n):
            with autocast(self.config.precision, device):
                summed = next_token_loss(self.model, batch, reduction="sum")
                loss = world_size / n_targets * summed
            loss.backward()
            total += loss.item()
        return _sum_over_processes(total, device) / world_size

    def clip_gradients(self) -> Tensor:
        """Clip as `Run` does; the norm is that of whole gradients where the model is sharded."""
        norm = super().clip_gradients()
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    @torch.no_grad()
    def evaluate(self, held_out: Tensor) -> float:
        """Compute the held-out loss; each process reads its share of every batch."""
        rank, world_size = rank_and_world_size(self.model)
        if world_size == 1:
            return super().evaluate(held_out)
        device, total = self.model.embedding.weight.device, 0.0
        for windows in evaluation_windows(held_out, self.config.seq_len, batch_size=16):
            mine = windows.tensor_split(world_size)[rank].to(device)
            total += next_token_loss(self.model, mine, reduction="sum").item()
        return _sum_over_processes(total, device) / (len(held_out) - 1)


def _sum_over_processes(number, device):
    total = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item()
