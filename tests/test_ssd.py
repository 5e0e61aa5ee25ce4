"""SSD: what the tables of layers and operators do not ask.

The properties are functions of a module. The tests hand them `cheems_ref.ssd`; test_planted.py
hands them copies of it with one planted mistake and expects the same functions to fail.
"""

import contextlib
import itertools
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import definitions
import properties
import pytest
import torch
import torch.nn.functional as F
from definitions import ssd as definition
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import plant
from properties import (
    calls_join_up,
    forward,
    is_one_graph,
    rows,
    work,
    works_linearly,
)

import cheems_ref.ssd as ssd_module
from cheems_ref import kernels, verify
from cheems_ref.rope import rope_cos_sin, rotation_matrix
from cheems_ref.ssd import SSD, SSDCache, ssd_step
from cheems_ref.verify import check, check_gradients, must_differ

NAMES = ("x", "dt", "A", "B", "C", "D", "state")
FORMS = ("recurrent", "quadratic", "chunked", "step", "matrix")
SEQUENCE_FORMS = FORMS[:3]
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


# Sizes that the table of operators does not have.
DEFAULT = {}
CASES = {
    "chunk = 1": dict(chunk_size=1),
    "more rows than a block has chunks": dict(
        b=ssd_module.CHUNKS_PER_BLOCK + 1, l=5, h=2, g=1, chunk_size=2
    ),
    "blocks of chunks are crossed": dict(
        l=2 * ssd_module.CHUNKS_PER_BLOCK + 3, chunk_size=2, b=1, dt=(1e-3, 1e-1)
    ),
}


def compared(m, form, case):
    """The form and the definition, as functions of the same tensors, and the tensors."""
    case = dict(CASES[case] if isinstance(case, str) else case)
    chunk_size, zero_state = case.pop("chunk_size", 4), case.pop("zero_state", False)
    *tensors, state = inputs(**case)
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
    """So do their derivatives, by all inputs and through both results."""
    actual, expected, tensors = compared(m, form, case)
    check_gradients(f"{form} form = definition", actual, expected, tensors, atol=1e-11)


def has_dtypes_and_accuracy(m, form, dtype=torch.bfloat16, narrow=False):
    """y has the dtype of x, the state the dtype of the sums; both fit the rounded inputs."""
    tensors = inputs(b=1, l=20, h=2, g=1, n=8, dtype=dtype)
    if narrow:  # dt, A and D in the dtype of x too
        tensors = (*(t.to(dtype) for t in tensors[:6]), tensors[6])
    y, final = apply(m, form, *tensors)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    truth = definition(*(t.double() for t in tensors))
    check(f"{form} form = float64 definition, y", y, truth[0].to(dtype))
    check(f"{form} form = float64 definition, final state", final, truth[1].float())


def starts_afresh_at_a_reset(m, form, strong=1e20, rate=1.0, dtype=torch.float64):
    """Two tokens forget everything before them, while what they write is of ordinary size; head 0
    forgets at every token, if its rate is huge."""
    *tensors, state = inputs(dtype=dtype)
    size = torch.ones(13, 1, 1, dtype=dtype)
    tensors[1][:, [3, 8]], size[[3, 8]] = strong, 1 / strong
    tensors[2][0] *= rate
    actual, expected = (
        lambda x, *rest, f=f: f(x * size, *rest) for f in (partial(apply, m, form), definition)
    )
    got, want = actual(*tensors, state), expected(*tensors, state)
    for name, a, e in zip(("y", "final state"), got, want, strict=True):
        check(f"{form} form with resets, {name}", a, e)
    check_gradients(f"{form} form with resets", actual, expected, [*tensors, state])


def keeps_its_digits(m, form):
    """float32 stays exact to rounding where a chunk mixes steps that differ by seven orders."""
    tensors = inputs(l=256, dt=(1e-6, 10.0), dtype=torch.float32)
    truth = apply(ssd_module, "recurrent", *(t.double() for t in tensors))
    for name, got, want in zip(("y", "final state"), apply(m, form, *tensors), truth, strict=True):
        check(f"{form} form with mixed steps, {name}", got.double(), want, tol=2e-6)


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


@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_the_table_does_not_have(form):
    for case in CASES:
        agree(ssd_module, form, case)
    agree_in_gradient(ssd_module, form, "blocks of chunks are crossed")


@settings(deadline=None, max_examples=15, derandomize=True)
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


def test_options_left_out_mean_zero():
    *tensors, D, state = inputs()
    want = definition(*tensors, 0 * D, 0 * state)[0]
    for form in SEQUENCE_FORMS:
        check("no D, no state", getattr(ssd_module, f"ssd_{form}")(*tensors), want)


def test_dt_zero_leaves_the_state_alone():
    x, dt, *rest, state = inputs(dtype=torch.float32)
    for form in FORMS[:4]:
        same = apply(ssd_module, form, x, 0 * dt, *rest, state)[1]
        assert torch.equal(same, state), form  # 1 · state + 0 · x is not rounded


@pytest.mark.parametrize("form", FORMS[:4])
def test_narrow_inputs_mixed_steps_and_resets_cost_no_digits(form):
    for dtype in (torch.bfloat16, torch.float16):
        for narrow in (False, True):
            has_dtypes_and_accuracy(ssd_module, form, dtype, narrow)
    if form != "step":
        keeps_its_digits(ssd_module, form)
    starts_afresh_at_a_reset(ssd_module, form, 1e20, 1e300)  # their product is -inf
    starts_afresh_at_a_reset(ssd_module, form, 1e20, 1e30, torch.float32)


@pytest.mark.parametrize("dt", [(1e-8, 1e-4), (1e-6, 1e3), (10.0, 1e3)])
def test_extreme_decays_stay_finite_over_16384_tokens(dt):
    tensors = inputs(b=1, l=16_384, h=2, g=1, p=2, dt=dt, A=(-16, -1e-3), dtype=torch.float32)
    leaves = [t.requires_grad_() for t in tensors]
    results = apply(ssd_module, "chunked", *leaves, chunk_size=64)
    sum(r.mean() for r in results).backward()
    for name, t in zip(("y", "final state"), results, strict=True):
        assert t.isfinite().all(), name
    for name, t in zip(NAMES, leaves, strict=True):
        assert t.grad.isfinite().all(), f"gradient of {name}"


def test_what_is_not_finite_stays_behind_its_token_or_inside_its_chunk():
    """But in the quadratic form, and within a chunk, as the module says."""
    for bad in (math.nan, math.inf):
        for form, reach in (("recurrent", 0), ("step", 0), ("chunked", 2)):
            keeps_what_is_not_finite(ssd_module, form, bad, reach)
    for form in ("quadratic", "chunked"):
        with pytest.raises(AssertionError, match="x reaches back"):
            keeps_what_is_not_finite(ssd_module, form, math.nan)


def test_work_is_linear_in_the_number_of_chunks_and_done_block_by_block():
    each_block_costs_the_same(ssd_module, "chunked")
    works_block_by_block(ssd_module, "chunked")


@pytest.mark.parametrize("backend", ["auto", "kernel"])
def test_a_single_token_takes_the_step_where_no_gradient_is_asked_for(backend):
    a_single_token_takes_the_step(ssd_module, backend)


# --- the layer --------------------------------------------------------------------------------

at_every_position = pytest.mark.parametrize("position", POSITIONS)


def layer(m=ssd_module, position="rope", dtype=torch.float64, **changes):
    torch.manual_seed(0)
    sizes = dict(n_heads=4, n_groups=2, d_head=3, d_state=10, chunk_size=4, position=position)
    return m.SSD(8, **(sizes | changes)).to(dtype)


def tokens(b=2, length=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(b, length, 8, generator=generator, dtype=torch.float64).to(dtype)


# Two rows with different numbers of tokens.
REAL = rows("###..######", "##.#.#.####")


def padding_changes_nothing(m, position):
    """Not between the tokens either."""
    properties.padding_changes_nothing(layer(m, position), tokens(), REAL)


def has(m, position, name):
    """A layer of module m has a property of `cheems_ref.verify`."""
    getattr(verify, name)(layer(m, position), tokens())


def projections(mixer, u):
    """The layer's x, dt, A, B, C for u before positions enter, head by head."""
    dt = torch.log1p(torch.exp(u @ mixer.dt_proj.weight.T + mixer.dt_bias))
    parts = {"x": mixer.n_heads, "B": mixer.n_groups, "C": mixer.n_groups}
    x, B, C = (getattr(mixer, f"{k}_proj")(u).unflatten(-1, (n, -1)) for k, n in parts.items())
    return x, dt, -mixer.A_log.exp(), B, C


def by_hand(mixer, u):
    """The layer by its definition."""
    options = {k: getattr(mixer, k) for k in ("n_heads", "n_groups", "position", "rope_base")}
    ids = torch.arange(u.shape[1]).expand(u.shape[:2])
    return definitions.ssd_layer(dict(mixer.named_parameters()), u, ids, **options), None


@pytest.mark.parametrize("position", ["rope", "conv"])
def test_layer_is_one_graph(position):
    is_one_graph(layer(position=position), forward, tokens(), REAL)


@at_every_position
def test_padding_may_come_anywhere_and_in_any_call(position):
    padding_changes_nothing(ssd_module, position)
    calls_join_up(layer(position=position), tokens(), [5], REAL)


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


def test_the_lesson_imports_neither_kernels_nor_triton():
    code = "import sys, cheems_ref.ssd; print({'cheems_ref.kernels', 'triton'} & {*sys.modules})"
    root = Path(ssd_module.__file__).parents[1]
    out = subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True)
    assert out.strip() == "set()"


# --- what hides a mistake ------------------------------------------------------------------------


def test_listing_3_is_right_with_its_sum_over_the_sources():
    from planted.ssd import SOURCES  # which takes its properties from this file

    for case in (DEFAULT, dict(dt=1e-3), "blocks of chunks are crossed"):
        agree(plant(ssd_module, SOURCES), "chunked", case)


def test_wrong_axis_hides_in_one_chunk_and_behind_large_steps():
    from planted.ssd import TARGETS

    wrong_axis = plant(ssd_module, TARGETS)
    # At the listings' own step size, softplus(0), a chunk of 64 forgets all that could be spoilt.
    as_printed = dict(b=1, l=192, h=2, g=1, A=(-2, -1), chunk_size=64, zero_state=True)
    agree(wrong_axis, "chunked", as_printed | dict(dt=math.log(2)))
    agree(wrong_axis, "chunked", as_printed | dict(dt=1e-3, chunk_size=192))
    with pytest.raises(AssertionError, match="chunked form = definition, y"):
        agree(wrong_axis, "chunked", as_printed | dict(dt=1e-3))


def test_tiled_groups_hide_where_there_is_one_group_or_one_head_to_a_group():
    from planted.ssd import TILED

    for form, g in itertools.product(("step", "quadratic"), (1, 4)):
        agree(plant(ssd_module, TILED), form, dict(g=g))


# --- bad input: what a signature does not say ---------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_inputs_that_do_not_fit_are_refused():
    x, dt, A, B, C, D, state = inputs(l=5)
    good = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, initial_state=state)
    three = [0, 1, 0]
    for changes, message in (
        (dict(B=B[:, :, three], C=C[:, :, three]), "h = 4 must be a multiple of g = 3"),
        (dict(B=B[:, :, :0], C=C[:, :, :0]), "h = 4 must be a multiple of g = 0"),
        (dict(B=B[..., :0], C=C[..., :0], initial_state=state[..., :0]), "n must be at least 1"),
        (dict(x=x[..., :0], initial_state=state[:, :, :0]), "p must be at least 1, got 0"),
        (
            {name: t.bfloat16() for name, t in good.items()},
            r"initial_state must be torch\.float32 .*bfloat16",
        ),
    ):
        for form in ("ssd", *(f"ssd_{form}" for form in SEQUENCE_FORMS)):
            with pytest.raises(ValueError, match=message):
                getattr(ssd_module, form)(**good | changes)


@pytest.mark.usefixtures("unchecked")
def test_options_of_the_layer_that_exclude_one_another_are_refused():
    for sizes, message in (
        (dict(d_state=5), "d_state must be even .*5"),
        (dict(rope_base=0.0), r"base must be .*0\.0"),
        (dict(n_groups=3), "n_heads = 4 .*n_groups = 3"),
        (dict(d_model=10), "d_model = 10 .*n_heads = 4"),
    ):
        with pytest.raises(ValueError, match=message):
            SSD(**dict(d_model=8, n_heads=4) | sizes)


@pytest.mark.usefixtures("unchecked")
def test_caches_of_other_layers_are_refused():
    caches = {position: forward(layer(position=position), tokens())[1] for position in POSITIONS}
    smaller = forward(layer(position="conv", d_conv=3), tokens())[1]
    state = caches["rope"].state
    wrong = [
        ("rope", SSDCache(state[:1]), r"\(2, 4, 3, 10\).*\(1, 4, 3, 10\)"),
        ("rope", SSDCache(state.float()), r"cache\.state must be torch\.float64"),
        ("rope", SSDCache(state.bfloat16()), r"cache\.state must be torch\.float64"),
        ("conv", smaller, r"history must be .*\(2, 3, 52\).*\(2, 2, 52\)"),
    ]
    for mine, other in (p for p in itertools.permutations(POSITIONS, 2) if "conv" in p):
        wrong.append((mine, caches[other], f"the cache is of a layer without position='{mine}'"))
    for position, cache, message in wrong:
        with pytest.raises(ValueError, match=message):
            forward(layer(position=position), tokens(), cache=cache, start=11)


@pytest.mark.usefixtures("unchecked")
def test_negative_positions_are_refused_by_the_function_and_not_by_the_layer():
    below, mixer = torch.arange(-3, 8).expand(2, 11), layer()
    with pytest.raises(ValueError, match=r"position_ids must be .* got entries in \[-3, 7\]"):
        rope_cos_sin(below, 10)
    y, want = (mixer(tokens(), ids)[0] for ids in (below, below + 3))
    check("the layer, which looks at no value", y, want)


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
