"""State space models: discretisation, kernels, HiPPO, and what the tables do not ask of S4D.

As in test_ssd.py, the properties are functions of a module.
"""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from properties import leaves_alone, normal, one_entry, questions, works_linearly

import cheems_ref.state_space as state_space
from cheems_ref.state_space import S4D
from cheems_ref.verify import check, check_gradients, must_differ

LENGTHS = (0, 1, 2, 9)
INITS = ("lin", "legs")


# --- one channel: discretisation --------------------------------------------------------------

# A and B; the last three A have no inverse
SYSTEMS = {
    "decaying": (normal(4, 4) - 2 * torch.eye(4), normal(4, seed=1)),
    "growing": (normal(3, 3, seed=2), normal(3, seed=3)),
    "one number": (torch.tensor([[-0.7]]).double(), torch.tensor([1.5]).double()),
    "mass without friction": (
        torch.tensor([[0.0, 1], [0, 0]]).double(),
        torch.tensor([0.0, 1.0]).double(),
    ),
    "rank one": (torch.outer(normal(3), normal(3, seed=1)), normal(3, seed=2)),
    "nothing": (torch.zeros(2, 2).double(), normal(2)),
}


def integrated(A, B, dt):
    """The state after dt with the input held at 1 (and from each unit state without input), by RK4.

    Its error is about (|A| dt / steps)^4 / 120 in units of |A| dt: below 1e-12.
    """
    n, steps = len(B), max(1, math.ceil(500 * dt * A.norm().item()))
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


def zoh_integrates_the_equation(m, systems=tuple(SYSTEMS), steps=(1e-3, 0.4, 1.5)):
    for name, dt in itertools.product(systems, steps):
        A, B = SYSTEMS[name]
        for what, a, e in zip("AB", m.discretize_zoh(A, B, dt), integrated(A, B, dt), strict=True):
            check(f"ZOH = integral of the equation, {what} of {name}, dt = {dt}", a, e)


def bilinear_is_its_formula(m):
    for name, dt in itertools.product(SYSTEMS, (1e-3, 0.4, 1.5)):
        A, B = SYSTEMS[name]
        identity = torch.eye(len(B), dtype=A.dtype)
        M = torch.linalg.inv(identity - dt / 2 * A)
        A_bar, B_bar = m.discretize_bilinear(A, B, dt)
        check("Ā = (I - dt A/2)⁻¹ (I + dt A/2)", A_bar, M @ (identity + dt / 2 * A))
        check("B̄ = (I - dt A/2)⁻¹ dt B", B_bar, dt * M @ B)


def errors_at_a_time(discretize, time=1.6, steps=(4, 8, 16, 32, 64), place=0.5):
    """Errors of the state at one time, for h' = A h + B (1 + sin 2t) sampled at (k + place) dt."""
    A, B = SYSTEMS["decaying"]

    # The input is a linear system as well, (1, sin 2t, cos 2t), so one exponential has the truth.
    whole = torch.zeros(7, 7, dtype=A.dtype)
    whole[:4, :4], whole[:4, 4], whole[:4, 5] = A, B, B
    whole[5, 6], whole[6, 5] = 2, -2
    start = torch.tensor([0.0, 0, 0, 0, 1, 0, 1], dtype=A.dtype)
    truth = (torch.linalg.matrix_exp(time * whole) @ start)[:4]

    errors = []
    for n in steps:
        A_bar, B_bar = discretize(A, B, time / n)
        times = time / n * (torch.arange(n, dtype=A.dtype) + place)
        h = torch.zeros(4, dtype=A.dtype)
        for x_k in 1 + torch.sin(2 * times):
            h = A_bar @ h + B_bar * x_k
        errors.append((h - truth).abs().max().item())
    return errors


def test_discretisations_are_their_formulas():
    zoh_integrates_the_equation(state_space)
    bilinear_is_its_formula(state_space)
    for A, B in SYSTEMS.values():
        (A_1, B_1), (A_2, B_2) = (state_space.discretize_zoh(A, B, dt) for dt in (0.3, 0.6))
        check("two steps = one of twice the length, Ā", A_1 @ A_1, A_2)
        check("two steps = one of twice the length, B̄", A_1 @ B_1 + B_1, B_2)
    A, B = SYSTEMS["decaying"]
    A_bar, B_bar = state_space.discretize_zoh(A, B, 0.4)
    check("B̄ = A⁻¹ (Ā - I) B", B_bar, torch.linalg.inv(A) @ (A_bar - torch.eye(4)) @ B)


@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_order_is_that_of_where_in_its_step_the_input_is_sampled(rule):
    rule = getattr(state_space, f"discretize_{rule}")
    for place, order in ((0.5, 2), (0.0, 1), (1.0, 1)):
        errors = errors_at_a_time(rule, place=place)
        assert math.log2(errors[-2] / errors[-1]) == pytest.approx(order, abs=0.1)
    A, B = (t.clone().requires_grad_() for t in SYSTEMS["decaying"])
    assert torch.autograd.gradcheck(partial(rule, dt=0.3), (A, B))
    leaves_alone(partial(rule, dt=0.3), *SYSTEMS["decaying"])
    for dt in (1e-3, 1.0, 1e3):
        decayed = rule(*state_space.hippo_legs(6), dt)[0]
        assert torch.linalg.eigvals(decayed).abs().max() < 1  # what decays still decays


def test_zoh_is_exact_for_a_held_input_and_bilinear_is_not():
    """L22 shows ZOH's formulas under "S4 uses a bilinear transformation", with ZOH's exactness."""
    A, B = SYSTEMS["decaying"]
    errors = []
    for rule in (state_space.discretize_zoh, state_space.discretize_bilinear):
        errors.append(
            [(rule(A, B, dt)[1] - integrated(A, B, dt)[1]).abs().max().item() for dt in (0.4, 0.2)]
        )
    assert max(errors[0]) < 1e-12 and min(errors[1]) > 1e-4


# --- one channel: recurrence, kernel, convolution ---------------------------------------------


def channel(b=2, l=13, n=3, dtype=torch.float64):
    """Ā, B̄, C, x and a state; Ā is a rotation of sorts that decays slowly."""
    A_bar = torch.linalg.matrix_exp(0.3 * (normal(n, n) - normal(n, n).mT) - 0.1 * torch.eye(n))
    tensors = (
        A_bar,
        normal(n, seed=1),
        normal(n, seed=2),
        normal(b, l, seed=3),
        normal(b, n, seed=4),
    )
    return tuple(t.to(dtype) for t in tensors)


def recurrence_is_the_loop(m):
    A_bar, B_bar, C, x, _ = channel()
    h, y = x.new_zeros(2, 3), []
    for x_k in x.unbind(1):
        h = h @ A_bar.mT + x_k[:, None] * B_bar
        y.append(h @ C)
    check("recurrence = loop", m.ssm_recurrent(A_bar, B_bar, C, x), torch.stack(y, dim=1))


def convolution_is_the_sum(m, lengths=LENGTHS):
    """With entries as large at the end as at the beginning, so that what wraps round is seen."""
    for length, d in itertools.product(lengths, ((), (3,))):
        kernel, x = normal(*d, length), normal(2, *d, length, seed=1)

        def summed(kernel, x, length=length):
            matrix = kernel.new_zeros(*kernel.shape, length)
            for t, s in itertools.product(range(length), repeat=2):
                if s <= t:
                    matrix[..., t, s] = kernel[..., t - s]
            return (matrix @ x[..., None])[..., 0]

        check(f"FFT = sum, {d}, l = {length}", m.ssm_convolution(kernel, x), summed(kernel, x))
        if length:
            check_gradients("FFT = sum", m.ssm_convolution, summed, (kernel, x))


def test_recurrence_and_convolution_are_their_sums_and_work_is_linear():
    recurrence_is_the_loop(state_space)
    convolution_is_the_sum(state_space)

    def run(count):
        *tensors, state = (t.requires_grad_() for t in channel(l=8 * count))
        y = state_space.ssm_recurrent(*tensors, initial_state=state, return_final_state=True)
        return y[0].sum() + y[1].sum()

    works_linearly(run)
    leaves_alone(lambda *t: state_space.ssm_kernel(*t, 13), *channel()[:3])


def test_float32_is_kept_and_right():
    wide, narrow = channel(l=200), channel(l=200, dtype=torch.float32)
    y = state_space.ssm_recurrent(*wide[:4]).float()
    check("recurrence in float32", state_space.ssm_recurrent(*narrow[:4]), y)
    kernel = state_space.ssm_kernel(*narrow[:3], 200)
    check("convolution in float32", state_space.ssm_convolution(kernel, narrow[3]), y)


def test_printed_recurrence_is_one_step_late():
    """L22: h_{k+1} = Ā h_k + B̄ x_k and y_k = C h_k, beside a kernel that begins with C B̄."""
    A_bar, B_bar, C, x, _ = channel()
    h, printed = x.new_zeros(2, 3), []
    for x_k in x.unbind(1):
        printed.append(h @ C)
        h = h @ A_bar.mT + x_k[:, None] * B_bar
    printed, y = torch.stack(printed, dim=1), state_space.ssm_recurrent(A_bar, B_bar, C, x)
    check("as printed = delayed by one step", printed, F.pad(y, (1, 0))[:, :-1])
    must_differ("as printed", printed, y, at_least=0.1)


# --- HiPPO ------------------------------------------------------------------------------------


def test_hippo_is_its_formula_and_decays_at_the_rates_1_to_n():
    for n in (1, 2, 5, 8):
        A, B = state_space.hippo_legs(n)
        want = -torch.diag(torch.arange(1, n + 1).double())
        for i, j in itertools.combinations(range(n), 2):
            want[j, i] = -math.sqrt((2 * i + 1) * (2 * j + 1))
        check("A of HiPPO", A, want, tol=1e-14)
        check("B of HiPPO", B, (2 * torch.arange(n).double() + 1).sqrt(), tol=1e-7)
        rates = torch.linalg.eigvals(A).real.sort(descending=True).values
        check("eigenvalues of A", rates, -torch.arange(1, n + 1).double(), tol=1e-8)
        # of a constant input it keeps the constant: A (1, 0, ...) + B = 0
        check("at rest under a constant", A[:, 0] + B, torch.zeros(n).double(), atol=1e-14)


# --- S4D --------------------------------------------------------------------------------------


def s4d(m=state_space, init="lin", dtype=torch.float64, d=3, n=8):
    torch.manual_seed(0)
    layer = m.S4D(d, d_state=n, init=init).to(dtype)
    torch.nn.init.normal_(layer.D)  # so that one channel's cannot pass for another's
    return layer


def by_steps(layer, x, rate=1.0, state=None):
    state = layer.initial_state(x.shape[0]) if state is None else state
    y = []
    for x_k in x.unbind(1):
        y_k, state = layer.step(x_k, state, rate=rate)
        y.append(y_k)
    return (torch.stack(y, dim=1) if y else x), state


def s4d_kernel_is_that_of_the_full_model(m, init="lin", d=3, n=8):
    """Each complex mode is a pair of real numbers that turns: [[re, -im], [im, re]]."""
    layer = s4d(m, init, d=d, n=n)
    for rate, i in itertools.product((0.5, 1.0, 3), range(d)):
        pairs = zip(-layer.A_log[i].exp(), layer.A_imag[i], strict=True)
        A = torch.block_diag(
            *(torch.stack([torch.stack([a, -w]), torch.stack([w, a])]) for a, w in pairs)
        )
        B = torch.tensor([1.0, 0.0]).double().repeat(n // 2)
        C = 2 * (layer.C[i] * torch.tensor([1.0, -1.0])).flatten()
        bars = state_space.discretize_zoh(A, B, rate * layer.log_dt[i].exp().item())
        want = state_space.ssm_kernel(*bars, C, 20)
        kernel = layer.kernel(20, rate=rate)[i]
        check("S4D kernel = kernel of the full model", kernel, want, atol=1e-10)


def s4d_convolution_is_its_recurrence(m, init="lin", d=3, n=8):
    layer = s4d(m, init, d=d, n=n)
    for length, rate in itertools.product(LENGTHS, (1.0, 0.5, 2, 3.7)):
        x = normal(2, length, d)
        y, _ = by_steps(layer, x, rate)
        check(f"convolution = steps, l = {length}, rate {rate}", layer(x, rate=rate), y)
        if length == 8:
            weights = dict(layer.named_parameters())
            each = (layer(x, rate=rate).square().sum(), y.square().sum())
            grads = (torch.autograd.grad(total, weights.values()) for total in each)
            for name, a, e in zip(weights, *grads, strict=True):
                check(f"convolution = steps, gradient of {name}", a, e)


def s4d_steps_add_up(m, init="lin"):
    """Held over two steps, an input does what it does over one of twice the length."""
    layer = s4d(m, init)
    fine, coarse = layer.kernel(40), layer.kernel(20, rate=2)
    check("K_i at rate 2 = K_2i + K_2i+1", coarse, fine[:, ::2] + fine[:, 1::2])
    x = normal(2, 20, 3)
    held = layer(x.repeat_interleave(2, dim=1))[:, 1::2]
    check("rate 2 = every sample twice", layer(x, rate=2), held)


def s4d_follows_the_sampling_rate(m, init="lin"):
    """Every second sample, at rate 2, gives every second output: 16 kHz → 8 kHz.

    K_i at rate 2 is K_2i + K_2i+1. So the outputs differ by Σ_i K_2i+1 (x_{j-2i} - x_{j-2i-1}), at
    most Σ_i |K_2i+1| times the largest change between samples: for what changes slowly, little.
    """
    layer, length = s4d(m, init), 1024
    time = torch.arange(length).double()
    for period in (64, 128):
        waves = [
            torch.sin(2 * math.pi * time / p + i)
            for i, p in enumerate((period, 1.7 * period, 3 * period))
        ]
        x = torch.stack(waves, dim=-1)[None]
        fine, coarse = layer(x)[:, 1::2], layer(x[:, 1::2], rate=2)
        weight = layer.kernel(length)[:, 1::2].abs().sum(-1)
        bound = weight * x.diff(dim=1).abs().amax(dim=(0, 1))
        worst = (coarse - fine).abs().amax(dim=(0, 1))
        assert (worst <= bound).all(), f"period {period}: {worst} above {bound}"
        swing = fine.abs().amax(dim=(0, 1))
        assert (worst < 8 / period * swing).all(), f"period {period}: {worst / swing} of the output"


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
        assert (want > 0).all()
    check("frequencies", layer.A_imag, want.expand(400, 5), tol=1e-6)
    dt = layer.log_dt.exp()
    assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1 and layer.log_dt.std() > 1
    assert {p.dtype for p in layer.parameters()} == {torch.float32}


def s4d_is_accurate_in_float32(m, init="lin"):
    """The smallest steps, where exp(z) - 1 has lost four digits, against float64."""
    layer = s4d(m, init)
    with torch.no_grad():
        layer.log_dt.fill_(math.log(1e-4))
    kernel = layer.kernel(500)
    layer = layer.float()
    got = layer.kernel(500)
    assert got.dtype == torch.float32
    check(
        "float32 = float64, relative",
        got / kernel.abs().max(),
        (kernel / kernel.abs().max()).float(),
    )


@pytest.mark.parametrize("init", INITS)
def test_s4d_is_the_full_model_in_steps_and_at_any_rate(init):
    for d, n in ((3, 8), (1, 2)):
        s4d_kernel_is_that_of_the_full_model(state_space, init, d, n)
        s4d_convolution_is_its_recurrence(state_space, init, d, n)
    s4d_steps_add_up(state_space, init)
    s4d_follows_the_sampling_rate(state_space, init)
    s4d_starts_where_it_should(state_space, init)


@pytest.mark.parametrize("init", INITS)
def test_s4d_is_accurate_in_float32(init):
    s4d_is_accurate_in_float32(state_space, init)
    layer, x = s4d(init=init, dtype=torch.float32), normal(2, 300, 3, dtype=torch.float32)
    y, state = by_steps(layer, x)
    assert y.dtype == torch.float32 and state.dtype == torch.complex64
    check("convolution = steps in float32", layer(x), y)
    check("float32 = float64", layer(x), s4d(init=init)(x.double()).float())


def test_s4d_step_takes_its_state_as_a_value_and_asks_nothing():
    layer, x = s4d(), normal(2, 8, 3)
    with questions() as asked:
        _, state = by_steps(layer, x)
    assert not asked, asked
    leaves_alone(lambda x, state: layer.step(x, state), x[:, 0], state)
    whole = by_steps(layer, torch.cat([x, x], dim=1))[0]
    check("a state that is handed over", by_steps(layer, x, state=state)[0], whole[:, 8:])


@pytest.mark.parametrize("init", INITS)
def test_s4d_learns_a_filter(init):
    torch.manual_seed(0)
    layer = state_space.S4D(2, d_state=16, init=init)  # as a user makes it, in the default dtype
    x, time = normal(8, 64, 2, dtype=torch.float32), torch.arange(64.0)
    filters = torch.stack([0.9**time * torch.cos(0.4 * time), 0.8**time])
    y = state_space.ssm_convolution(filters, x.mT).mT
    optimizer = torch.optim.Adam(layer.parameters(), lr=5e-2)
    losses = []
    for _ in range(150):
        loss = (layer(x) - y).square().mean() / y.square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > 0.5 and losses[-1] < 0.1, losses[::30]


# --- bad input: what a signature does not say ---------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused_with_its_name_and_numbers():
    A, B, layer, x = normal(2, 2), normal(2), s4d(), normal(2, 5, 3)
    state, zoh, kernel = layer.initial_state(2), state_space.discretize_zoh, state_space.ssm_kernel
    for call, message in (
        (lambda: zoh(A[:1], B, 0.1), r"A must be \(n, n\).*\(1, 2\)"),
        (lambda: zoh(A[:0, :0], B[:0], 0.1), "n must be at least 1, got 0"),
        (lambda: zoh(A.bfloat16(), B, 0.1), "A must be torch.float32 or .*bfloat16"),
        (lambda: zoh(one_entry(math.nan)(A), B, 0.1), r"A must be in \(-inf, inf\).*nan"),
        (lambda: zoh(A, one_entry(math.inf)(B), 0.1), r"B must be in \(-inf, inf\).*inf\]"),
        (lambda: zoh(A, B, 0), r"dt must be a number in \(0, inf\), got 0"),
        (lambda: kernel(A, B, one_entry(math.nan)(B), 5), r"C must be in \(-inf, inf\).*nan"),
        (lambda: kernel(A, B, B, -1), r"length must be a number in \[0, inf\), got -1"),
        (lambda: state_space.hippo_legs(0), "n must be at least 1, got 0"),
        (lambda: state_space.discretize_bilinear(4 * torch.eye(2), torch.ones(2), 0.5),
         r"dt = 0\.5 .*singular.*2/dt"),
        (lambda: S4D(6, d_state=7), "d_state must be even.*7"),
        *((lambda f=f: f(rate=-1.0), r"rate must be a number in \(0, inf\), got -1")
          for f in (partial(layer, x), partial(layer.kernel, 5),
                    partial(layer.step, x[:, 0], state))),
        (lambda: layer.kernel(-1), "length must be .*-1"),
        (lambda: layer.step(x, state), r"x must be \(b, d\) = \(b, 3\).*\(2, 5, 3\)"),
        (lambda: layer.step(x[:, 0], state[:1]), r"state must be .*\(2, 3, 4\).*\(1, 3, 4\)"),
        (lambda: layer.step(x[:, 0], state[..., :2]), r"state must be .*\(2, 3, 4\).*\(2, 3, 2\)"),
        (lambda: layer.step(x[:, 0], state.real), r"state must be torch\.complex128.*float64"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
