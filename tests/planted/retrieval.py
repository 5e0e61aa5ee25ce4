"""Mistakes in retrieval that the properties of test_experts.py must catch."""

from planting import detached, mistakes
from test_experts import (
    asks_nothing,
    every_parameter_learns,
    finds_the_best,
    finds_the_best_on_long_axes,
    finds_the_same_in_blocks,
    follows_the_rule,
    follows_the_rule_at_the_end,
    gathers_no_rows,
    is_born_the_same,
    is_its_equation,
    keeps_tokens_apart,
    neurons_are_inner_products,
    ranks_as_a_stable_sort,
    retrieval_has_the_gradient_of_brute_force,
    retrieved_experts_are_their_sum,
    route_is_sound,
    routes_in_float32_under_autocast,
    what_is_idle_gets_no_gradient,
)
from test_layer_gradients import learns_as_defined

from cheems_ref import retrieval

ROOMS = (retrieval,)

OF_ALL = "product_key_topk(queries, self.keys, self.n_experts)[0]"
GATES = "return scores.softmax(dim=-1), indices"
GATED = "active * F.silu(_neurons(tokens, gate, rows))"
WITH_PHI = "return y + phi if self.residual else y"
STABLE = "scores.sort(dim=-1, descending=True, stable=True)"
BACKWARDS = "(t.flip(-1) for t in scores.sort(dim=-1, stable=True))"
RANKED = "indices = n - 1 - ranks.topk(k, dim=-1).values % n"
AMONG_THEMSELVES = """indices = scores.topk(k, dim=-1).indices.sort(dim=-1).values
    order = scores.gather(-1, indices).argsort(dim=-1, descending=True, stable=True)
    indices = indices.gather(-1, order)"""

# fmt: off
MISTAKES = mistakes([
    (finds_the_best, {
        "one pair too few": [("min(best, k // (a + 1))", "min(best, (k - 1) // (a + 1))")],
        "ranks of one half for both": [
            ("values[:, 1].index_select(-1, second)", "values[:, 1].index_select(-1, first)")],
        "index i + j r": [
            ("where[:, 0].index_select(-1, first) * r + where[:, 1]",
             "where[:, 1].index_select(-1, second) * r + where[:, 0]")],
        "k - 1 of each half": [("best = min(k, r)", "best = min(k - 1, r)")],
        "heads for halves": [("permute(1, 2, 0, 3)", "permute(2, 1, 0, 3)")]}),
    (finds_the_best_on_long_axes, {
        "negative scores upside down": [("bits ^= (bits >> 31) & 0x7FFFFFFF", "pass")],
        "index in the high places": [("bits.long().mul_(n)", "bits.long()")]}),
    (ranks_as_a_stable_sort, {
        "-0.0 below 0.0": [("wide.add_(0.0)", "wide")],
        "NaN by its sign": [(".nan_to_num(math.inf, math.inf, -math.inf)", "")],
        "infinities cut": [
            ("nan_to_num(math.inf, math.inf, -math.inf)", "nan_to_num(math.inf)")],
        "of equal ones the last": [
            ("(torch.arange(n - 1, -1, -1, device=scores.device))",
             "(torch.arange(n, device=scores.device))"),
            ("indices = n - 1 - ranks", "indices = ranks")]}),
    (follows_the_rule, {
        "of equal sums any": [("_topk(sums, k)", "sums.topk(k, dim=-1)")],
        "of equal ones the last": [(STABLE, BACKWARDS)]}),
    (follows_the_rule_at_the_end, {
        "of equal halves any": [(RANKED, "indices = scores.topk(k, dim=-1).indices")],
        "of those equal to one left out any": [(RANKED, AMONG_THEMSELVES)]}),
    (finds_the_same_in_blocks, {
        "blocks in another order": [("torch.cat(parts)", "torch.cat(parts[::-1])")]}),
    (retrieval_has_the_gradient_of_brute_force, {
        "none to the keys": [("@ keys.mT", "@ keys.detach().mT")],
        "one half's only": [
            ("sums = values[:, 0].index_select(-1, first)",
             "sums = values[:, 0].index_select(-1, first).detach()")]}),
    (neurons_are_inner_products, {
        "no gradient to the tokens": [("return to_x, to_table", "return None, to_table")],
        "no gradient to a token alone": [("@ x[0])[None]", "@ x[0].data)[None]")],
        "a token alone with the first rows": [
            ("table[indices[0]]", "table[: indices.shape[1]]")],
        "gradient to the tokens without weights": [
            ("indices, table, per_sample_weights=gradient,", "indices, table,")],
        "no gradient to the table": [("return to_x, to_table", "return to_x, None")],
        "gradient to the table without tokens": [
            ("x, indices.flatten(), bags, unused", "x**0, indices.flatten(), bags, unused")],
        "every block on the first tokens": [
            ("block, table, rows.flatten()", "x[: len(block)], table, rows.flatten()")]}),
    (gathers_no_rows, {
        "rows gathered": [
            ("return _products(x, table, indices)",
             'return einsum("nd,njd->nj", x, table[indices])')]}),
    (retrieved_experts_are_their_sum, {
        "bag without the gates": [("weights * active, mode", "active, mode")],
        "gates inside of the activation": [
            ("= F.silu(active) if", "= F.silu(weights * active) / weights if")],
        "gated by the other product": [
            (GATED, "F.silu(active) * _neurons(tokens, gate, rows)")]}),
    (is_its_equation, "PEER", {
        "softmax of all scores": [
            (GATES, f"return {OF_ALL}.softmax(-1)[..., : self.k], indices")],
        "no softmax": [(GATES, "return scores, indices")]}),
    (route_is_sound, "PEER", {
        "no softmax": [(GATES, "return scores, indices")],
        "softmax over the heads": [(GATES, "return scores.softmax(dim=-2), indices")]}),
    (routes_in_float32_under_autocast, "PEER", {
        "autocast chooses": [("with autocast_off(keys.device):", "if True:")]}),
    (every_parameter_learns, "CDMMoE", {
        "keys start at zero": [("nn.init.normal_(self.keys)", "nn.init.zeros_(self.keys)")]}),
    (keeps_tokens_apart, "PEER", {
        "heads read as tokens": [("[t.transpose(0, 1) for t in", "[t for t in")]}),
    (keeps_tokens_apart, "CDMoE", {
        "gates' heads read as tokens": [
            ("gates.to(down.dtype)", "gates.transpose(0, 2).reshape(gates.shape)")]}),
    (asks_nothing, "PEER", {
        "ties looked for": [(RANKED, RANKED + "\n    assert not scores.isnan().any()")],
        "pairs looked for": [
            ('torch.tensor(pairs, device="cpu").to(keys.device, non_blocking=True)',
             "(torch.arange(best * best, device=keys.device) <= k).nonzero()[:, 0]")]}),
    (is_born_the_same, "PEER", {
        "keys drawn twice": [
            ("        self._reset_tables()\n\n    def reset",
             "        self.reset_parameters()\n\n    def reset")],
        "tables not drawn": [
            ("super().reset_parameters()\n        self._reset_tables()",
             "super().reset_parameters()")]}),
    (is_born_the_same, "CDMMoE", {
        "a table not drawn": [
            ("_reset_table(self.down, self.down.shape[1])\n"
             "        _reset_table(self.up, self.retrieval",
             "_reset_table(self.up, self.retrieval")]}),
    (what_is_idle_gets_no_gradient, "PEER", {
        "neurons of one head": [
            ("self.n_experts - self.n_heads * self.k", "self.n_experts - self.k")],
        "one table": [("(self.down.shape[1] + self.up.shape[1])", "self.down.shape[1]")]}),
    (what_is_idle_gets_no_gradient, "CDMMoE", {
        "gates left out": [("(self.gate, self.down, self.up))", "(self.down, self.up))")]}),
    (what_is_idle_gets_no_gradient, "CDMoE", {
        "none": [("return self.experts.inactive_parameters()", "return 0")]}),
    (is_its_equation, "CDMMoE, wide", {
        "router on x": [("*self.retrieval.route(p), self", "*self.retrieval.route(x), self")],
        "route of x": [("retrieval.route(self.private(x))", "retrieval.route(x)")]}),
    (is_its_equation, "CDMoE, parallel", {
        "experts on φ": [('phi if self.form == "serial" else x)', "phi)")]}),
    (is_its_equation, "CDMoE", {
        "no residual": [(WITH_PHI, "return y")],
        "route of x": [('self.shared(x) if self.form == "serial" else x)', "x)")]}),
    (is_its_equation, "CDMoE, no residual", {
        "residual": [(WITH_PHI, "return y + phi")]}),
    (learns_as_defined, "state mixer", "PEER", detached(
        "self.query_proj(x¦)",
        "_retrieved_experts(x¦, self.down, self.up, *self.route(x))",
        "_retrieved_experts(x, self.down, self.up, *self.route(x¦))",
        "x¦.flatten(0, 1).to(down.dtype)")),
    (learns_as_defined, "state mixer", "CDMMoE", detached(
        "self.private_proj(self.shared(x¦))",
        "self.private_proj(self.shared(x)¦)",
        "_retrieved_experts(p¦, self.down, self.up, *self.retrieval.route(p), self.gate)",
        "_retrieved_experts(p, self.down, self.up, *self.retrieval.route(p¦), self.gate)")),
    (learns_as_defined, "state mixer", "CDMoE", detached(
        "phi = self.shared(x¦)\n",
        'self.experts(phi¦ if self.form == "serial" else x)',
        "return y + phi¦ if self.residual else y",
        "return y¦ + phi if self.residual else y")),
    (learns_as_defined, "state mixer", "CDMoE, parallel", detached(
        "phi = self.shared(x¦)\n",
        'self.experts(phi if self.form == "serial" else x¦)')),
])
