"""Routed mixtures: of many experts each token goes to k.

All of them take x (b, l, d) and return y (b, l, d), every token by itself. The rooms below are
re-exported, so that all layers without a sequence axis can be had from here.

    MLP, DGLU              feed_forward: what every token goes through
    MoE                    Σ gᵢ FFNᵢ(x) over the k experts that a router picks
    SharedExpertMoE        FFNˢ(x) + Σ gᵢ FFNᵢ(x)         isolation: one expert for everyone
    CohesiveMoE            the experts share V            OTCE eq. 18
    ExpansiveMoE           FFNᵢ(s ∘ sigmoid(s Wᵢ))        OTCE eq. 19, behind a shared s = FFNˢ(x)
    PEER, CDMMoE, CDMoE    retrieval: experts of one neuron, found by product keys

    code       shape        in the papers
    gates      (b, l, k)    g, of the k chosen experts
    indices    (b, l, k)    i, in [0, e)

`route` is public on every layer with experts, so that `expert_statistics` can be taken from
outside. Notebook 06 derives the layers.

Wrong shapes, sizes or values raise ValueError naming argument, letters and numbers (check.py).
Source: OTCE §3.2; Ch §3.3, A.4; WM §3.3, B.4.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cheems_ref import check
from cheems_ref.feed_forward import DGLU
from cheems_ref.feed_forward import MLP as MLP
from cheems_ref.precision import autocast_off
from cheems_ref.retrieval import PEER as PEER
from cheems_ref.retrieval import CDMMoE as CDMMoE
from cheems_ref.retrieval import CDMoE as CDMoE
from cheems_ref.retrieval import ProductKeys as ProductKeys
from cheems_ref.retrieval import naive_retrieved_experts as naive_retrieved_experts
from cheems_ref.retrieval import neurons as neurons
from cheems_ref.retrieval import product_key_topk as product_key_topk
from cheems_ref.retrieval import retrieved_experts as retrieved_experts

Tokens = Float[Tensor, "b l d"]
Gates = Float[Tensor, "b l k"]
Choices = Int[Tensor, "b l k"]


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

    Source: OTCE eqs. 15 and 17.
    """

    def __init__(
        self, d_model: int, d_ff: int, *, n_experts: int, k: int, renormalize: bool = False
    ):
        super().__init__()
        check.sizes(d_model=d_model, d_ff=d_ff, n_experts=n_experts, k=k)
        if k > n_experts:
            raise ValueError(f"k = {k} experts per token, but there are only {n_experts}")
        self.k, self.renormalize = k, renormalize
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList(DGLU(d_model, d_ff) for _ in range(n_experts))
        self._extend(d_model, d_ff)

    def _extend(self, d_model, d_ff):
        """Add what a subclass has besides a router and experts."""

    def route(self, x: Tokens) -> tuple[Gates, Choices]:
        """Choose the experts of every token: gates, descending, and indices."""
        check.width(x, self.router.in_features)
        with autocast_off(x.device):
            scores = self.router(x.to(self.router.weight.dtype))
        gates, indices = scores.softmax(dim=-1).topk(self.k, dim=-1)
        if self.renormalize:  # for k = 1 said outright: g / g would leave rounding as a gradient
            one = self.k == 1
            gates = torch.ones_like(gates) if one else gates / gates.sum(dim=-1, keepdim=True)
        return gates, indices

    def expert(self, i: int, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Compute expert i on its tokens."""
        return self.experts[i](x)

    def inactive_parameters(self) -> int:
        """Return how many parameters take no part in one token's result."""
        active = set(self.experts[: self.k].parameters())
        return sum(p.numel() for p in set(self.experts[self.k :].parameters()) - active)

    def forward(self, x: Tokens) -> Tokens:
        """Compute y: each expert sees the tokens that chose it and no others."""
        return _mix_experts(x, *self.route(x), self.expert, len(self.experts))


class SharedExpertMoE(MoE):
    """Shared-expert isolation: one expert of the same size for every token, beside the routed ones.

    Source: OTCE §2 (shared expert isolation); Dai et al. (2024), DeepSeekMoE.
    """

    def _extend(self, d_model, d_ff):
        self.shared = DGLU(d_model, d_ff)

    def forward(self, x: Tokens) -> Tokens:
        """Compute y: the shared expert plus the routed mixture."""
        return self.shared(x) + super().forward(x)


class CohesiveMoE(MoE):
    """Experts that share the matrix V of their second gate; W and W₂ are their own.

    Source: OTCE eq. 18.
    """

    def _extend(self, d_model, d_ff):
        # `apply(reset)` draws V once for each expert that holds it, and the last draw stays. To
        # start alike, the constructor too keeps the V that is drawn last.
        for expert in self.experts[:-1]:
            expert.V = self.experts[-1].V


class ExpansiveMoE(MoE):
    """Experts behind a shared one, each with a gate: FFNᵢ(s ∘ sigmoid(s Wᵢ)) with s = FFNˢ(x).

    As printed the gate s Wᵢ has no activation, so that s ∘ s Wᵢ is even in s: nothing odd in s
    comes through. Here it is a sigmoid. It takes d² parameters per expert. The router sees x.

    Source: OTCE eq. 19.
    """

    def _extend(self, d_model, d_ff):
        self.shared = DGLU(d_model, d_ff)
        self.gates = nn.ModuleList(nn.Linear(d_model, d_model, bias=False) for _ in self.experts)

    def expert(self, i: int, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Compute expert i on what the shared one made of its tokens."""
        return self.experts[i](x * torch.sigmoid(self.gates[i](x)))

    def inactive_parameters(self) -> int:
        """Return how many parameters take no part in one token's result."""
        gates = sum(p.numel() for p in self.gates[self.k :].parameters())
        return super().inactive_parameters() + gates

    def forward(self, x: Tokens) -> Tokens:
        """Compute y."""
        return _mix_experts(self.shared(x), *self.route(x), self.expert, len(self.experts))


def mix_experts(
    x: Tokens,
    gates: Gates,
    indices: Choices,
    expert: Callable[[int, Tensor], Tensor],
    n_experts: int,
) -> Tokens:
    """Compute Σ gᵢ expertᵢ(x) with each expert called once, on the tokens that chose it.

    Where no gradient is asked for, an expert that nobody chose is not called.

    Args:
        x: tokens.
        gates: of each choice.
        indices: which experts; no expert twice for one token.
        expert: a function of a number and of tokens (n, d).
        n_experts: e.

    Source: OTCE eq. 15a.
    """
    check.sizes(n_experts=n_experts)
    check.shapes(x=(x, "b l d"), indices=(indices, "b l k"), gates=(gates, "b l k"))
    check.dtypes(check.INDICES, indices=indices)
    check.entries(f"[0, {n_experts})", indices=indices)
    return _mix_experts(x, gates, indices, expert, n_experts)


def _mix_experts(x, gates, indices, expert, n_experts):
    tokens, k, choices = x.flatten(0, 1), indices.shape[-1], indices.flatten()
    # All choices in the order of their experts; the sizes of the groups are the one thing that the
    # device is asked.
    order = choices.argsort(stable=True)
    sizes = _sizes(choices, n_experts)
    groups = zip((order // k).split(sizes), gates.flatten()[order].split(sizes), strict=True)
    y = torch.zeros_like(tokens)
    for i, (token, gate) in enumerate(groups):
        # In training all experts take part, so that a gradient is zero where it is not None.
        if len(token) or torch.is_grad_enabled():
            weighted = gate[:, None] * expert(i, tokens[token])
            y.index_add_(0, token, weighted.to(y.dtype))
    return y.view_as(x)


def _sizes(choices, n_experts):
    """How often each expert was chosen, as numbers; on the meta device, where nobody is, evenly."""
    if choices.is_meta:
        return [(len(choices) + i) // n_experts for i in range(n_experts)]
    return _count(choices, n_experts).tolist()


def _count(choices, n_experts):
    """How often each expert was chosen; torch.bincount would ask the device for the extremes."""
    return choices.new_zeros(n_experts).index_add(0, choices, torch.ones_like(choices))


class ExpertStatistics(NamedTuple):
    """How a layer's experts were used: see `expert_statistics`."""

    load: Tensor
    entropy: float
    used: float


def expert_statistics(indices: Int[Tensor, "..."], n_experts: int) -> ExpertStatistics:
    """Count how often each expert was chosen.

    Args:
        indices: of `route`; several calls may be concatenated.
        n_experts: e.

    Returns:
        load (e,), the share of all choices that fell on each expert, float64; entropy, that of the
        load divided by log e: 1 where all experts are chosen equally often, 0 where one has all;
        used, the share of experts that were ever chosen.

    Source: none in the papers.
    """
    _check_choices(indices, n_experts)
    load = _load(indices, n_experts)
    entropy = torch.special.entr(load).sum().item() / math.log(max(2, n_experts))
    return ExpertStatistics(load, entropy, (load > 0).double().mean().item())


def load_balancing_loss(
    gates: Float[Tensor, "..."], indices: Int[Tensor, "..."], n_experts: int
) -> Float[Tensor, ""]:
    """Compute e Σᵢ fᵢ Pᵢ: 1 where choices fall on all experts alike, e/k where all take the same k.

    fᵢ is the share of choices that fell on expert i, and Pᵢ the share of the gates. (In Switch
    Transformers Pᵢ is the mean of the whole softmax.) The gradient goes through the gates: those of
    experts that are chosen too often are pushed down. Where all tokens take the same k experts the
    loss is e/k whatever the gates, and has no gradient: it keeps a load even, and does not undo
    a collapse.

    Args:
        gates: of `route`, > 0.
        indices: of `route`, of the same shape, not empty.
        n_experts: e.

    Source: Fedus et al. (2021), Switch Transformers, eq. 4, over the chosen gates.
    """
    if gates.shape != indices.shape or not gates.numel():
        raise ValueError(
            f"gates and indices must share a shape that is not empty, got {tuple(gates.shape)} "
            f"and {tuple(indices.shape)}"
        )
    check.floating(gates=gates)
    _check_choices(indices, n_experts)
    dtype, gates = gates.dtype, gates.to(torch.promote_types(gates.dtype, torch.float32))
    choices = _load(indices, n_experts).to(gates)
    share = gates.new_zeros(n_experts).index_add(0, indices.flatten(), gates.flatten())
    return (n_experts * (choices * share / gates.sum()).sum()).to(dtype)


def _check_choices(indices, n_experts):
    check.sizes(n_experts=n_experts)
    check.dtypes(check.INDICES, indices=indices)
    check.entries(f"[0, {n_experts})", indices=indices)


def _load(indices, n_experts):
    """The share of all choices that fell on each expert."""
    return _count(indices.flatten(), n_experts).double() / max(1, indices.numel())
