"""Mistakes that the properties of test_rope.py must catch."""

from planting import mistakes
from test_rope import (
    angles_are_wide,
    knows_the_distance_only,
    log_scale_is_the_formula,
    matrix_is_its_blocks,
    turns_vectors,
)

from cheems_ref import rope

ROOMS = (rope,)

ONE_TOO_FAR = ("position_ids[..., None].to", "(position_ids + 1)[..., None].to")
REPEATED = ("torch.cat([angles, angles], dim=-1)", "angles.repeat_interleave(2, dim=-1)")

# fmt: off
MISTAKES = mistakes([
    (turns_vectors, {
        "positions count from 1": [ONE_TOO_FAR],
        "rotated backwards": [("[-second, first]", "[second, -first]")],
        "rotated by the index of the head": [("[:, :, None]", "[:, None]", 2)]}),
    (angles_are_wide, {
        "positions in bfloat16": [
            ("position_ids[..., None].to(frequencies.dtype)",
             "position_ids[..., None].bfloat16()")]}),
    (knows_the_distance_only, {
        "angles of neighbours, halves rotated": [REPEATED]}),
    (matrix_is_its_blocks, {
        "distance without its sign": [("angles = position *", "angles = abs(position) *")]}),
    (log_scale_is_the_formula, {
        "n of the longest row": [("= n.log()", "= n.max().expand_as(n).log()")]}),
])
