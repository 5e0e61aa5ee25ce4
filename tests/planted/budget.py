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
    d_ff_is_fitted,
    operations_are_those_that_torch_counts,
    parameters_are_counted,
    rows_are_those_of_the_formula,
    sizes_are_computed_without_the_model,
    states_do_not_grow,
    the_random_state_is_left_alone,
    training_takes_what_is_computed,
)

from cheems_ref import budget, config, experts, model, presets, retrieval

IN_CONFIG = 'with torch.device("meta"):\n                    make_layer'
IN_COUNT = 'with torch.device("meta"):\n            layer'
IDLE = "n * (total - idle)"
ALL, OTHERS = "for p in part.parameters()} - active", "for p in part[self.k :].parameters()}"
VALUES = 'value = key if c.inner == "linear" else c.d_model'

# fmt: off
PLANTED = [
    (the_random_state_is_left_alone, {
        "count makes layers": [(IN_COUNT, IN_COUNT.replace("meta", "cpu"))]}),
    (sizes_are_computed_without_the_model, {
        "count makes layers": [(IN_COUNT, IN_COUNT.replace("meta", "cpu"))]}),
    *((cache_takes_the_bytes_that_are_computed, case, {what: [edit]}) for case, what, edit in (
        ("SHSRAH", "keys without values", ('n["A"] * 2 * key', 'n["A"] * key')),
        ("SHSRAH", "a key per head", ("(c.n_kv_heads or c.n_heads) * head", "c.n_heads * head")),
        ("SHSRAH", "keys of one row", ("keys_values=batch * context", "keys_values=context")),
        ("SHSRAH", "every layer has keys", ('n["A"] * 2 * key', "len(c.pattern) * 2 * key")),
        ("SHSRAH", "width of the model", (" if c.d_head is None else c.n_heads * c.d_head", "")),
        ("SHSRAH", "all taps", ("(c.d_conv - 1)", "c.d_conv")),
        ("SHSRAH", "B and C once", ("2 * c.n_groups", "c.n_groups")),
        ("SHSRAH", "B and C of one group", ("2 * c.n_groups * c.d_state if", "2 * c.d_state if")),
        ("SHSRAH", "x alone is mixed", ("inner + 2 * c.n_groups * c.d_state if", "inner if")),
        ("SHSRAH", "convolution of one layer", ('n["S"] * (c.d_conv', "(c.d_conv")),
        ("SHSRAH", "positions of four bytes", ("batch * 8 *", "batch * 4 *")),
        ("SHSRAH", "the next position left out", ("(1 + context *", "(context *")),
        ("SHSRAH", "positions of S", ('(n["A"] + n["I"]))', '(n["A"] + n["S"]))')),
        ("SKIK", "convolutions everywhere", ('if c.position == "conv" else 0', 'if True else 0')),
        ("SKIK", "states of sixteen bits", ("batch * state * c.d_state * wide",
                                            "batch * state * c.d_state * size")),
        ("SKIK", "states of one row", ("states=batch * state", "states=state")),
        ("SKIK", "inner states left out", ('(n["I"] * c.d_model if c.inner == "ssd" else 0)', "0")),
        ("SEIE", "inner states everywhere", ('if c.inner == "ssd" else 0', 'if True else 0')),
        ("SGIM", "values per head", (VALUES, "value = c.d_model")),
        ("IPAM", "values per group", (VALUES, "value = key")))),
    (d_ff_is_fitted, "SHSRAH", {
        "one too many": [("d_ff = 1 + round(", "d_ff = 2 + round(")],
        "rounded down": [("round((parameters - first)", "int((parameters - first)")],
        "from nothing": [("d_ff = 1 + round(", "d_ff = round(")]}),
    (states_do_not_grow, {
        "a state per token": [("states=batch * state", "states=batch * context * state")]}),
    (cache_is_that_of_the_lecture, {
        "a head for every query": [("(c.n_kv_heads or c.n_heads) * head", "c.n_heads * head")],
        "keys without values": [('n["A"] * 2 * key', 'n["A"] * key')],
        "always four bytes": [("size, wide = config, dtype.itemsize,", "size, wide = config, 4,")],
        "width of S for I": [
            ("c.d_model // c.n_heads\n", "(c.d_head or c.d_model // c.n_heads)\n")]}),
    (training_takes_what_is_computed, {
        "one moment": [("held = 4 * sum", "held = 3 * sum")],
        "active parameters": [
            ("4 * sum(part.total for part in", "4 * sum(part.active for part in")],
        "logits without their gradient": [("2 * math.ceil(tokens", "math.ceil(tokens")],
        "always float32": [("c.vocab_size) * dtype.itemsize", "c.vocab_size) * 4")]}),
    (a_process_holds_its_part_and_what_is_read, {
        "its part alone": [
            ("held / processes) + 2 * (outside + max(blocks))", "held / processes)")],
        "without the gradient": [("+ 2 * (outside", "+ (outside")],
        "blocks alone": [("(outside + max(blocks))", "max(blocks)")],
        "what is outside alone": [("(outside + max(blocks))", "outside")],
        "all layers of a letter": [("parts[m].total // c.pattern.count(m)", "parts[m].total")],
        "all tokens": [("math.ceil(tokens / processes)", "tokens")]}),
    *((operations_are_those_that_torch_counts, case, {what: [edit]}) for case, what, edit in (
        ("SEIE", "one operation per product", ("times = 2 * batch", "times = batch")),
        ("SEIE", "of one row", ("times = 2 * batch *", "times = 2 *")),
        ("SHSRAH", "every letter once", ("batch * c.pattern.count(letter)", "batch")),
        ("SEIE", "nobody sees itself", ("(length + 1) // 2", "(length - 1) // 2")),
        ("SEIE", "the cache is not read", ("length * context + length", "length")),
        ("SEIE", "scores alone", ("2 * c.d_model * pairs", "c.d_model * pairs")),
        ("SEIE", "rows of one half", ("(private + r)", "(private + r // 2)")),
        ("SHSRAH", "width of the model", ("c.d_head or d // h, c.n_groups", "d // h, c.n_groups")),
        ("SHSRAH", "keys of every head", ("c.n_kv_heads or h", "h")),
        ("SHSRAH", "no shared expert", ('letter in "HX" else 0', 'letter in "X" else 0')),
        ("SHSRAH", "two maps of an expert", ("expert, rows = 3 * d", "expert, rows = 2 * d")),
        ("SHSRAH", "every expert", ("c.k_experts * expert", "c.n_experts * expert")),
        ("SHSRAH", "no router", ("d * c.n_experts + c.k", "c.k")),
        ("SDICAX", "one gate", ("c.k_experts * d * d", "d * d")),
        ("SDICAX", "penalties of new keys", ("(context + length) * values", "length * values")),
        ("SKIK", "private ones as wide", ("if letter == \"K\" else d\n", "if False else d\n")),
        ("SKIK", "no map to the private", ("3 * d * f + d * private", "3 * d * f")),
        ("IXSC", "inner states left out", ("_ssd_products(c, p, 1, 64, length)", "0")),
        ("IXSC", "chunks of S", ("c, p, 1, 64, length", "c, p, 1, c.chunk_size, length")),
        ("IXSC", "groups of S", ("c, p, 1, 64, length", "c, p, c.n_groups, 64, length")),
        ("IPAM", "values per group", ("values, once = g * p if inner == \"linear\" else d, 0",
                                      "values, once = g * p, 0")),
        ("IPAM", "the table not asked", ("h * c.n_values * (m + p)", "h * c.n_values * p")),
        ("SGIM", "two maps of G", ('if letter == "M" else 3', 'if letter in "MG" else 3')),
        ("SGIM", "a chunk not filled", ("filled = -(-length // q) * q", "filled = length")),
        ("SGIM", "long chunks", ("q = min(chunk_size, length)", "q = chunk_size")),
        ("SGIM", "no steps", ("2 * g * n + h)", "2 * g * n)")),
        ("SGIM", "B of every head", ("(g * n + h * p)", "(h * n + h * p)")),
        ("SGIM", "states not read", ("2 * h * p * n)\n", "h * p * n)\n")),
        ("SGIM", "a step is a chunk", ("if length <= 1:", "if False:")))),
    *((a_step_moves_parameters_and_cache, case, {what: [edit]}) for case, what, edit in (
        ("SHSRAH", "experts as often as there are rows", ("read = sum(part.active",
                                                          "read = batch * sum(part.active")),
        ("SEIE", "all parameters", ("read = sum(part.active", "read = sum(part.total")),
        ("SHSRAH", "states are not written", ("cache.total() + cache.states", "cache.total()")),
        ("SHSRAH", "convolutions are not written", ("cache.states + cache.convolutions",
                                                    "cache.states")),
        ("SHSRAH", "keys are not written", ("cache.convolutions + new", "cache.convolutions")),
        ("SHSRAH", "the cache is not read", ("+ cache.total() + cache.states", "+ cache.states")),
        ("SHSRAH", "in bytes", ("read * dtype.itemsize", "read")))),
    *((activations_are_what_autograd_keeps, case, {what: [edit]}) for case, what, edit in (
        ("SHSRAH", "every letter once", ("c.pattern.count(letter) * one", "one")),
        ("SHSRAH", "without the head", ('_kept_by("head", c, (batch, length), dtype, {})', "0")),
        ("SHSRAH", "of one row", ('_kept_by(letter, c, (batch, length), dtype, angles)',
                                  '_kept_by(letter, c, (1, length), dtype, angles)')),
        ("SHSRAH", "the weights of attention", ('part in "RHCX" else', 'part in "ARHCX" else')),
        ("SKIK", "angles of each layer", ("if key not in shared for t", "for t")),
        ("SHSRAH", "parameters as well", ("kept.pop(id(t", "kept.get(id(t")),
        ("SHSRAH", "as often as it is kept", ("kept[id(t.untyped_storage())]", "kept[len(kept)]")),
        ("SHSRAH", "without the norm", ("functional_call(norm, own[0], x)", "x * 1")),
        ("IXSC", "the loss in sixteen bits", ("y.flatten(0, 1).to(wide)", "y.flatten(0, 1)")))),
    (rows_are_those_of_the_formula, {
        "one map of P": [("else 2 * d)", "else d)")],
        "one gate of K": [("(2 * private + d if", "(private + d if")],
        "one head": [("c.n_retrieval_heads * c.k_neurons", "c.k_neurons")],
        "of one token": [("length * matrices, length * rows", "length * matrices, rows")]}),
    (parameters_are_counted, "SHSRAH", {
        "no last norm": [("(len(c.pattern) + 1) * c.d_model", "len(c.pattern) * c.d_model")],
        "every head is a matrix": [("0 if c.tie_embeddings else table", "table")],
        "every letter once": [("Parameters(n * total, n *", "Parameters(total, n *")],
        "head left out of the active": [("else table, table)", "else table, 0)")],
        "the embedding is active": [("Parameters(table, 0)", "Parameters(table, table)")]}),
    (active_are_those_that_a_token_reaches, "R", {
        "all are active": [(IDLE, "n * total")],
        "idle ones of one layer": [(IDLE, "n * total - idle")]}),
    (active_are_those_that_a_token_reaches, "K", {
        "idle ones not asked for": [('if hasattr(layer, "inactive_parameters")', "if False")]}),
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
PLANTED_CONFIG = [
    (the_random_state_is_left_alone, {
        "config makes layers": [(IN_CONFIG, IN_CONFIG.replace("meta", "cpu"))]}),
    (sizes_are_computed_without_the_model, {
        "config makes layers": [(IN_CONFIG, IN_CONFIG.replace("meta", "cpu"))]}),
]
PLANTED_MODEL = [
    (cache_takes_the_bytes_that_are_computed, "IPAM", {
        "a part not counted": [("for part in cache)", "for part in cache[:2])")]}),
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
    *mistakes(PLANTED_CONFIG, config),
    *mistakes(PLANTED_MODEL, model),
    *mistakes(PLANTED_PRESETS, presets),
]
