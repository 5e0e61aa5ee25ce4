"""Mistakes that the properties of test_mamba.py must catch."""

from planting import asked, detached, mistakes
from test_layer_gradients import learns_as_defined
from test_mamba import (
    a_seed_gives_its_weights,
    calls_join_up,
    final_state_keeps_nothing_else,
    layer_asks_nothing,
    layer_is_causal,
    layer_is_materialised,
    layer_is_one_graph,
    layer_is_the_definition,
    layer_starts_where_it_should,
    scan_has_its_gradients,
    scan_is_causal,
    scan_is_the_definition,
    scan_is_wide_inside,
    scan_joins_up,
    scan_keeps_rows_apart,
    scan_leaves_its_inputs_alone,
    scan_works_linearly,
    takes_few_steps,
)

from cheems_ref import mamba

ROOMS = (mamba,)
HELD = [asked(layer_is_one_graph)]  # by the test of that name


# fmt: off
MISTAKES = mistakes([
    (scan_is_the_definition, "sequential", {
        "decays what it has just written": [
            ("* wide_A) * state + write", "* wide_A) * (state + write)")],
        "no dt in writes": [("(dt_t * x_t)[..., None] * B_t", "x_t[..., None] * B_t")],
        "ZOH in writes": [
            ("(dt_t * x_t)[..., None] * B_t[:, None]",
             "(torch.expm1(dt_t[..., None] * wide_A) / wide_A * x_t[..., None]) * B_t[:, None]")]}),
    (scan_keeps_rows_apart, "sequential", {
        "dt of the batch's mean": [
            ("torch.exp(dt_t[..., None] *",
             "torch.exp(dt_t.mean(0, keepdim=True)[..., None] *")]}),
    (scan_is_wide_inside, "sequential", {
        "sums in sixteen bits": [
            ('einsum("bdn,bn->bd", state, C_t)',
             'einsum("bdn,bn->bd", state.to(x.dtype), C_t.to(x.dtype))')]}),
    (scan_leaves_its_inputs_alone, "sequential", {
        "writes into the state it was given": [
            ("state = torch.exp(dt_t[..., None] * wide_A) * state + write",
             "state.mul_(torch.exp(dt_t[..., None] * wide_A)).add_(write)")],
        "final state is the initial one's memory": [
            ("return _skip(x.clone(), x, D), state.clone()",
             "return _skip(x.clone(), x, D), state")]}),
    (scan_works_linearly, "sequential", {
        "indexing makes the backward pass quadratic": [
            ("zip(*(t.to(state.dtype).unbind(1) for t in",
             "zip(*([t.to(state.dtype)[:, i] for i in range(t.shape[1])] for t in")]}),
    (final_state_keeps_nothing_else, "parallel", {
        "all states are kept with the last": [("states[:, -1].clone()", "states[:, -1]")]}),
    (scan_is_the_definition, "parallel", {
        "combined in the wrong order": [("a_2 * b_1 + b_2", "a_1 * b_2 + b_1")],
        "decays not combined": [("_scan(a_2 * a_1,", "_scan(a_2,")],
        "reads before it writes": [("states[:, 1:], C", "states[:, :-1], C")],
        "D of another channel": [("y + D.to(y.dtype)", "y + D.flip(0).to(y.dtype)")]}),
    (scan_is_the_definition, "parallel", "l = 8", {
        "odd lengths end early": [
            ("odd[:, : (length - 1) // 2] + b[:, 2::2]",
             "odd[:, : (length - 1) // 2] + b[:, 2::2] * (length % 2 == 0)")]}),
    (scan_is_causal, "parallel", {
        "even places from the token after": [
            ("odd[:, : (length - 1) // 2] + b", "odd[:, -((length - 1) // 2) :] + b")]}),
    (scan_has_its_gradients, "parallel", {
        "no gradient to the even places": [
            ("even = a[:, 2::2] * odd[", "even = a[:, 2::2] * odd.detach()[")],
        "no gradient through the decay": [
            ("decays = torch.exp(dt[..., None] * A)",
             "decays = torch.exp(dt.detach()[..., None] * A)")]}),
    (scan_joins_up, "parallel", {
        "parallel scan forgets its state": [
            ("torch.cat([state[:, None], writes]", "torch.cat([0 * state[:, None], writes]")]}),
    (scan_is_wide_inside, "parallel", {
        "parallel sums in sixteen bits": [
            ('einsum("bldn,bln->bld", states[:, 1:], C)',
             'einsum("bldn,bln->bld", states[:, 1:].to(x.dtype), C.to(x.dtype))')]}),
    (takes_few_steps, "parallel", {
        "one token after the other": [
            ("    a_1, b_1 = (t[:,",
             "    h = _scan(a[:, :-1], b[:, :-1])\n"
             "    return torch.cat([h, a[:, -1:] * h[:, -1:] + b[:, -1:]], dim=1)\n"
             "    a_1, b_1 = (t[:,")]}),
    (calls_join_up, {
        "layer forgets its state": [("C, self.D, state)", "C, self.D, None)")],
        "layer forgets its convolution": [
            ("self.conv, history=history)", "self.conv, history=None)")]}),
    (layer_is_the_definition, {
        "x and z exchanged": [("u, z = self.in_proj", "z, u = self.in_proj")],
        "gate without silu": [("y * F.silu(z)", "y * z.sigmoid()")],
        "B and C exchanged": [("dt, B, C = inner", "dt, C, B = inner")],
        "step size not through softplus": [
            ("F.softplus(self.dt_proj", "torch.exp(self.dt_proj")],
        "A positive in the exponent": [
            ("-self.A_log.to(wide).exp()", "-(-self.A_log.to(wide)).exp()")]}),
    (layer_is_the_definition, False, {
        "control looks at the input": [
            ("self.constant.expand(*u.shape[:2], -1)",
             "self.constant * u.mean(-1, keepdim=True)")]}),
    (layer_is_causal, {
        "scan of the layer backwards in time": [("scan(u, dt, A", "scan(u.flip(1), dt, A")]}),
    (layer_starts_where_it_should, {
        "A starts at -1 everywhere": [
            ("dtype=self.A_log.dtype).log())", "dtype=self.A_log.dtype) * 0)")],
        "dt_bias is dt": [("dt + torch.log(-torch.expm1(-dt))", "dt")]}),
    (a_seed_gives_its_weights, {
        "convolution drawn before the maps": [
            ("torch.empty(d_inner, d_conv)", "torch.empty(d_inner, d_conv).uniform_()")],
        "a map drawn twice": [
            ("        bound = self.conv",
             "        self.x_proj.reset_parameters()\n        bound = self.conv")]}),
    (layer_is_materialised, {
        "convolution not drawn": [("        nn.init.uniform_(self.conv, -bound, bound)\n", "")],
        "D not set": [("        nn.init.ones_(self.D)\n", "")]}),
    (layer_is_one_graph, {
        "a question breaks the graph": [
            ("        y, state = scan(u,",
             "        A = A if (A < 0).all() else -A\n"
             "        y, state = scan(u,")]}),
    (layer_asks_nothing, {
        "layer checks values": [
            ("        y, state = scan(u,",
             "        _check(u, dt, A, B, C, self.D, state)\n"
             "        y, state = scan(u,")]}),
    (learns_as_defined, "Mamba", True, "parallel", detached(
        "self.in_proj(x¦).chunk",
        "short_convolution(u¦, self.conv",
        "self.x_proj(u¦)",
        "self.dt_proj(dt¦)",
        "scan(u¦, dt, A, B, C,",
        "scan(u, dt¦, A, B, C,",
        "scan(u, dt, A, B¦, C,",
        "scan(u, dt, A, B, C¦,",
        "self.out_proj(y¦ * F.silu(z))",
        "self.out_proj(y * F.silu(z¦))")),
    (learns_as_defined, "Mamba", False, "sequential", detached(
        "self.in_proj(x¦).chunk",
        "scan(u¦, dt, A, B, C,")),
])
