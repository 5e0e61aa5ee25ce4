"""SSD in Triton by hand: against the recurrence and mamba-ssm's kernels, values and gradients; and
what the compiler makes of it for GPUs that need not be there.
"""

import importlib.util

import numpy as np
import pytest
import torch

from cheems_ref import kernels
from cheems_ref.compiler import GPUS, compiling_for, resources
from cheems_ref.ssd import ssd_kernel, ssd_recurrent
from cheems_ref.verify import check

STATUS = kernels.kernel_status()
TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not STATUS.available, reason=STATUS.reason)
DEVICE = "cuda" if STATUS.mode == "cuda" else "cpu"
triton_ssd = importlib.import_module("cheems_ref.triton_ssd") if TRITON else None

# b, l, h, p, g, n, chunk_size
SHAPES = {
    "ragged": (1, 37, 1, 16, 1, 16, 16),
    "one token": (2, 1, 2, 4, 1, 4, 64),
    "odd sizes": (1, 18, 1, 5, 1, 19, 16),
    "groups": (2, 18, 4, 8, 2, 8, 16),
    "long chunks": (1, 70, 1, 8, 1, 8, 1000),
    "several tiles": (1, 20, 1, 130, 1, 33, 32),
}
NAMES = ("x", "dt", "A", "B", "C", "D", "initial_state")


def drawn(shape, dtype=torch.float32, seed=0):
    """x, dt, A, B, C and a state."""
    b, length, h, p, g, n, _ = shape
    generator = torch.Generator().manual_seed(seed)
    x, B, C = (
        torch.randn(b, length, *s, generator=generator).to(dtype) for s in ((h, p), (g, n), (g, n))
    )
    dt, A = torch.rand(b, length, h, generator=generator), -torch.rand(h, generator=generator) - 0.1
    state = torch.randn(b, h, p, n, generator=generator)
    return [t.to(DEVICE) for t in (x, dt, A, B, C, state)]


def same(title, ours, theirs, tol=1e-6):
    for name, a, e in zip(("y", "state"), ours, theirs, strict=True):
        check(f"{title}, {name}", a.double(), e.double(), tol=tol)


def is_the_recurrence(m, shape):
    """In y and in the state, from zeros and from a state, with D."""
    *tensors, state = drawn(shape)
    D, how = torch.linspace(-1, 1, shape[2], device=DEVICE), dict(return_final_state=True)
    for initial in (None, state):
        got = m.ssd_triton(*tensors, D=D, chunk_size=shape[-1], initial_state=initial, **how)
        exact = [None if t is None else t.double() for t in (*tensors, D, initial)]
        *exact, wide_D, initial = exact
        same(f"{shape}", got, ssd_recurrent(*exact, D=wide_D, initial_state=initial, **how))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_is_the_recurrence(shape):
    is_the_recurrence(triton_ssd, shape)


def gradients(form, tensors, D, state, weights):
    """Of a weighted sum of y and the final state, with respect to all seven tensors."""
    leaves = [t.detach().clone().requires_grad_() for t in (*tensors, D, state)]
    x, dt, A, B, C, D, state = leaves
    options = dict(D=D, initial_state=state, return_final_state=True, chunk_size=16)
    y, final = form(x, dt, A, B, C, **options)
    of_y, of_final = (w.to(t) for w, t in zip(weights, (y, final), strict=True))
    return torch.autograd.grad((y * of_y).sum() + (final * of_final).sum(), leaves)


def is_differentiable(m, shape, slow=1.0, tol=1e-6, tol_A=1e-4):
    """As the recurrence in float64. A's gradient is a difference of sums that are much larger than
    itself, and has fewer digits: on these shapes, an error of 2e-5 at most, where x has 2e-7.
    """
    *tensors, state = drawn(shape)
    tensors[1] = tensors[1] * slow
    D, generator = torch.linspace(-1, 1, shape[2]).to(DEVICE), torch.Generator().manual_seed(5)
    weights = [torch.randn(t.shape, generator=generator) for t in (tensors[0], state)]
    wide = [t.double() for t in tensors], D.double(), state.double()
    got = gradients(m.ssd_triton, tensors, D, state, weights)
    want = gradients(ssd_recurrent, *wide, weights)
    for name, a, e in zip(NAMES, got, want, strict=True):
        check(f"{shape}, d{name}", a.double(), e, tol=tol_A if name == "A" else tol, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_is_differentiable(shape):
    is_differentiable(triton_ssd, shape)


def test_is_differentiable_where_little_decays_for_many_tokens():
    is_differentiable(triton_ssd, (1, 200, 2, 8, 1, 8, 64), slow=0.01)


def test_only_what_is_asked_for_has_a_gradient():
    """And resets, whose decay is exactly 0, leave every gradient finite."""
    x, dt, A, B, C, _ = drawn(SHAPES["ragged"])
    dt[:, 20] = 1e6
    dt.requires_grad_()
    triton_ssd.ssd_triton(x, dt, A, B, C).sum().backward()
    wide = dt.detach().double().requires_grad_()
    ssd_recurrent(x.double(), wide, A.double(), B.double(), C.double()).sum().backward()
    assert x.grad is None
    check("with a reset", dt.grad.double(), wide.grad, tol=1e-5)


def large_steps_lose_no_digits(m):
    """One huge step resets the state; float32 sums would lose the small steps after it."""
    x, dt, A, B, C, _ = drawn((1, 64, 1, 8, 1, 8, 64), seed=2)
    dt, A = torch.full_like(dt, 0.01), torch.full_like(A, -16)
    dt[:, ::8] = 5
    got = m.ssd_triton(x, dt, A, B, C, return_final_state=True)
    exact = [t.double() for t in (x, dt, A, B, C)]
    same("after large steps", got, ssd_recurrent(*exact, return_final_state=True), tol=1e-6)


def test_large_steps_lose_no_digits():
    large_steps_lose_no_digits(triton_ssd)


def test_agrees_with_the_kernels_of_mamba_ssm_whatever_the_layout():
    *tensors, state = drawn((2, 18, 4, 8, 2, 8, 16), seed=1)
    how = dict(chunk_size=16, return_final_state=True)
    turned = [t.mT.contiguous().mT if t.ndim > 1 else t for t in (*tensors, state)]
    got = triton_ssd.ssd_triton(*turned[:-1], initial_state=turned[-1], **how)
    same("by hand = mamba-ssm's", got, ssd_kernel(*tensors, initial_state=state, **how), tol=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_cost_about_one_rounding(dtype):
    *tensors, state = drawn(SHAPES["odd sizes"], dtype)
    how = dict(chunk_size=16, return_final_state=True)
    y, final = triton_ssd.ssd_triton(*tensors, initial_state=state, **how)
    exact = [t.double() for t in (*tensors, state)]
    want, final_want = ssd_recurrent(*exact[:-1], initial_state=exact[-1], **how)
    assert y.dtype == dtype and final.dtype == torch.float32
    check("y", y.double(), want, tol=torch.finfo(dtype).eps)
    check("state", final.double(), final_want, tol=torch.finfo(dtype).eps)


def in_tf32(t):
    """Float32 numbers rounded to ten bits of mantissa, as a tensor core reads them."""
    return ((t.view(np.int32) + 0x1000) & ~0x1FFF).view(np.float32)


@pytest.mark.skipif(DEVICE == "cuda", reason="only in the interpreter")
@pytest.mark.parametrize(("products", "least", "most"), [(1, 1e-4, 1e-2), (3, 0, 5e-7)])
def test_three_products_of_tf32_keep_nearly_all_digits(monkeypatch, products, least, most):
    """Simulated: the interpreter multiplies in float32, whatever it is asked for."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self, a, b, acc, precision, imprecise):
        a_high, b_high = in_tf32(a.data), in_tf32(b.data)
        total = a_high @ b_high
        if products == 3:
            a_low, b_low = in_tf32(a.data - a_high), in_tf32(b.data - b_high)
            total = (a_high @ b_low + a_low @ b_high) + total
        return TensorHandle(total + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    *tensors, state = drawn((1, 96, 1, 32, 1, 64, 64), seed=3)
    y = triton_ssd.ssd_triton(*tensors, initial_state=state)
    x, dt, A, B, C, state = (t.double() for t in (*tensors, state))
    truth = ssd_recurrent(x, dt, A, B, C, initial_state=state)
    assert least < (y - truth).abs().max() / truth.abs().max() < most


def test_nothing_in_gives_nothing_out():
    for b, length in ((2, 0), (0, 5)):
        *tensors, state = drawn((b, length, 2, 4, 1, 3, 16))
        y, final = triton_ssd.ssd_triton(*tensors, initial_state=state, return_final_state=True)
        assert y.shape == (b, length, 2, 4) and torch.equal(final, state)


@pytest.mark.usefixtures("unchecked")
def test_what_it_cannot_do_is_refused():
    *tensors, _ = drawn(SHAPES["one token"])
    with pytest.raises(TypeError, match="float64"):
        triton_ssd.ssd_triton(*(t.double() for t in tensors))
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        triton_ssd.ssd_triton(*tensors, chunk_size=0)
    for name, *shape in (("b", 65_536, 1, 1, 1), ("h", 1, 1, 65_536, 1)):
        x, one = torch.ones(shape), torch.ones(shape[0], 1, 1, 1)
        with pytest.raises(ValueError, match=rf"{name} must be .*65535\], got 65536"):
            triton_ssd.ssd_triton(x, x[..., 0], -x[0, 0, :, 0], one, one)
    x, dt, A, B, C = (t.requires_grad_() for t in tensors)
    squares = triton_ssd.ssd_triton(x, dt, A, B, C).square().sum()
    (dx,) = torch.autograd.grad(squares, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# --- what the compiler says --------------------------------------------------------------------


def compiled(capability, dtype, l=128, h=4, p=64, g=1, n=128):
    """The three kernels as ssd_triton would launch them: cheems-1.3b's heads and states."""
    x, B = torch.zeros(1, l, h, p, dtype=dtype), torch.zeros(1, l, g, n, dtype=dtype)
    with compiling_for(capability) as found:
        triton_ssd.ssd_triton(x, torch.zeros(1, l, h), torch.zeros(h), B, B)
    return found


def fits(title, found, capability):
    """No spills, tensor cores where there is a product, and a GPU can hold it."""
    for kernel in map(resources, found):
        assert kernel.spilled == 0, f"{title}: {kernel}"
        assert kernel.shared <= GPUS[capability].shared_of_one and kernel.occupancy > 0, kernel
        assert (kernel.products > 0) == (kernel.name != "_carry"), kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", [80, 90])
def test_nothing_is_spilled(capability, dtype):
    found = compiled(capability, dtype)
    assert [kernel.metadata.name for kernel in found] == ["_write", "_carry", "_read"]
    fits(f"sm_{capability}, {dtype}", found, capability)
    pointer = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    for name in ("x", "B", "C"):  # as they are, not as copies
        assert f"%{name}: !tt.ptr<{pointer}>" in found[-1].asm["ttir"]


@pytest.mark.parametrize("sizes", [dict(p=130, n=33, l=70, h=3), dict(p=32, n=256, l=32)], ids=str)
def test_nothing_is_spilled_whatever_n_and_p(sizes):
    fits(f"{sizes}", compiled(80, torch.float32, **sizes), 80)


def test_the_compiler_sees_a_spill(monkeypatch):
    """A program of _read that takes all 128 entries of the state at once."""
    monkeypatch.setattr(triton_ssd, "N", 128)
    with pytest.raises(AssertionError, match="_read"):
        fits("a tile of all n", compiled(80, torch.float32), 80)


def test_an_absent_gpu_leaves_nothing_behind():
    from triton import JITFunction
    from triton.runtime.driver import driver

    before = driver._active, JITFunction.run, kernels._check, torch.cuda.device
    compiled(80, torch.bfloat16)
    assert (driver._active, JITFunction.run, kernels._check, torch.cuda.device) == before
    with pytest.raises(ValueError, match="capability must be one of 80, 86, 89, 90, 100, got 70"):
        compiled(70, torch.bfloat16)
