"""State space models: discretisation, kernels, HiPPO, and what the tables do not ask of S4D.

The properties are functions of a module m: planted/ hands them copies with a mistake. Chapter 01
asks for orders of convergence, and trains S4D and runs it at other sampling rates.
"""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from properties import leaves_alone, normal, questions, works_linearly

import cheems_ref.state_space as state_space
from cheems_ref.verify import check, must_differ

INITS = ("lin", "legs")


# --- one channel: discretisation --------------------------------------------------------------

DECAYING = normal(4, 4) - 2 * torch.eye(4), normal(4, seed=1)
SYSTEMS = {  # the last two A have no inverse
    "decaying": DECAYING,
    "growing": (normal(3, 3, seed=2), normal(3, seed=3)),
    "mass without friction": (torch.tensor([[0.0, 1], [0, 0]]).double(), normal(2)),
    "nothing": (torch.zeros(2, 2).double(), normal(2)),
}


def integrated(A, B, dt):
    """The state after dt with the input held at 1 (and from each unit state without input), by RK4.

    Its error is about (|A| dt / steps)^4 / 120 in units of |A| dt: below 1e-10.
    """
    n, steps = len(B), max(1, math.ceil(150 * dt * A.norm().item()))
    h, step = torch.eye(n, n + 1, dtype=A.dtype), dt / steps
    x = torch.zeros(n, n + 1, dtype=A.dtype)
    x[:, n] = B
    for _ in range(steps):
        k_1 = A @ h + x
        k_2 = A @ (h + step / 2 * k_1) + x
        k_3 = A @ (h + step / 2 * k_2) + x
        k_4 = A @ (h + step * k_3) + x
        h = h + step / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)
    return h[:, :n], h[:, n]


def zoh_integrates_the_equation(m):
    for (name, (A, B)), dt in itertools.product(SYSTEMS.items(), (1e-3, 0.4, 1.5)):
        for what, a, e in zip("AB", m.discretize_zoh(A, B, dt), integrated(A, B, dt), strict=True):
            check(f"ZOH = integral of the equation, {what} of {name}, dt = {dt}", a, e)


def test_discretisations_are_their_formulas():
    zoh_integrates_the_equation(state_space)
    for (A, B), dt in itertools.product(SYSTEMS.values(), (0.4, 1.5)):
        identity = torch.eye(len(B), dtype=A.dtype)
        M = torch.linalg.inv(identity - dt / 2 * A)
        A_bar, B_bar = state_space.discretize_bilinear(A, B, dt)
        check("Ā = (I - dt A/2)⁻¹ (I + dt A/2)", A_bar, M @ (identity + dt / 2 * A))
        check("B̄ = (I - dt A/2)⁻¹ dt B", B_bar, dt * M @ B)


@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_what_decays_still_decays_and_gradients_are_those_of_difference_quotients(rule):
    rule = getattr(state_space, f"discretize_{rule}")
    for dt in (1e-3, 1.0, 1e3):
        decayed = rule(*state_space.hippo_legs(6), dt)[0]
        assert torch.linalg.eigvals(decayed).abs().max() < 1
    leaves_alone(partial(rule, dt=0.3), *DECAYING)
    inputs = [t.clone().requires_grad_() for t in DECAYING]
    assert torch.autograd.gradcheck(partial(rule, dt=0.3), inputs)


# --- one channel: recurrence, kernel, convolution ---------------------------------------------


def channel(l=13, dtype=torch.float64):
    """Ā, B̄, C, x and a state; Ā is a rotation of sorts that decays slowly."""
    A_bar = torch.linalg.matrix_exp(0.3 * (normal(3, 3) - normal(3, 3).mT) - 0.1 * torch.eye(3))
    drawn = (normal(*shape, seed=i) for i, shape in enumerate(((3,), (3,), (2, l), (2, 3)), 1))
    return tuple(t.to(dtype) for t in (A_bar, *drawn))


def recurrence_is_not_as_printed(m):
    """L22: h_{k+1} = Ā h_k + B̄ x_k and y_k = C h_k, one step late beside a kernel from C B̄ on."""
    A_bar, B_bar, C, x, _ = channel()
    h, printed = x.new_zeros(2, 3), []
    for x_k in x.unbind(1):
        printed.append(h @ C)
        h = h @ A_bar.mT + x_k[:, None] * B_bar
    printed, y = torch.stack(printed, dim=1), m.ssm_recurrent(A_bar, B_bar, C, x)
    check("as printed = delayed by one step", printed, F.pad(y, (1, 0))[:, :-1])
    must_differ("as printed", printed, y, at_least=0.1)


def convolution_is_the_sum(m):
    """With entries as large at the end as at the beginning, so that what wraps round is seen."""
    for length in (1, 2, 9):
        kernel, x = normal(3, length), normal(2, 3, length, seed=1)
        sums = [(kernel[:, : t + 1].flip(-1) * x[..., : t + 1]).sum(-1) for t in range(length)]
        check("FFT = sum", m.ssm_convolution(kernel, x), torch.stack(sums, dim=-1))


def test_recurrence_and_convolution_in_double_and_in_float32():
    recurrence_is_not_as_printed(state_space)
    convolution_is_the_sum(state_space)
    wide, narrow = channel(l=200), channel(l=200, dtype=torch.float32)
    y = state_space.ssm_recurrent(*wide[:4]).float()
    check("recurrence in float32", state_space.ssm_recurrent(*narrow[:4]), y)
    kernel = state_space.ssm_kernel(*narrow[:3], 200)
    check("convolution in float32", state_space.ssm_convolution(kernel, narrow[3]), y)


def test_work_of_the_recurrence_is_linear():
    def run(count):
        *tensors, state = (t.requires_grad_() for t in channel(l=8 * count))
        y = state_space.ssm_recurrent(*tensors, initial_state=state, return_final_state=True)
        return y[0].sum() + y[1].sum()

    works_linearly(run, (1, 2, 3))


# --- HiPPO ------------------------------------------------------------------------------------


def test_hippo_is_its_formula_and_rests_under_a_constant():
    for n in (1, 2, 8):
        A, B = state_space.hippo_legs(n)
        want = -torch.diag(torch.arange(1, n + 1).double())
        for i, j in itertools.combinations(range(n), 2):
            want[j, i] = -math.sqrt((2 * i + 1) * (2 * j + 1))
        check("A of HiPPO", A, want, tol=1e-14)
        check("B of HiPPO", B, (2 * torch.arange(n).double() + 1).sqrt(), tol=1e-7)
        # of a constant input it keeps the constant: A (1, 0, ...) + B = 0
        check("at rest under a constant", A[:, 0] + B, torch.zeros(n).double(), atol=1e-14)


# --- S4D --------------------------------------------------------------------------------------


def s4d(m=state_space, init="lin", dtype=torch.float64):
    torch.manual_seed(0)
    layer = m.S4D(3, d_state=8, init=init).to(dtype)
    torch.nn.init.normal_(layer.D)  # so that one channel's cannot pass for another's
    return layer


def by_steps(layer, x, rate=1.0, state=None):
    state, y = layer.initial_state(len(x)) if state is None else state, []
    for x_k in x.unbind(1):
        y_k, state = layer.step(x_k, state, rate=rate)
        y.append(y_k)
    return torch.stack(y, dim=1), state


def s4d_kernel_is_that_of_the_full_model(m, init="lin"):
    """Each complex mode is a pair of real numbers that turns: [[re, -im], [im, re]]."""
    layer = s4d(m, init)
    for rate, i in itertools.product((0.5, 3), range(3)):
        pairs = zip(-layer.A_log[i].exp(), layer.A_imag[i], strict=True)
        A = torch.block_diag(
            *(torch.stack([torch.stack([a, -w]), torch.stack([w, a])]) for a, w in pairs)
        )
        B = torch.tensor([1.0, 0.0]).double().repeat(4)
        C = 2 * (layer.C[i] * torch.tensor([1.0, -1.0])).flatten()
        bars = state_space.discretize_zoh(A, B, rate * layer.log_dt[i].exp().item())
        want = state_space.ssm_kernel(*bars, C, 20)
        kernel = layer.kernel(20, rate=rate)[i]
        check("S4D kernel = kernel of the full model", kernel, want, atol=1e-10)


def s4d_steps_add_up(m, init="lin"):
    """Held over two steps, an input does what it does over one of twice the length."""
    layer, x = s4d(m, init), normal(2, 20, 3)
    held = layer(x.repeat_interleave(2, dim=1))[:, 1::2]
    check("rate 2 = every sample twice", layer(x, rate=2), held)


def s4d_starts_where_it_should(m, init="lin"):
    torch.manual_seed(0)
    layer = m.S4D(400, d_state=10, init=init)
    check("real parts", -layer.A_log.exp(), torch.full((400, 5), -0.5))
    if init == "lin":
        want = math.pi * torch.arange(5)
    else:  # an eigenvalue each of the normal matrix, with a general eigenvalue solver
        A, B = state_space.hippo_legs(10)
        eigenvalues = torch.linalg.eigvals(A + torch.outer(B, B) / 2)
        check("they lie on one line", eigenvalues.real, torch.full((10,), -0.5).double(), tol=1e-8)
        want = eigenvalues.imag.sort().values[5:].float()
    check("frequencies", layer.A_imag, want.expand(400, 5), tol=1e-6)
    dt = layer.log_dt.exp()
    assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1 and layer.log_dt.std() > 1
    assert {p.dtype for p in layer.parameters()} == {torch.float32}


def s4d_is_accurate_in_float32(m, init="lin"):
    """The smallest steps, where exp(z) - 1 has lost four digits, against float64."""
    layer = s4d(m, init)
    with torch.no_grad():
        layer.log_dt.fill_(math.log(1e-4))
    want = layer.kernel(500)
    check("float32 = float64", layer.float().kernel(500).double(), want, tol=1e-5)


@pytest.mark.parametrize("init", INITS)
def test_s4d_is_the_full_model_at_any_rate(init):
    s4d_kernel_is_that_of_the_full_model(state_space, init)
    s4d_steps_add_up(state_space, init)
    s4d_starts_where_it_should(state_space, init)
    s4d_is_accurate_in_float32(state_space, init)


@pytest.mark.parametrize("init", INITS)
def test_steps_of_s4d_are_its_convolution(init):
    """They take the state as a value and ask the device nothing."""
    layer, x = s4d(init=init), normal(2, 12, 3)
    for rate in (1.0, 0.5, 3.7):
        with questions() as asked:
            first, state = by_steps(layer, x[:, :7], rate)
        assert not asked, asked
        leaves_alone(lambda x, state, rate=rate: layer.step(x, state, rate=rate), x[:, 7], state)
        y = torch.cat([first, by_steps(layer, x[:, 7:], rate, state)[0]], dim=1)
        check(f"convolution = steps, rate {rate}", layer(x, rate=rate), y)
    x = x.float()
    y, state = by_steps(s4d(init=init, dtype=torch.float32), x)
    assert y.dtype == torch.float32 and state.dtype == torch.complex64
    check("steps in float32", y, layer(x.double()).float())
    for call in (layer, lambda x: layer.step(x[:, 0], state.to(torch.complex128))):
        with pytest.raises(ValueError, match=r"x must be torch\.float64"):
            call(x)
