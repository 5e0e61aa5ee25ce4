"""Mistakes that the properties of test_config.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_config import (
    HELD as HELD,
)
from test_config import (
    a_config_is_a_value,
    bad_numbers_are_refused,
    bad_patterns_are_refused,
    patterns_are_spelled_out,
    presets_are_those_of_otce,
    presets_are_those_of_wm,
    presets_have_the_size_in_their_name,
    published_models_have_their_published_size,
)

from cheems_ref import config, presets

UNCHECKED = True  # the type checker would answer first

# fmt: off
PLANTED = [
    (patterns_are_spelled_out, {
        "× binds one letter": [(r"([A-Z]+)\s*[×x*]", r"([A-Z])\s*[×x*]")],
        "× counts further copies": [("{letters * times}", "{letters * (times + 1)}")],
        "a bracket merges with the letter before it": [
            ("{text[: found.start()]} {letters", "{text[: found.start()]}{letters")]}),
    (bad_patterns_are_refused, {
        "× 0": [("if not 1 <= times * len(letters)", "if not 0 <= times * len(letters)")],
        "an open bracket": [('if wrong := re.sub("[A-Z]"', 'if wrong := re.sub("[A-Z()]"')]}),
    (bad_numbers_are_refused, {
        "nothing for a size": [("if value is None and field.type is int:", "if False:")],
        "optional sizes unseen": [("if field.type in (int, int | None):", "if field.type is int:")],
        "nothing that mixes": [("if not set(self.pattern) & set(SEQUENCE_MIXERS):", "if False:")],
        "names of the layer": [('message = re.sub(rf"', 'rf"" or re.sub(rf"')]}),
    (a_config_is_a_value, {
        "not frozen": [("@dataclass(frozen=True)", "@dataclass(unsafe_hash=True)")]}),
]
PLANTED_PRESETS = [
    (presets_are_those_of_wm, {
        "the square below": [("n_values=6, n_neurons=3136", "n_values=6, n_neurons=3025")],
        "Mamba-2 by rope": [
            ('pattern=_MAMBA2, d_ff=896, position="conv"', "pattern=_MAMBA2, d_ff=896")]}),
    (presets_are_those_of_otce, {
        "ends in S": [('"SD SD SD SD AD SD SD AD"', '"SD SD SD SD AD SD SD SD"')],
        "shared for cohesive": [
            ("SD + SC × 11 + AC × 2 + SC × 8", "SD + SH × 11 + AH × 2 + SH × 8")],
        "two of four": [("_OTCE_X, d_ff=2304, k_experts=1", "_OTCE_X, d_ff=2304")]}),
    (presets_have_the_size_in_their_name, {
        "16 too wide": [("pattern=_LLAMA, d_ff=816", "pattern=_LLAMA, d_ff=832")]}),
    (published_models_have_their_published_size, {
        "tied": [("vocab_size=32000, tie_embeddings=False)", "vocab_size=32000)")],
        "a key for every head": [("d_ff=14336, n_kv_heads=8)", "d_ff=14336)")]}),
]
# fmt: on

MISTAKES = [
    *mistakes(PLANTED, config),
    *mistakes(PLANTED_PRESETS, presets),
]
