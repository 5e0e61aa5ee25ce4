"""Mistakes that the properties of test_ssd.py must catch."""

from planting import mistakes
from test_ssd import (
    agree,
    agree_in_gradient,
    calls_join_up,
    each_block_costs_the_same,
    is_causal,
    keeps_its_digits,
    only_distances_enter,
    padding_changes_nothing,
    starts_afresh_at_a_reset,
)

import cheems_ref.ssd as ssd

ROOMS = (ssd,)

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
CACHED = "(None, None) if cache is None else cache\n"

# fmt: off
MISTAKES = mistakes([
    (agree, "chunked", {
        "sum over the target chunks": [TARGETS],
        "tiled groups": [("(g i)", "(i g)", 6)],
        "no dt inside chunks": [("* L) @ V", "* L) @ X")]}),
    (is_causal, "chunked", {
        "sum over the target chunks leaks": [TARGETS],
        "no triangle": [("(C @ B.mT).tril()", "(C @ B.mT)")]}),
    (agree, "chunked", "blocks of chunks are crossed", {
        "state lost between blocks": [
            ("V = dt[..., None] * X\n",
             "V, state = dt[..., None] * X, state * (not outputs)\n")]}),
    (keeps_its_digits, "chunked", {
        "running sums in float32": [
            ("torch.float32 if x.is_mps else torch.float64", "torch.float32")]}),
    (starts_afresh_at_a_reset, "chunked", {
        "a reset drowns the decays after it": [(".clamp(min=-750)", "")]}),
    (agree_in_gradient, "chunked", {
        "no gradient through the state": [
            ("incoming.append(state)", "incoming.append(state.detach())")]}),
    (each_block_costs_the_same, "chunked", {
        "all chunks with all chunks": [SOURCES, ALL_CHUNKS_AT_ONCE],
        "indexing makes the backward pass quadratic": [
            ALL_CHUNKS_AT_ONCE,
            ("writes.unbind(1)", "[writes[:, i] for i in range(writes.shape[1])]")]}),
    (agree, "matrix", {
        "decay that includes the token's own step": [(".tril(-1)", ".tril()")],
        "tiled groups": [TILED],
        "B and C exchanged": [('"bthn,bshn->bhts", C, B', '"bthn,bshn->bhts", B, C')]}),
    (padding_changes_nothing, "decay", {
        "padding lets the state decay": [
            ("dt = dt.masked_fill(~padding_mask[..., None], 0)", "dt = dt + 0")]}),
    (padding_changes_nothing, "rope", {
        "positions count columns": [COLUMNS]}),
    (calls_join_up, "rope", {
        "positions restart with every call": [COLUMNS]}),
    (only_distances_enter, "rope", {
        "only B is turned": [("_apply_rope(C, cos, sin)", "C")]}),
    (calls_join_up, "conv", {
        "history forgotten": [(CACHED, CACHED.replace("cache\n", "(cache.state, None)\n"))]}),
])
