"""Mistakes that the properties of test_compile.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_compile import (
    HELD as HELD,
)
from test_compile import (
    decodes_as_one_graph,
    layers_ask_nothing,
    layers_run_without_values,
    the_door_asks_twice,
    trains_as_one_graph,
)

from cheems_ref import attention, model, ssd

UNCHECKED = True  # torch traces no type checker

BLOCK = "        y, cache = self.layer("
STEPS = "self.dt_bias.to(wide)).split(x.shape[1], 1)[0]\n"
NEGATIVE = "        if bool((dt < 0).any()):\n            raise ValueError\n"
REAL = "        v, inner = self._values(x"
NEXT = "cache=cache, validate=False"
ASKED = "cache=cache"

# fmt: off
PLANTED_SSD = [
    (layers_ask_nothing, "SEIE", {
        "are steps negative?": [(STEPS, STEPS + NEGATIVE)],
        "how large are they?": [(STEPS, STEPS + "        largest = dt.max().item()\n")],
        "which are zero?": [(STEPS, STEPS + "        zeros = (dt == 0).nonzero()\n")],
        "those that are not": [(STEPS, STEPS + "        others = dt[dt != 0]\n")],
        "all of them": [(STEPS, STEPS + "        listed = dt.tolist()\n")]}),
    (layers_run_without_values, "cheems-tiny", {
        "are steps negative?": [(STEPS, STEPS + NEGATIVE)]}),
    (trains_as_one_graph, "mamba2-tiny", {
        "are steps negative?": [(STEPS, STEPS + NEGATIVE)],
        "softplus is given a gradient that is not contiguous": [
            (STEPS, "self.dt_bias.to(wide))\n")]}),
]
PLANTED_ATTENTION = [
    (layers_ask_nothing, "IPAM", {
        "is there padding?": [
            (REAL, "        if padding_mask is None or not padding_mask.all():\n"
                   "            x = x + int(position_ids.max() < 0)\n" + REAL)]}),
    (layers_run_without_values, "llama-tiny", {
        "is a position negative?": [
            (REAL, "        if position_ids.min() < 0:\n            raise ValueError\n" + REAL)]}),
    (layers_run_without_values, "doge-tiny", {
        "a mask on another device": [
            ("real=cache.real, device=q.device", 'real=cache.real, device="cpu"')]}),
]
PLANTED = [
    (layers_ask_nothing, "SEIE", {
        "is it finite?": [(BLOCK, "        assert x.isfinite().all()\n" + BLOCK)]}),
    (the_door_asks_twice, "SEIE", {
        "a third question": [
            ("        b, length = input_ids.shape\n",
             "        b, length = input_ids.shape\n        int(input_ids.sum())\n")]}),
    (decodes_as_one_graph, "llama-tiny", {
        "a number for every token": [
            ("before + real.sum(1), self.config.pattern", "before + real.sum(1), "
             "self.config.pattern + ' ' * (0 if cache is None else cache.pattern.count(' ') + 1)"),
            ("if cache.pattern != self", "if cache.pattern.strip() != self")]}),
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
