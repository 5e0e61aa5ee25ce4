# %% [markdown]
# # 00 · Cheems in one sitting
#
# **How much attention does a model need, and for what? In this sitting you'll read a whole Cheems,
# 200 lines with its training loop, train a small one, and see what attention does.** You can then
#
# - name the three layers of a Cheems and say what each one is for;
# - say what a layer has to remember, and what that costs in a long text;
# - read the shapes, the ✓ and the ✗ in every chapter of this course.
#
# You need matrix products, a little PyTorch, and a rough idea of a transformer. Each section ends
# with the chapter that proves what we only show here.
#
# Sources: Jingze Shi and co-authors, *Wonderful Matrices* (WM), *Cheems* (Ch) and *OTCE*; Dao and
# Gu, *Transformers are SSMs* (2024); lecture 22 of CMU's *Generative AI* (L22). The cells that you
# write are the file `cheems_ref/minimal.py`.

# %% tags=["setup", "experiment"]
import json
import math
import textwrap
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import einsum, nn

from cheems_ref import minimal, plotting
from cheems_ref.budget import cache_bytes
from cheems_ref.config import ModelConfig, preset
from cheems_ref.model import CausalLM
from cheems_ref.verify import TOLERANCE, check, must_differ

torch.set_default_dtype(torch.float64)  # equations in float64; training is in float32
torch.set_num_threads(1)  # tensors as small as these gain little from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


D_MODEL, N_HEADS, D_HEAD, D_STATE, D_FF, CHUNK = 128, 4, 32, 32, 256, 64
N_VALUES, K_VALUES, N_EXPERTS, K_EXPERTS, EXPERT_HEADS, D_QUERY = 16, 2, 256, 4, 2, 32
LENGTH, BATCH = 256, 8  # bytes in a window, windows in a step
Linear, Norm = partial(nn.Linear, bias=False), partial(nn.RMSNorm, D_MODEL, eps=1e-6)


# %% tags=["figure"]
def draw_model(ax):
    """A Cheems from bytes to logits, and the sections that build its parts."""
    blue, red, green = plotting.COLORS[:3]
    places = {"bytes": (0.5, plotting.QUIET, "1"), "S\na state": (2.6, blue, "3 4 5")}
    places |= {"E\nexperts": (4.9, green, "7"), "I\nattention": (7.6, red, "2 5 6")}
    places |= {"E\nexperts ": (9.9, green, "7"), "logits": (12, plotting.QUIET, "")}
    for words, (x, color, sections) in places.items():
        plotting.box(ax, x, 2, words, color=color)
        ax.text(x, 1.1, sections, ha="center", fontsize=16, color=plotting.INK)
    for start, end in ((1.05, 1.6), (3.6, 4.05), (5.75, 6.7), (8.5, 9.05), (10.75, 11.4)):
        plotting.arrow(ax, (start, 2), (end, 2))
    ax.text(3.75, 2.95, "7 times", ha="center", fontsize=15)
    ax.plot([1.65, 1.65, 5.7, 5.7], [2.6, 2.8, 2.8, 2.6], color=plotting.QUIET)
    ax.plot([0.1, 0.1, 12.4, 12.4], [0.75, 0.6, 0.6, 0.75], color=plotting.QUIET)
    ax.text(6.2, 0.1, "8 the whole model, 9 trained, 10 writing", ha="center", fontsize=16)


# %% [markdown]
# Here is the model, from the bytes it reads to its guess for the next one. Seven of every eight
# blocks have a state that fades, `S`, and one has attention, `I`. Every block ends with a crowd of
# tiny experts, `E`. The numbers are the sections of this chapter.

# %% tags=["figure"]
fig, ax = plotting.canvas(12.7, 3.2)
draw_model(ax)
plotting.save(
    fig,
    "00_map",
    "A model from bytes to logits: seven times a state layer S and experts E, then attention I and "
    "experts E. Sections 3 to 5 belong to S, 2, 5 and 6 to I, 7 to E, and 8 to 10 to the whole.",
)

# %% [markdown]
# ## 1 · A text, and a number to beat
#
# What does a language model do? It reads a text and says, at every place, how likely each next
# symbol is. Our symbols are bytes, so there are 256 of them and we need no tokenizer. Our text is
# the reference manual that ships with Python: `The` is 84, 104, 101. The last tenth is *held out*:
# no model trains on it.

# %% tags=["setup"]
manual = "\n\n".join(topics[name] for name in sorted(topics))
text, held_out = torch.tensor(list(manual.encode())).tensor_split([len(manual.encode()) * 9 // 10])
record = json.loads(Path("../experiments/records/00_sitting.json").read_text())
runs = {run["pattern"]: run for run in record["runs"]}
repeat_record = json.loads(Path("../experiments/records/00_repeat.json").read_text())


def printable(words):
    """One line, with a dot for what isn't printable ASCII."""
    return "".join(c if c.isascii() and c.isprintable() else "·" for c in " ".join(words.split()))


# %% [markdown]
# A guess is scored by $-\log p$, where $p$ is the probability it gave to the byte that came. The
# mean over a text is its *loss*, in *nats per byte*. A model that finds all 256 bytes equally
# likely scores $\log 256 = 5.55$.
#
# How far do you get by counting? The *bigram* model looks at one byte and knows how often each
# other byte followed it. Predict its loss before you run the cell:


# %%
def bigram_loss(seen, unseen):
    """Count which byte follows which in one text; the loss of these shares on another."""
    counts = torch.full((256, 256), 0.1)  # nothing is impossible
    one = torch.ones(len(seen) - 1)
    counts.index_put_((seen[:-1], seen[1:]), one, accumulate=True)
    shares = counts / counts.sum(1, keepdim=True)
    return -shares[unseen[:-1], unseen[1:]].log().mean().item()


bigram = bigram_loss(text, held_out)
print(f"one of 256: {math.log(256):.2f} nats per byte; bigram: {bigram:.1f}")

# %% tags=["guard"]
assert abs(bigram - 2.32) < 0.03  # the manual differs a little between Pythons

# %% [markdown]
# Counting pairs more than halves the loss, to about 2.32 on our Python. That's the number to beat.
# To beat it, a model has to look back further than one byte. How?
#
# ## 2 · Attention, and what it costs
#
# A transformer's answer is to keep everything and search it. Every token makes a *query*, a *key*
# and a *value*. Token $t$ compares its query with all keys up to its own, turns the scores into
# weights that sum to 1, and takes the weighted mean of the values:
#
# $$y_t = \sum_{s \le t} w_{ts}\, v_s, \qquad w_{ts} =
#   \frac{e^{q_t \cdot k_s / \sqrt p}}{\sum_{r \le t} e^{q_t \cdot k_r / \sqrt p}}. \tag{0.1}$$
#
# We write shapes as letters: $b$ texts in a batch, $l$ tokens, $h$ heads of width $p$. Each head
# attends on its own, so the cells work on tensors of shape $(b, h, l, p)$:


# %% tags=["experiment"]
def heads(x):  # (b, l, h p) -> (b, h, l, p)
    return x.unflatten(-1, (N_HEADS, -1)).transpose(1, 2)


def attention(q, k, v):
    """Give each token a mean of the values up to its own, weighted by q·k: (b, h, l, p)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores[0, 0]).triu(1).bool()
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


# %% [markdown]
# Is this equation 0.1? Let's compute token 5 of head 1 from the equation and compare:

# %%
q, k, v = random(3, 1, 2, 12, 4, seed=1)  # (b, h, l, p) each
y = attention(q, k, v)
score = torch.tensor([q[0, 1, 5] @ k[0, 1, s] for s in range(6)]) / math.sqrt(4)
weight = score.exp() / score.exp().sum()
check("attention = equation 0.1", y[0, 1, 5], weight @ v[0, 1, :6])

# %% [markdown]
# Token 5 takes nothing from tokens 6 to 11: no token sees the future. A model that saw the next
# byte would have nothing to learn.
#
# ### What a ✓ promises
#
# A ✓ means that two tensors were computed in two ways and differ by no more than the tolerance in
# brackets, relative to the largest entry. A check that fails stops the notebook.
#
# But would a wrong formula have passed, too? Transposing a product reverses its factors. Here is
# the right rule, and a mistake that people make. We plant it and let `must_differ` confirm that the
# check would have seen it:

# %%
A, B = random(2, 50, 50, seed=1)
check("(A B)ᵀ = Bᵀ Aᵀ", B.T @ A.T, (A @ B).T)
_ = must_differ("planted: order not reversed", A.T @ B.T, (A @ B).T)

# %% [markdown]
# A ✗ that says **caught** is good news. The number in brackets is a lower bound on how far off the
# mistake was. Now watch the same mistake on two diagonal matrices:

# %%
A, B = random(50, seed=2).diag(), random(50, seed=3).diag()
check("the wrong order, on diagonal matrices", A.T @ B.T, (A @ B).T)

# %% [markdown]
# A ✓, for the wrong formula! Diagonal matrices commute, so they can't tell. So ask two questions of
# every check, ours included: *which mistake would it catch*, and *can its inputs tell right from
# wrong?*

# %% [markdown]
# ### The bill
#
# Attention never forgets. That's its strength, and it has a price: to write the next token, a model
# needs the keys and values of all earlier ones. Let's add them up for three models of 1.3 billion
# parameters. LLaMA has attention in all of its 24 blocks; Jamba and Cheems have it in three. How
# much memory does one text of 131,072 tokens take?

# %%
for name in ("llama-1.3b", "jamba-1.3b", "cheems-1.3b"):
    held = cache_bytes(preset(name), 131_072)
    kept, states = held.keys_values / 2**30, held.states / 2**30
    print(f"{name:12} keys and values {kept:5.2f} GiB   states {states:.2f} GiB")

# %% tags=["guard"]
for name, blocks in {"llama-1.3b": 24, "jamba-1.3b": 3, "cheems-1.3b": 3}.items():
    config = preset(name)
    assert sum(config.pattern.count(letter) for letter in "AI") == blocks
    assert cache_bytes(config, 10).keys_values == blocks * 10 * 2 * 2048 * 2  # two bytes each
    states = config.pattern.count("S") * 32 * 64 * 128 * 4  # four bytes each
    assert {cache_bytes(config, read).states for read in (10, 10**7)} == {states}
assert TOLERANCE[torch.float64] == 1e-10 and TOLERANCE[torch.float32] == 1e-5

# %% [markdown]
# LLaMA keeps 24 GiB, the other two an eighth of it, plus states of 0.02 GiB. And the states stay
# that small, whether the model has read ten tokens or ten million. So what is a state, and what can
# it do? (Chapter 10 has the whole bill.)
#
# ## 3 · A state that fades
#
# A state is a matrix of fixed size, one per head, that all tokens share. Each token does three
# things. It lets the old state fade a little. It writes: it adds its value $x_t$, filed under a key
# $B_t$. And it reads: it looks up what is filed under $C_t$.
#
# $$h_t = e^{\Delta_t A}\, h_{t-1} + \Delta_t\, x_t B_t^\top, \qquad y_t = h_t\, C_t. \tag{0.2}$$
#
# $A < 0$ says how fast a head forgets. The step size $\Delta_t > 0$ belongs to the token: with a
# large one it writes loudly and wipes much of what was there; with a small one it leaves the state
# alone.
#
# Here is the equation for one head. `einsum` names the axes of its inputs and of its result. A
# letter that is missing in the result is summed over: `"p,n->pn"` is an outer product, and
# `"pn,n->p"` a product of matrix and vector.


# %%
def recurrence(x, dt, A, B, C):
    """Equation 0.2 for one head: x (l, p), dt (l,), A a number, B and C (l, n)."""
    state, y = torch.zeros(x.shape[1], B.shape[1]), []
    for t in range(len(x)):
        state = (dt[t] * A).exp() * state + dt[t] * einsum("p,n->pn", x[t], B[t])
        y.append(einsum("pn,n->p", state, C[t]))
    return torch.stack(y)


# %% [markdown]
# What can you do with such a memory? Let four tokens write under four perpendicular keys, without
# fading ($A = 0$, $\Delta = 1$). Then four tokens ask, each with one of the keys, and write nothing
# themselves ($x = 0$). After that we try five keys of length 1. There's no fifth direction in four
# dimensions, so the fifth key shares its space with the others:

# %%
keys = torch.eye(4)  # n = 4
values = random(4, 3, seed=4)
x = torch.cat([values, torch.zeros(4, 3)])
twice = torch.cat([keys, keys])  # written under in the first half, asked for in the second
y = recurrence(x, torch.ones(8), torch.tensor(0.0), twice, twice)
check("four keys in a state of width 4: each returns its value", y[4:], values)
keys = torch.cat([torch.eye(4), torch.full((1, 4), 0.5)])  # all of length 1
values = random(5, 3, seed=4)
x, twice = torch.cat([values, torch.zeros(5, 3)]), torch.cat([keys, keys])
y = recurrence(x, torch.ones(10), torch.tensor(0.0), twice, twice)
_ = must_differ("five keys in a state of width 4", y[5:], values, at_least=0.1)

# %% [markdown]
# With four keys it's a perfect memory. The ✗ is no mistake this time, but a limit: five values in
# four directions blur each other. One remedy is to let the state fade. Watch one: each token writes
# a 4 × 4 pattern, and what it wrote loses a third of its strength with every later token.


# %% tags=["setup"]
def states_of(x, B, decay):
    """The state after each token, (l, p, n)."""
    state, after = torch.zeros(x.shape[1], B.shape[1]), []
    for x_t, B_t in zip(x, B, strict=True):
        state = decay * state + einsum("p,n->pn", x_t, B_t)
        after.append(state)
    return torch.stack(after)


# %% tags=["figure"]
after = states_of(random(4, 4, seed=5), torch.eye(4)[[0, 2, 3, 1]], 2 / 3)
shown = {f"after token {t}": state for t, state in enumerate(after)}
fig, axes = plotting.heatmaps(shown, xlabel="n: where it is filed", ylabel="p: the value")
plotting.save(
    fig,
    "00_state",
    "One state of 4 by 4 numbers after each of four tokens. Token 0 fills column 0, token 1 "
    "column 2, token 2 column 3, token 3 column 1. Each later token leaves a column paler.",
)

# %% tags=["guard"]
after = states_of(random(4, 4, seed=5), torch.eye(4)[[0, 2, 3, 1]], 2 / 3)
check("column 0 fades", after[3][:, 0], (2 / 3) ** 3 * after[0][:, 0])
assert [(s.abs().sum(0) > 0).nonzero()[:, 0].tolist() for s in after] == [
    [0], [0, 2], [0, 2, 3], [0, 1, 2, 3]]  # fmt: skip

# %% [markdown]
# Chapter 01 derives the fading state from a differential equation. Chapter 02 compares five ways of
# writing into it.
#
# ## 4 · The same thing is a matrix
#
# The recurrence has a flaw: it handles one token after the other, while attention handles all of
# them at once. Can we have it both ways? Follow one value. Token $s$ writes $\Delta_s x_s$ under
# $B_s$. It fades over the steps $s+1, \dots, t$. Token $t$ reads it with weight $C_t \cdot B_s$. So
#
# $$y_t = \sum_{s \le t} M_{ts}\, x_s, \qquad
#   M_{ts} = (C_t \cdot B_s)\; e^{A (\Delta_{s+1} + \dots + \Delta_t)}\; \Delta_s. \tag{0.3}$$
#
# Compare with equation 0.1. $C$ is the query, $B$ the key, $x$ the value. The softmax is gone, and
# a decay has appeared. In this form a state layer is attention without the softmax:


# %%
def duality_matrix(dt, A, B, C):
    """M of equation 0.3 for one head: (l, l)."""
    steps = dt.cumsum(0)  # Δ_0 + ... + Δ_t
    decay = (A * (steps[:, None] - steps)).tril().exp().tril()
    return (C @ B.T) * decay * dt


x, B, C = random(12, 3, seed=6), *random(2, 12, 4, seed=7)
dt, A = 0.1 + random(12, seed=8).abs(), torch.tensor(-1.0)
M = duality_matrix(dt, A, B, C)
check("matrix form = recurrence", M @ x, recurrence(x, dt, A, B, C))

# %% [markdown]
# This equality is called *state space duality*. Here are the two matrices side by side. What does
# the second one lack?

# %% tags=["figure"]
q, k, _ = random(3, 1, 2, 12, 4, seed=1)
softmax = attention(q, k, torch.eye(12).expand(1, 2, 12, 12))[0, 1]
B, C = random(2, 12, 4, seed=7)
M = duality_matrix(0.1 + random(12, seed=8).abs(), torch.tensor(-1.0), B, C)
shown = {"attention": softmax, "a state that fades": M}
fig, _ = plotting.heatmaps(shown, xlabel="token read", ylabel="token", limit=1.0)
plotting.save(
    fig,
    "00_duality",
    "Two lower triangular matrices, 12 by 12. Attention's entries are all positive and may be "
    "large far from the diagonal. The state's have both signs, and its far corner is pale.",
)

# %% tags=["guard"]
B, C = random(2, 12, 4, seed=7)
M = duality_matrix(0.1 + random(12, seed=8).abs(), torch.tensor(-1.0), B, C)
far = torch.ones(12, 12).tril(-7).bool()
assert M.triu(1).abs().max() == 0 and M.min() < 0 < M.max()
assert M[far].abs().max() < 0.03
softmax = attention(*random(3, 1, 2, 12, 4, seed=1)[:2], torch.eye(12).expand(1, 2, 12, 12))[0, 1]
assert softmax.tril().min() >= 0 and softmax[far].max() > 0.2

# %% [markdown]
# With this fast decay it has no far corner: whatever was long ago is pale. And it's made of few
# numbers. Everything that the tokens before $t$ can tell the tokens after $t$ went through a state
# of width $n$.
#
# Now cut the text into *chunks* of 64 tokens. Inside a chunk use the matrix, which does all tokens
# at once. Between chunks hand over the state. Then the work grows with the length, not with its
# square. These lines are the heart of Mamba-2 and of Cheems:


# %% tags=["experiment"]
def ssd(x, dt, A, B, C):
    """y_t = h_t C_t with h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_tᵀ, a chunk at a time."""
    state, y = 0, []
    chunks = (t.split(CHUNK, dim=2) for t in (dt[..., None] * x, dt * A, B[:, None], C[:, None]))
    for X, dA, B, C in zip(*chunks, strict=True):
        decay = dA.cumsum(-1)[..., None]  # log of what is left of the state before the chunk
        M = (C @ B.mT) * (decay - decay.mT).tril().exp()
        y.append(M.tril() @ X + decay.exp() * (C @ state if y else 0))
        state = decay[:, :, -1:].exp() * state + B.mT @ ((decay[:, :, -1:] - decay).exp() * X)
    return torch.cat(y, dim=2)


# %%
x, A = random(1, 2, 150, 3, seed=9), -random(2, 1, seed=11).exp()  # two heads
dt = random(1, 2, 150, seed=10).abs() / 10
B, C = random(2, 1, 150, 4, seed=12)  # the heads share them
y = ssd(x, dt, A, B, C)  # three chunks: 64, 64 and 22 tokens
for head in (0, 1):
    right = recurrence(x[0, head], dt[0, head], A[head, 0], B[0], C[0])
    check(f"chunks = recurrence, head {head}", y[0, head], right)

# %% [markdown]
# Chapter 03 derives the chunks step by step, and compares them with the real GPU kernels of
# mamba-ssm.
#
# ## 5 · Where am I?
#
# So far, swapping two earlier tokens changes no score of attention: a key says *what*, not *where*.
# We could add a vector for each position to queries and keys. Let's try that first, with the waves
# of the first transformer, and move everything by one place. Do the scores stay?

# %%
q, k = random(2, 4, seed=13)
angle = torch.arange(40)[:, None] * torch.tensor([1.0, 0.01])
waves = torch.cat([angle.sin(), angle.cos()], dim=-1)
scores = (q + waves) @ (k + waves).T  # the same q and k at each of 40 positions
_ = must_differ("added positions, moved by one", scores[1:, 1:], scores[:-1, :-1])

# %% [markdown]
# They change: "the cat" has different scores at the start of a text than at its end. *Rotate*
# instead. Cut a vector into pairs of numbers, and turn pair $i$ by an angle that grows with the
# position:


# %% tags=["experiment"]
def rotate(x):
    """Rotate pair i of the vector at position t by the angle t · 10000^(-2i/n): (..., l, n)."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half).to(x) / half)
    angle = torch.arange(x.shape[-2]).to(x)[:, None] * frequency
    cos, sin, (first, second) = angle.cos(), angle.sin(), x.chunk(2, dim=-1)
    return torch.cat([cos * first - sin * second, sin * first + cos * second], dim=-1)


# %% [markdown]
# If both vectors turn, only the difference of their angles is left in an inner product. Now the
# positions enter the scores by their distance alone:

# %%
q, k = random(2, 4, seed=13)
scores = rotate(q.expand(40, 4)) @ rotate(k.expand(40, 4)).T
check("rotated, moved by one: the same scores", scores[1:, 1:], scores[:-1, :-1])

# %% [markdown]
# Since $C$ and $B$ of a state are a query and a key, the same rotation works for both kinds of
# layers. That's one of the ideas of *Wonderful Matrices*. The folded cell has the layer `S`, with
# its projections:


# %% tags=["setup", "experiment"]
class SSD(nn.Module):
    """S: a state that fades, and that each token writes into and reads from."""

    def __init__(self):
        super().__init__()
        self.x_proj, self.out_proj = Linear(D_MODEL, D_MODEL), Linear(D_MODEL, D_MODEL)
        self.B_proj, self.C_proj = Linear(D_MODEL, D_STATE), Linear(D_MODEL, D_STATE)
        self.dt_proj = Linear(D_MODEL, N_HEADS)
        dt = torch.empty(N_HEADS).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias, self.D = nn.Parameter(dt.expm1().log()), nn.Parameter(torch.ones(N_HEADS))
        self.A_log = nn.Parameter(torch.empty(N_HEADS).uniform_(1, 16).log())

    def forward(self, u):
        x, B, C = heads(self.x_proj(u)), rotate(self.B_proj(u)), rotate(self.C_proj(u))
        dt = F.softplus(self.dt_proj(u) + self.dt_bias).mT  # (b, h, l)
        y = ssd(x, dt, -self.A_log.exp()[:, None], B, C) + self.D[:, None, None] * x
        return self.out_proj(y.transpose(1, 2).flatten(2))


# %% [markdown]
# $A$ and $\Delta$ start in the ranges of Mamba-2, so at first some heads forget within a few tokens
# and others remember for a thousand. Chapter 04 proves the rotation, and compares three sources of
# position.
#
# ## 6 · What to retrieve
#
# Attention has searched, and found the tokens it wants. What should it take from them? Ordinary
# attention takes $v = W x$, the same matrix for each token. Cheems lets each head keep a small
# table. A token picks the two rows whose keys fit it best, mixes them, and multiplies the mix with
# $x$:
#
# $$v = x \circ (\omega_1 U_{j_1} + \omega_2 U_{j_2}). \tag{0.4}$$


# %% tags=["setup", "experiment"]
class RetrievedValues(nn.Module):
    """x, times a mix of the rows of a table whose keys fit the token best."""

    def __init__(self):
        super().__init__()
        self.query_proj = Linear(D_MODEL, D_MODEL // 2)
        self.keys = nn.Parameter(torch.randn(N_HEADS, N_VALUES, D_HEAD // 2))
        self.values = nn.Parameter(torch.randn(N_HEADS, N_VALUES, D_HEAD))

    def forward(self, x):
        queries = heads(self.query_proj(x))
        scores = queries @ self.keys.mT / math.sqrt(queries.shape[-1])
        best, rows = scores.topk(K_VALUES)
        weights = torch.zeros_like(scores).scatter(-1, rows, best.softmax(-1))
        return heads(x) * (weights @ self.values)


# %% [markdown]
# The values are computed by an *inner function*, hence the letter `I`. This one is a table; it can
# also be an `S`. The rest of the layer is attention as you know it:


# %% tags=["setup", "experiment"]
class InnerFuncAttn(nn.Module):
    """I: attention whose queries and keys are rotated, and whose values are retrieved."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = Linear(D_MODEL, D_MODEL), Linear(D_MODEL, D_MODEL)
        self.inner, self.out_proj = RetrievedValues(), Linear(D_MODEL, D_MODEL)

    def forward(self, x):
        q, k = rotate(heads(self.q_proj(x))), rotate(heads(self.k_proj(x)))
        y = attention(q, k, self.inner(x))
        return self.out_proj(y.transpose(1, 2).flatten(2))


# %% [markdown]
# Do values depend on their own token alone? Change token 7, and see which values move:

# %%
_ = torch.manual_seed(0)
inner, x = RetrievedValues(), random(1, 12, D_MODEL, seed=14)
moved = x.clone()
moved[0, 7] += 1
with torch.no_grad():
    changed = (inner(x) != inner(moved)).any(1).any(-1)[0]  # over heads and their numbers
print("values that changed:", changed.nonzero()[:, 0].tolist())
assert changed.nonzero().tolist() == [[7]]

# %% [markdown]
# Only token 7's. Does the table help? Chapter 05 and the comparisons of chapter 09 try to find out.
#
# ## 7 · A million tiny experts
#
# Up to now the layers moved information between tokens. Where does the knowledge sit? In a
# transformer, mostly in MLPs, which use all their weights for every token. A mixture of *experts*
# uses a few of many instead. How small can an expert be? One neuron: a vector that decides whether
# it fires, and a vector that it adds if it does.
#
# But how do you find the best few of a million, for every token? The trick is to give an expert two
# half keys. Lay the million out in a square with $r = 1000$ rows and columns. Expert $(i, j)$ has
# the score $q_1 \cdot \theta_{1i} + q_2 \cdot \theta_{2j}$, and 2,000 inner products give all half
# scores. Which sums can be among the best $k$? Rank each half, counting from 0. A pair of ranks
# $(a, b)$ is beaten, or at least matched, by every pair with smaller or equal ranks. There are
# $(a + 1)(b + 1) - 1$ of those. So if $(a + 1)(b + 1) > k$, you can forget the pair. What's left is
# a staircase:

# %% tags=["setup"]
STAIRS = torch.tensor([[float((a + 1) * (b + 1) <= 8) for b in range(10)] for a in range(10)])
assert STAIRS.sum(1).tolist() == [8, 4, 2, 2, 1, 1, 1, 1, 0, 0] and STAIRS.sum() == 20

# %% tags=["figure"]
fig, ax = plotting.figure(size=(5, 4.4))
words = dict(xlabel="rank of the second half", ylabel="rank of the first half")
plotting.heatmap(ax, STAIRS, **words, signed=False, colorbar=False)
plotting.save(
    fig,
    "00_stairs",
    "Of 10 by 10 pairs of ranks, the 20 that can be among the best 8 form a staircase in the "
    "corner: 8 in the first row, then 4, 2, 2, 1, 1, 1 and 1.",
)


# %% tags=["experiment"]
def best_pairs(queries, keys, k):
    """The k largest of r² sums q₁·θ₁ᵢ + q₂·θ₂ⱼ and their numbers i r + j; keys (h, 2, r, m)."""
    best, where = einsum("blhcm,hcrm->blhcr", queries, keys).topk(k)  # of each half
    a, b = torch.tensor([(a, b) for a in range(k) for b in range(k // (a + 1))]).T  # a staircase
    scores, place = (best[..., 0, a] + best[..., 1, b]).topk(k)
    return scores, (where[..., 0, a] * keys.shape[2] + where[..., 1, b]).gather(-1, place)


# %% [markdown]
# Does it find the best of a million? Let's ask for all million sums:

# %%
queries, keys = random(1, 3, 1, 2, 8, seed=15), random(1, 2, 1000, 8, seed=16)  # 3 tokens
scores, found = best_pairs(queries, keys, 8)
first, second = einsum("blhcm,hcrm->cblhr", queries, keys)
best, where = (first[..., :, None] + second[..., None, :]).flatten(-2).topk(8)
check("best of 20 sums = best of 1,000,000", scores, best)
check("and the same experts", found, where)

# %% [markdown]
# Exactly the same, from 2,000 inner products and 20 sums. Each head of a token finds a few experts
# like this. Their neurons fire or don't, and the sum is the layer's output:


# %% tags=["setup", "experiment"]
class PEER(nn.Module):
    """Experts of one neuron, r² of them: each head of a token finds a few and sums them up."""

    def __init__(self):
        super().__init__()
        self.query_proj = Linear(D_MODEL, EXPERT_HEADS * D_QUERY)
        self.keys = nn.Parameter(torch.randn(EXPERT_HEADS, 2, math.isqrt(N_EXPERTS), D_QUERY // 2))
        self.down = nn.Parameter(torch.randn(N_EXPERTS, D_MODEL) / math.sqrt(D_MODEL))
        self.up = nn.Parameter(torch.randn(N_EXPERTS, D_MODEL) / (EXPERT_HEADS * K_EXPERTS) ** 0.5)

    def forward(self, x):
        queries = self.query_proj(x).unflatten(-1, (EXPERT_HEADS, 2, -1))
        scores, experts = best_pairs(queries, self.keys, K_EXPERTS)  # (b, l, h, k)
        fire = scores.softmax(-1) * F.silu(einsum("bld,blhkd->blhk", x, self.down[experts]))
        return einsum("blhk,blhkd->bld", fire, self.up[experts])


# %% [markdown]
# In Cheems all tokens go through one shared MLP first, so that experts needn't all learn the same
# basics. The experts read its output. The papers call this layer *cross-domain mixture of experts*:


# %% tags=["setup", "experiment"]
class CDMoE(nn.Module):
    """E: an MLP that all tokens share, plus the tiny experts, which read its output."""

    def __init__(self):
        super().__init__()
        maps = {"in_proj": Linear(D_MODEL, D_FF), "out_proj": Linear(D_FF, D_MODEL)}
        self.shared, self.experts = nn.ModuleDict(maps), PEER()

    def forward(self, x):
        x = self.shared["out_proj"](F.silu(self.shared["in_proj"](x)))
        return x + self.experts(x)


# %% [markdown]
# Chapter 06 derives the search, and looks at who fires for what.
#
# ## 8 · A string of letters
#
# You have all the parts. A model is a string with a letter per layer. A vector of width 128 per
# token, the *stream*, runs through them. Each layer reads a normalised copy of it and adds its
# result:


# %% tags=["experiment"]
class Cheems(nn.Module):
    """An embedding, a layer per letter, each added to the stream, and the embedding once more."""

    def __init__(self, pattern):
        super().__init__()
        self.embedding = nn.Embedding(256, D_MODEL)
        nn.init.normal_(self.embedding.weight, std=0.02)
        layers = {"S": SSD, "I": InnerFuncAttn, "E": CDMoE}
        blocks = [nn.ModuleDict({"norm": Norm(), "layer": layers[x]()}) for x in pattern]
        self.blocks, self.norm = nn.ModuleList(blocks), Norm()

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block["layer"](block["norm"](x))
        return self.norm(x) @ self.embedding.weight.T


# %% [markdown]
# That's a whole Cheems. The package has the same model with everything that we left out: memory
# between calls, padding, checks, and options such as the papers' dynamic mask and other inner
# functions. If both have the same weights, do they agree?

# %%
_ = torch.manual_seed(0)
mine, theirs = Cheems("SESEIE"), CausalLM(ModelConfig(pattern="SESEIE"))
theirs.load_state_dict(mine.state_dict())
ids = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    logits, _ = theirs(ids)
    check("your model = the package's", mine(ids), logits)
assert len(Path(minimal.__file__).read_text().splitlines()) <= 200  # the file, with its training
assert preset("cheems-1.3b").pattern == "SESESESESESESEIE" * 3

# %% [markdown]
# The real one has the pattern `SE × 7 + IE`, repeated: seven states for each attention. The order
# is no accident. Attention finds a token by its content, and an `S` before it can mix a token with
# its neighbours. Chapter 07 shows what happens in the other order.

# %% [markdown]
# ## 9 · Train it
#
# A window of 257 bytes gives 256 predictions at once. The training loop draws eight windows,
# computes the loss, and moves the weights against its gradient with AdamW. The learning rate rises
# during the first tenth of the steps, then falls to zero:


# %% tags=["setup"]
def nats(model, windows):
    """The mean of -log p over all bytes but the first of each window."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(model, text, steps, peak=3e-3):
    """Train on random windows of a text; yields the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * min(10 * (step + 1) / steps, 1 - step / steps)
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        loss = nats(model, text[starts + torch.arange(LENGTH + 1)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


# %% [markdown]
# Our live model has four letters and 60 steps. It trains in about half a minute, on the bytes
# around you. Will that be enough to beat the bigram?

# %% tags=["setup"]
_ = torch.manual_seed(0)
STUDENT = Cheems("SEIE").float()  # training doesn't need 16 digits
LOSSES = list(train(STUDENT, text, 60, peak=5e-3))
with torch.no_grad():
    learned = nats(STUDENT, held_out.unfold(0, LENGTH + 1, LENGTH)[::4]).item()
assert 5.3 < LOSSES[0] < 5.8 and learned < bigram_loss(text, held_out) - 0.05
print("better than the bigram by more than 0.05 nats per byte")

# %% [markdown]
# It does. `python cheems_ref/minimal.py` trains `SESEIE` for 300 steps, in about two minutes. Here
# is our run of it, with two others on the same text, `SESESE` without attention and `IEIEIE`
# without states (`python -m experiments 00_sitting`):

# %% tags=["setup"]
for pattern, run in runs.items():
    print(f"{pattern}  {run['parameters']:,} parameters   held out {run['held_out']:.3f} nats")

# %% tags=["guard"]
nats_of = {pattern: run["held_out"] for pattern, run in runs.items()}
assert 0.01 < nats_of["SESESE"] - nats_of["SESEIE"] < 0.02
assert 0.09 < nats_of["IEIEIE"] - nats_of["SESEIE"] < 0.1

# %% [markdown]
# All three beat the bigram by far. `SESEIE` and `SESESE` are less than 0.02 nats apart, and the one
# that has only attention is 0.09 behind. With one run of each, don't bet on it: chapter 09 says how
# many runs a difference needs. But one thing is plain. On this text, for models this small, a state
# can take attention's place.
#
# ## 10 · It writes
#
# To write, ask for the chances of the next byte, draw one, append it, repeat. A *temperature* below
# 1 makes likely bytes likelier.


# %% tags=["setup"]
def write(model, prompt, count, temperature=0.8):
    """Continue a prompt by `count` bytes, each drawn from softmax(logits / temperature)."""
    ids = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        chances = (model(ids[:, -LENGTH:])[0, -1] / temperature).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)[None]], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


# %% [markdown]
# Here is what *your* model writes after 60 steps, and below it the recorded one after 300. Rounding
# differs between machines, so your text will differ from ours. A dot stands for whatever isn't
# printable ASCII.


# %%
_ = torch.manual_seed(0)
with torch.no_grad():
    wrote = printable(write(STUDENT, "The ", 160))
print("after 60 steps", *textwrap.wrap(wrote[:150], 75), sep="\n│ ")
print("recorded, after 300 steps of SESEIE")
print(*textwrap.wrap(printable(runs["SESEIE"]["sample"])[:225], 75), sep="\n")

# %% [markdown]
# After 60 steps hardly a word is one. After 300 most of the short ones are, and no sentence makes
# sense yet. Chapter 07 trains a larger model for longer.
#
# ## 11 · Take its attention away
#
# Now to our question. In the recorded model, `SESEIE`, we switch attention off: its output becomes
# zero, and everything else stays. Then we read the held-out text again. Where in a window of 256
# bytes will the switch hurt most, at the beginning or at the end?

# %% tags=["setup"]
run = runs["SESEIE"]
print(f"on {run['held_out']:.2f}, off {run['held_out_off']:.2f} nats per byte")
harm = [a - b for a, b in zip(run["off"]["plain"], run["on"]["plain"], strict=True)]
print("worse by, in 16 pieces of the window:", *(f"{one:.2f}" for one in harm))
once, again = run["on"]["twice"][2:7], run["on"]["twice"][10:15]  # bytes 32 to 111 of each half
apart = max(abs(a - b) for a, b in zip(once, again, strict=True))
print(f"a second half that repeats the first: within {apart:.2f} of it")

# %% [markdown]
# Everywhere about the same, 0.2 nats. So this attention isn't looking far back. Probably its job is
# a local one, and `SESESE`, which never had any, does that job with a state. We also let the model
# read windows whose second half repeats the first. It reads the second half no better. Is attention
# good for nothing, then?
#
# ### A task that is nothing but memory
#
# Text mixes many skills, so let's train on one. A row has 16 random symbols of 32, then the same 16
# again. A model that remembers can get all of the second half right. One that doesn't gets one in
# 32. We train three models without experts, for 100 steps each: one `S`, one `I`, and `SI`. And we
# give `I` a harder task, 64 symbols. Which of the four learn it?


# %% tags=["setup", "experiment"]
def learn_to_repeat(pattern, length=16, steps=100, seed=0):
    """Train on rows of symbols and their repetition; the share right in every ten steps."""
    _ = torch.manual_seed(seed)
    model, right = Cheems(pattern).float(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        once = torch.randint(32, (16, length))
        logits = model(torch.cat([once, once], 1))[:, length - 1 : -1]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), once.flatten()).backward()
        optimizer.step()
        right.append((logits.argmax(-1) == once).double().mean())
    return torch.stack(right).view(-1, 10).mean(1).tolist()


# %%
tasks = [("S", 16), ("I", 16), ("SI", 16), ("I", 64)]
repeats = {(pattern, l): learn_to_repeat(pattern, l)[-1] for pattern, l in tasks}
for (pattern, l), right in repeats.items():
    share = "nearly all" if right > 0.95 else "fewer than one in five"
    print(f"{pattern:2} {l} symbols: {share} right")

# %% [markdown]
# All but `S`. Attention has every symbol at hand and only needs to learn where to look. A single
# `I` in the model is enough for that. Does a state need more time, or can't it? Here are recorded
# runs of ten times as many steps (`python -m experiments 00_repeat`), with three seeds for each
# length:


# %% tags=["setup"]
def ends(table):
    """The share right at the end of each run, sorted, by length."""
    lengths = sorted({run["length"] for run in table})
    return {l: sorted(run["right"][-1] for run in table if run["length"] == l) for l in lengths}


for l, right in ends(repeat_record["table"]).items():
    print(f"S {l} symbols, 1,000 steps: {right[0]:.2f} {right[1]:.2f} {right[2]:.2f} right")

# %% tags=["figure"]
fig, ax = plotting.figure(size=(9, 4.2))
curves = {f"S, {l} symbols": [run["right"] for run in repeat_record["table"] if run["length"] == l]
          for l in (16, 32, 64)}  # fmt: skip
middle = {name: [sorted(three)[1] for three in zip(*c, strict=True)] for name, c in curves.items()}
plotting.lines(ax, range(10, 1001, 10), middle, xlabel="step", ylabel="share right", ylim=(0, 1))
plotting.save(
    fig,
    "00_repeat",
    "Share of the repeated symbols that S gets right against training step, the median of three "
    "runs. With 16 symbols it passes 0.9 before step 500; with 32 it ends between 0.8 and 0.9; "
    "with 64 it ends near 0.1.",
)

# %% tags=["guard"]
assert min(harm) > 0.17 and max(harm) < 0.23 and apart < 0.02
assert repeats.pop(("S", 16)) < 0.2 and min(repeats.values()) > 0.95
middle = {l: right[1] for l, right in ends(repeat_record["table"]).items()}
assert middle[16] > 0.98 and 0.8 < middle[32] < 0.9 and 0.1 < middle[64] < 0.12
at_500 = [run["right"][49] for run in repeat_record["table"] if run["length"] == 16]
assert min(at_500) > 0.9 and max(ends(repeat_record["table"])[64]) < 0.55

# %% [markdown]
# It needs more time, and more for longer rows. In 1,000 steps `S` learns to repeat 16 symbols, most
# of 32, and about half of 64 at best, with seeds far apart and the curve still rising. So here's
# a first answer, from models this small: on this text a state did as well without attention, and
# at pure copying attention learned much faster. (Fetching is easy here, always from the same
# distance. Chapter 08 asks by content, of longer texts.)
#
# ## Summary
#
# - Attention keeps all keys and values, searches them, and pays for each token it keeps.
# - A state has a fixed size. Each token lets it fade, writes into it and reads from it. As a
#   matrix, that is attention without the softmax, with a decay.
# - Rotating queries and keys, or $C$ and $B$, by their positions leaves only the
#   distance in a score.
# - Experts of one neuron are found by two half keys: 2,000 inner products for a million.
# - A model is a string of letters. In `SE × 7 + IE` one block of eight has attention.
# - A ✓ speaks for the inputs it was shown. Ask which mistake it would catch.
#
# How much attention, and for what? Chapters 08, 09 and 10 go on asking: what is recalled, what is
# lost in nats, and what it costs. [Reading
# the course](../book/manual/reading_the_course.md) has the map, and a self-test that says where to
# begin.
#
# ## Exercises

# %% [markdown]
# **1 · easy.** With pencil and paper first: how many numbers does a model of our sizes have to keep
# after reading `length` tokens? An `S` keeps its state, an `I` a key and a value per token and
# head, an `E` nothing. Write `kept(pattern, length)`.


# %% tags=["exercise"]
def kept(pattern, length):
    """Numbers that a model keeps of one text after so many tokens."""
    ### BEGIN SOLUTION
    state, per_token = N_HEADS * D_HEAD * D_STATE, 2 * N_HEADS * D_HEAD
    return pattern.count("S") * state + pattern.count("I") * per_token * length
    ### END SOLUTION


# %% tags=["check"]
assert kept("S", 5) == kept("SE", 5000) == 4096, "an S keeps h p n numbers, an E nothing"
assert kept("IE", 10) == 2560, "an I keeps 2 d numbers per token"
assert kept("SESEIE", 16) == 3 * 4096, "two states, and 16 tokens in one I"
print("from", next(l for l in range(99) if kept("I", l) > kept("S", l)), "tokens on, I keeps more")

# %% [markdown]
# **2 · easy.** A head has $A = -4$, and its tokens have $\Delta = 0.01$. After how many tokens is
# half of a write left? Write `half_life(A, dt)`; it may return a fraction of a token.


# %% tags=["exercise"]
def half_life(A, dt):
    """Tokens until a write has lost half of its strength."""
    ### BEGIN SOLUTION
    return math.log(2) / (-A * dt)
    ### END SOLUTION


# %% tags=["check"]
assert abs(math.exp(-1.0 * 0.1 * half_life(-1.0, 0.1)) - 0.5) < 1e-9, "half is left after it"
assert abs(half_life(-4.0, 0.01) - 17.3287) < 1e-3, "A = -4, dt = 0.01: about 17.3 tokens"
print("A = -16, dt = 0.001:", round(half_life(-16, 0.001)), "tokens")

# %% [markdown]
# **3 · medium.** To write with `S`, a model needn't read the text again. Write
# `step(state, x, dt, A, B, C)` for one token of all heads: x (h, p), dt (h,), A (h,), B and C (n,),
# state (h, p, n). It returns y (h, p) and the new state.


# %% tags=["exercise"]
def step(state, x, dt, A, B, C):
    """One token of equation 0.2 for all heads: y and the state after it."""
    ### BEGIN SOLUTION
    decay = (dt * A).exp()[:, None, None]
    state = decay * state + einsum("h,hp,n->hpn", dt, x, B)
    return einsum("hpn,n->hp", state, C), state
    ### END SOLUTION


# %% tags=["check"]
x, dt, A = random(1, 2, 70, 3, seed=17), random(1, 2, 70, seed=18).abs(), -random(2, seed=19).exp()
B, C = random(2, 1, 70, 4, seed=20)
state, one_by_one = torch.zeros(2, 3, 4), []
for t in range(70):
    y, state = step(state, x[0, :, t], dt[0, :, t], A, B[0, t], C[0, t])
    one_by_one.append(y)
check("one token at a time = chunks", torch.stack(one_by_one, 1), ssd(x, dt, A[:, None], B, C)[0])

# %% [markdown]
# **4 · medium.** Measure on your own machine: from which length on is `ssd` faster than
# `attention`? Write `seconds(f, repeats)`: the shortest of so many calls of `f()`, by
# `time.perf_counter()`. Then look at the table that the check prints, if you set `LOOK = True`.


# %% tags=["exercise"]
def seconds(f, repeats=3):
    """The shortest time of a call, in seconds."""
    ### BEGIN SOLUTION
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)
    ### END SOLUTION


# %% tags=["check"]
LOOK, calls = False, []
naps = iter([0.02, 0.0, 0.01])
assert 0 <= seconds(lambda: (calls.append(1), time.sleep(next(naps)))) < 0.01, "the shortest call"
assert len(calls) == 3, "f is called three times"
for l in (256, 1024, 4096) if LOOK else ():
    q, dt, B = random(1, 4, l, 32, seed=0), torch.ones(1, 4, l), random(1, l, 32, seed=1)
    both = partial(attention, q, q, q), partial(ssd, q, dt, -dt[0, :, :1], B, B)
    print(l, *map(seconds, both))
print("the shortest of three")

# %% [markdown]
# **5 · hard.** With three parts per key, $r^3$ experts need only $3r$ inner products. The staircase
# has a third axis. Write `best_triples(parts, k)`: the `k` largest of all sums $a_i + b_j + c_m$ of
# the rows of `parts` (3, r), descending, from no more candidates than the staircase needs.


# %% tags=["exercise"]
def best_triples(parts, k):
    """The k largest sums of three numbers, one from each row, and how many sums were compared."""
    ### BEGIN SOLUTION
    best = parts.topk(k).values
    stairs = [(a, b, c) for a in range(k) for b in range(k // (a + 1))
              for c in range(k // ((a + 1) * (b + 1)))]  # fmt: skip
    a, b, c = torch.tensor(stairs).T
    return (best[0, a] + best[1, b] + best[2, c]).topk(k).values, len(stairs)
    ### END SOLUTION


# %% tags=["check"]
parts = random(3, 30, seed=21)
every_sum = parts[0][:, None, None] + parts[1][:, None] + parts[2]
found, compared = best_triples(parts, 8)
check("best of the stairs = best of 27,000", found, every_sum.flatten().topk(8).values)
assert compared == 38, "38 triples of ranks can be among the best 8"
print(compared, "sums compared")

# %% [markdown]
# ## Further reading
#
# - Dao and Gu, *Transformers are SSMs* (2024): state space duality and Mamba-2.
# - Su et al., *RoFormer* (2021): rotary positions.
# - He, *Mixture of A Million Experts* (2024): product keys for experts of one neuron.
# - Lieber et al., *Jamba* (2024): another hybrid of states, attention and experts.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
