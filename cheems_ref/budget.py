"""Parameters, operations and bytes of a model, computed from its config.

No memory is allocated: layers are made on the meta device or of fake tensors. Notebook 07 finds the
same numbers in running models.
Invalid sizes and dtypes raise ValueError naming argument and number (check.py).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from cheems_ref import check
from cheems_ref.config import SEQUENCE_MIXERS, ModelConfig, make_layer
from cheems_ref.retrieval import SCORES_PER_BLOCK
from cheems_ref.roofline import BAGS, FUSED_ATTENTION, _countable, _fake_layer, layer_operators
from cheems_ref.ssd import CHUNKS_PER_BLOCK


class CacheBytes(NamedTuple):
    """Size of a cache, in bytes.

    keys_values: of A and I, the part that grows with the context and that published tables give.
    states: of S and of the SSD inside I. convolutions: of S with position="conv". positions: of all
    keys and of the next token.
    """

    keys_values: int
    states: int
    convolutions: int
    positions: int

    def total(self) -> int:
        """Sum over the four parts."""
        return sum(self)


def cache_bytes(
    config: ModelConfig, context: int, *, batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> CacheBytes:
    """Compute the size of a model's cache after `context` tokens.

    Args:
        config: of the model.
        context: tokens so far, without padding.
        batch: rows.
        dtype: of the model. States of a sixteen-bit model are float32.
    """
    check.sizes(0, context=context, batch=batch)
    check.floating(dtype=dtype)
    c = config
    layers_s, layers_a, layers_i = (c.pattern.count(letter) for letter in "SAI")
    key_width = (c.n_kv_heads or c.n_heads) * (c.d_model // c.n_heads)
    value_width = key_width if c.inner == "linear" else c.d_model  # of I
    ssd_width = c.d_model if c.d_head is None else c.n_heads * c.d_head

    keys_values = context * (layers_a * 2 * key_width + layers_i * (key_width + value_width))
    states = layers_s * ssd_width * c.d_state
    if c.inner == "ssd":
        states += layers_i * c.d_model * c.d_state
    convolutions = 0
    if c.position == "conv":  # of x, B and C
        convolutions = layers_s * (c.d_conv - 1) * (ssd_width + 2 * c.n_groups * c.d_state)
    positions = context * (layers_a + layers_i) + 1
    return CacheBytes(
        keys_values=batch * keys_values * dtype.itemsize,
        states=batch * states * torch.promote_types(dtype, torch.float32).itemsize,
        convolutions=batch * convolutions * dtype.itemsize,
        positions=batch * positions * torch.int64.itemsize,
    )


class Parameters(NamedTuple):
    """Number of parameters, and how many of them are active: used for one token."""

    total: int
    active: int


def count_parameters(config: ModelConfig) -> dict[str, Parameters]:
    """Count the parameters of a model by part.

    The parts are "embedding", "head" (the logits; 0 in total if tied to the embedding), "norms",
    and every letter of the pattern with all its layers. A token uses k of all routed experts, the
    table rows of the experts that it retrieves, and one row of the embedding. This one row is not
    counted as active.
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
        inactive = layer.inactive_parameters() if hasattr(layer, "inactive_parameters") else 0
        counts[letter] = Parameters(n * total, n * (total - inactive))
    return counts


def fit_d_ff(config: ModelConfig, parameters: int) -> ModelConfig:
    """Return the config with the d_ff that brings the number of parameters nearest to a target.

    The number of parameters is a linear function of d_ff, so two points determine it.

    Args:
        config: of the model; its own d_ff does not matter.
        parameters: the target, for all parts together.

    Raises:
        ValueError: d_ff would be less than 1, or no layer of the pattern has a d_ff.
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
            f"parameters must be at least {first:,}, the number for d_ff = 1; got {parameters:,}"
        )
    return replace(config, d_ff=d_ff)


class Flops(NamedTuple):
    """Floating-point operations: two for every multiplication whose result is added to a sum.

    matrices: tokens with matrices and with states. pairs: queries with keys and weights with
    values, for the pairs of tokens that causal attention allows. rows: tokens with rows of tables.
    """

    matrices: int
    pairs: int
    rows: int

    def total(self) -> int:
        """Sum over the three kinds."""
        return sum(self)


def count_flops(
    config: ModelConfig, length: int, *, context: int = 0, batch: int = 1
) -> dict[str, Flops]:
    """Count the operations of a forward pass by part: every letter of the pattern, and "head".

    The count is of products that are summed, as torch calls them (`roofline.pass_operators`), with
    S in chunks, which compute all pairs of their tokens. Elementwise work is left out: norms,
    gates, softmax, rotation, the short convolution, and the outer product that writes a single
    token into the state of an SSD inside I. The backward pass takes two products for each, and
    torch's fused attention recomputes its scores, half of `pairs`.

    Args:
        config: of the model.
        length: l, tokens of this call in each row.
        context: tokens in the cache.
        batch: rows.
    """
    check.sizes(length=length, batch=batch)
    check.sizes(0, context=context)
    chunked, counts = replace(config, backend="chunked"), {}
    allowed = length * context + length * (length + 1) // 2
    for part in [*dict.fromkeys(config.pattern), "head"]:
        layers = max(1, config.pattern.count(part))
        matrices, rows = _products(part, chunked, length, context)
        pairs = 4 * layers * config.d_model * allowed if part in "AI" else 0
        shares = layers * batch * matrices // 2, layers * batch * rows // 2
        counts[part] = Flops(shares[0], batch * pairs, shares[1])
    return counts


def training_bytes(
    config: ModelConfig, *, tokens: int = 0, dtype: torch.dtype = torch.float32, processes: int = 1
) -> int:
    """Compute a lower bound on the memory for training with AdamW, in bytes per process.

    Every parameter is held four times: itself, its gradient, and the two moments of AdamW. Several
    processes shard these. Each then also holds, unsharded and with gradients, the block that runs
    and all parameters outside of the blocks. The logits and their gradient are counted; other
    activations are not.

    Args:
        config: of the model.
        tokens: read at a time by all processes together, in a step or in one micro-batch each.
        dtype: of the model.
        processes: that share the parameters and the tokens.
    """
    check.sizes(0, tokens=tokens)
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
    """Memory of a training step, in bytes per process.

    parameters: with gradients and AdamW's moments. activations: saved for the backward pass.
    logits: their gradient.
    """

    parameters: int
    activations: int
    logits: int

    def total(self) -> int:
        """Sum over the three parts."""
        return sum(self)


def training_memory(
    config: ModelConfig,
    length: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    processes: int = 1,
) -> TrainingMemory:
    """Compute the memory of training with AdamW, parameters in float32.

    Args:
        config: of the model.
        length: l.
        batch: sequences that one process reads at a time.
        dtype: of the activations.
        processes: that share the parameters.
    """
    saved = batch * sum(activation_bytes(config, length, dtype=dtype).values())
    parameters = training_bytes(config, processes=processes)
    return TrainingMemory(parameters, saved, 4 * batch * length * config.vocab_size)


def step_bytes(
    config: ModelConfig, context: int, *, batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Compute a lower bound on the memory traffic of one decoding step, in bytes.

    Every active parameter is read once (all rows might choose the same experts), the cache is read,
    and states, convolutions and the new keys and values are written.

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
    """Count the bytes that a forward pass saves for the backward pass, by letter and "head".

    Each layer runs with its norm as `roofline._fake_layer` does, S in chunks. A GPU's fused norm
    saves less. "head" is the last norm, the logits and their cross-entropy, with the ids.

    Args:
        config: of the model.
        length: l.
        batch: rows.
        dtype: of the model.
    """
    check.sizes(length=length, batch=batch)
    check.floating(dtype=dtype)
    chunked, saved, shared = replace(config, backend="chunked"), {}, frozenset()
    for part in [*dict.fromkeys(config.pattern), "head"]:
        # The layers of a model share their cosines and sines.
        angles = _angles(part, chunked, dtype) - shared
        shared |= angles
        # To a layer that doesn't mix tokens, all rows are one long row.
        rows, tokens = (batch, length) if part in SEQUENCE_MIXERS else (1, batch * length)
        count = functools.partial(_saved_bytes, part, chunked, dtype, rows, angles)
        in_layer, in_angles = _continued(count, part, chunked, tokens)
        saved[part] = max(1, config.pattern.count(part)) * in_layer + in_angles
    return saved


BLOCKS = 2  # of a loop, counted one by one; one is too few for I with inner=ssd


def _continued(
    count: Callable[[int], tuple[int, ...]], part: str, config: ModelConfig, n: int
) -> tuple[int, ...]:
    """Return count(n) of a layer; where the layer loops over blocks, continued from shorter texts.

    Each further block adds as much as the one before, and the pairs of tokens that a mask of I
    looks at grow with the square of the length. So the count is exactly a quadratic of the number
    of blocks, and three short texts determine it.

    Args:
        count: the numbers for so many tokens.
        part: the letter of the layer, or "head".
        config: of the model.
        n: tokens.
    """
    block = _tokens_per_block(part, config)
    if block is None:
        return count(n)
    blocks, first = n // block, BLOCKS + (config.k_keys or 0) // block
    if blocks <= first + 2:
        return count(n)
    lengths = [n - (blocks - first - i) * block for i in range(3)]
    steps = blocks - first
    return tuple(
        one + steps * (two - one) + steps * (steps - 1) // 2 * (three - 2 * two + one)
        for one, two, three in zip(*map(count, lengths), strict=True)
    )


def _tokens_per_block(part, config):
    """How many tokens each turn of a layer's loop takes; None for a layer without a loop."""
    if part == "S" or (part == "I" and config.inner == "ssd"):
        return CHUNKS_PER_BLOCK * config.chunk_size
    if part in "PKE":
        scores = 2 * config.n_retrieval_heads * math.isqrt(config.n_neurons)
        return max(1, SCORES_PER_BLOCK // scores)
    return None


def _products(part, config, length, context):
    """Operations of one layer on two rows: of matrices, and of rows of tables."""
    if part == "S":  # whose state has the same size after any number of tokens
        context = min(context, 1)

    def after_context(length):
        count = functools.partial(_listed_products, part, config, length)
        return _continued(count, part, config, context)

    return _continued(after_context, part, config, length)


@functools.lru_cache(maxsize=256)  # a command asks for the same layer more than once
def _listed_products(part, config, length, context):
    """The same, by listing all operators.

    With two rows even a single token retrieves its experts by matrix products.
    """
    operators = layer_operators(part, config, length, context=context, batch=2)
    rows = sum(one.flops for one in operators if one.name in BAGS)
    fused = sum(one.flops for one in operators if one.name.startswith(FUSED_ATTENTION))
    return sum(one.flops for one in operators) - rows - fused, rows


def _angles(part, config, dtype):
    """The keys of the cosines and sines that a layer makes."""
    fake = _fake_layer(part, config, (1, 1), dtype)
    fake.run()
    return frozenset(fake.angles)


@functools.lru_cache(maxsize=256)
def _saved_bytes(part, config, dtype, batch, angles, length):
    """Bytes that autograd saves in one layer, without its parameters; and bytes of some angles."""
    saved = {}

    def save(t):
        saved[id(t.untyped_storage())] = t.untyped_storage()  # each memory once
        return t

    with _countable(batch=batch, length=length):
        fake = _fake_layer(part, config, (batch, length), dtype)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            fake.run()
    for t in (*fake.parameters, *(t for pair in fake.angles.values() for t in pair)):
        saved.pop(id(t.untyped_storage()), None)
    new = sum(t.nbytes for key in angles for t in fake.angles[key])
    return sum(storage.nbytes() for storage in saved.values()), new
