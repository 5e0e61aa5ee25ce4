"""How long a pass may take: each of its operators, with what it computes and what it moves.

An operator of torch reads its tensors from memory and writes its result back. On a machine that
does π operations of matrix products per second and moves β bytes per second, one that has F of the
first and B of the second takes at least max(F / π, B / β) seconds: the *roofline*. One that has
little of both takes as long as it takes to be called. The sum over all operators of a pass, which
torch runs one after another, is what this room predicts.

The operators are not written down: a layer is run, on tensors that have shapes and no contents, and
torch's dispatcher says what it calls. Wrong sizes raise ValueError naming argument and number
(check.py).
Source: Williams, Waterman and Patterson, Roofline (2009).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cheems_ref import check
from cheems_ref.budget import without_contents
from cheems_ref.config import ModelConfig


class Operator(NamedTuple):
    """One call of torch: operations of its matrix products, bytes that it reads and writes."""

    name: str
    flops: int
    moved: int


class Machine(NamedTuple):
    """What a machine can do.

    flops: operations of a large matrix product per second. bandwidth: bytes per second, read and
    written, of an operator that computes little. launch: seconds that a call takes whatever it is
    given.
    """

    flops: float
    bandwidth: float
    launch: float = 0.0

    def seconds(self, operators: Iterable[Operator]) -> float:
        """Predict how long operators take, one after another."""
        return math.fsum(
            self.launch + max(one.flops / self.flops, one.moved / self.bandwidth)
            for one in operators
        )


class Recorder(TorchDispatchMode):
    """Keep the operators that are called within it, beside those that only look: views, shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        written = _tensors(result)
        if written and not _is_view(function):
            name = function.overloadpacket.__name__
            if name in BAGS:
                flops, moved = _bag(
                    *(args[i] for i in BAGS[name]), _tensors((args, kwargs)), written
                )
            else:
                flops = _flops(function, args, kwargs, result)
                moved = _moved(name, _tensors((args, kwargs)), written)
            self.operators.append(Operator(name, flops, moved))
        return result


def pass_operators(
    config: ModelConfig,
    length: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
) -> dict[str, list[Operator]]:
    """List the operators of a forward pass, or of one and its backward pass.

    By part: each letter of the pattern, with all its layers, their norms and the sums behind them;
    and "head", the last norm and the logits, in training with their cross-entropy. What looks up
    the embedding is left out. As in `budget.activation_bytes`, S runs in chunks, attention is
    fused, and routed experts have equal loads.

    Args:
        config: of the model.
        length: l, tokens in each row.
        batch: rows.
        dtype: of the model.
        training: with the backward pass.
    """
    check.sizes(length=length, batch=batch)
    check.floating(dtype=dtype)
    called = {}
    for part in [*dict.fromkeys(config.pattern), "head"]:
        run, leaves = without_contents(part, config, (batch, length), dtype)
        with torch.set_grad_enabled(training), Recorder() as recorder:
            y = run()
            if training:
                with y.fake_mode if isinstance(y, FakeTensor) else torch.device("meta"):
                    torch.autograd.grad(y, leaves, torch.empty_like(y))
        called[part] = max(1, config.pattern.count(part)) * recorder.operators
    return called


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_view(function):
    """Whether a call returns memory that it was given, unwritten, or another shape for it."""
    name = function.overloadpacket.__name__
    kinds = [r.alias_info for r in function._schema.returns]
    shares = any(alias is not None and not alias.is_write for alias in kinds)
    return shares or name in ("_unsafe_view", "detach", "alias") or name.startswith("empty")


def _moved(name, read, written):
    """Bytes; of a table only the rows that are asked for, of a tensor that is repeated, one."""
    if name in GATHERS:
        read = [*read[1:], *written]
    return sum(_size(t) for t in (*read, *written))


# Those that read from their first tensor as much as they write.
GATHERS = {"embedding", "index", "index_select", "gather"}


def _bag(table, indices, tensors, written):
    """Operations and bytes of an operator that takes a row for each index, and a number of it."""
    entries = indices.numel() * table.shape[-1]
    others = sum(_size(t) for t in tensors if t is not table)
    moved = entries * table.element_size() + others + sum(_size(t) for t in written)
    return 2 * entries, moved


# Those, with the places of the table (or of the gradients, by row) and of the indices.
BAGS = {
    "neurons": (1, 2),
    "_embedding_bag": (0, 1),
    "_embedding_bag_backward": (0, 1),
    "_embedding_bag_forward_only": (0, 1),
    "_embedding_bag_dense_backward": (0, 1),
    "_embedding_bag_per_sample_weights_backward": (1, 2),
}


def _size(t):
    entries = math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step)
    return entries * t.element_size()


def _flops(function, args, kwargs, result):
    if "flash_attention" in function.overloadpacket.__name__:
        return _attention_flops(function, args, kwargs)
    count = flop_registry.get(function.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count else 0


def _attention_flops(function, args, kwargs):
    """Fused attention: two products forward, five backward, of the pairs that are not masked."""
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    b, h, l, p = given["query"].shape
    s = given["key"].shape[2]
    pairs = l * s - l * (l - 1) // 2 if given.get("is_causal") else l * s
    products = 5 if "grad_out" in given else 2
    return 2 * products * b * h * p * pairs
