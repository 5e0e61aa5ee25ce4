"""How long a pass may take: each of its operators, with what it computes and what it moves.

An operator of torch reads its tensors from memory and writes its result back. On a machine with two
rates, operations of matrix products per second and bytes per second, it is put down with the larger
of its two times, the *roofline*, and with the time that it takes to be called. The sum over all
operators of a pass, which torch runs one after another, is what this room predicts. It is no bound:
what stands in a cache moves faster. Notebook 10 compares it with measurements.

The operators are not written down: a layer is run, on tensors that have shapes and no contents, and
torch's dispatcher says what it calls. Counted are whole tensors, once for each call that reads or
writes them; of tables the rows that are asked for; of fused attention, as on a CPU, the causal
pairs, or all of them if it is given a mask. What a cache keeps is not known here. Wrong sizes and
rates raise ValueError naming argument and number (check.py).
Source: Williams, Waterman and Patterson, Roofline (2009).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Machine:
    """What a machine can do.

    Args:
        flops: operations of a large matrix product per second.
        bandwidth: bytes per second, read and written, of an operator that computes little.
        launch: seconds that a call takes whatever it is given.
    """

    flops: float
    bandwidth: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no machine has."""
        check.numbers("(0, inf)", flops=self.flops, bandwidth=self.bandwidth)
        check.numbers("[0, inf)", launch=self.launch)

    def seconds(self, operators: Iterable[Operator]) -> float:
        """Predict how long operators take, one after another."""
        return math.fsum(
            self.launch + max(one.flops / self.flops, one.moved / self.bandwidth)
            for one in operators
        )


class Recorder(TorchDispatchMode):
    """Keep the operators that are called within it, but for those that only look: views, shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        call = _Call(function, args, kwargs, result)
        if call.written and not call.is_view():
            self.operators.append(Operator(call.name, *call.counts()))
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


# What is not read, or not as a whole, by the names of torch's operators.
OVERWRITERS = {"copy_", "fill_", "zero_"}
MAKERS = {"arange", "full", "ones", "zeros", "scalar_tensor"}
GATHERS = {"embedding", "gather", "index", "index_select"}  # as much as they write
SCATTERS = {"index_add", "index_copy", "index_put", "scatter", "scatter_add"}  # their last argument
BAGS = {  # a row for each index: the places of the table, or of gradients by row, and of indices
    "neurons": (1, 2),
    "_embedding_bag": (0, 1),
    "_embedding_bag_backward": (0, 1),
    "_embedding_bag_forward_only": (0, 1),
    "_embedding_bag_dense_backward": (0, 1),
    "_embedding_bag_per_sample_weights_backward": (1, 2),
}


class _Call:
    """One call of an operator: its tensors, and what they say about it."""

    def __init__(self, function, args, kwargs, result):
        self.function, self.args, self.kwargs, self.result = function, args, kwargs, result
        self.name = function.overloadpacket.__name__
        slots = function._schema.arguments
        given = {slot.name: value for slot, value in zip(slots, args, strict=False)} | kwargs
        self.given = given
        out = {slot.name for slot in slots if slot.is_out}
        changed = {slot.name for slot in slots if slot.alias_info and slot.alias_info.is_write}
        self.read = _tensors([value for name, value in given.items() if name not in out])
        self.written = _tensors(result) or _tensors([given.get(name) for name in changed])

    def is_view(self):
        """Whether it returns memory that it was given, unwritten, or that nobody has filled."""
        kinds = [r.alias_info for r in self.function._schema.returns]
        shares = any(alias is not None and not alias.is_write for alias in kinds)
        return shares or self.name in ("_unsafe_view", "detach", "alias") or "empty" in self.name

    def counts(self):
        """Operations and bytes."""
        name, written = self.name, sum(map(_size, self.written))
        if name in BAGS:
            table, indices = (self.args[place] for place in BAGS[name])
            entries = indices.numel() * table.shape[-1]
            others = sum(_size(t) for t in self.read if t is not table)
            return 2 * entries, entries * table.element_size() + others + written
        if name in MAKERS or name.startswith("new_") or name.endswith("_like"):
            return 0, written
        first, *others = self.read or [None]
        if name in OVERWRITERS:
            return 0, sum(map(_size, others)) + written
        if name in GATHERS:
            return 0, sum(map(_size, others)) + 2 * written
        if name.rstrip("_") in SCATTERS and others:
            copied = 0 if name.endswith("_") else _size(first) + written
            return 0, copied + sum(map(_size, others)) + 2 * _size(others[-1])
        return self.flops(), sum(map(_size, self.read)) + written

    def flops(self):
        if self.name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            return self.attention_flops()
        count = flop_registry.get(self.function.overloadpacket)
        return int(count(*self.args, **self.kwargs, out_val=self.result)) if count else 0

    def attention_flops(self):
        """Fused attention: two products forward, five backward; of causal pairs if it is told."""
        b, h, l, p = self.given["query"].shape
        s = self.given["key"].shape[2]
        own = min(l, s)
        causal = own * (own + 1) // 2 + (l - own) * s
        products = 5 if "grad_out" in self.given else 2
        return 2 * products * b * h * p * (causal if self.given.get("is_causal") else l * s)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _size(t):
    """Bytes; of what is repeated along an axis, once."""
    entries = math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step)
    return entries * t.element_size()
