# %% [markdown]
# # 03 · State space duality
#
# **One layer, computed in two ways: as a recurrence that carries a small state, and as attention
# that looks back at everything. By the end you will have written the algorithm that combines them,
# in two dozen lines, and compared it with the kernels that train real models.** You will be able to
#
# - write a recurrence as a matrix and say what is special about its blocks;
# - show where attention without a softmax comes from, and which step needs a single decay per head;
# - compute the layer in chunks, in time linear in the length;
# - find a mistake in a published listing that leaks the future and that most tests would miss.
#
# You need matrix products, attention as a formula, and a little PyTorch. Chapters 01 and 02 help,
# but we repeat the equations we use.
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
from torch.utils.flop_counter import FlopCounterMode

from cheems_ref import plotting, ssd
from cheems_ref.kernels import kernel_status
from cheems_ref.linear_attention import gated_linear_attention
from cheems_ref.mamba import selective_scan
from cheems_ref.verify import check, check_gradients, must_differ

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

state, outputs = torch.tensor(0.0), []
for t in range(4):
    state = alpha[t] * state + B[t] * x[t]
    outputs.append(C[t] * state)
    print(f"t = {t}   h = {state.item():.3f}   y = {outputs[t].item():.3f}")
y = torch.stack(outputs)

# %% [markdown]
# Now **unroll** it. Put the equation for $h_{t-1}$ into the one for $h_t$, and so on, until only
# inputs are left. Input $s$ arrives at token $t$ multiplied by every decay since it was written:
#
# $$y_t = C_t \sum_{s \le t} \big(\alpha_t\,\alpha_{t-1} \cdots \alpha_{s+1}\big)\, B_s\,x_s.
#   \tag{3.2}$$
#
# Does the product begin with $\alpha_s$ or with $\alpha_{s+1}$? With $\alpha_{s+1}$: a token that
# reads what it has just written sees it at full strength. It's an easy mistake to make, and a hard
# one to see when the decays are close to 1. So let's make it:


# %%
def unrolled(x, alpha, B, C, first=1):
    """Equation 3.2: the decays of steps s + first to t. (Right is first = 1.)"""
    outputs = []
    for t in range(len(x)):
        terms = [alpha[s + first : t + 1].prod() * B[s] * x[s] for s in range(t + 1)]
        outputs.append(C[t] * sum(terms))
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
# Computing each entry as a product would be slow. You might try one running product and divide two
# of its entries. That works for short texts, but $0.5^{1100}$ is zero in float64, and 0 / 0 is NaN.
# Sums of logarithms don't underflow: $L_{ts} = \exp(\log\alpha_{s+1} + \dots + \log\alpha_t)$.


# %%
def decay_matrix(log_alpha):
    """L of equation 3.3 from the log decays: (l,) -> (l, l)."""
    below = log_alpha[:, None].expand(-1, len(log_alpha)).tril(-1)  # row t: log α_t, where s < t
    return below.cumsum(dim=0).exp().tril()  # tril again: above the diagonal exp(0) = 1


alpha = torch.tensor([0.5, 0.5, 0.9, 0.1])
print("below:\n", alpha.log()[:, None].expand(-1, 4).tril(-1).numpy().round(2))
print("L:\n", decay_matrix(alpha.log()).numpy().round(3))

# %% [markdown]
# In `below`, column $s$ holds the log decays of the tokens after $s$. A running sum down each
# column then gives all entries at once. Check it against the four tokens:

# %%
x, B = torch.tensor([1.0, 2.0, 0.0, 3.0]), torch.tensor([1.0, 1.0, 2.0, 1.0])
C = torch.tensor([1.0, 1.0, 1.0, 2.0])
L = decay_matrix(alpha.log())
by_products = torch.tensor(
    [[alpha[s + 1 : t + 1].prod() * (s <= t) for s in range(4)] for t in range(4)]
)
check("L from sums of logarithms = L from products", L, by_products)
from_the_start = alpha.log()[:, None].expand(-1, 4).cumsum(dim=0).exp().tril()
_ = must_differ("sums that begin at token 0", from_the_start, L)

M = C[:, None] * L * B  # rows times C_t, columns times B_s
check("y = M x", M @ x, unrolled(x, alpha, B, C))
_ = must_differ("target and source exchanged", M.T @ x, unrolled(x, alpha, B, C))

# %% [markdown]
# What does $L$ look like? We draw it for three ways to forget: with a steady decay, with a decay
# that varies, and with a reset at token 16. Before you look: in one of them an entry depends only
# on how far apart the two tokens are. Which?

# %%
l = 32
steady = torch.full((l,), math.log(0.9))
varied = -random(l, seed=1).abs() / 4
reset = steady.clone()
reset[16] = -math.inf  # a decay of exactly 0
L_steady, L_varied, L_reset = (decay_matrix(g) for g in (steady, varied, reset))

distance = torch.arange(l)[:, None] - torch.arange(l)
check("steady: L_ts is 0.9 to the power t - s", L_steady, (0.9**distance).tril())
neighbours = L_varied.diagonal(-1)
print(f"varied: entries beside the diagonal from {neighbours.min():.3f} to {neighbours.max():.3f}")
check("reset: from row 16 on, columns 0 to 15 are zero", L_reset[16:, :16], torch.zeros(16, 16))

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
# If you write this yourself, beware: `decay_matrix` sums from $s+1$ on and survives a reset. The
# obvious shortcut, the difference of two running totals, gives $\infty - \infty$ there, which is
# NaN. (We use the shortcut in sections 6 and 7, inside a chunk, and in section 9 across chunks,
# always with finite totals.)
#
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
L = L_varied = decay_matrix(-random(32, seed=1).abs() / 4)
ranks = [int(matrix_rank(L[corner:, : corner + 1])) for corner in range(32)]
print("ranks of the", len(ranks), "largest blocks:", set(ranks))
print("rank of a block that reaches above the diagonal:", int(matrix_rank(L[4:12, 0:9])))
assert set(ranks) == {1} and matrix_rank(L[4:12, 0:9]) > 1

# %% [markdown]
# A lower triangular matrix in which all these blocks have rank at most $n$ is called
# *$n$-semiseparable*. Remember this, because the fast algorithm of section 6 is built on it. A
# block of rank one is a narrow waist: all that the past can tell the future has to fit through one
# number. You have met that number. It's the state.
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
# the token. That's why $A$ needn't depend on the token: the product already does.


# %%
def recurrence(x, dt, A, B, C):
    """Equation 3.4 for one head: x (l, p), dt (l,), A a number, B and C (l, n) -> y (l, p)."""
    state, outputs = torch.zeros(x.shape[1], B.shape[1]), []
    for t in range(len(x)):
        state = torch.exp(dt[t] * A) * state + dt[t] * torch.outer(x[t], B[t])
        outputs.append(state @ C[t])
    return torch.stack(outputs)


l, p, n = 24, 5, 4
x, B, C = random(l, p, seed=2), random(l, n, seed=3), random(l, n, seed=4)
dt, A = random(l, seed=5).abs() / 4, torch.tensor(-1.0)
y = recurrence(x, dt, A, B, C)

# %% [markdown]
# What happens if $\Delta_t = 0$? Then $\alpha_t = 1$ and nothing is written. To every other token
# it is as if this one weren't there. That's how layers skip padding:

# %%
quiet, others = dt.clone(), torch.arange(l) != 10
quiet[10] = 0.0
without = recurrence(x[others], dt[others], A, B[others], C[others])
check("token 10 with Δ = 0 = token 10 left out", recurrence(x, quiet, A, B, C)[others], without)
_ = must_differ("token 10 with its own Δ", y[others], without)

# %% [markdown]
# Now unroll, as before. The decays are numbers, so they can be pulled to the front. What remains
# between reader $t$ and writer $s$ is an inner product of query and key:
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
# > "[…] materializing the semi-separable matrix $M = L \circ CB^\top = L \circ QK^\top$ and
# > performing quadratic matrix-vector multiplication — is equivalent to quadratic masked kernel
# > attention." — WM §2
#
# The paper's formula leaves out $\Delta$. Its listing has it, and we keep it. In code, (3.5) is one
# line:

# %%
L, scores = decay_matrix(dt * A), C @ B.T
check("quadratic form = recurrence", (L * scores) @ (dt[:, None] * x), y)
_ = must_differ("mask forgotten: attention to the future", scores @ (dt[:, None] * x), y)
_ = must_differ("step size forgotten in the write", (L * scores) @ x, y)

M = L * scores * dt  # as one matrix that acts on x: column s times dt_s
ranks = [int(matrix_rank(M[corner:, : corner + 1])) for corner in range(l)]
print(f"n = {n}; ranks of the largest blocks:", *ranks)

# %% [markdown]
# This is the **duality**: a recurrence with a state on one side, attention without its softmax on
# the other, and they are the same function. The ranks have grown from 1 to $n$. The waist is as
# wide as the state.
#
# Two special cases are worth naming. If nothing fades ($A = 0$, $\Delta = 1$), the mask is the
# plain causal one, and you get the *linear attention* of chapter 02. With the decay, you get
# chapter 02's gated rule, with one gate per token. (The model called *GLA* in the literature has
# $n$ gates per token. We come to that in a moment.)

# %%
nothing_fades = recurrence(x, torch.ones(l), torch.tensor(0.0), B, C)
by_sums = torch.stack([sum((C[t] @ B[s]) * x[s] for s in range(t + 1)) for t in range(l)])
check("α = 1 gives the causal mask", decay_matrix(torch.zeros(l)), torch.ones(l, l).tril())
check("α = 1, Δ = 1: linear attention", nothing_fades, by_sums)
_ = must_differ("α < 1 is not linear attention", recurrence(x, torch.ones(l), A, B, C), by_sums)

q, k, v = (tensor[None, :, None] for tensor in (C, B, dt[:, None] * x))  # (b, l, h, ·)
gated = gated_linear_attention(q, k, v, (dt * A)[None, :, None])
check("gated linear attention = equation 3.4", gated[0, :, 0], y)
swapped = gated_linear_attention(k, q, v, (dt * A)[None, :, None])
_ = must_differ("queries and keys exchanged", swapped[0, :, 0], y)

# %% [markdown]
# ## 5 · Why one decay per head
#
# Mamba, at the end of chapter 01, came before SSD and is more general in its decays. Each entry
# $i$ of its state fades at its own rate $A_i$. For one channel of input,
#
# $$h_{t,i} = e^{\Delta_t A_i}\, h_{t-1,i} + \Delta_t\, B_{t,i}\, x_t, \qquad
#   y_t = \sum_i C_{t,i}\, h_{t,i}. \tag{3.6}$$
#
# Why would SSD give that up? Unroll it once more and watch for the step that breaks. Each entry has
# its own matrix of decays, $L^{(i)}$:
#
# $$y_t = \sum_{s \le t} \Big( \sum_i C_{t,i}\; L^{(i)}_{ts}\; B_{s,i} \Big)\, \Delta_s x_s.
#   \tag{3.7}$$
#
# With a single rate, $L_{ts}$ doesn't depend on $i$, leaves the inner sum, and $C_t \cdot B_s$
# remains. **That is the step.** With $n$ rates, the decay stays stuck between $C$ and $B$. No mask
# can be applied to $CB^\top$ itself. You need $n$ masks:
#
# $$M = \Big(\sum_{i} L^{(i)} \circ C_{:,i}\,B_{:,i}^\top\Big)\,\mathrm{diag}(\Delta). \tag{3.8}$$


# %%
def diagonal_matrix(dt, A, B, C):
    """M of equation 3.8 for one channel: dt (l,), A (n,), B and C (l, n) -> (l, l)."""
    terms = [decay_matrix(dt * A[i]) * torch.outer(C[:, i], B[:, i]) for i in range(len(A))]
    return sum(terms) * dt


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
# Part of it can be rescued. Each of the $n$ terms has blocks of rank one, so their sum has rank at
# most $n$, and the state is still the waist. What's lost is the single big matrix product. (On
# paper you can have it back: with $\tau_t = \Delta_0 + \dots + \Delta_t$, put $e^{A_i \tau_t}$ into
# $C_t$ and $e^{-A_i \tau_s}$ into $B_s$. The second factor soon overflows, so GLA, by Yang et al.,
# 2023, does this in short chunks.) Mamba-2 chose one rate per head, and Cheems follows Mamba-2.
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
# Let $\sigma_t$ be the log decay from the start of a chunk up to its token $t$, with $t$'s own step
# included (`total` in the code), and $\sigma_{\text{end}}$ that of its last token. The decay over
# all of chunk $j$ is $a_j = e^{\sigma_{\text{end}}}$. Then for token $s$ in chunk $j$ and token $t$
# in a later chunk $i$
#
# $$M_{ts} =
#   \underbrace{e^{\sigma_t}\, C_t}_{\text{read}}\;\cdot\;
#   \underbrace{a_{j+1} \cdots a_{i-1}}_{\text{carry}}\;\cdot\;
#   \underbrace{e^{\sigma_{\text{end}} - \sigma_s}\; B_s\,\Delta_s}_{\text{write}} \tag{3.9}$$
#
# For neighbouring chunks the carry is 1.


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
# Let's do it for one head, with 32 tokens in 4 chunks of 8 and $n = 2$. `rearrange` cuts $M$ into
# blocks, so that we can compare as we go:


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
print("ranks of the blocks, with n =", n)
print(matrix_rank(blocks))

x_c = rearrange(x, "1 (c l) 1 p -> c l p", l=l_c)  # l is now the place in a chunk
dt_c = rearrange(dt, "1 (c l) 1 -> c l", l=l_c)
B_c = rearrange(B, "1 (c l) 1 n -> c l n", l=l_c)
C_c = rearrange(C, "1 (c l) 1 n -> c l n", l=l_c)
total = (dt_c * A).cumsum(dim=1)  # σ of (3.9)

# %% [markdown]
# **Step 1: attention inside each chunk.** This is the quadratic form you already have, on 8 tokens
# instead of 32. It fills the diagonal blocks:

# %%
L = torch.stack([decay_matrix(log_alpha) for log_alpha in dt_c * A])
inside = L * (C_c @ B_c.mT) * dt_c[:, None, :]  # (c, l, l): one small matrix per chunk
y_inside = inside @ x_c  # (c, l, p)
check("step 1 fills the diagonal blocks", inside, torch.stack([blocks[i, i] for i in range(c)]))


# %% tags=["setup"]
def state_after(start, stop):
    """What tokens start to stop - 1 leave behind, starting from an empty state: (p, n)."""
    part = slice(start, stop)
    tokens = (x[:, part], dt[:, part], A, B[:, part], C[:, part])
    return ssd.ssd_recurrent(*tokens, return_final_state=True)[1][0, 0]


# %% [markdown]
# **Step 2: write.** If a chunk started with an empty state, what would it leave behind? Every
# token's write, faded until the end of the chunk:

# %%
to_end = (total[:, -1:] - total).exp()  # (c, l)
written = einsum("cl,cln,clp->cpn", to_end * dt_c, B_c, x_c)
alone = torch.stack([state_after(i * l_c, (i + 1) * l_c) for i in range(c)])
check("step 2 = the state of each chunk run alone", written, alone)

# %% [markdown]
# **Step 3: carry.** Here is the recurrence again, but with chunks for tokens: fade by the decay
# over a whole chunk, add what the chunk has written. There are $c$ of these steps and not $l$. As
# written here, this is the only sequential part. (Exercise 5 makes it parallel.)

# %%
state, incoming = torch.zeros(p, n), []
for decay, write in zip(total[:, -1].exp(), written, strict=True):
    incoming.append(state)
    state = decay * state + write
incoming = torch.stack(incoming)  # (c, p, n): the state at the start of each chunk

by_recurrence = torch.stack([state_after(0, i * l_c) for i in range(1, c)])
check("step 3 gives each chunk the state of the recurrence", incoming[1:], by_recurrence)
_ = must_differ("writes added up without decay", written.cumsum(0)[:-1], by_recurrence)

# %% [markdown]
# **Step 4: read.** Each token queries the state that its chunk started with, faded up to the token:

# %%
y_between = einsum("cl,cln,cpn->clp", total.exp(), C_c, incoming)
y = ssd.ssd_recurrent(x, dt, A, B, C)[0, :, 0]
check("four steps = recurrence", rearrange(y_inside + y_between, "c l p -> (c l) p"), y)
_ = must_differ("step 4 left out", rearrange(y_inside, "c l p -> (c l) p"), y)

# %% [markdown]
# ## 7 · All heads, in two dozen lines
#
# That's the algorithm. Here are the same four steps for every sequence in the batch and every head
# at once. Heads share keys and queries in groups: head $i$ uses group $\lfloor i / (h/g) \rfloor$.
# The states lie on their side here, $n \times p$, so that a read is one product. Step 3 is passed
# in as a function, because in section 9 we'll swap in a published one.


# %%
def carry_in_turn(writes, over_chunk):
    """Step 3: writes (b, h, c, n, p), log decays (b, h, c) -> the state each chunk starts with."""
    state, incoming = torch.zeros_like(writes[:, :, 0]), []
    for i in range(writes.shape[2]):
        incoming.append(state)
        state = over_chunk[:, :, i, None, None].exp() * state + writes[:, :, i]
    return torch.stack(incoming, dim=2)


# %%
def four_steps(x, dt, A, B, C, *, l_c, carry=carry_in_turn):
    """SSD in chunks of l_c tokens, which divides l: x (b, l, h, p) -> y (b, l, h, p)."""
    B, C = (ssd.expand_groups(tensor, x.shape[2]) for tensor in (B, C))  # (b, l, h, n)
    v = dt[..., None] * x  # what a token writes
    v, B, C, log_alpha = (
        rearrange(tensor, "b (c l) h ... -> b h c l ...", l=l_c) for tensor in (v, B, C, dt * A)
    )
    total = log_alpha.cumsum(-1)  # (b, h, c, l)
    between_tokens = (
        total[..., :, None] - total[..., None, :]
    ).tril()  # tril: exp must not overflow
    inside = (between_tokens.exp().tril() * (C @ B.mT)) @ v  # step 1: attention inside
    to_end = (total[..., -1:] - total).exp()
    writes = (to_end[..., None] * B).mT @ v  # step 2: write, (b, h, c, n, p)
    incoming = carry(writes, total[..., -1])  # step 3: carry
    between = total.exp()[..., None] * (C @ incoming)  # step 4: read
    return rearrange(inside + between, "b h c l p -> b (c l) h p")


x, dt, A, B, C = inputs(l=72)
y = ssd.ssd_recurrent(x, dt, A, B, C)
for l_c in (1, 8, 24, 72):
    check(f"four steps in chunks of {l_c} = recurrence", four_steps(x, dt, A, B, C, l_c=l_c), y)

# %% [markdown]
# Look at the two ends of that list. With chunks of 1 the algorithm *is* the recurrence; with one
# chunk of 72 it is the quadratic form. Everything in between gives the same function, so you may
# choose the size that suits your hardware.
#
# The package has all forms under one signature: `x` (b, l, h, p), `dt` (b, l, h), `A` (h,), `B` and
# `C` (b, l, g, n). `ssd_chunked` takes any length, an initial state, and the skip connection $D$:

# %%
x, dt, A, B, C = inputs(l=77)
y, final = ssd.ssd_recurrent(x, dt, A, B, C, return_final_state=True)
got, state = ssd.ssd_chunked(x, dt, A, B, C, chunk_size=16, return_final_state=True)
check("chunks of 16 = recurrence", got, y)
check("chunks of 16: same final state", state, final)
M = ssd.semiseparable_matrix(dt, A, B, C)  # (b, h, t, s)
check("y = M x for every head", einsum("bhts,bshp->bthp", M, x), y)

# %% [markdown]
# **Writing text** needs one token at a time. Read the prompt in chunks, keep the final state, and
# go on with `ssd_step`. The state of a head has $p\,n$ numbers, after ten tokens and after ten
# million:

# %%
_, state = ssd.ssd_chunked(
    *(t[:, :50] if t.ndim > 1 else t for t in (x, dt, A, B, C)), return_final_state=True
)
decoded = []
for t in range(50, 77):
    y_t, state = ssd.ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], state)
    decoded.append(y_t)
check("prompt in chunks, then step by step = one pass", torch.stack(decoded, 1), y[:, 50:])

# %% [markdown]
# **Training** needs gradients, and two programs with equal values can still have different ones. We
# compare those of all seven inputs (x, Δ, A, B, C, D and the initial state), through the output and
# through the final state. Detaching the final state changes no value and loses the second path:


# %%
def form(function, **options):
    """The form as a function of all its tensors, the initial state included."""
    return lambda x, dt, A, B, C, D, state: function(
        x, dt, A, B, C, D=D, initial_state=state, return_final_state=True, **options
    )


everything = (*inputs(l=37), torch.ones(4), random(2, 4, 5, 3, seed=9))  # D, initial state
reference = form(ssd.ssd_recurrent)
check_gradients("quadratic = recurrent", form(ssd.ssd_quadratic), reference, everything)
check_gradients("chunked = recurrent", form(ssd.ssd_chunked, chunk_size=8), reference, everything)


# %% tags=["aside"]
steps = everything[1].clone().requires_grad_()
y, final = ssd.ssd_chunked(everything[0], steps, *everything[2:5], return_final_state=True)
through_y = torch.autograd.grad(y.sum(), steps, retain_graph=True)[0]
through_both = torch.autograd.grad(y.sum() + final.sum(), steps)[0]
_ = must_differ("final state detached", through_y, through_both)

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
# PyTorch can count the matrix products while they run. (The updates of the recurrence and of the
# carry are none, so the counter doesn't see them. The package's quadratic form also reads an
# initial state and makes the final one, $2\,l\,p\,n$ each. In its chunked form the heads of a group
# share their scores.)


# %%
def flops(function, length, h=2, p=16, n=16):
    """FLOPs of the matrix products for one row and one group of heads."""
    with FlopCounterMode(display=False) as counter:
        function(*inputs(b=1, l=length, h=h, p=p, g=1, n=n))
    return counter.get_total_flops()


h, p, n, l_c = 2, 16, 16, 64
for length in (128, 1024):
    forms = (ssd.ssd_recurrent, ssd.ssd_quadratic, ssd.ssd_chunked)
    recurrent, quadratic, chunked = (flops(function, length) for function in forms)
    states = 4 * length * h * p * n
    assert recurrent == 2 * length * h * p * n
    assert quadratic == 2 * length**2 * h * (n + p) + states
    assert chunked == 2 * length * l_c * (n + h * p) + states
    print(f"l = {length:5,}, FLOPs: {recurrent:9,}, {quadratic:11,}, {chunked:9,}: formula = count")
p, n, l_c = 64, 128, 256  # of a real model, per head and token
costs = {c: 2 * c * (n + p) + 4 * p * n + 2 * p * n / c for c in (*range(1, 30), l_c)}
print(
    f"a real head, per token: recurrence {5 * p * n:,}, in chunks of 256 {costs[256]:,.0f}",
    end=", ",
)
print(f"quadratic over 100 tokens {2 * 100 * (n + p):,}, over 110 {2 * 110 * (n + p):,}")
assert [c for c in costs if costs[c] < 5 * p * n] == [*range(3, 20)]
assert 100 < 5 * p * n / (2 * (n + p)) < 110

# %% [markdown]
# Eight times the tokens cost the recurrence and the chunked form eight times as much, and the
# quadratic form about 60 times. But did you expect the *recurrence* to be the cheapest? For texts
# of more than about a hundred tokens it is, and at real sizes as well: with $p = 64$, $n = 128$ it
# needs a third as many operations as chunks of 256. (Only chunks of 3 to 19 tokens would save
# work.) What chunks do is turn the work into large matrix products, with $l/l_c$ sequential steps
# instead of $l$. On hardware with thousands of arithmetic units, waiting is what costs you. Chapter
# 10 measures it.
#
# ## 9 · A mistake in print
#
# Here is a story about testing. WM's Listing 3 does step 3 for all chunks at once: a matrix of
# decays from each source chunk to each target chunk, times what the chunks have written, summed.
# Over which axis? Each target collects from its sources, so the sum has to run over the sources. In
# the code below that is `dim=3`. The paper prints `.sum(dim=2)`, which sums over the targets. (The
# Mamba-2 code of the transformers library had the same mistake: issue 34817, fixed by pull request
# 35154.)


# %%
def carry_at_once(writes, over_chunk, dim):
    """Step 3 as in WM Listing 3, all chunks at once; `dim` is the axis of its sum."""
    states = torch.nn.functional.pad(writes, (0, 0, 0, 0, 1, 0))  # a zero state in front
    sums = torch.nn.functional.pad(over_chunk, (1, 0)).cumsum(-1)  # (b, h, c + 1)
    decay = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()  # (b, h, target, source)
    products = decay[..., None, None] * states[:, :, None]  # (b, h, target, source, n, p)
    return products.sum(dim=dim)[:, :, :-1]


as_printed, corrected = partial(carry_at_once, dim=2), partial(carry_at_once, dim=3)
x, dt, A, B, C = inputs(l=32, dt=0.05)
y = ssd.ssd_recurrent(x, dt, A, B, C)
check("one chunk, as printed", four_steps(x, dt, A, B, C, l_c=32, carry=as_printed), y)
for l_c in (16, 8):
    printed = four_steps(x, dt, A, B, C, l_c=l_c, carry=as_printed)
    size = must_differ(f"{32 // l_c} chunks, as printed", printed, y, at_least=0.1)
    print(f"  largest error, relative: {size:.3f}")
    check(f"{32 // l_c} chunks, corrected", four_steps(x, dt, A, B, C, l_c=l_c, carry=corrected), y)

# %% [markdown]
# With a single chunk there is nothing to carry, and every test passes. With two or more, the output
# is wrong. But it's worse than wrong. Write out the printed sum. With $W_j$ for what chunk $j$ has
# written, chunk $j + 1$ starts from
#
# $$W_j \cdot \sum_{i = j+1}^{c} (\text{decay from the end of } j \text{ to the start of } i),$$
#
# where "chunk $c$" is the end of the text. It contains the decays of *later* chunks, and nothing
# that a chunk before chunk $j$ has written. If so, the layer sees the future and forgets the past.
# Does it? Change the last token's step size and see which outputs move, then do the same with the
# first token:


# %%
def moved(token, function):
    """The tokens whose output changes when one token's step size does: first and last."""
    later = dt.clone()
    later[:, token] += 0.5
    change = (function(later) - function(dt)).abs().amax(dim=(0, 2, 3)) > 1e-12
    return int(change.nonzero()[0]), int(change.nonzero()[-1])


wanted = {"as printed": ((8, 31), (0, 15)), "corrected": ((31, 31), (0, 31))}
for name, carry in (("as printed", as_printed), ("corrected", corrected)):
    run = partial(four_steps, x, A=A, B=B, C=C, l_c=8, carry=carry)
    last, first = moved(31, run), moved(0, run)
    print(f"{name:10}: token 31 moves outputs {last[0]} to {last[1]},", end=" ")
    print(f"token 0 moves outputs {first[0]} to {first[1]}")
    assert (last, first) == wanted[name]

# %% [markdown]
# It **leaks the future**. The step size of token 31 changes output 8. (The *value* of token 31
# doesn't. A causality test that changes values only would have passed this layer.) What leaks is
# only how fast later tokens make the state fade. But a model that is trained with it could learn to
# use that, and its loss would look a little too good.
#
# How could that go unnoticed? One reason may be that the paper's Listing 4 runs this code only
# where the kernel fails. Another is the step size. The paper's listing starts with $\Delta \approx
# \mathrm{softplus}(0) = 0.69$. Over a chunk of 64 tokens the state of the slowest head decays to
# $e^{-44}$ of its value. Nothing survives from one end of a full chunk to the other, so there is
# nothing to get wrong. The mistake shows when the model has learned to remember, that is, when
# $\Delta$ is small:


# %%
def slip(step, l_c):
    """The error of the printed step 3, relative, for 4 heads and one step size for 1,024 tokens."""
    x, _, _, B, C = inputs(b=1, l=1024, seed=20)
    dt, A = torch.full((1, 1024, 4), step), -torch.arange(1.0, 5.0)
    y = ssd.ssd_chunked(x, dt, A, B, C)
    printed = four_steps(x, dt, A, B, C, l_c=l_c, carry=as_printed)
    return ((printed - y).abs().max() / y.abs().max()).item()


steps = [0.69, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001]
slips = {l_c: [max(slip(step, l_c), 1e-12) for step in steps] for l_c in (256, 64, 16)}
print("step size     ", *(f"{step:8}" for step in steps))
for l_c, errors in slips.items():
    print(f"chunks of {l_c:3}:", *(f"{e:8.1e}" if e > 1e-12 else "   <1e-12" for e in errors))
assert slips[256][0] == slips[64][0] == 1e-12 and slips[16][0] > 1e-6
assert all(errors[-1] > 0.5 for errors in slips.values())

# %% [markdown]
# So a test of this layer needs more than one chunk, and something that survives a chunk: small step
# sizes, or a last chunk of only a few tokens. (The rows above have 1,024 tokens, which 16, 64 and
# 256 all divide.) It also needs $1 < g < h$, or it can't tell repeated groups from tiled ones
# (chapter 00). The test of causality above needs the chunks and the small steps, but neither the
# groups nor a right answer. `verify.is_causal(layer, width)` asks the same question of any layer,
# by cutting the text off at several dozen places, including just before and after chunk borders.
#
# ## 10 · The real kernel
#
# Now for the code that trains Mamba-2 models. The kernels of mamba-ssm are
# written in *Triton*, a language inside Python for GPU programs. Each kernel starts many small
# programs in parallel, and each program computes one tile of the result. You will recognise all
# five forward kernels:
#
# | kernel of mamba-ssm | ours | one program computes |
# |---|---|---|
# | `_chunk_cumsum_fwd` | `total` | one chunk of some heads |
# | `_chunk_state_fwd` | step 2, write | a tile of one chunk's $p \times n$ state |
# | `_state_passing_fwd` | step 3, carry | a slice of one head's state, *over all chunks* |
# | `_bmm_chunk_fwd` | $CB^\top$ | a tile of one chunk's scores, per group |
# | `_chunk_scan_fwd` | steps 4 and 1 | a tile of one chunk's output |
#
# Everything runs in parallel over chunks except the carry. The matrix $L$ is never stored: each
# program makes the tile of $L$ that it needs, multiplies, and throws it away. The backward pass
# recomputes things as well: it makes the states of the chunks again instead of storing them.
#
# No GPU? Triton has an interpreter that runs the same source on a CPU, slowly. So we can check the
# real kernel against the recurrence on a laptop. We give both the same numbers, rounded to float32:

# %% tags=["setup"]
status = kernel_status()
device = "cuda" if status.mode == "cuda" else "cpu"


def on_kernel(function, tensors, **options):
    """Run a function on float32 copies on the kernels' device; results in float32, on the CPU."""
    results = function(*(t.to(device, torch.float32) for t in tensors), **options)
    return tuple(t.cpu() for t in results)


def not_run():
    print("kernel rung: not run here.", status.reason)


# %%
rounded = [t.float().double() for t in (*inputs(b=1, l=40, n=16, p=8), torch.ones(4))]
rounded.append(random(1, 4, 8, 16, seed=9).float().double())  # the initial state
y, final = (t.float() for t in form(ssd.ssd_recurrent)(*rounded))

if status.available:
    got, state = on_kernel(form(ssd.ssd_kernel, chunk_size=16), rounded)
    check("kernel: output = recurrence", got, y, tol=1e-5)
    check("kernel: final state = recurrence", state, final, tol=1e-5)
    x, dt, A, B, C, D, initial = rounded
    swapped, _ = on_kernel(form(ssd.ssd_kernel), (x, dt, A, B.flip(2), C.flip(2), D, initial))
    _ = must_differ("kernel: groups swapped", swapped, y)
else:
    not_run()

# %% [markdown]
# Five published kernels and your two dozen lines compute the same function as the recurrence that
# you did on paper with four tokens. The kernel is checked to $10^{-5}$ here, where our own forms
# get $10^{-10}$. Is that rounding, or does the looser bound hide a bug? Lab
# [03a](labs/03a_error_budget.ipynb) settles the question.
#
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
