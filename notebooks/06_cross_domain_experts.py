# %% [markdown]
# # 06 · Cross-domain experts
#
# How can a layer hold far more than any one token pays for? This chapter splits the feed-forward
# layer into experts, up to a million of one neuron each, and finds each token's best sixteen
# without looking at them all. You will be able to
#
# - route tokens and balance experts;
# - prove and write the search;
# - evaluate the neurons it finds without copying rows.
#
# Assumes: softmax, an MLP, a little PyTorch; not chapters 03 to 05.
#
# Sources: *OTCE: Hybrid SSM and Attention with Cross Domain Mixture of Experts to construct
# Observer-Thinker-Conceiver-Expresser* (OTCE; Shi et al.) §3.2; *Cheems* (Ch) §3.3, Listing 4;
# *Wonderful Matrices* (WM) §3.3, Listing 8; He, *Mixture of A Million Experts* (2024); Lample et
# al., *Large Memory Layers with Product Keys* (2019).
#
# How to read ✓, ✗ and *As printed*: chapter 00.

# %% tags=["setup"]
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

# %% tags=["setup"]
from cheems_ref import experts, plotting, retrieval, text
from cheems_ref.experts import (
    DGLU,
    MLP,
    PEER,
    CDMMoE,
    CDMoE,
    CohesiveMoE,
    ExpansiveMoE,
    MoE,
    ProductKeys,
    SharedExpertMoE,
    expert_statistics,
    load_balancing_loss,
    product_key_topk,
)
from cheems_ref.verify import check, check_gradients, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters(make):
    """Count the parameters of a module on torch's meta device, which makes no numbers."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def read_record(name):
    return json.loads(Path(f"../figures/records/{name}.json").read_text())


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## Why this matters
#
# Every token pays for the full width of a feed-forward layer. A *sparse* layer sends each token to
# a few of many *experts*. Memory grows with the number of experts $e$, compute with the number each
# token uses plus the search, which can grow like $\sqrt e$ (§5). OTCE has four experts,
# Cheems 4,096, PEER (He, 2024) a million.
#
# **Letters.** A batch has $b$ rows of $l$ tokens of width $d$. $f$ is a layer's inner width, $k$
# the number of experts per token, $h$ the number of heads. $e^u$ is the exponential, σ the sigmoid.
# The *gate* $g_i$ weights the output of expert $i$, and $f_i$, with an index, is its share of the
# choices.
#
# ## 1 · One expert
#
# The plain layer (*multi-layer perceptron*, MLP) widens each token from $d$ to $f$, applies a
# nonlinear function, and narrows it again. Ours is
# $\mathrm{SiLU}(u) = u\,\sigma(u) = u/(1 + e^{-u})$, OTCE's Swish:


# %%
def silu(u):
    return u / (1 + torch.exp(-u))


print("SiLU at -2, 0, 2:", [f"{value:.4f}" for value in silu(torch.tensor([-2.0, 0.0, 2.0]))])
check("SiLU = F.silu", silu(random(100, seed=1)), F.silu(random(100, seed=1)))

# %% [markdown]
# A *gated* layer multiplies two maps entry by entry. OTCE's DGLU, *double gated linear unit* (eq.
# 13), applies a nonlinear function to both:
#
# $$\begin{aligned}
#   \text{MLP: } & \mathrm{SiLU}(xW)\,W_2 \\
#   \text{gated: } & (\mathrm{SiLU}(xW) \circ xV)\,W_2 \\
#   \text{DGLU: } & (\mathrm{SiLU}(xW) \circ \tanh(xV))\,W_2.
#   \end{aligned} \tag{6.1}$$

# %%
_ = torch.manual_seed(0)
x = random(2, 5, 6, seed=0)  # (b, l, d)
mlp, gated, dglu = MLP(6, 10), MLP(6, 10, gated=True), DGLU(6, 10)
with torch.no_grad():
    by_hand = silu(x @ mlp.in_proj.weight.T) @ mlp.out_proj.weight.T
    check("MLP", mlp(x), by_hand)
    by_hand = silu(x @ gated.gate_proj.weight.T) * (x @ gated.in_proj.weight.T)
    check("gated MLP", gated(x), by_hand @ gated.out_proj.weight.T)
    by_hand = silu(x @ dglu.W.weight.T) * torch.tanh(x @ dglu.V.weight.T)
    check("DGLU", dglu(x), by_hand @ dglu.W_2.weight.T)

# %% [markdown]
# The third matrix makes the layer 3/2 times as large:

# %%
with torch.no_grad():
    without = silu(x @ dglu.W.weight.T) * (x @ dglu.V.weight.T)
    _ = must_differ("DGLU without its tanh", without @ dglu.W_2.weight.T, dglu(x))
two = parameters(lambda: MLP(1024, 2048))
three = parameters(lambda: DGLU(1024, 2048))
print(f"d = 1024, f = 2048: MLP {two:,} parameters, DGLU {three:,}")
assert two == 2 * 1024 * 2048 and three == 3 * 1024 * 2048

# %% [markdown]
# ## 2 · Routing by hand
#
# Take $e$ such layers, the *experts* (each $\mathrm{FFN}_i$ a DGLU). A *router* scores them for
# every token, and a softmax turns the scores into shares. The $k$ largest shares are the *gates*
# (OTCE eq. 15):
#
# $$y = \sum_{i \,\in\, \text{top-}k} g_i\,\mathrm{FFN}_i(x), \qquad
#   g = \mathrm{softmax}(x\,W_{\text{router}}), \quad W_{\text{router}} \in \mathbb{R}^{d \times e}.
#   \tag{6.2}$$

# %%
_ = torch.manual_seed(1)
x = random(2, 5, 6, seed=0)
moe = MoE(6, 10, n_experts=4, k=2)
with torch.no_grad():
    shares = (x @ moe.router.weight.T).softmax(-1)  # (b, l, e)
    gates, indices = moe.route(x)  # (b, l, k), descending
for t in range(3):
    row = "  ".join(f"{share:.2f}" for share in shares[0, t])
    print(f"token {t}: shares {row}   asks experts {indices[0, t].tolist()}")
assert torch.equal(indices, shares.topk(2).indices)

# %% [markdown]
# OTCE keeps the gates as they are, and they sum to less than 1. Our option `renormalize` divides
# them by their sum.

# %%
y = torch.zeros(3, 6)
with torch.no_grad():
    for t in range(3):
        for i in shares[0, t].argsort(descending=True)[:2]:
            y[t] += shares[0, t, i] * moe.experts[i](x[0, t])
    check("mixture by hand = MoE", moe(x)[0, :3], y)
sums = gates.sum(-1)
print(f"the two gates of a token sum to between {sums.min():.2f} and {sums.max():.2f}")
assert sums.max() < 1

# %% [markdown]
# The package calls each expert once, on its own tokens. The check runs *all* experts on *all*
# tokens, with a gate of zero for the unused ones:


# %%
def all_gates(layer, x):
    """The gates of all experts, zero for those not asked: (b, l, e)."""
    gates, indices = layer.route(x)
    return torch.zeros(*x.shape[:2], len(layer.experts)).scatter(-1, indices, gates)


def dense(layer, x):
    """All experts on all tokens, weighted by their gates: (b, l, d)."""
    outputs = torch.stack([expert(x) for expert in layer.experts], dim=-2)  # (b, l, e, d)
    return torch.einsum("ble,bled->bld", all_gates(layer, x), outputs)


# %% [markdown]
# The outputs and all gradients agree. Keeping all four experts gives a different layer.

# %%
check("grouped by expert = dense", moe(x), dense(moe, x))
check_gradients("grouped by expert = dense, by x", moe, lambda x: dense(moe, x), [x])
weights, back = list(moe.parameters()), random(2, 5, 6, seed=1)
grouped = torch.cat([g.flatten() for g in torch.autograd.grad(moe(x), weights, back)])
by_all = torch.cat([g.flatten() for g in torch.autograd.grad(dense(moe, x), weights, back)])
check("grouped by expert = dense, gradients by router and experts", grouped, by_all)
outputs = torch.stack([expert(x) for expert in moe.experts], dim=-2)
everyone = torch.einsum("ble,bled->bld", shares, outputs)
_ = must_differ("all four experts kept", everyone, moe(x))

# %% [markdown]
# ### Which router learns?
#
# The loss reaches the router through the gates. With $k = 1$, a renormalized gate is
# $g_i / g_i = 1$, and the router gets no gradient.

# %%
for k, renormalize in ((2, False), (2, True), (1, False), (1, True)):
    _ = torch.manual_seed(2)
    layer = MoE(6, 10, n_experts=4, k=k, renormalize=renormalize)
    layer(x).square().sum().backward()
    gradient = layer.router.weight.grad
    largest = 0.0 if gradient is None else gradient.abs().max().item()
    print(
        f"k = {k}, renormalised: {renormalize!s:5}   largest gradient of the router: {largest:.3g}"
    )
    assert (largest > 1e-6) == (k > 1 or not renormalize)

# %% [markdown]
# ### A probe for leaks
#
# A token's output must depend on that token alone. Move one, and watch the others:


# %%
def others_move(function, x):
    """Move token (1, 2) of x (b, l, d): the largest change in the output of any other token."""
    moved = x.clone()
    moved[1, 2] += 1
    change = (function(moved) - function(x)).abs().amax(-1)  # (b, l)
    assert change[1, 2] > 1e-6  # its own output must move, or the probe shows nothing
    change[1, 2] = 0
    return change.max().item()


# %% [markdown]
# Here is a bug it catches. The router's output is (tokens, $e$), and some code wants ($e$, tokens).
# `view` gives that shape without transposing, and silently mixes the scores of different tokens.


# %%
def leaky(moe, x):
    """As MoE, but the scores are viewed as (e, tokens) before they are transposed."""
    logits = moe.router(x).flatten(0, 1)  # (tokens, e)
    shares = logits.softmax(-1).view(logits.shape[1], -1).T  # view, then T: not the identity
    gates, indices = shares.reshape(*x.shape[:2], -1).topk(2, dim=-1)
    return experts.mix_experts(x, gates, indices, moe.expert, 4)


with torch.no_grad():
    sound, leaking = others_move(moe, x), others_move(lambda x: leaky(moe, x), x)
assert sound < 1e-12 and leaking > 0.01
print(f"one token moved; the others move by: MoE less than 1e-12, leaky {leaking:.3f}")

# %% [markdown]
# ## 3 · What experts learn twice
#
# > "[…] multiple routing experts will have redundant parameters that store common information when
# > obtaining their respective parameters." — OTCE §3.2, Shared Strategy
#
# Can we observe this? In our task, every token needs a common map $M$ plus one of four maps chosen
# by its kind $i$: $y = x\,(M + M_i)$. A token's first four entries mark its kind, and the maps act
# on the rest.


# %%
def kinds_task(seed, d=8, kinds=4):
    """Draw M (d, d) and the M_i (kinds, d, d), half as large; also the generator of all data."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(d, d, generator=generator)
    special = torch.randn(kinds, d, d, generator=generator) / 2
    return common, special, generator


def kinds_batch(n, common, special, generator):
    """Draw n tokens of random kinds: x (1, n, d) with its mark, target (1, n, d), kind (1, n)."""
    kinds, d, _ = special.shape
    kind = torch.randint(kinds, (1, n), generator=generator)
    x = torch.randn(1, n, d, generator=generator)
    x[..., :kinds] = 0  # room for the mark
    target = x @ common + torch.einsum("bld,blde->ble", x, special[kind])
    return x + 3 * torch.eye(kinds, d)[kind], target, kind


# %% [markdown]
# We fix the router by hand, one expert per kind. A mark of 3 times a weight of 2 gives a gate of
# $e^6/(e^6 + 3) = 0.993$.


# %%
def one_expert_per_kind(layer):
    """Fix the router so that the mark of kind i gives expert i the largest score."""
    weight = layer.router.weight.requires_grad_(False)  # (e, d)
    weight.zero_()
    weight[:, : len(weight)] = 2 * torch.eye(len(weight))
    return layer


def train_on_kinds(layer, task, steps=400):
    """Train by Adam on fresh batches, and return the last loss relative to the variance."""
    optimizer = torch.optim.Adam((p for p in layer.parameters() if p.requires_grad), lr=5e-3)
    for _ in range(steps):
        x, target, _ = kinds_batch(256, *task)
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
    return (loss / target.var()).item()


# %% [markdown]
# After training, least squares recovers each routed expert's linear map. We divide the squared norm
# of the maps' mean by the mean of their squared norms. Equal maps give 1, unrelated ones about a
# quarter.


# %%
def learned_maps(layer, task):
    """The linear map of each routed expert, fitted on tokens of its kind: (kinds, d - kinds, d)."""
    kinds = len(task[1])
    x, _, kind = kinds_batch(4096, *task)
    maps = []
    for i in range(kinds):
        own = x[0, kind[0] == i]
        inputs, outputs = own[:, kinds:], layer.expert(i, own)
        # Without their means: what the mark adds is the same for all tokens of a kind.
        fit = torch.linalg.lstsq(inputs - inputs.mean(0), outputs - outputs.mean(0))
        maps.append(fit.solution)
    return torch.stack(maps)


def common_share(maps):
    """Of maps (kinds, …): the squared size of their mean over the mean of their squared sizes."""
    return (maps.mean(0).square().sum() / maps.square().sum((1, 2)).mean()).item()


# %% [markdown]
# We train with and without a *shared expert*, whose output is added for every token (§4). All three
# seeds end below 2 % of the target's variance.


# %%
def maps_after_training(layer_class, seed):
    """Train four experts on the task of a seed; the maps that the routed ones learned."""
    task = kinds_task(seed)
    torch.manual_seed(seed)
    layer = one_expert_per_kind(layer_class(8, 16, n_experts=4, k=1))
    assert train_on_kinds(layer, task) < 0.02
    with torch.no_grad():
        return learned_maps(layer, task)


# %%
for seed in range(3):
    common, special, _ = kinds_task(seed)
    true = (common + special)[:, 4:]
    alone = maps_after_training(MoE, seed)
    beside = maps_after_training(SharedExpertMoE, seed)
    shares = [common_share(maps) for maps in (true, alone, beside)]
    assert (alone - true).norm() < 0.02 * true.norm() and abs(shares[1] - shares[0]) < 0.01
    left = (beside.mean(0).norm() / true.mean(0).norm()).item()
    assert 0.4 < left < 0.6 and shares[2] < shares[0] - 0.1
    print(f"seed {seed}: in common: true maps and experts alone {shares[0]:.2f},", end=" ")
    print(f"beside a shared expert {shares[2]:.2f}, with about half of the true mean")

# %% [markdown]
# With this router each expert alone must learn $M + M_i$, so $M$ is stored four times. Beside a
# shared expert, the routed maps keep about half of the true mean. Nothing in the loss makes them
# give it up.
#
# A trained router may leave an expert unused, and still gets below 2 %. We don't measure what its
# experts share.


# %%
def experts_in_use(seed):
    """Train router and experts together; the number of experts asked, and the last loss."""
    task = kinds_task(seed)
    torch.manual_seed(seed)
    layer = MoE(8, 16, n_experts=4, k=1)
    loss = train_on_kinds(layer, task)
    x, _, _ = kinds_batch(4096, *task)
    load = expert_statistics(layer.route(x)[1], 4).load
    return int((load > 0.01).sum()), loss


# %%
runs = [experts_in_use(seed) for seed in range(3)]
used = [count for count, _ in runs]
assert max(used) < 4 and max(loss for _, loss in runs) < 0.02
print("router trained as well, three seeds: experts in use, of 4:", used)

# %% [markdown]
# ## 4 · Three ways to share
#
# In OTCE a *domain* is a field of knowledge, and *cross domain* is what fields have in common.
# *Private* parameters (superscript p) belong to one expert, *shared* ones (superscript s) to all:
#
# - **Isolation** (DeepSeekMoE, cited in OTCE §2): one expert gets every token, unrouted.
# - **Cohesive** (OTCE eq. 18): all experts use one matrix, $V$.
# - **Expansive** (OTCE eq. 19): a shared layer comes first, and private gate matrices $W_{3,i}$
#   select from its result.
#
# | | expert $i$ computes | shared |
# |---|---|---|
# | isolation | $\mathrm{FFN}_i(x)$ | $\mathrm{FFN}^{\mathrm s}(x)$, added |
# | cohesive | $(\mathrm{SiLU}(xW_i) \circ \tanh(xV))\,W_{2,i}$ | $V$ |
# | expansive | $\mathrm{FFN}_i(z \circ \sigma(z\,W_{3,i}))$ | $z = \mathrm{FFN}^{\mathrm s}(x)$ |
#
# Each FFN is a DGLU. The sigmoid is ours (§11).

# %%
_ = torch.manual_seed(1)
x = random(2, 5, 6, seed=0)
shared = SharedExpertMoE(6, 10, n_experts=4, k=2)
cohesive = CohesiveMoE(6, 10, n_experts=4, k=2)
with torch.no_grad():
    check("isolation", shared(x), shared.shared(x) + dense(shared, x))
    _ = must_differ("isolation without the shared expert", dense(shared, x), shared(x))
    check("cohesive", cohesive(x), dense(cohesive, x))
V = cohesive.experts[0].V.weight
assert all(expert.V.weight is V for expert in cohesive.experts)
print("cohesive: the four experts hold one and the same V, of shape", tuple(V.shape))

# %% [markdown]
# In the expansive form the router sees $x$ and the experts see $z$:

# %%
expansive = ExpansiveMoE(6, 10, n_experts=4, k=2)
with torch.no_grad():
    z, gates = expansive.shared(x), all_gates(expansive, x)
    y = torch.zeros_like(x)
    for i in range(4):
        opened = torch.sigmoid(z @ expansive.gates[i].weight.T)
        y += gates[..., i, None] * expansive.experts[i](z * opened)
    check("expansive", expansive(x), y)
    answers = torch.stack([expert(z) for expert in expansive.experts], dim=-2)
    ungated = torch.einsum("ble,bled->bld", gates, answers)
    _ = must_differ("expansive without its gates", ungated, y)

# %% [markdown]
# What do they cost at $d = 1024$, $f = 2048$ and four experts?

# %%
for layer_class in (MoE, SharedExpertMoE, CohesiveMoE, ExpansiveMoE):
    count = parameters(lambda make=layer_class: make(1024, 2048, n_experts=4, k=1))
    print(f"{layer_class.__name__:16} {count:12,} parameters")
print(f"of the last, the four gate matrices alone take {4 * 1024**2:,}")

# %% [markdown]
# ### Keeping everyone busy
#
# A router that prefers one expert trains it more, and then prefers it more. We bias one toward
# expert 0 and print each expert's *load*, its share of all choices:

# %%
_ = torch.manual_seed(3)
layer = MoE(6, 10, n_experts=4, k=2)
layer.router.weight.data[0, 0] += 2
many = random(8, 64, 6, seed=4)
many[..., 0] = 2
weights = [f"{weight:.2f}" for weight in layer.router.weight[:, 0].tolist()]
statistics = expert_statistics(layer.route(many)[1], 4)
print("weights of the constant entry:", weights)
print("load of the experts:          ", [f"{share:.2f}" for share in statistics.load.tolist()])
assert statistics.load[0] == 0.5 and 0.45 < statistics.load[3] < 0.5

# %% [markdown]
# One half is the largest possible load, because a token's two experts are distinct.
#
# An extra loss can push back. With $b\,l$ tokens of $k$ choices each,
#
# $$\text{loss} = e \sum_i f_i P_i, \qquad
#   f_i = \frac{\text{number of choices of } i}{b\,l\,k}, \qquad
#   P_i = \frac{\text{sum of the gates given to } i}{\text{sum of all kept gates}}. \tag{6.3}$$
#
# $f_i$ is a count, so the gradient flows through $P_i$ alone.

# %%
gates, indices = layer.route(many)
loss = 0.0
for i in range(4):
    f_i = (indices == i).double().mean()
    P_i = gates[indices == i].sum() / gates.sum()
    loss += 4 * f_i * P_i
check("equation 6.3 = load_balancing_loss", load_balancing_loss(gates, indices, 4), loss)
print(f"loss of this router: {loss.item():.3f}")

# %% [markdown]
# The $P_i$ sum to 1, so the loss is a weighted mean of the $e f_i$. An even load makes it 1 for any
# gates. It is at most $e/k$, as no $f_i$ exceeds $1/k$.
#
# For $k > 1$ the loss can fall below 1. *If each token's gates sum to 1*, the greatest lower bound
# is $e / (k(e - k + 1))$. You approach it when everyone chooses the same $k - 1$ experts with gates
# near zero and the others share the gates evenly. *Proof.* A share $k f_i$ of the tokens chooses
# $i$, so $P_i \le k f_i$. The $k - 1$ largest $f_i$ sum to at most $(k - 1)/k$, so for the other
# $n = e - k + 1$ the bounds $k f_i$ sum to at least 1. They have room for all the gates, and moving
# gates to them does not raise $\sum f_i P_i$. Then $f_i \ge P_i/k$ gives
# $\sum f_i P_i \ge \sum P_i^2/k \ge 1/(kn)$ by Cauchy–Schwarz. ∎

# %%
choices = torch.tensor([[0, 3], [1, 3], [2, 3]])  # three tokens: everyone asks expert 3 …
no_weight = torch.tensor([[1.0, 0.0]]).expand(3, 2)  # … and gives it no weight
least = load_balancing_loss(no_weight, choices, 4)
check("the lower bound, e / (k(e - k + 1))", least, torch.tensor(4 / (2 * 3)))
even = load_balancing_loss(random(2, 2, seed=5).exp(), torch.tensor([[0, 1], [2, 3]]), 4)
check("an even load, any gates", even, torch.tensor(1.0))
load = [f"{share:.3f}" for share in expert_statistics(choices, 4).load.tolist()]
print(f"4 experts, k = 2: the loss is {least.item():.3f} at the uneven load", load)

# %% [markdown]
# The loss has a blind spot. When all tokens take the same $k$ experts, it has no gradient. Switch
# Transformers average the *whole* softmax in $P_i$ and do get one:

# %%
logits = random(50, 4, seed=6) + torch.tensor([9.0, 0.0, 0.0, 9.0])  # experts 0 and 3 for all
logits.requires_grad_()
shares = logits.softmax(-1)
gates, indices = shares.topk(2)
load = expert_statistics(indices, 4).load
for name, loss in (
    ("over the kept gates", load_balancing_loss(gates, indices, 4)),
    ("over the whole softmax", 4 * (load * shares.mean(0)).sum()),
):
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    seen = gradient.abs().max() > 1e-9
    print(f"all take the same two: loss {name:23} {loss.item():.2f}   has a gradient: {seen}")
    assert seen == (name == "over the whole softmax")

# %% [markdown]
# 200 steps on this loss alone even out our router. The loss dips slightly below 1 on the way.

# %%
optimizer, losses = torch.optim.Adam([layer.router.weight], lr=2e-2), []
for _ in range(200):
    optimizer.zero_grad()
    loss = load_balancing_loss(*layer.route(many), 4)
    losses.append(loss.item())
    loss.backward()
    optimizer.step()
after = expert_statistics(layer.route(many)[1], 4)
loss = load_balancing_loss(*layer.route(many), 4).item()
assert (after.load - 0.25).abs().max() < 0.005 and abs(loss - 1) < 0.005
print("load after 200 steps:", [f"{share:.2f}" for share in after.load.tolist()], end="   ")
print(f"loss {loss:.3f}, on the way down to {min(losses):.3f}")
assert 0.99 < min(losses) < 1 - 1e-4

# %% [markdown]
# ## 5 · A million experts: the router is the problem
#
# Make the experts smaller and more numerous, down to one neuron each. Then an expert computes very
# little, but the router is a matrix of $d \times e$. With $h$ *heads*, routers side by side that
# each choose $k$ experts, there are $h$ such matrices.
#
# **Product keys** (Lample et al., 2019) make a million keys out of two thousand. Cut a query of
# width $2m$ into halves $q = (q_1, q_2)$. Keep two lists of $r$ keys of width $m$: $\kappa_{1,i}$
# for the first half and $\kappa_{2,j}$ for the second. Expert $(i, j)$ has the key
# $(\kappa_{1,i}, \kappa_{2,j})$, which makes $e = r^2$ experts, numbered $i\,r + j$. An expert's
# score is a *sum* of half scores,
#
# $$\text{score}_{ij} = q_1 \cdot \kappa_{1,i} + q_2 \cdot \kappa_{2,j} = a_i + a'_j, \tag{6.4}$$
#
# so $2r$ inner products determine all $r^2$ scores. Let's count multiplications per token,
# including the map from the token to the queries:

# %%
d, h, m = 256, 4, 64
print("  experts   matrix router   queries + product keys")
for r in (16, 64, 256, 1024):
    matrix, queries, keys = h * d * r * r, h * d * 2 * m, h * 2 * r * m
    print(f"{r * r:9,}   {matrix:13,}   {queries:7,} + {keys:7,} = {queries + keys:7,}")

# %% [markdown]
# ## 6 · The theorem
#
# **For $k \le r$, the $k$ largest of all $r^2$ sums can be chosen among the sums of the $k$ largest
# $a_i$ with the $k$ largest $a'_j$.** *Proof.* Suppose $a_i$ is not among the $k$ largest. Then $k$
# others are at least as large, and with any $a'_j$ they make $k$ sums that are at least
# $a_i + a'_j$. So we can choose $k$ best sums without $(i, j)$. The argument for $j$ is the same. ∎
#
# So $k^2$ candidates suffice. We can do better. Sort both lists in descending order and let $i$ and
# $j$ be ranks, counted from 0. Every pair with ranks up to $i$ and up to $j$ has a sum at least as
# large as the pair $(i, j)$, and there are $(i+1)(j+1)$ such pairs, itself included. So we only
# need pairs with $(i + 1)(j + 1) \le k$. For each $i$ these are the $\lfloor k/(i+1) \rfloor$
# smallest $j$, about $k \ln k$ pairs in all:

# %%
for k in (4, 16, 64, 256):
    pairs = sum(k // (i + 1) for i in range(k))
    print(f"k = {k:3}: k² = {k * k:6,} candidates, of which {pairs:5,} will do", end="")
    print(f"  (k ln k = {k * math.log(k):.0f})")
    assert k * math.log(k) <= pairs < 1.5 * k * math.log(k)

# %% [markdown]
# Here is the picture for $r = 24$ and $k = 16$:

# %%
first, second = random(2, 24, seed=5).sort(descending=True).values
sums = first[:, None] + second  # (r, r)
best = torch.zeros(24 * 24).scatter(0, sums.flatten().topk(16).indices, 1.0).view(24, 24)
rank = torch.arange(1, 25)
candidates = (rank[:, None] * rank <= 16).double()
square = torch.zeros(24, 24)
square[:16, :16] = 1
assert (best <= candidates).all() and (candidates <= square).all()
print(f"{best.sum():.0f} best, all among {candidates.sum():.0f} candidates,", end=" ")
print(f"all of them in the square of {square.sum():.0f}; {sums.numel()} sums in all,")
print(f"from {sums[0, 0]:.1f} in the first corner to {sums[-1, -1]:.1f} in the last")
assert sums[0, 0] > 0 > sums[-1, -1]


# %% tags=["figure"]
def draw_candidates(sums, candidates, best, k):
    """The sums of two sorted lists, and which of them have to be looked at."""
    fig, (left, right) = plotting.figure(1, 2, size=(12, 5.2))
    plotting.heatmap(left, sums, title="all sums $a_i + a'_j$", unit="the sum: blue < 0 < red")
    title = f"dark: the {k} best; pale: candidates"
    for layer in (torch.zeros_like(best), candidates, candidates + 2 * best):
        plotting.heatmap(right, layer, title=title, signed=False, limit=3.0, colorbar=False)
    end = k - 0.5
    right.plot([-0.5, end, end], [end, end, -0.5], color=plotting.COLORS[1])
    right.text(end - 0.5, end - 0.6, f"the theorem's {k} × {k}", ha="right", fontsize=13)
    for ax in (left, right):
        ax.set(xlabel="rank $j$ of $a'_j$", ylabel="rank $i$ of $a_i$")
    return fig


# %% tags=["figure"]
fig = draw_candidates(sums, candidates, best, 16)
plotting.save(
    fig,
    "06_product_keys",
    "Left: a square of 24 by 24 sums of two lists sorted from the largest on, red in the upper "
    "left corner and blue in the lower right. Right: the candidates, pale, with (i + 1)(j + 1) at "
    "most 16, within an outlined square of side 16; the 16 best sums, dark, are all among them.",
)

# %% [markdown]
# ### The search in six lines
#
# Take the $k \le r$ best of each half, form their sums, keep the $k$ best, and look up their
# experts:


# %%
def search(first, second, k):
    """From half scores (..., r) the k best sums, descending, and the numbers of their experts."""
    best_1, i = first.topk(k)  # (..., k)
    best_2, j = second.topk(k)
    sums = (best_1[..., :, None] + best_2[..., None, :]).flatten(-2)  # (..., k²)
    scores, place = sums.topk(k)
    numbers = (i[..., :, None] * first.shape[-1] + j[..., None, :]).flatten(-2)  # i·r + j
    return scores, numbers.gather(-1, place)


# %% [markdown]
# Try it on one query with $r = 4$ and $k = 3$:

# %%
first, second = torch.tensor([0.1, 0.9, -0.5, 0.4]), torch.tensor([0.3, -0.2, 0.6, 0.0])
scores, numbers = search(first, second, 3)
for score, number in zip(scores.tolist(), numbers.tolist(), strict=True):
    i, j = divmod(number, 4)
    print(f"expert {number:2} = {i} · 4 + {j}", end=": ")
    print(f"score {score:.1f} = {first[i]:.1f} + {second[j]:.1f}")
    assert abs(score - (first[i] + second[j]).item()) < 1e-12
assert numbers.tolist() == [6, 4, 14]

# %% [markdown]
# `product_key_topk` uses the smaller set of candidates. Both find what brute force finds:

# %%
queries, keys = random(2, 50, 3, 2, 4, seed=6), random(3, 2, 12, 4, seed=7)  # e = 12² = 144
halves = torch.einsum("blhzm,hzrm->blhzr", queries, keys)  # z: first half, second half
first, second = halves.unbind(-2)  # (b, l, h, r) each
everything = (first[..., :, None] + second[..., None, :]).flatten(-2)  # (b, l, h, e)
for k in (1, 4, 12):
    scores, indices = product_key_topk(queries, keys, k)
    six_lines, numbers = search(first, second, k)
    check(f"k = {k}: scores of six lines = product_key_topk", six_lines, scores)
    check(f"k = {k}: scores of brute force = product_key_topk", everything.topk(k).values, scores)
    assert torch.equal(indices, numbers) and torch.equal(indices, everything.topk(k).indices)
print("and the experts are the same, entry by entry")

# %% [markdown]
# A test has to catch two mistakes: keeping too few of each list, and swapping the halves.

# %%
scores, indices = product_key_topk(queries, keys, 4)
too_few = (first.topk(2).values[..., None] + second.topk(2).values[..., None, :]).flatten(-2)
_ = must_differ("2 of each half for k = 4", too_few.sort(descending=True).values, scores)
exchanged = indices % 12 * 12 + indices // 12
_ = must_differ("j·r + i for i·r + j", exchanged, indices)

# %% [markdown]
# When scores are equal, the package prefers the smaller index *within a half*, and among equal sums
# the better rank in the first half. Below, expert 2 beats expert 1.

# %%
half = torch.tensor([0.0, 1.0])  # a = a' = (0, 1): experts 0 to 3 have the scores 0, 1, 1, 2
ones = torch.ones(1, 1, 1, 2, 1)
_, indices = product_key_topk(ones, torch.stack([half, half])[None, :, :, None], 2)
assert indices.flatten().tolist() == [3, 2]
print("scores 0, 1, 1, 2: the two best are experts", indices.flatten().tolist())
_, indices = product_key_topk(queries, torch.zeros_like(keys), 4)
assert (indices == torch.arange(4)).all()
print("all keys zero: every token and head asks experts", indices[0, 0, 0].tolist())

# %% [markdown]
# ## 7 · Experts of one neuron
#
# An expert of one neuron listens in one direction, row $i$ of a table `down`, and speaks in one
# direction, row $i$ of a table `up`. Both tables have the shape $(e, d)$. With $h$ heads that
# retrieve $k$ each, a token's hidden layer has $h \cdot k$ neurons, picked for this token out of a
# million. He (2024) calls that PEER, *parameter efficient expert retrieval*:
#
# $$y = \sum_{\text{heads}} \; \sum_{i \,\in\, \text{top-}k} g_i\;
#   \mathrm{SiLU}(x \cdot \mathrm{down}_i)\; \mathrm{up}_i, \qquad
#   g = \mathrm{softmax}(\text{the head's } k \text{ scores}). \tag{6.5}$$

# %%
_ = torch.manual_seed(4)
x = random(2, 5, 6, seed=0)
peer = PEER(6, n_experts=64, n_heads=2, k=3, d_query=8)  # d_query = 2m
y = torch.zeros_like(x)
with torch.no_grad():
    gates, indices = peer.route(x)  # (b, l, h, k)
    for row in range(2):
        for t in range(5):
            for g, i in zip(gates[row, t].flatten(), indices[row, t].flatten(), strict=True):
                y[row, t] += g * silu(x[row, t] @ peer.down[i]) * peer.up[i]
    check("equation 6.5, neuron by neuron = PEER", y, peer(x))
check("the gates of a head sum to 1", gates.sum(-1), torch.ones(2, 5, 2))

# %% [markdown]
# ### Without gathering: mixing rows
#
# The obvious code gathers the rows, `down[indices]`, of shape (b, l, h, k, d). For 512 tokens, 64
# neurons and $d = 256$ that copies 8 million numbers from each table.
#
# Start with the second half, `up`. $\sum_j w_j\,\mathrm{row}_{i_j}$ is a weighted sum of rows, and
# torch has an operator for it, the *embedding bag*:

# %%
table = random(64, 6, seed=8)
rows, w = torch.tensor([[7, 20]]), torch.tensor([[0.5, -3.0]])  # (bags, size of a bag)
bag = F.embedding_bag(rows, table, per_sample_weights=w, mode="sum")  # (bags, d)
check("a weighted bag", bag[0], 0.5 * table[7] - 3 * table[20])

# %% [markdown]
# Without weights it is a plain sum. For bags of different sizes, `offsets` says where each bag
# begins in one long list:

# %%
rows = torch.tensor([7, 7, 20, 3, 5])  # two bags: rows 7 and 7; rows 20, 3 and 5
bags = F.embedding_bag(rows, table, torch.tensor([0, 2]), mode="sum")
check("bags of sizes 2 and 3", bags, torch.stack([2 * table[7], table[[20, 3, 5]].sum(0)]))

# %% [markdown]
# ### Without gathering: reading with rows
#
# Now the first half, the inner products $x \cdot \mathrm{row}_{i_j}$. Take the bag's inner product
# with $x$ and differentiate it by the weights:
#
# $$\frac{\partial}{\partial w_j}\,\Bigl\langle x, \sum_{j'} w_{j'}\,\mathrm{row}_{i_{j'}}
#   \Bigr\rangle = \langle x, \mathrm{row}_{i_j} \rangle. \tag{6.6}$$
#
# *Reading with rows is the backward pass of mixing rows.* A backward pass starts from the gradient
# with respect to the bag, the third argument of `autograd.grad`. We put $x$ there, and the weights'
# gradients come out as the inner products:

# %%
x = random(5, 6, seed=10)  # five tokens
rows = torch.randint(64, (5, 6), generator=torch.Generator().manual_seed(9))
w = random(5, 6, seed=14).requires_grad_()
bag = F.embedding_bag(rows, table, per_sample_weights=w, mode="sum")
(products,) = torch.autograd.grad(bag, w, x)
gathered = torch.einsum("nd,njd->nj", x, table[rows])
check("gradient of a bag by its weights = inner products", products, gathered)

# %% [markdown]
# It works the other way round too: the gradient of $\sum_j w_j \langle x,
# \mathrm{row}_{i_j}\rangle$ by $x$ is the bag. The two maps are each other's transpose.

# %%
x.requires_grad_()
(mixed,) = torch.autograd.grad(torch.einsum("nd,njd->nj", x, table[rows]), x, w)
check("gradient of inner products by x = the bag", mixed, bag)

# %% [markdown]
# The package's `neurons` runs this backward pass, and its own backward pass is the bag:

# %%
x = x.detach()
check("retrieval.neurons = gathered", retrieval.neurons(x, table, rows), gathered)
check_gradients(
    "retrieval.neurons = gathered",
    lambda x, table: retrieval.neurons(x, table, rows),
    lambda x, table: torch.einsum("nd,njd->nj", x, table[rows]),
    [x, table],
)
other_rows = retrieval.neurons(x, table, rows.flip(0))
_ = must_differ("the rows of other tokens", other_rows, gathered)

# %% [markdown]
# Both halves together compute equation 6.5, and the gradients agree:

# %%
x, down, up = random(2, 5, 6, seed=11), random(64, 6, seed=12), random(64, 6, seed=13)
bags = retrieval.retrieved_experts(x, down, up, gates, indices)
written_out = retrieval.naive_retrieved_experts(x, down, up, gates, indices)
check("bags = rows gathered", bags, written_out)
check_gradients(
    "bags = rows gathered",
    lambda *tensors: retrieval.retrieved_experts(*tensors, indices),
    lambda *tensors: retrieval.naive_retrieved_experts(*tensors, indices),
    [x, down, up, gates],
)

# %% [markdown]
# How much memory does each way write? This counter notes the largest floating-point tensor that an
# operation returns in the forward pass. It doesn't see inside a kernel.


# %%
class LargestTensor(TorchDispatchMode):
    """Remember the number of entries of the largest floating-point tensor that was written."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:  # a view writes nothing
            for made in out if isinstance(out, (tuple, list)) else [out]:
                if torch.is_tensor(made) and made.is_floating_point():
                    self.entries = max(self.entries, made.numel())
        return out


# %% [markdown]
# Take 64 tokens, 4 heads, $k = 16$ and $d = 256$:

# %%
x = random(1, 64, 256, seed=14)
down, up = random(2, 1024, 256, seed=15)
gates = torch.rand(1, 64, 4, 16, generator=torch.Generator().manual_seed(16))
indices = torch.randint(1024, (1, 64, 4, 16), generator=torch.Generator().manual_seed(17))
with LargestTensor() as gathering:
    retrieval.naive_retrieved_experts(x, down, up, gates, indices)
with LargestTensor() as bags:
    retrieval.retrieved_experts(x, down, up, gates, indices)
print(f"rows gathered: largest tensor {gathering.entries:9,} entries")
print(f"bags:          largest tensor {bags.entries:9,} entries")
assert gathering.entries == 64 * 64 * 256 and bags.entries <= 64 * 256

# %% [markdown]
# ## 8 · Cross domain: share first, then retrieve
#
# Cheems and WM add a shared layer $\mathrm{FFN}^{\mathrm s}$ to the retrieved experts, and from
# here on **cross domain** names such a layer. OTCE's CDMOE is the expansive form of §4, WM's layer
# is `CDMoE` here, and Ch's CDMMOE is `CDMMoE`. WM has two forms (eq. 5; its $\varphi$ is
# $\mathrm{FFN}^{\mathrm s}$, a plain MLP, its $e(\cdot)$ equation 6.5, here PEER):
#
# $$y = \mathrm{PEER}(x) + \mathrm{FFN}^{\mathrm s}(x) \qquad\text{and}\qquad
#   y = \mathrm{PEER}(\mathrm{FFN}^{\mathrm s}(x)). \tag{6.7}$$
#
# In the left form the shared layer works *beside* the experts, in the right one *before* them. WM's
# Listing 8 adds $\mathrm{FFN}^{\mathrm s}(x)$ to the right form, optional in the text for readers
# "worried that the non-linear activation in the previous step will destroy the cross domain state".
# The released models use the first form (chapter 11, section 4).


# %%
def retrieved(peer, z):
    """The neurons that a PEER retrieves for z, written out."""
    return retrieval.naive_retrieved_experts(z, peer.down, peer.up, *peer.route(z))


# %% [markdown]
# `CDMoE` has all three:

# %%
_ = torch.manual_seed(5)
x = random(2, 5, 6, seed=0)
sizes = dict(d_ff=12, n_experts=64, n_heads=2, k=3, d_query=8)
serial, bare = CDMoE(6, **sizes), CDMoE(6, **sizes, residual=False)
parallel = CDMoE(6, **sizes, form="parallel")
with torch.no_grad():
    z = bare.shared(x)
    check("before: PEER(FFNˢ(x))", bare(x), retrieved(bare.experts, z))
    z = serial.shared(x)
    check("before, and added: PEER(FFNˢ(x)) + FFNˢ(x)", serial(x), retrieved(serial.experts, z) + z)
    z = parallel.shared(x)
    check("beside: PEER(x) + FFNˢ(x)", parallel(x), retrieved(parallel.experts, x) + z)
    _ = must_differ("before for beside", retrieved(parallel.experts, z) + z, parallel(x))

# %% [markdown]
# Ch Listing 4 is CDMMOE, the *cross domain million mixture of experts*. It is the form *before*:
# the shared layer is a gated MLP of inner width $f$, a further map takes its result to a private
# width $d^{\mathrm p}$, and a second inner product gates each neuron:
#
# $$\begin{aligned}
#   z &= \mathrm{FFN}^{\mathrm s}(x)\,W_{\text{in}}, \qquad
#     W_{\text{in}} \in \mathbb{R}^{d \times d^{\mathrm p}}, \\
#   y &= \sum_{\text{heads}} \; \sum_{i \,\in\, \text{top-}k} g_i\; (z \cdot \mathrm{down}_i)\;
#     \mathrm{SiLU}(z \cdot \mathrm{gate}_i)\; \mathrm{up}_i.
#   \end{aligned} \tag{6.8}$$
#
# The queries come from $z$. The listing swaps the names `up` and `down`.

# %%
cdmmoe = CDMMoE(6, **sizes, d_private=4)
with torch.no_grad():
    z = cdmmoe.private_proj(cdmmoe.shared(x))  # (b, l, p), with p for the private width
    gates, indices = cdmmoe.retrieval.route(z)  # (b, l, h, k)
    listens = torch.einsum("blp,blhkp->blhk", z, cdmmoe.down[indices])
    opens = silu(torch.einsum("blp,blhkp->blhk", z, cdmmoe.gate[indices]))
    y = torch.einsum("blhk,blhkd->bld", gates * listens * opens, cdmmoe.up[indices])
    check("equation 6.8 = CDMMoE", y, cdmmoe(x))
    ungated = torch.einsum("blhk,blhkd->bld", gates * silu(listens), cdmmoe.up[indices])
    _ = must_differ("plain neurons for gated ones", ungated, y)
for name in ("down", "gate", "up"):
    print(f"table {name:4} {tuple(getattr(cdmmoe, name).shape)}")

# %% [markdown]
# ## 9 · Counted and measured
#
# ### Parameters
#
# > "Compared to CDMOE […], it can expand the number of experts 1024 times (from 4 to 4096) under
# > the same shared dimension (4096) and private dimension (2048) while maintaining the same number
# > of parameters […]" — Ch §3.3
#
# The width $d$ isn't given there, so we take OTCE's 1024. CDMOE is the expansive layer:

# %%
four = parameters(lambda: ExpansiveMoE(1024, 2048, n_experts=4, k=1))
# The package's shared expert is as wide as the private ones: exchange it for the wider one.
four += parameters(lambda: DGLU(1024, 4096)) - parameters(lambda: DGLU(1024, 2048))
print(f"expansive, 4 experts: {four:,} parameters")

# %% [markdown]
# Listing 4 gives each head of CDMMoE queries of width 2048, but how many heads are there?


# %%
def cdmmoe_of(n_heads):
    """CDMMoE with Listing 4's queries: as wide as the private width, for every head."""
    sizes = dict(d_ff=4096, d_private=2048, n_experts=4096, k=8, d_query=2048)
    return CDMMoE(1024, n_heads=n_heads, **sizes)


for h, expected in ((1, 0.95), (2, 1.06), (4, 1.26), (8, 1.67)):
    count = parameters(lambda h=h: cdmmoe_of(h))
    queries = h * 2048 * 2048
    print(f"CDMMoE, {h} head(s): {count:,} parameters, {count / four:.2f} times as many,", end=" ")
    print(f"{queries / count:.0%} of them for queries")
    assert abs(count / four - expected) < 0.01

# %% [markdown]
# With one or two heads the claim holds within 6 %. With eight it fails: each head needs a 2048 ×
# 2048 map for queries. And the experts shrank from 2,048 neurons to one.
#
# ### FLOPs
#
# A matrix product costs two FLOPs for each weight it uses, and torch confirms the count. Torch
# leaves out the bags. Of the 90,112 FLOPs, 65,536 belong to the shared MLP, so compare the dense
# MLP with the remaining 24,576 plus the bags.

# %%
d, f, r, h, k, m = 64, 256, 32, 4, 8, 16
layer = CDMoE(d, d_ff=f, n_experts=r * r, n_heads=h, k=k, d_query=2 * m)
tokens = random(1, 128, d, seed=18)
with FlopCounterMode(display=False) as counter, torch.no_grad():
    layer(tokens)
shared, queries, keys = 2 * d * f, d * h * 2 * m, h * 2 * r * m
assert counter.get_total_flops() == 128 * 2 * (shared + queries + keys)
print(f"matrix products: {2 * (shared + queries + keys):7,} FLOPs per token, as counted by torch")
print(f"bags:            {2 * 2 * h * k * d:7,}")
print(f"one dense MLP of the same {r * r} neurons: {2 * 2 * d * r * r:,}")

# %% [markdown]
# ### Memory and time
#
# In training, every table needs a gradient of the same size, and AdamW keeps two more numbers per
# weight. Here is the bill for a million experts of width 256 in float32:

# %%
table = 2**20 * 256 * 4 / 2**30  # GiB
print(f"tables down and up: {2 * table:.0f} GiB, their gradients {2 * table:.0f} GiB,", end=" ")
print(f"AdamW's two moments {4 * table:.0f} GiB")
assert table == 1

# %% [markdown]
# Now we time the forward pass on a CPU, in float32, for 512 tokens, $d = 256$, 4 heads, $k = 16$,
# $m = 128$. The first record compares whole layers on two cores. PEER-pytorch, a public
# implementation, gathers rows and searches differently.
# (`python tests/bench/bench_experts.py --json figures/records/06_growth.json`)

# %%
layers = read_record("06_growth")
ours, theirs, dense_mlp = layers["milliseconds"].values()
ratio = [b / a for a, b in zip(ours, theirs, strict=True)]
print(f"PEER-pytorch to ours: {ratio[0]:.1f} times as long at 256 experts, {ratio[-1]:.1f} at 2^20")
print(f"ours, from 2^12 to 2^20 experts: {ours[-1] / ours[2]:.1f} times as long")
assert min(ratio) > 1.5 and ours[-1] < 4 * ours[2]
faster = [e for e, a, b in zip(layers["experts"], ours, dense_mlp, strict=False) if b < a]
print("the dense MLP is the fastest of the three with", faster, "neurons")
assert faster == [256, 1024]
d, h, k, m = 256, 4, 16, 128
flops = [2 * (d * h * 2 * m + h * 2 * r * m + 2 * h * k * d) for r in (16, 32)]
dense_flops = [2 * 2 * d * e for e in faster]
print(f"FLOPs at 256 and 1,024: ours {flops[0]:,} and {flops[1]:,}, dense MLP", end=" ")
print(f"{dense_flops[0]:,} and {dense_flops[1]:,}")
assert flops[0] > dense_flops[0] and flops[1] < dense_flops[1]

# %% [markdown]
# At 1,024 the dense MLP does more arithmetic in less time. FLOPs do not count choosing the $k$
# largest, nor reading rows from all over a table.

# %% [markdown]
# The second record takes one layer apart on one core (`python book/records.py 06_rows`). The
# arithmetic on neurons stays the same, but their two tables grow from 512 KiB to 2 GiB.

# %%
parts = read_record("06_rows")
search_ms, bags_ms, gathered_ms = parts["milliseconds"].values()
ratio = [b / a for a, b in zip(bags_ms, gathered_ms, strict=True)]
print(f"gathered rows to bags: {ratio[0]:.0f} times as long at 256 experts,", end=" ")
print(f"{ratio[-1]:.0f} at 2^20")
growth = search_ms[-1] / search_ms[0], bags_ms[-1] / bags_ms[0]
print(f"from 256 to 2^20 experts: search {growth[0]:.1f} times as long, bags {growth[1]:.1f} times")
assert min(ratio) > 5
few, many = (256 * 4 * 256 + 4 * 2 * r * 128 for r in (16, 1024))  # queries and keys
assert abs(many / few - 4.7) < 0.05

# %% [markdown]
# With bags, the search costs most. With gathered rows, the neurons do:

# %%
for e, s, b, g in zip(parts["experts"], search_ms, bags_ms, gathered_ms, strict=True):
    by_bags, by_rows = b / (s + b), g / (s + g)
    print(f"{e:9,} experts: the neurons take {by_bags:.0%} by bags, {by_rows:.0%} by gathered rows")
    assert by_bags < 0.5 < by_rows


# %% tags=["figure"]
def draw_growth(layers, parts):
    """Time against the number of experts: whole layers, and the parts of one."""
    fig, (left, right) = plotting.figure(1, 2, size=(12, 4.6))
    style = dict(marker="o", xscale="log", yscale="log", xlabel="number of experts")
    for name, times in layers["milliseconds"].items():
        sizes = layers["experts"][: len(times)]
        plotting.lines(left, sizes, {name: times}, **style)
    left.set(title="whole layers, two cores", ylabel="ms, forward")
    plotting.lines(right, [], {"_1": [], "_2": [], "_3": []})  # other curves, other colours
    plotting.lines(right, parts["experts"], parts["milliseconds"], **style)
    right.set(title="parts of one layer, one core")
    for ax in (left, right):
        ax.set_ylim(0.5, 200)
    left.text(22_000, 66, "measured up to 16,384", fontsize=11)
    return fig


# %% tags=["figure"]
plotting.save(
    draw_growth(layers, parts),
    "06_growth",
    "Milliseconds against the number of experts, 256 to a million, both logarithmic. Left, whole "
    "layers: a dense MLP, measured up to 16,384 neurons, is the fastest up to 1,024 and then "
    "crosses product keys with bags, which stay below PEER-pytorch throughout. Right, parts of one "
    "layer: neurons by bags are the lowest curve, the search lies above, neurons by gathered rows "
    "are five times the bags or more.",
)

# %% [markdown]
# ## 10 · Who fires for what
#
# We train a small model with 1,024 experts to predict the next byte of Python's manual.


# %%
def byte_model():
    """From bytes (b, l) to logits (b, l, 256), each byte by itself."""
    return torch.nn.Sequential(
        torch.nn.Embedding(256, 32),
        CDMoE(32, d_ff=64, n_experts=1024, n_heads=4, k=4, d_query=16),
        torch.nn.RMSNorm(32),
        torch.nn.Linear(32, 256),
    ).float()


# %%
def train_on_bytes(steps, seed=0):
    """Train on windows of 64 bytes of the manual; the losses and the model."""
    torch.manual_seed(seed)
    ids = text.text_to_ids(text.read_text())
    generator = torch.Generator().manual_seed(seed)
    model, losses = byte_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        start = torch.randint(len(ids) - 65, (16,), generator=generator)
        window = torch.stack([ids[s : s + 65] for s in start.tolist()])
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


# %% [markdown]
# Each of the 4 heads has gates that sum to 1, so we divide by 4 to get shares:


# %%
def fires_for(model, characters):
    """The share of each character's gates that falls on each expert: (characters, experts)."""
    with torch.no_grad():
        tokens = model[0](torch.tensor(list(characters.encode())))[None]
        gates, indices = model[1].route(tokens)
    share = torch.zeros(len(characters), 1024)
    return share.scatter_add(1, indices[0].flatten(1), gates[0].flatten(1).double() / 4)


# %% [markdown]
# The *overlap* of two characters is the sum over experts of the smaller of their shares:
# 1 if the shares are equal, 0 without a common expert. *Kinship* is the mean overlap within letters
# and within digits, minus the overlap between the two.


# %%
def mean_off_diagonal(matrix):
    n = len(matrix)
    return (matrix.sum() - matrix.trace()) / (n * (n - 1))


def kinship(model):
    """The mean overlap within letters and within digits, less that between the two."""
    letters, digits = fires_for(model, "etaoinshrdlu"), fires_for(model, "0123456789")
    share = torch.cat([letters, digits])  # (22, e)
    overlap = torch.minimum(share[:, None], share).sum(-1)  # (22, 22)
    within = mean_off_diagonal(overlap[:12, :12]) + mean_off_diagonal(overlap[12:, 12:])
    return (within / 2 - overlap[:12, 12:].mean()).item()


# %%
for seed in range(3):
    _, untrained = train_on_bytes(0, seed)
    losses, model = train_on_bytes(300, seed)
    last = sum(losses[-20:]) / 20
    before, after = kinship(untrained), kinship(model)
    assert 2.3 < last < 2.7 and before < 0.03 < after
    print(f"seed {seed}: loss from about {round(losses[0])} to", round(2 * last) / 2, end="; ")
    print("kinship rises from below 0.03 to above 0.03")

# %% [markdown]
# Kinship rises at all three seeds. We ran no control with random labels.
#
# After 1,500 steps at seed 0 (`python book/records.py 06_fires`), one expert takes more than 2 % of
# the gates of nine of the ten digits, another of eleven of the twelve most frequent English letters
# and of the colon.

# %%
fires = read_record("06_fires")
share, characters = torch.tensor(fires["share"]), fires["characters"]  # (28, 60)
asked = share > 0.02  # an expert that gets more than 2 % of the gates
letters, digits = list("etaoinshrdlu"), list("0123456789")
for column, name in ((21, "letters"), (36, "digits")):
    who = [characters[i] for i in asked[:, column].nonzero().flatten().tolist()]
    print(f"column {column}, {name}: more than 2 % of the gates of", *who)
    expected = [*letters[:9], "l", "u", ":"] if name == "letters" else digits[:9]
    assert who == expected
colon = share[characters.index(":"), 21]
print(f"column 21: the colon gives it {colon:.2f}, the letters up to {share[:13, 21].max():.2f}")
print(f"largest share: {share.max():.2f}; at most {asked.sum(1).max()} experts for one character")
assert 0.1 < share.max() < 0.35

# %% tags=["figure"]
fig, ax = plotting.figure(size=(12, 7.4))
title = "share of a character's gates, 10 % or more dark"
plotting.heatmap(ax, share, title=title, signed=False, limit=0.1, unit="share")
ax.set_aspect("auto")
ax.set_yticks(range(len(characters)), characters, fontsize=12)
ax.set_xticks([0, 21, 36, 59], ["0", "21: letters", "36: digits", "59"])
ax.set_xlabel("the 60 experts these characters use most, of 1,024")
plotting.save(
    fig,
    "06_fires",
    "A heat map of 28 characters against 60 experts after training on text, the experts ordered by "
    "the characters that ask them. Column 21 is marked in eleven of the twelve letters, in the "
    "colon and in no digit; column 36 in nine of the ten digits and in nothing else.",
)

# %% [markdown]
# Nobody told the model what a digit is. But we chose the two columns after seeing the picture, at
# one seed.
#
# ## 11 · As printed
#
# ### Keys that start at zero (WM Listing 8, Ch Listing 4)
#
# Both listings start the product keys at zero, so at first all scores are 0 and every token uses
# the same $k$ experts.
#
# WM Listing 8 puts the raw score inside the activation. The experts compute
# $\sum \mathrm{act}(z \cdot \mathrm{down}_i \cdot \text{score}_i)\,\mathrm{up}_i$ with
# $z = \mathrm{FFN}^{\mathrm s}(x)$, and $\mathrm{act}(0) = 0$ for ReLU and SiLU alike.


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

    def search(self, z):
        queries = self.queries(z).unflatten(-1, (self.keys.shape[0], 2, -1))
        return product_key_topk(queries, self.keys, self.k)

    def route(self, x):
        return self.search(self.shared(x))

    def forward(self, x):
        z = self.shared(x)
        scores, indices = self.search(z)  # (b, l, h, k)
        inside = torch.einsum("bld,blhkd->blhk", z, self.down[indices]) * scores
        return torch.einsum("blhk,blhkd->bld", self.activation(inside), self.up[indices]) + z


# %%
_ = torch.manual_seed(6)
x = random(4, 16, 8, seed=20)
for name, activation in (("ReLU", F.relu), ("SiLU", F.silu)):
    layer = CDMoEAsPrinted(activation)
    check(f"{name}, zero keys: the output is FFNˢ(x) alone", layer(x), layer.shared(x))
    layer(x).square().sum().backward()
    private = {n: p.grad.any().item() for n, p in layer.named_parameters() if "shared" not in n}
    learn = [n for n, reached in private.items() if reached]
    print(f"{name}: private parameters that receive a gradient: {', '.join(learn) or 'none'}")
    assert learn == ([] if name == "ReLU" else ["keys"])

# %% [markdown]
# The gradient of `up` has the factor $\mathrm{act}(0) = 0$, the others have $\mathrm{act}'(0)$. For
# ReLU torch defines it as 0, and the experts stay dead. For SiLU it is 1/2, but the gradient of
# `down` also has the score as a factor and the queries' gradient has the keys, both 0. Only the
# keys learn at first.
#
# In Ch Listing 4 a softmax makes equal gates. The experts contribute, but the queries get no
# gradient while all keys are zero:

# %%
for name, scale in (("zero keys", 0), ("random keys", 1)):
    _ = torch.manual_seed(7)
    layer = CDMMoE(8, d_ff=16, n_experts=256, n_heads=2, k=4, d_query=8)
    layer.retrieval.keys.data *= scale
    layer(x).square().sum().backward()
    asked = layer.route(x)[1].unique().numel()
    reached = {n: p.grad.any().item() for n, p in layer.named_parameters()}
    print(f"softmax, {name}: queries learn: {reached['retrieval.query_proj.weight']},", end=" ")
    print(f"keys learn: {reached['retrieval.keys']}, experts asked: {asked} of 256")
    assert reached["retrieval.query_proj.weight"] == (scale == 1) and reached["retrieval.keys"]
    assert (asked == 4) == (scale == 0)

# %% [markdown]
# Does it matter after 200 steps of training?


# %%
def train_a_little(layer, steps=200):
    """Fit y = tanh(x W) by Adam; the experts asked before and after, and the last losses' mean."""
    x, W = random(4, 16, 8, seed=20), random(8, 8, seed=19)
    before, losses = layer.route(x)[1].unique().numel(), []
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for step in range(steps):
        batch = random(4, 16, 8, seed=100 + step)
        optimizer.zero_grad()
        loss = F.mse_loss(layer(batch), torch.tanh(batch @ W))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return before, layer.route(x)[1].unique().numel(), sum(losses[-20:]) / 20


def softmax_outside(scale):
    """A CDMoE of 256 experts whose random keys are multiplied by a number."""
    layer = CDMoE(8, d_ff=16, n_experts=256, n_heads=2, k=4, d_query=8)
    layer.experts.keys.data *= scale
    return layer


# %%
versions = {
    "score inside ReLU, zero keys": lambda: CDMoEAsPrinted(F.relu),
    "score inside SiLU, zero keys": lambda: CDMoEAsPrinted(F.silu),
    "softmax, zero keys": lambda: softmax_outside(0),
    "softmax, random keys": lambda: softmax_outside(1),
}
runs = {}
for name, make in versions.items():
    _ = torch.manual_seed(6)
    before, after, loss = runs[name] = train_a_little(make())
    dead = name == "score inside ReLU, zero keys"
    assert (after == 4 and loss > 0.155) if dead else (after > 60 and loss < 0.145)
    words = "still 4, loss above 0.155" if dead else "more than 60, loss below 0.145"
    print(f"{name:29} experts asked: {before:3} of 256, after 200 steps {words}")
assert abs(runs["softmax, zero keys"][2] - runs["softmax, random keys"][2]) < 0.005
print("softmax: the losses with zero and with random keys differ by less than 0.005")

# %% [markdown]
# Only ReLU with the score inside stays dead. With the softmax, the losses from zero and random keys
# end within 0.005 of each other, at this one seed and size. The package draws its keys from a
# standard normal distribution.
#
# ### The score inside the activation (WM §3.3 and Listing 8)
#
# Inside the activation, the score no longer weights the expert's output. Where the inner product is
# negative, a higher score can make the neuron *quieter*. And adding 3 to all scores, which a
# softmax doesn't notice, changes the output.

# %%
scores, _ = product_key_topk(random(1, 2000, 4, 2, 4, seed=21), random(4, 2, 16, 4, seed=22), 8)
print(f"{scores.numel():,} retrieved scores, the smallest {scores.min():.2f}")
assert scores.min() > 0
low, high = (silu(torch.tensor(-1.0 * score)).item() for score in (1, 5))
print(f"inner product -1: score 1 inside gives {low:.3f}, score 5 gives {high:.3f}")
assert abs(high) < abs(low) / 5
dots = random(*scores.shape, seed=23)
_ = must_differ("score inside", silu(dots * scores), silu(dots) * scores, at_least=0.01)
inside = silu(dots * (scores + 3))
_ = must_differ("all scores plus 3, score inside", inside, silu(dots * scores), at_least=0.01)
check("all scores plus 3, softmax outside", (scores + 3).softmax(-1), scores.softmax(-1))

# %% [markdown]
# ### Experts that no one can reach (WM Table 7)
#
# Table 7 has 3,072 and 8,192 experts, which are not squares. `int(sqrt(e))` keys per half reach
# only `int(sqrt(e))**2` of them:

# %%
for e, lost in ((3072, 47), (8192, 92)):
    r = int(math.sqrt(e))
    print(f"{e} experts: {r} keys per half reach {r * r}; {e - r * r} are never asked")
    assert e - r * r == lost

# %% tags=["raises-exception"]
PEER(64, n_experts=3072, n_heads=4, k=8, d_query=32)

# %% [markdown]
# ### A gate without an activation (OTCE eq. 19c)
#
# > $\text{FFN}^{Expansive}(x, W_3^p) = \text{FFN}^p(\text{FFN}^s(x) \cdot \text{FFN}^s(x)W_3^p)$
# > — OTCE eq. 19c
#
# With $z = \mathrm{FFN}^{\mathrm s}(x)$ the gate $zW_3$ has no activation, and $z \circ zW_3$ is
# *even*: $-z$ gives the same result as $z$. With a sigmoid, $\sigma(u) + \sigma(-u) = 1$ makes the
# odd part of $z \circ \sigma(zW_3)$ equal to $z/2$ for every $W_3$.

# %%
z, W_3 = random(500, 6, seed=23), random(6, 6, seed=24)
check("as printed: even", (-z) * ((-z) @ W_3), z * (z @ W_3))
opened, opposite = z * torch.sigmoid(z @ W_3), -z * torch.sigmoid(-z @ W_3)
check("with a sigmoid: the odd part is z/2", (opened - opposite) / 2, z / 2)

# %% [markdown]
# The package takes the sigmoid.
#
# ## Summary
#
# - A router learns through the gates it keeps. With $k = 1$ and renormalized gates it learns
#   nothing.
# - When each expert solves one of several tasks with a common part, each stores that part. You can
#   share it beside the experts, inside them or before them.
# - Scores that are sums of two halves make a million experts searchable, exactly. $2r$ inner
#   products give $r^2$ scores, and the $k$ best are among about $k \ln k$ candidates.
# - Reading with rows is the backward pass of mixing them.
# - Keys that start at zero send every token to the same experts at first.
#
# | as printed | what it does when run | here |
# |---|---|---|
# | keys start at zero | all tokens ask the same at first, with ReLU inside for good | random keys |
# | score inside the activation | no weight of an answer; raw scores matter | softmax, outside |
# | 3,072 and 8,192 experts | 47 and 92 never asked | a square, such as 3,136 or 8,281 |
# | gate without activation (eq. 19c) | even in $z$: nothing odd in $z$ comes through | sigmoid |
#
# ## Exercises
#
# **1 · easy.** How many parameters does a router have that is a matrix, and how many has one of
# product keys with its map to the queries, for $e = r^2$ experts, tokens of width $d$, one head and
# half queries of width $m$?


# %% tags=["exercise"]
def router_parameters(d, m, r):
    """(matrix, queries' map and product keys): two numbers of parameters."""
    ### BEGIN SOLUTION
    return d * r * r, d * 2 * m + 2 * r * m
    ### END SOLUTION


# %% tags=["check"]
for d, m, r in ((64, 16, 16), (96, 8, 32), (10, 3, 5)):
    matrix = parameters(lambda d=d, r=r: torch.nn.Linear(d, r * r, bias=False))
    sizes = dict(n_experts=r * r, n_heads=1, k=1, d_query=2 * m)
    keys = parameters(lambda d=d, sizes=sizes: ProductKeys(d, **sizes))
    print(f"d = {d}, m = {m}, r = {r}: a matrix {matrix:,}, product keys {keys:,}")
    assert router_parameters(d, m, r) == (matrix, keys)

# %% [markdown]
# **2 · easy.** A router with random scores and $k = 1$ sends $n$ tokens to $e$ experts. How many
# experts does it leave unused, on average? (Hint: how probable is it that one given expert is left
# out by one token, and by all of them?)


# %% tags=["exercise"]
def expected_unused(n, e):
    """The mean number of experts, of e, that n random choices leave out."""
    ### BEGIN SOLUTION
    return e * (1 - 1 / e) ** n
    ### END SOLUTION


# %% tags=["check"]
for n, e in ((1, 4), (3, 4), (6, 3)):  # all eⁿ ways in which n tokens can choose, one by one
    choices = torch.cartesian_prod(*[torch.arange(e)] * n).view(-1, n)
    unused = e - sum(row.unique().numel() for row in choices) / len(choices)
    print(f"n = {n}, e = {e}: {unused:.4f} unused, the mean of {len(choices)} cases")
    assert abs(expected_unused(n, e) - unused) < 1e-12
print(f"512 tokens, 256 experts: {expected_unused(512, 256):.1f} unused")

# %% [markdown]
# **3 · medium.** `F.embedding_bag(…, mode="sum")` sums the rows of each bag, and takes the places
# where the bags begin as `offsets` (§7). Use it, and nothing that gathers, to compute the *mean* of
# the vectors of each text's characters, for texts of different lengths.


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
table, texts = random(9, 32, seed=31), [[1, 2] * 20, [3], [8, 5, 5, 7]]
with LargestTensor() as made:
    means = mean_vectors(texts, table)
check("means", means, torch.stack([table[text].mean(0) for text in texts]))
print(f"largest tensor written: {made.entries} entries; the rows gathered would be {45 * 32}")
assert made.entries <= 4 * 32

# %% [markdown]
# **4 · medium.** Write the search for the $k$ best sums of *three* sorted lists, by ranks as in §6:
# form no sum that the ranks rule out. (Hint: with ranks counted from 1, how many sums are at least
# as large as the one of ranks $i$, $j$ and $n$? A boolean mask of three axes selects.)


# %% tags=["exercise"]
def best_of_three(first, second, third, k):
    """The k largest sums of one entry of each list (r,), descending; so are the lists."""
    ### BEGIN SOLUTION
    rank = torch.arange(1, len(first) + 1)
    possible = rank[:, None, None] * rank[:, None] * rank <= k  # (r, r, r)
    i, j, n = possible.nonzero().unbind(1)
    return (first[i] + second[j] + third[n]).topk(k).values
    ### END SOLUTION


# %% tags=["check"]
drawn = random(3, 20, seed=30).sort(descending=True).values
steep = -torch.tensor([[1.0], [50.0], [50.0]]) * torch.arange(20)  # the best: ranks (i, 1, 1)
two = -torch.tensor([0.0, 1.0, *range(50, 68)])  # two good entries, three, and seven
three = -torch.tensor([0.0, 0.1, 0.2, *range(50, 67)])
seven = -torch.tensor([*(i / 100 for i in range(7)), *range(50, 63)])
few = torch.stack([two, two, seven])
turned = [lists.roll(turn, 0) for lists in (steep, few) for turn in range(3)]
for lists in (drawn, two.expand(3, -1), three.expand(3, -1), *turned):
    everything = (lists[0][:, None, None] + lists[1][:, None] + lists[2]).flatten()
    for k in (1, 8, 30):
        with LargestTensor() as made:
            best = best_of_three(*lists, k)
        torch.testing.assert_close(best, everything.topk(k).values)
        ranks = range(1, 21)
        candidates = sum(i * j * n <= k for i in ranks for j in ranks for n in ranks)
        assert made.entries <= candidates, f"k = {k}: {made.entries} sums, needed {candidates}"
print(f"the {k} best of {everything.numel():,} sums: {candidates} candidates")

# %% [markdown]
# **5 · hard.** Turn a dense MLP $\mathrm{SiLU}(xW)\,W_2$ with $r^2$ neurons into a `PEER` with one
# head that asks *all* of them and gives the same output. (Hint: what are the gates if all scores
# are equal, and how is `up` to make up for it? A `PEER` has the parameters `keys`, `down` and `up`;
# the maps of `MLP` are `in_proj` and `out_proj`, with weights (f, d) and (d, f).)


# %% tags=["exercise"]
def as_peer(mlp, r):
    """A PEER of r² experts, one head and k = r², equal to the MLP."""
    ### BEGIN SOLUTION
    peer = PEER(mlp.in_proj.in_features, n_experts=r * r, n_heads=1, k=r * r, d_query=2)
    with torch.no_grad():
        peer.keys.zero_()  # all scores equal: every gate is 1 / r²
        peer.down.copy_(mlp.in_proj.weight)
        peer.up.copy_(mlp.out_proj.weight.T * r * r)
    return peer
    ### END SOLUTION


# %% tags=["check"]
_ = torch.manual_seed(8)
for d, r in ((6, 5), (4, 3)):
    mlp, x = MLP(d, r * r), random(1, 4, d, seed=33)
    peer = as_peer(mlp, r)
    assert isinstance(peer, PEER) and peer.n_heads == 1 and peer.k == r * r
    with torch.no_grad():
        check(f"a dense MLP of {r * r} neurons as a PEER that asks everyone", peer(x), mlp(x))

# %% [markdown]
# ## Further reading
#
# - Shi et al., *OTCE* §3.2, *Cheems* §3.3, *Wonderful Matrices* §3.3: the layers.
# - Lample et al., *Large Memory Layers with Product Keys* (2019): the search.
# - He, *Mixture of A Million Experts* (2024): PEER.
# - Fedus, Zoph and Shazeer, *Switch Transformers* (2021): one expert, and balancing.
# - Dai et al., *DeepSeekMoE* (2024): isolating shared experts.
# - `cheems_ref/experts.py` and `cheems_ref/retrieval.py`: the code.
