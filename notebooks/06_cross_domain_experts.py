# %% [markdown]
# # 06 · Cross-domain experts
#
# **A feed-forward layer is a memory of what to do with a token. This chapter makes it larger
# without making it slower: from one MLP to a million experts of one neuron each, found exactly.**
# When you are through you can
#
# - route tokens to experts by hand, and say which way of doing it teaches the router nothing;
# - measure how much experts repeat one another, and name three ways to share what they repeat;
# - prove that the best of a million sums can be found among the best of two thousand numbers;
# - evaluate retrieved neurons without gathering a single row, by running an operator backwards;
# - build the layers of OTCE, Cheems and Wonderful Matrices, and count their parameters and FLOPs;
# - recognise the printed slips: dead keys, scores in the wrong place, experts no one can reach.
#
# Time: about 90 minutes. Assumes: softmax, an MLP, a little PyTorch. Chapters 03 to 05 are not
# needed.
#
# Sources: *OTCE* §3.2; *Cheems* (Ch) §3.3 and Listing 4; *Wonderful Matrices* (WM) §3.3 and Listing
# 8; He, *Mixture of A Million Experts* (2024); Lample et al., *Large Memory Layers with Product
# Keys* (2019). The code that this notebook builds up to is `cheems_ref/experts.py`.

# %%
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from cheems_ref import experts, plotting, text
from cheems_ref.experts import (
    DGLU,
    MLP,
    PEER,
    CDMMoE,
    CDMoE,
    CohesiveMoE,
    ExpansiveMoE,
    MoE,
    SharedExpertMoE,
    expert_statistics,
    load_balancing_loss,
    product_key_topk,
)
from cheems_ref.verify import check, check_gradients, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters(make):
    """The number of parameters of a module, without making them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## Why this matters
#
# In a language model most parameters sit in the feed-forward layers: what the model *knows*, as far
# as one can point at it. A larger layer knows more, and costs more, for every token, whether the
# token needs it or not. A *sparse* layer holds many experts and asks a few. The two costs come
# apart: memory grows with the number of experts, time with the number that is asked.
#
# How far can that go? OTCE has four experts, Cheems 4,096, and nothing in the argument stops before
# a million. On the way there are two questions: what do experts learn *twice*, and how does one
# find the right sixteen of a million without looking at all of them?
#
# ## 1 · One expert
#
# The plain layer widens the token from $d$ to $f$, bends it, and narrows it again; σ is SiLU,
# $\sigma(z) = z/(1 + e^{-z})$. A *gated* layer multiplies two such maps. OTCE gates twice (eq. 13):
#
# $$\text{MLP: } \sigma(xW)\,W_2 \qquad \text{gated: } (\sigma(xW) \circ xV)\,W_2 \qquad
#   \text{DGLU: } (\sigma(xW) \circ \tanh(xV))\,W_2. \tag{6.1}$$

# %%
_ = torch.manual_seed(0)
d, f = 6, 10
x = random(2, 5, d, seed=0)  # (b, l, d)
mlp, gated, dglu = MLP(d, f), MLP(d, f, gated=True), DGLU(d, f)


def silu(z):
    return z / (1 + torch.exp(-z))


with torch.no_grad():
    check("MLP", mlp(x), silu(x @ mlp.in_proj.weight.T) @ mlp.out_proj.weight.T)
    by_hand = silu(x @ gated.gate_proj.weight.T) * (x @ gated.in_proj.weight.T)
    check("gated MLP", gated(x), by_hand @ gated.out_proj.weight.T)
    by_hand = silu(x @ dglu.W.weight.T) * torch.tanh(x @ dglu.V.weight.T)
    check("DGLU", dglu(x), by_hand @ dglu.W_2.weight.T)
    _ = must_differ("DGLU without its second gate", gated(x), dglu(x))
    by_sigmoid = DGLU(d, f, gate="sigmoid")
    by_hand = silu(x @ by_sigmoid.W.weight.T) / (1 + torch.exp(-x @ by_sigmoid.V.weight.T))
    check("DGLU with a sigmoid", by_sigmoid(x), by_hand @ by_sigmoid.W_2.weight.T)

# %% [markdown]
# ## 2 · Routing by hand
#
# Take $e$ such layers, the *experts*. A *router* gives every expert a score for every token, a
# softmax makes them shares, the $k$ largest are kept, and the token's output is the mixture (OTCE
# eq. 15):
#
# $$y = \sum_{i \,\in\, \text{top-}k} g_i\,\mathrm{FFN}_i(x), \qquad g = \mathrm{softmax}(x W_r).
#   \tag{6.2}$$
#
# Three tokens, four experts, $k = 2$:

# %%
_ = torch.manual_seed(1)
moe = MoE(d, f, n_experts=4, k=2)
tokens = x[:1, :3]
with torch.no_grad():
    shares = (tokens @ moe.router.weight.T).softmax(-1)[0]
    gates, indices = moe.route(tokens)
    for t in range(3):
        row = "  ".join(f"{share:.2f}" for share in shares[t])
        print(f"token {t}: shares {row}   asks experts {indices[0, t].tolist()}")

    y = torch.zeros(3, d)
    for t in range(3):
        for i in shares[t].argsort(descending=True)[:2]:
            y[t] += shares[t, i] * moe.experts[i](tokens[0, t])
    check("mixture by hand = MoE", moe(tokens)[0], y)
    sums = gates.sum(-1)
    assert (sums < 1).all()
    print(
        "the kept gates sum to less than 1, here between", f"{sums.min():.2f} and {sums.max():.2f}"
    )

# %% [markdown]
# (OTCE keeps the gates as they are; dividing by their sum is an option here, `renormalize`.) The
# package groups tokens by expert, so that an expert is called once, on the tokens that asked for
# it. The definition it has to equal runs *all* experts on *all* tokens:


# %%
def dense(layer, x):
    """All experts on all tokens, weighted by gates that are zero for those not asked."""
    gates, indices = layer.route(x)
    weights = torch.zeros(*x.shape[:2], len(layer.experts)).scatter(-1, indices, gates)
    outputs = torch.stack([expert(x) for expert in layer.experts], dim=-2)  # (b, l, e, d)
    return torch.einsum("ble,bled->bld", weights, outputs)


check("grouped by expert = dense", moe(x), dense(moe, x))
check_gradients("grouped by expert = dense", moe, lambda x: dense(moe, x), [x])

# %% [markdown]
# **Which router learns?** The loss reaches the router through the gates. With $k = 1$ and gates
# divided by their sum, the gate is 1 whatever the router says: no gradient.

# %%
for k, renormalize in ((2, False), (2, True), (1, False), (1, True)):
    _ = torch.manual_seed(2)
    layer = MoE(d, f, n_experts=4, k=k, renormalize=renormalize)
    layer(x).square().sum().backward()
    gradient = layer.router.weight.grad
    learns = gradient is not None and bool(gradient.abs().max() > 1e-6)
    print(f"k = {k}, renormalised: {renormalize!s:5}   router learns: {learns}")
    assert learns == (k > 1 or not renormalize)

# %% [markdown]
# **A probe for leaks.** A token's output depends on that token alone. It is easy to break this
# without any error message: the router's output has the shape (tokens, experts), and a `view` where
# a transpose was meant mixes the scores of different tokens. The shapes still fit. So we move one
# token and look at the others:


# %%
def others_stay(function, x):
    """Whether moving token (1, 2) leaves every other token's output as it was."""
    moved = x.clone()
    moved[1, 2] += 1
    change = (function(moved) - function(x)).abs().amax(-1)
    assert change[1, 2] > 1e-6
    change[1, 2] = 0
    return bool(change.max() < 1e-12)


def leaky(x):
    """As MoE, but the router's output is viewed as (experts, tokens) before it is transposed."""
    logits = moe.router(x).flatten(0, 1)  # (tokens, e)
    shares = logits.softmax(-1).view(logits.shape[1], -1).T  # view, then T: not the identity
    gates, indices = shares.reshape(*x.shape[:2], -1).topk(2, dim=-1)
    return experts.mix_experts(x, gates, indices, moe.expert, 4)


with torch.no_grad():
    print("MoE: other tokens stay:", others_stay(moe, x), "  leaky:", others_stay(leaky, x))
    assert others_stay(moe, x) and not others_stay(leaky, x)

# %% [markdown]
# ## 3 · What experts learn twice
#
# > "[…] multiple routing experts will have redundant parameters that store common information when
# > obtaining their respective parameters." — OTCE §3.2, Shared Strategy
#
# Can that be seen? Take a task in which every token needs the same map $x \mapsto Cx$, plus one of
# four that depends on its kind: $y = Cx + S_{\text{kind}}\,x$. Give every kind its own expert, by a
# fixed router, and train. Then read off the linear map that each expert applies to its own tokens,
# and ask how much the four maps have in common: the size of their mean against their size.


# %%
def train_on_kinds(make, steps, seed=0, kinds=4, d=8):
    """Fit y = Cx + S_kind x: the error, and the common share of the maps, learned and true."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(d, d, generator=generator)
    special = torch.randn(kinds, d, d, generator=generator) / 2
    marks = 3 * torch.eye(kinds, d)  # the first entries of a token say its kind, the others x
    layer = make()
    layer.router.weight.data.zero_()
    layer.router.weight.data[:, :kinds] = 2 * torch.eye(kinds)
    layer.router.weight.requires_grad_(False)
    optimizer = torch.optim.Adam(layer.parameters(), lr=5e-3)

    def batch(n):
        kind = torch.randint(kinds, (1, n), generator=generator)
        x = torch.randn(1, n, d, generator=generator)
        x[..., :kinds] = 0
        target = x @ common + torch.einsum("bld,blde->ble", x, special[kind])
        return x + marks[kind], target

    def common_share(maps):
        return (kinds * maps.mean(0).square().sum() / maps.square().sum()).item()

    for _ in range(steps):
        x, target = batch(256)
        optimizer.zero_grad()
        F.mse_loss(layer(x), target).backward()
        optimizer.step()
    with torch.no_grad():
        x, target = batch(4096)
        error = (F.mse_loss(layer(x), target) / target.var()).item()
        gates, indices = layer.route(x)
        learned = []
        for i in range(kinds):
            own = (indices[0, :, 0] == i).nonzero()[:, 0]
            z, out = x[0, own, kinds:], gates[0, own] * layer.expert(i, x[0, own])
            learned.append(torch.linalg.lstsq(z - z.mean(0), out - out.mean(0)).solution)
    true = (common + special)[:, kinds:]
    return error, common_share(torch.stack(learned)), common_share(true)


common = {}
for name, kind in (("routed only", MoE), ("with a shared expert", SharedExpertMoE)):
    runs = [
        train_on_kinds(lambda kind=kind: kind(8, 16, n_experts=4, k=1), 600, seed)
        for seed in range(3)
    ]
    assert max(error for error, _, _ in runs) < 0.02
    common[name] = [share for _, share, _ in runs]
    true = [share for _, _, share in runs]
assert all(abs(a - b) < 0.02 for a, b in zip(common["routed only"], true, strict=True))
assert min(common["routed only"]) > 0.8 and max(common["with a shared expert"]) < 0.75
print("task solved to 2 %, three seeds; share of the routed experts' maps that all have in common:")
print("alone over 80 %, as in the true maps;  with a shared expert under 75 %")

# %% [markdown]
# (Four unrelated maps would have a quarter in common, by chance.) Every expert has learned $C$ for
# itself, four times the same. A shared expert takes part of it over.
#
# Why the fixed router? Left to itself, a router of this size often sends several kinds to one
# expert and leaves others unused: a problem of its own, which §4 comes back to.
#
# ## 4 · Three ways to share
#
# | OTCE eq. | the routed experts | shared by all |
# |---|---|---|
# | isolation | $\text{FFN}_i(x)$ | an expert beside them: $+\,\text{FFN}^s(x)$ |
# | cohesive (18) | $(\sigma(xW_i) \circ \tanh(xV))\,W_{2,i}$ | $V$, inside |
# | expansive (19) | $\text{FFN}_i(s \circ \mathrm{sg}(s W_i))$ | $s = \text{FFN}^s(x)$, before |
#
# (sg is the sigmoid.) Isolation adds common knowledge to the answer. The expansive form hands it to
# the experts first, each with a gate of its own for what it wants of it. By hand, for all experts
# on all tokens:

# %%
shared, cohesive, expansive = (
    kind(d, f, n_experts=4, k=2) for kind in (SharedExpertMoE, CohesiveMoE, ExpansiveMoE)
)
with torch.no_grad():
    check("isolation", shared(x), shared.shared(x) + dense(shared, x))
    V = cohesive.experts[0].V.weight
    assert all(expert.V.weight is V for expert in cohesive.experts)
    check("cohesive", cohesive(x), dense(cohesive, x))

    s = expansive.shared(x)
    gates, indices = expansive.route(x)
    y = torch.zeros_like(x)
    for i in range(4):
        weight = (gates * (indices == i)).sum(-1, keepdim=True)
        opened = torch.sigmoid(s @ expansive.gates[i].weight.T)
        y += weight * expansive.experts[i](s * opened)
    check("expansive", expansive(x), y)
    _ = must_differ("expansive without its gates", dense(expansive, s), y)

# %% [markdown]
# What they cost, at $d = 1024$, $f = 2048$, four experts (counted on torch's *meta* device, which
# makes no numbers):

# %%
for kind in (MoE, SharedExpertMoE, CohesiveMoE, ExpansiveMoE):
    count = parameters(lambda kind=kind: kind(1024, 2048, n_experts=4, k=1))
    print(f"{kind.__name__:16} {count:12,} parameters")
gate = 4 * 1024**2
print(f"of the last, the four gates alone take {gate:,}")

# %% [markdown]
# **Keeping everyone busy.** A router may come to love one expert, which then learns more and is
# loved more. Statistics from outside need no hooks, since `route` is public: the load of each
# expert, its entropy as a share of the possible, and how many experts are used at all. An optional
# loss, $e \sum_i f_i P_i$ with $f_i$ the share of choices and $P_i$ the share of the gates, is 1
# for an even load, and $e/k$ if all tokens take the same $k$ experts. Its gradient alone evens out
# a router that was made to prefer expert 0:

# %%
_ = torch.manual_seed(3)
layer = MoE(d, f, n_experts=4, k=2)
many = random(8, 64, d, seed=4)
many[..., 0] = 2  # the same in all tokens, so that one expert can be preferred by all
layer.router.weight.data[0, 0] += 2
optimizer = torch.optim.Adam([layer.router.weight], lr=2e-2)
before = expert_statistics(layer.route(many)[1], 4)
for _ in range(200):
    optimizer.zero_grad()
    load_balancing_loss(*layer.route(many), 4).backward()
    optimizer.step()
after = expert_statistics(layer.route(many)[1], 4)
assert before.load[0] > 0.45 and after.entropy > 0.99 > before.entropy
print(f"load before {[f'{share:.2f}' for share in before.load.tolist()]}")
print("after 200 steps of the loss alone: entropy over 99 % of the possible")

# %% [markdown]
# ## 5 · A million experts: the router is the problem
#
# Make the experts smaller and more numerous, down to one neuron each. Then there is nothing left to
# compute *in* an expert, but a router that scores $e$ experts is a matrix of $d \times e$, and a
# softmax over $e$ numbers for every token:

# %%
d_large, heads, k, m = 256, 4, 16, 64
for r in (16, 64, 256, 1024):
    e = r * r
    print(
        f"e = {e:9,}   router, 4 heads: {heads * d_large * e:13,} multiplications per token"
        f"   product keys: {heads * (d_large * 2 * m + 2 * r * m):9,}"
    )

# %% [markdown]
# **Product keys** (Lample et al., 2019) make a million keys out of two thousand. Cut the query into
# halves $q = (q_1, q_2)$, and let expert $(i, j)$, with $i, j < r$ and $e = r^2$, have the key
# $(\kappa_{1,i}, \kappa_{2,j})$. Then its score is a *sum*
#
# $$s_{ij} = q_1 \cdot \kappa_{1,i} + q_2 \cdot \kappa_{2,j} = a_i + b_j, \tag{6.3}$$
#
# and $2r$ inner products hold all $r^2$ scores.
#
# ## 6 · The theorem
#
# **The $k$ largest of all $r^2$ sums lie among the sums of the $k$ largest $a_i$ with the $k$
# largest $b_j$.** *Proof.* Let $a_i$ not be among the $k$ largest. Then there are $k$ others with
# $a_{i'} \ge a_i$, and for any $j$ the $k$ sums $a_{i'} + b_j$ are at least $a_i + b_j$. So $(i,
# j)$ is not needed. The same for $j$. ∎
#
# So $k^2$ candidates will do. Even fewer: sort both halves. The pair of ranks $(u, v)$, counted
# from 0, is beaten or equalled by every pair $(u', v')$ with $u' \le u$ and $v' \le v$; there are
# $(u+1)(v+1)$ of them with itself. So only pairs with $(u + 1)(v + 1) \le k$ need be
# looked at: about $k \ln k$ instead of $k^2$.

# %%
for k in (4, 16, 64):
    pairs = sum((u + 1) * (v + 1) <= k for u in range(k) for v in range(k))
    print(f"k = {k:2}: {k * k:5} candidates of the theorem, {pairs:4} of the sharper one")

# %%
r, k = 24, 16
a, b = random(2, r, seed=5).sort(descending=True).values
sums = a[:, None] + b
best = torch.zeros(r * r).scatter(0, sums.flatten().topk(k).indices, 1.0).view(r, r)
rank = torch.arange(1, r + 1)
candidates = ((rank[:, None] * rank) <= k).double()
assert (best <= candidates).all()

fig, axes = plotting.figure(1, 2, size=(12, 5.4))
plotting.heatmap(axes[0], sums, title="all sums $a_i + b_j$, both sorted", colorbar=False)
plotting.heatmap(
    axes[1],
    candidates + 2 * best,
    title="candidates, and the 16 best",
    signed=False,
    colorbar=False,
)
axes[1].plot([-0.5, k - 0.5, k - 0.5], [k - 0.5, k - 0.5, -0.5], color=plotting.COLORS[1])
for ax in axes:
    ax.set_xlabel("rank of $b_j$")
axes[0].set_ylabel("rank of $a_i$")
plotting.save(
    fig,
    "06_product_keys",
    "Left: a square of sums that falls from the upper left corner. Right: the candidates, a region "
    "under a hyperbola along both axes, within a square of side 16; the 16 best, dark, lie in it, "
    "near the corner.",
)

# %% [markdown]
# The package searches so, for every token and head, and returns exactly what brute force finds: the
# same scores to the last bit, and the same experts wherever scores differ.

# %%
queries, keys = random(2, 50, 3, 2, 4, seed=6), random(3, 2, 12, 4, seed=7)
halves = (queries.flatten(0, 1).permute(1, 2, 0, 3) @ keys.mT).permute(2, 0, 1, 3)
halves = halves.unflatten(0, (2, 50))  # (b, l, h, 2, r), summed in the order of the package
all_sums = (halves[..., 0, :, None] + halves[..., 1, None, :]).flatten(-2)
for k in (1, 4, 16, 144):
    scores, indices = product_key_topk(queries, keys, k)
    brute_scores, brute_indices = all_sums.topk(k)
    assert torch.equal(scores, brute_scores) and torch.equal(indices, brute_indices)
print("k = 1, 4, 16, 144 of 144: the same scores to the last bit, and the same experts")

equal_keys = torch.zeros_like(keys)
_, indices = product_key_topk(queries, equal_keys, 4)
print("all scores equal: experts", indices[0, 0, 0].tolist(), "(the smaller index first)")

too_few, _ = product_key_topk(queries, keys, 4)
halves_top2 = halves.topk(2).values
of_top2 = (halves_top2[..., 0, :, None] + halves_top2[..., 1, None, :]).flatten(-2)
_ = must_differ("2 of each half for k = 4", of_top2.sort(descending=True).values, too_few)

# %% [markdown]
# ## 7 · Experts of one neuron
#
# An expert of one neuron listens in one direction $w_i$ and speaks in one direction $u_i$. With $h$
# heads that retrieve $k$ each, a token's hidden layer has $h \cdot k$ neurons, put together for
# this token out of a million (PEER; He, 2024):
#
# $$y = \sum_{\text{heads}} \sum_{i \,\in\, \text{top-}k} g_i\; \sigma(x \cdot w_i)\; u_i, \qquad
#   g = \mathrm{softmax}(\text{the head's } k \text{ scores}). \tag{6.4}$$

# %%
_ = torch.manual_seed(4)
peer = PEER(d, n_experts=64, n_heads=2, k=3, d_query=8)
with torch.no_grad():
    gates, indices = peer.route(x)
    y = torch.zeros_like(x)
    for row in range(2):
        for t in range(5):
            for g, i in zip(gates[row, t].flatten(), indices[row, t].flatten(), strict=True):
                y[row, t] += g * silu(x[row, t] @ peer.down[i]) * peer.up[i]
    check("PEER = equation 6.4, neuron by neuron", peer(x), y)

# %% [markdown]
# **Without gathering.** Written with tensors one would gather the rows, `down[indices]`, of shape
# (b, l, h, k, d): for 512 tokens, 64 neurons and $d = 256$ these are 8 million numbers, copied
# twice, to be used once. Look at the second half first. $\sum_j a_j\,u_{i_j}$ is a weighted sum of
# rows, and torch has it as one operator that copies nothing: the *embedding bag*.
#
# And the first half, the inner products $x \cdot w_{i_j}$? Differentiate the bag $B(a) = \sum_j a_j
# w_{i_j}$ by its weights, for a gradient $x$ that comes back:
#
# $$\frac{\partial}{\partial a_j}\,\langle x, B(a)\rangle = \langle x, w_{i_j} \rangle. \tag{6.5}$$
#
# It is exactly what we want. *Reading with rows is the backward pass of mixing rows*, and the other
# way round: the gradient of $\langle x, w_{i_j}\rangle$ by $x$ is a bag. The two operators are each
# other's adjoints.

# %%
table, rows = (
    random(64, d, seed=8),
    torch.randint(64, (5, 6), generator=torch.Generator().manual_seed(9)),
)
tokens = random(5, d, seed=10)
a = torch.zeros(5, 6, requires_grad=True)
bag = F.embedding_bag(rows, table, per_sample_weights=a, mode="sum")
(products,) = torch.autograd.grad(bag, a, tokens)
gathered = torch.einsum("nd,njd->nj", tokens, table[rows])
check("gradient of a bag = inner products with its rows", products, gathered)
check("experts.neurons", experts.neurons(tokens, table, rows), gathered)
check_gradients(
    "experts.neurons = gathered",
    lambda tokens, table: experts.neurons(tokens, table, rows),
    lambda tokens, table: torch.einsum("nd,njd->nj", tokens, table[rows]),
    [tokens, table],
)

x_, down, up = random(2, 5, d, seed=11), random(64, d, seed=12), random(64, d, seed=13)
check(
    "both halves = the formula, written out",
    experts.retrieved_experts(x_, down, up, gates, indices),
    experts.retrieved_experts_written_out(x_, down, up, gates, indices),
)
check_gradients(
    "both halves = the formula, written out",
    lambda *t: experts.retrieved_experts(*t, indices),
    lambda *t: experts.retrieved_experts_written_out(*t, indices),
    [x_, down, up, gates],
)

# %% [markdown]
# How much is written on the way? The largest tensor that each form makes, for 64 tokens, 4 heads,
# $k = 16$ and $d = 256$:

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Remembers the number of entries of the largest tensor that an operation made."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else [out]
        if not func.is_view:
            sizes = [t.numel() for t in made if torch.is_tensor(t)]
            self.entries = max(self.entries, *sizes, 0)
        return out


x_ = random(1, 64, 256, seed=14)
down, up = random(2, 1024, 256, seed=15)
gates = torch.rand(1, 64, 4, 16, generator=torch.Generator().manual_seed(16))
indices = torch.randint(1024, (1, 64, 4, 16), generator=torch.Generator().manual_seed(17))
largest = {}
for name, function in (
    ("gathered", experts.retrieved_experts_written_out),
    ("bags", experts.retrieved_experts),
):
    with LargestTensor() as counter:
        function(x_, down, up, gates, indices)
    largest[name] = counter.entries
    print(f"{name:9} largest tensor: {counter.entries:9,} entries")
assert largest["gathered"] == 64 * 64 * 256 and largest["bags"] <= 64 * 256

# %% [markdown]
# ## 8 · Cross domain: share first, then retrieve
#
# A million small experts repeat what is common a million times. So Cheems and WM put a shared layer
# beside or before them, the *cross domain*. WM has two forms (eq. 5), with $\varphi(x) =
# \sigma(xW)V$ a plain MLP and $e(\cdot)$ the sum over retrieved neurons:
#
# $$y = e(x) + \varphi(x) \qquad\text{and}\qquad y = e(\varphi(x)). \tag{6.6}$$
#
# Its Listing 8 computes the second and adds $\varphi(x)$ to it, as the text advises those who are
# "worried that the non-linear activation in the previous step will destroy the cross domain state".
# Ch Listing 4 (CDMMOE) is the second with more gates: a gated MLP, a projection to a narrower
# private width, and gated neurons.

# %%
_ = torch.manual_seed(5)
sizes = dict(d_ff=12, n_experts=64, n_heads=2, k=3, d_query=8)
serial, bare = CDMoE(d, **sizes), CDMoE(d, **sizes, residual=False)
parallel, cdmmoe = CDMoE(d, **sizes, form="parallel"), CDMMoE(d, **sizes)


def e_of(peer, z):
    """The retrieved neurons on z, written out."""
    return experts.retrieved_experts_written_out(z, peer.down, peer.up, *peer.route(z))


with torch.no_grad():
    phi = serial.shared(x)
    check("CDMoE, serial: e(φ(x)) + φ(x)", serial(x), e_of(serial.experts, phi) + phi)
    phi = bare.shared(x)
    check("CDMoE, serial without residual: e(φ(x))", bare(x), e_of(bare.experts, phi))
    phi = parallel.shared(x)
    check("CDMoE, parallel: e(x) + φ(x)", parallel(x), e_of(parallel.experts, x) + phi)
    _ = must_differ("parallel on φ(x)", e_of(parallel.experts, phi) + phi, parallel(x))

    p = cdmmoe.private_proj(cdmmoe.shared(x))
    gates, indices = cdmmoe.retrieval.route(p)
    tables = (cdmmoe.down, cdmmoe.up, gates, indices)
    by_rows = experts.retrieved_experts_written_out(p, *tables, gate=cdmmoe.gate)
    check("CDMMoE: gated neurons on a projection of a gated MLP", cdmmoe(x), by_rows)
    ungated = experts.retrieved_experts_written_out(p, *tables)
    _ = must_differ("CDMMoE without the neurons' gates", ungated, by_rows)

for layer in (moe, shared, cohesive, expansive, peer, serial, bare, parallel, cdmmoe):
    layer.zero_grad()
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    with torch.no_grad():
        assert others_stay(layer, x)
print("nine layers: every parameter receives a gradient, no token sees another")

# %% [markdown]
# ## 9 · Counted and measured
#
# > "Compared to CDMOE […], it can expand the number of experts 1024 times (from 4 to 4096) under
# > the same shared dimension (4096) and private dimension (2048) while maintaining the same number
# > of parameters […]" — Ch §3.3
#
# The width $d$ is not given there; for $d = 1024$, on the meta device:

# %%
d_model = 1024
four = parameters(lambda: ExpansiveMoE(d_model, 2048, n_experts=4, k=1))
# OTCE's shared expert is twice as wide as the private ones
four += parameters(lambda: DGLU(d_model, 4096)) - parameters(lambda: DGLU(d_model, 2048))
print(f"expansive, 4 experts:            {four:11,} parameters")
ratio = {}
for heads in (1, 2, 4, 8):
    sizes = dict(n_experts=4096, n_heads=heads, k=8, d_query=2048)
    many = parameters(lambda sizes=sizes: CDMMoE(d_model, d_ff=4096, d_private=2048, **sizes))
    ratio[heads] = many / four
    print(f"CDMMoE, 4096 experts, {heads} head(s): {many:11,}   {ratio[heads]:.2f} times")
assert abs(ratio[1] - 1) < 0.1 and abs(ratio[2] - 1) < 0.1 and ratio[8] > 1.5

# %% [markdown]
# With one or two heads the claim holds for the whole layer. With eight it does not: Listing 4 makes
# its queries by a matrix from the private width to `private // 2 * heads * 2`, which is then nearly
# as large as all the rest. (And an expert is not what it was: 4,096 neurons now, four times 2,048
# then.)
#
# OTCE's argument for the expansive form is another count. Where the experts share $V$ (cohesive),
# the shared part is $df$ against $2df$ private weights for each of $N$ experts: 1 to 8 for its four
# experts, and vanishing for many.

# %%
for n_experts in (4, 64, 4096):
    layer = parameters(lambda n=n_experts: CohesiveMoE(64, 128, n_experts=n, k=1))
    shared_part = 64 * 128
    private = layer - shared_part - 64 * n_experts  # without the router
    print(f"cohesive, {n_experts:4} experts: shared to private 1 : {private / shared_part:g}")
    assert private == 2 * n_experts * shared_part

# %% [markdown]
# FLOPs per token, counted by torch while the layer runs, against the formula: two for every weight
# of a matrix that is used. (The bags are no matrix products, so their $2 \cdot 2hkd$ are added by
# hand.)

# %%
d_model, f, r, h, k, d_query = 64, 256, 32, 4, 8, 32
layer = CDMoE(d_model, d_ff=f, n_experts=r * r, n_heads=h, k=k, d_query=d_query)
tokens = random(1, 128, d_model, seed=18)
with FlopCounterMode(display=False) as counter, torch.no_grad():
    layer(tokens)
predicted = 2 * (2 * d_model * f + d_model * h * d_query + h * r * d_query)
assert counter.get_total_flops() == 128 * predicted
print(f"matrix products: {predicted:,} FLOPs per token, as predicted")
print(f"bags: {2 * 2 * h * k * d_model:,}")
dense_flops = 2 * 2 * d_model * r * r
print(f"the same {r * r} neurons as one dense MLP: {dense_flops:,}")

# %% [markdown]
# Memory grows with the number of experts, time with the number that is asked: that is so when a
# model is *used*. In training, the tables get gradients as large as themselves, and the optimiser
# goes through all of it: with a million experts of width 256, two gigabytes of each per step.
#
# Time against the number of experts (from a record, `python tests/bench/bench_experts.py --json
# figures/records/06_growth.json`: 512 tokens, $d = 256$, 4 heads, $k = 16$, float32, two CPU
# cores). PEER-pytorch is a public implementation that gathers its rows. Below some two thousand
# neurons a dense layer that asks everyone is faster than any search:

# %%
growth = json.loads(Path("../figures/records/06_growth.json").read_text())
fig, ax = plotting.figure(size=(9, 4.4))
for (name, times), marker in zip(growth["milliseconds"].items(), "os^", strict=True):
    sizes = growth["experts"][: len(times)]
    ax.loglog(sizes, times, marker=marker, label=name)
ours = dict(zip(growth["experts"], growth["milliseconds"]["product keys, bags"], strict=True))
assert ours[2**20] < 4 * ours[2**12]
ax.set(xlabel="number of experts", ylabel="ms, forward")
ax.legend()
plotting.save(
    fig,
    "06_growth",
    "Time of a forward pass against the number of experts, both logarithmic, from 256 on. "
    "Product keys grow by less than a factor of four over the last eight doublings; gathering "
    "rows takes about four times as long at the small sizes and twice as long at a million; a "
    "dense MLP with as many neurons is the fastest below two thousand and grows in proportion.",
)

# %% [markdown]
# ## 10 · Who fires for what
#
# A small model of one token to the next: embedding of a byte, CDMoE with 1,024 experts, a map to
# the next byte, trained on the manual that ships with Python. Which experts does it ask for
# which byte?


# %%
def train_on_bytes(steps, seed=0):
    """Train embedding, CDMoE and head to predict the next byte; loss before and after, model."""
    torch.manual_seed(seed)
    ids = text.text_to_ids(text.read_text())
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 32),
        CDMoE(32, d_ff=64, n_experts=1024, n_heads=4, k=4, d_query=16),
        torch.nn.RMSNorm(32),
        torch.nn.Linear(32, 256),
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        start = torch.randint(len(ids) - 65, (16,), generator=generator)
        window = torch.stack([ids[s : s + 65] for s in start.tolist()])
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def fires_for(model, characters):
    """The share of each character's choices that falls on each expert: (characters, experts)."""
    with torch.no_grad():
        tokens = model[0](torch.tensor(list(characters.encode())))[None]
        gates, indices = model[1].route(tokens)
    share = torch.zeros(len(characters), 1024)
    return share.scatter_add(1, indices[0].flatten(1), gates[0].flatten(1).double() / 4)


def kinship(model):
    """How much more two digits, or two letters, share their experts than a digit and a letter."""
    letters, digits = fires_for(model, "etaoinshrdlu"), fires_for(model, "0123456789")
    overlap = torch.minimum(
        torch.cat([letters, digits])[:, None], torch.cat([letters, digits])
    ).sum(-1)
    within = (overlap[:12, :12].sum() - 12) / (12 * 11) + (overlap[12:, 12:].sum() - 10) / (10 * 9)
    return (within / 2 - overlap[:12, 12:].mean()).item()


for seed in range(2):
    _, untrained = train_on_bytes(0, seed)
    losses, model = train_on_bytes(300, seed)
    assert losses[-1] < 0.75 * losses[0]
    assert kinship(model) > kinship(untrained) + 0.03
print("after 300 steps, two seeds: loss down by more than a quarter; digits share experts with")
print("digits and letters with letters, more than before training")

# %%
fires = json.loads(Path("../figures/records/06_fires.json").read_text())
fig, ax = plotting.figure(size=(12, 7.4))
plotting.heatmap(
    ax, torch.tensor(fires["share"]), title="share of a byte's choices", signed=False, limit=0.25
)
ax.set_aspect("auto")
ax.set_yticks(range(len(fires["characters"])), fires["characters"], fontsize=12)
ax.set_xlabel("the 60 experts these characters use most, of 1,024")
plotting.save(
    fig,
    "06_fires",
    "A heat map of 28 characters against 60 experts after training on text, the experts ordered by "
    "the characters that ask them. Every character has a few experts of its own along the "
    "diagonal; some experts are asked by many letters, others by most digits.",
)

# %% [markdown]
# (From a record: `python book/records.py 06_fires`, seed 0, 1,500 steps.) Nobody told the model
# what a digit is, yet in this run one expert is asked by nearly all digits, and another by most
# letters. Other seeds divide the work differently; that kin share experts is asserted above. This
# model sees one byte at a time, so an expert can only specialise in bytes. In a stack with
# attention it would be asked by context.
#
# ## 11 · As printed
#
# ### Keys that start at zero (WM Listing 8, Ch Listing 4)
#
# Both listings start the product keys at zero. Then all scores are 0, and every token, whatever it
# holds, asks the same $k$ experts of a million. The gradient that could change this has to pass
# through them. In WM's form, where the score stands inside the activation, $\sigma(0) = 0$: the
# experts say nothing at all.


# %%
class CDMoEAsPrinted(torch.nn.Module):
    """WM Listing 8: keys at zero, the raw score inside the activation."""

    def __init__(self, activation, d=8, e=256, h=2, k=4, m=4):
        super().__init__()
        self.activation, self.k = activation, k
        self.shared = MLP(d, 16)
        self.queries = torch.nn.Linear(d, h * 2 * m, bias=False)
        self.keys = torch.nn.Parameter(torch.zeros(h, 2, math.isqrt(e), m))
        self.down = torch.nn.Parameter(torch.randn(e, d) / 3)
        self.up = torch.nn.Parameter(torch.randn(e, d) / 3)

    def route(self, phi):
        queries = self.queries(phi).unflatten(-1, (self.keys.shape[0], 2, -1))
        return product_key_topk(queries, self.keys, self.k)

    def forward(self, x):
        phi = self.shared(x)
        scores, indices = self.route(phi)
        dots = torch.einsum("bld,blhkd->blhk", phi, self.down[indices])
        return (
            torch.einsum("blhk,blhkd->bld", self.activation(dots * scores), self.up[indices]) + phi
        )


def train_a_little(layer, steps=200):
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    W = random(8, 8, seed=19)
    for step in range(steps):
        x = random(4, 16, 8, seed=100 + step)
        optimizer.zero_grad()
        F.mse_loss(layer(x), torch.tanh(x @ W)).backward()
        optimizer.step()
    return {name: (p - before[name]).abs().max().item() for name, p in layer.named_parameters()}


_ = torch.manual_seed(6)
for name, activation in (("ReLU", F.relu), ("SiLU", F.silu)):
    layer = CDMoEAsPrinted(activation)
    x = random(4, 16, 8, seed=20)
    with torch.no_grad():
        _, indices = layer.route(layer.shared(x))
        assert indices.unique().numel() == 4
        check(f"{name}, zero keys: the experts say nothing", layer(x), layer.shared(x))
    moved = train_a_little(layer)
    private = {n: change for n, change in moved.items() if not n.startswith("shared")}
    with torch.no_grad():
        asked = expert_statistics(layer.route(layer.shared(x))[1], 256).used
    print(f"{name}: after 200 steps the private part has moved: {any(private.values())}",
          f"  experts asked: {'4' if asked == 4 / 256 else 'more than 4'} of 256")  # fmt: skip
    assert any(private.values()) == (name == "SiLU")

# %% [markdown]
# With ReLU the derivative at 0 is 0 as well: the experts are dead, for ever. With SiLU they
# recover. In Ch Listing 4 the scores go through a softmax instead, so that the experts speak at the
# start; but all tokens still ask the same, and the queries receive no gradient. Keys that start
# random have none of these problems:

# %%
x = random(4, 16, 8, seed=20)
_ = torch.manual_seed(7)
for name, start in (("zero keys", 0.0), ("random keys", 1.0)):
    layer = PEER(8, n_experts=256, n_heads=2, k=4, d_query=8)  # a softmax, as in Ch Listing 4
    layer.keys.data *= start
    layer(x).square().sum().backward()
    queries_learn = bool(layer.query_proj.weight.grad.any())
    asked = layer.route(x)[1].unique().numel()
    print(f"softmax, {name}: queries receive a gradient: {queries_learn}", end=";  ")
    print("experts asked:", "the same 4" if asked == 4 else "over 100", "of 256")
    assert queries_learn == (start > 0) and (asked == 4 if start == 0 else asked > 100)

# %% [markdown]
# ### The score inside the activation (WM §3.3 and Listing 8)
#
# $\sigma(x \cdot w_i \cdot s_i)$ is not $\sigma(x \cdot w_i)\,s_i$. A score of −1 turns the neuron
# round: it then fires where it should be silent. And the scores are raw: adding 3 to all of them,
# which no softmax would notice, changes everything.

# %%
dots, scores = random(10_000, seed=21), random(10_000, seed=22)
_ = must_differ("score inside", F.silu(dots * scores), F.silu(dots) * scores, at_least=0.01)
both = (dots < 0) & (scores < 0)
assert (F.silu(dots * scores)[both] > 0).all() and (F.silu(dots)[both] < 0).all()
print(f"negative neuron and negative score, so that it fires: {both.double().mean():.0%} of cases")
inside = F.silu(dots * (scores + 3))
_ = must_differ("all scores plus 3, score inside", inside, F.silu(dots * scores), at_least=0.01)
soft = torch.stack([scores, -scores], -1)
check("all scores plus 3, softmax outside", (soft + 3).softmax(-1), soft.softmax(-1))

# %% [markdown]
# ### Experts that no one can reach (WM Table 7)
#
# Table 7 has 3,072 and 8,192 experts, which are not squares. `int(sqrt(e))` keys per half reach
# `int(sqrt(e))**2` of them:

# %%
for e in (3072, 8192):
    r = int(math.sqrt(e))
    print(f"{e} experts: {r} keys per half reach {r * r}; {e - r * r} are never asked")

# %% tags=["raises-exception"]
PEER(64, n_experts=3072, n_heads=4, k=8, d_query=32)

# %% [markdown]
# ### A gate without an activation (OTCE eq. 19c)
#
# > $\text{FFN}^{Expansive}(x, W_3^p) = \text{FFN}^p(\text{FFN}^s(x) \cdot \text{FFN}^s(x)W_3^p)$
# > — OTCE eq. 19c
#
# The gate $sW_3$ has no activation, so $s \circ sW_3$ is quadratic and *even* in $s$: it answers
# $-s$ as it answers $s$. A bilinear unit is a fair thing to have; a gate that decides how much of
# $s$ to let through it is not. For $s$ symmetric about 0, the best $W_3$ misses nearly all of $s$;
# for other $s$, part of it.

# %%
s, W_3 = random(500, 6, seed=23), random(6, 6, seed=24)
check("as printed: even", (-s) * ((-s) @ W_3), s * (s @ W_3))
check("as printed: quadratic", (2 * s) * ((2 * s) @ W_3), 4 * s * (s @ W_3))
columns = [s[:, i, None] * s for i in range(6)]  # s_i (s W_3)_i is linear in column i of W_3
fits = [c @ torch.linalg.lstsq(c, s[:, i, None]).solution for i, c in enumerate(columns)]
missed = (torch.cat(fits, 1) - s).norm() / s.norm()
assert missed > 0.9
print("the best W_3 for passing a symmetric s misses more than 90 % of it")
opened = s * torch.sigmoid(s @ torch.zeros(6, 6) + 20)
check("a sigmoid that is wide open passes it", opened, s, tol=1e-8)

# %% [markdown]
# (And eq. 19d adds its mixture to $s_t$, where $a_t$ is meant: as printed the output of attention
# is not used.) The package takes a sigmoid.
#
# ### Shapes that do not fit
#
# Some slips never run, so they mislead nobody for long. WM §3.3 multiplies by $W_{down}^\top$ and
# $W_{up}^\top$ where the tables themselves are meant, and its $g = \varphi W \theta^\top$ lacks the
# factor 2 of the two halves. Ch eq. 13 has $W \in \mathbb{R}^{d^s \times d^p}$ where $d \times d^p$
# is meant, and eq. 14 an undefined $T$. WM Listing 8 takes `math.sqrt` of the number of experts as
# a size, and a width `d_ff_private` that nobody defined. The mixture in Ch eq. 12 has no gate; its
# listing has a softmax per head, so that the gates of $h$ heads sum to $h$, as here.

# %%
i, table = torch.tensor([3, 1]), random(5, 4, seed=25)
one_hot = F.one_hot(i, 5).double()
check("one-hot times the table = its rows", one_hot @ table, table[i])
for name, attempt in (
    ("one-hot times the transpose", lambda: one_hot @ table.T),
    ("math.sqrt as a size", lambda: torch.zeros(2, math.sqrt(256))),
):
    try:
        attempt()
    except (RuntimeError, TypeError) as error:
        print(f"{name}: {type(error).__name__}")

# %% [markdown]
# ## Summary
#
# - A router scores, keeps the best $k$, and learns through their gates; with $k = 1$ and gates that
#   always sum to 1 it learns nothing.
# - Experts learn the same things several times. What is common can stand beside, inside or before
#   them.
# - Scores that are sums of two halves have their $k$ best among $k \ln k$ candidates: that makes a
#   million experts searchable, exactly.
# - Reading with retrieved rows is the backward pass of mixing them, so no row is ever copied.
# - Keys must start random, scores belong outside the activation, and the number of experts is a
#   square.
#
# | as printed | what it does when run | the repair |
# |---|---|---|
# | keys start at zero | the same experts for all; dead with ReLU | random keys |
# | score inside σ | turns neurons round; raw scores | softmax outside |
# | 3,072 and 8,192 experts | 47 and 92 never asked | 3,136 and 8,281 |
# | gate without activation (eq. 19c) | even in s, cannot pass it on | sigmoid |
# | router output reshaped wrongly | tokens see one another | a probe that moves one token |
#
# ## Exercises
#
# **1.** How many parameters has a router that is a matrix, and how many have product
# keys, for $e = r^2$ experts, one head, query width $m$ for both halves together (router: token
# width $d$)?


# %% tags=["exercise"]
def router_parameters(d, m, r):
    """(matrix, product keys), with the query projection counted for the latter."""
    ### BEGIN SOLUTION
    return d * r * r, d * m + 2 * r * (m // 2)
    ### END SOLUTION


# %% tags=["check"]
keys_only = parameters(lambda: experts.ProductKeys(64, n_experts=256, n_heads=1, k=1, d_query=32))
assert router_parameters(64, 32, 16) == (64 * 256, keys_only)

# %% [markdown]
# **2.** Write the search for the $k$ best sums of *three* sorted lists, `a`, `b`, `c` (l,), by the
# sharper bound.


# %% tags=["exercise"]
def best_of_three(a, b, c, k):
    """The k largest sums a_i + b_j + c_n, descending; the lists are sorted, descending."""
    ### BEGIN SOLUTION
    rank = torch.arange(1, len(a) + 1)
    possible = rank[:, None, None] * rank[:, None] * rank <= k
    sums = a[:, None, None] + b[:, None] + c
    return sums[possible].topk(k).values
    ### END SOLUTION


# %% tags=["check"]
a, b, c = random(3, 20, seed=30).sort(descending=True).values
check(
    "three lists",
    best_of_three(a, b, c, 10),
    (a[:, None, None] + b[:, None] + c).flatten().topk(10).values,
)

# %% [markdown]
# **3.** `F.embedding_bag` without weights is a sum of rows. Use it, and nothing that gathers, to
# compute the *mean* of the vectors of each text's characters, for texts of different lengths.


# %% tags=["exercise"]
def mean_vectors(texts, table):
    """texts: lists of row numbers; table (e, d). The means (number of texts, d)."""
    ### BEGIN SOLUTION
    lengths = torch.tensor([len(t) for t in texts])
    offsets = lengths.cumsum(0) - lengths
    flat = torch.tensor([i for t in texts for i in t])
    return F.embedding_bag(flat, table, offsets, mode="sum") / lengths[:, None]
    ### END SOLUTION


# %% tags=["check"]
table = random(9, 3, seed=31)
means = mean_vectors([[1, 2], [3], [4, 5, 6, 7]], table)
check("means", means, torch.stack([table[1:3].mean(0), table[3], table[4:8].mean(0)]))

# %% [markdown]
# **4.** A router with random scores and $k = 1$ sends $n$ tokens to $e$ experts. How many experts
# does it expect to leave unused? Write the formula and compare it with a trial.


# %% tags=["exercise"]
def expected_unused(n, e):
    ### BEGIN SOLUTION
    return e * (1 - 1 / e) ** n
    ### END SOLUTION


# %% tags=["check"]
choices = torch.randint(256, (200, 512), generator=torch.Generator().manual_seed(32))
unused = [256 * (1 - expert_statistics(row, 256).used) for row in choices]
assert abs(sum(unused) / 200 / expected_unused(512, 256) - 1) < 0.05

# %% [markdown]
# **5.** Turn a trained dense MLP $\sigma(xW)W_2$ with $r^2$ neurons into a `PEER` with one head
# that asks *all* of them and gives the same output. What must the gates be, and how is it arranged?


# %% tags=["exercise"]
def as_peer(mlp, r):
    """A PEER of r² experts, one head, k = r², equal to the MLP."""
    ### BEGIN SOLUTION
    d = mlp.in_proj.in_features
    peer = PEER(d, n_experts=r * r, n_heads=1, k=r * r, d_query=2)
    with torch.no_grad():
        peer.keys.zero_()  # all scores equal: every gate is 1 / r²
        peer.down.copy_(mlp.in_proj.weight)
        peer.up.copy_(mlp.out_proj.weight.T * r * r)
    return peer
    ### END SOLUTION


# %% tags=["check"]
mlp = MLP(6, 25)
x = random(1, 4, 6, seed=33)
with torch.no_grad():
    check("a dense MLP as a PEER that asks everyone", as_peer(mlp, 5)(x), mlp(x))

# %% [markdown]
# ## Further reading
#
# - Shi et al., *OTCE* §3.2, *Cheems* §3.3, *Wonderful Matrices* §3.3: the layers of this chapter.
# - Lample et al., *Large Memory Layers with Product Keys* (2019): the search.
# - He, *Mixture of A Million Experts* (2024): PEER, experts of one neuron.
# - Fedus, Zoph and Shazeer, *Switch Transformers* (2021): routing with one expert, and balancing.
# - Dai et al., *DeepSeekMoE* (2024): isolating shared experts.
# - `cheems_ref/experts.py`: the listing this notebook arrives at.
