"""Mistakes that the properties of test_ssd.py must catch."""

import math
from functools import partial

from planting import asked, detached, mistakes
from test_layer_gradients import learns_as_defined
from test_ssd import (
    a_single_token_takes_the_step,
    agree,
    agree_in_gradient,
    asks_nothing,
    calls_join_up,
    compiles,
    each_block_costs_the_same,
    has_dtypes_and_accuracy,
    is_born_right,
    is_causal,
    keeps_its_digits,
    keeps_what_is_not_finite,
    layer_is_the_definition,
    leaves_its_inputs_alone,
    only_distances_enter,
    padding_changes_nothing,
    positions_at_padding_are_not_looked_at,
    starts_afresh_at_a_reset,
    works_block_by_block,
)

import cheems_ref.ssd as ssd

ROOMS = (ssd,)
HELD = [asked(compiles, "rope")]  # by test_layer_is_one_graph

# Step 3 as WM Listing 3 has it, a product of all chunks with all chunks: decay[target, source]
# times what each source wrote, then a sum over the sources. As printed it sums over the targets.
STEP_3 = """\
        incoming = []
        for decay, write in zip(over_chunk.unbind(1), writes.unbind(1), strict=True):
            incoming.append(state)
            state = torch.addcmul(write, decay, state)"""
STEP_3_OF_THE_LISTING = """\
        written = torch.cat((state[:, None], writes), dim=1)
        log = F.pad(A_cumsum[..., -1].cumsum(1), (0, 0, 0, 0, 1, 0))
        later = torch.ones(log.shape[1], log.shape[1]).triu(1).bool()[:, :, None, None]
        decay = (log[:, :, None] - log[:, None]).masked_fill(later, -torch.inf).exp()
        decay = repeat(decay, "b t s g i -> b t s g 1 (i p)", p=p)
        carried = (decay * written[:, None]).sum(dim=AXIS)
        incoming, state = carried[:, :-1].unbind(1), carried[:, -1]"""
SOURCES = (STEP_3, STEP_3_OF_THE_LISTING.replace("AXIS", "2"))
TARGETS = (STEP_3, STEP_3_OF_THE_LISTING.replace("AXIS", "1"))
ALL_CHUNKS_AT_ONCE = ("CHUNKS_PER_BLOCK = 16", "CHUNKS_PER_BLOCK = 10**6")
TILED = (
    "t.repeat_interleave(n_heads // g, dim=-2)",
    "torch.cat([t] * (n_heads // g), dim=-2)",
)
COLUMNS = (
    "_cos_sin(position_ids,",
    "_cos_sin(position_ids * 0 + torch.arange(x.shape[1]),",
)
STEP = 'decay * state + einsum("bh,bhp,bhn->bhpn", dt, x, B)'
PROJECT = "        channels = [self.x_proj(x)"
CACHED = "(None, None) if cache is None else cache\n"

# fmt: off
MISTAKES = mistakes([
    (agree, "chunked", {
        "sum over the target chunks": [TARGETS],
        "reads decay one step short": [
            ("from_start = A_cumsum.exp()",
             'from_start = (A_cumsum - dt * rearrange(A, "(g i) -> g i 1", g=g)).exp()')],
        "writes decay one step too far": [
            ("to_end = (A_cumsum[..., -1:] - A_cumsum)",
             "to_end = (A_cumsum[..., -1:] - A_cumsum.roll(1, -1))")],
        "tiled groups": [("(g i)", "(i g)", 6)],
        "triangle one too low": [("(C @ B.mT).tril()", "(C @ B.mT).tril(-1)")],
        "no dt inside chunks": [("* L) @ V", "* L) @ X")],
        "no dt in writes": [("to_end[..., None] * V", "to_end[..., None] * X")],
        "a chunk reads what it wrote": [
            ("            incoming.append(state)\n", ""),
            ("addcmul(write, decay, state)",
             "addcmul(write, decay, state); incoming.append(state)")],
        "final state one chunk early": [
            ('rearrange(state, "b g n (i p)', 'rearrange(incoming[-1], "b g n (i p)')],
        "filled up in front": [("+ (0, count)", "+ (count, 0)")]}),
    (is_causal, "chunked", {
        "sum over the target chunks leaks": [TARGETS],
        "no triangle": [("(C @ B.mT).tril()", "(C @ B.mT)")],
        "triangle one too high": [("(C @ B.mT).tril()", "(C @ B.mT).tril(1)")]}),
    (agree, "chunked", "blocks of chunks are crossed", {
        "state lost between blocks": [
            ("V = dt[..., None] * X\n",
             "V, state = dt[..., None] * X, state * (not outputs)\n")]}),
    (works_block_by_block, "chunked", {
        "blocks of rows": [
            ("t.split(CHUNKS_PER_BLOCK, dim=1)", "t.split(CHUNKS_PER_BLOCK, dim=0)")],
        "all chunks at once": [ALL_CHUNKS_AT_ONCE]}),
    (agree, "chunked", "large dt", {
        "overflow above the diagonal": [(".tril_().exp_()", ".exp_()")]}),
    (keeps_its_digits, "chunked", {
        "running sums in float32": [
            ("torch.float32 if x.is_mps else torch.float64", "torch.float32")]}),
    (starts_afresh_at_a_reset, "chunked", {
        "a reset drowns the decays after it": [(".clamp(min=-750)", "")],
        "a reset keeps a little": [("min=-750", "min=-10")]}),
    (partial(starts_afresh_at_a_reset, rate=1e300), "quadratic", {
        "differences of running sums": [
            ("    steps = repeat(dt * A, \"b t h -> b h t s\", s=dt.shape[1]).tril(-1)\n"
             "    decay = steps.cumsum(dim=-2).exp().tril()\n",
             "    total = (dt * A).cumsum(1).mT\n"
             "    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()\n")]}),
    (keeps_what_is_not_finite, "recurrent", math.nan, {
        "all tokens by matrix products": [
            ("    outputs = []\n    for x_t",
             "    return ssd_quadratic.__wrapped__(x, dt, A, B, C, state, 0)\n    for x_t")]}),
    (agree_in_gradient, "chunked", {
        "no gradient through the state": [
            ("incoming.append(state)", "incoming.append(state.detach())")]}),
    (has_dtypes_and_accuracy, "chunked", {
        "sums in sixteen bits": [
            ("core(*(t.to(state.dtype) for t in (x, dt, A, B, C)), state, chunk_size)",
             "core(*(t.to(x.dtype) for t in (x, dt, A, B, C, state)), chunk_size)"),
            ("return _skip(y, x, D), state\n\n\ndef _skip",
             "return _skip(y, x, D), state.float()\n\n\ndef _skip")]}),
    (each_block_costs_the_same, "chunked", {
        "all chunks with all chunks": [SOURCES, ALL_CHUNKS_AT_ONCE],
        "indexing makes the backward pass quadratic": [
            ALL_CHUNKS_AT_ONCE,
            ("writes.unbind(1)", "[writes[:, i] for i in range(writes.shape[1])]")]}),
    (each_block_costs_the_same, "quadratic", {
        "the form itself is not linear": []}),
    (agree, "quadratic", {
        "decay off by one": [(".tril(-1)", ".tril()")],
        "no initial state": [("from_start, C, state)", "from_start, C, 0 * state)")],
        "no dt in writes": [("to_end * dt, x, B", "to_end, x, B")]}),
    (is_causal, "quadratic", {
        "no triangle": [(".exp().tril()", ".exp()")]}),
    (agree, "matrix", {
        "decay off by one": [(".tril(-1)", ".tril()")],
        "tiled groups": [TILED],
        "B and C exchanged": [('"bthn,bshn->bhts", C, B', '"bthn,bshn->bhts", B, C')]}),
    (agree, "step", {
        "decays what it has just written": [
            (STEP, STEP.replace("state + ", "(state + ") + ")")],
        "no dt in writes": [('"bh,bhp,bhn->bhpn", dt, x', '"bhp,bhn->bhpn", x')],
        "tiled groups": [TILED]}),
    (leaves_its_inputs_alone, "step", {
        "writes into the state it was given": [("decay * state + ", "state.mul_(decay) + ")]}),
    (agree, "recurrent", {
        "D of another head": [("y + D[:, None]", "y + D.flip(0)[:, None]")],
        "no initial state": [(" if state is None else state\n    if", "\n    if")]}),
    (a_single_token_takes_the_step, "auto", {
        "a token takes the chunked form": [("alone = x.shape[1] == 1", "alone = False")]}),
    (a_single_token_takes_the_step, "kernel", {
        "a token takes the chunked kernel": [("alone = x.shape[1] == 1", "alone = False")],
        "the step is asked for a gradient": [
            (' in ("auto", "kernel") and not torch.is_grad_enabled()',
             ' in ("auto", "kernel")')],
        "the step of torch for that of the kernel": [
            ("B[:, 0], C[:, 0], state, D, backend)", 'B[:, 0], C[:, 0], state, D, "auto")')],
        "the step forgets D": [
            ("B[:, 0], C[:, 0], state, D, backend)",
             "B[:, 0], C[:, 0], state, None, backend)")]}),
    (padding_changes_nothing, "decay", {
        "padding lets the state decay": [
            ("dt = dt.masked_fill(~padding_mask[..., None], 0)", "dt = dt + 0")],
        "padding is looked at": [
            ("x = x.masked_fill(~padding_mask[..., None], 0)", "x = x + 0")]}),
    (calls_join_up, "decay", {
        "forgets its cache": [(CACHED, CACHED.replace("cache\n", "(None, cache.conv)\n"))]}),
    (layer_is_the_definition, "decay", {
        "step size not through softplus": [("F.softplus(self", "torch.exp(self")],
        "heads and widths exchanged": [
            ("values.unflatten(-1, (self.n_heads, -1))",
             "values.unflatten(-1, (-1, self.n_heads)).mT")]}),
    (padding_changes_nothing, "rope", {
        "positions count columns": [COLUMNS],
        "all but padding stands at position 0": [
            ("            cos, sin = _cos_sin(",
             "            if padding_mask is not None:\n"
             "                position_ids = position_ids.masked_fill(padding_mask, 0)\n"
             "            cos, sin = _cos_sin(")]}),
    (calls_join_up, "rope", {
        "positions restart with every call": [COLUMNS]}),
    (positions_at_padding_are_not_looked_at, "rope", {
        "positions count from the smallest, at padding too": [
            ("_cos_sin(position_ids,",
             "_cos_sin(position_ids - position_ids.amin(1, keepdim=True),")]}),
    (only_distances_enter, "rope", {
        "only B is turned": [("_apply_rope(C, cos, sin)", "C")],
        "C is turned the wrong way": [("apply_rope(C, cos, sin)", "apply_rope(C, cos, -sin)")]}),
    (layer_is_the_definition, "rope", {
        "both are turned the wrong way": [
            ("_cos_sin(position_ids,", "_cos_sin(position_ids.max() - position_ids,")],
        "the base is not handed on": [
            ("B.shape[-1], self.rope_base,", "B.shape[-1], 10_000.0,")]}),
    (asks_nothing, "rope", {
        "the device is asked whether a step is negative": [
            (PROJECT, "        if (dt < 0).any():\n            raise ValueError\n" + PROJECT)]}),
    (compiles, "rope", {
        "the graph breaks at a number": [
            (PROJECT,
             "        if dt.sum().item() < 0:\n            raise ValueError\n" + PROJECT)]}),
    (is_born_right, "rope", {
        "D is not started anew": [("        nn.init.ones_(self.D)\n", "")]}),
    (is_born_right, "conv", {
        "the taps are not started anew": [
            ("nn.init.uniform_(self.conv, -bound, bound)", "bound")]}),
    (is_born_right, "decay", {
        "drawn in another order": [
            ("        self.reset_parameters()\n",
             "        self.reset_parameters()\n        self.out_proj.reset_parameters()\n")]}),
    (padding_changes_nothing, "conv", {
        "convolution sees padding": [
            ("padding_mask=padding_mask, history=history", "history=history")]}),
    (layer_is_the_definition, "conv", {
        "C is not mixed": [
            ("values, B, C = channels", "values, B, C = (*channels[:2], self.C_proj(x))")]}),
    (calls_join_up, "conv", {
        "history forgotten": [(CACHED, CACHED.replace("cache\n", "(cache.state, None)\n"))],
        "no gradient through the history": [
            (CACHED, CACHED.replace("cache\n", "(cache.state, cache.conv.detach())\n"))]}),
    (learns_as_defined, "SSD", "rope", detached(
        "self.dt_proj(x¦)",
        "self.x_proj(x¦)",
        "self.B_proj(x¦)",
        "self.C_proj(x¦)",
        "[self.x_proj(x¦), self.B_proj(x¦), self.C_proj(x¦)]",
        "_apply_rope(B¦, cos, sin)",
        "_apply_rope(C¦, cos, sin)",
        "self._scan(values¦, dt, A, B, C,",
        "self._scan(values, dt¦, A, B, C,",
        "self.out_proj(y¦.flatten(2))")),
    (learns_as_defined, "SSD", "decay", detached(
        "[self.x_proj(x¦), self.B_proj(x¦), self.C_proj(x¦)]",
        "self._scan(values, dt, A, B¦, C,",
        "self._scan(values, dt, A, B, C¦,")),
    (learns_as_defined, "SSD", "conv", detached(
        "[self.x_proj(x¦), self.B_proj(x¦), self.C_proj(x¦)]",
        "self._convolve(u¦, self.conv,",
        "channels = u¦.split(")),
])
