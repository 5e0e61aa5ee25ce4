"""Experts of one neuron each: a few of a million, found by product keys for every token.

    ProductKeys   a router over e = r² experts from 2 r keys per head
    PEER          Σ gᵢ SiLU(x·downᵢ) upᵢ over the retrieved experts
    CDMMoE        PEER with gated neurons, on a projection of a shared gated MLP
    CDMoE         PEER on (or beside) a shared MLP φ(x)

    code       shape             in the papers
    gates      (b, l, h, k)      g, of the k experts that each head retrieves
    indices    (b, l, h, k)      i, in [0, e)
    keys       (h, 2, r, m)      θ, product keys: r per half, so e = r² experts
    down       (e, d)            W_down: row i is expert i, d the width of its input
    up         (e, o)            W_up, o the width of its output

A routed MoE has a router matrix (d, e). Retrieval needs 2 r keys instead (`product_key_topk`), and
evaluates the retrieved neurons without gathering their rows (`neurons`). Notebook 06 derives both.

"Cross domain" is the papers' term: every token passes through a shared MLP. Experts that few tokens
use process its output (CDMMoE, serial CDMoE) or run beside it. The papers call these experts, and
their width, private.

Wrong shapes, sizes or values raise ValueError, and sizes that are no whole numbers TypeError, with
the name of the argument (check.py).
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

# Scores computed at a time, 64 MiB in float32. A compiled graph repeats its code for every block,
# so blocks shouldn't be small.
SCORES_PER_BLOCK = 2**24


def product_key_topk(
    queries: Float[Tensor, "b l h 2 m"], keys: Float[Tensor, "h 2 r m"], k: int
) -> Found:
    """Find the k largest of all r² sums q₁·θ₁ᵢ + q₂·θ₂ⱼ, exactly, without forming them.

    If pair (i, j) is among the k best sums, i is among the k best of the first half and j among the
    k best of the second. More sharply: count ranks from 0, and let i have rank a in the first half
    and j rank b in the second. Then (a + 1)(b + 1) pairs, itself included, have a sum at least as
    large, so only pairs with (a + 1)(b + 1) ≤ k are candidates.

    Args:
        queries: one for each half.
        keys: r per half and head.
        k: 1 ≤ k ≤ r².

    Returns:
        scores, descending, and indices i·r + j. For 16-bit queries and keys the sums are computed,
        compared and returned in float32. Equal sums come in any order; of those that compete
        for the last places, any may be found.

    Source: WM §3.3 and Listing 8; Ch Listing 4; Lample et al. (2019).
    """
    n = check.shapes({"2": 2}, keys=(keys, "h 2 r m"), queries=(queries, "b l h 2 m"))
    check.floating(keys=keys)
    check.dtypes([keys.dtype], queries=queries)
    check.numbers(f"[1, {n['r'] ** 2}]", k=k)
    check.sizes(k=k)
    return _product_key_topk(queries, keys, k)


def _product_key_topk(queries, keys, k):
    h, _, r, _ = keys.shape
    wide = torch.promote_types(keys.dtype, torch.float32)  # 16 bits would make ties of sums
    keys = keys.to(wide)
    n_best = min(k, r)
    pairs = [(a, b) for a in range(n_best) for b in range(min(n_best, k // (a + 1)))]
    # The candidates' ranks in each half. This copy does not synchronise with the device.
    first, second = torch.tensor(pairs, device="cpu").T.to(keys.device, non_blocking=True)
    found = []
    for block in queries.flatten(0, 1).split(max(1, SCORES_PER_BLOCK // max(1, 2 * h * r))):
        # 1. The best of each half.
        with autocast_off(keys.device):
            halves = block.to(wide).permute(1, 2, 0, 3) @ keys.mT  # (h, 2, n, r)
        values, where = halves.topk(n_best)  # (h, 2, n, n_best)
        # 2. The candidate sums and their experts.
        sums = values[:, 0].index_select(-1, first) + values[:, 1].index_select(-1, second)
        index = where[:, 0].index_select(-1, first) * r + where[:, 1].index_select(-1, second)
        # 3. The k best candidates.
        sums, place = sums.topk(k)
        found.append([t.transpose(0, 1) for t in (sums, index.gather(-1, place))])
    scores, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
    shape = (*queries.shape[:3], k)
    return scores.view(shape), indices.view(shape)


def neurons(
    x: Float[Tensor, "n d"], table: Float[Tensor, "e d"], indices: Int[Tensor, "n j"]
) -> Float[Tensor, "n j"]:
    """Compute the inner product of each token with its j rows of a table: x_n · table[indices_nj].

    `F.embedding_bag` computes a "bag" without gathering rows, and so does its backward pass:

        y_n  = Σ_j a_nj table[indices_nj]     a bag
        ā_nj = ȳ_n · table[indices_nj]        the gradient of its weights, given that of y

    The second line with ȳ = x is this function, so we call torch's backward pass of a bag. Our own
    gradient with respect to x is a bag again. The gradient with respect to the table is that of a
    bag's table, which torch can't differentiate once more. No direction builds a tensor of size
    (n, j, d) for more than one token.

    Args:
        x: n tokens.
        table: one row per neuron.
        indices: the j neurons of each token, in [0, e).

    Source: WM §3.3, φ(x)·dᵀ; He (2024), algorithm 1.
    """
    n = check.shapes(x=(x, "n d"), table=(table, "e d"), indices=(indices, "n j"))
    check.floating(x=x)
    check.dtypes([x.dtype], table=table)
    check.dtypes(check.INDICES, indices=indices)
    check.entries(f"[0, {n['e']})", indices=indices)
    return _neurons(x, table, indices)


def _neurons(x, table, indices):
    if x.shape[0] == 1:  # decoding: gathering a few rows is faster
        return (table[indices[0]] @ x[0])[None]
    if torch._C._are_functorch_transforms_active():
        return _Products.apply(x, table, indices.long())
    return _products(x, table, indices.long())


# An opaque operator for compilers. Its name starts with the package, so copies do not clash.
@torch.library.custom_op(f"{__name__.partition('.')[0]}::neurons", mutates_args=())
def _products(x: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """(table[indices] @ x[:, :, None])[..., 0], as the gradient of a bag's weights."""
    # (grad, weight, indices, offsets, offset2bag, mode), where mode 0 is the sum
    backward = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return backward(x, table, indices.flatten(), *_bags(indices), mode=0).view(indices.shape)


@_products.register_fake
def _(x, table, indices):
    return x.new_empty(indices.shape)


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _products_backward(ctx, gradient):
    x, table, indices = ctx.saved_tensors
    to_x = F.embedding_bag(indices, table, per_sample_weights=gradient, mode="sum")
    _, offset2bag = _bags(indices)
    unused = offset2bag.new_empty(0)  # bag_size and maximum_indices, which other modes need
    options = dict(num_weights=table.shape[0], scale_grad_by_freq=False, mode=0)
    # (grad, indices, offset2bag, bag_size, maximum_indices, ...)
    backward = torch.ops.aten._embedding_bag_dense_backward
    inputs = x, indices.flatten(), offset2bag, unused, unused
    to_table = backward(*inputs, **options, per_sample_weights=gradient.flatten())
    return to_x, to_table, None


_products.register_autograd(_products_backward, setup_context=_save_inputs)


class _Products(torch.autograd.Function):
    """The operator for torch.func, which can't differentiate one of torch.library."""

    @staticmethod
    def forward(x, table, indices):
        return _products(x, table, indices)

    setup_context = staticmethod(_save_inputs)
    backward = staticmethod(_products_backward)

    @staticmethod
    def vmap(info, in_dims, x, table, indices):
        """Compute a batch of calls as one call, whose table is their tables one below the other."""
        batch = info.batch_size
        x, table, indices = (
            t.expand(batch, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, table, indices), in_dims, strict=True)
        )
        first_row = table.shape[1] * torch.arange(batch, device=table.device)
        rows = indices + first_row[:, None, None]
        y = _Products.apply(x.flatten(0, 1), table.flatten(0, 1), rows.flatten(0, 1))
        return y.unflatten(0, (batch, -1)), 0


def _bags(indices):
    """offsets, where each token's bag begins in the flat indices; offset2bag, each index's bag."""
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
        down: input weights of each neuron.
        up: output weights of each neuron; o is the width of the result.
        gates: gᵢ of the retrieved experts.
        indices: i of the retrieved experts, in [0, e).
        gate: weights of gated neurons, which compute gᵢ (x·downᵢ) SiLU(x·gateᵢ) upᵢ.

    Source: WM §3.3; Ch Listing 4. The gates are outside of SiLU, as in Ch and unlike WM's listing.
    """
    _check_retrieved(x, down, up, gates, indices, gate)
    return _retrieved_experts(x, down, up, gates, indices, gate)


def _retrieved_experts(x, down, up, gates, indices, gate=None):
    tokens = x.flatten(0, 1).to(down.dtype)  # under autocast x may be narrower
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
    """Compute `retrieved_experts` from its formula, gathering h·k rows for every token.

    Source: WM Listing 8; Ch Listing 4.
    """
    _check_retrieved(x, down, up, gates, indices, gate)
    x, gates = x.to(down.dtype), gates.to(down.dtype)
    active = einsum("bld,blhkd->blhk", x, down[indices])
    if gate is None:
        active = F.silu(active)
    else:
        active = active * F.silu(einsum("bld,blhkd->blhk", x, gate[indices]))
    return einsum("blhk,blhko->blo", gates * active, up[indices])


def _check_retrieved(x, down, up, gates, indices, gate):
    """Reject tensors that do not fit together, and indices outside of [0, e)."""
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

    Source: WM §3.3 and Listing 8; Ch Listing 4. Unlike there, keys start random.
    """

    def __init__(self, d_model: int, *, n_experts: int, n_heads: int, k: int, d_query: int):
        super().__init__()
        check.sizes(d_model=d_model, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query)
        r = math.isqrt(n_experts)
        if r * r != n_experts:
            near = f"{n_experts} is not, {r * r} and {(r + 1) ** 2} are"
            raise ValueError(f"n_experts must be a square, r keys for each half: {near}")
        check.numbers(f"[1, {n_experts}]", k=k)
        if d_query % 2:
            raise ValueError(f"d_query must be even, one half for each set of keys, got {d_query}")
        self.d_model, self.n_heads, self.k = d_model, n_heads, k
        self.query_proj = nn.Linear(d_model, n_heads * d_query, bias=False)
        # Not by reset_parameters(): PEER's would find its tables missing.
        self.keys = nn.Parameter(torch.randn(n_heads, 2, r, d_query // 2))

    def reset_parameters(self):
        """Draw the keys from a standard normal distribution."""
        nn.init.normal_(self.keys)

    def route(self, x: Tokens) -> Found:
        """Find the k experts of every head, for every token.

        Returns:
            gates, a softmax over each head's k scores, in float32 or float64; and indices. For
            k = 1 the gate is 1 and neither queries nor keys receive a gradient.
        """
        check.shapes({"d": self.d_model}, x=(x, "b l d"))
        check.fits_weights(x, self.query_proj)
        queries = self.query_proj(x).unflatten(-1, (self.n_heads, 2, -1))
        scores, indices = _product_key_topk(queries, self.keys, self.k)
        return scores.softmax(dim=-1), indices

    def forward(self, x: Tokens) -> Found:
        """Find the experts: `route`."""
        return self.route(x)


class PEER(ProductKeys):
    """Experts of one neuron each, a few of a million for every token.

    Each head retrieves k experts, so the hidden layer of a token has h·k neurons.

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
        self.down, self.up = (nn.Parameter(torch.empty(n_experts, d_model)) for _ in range(2))
        _reset_tables(n_heads * k, self.up, self.down)

    def reset_parameters(self):
        """Draw keys and tables at random."""
        super().reset_parameters()
        _reset_tables(self.n_heads * self.k, self.up, self.down)

    def inactive_parameters(self) -> int:
        """Return a lower bound on the parameters that take no part in one token's result."""
        return _inactive(self, self.down, self.up)

    def forward(self, x: Tokens) -> Tokens:
        """Compute y = Σ gᵢ SiLU(x·downᵢ) upᵢ."""
        gates, indices = self.route(x)
        return _retrieved_experts(x, self.down, self.up, gates, indices)


@torch.no_grad()
def _reset_tables(n_retrieved, up, *inputs):
    """Draw tables. x·row has the variance of the entries of x; in a sum of n_retrieved rows of `up`
    each entry has variance 1.
    """
    if up.is_meta:  # as in SSD
        return
    for table in inputs:
        nn.init.normal_(table).div_(math.sqrt(table.shape[1]))
    nn.init.normal_(up).div_(math.sqrt(n_retrieved))


def _inactive(router, *tables):
    """Count the parameters in rows that no head retrieves, if no two heads retrieve the same row.

    It is a lower bound: where heads share rows, more rows are idle.
    """
    rows = len(tables[0]) - router.n_heads * router.k
    return max(0, rows) * sum(t.shape[1] for t in tables)


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
        sizes = dict(n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query)
        self.retrieval = ProductKeys(d_private, **sizes)
        self.gate, self.down = (nn.Parameter(torch.empty(n_experts, d_private)) for _ in range(2))
        self.up = nn.Parameter(torch.empty(n_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self):
        """Draw the tables at random; the layers inside have a reset of their own."""
        _reset_tables(self.retrieval.n_heads * self.retrieval.k, self.up, self.gate, self.down)

    def private(self, x: Tokens) -> Float[Tensor, "b l p"]:
        """Compute the input of the private experts, of width d_private."""
        return self.private_proj(self.shared(x))

    def route(self, x: Tokens) -> Found:
        """Find the experts of every token: gates and indices as in `ProductKeys.route`."""
        return self.retrieval(self.private(x))

    def inactive_parameters(self) -> int:
        """Return a lower bound on the parameters that take no part in one token's result."""
        return _inactive(self.retrieval, self.gate, self.down, self.up)

    def forward(self, x: Tokens) -> Tokens:
        """Compute y."""
        p = self.private(x)
        gates, indices = self.retrieval(p)
        return _retrieved_experts(p, self.down, self.up, gates, indices, self.gate)


class CDMoE(nn.Module):
    """Cross-domain mixture of experts: a shared MLP φ, single-neuron experts after or beside it.

    form="serial":   y = PEER(φ(x)) + φ(x), as in the listing; residual=False: y = PEER(φ(x))
    form="parallel": y = PEER(x) + φ(x)

    Args:
        d_model: d.
        d_ff: width of φ.
        n_experts, n_heads, k, d_query: as in `PEER`.
        form: whether the input of the experts is φ(x) or x.
        residual: whether φ(x) is added; False is possible for "serial" only.

    Source: WM eq. 5, §3.3 and Listing 8, where the raw score is inside SiLU.
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
            raise ValueError("residual=False belongs to form='serial': 'parallel' adds φ(x)")
        self.form, self.residual = form, residual
        self.shared = MLP(d_model, d_ff)
        self.experts = PEER(d_model, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query)

    def route(self, x: Tokens) -> Found:
        """Find the experts of every token: gates and indices as in `ProductKeys.route`."""
        return self.experts.route(self.shared(x) if self.form == "serial" else x)

    def inactive_parameters(self) -> int:
        """Return a lower bound on the parameters that take no part in one token's result."""
        return self.experts.inactive_parameters()

    def forward(self, x: Tokens) -> Tokens:
        """Compute y."""
        phi = self.shared(x)
        y = self.experts(phi if self.form == "serial" else x)
        return y + phi if self.residual else y
