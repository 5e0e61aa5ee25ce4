"""Mistakes of the listings, and of thought, that tests of attention must catch."""

from planting import mistakes
from test_attention import (
    bias_is_held,
    copies_no_groups,
    forms_are_the_definition,
    masks_are_the_loop,
    slices_join,
)
from test_layers import has, is_defined

from cheems_ref import attention

ROOMS = (attention,)

PADDED = "padded_rows_and_what_goes_on_from_them_are_the_definition_of_the_rows_alone"
JOINED = "calls_that_hand_the_cache_on_learn_as_one"
SEEN = ".masked_fill(~allowed, -torch.inf).flip(-1)"

# fmt: off
MISTAKES = mistakes([
    (forms_are_the_definition, {
        "no 1/√p": [("keys) / math.sqrt(p)", "keys)")],
        "mask after the softmax": [
            ("scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)",
             "scores.softmax(dim=-1).masked_fill(~allowed, 0)")],
        "tiled groups": [("-> b s (g r) p", "-> b s (r g) p")],
        "not causal by itself": [("is_causal=causal,", "is_causal=False,")]}),
    (slices_join, {
        "each slice keeps its own maximum": [
            ("a * one.total + b * other.total", "one.total + other.total")],
        "no maximum subtracted": [("weights = (scores - largest).exp()", "weights = scores.exp()")],
        "a slice that hides all keys is NaN": [(".clamp(min=lowest)", "")]}),
    (copies_no_groups, {
        "keys copied to every head": [("grouped = g < h", "grouped = False and g < h")]}),
    (bias_is_held, {
        "autocast narrows the bias": [("with autocast_off(q.device):  #", "if True:  #")]}),
    (masks_are_the_loop, {
        "no offset": [("[:, None] + (n_keys - n_queries)", "[:, None]")],
        "empty rows stay empty": [
            ("allowed | (own & ~allowed.any(dim=-1, keepdim=True))", "allowed")]}),
    (is_defined, "linear, g = 4", {
        "k is not rotated": [
            ("q, k = _apply_rope(q, cos, sin), _apply_rope(k, cos, sin)",
             "q = _apply_rope(q, cos, sin)")]}),
    (is_defined, "linear, content, g = 2", {
        "penalty of the next token": [
            ('exp() * dt, "b s h', 'exp() * dt.roll(-1, 1), "b s h')]}),
    (is_defined, "linear, three keys, g = 2", {
        "future keys take places": [(SEEN, ".expand(-1, -1, allowed.shape[-2], -1).flip(-1)")]}),
    (is_defined, "linear, rounded gate, g = 2", {
        "rounded gates learn nothing": [("y.detach() + (y_soft - y_soft.detach())", "y")],
        "shut gates leave a token everything": [
            ("else _own_if_empty(kept)",
             "else kept | (allowed & ~kept.any(dim=-1, keepdim=True))")]}),
    (is_defined, "retrieved, g = 4", {
        "softmax over all rows": [
            ("best.values.softmax(dim=-1)", "scores.softmax(dim=-1).gather(-1, best.indices)")]}),
    (has, "linear, g = 4", PADDED, {
        "padding is read as NaN": [
            ("x = x.masked_fill(~padding_mask[..., None], 0)", "x = x + 0")]}),
    (has, "linear, gate, g = 2", "padding_changes_nothing", {
        "gates by the index of the key": [
            ("F.embedding(position_ids,",
             "F.embedding(position_ids * 0 + torch.arange(v.shape[1]),")]}),
    (has, "ssd, g = 4", "pieces_equal_one_pass", {
        "the inner cache is forgotten": [("cache and cache.inner", "None")]}),
    (has, "linear, g = 4", JOINED, {
        "the cache is written to": [("[old.k, new.k]", "[old.k.add_(0), new.k]")]}),
])

# By the table of layers, and a test of its own.
ASKED = (has, is_defined, slices_join)
HELD = [mistake.asked() for mistake in MISTAKES if mistake.has_property in ASKED]
