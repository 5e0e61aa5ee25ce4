"""What a model will take, computed from its config: parameters, operations, bytes.

Nothing is allocated: layers that are asked for their size are made on the meta device. Notebook 07
finds the same numbers in running models.
Wrong sizes and dtypes raise ValueError naming argument and number (check.py).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from cheems_ref import check
from cheems_ref.config import LAYERS, SEQUENCE_MIXERS, ModelConfig, make_layer
from cheems_ref.rope import RotaryTable


class CacheBytes(NamedTuple):
    """What a cache takes, in bytes.

    keys_values are those of A and I: the part that grows with the context, and the one that
    published tables give. states are of S and of the SSD inside I, convolutions of S with
    position="conv", positions of all keys and of the next token.
    """

    keys_values: int
    states: int
    convolutions: int
    positions: int

    def total(self) -> int:
        """Sum it up."""
        return sum(self)


def cache_bytes(
    config: ModelConfig, context: int, *, batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> CacheBytes:
    """Compute the size of the cache of a model after `context` tokens.

    Args:
        config: of the model.
        context: tokens so far, without padding.
        batch: rows.
        dtype: of the model. States are float32 in models of sixteen bits.
    """
    check.numbers("[0, inf)", context=context, batch=batch)
    check.floating(dtype=dtype)
    c, size, wide = config, dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    head = c.d_model // c.n_heads
    key = (c.n_kv_heads or c.n_heads) * head
    value = key if c.inner == "linear" else c.d_model
    inner = c.d_model if c.d_head is None else c.n_heads * c.d_head
    n = {letter: c.pattern.count(letter) for letter in SEQUENCE_MIXERS}
    state = n["S"] * inner + (n["I"] * c.d_model if c.inner == "ssd" else 0)
    channels = inner + 2 * c.n_groups * c.d_state if c.position == "conv" else 0
    return CacheBytes(
        keys_values=batch * context * (n["A"] * 2 * key + n["I"] * (key + value)) * size,
        states=batch * state * c.d_state * wide,
        convolutions=batch * n["S"] * (c.d_conv - 1) * channels * size,
        positions=batch * 8 * (1 + context * (n["A"] + n["I"])),
    )


class Parameters(NamedTuple):
    """How many parameters there are, and how many of them work on one token."""

    total: int
    active: int


def count_parameters(config: ModelConfig) -> dict[str, Parameters]:
    """Count the parameters of a model by part.

    The parts are "embedding", "head" (the logits; of a tied model 0 in total, since they are the
    embedding), "norms", and every letter of the pattern with all its layers. Active are those that
    a token meets: of routed experts k of all, of retrieved ones the rows of its neurons, and of an
    embedding that is not tied one row, which is left out.
    """
    c = config
    table = c.vocab_size * c.d_model
    norms = (len(c.pattern) + 1) * c.d_model
    counts = {
        "embedding": Parameters(table, 0),
        "head": Parameters(0 if c.tie_embeddings else table, table),
        "norms": Parameters(norms, norms),
    }
    for letter in dict.fromkeys(c.pattern):
        with torch.device("meta"):
            layer = make_layer(letter, c)
        n = c.pattern.count(letter)
        total = sum(parameter.numel() for parameter in layer.parameters())
        idle = layer.inactive_parameters() if hasattr(layer, "inactive_parameters") else 0
        counts[letter] = Parameters(n * total, n * (total - idle))
    return counts


def fit_d_ff(config: ModelConfig, parameters: int) -> ModelConfig:
    """Return a config with the d_ff whose number of parameters is nearest to the one wanted.

    The number is a linear function of d_ff, and two points give the line.

    Args:
        config: of the model; its own d_ff does not matter.
        parameters: of all parts together.

    Raises:
        ValueError: d_ff would have to be less than 1, or no layer of the pattern has one.
    """

    def total(d_ff):
        return sum(part.total for part in count_parameters(replace(config, d_ff=d_ff)).values())

    check.sizes(parameters=parameters)
    first, second = total(1), total(2)
    if second == first:
        raise ValueError(f"no layer of the pattern {config.pattern} has a d_ff")
    d_ff = 1 + round((parameters - first) / (second - first))
    if d_ff < 1:
        raise ValueError(
            f"parameters must be at least {first:,}, those of d_ff = 1; {parameters:,}"
        )
    return replace(config, d_ff=d_ff)


class Flops(NamedTuple):
    """Floating point operations: two for every multiplication whose result is added to a sum.

    matrices: tokens with matrices and with states. pairs: queries with keys and weights with
    values, for the pairs of tokens that causal attention allows. rows: tokens with rows of tables.
    """

    matrices: int
    pairs: int
    rows: int

    def total(self) -> int:
        """Sum it up."""
        return sum(self)


def count_flops(
    config: ModelConfig, length: int, *, context: int = 0, batch: int = 1
) -> dict[str, Flops]:
    """Count the operations of a forward pass by part: every letter of the pattern, and "head".

    Counted are products that are summed; within a chunk SSD computes those of all pairs. What works
    on single entries is left out: norms, gates, softmax, rotation, the convolution of d_conv taps.
    The backward pass has two products for each, and torch's fused attention computes its scores,
    half of `pairs`, once more.

    Args:
        config: of the model.
        length: l, tokens of this call in each row.
        context: tokens in the cache.
        batch: rows.
    """
    check.numbers("[0, inf)", length=length, context=context, batch=batch)
    c, counts = config, {}
    pairs = length * context + length * (length + 1) // 2
    for letter in dict.fromkeys(c.pattern):
        matrices, rows = _products(c, letter, length, context)
        parts = matrices, 2 * c.d_model * pairs if letter in "AI" else 0, rows
        times = 2 * batch * c.pattern.count(letter)
        counts[letter] = Flops(*(times * part for part in parts))
    return counts | {"head": Flops(2 * batch * length * c.d_model * c.vocab_size, 0, 0)}


def _products(c, letter, length, context):
    """Multiplications of one layer: with matrices and states, and with rows of tables."""
    d, f, h = c.d_model, c.d_ff, c.n_heads
    expert, rows = 3 * d * f, 0
    if letter == "S":
        return _ssd_products(c, c.d_head or d // h, c.n_groups, c.chunk_size, length), 0
    if letter in "AI":
        p, g = d // h, c.n_kv_heads or h
        matrices = 2 * d * d + d * g * p  # queries and output, keys
        inner = "linear" if letter == "A" else c.inner
        values, once = g * p if inner == "linear" else d, 0
        if inner == "ssd":
            once = _ssd_products(c, p, 1, 64, length)
        elif inner == "retrieved":
            m = max(1, p // 2)
            matrices += d * h * m + h * c.n_values * (m + p)
        else:
            matrices += d * values
        if letter == "I" and c.mask == "content":  # the penalties of all keys, cached ones as well
            once += (context + length) * values * h
        return length * matrices + once, 0
    if letter in "MGD":
        matrices = 2 * d * f if letter == "M" else 3 * d * f
    elif letter in "RHCX":
        matrices = d * c.n_experts + c.k_experts * expert
        matrices += expert if letter in "HX" else 0
        matrices += c.k_experts * d * d if letter == "X" else 0
    else:
        private = (c.d_private or (d + 1) // 2) if letter == "K" else d
        shared = dict(P=0, E=2 * d * f, K=3 * d * f + d * private)[letter]
        r, chosen = math.isqrt(c.n_neurons), c.n_retrieval_heads * c.k_neurons
        matrices = shared + c.n_retrieval_heads * c.d_query * (private + r)
        rows = chosen * (2 * private + d if letter == "K" else 2 * d)
    return length * matrices, length * rows


def _ssd_products(c, p, g, chunk_size, length):
    """Multiplications of SSD: its maps, and in chunks of q tokens C Bᵀ, M X, writes and reads."""
    d, h, n = c.d_model, c.n_heads, c.d_state
    maps = length * d * (2 * h * p + 2 * g * n + h)
    if length <= 1:
        return maps + 2 * length * h * p * n
    q = min(chunk_size, length)
    filled = -(-length // q) * q
    return maps + filled * (q * (g * n + h * p) + 2 * h * p * n)


def training_bytes(
    config: ModelConfig,
    *,
    tokens: int = 0,
    dtype: torch.dtype = torch.float32,
    processes: int = 1,
) -> int:
    """Compute what training a model with AdamW takes at the least, in bytes of each process.

    Every parameter is held four times: itself, its gradient, and the two moments of AdamW. Several
    processes share these (fully sharded), and each has beside its part, whole and with
    its gradient, what is outside of all blocks, and the block that runs. The logits are counted,
    and their gradient; what else the layers keep for the gradients comes on top.

    Args:
        config: of the model.
        tokens: that all processes together read at a time: those of an update or, if the windows
            of the update are read in micro-batches, those of a micro-batch of each process.
        dtype: of the model.
        processes: that share the parameters and the tokens.
    """
    check.numbers("[0, inf)", tokens=tokens)
    check.floating(dtype=dtype)
    check.sizes(processes=processes)
    c, parts = config, count_parameters(config)
    held = 4 * sum(part.total for part in parts.values())
    if processes > 1:
        blocks = [parts[m].total // c.pattern.count(m) + c.d_model for m in {*c.pattern}]
        outside = parts["embedding"].total + parts["head"].total + c.d_model
        held = math.ceil(held / processes) + 2 * (outside + max(blocks))
    return (held + 2 * math.ceil(tokens / processes) * c.vocab_size) * dtype.itemsize


class TrainingMemory(NamedTuple):
    """Memory of a training step, in bytes of one process.

    parameters: with gradients and AdamW's moments; activations: what a pass keeps for the backward
    pass; logits: their gradient.
    """

    parameters: int
    activations: int
    logits: int

    def total(self) -> int:
        """Sum it up."""
        return sum(self)


def training_memory(
    config: ModelConfig,
    length: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    processes: int = 1,
) -> TrainingMemory:
    """Compute the memory that training a model with AdamW needs, parameters in float32.

    Args:
        config: of the model.
        length: l.
        batch: sequences that one process reads at a time.
        dtype: of the activations.
        processes: that share the parameters.
    """
    kept = batch * sum(activation_bytes(config, length, dtype=dtype).values())
    parameters = training_bytes(config, processes=processes)
    return TrainingMemory(parameters, kept, 4 * batch * length * config.vocab_size)


def step_bytes(
    config: ModelConfig, context: int, *, batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Count what has to be moved to write one more token of each row, in bytes, at the least.

    Every parameter that one token meets is read once (all rows might choose the same experts), the
    cache is read, and states, convolutions and the new keys and values are written.

    Args:
        config, context, batch, dtype: as in `cache_bytes`.
    """
    cache = cache_bytes(config, context, batch=batch, dtype=dtype)
    read = sum(part.active for part in count_parameters(config).values())
    new = cache_bytes(config, 1, batch=batch, dtype=dtype).keys_values
    return read * dtype.itemsize + cache.total() + cache.states + cache.convolutions + new


def activation_bytes(
    config: ModelConfig, length: int, *, batch: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, int]:
    """Count what a forward pass keeps for the backward pass, in bytes, by letter and "head".

    The layers are run, each with its norm, on tensors that have shapes and no contents, as on a
    CPU: S in chunks; attention fused, which keeps no weights unless it has a dynamic mask; routed
    experts with equal loads. (A GPU's fused norm keeps less.) "head" is the last norm, the logits
    and their cross-entropy, with the ids.

    Args:
        config: of the model.
        length: l.
        batch: rows.
        dtype: of the model.
    """
    check.sizes(length=length, batch=batch)
    check.floating(dtype=dtype)
    c, kept, shared = replace(config, backend="chunked"), {}, {}
    for letter in dict.fromkeys(c.pattern):
        angles = {}
        one = _kept_by(letter, c, (batch, length), dtype, angles)
        new = sum(t.nbytes for key, pair in angles.items() if key not in shared for t in pair)
        kept[letter], shared = c.pattern.count(letter) * one + new, shared | angles
    return kept | {"head": _kept_by("head", c, (batch, length), dtype, {})}


def _kept_by(part, c, shape, dtype, angles):
    """The bytes of all that autograd saves of a layer behind its norm, without the parameters and
    the angles, which the layers of a model share.
    """
    kept = {}

    def keep(t):
        kept[id(t.untyped_storage())] = t.untyped_storage()  # each memory once
        return t

    run, (_, *parameters) = without_contents(part, c, shape, dtype, angles)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    for t in (*parameters, *(t for pair in angles.values() for t in pair)):
        kept.pop(id(t.untyped_storage()), None)
    return sum(storage.nbytes() for storage in kept.values())


def without_contents(
    part: str,
    config: ModelConfig,
    shape: tuple[int, int],
    dtype: torch.dtype,
    angles: dict | None = None,
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Make one layer behind its norm, of tensors that have shapes and no contents.

    Args:
        part: a letter, or "head": the last norm and the logits, and where gradients are recorded
            the cross-entropy.
        config: of the model.
        shape: rows and tokens.
        dtype: of the model.
        angles: filled with the cosines and sines that the layer makes, as in `RotaryTable`.

    Returns:
        What runs x + layer(norm(x)), or "head"; and x with all parameters.
    """
    check.choice((*LAYERS, "head"), part=part)
    c, head = config, part == "head"
    with torch.device("meta"):
        norm = nn.RMSNorm(c.d_model)
        layer = nn.Linear(c.d_model, c.vocab_size, bias=False) if head else make_layer(part, c)
    # Fake tensors are on a CPU, where attention is fused, as it is not on the meta device. But they
    # refuse routed experts, which look at contents.
    mode = torch.device("meta") if part in "RHCX" else FakeTensorMode()
    with mode:
        x = torch.empty(*shape, c.d_model, dtype=dtype, requires_grad=True)
        zeros = torch.zeros(shape, dtype=torch.int64)
        rotary = RotaryTable(zeros)
        own = [
            {name: torch.empty(p.shape, dtype=dtype, requires_grad=True) for name, p in named}
            for named in (norm.named_parameters(), layer.named_parameters())
        ]

    if angles is not None:
        rotary.made = angles

    def run():
        with mode:
            normed = functional_call(norm, own[0], x)
            if part in SEQUENCE_MIXERS:
                return x + functional_call(layer, own[1], (normed, zeros), dict(rotary=rotary))[0]
            y = functional_call(layer, own[1], normed)
            if not head:
                return x + y
            if not torch.is_grad_enabled():
                return y
            wide = torch.promote_types(dtype, torch.float32)
            return F.cross_entropy(y.flatten(0, 1).to(wide), zeros.flatten())

    return run, [x, *own[0].values(), *own[1].values()]
