# %% [markdown]
# # 04 · Rotary positions
#
# **How does a layer know how far apart two tokens are? Rotate each vector by an angle that grows
# with its position, and positions enter the inner product of two vectors only through their
# distance. The same trick works for attention and for SSD.** You will be able to
#
# - prove it in one line, and check it at position 100,000;
# - say which coordinates rotate together, and what goes wrong under the other convention;
# - decode with rotations, and explain what goes wrong when positions restart;
# - see rotary SSD as a state that rotates, and name the case where the theorem fails.
#
# You need chapter 03, sine and cosine, and complex numbers.
#
# Sources: Su et al., *RoFormer* (2021); *Wonderful Matrices* (WM) §3.1, Appendix A and Listing 1;
# *Cheems* (Ch) §3.1; *OTCE* §3.1, Algorithm 4. How to read ✓ and ✗: chapter 00.

# %% tags=["setup"]
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import einsum

from cheems_ref import plotting, ssd
from cheems_ref.linear_attention import delta_rule
from cheems_ref.mamba import selective_scan
from cheems_ref.rope import (
    apply_rope,
    pairing_permutation,
    rope_cos_sin,
    rope_frequencies,
    rotation_matrix,
)
from cheems_ref.verify import check, check_gradients, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# %% [markdown]
# Every token carries a row of clocks. The first hand is fast; the last one barely moves. They start
# at three o'clock and run counterclockwise. Between token 7 and token 12, each hand turns by five
# times its speed (the arcs):


# %% slide_title="Every token carries clocks, from fast to slow" tags=["figure"]
plotting.show_drawing(
    "04_clocks",
    "Two rows of five clock faces, for token 7 and for token 12. Zero is at 3 o'clock. The first "
    "hand turns fastest, the last has hardly moved. In the second row an arc leads from the place "
    "of each hand at token 7 to its place at token 12, and is labelled 5 × speed.",
)

# %% [markdown]
# Between tokens 1,007 and 1,012, each hand turns just as far. That's the whole idea.

# %% [markdown] slide_title="Attention by itself knows nothing about order"
# ## 1 · What we want
#
# *The dog bit the man* and *the man bit the dog* contain the same words. A query compares itself
# with every key by an inner product, which knows nothing about places. Shuffle the keys along with
# their values, and the query reads the same thing:


# %% slide_title="Shuffle keys and values together: the query reads the same"
def attend(query, keys, values):
    """Attention of one query (d,) to keys and values (l, d)."""
    return (keys @ query / math.sqrt(len(query))).softmax(0) @ values


query = random(8, seed=70)
keys, values = random(12, 8, seed=71), random(12, 8, seed=72)
order = torch.randperm(12, generator=torch.Generator().manual_seed(73))
shuffled = attend(query, keys[order], values[order])
check("keys in another order: the same output", shuffled, attend(query, keys, values))

# %% [markdown] slide_title="The inner product should know the distance and nothing else"
# So the query can't tell the two sentences apart. (A stack of *causal* layers can, because the mask
# shows each token only what came before. Models without any encoding, *NoPE*, learn order that
# way.)
#
# In language, distance often matters more than position: adjectives go with the next noun, on page
# 1 or 700. Let's write position $t$ into a query and, independently, position $s$ into a key, so
# that the inner product depends only on contents and the signed distance $t - s$:
#
# $$\langle E_t(q),\; E_s(k) \rangle = G(q, k, t - s). \tag{4.1}$$
#
# *Independently* keeps it cheap: nothing of size $l \times l$ is added. *Only on the distance*
# makes it useful: what the model learns in one place works everywhere.

# %% [markdown] slide_title="Two facts about rotations prove the theorem in one line"
# ## 2 · A rotation in the plane
#
# Which $E_t$ does that? Let's start with vectors of two numbers, and rotate them by an angle
# $\varphi$:
#
# $$R(\varphi) = \begin{bmatrix} \cos\varphi & -\sin\varphi \\ \sin\varphi & \cos\varphi
# \end{bmatrix} \tag{4.2}$$
#
# Rotate twice and the angles add up. Transpose the matrix and it rotates back. These two facts are
# all we need to prove the theorem in one line. Let position $t$ rotate by $t\theta$, and write
# $R_t$ for $R(t\theta)$:
#
# $$\langle R_t\,q,\; R_s\,k \rangle = q^\top R_t^\top R_s\, k = q^\top R_{s-t}\, k. \tag{4.3}$$


# %%
def R(phi):
    """Equation 4.2, (2, 2)."""
    cosine, sine = math.cos(phi), math.sin(phi)
    return torch.tensor([[cosine, -sine], [sine, cosine]])


phi_1, phi_2, vector = 0.7, 2.1, random(2, seed=0)
check("angles add up", R(phi_1) @ R(phi_2), R(phi_1 + phi_2))
check("the transpose rotates back", R(phi_1).T, R(-phi_1))
check("lengths stay", (R(phi_1) @ vector).norm(), vector.norm())
_ = must_differ("rotating back is not rotating forward", R(phi_1).T @ R(phi_2), R(phi_1 + phi_2))

# %% slide_title="Three pairs of positions, three apart: one inner product"
theta = 0.25
q, k = torch.tensor([1.6, 0.5]), torch.tensor([1.2, -0.2])
for t, s in ((4, 1), (9, 6), (15, 12)):
    product = (R(t * theta) @ q) @ (R(s * theta) @ k)
    check(f"positions {t} and {s}: ⟨R_t q, R_s k⟩ = qᵀ R_(s-t) k", product, q @ R(-3 * theta) @ k)
print(f"the inner product at distance 3: {q @ R(-3 * theta) @ k:.4f}, at distance 0: {q @ k:.4f}")

# %% [markdown]
# Think of a pair of compasses. Turn both arms by the same angle, and the angle between them doesn't
# change:


# %% tags=["figure"]
def draw_arms(ax, q, k, t, s, theta):
    """The arms q and k at position 0, faintly, and at positions t and s, with the angle between."""
    for name, vector, position, color in (("q", q, t, 0), ("k", k, s, 1)):
        turned, color = R(position * theta) @ vector, plotting.COLORS[color]
        ax.plot([0, vector[0]], [0, vector[1]], color=color, alpha=0.25)
        ax.plot([0, turned[0]], [0, turned[1]], color=color, marker="o", markevery=[1])
        tip = turned * (1 + 0.36 / turned.norm())
        ax.annotate(f"$R_{{{position}}}{name}$", tip, ha="center", va="center", color=color)
    start, end = torch.atan2(k[1], k[0]) + s * theta, torch.atan2(q[1], q[0]) + t * theta
    arc = torch.linspace(start.item(), end.item(), 30)
    ax.plot(0.5 * arc.cos(), 0.5 * arc.sin(), color=plotting.INK, linewidth=1.2)
    product = (R(t * theta) @ q) @ (R(s * theta) @ k)
    ax.set(xlim=(-2.2, 2.2), ylim=(-2.2, 2.2), aspect="equal")
    ax.set_title(f"t = {t}, s = {s}: product {product:.2f}")


# %% slide_title="Turn both arms alike, and the angle between them stays" tags=["figure"]
fig, axes = plotting.figure(1, 3, size=(12, 4.6))
for ax, t, s in zip(axes, (4, 9, 15), (1, 6, 12), strict=True):
    draw_arms(ax, q, k, t, s, theta)
plotting.save(
    fig,
    "04_turning_pair",
    "Two vectors in the plane at three pairs of positions, each three apart. Both turn as the "
    "positions grow; the angle between them, marked by an arc, and their inner product are the "
    "same in all three pictures. The vectors at position 0 are drawn faintly.",
    stages=[[ax] for ax in axes[1:]],
)

# %% [markdown] slide_title="A quarter turn tells R of s − t from R of t − s"
# Here's a surprise. The appendices of OTCE and WM prove this in about thirteen lines, and arrive at
# $R_{t-s}$ where (4.3) has $R_{s-t}$. Who's right? Try $q = (1, 0)$ and $k = (0, 1)$ with
# $(t - s)\theta$ a quarter turn:
#
# $$\langle R_t\,q,\; R_s\,k \rangle = q^\top R_{s-t}\,k = 1, \qquad q^\top R_{t-s}\,k = -1.$$
#
# (A test with $q = k$ would have missed it.) The page
# [04a](reference/04a_refereeing_a_proof.ipynb), home of equations 4.4 to 4.6, tracks down the line
# where the sign goes wrong.

# %% [markdown] slide_title="Fast pairs tell neighbours apart, slow pairs near from far"
# ## 3 · Many wheels
#
# A single pair isn't enough. With $\theta = 1$, the pair has made almost exactly seven turns after
# 44 tokens, so it can hardly tell a distance of 44 from 0. The fix is to cut a vector of width $d$
# into $d/2$ pairs and give each its own speed:
#
# $$\theta_i = \text{base}^{-2i/d}, \qquad i = 0, 1, \dots, d/2 - 1. \tag{4.7}$$
#
# The inner product is a sum over the pairs, so (4.3) holds for the whole vector:

# %% slide_figure="04_clocks"
by_formula = torch.tensor([10_000.0 ** (-2 * i / 8) for i in range(4)])
check("equation 4.7 = rope_frequencies", rope_frequencies(8), by_formula)
for dim, base in ((64, 10_000.0), (64, 500_000.0), (8, 10_000.0), (8, 100.0)):
    rounds = 2 * math.pi / rope_frequencies(dim, base)  # in tokens
    print(f"d {dim:2}, base {base:7,.0f}: the first pair makes a full turn in"
          f" {rounds[0]:.1f} tokens, the last in {rounds[-1]:9,.0f}")  # fmt: skip

# %% [markdown]
# The first pair tells neighbours apart; the last one tells near from far. Longer contexts go with
# larger bases: Llama 2 had 10,000 for 4,096 tokens, Llama 3 has 500,000 for 8,192. Why? A key equal
# to the query, with length 1 in every pair, has the score $\sum_i \cos \delta\theta_i$, where a
# random key has 0 on average. At Llama's width, 128, that sum first falls below 0 at distance 1,707
# with base 10,000, at 18,438 with 500,000 (Men et al., 2024). From there on, a perfect match can
# score worse than a random key. Llama 2 read past its 1,707; Llama 3 stays below its 18,438.

# %% tags=["guard"]
for base, want in ((10_000.0, 1707), (500_000.0, 18_438)):
    turned = torch.arange(20_000.0)[:, None] * rope_frequencies(128, base)
    assert (turned.cos().sum(1) < 0).nonzero()[0].item() == want

# %% [markdown]
# In code, a rotation is "cosine times the vector, plus sine times the vector a quarter turn ahead".
# The quarter turn takes $(x_1, x_2)$ to $(-x_2, x_1)$. Put the first members of all pairs into the
# first half of the vector, and that's a single line:


# %% slide_title="A rotation is cosine times x plus sine times a quarter turn"
def turn_halves(x, angles):
    """Turn pairs (x[i], x[i + d/2]) by angles[i], (..., d/2)."""
    first, second = x.chunk(2, dim=-1)
    quarter_turn = torch.cat([-second, first], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)  # (..., d)
    return angles.cos() * x + angles.sin() * quarter_turn


# %% slide_title="Two steps at a right angle reach the turned vector" tags=["figure", "slide"]
plotting.show_drawing(
    "04_quarter_turn",
    "A vector x, the same vector a quarter turn ahead, and x turned by an angle. The way to the "
    "turned vector goes along x by the cosine, then along the quarter turn by the sine.",
)

# %% [markdown]
# The package's `apply_rope` does the same. We check it up to position 99,999:

# %% slide_title="The package turns vectors in the same way"
dim = 8
x = random(2, 6, 3, dim, seed=2)  # (b, l, h, d)
# Gaps between positions are fine.
positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 7, 8, 9, 99_999]])
angles = positions[:, :, None, None] * rope_frequencies(dim)

cosine, sine = rope_cos_sin(positions, dim, dtype=torch.float64)
turned = apply_rope(x, cosine, sine)
check("apply_rope = turn_halves", turned, turn_halves(x, angles), tol=1e-12)
_ = must_differ("turned the other way", turn_halves(x, -angles), turned)
check("position 0 changes nothing", turned[:, 0], x[:, 0])
check("no vector changes its length", turned.norm(dim=-1), x.norm(dim=-1))

# %% tags=["guard"]
matrices = torch.stack([rotation_matrix(int(t), dim) for t in positions.flatten()])
by_matrix = einsum("tij,thj->thi", matrices, x.flatten(0, 1))  # t runs over both rows
check("apply_rope = rotation matrices", turned.flatten(0, 1), by_matrix, tol=1e-12)

x_hat = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * angles)
by_complex = torch.cat([x_hat.real, x_hat.imag], dim=-1)
check("apply_rope = complex exponentials", turned, by_complex, tol=1e-12)

# %% [markdown] slide_title="Halves or neighbours: trained weights depend on the pairing"
# ### Which coordinates form a pair?
#
# There are two conventions. The papers' formulas and Meta's own Llama code pair neighbours: 0 with
# 1, 2 with 3 (*interleaved*). The papers' listings and Llama in `transformers` pair $i$ with
# $i + d/2$ (*half*), as we just did. If $P$ is the permutation that sorts even coordinates before
# odd ones, then
#
# $$R^{\text{half}} = P\,R^{\text{interleaved}}\,P^\top. \tag{4.8}$$


# %% tags=["figure"]
def draw_pairings(ax):
    """Eight coordinates by both conventions, with an arc over each pair."""
    both = {"interleaved": lambda i: i // 2, "half": lambda i: i % 4}
    for y, (name, pair) in zip((2.4, 0.0), both.items(), strict=True):
        ax.text(-0.3, y, name, ha="right", va="center", fontsize=18)
        for i in range(8):
            color = plotting.COLORS[pair(i)]
            box = dict(boxstyle="square,pad=0.4", fc=color, ec="white", alpha=0.6)
            ax.text(i + 0.5, y, i, ha="center", va="center", bbox=box, fontsize=16)
        for i, j in [(i, i + d) for d in (1, 4) for i in range(8 - d) if pair(i) == pair(i + d)]:
            x, high = torch.linspace(-1, 1, 40), 0.4 + 0.12 * i * (j - i > 1)
            arc = y + 0.55 + high * (1 - x**2)
            ax.plot((i + j + 1) / 2 + x * (j - i) / 2, arc, color=plotting.COLORS[pair(i)], lw=3)


# %% slide_title="The same eight numbers, paired in two ways" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(9, 3.6))
draw_pairings(ax)
ax.set(xlim=(-2.2, 8.2), ylim=(-0.6, 3.7), xticks=[], yticks=[])
ax.spines[:].set_visible(False)
plotting.save(
    fig,
    "04_pairings",
    "Two rows of coordinates 0 to 7, a colour and an arc for each pair. Interleaved: 0 and 1, 2 "
    "and 3, 4 and 5, 6 and 7. Half: 0 and 4, 1 and 5, 2 and 6, 3 and 7.",
)

# %%
dim = 8
P = torch.eye(dim)[pairing_permutation(dim)]
half = rotation_matrix(7, dim, base=100.0)
interleaved = rotation_matrix(7, dim, base=100.0, pairing="interleaved")
check("half = P interleaved Pᵀ", half, P @ interleaved @ P.T, tol=1e-14)

q, k = random(2, dim, seed=3)
reader, writer = (rotation_matrix(t, dim, pairing="interleaved") for t in (9, 3))
trained = (reader @ q) @ (writer @ k)
permuted = (rotation_matrix(9, dim) @ P @ q) @ (rotation_matrix(3, dim) @ P @ k)
unchanged = (rotation_matrix(9, dim) @ q) @ (rotation_matrix(3, dim) @ k)
check("interleaved weights, permuted, rotated as halves: same score", permuted, trained)
_ = must_differ("interleaved weights, not permuted, rotated as halves", unchanged, trained)

# %% [markdown]
# If you run weights trained with one convention under the other, the scores change and nothing
# warns you. The script that converts Llama's weights for `transformers` applies this permutation
# (to the rows of $W$, since $q = Wx$).

# %% [markdown] slide_title="Same content, rotated: scores depend on the distance alone"
# ## 4 · Attention: scores that know the distance
#
# Our sequences are short, so from here on we'll use base 100 instead of the usual 10,000. Give
# every token the *same* query and key. Without rotations, all scores are equal. With them (`scores`
# applies them, and there's no mask yet), a score depends on $t - s$ alone, so the matrix is
# constant along its diagonals (a *Toeplitz* matrix):


# %%
def scores(q, k, positions):
    """Inner products of turned queries and keys: (l, d), (l, d), (l,) -> (l, l)."""
    cosine, sine = rope_cos_sin(positions[None], q.shape[-1], base=100.0, dtype=q.dtype)
    q = apply_rope(q[None, :, None], cosine, sine)[0, :, 0]  # as (b, l, h, d) and back
    k = apply_rope(k[None, :, None], cosine, sine)[0, :, 0]
    return q @ k.T


# %% slide_title="One number stands along each diagonal" slide_figure="04_toeplitz"
l, dim = 48, 16
q, k = random(2, l, dim, seed=4)
same_q, same_k = q[:1].expand(l, dim), k[:1].expand(l, dim)
positions = torch.arange(l)

flat, toeplitz = same_q @ same_k.T, scores(same_q, same_k, positions)
assert (flat - flat[0, 0]).abs().max() < 1e-12
diagonals = [toeplitz.diagonal(offset) for offset in range(-l + 1, l)]
assert max((line - line[0]).abs().max() for line in diagonals) < 1e-12
print(f"same content, unrotated: {flat[0, 0]:.3f} everywhere")
print(f"rotated: one number along each of the {len(diagonals)} diagonals,"
      f" from {toeplitz.min():.3f} to {toeplitz.max():.3f}")  # fmt: skip

# %% [markdown]
# Now let the contents differ. Shift all positions by the same amount, and still nothing changes:

# %% slide_title="A shift of all positions changes nothing, a gap does"
mixed = scores(q, k, positions)
check("different contents: all positions shifted by 1,000", scores(q, k, positions + 1000), mixed)
with_gap = positions + 8 * (positions >= 24)
_ = must_differ("a gap of 8 in the middle", scores(q, k, with_gap), mixed)
_ = must_differ("positions left out", q @ k.T, mixed)

# %% tags=["guard"]
_ = must_differ("different contents: not Toeplitz", mixed.diagonal()[1:], mixed.diagonal()[:-1])

# %% [markdown]
# With different contents, the stripes disappear:

# %% slide_title="With different contents, the stripes disappear" tags=["figure"]
pictures = {
    "same content, unrotated": flat,
    "same content, rotated": toeplitz,
    "different contents, rotated": mixed,
}
fig, _ = plotting.heatmaps(pictures, xlabel="key s", ylabel="query t", limit=8.0)
plotting.save(
    fig,
    "04_toeplitz",
    "Three score matrices of 48 tokens. Same content, unrotated: one flat colour. Same "
    "content, rotated: stripes parallel to the diagonal. Different contents, rotated: no stripes.",
)

# %% [markdown] slide_title="SSD inherits the theorem, because its decay is one number"
# ## 5 · The same for C and B inside SSD
#
# In chapter 03 the output of SSD was $y_t = \sum_{s \le t} L_{ts}\,(C_t \cdot B_s)\,\Delta_s x_s$.
# The decay $L_{ts}$ is *a single number*, so it doesn't get in the way of the inner product. Rotate
# $C_t$ by $R_t$ and $B_s$ by $R_s$:
#
# $$y_t = \sum_{s \le t} L_{ts}\,\langle R_t C_t,\; R_s B_s\rangle\,\Delta_s x_s
#       = \sum_{s \le t} L_{ts}\,\big(C_t^\top R_{s-t}\,B_s\big)\,\Delta_s x_s. \tag{4.9}$$
#
# Only the difference of the positions is left:


# %% tags=["setup"]
def inputs(b=2, l=40, h=4, p=5, g=2, n=8, dt=0.1, seed=10):
    """Random x (b, l, h, p), step sizes (b, l, h) around dt, A (h,), B and C (b, l, g, n)."""
    x = random(b, l, h, p, seed=seed)
    step_sizes = dt * random(b, l, h, seed=seed + 1).abs()
    A = -1.0 - 7.0 * torch.arange(h) / max(h - 1, 1)
    B, C = random(b, l, g, n, seed=seed + 2), random(b, l, g, n, seed=seed + 3)
    return x, step_sizes, A, B, C


def turn_at(vectors, positions, base=100.0):
    """Turn the vectors (b, l, g, n) of tokens at positions (l,), the same in every row."""
    ids = positions.expand(vectors.shape[:2])
    cosine, sine = rope_cos_sin(ids, vectors.shape[-1], base, dtype=vectors.dtype)
    return apply_rope(vectors, cosine, sine)


def rotary(function, offset=0):
    """A form of SSD with C and B turned by their positions, counted from offset."""

    def run(x, dt, A, B, C):
        positions = offset + torch.arange(x.shape[1])
        return function(x, dt, A, turn_at(B, positions), turn_at(C, positions), chunk_size=16)

    return run


# %%
x, dt, A, B, C = inputs()
positions = torch.arange(40)
M = ssd.semiseparable_matrix(dt, A, turn_at(B, positions), turn_at(C, positions))  # (b, h, t, s)
for t, s in ((30, 30), (30, 12), (7, 0)):
    L = (A[3] * dt[0, s + 1 : t + 1, 3].sum()).exp()
    inner = C[0, t, 1] @ rotation_matrix(s - t, 8, 100.0) @ B[0, s, 1]
    check(f"M[{t}, {s}] = L · Cᵀ R_(s-t) B · Δ", M[0, 3, t, s], L * inner * dt[0, s, 3])

# %% [markdown]
# Since C and B are rotated *before* SSD sees them (by `rotary`), all forms of SSD work unchanged:

# %% slide_title="All forms of SSD work unchanged with rotated B and C"
y = rotary(ssd.ssd_recurrent)(x, dt, A, B, C)
check("quadratic = recurrence, with rotations", rotary(ssd.ssd_quadratic)(x, dt, A, B, C), y)
check("chunked = recurrence, with rotations", rotary(ssd.ssd_chunked)(x, dt, A, B, C), y)

# %% tags=["guard"]
_ = must_differ("only B turned", ssd.ssd_recurrent(x, dt, A, turn_at(B, positions), C), y)
_ = must_differ("nothing turned", ssd.ssd_recurrent(x, dt, A, B, C), y)
forms = rotary(ssd.ssd_chunked), rotary(ssd.ssd_recurrent)
check_gradients("chunked = recurrence, with rotations", *forms, inputs())

# %% [markdown]
# Now shift the whole text by 1, by 1,000 or by 100,000 positions, and the output stays the same:

# %%
for offset in (1, 1_000, 100_000):
    moved = rotary(ssd.ssd_recurrent, offset)(x, dt, A, B, C)
    check(f"moved by {offset:7,}: same output, recurrence", moved, y)

# %% tags=["guard"]
moved = rotary(ssd.ssd_chunked, 100_000)(x, dt, A, B, C)
check("moved by 100,000: same output, chunked", moved, y)
_ = must_differ("B itself, rotated, does change", turn_at(B, positions + 1), turn_at(B, positions))
with_gap = positions + 3 * (positions >= 20)
gap = ssd.ssd_recurrent(x, dt, A, turn_at(B, with_gap), turn_at(C, with_gap))
_ = must_differ("a gap of three positions in the middle", gap, y)

# %% [markdown]
# Is rotary SSD new? Give every token the same step size. The decay per token is then a constant
# $\gamma$, and (4.9) is the *retention* of RetNet (Sun et al., 2023): complex queries and keys that
# turn with their positions, and a mask of powers of $\gamma$. (For one pair, $\mathrm{Re}(q \bar
# k)$ is the inner product.) In its own notation, with $\Delta = 1$:


# %%
def retention(q, k, v, gamma, theta):
    """RetNet's retention, without its norm: q, k (l, n), v (l, p), theta (n/2,)."""
    t = torch.arange(len(q))
    turn = torch.exp(1j * t[:, None] * theta)
    Q, K = (torch.complex(*u.chunk(2, dim=-1)) * turn for u in (q, k))
    return ((Q @ K.conj().T).real * (gamma ** (t[:, None] - t)).tril()) @ v


q, k, v = random(40, 8, seed=20), random(40, 8, seed=21), random(40, 5, seed=22)
constant = torch.ones(1, 40, 1), torch.tensor([math.log(0.9)])  # dt and A: a decay of 0.9 per token
Q, K = (turn_at(u[None, :, None], torch.arange(40)) for u in (q, k))
y = ssd.ssd_recurrent(v[None, :, None], *constant, K, Q)[0, :, 0]
check("RetNet's retention = rotary SSD", y, retention(q, k, v, 0.9, rope_frequencies(8, 100.0)))

# %% [markdown]
# Not entirely. *Wonderful Matrices* adds the step size, so each token decides how much
# fades.
#
# (How far can you count in bfloat16? Lab [04b](labs/04b_longer_than_trained.ipynb).)

# %% [markdown] slide_title="The output knows distances, the cache knows positions"
# ## 6 · The cache knows absolute positions
#
# The *output* depends on distances. The stored *state* depends on absolute positions: it holds
# $\sum_s L_{ts}\,\Delta_s x_s\,(R_s B_s)^\top$, writes that were rotated by their own positions. So
# when you continue a text, keep counting. What if you don't? We'll try it with the package's layer,
# `SSD`: linear projections around (3.4), with a cache for decoding, and the usual base of 10,000.

# %%
_ = torch.manual_seed(0)
layer = ssd.SSD(32, n_heads=4, n_groups=2, d_state=16, position="rope").requires_grad_(False)
_ = layer.D.zero_()  # no skip connection: what comes out comes from the state
text, positions = random(1, 60, 32, seed=20), torch.arange(60)[None]

whole, _ = layer(text, positions)
_, cache = layer(text[:, :40], positions[:, :40])
rest, _ = layer(text[:, 40:], positions[:, 40:], cache=cache)
check("40 tokens, then 20 with their own positions = one pass", rest, whole[:, 40:])

# %% [markdown]
# Now start again at 0, behind the cache of 40 tokens:

# %% tags=["aside"]
restarted, _ = layer(text[:, 40:], positions[:, :20], cache=cache)
_ = must_differ("positions started again at 0", restarted, rest, at_least=0.02)
texts, places = random(40, 60, 32, seed=20), positions.expand(40, -1)
_, cache = layer(texts[:, :40], places[:, :40])
rest, _ = layer(texts[:, 40:], places[:, 40:], cache=cache)
restarted, _ = layer(texts[:, 40:], places[:, :20], cache=cache)
error = ((restarted - rest).norm(dim=-1) / rest.norm(dim=-1)).mean(0)
print(f"restarted at 0: relative error {error[0]:.2f} for the first token, {error[-1]:.2f} for the"
      " twentieth, a mean of 40 texts")  # fmt: skip

# %% slide_title="Start to count again at 0, and old tokens are misjudged" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(10, 4.2))
ax.bar(range(40, 60), error, color=plotting.COLORS[1])
ax.set(xlabel="token, after a cache of 40", ylabel="relative error", xticks=range(40, 60, 4))
plotting.save(
    fig,
    "04_restarted",
    "The relative error of the outputs at tokens 40 to 59 if positions start again at 0, a mean of "
    "40 texts. It falls from 0.8 for the first to below 0.1 for the last.",
)

# %% [markdown]
# The error shrinks because the cached writes fade, and only they are
# misjudged. Distances within the new part are still right, but every distance to the first 40
# tokens is 40 too small. So pair $i$ is off by $40\,\theta_i$, less any full turns. For the four
# slowest of the eight pairs that's at most 0.4 radians. Three of the fast ones are off by more than
# 1.

# %% tags=["guard"]
assert 0.75 < error[0] < 0.85 and error[:5].diff().max() < 0 and error[-5:].max() < 0.11
off = 40 * rope_frequencies(16)
off = (off + math.pi) % (2 * math.pi) - math.pi  # less full turns
assert off[[0, 2, 3]].abs().min() > 1 and 0.08 < off[1] < 0.09 and 0 < off[4:].max() < 0.401

# %% [markdown] slide_title="Seen by the reader, the state itself turns"
# ## 7 · The state that turns
#
# You can also see rotary SSD without absolute positions, from the reader's side: $\tilde h_t = h_t
# R_t$. Then $y_t = h_t R_t C_t = \tilde h_t C_t$, and with the decay $\alpha_t = e^{\Delta_t A}$
#
# $$\tilde h_t = \big(\alpha_t\, h_{t-1} + \Delta_t x_t B_t^\top R_t^\top\big) R_t
#   = \alpha_t\,\tilde h_{t-1}\,R_1 + \Delta_t\, x_t B_t^\top, \qquad y_t = \tilde h_t\, C_t.
#   \tag{4.10}$$
#
# (Use $h_{t-1} R_t = h_{t-1} R_{t-1} R_1$.) Here $R_1$ acts on the *rows* of the state. A row $r$
# becomes $rR_1$, and $(rR_1)^\top = R_1^\top r^\top$: a turn backwards, since older writes fall
# behind the reader. Hence the minus in the code:


# %% slide_figure="04_turning_state"
def turning_state(x, dt, A, B, C, angles):
    """Equation 4.10; at each token the pairs of the state turn by angles, (n/2,)."""
    heads = x.shape[2] // B.shape[2]  # in each group
    B, C = B.repeat_interleave(heads, dim=2), C.repeat_interleave(heads, dim=2)  # (b, l, h, n)
    decay = torch.exp(dt * A)[..., None, None]  # (b, l, h, 1, 1)
    state, outputs = torch.zeros(*x[:, 0].shape, B.shape[-1]), []  # (b, h, p, n)
    for t in range(x.shape[1]):
        write = einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        state = decay[:, t] * turn_halves(state, -angles) + write
        outputs.append(einsum("bhpn,bhn->bhp", state, C[:, t]))
    return torch.stack(outputs, 1)


# %%
x, dt, A, B, C = inputs()
reference = rotary(ssd.ssd_recurrent)(x, dt, A, B, C)
theta = rope_frequencies(8, 100.0)
check("state that turns = C and B that turn", turning_state(x, dt, A, B, C, theta), reference)

# %% tags=["guard"]
other_way = turning_state(x, dt, A, B, C, -theta)
still = turning_state(x, dt, A, B, C, 0 * theta)
_ = must_differ("state turned the other way", other_way, reference)
_ = must_differ("state that does not turn", still, reference)

# %% [markdown]
# C and B aren't rotated now: the *state* turns one step with every token while it decays.
#
# Read each pair of the state as one complex number, and a turn is multiplication by
# $e^{-\mathtt{i}\theta_i}$. So rotary SSD is a state space model with the complex decay
# $\alpha_t\,e^{-\mathtt{i}\theta_i}$. Chapter 01's complex states could hold a fading tone. Mamba's
# real decays gave that up, and rotations bring it back. Follow a single write, with a decay of 0.96
# per token:

# %% tags=["setup"]
paths = {}
for name, phi in (("decay only", 0.0), ("decay, slow turn", 0.15), ("decay, fast turn", 0.8)):
    paths[name] = torch.exp((math.log(0.96) - 1j * phi) * torch.arange(61))
    rounds = 60 * phi / (2 * math.pi)
    print(f"{name:16}: after 60 tokens {rounds:.2f} turns, length {paths[name][-1].abs():.3f}")
assert paths["decay only"].imag.abs().max() == 0

# %% [markdown]
# All three fade alike, but with a turn they spiral in:


# %% tags=["figure"]
def draw_path(ax, path, title):
    """One write in the complex plane over time, marked after 0, 10 and 30 tokens."""
    ax.plot(path.real, path.imag, color=plotting.QUIET, linewidth=1)
    for after, color, marker in ((0, 0, "o"), (10, 1, "s"), (30, 2, "^")):
        name = f"after {after} tokens" if after else "written"
        point = dict(marker=marker, color=plotting.COLORS[color], markersize=10, linestyle="")
        ax.plot(path[after].real, path[after].imag, label=name, **point)
    ax.axhline(0, color=plotting.QUIET, linewidth=0.6)
    ax.axvline(0, color=plotting.QUIET, linewidth=0.6)
    ax.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", title=title)


# %% slide_title="With a turn, a fading write spirals in" tags=["figure"]
fig, axes = plotting.figure(1, 3, size=(12, 4.4))
for ax, (title, path) in zip(axes, paths.items(), strict=True):
    draw_path(ax, path, title)
axes[0].legend(loc="lower left", fontsize=12)
plotting.save(
    fig,
    "04_turning_state",
    "The path of one write in the complex plane over 60 tokens, marked after 0, 10 and 30 tokens. "
    "With decay only it slides along a line towards the origin; with a slow turn it spirals in, "
    "about one and a half turns; with a fast turn, more than seven turns.",
)

# %% [markdown]
# One thing is lost. In chapter 01 the whole exponent was $\Delta_t \lambda$, so a step size of 0
# froze the state, turn and all. Here the angle knows nothing of $\Delta$. Leave out a token whose
# step size is 0: it writes nothing and lets nothing fade. Does any later output
# change?


# %% tags=["setup"]
def left_out(tokens, dropped):
    """The outputs after token `dropped`, with it and without it: two (b, l, h, p)."""
    kept = [i for i in range(40) if i != dropped]
    for function in (ssd.ssd_recurrent, rotary(ssd.ssd_recurrent)):
        with_it = function(*tokens)[:, dropped + 1 :]
        x, dt, A, B, C = tokens
        without = function(x[:, kept], dt[:, kept], A, B[:, kept], C[:, kept])[:, dropped:]
        yield with_it, without


x, dt, A, B, C = inputs()
dt[:, 10] = 0
(with_it, without), (turned, turned_without) = left_out((x, dt, A, B, C), 10)
check("decay only: a token with Δ = 0 was never there", with_it, without)
_ = must_differ("with rotations", turned, turned_without, at_least=0.01)
change = (turned - turned_without).norm() / turned.norm()
print(f"with rotations: norm of the change / norm of the output {change:.2f}")

# %% [markdown]
# The valve of chapter 01 closes, but the clocks don't stop. Padding stays harmless, because padded
# positions aren't counted (counting begins at the first real token). A token in the middle of a
# text can't be skipped any more: it makes everything before it one token older. Mamba-3's angle
# contains $\Delta_t$, so its clocks also stop. Exercise 4 builds such clocks.

# %% [markdown] slide_title="A diagonal decay doesn't commute with rotations"
# ## 8 · Where the theorem fails
#
# In (4.9) we could pull out the decay because there's just one per head. OTCE's Algorithm 4 rotates
# B and C in Mamba's scan, where *each* entry of the state has its own rate: $h_{t,i} = e^{\Delta_t
# A_i} h_{t-1,i} + \Delta_t B_{t,i} x_t$. That puts a diagonal matrix between the two rotations,
# with $\tau = \Delta_{s+1} + \dots + \Delta_t$:
#
# $$C_t^\top R_t^\top\, \Lambda\, R_s\, B_s, \qquad
#   \Lambda = \mathrm{diag}(e^{A_1\tau}, \dots, e^{A_n\tau}). \tag{4.11}$$
#
# Put $t = s + \delta$, so $R_t^\top = R_\delta^\top R_s^\top$. When the text moves, $\tau$ and
# $\Lambda$ stay, and all of $s$ sits in the bracket of $C_t^\top R_\delta^\top\,(R_s^\top \Lambda
# R_s)\,B_s$. It disappears exactly if $\Lambda$ commutes with $R_s$. For one pair, $\Lambda
# R(\varphi) - R(\varphi)\Lambda$ is $(\Lambda_2 - \Lambda_1)\sin\varphi$ times an exchange of both
# entries. That's zero at every angle only if the two rates are equal. So the theorem needs rates
# that are *equal within each pair that turns together*, as they are with one decay per head. Let's
# move a text and see:


# %%
def rotary_scan(offset, x, dt, A, B, C):
    """Mamba's scan, one channel, positions from offset: x, dt (1, l, 1), A (n,), B, C (1, l, n)."""
    positions = offset + torch.arange(x.shape[1])
    B = turn_at(B[:, :, None], positions)[:, :, 0]  # as one group, and back
    C = turn_at(C[:, :, None], positions)[:, :, 0]
    return selective_scan(x, dt, A[None], B, C)


# %%
x, dt = random(1, 40, 1, seed=41), 0.1 * random(1, 40, 1, seed=42).abs()
B, C = random(1, 40, 8, seed=43), random(1, 40, 8, seed=44)
per_state = -torch.arange(1.0, 9.0)  # as Mamba-1 starts
tied = -torch.arange(1.0, 5.0).repeat(2)  # equal in entries i and i + n/2
for offset in (1, 50, 1000):
    y, moved = rotary_scan(0, x, dt, tied, B, C), rotary_scan(offset, x, dt, tied, B, C)
    check(f"A tied in pairs, moved by {offset}", moved, y)
    y, moved = rotary_scan(0, x, dt, per_state, B, C), rotary_scan(offset, x, dt, per_state, B, C)
    _ = must_differ(f"A per state, moved by {offset}", moved, y, at_least=0.01)
    change = (moved - y).norm() / y.norm()
    print(f"A per state, moved by {offset}: norm of the change / norm of the output {change:.2f}")

# %% slide_title="With two rates, the order of fade and turn matters" tags=["figure", "slide"]
plotting.show_drawing(
    "04_two_orders",
    "A vector that is turned and then faded, and faded and then turned. With equal rates both ways "
    "end at the same point; with a rate for each entry they end at two.",
)

# %% [markdown]
# With a rate per entry, moving this text by a single position changes the output by 41 %.

# %% tags=["guard"]
Lambda = torch.diag(torch.tensor([0.3, 0.8]))
right = (0.8 - 0.3) * math.sin(0.7) * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
check("Λ R - R Λ = (Λ₂ - Λ₁) sin φ times an exchange", Lambda @ R(0.7) - R(0.7) @ Lambda, right)
neighbours = -torch.arange(1.0, 5.0).repeat_interleave(2)
y, moved = rotary_scan(0, x, dt, neighbours, B, C), rotary_scan(7, x, dt, neighbours, B, C)
_ = must_differ("A tied for the other pairing, moved by 7", moved, y, at_least=0.01)
print(f"norm of the change / norm of the output {(moved - y).norm() / y.norm():.2f}")

# %% [markdown] slide_title="What a state can do in one step depends on its transition"
# What can a state do in one step? Here are the four transitions that you've seen:
#
# | transition | who has it | it can | it can't |
# |---|---|---|---|
# | $\alpha_t$, a number | Mamba-2 | fade | change a sign |
# | a diagonal | Mamba, GLA | fade at many rates | change a sign |
# | a number times a turn | RetNet, Cheems, Mamba-3 | tell distances | mix pairs |
# | $I - \beta_t k_t k_t^\top$ | DeltaNet | erase one key | be scanned cheaply |
#
# One question divides this table in two: is the number of ones odd? Rows one and two can't count
# that: a decay in $[0, 1]$ never changes a sign, and in finite precision no stack of such layers
# counts parity at every length. Rows three and four can, if the token sets the angle or $\beta$
# reaches 2: half a turn is a factor of −1, and so is a mirror. (Lab
# [04c](labs/04c_state_tracking.ipynb) has the proof.) One number of state is enough for either:

# %% tags=["aside"]
bits = torch.randint(2, (300,), generator=torch.Generator().manual_seed(0)).double()
odd = bits.cumsum(0) % 2 == 1
one, start = torch.ones(1, 300, 1, 1), torch.ones(1, 1, 1, 1)
beta = 2 * bits[None, :, None]
mirror = delta_rule(one, one, 0 * one, beta, initial_state=start)  # S ← (1 - β) S
half_turn = torch.exp(1j * math.pi * bits).cumprod(0).real
for name, state in (("a mirror per 1, β = 2", mirror.flatten()), ("half a turn per 1", half_turn)):
    assert torch.equal(state < 0, odd)
    print(f"{name}: parity of all 300 prefixes is right")

# %% slide_title="A mirror or half a turn counts parity, a decay can't" tags=["figure", "slide"]
plotting.show_drawing(
    "04_parity",
    "The state after the bits 1, 1, 0 and 1, from 1 on, for three rules. A mirror per 1 flips the "
    "state from 1 to -1 and back. Half a turn per 1 takes it there along a circle. A decay per 1 "
    "only brings it closer to 0, and never to the other side.",
)

# %% [markdown]
# Mamba-3's tokens set their angles. Those of RetNet and Cheems are the same for a 0 and a 1.
# DeltaNet's $\beta$ is a sigmoid: as published, it never mirrors. Grazzi et al. let $\beta$ go up
# to 2.

# %% [markdown] slide_title="Decay, a convolution and rotations all tell order"
# ## 9 · Three sources of position
#
# A recurrence can tell order even without rotations, because old tokens have faded more than new
# ones. And Mamba-2 has a short convolution, which mixes the last four tokens. Do we need rotations
# at all?
#
# Here's a task where nothing matters but the distance: in a row of random tokens, name the token
# $\delta$ places back. The model is an embedding, one SSD layer and a linear map. We train a fresh
# one for each $\delta$: three seeds each, 300 steps, base 100 (`python -m experiments
# 04_three_sources`; `train_to_look_back("rope", 8, 300)` trains one). Which source reaches
# furthest, and which is best at distance 4?


# %% tags=["setup", "experiment"]
def look_back_model(position, d_conv=4, vocabulary=16):
    """Embedding, SSD layer, linear map, in float32."""
    options = dict(position=position, d_conv=d_conv, rope_base=100.0)
    parts = {
        "embedding": torch.nn.Embedding(vocabulary, 32),
        "mixer": ssd.SSD(32, n_heads=4, d_state=32, **options),
        "head": torch.nn.Linear(32, vocabulary, bias=False),
    }
    return torch.nn.ModuleDict(parts).float()


def look_back_batch(model, lag, texts, generator, length=64):
    """Random texts through the model: logits from token `lag` on, and the tokens to be named."""
    ids = torch.randint(model["embedding"].num_embeddings, (texts, length), generator=generator)
    positions = torch.arange(length).expand(texts, -1)
    y, _ = model["mixer"](model["embedding"](ids), positions)
    return model["head"](y)[:, lag:], ids[:, : length - lag]


# %% tags=["setup", "experiment"]
def train_to_look_back(position, lag, steps, seed=0, d_conv=4):
    """Train to name the token `lag` places back: share named right in new texts, and the model."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = look_back_model(position, d_conv)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        logits, targets = look_back_batch(model, lag, 16, generator)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logits, targets = look_back_batch(model, lag, 64, generator)
    return (logits.argmax(-1) == targets).float().mean().item(), model


# %% [markdown]
# Here are the medians. The last row is a rule: name the most frequent token so far.

# %% tags=["setup"]
record = json.loads(Path("../experiments/records/04_three_sources.json").read_text())
lags, accuracy = record["lags"], record["accuracy"]
ids = torch.randint(16, (4000, 64), generator=torch.Generator().manual_seed(74))
most = F.one_hot(ids, 16).cumsum(1).argmax(-1)  # the most frequent token so far
found = [(most[:, lag:] == ids[:, : 64 - lag]).double().mean().item() for lag in lags]
accuracy["most frequent"] = found
words = dict(rope="rotations", conv="convolution", decay="decay alone")
by_source = {words.get(name, name): shares for name, shares in accuracy.items()}
at = {position: dict(zip(lags, shares, strict=True)) for position, shares in accuracy.items()}
ahead = [lag for lag in lags if at["conv"][lag] > at["rope"][lag]]

reach = json.loads(Path("../experiments/records/04_reach.json").read_text())
by_row = {}
for run in reach["runs"]:
    by_row.setdefault((run["position"], run["d_conv"], run["lag"]), []).append(run)
by_offset = {f"distance {lag}": by_row["conv", 4, lag][0]["scores"] for lag in (6, 7)}

# %% tags=["aside"]
print(f"{'distance':14}" + "".join(f"{lag:6}" for lag in lags))
for position, shares in accuracy.items():
    print(f"{position:14}" + "".join(f"{share:6.2f}" for share in shares))
print("the convolution is ahead of rope at the lags", ahead)
assert ahead == [2, 3, 4, 5, 6]

# %% tags=["guard"]
assert at["rope"][1] == 1 and at["rope"][8] > 0.7 and 0.55 < at["rope"][24] < 0.65
assert min(at["conv"][lag] for lag in range(1, 7)) > 0.9 and 0.6 < at["conv"][7] < 0.7
assert max(at["conv"][lag] for lag in lags if lag >= 8) < 0.3
assert at["decay"][1] == 1 and all(0.13 < at["decay"][lag] < 0.26 for lag in lags if lag > 1)
over = [at["decay"][lag] - at["most frequent"][lag] for lag in lags if lag > 1]
assert over[0] == max(over) < 0.1 and -0.01 < over[-1] < 0.01

# %% [markdown]
# Rotations reach furthest, but the convolution is *ahead* of them from distance 2 to 6. How can
# four tokens reach back seven? On the right is the score $C_t \cdot B_s$ of two models, by the
# offset from query to write. The one trained for distance 6 looks for the write three back: query
# and write share token $t - 3$, and that write also holds token $t - 6$. For distance 7 no such
# write exists.

# %% slide_title="At distance 7 it finds the newest write that shares nothing" tags=["figure"]
fig, (left, right) = plotting.figure(1, 2, size=(13, 4.4))
plotting.lines(left, lags, by_source, xlabel="distance δ in tokens", ylabel="accuracy", marker="o")
left.set(ylim=(0, 1.05), title="after 300 steps")
plotting.lines(right, reach["offsets"], by_offset, xlabel="offset from query to write", marker="o")
right.set(title="convolution of 4: C · B")
plotting.save(
    fig,
    "04_three_sources",
    "Left: accuracy after 300 steps against the distance, for three sources of position. Rotations "
    "fall from 1 at distance 1 to about 0.6 at 24; the convolution is above 0.9 up to 6, about "
    "0.65 at 7 and below 0.3 from 8 on; decay alone is 1 at distance 1 and below 0.26 from 2 on, "
    "falling towards the line of the most frequent token so far, 0.18 to 0.14. Right: the score by "
    "offset. For distance 6 it has one peak, at offset 3. For distance 7 it is low at offsets 0 to "
    "3 and high and level from 4 on.",
)

# %% [markdown]
# That model's score is low at offsets 0 to 3, where write and query share a token, and level
# beyond. So it looks for a write that shares *nothing*, and the decay picks the newest of these:
# four back, whose convolution holds token $t - 7$. By that trick a convolution of $w$ tokens should
# reach $2w - 1$. It does: 3 with two tokens, 5 with three (three seeds, predicted after one run of
# each: `python -m experiments 04_reach`). (For decay alone at distance 1 we predicted the same, and
# lost.)
#
# At 16 and 24 the convolution is below decay alone, which it contains: this also measures how fast
# a model learns. Chapter 09 compares the three in language models.

# %% tags=["aside"]
for width, pair in ((2, (3, 4)), (3, (5, 6))):
    shares = [sorted(run["right"] for run in by_row["conv", width, lag])[1] for lag in pair]
    print(f"convolution of {width}: distance {pair[0]} {shares[0]:.2f}, {pair[1]} {shares[1]:.2f}")
    assert shares[0] > 0.5 and shares[1] < 0.4

# %% tags=["guard"]
far = [record["lags"].index(lag) for lag in (16, 24)]
assert all(record["accuracy"]["conv"][i] < record["accuracy"]["decay"][i] for i in far)
# In size: for distance 6, one seed of three has all signs turned round.
assert all(max(run["scores"], key=abs) == run["scores"][3] for run in by_row["conv", 4, 6])
for run in by_row["conv", 4, 7]:
    assert max(run["scores"][:4]) < min(run["scores"][4:]) / 2
    assert max(run["scores"][4:]) < 1.05 * min(run["scores"][4:])
for run in by_row["decay", 4, 1]:  # predicted: the first below half of the others
    first, *others = run["scores"]
    assert abs(first) > max(map(abs, others)) / 2

# %% [markdown]
# ## Summary
#
# - $\langle R_t q, R_s k\rangle = q^\top R_{s-t}\,k$. The proof takes two properties of rotations
#   and one line.
# - A wide vector is many pairs, each with its own speed. Which coordinates form a pair is a
#   convention, and trained weights depend on it.
# - SSD inherits the theorem because its decay is one number per head. With a rate for every entry,
#   as in Mamba, the theorem fails.
# - The output knows distances. The cache knows absolute positions, so keep counting.
# - Rotate C and B, or let the state turn: either way, it's a state space model with complex decays,
#   whose clocks keep running even when $\Delta = 0$. With a constant $\Delta$, it's RetNet's
#   retention.
# - In our small task, a convolution leads from distance 2 to 6, and after 300 steps rotations have
#   come furthest.
#
# ## Exercises
#
# **1 · easy.** *Angles by hand.* Through what angle does the second pair turn per token? Pencil and
# paper only, for vectors of width 4 and base 16. How many tokens does half a turn take? And which
# test notices a rotation that goes backwards, with $(t - s)\theta$ a quarter turn: (a) one with $q
# = k$, or (b) one with $q = (1, 0)$, $k = (0, 1)$?
#
# <details><summary>Hint</summary>
#
# Pair $i$ of width $d$ turns by $\text{base}^{-2i/d}$, counted from 0. A cosine doesn't notice the
# sign of its angle.
#
# </details>


# %% tags=["exercise"]
def by_pencil():
    """The angle, the number of tokens, and "a" or "b"."""
    ### BEGIN SOLUTION
    return 0.25, 4 * math.pi, "b"
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import check_numbers, forbidden, not_none

with forbidden(rope_frequencies):
    angle, tokens, test = not_none(by_pencil())
theta = rope_frequencies(4, 16.0)[1].item()
check_numbers(angle, {"the angle per token": theta})
check_numbers(tokens, {"tokens for half a turn": math.pi / theta}, tol=1e-2)
right, wrong = R(-math.pi / 2), R(math.pi / 2)
seen = {"a": [torch.tensor([1.0, 0.5])] * 2, "b": [*torch.eye(2)]}
noticed = [name for name, (q, k) in seen.items() if abs(q @ right @ k - q @ wrong @ k) > 1e-9]
assert [test.lower().strip("() ")] == noticed, f"test {test} isn't the one that notices"
print("and the test that notices")

# %% [markdown]
# **2 · easy.** *Rotate a part of a vector.* Rotate only the first `r` coordinates of a vector.
# GPT-NeoX does this, and leaves the rest alone. Write it with `apply_rope`, treating the first `r`
# coordinates as a vector of width `r`. Does the theorem still hold? Why?
#
# <details><summary>Hint</summary>
#
# Cut, turn the first part, and join. The frequencies belong to width $r$, not $d$.
#
# </details>


# %% tags=["exercise"]
def partial_rope(x, positions, r, base=10_000.0):
    """x (b, l, h, d), positions (b, l); the first r coordinates turn, r even. Returns x's shape."""
    ### BEGIN SOLUTION
    cosine, sine = rope_cos_sin(positions, r, base, dtype=x.dtype)
    return torch.cat([apply_rope(x[..., :r], cosine, sine), x[..., r:]], dim=-1)
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import calls_of, not_none

x, positions = random(2, 10, 2, 12, seed=60), torch.stack([torch.arange(10), torch.arange(3, 13)])
for r, base in ((8, 10_000.0), (4, 100.0)):
    with calls_of(apply_rope) as turns:
        turned = not_none(partial_rope(x, positions, r, base))
    assert turns, "write it with apply_rope"
    matrices = [rotation_matrix(int(t), r, base) for t in positions.flatten()]
    first = einsum("tij,thj->thi", torch.stack(matrices), x[..., :r].flatten(0, 1))
    check(f"the first {r} coordinates turn", turned[..., :r].flatten(0, 1), first)
    check("the rest is left alone", turned[..., r:], x[..., r:])
here, there = partial_rope(x, positions, 8), partial_rope(x, positions + 500, 8)
products = [einsum("blhd,bshd->bhls", turned, turned) for turned in (here, there)]
check("inner products at these positions and 500 later", products[1], products[0])
print("The theorem holds: a coordinate that is left alone turns by 0 per token.")

# %% [markdown]
# **3 · medium.** *Cut the middle out of a chat.* Move rotated keys to new positions, without the
# originals. A chat gets too long. You keep its beginning with the instructions, drop the middle,
# and move what follows up. So the cached keys get new positions, and each token moves by an offset
# of its own. But you've only kept the rotated keys, not the originals. Move them from their old
# positions to the new ones. (This repairs positions only. In a deep model, keys above the first
# layer still carry what their tokens read from the part you dropped.)
#
# <details><summary>Hint</summary>
#
# `rope_cos_sin` refuses negative positions. But what does `apply_rope` do if you change the sign of
# the sine? Two turns are enough.
#
# </details>


# %% tags=["exercise"]
def move_keys(turned, old, new, base=10_000.0):
    """turned (b, l, h, d): keys turned by the positions old (b, l); the keys turned by new."""
    ### BEGIN SOLUTION
    width, dtype = turned.shape[-1], turned.dtype
    cosine, sine = rope_cos_sin(old, width, base, dtype=dtype)
    keys = apply_rope(turned, cosine, -sine)  # back, by the same angle
    return apply_rope(keys, *rope_cos_sin(new, width, base, dtype=dtype))
    ### END SOLUTION


# %% tags=["check"]
def turned_by(at, base):
    """The keys, turned by the positions `at`."""
    keys = random(2, 10, 2, 12, seed=61)
    return apply_rope(keys, *rope_cos_sin(at, 12, base, dtype=torch.float64))


old = torch.tensor([[0, 1, 2, 3, *range(100, 106)], [0, *range(41, 50)]])  # two chats, cut
new = torch.arange(10).expand(2, 10)
for base in (10_000.0, 100.0):
    moved = move_keys(turned_by(old, base), old, new, base)
    check(f"base {base:g}: moved = turned by the new positions", moved, turned_by(new, base))
    back = move_keys(turned_by(new, base), new, old, base)
    check("and the way back, to later positions", back, turned_by(old, base))

# %% [markdown]
# **4 · medium.** *Clocks that stand still.* Build clocks that stand still where $\Delta = 0$.
# Section 7 showed that ours run on through such a token. Turn the vectors of token $t$ by the
# angles $\tau_t \theta$, where $\tau_t = \Delta_0 + \dots + \Delta_t$ is the time that has passed,
# one $\tau$ per row and head. Then a token with $\Delta = 0$ leaves no trace. What has become of
# "depends on the distance only"?
#
# <details><summary>Hint</summary>
#
# In halves, coordinate $i$ turns together with coordinate $i + n/2$. The angle of a pair is no
# longer $t\theta$, but a sum that runs along the text.
#
# </details>


# %% tags=["exercise"]
def turn_by_time(vectors, dt, theta):
    """vectors (b, l, h, n), dt (b, l, h), theta (n/2,): turned by (Σ dt) · theta, in halves."""
    ### BEGIN SOLUTION
    angles = dt.cumsum(dim=1)[..., None] * theta
    first, second = vectors.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    ### END SOLUTION


# %% tags=["check"]
x, dt, A, B, C = inputs(g=4)
dt[:, 10] = 0
theta, steady = 30 * rope_frequencies(8, 100.0), torch.full_like(dt, 0.5)
place = 1 + torch.arange(40)
matrices = torch.stack([rotation_matrix(0.5 * t, 8, 100.0) for t in place.tolist()])
expected = einsum("tij,bthj->bthi", matrices, B)
check("Δ = 0.5 everywhere: position t turns by t/2", turn_by_time(B, steady, theta / 30), expected)


def by_time(x, dt, A, B, C):
    """SSD whose clocks show the time that has passed."""
    return ssd.ssd_recurrent(x, dt, A, turn_by_time(B, dt, theta), turn_by_time(C, dt, theta))


kept = [i for i in range(40) if i != 10]
without = by_time(x[:, kept], dt[:, kept], A, B[:, kept], C[:, kept])
check("a token with Δ = 0 was never there", by_time(x, dt, A, B, C)[:, kept], without)
print("What counts now is the time between two tokens, no longer the number of tokens.")

# %% [markdown]
# **5 · hard.** *Eight places back and no other.* Which query sees only the token eight places back?
# A reader wants to see the token 8 places back and no other. Look for a query $q$ such that
# $\langle R_t q, R_s k\rangle$, with $k = (1, \dots, 1)$, is as close as possible to 1 at distance
# 8 and to 0 at all other distances from 0 to 63, in the sum of squares. No entry of $q$ may be
# larger than 1: some unknowns are almost interchangeable, since the slow pairs barely turn, and
# with 8 pairs plain least squares returns entries above 10,000. What does the reader see with 8
# pairs? And with 32?
#
# <details><summary>Hint</summary>
#
# At distance $\delta$ the inner product is $q \cdot R_{-\delta} k$. These are 64 linear equations,
# and the vectors $R_{-\delta} k$ are their rows. Either add a small penalty on the size of $q$,
# such as 0.01, or drop the directions with small singular values, as `torch.linalg.pinv` does with
# its `rtol`.
#
# </details>


# %% tags=["exercise"]
def query_for(distance, dim, base=100.0, reach=64):
    """A query (dim,), no entry above 1, that sees `distance` out of 0, …, reach - 1."""
    ### BEGIN SOLUTION
    k = torch.ones(dim)
    rows = torch.stack([rotation_matrix(-delta, dim, base) @ k for delta in range(reach)])
    wanted = torch.zeros(reach)
    wanted[distance] = 1
    return torch.linalg.pinv(rows, rtol=1e-3) @ wanted
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none


def seen_by(q, base, reach=64):
    """The inner products of a query with (1, …, 1), at distances 0, …, reach - 1."""
    k, at = torch.ones(1, reach, 1, len(q)), torch.arange(reach)[None]
    q, last = q.expand_as(k), reach - 1
    q = apply_rope(q, *rope_cos_sin(torch.full_like(at, last), k.shape[-1], base, dtype=k.dtype))
    k = apply_rope(k, *rope_cos_sin(last - at, k.shape[-1], base, dtype=k.dtype))
    return (q * k).sum(-1)[0, :, 0]


for distance, dim, base, reach, most in (
    (8, 16, 100.0, 64, 0.815),
    (8, 64, 100.0, 64, 0.7),
    (20, 32, 1e3, 64, 0.8),
    (20, 32, 1e3, 128, 0.9),
):
    q = not_none(query_for(distance, dim, base, reach))
    assert q.abs().max() <= 1, f"an entry of {q.abs().max():.3g}, with {dim // 2} pairs"
    bump = seen_by(q, base, reach)
    error = (bump - F.one_hot(torch.tensor(distance), reach)).square().sum().item()
    assert error < most, f"{dim // 2} pairs: a squared error of {error:.3f}; {most} is possible"
    assert bump.argmax() == distance, f"the bump is at {bump.argmax()} instead of {distance}"
    near = [round(x, 3) for x in bump[distance - 3 : distance + 4].tolist()]
    print(f"{dim // 2:2} pairs, distances {distance - 3} to {distance + 3}:", near)
few, many = (seen_by(query_for(8, dim, 100.0), 100.0) for dim in (16, 64))
assert many[8] > few[8] and many[11] < few[11]

# %% [markdown]
# The reader sees a bump around distance 8, not a single token. More pairs make it higher and
# narrower.
#
# ## Further reading
#
# **What came after.** Positions without an encoding: causal language models learn them from the
# mask alone (Haviv et al., *Transformer Language Models without Positional Encodings Still Learn
# Positional Information*, 2022). Which pairs a trained model uses: Gemma 7B builds heads that look
# at a fixed distance from the fastest ones, and prefers the slowest ones for content (Barbero et
# al., *Round and Round We Go!*, 2024). How to choose the base: it bounds the context length that a
# model can use (Men et al., *Base of RoPE Bounds Context Length*, 2024). How many coordinates to
# turn: a tenth of them trained as well as all (Khan et al., *Fractional Rotation, Full Potential?*,
# 2026).
#
# - Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding* (2021): the idea, and
#   a bound on how scores fade.
# - Shi et al., *Wonderful Matrices*, §3.1, Table 1 and Appendix A; *OTCE*, §3.1 and Appendix A.
# - Dao and Gu, *Transformers are SSMs* (2024): the convolution and the decay as Mamba-2 has them.
# - Sun et al., *Retentive Network* (2023): retention, rotary SSD with a constant decay.
# - Grazzi et al., *Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues* (2024).
# - Lahoti et al., *Mamba-3: Improved Sequence Modeling using State Space Principles* (2026):
#   complex states, and angles that are learned from data.
# - Peng et al., *YaRN* (2023): what to do with the base when texts grow longer.
# - `cheems_ref/rope.py`: the listing this notebook arrives at.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
