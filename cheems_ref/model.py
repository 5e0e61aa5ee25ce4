"""A language model from a pattern string: every letter is one layer, in the order of the text.

    x ← embedding(ids)
    x ← x + layer(norm(x))        for every letter of the pattern
    logits ← norm(x) Eᵀ           E the embedding itself, or a matrix of its own

    S  SSD                                     M  MLP
    A  quadratic causal attention              G  gated MLP            D  DGLU
    I  inner-function attention                R  routed MoE           H  MoE with shared expert
                                               C  cohesive MoE         X  expansive MoE
                                               P  PEER     K  CDMMoE   E  CDMoE

S, A and I mix tokens and keep a cache; the others work on each token by itself. In OTCE's tables E
stands for a routed MoE: written R here. "SM + SE × 11" and "(SG SR) × 4" are accepted as the
papers print them.

The norm is RMSNorm and there are no biases, except the step size's own. `preset` has the systems of
the papers, `generate` and `stream` write text with a model, and `cache_bytes` says what that will
take. Notebook 07 takes it apart.
Source: WM §3.4, Tables 2 and 7; Ch §3.4; OTCE §3.3, Tables 1, 5, 6 and 8.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cheems_ref.attention import AttentionCache, Inner, InnerFuncAttn, Mask, QCAttn
from cheems_ref.experts import (
    DGLU,
    MLP,
    PEER,
    CDMMoE,
    CDMoE,
    CohesiveMoE,
    ExpansiveMoE,
    MoE,
    SharedExpertMoE,
)
from cheems_ref.presets import PRESETS
from cheems_ref.rope import INTEGERS
from cheems_ref.ssd import SSD, Backend, Position, SSDCache

SEQUENCE_MIXERS = "SAI"


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of. It is checked when it is made, and cannot be changed afterwards.

    Args:
        pattern: one letter per layer; see `expand_pattern`. It is kept spelled out.
        vocab_size: number of different ids; 256 for the bytes of a text.
        d_model: width of the stream between the layers.
        n_heads: heads of S, A and I.
        n_kv_heads: groups of keys of A and I; None for one per head.
        d_head: width of a head of S; None for d_model / n_heads.
        n_groups: groups of B and C of S.
        d_state: state width of S, and of the SSD inside I.
        position: source of position of S: "rope", "conv" or "decay".
        d_conv: tokens that the convolution of position="conv" sees.
        rope_base: base of all rotary angles.
        chunk_size: tokens per chunk of SSD.
        backend: that of SSD.
        inner: inner function of I: "ssd", "retrieved" or "linear".
        n_values, k_values: rows of its table, and how many of them a token takes.
        mask: dynamic mask of I: "gate", "content" or None.
        max_positions: length of the table of mask="gate".
        keep: keys that mask="content" keeps.
        d_ff: width inside M, G, D and a routed expert, and of what K and E share.
        n_experts, k_experts: of R, H, C and X: how many, and how many a token takes.
        n_neurons, k_neurons: of P, K and E: experts of one neuron, a square; and how many of them
            each head takes.
        n_retrieval_heads, d_query: of P, K and E: heads, and the width of a query.
        d_private: of K: width of what its experts see; None for half of d_model.
        tie_embeddings: whether the embedding is also the matrix of the logits.
        norm_eps: added to the mean square in RMSNorm.

    Raises:
        ValueError: a pattern that `expand_pattern` refuses or that mixes no tokens, a size below 1,
            or sizes that a layer of the pattern refuses: the message names the letter.
        TypeError: a size that is not a whole number.
    """

    pattern: str = "SESESESESESESEIE"
    vocab_size: int = 256
    d_model: int = 128
    n_heads: int = 4
    n_kv_heads: int | None = None
    d_head: int | None = None
    n_groups: int = 1
    d_state: int = 32
    position: Position = "rope"
    d_conv: int = 4
    rope_base: float | int = 10000.0
    chunk_size: int = 64
    backend: Backend = "auto"
    inner: Inner = "retrieved"
    n_values: int = 16
    k_values: int = 2
    mask: Mask | None = None
    max_positions: int | None = None
    keep: int | None = None
    d_ff: int = 256
    n_experts: int = 4
    k_experts: int = 2
    n_neurons: int = 256
    k_neurons: int = 4
    n_retrieval_heads: int = 2
    d_query: int = 32
    d_private: int | None = None
    tie_embeddings: bool = True
    norm_eps: float | int = 1e-6

    def __post_init__(self):
        object.__setattr__(self, "pattern", expand_pattern(self.pattern))
        if not set(self.pattern) & set(SEQUENCE_MIXERS):
            raise ValueError(
                f"pattern {self.pattern!r} has none of {', '.join(SEQUENCE_MIXERS)}: "
                "no token would see another"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_left_out = field.type == int | None
            if (value is None and may_be_left_out) or field.type not in (int, int | None):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{field.name} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        for name in ("norm_eps", "rope_base"):
            if not isinstance(getattr(self, name), float | int):
                raise TypeError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not isinstance(self.tie_embeddings, bool):
            raise TypeError(f"tie_embeddings must be True or False, got {self.tie_embeddings!r}")
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps must be in (0, 1), got {self.norm_eps}")
        for letter in dict.fromkeys(self.pattern):  # each layer knows best what it cannot be
            try:
                with torch.device("meta"):
                    LAYERS[letter].make(self)
            except ValueError as error:
                where, hint = f"letter {letter} ({LAYERS[letter].name})", ""
                if letter in "PKE":
                    hint = "; its n_experts, n_heads and k are n_neurons, n_retrieval_heads"
                    hint += " and k_neurons of the config"
                elif letter in "RHCX":
                    hint = "; its k is k_experts of the config"
                raise ValueError(f"{where}: {error}{hint}") from error


def preset(name: str) -> ModelConfig:
    """Give the configuration of a system of the papers, or a tiny one, by its name.

    `cheems_ref/presets.py` lists them, and says which of their numbers are the papers' and which
    are ours.

    Args:
        name: such as "cheems-320m", "jamba-1.3b", "llama-2-7b", "cheems-tiny".

    Returns:
        A config whose pattern spells all layers.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return ModelConfig(**PRESETS[name])


class _Layer(NamedTuple):
    name: str
    make: Callable[[ModelConfig], nn.Module]


def _ssd(c):
    return SSD(
        c.d_model,
        n_heads=c.n_heads,
        d_head=c.d_head,
        n_groups=c.n_groups,
        d_state=c.d_state,
        position=c.position,
        d_conv=c.d_conv,
        rope_base=c.rope_base,
        chunk_size=c.chunk_size,
        backend=c.backend,
    )


def _attention(c):
    return QCAttn(c.d_model, n_heads=c.n_heads, n_kv_heads=c.n_kv_heads, rope_base=c.rope_base)


def _inner_function_attention(c):
    return InnerFuncAttn(
        c.d_model,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        rope_base=c.rope_base,
        mask=c.mask,
        inner=c.inner,
        n_values=c.n_values,
        k_values=c.k_values,
        d_state=c.d_state,
        max_positions=c.max_positions,
        keep=c.keep,
    )


def _routed(kind, c):
    return kind(c.d_model, c.d_ff, n_experts=c.n_experts, k=c.k_experts)


def _retrieval(c):
    sizes = dict(n_experts=c.n_neurons, n_heads=c.n_retrieval_heads)
    return dict(sizes, k=c.k_neurons, d_query=c.d_query)


LAYERS = {
    "S": _Layer("SSD", _ssd),
    "A": _Layer("attention", _attention),
    "I": _Layer("inner-function attention", _inner_function_attention),
    "M": _Layer("MLP", lambda c: MLP(c.d_model, c.d_ff)),
    "G": _Layer("gated MLP", lambda c: MLP(c.d_model, c.d_ff, gated=True)),
    "D": _Layer("DGLU", lambda c: DGLU(c.d_model, c.d_ff)),
    "R": _Layer("routed MoE", lambda c: _routed(MoE, c)),
    "H": _Layer("MoE with shared expert", lambda c: _routed(SharedExpertMoE, c)),
    "C": _Layer("cohesive MoE", lambda c: _routed(CohesiveMoE, c)),
    "X": _Layer("expansive MoE", lambda c: _routed(ExpansiveMoE, c)),
    "P": _Layer("PEER", lambda c: PEER(c.d_model, **_retrieval(c))),
    "K": _Layer(
        "CDMMoE", lambda c: CDMMoE(c.d_model, d_ff=c.d_ff, d_private=c.d_private, **_retrieval(c))
    ),
    "E": _Layer("CDMoE", lambda c: CDMoE(c.d_model, d_ff=c.d_ff, **_retrieval(c))),
}


def expand_pattern(pattern: str) -> str:
    """Spell out a pattern: one letter per layer.

    Spaces and + separate, ×n (or x n, * n) repeats the word or the bracket before it:
    "SM + SR × 3 + AM" is "SMSRSRSRAM", and "(SG SR) × 2" is "SGSRSGSR".

    Args:
        pattern: as in the tables of the papers, in the letters of this module.

    Returns:
        The letters alone.

    Raises:
        ValueError: an unknown letter or sign (named, with its place), brackets that do not match,
            × with nothing before it or times 0, or nothing at all.

    Source: OTCE Tables 1, 5, 6 and 8; WM Table 2.
    """
    open_groups, repeatable = [[]], False
    for part in re.finditer(r"([A-Z]+)|(\()|(\))|[×x*]\s*(\d+)|(\+)|\s+|(.)", pattern):
        word, opening, closing, times, plus, other = part.groups()
        place = f"at place {part.start() + 1} of pattern {pattern!r}"
        if word:
            for i, letter in enumerate(word):
                if letter not in LAYERS:
                    known = ", ".join(f"{key} {layer.name}" for key, layer in LAYERS.items())
                    place = f"at place {part.start() + i + 1} of pattern {pattern!r}"
                    raise ValueError(f"unknown letter {letter!r} {place}; there are {known}")
            open_groups[-1].append(word)
        elif opening:
            open_groups.append([])
        elif closing:
            if len(open_groups) == 1:
                raise ValueError(f"a bracket is closed that was not opened, {place}")
            group = open_groups.pop()
            open_groups[-1].append("".join(group))
        elif times:
            if not repeatable or int(times) == 0:
                raise ValueError(f"{part.group()!r} must repeat something at least once, {place}")
            open_groups[-1][-1] *= int(times)
        elif other:
            raise ValueError(f"unknown sign {other!r} {place}; letters are capitals")
        repeatable = bool(word or closing or times) or (repeatable and not (opening or plus))
    if len(open_groups) > 1:
        raise ValueError(f"pattern {pattern!r} has a bracket that is not closed")
    if not (letters := "".join(open_groups[0])):
        raise ValueError(f"pattern {pattern!r} holds no layer")
    return letters


class ModelCache(NamedTuple):
    """What a model remembers of the tokens so far: a value, never changed in place.

    layers: the cache of every sequence mixer, in order; n_tokens (b,): real tokens of each row so
    far, which is the position of its next token; mixers: the letters of the layers.
    """

    layers: tuple[SSDCache | AttentionCache, ...]
    n_tokens: Tensor
    mixers: str

    def nbytes(self) -> int:
        """Count the bytes of all tensors in the cache."""
        return _nbytes(self)


class Block(nn.Module):
    """One letter: x + layer(norm(x)).

    Args:
        letter: which layer.
        config: its sizes.
    """

    def __init__(self, letter: str, config: ModelConfig):
        super().__init__()
        self.letter = letter
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.layer = LAYERS[letter].make(config)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        position_ids: Int[Tensor, "b l"],
        *,
        padding_mask: Bool[Tensor, "b l"] | None = None,
        cache: SSDCache | AttentionCache | None = None,
    ) -> tuple[Float[Tensor, "b l d"], SSDCache | AttentionCache | None]:
        """Add to x (b, l, d) what the layer makes of it; state mixers have no cache: None."""
        if self.letter not in SEQUENCE_MIXERS:
            return x + self.layer(self.norm(x)), None
        y, cache = self.layer(self.norm(x), position_ids, padding_mask=padding_mask, cache=cache)
        return x + y, cache


class CausalLM(nn.Module):
    """A causal language model: embedding, the blocks of a pattern, a last norm, logits.

    Embeddings start normal with standard deviation 0.02, and the layers as they start by
    themselves.

    Args:
        config: what it is made of.

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
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(
        self,
        input_ids: Int[Tensor, "b l"],
        *,
        padding_mask: Bool[Tensor, "b l"] | None = None,
        cache: ModelCache | None = None,
    ) -> tuple[Float[Tensor, "b l v"], ModelCache]:
        """Compute the logits of the token after each token.

        A prompt, the rest of a prompt and a single token are the same call: hand in the cache of
        the call before.

        Args:
            input_ids: (b, l), integers in [0, vocab_size).
            padding_mask: (b, l), True for real tokens; None for all. Padding may stand anywhere and
                changes nothing for real tokens. Positions count real tokens.
            cache: what an earlier call returned; None at the start.

        Returns:
            logits (b, l, vocab_size), of no meaning at padding, and the cache for the next call.

        Raises:
            ValueError: ids that are not integers, not (b, l) or outside the vocabulary, a padding
                mask of another shape or not boolean, or a cache of another batch or model.
        """
        x, cache = self.hidden_states(input_ids, padding_mask=padding_mask, cache=cache)
        return self.logits(x), cache

    def hidden_states(
        self,
        input_ids: Int[Tensor, "b l"],
        *,
        padding_mask: Bool[Tensor, "b l"] | None = None,
        cache: ModelCache | None = None,
    ) -> tuple[Float[Tensor, "b l d"], ModelCache]:
        """Compute what the logits are read from, (b, l, d); otherwise as `forward`."""
        self.check(input_ids, padding_mask, cache)
        b, length = input_ids.shape
        device = input_ids.device
        before = torch.zeros(b, dtype=torch.int64, device=device)
        caches = iter(())
        if cache is not None:
            before, caches = cache.n_tokens, iter(cache.layers)
        if padding_mask is None:
            position_ids = before[:, None] + torch.arange(length, device=device)
            after = before + length
        else:
            position_ids = (before[:, None] + padding_mask.cumsum(1) - 1).clamp(min=0)
            after = before + padding_mask.sum(1)
        x, layers = self.embedding(input_ids.long()), []
        for block in self.blocks:
            mixes = block.letter in SEQUENCE_MIXERS
            x, layer_cache = block(
                x,
                position_ids,
                padding_mask=padding_mask,
                cache=next(caches, None) if mixes else None,
            )
            if mixes:
                layers.append(layer_cache)
        return self.norm(x), ModelCache(tuple(layers), after, self._mixers())

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Compute logits (..., vocab_size) from hidden states (..., d)."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return F.linear(x, head.weight)

    def check(
        self,
        input_ids: Int[Tensor, "..."],
        padding_mask: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> None:
        """Raise the ValueError that `forward` would raise for these arguments, if any."""
        if input_ids.ndim != 2 or input_ids.dtype not in INTEGERS:
            raise ValueError(
                f"input_ids must be integers (b, l), got {input_ids.dtype} {_shape(input_ids)}"
            )
        n = self.config.vocab_size
        if input_ids.numel() and not 0 <= input_ids.min() <= input_ids.max() < n:
            low, high = input_ids.min().item(), input_ids.max().item()
            raise ValueError(f"input_ids must be in [0, {n}), the vocabulary; got {low} to {high}")
        if padding_mask is not None:
            if padding_mask.dtype != torch.bool:
                raise ValueError(f"padding_mask must be boolean, got {padding_mask.dtype}")
            if padding_mask.shape != input_ids.shape:
                raise ValueError(
                    f"padding_mask must be as input_ids, {_shape(input_ids)}, "
                    f"got {_shape(padding_mask)}"
                )
        if cache is not None:
            if len(cache.n_tokens) != len(input_ids):
                raise ValueError(
                    f"the cache is of {len(cache.n_tokens)} rows, input_ids of {len(input_ids)}"
                )
            if cache.mixers != self._mixers():
                raise ValueError(
                    f"the cache is that of a model with another pattern: its sequence mixers are "
                    f"{cache.mixers}, this model's {self._mixers()}"
                )

    def _mixers(self):
        return "".join(letter for letter in self.config.pattern if letter in SEQUENCE_MIXERS)


def sample(
    logits: Float[Tensor, "b v"],
    *,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " b"]:
    """Choose the next id of every row.

    Args:
        logits: (b, v).
        temperature: ≥ 0; logits are divided by it, and 0 takes the largest, the first of equals.
        top_k: keep the k most probable ids.
        top_p: of those, keep the smallest set of most probable ids whose probabilities sum to at
            least p, in (0, 1].
        generator: source of randomness; None for torch's own.

    Returns:
        (b,), int64.

    Raises:
        ValueError: logits that are not (b, v), temperature negative or not finite, top_k < 1, top_p
            outside (0, 1].

    Source: Holtzman et al. (2020) for top_p.
    """
    _check_sampling(temperature, top_k, top_p)
    if logits.ndim != 2:
        raise ValueError(f"logits must be (b, v), got {_shape(logits)}")
    if temperature == 0:
        return logits.argmax(dim=-1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # Only differences of logits count. With the largest at 0 no temperature makes them overflow.
    ordered, ids = logits.to(wide).sort(dim=-1, descending=True, stable=True)
    ordered = (ordered - ordered[:, :1]) / max(temperature, torch.finfo(wide).tiny)
    ordered = ordered.softmax(dim=-1)
    if top_k is not None:
        ordered = ordered.masked_fill(torch.arange(ordered.shape[1], device=ids.device) >= top_k, 0)
        ordered = ordered / ordered.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= top_p, 0)
    place = torch.multinomial(ordered, 1, generator=generator)
    return ids.gather(1, place)[:, 0]


def stream(
    model: CausalLM,
    prompt: Int[Tensor, "b l"],
    max_new_tokens: int,
    *,
    padding_mask: Bool[Tensor, "b l"] | None = None,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Int[Tensor, " b"]]:
    """Write on after a prompt, and hand over each new id (b,) as soon as it is chosen.

    Args:
        model: in any dtype, on any device.
        prompt: (b, l), at least one real token in every row.
        max_new_tokens: ≥ 0.
        padding_mask: (b, l), True for real tokens: prompts of different lengths, filled up on
            either side; None for all.
        temperature, top_k, top_p, generator: as in `sample`.
        eos_id: a row that has written it goes on writing it, and when all have, writing ends.

    Yields:
        (b,), int64, at most max_new_tokens times.

    Raises:
        ValueError: as `sample` and the model do, an empty row, or max_new_tokens < 0.
    """
    _check_sampling(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    model.check(prompt, padding_mask)
    if prompt.shape[1] == 0 or (padding_mask is not None and not padding_mask.any(dim=1).all()):
        raise ValueError("every row of the prompt needs at least one real token to go on from")
    if padding_mask is None:
        last = torch.full(prompt.shape[:1], prompt.shape[1] - 1, device=prompt.device)
    else:
        last = (torch.arange(prompt.shape[1], device=prompt.device) * padding_mask).argmax(dim=1)
    done = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    tokens, cache = prompt, None
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            x, cache = model.hidden_states(tokens, padding_mask=padding_mask, cache=cache)
            logits = model.logits(x[torch.arange(len(x), device=x.device), last])
            ids = sample(
                logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
            )
            if eos_id is not None:
                ids = ids.masked_fill(done, eos_id)
                done = done | (ids == eos_id)
        yield ids.clone()  # which, outside of inference mode, autograd may use
        if eos_id is not None and bool(done.all()):
            return
        tokens, padding_mask, last = ids[:, None], None, torch.zeros_like(last)


def generate(
    model: CausalLM,
    prompt: Int[Tensor, "b l"],
    max_new_tokens: int,
    *,
    padding_mask: Bool[Tensor, "b l"] | None = None,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "b new"]:
    """Write on after a prompt and return the new ids (b, new), without the prompt.

    Arguments and errors are those of `stream`.
    """
    steps = stream(
        model,
        prompt,
        max_new_tokens,
        padding_mask=padding_mask,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_id=eos_id,
        generator=generator,
    )
    new = list(steps)
    return torch.stack(new, dim=1) if new else prompt.new_zeros(len(prompt), 0, dtype=torch.int64)


class CacheBytes(NamedTuple):
    """What a cache takes, in bytes: see `cache_bytes`."""

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
    """Compute the size of the cache of a model after `context` tokens, without making the model.

    Args:
        config: of the model.
        context: tokens so far, without padding.
        batch: rows.
        dtype: of the model. States are float32 in models of sixteen bits.

    Returns:
        keys_values, of A and I: the part that grows with the context, and the one that published
        tables give; states, of S and of the SSD in I; convolutions, of S with position="conv";
        positions, of all keys and of the next token.

    Raises:
        ValueError: context or batch negative, or dtype not floating-point.
    """
    if context < 0 or batch < 0:
        raise ValueError(f"context and batch must be ≥ 0, got {context} and {batch}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating-point, got {dtype}")
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
    """Count the parameters of a model by part, without making it: on the meta device.

    Active are those that a token meets: of routed experts k of all, of retrieved ones the rows of
    its neurons, and of an embedding that is not tied one row, which is left out.

    Args:
        config: of the model.

    Returns:
        "embedding", "head" (the logits; of a tied model 0 in total, since they are the embedding),
        "norms", and every letter of the pattern with all its layers.
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
        counts[letter] = Parameters(n * total, n * (total - _idle(layer)))
    return counts


def _idle(layer):
    """Parameters of a layer that have no part in what one token gets."""
    if isinstance(layer, MoE):
        k = layer.k
        idle = set(layer.experts[k:].parameters()) - set(layer.experts[:k].parameters())
        if isinstance(layer, ExpansiveMoE):
            idle |= set(layer.gates[k:].parameters())
        return sum(parameter.numel() for parameter in idle)
    if isinstance(layer, CDMoE):
        return _idle(layer.experts)
    if isinstance(layer, PEER):
        keys, tables = layer, (layer.down, layer.up)
    elif isinstance(layer, CDMMoE):
        keys, tables = layer.retrieval, (layer.down, layer.up, layer.gate)
    else:
        return 0
    unused = max(0, keys.n_experts - keys.n_heads * keys.k)
    return sum(unused * table.shape[1] for table in tables)


def _check_sampling(temperature, top_k, top_p):
    if not 0 <= temperature < torch.inf:
        raise ValueError(f"temperature must be a finite number ≥ 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")


def _nbytes(cache):
    if isinstance(cache, Tensor):
        return cache.nbytes
    return sum(_nbytes(part) for part in cache) if isinstance(cache, tuple) else 0


def _shape(t):
    return f"shape {tuple(t.shape)}"
