"""Mistakes that the properties of test_model.py must catch."""

from functools import partial

from models import ROOMS as ROOMS
from planting import detached, mistakes
from test_layer_gradients import learns_as_defined
from test_model import (
    HELD as HELD,
)
from test_model import (
    angles_are_made_once,
    calls_join_up,
    every_parameter_learns,
    fresh_weights_are_those_published,
    is_causal,
    is_the_definition,
    layers_are_handed_their_options,
    layers_turn_by_their_own,
    no_cache_leaves_where_none_is_asked_for,
    nothing_in_gives_nothing_out,
    padding_changes_nothing,
    starts_as_one_made_directly,
)

from cheems_ref import attention, config, model, rope

SEQUENCE = "self.norm(x), position_ids, padding_mask=padding_mask, cache=cache, rotary=rotary"
RESIDUAL, STATE_MIXED = "return x + y, cache", "return x + self.layer(self.norm(x)), None"
POSITIONS = "(before[:, None] + real.cumsum(1) - 1).clamp(min=0)"
FROM_1 = "before[:, None] + real.cumsum(1) - int(padding_mask is None)"
BEFORE, AFTER = "cache.layers, cache.n_tokens", "before + real.sum(1)"
HEAD = "head = self.embedding if self.lm_head is None else self.lm_head"
EMBEDDED = "self.embedding(input_ids"
NORM = "self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)\n        self."
LAST_NORM, LOGITS = "return self.norm(x), cache", "F.linear(x, head.weight)"
RESET = "        self.reset_parameters()\n"
EMBEDDING_STARTS = "nn.init.normal_(self.embedding.weight, std=0.02)"
KEPT = "            layers.append(layer_cache)\n"

SHARED = dict(pattern="SSAAIMI", inner="ssd")

# fmt: off
PLANTED = [
    (is_the_definition, "SEIE", {
        "no residual around S and I": [(RESIDUAL, "return y, cache")],
        "no residual around E": [(STATE_MIXED, "return self.layer(self.norm(x)), None")],
        "residual of the norm": [(RESIDUAL, "return self.norm(x) + y, cache")],
        "residual without a gradient": [(RESIDUAL, "return x.detach() + y, cache")],
        "no norm before S and I": [(SEQUENCE, SEQUENCE.replace("self.norm(x)", "x"))],
        "no norm before E": [(STATE_MIXED, "return x + self.layer(x), None")],
        "no last norm": [(LAST_NORM, LAST_NORM.replace("self.norm(x)", "x"))],
        "norm without its weight": [
            (SEQUENCE, SEQUENCE.replace("self.norm(x)", "F.rms_norm(x, x.shape[-1:], eps=1e-3)"))],
        "eps of blocks left out": [
            (NORM + "layer", NORM.replace(", eps=config.norm_eps", "") + "layer")],
        "eps of the last norm left out": [
            (NORM + "lm", NORM.replace(", eps=config.norm_eps", "") + "lm")],
        "layers from the last to the first": [
            ("for letter in config.pattern)", "for letter in config.pattern[::-1])")],
        "head of its own": [("if not config.tie_embeddings:", "if True:")],
        "embedding scaled": [(EMBEDDED, "4 * " + EMBEDDED)],
        "tied without a gradient": [(LOGITS, LOGITS.replace("weight", "weight.detach()"))]}),
    (is_the_definition, "SHSRAH", {
        "tied against its will": [(HEAD, "head = self.embedding")],
        "tied by turns": [("if not config.tie_embeddings:", "if config.tie_embeddings:")]}),
    (is_causal, "SEIE", {
        "the next token is read": [
            (EMBEDDED, EMBEDDED.replace("input_ids", "input_ids.roll(-1, 1)"))],
        "rows read one another": [(RESIDUAL, "return x + y.mean(0), cache")],
        "a norm over the length": [
            (LAST_NORM, LAST_NORM.replace("(x)", "(x / x.norm(dim=1, keepdim=True))"))]}),
    (padding_changes_nothing, "SHSRAH", {
        "padding is read": [(SEQUENCE, SEQUENCE.replace("=padding_mask", "=None"))],
        "positions count padding": [(POSITIONS, "before[:, None] + torch.arange(real.shape[1])")],
        "padding is counted": [(AFTER, "before + real.shape[1]")],
        "the first row is counted": [(AFTER, "before + real[0].sum()")],
        "positions from 1": [(POSITIONS, FROM_1)]}),
    (padding_changes_nothing, "IDSP", {
        "gates one too far": [(POSITIONS, FROM_1)],
        "counted from the end": [(POSITIONS, POSITIONS.replace("cumsum", "flip(1).cumsum"))]}),
    (calls_join_up, "IRIG", {
        "caches exchanged": [(BEFORE, "cache.layers[2:] + cache.layers[:2], cache.n_tokens")],
        "caches handed back exchanged": [("tuple(layers)", "tuple(layers[2:] + layers[:2])")],
        "the first cache for all": [
            ("cache=layer_cache,\n", "cache=cache and cache.layers[0],\n")],
        "positions start again": [(BEFORE, "cache.layers, before")],
        "all calls are prompts": [
            ("if cache is not None:\n            caches", "if False:\n            caches")],
        "n_tokens stands still": [(AFTER, "before + 0")],
        "n_tokens of this call": [(AFTER, "real.sum(1)")],
        "n_tokens written to": [(AFTER, "before.add_(real.sum(1))")],
        "states written to": [
            (KEPT, KEPT + "            if cache: cache.layers[0].inner.state.add_(0)\n")],
        "no gradient through the cache": [
            (KEPT, "            layers.append(layer_cache and layer_cache._replace("
                   "k=layer_cache.k.detach()))\n")]}),
    (partial(calls_join_up, real=None), "IDSP", {
        "n_tokens stands still": [(AFTER, "before")],
        "positions start again": [("(before[:, None] + real", "(0 * before[:, None] + real")]}),
    (every_parameter_learns, "SHSRAH", {
        "the head is not learnt": [(LOGITS, LOGITS.replace("weight", "weight.detach()"))],
        "nor the last norm": [
            (LAST_NORM, LAST_NORM.replace("self.norm(x)", "F.rms_norm(x, x.shape[-1:])"))],
        "nor what comes first": [(RESIDUAL, "return (x + y).detach(), cache")]}),
    (learns_as_defined, "stack", "SMIGAD", detached(
        "self.embedding(input_ids.long())¦",
        "return x + self.layer(self.norm(x¦)), None",
        "return x + self.layer(self.norm(x)¦), None",
        "return x¦ + self.layer(self.norm(x)), None",
        "return x + self.layer(self.norm(x))¦, None",
        "self.norm(x¦), position_ids, padding_mask=padding_mask, cache=cache, rotary",
        "self.norm(x)¦, position_ids, padding_mask=padding_mask, cache=cache, rotary",
        "return x¦ + y, cache",
        "return x + y¦, cache",
        "return self.norm(x¦), cache",
        "F.linear(x¦, head.weight)")),
    (nothing_in_gives_nothing_out, "SHSRAH", {
        "one token at least": [(AFTER, "before + max(1, real.shape[1])")]}),
    (nothing_in_gives_nothing_out, "IDSP", {
        "padding counts one": [(AFTER, "before + real.sum(1).clamp(min=1)")]}),
    (no_cache_leaves_where_none_is_asked_for, "SEIE", {
        "blocks hand it on": [("return x + y, cache if use_cache else None", RESIDUAL)],
        "always": [("        return self.norm(x), cache if use_cache else None",
                    "        cache = ModelCache(tuple(layers), before, self.config.pattern)\n"
                    "        return self.norm(x), cache")],
        "never": [(LAST_NORM + " if use_cache else None", "return self.norm(x), None")]}),
    (starts_as_one_made_directly, "SHSRAH", {
        "drawn twice": [(RESET, 2 * RESET)],
        "drawn in the constructor alone": [
            (EMBEDDING_STARTS, ""), (RESET, "        " + EMBEDDING_STARTS + "\n")]}),
    (partial(angles_are_made_once, n_widths=2), SHARED, {
        "a table for each layer": [
            ("                rotary=rotary,\n",
             "                rotary=RotaryTable(position_ids),\n")],
        "blocks hand no table on": [(SEQUENCE, SEQUENCE.replace("=rotary", "=None"))]}),
    (fresh_weights_are_those_published, "cheems-tiny", {
        "the embedding as torch starts it": [(EMBEDDING_STARTS, "")],
        "narrower": [("std=0.02", "std=0.002")]}),
]
PLANTED_ROPE = [
    (layers_turn_by_their_own, dict(pattern="AAAM"), {
        "a table for any positions": [("table.position_ids is position_ids", "True")],
        "one base for all layers": [("key = dim, base,", "key = dim,")]}),
]
PLANTED_ATTENTION = [
    (partial(angles_are_made_once, n_widths=2), SHARED, {
        "the inner SSD makes its own": [("cache.inner, rotary=rotary)", "cache.inner)")],
        "positions are masked too early": [
            ("            x = x.masked_fill(~padding_mask[..., None], 0)\n",
             "            x = x.masked_fill(~padding_mask[..., None], 0)\n"
             "            position_ids = position_ids.masked_fill(~padding_mask, 0)\n")]}),
]
PLANTED_CONFIG = [
    (is_the_definition, "SEIE", {
        "heads and k exchanged": [
            ("n_heads=n_retrieval_heads k=k_neurons", "n_heads=k_neurons k=n_retrieval_heads")],
        "other experts for neurons": [("n_experts=n_neurons", "n_experts")],
        "base of I left out": [('rope_base mask "', 'mask "')],
        "rows for k": [("n_values k_values", "n_values k_values=n_values")]}),
    (is_the_definition, "SHSRAH", {
        "width of a head left out": [("n_heads d_head n_groups", "n_heads n_groups")],
        "taps left out": [("position d_conv", "position")],
        "base of A left out": [('"n_heads n_kv_heads rope_base")', '"n_heads n_kv_heads")')],
        "groups of A left out": [('"n_heads n_kv_heads rope_base")', '"n_heads rope_base")')],
        "another number of experts": [("k=k_experts", "k=d_conv")],
        "H without what is shared": [('expert", SharedExpertMoE', 'expert", MoE')]}),
    (is_the_definition, "SDICAX", {
        "S by rope": [("position d_conv", "d_conv")],
        "content forgotten": [('rope_base mask "', 'rope_base "')],
        "groups of I left out": [('"n_heads n_kv_heads rope_base mask', '"n_heads rope_base mask')],
        "retrieved for linear": [('"inner n_values', '"n_values')],
        "C and X exchanged": [('"cohesive MoE", CohesiveMoE', '"cohesive MoE", ExpansiveMoE')]}),
    (is_the_definition, "SKIK", {
        "base of S left out": [('d_conv rope_base "', 'd_conv "')],
        "groups of S left out": [("d_head n_groups", "d_head")],
        "state of the inner SSD left out": [("k_values d_state", "k_values")],
        "private width left out": [("d_ff d_private", "d_ff")]}),
    (is_the_definition, "IPAM", {
        "all keys kept": [("max_positions top_k", "max_positions")],
        "M gated": [('"MLP", MLP', '"MLP", partial(MLP, gated=True)')]}),
    (is_the_definition, "SGIM", {
        "G not gated": [("partial(MLP, gated=True)", "MLP")],
        "G a DGLU": [("partial(MLP, gated=True)", "DGLU")]}),
    (layers_are_handed_their_options, {
        "chunks of 64": [('"chunk_size backend"', '"backend"')],
        "any backend": [('"chunk_size backend"', '"chunk_size"')]}),
]
# fmt: on

MISTAKES = [
    *mistakes(PLANTED, model),
    *mistakes(PLANTED_ROPE, rope),
    *mistakes(PLANTED_ATTENTION, attention),
    *mistakes(PLANTED_CONFIG, config),
]
