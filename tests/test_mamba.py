"""Mamba-1: mamba-ssm and torch, work, digits, starts, and what the tables do not ask.

As in test_ssd.py, the properties are functions of a module.
"""

import importlib
import importlib.util
import itertools
import math
import sys
import types
import warnings
from functools import partial

import definitions
import pytest
import torch
import torch.nn.functional as F
from definitions import selective_scan as definition
from properties import (
    is_one_graph,
    normal,
    work,
    works_linearly,
)

import cheems_ref.mamba as mamba_module
from cheems_ref import verify
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


def scan(m, form, x, dt, A, B, C, D, state):
    f = m.selective_scan if form == "sequential" else m.selective_scan_parallel
    return f(x, dt, A, B, C, D=D, initial_state=state, return_final_state=True)


def scan_is_the_definition(m, form):
    tensors = inputs()
    got, want = scan(m, form, *tensors), definition(*tensors)
    for name, a, e in zip(("y", "final state"), got, want, strict=True):
        check(f"{form} scan = definition, {name}", a, e)


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


@pytest.mark.parametrize("form", SCANS)
def test_scans_without_options_in_sixteen_bits_and_with_extreme_steps(form):
    *tensors, D, state = inputs()
    name = "selective_scan" + "_parallel" * (form == "parallel")
    y = getattr(mamba_module, name)(*tensors)
    check("no D, no state", y, definition(*tensors, 0 * D, 0 * state)[0])
    _, final = scan(mamba_module, form, *tensors, D, state)
    assert final.untyped_storage().nbytes() == final.nbytes, "a view of all states"
    x, dt, *rest, state = inputs(dtype=torch.float32)
    assert torch.equal(scan(mamba_module, form, x, 0 * dt, *rest, state)[1], state)
    for dtype in (torch.bfloat16, torch.float16):
        for narrow in (False, True):
            scan_is_wide_inside(mamba_module, form, dtype, narrow)
    for dt in ((1e-8, 1e-4), (1e-6, 1e3), (10.0, 1e3)):
        tensors = inputs(b=1, l=1000, dt=dt, A=(-16.0, -1e-3), dtype=torch.float32)
        leaves = [t.requires_grad_() for t in tensors]
        results = scan(mamba_module, form, *leaves)
        sum(r.mean() for r in results).backward()
        assert all(t.isfinite().all() for t in (*results, *(t.grad for t in leaves))), dt


def test_parallel_scan_takes_few_steps_and_the_work_of_both_is_linear():
    works_linearly(lambda count: scan_to_a_number(mamba_module, "sequential", 8 * count))
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


def test_scan_is_that_of_mamba_ssm(mamba_ssm):
    """Theirs has length last, computes in float32 and starts from zero."""

    def theirs(x, dt, A, B, C, D):
        y, state = mamba_ssm.selective_scan_ref(
            x.mT, dt.mT, A, B.mT, C.mT, D, return_last_state=True
        )
        return y.mT, state

    for form, length in itertools.product(SCANS, (1, 13)):
        *tensors, state = inputs(l=length, n=4, dtype=torch.float32)

        def ours(*tensors, form=form, zero=0 * state):
            return scan(mamba_module, form, *tensors, zero)

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


def mamba(m=mamba_module, selective=True, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    sizes = dict(d_model=6, d_state=4, d_conv=3, dt_rank=2)
    mixer = m.Mamba(selective=selective, **(sizes | changes)).to(dtype)
    torch.nn.init.normal_(mixer.D)
    with torch.no_grad():  # larger steps than at the start, so that tokens tell apart
        mixer.dt_bias += 2
    return mixer


def by_hand(mixer, x):
    """The layer by its definition."""
    p, selective = dict(mixer.named_parameters()), mixer.selective
    return definitions.mamba_layer(p, x, None, selective=selective), None


def layer_is_the_definition(m, selective=True):
    mixer, x = mamba(m, selective), normal(2, 11, 6)
    check("layer = its equations", mixer(x)[0], by_hand(mixer, x)[0])


def pieces_are_one_pass(m):
    verify.pieces_equal_one_pass(mamba(m), normal(2, 11, 6))


def call(mixer, x, real, cache, start):
    """The layer knows neither padding nor positions."""
    return mixer(x, cache=cache)


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


@pytest.mark.parametrize("selective", [True, False])
def test_layer_starts_where_it_should_and_a_seed_gives_its_weights(selective):
    layer_starts_where_it_should(mamba_module, selective)
    a_seed_gives_its_weights(mamba_module, selective)


@pytest.mark.parametrize("scan", SCANS)
def test_layer_is_one_graph(scan):
    everything = torch.ones(2, 5, dtype=torch.bool)
    is_one_graph(mamba(scan=scan), call, normal(2, 5, 6), everything)


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


# --- bad input: what a signature does not say ---------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_states_of_nothing_or_of_sixteen_bits_are_refused():
    x, dt, A, B, C, D, state = inputs(l=5)
    narrow = [t.bfloat16() for t in (x, dt, A, B, C, D, state)]
    for tensors, message in (
        ((x[..., :0], dt[..., :0], A[:0], B, C, D[:0], state[:, :0]), "d must be at least 1"),
        ((x, dt, A[:, :0], B[..., :0], C[..., :0], D, state[..., :0]), "n must be at least 1"),
        (narrow, r"initial_state must be torch\.float32.*bfloat16"),
    ):
        for form in SCANS:
            with pytest.raises(ValueError, match=message):
                scan(mamba_module, form, *tensors)


@pytest.mark.usefixtures("unchecked")
def test_caches_of_other_layers_are_refused():
    mixer, x = mamba(), normal(2, 5, 6)
    _, cache = mixer(x)
    for of, other, message in (
        (x, cache._replace(conv=cache.conv[:1]), r"history must be .*\(2, 2, 12\).*\(1, 2, 12\)"),
        (x[:1], cache, r"cache\.state must be .*\(1, 12, 4\).*\(2, 12, 4\)"),
        (
            x,
            cache._replace(state=cache.state[..., :2]),
            r"= \(2, 12, 4\).*\(2, 12, 2\)",
        ),
        (x, cache._replace(state=cache.state.float()), r"must be torch\.float64.*float32"),
    ):
        with pytest.raises(ValueError, match=message):
            mixer(of, cache=other)
