"""Linear attention: without its softmax, attention is a matrix that every token updates.

Every head keeps a matrix S that is to answer a key with its value, S k ≈ v. A token (k_t, v_t)
updates it, a query reads it, o_t = scale · S_t q_t, and the rules differ in the update:

    linear_attention         S_t =     S_{t-1}                    +     v_t k_tᵀ
    gated_linear_attention   S_t = α_t S_{t-1}                    +     v_t k_tᵀ    (Mamba-2)
    longhorn                 S_t =     S_{t-1} (I - ε_t k_t k_tᵀ) + ε_t v_t k_tᵀ
    delta_rule               S_t =     S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ    (DeltaNet)
    gated_delta_rule         S_t = α_t S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ    (Gated DeltaNet)

with ε = β / (1 + β kᵀk). The first two add what they are given. The last three write the error
v - S k that the state, once decayed, makes on the new key: S (I - β k kᵀ) + β v kᵀ is nothing else
than S + β (v - S k) kᵀ.

    code     shape          in the lecture
    q        (b, l, h, n)   q, what a token reads (C of SSD)
    k        (b, l, h, n)   k, where it writes (B of SSD)
    v        (b, l, h, p)   v, what it writes (dt x of SSD)
    g        (b, l, h)      log α, the log decay ≤ 0 (dt A of SSD)
    beta     (b, l, h)      β, the step size of the write ≥ 0
    state    (b, h, p, n)   S, d_v × d_k

The five functions above are the definitions, one token after the other. With `_chunked` in the
name each has a form that computes the same from a few matrix products per chunk of tokens;
`linear_attention_quadratic` is attention as it is usually written, (QKᵀ ∘ M)V. `RULES` lists them.

Sixteen-bit inputs are computed in float32 and the result is cast back; the state stays float32.
Notebook 02 derives all of it. fla (flash-linear-attention) scales by 1/√n where nothing else is
said, here the scale is 1; its state is our state transposed.
Source: L22, "Linear Attention" and its table of online updates; WM §2, State Space Duality.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, einsum


def linear_attention(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    *,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Add up what the tokens write: S_t = S_{t-1} + v_t k_tᵀ, o_t = scale · S_t q_t.

    Args:
        q: (b, l, h, n), queries, what each token reads. q, k and v share a dtype.
        k: (b, l, h, n), keys, where each token writes.
        v: (b, l, h, p), values, what each token writes.
        scale: any finite number, a factor on the output; attention with a softmax takes 1/√n.
        initial_state: (b, h, p, n), the state before the first token; None for zeros. Its dtype,
            and that of the final state, is that of q, or float32 for a sixteen-bit q.
        return_final_state: whether to return the state after the last token as well.

    Returns:
        o (b, l, h, p) with the dtype of q, or (o, final state).

    Raises:
        ValueError: a wrong rank, size or dtype; p or n is 0; a scale that is not finite.

    Source: L22, "Linear Attention", row LA; Katharopoulos et al. (2020).
    """

    def update(S, k, v):
        return S + _outer(v, k)

    return _token_by_token(update, q, k, v, {}, scale, initial_state, return_final_state)


def gated_linear_attention(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    g: Float[Tensor, "b l h"],
    *,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Let the state decay before each write: S_t = exp(g_t) S_{t-1} + v_t k_tᵀ.

    This is SSD, with C = q, B = k, dt x = v, dt A = g. Every SSD is one of these; the reverse
    takes dt = -g and x = v / dt, and so g < 0.

    Args:
        q, k, v, scale, initial_state, return_final_state: as in `linear_attention`.
        g: (b, l, h), log decay ≤ 0 per token, without unit: 0 keeps all, -inf forgets all. g has
            the dtype of q, or float32 beside a sixteen-bit q.

    Returns:
        As `linear_attention`.

    Raises:
        ValueError: as `linear_attention` does, and g that is positive or NaN.

    Source: L22, "Linear Attention", row Mamba2; WM §2; Dao and Gu (2024).
    """

    def update(S, k, v, g):
        return _decay(S, g) + _outer(v, k)

    return _token_by_token(update, q, k, v, {"g": g}, scale, initial_state, return_final_state)


def longhorn(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    beta: Float[Tensor, "b l h"],
    *,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Weigh the old state against the new pair: S_t minimises ‖S - S_{t-1}‖² + β_t ‖S k_t - v_t‖².

    The minimum is S_t = S_{t-1} (I - ε_t k_t k_tᵀ) + ε_t v_t k_tᵀ, ε_t = β_t / (1 + β_t k_tᵀk_t):
    the delta rule with a step size below 1/‖k_t‖². So it is stable with any keys and any β.

    Args:
        q, k, v, scale, initial_state, return_final_state: as in `linear_attention`.
        beta: (b, l, h), ≥ 0 and finite, weight of the new pair, in units of 1/‖k‖²; 0 leaves the
            state alone. It has the dtype of q, or float32 beside a sixteen-bit q.

    Returns:
        As `linear_attention`.

    Raises:
        ValueError: as `linear_attention` does, and beta that is negative, infinite or NaN.

    Source: L22, "Linear Attention", row Longhorn; Liu et al. (2024).
    """

    def update(S, k, v, beta):
        return _correct(S, k, v, _implicit_step(k, beta))

    gates = {"beta": beta}
    return _token_by_token(update, q, k, v, gates, scale, initial_state, return_final_state)


def delta_rule(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    beta: Float[Tensor, "b l h"],
    *,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Correct what the state answers to the new key: S_t = S_{t-1} + β_t (v_t - S_{t-1} k_t) k_tᵀ.

    Multiplied out, S_t = S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ. It is one gradient step of size
    β_t on ½‖S k_t - v_t‖², from S_{t-1}.

    It is stable where β_t ‖k_t‖² ≤ 2, for what the state holds along k_t is multiplied by
    1 - β_t ‖k_t‖². Models see to that with unit keys and β in (0, 1) or (0, 2). It is not checked:
    with raw keys the state grows exponentially with the number of tokens.

    Args:
        q, k, v, scale, initial_state, return_final_state: as in `linear_attention`.
        beta: (b, l, h), ≥ 0 and finite, step size in units of 1/‖k‖²; 0 leaves the state alone,
            1/‖k‖² replaces what it held under this key. Dtype as in `longhorn`.

    Returns:
        As `linear_attention`.

    Raises:
        ValueError: as `longhorn` does.

    Source: L22, "Linear Attention", row DeltaNet; Schlag et al. (2021).
    """
    gates = {"beta": beta}
    return _token_by_token(_correct, q, k, v, gates, scale, initial_state, return_final_state)


def gated_delta_rule(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    g: Float[Tensor, "b l h"],
    beta: Float[Tensor, "b l h"],
    *,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Decay, then correct: S_t = S_{t-1} exp(g_t) (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ.

    The error that is written is that of the decayed state. Stable where exp(g_t) |1 - β_t ‖k_t‖²|
    ≤ 1; otherwise as `delta_rule`.

    Args:
        q, k, v, scale, initial_state, return_final_state: as in `linear_attention`.
        g: (b, l, h), as in `gated_linear_attention`.
        beta: (b, l, h), as in `delta_rule`.

    Returns:
        As `linear_attention`.

    Raises:
        ValueError: as `gated_linear_attention` and `longhorn` do.

    Source: L22, "Linear Attention", row Gated DeltaNet; Yang, Kautz and Hatamizadeh (2024).
    """

    def update(S, k, v, g, beta):
        return _correct(_decay(S, g), k, v, beta)

    gates = {"g": g, "beta": beta}
    return _token_by_token(update, q, k, v, gates, scale, initial_state, return_final_state)


def linear_attention_quadratic(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    *,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute `linear_attention` as attention without softmax, O = scale · (QKᵀ ∘ M)V.

    M is the causal mask. Time and memory grow with l². Arguments, result and errors are those of
    `linear_attention`. `ssd_quadratic` is the same with a decay.

    Source: L22, "Linear Attention"; WM §2, (L ∘ QKᵀ)V.
    """
    state = _validate(q, k, v, {}, 1, scale, initial_state)
    dtype, (q, k, v) = q.dtype, (t.to(state.dtype) for t in (q, k, v))
    scores = einsum("bthn,bshn->bhts", q, k).tril()
    o = einsum("bhts,bshp->bthp", scores, v) + einsum("bthn,bhpn->bthp", q, state)
    state = state + einsum("bshp,bshn->bhpn", v, k)
    return _result(scale * o, state, dtype, return_final_state)


def linear_attention_chunked(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    *,
    chunk_size: int = 64,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute `linear_attention` in chunks: `gated_linear_attention_chunked` with g = 0.

    Arguments, result and errors are those of `linear_attention`; chunk_size as in
    `gated_linear_attention_chunked`.

    Source: L22, "Linear Attention"; Yang et al. (2024), "Gated linear attention".
    """
    return _chunk_by_chunk(q, k, v, {}, chunk_size, scale, initial_state, return_final_state)


def gated_linear_attention_chunked(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    g: Float[Tensor, "b l h"],
    *,
    chunk_size: int = 64,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute `gated_linear_attention` in chunks: quadratic inside, recurrent between them.

    Arguments, result and errors are those of `gated_linear_attention`; chunk_size ≥ 1 is the
    number of tokens per chunk. It changes the cost, never the result; l need not be a multiple.
    Memory grows with l · chunk_size.

    This is `ssd_chunked` for any g ≤ 0, without groups of heads. (Called with dt = -g and A = -1
    that one would need x = v / dt, and where g = 0 there is no such x.)

    Source: WM Listing 3, as `ssd_chunked` has it; Dao and Gu (2024).
    """
    gates = {"g": g}
    return _chunk_by_chunk(q, k, v, gates, chunk_size, scale, initial_state, return_final_state)


def longhorn_chunked(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    beta: Float[Tensor, "b l h"],
    *,
    chunk_size: int = 64,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute `longhorn` in chunks: `delta_rule_chunked` with ε for β.

    Arguments, result and errors are those of `longhorn`; chunk_size as in
    `gated_linear_attention_chunked`.

    Source: L22, "Linear Attention", row Longhorn.
    """
    wide = _validate(q, k, v, {"beta": beta}, chunk_size, scale, initial_state).dtype
    gates = {"beta": _implicit_step(k.to(wide), beta.to(wide))}
    return _chunk_by_chunk(q, k, v, gates, chunk_size, scale, initial_state, return_final_state)


def delta_rule_chunked(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    beta: Float[Tensor, "b l h"],
    *,
    chunk_size: int = 64,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute `delta_rule` in chunks: `gated_delta_rule_chunked` with g = 0.

    Arguments, result and errors are those of `delta_rule`; chunk_size as in
    `gated_linear_attention_chunked`.

    Source: Yang et al. (2024), "Parallelizing linear transformers with the delta rule".
    """
    gates = {"beta": beta}
    return _chunk_by_chunk(q, k, v, gates, chunk_size, scale, initial_state, return_final_state)


def gated_delta_rule_chunked(
    q: Float[Tensor, "b l h n"],
    k: Float[Tensor, "b l h n"],
    v: Float[Tensor, "b l h p"],
    g: Float[Tensor, "b l h"],
    beta: Float[Tensor, "b l h"],
    *,
    chunk_size: int = 64,
    scale: float | int = 1.0,
    initial_state: Float[Tensor, "b h p n"] | None = None,
    return_final_state: bool = False,
) -> Float[Tensor, "b l h p"] | tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Compute `gated_delta_rule` in chunks, by one triangular system of equations per chunk.

    The rule is gated linear attention that writes w_t = β_t (v_t - exp(g_t) S_{t-1} k_t) for v_t.
    Inside a chunk S_{t-1} is what the earlier tokens wrote and what is left of the state at the
    start, so the w are linear in one another: solved for all at once, the rest is as before.

    Arguments, result and errors are those of `gated_delta_rule`; chunk_size as in
    `gated_linear_attention_chunked`. In float32, keys that nearly coincide, with β ‖k‖² near 2,
    cost a digit that the loop keeps.

    Source: Yang et al. (2024), "Parallelizing linear transformers with the delta rule", where it is
    the UT transform of a WY representation; Yang, Kautz and Hatamizadeh (2024), with decay.
    """
    gates = {"g": g, "beta": beta}
    return _chunk_by_chunk(q, k, v, gates, chunk_size, scale, initial_state, return_final_state)


class Rule(NamedTuple):
    """One rule: its definition, its chunked form, and what both take after q, k and v, in order."""

    loop: Callable
    chunked: Callable
    takes: tuple[str, ...]


RULES = {
    "linear attention": Rule(linear_attention, linear_attention_chunked, ()),
    "Mamba-2": Rule(gated_linear_attention, gated_linear_attention_chunked, ("g",)),
    "Longhorn": Rule(longhorn, longhorn_chunked, ("beta",)),
    "DeltaNet": Rule(delta_rule, delta_rule_chunked, ("beta",)),
    "Gated DeltaNet": Rule(gated_delta_rule, gated_delta_rule_chunked, ("g", "beta")),
}


# The parts of the rules, on one token: S (b, h, p, n), k (b, h, n), v (b, h, p), g and beta (b, h).
# `_implicit_step` also takes all tokens at once.


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


def _token_by_token(update, q, k, v, gates, scale, state, return_final_state):
    """Walk through the tokens: update the state with k_t, v_t and the gates, read it with q_t."""
    state = _validate(q, k, v, gates, 1, scale, state)
    inputs = (t.to(state.dtype).unbind(1) for t in (q, k, v, *gates.values()))
    outputs = []
    for q_t, *token in zip(*inputs, strict=True):
        state = update(state, *token)
        outputs.append(scale * _read(state, q_t))
    if not outputs:
        return _result(v.clone(), state.clone(), q.dtype, return_final_state)
    return _result(torch.stack(outputs, dim=1), state, q.dtype, return_final_state)


def _chunk_by_chunk(q, k, v, gates, chunk_size, scale, state, return_final_state):
    """Any rule with g (0 if not given) and beta (if not given, values are written as they are)."""
    state = _validate(q, k, v, gates, chunk_size, scale, state)
    dtype, (b, length, h, n), p = q.dtype, q.shape, v.shape[-1]
    if length == 0:
        return _result(v.clone(), state.clone(), dtype, return_final_state)
    size = min(chunk_size, length)

    # 0. Cut the sequence into chunks of one size. Tokens appended to fill the last one have k = 0
    #    and g = 0, so they leave the state alone.
    g, beta = gates.get("g", q.new_zeros(b, length, h)), gates.get("beta")
    q, k, v, g = (_cut(t.to(state.dtype), size) for t in (q, k, v, g))

    # 1. What is left at token t of what token s wrote, exp(Σ_{s<r≤t} g_r), and of the state that
    #    the chunk was handed. The sums are taken over the entries themselves: as differences of two
    #    running sums they would lose digits, and above the diagonal they would overflow.
    steps = repeat(g, "b c h t -> b c h t s", s=size).tril(-1)
    decay = steps.cumsum(dim=-2).exp().tril()
    from_start = g.cumsum(dim=-1).exp()[..., None]
    to_end = decay[..., -1, :, None]

    # 2. What the tokens write. For the delta rule that is
    #        w_t = β_t (v_t - from_start_t S k_t - Σ_{s<t} decay[t, s] (k_t·k_s) w_s),
    #    so (I + A) W = β V - β from_start K Sᵀ with a strictly lower triangular A. Both terms are
    #    solved for before S is known; S comes in afterwards, as a factor.
    writes, recalls = v, None
    if beta is not None:
        beta = _cut(beta.to(state.dtype), size)[..., None]
        A = (beta * einsum("bchtn,bchsn->bchts", k, k) * decay).tril(-1)
        terms = torch.cat([beta * v, beta * from_start * k], dim=-1)
        solved = torch.linalg.solve_triangular(A, terms, upper=False, unitriangular=True)
        writes, recalls = solved.split([p, n], dim=-1)

    # 3. Between chunks: the recurrence, one step per chunk.
    incoming, written = [], []
    over_chunk, k_to_end = from_start[:, :, :, -1:], to_end * k
    for c in range(k.shape[1]):
        w = writes[:, c]
        if recalls is not None:
            w = w - einsum("bhln,bhpn->bhlp", recalls[:, c], state)
        incoming.append(state)
        written.append(w)
        state = over_chunk[:, c] * state + einsum("bhlp,bhln->bhpn", w, k_to_end[:, c])
    S, W = torch.stack(incoming, dim=1), torch.stack(written, dim=1)

    # 4. What they read: inside the chunk by the quadratic form, and from the state handed to it.
    scores = einsum("bchtn,bchsn->bchts", q, k) * decay
    o = einsum("bchts,bchsp->bchtp", scores, W)
    o = o + from_start * einsum("bchln,bchpn->bchlp", q, S)
    o = rearrange(scale * o, "b c h l p -> b (c l) h p")[:, :length]
    return _result(o, state, dtype, return_final_state)


def _cut(t, size):
    """Cut (b, l, h, ...) into chunks (b, c, h, l, ...) of `size` tokens, the last filled with 0."""
    t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, -t.shape[1] % size))
    return t.unflatten(1, (-1, size)).transpose(2, 3)


def _result(o, state, dtype, return_final_state):
    o = o.to(dtype)
    return (o, state) if return_final_state else o


def _validate(q, k, v, gates, chunk_size, scale, state):
    """Refuse what the rules are not defined for, and return the state to start from."""
    for name, t, axes in (("q", q, "(b, l, h, n)"), ("v", v, "(b, l, h, p)")):
        if t.ndim != 4:
            raise ValueError(f"{name} must have the 4 axes {axes}, got {_shape(t)}")
    (b, length, h, n), p = q.shape, v.shape[-1]
    if n == 0 or p == 0:
        raise ValueError(f"the state is p × n, with both at least 1, got p = {p}, n = {n}")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a whole number of at least 1, got {chunk_size}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale}")

    wide = torch.promote_types(q.dtype, torch.float32)
    like_q, or_wide, only_wide = (q.dtype,), (q.dtype, wide), (wide,)
    for name, t, axes, shape, dtypes in (
        ("q", q, "(b, l, h, n)", (b, length, h, n), like_q),
        ("k", k, "(b, l, h, n)", (b, length, h, n), like_q),
        ("v", v, "(b, l, h, p)", (b, length, h, p), like_q),
        *((name, t, "(b, l, h)", (b, length, h), or_wide) for name, t in gates.items()),
        ("initial_state", state, "(b, h, p, n)", (b, h, p, n), only_wide),
    ):
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} must be {axes} = {shape}, got {_shape(t)}")
        if not t.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {t.dtype}")
        if t.dtype not in dtypes:
            allowed = " or ".join(dict.fromkeys(str(d) for d in dtypes))
            raise ValueError(f"{name} must be {allowed} where q is {q.dtype}, got {t.dtype}")
    g, beta = gates.get("g"), gates.get("beta")
    if g is not None and not bool((g <= 0).all()):
        raise ValueError(f"g, a log decay, must be ≤ 0 everywhere, got {g.max().item():g}")
    if beta is not None and not bool(((beta >= 0) & (beta < math.inf)).all()):
        low, high = beta.min().item(), beta.max().item()
        raise ValueError(
            f"beta must be ≥ 0 and finite everywhere, got entries in [{low:g}, {high:g}]"
        )
    return q.new_zeros(b, h, p, n, dtype=wide) if state is None else state


def _shape(t):
    return f"shape {tuple(t.shape)}"
