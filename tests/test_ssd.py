"""SSD: every form against the definition, its properties, and planted mistakes that must show.

The agreement and the properties are functions of a module. The positive tests hand them
`cheems_ref.ssd`; the negative controls hand them a copy of it with one planted mistake and expect
the same functions to fail. So a check that cannot fail fails here.
"""

import contextlib
import itertools
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import properties
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import plant, planted
from properties import (
    forward,
    held,
    is_one_graph,
    leaves_alone,
    moves_nothing_before_it,
    one_entry,
    rows,
    starts_alike,
    work,
    works_linearly,
)
from test_convolution import convolution

import cheems_ref.ssd as ssd_module
from cheems_ref import check as door
from cheems_ref import kernels
from cheems_ref.rope import rope_cos_sin, rotation_matrix
from cheems_ref.ssd import SSD, SSDCache, ssd_step
from cheems_ref.verify import check, check_gradients, must_differ

NAMES = ("x", "dt", "A", "B", "C", "D", "state")
FORMS = ("recurrent", "quadratic", "chunked", "step", "matrix")
SEQUENCE_FORMS = FORMS[:3]
MATRIX_NAMES = ("dt", "A", "B", "C")
POSITIONS = ("rope", "conv", "decay")
STATUS = kernels.kernel_status()
DEVICE = "cuda" if STATUS.mode == "cuda" else "cpu"


def inputs(
    b=2, l=13, h=4, g=2, p=3, n=2, *, dt=(1e-3, 1.0), A=(-16, -1), dtype=torch.float64, seed=0
):
    """Seeded x, dt, A, B, C, D, state; dt log-uniform between two bounds, or one number for all."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    if isinstance(dt, tuple):
        steps = uniform(math.log(dt[0]), math.log(dt[1]), b, l, h).exp()
    else:
        steps = torch.full((b, l, h), dt, dtype=torch.float64)
    tensors = (normal(b, l, h, p), steps, uniform(*A, h), normal(b, l, g, n), normal(b, l, g, n))
    tensors += (normal(h), normal(b, h, p, n))
    dtypes = (dtype, wide, wide, dtype, dtype, wide, wide)
    return tuple(t.to(d) for t, d in zip(tensors, dtypes, strict=True))


def definition(x, dt, A, B, C, D, state):
    """The two equations, one row, one head, one token at a time, and nothing else."""
    (b, length, h, p), heads_per_group = x.shape, x.shape[2] // B.shape[2]
    y, final = [], []
    for i, j in itertools.product(range(b), range(h)):
        H, k = state[i, j], j // heads_per_group
        for t in range(length):
            H = (dt[i, t, j] * A[j]).exp() * H + dt[i, t, j] * torch.outer(x[i, t, j], B[i, t, k])
            y.append(H @ C[i, t, k] + D[j] * x[i, t, j])
        final.append(H)
    y = torch.stack(y) if y else x
    return y.reshape(b, h, length, p).transpose(1, 2), torch.stack(final).reshape(state.shape)


def apply(m, form, x, dt, A, B, C, D, state, chunk_size=4):
    """Any form of module m on one set of inputs: y and the final state, or (y,) if it has none."""
    if form == "matrix":  # knows no initial state: the caller's is zero
        M = m.semiseparable_matrix(dt, A, B, C)
        return (torch.einsum("bhts,bshp->bthp", M, x) + D[:, None] * x,)
    if form == "step":
        y = []
        for t in range(x.shape[1]):
            y_t, state = m.ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], state, D=D)
            y.append(y_t)
        return (torch.stack(y, dim=1) if y else x), state
    options = dict(D=D, chunk_size=chunk_size, initial_state=state, return_final_state=True)
    return getattr(m, f"ssd_{form}")(x, dt, A, B, C, **options)


# Combinations of length and chunk, head and group, step size and decay.
CASES = {
    "three chunks and a ragged end": {},
    "l a multiple of the chunk": dict(l=12),
    "l = chunk": dict(l=4),
    "l < chunk": dict(l=3),
    "l = 1": dict(l=1),
    "l = 0": dict(l=0),
    "chunk = 1": dict(chunk_size=1),
    "blocks of chunks are crossed": dict(
        l=4 * ssd_module.CHUNKS_PER_BLOCK + 3, chunk_size=2, b=1, dt=(1e-3, 1e-1)
    ),
    "more rows than a block has chunks": dict(
        b=ssd_module.CHUNKS_PER_BLOCK + 1, l=5, h=2, g=1, chunk_size=2
    ),
    "g = 1": dict(g=1),
    "g = h": dict(g=4),
    "three heads to a group": dict(h=6),
    "small dt": dict(dt=1e-3),
    "small dt, one chunk": dict(dt=1e-3, l=4, zero_state=True),
    "small dt, no initial state": dict(dt=1e-3, zero_state=True),
    "large dt": dict(dt=(10.0, 100.0)),
    "dt = 0 at some tokens": dict(idle=(0, 3, 4, 5, 12)),
    "dt = 0 everywhere": dict(dt=0.0),
    "A = 0": dict(A=(0, 0)),
    "one of everything": dict(b=1, l=5, h=1, g=1, p=1, n=1, chunk_size=2),
}
DEFAULT = CASES["three chunks and a ragged end"]


def compared(m, form, case):
    """The form and the definition, as functions of the same tensors, and the tensors."""
    case = dict(CASES[case] if isinstance(case, str) else case)
    chunk_size, idle = case.pop("chunk_size", 4), case.pop("idle", ())
    zero_state = case.pop("zero_state", False)
    *tensors, state = inputs(**case)
    tensors[1][:, list(idle)] = 0
    if form == "matrix":
        zero = torch.zeros_like(state)
        return lambda *t: apply(m, form, *t, zero), lambda *t: definition(*t, zero)[:1], tensors
    state = torch.zeros_like(state) if zero_state else state
    return lambda *t: apply(m, form, *t, chunk_size), definition, [*tensors, state]


def agree(m, form, case=DEFAULT):
    """The form and the definition agree in y and the final state."""
    actual, expected, tensors = compared(m, form, case)
    for a, e, name in zip(actual(*tensors), expected(*tensors), ("y", "final state"), strict=False):
        check(f"{form} form = definition, {name}", a, e)


def agree_in_gradient(m, form, case=DEFAULT):
    """So are its derivatives, by all inputs and through both results."""
    actual, expected, tensors = compared(m, form, case)
    # After steps that forget everything, the gradient of A is the rounding of larger terms.
    check_gradients(f"{form} form = definition", actual, expected, tensors, atol=1e-11)


def is_causal(m, form, length=13):
    """Moving token j, in all its inputs, moves y_j and nothing that came before."""
    tensors = inputs(l=length)
    before = apply(m, form, *tensors)[0]
    for j in range(length):
        moved = [t.clone() for t in tensors]
        for i in (0, 1, 3, 4):
            moved[i][:, j] += 1
        after = apply(m, form, *moved)[0]
        check(f"token {j} moves nothing before it", after[:, :j], before[:, :j])
        must_differ(f"token {j} moved", after[:, j], before[:, j])


def leaves_its_inputs_alone(m, form):
    leaves_alone(partial(apply, m, form), *inputs())


def has_dtypes_and_accuracy(m, form, dtype=torch.bfloat16, narrow=False):
    """y has the dtype of x, the state the dtype of the sums; both fit the rounded inputs."""
    tensors = inputs(l=40, n=8, dtype=dtype)
    if narrow:  # dt, A and D in the dtype of x too
        tensors = (*(t.to(dtype) for t in tensors[:6]), tensors[6])
    y, final = apply(m, form, *tensors)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    truth = definition(*(t.double() for t in tensors))
    check(f"{form} form = float64 definition, y", y, truth[0].to(dtype))
    check(f"{form} form = float64 definition, final state", final, truth[1].float())


def keeps_its_digits(m, form):
    """float32 stays exact to rounding where a chunk mixes steps that differ by seven orders."""
    tensors = inputs(l=256, dt=(1e-6, 10.0), dtype=torch.float32)
    truth = apply(ssd_module, "recurrent", *(t.double() for t in tensors))
    for name, got, want in zip(("y", "final state"), apply(m, form, *tensors), truth, strict=True):
        check(f"{form} form with mixed steps, {name}", got.double(), want, tol=2e-6)


def starts_afresh_at_a_reset(m, form, strong=1e20, rate=1.0, dtype=torch.float64):
    """Two tokens forget everything before them, while what they write is of ordinary size; head 0
    forgets at every token, if its rate is huge."""
    *tensors, state = inputs(dtype=dtype)
    size = torch.ones(13, 1, 1, dtype=dtype)
    tensors[1][:, [3, 8]], size[[3, 8]] = strong, 1 / strong
    tensors[2][0] *= rate
    forms = (
        lambda x, *rest, f=f: f(x * size, *rest) for f in (partial(apply, m, form), definition)
    )
    actual, expected = forms
    for name, a, e in zip(
        ("y", "final state"),
        actual(*tensors, state),
        expected(*tensors, state),
        strict=True,
    ):
        check(f"{form} form with resets, {name}", a, e)
    check_gradients(f"{form} form with resets", actual, expected, [*tensors, state])


def keeps_what_is_not_finite(m, form, bad, reach=0):
    """NaN and infinities in x, B or C of token 6 reach no token before token 6 - reach."""
    tensors = inputs()
    before = apply(m, form, *tensors)[0]
    for i in (0, 3, 4):
        spoilt = [t.clone() for t in tensors]
        spoilt[i][:, 6] = bad
        after = apply(m, form, *spoilt)[0]
        assert torch.equal(after[:, : 6 - reach], before[:, : 6 - reach]), (
            f"{NAMES[i]} reaches back"
        )
        assert not after[:, 6].isfinite().all(), f"{NAMES[i]} does not reach its own token"


def blocks_of_chunks(m, form, chunk_size=2):
    """run(n): a number that depends on all of a sequence of n blocks of chunks."""

    def run(blocks):
        length = chunk_size * ssd_module.CHUNKS_PER_BLOCK * blocks
        tensors = [t.requires_grad_() for t in inputs(b=1, l=length, h=2, g=1, p=2)]
        y, state = apply(m, form, *tensors, chunk_size)
        return y.sum() + state.sum()

    return run


def each_block_costs_the_same(m, form):
    works_linearly(blocks_of_chunks(m, form))


def works_block_by_block(m, form):
    """The largest intermediate tensor belongs to one block, for any number of blocks."""
    run = blocks_of_chunks(m, form, chunk_size=32)
    assert len({work(run, blocks).largest for blocks in (1, 2, 4)}) == 1


@contextlib.contextmanager
def noted(*functions):
    """The names of these functions, given as (where it is, its name), as they are called."""
    called = []
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in functions:
            patched.setattr(owner, name, partial(_note, called, name, getattr(owner, name)))
        yield called


def _note(called, name, function, *args, **kwargs):
    called.append(name)
    return function(*args, **kwargs)


def a_single_token_takes_the_step(m, backend):
    """Under no_grad alone: with gradients it takes the chunked kernel, as a sequence does."""
    if not STATUS.available:
        pytest.skip(STATUS.reason)
    kernel = STATUS.mode == "cuda" or backend == "kernel"
    step = ["_ssd_step", "state_update"] if kernel else ["_ssd_step"]
    scan = ["chunk_scan"] if kernel else []
    watched = (m, "_ssd_step"), (kernels, "chunk_scan"), (kernels, "state_update")
    for length, learns, whole, want in (
        (1, False, True, step),
        (1, False, False, step),
        (1, True, True, scan),
        (2, False, True, scan),
    ):
        sizes = dict(b=1, l=length, h=2, g=1)
        *five, D, state = (t.to(DEVICE) for t in inputs(**sizes, dtype=torch.float32))
        five = [t.requires_grad_(learns) for t in five]
        options = dict(D=D, initial_state=state) if whole else {}
        with noted(*watched) as called, torch.set_grad_enabled(learns):
            try:
                got = m.ssd(*five, **options, return_final_state=True, backend=backend)
            except ValueError as error:
                raise AssertionError(f"{called[-1]} is asked for a gradient") from error
        assert called == want, f"{length} tokens, learning {learns}: {called}"
        for name, a, e in zip(
            ("y", "final state"), got, definition(*five, D * whole, state * whole), strict=True
        ):
            check(f"{backend}: {name}", a, e, tol=1e-5)


# --- the forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_form_equals_definition(form, case):
    agree(ssd_module, form, CASES[case])


@pytest.mark.parametrize("case", [c for c in CASES if c != "l = 0"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_those_of_the_definition(form, case):
    agree_in_gradient(ssd_module, form, CASES[case])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_difference_quotients(form):
    # dt and A stay clear of 0, where there are no difference quotients
    sizes = dict(b=1, l=5, h=2, g=1, p=2, dt=(0.1, 1.0), A=(-2, -1), chunk_size=2)
    function, _, tensors = compared(ssd_module, form, sizes)
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in tensors])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    b=st.integers(1, 2),
    l=st.integers(0, 24),
    g=st.integers(1, 3),
    heads_per_group=st.integers(1, 3),
    p=st.integers(1, 3),
    n=st.integers(1, 3),
    chunk_size=st.integers(1, 30),
    dt=st.sampled_from([0.0, 1e-3, (1e-3, 1e-1), (0.1, 1.0), (1.0, 30.0)]),
    seed=st.integers(0, 99),
)
def test_all_forms_agree_on_any_sizes(heads_per_group, **case):
    for form in FORMS:
        agree(ssd_module, form, case | dict(h=case["g"] * heads_per_group))


@pytest.mark.parametrize("backend", ["auto", *SEQUENCE_FORMS])
@pytest.mark.parametrize("length", [1, 13])
def test_ssd_is_the_form_its_backend_names(length, backend):
    *tensors, D, state = inputs(l=length)
    options = dict(D=D, chunk_size=4, initial_state=state, return_final_state=True)
    form = ("recurrent" if length == 1 else "chunked") if backend == "auto" else backend
    got = ssd_module.ssd(*tensors, **options, backend=backend)
    for a, e in zip(got, apply(ssd_module, form, *tensors, D, state), strict=True):
        check(f"{backend} = {form}", a, e)


@pytest.mark.parametrize("form", SEQUENCE_FORMS)
def test_options_left_out_mean_zero(form):
    *tensors, D, state = inputs()
    f = getattr(ssd_module, f"ssd_{form}")
    y = f(*tensors)
    check("no D, no state", y, definition(*tensors, 0 * D, 0 * state)[0])


# --- properties of the forms ------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_nothing_before_a_token_moves_with_it(form):
    is_causal(ssd_module, form)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_and_states_are_values(form):
    leaves_its_inputs_alone(ssd_module, form)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_batch_do_not_meet(form):
    tensors = inputs(b=3)
    moved = [t.clone() for t in tensors]
    for i in (0, 1, 3, 4, 6):
        moved[i][1] += 1
    results = [apply(ssd_module, form, *t) for t in (tensors, moved)]
    for before, after in zip(*results, strict=True):
        check("the rows that stayed", after[[0, 2]], before[[0, 2]])
        must_differ("the row that moved", after[1], before[1])


@pytest.mark.parametrize("cut", [0, 1, 4, 7, 13])
@pytest.mark.parametrize("form", SEQUENCE_FORMS)
def test_two_passes_joined_by_the_state_equal_one(form, cut):
    x, dt, A, B, C, D, state = inputs()
    head = apply(ssd_module, form, x[:, :cut], dt[:, :cut], A, B[:, :cut], C[:, :cut], D, state)
    tail = apply(ssd_module, form, x[:, cut:], dt[:, cut:], A, B[:, cut:], C[:, cut:], D, head[1])
    y, final = apply(ssd_module, form, x, dt, A, B, C, D, state)
    check("y of two passes = of one", torch.cat((head[0], tail[0]), dim=1), y)
    check("state of two passes = of one", tail[1], final)


@pytest.mark.parametrize("form", FORMS[:4])
def test_dt_zero_leaves_the_state_alone(form):
    x, dt, A, B, C, D, state = inputs(dtype=torch.float32)
    same = apply(ssd_module, form, x, 0 * dt, A, B, C, D, state)[1]
    assert torch.equal(same, state)  # to the last bit: 1 · state + 0 · x is not rounded
    idle = dt.clone()
    idle[:, 8:] = 0
    short = (t[:, :8] for t in (x, dt, B, C))
    x_8, dt_8, B_8, C_8 = short
    want = apply(ssd_module, form, x_8, dt_8, A, B_8, C_8, D, state)[1]
    got = apply(ssd_module, form, x, idle, A, B, C, D, state)[1]
    check("idle tokens leave the state alone", got, want)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS[:4])
def test_results_have_their_dtypes_and_float32_accuracy_inside(form, dtype, narrow):
    has_dtypes_and_accuracy(ssd_module, form, dtype, narrow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dt", [(1e-8, 1e-4), (1e-6, 1e3), (10.0, 1e3), 0.0])
def test_extreme_decays_stay_finite_over_65536_tokens(dt, dtype):
    tensors = inputs(b=1, l=65_536, h=2, g=1, p=2, dt=dt, A=(-16, -1e-3), dtype=dtype)
    leaves = [t.requires_grad_() for t in tensors]
    results = apply(ssd_module, "chunked", *leaves, chunk_size=64)
    sum(r.float().mean() for r in results).backward()
    for name, t in (("y", results[0]), ("final state", results[1])):
        assert t.isfinite().all(), name
    for name, t in zip(NAMES, leaves, strict=True):
        assert t.grad.isfinite().all(), f"gradient of {name}"


@pytest.mark.parametrize("form", ["recurrent", "quadratic", "chunked"])
def test_mixed_steps_cost_no_digits(form):
    keeps_its_digits(ssd_module, form)


@pytest.mark.parametrize(
    ("strong", "rate", "dtype"),
    [
        (1e4, 1.0, torch.float64),
        (1e20, 1.0, torch.float64),
        (1e20, 1e300, torch.float64),  # their product is -inf
        (1e4, 1.0, torch.float32),
        (1e20, 1e30, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS[:4])
def test_a_reset_forgets_everything_and_spoils_nothing(form, strong, rate, dtype):
    starts_afresh_at_a_reset(ssd_module, form, strong, rate, dtype)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("form", "reach"), [("recurrent", 0), ("step", 0), ("chunked", 2)])
def test_what_is_not_finite_stays_behind_its_token_or_inside_its_chunk(form, reach, bad):
    keeps_what_is_not_finite(ssd_module, form, bad, reach)


def test_the_quadratic_form_lets_what_is_not_finite_reach_back():
    """The module says so; finite inputs never do, which `is_causal` asks bit by bit."""
    with pytest.raises(AssertionError, match="x reaches back"):
        keeps_what_is_not_finite(ssd_module, "quadratic", math.nan)
    with pytest.raises(AssertionError, match="x reaches back"):
        keeps_what_is_not_finite(ssd_module, "chunked", math.nan)


def test_work_is_linear_in_the_number_of_chunks_and_done_block_by_block():
    each_block_costs_the_same(ssd_module, "chunked")
    works_block_by_block(ssd_module, "chunked")


@pytest.mark.parametrize("backend", ["auto", "kernel"])
def test_a_single_token_takes_the_step_where_no_gradient_is_asked_for(backend):
    a_single_token_takes_the_step(ssd_module, backend)


# --- the layer --------------------------------------------------------------------------------

at_every_position = pytest.mark.parametrize("position", POSITIONS)


# The least of everything that a layer may have; B and C are turned in pairs.
LEAST = dict(n_heads=1, n_groups=1, d_head=1, d_state=1, d_conv=1, chunk_size=1)
SMALLEST = {f"{k}, one of everything": dict(LEAST, position=k) for k in POSITIONS}
SMALLEST["rope, one of everything"]["d_state"] = 2


def layer(m=ssd_module, position="rope", dtype=torch.float64, seed=0, **changes):
    torch.manual_seed(seed)
    sizes = dict(n_heads=4, n_groups=2, d_head=3, d_state=10, chunk_size=4)
    sizes |= SMALLEST.get(position, dict(position=position))
    return m.SSD(8, **(sizes | changes)).to(dtype)


def tokens(b=2, length=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(b, length, 8, generator=generator, dtype=torch.float64).to(dtype)


def check_caches(name, actual, expected):
    assert held(actual).keys() == held(expected).keys()
    for k, t in held(actual).items():
        check(f"{name}: {k}", t, held(expected)[k])


# Two rows each, with different numbers of tokens.
PADDING = {
    "left": rows("...########", ".##########"),
    "right": rows("########...", "##########."),
    "middle": rows("###..######", "##.#.#.####"),
    "everywhere": rows(".##..###.#.", "#.########."),
    "a row of nothing else": rows("...........", "###########"),
}


def padding_changes_nothing(m, position, name="middle", junk=math.nan):
    properties.padding_changes_nothing(layer(m, position), tokens(), PADDING[name], junk)


def positions_at_padding_are_not_looked_at(m, position):
    mixer = layer(m, position)
    properties.positions_at_padding_are_not_looked_at(mixer, tokens(), PADDING["everywhere"])


def calls_join_up(m, position, pieces=(5, 6), name="middle"):
    cuts = [*itertools.accumulate(pieces)][:-1]
    properties.calls_join_up(layer(m, position), tokens(), cuts, name and PADDING[name])


def projections(mixer, u):
    """The layer's x, dt, A, B, C for u before positions enter, head by head."""
    dt = torch.log1p(torch.exp(u @ mixer.dt_proj.weight.T + mixer.dt_bias))
    parts = {"x": mixer.n_heads, "B": mixer.n_groups, "C": mixer.n_groups}
    x, B, C = (getattr(mixer, f"{k}_proj")(u).unflatten(-1, (n, -1)) for k, n in parts.items())
    return x, dt, -mixer.A_log.exp(), B, C


def turned(t, positions, base):
    """Numbers k and k + n/2 of B or C as one complex number, times exp(i · position · θ_k)."""
    half = t.shape[-1] // 2
    theta = torch.tensor([base ** (-k / half) for k in range(half)], dtype=torch.float64)
    z = torch.complex(*t.chunk(2, dim=-1)) * torch.exp(1j * positions[:, None, None] * theta)
    return torch.cat([z.real, z.imag], dim=-1)


def by_hand(mixer, u, start=0):
    """Projections and a source of position around the definition: y, final state, history."""
    x, dt, A, B, C = projections(mixer, u)
    history = None
    if mixer.position == "rope":
        positions = start + torch.arange(u.shape[1])
        B, C = (turned(t, positions, mixer.rope_base) for t in (B, C))
    elif mixer.position == "conv":
        parts = [t.flatten(2) for t in (x, B, C)]
        mixed, history = convolution(torch.cat(parts, -1), mixer.conv)
        mixed = mixed.split([t.shape[-1] for t in parts], -1)
        x, B, C = (new.reshape(t.shape) for new, t in zip(mixed, (x, B, C), strict=True))
    zero = torch.zeros(len(u), *x.shape[2:], B.shape[-1], dtype=u.dtype)
    y, final = definition(x, dt, A, B, C, mixer.D, zero)
    return y.flatten(2) @ mixer.out_proj.weight.T, final, history


def layer_is_the_definition(m, position):
    """With non-default d_conv and rope_base."""
    mixer, u = layer(m, position, d_conv=3, rope_base=50.0), tokens()
    assert mixer.rope_base == 50.0
    y, cache = forward(mixer, u, start=2)
    want, final, history = by_hand(mixer, u, start=2)
    check("layer = projections around the definition", y, want)
    check("cache = final state", cache.state, final)
    if history is not None:
        check("cache = last inputs of the convolution", cache.conv, history)


def layer_is_causal(m, position):
    for j in range(11):
        moves_nothing_before_it(layer(m, position), tokens(), j)


def only_distances_enter(m, position):
    """Shifting all positions changes the state and not y, with and without a cache."""
    mixer, x = layer(m, position), tokens()
    want, want_cache = forward(mixer, x)
    for shift in (1, 7, 1000):
        y, cache = forward(mixer, x, start=shift)
        check(f"all positions + {shift}: y", y, want)
        must_differ(f"all positions + {shift}: state", cache.state, want_cache.state)
        head, cache = forward(mixer, x[:, :5], start=shift)
        tail, _ = forward(mixer, x[:, 5:], cache=cache, start=shift + 5)
        check(f"all positions + {shift}, two calls: y", torch.cat([head, tail], dim=1), want)


def asks_nothing(m, position):
    for real in (None, PADDING["everywhere"]):
        properties.asks_nothing(layer(m, position), tokens(), real)


def compiles(m, position):
    is_one_graph(layer(m, position), forward, tokens(), PADDING["everywhere"])


def is_born_right(m, position):
    starts_alike(lambda: m.SSD(8, n_heads=4, n_groups=2, d_state=6, position=position))


@pytest.mark.parametrize("position", [*POSITIONS, *SMALLEST])
def test_layer_is_the_definition_between_projections(position):
    layer_is_the_definition(ssd_module, position)


@pytest.mark.parametrize("position", SMALLEST)
def test_one_of_everything_is_a_layer(position):
    layer_is_causal(ssd_module, position)
    padding_changes_nothing(ssd_module, position)
    calls_join_up(ssd_module, position)


@at_every_position
def test_layer_asks_the_device_nothing(position):
    asks_nothing(ssd_module, position)


@at_every_position
def test_layer_is_one_graph(position):
    compiles(ssd_module, position)


@at_every_position
def test_layer_made_without_memory_starts_as_one_made_directly(position):
    is_born_right(ssd_module, position)


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e3])
@pytest.mark.parametrize("name", PADDING)
@at_every_position
def test_padding_anywhere_and_of_any_content_changes_nothing(position, name, junk):
    padding_changes_nothing(ssd_module, position, name, junk)


@at_every_position
def test_positions_at_padding_are_not_looked_at(position):
    positions_at_padding_are_not_looked_at(ssd_module, position)


@pytest.mark.parametrize("name", [None, *PADDING])
@pytest.mark.parametrize("pieces", [[5, 6], [0, 2, 2, 7], [4, *[1] * 7], [1] * 11], ids=str)
@at_every_position
def test_prefill_continued_prefill_and_decoding_agree(position, pieces, name):
    calls_join_up(ssd_module, position, pieces, name)


@at_every_position
def test_layer_keeps_shape_and_returns_its_cache(position):
    shapes = {"cache.state": (2, 4, 3, 10)}
    shapes |= {"cache.conv": (2, 3, 52)} if position == "conv" else {}
    for length in (11, 0):
        y, cache = forward(layer(position=position), tokens(length=length))
        assert y.shape == (2, length, 8)
        assert {k: t.shape for k, t in held(cache).items()} == shapes
    assert not any(t.any() for t in held(cache).values())
    assert layer(position=position, d_head=None).x_proj.out_features == 8  # d_model / n_heads each


@pytest.mark.parametrize("length", [2, 11])
@at_every_position
def test_every_parameter_receives_a_finite_gradient_that_is_not_zero(position, length):
    mixer = layer(position=position)
    forward(mixer, tokens(length=length))[0].square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_heads_start_with_long_and_with_short_memories():
    mixer = SSD(8, n_heads=512, d_head=1)
    dt, A = F.softplus(mixer.dt_bias), -mixer.A_log.exp()
    assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1
    assert A.min() >= -16.001 and A.max() <= -0.999
    assert torch.equal(mixer.D, torch.ones(512))
    assert dt.log().std() > 1 and A.std() > 3  # spread over the whole interval
    memory = -1 / (dt * A)  # in tokens, until a write has decayed to 1/e
    assert memory.min() < 2 and memory.max() > 200
    assert [k for k, _ in mixer.named_parameters() if "bias" in k] == ["dt_bias"]


@at_every_position
def test_nothing_before_a_token_moves_with_it_through_the_layer(position):
    layer_is_causal(ssd_module, position)


@pytest.mark.parametrize("backend", ["auto", *SEQUENCE_FORMS])
@at_every_position
def test_layer_is_the_same_with_every_backend(position, backend):
    want, got = (
        forward(layer(position=position, backend=k), tokens()) for k in ("recurrent", backend)
    )
    check("y", got[0], want[0])
    check_caches("every backend", got[1], want[1])


@pytest.mark.skipif(not STATUS.available, reason=STATUS.reason)
def test_rotated_layer_is_the_same_through_the_kernel():
    mask = PADDING["everywhere"]
    want, got = (
        forward(
            layer(dtype=torch.float32, backend=backend).to(DEVICE),
            tokens(dtype=torch.float32).to(DEVICE),
            mask.to(DEVICE),
        )
        for backend in ("recurrent", "kernel")
    )
    check("y", got[0][mask], want[0][mask])
    check("state", got[1].state, want[1].state)
    with pytest.raises(TypeError, match="float64"):  # so the kernel ran
        forward(layer(backend="kernel"), tokens())


@pytest.mark.skipif(not STATUS.available, reason=STATUS.reason)
@at_every_position
def test_layer_decodes_through_the_step_of_the_kernel(position):
    x, results = tokens(length=5, dtype=torch.float32).to(DEVICE), []
    with noted((kernels, "chunk_scan"), (kernels, "state_update")) as called, torch.no_grad():
        for backend in ("kernel", "chunked"):
            mixer = layer(position=position, dtype=torch.float32, backend=backend).to(DEVICE)
            y, cache = forward(mixer, x[:, :3])
            parts = [y]
            for t in (3, 4):
                y, cache = forward(mixer, x[:, t : t + 1], cache=cache, start=t)
                parts.append(y)
            results.append((torch.cat(parts, dim=1), cache))
    assert called == ["chunk_scan", "state_update", "state_update"]
    (got, got_cache), (want, want_cache) = results
    check("decoded by the kernel = by the chunked form", got, want, tol=1e-5)
    check("state", got_cache.state, want_cache.state, tol=1e-5)


def test_rope_knows_how_far_apart_tokens_are_and_not_where():
    only_distances_enter(ssd_module, "rope")


def test_rope_depends_on_positions():
    mixer, x = layer(), tokens()
    y, _ = forward(mixer, x)
    must_differ("positions in reverse", mixer(x, torch.arange(10, -1, -1).expand(2, 11))[0], y)
    cache = forward(mixer, x[:, :10])[1]
    must_differ("positions restarted", forward(mixer, x[:, 10:], cache=cache)[0], y[:, 10:])
    plain = layer(position="decay")
    plain.load_state_dict(mixer.state_dict())
    must_differ("no positions", forward(plain, x)[0], y)


def test_rope_is_a_state_that_turns_back_by_one_step_with_every_token():
    """h̃_t = a_t h̃_{t-1} R_1 + dt_t x_t B_tᵀ and y_t = h̃_t C_t, without positions."""
    mixer, u = layer(), tokens()
    x, dt, A, B, C = projections(mixer, u)
    turn, y = rotation_matrix(1.0, 10), torch.zeros_like(x)
    final = torch.zeros(2, 4, 3, 10, dtype=u.dtype)
    for i, j in itertools.product(range(2), range(4)):
        H = final[i, j].clone()
        for t in range(11):
            write = dt[i, t, j] * torch.outer(x[i, t, j], B[i, t, j // 2])
            H = (dt[i, t, j] * A[j]).exp() * H @ turn + write
            y[i, t, j] = H @ C[i, t, j // 2] + mixer.D[j] * x[i, t, j]
        final[i, j] = H
    got, cache = forward(mixer, u)
    check("rotation of B and C = a state that turns", got, mixer.out_proj(y.flatten(2)))
    check("its state, turned to the last position", cache.state, final @ rotation_matrix(-10.0, 10))


@at_every_position
def test_without_decay_the_order_enters_through_rope_and_conv_alone(position):
    mixer, x = layer(position=position), tokens()
    torch.nn.init.constant_(mixer.A_log, -100.0)  # A = -exp(-100)
    y, other = forward(mixer, x)[0], forward(mixer, x[:, [2, 0, 3, 1, *range(4, 11)]])[0]
    compare = check if position == "decay" else must_differ
    compare("early tokens exchanged", other[:, 4:], y[:, 4:])


@pytest.mark.parametrize("position", ["conv", "decay"])
def test_numbers_in_position_ids_do_not_enter_conv_and_decay(position):
    mixer, x = layer(position=position), tokens()
    y, cache = forward(mixer, x)
    for start in (1000, -20):
        other, other_cache = forward(mixer, x, start=start)
        check("y at other positions", other, y)
        for name, t in held(cache).items():
            check(f"{name} at other positions", held(other_cache)[name], t)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@at_every_position
def test_layer_works_in_every_dtype(position, dtype):
    mixer = layer(position=position, dtype=dtype)
    y, cache = forward(mixer, tokens(dtype=dtype))
    assert y.dtype == dtype and cache.state.dtype == torch.promote_types(dtype, torch.float32)
    assert cache.conv is None or cache.conv.dtype == dtype
    truth = forward(mixer.double(), tokens(dtype=dtype).double())[0]
    check("layer = float64 layer with the same weights", y, truth.to(dtype))


def test_the_lesson_imports_neither_kernels_nor_triton():
    code = "import sys, cheems_ref.ssd; print({'cheems_ref.kernels', 'triton'} & {*sys.modules})"
    root = Path(ssd_module.__file__).parents[1]
    out = subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True)
    assert out.strip() == "set()"


# --- what hides a mistake ------------------------------------------------------------------------


def test_listing_3_is_right_with_its_sum_over_the_sources():
    from planted.ssd import SOURCES  # which takes its properties from this file

    for case in ("three chunks and a ragged end", "small dt", "blocks of chunks are crossed"):
        agree(plant(ssd_module, SOURCES), "chunked", case)


def test_work_is_linear_without_blocks_too():
    """So it is not the size of the blocks that makes the two planted quadratic costs show."""
    from planted.ssd import ALL_CHUNKS_AT_ONCE

    each_block_costs_the_same(plant(ssd_module, ALL_CHUNKS_AT_ONCE), "chunked")


def test_wrong_axis_hides_in_one_chunk_and_behind_large_steps():
    from planted.ssd import TARGETS

    wrong_axis = plant(ssd_module, TARGETS)
    # At the listings' own step size, softplus(0), a chunk of 64 forgets all that could be spoilt.
    as_printed = dict(b=1, l=192, h=2, g=1, A=(-2, -1), chunk_size=64, zero_state=True)
    agree(wrong_axis, "chunked", as_printed | dict(dt=math.log(2)))
    agree(wrong_axis, "chunked", as_printed | dict(dt=1e-3, chunk_size=192))
    with pytest.raises(AssertionError, match="chunked form = definition, y"):
        agree(wrong_axis, "chunked", as_printed | dict(dt=1e-3))


@pytest.mark.parametrize("g", [1, 4])
def test_tiled_groups_hide_where_there_is_one_group_or_one_head_to_a_group(g):
    from planted.ssd import TILED

    for form in ("step", "quadratic"):
        agree(plant(ssd_module, TILED), form, dict(g=g))


@pytest.mark.parametrize("position", SMALLEST)
def test_a_door_that_refuses_one_of_something_is_caught(position):
    mutant = planted((door, ssd_module), [("size < 1", "size <= 1")])
    with pytest.raises(ValueError, match="n_heads must be at least 1, got 1"):
        layer(mutant, position)


# --- bad input --------------------------------------------------------------------------------


def arguments(**changes):
    x, dt, A, B, C, D, state = inputs(l=5)
    named = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, initial_state=state)
    return named | {k: v(named[k]) if callable(v) else v for k, v in changes.items()}


# Arguments, what is done to good ones, and what the message says.
# fmt: off
BAD = [
    ("x", lambda t: t[0], r"x must be \(b, l, h, p\), got shape \(5, 4, 3\)"),
    ("x", lambda t: t.long(), r"x must be floating-point, got torch\.int64"),
    ("dt", lambda t: t[..., 0], r"dt must be .*\(2, 5, 4\).*\(2, 5\)"),
    ("dt", lambda t: t[:, :4], r"dt must be .*\(2, 5, 4\).*\(2, 4, 4\)"),
    ("dt", lambda t: t[..., :3], r"dt must be .*\(2, 5, 4\).*\(2, 5, 3\)"),
    ("dt", one_entry(-0.5), r"dt must be .*-0\.5"),
    ("dt", one_entry(math.nan), r"dt must be .*nan"),
    ("dt", one_entry(math.inf), r"dt must be .*inf"),
    ("A", lambda t: t[:3], r"A must be .*\(4,\).*\(3,\)"),
    ("A", lambda t: t[None], r"A must be .*\(4,\).*\(1, 4\)"),
    ("A", one_entry(0.25), r"A must be .*0\.25"),
    ("A", one_entry(math.nan), r"A must be .*nan"),
    ("A", one_entry(-math.inf), r"A must be .*-inf"),
    ("B", lambda t: t[0], r"B must be .* = \(2, 5, g, n\), got shape \(5, 2, 2\)"),
    ("B", lambda t: t[:1], r"B must be .*\(2, 5, g, n\).*\(1, 5, 2, 2\)"),
    ("B", lambda t: t[:, :4], r"B must be .*\(2, 5, g, n\).*\(2, 4, 2, 2\)"),
    ("B", lambda t: t[:, :, [0, 1, 0]], r"C must be .* = \(2, 5, 3, 2\), got shape \(2, 5, 2, 2\)"),
    ("B C", lambda t: t[:, :, [0, 1, 0]], "h = 4 must be a multiple of g = 3"),
    ("B C", lambda t: t[:, :, :0], "h = 4 must be a multiple of g = 0"),
    ("B C initial_state", lambda t: t[..., :0], "n must be at least 1, got 0"),
    ("x initial_state", lambda t: t.narrow(t.shape.index(3), 0, 0), "p must be at least 1, got 0"),
    ("C", lambda t: t[0], r"C must be .*\(2, 5, 2, 2\).*\(5, 2, 2\)"),
    ("C", lambda t: t[:, :, :1], r"C must be .*\(2, 5, 2, 2\).*\(2, 5, 1, 2\)"),
    ("C", lambda t: t[..., :1], r"C must be .*\(2, 5, 2, 2\).*\(2, 5, 2, 1\)"),
    ("D", lambda t: t[:3], r"D must be .*\(4,\).*\(3,\)"),
    ("initial_state", lambda t: t.mT, r"initial_state must be .*\(2, 4, 3, 2\).*\(2, 4, 2, 3\)"),
    ("initial_state", lambda t: t[0], r"initial_state must be .*\(2, 4, 3, 2\).*\(4, 3, 2\)"),
    *((name, lambda t: t.float(), rf"{name} must be torch\.float64 .*float32")
      for name in ("dt", "A", "B", "C", "D", "initial_state")),
    ("chunk_size", 0, r"chunk_size must be .*0"),
    ("chunk_size", -3, r"chunk_size must be .*-3"),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize("name, change, message", BAD)
    @pytest.mark.parametrize("form", ["ssd", "ssd_recurrent", "ssd_quadratic", "ssd_chunked"])
    def test_is_refused_with_its_name_and_numbers(self, form, name, change, message):
        with pytest.raises(ValueError, match=message):
            getattr(ssd_module, form)(**arguments(**dict.fromkeys(name.split(), change)))

    def test_sixteen_bit_state_is_refused(self):
        narrow = {name: t.bfloat16() for name, t in arguments().items()}
        with pytest.raises(ValueError, match=r"initial_state must be torch\.float32 .*bfloat16"):
            ssd_module.ssd(**narrow)

    @pytest.mark.parametrize(
        "name, change, _", [row for row in BAD if {*row[0].split()} & {*MATRIX_NAMES}]
    )
    def test_is_refused_by_the_matrix(self, name, change, _):
        named = arguments(**dict.fromkeys(name.split(), change))
        with pytest.raises(ValueError, match=r"must be .*"):
            ssd_module.semiseparable_matrix(**{k: named[k] for k in MATRIX_NAMES})

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("x", lambda t: t[0], r"x must be \(b, h, p\), got shape \(4, 3\)"),
            ("dt", lambda t: t[..., 0], r"dt must be \(b, h\) = \(2, 4\), got shape \(2,\)"),
            ("dt", one_entry(-0.5), r"dt must be .*-0\.5"),
            ("A", lambda t: t[:3], r"A must be .*\(4,\).*\(3,\)"),
            ("B", lambda t: t[0], r"B must be \(b, g, n\) = \(2, g, n\), got shape \(2, 2\)"),
            ("C", lambda t: t[:, 0], r"C must be \(b, g, n\) = \(2, 2, 2\), got shape \(2, 2\)"),
            ("C", lambda t: t[..., :1], r"C must be .*\(2, 2, 2\), got shape \(2, 2, 1\)"),
            ("D", lambda t: t[:3], r"D must be .*\(4,\).*\(3,\)"),
            ("state", lambda t: t.mT, r"state .*\(2, 4, 3, 2\).*\(2, 4, 2, 3\)"),
            ("state", lambda t: t.float(), r"state must be torch\.float64 .*float32"),
            ("backend", "chunked", r"backend must be .*'chunked'"),
        ],
    )
    def test_is_refused_by_one_step(self, name, change, message):
        good = dict(zip(NAMES, inputs(l=5), strict=True), backend="auto")
        good |= {k: good[k][:, 0] for k in ("x", "dt", "B", "C")}
        good[name] = change(good[name]) if callable(change) else change
        with pytest.raises(ValueError, match=message):
            ssd_step(**good)

    def test_unknown_backend(self):
        with pytest.raises(ValueError, match=r"backend must be .*quadratic.*'fast'"):
            ssd_module.ssd(**arguments(), backend="fast")

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            (dict(d_model=0), "d_model .*0"),
            (dict(n_heads=0), "n_heads .*0"),
            (dict(n_groups=0), "n_groups .*0"),
            (dict(d_state=-1), "d_state .*-1"),
            (dict(chunk_size=0), "chunk_size .*0"),
            (dict(d_head=0), "d_head .*0"),
            (dict(d_conv=0), "d_conv .*0"),
            (dict(position="alibi"), r"position must be .*'rope', 'conv', 'decay'.*'alibi'"),
            (dict(d_state=5), "d_state must be even .*5"),
            (dict(rope_base=0.0), r"base must be .*0\.0"),
            (dict(rope_base=math.nan), "base must be .*nan"),
            (dict(n_groups=3), "n_heads = 4 .*n_groups = 3"),
            (dict(d_model=10), "d_model = 10 .*n_heads = 4"),
        ],
    )
    def test_sizes_of_the_layer(self, sizes, message):
        with pytest.raises(ValueError, match=message):
            SSD(**dict(d_model=8, n_heads=4) | sizes)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            (
                "x",
                torch.zeros(2, 11, 7),
                r"x must be .* = \(b, l, 8\), got shape \(2, 11, 7\)",
            ),
            ("x", torch.zeros(11, 8), r"x must be .*\(11, 8\)"),
            ("position_ids", torch.arange(11), r"position_ids .*\(2, 11\).*\(11,\)"),
            ("position_ids", torch.zeros(2, 11), r"position_ids must be torch\.int64 .*float32"),
            ("position_ids", torch.zeros(2, 11).byte(), r"position_ids .*int32 here, .*uint8"),
            ("padding_mask", torch.ones(2, 11), r"padding_mask must be torch\.bool .*float32"),
            ("padding_mask", torch.ones(2, 9).bool(), r"padding_mask .*\(2, 11\).*\(2, 9\)"),
            (
                "cache",
                SSDCache(torch.zeros(1, 4, 3, 10)),
                r"\(2, 4, 3, 10\).*\(1, 4, 3, 10\)",
            ),
        ],
    )
    def test_calls_of_the_layer(self, name, value, message):
        positions = torch.arange(11).expand(2, 11)
        good = dict(x=tokens(dtype=torch.float32), position_ids=positions)
        with pytest.raises(ValueError, match=message):
            layer(dtype=torch.float32)(**good | {name: value})

    def test_negative_positions_are_refused_by_the_function_and_not_by_the_layer(self):
        below, mixer = torch.arange(-3, 8).expand(2, 11), layer()
        with pytest.raises(ValueError, match=r"position_ids must be .* got entries in \[-3, 7\]"):
            rope_cos_sin(below, 10)
        y, want = (mixer(tokens(), ids)[0] for ids in (below, below + 3))
        check("the layer, which looks at no value", y, want)

    @pytest.mark.parametrize("position", ["conv", "decay"])
    def test_odd_states_are_refused_for_rope_alone(self, position):
        assert forward(layer(position=position, d_state=5), tokens())[1].state.shape[-1] == 5

    @pytest.mark.parametrize(
        ("mine", "other"), [p for p in itertools.permutations(POSITIONS, 2) if "conv" in p]
    )
    def test_cache_of_a_layer_with_another_source_of_position(self, mine, other):
        cache = forward(layer(position=other), tokens())[1]
        with pytest.raises(ValueError, match=f"the cache is not one of .*position='{mine}'"):
            forward(layer(position=mine), tokens(), cache=cache, start=11)

    def test_cache_of_a_convolution_of_another_size(self):
        cache = forward(layer(position="conv", d_conv=3), tokens())[1]
        with pytest.raises(ValueError, match=r"history must be .*\(2, 3, 52\).*\(2, 2, 52\)"):
            forward(layer(position="conv"), tokens(), cache=cache)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("call", ["ssd", "ssd_kernel", "ssd_step"])
@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        ((False, "none", "there is no kernel: get one"), RuntimeError, "no kernel: get one"),
        ((True, "interpreter", ""), TypeError, "x is torch.float64"),
    ],
)
def test_kernel_that_cannot_run_is_refused_with_the_reason(
    monkeypatch, call, status, error, message
):
    status = kernels.KernelStatus(*status)
    monkeypatch.setattr(kernels, "kernel_status", lambda: status)
    x, dt, A, B, C, _, state = inputs(l=5)
    with pytest.raises(error, match=message):
        if call == "ssd":
            ssd_module.ssd(x, dt, A, B, C, backend="kernel")
        elif call == "ssd_kernel":
            ssd_module.ssd_kernel(x, dt, A, B, C)
        else:
            ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], state, backend="kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_in_another_dtype_is_refused(dtype):
    mixer = layer()
    _, cache = forward(mixer, tokens())
    other = cache._replace(state=cache.state.to(dtype))
    with pytest.raises(ValueError, match=r"cache\.state must be torch\.float64"):
        forward(mixer, tokens(), cache=other, start=11)
