"""Mistakes that the properties of test_budget.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_budget import HELD as HELD
from test_budget import (
    a_process_holds_its_part_and_what_is_read,
    activations_are_what_autograd_keeps,
    active_are_those_that_a_token_reaches,
    cache_is_that_of_the_lecture,
    cache_takes_the_bytes_that_are_computed,
    operations_are_those_that_torch_counts,
    training_takes_what_is_computed,
)

from cheems_ref import budget, experts

# fmt: off
PLANTED = [
    (cache_takes_the_bytes_that_are_computed, "SKIK", {
        "states of sixteen bits": [
            ("torch.promote_types(dtype, torch.float32).itemsize", "dtype.itemsize")]}),
    (cache_is_that_of_the_lecture, {
        "a head for every query": [("(c.n_kv_heads or c.n_heads) *", "c.n_heads *")],
        "keys without values": [("layers_a * 2 * key_width", "layers_a * key_width")]}),
    (training_takes_what_is_computed, {
        "logits without their gradient": [("2 * math.ceil(tokens", "math.ceil(tokens")]}),
    (a_process_holds_its_part_and_what_is_read, {
        "its part alone": [
            ("held / processes) + 2 * (outside + max(blocks))", "held / processes)")]}),
    (operations_are_those_that_torch_counts, "SEIE", {
        "scores alone": [("4 * layers", "2 * layers")],
        "the cache is not read": [("length * context + length", "length")]}),
    (activations_are_what_autograd_keeps, "SKIK", {
        "angles of each layer": [("(part, chunked, dtype) - shared", "(part, chunked, dtype)")]}),
]

MISTAKES = mistakes(PLANTED, budget) + mistakes([
    (active_are_those_that_a_token_reaches, "C", {
        "a shared matrix for each": [("own_V=i == 0", "own_V=True")]}),
], experts)
# fmt: on
