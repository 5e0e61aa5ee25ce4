"""Linear attention: without its softmax, attention is a matrix that every token updates.

Every head keeps a matrix S, which should answer a key with its value, S k ≈ v. A token (k_t, v_t)
updates S, a query reads it, o_t = scale · S_t q_t, and the rules differ in the update:

    linear_attention         S_t =     S_{t-1}                    +     v_t k_tᵀ
    gated_linear_attention   S_t = α_t S_{t-1}                    +     v_t k_tᵀ    (Mamba-2)
    longhorn                 S_t =     S_{t-1} (I - ε_t k_t k_tᵀ) + ε_t v_t k_tᵀ
    delta_rule               S_t =     S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ    (DeltaNet)
    gated_delta_rule         S_t = α_t S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ    (Gated DeltaNet)

with ε = β / (1 + β kᵀk). The first two add every pair as it comes. The last three write the error
v - S k that the decayed state makes on the new key: S (I - β k kᵀ) + β v kᵀ equals
S + β (v - S k) kᵀ.

    code     shape          in the lecture
    q        (b, l, h, n)   q, what a token reads (C of SSD)
    k        (b, l, h, n)   k, where it writes (B of SSD)
    v        (b, l, h, p)   v, what it writes (dt x of SSD)
    g        (b, l, h)      log α, the log decay ≤ 0 (dt A of SSD)
    beta     (b, l, h)      β, the step size of the write ≥ 0
    state    (b, h, p, n)   S, d_v × d_k

Each rule has an update on one token: `_add`, `_decay_and_add`, `_correct` (of the delta rule and of
Longhorn) or `_decay_and_correct`. Its public function checks the arguments and applies the update
to one token after the other. With a `chunk_size` it computes the same result from a few matrix
products per chunk of tokens; the size changes only the cost, and l need not be a multiple of it.
`RULES` lists the rules.

q, k and v share a dtype. Sixteen-bit inputs are computed in float32 and the output is cast back;
the state stays float32, and g and beta may be float32 as well. Wrong shapes, sizes, dtypes or
values raise ValueError (a value that is not a number, TypeError) with the name of the argument,
its axes and its sizes (check.py).

Notebook 02 derives the rules. fla (flash-linear-attention) scales by 1/√n by default, we by 1, and
its state is the transpose of ours.
Source: L22, "Linear Attention" and its table of online updates; WM §2, State Space Duality.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, einsum

from cheems_ref import check

# Chunks computed at a time: few enough that their intermediate results stay in a core's cache, and
# that memory does not grow with the number of chunks.
CHUNKS_PER_BLOCK = 8

Keys = Float[Tensor, "b l h n"]  # and queries
Values = Float[Tensor, "b l h p"]
Gate = Float[Tensor, "b l h"]
State = Float[Tensor, "b h p n"]
if TYPE_CHECKING:  # an editor can't tell which of the two a call returns
    Output = Values | Any
else:
    Output = Values | tuple[Values, State]


# The updates on one token, and their parts:
# S (b, h, p, n), k (b, h, n), v (b, h, p), g and beta (b, h).


def _read(S, k):
    """S k: the state's answer to a key or a query."""
    return einsum("bhpn,bhn->bhp", S, k)


def _decay(S, g):
    """exp(g) S: a state that forgets."""
    return g.exp()[..., None, None] * S


def _add(S, k, v):
    """S + v kᵀ: v kᵀ answers k with ‖k‖² v, and is silent on keys orthogonal to k."""
    return S + einsum("bhp,bhn->bhpn", v, k)


def _correct(S, k, v, beta):
    """S (I - β k kᵀ) + β v kᵀ."""
    error = v - _read(S, k)
    return _add(S, k, beta[..., None] * error)


def _decay_and_add(S, k, v, g):
    """exp(g) S + v kᵀ."""
    return _add(_decay(S, g), k, v)


def _decay_and_correct(S, k, v, g, beta):
    """exp(g) S (I - β k kᵀ) + β v kᵀ."""
    return _correct(_decay(S, g), k, v, beta)


def _implicit_step(k, beta):
    """Longhorn's ε: a delta rule with this step size goes to the minimum of Longhorn's loss."""
    return beta / (1 + beta * k.square().sum(-1))


def linear_attention(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    chunk_size: int | None = None,
    scale: float | int = 1.0,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Output:
    """Return o_t = scale · S_t q_t, where S_t = S_{t-1} + v_t k_tᵀ adds up what the tokens write.

    Args:
        q: queries, what each token reads.
        k: keys, where each token writes.
        v: values, what each token writes.
        chunk_size: tokens per chunk, ≥ 1; None computes token by token. The memory for the
            backward pass grows with l · chunk_size.
        scale: a finite factor on the output; attention with a softmax takes 1/√n.
        initial_state: the state before the first token; None for zeros. It has the dtype of q, or
            float32 for a sixteen-bit q, and so has the final state.
        return_final_state: whether to return (o, state after the last token) instead of o.

    Source: L22, "Linear Attention", row LA; Katharopoulos et al. (2020).
    """
    _check(q, k, v, {}, initial_state, scale, chunk_size)
    o, state = _run(_add, q, k, v, initial_state, scale, chunk_size)
    return (o, state) if return_final_state else o


def gated_linear_attention(
    q: Keys,
    k: Keys,
    v: Values,
    g: Gate,
    *,
    chunk_size: int | None = None,
    scale: float | int = 1.0,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Output:
    """Let the state decay before each write: S_t = exp(g_t) S_{t-1} + v_t k_tᵀ.

    This is SSD, with C = q, B = k, dt x = v, dt A = g. Every SSD is one of these; the reverse
    takes A = -1, dt = -g and x = v / dt, and so g < 0.

    Args:
        g: log decay ≤ 0 per token, without unit: 0 keeps all; -inf is a reset, which erases the
            state, and g then has the gradient 0.
        q, k, v, chunk_size, scale, initial_state, return_final_state: as in `linear_attention`.

    Source: L22, "Linear Attention", row Mamba2; WM §2; Dao and Gu (2024). In chunks: WM Listing 3.
    """
    _check(q, k, v, dict(g=g), initial_state, scale, chunk_size)
    o, state = _run(_decay_and_add, q, k, v, initial_state, scale, chunk_size, g=g)
    return (o, state) if return_final_state else o


def longhorn(
    q: Keys,
    k: Keys,
    v: Values,
    beta: Gate,
    *,
    chunk_size: int | None = None,
    scale: float | int = 1.0,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Output:
    """Weigh the old state against the new pair: S_t minimises ‖S - S_{t-1}‖² + β_t ‖S k_t - v_t‖².

    The minimum is S_t = S_{t-1} (I - ε_t k_t k_tᵀ) + ε_t v_t k_tᵀ, ε_t = β_t / (1 + β_t k_tᵀk_t):
    the delta rule with a step size below 1/‖k_t‖². So no key and no β makes an old state grow.

    Args:
        beta: ≥ 0 and finite, weight of the new pair, in units of 1/‖k‖²; 0 leaves the state alone.
        q, k, v, chunk_size, scale, initial_state, return_final_state: as in `linear_attention`.

    Source: L22, "Linear Attention", row Longhorn; Liu et al. (2024).
    """
    _check(q, k, v, dict(beta=beta), initial_state, scale, chunk_size)
    wide = torch.promote_types(q.dtype, torch.float32)
    epsilon = _implicit_step(k.to(wide), beta.to(wide))
    o, state = _run(_correct, q, k, v, initial_state, scale, chunk_size, beta=epsilon)
    return (o, state) if return_final_state else o


def delta_rule(
    q: Keys,
    k: Keys,
    v: Values,
    beta: Gate,
    *,
    chunk_size: int | None = None,
    scale: float | int = 1.0,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Output:
    """Correct the state's answer to the new key: S_t = S_{t-1} + β_t (v_t - S_{t-1} k_t) k_tᵀ.

    Multiplied out, S_t = S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ. It is one gradient step of size
    β_t on ½‖S k_t - v_t‖², from S_{t-1}.

    Each update multiplies the state along k_t by 1 - β_t ‖k_t‖²: it does not grow where
    β_t ‖k_t‖² ≤ 2, and at 2 it forgets nothing. Models stay below 2 with unit keys and β in
    (0, 1) or (0, 2). The function does not check this: with raw keys, the factor is often below -1
    and the state grows exponentially with the number of tokens. In chunks, float32 loses a digit
    to the loop where keys nearly coincide and β ‖k‖² is near 2.

    Args:
        beta: ≥ 0 and finite, step size in units of 1/‖k‖²; 0 leaves the state alone, 1/‖k‖²
            replaces the value stored under this key.
        q, k, v, chunk_size, scale, initial_state, return_final_state: as in `linear_attention`.

    Source: L22, "Linear Attention", row DeltaNet; Schlag et al. (2021). In chunks: Yang et al.
    (2024), "Parallelizing linear transformers with the delta rule".
    """
    _check(q, k, v, dict(beta=beta), initial_state, scale, chunk_size)
    o, state = _run(_correct, q, k, v, initial_state, scale, chunk_size, beta=beta)
    return (o, state) if return_final_state else o


def gated_delta_rule(
    q: Keys,
    k: Keys,
    v: Values,
    g: Gate,
    beta: Gate,
    *,
    chunk_size: int | None = None,
    scale: float | int = 1.0,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Output:
    """Decay the state, then correct it: S_t = S_{t-1} exp(g_t) (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ.

    The correction is by the error of the decayed state. An old state does not grow where
    exp(g_t) |1 - β_t ‖k_t‖²| ≤ 1; otherwise as `delta_rule`.

    Args:
        g: as in `gated_linear_attention`.
        beta: as in `delta_rule`.
        q, k, v, chunk_size, scale, initial_state, return_final_state: as in `linear_attention`.

    Source: L22, "Linear Attention", row Gated DeltaNet; Yang, Kautz and Hatamizadeh (2024).
    """
    _check(q, k, v, dict(g=g, beta=beta), initial_state, scale, chunk_size)
    o, state = _run(_decay_and_correct, q, k, v, initial_state, scale, chunk_size, g=g, beta=beta)
    return (o, state) if return_final_state else o


class Rule(NamedTuple):
    """A rule, and its gates in the order of its arguments, after q, k and v."""

    function: Callable
    takes: tuple[str, ...]


RULES = {
    "linear attention": Rule(linear_attention, ()),
    "Mamba-2": Rule(gated_linear_attention, ("g",)),
    "Longhorn": Rule(longhorn, ("beta",)),
    "DeltaNet": Rule(delta_rule, ("beta",)),
    "Gated DeltaNet": Rule(gated_delta_rule, ("g", "beta")),
}


def _run(update, q, k, v, state, scale, chunk_size, g=None, beta=None):
    """Compute any rule in float32 or wider: token by token by its update, or in chunks."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    g = None if g is None else g.to(wide)
    beta = None if beta is None else beta.to(wide)
    if state is None:
        b, _, h, p = v.shape
        state = q.new_zeros(b, h, p, q.shape[3])
    if q.shape[1] == 0:
        o, state = v, state.clone()  # results share no memory with arguments
    elif chunk_size is None:
        o, state = _token_by_token(update, q, k, v, g, beta, state)
    else:
        o, state = _chunk_by_chunk(q, k, v, g, beta, state, chunk_size)
    return (scale * o).to(dtype), state


def _token_by_token(update, q, k, v, g, beta, state):
    """Update the state with k_t, v_t and the gates of the rule, then read it with q_t."""
    tokens = [t.unbind(1) for t in (q, k, v, g, beta) if t is not None]
    outputs = []
    for q_t, *token in zip(*tokens, strict=True):
        state = update(state, *token)
        outputs.append(_read(state, q_t))
    return torch.stack(outputs, dim=1), state


def _chunk_by_chunk(q, k, v, g, beta, state, chunk_size):
    """Pass the state from each block of chunks to the next."""
    b, length, h, _ = q.shape
    size = min(chunk_size, length)  # a short sequence is one chunk, without padding
    g = q.new_zeros(b, length, h) if g is None else g
    blocks = [t.split(size * CHUNKS_PER_BLOCK, dim=1) for t in (q, k, v, g)]
    betas = [None] * len(blocks[0])
    if beta is not None:
        betas = beta.split(size * CHUNKS_PER_BLOCK, dim=1)
    outputs = []
    for *block, beta_of_block in zip(*blocks, betas, strict=True):
        o, state = _block_of_chunks(*block, beta_of_block, state, size)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state


def _block_of_chunks(q, k, v, g, beta, state, size):
    """Compute any rule: g is 0 without decay, beta None where values are written unchanged."""
    length, n, p = q.shape[1], q.shape[3], v.shape[3]

    # 0. Cut the tokens into chunks of one size. The tokens that fill up the last chunk have k = 0
    #    and g = 0, so they leave the state alone.
    q, k, v, g = (_cut(t, size) for t in (q, k, v, g))

    # 1. The decay from token s to token t, exp(Σ_{s<r≤t} g_r), and from the start of the chunk.
    #    The sums run over the entries themselves: as differences of two running sums they would
    #    lose digits, overflow above the diagonal, and be NaN after a reset.
    steps = repeat(g, "b c h t -> b c h t s", s=size).tril(-1)
    decay = steps.cumsum(dim=-2).exp().tril()
    from_start = g.cumsum(dim=-1).exp()[..., None]
    to_end = decay[..., -1, :, None]

    # 2. The writes of the tokens. The delta rule writes
    #        w_t = β_t (v_t - from_start_t S k_t - Σ_{s<t} decay[t, s] (k_t·k_s) w_s),
    #    which is linear in the w: (I + A) W = β V - β from_start K Sᵀ with a strictly lower
    #    triangular A (the UT transform of a WY representation). We solve for both terms before S
    #    is known; S enters in step 3, as a factor.
    writes, recalls = v, None
    if beta is not None:
        beta = _cut(beta, size)[..., None]
        A = (beta * einsum("bchtn,bchsn->bchts", k, k) * decay).tril(-1)
        terms = torch.cat([beta * v, beta * from_start * k], dim=-1)
        solved = torch.linalg.solve_triangular(A, terms, upper=False, unitriangular=True)
        writes, recalls = solved.split([p, n], dim=-1)

    # 3. Between chunks: the recurrence, one step per chunk. We unbind, since the backward pass of
    #    indexing allocates zeros for all chunks, once per chunk.
    incoming, written = [], []
    chunks = [t.unbind(1) for t in (writes, to_end * k, from_start[:, :, :, -1:])]
    recalls = [None] * len(chunks[0]) if recalls is None else recalls.unbind(1)
    for w, k_to_end, over_chunk, recall in zip(*chunks, recalls, strict=True):
        if recall is not None:
            w = w - einsum("bhln,bhpn->bhlp", recall, state)
        incoming.append(state)
        written.append(w)
        state = over_chunk * state + einsum("bhlp,bhln->bhpn", w, k_to_end)
    S, W = torch.stack(incoming, dim=1), torch.stack(written, dim=1)

    # 4. Each token reads its own chunk by the quadratic form, and the chunk's incoming state.
    scores = einsum("bchtn,bchsn->bchts", q, k) * decay
    o = einsum("bchts,bchsp->bchtp", scores, W)
    o = o + from_start * einsum("bchln,bchpn->bchlp", q, S)
    return rearrange(o, "b c h l p -> b (c l) h p")[:, :length], state


def _cut(t, size):
    """Cut (b, l, h, ...) into chunks (b, c, h, l, ...) of `size` tokens, the last padded with 0."""
    t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, -t.shape[1] % size))
    return t.unflatten(1, (-1, size)).transpose(2, 3)


def _check(q, k, v, gates, initial_state, scale, chunk_size):
    """Validate the arguments of a rule; `gates` holds its g and beta by name, if it has them."""
    for name, gate in gates.items():
        if gate is None:
            raise TypeError(f"{name} must be a tensor, got None")
    known = check.shapes(q=(q, "b l h n"), k=(k, "b l h n"), v=(v, "b l h p"))
    check.sizes(n=known["n"], p=known["p"], chunk_size=chunk_size)
    check.shapes(known, **{name: (gate, "b l h") for name, gate in gates.items()})
    check.shapes(known, initial_state=(initial_state, "b h p n"))
    check.floating(q=q, k=k, v=v, **gates, initial_state=initial_state)
    wide = torch.promote_types(q.dtype, torch.float32)
    check.dtypes([q.dtype], k=k, v=v)
    check.dtypes([q.dtype, wide], **gates)
    check.dtypes([wide], initial_state=initial_state)
    check.numbers("(-inf, inf)", scale=scale)
    check.entries("[-inf, 0]", g=gates.get("g"))
    check.entries("[0, inf)", beta=gates.get("beta"))
