"""What more than one test file asks of the package, and what it asks with.

Tensors and masks; work, counted; questions to the device; modules made late; sequence mixers. The
property of a test file, a function of a module and of a case, hands these what it has made of them.
"""

import collections
import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterator

import jaxtyping
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cheems_ref.verify import check

# --- tensors ----------------------------------------------------------------------------------


def normal(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def rows(*texts):
    """A padding mask: '#' is a token and '.' is padding."""
    return torch.tensor([[c == "#" for c in text] for text in texts])


def gradients(y, tensors):
    """All in one vector, of a number that depends on all of y."""
    total = (y * normal(*y.shape, seed=8)).sum()
    grads = torch.autograd.grad(total, [*tensors], materialize_grads=True, retain_graph=True)
    return torch.cat([g.flatten() for g in grads])


def held(cache, name="cache"):
    """All tensors in a cache by their names."""
    if torch.is_tensor(cache):
        return {name: cache}
    if not isinstance(cache, tuple):  # None, or the letters of the pattern
        return {}
    parts = cache._asdict().items() if hasattr(cache, "_asdict") else enumerate(cache)
    return {k: t for key, part in parts for k, t in held(part, f"{name}.{key}").items()}


def leaves_alone(function, *tensors):
    """Call it and see that it has written into none of the tensors."""
    before = [(t.clone(), t._version) for t in tensors]
    function(*tensors)
    for i, (t, (copy, version)) in enumerate(zip(tensors, before, strict=True)):
        assert torch.equal(t, copy) and t._version == version, f"argument {i} is written into"


# --- work -------------------------------------------------------------------------------------


class Work(TorchDispatchMode):
    """Counts operations and the bytes that they write; views write none."""

    def __init__(self):
        super().__init__()
        self.operations = self.bytes = self.largest = 0
        self.names = collections.Counter()  # of views, too

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names[func._schema.name] += 1
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


# --- questions to the device ------------------------------------------------------------------

# On an accelerator each of these waits for the device: the result's shape, or a number in Python,
# depends on values.
ASKING = """_local_scalar_dense item is_nonzero equal allclose nonzero nonzero_numpy argwhere
masked_select bincount histc _unique _unique2 unique_dim unique_consecutive
unique_dim_consecutive"""
ASKING = {f"aten::{name}" for name in ASKING.split()}  # the first is bool(), float() and int()
BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
READ_OUT = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
# Python's numbers, copied to the device. What is made with device="cpu" stays on the host.
COPIED = {torch.tensor, torch.as_tensor, torch.from_numpy}


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
    """Notes what copies a whole tensor from the device, or to it, without an operation."""

    def __init__(self, questions):
        super().__init__()
        self.questions = questions

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READ_OUT or (func in COPIED and (kwargs or {}).get("device") != "cpu"):
            self.questions.note(func.__name__)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def questions() -> Iterator[list[str]]:
    """The questions to the device that are asked inside."""
    with Questions() as counter, _ReadOut(counter):
        yield counter.asked


def angles_made(run: Callable) -> int:
    """How many tables of cosines are made while it runs."""
    with Work() as counter:
        run()
    assert counter.names["aten::cos"] == counter.names["aten::sin"]
    return counter.names["aten::cos"]


# --- modules made late ------------------------------------------------------------------------


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


# --- autocast ---------------------------------------------------------------------------------


def route_twice(route: Callable, queries: nn.Module, x: torch.Tensor) -> list:
    """What `route` gives under autocast, and in float32 from the queries that autocast made."""
    made = []
    with torch.autocast("cpu", torch.bfloat16):
        hook = queries.register_forward_hook(lambda module, inputs, output: made.append(output))
        got = route(x)
        hook.remove()
    hook = queries.register_forward_hook(lambda *_: made[0].to(x.dtype))
    want = route(x)
    hook.remove()
    return [got, want]


# --- sequence mixers: call(mixer, x, real, cache, start) gives y and the cache ------------------


def forward(mixer, x, real=None, cache=None, start=0):
    """One call, whose positions count the real tokens of each row from `start` on."""
    counted = torch.ones(x.shape[:2], device=x.device).bool() if real is None else real
    return mixer(x, start + counted.cumsum(1) - 1, padding_mask=real, cache=cache)


def total(y, *caches):
    """A number that depends on all of y and of the caches."""
    tensors = [t for cache in caches for t in held(cache).values() if t.is_floating_point()]
    return (y * normal(*y.shape, seed=8)).sum() + sum(t.square().sum() for t in tensors)


def asks_nothing(mixer, x, real=None, call=forward):
    """No answer of the device is waited for: in a call, its backward pass, and the token after."""
    with questions() as asked:
        y, cache = call(mixer, x, real, None, 0)
        total(y, cache).backward()
        with torch.no_grad():
            _, cache = call(mixer, x, real, None, 0)
            call(mixer, x[:, :1], None if real is None else real[:, :1], cache, x.shape[1])
    assert not asked, asked


def is_one_graph(
    mixer: nn.Module, call: Callable, x: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """A sequence mixer compiled in one piece gives what it gives as it is, gradients included.

    Asked for a step of training, and for two tokens more from the cache that it leaves.
    """
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patched:  # torch traces no type checker
        patched.setattr(jaxtyping.config, "jaxtyping_disable", True)
        compiled = torch.compile(mixer, fullgraph=True, backend="eager")
        try:
            results = [_trained_and_decoded(run, call, x, mask) for run in (compiled, mixer)]
        except torch._dynamo.exc.TorchDynamoException as error:
            raise AssertionError(f"more than one graph: {error}") from error
    for got, want in zip(*results, strict=True):
        check("compiled = as it is", got, want)


def _trained_and_decoded(run, call, x, mask):
    given = x.clone().requires_grad_()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    y, cache = call(run, given, mask, None, 0)
    cached = [t for t in tree_leaves(cache) if torch.is_tensor(t) and t.requires_grad]
    out = [y.masked_fill(~real[..., None], 0), *cached]
    total = sum(t.square().sum() for t in out)
    out += torch.autograd.grad(total, [given, *run.parameters()], materialize_grads=True)
    cache = tree_map(lambda t: t.detach() if torch.is_tensor(t) else t, cache)
    with torch.no_grad():
        for i in range(2):
            start = real.sum(1, keepdim=True) + i
            y, cache = call(run, x[:, i : i + 1], None, cache, start)
            out.append(y)
    return out
