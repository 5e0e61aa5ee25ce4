"""SSD in Triton by hand: three kernels, to be read beside the four steps of `ssd_chunked`.

A kernel is one program that runs once for every point of a grid; `tl.program_id` returns the point.
Here each program works on one head of one row of the batch:

    _write   step 2, a program per chunk and tile of channels: what the tokens write into the state
    _carry   step 3, a program per slice of a state, for all chunks: the state before each chunk
    _read    steps 1 and 4, a program per chunk and tile of channels: what the tokens read, from
             each other and from the state before their chunk

A program loads tiles of its tensors, multiplies them with `tl.dot` and stores a result. Its other
numbers stay in registers, and a program has few registers: at most 255, of 32 bits, for each of its
threads. If it needs more, the compiler spills them to memory, and says nothing. So no tile
grows with n or p. A program takes P = 32 of the p channels, and goes through the n entries of B and
C in a loop, N = 16 at a time. (The price: the P-wide tiles of a chunk each compute C Bᵀ.
mamba-ssm's kernels compute it once per group, and store it.) `compiler.py` asks the compiler
whether anything was spilled.

The sides of a tile are powers of two, at least 16: q tokens, N entries of the state, P channels. A
tile beyond l, n or p is filled with zeros; a token with Δ = 0 and no decay leaves the state alone.

Tensors of 16 bits are loaded and multiplied as they are, and summed in float32. What is written,
the scores and the state before a chunk are rounded to 16 bits for their products. Products of
float32 are "tf32x3": three products of a tensor core give nearly all digits of float32. ("ieee"
spells out every multiplication, and takes minutes to compile. The interpreter always multiplies in
float32.) Log decays are summed in float64, as in `ssd_chunked`: differences of long sums lose
digits.

The gradient of SSD is SSD, three times (`_Scan.backward`), so it needs no kernel of its own.
Notebook 03 derives the steps, notebook 10 reads the kernels; `kernels.kernel_status` says whether a
GPU or the interpreter runs them.

Source: WM Listing 3; mamba-ssm's ssd_chunk_state.py, ssd_state_passing.py and ssd_chunk_scan.py,
which choose the sides of their tiles by timing.
"""

from typing import no_type_check  # for the tests: Triton takes no wrapped function

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from cheems_ref import check, kernels
from cheems_ref.ssd import (
    Keys,
    PerHead,
    Result,
    State,
    Steps,
    Values,
    _add_skip,
    _check,
    _zero_state,
    expand_groups,
)

LARGEST_CHUNK = 64  # of a larger one, scores and decays together do not fit the registers
N, P, SLICE = 16, 32, 512  # a tile's entries of the state and channels; entries of a `_carry`
WARPS, STAGES = 8, 1  # of `_write` and `_read`; a loop loads no tile ahead
MOST_PROGRAMS = 65_535  # CUDA's limit along the second and third axis of a grid


@triton.jit
@no_type_check
def _tile(tensor, rows, columns, width, inside):
    """Load columns of some rows of a contiguous matrix, with zeros outside of it."""
    addresses = tensor + rows[:, None] * width + columns[None, :]
    return tl.load(addresses, inside[:, None] & (columns < width)[None, :], 0.0)


@triton.jit
@no_type_check
def _program(l, h, g, p, q: tl.constexpr, P: tl.constexpr):
    """Return what a program works on: tokens, channels, rows of x, rows of B, number of state."""
    tiles = tl.cdiv(p, P)
    chunk, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t, j = chunk * q + tl.arange(0, q), part * P + tl.arange(0, P)
    mine, shared = (row * l + t) * h + head, (row * l + t) * g + head // (h // g)
    place = (row * h + head) * (tl.num_programs(0) // tiles) + chunk
    return t, j, mine, shared, place


@triton.jit
@no_type_check
def _since(decay, rows, inside):
    """Load log decays; return their sum since the chunk began."""
    return tl.cumsum(tl.load(decay + rows, inside, 0.0).to(tl.float64))


@triton.jit
@no_type_check
def _write(
    x, dt, decay, B, states, over, l, h, g, n, p, q: tl.constexpr, N: tl.constexpr, P: tl.constexpr
):
    """Step 2: the write of a chunk, Bᵀ (decay to its end · dt · x), and its whole decay."""
    t, j, mine, shared, place = _program(l, h, g, p, q, P)
    since = _since(decay, mine, t < l)
    whole = tl.min(since)  # the last: it never rises
    to_end = tl.exp((whole - since).to(tl.float32))
    X, steps = _tile(x, mine, j, p, t < l), tl.load(dt + mine, t < l, 0.0)
    V = ((to_end * steps)[:, None] * X).to(X.dtype)
    for first in range(0, n, N):
        i = first + tl.arange(0, N)
        K = _tile(B, shared, i, n, t < l)
        write = tl.dot(tl.trans(K), V, input_precision="tf32x3")
        inside = (i < n)[:, None] & (j < p)[None, :]
        tl.store(states + (place * n + i)[:, None] * p + j[None, :], write, inside)
    tl.store(over + place, tl.exp(whole.to(tl.float32)))  # the same from each tile


@triton.jit
@no_type_check
def _carry(initial, states, over, final, chunks, numbers, SLICE: tl.constexpr):
    """Step 3: a slice of the state before each chunk; it replaces the chunk's own write."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    mine = row * tl.num_programs(1) + head
    entry = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    state = tl.load(initial + mine * numbers + entry, entry < numbers, 0.0)
    for chunk in range(chunks):
        addresses = states + (mine * chunks + chunk) * numbers + entry
        write = tl.load(addresses, entry < numbers, 0.0)
        tl.store(addresses, state, entry < numbers)
        state = tl.load(over + mine * chunks + chunk) * state + write
    tl.store(final + mine * numbers + entry, state, entry < numbers)


@triton.jit
@no_type_check
def _read(
    x, dt, decay, B, C, states, y, l, h, g, n, p, q: tl.constexpr, N: tl.constexpr, P: tl.constexpr
):
    """Steps 1 and 4: (C Bᵀ ∘ L) (dt · x) inside the chunk, and decay · C state."""
    t, j, mine, shared, place = _program(l, h, g, p, q, P)
    scores = tl.zeros((q, q), tl.float32)
    before = tl.zeros((q, P), tl.float32)
    for first in range(0, n, N):
        i = first + tl.arange(0, N)
        K, Q = _tile(B, shared, i, n, t < l), _tile(C, shared, i, n, t < l)
        state = _tile(states, place * n + i, j, p, i < n).to(Q.dtype)
        scores = tl.dot(Q, tl.trans(K), scores, input_precision="tf32x3")
        before = tl.dot(Q, state, before, input_precision="tf32x3")

    since = _since(decay, mine, t < l)
    between = (since[:, None] - since[None, :]).to(tl.float32)
    L = tl.where(t[:, None] >= t[None, :], tl.exp(between), 0.0)
    X, steps = _tile(x, mine, j, p, t < l), tl.load(dt + mine, t < l, 0.0)
    scores = (scores * L * steps[None, :]).to(X.dtype)
    before = tl.exp(since.to(tl.float32))[:, None] * before
    out = tl.dot(scores, X, before, input_precision="tf32x3")
    inside = (t < l)[:, None] & (j < p)[None, :]
    tl.store(y + mine[:, None] * p + j[None, :], out, inside)


def _scan(x, dt, decay, B, C, state, q):
    """Launch the three kernels on chunks of q tokens.

    y_t = Σ_{s ≤ t} exp(decay_{s+1} + … + decay_t) (C_t·B_s) dt_s x_s, and what the state adds.
    Here a state is (b, h, n, p); y and the final state are float32.
    """
    (b, l, h, p), (g, n) = x.shape, B.shape[2:]
    chunks = triton.cdiv(l, q)
    x, dt, decay, B, C, state = (t.contiguous() for t in (x, dt, decay, B, C, state))
    states, over = state.new_empty(b, h, chunks, n, p), state.new_empty(b, h, chunks)
    y, final = torch.empty_like(x, dtype=torch.float32), torch.empty_like(state)
    grid, how = (chunks * triton.cdiv(p, P), h, b), dict(num_warps=WARPS, num_stages=STAGES)
    with kernels.launching(dict(x=x, dt=dt, decay=decay, B=B, C=C, state=state)):
        _write[grid](x, dt, decay, B, states, over, l, h, g, n, p, q, N, P, **how)
        _carry[triton.cdiv(n * p, SLICE), h, b](state, states, over, final, chunks, n * p, SLICE)
        _read[grid](x, dt, decay, B, C, states, y, l, h, g, n, p, q, N, P, **how)
    return y, final


def _scan_back(x, dt, decay, B, C, state, q):
    """Run `_scan` from the last token to the first: the state comes from the tokens after one."""
    decay = F.pad(decay[:, 1:], (0, 0, 0, 1))  # the step from t + 1 to t decays as t to t + 1 did
    y, first = _scan(*(t.flip(1) for t in (x, dt, decay, B, C)), state, q)
    return y.flip(1), first


class _Scan(torch.autograd.Function):
    """`_scan` with its gradient, which is three more runs of `_scan`."""

    @staticmethod
    def forward(ctx, x, dt, decay, B, C, state, q):
        y, final = _scan(x, dt, decay, B, C, state, q)
        ctx.save_for_backward(x, dt, decay, B, C, state, y, final)
        ctx.q = q
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal):
        x, dt, decay, B, C, state, y, final = ctx.saved_tensors
        h, ones = x.shape[2], torch.ones_like(dt)
        K, Q, to_y = expand_groups(B, h), expand_groups(C, h), dy.to(x.dtype)
        # y_t = Σ_s L_ts (C_t·B_s) V_s with V = dt x. Each factor's gradient is such a sum again:
        dV, dstate = _scan_back(to_y, ones, decay, C, B, dfinal, ctx.q)  # V_s: over t, of dy_t
        dC, _ = _scan(K, dt, decay, x, to_y, state.mT, ctx.q)  # C_t: over s, of B_s
        dB, _ = _scan_back(Q, ones, decay, to_y, x, dfinal.mT, ctx.q)  # B_s: over t, of C_t
        dstate = decay[:, 0].exp()[..., None, None] * dstate
        dB, dC = (t.unflatten(2, (B.shape[2], -1)).sum(3) for t in (dt[..., None] * dB, dC))
        # A log decay r scales every y_t with t ≥ r, and the final state, except for what was
        # written at s ≥ r. Differences of long sums lose digits: so in float64.
        written = (x * dV).sum(-1, dtype=torch.float64)
        change = (y * dy).sum(-1, dtype=torch.float64) - dt * written
        change[:, -1] += (final * dfinal).sum((-2, -1), dtype=torch.float64)
        ddecay = change.flip(1).cumsum(1).flip(1)
        grads = (dt[..., None] * dV, written, ddecay, dB, dC, dstate)
        kinds = zip(grads, (x, dt, decay, B, C, state), strict=True)
        return *(grad.to(t.dtype) for grad, t in kinds), None


def ssd_triton(
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
    """Compute SSD with the three kernels above.

    Arguments and result as in `ssd_recurrent`, in float32 or 16 bits. chunk_size is rounded up to a
    power of two, from 16 to 64. Differentiable once; made to be read, not to train with: the
    gradients of B and C are made per head, and of A, a difference of sums keeps fewer digits.

    Raises:
        TypeError: a tensor is float64.
        RuntimeError: kernels cannot run here; the message says why and what to do.
        ValueError: b or h exceeds 65,535.

    Source: WM Listing 3.
    """
    _check(x, dt, A, B, C, D, chunk_size=chunk_size, initial_state=initial_state)
    check.numbers(f"[0, {MOST_PROGRAMS}]", b=x.shape[0], h=x.shape[2])
    state = _zero_state(x, B) if initial_state is None else initial_state
    if x.shape[1] == 0:
        y, final = x.clone(), state.clone()
    else:
        q = min(LARGEST_CHUNK, max(16, triton.next_power_of_2(min(chunk_size, x.shape[1]))))
        dt, A = dt.to(state.dtype), A.to(state.dtype)
        # exp(-750) is 0, and a log decay of -1e10 would cost its neighbours in the sum ten digits.
        decay = (dt * A).clamp(min=-750)
        y, final = _Scan.apply(x, dt, decay, B, C, state.mT, q)
        y, final = _add_skip(y, x, D), final.mT
    return (y, final) if return_final_state else y
