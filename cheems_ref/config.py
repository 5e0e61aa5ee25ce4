"""Model configurations: a pattern, one letter per layer, and sizes.

    S  SSD                                     M  MLP
    A  quadratic causal attention              G  gated MLP            D  DGLU
    I  inner-function attention                R  routed MoE           H  MoE with shared expert
                                               C  cohesive MoE         X  expansive MoE
                                               P  PEER     K  CDMMoE   E  CDMoE

S, A and I mix tokens and keep a cache; the others work on each token by itself. In OTCE's tables E
stands for a routed MoE: written R here. "SM + SE × 11" and "(SG SR) × 4" are accepted as the
papers print them. `preset` has the systems of the papers.

An invalid pattern or number raises ValueError, and something that is no number TypeError, naming
field and number (check.py), and the layer if one of the pattern's layers rejects it.
Source: WM Tables 2 and 7; OTCE Tables 1, 5, 6 and 8.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from cheems_ref import check
from cheems_ref.attention import Inner, InnerFuncAttn, Mask, QCAttn
from cheems_ref.experts import CohesiveMoE, ExpansiveMoE, MoE, SharedExpertMoE
from cheems_ref.feed_forward import DGLU, MLP
from cheems_ref.presets import PRESETS
from cheems_ref.retrieval import PEER, CDMMoE, CDMoE
from cheems_ref.ssd import SSD, Backend, Position

SEQUENCE_MIXERS = "SAI"
MAX_LAYERS = 10_000


class LayerType(NamedTuple):
    """A letter of a pattern: what it is called, its class, and the fields that it takes.

    fields: names of `ModelConfig` fields; "argument=field" where the layer's own name differs.
    """

    name: str
    make: Callable[..., nn.Module]
    fields: str

    def arguments(self) -> dict[str, str]:
        """Return the field of each argument."""
        pairs = (word.rpartition("=") for word in self.fields.split())
        return {argument or field: field for argument, _, field in pairs}


_EXPERTS = "d_ff n_experts k=k_experts"
_RETRIEVAL = "n_experts=n_neurons n_heads=n_retrieval_heads k=k_neurons d_query"
# fmt: off
LAYERS = {
    "S": LayerType("SSD", SSD, "n_heads d_head n_groups d_state position d_conv rope_base "
                   "chunk_size backend"),
    "A": LayerType("attention", QCAttn, "n_heads n_kv_heads rope_base"),
    "I": LayerType("inner-function attention", InnerFuncAttn, "n_heads n_kv_heads rope_base mask "
                   "inner n_values k_values d_state max_positions top_k"),
    "M": LayerType("MLP", MLP, "d_ff"),
    "G": LayerType("gated MLP", partial(MLP, gated=True), "d_ff"),
    "D": LayerType("DGLU", DGLU, "d_ff"),
    "R": LayerType("routed MoE", MoE, _EXPERTS),
    "H": LayerType("MoE with shared expert", SharedExpertMoE, _EXPERTS),
    "C": LayerType("cohesive MoE", CohesiveMoE, _EXPERTS),
    "X": LayerType("expansive MoE", ExpansiveMoE, _EXPERTS),
    "P": LayerType("PEER", PEER, _RETRIEVAL),
    "K": LayerType("CDMMoE", CDMMoE, f"{_RETRIEVAL} d_ff d_private"),
    "E": LayerType("CDMoE", CDMoE, f"{_RETRIEVAL} d_ff"),
}
# fmt: on


def _field(default: Any, meaning: str, only: Mapping[str, str] | None = None) -> Any:
    """A field of ModelConfig: its default, its meaning, and for some letters when they use it."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "only": only or {}})


# fmt: off
@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of: validated when it is made, and never changed afterwards.

    The pattern is kept spelled out; see `expand_pattern`. `LAYERS` has the layers of each field.
    """

    pattern: str = _field("SESESESESESESEIE", "one letter per layer")
    vocab_size: int = _field(256, "number of token ids; 256 for the bytes of a text")
    d_model: int = _field(128, "width of the residual stream")
    n_heads: int = _field(4, "heads")
    n_kv_heads: int | None = _field(None, "groups of keys and values; None: one per head")
    d_head: int | None = _field(None, "width of a head; None: d_model / n_heads")
    n_groups: int = _field(1, "groups of B and C")
    d_state: int = _field(32, "state width", {"I": "inner=ssd"})
    position: Position = _field("rope", "source of position: rope, conv or decay")
    d_conv: int = _field(4, "tokens that the convolution sees", {"S": "position=conv"})
    rope_base: float | int = _field(10000.0, "base of the rotary angles", {"S": "position=rope"})
    chunk_size: int = _field(64, "tokens per chunk")
    backend: Backend = _field("auto", "auto, chunked, kernel, quadratic or recurrent")
    inner: Inner = _field("retrieved", "inner function: ssd, retrieved or linear")
    n_values: int = _field(16, "rows of the table of values", {"I": "inner=retrieved"})
    k_values: int = _field(2, "rows that each token takes", {"I": "inner=retrieved"})
    mask: Mask | None = _field(None, "dynamic mask: gate, content or None")
    max_positions: int | None = _field(None, "longest sequence", {"I": "mask=gate"})
    top_k: int | None = _field(None, "keys that each query keeps", {"I": "mask=content"})
    d_ff: int = _field(256, "inner width, of an expert or of what experts share")
    n_experts: int = _field(4, "routed experts")
    k_experts: int = _field(2, "routed experts that each token takes")
    n_neurons: int = _field(256, "experts of one neuron, a square")
    k_neurons: int = _field(4, "experts of one neuron that each head takes")
    n_retrieval_heads: int = _field(2, "retrieval heads")
    d_query: int = _field(32, "width of a retrieval query")
    d_private: int | None = _field(None, "width of the experts' domain; None: d_model / 2")
    tie_embeddings: bool = _field(True, "whether the embedding is also the output matrix")
    norm_eps: float | int = _field(1e-6, "added to the mean square in RMSNorm")
    # fmt: on

    def __post_init__(self):
        check.plain_numbers(self)
        object.__setattr__(self, "pattern", expand_pattern(self.pattern))
        if not set(self.pattern) & set(SEQUENCE_MIXERS):
            raise ValueError(
                f"pattern {self.pattern!r} has none of {', '.join(SEQUENCE_MIXERS)}: "
                "no token would see another"
            )
        for field in dataclasses.fields(self):
            _check_field(field, getattr(self, field.name))
        check.numbers("(0, 1)", norm_eps=self.norm_eps)
        check.numbers("(0, inf)", rope_base=self.rope_base)
        for letter in dict.fromkeys(self.pattern):  # each layer knows best what it cannot be
            try:
                with torch.device("meta"):
                    make_layer(letter, self)
            except (ValueError, RuntimeError) as error:  # the latter of sizes past 64 bits
                raise ValueError(f"letter {letter} ({LAYERS[letter].name}): {error}") from error


def make_layer(letter: str, config: ModelConfig) -> nn.Module:
    """Make one layer of a pattern."""
    c, layer = config, LAYERS[letter]
    # Numbers of experts are checked here, by their names in the config: to the layers, each of them
    # is n_experts or k.
    if letter in "RHCX":
        check.numbers(f"[1, {MAX_LAYERS}]", n_experts=c.n_experts)  # each of them is a module
        check.numbers(f"[1, {c.n_experts}]", k_experts=c.k_experts)
    if letter in "PKE":
        n, r = c.n_neurons, math.isqrt(c.n_neurons)
        if r * r != n:
            near = f"{r**2} and {(r + 1) ** 2} are"
            raise ValueError(f"n_neurons must be a square: {n} is not, {near}")
        check.numbers(f"[1, {n}]", k_neurons=c.k_neurons)
    arguments = {name: getattr(c, field) for name, field in layer.arguments().items()}
    return layer.make(c.d_model, **arguments)


def users(field: str) -> dict[str, str]:
    """Return the letters whose layers take a field, each with its condition: {"I": "inner=ssd"}.

    The condition is "" if the letter always uses the field. No letters: every model uses it.
    """
    (only,) = (f.metadata["only"] for f in dataclasses.fields(ModelConfig) if f.name == field)
    letters = [key for key, layer in LAYERS.items() if field in layer.arguments().values()]
    return {letter: only.get(letter, "") for letter in letters}


def is_used(field: str, config: ModelConfig) -> bool:
    """Return whether a model of this configuration depends on a field."""
    found = users(field)

    def holds(condition):
        name, _, value = condition.partition("=")
        return not condition or getattr(config, name) == value

    return not found or any(holds(found[key]) for key in found if key in config.pattern)


def _check_field(field, value):
    """Check a size or a flag; sizes have to fit into 31 bits. Words are checked by the layers."""
    if field.type in (int, int | None):
        check.sizes(**{field.name: value})
        if value is None and field.type is int:
            raise TypeError(f"{field.name} must be a whole number, got None")
        if value is not None and value >= 2**31:
            raise ValueError(f"{field.name} must be less than 2^31, got {value}")
    elif field.type is bool and not isinstance(value, bool):
        raise TypeError(f"{field.name} must be True or False, got {value!r}")


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
            if (n := len(open_groups[-1][-1]) * int(times)) > MAX_LAYERS:
                most = f"{MAX_LAYERS:,} are the most"
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
    if len(letters) > MAX_LAYERS:
        raise ValueError(f"the pattern has {len(letters):,} layers; {MAX_LAYERS:,} are the most")
    return letters
