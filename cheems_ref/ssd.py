"""State space duality (SSD): one map from sequences to sequences, computed in several ways.

Every head keeps a state, a p × n matrix, and walks through the tokens:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_tᵀ        y_t = h_t C_t + D x_t

    code       shape              in the papers
    x          (b, l, h, p)       x, the values (V of attention)
    dt         (b, l, h)          Δ, the step size, after softplus
    A          (h,)               A, one number ≤ 0 per head
    B          (b, l, g, n)       B, what a token writes (K of attention)
    C          (b, l, g, n)       C, what a token reads (Q of attention)
    D          (h,)               D, the skip connection
    state      (b, h, p, n)       h

Head i reads the B and C of group i // (h / g). The forms share one signature, whose first five
arguments have the order of mamba-ssm's `mamba_chunk_scan_combined`.

    ssd_recurrent   the definition, one token at a time
    ssd_quadratic   y = M x with the semiseparable matrix M, as attention does it
    ssd_chunked     the quadratic form inside chunks, the recurrence between them
    ssd_kernel      mamba-ssm's own Triton kernels (kernels.py)
    ssd_step        one token, for decoding
    ssd             calls the form that `backend` names
    SSD             the layer: projections around `ssd`, and a position encoding

In every form, no token changes an earlier one, as long as all numbers stay finite. In the
recurrence a NaN or an infinity reaches later tokens only. The other forms multiply it by the zeros
of their causal mask, and 0 · NaN is NaN, so it can also reach earlier tokens: those of its own
chunk in the chunked form, any of them in the quadratic form. The layer replaces padding by zeros
first.

A step with a large dt |A| is a reset: exp(dt A) is 0, and the state before it is forgotten. Every
form handles resets of 10³⁰ and more, but the kernel loses digits (see `ssd_kernel`), and so does
the chunked form on Apple's GPUs, which have no float64.

With 16-bit x, B and C the torch forms compute in float32, and the kernel multiplies in 16 bits and
sums in float32; y is cast back, and the state stays float32. Under autocast the matrix products of
the torch forms are in 16 bits, even those of float32 inputs. Notebook 03 derives the forms,
notebook 04 the position encodings.

The functions raise ValueError for wrong shapes, dtypes and values, and TypeError for a chunk_size
that is no whole number; the message names the argument, what was expected and what came (check.py).
The layer checks no values: those it makes are valid.

Each torch form is a public function, which checks its arguments, and below it the algorithm alone:
`_recurrent`, `_quadratic`, `_chunked`. To use the chunked form elsewhere, copy `_chunked` and what
it calls (`_four_steps`, `_pad`, CHUNKS_PER_BLOCK), with the imports of torch and einops. Call it as
_chunked(x, dt, A, B, C, state, chunk_size), with all tensors in one dtype and at least one token,
and add D x yourself. Only the kernel needs Triton and mamba-ssm: kernels.py is imported on first
use. WM and Ch are the two papers, OTCE their predecessor (README.md).

Source: WM §2, App. A, B.2; Ch A.2; Dao and Gu (2024).
"""

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, einsum, nn

from cheems_ref import check
from cheems_ref.convolution import short_convolution
from cheems_ref.rope import RotaryTable, _apply_rope, _cos_sin, check_turnable

Backend = Literal["auto", "recurrent", "quadratic", "chunked", "kernel"]
Position = Literal["rope", "conv", "decay"]

Values = Float[Tensor, "b l h p"]
Steps = Float[Tensor, "b l h"]
PerHead = Float[Tensor, " h"]
Keys = Float[Tensor, "b l g n"]
State = Float[Tensor, "b h p n"]
if TYPE_CHECKING:  # an editor can't tell which of the two a call returns
    Result = Values | Any
else:
    Result = Values | tuple[Values, State]

# Chunks that `_chunked` computes at a time: with few heads the tensors between two matrix products
# fit a core's cache, and without gradients their memory doesn't grow with the length.
CHUNKS_PER_BLOCK = 16


def ssd_recurrent(
    x: Values,
    dt: Steps,
    A: PerHead,
    B: Keys,
    C: Keys,
    *,
    D: PerHead | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Result:
    """Compute SSD by its recurrence, one token at a time: the definition.

    Args:
        x: inputs. x, B and C share a dtype.
        dt: step sizes ≥ 0, in units of time; dt = 0 leaves the state alone. dt, A and D have the
            dtype of x, or float32 if x is 16-bit.
        A: decay rates ≤ 0, per unit of time: a step decays the state by exp(dt A); at A = 0 nothing
            is forgotten.
        B: what each token writes into the state; g divides h.
        C: what each token reads from it.
        D: weights of the skip connection from x to y; None for none.
        chunk_size: accepted so that the forms are interchangeable.
        initial_state: the state before the first token; None for zeros. Initial and final state
            have the dtype of x, or float32 for a 16-bit x.
        return_final_state: whether to return the state after the last token as well.

    Returns:
        y with the dtype of x, or (y, final state).

    Source: WM App. A, "Proof of equation 2"; OTCE §2.
    """
    _check(x, dt, A, B, C, D, chunk_size=chunk_size, initial_state=initial_state)
    y, state = _run(_recurrent, x, dt, A, B, C, D, initial_state, chunk_size)
    return (y, state) if return_final_state else y


def _recurrent(x, dt, A, B, C, state, chunk_size):
    outputs = []
    for x_t, dt_t, B_t, C_t in zip(*(t.unbind(1) for t in (x, dt, B, C)), strict=True):
        y_t, state = _step(x_t, dt_t, A, B_t, C_t, state)
        outputs.append(y_t)
    return torch.stack(outputs, dim=1), state


def _step(x, dt, A, B, C, state):
    """h ← exp(dt A) h + dt x Bᵀ, y = h C, on one token: x (b, h, p), B and C (b, g, n)."""
    B, C = (expand_groups(t, x.shape[1]) for t in (B, C))
    decay = rearrange((dt * A).exp(), "b h -> b h 1 1")
    state = torch.addcmul(decay * state, (dt[..., None] * x)[..., None], B[:, :, None])
    return (state @ C[..., None])[..., 0], state


def semiseparable_matrix(dt: Steps, A: PerHead, B: Keys, C: Keys) -> Float[Tensor, "b h l l"]:
    """Return the matrix M of SSD, so that y = M x: M[t, s] = exp(A Σ_{s<r≤t} dt_r) (C_t·B_s) dt_s.

    Arguments as in `ssd_recurrent`. The target is axis 2, the source axis 3; M is zero where the
    source comes after the target, and float32 for 16-bit B and C.

    Source: WM App. A (M_ji = C_jᵀ A_j⋯A_{i+1} B_i and M = L ∘ CBᵀ), with dt as in WM Listing 3.
    """
    _check(None, dt, A, B, C)
    return _semiseparable_matrix(dt, A, B, C)


def _semiseparable_matrix(dt, A, B, C):
    wide = torch.promote_types(B.dtype, torch.float32)
    dt, A, B, C = (t.to(wide) for t in (dt, A, B, C))
    B, C = (expand_groups(t, A.shape[0]) for t in (B, C))
    # Column s sums dt A over r = s+1, ..., t directly. As differences of two running sums these
    # would lose digits: both sums grow with t, their difference does not.
    dA = repeat(dt * A, "b t h -> b h t s", s=dt.shape[1]).tril(-1)
    decay = dA.cumsum(dim=-2).exp().tril()
    return einsum("bthn,bshn->bhts", C, B) * decay * rearrange(dt, "b s h -> b h 1 s")


def ssd_quadratic(
    x: Values,
    dt: Steps,
    A: PerHead,
    B: Keys,
    C: Keys,
    *,
    D: PerHead | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Result:
    """Compute SSD as masked attention without softmax: y = M x, in time and memory l².

    Arguments and result as in `ssd_recurrent`; chunk_size is not used.

    Source: WM §2, (L ∘ QKᵀ)V = (L ∘ CBᵀ)X, and App. A.
    """
    _check(x, dt, A, B, C, D, chunk_size=chunk_size, initial_state=initial_state)
    y, state = _run(_quadratic, x, dt, A, B, C, D, initial_state, chunk_size)
    return (y, state) if return_final_state else y


def _quadratic(x, dt, A, B, C, state, chunk_size):
    y = einsum("bhts,bshp->bthp", _semiseparable_matrix(dt, A, B, C), x)

    # The initial state decays up to each token; a write decays over the tokens after it.
    B, C = (expand_groups(t, x.shape[2]) for t in (B, C))
    from_start = (dt * A).cumsum(dim=1).exp()
    y = y + einsum("bth,bthn,bhpn->bthp", from_start, C, state)
    # to_end[s] = exp(Σ_{r>s} dt_r A), and 1 for the last token
    to_end = F.pad((dt * A)[:, 1:].flip(1).cumsum(dim=1).flip(1), (0, 0, 0, 1)).exp()
    writes = einsum("bsh,bshp,bshn->bhpn", to_end * dt, x, B)
    return y, rearrange(from_start[:, -1], "b h -> b h 1 1") * state + writes


def ssd_chunked(
    x: Values,
    dt: Steps,
    A: PerHead,
    B: Keys,
    C: Keys,
    *,
    D: PerHead | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Result:
    """Compute SSD in chunks: quadratic inside a chunk, recurrent between chunks, linear in l.

    Arguments and result as in `ssd_recurrent`; chunk_size is the number of tokens per chunk. It
    changes the cost, and the result only by rounding; l need not be a multiple of it.

    mamba-ssm's kernel and `ssd_minimal_discrete` do the same four steps, each for all chunks at
    once, and the latter computes step 3 as a product with a (chunks + 1)² matrix. Here a block of a
    few chunks goes through all four, so the cost is linear in the number of chunks.

    Source: WM Listing 3, whose step 3 as printed sums over the wrong axis; here it is a recurrence.
    """
    _check(x, dt, A, B, C, D, chunk_size=chunk_size, initial_state=initial_state)
    y, state = _run(_chunked, x, dt, A, B, C, D, initial_state, chunk_size)
    return (y, state) if return_final_state else y


def _chunked(x, dt, A, B, C, state, chunk_size):
    g, size = B.shape[2], min(chunk_size, x.shape[1])
    exact = torch.float32 if x.is_mps else torch.float64  # Apple's GPUs have no float64

    # c chunks of `size` tokens: from here on l is the place in a chunk, i the head in a group.
    # Padding tokens fill the last chunk; their dt is 0, so they change no state. The state is
    # transposed, so that one product with B or C serves all heads of a group.
    X, dt, B, C = (_pad(t, -x.shape[1] % size) for t in (x, dt, B, C))
    X = rearrange(X, "b (c l) (g i) p -> b c g i l p", l=size, g=g)
    dt = rearrange(dt, "b (c l) (g i) -> b c g i l", l=size, g=g).contiguous()  # for the cumsum
    B, C = (rearrange(t, "b (c l) g n -> b c g l n", l=size) for t in (B, C))
    state = rearrange(state, "b (g i) p n -> b g n (i p)", g=g)
    # dA is the log decay of one step, its running sum that since the chunk began: in float64,
    # because differences of it are taken. A dA of -1e10 would cost its neighbours ten digits, so
    # it is clamped at -750; exp is 0 there in every dtype.
    dA = (dt.to(exact) * rearrange(A, "(g i) -> g i 1", g=g)).clamp(min=-750)
    tensors = (X, dt, B, C, dA.cumsum(-1))

    outputs = []
    for block in zip(*(t.split(CHUNKS_PER_BLOCK, dim=1) for t in tensors), strict=True):
        y, state = _four_steps(*block, state)
        outputs.append(rearrange(y, "b c g i l p -> b c l g i p"))
    y = rearrange(torch.cat(outputs, dim=1), "b c l g i p -> b (c l) (g i) p")[:, : x.shape[1]]
    return y, rearrange(state, "b g n (i p) -> b (g i) p n", p=x.shape[3])


def _four_steps(X, dt, B, C, log_decay, state):
    """SSD of a few chunks, with the axes of `_chunked`: y, and the state after the last."""
    p, from_start = X.shape[-1], log_decay.exp().to(X.dtype)
    to_end = (log_decay[..., -1:] - log_decay).exp().to(X.dtype)

    # 1. Inside each chunk: the quadratic form. tril_ comes before exp_ because the log decays above
    #    the diagonal are positive and could overflow. exp_ turns the zeros there into ones, but
    #    (C Bᵀ).tril() is 0 there, and so is the product.
    L = (log_decay[..., :, None] - log_decay[..., None, :]).to(X.dtype).tril_().exp_()
    V = dt[..., None] * X
    y = ((C @ B.mT).tril()[:, :, :, None] * L) @ V

    # 2. The write of each chunk: its tokens' writes, decayed to the end of the chunk.
    writes = B.mT @ rearrange(to_end[..., None] * V, "b c g i l p -> b c g l (i p)")

    # 3. Between chunks: the recurrence again, decay · state + write, one step per chunk.
    over_chunk = repeat(from_start[..., -1], "b c g i -> b c g 1 (i p)", p=p)
    incoming = []
    for decay, write in zip(over_chunk.unbind(1), writes.unbind(1), strict=True):
        incoming.append(state)
        state = torch.addcmul(write, decay, state)

    # 4. The read of each token from the state before its chunk.
    reads = rearrange(C @ torch.stack(incoming, 1), "b c g l (i p) -> b c g i l p", p=p)
    return torch.addcmul(y, from_start[..., None], reads), state


def _pad(t, count):
    """Append `count` zero tokens along axis 1."""
    return F.pad(t, (0, 0) * (t.ndim - 2) + (0, count)) if count else t  # F.pad always copies


def ssd_kernel(
    x: Values,
    dt: Steps,
    A: PerHead,
    B: Keys,
    C: Keys,
    *,
    D: PerHead | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Result:
    """Compute SSD with mamba-ssm's kernels: compiled on a GPU, else in Triton's interpreter.

    Arguments and result as in `ssd_recurrent`, in float32 or 16 bits. The kernels' chunks have
    chunk_size tokens, rounded up to a power of two from 16 to 256. The kernels sum in float32, log
    decays too: a step with dt |A| = 10⁴ costs the decays of its chunk four digits, one of 10⁶
    nearly all. The interpreter is slow; use it to check results.

    Raises:
        TypeError: a tensor is float64.
        RuntimeError: the kernels cannot run here; the message says why and what to do.

    Source: WM Listing 4 (`mamba_chunk_scan_combined`); mamba-ssm 2.3.2.post1.
    """
    _check(x, dt, A, B, C, D, chunk_size=chunk_size, initial_state=initial_state)
    y, state = _kernel(x, dt, A, B, C, D, initial_state, chunk_size)
    return (y, state) if return_final_state else y


def _kernel(x, dt, A, B, C, D, state, chunk_size):
    return _kernels().chunk_scan(x, dt, A, B, C, D=D, chunk_size=chunk_size, initial_state=state)


def _kernels():
    """Import kernels.py where it is used; nothing else here needs it."""
    from cheems_ref import kernels

    return kernels


def ssd_step(
    x: Float[Tensor, "b h p"],
    dt: Float[Tensor, "b h"],
    A: PerHead,
    B: Float[Tensor, "b g n"],
    C: Float[Tensor, "b g n"],
    state: State,
    *,
    D: PerHead | None = None,
    backend: Literal["auto", "recurrent", "kernel"] = "auto",
) -> tuple[Float[Tensor, "b h p"], State]:
    """Take one token through the recurrence; the cost does not depend on how many came before.

    Args:
        x, dt, A, B, C, D: as in `ssd_recurrent`, for one token.
        state: the state before the token; it is not changed.
        backend: "recurrent", or "kernel" for mamba-ssm's `selective_state_update`, which has no
            gradient; "auto" takes the kernel for 16 bits on a GPU, under torch.no_grad().

    Returns:
        y and the state after the token.

    Raises:
        TypeError, RuntimeError: as `ssd_kernel`; ValueError for a gradient through the kernel.

    Source: WM App. A; mamba-ssm's `selective_state_update`.
    """
    check.choice(("auto", "recurrent", "kernel"), backend=backend)
    _check(x, dt, A, B, C, D, tokens="b", state=state)
    if backend == "auto" and not torch.is_grad_enabled():
        backend = _fastest(x, "recurrent")
    return _ssd_step(x, dt, A, B, C, state, D, backend)


def _fastest(x, otherwise):
    """Return the backend of "auto": the kernel where it can take x."""
    return "kernel" if x.is_cuda and _kernels().can_take(x) else otherwise


def _ssd_step(x, dt, A, B, C, state, D, backend):
    if backend == "kernel":
        return _kernels().state_update(x, dt, A, B, C, state, D=D)
    y, state = _step(*(t.to(state.dtype) for t in (x, dt, A, B, C)), state)
    return _add_skip(y, x, D), state


def ssd(
    x: Values,
    dt: Steps,
    A: PerHead,
    B: Keys,
    C: Keys,
    *,
    D: PerHead | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_final_state: bool = False,
    backend: Backend = "auto",
) -> Result:
    """Compute SSD by the form that `backend` names: recurrent, quadratic, chunked or kernel.

    A backend given by name is used, or the call raises. "auto" takes the first that fits:

        the kernel         for 16-bit tensors on a GPU where it can run (`kernels.kernel_status`)
        the recurrence     for a single token
        the chunked form   else

    For a single token without gradients, the kernel and the recurrence are those of `ssd_step`.

    Arguments and result as in `ssd_recurrent`; TypeError and RuntimeError as in `ssd_kernel`.

    Source: WM Listing 4.
    """
    check.choice(Backend, backend=backend)
    _check(x, dt, A, B, C, D, chunk_size=chunk_size, initial_state=initial_state)
    y, state = _ssd(x, dt, A, B, C, D, initial_state, chunk_size, backend)
    return (y, state) if return_final_state else y


def _ssd(x, dt, A, B, C, D, state, chunk_size, backend):
    if backend == "auto":
        backend = _fastest(x, "recurrent" if x.shape[1] == 1 else "chunked")
    if x.shape[1] == 1 and backend in ("recurrent", "kernel") and not torch.is_grad_enabled():
        state = _zero_state(x, B) if state is None else state
        y, state = _ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], state, D, backend)
        return y[:, None], state
    if backend == "kernel":
        return _kernel(x, dt, A, B, C, D, state, chunk_size)
    return _run(CORES[backend], x, dt, A, B, C, D, state, chunk_size)


CORES = {"recurrent": _recurrent, "quadratic": _quadratic, "chunked": _chunked}


def _run(core, x, dt, A, B, C, D, state, chunk_size):
    """Run a core in the dtype of the state, on at least one token, and add D x."""
    state = _zero_state(x, B) if state is None else state
    if x.shape[1] == 0:
        return x.clone(), state.clone()  # results share no memory with arguments
    y, state = core(*(t.to(state.dtype) for t in (x, dt, A, B, C)), state, chunk_size)
    return _add_skip(y, x, D), state


def _add_skip(y, x, D):
    """Return y + D x, rounded once to the dtype of x."""
    y = y if D is None else y + D[:, None].to(y.dtype) * x.to(y.dtype)
    return y.to(x.dtype)


class SSDCache(NamedTuple):
    """The memory of an SSD layer.

    state (b, h, p, n): the state after the last token. conv (b, d_conv - 1, h p + 2 g n): what the
    convolution of position="conv" remembers, x, B and C of the last real tokens; else None.
    """

    state: Tensor
    conv: Tensor | None = None


class SSD(nn.Module):
    """The SSD layer: x, B and C are projections of the input, dt is a softplus of one.

    The option `position` is the position encoding:

    * "rope": B and C are rotated by the angles of their positions, so C_t·B_s depends on positions
      only through t - s, with 32 frequencies for n = 64;
    * "conv": each channel of x, B and C passes through a convolution over its last d_conv tokens,
      then through SiLU;
    * "decay": the decay is the only position encoding; it tells near from far and nothing else.

    All three have the decay. -A starts uniform in (1, 16), dt log-uniform in [1e-3, 1e-1], as
    in Mamba-2: at first a head's memory is between one token and a thousand. The only bias is in
    the step size. Unlike Mamba-2's layer, this one has neither a gate nor a norm.

    torch.compile and torch.export take any number of rows. A graph is for one number of tokens,
    because the chunks depend on it; torch.compile makes a new graph for another number.

    Args:
        d_model: width of the input and the output.
        n_heads: h.
        d_head: p; None for d_model / n_heads.
        n_groups: g, a divisor of n_heads; the heads of a group share B and C.
        d_state: n; even for position="rope".
        position: the position encoding.
        d_conv: tokens that the convolution of position="conv" sees.
        rope_base: base of the angles of position="rope".
        chunk_size: tokens per chunk of the chunked form.
        backend: as in `ssd`.

    Source: WM §3.1, Table 1 and Listing 4; Ch A.2, Listing 2; the initialisation is Mamba-2's.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        d_head: int | None = None,
        n_groups: int = 1,
        d_state: int = 64,
        position: Position = "rope",
        d_conv: int = 4,
        rope_base: float | int = 10000.0,
        chunk_size: int = 64,
        backend: Backend = "auto",
    ):
        super().__init__()
        check.sizes(d_model=d_model, n_heads=n_heads, d_head=d_head, n_groups=n_groups)
        check.sizes(d_state=d_state, d_conv=d_conv, chunk_size=chunk_size)
        check.multiple(n_heads=n_heads, n_groups=n_groups)
        check.choice(Backend, backend=backend)
        check.choice(Position, position=position)
        if d_head is None:
            check.multiple(d_model=d_model, n_heads=n_heads)
            d_head = d_model // n_heads
        if position == "rope":
            check_turnable(d_state=d_state)
            check.numbers("(0, inf)", rope_base=rope_base)
        self.d_model, self.n_heads, self.n_groups = d_model, n_heads, n_groups
        self.d_head, self.d_state = d_head, d_state
        self.position, self.rope_base, self.backend = position, rope_base, backend
        self.chunk_size = chunk_size

        self.x_proj = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.B_proj = nn.Linear(d_model, n_groups * d_state, bias=False)
        self.C_proj = nn.Linear(d_model, n_groups * d_state, bias=False)
        self.dt_proj = nn.Linear(d_model, n_heads, bias=False)
        self.out_proj = nn.Linear(n_heads * d_head, d_model, bias=False)
        if position == "conv":
            self.conv = nn.Parameter(torch.empty(n_heads * d_head + 2 * n_groups * d_state, d_conv))
        self.dt_bias = nn.Parameter(torch.empty(n_heads))
        self.A_log = nn.Parameter(torch.empty(n_heads))
        self.D = nn.Parameter(torch.empty(n_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reinitialise the convolution, the step sizes, the decay rates and D."""
        if self.D.is_meta:  # no values; arithmetic there would import torch's compiler, 2 seconds
            return
        if self.position == "conv":
            bound = self.conv.shape[1] ** -0.5  # as torch's Conv1d starts
            nn.init.uniform_(self.conv, -bound, bound)
        dt = nn.init.uniform_(self.dt_bias, math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        nn.init.uniform_(self.A_log, 1, 16).log_()
        nn.init.ones_(self.D)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        position_ids: Int[Tensor, "b l"],
        *,
        padding_mask: Bool[Tensor, "b l"] | None = None,
        cache: SSDCache | None = None,
        rotary: RotaryTable | None = None,
    ) -> tuple[Float[Tensor, "b l d"], SSDCache]:
        """Mix the tokens of this call with one another and with the cached ones.

        Args:
            x: tokens.
            position_ids: int64 or int32, ≥ 0: the index of each token among the real tokens of its
                row, continued from the cache. Entries at padding are ignored; "conv" and "decay"
                ignore them all and go by the order of the tokens.
            padding_mask: True for real tokens; None for all. Padding leaves the state alone,
                at the start of a row, within it or at its end.
            cache: returned by the previous call; None at the start of the sequence. "rope" and
                "decay" have the same cache, so the layer can't tell one from the other.
            rotary: a table of cosines and sines that the layers of a model share; it is used only
                if it was made from this very tensor of position_ids.

        Returns:
            y, undefined at padded positions, and the cache for the next call.
        """
        check.mixer_call(x, self.d_model, position_ids, padding_mask)
        check.fits_weights(x, self.x_proj)
        if cache is not None:
            self._check_cache(x, cache)
        wide = torch.promote_types(x.dtype, torch.float32)
        if padding_mask is not None:
            x = x.masked_fill(~padding_mask[..., None], 0)
        # split(l, 1)[0] is the identity, and a workaround: its backward pass gives softplus the
        # contiguous gradient that torch.compile 2.13 assumes.
        dt = F.softplus(self.dt_proj(x).to(wide) + self.dt_bias.to(wide)).split(x.shape[1], 1)[0]
        if padding_mask is not None:
            dt = dt.masked_fill(~padding_mask[..., None], 0)

        state, history = (None, None) if cache is None else cache
        channels = [self.x_proj(x), self.B_proj(x), self.C_proj(x)]
        if self.position == "conv":
            u = torch.cat(channels, dim=-1)
            u, history = self._convolve(u, self.conv, padding_mask=padding_mask, history=history)
            channels = u.split([t.shape[-1] for t in channels], dim=-1)
        values, B, C = channels
        B, C = (t.unflatten(-1, (self.n_groups, -1)) for t in (B, C))
        if self.position == "rope":
            cos, sin = _cos_sin(position_ids, B.shape[-1], self.rope_base, x.dtype, rotary)
            B, C = _apply_rope(B, cos, sin), _apply_rope(C, cos, sin)

        values, A = values.unflatten(-1, (self.n_heads, -1)), -self.A_log.to(wide).exp()
        y, state = self._mix(values, dt, A, B, C, state)
        return self.out_proj(y.flatten(2)), SSDCache(state, history)

    # Two methods that `distributed` overrides for a text cut into pieces.

    def _convolve(self, u, weight, *, padding_mask, history):
        return short_convolution(u, weight, padding_mask=padding_mask, history=history)

    def _mix(self, x, dt, A, B, C, state):
        return _ssd(x, dt, A, B, C, self.D, state, self.chunk_size, self.backend)

    def _check_cache(self, x, cache):
        if (cache.conv is not None) != (self.position == "conv"):
            raise ValueError(f"the cache is of a layer without position={self.position!r}")
        sizes = dict(b=x.shape[0], h=self.n_heads, p=self.d_head, n=self.d_state)
        check.shapes(sizes, **{"cache.state": (cache.state, "b h p n")})
        check.dtypes([torch.promote_types(x.dtype, torch.float32)], **{"cache.state": cache.state})


def expand_groups(t: Tensor, n_heads: int) -> Tensor:
    """Give every head the B or C of its group: (..., g, n) -> (..., h, n)."""
    g = t.shape[-2]
    if g == 1:
        return t.expand(*t.shape[:-2], n_heads, t.shape[-1])
    return t if g == n_heads else t.repeat_interleave(n_heads // g, dim=-2)


def _zero_state(x, B):
    """Return zeros (b, h, p, n), in the dtype of x, or float32 for 16 bits."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1], dtype=wide)


def _check(x, dt, A, B, C, D=None, *, tokens="b l", chunk_size=1, initial_state=None, state=None):
    """Validate the arguments of a form; semiseparable_matrix has no x and passes None.

    `tokens` is "b l", or "b" for `ssd_step`, which calls its state `state`.
    """
    like_x = B.dtype if x is None else x.dtype
    check.floating(x=x, B=B)
    shapes = dict(x=(x, f"{tokens} h p"), dt=(dt, f"{tokens} h"), A=(A, "h"))
    shapes |= dict(B=(B, f"{tokens} g n"), C=(C, f"{tokens} g n"), D=(D, "h"))
    check.shapes(**shapes, initial_state=(initial_state, "b h p n"), state=(state, "b h p n"))
    check.multiple(h=A.shape[0], g=B.shape[-2])
    check.sizes(p=None if x is None else x.shape[-1], n=B.shape[-1], chunk_size=chunk_size)
    wide = torch.promote_types(like_x, torch.float32)
    check.dtypes([like_x], B=B, C=C)
    check.dtypes([like_x, wide], dt=dt, A=A, D=D)
    check.dtypes([wide], initial_state=initial_state, state=state)
    check.entries("(-inf, 0]", A=A)
    check.entries("[0, inf)", dt=dt)
