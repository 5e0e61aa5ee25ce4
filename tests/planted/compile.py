"""Mistakes that the properties of test_compile.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_compile import (
    HELD as HELD,
)
from test_compile import (
    layers_ask_nothing,
    layers_run_without_values,
    the_door_asks_twice,
)

from cheems_ref import attention, model, ssd

UNCHECKED = True  # torch traces no type checker

STEPS = "self.dt_bias.to(wide)).split(x.shape[1], 1)[0]\n"
NEGATIVE = "        if bool((dt < 0).any()):\n            raise ValueError\n"
REAL = "        v, inner = self._values(x"
NEXT = "cache=cache, validate=False"
ASKED = "cache=cache"

# fmt: off
PLANTED_SSD = [
    (layers_ask_nothing, "SEIE", {
        "are steps negative?": [(STEPS, STEPS + NEGATIVE)]}),
]
PLANTED_ATTENTION = [
    (layers_ask_nothing, "IPAM", {
        "is there padding?": [
            (REAL, "        if padding_mask is None or not padding_mask.all():\n"
                   "            x = x + int(position_ids.max() < 0)\n" + REAL)]}),
    (layers_run_without_values, "IPAM", {
        "a mask on another device": [
            ("real=cache.real, device=q.device", 'real=cache.real, device="cpu"')]}),
]
PLANTED = [
    (the_door_asks_twice, "SEIE", {
        "a third question": [
            ("        b, length = input_ids.shape\n",
             "        b, length = input_ids.shape\n        int(input_ids.sum())\n")]}),
]
PLANTED_GENERATE = [
    (the_door_asks_twice, "SEIE", {
        "every id is looked at": [(NEXT, ASKED)]}),
]
# fmt: on

MISTAKES = [
    *mistakes(PLANTED_SSD, ssd),
    *mistakes(PLANTED_ATTENTION, attention),
    *mistakes(PLANTED, model),
    *mistakes(PLANTED_GENERATE, model),
]
