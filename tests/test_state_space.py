"""State space models of one channel and S4D: every form against its definition, planted mistakes.

As in test_ssd.py, the properties are functions of a module. The positive tests hand them
`cheems_ref.state_space`, the negative controls a copy of it with one planted mistake.
"""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import leaves_alone, normal, one_entry, questions, starts_alike, works_linearly

import cheems_ref.state_space as state_space
from cheems_ref.state_space import S4D
from cheems_ref.verify import check, check_gradients, must_differ

LENGTHS = (0, 1, 2, 5, 8, 33)
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


def zoh_is_the_printed_formula(m):
    for name, dt in itertools.product(("decaying", "growing", "one number"), (1e-2, 0.4, 1.5)):
        A, B = SYSTEMS[name]
        A_bar, B_bar = m.discretize_zoh(A, B, dt)
        check("Ā = exp(dt A)", A_bar, torch.linalg.matrix_exp(dt * A))
        check("B̄ = A⁻¹ (Ā - I) B", B_bar, torch.linalg.inv(A) @ (A_bar - torch.eye(len(B))) @ B)


def zoh_steps_add_up(m):
    for A, B in SYSTEMS.values():
        (A_1, B_1), (A_2, B_2) = m.discretize_zoh(A, B, 0.3), m.discretize_zoh(A, B, 0.6)
        check("two steps = one of twice the length, Ā", A_1 @ A_1, A_2)
        check("two steps = one of twice the length, B̄", A_1 @ B_1 + B_1, B_2)


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


def bilinear_is_of_second_order(m):
    """Half the step, a quarter of the error, over a fixed time; z³/12 per step is its constant."""
    for errors in (
        errors_at_a_time(m.discretize_bilinear),
        [
            (
                torch.linalg.matrix_power(m.discretize_bilinear(A, B, 1.6 / n)[0], n)
                - torch.linalg.matrix_exp(1.6 * A)
            )
            .abs()
            .max()
            .item()
            for A, B in [SYSTEMS["decaying"]]
            for n in (4, 8, 16, 32, 64)
        ],
    ):
        ratios = [a / b for a, b in itertools.pairwise(errors)]
        assert all(3.9 < r < 4.1 for r in ratios[-2:]), f"errors fall by {ratios}"
    A, B = torch.tensor([[-1.0]]).double(), torch.ones(1).double()
    error = m.discretize_bilinear(A, B, 1e-3)[0] - math.exp(-1e-3)
    check("error of a step = z³/12", error / 1e-9, torch.tensor([[-1 / 12]]).double(), tol=1e-3)


@pytest.mark.parametrize("name", SYSTEMS)
def test_zoh_is_the_integral_of_the_equation(name):
    zoh_integrates_the_equation(state_space, [name])


def test_zoh_is_the_printed_formula_where_that_is_defined():
    zoh_is_the_printed_formula(state_space)


def test_zoh_steps_add_up():
    zoh_steps_add_up(state_space)


def test_zoh_of_a_mass_without_friction_is_the_law_of_falling_bodies():
    A_bar, B_bar = state_space.discretize_zoh(*SYSTEMS["mass without friction"], 3)
    check("place and speed", A_bar, torch.tensor([[1.0, 3], [0, 1]]).double(), tol=1e-14)
    check("t²/2 and t", B_bar, torch.tensor([4.5, 3]).double(), tol=1e-14)


def test_bilinear_is_its_formula():
    bilinear_is_its_formula(state_space)


def test_bilinear_is_of_second_order():
    bilinear_is_of_second_order(state_space)


@pytest.mark.parametrize("place, order", [(0.5, 2), (0.0, 1), (1.0, 1)])
@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_order_is_that_of_where_in_its_step_the_input_is_sampled(rule, place, order):
    errors = errors_at_a_time(getattr(state_space, f"discretize_{rule}"), place=place)
    assert math.log2(errors[-2] / errors[-1]) == pytest.approx(order, abs=0.1)


def test_zoh_is_exact_for_a_held_input_and_bilinear_is_not():
    """L22 shows ZOH's formulas under "S4 uses a bilinear transformation", with ZOH's exactness."""
    A, B = SYSTEMS["decaying"]
    errors = []
    for rule in (state_space.discretize_zoh, state_space.discretize_bilinear):
        errors.append(
            [(rule(A, B, dt)[1] - integrated(A, B, dt)[1]).abs().max().item() for dt in (0.4, 0.2)]
        )
    assert max(errors[0]) < 1e-12 and min(errors[1]) > 1e-4


@pytest.mark.parametrize("dt", [1e-3, 1.0, 1e3])
def test_what_decays_still_decays_after_either_rule(dt):
    A, B = state_space.hippo_legs(6)
    for rule in (state_space.discretize_zoh, state_space.discretize_bilinear):
        assert torch.linalg.eigvals(rule(A, B, dt)[0]).abs().max() < 1


@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_discretisation_has_a_gradient_and_leaves_its_inputs_alone(rule):
    rule = partial(getattr(state_space, f"discretize_{rule}"), dt=0.3)
    A, B = (t.clone().requires_grad_() for t in SYSTEMS["decaying"])
    assert torch.autograd.gradcheck(rule, (A, B))
    leaves_alone(rule, *SYSTEMS["decaying"])


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


def double_sum(A_bar, B_bar, C, x, state):
    """y_k = C Ā^{k+1} h_{-1} + Σ_{s≤k} C Ā^{k-s} B̄ x_s and the state after the last sample."""
    power = torch.linalg.matrix_power
    y, final = [], state
    for k in range(x.shape[1]):
        final = state @ power(A_bar, k + 1).T
        for s in range(k + 1):
            final = final + x[:, s, None] * (power(A_bar, k - s) @ B_bar)
        y.append(final @ C)
    return torch.stack(y, dim=1) if y else x, final


def recurrence_is_the_double_sum(m, lengths=LENGTHS):
    for length in lengths:
        *tensors, state = channel(l=length)

        def recurrent(*t):
            return m.ssm_recurrent(*t[:4], initial_state=t[4], return_final_state=True)

        results = zip(recurrent(*tensors, state), double_sum(*tensors, state), strict=True)
        for name, (a, e) in zip(("y", "final state"), results, strict=True):
            check(f"recurrence = double sum, {name}, l = {length}", a, e)
        y = double_sum(*tensors, 0 * state)[0]
        check("no state = a state of zero", m.ssm_recurrent(*tensors), y)
        if length in (2, 5):
            check_gradients("recurrence = double sum", recurrent, double_sum, [*tensors, state])


def kernel_is_the_loop(m, lengths=LENGTHS):
    A_bar, B_bar, C, *_ = channel()
    for length in lengths:

        def loop(A_bar, B_bar, C, length=length):
            kernel, column = [], B_bar
            for _ in range(length):
                kernel.append(C @ column)
                column = A_bar @ column
            return torch.stack(kernel) if kernel else B_bar[:0]

        doubled = partial(m.ssm_kernel, length=length)
        check(
            f"kernel by doubling = loop, l = {length}",
            doubled(A_bar, B_bar, C),
            loop(A_bar, B_bar, C),
        )
        if length:
            inputs = [A_bar, B_bar, C] if length > 1 else [B_bar, C]
            fixed = [] if length > 1 else [A_bar]  # K_0 does not depend on Ā
            check_gradients(
                "kernel by doubling = loop",
                lambda *t, fixed=fixed, doubled=doubled: doubled(*fixed, *t),
                lambda *t, fixed=fixed, loop=loop: loop(*fixed, *t),
                inputs,
            )


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


def convolution_is_the_recurrence(m, lengths=LENGTHS):
    for length in lengths:
        A_bar, B_bar, C, x, _ = channel(l=length)

        def by_kernel(A_bar, B_bar, C, x):
            return m.ssm_convolution(m.ssm_kernel(A_bar, B_bar, C, x.shape[1]), x)

        tensors = (A_bar, B_bar, C, x)
        check(
            f"convolution = recurrence, l = {length}",
            by_kernel(*tensors),
            m.ssm_recurrent(*tensors),
        )
        if length > 1:
            check_gradients("convolution = recurrence", by_kernel, m.ssm_recurrent, tensors)


def samples_move_nothing_before_them(m):
    """For the convolution to rounding only: a transform mixes all samples and parts them again."""
    A_bar, B_bar, C, x, state = channel()
    kernel = m.ssm_kernel(A_bar, B_bar, C, 13)
    recurrent = partial(m.ssm_recurrent, A_bar, B_bar, C, initial_state=state)
    for name, f in (("recurrence", recurrent), ("convolution", partial(m.ssm_convolution, kernel))):
        before = f(x)
        for j in range(13):
            moved = x.clone()
            moved[0, j] += 1
            after = f(moved)
            check(f"{name}: before sample {j}", after[0, :j], before[0, :j])
            check(f"{name}: other rows", after[1], before[1])
            must_differ(f"{name}: sample {j} moved", after[0, j], before[0, j])


def recurrence_joins_up(m, cuts=(0, 1, 6, 13)):
    *system, x, state = channel()
    f = partial(m.ssm_recurrent, *system, return_final_state=True)
    y, final = f(x, initial_state=state)
    for cut in cuts:
        head, middle = f(x[:, :cut], initial_state=state)
        tail, end = f(x[:, cut:], initial_state=middle)
        check("y of two passes = of one", torch.cat([head, tail], dim=1), y)
        check("state of two passes = of one", end, final)


def recurrence_works_linearly(m):
    def run(count):
        A_bar, B_bar, C, x, state = (t.requires_grad_() for t in channel(l=8 * count))
        y, final = m.ssm_recurrent(A_bar, B_bar, C, x, initial_state=state, return_final_state=True)
        return y.sum() + final.sum()

    works_linearly(run)


@pytest.mark.parametrize("length", LENGTHS)
def test_recurrence_is_the_double_sum(length):
    recurrence_is_the_double_sum(state_space, [length])


@pytest.mark.parametrize("length", LENGTHS)
def test_kernel_by_doubling_is_the_loop(length):
    kernel_is_the_loop(state_space, [length])


@pytest.mark.parametrize("length", LENGTHS)
def test_convolution_by_fft_is_the_sum(length):
    convolution_is_the_sum(state_space, [length])


@pytest.mark.parametrize("length", LENGTHS)
def test_convolution_is_the_recurrence(length):
    convolution_is_the_recurrence(state_space, [length])


@settings(deadline=None, max_examples=30, derandomize=True)
@given(l=st.integers(0, 70), n=st.integers(1, 6), b=st.integers(0, 3))
def test_convolution_is_the_recurrence_at_any_size(b, l, n):
    A_bar, B_bar, C, x, _ = channel(b, l, n)
    y = state_space.ssm_convolution(state_space.ssm_kernel(A_bar, B_bar, C, l), x)
    check("convolution = recurrence", y, state_space.ssm_recurrent(A_bar, B_bar, C, x))


def test_samples_move_nothing_before_them_and_no_other_row():
    samples_move_nothing_before_them(state_space)


def test_two_passes_of_the_recurrence_joined_by_the_state_equal_one():
    recurrence_joins_up(state_space)


def test_work_of_the_recurrence_is_linear_in_the_length():
    recurrence_works_linearly(state_space)


def test_single_channel_functions_leave_their_inputs_alone():
    *tensors, state = channel()
    leaves_alone(lambda *t: state_space.ssm_recurrent(*t[:4], initial_state=t[4]), *tensors, state)
    leaves_alone(lambda *t: state_space.ssm_kernel(*t, 13), *tensors[:3])
    leaves_alone(state_space.ssm_convolution, normal(13), tensors[3])


def test_final_state_of_no_samples_is_a_copy():
    *system, x, state = channel()
    _, final = state_space.ssm_recurrent(
        *system, x[:, :0], initial_state=state, return_final_state=True
    )
    assert torch.equal(final, state) and final.data_ptr() != state.data_ptr()


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


def hippo_is_its_formula(m):
    for n in (1, 2, 5, 16):
        A, B = m.hippo_legs(n)
        want = torch.zeros(n, n, dtype=torch.float64)
        for i, j in itertools.product(range(n), repeat=2):
            if i > j:
                want[i, j] = -math.sqrt((2 * i + 1) * (2 * j + 1))
            elif i == j:
                want[i, j] = -(i + 1)
        check("A of HiPPO", A, want, tol=1e-14)
        check(
            "B of HiPPO",
            B,
            torch.tensor([math.sqrt(2 * i + 1) for i in range(n)]).double(),
            tol=1e-7,
        )


def test_hippo_is_its_formula():
    hippo_is_its_formula(state_space)


@pytest.mark.parametrize("n", [1, 4, 8])
def test_hippo_decays_at_the_rates_1_to_n(n):
    A, B = state_space.hippo_legs(n)
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


def s4d_is_causal(m, init="lin"):
    layer, x = s4d(m, init), normal(2, 9, 3)
    before = layer(x)
    for j, i in itertools.product(range(9), range(3)):
        moved = x.clone()
        moved[0, j, i] += 1
        after = layer(moved)
        check("nothing earlier", after[0, :j], before[0, :j])
        check("no other row", after[1], before[1])
        others = [k for k in range(3) if k != i]
        check("no other channel", after[..., others], before[..., others])
        must_differ("the sample that moved", after[0, j, i], before[0, j, i])


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


@pytest.mark.parametrize("d, n", [(3, 8), (1, 2), (3, 2), (1, 8)])
@pytest.mark.parametrize("init", INITS)
def test_s4d_kernel_is_that_of_the_full_model(init, d, n):
    s4d_kernel_is_that_of_the_full_model(state_space, init, d, n)


@pytest.mark.parametrize("d, n", [(3, 8), (1, 2), (3, 2), (1, 8)])
@pytest.mark.parametrize("init", INITS)
def test_s4d_convolution_is_its_recurrence(init, d, n):
    s4d_convolution_is_its_recurrence(state_space, init, d, n)


@pytest.mark.parametrize("init", INITS)
def test_s4d_convolution_is_its_recurrence_in_float32(init):
    layer, x = s4d(init=init, dtype=torch.float32), normal(2, 300, 3, dtype=torch.float32)
    y, state = by_steps(layer, x)
    assert y.dtype == torch.float32 and state.dtype == torch.complex64
    check("convolution = steps in float32", layer(x), y)
    check("float32 = float64", layer(x), s4d(init=init)(x.double()).float())


@pytest.mark.parametrize("init", INITS)
def test_s4d_kernel_is_accurate_in_float32(init):
    s4d_is_accurate_in_float32(state_space, init)


@pytest.mark.parametrize("init", INITS)
def test_s4d_steps_add_up(init):
    s4d_steps_add_up(state_space, init)


@pytest.mark.parametrize("init", INITS)
def test_s4d_follows_the_sampling_rate(init):
    s4d_follows_the_sampling_rate(state_space, init)


@pytest.mark.parametrize("init", INITS)
def test_s4d_is_causal_and_mixes_neither_rows_nor_channels(init):
    s4d_is_causal(state_space, init)


@pytest.mark.parametrize("init", INITS)
def test_s4d_starts_where_it_should(init):
    s4d_starts_where_it_should(state_space, init)


def s4d_is_materialised(m, init="lin"):
    starts_alike(lambda: m.S4D(3, d_state=8, init=init))


def s4d_asks_nothing(m, init="lin"):
    layer, x = s4d(m, init), normal(2, 5, 3)
    with questions() as asked:
        layer(x, rate=2)
        layer.step(x[:, 0], layer.initial_state(2))
    assert not asked, asked


@pytest.mark.parametrize("init", INITS)
def test_s4d_starts_the_same_on_any_device(init):
    s4d_is_materialised(state_space, init)


@pytest.mark.parametrize("init", INITS)
def test_s4d_asks_the_device_nothing(init):
    s4d_asks_nothing(state_space, init)


@pytest.mark.parametrize("init", INITS)
def test_every_parameter_of_s4d_receives_a_finite_gradient_that_is_not_zero(init):
    for run in (lambda layer, x: layer(x), lambda layer, x: by_steps(layer, x)[0]):
        layer = s4d(init=init, dtype=torch.float32)
        run(layer, normal(2, 5, 3, dtype=torch.float32)).square().sum().backward()
        for name, p in layer.named_parameters():
            assert p.grad.isfinite().all() and p.grad.any(), name


def test_s4d_step_takes_its_state_as_a_value():
    layer, x = s4d(), normal(2, 8, 3)
    _, state = by_steps(layer, x)
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


# --- bad input --------------------------------------------------------------------------------


A_2, B_2, C_2, X_2 = normal(2, 2), normal(2), normal(2), normal(3, 5)
zoh = partial(state_space.discretize_zoh, A=A_2, B=B_2, dt=0.1)
bilinear = partial(state_space.discretize_bilinear, A=A_2, B=B_2, dt=0.1)
recurrent = partial(state_space.ssm_recurrent, A_bar=A_2, B_bar=B_2, C=C_2, x=X_2)
kernel = partial(state_space.ssm_kernel, A_bar=A_2, B_bar=B_2, C=C_2, length=5)
convolution = partial(state_space.ssm_convolution, kernel=normal(5), x=X_2)
# The function, one argument, what it is changed into, and what the message says.
# fmt: off
BAD = [
    *((f, "A", A, message) for f in (zoh, bilinear) for A, message in (
        (A_2[0], r"A must be \(n, n\), got shape \(2,\)"),
        (A_2[:1], r"A must be \(n, n\).*\(1, 2\)"),
        (A_2[:0, :0], "n must be at least 1, got 0"),
        (A_2.long(), r"A must be torch\.float32 or torch\.float64 here, got torch\.int64"),
        (A_2.bfloat16(), r"A must be .*bfloat16"),
        (one_entry(math.nan)(A_2), r"A must be in \(-inf, inf\) everywhere, got .*nan"))),
    *((f, "B", B, message) for f in (zoh, bilinear) for B, message in (
        (B_2[:1], r"B must be \(n,\) = \(2,\), got shape \(1,\)"),
        (B_2[:, None], r"B must be \(n,\) = \(2,\), got shape \(2, 1\)"),
        (B_2.float(), r"B must be torch\.float64 here, got torch\.float32"),
        (one_entry(math.inf)(B_2), r"B must be in \(-inf, inf\) everywhere, got .*inf\]"))),
    *((f, "dt", dt, rf"dt must be a number in \(0, inf\), got {dt}")
      for f in (zoh, bilinear) for dt in (0, -0.1, math.nan, math.inf)),
    *((f, "A_bar", A_2[:1], r"A_bar must be \(n, n\).*\(1, 2\)") for f in (recurrent, kernel)),
    *((f, "B_bar", B_2[:1], r"B_bar must be \(n,\) = \(2,\).*\(1,\)") for f in (recurrent, kernel)),
    *((f, "C", C_2[None], r"C must be \(n,\) = \(2,\).*\(1, 2\)") for f in (recurrent, kernel)),
    *((f, "C", C_2.float(), r"C must be torch\.float64.*float32") for f in (recurrent, kernel)),
    *((f, "C", one_entry(math.nan)(C_2), r"C must be in \(-inf, inf\) everywhere, got .*nan")
      for f in (recurrent, kernel)),
    (recurrent, "x", X_2[0], r"x must be \(b, l\), got shape \(5,\)"),
    (recurrent, "x", X_2.float(), r"x must be torch\.float64.*float32"),
    (recurrent, "initial_state", normal(3, 3), r"initial_state must be .*\(3, 2\).*\(3, 3\)"),
    (recurrent, "initial_state", normal(2), r"initial_state must be .*\(3, 2\).*\(2,\)"),
    (recurrent, "initial_state", normal(3, 2).float(), r"initial_state must be torch\.float64"),
    (kernel, "length", -1, r"length must be a number in \[0, inf\), got -1"),
    (convolution, "x", X_2[0], r"x must be \(b, l\), got shape \(5,\)"),
    (convolution, "x", X_2.half(), r"x must be torch\.float32 or .*float16"),
    (convolution, "kernel", normal(4), r"kernel must be \(l,\) = \(5,\).*\(4,\)"),
    (convolution, "kernel", normal(3, 5), r"kernel must be \(l,\) = \(5,\).*\(3, 5\)"),
    (convolution, "kernel", normal(5).float(), r"kernel must be torch\.float64.*float32"),
    (state_space.hippo_legs, "n", 0, "n must be at least 1, got 0"),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize(("function", "name", "value", "message"), BAD)
    def test_is_refused_with_its_name_and_numbers(self, function, name, value, message):
        with pytest.raises(ValueError, match=message):
            function(**{name: value})

    def test_bilinear_step_without_an_inverse(self):
        with pytest.raises(ValueError, match=r"dt = 0\.5 .*singular.*2/dt"):
            state_space.discretize_bilinear(4 * torch.eye(2), torch.ones(2), 0.5)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(d_model=0), "d_model must be at least 1, got 0"),
            (dict(d_state=0), "d_state must be at least 1, got 0"),
            (dict(d_state=7), "d_state must be even.*7"),
            (dict(init="inv"), "init must be one of 'lin', 'legs', got 'inv'"),
        ],
    )
    def test_options_of_s4d(self, options, message):
        with pytest.raises(ValueError, match=message):
            S4D(**dict(d_model=6) | options)

    @pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf])
    def test_rate(self, rate):
        layer, x = s4d(), normal(2, 5, 3)
        for call in (
            lambda: layer(x, rate=rate),
            lambda: layer.kernel(5, rate=rate),
            lambda: layer.step(x[:, 0], layer.initial_state(2), rate=rate),
        ):
            with pytest.raises(
                ValueError, match=rf"rate must be a number in \(0, inf\), got {rate}"
            ):
                call()

    def test_calls_of_s4d(self):
        layer, x = s4d(), normal(2, 5, 3)
        state = layer.initial_state(2)
        for call, message in (
            (lambda: layer.kernel(-1), "length must be .*-1"),
            (lambda: layer(x[0]), r"x must be \(b, l, d\) = \(b, l, 3\).*\(5, 3\)"),
            (lambda: layer(x[..., :2]), r"x must be .*\(b, l, 3\).*\(2, 5, 2\)"),
            (lambda: layer(x.float()), r"x must be torch\.float64.*float32"),
            (lambda: layer.step(x, state), r"x must be \(b, d\) = \(b, 3\).*\(2, 5, 3\)"),
            (lambda: layer.step(x[:, 0], state[:1]), r"state must be .*\(2, 3, 4\).*\(1, 3, 4\)"),
            (
                lambda: layer.step(x[:, 0], state[..., :2]),
                r"state must be \(b, d, modes\) = \(2, 3, 4\).*\(2, 3, 2\)",
            ),
            (lambda: layer.step(x[:, 0], state.real), r"state must be torch\.complex128.*float64"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
