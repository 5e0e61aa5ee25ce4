"""Mistakes in experts that the properties of test_experts.py must catch."""

from planting import detached, mistakes
from test_experts import (
    asks_once,
    balance_is_the_formula,
    balance_pushes_down_what_is_chosen_too_often,
    balance_raises_the_entropy,
    each_expert_sees_its_tokens,
    experts_share_one_matrix,
    is_born_the_same,
    is_its_equation,
    keeps_tokens_apart,
    route_is_sound,
    routes_in_float32_under_autocast,
    statistics_count,
    what_is_idle_gets_no_gradient,
)
from test_layer_gradients import learns_as_defined

from cheems_ref import experts

ROOMS = (experts,)

OF_CHOICES = "gates.flatten()[order]"
ROUTER = "scores.softmax(dim=-1).topk(self.k, dim=-1)\n"
EXPANSIVE = "x * torch.sigmoid(self.gates[i](x))"
GATED, SHARED_V = "active * F.silu(_neurons(tokens, gate, rows))", "expert.V = self.experts[-1].V"

# fmt: off
MISTAKES = mistakes([
    (keeps_tokens_apart, "MoE", {
        "gates' rows read as tokens": [(OF_CHOICES, "gates.transpose(0, 1).flatten()[order]")],
        "choices read as tokens": [
            ("indices.shape[-1], indices.flatten()", "indices.shape[-1], indices.mT.flatten()")]}),
    (each_expert_sees_its_tokens, {
        "gates of another token": [(OF_CHOICES, "gates.roll(1, 1).flatten()[order]")],
        "gate of the first choice": [
            (OF_CHOICES, "gates[..., :1].expand_as(gates).flatten()[order]")],
        "every expert on every token": [
            ("expert(i, tokens[token])", "expert(i, tokens)[token]")],
        "every expert called": [("if len(token) or torch.is_grad_enabled():", "if True:")],
        "in training, too, only those chosen": [
            ("len(token) or torch.is_grad_enabled()", "len(token)")],
        "the last choice only": [("y.index_add_(0,", "y.index_copy_(0,")]}),
    (asks_once, "MoE", {
        "a question to each expert": [("if len(token) or", "if token.any() or")],
        "the extremes asked for": [
            ("_count(choices, n_experts).tolist()",
             "torch.bincount(choices, minlength=n_experts).tolist()")]}),
    (is_born_the_same, "CohesiveMoE", {
        "V of the first": [(SHARED_V, "expert.V = self.experts[0].V")]}),
    (what_is_idle_gets_no_gradient, "CohesiveMoE", {
        "the shared matrix, too": [
            ("set(self.experts[self.k :].parameters()) - active",
             "set(self.experts[self.k :].parameters())")]}),
    (what_is_idle_gets_no_gradient, "ExpansiveMoE", {
        "no gates": [("super().inactive_parameters() + gates", "super().inactive_parameters()")]}),
    (keeps_tokens_apart, "MoE, renormalized", {
        "sum over the tokens": [("gates.sum(dim=-1,", "gates.sum(dim=1,")]}),
    (route_is_sound, "MoE, renormalized", {
        "sum over the tokens": [("gates.sum(dim=-1,", "gates.sum(dim=1,")]}),
    (routes_in_float32_under_autocast, "MoE", {
        "autocast chooses": [("with autocast_off(x.device):", "if True:")]}),
    (is_its_equation, "MoE", {
        "softmax of the chosen": [
            (ROUTER,
             ROUTER.replace("softmax(dim=-1).", "") +
             "        gates = gates.softmax(dim=-1)\n")]}),
    (is_its_equation, "SharedExpertMoE", {
        "shared expert routed too": [
            ("return self.shared(x) +", "return self.route(x)[0][..., :1] * self.shared(x) +")]}),
    (is_its_equation, "CohesiveMoE", {
        "nothing shared": [(SHARED_V, "pass")]}),
    (experts_share_one_matrix, "CohesiveMoE", {
        "equal, not shared": [
            (SHARED_V, "expert.V.load_state_dict(self.experts[0].V.state_dict())")],
        "W shared": [(SHARED_V, "expert.W = self.experts[0].W")]}),
    (is_its_equation, "ExpansiveMoE", {
        "no gate": [(EXPANSIVE, "x")],
        "gate without an activation": [(EXPANSIVE, "x * self.gates[i](x)")],
        "gate on x": [
            (EXPANSIVE, EXPANSIVE.replace("x *", "self.shared(x) *")),
            ("mix_experts(self.shared(x),", "mix_experts(x,")],
        "router on s": [
            ("(self.shared(x), *self.route(x),",
             "(self.shared(x), *self.route(self.shared(x)),")]}),
    (statistics_count, {
        "load not normalized": [(".double() / max(1, indices.numel())", ".double()")],
        "entropy in bits": [("math.log(max(2, n_experts))", "math.log(2)")]}),
    (balance_is_the_formula, {
        "gates not normalized": [("share / gates.sum()", "share")]}),
    (balance_pushes_down_what_is_chosen_too_often, {
        "upside down": [("(choices *", "((1 - choices) *")]}),
    (balance_raises_the_entropy, {
        "upside down": [("(choices *", "((1 - choices) *")]}),
    (learns_as_defined, "state mixer", "MoE", detached(
        "self.router(x¦.to(self.router.weight.dtype))",
        "return _mix_experts(x¦, *self.route(x), self.expert",
        "return _mix_experts(x, *self.route(x¦), self.expert",
        "gate[:, None]¦ * expert(i, tokens[token])",
        "return self.experts[i](x¦)\n\n    def inactive_parameters")),
    (learns_as_defined, "state mixer", "SharedExpertMoE", detached(
        "self.shared(x¦) + super().forward(x)",
        "self.shared(x) + super().forward(x¦)")),
    (learns_as_defined, "state mixer", "CohesiveMoE", detached(
        "return _mix_experts(x¦, *self.route(x), self.expert",
        "return _mix_experts(x, *self.route(x¦), self.expert")),
    (learns_as_defined, "state mixer", "ExpansiveMoE", detached(
        "_mix_experts(self.shared(x¦), *self.route(x),",
        "_mix_experts(self.shared(x)¦, *self.route(x),",
        "_mix_experts(self.shared(x), *self.route(x¦),",
        "self.experts[i](x¦ * torch.sigmoid(self.gates[i](x)))",
        "self.experts[i](x * torch.sigmoid(self.gates[i](x¦)))")),
])
