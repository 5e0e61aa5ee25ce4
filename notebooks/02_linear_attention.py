# %% [markdown]
# # 02 · Linear attention
#
# **Take the softmax out of attention, and what is left is a matrix that every token updates. What
# can such a matrix remember, and how should one write into it? Five rules, one table.** When you
# are through you can
#
# - turn causal attention without a softmax into a recurrence, and back;
# - say what the state holds, and predict its error from the number of pairs in one line;
# - derive the delta rule as one gradient step, and Longhorn as the minimum of an objective;
# - look at a recall curve and say which rule has written the memory;
# - say for which step sizes a rule is stable, and see what happens beyond them;
# - compute the delta rule for a whole chunk of tokens with one triangular system of equations;
# - read the layer patterns of public hybrid models.
#
# Time: about 90 minutes. Assumes: vectors and matrices, the gradient of a function, a little
# PyTorch. Attention is written out here; chapter 01 is not needed.
#
# Sources: lecture 22 of CMU 10-423/623/723, *State Space Models + Hybrid Models* (L22), its slides
# "Linear Attention" and "Hybrid Models"; *Wonderful Matrices* (WM) §2; the papers that the rules
# come from are named where they appear. The code that this notebook builds up to is
# `cheems_ref/linear_attention.py`.

# %%
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import einsum

from cheems_ref import plotting
from cheems_ref.linear_attention import (
    RULES,
    delta_rule,
    gated_delta_rule,
    gated_linear_attention,
    linear_attention,
    linear_attention_quadratic,
    longhorn,
)
from cheems_ref.model import cache_bytes, expand_pattern, preset
from cheems_ref.ssd import ssd_recurrent
from cheems_ref.state_space import discretize_zoh
from cheems_ref.verify import check, check_gradients, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(*shape, seed):
    """Random vectors of length 1, every direction as likely as any other."""
    return F.normalize(random(*shape, seed=seed), dim=-1)


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## Why this matters
#
# Attention answers a question by going through everything that was said before. That is exact, and
# it has to keep everything: the keys and values of all tokens, in every layer. For a text of
# 262,144 tokens they take 128 gigabytes in a model of 7 billion parameters (L22's table, which §12
# computes again).
#
# The layers of this chapter keep one matrix per head, whatever the length of the text. The price
# is plain: a matrix of fixed size cannot hold everything. So it matters *what* is written, what is
# faded, and what is overwritten. In five years of papers this has become a family of update rules,
# and the lecture's slide gives five of them in five lines. We derive each line, run it, and look
# at what it remembers.
#
# ## 1 · Attention without its softmax
#
# Every token $t$ has a *query* $q_t$ and a *key* $k_t$, vectors of $n$ numbers, and a *value* $v_t$
# of $p$ numbers. Attention compares the query with all keys up to its own place, turns the scores
# into shares that sum to 1 (that is the softmax), and mixes the values by these shares:
#
# $$o_t = \sum_{s \le t} \frac{\exp(q_t \cdot k_s / \sqrt n)}
#   {\sum_{r \le t} \exp(q_t \cdot k_r / \sqrt n)}\; v_s. \tag{2.1}$$
#
# "Up to its own place", $s \le t$, is *causality*: no token looks into the future. In matrices,
# with one token per row, it is a lower triangle: `tril` keeps what is on and below the diagonal.

# %%
l, n, p = 24, 4, 5
q, k, v = random(l, n, seed=0), random(l, n, seed=1), random(l, p, seed=2)

exponentials = (q @ k.T / math.sqrt(n)).exp().tril()
shares = exponentials / exponentials.sum(-1, keepdim=True)
built_in = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
check("attention, written out = PyTorch's", shares @ v, built_in)

# %% [markdown]
# > "Linear attention is identical to standard attention, but drops the softmax" — L22, "Linear
# > Attention"
#
# So do we (the factor $1/\sqrt n$ goes as well; it was there for the softmax). With $M$ the causal
# mask, ones on and below the diagonal, and ∘ the product entry by entry:
#
# $$o_t = \sum_{s \le t} (q_t \cdot k_s)\; v_s, \qquad O = (QK^\top \circ M)\,V. \tag{2.2}$$

# %%
quadratic = (q @ k.T).tril() @ v
by_sum = torch.stack([sum((q[t] @ k[s]) * v[s] for s in range(t + 1)) for t in range(l)])
check("(QKᵀ ∘ M)V = the sum", quadratic, by_sum)
_ = must_differ("mask forgotten: attention to the future", q @ k.T @ v, quadratic)

# %% [markdown]
# Now look at one term. $k_s \cdot q_t$ is a number, so it may stand behind the vector, and then the
# brackets can move:
#
# $$v_s\,(k_s^\top q_t) = (v_s\,k_s^\top)\,q_t.$$
#
# On the right, the query has nothing to do with the bracket. $v_s k_s^\top$ is a matrix with $p$
# rows and $n$ columns, the *outer product*: entry $(i, j)$ is $v_{s,i}\,k_{s,j}$. All these
# matrices can be added up *before anybody asks*. Call the sum the state $S_t$:
#
# $$S_t = S_{t-1} + v_t\,k_t^\top, \qquad o_t = S_t\,q_t, \qquad S_{-1} = 0. \tag{2.3}$$

# %%
S, outputs = torch.zeros(p, n), []
for t in range(l):
    S = S + torch.outer(v[t], k[t])
    outputs.append(S @ q[t])
recurrent = torch.stack(outputs)
check("quadratic form = recurrence", quadratic, recurrent)

# %% [markdown]
# > "[…] the right side can be expanded into a recursive form." — WM §2, of $(L \circ QK^\top)\,V$
#
# That is all there is to linear attention: the same numbers as (2.2), with a memory that does not
# grow. (Without the mask one could also write $(QK^\top)V = Q\,(K^\top V)$, which is one and the
# same state for all tokens; with the mask, each token has its own.) The package has both forms, for
# many texts and heads at once: q and k are (b, l, h, n), v is (b, l, h, p), for batch b, length l
# and heads h.


# %%
def heads(*tensors):
    """One text, one head: (l, ...) becomes (1, l, 1, ...)."""
    return [t[None, :, None] for t in tensors]


check("package, recurrence", linear_attention(*heads(q, k, v))[0, :, 0], recurrent)
check("package, quadratic form", linear_attention_quadratic(*heads(q, k, v))[0, :, 0], recurrent)

# %% [markdown]
# **Why not with the softmax?** What the second half of the text learns from the first has to pass
# through the state. For inner products of width $n$ that is no loss: the block of scores between
# the two halves has at most rank $n$, a sum of $n$ outer products. The exponential bends every
# entry, and the rank goes up: no state of width $n$ can hand these shares over.
#
# **What else goes with the softmax?** The weights no longer sum to 1, and they may be negative. If
# all values are equal, attention returns that value; linear attention does not. (Katharopoulos et
# al., 2020, keep the division and bend queries and keys beforehand: exercise 2.)

# %%
rank = torch.linalg.matrix_rank
block = q[12:] @ k[:12].T  # later queries, earlier keys
assert rank(block) == n < rank(block.exp())
print(f"rank of the 12 × 12 scores: {rank(block)};  of their exponentials: more")

ones = torch.ones(l, p)
check("equal values: attention returns them", shares @ ones, ones)
_ = must_differ("equal values: linear attention does not", (q @ k.T).tril() @ ones, ones)

# %% [markdown]
# **What does it save?** The cache of attention holds $l\,(n + p)$ numbers per head, the state
# $n\,p$. For $n = p = 128$ they are even at 64 tokens:

# %%
for length in (64, 4096, 262_144):
    cache, state = length * (128 + 128), 128 * 128
    ratio = f"{cache / state:,.0f} : 1"
    print(f"{length:7,} tokens: cache {cache:10,} numbers, state {state:,}   {ratio}")

# %% [markdown]
# ## 2 · The state is a memory of pairs
#
# Forget texts for a moment, and read (2.3) as *storing*: the pair (key, value) is written as
# $v\,k^\top$. Reading with a query gives $v\,(k \cdot q)$: the value, times how well the query fits
# the key. For keys of length 1 there are three cases:
#
# - $q = k$: the fit is 1, and the value comes back;
# - $q$ at a right angle to $k$: the fit is 0, and nothing comes back;
# - anything between: a part of the value.
#
# Several pairs lie on top of one another in the same matrix. If their keys are at right angles to
# each other (*orthonormal*), each read finds its own value and nothing of the others:

# %%
n, p = 6, 8
keys = torch.linalg.qr(random(n, n, seed=3)).Q  # n orthonormal rows
values = random(n, p, seed=4)

S = sum(torch.outer(values[i], keys[i]) for i in range(3))
check("three pairs: the second is read back", S @ keys[1], values[1])
check("a key that was never written: nothing", S @ keys[3], torch.zeros(p))
between = (keys[0] + keys[1]) / math.sqrt(2)
check("a query between two keys: a mix", S @ between, (values[0] + values[1]) / math.sqrt(2))

S = sum(torch.outer(value, key) for key, value in zip(keys, values, strict=True))
check("n orthonormal keys: all n values", keys @ S.T, values)

# %%
fig, axes = plotting.figure(1, 5, size=(12, 3.6))
three = [torch.outer(values[i], keys[i]) for i in range(3)]
for i, ax in enumerate(axes[:3]):
    title = f"$v_{i + 1} k_{i + 1}^T$"
    plotting.heatmap(ax, three[i], title=title, limit=2.0, colorbar=False)
plotting.heatmap(axes[3], sum(three), title="their sum $S$", limit=2.0, colorbar=False)
side_by_side = torch.full((p, n), torch.nan)
side_by_side[:, 1], side_by_side[:, 4] = values[1], sum(three) @ keys[1]
plotting.heatmap(axes[4], side_by_side, title="read back", limit=2.0, colorbar=False)
axes[4].set_xticks([1, 4], ["$v_2$", "$S k_2$"])
for ax in axes[:4]:
    ax.set_xlabel("n")
axes[0].set_ylabel("p")
plotting.save(
    fig,
    "02_outer_products",
    "Three matrices of 8 rows and 6 columns, each an outer product: all its rows show one pattern, "
    "all its columns another. Their sum shows neither. Read with the second key, the sum gives "
    "the second value: the last picture shows the two as columns, which look the same.",
)

# %% [markdown]
# Each outer product is simple: one pattern across, one down. In the sum nothing can be seen any
# more, and yet the second key takes exactly the second value out of it.
#
# ## 3 · Interference
#
# In $n$ dimensions there are $n$ directions at right angles, and no more. A text has more tokens.
# What does the pair $j$ give when $l$ pairs are stored under keys of length 1?
#
# $$S\,k_j = \underbrace{v_j}_{\text{signal}} +
#   \underbrace{\sum_{i \ne j} (k_i \cdot k_j)\; v_i}_{\text{crosstalk}}. \tag{2.4}$$
#
# Take keys in random directions. How large is $(k_i \cdot k_j)^2$ on average? Turn the picture so
# that $k_j$ is the first axis: then it is the square of the first coordinate of $k_i$. The squares
# of all $n$ coordinates sum to 1, and no coordinate is preferred, so each is $1/n$ on average. The
# other values come with random signs, so that the squares add up. If an entry of a value has the
# mean square 1, the crosstalk on it has
#
# $$\text{mean square} = \frac{l - 1}{n}. \tag{2.5}$$
#
# One line, and a law that we can test:


# %%
def crosstalk(n, l, p=32, draws=1, seed=0):
    """Store l pairs with random keys; what is read minus what was stored: (draws, l, p)."""
    keys, values = unit(draws, l, n, seed=seed), random(draws, l, p, seed=seed + 1)
    S = einsum("blp,bln->bpn", values, keys)
    return einsum("bpn,bln->blp", S, keys) - values


pairs = [2**i for i in range(1, 10)]
measured = {}
for n in (16, 64, 256):
    errors = [crosstalk(n, l, draws=8192 // l, seed=l).square().mean() for l in pairs]
    measured[n] = torch.stack(errors)
    law = (torch.tensor(pairs) - 1) / n
    assert ((measured[n] / law - 1).abs() < 0.08).all()
    ratio = torch.tensor(pairs) / n / measured[n]
    _ = must_differ(f"n = {n}: the law l / n, with oneself", ratio, torch.ones(len(pairs)))
print(f"mean square of the crosstalk = (l - 1) / n within 8 %, {len(measured) * len(pairs)} cases")

# %% [markdown]
# The noise has no upper end: at $l = n + 1$ it is as large as the signal, and every further token
# adds to it. Is all lost then? It depends on what one asks. To find out *which of the stored
# values* comes back, a noisy copy is enough. We let the read value vote for the stored value to
# which it is nearest in direction, and, for comparison, read the same pairs by attention with a
# sharp softmax (scores times 32):


# %%
def share_found(n, l, p=64, softmax=False):
    """The share of pairs whose own value is the one that best fits what is read."""
    draws = max(4, 2048 // l)
    keys, values = unit(draws, l, n, seed=l), random(draws, l, p, seed=l + 1)
    fits = keys @ keys.mT
    weights = (32 * fits).softmax(-1) if softmax else fits
    best = (weights @ values @ F.normalize(values, dim=-1).mT).argmax(-1)
    return (best == torch.arange(l)).double().mean()


found = {n: [share_found(n, l) for l in pairs] for n in (16, 64, 256)}
attended = [share_found(16, l, softmax=True) for l in pairs]
assert all(share == 1 for share in attended)
for n in found:
    assert all(share > 0.98 for share, l in zip(found[n], pairs, strict=True) if l <= n)
assert found[16][-1] < 0.1 < 0.9 < found[256][-1]
print("l ≤ n: over 98 % of the values are found; 512 pairs: n = 16 under 10 %, n = 256 over 90 %")
print("attention finds all of them, with n = 16, for it has kept all of them")

# %%
fig, axes = plotting.figure(1, 2, size=(12, 4.6))
for n, color, marker in zip(measured, plotting.COLORS, "os^", strict=False):
    law = (torch.tensor(pairs) - 1) / n
    axes[0].loglog(pairs, law, color=color, base=2)
    axes[0].loglog(pairs, measured[n], marker, color=color, label=f"n = {n}", base=2)
    axes[1].semilogx(pairs, found[n], color=color, marker=marker, label=f"n = {n}", base=2)
axes[1].semilogx(pairs, attended, color=plotting.QUIET, linestyle=":", label="softmax", base=2)
axes[0].axhline(1, color=plotting.QUIET, linewidth=1)
axes[0].annotate("as large as the signal", (2, 1.15), color=plotting.QUIET, fontsize=12)
axes[0].set(title="mean square of the crosstalk", xlabel="pairs stored")
axes[1].set(title="share of values found", xlabel="pairs stored", ylim=(0, 1.08))
axes[0].legend(loc="lower right")
axes[1].legend(loc="lower left")
plotting.save(
    fig,
    "02_interference",
    "Left: the mean square of the crosstalk against the number of pairs, both logarithmic, for "
    "three widths of the key. The measured dots lie on the lines of the law (l - 1) / n, which "
    "cross the size of the signal near l = n. Right: the share of values that are found. It stays "
    "near 1 up to some multiple of n pairs and then falls; with a softmax it stays at 1.",
)

# %% [markdown]
# (Lines are the law, dots are measured.) So the state has a *capacity*, which grows with its width,
# and linear attention has no plan for what to do beyond it: it adds, for ever. All that follows are
# plans.
#
# ## 4 · Decay: Mamba-2
#
# The first plan is to let everything fade. Before each write the state is multiplied by $\alpha_t$
# between 0 and 1:
#
# $$S_t = \alpha_t\,S_{t-1} + v_t\,k_t^\top. \tag{2.6}$$
#
# This is the row "Mamba2" of the lecture's table; §13 shows that it is the state space duality of
# Mamba-2 in other letters. Code takes the logarithm, $g_t = \log \alpha_t \le 0$. A pair that was
# written $a$ tokens ago, of *age* $a$, has been multiplied $a$ times, so for constant $\alpha$ its
# weight is $\alpha^a$. After the *half-life* $\log\frac12 / \log\alpha$ half of it is left:

# %%
half_life = 12
log_alpha = -math.log(2) / half_life
key, value = unit(1, 4, seed=5), random(1, 3, seed=6)
silence = torch.zeros(half_life, 3)  # tokens that write nothing
k, v = key.expand(half_life + 1, -1), torch.cat([value, silence])
g = torch.full((half_life + 1,), log_alpha)
o = gated_linear_attention(*heads(k, k, v, g))[0, :, 0]
check("read at once: all of it", o[0], value[0])
check("after one half-life: half of it", o[half_life], value[0] / 2)

# %% [markdown]
# What is that good for? Count the noise. Each stored pair adds $\frac1n$ times the square of its
# weight, and the squares of the weights now have a finite sum, however long the text is:
#
# $$\text{noise}^2 = \frac1n \sum_{b \ne a} \alpha^{2b} \;\le\; \frac{1}{n\,(1 - \alpha^2)}, \qquad
#   \text{signal} = \alpha^a. \tag{2.7}$$
#
# The recent past is heard clearly, the distant past not at all. We store 512 pairs and measure both
# for every age: the signal is the part of the own value in what is read, the noise the rest.


# %%
def store(name, k, v, **gates):
    """The final states (b, p, n) of a rule on b streams, k (b, l, n), v (b, l, p), one head."""
    rule = RULES[name]
    given = [t[:, :, None] for t in (k, k, v, *(gates[gate] for gate in rule.takes))]
    return rule.function(*given, chunk_size=64, return_final_state=True)[1][:, 0]


def read(S, keys):
    return einsum("bpn,bln->blp", S, keys)


streams, l, n, p = 40, 512, 64, 128
keys, values = unit(streams, l, n, seed=7), random(streams, l, p, seed=8)
ages = torch.arange(l - 1, -1, -1)  # the last pair has age 0
curves = {}
for half_life in (math.inf, 128, 32, 8):
    alpha = 0.5 ** (1 / half_life)
    g = torch.full((streams, l), math.log(alpha))
    got = read(store("Mamba-2", keys, values, g=g), keys)
    signal = (got * values).sum((0, 2)) / values.square().sum((0, 2))
    noise = (got - signal[:, None] * values).square().mean((0, 2)).sqrt()
    weights = alpha**ages
    law = ((weights.square().sum() - weights.square()) / n).sqrt()
    assert ((noise / law - 1).abs() < 0.2).all()
    assert abs(noise.square().mean().sqrt() / law.square().mean().sqrt() - 1) < 0.02
    assert ((signal - weights).square().mean().sqrt() / law.max()) < 0.05
    if alpha < 1:
        assert (law < 1.001 / math.sqrt(n * (1 - alpha**2))).all()
    curves[half_life] = (signal, weights, weights / law)
print("signal = α^age, and noise = equation 2.7 within 2 % over all ages, for four half-lives")

# %%
fig, axes = plotting.figure(1, 2, size=(12, 4.6))
shown = ages <= 160
for (half_life, (signal, weights, ratio)), color in zip(
    curves.items(), plotting.COLORS, strict=False
):
    label = "no decay" if half_life == math.inf else f"half-life {half_life}"
    axes[0].plot(ages[shown], weights[shown], color=color, label=label)
    dots = shown & (ages % 10 == 0)
    axes[0].plot(ages[dots], signal[dots], "o", color=color, markersize=5)
    axes[1].semilogy(ages[shown], ratio[shown], color=color, label=label)
axes[1].axhline(1, color=plotting.QUIET, linewidth=1)
axes[0].set(title="signal", xlabel="age of the pair", ylim=(-0.1, 1.15))
axes[1].set(title="signal / noise", xlabel="age of the pair", ylim=(1e-2, 20))
axes[1].legend(loc="upper right", ncols=2)
plotting.save(
    fig,
    "02_decay",
    "Left: the signal of a stored pair against its age, for four half-lives; dots lie on the "
    "exponentials, and without decay the signal stays at 1. Right: the ratio of signal to noise, "
    "logarithmic. Without decay it is flat and below 1; the shorter the half-life, the higher "
    "it starts and the faster it falls.",
)

# %% [markdown]
# After 512 pairs in 64 dimensions a state without decay drowns everything alike, and a short
# half-life hears the last few pairs three times as loud as the noise. Models let every token choose
# its own $\alpha_t$, and have heads with different ranges.
#
# But decay is blunt. It fades everything alike, whether it is still valid or not, and it never
# *corrects*: a key that is written a second time holds both values until the older one has faded.
#
# ## 5 · The delta rule: one step of regression
#
# Write *the cat is in the kitchen*, and later *the cat is in the garden*. The key, cat, is the
# same, the value is new. What does the state answer when it is asked for the cat?

# %%
key, kitchen, garden = unit(4, seed=9), random(3, seed=10), random(3, seed=11)
S = torch.outer(kitchen, key) + torch.outer(garden, key)
check("linear attention: kitchen plus garden", S @ key, kitchen + garden)

# %% [markdown]
# We want $S k \approx v$. That is *regression*: find a linear map $S$ that takes keys to values,
# where the examples come one at a time. The usual loss of one example is
#
# $$\ell(S) = \tfrac12\,\| S k - v \|^2, \qquad
#   \frac{\partial \ell}{\partial S} = (S k - v)\,k^\top. \tag{2.8}$$
#
# (Entry $(i, j)$: the error of output $i$ times the input $j$.) PyTorch's automatic differentiation
# agrees:

# %%
n, p = 4, 3
S, key, value, beta = random(p, n, seed=12), random(n, seed=13), random(p, seed=14), 0.15


def loss(S):
    return (S @ key - value).square().sum() / 2


slope = torch.func.grad(loss)(S)
check("gradient of the loss = error times key", slope, torch.outer(S @ key - value, key))
_ = must_differ("error without its sign", torch.outer(value - S @ key, key), slope)

# %% [markdown]
# One step of gradient descent of size $\beta$ per token, and multiplied out:
#
# $$S_t = S_{t-1} + \beta_t\,\underbrace{(v_t - S_{t-1} k_t)}_{\text{what is missing}}\,k_t^\top
#   = S_{t-1}\,(I - \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top. \tag{2.9}$$
#
# The left form says what it does: read first, and write only the difference. It is the *delta
# rule*, which Widrow and Hoff used in 1960; Schlag et al. (2021) brought it into linear attention.
# The right form is the lecture's row "DeltaNet".

# %%
stepped = S - beta * slope
by_row = S @ (torch.eye(n) - beta * torch.outer(key, key)) + beta * torch.outer(value, key)
check("gradient step = the lecture's row", stepped, by_row)

token = (t[None, None, None] for t in (key, key, value, torch.tensor(beta)))
_, after = delta_rule(*token, initial_state=S[None, None], return_final_state=True)
check("package, one token", after[0, 0], stepped)

# %% [markdown]
# (The matrix $k k^\top$ stands to the *right* of $S$: it acts on the keys' side. To the left, where
# $S$ has $p$ rows, it would not even fit.)
#
# With $\beta = 1/\|k\|^2$ the step goes all the way: what the state held under this key is
# replaced, and what it holds under keys at right angles is not touched:

# %%
beta = 1 / (key @ key)
S_new = S + beta * torch.outer(value - S @ key, key)
check("β = 1/‖k‖²: the new value, exactly", S_new @ key, value)
other = random(n, seed=15)
other = other - (other @ key) / (key @ key) * key  # the part at a right angle to the key
check("at a right angle: as before", S_new @ other, S @ other)

cat, places = unit(n, seed=9), torch.stack([kitchen, garden])
one = torch.ones(2)
o = delta_rule(*heads(cat.expand(2, -1), cat.expand(2, -1), places, one))[0, :, 0]
check("the cat, after both sentences: in the garden", o[1], garden)

# %% [markdown]
# Linear attention is a gradient step too, of size 1, but on the loss $-v \cdot S k$. That loss asks
# the answer to *point* towards $v$, the further the better. It never has enough, and this is why
# the state of linear attention only grows:

# %%
slope = torch.func.grad(lambda S: -value @ (S @ key))(S)
check("linear attention = a step on -v·Sk", S - slope, S + torch.outer(value, key))

# %% [markdown]
# ## 6 · Longhorn: the same step, taken with open eyes
#
# A gradient step uses the slope *here* to decide how far to go *there*. If the step is long, the
# slope has changed on the way, and the step overshoots. Longhorn (Liu et al., 2024) asks for the
# end point directly. The new state shall be close to the old one and answer the new pair well:
#
# $$S_t = \operatorname*{argmin}_S \| S - S_{t-1} \|^2 + \beta_t\,\| S k_t - v_t \|^2, \tag{2.10}$$
#
# where $\|S\|^2$ is the sum of the squares of all entries, and $\beta \ge 0$ says how much the pair
# counts. At the minimum the gradient is zero (drop a factor 2):
#
# $$(S - S_{t-1}) + \beta\,(S k - v)\,k^\top = 0
#   \quad\Longleftrightarrow\quad
#   S\,(I + \beta\,k k^\top) = S_{t-1} + \beta\,v k^\top. \tag{2.11}$$
#
# Read the left equation as $S = S_{t-1} - \beta\,\nabla\ell(S)$: a gradient step of the same $\ell$
# as before, whose gradient is taken *at the place where the step ends*. Such a step is called
# *implicit*. To solve it, invert $I + \beta\,kk^\top$. This matrix stretches the direction of $k$
# by $1 + \beta k^\top k$ and leaves all others alone, so the inverse has to shrink that direction
# back (Sherman and Morrison's formula):
#
# $$(I + \beta\,k k^\top)^{-1} = I - \epsilon\,k k^\top, \qquad
#   \epsilon = \frac{\beta}{1 + \beta\,k^\top k}. \tag{2.12}$$

# %%
beta, square = 1.7, key @ key
eps = beta / (1 + beta * square)
identity, kk = torch.eye(n), torch.outer(key, key)
check("Sherman-Morrison", (identity - eps * kk) @ (identity + beta * kk), identity)
_ = must_differ("with β for ε", (identity - beta * kk) @ (identity + beta * kk), identity)

# %% [markdown]
# Apply it to the right side of 2.11. The old state gives $S_{t-1}(I - \epsilon kk^\top)$. The write
# gives $\beta\,v k^\top (I - \epsilon k k^\top) = \beta\,(1 - \epsilon\,k^\top k)\,v k^\top$, and
# $\beta\,(1 - \epsilon\,k^\top k) = \epsilon$. Together:
#
# $$S_t = S_{t-1}\,(I - \epsilon_t k_t k_t^\top) + \epsilon_t v_t k_t^\top: \tag{2.13}$$
#
# the delta rule with $\epsilon$ for $\beta$, the lecture's row "Longhorn". Does it really minimise
# 2.10? The gradient there must vanish:


# %%
def objective(new):
    return (new - S).square().sum() + beta * (new @ key - value).square().sum()


check("β (1 - ε kᵀk) = ε", beta * (1 - eps * square), eps)
longhorn_row = S @ (identity - eps * kk) + eps * torch.outer(value, key)
solved = torch.linalg.solve(identity + beta * kk, S + beta * torch.outer(value, key), left=False)
check("row = solution of 2.11", longhorn_row, solved)
slope = torch.func.grad(objective)(longhorn_row)
check("gradient of the objective at the row = 0", slope, torch.zeros(p, n))

explicit = S + beta * torch.outer(value - S @ key, key)
assert objective(longhorn_row) < objective(S) and objective(longhorn_row) < objective(explicit)
_ = must_differ("gradient at the explicit step", torch.func.grad(objective)(explicit), 0 * slope)

token = (t[None, None, None] for t in (key, key, value, torch.tensor(beta)))
_, after = longhorn(*token, initial_state=S[None, None], return_final_state=True)
check("package, one token", after[0, 0], longhorn_row)

# %% [markdown]
# However large $\beta$ is, $\epsilon\,k^\top k = \frac{\beta k^\top k}{1 + \beta k^\top k}$ stays
# below 1: the step approaches the full replacement and never goes beyond it. §9 shows what that is
# worth. (This is the rule as the lecture has it. The published model keeps only the diagonal of
# $kk^\top$ in front of the old state, so that a scan can compute it.)
#
# ## 7 · Gates: decay and correct
#
# The delta rule clears away one key at a time, when that key comes again. Decay clears everything,
# without looking. A new chapter of a book, a new user in a dialogue: then one wants both. *Gated
# DeltaNet* (Yang, Kautz and Hatamizadeh, 2024) fades first and corrects then:
#
# $$S_t = \alpha_t S_{t-1}\,(I - \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top
#   = \tilde S + \beta_t\,(v_t - \tilde S k_t)\,k_t^\top, \quad \tilde S = \alpha_t S_{t-1}.
#   \tag{2.14}$$
#
# The error that is written is that of the *faded* state: what the fading has taken from the pair is
# restored by its next write. In the order of the lecture, α stands in front of the bracket and not
# in front of the write. Two ways of getting it wrong:

# %%
alpha, beta = 0.7, 0.4
row = S @ (alpha * (identity - beta * kk)) + beta * torch.outer(value, key)
faded = alpha * S
check(
    "lecture's row = fade, then correct",
    row,
    faded + beta * torch.outer(value - faded @ key, key),
)
late = alpha * (S + beta * torch.outer(value - S @ key, key))
_ = must_differ("correct, then fade", late, row)
blind = faded + beta * torch.outer(value - S @ key, key)
_ = must_differ("the error of the state before it faded", blind, row)

token = (t[None, None, None] for t in (key, key, value, *torch.tensor([math.log(alpha), beta])))
_, after = gated_delta_rule(*token, initial_state=S[None, None], return_final_state=True)
check("package, one token", after[0, 0], row)

# %% [markdown]
# A gate that closes ($\alpha = 0$, that is $g = -\infty$) at the start of a new topic makes the
# rule forget all that was before, in one token. Without it the delta rule carries the old topic
# along, and what it then knows of the new one is less exact:

# %%
streams, l, n, p = 100, 72, 32, 16
k, v = unit(streams, l, n, seed=16), random(streams, l, p, seed=17)
g, beta = torch.zeros(streams, l), torch.ones(streams, l)
new = slice(64, 72)  # the new topic: eight pairs
g[:, 64] = -math.inf
fresh = store("DeltaNet", k[:, new], v[:, new], beta=beta[:, new])
gated = store("Gated DeltaNet", k, v, g=g, beta=beta)
carried = store("DeltaNet", k, v, beta=beta)
check("gate closed at token 64 = started at token 64", gated, fresh)

with_gate, without = ((read(S, k[:, new]) - v[:, new]).norm() for S in (gated, carried))
assert with_gate < 0.85 * without
print("the eight pairs of the new topic: error with the gate under 85 % of that without")

# %% [markdown]
# The five rules, as steps of learning:
#
# | rule | loss of one pair | step |
# |---|---|---|
# | linear attention | $-v \cdot S k$ | gradient, size 1 |
# | Mamba-2 | $-v \cdot S k$ | fade by α, then gradient, size 1 |
# | DeltaNet | $\frac12 \lVert S k - v \rVert^2$ | gradient, size β |
# | Longhorn | $\frac12 \lVert S k - v \rVert^2$ | implicit, size β |
# | Gated DeltaNet | $\frac12 \lVert S k - v \rVert^2$ | fade by α, then gradient, size β |
#
# ## 8 · What each rule forgets and overwrites
#
# Nothing is free. A step along one key also moves what is stored under all keys that are not at a
# right angle to it. For a random unit key, $k k^\top$ is $I/n$ on average (equation 2.5's argument
# again). So on average each token multiplies *everything* in the state by $\alpha\,(1 -
# \epsilon/n)$, where $\epsilon$ is the step: β, Longhorn's ε, or 0 for the first two rules. A pair
# of age $a$, written with weight $w$ (1, β or ε), is left with
#
# $$\text{signal}(a) = w\,\big(\alpha\,(1 - \tfrac{\epsilon}{n})\big)^a. \tag{2.15}$$
#
# So the delta rule forgets as well, by overwriting: with $\beta = 1$ and keys in random directions
# its half-life is about $0.69\,n$ tokens. One formula for five rules, measured on streams of
# fresh random keys. From here on to the end of the section $\alpha = 0.97$ (a half-life of 23
# tokens) and $\beta = 1$, for all rules that take them; Longhorn's ε is then $\frac12$.

# %%
ALPHA, BETA = 0.97, 1.0
laws = {  # w, α, ε
    "linear attention": (1, 1, 0),
    "Mamba-2": (1, ALPHA, 0),
    "Longhorn": (1 / 2, 1, 1 / 2),
    "DeltaNet": (1, 1, 1),
    "Gated DeltaNet": (1, ALPHA, 1),
}


def gates_for(k):
    """The gates of all rules for keys (b, l, n): g and beta."""
    return dict(
        g=torch.full(k.shape[:2], math.log(ALPHA)),
        beta=torch.full(k.shape[:2], BETA),
    )


streams, l, n, p = 200, 64, 32, 32
keys, values = unit(streams, l, n, seed=18), random(streams, l, p, seed=19)
ages = torch.arange(l - 1, -1, -1)
assert list(laws) == list(RULES)
for name, (w, alpha, eps) in laws.items():
    got = read(store(name, keys, values, **gates_for(keys)), keys)
    signal = (got * values).sum((0, 2)) / values.square().sum((0, 2))
    assert (signal - w * (alpha * (1 - eps / n)) ** ages).abs().max() < 0.07
    print(f"{name:16}  w = {w:<3g}  α = {alpha:<4g}  ε = {eps:<3g}  as predicted, within 0.07")
_ = must_differ("Gated DeltaNet by Mamba-2's law", ALPHA**ages, signal, at_least=0.1)

# %% [markdown]
# ### One stream, five memories
#
# Signal is half of the story; the error holds the noise too. Here is one stream of 60 pairs in a
# state with $n = 32$. It has three parts:
#
# - tokens 0 to 23 write 24 keys for the first time,
# - tokens 24 to 35 give the first twelve of these keys *new* values,
# - tokens 36 to 59 bring 24 further keys.
#
# After every token we ask for every key that was written so far, and compare the answer with the
# value that is *valid* then, the last one written: the error is $\|S_t k - v\| / \|v\|$. White is
# right, dark is wrong; an error of 1 is what an empty memory would make.

# %%
which = torch.cat([torch.arange(24), torch.arange(12), torch.arange(24, 48)])
keys, values = unit(48, 32, seed=20), random(60, 64, seed=21)


def states(name, k, v, **gates):
    """The state after every token, by decoding one at a time: (l, p, n) from k (l, n), v (l, p)."""
    rule, S, all_states = RULES[name], torch.zeros(1, 1, v.shape[-1], k.shape[-1]), []
    given = heads(k, k, v, *(gates[gate] for gate in rule.takes))
    for t in range(len(k)):
        token = (x[:, t : t + 1] for x in given)
        _, S = rule.function(*token, initial_state=S, return_final_state=True)
        all_states.append(S[0, 0])
    return torch.stack(all_states)


def errors_over_time(name):
    """‖S_t k - v‖ / ‖v‖ for every key and token (keys, l); NaN before the key is written."""
    gates = {gate: x[0] for gate, x in gates_for(keys[which][None]).items()}
    answers = einsum("lpn,sn->lsp", states(name, keys[which], values, **gates), keys)
    valid = torch.full((48, 60), -1)
    for t, i in enumerate(which.tolist()):
        valid[i, t:] = t  # until the key is written again
    error = (answers.transpose(0, 1) - values[valid]).norm(dim=-1) / values[valid].norm(dim=-1)
    return error.masked_fill(valid < 0, torch.nan)


memories = {name: errors_over_time(name) for name in RULES}
overwritten, kept, late = slice(0, 12), slice(12, 24), slice(36, 48)
for name, (low, high) in {
    "linear attention": (1.2, 9), "Mamba-2": (0.6, 1.1), "Longhorn": (0.4, 0.9),
    "DeltaNet": (0, 0.7), "Gated DeltaNet": (0, 0.7),
}.items():  # fmt: skip
    mean = memories[name][overwritten, 35].mean()  # right after the second part
    assert low < mean < high, (name, mean)
for name in ("DeltaNet", "Gated DeltaNet"):
    assert memories[name][which, torch.arange(60)].max() < 1e-12  # each pair, as it is written
assert memories["Mamba-2"][kept, -1].mean() > 0.8 > memories["DeltaNet"][late, -1].mean()
darker = memories["linear attention"][kept][:, [24, 36, 48, 59]].mean(0)
assert (darker.diff() > 0.05).all()  # and the rows that were written twice are the darkest
assert memories["linear attention"][overwritten, -1].mean() > darker[-1] + 0.2
print("just written, read at once: no error for DeltaNet and Gated DeltaNet, whatever was before")

# %%
fig, axes = plotting.figure(2, 3, size=(12, 8.2))
stream, *panels = axes.flat
stream.plot(range(60), which, "s", markersize=4, color=plotting.COLORS[0])
stream.set(xlim=(-0.5, 59.5), ylim=(47.5, -0.5), title="the stream: which key")
stream.annotate("first\nvalues", (14, 8), fontsize=12)
stream.annotate("new values", (37.5, 6), fontsize=12)
stream.annotate("further keys", (20, 41), fontsize=12)
for (name, error), ax in zip(memories.items(), panels, strict=True):
    plotting.heatmap(ax, error, title=name, signed=False, limit=1.6, colorbar=False)
    ax.set_aspect("auto")
for ax in axes.flat:
    ax.set_yticks([0, 12, 24, 36])
    ax.set_xticks([0, 24, 36, 59])
for ax in axes[1]:
    ax.set_xlabel("token")
for ax in axes[:, 0]:
    ax.set_ylabel("key")
bar = fig.colorbar(panels[0].images[0], ax=axes, shrink=0.6, label="error of the valid value")
bar.outline.set_visible(False)
plotting.save(
    fig,
    "02_memories",
    "Six pictures with 60 tokens across and 48 keys down. The first shows which key each token "
    "writes. The others show the error of each key's valid value over time, for five rules. "
    "Linear attention: darker and darker, darkest where keys were written twice. Mamba-2: a middle "
    "blue nearly everywhere. Longhorn: light, never white. DeltaNet: white at the write, darker "
    "slowly, white again at the second write. Gated DeltaNet: the same, a little darker.",
)

# %% [markdown]
# What to look for, panel by panel:
#
# - **Linear attention**: darker and darker, from left to right. From token 24 on, a second
#   front runs through the upper twelve rows, and behind it they are the darkest of all: old and new
#   value lie on top of each other.
# - **Mamba-2**: never clean after the first tokens, since what was written just before lies over
#   everything; never as dark as linear attention either. There is no second front: by then half of
#   the old value has faded by itself.
# - **Longhorn**, with ε = ½: never white, because each write goes half the way; and the slowest to
#   darken, because half a step disturbs the others less.
# - **DeltaNet**: white at the write, even where the key was used before. Between writes it darkens,
#   not with time but with *traffic*: every other key takes a little.
# - **Gated DeltaNet**: both at once. On this stream, where everything stays valid, the gate only
#   costs. §7 had the case where it pays.
#
# ### Recall curves
#
# The same on 100 streams of 96 pairs with $n = 64$, in random order. In each, 32 keys are used
# once, and 32 twice, with two different values. At the end we ask for all 64 keys, and draw the
# error of the valid value against its age: for keys used once (left) and twice (middle). On the
# right is what is left of the *old* value of a key that was used twice: 1 is all of it.

# %%
streams, once, twice, n, p = 100, 32, 32, 64, 32
asked, length = once + twice, once + 2 * twice
slots = torch.cat([torch.arange(asked), torch.arange(once, asked)])  # the keys `once`... come twice
generator = torch.Generator().manual_seed(22)
slots = torch.stack([slots[torch.randperm(length, generator=generator)] for _ in range(streams)])
keys, values = unit(streams, asked, n, seed=23), random(streams, length, p, seed=24)
rows = torch.arange(streams)[:, None]
at = slots[:, None] == torch.arange(asked)[:, None]  # (streams, keys, tokens)
last = (at * torch.arange(1, length + 1)).argmax(-1)
first = (at * torch.arange(length, 0, -1)).argmax(-1)
valid, old, age = values[rows, last], values[rows, first], length - 1 - last
used_once = (torch.arange(asked) < once).expand(streams, -1)
bins = [(a, a + 4) for a in range(0, 72, 4)]


def by_age(x, chosen):
    """The mean of x (streams, keys) over the chosen entries, for each bin of ages."""
    return torch.stack([x[chosen & (age >= a) & (age < b)].mean() for a, b in bins])


recall = {}
for name in RULES:
    S = store(name, keys[rows, slots], values, **gates_for(values))
    got = read(S, keys)
    error = (got - valid).square().sum(-1) / p
    left = (got * old).sum(-1) / p
    recall[name] = [
        by_age(error, used_once).sqrt(), by_age(error, ~used_once).sqrt(), by_age(left, ~used_once)
    ]  # fmt: skip
    if name == "linear attention":  # equation 2.5; the old value of the same key adds 1
        assert abs(error[used_once].mean() / ((length - 1) / n) - 1) < 0.03
        assert abs(error[~used_once].mean() / ((length - 2) / n + 1) - 1) < 0.03

once_error, twice_error, remains = ({r: c[i] for r, c in recall.items()} for i in range(3))
assert (remains["linear attention"] > 0.9).all()  # nothing is ever overwritten
for name in ("DeltaNet", "Gated DeltaNet"):
    assert remains[name].abs().max() < 0.1 and remains[name].abs().mean() < 0.05
assert 0.25 < remains["Mamba-2"][0] < 0.33
assert (twice_error["linear attention"] > once_error["linear attention"] + 0.25).all()
assert ((twice_error["DeltaNet"] - once_error["DeltaNet"]).abs() < 0.1).all()
assert once_error["DeltaNet"][0] < 0.35 < 0.45 < once_error["Mamba-2"][0]
assert once_error["Longhorn"][0] > once_error["DeltaNet"][0] + 0.2  # half a step: worse at once
assert (once_error["Gated DeltaNet"][4:] > once_error["DeltaNet"][4:]).all()  # the gate costs
assert (once_error["Longhorn"][8:] < once_error["DeltaNet"][8:] - 0.1).all()  # better later
print("linear attention: error² = 95/64 for keys used once, 94/64 + 1 for keys used twice, to 3 %")
print("the delta rules keep less than 5 % of an overwritten value, linear attention all of it")

# %%
fig, axes = plotting.figure(1, 3, size=(12, 5.2))
middle = [(a + b - 1) / 2 for a, b in bins]
titles = ("used once: error", "used twice: error", "used twice: old value left")
for i, (ax, title) in enumerate(zip(axes, titles, strict=True)):
    for (name, curves), color, marker in zip(
        recall.items(), plotting.COLORS, "osD^v", strict=False
    ):
        ax.plot(
            middle, curves[i], color=color, marker=marker, markevery=(2, 4), label=name, linewidth=2
        )
    ax.set_title(title)
    ax.set_xlabel("age of the valid value")
for ax in axes[:2]:
    ax.axhline(1, color=plotting.QUIET, linewidth=1, zorder=0)
    ax.set_ylim(0, 1.75)
axes[0].annotate("an empty memory", (0, 1.03), color=plotting.QUIET, fontsize=12)
axes[2].set_ylim(-0.1, 1.25)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=12)
plotting.save(
    fig,
    "02_recall",
    "Three panels against the age of the valid value, with five curves each. Keys used once: "
    "linear attention is flat at 1.2; DeltaNet and Gated DeltaNet rise from 0.2 to about 1; "
    "Mamba-2 from 0.5 to 1; Longhorn slowly from 0.57 to 0.8. Keys used twice: the same, but "
    "linear attention is at 1.6. Old value left: linear attention 1, Mamba-2 falling from 0.3, "
    "Longhorn near 0.17, the delta rules near 0.",
)

# %% [markdown]
# Three things to take along:
#
# - Above the grey line a memory is worse than none. Linear attention is there for all ages, since
#   96 pairs are more than 64 dimensions hold; and a key that is used twice is its worst case.
# - No rule wins everywhere. DeltaNet is best for what was just said, Longhorn's half steps for what
#   was said long ago. The step size is a choice of *which past* to remember, and trained models
#   make it anew for every token.
# - Overwriting is a property of the rule and not of time: right after the second write the delta
#   rules have removed the old value, while in Mamba-2 a good quarter of it is still there. (Later
#   on DeltaNet's curve lies a little above 0. Other keys were written while the old value was
#   there, and corrected for it; when they are written again, a trace of it comes back.)
#
# ### Can a model learn its way around that?
#
# Perhaps linear attention could learn keys and values that avoid the trouble? Train it. A text is
# a list of notes, each a key and one of 8 values, written in random order, two notes per key on
# average; afterwards the model is asked for the *last* value of every key. Keys, values, the
# read-out, α and β are all learned; the rule is given.


# %%
def notes(batch, generator, keys, values=8):
    """Keys and values of the notes; per key: its last value, how often it came, the best guess.

    The best guess is the share of a key's most frequent value: what one can know who has seen
    all its notes, but not their order.
    """
    writes = 2 * keys
    slots = torch.randint(keys, (batch, writes), generator=generator)
    stored = torch.randint(values, (batch, writes), generator=generator)
    at = slots[:, None] == torch.arange(keys)[:, None]
    last = (at * torch.arange(1, writes + 1)).argmax(-1)
    counts = at.float() @ F.one_hot(stored, values).float()
    times = at.sum(-1)
    return slots, stored, stored.gather(1, last), times, counts.amax(-1) / times


class NoteReader(torch.nn.Module):
    """Notes in, for every key the logits of its last value out; one head of a rule between."""

    def __init__(self, rule, keys, values=8, n=16, p=8):
        super().__init__()
        self.rule = RULES[rule]
        self.key, self.value = torch.nn.Embedding(keys, n), torch.nn.Embedding(values, p)
        self.fade = torch.nn.Parameter(torch.tensor(-3.0))
        self.step = torch.nn.Parameter(torch.tensor(0.0))
        self.head = torch.nn.Linear(p, values)

    def forward(self, slots, stored):
        keys = F.normalize(self.key.weight, dim=-1)
        k, v = keys[slots][:, :, None], self.value(stored)[:, :, None]
        gates = {"g": -F.softplus(self.fade), "beta": 2 * torch.sigmoid(self.step)}
        gates = [gates[gate].expand(*slots.shape, 1) for gate in self.rule.takes]
        options = dict(chunk_size=64, return_final_state=True)
        _, S = self.rule.function(k, k, v, *gates, **options)
        return self.head(einsum("bpn,sn->bsp", S[:, 0], keys))


def train_on_notes(rule, keys, steps, seed=0):
    """Train a NoteReader; its accuracy on keys with several notes, and that of the best guess."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = NoteReader(rule, keys).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(steps):
        slots, stored, answers, times, _ = notes(64, generator, keys)
        asked = times > 0
        optimizer.zero_grad()
        F.cross_entropy(model(slots, stored)[asked], answers[asked]).backward()
        optimizer.step()
    with torch.no_grad():
        slots, stored, answers, times, guess = notes(512, generator, keys)
        right = model(slots, stored).argmax(-1) == answers
    return right[times > 1].double().mean().item(), guess[times > 1].mean().item()


for seed in range(3):
    linear, best_guess = train_on_notes("linear attention", 12, 100, seed)
    delta, _ = train_on_notes("DeltaNet", 12, 100, seed)
    assert abs(linear - best_guess) < 0.05 and linear < 0.6 and delta > 0.97
print("keys with several notes, three seeds: DeltaNet over 97 % right, linear attention under 60 %")

# %% [markdown]
# That is not bad luck in training. The state of linear attention is a *sum*: the same notes in
# another order give the same state. So it can at best know which values a key has had, and guess
# the most frequent one, and the measured accuracy is that of this guess. No choice of keys and
# values helps. Decay is enough to tell the order, and correction does it cleanly:

# %%
notes_k, notes_v = unit(1, 9, 6, seed=25), random(1, 9, 4, seed=26)
forwards, backwards = (
    {name: store(name, k, v, **gates_for(k)) for name in RULES}
    for k, v in ((notes_k, notes_v), (notes_k.flip(1), notes_v.flip(1)))
)
either_way = [x["linear attention"] for x in (backwards, forwards)]
check("linear attention: notes backwards, the same state", *either_way)
for name in list(RULES)[1:]:
    _ = must_differ(f"{name}: notes backwards", backwards[name], forwards[name])

# %%
record = json.loads(Path("../figures/records/02_learned.json").read_text())
fig, ax = plotting.figure(size=(9, 4.8))
for (name, accuracy), color, marker in zip(
    record["accuracy"].items(), plotting.COLORS, "osD^v", strict=False
):
    ax.plot(record["keys"], accuracy, color=color, marker=marker, label=name)
ax.plot(record["keys"], record["best guess"], color=plotting.INK, linestyle=":", linewidth=2)
ax.annotate(
    "best guess without the order",
    (record["keys"][-1], record["best guess"][-1] + 0.03),
    ha="right",
)
ax.axvline(16, color=plotting.QUIET, linewidth=1, zorder=0)
ax.annotate("n = 16", (16.3, 0.03), color=plotting.QUIET, fontsize=12)
ax.set(xlabel="number of keys, two notes each on average", ylim=(0, 1.04), xlim=(3, 41))
ax.set_ylabel("accuracy, rewritten keys")
fig.legend(*ax.get_legend_handles_labels(), loc="outside right center", fontsize=12)
plotting.save(
    fig,
    "02_learned",
    "Accuracy on rewritten keys after training, against the number of keys, for five rules with a "
    "state of width 16. Up to 16 keys the three rules that correct are at 1, Mamba-2 somewhat "
    "below, linear attention on the dotted line of the best guess, near a half. With more keys "
    "than 16 all fall.",
)

# %% [markdown]
# (From a record: `python book/records.py 02_learned`, 300 steps, the median of three seeds.) The
# three rules that correct lie on one line. Up to $n = 16$ keys they make no mistake, for 16 keys
# can be learned at right angles; beyond, they lose slowly. Mamba-2 tells the order by fading, and
# pays for it: to silence an old value quickly it has to fade all others as well.
#
# ## 9 · Stability
#
# What does one update do to what the state already holds? It multiplies it by $I - \beta k k^\top$.
# Vectors at a right angle to $k$ pass through unchanged: eigenvalue 1, $n - 1$ times. And $k$
# itself:
#
# $$(I - \beta\,k k^\top)\,k = k - \beta\,k\,(k^\top k) = (1 - \beta \|k\|^2)\,k. \tag{2.16}$$
#
# So the one eigenvalue that matters is $1 - \beta\|k\|^2$, and with Longhorn's ε it is
# $1 - \epsilon\|k\|^2 = 1/(1 + \beta\|k\|^2)$:

# %%
n = 16
key, beta = random(n, seed=27), 0.3
identity, square = torch.eye(n), key @ key
eigenvalues = torch.linalg.eigvalsh(identity - beta * torch.outer(key, key))
expected = torch.cat([(1 - beta * square)[None], torch.ones(n - 1)])
check("eigenvalues: 1 - β‖k‖², and n - 1 ones", eigenvalues, expected)
eps = beta / (1 + beta * square)
check("Longhorn: 1 - ε‖k‖² = 1 / (1 + β‖k‖²)", 1 - eps * square, 1 / (1 + beta * square))

# %% [markdown]
# | $\beta \lVert k \rVert^2$ | the delta rule, along $k$ |
# |---|---|
# | 0 | leaves everything |
# | between 0 and 1 | moves towards the new value |
# | 1 | replaces |
# | between 1 and 2 | overshoots, but shrinks |
# | 2 | reflects: keeps the length, turns the sign |
# | above 2 | grows |
#
# With keys of length 1 and β between 0 and 1, or up to 2, no update makes the old state larger.
# With raw keys nothing is sure. A key of $n$ standard normal numbers has $\|k\|^2$ near $n$; for $n
# = 16$ and $\beta = 1$ the factor is about $-15$, for every token, along that token's key.
# Longhorn's factor lies between 0 and 1 for *any* key and any β.


# %%
def sizes(name, k, v):
    """‖S_t‖ after every token."""
    gates = {gate: x[0] for gate, x in gates_for(k[None]).items()}
    return states(name, k, v, **gates).flatten(1).norm(dim=1)


steps = 200
raw, v = random(steps, n, seed=28), random(steps, n, seed=29)
growth = {
    "DeltaNet, raw keys": sizes("DeltaNet", raw, v),
    "Gated DeltaNet, raw keys": sizes("Gated DeltaNet", raw, v),
    "linear attention, raw keys": sizes("linear attention", raw, v),
    "Longhorn, raw keys": sizes("Longhorn", raw, v),
    "DeltaNet, unit keys": sizes("DeltaNet", F.normalize(raw, dim=-1), v),
}
for name in ("DeltaNet, raw keys", "Gated DeltaNet, raw keys"):
    assert growth[name][-1] > 1e60 and growth[name][99] > torch.finfo(torch.float32).max
for name in ("Longhorn, raw keys", "DeltaNet, unit keys"):
    assert growth[name].max() < 50
assert growth["linear attention, raw keys"].max() < 1e3
print("after 200 tokens: DeltaNet with raw keys over 1e60; with unit keys, and Longhorn, under 50")

# %% [markdown]
# And not only on this stream: a matrix whose eigenvalues lie between $-1$ and 1, symmetric as this
# one is, makes no vector longer, and neither does a product of any number of them:

# %%
k = unit(300, n, seed=30)
betas = 2 * torch.rand(300, generator=torch.Generator().manual_seed(31))
product = too_far = torch.eye(n)
for t in range(300):
    product = product @ (identity - betas[t] * torch.outer(k[t], k[t]))
    too_far = too_far @ (identity - 3 * torch.outer(k[t], k[t]))
assert torch.linalg.matrix_norm(product, 2) <= 1 + 1e-12
assert torch.linalg.matrix_norm(too_far, 2) > 1e6
print("300 updates with unit keys: β in (0, 2), nothing has grown; β = 3, a million times and more")

# %%
fig, axes = plotting.figure(1, 2, size=(12, 5.2))
x = torch.linspace(0, 3, 100)
axes[0].axhspan(-1, 1, color=plotting.QUIET, alpha=0.15, linewidth=0)
axes[0].plot(x, 1 - x, color=plotting.COLORS[3], label="delta rule, 1 - x")
axes[0].plot(x, 1 / (1 + x), color=plotting.COLORS[2], label="Longhorn, 1 / (1 + x)")
axes[0].plot([1, 2], [0, -1], "o", color=plotting.COLORS[3])
axes[0].annotate("replaces", (1.05, 0.06), fontsize=12)
axes[0].annotate("reflects", (2.05, -0.94), fontsize=12)
axes[0].annotate("does not grow", (0.06, -0.92), fontsize=12, color=plotting.INK)
axes[0].set(title="factor on what the state holds under k", xlabel=r"x = $\beta\|k\|^2$")
axes[0].set_ylim(-2.1, 1.9)
axes[0].legend(loc="upper right")
colors = [plotting.COLORS[i] for i in (3, 4, 0, 2, 3)]
for (name, size), color in zip(growth.items(), colors, strict=True):
    style = "--" if "unit" in name else "-"
    axes[1].semilogy(range(1, steps + 1), size, style, color=color, label=name)
axes[1].set(title=r"size of the state, $\|S_t\|$", xlabel="tokens", ylim=(1e-2, 1e95))
axes[1].legend(loc="lower right", bbox_to_anchor=(1.02, 0.07), fontsize=12)
plotting.save(
    fig,
    "02_stability",
    "Left: the factor along the key against β times the squared length of the key. The line of the "
    "delta rule falls through 0 at 1 and leaves the grey band from -1 to 1 at 2; the curve of "
    "Longhorn stays between 0 and 1. Right: the size of the state over 200 tokens, logarithmic. "
    "With raw keys DeltaNet and Gated DeltaNet climb to about 1e90; the other three stay flat.",
)

# %% [markdown]
# Decay does not help here: $0.97$ against a factor of $-15$ is nothing. Float32, whose largest
# number is near $3 \cdot 10^{38}$, would not have lasted 100 tokens.
#
# ## 10 · All tokens of a chunk at once
#
# As loops, all five rules are slow: $l$ steps that wait for one another. Linear attention has its
# quadratic form; but the delta rule's write depends on the state, which depends on all earlier
# writes. Can it be had without a loop? Yes: the dependence is *linear*, and so it is a system of
# equations (Yang et al., 2024). Four steps, each checked; one head, a chunk of $l$ tokens, 1 to
# $l$, that starts from a state $S_0$.
#
# **Step 1: name what is written.** Let $w_t = \beta_t\,(v_t - S_{t-1} k_t)$ be the corrected value.
# Then (2.9) is linear attention with $w$ for $v$:
#
# $$S_t = S_{t-1} + w_t k_t^\top = S_0 + \sum_{s \le t} w_s k_s^\top. \tag{2.17}$$

# %%
l, n, p = 7, 5, 4
q, k, v = random(l, n, seed=32), unit(l, n, seed=33), random(l, p, seed=34)
beta = torch.rand(l, generator=torch.Generator().manual_seed(35)) + 0.3
S_0 = random(p, n, seed=36)
options = dict(initial_state=S_0[None, None], return_final_state=True)
o, S_l = (t.squeeze() for t in delta_rule(*heads(q, k, v, beta), **options))

S, W = S_0, []
for t in range(l):
    W.append(beta[t] * (v[t] - S @ k[t]))
    S = S + torch.outer(W[t], k[t])
W = torch.stack(W)
check("delta rule = linear attention of the w", S_0 + W.T @ k, S_l)

# %% [markdown]
# **Step 2: put 2.17 into the definition of $w$.** The state before token $t$ is $S_0$ and the
# *earlier* writes:
#
# $$w_t = \beta_t \Big( v_t - S_0 k_t - \sum_{s < t} w_s\,(k_s \cdot k_t) \Big). \tag{2.18}$$
#
# Bring the sum to the left. With the $w_t$ as rows of $W$, and $A_{ts} = \beta_t\,(k_t \cdot k_s)$
# for $s < t$, else 0 (a *strict* lower triangle: no token corrects itself by itself),
#
# $$(I + A)\,W = \mathrm{diag}(\beta)\,(V - K S_0^\top). \tag{2.19}$$
#
# The matrix on the left is triangular with ones on the diagonal. Such a system is solved from top
# to bottom, and always has exactly one solution.

# %%
A = (beta[:, None] * (k @ k.T)).tril(-1)
right_side = beta[:, None] * (v - k @ S_0.T)
solved = torch.linalg.solve_triangular(torch.eye(l) + A, right_side, upper=False)
check("W from the triangular system = W from the loop", solved, W)

not_strict = torch.eye(l) + (beta[:, None] * (k @ k.T)).tril()
wrong = torch.linalg.solve_triangular(not_strict, right_side, upper=False)
_ = must_differ("diagonal included: a token corrects itself", wrong, W)
whole = torch.linalg.solve(torch.eye(l) + beta[:, None] * (k @ k.T), right_side)
_ = must_differ("no triangle: later tokens correct earlier ones", whole, W)

# %% [markdown]
# **Step 3: read.** As in linear attention, in its quadratic form: what came with the chunk, and the
# writes of the chunk up to one's own. Here the diagonal *is* included:
#
# $$O = Q S_0^\top + (Q K^\top \circ M)\,W. \tag{2.20}$$

# %%
check("outputs of the chunk = loop", q @ S_0.T + (q @ k.T).tril() @ solved, o)
strict = q @ S_0.T + (q @ k.T).tril(-1) @ solved
_ = must_differ("reading without the token's own write", strict, o)

# %% [markdown]
# **Step 4: the product of all the factors.** Write $T = (I + A)^{-1}\,\mathrm{diag}(\beta)$, so
# that $W = T\,(V - K S_0^\top)$. Put it into (2.17), and collect what multiplies $S_0$:
#
# $$S_l = S_0\,(I - K^\top T^\top K) + V^\top T^\top K. \tag{2.21}$$
#
# The loop multiplies $S_0$ by one factor per token. So the two must be the same matrix:
#
# $$(I - \beta_1 k_1 k_1^\top)(I - \beta_2 k_2 k_2^\top) \cdots (I - \beta_l k_l k_l^\top)
#   = I - K^\top T^\top K. \tag{2.22}$$
#
# $l$ products of $n \times n$ matrices have become one small triangular inverse. This is the *WY
# form* of numerical mathematics, where it serves for products of reflections. For two tokens it can
# be done on paper: multiply out, and the mixed term $\beta_1 \beta_2\,(k_1 \cdot k_2)\,k_1
# k_2^\top$ appears; it is the entry of $T$ below the diagonal, with its sign turned.

# %%
identity = torch.eye(n)
T = torch.linalg.solve_triangular(torch.eye(l) + A, beta.diag(), upper=False)
product = identity
for t in range(l):
    product = product @ (identity - beta[t] * torch.outer(k[t], k[t]))
check("product of all factors = I - Kᵀ Tᵀ K", product, identity - k.T @ T.T @ k)
_ = must_differ("T for Tᵀ: the factors in reverse order", identity - k.T @ T @ k, product)
check("S after the chunk", S_0 @ (identity - k.T @ T.T @ k) + v.T @ T.T @ k, S_l)

two = (identity - beta[0] * torch.outer(k[0], k[0])) @ (
    identity - beta[1] * torch.outer(k[1], k[1])
)
mixed = beta[0] * beta[1] * (k[0] @ k[1]) * torch.outer(k[0], k[1])
on_paper = identity - beta[0] * torch.outer(k[0], k[0]) - beta[1] * torch.outer(k[1], k[1]) + mixed
check("two factors on paper", two, on_paper)
check("the mixed term is in T", T[1, 0], -beta[0] * beta[1] * (k[0] @ k[1]))

# %% [markdown]
# With a decay there is one more factor: what $s$ wrote has faded by $D_{ts} = \alpha_{s+1} \cdots
# \alpha_t$ when $t$ reads it, and $S_0$ by all decays since the start. $A$, the scores and the
# carried state get these factors, and nothing else changes:

# %%
g = -random(l, seed=37).abs() / 4
D = g[:, None].expand(-1, l).tril(-1).cumsum(0).exp().tril()
start = g.cumsum(0).exp()[:, None]
o, S_l = (t.squeeze() for t in gated_delta_rule(*heads(q, k, v, g, beta), **options))

right_side = beta[:, None] * (v - start * (k @ S_0.T))


def written(A):
    """The W that solves (I + A) W = right_side."""
    return torch.linalg.solve_triangular(torch.eye(l) + A, right_side, upper=False)


A = (beta[:, None] * (k @ k.T) * D).tril(-1)
check("gated, outputs", start * (q @ S_0.T) + (q @ k.T * D) @ written(A), o)
check("gated, state", start[-1] * S_0 + (D[-1][:, None] * written(A)).T @ k, S_l)
no_decay = written((beta[:, None] * (k @ k.T)).tril(-1))
_ = must_differ("decay forgotten in A", start * (q @ S_0.T) + (q @ k.T * D) @ no_decay, o)

# %% [markdown]
# A text is cut into chunks, the four steps run in each, and only $S$ goes from one to the next. The
# package does just that when a rule is given a `chunk_size`. In chunks of 64, a text of 4,096
# tokens takes 64 steps that wait for one another, and not 4,096. Any chunk size, the same result:

# %%
b, l, h, n, p = 2, 45, 3, 6, 5
tensors = dict(
    q=random(b, l, h, n, seed=38),
    k=unit(b, l, h, n, seed=39) * (0.6 + random(b, l, h, 1, seed=40).abs().clamp(max=0.6)),
    v=random(b, l, h, p, seed=41),
    g=-random(b, l, h, seed=42).abs() / 4,
    beta=0.2 + torch.rand(b, l, h, generator=torch.Generator().manual_seed(43)),
)
initial = random(b, h, p, n, seed=44)


def arguments(rule):
    return [tensors[name] for name in ("q", "k", "v", *rule.takes)]


def with_state(function, **options):
    """A form as a function of its tensors and the initial state, with both results."""
    return lambda *given: function(
        *given[:-1], initial_state=given[-1], return_final_state=True, **options
    )


for name, rule in RULES.items():
    given = [*arguments(rule), initial]
    o, S = with_state(rule.function)(*given)
    forms = [with_state(rule.function, chunk_size=size)(*given) for size in (1, 7, 45, 64)]
    outputs, finals = (torch.stack(parts) for parts in zip(*forms, strict=True))
    check(f"{name}: chunks of 1, 7, 45, 64 = loop, outputs", outputs, o.expand_as(outputs))
    check(f"{name}: chunks of 1, 7, 45, 64 = loop, states", finals, S.expand_as(finals))

# %% [markdown]
# ### Five attention matrices
#
# (2.20) with $S_0 = 0$ reads $O = (QK^\top \circ M)\,T\,V$. So the delta rule has an attention
# matrix too, and it is not $QK^\top$. For any rule one can see it by handing in the identity for
# the values. Below, 8 keys are written three times in a row, and every token asks for the key that
# was written 4 tokens ago, $q_t = k_{t-4}$. First, with $q_t = k_t$, what is left of a key's
# earlier value in the moment in which the key comes again:

# %%
l = 24
keys = unit(8, 12, seed=45)
k, q = keys.repeat(3, 1), keys.repeat(4, 1)[4 : 4 + l]
v = random(l, 6, seed=46)
gates = {gate: x[0] for gate, x in gates_for(k[None]).items()}
own, matrices = {}, {}
for name, rule in RULES.items():
    given = [gates[gate] for gate in rule.takes]
    own[name] = rule.function(*heads(k, k, torch.eye(l), *given), chunk_size=64)[0, :, 0]
    matrices[name] = rule.function(*heads(q, k, torch.eye(l), *given), chunk_size=64)[0, :, 0]
    o = rule.function(*heads(q, k, v, *given))[0, :, 0]
    check(f"{name}: output = its matrix times V", matrices[name] @ v, o)

A = (k @ k.T).tril(-1)  # β = 1
T = torch.linalg.inv(torch.eye(l) + A)
check("DeltaNet: its matrix = (QKᵀ ∘ M) T", matrices["DeltaNet"], (q @ k.T).tril() @ T)

earlier = {name: matrix.diagonal(-8) for name, matrix in own.items()}
check("linear attention: all of it", earlier["linear attention"], torch.ones(16))
check("Mamba-2: α to the 8th", earlier["Mamba-2"], torch.full((16,), ALPHA**8))
for name in ("DeltaNet", "Gated DeltaNet"):
    check(f"{name}: nothing", earlier[name], torch.zeros(16))
for name, matrix in matrices.items():
    valid, old = matrix.diagonal(-4)[8:], matrix.diagonal(-12)
    assert (old.abs().mean() < 0.25 * valid.mean()) == ("DeltaNet" in name)
print("asked 4 tokens later: only in the delta rules the valid value outweighs the old one 4 : 1")

# %%
fig, axes = plotting.figure(1, 5, size=(12, 3.0))
for (name, matrix), ax in zip(matrices.items(), axes, strict=True):
    plotting.heatmap(ax, matrix, limit=1.0, colorbar=False)
    ax.set_title(name, fontsize=13)
    ax.set_xticks([0, 8, 16])
    ax.set_yticks([0, 8, 16])
    ax.set_xlabel("source s")
axes[0].set_ylabel("target t")
plotting.save(
    fig,
    "02_matrices",
    "Five lower triangular matrices of 24 by 24. In all of them a line four places below the "
    "diagonal stands out: the valid value. Linear attention and Mamba-2 have further lines twelve "
    "and twenty places below, for the key's older values. In Longhorn they are pale, in the delta "
    "rules nearly gone, and so is the noise between the lines.",
)

# %% [markdown]
# The line four places below the diagonal is the valid value. The lines twelve and twenty places
# below are what the same key held before: in linear attention as strong as the valid one, in the
# delta rules nearly gone. And the noise off the lines is fainter, too: writing the *difference*
# takes away what the other keys would answer.
#
# ## 11 · The lecture's table
#
# Now the whole slide, line by line. On one side what is printed, as a function of one state and one
# token; on the other side the package. Each row's loop is checked against the printed row, and its
# chunked form against the loop (outputs and states in §10, here the gradients).

# %%
lecture = {
    "linear attention": ("S + v kᵀ", lambda S, k, v, I: S + torch.outer(v, k)),
    "Mamba-2": ("α S + v kᵀ", lambda S, k, v, I, α: α * S + torch.outer(v, k)),
    "Longhorn": (
        "S (I - ε k kᵀ) + ε v kᵀ,  ε = β / (1 + β kᵀk)",
        lambda S, k, v, I, β: (
            S @ (I - β / (1 + β * k @ k) * torch.outer(k, k))
            + β / (1 + β * k @ k) * torch.outer(v, k)
        ),
    ),
    "DeltaNet": (
        "S (I - β k kᵀ) + β v kᵀ",
        lambda S, k, v, I, β: S @ (I - β * torch.outer(k, k)) + β * torch.outer(v, k),
    ),
    "Gated DeltaNet": (
        "S (α (I - β k kᵀ)) + β v kᵀ",
        lambda S, k, v, I, α, β: S @ (α * (I - β * torch.outer(k, k))) + β * torch.outer(v, k),
    ),
}


def by_lecture(name, q, k, v, *gates):
    """A printed row, token by token, for one head; g arrives as log α."""
    step, S, I, outputs = lecture[name][1], torch.zeros(v.shape[1], k.shape[1]), torch.eye(6), []
    named = zip(RULES[name].takes, gates, strict=True)
    gates = [x.exp() if gate == "g" else x for gate, x in named]
    for t in range(len(q)):
        S = step(S, k[t], v[t], I, *(gate[t] for gate in gates))
        outputs.append(S @ q[t])
    return torch.stack(outputs)


table = [f"{'method':16}  {'takes':7}  update of S                                    checked"]
for name, rule in RULES.items():
    given = arguments(rule)
    for head in range(2):
        one = [t[0, :, head] for t in given]
        check(f"{name}: package = printed row, head {head}", rule.function(*given)[0, :, head],
              by_lecture(name, *one))  # fmt: skip
    check_gradients(f"{name}: chunked = loop", with_state(rule.function, chunk_size=7),
                    with_state(rule.function), [*given, initial])  # fmt: skip
    takes = ", ".join({"g": "α", "beta": "β"}[gate] for gate in rule.takes) or "-"
    table.append(f"{name:16}  {takes:7}  {lecture[name][0]:45}  loop, chunks, gradients")
print("\n".join(table))

# %% [markdown]
# All five rows hold as printed, with $S$ of shape $d_v \times d_k$ and $k k^\top$ on its right.
# What the slide leaves out is in §14.
#
# ## 12 · Hybrids: a few layers that forget nothing
#
# §3 said what a state cannot do: recall without error, for more pairs than it has room for.
# Attention can. So public models mix the two, and the question is how much attention is enough.
#
# > "standard attention layers are **interspersed** with linear attention layers" — L22, "Hybrid
# > Models"
#
# Chapter 07 builds models from *pattern strings*, one letter per layer: S for state space duality,
# A for attention, M for an MLP, G for a gated MLP, R for a mixture of experts (chapter 06), H for
# one with a shared expert. The lecture's three examples in these letters:
#
# - **Jamba** (2024): blocks of eight layers, seven of Mamba and one of attention, the fifth; each
#   is followed by an MLP, in every second layer a mixture of 16 experts.
# - **Nemotron-H** (2025), here its 8B model: 52 layers of one kind each, 24 of Mamba-2, 24 MLPs,
#   and 4 of attention, spread evenly.
# - **Qwen3-Next** (2025): three layers of Gated DeltaNet to one of gated attention, twelve times,
#   each followed by a mixture of experts with a shared one. The package has no letter for Gated
#   DeltaNet, so S stands for it here, and A for gated attention: the string shows the order, and
#   would build a different model.
#
# (The layouts are those of the published configurations; Jamba's Mamba layers are of the first
# kind, chapter 01's.)

# %%
patterns = {
    "Jamba": "(SG SR SG SR AG SR SG SR) × 4",
    "Nemotron-H-8B": "SMSMSMSAM SMSMSMSMSAM SMSMSMSMSAM SMSMSMSMSAM SMSMSMSMSM",
    "Qwen3-Next": "(SH × 3 + AH) × 12",
}
layers = {name: expand_pattern(pattern) for name, pattern in patterns.items()}
for name, letters in layers.items():
    state, attention = letters.count("S"), letters.count("A")
    print(f"{name:14} {patterns[name]}")
    print(f"{'':14} {state} with a state, {attention} with attention: {state / attention:g} to 1")

assert layers["Jamba"] == preset("jamba-52b").pattern
mixers, feed_forward = layers["Jamba"][::2], layers["Jamba"][1::2]
assert [i for i, letter in enumerate(mixers) if letter == "A"] == [4, 12, 20, 28]
assert set(feed_forward[::2]) == {"G"} and set(feed_forward[1::2]) == {"R"}
counts = {letter: layers["Nemotron-H-8B"].count(letter) for letter in "SMA"}
assert counts == {"S": 24, "M": 24, "A": 4} and len(layers["Nemotron-H-8B"]) == 52
assert layers["Qwen3-Next"][::2] == "SSSA" * 12

# %% [markdown]
# From 7 : 1 over 6 : 1 to 3 : 1 (Nemotron-H counts MLPs as layers of their own, so that attention
# is about one layer in thirteen). What does it save? Only layers with attention keep a cache that
# grows, two vectors per token and key head. L22 prints the table of the Jamba paper, for 256K
# tokens at 16 bits; the sizes below are those of the published configurations:

# %%
width, tokens, two_bytes = 128, 256 * 1024, 2
caches = {  # layers with attention, key heads, gigabytes as printed, our name
    "Llama-2 7B": (32, 32, 128, "llama-2-7b"),
    "Mistral 7B": (32, 8, 32, "mistral-7b"),
    "Mixtral 8x7B": (32, 8, 32, "mixtral-8x7b"),
    "Jamba": (mixers.count("A"), 8, 4, "jamba-52b"),
}
for name, (attention, key_heads, printed, ours) in caches.items():
    size = 2 * attention * key_heads * width * tokens * two_bytes
    assert size == printed * 2**30 == cache_bytes(preset(ours), tokens).keys_values
    print(f"{name:13} {attention:2} layers × {key_heads:2} key heads: {printed:3} GB, as printed")

# %% [markdown]
# The four numbers are exact, with a gigabyte of $2^{30}$ bytes. (Two things to know: Jamba's states
# come on top, some megabytes for its 28 Mamba layers; and Mistral's first version reads only the
# last 4,096 tokens, which would take a 64th.)
#
# ## 13 · The bridge to state space duality
#
# Chapter 03 is about one of the five rows. A state space model has other letters: an input $x_t$, a
# step size $\Delta_t$ (in code `dt`), a rate $A \le 0$, and $B_t$, $C_t$ for writing and reading:
#
# $$h_t = e^{\Delta_t A}\,h_{t-1} + \Delta_t x_t B_t^\top, \qquad y_t = h_t\,C_t. \tag{2.23}$$
#
# Hold (2.6) beside it. $B$ is the key, $C$ the query, $\Delta x$ the value, $e^{\Delta A}$ the
# decay:

# %%
b, l, h, p, n = 2, 30, 3, 5, 4
x, B, C = random(b, l, h, p, seed=48), random(b, l, h, n, seed=49), random(b, l, h, n, seed=50)
dt, A = 0.5 * random(b, l, h, seed=51).abs(), -torch.tensor([0.2, 1.0, 5.0])
y, h_final = ssd_recurrent(x, dt, A, B, C, return_final_state=True)

v, g = dt[..., None] * x, dt * A
o, S = gated_linear_attention(C, B, v, g, return_final_state=True)
check("q = C, k = B, v = dt x, g = dt A: output = SSD", o, y)
check("and the state is SSD's state", S, h_final)
_ = must_differ("queries and keys exchanged", gated_linear_attention(B, C, v, g), y)

# %% [markdown]
# So the Mamba-2 row *is* state space duality, seen from attention's side. Chapter 03 goes on from
# here: the decays become a matrix of their own, and the chunked form meets the kernels that large
# models are trained with.
#
# ## 14 · As printed
#
# L22's five rows are right. Read as a recipe, the slide is short of two things; and one formula of
# an earlier slide does not run.
#
# ### DeltaNet needs keys of length 1
#
# The row does not say so, and nothing in its derivation does. With raw keys it is the same equation
# and a useless model:

# %%
for seed in range(3):
    k, v = random(200, 16, seed=60 + seed), random(200, 16, seed=70 + seed)
    raw, scaled, implicit = (
        sizes(name, key, v)[-1]
        for name, key in (
            ("DeltaNet", k), ("DeltaNet", F.normalize(k, dim=-1)), ("Longhorn", k)
        )
    )  # fmt: skip
    assert raw > 1e60 and scaled < 50 and implicit < 50
print("‖S‖ after 200 tokens, n = 16, β = 1, three seeds")
print("raw keys: over 1e60;  keys of length 1: under 50;  Longhorn with the raw keys: under 50")

# %% [markdown]
# What holds: $\beta\|k\|^2 \le 2$, which models ensure by dividing each key by its length.
# Longhorn's row needs nothing: the lecture's $\epsilon$ contains $k^\top k$, and that is what it is
# there for.
#
# ### The row "Mamba2" does not say what v is
#
# Put the input $x$ itself into the row, with $\alpha_t = e^{\Delta_t A}$, and the result is not
# Mamba-2: the write has lost its step size. And there are two ways to have one. Mamba-2 takes
# $\Delta\,x$ (Euler's way). OTCE's text discretises exactly, by a *zero-order hold* (chapter 01),
# which gives $\frac{e^{\Delta A} - 1}{A}\,x$. All three satisfy the row, for it speaks of $S$,
# $\alpha$ and $v$ only; they are three different models.

# %%
euler = gated_linear_attention(C, B, dt[..., None] * x, g)
hold = gated_linear_attention(C, B, (torch.expm1(g) / A)[..., None] * x, g)
check("v = Δ x is Mamba-2", euler, y)
_ = must_differ("v = x", gated_linear_attention(C, B, x, g), y, at_least=0.5)
_ = must_differ("v by zero-order hold", hold, y, at_least=0.1)

for step, rate, ratio in ((0.1, -1.0, 1.05), (0.69, -1.0, 1.38), (0.69, -16.0, 11.0)):
    _, B_bar = discretize_zoh(torch.tensor([[rate]]), torch.ones(1), step)
    check(f"hold, Δ = {step}, A = {rate:g}", B_bar, torch.tensor([math.expm1(step * rate) / rate]))
    assert abs(step / B_bar.item() - ratio) < ratio / 100
print("Euler writes 1.05, 1.38 and 11.0 times as much as the hold in these three cases")

# %% [markdown]
# For small steps the two agree; for heads that forget fast they do not. A model that is trained
# with one must be run with the same one.
#
# ### $y_t = C^\top h_t$ does not fit (slide "Selective State Space Models")
#
# The earlier slides have $C \in \mathbb{R}^{1 \times N}$, a row, and $y = C h$. With that shape the
# transpose is one too many:

# %%
C_row, state = random(1, 5, seed=52), random(5, 1, seed=53)
try:
    C_row.T @ state
except RuntimeError as error:
    print(f"Cᵀ h with C of shape {tuple(C_row.shape)}: {type(error).__name__}")
else:
    raise AssertionError("the shapes fit")
C_column = C_row.T
check("a row: y = C h; a column: y = Cᵀ h", C_column.T @ state, C_row @ state)

# %% [markdown]
# Both are in use, and Mamba-2's paper has columns. It is the same quarrel as $S q$ against $q^\top
# S$: here, as on the slide "Linear Attention", $S$ has the values' axis first and is read from the
# right; flash-linear-attention keeps its transpose.
#
# ### And what is right
#
# The two forms of linear attention; all five updates, with $k k^\top$ on the right of $S$ and
# $\alpha$ not in front of the write; ε as the exact solution of Longhorn's objective; the four
# sizes of caches. Each of these was run above.
#
# ## Summary
#
# - Without the softmax the brackets move, and attention is a matrix that every token updates:
#   quadratic form = recurrence.
# - The matrix stores pairs. Keys at right angles do not disturb each other; $l$ random ones do,
#   with a mean square of $(l-1)/n$.
# - Decay makes that noise finite and the memory short. The delta rule writes the error, and so
#   replaces what a key held; Longhorn takes the same step implicitly; a gate adds decay.
# - The signal of a pair falls as $(\alpha\,(1 - \epsilon/n))^{\text{age}}$: by time, or by traffic.
#   Only linear attention's stays, and drowns.
# - The state of linear attention does not know the order of its writes: no training changes that.
# - Stable where $\beta\|k\|^2 \le 2$; Longhorn always.
# - The writes of a chunk solve one triangular system, and the delta rule trains in chunks.
#
# | as printed | what it does when run | what holds |
# |---|---|---|
# | DeltaNet's row, any keys | grows beyond 1e60 in 200 tokens | keys of length 1, β up to 2 |
# | Mamba2's row with $v = x$ | another model | $v = \Delta x$, $\alpha = e^{\Delta A}$ |
# | zero-order hold for Euler | in a case above, an 11th is written | the one it was trained with |
# | $y = C^\top h$ with a row $C$ | shapes do not fit | $C h$, or a column $C$ |
#
# ## Exercises
#
# **1.** How many random pairs may linear attention store so that the crosstalk stays below `error`,
# relative to the value (root of the mean square)? And how wide must keys be for `l` pairs?


# %% tags=["exercise"]
def most_pairs(n, error):
    """The largest number of pairs, from equation 2.5."""
    ### BEGIN SOLUTION
    return math.floor(1 + n * error**2)
    ### END SOLUTION


def width_needed(l, error):
    """The smallest n, from equation 2.5."""
    ### BEGIN SOLUTION
    return math.ceil((l - 1) / error**2)
    ### END SOLUTION


# %% tags=["check"]
assert most_pairs(256, 0.5) == 65 and width_needed(65, 0.5) == 256
assert most_pairs(64, 0.125) == 2 and width_needed(1, 0.1) == 0
got = crosstalk(256, most_pairs(256, 0.5), draws=40, seed=80).square().mean().sqrt()
assert abs(got - 0.5) < 0.02

# %% [markdown]
# **2.** Katharopoulos et al. (2020) bend queries and keys by a positive function $\phi$ and keep
# the division: $o_t = \sum_s (\phi(q_t) \cdot \phi(k_s))\,v_s \,/\, \sum_s \phi(q_t) \cdot
# \phi(k_s)$. Compute it with *one* call of `linear_attention`. (What must be stored besides $v$ to
# get the denominator?)


# %% tags=["exercise"]
def normalised(q, k, v):
    """q, k (b, l, h, n), v (b, l, h, p) -> (b, l, h, p), with φ(x) = elu(x) + 1."""
    ### BEGIN SOLUTION
    one = torch.ones(*v.shape[:-1], 1)
    o = linear_attention(F.elu(q) + 1, F.elu(k) + 1, torch.cat([v, one], dim=-1))
    return o[..., :-1] / o[..., -1:]
    ### END SOLUTION


# %% tags=["check"]
q, k, v = (random(2, 9, 3, 4, seed=81 + i) for i in range(3))
fits = einsum("bthn,bshn->bhts", F.elu(q) + 1, F.elu(k) + 1).tril()
expected = einsum("bhts,bshp->bthp", fits / fits.sum(-1, keepdim=True), v)
check("normalised linear attention", normalised(q, k, v), expected)
check("equal values come back", normalised(q, k, torch.ones_like(v)), torch.ones_like(v))

# %% [markdown]
# **3.** A sixth rule. Give Longhorn a gate: $S_t$ minimises $\|S - \alpha_t S_{t-1}\|^2 + \beta_t
# \|S k_t - v_t\|^2$. Set the gradient to zero, solve, and write it with a function of the package.


# %% tags=["exercise"]
def gated_longhorn(q, k, v, g, beta, **options):
    """g = log α; options are initial_state and return_final_state."""
    ### BEGIN SOLUTION
    eps = beta / (1 + beta * k.square().sum(-1))
    return gated_delta_rule(q, k, v, g, eps, **options)
    ### END SOLUTION


# %% tags=["check"]
q, k, v = (random(1, 6, 1, size, seed=84 + i) for i, size in enumerate((4, 4, 3)))
g, beta = -random(1, 6, 1, seed=87).abs(), 5 * random(1, 6, 1, seed=88).abs()
S = random(1, 1, 3, 4, seed=89)
for t in range(6):
    token = [x[:, t : t + 1] for x in (q, k, v, g, beta)]
    _, new = gated_longhorn(*token, initial_state=S, return_final_state=True)

    def to_minimise(N, S=S, t=t):
        error = N @ k[0, t, 0] - v[0, t, 0]
        return (N - g[0, t, 0].exp() * S).square().sum() + beta[0, t, 0] * error.square().sum()

    slope = torch.func.grad(to_minimise)(new)
    check(f"token {t}: the gradient vanishes", slope, torch.zeros_like(slope))
    S = new

# %% [markdown]
# **4.** Keys of $n$ independent standard normal numbers, a constant β, no values. Above which β
# does the *mean square* of $\|S\|$ grow? (Multiply out $(I - \beta kk^\top)^2$, and use that
# $\|k\|^2\,k k^\top$ is $(n + 2)\,I$ on average.)


# %% tags=["exercise"]
def growth_per_token(n, beta):
    """The factor on the mean of ‖S‖² per token."""
    ### BEGIN SOLUTION
    return 1 - 2 * beta + beta**2 * (n + 2)
    ### END SOLUTION


def largest_beta(n):
    """Above it the mean of ‖S‖² grows."""
    ### BEGIN SOLUTION
    return 2 / (n + 2)
    ### END SOLUTION


# %% tags=["check"]
n, S = 8, random(3, 8, seed=90)
k = random(100_000, n, seed=91)
for share in (0.5, 0.9, 1.1, 1.5):
    beta = share * largest_beta(n)
    after = S - beta * (k @ S.T)[:, :, None] * k[:, None]  # S (I - β k kᵀ) for every key
    factor = (after.square().sum((1, 2)).mean() / S.square().sum()).item()
    assert abs(factor - growth_per_token(n, beta)) < 0.02
    assert (growth_per_token(n, beta) > 1) == (share > 1)

# %% [markdown]
# **5.** Equations 2.19 to 2.21 are one chunk. Write the delta rule for a text of any length, one
# head, in chunks of `size` tokens, without a loop over tokens.


# %% tags=["exercise"]
def delta_in_chunks(q, k, v, beta, size):
    """q, k (l, n), v (l, p), beta (l,); the outputs (l, p), starting from an empty state."""
    ### BEGIN SOLUTION
    S, outputs = torch.zeros(v.shape[1], k.shape[1]), []
    parts = (t.split(size) for t in (q, k, v, beta[:, None]))
    for q_c, k_c, v_c, beta_c in zip(*parts, strict=True):
        A = (beta_c * (k_c @ k_c.T)).tril(-1)
        W = torch.linalg.solve_triangular(
            torch.eye(len(k_c)) + A, beta_c * (v_c - k_c @ S.T), upper=False
        )
        outputs.append(q_c @ S.T + (q_c @ k_c.T).tril() @ W)
        S = S + W.T @ k_c
    return torch.cat(outputs)
    ### END SOLUTION


# %% tags=["check"]
q, k, v = random(23, 6, seed=92), unit(23, 6, seed=93), random(23, 4, seed=94)
beta = torch.rand(23, generator=torch.Generator().manual_seed(95))
expected = delta_rule(*heads(q, k, v, beta))[0, :, 0]
for size in (1, 5, 8, 23, 64):
    check(f"your chunks of {size} = loop", delta_in_chunks(q, k, v, beta, size), expected)
in_chunks = delta_rule(*heads(q, k, v, beta), chunk_size=8)[0, :, 0]
check("the package's chunks = loop", in_chunks, expected)

# %% [markdown]
# ## Further reading
#
# - Gormley and Nayebi, CMU 10-423/623/723, lecture 22 (2025): the slides this chapter follows.
# - Katharopoulos et al., *Transformers are RNNs* (2020): linear attention.
# - Schlag, Irie and Schmidhuber, *Linear Transformers Are Secretly Fast Weight Programmers* (2021):
#   the state as a memory of pairs, its capacity, and the delta rule.
# - Dao and Gu, *Transformers are SSMs* (2024): Mamba-2, chapter 03.
# - Liu et al., *Longhorn: State Space Models are Amortized Online Learners* (2024).
# - Yang et al., *Parallelizing Linear Transformers with the Delta Rule over Sequence Length*
#   (2024): the chunkwise form.
# - Yang, Kautz and Hatamizadeh, *Gated Delta Networks* (2024).
# - Grazzi et al., *Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues* (2024):
#   what β between 1 and 2 is good for.
# - Lieber et al., *Jamba* (2024); NVIDIA, *Nemotron-H* (2025): hybrids.
# - `cheems_ref/linear_attention.py`: the listing this notebook arrives at.
