"""Mistakes that the properties of test_config.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_config import HELD as HELD
from test_config import (
    bad_numbers_are_refused,
    patterns_are_spelled_out,
    presets_are_those_of_otce,
    presets_are_those_of_wm,
    published_models_have_their_published_size,
)

from cheems_ref import config, presets

UNCHECKED = True  # the type checker would answer first

# fmt: off
MISTAKES = mistakes([
    (patterns_are_spelled_out, {
        "× binds one letter": [(r"([A-Z]+)\s*[×x*]", r"([A-Z])\s*[×x*]")],
        "× counts further copies": [("{letters * times}", "{letters * (times + 1)}")]}),
    (bad_numbers_are_refused, {
        "names of the layer": [('message = re.sub(rf"', 'rf"" or re.sub(rf"')]}),
], config) + mistakes([
    (presets_are_those_of_wm, {
        "the square below": [("n_values=6, n_neurons=3136", "n_values=6, n_neurons=3025")]}),
    (presets_are_those_of_otce, {
        "shared for cohesive": [
            ("SD + SC × 11 + AC × 2 + SC × 8", "SD + SH × 11 + AH × 2 + SH × 8")]}),
    (published_models_have_their_published_size, {
        "a key for every head": [("d_ff=14336, n_kv_heads=8)", "d_ff=14336)")]}),
], presets)
# fmt: on
