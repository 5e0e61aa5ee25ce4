"""Linear attention: without its softmax, attention is a matrix that every token updates.

Every head keeps a matrix S that is to answer a key with its value, S k ≈ v. A token (k_t, v_t)
updates it, a query reads it, o_t = scale · S_t q_t, and the rules differ in the update:

    linear_attention         S_t =     S_{t-1}                    +     v_t k_tᵀ
    gated_linear_attention   S_t = α_t S_{t-1}                    +     v_t k_tᵀ    (Mamba-2)
    longhorn                 S_t =     S_{t-1} (I - ε_t k_t k_tᵀ) + ε_t v_t k_tᵀ
    delta_rule               S_t =     S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ    (DeltaNet)
    gated_delta_rule         S_t = α_t S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ    (Gated DeltaNet)

with ε = β / (1 + β kᵀk). The first two add what they are given. The last three write the error
v - S k that the state, once decayed, makes on the new key: S (I - β k kᵀ) + β v kᵀ equals
S + β (v - S k) kᵀ.

    code     shape          in the lecture
    q        (b, l, h, n)   q, what a token reads (C of SSD)
    k        (b, l, h, n)   k, where it writes (B of SSD)
    v        (b, l, h, p)   v, what it writes (dt x of SSD)
    g        (b, l, h)      log α, the log decay ≤ 0 (dt A of SSD)
    beta     (b, l, h)      β, the step size of the write ≥ 0
    state    (b, h, p, n)   S, d_v × d_k

Every rule is its definition, one token after the other. With a `chunk_size` it computes the same
from a few matrix products per chunk of tokens; the size changes the cost, never the result, and l
need not be a multiple of it. `linear_attention_quadratic` is attention as it is usually written,
(QKᵀ ∘ M)V. `RULES` lists the rules.

q, k and v share a dtype. Sixteen-bit inputs are computed in float32 and the output is cast back;
the state stays float32, and g and beta may be float32 as well. Wrong shapes, sizes, dtypes or
values raise ValueError (what is no number, TypeError) naming argument, letters and numbers
(check.py).

Notebook 02 derives all of it. fla (flash-linear-attention) scales by 1/√n unless told otherwise,
here the scale is 1; its state is our state transposed.
Source: L22, "Linear Attention" and its table of online updates; WM §2, State Space Duality.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, einsum

from cheems_ref import check

# Chunks computed at a time: what lies between two matrix products stays in a core's cache, and
# memory does not grow with all chunks at once.
CHUNKS_PER_BLOCK = 8

Keys = Float[Tensor, "b l h n"]  # and queries
Values = Float[Tensor, "b l h p"]
Gate = Float[Tensor, "b l h"]
State = Float[Tensor, "b h p n"]
Output = Values | tuple[Values, State]


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
        chunk_size: tokens per chunk, ≥ 1; None computes token by token. What is kept for the
            backward pass grows with l · chunk_size.
        scale: a finite factor on the output; attention with a softmax takes 1/√n.
        initial_state: the state before the first token; None for zeros. Its dtype, and that of the
            final state, is that of q, or float32 for a sixteen-bit q.
        return_final_state: whether to return (o, state after the last token) instead of o.

    Source: L22, "Linear Attention", row LA; Katharopoulos et al. (2020).
    """

    def update(S, k, v):
        return S + _outer(v, k)

    _validate(q, k, v, {}, chunk_size, scale, initial_state)
    return _run(update, q, k, v, {}, chunk_size, scale, initial_state, return_final_state)


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
        g: log decay ≤ 0 per token, without unit: 0 keeps all; -inf is a reset, which forgets all
            that was there before, and g then has the gradient 0.
        q, k, v, chunk_size, scale, initial_state, return_final_state: as in `linear_attention`.

    Source: L22, "Linear Attention", row Mamba2; WM §2; Dao and Gu (2024). In chunks: WM Listing 3.
    """

    def update(S, k, v, g):
        return _decay(S, g) + _outer(v, k)

    gates = {"g": g}
    _validate(q, k, v, gates, chunk_size, scale, initial_state)
    return _run(update, q, k, v, gates, chunk_size, scale, initial_state, return_final_state)


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
    _validate(q, k, v, {"beta": beta}, chunk_size, scale, initial_state)
    k = _wide(k)
    gates = {"beta": _implicit_step(k, _wide(beta))}
    return _run(_correct, q, k, v, gates, chunk_size, scale, initial_state, return_final_state)


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
    """Correct what the state answers to the new key: S_t = S_{t-1} + β_t (v_t - S_{t-1} k_t) k_tᵀ.

    Multiplied out, S_t = S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ. It is one gradient step of size
    β_t on ½‖S k_t - v_t‖², from S_{t-1}.

    What the state holds along k_t is multiplied by 1 - β_t ‖k_t‖²: it does not grow where
    β_t ‖k_t‖² ≤ 2, and at 2 nothing of it is forgotten. Models keep below with unit keys and β in
    (0, 1) or (0, 2). It is not checked: raw keys, where this factor is beyond -1 again and again,
    make the state grow exponentially with the number of tokens. In chunks, float32 loses
    a digit to the loop where keys nearly coincide and β ‖k‖² is near 2.

    Args:
        beta: ≥ 0 and finite, step size in units of 1/‖k‖²; 0 leaves the state alone, 1/‖k‖²
            replaces what it held under this key.
        q, k, v, chunk_size, scale, initial_state, return_final_state: as in `linear_attention`.

    Source: L22, "Linear Attention", row DeltaNet; Schlag et al. (2021). In chunks: Yang et al.
    (2024), "Parallelizing linear transformers with the delta rule".
    """
    gates = {"beta": beta}
    _validate(q, k, v, gates, chunk_size, scale, initial_state)
    return _run(_correct, q, k, v, gates, chunk_size, scale, initial_state, return_final_state)


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
    """Decay, then correct: S_t = S_{t-1} exp(g_t) (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ.

    The error that is written is that of the decayed state. An old state does not grow where
    exp(g_t) |1 - β_t ‖k_t‖²| ≤ 1; otherwise as `delta_rule`.

    Args:
        g: as in `gated_linear_attention`.
        beta: as in `delta_rule`.
        q, k, v, chunk_size, scale, initial_state, return_final_state: as in `linear_attention`.

    Source: L22, "Linear Attention", row Gated DeltaNet; Yang, Kautz and Hatamizadeh (2024).
    """

    def update(S, k, v, g, beta):
        return _correct(_decay(S, g), k, v, beta)

    gates = {"g": g, "beta": beta}
    _validate(q, k, v, gates, chunk_size, scale, initial_state)
    return _run(update, q, k, v, gates, chunk_size, scale, initial_state, return_final_state)


def linear_attention_quadratic(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    scale: float | int = 1.0,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Output:
    """Return `linear_attention` computed as attention without softmax, O = scale · (QKᵀ ∘ M)V.

    M is the causal mask. Time and memory grow with l². `ssd_quadratic` is the same with a decay.

    Source: L22, "Linear Attention"; WM §2, (L ∘ QKᵀ)V.
    """
    _validate(q, k, v, {}, None, scale, initial_state)
    dtype, (q, k, v) = q.dtype, map(_wide, (q, k, v))
    state = _empty_state(q, v) if initial_state is None else initial_state
    scores = einsum("bthn,bshn->bhts", q, k).tril()
    o = einsum("bhts,bshp->bthp", scores, v) + einsum("bthn,bhpn->bthp", q, state)
    o, state = (scale * o).to(dtype), state + einsum("bshp,bshn->bhpn", v, k)
    return (o, state) if return_final_state else o


class Rule(NamedTuple):
    """One rule, and the gates that it takes after q, k and v, in order."""

    function: Callable
    takes: tuple[str, ...]


RULES = {
    "linear attention": Rule(linear_attention, ()),
    "Mamba-2": Rule(gated_linear_attention, ("g",)),
    "Longhorn": Rule(longhorn, ("beta",)),
    "DeltaNet": Rule(delta_rule, ("beta",)),
    "Gated DeltaNet": Rule(gated_delta_rule, ("g", "beta")),
}


# The parts of the rules, on one token: S (b, h, p, n), k (b, h, n), v (b, h, p), g and beta (b, h).
# `_implicit_step` takes all tokens at once.


def _read(S, k):
    """S k: what the state answers to a key or a query."""
    return einsum("bhpn,bhn->bhp", S, k)


def _outer(v, k):
    """v kᵀ: the state that answers k with ‖k‖² v, and nothing to what is orthogonal to k."""
    return einsum("bhp,bhn->bhpn", v, k)


def _decay(S, g):
    """exp(g) S: the state, forgotten a little."""
    return g.exp()[..., None, None] * S


def _correct(S, k, v, beta):
    """S (I - β k kᵀ) + β v kᵀ."""
    error = v - _read(S, k)
    return S + _outer(beta[..., None] * error, k)


def _implicit_step(k, beta):
    """Longhorn's ε: the β of a delta rule that steps to the minimum and not along the slope."""
    return beta / (1 + beta * k.square().sum(-1))


# What all rules share.


def _run(update, q, k, v, gates, chunk_size, scale, state, return_final_state):
    """Apply a rule to all tokens, one by one or in chunks; nothing is checked."""
    dtype, (q, k, v) = q.dtype, map(_wide, (q, k, v))
    gates = {name: _wide(gate) for name, gate in gates.items()}
    state = _empty_state(q, v) if state is None else state
    if q.shape[1] == 0:
        o, state = v, state.clone()  # results share no memory with arguments
    elif chunk_size is None:
        o, state = _token_by_token(update, q, k, v, gates, state, scale)
    else:
        o, state = _chunk_by_chunk(q, k, v, gates, state, scale, chunk_size)
    return (o.to(dtype), state) if return_final_state else o.to(dtype)


def _token_by_token(update, q, k, v, gates, state, scale):
    """Update the state with k_t, v_t and the gates, and read it with q_t."""
    outputs = []
    for q_t, *token in zip(*(t.unbind(1) for t in (q, k, v, *gates.values())), strict=True):
        state = update(state, *token)
        outputs.append(scale * _read(state, q_t))
    return torch.stack(outputs, dim=1), state


def _chunk_by_chunk(q, k, v, gates, state, scale, chunk_size):
    """Hand the state from each block of chunks to the next."""
    size = min(chunk_size, q.shape[1])  # a short sequence is one chunk, and is not filled up
    inputs = (t.split(size * CHUNKS_PER_BLOCK, dim=1) for t in (q, k, v, *gates.values()))
    outputs = []
    for q_b, k_b, v_b, *gates_b in zip(*inputs, strict=True):
        named = dict(zip(gates, gates_b, strict=True))
        o, state = _block_of_chunks(q_b, k_b, v_b, **named, state=state, size=size)
        outputs.append(scale * o)
    return torch.cat(outputs, dim=1), state


def _block_of_chunks(q, k, v, g=None, beta=None, *, state, size):
    """Compute any rule: without g nothing decays, without beta values are written as they are."""
    (b, length, h, n), p = q.shape, v.shape[-1]

    # 0. Cut the tokens into chunks of one size. Those appended to fill the last one have k = 0 and
    #    g = 0, so they leave the state alone.
    g = q.new_zeros(b, length, h) if g is None else g
    q, k, v, g = (_cut(t, size) for t in (q, k, v, g))

    # 1. What is left at token t of what token s wrote, exp(Σ_{s<r≤t} g_r), and of the state that
    #    the chunk was handed. The sums are taken over the entries themselves: as differences of two
    #    running sums they would lose digits, overflow above the diagonal, and be NaN after a reset.
    steps = repeat(g, "b c h t -> b c h t s", s=size).tril(-1)
    decay = steps.cumsum(dim=-2).exp().tril()
    from_start = g.cumsum(dim=-1).exp()[..., None]
    to_end = decay[..., -1, :, None]

    # 2. What the tokens write. For the delta rule that is
    #        w_t = β_t (v_t - from_start_t S k_t - Σ_{s<t} decay[t, s] (k_t·k_s) w_s),
    #    linear in the w themselves: (I + A) W = β V - β from_start K Sᵀ with a strictly lower
    #    triangular A (the UT transform of a WY representation). Both terms are solved for before S
    #    is known; S comes in afterwards, as a factor.
    writes, recalls = v, None
    if beta is not None:
        beta = _cut(beta, size)[..., None]
        A = (beta * einsum("bchtn,bchsn->bchts", k, k) * decay).tril(-1)
        terms = torch.cat([beta * v, beta * from_start * k], dim=-1)
        solved = torch.linalg.solve_triangular(A, terms, upper=False, unitriangular=True)
        writes, recalls = solved.split([p, n], dim=-1)

    # 3. Between chunks: the recurrence, one step per chunk. (Unbind instead of indexing, whose
    #    backward pass allocates zeros for all chunks, once per chunk.)
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

    # 4. What they read: inside the chunk by the quadratic form, and from the state handed to it.
    scores = einsum("bchtn,bchsn->bchts", q, k) * decay
    o = einsum("bchts,bchsp->bchtp", scores, W)
    o = o + from_start * einsum("bchln,bchpn->bchlp", q, S)
    return rearrange(o, "b c h l p -> b (c l) h p")[:, :length], state


def _cut(t, size):
    """Cut (b, l, h, ...) into chunks (b, c, h, l, ...) of `size` tokens, the last filled with 0."""
    t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, -t.shape[1] % size))
    return t.unflatten(1, (-1, size)).transpose(2, 3)


def _wide(t):
    """Cast sixteen-bit tensors to float32, in which sums keep their digits."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _empty_state(q, v):
    return q.new_zeros(q.shape[0], q.shape[2], v.shape[-1], q.shape[-1])


def _validate(q, k, v, gates, chunk_size, scale, state):
    """Refuse what the rules are not defined for."""
    known = check.shapes(q=(q, "b l h n"), k=(k, "b l h n"), v=(v, "b l h p"))
    check.sizes(n=known["n"], p=known["p"], chunk_size=chunk_size)
    per_token = {name: (gate, "b l h") for name, gate in gates.items()}
    check.shapes(known, **per_token, initial_state=(state, "b h p n"))
    check.floating(q=q, k=k, v=v, **gates, initial_state=state)
    wide = torch.promote_types(q.dtype, torch.float32)
    check.dtypes([q.dtype], k=k, v=v)
    check.dtypes([q.dtype, wide], **gates)
    check.dtypes([wide], initial_state=state)
    check.numbers("(-inf, inf)", scale=scale)
    check.entries("[-inf, 0]", g=gates.get("g"))
    check.entries("[0, inf)", beta=gates.get("beta"))
