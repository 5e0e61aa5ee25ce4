# %% [markdown]
# # 02 · Linear attention and its update rules
#
# **Take the softmax out of attention, and what's left is a small matrix that every token updates.
# This chapter is about how to update that matrix: five rules, and what each of them remembers.** By
# the end you will be able to
#
# - turn attention into a recurrence by moving two brackets;
# - say how many key–value pairs a state can hold, and how they interfere with each other;
# - derive the delta rule as a gradient step, and say when that step is too large;
# - run the delta rule in chunks, by solving a triangular system.
#
# You need vectors, matrices, gradients, and a little PyTorch.
#
# Sources: lecture 22 of CMU 10-423/623/723, *State Space Models + Hybrid Models* (L22), slides
# "Linear Attention" and "Hybrid Models";
# *Wonderful Matrices* (WM) §2; the papers behind the rules are cited where they come up. Chapter 00
# explains ✓ and ✗.

# %% tags=["setup"]
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import einsum

from cheems_ref import plotting
from cheems_ref.config import expand_pattern, preset
from cheems_ref.linear_attention import (
    RULES,
    delta_rule,
    gated_delta_rule,
    gated_linear_attention,
    linear_attention,
)
from cheems_ref.verify import check, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads

# %% tags=["setup"]
TWO_KEYS = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
TWO_VALUES = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
FORGET = {
    "linear attention": lambda S, key: S,
    "Mamba-2": lambda S, key: 0.5 * S,
    "delta rule": lambda S, key: S - torch.outer(S @ key, key),
}


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(*shape, seed):
    """Random unit vectors, every direction as likely as any other."""
    return F.normalize(random(*shape, seed=seed), dim=-1)


def heads(*tensors):
    """One text, one head: (l, ...) becomes (1, l, 1, ...), as the package has it."""
    return [t[None, :, None] for t in tensors]


# %% tags=["setup"]
def show(S):
    """Print what a state returns for the two keys."""
    for i in range(2):
        answer = [round(x, 3) + 0.0 for x in (S @ TWO_KEYS[i]).tolist()]  # + 0.0: no minus zero
        print(f"S k{i} = {answer}, and v{i} = {TWO_VALUES[i].tolist()}")


G = math.log(0.97)  # a half-life of 23 tokens


def store(name, k, v, g=G, beta=1.0):
    """The final states (b, p, n) of a rule on b streams, k (b, l, n), v (b, l, p), one head."""
    gates = {"g": g, "beta": beta}
    gates = [torch.as_tensor(gates[gate]).expand(k.shape[:2]) for gate in RULES[name].takes]
    given = [t[:, :, None] for t in (k, k, v, *gates)]  # k as q: the outputs are not looked at
    return RULES[name].function(*given, chunk_size=64, return_final_state=True)[1][:, 0]


# %% tags=["figure"]
def draw_rule(ax, name, forget):
    """How much of the old and of the new value key 1 returns, in three stages of a write."""
    old, key, value = TWO_VALUES[0], TWO_KEYS[1], TWO_VALUES[1]
    S = torch.outer(old, TWO_KEYS[0])
    stages = [S, forget(S, key), forget(S, key) + torch.outer(value, key)]
    for place, state in enumerate(stages):
        for i, color in ((0, plotting.QUIET), (1, plotting.COLORS[0])):
            ax.bar(place + 0.36 * i - 0.18, (state @ key)[i].item(), 0.34, color=color)
    ax.set(title=name, ylim=(0, 1.1), yticks=[0, 1])
    ax.set_xticks(range(3), ["before", "forget", "write"])


# %% [markdown]
# Picture a memory that files each value under a *key*, a vector. Ask with a key, and you get the
# values of all keys that resemble it, in proportion. One value is stored, and we're about to write
# a new one under a second key. The keys have inner product 0.6, so the new key already returns 0.6
# of the old value:

# %% slide_title="Three rules for a key that already returns something" tags=["figure"]
fig, axes = plotting.figure(1, 3, size=(13, 3.6))
for ax, (name, forget) in zip(axes, FORGET.items(), strict=True):
    draw_rule(ax, name, forget)
axes[0].set_ylabel("what the key returns")
axes[0].text(-0.25, 0.68, "old value", color="#555555")
axes[0].text(1.55, 1.03, "new value", color=plotting.COLORS[0])
plotting.save(
    fig,
    "02_write",
    "Three panels with the stages before, forget, write; bars show how much of an old and of a new "
    "value a key returns. Linear attention keeps the old value and adds the new. Mamba-2 halves "
    "the old value first. The delta rule erases it first.",
)

# %% [markdown]
# Linear attention simply adds; Mamba-2 first halves the old value; the delta rule erases it. The
# delta rule looks up what the key returns and removes exactly that. The first key pays for it, as
# section 5 will show.

# %% [markdown]
# ## 1 · Drop the softmax, move the brackets
#
# What does attention compute?
#
# Every token has a query $q_t$ and a key $k_t$, both vectors of $n$ numbers, and a value $v_t$ of
# $p$ numbers. Attention compares the query with all the keys so far, turns the scores into weights
# that sum to 1, and averages the values with those weights:
#
# $$o_t = \sum_{s \le t} \frac{\exp(q_t \cdot k_s / \sqrt n)}
#   {\sum_{s' \le t} \exp(q_t \cdot k_{s'} / \sqrt n)}\; v_s. \tag{2.1}$$

# %% slide_title="Attention compares the query with all keys so far"
l, n, p = 24, 4, 5
q, k = random(2, l, n, seed=0)
v = random(l, p, seed=2)
exponentials = (q @ k.T / math.sqrt(n)).exp().tril()
shares = exponentials / exponentials.sum(-1, keepdim=True)
print("query 2 weighs its three keys by", [round(w, 2) for w in shares[2, :3].tolist()])

# %% tags=["guard"]
built_in = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
check("attention, written out = PyTorch's", shares @ v, built_in)

# %% [markdown]
# For the next token, you need all the keys and values again. Can we get by with less? Not with the
# softmax in the way. So let's throw it out. "Linear attention is identical to standard attention,
# but drops the softmax", says L22.
#
# The $1/\sqrt n$ was only there for the softmax, so it goes too. Put one token in each row of $Q$,
# $K$, $V$ and $O$, and let $M$ be the causal mask of ones and zeros (chapter 03's $M$ is another):
#
# $$o_t = \sum_{s \le t} (q_t \cdot k_s)\; v_s, \qquad O = (QK^\top \circ M)\,V. \tag{2.2}$$

# %% slide_title="Without the softmax, weights have any sign" slide_figure="02_weights:1"
quadratic = (q @ k.T).tril() @ v
by_sum = torch.stack([sum((q[t] @ k[s]) * v[s] for s in range(t + 1)) for t in range(l)])
check("(QKᵀ ∘ M)V = the sum", quadratic, by_sum)
_ = must_differ("mask forgotten: attention to the future", q @ k.T @ v, quadratic)

# %% [markdown]
# Now look at a single term, $v_s\,(k_s^\top q_t)$. The bracket is a scalar, so we can move it. Then
# $v_s k_s^\top$ is a matrix, the outer product of value and key, and we can add up all these
# matrices *before any query arrives*. We call their sum the state $S_t$ (the other chapters write
# $h_t$):
#
# $$\begin{gathered} v_s\,(k_s^\top q_t) = (v_s\,k_s^\top)\,q_t \\
#   S_t = S_{t-1} + v_t\,k_t^\top, \qquad o_t = S_t\,q_t, \qquad S_{-1} = 0.
#   \end{gathered} \tag{2.3}$$

# %% slide_title="Two brackets turn attention into a recurrence"
S, outputs = torch.zeros(p, n), []
for t in range(l):
    S = S + torch.outer(v[t], k[t])
    outputs.append(S @ q[t])
recurrent = torch.stack(outputs)
check("quadratic form = recurrence", quadratic, recurrent)
check("package, recurrence", linear_attention(*heads(q, k, v))[0, :, 0], recurrent)

# %% [markdown]
# Attention has become a recurrence with a memory that never grows.
#
# What did that cost us? The weights no longer sum to 1, and some are negative. And look at the
# weights that the last 12 of our 24 tokens give to the first 12.

# %% tags=["guard"]
ones = torch.ones(l, p)
check("equal values: attention returns them", shares @ ones, ones)
_ = must_differ("equal values: linear attention does not", (q @ k.T).tril() @ ones, ones)
assert (q @ k.T).tril().min() < 0
blocks = {"inner products": (q @ k.T)[12:, :12], "the softmax": shares[12:, :12]}
ranks = {name: int(torch.linalg.matrix_rank(block)) for name, block in blocks.items()}
print("rank of the 12 × 12 weights:", ranks)
assert ranks == {"inner products": n, "the softmax": 12}
assert torch.linalg.matrix_rank((q @ k.T).tril()) > n  # of the whole triangle
assert n == 4 and (blocks["inner products"] - q[12:] @ k[:12].T).abs().max() < 1e-12


# %% tags=["figure"]
def draw_weights(ax, weights, title, rank):
    """All weights, red above 0 and blue below; then a frame around the last 12 × first 12."""
    limit = weights.abs().max().item()
    ax.pcolormesh(weights, cmap="RdBu_r", vmin=-limit, vmax=limit)
    ax.set(aspect="equal", ylim=(24, 0), xticks=[0, 12, 24], yticks=[0, 12, 24])
    ax.set_title(title, fontsize=19)
    ax.set_xlabel("key", fontsize=18)
    ax.set_ylabel("query", fontsize=18)
    ax.tick_params(labelsize=18)
    frame = ax.plot([0, 12, 12, 0, 0], [12, 12, 24, 24, 12], color=plotting.INK, lw=3)
    return [*frame, ax.text(23.5, 3, f"frame: rank {rank}", ha="right", fontsize=19)]


# %% tags=["figure"]
def draw_factors(ax, q, k):
    """The last 12 queries and the first 12 keys: their product is what the frame holds."""
    limit = max(q.abs().max(), k.abs().max()).item()
    for x, y, factor, name in ((3, 12, q, "12 × 4\nqueries"), (9, 16, k.T, "4 × 12\nkeys")):
        rows, columns = factor.shape
        edges = torch.arange(columns + 1) + x, torch.arange(rows + 1) + y
        ax.pcolormesh(*edges, factor, cmap="RdBu_r", vmin=-limit, vmax=limit)
        right, low = x + columns, y + rows
        ax.plot([x, right, right, x, x], [y, y, low, low, y], color=plotting.INK, lw=3)
        ax.text(x + columns / 2, y - 0.5, name, ha="center", fontsize=19)
    ax.text(1.2, 18, "=", ha="center", va="center", fontsize=26)
    ax.text(8, 18, "·", ha="center", va="center", fontsize=26)
    ax.set(aspect="equal", xlim=(0, 24), ylim=(24, 0)), ax.axis("off")


# %% slide_title="Without the softmax, the past has rank n at most" tags=["figure", "slide"]
fig, axes = plotting.figure(1, 3, size=(13, 4.9))
frames = draw_weights(axes[0], shares, "with the softmax", ranks["the softmax"])
without, rank = "without: red > 0, blue < 0", f"{ranks['inner products']} = n"
frames += draw_weights(axes[1], (q @ k.T).tril(), without, rank)
draw_factors(axes[2], q[12:], k[:12])
plotting.save(
    fig,
    "02_weights",
    "Two lower triangles, the weights of 24 tokens. With the softmax all are red, above 0. "
    "Without it, red and blue mix. A frame marks the weights that the last 12 tokens give to "
    "the first 12: of rank 12 with the softmax, of rank 4 = n without. Beside it are its two "
    "factors, 12 by 4 queries and 4 by 12 keys.",
    stages=[[axes[1]], [*frames, axes[2]]],
)

# %% [markdown]
# Without the softmax, the weights in the frame have rank 4: a matrix of inner products of vectors
# of width $n = 4$ has rank $n$ at most, and the mask leaves the frame alone. (The whole triangle
# can have a higher rank.) So the last 12 tokens can look back at the first 12 in only four
# independent ways. With the softmax, it's 12.
#
# What did we gain? The cache of keys and values holds $l\,(n + p)$ numbers per head, and the state
# holds $n\,p$. With $n = p = 128$, they're the same size at 64 tokens. At 262,144 tokens the cache
# is 4,096 times as large as the state.

# %% [markdown] slide_title="A state is a memory of key–value pairs"
# ## 2 · A memory of key–value pairs
#
# Think of (2.3) as storage. Writing adds $v\,k^\top$. Reading with a query gives $v\,(k \cdot q)$:
# the value, times how well the query matches the key. Follow three tokens. What does the query
# find, if the state also fades to 0.7 of itself before each write, as in section 4?

# %% slide_title="The key says where, the value says what" tags=["figure"]
plotting.show_drawing(
    "02_state",
    "Three tokens write into a state, a grid of 4 by 4 numbers. Above each grid, the token's key "
    "lies along the top and its value down the side, and their outer product is the grid that is "
    "added. From grid to grid the state fades by 0.7. A query equal to the second key weighs the "
    "columns of the last grid, and their sum is 0.7 times the second value.",
)

# %% tags=["guard"]
keys = torch.tensor([[1.0, 0, 0, 0], [0, 0.8, 0.6, 0], [0, 0, 0, 1]])  # as drawn
values = torch.tensor([[1, 0.2, 0, 0.7], [0.1, 1, 0.6, 0], [0.5, 0, 0.9, 0.3]])
S = torch.zeros(4, 4)
for k, v in zip(keys, values, strict=True):
    S = 0.7 * S + torch.outer(v, k)
check("the drawing: k1 returns 0.7 of v1", S @ keys[1], 0.7 * values[1])
check("and k0 returns 0.49 of v0", S @ keys[0], 0.49 * values[0])

# %% [markdown]
# A column of the state belongs to an entry of the key, a row to an entry of the value. These keys
# are perpendicular, so the query finds one value only. Most keys aren't.
#
# Here are the opening picture's two pairs. The keys $k_0 = (1, 0)$ and $k_1 = (0.6, 0.8)$ are unit
# vectors with inner product 0.6. The values are $v_0 = (1, 0)$ and $v_1 = (0, 1)$, so you can see
# how much of each value is in an answer. What does each key return after both writes?
# Work it out on paper first.

# %% tags=["aside"]
S = torch.zeros(2, 2)
for k, v in zip(TWO_KEYS, TWO_VALUES, strict=True):
    S = S + torch.outer(v, k)
show(S)
check("linear attention, by hand", S @ TWO_KEYS.T, torch.tensor([[1.0, 0.6], [0.6, 1.0]]))

# %% [markdown]
# Each key returns its own value in full, plus 0.6 of the other: $S\,k_0 = v_0 + 0.6\,v_1$ and
# $S\,k_1 = 0.6\,v_0 + v_1$.
#
# If the keys were orthogonal, they wouldn't interfere at all. But $n$ dimensions only have room for
# $n$ orthogonal keys, and a text has more tokens than that.

# %% [markdown] slide_title="Each pair stored adds crosstalk" slide_figure="02_interference:0"
# ## 3 · Crosstalk
#
# What happens with many keys? Let linear attention store $l$ pairs under unit keys of $n$ numbers,
# and read key $j$:
#
# $$\begin{aligned} S\,k_j ={}& \underbrace{v_j}_{\text{signal}} \\
#   {}+{}& \underbrace{\sum_{i\ne j} (k_i\cdot k_j)\,v_i}_{\text{crosstalk}}.
#   \end{aligned} \tag{2.4}$$
#
# How bad is it if the keys point in random directions? With $k_j$ as the first axis, $(k_i \cdot
# k_j)^2$ is the square of the first coordinate of $k_i$. All $n$ squares sum to 1, so by symmetry
# each is $1/n$ on average. Now square the sum. As $k_i$ is as likely as $-k_i$, products of
# different tokens cancel on average, and the squares stay. So for random unit keys, and values of
# mean square 1, each entry of the crosstalk has
#
# $$\text{mean square} = \frac{l - 1}{n}. \tag{2.5}$$


# %% tags=["setup"]
def crosstalk(n, l, p=32, draws=1, seed=0):
    """Store l values under random keys; what is read minus what was stored: (draws, l, p)."""
    keys, values = unit(draws, l, n, seed=seed), random(draws, l, p, seed=seed + 1)
    S = einsum("blp,bln->bpn", values, keys)
    return einsum("bpn,bln->blp", S, keys) - values


# %% tags=["guard"]
counts = torch.tensor([2**i for i in range(1, 10)])  # of key–value pairs, 2 to 512
laws, measured = {}, {}
for n in (16, 64, 256):
    errors = [crosstalk(n, l, draws=8192 // l, seed=l).square().mean() for l in counts.tolist()]
    laws[f"n = {n}"], measured[f"n = {n}"] = (counts - 1) / n, torch.stack(errors)
for name, law in laws.items():
    ratio = measured[name] / law
    assert ((ratio - 1).abs() < 0.08).all()
    print(f"{name:7}: measured / law from {ratio.min():.3f} to {ratio.max():.3f}, over 9 sizes")


# %% tags=["figure"]
def draw_crosstalk(ax, counts, laws, measured):
    """The law for each width as a line; then what was measured, and where noise = signal."""
    for i, (name, law) in enumerate(laws.items()):
        color = plotting.COLORS[(0, 2, 1)[i]]
        ax.plot(counts, law, color=color)
        ax.text(570, law[-1], f"$n = {name[4:]}$", color=color, va="center", fontsize=19)
    drawn = set(ax.get_children())
    for i, (name, seen) in enumerate(measured.items()):
        color, n = plotting.COLORS[(0, 2, 1)[i]], int(name[4:])
        ax.plot(counts, seen, "o", color=color, markersize=6)
        ax.plot([n + 1], [1], "D", color=color, markersize=11, markerfacecolor="white")
    plotting.level(ax, 1)
    ax.text(14, 1.2, "$l = n + 1$", ha="right", fontsize=18)
    ax.text(1750, 0.78, "noise = value", ha="right", va="top", fontsize=18)
    return [artist for artist in ax.get_children() if artist not in drawn]


# %% tags=["figure"]
def label_crosstalk(ax):
    """Axes and ticks of the figure of the crosstalk, both logarithmic."""
    ax.set(xscale="log", yscale="log")
    ax.set_xlabel("pairs stored", fontsize=18)
    ax.set_ylabel("crosstalk (mean square)", fontsize=18)
    ax.set_xlim(right=1800)  # room for the names of the lines
    ax.set_xticks([2**i for i in range(1, 10)], [f"{2**i}" for i in range(1, 10)])
    ax.tick_params(labelsize=18)
    ax.minorticks_off()


# %% slide_title="At l = n + 1 the noise is as loud as the value" tags=["figure"]
fig, ax = plotting.figure(size=(9, 5.4))
label_crosstalk(ax)
found = draw_crosstalk(ax, counts, laws, measured)
plotting.save(
    fig,
    "02_interference",
    "The mean square of the crosstalk against the number of key–value pairs, both logarithmic, for "
    "three widths of the key. The measured dots lie on the lines of the law (l - 1) / n. Diamonds "
    "mark where each line reaches the size of the signal: at l = 17, 65 and 257.",
    stages=[found],
)

# %% [markdown]
# The measured dots lie on the lines of (2.5): at $l = n + 1$, the diamonds, the noise is as loud as
# the signal. Can a better rule help?
#
# **No rule can store more than $n$ arbitrary values exactly.** With $l > n$ keys, some nontrivial
# combination $\sum_i a_i k_i$ is zero, and then $\sum_i a_i\,(S k_i) = S \sum_i a_i k_i = 0$ for
# every state $S$:

# %% slide_title="No rule stores more than n arbitrary values exactly" tags=["figure", "slide"]
plotting.show_drawing(
    "02_dependent",
    "On the left, three keys in the plane, each times a number, form a closed triangle. On the "
    "right, their three values times the same numbers form an open path: the sum is not zero.",
)

# %% [markdown]
# For arbitrary values, $\sum_i a_i v_i$ needn't be 0, and then some answer must be wrong. The word
# *arbitrary* matters. If the values are themselves a linear function of the keys, $v = Wk$, then
# $S = W$ gets all of them right.

# %% tags=["guard"]
keys, values = unit(1, 9, 8, seed=100), random(1, 9, 3, seed=101)
a = torch.linalg.svd(keys[0].T).Vh[-1]  # the last right singular vector: Σ a_i k_i = 0
for name in RULES:
    S = store(name, keys, values)[0]
    check(f"{name}: Σ a_i (S k_i) = 0", a @ (keys[0] @ S.T), torch.zeros(3), atol=1e-10)
_ = must_differ("Σ a_i v_i", a @ values[0], torch.zeros(3), at_least=0.1)

# %% [markdown] slide_title="Decay lowers the noise and the signal" slide_figure="02_fading:0"
# ## 4 · Let it fade: Mamba-2
#
# The simplest strategy is to forget. Before each write, multiply the state by a decay $\alpha_t$
# between 0 and 1:
#
# $$S_t = \alpha_t\,S_{t-1} + v_t\,k_t^\top. \tag{2.6}$$
#
# The code takes $g_t = \log\alpha_t$. By the time token $t$ reads the state, token $s$'s write has
# been through $\delta = t - s$ decays. We call $\delta$ its age. With constant $\alpha$, half of
# the signal is left after $\log\frac12 / \log\alpha$ tokens, which is the half-life.
#
# You lose old values: after $\delta$ tokens, $\alpha^\delta$ is left. What do you get in return?
# Decay cuts the noise more than it cuts recent values. A token of age $i$ now adds noise with mean
# square $\alpha^{2i}/n$, and $1 + \alpha^2 + \alpha^4 + \dots = 1/(1 - \alpha^2)$. So a value
# written $\delta$ tokens ago, and the noise in a text of any length, are
#
# $$\text{signal} = \alpha^\delta, \qquad \text{noise}^2 \;\le\; \frac{1}{n\,(1 - \alpha^2)}.
#   \tag{2.7}$$
#
# (Take roots before you compare.) Let's measure both. The signal is the answer's projection onto
# the value, the noise is the rest:

# %% tags=["aside"]
l, n = 512, 64
keys, values = unit(40, l, n, seed=7), random(40, l, 128, seed=8)
for name, alpha in (("no decay", 1.0), ("half-life 8", 0.5 ** (1 / 8))):
    got = einsum("bpn,bln->blp", store("Mamba-2", keys, values, g=math.log(alpha)), keys)
    signal = (got * values).sum((0, 2)) / values.square().sum((0, 2))
    noise = (got - signal[:, None] * values).square().mean((0, 2)).sqrt()
    ratio = signal / noise
    print(f"{name:11}: signal / noise {ratio[-1]:.2f} for the last value,", end=" ")
    print(f"{ratio[-101]:.2f} at age 100")


# %% tags=["figure"]
def draw_fading(ax, keys, values, oldest=60):
    """How loud each stored value is in its answer, against its age, with a decay and without."""
    rules, drawn = (("half-life 8", 0.5 ** (1 / 8), (6, 2.3)), ("no decay", 1.0, (40, 0.45))), []
    for i, (name, alpha, place) in enumerate(rules):
        got = einsum("bpn,bln->blp", store("Mamba-2", keys, values, g=math.log(alpha)), keys)
        signal = (got * values).sum((0, 2)) / values.square().sum((0, 2))
        noise = (got - signal[:, None] * values).square().mean((0, 2)).sqrt()
        color, ratio = plotting.COLORS[(2, 1)[i]], (signal / noise).flip(0)[:oldest]
        curves = [*ax.plot(ratio, color=color), ax.text(*place, name, color=color, fontsize=19)]
        drawn.append(curves)
    plotting.level(ax, 1)
    ax.text(26, 1.06, "signal as loud as the noise", fontsize=18)
    ax.set(ylim=(0, 3.8), yticks=[0, 1, 2, 3])
    ax.set_xlabel("age in tokens", fontsize=18)
    ax.set_ylabel("signal / noise", fontsize=18)
    ax.tick_params(labelsize=18)
    return drawn


# %% slide_title="Up to age 24, fading beats keeping everything" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(9, 4.8))
fades, keeps = draw_fading(ax, keys, values)
plotting.save(
    fig,
    "02_fading",
    "Signal over noise against the age of a value, up to 60 tokens. Without decay it is about 0.35 "
    "at every age. With a half-life of 8 it begins at 3.5, falls below 1 between ages 10 and 20, "
    "and goes to 0.",
    stages=[keeps],
)

# %% [markdown]
# After 512 writes in 64 dimensions, the noise without decay is almost three times as loud as the
# value (in root mean square). With a half-life of 8, the last value is 3.5 times as loud as the
# noise, and the value from 100 tokens ago is gone. Up to an age of 24, a fading state answers more
# clearly than one that keeps all. Mamba-2 lets every token choose its own $\alpha_t$.
#
# But decay is blunt. It fades everything equally, whether it's still valid or not. And it never
# *corrects* anything.

# %% tags=["guard"]
assert noise.square().mean().sqrt() < 1.02 / math.sqrt(n * (1 - alpha**2))  # half-life 8
assert ratio[-11] > 1 > ratio[-21]  # as the alt text says
assert ratio[-25:].min() > math.sqrt(n / (l - 1))  # up to age 24: louder than without decay
half_life = 12
key, value = unit(1, 4, seed=5), random(1, 3, seed=6)
k = key.expand(half_life + 1, -1)
v = torch.cat([value, torch.zeros(half_life, 3)])  # one value, then tokens that write nothing
g = torch.full((half_life + 1,), -math.log(2) / half_life)
o = gated_linear_attention(*heads(k, k, v, g))[0, :, 0]
check("read at once: all of it", o[0], value[0])
check("after one half-life: half of it", o[half_life], value[0] / 2)

# %% [markdown] slide_title="A gradient step writes what is missing" slide_figure="02_answers:1"
# ## 5 · Correct it: the delta rule
#
# You read *the cat is in the kitchen* and later *the cat is in the garden*. Same key, new value.
# Linear attention now returns kitchen plus garden. But you want to replace kitchen with garden.
#
# Think of it as regression. We want a linear map $S$ with $S k \approx v$, and the examples arrive
# one at a time.
#
# The loss on one example and its gradient are
#
# $$J(S) = \tfrac12\,\| S k - v \|^2, \qquad
#   \frac{\partial J}{\partial S} = (S k - v)\,k^\top. \tag{2.8}$$
#
# Each token takes one gradient step of size $\beta$:
#
# $$S_t = S_{t-1} + \beta_t\,(v_t - S_{t-1} k_t)\,k_t^\top
#   = S_{t-1}\,(I - \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top. \tag{2.9}$$
#
# The first form tells you what to do: read first, then write only what is missing. This is the
# *delta rule* (Widrow and Hoff, 1960; in linear attention, Schlag et al., 2021).
#
# Let's do it **by hand**, with $\beta = 1$. The first write is the same as before. At $k_1$ the
# state then returns $(0.6, 0)$. We want $(0, 1)$, so $(-0.6, 1)$ is missing, and that's what we
# write.

# %% tags=["aside"]
S_two = torch.zeros(2, 2)
for k, v in zip(TWO_KEYS, TWO_VALUES, strict=True):  # with β = 1
    S_two = S_two + torch.outer(v - S_two @ k, k)
show(S_two)
check("DeltaNet, by hand", S_two @ TWO_KEYS.T, torch.tensor([[0.64, 0.0], [0.6, 1.0]]))

# %% [markdown]
# The key $k_1$ returns its value exactly, but $k_0$ pays the price. The write arrives there with a
# factor of 0.6, the keys' inner product: $(1, 0) + 0.6\,(-0.6, 1) = (0.64, 0.6)$.

# %% slide_title="The new key is right, and the old key pays for it" tags=["figure", "slide"]
plotting.show_drawing(
    "02_answers",
    "The plane of answers, v_0 to the right and v_1 upward. Before the second write, k_0 returns "
    "(1, 0) and k_1 returns (0.6, 0). Adding moves them straight up, by 0.6 and by 1. The delta "
    "rule moves k_1's answer along what is missing to v_1, and k_0's by 0.6 of that.",
)

# %% [markdown]
# Any nonzero step
# along one key disturbs what's stored under every key that isn't orthogonal to it.
#
# Linear attention is a gradient step too, on the loss $-v \cdot S k$. That loss has no minimum, so
# linear attention never stops adding.

# %% tags=["guard"]
on_left = torch.zeros(2, 2)
for k, v in zip(TWO_KEYS, TWO_VALUES, strict=True):
    on_left = (torch.eye(2) - torch.outer(k, k)) @ on_left + torch.outer(v, k)
_ = must_differ("kkᵀ on the left of S", on_left @ TWO_KEYS[1], TWO_VALUES[1], at_least=0.1)

n, p, beta = 4, 3, 0.15
S, key, value = random(p, n, seed=12), random(n, seed=13), random(p, seed=14)
slope = torch.func.grad(lambda S: (S @ key - value).square().sum() / 2)(S)
check("gradient of the loss = error times key", slope, torch.outer(S @ key - value, key))
_ = must_differ("error with the wrong sign", torch.outer(value - S @ key, key), slope)
by_row = S @ (torch.eye(n) - beta * torch.outer(key, key)) + beta * torch.outer(value, key)
check("gradient step = the right side of 2.9", S - beta * slope, by_row)

# %% [markdown] slide_title="Above β‖k‖² = 2, a step enlarges the error" slide_figure="02_step:0"
# ## 6 · When a step is too large
#
# How large can $\beta$ be? Multiply (2.9) by $k_t$ on the right: the error for the key we just
# wrote is gone if $\beta_t \|k_t\|^2$ is 1, and grows if it is above 2:
#
# $$v_t - S_t k_t = (1 - \beta_t \|k_t\|^2)\,(v_t - S_{t-1} k_t). \tag{2.10}$$
#
# Between 0 and 1 the error shrinks. At 1 the old value has been replaced. Between 1 and 2 the step
# overshoots, but for this key the error still ends up smaller than before. Will a float32 state
# survive 100 keys of 16 standard normal numbers with $\beta = 1$?

# %% tags=["aside"]
raw, v = random(1, 200, 16, seed=28), random(1, 200, 16, seed=29)
for name, k in (("raw", raw), ("unit", F.normalize(raw, dim=-1))):
    sizes = [store("DeltaNet", k[:, :l], v[:, :l]).norm() for l in (100, 200)]
    print(f"{name:4} keys: ‖S‖ about 1e{sizes[1].log10():.0f} after 200 tokens")
    assert (sizes[0] > torch.finfo(torch.float32).max) == (name == "raw")
print(f"the largest float32 is {torch.finfo(torch.float32).max:.0e}, and passed before token 100")


# %% [markdown]
# Such a key has $\|k\|^2$ near 16, which makes the factor about −15: normalise your keys. (The
# state grows about threefold per token, not fifteenfold, since only what lies along the key is
# enlarged.) With unit keys and $\beta$ between 0 and 1, no step overshoots.
#
# *Longhorn* (Liu et al., 2024) is safe with keys of any length. Instead of choosing a step, it says
# where the step should end: at a state that's close to the old one and answers the new key well.

# %% slide_title="Longhorn stops between the old answer and the value" tags=["figure", "slide"]
plotting.show_drawing(
    "02_longhorn",
    "Two parabolas and their sum, along the way from the old answer to the value. One grows with "
    "the distance from the old state, one with the distance from the value. The sum is lowest in "
    "between, two thirds of the way for β = 2; the rest of the way is e.",
)

# %% [markdown] slide_title="Longhorn is a delta rule with a small step" slide_figure="02_longhorn"
# The new state stays close to the old one, and the larger $\beta_t$, the closer its answer to the
# new key comes to the new value:
#
# $$S_t = \operatorname*{argmin}_S \| S - S_{t-1} \|^2 + \beta_t\,\| S k_t - v_t \|^2. \tag{2.11}$$
#
# Let $e = v_t - S_t k_t$ be what is still missing after the write. With the gradient at zero,
# $S_t - S_{t-1} = \beta_t\,e\,k_t^\top$. Multiply by $k_t$: since $S_t k_t = v_t - e$, the left
# side is $(v_t - S_{t-1} k_t) - e$, and the right is $\beta_t \|k_t\|^2\,e$. So what is left,
# $e$, is what was missing, divided by $1 + \beta_t \|k_t\|^2$. The minimum is a delta rule with a
# step $\epsilon_t$ that is smaller than $\beta_t$:
#
# $$S_t = S_{t-1} + \epsilon_t\,(v_t - S_{t-1} k_t)\,k_t^\top, \qquad
#   \epsilon_t = \frac{\beta_t}{1 + \beta_t \|k_t\|^2}. \tag{2.12}$$
#
# However large $\beta$ gets, $\epsilon\|k\|^2$ stays below 1, and $1 / (1 + \beta \|k\|^2)$ of the
# error is left:


# %% tags=["figure"]
def draw_steps(ax):
    """What is left of the error after a write, against β‖k‖²: the delta rule, then Longhorn."""
    x, red, green = torch.linspace(0, 3, 301), plotting.COLORS[1], plotting.COLORS[2]
    plotting.level(ax, 1)
    ax.plot(x, (1 - x).abs(), color=red, lw=3)
    ax.plot([1, 2], [0, 1], "o", color=plotting.INK, ms=10)
    ax.text(2.36, 1.6, "delta rule: |1 − β‖k‖²|", color=red, ha="right", fontsize=20)
    ax.text(0.08, 1.06, "the error as it was", fontsize=18)
    ax.text(1.93, 1.06, "grows from here on", ha="right", fontsize=18)
    ax.text(1.07, 0.0, "replaced", va="center", fontsize=18)
    ax.set(ylim=(-0.08, 2), xlim=(0, 3), xticks=[0, 1, 2, 3], yticks=[0, 1, 2])
    ax.set_xlabel("β‖k‖²", fontsize=18)
    ax.set_ylabel("share of the error left", fontsize=18)
    ax.tick_params(labelsize=18)
    words = ax.text(1.75, 0.44, "Longhorn: 1 / (1 + β‖k‖²)", color=green, fontsize=20)
    return [*ax.plot(x, 1 / (1 + x), color=green, lw=3), words]


# %% slide_title="The delta rule can overshoot, Longhorn can't" tags=["figure"]
fig, ax = plotting.figure(size=(12, 5))
longhorn = draw_steps(ax)
plotting.save(
    fig,
    "02_step",
    "The share of the error that is left after a write, against β‖k‖² from 0 to 3. The delta "
    "rule's line falls from 1 to 0 at 1, rises to 1 again at 2, and goes on to 2. Longhorn's falls "
    "from 1 to a quarter and never rises.",
    stages=[longhorn],
)

# %% [markdown]
# Above 2 the delta rule leaves a larger error than it found. Longhorn never does.
#
# The published model keeps only the diagonal of the $k k^\top$ that multiplies the old state (lab
# [02a](labs/02a_five_memories.ipynb)).

# %% tags=["guard"]
n, p, beta = 4, 3, 1.7
S, key, value = random(p, n, seed=12), random(n, seed=13), random(p, seed=14)
after = S + beta * torch.outer(value - S @ key, key)
times = (1 - beta * key @ key) * (value - S @ key)
check("after a step, the error is 1 - β‖k‖² times as large", value - after @ key, times)
after = S + beta / (1 + beta * key @ key) * torch.outer(value - S @ key, key)
times = (value - S @ key) / (1 + beta * key @ key)
check("after Longhorn's, 1 / (1 + β‖k‖²) times", value - after @ key, times)

# %% [markdown]
# ## 7 · Fade, then correct: Gated DeltaNet
#
# A delta-rule write only clears what's stored along its own key. Decay doesn't look at keys, and
# fades everything. How much of its value does an old key still return after one write?

# %% slide_title="Decay fades everything, a delta step clears its key" tags=["figure", "slide"]
plotting.show_drawing(
    "02_forget",
    "The share of an old value that its key still returns after one write, against the inner "
    "product of the two keys. Mamba-2, with α = ½, leaves half, whatever the key. The delta rule, "
    "with β = 1, leaves all at inner product 0, nothing at 1. Gated DeltaNet, with both, leaves "
    "half of what the delta rule does.",
)

# %% [markdown] slide_title="Gated DeltaNet fades first, then corrects" slide_figure="02_forget"
# *Gated DeltaNet* (Yang, Kautz and Hatamizadeh, 2024) does both, and fades first:
#
# $$S_t = \alpha_t S_{t-1}\,(I - \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top
#   = \tilde S + \beta_t\,(v_t - \tilde S k_t)\,k_t^\top, \quad \tilde S = \alpha_t S_{t-1}.
#   \tag{2.13}$$

# %% tags=["guard"]
n, p, alpha, beta = 4, 3, 0.7, 0.4
S, key = random(p, n, seed=12), random(n, seed=13)
value = random(p, seed=14)
row = alpha * S @ (torch.eye(n) - beta * torch.outer(key, key)) + beta * torch.outer(value, key)
faded = alpha * S
check("2.13: fade, then correct", row, faded + beta * torch.outer(value - faded @ key, key))
late = alpha * (S + beta * torch.outer(value - S @ key, key))
_ = must_differ("correct, then fade", late, row)

# %% [markdown] slide_title="Five rules differ in what they keep and what they add"
# One idea covers all five rules: each token is one step of learning. A step keeps a part of the
# state and adds a write, and their sum is the new state:
#
# | rule | loss | keeps | adds |
# |---|---|---|---|
# | linear attention | $-v \cdot S k$ | $S$ | $v k^\top$ |
# | Mamba-2 | the same | $\alpha S$ | $v k^\top$ |
# | DeltaNet | $\frac12\lVert Sk - v\rVert^2$ | $S (I - \beta kk^\top)$ | $\beta vk^\top$ |
# | Longhorn | the same | $S (I - \epsilon kk^\top)$ | $\epsilon vk^\top$ |
# | Gated DeltaNet | the same | $\alpha S (I - \beta kk^\top)$ | $\beta vk^\top$ |
#
# The fade is part of learning too: shrinking the weights a little at every step is *weight decay*.
# And you know the bracket $I - \beta kk^\top$ from linear algebra. For a unit key it's a projection
# at $\beta = 1$, which erases what the key finds, and a mirror at $\beta = 2$, a Householder
# reflection. (In DeltaNet as published $\beta$ stays below 1.)
#
# The package agrees with the sum of each row (folded cells).


# %% tags=["guard"]
def printed_step(S, k, v, α, β, ε):
    """One printed row: S (α (I − β k kᵀ)) + ε v kᵀ, with the letters that the rule has."""
    return S @ (α * (torch.eye(len(k)) - β * torch.outer(k, k))) + ε * torch.outer(v, k)


def by_lecture(name, q, k, v, g, beta):
    """The outputs (l, p) of a printed row for one head, token by token."""
    S, outputs = torch.zeros(v.shape[1], k.shape[1]), []
    for t in range(len(q)):
        ε = beta[t] / (1 + beta[t] * k[t] @ k[t])
        letters = {"linear attention": (1, 0, 1), "Mamba-2": (g[t].exp(), 0, 1)}
        letters |= {"Longhorn": (1, ε, ε), "DeltaNet": (1, beta[t], beta[t])}
        letters |= {"Gated DeltaNet": (g[t].exp(), beta[t], beta[t])}
        S = printed_step(S, k[t], v[t], *letters[name])
        outputs.append(S @ q[t])
    return torch.stack(outputs)


# %% tags=["guard"]
b, l, h, n, p = 2, 45, 3, 6, 5
tensors = dict(q=random(b, l, h, n, seed=38), k=unit(b, l, h, n, seed=39))
tensors |= dict(v=random(b, l, h, p, seed=41), g=-random(b, l, h, seed=42).abs() / 4)
tensors["beta"] = 0.2 + torch.rand(b, l, h, generator=torch.Generator().manual_seed(43))
for name, rule in RULES.items():
    given = [tensors[x] for x in ("q", "k", "v", *rule.takes)]
    one_head = {x: t[0, :, 1] for x, t in tensors.items()}
    check(
        f"{name}: package = printed row",
        rule.function(*given)[0, :, 1],
        by_lecture(name, **one_head),
    )


# %% tags=["setup"]
def errors_over_time(name, keys, slots, values):
    """‖S_t k - v‖ / ‖v‖ for every key and token (keys, l); NaN before the key is written."""
    last, error = torch.full((len(keys),), -1), torch.full((len(keys), len(slots)), torch.nan)
    for t, slot in enumerate(slots.tolist()):
        last[slot] = t
        S = store(name, keys[slots[: t + 1]][None], values[None, : t + 1])[0]
        valid, known = values[last], last >= 0
        error[known, t] = ((keys @ S.T - valid).norm(dim=-1) / valid.norm(dim=-1))[known]
    return error


# %% [markdown]
# ## 8 · What each rule remembers
#
# Let's watch five memories at work on one stream of 60 tokens, with $n = 32$. Tokens 0 to 23 write
# 24 keys. Tokens 24 to 35 give the first twelve keys *new* values. Tokens 36 to 59 write 24 more
# keys.

# %% slide_title="One stream of 60 tokens puts five memories to the test" tags=["figure", "slide"]
plotting.show_drawing(
    "02_stream",
    "The key that each of 60 tokens writes: keys 0 to 23, then keys 0 to 11 once more with new "
    "values, then keys 24 to 47.",
)

# %% [markdown]
# After every token we compare the answers to all keys so far with their current values. An empty
# memory would have an error of 1. (The decay has a half-life of 23 tokens, and $\beta = 1$.) Which
# rules make no error right after a write? Here is the average for keys 12 to 23, which are written
# only once. (Token 12 writes key 12, and we ask again after token 48.)

# %% tags=["setup"]
ONCE = torch.arange(12, 24)  # written once: key i by token i
slots = torch.cat([torch.arange(24), torch.arange(12), torch.arange(24, 48)])  # the key written
keys, values = unit(48, 32, seed=20), random(60, 64, seed=21)
memories = {name: errors_over_time(name, keys, slots, values) for name in RULES}
for name, error in memories.items():
    written, later = error[ONCE, ONCE].mean(), error[ONCE, ONCE + 36].mean()
    print(f"{name:16}: error {written:.2f} when written, {later:.2f} 36 tokens later")


# %% tags=["figure"]
def draw_memories(memories):
    """The error of every key over time for three rules; the rewritten keys stand in a frame."""
    names = ("linear attention", "Mamba-2", "DeltaNet")
    fig, axes = plotting.heatmaps(
        {name: memories[name] for name in names}, signed=False, limit=1.6, size=(13, 5.6),
        xlabel="token", ylabel="key", unit="error (grey: not yet written)",
    )  # fmt: skip
    for ax, name in zip(axes, names, strict=True):
        ax.set_aspect("auto")
        ax.set(xticks=[0, 24, 36, 59], yticks=[0, 12, 24, 36, 47])
        ax.tick_params(labelsize=17)
        ax.set_title(name, fontsize=18)
        ax.xaxis.label.set_size(17), ax.yaxis.label.set_size(17)
        stair = [(23.5 + i, y) for i in range(12) for y in (i - 0.5, i + 0.5)]  # new from there on
        ax.plot(*zip((59.5, -0.5), *stair, (59.5, 11.5), (59.5, -0.5), strict=True),
                color=plotting.COLORS[1], lw=3, clip_on=False)  # fmt: skip
        error = memories[name][:12, 59].mean()
        ax.text(1, 46, f"in the frame:\nnew values,\nerror {error:.2f}\nat the end", va="bottom",
                fontsize=17)  # fmt: skip
    scale = fig.axes[-1]
    scale.tick_params(labelsize=17)
    scale.yaxis.label.set_size(17)
    return fig


# %% slide_title="Linear attention gets dark, the delta rule starts white" tags=["figure"]
plotting.save(
    draw_memories(memories),
    "02_memories",
    "Three pictures with 60 tokens across and 48 keys down: the error of each key's current value "
    "over time, grey where the key is not yet written. A frame marks keys 0 to 11 from token 24 "
    "on, when they get new values, and gives their mean error at the end. Linear attention gets "
    "darker and darker, on average darkest in the frame. Mamba-2 is nowhere white after the "
    "second token. DeltaNet is white at each write and darker after it.",
)

# %% tags=["guard"]
twice, late = slice(0, 12), slice(36, 48)  # keys, by how they are written
linear, delta = memories["linear attention"], memories["DeltaNet"]
# just written; the first pair has no crosstalk, the second hardly any
at_once = {name: error[slots, torch.arange(60)][2:] for name, error in memories.items()}
assert max(at_once["DeltaNet"].max(), at_once["Gated DeltaNet"].max()) < 1e-12
assert at_once["Longhorn"].min() > 0.4 and at_once["Mamba-2"].min() > 0.2
at_end = torch.stack([linear[part, 59].mean() for part in (twice, ONCE, late)])
assert at_end[0] > at_end[1:].max() + 0.1
darkens = {name: (e[ONCE, ONCE + 36] - e[ONCE, ONCE]).mean() for name, e in memories.items()}
assert min(darkens.values()) == darkens["Longhorn"] > 0
assert min(memories[name][ONCE, ONCE + 36].mean() for name in ("DeltaNet", "Gated DeltaNet")) > 1
k, v = torch.eye(6)[None], random(1, 6, 4, seed=27)  # orthogonal keys
for name, rule in RULES.items():
    change = (store(name, k, v) - store(name, k.flip(1), v.flip(1))).norm()
    assert change > 0.1 if "g" in rule.takes else change < 1e-12

# %% [markdown]
# Read one row from left to right: it's the life of one key. On average, linear attention gets
# darker and darker. DeltaNet and Gated DeltaNet are white (no error) at every write, even if the
# key was used before, and then each later write disturbs what they stored. With $\beta = 1$, 36
# tokens later they do worse than an empty memory. Linear attention does even worse. So is linear
# attention the worst memory, and Longhorn the best?
#
# Before you believe that, ask another question. Most of these models normalise what a memory
# returns, so the direction of an answer matters much more than its length. Of all the values
# written so far, does the right one have the smallest angle to the answer? Let's ask in ten streams
# like this one:


# %% tags=["setup"]
def recall(name, key, until, place, **step):
    """Share of ten streams whose answer to `key` after `until` tokens points to value `place`."""
    keys, values = unit(10, 48, 32, seed=28), unit(10, 60, 64, seed=29)
    S = store(name, keys[:, slots[:until]], values[:, :until], **step)
    answers = einsum("bpn,bn->bp", S, keys[:, key])
    nearest = einsum("blp,bp->bl", values[:, :until], answers).argmax(-1)
    return (nearest == place).double().mean().item()


# %% tags=["aside"]
hits, small = {}, "DeltaNet, β = ¼"
print("right value nearest: when written, 36 tokens later; a new value, at the end")
for name in (*RULES, small):
    ask = partial(recall, "DeltaNet", beta=0.25) if name == small else partial(recall, name)
    written = sum(ask(key, key + 1, key) for key in range(12, 24)) / 12
    later = sum(ask(key, key + 37, key) for key in range(12, 24)) / 12
    twice = sum(ask(key, 60, key + 24) for key in range(12)) / 12
    hits[name] = written, later, twice
    print(f"{name:16}  {written:.2f}  {later:.2f}  {twice:.2f}")


# %% tags=["figure"]
def draw_hits(ax, hits):
    """For each rule, how often the right value is nearest: two bars."""
    asked = ("36 tokens later", "new value, at the end")
    at = [*range(len(RULES)), len(RULES) + 0.4]  # the smaller step stands apart
    for i, (question, color) in enumerate(zip(asked, (0, 4), strict=True), start=1):
        places = [rule + 0.36 * (i - 1.5) for rule in at]
        shares = [shares[i] for shares in hits.values()]
        ax.bar(places, shares, 0.33, color=plotting.COLORS[color], label=question)
        for place, share in zip(places, shares, strict=True):
            ax.text(place, share + 0.02, f"{share:.2f}", ha="center", fontsize=15)
    told = {"g": f"α = {math.exp(G):.2f}", "beta": "β = 1"}
    names = {name: name.replace(" ", "\n", 1) for name in hits}
    for name, rule in RULES.items():
        if rule.takes:
            names[name] = f"{name}\n" + ", ".join(told[gate] for gate in rule.takes)
    ax.set_xticks(at, names.values(), fontsize=15)
    ax.axvline(4.7, color=plotting.QUIET, lw=1.5, ls=":")
    ax.text(5.85, 1.14, "when written: 1.00 in all six", ha="right", fontsize=15)
    ax.set(ylim=(0, 1.08), ylabel="right value nearest")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=15)


# %% slide_title="With a smaller step, one delta rule finds old and new" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(12, 5.0))
draw_hits(ax, hits)
plotting.save(
    fig,
    "02_hits",
    "Two bars for each of five rules and, set apart, for a delta rule with a smaller step: how "
    "often the right value has the smallest angle to the answer. When written it's 1.00 in all "
    "six. 36 tokens later linear attention is near 1, Longhorn "
    "near 0.85, DeltaNet and Gated DeltaNet are below 0.4. For keys with a new value Longhorn "
    "leads the five, and Gated DeltaNet is last. DeltaNet with a step of a quarter is above 0.9 in "
    "both.",
)

# %% tags=["guard"]
assert {f"{written:.2f}" for written, _, _ in hits.values()} == {"1.00"}
by_recall = sorted(RULES, key=lambda name: hits[name][1])
assert by_recall[-1] == "linear attention" and by_recall[:2] == ["Gated DeltaNet", "DeltaNet"]
assert hits["linear attention"][1] > 0.9 and hits["Gated DeltaNet"][1] < 0.1
assert max(RULES, key=lambda name: hits[name][2]) == "Longhorn"
assert min(RULES, key=lambda name: hits[name][2]) == "Gated DeltaNet" and hits["DeltaNet"][1] < 0.4
assert min(hits.pop(small)) > 0.9
old = sum(recall("linear attention", key, 60, key) for key in range(12)) / 12
print(f"linear attention: {old:.2f} of the keys with a new value return the old one")
assert 0.35 < old < 0.45
assert memories["linear attention"][ONCE, ONCE + 36].mean() > 1  # more noise than value

enters = {}  # the mean weight of the right value, and of the loudest other
for name in RULES:
    right, loudest = [], []
    for key in range(12, 24):
        until, streams = key + 37, unit(10, 48, 32, seed=28)
        S = store(name, streams[:, slots[:until]], torch.eye(until).expand(10, -1, -1))
        weights = einsum("bpn,bn->bp", S, streams[:, key])  # of each value in the answer
        right.append(weights[:, key])
        loudest.append(weights.index_fill(1, torch.tensor(key), -math.inf).amax(1))
    enters[name] = [f"{torch.cat(weights).mean():.2f}" for weights in (right, loudest)]
    print(f"{name:16}: right value {enters[name][0]}, loudest other {enters[name][1]}")
assert enters["linear attention"] == ["1.00", "0.37"]
assert enters["Gated DeltaNet"] == ["0.10", "0.23"] and enters["DeltaNet"][0] == "0.31"
assert f"{0.31 * 0.97**36:.2f}" == "0.10"

# %% [markdown]
# Here $\alpha$ and $\beta$ are fixed. A model computes them for each token. Linear attention goes
# from last place to first, for keys that are written once. Its answers hold more noise than value,
# and still point to the right one. How? The right value enters with weight 1, the loudest other
# with 0.37 on average. Together the others are louder, alone none is. In Gated DeltaNet the right
# value enters with 0.10, against 0.23. It pays twice: erasing leaves 0.31, as in DeltaNet, and 36
# decays leave a third of that. For keys with a *new* value Longhorn leads, and linear attention
# returns the old value in four cases of ten. **The measure you choose decides who wins, so choose
# it before you look.**

# %% [markdown]
# And be fair to the delta rule: this race is about $\beta$. Over random keys, a write takes
# $\beta/n$ of an old value away on average, so after $\delta$ writes $\beta\,(1 - \beta/n)^\delta$
# of the value is left. A write also takes $(2\beta - \beta^2)/n$ of the answer's mean square and
# adds $\beta^2/n$: they balance at $\beta/(2 - \beta)$. Divide by its root. So for random unit
# keys, once the state has settled, each later write leaves $1 - \beta/n$ of an old value, and the
# cosine of answer and value after $\delta$ tokens is
# $\sqrt{\beta\,(2 - \beta)}\;(1 - \beta/n)^{\delta}$:


# %% tags=["figure"]
def draw_law(ax, steps, laws):
    """The cosine by the law against the step, a curve for each age, with a dot at its peak."""
    told = dict(xlabel="step β (random unit keys, n = 32)", ylabel="cosine", legend=None)
    plotting.lines(ax, steps, laws, **told)
    places = (1.38, 0.88), (1.12, 0.69), (0.84, 0.42), (0.44, 0.25)  # of the ages, on the curves
    for line, (age, law), place in zip(list(ax.lines), laws.items(), places, strict=True):
        ax.plot(steps[law.argmax()], law.max(), "o", ms=13, color=line.get_color())
        ax.text(*place, age, color=line.get_color(), fontsize=17)
    ax.text(0.93, 0.83, "dots: the best step", ha="center", fontsize=17)


# %% slide_title="Fresh values want a large step, old ones a small one" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(9, 4.2))
steps = torch.linspace(0.02, 1.9, 100)
start = (steps * (2 - steps)).sqrt()
laws = {f"{age} tokens later": start * (1 - steps / 32) ** age for age in (2, 12, 36, 100)}
draw_law(ax, steps, laws)
plotting.save(
    fig,
    "02_law",
    "The cosine of answer and value by the law, against the step, at four ages, with a dot at each "
    "peak. After two tokens it is near a step of 1. The older the value, the lower the peak and "
    "the smaller its step: near 0.35 after 36 tokens.",
)

# %% [markdown]
# The older the value, the smaller its best step. With $\beta = 1$ the answer keeps its length and
# turns away. A smaller step starts further off and turns more slowly. That's Longhorn's whole
# advantage here: with unit keys it *is* the delta rule with $\beta = \frac12$. With $\beta =
# \frac14$ one rule finds old and new values. (It does better than the law says, since it hasn't
# settled after 49 tokens.) (Lab [02a](labs/02a_five_memories.ipynb) trains them.)

# %% tags=["guard"]
best = [steps[law.argmax()].item() for law in laws.values()]
assert best == sorted(best, reverse=True) and 0.9 < best[0] < 1 and 0.3 < best[2] < 0.4
keys, values = unit(40, 512, 64, seed=7), random(40, 512, 128, seed=8)
for beta in (1.5, 1.0, 0.5, 0.25):
    got = einsum("bpn,bln->blp", store("DeltaNet", keys, values, beta=beta), keys)
    cosine = F.cosine_similarity(got, values, dim=-1).mean(0).flip(0)
    for age in (2, 10, 50, 100):
        law = math.sqrt(beta * (2 - beta)) * (1 - beta / 64) ** age
        assert abs(cosine[age - 2 : age + 3].mean() - law) < 0.03, (beta, age)
    assert abs(got.square().mean((0, 2))[-200:-50].mean() * (2 - beta) / beta - 1) < 0.1, beta
keys, values = unit(400, 49, 32, seed=30), random(400, 49, 64, seed=31)  # as long as section 8's
for beta, unsettled in ((0.25, 0.75), (1.0, 0.95)):
    got = einsum("bpn,bn->bp", store("DeltaNet", keys, values, beta=beta), keys[:, 12])
    cosine = F.cosine_similarity(got, values[:, 12], dim=-1).mean()
    left, square = beta * (1 - beta / 32) ** 36, got.square().mean()
    assert square < unsettled * beta / (2 - beta)  # then it's this that explains the angle:
    assert abs(cosine - left / square.sqrt()) < 0.02
settled = store("DeltaNet", unit(10, 60, 32, seed=1), random(10, 60, 64, seed=2), beta=0.5)
check("Longhorn, unit keys = the delta rule with β = ½",
      store("Longhorn", unit(10, 60, 32, seed=1), random(10, 60, 64, seed=2)), settled)  # fmt: skip

# %% [markdown]
# The state of linear attention is a sum, and **a sum doesn't know its order**: kitchen then garden
# or garden then kitchen, it's the same state. No training can change that, as long as a pair's key
# and value don't depend on the order. Let's write nine pairs both ways:

# %% tags=["aside"]
k, v = unit(1, 9, 6, seed=25), random(1, 9, 4, seed=26)
for name in RULES:
    change = (store(name, k, v) - store(name, k.flip(1), v.flip(1))).norm().item()
    print(f"{name:16}: written backwards, the state differs by {change:.2f}")
    assert (change < 1e-12) == (name == "linear attention")

# %% [markdown]
# All the others notice. The rules with a decay would notice even if the keys were orthogonal;
# DeltaNet and Longhorn only notice because the keys overlap.

# %% [markdown] slide_title="One triangular system holds all writes" slide_figure="02_triangle:0"
# ## 9 · All tokens of a chunk at once
#
# Written as loops, all five rules have to go token by token. Each write of the delta rule even
# depends on all the writes before it. Can we compute them in parallel?
#
# Chapter 01's scan joins neighbouring steps, and joining two brackets means multiplying them:
# $(I - \beta_1 k_1 k_1^\top)(I - \beta_2 k_2 k_2^\top)$. Their product is $I$ minus a
# matrix of rank 2. Then come ranks 4 and 8, and soon the scan multiplies full matrices.
#
# But the dependence is *linear* (Yang et al., 2024). Let $u_t$ be the vector that token
# $t$ writes. Then (2.9) is linear attention with $u$ in place of $v$, and $S_t =
# S_{-1} + \sum_{s \le t} u_s k_s^\top$ (2.14), where $S_{-1}$ is now the state before the chunk.
#
# Token $t$ writes $u_t = \beta_t\,(v_t - S_{t-1} k_t)$, and $S_{t-1}$ is the state before the chunk
# and the earlier writes:
#
# $$u_t = \beta_t \Big( v_t - S_{-1} k_t - \sum_{s < t} u_s\,(k_s \cdot k_t) \Big). \tag{2.15}$$
#
# Move the sum to the left: $u_t + \beta_t \sum_{s < t} (k_t \cdot k_s)\,u_s = \beta_t\,(v_t -
# S_{-1} k_t)$. That's row $t$ of one system, where $U$ has the rows $u_t$, and $K S_{-1}^\top$ the
# rows $S_{-1} k_t$.
#
# With $T_{ts} = \beta_t\,(k_t \cdot k_s)$ below the diagonal and 0 elsewhere, the system is
#
# $$(I + T)\,U = \mathrm{diag}(\beta)\,(V - K S_{-1}^\top). \tag{2.16}$$
#
# $I + T$ is triangular, with ones on the diagonal, so one call solves (2.16) for $U$. The solve
# still goes row by row, but only within a chunk:

# %% slide_title="The solve goes row by row, from first to last" tags=["figure", "slide"]
plotting.show_drawing(
    "02_triangle",
    "The matrix I + T of four tokens, with ones on its diagonal and entries T below it, times the "
    "rows of U, is a right side that is known. Row by row from the top, each row of U follows from "
    "the rows above it.",
)

# %% [markdown]
# The only state in the system is $S_{-1}$, from before the chunk. With $U$ you read as in linear
# attention:
#
# $$O = Q S_{-1}^\top + (Q K^\top \circ M)\,U. \tag{2.17}$$
#
# Let's try seven tokens, starting from a state `S_before`. A loop over the tokens (folded) gives
# outputs `o` and a last state `S_after`. Does one system give the same?

# %% tags=["guard"]
l, n, p = 7, 5, 4
q, k, v = random(l, n, seed=32), unit(l, n, seed=33), random(l, p, seed=34)
beta = torch.rand(l, generator=torch.Generator().manual_seed(35)) + 0.3
S_before = random(p, n, seed=36)
options = dict(initial_state=S_before[None, None], return_final_state=True)
o, S_after = (t.squeeze() for t in delta_rule(*heads(q, k, v, beta), **options))
gates = {"g": -random(l, seed=37).abs() / 4, "beta": beta}
for name, rule in RULES.items():
    given = heads(q, k, v, *(gates[gate] for gate in rule.takes))
    check(f"{name}: chunks of 3 = loop", rule.function(*given, chunk_size=3), rule.function(*given))

# %% slide_title="One triangular solve replaces the loop over a chunk"
T = (beta[:, None] * (k @ k.T)).tril(-1)
right_side = beta[:, None] * (v - k @ S_before.T)
U = torch.linalg.solve_triangular(torch.eye(l) + T, right_side, upper=False)
O = q @ S_before.T + (q @ k.T).tril() @ U
check("outputs of the chunk = loop", O, o)
check("state after the chunk = loop", S_before + U.T @ k, S_after)

# %% [markdown] slide_title="Each chunk solves before any state is known" slide_figure="02_chunks:0"
# It's easy to get a diagonal wrong here. $T$ has zeros on its diagonal, because no token corrects
# its own write. The mask $M$ has ones there, because a token does read its own write.
#
# Now cut a long text into chunks. The right side of (2.16) contains the state before the chunk, but
# $T$ doesn't. So every chunk can solve two systems before any state is known, all chunks at the
# same time:
#
# $$(I + T)\,U_V = \mathrm{diag}(\beta)\,V, \qquad (I + T)\,U_K = \mathrm{diag}(\beta)\,K, \qquad
#   U = U_V - U_K S_{-1}^\top. \tag{2.18}$$
#
# The chunk ends at $S_{-1} + U^\top K = S_{-1}\,(I - U_K^\top K) + U_V^\top K$. The bracket $I -
# U_K^\top K$ is the product of the chunk's brackets. In this form it's known as the *WY form*,
# after a way to multiply Householder reflections. Only the products with the state have to wait:

# %% slide_title="All chunks solve at once, and only the state has to wait" tags=["figure", "slide"]
plotting.show_drawing(
    "02_chunks",
    "Four chunks in a row, each with a triangular matrix I + T that is solved, all at once. Below "
    "them a chain of four states, each made from the one before it and from what its chunk's "
    "solve gave, one by one.",
)

# %% [markdown]
# For 4,096 tokens in chunks of 64, that's 64 rows to solve, then 64 steps of the state, instead of
# 4,096 in a row. It works with a decay too: every rule in the package takes a `chunk_size`.

# %% tags=["guard"]
U_V, U_K = torch.linalg.solve_triangular(
    torch.eye(l) + T, beta[:, None] * torch.cat([v, k], 1), upper=False
).split([p, n], 1)
check("U = U_V - U_K S₋₁ᵀ", U_V - U_K @ S_before.T, U)
product = torch.eye(n)
for b, key in zip(beta, k, strict=True):
    product = product @ (torch.eye(n) - b * torch.outer(key, key))
check("WY: I - U_Kᵀ K = the product of the brackets", torch.eye(n) - U_K.T @ k, product)
check("the chunk's end", S_before @ product + U_V.T @ k, S_after)

# %% [markdown] tags=["aside"]
# **What came after.** *GLA* gives each entry of the key its own decay. *KDA* is Gated DeltaNet with
# such decays. *RWKV-7* also erases under another key than it writes. *DeltaProduct* takes several
# delta steps per token. In *TTT* the state is the weights of a model, and small batches of tokens
# take gradient steps on them. *Titans* adds momentum and weight decay to that step. Signal
# processing calls the delta rule the LMS filter, and Longhorn's form the normalised LMS filter.

# %% [markdown] slide_title="What to remember of five memories" slide_figure="02_write"
# ## Summary
#
# - Without the softmax, attention becomes a matrix that every token updates.
# - Random keys: crosstalk of mean square $(l-1)/n$. No rule is exact for $n+1$ arbitrary values.
# - Decay fades everything. A delta step at $\beta\|k\|^2 = 1$ replaces what a key returned.
# - Normalise your keys: above $\beta\|k\|^2 = 2$, a delta step enlarges its own error.
# - Error and recall rank the rules differently, and the step decides more than the rule.
# - One triangular system gives all writes of a chunk, so the delta rule trains in chunks.
#
# ## Exercises
#
# **1 · easy.** *One more write by hand.* What do $k_0$, $k_1$ and $k_2$ return after a third write?
# Use pencil and paper. Section 5 left us with $S k_0 = (0.64, 0.6)$ and $S k_1 = (0, 1)$. The delta
# rule with $\beta = 1$ now writes $v_2 = (1, 1)$ under $k_2 = (0, 1)$. What do $k_0$, $k_1$ and
# $k_2$ return?
#
# <details><summary>Hint</summary>
#
# What does $k_2$ return before the write? The first column of $S$ is $S (1, 0) = S k_0$, and $k_1 =
# (0.6, 0.8)$ gives you the second. A write under $k_2$ changes only what lies along $k_2$.
#
# </details>


# %% tags=["exercise"]
def by_pencil():
    """What k0, k1 and k2 return: three pairs of numbers."""
    ### BEGIN SOLUTION
    return (0.64, 0.6), (1.184, 1.16), (1.0, 1.0)
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import check_numbers, forbidden

with forbidden(*(rule.function for rule in RULES.values())):
    mine = by_pencil()
keys = torch.cat([TWO_KEYS, torch.tensor([[0.0, 1.0]])])
S = store("DeltaNet", keys[None], torch.cat([TWO_VALUES, torch.ones(1, 2)])[None])[0]
answers = (keys @ S.T).tolist()
wanted = {f"S k_{i}, number {j}": answers[i][j] for i in range(3) for j in range(2)}
check_numbers(mine, wanted)

# %% [markdown]
# **2 · easy.** *Parity in one number.* Follow the parity of bits with one call of `delta_rule`. Is
# the number of ones so far odd? Let one number of state answer. Its sign should flip at every 1 and
# stay at every 0. Choose keys, values and $\beta$ so that one call does it. And why can't a rule
# that only fades, with an $\alpha$ between 0 and 1, do it?
#
# <details><summary>Hint</summary>
#
# Section 7 has the mirror. Don't start from zero.
#
# </details>


# %% tags=["exercise"]
def parity(bits):
    """bits (l,) of zeros and ones; the state's sign (l,) after each: 1 for even, -1 for odd."""
    ### BEGIN SOLUTION
    one = torch.ones(1, len(bits), 1, 1)
    start = torch.ones(1, 1, 1, 1)
    beta = 2.0 * bits[None, :, None]
    return delta_rule(one, one, 0 * one, beta, initial_state=start)[0, :, 0, 0].sign()
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import as_tensor, calls_of

for l, seed in ((300, 60), (1, 61), (37, 62)):
    bits = torch.randint(2, (l,), generator=torch.Generator().manual_seed(seed)).double()
    with calls_of(delta_rule) as returned:
        signs = as_tensor(parity(bits.clone()))
    assert len(returned) == 1, f"delta_rule was called {len(returned)} times instead of once"
    outputs = returned[0][0] if isinstance(returned[0], tuple) else returned[0]
    assert outputs.numel() in (l, l + 1), "one number of state, and a token for each bit"
    assert (outputs.flatten()[-l:].sign() == signs).all(), "these aren't the signs of the state"
    wrong = (signs != (-1.0) ** bits.cumsum(0)).sum().item()
    assert wrong == 0, f"{wrong} of {l} prefixes have the wrong sign"
print("the parity of 300 bits, by one number; lab 04c follows three cards")

# %% [markdown]
# **3 · medium.** *A division in one call.* Give linear attention its division back, in one call.
# Katharopoulos et al. (2020) apply a positive function $\psi$ to queries and keys and keep the
# division: $o_t = \sum_s (\psi(q_t) \cdot \psi(k_s))\,v_s \,/\, \sum_s \psi(q_t) \cdot \psi(k_s)$,
# with $s \le t$. Compute this with *one* call to `linear_attention`.
#
# <details><summary>Hint</summary>
#
# What must you store besides $v$ to get the denominator?
#
# </details>


# %% tags=["exercise"]
def normalised(q, k, v):
    """q, k (b, l, h, n), v (b, l, h, p) -> (b, l, h, p), with ψ(x) = elu(x) + 1."""
    ### BEGIN SOLUTION
    one = torch.ones(*v.shape[:-1], 1)
    o = linear_attention(F.elu(q) + 1, F.elu(k) + 1, torch.cat([v, one], dim=-1))
    return o[..., :-1] / o[..., -1:]
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import calls_of

q, k, v = (random(2, 9, 3, 4, seed=81 + i) for i in range(3))
with calls_of(linear_attention) as returned:
    o = normalised(q, k, v)
assert len(returned) == 1, f"linear_attention was called {len(returned)} times instead of once"
fits = einsum("bthn,bshn->bhts", F.elu(q) + 1, F.elu(k) + 1).tril()
expected = einsum("bhts,bshp->bthp", fits / fits.sum(-1, keepdim=True), v)
check("normalised linear attention", o, expected)
sums, above = (
    returned[0][0] if isinstance(returned[0], tuple) else returned[0],
    o * fits.sum(-1).mT[..., None],
)
off = (sums.flatten()[:, None] - above.flatten()).abs().amin(0).max()
assert off < 1e-9, "linear_attention is called, but the answer isn't made of what it returns"
check("equal values come back", normalised(q, k, torch.ones_like(v)), torch.ones_like(v))

# %% [markdown]
# **4 · medium.** *Longhorn with a gate.* Derive a sixth rule by giving Longhorn a gate. Let $S_t$
# minimise $\|S - \alpha_t S_{t-1}\|^2 + \beta_t \|S k_t - v_t\|^2$. Set the gradient to zero, solve
# for $S_t$, and write the result using a function from the package.
#
# <details><summary>Hint</summary>
#
# Multiply by $k_t$ first. That gives you the error $v_t - S_t k_t$.
#
# </details>


# %% tags=["exercise"]
def gated_longhorn(q, k, v, g, beta, **options):
    """q, k (b, l, h, n), v (b, l, h, p), g = log α and beta (b, l, h); the package's options."""
    ### BEGIN SOLUTION
    eps = beta / (1 + beta * k.square().sum(-1))
    return gated_delta_rule(q, k, v, g, eps, **options)
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import calls_of, not_none

q, k, v = (random(1, 6, 2, size, seed=84 + i) for i, size in enumerate((4, 4, 3)))
g, beta = -random(1, 6, 2, seed=87).abs(), 5 * random(1, 6, 2, seed=88).abs()
S = before = random(1, 2, 3, 4, seed=89)
with calls_of(*(rule.function for rule in RULES.values())) as returned:
    given = gated_longhorn(q, k, v, g, beta, initial_state=before, return_final_state=True)
    both = isinstance(not_none(given), tuple) and len(given) == 2
    assert both, (
        "with return_final_state=True, outputs and state are asked for: pass the options on"
    )
    o, after = given
assert returned, "call one of the package's rules, instead of minimising again"
expected = []
for t in range(6):  # the minimum as least squares: S times `given` should be `wanted`
    fade, weight = g[:, t].exp()[..., None, None], beta[:, t].sqrt()[..., None, None]
    given = torch.cat([torch.eye(4).expand(1, 2, 4, 4), weight * k[:, t, :, :, None]], dim=-1)
    wanted = torch.cat([fade * S, weight * v[:, t, :, :, None]], dim=-1)
    S = wanted @ torch.linalg.pinv(given)
    expected.append(S @ q[:, t, :, :, None])
check("6 tokens, 2 heads: the state at the minimum", after, S)
check("and the outputs", o, torch.stack(expected, 1)[..., 0])
read = torch.cat([(r[0] if isinstance(r, tuple) else r).flatten() for r in returned])
off = (read[:, None] - o.flatten()).abs().amin(0).max()
assert off < 1e-9, "a rule is called, but the outputs aren't what it returns"

# %% [markdown]
# **5 · hard.** *The delta rule in chunks.* Write the delta rule for a text of any length. Equations
# 2.16 and 2.17 handle one chunk. Go on to many, for one head, in torch and in chunks of `size`
# tokens, without looping over tokens and without using the package.
#
# <details><summary>Hint</summary>
#
# `tensor.split(size)` cuts up the text; the last piece may be shorter. Per chunk you need one
# triangular solve and one update of the state.
#
# </details>


# %% tags=["exercise"]
def delta_in_chunks(q, k, v, beta, size):
    """q, k (l, n), v (l, p), beta (l,); the outputs (l, p), starting from an empty state."""
    ### BEGIN SOLUTION
    S, outputs = torch.zeros(v.shape[1], k.shape[1]), []
    parts = (t.split(size) for t in (q, k, v, beta[:, None]))
    for q_c, k_c, v_c, beta_c in zip(*parts, strict=True):
        system = torch.eye(len(k_c)) + (beta_c * (k_c @ k_c.T)).tril(-1)
        right_side = beta_c * (v_c - k_c @ S.T)
        U = torch.linalg.solve_triangular(system, right_side, upper=False)
        outputs.append(q_c @ S.T + (q_c @ k_c.T).tril() @ U)
        S = S + U.T @ k_c
    return torch.cat(outputs)
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import forbidden
from cheems_ref.roofline import Recorder

q, k, v = random(23, 6, seed=92), unit(23, 6, seed=93), random(23, 4, seed=94)
beta = torch.rand(23, generator=torch.Generator().manual_seed(95))
expected = delta_rule(*heads(q, k, v, beta))[0, :, 0]
for size in (1, 5, 8, 23, 64):
    with forbidden(*(rule.function for rule in RULES.values())):
        mine = delta_in_chunks(q, k, v, beta, size)
    check(f"your chunks of {size} = loop", mine, expected)
steps = []
for l, size in ((10, 64), (23, 64), (23, 8)):  # in one chunk, more tokens take no more steps
    with Recorder() as recorder:
        delta_in_chunks(q[:l], k[:l], v[:l], beta[:l], size)
    steps.append(len(recorder.operators))
assert steps[1] < steps[0] + 13, f"{steps} operators for 10 and 23 tokens: a loop over tokens"
assert steps[2] > steps[1], "three chunks of 8 take no more of torch's operators than one chunk"
print("five chunk sizes, one result, and no loop over tokens")

# %% [markdown]
# ## Further reading
#
# - Gormley and Nayebi, CMU 10-423/623/723, lecture 22 (2025): the slides this chapter follows.
# - Katharopoulos et al., *Transformers are RNNs* (2020): linear attention.
# - Schlag, Irie and Schmidhuber, *Linear Transformers Are Secretly Fast Weight Programmers* (2021):
#   the state as a memory of key–value pairs, its capacity, and the delta rule.
# - Dao and Gu, *Transformers are SSMs* (2024): Mamba-2, chapter 03.
# - Liu et al., *Longhorn: State Space Models are Amortized Online Learners* (2024).
# - Yang et al., *Parallelizing Linear Transformers with the Delta Rule over Sequence Length*
#   (2024): the chunkwise form.
# - Yang, Kautz and Hatamizadeh, *Gated Delta Networks* (2024).
# - Yang et al., *Gated Linear Attention Transformers* (2023); Peng et al., *RWKV-7 "Goose"* (2025);
#   Kimi Team, *Kimi Linear* (2025), with KDA; Siems et al., *DeltaProduct* (2025); Sun et al.,
#   *Learning to (Learn at Test Time)* (2024); Behrouz et al., *Titans* (2024): what came after.
# - Grazzi et al., *Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues* (2024):
#   what β between 1 and 2 is good for.
# - Lieber et al., *Jamba* (2024); NVIDIA, *Nemotron-H* (2025): hybrids. Jamba keeps full attention
#   in 4 of 32 layers, Nemotron-H-8B in 4 of the 28 that mix tokens.
# - `cheems_ref/linear_attention.py`: the listing this notebook arrives at.

# %% tags=["guard"]
attends = [i for i, letter in enumerate(preset("jamba-52b").pattern[::2]) if letter == "A"]
nemotron = expand_pattern("SMSMSMSAM SMSMSMSMSAM SMSMSMSMSAM SMSMSMSMSAM SMSMSMSMSM")
counts = {letter: nemotron.count(letter) for letter in "SMA"}
assert attends == [4, 12, 20, 28] and counts == {"S": 24, "M": 24, "A": 4}
print("Jamba's layers with attention:", attends, "of 32", "  Nemotron-H-8B:", counts)

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
