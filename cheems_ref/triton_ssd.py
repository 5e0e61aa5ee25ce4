"""SSD in Triton by hand: three kernels, to be read beside the four steps of `ssd_chunked`.

A kernel is one program that runs once for every point of a grid; `tl.program_id` returns the point.
Here each program works on one head of one row of the batch:

    _write   step 2, one program per chunk: the tokens' writes into the state
    _carry   step 3, one program for all chunks, one after another: the incoming state of each
    _read    steps 1 and 4, one program per chunk: the tokens' reads, from each other and from the
             incoming state of their chunk

A program loads tiles of its tensors, multiplies them with `tl.dot` and stores a result; its
intermediate values are in no tensor. The sides of a tile are powers of two, at least 16: q tokens,
N states, P channels. A tile beyond l, n or p is filled with zeros; a token with dt = 0 leaves the
state alone.

Products are "tf32x3": three products of a tensor core give nearly all digits of float32. ("ieee"
spells out every multiplication, and Triton compiles it for minutes at the sizes of a model. The
interpreter always multiplies in float32.) Log decays are summed in float64, as in `ssd_chunked`:
only their differences matter. There is no backward pass, and n and p are at most 128, since one
tile holds all of n or p. Notebook 03 derives the steps; `kernels.kernel_status` says whether a GPU
or the interpreter runs the kernels.

Source: WM Listing 3; mamba-ssm's ssd_chunk_state.py, ssd_state_passing.py and ssd_chunk_scan.py,
which also cut n and p into tiles, multiply in 16 bits, and have a backward pass.
"""

from typing import no_type_check  # for the tests: Triton takes no wrapped function

import torch
import triton
import triton.language as tl

from cheems_ref import check, kernels
from cheems_ref.ssd import Keys, PerHead, Result, State, Steps, Values, _check, _run

LARGEST_CHUNK, LARGEST_TILE = 64, 128  # compiled in seconds; 128 KiB of shared memory at most
MOST_PROGRAMS = 65_535  # CUDA's limit along the second and third axis of a grid


@triton.jit
@no_type_check
def _tile(tensor, rows, n_columns, inside, width: tl.constexpr):
    """Load rows of a contiguous matrix, with zeros outside of it."""
    column = tl.arange(0, width)[None, :]
    place = tensor + rows[:, None] * n_columns + column
    return tl.load(place, inside[:, None] & (column < n_columns), 0.0)


@triton.jit
@no_type_check
def _steps(dt, A, rows, inside, head):
    """Load step sizes; return them and the log decay since the chunk began. exp(-750) is 0."""
    steps = tl.load(dt + rows, inside, 0.0)
    log_decay = steps.to(tl.float64) * tl.load(A + head).to(tl.float64)
    return steps, tl.cumsum(tl.maximum(log_decay, -750.0))


@triton.jit
@no_type_check
def _write(
    x, dt, A, B, states, decays, l, h, g, n, p, q: tl.constexpr, N: tl.constexpr, P: tl.constexpr
):
    """Step 2: the write of a chunk, Bᵀ (decay to its end · dt · x), and its whole decay."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = chunk * q + tl.arange(0, q)
    mine, shared = (row * l + t) * h + head, (row * l + t) * g + head // (h // g)
    steps, since = _steps(dt, A, mine, t < l, head)
    X, K = _tile(x, mine, p, t < l, P), _tile(B, shared, n, t < l, N)

    whole = tl.min(since)  # the last: it never rises
    to_end = tl.exp((whole - since).to(tl.float32))
    write = tl.dot(tl.trans(K), (to_end * steps)[:, None] * X, input_precision="tf32x3")

    place = (row * h + head) * tl.num_programs(0) + chunk
    i, j = tl.arange(0, N)[:, None], tl.arange(0, P)[None, :]
    tl.store(states + (place * n + i) * p + j, write, (i < n) & (j < p))
    tl.store(decays + place, tl.exp(whole.to(tl.float32)))


@triton.jit
@no_type_check
def _carry(initial, states, decays, final, chunks, n, p, N: tl.constexpr, P: tl.constexpr):
    """Step 3: the state before each chunk; it replaces the chunk's own write."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    mine = row * tl.num_programs(0) + head
    i, j = tl.arange(0, N)[:, None], tl.arange(0, P)[None, :]
    inside, entry = (i < n) & (j < p), i * p + j
    state = tl.load(initial + mine * n * p + entry, inside, 0.0)
    for chunk in range(chunks):
        place = mine * chunks + chunk
        write = tl.load(states + place * n * p + entry, inside, 0.0)
        tl.store(states + place * n * p + entry, state, inside)
        state = tl.load(decays + place) * state + write
    tl.store(final + mine * n * p + entry, state, inside)


@triton.jit
@no_type_check
def _read(
    x, dt, A, B, C, states, y, l, h, g, n, p, q: tl.constexpr, N: tl.constexpr, P: tl.constexpr
):
    """Steps 1 and 4: (C Bᵀ ∘ L) (dt · x) inside the chunk, and decay · C state."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = chunk * q + tl.arange(0, q)
    mine, shared = (row * l + t) * h + head, (row * l + t) * g + head // (h // g)
    steps, since = _steps(dt, A, mine, t < l, head)
    X = _tile(x, mine, p, t < l, P)
    K, Q = _tile(B, shared, n, t < l, N), _tile(C, shared, n, t < l, N)

    between = (since[:, None] - since[None, :]).to(tl.float32)
    L = tl.where(t[:, None] >= t[None, :], tl.exp(between), 0.0)
    scores = tl.dot(Q, tl.trans(K), input_precision="tf32x3") * L
    inside_chunk = tl.dot(scores, steps[:, None] * X, input_precision="tf32x3")

    i = tl.arange(0, N)
    place = (row * h + head) * tl.num_programs(0) + chunk
    state = _tile(states, place * n + i, p, i < n, P)
    decay = tl.exp(since.to(tl.float32))[:, None]
    before_chunk = decay * tl.dot(Q, state, input_precision="tf32x3")

    j = tl.arange(0, P)[None, :]
    inside = (t < l)[:, None] & (j < p)
    tl.store(y + mine[:, None] * p + j, inside_chunk + before_chunk, inside)


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
    power of two, from 16 to 64.

    Raises:
        TypeError: a tensor is float64.
        RuntimeError: kernels cannot run here; the message says why and what to do.
        ValueError: a tensor requires a gradient, n or p exceeds 128, or b or h exceeds 65,535.

    Source: WM Listing 3.
    """
    _check(x, dt, A, B, C, D, chunk_size=chunk_size, initial_state=initial_state)
    y, state = _run(_three_kernels, x, dt, A, B, C, D, initial_state, chunk_size)
    return (y, state) if return_final_state else y


def _three_kernels(x, dt, A, B, C, state, chunk_size):
    tensors = dict(x=x, dt=dt, A=A, B=B, C=C, initial_state=state)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
        raise ValueError("ssd_triton has no backward pass: call it under torch.no_grad()")
    (b, l, h, p), (g, n) = x.shape, B.shape[2:]
    check.numbers(f"[1, {LARGEST_TILE}]", n=n, p=p)
    check.numbers(f"[0, {MOST_PROGRAMS}]", b=b, h=h)
    q, N, P = (max(16, triton.next_power_of_2(size)) for size in (min(chunk_size, l), n, p))
    q = min(q, LARGEST_CHUNK)
    chunks = triton.cdiv(l, q)
    x, dt, A, B, C, state = (t.contiguous() for t in (x, dt, A, B, C, state.mT))
    states, decays = x.new_empty(b, h, chunks, n, p), x.new_empty(b, h, chunks)
    y, final = torch.empty_like(x), torch.empty_like(state)
    with kernels.launching(tensors):
        _write[chunks, h, b](x, dt, A, B, states, decays, l, h, g, n, p, q, N, P)
        _carry[h, b](state, states, decays, final, chunks, n, p, N, P)
        _read[chunks, h, b](x, dt, A, B, C, states, y, l, h, g, n, p, q, N, P)
    return y, final.mT
