"""Inner-function attention: attention whose values are computed, and masks that learn.

Every token asks with a query, is found by a key and answers with a value:

    y_t = Σ_s softmax_s(q_t·k_s / √p + bias_s) v_s        over the s that t may see

    code       shape            in the papers
    q          (b, t, h, p)     Q, turned by its position
    k          (b, s, g, p)     K, turned by its position
    v          (b, s, h, p)     V, of the inner function f(x)
    bias       (b, h, s)        log of the dynamic mask: 0 keeps a key, -∞ takes it away
    allowed    (b, h, t, s)     the mask: causal, padding, and what a dynamic mask takes away

Head i reads the keys of group i // (h / g). The three inner functions (WM §3.2, Ch §3.2):

    "ssd"        v = SSD(x): the state of a recurrence at every token is a value
    "retrieved"  v = x ∘ Σ_j w_j e_j: rows of a table, chosen and weighted by similarity
    "linear"     v = W x: ordinary attention, the control

and the two dynamic masks, both additive before the softmax, so that they receive a gradient:

    GateMask     one learned gate per head and position
    ContentMask  a penalty computed from the value of the key

`attention` is torch's fused operator, `attention_written_out` the formula it is checked against.
The published listings, and what each does when it is run, are in notebook 05.
Source: WM §3.2, B.3; Ch §3.2, A.3; the content mask follows the authors' later Doge models.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, einsum, nn

from cheems_ref.rope import apply_rope, rope_cos_sin, rope_frequencies
from cheems_ref.ssd import SSD, SSDCache, check_call, to_heads

Mask = Literal["gate", "content"]
Inner = Literal["ssd", "retrieved", "linear"]


def causal_mask(
    n_queries: int,
    n_keys: int,
    *,
    real: Bool[Tensor, "b s"] | None = None,
    device: torch.device | None = None,
) -> Bool[Tensor, "... t s"]:
    """Say which keys each query may see: itself and what came before, padding excepted.

    The queries are the last n_queries of the n_keys tokens, so query t stands at token
    t + n_keys - n_queries: with a cache there are more keys than queries.

    Args:
        n_queries: t, at most n_keys.
        n_keys: s, cached keys included.
        real: (b, s), False for padding; None where there is none.
        device: where to make the mask; that of `real` if there is one.

    Returns:
        (t, s), or (b, 1, t, s) with `real`; True where the query may look. A query whose row would
        be empty, one at padding in front, sees itself.

    Raises:
        ValueError: more queries than keys, or `real` of another shape or not boolean.

    Source: WM §3.2 and Listing 5, with the offset that a cache needs.
    """
    if not 0 <= n_queries <= n_keys:
        raise ValueError(f"there are {n_queries} queries, the last of only {n_keys} keys")
    device = device if real is None else real.device
    token = torch.arange(n_queries, device=device)[:, None] + (n_keys - n_queries)
    source = torch.arange(n_keys, device=device)
    allowed = source <= token
    if real is None:
        return allowed
    if real.dtype != torch.bool or real.ndim != 2 or real.shape[1] != n_keys:
        raise ValueError(
            f"real must be boolean (b, s) with s = {n_keys}, got {real.dtype} {tuple(real.shape)}"
        )
    return _own_if_empty(allowed & real[:, None, None, :])


def attention_written_out(
    q: Float[Tensor, "b t h p"],
    k: Float[Tensor, "b s g p"],
    v: Float[Tensor, "b s _ p"],
    *,
    allowed: Bool[Tensor, "... t s"],
    bias: Float[Tensor, "b h s"] | None = None,
) -> Float[Tensor, "b t h p"]:
    """Compute softmax attention as its formula says, scores and weights in full.

    Args:
        q: (b, t, h, p), one query per head.
        k: (b, s, g, p), keys of g groups; g divides h.
        v: (b, s, g', p), values, in as many groups as keys or in others; g' divides h.
        allowed: broadcastable to (b, h, t, s), True where a query may look; no row is empty.
        bias: (b, h, s), added to the scores of each key; finite.

    Returns:
        (b, t, h, p) with the dtype of q; computed in float32 for sixteen bits.

    Raises:
        ValueError: shapes or dtypes that do not fit, a number of groups that does not divide h, or
            a row of `allowed` is empty.

    Source: WM §3.2; Ch eqs. 9 and 10, with the scale 1/√p and the mask inside the softmax.
    """
    _check_qkv(q, k, v, bias)
    (b, t, h, p), s = q.shape, k.shape[1]
    _check_allowed(allowed, (b, h, t, s))
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (to_heads(x, h).to(wide) for x in (k, v))
    scores = einsum("bthp,bshp->bhts", q.to(wide), keys) / math.sqrt(p)
    if bias is not None:
        scores = scores + bias[:, :, None].to(wide)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    return einsum("bhts,bshp->bthp", weights, values).to(q.dtype)


def attention(
    q: Float[Tensor, "b t h p"],
    k: Float[Tensor, "b s g p"],
    v: Float[Tensor, "b s _ p"],
    *,
    allowed: Bool[Tensor, "... t s"] | None = None,
    bias: Float[Tensor, "b h s"] | None = None,
) -> Float[Tensor, "b t h p"]:
    """Compute the same with torch's scaled_dot_product_attention.

    Arguments, result and errors are those of `attention_written_out`; allowed=None means causal,
    the queries being the last t of the s tokens.

    Source: Ch Listing 3; torch.nn.functional.scaled_dot_product_attention.
    """
    _check_qkv(q, k, v, bias)
    (b, t, h, _), s = q.shape, k.shape[1]
    q, k, v = (rearrange(to_heads(x, h), "b l h p -> b h l p") for x in (q, k, v))
    if allowed is None and bias is None and t in (1, s):  # torch may choose its fastest kernels
        y = F.scaled_dot_product_attention(q, k, v, is_causal=t == s)
        return rearrange(y, "b h l p -> b l h p")
    mask = causal_mask(t, s, device=q.device) if allowed is None else allowed
    _check_allowed(mask, (b, h, t, s))
    dtype = q.dtype
    if bias is not None:  # which sixteen bits could not hold
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        mask = bias[:, :, None].to(q.dtype).masked_fill(~mask, -torch.inf)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return rearrange(y, "b h l p -> b l h p").to(dtype)


class GateMask(nn.Module):
    """A learned gate in (0, 1) per head and position, laid on a key as its logarithm.

    The paper's dynamic mask with a gradient: a gate near 0 hides whatever stands at its position.
    It knows absolute positions and no contents, and it is the one part of this architecture whose
    output changes when all positions are moved. Gates start at 0.88.

    With round=True a gate below 1/2 hides its position completely and one above not at all, while
    the gradient is that of the gate before rounding (straight through).

    Args:
        n_heads: h.
        max_positions: number of positions in the table.
        round: whether the gates are rounded to 0 and 1.

    Raises:
        ValueError: a size below 1.

    Source: WM eq. 4 and Listing 6, made additive: as printed no gradient reaches it.
    """

    def __init__(self, n_heads: int, max_positions: int, *, round: bool = False):
        super().__init__()
        for name, size in (("n_heads", n_heads), ("max_positions", max_positions)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.round = round
        self.logit = nn.Parameter(torch.full((n_heads, max_positions), 2.0))

    def forward(
        self, v: Float[Tensor, "b s _ p"], position_ids: Int[Tensor, "b s"]
    ) -> Float[Tensor, "b h s"]:
        """Compute the bias of every key, log(gate) ≤ 0, from its position.

        Args:
            v: (b, s, g', p), the values; not used here.
            position_ids: (b, s), positions of the keys, each below max_positions.

        Returns:
            (b, h, s), ≤ 0.

        Raises:
            ValueError: a position outside the table.
        """
        n = self.logit.shape[1]
        if position_ids.numel() and not 0 <= position_ids.min() <= position_ids.max() < n:
            low, high = position_ids.min().item(), position_ids.max().item()
            raise ValueError(f"position_ids must be in [0, {n}), the table; got {low} to {high}")
        return rearrange(F.logsigmoid(self.logit)[:, position_ids.long()], "h b s -> b h s")

    def keeps(self, bias: Float[Tensor, "b h s"], allowed: Bool[Tensor, "... t s"]):
        """Say which of the allowed keys are kept, (b, h, t, s); None for all."""
        return allowed & (bias >= math.log(0.5))[:, :, None] if self.round else None


class ContentMask(nn.Module):
    """A penalty on a key, computed from its value: bias_s = A softplus(w·v_s + c) ≤ 0, per head.

    It has the form of SSD's A Δ, said by a token about itself: exp(bias) is the share of its key
    that is left, and a token that says "do not read me" is hidden from every later one. At the
    start the share is 0.9 or so.

    With keep=n each query keeps the n allowed keys of the smallest penalty and sees no others; of
    penalties that are equal as float32 numbers the later key is kept. (In a float32 model equal
    tokens may differ by a rounding, and then either may be kept.) With keep=1 the weight is 1
    whatever the scores, and queries, keys and penalties receive no gradient.

    Args:
        d_values: width of all values of a token together.
        n_heads: h.
        keep: n ≥ 1; None to keep all.

    Raises:
        ValueError: a size below 1.

    Source: the authors' later Doge models (transformers, `modeling_doge`), which add
    exp(A softplus(w·v)) with A starting at 0; here the exponent itself is added and A starts at -1,
    so that it means log(share left) and w has a gradient from the start.
    """

    def __init__(self, d_values: int, n_heads: int, *, keep: int | None = None):
        super().__init__()
        for name, size in (("d_values", d_values), ("n_heads", n_heads), ("keep", keep)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.keep = keep
        self.dt_proj = nn.Linear(d_values, n_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.full((n_heads,), math.log(math.expm1(0.1))))
        self.A_log = nn.Parameter(torch.zeros(n_heads))

    def forward(
        self, v: Float[Tensor, "b s _ p"], position_ids: Int[Tensor, "b s"]
    ) -> Float[Tensor, "b h s"]:
        """Compute the bias of every key from its value.

        Args:
            v: (b, s, g', p), the values.
            position_ids: (b, s); not used here.

        Returns:
            (b, h, s), ≤ 0, in float32 for sixteen-bit values.
        """
        wide = torch.promote_types(v.dtype, torch.float32)
        dt = F.softplus(self.dt_proj(v.flatten(2)).to(wide) + self.dt_bias.to(wide))
        return rearrange(-self.A_log.to(wide).exp() * dt, "b s h -> b h s")

    def keeps(self, bias: Float[Tensor, "b h s"], allowed: Bool[Tensor, "... t s"]):
        """Say which of the allowed keys are kept, (b, h, t, s); None for all."""
        if self.keep is None or self.keep >= bias.shape[-1]:
            return None
        # Sorted from the last key to the first, so that of equals the later comes first. As float32
        # since in float64 the rounding of a matrix product would tell equal tokens apart.
        seen = bias.float()[:, :, None].masked_fill(~allowed, -torch.inf).flip(-1)
        order = seen.argsort(dim=-1, descending=True, stable=True)[..., : self.keep]
        kept = torch.zeros_like(seen, dtype=torch.bool).scatter(-1, order, True).flip(-1)
        return kept & allowed


class RetrievedValues(nn.Module):
    """Values from a table: v = x ∘ Σ_j w_j e_j over the k rows most similar to the token.

    Every head asks with a query of its own, half as wide as the head, scores the n_values keys, and
    superimposes its k best rows, weighted by a softmax over their scores: through these weights
    queries and keys learn. For k_values = 1 the weight is 1, and they do not.

    Args:
        d_model: width of x, a multiple of n_heads.
        n_heads: h.
        n_values: rows of the table.
        k_values: rows that a token superimposes, at most n_values.

    Raises:
        ValueError: a size below 1, d_model not a multiple of n_heads, or k_values above n_values.

    Source: WM eq. 3, Listing 7 and Table 6, with weights, keys that start random, and a table of
    n_values rows.
    """

    def __init__(self, d_model: int, *, n_heads: int, n_values: int, k_values: int):
        super().__init__()
        if not 1 <= k_values <= n_values:
            raise ValueError(f"k_values must be in [1, n_values = {n_values}], got {k_values}")
        if n_heads < 1 or d_model < 1 or d_model % n_heads:
            raise ValueError(f"d_model = {d_model} must be a multiple of n_heads = {n_heads}")
        self.n_heads, self.k_values = n_heads, k_values
        p = d_model // n_heads
        m = max(1, p // 2)
        self.query_proj = nn.Linear(d_model, n_heads * m, bias=False)
        self.keys = nn.Parameter(torch.randn(n_heads, n_values, m))
        self.values = nn.Parameter(torch.randn(n_heads, n_values, p))

    def weights(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l h r"]:
        """Compute each row's weight for each token: softmax over the k best, 0 for the others."""
        queries = rearrange(self.query_proj(x), "b l (h m) -> b l h m", h=self.n_heads)
        scores = einsum("blhm,hrm->blhr", queries, self.keys) / math.sqrt(queries.shape[-1])
        best = scores.topk(self.k_values, dim=-1)
        return torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(dim=-1))

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Compute the values of the tokens x (b, l, d), each from that token alone."""
        rows = einsum("blhr,hrp->blhp", self.weights(x), self.values)
        return x * rearrange(rows, "b l h p -> b l (h p)")


class AttentionCache(NamedTuple):
    """What an attention layer remembers: one entry per token so far, padding included.

    k (b, s, g, p), turned; v (b, s, h, p), or in g groups for inner="linear"; real (b, s), False
    for padding, or None as long as there was none; position_ids (b, s); and for inner="ssd" the
    cache of the inner SSD.
    """

    k: Tensor
    v: Tensor
    real: Tensor | None
    position_ids: Tensor
    inner: SSDCache | None


class InnerFuncAttn(nn.Module):
    """Causal attention with rotary positions whose values are computed by an inner function.

    Queries and keys stay linear, since what they are for is to be compared; what is read need not.

    Args:
        d_model: width of input and output.
        n_heads: h, a divisor of d_model; d_model / n_heads is even, to be turned in pairs.
        n_kv_heads: g, groups of keys, a divisor of h; None for one per head. The values of "linear"
            come in the same groups; "ssd" and "retrieved" give one per head.
        rope_base: as in `rope_frequencies`.
        mask: "gate", "content", or None for the causal mask alone.
        inner: "ssd", "retrieved" or "linear".
        n_values, k_values: as in `RetrievedValues`, for inner="retrieved".
        d_state: state width of the inner SSD, for inner="ssd".
        max_positions: length of the table of mask="gate", which needs it; else without meaning.
        round: whether mask="gate" rounds its gates, as in `GateMask`.
        keep: keys that mask="content" keeps per query, as in `ContentMask`.

    Raises:
        ValueError: sizes that do not fit, an unknown mask or inner function, or an option without
            the mask that it belongs to.

    Source: WM §3.2 and Listing 7; Ch §3.2 and Listing 3.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        n_kv_heads: int | None = None,
        rope_base: float | int = 10000.0,
        mask: Mask | None = None,
        inner: Inner = "ssd",
        n_values: int = 64,
        k_values: int = 2,
        d_state: int = 64,
        max_positions: int | None = None,
        round: bool = False,
        keep: int | None = None,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        for name, size in (("d_model", d_model), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if d_model % n_heads or d_model // n_heads % 2:
            raise ValueError(
                f"d_model = {d_model} must be an even multiple of n_heads = {n_heads}: "
                "heads are turned in pairs of coordinates"
            )
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads = {n_heads} must be a multiple of n_kv_heads = {n_kv_heads}")
        if mask is not None and mask not in get_args(Mask):
            raise ValueError(f"mask must be None or one of {get_args(Mask)}, got {mask!r}")
        if inner not in get_args(Inner):
            raise ValueError(f"inner must be one of {get_args(Inner)}, got {inner!r}")
        if mask == "gate" and max_positions is None:
            raise ValueError("mask='gate' needs max_positions, the length of its table")
        if round and mask != "gate":
            raise ValueError(f"round belongs to mask='gate', got mask={mask!r}")
        if keep is not None and mask != "content":
            raise ValueError(f"keep = {keep} belongs to mask='content', got mask={mask!r}")
        p = d_model // n_heads
        rope_frequencies(p, rope_base)  # refuses a bad base now and not in the first call
        self.n_heads, self.rope_base = n_heads, rope_base

        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * p, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        d_values = d_model
        if inner == "ssd":
            self.inner = SSD(d_model, n_heads=n_heads, d_state=d_state, rope_base=rope_base)
        elif inner == "retrieved":
            self.inner = RetrievedValues(
                d_model, n_heads=n_heads, n_values=n_values, k_values=k_values
            )
        else:
            d_values = n_kv_heads * p
            self.inner = nn.Linear(d_model, d_values, bias=False)
        self.mask = None
        if mask == "gate":
            self.mask = GateMask(n_heads, max_positions, round=round)
        elif mask == "content":
            self.mask = ContentMask(d_values, n_heads, keep=keep)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        position_ids: Int[Tensor, "b l"],
        *,
        padding_mask: Bool[Tensor, "b l"] | None = None,
        cache: AttentionCache | None = None,
    ) -> tuple[Float[Tensor, "b l d"], AttentionCache]:
        """Let each token of this call read from itself and from those before it.

        Args:
            x: (b, l, d).
            position_ids: (b, l), integers ≥ 0 that count the real tokens of a row, going on where
                the cache ends. What they hold at padding does not matter.
            padding_mask: (b, l), True for real tokens; None for all. Padding is never read.
            cache: what an earlier call returned; None at the start of the sequence.

        Returns:
            y (b, l, d), of no meaning at padding, and the cache for the next call.

        Raises:
            ValueError: a wrong shape, positions that are not integers, negative or past the table
                of a gate, a padding mask that is not boolean, or a cache of another batch.
        """
        check_call(x, self.q_proj.in_features, position_ids, padding_mask)
        if cache is not None and cache.k.shape[0] != x.shape[0]:
            raise ValueError(f"the cache is of {cache.k.shape[0]} rows, x of {x.shape[0]}")
        if cache is not None and (cache.inner is None) == isinstance(self.inner, SSD):
            raise ValueError("the cache is that of a layer with another inner function")
        if padding_mask is not None:
            x = x.masked_fill(~padding_mask[..., None], 0)
            position_ids = position_ids.masked_fill(~padding_mask, 0)
        p = self.q_proj.in_features // self.n_heads
        q, k = (f(x).unflatten(-1, (-1, p)) for f in (self.q_proj, self.k_proj))
        cos, sin = rope_cos_sin(position_ids, p, self.rope_base, dtype=x.dtype)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        inner_cache = None
        if isinstance(self.inner, SSD):
            v, inner_cache = self.inner(
                x,
                position_ids,
                padding_mask=padding_mask,
                cache=None if cache is None else cache.inner,
            )
        else:
            v = self.inner(x)
        v = v.unflatten(-1, (-1, p)).to(q.dtype)  # autocast may have left it wide
        if cache is not None:
            for name, new, old in (("k", k, cache.k), ("v", v, cache.v)):
                if old.shape[2:] != new.shape[2:]:
                    raise ValueError(
                        f"the cache holds {name} of {tuple(old.shape[2:])} heads and widths, the "
                        f"layer makes {tuple(new.shape[2:])}: it is that of another layer"
                    )
        cache = _extended(cache, k, v, padding_mask, position_ids, inner_cache)
        y = self._read(q, cache)
        return self.out_proj(y.flatten(2)), cache

    def _read(self, q, cache):
        n_queries, n_keys = q.shape[1], cache.k.shape[1]
        if self.mask is None:
            allowed = None
            if cache.real is not None:
                allowed = causal_mask(n_queries, n_keys, real=cache.real)
            return attention(q, cache.k, cache.v, allowed=allowed)
        allowed = causal_mask(n_queries, n_keys, real=cache.real, device=q.device)
        bias = self.mask(cache.v, cache.position_ids)
        kept = self.mask.keeps(bias, allowed)
        if kept is None:
            return attention(q, cache.k, cache.v, allowed=allowed, bias=bias)
        kept = _own_if_empty(kept)
        if isinstance(self.mask, ContentMask):
            return attention(q, cache.k, cache.v, allowed=kept, bias=bias)
        # Rounded gates: the value is that of the kept keys, the gradient that of the soft gates.
        hard = attention(q, cache.k, cache.v, allowed=kept)
        if not torch.is_grad_enabled():
            return hard
        soft = attention(q, cache.k, cache.v, allowed=allowed, bias=bias)
        return soft + (hard - soft).detach()


class QCAttn(InnerFuncAttn):
    """Quadratic causal attention with rotary positions: the inner function is a linear map.

    Args:
        d_model, n_heads, n_kv_heads, rope_base, mask, max_positions, round, keep: as in
            `InnerFuncAttn`.

    Raises:
        ValueError: as `InnerFuncAttn` does.

    Source: WM §2 and §3.4, QCAttn.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        n_kv_heads: int | None = None,
        rope_base: float | int = 10000.0,
        mask: Mask | None = None,
        max_positions: int | None = None,
        round: bool = False,
        keep: int | None = None,
    ):
        super().__init__(
            d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            rope_base=rope_base,
            mask=mask,
            inner="linear",
            max_positions=max_positions,
            round=round,
            keep=keep,
        )


def _extended(cache, k, v, padding_mask, position_ids, inner):
    """The cache with this call's tokens appended."""
    if cache is None:  # the caller's own tensors may change after the call
        real = None if padding_mask is None else padding_mask.clone()
        return AttentionCache(k, v, real, position_ids.clone(), inner)
    real = None
    if padding_mask is not None or cache.real is not None:
        old, new = (
            torch.ones(ids.shape, dtype=torch.bool, device=ids.device) if mask is None else mask
            for mask, ids in ((cache.real, cache.position_ids), (padding_mask, position_ids))
        )
        real = torch.cat([old, new], dim=1)
    k, v, position_ids = (
        torch.cat([old, new], dim=1)
        for old, new in ((cache.k, k), (cache.v, v), (cache.position_ids, position_ids))
    )
    return AttentionCache(k, v, real, position_ids, inner)


def _own_if_empty(allowed):
    """Let every query that may look nowhere look at its own token."""
    n_queries, n_keys = allowed.shape[-2:]
    own = torch.ones_like(allowed).tril(n_keys - n_queries).triu(n_keys - n_queries)
    return allowed | (own & ~allowed.any(dim=-1, keepdim=True))


def _check_qkv(q, k, v, bias):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have the 4 axes (b, l, heads, p), got {tuple(x.shape)}")
        if x.dtype != q.dtype or not x.is_floating_point():
            raise ValueError(f"q, k and v must share a floating dtype, got {q.dtype}, {x.dtype}")
    (b, t, h, p), s = q.shape, k.shape[1]
    if t > s:
        raise ValueError(f"there are {t} queries, the last of only {s} keys")
    for name, x in (("k", k), ("v", v)):
        groups = x.shape[2]
        if x.shape != (b, s, groups, p):
            raise ValueError(f"{name} must be {(b, s, 'groups', p)}, got {tuple(x.shape)}")
        if groups == 0 or h % groups:
            raise ValueError(f"the groups of {name} must divide the heads: {groups}, {h}")
    if bias is not None and bias.shape != (b, h, s):
        raise ValueError(f"bias must be (b, h, s) = {(b, h, s)}, got {tuple(bias.shape)}")


def _check_allowed(allowed, shape):
    if allowed.dtype != torch.bool:
        raise ValueError(f"allowed must be boolean, True to look; got {allowed.dtype}")
    fits = 2 <= allowed.ndim <= 4 and all(
        size in (1, full)
        for size, full in zip(reversed(allowed.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"allowed must fit (b, h, t, s) = {shape}, got {tuple(allowed.shape)}")
    if not bool(allowed.any(dim=-1).all()):
        raise ValueError("allowed leaves a query nothing to attend to; let it see its own token")
