# %% [markdown]
# # 03 · State space duality
#
# **One layer, computed in two ways: as a recurrence that carries a small state, and as attention
# that looks back at everything. By the end you will have written the algorithm that combines them,
# in two dozen lines, and caught a printed version of it looking into the future.** You will be
# able to
#
# - write a recurrence as a matrix and say what is special about its blocks;
# - show where attention without a softmax comes from, and which step needs a single decay per head;
# - compute the layer in chunks, in time linear in the length;
# - find a mistake in a published listing that leaks the future, though a test with one chunk
#   passes.
#
# You need matrix products, attention as a formula, and a little PyTorch. Chapters 01 and 02 help.
#
# Sources: Dao and Gu, *Transformers are SSMs* (2024), for the duality and the chunked algorithm;
# *Wonderful Matrices* (WM) §2, Appendix A and Listings 2–4; *Cheems* (Ch) Listing 2. How to read ✓
# and ✗: chapter 00.

# %% tags=["setup"]
import math
import time
from functools import partial

import torch
from einops import rearrange
from matplotlib.patches import Circle, Rectangle
from torch import einsum
from torch.linalg import matrix_rank
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

from cheems_ref import plotting, ssd
from cheems_ref.linear_attention import gated_linear_attention
from cheems_ref.mamba import selective_scan
from cheems_ref.verify import check, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])


# %% tags=["figure"]
def draw_chain(ax, lit, l=8):
    """States in a row; the path from the token that writes to the token that reads is lit."""
    s, t = lit
    for i in range(l):
        on = s <= i <= t
        color = plotting.COLORS[1] if on else plotting.QUIET
        ax.add_patch(Circle((i, 1), 0.3, fc="white", ec=color, lw=3 if on else 1.5))
        ax.text(i, 1, f"$h_{i}$", ha="center", va="center")
        arrows = [((i, 0.2), (i, 0.68), i == s), ((i, 1.32), (i, 1.8), i == t)]
        arrows += [((i + 0.32, 1), (i + 0.68, 1), s <= i < t)] * (i + 1 < l)
        for start, end, used in arrows:
            style = dict(
                color=plotting.COLORS[1] if used else plotting.QUIET, lw=3 if used else 1.2
            )
            ax.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", **style))
        ax.text(i, -0.05, f"$x_{i}$", ha="center", va="center")
        ax.text(i, 2.05, f"$y_{i}$", ha="center", va="center")
    ax.set(xlim=(-0.5, l - 0.5), ylim=(-0.4, 2.4), aspect="equal")
    ax.axis("off")


# %% tags=["figure"]
def draw_blocks(ax, lit, l=8, l_c=4):
    """The lower triangle of M, cut into blocks: attention on the diagonal, the state below it."""
    for t in range(l):
        for s in range(t + 1):
            color = plotting.COLORS[0] if t // l_c == s // l_c else plotting.COLORS[2]
            ax.add_patch(Rectangle((s, t), 1, 1, fc=color, ec="white", alpha=0.35))
    s, t = lit
    ax.add_patch(Rectangle((s, t), 1, 1, fc=plotting.COLORS[1], ec="white"))
    for place, text in (
        ((2, -0.4), "source s"),
        ((l + 1.5, 1.6), "attention"),
        ((l + 1.5, 5.9), "the state"),
    ):
        ax.text(*place, text, ha="left", color=plotting.INK)
    for place, color in ((1.5, plotting.COLORS[0]), (5.8, plotting.COLORS[2])):
        ax.add_patch(Rectangle((l + 0.5, place - 0.45), 0.7, 0.7, fc=color, alpha=0.35))
    ax.text(-0.35, 4, "target t", rotation=90, ha="right", va="center")
    ax.set(xlim=(-1, l + 4.5), ylim=(l + 0.2, -1), aspect="equal")
    ax.axis("off")


# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(13, 4))
axes[0].get_gridspec().set_width_ratios([3, 2])
draw_chain(axes[0], (2, 6))
draw_blocks(axes[1], (2, 6))
plotting.save(
    fig,
    "03_duality",
    "Left: a chain of eight states; the path from input 2 through the states 2 to 6 to output 6 is "
    "lit. Right: the same as one lit entry, row 6 and column 2, of a lower triangular matrix. The "
    "blocks on the diagonal are marked as attention, the block below it as the state.",
)

# %% [markdown]
# Both pictures show the same layer. On the left, what token 2 wrote travels through a chain of
# states until token 6 reads it, and fades a little at every step. On the right, that whole journey
# is one number in a matrix. The chain is cheap but slow: one token at a time. The matrix is
# parallel but expensive: its size is the square of the length. The blocks (blue: inside a chunk,
# green: between chunks) are how we get the best of both.
#
# ## 1 · Four tokens by hand
#
# Start as small as possible: one number per token, $x_t$, and one number of state, $h_t$. Each
# token lets the state fade by a factor $\alpha_t$, adds its own contribution $B_t x_t$, and reads
# the result with weight $C_t$:
#
# $$h_t = \alpha_t\,h_{t-1} + B_t\,x_t, \qquad y_t = C_t\,h_t, \qquad h_{-1} = 0. \tag{3.1}$$
#
# The *decay* $\alpha_t$ is between 0 (forget everything) and 1 (keep everything). Take a pencil
# and compute the four states before you run the cell:

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

# %% [markdown]
# Now **unroll** it. Put the equation for $h_{t-1}$ into the one for $h_t$, and so on, until only
# inputs are left. Input $s$ arrives at token $t$ multiplied by every decay since it was written:
#
# $$y_t = C_t \sum_{s \le t} \big(\alpha_t\,\alpha_{t-1} \cdots \alpha_{s+1}\big)\, B_s\,x_s.
#   \tag{3.2}$$
#
# Does the product begin with $\alpha_s$ or with $\alpha_{s+1}$? With $\alpha_{s+1}$: a token that
# reads what it has just written sees it at full strength. The other choice is an easy mistake, and
# hard to see when the decays are close to 1. Let's make it on purpose, with `first=0`:


# %%
def unrolled(x, alpha, B, C, first=1):
    """Equation 3.2, with the decays of steps s + first to t."""
    outputs = []
    for t in range(len(x)):
        decays = [alpha[s + first : t + 1].prod() for s in range(t + 1)]
        heard = [decays[s] * B[s] * x[s] for s in range(t + 1)]
        outputs.append(C[t] * sum(heard))
    return torch.stack(outputs)


check("unrolled sum = recurrence", unrolled(x, alpha, B, C), y)
_ = must_differ("decay that includes the token's own step", unrolled(x, alpha, B, C, first=0), y)

# %% [markdown]
# ## 2 · The recurrence is a matrix
#
# Equation 3.2 is linear in $x$, so there is a matrix $M$ with $y = Mx$. Its entries are right there
# in the sum:
#
# $$M_{ts} = C_t\; L_{ts}\; B_s, \qquad L_{ts} = \begin{cases}
#   \alpha_t\,\alpha_{t-1}\cdots \alpha_{s+1} & s \le t\\ 0 & s > t.\end{cases} \tag{3.3}$$
#
# Row $t$ belongs to the token that reads (the *target*), column $s$ to the token that writes (the
# *source*). $L$ holds the decays. It is lower triangular, because you can't read a token before it
# has been written.
#
# How would you compute $L$? You might try one running product and divide two of its entries. That
# works for short texts, but $0.5^{1100}$ is zero in float64, and 0 / 0 is NaN. Sums of logarithms
# don't underflow. Each column of $L$ is a running sum of log decays, $L_{ts} =
# \exp(\log\alpha_{s+1} + \dots + \log\alpha_t)$:


# %%
def decay_matrix(log_alpha):
    """L of equation 3.3 from the log decays: (l,) -> (l, l)."""
    rows = log_alpha[:, None].expand(-1, len(log_alpha))
    sums = rows.tril(-1).cumsum(dim=0)  # column s starts after token s
    return sums.exp().tril()  # exp(0) = 1 above the diagonal: cut off


# %% [markdown]
# Fill in $L$ for the four tokens of section 1 on paper. Then compare, and apply $M$ to $x$:

# %%
x, alpha = torch.tensor([[1.0, 2.0, 0.0, 3.0], [0.5, 0.5, 0.9, 0.1]])
B, C = torch.tensor([[1.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.0, 2.0]])
L = decay_matrix(alpha.log())
M = C[:, None] * L * B  # rows times C_t, columns times B_s
print(L.numpy().round(3))
check("y = M x", M @ x, unrolled(x, alpha, B, C))
_ = must_differ("target and source exchanged", M.T @ x, unrolled(x, alpha, B, C))

# %% [markdown]
# What does $L$ look like for a longer text? Here are three ways to forget: with a steady decay,
# with a decay that varies, and with a reset at token 16.

# %% tags=["aside"]
l = 32
steady = torch.full((l,), math.log(0.9))
varied = -random(l, seed=1).abs() / 4
reset = steady.clone()
reset[16] = -math.inf  # a decay of exactly 0
L_steady, L_varied, L_reset = (decay_matrix(g) for g in (steady, varied, reset))

# %% [markdown]
# Before you look: in one of the three pictures an entry depends only on how far apart the two
# tokens are. Which?

# %% tags=["figure"]
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
# In the steady one. There $L_{ts}$ is a function of $t - s$, and if $B$ and $C$ are constant
# as well, the layer is a convolution (chapter 01). In the third picture a token has shut the door
# behind it: nothing written before token 16 gets through. A model that computes $\alpha_t$ from the
# token can choose when to forget. Such a model is called *selective*.
#
# If you write this yourself, beware of the obvious shortcut, the difference of two running totals.
# At a reset it gives $\infty - \infty$, which is NaN. We'll take the shortcut for chunks, where
# our totals are finite.

# %% tags=["guard"]
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

# %% [markdown]
# ## 3 · Its blocks have rank one
#
# Look at the empty corner of the third picture, then at the same corner of the second. That block
# says how tokens 0 to 15 influence tokens 16 to 31. It has 256 entries. How many numbers do you
# need to know to fill it in?
#
# Take any block below the diagonal: rows from $t_1$ on, columns up to $s_2$, with $s_2 \le t_1$. On
# its way from column $s$ to row $t$, everything passes through the token $s_2$. So each entry is a
# product:
#
# $$L_{ts} = \underbrace{(\alpha_t \cdots \alpha_{s_2+1})}_{u_t}\;
#   \underbrace{(\alpha_{s_2} \cdots \alpha_{s+1})}_{v_s}
#   \qquad\text{so the block is } u\,v^\top.$$
#
# It's the outer product of two vectors. You need 16 + 16 numbers, not 256, and the rank of the
# block is one (or zero, after a reset). That holds for every block that doesn't reach above the
# diagonal. The largest of them touch the diagonal with their upper right corner, so we test those:

# %%
L = decay_matrix(-random(32, seed=1).abs() / 4)  # the second picture
ranks = [int(matrix_rank(L[i:, : i + 1])) for i in range(32)]
print("ranks of the", len(ranks), "largest blocks:", set(ranks))
above = int(matrix_rank(L[4:12, 0:9]))
print("rank of a block that reaches above the diagonal:", above)
assert set(ranks) == {1} and above > 1

# %% [markdown]
# A lower triangular matrix is called *$n$-semiseparable* if all these blocks have rank at most $n$.
# Remember this, because the fast algorithm of section 6 is built on it. A block of rank one is a
# narrow waist: all that the past can tell the future has to fit through one number. You have met
# that number. It's the state.
#
# ## 4 · A wider state: attention without the softmax
#
# One number doesn't remember much. So let the state be a matrix with $p$ rows and $n$ columns. A
# token has a *value* $x_t \in \mathbb{R}^p$ and writes it under the *key* $B_t \in \mathbb{R}^n$. A
# reader asks with the *query* $C_t \in \mathbb{R}^n$:
#
# $$h_t = e^{\Delta_t A}\, h_{t-1} + \Delta_t\, x_t B_t^\top, \qquad y_t = h_t\, C_t. \tag{3.4}$$
#
# The decay is still one number per token, now written $\alpha_t = e^{\Delta_t A}$. The *rate* $A
# \le 0$ is learned, and the same for every token; the *step size* $\Delta_t \ge 0$ is computed from
# the token. That's why $A$ needn't depend on the token: the product already does. With $\Delta_t =
# 0$ nothing fades and nothing is written, which is how the layer skips padding.


# %%
def recurrence(x, dt, A, B, C):
    """Equation 3.4 for one head: x (l, p), dt (l,), B, C (l, n)."""
    state, outputs = torch.zeros(x.shape[1], B.shape[1]), []
    for t in range(len(x)):
        write = dt[t] * torch.outer(x[t], B[t])
        state = torch.exp(dt[t] * A) * state + write
        outputs.append(state @ C[t])
    return torch.stack(outputs)


# %% tags=["guard"]
l, p, n = 24, 5, 4
x, B, C = random(l, p, seed=2), random(l, n, seed=3), random(l, n, seed=4)
dt, A = random(l, seed=5).abs() / 4, torch.tensor(-1.0)
y = recurrence(x, dt, A, B, C)
quiet, others = dt.clone(), torch.arange(l) != 10
quiet[10] = 0.0
without = recurrence(x[others], dt[others], A, B[others], C[others])
check("token 10 with Δ = 0 = token 10 left out", recurrence(x, quiet, A, B, C)[others], without)
_ = must_differ("token 10 with its own Δ", y[others], without)

# %% [markdown]
# Now unroll, as before. The decays are numbers, so they can be pulled to the front. What is
# left between reader $t$ and writer $s$ is the inner product of a query and a key:
#
# $$y_t = \sum_{s \le t} L_{ts}\,(C_t \cdot B_s)\,\Delta_s x_s
#   \qquad\Longleftrightarrow\qquad
#   Y = \big(L \circ C B^\top\big)\,(\Delta X). \tag{3.5}$$
#
# (∘ multiplies entry by entry.) Rename $C \to Q$, $B \to K$, $\Delta X \to V$ and read it again:
# $(L \circ QK^\top)\,V$. Where have you seen that? It is causal attention. What's different? The
# softmax is gone, and with it the weights that sum to 1. And the mask isn't 0 or 1 but fades with
# distance.
#
# WM §2 says the same. The paper's formula leaves out $\Delta$, but its listing has it, and we keep
# it. In code, (3.5) or $(L \circ QK^\top)\,V$ is one line:

# %%
L, scores = decay_matrix(dt * A), C @ B.T
check("quadratic form = recurrence", (L * scores) @ (dt[:, None] * x), y)
_ = must_differ("mask forgotten: attention to the future", scores @ (dt[:, None] * x), y)
_ = must_differ("step size forgotten in the write", (L * scores) @ x, y)

M = L * scores * dt  # acts on x: column s times dt_s
ranks = [int(matrix_rank(M[i:, : i + 1])) for i in range(l)]
print(f"n = {n}; ranks of the largest blocks:", *ranks)

# %% [markdown]
# This is the **duality**: a recurrence with a state on one side, attention without its softmax on
# the other, and they are the same function. The ranks have grown from 1 to $n$. The waist is as
# wide as the state.
#
# If nothing fades ($A = 0$, $\Delta = 1$), the mask is the plain causal one, and you get *linear
# attention*. With the decay, (3.4) is chapter 02's gated rule, `gated_linear_attention`, with one
# gate per token:

# %% tags=["aside"]
q, k, v = (t[None, :, None] for t in (C, B, dt[:, None] * x))  # (b, l, h, ·)
log_gates = (dt * A)[None, :, None]
gated = gated_linear_attention(q, k, v, log_gates)[0, :, 0]
check("gated linear attention = equation 3.4", gated, y)
swapped = gated_linear_attention(k, q, v, log_gates)[0, :, 0]
_ = must_differ("queries and keys exchanged", swapped, y)

# %% tags=["guard"]
nothing_fades = recurrence(x, torch.ones(l), torch.tensor(0.0), B, C)
by_sums = torch.stack([sum((C[t] @ B[s]) * x[s] for s in range(t + 1)) for t in range(l)])
check("α = 1 gives the causal mask", decay_matrix(torch.zeros(l)), torch.ones(l, l).tril())
check("α = 1, Δ = 1: linear attention", nothing_fades, by_sums)
_ = must_differ("α < 1 is not linear attention", recurrence(x, torch.ones(l), A, B, C), by_sums)

# %% [markdown]
# ## 5 · Why one decay per head
#
# Mamba, at the end of chapter 01, came before SSD and is more general in its decays. Each entry $i$
# of its state fades at its own rate $A_i$. For one channel of input, $h_{t,i} = e^{\Delta_t A_i}
# h_{t-1,i} + \Delta_t B_{t,i} x_t$, and the output is $y_t = \sum_i C_{t,i} h_{t,i}$. Why would SSD
# give that up? Unroll it and watch for the step that breaks. Each entry has its own matrix of
# decays, $L^{(i)}$:
#
# $$y_t = \sum_{s \le t} \Big( \sum_i C_{t,i}\; L^{(i)}_{ts}\; B_{s,i} \Big)\, \Delta_s x_s.
#   \tag{3.6}$$
#
# With a single rate, $L_{ts}$ doesn't depend on $i$, leaves the inner sum, and $C_t \cdot B_s$
# remains. **That is the step.** With $n$ rates, the decay stays stuck between $C$ and $B$. One mask
# on $CB^\top$ won't do, so you need a mask for each of the $n$ entries:


# %%
def diagonal_matrix(dt, A, B, C):
    """M of equation 3.6: dt (l,), A (n,), B, C (l, n) -> (l, l)."""
    masks = [decay_matrix(dt * rate) for rate in A]
    terms = [masks[i] * torch.outer(C[:, i], B[:, i]) for i in range(len(A))]
    return sum(terms) * dt


# %% tags=["guard"]
l, n = 24, 4
x, B, C = random(1, l, 1, seed=6), random(1, l, n, seed=7), random(1, l, n, seed=8)
dt, A = random(1, l, 1, seed=9).abs() / 4, -torch.arange(1.0, n + 1)[None]
y = selective_scan(x, dt, A, B, C)[0, :, 0]  # chapter 01's: one row of a batch, one channel
M = diagonal_matrix(dt[0, :, 0], A[0], B[0], C[0])
check("sum of n masked rank-one terms = Mamba's recurrence", M @ x[0, :, 0], y)
mean = A.mean().expand(n)
factored = decay_matrix(dt[0, :, 0] * A.mean()) * (C[0] @ B[0].T) * dt[0, :, 0]
_ = must_differ("one decay pulled out of the sum", factored @ x[0, :, 0], y)
check("equal rates: it can be", diagonal_matrix(dt[0, :, 0], mean, B[0], C[0]), factored)

# %% [markdown]
# Each of the $n$ terms has blocks of rank one, so their sum has rank at most $n$, and the state is
# still the waist. The single big matrix product is lost. GLA (Yang et al., 2023) also has $n$ gates
# per token and gets the product back in short chunks, where it can move the decays into $C$ and $B$
# before they overflow. Mamba-2 chose one rate per head instead, and Cheems follows Mamba-2.
#
# | what fades at token t | as a matrix | used by |
# |---|---|---|
# | nothing | $\text{causal mask} \circ QK^\top$ | linear attention (02) |
# | everything at the same rate | $L \circ CB^\top$ | SSD, and 02's gated rule |
# | each entry at its own rate | $\sum_i L^{(i)} \circ C_{:,i} B_{:,i}^\top$ | Mamba (01), GLA |
#
# ## 6 · Cut it into chunks
#
# So we have two ways to run the same layer, and neither is good enough. The recurrence does little
# work, but one token at a time, and your GPU wasn't built for that. The quadratic form does
# everything at once, but with 65,536 tokens the float32 matrices of 8 heads fill 128 GiB.
# Can we have the parallelism of one at the price of the other?
#
# Go back to the picture at the top. We cut the sequence into $c$ chunks, and the matrix into
# blocks. The blue blocks on the diagonal are small copies of a problem we can solve: attention
# inside a chunk. All the trouble is in the green blocks below. There are about $c^2/2$ of them. But
# by section 3 each has rank at most $n$, because everything one chunk can tell another has to
# squeeze through the state. So we never fill them in. Each chunk *writes* a summary, we *carry* it
# forward, and later tokens *read* it.
#
# Let $\sigma_t$ be the log decay from the start of a chunk up to its token $t$, including $t$'s own
# step (`total` in the code). For the last token of the chunk we write $\sigma_{\text{end}}$, and
# $a_j = e^{\sigma_{\text{end}}}$ is the decay over all of chunk $j$. Then token $s$ in chunk $j$
# reaches token $t$ in a later chunk $i$ with
#
# $$M_{ts} =
#   \underbrace{e^{\sigma_t}\, C_t}_{\text{read}}\;\cdot\;
#   \underbrace{a_{j+1} \cdots a_{i-1}}_{\text{carry}}\;\cdot\;
#   \underbrace{e^{\sigma_{\text{end}} - \sigma_s}\; B_s\,\Delta_s}_{\text{write}} \tag{3.7}$$
#
# For neighbouring chunks the carry is 1. Attention inside the chunks is step 1; write, carry and
# read are steps 2 to 4:


# %% tags=["figure"]
def draw_steps(ax):
    """Three chunks as boxes; under each what it writes, between them the state that is carried."""
    blue, red, green = plotting.COLORS[:3]
    frame = dict(boxstyle="round,pad=0.5", fc="white", lw=2)

    def box(x, y, text, color):
        ax.text(x, y, text, ha="center", va="center", bbox=frame | dict(ec=color))

    def arrow(start, end, color, text, place, side):
        style = dict(arrowstyle="-|>", lw=2, mutation_scale=16, color=color)
        ax.annotate("", end, start, arrowprops=style)
        ax.text(*place, text, ha=side, color=color)

    for i, x in enumerate((1.5, 5.5, 9.5)):
        box(x, 2.4, f"chunk {i}\n1: attention inside", blue)
        box(x + 2, 0.5, f"state {i + 1}", green)
        arrow((x + 0.3, 1.8), (x + 1.6, 0.85), green, "2: write", (x + 0.7, 1.1), "right")
        if i:
            arrow((x - 1.6, 0.85), (x - 0.2, 1.8), red, "4: read", (x - 1.2, 1.35), "right")
            arrow((x - 1.3, 0.5), (x + 1.3, 0.5), green, "3: carry", (x, 0.1), "center")
    ax.set(xlim=(0, 12.3), ylim=(-0.1, 3.1))
    ax.axis("off")


# %% tags=["figure"]
fig, ax = plotting.figure(size=(13, 3.6))
draw_steps(ax)
plotting.save(
    fig,
    "03_steps",
    "Three chunks in a row, each with attention inside. Each chunk writes into the state after it; "
    "the states are carried from one to the next; each chunk but the first reads the state "
    "before it.",
)

# %% [markdown]
# Let's do it for one head, with 32 tokens in 4 chunks of 8 and $n = 2$. The rank of a block below
# the diagonal should be at most 2:


# %% tags=["setup"]
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


# %%
c, l_c, p, n = 4, 8, 5, 2
x, dt, A, B, C = inputs(b=1, l=c * l_c, h=1, g=1, p=p, n=n, dt=0.1)
M = ssd.semiseparable_matrix(dt, A, B, C)[0, 0]
blocks = rearrange(M, "(i t) (j s) -> i j t s", t=l_c, s=l_c)
print(matrix_rank(blocks))

x_c, B_c, C_c = (t[0, :, 0].unflatten(0, (c, l_c)) for t in (x, B, C))
dt_c = dt[0, :, 0].unflatten(0, (c, l_c))
total = (dt_c * A).cumsum(dim=1)  # (c, l): σ of (3.7)

# %% [markdown]
# **Step 1: attention inside each chunk.** This is the quadratic form you already have, on 8 tokens
# instead of 32. It fills the diagonal blocks:

# %%
L = torch.stack([decay_matrix(log_alpha) for log_alpha in dt_c * A])
inside = L * (C_c @ B_c.mT) * dt_c[:, None, :]  # (c, l, l)
y_inside = inside @ x_c  # (c, l, p)
check("step 1 fills the diagonal blocks", inside, torch.stack([blocks[i, i] for i in range(c)]))


# %% tags=["setup"]
def states_after(pieces):
    """What the tokens of each piece leave behind, starting from an empty state: (c, p, n)."""
    states = []
    for piece in pieces:
        tokens = (x[:, piece], dt[:, piece], A, B[:, piece], C[:, piece])
        states.append(ssd.ssd_recurrent(*tokens, return_final_state=True)[1][0, 0])
    return torch.stack(states)


# %% tags=["guard"]
chunks = [slice(i * l_c, (i + 1) * l_c) for i in range(c)]
prefixes = [slice(0, i * l_c) for i in range(c)]  # all that comes before each chunk

# %% [markdown]
# **Step 2: write.** If a chunk started with an empty state, what would it leave behind? Every
# token's write, faded until the end of the chunk:

# %%
to_end = (total[:, -1:] - total).exp()  # (c, l)
written = einsum("cl,cln,clp->cpn", to_end * dt_c, B_c, x_c)
check("step 2 = the state of each chunk run alone", written, states_after(chunks))

# %% [markdown]
# **Step 3: carry.** Here is the recurrence again, but with chunks for tokens: fade by the decay
# over a whole chunk, add what the chunk has written. There are $c$ of these steps and not $l$. As
# written here, this is the only sequential part. (Exercise 5 makes it parallel.)

# %%
state, incoming = torch.zeros(p, n), []
for decay, write in zip(total[:, -1].exp(), written, strict=True):
    incoming.append(state)
    state = decay * state + write
incoming = torch.stack(incoming)  # (c, p, n): at chunk starts
check("step 3 gives each chunk the state of the recurrence", incoming, states_after(prefixes))

# %% [markdown]
# **Step 4: read.** Each token queries the state that its chunk started with, faded up to the token:

# %%
y_between = einsum("cl,cln,cpn->clp", total.exp(), C_c, incoming)
y = ssd.ssd_recurrent(x, dt, A, B, C)[0, :, 0]
check("four steps = recurrence", (y_inside + y_between).flatten(0, 1), y)
_ = must_differ("step 4 left out", y_inside.flatten(0, 1), y)

# %% [markdown]
# ## 7 · All heads, in two dozen lines
#
# That's the algorithm. Now for every sequence in the batch and every head at once. Heads share keys
# and queries in groups: head $i$ uses group $\lfloor i / (h/g) \rfloor$, and `expand_groups` gives
# each head its own copy. The function `in_chunks` cuts all tensors into chunks of $l_c$ tokens:


# %%
def in_chunks(x, dt, A, B, C, l_c):
    """The writes v = Δx, B, C and σ, each as (b, h, c, l, ...)."""
    B, C = (ssd.expand_groups(t, x.shape[2]) for t in (B, C))
    v, B, C, log_alpha = (
        rearrange(t, "b (c l) h ... -> b h c l ...", l=l_c)
        for t in (dt[..., None] * x, B, C, dt * A)
    )
    return v, B, C, log_alpha.cumsum(-1)


# %% [markdown]
# We write step 3 as a separate function, because in section 9 we'll swap in a published one. It
# goes from chunk to chunk as before, on transposed states, $n \times p$, so that a read is one
# product:


# %%
def carry_in_turn(writes, over_chunk):
    """Step 3: what chunks write -> the states that they start from."""
    state, incoming = torch.zeros_like(writes[:, :, 0]), []
    for i in range(writes.shape[2]):
        incoming.append(state)
        decay = over_chunk[:, :, i, None, None].exp()
        state = decay * state + writes[:, :, i]
    return torch.stack(incoming, dim=2)


# %% [markdown]
# The first `tril` in $L$ keeps `exp` from overflowing. Here is the whole algorithm, the four steps
# in a line or two each:


# %%
def four_steps(x, dt, A, B, C, *, l_c, carry=carry_in_turn):
    """SSD in chunks of l_c tokens; l is a multiple of l_c."""
    v, B, C, total = in_chunks(x, dt, A, B, C, l_c)
    L = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    inside = (L * (C @ B.mT)) @ v  # 1: attention inside
    to_end = (total[..., -1:] - total).exp()
    writes = (to_end[..., None] * B).mT @ v  # 2: write
    incoming = carry(writes, total[..., -1])  # 3: carry
    between = total.exp()[..., None] * (C @ incoming)  # 4: read
    return rearrange(inside + between, "b h c l p -> b (c l) h p")


# %% [markdown]
# With chunks of 1 the algorithm *is* the recurrence; with one chunk of 72 it is the quadratic form.
# What do you expect for the sizes in between?

# %%
x, dt, A, B, C = inputs(l=72)
y = ssd.ssd_recurrent(x, dt, A, B, C)
for l_c in (1, 8, 24, 72):
    check(f"four steps in chunks of {l_c} = recurrence", four_steps(x, dt, A, B, C, l_c=l_c), y)

# %% [markdown]
# All four sizes give the same function, so you may choose the one that suits your hardware. In the
# package, `ssd_chunked` takes the same steps, for any length. It keeps the totals in float64,
# because the difference of two large totals loses digits.
#
# **Writing text** needs one token at a time. Read the prompt in chunks, keep the final state, and
# go on with `ssd_step`. A head's state has $p\,n$ numbers, after ten tokens and after ten
# million.

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

# %% [markdown]
# ## 8 · What each form costs
#
# Which form is cheapest? Guess first. Then count multiplications and additions, per head:
#
# | form | FLOPs | sequential steps |
# |---|---|---|
# | recurrent | $2\,l\,p\,n$ to read, $3\,l\,p\,n$ to update | $l$ |
# | quadratic | $2\,l^2 (n + p)$ | 1 |
# | chunked | $2\,l\,l_c\,(n + p) + 4\,l\,p\,n + 2\,l\,p\,n / l_c$ | $l / l_c$ |
#
# PyTorch can count the matrix products while they run, though not the updates of a state. In the
# package two heads of a group share their scores, and the quadratic form also reads an initial
# state and makes the final one. With that, formula and count agree:


# %% tags=["setup"]
def flops(function, length, h=2, p=16, n=16):
    """FLOPs of the matrix products for one row and one group of heads."""
    with FlopCounterMode(display=False) as counter:
        function(*inputs(b=1, l=length, h=h, p=p, g=1, n=n))
    return counter.get_total_flops()


# %% tags=["aside"]
h, p, n, l_c = 2, 16, 16, 64
for l in (128, 1024):
    forms = (ssd.ssd_recurrent, ssd.ssd_quadratic, ssd.ssd_chunked)
    recurrent, quadratic, chunked = (flops(function, l) for function in forms)
    assert recurrent == 2 * l * h * p * n
    assert quadratic == 2 * l**2 * h * (n + p) + 4 * l * h * p * n
    assert chunked == 2 * l * l_c * (n + h * p) + 4 * l * h * p * n
    print(f"l = {l:5,}, FLOPs: {recurrent:9,}, {quadratic:11,}, {chunked:9,}: formula = count")

# %% tags=["guard"]
p, n = 64, 128  # of a real model, per head and token
costs = {c: 2 * c * (n + p) + 4 * p * n + 2 * p * n / c for c in (*range(1, 30), 256)}
assert 3.0 < costs[256] / (5 * p * n) < 3.3
assert [c for c in costs if costs[c] < 5 * p * n] == [*range(3, 20)]
assert 100 < 5 * p * n / (2 * (n + p)) < 110

# %% [markdown]
# Eight times the tokens cost the recurrence and the chunked form eight times as much, and the
# quadratic form about 60 times. But did you expect the *recurrence* to be the cheapest? For texts
# of more than about a hundred tokens it is, and at real sizes as well: with $p = 64$, $n = 128$ it
# needs a third as many operations as chunks of 256. Chunks turn the work into large matrix
# products, with $l/l_c$ sequential steps instead of $l$. On hardware with thousands of arithmetic
# units, waiting is what costs you. Chapter 10 measures it.
#
# ## 9 · A mistake in print
#
# WM's Listing 3 does step 3 for all chunks at once, as a matrix of decays. Take three chunks, and
# let $W_j$ be what chunk $j$ writes. The rows are the starts of chunks 1 and 2 and the end of the
# text, and the columns are $W_0$, $W_1$ and $W_2$:
#
# $$D = \begin{pmatrix} 1 & 0 & 0 \\ a_1 & 1 & 0 \\ a_1 a_2 & a_2 & 1 \end{pmatrix} \tag{3.8}$$
#
# $D$ has an entry for every pair of chunks, so the work of this step is quadratic in their number.
# A chunk should start from the sum along its row, over the sources. In the listing that is `dim=3`.
# The paper prints `.sum(dim=2)`, a sum down a column, over the targets:
#
# | the sum | chunk 2 starts from |
# |---|---|
# | corrected: `.sum(dim=3)`, along the row of chunk 2 | $a_1 W_0 + W_1$ |
# | as printed: `.sum(dim=2)`, down the column of $W_1$ | $W_1 + a_2 W_1$ |
#
# Look at the second line. Which chunks does chunk 2 hear of? $W_0$ is gone, so the past is
# forgotten. And $a_2$ is the decay over chunk 2 itself, so its first token feels the step sizes of
# tokens that come later. The Mamba-2 code of the transformers library had the same mistake (issue
# 34817, fixed by pull request 35154).
#
# In code the faulty line and the right one differ by one digit, since axis 2 of `products` is the
# target and axis 3 the source:


# %%
def carry_at_once(writes, over_chunk, dim):
    """Step 3 as in WM Listing 3; `dim` is the axis of its sum."""
    states = pad(writes, (0, 0, 0, 0, 1, 0))  # a zero state in front
    sums = pad(over_chunk, (1, 0)).cumsum(-1)
    D = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
    products = D[..., None, None] * states[:, :, None]
    return products.sum(dim=dim)[:, :, :-1]


as_printed = partial(carry_at_once, dim=2)  # WRONG: over the targets
corrected = partial(carry_at_once, dim=3)  # right: over the sources

# %% [markdown]
# Does a test catch it? With a single chunk there is nothing to carry, and the printed sum passes.
# With two or four chunks it doesn't:

# %%
x, dt, A, B, C = inputs(l=32, dt=0.05)
y = ssd.ssd_recurrent(x, dt, A, B, C)
check("one chunk, as printed", four_steps(x, dt, A, B, C, l_c=32, carry=as_printed), y)
for l_c in (16, 8):
    printed = four_steps(x, dt, A, B, C, l_c=l_c, carry=as_printed)
    size = must_differ(f"{32 // l_c} chunks, as printed", printed, y, at_least=0.1)
    print(f"  largest error, relative: {size:.3f}")
    check(f"{32 // l_c} chunks, corrected", four_steps(x, dt, A, B, C, l_c=l_c, carry=corrected), y)

# %% [markdown]
# Now we change the step size of the last token and see which outputs move, then do the same with
# the first token:


# %%
def moved(token, function):
    """First and last token whose output one token's step size changes."""
    later = dt.clone()
    later[:, token] += 0.5
    change = (function(later) - function(dt)).abs().amax(dim=(0, 2, 3))
    places = (change > 1e-12).nonzero()
    return f"token {token} moves outputs {int(places[0])} to {int(places[-1])}"


moves = {}
for name, carry in (("as printed", as_printed), ("corrected", corrected)):
    run = partial(four_steps, x, A=A, B=B, C=C, l_c=8, carry=carry)
    moves[name] = f"{moved(31, run)}, {moved(0, run)}"
    print(f"{name:10}: {moves[name]}")
assert "31 moves outputs 8 to 31" in moves["as printed"]

# %% [markdown]
# It **leaks the future**. The step size of token 31 changes output 8, and token 0 is forgotten
# after output 15. (The *value* of token 31 doesn't leak. A causality test that changes values only
# would have passed this layer.) A model that is trained with it could learn to use the leak, and
# its loss would look a little too good.
#
# How could that go unnoticed? One reason may be that the paper's Listing 4 runs this code only
# where the kernel fails. Another is the step size, which in the listing starts at $\Delta \approx
# \mathrm{softplus}(0) = 0.69$. Over a chunk of 64 tokens even the slowest head's state decays to
# $e^{-44}$, and the error is below $10^{-12}$. The mistake shows when the model has learned to
# remember, that is, when $\Delta$ is small. With $\Delta = 0.01$ the relative error is 0.97, with
# 0.001 it is 2.9.
#
# So a test of this layer needs more than one chunk, and something that survives a chunk: small step
# sizes, for instance. It also needs $1 < g < h$, or it can't tell repeated groups from tiled ones.
#
# Lab [03a](labs/03a_error_budget.ipynb) runs the kernels that real models train on, and compares
# them with the recurrence.


# %% tags=["setup"]
def slip(step, l_c):
    """The error of the printed step 3, relative, for 4 heads and one step size for 1,024 tokens."""
    x, _, _, B, C = inputs(b=1, l=1024, seed=20)
    dt, A = torch.full((1, 1024, 4), step), -torch.arange(1.0, 5.0)
    y = ssd.ssd_chunked(x, dt, A, B, C)
    printed = four_steps(x, dt, A, B, C, l_c=l_c, carry=as_printed)
    return ((printed - y).abs().max() / y.abs().max()).item()


# %% tags=["guard"]
print("step size          0.69     0.01    0.001")
for l_c in (64, 256):
    errors = [slip(step, l_c) for step in (0.69, 0.01, 0.001)]
    shown = [f"{e:8.2g}" if e > 1e-12 else "  <1e-12" for e in errors]
    print(f"chunks of {l_c:3}:", *shown)
    assert errors[0] < 1e-12 < errors[1] < errors[2]

# %% [markdown]
# ## Summary
#
# - Unrolled, a linear recurrence is a lower triangular matrix. Blocks that don't reach above the
#   diagonal have rank at most $n$, and the state is the waist they pass through.
# - With one decay per head, the decay leaves the sum and $C_t \cdot B_s$ remains: attention without
#   a softmax. With one decay per entry of the state, as in Mamba, no single mask on $CB^\top$ will
#   do.
# - In chunks: attention inside, then write, carry, read. For a fixed chunk size the work is linear
#   in the length, and any chunk size gives the same function.
# - A test needs several chunks, something that survives a chunk, and $1 < g < h$. A test of
#   causality needs no right answer.
#
# ## Exercises
#
# **1 · easy.** With pencil and paper. Four tokens have $\alpha = (0.3, 0.5, 0.2, 0.5)$. What is
# $L_{30}$, what is $L_{11}$, and what is the rank of the block with rows 2 to 3 and columns 0 to 1?


# %% tags=["exercise"]
def by_pencil():
    """L_30, L_11 and the rank: three numbers."""
    ### BEGIN SOLUTION
    return 0.5 * 0.2 * 0.5, 1.0, 1
    ### END SOLUTION


# %% tags=["check"]
L = decay_matrix(torch.tensor([0.3, 0.5, 0.2, 0.5]).log())
wanted = L[3, 0].item(), L[1, 1].item(), int(matrix_rank(L[2:, :2]))
assert all(abs(mine - right) < 1e-9 for mine, right in zip(by_pencil(), wanted, strict=True))
print("all three are right")

# %% [markdown]
# **2 · easy.** Measure your own machine. Write a function that calls another one five times and
# returns the median of the times in seconds. (Hint: `time.perf_counter`.) Then compare the three
# forms on `inputs(b=1, l=512, h=4, p=64, n=64)` in float32. Is the form with the fewest FLOPs the
# fastest?


# %% tags=["exercise"]
def seconds(function):
    """The median time of five calls, in seconds."""
    ### BEGIN SOLUTION
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[2]
    ### END SOLUTION


# %% tags=["check"]
pauses = iter([0.01, 0.5, 0.02, 0.01, 0.02])
taken = seconds(lambda: time.sleep(next(pauses)))
assert 0.01 < taken < 0.4, "the median of five calls, not their mean or their sum"
assert next(pauses, None) is None, "five calls"
print("the median of five calls")

# %% [markdown]
# **3 · medium.** Write the test. `f(x, z, A, B, C)` claims to be SSD in float64. Here $z$ (b, l, h)
# is the raw output of a linear layer, and the step sizes are $\mathrm{softplus}(z)$. Is it right?
# It takes any length, and may work in chunks of any size up to 64. Three things may be wrong: the
# sum of section 9, tiled groups, a softplus that is missing, as in Ch Listing 2, so that $\Delta$
# may be negative. (Hint: `inputs` makes random tensors and `ssd.ssd_recurrent` is right. With which
# $l$, $g$ and $z$ does each mistake show?)


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
    "axis": dict(carry=partial(carry_at_once, dim=2)),
    "step": dict(step=lambda z: z),
    "groups": dict(tiled=True),
}
for l_c in (1, 16, 64):
    assert is_right(candidate(l_c)), f"right, chunks of {l_c}: refused"
    for name, options in wrong.items():
        assert not is_right(candidate(l_c, **options)), f"{name}, chunks of {l_c}: not seen"
print("three right forms passed, nine wrong ones refused")

# %% [markdown]
# **4 · hard.** Cut the sequence in two. The first half knows nothing of the second; the second is
# its own SSD plus what it reads from the state of the first. Write SSD as a function that calls
# itself on the halves (a single token is the base case) and never forms an $l \times l$ matrix, for
# one head. Return `y` and the final state. (Hint: the state of the first half reaches token $t$ of
# the second faded by the decays since the cut, and the end of the second half faded by all of
# them.)


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
whole, lengths = ssd_halves, []


def ssd_halves(*tensors):  # notes the length of each call, and hands it on
    lengths.append(len(tensors[0]))
    return whole(*tensors)


results = []
for l in (1, 29, 64):
    x, dt, A, B, C = inputs(b=1, l=l, h=1, g=1)
    y, final = ssd.ssd_recurrent(x, dt, 3 * A, B, C, return_final_state=True)
    got, state = ssd_halves(x[0, :, 0], dt[0, :, 0], 3 * A[0], B[0, :, 0], C[0, :, 0])
    results.append((l, got, y[0, :, 0], state, final[0, 0]))
ssd_halves = whole
for l, got, y, state, final in results:
    check(f"SSD by halves = recurrence, l = {l}", got, y)
    check(f"SSD by halves: same final state, l = {l}", state, final)
assert [lengths.count(l) for l in (64, 32, 16)] == [1, 2, 4], "it does not call itself on halves"

# %% [markdown]
# **5 · hard.** Now from the bottom up: begin with $l$ stretches of one token each, and join
# neighbours in rounds, all joins of a round independent of each other, until one stretch is left.
# What must a stretch hand over, so that two can be joined without their tokens? Return the final
# state and the number of rounds, which should be as small as it can be. (Hint: what happens to the
# state of the first stretch while the second is read? A stretch without a neighbour waits.)


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
for l, fewest in ((1, 0), (2, 1), (29, 5), (1024, 10)):
    x, dt, A, B, C = inputs(b=1, l=l, h=1, g=1, dt=0.01)
    _, final = ssd.ssd_recurrent(x, dt, 3 * A, B, C, return_final_state=True)
    state, rounds = state_in_rounds(x[0, :, 0], dt[0, :, 0], 3 * A[0], B[0, :, 0])
    check(f"l = {l}: the state of the recurrence", state, final[0, 0])
    print(f"  {rounds} rounds")
    assert rounds == fewest

# %% [markdown]
# ## Further reading
#
# - Dao and Gu, *Transformers are SSMs: Generalized Models and Efficient Algorithms Through
#   Structured State Space Duality* (2024): the duality, semiseparable matrices, the chunked
#   algorithm.
# - Katharopoulos et al., *Transformers are RNNs* (2020): linear attention, our case $\alpha = 1$.
# - Shi et al., *Wonderful Matrices*, Appendix A and Listings 2–4: SSD as this architecture uses
#   it.
# - Gu and Dao, *Mamba* (2023): selection, with a diagonal $A$, and why a step size that depends on
#   the token matters.
# - `cheems_ref/ssd.py`: the listing this notebook arrives at.
