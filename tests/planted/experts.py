"""Mistakes of the papers, and of thought, that the properties of test_experts.py must catch."""

from planting import detached, mistakes
from test_experts import (
    asks_once,
    balance_is_the_formula,
    balance_raises_the_entropy,
    each_expert_sees_its_tokens,
    experts_share_one_matrix,
    is_born_the_same,
    is_its_equation,
    routes_in_float32_under_autocast,
    what_is_idle_gets_no_gradient,
)
from test_layer_gradients import learns_as_defined

from cheems_ref import experts

ROOMS = (experts,)

EXPANSIVE = "x * torch.sigmoid(self.gates[i](x))"
SHARED_V = "expert.V = self.experts[-1].V"

# fmt: off
MISTAKES = mistakes([
    (each_expert_sees_its_tokens, {
        "every expert on every token": [
            ("expert(i, tokens[token])", "expert(i, tokens)[token]")]}),
    (asks_once, "MoE", {
        "a question to each expert": [("if len(token) or", "if token.any() or")]}),
    (is_its_equation, "MoE", {
        "softmax of the chosen": [
            ("scores.softmax(dim=-1).topk(self.k, dim=-1)\n",
             "scores.topk(self.k, dim=-1)\n        gates = gates.softmax(dim=-1)\n")]}),
    (is_its_equation, "SharedExpertMoE", {
        "shared expert routed too": [
            ("return self.shared(x) +", "return self.route(x)[0][..., :1] * self.shared(x) +")]}),
    (is_its_equation, "ExpansiveMoE", {
        "gate without an activation": [(EXPANSIVE, "x * self.gates[i](x)")],
        "router on s": [
            ("(self.shared(x), *self.route(x),",
             "(self.shared(x), *self.route(self.shared(x)),")]}),
    (experts_share_one_matrix, "CohesiveMoE", {
        "equal, not shared": [
            (SHARED_V, "expert.V.load_state_dict(self.experts[0].V.state_dict())")]}),
    (is_born_the_same, "CohesiveMoE", {
        "V of the first": [(SHARED_V, "expert.V = self.experts[0].V")]}),
    (what_is_idle_gets_no_gradient, "CohesiveMoE", {
        "the shared matrix, too": [
            ("for p in part.parameters()} - active", "for p in part[self.k :].parameters()}")]}),
    (routes_in_float32_under_autocast, "MoE", {
        "autocast chooses": [("with autocast_off(x.device):", "if True:")]}),
    (balance_is_the_formula, {
        "gates not normalized": [("share / gates.sum()", "share")]}),
    (balance_raises_the_entropy, {
        "upside down": [("(choices *", "((1 - choices) *")]}),
    (learns_as_defined, "state mixer", "ExpansiveMoE", detached(
        "_mix_experts(self.shared(x), *self.route(x¦),")),
])
