"""What a model is made of: a pattern, one letter per layer in the order of the text, and sizes.

    S  SSD                                     M  MLP
    A  quadratic causal attention              G  gated MLP            D  DGLU
    I  inner-function attention                R  routed MoE           H  MoE with shared expert
                                               C  cohesive MoE         X  expansive MoE
                                               P  PEER     K  CDMMoE   E  CDMoE

S, A and I mix tokens and keep a cache; the others work on each token by itself. In OTCE's tables E
stands for a routed MoE: written R here. "SM + SE × 11" and "(SG SR) × 4" are accepted as the
papers print them. `preset` has the systems of the papers.
A pattern or a number that no model can have raises ValueError, and what is not a number TypeError,
naming field and number (check.py), and the letter where a layer of the pattern refuses it.
Source: WM Tables 2 and 7; OTCE Tables 1, 5, 6 and 8.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from cheems_ref import check
from cheems_ref.attention import Inner, InnerFuncAttn, Mask, QCAttn
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
from cheems_ref.ssd import SSD, Backend, Position

SEQUENCE_MIXERS = "SAI"

# fmt: off
_SIZES = (
    "vocab_size", "d_model", "n_heads", "n_groups", "d_state", "d_conv", "chunk_size", "n_values",
    "k_values", "d_ff", "n_experts", "k_experts", "n_neurons", "k_neurons", "n_retrieval_heads",
    "d_query",
)
# fmt: on
_OPTIONAL_SIZES = ("n_kv_heads", "d_head", "max_positions", "keep", "d_private")
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of: checked when it is made, and never changed afterwards.

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
        chunk_size: tokens per chunk of S.
        backend: that of S.
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
        check.plain_numbers(self)
        object.__setattr__(self, "pattern", expand_pattern(self.pattern))
        if not set(self.pattern) & set(SEQUENCE_MIXERS):
            raise ValueError(
                f"pattern {self.pattern!r} has none of {', '.join(SEQUENCE_MIXERS)}: "
                "no token would see another"
            )
        given = {name: getattr(self, name) for name in _SIZES + _OPTIONAL_SIZES}
        check.sizes(**given)
        for name, size in given.items():
            if size is None and name in _SIZES:
                raise TypeError(f"{name} must be a whole number, got None")
            if size is not None and size >= 2**31:
                raise ValueError(f"{name} must be less than 2^31, got {size}")
        check.numbers("(0, 1)", norm_eps=self.norm_eps)
        check.numbers("(0, inf)", rope_base=self.rope_base)
        if not isinstance(self.tie_embeddings, bool):
            raise TypeError(f"tie_embeddings must be True or False, got {self.tie_embeddings!r}")
        for letter in dict.fromkeys(self.pattern):  # each layer knows best what it cannot be
            try:
                with torch.device("meta"):
                    LAYERS[letter].make(self)
            except (ValueError, RuntimeError) as error:  # the latter of sizes past 64 bits
                raise ValueError(f"letter {letter} ({LAYERS[letter].name}): {error}") from error


def preset(name: str) -> ModelConfig:
    """Return the configuration of a system of the papers, or of a tiny one.

    `cheems_ref/presets.py` lists them, and says which of their numbers are the papers' and which
    are ours. The pattern spells all layers.

    Args:
        name: such as "cheems-320m", "jamba-1.3b", "llama-2-7b", "cheems-tiny".
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
    check.numbers(f"[1, {MOST_LAYERS}]", n_experts=c.n_experts)  # each of them is a module
    check.numbers(f"[1, {c.n_experts}]", k_experts=c.k_experts)  # to the layer it is k
    return kind(c.d_model, c.d_ff, n_experts=c.n_experts, k=c.k_experts)


def _retrieval(c):
    """The sizes of P, K and E by the layers' names, once they are right by the config's."""
    n, r = c.n_neurons, math.isqrt(c.n_neurons)
    if r * r != n:
        raise ValueError(f"n_neurons must be a square: {n} is not, {r**2} and {(r + 1) ** 2} are")
    check.numbers(f"[1, {n}]", k_neurons=c.k_neurons)
    return dict(n_experts=n, n_heads=c.n_retrieval_heads, k=c.k_neurons, d_query=c.d_query)


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
    "SM + SR × 3 + AM" is "SMSRSRSRAM", and "(SG SR) × 2" is "SGSRSGSR". What cannot be read is
    refused with its place, and so are more than 10,000 layers.

    Source: OTCE Tables 1, 5, 6 and 8; WM Table 2.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be letters, got {pattern!r}")
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
            if (n := len(open_groups[-1][-1]) * int(times)) > MOST_LAYERS:
                most = f"{MOST_LAYERS:,} are the most"
                raise ValueError(f"{part.group()!r} makes {n:,} layers {place}; {most}")
            open_groups[-1][-1] *= int(times)
        elif other and other in "×x*":
            raise ValueError(f"{other!r} must be followed by a number, {place}")
        elif other:
            raise ValueError(f"unknown sign {other!r} {place}; letters are capitals")
        repeatable = bool(word or closing or times) or (repeatable and not (opening or plus))
    if len(open_groups) > 1:
        raise ValueError(f"pattern {pattern!r} has a bracket that is not closed")
    if not (letters := "".join(open_groups[0])):
        raise ValueError(f"pattern {pattern!r} holds no layer")
    if len(letters) > MOST_LAYERS:
        raise ValueError(f"the pattern has {len(letters):,} layers; {MOST_LAYERS:,} are the most")
    return letters
