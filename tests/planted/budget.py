"""Mistakes that the properties of test_budget.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_budget import HELD as HELD
from test_budget import (
    a_process_holds_its_part_and_what_is_read,
    a_step_moves_parameters_and_cache,
    activations_are_what_autograd_keeps,
    active_are_those_that_a_token_reaches,
    cache_is_that_of_the_lecture,
    cache_takes_the_bytes_that_are_computed,
    operations_are_those_that_torch_counts,
    parameters_are_counted,
    training_takes_what_is_computed,
)

from cheems_ref import budget, experts, retrieval

ALL, OTHERS = "for p in part.parameters()} - active", "for p in part[self.k :].parameters()}"

# fmt: off
PLANTED = [
    *((cache_takes_the_bytes_that_are_computed, case, {what: [edit]}) for case, what, edit in (
        ("SHSRAH", "all taps", ("(c.d_conv - 1)", "c.d_conv")),
        ("SKIK", "states of sixteen bits", ("torch.promote_types(dtype, torch.float32).itemsize",
                                            "dtype.itemsize")))),
    (cache_is_that_of_the_lecture, {
        "a head for every query": [("(c.n_kv_heads or c.n_heads) *", "c.n_heads *")],
        "keys without values": [("layers_a * 2 * key_width", "layers_a * key_width")]}),
    (training_takes_what_is_computed, {
        "one moment": [("held = 4 * sum", "held = 3 * sum")],
        "logits without their gradient": [("2 * math.ceil(tokens", "math.ceil(tokens")]}),
    (a_process_holds_its_part_and_what_is_read, {
        "its part alone": [
            ("held / processes) + 2 * (outside + max(blocks))", "held / processes)")]}),
    (operations_are_those_that_torch_counts, "SEIE", {
        "scores alone": [("4 * layers", "2 * layers")],
        "the cache is not read": [("length * context + length", "length")]}),
    (a_step_moves_parameters_and_cache, "SEIE", {
        "all parameters": [("read = sum(part.active", "read = sum(part.total")]}),
    (activations_are_what_autograd_keeps, "SKIK", {
        "angles of each layer": [("if key not in shared}", "}")]}),
    (parameters_are_counted, "SHSRAH", {
        "every head is a matrix": [("0 if c.tie_embeddings else table", "table")]}),
]

MISTAKES = mistakes(PLANTED, budget) + mistakes([
    (active_are_those_that_a_token_reaches, "C", {
        "a shared matrix for each": [(ALL, OTHERS)]}),
], experts) + mistakes([
    (active_are_those_that_a_token_reaches, "P", {
        "up left out": [("_inactive(self, self.down, self.up)", "_inactive(self, self.down)")]}),
], retrieval)
# fmt: on
