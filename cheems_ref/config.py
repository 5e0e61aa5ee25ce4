"""Model configurations: a pattern, one letter per layer, and sizes.

    S  SSD                                     M  MLP
    A  quadratic causal attention              G  gated MLP            D  DGLU
    I  inner-function attention                R  routed MoE           H  MoE with shared expert
                                               C  cohesive MoE         X  expansive MoE
                                               P  PEER     K  CDMMoE   E  CDMoE

S, A and I mix tokens and keep a cache; the others treat each token independently. In OTCE's tables
the letter E means a routed MoE, which is R here. "SM + SE × 11" and "(SG SR) × 4" are accepted as
the papers print them. `preset` has the systems of the papers.

An invalid pattern or number raises ValueError, and a value of the wrong type TypeError. The message
has the field and the number (check.py), and the layer, if a layer of the pattern rejects them.
Source: WM Tables 2 and 7; OTCE Tables 1, 5, 6 and 8.
"""

import dataclasses
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
ROUTED = "RHCX"  # these wait for the device: their shapes depend on how many tokens an expert gets
MAX_LAYERS = 10_000


class LayerType(NamedTuple):
    """A letter of a pattern: its name, its class, and where its arguments come from.

    fields: the field of `ModelConfig` that each argument of the class gets.
    """

    name: str
    make: Callable[..., nn.Module]
    fields: dict[str, str]


def _alike(*names: str) -> dict[str, str]:
    """Arguments that have the names of their fields."""
    return {name: name for name in names}


_ATTENTION = _alike("n_heads", "n_kv_heads", "rope_base")
_EXPERTS = _alike("d_ff", "n_experts") | {"k": "k_experts"}
_RETRIEVAL = {
    "n_experts": "n_neurons",
    "n_heads": "n_retrieval_heads",
    "k": "k_neurons",
    "d_query": "d_query",
}
# fmt: off
LAYERS = {
    "S": LayerType("SSD", SSD, _alike("n_heads", "d_head", "n_groups", "d_state", "position",
                                      "d_conv", "rope_base", "chunk_size", "backend")),
    "A": LayerType("attention", QCAttn, _ATTENTION),
    "I": LayerType("inner-function attention", InnerFuncAttn,
                   _ATTENTION | _alike("mask", "inner", "n_values", "k_values", "d_state",
                                       "max_positions", "k_keys")),
    "M": LayerType("MLP", MLP, _alike("d_ff")),
    "G": LayerType("gated MLP", partial(MLP, gated=True), _alike("d_ff")),
    "D": LayerType("DGLU", DGLU, _alike("d_ff")),
    "R": LayerType("routed MoE", MoE, _EXPERTS),
    "H": LayerType("MoE with shared expert", SharedExpertMoE, _EXPERTS),
    "C": LayerType("cohesive MoE", CohesiveMoE, _EXPERTS),
    "X": LayerType("expansive MoE", ExpansiveMoE, _EXPERTS),
    "P": LayerType("PEER", PEER, _RETRIEVAL),
    "K": LayerType("CDMMoE", CDMMoE, _RETRIEVAL | _alike("d_ff", "d_private")),
    "E": LayerType("CDMoE", CDMoE, _RETRIEVAL | _alike("d_ff")),
}
# fmt: on


def _field(default: Any, meaning: str, only: Mapping[str, tuple[str, str]] | None = None) -> Any:
    """A field of ModelConfig: default, meaning, and the letters that only sometimes use it.

    only: {"I": ("inner", "ssd")} if layer I uses it where the field `inner` is "ssd".
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "only": only or {}})


# fmt: off
@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model: validated when it is created, and immutable.

    The pattern is stored in full; see `expand_pattern`. `LAYERS` has the fields of each letter.
    """

    pattern: str = _field("SESESESESESESEIE", "one letter per layer")
    vocab_size: int = _field(256, "number of token ids; 256 for the bytes of a text")
    d_model: int = _field(128, "width of the residual stream")
    n_heads: int = _field(4, "heads")
    n_kv_heads: int | None = _field(None, "groups of keys and values; None: one per head")
    d_head: int | None = _field(None, "width of a head; None: d_model / n_heads")
    n_groups: int = _field(1, "groups of B and C")
    d_state: int = _field(32, "state width", {"I": ("inner", "ssd")})
    position: Position = _field("rope", "position encoding: rope, conv or decay")
    d_conv: int = _field(4, "tokens that the convolution sees", {"S": ("position", "conv")})
    rope_base: float | int = _field(10000.0, "base of the angles", {"S": ("position", "rope")})
    chunk_size: int = _field(64, "tokens per chunk")
    backend: Backend = _field("auto", "auto, chunked, kernel, quadratic or recurrent")
    inner: Inner = _field("retrieved", "inner function: ssd, retrieved or linear")
    n_values: int = _field(16, "rows of the table of values", {"I": ("inner", "retrieved")})
    k_values: int = _field(2, "rows that each token takes", {"I": ("inner", "retrieved")})
    mask: Mask | None = _field(None, "dynamic mask: gate, content or None")
    max_positions: int | None = _field(None, "longest sequence", {"I": ("mask", "gate")})
    k_keys: int | None = _field(None, "keys that each query keeps", {"I": ("mask", "content")})
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
        for letter in dict.fromkeys(self.pattern):  # each layer checks its own arguments
            try:
                with torch.device("meta"):
                    make_layer(letter, self)
            except (ValueError, RuntimeError) as error:
                message, arguments = str(error), LAYERS[letter].fields
                for argument, field in arguments.items():
                    message = re.sub(rf"\b{argument}\b", field, message)  # by its name here
                if isinstance(error, RuntimeError):  # a tensor is too large
                    sizes = {name: getattr(self, name) for name in ("d_model", *arguments.values())}
                    sizes = {name: n for name, n in sizes.items() if isinstance(n, int)}
                    largest = max(sizes, key=sizes.get)
                    message = (
                        f"{largest} = {sizes[largest]} makes a tensor too large for 64 bits"
                    )
                raise ValueError(f"letter {letter} ({LAYERS[letter].name}): {message}") from error


def make_layer(letter: str, config: ModelConfig) -> nn.Module:
    """Make one layer of a pattern."""
    layer = LAYERS[letter]
    if "n_experts" in layer.fields.values():  # each of these experts is a module
        check.numbers(f"[1, {MAX_LAYERS}]", n_experts=config.n_experts)
    arguments = {name: getattr(config, field) for name, field in layer.fields.items()}
    return layer.make(config.d_model, **arguments)


def _check_field(field, value):
    """Check a size, which must fit into 31 bits, or a flag; the layers check the words."""
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

    `cheems_ref/presets.py` lists them, and separates the numbers of the papers from ours. The
    pattern has one letter per layer.

    Args:
        name: such as "cheems-320m", "jamba-1.3b", "llama-2-7b", "cheems-tiny".
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return ModelConfig(**PRESETS[name])


def from_saved(fields: Mapping[str, Any]) -> ModelConfig:
    """Return a configuration from its fields as they were saved, by this version or an older one.

    The field `k_keys` was once `top_k`, the name of an option of transformers' generate().
    """
    fields = dict(fields)
    if "top_k" in fields:
        fields["k_keys"] = fields.pop("top_k")
    return ModelConfig(**fields)


def expand_pattern(pattern: str) -> str:
    """Expand a pattern to one letter per layer.

    Spaces and + separate words. × n (or x n, * n) repeats the word or the bracket before it:
    "SM + SR × 3 + AM" is "SMSRSRSRAM", and "(SG SR) × 2" is "SGSRSGSR".

    Raises:
        ValueError: an unknown letter or sign, an open bracket, × without a word before it or a
            number after it, no layer, or more than 10,000 layers.

    Source: OTCE Tables 1, 5, 6 and 8; WM Table 2.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be letters, got {pattern!r}")
    for letter in re.findall("[A-Z]", pattern):
        if letter not in LAYERS:
            known = ", ".join(f"{key} {layer.name}" for key, layer in LAYERS.items())
            raise ValueError(f"unknown letter {letter!r} in pattern {pattern!r}; there are {known}")
    # Replace one repeated word, or one bracket without × or brackets inside, by its letters. The
    # spaces keep them apart from their neighbours: in "A(SM) × 2", × must not repeat the A. The
    # search tries a word at its first letter only; trying all n letters would take n² steps.
    text = pattern
    unit = re.compile(r"(?<![A-Z])([A-Z]+)\s*[×x*]\s*(\d+)|\(([\s+]*[A-Z][A-Z\s+]*)\)")
    while found := unit.search(text):
        word, times, bracket = found.groups()
        times = int(times or 1)
        letters = word or re.sub(r"[\s+]", "", bracket)
        if not 1 <= times * len(letters) <= MAX_LAYERS:
            n = f"{times * len(letters):,} layers, not 1 to {MAX_LAYERS:,}"
            raise ValueError(f"{found.group()!r} in pattern {pattern!r} makes {n}")
        text = f"{text[: found.start()]} {letters * times} {text[found.end() :]}"
    letters = re.sub(r"[\s+]", "", text)
    if wrong := re.sub("[A-Z]", "", letters):
        rules = "letters are capitals, × n follows a word or a bracket, and brackets are closed"
        capital = wrong[0].upper() in LAYERS and wrong[0] != "x"
        hint = f"; did you mean {pattern.upper()!r}?" if capital else ""
        raise ValueError(f"cannot read {wrong[0]!r} in pattern {pattern!r}: {rules}{hint}")
    if not 1 <= len(letters) <= MAX_LAYERS:
        n = f"{len(letters):,} layers, not 1 to {MAX_LAYERS:,}"
        raise ValueError(f"pattern {pattern!r} has {n}")
    return letters
