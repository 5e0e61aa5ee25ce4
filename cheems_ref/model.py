"""A language model from a pattern string: every letter is one layer, in the order of the text.

    x ← embedding(ids)
    x ← x + layer(norm(x))        for every letter of the pattern
    logits ← norm(x) Eᵀ           E the embedding itself, or a matrix of its own

The norm is RMSNorm and there are no biases, except the step size's own. The letters and sizes are
in `config`, the systems of the papers in `presets`; `generate` writes text with a model, and
`budget` says what it will take. All of it can be had from here. Notebook 07 takes it apart.
Wrong ids, masks and caches raise ValueError naming argument, letters and numbers (check.py).
Source: WM §3.4, Tables 2 and 7; Ch §3.4; OTCE §3.3, Tables 1, 5, 6 and 8.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cheems_ref import check
from cheems_ref.attention import AttentionCache
from cheems_ref.budget import CacheBytes, Parameters, cache_bytes, count_parameters
from cheems_ref.config import LAYERS, SEQUENCE_MIXERS, ModelConfig, expand_pattern, preset
from cheems_ref.generate import Sampling, generate, sample, stream
from cheems_ref.presets import PRESETS
from cheems_ref.rope import RotaryTable
from cheems_ref.ssd import SSDCache

# fmt: off
__all__ = [
    "LAYERS", "PRESETS", "SEQUENCE_MIXERS", "Block", "CacheBytes", "CausalLM", "ModelCache",
    "ModelConfig", "Parameters", "Sampling", "cache_bytes", "count_parameters", "expand_pattern",
    "generate", "preset", "sample", "stream",
]
# fmt: on

Ids = Int[Tensor, "b l"]
PaddingMask = Bool[Tensor, "b l"]
Stream = Float[Tensor, "b l d"]
LayerCache = SSDCache | AttentionCache


class ModelCache(NamedTuple):
    """What a model remembers of the tokens so far: a value, never changed in place.

    layers: of each letter of the pattern its cache, None where it keeps none; n_tokens (b,): real
    tokens of each row so far, which is the position of its next token; pattern: that of the model.
    """

    layers: tuple[LayerCache | None, ...]
    n_tokens: Tensor
    pattern: str

    def nbytes(self) -> int:
        """Count the bytes of all tensors in the cache."""
        return _nbytes(self)


class Block(nn.Module):
    """One letter: x + layer(norm(x))."""

    def __init__(self, letter: str, config: ModelConfig):
        super().__init__()
        self.letter = letter
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.layer = LAYERS[letter].make(config)

    def forward(
        self,
        x: Stream,
        position_ids: Int[Tensor, "b l"],
        *,
        padding_mask: PaddingMask | None = None,
        cache: LayerCache | None = None,
        use_cache: bool = True,
        rotary: RotaryTable | None = None,
    ) -> tuple[Stream, LayerCache | None]:
        """Add to x what the layer makes of it; None where it keeps no cache."""
        if self.letter not in SEQUENCE_MIXERS:
            return x + self.layer(self.norm(x)), None
        y, cache = self.layer(
            self.norm(x), position_ids, padding_mask=padding_mask, cache=cache, rotary=rotary
        )
        return x + y, cache if use_cache else None


class CausalLM(nn.Module):
    """A causal language model: embedding, the blocks of a pattern, a last norm, logits.

    Source: WM §3.4 and Figure 4; Ch §3.4.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(letter, config) for letter in config.pattern)
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = None
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the embedding, as its layers start by themselves."""
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(
        self,
        input_ids: Ids,
        *,
        padding_mask: PaddingMask | None = None,
        cache: ModelCache | None = None,
        use_cache: bool = True,
    ) -> tuple[Float[Tensor, "b l v"], ModelCache | None]:
        """Compute the logits of the token after each token.

        A prompt, the rest of a prompt and a single token are the same call: hand in the cache of
        the call before.

        Args:
            input_ids: integers in [0, vocab_size).
            padding_mask: True for real tokens; None for all. Padding may stand anywhere and
                changes nothing for real tokens. Positions count real tokens.
            cache: what an earlier call returned; None at the start.
            use_cache: False to return no cache: None in its place.

        Returns:
            logits, undefined at padding, and the cache for the next call.
        """
        x, cache = self.hidden_states(
            input_ids, padding_mask=padding_mask, cache=cache, use_cache=use_cache
        )
        return self.logits(x), cache

    def hidden_states(
        self,
        input_ids: Ids,
        *,
        padding_mask: PaddingMask | None = None,
        cache: ModelCache | None = None,
        use_cache: bool = True,
    ) -> tuple[Stream, ModelCache | None]:
        """Compute what the logits are read from; otherwise as `forward`."""
        self.check(input_ids, padding_mask, cache)
        return self._hidden_states(input_ids, padding_mask, cache, use_cache)

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Compute logits from hidden states."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return F.linear(x, head.weight)

    def check(
        self,
        input_ids: Int[Tensor, "..."],
        padding_mask: Tensor | None = None,
        cache: ModelCache | None = None,
        *,
        max_new_tokens: int = 1,
    ) -> None:
        """Raise the ValueError that `forward` would raise for these arguments, if any.

        With max_new_tokens, also for those of the calls that write so many tokens after them. The
        last new token is not read.
        """
        check.token_ids(self.config.vocab_size, input_ids=input_ids)
        b, length = input_ids.shape
        check.padding_mask({"b": b, "l": length}, padding_mask)
        if cache is not None:
            check.shapes({"b": b}, **{"cache.n_tokens": (cache.n_tokens, "b")})
            if cache.pattern != self.config.pattern:
                raise ValueError(
                    f"cache is that of a model with another pattern: {cache.pattern!r}, "
                    f"this model's is {self.config.pattern!r}"
                )
        n_tokens = length if padding_mask is None else padding_mask.sum(1)
        n_tokens = n_tokens if cache is None else n_tokens + cache.n_tokens
        self._check_positions(n_tokens, max_new_tokens)

    def _hidden_states(self, input_ids, padding_mask=None, cache=None, use_cache=True):
        """`hidden_states` of what `check` has seen, or of ids that this model chose itself."""
        real = padding_mask
        if real is None:
            real = torch.ones_like(input_ids, dtype=torch.bool)
        caches, before = [None] * len(self.blocks), real.new_zeros(len(real), dtype=torch.int64)
        if cache is not None:
            caches, before = cache.layers, cache.n_tokens
        position_ids = (before[:, None] + real.cumsum(1) - 1).clamp(min=0)
        x, layers, rotary = self.embedding(input_ids.long()), [], RotaryTable(position_ids)
        for block, layer_cache in zip(self.blocks, caches, strict=True):
            x, layer_cache = block(
                x,
                position_ids,
                padding_mask=padding_mask,
                cache=layer_cache,
                use_cache=use_cache,
                rotary=rotary,
            )
            layers.append(layer_cache)
        if use_cache:
            cache = ModelCache(tuple(layers), before + real.sum(1), self.config.pattern)
        return self.norm(x), cache if use_cache else None

    def _check_positions(self, n_tokens, max_new_tokens=1):
        """Refuse more real tokens in a row than mask="gate" has positions for.

        n_tokens is a number, or one for each row, at which nothing looks while torch compiles.
        """
        n = self.config.max_positions
        if self.config.mask != "gate" or "I" not in self.config.pattern or max_new_tokens < 1:
            return
        if isinstance(n_tokens, Tensor):
            if torch.compiler.is_compiling() or n_tokens.is_meta or not len(n_tokens):
                return
            n_tokens = int(n_tokens.max())
        if (needed := n_tokens + max_new_tokens - 1) > n:
            new = f" and max_new_tokens = {max_new_tokens}" if max_new_tokens > 1 else ""
            raise ValueError(
                f"input_ids: {n_tokens} tokens in a row{new} need {needed} positions, "
                f"but mask='gate' has max_positions = {n}"
            )


def _nbytes(cache):
    if isinstance(cache, Tensor):
        return cache.nbytes
    return sum(_nbytes(part) for part in cache) if isinstance(cache, tuple) else 0
