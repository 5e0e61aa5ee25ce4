"""A language model from a pattern string: each letter is a layer, in order.

    x ← embedding(ids)
    x ← x + layer(norm(x))        for every letter of the pattern
    logits ← norm(x) Eᵀ           E the embedding, or a separate matrix

The norm is RMSNorm. There are no biases, except in the step size and the content mask. The letters
and sizes are in `config`, the systems of the papers in `presets`. `stream` and `generate` continue
a prompt: choose an id, append it, repeat. Notebook 07 takes the model apart.
Invalid ids and masks, and the cache of a model with another pattern, raise ValueError with the
argument, its axes and sizes (check.py).
Source: WM §3.4, Tables 2 and 7; Ch §3.4; OTCE §3.3, Tables 1, 5, 6 and 8.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cheems_ref import check
from cheems_ref.attention import AttentionCache
from cheems_ref.config import ROUTED, SEQUENCE_MIXERS, ModelConfig, make_layer
from cheems_ref.rope import RotaryTable
from cheems_ref.ssd import SSDCache

Ids = Integer[Tensor, "b l"]  # int8 to int64, and uint8
PaddingMask = Bool[Tensor, "b l"]
Stream = Float[Tensor, "b l d"]
LayerCache = SSDCache | AttentionCache


class ModelCache(NamedTuple):
    """The memory of all tokens so far; immutable.

    layers: the cache of each layer, None for layers without one. n_tokens (b,): real tokens of each
    row so far, which is the position of its next token. pattern: the pattern of the model.
    """

    layers: tuple[LayerCache | None, ...]
    n_tokens: Tensor
    pattern: str

    def nbytes(self) -> int:
        """Count the bytes of all tensors in the cache."""
        return sum(t.nbytes for t in tree_leaves(self) if isinstance(t, Tensor))


def positions(real: PaddingMask, before: Int[Tensor, " b"]) -> Int[Tensor, "b l"]:
    """Return the position of each token: how many real tokens of its row come before it.

    Args:
        real: False for padding, whose positions mean nothing.
        before: how many real tokens each row had in earlier calls.
    """
    return (before[:, None] + real.cumsum(1) - 1).clamp(min=0)  # not -1 at padding on the left


def check_positions(config: ModelConfig, n_tokens: int | Tensor, name: str) -> None:
    """Reject more tokens in a row than mask="gate" has gates.

    Args:
        config: of the model. Without a gate, texts may be of any length.
        n_tokens: the number of real tokens, or (b,) that of each row.
        name: what the message calls the tokens.
    """
    has_gates = config.mask == "gate" and "I" in config.pattern  # only I takes a mask
    if not (has_gates and check.values_can_be_read()):
        return
    if isinstance(n_tokens, Tensor):
        n_tokens = int(n_tokens.max()) if n_tokens.numel() else 0
    if n_tokens > config.max_positions:
        raise ValueError(
            f"{name} needs {n_tokens} positions, but mask='gate' has "
            f"max_positions = {config.max_positions}"
        )


class Embedding(nn.Embedding):
    """A table with one row per id. In a model with a tied head it computes the logits as well."""

    def forward(self, x: Tensor, *, unembed: bool = False) -> Tensor:
        """Return the rows of ids x (b, l); with unembed, the products of x (..., d) with all rows.

        Both are calls of this module, so both run its hooks, such as one that fetches offloaded
        weights.
        """
        return F.linear(x, self.weight) if unembed else super().forward(x)


class Block(nn.Module):
    """One letter: x + layer(norm(x))."""

    def __init__(self, letter: str, config: ModelConfig):
        super().__init__()
        self.letter = letter
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.layer = make_layer(letter, config)

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
        """Add the layer's output to x; also return its cache, None for no cache."""
        if self.letter not in SEQUENCE_MIXERS:
            return x + self.layer(self.norm(x)), None
        y, cache = self.layer(
            self.norm(x), position_ids, padding_mask=padding_mask, cache=cache, rotary=rotary
        )
        return x + y, (cache if use_cache else None)


class CausalLM(nn.Module):
    """A causal language model: embedding, the blocks of a pattern, a last norm, logits.

    Source: WM §3.4 and Figure 4; Ch §3.4.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(letter, config) for letter in config.pattern)
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = None
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the embedding; each layer initialises its own parameters."""
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

        A prompt, the rest of a prompt and a single token are the same call: pass the cache of the
        previous call.

        Args:
            input_ids: integers in [0, vocab_size).
            padding_mask: True for real tokens; None for all. Padding is allowed anywhere and
                changes nothing for real tokens. Positions count real tokens.
            cache: returned by the previous call; None at the start.
            use_cache: False to return None in place of a cache.

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
        validate: bool = True,
    ) -> tuple[Stream, ModelCache | None]:
        """Compute the last hidden states, before the logits; otherwise as `forward`.

        Without `validate` no argument's contents are checked, and nothing waits for the device.
        """
        if validate:
            self.check_inputs(input_ids, padding_mask, cache)
        real = torch.ones_like(input_ids).bool() if padding_mask is None else padding_mask
        if cache is None:
            caches = [None] * len(self.blocks)
            before = real.new_zeros(real.shape[0], dtype=torch.int64)  # export reads len() as fixed
        else:
            caches, before = cache.layers, cache.n_tokens
        position_ids = positions(real, before)
        rotary = RotaryTable(position_ids)  # the first layer that rotates fills it
        x = self.embedding(input_ids.long())
        layers = []
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

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Compute logits from hidden states."""
        return self.embedding(x, unembed=True) if self.lm_head is None else self.lm_head(x)

    def check_inputs(
        self,
        input_ids: Ids,
        padding_mask: PaddingMask | None = None,
        cache: ModelCache | None = None,
        *,
        max_new_tokens: int = 1,
        name: str = "input_ids",
    ) -> None:
        """Check a call's arguments, and that mask="gate" has a gate for every position.

        Args:
            input_ids, padding_mask, cache: as in `forward`.
            max_new_tokens: tokens to generate; 1 for a plain call of the model.
            name: what the caller calls its input_ids.
        """
        check.token_ids(self.config.vocab_size, **{name: input_ids})
        b, length = input_ids.shape
        check.padding_mask({"b": b, "l": length}, padding_mask)
        if cache is not None:
            check.shapes({"b": b}, **{"cache.n_tokens": (cache.n_tokens, "b")})
            if cache.pattern != self.config.pattern:
                raise ValueError(
                    f"cache is of a model with another pattern: {cache.pattern!r}, "
                    f"this model's is {self.config.pattern!r}"
                )
        if max_new_tokens == 0:  # then the prompt isn't read
            return
        n_tokens = length if padding_mask is None else padding_mask.sum(1)
        if cache is not None:
            n_tokens = n_tokens + cache.n_tokens
        check_positions(self.config, n_tokens + max_new_tokens - 1, name)  # the last is no input


# --- generating text ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """Sampling options for the next id.

    Args:
        temperature: ≥ 0; logits are divided by it. 0 is greedy: the first of the largest logits.
        top_k: keep the k most probable ids; None for all.
        top_p: of those, keep the smallest set of most probable ids whose probabilities sum to at
            least p, in (0, 1]; None for all.
        generator: source of randomness; None for torch's own.

    Source: Holtzman et al. (2020) for top_p.
    """

    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self):
        check.numbers("[0, inf)", temperature=self.temperature)
        check.sizes(top_k=self.top_k)
        if self.top_p is not None:
            check.numbers("(0, 1]", top_p=self.top_p)


DEFAULT = Sampling()


def sample(logits: Float[Tensor, "b v"], sampling: Sampling = DEFAULT) -> Int[Tensor, " b"]:
    """Choose the next id of every row."""
    check.shapes(logits=(logits, "b v"))
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # Only differences of logits matter. With the largest at 0, a tiny temperature gives -inf.
    ordered, ids = logits.to(wide).sort(dim=-1, descending=True, stable=True)
    ordered = (ordered - ordered[:, :1]) / max(sampling.temperature, torch.finfo(wide).tiny)
    ordered = ordered.softmax(dim=-1)
    if sampling.top_k is not None:
        rank = torch.arange(ordered.shape[1], device=ids.device)
        ordered = ordered.masked_fill(rank >= sampling.top_k, 0)
        ordered = ordered / ordered.sum(-1, keepdim=True)
    if sampling.top_p is not None and sampling.top_p < 1:
        before = ordered.cumsum(-1) - ordered
        p = max(sampling.top_p, torch.finfo(wide).tiny)  # 1e-300 would be 0, and keep no id
        ordered = ordered.masked_fill(before >= p, 0)
    place = torch.multinomial(ordered, 1, generator=sampling.generator)
    return ids.gather(1, place)[:, 0]


def stream(
    model: CausalLM,
    prompt: Ids,
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    *,
    padding_mask: PaddingMask | None = None,
    eos_id: int | None = None,
    compile: bool = False,
) -> Iterator[Int[Tensor, " b"]]:
    """Continue a prompt, yielding each new id (b,) as soon as it is chosen.

    An invalid prompt, mask or max_new_tokens raises at the call, before the first id is yielded.

    Args:
        model: in any dtype, on any device.
        prompt: at least one real token in every row.
        max_new_tokens: ≥ 0.
        sampling: how each id is chosen.
        padding_mask: True for real tokens, for prompts of different lengths padded on either side;
            None for all.
        eos_id: in [0, vocab_size), ends a row, which then repeats it; generation stops when all
            rows have ended. None to generate max_new_tokens.
        compile: whether torch.compile turns all layers into one graph, for every token but the
            first. On two cores a token then takes a quarter to a half of the time, after a minute
            or two of compiling, once per process and pattern for one row and once for several.
            Needs a C++ compiler; not for the layers R, H, C and X.
    """
    check.sizes(0, max_new_tokens=max_new_tokens, eos_id=eos_id)
    if eos_id is not None:
        check.numbers(f"[0, {model.config.vocab_size})", eos_id=eos_id)
    model.check_inputs(prompt, padding_mask, max_new_tokens=max_new_tokens, name="prompt")
    if prompt.shape[1] == 0 or (padding_mask is not None and not padding_mask.any(dim=1).all()):
        raise ValueError("every row of the prompt needs at least one real token")
    if compile and (routed := {*model.config.pattern} & {*ROUTED}):
        raise ValueError(f"compile=True is not for routed layers, pattern has {sorted(routed)}")
    return _stream(model, prompt, max_new_tokens, sampling, padding_mask, eos_id, compile)


def _stream(model, prompt, max_new_tokens, sampling, padding_mask, eos_id, compile):
    if padding_mask is None:  # last: the index of each row's last real token
        last = torch.full(prompt.shape[:1], prompt.shape[1] - 1, device=prompt.device)
    else:
        last = (torch.arange(prompt.shape[1], device=prompt.device) * padding_mask).argmax(dim=1)
    b = prompt.shape[0]
    done = torch.zeros(b, dtype=torch.bool, device=prompt.device)
    rows = torch.arange(b, device=prompt.device)
    tokens, cache, read = prompt, None, model.hidden_states
    later = torch.compile(read, fullgraph=True, dynamic=True) if compile else read
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            x, cache = read(tokens, padding_mask=padding_mask, cache=cache, validate=False)
            ids = sample(model.logits(x[rows, last]), sampling)
            if eos_id is not None:
                ids = ids.masked_fill(done, eos_id)
                done = done | (ids == eos_id)
        yield ids.clone()  # outside of inference mode, so autograd may use it
        if eos_id is not None and bool(done.all()):
            return
        tokens, padding_mask, last, read = ids[:, None], None, torch.zeros_like(last), later


def generate(
    model: CausalLM,
    prompt: Ids,
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    *,
    padding_mask: PaddingMask | None = None,
    eos_id: int | None = None,
    compile: bool = False,
) -> Int[Tensor, "b new"]:
    """Continue a prompt and return the new ids without it; arguments as for `stream`."""
    new = list(
        stream(
            model,
            prompt,
            max_new_tokens,
            sampling,
            padding_mask=padding_mask,
            eos_id=eos_id,
            compile=compile,
        )
    )
    if not new:
        return prompt.new_zeros(prompt.shape[0], 0, dtype=torch.int64)
    return torch.stack(new, dim=1)
