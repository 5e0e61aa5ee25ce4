"""Rotary positions: every function against its definition, the theorem, and planted mistakes.

As in test_ssd.py, the properties are functions of a module. The positive tests hand them
`cheems_ref.rope`, the negative controls a copy of it with one planted mistake.
"""

import itertools
import math
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import plant
from properties import normal

import cheems_ref.rope as rope
from cheems_ref.verify import check, must_differ

GRID = [(2, 10_000.0), (6, 500.0), (10, 1e6), (64, 10_000.0)]
EPS = 2.0**-52  # from 1 to the next float64
FAR = 1_048_576


def positions(b=2, l=5, top=100_000):
    """Random positions, different ones in every row, among them 0 and top."""
    ids = torch.randint(0, top + 1, (b, l), generator=torch.Generator().manual_seed(0))
    ids[0, 0], ids[-1, -1] = 0, top
    return ids


def turned(m, x, position_ids, base=10_000.0):
    return m.apply_rope(x, *m.rope_cos_sin(position_ids, x.shape[-1], base, dtype=x.dtype))


def matrices(m, position_ids, dim, base=10_000.0, pairing="half"):
    """rotation_matrix at every position, (*position_ids.shape, dim, dim)."""
    flat = [m.rotation_matrix(float(i), dim, base, pairing) for i in position_ids.flatten()]
    return torch.stack(flat).view(*position_ids.shape, dim, dim)


def within(name, actual, expected, bound):
    """Check every entry against its own bound."""
    ratio = (actual.double() - expected.double()) / bound
    check(name, ratio, torch.zeros_like(ratio), atol=1.0)


# --- properties of a module m -----------------------------------------------------------------


def frequencies_are_the_formula(m, dim=10, base=500.0):
    want = torch.tensor([base ** (-2 * k / dim) for k in range(dim // 2)], dtype=torch.float64)
    got = m.rope_frequencies(dim, base)
    check("θ_k = base^(-2k/dim)", got, want)
    within("θ_k to its last digits", got, want, 4 * EPS * want)


def turns_vectors(m, dim=10, base=500.0):
    """With as many heads as tokens, so that one cannot pass for the other unseen."""
    x, ids = normal(2, 4, 4, dim), positions(2, 4)
    got = turned(m, x, ids, base)
    angles = ids[..., None, None] * m.rope_frequencies(dim, base)
    z = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * angles)
    check("multiplication by e^(iφ)", got, torch.cat([z.real, z.imag], -1), tol=1e-12)
    want = torch.einsum("bltd,blhd->blht", matrices(m, ids, dim, base), x)
    check("multiplication by R_t", got, want, tol=1e-12)


def matrix_is_its_blocks(m, dim=6, base=500.0):
    for pairing, position in itertools.product(("half", "interleaved"), (0.0, 1.0, 7.5, -3.0)):
        want = torch.zeros(dim, dim, dtype=torch.float64)
        for k in range(dim // 2):
            u, v = (k, k + dim // 2) if pairing == "half" else (2 * k, 2 * k + 1)
            angle = position * base ** (-2 * k / dim)
            want[u, u] = want[v, v] = math.cos(angle)
            want[u, v], want[v, u] = -math.sin(angle), math.sin(angle)
        check(f"R_t, {pairing}", m.rotation_matrix(position, dim, base, pairing), want, tol=1e-14)


def matrices_form_a_group(m, dim=10, base=500.0):
    steps = ((1.0, 2.0), (-5.0, 3.0), (0.5, 12.25), (100_000.0, -99_990.0))
    for pairing, (a, b) in itertools.product(("half", "interleaved"), steps):
        A, B, C, back = (m.rotation_matrix(i, dim, base, pairing) for i in (a, b, a + b, -a))
        check("R_a R_b = R_{a+b}", A @ B, C, tol=2 * EPS * (abs(a) + abs(b) + dim))
        check("R_{-a} = R_aᵀ", back, A.mT, tol=1e-15)
        check("R_aᵀ R_a = 1", A.mT @ A, torch.eye(dim, dtype=torch.float64), tol=1e-15)


def knows_the_distance_only(m, shift=7, dim=10, base=500.0, ids=(0, 1, 2, 5, 11)):
    ids = torch.tensor([ids])
    b, c = (normal(1, ids.shape[1], 1, dim, seed=seed) for seed in (1, 2))
    b, c = b / b.norm(dim=-1, keepdim=True), c / c.norm(dim=-1, keepdim=True)

    def scores(ids):
        return torch.einsum("btld,bsld->ts", turned(m, c, ids, base), turned(m, b, ids, base))

    # An angle is rounded to within EPS / 2 of itself, and there are two in each product.
    tol = 2 * EPS * (ids.max().item() + shift + dim)
    check("⟨R_t c, R_s b⟩ is free of a shift", scores(ids + shift), scores(ids), tol=tol)
    want = torch.einsum("btld,tsde,bsle->ts", c, matrices(m, ids - ids.mT, dim, base), b)
    check("⟨R_t c, R_s b⟩ = ⟨c, R_{s-t} b⟩", scores(ids + shift), want, tol=tol)
    length = turned(m, c, ids + shift, base).norm(dim=-1)
    check("|R_t c| = |c|", length, torch.ones_like(length), tol=1e-14)


def pairings_differ_by_a_permutation(m, dim=6):
    p = m.pairing_permutation(dim)
    assert p.tolist() == [*range(0, dim, 2), *range(1, dim, 2)]
    x, ids = normal(1, 4, 2, dim), torch.tensor([[0, 1, 5, 1000]])
    half, interleaved = (matrices(m, ids, dim, pairing=name) for name in ("half", "interleaved"))
    check("R_half = R_interleaved[p][:, p]", half, interleaved[..., p, :][..., p], tol=1e-15)
    y, permuted = torch.einsum("bltd,blhd->blht", interleaved, x), turned(m, x[..., p], ids)
    check("permute, then turn halves", permuted, y[..., p], tol=1e-14)
    products = [torch.einsum("blhd,bshd->hls", t, t) for t in (y, permuted, turned(m, x, ids))]
    check("inner products of both pairings", products[1], products[0])
    if dim > 2:
        must_differ("inner products without permuting", products[2], products[0])


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
    for dim, length, s in itertools.product((4, 10, 64), (513, 2048, 10**6), (1.0, 2.0, 8.0)):
        got = m.ntk_base(length, dim, 500.0, max_positions=512, scaling_factor=s)
        log = math.log(500) + dim / (dim - 2) * math.log1p(s * (length - 512) / 512)
        assert math.isclose(math.log(got), log, rel_tol=1e-13), (dim, length, s)


def log_scale_is_the_formula(m):
    ids = torch.tensor([[0, 1, 98, 99, 100, 101], [500, 999, 4_095, 100_000, FAR, 3]])
    want = [max(1.0, math.log(i + 1) / math.log(100)) for i in ids.flatten().tolist()]
    want = torch.tensor(want, dtype=torch.float64).view_as(ids)
    check("log scale", m.log_length_scale(ids, 100.0, dtype=torch.float64), want, tol=1e-14)
    got = m.log_length_scale(ids, 100.0, dtype=torch.bfloat16)
    check("log scale in float32", got, want.float(), tol=3e-7)
    many = m.log_length_scale(torch.arange(5000)[None], 100.0)
    assert (many[0, :100] == 1).all() and (many.diff() >= 0).all()


def log_scale_looks_at_one_position(m):
    ids = torch.tensor([[0, 150, 99], [7, 3000, 20]])
    alone = torch.cat([m.log_length_scale(i.view(1, 1), 100.0) for i in ids.flatten()])
    check("free of others", m.log_length_scale(ids, 100.0), alone.view_as(ids), tol=3e-7)


# --- the module has them ----------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "base"), GRID)
def test_every_function_is_its_definition(dim, base):
    frequencies_are_the_formula(rope, dim, base)
    turns_vectors(rope, dim, base)
    matrix_is_its_blocks(rope, dim, base)
    matrices_form_a_group(rope, dim, base)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    half=st.integers(1, 20),
    base=st.floats(1.5, 1e8),
    shift=st.integers(0, FAR),
    ids=st.lists(st.integers(0, FAR), min_size=1, max_size=4),
)
def test_inner_product_knows_the_distance_only_anywhere(half, base, shift, ids):
    knows_the_distance_only(rope, shift, 2 * half, base, ids)


@pytest.mark.parametrize("dim", [2, 4, 6, 10, 64])
def test_pairings_differ_by_a_permutation(dim):
    pairings_differ_by_a_permutation(rope, dim)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_angles_are_never_narrow_and_results_are_rounded_once(dtype):
    angles_are_wide(rope, dtype)
    rounds_once(rope, dtype)


def test_angles_in_bfloat16_would_confuse_neighbours():
    ids = torch.tensor([[256, 257]])
    narrow = (ids[..., None].bfloat16() * rope.rope_frequencies(10).bfloat16()).float().cos()
    check("257 is taken for 256", narrow[:, 1], narrow[:, 0], tol=0.0)
    must_differ("angles in bfloat16", narrow, rope.rope_cos_sin(ids, 10)[0][..., :5])


# --- transformers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    with warnings.catch_warnings(action="ignore"):
        import transformers.models.llama.modeling_llama as llama
    return llama


def config(llama, dim, base, rope_type="default", **options):
    sizes = dict(hidden_size=dim, num_attention_heads=1, max_position_embeddings=512)
    options |= dict(rope_type=rope_type, rope_theta=base)
    return llama.LlamaConfig(**sizes, rope_parameters=options)


@pytest.mark.parametrize(("dim", "base"), GRID)
def test_llama_turns_alike(llama, dim, base):
    q, k = (normal(2, 5, 3, dim, dtype=torch.float32, seed=seed) for seed in (0, 1))
    cos, sin = rope.rope_cos_sin(positions(), dim, base)
    theirs = llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for x, y in zip((q, k), theirs, strict=True):
        check("apply_rope = Llama's", rope.apply_rope(x, cos, sin), y.transpose(1, 2), tol=1e-6)


@pytest.mark.parametrize("top", [2, FAR])
@pytest.mark.parametrize(("dim", "base"), GRID)
def test_llama_has_the_same_cos_and_sin_up_to_rounded_angles(llama, dim, base, top):
    # In units of 2^-24: our angles are off by 2. Llama's exponent 2k/dim is off by 1, magnified by
    # ln(base), its power by 2, its inverse and product by 1 each. cos and sin add 2 on each side.
    ids, theta = positions(top=top), rope.rope_frequencies(dim, base).repeat(2)
    bound = 2.0**-24 * (ids[..., None] * theta * (6 - theta.log()) + 4)
    assert top > 2 or bound.max() <= 1e-6
    theirs = llama.LlamaRotaryEmbedding(config(llama, dim, base))(torch.zeros(1), ids)
    for a, e in zip(rope.rope_cos_sin(ids, dim, base), theirs, strict=True):
        within("cos and sin = Llama's", a, e, bound)


@pytest.mark.parametrize("s", [1.0, 2.0])
@pytest.mark.parametrize("length", [512, 513, 2048])
def test_dynamic_ntk_of_transformers_has_the_same_frequencies(llama, length, s):
    base = rope.ntk_base(length, 10, 500.0, max_positions=512, scaling_factor=s)
    ours, dynamic = rope.rope_frequencies(10, base), config(llama, 10, 500.0, "dynamic", factor=s)
    theirs, _ = llama.ROPE_INIT_FUNCTIONS["dynamic"](dynamic, seq_len=length)
    within("θ_k = transformers'", theirs, ours, 1e-6 * ours)


# --- what hides a mistake ------------------------------------------------------------------------


def test_constant_offset_hides_from_the_theorem():
    from planted.rope import ONE_TOO_FAR  # which takes its properties from this file

    knows_the_distance_only(plant(rope, ONE_TOO_FAR))


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_numbers_out_of_range_are_refused():
    """What a signature cannot say; test_refusals.py asks the rest."""
    ntk = partial(rope.ntk_base, length=8, dim=6, max_positions=4)
    log_scale = partial(rope.log_length_scale, position_ids=torch.arange(10).view(2, 5))
    for function, arguments, message in (
        *(
            (rope.rope_frequencies, dict(dim=dim), f"dim must be even .*got {dim}")
            for dim in (5, 0)
        ),
        (rope.pairing_permutation, dict(dim=5), "dim must be even"),
        (rope.rope_frequencies, dict(dim=6, base=0.0), r"base must be a number in \(0, inf\)"),
        (ntk, dict(dim=2), "dim must be at least 4.*2"),
        (ntk, dict(length=0), r"length must be a number in \[1, inf\), got 0"),
        (ntk, dict(scaling_factor=0.5), r"scaling_factor must be a number in \[1, inf\)"),
        (log_scale, dict(base_length=1.0), r"base_length must be a number in \(1, inf\)"),
    ):
        with pytest.raises(ValueError, match=message):
            function(**arguments)
