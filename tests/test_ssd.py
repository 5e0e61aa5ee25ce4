"""SSD: what the tables of layers and operators do not ask.

The properties are functions of a module. The tests hand them `cheems_ref.ssd`; test_planted.py
hands them copies of it with one planted mistake and expects the same functions to fail.
"""

import contextlib
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from definitions import ssd as definition
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import plant
from properties import forward, is_one_graph, normal, rows, work, works_linearly
from test_layers import built

import cheems_ref.ssd as ssd_module
from cheems_ref import kernels
from cheems_ref.rope import rope_cos_sin
from cheems_ref.ssd import SSD, SSDCache, ssd_step
from cheems_ref.verify import check, check_gradients

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


# Two blocks of chunks, and three tokens more.
BLOCKS = dict(b=1, l=2 * ssd_module.CHUNKS_PER_BLOCK + 3, dt=(1e-3, 1e-1), chunk_size=2)


def compared(m, form, chunk_size=4, zero_state=False, **case):
    """The form and the definition, as functions of the same tensors, and the tensors."""
    *tensors, state = inputs(**case)
    state = state.zero_() if zero_state or form == "matrix" else state
    results = 1 if form == "matrix" else 2

    def expected(*tensors):
        return definition(*tensors)[:results]

    return partial(apply, m, form, chunk_size=chunk_size), expected, [*tensors, state]


def agree(m, form, **case):
    """The form and the definition agree in y and the final state."""
    actual, expected, tensors = compared(m, form, **case)
    for a, e, name in zip(actual(*tensors), expected(*tensors), ("y", "final state"), strict=False):
        check(f"{form} form = definition, {name}", a, e)


def agree_in_gradient(m, form):
    """So do their derivatives, by all inputs and through both results."""
    check_gradients(f"{form} form = definition", *compared(m, form), atol=1e-11)


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
def noted(**owners):
    """The names of these functions of modules, as they are called."""
    called = []

    def note(name, function, *args, **kwargs):
        called.append(name)
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        for name, owner in owners.items():
            patched.setattr(owner, name, partial(note, name, getattr(owner, name)))
        yield called


def steps_are_wide(m, name):
    """Beside sixteen bits the steps are float32: over a pause of nothing rounding adds up.

    Every head is compared by itself, since what a fast one keeps is small.
    """
    dtype = torch.bfloat16
    x = torch.cat([normal(2, 6, 8, dtype=dtype), torch.zeros(2, 8, 8, dtype=dtype)], dim=1)
    mixer = built(m, name, dtype)
    state, want = (forward(mixer.to(d), x.to(d))[1].state.double() for d in (dtype, torch.float64))
    size = want.abs().amax((-2, -1), keepdim=True)
    check("state after a pause, head by head", state / size, want / size, tol=1.2e-2)


# --- the forms ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    b=st.integers(1, 2),
    l=st.integers(0, 20),
    g=st.integers(1, 3),
    heads_per_group=st.integers(1, 3),
    p=st.integers(1, 3),
    n=st.integers(1, 3),
    chunk_size=st.integers(1, 24),
    dt=st.sampled_from([0.0, 1e-3, (1e-3, 1e-1), (0.1, 1.0), (1.0, 30.0)]),
    seed=st.integers(0, 99),
)
def test_all_forms_agree_on_any_sizes(heads_per_group, **case):
    for form in FORMS:
        agree(ssd_module, form, h=case["g"] * heads_per_group, **case)


def test_options_left_out_mean_zero():
    *tensors, D, state = inputs()
    want = definition(*tensors, 0 * D, 0 * state)[0]
    for form in SEQUENCE_FORMS:
        check("no D, no state", getattr(ssd_module, f"ssd_{form}")(*tensors), want)


@pytest.mark.parametrize("form", FORMS[:4])
def test_forms_agree_in_gradient(form):
    agree_in_gradient(ssd_module, form)


def test_dt_zero_leaves_the_state_alone():
    x, dt, *rest, state = inputs(dtype=torch.float32)
    for form in FORMS[:4]:
        same = apply(ssd_module, form, x, 0 * dt, *rest, state)[1]
        assert torch.equal(same, state), form  # 1 · state + 0 · x is not rounded


@pytest.mark.parametrize("form", FORMS[:4])
def test_mixed_steps_and_resets_cost_no_digits(form):
    if form != "step":
        keeps_its_digits(ssd_module, form)
    starts_afresh_at_a_reset(ssd_module, form)
    starts_afresh_at_a_reset(ssd_module, form, 1e20, 1e300)  # their product is -inf
    starts_afresh_at_a_reset(ssd_module, form, 1e20, 1e30, torch.float32)


def test_extreme_decays_stay_finite_over_8192_tokens():
    tensors = inputs(
        b=1, l=8192, h=2, g=1, p=2, dt=(1e-8, 1e3), A=(-16, -1e-3), dtype=torch.float32
    )
    leaves = [t.requires_grad_() for t in tensors]
    results = apply(ssd_module, "chunked", *leaves, chunk_size=64)
    grads = torch.autograd.grad(sum(r.mean() for r in results), leaves)
    assert all(t.isfinite().all() for t in (*results, *grads))


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


@pytest.mark.skipif(not STATUS.available, reason=STATUS.reason)
@pytest.mark.parametrize("backend", ["auto", "kernel"])
def test_a_single_token_takes_the_step_where_no_gradient_is_asked_for(backend):
    """With gradients it takes the chunked kernel, as a sequence does."""
    kernel = STATUS.mode == "cuda" or backend == "kernel"
    step = ["_ssd_step", "state_update"] if kernel else ["_ssd_step"]
    scan = ["chunk_scan"] if kernel else []
    for length, learns, whole, want in (
        (1, False, True, step),
        (1, False, False, step),
        (1, True, True, scan),
        (2, False, True, scan),
    ):
        tensors = inputs(b=1, l=length, h=2, g=1, dtype=torch.float32)
        *five, D, state = (t.to(DEVICE) for t in tensors)
        five = [t.requires_grad_(learns) for t in five]
        options = dict(D=D, initial_state=state) if whole else {}
        watched = noted(_ssd_step=ssd_module, chunk_scan=kernels, state_update=kernels)
        with watched as called, torch.set_grad_enabled(learns):
            got = ssd_module.ssd(*five, **options, return_final_state=True, backend=backend)
        assert called == want, f"{length} tokens, learning {learns}: {called}"
        for a, e in zip(got, definition(*five, D * whole, state * whole), strict=True):
            check(f"{backend}: y and the final state", a, e, tol=1e-5)


# --- the layer --------------------------------------------------------------------------------


def layer(position="rope", dtype=torch.float64, **changes):
    torch.manual_seed(0)
    sizes = dict(n_heads=4, n_groups=2, d_head=3, d_state=10, chunk_size=4, position=position)
    return SSD(8, **(sizes | changes)).to(dtype)


def tokens(b=2, length=11, dtype=torch.float64):
    return normal(b, length, 8, seed=1, dtype=dtype)


def test_layer_is_one_graph():
    is_one_graph(layer("conv"), forward, tokens(), rows("###..######", "##.#.#.####"))


@pytest.mark.parametrize("position", POSITIONS)
def test_steps_beside_sixteen_bits_are_wide(position):
    steps_are_wide(ssd_module, f"SSD, {position}")


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
    assert SSD(12, n_heads=3).d_head == 4
    assert SSD(8, n_heads=2, position="conv").conv.min() < 0


@pytest.mark.skipif(not STATUS.available, reason=STATUS.reason)
def test_layer_decodes_through_the_step_of_the_kernel():
    x, results = tokens(length=4, dtype=torch.float32).to(DEVICE), []
    with noted(chunk_scan=kernels, state_update=kernels) as called, torch.no_grad():
        for backend in ("kernel", "chunked"):
            mixer = layer(dtype=torch.float32, backend=backend).to(DEVICE)
            y, cache = forward(mixer, x[:, :3])
            last, cache = forward(mixer, x[:, 3:], cache=cache, start=3)
            results.append((y, last, cache.state))
    assert called == ["chunk_scan", "state_update"]
    for got, want in zip(*results, strict=True):
        check("decoded by the kernel = by the chunked form", got, want, tol=1e-5)


# --- what hides a mistake ------------------------------------------------------------------------


def test_listing_3_is_right_with_its_sum_over_the_sources():
    from planted.ssd import SOURCES  # which takes its properties from this file

    for case in ({}, dict(dt=1e-3), BLOCKS):
        agree(plant(ssd_module, SOURCES), "chunked", **case)


def test_wrong_axis_hides_in_one_chunk_and_behind_large_steps():
    from planted.ssd import TARGETS

    wrong_axis = plant(ssd_module, TARGETS)
    # At the listings' own step size, softplus(0), a chunk of 64 forgets all that could be spoilt.
    as_printed = dict(b=1, l=192, h=2, g=1, A=(-2, -1), chunk_size=64, zero_state=True)
    agree(wrong_axis, "chunked", **as_printed, dt=math.log(2))
    agree(wrong_axis, "chunked", **as_printed | dict(chunk_size=192), dt=1e-3)
    with pytest.raises(AssertionError, match="chunked form = definition, y"):
        agree(wrong_axis, "chunked", **as_printed, dt=1e-3)


def test_tiled_groups_hide_where_there_is_one_group_or_one_head_to_a_group():
    from planted.ssd import TILED

    for form, g in itertools.product(("step", "quadratic"), (1, 4)):
        agree(plant(ssd_module, TILED), form, g=g)


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
    mixer = layer()
    mixer.backend = "chunkd"
    with pytest.raises(KeyError, match="chunkd"):
        forward(mixer, tokens())


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
@pytest.mark.parametrize("available", [False, True])
def test_kernel_that_cannot_run_is_refused_with_the_reason(monkeypatch, call, available):
    error, message = (TypeError, "x is torch.float64") if available else (RuntimeError, "get one")
    status = kernels.KernelStatus(available, "interpreter" if available else "none", "get one")
    monkeypatch.setattr(kernels, "kernel_status", lambda: status)
    x, dt, A, B, C, _, state = inputs(l=5)
    with pytest.raises(error, match=message):
        if call == "ssd":
            ssd_module.ssd(x, dt, A, B, C, backend="kernel")
        elif call == "ssd_kernel":
            ssd_module.ssd_kernel(x, dt, A, B, C)
        else:
            ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], state, backend="kernel")
