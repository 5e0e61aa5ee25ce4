"""Routed mixtures: each token goes to k of e experts.

Every layer takes x (b, l, d) and returns y (b, l, d), and treats each token independently.

    MoE                    Σ gᵢ FFNᵢ(x) over the k experts that a router picks
    SharedExpertMoE        FFNˢ(x) + Σ gᵢ FFNᵢ(x)         isolation: one expert for every token
    CohesiveMoE            the experts share V            OTCE eq. 18
    ExpansiveMoE           FFNᵢ(s ∘ sigmoid(s Wᵢ))        OTCE eq. 19, behind a shared s = FFNˢ(x)

    code       shape        in the papers
    gates      (b, l, k)    g, of the k chosen experts
    indices    (b, l, k)    i, in [0, e)

The layers of one-neuron experts (PEER, CDMMoE, CDMoE) are in retrieval.py, and can be imported
from here as well. `route` is public on every layer with experts: which experts each token goes to.
Notebook 06 derives the layers.

Wrong shapes, sizes or values raise ValueError, which names the argument (check.py).
Source: OTCE §3.2; Ch §3.3, A.4; WM §3.3, B.4.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cheems_ref import check
from cheems_ref.feed_forward import DGLU, MLP  # noqa: F401
from cheems_ref.precision import Float32Linear
from cheems_ref.retrieval import PEER, CDMMoE, CDMoE, ProductKeys, product_key_topk  # noqa: F401

Tokens = Float[Tensor, "b l d"]
Gates = Float[Tensor, "b l k"]
Choices = Int[Tensor, "b l k"]


class MoE(nn.Module):
    """A routed mixture: each token goes to the k experts with the largest softmax scores.

    The experts are DGLUs of equal size. The gates are the chosen scores, whose sum is below 1; the
    router learns through them. renormalize=True divides the gates by their sum. Then for k = 1 the
    gate is always 1, and the router receives no gradient.

    Args:
        d_model: d.
        d_ff: f, the width of one expert.
        n_experts: e.
        k: experts per token, at most e.
        renormalize: whether to scale the k gates of a token to a sum of 1.

    torch.func.grad works on this layer and on those below. torch.func.vmap does not: how many
    tokens an expert gets depends on their values.

    Source: OTCE eqs. 15 and 17.
    """

    def __init__(
        self, d_model: int, d_ff: int, *, n_experts: int, k: int, renormalize: bool = False
    ):
        super().__init__()
        check.sizes(d_model=d_model, d_ff=d_ff, n_experts=n_experts, k=k)
        check.numbers(f"[1, {n_experts}]", k=k)
        self.d_model, self.k, self.renormalize = d_model, k, renormalize
        self.router = Float32Linear(d_model, n_experts)
        self.experts = nn.ModuleList(self._make_expert(i, d_model, d_ff) for i in range(n_experts))
        self._extend(d_model, d_ff)

    def _make_expert(self, i, d_model, d_ff):
        """Make expert i."""
        return DGLU(d_model, d_ff)

    def _extend(self, d_model, d_ff):
        """Add the parts of a subclass, after the router and the experts."""

    def route(self, x: Tokens) -> tuple[Gates, Choices]:
        """Choose the experts of every token: return gates, descending, and indices.

        The gates are in float32, or in float64 for a float64 model.
        """
        check.shapes({"d": self.d_model}, x=(x, "b l d"))
        check.fits_weights(x, self.router)
        gates, indices = self.router(x).softmax(dim=-1).topk(self.k, dim=-1)
        if self.renormalize and self.k == 1:  # g / g would have rounding errors as its gradient
            return torch.ones_like(gates), indices
        return gates / gates.sum(dim=-1, keepdim=True) if self.renormalize else gates, indices

    def expert(self, i: int, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Compute expert i on its tokens."""
        return self.experts[i](x)

    def inactive_parameters(self) -> int:
        """Return how many parameters take no part in one token's result.

        Each list of modules has one module per expert; experts may share a parameter.
        """
        lists = [part for part in self.children() if isinstance(part, nn.ModuleList)]
        active = {p for part in lists for p in part[: self.k].parameters()}
        return sum(p.numel() for p in {p for part in lists for p in part.parameters()} - active)

    def forward(self, x: Tokens) -> Tokens:
        """Compute y; each expert is called on the tokens that chose it, and on no others."""
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

    The shared V is that of expert 0.

    Source: OTCE eq. 18.
    """

    def _make_expert(self, i, d_model, d_ff):
        return DGLU(d_model, d_ff, own_V=i == 0)

    def expert(self, i: int, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Compute expert i on its tokens, with the V of all experts."""
        return self.experts[i](x, x_V=self.experts[0].V(x))

    def forward(self, x: Tokens) -> Tokens:
        """Compute y. The shared x V is computed once per token, not once per chosen expert."""

        def expert(i, tokens, x_V):
            return self.experts[i](tokens, x_V=x_V)

        gates, indices = self.route(x)  # which checks x
        x_V = self.experts[0].V(x)
        return _mix_experts(x, gates, indices, expert, len(self.experts), shared=x_V)


class ExpansiveMoE(MoE):
    """Experts behind a shared one, each with a gate: FFNᵢ(s ∘ sigmoid(s Wᵢ)) with s = FFNˢ(x).

    The printed gate s Wᵢ has no activation. Then s ∘ s Wᵢ is even in s and loses its sign, so here
    the activation is a sigmoid. A gate has d² parameters per expert. The router sees x.

    Source: OTCE eq. 19.
    """

    def _extend(self, d_model, d_ff):
        self.shared = DGLU(d_model, d_ff)
        self.gates = nn.ModuleList(nn.Linear(d_model, d_model, bias=False) for _ in self.experts)

    def expert(self, i: int, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Compute expert i on the output of the shared expert."""
        return self.experts[i](x * torch.sigmoid(self.gates[i](x)))

    def forward(self, x: Tokens) -> Tokens:
        """Compute y."""
        return _mix_experts(self.shared(x), *self.route(x), self.expert, len(self.experts))


def _mix_experts(x, gates, indices, expert, n_experts, shared=None):
    """Compute Σ gᵢ expertᵢ(x) with each expert called once, on the tokens that chose it.

    Without gradients, an expert without tokens is not called.

    Args:
        x: tokens (b, l, d).
        gates: weight of each choice (b, l, k).
        indices: the chosen experts (b, l, k), different ones for each token.
        expert: a function of i and of tokens (n, d).
        n_experts: e.
        shared: (b, l, f), computed for every token; `expert` gets the rows of its tokens as well.

    Source: OTCE eq. 15a.
    """
    tokens, k, choices = x.flatten(0, 1), indices.shape[-1], indices.flatten()
    # Sort the choices by expert. Only the sizes of the groups synchronise with the device.
    order = choices.argsort(stable=True)
    sizes = _sizes(choices, n_experts)
    groups = zip((order // k).split(sizes), gates.flatten()[order].split(sizes), strict=True)
    y = torch.zeros_like(tokens)
    for i, (token, gate) in enumerate(groups):
        # In training every expert is called, so that unused experts get a zero gradient, not None;
        # and in export, where no size is known.
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or len(token):
            if shared is None:
                answer = expert(i, tokens[token])
            else:
                answer = expert(i, tokens[token], shared.flatten(0, 1)[token])
            y.index_add_(0, token, (gate[:, None] * answer).to(y.dtype))
    return y.view_as(x)


def _sizes(choices, n_experts):
    """Tokens per expert as Python numbers; evenly split on the meta device, which has no values."""
    if choices.is_meta:
        return [(len(choices) + i) // n_experts for i in range(n_experts)]
    return _count(choices, n_experts).tolist()


def _count(choices, n_experts):
    """Tokens per expert; torch.bincount would synchronise to find the range."""
    return choices.new_zeros(n_experts).index_add(0, choices, torch.ones_like(choices))


def load_balancing_loss(
    gates: Float[Tensor, "..."], indices: Int[Tensor, "..."], n_experts: int
) -> Float[Tensor, ""]:
    """Compute e Σᵢ fᵢ Pᵢ: 1 for an even load, e/k if all tokens take the same k experts.

    fᵢ is the share of choices that went to expert i, and Pᵢ its share of the gates. The
    gradient goes through the gates, and pushes down the gates of experts that are chosen too often.
    If all tokens take the same k experts, the loss is e/k for any gates and has no gradient. So the
    loss can keep a load even, but it cannot undo a total collapse. In Switch Transformers Pᵢ is the
    mean of the whole softmax, and has a gradient even then (chapter 06).

    Args:
        gates: from `route`, > 0.
        indices: from `route`, of the same shape, not empty.
        n_experts: e.

    Source: Fedus et al. (2021), Switch Transformers, eq. 4, over the chosen gates.
    """
    if gates.shape != indices.shape or not gates.numel():
        shapes = f"{tuple(gates.shape)} and {tuple(indices.shape)}"
        raise ValueError(f"gates and indices must share a shape that is not empty, got {shapes}")
    check.floating(gates=gates)
    _check_choices(indices, n_experts)
    dtype, gates = gates.dtype, gates.to(torch.promote_types(gates.dtype, torch.float32))
    choices = _load(indices, n_experts).to(gates)
    share = gates.new_zeros(n_experts).index_add(0, indices.flatten(), gates.flatten())
    return (n_experts * (choices * share / gates.sum()).sum()).to(dtype)


def _check_choices(indices, n_experts):
    """Reject indices that are not integers in [0, n_experts)."""
    check.sizes(n_experts=n_experts)
    check.dtypes(check.INDICES, indices=indices)
    check.entries(f"[0, {n_experts})", indices=indices)


def _load(indices, n_experts):
    """The share of all choices that went to each expert."""
    return _count(indices.flatten(), n_experts).double() / max(1, indices.numel())
