"""Mamba-1: scans and layer against their definitions, mamba-ssm and torch, and planted mistakes.

As in test_ssd.py, the properties are functions of a module. The positive tests hand them
`cheems_ref.mamba`, the negative controls a copy of it with one planted mistake.
"""

import importlib
import importlib.util
import itertools
import math
import sys
import types
import warnings
from functools import partial

import properties
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import (
    is_one_graph,
    leaves_alone,
    moves_nothing_before_it,
    normal,
    one_entry,
    starts_alike,
    work,
    works_linearly,
)
from test_convolution import convolution
from test_state_space import LENGTHS

import cheems_ref.mamba as mamba_module
from cheems_ref.mamba import Mamba, MambaCache
from cheems_ref.ssd import ssd_recurrent
from cheems_ref.state_space import discretize_zoh, ssm_convolution, ssm_kernel
from cheems_ref.verify import check, check_gradients, must_differ

SCANS = ("sequential", "parallel")


def uniform(low, high, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


# --- the selective scan -----------------------------------------------------------------------

SCAN_NAMES = ("x", "dt", "A", "B", "C", "D", "state")


def inputs(b=2, l=13, d=3, n=2, *, dt=(1e-3, 1.0), A=(-16.0, -0.1), dtype=torch.float64, seed=0):
    """Seeded x, dt, A, B, C, D, state; dt log-uniform between two bounds, or one number for all."""
    wide = torch.promote_types(dtype, torch.float32)
    if isinstance(dt, tuple):
        steps = uniform(math.log(dt[0]), math.log(dt[1]), b, l, d, seed=seed).exp()
    else:
        steps = torch.full((b, l, d), dt, dtype=torch.float64)
    normals = (
        normal(*s, seed=seed + i)
        for i, s in enumerate(((b, l, d), (b, l, n), (b, l, n), (d,), (b, d, n)), start=1)
    )
    x, B, C, D, state = normals
    tensors = (x, steps, uniform(*A, d, n, seed=seed + 9), B, C, D, state)
    dtypes = (dtype, wide, wide, dtype, dtype, wide, wide)
    return tuple(t.to(k) for t, k in zip(tensors, dtypes, strict=True))


def definition(x, dt, A, B, C, D, state):
    """The two equations, one row, one channel, one token at a time, and nothing else."""
    b, length, d = x.shape
    y, final = [], []
    for i, j in itertools.product(range(b), range(d)):
        h = state[i, j]
        for t in range(length):
            h = (dt[i, t, j] * A[j]).exp() * h + dt[i, t, j] * B[i, t] * x[i, t, j]
            y.append(h @ C[i, t] + D[j] * x[i, t, j])
        final.append(h)
    y = torch.stack(y).view(b, d, length).mT if y else x
    return y, torch.stack(final).view_as(state)


def scan(m, form, x, dt, A, B, C, D, state):
    f = m.selective_scan if form == "sequential" else m.selective_scan_parallel
    return f(x, dt, A, B, C, D=D, initial_state=state, return_final_state=True)


CASES = {
    "thirteen tokens": {},
    **{f"l = {l}": dict(l=l) for l in (*LENGTHS, 3, 4, 7, 16, 17)},
    "small dt": dict(dt=1e-3),
    "large dt": dict(dt=(10.0, 100.0)),
    "dt = 0 at some tokens": dict(idle=(0, 3, 4, 5, 12)),
    "dt = 0 everywhere": dict(dt=0.0),
    "A = 0": dict(A=(0.0, 0.0)),
    "one of everything": dict(b=1, l=5, d=1, n=1),
    "as many tokens as channels and states": dict(b=3, l=3, d=3, n=3),
}


def of_case(case):
    case = dict(CASES[case] if isinstance(case, str) else case)
    idle = case.pop("idle", ())
    tensors = inputs(**case)
    tensors[1][:, list(idle)] = 0
    return tensors


def scan_is_the_definition(m, form, case="thirteen tokens"):
    tensors = of_case(case)
    for name, a, e in zip(
        ("y", "final state"), scan(m, form, *tensors), definition(*tensors), strict=True
    ):
        check(f"{form} scan = definition, {name}", a, e)


def scan_has_its_gradients(m, form, case="thirteen tokens"):
    check_gradients(f"{form} scan = definition", partial(scan, m, form), definition, of_case(case))


def scan_is_causal(m, form, length=13):
    """Moving token j, in all its inputs, moves y_j and changes no bit of what came before."""
    tensors = inputs(l=length)
    before = scan(m, form, *tensors)[0]
    for j in range(length):
        moved = [t.clone() for t in tensors]
        for i in (0, 1, 3, 4):
            moved[i][:, j] += 1
        after = scan(m, form, *moved)[0]
        check(f"token {j} moves nothing before it", after[:, :j], before[:, :j])
        must_differ(f"token {j} moved", after[:, j], before[:, j])


def scan_keeps_rows_apart(m, form):
    tensors = inputs(b=3)
    moved = [t.clone() for t in tensors]
    for i in (0, 1, 3, 4, 6):
        moved[i][1] += 1
    for before, after in zip(*(scan(m, form, *t) for t in (tensors, moved)), strict=True):
        check("the rows that stayed", after[[0, 2]], before[[0, 2]])
        must_differ("the row that moved", after[1], before[1])


def scan_joins_up(m, form, cuts=(0, 1, 4, 7, 13)):
    x, dt, A, B, C, D, state = inputs()
    y, final = scan(m, form, x, dt, A, B, C, D, state)
    for cut in cuts:
        first, second = slice(None, cut), slice(cut, None)
        head, middle = scan(
            m, form, x[:, first], dt[:, first], A, B[:, first], C[:, first], D, state
        )
        tail, end = scan(
            m, form, x[:, second], dt[:, second], A, B[:, second], C[:, second], D, middle
        )
        check("y of two passes = of one", torch.cat([head, tail], dim=1), y)
        check("state of two passes = of one", end, final)


def scan_leaves_its_inputs_alone(m, form):
    for length in (0, 1, 13):
        tensors = inputs(l=length)
        leaves_alone(partial(scan, m, form), *tensors)
        y, final = scan(m, form, *tensors)
        final.add_(1), y.add_(1)  # results are no views of the inputs either
        leaves = inputs(l=length)
        for name, t, e in zip(SCAN_NAMES, tensors, leaves, strict=True):
            assert torch.equal(t, e), f"{name} shares its memory with a result"


def scan_is_wide_inside(m, form, dtype=torch.bfloat16, narrow=False):
    """y has the dtype of x, the state that of the sums; both are right for the rounded inputs."""
    tensors = inputs(l=40, n=8, dtype=dtype)
    if narrow:  # dt, A and D in the dtype of x too
        tensors = (*(t.to(dtype) for t in tensors[:6]), tensors[6])
    y, final = scan(m, form, *tensors)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    truth = definition(*(t.double() for t in tensors))
    error, half_a_digit = (y.double() - truth[0]).abs(), torch.finfo(dtype).eps / 2
    assert (error <= 1.02 * half_a_digit * truth[0].abs() + 1e-5).all(), "rounded more than once"
    check(f"{form} scan = float64 definition, final state", final, truth[1].float())


def scan_to_a_number(m, form, length):
    """A sum over both results, through which every input receives a gradient."""
    y, final = scan(m, form, *(t.requires_grad_() for t in inputs(b=1, l=length, d=2, n=2)))
    return y.sum() + final.sum()


def scan_works_linearly(m, form):
    works_linearly(lambda count: scan_to_a_number(m, form, 8 * count))


def final_state_keeps_nothing_else(m, form):
    """It is no view of all states, which would keep them in memory with it."""
    _, final = scan(m, form, *inputs())
    assert final.untyped_storage().nbytes() == final.nbytes


def takes_few_steps(m, form):
    """Twice the tokens: so many operations more, always as many, and twice the bytes added before.

    Backward pass included; lengths that make a power of two with the state before the first token.
    """
    run = partial(scan_to_a_number, m, form)
    all_work = [work(run, length) for length in (31, 63, 127, 255)]
    operations = [b.operations - a.operations for a, b in itertools.pairwise(all_work)]
    assert len(set(operations)) == 1 and 0 < operations[0] < 50, f"operations more: {operations}"
    written = [b.bytes - a.bytes for a, b in itertools.pairwise(all_work)]
    more = [b - a for a, b in itertools.pairwise(written)]
    assert more[1] == 2 * more[0] > 0, f"bytes more: {written}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", SCANS)
def test_scan_is_the_definition(form, case):
    scan_is_the_definition(mamba_module, form, case)


@pytest.mark.parametrize("case", [c for c in CASES if c != "l = 0"])
@pytest.mark.parametrize("form", SCANS)
def test_scan_has_the_gradients_of_the_definition(form, case):
    scan_has_its_gradients(mamba_module, form, case)


@pytest.mark.parametrize("form", SCANS)
def test_gradients_of_the_scan_equal_difference_quotients(form):
    # dt and A stay clear of 0, beyond which there is nothing to take a difference with
    tensors = inputs(b=1, l=5, d=2, n=2, dt=(0.1, 1.0), A=(-2.0, -1.0))
    tensors = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(partial(scan, mamba_module, form), tensors)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    b=st.integers(1, 2),
    l=st.integers(0, 40),
    d=st.integers(1, 4),
    n=st.integers(1, 4),
    dt=st.sampled_from([0.0, 1e-3, (1e-3, 1e-1), (0.1, 1.0), (1.0, 30.0)]),
    seed=st.integers(0, 99),
)
def test_parallel_scan_is_the_sequential_one_at_any_size(**case):
    tensors = inputs(**case)
    forms = [partial(scan, mamba_module, form) for form in SCANS]
    for a, e in zip(forms[1](*tensors), forms[0](*tensors), strict=True):
        check("parallel = sequential", a, e)
    if case["l"]:
        check_gradients("parallel = sequential", forms[1], forms[0], tensors)


def test_parallel_scan_is_the_sequential_one_over_long_sequences():
    tensors = inputs(b=1, l=3000, d=2, n=2, dt=(1e-4, 1e-1), A=(-1.0, -1e-3))
    for a, e in zip(*(scan(mamba_module, form, *tensors) for form in SCANS), strict=True):
        check("parallel = sequential, l = 3000", a, e)


@pytest.mark.parametrize("form", SCANS)
def test_options_left_out_mean_zero(form):
    *tensors, D, state = inputs()
    f = (
        mamba_module.selective_scan
        if form == "sequential"
        else mamba_module.selective_scan_parallel
    )
    check("no D, no state", f(*tensors), definition(*tensors, 0 * D, 0 * state)[0])


@pytest.mark.parametrize("form", SCANS)
def test_nothing_before_a_token_moves_with_it(form):
    scan_is_causal(mamba_module, form)


@pytest.mark.parametrize("form", SCANS)
def test_rows_of_a_batch_do_not_meet(form):
    scan_keeps_rows_apart(mamba_module, form)


@pytest.mark.parametrize("form", SCANS)
def test_two_scans_joined_by_the_state_equal_one(form):
    scan_joins_up(mamba_module, form)


@pytest.mark.parametrize("form", SCANS)
def test_inputs_and_states_are_values(form):
    scan_leaves_its_inputs_alone(mamba_module, form)


@pytest.mark.parametrize("form", SCANS)
def test_final_state_keeps_nothing_else_in_memory(form):
    final_state_keeps_nothing_else(mamba_module, form)


@pytest.mark.parametrize("form", SCANS)
def test_dt_zero_leaves_the_state_alone_bit_for_bit(form):
    x, dt, A, B, C, D, state = inputs(dtype=torch.float32)
    assert torch.equal(scan(mamba_module, form, x, 0 * dt, A, B, C, D, state)[1], state)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", SCANS)
def test_results_have_their_dtypes_and_float32_accuracy_inside(form, dtype, narrow):
    scan_is_wide_inside(mamba_module, form, dtype, narrow)


@pytest.mark.parametrize("form", SCANS)
@pytest.mark.parametrize("dt", [(1e-8, 1e-4), (1e-6, 1e3), (10.0, 1e3)])
def test_extreme_decays_stay_finite(form, dt):
    tensors = inputs(b=1, l=2000, dt=dt, A=(-16.0, -1e-3), dtype=torch.float32)
    leaves = [t.requires_grad_() for t in tensors]
    results = scan(mamba_module, form, *leaves)
    sum(r.mean() for r in results).backward()
    assert all(r.isfinite().all() for r in results)
    for name, t in zip(SCAN_NAMES, leaves, strict=True):
        assert t.grad.isfinite().all(), f"gradient of {name}"


def test_work_of_the_sequential_scan_is_linear_in_the_length():
    scan_works_linearly(mamba_module, "sequential")


def test_parallel_scan_takes_few_steps_and_its_work_is_linear():
    takes_few_steps(mamba_module, "parallel")


def test_scan_with_one_rate_per_channel_is_ssd_with_one_number_per_head():
    x, dt, A, B, C, D, state = inputs()
    got = scan(mamba_module, "sequential", x, dt, A[:, :1].expand(-1, 2), B, C, D, state)
    want = ssd_recurrent(
        x[..., None],
        dt,
        A[:, 0],
        B[:, :, None],
        C[:, :, None],
        D=D,
        initial_state=state[:, :, None],
        return_final_state=True,
    )
    check("y of S6 = of SSD", got[0], want[0][..., 0])
    check("state of S6 = of SSD", got[1], want[1][:, :, 0])


def test_scan_that_does_not_select_is_a_convolution_and_one_that_selects_is_not():
    x, dt, A, B, C, D, _ = inputs()
    dt, B, C = (t[:1, :1].expand_as(t) for t in (dt, B, C))
    bars = [(torch.diag((dt[0, 0, i] * A[i]).exp()), dt[0, 0, i] * B[0, 0]) for i in range(3)]
    kernel = torch.stack([ssm_kernel(*bar, C[0, 0], 13) for bar in bars])
    y = ssm_convolution(kernel, x.mT).mT + D * x
    check("constant dt, B, C", mamba_module.selective_scan(x, dt, A, B, C, D=D), y)
    must_differ("dt by token", mamba_module.selective_scan(x, inputs()[1], A, B, C, D=D), y)


@pytest.mark.parametrize(
    "dt, A, gain", [(0.1, -1.0, 1.05), (0.69, -1.0, 1.38), (0.69, -16.0, 11.0)]
)
def test_euler_writes_more_than_zoh(dt, A, gain):
    """OTCE prints ZOH's B̄; Mamba's code and WM have dt B."""
    tensors = (torch.ones(1, 1, 1).double() * t for t in (1, dt, A, 1, 1))
    x, dt_1, A_1, B, C = tensors
    euler = mamba_module.selective_scan(x, dt_1, A_1[0], B, C)
    zoh = discretize_zoh(A_1[0], B[0, 0], dt)[1]
    assert (euler.flatten() / zoh).item() == pytest.approx(gain, rel=5e-3)


def test_scan_is_that_of_torch():
    """torch's associative_scan, a prototype, on the same pairs; it refuses l = 0."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(first, second):
        return second[0] * first[0], second[0] * first[1] + second[1]

    def theirs(a, b):
        return associative_scan(combine, (a, b), dim=1, combine_mode="generic")[1]

    for length in (2, 5, 8, 33):
        pair = uniform(0, 1, 2, length, 3), normal(2, length, 3)
        check("_scan = torch's associative_scan", mamba_module._scan(*pair), theirs(*pair))
        check_gradients("_scan = torch's associative_scan", mamba_module._scan, theirs, pair)


# --- mamba-ssm --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mamba_ssm():
    """mamba-ssm's selective_scan_interface without its compiled extension, imported aside."""
    pytest.importorskip("triton")
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        pytest.skip("mamba-ssm is not installed")
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        package = types.ModuleType("mamba_ssm")  # __init__.py would import everything
        package.__path__ = list(spec.submodule_search_locations)
        patch.setitem(sys.modules, "mamba_ssm", package)
        patch.setitem(sys.modules, "selective_scan_cuda", types.ModuleType("selective_scan_cuda"))
        module = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    for name in set(sys.modules) - known:
        if name.startswith("mamba_ssm"):
            del sys.modules[name]
    return module


@pytest.mark.parametrize("form", SCANS)
@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_scan_is_that_of_mamba_ssm(mamba_ssm, form, length):
    """Theirs has length last, computes in float32 and starts from zero."""
    *tensors, state = inputs(l=length, n=4, dtype=torch.float32)
    state = torch.zeros_like(state)

    def theirs(x, dt, A, B, C, D):
        y, state = mamba_ssm.selective_scan_ref(
            x.mT, dt.mT, A, B.mT, C.mT, D, return_last_state=True
        )
        return y.mT, state

    def ours(*tensors):
        return scan(mamba_module, form, *tensors, state)

    for name, a, e in zip(("y", "state"), ours(*tensors), theirs(*tensors), strict=True):
        check(f"scan = mamba-ssm's, {name}", a, e)
    check_gradients("scan = mamba-ssm's", ours, theirs, tensors)


def test_layer_is_that_of_mamba_ssm(mamba_ssm, monkeypatch):
    """Their reference of the layer, with torch's convolution in the place of the compiled one."""

    def convolution(x, weight, bias, activation):
        assert activation == "silu"
        weight = weight[:, None]
        return F.silu(
            F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight, bias, groups=x.shape[1])
        )

    monkeypatch.setattr(mamba_ssm, "causal_conv1d_fn", convolution)
    monkeypatch.setattr(mamba_ssm, "selective_scan_fn", mamba_ssm.selective_scan_ref)
    mixer, x = mamba(dtype=torch.float32), normal(2, 11, 6, dtype=torch.float32)
    want = mamba_ssm.mamba_inner_ref(
        mixer.in_proj(x).mT,
        mixer.conv[:, None],
        None,
        mixer.x_proj.weight,
        mixer.dt_proj.weight,
        mixer.out_proj.weight,
        None,
        -mixer.A_log.exp(),
        D=mixer.D,
        delta_bias=mixer.dt_bias,
    )
    check("Mamba = mamba-ssm's reference", mixer(x)[0], want)


# --- the Mamba layer --------------------------------------------------------------------------


# as small as a layer can be
SMALLEST = dict(d_model=1, d_state=1, d_conv=1, expand=1, dt_rank=1)


def mamba(m=mamba_module, selective=True, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    sizes = dict(d_model=6, d_state=4, d_conv=3, dt_rank=2)
    mixer = m.Mamba(selective=selective, **(sizes | changes)).to(dtype)
    torch.nn.init.normal_(mixer.D)
    with torch.no_grad():  # larger steps than at the start, so that tokens tell apart
        mixer.dt_bias += 2
    return mixer


def by_hand(mixer, x, cache=None):
    """The layer from its weights, around the definitions of the convolution and of the scan."""
    u, z = (x @ mixer.in_proj.weight.mT).chunk(2, dim=-1)
    b, length, e = u.shape
    u, conv = convolution(u, mixer.conv, history=None if cache is None else cache.conv)
    inner = u @ mixer.x_proj.weight.mT if mixer.selective else mixer.constant.expand(b, length, -1)
    rank, n = mixer.dt_proj.weight.shape[1], mixer.A_log.shape[1]
    dt, B, C = inner.split([rank, n, n], dim=-1)
    dt = torch.log1p(torch.exp(dt @ mixer.dt_proj.weight.mT + mixer.dt_bias))
    state = u.new_zeros(b, e, n) if cache is None else cache.state
    y, state = definition(u, dt, -mixer.A_log.exp(), B, C, mixer.D, state)
    return (y * z * z.sigmoid()) @ mixer.out_proj.weight.mT, MambaCache(state, conv)


def layer_is_the_definition(m, selective=True, **sizes):
    mixer = mamba(m, selective, **sizes)
    x = normal(2, 11, mixer.in_proj.in_features)
    cache = None
    for part in (x[:, :7], x[:, 7:]):
        want, want_cache = by_hand(mixer, part, cache)
        y, cache = mixer(part, cache=cache)
        check("layer = its equations, y", y, want)
        for name in cache._fields:
            check(f"layer = its equations, {name}", getattr(cache, name), getattr(want_cache, name))


def call(mixer, x, real, cache, start):
    """The layer knows neither padding nor positions."""
    return mixer(x, cache=cache)


def calls_join_up(m, selective=True, pieces=(5, 6), scan="parallel", **sizes):
    mixer, cuts = mamba(m, selective, scan=scan, **sizes), [*itertools.accumulate(pieces)][:-1]
    properties.calls_join_up(mixer, normal(2, 11, mixer.in_proj.in_features), cuts, call=call)


def layer_is_causal(m, selective=True):
    for j in range(11):
        moves_nothing_before_it(mamba(m, selective), normal(2, 11, 6), j, call=call)


def layer_starts_where_it_should(m, selective=True):
    torch.manual_seed(0)
    mixer = m.Mamba(256, d_state=5, selective=selective)
    dt = F.softplus(mixer.dt_bias)
    assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1 and dt.log().std() > 1
    check("A = -1, ..., -n", mixer.A_log.exp(), torch.arange(1.0, 6).expand(512, 5))
    assert torch.equal(mixer.D, torch.ones(512))
    assert mixer.dt_proj.weight.shape == (512, 16) and mixer.conv.shape == (512, 4)
    assert [k for k, _ in mixer.named_parameters() if "bias" in k] == ["dt_bias"]


def a_seed_gives_its_weights(m, selective=True):
    """Those of layers made one after the other: the order in which the weights are drawn."""
    torch.manual_seed(0)
    got = dict(m.Mamba(20, d_state=5, selective=selective).named_parameters())
    torch.manual_seed(0)
    maps = dict(in_proj=(20, 80), x_proj=(40, 12), dt_proj=(2, 40), out_proj=(40, 20))
    want = {
        f"{name}.weight": torch.nn.Linear(*widths, bias=False).weight
        for name, widths in maps.items()
        if selective or name != "x_proj"
    }
    want["conv"] = torch.empty(40, 4).uniform_(-0.5, 0.5)
    if not selective:
        want["constant"] = torch.randn(12)
    dt = torch.empty(40).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    want["dt_bias"] = dt + torch.log(-torch.expm1(-dt))
    for name, t in want.items():
        assert torch.equal(got[name], t), f"{name} is drawn at another time or from elsewhere"


def layer_is_materialised(m, selective=True):
    starts_alike(lambda: m.Mamba(6, d_state=3, selective=selective))


def layer_asks_nothing(m, selective=True, scan="parallel"):
    properties.asks_nothing(mamba(m, selective, scan=scan), normal(2, 5, 6), call=call)


def layer_is_one_graph(m, scan="parallel"):
    everything = torch.ones(2, 5, dtype=torch.bool)
    is_one_graph(mamba(m, scan=scan), call, normal(2, 5, 6), everything)


both = pytest.mark.parametrize("selective", [True, False])


@pytest.mark.parametrize("sizes", [{}, SMALLEST, dict(d_conv=1), dict(d_state=1, dt_rank=1)])
@both
def test_layer_is_the_definition_between_projections(selective, sizes):
    layer_is_the_definition(mamba_module, selective, **sizes)


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("pieces", [(5, 6), (0, 2, 2, 7), (4, *[1] * 7), (1,) * 11], ids=str)
@both
def test_prefill_continued_prefill_and_decoding_agree(selective, pieces, scan):
    calls_join_up(mamba_module, selective, pieces, scan)


@pytest.mark.parametrize("scan", SCANS)
@both
def test_calls_of_the_smallest_layer_agree(selective, scan):
    calls_join_up(mamba_module, selective, (4, *[1] * 7), scan, **SMALLEST)


@both
def test_layer_is_the_same_with_either_scan(selective):
    x = normal(2, 11, 6)
    (y, cache), (want, want_cache) = (mamba(selective=selective, scan=scan)(x) for scan in SCANS)
    check("y", y, want)
    check("state", cache.state, want_cache.state)


@both
def test_nothing_before_a_token_moves_with_it_through_the_layer(selective):
    layer_is_causal(mamba_module, selective)


@both
def test_layer_starts_where_it_should(selective):
    layer_starts_where_it_should(mamba_module, selective)


@both
def test_a_seed_gives_its_weights(selective):
    a_seed_gives_its_weights(mamba_module, selective)


@both
def test_layer_starts_the_same_on_any_device(selective):
    layer_is_materialised(mamba_module, selective)


@pytest.mark.parametrize("scan", SCANS)
@both
def test_layer_asks_the_device_nothing(selective, scan):
    layer_asks_nothing(mamba_module, selective, scan)


@pytest.mark.parametrize("scan", SCANS)
def test_layer_is_one_graph(scan):
    layer_is_one_graph(mamba_module, scan)


@pytest.mark.parametrize("length", [2, 11])
@both
def test_every_parameter_of_the_layer_receives_a_finite_gradient_that_is_not_zero(
    selective, length
):
    mixer = mamba(selective=selective)
    mixer(normal(2, length, 6))[0].square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


@both
def test_layer_keeps_shape_and_its_cache_is_a_value(selective):
    mixer = mamba(selective=selective)
    for length in (11, 0):
        y, cache = mixer(normal(2, length, 6))
        assert y.shape == (2, length, 6)
        assert (cache.state.shape, cache.conv.shape) == ((2, 12, 4), (2, 2, 12))
    assert not any(t.any() for t in cache)
    _, cache = mixer(normal(2, 4, 6))
    leaves_alone(lambda *cache: mixer(normal(2, 3, 6), cache=MambaCache(*cache)), *cache)


def test_control_has_all_but_the_projection_of_the_input():
    one, other = (dict(mamba(selective=s).named_parameters()) for s in (True, False))
    assert one.keys() ^ other.keys() == {"x_proj.weight", "constant"}
    assert other["constant"].shape == one["x_proj.weight"].shape[:1]


def test_control_is_time_invariant_and_the_layer_is_not():
    """What a state keeps of a first token: in the control the same, whatever comes after."""
    first, quiet, loud = normal(1, 1, 6), torch.zeros(1, 5, 6).double(), 9 * normal(1, 5, 6, seed=1)
    for selective, compare in ((False, check), (True, must_differ)):
        mixer = mamba(selective=selective, d_conv=1)
        kept = []
        for after in (quiet, loud):
            states = [mixer(torch.cat([x, after], dim=1))[1].state for x in (first, 0 * first)]
            kept.append(states[0] - states[1])
        scale = kept[0].abs().max()
        compare("what is kept of the first token", kept[1] / scale, kept[0] / scale)


def test_layer_computes_in_sixteen_bits_with_a_float32_state():
    x = normal(2, 11, 6, dtype=torch.bfloat16)
    y, cache = mamba(dtype=torch.bfloat16)(x)
    assert (y.dtype, cache.state.dtype, cache.conv.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
    )
    want = mamba(dtype=torch.bfloat16).double()(x.double())[0]
    check("bfloat16 = float64", y, want.bfloat16(), tol=4e-2)


# --- bad input --------------------------------------------------------------------------------


SCAN = dict(zip((*SCAN_NAMES[:6], "initial_state"), inputs(l=5), strict=True))
scans = [
    partial(f, **SCAN) for f in (mamba_module.selective_scan, mamba_module.selective_scan_parallel)
]

# The function, one argument, what it is changed into, and what the message says.
# fmt: off
BAD = [
    *((f, name, change(SCAN[name]), message) for f in scans for name, change, message in (
        ("x", lambda t: t[0], r"x must be \(b, l, d\), got shape \(5, 3\)"),
        ("x", lambda t: t.long(), r"x must be floating-point, got torch\.int64"),
        ("x", lambda t: t[..., :0], r"dt must be \(b, l, d\) = \(2, 5, 0\).*\(2, 5, 3\)"),
        ("dt", lambda t: t[..., 0], r"dt must be \(b, l, d\) = \(2, 5, 3\).*\(2, 5\)"),
        ("dt", lambda t: t[:, :4], r"dt must be .*\(2, 5, 3\).*\(2, 4, 3\)"),
        ("dt", one_entry(-0.5), r"dt must be .*-0\.5"),
        ("dt", one_entry(math.nan), "dt must be .*nan"),
        ("dt", one_entry(math.inf), "dt must be .*inf"),
        ("A", lambda t: t[:, 0], r"A must be \(d, n\) = \(3, n\).*\(3,\)"),
        ("A", lambda t: t[:2], r"A must be .*\(3, n\).*\(2, 2\)"),
        ("A", lambda t: t[:, :0], r"B must be \(b, l, n\) = \(2, 5, 0\).*\(2, 5, 2\)"),
        ("A", one_entry(0.25), r"A must be .*0\.25"),
        ("A", one_entry(math.nan), "A must be .*nan"),
        ("A", one_entry(-math.inf), "A must be .*-inf"),
        ("B", lambda t: t[..., :1], r"B must be .*\(2, 5, 2\).*\(2, 5, 1\)"),
        ("B", lambda t: t[:1], r"B must be .*\(2, 5, 2\).*\(1, 5, 2\)"),
        ("C", lambda t: t[:, :4], r"C must be .*\(2, 5, 2\).*\(2, 4, 2\)"),
        ("C", lambda t: t[:, :, None], r"C must be .*\(2, 5, 1, 2\)"),
        ("D", lambda t: t[:2], r"D must be \(d,\) = \(3,\).*\(2,\)"),
        ("initial_state", lambda t: t.mT, r"initial_state must be .*\(2, 3, 2\).*\(2, 2, 3\)"),
        *((name, lambda t: t.float(), rf"{name} must be torch\.float64.*float32")
          for name in ("dt", "A", "B", "C", "D", "initial_state")))),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize(("function", "name", "value", "message"), BAD)
    def test_is_refused_with_its_name_and_numbers(self, function, name, value, message):
        with pytest.raises(ValueError, match=message):
            function(**{name: value})

    @pytest.mark.parametrize("letter", ["d", "n"])
    def test_state_of_nothing_is_refused(self, letter):
        axes = dict(x="bld", dt="bld", A="dn", B="bln", C="bln", D="d", initial_state="bdn")
        empty = {
            k: t.narrow(axes[k].find(letter), 0, 0) if letter in axes[k] else t
            for k, t in SCAN.items()
        }
        for f in (mamba_module.selective_scan, mamba_module.selective_scan_parallel):
            with pytest.raises(ValueError, match=f"{letter} must be at least 1, got 0"):
                f(**empty)

    def test_sixteen_bit_state_is_refused(self):
        narrow = {name: t.bfloat16() for name, t in SCAN.items()}
        for f in (mamba_module.selective_scan, mamba_module.selective_scan_parallel):
            with pytest.raises(ValueError, match=r"initial_state must be torch\.float32.*bfloat16"):
                f(**narrow)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(d_model=0), "d_model must be .*0"),
            (dict(d_state=0), "d_state must be .*0"),
            (dict(d_conv=0), "d_conv must be .*0"),
            (dict(expand=0), "expand must be .*0"),
            (dict(dt_rank=0), "dt_rank must be .*0"),
            (dict(scan="fast"), "scan must be one of 'parallel', 'sequential', got 'fast'"),
        ],
    )
    def test_options_of_the_layer(self, options, message):
        with pytest.raises(ValueError, match=message):
            Mamba(**dict(d_model=6) | options)

    def test_calls_of_mamba(self):
        mixer, x = mamba(), normal(2, 5, 6)
        _, cache = mixer(x)
        for call, message in (
            (lambda: mixer(x[0]), r"x must be \(b, l, d\) = \(b, l, 6\).*\(5, 6\)"),
            (lambda: mixer(x[..., :4]), r"x must be .*\(b, l, 6\).*\(2, 5, 4\)"),
            (
                lambda: mixer(x, cache=cache._replace(conv=cache.conv[:1])),
                r"history must be .*\(2, 2, 12\).*\(1, 2, 12\)",
            ),
            (
                lambda: mixer(x[:1], cache=cache),
                r"cache\.state must be .*\(1, 12, 4\).*\(2, 12, 4\)",
            ),
            (
                lambda: mixer(x, cache=cache._replace(state=cache.state[..., :2])),
                r"cache\.state must be \(b, d_inner, n\) = \(2, 12, 4\).*\(2, 12, 2\)",
            ),
            (
                lambda: mixer(x, cache=cache._replace(state=cache.state.float())),
                r"cache\.state must be torch\.float64.*float32",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                call()
