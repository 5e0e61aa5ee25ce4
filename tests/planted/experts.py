"""Mistakes of the papers, and of thought, that the properties of test_experts.py must catch."""

from planting import mistakes
from test_experts import (
    balance_is_the_formula,
    each_expert_sees_its_tokens,
    routes_in_float32_under_autocast,
    shared_V_is_computed_once,
    what_is_idle_gets_no_gradient,
)
from test_layers import is_defined

from cheems_ref import experts

ROOMS = (experts,)

# fmt: off
MISTAKES = mistakes([
    (each_expert_sees_its_tokens, {
        "every expert on every token": [
            ("expert(i, tokens[token])", "expert(i, tokens)[token]")]}),
    (is_defined, "MoE", {
        "softmax of the chosen": [
            ("self.router(x).softmax(dim=-1).topk(self.k, dim=-1)\n",
             "self.router(x).topk(self.k, dim=-1)\n        gates = gates.softmax(dim=-1)\n")]}),
    (what_is_idle_gets_no_gradient, "CohesiveMoE", {
        "the shared matrix, too": [
            ("for p in part[: self.k].parameters()", "for p in part[-self.k :].parameters()")]}),
    (shared_V_is_computed_once, {
        "V once per choice": [
            ('def forward(self, x: Tokens) -> Tokens:\n        """Compute y. The shared',
             'def unused(self, x: Tokens) -> Tokens:\n        """Compute y. The shared')],
        "x V of other tokens": [
            ("shared.flatten(0, 1)[token]", "shared.flatten(0, 1)[: len(token)]")]}),
    (routes_in_float32_under_autocast, "MoE", {
        "autocast chooses": [
            ("self.router = Float32Linear(d_model, n_experts)",
             "self.router = nn.Linear(d_model, n_experts, bias=False)")]}),
    (balance_is_the_formula, {
        "gates not normalized": [("share / gates.sum()", "share")]}),
])
