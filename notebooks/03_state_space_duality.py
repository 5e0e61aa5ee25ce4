# %% [markdown]
# # 03 · State space duality
#
# **One map from sequences to sequences, computed in two ways: as a recurrence that remembers, and
# as an attention that looks back.** When you are through you can
#
# - write the recurrence of a state space model as one matrix, and say what is special about it;
# - show in two lines that this matrix is masked attention without the softmax;
# - compute it in chunks, linear in the length, and say what each of the four steps fills in;
# - decode from it one token at a time, and differentiate through every form;
# - check mamba-ssm's own kernels against it, without a GPU, and say which differences are rounding;
# - recognise the mistakes that published listings make here, and write the test that sees them.
#
# Time: about 90 minutes. Assumes: matrix products, softmax attention as a formula, a little
# PyTorch.
#
# Sources: *Wonderful Matrices* (WM) §2, Appendix A and Listings 2–4; *Cheems* (Ch) Listing 2;
# Dao and Gu, *Transformers are SSMs* (2024), where the duality and the chunked algorithm come from.
# The code that this notebook builds up to is `cheems_ref/ssd.py`.

# %%
import math

import torch
from einops import rearrange
from torch import einsum

from cheems_ref import plotting, ssd, text
from cheems_ref.verify import check, check_gradients, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
#   matrix product, which is what hardware is built for. But work and memory grow with the square of
#   the length.
#
# State space duality says that for one family of models these are the same function. So we may
# train it like attention, run it like a recurrence, and mix the two where neither alone is best.
# We start with a recurrence so small that it can be done on paper.

# %% [markdown]
# ## 1 · A recurrence by hand
#
# Take one number per token, $x_t$, and one number of state, $h_t$. Each token lets the state fade
# by a factor $a_t$, adds its own contribution $b_t x_t$, and reads the result with weight $c_t$:
#
# $$h_t = a_t\,h_{t-1} + b_t\,x_t, \qquad y_t = c_t\,h_t, \qquad h_{-1} = 0. \tag{3.1}$$
#
# $a_t$ is the *decay*: 1 keeps everything, 0 wipes the slate. $b_t$ says how strongly the token is
# *written*, $c_t$ how strongly the state is *read*.

# %%
x = torch.tensor([1.0, 2.0, 0.0, 3.0])
a = torch.tensor([0.5, 0.5, 0.9, 0.1])
b = torch.tensor([1.0, 1.0, 2.0, 1.0])
c = torch.tensor([1.0, 1.0, 1.0, 2.0])

h, y = torch.tensor(0.0), []
for t in range(4):
    h = a[t] * h + b[t] * x[t]
    y.append(c[t] * h)
    print(f"t = {t}   h = {h.item():.3f}   y = {y[t].item():.3f}")
y = torch.stack(y)

# %% [markdown]
# On paper: $h_0 = 1$, then $0.5 \cdot 1 + 2 = 2.5$, then $0.9 \cdot 2.5 = 2.25$ because $x_2 = 0$
# writes nothing, then $0.1 \cdot 2.25 + 3 = 3.225$.
#
# **Unroll it.** Put the line for $h_{t-1}$ into the line for $h_t$, and again, until only inputs
# are left. Each input arrives at time $t$ multiplied by all the decays it has lived through, and
# those are the ones *after* its own step:
#
# $$y_t = c_t \sum_{s \le t} \big(a_t\,a_{t-1} \cdots a_{s+1}\big)\, b_s\,x_s. \tag{3.2}$$

# %%
unrolled = torch.stack(
    [c[t] * sum(a[s + 1 : t + 1].prod() * b[s] * x[s] for s in range(t + 1)) for t in range(4)]
)
check("unrolled sum = recurrence", unrolled, y)

# %% [markdown]
# For $s = t$ the product is empty and equals 1: a token is read undimmed in the step that writes
# it. It is easy to be off by one here, and with smooth data hard to see. So we plant that mistake,
# and ask the verifier to notice:

# %%
off_by_one = torch.stack(
    [c[t] * sum(a[s : t + 1].prod() * b[s] * x[s] for s in range(t + 1)) for t in range(4)]
)
_ = must_differ("decay that includes the token's own step", off_by_one, y)

# %% [markdown]
# A line with ✓ says that an equality holds, up to the tolerance times the largest entry (or times
# 1, if that is larger). A line with ✗ says that a mistake was planted, and seen. The checks that
# matter come with such a control, and the package's tests plant the others: a check that nothing
# can break proves nothing.
#
# ## 2 · The recurrence is a matrix
#
# Equation 3.2 is linear in $x$. So there is a matrix $M$ with $y = Mx$, and we can read its entries
# off:
#
# $$M_{ts} = c_t\; L_{ts}\; b_s, \qquad
#   L_{ts} = \begin{cases} a_t\,a_{t-1}\cdots a_{s+1} & s \le t\\ 0 & s > t.\end{cases} \tag{3.3}$$
#
# $L$ is lower triangular because a token cannot be read before it is written: *causality*.

# %%
L = torch.tensor([[a[s + 1 : t + 1].prod() if s <= t else 0.0 for s in range(4)] for t in range(4)])
M = c[:, None] * L * b[None, :]
check("y = M x", M @ x, y)

# %% [markdown]
# A product per entry is slow, and dividing two running products ends in 0/0 as soon as they
# underflow. With $a_t = e^{\alpha_t}$ the product becomes a sum, $L_{ts} = \exp(\alpha_{s+1} +
# \dots + \alpha_t)$. Below, column $s$ holds $\alpha$ from row $s+1$ on, and a running sum down
# each column gives all its entries:


# %%
def decay_matrix(alpha):
    """L of equation 3.3 from the log decays: (l,) -> (l, l)."""
    below = alpha[:, None].expand(-1, len(alpha)).tril(-1)  # alpha_t in row t, where s < t
    return below.cumsum(dim=0).exp().tril()  # tril again: above the diagonal exp(0) = 1


check("L from sums of logarithms = L from products", decay_matrix(a.log()), L)

# %% [markdown]
# (One could also subtract two running totals, $\sum_{r \le t} \alpha_r - \sum_{r \le s} \alpha_r$.
# It is the same number on paper. In floating point it is a small difference of two large numbers
# once $t$ is large, and digits are lost. In float64 and inside short chunks, where we will use it,
# that is harmless; the package, which also runs in float32, takes care of it.)
#
# What does $L$ look like? Here it is for three habits of forgetting, over 32 tokens.

# %%
l = 32
steady = torch.full((l,), math.log(0.9))
varied = -random(l, seed=1).abs() / 4
reset = steady.clone()
reset[16] = math.log(1e-4)

fig, axes = plotting.figure(1, 3, size=(12, 4.6))
for ax, alpha, title in zip(
    axes,
    (steady, varied, reset),
    ("steady: every $a_t$ = 0.9", "varied: $a_t$ depends on t", "reset at t = 16"),
    strict=True,
):
    plotting.heatmap(ax, decay_matrix(alpha), title=title, signed=False, colorbar=False)
    ax.set_xlabel("source s")
axes[0].set_ylabel("target t")
plotting.save(
    fig,
    "03_decay_matrices",
    "Three lower triangular matrices with ones on the diagonal. With steady decay they fade "
    "evenly away from the diagonal; with varied decay they fade in uneven stripes; with a reset "
    "at token 16, from row 16 on next to nothing is left of the columns before 16.",
)

# %% [markdown]
# With steady decay $L_{ts}$ depends on $t - s$ only: that is a convolution. With decays that
# change it is not, and this is the point: a token can shut the door behind it (the third picture).
# A model whose $a_t$ is computed from the token itself is called *selective*.
#
# **What is special about this matrix?** Take any block of $L$ on or below the diagonal: rows
# $t_1..t_2$ and columns $s_1..s_2$ with $s_2 \le t_1$. Every entry splits into "decay from $s$ to
# the corner" times "decay from the corner to $t$". A product of a column and a row: rank one,
# however large the block. A matrix with this property is called *1-semiseparable*.

# %%
rank = torch.linalg.matrix_rank
L = decay_matrix(varied)
blocks = [
    L[t1:t2, s1 : t1 + 1] for t1 in range(4, l, 5) for t2 in range(t1 + 2, l, 7) for s1 in (0, 3)
]
assert all(rank(block) == 1 for block in blocks)
assert rank(L[4:12, 0:9]) > 1  # a block that reaches above the diagonal is not covered
assert rank(L) == l  # the whole, diagonal included, is as far from low rank as can be
print(f"{len(blocks)} blocks on or below the diagonal, every one of rank 1")

# %% [markdown]
# That is the structure behind everything that follows. Low-rank blocks can be applied through a
# narrow waist, and the waist is the state.
#
# ## 3 · A wider state: attention without the softmax
#
# One number remembers little. Let the state be a matrix with $p$ rows and $n$ columns. A token now
# has a *value* $x_t \in \mathbb{R}^p$, and writes it under the *key* $B_t \in \mathbb{R}^n$; a
# reader asks with $C_t \in \mathbb{R}^n$:
#
# $$h_t = e^{\Delta_t A}\, h_{t-1} + \Delta_t\, x_t B_t^\top, \qquad y_t = h_t\, C_t. \tag{3.4}$$
#
# The decay is still one number per token, $a_t = e^{\Delta_t A}$, with $A \le 0$ fixed and a *step
# size* $\Delta_t \ge 0$ (in code: `dt`) that depends on the token. The same $\Delta_t$ scales the
# write. A token with $\Delta_t = 0$ neither fades the state nor writes: it has not happened. We
# will use that for padding.

# %%
l, p, n = 24, 5, 4
x, B, C = random(l, p, seed=2), random(l, n, seed=3), random(l, n, seed=4)
dt, A = random(l, seed=5).abs() / 4, torch.tensor(-1.0)

h, y = torch.zeros(p, n), []
for t in range(l):
    h = torch.exp(dt[t] * A) * h + dt[t] * torch.outer(x[t], B[t])
    y.append(h @ C[t])
y = torch.stack(y)

# %% [markdown]
# Unroll as before. The decays are numbers, so they commute with the matrices and can be pulled to
# the front; what is left between reader $t$ and writer $s$ is an inner product:
#
# $$y_t = \sum_{s \le t} L_{ts}\,(C_t \cdot B_s)\,\Delta_s x_s
#   \qquad\Longleftrightarrow\qquad
#   Y = \big(L \circ C B^\top\big)\,(\Delta X). \tag{3.5}$$
#
# Rename $C \to Q$, $B \to K$, $\Delta X \to V$ and read it again: $(L \circ QK^\top)V$. This is
# masked attention. The softmax is gone, and the mask is no longer 0 or 1 but fades with the
# decays.
#
# > "[…] materializing the semi-separable matrix $M = L \circ CB^\top = L \circ QK^\top$ and
# > performing quadratic matrix-vector multiplication — is equivalent to quadratic masked kernel
# > attention." — WM §2
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
# Two forms, one function: this is the **duality**. Left to right, the recurrence costs $l \cdot
# pn$ and keeps one state. As a matrix it costs $l^2 (n + p)$ and needs all tokens at once.

# %%
fig, axes = plotting.figure(1, 3, size=(12, 4.6))
plotting.heatmap(axes[0], scores, title="$CB^T$: who asks for whom", colorbar=False)
plotting.heatmap(axes[1], L, title="L: how much is left", signed=False, colorbar=False)
plotting.heatmap(
    axes[2], L * scores * dt, title=r"$M = (L \circ CB^T)\,$diag($\Delta$)", colorbar=False
)
for ax in axes:
    ax.set_xlabel("source s")
axes[0].set_ylabel("target t")
plotting.save(
    fig,
    "03_duality",
    "Three square matrices side by side: the inner products of C and B, which fill the whole "
    "square; the decays L, which fill the lower triangle and fade from the diagonal; and M, their "
    "entrywise product times the step sizes: strong in the columns of the tokens with large steps.",
)

# %% [markdown]
# **Linear attention is the case $a = 1$.** Let nothing fade ($A = 0$) and let every token count
# once ($\Delta = 1$). Then $L$ is the plain causal mask of ones, and what is left is linear
# attention: causal attention with the softmax dropped (and here without a feature map or a
# normalisation).

# %%
q, k, v = C, B, x
check("a = 1 gives the causal mask", decay_matrix(torch.zeros(l)), torch.ones(l, l).tril())

linear_attention = torch.stack([sum((q[t] @ k[s]) * v[s] for s in range(t + 1)) for t in range(l)])
one_head = (
    x[None, :, None],
    torch.ones(1, l, 1),
    torch.zeros(1),
    B[None, :, None],
    C[None, :, None],
)
check("a = 1 gives linear attention", ssd.ssd_recurrent(*one_head)[0, :, 0], linear_attention)
_ = must_differ("a < 1 does not", (L * scores) @ x, linear_attention)

# %% [markdown]
# ## 4 · Heads and groups
#
# From here on the package does the work. `cheems_ref.ssd` has both forms under one signature: `x`
# (b, l, h, p), `dt` (b, l, h), `A` (h,), `B` and `C` (b, l, g, n). Each of the $h$ heads has its
# own decay and its own values. Keys and queries are shared by *groups* of heads, as in
# grouped-query attention: head $i$ uses group $\lfloor i / (h/g) \rfloor$. So with 4 heads and 2
# groups, heads 0 and 1 read group 0, heads 2 and 3 read group 1.


# %%
def inputs(b=2, l=29, h=4, p=5, g=2, n=3, dt=0.3, seed=0):
    """Random inputs of SSD, with step sizes around dt."""
    A = -1.0 - 7.0 * torch.arange(h) / max(h - 1, 1)
    return (
        random(b, l, h, p, seed=seed),
        dt * random(b, l, h, seed=seed + 1).abs(),
        A,
        random(b, l, g, n, seed=seed + 2),
        random(b, l, g, n, seed=seed + 3),
    )


x, dt, A, B, C = inputs()
y = ssd.ssd_recurrent(x, dt, A, B, C)
M = ssd.semiseparable_matrix(dt, A, B, C)
check("quadratic form = recurrence, with heads and groups", ssd.ssd_quadratic(x, dt, A, B, C), y)
check("y = M x for every head", einsum("bhts,bshp->bthp", M, x), y)

for head in range(4):
    group = head // (4 // 2)
    one = decay_matrix(dt[0, :, head] * A[head]) * (C[0, :, group] @ B[0, :, group].T)
    check(
        f"M of head {head} from equation 3.5 with group {group}", M[0, head], one * dt[0, :, head]
    )

# %% [markdown]
# What does the quadratic form cost? One $l \times l$ matrix per head. Each row of the table has
# four times the length of the one before, and sixteen times the memory:

# %%
for length in (1_024, 4_096, 16_384, 65_536):
    print(f"l = {length:6,}   M for 8 heads in float32: {8 * length**2 * 4 / 2**30:8.3f} GiB")

# %% [markdown]
# At the length of a book the matrix does not fit, and at that length the recurrence, which has no
# such problem, takes its tokens one by one. We want both virtues at once.
#
# ## 5 · In chunks
#
# Cut the sequence into $c$ chunks of $q$ tokens, and $M$ into $c \times c$ blocks.
#
# - On the diagonal a block is a small copy of the whole problem: the quadratic form, on $q$ tokens.
# - Below the diagonal a block has low rank: 1 for $L$, and at most $n$ for $L \circ CB^\top$,
#   because $CB^\top$ has rank $n$ and an $L$ of rank one only scales its rows and columns. It says
#   how one chunk speaks to a later one, and everything it has to say passes through the state.
#
# So an entry from token $s$ of chunk $j$ to token $t$ of a later chunk $i$ factors into three.
# With $\to$ for the decay between two places (for neighbouring chunks the middle one is 1):
#
# $$M_{ts} =
#   \underbrace{\big(\text{start of } i \to t\big)\; C_t}_{\text{read: step 4}}\;\cdot\;
#   \underbrace{\big(\text{end of } j \to \text{start of } i\big)}_{\text{carry: step 3}}\;\cdot\;
#   \underbrace{\big(s \to \text{end of } j\big)\; B_s\,\Delta_s}_{\text{write: step 2}} \tag{3.6}$$
#
# We do it for one head, and fill in the matrix as we go: 32 tokens in 4 chunks of 8.

# %%
x, dt, A, B, C = whole = inputs(b=1, l=32, h=1, g=1, n=2, dt=0.1)
M = ssd.semiseparable_matrix(dt, A, B, C)[0, 0]
y = ssd.ssd_recurrent(x, dt, A, B, C)[0, :, 0]

c, q, n = 4, 8, 2
x, dt, B, C = x[0, :, 0], dt[0, :, 0], B[0, :, 0], C[0, :, 0]
x, dt, B, C = (rearrange(t, "(c l) ... -> c l ...", l=q) for t in (x, dt, B, C))
total = (dt * A).cumsum(dim=1)  # log decay since the start of the chunk, own step included

ranks = [int(rank(M[i * q : (i + 1) * q, j * q : (j + 1) * q])) for i in range(c) for j in range(i)]
print("rank of the blocks below the diagonal:", ranks, "with n =", n)
assert max(ranks) <= n

# %% [markdown]
# **Step 1, inside each chunk: the quadratic form.** Four small matrices $(L \circ
# CB^\top)\,\mathrm{diag}(\Delta)$, one per chunk.

# %%
L = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # against overflow; as the mask
inside = L * (C @ B.mT) * dt[:, None, :]
y_inside = inside @ x

diagonal = torch.block_diag(*inside)
for i in range(c):
    here = slice(i * q, (i + 1) * q)
    check(f"step 1 fills diagonal block {i}", diagonal[here, here], M[here, here])

# %% [markdown]
# **Step 2, what each chunk writes.** Each token's write, decayed from that token to the end of its
# chunk, summed over the chunk: the state that a chunk leaves behind if it starts from nothing.

# %%
to_end = (total[:, -1:] - total).exp()
write = (to_end * dt)[:, :, None] * B
writes = einsum("cln,clp->cpn", write, x)

# %% [markdown]
# **Step 3, between chunks: the recurrence again.** It is equation 3.4 with chunks for tokens: fade
# by the decay over a whole chunk, add what the chunk wrote. It takes $c$ steps instead of $l$, and
# what it hands to each chunk is the state that the plain recurrence has at that point.

# %%
over_chunk = total[:, -1].exp()
state, incoming = torch.zeros(5, n), []
for decay, written in zip(over_chunk, writes, strict=True):
    incoming.append(state)
    state = decay * state + written
incoming = torch.stack(incoming)

for i in range(1, c):
    read_so_far = (t if t is A else t[:, : i * q] for t in whole)
    _, reached = ssd.ssd_recurrent(*read_so_far, return_final_state=True)
    check(f"step 3 hands chunk {i} the state of the recurrence", incoming[i], reached[0, 0])

# %% [markdown]
# **Step 4, what each token reads from the state its chunk was handed**, faded from the start of the
# chunk to the token.

# %%
from_start = total.exp()
read = from_start[:, :, None] * C
y_between = einsum("cln,cpn->clp", read, incoming)

check("four steps = recurrence", rearrange(y_inside + y_between, "c l p -> (c l) p"), y)

# %% [markdown]
# Now the picture. Steps 2 to 4 are three matrices, *read* · *carry* · *write*, and the strip
# between them is $cn = 8$ wide instead of $l = 32$: that is the waist. Their product is all of $M$
# below the diagonal blocks. (The strips and the small square have colour scales of their own.)

# %%
write_matrix = torch.block_diag(*write.mT)  # (c n, l)
read_matrix = torch.block_diag(*read)  # (l, c n)
# Row i of the decays between chunks reaches to the end of chunk i. Rolled down by one, it reaches
# to the end of chunk i - 1, which is the start of chunk i.
carry = decay_matrix(total[:, -1]).roll(1, 0).tril(-1)
carry_matrix = torch.kron(carry, torch.eye(n))  # (c n, c n)
below = read_matrix @ carry_matrix @ write_matrix

check("steps 2 to 4 fill everything below the diagonal blocks", diagonal + below, M)

fig, axes = plotting.figure(2, 3, size=(12, 8.2))
limit = M.abs().max().item()
pictures = (
    (diagonal, "step 1: inside the chunks"),
    (write_matrix, "step 2: write"),
    (carry_matrix, "step 3: carry"),
    (read_matrix, "step 4: read"),
    (below, "read · carry · write"),
    (diagonal + below, "together: M"),
)
for ax, (matrix, title) in zip(axes.flat, pictures, strict=True):
    rows, columns = matrix.shape
    plotting.heatmap(
        ax, matrix, title=title, limit=limit if rows == columns == c * q else None, colorbar=False
    )
    for edge in range(1, c):
        ax.axhline(edge * rows / c - 0.5, color=plotting.QUIET, linewidth=0.8)
        ax.axvline(edge * columns / c - 0.5, color=plotting.QUIET, linewidth=0.8)
plotting.save(
    fig,
    "03_four_steps",
    "Six matrices cut into four by four blocks. Step 1 fills the four blocks on the diagonal. "
    "Step 2 is a wide block-diagonal strip, step 3 a small square matrix with entries strictly "
    "below the diagonal, step 4 a tall block-diagonal strip. The product of the last three "
    "fills the blocks below the diagonal, and all together give M.",
)

# %% [markdown]
# `ssd_chunked` is these four steps for all heads, groups and batch rows. Any chunk size gives the
# same function, whether or not it divides the length: tokens that fill up the last chunk get
# $\Delta = 0$.

# %%
x, dt, A, B, C = inputs(l=77)
y, final = ssd.ssd_recurrent(x, dt, A, B, C, return_final_state=True)
for q in (1, 7, 16, 77, 200):
    got, state = ssd.ssd_chunked(x, dt, A, B, C, chunk_size=q, return_final_state=True)
    check(f"chunks of {q} = recurrence", got, y)
    check(f"chunks of {q}: same final state", state, final)

# %% [markdown]
# Three things in the package's listing differ from the cells above. Two are about speed: it takes
# a *block* of 16 chunks through all four steps before the next block starts, so that what lies
# between two matrix products is still in the processor's cache when it is needed; and the causal
# mask lies on the scores, once per group instead of once per head. The third is about digits: the
# running total and its differences are taken in float64, in a float32 model too. A short step that
# follows long ones shows why:

# %%
assert ssd.CHUNKS_PER_BLOCK == 16
steps = torch.tensor([10.0] * 8 + [1e-5] * 56)  # long ones, then short ones, in one chunk
kept = steps.cumsum(0).diff()[8:]
lost = steps.float().cumsum(0).diff()[8:].double()
assert (kept / 1e-5 - 1).abs().max() < 1e-7 and (lost / 1e-5 - 1).abs().min() > 0.1
print("after a total of 80, steps of 0.00001: right to 1e-7 in float64, off by 10 % in float32")

# %% [markdown]
# ## 6 · One token at a time
#
# To generate text we need one step of equation 3.4 and the state. Read the prompt with the chunked
# form, take its final state, and go on with `ssd_step`:

# %%
prompt, rest = 50, 27
y_prompt, state = ssd.ssd_chunked(
    x[:, :prompt], dt[:, :prompt], A, B[:, :prompt], C[:, :prompt], return_final_state=True
)
decoded = []
for t in range(prompt, prompt + rest):
    y_t, state = ssd.ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], state)
    decoded.append(y_t)

check("prompt in chunks, then step by step = one pass", torch.stack(decoded, 1), y[:, prompt:])
check("same state at the end", state, final)

forgotten = ssd.ssd_chunked(x[:, prompt:], dt[:, prompt:], A, B[:, prompt:], C[:, prompt:])
_ = must_differ("the prompt's state dropped", forgotten, y[:, prompt:])

# %% [markdown]
# The state of one head has $pn$ numbers, after ten tokens and after ten million. Attention's cache
# has $l\,(n + p)$. That is the whole attraction of a recurrence at decoding time, and also its
# limit: what does not fit into $pn$ numbers is lost.
#
# ## 7 · Gradients
#
# A model is trained, so the forms must agree not only in value but in slope, with respect to every
# input, through the output and through the final state as well (a later call may depend on it).
# Among the inputs is $D$, the *skip connection*: $y_t + D x_t$ lets a head pass its input through.
# It is one number per head and changes nothing in the derivation.

# %%
initial = random(2, 4, 5, 3, seed=9)
x, dt, A, B, C = inputs(l=37)


def form(function, **options):
    """The form as a function of all its tensors, the initial state included."""
    return lambda x, dt, A, B, C, D, state: function(
        x, dt, A, B, C, D=D, initial_state=state, return_final_state=True, **options
    )


everything = (x, dt, A, B, C, torch.ones(4), initial)
reference = form(ssd.ssd_recurrent)
check_gradients("quadratic = recurrent", form(ssd.ssd_quadratic), reference, everything)
check_gradients("chunked = recurrent", form(ssd.ssd_chunked, chunk_size=8), reference, everything)

# %% [markdown]
#
#
# ## 8 · What each form costs
#
# Count, per head, the multiplications and additions of the matrix products. (The recurrence also
# updates its state, two products and a sum per entry, $3\,l\,pn$ in all, which no counter of
# matrix products sees.)
#
# | form | FLOPs | numbers kept between products |
# |---|---|---|
# | recurrent | $2\,l\,pn$ to read; the update, entry by entry, is no product | $pn$ |
# | quadratic | $2\,l^2 (n + p) + 4\,l\,pn$ for the states handed in and out | $l^2$ |
# | chunked | $2\,lq\,(n + p) + 4\,l\,pn$ | $lq + lpn/q$ |
#
# (With groups, the $n$ in $2lq\,(n+p)$ is paid once per group, not once per head.) PyTorch can
# count the FLOPs of matrix products while they run. We compare with the formula, to the last one;
# and we count the bytes that each form writes to memory.

# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class BytesWritten(TorchDispatchMode):
    """Add up the size of every tensor that an operation writes; a view writes none."""

    total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor):
            view = out.untyped_storage().data_ptr() in known and not op._schema.is_mutable
            self.total += 0 if view else out.nbytes
        return out


def cost(function, length, h=2, p=16, n=16):
    tensors = inputs(b=1, l=length, h=h, p=p, g=1, n=n)
    with FlopCounterMode(display=False) as flops:
        function(*tensors)
    with BytesWritten() as written:
        function(*tensors)
    return flops.get_total_flops(), written.total


h, p, n, q = 2, 16, 16, 64
for length in (128, 1024):
    quadratic, _ = cost(ssd.ssd_quadratic, length)
    chunked, _ = cost(ssd.ssd_chunked, length)
    state_terms = 2 * 2 * length * h * p * n
    assert chunked == 2 * length * q * n + 2 * length * q * p * h + state_terms
    assert quadratic == 2 * length**2 * h * (n + p) + state_terms
print("counted FLOPs = formula, for the quadratic and the chunked form")

# %%
lengths = [64, 128, 256, 512, 1024]
forms = {
    "recurrent": ssd.ssd_recurrent,
    "quadratic": ssd.ssd_quadratic,
    "chunked": ssd.ssd_chunked,
}
costs = {name: [cost(function, l) for l in lengths] for name, function in forms.items()}
assert costs["chunked"][-1][0] == 2 * costs["chunked"][-2][0]
assert costs["chunked"][-1][1] < 2.1 * costs["chunked"][-2][1]
assert costs["quadratic"][-1][1] > 3.8 * costs["quadratic"][-2][1]
for i in (0, 1):  # FLOPs, bytes
    recurrent, quadratic, chunked = ([value[i] for value in costs[name]] for name in forms)
    for flat in (recurrent, chunked):
        per_token = [value / l for value, l in zip(flat, lengths, strict=True)]
        assert max(per_token) < 1.02 * min(per_token)
    highest = [q > max(r, c) for r, q, c in zip(recurrent, quadratic, chunked, strict=True)]
    assert highest == [i == 0, True, True, True, True]
print("recurrent and chunked are flat; quadratic is highest, its bytes from 128 tokens on")

fig, axes = plotting.figure(1, 2, size=(12, 4.2))
for i, (ax, title) in enumerate(
    zip(axes, ("matrix FLOPs per token", "bytes written per token"), strict=True)
):
    for (name, values), marker in zip(costs.items(), "so^", strict=True):
        per_token = [value[i] / l for value, l in zip(values, lengths, strict=True)]
        ax.loglog(lengths, per_token, marker=marker, label=name, base=2)
    ax.set_title(title)
    ax.set_xlabel("length l")
axes[0].legend()
plotting.save(
    fig,
    "03_costs",
    "Cost per token against length, for the three forms. FLOPs and bytes per token of the "
    "recurrent and the chunked form are flat; those of the quadratic form grow in proportion to "
    "the length. Its FLOPs are the highest throughout, its bytes from 128 tokens on.",
)

# %% [markdown]
# Per token, the recurrent and the chunked form are flat and the quadratic form climbs. The
# recurrence has the fewest FLOPs, even with the update that is not drawn, yet it writes the whole
# state for every token, and does so in $l$ steps that wait for one another. The chunked form
# writes a state once per chunk. (Here $p = n = 16$; with larger states the gap between the two
# widens.) That is why it is the one that trains fast: not fewer operations, but operations that
# hardware can do at once.

# %% [markdown]
# ## 9 · The real kernel
#
# The last rung of the ladder is the code that trains Mamba-2 models: the Triton kernels of
# mamba-ssm. Their forward pass launches five, and we know them all. A *program* is what one kernel
# launch runs many times in parallel; each works on one *tile*, a rectangle small enough for a
# GPU's registers.
#
# | kernel of mamba-ssm | here | one program computes |
# |---|---|---|
# | `_chunk_cumsum_fwd` | `total`, the running log decays | one chunk of some heads |
# | `_chunk_state_fwd` | step 2, what a chunk writes | a tile of one chunk's p × n state |
# | `_state_passing_fwd` | step 3, the recurrence | a slice of one head's state, *over all chunks* |
# | `_bmm_chunk_fwd` | $CB^\top$ | a tile of one chunk's q × q scores, per group |
# | `_chunk_scan_fwd` | steps 4 and 1, in this order | a tile of one chunk's q × p output |
#
# Everything is parallel over chunks except state passing, which is short: it touches $lpn/q$
# numbers and multiplies nothing but those. In `_chunk_scan_fwd` the decays are never stored as a
# matrix: each program makes the tile it needs from `total` and throws it away, which is what the
# word *fused* means.
#
# A Triton kernel is a Python function. With a GPU it is compiled; without one, the same source
# runs in Triton's interpreter, slowly, on a CPU. So the real kernel can be checked on a laptop.
# What the interpreter cannot check is the compiler, the hardware's TF32, and races between
# programs.

# %%
from cheems_ref.kernels import kernel_status

status = kernel_status()
device = "cuda" if status.mode == "cuda" else "cpu"


def on_kernel(function, tensors, **options):
    """Run a function on float32 copies on the kernels' device; results in float32, on the CPU."""
    results = function(*(t.to(device, torch.float32) for t in tensors), **options)
    return tuple(t.cpu() for t in results)


def not_run():
    print("kernel rung: not run here.", status.reason)


# The same numbers for both sides: rounded to float32 first, then computed on in float64.
everything = [t.float().double() for t in (*inputs(b=1, l=40, n=16, p=8), torch.ones(4))]
everything.append(random(1, 4, 8, 16, seed=9).float().double())
y, final = (t.float() for t in form(ssd.ssd_recurrent)(*everything))

if status.available:
    got, state = on_kernel(form(ssd.ssd_kernel, chunk_size=16), everything)
    check("kernel: output = recurrence", got, y, tol=1e-5)
    check("kernel: final state = recurrence", state, final, tol=1e-5)
    x, dt, A, B, C, D, initial = everything
    swapped = on_kernel(form(ssd.ssd_kernel), (x, dt, A, B.flip(2), C.flip(2), D, initial))
    _ = must_differ("kernel: groups swapped", swapped[0], y)
else:
    not_run()

# %% [markdown]
# Its backward pass is nine more kernels, written by hand, which run after four of the forward ones
# have run again (so that only the inputs have to be kept). All seven gradients, through the output
# and the final state:

# %%
if status.available:

    def kernel_form(*tensors):
        outputs = on_kernel(form(ssd.ssd_kernel, chunk_size=16), tensors)
        return tuple(t.double() for t in outputs)

    check_gradients("kernel: backward", kernel_form, form(ssd.ssd_recurrent), everything, tol=1e-5)
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
# ### Why float32 results differ at all
#
# The checks above allow 1e-5 where the others allow 1e-10. Is that honest, or does it hide a bug?
# In floating point every operation rounds, and a sum depends on its order. Here are the same
# thousand numbers, added forwards and backwards, one at a time in float32:

# %%
numbers = random(1000, seed=60).float()
orders = {"forwards": numbers, "backwards": numbers.flip(0)}
sums = {}
for name, ordered in orders.items():
    sums[name] = torch.zeros((), dtype=torch.float32)
    for number in ordered:
        sums[name] = sums[name] + number

exact = numbers.double().sum()
unit = 2.0**-24  # half the gap between 1 and the next float32
assert sums["forwards"] != sums["backwards"]
bound = len(numbers) * unit * numbers.abs().sum()  # n roundings, each of at most Σ|x| · 2⁻²⁴
assert all((s - exact).abs() <= bound for s in sums.values())
assert all((s - exact).abs() < 1e-3 for s in sums.values())  # in fact far less
print("same numbers, two orders: two results, both within the rounding bound of the exact sum")

# %% [markdown]
# Neither is wrong. So equal formulas give equal results only up to an *error budget*: the size of
# one rounding, $2^{-24} \approx 6 \cdot 10^{-8}$ in float32, at worst times the number of terms,
# and usually far less. The honest test is this: take float64 as the truth, and compare the error
# of the kernel with the error of *the definition itself*, run in float32. If the kernel were
# wrong, its error would stand out. It does not, whether the heads forget after some tokens (left)
# or after thousands (right):

# %%
import json
from pathlib import Path

record = json.loads(Path("../figures/records/03_error_budget.json").read_text())
fig, axes = plotting.figure(1, 2, size=(12, 4.6))
for ax, (memory, curves) in zip(axes, record["errors"].items(), strict=True):
    for (name, errors), marker in zip(curves.items(), "so^", strict=True):
        ax.loglog(record["lengths"], errors, marker=marker, label=name)
    ax.axhline(1e-5, color=plotting.QUIET, linewidth=1)
    ax.axhline(2**-24, color=plotting.QUIET, linewidth=1, linestyle=":")
    ax.set(xlabel="length l", ylim=(3e-8, 3e-5))
    ax.set_title(f"the slow head remembers {memory} tokens")
axes[0].set_ylabel("error relative to float64")
axes[0].text(record["lengths"][0], 1.2e-5, "tolerance of the check", color=plotting.QUIET)
axes[0].text(record["lengths"][0], 3.8e-8, "one rounding, $2^{-24}$", color=plotting.QUIET)
axes[1].legend(loc="center left", bbox_to_anchor=(0.0, 0.72))
plotting.save(
    fig,
    "03_error_budget",
    "Relative error against length for three float32 computations, the recurrence, the chunked "
    "form and the kernel, in two panels. With short memory all three lie between two and ten "
    "roundings at every length. With long memory the recurrence's error grows with the length to "
    "some forty roundings, and the chunked form and the kernel stay below it.",
)

# %% [markdown]
# (Drawn from a record, `python book/records.py 03_error_budget`, because rounding noise differs
# between machines; the kernel ran in Triton's interpreter.) With long memory it is the recurrence
# that rounds most, once per token; a chunk rounds its state once per chunk. The same claim, live,
# at one length and with room for another machine's rounding:

# %%
tensors = [t.float() for t in inputs(b=1, l=512, h=2, p=16, n=16, g=1, dt=0.001)]
x, dt, A, B, C = (t.double() for t in tensors)
truth = ssd.ssd_recurrent(x, dt, A, B, C)


def error(y):
    return ((y.double() - truth).abs().max() / truth.abs().max()).item()


definition, chunked = error(ssd.ssd_recurrent(*tensors)), error(ssd.ssd_chunked(*tensors))
assert definition < 1e-5 and chunked < 10 * max(definition, unit)
print("float32: the error of the chunked form is of the size of the definition's own")

# %%
if status.available:
    (kernel,) = on_kernel(lambda *t: (ssd.ssd_kernel(*t),), tensors)
    assert error(kernel) < 10 * max(definition, unit)
    print("kernel rung: so is the error of the kernel")
else:
    not_run()

# %% [markdown]
# ### What TF32 and bfloat16 cost
#
# Matrix units can be told to read their operands with fewer bits. The sums stay in float32; what
# is rounded are the factors, on their way in. In the recurrence these are $x$, $B$ and $C$. (The
# kernel also rounds the entries of $M$, and its copy of the state that each chunk is handed. What
# runs from chunk to chunk stays in float32.) A format with $m$ bits of mantissa rounds by up to
# $2^{-m-1}$, relative: TF32 has 10 bits, bfloat16 has 7. We round the operands and do everything
# else in float64, so that this is the only error left:


# %%
def rounded(t, bits):
    """Round to a mantissa of so many bits, ties to even; hardware may cut TF32 off instead."""
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp(torch.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)


check("rounding to 7 bits = bfloat16", rounded(x, 7), x.bfloat16().double(), tol=0.0)

print("format     bits   one rounding   error of y")
for name, bits in (("TF32", 10), ("bfloat16", 7)):
    reduced = ssd.ssd_recurrent(rounded(x, bits), dt, A, rounded(B, bits), rounded(C, bits))
    print(f"{name:9} {bits:5}   {2.0 ** (-bits - 1):12.1e}   {error(reduced):10.1e}")
    assert 2.0 ** (-bits - 1) / 10 < error(reduced) < 2.0 ** (-bits - 1) * 10

# %% [markdown]
# So TF32 costs about three digits and bfloat16 about one more. That is why this package asks
# Triton for full float32 products on a GPU (`TRITON_F32_DEFAULT=ieee`; set it to `tf32` to have
# the speed back), and why the package's tests compare float16 results at 1e-3 and bfloat16 results
# at 8e-3. The state is carried in float32 in every case: it is added to once per token, for as
# long as the text is.
#
# ## 10 · As printed
#
# The published listings contain slips that change results. Here the step in question is run as
# printed, in our axes; we measure, and state what holds. None of this touches the idea; all of it
# is worth a test.
#
# ### The sum between the chunks runs over the wrong axis (WM Listing 3)
#
# Listing 3 does step 3 for all chunks at once: a matrix of decays from each source chunk to each
# target chunk, times the states. The states are broadcast along the *target* axis, so the sum has
# to run over the *source* axis, which is `dim=3`. Printed is `.sum(dim=2)`, the target axis. (The
# Mamba-2 of the transformers library had the same slip once; its issue 34817 tells the story.)


# %%
def chunked_at_once(x, dt, A, B, C, *, q, dim):
    """Steps 1 to 4 for all chunks at once, as in Listing 3; its step 3 sums over `dim`."""
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))
    x = dt[..., None] * x
    x, B, C, alpha = (rearrange(t, "b (c l) h ... -> b h c l ...", l=q) for t in (x, B, C, dt * A))
    total = alpha.cumsum(-1)
    L = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    inside = (L * (C @ B.mT)) @ x
    writes = ((total[..., -1:] - total).exp()[..., None] * B).mT @ x  # (b, h, c, n, p)

    # step 3: a zero state in front, and the decays between chunks, target before source
    states = torch.cat([torch.zeros_like(writes[:, :, :1]), writes], dim=2)
    sums = torch.nn.functional.pad(total[..., -1], (1, 0)).cumsum(-1)
    decay = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()  # (b, h, target, source)
    states = (decay[..., None, None] * states[:, :, None]).sum(dim=dim)[:, :, :-1]

    between = total.exp()[..., None] * (C @ states)
    return rearrange(inside + between, "b h c l p -> b (c l) h p")


AS_PRINTED, CORRECTED = 2, 3
x, dt, A, B, C = inputs(l=32, dt=0.05)
y = ssd.ssd_recurrent(x, dt, A, B, C)

check("one chunk, as printed", chunked_at_once(x, dt, A, B, C, q=32, dim=AS_PRINTED), y)
for q in (16, 8):
    printed = chunked_at_once(x, dt, A, B, C, q=q, dim=AS_PRINTED)
    _ = must_differ(f"{32 // q} chunks, as printed", printed, y, at_least=0.1)
    check(f"{32 // q} chunks, corrected", chunked_at_once(x, dt, A, B, C, q=q, dim=CORRECTED), y)

# %% [markdown]
# With one chunk there is nothing to sum and the listing is right. From the second on it is wrong.
# With two chunks we can say exactly how: the sum over targets multiplies the one state that is
# carried over by 1 + (decay over the second chunk) instead of by 1.

# %%
total = (dt * A)[:, 16:].sum(dim=1)
carried = y[:, 16:] - ssd.ssd_recurrent(x[:, 16:], dt[:, 16:], A, B[:, 16:], C[:, 16:])
printed = chunked_at_once(x, dt, A, B, C, q=16, dim=AS_PRINTED)
check(
    "as printed, the carried part is too large by exp(Σ dt A) of the second chunk",
    printed[:, 16:] - y[:, 16:],
    total.exp()[:, None, :, None] * carried,
)

# %% [markdown]
# That factor belongs to the *later* chunk, so the printed form also **leaks the future**. Change
# the step size of the very last token, and outputs long before it move:

# %%
later = dt.clone()
later[:, -1] += 0.5


def first_moved(form):
    """The first token whose output changes when the last token does."""
    moved = (form(later) - form(dt)).abs().amax(dim=(0, 2, 3)) > 1e-12
    return int(moved.nonzero()[0])


for name, dim in (("as printed", AS_PRINTED), ("corrected", CORRECTED)):
    token = first_moved(lambda dt, dim=dim: chunked_at_once(x, dt, A, B, C, q=8, dim=dim))
    print(f"{name}: the last token's step size moves outputs from token {token} on")
assert first_moved(lambda dt: ssd.ssd_chunked(x, dt, A, B, C, chunk_size=8)) == 31

# %% [markdown]
# How could this pass a test? WM Listing 4 initialises $A = -(1, \dots, h)$ and gives the step size
# no bias of its own to start from, so at the start $\Delta \approx \mathrm{softplus}(0) \approx
# 0.69$. Over a whole chunk of 64 tokens the slowest head then fades by $e^{-44}$. A chunk still
# hears the end of the one before it, but nothing survives a chunk from end to end: the matrix of
# decays between chunks is the identity, and the identity gives the same sum along either axis.
# (With chunks of 16 the decay is $e^{-11}$, and the slip already shows.) It shows fully when the
# model has *learned* to remember, that is, when $\Delta$ is small:

# %%
steps = [0.69, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001]
heads = -torch.arange(1.0, 5.0)
fig, ax = plotting.figure(size=(8, 4.4))
for q, marker in ((256, "o"), (64, "s"), (16, "^")):
    errors = []
    for step in steps:
        x, _, _, B, C = inputs(b=1, l=1024, seed=20)
        dt = torch.full((1, 1024, 4), step)
        y = ssd.ssd_chunked(x, dt, heads, B, C)
        wrong = chunked_at_once(x, dt, heads, B, C, q=q, dim=AS_PRINTED)
        errors.append(((wrong - y).abs().max() / y.abs().max()).item())
    if q == 256:
        assert errors[0] < 1e-10, "at the listing's own initialisation the slip is invisible"
    assert errors[-1] > 0.5, "with long memory it is as large as the result"
    drawn = [float(f"{max(error, 1e-12):.2g}") for error in errors]  # two digits: no rounding noise
    ax.loglog(steps, drawn, marker=marker, label=f"chunks of {q}")
ax.axvline(math.log(2), color=plotting.QUIET, linestyle=":")
ax.text(0.75, 1e-7, "at initialisation", color=plotting.QUIET, rotation=90)
ax.axhline(1e-10, color=plotting.QUIET, linewidth=1)
ax.text(0.0011, 1.6e-10, "tolerance of the check", color=plotting.QUIET)
ax.set(xlabel="step size dt", ylabel="relative error", ylim=(4e-13, 50))
ax.set_title("WM Listing 3 as printed (below 1e-12 drawn at 1e-12)")
ax.legend(loc="lower left", bbox_to_anchor=(0.02, 0.2))
plotting.save(
    fig,
    "03_wrong_axis",
    "Relative error of the printed listing against step size on logarithmic axes, for chunks of"
    " 256, 64 and 16 tokens. At small step sizes the error is of the size of the result or "
    "larger; at 0.69, the listing's own initialisation, chunks of 64 and 256 show no error at "
    "all.",
)

# %% [markdown]
# So tests of this layer need small $\Delta$, several chunks, and a probe for causality. Ours have
# all three.
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
x, dt, A, B, C = inputs(h=4, g=2)
tiled = ssd.ssd_recurrent(x, dt, A, B.repeat(1, 1, 2, 1), C.repeat(1, 1, 2, 1))
_ = must_differ("tiled groups, g = 2", tiled, ssd.ssd_recurrent(x, dt, A, B, C), at_least=0.5)

x, dt, A, B, C = inputs(h=4, g=1)
tiled = ssd.ssd_recurrent(x, dt, A, B.repeat(1, 1, 4, 1), C.repeat(1, 1, 4, 1))
check("tiled groups, g = 1: no difference", tiled, ssd.ssd_recurrent(x, dt, A, B, C))

# %% [markdown]
# ### A step size that may be negative (Ch Listing 2)
#
# Ch Listing 2 hands the output of a linear layer to the kernel as $\Delta$, without a softplus.
# (The call as printed does not run: its arguments are in another order, and the chunk size is
# missing. That is put right here.) About half of the step sizes are then negative, and a negative
# step turns decay into growth. We follow the size of the state for the listing's own $A = -1$,
# with the same random numbers as step sizes, raw and through a softplus.

# %%
l, h = 1024, 4
raw = random(1, l, h, seed=30)
x, _, _, B, C = inputs(b=1, l=l, h=h, g=1)
A = -torch.ones(h)
sizes = {}
for name, dt in (("as printed", raw), ("softplus", torch.nn.functional.softplus(raw))):
    state, size = torch.zeros(1, h, 5, 3), []
    for t in range(l):
        decay = torch.exp(dt[:, t] * A)
        state = decay[..., None, None] * state
        state = state + einsum("bh,bhp,bgn->bhpn", dt[:, t], x[:, t], B[:, t])
        size.append(state.abs().max().item())
    sizes[name] = size
assert max(sizes["as printed"]) > 1e10 and max(sizes["softplus"]) < 1e2

fig, ax = plotting.figure(size=(8, 4))
for name, size in sizes.items():
    ax.semilogy(range(0, l, 8), size[::8], label=name)
ax.set(xlabel="token t", ylabel="largest entry of the state")
ax.legend()
plotting.save(
    fig,
    "03_raw_step_size",
    "The largest entry of the state over 1024 tokens on a logarithmic axis. With raw step sizes "
    "it climbs over more than twenty orders of magnitude; with softplus it stays near one.",
)

# %% [markdown]
# The package refuses such an input, and says what it found (here the numbers are rounded and cut
# off, so that the message is short):

# %% tags=["raises-exception"]
ssd.ssd(x, raw.round(decimals=1).clamp(-2, 2), A, B, C)

# %% [markdown]
# ## 11 · On real text
#
# Everything so far was noise. Now text: the reference manual that ships with Python, 16,384 bytes
# of it, through an embedding and the layer `SSD`, which makes $x$, $B$, $C$ and $\Delta$ from its
# input by linear maps. (The step size has a bias, drawn so that its softplus lies between 0.001
# and 0.1, as in Mamba-2. With $A$ between −1 and −16, one head may forget within a token and
# another remember hundreds.) The order of the tokens is left to the decay here; the next chapter
# gives the layer other sources of position.

# %%
length = 16_384
ids = text.text_to_ids(text.read_text())[:length]

_ = torch.manual_seed(0)
embedding = torch.nn.Embedding(256, 64)
layer = ssd.SSD(64, n_heads=4, n_groups=2, d_state=16, position="decay")
embedded = embedding(ids)[None].detach()
positions = torch.arange(length)[None]


def run(backend, piece=slice(None)):
    layer.backend = backend
    with torch.no_grad():
        return layer(embedded[:, piece], positions[:, piece])


recurrent, recurrent_cache = run("recurrent")
chunked, chunked_cache = run("chunked")
print(
    "bytes:",
    length,
    "  output:",
    tuple(chunked.shape),
    "  state:",
    tuple(chunked_cache.state.shape),
)
check("16,384 bytes of text: chunked = recurrent", chunked, recurrent)
check("16,384 bytes of text: same state at the end", chunked_cache.state, recurrent_cache.state)

windows = [slice(start, start + 1024) for start in range(0, length, 1024)]
check(
    "16 windows of 1,024 bytes: quadratic = chunked",
    torch.cat([run("quadratic", window)[0] for window in windows]),
    torch.cat([run("chunked", window)[0] for window in windows]),
)

# %% [markdown]
# **Following the state.** What is in it? For an untrained layer, nothing one could name. So we
# build a head whose state can be read: $p = 1$, the value is always 1, and the key $B_t$ is the
# one-hot code of the byte, $n = 256$. Then column $j$ of the state is a count of the byte $j$ in
# which each occurrence fades with time. With $A = 0$ nothing fades, and the state *is* the table
# of byte counts:

# %%
one_hot = torch.nn.functional.one_hot(ids, 256).to(torch.float64)[None, :, None]  # (b, l, g, n)
ones = torch.ones(1, length, 1, 1)


def letter_counts(half_life, tokens=length):
    """The states of the counting head at the end of `tokens`; it forgets half in half_life."""
    rate = torch.tensor([0.0 if math.isinf(half_life) else -math.log(2) / half_life])
    key = one_hot[:, :tokens]
    _, state = ssd.ssd(
        ones[:, :tokens], ones[:, :tokens, :, 0], rate, key, key, return_final_state=True
    )
    return state[0, 0, 0]


check(
    "nothing forgotten: the state is the table of byte counts",
    letter_counts(math.inf),
    torch.bincount(ids, minlength=256).to(torch.float64),
)

# %% [markdown]
# Below, the same head on the first 400 bytes with three memories, drawn from a record (the manual
# differs a little between versions of Python). Each row is a letter, each column a byte of text.
# With a half-life of 4 bytes one can follow the text letter by letter; with 32 it blurs into
# common letters; with 256 what is left is how often each letter occurs. (Each picture has a colour
# scale of its own.) The size of the state is the same in all three. What differs is only how it
# spends its room.

# %%
record = json.loads(Path("../figures/records/03_letters.json").read_text())
fig, axes = plotting.figure(3, 1, size=(12, 10.5))
for ax, (half_life, counts) in zip(axes, record["states"].items(), strict=True):
    counts = torch.tensor(counts).T
    plotting.heatmap(ax, counts, title=f"half-life {half_life} bytes", signed=False, colorbar=False)
    ax.set_aspect("auto")
    ax.set_yticks(range(len(record["letters"])), record["letters"], fontsize=9)
axes[-1].set_xlabel("byte of the text")
plotting.save(
    fig,
    "03_letters",
    "Three heat maps of letters against position in a text. With a half-life of 4 bytes each "
    "letter is a short streak; with 32 the frequent letters and the space form long bands; with"
    " 256 the rows are smooth bands whose strength is how often the letter has occurred.",
)

# %% [markdown]
# The record was written by `python book/records.py 03_letters`. The claim behind the picture is
# asserted on the text of the Python at hand: the longer the memory, the closer the state is to the
# letter statistics of all that was read.

# %%
tokens = 4096
frequency = torch.bincount(ids[:tokens], minlength=256) / tokens
states = [letter_counts(half_life, tokens) for half_life in (4, 32, 256, 2048)]
distance = [(state / state.sum() - frequency).abs().sum().item() for state in states]
assert distance == sorted(distance, reverse=True)
print("the longer the memory, the closer the state to the statistics of the text: holds")

# %% [markdown]
# ## Summary
#
# | | recurrent | quadratic | chunked |
# |---|---|---|---|
# | idea | carry a state | $M = L \circ CB^\top$: attention | attention inside, state between |
# | cost in $l$ | linear, one token at a time | square, all at once | linear, all at once |
# | used for | decoding | short pieces, proofs | training, reading a prompt |
#
# - Unrolling the recurrence gives a lower triangular matrix whose blocks below the diagonal have
#   low rank; the state is the waist that they pass through.
# - Because the decay is one number per token, it separates from $C_t \cdot B_s$. That is the
#   duality, and $a = 1$ is linear attention.
# - The chunked form computes the diagonal blocks as attention and the rest as write, carry, read.
# - A test of it needs small step sizes, several chunks, $1 < g < h$, and a look at the future.
#
# ## Exercises
#
# **1.** A write halves after how many tokens, for decay rate $A$ and constant step size $\Delta$?


# %% tags=["exercise"]
def half_life(A, dt):
    ### BEGIN SOLUTION
    return math.log(2) / (-A * dt)
    ### END SOLUTION


# %% tags=["check"]
assert abs(math.exp(-4.0 * 0.01 * half_life(-4.0, 0.01)) - 0.5) < 1e-12

# %% [markdown]
# **2.** For $n = 1$ and $C = B = 1$, $\Delta = 1$, the decays can be read off $M$. Recover $a_1,
# \dots, a_{l-1}$ from `M`.


# %% tags=["exercise"]
def decays_from(M):
    ### BEGIN SOLUTION
    return M.diagonal(-1)  # a_t sits just below the diagonal
    ### END SOLUTION


# %% tags=["check"]
alpha = -random(12, seed=40).abs()
check("decays read off the matrix", decays_from(decay_matrix(alpha)), alpha[1:].exp())

# %% [markdown]
# **3.** Per token and head the chunked form keeps $q + pn/q$ numbers: a row of the small matrices,
# and its share of a state. Which chunk size keeps the fewest? What is it for $p = n = 64$?


# %% tags=["exercise"]
def best_chunk(p, n):
    ### BEGIN SOLUTION
    return math.sqrt(p * n)  # where the derivative 1 - pn/q² is zero
    ### END SOLUTION


# %% tags=["check"]
kept = {q: q + 64 * 64 / q for q in (16, 32, 64, 128, 256)}
assert best_chunk(64, 64) == min(kept, key=kept.get)
assert best_chunk(16, 64) == 32

# %% [markdown]
# **4.** Cut the sequence in two. The first half does not know of the second; the second is its own
# SSD plus what it reads from the state of the first. Write SSD as a function that calls itself on
# the halves and never forms an $l \times l$ matrix, for one head: `x` (l, p), `dt` (l,), `B` and
# `C` (l, n). Return `y` and the state.


# %% tags=["exercise"]
def ssd_halves(x, dt, A, B, C):
    ### BEGIN SOLUTION
    if len(x) == 1:
        state = dt * torch.outer(x[0], B[0])
        return (state @ C[0])[None], state
    m = len(x) // 2
    y1, state1 = ssd_halves(x[:m], dt[:m], A, B[:m], C[:m])
    y2, state2 = ssd_halves(x[m:], dt[m:], A, B[m:], C[m:])
    decay = (dt[m:] * A).cumsum(0).exp()  # since the first half ended
    y2 = y2 + decay[:, None] * (C[m:] @ state1.T)
    return torch.cat([y1, y2]), decay[-1] * state1 + state2
    ### END SOLUTION


# %% tags=["check"]
x, dt, A, B, C = inputs(b=1, h=1, g=1)
y, final = ssd.ssd_recurrent(x, dt, A, B, C, return_final_state=True)
got, state = ssd_halves(x[0, :, 0], dt[0, :, 0], A, B[0, :, 0], C[0, :, 0])
check("SSD by halves = recurrence", got, y[0, :, 0])
check("SSD by halves: same final state", state, final[0, 0])

# %% [markdown]
# **5.** The halves of exercise 4 can be joined in any order, as long as neighbours are joined.
# What do two stretches of text have to know about each other for that? Say what each stretch must
# hand over, show that joining is associative, and conclude how many *rounds* of joining a text of
# $l$ tokens needs.


# %% tags=["exercise"]
def join(first, second):
    """Join two neighbouring stretches, each given as (decay over it, state it leaves)."""
    ### BEGIN SOLUTION
    return first[0] * second[0], second[0] * first[1] + second[1]
    ### END SOLUTION


def rounds(l):
    ### BEGIN SOLUTION
    return math.ceil(math.log2(l))  # each round halves the number of stretches
    ### END SOLUTION


# %% tags=["check"]
u, v, w = ((random(1, seed=i).exp(), random(5, 3, seed=50 + i)) for i in range(3))
check("joining is associative", join(join(u, v), w)[1], join(u, join(v, w))[1])
x, dt, B, C = x[0, :, 0], dt[0, :, 0], B[0, :, 0], C[0, :, 0]


def stretch(part):
    return (dt[part] * A).sum().exp(), ssd_halves(x[part], dt[part], A, B[part], C[part])[1]


joined, whole = join(stretch(slice(0, 9)), stretch(slice(9, 29))), stretch(slice(0, 29))
check("two stretches joined: decay over the whole", joined[0], whole[0])
check("two stretches joined: state after the whole", joined[1], whole[1])
assert [rounds(l) for l in (2, 8, 9, 1024)] == [1, 3, 4, 10]

# %% [markdown]
# ## Further reading
#
# - Dao and Gu, *Transformers are SSMs: Generalized Models and Efficient Algorithms Through
#   Structured State Space Duality* (2024): the duality, semiseparable matrices, the chunked
#   algorithm.
# - Katharopoulos et al., *Transformers are RNNs* (2020): linear attention, our case $a = 1$.
# - Shi et al., *Wonderful Matrices*, Appendix A and Listings 2–4: SSD as this architecture uses it.
# - Gu and Dao, *Mamba* (2023): selection, and why a step size that depends on the token matters.
# - `cheems_ref/ssd.py`: the listing this notebook arrives at.
