# %% [markdown]
# # 03 · State space duality
#
# **One layer, two ways to compute it: as a recurrence that carries a small state, or as attention
# that looks back at everything. By the end you will have combined the two in two dozen lines of
# code, and caught a published version peeking into the future.** You will be able to
#
# - write a recurrence as a matrix, and say what is special about its blocks;
# - show how attention without a softmax comes out of it, and what a single decay per head is good
#   for;
# - compute the layer in chunks, in time linear in the length;
# - find the published mistake, which a test with only one chunk can't see;
# - check the kernel that models are trained on against your own definition.
#
# You need matrix products, attention as a formula, and a little PyTorch. Chapters 01 and 02 help.
#
# Sources: Dao and Gu, *Transformers are SSMs* (2024), for the duality and the chunked algorithm;
# *Wonderful Matrices* (WM) §2, Appendix A and Listings 2–4; *Cheems* (Ch) Listing 2; mamba-ssm
# 2.3.2.post1. How to read ✓ and ✗: chapter 00.

# %% tags=["setup", "experiment"]
import json
import math
import time
from functools import partial
from pathlib import Path

import torch
from einops import rearrange
from torch import einsum
from torch.linalg import matrix_rank
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

from cheems_ref import plotting, ssd
from cheems_ref.kernels import kernel_status
from cheems_ref.linear_attention import gated_linear_attention
from cheems_ref.mamba import selective_scan
from cheems_ref.verify import check, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# %% [markdown]
# On the left, what token 2 writes travels along the orange path, fading at every step, until token
# 6 reads it. On the right, that whole journey is one number, the orange square:


# %% slide_title="One number in a matrix is a whole journey through the state" tags=["figure"]
plotting.show_drawing(
    "03_duality",
    "A chain of eight states and a lower triangular matrix. In the chain, the path from input 2 "
    "through the states 2 to 6 to output 6 is lit. In the matrix, the same path is one lit entry, "
    "row 6 and column 2. The blocks on the diagonal, inside a chunk, are marked as attention, the "
    "block below it, between chunks, as the state.",
)

# %% [markdown]
# It's the same layer in both pictures. The chain is cheap, but it handles one token at a time. The
# matrix can be computed all at once, but its size is the square of the length. Cutting it into
# blocks gets us the best of both.

# %% [markdown] slide_title="Each token shrinks the state, then adds its own"
# ## 1 · Four tokens by hand
#
# Let's start with one number per token, $x_t$, and one number of state, $h_t$. Each token shrinks
# the state by a factor $\alpha_t$, adds its own contribution $B_t x_t$, and reads the result with
# weight $C_t$:
#
# $$h_t = \alpha_t\,h_{t-1} + B_t\,x_t, \qquad y_t = C_t\,h_t, \qquad h_{-1} = 0. \tag{3.1}$$
#
# The *decay* $\alpha_t$ is between 0 (forget everything) and 1 (keep everything). Work out
# the four states with a pencil, then run the cell:

# %%
x = torch.tensor([1.0, 2.0, 0.0, 3.0])
alpha = torch.tensor([0.5, 0.5, 0.9, 0.1])
B = torch.tensor([1.0, 1.0, 2.0, 1.0])
C = torch.tensor([1.0, 1.0, 1.0, 2.0])

state, states = torch.tensor(0.0), []
for t in range(4):
    state = alpha[t] * state + B[t] * x[t]
    states.append(state)
y = C * torch.stack(states)
print("h =", torch.stack(states).numpy(), "  y =", y.numpy())

# %% [markdown] slide_title="Unrolled, a write meets every later decay" slide_figure="03_duality:0"
# Now **unroll** it: substitute $h_{t-1}$ into the equation for $h_t$, then $h_{t-2}$, until only
# inputs are left. By the time input $s$ reaches token $t$, it has met every decay since it was
# written:
#
# $$y_t = C_t \sum_{s \le t} \big(\alpha_t\,\alpha_{t-1} \cdots \alpha_{s+1}\big)\, B_s\,x_s.
#   \tag{3.2}$$
#
# Does the product start at $\alpha_s$ or at $\alpha_{s+1}$? At $\alpha_{s+1}$, because a token sees
# its own write at full strength. It's easy to get this wrong, and hard to notice when the decays
# are close to 1. Let's get it wrong on purpose, with `first=0` in the folded function:


# %% tags=["setup"]
def unrolled(x, alpha, B, C, first=1):
    """Equation 3.2, with the decays of steps s + first to t."""
    outputs = []
    for t in range(len(x)):
        heard = [alpha[s + first : t + 1].prod() * B[s] * x[s] for s in range(t + 1)]
        outputs.append(C[t] * sum(heard))
    return torch.stack(outputs)


# %%
check("unrolled sum = recurrence", unrolled(x, alpha, B, C), y)
_ = must_differ("decay that includes the token's own step", unrolled(x, alpha, B, C, first=0), y)

# %% [markdown] slide_title="A linear recurrence is a triangular matrix" slide_figure="03_duality"
# ## 2 · The recurrence is a matrix
#
# Equation 3.2 is linear in $x$, so it's a matrix times $x$: $y = Mx$. Read the entries off the sum:
#
# $$M_{ts} = C_t\; L_{ts}\; B_s, \qquad L_{ts} = \begin{cases}
#   \alpha_t\,\alpha_{t-1}\cdots \alpha_{s+1} & s \le t\\ 0 & s > t.\end{cases} \tag{3.3}$$
#
# Row $t$ is the token that reads (the *target*), column $s$ the token that writes (the *source*).
# $L$ holds the decays. It's lower triangular, since nobody can read a token before it is written.

# %% [markdown] slide_title="Sums of logarithms survive where products die"
# How would you compute $L$? You might keep one running product and divide two of its entries. But
# one reset makes the product zero, and so do 1,100 decays of 0.5, in float64. Then 0 / 0 is NaN. So
# add logarithms $g_t = \log\alpha_t$ instead. Write $g_t$ into row $t$, left of the diagonal. The
# exponents are the running sums down the columns. Each column starts its own sum, so nothing is
# ever subtracted:
#
# $$\begin{pmatrix} 0 & & \\ g_1 & 0 & \\ g_2 & g_2 & 0 \end{pmatrix}
#   \;\longrightarrow\;
#   \begin{pmatrix} 0 & & \\ g_1 & 0 & \\ g_1 + g_2 & g_2 & 0 \end{pmatrix}$$


# %%
def decay_matrix(log_alpha):
    """L of equation 3.3 from the log decays: (l,) -> (l, l)."""
    rows = log_alpha[:, None].expand(-1, len(log_alpha))
    sums = rows.tril(-1).cumsum(dim=0)  # column s starts after token s
    return sums.exp().tril()  # exp(0) = 1 above the diagonal: cut off


# %% [markdown]
# On paper, fill in $L$ for the four tokens of section 1. Does the cell agree with you?

# %% slide_title="Four tokens: the matrix does what the loop did"
x, alpha = torch.tensor([[1.0, 2.0, 0.0, 3.0], [0.5, 0.5, 0.9, 0.1]])
B, C = torch.tensor([[1.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.0, 2.0]])
L = decay_matrix(alpha.log())
M = C[:, None] * L * B  # rows times C_t, columns times B_s
print("L =", L.numpy().round(3), sep="\n")
check("y = M x", M @ x, unrolled(x, alpha, B, C))

# %% [markdown]
# Now we draw $L$ for a longer text with a steady decay, with a decay that varies, and with a reset
# at token 16. In which picture does an entry depend only on how far apart the two tokens are?

# %% tags=["setup"]
l = 32
steady = torch.full((l,), math.log(0.9))
varied = -random(l, seed=1).abs() / 4
reset = steady.clone()
reset[16] = -math.inf  # a decay of exactly 0
L_steady, L_varied, L_reset = (decay_matrix(g) for g in (steady, varied, reset))

# %% slide_title="A decay that depends on the token can wipe the slate clean" tags=["figure"]
pictures = {
    r"steady: every $\alpha_t$ = 0.9": L_steady,
    r"varied: $\alpha_t$ depends on t": L_varied,
    "reset at t = 16": L_reset,
}
fig, _ = plotting.heatmaps(
    pictures, xlabel="source s", ylabel="target t", signed=False, unit="decay $L_{ts}$"
)
plotting.save(
    fig,
    "03_decay_matrices",
    "Three lower triangular matrices with ones on the diagonal. With steady decay the entries "
    "depend only on the distance from the diagonal; with varied decay also on the place; with a "
    "reset at token 16 the block of rows from 16 on and columns before 16 is empty.",
)

# %% [markdown]
# The steady one. If $B$ and $C$ are constant too, the layer is a convolution (chapter 01). In the
# third picture, token 16 wipes the slate clean. A model that computes $\alpha_t$ from the token can
# choose when to forget, and is called *selective*.

# %% tags=["guard"]
_ = must_differ("target and source exchanged", M.T @ x, unrolled(x, alpha, B, C))
places = [(t, s) for t in range(4) for s in range(4)]
by_products = torch.tensor([alpha[s + 1 : t + 1].prod() * (s <= t) for t, s in places])
check("L from sums of logarithms = L from products", L, by_products.view(4, 4))
from_the_start = alpha.log()[:, None].expand(-1, 4).cumsum(dim=0).exp().tril()
_ = must_differ("sums that begin at token 0", from_the_start, L)
distance = torch.arange(l)[:, None] - torch.arange(l)
check("steady: L_ts is 0.9 to the power t - s", L_steady, (0.9**distance).tril())
neighbours = L_varied.diagonal(-1)
print(f"varied: entries beside the diagonal from {neighbours.min():.3f} to {neighbours.max():.3f}")
check("reset: from row 16 on, columns 0 to 15 are zero", L_reset[16:, :16], torch.zeros(16, 16))

# %% [markdown] slide_title="32 numbers fill in a block of 256"
# ## 3 · Its blocks have rank one
#
# Look at the empty corner of the third picture, then at the same corner of the second. That block
# says how tokens 0 to 15 influence tokens 16 to 31. It has 256 entries. How many numbers does it
# take to fill them in?
#
# Take any block that doesn't reach above the diagonal: rows from $t_1$ on, columns up to $s_2$,
# with $s_2 \le t_1$. On the way from column $s$ to row $t$, everything passes through token $s_2$.
# ($s_2$ is the block's last column, $t_1$ its first row.) So every entry is a product of two
# factors:
#
# $$L_{ts} = \underbrace{(\alpha_t \cdots \alpha_{s_2+1})}_{u_t}\;
#   \underbrace{(\alpha_{s_2} \cdots \alpha_{s+1})}_{v_s}
#   \qquad\text{so the block is } u\,v^\top.$$
#
# 16 + 16 numbers are enough, and the block has rank one (or zero, after a reset). The same goes for
# every block that doesn't reach above the diagonal. We test the largest of them, which touch it
# with their upper right corner:

# %%
L = decay_matrix(-random(32, seed=1).abs() / 4)  # the second picture
u, v = L[16:, 15], L[15, :16]  # 16 numbers each
check("the block is u times v", L[16:, :16], torch.outer(u, v))
ranks = [int(matrix_rank(L[i:, : i + 1])) for i in range(32)]
print("ranks of the", len(ranks), "largest blocks:", set(ranks))
above = int(matrix_rank(L[4:12, 0:9]))
print("rank of a block that reaches above the diagonal:", above)
assert set(ranks) == {1} and above > 1

# %% slide_title="The whole past has to fit through one number" tags=["figure", "slide"]
block = "block: rows 16 to 31, columns 0 to 15"
pictures = {block: L[16:, :16], "= column u": u[:, None], "× row v": v[None]}
fig, axes = plotting.heatmaps(pictures, signed=False, unit="decay")
for ax in axes:
    ax.set(xticks=[], yticks=[])
plotting.save(
    fig,
    "03_rank_one",
    "A block of 16 by 16 decays, and the column and the row of 16 numbers each whose products "
    "fill it in.",
)

# %% [markdown]
# Rank one means a bottleneck: everything the past can tell the future has to fit through one
# number. You've already met that number. It's the state.
#
# A lower triangular matrix is *$n$-semiseparable* if all the blocks that don't reach above the
# diagonal have rank at most $n$. The fast algorithm of section 5 rests on this property.

# %% [markdown] slide_title="A key and a value make the state a matrix" slide_figure="03_state:0"
# ## 4 · A wider state: attention without the softmax
#
# One number can't remember much, so let's make the state a matrix with $p$ rows and $n$ columns.
# Each token writes its *value* $x_t \in \mathbb{R}^p$ under a *key* $B_t \in \mathbb{R}^n$, and
# reads with a *query* $C_t \in \mathbb{R}^n$. A token's *step size* $\Delta_t \ge 0$ sets how much
# it writes and, with the *rate* $A \le 0$, how much of the past fades:
#
# $$h_t = e^{\Delta_t A}\, h_{t-1} + \Delta_t\, x_t B_t^\top, \qquad y_t = h_t\, C_t. \tag{3.4}$$
#
# In chapter 02's letters, $C$, $B$, $\Delta x$, $h$ and $\Delta A$ are $q$, $k$, $v$, $S$ and $g$.
#
# The rate is learned and doesn't depend on the token, but the step size does. If $\Delta_t = 0$,
# nothing fades and nothing is written. That's how the layer skips padding.


# %% slide_title="A token fades the state, writes into it, and reads it" tags=["figure", "slide"]
plotting.show_drawing(
    "03_state",
    "Equation 3.4 as grids of 3 by 4 numbers: the faded old state plus the product of a value and "
    "a key is the new state. A query of 4 numbers reads 3 numbers from it.",
)


# %% tags=["setup"]
def recurrence(x, dt, A, B, C):
    """Equation 3.4 for one head: x (l, p), dt (l,), B, C (l, n)."""
    state, outputs = torch.zeros(x.shape[1], B.shape[1]), []
    for t in range(len(x)):
        state = torch.exp(dt[t] * A) * state + dt[t] * torch.outer(x[t], B[t])
        outputs.append(state @ C[t])
    return torch.stack(outputs)


# %% [markdown] slide_title="With one decay, the sum becomes attention" slide_figure="03_masked"
# Now unroll it, as before. The decays $\alpha_t = e^{\Delta_t A}$ are plain numbers, so they can
# move to the front. Between reader $t$ and writer $s$, that leaves the inner product of a query and
# a key (∘ multiplies entry by entry):
#
# $$y_t = \sum_{s \le t} L_{ts}\,(C_t \cdot B_s)\,\Delta_s x_s
#   \qquad\Longleftrightarrow\qquad
#   Y = \big(L \circ C B^\top\big)\,(\Delta X). \tag{3.5}$$
#
# Rename $C \to Q$, $B \to K$, $\Delta X \to V$, and read it again: $(L \circ QK^\top)\,V$. It's
# causal attention, with two differences. There's no softmax, so the weights don't sum to 1. And the
# mask fades with distance, where attention's is just 0 or 1.
#
# In code it's one line (`recurrence`, in a folded cell, is (3.4)):

# %%
l, p, n = 24, 5, 4
x, B, C = random(l, p, seed=2), random(l, n, seed=3), random(l, n, seed=4)
dt, A = random(l, seed=5).abs() / 4, torch.tensor(-1.0)
y = recurrence(x, dt, A, B, C)
L, scores = decay_matrix(dt * A), C @ B.T
check("quadratic form = recurrence", (L * scores) @ (dt[:, None] * x), y)

M = L * scores * dt  # acts on x: column s times dt_s
ranks = [int(matrix_rank(M[i:, : i + 1])) for i in range(l)]
print(f"n = {n}; ranks of the largest blocks:", *ranks)

# %% slide_title="The mask hides the future and lets the past fade" tags=["figure", "slide"]
pictures = {"decays L": L, r"scores $C B^\top$": scores, r"$L \circ C B^\top$": L * scores}
fig, _ = plotting.heatmaps(pictures, xlabel="source s", ylabel="target t", limit=4.0)
plotting.save(
    fig,
    "03_masked",
    "Three matrices of 24 tokens: the decays, lower triangular; the scores, which fill the whole "
    "square; and their product, lower triangular again.",
)

# %% [markdown]
# That's the **duality**: a recurrence with a state on one side, attention without its softmax on
# the other, computing the same function. The ranks have grown from 1 to $n$: entry $i$ of keys and
# queries adds a block of rank one, $C_{t,i}\,L_{ts}\,B_{s,i}\,\Delta_s$, and there are $n$ entries.
# (At the ends, blocks have fewer rows or columns.)
#
# If nothing fades ($A = 0$, $\Delta = 1$), the mask is the usual causal one, and you get *linear
# attention*. With the decay, it's chapter 02's gated rule with one gate per token. Section 8 asks
# why a head's whole state fades at one rate.

# %% tags=["guard"]
quiet, others = dt.clone(), torch.arange(l) != 10
quiet[10] = 0.0
without = recurrence(x[others], dt[others], A, B[others], C[others])
check("token 10 with Δ = 0 = token 10 left out", recurrence(x, quiet, A, B, C)[others], without)
_ = must_differ("token 10 with its own Δ", y[others], without)

# %% tags=["guard"]
_ = must_differ("mask forgotten: attention to the future", scores @ (dt[:, None] * x), y)
_ = must_differ("step size forgotten in the write", (L * scores) @ x, y)
q, k, v = (t[None, :, None] for t in (C, B, dt[:, None] * x))  # (b, l, h, ·)
log_gates = (dt * A)[None, :, None]
gated = gated_linear_attention(q, k, v, log_gates)[0, :, 0]
check("gated linear attention = equation 3.4", gated, y)
swapped = gated_linear_attention(k, q, v, log_gates)[0, :, 0]
_ = must_differ("queries and keys exchanged", swapped, y)

nothing_fades = recurrence(x, torch.ones(l), torch.tensor(0.0), B, C)
by_sums = torch.stack([sum((C[t] @ B[s]) * x[s] for s in range(t + 1)) for t in range(l)])
check("α = 1 gives the causal mask", decay_matrix(torch.zeros(l)), torch.ones(l, l).tril())
check("α = 1, Δ = 1: linear attention", nothing_fades, by_sums)
_ = must_differ("α < 1 is not linear attention", recurrence(x, torch.ones(l), A, B, C), by_sums)

# %% [markdown] slide_title="We want few states and many products"
# ## 5 · Cut it into chunks
#
# The recurrence goes one token at a time. The quadratic form does everything at once, but for
# 65,536 tokens the float32 matrices of 8 heads take up 128 GiB. Is there nothing in between?
#
# Chapter 01 had a scan, which needs only 16 rounds for 65,536 tokens. But our scan writes down the
# state after *every* token: with $p = 64$ and $n = 128$, 2 GiB for each head. Mamba's kernel keeps
# its states on the chip, but then they have to be small. And a scan's work is additions and
# scalings, while a GPU is fastest at matrix products. We want few states and many products.
#
# Go back to the picture at the top. Cut the sequence into $c$ chunks of $l_c$ tokens. The blue
# blocks are attention inside a chunk, a small problem that we've already solved. The trouble is the
# green blocks: about $c^2/2$ of them. But by section 4 each has rank at most $n$. So we never fill
# them in. Each chunk *writes* a summary, we *carry* it forward, and later tokens *read* it.
#
# Let $\sigma_t$ be the log decay from the start of $t$'s own chunk up to *and including* token $t$:
# it starts again in every chunk. At a chunk's first token it's already $g_t$, since the old state
# fades before it's read. At the end of chunk $j$ it's $\sigma_{\text{end}}$, and the whole chunk
# decays by $a_j = e^{\sigma_{\text{end}}}$. On its way from chunk $j$ to chunk $i$, a write fades
# to the end of its chunk, over the chunks in between, and until it's read. With chunks of four, the
# write of token 2 fades by $\alpha_3$, by nothing in between, and by $\alpha_4 \alpha_5 \alpha_6$
# until token 6 reads it. So a green block is a tall matrix times a number times a wide one:
#
# $$M_{\text{block } ij} = \underbrace{\hat C_i}_{l_c \times n}\;
#   (a_{j+1} \cdots a_{i-1})\; \underbrace{\hat B_j^\top}_{n \times l_c} \tag{3.6}$$
#
# and its entry for tokens $t$ and $s$ is
#
# $$M_{ts} =
#   \underbrace{e^{\sigma_t}\, C_t}_{\text{read}}\;\cdot\;
#   \underbrace{a_{j+1} \cdots a_{i-1}}_{\text{carry}}\;\cdot\;
#   \underbrace{e^{\sigma_{\text{end}} - \sigma_s}\; B_s\,\Delta_s}_{\text{write}} \tag{3.7}$$
#
# Row $t$ of $\hat C_i$ is $e^{\sigma_t} C_t$, and row $s$ of $\hat B_j$ is the factor marked
# *write*. (The picture puts the carry, one number, on an $n \times n$ diagonal.) Between
# neighbouring chunks, the carry is 1.
#
# Look at step 4 of the picture below: one state serves *all* green blocks of its rows.


# %% slide_title="Inside, write, carry, read: four steps on one matrix" tags=["figure"]
plotting.show_drawing(
    "03_steps",
    "Four steps on a lower triangular matrix of 12 tokens in three chunks, and a block in factors. "
    "Inside: the three triangles on the diagonal are lit. Write: the columns of each chunk flow "
    "down into a state, a grid of 3 by 2 numbers. Carry: from left to right each grid fades and "
    "adds the next. Read: the grids stand at the left of the rows that they enter, and all blocks "
    "below the diagonal are lit. At the right: a green block is a tall matrix, read, times a small "
    "one with one number on its diagonal, carry, times a wide one, write.",
)

# %% [markdown]
# Try one head, with 4 chunks of 8 random tokens and $n = 2$. Below the diagonal, the
# blocks of $M$ should have rank at most 2:


# %% tags=["setup", "experiment"]
def inputs(b=2, l=29, h=4, p=5, g=2, n=3, dt=0.3, seed=0):
    """Random inputs of SSD: step sizes around dt, rates A from -1 to -8 over the heads."""
    A = -1.0 - 7.0 * torch.arange(h) / max(h - 1, 1)
    return (
        random(b, l, h, p, seed=seed),
        dt * random(b, l, h, seed=seed + 1).abs(),
        A,
        random(b, l, g, n, seed=seed + 2),
        random(b, l, g, n, seed=seed + 3),
    )


# %% tags=["aside"]
c, l_c, p, n = 4, 8, 5, 2
x, dt, A, B, C = inputs(b=1, l=c * l_c, h=1, g=1, p=p, n=n, dt=0.1)
M = ssd.semiseparable_matrix(dt, A, B, C)[0, 0]  # as in section 4
blocks = rearrange(M, "(i t) (j s) -> i j t s", t=l_c, s=l_c)
ranks = matrix_rank(blocks)
print(ranks)


# %% tags=["guard"]
x_c, B_c, C_c = (t[0, :, 0].unflatten(0, (c, l_c)) for t in (x, B, C))
dt_c = dt[0, :, 0].unflatten(0, (c, l_c))
sigma = (dt_c * A).cumsum(dim=1)  # (c, t): as in (3.7)
chunks = [slice(i * l_c, (i + 1) * l_c) for i in range(c)]
prefixes = [slice(0, i * l_c) for i in range(c)]  # all that comes before each chunk
assert [ranks[i, j] for i in range(c) for j in range(i)] == 6 * [n] and (ranks.diag() == l_c).all()

# %% [markdown]
# **Step 1: attention inside each chunk.** The quadratic form, on 8 tokens instead of 32, fills in
# the diagonal blocks. Every axis has a name: c for the chunk, t and s for target and source within
# it, and the axis that is missing after an arrow is summed (a folded cell cuts `x_c` and the
# others into chunks, and `sigma` has $\sigma_t$):

# %% slide_title="Step 1 fills in the blocks on the diagonal" slide_figure="03_steps:0"
L = torch.stack([decay_matrix(g) for g in dt_c * A])  # (c, t, s)
scores = einsum("ctn,csn->cts", C_c, B_c)
inside = L * scores * dt_c[:, None, :]
y_inside = einsum("cts,csp->ctp", inside, x_c)
check("step 1 fills the diagonal blocks", inside, torch.stack([blocks[i, i] for i in range(c)]))


# %% tags=["setup"]
def states_after(pieces):
    """What the tokens of each piece leave behind, starting from an empty state: (c, p, n)."""
    states = []
    for piece in pieces:
        tokens = (x[:, piece], dt[:, piece], A, B[:, piece], C[:, piece])
        states.append(ssd.ssd_recurrent(*tokens, return_final_state=True)[1][0, 0])
    return torch.stack(states)


# %% [markdown]
# **Step 2: write.** If a chunk started with an empty state, what would it leave behind? The writes
# of all its tokens, each faded until the end of the chunk:

# %% slide_title="Step 2 writes down what each chunk leaves behind" slide_figure="03_steps:1"
to_end = (sigma[:, -1:] - sigma).exp()  # (c, s)
written = einsum("cs,csn,csp->cpn", to_end * dt_c, B_c, x_c)
check("step 2 = the state of each chunk run alone", written, states_after(chunks))

# %% [markdown]
# **Step 3: carry.** The recurrence again, from chunk to chunk: fade by the decay over the
# whole chunk, then add what it wrote. That takes $c$ steps instead of $l$:

# %% slide_title="Step 3 carries the states from chunk to chunk" slide_figure="03_steps:2"
state, incoming = torch.zeros(p, n), []
for decay, write in zip(sigma[:, -1].exp(), written, strict=True):
    incoming.append(state)
    state = decay * state + write
incoming = torch.stack(incoming)  # (c, p, n): at chunk starts
check("step 3 gives each chunk the state of the recurrence", incoming, states_after(prefixes))

# %% [markdown]
# **Step 4: read.** Each token queries the state its chunk started with, faded up to that token:

# %% slide_title="Step 4 reads the state that each chunk started with" slide_figure="03_steps:3"
y_between = einsum("ct,ctn,cpn->ctp", sigma.exp(), C_c, incoming)
y = ssd.ssd_recurrent(x, dt, A, B, C)[0, :, 0]
check("four steps = recurrence", (y_inside + y_between).flatten(0, 1), y)
_ = must_differ("step 4 left out", y_inside.flatten(0, 1), y)

# %% [markdown] slide_title="The rest is bookkeeping for heads and groups"
# ## 6 · All heads, in two dozen lines
#
# The rest is bookkeeping, for all sequences and heads at once. `carry_in_turn` is the loop of step
# 3. `in_chunks` cuts the tensors into chunks, and copies keys and queries, which heads share in
#    groups, as in grouped-query attention: with $h$ heads and $g$ groups, head $i$ uses group
#    $\lfloor i / (h/g) \rfloor$:


# %% tags=["setup", "experiment"]
def in_chunks(x, dt, A, B, C, l_c):
    """The writes v = Δx, B, C and σ, each as (b, h, c, l, ...)."""
    B, C = (ssd.expand_groups(t, x.shape[2]) for t in (B, C))
    v, B, C, log_alpha = (
        rearrange(t, "b (c l) h ... -> b h c l ...", l=l_c)
        for t in (dt[..., None] * x, B, C, dt * A)
    )
    return v, B, C, log_alpha.cumsum(-1)


# %% tags=["setup", "experiment"]
def carry_in_turn(writes, over_chunk):
    """Step 3: what chunks write (b, h, c, p, n) -> the states they start from."""
    state, incoming = torch.zeros_like(writes[:, :, 0]), []
    for i in range(writes.shape[2]):
        incoming.append(state)
        decay = over_chunk[:, :, i, None, None].exp()
        state = decay * state + writes[:, :, i]
    return torch.stack(incoming, dim=2)


# %% tags=["experiment"]
def four_steps(x, dt, A, B, C, *, l_c, carry=carry_in_turn):
    """SSD in chunks of l_c tokens; l is a multiple of l_c."""
    v, B, C, sigma = in_chunks(x, dt, A, B, C, l_c)  # v is Δx
    # Above the diagonal, the difference is positive, and its exp may be inf.
    L = (sigma[..., :, None] - sigma[..., None, :]).tril().exp().tril()
    scores = einsum("bhctn,bhcsn->bhcts", C, B)
    inside = einsum("bhcts,bhcsp->bhctp", L * scores, v)  # 1: inside
    to_end = (sigma[..., -1:] - sigma).exp()
    writes = einsum("bhcs,bhcsn,bhcsp->bhcpn", to_end, B, v)  # 2: write
    incoming = carry(writes, sigma[..., -1])  # 3: carry
    between = einsum("bhct,bhctn,bhcpn->bhctp", sigma.exp(), C, incoming)  # 4: read
    return rearrange(inside + between, "b h c t p -> b (c t) h p")


# %% [markdown]
# `L` isn't section 2's any more. There, columns had their own sums. Here, we subtract two entries
# of one sum. That's cheaper, but a decay of exactly 0 would give NaN, and a difference of large
# numbers loses digits: for 256 tokens in float32 with log decays down to −5, entries of `L` above
# 1e-6 are off by up to 6e-5, relative, against 5e-7 with a sum per column. So `ssd_chunked` sums in
# float64. The real kernel doesn't, and lab 03a finds the trace.
#
# Now for the size of a chunk. Chunks of 1 *are* the recurrence, one of 72 is the quadratic form.
# What do you expect in between?

# %% slide_title="Every chunk size computes the same function" tags=["figure", "slide"]
plotting.show_drawing(
    "03_chunk_sizes",
    "The lower triangle of 72 tokens four times, in chunks of 1, 8, 24 and 72. Attention takes the "
    "triangles on the diagonal, the state what is below: nearly all in chunks of 1, nothing in one "
    "chunk of 72.",
)

# %%
x, dt, A, B, C = inputs(l=72)
y = ssd.ssd_recurrent(x, dt, A, B, C)
sizes = (1, 8, 24, 72)
outputs = [four_steps(x, dt, A, B, C, l_c=l_c) for l_c in sizes]
check(f"four steps in chunks of {sizes} = recurrence", torch.stack(outputs), torch.stack(4 * [y]))

# %% [markdown]
# All agree, so pick what suits your hardware. The package's
# `ssd_chunked` takes texts of any length.
#
# **Generating text** goes one token at a time. Read the prompt in chunks, keep the final state, and
# carry on with `ssd_step`. A head's state is $p\,n$ numbers, whether it has seen ten tokens or ten
# million.

# %% tags=["guard"]
log_alpha = -5 * torch.rand(256, generator=torch.Generator().manual_seed(0)).float()
truth, running = decay_matrix(log_alpha.double()), log_alpha.cumsum(0)
by_difference = (running[:, None] - running).tril().exp().tril()
large, forms = truth > 1e-6, (by_difference, decay_matrix(log_alpha))
off = [((form - truth).abs() / truth)[large].max().item() for form in forms]
assert 2e-5 < off[0] < 2e-4 and off[1] < 2e-6

# %% tags=["guard"]
prompt = (t[:, :50] if t.ndim > 1 else t for t in (x, dt, A, B, C))
_, state = ssd.ssd_chunked(*prompt, return_final_state=True)
decoded = []
for t in range(50, 72):
    token = (x[:, t], dt[:, t], A, B[:, t], C[:, t])
    y_t, state = ssd.ssd_step(*token, state)
    decoded.append(y_t)
check("prompt in chunks, then step by step = one pass", torch.stack(decoded, 1), y[:, 50:])

x, dt, A, B, C = inputs(l=77)
y, final = ssd.ssd_recurrent(x, dt, A, B, C, return_final_state=True)
got, state = ssd.ssd_chunked(x, dt, A, B, C, chunk_size=16, return_final_state=True)
check("chunks of 16 = recurrence", got, y)
check("chunks of 16: same final state", state, final)
M = ssd.semiseparable_matrix(dt, A, B, C)  # (b, h, t, s)
check("y = M x for every head", einsum("bhts,bshp->bthp", M, x), y)

# %% [markdown] slide_title="Chunks do three times the work, as matrix products"
# ## 7 · What each form costs
#
# Which form needs the fewest operations? We count matrix products and updates of the state for a
# real head, with $p = 64$, $n = 128$, 65,536 tokens and chunks of 256. The chunked form comes
# second in both columns:
#
# | form | FLOPs per token | sequential steps |
# |---|---|---|
# | recurrent | 40,960 | 65,536 |
# | quadratic | 25,165,824 | 1 |
# | chunked | 131,136 | 256 |
#
# Per token, the recurrence takes $5pn$: fade, form the write, add, and two to read. The quadratic
# form takes $2l(n+p)$. Ours takes $2l_cn$ for the scores, $2l_cp$ to apply them, $2pn$ to write,
# $2pn$ to read, and a little for the carry.
#
# Did you guess the *recurrence*? The quadratic form loses to it from 107 tokens on. (If it skips
# the half above the diagonal, from 214.) Our chunks take fewer sequential steps, and almost all
# their operations are matrix products. At its peak, an A100 does 312 trillion operations per second
# inside matrix products, on its *tensor cores* in 16 bits, and 19.5 trillion elsewhere, in float32.
# You pay three times the operations at up to sixteen times the rate: eight for the tensor cores
# times two for the shorter numbers. That's why Mamba-2 could afford states of $n = 128$ where Mamba
# had 16: inside a matrix product, a larger state is cheap. Chapter 10 measures it on a CPU.


# %% tags=["setup"]
def flops(function, length, h=2, p=16, n=16):
    """FLOPs of the matrix products for one row and one group of heads."""
    with FlopCounterMode(display=False) as counter:
        function(*inputs(b=1, l=length, h=h, p=p, g=1, n=n))
    return counter.get_total_flops()


# %% tags=["guard"]
# What PyTorch counts: no updates of the state; in the chunked form the heads of a group share their
# scores; the quadratic form also reads an initial state and makes the final one.
h, p, n, l_c = 2, 16, 16, 64
for l in (128, 1024):
    forms = (ssd.ssd_recurrent, ssd.ssd_quadratic, ssd.ssd_chunked)
    recurrent, quadratic, chunked = (flops(function, l) for function in forms)
    assert recurrent == 2 * l * h * p * n
    assert quadratic == 2 * l**2 * h * (n + p) + 4 * l * h * p * n
    assert chunked == 2 * l * l_c * (n + h * p) + 4 * l * h * p * n
    print(f"l = {l:5,}, FLOPs: {recurrent:9,}, {quadratic:11,}, {chunked:9,}: formula = count")

p, n = 64, 128  # of a real layer, per head and token
costs = [5 * p * n, 2 * 65_536 * (n + p), 2 * 256 * (n + p) + 4 * p * n + 2 * p * n / 256]
steps = [65_536, 1, 65_536 // 256]
assert (
    costs == [40_960, 25_165_824, 131_136] and steps[2] == 256 and 3.0 < costs[2] / costs[0] < 3.3
)
assert [2 * l * (n + p) > costs[0] for l in (106, 107)] == [False, True]
assert [l * (n + p) > costs[0] for l in (213, 214)] == [False, True]
assert 65_536 * p * n * 4 == 2 * 2**30 and 312 / 19.5 == 16  # a scan's states; the two rates

# %% slide_title="Chunks come second in work and in steps" tags=["figure", "slide"]
fig, axes = plotting.figure(1, 2, size=(12, 4.6))
colors = [*2 * [plotting.COLORS[0]], plotting.COLORS[2]]
counts = {"FLOPs per token": costs, "sequential steps": steps}
for ax, (title, numbers) in zip(axes, counts.items(), strict=True):
    bars = ax.bar(["recurrent", "quadratic", "chunked"], numbers, color=colors)
    ax.bar_label(bars, fmt="{:,.0f}", fontsize=16)
    ax.set(yscale="log", ylim=(0.5, 10 * max(numbers)), title=title)
plotting.save(
    fig,
    "03_costs",
    "FLOPs per token and sequential steps of the three forms, on logarithmic axes. The recurrence "
    "has the fewest FLOPs and the most steps, the quadratic form the most FLOPs and one step; the "
    "chunked form stands between them in both.",
)

# %% [markdown] slide_title="With a rate per entry, no single mask will do" slide_figure="03_masks"
# ## 8 · Why one decay per head
#
# Mamba, from the end of chapter 01, has more freedom than SSD: every entry $i$ of its state fades
# at its own rate $A_i$. Why would SSD give that up? Unroll Mamba, for one channel of input. With a
# single rate, $L_{ts}$ would come out of the inner sum and leave $C_t \cdot B_s$, but now every
# entry has its own matrix of decays, $L^{(i)}$:
#
# $$y_t = \sum_{s \le t} \Big( \sum_i C_{t,i}\; L^{(i)}_{ts}\; B_{s,i} \Big)\, \Delta_s x_s.
#   \tag{3.8}$$
#
# No single mask will do. A folded cell runs Mamba's recurrence on 24 tokens.


# %% tags=["guard"]
def diagonal_matrix(dt, A, B, C):
    """M of equation 3.8: dt (l,), A (n,), B, C (l, n) -> (l, l)."""
    masks = [decay_matrix(dt * rate) for rate in A]
    return sum(masks[i] * torch.outer(C[:, i], B[:, i]) for i in range(len(A))) * dt


l, n = 24, 4
x, B, C = random(l, 1, seed=6), random(l, n, seed=7), random(l, n, seed=8)
dt, A = random(l, seed=9).abs() / 4, -torch.arange(1.0, n + 1)
y = selective_scan(x[None], dt[None, :, None], A[None], B[None], C[None])[0]  # chapter 01's
M = diagonal_matrix(dt, A, B, C)
check("sum of n masked rank-one terms = Mamba's recurrence", M @ x, y)
factored = decay_matrix(dt * A.mean()) * (C @ B.T) * dt
_ = must_differ("one decay pulled out of the sum", factored @ x, y)
check("equal rates: it can be", diagonal_matrix(dt, A.mean().expand(n), B, C), factored)
grown = torch.tensor(16 * 0.1 * 64).exp()  # exp(-Aτ) after 64 steps of 0.1, for a rate of -16
print(f"exp(-Aτ) after 64 tokens: {grown:.0e},  in float32: {grown.float()}")
assert grown.float().isinf() and decay_matrix(dt * A.mean()).max() == 1

# %% slide_title="Four rates make four masks" tags=["figure", "slide"]
pictures = {f"rate {rate:.0f}": decay_matrix(dt * rate) for rate in A}
fig, _ = plotting.heatmaps(pictures, xlabel="source s", signed=False, unit="decay", size=(13, 4))
plotting.save(
    fig,
    "03_masks",
    "Four lower triangular matrices of decays, for the rates -1 to -4: the faster the rate, the "
    "narrower the band along the diagonal.",
)

# %% [markdown]
# Now try another way. Let $\tau_t = \Delta_0 + \dots + \Delta_t$ be the
# time up to token $t$. Then $L^{(i)}_{ts} = e^{A_i\tau_t}\, e^{-A_i\tau_s}$ for $s \le t$. One
# factor can move into $C$ and the other into $B$:
#
# $$\tilde C_{t,i} = e^{A_i\tau_t}\, C_{t,i}, \qquad
#   \tilde B_{s,i} = e^{-A_i\tau_s}\, B_{s,i}, \qquad
#   y_t = \sum_{s \le t} (\tilde C_t \cdot \tilde B_s)\, \Delta_s x_s.$$
#
# That's a single matrix product again, under a mask of ones and zeros. Does it
# agree with Mamba's recurrence?

# %% slide_title="Moved into C and B, the decays cost range"
tau = dt.cumsum(0)[:, None]
scores = ((tau * A).exp() * C) @ ((-tau * A).exp() * B).T
check("decays moved into C and B = Mamba's recurrence", (scores.tril() * dt) @ x, y)

# %% tags=["guard"]
assert [rate * 0.1 * 64 > math.log(torch.finfo(torch.float32).max) for rate in (1, 4, 16)] == [
    False, False, True]  # fmt: skip

# %% slide_title="At a rate of −16, float32 overflows within 64 tokens" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(12, 4.8))
t = torch.arange(1, 65)
curves = {f"rate −{rate}": (rate * 0.1 * t).exp() for rate in (1, 4, 16)}
plotting.lines(ax, t, curves, yscale="log", xlabel="tokens, with steps of 0.1", legend="right")
plotting.level(ax, torch.finfo(torch.float32).max, "  the largest float32", side="left")
ax.set_title(r"the factor $e^{-A_i\tau_s}$ in $\tilde B$")
plotting.save(
    fig,
    "03_range",
    "The factor that a key gets, over 64 tokens with step sizes of 0.1, on a logarithmic axis. For "
    "a rate of -16 it crosses the largest float32; for -1 and -4 it stays far below.",
)


# %% [markdown]
# So a rate for every entry costs *range*. The faster an entry fades, the faster $e^{-A_i\tau_s}$
# grows: at a rate of −16 with step sizes of 0.1, it's $3 \cdot 10^{44}$ after 64 tokens, more than
# float32 can hold. In $L$, by contrast, no entry exceeds 1. And Mamba's channels have their own
# step sizes and rates, which costs *work*: each channel needs its own product, while the $p$
# channels of a head with one decay share one. That's the choice of Mamba-2, and of Cheems.

# %% [markdown] slide_title="A published sum runs the wrong way"
# ## 9 · A mistake in print
#
# WM's Listing 3 does step 3 for all chunks at once, with a matrix of decays. Take three chunks, and
# let $W_j$ be what chunk $j$ writes. Columns are sources: the empty state in front of the text,
# $W_0$, $W_1$ and $W_2$. Rows are targets: the starts of the three chunks, and the end:
#
# $$D = \begin{pmatrix} 1 & 0 & 0 & 0 \\ a_0 & 1 & 0 & 0 \\ a_0 a_1 & a_1 & 1 & 0 \\
#   a_0 a_1 a_2 & a_1 a_2 & a_2 & 1 \end{pmatrix} \tag{3.9}$$
#
# A chunk should start from the sum along its row, over the sources (`dim=3` in the listing). The
# paper prints `.sum(dim=2)`, which runs down a column, over the targets. What does chunk 2 get?

# %% slide_title="Down the column, chunk 2 forgets the past and hears the future" tags=["figure"]
plotting.show_drawing(
    "03_row_and_column",
    "Step 3 twice: three chunks in a row, and the matrix of (3.9) below. Corrected: W_0, faded by "
    "a_1, and W_1 arrive at the start of chunk 2; the row of chunk 2 is lit, and its sum is "
    "a_1 W_0 + W_1. As printed: W_0 is lost, and a second copy of W_1, faded by chunk 2 itself, "
    "comes back from the future; the column of W_1 is lit, and its sum is W_1 + a_2 W_1.",
)

# %% [markdown]
# A sum leaves a list, and its entry 2 goes to chunk 2. Summed along the rows, entry 2 is chunk 2's
# own. Summed down the columns it's the third source's, $W_1$'s. So chunk 2 has forgotten $W_0$, and
# hears $W_1$ twice. The second time it's faded by $a_2$, the decay over chunk 2 itself, so even its
# first token feels the step sizes of tokens that come later. The Mamba-2 code in the transformers
# library had the same bug (issue 34817, fixed by pull request 35154). The fix never reached Zamba2,
# and Nemotron-H inherited Zamba2's code. Somebody noticed in 2026 (issue 47246, pull request
# 47250). Only the path without CUDA kernels was wrong.


# %% tags=["setup"]
def carry_at_once(writes, over_chunk, dim):
    """Step 3 as in WM Listing 3; `dim` is the axis of its sum."""
    states = pad(writes, (0, 0, 0, 0, 1, 0))  # (b, h, 1 + c, p, n): a zero state, then all W
    sums = pad(over_chunk, (1, 0)).cumsum(-1)  # (b, h, 1 + c)
    D = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()  # (3.9)
    products = D[..., None, None] * states[:, :, None]  # (b, h, target, source, p, n)
    return products.sum(dim=dim)[:, :, :-1]  # the end of the text starts no chunk


as_printed = partial(carry_at_once, dim=2)  # WRONG: over the targets
corrected = partial(carry_at_once, dim=3)  # right: over the sources

# %% [markdown]
# Would a test catch it? With one chunk, the printed sum passes. With two or four, it fails:

# %% tags=["aside"]
x, dt, A, B, C = inputs(l=32, dt=0.05)
y = ssd.ssd_recurrent(x, dt, A, B, C)
check("one chunk, as printed", four_steps(x, dt, A, B, C, l_c=32, carry=as_printed), y)
for l_c in (16, 8):
    printed = four_steps(x, dt, A, B, C, l_c=l_c, carry=as_printed)
    size = must_differ(f"{32 // l_c} chunks, as printed", printed, y, at_least=0.1)
    print(f"  largest error, relative: {size:.3f}")
    check(f"{32 // l_c} chunks, corrected", four_steps(x, dt, A, B, C, l_c=l_c, carry=corrected), y)

# %% slide_title="A test with one chunk passes; with two or four it fails" tags=["figure", "slide"]
fig, axes = plotting.figure(3, 1, size=(12, 5.4))
for ax, (l_c, name) in zip(axes, {32: "one chunk", 16: "two", 8: "four"}.items(), strict=True):
    printed = four_steps(x, dt, A, B, C, l_c=l_c, carry=as_printed)
    error = (printed - y).abs().amax(dim=(0, 2, 3)) / y.abs().max()
    ax.bar(torch.arange(32) + 0.5, error, 0.92, color=plotting.COLORS[1])
    ax.set(xlim=(0, 32), ylim=(0, 0.8), title=f"{name}: relative error of each output")
plotting.save(
    fig,
    "03_errors",
    "The error of 32 outputs, as printed. One chunk: none. Two chunks: none in the first, up to "
    "0.34 in the second. Four: none in the first, up to 0.76 after it.",
)

# %% tags=["guard"]
for l_c in (32, 16, 8):
    error = (four_steps(x, dt, A, B, C, l_c=l_c, carry=as_printed) - y).abs().amax(dim=(0, 2, 3))
    assert error[:l_c].max() < 1e-12 and (l_c == 32 or error[l_c:].max() > 0.1)

# %% [markdown]
# You don't even need the right answer. Change the step size of the last token, then of the first,
# and see which outputs move:


# %% tags=["setup"]
def moved(token, dt, function):
    """First and last token whose output one token's step size changes."""
    later = dt.clone()
    later[:, token] += 0.5
    change = (function(later) - function(dt)).abs().amax(dim=(0, 2, 3))
    places = (change > 1e-12).nonzero()
    return f"token {token} moves outputs {int(places[0])} to {int(places[-1])}"


# %% tags=["aside"]
moves = {}
for name, carry in (("as printed", as_printed), ("corrected", corrected)):
    run = partial(four_steps, x, A=A, B=B, C=C, l_c=8, carry=carry)
    moves[name] = f"{moved(31, dt, run)}, {moved(0, dt, run)}"
    print(f"{name:10}: {moves[name]}")
assert "31 moves outputs 8 to 31" in moves["as printed"]


# %% tags=["figure"]
def draw_moved(ax, run, dt, title):
    """A row of outputs for a change of token 31, one for a change of token 0; what moves is lit.

    Green is an output that may move, vermilion one that comes before the token.
    """
    for row, token in enumerate((31, 0)):
        later = dt.clone()
        later[:, token] += 0.5
        change = (run(later) - run(dt)).abs().amax(dim=(0, 2, 3)) > 1e-12
        for t, moves in enumerate(change.tolist()):
            color = plotting.COLORS[2 if t >= token else 1] if moves else "#ececec"
            ax.bar(t + 0.5, 0.6, 0.92, bottom=-row - 0.3, color=color)
        ax.plot(token + 0.5, 0.42 - row, "v", color=plotting.INK, markersize=11)
    for border in (8, 16, 24):
        ax.axvline(border, color=plotting.QUIET, lw=1)
    ax.set(xlim=(0, 32), ylim=(-1.6, 0.8), title=title, xlabel="output (four chunks of 8)")
    ax.set_yticks([0, -1], ["token 31", "token 0"], fontsize=15)
    ax.tick_params(axis="y", pad=16)


# %% slide_title="The last token moves output 8: the layer looks ahead" tags=["figure", "slide"]
fig, axes = plotting.figure(2, 1, size=(12, 5.4))
for ax, (name, carry) in zip(
    axes, {"as printed": as_printed, "corrected": corrected}.items(), strict=True
):
    draw_moved(ax, partial(four_steps, x, A=A, B=B, C=C, l_c=8, carry=carry), dt, name)
plotting.save(
    fig,
    "03_moved",
    "For both versions of step 3 two rows of 32 outputs. As printed, a change of token 31 moves "
    "outputs 8 to 31, and one of token 0 outputs 0 to 15. Corrected, token 31 moves output 31 "
    "alone, and token 0 moves all.",
)


# %% [markdown] slide_title="A causality test must change the step sizes, too"
# It **leaks the future** (token 31 changes output 8) and forgets the past (token 0 is gone after
# output 15). The *value* of token 31 stays where it belongs: chunk $i$ gets $W_{i-1}$ and
# decays, so nothing that later tokens say gets in. A causality test that changes only values would
# have passed this layer.
#
# So how should you test such a layer?
#
# - Take more than one chunk.
# - Take step sizes so small that something survives a chunk.
# - Take $1 < g < h$, or you can't tell repeated groups (0, 0, 1, 1) from tiled ones (0, 1, 0, 1).
# - For causality, change the step sizes too, not only the values.


# %% tags=["setup"]
def slip(step, l_c):
    """The error of the printed step 3, relative, for 4 heads and one step size for 1,024 tokens."""
    x, _, _, B, C = inputs(b=1, l=1024, seed=20)
    dt, A = torch.full((1, 1024, 4), step), -torch.arange(1.0, 5.0)
    y = ssd.ssd_chunked(x, dt, A, B, C)
    printed = four_steps(x, dt, A, B, C, l_c=l_c, carry=as_printed)
    return ((printed - y).abs().max() / y.abs().max()).item()


# %% tags=["guard"]
assert moves["as printed"] == "token 31 moves outputs 8 to 31, token 0 moves outputs 0 to 15"
assert moves["corrected"] == "token 31 moves outputs 31 to 31, token 0 moves outputs 0 to 31"
print("step size          0.69     0.01    0.001")
for l_c in (64, 256):
    errors = [slip(step, l_c) for step in (0.69, 0.01, 0.001)]
    shown = [f"{e:8.2g}" if e > 1e-12 else "  <1e-12" for e in errors]
    print(f"chunks of {l_c:3}:", *shown)
    assert errors[0] < 1e-12 < errors[1] < errors[2]

W, a = random(3, seed=21), torch.tensor([0.3, 0.5, 0.7])  # three chunks, as in the table
form = dict(writes=W.view(1, 1, 3, 1, 1), over_chunk=a.log().view(1, 1, 3))
printed, right = (carry(**form).flatten()[2] for carry in (as_printed, corrected))
check("chunk 2 starts from the sums of the picture, as printed", printed, W[1] + a[2] * W[1])
check("and corrected", right, a[1] * W[0] + W[1])

# %% [markdown] slide_title="The real kernels take the same four steps" slide_figure="03_steps"
# ## 10 · The kernel that models are trained on
#
# Nobody trains a large model with our two dozen lines. Mamba-2 runs on the kernels of the library
# mamba-ssm: programs for a GPU, written by hand in *Triton*, five for the forward pass and nine for
# the backward pass. They take the same four steps. Do they compute (3.4)?
#
# You don't need a GPU to find out. Triton has an interpreter that runs the kernels' source on a
# CPU, slowly. With a GPU, the cell below runs the compiled kernels. (Where mamba-ssm can't be
# installed, it reads saved results from a run in the interpreter.)
#
# Don't expect agreement to $10^{-10}$, because the kernels compute in float32. Both sides get the
# same float32 numbers, the recurrence computes with them in float64, and we ask for $10^{-5}$. The
# inputs follow the list in section 9: two chunks (a kernel's chunk has at least 16 tokens, and our
# text has 24), small steps, two groups for four heads. A program can compute the right values and
# still have the wrong gradient, so we compare the gradients of all seven inputs, too: the five of
# (3.4), the weight $D$ of a skip connection, and an initial state.


# %% tags=["setup", "experiment"]
def kernel_inputs():
    """All seven inputs of SSD, as numbers that float32 can represent."""
    skip, state = random(4, seed=50), random(1, 4, 4, 4, seed=51)
    tensors = *inputs(b=1, l=24, h=4, p=4, g=2, n=4, dt=0.1, seed=40), skip, state
    return [t.float().double() for t in tensors]


INPUTS = ("x", "Δ", "A", "B", "C", "D", "the initial state")
NAMES = ("y", "final state", *(f"gradient of {name}" for name in INPUTS))


# %% tags=["setup", "experiment"]
def values_and_gradients(form, tensors, **options):
    """Output and final state of a form, and the gradients of a weighted sum of both, by name."""
    leaves = x, dt, A, B, C, D, state = [t.clone().requires_grad_() for t in tensors]
    options |= dict(D=D, initial_state=state, return_final_state=True)
    results = form(x, dt, A, B, C, **options)
    # any fixed weights, as long as no two entries are treated alike
    weights = [torch.arange(t.numel()).cos().view(t.shape).to(t) for t in results]
    gradients = torch.autograd.grad(results, leaves, weights)
    found = (t.detach().cpu().double() for t in (*results, *gradients))
    return dict(zip(NAMES, found, strict=True))


def by_kernel(tensors):
    """Run mamba-ssm's kernels in float32, or load their saved results."""
    status = kernel_status()
    if not status.available:
        record = json.loads(Path("../experiments/records/03_kernel.json").read_text())
        return {name: torch.tensor(numbers) for name, numbers in record["results"].items()}
    device = "cuda" if status.mode == "cuda" else "cpu"
    tensors = [t.to(device, torch.float32) for t in tensors]
    return values_and_gradients(ssd.ssd_kernel, tensors, chunk_size=16)


# %%
given = kernel_inputs()
kernel = by_kernel(given)
definition = values_and_gradients(ssd.ssd_recurrent, given)
for name in NAMES:
    check(f"mamba-ssm's kernel = recurrence: {name}", kernel[name], definition[name], tol=1e-5)

# %% [markdown]
# Two programs, written independently in Triton and in PyTorch, agree in the output, the state and
# every gradient, on this one small input. Would this check have noticed a real difference? WM's
# Listing 4 tiles the groups: four heads read groups 0, 1, 0, 1 instead of 0, 0, 1, 1.

# %% tags=["aside"]
x, dt, A, B, C, D, state = given
B, C = (t.repeat(1, 1, 2, 1) for t in (B, C))
tiled = ssd.ssd_recurrent(x, dt, A, B, C, D=D, initial_state=state)
_ = must_differ("mamba-ssm's kernel, and groups that are tiled", kernel["y"], tiled, at_least=0.1)

# %% [markdown]
# It would. And is $10^{-5}$ loose enough to hide a small bug? Lab
# [03a](labs/03a_error_budget.ipynb) finds out where the kernel's error comes from, and chapter 10
# reads kernels line by line.
#
# ## Summary
#
# - Unroll a linear recurrence and you get a lower triangular matrix. Blocks that don't reach above
#   the diagonal have rank at most $n$, because everything passes through the state.
# - One decay per head comes out of the sum and leaves $C_t \cdot B_s$: attention without a softmax.
#   A decay for every entry costs range and, in Mamba, one product per channel.
# - The fast algorithm: attention inside each chunk, then write, carry, read. Its work is linear in
#   the length, almost all of it is matrix products, and every chunk size gives the same function.
# - Test with several chunks, small step sizes, and $1 < g < h$. A causality test must change the
#   step sizes, too.
# - mamba-ssm's kernels, in float32, agree with the definition to $10^{-5}$, gradients included.
#
# ## Exercises
#
# **1 · easy.** *Decays by hand.* Find $L_{30}$ and $L_{11}$ for the decays $\alpha = (0.3, 0.5,
# 0.2, 0.5)$. Use pencil and paper only. Find, too, the rank of the block with rows 2 to 3 and
# columns 0 to 1.
#
# <details><summary>Hint</summary>
#
# $L_{ts}$ is the product of the decays *after* token $s$, up to token $t$. Tokens count from 0.
#
# </details>


# %% tags=["exercise"]
def by_pencil():
    """L_30, L_11 and the rank: three numbers."""
    ### BEGIN SOLUTION
    return 0.5 * 0.2 * 0.5, 1.0, 1
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import check_numbers, forbidden

with forbidden(decay_matrix):
    mine = by_pencil()
L = decay_matrix(torch.tensor([0.3, 0.5, 0.2, 0.5]).log())
rank = int(matrix_rank(L[2:, :2]))
check_numbers(mine, {"L_30": L[3, 0].item(), "L_11": L[1, 1].item(), "the rank": rank})

# %% [markdown]
# **2 · easy.** *Three forms by the clock.* Does the form with the fewest FLOPs win on your machine?
# Write a function that calls another function once to warm up and then five times, and returns the
# median time of the five, where `clock()` gives the time in seconds. Then time the three forms on
# `inputs(b=1, l=512, h=4, p=64, n=64)` in float32.
#
# <details><summary>Hint</summary>
#
# Read the clock before and after each call. The median of five numbers is the third of them in
# order.
#
# </details>


# %% tags=["exercise"]
def seconds(function, clock=time.perf_counter):
    """The median time of five calls after the first, in seconds."""
    ### BEGIN SOLUTION
    function()
    taken = []
    for _ in range(5):
        start = clock()
        function()
        taken.append(clock() - start)
    return sorted(taken)[2]
    ### END SOLUTION


# %% tags=["check"]
now, took = [0.0], [9.0, 4.0, 1.0, 8.0, 2.0, 3.0]  # a clock that only the calls move
measured = seconds(lambda: now.append(now[-1] + took[len(now) % 6 - 1]), clock=lambda: now[-1])
assert len(now) == 7, f"one call to warm up, then five: yours makes {len(now) - 1}"
assert measured == 3.0, f"the five calls took 4, 1, 8, 2 and 3 seconds; you return {measured}"
assert seconds(partial(random, 100, seed=0)) > 0, "without a clock, time.perf_counter"
print("the median of five calls")

# %% [markdown]
# **3 · medium.** *A test for SSD.* Write the test that decides whether a function is SSD. It gets a
# function `f(x, z, A, B, C)` in float64, with the step sizes $\mathrm{softplus}(z)$. It can be
# wrong in three ways: the sum of section 9, tiled groups, or a missing softplus, as in Ch Listing
# 2, so that $\Delta$ can be negative. Here $z$ (b, l, h) is the raw output of a linear layer. The
# function takes any length, and may work in chunks of any size up to 64.
#
# <details><summary>Hint</summary>
#
# `inputs` makes random tensors, and `ssd.ssd_recurrent` is right. Which $l$, $g$ and $z$ bring out
# each mistake?
#
# </details>


# %% tags=["exercise"]
def is_right(f):
    """Whether a function f(x, z, A, B, C) -> y (b, l, h, p) is SSD with Δ = softplus(z)."""
    ### BEGIN SOLUTION
    x, _, A, B, C = inputs(b=1, l=200, h=4, g=2)  # more than one chunk; 1 < g < h
    z = random(1, 200, 4, seed=70) - 5  # small steps; and all z negative, to miss the softplus
    y = ssd.ssd_recurrent(x, torch.nn.functional.softplus(z), A, B, C)
    return torch.allclose(f(x, z, A, B, C), y)
    ### END SOLUTION


# %% tags=["check"]
def candidate(l_c, carry=carry_in_turn, step=torch.nn.functional.softplus, tiled=False):
    """A form in chunks of l_c tokens, on any length; right unless an option makes it wrong."""

    def form(x, z, A, B, C):
        if tiled:
            B, C = (t.repeat(1, 1, len(A) // t.shape[2], 1) for t in (B, C))
        quiet = -x.shape[1] % l_c  # tokens with Δ = 0 in front, to fill the first chunk
        x, dt, B, C = (
            torch.cat([torch.zeros_like(t[:, :1]).expand(-1, quiet, *t.shape[2:]), t], dim=1)
            for t in (x, step(z), B, C)
        )
        return four_steps(x, dt, A, B, C, l_c=l_c, carry=carry)[:, quiet:]

    return form


wrong = {
    "the sum over the targets": dict(carry=as_printed),
    "steps without softplus": dict(step=lambda z: z),
    "tiled groups": dict(tiled=True),
}
for l_c in (1, 16, 64):
    said = is_right(candidate(l_c))
    assert said, f"a right form, in chunks of {l_c}: your answer returns {said}"
    for name, options in wrong.items():
        assert not is_right(candidate(l_c, **options)), (
            f"{name}, in chunks of {l_c}: you let it pass"
        )
print("three right forms passed, nine wrong ones refused")

# %% [markdown]
# **4 · hard.** *SSD by halves.* Write SSD as a function that calls itself on two halves. It's for
# one head, halves the sequence, and never forms an $l \times l$ matrix. Return `y` and the final
# state. The first half doesn't depend on the second. The second half is its own SSD, plus what it
# reads from the state the first half left behind. A single token is the base case. The check
# follows the calls of `ssd_halves` itself, so let it do the recursion without a helper.
#
# <details><summary>Hint</summary>
#
# By the time the first half's state reaches token $t$, it has faded by every decay between the cut
# and $t$.
#
# </details>


# %% tags=["exercise"]
def ssd_halves(x, dt, A, B, C):
    """SSD of one head: x (l, p), dt (l,), A a number, B and C (l, n) -> y (l, p), state (p, n)."""
    ### BEGIN SOLUTION
    if len(x) == 1:
        state = dt * torch.outer(x[0], B[0])
        return (state @ C[0])[None], state
    cut = len(x) // 2
    y_first, first = ssd_halves(x[:cut], dt[:cut], A, B[:cut], C[:cut])
    y_second, second = ssd_halves(x[cut:], dt[cut:], A, B[cut:], C[cut:])
    decay = (dt[cut:] * A).cumsum(0).exp()  # since the cut
    y_second = y_second + decay[:, None] * (C[cut:] @ first.T)
    return torch.cat([y_first, y_second]), decay[-1] * first + second
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import calls_of, forbidden, not_none

for l in (1, 29, 64):
    x, dt, A, B, C = inputs(b=1, l=l, h=1, g=1)
    y, final = ssd.ssd_recurrent(x, dt, 3 * A, B, C, return_final_state=True)
    one_head = x[0, :, 0], dt[0, :, 0], 3 * A[0], B[0, :, 0], C[0, :, 0]
    with forbidden(ssd.ssd, ssd.ssd_recurrent, ssd.ssd_chunked, recurrence, four_steps):
        got, state = not_none(ssd_halves(*one_head))
    check(f"SSD by halves = recurrence, l = {l}", got, y[0, :, 0])
    check(f"SSD by halves: same final state, l = {l}", state, final[0, 0])
with calls_of(ssd_halves) as parts:
    ssd_halves(*one_head)
sizes = [len(y) for y, _ in parts]
assert [sizes.count(l) for l in (64, 32, 16)] == [1, 2, 4], "it doesn't call itself on halves"


def doubled(part):
    """A call that returns twice what it should, for a single token."""
    return lambda *tensors: tuple((1 + (len(tensors[0]) == 1)) * t for t in part(*tensors))


mine, ssd_halves = ssd_halves, doubled(ssd_halves)
try:
    got, state = mine(*one_head)
finally:
    ssd_halves = mine
check("and is made of what those calls return", got, 2 * y[0, :, 0])

# %% [markdown]
# **5 · hard.** *SSD from the bottom up.* Merge neighbours, from single tokens up, in as few rounds
# as possible. So start with $l$ stretches of one token each, and go on until a single stretch is
# left. Return the final state and the number of rounds. All merges of a round should be independent
# of each other. What does each stretch need to remember, so that you can merge two without going
# back to their tokens?
#
# <details><summary>Hint</summary>
#
# What happens to the first stretch's state during the second? A stretch without a neighbour sits
# the round out.
#
# </details>


# %% tags=["exercise"]
def state_in_rounds(x, dt, A, B):
    """One head: x (l, p), dt (l,), A a number, B (l, n) -> the final state (p, n), rounds."""
    ### BEGIN SOLUTION
    stretches = [((a * A).exp(), a * torch.outer(v, k)) for v, a, k in zip(x, dt, B, strict=True)]
    rounds = 0
    while len(stretches) > 1:
        pairs = list(zip(stretches[::2], stretches[1::2], strict=False))
        alone = stretches[2 * len(pairs) :]
        stretches = [(a[0] * b[0], b[0] * a[1] + b[1]) for a, b in pairs] + alone
        rounds += 1
    return stretches[0][1], rounds
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import depth, not_none

for l, fewest in ((1, 0), (2, 1), (29, 5), (1024, 10)):
    x, dt, A, B, C = inputs(b=1, l=l, h=1, g=1, dt=0.01)
    _, final = ssd.ssd_recurrent(x, dt, 3 * A, B, C, return_final_state=True)
    x = x.requires_grad_() * 1  # autograd notes which operation waits for which
    state, rounds = not_none(state_in_rounds(x[0, :, 0], dt[0, :, 0], 3 * A[0], B[0, :, 0]))
    check(f"l = {l}: the state of the recurrence", state, final[0, 0])
    assert rounds == fewest, f"l = {l}: {rounds} isn't the fewest rounds"
    assert depth(state) < 40 + l, f"a chain of {depth(state)} operations isn't {rounds} rounds"
    print(f"  rounds: {rounds}")

# %% [markdown]
# ## Further reading
#
# **What came after.** The frame is wider than the model: Dao and Gu call $(L \circ QK^\top)V$
# *structured masked attention*, and any mask $L$ that can be multiplied fast will do, for example a
# Toeplitz matrix. A mask that is a hierarchy gives a number of states that grows with $\log l$ (Guo
# et al., *Log-Linear Attention*, 2025). Which state space models have such a dual, diagonal ones
# included, is settled in Hu et al., *On Structured State-Space Duality* (2025). Mamba-3 (Lahoti et
# al., 2026) gives the state a rotation, chapter 04's subject.
#
# - Dao and Gu, *Transformers are SSMs: Generalized Models and Efficient Algorithms Through
#   Structured State Space Duality* (2024): the duality, semiseparable matrices, the chunked
#   algorithm.
# - Katharopoulos et al., *Transformers are RNNs* (2020): linear attention, our case $\alpha = 1$.
# - Shi et al., *Wonderful Matrices*, Appendix A and Listings 2–4: SSD as this architecture uses
#   it.
# - Gu and Dao, *Mamba* (2023): selection, with a diagonal $A$, and why a step size that depends on
#   the token matters.
# - Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training* (2023): how
#   to keep section 8's product in range.
# - `cheems_ref/ssd.py`: the listing this notebook arrives at.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
