"""Rotary positions: formulas, the theorem, precision, and transformers.

As in test_ssd.py, the properties are functions of a module. The planted mistakes hand them a copy
of `cheems_ref.rope`.
"""

import itertools
import math
import warnings
from functools import partial

import definitions
import pytest
import torch
from planting import plant
from properties import normal

import cheems_ref.rope as rope
from cheems_ref.verify import check, must_differ

GRID = [(2, 10_000.0), (10, 1e6), (64, 10_000.0)]  # beside the table's 6 and 500
EPS = 2.0**-52  # from 1 to the next float64
FAR = 1_048_576


def positions(b=2, l=5, top=100_000):
    """Random positions, different ones in every row, among them 0 and top."""
    ids = torch.randint(0, top + 1, (b, l), generator=torch.Generator().manual_seed(0))
    ids[0, 0], ids[-1, -1] = 0, top
    return ids


def turned(m, x, position_ids, base=10_000.0):
    return m.apply_rope(x, *m.rope_cos_sin(position_ids, x.shape[-1], base, dtype=x.dtype))


def matrices(m, position_ids, dim, pairing="half"):
    """rotation_matrix at every position, (*position_ids.shape, dim, dim)."""
    flat = [m.rotation_matrix(float(i), dim, pairing=pairing) for i in position_ids.flatten()]
    return torch.stack(flat).view(*position_ids.shape, dim, dim)


def within(name, actual, expected, bound):
    """Check every entry against its own bound."""
    ratio = (actual.double() - expected.double()) / bound
    check(name, ratio, torch.zeros_like(ratio), atol=1.0)


# --- properties of a module m -----------------------------------------------------------------


def frequencies_are_the_formula(m, dim=10, base=500.0):
    want = torch.tensor([base ** (-2 * k / dim) for k in range(dim // 2)], dtype=torch.float64)
    within("θ_k = base^(-2k/dim)", m.rope_frequencies(dim, base), want, 4 * EPS * want)


def turns_vectors(m, dim=10, base=500.0):
    """With as many heads as tokens, so that one cannot pass for the other unseen."""
    x, ids = normal(2, 4, 4, dim), positions(2, 4)
    want = definitions.rotated(x, ids, base)
    for position_ids in (ids, ids.int()):
        check("times e^(iφ)", turned(m, x, position_ids, base), want, tol=1e-12)


def matrix_is_its_blocks(m, dim=6, base=500.0):
    for pairing, position in itertools.product(("half", "interleaved"), (0.0, 1.0, 7.5, -3.0)):
        want = torch.zeros(dim, dim, dtype=torch.float64)
        for k in range(dim // 2):
            u, v = (k, k + dim // 2) if pairing == "half" else (2 * k, 2 * k + 1)
            angle = position * base ** (-2 * k / dim)
            want[u, u] = want[v, v] = math.cos(angle)
            want[u, v], want[v, u] = -math.sin(angle), math.sin(angle)
        check(f"R_t, {pairing}", m.rotation_matrix(position, dim, base, pairing), want, tol=1e-14)


def knows_the_distance_only(m, shift=7, dim=10):
    ids = torch.tensor([[0, 1, 2, 5, 11]])
    b, c = (normal(1, 5, 1, dim, seed=seed) for seed in (1, 2))

    def scores(ids):
        return torch.einsum("btld,bsld->ts", turned(m, c, ids), turned(m, b, ids))

    check("⟨R_t c, R_s b⟩ is free of a shift", scores(ids + shift), scores(ids))
    want = torch.einsum("btld,tsde,bsle->ts", c, matrices(m, ids - ids.mT, dim), b)
    check("⟨R_t c, R_s b⟩ = ⟨c, R_{s-t} b⟩", scores(ids + shift), want)


def pairings_differ_by_a_permutation(m, dim=6):
    p = m.pairing_permutation(dim)
    x, ids = normal(1, 4, 2, dim), torch.tensor([[0, 1, 5, 1000]])
    half, interleaved = (matrices(m, ids, dim, pairing=name) for name in ("half", "interleaved"))
    check("R_half = R_interleaved[p][:, p]", half, interleaved[..., p, :][..., p], tol=1e-15)
    y = torch.einsum("bltd,blhd->blht", interleaved, x)
    check("permute, then turn halves", turned(m, x[..., p], ids), y[..., p], tol=1e-14)


def angles_are_wide(m, dtype=torch.bfloat16):
    """float32 is off by 2^-24 of an angle for its frequency and as much for the product."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ids = torch.tensor([[0, 1, 255, 256, 257, 4_097, 100_000, FAR - 1, FAR]])
    angles = (ids[..., None] * m.rope_frequencies(10, 500.0)).repeat(1, 1, 2)
    cos, sin = m.rope_cos_sin(ids, 10, 500.0, dtype=dtype)
    for got, truth in ((cos, angles.cos()), (sin, angles.sin())):
        assert got.dtype == wide
        within(f"beside {dtype}", got, truth, torch.finfo(wide).eps * (angles + 1))
        must_differ("positions 256 and 257", got[:, 3], got[:, 4])


def rounds_once(m, dtype=torch.bfloat16):
    x = normal(2, 5, 3, 10, dtype=dtype)
    cos, sin = m.rope_cos_sin(positions(), 10, dtype=dtype)
    got, want = m.apply_rope(x, cos, sin), m.apply_rope(x.double(), cos.double(), sin.double())
    assert got.dtype == dtype
    within("rounded once", got, want, torch.finfo(dtype).eps / 2 * want.abs() + 1e-6)


def ntk_is_the_formula(m):
    for dim, length, s in itertools.product((4, 64), (513, 10**6), (1.0, 8.0)):
        got = m.ntk_base(length, dim, 500.0, max_positions=512, scaling_factor=s)
        log = math.log(500) + dim / (dim - 2) * math.log1p(s * (length - 512) / 512)
        assert math.isclose(math.log(got), log, rel_tol=1e-13), (dim, length, s)


def log_scale_is_the_formula(m):
    ids = torch.tensor([[0, 1, 98, 99, 100, 101], [500, 999, 4_095, 100_000, FAR, 3]])
    want = [max(1.0, math.log(i + 1) / math.log(100)) for i in ids.flatten().tolist()]
    want = torch.tensor(want, dtype=torch.float64).view_as(ids)
    check("log scale", m.log_length_scale(ids, 100.0, dtype=torch.float64), want, tol=1e-14)
    got = m.log_length_scale(ids.int(), 100.0, dtype=torch.bfloat16)
    check("log scale in float32", got, want.float(), tol=3e-7)
    many = m.log_length_scale(torch.arange(5000)[None], 100.0)
    assert (many[0, :100] == 1).all() and (many.diff() >= 0).all()


# --- the module has them ----------------------------------------------------------------------


def test_every_function_is_its_definition():
    for dim, base in GRID:
        frequencies_are_the_formula(rope, dim, base)
        turns_vectors(rope, dim, base)
        matrix_is_its_blocks(rope, dim, base)
        pairings_differ_by_a_permutation(rope, dim)


def test_bases_for_longer_texts():
    ntk_is_the_formula(rope)


def test_angles_are_never_narrow_and_results_are_rounded_once():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        angles_are_wide(rope, dtype)
        rounds_once(rope, dtype)


def test_llama_turns_alike():
    """In one test, since to import it takes seconds."""
    with warnings.catch_warnings(action="ignore"):
        import transformers.models.llama.modeling_llama as llama

    def config(dim, base, rope_type="default", **options):
        sizes = dict(hidden_size=dim, num_attention_heads=1, max_position_embeddings=512)
        options |= dict(rope_type=rope_type, rope_theta=base)
        return llama.LlamaConfig(**sizes, rope_parameters=options)

    for (dim, base), top in itertools.product(GRID, (2, FAR)):
        ids, x = positions(top=top), normal(2, 5, 3, dim, dtype=torch.float32)
        cos, sin = rope.rope_cos_sin(ids, dim, base)
        theirs, _ = llama.apply_rotary_pos_emb(*[x.transpose(1, 2)] * 2, cos, sin)
        check("turned", rope.apply_rope(x, cos, sin), theirs.transpose(1, 2), tol=1e-6)
        # In units of 2^-24: our angles are off by 2. Llama's exponent 2k/dim is off by 1, magnified
        # by ln(base), its power by 2, its inverse and product by 1 each; cos and sin add 2 on each
        # side.
        theta = rope.rope_frequencies(dim, base).repeat(2)
        bound = 2.0**-24 * (ids[..., None] * theta * (6 - theta.log()) + 4)
        theirs = llama.LlamaRotaryEmbedding(config(dim, base))(torch.zeros(1), ids)
        for a, e in zip((cos, sin), theirs, strict=True):
            within("cos and sin", a, e, bound)
    for s, length in itertools.product((1.0, 2.0), (512, 2048)):
        base = rope.ntk_base(length, 10, 500.0, max_positions=512, scaling_factor=s)
        ours, dynamic = rope.rope_frequencies(10, base), config(10, 500.0, "dynamic", factor=s)
        theirs, _ = llama.ROPE_INIT_FUNCTIONS["dynamic"](dynamic, seq_len=length)
        within("θ_k, dynamic NTK", theirs, ours, 1e-6 * ours)


# --- what hides a mistake ---------------------------------------------------------------------


def test_constant_offset_hides_from_the_theorem():
    from planted.rope import ONE_TOO_FAR  # which takes its properties from this file

    knows_the_distance_only(plant(rope, ONE_TOO_FAR))


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_numbers_out_of_range_are_refused():
    """What a signature cannot say; test_refusals.py asks the rest."""
    ntk = partial(rope.ntk_base, length=8, dim=6, max_positions=4)
    log_scale = partial(rope.log_length_scale, position_ids=torch.arange(10).view(2, 5))
    odd = torch.zeros(1, 2, 5)
    for function, arguments, message in (
        (rope.rope_frequencies, dict(dim=5), "dim must be even .*got 5"),
        (rope.rope_frequencies, dict(dim=0), "dim must be even .*got 0"),
        (rope.pairing_permutation, dict(dim=5), "dim must be even"),
        (rope.apply_rope, dict(x=odd[:, :, None], cos=odd, sin=odd), "dim must be even"),
        (rope.rope_frequencies, dict(dim=6, base=0.0), r"base must be a number in \(0, inf\)"),
        (ntk, dict(dim=2), "dim must be at least 4.*2"),
        (ntk, dict(length=0), r"length must be a number in \[1, inf\), got 0"),
        (ntk, dict(scaling_factor=0.5), r"scaling_factor must be a number in \[1, inf\)"),
        (log_scale, dict(base_length=1.0), r"base_length must be a number in \(1, inf\)"),
    ):
        with pytest.raises(ValueError, match=message):
            function(**arguments)
