"""State space models: a linear differential equation, made discrete, made fast, made a layer.

A state of n numbers follows an input over time, and an output is read from it:

    h'(t) = A h(t) + B x(t)        y(t) = C h(t)

We assume a constant input between two samples, dt apart. That gives the recurrence
h_k = Ā h_{k-1} + B̄ x_k, y_k = C h_k with h_{-1} = 0. Ā and B̄ are the same at every step, so the
recurrence is a convolution as well, y_k = Σ_{s≤k} C Ā^{k-s} B̄ x_s. In a selective model dt, B and C
depend on the input: then there is no convolution kernel, and we need a scan (mamba.py).

    code           shape                 in the papers
    A, B, C        (n, n), (n,), (n,)    A, B, C of one channel (of S4)
    A_bar, B_bar   (n, n), (n,)          Ā, B̄
    kernel         (l,)                  K̄
    x              (b, l), (b, l, d)     x, one channel or d of them
    dt             a number > 0          Δ, the time from one sample to the next; A is in 1/time
    state          (b, n)                h

    discretize_zoh, discretize_bilinear   (A, B, dt) -> Ā, B̄
    ssm_recurrent                         the definition, one sample after the other
    ssm_kernel, ssm_convolution           the same by one convolution
    hippo_legs                            an A that remembers the whole past
    S4D                                   a layer of time-invariant models with a diagonal A

Tensors are float32 or float64, all of a call in one dtype. Wrong shapes, dtypes, sizes or values
raise ValueError with the name of the argument, its axes and its sizes (check.py). Notebook 01
derives all of it.

Source: L22; OTCE §2.1; Gu et al. (2020), HiPPO; Gu et al. (2022), S4D.
"""

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float
from torch import Tensor, einsum, nn

from cheems_ref import check

Init = Literal["lin", "legs"]
Matrix = Float[Tensor, "n n"]
Vector = Float[Tensor, " n"]
Signal = Float[Tensor, "b l"]
Signals = Float[Tensor, "b *d l"]
State = Float[Tensor, "b n"]
if TYPE_CHECKING:  # an editor can't tell which of the two a call returns
    Output = Signal | Any
else:
    Output = Signal | tuple[Signal, State]
Channels = Float[Tensor, "b l d"]
Sample = Float[Tensor, "b d"]
Modes = Complex[Tensor, "b d modes"]
REAL = (torch.float32, torch.float64)  # torch has the solvers and transforms for them everywhere


def discretize_zoh(A: Matrix, B: Vector, dt: float | int) -> tuple[Matrix, Vector]:
    """Step over dt exactly, with the input held constant: Ā = exp(dt A), B̄ = ∫_0^dt exp(τA) dτ B.

    "ZOH" is zero-order hold. Where A has an inverse, B̄ = A⁻¹ (Ā - I) B, as the papers print it; A
    may be singular.

    Source: OTCE §2.1; L22 "How to discretize", the first pair of formulas.
    """
    _check_system(A=A, B=B)
    check.numbers("(0, inf)", dt=dt)
    # A held input is a state that does not change: (h, x)' = [[A, B], [0, 0]] (h, x). One
    # exponential solves both equations, without dividing by A.
    n = A.shape[0]
    block = F.pad(torch.cat([A, B[:, None]], dim=1), (0, 0, 0, 1))
    step = torch.linalg.matrix_exp(dt * block)
    return step[:n, :n], step[:n, n]


def discretize_bilinear(A: Matrix, B: Vector, dt: float | int) -> tuple[Matrix, Vector]:
    """Step over dt by the trapezoidal rule: Ā = M (I + dt A/2), B̄ = M dt B, M = (I - dt A/2)⁻¹.

    It replaces e^z by (1 + z/2) / (1 - z/2): off by z³/12 in a step, so by a multiple of dt² over a
    given time. A mode that decays under A decays under Ā as well, however large dt is. M exists
    unless A has the eigenvalue 2/dt, which belongs to a growing mode.

    Source: L22 "How to discretize", the second pair of formulas; Tustin's method.
    """
    _check_system(A=A, B=B)
    check.numbers("(0, inf)", dt=dt)
    identity = torch.eye(A.shape[0], dtype=A.dtype, device=A.device)
    right = torch.cat([identity + dt / 2 * A, dt * B[:, None]], dim=1)
    both, info = torch.linalg.solve_ex(identity - dt / 2 * A, right)
    if not torch.compiler.is_compiling() and info.item():
        raise ValueError(f"dt = {dt} makes I - dt A/2 singular: 2/dt is an eigenvalue of A")
    return both[:, :-1], both[:, -1]


def ssm_recurrent(
    A_bar: Matrix,
    B_bar: Vector,
    C: Vector,
    x: Signal,
    *,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Output:
    """Compute h_k = Ā h_{k-1} + B̄ x_k, y_k = C h_k, one sample after the other: the definition.

    y_k sees x_k. L22 prints h_{k+1} = Ā h_k + B̄ x_k, which delays the output by one step against
    the kernel on the same slides.

    Args:
        A_bar, B_bar, C: how the state evolves, how a sample is written, how the state is read.
        x: one channel.
        initial_state: h_{-1}; None for zeros.
        return_final_state: return (y, state after the last sample) instead of y.

    Source: OTCE eqs. 2a, 2b; L22 "1D Discrete Recurrent Representation" with its index moved.
    """
    n = _check_system(A_bar=A_bar, B_bar=B_bar, C=C)
    n = check.shapes(n, x=(x, "b l"), initial_state=(initial_state, "b n"))
    check.dtypes([A_bar.dtype], x=x, initial_state=initial_state)
    states = [x.new_zeros(n["b"], n["n"]) if initial_state is None else initial_state]
    for x_k in x.unbind(1):
        states.append(states[-1] @ A_bar.mT + x_k[:, None] * B_bar)
    states = torch.stack(states, dim=1)  # from h_{-1} on, so l = 0 needs no special case
    y = states[:, 1:] @ C
    return (y, states[:, -1].clone()) if return_final_state else y


def ssm_kernel(A_bar: Matrix, B_bar: Vector, C: Vector, length: int) -> Float[Tensor, " {length}"]:
    """Compute the effect of one sample on all later outputs: K_k = C Ā^k B̄ for k < length.

    Source: OTCE eq. 3a; L22 "1D Convolutional Representation".
    """
    _check_system(A_bar=A_bar, B_bar=B_bar, C=C)
    check.numbers("[0, inf)", length=length)
    rows, power = C[None], A_bar  # the rows C Ā^k with k < m, and Ā^m
    # The rows for k < m, times Ā^m, are the rows for m ≤ k < 2m: log₂ length rounds are enough.
    while rows.shape[0] < length:
        rows = torch.cat([rows, rows @ power])
        power = power @ power
    return rows[:length] @ B_bar


def ssm_convolution(kernel: Float[Tensor, "*d l"], x: Signals) -> Signals:
    """Convolve causally, y_t = Σ_{s≤t} K_{t-s} x_s, by fast Fourier transform: l log l, not l².

    Rounding errors are relative to the largest entry of a row and spread over the row, as does an
    input that is not finite.

    Args:
        kernel: (l,) for x (b, l), or (d, l), one per channel, for x (b, d, l). As long as x, since
            missing entries of a kernel would count as zeros.
        x: (b, l), or (b, d, l).

    Source: OTCE eq. 3b; L22 "1D Convolutional Representation".
    """
    d = " ".join(f"d_{i}" for i in range(x.ndim - 2))
    n = check.shapes(x=(x, f"b {d} l"), kernel=(kernel, f"{d} l"))
    check.dtypes(REAL, x=x)
    check.dtypes([x.dtype], kernel=kernel)
    if x.numel() == 0:  # torch.fft raises on it
        return x * kernel
    # The transform multiplies polynomials modulo z^size: with 2l places nothing wraps around.
    size = 2 * n["l"]
    product = torch.fft.rfft(kernel, size) * torch.fft.rfft(x, size)
    return torch.fft.irfft(product, size)[..., : n["l"]]


def hippo_legs(n: int) -> tuple[Float[Tensor, "{n} {n}"], Float[Tensor, " {n}"]]:
    """Build the A and B that project the past onto polynomials: HiPPO with its LegS measure.

    A[i, j] = -√(2i+1) √(2j+1) for i > j, -(i+1) for i = j, 0 for i < j, and B[i] = √(2i+1). Under
    c'(t) = (A c(t) + B x(t)) / t the state c holds, at any time, the Legendre coefficients of
    degrees 0, ..., n-1 of the input on [0, t]. S4 starts from this A, whose eigenvalues are
    -1, ..., -n, and drops the 1/t. Both are float64.

    Source: Gu et al. (2020), HiPPO, theorem 2, with the minus sign in A; L22 "S4 Model".
    """
    check.sizes(n=n)
    i = torch.arange(n, dtype=torch.float64)
    B = (2 * i + 1).sqrt()
    return -torch.outer(B, B).tril(-1) - (i + 1).diag(), B


class S4D(nn.Module):
    """A layer of d time-invariant models, each with a diagonal A of n complex numbers.

    The numbers come in conjugate pairs, which makes the output real. The layer stores one of each
    pair, n/2 in all, and counts it twice. A starts at A_k = -1/2 + iω_k, with

    * "lin": ω_k = πk, whole and half turns per unit of time;
    * "legs": the ω_k of the HiPPO matrix without its rank-one part.

    dt starts log-uniform in [1e-3, 1e-1], one per channel: at the start channels forget within
    twenty to two thousand samples. B is 1, as scaling the state scales C the other way. The step is
    exact (ZOH). Re A = -exp(A_log) is negative for all parameters.

    dt and 1/A are in the same unit of time, so a trained layer runs at other sampling rates:
    `rate`, a factor on dt, is 2 where samples are twice as far apart as in training (16 kHz →
    8 kHz).

    Args:
        d_model: d, width of the input and the output.
        d_state: n, even.
        init: the initial frequencies of A.

    Source: L22 "SSM as a Neural Network Layer", "S4 Model"; Gu et al. (2022), S4D.
    """

    def __init__(self, d_model: int, *, d_state: int = 64, init: Init = "lin"):
        super().__init__()
        check.sizes(d_model=d_model, d_state=d_state)
        if d_state % 2:
            raise ValueError(f"d_state must be even, for conjugate pairs; got {d_state}")
        check.choice(Init, init=init)
        self.init, modes = init, d_state // 2
        self.log_dt = nn.Parameter(torch.empty(d_model))
        self.A_log = nn.Parameter(torch.empty(d_model, modes))
        self.A_imag = nn.Parameter(torch.empty(d_model, modes))
        self.C = nn.Parameter(torch.empty(d_model, modes, 2))  # real and imaginary part
        self.D = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new parameters, as the class describes."""
        nn.init.uniform_(self.log_dt, math.log(1e-3), math.log(1e-1))
        nn.init.constant_(self.A_log, math.log(0.5))
        modes = self.A_imag.shape[1]
        if self.init == "lin":
            self.A_imag.copy_(math.pi * torch.arange(modes))
        else:
            # A + BBᵀ/2 is -1/2 on the diagonal and antisymmetric elsewhere, so i times the
            # antisymmetric part has real eigenvalues, in pairs ±ω. They come in ascending order.
            A, B = hippo_legs(2 * modes)
            antisymmetric = (A + torch.outer(B, B) / 2).fill_diagonal_(0)
            self.A_imag.copy_(torch.linalg.eigvalsh(1j * antisymmetric)[modes:])
        nn.init.normal_(self.C)
        nn.init.ones_(self.D)

    def kernel(self, length: int, *, rate: float | int = 1.0) -> Float[Tensor, "d {length}"]:
        """Compute K_t = 2 Re Σ_k C_k B̄_k Ā_k^t, the kernel of every channel.

        It holds all terms of the sum in memory, (d, n/2, l) complex numbers.

        Source: OTCE eq. 3a; Gu et al. (2022), S4D.
        """
        check.numbers("[0, inf)", length=length)
        exponent, B_bar, C = self._discrete(rate)
        times = torch.arange(length, device=self.D.device)
        return 2 * einsum("dn,dnl->dl", C * B_bar, (exponent[..., None] * times).exp()).real

    def forward(self, x: Channels, *, rate: float | int = 1.0) -> Channels:
        """Convolve every channel with its kernel, from a state of zero.

        Source: L22 "Efficiency of SSM, RNN, & Transformer": training.
        """
        check.shapes({"d": self.D.shape[0]}, x=(x, "b l d"))
        check.dtypes([self.D.dtype], x=x)
        kernel = self.kernel(x.shape[1], rate=rate)
        return ssm_convolution(kernel, x.mT).mT + self.D * x

    def step(self, x: Sample, state: Modes, *, rate: float | int = 1.0) -> tuple[Sample, Modes]:
        """Run the recurrence for one sample, at a cost that does not depend on the past.

        Source: OTCE eqs. 2a, 2b; L22 "Efficiency of SSM, RNN, & Transformer": test.
        """
        known = dict(zip(("d", "modes"), self.A_log.shape, strict=True))
        check.shapes(known, x=(x, "b d"), state=(state, "b d modes"))
        check.dtypes([self.D.dtype], x=x)
        check.dtypes([self.D.dtype.to_complex()], state=state)
        exponent, B_bar, C = self._discrete(rate)
        state = exponent.exp() * state + B_bar * x[..., None]
        return 2 * einsum("bdn,dn->bd", state, C).real + self.D * x, state

    def initial_state(self, batch: int) -> Complex[Tensor, "{batch} d modes"]:
        """Return the state before the first sample: zeros."""
        return self.A_log.new_zeros(batch, *self.A_log.shape, dtype=self.D.dtype.to_complex())

    def _discrete(self, rate):
        """dt A, B̄ and C, each (d, n/2) and complex; Ā is the exponential of the first."""
        check.numbers("(0, inf)", rate=rate)
        A = torch.complex(-self.A_log.exp(), self.A_imag)
        exponent = rate * self.log_dt.exp()[:, None] * A
        # expm1, since exp(z) - 1 would lose the digits of a small z
        return exponent, torch.expm1(exponent) / A, torch.view_as_complex(self.C)


def _check_system(**named):
    """Check a model of one channel: a square A and vectors of its size, all finite."""
    (name, A), *vectors = named.items()
    n = check.shapes(**{name: (A, "n n")})
    check.sizes(**n)
    check.shapes(n, **{k: (t, "n") for k, t in vectors})
    check.dtypes(REAL, **{name: A})
    check.dtypes([A.dtype], **dict(vectors))
    check.entries("(-inf, inf)", **named)
    return n
