"""What a model will take, computed from its config: bytes of cache, parameters, training.

Nothing is allocated: layers that are asked for their size are made on the meta device. Notebook 07
finds the same numbers in running models.
Wrong sizes and dtypes raise ValueError naming argument and number (check.py).
"""

from typing import NamedTuple

import torch

from cheems_ref import check
from cheems_ref.config import LAYERS, SEQUENCE_MIXERS, ModelConfig


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
            layer = LAYERS[letter].make(c)
        n = c.pattern.count(letter)
        total = sum(parameter.numel() for parameter in layer.parameters())
        idle = layer.idle_parameters() if hasattr(layer, "idle_parameters") else 0
        counts[letter] = Parameters(n * total, n * (total - idle))
    return counts


def training_bytes(
    config: ModelConfig, *, tokens: int = 0, dtype: torch.dtype = torch.float32
) -> int:
    """Compute what training a model with AdamW takes at the least, in bytes.

    Every parameter is held four times: itself, its gradient, and the two moments of AdamW. Of an
    update the logits are counted, and their gradient; what else its layers keep for the gradients
    comes on top.

    Args:
        config: of the model.
        tokens: of one update.
        dtype: of the model.
    """
    check.numbers("[0, inf)", tokens=tokens)
    check.floating(dtype=dtype)
    c = config
    parameters = sum(part.total for part in count_parameters(c).values())
    return (4 * parameters + 2 * tokens * c.vocab_size) * dtype.itemsize
