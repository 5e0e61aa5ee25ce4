"""State space models: a linear differential equation, made discrete, made fast, made selective.

A state of n numbers follows an input over time, and an output is read from it:

    h'(t) = A h(t) + B x(t)        y(t) = C h(t)

Between two samples, dt apart, the input is taken to be constant. That gives the recurrence
h_k = Ā h_{k-1} + B̄ x_k, y_k = C h_k with h_{-1} = 0. Ā and B̄ are the same at every step, so it is
a convolution as well, y_k = Σ_{s≤k} C Ā^{k-s} B̄ x_s. A selective model lets dt, B and C depend on
the input: then there is no such kernel any more, and a scan takes its place.

    code           shape                     in the papers
    A, B, C        (n, n), (n,), (n,)        A, B, C of one channel (of S4)
    A_bar, B_bar   (n, n), (n,)              Ā, B̄
    kernel         (l,)                      K̄
    x              (b, l), (b, l, d)         x, one channel or d of them
    dt             a number, (b, l, d)       Δ, the step size
    A, B, C        (d, n), (b, l, n) twice   A, B, C of the selective model (of S6)
    state          (b, n), (b, d, n)         h

    discretize_zoh, discretize_bilinear   (A, B, dt) -> Ā, B̄
    ssm_recurrent                         the definition, one sample after the other
    ssm_kernel, ssm_convolution           the same by one convolution
    hippo_legs, legs_memory, legs_reconstruct   an A that remembers, and what it remembers
    S4D                                   a layer of time-invariant models with a diagonal A
    selective_scan                        the selective model: its definition
    selective_scan_parallel               the same in about 2 log₂ l steps
    Mamba                                 a layer around it

The single-channel functions and S4D take float32 and float64. The selective scans take sixteen bits
as well, compute them in float32, and keep the state in float32. Notebook 01 derives all of it.

Source: L22; OTCE §2.1; Gu et al. (2020), HiPPO; Gu et al. (2022), S4D; Gu and Dao (2023), Mamba.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Complex, Float
from torch import Tensor, einsum, nn

from cheems_ref.ssd import short_convolution

Init = Literal["lin", "legs"]
Scan = Literal["parallel", "sequential"]
REAL = (torch.float32, torch.float64)  # what torch solves, exponentiates and transforms anywhere


def discretize_zoh(
    A: Float[Tensor, "n n"], B: Float[Tensor, " n"], dt: float | int
) -> tuple[Float[Tensor, "n n"], Float[Tensor, " n"]]:
    """Step over dt exactly, for an input that is held: Ā = exp(dt A), B̄ = ∫_0^dt exp(τA) dτ B.

    "ZOH" is zero-order hold. Where A has an inverse, B̄ = A⁻¹ (Ā - I) B, as the papers print it.

    Args:
        A: (n, n), in 1/time; it may be singular.
        B: (n,), in the dtype of A.
        dt: time from one sample to the next, > 0.

    Returns:
        Ā (n, n) and B̄ (n,).

    Raises:
        ValueError: a wrong shape or dtype, an entry that is not finite, or dt not in (0, ∞).

    Source: OTCE §2.1; L22 "How to discretize", the first pair of formulas.
    """
    _check_system(A, B)
    _check_positive("dt", dt)
    # A held input is a state that does not change: (h, x)' = [[A, B], [0, 0]] (h, x). One
    # exponential solves both equations, without dividing by A.
    n = A.shape[0]
    block = F.pad(torch.cat([A, B[:, None]], dim=1), (0, 0, 0, 1))
    step = torch.linalg.matrix_exp(dt * block)
    return step[:n, :n], step[:n, n]


def discretize_bilinear(
    A: Float[Tensor, "n n"], B: Float[Tensor, " n"], dt: float | int
) -> tuple[Float[Tensor, "n n"], Float[Tensor, " n"]]:
    """Step over dt by the trapezoidal rule: Ā = M (I + dt A/2), B̄ = M dt B, M = (I - dt A/2)⁻¹.

    It puts (1 + z/2) / (1 - z/2) in the place of e^z: off by z³/12 in a step, so by a multiple of
    dt² over a given time. What decays under A decays under Ā too, however large dt is.

    Args:
        A, B, dt: as in `discretize_zoh`.

    Returns:
        Ā (n, n) and B̄ (n,).

    Raises:
        ValueError: as `discretize_zoh` does, or I - dt A/2 has no inverse: 2/dt is an eigenvalue of
            A, which then does not decay.

    Source: L22 "How to discretize", the second pair of formulas; Tustin's method.
    """
    _check_system(A, B)
    _check_positive("dt", dt)
    identity = torch.eye(A.shape[0], dtype=A.dtype, device=A.device)
    right = torch.cat([identity + dt / 2 * A, dt * B[:, None]], dim=1)
    both, info = torch.linalg.solve_ex(identity - dt / 2 * A, right)
    if info.item():
        raise ValueError(f"dt = {dt} makes I - dt A/2 singular: 2/dt is an eigenvalue of A")
    return both[:, :-1], both[:, -1]


def ssm_recurrent(
    A_bar: Float[Tensor, "n n"],
    B_bar: Float[Tensor, " n"],
    C: Float[Tensor, " n"],
    x: Float[Tensor, "b l"],
    *,
    initial_state: Float[Tensor, "b n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l"] | tuple[Float[Tensor, "b l"], Float[Tensor, "b n"]]:
    """Compute h_k = Ā h_{k-1} + B̄ x_k, y_k = C h_k, one sample after the other: the definition.

    y_k sees x_k. L22 prints h_{k+1} = Ā h_k + B̄ x_k, whose output comes one step later than that of
    its own kernel.

    Args:
        A_bar: (n, n). All tensors share a dtype.
        B_bar: (n,), what a sample writes.
        C: (n,), what is read.
        x: (b, l), one channel.
        initial_state: (b, n), h_{-1}; None for zeros.
        return_final_state: whether to return the state after the last sample as well.

    Returns:
        y (b, l), or (y, final state).

    Raises:
        ValueError: a wrong shape or dtype, or Ā, B̄ or C not finite.

    Source: OTCE eqs. 2a, 2b; L22 "1D Discrete Recurrent Representation" with its index moved.
    """
    _check_system(A_bar, B_bar, C, bar="_bar")
    _check("x", x, "b l", {}, [A_bar.dtype])
    b, n = x.shape[0], A_bar.shape[0]
    state = x.new_zeros(b, n) if initial_state is None else initial_state
    _check("initial_state", state, "b n", dict(b=b, n=n), [A_bar.dtype])
    states = []
    for x_k in x.unbind(1):
        state = state @ A_bar.mT + x_k[:, None] * B_bar
        states.append(state)
    y = torch.stack(states, dim=1) @ C if states else x.clone()
    return (y, state if states else state.clone()) if return_final_state else y


def ssm_kernel(
    A_bar: Float[Tensor, "n n"], B_bar: Float[Tensor, " n"], C: Float[Tensor, " n"], length: int
) -> Float[Tensor, " {length}"]:
    """Compute what one sample does to all later outputs: K_k = C Ā^k B̄ for k < length.

    The rows C Ā^k for k < m, times Ā^m, are those for m ≤ k < 2m. So each round doubles their
    number, and log₂ length rounds are enough.

    Args:
        A_bar, B_bar, C: as in `ssm_recurrent`.
        length: l ≥ 0.

    Returns:
        (l,).

    Raises:
        ValueError: as `ssm_recurrent` does, or length < 0.

    Source: OTCE eq. 3a; L22 "1D Convolutional Representation".
    """
    _check_system(A_bar, B_bar, C, bar="_bar")
    _check_length(length)
    rows, power = C[None], A_bar  # the rows C Ā^k with k < m, and Ā^m
    while rows.shape[0] < length:
        rows = torch.cat([rows, rows @ power])
        power = power @ power
    return rows[:length] @ B_bar


def ssm_convolution(
    kernel: Float[Tensor, "*d l"], x: Float[Tensor, "b *d l"]
) -> Float[Tensor, "b *d l"]:
    """Convolve causally, y_t = Σ_{s≤t} K_{t-s} x_s, by fast Fourier transform: l log l, not l².

    Rounding errors are relative to the largest entry of a row, and spread over all of it, as does
    an input that is not finite.

    Args:
        kernel: (l,), or (d, l) for one kernel per channel; as long as x, since what is left out of
            a kernel would count as zero.
        x: (b, l), or (b, d, l), in the dtype of the kernel.

    Returns:
        The shape of x.

    Raises:
        ValueError: the kernel has not the axes of x without b, or a wrong dtype.

    Source: OTCE eq. 3b; L22 "1D Convolutional Representation".
    """
    if x.ndim < 2:
        raise ValueError(f"x must be (b, l) or (b, d, l), got {_shape(x)}")
    if kernel.shape != x.shape[1:]:
        axes = tuple(x.shape[1:])
        raise ValueError(f"kernel must be {axes}, the axes of x without b, got {_shape(kernel)}")
    for name, t in (("x", x), ("kernel", kernel)):
        _check_dtype(name, t, REAL if t is x else [x.dtype])
    if x.numel() == 0:  # which the transform refuses
        return x * kernel
    # The transform multiplies polynomials modulo z^size: with 2l places nothing wraps around.
    length = x.shape[-1]
    size = 2 * length
    product = torch.fft.rfft(kernel, size) * torch.fft.rfft(x, size)
    return torch.fft.irfft(product, size)[..., :length]


def hippo_legs(n: int) -> tuple[Float[Tensor, "{n} {n}"], Float[Tensor, " {n}"]]:
    """Build the A and B that project all of the past on polynomials: HiPPO with its LegS measure.

    A[i, j] = -√(2i+1) √(2j+1) for i > j, -(i+1) for i = j, 0 for i < j, and B[i] = √(2i+1). In
    c'(t) = (A c(t) + B x(t)) / t the state c is, at any time, the n Legendre coefficients of the
    input so far, stretched over [0, t]. S4 starts from this A and leaves out the 1/t.

    Args:
        n: size of the state, ≥ 1; the polynomials have degrees below n.

    Returns:
        A (n, n), whose eigenvalues are -1, ..., -n, and B (n,); float64.

    Raises:
        ValueError: n < 1.

    Source: Gu et al. (2020), HiPPO, theorem 2, with the minus sign in A; L22 "S4 Model".
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    i = torch.arange(n, dtype=torch.float64)
    B = (2 * i + 1).sqrt()
    return -torch.outer(B, B).tril(-1) - (i + 1).diag(), B


def legs_memory(x: Float[Tensor, "b l"], n: int) -> Float[Tensor, "b l {n}"]:
    """Compute the n coefficients that HiPPO-LegS keeps of the input so far, after each sample.

    Sample k is held over the time from k to k + 1, and nothing else is approximated: coefficient i
    is the mean of input times √(2i+1) P_i over all of the past, with P_i stretched over it.

    Args:
        x: (b, l), float32 or float64.
        n: number of coefficients, ≥ 1.

    Returns:
        (b, l, n), in the dtype of x.

    Raises:
        ValueError: a wrong shape or dtype, or n < 1.

    Source: Gu et al. (2020), HiPPO, theorem 2, whose discrete step approximates this one.
    """
    A, B = hippo_legs(n)
    _check("x", x, "b l", {}, REAL)
    if x.shape[1] == 0:
        return x.new_zeros(*x.shape, n)
    memory = [F.pad(x[:, :1], (0, n - 1))]  # over its first unit of time the input is a constant
    for k, x_k in enumerate(x.unbind(1)[1:], start=1):
        # In the time log t the equation is c' = A c + B x, where nothing depends on the time. The
        # step from k to k + 1 takes log((k + 1) / k) of it.
        A_bar, B_bar = (t.to(x) for t in discretize_zoh(A, B, math.log1p(1 / k)))
        memory.append(memory[-1] @ A_bar.mT + x_k[:, None] * B_bar)
    return torch.stack(memory, dim=1)


def legs_reconstruct(
    coefficients: Float[Tensor, "*b n"], past: Float[Tensor, " m"]
) -> Float[Tensor, "*b m"]:
    """Evaluate the polynomial that the coefficients stand for: Σ_i c_i √(2i+1) P_i(2s - 1).

    Args:
        coefficients: (..., n), such as one time of `legs_memory`.
        past: (m,), the places s as fractions of the time so far: 0 is the beginning, 1 is now. In
            the dtype of the coefficients.

    Returns:
        (..., m), in the unit of the input.

    Raises:
        ValueError: a wrong rank or dtype, n = 0, or a place outside of [0, 1].

    Source: Gu et al. (2020), HiPPO, on LegS; Bonnet's recurrence for the P_i.
    """
    n = coefficients.shape[-1] if coefficients.ndim else 0
    if n == 0:
        raise ValueError(f"coefficients must be (..., n) with n ≥ 1, got {_shape(coefficients)}")
    _check_dtype("coefficients", coefficients, REAL)
    _check("past", past, "m", {}, [coefficients.dtype])
    if not bool(((past >= 0) & (past <= 1)).all()):
        low, high = past.min().item(), past.max().item()
        raise ValueError(f"past must lie in [0, 1], got entries in [{low:g}, {high:g}]")
    z = 2 * past - 1
    legendre = [torch.ones_like(z), z]
    for i in range(1, n - 1):
        legendre.append(((2 * i + 1) * z * legendre[i] - i * legendre[i - 1]) / (i + 1))
    scale = (2 * torch.arange(n, dtype=z.dtype, device=z.device) + 1).sqrt()
    return coefficients * scale @ torch.stack(legendre[:n])


class S4D(nn.Module):
    """A layer of d time-invariant models, each with a diagonal A of n complex numbers.

    Those come in conjugate pairs, so that the output is real. One of each pair is stored, n/2 in
    all, and counted twice. A starts at A_k = -1/2 + iω_k, with

    * "lin": ω_k = πk, whole and half turns per unit of time;
    * "legs": the ω_k of the HiPPO matrix without its part of rank one.

    dt starts log-uniform in [1e-3, 1e-1], one per channel: so at the start a channel forgets over
    anything from twenty samples to two thousand. B is 1, as scaling the state scales C the other
    way. The step is the exact one (ZOH). Re A = -exp(A_log) stays below zero whatever is learned.

    dt is in units of the time in which A is a rate, so a layer trained on samples of one distance
    runs on others: `rate` = 2 where samples are twice as far apart as in training (16 kHz → 8 kHz).

    Args:
        d_model: d, width of the input and the output.
        d_state: n, even.
        init: where the frequencies of A start.

    Raises:
        ValueError: a size below 1, an odd n or an unknown init.

    Source: L22 "SSM as a Neural Network Layer", "S4 Model"; Gu et al. (2022), S4D.
    """

    def __init__(self, d_model: int, *, d_state: int = 64, init: Init = "lin"):
        super().__init__()
        _check_sizes(d_model=d_model, d_state=d_state)
        if d_state % 2:
            raise ValueError(f"d_state must be even, to be cut into pairs; got {d_state}")
        if init not in get_args(Init):
            raise ValueError(f"init must be one of {get_args(Init)}, got {init!r}")
        modes = d_state // 2
        if init == "lin":
            frequencies = math.pi * torch.arange(modes)
        else:
            # A + BBᵀ/2 is -1/2 on the diagonal and antisymmetric beside it, so i times the latter
            # has real eigenvalues, in pairs ±ω. They come in ascending order.
            A, B = hippo_legs(d_state)
            antisymmetric = A + torch.outer(B, B) / 2
            antisymmetric.fill_diagonal_(0)
            frequencies = torch.linalg.eigvalsh(1j * antisymmetric)[modes:]
        self.log_dt = nn.Parameter(_log_uniform(d_model))
        self.A_log = nn.Parameter(torch.full((d_model, modes), math.log(0.5)))
        frequencies = repeat(frequencies, "n -> d n", d=d_model).to(self.A_log)
        self.A_imag = nn.Parameter(frequencies.clone())  # a view would be one row in memory
        self.C = nn.Parameter(torch.randn(d_model, modes, 2))  # real and imaginary part
        self.D = nn.Parameter(torch.ones(d_model))

    def kernel(self, length: int, *, rate: float | int = 1.0) -> Float[Tensor, "d {length}"]:
        """Compute K_t = 2 Re Σ_k C_k B̄_k Ā_k^t, the kernel of every channel.

        On the way every term of the sum is in memory, (d, n/2, l) complex numbers.

        Args:
            length: l ≥ 0.
            rate: factor on dt, > 0.

        Returns:
            (d, l).

        Raises:
            ValueError: length < 0, or rate not in (0, ∞).

        Source: OTCE eq. 3a; Gu et al. (2022), S4D.
        """
        _check_length(length)
        exponent, B_bar, C = self._discrete(rate)
        times = torch.arange(length, device=self.D.device)
        return 2 * einsum("dn,dnl->dl", C * B_bar, (exponent[..., None] * times).exp()).real

    def forward(
        self, x: Float[Tensor, "b l d"], *, rate: float | int = 1.0
    ) -> Float[Tensor, "b l d"]:
        """Filter every channel by its kernel, from a state of zero.

        Args:
            x: (b, l, d), float32 or float64, as the layer is.
            rate: factor on dt, > 0.

        Returns:
            y (b, l, d).

        Raises:
            ValueError: a wrong shape or dtype, or rate not in (0, ∞).

        Source: L22 "Efficiency of SSM, RNN, & Transformer": training.
        """
        _check("x", x, "b l d", dict(d=self.D.shape[0]), [self.D.dtype])
        kernel = self.kernel(x.shape[1], rate=rate)
        return ssm_convolution(kernel, x.mT).mT + self.D * x

    def step(
        self,
        x: Float[Tensor, "b d"],
        state: Complex[Tensor, "b d modes"],
        *,
        rate: float | int = 1.0,
    ) -> tuple[Float[Tensor, "b d"], Complex[Tensor, "b d modes"]]:
        """Take one sample through the recurrence; the cost does not depend on how many came before.

        Args:
            x: (b, d), one sample.
            state: (b, d, n/2), complex, the state before it; it is not changed.
            rate: factor on dt, > 0.

        Returns:
            y (b, d) and the state after the sample.

        Raises:
            ValueError: as `forward` does.

        Source: OTCE eqs. 2a, 2b; L22 "Efficiency of SSM, RNN, & Transformer": test.
        """
        d, modes = self.A_log.shape
        _check("x", x, "b d", dict(d=d), [self.D.dtype])
        exponent, B_bar, C = self._discrete(rate)
        sizes = dict(b=x.shape[0], d=d, modes=modes)
        _check("state", state, "b d modes", sizes, [C.dtype])
        state = exponent.exp() * state + B_bar * x[..., None]
        return 2 * einsum("bdn,dn->bd", state, C).real + self.D * x, state

    def initial_state(self, batch: int) -> Complex[Tensor, "{batch} d modes"]:
        """Make the state before the first sample: zeros (b, d, n/2), complex."""
        return self.A_log.new_zeros(batch, *self.A_log.shape, dtype=self.D.dtype.to_complex())

    def _discrete(self, rate):
        """dt A, B̄ and C, each (d, n/2) and complex; Ā is the exponential of the first."""
        _check_positive("rate", rate)
        A = torch.complex(-self.A_log.exp(), self.A_imag)
        exponent = rate * self.log_dt.exp()[:, None] * A
        # expm1, since exp(z) - 1 would lose the digits of a small z
        return exponent, torch.expm1(exponent) / A, torch.view_as_complex(self.C)


def selective_scan(
    x: Float[Tensor, "b l d"],
    dt: Float[Tensor, "b l d"],
    A: Float[Tensor, "d n"],
    B: Float[Tensor, "b l n"],
    C: Float[Tensor, "b l n"],
    *,
    D: Float[Tensor, " d"] | None = None,
    initial_state: Float[Tensor, "b d n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l d"] | tuple[Float[Tensor, "b l d"], Float[Tensor, "b d n"]]:
    """Compute h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t: the definition.

    Each channel has a state of its own, with a diagonal A and a step size; all of them write by the
    same B and read by the same C. As in Mamba's code, the input term is dt B x (Euler) and not the
    (exp(dt A) - 1)/A B x of ZOH. It is the larger one: by 5 % at dt A = -0.1, elevenfold at -11.

    Args:
        x: (b, l, d), the inputs. x, B and C share a dtype.
        dt: (b, l, d), step sizes ≥ 0, in the unit of time in which A is a rate; dt = 0 leaves the
            state alone. dt, A and D have the dtype of x, or float32 beside a sixteen-bit x.
        A: (d, n), ≤ 0.
        B: (b, l, n), what each token writes.
        C: (b, l, n), what each token reads.
        D: (d,), weight of the skip connection from x to y; None for none.
        initial_state: (b, d, n), the state before the first token; None for zeros. Its dtype, and
            that of the final state, is that of x, or float32 for a sixteen-bit x.
        return_final_state: whether to return the state after the last token as well.

    Returns:
        y (b, l, d) with the dtype of x, or (y, final state).

    Raises:
        ValueError: a wrong rank, size or dtype; d or n is 0; A > 0; dt negative; A or dt not
            finite.

    Source: L22 and OTCE §2.1, Algorithm 2; mamba-ssm's `selective_scan_ref`.
    """
    state = _check_scan(x, dt, A, B, C, D, initial_state)
    wide_A, outputs = A.to(state.dtype), []
    for tokens in zip(*(t.to(state.dtype).unbind(1) for t in (x, dt, B, C)), strict=True):
        x_t, dt_t, B_t, C_t = tokens
        write = (dt_t * x_t)[..., None] * B_t[:, None]
        state = torch.exp(dt_t[..., None] * wide_A) * state + write
        outputs.append(einsum("bdn,bn->bd", state, C_t))
    if not outputs:
        return _result(x.clone(), x, D, state.clone(), return_final_state)
    return _result(torch.stack(outputs, dim=1), x, D, state, return_final_state)


def selective_scan_parallel(
    x: Float[Tensor, "b l d"],
    dt: Float[Tensor, "b l d"],
    A: Float[Tensor, "d n"],
    B: Float[Tensor, "b l n"],
    C: Float[Tensor, "b l n"],
    *,
    D: Float[Tensor, " d"] | None = None,
    initial_state: Float[Tensor, "b d n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l d"] | tuple[Float[Tensor, "b l d"], Float[Tensor, "b d n"]]:
    """Compute the selective scan as an associative one: in about 2 log₂ l steps instead of l.

    Arguments, result and errors are those of `selective_scan`. All states are in memory at once,
    (b, l, d, n): what the fused kernel of Mamba is there to avoid.

    torch has an `associative_scan` too, but says of it that it is a prototype without derivatives
    and with a risk of wrong results, and it refuses l = 0: so the few lines are written out here.

    Source: L22 "Mamba's Scan Implementation"; Blelloch (1990), Prefix sums and their applications.
    """
    state = _check_scan(x, dt, A, B, C, D, initial_state)
    values, dt, A, B, C = (t.to(state.dtype) for t in (x, dt, A, B, C))
    decays = torch.exp(dt[..., None] * A)
    writes = rearrange(dt * values, "b l d -> b l d 1") * rearrange(B, "b l n -> b l 1 n")
    # The state handed in is what a token before the first one wrote; nothing decays into that.
    states = _scan(F.pad(decays, (0, 0, 0, 0, 1, 0)), torch.cat([state[:, None], writes], dim=1))
    y = einsum("bldn,bln->bld", states[:, 1:], C)
    return _result(y, x, D, states[:, -1].clone(), return_final_state)


def _scan(a, b):
    """Solve h_t = a_t h_{t-1} + b_t with h_{-1} = 0 along axis 1, for all t at once.

    Two steps in a row are one step of the same kind, by (a_2 a_1, a_2 b_1 + b_2). So neighbours are
    joined two by two, the scan of half the length gives h at every second place, and the places
    between are one step further: 2 log₂ l operations one after the other, 3 l multiplications.
    """
    length = b.shape[1]
    if length == 1:
        return b
    a_1, b_1 = (t[:, 0 : length - 1 : 2] for t in (a, b))
    a_2, b_2 = (t[:, 1::2] for t in (a, b))
    odd = _scan(a_2 * a_1, a_2 * b_1 + b_2)
    even = a[:, 2::2] * odd[:, : (length - 1) // 2] + b[:, 2::2]
    h = torch.empty_like(b)
    h[:, 0], h[:, 1::2], h[:, 2::2] = b[:, 0], odd, even
    return h


class MambaCache(NamedTuple):
    """What a Mamba layer remembers of the tokens so far.

    state (b, d_inner, n), and the last inputs of the convolution, conv (b, d_conv - 1, d_inner).
    """

    state: Tensor
    conv: Tensor


class Mamba(nn.Module):
    """The Mamba layer: a short convolution and a selective scan, and a gate beside them.

    u = silu(conv(x W_x)), y = (scan(u) ⊙ silu(x W_z)) W_o. B, C and, through a bottleneck of
    dt_rank, dt are linear in u. A starts at -1, ..., -n in every channel, dt log-uniform in
    [1e-3, 1e-1]. mamba-ssm's layer has a bias in the convolution as well; here dt has the only one.

    Args:
        d_model: width of the input and the output.
        d_state: n.
        d_conv: tokens that the convolution sees.
        expand: d_inner / d_model, the number of channels of the scan per one of the input.
        dt_rank: width of the bottleneck; None for d_model / 16, rounded up.
        selective: False puts one learned vector in the place of what u W gives, the same at every
            token. So B, C and dt do not depend on the input, and all else is equal: the
            time-invariant control.
        scan: "parallel", in few large steps, or "sequential", in l small ones. They agree up to
            rounding; on a CPU the second is faster once b d n is large (some ten thousand).

    Raises:
        ValueError: a size below 1, or an unknown scan.

    Source: L22 "Mamba"; OTCE §2.1, Algorithm 2; Gu and Dao (2023), Mamba, §3.4; mamba-ssm's Mamba.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        selective: bool = True,
        scan: Scan = "parallel",
    ):
        super().__init__()
        dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        sizes = dict(d_model=d_model, d_state=d_state, d_conv=d_conv, expand=expand)
        _check_sizes(**sizes, dt_rank=dt_rank)
        if scan not in get_args(Scan):
            raise ValueError(f"scan must be one of {get_args(Scan)}, got {scan!r}")
        d_inner = expand * d_model
        self.widths, self.selective, self.scan = (dt_rank, d_state, d_state), selective, scan

        self.in_proj = nn.Linear(d_model, 2 * d_inner, bias=False)
        bound = d_conv**-0.5  # as torch's Conv1d starts
        self.conv = nn.Parameter(torch.empty(d_inner, d_conv).uniform_(-bound, bound))
        if selective:
            self.x_proj = nn.Linear(d_inner, sum(self.widths), bias=False)
        else:
            self.constant = nn.Parameter(torch.randn(sum(self.widths)))
        self.dt_proj = nn.Linear(dt_rank, d_inner, bias=False)
        bound = dt_rank**-0.5  # so that what u adds to dt_bias does not grow with dt_rank
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        dt = _log_uniform(d_inner).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        rates = torch.arange(1, d_state + 1, dtype=torch.get_default_dtype())
        self.A_log = nn.Parameter(repeat(rates.log(), "n -> d n", d=d_inner).clone())
        self.D = nn.Parameter(torch.ones(d_inner))
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)

    def forward(
        self, x: Float[Tensor, "b l d"], *, cache: MambaCache | None = None
    ) -> tuple[Float[Tensor, "b l d"], MambaCache]:
        """Mix the tokens of this call with one another and with those the cache remembers.

        Args:
            x: (b, l, d).
            cache: what an earlier call returned; None at the start of the sequence. It is not
                changed.

        Returns:
            y (b, l, d), and the cache for the next call.

        Raises:
            ValueError: a wrong shape, or a cache of another layer or batch.

        Source: mamba-ssm's `mamba_inner_ref`.
        """
        _check("x", x, "b l d", dict(d=self.in_proj.in_features), [x.dtype])
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u, conv = short_convolution(u, self.conv, history=None if cache is None else cache.conv)
        inner = self.x_proj(u) if self.selective else self.constant.expand(*u.shape[:2], -1)
        dt, B, C = inner.split(self.widths, dim=-1)
        wide = torch.promote_types(x.dtype, torch.float32)
        scan = selective_scan_parallel if self.scan == "parallel" else selective_scan
        y, state = scan(
            u,
            F.softplus(self.dt_proj(dt).to(wide) + self.dt_bias.to(wide)),
            -self.A_log.to(wide).exp(),
            B,
            C,
            D=self.D,
            initial_state=None if cache is None else cache.state,
            return_final_state=True,
        )
        return self.out_proj(y * F.silu(z)), MambaCache(state, conv)


def _log_uniform(size, low=1e-3, high=1e-1):
    """Logarithms of step sizes between low and high."""
    return torch.empty(size).uniform_(math.log(low), math.log(high))


def _result(y, x, D, state, return_final_state):
    if D is not None:
        y = y + D.to(y.dtype) * x.to(y.dtype)
    y = y.to(x.dtype)
    return (y, state) if return_final_state else y


def _shape(t):
    return f"shape {tuple(t.shape)}"


def _check(name, t, axes, sizes, dtypes):
    """Refuse another rank than that of axes, another size than those known, and another dtype."""
    axes = axes.split()
    if t.ndim != len(axes) or any(sizes.get(a, s) != s for a, s in zip(axes, t.shape, strict=True)):
        known = ", ".join(f"{a} = {sizes[a]}" for a in axes if a in sizes)
        known = f" with {known}" if known else ""
        raise ValueError(f"{name} must be ({', '.join(axes)}){known}, got {_shape(t)}")
    _check_dtype(name, t, dtypes)


def _check_dtype(name, t, dtypes):
    if t.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(str(d) for d in dtypes))
        raise ValueError(f"{name} must be {allowed}, got {t.dtype}")


def _check_positive(name, number):
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {number}")


def _check_length(length):
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")


def _check_sizes(**sizes):
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _check_system(A, B, C=None, bar=""):
    """Refuse what is not a model of one channel; `bar` ends the names of the discrete A and B."""
    if A.ndim != 2 or A.shape[0] != A.shape[1] or A.shape[0] == 0:
        raise ValueError(f"A{bar} must be (n, n) with n ≥ 1, got {_shape(A)}")
    _check_dtype(f"A{bar}", A, REAL)
    for name, t in ((f"A{bar}", A), (f"B{bar}", B), ("C", C)):
        if t is None:
            continue
        if t is not A:
            _check(name, t, "n", dict(n=A.shape[0]), [A.dtype])
        if not bool(t.isfinite().all()):
            count = int((~t.isfinite()).sum())
            raise ValueError(f"{name} must be finite everywhere, {count} of its entries are not")


def _check_scan(x, dt, A, B, C, D, state):
    """Refuse what the selective scan is not defined for, and return the state to start from."""
    if not x.is_floating_point():
        raise ValueError(f"x must be a floating-point tensor, got {x.dtype}")
    wide = torch.promote_types(x.dtype, torch.float32)
    or_wide = [x.dtype, wide]
    _check("x", x, "b l d", {}, [x.dtype])
    b, length, d = x.shape
    _check("A", A, "d n", dict(d=d), or_wide)
    n = A.shape[1]
    if d == 0 or n == 0:
        raise ValueError(f"the state is d × n, with both at least 1, got d = {d}, n = {n}")
    state = x.new_zeros(b, d, n, dtype=wide) if state is None else state
    sizes = dict(b=b, l=length, d=d, n=n)
    for name, t, axes, dtypes in (
        ("dt", dt, "b l d", or_wide),
        ("B", B, "b l n", [x.dtype]),
        ("C", C, "b l n", [x.dtype]),
        ("D", D, "d", or_wide),
        ("initial_state", state, "b d n", [wide]),
    ):
        if t is not None:
            _check(name, t, axes, sizes, dtypes)
    if not bool(((A <= 0) & (-math.inf < A)).all()):
        low, high = A.min().item(), A.max().item()
        raise ValueError(f"A must be ≤ 0 and finite everywhere, got entries in [{low:g}, {high:g}]")
    if not bool(((dt >= 0) & (dt < math.inf)).all()):
        low, high = dt.min().item(), dt.max().item()
        raise ValueError(
            f"dt must be ≥ 0 and finite everywhere, got entries in [{low:g}, {high:g}]"
        )
    return state
