# %% [markdown]
# # 03 · State space duality
#
# **One map from sequences to sequences, computed in two ways: as a recurrence that carries a
# state, and as a masked attention that looks back.** When you are through you can
#
# - write the recurrence of a state space model as one matrix, and say what is special about it;
# - show that this matrix is masked attention without the softmax, and where the derivation needs
#   one decay per head (Mamba has one per state entry);
# - compute it in chunks, with work linear in the length, and say what each of four steps fills in;
# - decode from it one token at a time, and check that its forms have the same gradients;
# - run mamba-ssm's own kernels against it, without a GPU, and trace a difference to the rounding
#   that makes it;
# - recognise three mistakes of published listings, and write the test that sees them.
#
# Assumes: matrix products, softmax attention as a formula, a little PyTorch. Sections 3 and 4 look
# back at chapters 01 and 02, and repeat the equations they need.
#
# Sources: *Wonderful Matrices* (WM) §2, Appendix A and Listings 2–4; *Cheems* (Ch) Listing 2; Dao
# and Gu, *Transformers are SSMs* (2024), where the duality and the chunked algorithm come from.
# The code that this notebook builds up to is `cheems_ref/ssd.py`.
#
# How to read ✓, ✗ and *As printed*: chapter 00.

# %% tags=["setup"]
import json
import math
from functools import partial
from pathlib import Path

import torch
from einops import rearrange
from torch import einsum
from torch.linalg import matrix_rank

from cheems_ref import plotting, ssd, text
from cheems_ref.kernels import kernel_status
from cheems_ref.linear_attention import gated_linear_attention
from cheems_ref.mamba import selective_scan
from cheems_ref.verify import check, check_gradients, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read_record(name):
    return json.loads(Path(f"../figures/records/{name}.json").read_text())


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## Why this matters
#
# A language model reads a token and has to know what came before. There are two classic answers.
#
# - **A recurrence** keeps a *state* of fixed size and updates it with each token. Memory and time
#   per token do not depend on how long the text is. But the tokens are taken one after the other,
#   and hardware that could work on thousands at once waits.
# - **Attention** keeps *all* tokens and lets each one look back at every other. That is one large
#   matrix product, which is what hardware is built for. But work and memory grow with the square
#   of the length.
#
# State space duality says that for one family of models these are the same function. So we may
# train it like attention, run it like a recurrence, and mix the two.
#
# The chapter climbs a *ladder*: one number of state, then a matrix, then many heads, then blocks
# of tokens, then the kernels that train large models. Each *rung* is checked against the one
# below, and the lowest can be done on paper.
#
# **Letters of this chapter**
#
# | | | | |
# |---|---|---|---|
# | $b$ | rows of a batch | $x_t, y_t$ | input and output of token $t$ |
# | $l$ | length in tokens | $B_s$, $C_t$ | what token $s$ writes with, what token $t$ reads with |
# | $t$, $s$ | the token that reads, the token that writes | $h_t$ | the state after token $t$ |
# | $h$, $g$ | number of heads, of groups | $A$, $\Delta_t$ | decay rate $\le 0$, step size (`dt`) |
# | $p$, $n$ | head width, state size | $\alpha_t = e^{g_t}$ | decay of one token, its logarithm |
# | $c$, $l_c$ | chunks, tokens per chunk | $L$, $M$ | matrix of decays, whole map $y = Mx$ |
# | $D$ | skip, $y_t + Dx_t$ | $\tau_t$ | time passed, $\Delta_0 + \dots + \Delta_t$ |
#
# Two letters have two meanings, as in the papers: $h$ counts heads and $h_t$ is a state; $g$
# counts groups and $g_t$ is a log decay. The code says `state` and `log_alpha`.

# %% [markdown]
# ## 1 · A recurrence by hand
#
# Take one number per token, $x_t$, and one number of state, $h_t$. Each token lets the state fade
# by a factor $\alpha_t$, adds its own contribution $B_t x_t$, and reads the result with weight
# $C_t$:
#
# $$h_t = \alpha_t\,h_{t-1} + B_t\,x_t, \qquad y_t = C_t\,h_t, \qquad h_{-1} = 0. \tag{3.1}$$
#
# $\alpha_t$ is the *decay*: 1 keeps everything, 0 wipes the slate. $B_t$ says how strongly the
# token is *written*, $C_t$ how strongly the state is *read*. Four tokens:

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
# On paper: $h_0 = 1$, then $0.5 \cdot 1 + 2 = 2.5$, then $0.9 \cdot 2.5 = 2.25$ (as $x_2 = 0$,
# nothing is written), then $0.1 \cdot 2.25 + 3 = 3.225$.
#
# **Unroll it.** Put the line for $h_{t-1}$ into the line for $h_t$, and again, until only inputs
# are left. Each input arrives at token $t$ multiplied by the decays it has lived through, and
# those are the ones *after* its own step:
#
# $$y_t = C_t \sum_{s \le t} \big(\alpha_t\,\alpha_{t-1} \cdots \alpha_{s+1}\big)\, B_s\,x_s.
#   \tag{3.2}$$


# %%
def unrolled(x, alpha, B, C, first=1):
    """Equation 3.2: the decays of steps s + first to t. (Right is first = 1.)"""
    outputs = []
    for t in range(len(x)):
        terms = [alpha[s + first : t + 1].prod() * B[s] * x[s] for s in range(t + 1)]
        outputs.append(C[t] * sum(terms))
    return torch.stack(outputs)


check("unrolled sum = recurrence", unrolled(x, alpha, B, C), y)

# %% [markdown]
# For $s = t$ the product is empty and equals 1: a token is read undimmed in the step that writes
# it. It is easy to be off by one here. That mistake multiplies each term by one more factor,
# $\alpha_s$, and where the decays lie near 1 it is hard to see. So we plant it, and ask the
# verifier to notice:

# %%
wrong = unrolled(x, alpha, B, C, first=0)
print("right", *(f"{value:6.3f}" for value in y))
print("wrong", *(f"{value:6.3f}" for value in wrong))
_ = must_differ("decay that includes the token's own step", wrong, y)

# %% [markdown]
# ## 2 · The recurrence is a matrix
#
# Equation 3.2 is linear in $x$. So there is a matrix $M$ with $y = Mx$, and we can read its
# entries off:
#
# $$M_{ts} = C_t\; L_{ts}\; B_s, \qquad L_{ts} = \begin{cases}
#   \alpha_t\,\alpha_{t-1}\cdots \alpha_{s+1} & s \le t\\ 0 & s > t.\end{cases} \tag{3.3}$$
#
# Row $t$ belongs to the token that reads, the *target*; column $s$ to the one that writes, the
# *source*. $L$ is lower triangular, since a token cannot be read before it is written:
# *causality*. For the four tokens of section 1:

# %%
x = torch.tensor([1.0, 2.0, 0.0, 3.0])
alpha = torch.tensor([0.5, 0.5, 0.9, 0.1])
B = torch.tensor([1.0, 1.0, 2.0, 1.0])
C = torch.tensor([1.0, 1.0, 1.0, 2.0])

L = torch.zeros(4, 4)
for t in range(4):
    for s in range(t + 1):
        L[t, s] = alpha[s + 1 : t + 1].prod()
print(L)

# %% [markdown]
# Row $t$ of $L$ is scaled by $C_t$, column $s$ by $B_s$:

# %%
M = C[:, None] * L * B[None, :]
check("y = M x", M @ x, unrolled(x, alpha, B, C))
_ = must_differ("target and source exchanged", M.T @ x, unrolled(x, alpha, B, C))

# %% [markdown]
# A product per entry is slow. Could we divide one running product by another? Not for long: both
# underflow. With $\alpha_t = e^{g_t}$ the product becomes a sum, $L_{ts} = \exp(g_{s+1} + \dots +
# g_t)$, and sums do not underflow. Here is a decay over 10 of 1,100 tokens, $0.5^{10}$, both ways:

# %%
halves = torch.full((1100,), 0.5)
products, sums = halves.cumprod(0), halves.log().cumsum(0)
quotient = products[-1] / products[-11]
difference = sums[-1] - sums[-11]
print(f"running products end at {products[-1].item()}, and their quotient is {quotient.item()}")
print(f"running sums end at {sums[-1]:.1f}, and their difference gives {difference.exp():.4e}")
assert quotient.isnan()
check("a difference of sums = 0.5 to the power 10", difference.exp(), torch.tensor(0.5**10))

# %% [markdown]
# Below, column $s$ holds $g$ from row $s+1$ on, and a running sum down each column gives all its
# entries at once. (A difference of two running totals, as just now, is the same number on paper.
# In floating point it is a small difference of two large numbers, and loses digits. After a reset,
# where some $g = -\infty$, it is NaN: both totals are $-\infty$ from there on. Section 6 does it
# inside short chunks, with finite $g$ and totals in float64; section 11 measures what totals in
# float32 cost.)


# %%
def decay_matrix(log_alpha):
    """L of equation 3.3 from the log decays: (l,) -> (l, l)."""
    below = log_alpha[:, None].expand(-1, len(log_alpha)).tril(-1)  # g_t in row t, where s < t
    return below.cumsum(dim=0).exp().tril()  # tril again: above the diagonal exp(0) = 1


check("L from sums of logarithms = L from products", decay_matrix(alpha.log()), L)
from_the_start = alpha.log()[:, None].expand(-1, 4).cumsum(dim=0).exp().tril()
_ = must_differ("sums that begin at token 0", from_the_start, L)

# %% [markdown]
# What does $L$ look like? Here it is for three habits of forgetting, over 32 tokens: a steady
# decay, one that varies, and one that is wiped out at token 16.

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
check("reset: from row 16 on nothing of columns 0 to 15", L_reset[16:, :16], torch.zeros(16, 16))
for L in (L_steady, L_varied, L_reset):
    assert L.diagonal().eq(1).all() and L.triu(1).eq(0).all()

# %% tags=["figure"]
pictures = {
    r"steady: every $\alpha_t$ = 0.9": L_steady,
    r"varied: $\alpha_t$ depends on t": L_varied,
    "reset at t = 16": L_reset,
}
fig, _ = plotting.heatmaps(
    pictures, xlabel="source s", ylabel="target t", signed=False, unit="what is left"
)
plotting.save(
    fig,
    "03_decay_matrices",
    "Three lower triangular matrices with ones on the diagonal. With steady decay the entries "
    "depend on the distance from the diagonal; with varied decay they do not; with a reset at "
    "token 16 the block of rows from 16 on and columns before 16 is empty.",
)

# %% [markdown]
# With steady decay $L_{ts}$ depends on $t - s$ alone: that is a convolution (chapter 01). With
# decays that change it is not, and this is the point: a token can shut the door behind it (the
# third picture). A model whose $\alpha_t$ is computed from the token itself is called *selective*.
#
# **What is special about this matrix?** Take a block of $L$ on or below the diagonal: rows from
# $t_1$ on, columns up to $s_2$, with $s_2 \le t_1$. Every entry splits into "decay from $s$ to
# $s_2$" times "decay from $s_2$ to $t$". A product of a column and a row has rank one, or zero if
# a reset lies between $s_2$ and $t_1$. So the rank is at most one, however large the block. It is
# enough to look at the largest, whose upper right corner is on the diagonal; every other is part
# of one of these.

# %%
L = L_varied
ranks = [int(matrix_rank(L[corner:, : corner + 1])) for corner in range(l)]
print("ranks of the", len(ranks), "largest blocks:", set(ranks))
assert set(ranks) == {1}

# %% [markdown]
# For comparison, in this order: a block across a reset, one that reaches above the diagonal, and
# the whole matrix.

# %%
ranks = [int(matrix_rank(block)) for block in (L_reset[16:, :16], L[4:12, 0:9], L)]
print("across a reset:", ranks[0], "  above the diagonal:", ranks[1], "  all of L:", ranks[2])
assert ranks[0] == 0 and ranks[1] > 1 and ranks[2] == l

# %% [markdown]
# A lower triangular matrix whose blocks on or below the diagonal all have rank at most $n$ is
# called *$n$-semiseparable*. $L$ is 1-semiseparable, and with a wider state the matrix $M$ of the
# next section is $n$-semiseparable. That is what the chunked form rests on. A block of low rank
# can be applied through a narrow waist, and the waist is the state.

# %% [markdown]
# ## 3 · A wider state: attention without the softmax
#
# Let the state be a matrix with $p$ rows and $n$ columns. A token now has a *value* $x_t \in
# \mathbb{R}^p$, and writes it under the *key* $B_t \in \mathbb{R}^n$; a reader asks with the
# *query* $C_t \in \mathbb{R}^n$:
#
# $$h_t = e^{\Delta_t A}\, h_{t-1} + \Delta_t\, x_t B_t^\top, \qquad y_t = h_t\, C_t. \tag{3.4}$$
#
# The decay is still one number per token, $\alpha_t = e^{\Delta_t A}$, with $A \le 0$ fixed and a
# *step size* $\Delta_t \ge 0$ that depends on the token. The same $\Delta_t$ scales the write.


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
print("y:", tuple(y.shape))

# %% [markdown]
# A token with $\Delta_t = 0$ neither fades the state nor writes. For the others it has not
# happened; we will use that for padding.

# %%
quiet, others = dt.clone(), torch.arange(l) != 10
quiet[10] = 0.0
without = recurrence(x[others], dt[others], A, B[others], C[others])
check("token 10 with Δ = 0 = token 10 left out", recurrence(x, quiet, A, B, C)[others], without)
_ = must_differ("token 10 with its own Δ", y[others], without)

# %% [markdown]
# Unroll as before. The decays are numbers, so they commute with the matrices and can be pulled to
# the front; what is left between reader $t$ and writer $s$ is an inner product:
#
# $$y_t = \sum_{s \le t} L_{ts}\,(C_t \cdot B_s)\,\Delta_s x_s
#   \qquad\Longleftrightarrow\qquad
#   Y = \big(L \circ C B^\top\big)\,(\Delta X). \tag{3.5}$$
#
# Here ∘ is the product entry by entry, and row $t$ of $X$, $Y$, $B$, $C$ belongs to token $t$.
# Rename $C \to Q$, $B \to K$, $\Delta X \to V$ and read it again: $(L \circ QK^\top)V$. This is
# masked attention. The softmax is gone, and the mask is no longer 0 or 1 but fades with the
# decays.
#
# > "[…] materializing the semi-separable matrix $M = L \circ CB^\top = L \circ QK^\top$ and
# > performing quadratic matrix-vector multiplication — is equivalent to quadratic masked kernel
# > attention." — WM §2
#
# (A *kernel* is here a function of query and key that takes the place of $e^{q \cdot k}$. In
# section 10 it is a program for a GPU.)
#
# The paper's formulas leave $\Delta$ out, its Listing 3 has it; we keep it. Read as one matrix
# that acts on $X$, equation 3.5 is $Y = MX$ with $M = (L \circ CB^\top)\,\mathrm{diag}(\Delta)$.
# As code:

# %%
L = decay_matrix(dt * A)
scores = C @ B.T
check("quadratic form = recurrence", (L * scores) @ (dt[:, None] * x), y)
_ = must_differ("mask forgotten: attention to the future", scores @ (dt[:, None] * x), y)
_ = must_differ("step size forgotten in the write", (L * scores) @ x, y)

# %% [markdown]
# Two forms, one function: this is the **duality**. Section 9 counts what each costs. The matrix is
# $n$-semiseparable: $CB^\top$ has rank at most $n$, and a block of $L$ on or below the diagonal, of
# rank at most one, only scales its rows and columns.

# %%
M = L * scores * dt  # column s times dt_s
ranks = [int(matrix_rank(M[corner:, : corner + 1])) for corner in range(l)]
print(f"n = {n}; ranks of the largest blocks:", *ranks)
assert max(ranks) == n
assert scores.ne(0).all() and M.triu(1).eq(0).all()

# %% tags=["figure"]
fig, axes = plotting.figure(1, 3, size=(12, 3.8))
plotting.heatmap(axes[0], scores, title="$CB^T$: who asks for whom", ylabel="target t")
plotting.heatmap(axes[1], L, title="L: what is left", signed=False)
plotting.heatmap(axes[2], M, title=r"$M = (L \circ CB^T)\,$diag($\Delta$)")
for ax in axes:
    ax.set_xlabel("source s")
plotting.save(
    fig,
    "03_duality",
    "Three square matrices side by side: the inner products of C and B, which fill the whole "
    "square; the decays L, which fill the lower triangle; and M, their entrywise product with "
    "each column times its step size, zero above the diagonal.",
)

# %% [markdown]
# **Linear attention is the case $\alpha = 1$.** Let nothing fade ($A = 0$) and let every token
# count once ($\Delta = 1$). Then $L$ is the plain causal mask of ones, and what is left is the
# linear attention of chapter 02, there written with $q$, $k$ and $v$:

# %%
q, k, v = C, B, x
by_sums = torch.stack([sum((q[t] @ k[s]) * v[s] for s in range(t + 1)) for t in range(l)])
check("α = 1 gives the causal mask", decay_matrix(torch.zeros(l)), torch.ones(l, l).tril())
nothing_fades = recurrence(x, torch.ones(l), torch.tensor(0.0), B, C)
check("α = 1, Δ = 1: linear attention", nothing_fades, by_sums)
_ = must_differ("α < 1 is not linear attention", recurrence(x, torch.ones(l), A, B, C), by_sums)

# %% [markdown]
# **Gated linear attention is equation 3.4 in other letters.** Chapter 02 came to $S_t = \alpha_t
# S_{t-1} + v_t k_t^\top$ from attention's side (equation 2.6). Put $S = h$, $k = B$, $q = C$, $v =
# \Delta x$ and $g = \Delta A$. The package's function takes (b, l, h, ·), so one row and one head
# are added:

# %%
q, k, v = (tensor[None, :, None] for tensor in (C, B, dt[:, None] * x))
log_alpha = (dt * A)[None, :, None]
gated = gated_linear_attention(q, k, v, log_alpha)
check("gated linear attention = equation 3.4", gated[0, :, 0], y)
swapped = gated_linear_attention(k, q, v, log_alpha)
_ = must_differ("queries and keys exchanged", swapped[0, :, 0], y)

# %% [markdown]
# ## 4 · Why one decay per head
#
# Mamba, at the end of chapter 01, has more. There each channel has one number of input $x_t$, a
# state of $n$ numbers, and a *diagonal* matrix $A$: entry $i$ of the state fades at a rate $A_i$
# of its own. With $B_{t,i}$ for entry $i$ of $B_t$,
#
# $$h_{t,i} = e^{\Delta_t A_i}\, h_{t-1,i} + \Delta_t\, B_{t,i}\, x_t, \qquad
#   y_t = \sum_i C_{t,i}\, h_{t,i}. \tag{3.6}$$
#
# Where does the derivation of section 3 stop? Unroll it. Each entry has its own matrix of decays,
# $L^{(i)}_{ts} = \exp\big(A_i\,(\Delta_{s+1} + \dots + \Delta_t)\big)$:
#
# $$y_t = \sum_{s \le t} \Big( \sum_i C_{t,i}\; L^{(i)}_{ts}\; B_{s,i} \Big)\, \Delta_s x_s.
#   \tag{3.7}$$
#
# With one rate for all entries, $L_{ts}$ leaves the inner sum, and what stays inside is $C_t \cdot
# B_s$. **That factoring is the step that fails.** With $n$ rates the decay stands between $C$ and
# $B$, and there is no product $CB^\top$ to be masked. What still holds is a sum of $n$ masked
# terms, each of rank one before its mask:
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

# %% [markdown]
# The planted mistake is to factor all the same, with the mean of the four rates. For four equal
# rates it is no mistake: there the sum is $L \circ CB^\top$.

# %%
mean = A.mean().expand(n)
factored = decay_matrix(dt[0, :, 0] * A.mean()) * (C[0] @ B[0].T) * dt[0, :, 0]
_ = must_differ("one decay pulled out of the sum", factored @ x[0, :, 0], y)
check("equal rates: it can be", diagonal_matrix(dt[0, :, 0], mean, B[0], C[0]), factored)

# %% [markdown]
# **What does not fail.** A block of $L^{(i)}$ has rank at most one, so each of the $n$ terms has,
# and their sum has at most $n$: $M$ is $n$-semiseparable here too. The state is still the waist.

# %%
ranks = [int(matrix_rank(M[corner:, : corner + 1])) for corner in range(l)]
print(f"n = {n}; ranks of the largest blocks:", *ranks)
assert max(ranks) == n

# %% [markdown]
# **What is lost** is the single matrix product for the scores, with a single mask: each pair of
# tokens now takes $n$ exponentials in place of one. On paper there is a way out. With the time
# $\tau_t = \Delta_0 + \dots + \Delta_t$ that has passed, the decay is a product, $e^{A_i \tau_t}
# \cdot e^{-A_i \tau_s}$, and its halves can hide in $C$ and in $B$. But the second half *grows*
# with the place:

# %%
time = dt[0].cumsum(0)  # (l, 1)
read, write = C[0] * (time * A).exp(), B[0] * (-time * A).exp()
hidden = (read @ write.T).tril() * dt[0, :, 0]
check("decays hidden in C and B = equation 3.8, on 24 tokens", hidden, M)
_ = must_differ("hidden in C alone", (read @ B[0].T).tril() * dt[0, :, 0], M)
for rate in (1, 16):
    last = int(math.log(torch.finfo(torch.float32).max) / (0.1 * rate))
    print(f"A = -{rate}, Δ = 0.1: exp(-A τ) leaves float32 after {last} tokens")

# %% [markdown]
# Why not in pieces that short, with a state between them, as in section 6? Then the strongest decay
# sets their length: chunks of 64 tokens, our default, are too long for this $A = -16$.
#
# Mamba-2 gives up the $n$ rates per channel. A channel of Mamba whose rates are equal is a head of
# width $p = 1$. If $p$ channels share their rate and their $\Delta_t$ as well, they are one head of
# width $p$. Three channels of Mamba, first each with a rate of its own, then as one head:

# %%
x, dt = random(2, 21, 3, seed=10), random(2, 21, 3, seed=11).abs() / 4  # (b, l, d)
B, C = random(2, 21, n, seed=12), random(2, 21, n, seed=13)
rates = -torch.tensor([1.0, 2.0, 5.0])
mamba = selective_scan(x, dt, rates[:, None].expand(3, n), B, C)
as_heads = ssd.ssd_recurrent(x[..., None], dt, rates, B[:, :, None], C[:, :, None])
check("Mamba with one rate per channel = SSD with heads of width 1", as_heads[..., 0], mamba)
spread = selective_scan(x, dt, rates[:, None] * torch.arange(1.0, n + 1) / 2.5, B, C)
_ = must_differ("rates that differ inside a channel", spread, mamba)

rate, shared = rates[:1], dt[:, :, :1]  # of the head
mamba = selective_scan(x, shared.expand(2, 21, 3), rate.expand(3, n), B, C)
as_head = ssd.ssd_recurrent(x[:, :, None], shared, rate, B[:, :, None], C[:, :, None])
check("rate and Δ shared by three channels = one head of width 3", as_head[:, :, 0], mamba)

# %% [markdown]
# So the three chapters meet in one table:
#
# | what fades at a token | as a matrix | where |
# |---|---|---|
# | nothing | $\text{causal mask} \circ QK^\top$ | 02: linear attention |
# | all alike, by $e^{\Delta_t A}$ | $L \circ CB^\top$ | 02: gated linear attention; 03: SSD |
# | entry $i$ by $e^{\Delta_t A_i}$ | $\sum_i L^{(i)} \circ C_{:,i} B_{:,i}^\top$ | 01: Mamba |

# %% [markdown]
# ## 5 · Heads and groups
#
# From here on the package does the work. `cheems_ref.ssd` has both forms under one signature: `x`
# (b, l, h, p), `dt` (b, l, h), `A` (h,), `B` and `C` (b, l, g, n). Each of the $h$ heads has its
# own decay and its own values. Keys and queries are shared by *groups* of heads (grouped-query
# attention shares keys and values instead, and each head keeps its query): head $i$ uses group
# $\lfloor i / (h/g) \rfloor$. So with 4 heads and 2 groups, heads 0 and 1 read group 0, heads 2 and
# 3 read group 1.


# %%
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


x, dt, A, B, C = inputs()
for name, tensor in dict(x=x, dt=dt, A=A, B=B, C=C).items():
    print(f"{name:3}", tuple(tensor.shape))

# %% [markdown]
# The quadratic form and the matrix, against the recurrence. In `einsum` each letter names an axis,
# and a letter that the result lacks is summed over: below, $s$.

# %%
y = ssd.ssd_recurrent(x, dt, A, B, C)
M = ssd.semiseparable_matrix(dt, A, B, C)  # (b, h, t, s)
check("quadratic form = recurrence, with heads and groups", ssd.ssd_quadratic(x, dt, A, B, C), y)
check("y = M x for every head", einsum("bhts,bshp->bthp", M, x), y)
_ = must_differ("target and source exchanged", einsum("bhst,bshp->bthp", M, x), y)

# %% [markdown]
# And the matrix of each head against equation 3.5, with the $B$ and $C$ of its group:


# %%
def head_matrix(head, group):
    """M of one head of the first row of the batch, with the B and C of a group."""
    L = decay_matrix(dt[0, :, head] * A[head])
    return L * (C[0, :, group] @ B[0, :, group].T) * dt[0, :, head]


for head in range(4):
    group = head // (4 // 2)
    by_hand = head_matrix(head, group)
    check(f"M of head {head}: equation 3.5 with group {group}", M[0, head], by_hand)
_ = must_differ("head 1 with group 1", head_matrix(1, 1), M[0, 1])

# %% [markdown]
# What does the quadratic form cost? One $l \times l$ matrix per head: for 8 heads and 65,536 tokens
# $8 \cdot 2^{32}$ numbers, in float32 128 GiB. The recurrence has no such problem, but takes its
# tokens one by one. We want both virtues at once.

# %% [markdown]
# ## 6 · In chunks
#
# Cut the sequence into $c$ chunks of $l_c$ tokens, and $M$ into $c \times c$ blocks.
#
# - On the diagonal a block is a small copy of the whole problem: the quadratic form, on $l_c$
#   tokens.
# - Below the diagonal a block has rank at most $n$ (section 3). It says how one chunk speaks to a
#   later one, and everything it has to say passes through the state.
#
# So an entry from token $s$ of chunk $j$ to token $t$ of a later chunk $i$ factors into three.
# With $\to$ for the decay between two places (for neighbouring chunks the middle one is 1):
#
# $$M_{ts} =
#   \underbrace{\big(\text{start of } i \to t\big)\; C_t}_{\text{read: step 4}}\;\cdot\;
#   \underbrace{\big(\text{end of } j \to \text{start of } i\big)}_{\text{carry: step 3}}\;\cdot\;
#   \underbrace{\big(s \to \text{end of } j\big)\; B_s\,\Delta_s}_{\text{write: step 2}} \tag{3.9}$$
#
# We do it for one head, and fill in the matrix as we go: 32 tokens in 4 chunks of 8, with $n = 2$.
# `rearrange` names axes and cuts or joins them: `(i t)` is one axis that runs through $t$ for each
# $i$. Here it cuts $M$ into blocks:

# %%
c, l_c, p, n = 4, 8, 5, 2
x, dt, A, B, C = inputs(b=1, l=c * l_c, h=1, g=1, p=p, n=n, dt=0.1)
M = ssd.semiseparable_matrix(dt, A, B, C)[0, 0]
blocks = rearrange(M, "(i t) (j s) -> i j t s", t=l_c, s=l_c)

print("ranks of the blocks, with n =", n)
print(matrix_rank(blocks))
assert matrix_rank(blocks).tril(-1).max() <= n

# %% [markdown]
# The inputs cut the same way, chunk by chunk, with `l` now the place in a chunk. `total` is the
# log decay since the start of the chunk, the token's own step included.

# %%
x_c = rearrange(x, "1 (c l) 1 p -> c l p", l=l_c)
dt_c = rearrange(dt, "1 (c l) 1 -> c l", l=l_c)
B_c = rearrange(B, "1 (c l) 1 n -> c l n", l=l_c)
C_c = rearrange(C, "1 (c l) 1 n -> c l n", l=l_c)
total = (dt_c * A).cumsum(dim=1)
print("decay over each whole chunk:", [round(d, 3) for d in total[:, -1].exp().tolist()])

# %% [markdown]
# **Step 1, inside each chunk: the quadratic form.** Four small matrices $(L \circ
# CB^\top)\,\mathrm{diag}(\Delta)$, one per chunk.

# %%
L = torch.stack([decay_matrix(log_alpha) for log_alpha in dt_c * A])
inside = L * (C_c @ B_c.mT) * dt_c[:, None, :]  # (c, l, l)
y_inside = inside @ x_c
on_diagonal = torch.stack([blocks[i, i] for i in range(c)])
check("step 1 fills the diagonal blocks", inside, on_diagonal)
_ = must_differ("step size forgotten", L * (C_c @ B_c.mT), on_diagonal)

# %% [markdown]
# **Step 2, what each chunk writes.** Each token's write, decayed from that token to the end of its
# chunk, summed over the chunk: the state that a chunk leaves behind if it starts from nothing.


# %%
def state_after(start, stop):
    """The state that tokens start to stop - 1 leave behind, begun with nothing: (p, n)."""
    part = slice(start, stop)
    tokens = (x[:, part], dt[:, part], A, B[:, part], C[:, part])
    return ssd.ssd_recurrent(*tokens, return_final_state=True)[1][0, 0]


to_end = (total[:, -1:] - total).exp()
write = (to_end * dt_c)[:, :, None] * B_c  # (c, l, n)
writes = einsum("cln,clp->cpn", write, x_c)
alone = torch.stack([state_after(i * l_c, (i + 1) * l_c) for i in range(c)])
check("step 2 = the state of each chunk run alone", writes, alone)
not_faded = einsum("cln,clp->cpn", dt_c[:, :, None] * B_c, x_c)
_ = must_differ("writes that do not fade", not_faded, alone)

# %% [markdown]
# **Step 3, between chunks: the recurrence again.** It is equation 3.4 with chunks for tokens: fade
# by the decay over a whole chunk, add what the chunk wrote. It takes $c$ steps instead of $l$, and
# what it hands to each chunk is the state that the plain recurrence has at that point.

# %%
state, incoming = torch.zeros(p, n), []
for decay, written in zip(total[:, -1].exp(), writes, strict=True):
    incoming.append(state)
    state = decay * state + written
incoming = torch.stack(incoming)

by_recurrence = torch.stack([state_after(0, i * l_c) for i in range(1, c)])
check("step 3 hands each chunk the state of the recurrence", incoming[1:], by_recurrence)
_ = must_differ("writes added up without decay", writes.cumsum(0)[:-1], by_recurrence)

# %% [markdown]
# **Step 4, what each token reads from the state its chunk was handed**, faded from the start of
# the chunk to the token.

# %%
read = total.exp()[:, :, None] * C_c  # (c, l, n)
y_between = einsum("cln,cpn->clp", read, incoming)

y = ssd.ssd_recurrent(x, dt, A, B, C)[0, :, 0]
check("four steps = recurrence", rearrange(y_inside + y_between, "c l p -> (c l) p"), y)
_ = must_differ("step 4 left out", rearrange(y_inside, "c l p -> (c l) p"), y)

# %% [markdown]
# Now as matrices. The states of all chunks side by side are $cn = 8$ numbers (for each of the $p$
# rows). *Write* takes the 32 tokens to these 8, *carry* takes the states that chunks leave to the
# states that chunks are handed, *read* takes those back to 32 tokens.
#
# In *carry*, the block from chunk $j$ to chunk $i$ is the decay over the chunks between them times
# an $n \times n$ identity, since each number of a state fades alike. With $n = 2$ each block is two
# equal cells on its own diagonal, which makes the picture a checkerboard.

# %%
carry = torch.zeros(c, c)
for i in range(c):
    for j in range(i):
        carry[i, j] = total[j + 1 : i, -1].sum().exp()  # over the whole chunks between j and i
carry_matrix = torch.kron(carry, torch.eye(n))  # (c n, c n)
write_matrix = torch.block_diag(*write.mT)  # (c n, l)
read_matrix = torch.block_diag(*read)  # (l, c n)
below = read_matrix @ carry_matrix @ write_matrix
print(carry)

# %% [markdown]
# Their product is all of $M$ below the diagonal blocks, and the strip between *read* and *write*
# is 8 wide instead of 32: that is the waist.

# %%
diagonal = torch.block_diag(*inside)
check("read · carry · write + step 1 = M", below + diagonal, M)
for i in range(c):
    assert below[i * l_c : (i + 1) * l_c, i * l_c :].eq(0).all()  # nothing on or above the diagonal
no_decay = read_matrix @ torch.kron(torch.ones(c, c).tril(-1), torch.eye(n)) @ write_matrix
_ = must_differ("no decay between chunks", no_decay + diagonal, M)
for name, part in dict(read=read_matrix, carry=carry_matrix, write=write_matrix, M=M).items():
    print(f"{name:5} {tuple(part.shape)!s:8}  largest entry {part.abs().max():.2f}")


# %% tags=["figure"]
def draw_steps(read, carry, write, inside, below, M):
    """The product read · carry · write laid out so that rows and columns meet, and M beside it."""
    c, wide, narrow = len(inside), len(M), len(carry)
    fig, axes = plotting.figure(2, 3, size=(12, 7.2))
    axes[0, 0].get_gridspec().set_width_ratios([narrow, wide, wide])
    axes[0, 0].get_gridspec().set_height_ratios([narrow, wide])
    limit = M.abs().max().item()
    step_1 = rearrange(inside, "c t s -> t (c s)")  # the small matrices side by side
    panels = (
        (axes[0, 0], carry.T, "step 3: carryᵀ", "state handed", "state left", None),
        (axes[0, 1], write, "step 2: write", "source s", "state left", None),
        (axes[0, 2], step_1, "step 1: inside the chunks", "source s", "target in chunk", limit),
        (axes[1, 0], read, "step 4: read", "state handed", "target t", None),
        (axes[1, 1], below, "read · carry · write", "source s", "target t", limit),
        (axes[1, 2], M, "with step 1 on the diagonal: M", "source s", "target t", limit),
    )
    for ax, matrix, title, xlabel, ylabel, end in panels:
        plotting.heatmap(
            ax, matrix, title=title, xlabel=xlabel, ylabel=ylabel, limit=end, colorbar=False
        )
        rows, columns = matrix.shape
        for edge in range(1, c):
            ax.axvline(edge * columns / c - 0.5, color=plotting.QUIET, linewidth=0.8)
            if matrix is not step_1:
                ax.axhline(edge * rows / c - 0.5, color=plotting.QUIET, linewidth=0.8)
    return fig


# %% [markdown]
# Read the picture like a product written out: an entry of *read · carry · write* stands in the row
# of *read* to its left and in the column of *write* above it. In the corner *carry* stands
# transposed, so that its rows meet those of *write* and its columns those of *read*. Grey lines
# separate chunks; red is positive, blue negative. *Step 1*, the product and $M$ share their
# colours, which end at the largest entry of $M$; *read*, *carry* and *write* each end theirs at
# their own (printed above).

# %% tags=["figure"]
fig = draw_steps(read_matrix, carry_matrix, write_matrix, inside, below, M)
plotting.save(
    fig,
    "03_four_steps",
    "Six matrices cut into chunks. Above, from left: carry transposed, 8 by 8, a checkerboard "
    "strictly above the diagonal; write, 8 by 32, block-diagonal; the four 8 by 8 blocks of step 1 "
    "side by side. Below: read, 32 by 8, block-diagonal; the product of read, carry and write, "
    "which fills the blocks below the diagonal; and M, the same with the blocks of step 1 on it.",
    stages=[[fig.axes[panel]] for panel in (1, 0, 3, 4, 5)],  # step 1 is there from the start
)

# %% [markdown]
# **For all heads at once.** The same four steps as one function, with step 3 handed in (section 12
# puts a printed one there) and the dtype in which the running total is kept (section 11 varies
# it). States lie as $n \times p$ here, the transpose of (3.4). First step 3 as it was:


# %%
def carry_in_turn(writes, over_chunk):
    """Step 3: writes (b, h, c, n, p), log decays (b, h, c) -> the state each chunk is handed."""
    state, incoming = torch.zeros_like(writes[:, :, 0]), []
    for i in range(writes.shape[2]):
        incoming.append(state)
        state = over_chunk[:, :, i, None, None].exp() * state + writes[:, :, i]
    return torch.stack(incoming, dim=2)


# %% [markdown]
# The axes of the second function: $b, h, c$, then the place in the chunk, then $p$ or $n$.


# %%
def four_steps(x, dt, A, B, C, *, l_c, carry=carry_in_turn, total_dtype=torch.float64):
    """SSD in chunks of l_c tokens, which divides l: x (b, l, h, p) -> y (b, l, h, p)."""
    B, C = (ssd.expand_groups(tensor, x.shape[2]) for tensor in (B, C))
    v = dt[..., None] * x  # what a token writes: Δ x
    log_alpha = dt.to(total_dtype) * A.to(total_dtype)
    v, B, C, log_alpha = (
        rearrange(tensor, "b (c l) h ... -> b h c l ...", l=l_c) for tensor in (v, B, C, log_alpha)
    )
    total = log_alpha.cumsum(-1)  # (b, h, c, l)
    between_tokens = (total[..., :, None] - total[..., None, :]).to(x.dtype).tril()
    inside = (between_tokens.exp().tril() * (C @ B.mT)) @ v  # step 1
    to_end = (total[..., -1:] - total).to(x.dtype).exp()
    writes = (to_end[..., None] * B).mT @ v  # step 2: (b, h, c, n, p)
    incoming = carry(writes, total[..., -1].to(x.dtype))  # step 3
    between = total.to(x.dtype).exp()[..., None] * (C @ incoming)  # step 4
    return rearrange(inside + between, "b h c l p -> b (c l) h p")


# %% [markdown]
# (The first `tril` keeps exponents of the upper triangle, which are positive, from overflowing.)

# %%
x, dt, A, B, C = inputs(l=72)
y = ssd.ssd_recurrent(x, dt, A, B, C)
for l_c in (1, 8, 24, 72):
    check(f"four steps in chunks of {l_c} = recurrence", four_steps(x, dt, A, B, C, l_c=l_c), y)
no_carry = four_steps(x, dt, A, B, C, l_c=8, carry=lambda writes, _: torch.zeros_like(writes))
_ = must_differ("nothing carried between chunks", no_carry, y)

# %% [markdown]
# `ssd_chunked` is the package's version. Any chunk size gives the same function, whether or not it
# divides the length: tokens that fill up the last chunk get $\Delta = 0$.

# %%
x, dt, A, B, C = inputs(l=77)
y, final = ssd.ssd_recurrent(x, dt, A, B, C, return_final_state=True)
for l_c in (1, 7, 16, 77, 200):
    got, state = ssd.ssd_chunked(x, dt, A, B, C, chunk_size=l_c, return_final_state=True)
    check(f"chunks of {l_c} = recurrence", got, y)
    check(f"chunks of {l_c}: same final state", state, final)

# %% [markdown]
# It also takes $D$ and an initial state (section 8), and works in *blocks*: 16 chunks go through
# all four steps before the next block starts, so that what it holds between steps belongs to 16
# chunks (asserted in section 9). As in `four_steps`, the running total is float64 in a float32
# model too. What would be lost? Let steps of 0.00001 follow one of 80. Each comes back as the
# difference of two totals:

# %%
steps = torch.tensor([80.0] + [1e-5] * 63)
for dtype in (torch.float64, torch.float32):
    totals = steps.to(dtype).cumsum(0)
    gap = totals[0].nextafter(totals[0] + 1) - totals[0]
    off = (totals.diff().double() / 1e-5 - 1).abs()
    assert off.max() < 1e-8 if dtype == torch.float64 else off.min() > 0.2
    back = totals[1] - totals[0]
    print(f"{dtype}: the number after 80 is 80 + {gap:.1e}; the step comes back as {back:.1e}")

# %% [markdown]
# ## 7 · One token at a time
#
# To generate text we need one step of equation 3.4 and the state. Read the prompt with the chunked
# form, take its final state, and go on with `ssd_step`:

# %%
x, dt, A, B, C = inputs(l=77)
y, final = ssd.ssd_recurrent(x, dt, A, B, C, return_final_state=True)
prompt = 50
_, state = ssd.ssd_chunked(
    x[:, :prompt], dt[:, :prompt], A, B[:, :prompt], C[:, :prompt], return_final_state=True
)
decoded = []
for t in range(prompt, 77):
    y_t, state = ssd.ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], state)
    decoded.append(y_t)

check("prompt in chunks, then step by step = one pass", torch.stack(decoded, 1), y[:, prompt:])
check("same state at the end", state, final)

# %% [markdown]
# The planted mistake drops the state between the two calls:

# %%
forgotten = ssd.ssd_chunked(x[:, prompt:], dt[:, prompt:], A, B[:, prompt:], C[:, prompt:])
_ = must_differ("the prompt's state dropped", forgotten, y[:, prompt:])

# %% [markdown]
# The state of one head has $pn$ numbers, after ten tokens and after ten million; the keys and
# values that attention keeps are $l\,(n + p)$. That is the attraction of a recurrence at decoding
# time, and also its limit: chapter 02 measures how much such a state can hold.

# %% [markdown]
# ## 8 · Gradients
#
# A model is trained, so the forms must agree not only in value but in slope, with respect to every
# input, through the output and through the final state as well (a later call may depend on it).
# Among the inputs is $D$, the *skip connection*: $y_t + D x_t$ lets a head pass its input through.
# It is one number per head and changes nothing in the derivation.


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

# %% [markdown]
# The check goes through both results of a form. What if the gradient through the final state were
# lost, as when a cache is kept as plain numbers (`detach`)? That is the planted mistake:

# %%
x, dt, A, B, C = inputs(l=37)


def slope(with_state):
    """The gradient in dt of the sum of y, and of the final state too if so asked: (b, l, h)."""
    steps = dt.clone().requires_grad_()
    y, final = ssd.ssd_chunked(x, steps, A, B, C, return_final_state=True)
    loss = y.sum() + final.sum() if with_state else y.sum()
    return torch.autograd.grad(loss, steps)[0]


_ = must_differ("final state detached", slope(with_state=False), slope(with_state=True))

# %% [markdown]
# ## 9 · What each form costs
#
# Count, per head, the multiplications and additions of the matrix products, the floating-point
# operations or *FLOPs*. (The recurrence also updates its state, two products and a sum per entry,
# $3\,l\,pn$ in all, which no counter of matrix products sees.)
#
# | form | FLOPs | largest things it holds |
# |---|---|---|
# | recurrent | $2\,l\,pn$ to read | a state, $pn$ numbers |
# | quadratic | $2\,l^2 (n + p)$, and $4\,l\,pn$ for states in and out | $M$, $l^2$ numbers |
# | chunked | $2\,l\,l_c\,(n + p) + 4\,l\,pn$ | of 16 chunks, each $l_c^2$ numbers and a state |
#
# (The quadratic form of section 3 has no states; the package computes them with it. In the chunked
# form the $n$ in $2\,l\,l_c\,(n+p)$ is paid once per group, in the quadratic one once per head.)
# PyTorch can count the FLOPs of matrix products while they run. For the bytes that a form writes to
# memory we hook into the same place: PyTorch passes every operation through `__torch_dispatch__`,
# and this counter looks at the sizes of the results. A view shares the memory of its input and
# counts nothing (nor does a tuple: but for a few single numbers, these are views here). An
# operation in place, which its schema calls `is_mutable`, writes what it shares.


# %% tags=["setup"]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class BytesWritten(TorchDispatchMode):
    """Add up the size of every tensor that an operation writes; a view writes none."""

    total = largest = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor):
            view = out.untyped_storage().data_ptr() in known and not op._schema.is_mutable
            self.total += 0 if view else out.nbytes
            self.largest = max(self.largest, 0 if view else out.nbytes)
        return out


# %% [markdown]
# Both counters run on the same inputs, two heads that share one group:


# %%
def cost(function, length, h=2, p=16, n=16):
    """FLOPs of the matrix products and bytes written, for one row and one group of heads."""
    tensors = inputs(b=1, l=length, h=h, p=p, g=1, n=n)
    with FlopCounterMode(display=False) as flops:
        function(*tensors)
    with BytesWritten() as written:
        function(*tensors)
    return flops.get_total_flops(), written.total


# %% [markdown]
# First the formulas for the three forms in turn; $l_c$ is 64, the default of `ssd_chunked`.

# %%
h, p, n, l_c = 2, 16, 16, 64
for length in (128, 1024):
    quadratic, _ = cost(ssd.ssd_quadratic, length)
    chunked, _ = cost(ssd.ssd_chunked, length)
    recurrent, _ = cost(ssd.ssd_recurrent, length)
    states = 4 * length * h * p * n
    assert recurrent == 2 * length * h * p * n
    assert quadratic == 2 * length**2 * h * (n + p) + states
    assert chunked == 2 * length * l_c * (n + h * p) + states
    print(f"l = {length:5,}, FLOPs: {recurrent:9,}, {quadratic:11,}, {chunked:9,}: formula = count")

# %% [markdown]
# The largest tensor that two of them write, in numbers. The chunked form takes 16 chunks at a time:


# %%
def largest(function, length):
    """Numbers in the largest tensor that a form writes, for two heads that share one group."""
    tensors = inputs(b=1, l=length, h=2, p=16, g=1, n=16)
    with BytesWritten() as written:
        function(*tensors)
    return written.largest // 8  # float64


for length in (1024, 2048):
    held = [largest(function, length) for function in (ssd.ssd_quadratic, ssd.ssd_chunked)]
    print(f"l = {length:5,}: quadratic {held[0]:9,}, chunked {held[1]:7,}")
    assert held == [2 * length**2, 2 * ssd.CHUNKS_PER_BLOCK * 64**2]

# %% [markdown]
# Then the costs per token, from 64 tokens to 1,024:

# %%
lengths = [64, 128, 256, 512, 1024]
forms = {
    "recurrent": ssd.ssd_recurrent,
    "quadratic": ssd.ssd_quadratic,
    "chunked": ssd.ssd_chunked,
}
flops, written = {}, {}
for name, function in forms.items():
    costs = [cost(function, length) for length in lengths]
    flops[name] = [count / length for (count, _), length in zip(costs, lengths, strict=True)]
    written[name] = [size / length for (_, size), length in zip(costs, lengths, strict=True)]
    print(f"{name:10} FLOPs", *(f"{v:6.0f}" for v in flops[name]), end="   ")
    print("bytes", *(f"{v:6.0f}" for v in written[name]))

# %% [markdown]
# What the figure is to show, asserted: two forms are flat, the third climbs with the length.

# %%
for per_token in (flops, written):
    for flat in (per_token["recurrent"], per_token["chunked"]):
        assert max(flat) < 1.02 * min(flat)
    quadratic = per_token["quadratic"]
    assert quadratic[-1] > 1.8 * quadratic[-2]
    for i in range(1, len(lengths)):  # from 128 tokens on
        assert quadratic[i] > max(per_token["recurrent"][i], per_token["chunked"][i])
assert flops["quadratic"][0] > flops["chunked"][0]
assert written["quadratic"][0] < written["recurrent"][0]
update = 3 * 2 * 16 * 16  # of two states of 16 x 16, per token
assert flops["recurrent"][0] + update < flops["chunked"][0]
print("FLOPs per token of the recurrence with its update:", round(flops["recurrent"][0] + update))

# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
scales = dict(xlabel="length l", xscale="log", yscale="log", marker="o")
scales["xticks"] = {length: str(length) for length in lengths}
plotting.lines(axes[0], lengths, flops, title="matrix FLOPs per token", **scales)
plotting.lines(axes[1], lengths, written, title="bytes written per token", **scales)
plotting.save(
    fig,
    "03_costs",
    "Cost per token against length, for the three forms. FLOPs and bytes per token of the "
    "recurrent and the chunked form are flat; those of the quadratic form grow with the length. "
    "Its FLOPs are the highest throughout, its bytes from 128 tokens on.",
)

# %% [markdown]
# The recurrence has the fewest FLOPs, even with the update that is not drawn (asserted above). Yet
# it writes the whole state for every token, in $l$ steps that wait for one another. The chunked
# form writes a state once per chunk, and its steps wait $l/l_c$ times. With larger states the gap
# in bytes widens; with small ones the recurrence writes less:

# %%
ratios = []
for size in (8, 16, 32, 64):
    _, recurrent = cost(ssd.ssd_recurrent, 256, p=size, n=size)
    _, chunked = cost(ssd.ssd_chunked, 256, p=size, n=size)
    ratios.append(recurrent / chunked)
    print(f"p = n = {size:2}: bytes written, recurrent / chunked: {ratios[-1]:5.2f}")
assert ratios == sorted(ratios) and ratios[0] < 1 < ratios[1]

# %% [markdown]
# So at these sizes the chunked form saves no operations against the recurrence. (With larger states
# or shorter chunks it can save some.) What it does at any size is to turn them into matrix products
# over many tokens, which hardware can do at once.

# %% [markdown]
# ## 10 · The real kernel
#
# The top rung of the ladder is the code that trains Mamba-2 models: the kernels of mamba-ssm,
# written in *Triton*, a language inside Python for GPU programs. Some words first. A *kernel* is a
# function that runs on the GPU. Launching it starts many copies in parallel, called *programs*.
# Each works on one *tile*, a rectangle of the result small enough for the *registers*, the few
# numbers a processor can hold beside its arithmetic.
#
# The forward pass launches five kernels (mamba-ssm 2.3.2.post1), and we know what each does:
#
# | kernel of mamba-ssm | here | one program computes |
# |---|---|---|
# | `_chunk_cumsum_fwd` | `total`, the running log decays | one chunk of some heads |
# | `_chunk_state_fwd` | step 2, what a chunk writes | a tile of one chunk's $p \times n$ state |
# | `_state_passing_fwd` | step 3, the recurrence | a slice of one head's state, *over all chunks* |
# | `_bmm_chunk_fwd` | $CB^\top$ | a tile of one chunk's $l_c \times l_c$ scores, per group |
# | `_chunk_scan_fwd` | steps 4 and 1, in this order | a tile of one chunk's $l_c \times p$ output |
#
# Everything is parallel over chunks except state passing, which is short: it touches $lpn/l_c$
# numbers per head and multiplies nothing but those. The scores $CB^\top$ are stored; the decays
# never are: in `_chunk_scan_fwd` each program makes the tile of $L$ that it needs from `total`,
# multiplies, and throws it away. Several operations in one kernel are called *fused*.
#
# With a GPU a Triton kernel is compiled; without one, the same source runs in Triton's
# interpreter, slowly, on a CPU. So the real kernel can be checked on a laptop. What the
# interpreter cannot check is the compiler, how a GPU rounds, and *races*, where two programs use
# the same memory in an order that nothing fixes: the interpreter runs them one after another.

# %% tags=["setup"]
status = kernel_status()
device = "cuda" if status.mode == "cuda" else "cpu"


def on_kernel(function, tensors, **options):
    """Run a function on float32 copies on the kernels' device; results in float32, on the CPU."""
    results = function(*(t.to(device, torch.float32) for t in tensors), **options)
    return tuple(t.cpu() for t in results)


def not_run():
    print("kernel rung: not run here.", status.reason)


# %% [markdown]
# Both sides get the same numbers: rounded to float32 first, then computed on in float64 by the
# recurrence and in float32 by the kernel. Output, final state, and a planted mistake:

# %%
everything = [t.float().double() for t in (*inputs(b=1, l=40, n=16, p=8), torch.ones(4))]
everything.append(random(1, 4, 8, 16, seed=9).float().double())  # the initial state
y, final = (t.float() for t in form(ssd.ssd_recurrent)(*everything))

if status.available:
    got, state = on_kernel(form(ssd.ssd_kernel, chunk_size=16), everything)
    check("kernel: output = recurrence", got, y, tol=1e-5)
    check("kernel: final state = recurrence", state, final, tol=1e-5)
    x, dt, A, B, C, D, initial = everything
    swapped, _ = on_kernel(form(ssd.ssd_kernel), (x, dt, A, B.flip(2), C.flip(2), D, initial))
    _ = must_differ("kernel: groups swapped", swapped, y)
else:
    not_run()

# %% [markdown]
# Its backward pass is nine more kernels, written by hand. They run after four of the forward ones
# have run again, so that neither the scores nor the states of the chunks have to be kept. All seven
# gradients, through the output and the final state, compared in float32:


# %%
def kernel_form(*tensors):
    return on_kernel(form(ssd.ssd_kernel, chunk_size=16), tensors)


def in_float64(*tensors):
    results = form(ssd.ssd_recurrent)(*(t.double() for t in tensors))
    return tuple(t.float() for t in results)


if status.available:
    single = [t.float() for t in everything]
    check_gradients("kernel: backward", kernel_form, in_float64, single, tol=1e-5)
else:
    not_run()

# %% [markdown]
# And decoding has a kernel of its own, `selective_state_update`, one token per call:

# %%
if status.available:
    x, dt, A, B, C, D, state = everything
    outputs = []
    for t in range(5):
        step = (x[:, t], dt[:, t], A, B[:, t], C[:, t], state)
        y_t, state = on_kernel(ssd.ssd_step, step, D=D.float().to(device), backend="kernel")
        outputs.append(y_t)
    check("kernel: five decoding steps", torch.stack(outputs, 1), y[:, :5], tol=1e-6)
    print("kernel rung: mamba-ssm's kernels and the recurrence agree")
else:
    not_run()

# %% [markdown]
# ## 11 · An error budget
#
# The kernel computes in float32, and its checks allow 1e-5 (decoding 1e-6), where those in float64
# allow 1e-10. Is that honest, or does it hide a bug? In floating point every operation rounds, and
# a sum depends on its order. Here are the same thousand numbers, added forwards and backwards, one
# at a time in float32:


# %%
def sum_in_turn(numbers):
    """The sum, one number after the other, rounded after each."""
    total = torch.zeros((), dtype=numbers.dtype)
    for number in numbers:
        total = total + number
    return total


numbers = random(1000, seed=60).float()
sums = sum_in_turn(numbers), sum_in_turn(numbers.flip(0))
exact = numbers.double().sum()
unit = 2.0**-24  # half the gap between 1 and the next float32
bound = len(numbers) * unit * numbers.double().abs().sum()  # 1,000 roundings, each < Σ|x| · 2⁻²⁴

errors = [(s - exact).abs().item() for s in sums]
assert sums[0] != sums[1] and max(errors) < bound / 1000
print(f"exact sum {exact:.3f}; errors {errors[0]:.1e} and {errors[1]:.1e}, bound {bound:.1e}")

# %% [markdown]
# Neither is wrong. So equal formulas give equal results only up to an *error budget*: so many times
# *one rounding*, $2^{-24} \approx 6 \cdot 10^{-8}$ in float32. A bound is far too generous here: it
# takes every rounding at its largest, and all in one direction.
#
# The honest test is this: take float64 as the truth, and compare the error of the kernel with the
# error of *the definition itself*, the recurrence (3.4), run in float32. The *error* is the largest
# difference over the largest entry of the truth. We do it for two heads, $A = -1$ and $A = -8$, and
# step sizes $0.05 \,|N|$ and $0.0005\,|N|$ with $N$ normal, 0.04 and 0.0004 in the mean. A head
# *remembers* as many tokens as it takes until a write has faded to $1/e$: the slow one, $A = -1$,
# 25 with the larger steps and 2,507 with the smaller. Rounding noise differs between machines, so a
# record holds the errors, medians over five seeds; it was written by `python book/records.py
# 03_error_budget`, with the kernel in Triton's interpreter. In units of one rounding:

# %%
record = read_record("03_error_budget")
assert record["kernel"] == "interpreter"
at = [record["lengths"].index(length) for length in (16, 64, 512, 2048)]
for memory, curves in record["errors"].items():
    print(f"the slow head remembers {memory} tokens;   tokens read: 16, 64, 512, 2048")
    for name, errors in curves.items():
        print(f"  {name:28}", *(f"{errors[i] / 2**-24:6.1f}" for i in at))

# %% [markdown]
# With long memory it is the recurrence that is furthest off; it rounds its state, and the decay
# that it multiplies it by, once per token, a chunked form once per chunk. With short memory the
# kernel stands out, by a factor of 1.8 to 2.9 from 64 tokens on. Is that a bug?
#
# The suspect is the running total. The kernel keeps it in float32, the package in float64 (section
# 6). In the fast head it has fallen to about $-20$ at the end of a chunk of 64, and a decay is $e$
# to a difference of two such numbers: an error of the total is a *relative* error of the decay. So
# the record has a fourth curve: `four_steps` with a total in float32, and nothing else changed.
# (Torch on a CPU sums even these in float64 and rounds each entry once, so the curve is mild.)
# First long memory, in roundings again:

# %%
short, long = record["errors"]["25"], record["errors"]["2507"]
for i in range(2, len(record["lengths"])):  # from 64 tokens on
    assert max(long, key=lambda name: long[name][i]) == "recurrence"
assert long["recurrence"][2:] == sorted(long["recurrence"][2:])
print("recurrence, from 64 tokens on:", [round(e * 2**24, 1) for e in long["recurrence"][2:]])
assert all(max(errors) < 1e-5 for curves in (short, long) for errors in curves.values())

# %% [markdown]
# With short memory, as ratios:

# %%
for name, low, high in (("mamba-ssm's kernel", 1.8, 2.9), ("chunked, total in float32", 1.6, 3.1)):
    pairs = list(zip(short[name], short["recurrence"], strict=True))[2:]
    ratios = [error / of_recurrence for error, of_recurrence in pairs]
    print(f"{name:25} / recurrence:", [round(ratio, 1) for ratio in ratios])
    assert low < min(ratios) and max(ratios) < high
assert max(short["recurrence"] + short["chunked"]) < 4 * 2**-24


# %% tags=["figure"]
def draw_budget(ax, lengths, curves, title, legend):
    """Errors against length, with one rounding and the tolerance of the checks as levels."""
    plotting.lines(
        ax, lengths, curves, title=title, xlabel="tokens read", xscale="log", yscale="log",
        ylim=(3e-8, 3e-4), marker="o", legend=legend,
        xticks={length: str(length) for length in lengths[::2]},
    )  # fmt: skip
    plotting.level(ax, 1e-5, "tolerance of the check")
    plotting.level(ax, 2**-24, "one rounding, $2^{-24}$")


# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.8))
draw_budget(axes[0], record["lengths"], short, "slow head remembers 25 tokens", None)
draw_budget(axes[1], record["lengths"], long, "slow head remembers 2,507 tokens", "upper left")
axes[0].set_ylabel("error relative to float64")
plotting.save(
    fig,
    "03_error_budget",
    "Relative error against length for four float32 computations in two panels. With short memory "
    "the recurrence and the chunked form stay under four roundings; from 64 tokens on the kernel "
    "lies 1.8 to 2.9 times, the chunked form with its running total in float32 1.6 to 3.1 times "
    "above the recurrence. With long memory the recurrence's error grows with the length, "
    "and the three others lie below it from 64 tokens on. All are under the tolerance.",
)

# %% [markdown]
# The two upper curves lie close together, but their errors need not have one cause. So take the
# suspect away: round every step size to a multiple of $2^{-12}$. Then the totals are multiples of
# $2^{-12}$ below 64, which float32 holds exactly.


# %%
def inputs_on(grid, seed):
    """Float32 inputs of 256 tokens for A = -1 and A = -8; with a grid, dt is rounded to it."""
    x, dt, A, B, C = inputs(b=1, l=256, h=2, p=16, n=16, g=1, dt=0.05, seed=seed)
    dt = dt if grid is None else (dt / grid).round() * grid
    return [t.float() for t in (x, dt, A, B, C)]


for name, grid in (("as drawn", None), ("rounded", 2**-12)):
    _, dt, A, _, _ = inputs_on(grid, seed=20)
    log_alpha = (dt * A).unflatten(1, (4, 64))  # in chunks
    total = log_alpha.double().cumsum(2)
    same = bool((log_alpha.cumsum(2) == total).all())
    print(f"steps {name:8}: totals down to {total.min():.0f}; float32 = float64: {same}")
    assert same == (name == "rounded")

# %% [markdown]
# If the kernel is off for another reason, it remains so on such steps. In each of the two heads:


# %%
def error(y, truth):
    return ((y.double() - truth).abs().max() / truth.abs().max()).item()


def errors_by_head(function, grid):
    """The errors of a float32 form in the two heads, each summed over three seeds."""
    sums = [0.0, 0.0]
    for seed in (20, 30, 40):
        tensors = inputs_on(grid, seed)
        truth = ssd.ssd_recurrent(*(t.double() for t in tensors))
        (y,) = on_kernel(lambda *t: (function(*t),), tensors)
        sums = [sums[head] + error(y[:, :, head], truth[:, :, head]) for head in (0, 1)]
    return sums


if status.available:
    drawn, on_grid = (errors_by_head(ssd.ssd_kernel, grid) for grid in (None, 2**-12))
    of_recurrence = errors_by_head(ssd.ssd_recurrent, 2**-12)
    for head, rate, factor in ((0, -1, 1.2), (1, -8, 2)):
        assert drawn[head] > factor * on_grid[head] and on_grid[head] < 2 * of_recurrence[head]
        print(
            f"kernel rung: A = {rate}: exact totals divide its error by more than {factor}", end=""
        )
        print(", to under twice that of the recurrence")
else:
    not_run()

# %% [markdown]
# So it is the rounding of the total. On long memory, live at one length, the chunked form's error
# is of the size of the definition's own:

# %%
tensors = [t.float() for t in inputs(b=1, l=512, h=2, p=16, n=16, g=1, dt=0.001)]
x, dt, A, B, C = (t.double() for t in tensors)
truth = ssd.ssd_recurrent(x, dt, A, B, C)
definition = error(ssd.ssd_recurrent(*tensors), truth)
assert definition < 1e-5
assert error(ssd.ssd_chunked(*tensors), truth) < 10 * max(definition, unit)
print("float32 recurrence: error under 1e-5; chunked form: under ten times that of the recurrence")

# %% [markdown]
# ### What TF32 and bfloat16 cost
#
# A float is a mantissa (its digits) times a power of two. float32 has 23 bits of mantissa after
# the leading one. The matrix units of a GPU can be told to read their factors with fewer: *TF32*
# keeps 10, *bfloat16* 7. The sums stay in float32; what is rounded are the factors, on their way
# in. In the recurrence these are $x$, $B$ and $C$; in the kernel also what it makes on the way to a
# product. With 10 bits a number is rounded by up to
# $2^{-11}$ of its size. We round the factors and do everything else in float64, so that this is
# the only error left:


# %%
def rounded(t, bits):
    """Round to a mantissa of so many bits, ties to even; hardware may cut TF32 off instead."""
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp(torch.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)


check("rounding to 7 bits = bfloat16", rounded(x, 7), x.bfloat16().double(), tol=0.0)

print("format     bits   one rounding   error of y")
for name, bits in (("TF32", 10), ("bfloat16", 7)):
    reduced = ssd.ssd_recurrent(rounded(x, bits), dt, A, rounded(B, bits), rounded(C, bits))
    print(f"{name:9} {bits:5}   {2.0 ** (-bits - 1):12.1e}   {error(reduced, truth):10.1e}")
    assert 2.0 ** (-bits - 1) / 10 < error(reduced, truth) < 2.0 ** (-bits - 1) * 10

# %% [markdown]
# Of float32's seven digits TF32 leaves between three and four, and bfloat16 one fewer. So this
# package asks Triton for full float32 products on a GPU (`TRITON_F32_DEFAULT=ieee`; set it to
# `tf32` to have the speed back), and its tests of the kernel allow 1e-3 in float16, which has
# TF32's 10 bits, and 8e-3 in bfloat16. The state is carried in float32 in every case.

# %% [markdown]
# ## 12 · As printed
#
# The published listings contain slips that change results. Here the step in question is run as
# printed, in our axes; we measure, and state what holds.
#
# ### The sum between the chunks runs over the wrong axis (WM Listing 3)
#
# Listing 3 does step 3 for all chunks at once: a matrix of decays from each source chunk to each
# target chunk, times the states. The states are broadcast along the *target* axis, so the sum has
# to run over the *source* axis, which is `dim=3`. Printed is `.sum(dim=2)`, the target axis. (The
# Mamba-2 of the transformers library had the same slip: issue 34817, fixed by pull request 35154.)


# %%
def carry_at_once(writes, over_chunk, dim):
    """Step 3 as in WM Listing 3, all chunks at once; `dim` is the axis of its sum."""
    states = torch.nn.functional.pad(writes, (0, 0, 0, 0, 1, 0))  # a zero state in front
    sums = torch.nn.functional.pad(over_chunk, (1, 0)).cumsum(-1)  # (b, h, c + 1)
    decay = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()  # (b, h, target, source)
    products = decay[..., None, None] * states[:, :, None]  # (b, h, target, source, n, p)
    return products.sum(dim=dim)[:, :, :-1]


# %% [markdown]
# Handed to `four_steps`, with the printed axis and with the right one:

# %%
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
# With one chunk there is nothing to sum, and the listing is right. With two or four it is wrong.
# With two we can say exactly how: the sum over targets multiplies the one state that is carried
# over by 1 + (decay over the second chunk) instead of by 1.

# %%
over_second = (dt * A)[:, 16:].sum(dim=1).exp()
alone = ssd.ssd_recurrent(x[:, 16:], dt[:, 16:], A, B[:, 16:], C[:, 16:])
carried = y[:, 16:] - alone
printed = four_steps(x, dt, A, B, C, l_c=16, carry=as_printed)
excess = printed[:, 16:] - y[:, 16:]
print("decay over the second chunk, by head:", [round(d, 3) for d in over_second[0].tolist()])
check("as printed, the carried part is too large by that factor", excess,
      over_second[:, None, :, None] * carried)  # fmt: skip
_ = must_differ("with the decay over the first chunk instead", excess,
                (dt * A)[:, :16].sum(dim=1).exp()[:, None, :, None] * carried)  # fmt: skip

# %% [markdown]
# That factor belongs to the *later* chunk, so the printed form also **leaks the future**. Change
# the step size of the very last token, and outputs long before it move:


# %%
def first_moved(function):
    """The first token whose output changes when the last token's step size does."""
    later = dt.clone()
    later[:, -1] += 0.5
    moved = (function(later) - function(dt)).abs().amax(dim=(0, 2, 3)) > 1e-12
    return int(moved.nonzero()[0])


found = {
    "as printed": first_moved(lambda dt: four_steps(x, dt, A, B, C, l_c=8, carry=as_printed)),
    "corrected": first_moved(lambda dt: four_steps(x, dt, A, B, C, l_c=8, carry=corrected)),
    "package": first_moved(lambda dt: ssd.ssd_chunked(x, dt, A, B, C, chunk_size=8)),
}
print("the step size of token 31 moves outputs from this token on:", found)
assert found == {"as printed": 8, "corrected": 31, "package": 31}

# %% [markdown]
# How could this pass a test? WM Listing 4 initialises $A = -(1, \dots, h)$ and sets no bias that
# would make the step size small, so at the start $\Delta \approx \mathrm{softplus}(0) = \log 2
# \approx 0.69$, with $\mathrm{softplus}(z) = \log(1 + e^z)$. Over a whole chunk of 64 tokens the
# slowest head then fades by $e^{-44}$. Nothing survives a chunk from end to end: the matrix of
# decays between chunks is, to rounding, the identity, and that gives the same sum along either
# axis. (With chunks of 16 the decay is $e^{-11}$, and the slip already shows.) It shows fully when
# the model has *learned* to remember, that is, when $\Delta$ is small. (In the figure, the dotted
# line is the step size at the start.)


# %%
def slip(step, l_c):
    """The error of the printed step 3, relative, for 4 heads and one step size for 1,024 tokens."""
    x, _, _, B, C = inputs(b=1, l=1024, seed=20)
    dt, A = torch.full((1, 1024, 4), step), -torch.arange(1.0, 5.0)
    y = ssd.ssd_chunked(x, dt, A, B, C)
    printed = four_steps(x, dt, A, B, C, l_c=l_c, carry=partial(carry_at_once, dim=2))
    return ((printed - y).abs().max() / y.abs().max()).item()


steps = [0.69, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001]
slips = {l_c: [max(slip(step, l_c), 1e-12) for step in steps] for l_c in (256, 64, 16)}
print("step size     ", *(f"{step:8}" for step in steps))
for l_c, errors in slips.items():
    print(f"chunks of {l_c:3}:", *(f"{e:8.1e}" if e > 1e-12 else "   <1e-12" for e in errors))
assert slips[256][0] == slips[64][0] == 1e-12 and slips[16][0] > 1e-6
assert all(errors[-1] > 0.5 for errors in slips.values())

# %% tags=["figure"]
drawn = {f"chunks of {l_c}": [float(f"{e:.2g}") for e in slips[l_c]] for l_c in slips}
fig, ax = plotting.figure(size=(8, 4.6))
scales = dict(xscale="log", yscale="log", ylim=(4e-13, 50), marker="o", legend="center left")
plotting.lines(ax, steps, drawn, xlabel="step size dt", ylabel="relative error", **scales)
ax.set_title("WM Listing 3 as printed (below 1e-12: drawn at 1e-12)")
ax.axvline(math.log(2), color=plotting.QUIET, linestyle=":")  # the step size at initialisation
plotting.level(ax, 1e-10, "tolerance of the check", side="left")
plotting.save(
    fig,
    "03_wrong_axis",
    "Relative error of the printed listing against step size on logarithmic axes, for chunks of "
    "256, 64 and 16 tokens. At the step size 0.001 the error is over half of the largest output; "
    "at 0.69, near the listing's own initialisation (dotted), chunks of 64 and 256 show none.",
)

# %% [markdown]
# So tests of this layer need small $\Delta$ and several chunks. A probe for causality sees this
# slip even without a right form to compare with. Ours have all three.
#
# ### Tiled instead of interleaved groups (WM Listing 4)
#
# Listing 4 expands the groups with `.repeat`, which *tiles* them: head $i$ reads group $i \bmod
# g$, so that four heads read groups 0, 1, 0, 1. mamba-ssm, and this package, repeat each group
# $h/g$ times in a row (torch calls that `repeat_interleave`): head $i$ reads group $\lfloor
# i/(h/g) \rfloor$, groups 0, 0, 1, 1. A model trained with either is consistent in itself. The
# difference appears when weights trained with one are run by the other, and for $g = 1$ or $g = h$
# it disappears, so those two cases test nothing.

# %%
for g in (1, 2, 4):
    x, dt, A, B, C = inputs(h=4, g=g)
    right = ssd.ssd_recurrent(x, dt, A, B, C)
    tiled = ssd.ssd_recurrent(x, dt, A, B.repeat(1, 1, 4 // g, 1), C.repeat(1, 1, 4 // g, 1))
    if g == 2:
        size = must_differ("tiled groups, h = 4, g = 2", tiled, right, at_least=0.5)
        print(f"  largest difference, relative: {size:.3f}")
    else:
        check(f"tiled groups, h = 4, g = {g}: no difference", tiled, right)

# %% [markdown]
# ### A step size that may be negative (Ch Listing 2)
#
# Ch Listing 2 hands the output of a linear layer to the kernel as $\Delta$, without a softplus.
# (The call as printed does not run: its arguments are in another order, and the chunk size is
# missing. That is put right here.) Step sizes may then be negative, and a negative step turns decay
# into growth. We follow the size of the state in one run, for the listing's own $A = -1$, with the
# same normal random numbers as step sizes, raw and through a softplus.


# %%
def state_sizes(x, dt, A, B):
    """The largest entry of the state after each token, for one row and one group: l numbers."""
    state, sizes = torch.zeros(1, x.shape[2], x.shape[3], B.shape[3]), []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + einsum("bh,bhp,bgn->bhpn", dt[:, t], x[:, t], B[:, t])
        sizes.append(state.abs().max().item())
    return sizes


# %% [markdown]
# Over 1,024 tokens:

# %%
l, h = 1024, 4
raw = random(1, l, h, seed=30)
x, _, _, B, C = inputs(b=1, l=l, h=h, g=1)
A = -torch.ones(h)
sizes = {
    "as printed": state_sizes(x, raw, A, B),
    "softplus": state_sizes(x, torch.nn.functional.softplus(raw), A, B),
}
print(f"negative steps: {(raw < 0).double().mean():.1%}")
print({name: f"{max(size):.2e}" for name, size in sizes.items()})
assert max(sizes["as printed"]) > 1e20 and max(sizes["softplus"]) < 20

# %% tags=["figure"]
fig, ax = plotting.figure(size=(8, 4))
drawn = {name: size[::8] for name, size in sizes.items()}
plotting.lines(ax, range(0, l, 8), drawn, xlabel="token t", yscale="log")
ax.set_ylabel("largest entry of the state")
plotting.save(
    fig,
    "03_raw_step_size",
    "The largest entry of the state over 1024 tokens of one run, on a logarithmic axis. With raw "
    "step sizes it climbs over more than twenty orders of magnitude; with softplus it stays below "
    "20.",
)

# %% [markdown]
# The package refuses such an input, and says what it found (here the numbers are rounded and cut
# off, so that the message is short):

# %% tags=["raises-exception"]
ssd.ssd(x, raw.round(decimals=1).clamp(-2, 2), A, B, C)

# %% [markdown]
# ## 13 · On real text
#
# Everything so far was noise. Now text: the reference manual that ships with Python, 8,192 bytes
# of it, through an embedding and the layer `SSD`, which makes $x$, $B$, $C$ and $\Delta$ from its
# input by linear maps. (The step size has a bias, drawn so that its softplus lies between 0.001
# and 0.1, as in Mamba-2, and $A$ is drawn between −1 and −16.) The order of the tokens is left to
# the decay here; the next chapter gives the layer other sources of position. How long do its four
# heads remember?

# %%
length = 8_192
ids = text.text_to_ids(text.read_text())[:length]
torch.manual_seed(0)
embedding = torch.nn.Embedding(256, 64)
layer = ssd.SSD(64, n_heads=4, n_groups=2, d_state=16, position="decay")
tokens = embedding(ids)[None].detach()  # (b, l, d)
dt = torch.nn.functional.softplus(layer.dt_proj(tokens) + layer.dt_bias).detach()
half_lives = math.log(2) / (dt.median(dim=1).values[0] * layer.A_log.exp())  # at the median Δ
about = [float(f"{life:.1g}") for life in half_lives.tolist()]
print("tokens until a write halves, by head, about", about)
assert half_lives.min() < 1 and half_lives.max() > 50

# %% [markdown]
# The three forms on this text, the quadratic one in windows that it can hold:


# %%
def run(layer, tokens, backend):
    """The layer on tokens (1, l, d), from an empty state, by one form: its output and its cache."""
    layer.backend = backend
    with torch.no_grad():
        return layer(tokens, torch.arange(tokens.shape[1])[None])


recurrent, recurrent_cache = run(layer, tokens, "recurrent")
chunked, chunked_cache = run(layer, tokens, "chunked")
print("output:", tuple(chunked.shape), "  state:", tuple(chunked_cache.state.shape))
check("8,192 bytes of text: chunked = recurrent", chunked, recurrent)
check("8,192 bytes of text: same state at the end", chunked_cache.state, recurrent_cache.state)

windows = tokens.split(1024, dim=1)
quadratic = torch.cat([run(layer, window, "quadratic")[0] for window in windows])
in_windows = torch.cat([run(layer, window, "chunked")[0] for window in windows])
check("8 windows of 1,024 bytes: quadratic = chunked", quadratic, in_windows)
_ = must_differ("windows that do not hand on their state", in_windows.flatten(0, 1)[None], chunked)

# %% [markdown]
# **Following the state.** What is in it? To see that, build a head whose state can be read: $p =
# 1$, the value is always 1, and the key $B_t$ is the one-hot code of the byte, $n = 256$. Then
# entry $j$ of the state is a count of the byte $j$ in which each occurrence fades with time. With
# $A = 0$ nothing fades, and the state *is* the table of byte counts:


# %%
def letter_counts(ids, half_life):
    """The state of the counting head after `ids`, half forgotten in half_life bytes: (256,)."""
    key = torch.nn.functional.one_hot(ids, 256).double()[None, :, None]  # (b, l, g, n)
    ones = torch.ones(1, len(ids), 1, 1, dtype=torch.float64)
    rate = torch.tensor([-math.log(2) / half_life], dtype=torch.float64)
    _, state = ssd.ssd(ones, ones[..., 0], rate, key, key, return_final_state=True)
    return state[0, 0, 0]


table = torch.bincount(ids, minlength=256).double()
check("nothing forgotten: the table of byte counts", letter_counts(ids, math.inf), table)
_ = must_differ("half forgotten in 256 bytes", letter_counts(ids, 256), table)

# %% [markdown]
# Below, the same head on the first 400 bytes with three memories, drawn from a record (the manual
# differs a little between versions of Python; `python book/records.py 03_letters`). Each row is a
# letter: the space first, then the commonest letters of English in the usual order. Each column is
# the state after one more byte of text. A letter adds 1 and fades by half in 4, 32 or 256 bytes,
# so each picture has a scale of its own. With the fastest decay one can follow the text letter by
# letter; with the slowest the rows grow into a table of counts.

# %%
record = read_record("03_letters")
rows = 12
states = {life: torch.tensor(counts).T[:rows] for life, counts in record["states"].items()}
print("the text begins:", repr(record["begins"]))
print("rows:", *record["letters"][:rows])
for half_life, counts in states.items():
    print(f"half-life {half_life:>3}: largest count {counts.max():5.2f}")
    assert counts.diff(dim=1).max() <= 1  # one more byte adds at most 1


# %% tags=["figure"]
def draw_letters(states, letters):
    """One heat map per half-life: letters against bytes of text."""
    fig, axes = plotting.figure(len(states), 1, size=(12, 3.6 * len(states)))
    for ax, (half_life, counts) in zip(axes, states.items(), strict=True):
        title = f"half-life {half_life} bytes"
        plotting.heatmap(ax, counts, title=title, signed=False, yticks=letters, unit="faded count")
        ax.set_aspect("auto")
        ax.tick_params(axis="y", labelsize=13)
    axes[-1].set_xlabel("byte of the text")
    return fig


# %% tags=["figure"]
fig = draw_letters(states, record["letters"][:rows])
plotting.save(
    fig,
    "03_letters",
    "Three heat maps of the space and eleven letters against the first 400 bytes of a text, each "
    "with its own scale. With a half-life of 4 bytes each letter is a short streak; with 32 the "
    "streaks run together; with 256 the rows are bands that grow as letters are counted.",
)

# %% [markdown]
# ## Summary
#
# | | recurrent | quadratic | chunked |
# |---|---|---|---|
# | idea | carry a state | $L \circ CB^\top$ on $\Delta X$ | attention inside, state between |
# | cost in $l$ | linear, one token at a time | square, all at once | linear, chunks at once |
# | used for | decoding | short pieces, proofs | training, reading a prompt |
#
# - Unrolling the recurrence gives a lower triangular matrix. Its blocks on and below the diagonal
#   have rank at most $n$: it is $n$-semiseparable, and the state is the waist that they pass
#   through.
# - One decay per head and token separates from $C_t \cdot B_s$. That is the duality; $\alpha = 1$
#   is linear attention. With one decay per state entry, as in Mamba, a sum of $n$ masked rank-one
#   terms is left: the waist stays; a single matrix product of scores is left only in pieces short
#   enough to hide the decays in $C$ and $B$.
# - The chunked form computes the diagonal blocks as attention and the rest as write, carry, read.
# - In float32 its error is of the size of the definition's own. The kernel shows more where its
#   running total rounds; where the total is exact, it stays under twice the definition's.
# - A test of it needs small step sizes, several chunks, $1 < g < h$, and a right form to compare
#   with or, for the axis, a look at the future.
#
# ## Exercises
#
# **1 · easy.** After how many tokens has a write faded to one half, for decay rate $A$ and
# constant step size $\Delta$?


# %% tags=["exercise"]
def half_life(A, dt):
    """Tokens until a write has faded to one half: two numbers -> a number."""
    ### BEGIN SOLUTION
    return math.log(2) / (-A * dt)
    ### END SOLUTION


# %% tags=["check"]
print("A = -4, Δ = 0.01:", round(half_life(-4.0, 0.01), 2), "tokens")
assert abs(math.exp(-4.0 * 0.01 * half_life(-4.0, 0.01)) - 0.5) < 1e-12
assert abs(math.exp(-1.0 * 0.5 * half_life(-1.0, 0.5)) - 0.5) < 1e-12

# %% [markdown]
# **2 · easy.** Where all $C_t = B_s = 1$ in (3.3), the decays can be read off $M$. Recover
# $\alpha_1, \dots, \alpha_{l-1}$ from `M`; some of them may be 0. (Hint: which entries of $L$ hold
# a single decay?)


# %% tags=["exercise"]
def decays_from(M):
    """The decays of tokens 1 to l - 1: M (l, l) -> (l - 1,)."""
    ### BEGIN SOLUTION
    return M.diagonal(-1)  # alpha_t stands just below the diagonal
    ### END SOLUTION


# %% tags=["check"]
log_alpha = -random(12, seed=40).abs()
check("decays read off the matrix", decays_from(decay_matrix(log_alpha)), log_alpha[1:].exp())
log_alpha[4] = -math.inf
check("one of them is 0", decays_from(decay_matrix(log_alpha)), log_alpha[1:].exp())

# %% [markdown]
# **3 · medium.** Write the test. `f(x, z, A, B, C)` claims to be SSD in float64, with $z$ (b, l, h)
# as a linear map left it: the step sizes are $\mathrm{softplus}(z)$. Is it right? It may work in
# chunks of any size up to 64, and does not say of which. Section 12 has three ways to be wrong.
# (Hint: `inputs` makes random tensors and `ssd.ssd_recurrent` is right; with which $l$, $g$ and $z$
# does each of the three mistakes show?)


# %% tags=["exercise"]
def is_right(f):
    """Whether a function f(x, z, A, B, C) -> y (b, l, h, p) is SSD with Δ = softplus(z)."""
    ### BEGIN SOLUTION
    x, _, A, B, C = inputs(b=1, l=200, h=4, g=2)  # more than one chunk; 1 < g < h
    z = random(1, 200, 4, seed=70) - 5  # small steps, and not one that is positive unchanged
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
            torch.nn.functional.pad(t, (0, 0) * (t.ndim - 2) + (quiet, 0))
            for t in (x, step(z), B, C)
        )
        return four_steps(x, dt, A, B, C, l_c=l_c, carry=carry)[:, quiet:]

    return form


wrong = {"axis": dict(carry=partial(carry_at_once, dim=2)), "step": dict(step=lambda z: z)}
wrong["groups"] = dict(tiled=True)
for l_c in (1, 16, 64):
    assert is_right(candidate(l_c)), f"right, chunks of {l_c}: refused"
    for name, options in wrong.items():
        assert not is_right(candidate(l_c, **options)), f"{name}, chunks of {l_c}: not seen"
print("three right forms passed, nine wrong ones refused")

# %% [markdown]
# **4 · hard.** Cut the sequence in two. The first half does not know of the second; the second is
# its own SSD plus what it reads from the state of the first. Write SSD as a function that calls
# itself on the halves (of one token, without cutting further) and never forms an $l \times l$
# matrix, for one head. Return `y` and the final state. (Hint: the state of the first half reaches
# token $t$ of the second faded by the decays since the cut, and the end of the second half faded by
# all of them.)


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
