# %% [markdown]
# # 06 · Cross-domain experts
#
# **A layer can hold a million neurons and use only 64 of them per token, if it can find the right
# 64 cheaply. In this chapter you'll write that search in six lines, and it's exact.** By the end
# you will be able to
#
# - route tokens to experts, and say which routers can't learn and which look at later tokens;
# - prove that two thousand inner products per head are enough to search a million experts;
# - evaluate the neurons you found without copying their rows;
# - compare the cost of such a layer with a dense layer's.
#
# You need to know softmax, and PyTorch's modules, `detach` and `autograd.grad`.
#
# Sources: *OTCE* (Shi et al.) §3.2; *Cheems* (Ch) §3.3, Listing 4; *Wonderful Matrices* (WM) §3.3,
# Listing 8; He, *Mixture of A Million Experts* (2024); Lample et al., *Large Memory Layers with
# Product Keys* (2019). Chapter 00 explains ✓ and ✗.
#
# Here is the layer we'll build. Two short lists of scores pick the neurons that a token uses.

# %% tags=["setup"]
import json
import math
from itertools import pairwise, product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from cheems_ref import plotting, retrieval
from cheems_ref.config import ModelConfig
from cheems_ref.exercises import LargestTensor
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
    load_balancing_loss,
    product_key_topk,
)
from cheems_ref.model import Block
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


# %% tags=["setup"]
def read_record(name):
    return json.loads(Path(f"../experiments/records/{name}.json").read_text())


def all_gates(layer, x):
    """The gates of all experts, zero for those not used: (b, l, e)."""
    gates, indices = layer.route(x)
    return torch.zeros(*x.shape[:2], len(layer.experts)).scatter(-1, indices, gates)


# %% slide_title="Two short lists of scores find 6 neurons among 64" tags=["figure"]
plotting.show_drawing(
    "06_search",
    "A token goes through a shared part, which produces z. A linear map turns z into two half "
    "queries. Each gives a list of scores, sorted. The lists stand along two edges of a grid of 64 "
    "sums. The candidates form a staircase in one corner; the six largest sums, dark, name six "
    "neurons. The neurons read z, and z is added to the sum of what they write.",
)

# %% [markdown]
# A part that all tokens share computes $z$, and a learned map turns $z$ into a query. Each half of
# the query scores a short list of keys. Every *sum* of two scores belongs to one neuron, so two
# lists of 1,024 keys are enough for a million. The best sums lie in the staircase. Their neurons
# read $z$, and $z$ is added to what they write.

# %% [markdown] slide_title="An expert is a small feed-forward layer"
# ## 1 · One expert
#
# What's an expert? Just a feed-forward layer, usually a small one. A plain one (*multi-layer
# perceptron*, MLP) widens a token from $d$ to $f$ numbers, applies a nonlinear function, and
# narrows it again. Our nonlinear function is $\mathrm{SiLU}(u) = u\,\sigma(u)$, where σ is the
# sigmoid.

# %% [markdown] slide_title="A gated layer multiplies two maps of the token"
# A *gated* layer multiplies two maps, $xW$ and $xV$, entry by entry. OTCE's *double gated linear
# unit*, DGLU (eq. 13b), applies a nonlinear function to both:
#
# $$\begin{aligned}
#   \text{MLP: } & \mathrm{SiLU}(xW)\,W_2 \\
#   \text{gated: } & (\mathrm{SiLU}(xW) \circ xV)\,W_2 \\
#   \text{DGLU: } & (\mathrm{SiLU}(xW) \circ \tanh(xV))\,W_2.
#   \end{aligned} \tag{6.1}$$


# %% tags=["guard"]
def silu(u):
    return u / (1 + torch.exp(-u))


check("SiLU = F.silu", silu(random(100, seed=1)), F.silu(random(100, seed=1)))
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
    without = silu(x @ dglu.W.weight.T) * (x @ dglu.V.weight.T)
    _ = must_differ("DGLU without its tanh", without @ dglu.W_2.weight.T, dglu(x))


# %% [markdown] slide_title="Two experts run, and their shares weight their outputs"
# ## 2 · Routing by hand
#
# Could a token pay for only part of such a layer? Take $e$ such layers and call them *experts*. A
# *router* scores them for every token, and a softmax turns the scores into shares.
#
# Only the experts with the $k$ largest shares run, and their shares are the *gates* $g_i$ that
# weight their outputs (OTCE eq. 15):
#
# $$y = \sum_{i \,\in\, \text{top-}k} g_i\,\mathrm{FFN}_i(x), \qquad
#   g = \mathrm{softmax}(x\,W_{\text{router}}), \quad W_{\text{router}} \in \mathbb{R}^{d \times e}.
#   \tag{6.2}$$
#
# Here are three tokens. Which two experts will each use?

# %% tags=["aside"]
_ = torch.manual_seed(1)
x = random(2, 5, 6, seed=0)
moe = MoE(6, 10, n_experts=4, k=2)
y = torch.zeros(3, 6)
with torch.no_grad():
    shares = (x @ moe.router.weight.T).softmax(-1)  # (b, l, e)
    for t in range(3):
        best = shares[0, t].argsort(descending=True)[:2]
        row = "  ".join(f"{share:.2f}" for share in shares[0, t])
        print(f"token {t}: shares {row}   routed to experts {best.tolist()}")
        for i in best:
            y[t] += shares[0, t, i] * moe.experts[i](x[0, t])
    check("mixture by hand = MoE", moe(x)[0, :3], y)

# %% slide_title="Each token uses the two experts with its largest shares" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(12, 4.8))
for t, i in product(range(3), range(4)):
    share, used = shares[0, t, i].item(), i in shares[0, t].topk(2).indices
    color = plotting.COLORS[0] if used else "#dddddd"
    ax.plot((0, 4), (2.6 - 1.3 * t, 3 - i), color=color, lw=16 * share, zorder=2 + used)
    plotting.box(ax, 0, 2.6 - 1.3 * t, f"token {t}", fontsize=20)
    plotting.box(ax, 4, 3 - i, f"expert {i}", fontsize=20)
ax.set(xlim=(-1.2, 5.2), ylim=(-0.5, 3.5)), ax.axis("off")
plotting.save(
    fig,
    "06_routing",
    "Lines from three tokens to four experts, as wide as the experts' shares. The two widest lines "
    "of each token are blue, and lead to experts that differ from token to token; the others are "
    "grey.",
)

# %% [markdown]
# Each token goes to the two experts with its largest shares, and their weighted sum is the
# package's output.


# %% tags=["guard"]
def dense(layer, x, gates=None):
    """All experts on all tokens, weighted by their gates: (b, l, d)."""
    gates = all_gates(layer, x) if gates is None else gates
    outputs = [layer.expert(i, x) for i in range(len(layer.experts))]
    outputs = torch.stack(outputs, dim=-2)  # (b, l, e, d)
    return torch.einsum("ble,bled->bld", gates, outputs)


check("grouped by expert = dense", moe(x), dense(moe, x))
weights, back = list(moe.parameters()), random(2, 5, 6, seed=1)
grouped, by_all = (
    torch.cat([g.flatten() for g in torch.autograd.grad(y, weights, back)])
    for y in (moe(x), dense(moe, x))
)
check("grouped by expert = dense, gradients by router and experts", grouped, by_all)
_ = must_differ("all four experts kept", dense(moe, x, shares), moe(x))
block = Block("R", ModelConfig("SR", d_model=6, d_ff=10, n_heads=2))  # z + layer(norm(z))
block.norm = torch.nn.Identity()
with torch.no_grad():
    y, _ = block(x, torch.arange(5).expand(2, 5))
    check("OTCE eqs. 15a and 17a without a norm = block", x + dense(block.layer, x), y)
    _ = must_differ("the residual forgotten", dense(block.layer, x), y)

# %% [markdown]
# ### Which router learns?
#
# OTCE's formulas use the kept shares unchanged. Our option `renormalize` divides them by their sum.
# That looks harmless, but the loss reaches the router only through the gates. Here are four routers
# after one backward pass. Which one gets no gradient?

# %% slide_title="With one renormalized gate, the router never learns"
for k, renormalize in ((2, False), (2, True), (1, False), (1, True)):
    _ = torch.manual_seed(2)
    layer = MoE(6, 10, n_experts=4, k=k, renormalize=renormalize)
    layer(x).square().sum().backward()
    gradient = layer.router.weight.grad
    largest = 0.0 if gradient is None else gradient.abs().max().item()
    print(f"k = {k}, renormalized: {renormalize!s:5}   largest gradient of the router:", end=" ")
    print(f"{largest:.3g}")
    assert (largest > 1e-6) == (k > 1 or not renormalize)

# %% [markdown]
# With $k = 1$ the renormalized gate $g_i / g_i$ is always 1, so the router never learns.
# Can a gate of 1 have a gradient?

# %% slide_title="p / p.detach() is a gate of 1 with a gradient"
scores = moe.router(x)  # (b, l, e)
p = scores.softmax(-1).max(-1).values  # the one share that k = 1 keeps
for name, gate in {"p / p": p / p, "p / p.detach()": p / p.detach()}.items():
    (gradient,) = torch.autograd.grad(gate.sum(), scores, retain_graph=True)
    largest = gradient.abs().max().item()
    print(f"{name:14} gates {gate.min():.2f} to {gate.max():.2f}, largest gradient {largest:.2f}")
    assert (gate - 1).abs().max() < 1e-12 and (largest > 0.1) == ("detach" in name)

# %% [markdown] slide_title="A balancing loss works through the gates"
# For the backward pass, `p.detach()` is a constant. So the gate is 1, and its gradient is
# $\nabla p / p = \nabla \log p$. labml's annotated Switch Transformer has it as an option.
#
# ### Keeping everyone busy
#
# A router may come to send most tokens to a few experts; if all choose the same $k$, that's a
# *collapse*. An extra loss discourages imbalance. With $b$ texts of $l$ tokens and $k$ choices per
# token, our *load balancing loss* is
#
# $$\text{loss} = e \sum_i f_i P_i, \qquad
#   f_i = \frac{\text{number of choices of } i}{b\,l\,k}, \qquad
#   P_i = \frac{\text{sum of the gates given to } i}{\text{sum of all kept gates}}. \tag{6.3}$$
#
# It's 1 for an even load. In a total collapse, each of the $k$ busy experts has $f_i = 1/k$, and
# their $P_i$ sum to 1. So the loss is $e \cdot \tfrac1k \cdot 1$ for all gates. A constant
# has no gradient. In *Switch Transformers* (eq. 4), $P_i$ is the mean of the **whole** softmax,
# with the experts not chosen. There the busy experts' $P_i$ sum to a little less than 1. The rest
# leaks to the idle ones, and the loss falls as the leak grows.
#
# Let's give two of four experts a
# head start, a bias added to their scores, and train a router on one of these losses alone. Which
# one gets it out of the collapse?


# %% tags=["setup"]
def whole_softmax_loss(shares, indices):
    """Switch Transformers' eq. 4: P_i is the mean share of expert i before any is dropped."""
    load = F.one_hot(indices, 4).double().mean((0, 1))
    return 4 * (load * shares.mean(0)).sum()


# %% tags=["setup"]
def choices_after(loss_of, head_start, updates=600):
    """Train a router's map and bias on a balancing loss alone; the choices in the last batch."""
    generator = torch.Generator().manual_seed(0)
    W = (0.3 * torch.randn(8, 4, generator=generator)).requires_grad_()
    bias = torch.tensor([head_start, head_start, 0.0, 0.0]).requires_grad_()
    optimizer = torch.optim.Adam([W, bias], lr=1e-2)
    for _ in range(updates):
        shares = (torch.randn(256, 8, generator=generator) @ W + bias).softmax(-1)
        gates, indices = shares.topk(2)
        optimizer.zero_grad()
        loss_of(shares, gates, indices).backward()
        optimizer.step()
    return indices.flatten().bincount(minlength=4).tolist()


# %% tags=["setup"]
LOSSES = {
    "ours": lambda shares, gates, indices: load_balancing_loss(gates, indices, 4),
    "Switch": lambda shares, gates, indices: whole_softmax_loss(shares, indices),
}
loads = {}
for head_start, (name, loss_of) in product((12.0, 6.0), LOSSES.items()):
    chosen = loads[head_start, name] = choices_after(loss_of, head_start)
    collapsed = chosen == [256, 256, 0, 0]
    outcome = "two experts get everything" if collapsed else "all four are busy"
    print(f"head start {head_start:2.0f}, {name:6}: {outcome}")
    assert collapsed == (name == "ours" and head_start == 12)
    assert collapsed or min(chosen) > 80  # of 512 choices, a fair share is 128

# %% slide_title="Our loss can't undo a total collapse; Switch's can" tags=["figure", "slide"]
fig, axes = plotting.figure(1, 4, size=(12.5, 4.2))
for ax, ((head_start, name), chosen) in zip(axes, loads.items(), strict=True):
    ax.bar(range(4), chosen, color=plotting.COLORS[min(chosen) == 0])
    plotting.level(ax, 128, "fair" if ax is axes[0] else "")
    ax.set(title=f"{name}, head start {head_start:.0f}", xlabel="expert", ylim=(0, 270))
    ax.set(xticks=range(4), yticks=(0, 128, 256), ylabel="choices" if ax is axes[0] else "")
plotting.save(
    fig,
    "06_loads",
    "The choices of four experts in the last batch, after 600 updates by a balancing loss. Head "
    "start 12: with ours, two experts get all 512 choices and two none; with Switch's, each gets "
    "about 128. Head start 6: all four are busy with both.",
)

# %% [markdown]
# After a head start of 12, our loss leaves two experts with nothing, and Switch's balances all
# four. At 6 a few tokens go to the other two, and that is enough for both. Switch's loss holds out
# longer, but its leak shrinks like $\exp(-\text{head start})$, and after 25 it fails. Which loss
# does your library have? DeepSeek-V3 adds a bias to each expert's score and moves the bias by the
# load. Its bias affects only the choice.

# %% tags=["guard"]
gates, indices = moe.route(random(8, 64, 6, seed=4))
loss = 0.0
for i in range(4):
    f_i = (indices == i).double().mean()
    P_i = gates[indices == i].sum() / gates.sum()
    loss += 4 * f_i * P_i
check("equation 6.3 = load_balancing_loss", load_balancing_loss(gates, indices, 4), loss)
even = load_balancing_loss(random(2, 2, seed=5).exp(), torch.tensor([[0, 1], [2, 3]]), 4)
check("an even load, any gates", even, torch.tensor(1.0))
same = load_balancing_loss(random(5, 2, seed=6).exp(), torch.tensor([[0, 1]] * 5), 4)
check("all tokens on the same two of four, any gates", same, torch.tensor(2.0))
shares = scores.softmax(-1).max(-1).values
(by_log,) = torch.autograd.grad(shares.log().sum(), scores)
check("p / p.detach() has the gradient of log p", gradient, by_log)

# %% tags=["guard"]
sums = moe.route(x)[0].sum(-1)
print(f"the two gates of a token sum to between {sums.min():.2f} and {sums.max():.2f}")
assert sums.max() < 1
for head_start in (16.0, 25.0):  # Switch's loss holds out longer, but not forever
    chosen = choices_after(LOSSES["Switch"], head_start)
    collapsed = chosen == [256, 256, 0, 0]
    print(f"head start {head_start:.0f}, Switch: the choices stay collapsed: {collapsed}")
    assert collapsed == (head_start == 25) and (collapsed or min(chosen) > 50)
logits, f = random(5, 4, seed=7).requires_grad_(), torch.tensor([0.5, 0.5, 0.0, 0.0])
shares = logits.softmax(-1)
ours = load_balancing_loss(shares[:, :2], torch.tensor([[0, 1]] * 5), 4)
switch = 4 * (f * shares.mean(0)).sum()  # their loss, by the whole softmax
assert abs(ours.item() - 2) < 1e-12 and switch.item() < 2  # so it falls as the leak grows
ours, switch = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, switch))
assert ours.abs().max() < 1e-12 and switch.abs().max() > 1e-3

# %% [markdown]
# ### Two shortcuts, and what leaks
#
# You can also force the balance: give each expert three slots *for the whole batch*, first come,
# first served (a *capacity*), or let it pick its five best tokens of the batch (*expert choice*).
# Then a token's output depends on other tokens. Change the last token of the first of two texts. In
# the printout, 1 marks an output that changed. Which outputs will?


# %% tags=["setup"]
def with_slots(shares, slots=3):
    """Top-2, but an expert serves only the first of the tokens that come to it: (b, l, e)."""
    chosen = shares >= shares.topk(2).values[..., -1:]
    arrived = chosen.flatten(0, 1).cumsum(0).view_as(shares)
    return shares * (chosen & (arrived <= slots))


def expert_choice(shares, slots=5):
    """Each expert takes the tokens of the batch that score highest for it: (b, l, e)."""
    tokens = shares.flatten(0, 1)
    best = tokens.topk(slots, dim=0)
    return torch.zeros_like(tokens).scatter(0, best.indices, best.values).view_as(shares)


# %% tags=["setup"]
def change_of_outputs(rule):
    """How far each output moves (b, l) if the last token of the first text is another one."""
    moved = x.clone()
    moved[0, 4] = 3 * random(6, seed=35)
    with torch.no_grad():
        before, after = (rule(moe.router(tokens).softmax(-1)) for tokens in (x, moved))
        return (dense(moe, moved, after) - dense(moe, x, before)).abs().amax(-1)


# %% tags=["aside"]
changed = {}
for name, rule in (("capacity", with_slots), ("expert choice", expert_choice)):
    moves = changed[name] = (change_of_outputs(rule) > 1e-3).long().tolist()
    print(f"{name:13} changed: first text {moves[0]}, second text {moves[1]}")
    assert (sum(moves[0][:4]) > 0) == (name == "expert choice") and sum(moves[1]) > 0

# %% slide_title="Expert choice lets later tokens change earlier ones" tags=["figure", "slide"]
fig, axes = plotting.figure(1, 2, size=(12, 3.6))
for ax, (name, moves) in zip(axes, changed.items(), strict=True):
    plotting.state_grid(ax, 0, 0, moves, cell=1, color=plotting.COLORS[1], largest=1.0)
    ax.text(4.5, 1.5, "new", ha="center", va="center", fontsize=18)
    ax.set(xlim=(0, 5), ylim=(0, 2), xlabel="token", aspect="equal")
    ax.set_title(f"{name}: outputs that change", loc="left")
    ax.set_xticks([t + 0.5 for t in range(5)], range(5))
    ax.set_yticks([1.5, 0.5], ["first text", "second text"])
plotting.save(
    fig,
    "06_leaks",
    "Two texts of five tokens, and the outputs that change with the last token of the first text. "
    "With a capacity, that token and the third of the second text. With expert choice, also the "
    "first and the fourth token of the first text, and the last of the second.",
)

# %% [markdown]
# Both change the second text, where a token won or lost a slot. Expert choice also changes
# *earlier* tokens: it compares them with later ones, which aren't there yet when you generate. The
# package does neither.

# %% [markdown] slide_title="Every expert may store the same common map" slide_figure="06_common:0"
# ## 3 · What experts learn twice
#
# > "[…] multiple routing experts will have redundant parameters that store common information when
# > obtaining their respective parameters." — OTCE §3.2, Shared Strategy
#
# Take a task where every token needs a map $M$ plus one of four maps, depending on its kind $i$:
# $y = x\,(M + M_i)$. The first four entries of a token say which kind it is; the maps act on the
# other four.


# %% tags=["setup"]
def kinds_task(seed, d=8, kinds=4):
    """Draw M (d, d) and the M_i (kinds, d, d), half as large; also the generator of all data."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(d, d, generator=generator)
    special = torch.randn(kinds, d, d, generator=generator) / 2
    return common, special, generator


# %% tags=["setup"]
def kinds_batch(n, common, special, generator):
    """Draw n tokens of random kinds: x (1, n, d) with its mark, target (1, n, d), kind (1, n)."""
    kinds, d, _ = special.shape
    kind = torch.randint(kinds, (1, n), generator=generator)
    x = torch.randn(1, n, d, generator=generator)
    x[..., :kinds] = 0  # room for the mark
    target = x @ common + torch.einsum("bld,blde->ble", x, special[kind])
    return x + 3 * torch.eye(kinds, d)[kind], target, kind


# %% slide_title="A shared expert makes room for the common map" tags=["figure", "slide"]
plotting.show_drawing(
    "06_common",
    "Four experts, each with a map of its own in blue and, in green, the common map. Beside them a "
    "shared expert, which could hold the common map once for all.",
)

# %% [markdown] slide_title="How much of the common map do the routed experts hold?"
# We set the router by hand, one expert per kind, and train the experts with and without a *shared
# expert*, whose output is added for every token. Call the mean of the four $M + M_i$ the *common
# map* $\bar M$. It includes the mean of the four $M_i$, which needn't be zero. How much of
# $\bar M$ do the routed experts then hold? Let $E_i$ be the linear map that fits expert $i$ best on
# its own tokens. Average the four, and ask how much of $\bar M$ is in the average:
#
# $$\text{held} = \frac{\langle \tfrac14 \sum_i E_i,\, \bar M\rangle}
#   {\langle \bar M, \bar M\rangle}.$$
#
# It's 1 if they hold all of it, 0 if nothing. What do you expect when there's a shared expert?


# %% tags=["setup"]
def fitted(layer, i, own):
    """The linear map of expert i, by least squares on its own tokens: (d - kinds, d)."""
    inputs, outputs = own[:, 4:], layer.expert(i, own)
    # Without their means: what the mark adds is the same for all tokens of a kind.
    return torch.linalg.lstsq(inputs - inputs.mean(0), outputs - outputs.mean(0)).solution


# %% tags=["setup"]
def learned_maps(layer_class, seed, steps=200, faster=1, rate=5e-3, sgd=False, common=1.0):
    """Train four experts, with the router fixed; their linear maps, and the common map.

    A shared expert learns `faster` times as fast; the product of the two rates stays. The task's
    M is multiplied by `common`.
    """
    M, special, generator = kinds_task(seed)
    task = common * M, special, generator
    torch.manual_seed(seed)
    layer = layer_class(8, 16, n_experts=4, k=1)
    layer.router.weight = torch.nn.Parameter(2 * torch.eye(4, 8), requires_grad=False)
    shared = [*layer.shared.parameters()] if layer_class is SharedExpertMoE else []
    groups = [dict(params=[*layer.experts.parameters()], lr=rate / math.sqrt(faster))]
    groups += [dict(params=shared, lr=rate * math.sqrt(faster))] if shared else []
    optimizer = torch.optim.SGD(groups, momentum=0.9) if sgd else torch.optim.Adam(groups)
    for _ in range(steps):
        x, target, _ = kinds_batch(256, *task)
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
    assert loss / target.var() < 0.03
    x, _, kind = kinds_batch(4096, *task)
    with torch.no_grad():
        maps = torch.stack([fitted(layer, i, x[0, kind[0] == i]) for i in range(4)])
    return maps, (task[0] + task[1])[:, 4:].mean(0)


# %% tags=["setup"]
def common_map_held(layer_class, seed, **training):
    """How much of the common map the four experts hold."""
    maps, true = learned_maps(layer_class, seed, **training)
    return ((maps.mean(0) * true).sum() / true.square().sum()).item()


def in_common(seed, common):
    """Of four experts' maps, alone, the square of the mean over the mean square."""
    maps, _ = learned_maps(MoE, seed, common=common)
    return (maps.mean(0).square().sum() / maps.square().sum((1, 2)).mean()).item()


# %% tags=["aside"]
held = {"1": []}  # by the shared expert's rate, as a multiple of theirs
for seed in range(3):
    alone, beside = (common_map_held(layer, seed) for layer in (MoE, SharedExpertMoE))
    held["1"].append(beside)
    print(f"task {seed}: experts alone hold {alone:.2f},", end=" ")
    print(f"beside a shared expert {beside:.2f} of the common map")
    assert abs(alone - 1) < 0.03 and 0.4 < beside < 0.6
shared, unrelated = ([in_common(seed, common) for seed in range(3)] for common in (1.0, 0.0))
print("experts alone have in common", " ".join(f"{share:.2f}" for share in shared), end=", ")
print("without M in the task", " ".join(f"{share:.2f}" for share in unrelated))
assert min(shared) > 0.8 and max(unrelated) < 0.3

# %% [markdown]
# With a shared expert beside them, the routed experts still learned about half of the common map.
# Without one, each expert *has to* learn $M + M_i$, so $M$ gets stored four times: of the four
# maps' square, 0.84 to 0.89 is in their mean. (The control, tasks without $M$: 0.21 to 0.24.) Why
# half? A routed expert sees only a quarter of the tokens. But Adam divides a gradient by its own
# size, so both sides close the gap at about the same speed and meet halfway. Is that the reason?
# Then the optimizer decides. So try SGD with momentum, which divides by nothing, at equal rates.
# And with Adam, give the shared expert a quarter of the routed experts' learning rate, or four
# times as much:

# %% tags=["aside"]
for times, faster in (("1/4", 1 / 4), ("4", 4)):
    held[times] = [common_map_held(SharedExpertMoE, seed, faster=faster) for seed in range(2)]
    print(f"shared expert at {times} of their rate: they hold", end=" ")
    print(" and ".join(f"{part:.2f}" for part in held[times]), "of the common map")
assert min(held["1/4"]) > 0.85 and max(held["4"]) < 0.2

# %% slide_title="The split is free: the faster side takes most of it" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(11, 4.6))
for place, (times, name) in enumerate((("1/4", "routed experts: "), ("1", ""), ("4", ""))):
    routed = sum(held[times]) / len(held[times])
    ax.barh([-place] * 2, (routed, 1 - routed), 0.6, (0, routed), color=plotting.COLORS[:3:2])
    ax.text(routed / 2, -place, f"{name}{routed:.2f}", ha="center", va="center", c="white", size=20)
ax.text(1.01, 0, "shared expert", va="center", color=plotting.COLORS[2], fontsize=20)
ax.set(yticks=(0, -1, -2), yticklabels=("× 1/4", "× 1", "× 4"), ylabel="shared expert's rate")
ax.set(xlabel="share of the common map")
plotting.save(
    fig,
    "06_split",
    "Three bars, each the common map. With the shared expert at a quarter of the routed experts' "
    "rate, they hold more than nine tenths, at equal rates half, and at four times a tenth.",
)

# %% tags=["guard"]
sgd = [common_map_held(SharedExpertMoE, s, steps=300, rate=0.05, sgd=True) for s in range(2)]
print("by SGD with momentum at equal rates they hold", " and ".join(f"{part:.2f}" for part in sgd))
assert 0.25 < min(sgd) < max(sgd) < 0.45

# %% [markdown]
# The layers fit equally well each time, and they hold nine tenths or one tenth. With SGD, whose
# steps are smaller for an expert that sees fewer tokens, they hold about a third. **The split is a
# free direction of the loss, and the optimizer chooses it.** A shared expert makes room for common
# knowledge; it doesn't make anyone put it there.

# %% [markdown] slide_title="The common part can go beside, inside or before the experts"
# ## 4 · Three ways to share
#
# In OTCE a *domain* is a field of knowledge, and *cross domain* means roughly what the fields have
# in common (in the later papers, the shared layer itself). Where would you put the common part?
#
# Here are three answers, with the shared parts in green:


# %% slide_title="The shared part stands beside, inside or before the experts" tags=["figure"]
plotting.show_drawing(
    "06_sharing",
    "Three layers with four experts, two of which are used by each token. Isolation: a shared "
    "layer beside the experts gets every token, and its output is added. Cohesive: one matrix V "
    "runs through all four experts. Expansive: every token goes through a shared layer first. Each "
    "expert reads its result z through a gate, and x chooses the experts.",
)

# %% [markdown]
# OTCE cites DeepSeekMoE for isolation (§2) and adds the other two (eqs. 18 and 19).

# %% [markdown] slide_title="What is shared: an output, V, or the input" slide_figure="06_sharing"
# Each $\mathrm{FFN}$ is a DGLU, and expert $i$ owns the matrices with an index $i$:
#
# | | expert $i$ computes | shared |
# |---|---|---|
# | isolation | $\mathrm{FFN}_i(x)$ | $\mathrm{FFN}^{\mathrm s}(x)$, added |
# | cohesive | $(\mathrm{SiLU}(xW_i) \circ \tanh(xV))\,W_{2,i}$ | $V$ |
# | expansive | $\mathrm{FFN}_i(z \circ \sigma(z\,W_{3,i}))$ | $z = \mathrm{FFN}^{\mathrm s}(x)$ |
#
# In the expansive form the router sees $x$, and $W_{3,i}$ selects what an expert takes from $z$.
# The sigmoid is our addition. In OTCE's eq. 19c it's missing, and
# $(-z) \circ (-z\,W_{3,i}) = z \circ z\,W_{3,i}$, so the experts can't tell $z$ from $-z$.

# %% tags=["guard"]
_ = torch.manual_seed(1)
x = random(2, 5, 6, seed=0)
kinds = SharedExpertMoE, CohesiveMoE, ExpansiveMoE
beside, cohesive, expansive = (kind(6, 10, n_experts=4, k=2) for kind in kinds)


def mixed(layer, expert):
    """The experts of a layer, written out and weighted by their gates."""
    gates = all_gates(layer, x)
    return sum(gates[..., i, None] * expert(i, one) for i, one in enumerate(layer.experts))


with torch.no_grad():
    check("isolation", beside(x), beside.shared(x) + dense(beside, x))
    _ = must_differ("isolation without the shared expert", dense(beside, x), beside(x))
    V = cohesive.experts[0].V.weight.T
    y = mixed(cohesive, lambda i, one: one.W_2(F.silu(one.W(x)) * torch.tanh(x @ V)))
    check("cohesive", cohesive(x), y)
    own = random(4, 6, 10, seed=25)
    y = mixed(cohesive, lambda i, one: one.W_2(F.silu(one.W(x)) * torch.tanh(x @ own[i])))
    _ = must_differ("cohesive with a V for each expert", y, cohesive(x))
    z = expansive.shared(x)
    y = mixed(expansive, lambda i, one: one(z * expansive.gates[i](z).sigmoid()))
    check("expansive", expansive(x), y)
    _ = must_differ("expansive without its gates", mixed(expansive, lambda i, one: one(z)), y)
z, W_3 = random(500, 6, seed=23), random(6, 6, seed=24)
check("as printed: even", (-z) * ((-z) @ W_3), z * (z @ W_3))
opened, opposite = z * torch.sigmoid(z @ W_3), -z * torch.sigmoid(-z @ W_3)
check("with a sigmoid: the odd part is z/2", (opened - opposite) / 2, z / 2)

# %% [markdown] slide_title="A score is the sum of two half scores" slide_figure="06_search:0"
# ## 5 · A million experts: the router is the problem
#
# Let's make the experts smaller and more numerous, down to one neuron each. An expert then computes
# very little, but the router is a $d \times e$ matrix. With $h$ *heads* (routers side by side that
# each choose $k$ experts), we need $h$ such matrices.
#
# **Product keys** (Lample et al., 2019) make a million keys, for $e = r^2$ experts, out of two
# thousand. Cut a token's query of width $2m$ into halves $q_1$, $q_2$. Each head keeps two lists of
# $r$ keys of width $m$, $\kappa_{1,i}$ and $\kappa_{2,j}$. Expert $(i, j)$, number $i\,r + j$, has
# the key $(\kappa_{1,i}, \kappa_{2,j})$. So its score is the *sum* of two half scores:
#
# $$\text{score}_{ij} = q_1 \cdot \kappa_{1,i} + q_2 \cdot \kappa_{2,j} = a_i + a'_j. \tag{6.4}$$
#
# Now $2r$ inner products determine all $r^2$ scores. Let's count, with the map to the queries:

# %% tags=["setup"]
d, h, m = 256, 4, 128
print(f"multiplications per token, d = {d}, h = {h}, m = {m}:")
print("  experts   matrix router   queries + product keys")
for r in (16, 64, 256, 1024):
    matrix = h * d * r * r
    queries, keys = h * d * 2 * m, h * 2 * r * m
    print(f"{r * r:9,}   {matrix:13,}", end="   ")
    print(f"{queries:7,} + {keys:9,} = {queries + keys:9,}")

# %% slide_title="Two thousand keys score a million experts" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(11.5, 4.8))
experts = [r * r for r in (16, 64, 256, 1024)]
ax.plot(experts, [h * d * e for e in experts], "o-", color=plotting.COLORS[1])
ax.plot(experts, [queries + h * 2 * m * math.sqrt(e) for e in experts], "o-")
ax.text(2**15, 8e7, "a matrix", ha="right", color=plotting.COLORS[1], fontsize=19)
ax.text(2**13, 9e5, "queries and product keys", color=plotting.COLORS[0], fontsize=19)
ax.set(xscale="log", yscale="log", xlabel="experts", ylabel="multiplications per token")
plotting.save(
    fig,
    "06_router",
    "Multiplications per token of two routers against the number of experts, both logarithmic. The "
    "matrix rises from a quarter of a million to a billion. Product keys stay between a quarter of "
    "a million and 1.3 million.",
)

# %% [markdown]
# For a million experts, that's 1.3 million multiplications instead of a billion. The price: all
# experts of a row share a half score, and rise and fall together.

# %% [markdown] slide_title="The k best sums come from the k best of each half"
# ## 6 · The theorem
#
# **For $k \le r$, the $k$ largest sums can all be made from the $k$ largest $a_i$ and the $k$
# largest $a'_j$.** *Proof.* Look at one column of the grid of sums: $a'_j$ is the same in all of
# it. If $a_i$ isn't among the $k$ largest, each of those $k$ gives a sum in this column that is at
# least $a_i + a'_j$. So you can drop $(i, j)$. For a row, the argument is the same.
#
# So $k^2$ candidates are enough. Can we do better?
#
# Sort both lists in descending order; now $i$ and $j$ are ranks, from 0. Then $(i + 1)(j + 1)$ sums
# are at least as large as the sum at ranks $i$ and $j$ (it counts itself). If that's more than
# $k$, at least $k$ others are as good: drop the pair. What's left is the staircase of the opening
# drawing, the pairs with $(i + 1)(j + 1) \le k$. Row $i$ has $\lfloor k/(i+1) \rfloor$ of them, and
# $1 + \tfrac12 + \dots + \tfrac1k$ is about $\ln k$. So there are about $k \ln k$ in all:

# %% slide_title="The best sums lie in a staircase of about k ln k" slide_figure="06_search:1"
for k in (4, 16, 64, 256):
    pairs = sum(k // (i + 1) for i in range(k))
    print(f"k = {k:3}: k² = {k * k:6,} candidates, of which", end=" ")
    print(f"{pairs:5,} will do  (k ln k = {k * math.log(k):.0f})")
    assert k * math.log(k) <= pairs < 1.5 * k * math.log(k)

# %% [markdown]
# ### The search in six lines
#
# Take the $k \le r$ best of each half, form all $k^2$ sums, keep the $k$ best, and look up their
# experts:


# %% slide_title="The exact search takes six lines"
def search(first, second, k):
    """The k best sums of half scores (..., r), and their experts."""
    (best_1, i), (best_2, j) = first.topk(k), second.topk(k)
    sums = (best_1[..., :, None] + best_2[..., None, :]).flatten(-2)
    scores, place = sums.topk(k)  # of k² sums
    r = first.shape[-1]
    numbers = (i[..., :, None] * r + j[..., None, :]).flatten(-2)
    return scores, numbers.gather(-1, place)


# %% [markdown]
# Let $a = (0.1, 0.9, -0.5, 0.4)$ and $a' = (0.3, -0.2, 0.6, 0.0)$. Which three of the sixteen sums
# should win?

# %% tags=["aside"]
first, second = torch.tensor([0.1, 0.9, -0.5, 0.4]), torch.tensor([0.3, -0.2, 0.6, 0.0])
scores, numbers = search(first, second, 3)
for score, number in zip(scores.tolist(), numbers.tolist(), strict=True):
    i, j = divmod(number, 4)
    print(f"expert {number:2} = {i} · 4 + {j}", end=": ")
    print(f"score {score:.1f} = {first[i]:.1f} + {second[j]:.1f}")
    assert abs(score - (first[i] + second[j]).item()) < 1e-12
check("3 best of all 16 sums", (first[:, None] + second).flatten().topk(3).values, scores)
assert numbers.tolist() == [6, 4, 14]
best = torch.zeros(16).scatter(0, numbers, 0.5).view(4, 4)
down, across = first.argsort(descending=True), second.argsort(descending=True)
best, first, second = best[down][:, across].tolist(), first[down], second[across]

# %% slide_title="Three best of sixteen sums, made from two of each half" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(9, 5.2))
plotting.state_grid(ax, 0, 0, best, cell=1, color=plotting.COLORS[0], largest=1.0)
for i, j in product(range(4), range(4)):
    ax.text(j + 0.5, 3.5 - i, f"{first[i] + second[j]:.1f}", ha="center", va="center", fontsize=20)
ax.set_xticks([j + 0.5 for j in range(4)], [f"{score:.1f}" for score in second], fontsize=20)
ax.set_yticks([3.5 - i for i in range(4)], [f"{score:.1f}" for score in first], fontsize=20)
ax.set(xlim=(0, 4), ylim=(0, 4), xlabel="second half scores", ylabel="first half scores")
plotting.save(
    fig,
    "06_sums",
    "The sixteen sums of four half scores in rows and four in columns, both from the largest down. "
    "The three largest are blue, a staircase in the corner: 1.5 and 1.2 in the row of 0.9, 1.0 in "
    "the row of 0.4.",
)

# %% [markdown]
# All three combine one of the two best $a_i$ with one of the two best $a'_j$. The package's
# `product_key_topk` uses the staircase and finds the same (folded cell).

# %% tags=["guard"]
queries, keys = random(2, 50, 3, 2, 4, seed=6), random(3, 2, 12, 4, seed=7)  # e = 12² = 144
first, second = torch.einsum("blhzm,hzrm->blhzr", queries, keys).unbind(-2)  # (b, l, h, r) each
everything = (first[..., :, None] + second[..., None, :]).flatten(-2)  # (b, l, h, e)
for k in (1, 12, 4):
    scores, indices = product_key_topk(queries, keys, k)
    six_lines, numbers = search(first, second, k)
    check(f"k = {k}: scores of six lines = product_key_topk", six_lines, scores)
    check(f"k = {k}: scores of brute force = product_key_topk", everything.topk(k).values, scores)
    assert torch.equal(indices, numbers) and torch.equal(indices, everything.topk(k).indices)
too_few = (first.topk(2).values[..., None] + second.topk(2).values[..., None, :]).flatten(-2)
_ = must_differ("2 of each half for k = 4", too_few.sort(descending=True).values, scores)
exchanged = indices % 12 * 12 + indices // 12
_ = must_differ("j·r + i for i·r + j", exchanged, indices)

# %% [markdown] slide_title="An expert of one neuron reads one row and writes another"
# ## 7 · Experts of one neuron
#
# An expert with one neuron reads along one direction, row $i$ of a table `down`, and writes along
# another, row $i$ of a table `up`. Both tables have shape $(e, d)$. With $h$ heads that retrieve
# $k$ neurons each, a token uses up to $h \cdot k$ different ones.
#
# This layer is called PEER, *parameter efficient expert retrieval* (He, 2024):
#
# $$y = \sum_{\text{heads}} \; \sum_{i \,\in\, \text{top-}k} g_i\;
#   \mathrm{SiLU}(x \cdot \mathrm{down}_i)\; \mathrm{up}_i, \qquad
#   g = \mathrm{softmax}(\text{the head's } k \text{ scores}). \tag{6.5}$$

# %% slide_title="PEER adds up the neurons that its heads retrieve"
_ = torch.manual_seed(4)
peer = PEER(6, n_experts=64, n_heads=2, k=3, d_query=8)  # d_query = 2m
x, y = random(1, 1, 6, seed=0), torch.zeros(6)  # one token
gates, indices = peer.route(x)  # (1, 1, h, k)
for g, i in zip(gates.flatten(), indices.flatten(), strict=True):
    y = y + g * silu(x[0, 0] @ peer.down[i]) * peer.up[i]
check("equation 6.5, neuron by neuron = PEER", y, peer(x)[0, 0])

# %% [markdown]
# ### Without gathering
#
# The obvious code gathers rows: `down[indices]` is a copy of shape (b, l, h, k, d). Torch's
# *embedding bag* needs no copy, but it sums rows, as (6.5) does with `up`. For `down` we need inner
# products $x \cdot \mathrm{row}_{i_j}$. Can a sum give these?
#
# **A bag turns weights into a vector. Run it backwards, and it turns a vector into one number per
# row: their inner products.**

# %% slide_title="A bag run backwards gives inner products" tags=["figure"]
plotting.show_drawing(
    "06_bag",
    "The same three rows of a table twice. Forward: three weights, each with an arrow to its row, "
    "and an arrow from the rows to a vector, their weighted sum. Backward: all arrows are turned "
    "around, and lead from a vector x to the rows and from each row to its inner product with x.",
)

# %% [markdown] slide_title="Inner products are the gradient of a weighted sum"
# Why? A bag's inner product with a vector $x$ is a sum of weights, each times
# $\langle x, \mathrm{row} \rangle$. The derivative with respect to one weight leaves just that:
#
# $$\frac{\partial}{\partial w_j}\,\Bigl\langle x, \sum_{j'} w_{j'}\,\mathrm{row}_{i_{j'}}
#   \Bigr\rangle = \langle x, \mathrm{row}_{i_j} \rangle. \tag{6.6}$$
#
# There is no $w$ on the right, so any weights will do. `autograd.grad(bag, w, x)` differentiates
# $\langle x, \mathrm{bag} \rangle$ with respect to `w`. In the code, `n` counts tokens, and `j` the
# neurons of a token.

# %% slide_title="A backward pass gives inner products without a copy" slide_figure="06_bag"
table, x = random(64, 6, seed=8), random(5, 6, seed=10)  # five tokens
rows = torch.arange(30).view(5, 6) * 7 % 64
w = random(5, 6, seed=14).requires_grad_()
bag = F.embedding_bag(rows, table, per_sample_weights=w, mode="sum")
by_hand = sum(w[0, j] * table[rows[0, j]] for j in range(6))
check("a weighted bag", bag[0], by_hand)
(products,) = torch.autograd.grad(bag, w, x)
gathered = torch.einsum("nd,njd->nj", x, table[rows])
check("gradient with respect to the weights = inner products", products, gathered)

# %% [markdown]
# The package's `neurons` does this, unless there's only one token: then it gathers. For 64 tokens,
# 4 heads, $k = 16$ and $d = 256$, gathering makes a tensor of a million entries. With bags, the
# largest has 16,384 (folded cell).

# %% tags=["guard"]
x.requires_grad_()
(mixed,) = torch.autograd.grad(torch.einsum("nd,njd->nj", x, table[rows]), x, w)
check("gradient of inner products by x = the bag", mixed, bag)
check("retrieval.neurons = gathered", retrieval.neurons(x, table, rows), gathered)
other_rows = retrieval.neurons(x, table, rows.flip(0))
_ = must_differ("the rows of other tokens", other_rows, gathered)

# %% tags=["guard"]
x, down, up = random(2, 5, 6, seed=11), random(64, 6, seed=12), random(64, 6, seed=13)
gates, indices = (chosen.detach() for chosen in peer.route(x))
check("the gates of a head sum to 1", gates.sum(-1), torch.ones(2, 5, 2))
bags = retrieval.retrieved_experts(x, down, up, gates, indices)
written_out = retrieval.naive_retrieved_experts(x, down, up, gates, indices)
check("bags = rows gathered", bags, written_out)
check_gradients(
    "bags = rows gathered",
    lambda *tensors: retrieval.retrieved_experts(*tensors, indices),
    lambda *tensors: retrieval.naive_retrieved_experts(*tensors, indices),
    [x, down, up, gates],
)

# %% tags=["guard"]
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

# %% [markdown] slide_title="A shared layer stands beside the neurons or before them"
# ## 8 · Cross domain: a shared layer and retrieved neurons
#
# No retrieved neuron sees every token, so section 3's common map has no home. WM and Cheems bring
# back a shared layer $\mathrm{FFN}^{\mathrm s}$: an MLP in WM, a gated one in Cheems. Where should
# its output $z = \mathrm{FFN}^{\mathrm s}(x)$ go?
#
# WM's eq. 5 has two answers, WM's Listing 8 a third, and the package's `CDMoE` the last. Three
# questions tell them apart: do the neurons read $x$ or $z$, is $z$ added, and is the score inside
# act, the neurons' activation?
#
# $$\begin{aligned}
#   \text{beside: } & \textstyle z + \sum_i
#     \mathrm{softmax}(s)_i\;\mathrm{act}(x \cdot \mathrm{down}_i)\;\mathrm{up}_i \\
#   \text{before: } & \textstyle \phantom{z + {}} \sum_i
#     \mathrm{softmax}(s)_i\;\mathrm{act}(z \cdot \mathrm{down}_i)\;\mathrm{up}_i \\
#   \text{Listing 8: } & \textstyle z + \sum_i
#     \mathrm{act}(s_i\; z \cdot \mathrm{down}_i)\;\mathrm{up}_i \\
#   \textbf{CDMoE: } & \textstyle \boldsymbol{z + \sum_i
#     \mathrm{softmax}(s)_i\;\mathrm{act}(z \cdot \mathrm{down}_i)\;\mathrm{up}_i}
#   \end{aligned} \tag{6.7}$$
#
# The sums run over the retrieved neurons. Their scores $s_i$ come from the vector that the neurons
# read. Here is the wiring of the three with a softmax:

# %% slide_title="Do the neurons read x or z, and is z added?" tags=["figure", "slide"]
plotting.show_drawing(
    "06_wires",
    "Three ways from a token x to an output. Beside: x goes to the shared layer and the neurons, "
    "and both are added. Before: x goes to the shared layer, and its output z to the neurons. "
    "CDMoE: the same, and z is added to what the neurons write.",
)

# %% [markdown]
# `CDMoE` is the layer of the opening drawing. Don't confuse it with `CDMMoE`, one letter longer.
# That one follows Ch Listing 4: it adds nothing, and its neurons read $zW$, a vector of another
# width, and are gated as in (6.1).


# %% tags=["guard"]
def retrieved(peer, z):
    """The neurons that a PEER retrieves for z, written out."""
    return retrieval.naive_retrieved_experts(z, peer.down, peer.up, *peer.route(z))


_ = torch.manual_seed(5)
x = random(2, 5, 6, seed=0)
sizes = dict(d_ff=12, n_experts=64, n_heads=2, k=3, d_query=8)
serial, bare = CDMoE(6, **sizes), CDMoE(6, **sizes, residual=False)
parallel = CDMoE(6, **sizes, form="parallel")
with torch.no_grad():
    check("before: PEER(FFNˢ(x))", bare(x), retrieved(bare.experts, bare.shared(x)))
    z = serial.shared(x)
    check("before, and added: PEER(FFNˢ(x)) + FFNˢ(x)", serial(x), retrieved(serial.experts, z) + z)
    _ = must_differ("before, φ(x) = FFNˢ(x) not added", retrieved(serial.experts, z), serial(x))
    z = parallel.shared(x)
    check("beside: PEER(x) + FFNˢ(x)", parallel(x), retrieved(parallel.experts, x) + z)
    _ = must_differ("before for beside", retrieved(parallel.experts, z) + z, parallel(x))

# %% tags=["guard"]
cdmmoe = CDMMoE(6, **sizes, d_private=4)
with torch.no_grad():
    up, opens = cdmmoe.shared.in_proj(x), silu(cdmmoe.shared.gate_proj(x))
    shared = cdmmoe.shared.out_proj(up * opens)
    check("Listing 4's shared part = FFNˢ, gated", shared, cdmmoe.shared(x))
    z = cdmmoe.private_proj(shared)  # (b, l, p), with p for the private width
    gates, indices = cdmmoe.retrieval.route(z)  # (b, l, h, k)
    reads = torch.einsum("blp,blhkp->blhk", z, cdmmoe.down[indices])
    opens = silu(torch.einsum("blp,blhkp->blhk", z, cdmmoe.gate[indices]))
    y = torch.einsum("blhk,blhkd->bld", gates * reads * opens, cdmmoe.up[indices])
    check("Listing 4 written out = CDMMoE", y, cdmmoe(x))
    ungated = torch.einsum("blhk,blhkd->bld", gates * silu(reads), cdmmoe.up[indices])
    _ = must_differ("plain neurons for gated ones", ungated, y)

# %% [markdown] slide_title="Keys at zero stay dead with ReLU and wake with SiLU"
# ### Keys that start at zero (WM Listing 8, Ch Listing 4)
#
# Both listings start the keys at zero, so at first all scores $s_i$ are 0, and all tokens use the
# same $k$ experts. Does training get out of that? Ask, "what gradient does a chosen key get?" Here
# is one seed, with 64 tokens:
#
# | keys at zero | experts used after 25 updates |
# |---|---|
# | score inside (WM), a ReLU | 4 of 256 |
# | score inside (WM), a SiLU | more than 20 |
# | softmax outside (Ch) | more than 20 |
#
# WM Listing 8 (repaired: as printed it raises an error) leaves $\mathrm{act}$ open. If it's ReLU,
# only $\mathrm{FFN}^{\mathrm s}$ gets a gradient. A score of 0 makes its argument 0, and there both
# $\mathrm{act}$ and, in torch, $\mathrm{act}'$ are 0. SiLU has $\mathrm{act}'(0) = \frac12$, and a
# softmax also has a gradient. So the chosen keys move. Where a chosen key scores below 0, an unused
# key at 0 takes its place.
#
# The package draws normal keys and keeps the softmax outside: inside SiLU, a higher score needn't
# make a neuron louder. Take an inner product of −1. A score of 1 gives SiLU(−1) = −0.27, and a
# score of 5 gives SiLU(−5) = −0.03, which is *quieter*.


# %% tags=["setup"]
class CDMoEAsPrinted(torch.nn.Module):
    """WM Listing 8 with 256 experts: keys at zero, the raw score inside the activation."""

    def __init__(self, activation):
        super().__init__()
        self.activation, self.shared = activation, MLP(8, 16)
        self.queries = torch.nn.Linear(8, 2 * 2 * 4, bias=False)
        self.keys = torch.nn.Parameter(torch.zeros(2, 2, 16, 4))  # (h, 2, r, m)
        self.down, self.up = (torch.nn.Parameter(torch.randn(256, 8) / 3) for _ in range(2))

    def route(self, x):
        return product_key_topk(self.queries(self.shared(x)).unflatten(-1, (2, 2, 4)), self.keys, 4)

    def forward(self, x):
        z, (scores, indices) = self.shared(x), self.route(x)  # (b, l, h, k)
        inside = torch.einsum("bld,blhkd->blhk", z, self.down[indices]) * scores
        return torch.einsum("blhk,blhkd->bld", self.activation(inside), self.up[indices]) + z


# %% tags=["setup"]
@torch.no_grad()
def used(layer, x):
    """How many different experts the tokens use."""
    return layer.route(x)[1].unique().numel()


def train_a_little(layer, steps=25):
    """Fit y = tanh(x W) by Adam."""
    W = random(8, 8, seed=19)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for step in range(steps):
        batch = random(4, 16, 8, seed=100 + step)
        optimizer.zero_grad()
        F.mse_loss(layer(batch), torch.tanh(batch @ W)).backward()
        optimizer.step()


# %% tags=["guard"]
_ = torch.manual_seed(6)
x, sizes = random(4, 16, 8, seed=20), dict(d_ff=16, n_experts=256, n_heads=2, k=4, d_query=8)
zero, drawn = CDMMoE(8, **sizes), CDMMoE(8, **sizes)
zero.retrieval.keys.data.zero_()
layers = {
    "ReLU inside, zero keys": CDMoEAsPrinted(F.relu),
    "SiLU inside, zero keys": CDMoEAsPrinted(F.silu),
    "softmax outside, zero keys": zero,
    "softmax outside, random keys": drawn,
}
for name, layer in layers.items():
    if "inside" in name:
        check(f"{name}: the output is FFNˢ(x) alone", layer(x), layer.shared(x))
    layer(x).square().sum().backward()
    learn = [n for n, p in layer.named_parameters() if "shared" not in n and p.grad.any()]
    print(f"{name}: {used(layer, x)} of 256 experts used,", end=" ")
    print("gradient in:", ", ".join(learn) or "none")

# %% tags=["guard"]
for name, layer in layers.items():
    train_a_little(layer)
    dead = used(layer, x) == 4
    print(f"{name}, after 25 updates: {'4' if dead else 'more than 20'}")
    assert dead == ("ReLU" in name) and (dead or used(layer, x) > 20)
assert x.shape[:2].numel() == 64 and len(layers) == 4

# %% tags=["guard"]
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

# %% [markdown] slide_title="What does using a few of 1,024 neurons save?"
# ## 9 · Counted and measured
#
# How much does a layer save by using a few of its 1,024 neurons? Compare it with a dense MLP that
# uses them all. (We leave out the shared MLP, which runs either way.)

# %% [markdown] slide_title="Retrieval saves a factor of 8, or of 1.6"
# A matrix product costs two FLOPs per weight. With $h = 4$ heads, retrieval saves a factor of 8 in
# a small layer, but only 1.6 in the second, which we'll time, mostly because its half queries are
# wide:
#
# | FLOPs per token | $d = 64$, $k = 8$, $m = 16$ | $d = 256$, $k = 16$, $m = 128$ |
# |---|---|---|
# | the search, $2(2dhm + 2hrm)$ with $r = 32$ | 24,576 | 589,824 |
# | the retrieved neurons | 8,192 | 65,536 |
# | the dense MLP of 1,024 neurons | 262,144 | 1,048,576 |


# %% tags=["setup"]
def flops(d, k, m, h=4, r=32):
    """Per token: the search, the retrieved neurons, a dense MLP of r² neurons."""
    return 2 * (2 * d * h * m + 2 * h * r * m), 2 * 2 * h * k * d, 2 * 2 * d * r * r


# %% tags=["guard"]
d, f, r, h, k, m = 64, 256, 32, 4, 8, 16
layer = CDMoE(d, d_ff=f, n_experts=r * r, n_heads=h, k=k, d_query=2 * m)
with FlopCounterMode(display=False) as counter, torch.no_grad():
    layer(random(1, 128, d, seed=18))
shared, search_only = 2 * 2 * d * f, 2 * (d * h * 2 * m + h * 2 * r * m)
bags, dense_mlp = 2 * 2 * h * k * d, 2 * 2 * d * r * r
assert counter.get_total_flops() == 128 * (shared + search_only)
print(f"shared MLP, {f} neurons:     {shared:7,} FLOPs per token")
print(f"retrieved, {r * r:,} neurons:    {search_only + bags:7,}", end="")
print(f" = search {search_only:,} + bags {bags:,}")
print(f"dense MLP, {r * r:,} neurons:    {dense_mlp:7,}")
assert dense_mlp == 8 * (search_only + bags)
assert flops(64, 8, 16) == (search_only, bags, dense_mlp) == (24576, 8192, 262144)
assert flops(256, 16, 128) == (589824, 65536, 1048576)  # of the layer that we time
assert 1048576 == 1.6 * (589824 + 65536)
narrow = 2 * (256 * 4 * 2 * 16 + 4 * 2 * r * 16)  # with half queries of width 16
assert 7 * (narrow + 65536) < 1048576

# %% slide_title="The search is most of what retrieval costs" tags=["figure", "slide"]
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
for ax, (d, k, m) in zip(axes, ((64, 8, 16), (256, 16, 128)), strict=True):
    searched, found, dense_mlp = (count / 1000 for count in flops(d, k, m))
    ax.barh((0, 1), (dense_mlp, searched), 0.6, color=(plotting.QUIET, plotting.COLORS[1]))
    ax.barh(1, found, 0.6, searched, color=plotting.COLORS[0])
    ax.text(1.03 * (searched + found), 1, "orange: search\nblue: neurons", fontsize=15, va="center")
    ax.set(title=f"d = {d}, k = {k}, m = {m}", xlabel="thousand FLOPs per token")
    ax.set_yticks([1, 0], ["retrieved", "dense MLP"], fontsize=16)
plotting.save(
    fig,
    "06_flops",
    "Bars of the FLOPs per token of retrieval, most of them for the search, and of a dense MLP of "
    "1,024 neurons. In a small layer the MLP's bar is 8 times as long, in a wide one 1.6 times.",
)

# %% [markdown]
# ### Time
#
# FLOPs don't include choosing the $k$ largest or reading rows scattered across a table. So we timed
# the package's whole PEER layer, the wider of the two above, beside a dense MLP of as many neurons:
# forward, in float32, 512 tokens, two CPU cores. Before you look: at how many neurons does our
# layer overtake the MLP? (*PEER-pytorch* is a public implementation, here with the same weights.)

# %% tags=["setup"]
layers = read_record("06_growth")
NAMES = {"dense MLP of as many neurons": "dense MLP", "product keys, bags": "ours, 64 neurons used"}
NAMES["PEER-pytorch"] = "PEER-pytorch, 64 used"


# %% tags=["figure"]
def draw_layers(ax):
    """Milliseconds of three layers against their neurons, and two guides."""
    for name, i in zip(NAMES, (1, 0, 4), strict=True):
        ms, color = layers["milliseconds"][name], plotting.COLORS[i]
        e = layers["experts"][: len(ms)]
        ax.plot(e, ms, "o-", color=color)
        ax.text(e[-1] * 1.3, ms[-1], NAMES[name], color=color, va="center", fontsize=15)
    for power, words, e, start in (
        (1, "∝ neurons", [2**10, 2**14], 1.5),
        (0.5, "∝ √neurons", [2**14, 2**20], 3),
    ):
        guide = [start * (x / e[0]) ** power for x in e]
        ax.plot(e, guide, "--", color=plotting.QUIET, lw=1.5)
        ax.text(1.9 * e[0], start, words, va="center", fontsize=14)


# %% slide_title="Our layer overtakes the MLP at about 4,096 neurons" tags=["figure"]
fig, ax = plotting.figure(size=(8.5, 5.2))
draw_layers(ax)
ax.set(xscale="log", yscale="log", ylim=(1, 200), xlabel="neurons", ylabel="ms, forward")
ax.set_xticks([2**8, 2**12, 2**16, 2**20], ["256", "4,096", "65,536", "a million"])
ax.set_yticks([1, 10, 100], ["1", "10", "100"])
ax.minorticks_off()
plotting.save(
    fig,
    "06_growth",
    "Milliseconds of a forward pass against the number of neurons, 256 to a million, both "
    "logarithmic. The dense MLP's curve rises about as steeply as a guide that is proportional to "
    "the neurons, and crosses that of our layer at about 4,096. Ours rises more "
    "slowly than the square root of their number. PEER-pytorch's curve lies above ours throughout.",
)

# %% [markdown]
# At about 4,096 neurons. The dense MLP's time grows with their number, ours more slowly than with
# its square root: there are $2\sqrt e$ keys per head, and the map to the queries doesn't grow
# (`python tests/bench/bench_experts.py --json experiments/records/06_growth.json`). **At 1,024
# neurons, our layer has 1/1.6 of the FLOPs and takes three times as long**: 10.5 ms, where the
# MLP takes 3.5. At 16,384 the MLP takes 73 ms, PEER-pytorch 45 and ours 17.
#
# Where does our time go? On one core (the figure has two), the search of a million experts takes 41
# ms, the neurons with bags 15, and with gathered rows 58. Bags gain most where the tables are
# small: at 1,024 experts, 2.3 ms against 28.7 (`python -m experiments 06_rows`).
#
# With 16,384 neurons, our layer takes a quarter of the MLP's time, but it uses only 64 of them.
# Does that cost anything? At equal *parameters*, chapter 09 has small models with both: CDMoE is
# ahead of the MLP by 0.05 nats per byte, and behind a plain DGLU, which retrieves nothing, by 0.06
# (section 5 there: three seeds, 200 updates). So the search is exact and cheap. Whether you want
# what it finds is still open.

# %% tags=["guard"]
parts = read_record("06_rows")
search_ms, bags_ms, rows_ms = parts["milliseconds"].values()
growth = search_ms[-1] / search_ms[0], bags_ms[-1] / bags_ms[0]
print(f"from 256 to 2^20 experts: search {growth[0]:.1f} times as long, bags {growth[1]:.1f} times")
assert [round(ms[-1]) for ms in (search_ms, bags_ms, rows_ms)] == [41, 15, 58]
assert max(rows / bags for rows, bags in zip(rows_ms, bags_ms, strict=True)) == 28.7 / 2.33
runs = [run for run in read_record("09_shared")["runs"] if run["seed"] > 0]
nats = dict.fromkeys(("MLP", "DGLU", "CDMoE"), 0.0)
for run in runs:
    if run["row"] in nats:
        nats[run["row"]] += run["nats"][-1][1] / 3  # of three seeds
ahead, behind = nats["MLP"] - nats["CDMoE"], nats["CDMoE"] - nats["DGLU"]
assert (round(ahead, 2), round(behind, 2)) == (0.05, 0.06)
ours, theirs, dense_mlp = layers["milliseconds"].values()
assert layers["experts"][1::2][:2] == [1024, 16384] and layers["experts"][-1] == 2**20
table = [ours[1], theirs[1], dense_mlp[1], ours[3], theirs[3], dense_mlp[3]]
assert table == [10.5, 39.7, 3.46, 17.2, 45.3, 73.0]
assert all(b / a < 2 for a, b in pairwise(ours))  # √4 from one to the next
print(f"ours, from 2^12 to 2^20 experts: {ours[-1] / ours[2]:.1f} times as long")
for e, *times in zip(layers["experts"], ours, theirs, dense_mlp, strict=False):
    peer, dense = (t / times[0] for t in times[1:])
    print(f"{e:6,} neurons: PEER-pytorch {peer:.1f} times as long as ours, dense {dense:.1f}")
assert round(ours[1] / dense_mlp[1]) == 3 and abs(ours[2] / dense_mlp[2] - 1) < 0.15
assert round(dense_mlp[3] / ours[3]) == 4 and round(theirs[3] / dense_mlp[3], 1) == 0.6
assert ours[-1] < 4 * ours[2] and min(b / a for a, b in zip(ours, theirs, strict=True)) > 1.5

# %% [markdown] slide_title="What to remember of cross-domain experts"
# ## Summary
#
# - A router learns through the gates it keeps. With $k = 1$ and renormalized gates it can't learn.
#   With a capacity or expert choice, a token's output can depend on other texts; with expert
#   choice, even on later tokens.
# - A balancing loss over the kept gates can't undo a total collapse. One over the whole softmax
#   can, unless the head start is too large.
# - A shared part can sit beside the experts, inside them or before them. How much the routed
#   experts then hold of what is common is up to the optimizer: half,
#   nine tenths or one tenth.
# - $2r$ inner products give $r^2$ scores. That makes an exact search of a million experts cheap.
#   The $k$ best can be found in a staircase of about $k \ln k$ sums.
# - Taking inner products with rows is the backward pass of summing them, with respect to the
#   weights.
# - If the keys start at zero, every token uses the same experts *at first*. With the score inside
#   ReLU, it stays that way.

# %% [markdown]
# ## Exercises
#
# **1 · easy.** *What two routers cost.* How many parameters do a router matrix and product keys
# need? Use pencil and paper. There are $e = r^2$ experts, tokens have width $d$, and half queries
# have width $m$. How many parameters does a router matrix have? What about a product-key router
# with one head, counting its map to the queries?
#
# <details><summary>Hint</summary>
#
# A query has two halves. How many keys does each half have, and of which width?
#
# </details>


# %% tags=["exercise"]
def router_parameters(d, m, r):
    """(matrix, queries' map and product keys): two numbers of parameters."""
    ### BEGIN SOLUTION
    return d * r * r, d * 2 * m + 2 * r * m
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import check_numbers, forbidden

for d, m, r in ((64, 16, 16), (96, 8, 32), (10, 3, 5)):
    with forbidden(parameters):
        mine = router_parameters(d, m, r)
    matrix = parameters(lambda d=d, r=r: torch.nn.Linear(d, r * r, bias=False))
    sizes = dict(n_experts=r * r, n_heads=1, k=1, d_query=2 * m)
    keys = parameters(lambda d=d, sizes=sizes: ProductKeys(d, **sizes))
    case = f"for d = {d}, m = {m}, r = {r}"
    check_numbers(mine, {f"the matrix {case}": matrix, f"product keys {case}": keys})

# %% [markdown]
# **2 · easy.** *Experts without a token.* How many experts get no token, on average? A router with
# random scores and $k = 1$ sends $n$ tokens to $e$ experts.
#
# <details><summary>Hint</summary>
#
# What's the probability that all tokens miss one given expert?
#
# </details>


# %% tags=["exercise"]
def expected_unused(n, e):
    """The mean number of experts, of e, that n random choices leave out."""
    ### BEGIN SOLUTION
    return e * (1 - 1 / e) ** n
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import check_numbers

for n, e in ((1, 4), (3, 4), (6, 3)):  # all eⁿ ways in which n tokens can choose, one by one
    choices = torch.cartesian_prod(*[torch.arange(e)] * n).view(-1, n)
    unused = e - sum(row.unique().numel() for row in choices) / len(choices)
    check_numbers(expected_unused(n, e), {f"n = {n}, e = {e}, {len(choices)} cases": unused})
generator = torch.Generator().manual_seed(30)
drawn = torch.randint(256, (2000, 512), generator=generator)  # too many cases: a sample of them
unused = 256 - torch.zeros(2000, 256).scatter(1, drawn, 1.0).sum(1).mean().item()
mine = expected_unused(512, 256)
check_numbers(mine, {"n = 512, e = 256, up to chance": unused}, tol=0.02)
print(f"512 tokens, 256 experts: {float(mine):.1f} unused")

# %% [markdown]
# **3 · medium.** *No rows gathered.* Compute PEER's output without gathering rows of its tables.
# Write a function that does it, by equation 6.5 and for one head. Use `F.embedding_bag` and
# `torch.autograd.grad` (§7), but nothing from the package. Then measure your own machine: time your
# function against `table[rows]` with two `einsum`s, for 512 tokens with 16 neurons each, $d = 256$,
# and tables of 256 to 65,536 rows. Where is the ratio largest?
#
# <details><summary>Hint</summary>
#
# A bag with the weights $w$ returns $\sum_j w_j\, \mathrm{row}_j$. What is the gradient of its
# product with $x$ in $w_j$?
#
# </details>


# %% tags=["exercise"]
def without_gathering(x, down, up, gates, rows):
    """Equation 6.5 for x (n, d), tables (e, d), gates and rows (n, j): y (n, d)."""
    ### BEGIN SOLUTION
    w = torch.ones_like(gates, requires_grad=True)
    bag = F.embedding_bag(rows, down, per_sample_weights=w, mode="sum")
    (products,) = torch.autograd.grad(bag, w, x)
    return F.embedding_bag(rows, up, per_sample_weights=gates * silu(products), mode="sum")
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import forbidden, not_none


class RowsTaken(LargestTensor):
    """Count the numbers that are looked up in a table of rows, too."""

    taken = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        looks_up = str(func).split(".")[1] in ("index", "index_select", "embedding", "gather")
        self.taken += out.numel() if looks_up and args[0].shape == down.shape else 0
        return out


x, down, up = random(40, 24, seed=40), random(99, 24, seed=41), random(99, 24, seed=42)
rows = torch.randint(99, (40, 7), generator=torch.Generator().manual_seed(43))
gates = random(40, 7, seed=44).softmax(-1)
package = (retrieval.retrieved_experts, retrieval.naive_retrieved_experts, retrieval.neurons)
with forbidden(*package, PEER.forward, CDMoE.forward), RowsTaken() as made:
    y = not_none(without_gathering(x, down, up, gates, rows))
neurons = silu(torch.einsum("nd,njd->nj", x, down[rows]))
check("without gathering", y, torch.einsum("nj,njd->nd", gates * neurons, up[rows]))
assert made.taken < 40 * 7 * 24, "your answer gathers a row for each token and neuron"
assert made.entries <= 99 * 24, f"a tensor of {made.entries} entries; a table has {99 * 24}"

# %% [markdown]
# **4 · medium.** *The best of three lists.* Find the $k$ best sums of *three* sorted lists. Use
# ranks as in §6. Don't form any sum that the ranks rule out, and don't form all sums of two lists
# either.
#
# <details><summary>Hint</summary>
#
# How many sums are at least as large as the sum at ranks $i$, $j$ and $n$? A boolean mask with
# three axes picks out the ones you need.
#
# </details>


# %% tags=["exercise"]
def best_of_three(first, second, third, k):
    """The k largest sums of one entry of each list (r,), descending; so are the lists."""
    ### BEGIN SOLUTION
    up_to = torch.arange(len(first)) + 1  # entries up to each rank, ranks counted from 0
    possible = up_to[:, None, None] * up_to[:, None] * up_to <= k  # (r, r, r)
    i, j, n = possible.nonzero().unbind(1)
    return (first[i] + second[j] + third[n]).topk(k).values
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none

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
            best = not_none(best_of_three(*lists, k))
        same = best.shape == (k,) and torch.allclose(best, everything.topk(k).values)
        assert same, f"k = {k}: these aren't the {k} largest sums in descending order"
        ranks = range(1, 21)
        candidates = sum(i * j * n <= k for i in ranks for j in ranks for n in ranks)
        assert made.entries <= candidates, f"k = {k}: {made.entries} sums, needed {candidates}"
print(f"the {k} best of {everything.numel():,} sums: {candidates} candidates")

# %% [markdown]
# **5 · hard.** *An MLP becomes a PEER.* Turn a dense MLP into a `PEER` with the same output. The
# MLP is $\mathrm{SiLU}(xW)\,W_2$ with $r^2$ neurons, and the `PEER` has one head that uses *all* of
# them. What are the gates if all scores are equal, and how can `up` make up for that? Set `keys`,
# `down` and `up` of a `PEER`; the maps of `MLP` are `in_proj` and `out_proj`, with weights (f, d)
# and (d, f). (`PEER` also accepts $k > r$: it then keeps the min($k$, $r$) best of each half.)
#
# <details><summary>Hint</summary>
#
# Keys of zeros make all scores equal. A softmax over $r^2$ equal scores gives each expert the gate
# $1/r^2$.
#
# </details>


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
    assert isinstance(peer, PEER), f"a PEER is asked for, not a {type(peer).__name__}"
    assert peer.n_heads == 1, f"one head is asked for, not {peer.n_heads}"
    assert peer.k == r * r, f"{r * r} experts per token are asked for, not {peer.k}"
    with torch.no_grad():
        check(
            f"a dense MLP of {r * r} neurons as a PEER that uses all of them",
            PEER.forward(peer, x),
            mlp(x),
        )

# %% [markdown]
# ## Further reading
#
# - Lample et al. (2019): the search; He (2024): PEER.
# - Fedus, Zoph and Shazeer, *Switch Transformers* (2021): one expert, and balancing; Zhou et al.,
#   *Mixture-of-Experts with Expert Choice Routing* (2022).
# - Dai et al., *DeepSeekMoE* (2024): isolating shared experts.
# - `cheems_ref/experts.py` and `cheems_ref/retrieval.py`: the code. Lab 06a asks whether characters
#   of one kind find the same experts, and which experts are never used.
#
# **What came after.** *DeepSeek-V3* (2024) routes each token to 8 of 256 experts, beside one that
# is shared. *UltraMem* and *Memory Layers at Scale* (both 2024) go on from product keys, with rows
# to look up in place of neurons. UltraMem has up to 20 million rows.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
