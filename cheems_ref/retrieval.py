"""Experts of one neuron each: a few of a million, found by product keys for every token.

    ProductKeys   a router over e = r² experts from 2 r keys per head
    PEER          Σ gᵢ SiLU(x·wᵢ) uᵢ, over the experts found
    CDMMoE        the same with gated neurons, on a projection of a shared gated MLP
    CDMoE         the same on (or beside) a shared MLP φ(x)

    code       shape             in the papers
    gates      (b, l, h, k)      g, of the k experts that each head retrieves
    indices    (b, l, h, k)      i, in [0, e)
    keys       (h, 2, r, m)      θ, product keys: r per half, so e = r² experts
    down, up   (e, d)            W_down, W_up: row i is expert i

A router of e experts is a matrix (d, e); retrieval needs 2 r keys instead (`product_key_topk`), and
evaluates the neurons it finds without gathering their rows (`neurons`). Notebook 06 derives both.

Wrong shapes, sizes or values raise ValueError naming argument, letters and numbers (check.py).
Source: Ch §3.3, A.4; WM §3.3, B.4; He (2024), Mixture of A Million Experts.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, einsum, nn

from cheems_ref import check
from cheems_ref.feed_forward import MLP
from cheems_ref.precision import autocast_off

Tokens = Float[Tensor, "b l d"]
Choices = Int[Tensor, "b l h k"]
Found = tuple[Float[Tensor, "b l h k"], Choices]
Form = Literal["serial", "parallel"]

# What a block takes on a CPU, so that its caches hold it: scores, 2 MiB in float32, and rows of a
# table that are gone through twice. Elsewhere memory alone sets the limit.
SCORES_PER_BLOCK, ROWS_PER_BLOCK = 2**19, 2**12
SCORES_IN_MEMORY = 2**25


def product_key_topk(
    queries: Float[Tensor, "b l h 2 m"], keys: Float[Tensor, "h 2 r m"], k: int
) -> Found:
    """Find the k largest of all r² sums q₁·κ₁ᵢ + q₂·κ₂ⱼ, exactly, without forming them.

    If pair (i, j) is among the k best sums, i is among the k best of the first half and j of the
    second. Better: with both halves sorted, no pair before (i, j) in both is smaller, so only the
    pairs of ranks (a, b) with (a + 1)(b + 1) ≤ k need be looked at.

    Args:
        queries: one for each half.
        keys: r per half and head.
        k: 1 ≤ k ≤ r².

    Returns:
        scores, descending, and indices i·r + j. Of equal halves the smaller index comes first; of
        equal sums the pair of the smaller rank in the first half.

    Source: WM §3.3 and Listing 8; Ch Listing 4; Lample et al. (2019).
    """
    n = check.shapes({"2": 2}, keys=(keys, "h 2 r m"), queries=(queries, "b l h 2 m"))
    check.floating(keys=keys)
    check.dtypes([keys.dtype], queries=queries)
    check.numbers(f"[1, {n['r'] ** 2}]", k=k)
    return _product_key_topk(queries, keys, k)


def _product_key_topk(queries, keys, k):
    h, _, r, _ = keys.shape
    best = min(k, r)
    pairs = [a * best + b for a in range(best) for b in range(min(best, k // (a + 1)))]
    # Copied without waiting for the device.
    pairs = torch.tensor(pairs, device="cpu").to(keys.device, non_blocking=True)
    first, second = pairs // best, pairs % best
    # A compiled graph would unroll many small blocks.
    in_cache = keys.is_cpu and not torch.compiler.is_compiling()
    limit = SCORES_PER_BLOCK if in_cache else SCORES_IN_MEMORY
    found = []
    for block in queries.flatten(0, 1).split(max(1, limit // max(1, 2 * h * r))):
        # 1. The best of each half.
        with autocast_off(keys.device):
            halves = block.permute(1, 2, 0, 3) @ keys.mT
        values, where = _topk(halves, best)  # (h, 2, n, best)
        # 2. The sums that can be among the k best, and which experts they stand for.
        sums = values[:, 0].index_select(-1, first) + values[:, 1].index_select(-1, second)
        index = where[:, 0].index_select(-1, first) * r + where[:, 1].index_select(-1, second)
        # 3. The k best of them.
        sums, place = _topk(sums, k)
        found.append([t.transpose(0, 1) for t in (sums, index.gather(-1, place))])
    scores, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
    shape = (*queries.shape[:3], k)
    return scores.view(shape), indices.view(shape)


def _topk(scores, k):
    """The k largest along the last axis, descending; of equal scores the smaller index first."""
    *_, tokens, n = scores.shape
    if n <= (64 if tokens == 1 else 32) or scores.dtype == torch.float64:  # a full sort is as fast
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]
    # torch.topk may take any of equal scores, so it gets keys of which no two are equal:
    # order · n + (n - 1 - index), with `order` the float's bits as an integer in the same order.
    # In place, since fresh memory takes as long as the arithmetic.
    wide = scores.detach().float().nan_to_num(math.inf, math.inf, -math.inf)  # NaN ranks first
    bits = wide.add_(0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    ranks = bits.long().mul_(n).add_(torch.arange(n - 1, -1, -1, device=scores.device))
    indices = n - 1 - ranks.topk(k, dim=-1).values % n
    return scores.gather(-1, indices), indices


def neurons(
    x: Float[Tensor, "n d"], table: Float[Tensor, "e d"], indices: Int[Tensor, "n j"]
) -> Float[Tensor, "n j"]:
    """Compute the inner product of each token with its j rows of a table: x_n · table[indices_nj].

    `F.embedding_bag` computes Σ_j a_nj table[indices_nj] without gathering rows. Its gradient with
    respect to a, for a gradient x_n of the sum, is x_n · table[indices_nj]: what is wanted. So this
    is the backward pass of the bag, and the bag is the backward pass of this. Nothing of size
    (n, j, d) is built for more than one token, in neither direction.

    Args:
        x: tokens.
        table: one row per neuron.
        indices: in [0, e).

    Source: WM §3.3, φ(x)·dᵀ; He (2024), algorithm 1.
    """
    n = check.shapes(x=(x, "n d"), table=(table, "e d"), indices=(indices, "n j"))
    check.floating(x=x)
    check.dtypes([x.dtype], table=table)
    check.dtypes(check.INDICES, indices=indices)
    check.entries(f"[0, {n['e']})", indices=indices)
    return _neurons(x, table, indices)


def _neurons(x, table, indices):
    if x.shape[0] == 1:  # decoding: a few rows, sooner gathered than walked through
        return (table[indices[0]] @ x[0])[None]
    return _products(x, table, indices)


# An operator of its own, so that a compiler need not look inside. It is named for the package, and
# for a copy of this module where there is one.
@torch.library.custom_op(f"{__name__.partition('.')[0]}::neurons", mutates_args=())
def _products(x: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """The gradient of a bag with respect to its weights, for a gradient x of its sum."""
    # A table may be larger than a CPU's caches, and the products wait for every row. A bag reads
    # ahead: its sum is thrown away, but it leaves the rows of a block in the cache.
    tokens = max(1, ROWS_PER_BLOCK // indices.shape[1] if x.is_cpu else x.shape[0])
    products = []
    for block, rows in zip(x.split(tokens), indices.split(tokens), strict=True):
        if x.is_cpu:
            F.embedding_bag(rows, table, mode="sum")
        products.append(
            torch.ops.aten._embedding_bag_per_sample_weights_backward(
                block, table, rows.flatten(), *_bags(rows), mode=0
            )
        )
    return torch.cat(products).view(indices.shape)


@_products.register_fake
def _(x, table, indices):
    return x.new_empty(indices.shape)


def _products_backward(ctx, gradient):
    x, table, indices = ctx.saved_tensors
    to_x = F.embedding_bag(indices, table, per_sample_weights=gradient, mode="sum")
    _, bags = _bags(indices)
    unused = bags.new_empty(0)  # bag sizes and largest entries: of the modes mean and max
    to_table = torch.ops.aten._embedding_bag_dense_backward(
        x, indices.flatten(), bags, unused, unused, table.shape[0], False, 0, gradient.flatten()
    )
    return to_x, to_table, None


_products.register_autograd(
    _products_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def _bags(indices):
    """Where each token's bag starts among all indices, and in which bag each of them is."""
    n, j = indices.shape
    bags = torch.arange(n, device=indices.device)
    return bags * j, bags.repeat_interleave(j)


def retrieved_experts(
    x: Tokens,
    down: Float[Tensor, "e d"],
    up: Float[Tensor, "e o"],
    gates: Float[Tensor, "b l h k"],
    indices: Choices,
    *,
    gate: Float[Tensor, "e d"] | None = None,
) -> Float[Tensor, "b l o"]:
    """Compute Σ gᵢ SiLU(x·downᵢ) upᵢ over the retrieved experts of all heads.

    Args:
        x: tokens.
        down: what a neuron listens to.
        up: what it says; o is the width of the result.
        gates: of each expert found.
        indices: which experts, in [0, e).
        gate: for gated neurons, gᵢ (x·downᵢ) SiLU(x·gateᵢ) upᵢ.

    Source: WM §3.3; Ch Listing 4, with the gates outside of SiLU.
    """
    _check_retrieved(x, down, up, gates, indices, gate)
    return _retrieved_experts(x, down, up, gates, indices, gate)


def _retrieved_experts(x, down, up, gates, indices, gate=None):
    tokens = x.flatten(0, 1).to(down.dtype)  # autocast may have narrowed it
    rows, weights = (t.flatten(0, 1).flatten(1) for t in (indices, gates.to(down.dtype)))
    active = _neurons(tokens, down, rows)
    active = F.silu(active) if gate is None else active * F.silu(_neurons(tokens, gate, rows))
    y = F.embedding_bag(rows, up, per_sample_weights=weights * active, mode="sum")
    return y.view(*x.shape[:2], up.shape[1])


def naive_retrieved_experts(
    x: Tokens,
    down: Float[Tensor, "e d"],
    up: Float[Tensor, "e o"],
    gates: Float[Tensor, "b l h k"],
    indices: Choices,
    *,
    gate: Float[Tensor, "e d"] | None = None,
) -> Float[Tensor, "b l o"]:
    """Compute what `retrieved_experts` does from its formula: every row gathered, h·k times x.

    Source: WM Listing 8; Ch Listing 4.
    """
    _check_retrieved(x, down, up, gates, indices, gate)
    active = einsum("bld,blhkd->blhk", x, down[indices])
    if gate is None:
        active = F.silu(active)
    else:
        active = active * F.silu(einsum("bld,blhkd->blhk", x, gate[indices]))
    return einsum("blhk,blhko->blo", gates * active, up[indices])


def _check_retrieved(x, down, up, gates, indices, gate):
    n = check.shapes(x=(x, "b l d"), down=(down, "e d"), up=(up, "e o"), gate=(gate, "e d"))
    check.shapes(n, indices=(indices, "b l h k"), gates=(gates, "b l h k"))
    check.floating(x=x, down=down, gates=gates)
    check.dtypes([down.dtype], up=up, gate=gate)
    check.dtypes(check.INDICES, indices=indices)
    check.entries(f"[0, {n['e']})", indices=indices)


class ProductKeys(nn.Module):
    """A router over e = r² experts by product keys: h heads, each with its own queries and keys.

    Args:
        d_model: width of the tokens.
        n_experts: e, a square.
        n_heads: h.
        k: experts per head, at most e.
        d_query: width of a query, both halves together; even.

    Source: WM §3.3 and Listing 8; Ch Listing 4, with keys that start random.
    """

    def __init__(self, d_model: int, *, n_experts: int, n_heads: int, k: int, d_query: int):
        super().__init__()
        check.sizes(d_model=d_model, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query)
        r = math.isqrt(n_experts)
        if r * r != n_experts:
            raise ValueError(
                f"n_experts must be a square, r keys for each half: {n_experts} is not, "
                f"{r * r} and {(r + 1) ** 2} are"
            )
        if k > n_experts:
            raise ValueError(f"k = {k} experts per head, but there are only {n_experts}")
        check.multiple(d_query=d_query, halves=2)
        self.n_heads, self.k, self.n_experts = n_heads, k, n_experts
        self.query_proj = nn.Linear(d_model, n_heads * d_query, bias=False)
        self.keys = nn.Parameter(torch.empty(n_heads, 2, r, d_query // 2))
        ProductKeys.reset_parameters(self)  # not a subclass's: it has tables that are yet to come

    def reset_parameters(self):
        """Draw the keys anew; the queries' map draws itself."""
        nn.init.normal_(self.keys)

    def route(self, x: Tokens) -> Found:
        """Find the k experts of every head, for every token.

        Returns:
            gates, a softmax over each head's k scores, and indices. For k = 1 the gate is 1 and
            neither queries nor keys receive a gradient.
        """
        check.width(x, self.query_proj.in_features)
        queries = self.query_proj(x).unflatten(-1, (self.n_heads, 2, -1))
        scores, indices = _product_key_topk(queries.to(self.keys.dtype), self.keys, self.k)
        return scores.softmax(dim=-1), indices

    def min_inactive_experts(self) -> int:
        """Return a lower bound on the experts that no head retrieves for a token."""
        return max(0, self.n_experts - self.n_heads * self.k)


class PEER(ProductKeys):
    """Experts of one neuron each, a few of a million for every token.

    Each head retrieves k experts, so a token's hidden layer has h·k neurons, put together for it.

    Args:
        d_model: d.
        n_experts: e, a square.
        n_heads: h.
        k: experts per head.
        d_query: width of a query, both halves together.

    Source: He (2024), Mixture of A Million Experts, algorithm 1.
    """

    def __init__(self, d_model: int, *, n_experts: int, n_heads: int, k: int, d_query: int):
        super().__init__(d_model, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query)
        self.down = nn.Parameter(torch.empty(n_experts, d_model))
        self.up = nn.Parameter(torch.empty(n_experts, d_model))
        self._reset_tables()

    def reset_parameters(self):
        """Draw keys and tables anew; a sum over all neurons is of size 1 for tokens of size 1."""
        super().reset_parameters()
        self._reset_tables()

    def _reset_tables(self):
        _reset_table(self.down, self.down.shape[1])
        _reset_table(self.up, self.n_heads * self.k)

    def inactive_parameters(self) -> int:
        """Return how many parameters take no part in one token's result."""
        return self.min_inactive_experts() * (self.down.shape[1] + self.up.shape[1])

    def forward(self, x: Tokens) -> Tokens:
        """Compute y = Σ gᵢ SiLU(x·downᵢ) upᵢ."""
        return _retrieved_experts(x, self.down, self.up, *self.route(x))


def _reset_table(table, n_terms):
    """Draw rows at random, small enough that a sum of so many terms is of size 1."""
    with torch.no_grad():
        nn.init.normal_(table).div_(math.sqrt(n_terms))


class CDMMoE(nn.Module):
    """Cross domain million mixture of experts: gated neurons behind a shared gated MLP.

    s = gated MLP(x), shared; p = s W, of width d_private; y = Σ gᵢ (p·downᵢ) SiLU(p·gateᵢ) upᵢ.

    Args:
        d_model: d.
        d_ff: width of the shared MLP.
        n_experts, n_heads, k, d_query: as in `PEER`.
        d_private: width of p; None for d_model / 2, rounded up.

    Source: Ch eqs. 11–14 and Listing 4.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_ff: int,
        n_experts: int,
        n_heads: int,
        k: int,
        d_query: int,
        d_private: int | None = None,
    ):
        super().__init__()
        check.sizes(d_model=d_model, d_ff=d_ff, d_private=d_private)
        d_private = (d_model + 1) // 2 if d_private is None else d_private
        self.shared = MLP(d_model, d_ff, gated=True)
        self.private_proj = nn.Linear(d_model, d_private, bias=False)
        self.retrieval = ProductKeys(
            d_private, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query
        )
        self.gate = nn.Parameter(torch.empty(n_experts, d_private))
        self.down = nn.Parameter(torch.empty(n_experts, d_private))
        self.up = nn.Parameter(torch.empty(n_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self):
        """Draw the tables anew, as in `PEER`; the layers inside draw themselves."""
        _reset_table(self.gate, self.gate.shape[1])
        _reset_table(self.down, self.down.shape[1])
        _reset_table(self.up, self.retrieval.n_heads * self.retrieval.k)

    def private(self, x: Tokens) -> Float[Tensor, "b l p"]:
        """Compute what the private experts see, of width d_private."""
        return self.private_proj(self.shared(x))

    def route(self, x: Tokens) -> Found:
        """Find the experts of every token: gates and indices as `PEER.route`."""
        return self.retrieval.route(self.private(x))

    def inactive_parameters(self) -> int:
        """Return how many parameters take no part in one token's result."""
        width = sum(table.shape[1] for table in (self.gate, self.down, self.up))
        return self.retrieval.min_inactive_experts() * width

    def forward(self, x: Tokens) -> Tokens:
        """Compute y."""
        p = self.private(x)
        return _retrieved_experts(p, self.down, self.up, *self.retrieval.route(p), self.gate)


class CDMoE(nn.Module):
    """Cross domain mixture of experts: a shared MLP φ, and experts of one neuron beside or on it.

    form="serial":   y = e(φ(x)) + φ(x), as in the listing; residual=False: y = e(φ(x))
    form="parallel": y = e(x) + φ(x)

    Args:
        d_model: d.
        d_ff: width of φ.
        n_experts, n_heads, k, d_query: as in `PEER`.
        form: whether the experts see φ(x) or x.
        residual: whether φ(x) is added; only "serial" can do without.

    Source: WM eq. 5, §3.3 and Listing 8, with the gate outside of SiLU and normalised.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_ff: int,
        n_experts: int,
        n_heads: int,
        k: int,
        d_query: int,
        form: Form = "serial",
        residual: bool = True,
    ):
        super().__init__()
        check.choice(Form, form=form)
        if form == "parallel" and not residual:
            raise ValueError("residual=False belongs to form='serial': 'parallel' is e(x) + φ(x)")
        self.form, self.residual = form, residual
        self.shared = MLP(d_model, d_ff)
        self.experts = PEER(d_model, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query)

    def route(self, x: Tokens) -> Found:
        """Find the experts of every token: gates and indices as `PEER.route`."""
        return self.experts.route(self.shared(x) if self.form == "serial" else x)

    def inactive_parameters(self) -> int:
        """Return how many parameters take no part in one token's result."""
        return self.experts.inactive_parameters()

    def forward(self, x: Tokens) -> Tokens:
        """Compute y."""
        phi = self.shared(x)
        y = self.experts(phi if self.form == "serial" else x)
        return y + phi if self.residual else y
