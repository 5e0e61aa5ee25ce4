"""Feed-forward layers, from one MLP to a million experts of one neuron each.

All of them take x (b, l, d) and return y (b, l, d), every token by itself. σ is SiLU.

    MLP               σ(x W) W₂                      gated: (σ(x W) ∘ x V) W₂
    DGLU              (σ(x W) ∘ tanh(x V)) W₂        a second gate: OTCE's expert
    MoE               Σ gᵢ FFNᵢ(x) over the k experts that a router picks
    SharedExpertMoE   FFNˢ(x) + Σ gᵢ FFNᵢ(x)         isolation: one expert for everyone
    CohesiveMoE       the experts share V            OTCE eq. 18
    ExpansiveMoE      FFNᵢ(s ∘ sigmoid(s Wᵢ))        OTCE eq. 19, behind a shared s = FFNˢ(x)
    PEER              Σ gᵢ σ(x·wᵢ) uᵢ                experts of one neuron, found by product keys
    CDMMoE            the same with gated neurons, on a projection of a shared gated MLP
    CDMoE             the same on (or beside) a shared MLP φ(x)

    code       shape             in the papers
    gates      (b, l, k)         g, of the k chosen experts; (b, l, h, k) where heads retrieve
    indices    the same          i
    keys       (h, 2, r, m)      θ, product keys: r per half, so e = r² experts
    down, up   (e, d)            W_down, W_up: row i is expert i

A router of e experts is a matrix (d, e). For e = r² retrieval needs 2 r keys instead
(`product_key_topk`), and the neurons it finds are evaluated without gathering their rows
(`neurons`). Notebook 06 derives both. `route` is public on every layer with experts, so that
`expert_statistics` can be taken from outside.
Source: OTCE §3.2; Ch §3.3, A.4; WM §3.3, B.4; He (2024), Mixture of A Million Experts.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, einsum, nn
from torch.autograd.function import once_differentiable

# Tokens whose scores against all keys are held at a time.
TOKENS_PER_BLOCK = 1024
# Rows of a table that `neurons` goes through twice in a row.
ROWS_PER_BLOCK = 4096


class MLP(nn.Module):
    """Two linear maps with σ between them; gated: three, (σ(x W) ∘ x V) W₂.

    Args:
        d_model: d.
        d_ff: f, the width between the maps.
        gated: whether there is a second map in, multiplied onto the first.

    Raises:
        ValueError: a size below 1.

    Source: WM eq. after (5), φ(x) = σ(x W)V; gated: Ch eq. 11; Shazeer (2020).
    """

    def __init__(self, d_model: int, d_ff: int, *, gated: bool = False):
        super().__init__()
        _check_sizes(d_model=d_model, d_ff=d_ff)
        self.in_proj = nn.Linear(d_model, d_ff, bias=False)
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False) if gated else None
        self.out_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Compute y (..., d) from x (..., d)."""
        if self.gate_proj is None:
            return self.out_proj(F.silu(self.in_proj(x)))
        return self.out_proj(F.silu(self.gate_proj(x)) * self.in_proj(x))


class DGLU(nn.Module):
    """A linear unit with two gates: (σ(x W) ∘ tanh(x V)) W₂, or with a sigmoid for the tanh.

    Args:
        d_model: d.
        d_ff: f, the width between the maps.
        gate: the second activation, "tanh" or "sigmoid".

    Raises:
        ValueError: a size below 1, or an unknown gate.

    Source: OTCE eq. 13.
    """

    def __init__(self, d_model: int, d_ff: int, *, gate: Literal["tanh", "sigmoid"] = "tanh"):
        super().__init__()
        _check_sizes(d_model=d_model, d_ff=d_ff)
        if gate not in ("tanh", "sigmoid"):
            raise ValueError(f"gate must be 'tanh' or 'sigmoid', got {gate!r}")
        self.gate = gate
        self.W = nn.Linear(d_model, d_ff, bias=False)
        self.V = nn.Linear(d_model, d_ff, bias=False)
        self.W_2 = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Compute y (..., d) from x (..., d)."""
        second = torch.tanh if self.gate == "tanh" else torch.sigmoid
        return self.W_2(F.silu(self.W(x)) * second(self.V(x)))


class MoE(nn.Module):
    """A routed mixture: each token goes to the k experts of the largest softmax score.

    The experts are DGLUs of equal size. The gates are the chosen scores: their sum is below 1, and
    through them the router learns. With renormalize=True they are divided by their sum; then for
    k = 1 the gate is always 1, and the router receives no gradient.

    Args:
        d_model: d.
        d_ff: f, the width of one expert.
        n_experts: e.
        k: experts per token, at most e.
        renormalize: whether the k gates of a token sum to 1.

    Raises:
        ValueError: a size below 1, or k above n_experts.

    Source: OTCE eqs. 15 and 17.
    """

    def __init__(
        self, d_model: int, d_ff: int, *, n_experts: int, k: int, renormalize: bool = False
    ):
        super().__init__()
        _check_sizes(d_model=d_model, d_ff=d_ff, n_experts=n_experts, k=k)
        if k > n_experts:
            raise ValueError(f"k = {k} experts per token, but there are only {n_experts}")
        self.k, self.renormalize = k, renormalize
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList(DGLU(d_model, d_ff) for _ in range(n_experts))

    def route(
        self, x: Float[Tensor, "b l d"]
    ) -> tuple[Float[Tensor, "b l k"], Int[Tensor, "b l k"]]:
        """Choose the experts of every token.

        Args:
            x: (b, l, d).

        Returns:
            gates (b, l, k), descending, and indices (b, l, k).
        """
        gates, indices = self.router(x).softmax(dim=-1).topk(self.k, dim=-1)
        if self.renormalize:  # for k = 1 said outright: g / g would leave rounding as a gradient
            one = self.k == 1
            gates = torch.ones_like(gates) if one else gates / gates.sum(dim=-1, keepdim=True)
        return gates, indices

    def expert(self, i: int, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Compute expert i on tokens (n, d)."""
        return self.experts[i](x)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Compute y (b, l, d): each expert sees the tokens that chose it and no others."""
        return mix_experts(x, *self.route(x), self.expert, len(self.experts))


class SharedExpertMoE(MoE):
    """Shared-expert isolation: one expert of the same size for every token, beside the routed ones.

    Arguments, `route` and errors are those of `MoE`.

    Source: OTCE §2 (shared expert isolation); Dai et al. (2024), DeepSeekMoE.
    """

    def __init__(
        self, d_model: int, d_ff: int, *, n_experts: int, k: int, renormalize: bool = False
    ):
        super().__init__(d_model, d_ff, n_experts=n_experts, k=k, renormalize=renormalize)
        self.shared = DGLU(d_model, d_ff)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Compute y (b, l, d): the shared expert plus the routed mixture."""
        return self.shared(x) + super().forward(x)


class CohesiveMoE(MoE):
    """Experts that share the matrix V of their second gate; W and W₂ are their own.

    Arguments, `route` and errors are those of `MoE`.

    Source: OTCE eq. 18.
    """

    def __init__(
        self, d_model: int, d_ff: int, *, n_experts: int, k: int, renormalize: bool = False
    ):
        super().__init__(d_model, d_ff, n_experts=n_experts, k=k, renormalize=renormalize)
        for expert in self.experts[1:]:
            expert.V = self.experts[0].V


class ExpansiveMoE(MoE):
    """Experts behind a shared one, each with a gate: FFNᵢ(s ∘ sigmoid(s Wᵢ)) with s = FFNˢ(x).

    As printed the gate s Wᵢ has no activation, so that s ∘ s Wᵢ is even in s and cannot pass it on;
    here it is a sigmoid. It takes d² parameters per expert. Arguments, `route` and errors are those
    of `MoE`; the router sees x.

    Source: OTCE eq. 19.
    """

    def __init__(
        self, d_model: int, d_ff: int, *, n_experts: int, k: int, renormalize: bool = False
    ):
        super().__init__(d_model, d_ff, n_experts=n_experts, k=k, renormalize=renormalize)
        self.shared = DGLU(d_model, d_ff)
        self.gates = nn.ModuleList(
            nn.Linear(d_model, d_model, bias=False) for _ in range(n_experts)
        )

    def expert(self, i: int, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Compute expert i on what the shared one made of the tokens, (n, d)."""
        return self.experts[i](x * torch.sigmoid(self.gates[i](x)))

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Compute y (b, l, d)."""
        return mix_experts(self.shared(x), *self.route(x), self.expert, len(self.experts))


def mix_experts(
    x: Float[Tensor, "b l d"],
    gates: Float[Tensor, "b l k"],
    indices: Int[Tensor, "b l k"],
    expert: Callable[[int, Tensor], Tensor],
    n_experts: int,
) -> Float[Tensor, "b l d"]:
    """Compute Σ gᵢ expertᵢ(x) with each expert called once, on the tokens that chose it.

    Args:
        x: (b, l, d).
        gates: (b, l, k).
        indices: (b, l, k), which experts; no expert twice for one token.
        expert: a function of a number and of tokens (n, d).
        n_experts: e.

    Returns:
        (b, l, d).

    Source: OTCE eq. 15a.
    """
    tokens, y = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
    gates, indices = gates.flatten(0, 1), indices.flatten(0, 1)
    for i in range(n_experts):
        token, choice = (indices == i).nonzero(as_tuple=True)
        weighted = gates[token, choice, None] * expert(i, tokens[token])
        y = y.index_add(0, token, weighted.to(y.dtype))
    return y.view_as(x)


def product_key_topk(
    queries: Float[Tensor, "b l h 2 m"], keys: Float[Tensor, "h 2 r m"], k: int
) -> tuple[Float[Tensor, "b l h k"], Int[Tensor, "b l h k"]]:
    """Find the k largest of all r² sums q₁·κ₁ᵢ + q₂·κ₂ⱼ, exactly, without forming them.

    If pair (i, j) is among the k best sums, i is among the k best of the first half and j of the
    second. Better: with both halves sorted, no pair before (i, j) in both is smaller, so only the
    pairs of ranks (a, b) with (a + 1)(b + 1) ≤ k need be looked at.

    Args:
        queries: (b, l, h, 2, m), one for each half.
        keys: (h, 2, r, m), r per half and head.
        k: 1 ≤ k ≤ r².

    Returns:
        scores (b, l, h, k), descending, and indices (b, l, h, k) = i·r + j. Of equal halves the
        smaller index comes first; of equal sums the pair of the smaller rank in the first half.

    Raises:
        ValueError: shapes or dtypes that do not fit, or k out of its range.

    Source: WM §3.3 and Listing 8; Ch Listing 4; Lample et al. (2019).
    """
    if queries.ndim != 5 or keys.ndim != 4 or keys.shape[1] != 2:
        raise ValueError(
            "queries must be (b, l, h, 2, m) and keys (h, 2, r, m), "
            f"got {tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    h, _, r, m = keys.shape
    if queries.shape[2:] != (h, 2, m):
        raise ValueError(
            f"queries must end in (h, 2, m) = {(h, 2, m)}, as keys say, got {tuple(queries.shape)}"
        )
    if queries.dtype != keys.dtype:
        raise ValueError(f"queries and keys must share a dtype, got {queries.dtype}, {keys.dtype}")
    if not 1 <= k <= r * r:
        raise ValueError(f"k must be in [1, r² = {r * r}], got {k}")

    best = min(k, r)
    first, second = _pairs_of_ranks(best, k, keys.device)
    found = []
    for block in queries.flatten(0, 1).split(TOKENS_PER_BLOCK):
        values, where = _topk(block.permute(1, 2, 0, 3) @ keys.mT, best)  # (h, 2, n, best)
        sums = values[:, 0].index_select(-1, first) + values[:, 1].index_select(-1, second)
        index = where[:, 0].index_select(-1, first) * r + where[:, 1].index_select(-1, second)
        sums, place = _topk(sums, k)
        found.append([t.transpose(0, 1) for t in (sums, index.gather(-1, place))])
    scores, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
    shape = (*queries.shape[:3], k)
    return scores.view(shape), indices.view(shape)


def neurons(
    x: Float[Tensor, "n d"], table: Float[Tensor, "e d"], indices: Int[Tensor, "n j"]
) -> Float[Tensor, "n j"]:
    """Compute the inner product of each token with its j rows of a table: x_n · table[indices_nj].

    `F.embedding_bag` computes Σ_j a_nj table[indices_nj] without gathering rows. Its gradient with
    respect to a, for a gradient x_n of the sum, is x_n · table[indices_nj]: what is wanted. So this
    is the backward pass of the bag, and the bag is the backward pass of this.

    Args:
        x: (n, d), tokens.
        table: (e, d), one row per neuron.
        indices: (n, j), in [0, e).

    Returns:
        (n, j). Nothing of size (n, j, d) is built for more than one token, in neither direction.

    Source: WM §3.3, φ(x)·dᵀ; He (2024), algorithm 1.
    """
    if len(x) == 1:  # decoding: a few rows, sooner gathered than walked through twice
        return (table[indices[0]] @ x[0])[None]
    return _Neurons.apply(x, table, indices)


def retrieved_experts(
    x: Float[Tensor, "b l d"],
    down: Float[Tensor, "e d"],
    up: Float[Tensor, "e o"],
    gates: Float[Tensor, "b l h k"],
    indices: Int[Tensor, "b l h k"],
    *,
    gate: Float[Tensor, "e d"] | None = None,
) -> Float[Tensor, "b l o"]:
    """Compute Σ gᵢ σ(x·downᵢ) upᵢ over the retrieved experts of all heads.

    Args:
        x: (b, l, d).
        down: (e, d), what a neuron listens to.
        up: (e, o), what it says; o is the width of the result.
        gates: (b, l, h, k).
        indices: (b, l, h, k).
        gate: (e, d), for gated neurons: gᵢ (x·downᵢ) σ(x·gateᵢ) upᵢ.

    Returns:
        (b, l, o).

    Source: WM §3.3; Ch Listing 4, with the gates outside of σ.
    """
    tokens = x.flatten(0, 1).to(down.dtype)  # autocast may have narrowed it
    rows, weights = (t.flatten(0, 1).flatten(1) for t in (indices, gates.to(down.dtype)))
    active = neurons(tokens, down, rows)
    active = F.silu(active) if gate is None else active * F.silu(neurons(tokens, gate, rows))
    y = F.embedding_bag(rows, up, per_sample_weights=weights * active, mode="sum")
    return y.view(*x.shape[:2], up.shape[1])


def retrieved_experts_written_out(
    x: Float[Tensor, "b l d"],
    down: Float[Tensor, "e d"],
    up: Float[Tensor, "e o"],
    gates: Float[Tensor, "b l h k"],
    indices: Int[Tensor, "b l h k"],
    *,
    gate: Float[Tensor, "e d"] | None = None,
) -> Float[Tensor, "b l o"]:
    """Compute what `retrieved_experts` computes from its formula, with every row gathered.

    Arguments and result are those of `retrieved_experts`; it takes h·k times the memory.

    Source: WM Listing 8; Ch Listing 4.
    """
    active = einsum("bld,blhkd->blhk", x, down[indices])
    if gate is None:
        active = F.silu(active)
    else:
        active = active * F.silu(einsum("bld,blhkd->blhk", x, gate[indices]))
    return einsum("blhk,blhko->blo", gates * active, up[indices])


class ProductKeys(nn.Module):
    """A router over e = r² experts by product keys: h heads, each with its own queries and keys.

    Args:
        d_model: width of the tokens.
        n_experts: e, a square.
        n_heads: h.
        k: experts per head, at most e.
        d_query: width of a query, both halves together; even.

    Raises:
        ValueError: a size below 1, n_experts not a square (the message names the two nearest), k
            above n_experts, or d_query odd.

    Source: WM §3.3 and Listing 8; Ch Listing 4, with keys that start random.
    """

    def __init__(self, d_model: int, *, n_experts: int, n_heads: int, k: int, d_query: int):
        super().__init__()
        _check_sizes(d_model=d_model, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query)
        r = math.isqrt(n_experts)
        if r * r != n_experts:
            raise ValueError(
                f"n_experts must be a square, r keys for each half: {n_experts} is not, "
                f"{r * r} and {(r + 1) ** 2} are"
            )
        if k > n_experts:
            raise ValueError(f"k = {k} experts per head, but there are only {n_experts}")
        if d_query % 2:
            raise ValueError(f"d_query must be even, to be cut into halves, got {d_query}")
        self.n_heads, self.k, self.n_experts = n_heads, k, n_experts
        self.query_proj = nn.Linear(d_model, n_heads * d_query, bias=False)
        self.keys = nn.Parameter(torch.randn(n_heads, 2, r, d_query // 2))

    def route(
        self, x: Float[Tensor, "b l d"]
    ) -> tuple[Float[Tensor, "b l h k"], Int[Tensor, "b l h k"]]:
        """Find the k experts of every head, for every token.

        Args:
            x: (b, l, d).

        Returns:
            gates (b, l, h, k), a softmax over each head's k scores, and indices (b, l, h, k). For
            k = 1 the gate is 1 and neither queries nor keys receive a gradient.
        """
        queries = self.query_proj(x).unflatten(-1, (self.n_heads, 2, -1))
        scores, indices = product_key_topk(queries.to(self.keys.dtype), self.keys, self.k)
        return scores.softmax(dim=-1), indices


class PEER(ProductKeys):
    """Experts of one neuron each, a few of a million for every token.

    Each head retrieves k experts, so a token's hidden layer has h·k neurons, put together for it.

    Args:
        d_model: d.
        n_experts: e, a square.
        n_heads: h.
        k: experts per head.
        d_query: width of a query, both halves together.

    Raises:
        ValueError: as `ProductKeys` does.

    Source: He (2024), Mixture of A Million Experts, algorithm 1.
    """

    def __init__(self, d_model: int, *, n_experts: int, n_heads: int, k: int, d_query: int):
        super().__init__(d_model, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query)
        self.down = nn.Parameter(torch.randn(n_experts, d_model) / math.sqrt(d_model))
        self.up = nn.Parameter(torch.randn(n_experts, d_model) / math.sqrt(n_heads * k))

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Compute y (b, l, d) = Σ gᵢ σ(x·downᵢ) upᵢ."""
        return retrieved_experts(x, self.down, self.up, *self.route(x))


class CDMMoE(nn.Module):
    """Cross domain million mixture of experts: gated neurons behind a shared gated MLP.

    s = gated MLP(x), shared; p = s W, narrower; y = Σ gᵢ (p·downᵢ) σ(p·gateᵢ) upᵢ.

    Args:
        d_model: d.
        d_ff: width of the shared MLP.
        n_experts, n_heads, k, d_query: as in `PEER`.
        d_private: width of p; None for d_model / 2, rounded up.

    Raises:
        ValueError: a size below 1, and as `ProductKeys` does.

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
        d_private = (d_model + 1) // 2 if d_private is None else d_private
        _check_sizes(d_model=d_model, d_ff=d_ff, d_private=d_private)
        self.shared = MLP(d_model, d_ff, gated=True)
        self.private_proj = nn.Linear(d_model, d_private, bias=False)
        self.retrieval = ProductKeys(
            d_private, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query
        )
        self.gate = nn.Parameter(torch.randn(n_experts, d_private) / math.sqrt(d_private))
        self.down = nn.Parameter(torch.randn(n_experts, d_private) / math.sqrt(d_private))
        self.up = nn.Parameter(torch.randn(n_experts, d_model) / math.sqrt(n_heads * k))

    def private(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l p"]:
        """Compute what the private experts see, (b, l, d_private)."""
        return self.private_proj(self.shared(x))

    def route(
        self, x: Float[Tensor, "b l d"]
    ) -> tuple[Float[Tensor, "b l h k"], Int[Tensor, "b l h k"]]:
        """Find the experts of every token x (b, l, d): gates and indices as `PEER.route`."""
        return self.retrieval.route(self.private(x))

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Compute y (b, l, d)."""
        p = self.private(x)
        return retrieved_experts(p, self.down, self.up, *self.retrieval.route(p), gate=self.gate)


class CDMoE(nn.Module):
    """Cross domain mixture of experts: a shared MLP φ, and experts of one neuron beside or on it.

    form="serial":   y = e(φ(x)) + φ(x), as in the listing; residual=False: y = e(φ(x))
    form="parallel": y = e(x) + φ(x)

    Args:
        d_model: d.
        d_ff: width of φ.
        n_experts, n_heads, k, d_query: as in `PEER`.
        form: whether the experts see φ(x) or x.
        residual: for "serial", whether φ(x) is added.

    Raises:
        ValueError: a size below 1, an unknown form, residual=False with "parallel", and as
            `ProductKeys` does.

    Source: WM eq. 5, §3.3 and Listing 8, with the gate outside of σ and normalised.
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
        form: Literal["serial", "parallel"] = "serial",
        residual: bool = True,
    ):
        super().__init__()
        if form not in ("serial", "parallel"):
            raise ValueError(f"form must be 'serial' or 'parallel', got {form!r}")
        if form == "parallel" and not residual:
            raise ValueError("residual=False belongs to form='serial': 'parallel' is e(x) + φ(x)")
        self.form, self.residual = form, residual
        self.shared = MLP(d_model, d_ff)
        self.experts = PEER(d_model, n_experts=n_experts, n_heads=n_heads, k=k, d_query=d_query)

    def route(
        self, x: Float[Tensor, "b l d"]
    ) -> tuple[Float[Tensor, "b l h k"], Int[Tensor, "b l h k"]]:
        """Find the experts of every token x (b, l, d): gates and indices as `PEER.route`."""
        return self.experts.route(self.shared(x) if self.form == "serial" else x)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Compute y (b, l, d)."""
        phi = self.shared(x)
        y = self.experts(phi if self.form == "serial" else x)
        return y + phi if self.residual else y


class ExpertStatistics(NamedTuple):
    """How a layer's experts were used: see `expert_statistics`."""

    load: Tensor
    entropy: float
    used: float


def expert_statistics(indices: Int[Tensor, "..."], n_experts: int) -> ExpertStatistics:
    """Count how often each expert was chosen.

    Args:
        indices: any shape, of `route`; several calls may be concatenated.
        n_experts: e.

    Returns:
        load (e,), the share of all choices that fell on each expert, float64; entropy, that of the
        load divided by log e: 1 where all experts are chosen equally often, 0 where one has all;
        used, the share of experts that were ever chosen.

    Raises:
        ValueError: an index outside [0, e).

    Source: none in the papers.
    """
    flat = indices.flatten()
    if flat.numel() and not 0 <= flat.min() <= flat.max() < n_experts:
        low, high = flat.min().item(), flat.max().item()
        raise ValueError(f"indices must be in [0, {n_experts}), got {low} to {high}")
    count = torch.bincount(flat, minlength=n_experts)
    load = count.double() / max(1, flat.numel())
    entropy = torch.special.entr(load).sum().item() / math.log(max(2, n_experts))
    return ExpertStatistics(load, entropy, (count > 0).double().mean().item())


def load_balancing_loss(
    gates: Float[Tensor, "..."], indices: Int[Tensor, "..."], n_experts: int
) -> Float[Tensor, ""]:
    """Compute e Σᵢ fᵢ Pᵢ: 1 where choices fall on all experts alike, e/k where all take the same k.

    fᵢ is the share of choices that fell on expert i, and Pᵢ the share of the gates. (In Switch
    Transformers Pᵢ is the mean of the whole softmax.) The gradient goes through the gates: those of
    experts that are chosen too often are pushed down.

    Args:
        gates: of `route`, > 0.
        indices: of `route`, the same shape.
        n_experts: e.

    Returns:
        A scalar in the dtype of the gates.

    Raises:
        ValueError: shapes that differ, no choice at all, or an index outside [0, e).

    Source: Fedus et al. (2021), Switch Transformers, eq. 4, over the chosen gates.
    """
    if gates.shape != indices.shape or not gates.numel():
        raise ValueError(
            f"gates and indices must share a shape that is not empty, got {tuple(gates.shape)} "
            f"and {tuple(indices.shape)}"
        )
    dtype, gates = gates.dtype, gates.to(torch.promote_types(gates.dtype, torch.float32))
    choices = expert_statistics(indices, n_experts).load.to(gates)
    share = gates.new_zeros(n_experts).index_add(0, indices.flatten(), gates.flatten())
    return (n_experts * (choices * share / gates.sum()).sum()).to(dtype)


class _Neurons(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table, indices):
        ctx.save_for_backward(x, table, indices)
        products = []
        with torch.inference_mode(False), torch.enable_grad():  # there is a gradient to be taken
            x, table, indices = (
                t.clone() if t.is_inference() else t.detach() for t in (x, table, indices)
            )
            # In blocks, whose rows stay in a core's cache between the bag and its gradient.
            tokens = max(1, ROWS_PER_BLOCK // max(1, indices.shape[1]))
            for block, rows in zip(x.split(tokens), indices.split(tokens), strict=True):
                weights = x.new_zeros(rows.shape).requires_grad_()
                bag = F.embedding_bag(rows, table, per_sample_weights=weights, mode="sum")
                products += torch.autograd.grad(bag, weights, block)
        return torch.cat(products)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, table, indices = ctx.saved_tensors
        with torch.enable_grad():
            table = table.detach().requires_grad_()
            bag = F.embedding_bag(indices, table, per_sample_weights=gradient, mode="sum")
        return bag.detach(), torch.autograd.grad(bag, table, x)[0], None


@functools.lru_cache(maxsize=64)
def _pairs_of_ranks(best, k, device):
    """Ranks (a, b) below best with (a + 1)(b + 1) ≤ k."""
    with torch.inference_mode(False):  # they may serve a backward pass later
        ranks = torch.arange(1, best + 1, device=device)
        return (ranks[:, None] * ranks <= k).nonzero(as_tuple=True)


def _topk(scores, k):
    """The k largest along the last axis, descending; of equal scores the smaller index first."""
    values, indices = _some_topk(scores, min(k + 1, scores.shape[-1]))
    tied = values[..., 1:] == values[..., :-1]
    values, indices = values[..., :k], indices[..., :k]
    if bool(tied.any()):  # torch leaves open which of them it takes
        tied = tied.any(dim=-1)
        order = scores[tied].argsort(dim=-1, descending=True, stable=True)[..., :k]
        indices = indices.masked_scatter(tied[..., None], order)
        values = scores.gather(-1, indices)
    return values, indices


def _some_topk(scores, k):
    """torch's topk; along a long axis only in the k groups of 8 with the largest maxima."""
    groups, left = divmod(scores.shape[-1], 8)
    if left or groups < 4 * k:
        return scores.topk(k, dim=-1)
    # Entry i is in group i mod groups. An entry of another group is no larger than its maximum,
    # and that is no larger than the k maxima chosen: so it is not needed.
    maxima = scores.detach().unflatten(-1, (8, groups)).amax(dim=-2)
    group = maxima.topk(k, dim=-1).indices
    entries = torch.arange(0, 8 * groups, groups, device=scores.device)
    inside = (group[..., None, :] + entries[:, None]).flatten(-2)
    values, place = scores.gather(-1, inside).topk(k, dim=-1)
    return values, inside.gather(-1, place)


def _check_sizes(**sizes):
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
