"""How long a pass may take: every operator that torch calls, what it computes and what it moves.

An operator reads its tensors from memory and writes its result back. On a machine with two rates,
operations of matrix products per second and bytes per second, we predict the larger of its two
times (in operations per second that is the *roofline*) plus the time of a call. Torch runs one
operator after another, so the prediction for a pass is the sum over its operators. It is not a
bound: a tensor that is still in the processor's cache moves faster than one in memory. Notebook 10
compares it with measurements.

No list of operators is written by hand. `_fake_layer` runs a layer on tensors that have shapes but
no contents, and torch's dispatcher reports each call to a `Recorder`. A call counts each whole
tensor that it reads or writes once. Lookups count the rows they read. Fused attention counts the
causal pairs, as the CPU kernel computes them, and all pairs if it has a mask.

Invalid sizes and rates raise ValueError naming argument and number (check.py).
Source: Williams, Waterman and Patterson, Roofline (2009).
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cheems_ref import check
from cheems_ref.config import LAYERS, ROUTED, SEQUENCE_MIXERS, ModelConfig, make_layer
from cheems_ref.rope import RotaryTable


class Operator(NamedTuple):
    """One call of torch: operations of its matrix products, bytes read and written."""

    name: str
    flops: int
    moved: int


@dataclass(frozen=True)
class Machine:
    """The rates of a machine.

    Args:
        flops: operations per second of a large matrix product.
        bandwidth: bytes per second, read and written, of an operator that computes little.
        launch: seconds per call, whatever its size.
    """

    flops: float
    bandwidth: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        """Validate the rates."""
        check.numbers("(0, inf)", flops=self.flops, bandwidth=self.bandwidth)
        check.numbers("[0, inf)", launch=self.launch)

    def seconds(self, operators: Iterable[Operator]) -> float:
        """Predict the time of operators that run one after another."""
        return math.fsum(
            self.launch + max(one.flops / self.flops, one.moved / self.bandwidth)
            for one in operators
        )


class Recorder(TorchDispatchMode):
    """Record the operators called in its context, except views and queries of shapes."""

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
    context: int = 0,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
) -> dict[str, list[Operator]]:
    """List the operators of a forward pass, or of a forward and a backward pass.

    The keys are the letters of the pattern, each with all its layers, their norms and residual
    sums, and "head": the last norm and the logits, in training with their cross-entropy. The lookup
    of the embedding is left out. The form of each layer is as in `_fake_layer`.

    Args:
        config: of the model.
        length: l, tokens in each row.
        context: tokens in the cache.
        batch: rows.
        dtype: of the model.
        training: with the backward pass.
    """
    how = dict(context=context, batch=batch, dtype=dtype, training=training)
    return {
        part: max(1, config.pattern.count(part)) * layer_operators(part, config, length, **how)
        for part in [*dict.fromkeys(config.pattern), "head"]
    }


def layer_operators(
    part: str,
    config: ModelConfig,
    length: int,
    *,
    context: int = 0,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
) -> list[Operator]:
    """List the operators of one layer, or of the "head"; arguments as for `pass_operators`.

    Raises:
        ValueError: a size that is not a size, or a tensor of more bytes than 64 bits can count.
    """
    check.sizes(length=length, batch=batch)
    check.sizes(0, context=context)
    check.floating(dtype=dtype)
    with _countable(length=length, context=context, batch=batch):
        fake = _fake_layer(part, config, (batch, length), dtype, context=context)
        with torch.set_grad_enabled(training), Recorder() as recorder:
            y = fake.run()
            if training:
                with y.fake_mode if isinstance(y, FakeTensor) else torch.device("meta"):
                    torch.autograd.grad(y, [fake.x, *fake.parameters], torch.empty_like(y))
    return recorder.operators


@contextlib.contextmanager
def _countable(**sizes: int):
    """Turn torch's error for a tensor of too many bytes into a ValueError that names the sizes."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # would print a traceback of its own
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    except (RuntimeError, OverflowError, TypeError) as error:
        if not any(words in str(error).lower() for words in ("overflow", "too large")):
            raise
        listed = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise ValueError(f"{listed}: a tensor would have more bytes than 64 bits count") from error
    finally:
        log.setLevel(level)


class _FakeLayer(NamedTuple):
    """One layer and its norm, on tensors that have shapes but no contents.

    run: computes x + layer(norm(x)), or the "head"; x: its input; parameters: of norm and layer;
    angles: the cosines and sines that `run` has made, as in `RotaryTable.made`.
    """

    run: Callable[[], Tensor]
    x: Tensor
    parameters: list[Tensor]
    angles: dict[tuple, tuple[Tensor, Tensor]]


def _fake_layer(
    part: str, config: ModelConfig, shape: tuple[int, int], dtype: torch.dtype, *, context: int = 0
) -> _FakeLayer:
    """Make one layer with its norm out of tensors that take no memory.

    The layer runs as on a CPU. S runs in chunks, except on a single token. Attention is fused,
    unless a dynamic mask needs a gradient. Routed experts have equal loads.

    Args:
        part: a letter, or "head": the last norm and the logits, and the cross-entropy where
            gradients are recorded.
        config: of the model.
        shape: rows and tokens.
        dtype: of the model.
        context: tokens in the layer's cache.
    """
    check.choice((*LAYERS, "head"), part=part)
    c, mixes_tokens = config, part in SEQUENCE_MIXERS
    with torch.device("meta"):
        norm = nn.RMSNorm(c.d_model)
        is_head = part == "head"
        layer = nn.Linear(c.d_model, c.vocab_size, bias=False) if is_head else make_layer(part, c)
    # Attention is fused on fake tensors, which claim to be on a CPU, but not on the meta device.
    # Routed experts read their loads, which fake tensors refuse and the meta device splits evenly.
    mode = torch.device("meta") if part in ROUTED else FakeTensorMode()
    with mode:
        x = torch.empty(*shape, c.d_model, dtype=dtype, requires_grad=True)
        zeros = torch.zeros(shape, dtype=torch.int64)
        of_norm, of_layer = (
            {name: torch.empty(p.shape, dtype=dtype, requires_grad=True) for name, p in named}
            for named in (norm.named_parameters(), layer.named_parameters())
        )
        rotary, cache = RotaryTable(zeros), None
        if context and mixes_tokens:
            before = torch.empty(shape[0], context, c.d_model, dtype=dtype)
            with torch.no_grad():
                _, cache = functional_call(
                    layer, of_layer, (before, zeros.new_zeros(before.shape[:2]))
                )

    def run():
        with mode:
            normed = functional_call(norm, of_norm, x)
            if mixes_tokens:
                given = dict(cache=cache, rotary=rotary)
                return x + functional_call(layer, of_layer, (normed, zeros), given)[0]
            y = functional_call(layer, of_layer, normed)
            if not is_head:
                return x + y
            if not torch.is_grad_enabled():
                return y
            wide = torch.promote_types(dtype, torch.float32)
            return F.cross_entropy(y.flatten(0, 1).to(wide), zeros.flatten())

    return _FakeLayer(run, x, [*of_norm.values(), *of_layer.values()], rotary.made)


# Operators that do not read all of their tensors, by torch's names.
OVERWRITERS = {"copy_", "fill_", "zero_"}
MAKERS = {"arange", "full", "ones", "zeros", "scalar_tensor"}
GATHERS = {"embedding", "gather", "index", "index_select"}  # read as much as they write
SCATTERS = {"index_add", "index_copy", "index_put", "scatter", "scatter_add"}  # last argument
BAGS = {  # read a row per index: positions of the table (or gradients by row) and of the indices
    "neurons": (1, 2),
    "_embedding_bag": (0, 1),
    "_embedding_bag_backward": (0, 1),
    "_embedding_bag_forward_only": (0, 1),
    "_embedding_bag_dense_backward": (0, 1),
    "_embedding_bag_per_sample_weights_backward": (1, 2),
}
FUSED_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # and its backward pass


class _Call:
    """One call of an operator: the tensors it reads and writes."""

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
        """Whether the result is an argument's memory, unchanged, or memory not yet filled."""
        kinds = [r.alias_info for r in self.function._schema.returns]
        shares = any(alias is not None and not alias.is_write for alias in kinds)
        return shares or self.name in ("_unsafe_view", "detach", "alias") or "empty" in self.name

    def counts(self):
        """Return operations and bytes."""
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
        if self.name.startswith(FUSED_ATTENTION):
            return self.attention_flops()
        count = flop_registry.get(self.function.overloadpacket)
        return int(count(*self.args, **self.kwargs, out_val=self.result)) if count else 0

    def attention_flops(self):
        """Fused attention: two products forward, five backward; causal pairs if is_causal."""
        b, h, l, p = self.given["query"].shape
        s = self.given["key"].shape[2]
        own = min(l, s)
        causal = own * (own + 1) // 2 + (l - own) * s
        products = 5 if "grad_out" in self.given else 2
        return 2 * products * b * h * p * (causal if self.given.get("is_causal") else l * s)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _size(t):
    """Bytes in memory: an expanded axis (stride 0) counts once."""
    entries = math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step)
    return entries * t.element_size()
