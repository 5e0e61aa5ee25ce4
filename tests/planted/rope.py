"""Mistakes that the properties of test_rope.py must catch."""

from planting import mistakes
from test_rope import (
    angles_are_wide,
    frequencies_are_the_formula,
    gradient_turns_back,
    is_free_of_the_default_dtype,
    knows_the_distance_only,
    leaves_its_inputs_alone,
    log_scale_is_the_formula,
    log_scale_looks_at_one_position,
    matrices_form_a_group,
    matrix_is_its_blocks,
    ntk_is_the_formula,
    ntk_starts_at_the_trained_length,
    ntk_stretches_the_slowest_wave,
    pairings_differ_by_a_permutation,
    rounds_once,
    turns_vectors,
)

from cheems_ref import rope

ROOMS = (rope,)

ONE_TOO_FAR = ("position_ids[..., None].to", "(position_ids + 1)[..., None].to")
NEIGHBOURS = (
    ("first, second = x.chunk(2, dim=-1)", "first, second = x[..., ::2], x[..., 1::2]"),
    ("torch.cat([-second, first], dim=-1)", "torch.stack([-second, first], dim=-1).flatten(-2)"),
)
CAT = "torch.cat([angles, angles], dim=-1)"
REPEATED = (CAT, "angles.repeat_interleave(2, dim=-1)")
BACKWARDS = (
    "[torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)]",
    "[torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)]",
)
EXPONENT = ("** (dim / (dim - 2))", "** (dim / (dim + 2))")

# fmt: off
MISTAKES = mistakes([
    (frequencies_are_the_formula, {
        "k counts from 1": [("arange(0, dim, 2,", "arange(2, dim + 1, 2,")],
        "exponent without the 2": [("arange(0, dim, 2,", "arange(dim // 2,")]}),
    (is_free_of_the_default_dtype, {
        "frequencies in the default dtype": [
            ("torch.arange(0, dim, 2, dtype=exact, device", "torch.arange(0.0, dim, 2, device")]}),
    (turns_vectors, {
        "positions count from 1": [ONE_TOO_FAR],
        "positions of the first row for all": [
            ("position_ids[..., None].to",
             "position_ids[:1].expand_as(position_ids)[..., None].to")],
        "float32 angles beside float64": [
            ("torch.float64 if dtype == torch.float64 else torch.float32", "torch.float32")],
        "turned backwards": [("[-second, first]", "[second, -first]")],
        "interleaved pairing": [*NEIGHBOURS, REPEATED],
        "turned by the number of the head": [("[:, :, None]", "[:, None]", 2)]}),
    (angles_are_wide, {
        "angles in bfloat16": [(CAT, CAT + ".bfloat16().to(angles.dtype)")],
        "positions in bfloat16": [
            ("position_ids[..., None].to(frequencies.dtype)",
             "position_ids[..., None].bfloat16()")]}),
    (rounds_once, {
        "cos and sin cast to the dtype of x": [
            ("cos[:, :, None]", "cos.to(x.dtype)[:, :, None]"),
            ("sin[:, :, None]", "sin.to(x.dtype)[:, :, None]")],
        "result stays wide": [(".to(x.dtype)", "")]}),
    (knows_the_distance_only, {
        "half turn without a sign": [("[-second, first]", "[second, first]")],
        "angles of neighbours, halves turned": [REPEATED]}),
    (pairings_differ_by_a_permutation, {
        "interleaved pairing, permuted": [*NEIGHBOURS, REPEATED],
        "interleaved matrix backwards, permuted": [BACKWARDS],
        "permutation inverted": [(".view(-1, 2)", ".view(2, -1)")]}),
    (leaves_its_inputs_alone, {
        "writes into x": [("cos[:, :, None] * x", "x.mul_(cos[:, :, None])")]}),
    (gradient_turns_back, {
        "half of the gradient is lost": [("x.chunk", "x.detach().chunk")]}),
    (matrix_is_its_blocks, {
        "half matrix backwards": [
            ("torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)",
             "torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)")],
        "interleaved matrix backwards": [BACKWARDS]}),
    (matrices_form_a_group, {
        "matrix without a sign": [("torch.cat([cos, -sin]", "torch.cat([cos, sin]")],
        "distance without its sign": [("angles = position *", "angles = abs(position) *")]}),
    (ntk_is_the_formula, {
        "exponent d / (d + 2)": [EXPONENT]}),
    (ntk_stretches_the_slowest_wave, {
        "exponent d / (d + 2), slowest wave": [EXPONENT]}),
    (ntk_starts_at_the_trained_length, {
        "no - (s - 1)": [(" - (scaling_factor - 1)\n", "\n")],
        "shrinks below the trained length": [("if length <= max_positions:", "if False:")]}),
    (log_scale_is_the_formula, {
        "no max with 1": [(".where(n > base_length, 1.0).clamp(min=1.0)", "")],
        "a query misses itself": [
            ("position_ids.to(_wide(dtype)) + 1", "position_ids.to(_wide(dtype))")],
        "natural logarithm": [(" / math.log(base_length)", "")]}),
    (log_scale_looks_at_one_position, {
        "n of the longest row": [("= n.log()", "= n.max().expand_as(n).log()")]}),
])
