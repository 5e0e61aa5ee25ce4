"""Mamba-1: mamba-ssm, SSD, work, digits, starts, and what the tables do not ask.

The properties are functions of a module m: planted/ hands them copies with a mistake.
"""

import importlib
import importlib.util
import itertools
import math
import sys
import types
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from definitions import selective_scan as definition
from properties import is_one_graph, normal, work, works_linearly

import cheems_ref.mamba as mamba_module
from cheems_ref.ssd import ssd_recurrent
from cheems_ref.state_space import ssm_convolution, ssm_kernel
from cheems_ref.verify import check, check_gradients, must_differ

SCANS = ("sequential", "parallel")


# --- the selective scan -----------------------------------------------------------------------


def inputs(b=2, l=13, d=3, n=2, *, dt=(1e-3, 1.0), dtype=torch.float64):
    """Seeded x, dt, A, B, C, D, state; dt log-uniform between two bounds."""
    shapes = (b, l, d), (b, l, n), (b, l, n), (d,), (b, d, n)
    x, B, C, D, state = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
    generator = torch.Generator().manual_seed(9)
    low, high = map(math.log, dt)
    steps = low + (high - low) * torch.rand(b, l, d, generator=generator, dtype=torch.float64)
    A = -0.1 - 16 * torch.rand(d, n, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return *(t.to(dtype) for t in (x, steps.exp(), A, B, C, D)), state.to(wide)


def scan(m, form, x, dt, A, B, C, D, state):
    f = m.selective_scan if form == "sequential" else m.selective_scan_parallel
    return f(x, dt, A, B, C, D=D, initial_state=state, return_final_state=True)


def same(name, ours, theirs, **tolerance):
    for what, actual, expected in zip(("y", "state"), ours, theirs, strict=True):
        check(f"{name}, {what}", actual, expected, **tolerance)


def scan_is_the_definition(m, form):
    tensors = inputs()
    same(f"{form} scan = definition", scan(m, form, *tensors), definition(*tensors))


def scan_is_wide_inside(m, form, dtype=torch.bfloat16):
    """All inputs are narrow; y has their dtype, the state that of the sums, both rounded once."""
    tensors = inputs(l=40, n=8, dtype=dtype)
    y, final = scan(m, form, *tensors)
    truth, state = definition(*(t.double() for t in tensors))
    half_a_digit = torch.finfo(dtype).eps / 2
    assert y.dtype == dtype
    assert ((y.double() - truth).abs() <= 1.02 * half_a_digit * truth.abs() + 1e-5).all()
    check(f"{form} scan = float64 definition, final state", final, state.float())


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
    for dtype in (torch.bfloat16, torch.float16):
        scan_is_wide_inside(mamba_module, form, dtype)
    leaves = [t.requires_grad_() for t in inputs(l=100, dt=(1e-6, 1e3), dtype=torch.float32)]
    results = scan(mamba_module, form, *leaves)
    sum(r.mean() for r in results).backward()
    assert all(t.isfinite().all() for t in (*results, *(t.grad for t in leaves)))


def test_parallel_scan_takes_few_steps_and_the_work_of_both_is_linear():
    works_linearly(lambda count: scan_to_a_number(mamba_module, "sequential", 8 * count))
    takes_few_steps(mamba_module, "parallel")


def test_scan_with_one_rate_per_channel_is_ssd_with_one_number_per_head():
    x, dt, A, B, C, D, state = inputs()
    got = scan(mamba_module, "sequential", x, dt, A[:, :1].expand(-1, 2), B, C, D, state)
    options = dict(D=D, initial_state=state[:, :, None], return_final_state=True)
    y, final = ssd_recurrent(x[..., None], dt, A[:, 0], B[:, :, None], C[:, :, None], **options)
    same("S6 = SSD", got, (y[..., 0], final[:, :, 0]))


def test_scan_that_does_not_select_is_a_convolution_and_one_that_selects_is_not():
    x, dt, A, B, C, D, _ = inputs()
    dt, B, C = (t[:1, :1].expand_as(t) for t in (dt, B, C))
    bars = [(torch.diag((dt[0, 0, i] * A[i]).exp()), dt[0, 0, i] * B[0, 0]) for i in range(3)]
    kernel = torch.stack([ssm_kernel(*bar, C[0, 0], 13) for bar in bars])
    y = ssm_convolution(kernel, x.mT).mT + D * x
    check("constant dt, B, C", mamba_module.selective_scan(x, dt, A, B, C, D=D), y)
    must_differ("dt by token", mamba_module.selective_scan(x, inputs()[1], A, B, C, D=D), y)


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

    *tensors, state = inputs(n=4, dtype=torch.float32)
    for form in SCANS:
        ours = partial(lambda *t, form: scan(mamba_module, form, *t, 0 * state), form=form)
        same("scan = mamba-ssm's", ours(*tensors), theirs(*tensors))
        check_gradients("scan = mamba-ssm's", ours, theirs, tensors)


def test_layer_is_that_of_mamba_ssm(mamba_ssm, monkeypatch):
    """Their reference of the layer, with torch's convolution in the place of the compiled one."""

    def convolution(x, weight, bias, activation):
        assert activation == "silu"
        weight = weight[:, None]
        x = F.pad(x, (weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(x, weight, bias, groups=x.shape[1]))

    monkeypatch.setattr(mamba_ssm, "causal_conv1d_fn", convolution)
    monkeypatch.setattr(mamba_ssm, "selective_scan_fn", mamba_ssm.selective_scan_ref)
    mixer, x = mamba().float(), normal(2, 11, 6, dtype=torch.float32)
    maps = (mixer.x_proj.weight, mixer.dt_proj.weight, mixer.out_proj.weight)
    want = mamba_ssm.mamba_inner_ref(
        mixer.in_proj(x).mT, mixer.conv[:, None], None, *maps, None, -mixer.A_log.exp(),
        D=mixer.D, delta_bias=mixer.dt_bias,
    )  # fmt: skip
    check("Mamba = mamba-ssm's reference", mixer(x)[0], want)


# --- the Mamba layer --------------------------------------------------------------------------


def mamba(**changes):
    torch.manual_seed(0)
    mixer = mamba_module.Mamba(6, **dict(d_state=4, d_conv=3, dt_rank=2) | changes).double()
    torch.nn.init.normal_(mixer.D)
    with torch.no_grad():  # larger steps than at the start, so that tokens tell apart
        mixer.dt_bias += 2
    return mixer


def call(mixer, x, real, cache, start):
    """The layer knows neither padding nor positions."""
    return mixer(x, cache=cache)


def layer_starts_where_it_should(m, selective=True):
    torch.manual_seed(0)
    mixer = m.Mamba(256, d_state=5, selective=selective)
    dt, conv = F.softplus(mixer.dt_bias), mixer.conv
    assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1 and dt.log().std() > 1
    assert conv.shape == (512, 4) and 0.49 < conv.abs().max() <= 0.5 and abs(conv.mean()) < 0.03
    check("A = -1, ..., -n", mixer.A_log.exp(), torch.arange(1.0, 6).expand(512, 5))
    assert torch.equal(mixer.D, torch.ones(512)) and mixer.dt_proj.weight.shape == (512, 16)
    names = [k for k, _ in mixer.named_parameters()]
    assert [k for k in names if "bias" in k] == ["dt_bias"]
    assert ("constant" in names, "x_proj.weight" in names) == (not selective, selective)


@pytest.mark.parametrize("selective", [True, False])
def test_layer_starts_where_it_should(selective):
    layer_starts_where_it_should(mamba_module, selective)


def test_layer_is_one_graph():
    everything = torch.ones(2, 5, dtype=torch.bool)
    is_one_graph(mamba(), call, normal(2, 5, 6), everything)


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
