"""Mistakes that the properties of test_attention.py must catch."""

from functools import partial

from planting import asked, detached, mistakes
from test_attention import (
    MASKS,
    ONE_GRAPH,
    asks_nothing,
    bias_is_held,
    calls_join_up,
    compiles,
    copies_no_groups,
    every_parameter_learns,
    forms_are_the_definition,
    is_born_right,
    is_causal,
    keeps_the_best,
    layer_is_the_definition,
    masks_are_the_loop,
    only_distances_enter,
    padding_changes_nothing,
    penalty_is_that_of_float32,
    positions_at_padding_are_not_looked_at,
    rounded_gates_hide_hard_and_learn_softly,
    rounds_once,
    rows_are_those_of_float32,
    shut_gates_leave_each_token_itself,
    values_are_the_loop,
)
from test_layer_gradients import learns_as_defined

from cheems_ref import attention

ROOMS = (attention,)
HELD = [asked(compiles, combo) for combo in ONE_GRAPH]  # by test_layer_is_one_graph

PLAIN, GATES, ROUNDED, CONTENT, THREE_KEYS = (("linear", mask, "g = 4") for mask in MASKS)
STATES, RETRIEVED = ("ssd", "causal", "g = 4"), ("retrieved", "causal", "g = 4")
OFFSET = "[:, None] + (n_keys - n_queries)"
OWN = "(own & ~allowed.any(dim=-1, keepdim=True))"
GATE = "F.embedding(position_ids, F.logsigmoid(self.logit).T)"
STRAIGHT_THROUGH = "return soft + (hard - soft).detach()"
SEEN = ".masked_fill(~allowed, -torch.inf).flip(-1)"
SOFTMAX = "best.values.softmax(dim=-1)"
OWN_TOKEN = "    own = torch.ones_like(allowed)"
ONLY_IF_EMPTY = "    if allowed.any(dim=-1).all():\n        return allowed\n" + OWN_TOKEN

# fmt: off
MISTAKES = mistakes([
    (forms_are_the_definition, {
        "no 1/√p": [("keys) / math.sqrt(p)", "keys)")],
        "mask after the softmax": [
            ("scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)",
             "scores.softmax(dim=-1).masked_fill(~allowed, 0)")],
        "tiled groups": [("expand_groups(x, h)", "x.repeat(1, 1, h // x.shape[2], 1)", 2)],
        "bias of the query": [("bias[:, :, None].to(wide)", "bias[..., None].to(wide)")],
        "bias forgotten by SDPA": [("mask = bias[:, :, None]", "mask = 0 * bias[:, :, None]")]}),
    (copies_no_groups, {
        "keys copied to every head": [("grouped = k.shape", "grouped = False and k.shape")]}),
    (bias_is_held, {
        "autocast narrows the bias": [("with autocast_off(q.device):  #", "if True:  #")],
        "autocast narrows the formula": [("with autocast_off(q.device):\n", "if True:\n")]}),
    (penalty_is_that_of_float32, {
        "autocast narrows the penalty": [("with autocast_off(v.device):", "if True:")]}),
    (rows_are_those_of_float32, {
        "autocast narrows the scores": [("with autocast_off(x.device):", "if True:")]}),
    (rounds_once, {
        "sums in sixteen bits": [
            ("wide = torch.promote_types(q.dtype, torch.float32)", "wide = q.dtype")]}),
    (partial(forms_are_the_definition, kind=None), {
        "not causal by itself": [("        causal = True\n", "        causal = False\n")]}),
    (masks_are_the_loop, {
        "no offset": [(OFFSET, "[:, None]")],
        "a query misses itself": [("device=device) <= token", "device=device) < token")],
        "padding is read": [("allowed & real[:", "allowed | real[:")],
        "empty rows stay empty": [("allowed | " + OWN, "allowed")],
        "every row sees itself": [(OWN, "own")]}),
    (calls_join_up, CONTENT, {
        "no offset, decoded": [(OFFSET, "[:, None]")]}),
    (is_causal, CONTENT, {
        "offset one too large": [(OFFSET, OFFSET + " + 1")],
        "penalty of the token after": [
            ('exp() * dt, "b s h', 'exp() * dt.roll(-1, 1), "b s h')]}),
    (padding_changes_nothing, PLAIN, {
        "padding is read, in the layer": [("allowed & real[:", "allowed & (real | True)[:")],
        "content of padding is looked at": [
            ("x = x.masked_fill(~padding_mask[..., None], 0)", "x = x + 0")]}),
    (only_distances_enter, PLAIN, {
        "k is not turned": [("_apply_rope(k, cos, sin)", "k")],
        "q is turned backwards": [("apply_rope(q, cos, sin)", "apply_rope(q, cos, -sin)")]}),
    (layer_is_the_definition, GATES, {
        "q and k are turned backwards": [
            ("position_ids, p, self", "position_ids.max() - position_ids, p, self")],
        "gate with the wrong sign": [(GATE, GATE.replace("self", "-self"))],
        "gate without its logarithm": [
            (GATE, GATE.replace("F.logsigmoid(self.logit)", "self.logit.sigmoid()"))]}),
    (layer_is_the_definition, PLAIN, {
        "the base is not handed on": [("p, self.rope_base,", "p, 10_000.0,")],
        "heads and widths exchanged": [
            ("f(x).unflatten(-1, (-1, p))", "f(x).unflatten(-1, (p, -1)).mT")]}),
    (positions_at_padding_are_not_looked_at, GATES, {
        "positions at padding are looked at": [
            ("position_ids.masked_fill(~padding_mask, 0)", "position_ids")]}),
    (calls_join_up, PLAIN, {
        "padding of earlier calls is forgotten": [
            ("real = torch.cat([old, new], dim=1)",
             "real = torch.cat([old | True, new], dim=1)")],
        "keys of earlier calls are forgotten": [("pairs = (cache.k,", "pairs = (0 * cache.k,")],
        "the cache is written to": [("pairs = (cache.k, k)", "pairs = (cache.k.add_(0), k)")],
        "no gradient through the cache": [
            ("(cache.v, v), (cache.pos", "(cache.v.detach(), v), (cache.pos")]}),
    (calls_join_up, STATES, {
        "the inner cache is forgotten": [("cache and cache.inner", "None")]}),
    (layer_is_the_definition, STATES, {
        "the inner SSD has a base of its own": [
            ("d_state=d_state, rope_base=rope_base)", "d_state=d_state)")]}),
    (padding_changes_nothing, STATES, {
        "padding enters the state": [
            ("dict(padding_mask=padding_mask, cache=cache", "dict(cache=cache")]}),
    (padding_changes_nothing, GATES, {
        "gates by the index of the key": [
            (GATE, GATE.replace("ids,", "ids * 0 + torch.arange(v.shape[1]),"))]}),
    (every_parameter_learns, GATES, {
        "gates without a gradient": [(GATE, GATE.replace("logit", "logit.detach()"))]}),
    (layer_is_the_definition, ROUNDED, {
        "gates rounded the wrong way": [("bias >= math.log(0.5)", "bias < math.log(0.5)")]}),
    (rounded_gates_hide_hard_and_learn_softly, ROUNDED, {
        "rounded gates learn nothing": [(STRAIGHT_THROUGH, "return hard")],
        "rounded gates are soft": [(STRAIGHT_THROUGH, "return soft")],
        "straight through the wrong way": [
            (STRAIGHT_THROUGH, "return hard + (soft - hard).detach()")]}),
    (shut_gates_leave_each_token_itself, ROUNDED, {
        "shut gates leave a token everything": [
            ("else _own_if_empty(kept)",
             "else kept | (allowed & ~kept.any(dim=-1, keepdim=True))")]}),
    (layer_is_the_definition, CONTENT, {
        "penalty with the wrong sign": [
            ("-self.A_log.to(wide).exp()", "self.A_log.to(wide).exp()")],
        "penalty without a gradient to its key": [
            ("self.mask(cache.v, ", "self.mask(cache.v.detach(), ")],
        "penalty of the token before": [
            ('exp() * dt, "b s h', 'exp() * dt.roll(1, 1), "b s h')]}),
    (is_causal, THREE_KEYS, {
        "future keys take places": [(SEEN, ".expand(-1, -1, allowed.shape[-2], -1).flip(-1)")]}),
    (keeps_the_best, {
        "hidden keys take places": [(SEEN, ".masked_fill(~allowed, 0).flip(-1)")],
        "hidden keys are kept": [
            ("return allowed & (rank < self.top_k)", "return (rank < self.top_k)")],
        "one too few is kept": [("(rank < self.top_k)", "(rank < self.top_k - 1)")],
        "of equals the earlier is kept": [(".flip(-1)", ".clone()", 2)]}),
    (values_are_the_loop, {
        "softmax over all rows": [(SOFTMAX, "scores.softmax(dim=-1).gather(-1, best.indices)")],
        "rows of another head": [
            ("self.weights(x), self.values)", "self.weights(x), self.values.flip(0))")],
        "rows in place of x ∘ rows": [("return x * rearrange(rows", "return rearrange(rows")]}),
    (every_parameter_learns, RETRIEVED, {
        "rows without weights": [(SOFTMAX, "torch.full_like(best.values, 1 / self.k_values)")]}),
    (asks_nothing, CONTENT, {
        "the device is asked whether a row is empty": [(OWN_TOKEN, ONLY_IF_EMPTY)]}),
    (compiles, ("QCAttn", "three keys", "g = 2"), {
        "the graph breaks where a row may be empty": [(OWN_TOKEN, ONLY_IF_EMPTY)]}),
    (compiles, ("QCAttn", "causal", "g = 2"), {
        "torch is handed a bool that depends on the length": [
            ("        causal = True\n    elif", "        pass\n    elif"),
            ("is_causal=causal", "is_causal=mask is None and t == s")]}),
    (is_born_right, RETRIEVED, {
        "keys of the table are not drawn anew": [("nn.init.normal_(self.keys)", "pass")],
        "a number drawn by the constructor itself": [
            ("        self.keys = nn.Parameter(torch.empty(n_heads, n_values, m))\n",
             "        self.keys = nn.Parameter(torch.empty(n_heads, n_values, m))\n"
             "        torch.rand(1)\n")]}),
    (is_born_right, GATES, {
        "gates are not opened anew": [("nn.init.constant_(self.logit, 2.0)", "pass")]}),
    (is_born_right, CONTENT, {
        "penalties do not start anew": [("nn.init.zeros_(self.A_log)", "pass")]}),
    (learns_as_defined, "attention", "QCAttn", "causal", "g = 2", detached(
        "f(x¦).unflatten(-1, (-1, p)) for f in (self.q_proj, self.k_proj)",
        "_apply_rope(q¦, cos, sin)",
        "_apply_rope(k¦, cos, sin)",
        "return self.inner(x¦), None",
        "v = v¦.unflatten(-1, (-1, p))",
        "self._read(q¦, cache)",
        "self._read(q, cache)¦.flatten(2)")),
    (learns_as_defined, "attention", "linear", "content", "g = 2", detached(
        "return self.inner(x¦), None",
        "self.mask(cache.v¦, cache.position_ids)",
        "self.dt_proj(v¦.flatten(2))",
        'rearrange(-self.A_log.to(wide).exp() * dt¦, "b s h -> b h s")')),
    (learns_as_defined, "attention", "linear", "rounded gate", "g = 2", detached(
        "return soft¦ + (hard - soft).detach()",
        "f(x¦).unflatten(-1, (-1, p)) for f in (self.q_proj, self.k_proj)")),
    (learns_as_defined, "attention", "ssd", "causal", "g = 2", detached(
        "f(x¦).unflatten(-1, (-1, p)) for f in (self.q_proj, self.k_proj)",
        "self.inner(x¦, position_ids, **own)")),
    (learns_as_defined, "attention", "retrieved", "causal", "g = 2", detached(
        "self.query_proj(x¦)",
        "self.weights(x¦), self.values",
        "return x¦ * rearrange(rows",
        'return x * rearrange(rows¦, "b')),
])
