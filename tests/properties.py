"""What more than one test file asks of the package: work counted, and questions to the device."""

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cheems_ref.verify import check


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


# On an accelerator each of these waits for the device: the result's shape, or a number in Python,
# depends on values.
ASKING = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",  # item(), bool(), float(), int()
        "item",  # the same in inference mode
        "is_nonzero",
        "equal",
        "allclose",
        "nonzero",
        "nonzero_numpy",
        "argwhere",
        "masked_select",
        "bincount",
        "histc",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
    )
}
BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
READ_OUT = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class Questions(TorchDispatchMode):
    """Notes which operations wait for the device, and from which line of the package."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def note(self, name):
        frames = [f for f in traceback.extract_stack() if "cheems_ref" in f.filename]
        self.asked.append(
            f"{name} in {frames[-1].filename}:{frames[-1].lineno}" if frames else name
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        masks = name in BY_INDEX and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        unknown_size = func == torch.ops.aten.repeat_interleave.Tensor
        unknown_size = unknown_size and (kwargs or {}).get("output_size") is None
        if name in ASKING or masks or unknown_size:
            self.note(name)
        return func(*args, **(kwargs or {}))


class _ReadOut(TorchFunctionMode):
    """Notes what reads a whole tensor out without an operation."""

    def __init__(self, questions):
        super().__init__()
        self.questions = questions

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READ_OUT:
            self.questions.note(func.__name__)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def questions() -> Iterator[list[str]]:
    """The questions to the device that are asked inside."""
    with Questions() as counter, _ReadOut(counter):
        yield counter.asked


def starts_alike(make: Callable[[], nn.Module], seed=0) -> None:
    """A module made without memory, given it later and reset is the one made directly."""
    torch.manual_seed(seed)
    direct = make()
    with torch.device("meta"):
        late = make()
    late.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*late.parameters(), *late.buffers()):
            t.fill_(torch.nan if t.is_floating_point() else 1)  # new memory may hold the old
    torch.manual_seed(seed)
    late.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    want = dict(itertools.chain(direct.named_parameters(), direct.named_buffers()))
    got = dict(itertools.chain(late.named_parameters(), late.named_buffers()))
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), f"{name} differs"


def is_one_graph(
    mixer: nn.Module, call: Callable, x: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """A sequence mixer compiled in one piece gives what it gives as it is, gradients included.

    call(mixer, x, mask, cache, start) -> y, cache; asked for a step of training, and for two tokens
    more from the cache that it leaves.
    """
    torch._dynamo.reset()
    results, given = [], x.clone().requires_grad_()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    for run in (torch.compile(mixer, fullgraph=True, backend="eager"), mixer):
        try:
            y, cache = call(run, given, mask, None, 0)
            cached = [t for t in tree_leaves(cache) if torch.is_tensor(t) and t.requires_grad]
            out = [y.masked_fill(~real[..., None], 0), *cached]
            total = sum(t.square().sum() for t in out)
            out += torch.autograd.grad(total, [given, *mixer.parameters()], materialize_grads=True)
            cache = tree_map(lambda t: t.detach() if torch.is_tensor(t) else t, cache)
            with torch.no_grad():
                for i in range(2):
                    start = real.sum(1, keepdim=True) + i
                    y, cache = call(run, x[:, i : i + 1], None, cache, start)
                    out.append(y)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise AssertionError(f"more than one graph: {error}") from error
        results.append(out)
    for got, want in zip(*results, strict=True):
        check("compiled = as it is", got, want)
