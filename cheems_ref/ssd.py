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

Head i reads the B and C of group i // (h / g). The functions share one signature, and the first
five arguments stand in the order of mamba-ssm's `mamba_chunk_scan_combined`.

    ssd_recurrent   the definition, one token after the other
    ssd_quadratic   y = M x with the semiseparable matrix M, as attention does it
    ssd_chunked     the quadratic form inside chunks, the recurrence between them
    ssd_kernel      mamba-ssm's own Triton kernels (kernels.py)
    ssd_step        one token, for decoding
    ssd             whichever fits, or the one that is asked for
    SSD             the layer: projections around `ssd`, and a source of position

Sixteen-bit x, B and C are computed in float32 and the result is cast back; the state stays
float32. (The kernel multiplies in sixteen bits and sums in float32.) Notebook 03 derives all of it,
notebook 04 the sources of position.
Source: WM §2, App. A, B.2; Ch A.2; Dao and Gu (2024).
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, einsum, nn

from cheems_ref import kernels
from cheems_ref.rope import INTEGERS, apply_rope, rope_cos_sin, rope_frequencies

Backend = Literal["auto", "recurrent", "quadratic", "chunked", "kernel"]
Position = Literal["rope", "conv", "decay"]

# Chunks that ssd_chunked computes at a time: few enough that what lies between two matrix
# products stays in a core's cache, and that memory does not grow with all chunks at once.
CHUNKS_PER_BLOCK = 16


def ssd_recurrent(
    x: Float[Tensor, "b l h p"],
    dt: Float[Tensor, "b l h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b l g n"],
    C: Float[Tensor, "b l g n"],
    *,
    D: Float[Tensor, " h"] | None = None,
    chunk_size: int = 64,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute SSD by its recurrence, one token after the other: the definition.

    Args:
        x: (b, l, h, p), the inputs. x, B and C share a dtype.
        dt: (b, l, h), step sizes ≥ 0, in the unit of time in which A is a rate; dt = 0 leaves the
            state alone. dt, A and D have the dtype of x, or float32 beside a sixteen-bit x.
        A: (h,), ≤ 0, the decay rate per head: a step decays the state by exp(dt A); at A = 0
            nothing is forgotten.
        B: (b, l, g, n), what each token writes into the state; g divides h.
        C: (b, l, g, n), what each token reads from the state.
        D: (h,), weight of the skip connection from x to y; None for none.
        chunk_size: ≥ 1, not used here: there so that any form can stand in for another.
        initial_state: (b, h, p, n), the state before the first token; None for zeros. Its dtype,
            and that of the final state, is that of x, or float32 for a sixteen-bit x.
        return_final_state: whether to return the state after the last token as well.

    Returns:
        y (b, l, h, p) with the dtype of x, or (y, final state).

    Raises:
        ValueError: a wrong rank, size or dtype; g does not divide h; p or n is 0; A > 0; dt
            negative; A or dt not finite; chunk_size < 1.

    Source: WM App. A, "Proof of equation 2"; OTCE §2.
    """
    state = _validate(x, dt, A, B, C, D, chunk_size, initial_state)
    outputs = []
    for x_t, dt_t, B_t, C_t in zip(*(t.unbind(1) for t in (x, dt, B, C)), strict=True):
        y_t, state = _step(x_t, dt_t, A, B_t, C_t, state)
        outputs.append(y_t)
    if not outputs:
        return _result(x.clone(), x, D, state.clone(), return_final_state)
    y = torch.stack(outputs, dim=1)
    return _result(y, x, D, state, return_final_state)


def semiseparable_matrix(
    dt: Float[Tensor, "b l h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b l g n"],
    C: Float[Tensor, "b l g n"],
) -> Float[Tensor, "b h l l"]:
    """Build the matrix M of SSD, so that y = M x: M[t, s] = exp(A Σ_{s<r≤t} dt_r) (C_t·B_s) dt_s.

    Args:
        dt: (b, l, h), step sizes ≥ 0.
        A: (h,), ≤ 0, the decay rate per head.
        B: (b, l, g, n), what each token writes.
        C: (b, l, g, n), what each token reads.

    Returns:
        M (b, h, l, l), target before source; zero where the source lies after the target.

    Raises:
        ValueError: as `ssd_recurrent` does.

    Sixteen-bit B and C are computed in float32, and so is M.

    Source: WM App. A (M_ji = C_jᵀ A_j⋯A_{i+1} B_i and M = L ∘ CBᵀ), with dt as in WM Listing 3.
    """
    if dt.ndim != 3:
        raise ValueError(f"dt must have the 3 axes (b, l, h), got {_shape(dt)}")
    wide = _validate(B.new_zeros(*dt.shape, 1), dt, A, B, C, None, 1, None).dtype
    dt, A, B, C = (t.to(wide) for t in (dt, A, B, C))
    B, C = (to_heads(t, A.shape[0]) for t in (B, C))
    # The sums are taken over the entries themselves. As differences of two running sums they
    # would lose digits: both grow with t, their difference does not.
    steps = rearrange(dt * A, "b t h -> b h t 1").expand(-1, -1, -1, dt.shape[1]).tril(-1)
    decay = steps.cumsum(dim=-2).exp().tril()
    return einsum("bthn,bshn->bhts", C, B) * decay * rearrange(dt, "b s h -> b h 1 s")


def ssd_quadratic(
    x: Float[Tensor, "b l h p"],
    dt: Float[Tensor, "b l h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b l g n"],
    C: Float[Tensor, "b l g n"],
    *,
    D: Float[Tensor, " h"] | None = None,
    chunk_size: int = 64,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute SSD as masked attention without softmax: y = M x, in time and memory l².

    Arguments, result and errors are those of `ssd_recurrent`; chunk_size is not used.

    Source: WM §2, (L ∘ QKᵀ)V = (L ∘ CBᵀ)X; App. A.
    """
    state = _validate(x, dt, A, B, C, D, chunk_size, initial_state)
    values, dt, A, B, C = (t.to(state.dtype) for t in (x, dt, A, B, C))
    y = einsum("bhts,bshp->bthp", semiseparable_matrix(dt, A, B, C), values)

    # The state handed in decays up to each token, and each token's write up to the last one.
    B, C = (to_heads(t, x.shape[2]) for t in (B, C))
    from_start = (dt * A).cumsum(dim=1).exp()
    y = y + einsum("bth,bthn,bhpn->bthp", from_start, C, state)
    if x.shape[1]:
        to_end = F.pad((dt * A)[:, 1:].flip(1).cumsum(dim=1).flip(1), (0, 0, 0, 1)).exp()
        writes = einsum("bsh,bshp,bshn->bhpn", to_end * dt, values, B)
        state = rearrange(from_start[:, -1], "b h -> b h 1 1") * state + writes
    return _result(y, x, D, state, return_final_state)


def ssd_chunked(
    x: Float[Tensor, "b l h p"],
    dt: Float[Tensor, "b l h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b l g n"],
    C: Float[Tensor, "b l g n"],
    *,
    D: Float[Tensor, " h"] | None = None,
    chunk_size: int = 64,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute SSD in chunks: quadratic inside a chunk, recurrent between chunks, linear in l.

    Arguments, result and errors are those of `ssd_recurrent`; chunk_size is the number of tokens
    per chunk. It changes the cost, never the result; l need not be a multiple of it.

    mamba-ssm's kernel and `ssd_minimal_discrete` do the same four steps, each for all chunks at
    once, and the latter takes step 3 as a product with a (chunks + 1)² matrix. Here a block of a
    few chunks goes through all four, so the cost is linear in the number of chunks.

    Source: WM Listing 3 (with the sum of its step 3 over the source chunks).
    """
    state = _validate(x, dt, A, B, C, D, chunk_size, initial_state)
    y, state = _chunked(*(t.to(state.dtype) for t in (x, dt, A, B, C)), state, chunk_size)
    return _result(y, x, D, state, return_final_state)


def _chunked(x, dt, A, B, C, state, chunk_size):
    length, g, p = x.shape[1], B.shape[2], x.shape[3]
    if length == 0:
        return x.clone(), state.clone()
    q = min(chunk_size, length)

    # 0. Cut the sequence into chunks of q tokens. Tokens appended to fill the last chunk have
    #    dt = 0, so they leave the state alone. From here on h counts the heads of one group.
    x, dt, B, C = (_pad(t, -length % q) for t in (x, dt, B, C))
    x = rearrange(x, "b (c l) (g h) p -> b c l g h p", l=q, g=g)
    dt = rearrange(dt, "b (c l) (g h) -> b c g h l", l=q, g=g).contiguous()
    B, C = (rearrange(t, "b (c l) g n -> b c g l n", l=q) for t in (B, C))
    state = rearrange(state, "b (g h) p n -> b g n (h p)", g=g)

    # The log decay since the start of the chunk. What counts are its differences, which would lose
    # digits where the sum is large: so it is summed in float64 (which Apple's GPUs do not have)
    # and kept as two numbers, whose differences are taken one by one.
    wide = torch.float32 if x.is_mps else torch.float64
    total = (dt * rearrange(A, "(g h) -> g h 1", g=g)).to(wide).cumsum(-1)
    high = total.to(x.dtype)
    low = (total - high).to(x.dtype).detach()  # the gradient takes its way through high
    from_start = total.exp().to(x.dtype)
    to_end = (total[..., -1:] - total).exp().to(x.dtype)

    outputs = []
    tensors = (x, dt, B, C, high, low, from_start, to_end)
    for block in zip(*(t.split(CHUNKS_PER_BLOCK, dim=1) for t in tensors), strict=True):
        y, state = _block_of_chunks(*block, state)
        outputs.append(y)
    y = rearrange(torch.cat(outputs, dim=1), "b c l g h p -> b (c l) (g h) p")
    return y[:, :length], rearrange(state, "b g n (h p) -> b (g h) p n", p=p)


def _block_of_chunks(x, dt, B, C, high, low, from_start, to_end, state):
    """The four steps, for a few chunks: y (b, c, l, g, h, p) and the state after the last one."""
    p = x.shape[-1]

    # 1. Inside each chunk: the quadratic form. The triangle lies on the scores, once per group; on
    #    the exponents it only keeps the entries above the diagonal from overflowing.
    scores = (C @ B.mT).tril()
    exponent = high[..., :, None] - high[..., None, :]
    exponent += low[..., :, None]
    exponent -= low[..., None, :]
    M = scores[:, :, :, None] * exponent.tril_().exp_()
    # dt comes first so that the product is laid out as dt is, with length inside heads
    y = M @ (dt[..., None] * rearrange(x, "b c l g h p -> b c g h l p"))

    # 2. What each chunk writes: its tokens' writes, decayed to the end of the chunk.
    weight = rearrange(to_end * dt, "b c g h l -> b c l g h 1")
    writes = B.mT @ rearrange(x * weight, "b c l g h p -> b c g l (h p)")

    # 3. Between chunks: the recurrence again, one step per chunk.
    over_chunk = repeat(from_start[..., -1], "b c g h -> b c g 1 (h p)", p=p)
    incoming = []
    for decay, write in zip(over_chunk.unbind(1), writes.unbind(1), strict=True):
        incoming.append(state)
        state = torch.addcmul(write, decay, state)

    # 4. What each token reads from the state that its chunk was handed.
    reads = rearrange(C @ torch.stack(incoming, dim=1), "b c g l (h p) -> b c g h l p", p=p)
    y = torch.addcmul(y, from_start[..., None], reads)
    return rearrange(y, "b c g h l p -> b c l g h p"), state


def ssd_kernel(
    x: Float[Tensor, "b l h p"],
    dt: Float[Tensor, "b l h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b l g n"],
    C: Float[Tensor, "b l g n"],
    *,
    D: Float[Tensor, " h"] | None = None,
    chunk_size: int = 64,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute SSD with mamba-ssm's kernels: compiled on a GPU, else in Triton's interpreter.

    Arguments and result are those of `ssd_recurrent`, in float32 or sixteen bits. The kernels
    sum in float32, and the interpreter is slow: it is there to be checked against.

    Raises:
        ValueError: as `ssd_recurrent` does, or a tensor is not where the kernels run.
        TypeError: a tensor is float64.
        RuntimeError: the kernels cannot run here; the message says why and what to do.

    Source: WM Listing 4 (`mamba_chunk_scan_combined`); mamba-ssm 2.3.2.post1.
    """
    _validate(x, dt, A, B, C, D, chunk_size, initial_state)
    y, state = kernels.chunk_scan(
        x, dt, A, B, C, D=D, chunk_size=chunk_size, initial_state=initial_state
    )
    return (y, state) if return_final_state else y


def ssd_step(
    x: Float[Tensor, "b h p"],
    dt: Float[Tensor, "b h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b g n"],
    C: Float[Tensor, "b g n"],
    state: Float[Tensor, "b h p n"],
    *,
    D: Float[Tensor, " h"] | None = None,
    backend: Literal["auto", "recurrent", "kernel"] = "auto",
) -> tuple[Float[Tensor, "b h p"], Float[Tensor, "b h p n"]]:
    """Take one token through the recurrence; the cost does not depend on how many came before.

    Args:
        x: (b, h, p), one token's input; dt (b, h), B and C (b, g, n) likewise, otherwise as in
            `ssd_recurrent`.
        dt: (b, h), step size ≥ 0.
        A: (h,), ≤ 0, the decay rate per head.
        B: (b, g, n), what the token writes.
        C: (b, g, n), what the token reads.
        state: (b, h, p, n), the state before the token; it is not changed.
        D: (h,), weight of the skip connection; None for none.
        backend: "recurrent", or "kernel" for mamba-ssm's `selective_state_update`, which has no
            gradient; "auto" takes the kernel on a GPU where no gradient is asked for.

    Returns:
        y (b, h, p) and the state after the token (b, h, p, n).

    Raises:
        ValueError, TypeError, RuntimeError: as `ssd_kernel` does; ValueError for an unknown
            backend, and for a gradient through the kernel.

    Source: WM App. A; mamba-ssm's `selective_state_update`.
    """
    for name, t, rank in (("x", x, 3), ("dt", dt, 2), ("B", B, 3), ("C", C, 3)):
        if t.ndim != rank:
            raise ValueError(f"{name} of one token must have {rank} axes, got {_shape(t)}")
    one_token = (t if t is A else t.unsqueeze(1) for t in (x, dt, A, B, C))
    _validate(*one_token, D, 1, state, state_name="state")
    if backend == "auto":
        backend = "kernel" if _on_gpu(x) and not torch.is_grad_enabled() else "recurrent"
    if backend == "kernel":
        return kernels.state_update(x, dt, A, B, C, state, D=D)
    if backend != "recurrent":
        raise ValueError(f"backend must be auto, recurrent or kernel, got {backend!r}")
    y, state = _step(x, dt, A, B, C, state)
    return _result(y, x, D, state, True)


def ssd(
    x: Float[Tensor, "b l h p"],
    dt: Float[Tensor, "b l h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b l g n"],
    C: Float[Tensor, "b l g n"],
    *,
    D: Float[Tensor, " h"] | None = None,
    chunk_size: int = 64,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute SSD by the form that `backend` names: recurrent, quadratic, chunked or kernel.

    "auto" takes the kernel on a GPU (never for float64); elsewhere the chunked form, or for a
    single token the recurrence. A form that is asked for by name is taken or refused.

    Arguments and result are those of `ssd_recurrent`; errors those of `ssd_kernel`, and a
    ValueError for an unknown backend.

    Source: WM Listing 4.
    """
    forms = {
        "recurrent": ssd_recurrent,
        "quadratic": ssd_quadratic,
        "chunked": ssd_chunked,
        "kernel": ssd_kernel,
    }
    if backend == "auto":
        alone = x.ndim == 4 and x.shape[1] == 1
        backend = "kernel" if _on_gpu(x) else "recurrent" if alone else "chunked"
    if backend not in forms:
        raise ValueError(f"backend must be auto or one of {', '.join(forms)}, got {backend!r}")
    return forms[backend](
        x,
        dt,
        A,
        B,
        C,
        D=D,
        chunk_size=chunk_size,
        initial_state=initial_state,
        return_final_state=return_final_state,
    )


def short_convolution(
    u: Float[Tensor, "b l d"],
    weight: Float[Tensor, "d d_conv"],
    *,
    padding_mask: Bool[Tensor, "b l"] | None = None,
    history: Float[Tensor, "b d_conv-1 d"] | None = None,
) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b d_conv-1 d"]]:
    """Mix each channel over the last tokens: silu(Σ_i w_i u_{t-i}).

    Args:
        u: (b, l, d), the channels; each is mixed over time and never with another.
        weight: (d, d_conv), of each channel; w_0, that of the newest token, stands last.
        padding_mask: (b, l), True for real tokens; None for all. Padding is passed over: what
            counts as the token before is the real token before.
        history: (b, d_conv - 1, d), the real tokens before the first, oldest first; None for zeros.

    Returns:
        The mixed channels (b, l, d), of no meaning at padding, and the history for the next call.

    Raises:
        ValueError: a wrong shape, a mask that is not boolean, or a history in another dtype than u.

    Source: WM §2, "Conv1d + D" of Table 1; the layout is that of mamba-ssm's Mamba2, without bias.
    """
    if u.ndim != 3:
        raise ValueError(f"u must be (b, l, d), got {_shape(u)}")
    b, length, d = u.shape
    if weight.ndim != 2 or weight.shape[0] != d or weight.shape[1] == 0:
        raise ValueError(f"weight must be (d, d_conv) with d = {d}, got {_shape(weight)}")
    _check_padding_mask(padding_mask, (b, length))
    past = (b, weight.shape[1] - 1, d)
    if history is None:
        history = u.new_zeros(past)
    elif history.shape != past:
        raise ValueError(f"history must be (b, d_conv - 1, d) = {past}, got {_shape(history)}")
    elif history.dtype != u.dtype:
        raise ValueError(f"history must be {u.dtype}, as u is, got {history.dtype}")
    if padding_mask is None:
        u = torch.cat([history, u], dim=1)
        history = u[:, length:].clone()  # a view would keep all of u in memory
    else:
        # Real tokens to the front, in their order, so that they follow the history directly.
        u = u.masked_fill(~padding_mask[..., None], 0)
        order = padding_mask.logical_not().byte().argsort(dim=1, stable=True)
        u = torch.cat([history, u.gather(1, order[..., None].expand_as(u))], dim=1)
        newest = padding_mask.sum(1, keepdim=True) + torch.arange(past[1], device=u.device)
        history = u.gather(1, newest[..., None].expand(past))
    wide = torch.promote_types(u.dtype, torch.float32)
    taps = (w.to(wide) * u[:, i : i + length] for i, w in enumerate(weight.unbind(1)))
    y = F.silu(sum(taps)).to(u.dtype)
    if padding_mask is not None:
        y = y.gather(1, order.argsort(dim=1)[..., None].expand_as(y))
    return y, history


class SSDCache(NamedTuple):
    """What an SSD layer remembers of the tokens so far.

    state (b, h, p, n); and for position="conv" the last d_conv - 1 real tokens as the convolution
    sees them, conv (b, d_conv - 1, h p + 2 g n).
    """

    state: Tensor
    conv: Tensor | None = None


class SSD(nn.Module):
    """The SSD layer: x, B, C and dt are linear in the input, one A and one D per head.

    How the order of the tokens enters is its option `position`:

    * "rope": B and C are turned by the angles of their positions, so that C_t·B_s depends on the
      distance t - s, with 32 wave lengths for n = 64;
    * "conv": x, B and C are mixed over the last d_conv tokens first, each channel by itself;
    * "decay": by the decay alone, which tells near from far and nothing else.

    The decay is there in all three. A starts uniform in (1, 16) and dt log-uniform in [1e-3, 1e-1],
    as in Mamba-2: so at the start a head forgets over anything from one token to a thousand. The
    step size has the only bias.

    Args:
        d_model: width of the input and the output.
        n_heads: h.
        d_head: p; None for d_model / n_heads.
        n_groups: g, a divisor of n_heads; the heads of a group share B and C.
        d_state: n; even for position="rope".
        position: the source of position.
        d_conv: tokens that the convolution of position="conv" sees.
        rope_base: base of the angles of position="rope".
        chunk_size: tokens per chunk of the chunked form.
        backend: as in `ssd`.

    Raises:
        ValueError: a size below 1, n_heads not a multiple of n_groups, an unknown position or
            backend, an odd d_state for "rope", a base that is not positive and finite, or d_head
            not given and d_model not a multiple of n_heads.

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
        sizes = dict(
            d_model=d_model,
            n_heads=n_heads,
            n_groups=n_groups,
            d_state=d_state,
            d_conv=d_conv,
            chunk_size=chunk_size,
        )
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if n_heads % n_groups:
            raise ValueError(f"n_heads = {n_heads} must be a multiple of n_groups = {n_groups}")
        if d_head is None:
            if d_model % n_heads:
                raise ValueError(f"d_model = {d_model} is not a multiple of n_heads = {n_heads}")
            d_head = d_model // n_heads
        elif d_head < 1:
            raise ValueError(f"d_head must be at least 1, got {d_head}")
        if backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")
        if position not in get_args(Position):
            raise ValueError(f"position must be one of {get_args(Position)}, got {position!r}")
        if position == "rope":
            if d_state % 2:
                raise ValueError(f"d_state must be even for position='rope', got {d_state}")
            rope_frequencies(d_state, rope_base)  # refuses a bad base now and not in the first call
        self.n_heads, self.n_groups, self.chunk_size = n_heads, n_groups, chunk_size
        self.position, self.rope_base, self.backend = position, rope_base, backend

        self.x_proj = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.B_proj = nn.Linear(d_model, n_groups * d_state, bias=False)
        self.C_proj = nn.Linear(d_model, n_groups * d_state, bias=False)
        self.dt_proj = nn.Linear(d_model, n_heads, bias=False)
        self.out_proj = nn.Linear(n_heads * d_head, d_model, bias=False)
        if position == "conv":
            channels = n_heads * d_head + 2 * n_groups * d_state
            bound = d_conv**-0.5  # as torch's Conv1d starts
            self.conv = nn.Parameter(torch.empty(channels, d_conv).uniform_(-bound, bound))

        dt = torch.exp(torch.empty(n_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.A_log = nn.Parameter(torch.log(torch.empty(n_heads).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(n_heads))

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        position_ids: Int[Tensor, "b l"],
        *,
        padding_mask: Bool[Tensor, "b l"] | None = None,
        cache: SSDCache | None = None,
    ) -> tuple[Float[Tensor, "b l d"], SSDCache]:
        """Mix the tokens of this call with one another and with those the cache remembers.

        Args:
            x: (b, l, d).
            position_ids: (b, l), integers ≥ 0 that count the real tokens of a row, going on where
                the cache ends. What they hold at padding does not matter; for "conv" and "decay",
                which know positions by the order of the tokens, only the shape is looked at.
            padding_mask: (b, l), True for real tokens; None for all. Padding, wherever it
                stands, leaves the state alone.
            cache: what an earlier call returned; None at the start of the sequence.

        Returns:
            y (b, l, d), of no meaning at padding, and the cache for the next call.

        Raises:
            ValueError: a wrong shape, positions that are not integers or negative, a padding mask
                that is not boolean, or a cache without what "conv" needs.
        """
        check_call(x, self.x_proj.in_features, position_ids, padding_mask)
        if cache is not None and (cache.conv is None) == (self.position == "conv"):
            raise ValueError(f"the cache is not one of a layer with position={self.position!r}")
        if padding_mask is not None:
            x = x.masked_fill(~padding_mask[..., None], 0)
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = F.softplus(self.dt_proj(x).to(wide) + self.dt_bias.to(wide))
        if padding_mask is not None:
            dt = dt.masked_fill(~padding_mask[..., None], 0)

        channels, conv = [self.x_proj(x), self.B_proj(x), self.C_proj(x)], None
        if self.position == "conv":
            mixed, conv = short_convolution(
                torch.cat(channels, dim=-1),
                self.conv,
                padding_mask=padding_mask,
                history=None if cache is None else cache.conv,
            )
            channels = mixed.split([t.shape[-1] for t in channels], dim=-1)
        values, B, C = channels
        B, C = (t.unflatten(-1, (self.n_groups, -1)) for t in (B, C))
        if self.position == "rope":
            if padding_mask is not None:
                position_ids = position_ids.masked_fill(~padding_mask, 0)
            cos, sin = rope_cos_sin(position_ids, B.shape[-1], self.rope_base, dtype=x.dtype)
            B, C = apply_rope(B, cos, sin), apply_rope(C, cos, sin)

        y, state = ssd(
            values.unflatten(-1, (self.n_heads, -1)),
            dt,
            -self.A_log.to(wide).exp(),
            B,
            C,
            D=self.D,
            chunk_size=self.chunk_size,
            initial_state=None if cache is None else cache.state,
            return_final_state=True,
            backend=self.backend,
        )
        return self.out_proj(y.flatten(2)), SSDCache(state, conv)


def _step(x, dt, A, B, C, state):
    """One step of the recurrence on x (b, h, p); in the dtype of the state."""
    x, dt, A, B, C = (t.to(state.dtype) for t in (x, dt, A, B, C))
    B, C = (to_heads(t, x.shape[1]) for t in (B, C))
    decay = torch.exp(dt * A)
    write = (dt[..., None] * x)[..., None] * B[..., None, :]
    state = decay[..., None, None] * state + write
    return (state @ C[..., None])[..., 0], state


def to_heads(t, n_heads):
    """Give every head the B or C of its group: (..., g, n) -> (..., h, n)."""
    groups = t.shape[-2]
    if groups == 1:
        return t.expand(*t.shape[:-2], n_heads, t.shape[-1])
    return t if groups == n_heads else t.repeat_interleave(n_heads // groups, dim=-2)


def _pad(t, count):
    """Append `count` zero tokens along axis 1."""
    return F.pad(t, (0, 0) * (t.ndim - 2) + (0, count)) if count else t  # F.pad always copies


def _result(y, x, D, state, return_final_state):
    if D is not None:
        y = y + D[:, None].to(y.dtype) * x.to(y.dtype)
    y = y.to(x.dtype)
    return (y, state) if return_final_state else y


def _on_gpu(x):
    """Whether mamba-ssm's compiled kernels can take x."""
    return x.is_cuda and x.dtype != torch.float64 and kernels.kernel_status().mode == "cuda"


def _shape(t):
    return f"shape {tuple(t.shape)}"


def _validate(x, dt, A, B, C, D, chunk_size, state, state_name="initial_state"):
    """Refuse what the recurrence is not defined for, and return the state to start from."""
    for name, t, rank, axes in (("x", x, 4, "(b, l, h, p)"), ("B", B, 4, "(b, l, g, n)")):
        if t.ndim != rank:
            raise ValueError(f"{name} must have the {rank} axes {axes}, got {_shape(t)}")
    b, length, h, p = x.shape
    g, n = B.shape[2:]
    if g == 0 or h % g:
        raise ValueError(f"the number of groups must divide the number of heads: g = {g}, h = {h}")
    if n == 0 or p == 0:
        raise ValueError(f"the state is p × n, with both at least 1, got p = {p}, n = {n}")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a whole number of at least 1, got {chunk_size}")

    wide = torch.promote_types(x.dtype, torch.float32)
    like_x, or_wide, only_wide = (x.dtype,), (x.dtype, wide), (wide,)
    for name, t, axes, shape, dtypes in (
        ("x", x, "(b, l, h, p)", (b, length, h, p), like_x),
        ("dt", dt, "(b, l, h)", (b, length, h), or_wide),
        ("A", A, "(h,)", (h,), or_wide),
        ("B", B, "(b, l, g, n)", (b, length, g, n), like_x),
        ("C", C, "(b, l, g, n)", (b, length, g, n), like_x),
        ("D", D, "(h,)", (h,), or_wide),
        (state_name, state, "(b, h, p, n)", (b, h, p, n), only_wide),
    ):
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} must be {axes} = {shape}, got {_shape(t)}")
        if not t.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {t.dtype}")
        if t.dtype not in dtypes:
            allowed = " or ".join(dict.fromkeys(str(d) for d in dtypes))
            raise ValueError(f"{name} must be {allowed} where x is {x.dtype}, got {t.dtype}")
    low, high = _range(A)
    if not -math.inf < low <= high <= 0:
        raise ValueError(f"A must be ≤ 0 and finite everywhere, got entries in [{low:g}, {high:g}]")
    low, high = _range(dt)
    if not 0 <= low <= high < math.inf:
        raise ValueError(
            f"dt must be ≥ 0 and finite everywhere, got entries in [{low:g}, {high:g}]"
        )
    return x.new_zeros(b, h, p, n, dtype=wide) if state is None else state


def _range(t):
    """The smallest and the largest entry, NaN if one is; (0, 0) of nothing."""
    return [end.item() for end in t.detach().aminmax()] if t.numel() else (0.0, 0.0)


def check_call(x, d_model, position_ids, padding_mask):
    """Refuse arguments that no sequence mixer can take."""
    if x.ndim != 3 or x.shape[2] != d_model:
        raise ValueError(f"x must be (b, l, d) with d = {d_model}, got {_shape(x)}")
    tokens = tuple(x.shape[:2])
    if position_ids.dtype not in INTEGERS:
        raise ValueError(f"position_ids must be integers, got {position_ids.dtype}")
    if position_ids.shape != tokens:
        raise ValueError(f"position_ids must be (b, l) = {tokens}, got {_shape(position_ids)}")
    _check_padding_mask(padding_mask, tokens)


def _check_padding_mask(padding_mask, tokens):
    if padding_mask is None:
        return
    if padding_mask.dtype != torch.bool:
        raise ValueError(f"padding_mask must be boolean, True for real; got {padding_mask.dtype}")
    if padding_mask.shape != tokens:
        raise ValueError(f"padding_mask must be (b, l) = {tokens}, got {_shape(padding_mask)}")
