"""Inner-function attention: attention whose values are computed, and masks that learn.

Every token asks with a query, is found by a key and answers with a value:

    y_t = Σ_s softmax_s(q_t·k_s / √p + bias_s) v_s        over the s that t may see

    code       shape            in the papers
    q          (b, t, h, p)     Q, turned by its position
    k          (b, s, g, p)     K, turned by its position
    v          (b, s, h, p)     V, of the inner function f(x)
    bias       (b, h, s)        log of the dynamic mask: 0 keeps a key, the lower the less
    allowed    (b, h, t, s)     the mask: causal, padding, and what a dynamic mask takes away

Head i reads the keys of group i // (h / g). The three inner functions (WM §3.2, Ch §3.2):

    "ssd"        v = SSD(x): the state of a recurrence at every token is a value
    "retrieved"  v = x ∘ Σ_j ω_j U_j: rows of a table, chosen and weighted by similarity
    "linear"     v = W x: ordinary attention, the control

and the two dynamic masks, both additive before the softmax, so that they receive a gradient:

    GateMask     one learned gate per head and position
    ContentMask  a penalty computed from the value of the key

`QCAttn` is ordinary attention, `InnerFuncAttn` the same with values from one of these functions.
`attention` is torch's fused operator, `naive_attention` the formula it is checked against.
The published listings, and what each does when it is run, are in notebook 05.

Wrong shapes, dtypes and sizes raise ValueError with the argument and the numbers (check.py). The
layers look at shapes, not at values.
Source: WM §3.2, B.3; Ch §3.2, A.3; the content mask follows the authors' later Doge models.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, einsum, nn

from cheems_ref import check
from cheems_ref.precision import autocast_off
from cheems_ref.rope import RotaryTable, _apply_rope, _cos_sin, check_turnable
from cheems_ref.ssd import SSD, SSDCache, expand_groups

Mask = Literal["gate", "content"]
Inner = Literal["ssd", "retrieved", "linear"]

Queries = Float[Tensor, "b t h p"]
Keys = Float[Tensor, "b s g p"]
Values = Float[Tensor, "b s _ p"]
Bias = Float[Tensor, "b h s"]
Allowed = Bool[Tensor, "... t s"]
Tokens = Float[Tensor, "b l d"]


def causal_mask(
    n_queries: int,
    n_keys: int,
    *,
    real: Bool[Tensor, "b s"] | None = None,
    device: torch.device | None = None,
) -> Allowed:
    """Return which keys each query may see: itself and what came before, padding excepted.

    The queries are the last n_queries of the n_keys tokens, so query t stands at token
    t + n_keys - n_queries: with a cache there are more keys than queries.

    A hidden key has the weight 0 and cannot affect a query, as long as keys and values are finite:
    0 · NaN is NaN, so a NaN or an infinity at one token may reach the tokens before it. Padded
    positions may hold anything, since the layers set them to 0 first.

    Args:
        n_queries: t, at most n_keys.
        n_keys: s, cached keys included.
        real: False for padding; None where there is none.
        device: where to make the mask; that of `real` if there is one.

    Returns:
        (t, s), or (b, 1, t, s) with `real`; True where the query may look. A query whose row would
        be empty, one at padding in front, sees itself.

    Source: WM §3.2 and Listing 5, with the offset that a cache needs.
    """
    if not 0 <= n_queries <= n_keys:
        raise ValueError(f"there are {n_queries} queries, the last of only {n_keys} keys")
    device = device if real is None else real.device
    token = torch.arange(n_queries, device=device)[:, None] + (n_keys - n_queries)
    allowed = torch.arange(n_keys, device=device) <= token
    if real is None:
        return allowed
    check.dtypes([torch.bool], real=real)
    check.shapes({"s": n_keys}, real=(real, "b s"))
    return _own_if_empty(allowed & real[:, None, None, :])


def _own_if_empty(allowed):
    """Let every query that may look nowhere look at its own token."""
    n_queries, n_keys = allowed.shape[-2:]
    own = torch.ones_like(allowed).tril(n_keys - n_queries).triu(n_keys - n_queries)
    return allowed | (own & ~allowed.any(dim=-1, keepdim=True))


def naive_attention(
    q: Queries, k: Keys, v: Values, *, allowed: Allowed, bias: Bias | None = None
) -> Queries:
    """Compute softmax attention as its formula says, scores and weights in full.

    Args:
        q: one query per head.
        k: keys of g groups; g divides h.
        v: values, in as many groups as the keys or in others that divide h.
        allowed: broadcastable to (b, h, t, s), True where a query may look; no row is empty.
        bias: added to the scores of each key; finite.

    Returns:
        In the dtype of q; computed in float32 for sixteen bits.

    Source: WM §3.2; Ch eqs. 9 and 10, with the scale 1/√p and the mask inside the softmax.
    """
    _check(q, k, v, allowed, bias)
    h, p = q.shape[2:]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (expand_groups(x, h).to(wide) for x in (k, v))
    with autocast_off(q.device):
        scores = einsum("bthp,bshp->bhts", q.to(wide), keys) / math.sqrt(p)
        if bias is not None:
            scores = scores + bias[:, :, None].to(wide)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        return einsum("bhts,bshp->bthp", weights, values).to(q.dtype)


def attention(
    q: Queries, k: Keys, v: Values, *, allowed: Allowed | None = None, bias: Bias | None = None
) -> Queries:
    """Compute the same with torch's scaled_dot_product_attention.

    Arguments and result are those of `naive_attention`; allowed=None means causal, the
    queries being the last t of the s tokens.

    Source: Ch Listing 3; torch.nn.functional.scaled_dot_product_attention.
    """
    _check(q, k, v, allowed, bias)
    return _attention(q, k, v, allowed, bias)


def _attention(q, k, v, allowed, bias=None):
    dtype, (t, h), s = q.dtype, q.shape[1:3], k.shape[1]
    mask, causal = allowed, False
    plain = allowed is None and bias is None  # then torch may choose its fastest kernels
    if plain and t == s and t > 1:
        causal = True
    elif allowed is None and not (plain and t == 1):
        mask = causal_mask(t, s, device=q.device)
    # On a CPU torch reads the keys of a group where they lie. Its GPU kernels that take a mask or
    # float32 do not know groups, and torch would write out all scores instead.
    grouped = k.shape[2] == v.shape[2] < h and (q.is_cpu or (t == 1 and mask is None))
    if not grouped:  # where values come one per head, this copies the keys alone
        k, v = (expand_groups(x, h) for x in (k, v))
    q, k, v = (rearrange(x, "b l h p -> b h l p") for x in (q, k, v))
    if bias is not None:  # which sixteen bits could not hold
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        mask = bias[:, :, None].to(q.dtype).masked_fill(~mask, -torch.inf)
    options = dict(attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    with autocast_off(q.device):  # it would narrow them, and the bias, again
        y = F.scaled_dot_product_attention(q, k, v, **options)
    return rearrange(y, "b h l p -> b l h p").to(dtype)


class GateMask(nn.Module):
    """A learned gate in (0, 1) per head and position, laid on a key as its logarithm.

    The paper's dynamic mask with a gradient: a gate near 0 hides whatever stands at its position.
    It knows absolute positions and no contents, and it is the one part of this architecture whose
    output changes when all positions are moved. Gates start at 0.88.

    With hard=True a gate below 1/2 hides its position completely and one above not at all, while
    the gradient is that of the gate before rounding (straight through).

    Args:
        n_heads: h.
        max_positions: number of positions in the table.
        hard: whether the gates are rounded to 0 and 1.

    Source: WM eq. 4 and Listing 6, made additive: as printed no gradient reaches it.
    """

    def __init__(self, n_heads: int, max_positions: int, *, hard: bool = False):
        super().__init__()
        check.sizes(n_heads=n_heads, max_positions=max_positions)
        self.hard = hard
        self.logit = nn.Parameter(torch.empty(n_heads, max_positions))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Open every gate to 0.88."""
        nn.init.constant_(self.logit, 2.0)

    def forward(self, v: Values, position_ids: Int[Tensor, "b s"]) -> Bias:
        """Return the bias of every key, log(gate) ≤ 0, from its position.

        Args:
            v: the values; not used here.
            position_ids: positions of the keys, int64 or int32, each in [0, max_positions); torch
                raises IndexError where it looks up another.
        """
        check.dtypes(check.INDICES, position_ids=position_ids)
        gates = F.embedding(position_ids, F.logsigmoid(self.logit).T)
        return rearrange(gates, "b s h -> b h s")

    def keeps(self, bias: Bias, allowed: Allowed) -> Allowed | None:
        """Return which of the allowed keys are kept; None for all."""
        return allowed & (bias >= math.log(0.5))[:, :, None] if self.hard else None


class ContentMask(nn.Module):
    """A penalty on a key, computed from its value: bias_s = -a softplus(u·v_s + ν) ≤ 0, per head.

    It has the form of SSD's A Δ, said by a token about itself: exp(bias) is the share of its key
    that is left, and a token that says "do not read me" is hidden from every later one. At the
    start the share is 0.9 or so.

    With top_k=n each query keeps the n allowed keys of the smallest penalty and sees no others; of
    penalties that are equal as float32 numbers the later key is kept. (In a float32 model equal
    tokens may differ by a rounding, and then either may be kept.) With top_k=1 the weight is 1
    whatever the scores, and queries, keys and penalties receive no gradient.

    Args:
        d_values: width of all values of a token together.
        n_heads: h.
        top_k: n ≥ 1; None to keep all.

    Source: the authors' later Doge models (transformers, `modeling_doge`), which add
    exp(a softplus(u·v)) with a starting at 0; here the exponent itself is added and -a starts at
    -1, so that it means log(share left) and u has a gradient from the start.
    """

    def __init__(self, d_values: int, n_heads: int, *, top_k: int | None = None):
        super().__init__()
        check.sizes(d_values=d_values, n_heads=n_heads, top_k=top_k)
        self.top_k = top_k
        self.dt_proj = nn.Linear(d_values, n_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(n_heads))
        self.A_log = nn.Parameter(torch.empty(n_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with penalties of about log 0.9."""
        nn.init.constant_(self.dt_bias, math.log(math.expm1(0.1)))
        nn.init.zeros_(self.A_log)

    def forward(self, v: Values, position_ids: Int[Tensor, "b s"]) -> Bias:
        """Return the bias of every key from its value, in float32 for sixteen bits.

        Args:
            v: the values.
            position_ids: not used here.
        """
        wide, v = torch.promote_types(v.dtype, torch.float32), v.to(self.dt_proj.weight.dtype)
        with autocast_off(v.device):
            dt = F.softplus(self.dt_proj(v.flatten(2)).to(wide) + self.dt_bias.to(wide))
        return rearrange(-self.A_log.to(wide).exp() * dt, "b s h -> b h s")

    def keeps(self, bias: Bias, allowed: Allowed) -> Allowed | None:
        """Return which of the allowed keys are kept; None for all."""
        if self.top_k is None or self.top_k >= bias.shape[-1]:
            return None
        # Sorted from the last key to the first, so that of equals the later comes first. As float32
        # since in float64 the rounding of a matrix product would tell equal tokens apart.
        seen = bias.float()[:, :, None].masked_fill(~allowed, -torch.inf).flip(-1)
        rank = seen.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return allowed & (rank < self.top_k).flip(-1)


class AttentionCache(NamedTuple):
    """What an attention layer remembers: one entry per token so far, padding included.

    k (b, s, g, p), turned; v (b, s, h, p), or in g groups for linear values; real (b, s), False for
    padding, or None as long as there was none; position_ids (b, s); and for inner="ssd" the cache
    of the inner SSD.
    """

    k: Tensor
    v: Tensor
    real: Tensor | None
    position_ids: Tensor
    inner: SSDCache | None


class QCAttn(nn.Module):
    """Quadratic causal attention with rotary positions, ordinary attention: v = W x.

    Args:
        d_model: width of input and output.
        n_heads: h, a divisor of d_model; d_model / n_heads is even, to be turned in pairs.
        n_kv_heads: g, groups of keys and values, a divisor of h; None for one per head.
        rope_base: as in `rope_frequencies`.
        mask: "gate", "content", or None for the causal mask alone.
        max_positions: length of the table of mask="gate", which needs it; else without meaning.
        hard: whether mask="gate" rounds its gates, as in `GateMask`.
        top_k: keys that mask="content" keeps per query, as in `ContentMask`.

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
        hard: bool = False,
        top_k: int | None = None,
    ):
        super().__init__()
        self._make_projections(d_model, n_heads, n_kv_heads, rope_base)
        self.inner = nn.Linear(d_model, self.k_proj.out_features, bias=False)
        self.mask = _make_mask(mask, self.inner.out_features, n_heads, max_positions, hard, top_k)

    def _make_projections(self, d_model, n_heads, n_kv_heads, rope_base):
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check.sizes(d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads)
        check.multiple(d_model=d_model, n_heads=n_heads)
        check.multiple(n_heads=n_heads, n_kv_heads=n_kv_heads)
        check.numbers("(0, inf)", rope_base=rope_base)
        p = d_model // n_heads
        check_turnable(**{"d_model / n_heads": p})
        self.n_heads, self.rope_base = n_heads, rope_base
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * p, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self,
        x: Tokens,
        position_ids: Int[Tensor, "b l"],
        *,
        padding_mask: Bool[Tensor, "b l"] | None = None,
        cache: AttentionCache | None = None,
        rotary: RotaryTable | None = None,
    ) -> tuple[Tokens, AttentionCache]:
        """Let each token of this call read from itself and from those before it.

        Args:
            x: tokens.
            position_ids: int64 or int32, ≥ 0, that count the real tokens of a row, going on where
                the cache ends. What they hold at padding does not matter.
            padding_mask: True for real tokens; None for all. Padding is never read.
            cache: what an earlier call returned; None at the start of the sequence.
            rotary: the table of position_ids that the layers of a model share; None to do without.

        Returns:
            y, undefined at padded positions, and the cache for the next call.
        """
        check.mixer_call(x, self.q_proj.in_features, position_ids, padding_mask)
        if padding_mask is not None:
            x = x.masked_fill(~padding_mask[..., None], 0)
        p = self.q_proj.in_features // self.n_heads
        q, k = (f(x).unflatten(-1, (-1, p)) for f in (self.q_proj, self.k_proj))
        cos, sin = _cos_sin(position_ids, p, self.rope_base, x.dtype, rotary)
        q, k = _apply_rope(q, cos, sin), _apply_rope(k, cos, sin)
        v, inner = self._values(x, position_ids, padding_mask, cache, rotary)
        v = v.unflatten(-1, (-1, p)).to(q.dtype)  # autocast may have left it wide
        if padding_mask is not None:
            position_ids = position_ids.masked_fill(~padding_mask, 0)
        cache = _extended(cache, k, v, padding_mask, position_ids, inner)
        return self.out_proj(self._read(q, cache).flatten(2)), cache

    def _values(self, x, position_ids, padding_mask, cache, rotary):
        """The values (b, l, g p), and a cache of their own where they need one."""
        if cache is not None and cache.inner is not None:
            raise ValueError("the cache is that of a layer with another inner function")
        return self.inner(x), None

    def _read(self, q, cache):
        allowed = None
        if self.mask is not None or cache.real is not None:
            allowed = causal_mask(q.shape[1], cache.k.shape[1], real=cache.real, device=q.device)
        if self.mask is None:
            return _attention(q, cache.k, cache.v, allowed)
        bias = self.mask(cache.v, cache.position_ids)
        kept = self.mask.keeps(bias, allowed)
        kept = allowed if kept is None else _own_if_empty(kept)
        if not getattr(self.mask, "hard", False):
            return _attention(q, cache.k, cache.v, kept, bias)
        # Rounded gates: the value is that of the kept keys, the gradient that of the soft gates.
        hard = _attention(q, cache.k, cache.v, kept)
        soft = _attention(q, cache.k, cache.v, allowed, bias) if torch.is_grad_enabled() else hard
        return soft + (hard - soft).detach()


class RetrievedValues(nn.Module):
    """Values from a table: v = x ∘ Σ_j ω_j U_j over the k rows most similar to the token.

    Every head asks with a query of its own, half as wide as the head, scores the n_values keys, and
    superimposes its k best rows, weighted by a softmax over their scores: through these weights
    queries and keys learn. For k_values = 1 the weight is 1, and they do not.

    Args:
        d_model: width of x, a multiple of n_heads.
        n_heads: h.
        n_values: rows of the table.
        k_values: rows that a token superimposes, at most n_values.

    Source: WM eq. 3, Listing 7 and Table 6, with weights, keys that start random, and a table of
    n_values rows.
    """

    def __init__(self, d_model: int, *, n_heads: int, n_values: int, k_values: int):
        super().__init__()
        check.sizes(d_model=d_model, n_heads=n_heads, n_values=n_values, k_values=k_values)
        check.multiple(d_model=d_model, n_heads=n_heads)
        if k_values > n_values:
            raise ValueError(f"k_values must be in [1, n_values = {n_values}], got {k_values}")
        self.n_heads, self.k_values = n_heads, k_values
        p, m = d_model // n_heads, max(1, d_model // n_heads // 2)
        self.query_proj = nn.Linear(d_model, n_heads * m, bias=False)
        self.keys = nn.Parameter(torch.empty(n_heads, n_values, m))
        self.values = nn.Parameter(torch.empty(n_heads, n_values, p))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw keys and rows anew, normal with standard deviation 1."""
        nn.init.normal_(self.keys)
        nn.init.normal_(self.values)

    def weights(self, x: Tokens) -> Float[Tensor, "b l h r"]:
        """Return each row's weight for each token: softmax over the k best, 0 for the others."""
        check.width(x, self.query_proj.in_features)
        queries = rearrange(self.query_proj(x), "b l (h m) -> b l h m", h=self.n_heads)
        with autocast_off(x.device):
            scores = einsum("blhm,hrm->blhr", queries.to(self.keys.dtype), self.keys)
            best = (scores / math.sqrt(queries.shape[-1])).topk(self.k_values, dim=-1)
            weights = best.values.softmax(dim=-1)
        return torch.zeros_like(scores).scatter(-1, best.indices, weights)

    def forward(self, x: Tokens) -> Tokens:
        """Return the values of the tokens, each from that token alone."""
        rows = einsum("blhr,hrp->blhp", self.weights(x), self.values)
        return x * rearrange(rows, "b l h p -> b l (h p)")


class InnerFuncAttn(QCAttn):
    """Attention whose values are computed by an inner function.

    Queries and keys stay linear, since what they are for is to be compared; what is read need not.

    Args:
        d_model, n_heads, n_kv_heads, rope_base, mask, max_positions, hard, top_k: as in `QCAttn`;
            "ssd" and "retrieved" give one value per head whatever n_kv_heads is.
        inner: "ssd", "retrieved" or "linear".
        n_values, k_values: as in `RetrievedValues`, for inner="retrieved".
        d_state: state width of the inner SSD, for inner="ssd".

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
        hard: bool = False,
        top_k: int | None = None,
    ):
        nn.Module.__init__(self)  # not QCAttn's, which would make linear values
        check.choice(Inner, inner=inner)
        self._make_projections(d_model, n_heads, n_kv_heads, rope_base)
        d_values = self.k_proj.out_features if inner == "linear" else d_model
        if inner == "ssd":
            self.inner = SSD(d_model, n_heads=n_heads, d_state=d_state, rope_base=rope_base)
        elif inner == "retrieved":
            self.inner = RetrievedValues(
                d_model, n_heads=n_heads, n_values=n_values, k_values=k_values
            )
        else:
            self.inner = nn.Linear(d_model, d_values, bias=False)
        self.mask = _make_mask(mask, d_values, n_heads, max_positions, hard, top_k)

    def _values(self, x, position_ids, padding_mask, cache, rotary):
        if not isinstance(self.inner, SSD):
            return super()._values(x, position_ids, padding_mask, cache, rotary)
        if cache is not None and cache.inner is None:
            raise ValueError("the cache is that of a layer with another inner function")
        own = dict(padding_mask=padding_mask, cache=cache and cache.inner, rotary=rotary)
        return self.inner(x, position_ids, **own)


def _make_mask(mask, d_values, n_heads, max_positions, hard, top_k):
    check.choice((None, "gate", "content"), mask=mask)
    if mask == "gate" and max_positions is None:
        raise ValueError("mask='gate' needs max_positions, the length of its table")
    if hard and mask != "gate":
        raise ValueError(f"hard belongs to mask='gate', got mask={mask!r}")
    if top_k is not None and mask != "content":
        raise ValueError(f"top_k = {top_k} belongs to mask='content', got mask={mask!r}")
    if mask == "gate":
        return GateMask(n_heads, max_positions, hard=hard)
    return ContentMask(d_values, n_heads, top_k=top_k) if mask == "content" else None


def _extended(cache, k, v, padding_mask, position_ids, inner):
    """The cache with this call's tokens appended."""
    if cache is None:  # the caller's own tensors may change after the call
        real = None if padding_mask is None else padding_mask.clone()
        return AttentionCache(k, v, real, position_ids.clone(), inner)
    known = dict(b=k.shape[0], g=k.shape[2], h=v.shape[2], p=k.shape[3])
    check.shapes(known, **{"cache.k": (cache.k, "b s g p"), "cache.v": (cache.v, "b s h p")})
    check.dtypes([k.dtype], **{"cache.k": cache.k, "cache.v": cache.v})
    real = None
    if padding_mask is not None or cache.real is not None:
        old, new = (
            torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
            for mask, ids in ((cache.real, cache.position_ids), (padding_mask, position_ids))
        )
        real = torch.cat([old, new], dim=1)
    pairs = (cache.k, k), (cache.v, v), (cache.position_ids, position_ids)
    k, v, position_ids = (torch.cat(pair, dim=1) for pair in pairs)
    return AttentionCache(k, v, real, position_ids, inner)


def _check(q, k, v, allowed, bias):
    check.floating(q=q)
    check.dtypes([q.dtype], k=k, v=v)
    n = check.shapes(q=(q, "b t h p"), k=(k, "b s g p"), bias=(bias, "b h s"))
    groups = check.shapes({key: n[key] for key in "bsp"}, v=(v, "b s g p"))["g"]
    if n["t"] > n["s"]:
        raise ValueError(f"there are {n['t']} queries, the last of only {n['s']} keys")
    for name, g in (("k", n["g"]), ("v", groups)):
        check.multiple(**{"heads of q": n["h"], f"groups of {name}": g})
    if allowed is None:
        return
    check.dtypes([torch.bool], allowed=allowed)
    full = tuple(n[key] for key in "bhts")
    ends = zip(reversed(allowed.shape), reversed(full), strict=False)
    if not (2 <= allowed.ndim <= 4 and all(size in (1, whole) for size, whole in ends)):
        raise ValueError(f"allowed must fit (b, h, t, s) = {full}, got {tuple(allowed.shape)}")
    if not (torch.compiler.is_compiling() or bool(allowed.any(dim=-1).all())):
        raise ValueError("allowed leaves a query nothing to attend to; let it see its own token")
