"""Mistakes of the listings, and of thought, that the properties of test_attention.py must catch."""

from functools import partial

from planting import asked, mistakes
from test_attention import (
    MASKS,
    ONE_GRAPH,
    bias_is_held,
    calls_join_up,
    compiles,
    copies_no_groups,
    every_parameter_learns,
    forms_are_the_definition,
    masks_are_the_loop,
    padding_changes_nothing,
    rounded_gates_hide_hard_and_learn_softly,
    shut_gates_leave_each_token_itself,
    values_are_the_loop,
)
from test_experts import is_defined

from cheems_ref import attention

ROOMS = (attention,)
HELD = [asked(compiles, combo) for combo in ONE_GRAPH]  # by test_layer_is_one_graph

PLAIN, GATES, ROUNDED, CONTENT, THREE_KEYS = (("linear", mask, "g = 4") for mask in MASKS)
STATES, RETRIEVED = ("ssd", "causal", "g = 4"), ("retrieved", "causal", "g = 4")
SEEN = ".masked_fill(~allowed, -torch.inf).flip(-1)"
SOFTMAX = "best.values.softmax(dim=-1)"

# fmt: off
MISTAKES = mistakes([
    (forms_are_the_definition, {
        "no 1/√p": [("keys) / math.sqrt(p)", "keys)")],
        "mask after the softmax": [
            ("scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)",
             "scores.softmax(dim=-1).masked_fill(~allowed, 0)")],
        "tiled groups": [("-> b s (g r) p", "-> b s (r g) p")]}),
    (partial(forms_are_the_definition, kind=None), {
        "not causal by itself": [("causal = t > 1  #", "causal = False  #")]}),
    (copies_no_groups, {
        "keys copied to every head": [("grouped = k.shape", "grouped = False and k.shape")]}),
    (bias_is_held, {
        "autocast narrows the bias": [("with autocast_off(q.device):  #", "if True:  #")]}),
    (masks_are_the_loop, {
        "no offset": [("[:, None] + (n_keys - n_queries)", "[:, None]")],
        "empty rows stay empty": [
            ("allowed | (own & ~allowed.any(dim=-1, keepdim=True))", "allowed")]}),
    (is_defined, "linear, g = 4", {
        "k is not rotated": [("_apply_rope(k, cos, sin)", "k")]}),
    (is_defined, "linear, content, g = 2", {
        "penalty of the next token": [
            ('exp() * dt, "b s h', 'exp() * dt.roll(-1, 1), "b s h')]}),
    (is_defined, "linear, three keys, g = 2", {
        "future keys take places": [(SEEN, ".expand(-1, -1, allowed.shape[-2], -1).flip(-1)")]}),
    (padding_changes_nothing, PLAIN, {
        "padding is read as NaN": [
            ("x = x.masked_fill(~padding_mask[..., None], 0)", "x = x + 0")]}),
    (padding_changes_nothing, GATES, {
        "gates by the index of the key": [
            ("F.embedding(position_ids,",
             "F.embedding(position_ids * 0 + torch.arange(v.shape[1]),")]}),
    (padding_changes_nothing, STATES, {
        "padding enters the state": [
            ("dict(padding_mask=padding_mask, cache=cache", "dict(cache=cache")]}),
    (calls_join_up, STATES, {
        "the inner cache is forgotten": [("cache and cache.inner", "None")]}),
    (calls_join_up, PLAIN, {
        "the cache is written to": [("[old.k, new.k]", "[old.k.add_(0), new.k]")]}),
    (rounded_gates_hide_hard_and_learn_softly, ROUNDED, {
        "rounded gates learn nothing": [("return soft + (hard - soft).detach()", "return hard")]}),
    (shut_gates_leave_each_token_itself, ROUNDED, {
        "shut gates leave a token everything": [
            ("else _own_if_empty(kept)",
             "else kept | (allowed & ~kept.any(dim=-1, keepdim=True))")]}),
    (values_are_the_loop, {
        "softmax over all rows": [(SOFTMAX, "scores.softmax(dim=-1).gather(-1, best.indices)")]}),
    (every_parameter_learns, RETRIEVED, {
        "rows without weights": [(SOFTMAX, "torch.full_like(best.values, 1 / self.k_values)")]}),
])
