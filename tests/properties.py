"""What more than one test file asks of the package: work counted, and questions to the device."""

import itertools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Work(TorchDispatchMode):
    """Counts operations and the bytes that they write; views write none."""

    def __init__(self):
        super().__init__()
        self.operations = self.bytes = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [t.nbytes for t in tree_leaves(out) if torch.is_tensor(t)]
            self.operations += 1
            self.bytes += sum(sizes)
            self.largest = max(self.largest, *sizes, 0)
        return out


def work(run: Callable[[int], torch.Tensor], n: int) -> Work:
    """The work of run(n), which returns a scalar, and of its backward pass."""
    with Work() as counter:
        run(n).backward()
    return counter


def works_linearly(run: Callable[[int], torch.Tensor], counts=(2, 3, 4, 5)) -> None:
    """Each further chunk costs exactly what the last one did, backward pass included.

    run(n) computes a scalar, that takes a gradient, from n chunks.
    """
    all_work = [work(run, n) for n in counts]
    more = {
        (after.operations - before.operations, after.bytes - before.bytes)
        for before, after in itertools.pairwise(all_work)
    }
    assert len(more) == 1 and min(more) > (0, 0), f"operations and bytes added per chunk: {more}"
