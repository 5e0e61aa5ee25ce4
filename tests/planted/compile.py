"""Mistakes that the properties of test_compile.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_compile import HELD as HELD
from test_compile import the_door_asks_twice

from cheems_ref import model, ssd

UNCHECKED = True  # torch traces no type checker

STEPS = "self.dt_bias.to(wide)).split(x.shape[1], 1)[0]\n"
NEGATIVE = "        if bool((dt < 0).any()):\n            raise ValueError\n"

# fmt: off
MISTAKES = mistakes([
    (the_door_asks_twice, "SEIE", {
        "are steps negative?": [(STEPS, STEPS + NEGATIVE)]}),
], ssd) + mistakes([
    (the_door_asks_twice, "SHSRAH", {
        "every id is looked at": [("cache=cache, validate=False", "cache=cache")]}),
], model)
