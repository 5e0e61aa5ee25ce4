"""Mistakes that the properties of test_ssd.py must catch."""

from planting import mistakes
from test_layers import has
from test_ssd import (
    agree,
    each_block_costs_the_same,
    steps_are_wide,
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
    log = F.pad(log_decay[..., -1].cumsum(1), (0, 0, 0, 0, 1, 0))
    later = torch.ones(log.shape[1], log.shape[1]).triu(1).bool()[:, :, None, None]
    decay = (log[:, :, None] - log[:, None]).masked_fill(later, -torch.inf).exp()
    decay = repeat(decay, "b t s g i -> b t s g 1 (i p)", p=p)
    carried = (decay * written[:, None]).sum(dim=AXIS)
    incoming, state = carried[:, :-1].unbind(1), carried[:, -1]"""
SOURCES = (STEP_3, STEP_3_OF_THE_LISTING.replace("AXIS", "2"))
TARGETS = (STEP_3, STEP_3_OF_THE_LISTING.replace("AXIS", "1"))
ALL_CHUNKS_AT_ONCE = ("CHUNKS_PER_BLOCK = 16", "CHUNKS_PER_BLOCK = 10**6")
TILED = "t.repeat_interleave(n_heads // g, dim=-2)", "torch.cat([t] * (n_heads // g), dim=-2)"
PADDED = "padded_rows_and_what_goes_on_from_them_are_the_definition_of_the_rows_alone"
STEPS = ".split(x.shape[1], 1)[0]"
NO_STEPS = """
        if padding_mask is not None:
            dt = dt.masked_fill(~padding_mask[..., None], 0)"""
CACHED = "(None, None) if cache is None else cache\n"

# fmt: off
MISTAKES = mistakes([
    (agree, "chunked", {
        "sum over the target chunks": [TARGETS],
        "tiled groups": [("(g i)", "(i g)", 6)]}),
    (each_block_costs_the_same, "chunked", {
        "all chunks with all chunks": [SOURCES, ALL_CHUNKS_AT_ONCE]}),
    (agree, "matrix", {
        "decay that includes the token's own step": [(".tril(-1)", ".tril()")]}),
    (steps_are_wide, "SSD, rope", {
        "steps in sixteen bits": [
            ("self.dt_proj(x).to(wide) + self.dt_bias.to(wide)",
             "self.dt_proj(x) + self.dt_bias")]}),
    (has, "SSD, decay", PADDED, {
        "padding lets the state decay": [
            (f"{STEPS}{NO_STEPS}", STEPS)]}),
    (has, "SSD, rope", "shift_of_positions", {
        "only B is turned": [
            ("B, C = _apply_rope(B, cos, sin), _apply_rope(C, cos, sin)",
             "B = _apply_rope(B, cos, sin)")]}),
    (has, "SSD, conv", "pieces_equal_one_pass", {
        "history forgotten": [(CACHED, CACHED.replace("cache\n", "(cache.state, None)\n"))]}),
])

# By the table of layers, and by test_ssd.py.
HELD = [mistake.asked() for mistake in MISTAKES if mistake.has_property in (has, steps_are_wide)]
