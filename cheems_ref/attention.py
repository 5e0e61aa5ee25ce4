"""Inner-function attention: attention whose values come from a function of x, and masks that learn.

    y_t = Σ_s softmax_s(q_t·k_s / √p + bias_s) v_s        over the s that t may see

    code       shape            in the papers
    q          (b, t, h, p)     Q, rotated by its position
    k          (b, s, g, p)     K, rotated by its position
    v          (b, s, h, p)     V, of the inner function f(x); (b, s, g, p) for "linear"
    bias       (b, h, s)        log of the dynamic mask: 0 keeps a key, a negative number fades it
    allowed    (b, h, t, s)     the mask: causal, padding, and the keys that a dynamic mask drops

Head i reads the keys of group i // (h / g). The three inner functions (WM §3.2, Ch §3.2):

    "ssd"        v = SSD(x): the output of a recurrence at every token is a value
    "retrieved"  v = x ∘ Σ_j ω_j U_j: rows of a table, chosen and weighted by similarity
    "linear"     v = W x: ordinary attention, the control

The two dynamic masks are biases, added before the softmax so that they receive a gradient. They can
also drop keys:

    GateMask     one learned gate per head and position; hard=True drops keys whose gate is below ½
    ContentMask  a bias computed from the value of the key; k_keys drops all but k keys per query

`QCAttn` (the papers' name, for quadratic and causal) takes any inner function and any mask, and is
ordinary attention by default. `InnerFuncAttn` is `QCAttn` with an SSD for its values.
`attention` is torch's fused operator, `naive_attention` the formula it is checked against.
Notebook 05 runs the published listings and shows what each of them does.

Wrong shapes, dtypes and sizes raise ValueError, and sizes that are no whole numbers TypeError, with
the name of the argument (check.py). The layers check shapes but never inspect contents, which would
synchronise with the device.
Source: WM §3.2, B.3; Ch §3.2, A.3; the content mask follows the authors' later Doge models.
"""

import inspect
import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, einsum, nn

from cheems_ref import check
from cheems_ref.precision import Float32Linear, autocast_off
from cheems_ref.rope import RotaryTable, _apply_rope, _cos_sin, check_turnable

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
    """Return which keys each query may see: itself and the real tokens before it.

    The queries are the last n_queries of the n_keys tokens, so query t is token
    t + n_keys - n_queries: with a cache there are more keys than queries.

    A hidden key has weight 0 and cannot affect a query, as long as keys and values are finite:
    0 · NaN is NaN, so a NaN or an infinity at one token can reach the tokens before it. Padded
    positions may hold anything, since the layers set them to 0 first.

    Args:
        n_queries: t, at most n_keys.
        n_keys: s, cached keys included.
        real: False for padding; None without padding.
        device: of the mask; with `real`, the mask is on the device of `real`.

    Returns:
        (t, s), or (b, 1, t, s) with `real`; True where the query may look. A query whose row would
        be empty, because it is left padding, sees itself.

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
    """Let a query whose row is empty attend to itself."""
    n_queries, n_keys = allowed.shape[-2:]
    own = torch.ones_like(allowed).tril(n_keys - n_queries).triu(n_keys - n_queries)
    return allowed | (own & ~allowed.any(dim=-1, keepdim=True))


def naive_attention(
    q: Queries, k: Keys, v: Values, *, allowed: Allowed, bias: Bias | None = None
) -> Queries:
    """Compute softmax attention from its formula, with all scores and weights in memory.

    Args:
        q: one query per head.
        k: keys of g groups; g divides h.
        v: values; their number of groups may differ from g, and divides h.
        allowed: broadcastable to (b, h, t, s), True where a query may look; no row is empty.
        bias: added to the scores of each key; finite.

    Returns:
        y in the dtype of q; computed in float32 for 16-bit inputs.

    Source: WM §3.2; Ch eqs. 9 and 10. There the scale 1/√p is missing and the mask
    comes after the softmax.
    """
    _check(q, k, v, allowed, bias)
    h, p = q.shape[2:]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (_one_per_head(x, h).to(wide) for x in (k, v))
    with autocast_off(q.device):
        scores = einsum("bthp,bshp->bhts", q.to(wide), keys) / math.sqrt(p)
        if bias is not None:
            scores = scores + bias[:, :, None].to(wide)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        return einsum("bhts,bshp->bthp", weights, values).to(q.dtype)


def _one_per_head(x, h):
    """Give every head the keys or values of its group; no copy if g is 1 or h."""
    return repeat(x, "b s g p -> b s (g r) p", r=h // x.shape[2])


def attention(
    q: Queries, k: Keys, v: Values, *, allowed: Allowed | None = None, bias: Bias | None = None
) -> Queries:
    """Compute `naive_attention` with torch's fused operator, scaled_dot_product_attention.

    Arguments and result are as in `naive_attention`. allowed=None is the causal mask, with the
    queries as the last t of the s tokens.

    Source: Ch Listing 3; torch.nn.functional.scaled_dot_product_attention.
    """
    _check(q, k, v, allowed, bias)
    return _attention(q, k, v, allowed, bias)


def _attention(q, k, v, allowed, bias=None):
    (b, t, h, p), (s, g) = q.shape, k.shape[1:3]
    # torch's own causal mask lets query i see keys 0 to i, which is right if t = s. A single query
    # is the last token: it may see every key and needs no mask.
    maskless = allowed is None and bias is None and t in (1, s)
    if allowed is None and not maskless:
        allowed = causal_mask(t, s, device=q.device)
    mask, wide = allowed, q.dtype
    if bias is not None:  # 16 bits would round a small bias away
        wide = torch.promote_types(q.dtype, torch.float32)
        mask = bias[:, :, None].to(wide).masked_fill(~allowed, -torch.inf)
    # Keys and values of fewer groups than heads are read in place, except by many queries on a GPU:
    # there each head gets a copy, for torch's faster kernels.
    grouped = g < h and v.shape[2] == g and (t == 1 or q.is_cpu)
    if not grouped:
        k, v = (_one_per_head(x, h) for x in (k, v))
    Q, K, V = (x.to(wide).transpose(1, 2) for x in (q, k, v))  # (b, h, l, p)
    if grouped and t == 1:  # the heads of a group read the same keys, like queries of one head
        Q = Q.reshape(b, g, h // g, p)
        mask = None if mask is None else mask.expand(b, h, 1, s).reshape(b, g, h // g, s)
    # An `if`: while torch compiles for any length, a comparison is a symbol and not a bool.
    causal = gqa = False
    if maskless and t > 1:
        causal = True
    if grouped and t > 1:
        gqa = True
    with autocast_off(q.device):  # autocast would narrow all of them again
        y = F.scaled_dot_product_attention(
            Q, K, V, attn_mask=mask, is_causal=causal, enable_gqa=gqa
        )
    return y.to(q.dtype).reshape(b, h, t, p).transpose(1, 2)


class GateMask(nn.Module):
    """A learned gate in (0, 1) per head and position; its logarithm is added to the key's scores.

    This is the paper's dynamic mask with a gradient: a gate near 0 hides the key at its position.
    The gate depends on the absolute position and not on the token, so this is the one part of the
    architecture whose output changes when all positions are shifted. Gates start at 0.88.

    With hard=True a gate below 1/2 hides its position from all queries, and a gate above 1/2 hides
    nothing; a query with nothing left sees itself. The gradient passes straight through: queries,
    keys, values and gates get that of attention with soft gates (`QCAttn._read`).

    Args:
        n_heads: h.
        max_positions: number of positions in the table.
        hard: whether to round the gates to 0 and 1.

    Source: WM eq. 4 and Listing 6, made additive: as printed no gradient reaches it.
    """

    def __init__(self, n_heads: int, max_positions: int, *, hard: bool = False):
        super().__init__()
        check.sizes(n_heads=n_heads, max_positions=max_positions)
        self.hard = hard
        self.logit = nn.Parameter(torch.empty(n_heads, max_positions))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every gate to 0.88."""
        nn.init.constant_(self.logit, 2.0)

    def forward(self, v: Values, position_ids: Int[Tensor, "b s"]) -> Bias:
        """Return the bias of every key, log(gate) ≤ 0, from its position; 16-bit gates in float32.

        Args:
            v: values; unused.
            position_ids: positions of the keys, int64 or int32, each in [0, max_positions). For
                others torch raises IndexError (on a GPU, an assertion fails).
        """
        check.dtypes(check.INDICES, position_ids=position_ids)
        wide = torch.promote_types(self.logit.dtype, torch.float32)
        gates = F.embedding(position_ids, F.logsigmoid(self.logit.to(wide)).T)
        return rearrange(gates, "b s h -> b h s")

    def keeps(self, bias: Bias, allowed: Allowed) -> Allowed | None:
        """Return which of the allowed keys to keep; None for all."""
        if not self.hard:
            return None
        return allowed & (bias >= math.log(0.5))[:, :, None]


class ContentMask(nn.Module):
    """A bias on a key, computed from its values: bias_s = -a softplus(u·v_s + ν) ≤ 0, per head.

    v_s holds the values of all heads together, u is `dt_proj`, ν `dt_bias`, a = exp(`A_log`). The
    form is that of SSD's A Δ. exp(bias) is the share of the key that remains, about 0.9 at first. A
    token can learn to hide itself from every later token.

    With k_keys=n each query keeps the n allowed keys of largest bias and sees no others; of equal
    biases it keeps the later key. Rounding in the matrix product may give equal tokens biases that
    differ in the last digit. A float64 layer compares biases in float32, where they are equal
    again; in a float32 layer the larger one wins.
    With k_keys=1 the one weight is always 1, and queries, keys and biases receive no gradient.

    Args:
        d_values: width of all values of a token together.
        n_heads: h.
        k_keys: n ≥ 1; None to keep all.

    Source: the authors' later Doge models (transformers, `modeling_doge`), which add
    exp(A softplus(u·v)) with A = 0 at the start. Here -a softplus(u·v + ν) is added, with a = 1 at
    the start, so that the bias is log(share) and u has a gradient from the start.
    """

    def __init__(self, d_values: int, n_heads: int, *, k_keys: int | None = None):
        super().__init__()
        check.sizes(d_values=d_values, n_heads=n_heads, k_keys=k_keys)
        self.k_keys = k_keys
        self.dt_proj = Float32Linear(d_values, n_heads)
        self.dt_bias = nn.Parameter(torch.empty(n_heads))
        self.A_log = nn.Parameter(torch.empty(n_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every bias to about log 0.9."""
        nn.init.constant_(self.dt_bias, math.log(math.expm1(0.1)))
        nn.init.zeros_(self.A_log)

    def forward(self, v: Values, position_ids: Int[Tensor, "b s"]) -> Bias:
        """Return the bias of every key from its value, in float32, or float64 for a float64 layer.

        Args:
            v: values.
            position_ids: unused.
        """
        dt = self.dt_proj(v.flatten(2))
        dt = F.softplus(dt + self.dt_bias.to(dt.dtype))
        return rearrange(-self.A_log.to(dt.dtype).exp() * dt, "b s h -> b h s")

    def keeps(self, bias: Bias, allowed: Allowed) -> Allowed | None:
        """Return which of the allowed keys to keep; None for all."""
        if self.k_keys is None or self.k_keys >= bias.shape[-1]:
            return None
        # Flipped, so that a stable sort ranks the later of two equal keys first; in float32, since
        # in float64 the rounding of a matrix product would separate equal tokens.
        seen = bias.float()[:, :, None].masked_fill(~allowed, -torch.inf).flip(-1)
        rank = seen.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return allowed & (rank < self.k_keys).flip(-1)


class AttentionCache(NamedTuple):
    """The cache of an attention layer: one entry per token so far, padding included.

    k (b, s, g, p), rotated; v (b, s, h, p), or in g groups for linear values; real (b, s), False
    for padding, or None without padding; position_ids (b, s); inner, the value module's own
    cache, if it keeps one, as SSD does.
    """

    k: Tensor
    v: Tensor
    real: Tensor | None
    position_ids: Tensor
    inner: Any


class QCAttn(nn.Module):
    """Quadratic causal attention with rotary positions; with inner="linear", ordinary attention.

    Args:
        d_model: width of input and output.
        n_heads: h, a divisor of d_model; d_model / n_heads is even, for the rotation of pairs.
        n_kv_heads: g, groups of keys and of linear values, a divisor of h; None for h.
        rope_base: as in `rope_frequencies`.
        mask: "gate", "content", None for the causal mask alone, or a module of your own with the
            methods `forward` and `keeps` of `ContentMask`. With an attribute `hard` that is True
            the heads attend to the keys that `keeps` returns, without the bias, and hand back the
            gradient of attention with the bias over all allowed keys.
        inner: "linear", "ssd", "retrieved", or a module of your own that computes the values
            (b, l, d) from x, p numbers for each head. A module whose forward has no argument
            `cache` is called as `inner(x)`. One that has is called like a layer, as
            `inner(x, position_ids, padding_mask=, cache=, rotary=)`, and returns values and a cache
            other than None. inner=None is "linear" here, "ssd" in `InnerFuncAttn`.
        n_values, k_values: as in `RetrievedValues`, for inner="retrieved".
        d_state: state width of the inner SSD, for inner="ssd"; its position is "rope".
        max_positions: size of the table of mask="gate", required there and ignored elsewhere.
        hard: whether mask="gate" rounds its gates, as in `GateMask`; no field of `ModelConfig`.
        k_keys: keys that mask="content" keeps per query, as in `ContentMask`.

    Source: WM §2 and §3.4, QCAttn.
    """

    default_inner = "linear"  # what inner=None means

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        n_kv_heads: int | None = None,
        rope_base: float | int = 10000.0,
        mask: Mask | nn.Module | None = None,
        inner: Inner | nn.Module | None = None,
        n_values: int = 64,
        k_values: int = 2,
        d_state: int = 64,
        max_positions: int | None = None,
        hard: bool = False,
        k_keys: int | None = None,
    ):
        super().__init__()
        g = n_heads if n_kv_heads is None else n_kv_heads
        check.sizes(d_model=d_model, n_heads=n_heads, n_kv_heads=g)
        check.multiple(d_model=d_model, n_heads=n_heads)
        check.multiple(n_heads=n_heads, n_kv_heads=g)
        check.numbers("(0, inf)", rope_base=rope_base)
        p = d_model // n_heads
        check_turnable(**{"d_model / n_heads": p})
        inner = self.default_inner if inner is None else inner
        if not isinstance(inner, nn.Module):
            check.choice(Inner, inner=inner)
        self.d_model, self.n_heads, self.rope_base = d_model, n_heads, rope_base
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, g * p, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        d_values = g * p if inner == "linear" else d_model
        if isinstance(inner, nn.Module):
            self.inner = inner
        elif inner == "linear":
            self.inner = nn.Linear(d_model, d_values, bias=False)
        elif inner == "retrieved":
            sizes = dict(n_values=n_values, k_values=k_values)
            self.inner = RetrievedValues(d_model, n_heads=n_heads, **sizes)
        else:  # "ssd"
            from cheems_ref.ssd import SSD  # here, so that nothing else needs ssd.py

            self.inner = SSD(d_model, n_heads=n_heads, d_state=d_state, rope_base=rope_base)
        self.inner_has_cache = "cache" in inspect.signature(self.inner.forward).parameters
        self.mask = _make_mask(mask, d_values, n_heads, max_positions, hard, k_keys)

    def forward(
        self,
        x: Tokens,
        position_ids: Int[Tensor, "b l"],
        *,
        padding_mask: Bool[Tensor, "b l"] | None = None,
        cache: AttentionCache | None = None,
        rotary: RotaryTable | None = None,
    ) -> tuple[Tokens, AttentionCache]:
        """Let each token of this call read itself and the tokens before it.

        Args:
            x: tokens.
            position_ids: int64 or int32, ≥ 0: the index of each token among the real tokens of its
                row, continued from the cache. Entries at padding are ignored.
            padding_mask: True for real tokens; None for all. Padding is never read.
            cache: returned by an earlier call; None at the start of the sequence.
            rotary: a table of cosines and sines that the layers of a model share; it is used only
                if it was made from this very tensor of position_ids.

        Returns:
            y, undefined at padded positions, and the cache for the next call.
        """
        check.mixer_call(x, self.d_model, position_ids, padding_mask)
        check.fits_weights(x, self.q_proj)
        if padding_mask is not None:
            x = x.masked_fill(~padding_mask[..., None], 0)
        p = self.d_model // self.n_heads
        q, k = (f(x).unflatten(-1, (-1, p)) for f in (self.q_proj, self.k_proj))
        cos, sin = _cos_sin(position_ids, p, self.rope_base, x.dtype, rotary)
        q, k = _apply_rope(q, cos, sin), _apply_rope(k, cos, sin)
        v, inner_cache = self._values(x, position_ids, padding_mask, cache, rotary)
        v = v.unflatten(-1, (-1, p)).to(q.dtype)  # under autocast v may be wider than q
        real, ids = padding_mask, position_ids.clone()  # the caller may change its tensors later
        if padding_mask is not None:
            real, ids = padding_mask.clone(), position_ids.masked_fill(~padding_mask, 0)
        new = AttentionCache(k, v, real, ids, inner_cache)
        cache = new if cache is None else _joined(cache, new)
        return self.out_proj(self._read(q, cache).flatten(2)), cache

    def _values(self, x, position_ids, padding_mask, cache, rotary):
        """Return the values, (b, l, d) or (b, l, g p) if linear, and their own cache or None."""
        if cache is not None and (cache.inner is not None) != self.inner_has_cache:
            raise ValueError("the cache is that of a layer with another inner function")
        if not self.inner_has_cache:
            return self.inner(x), None
        own = dict(padding_mask=padding_mask, cache=cache and cache.inner, rotary=rotary)
        return self.inner(x, position_ids, **own)

    def _read(self, q, cache):
        """Attend to the cached tokens, in one of three ways."""
        # 1. Without a dynamic mask. Without padding and earlier tokens, torch hides the future.
        allowed = None
        if self.mask is not None or cache.real is not None:
            allowed = causal_mask(q.shape[1], cache.k.shape[1], real=cache.real, device=q.device)
        if self.mask is None:
            return _attention(q, cache.k, cache.v, allowed)
        # 2. With a bias on every key, among the keys that the mask keeps.
        bias = self.mask(cache.v, cache.position_ids)
        kept = self.mask.keeps(bias, allowed)
        kept = allowed if kept is None else _own_if_empty(kept)
        if not getattr(self.mask, "hard", False):
            return _attention(q, cache.k, cache.v, kept, bias)
        # 3. With rounded gates, straight through: the value of attention without the dropped keys
        # and without a bias, and the gradient of attention with the bias and all keys.
        y = _attention(q, cache.k, cache.v, kept)
        y_soft = _attention(q, cache.k, cache.v, allowed, bias) if torch.is_grad_enabled() else y
        return y.detach() + (y_soft - y_soft.detach())  # exactly y, in any dtype


class RetrievedValues(nn.Module):
    """Values from a table: v = x ∘ Σ_j ω_j U_j over the k rows most similar to the token.

    Every head has its own queries, half as wide as the head. It scores the n_values keys and sums
    the k best rows, weighted by a softmax over their scores. Queries and keys learn through these
    weights; with k_values = 1 the weight is always 1, and they do not learn.

    Args:
        d_model: width of x, a multiple of n_heads.
        n_heads: h.
        n_values: rows of the table.
        k_values: rows per token and head, at most n_values.

    Source: WM eq. 3, Listing 7, Table 6. Weights, random keys and n_values are ours.
    """

    def __init__(self, d_model: int, *, n_heads: int, n_values: int, k_values: int):
        super().__init__()
        check.sizes(d_model=d_model, n_heads=n_heads, n_values=n_values, k_values=k_values)
        check.multiple(d_model=d_model, n_heads=n_heads)
        if k_values > n_values:
            raise ValueError(f"k_values must be in [1, n_values = {n_values}], got {k_values}")
        self.d_model, self.n_heads, self.k_values = d_model, n_heads, k_values
        p, m = d_model // n_heads, max(1, d_model // n_heads // 2)
        self.query_proj = nn.Linear(d_model, n_heads * m, bias=False)
        self.keys = nn.Parameter(torch.randn(n_heads, n_values, m))
        self.values = nn.Parameter(torch.randn(n_heads, n_values, p))

    def reset_parameters(self) -> None:
        """Draw keys and rows from a standard normal distribution."""
        nn.init.normal_(self.keys)
        nn.init.normal_(self.values)

    def weights(self, x: Tokens) -> Float[Tensor, "b l h r"]:
        """Return the weight of each row for each token: softmax over the k best, 0 for the rest.

        Scores and weights are in float32, or in float64 for a float64 layer.
        """
        check.shapes({"d": self.d_model}, x=(x, "b l d"))
        check.fits_weights(x, self.query_proj)
        queries = rearrange(self.query_proj(x), "b l (h m) -> b l h m", h=self.n_heads)
        wide = torch.promote_types(self.keys.dtype, torch.float32)
        with autocast_off(x.device):
            scores = einsum("blhm,hrm->blhr", queries.to(wide), self.keys.to(wide))
            best = (scores / math.sqrt(queries.shape[-1])).topk(self.k_values, dim=-1)
            weights = best.values.softmax(dim=-1)
        return torch.zeros_like(scores).scatter(-1, best.indices, weights)

    def forward(self, x: Tokens) -> Tokens:
        """Return the values; each depends on its own token only."""
        rows = einsum("blhr,hrp->blhp", self.weights(x).to(self.values.dtype), self.values)
        return x * rearrange(rows, "b l h p -> b l (h p)")


class InnerFuncAttn(QCAttn):
    """Attention whose values are computed by an inner function, an SSD by default.

    Queries and keys stay linear: their one purpose is to be compared. "ssd" and "retrieved" give
    one value per head for any n_kv_heads. The arguments are those of `QCAttn`.

    Source: WM §3.2 and Listing 7; Ch §3.2 and Listing 3.
    """

    default_inner = "ssd"


def _make_mask(mask, d_values, n_heads, max_positions, hard, k_keys):
    """Return the module of a dynamic mask, given its name or the module; None without a mask."""
    if hard and mask != "gate":
        raise ValueError(f"hard belongs to mask='gate', got mask={mask!r}")
    if k_keys is not None and mask != "content":
        raise ValueError(f"k_keys = {k_keys} belongs to mask='content', got mask={mask!r}")
    if mask is None or isinstance(mask, nn.Module):
        return mask
    check.choice(Mask, mask=mask)
    if mask == "content":
        return ContentMask(d_values, n_heads, k_keys=k_keys)
    if max_positions is None:
        raise ValueError("mask='gate' needs max_positions, the length of its table")
    return GateMask(n_heads, max_positions, hard=hard)


def _joined(old, new):
    """Append the tokens of one cache to another."""
    known = dict(b=new.k.shape[0], g=new.k.shape[2], u=new.v.shape[2], p=new.k.shape[3])
    check.shapes(known, **{"cache.k": (old.k, "b s g p"), "cache.v": (old.v, "b s u p")})
    check.dtypes([new.k.dtype], **{"cache.k": old.k, "cache.v": old.v})
    k, v = torch.cat([old.k, new.k], dim=1), torch.cat([old.v, new.v], dim=1)
    ids = torch.cat([old.position_ids, new.position_ids], dim=1)
    if old.real is None and new.real is None:
        return AttentionCache(k, v, None, ids, new.inner)
    real = [
        torch.ones_like(c.position_ids).bool() if c.real is None else c.real for c in (old, new)
    ]
    return AttentionCache(k, v, torch.cat(real, dim=1), ids, new.inner)


def _check(q, k, v, allowed, bias):
    """Reject shapes and dtypes that do not fit, and masks with an empty row."""
    check.floating(q=q)
    check.dtypes([q.dtype], k=k, v=v)
    n = check.shapes(q=(q, "b t h p"), k=(k, "b s g p"), bias=(bias, "b h s"))
    check.shapes(n, v=(v, "b s u p"))  # u: the groups of v
    b, h, t, s = n["b"], n["h"], n["t"], n["s"]
    if t > s:
        raise ValueError(f"there are {t} queries, the last of only {s} keys")
    check.multiple(**{"heads of q": h, "groups of k": k.shape[2]})
    check.multiple(**{"heads of q": h, "groups of v": v.shape[2]})
    if allowed is None:
        return
    check.dtypes([torch.bool], allowed=allowed)
    whole, shape = (b, h, t, s), (1,) * (4 - allowed.ndim) + tuple(allowed.shape)
    fits = len(shape) == 4 and all(a in (1, size) for a, size in zip(shape, whole, strict=True))
    if not (allowed.ndim >= 2 and fits):
        raise ValueError(f"allowed must fit (b, h, t, s) = {whole}, got {tuple(allowed.shape)}")
    if check.values_can_be_read() and not bool(allowed.any(dim=-1).all()):
        raise ValueError("allowed leaves a query nothing to attend to; let it see its own token")


class PartialSoftmax(NamedTuple):
    """What a slice of keys adds to a softmax: weighted / total is attention over that slice.

    largest (b, t, h, 1): the largest score. total (b, t, h, 1): the sum of exp(score - largest).
    weighted (b, t, h, p): the same sum, with each term times its key's value.
    """

    largest: Tensor
    total: Tensor
    weighted: Tensor


def online_softmax(
    scores: Float[Tensor, "b h t s"], values: Float[Tensor, "b s h p"]
) -> PartialSoftmax:
    """Return what a slice of keys adds to a softmax, for `join_softmax` to add another slice.

    Hidden keys have the score -inf; a slice may hide all of its keys. Both have one dtype.

    Source: Milakov and Gimelshein (2018); Dao et al. (2022), FlashAttention, §3.1.
    """
    check.floating(scores=scores)
    check.dtypes([scores.dtype], values=values)
    check.shapes(scores=(scores, "b h t s"), values=(values, "b s h p"))
    scores = scores.movedim(1, 2)  # (b, t, h, s)
    lowest = torch.finfo(scores.dtype).min  # where all keys are hidden: -inf - -inf would be NaN
    largest = scores.amax(dim=-1, keepdim=True).clamp(min=lowest)
    weights = (scores - largest).exp()
    weighted = einsum("bths,bshp->bthp", weights, values)
    return PartialSoftmax(largest, weights.sum(dim=-1, keepdim=True), weighted)


def join_softmax(one: PartialSoftmax, other: PartialSoftmax) -> PartialSoftmax:
    """Return what two slices of keys add together: the same in any order, and any grouping."""
    largest = torch.maximum(one.largest, other.largest)
    a, b = (one.largest - largest).exp(), (other.largest - largest).exp()
    total = a * one.total + b * other.total
    return PartialSoftmax(largest, total, a * one.weighted + b * other.weighted)
