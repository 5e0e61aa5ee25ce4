"""Mistakes that the properties of test_budget.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_budget import (
    HELD as HELD,
)
from test_budget import (
    a_process_holds_its_part_and_what_is_read,
    a_step_moves_parameters_and_cache,
    activations_are_what_autograd_keeps,
    active_are_those_that_a_token_reaches,
    cache_is_that_of_the_lecture,
    cache_takes_the_bytes_that_are_computed,
    operations_are_those_that_torch_counts,
    parameters_are_counted,
    rows_are_those_of_the_formula,
    sizes_are_computed_without_the_model,
    training_takes_what_is_computed,
)

from cheems_ref import budget, experts, presets, retrieval

IN_COUNT = 'with torch.device("meta"):\n            layer'
INACTIVE = "n * (total - inactive)"
ALL, OTHERS = "for p in part.parameters()} - active", "for p in part[self.k :].parameters()}"

# fmt: off
PLANTED = [
    (sizes_are_computed_without_the_model, {
        "count makes layers": [(IN_COUNT, IN_COUNT.replace("meta", "cpu"))]}),
    *((cache_takes_the_bytes_that_are_computed, case, {what: [edit]}) for case, what, edit in (
        ("SHSRAH", "a key per head", ("(c.n_kv_heads or c.n_heads) *", "c.n_heads *")),
        ("SHSRAH", "all taps", ("(c.d_conv - 1)", "c.d_conv")),
        ("SHSRAH", "x alone is mixed", ("(ssd_width + 2 * c.n_groups * c.d_state)", "ssd_width")),
        ("SKIK", "states of sixteen bits", ("torch.promote_types(dtype, torch.float32).itemsize",
                                            "dtype.itemsize")),
        ("SGIM", "values per head", ('key_width if c.inner == "linear" else', "")))),
    (cache_is_that_of_the_lecture, {
        "a head for every query": [("(c.n_kv_heads or c.n_heads) *", "c.n_heads *")],
        "keys without values": [("layers_a * 2 * key_width", "layers_a * key_width")]}),
    (training_takes_what_is_computed, {
        "one moment": [("held = 4 * sum", "held = 3 * sum")],
        "logits without their gradient": [("2 * math.ceil(tokens", "math.ceil(tokens")]}),
    (a_process_holds_its_part_and_what_is_read, {
        "its part alone": [
            ("held / processes) + 2 * (outside + max(blocks))", "held / processes)")]}),
    *((operations_are_those_that_torch_counts, case, {what: [edit]}) for case, what, edit in (
        ("SEIE", "nobody sees itself", ("(length + 1) // 2", "(length - 1) // 2")),
        ("SEIE", "scores alone", ("4 * layers", "2 * layers")),
        ("SEIE", "the cache is not read", ("length * context + length", "length")),
        ("SEIE", "fused attention twice", ("- rows - fused", "- rows")))),
    *((a_step_moves_parameters_and_cache, case, {what: [edit]}) for case, what, edit in (
        ("SEIE", "all parameters", ("read = sum(part.active", "read = sum(part.total")),
        ("SHSRAH", "states are not written", ("cache.total() + cache.states", "cache.total()")))),
    *((activations_are_what_autograd_keeps, case, {what: [edit]}) for case, what, edit in (
        ("SHSRAH", "parameters as well", ("saved.pop(id(t", "saved.get(id(t")),
        ("SKIK", "angles of each layer", ("if key not in shared}", "}")))),
    (rows_are_those_of_the_formula, {
        "of two rows": [("batch * rows // 2", "batch * rows")]}),
    (parameters_are_counted, "SHSRAH", {
        "every head is a matrix": [("0 if c.tie_embeddings else table", "table")],
        "no last norm": [("(len(c.pattern) + 1) * c.d_model", "len(c.pattern) * c.d_model")]}),
    (active_are_those_that_a_token_reaches, "R", {
        "all are active": [(INACTIVE, "n * total")]}),
]
PLANTED_EXPERTS = [
    *((active_are_those_that_a_token_reaches, letter, {what: [edit]}) for letter, what, edit in (
        ("R", "k of them idle", ("part[: self.k]", "part[self.k :]")),
        ("C", "a shared matrix for each", (ALL, OTHERS)))),
]
PLANTED_RETRIEVAL = [
    *((active_are_those_that_a_token_reaches, letter, {what: [edit]}) for letter, what, edit in (
        ("P", "up left out", ("_inactive(self, self.down, self.up)", "_inactive(self, self.down)")),
        ("K", "gate left out", ("retrieval, self.gate, self.down", "retrieval, self.down")),
        ("E", "all are active", ("return self.experts.inactive_parameters()", "return 0")))),
]
PLANTED_PRESETS = [
    (cache_is_that_of_the_lecture, {
        "two attention layers in eight": [
            ("(SG SR SG SR AG SR SG SR) × 4", "(SG SR AG SR AG SR SG SR) × 4")]}),
]
# fmt: on

MISTAKES = [
    *mistakes(PLANTED_EXPERTS, experts),
    *mistakes(PLANTED_RETRIEVAL, retrieval),
    *mistakes(PLANTED, budget),
    *mistakes(PLANTED_PRESETS, presets),
]
