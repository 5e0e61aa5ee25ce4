# %% [markdown]
# # 04 · Rotary positions
#
# **One source of position for attention and for SSD: turn every vector by an angle that grows with
# its position. What an inner product then sees of the positions is their distance.** When you are
# through you can
#
# - prove that the inner product of turned vectors depends on the distance only, and check a
#   published proof line by line, as algebra and in numbers;
# - say which pairs of coordinates turn together in which convention, and convert between the two;
# - turn C and B of SSD, and check that its forms, and mamba-ssm's kernel where it can run, still
#   agree;
# - decode with rotations, and say what goes wrong when positions start again at 0;
# - read rotary SSD as a recurrence whose state turns, and say what Mamba-3 does with its angles;
# - name a case in which the theorem fails, and what repairs it.
#
# Assumes: chapter 03, sine and cosine, complex numbers.
#
# How to read ✓, ✗ and *As printed*: chapter 00.
#
# Sources: *Wonderful Matrices* (WM) §3.1, Table 1, Appendix A, Listings 1 and 7; *Cheems* (Ch)
# §3.1 and Table 2; Shi et al., *OTCE: Hybrid SSM and Attention with Cross Domain Mixture of Experts
# to construct Observer-Thinker-Conceiver-Expresser* (OTCE) §3.1, Algorithm 4 and Appendix A; Su et
# al., *RoFormer* (2021), where rotary positions (RoPE) come from. The code that this notebook
# builds up to is `cheems_ref/rope.py`, and the option `position` of the layer in
# `cheems_ref/ssd.py`.
#
# | letter | what it means here |
# |---|---|
# | $t$, $s$, $\delta = t - s$ | the position that reads, the one that writes, their distance |
# | $q$, $k$ | the vector that reads, the one that writes; in SSD called $C_t$ and $B_s$ |
# | $d$, $i$ | here the width of a vector that is turned; the number of a pair in it, from 0 |
# | $\theta_i$ | the angle by which pair $i$ turns per token; $\theta$ where there is one pair |
# | $\varphi$, $\Phi_t$ | any other angle; the sum of all angles up to token $t$ |
# | $R(\varphi)$, $R_t$ | the rotation by $\varphi$; the rotation that belongs to position $t$ |
# | $\mathtt{i}$, $\hat q$ | the imaginary unit; $q$ with each pair read as one complex number |
# | base, $l_0$ | the number that sets the angles; the length of the texts in training |

# %% tags=["setup"]
import json
import math
from pathlib import Path

import sympy as sp
import torch
import torch.nn.functional as F
from torch import einsum

from cheems_ref import plotting, ssd
from cheems_ref.kernels import kernel_status
from cheems_ref.mamba import selective_scan
from cheems_ref.rope import (
    apply_rope,
    log_length_scale,
    ntk_base,
    pairing_permutation,
    rope_cos_sin,
    rope_frequencies,
    rotation_matrix,
)
from cheems_ref.verify import check, check_gradients, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    """Normal random numbers, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read_record(name):
    """What `python book/records.py NAME` has stored in figures/records."""
    return json.loads(Path(f"../figures/records/{name}.json").read_text())


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0], " SymPy version", sp.__version__)

# %% [markdown]
# ## Why this matters
#
# *The dog bit the man* and *the man bit the dog* hold the same words. Attention compares a query
# with every key by an inner product, and an inner product knows two vectors, not where they stand.
# Without a further source of position, each query reads its tokens as an unordered bag:


# %%
def attend(query, keys, values):
    """Attention of one query (d,) to keys and values (l, d)."""
    scores = keys @ query / math.sqrt(len(query))
    return scores.softmax(0) @ values


query, keys, values = random(8, seed=70), random(12, 8, seed=71), random(12, 8, seed=72)
order = torch.randperm(12, generator=torch.Generator().manual_seed(73))
in_order = attend(query, keys, values)
check(
    "tokens in another order: the same output", attend(query, keys[order], values[order]), in_order
)
_ = must_differ("values of other tokens", attend(query, keys, values[order]), in_order)

# %% [markdown]
# What should a source of position give? In language the *distance* often matters more than the
# position: an adjective belongs to the next noun on page 1 as on page 700. So we look for a way to
# write the position $t$ into a query $q$ and the position $s$ into a key $k$, each for itself and
# before they meet, such that their inner product is a function of the contents and of the distance
# alone:
#
# $$\langle E_t(q),\; E_s(k) \rangle = G(q, k, t - s). \tag{4.1}$$
#
# (The papers write $f(q, t)$ and $g$.) *Each for itself* makes it cheap: nothing of size
# $l \times l$ is added. *The distance alone* makes it useful: a score that is learned at two
# positions holds wherever the distance is the same. Rotations give both. Chapter 03 showed that C
# and B of SSD meet in an inner product just as Q and K do, so the same rotations can serve both;
# that is the first claim of *Wonderful Matrices*, and this chapter puts it to the test.
#
# ## 1 · A rotation in the plane
#
# Turning a vector of the plane by the angle $\varphi$, counter-clockwise:
#
# $$R(\varphi) = \begin{bmatrix} \cos\varphi & -\sin\varphi \\ \sin\varphi & \cos\varphi
# \end{bmatrix} \tag{4.2}$$
#
# The columns say what it does: $(1, 0)$ goes to $(\cos\varphi, \sin\varphi)$, and $(0, 1)$, a
# quarter turn ahead, goes to $(-\sin\varphi, \cos\varphi)$.


# %%
def R(phi):
    """Equation 4.2, (2, 2)."""
    return torch.tensor([[math.cos(phi), -math.sin(phi)], [math.sin(phi), math.cos(phi)]])


right, up = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
check("a quarter turn takes right to up", R(math.pi / 2) @ right, up)
check("and up to left", R(math.pi / 2) @ up, -right)

# %% [markdown]
# Three properties are needed in what follows. Turning twice adds the angles. Turning back is
# turning by the negative angle, and it is the transpose. And no vector changes its length.

# %%
phi_1, phi_2 = 0.7, 2.1
vector = random(2, seed=0)
check("angles add up", R(phi_1) @ R(phi_2), R(phi_1 + phi_2))
check("the transpose turns back", R(phi_1).T, R(-phi_1))
check("lengths stay", (R(phi_1) @ vector).norm(), vector.norm())
_ = must_differ("turning back is not turning on", R(phi_1).T @ R(phi_2), R(phi_1 + phi_2))

# %% [markdown]
# With the first two, the theorem for the plane takes one line. Let one step of position turn by
# $\theta$, so that position $t$ turns by $t\theta$, and write $R_t$ for $R(t\theta)$. Then
#
# $$\langle R_t\,q,\; R_s\,k \rangle = q^\top R_t^\top R_s\, k = q^\top R_{s-t}\, k
#   = q^\top R_{-\delta}\,k. \tag{4.3}$$
#
# Three pairs of positions, each three tokens apart:

# %%
theta = 0.25
q, k = torch.tensor([1.6, 0.5]), torch.tensor([1.2, -0.2])
for t, s in ((4, 1), (9, 6), (15, 12)):
    product = (R(t * theta) @ q) @ (R(s * theta) @ k)
    check(f"positions {t} and {s}: ⟨R_t q, R_s k⟩ = qᵀ R_(s-t) k", product, q @ R(-3 * theta) @ k)
print(f"the inner product at distance 3: {q @ R(-3 * theta) @ k:.4f}, at distance 0: {q @ k:.4f}")

# %% [markdown]
# It is like a pair of compasses: turn both arms by the same angle, and they stay open as they were.
# The faint arms stand at position 0. From one picture to the next $q$ turns by as much as $k$ does;
# within a picture, $q$ has been turned three steps further than $k$.


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
    ax.axhline(0, color=plotting.QUIET, linewidth=0.6)
    ax.axvline(0, color=plotting.QUIET, linewidth=0.6)
    product = (R(t * theta) @ q) @ (R(s * theta) @ k)
    ax.set(xlim=(-2.2, 2.2), ylim=(-2.2, 2.2), aspect="equal")
    ax.set_title(f"t = {t}, s = {s}: product {product:.2f}")


# %% tags=["figure"]
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

# %% [markdown]
# ## 2 · The published proof, line by line
#
# Equation 4.3 is proved. Why go through it again? The appendices of OTCE and WM prove it with
# complex numbers, in about thirteen lines, and *end with another matrix than 4.3*: theirs has the
# opposite sign. We look for the line where the sign goes wrong, with a method that serves for any
# printed derivation. Each line goes before two referees:
#
# - **algebra**: SymPy, a computer algebra system, subtracts the two sides and simplifies, and what
#   is left must be zero: not small, zero;
# - **numbers**: both sides are evaluated at random values of the symbols and compared by `check`.
#
# `identity(name, left, right)` asks both. Where a line should be wrong, `must_differ` compares the
# `numbers` of the two sides.

# %% tags=["setup"]
SYMBOLS = sp.symbols("q1 q2 k1 k2 t s theta", real=True)


def numbers(expression):
    """An expression, or each entry of a matrix, at 20 random values of the symbols."""
    function = sp.lambdify(SYMBOLS, sp.Matrix([expression]), "numpy")
    points = random(20, len(SYMBOLS), seed=1).tolist()
    return torch.stack([torch.as_tensor(function(*point)).cdouble() for point in points])


def identity(name, left, right):
    """left = right for all real values of the symbols: as algebra, and in numbers."""
    rest = sp.simplify(sp.Matrix([left - right]).expand(complex=True))
    assert rest.is_zero_matrix, f"{name}: {rest} is left"
    check(name, numbers(left), numbers(right), tol=1e-12)


# %% [markdown]
# ### Lines 1 to 4: what is turned
#
# A pair of real numbers $(q_1, q_2)$ is read as the complex number
# $\hat q = q_1 + \mathtt{i}q_2$, and multiplying by $e^{\mathtt{i}\varphi}$ turns it by $\varphi$.
# The reader stands at position $t$, the writer at position $s$ (the papers call the vectors C and
# B, or Q and K, and the positions $j$ and $i$). In this section all of them are symbols:
#
# $$E_t(q) = (q_1 + \mathtt{i}q_2)\,e^{\mathtt{i}t\theta}, \qquad
#   E_s(k) = (k_1 + \mathtt{i}k_2)\,e^{\mathtt{i}s\theta}. \tag{4.4}$$

# %%
q1, q2, k1, k2, t, s, theta = SYMBOLS
q, k = sp.Matrix([q1, q2]), sp.Matrix([k1, k2])
q_hat, k_hat = q1 + sp.I * q2, k1 + sp.I * k2  # sp.I is the imaginary unit
turned_q_hat = q_hat * sp.exp(sp.I * t * theta)
turned_k_hat = k_hat * sp.exp(sp.I * s * theta)

# %% [markdown]
# **Lines 1 and 2** resolve the exponential by Euler's formula and multiply out. (For $k$ it is the
# same line with other letters.)

# %%
ct, st = sp.cos(t * theta), sp.sin(t * theta)
cs, ss = sp.cos(s * theta), sp.sin(s * theta)
identity("line 1: Euler's formula", sp.exp(sp.I * t * theta), ct + sp.I * st)
identity("line 2: q̂, times it", turned_q_hat, (q1 * ct - q2 * st) + sp.I * (q2 * ct + q1 * st))
identity("line 2: k̂, alike", turned_k_hat, (k1 * cs - k2 * ss) + sp.I * (k2 * cs + k1 * ss))

# %% [markdown]
# **Line 3** reads real and imaginary part as a vector again. It is the rotation matrix of equation
# 4.2, applied to a column (`R` for numbers, `R_sym` for symbols).


# %%
def R_sym(angle):
    """Equation 4.2 in symbols."""
    return sp.Matrix([[sp.cos(angle), -sp.sin(angle)], [sp.sin(angle), sp.cos(angle)]])


def as_vector(z):
    """Real and imaginary part of z as a column."""
    return sp.Matrix(sp.expand(z, complex=True).as_real_imag())


identity("line 3: q̂ exp(𝚒tθ) is R_t q", as_vector(turned_q_hat), R_sym(t * theta) * q)
identity("line 3: k̂ exp(𝚒sθ) is R_s k", as_vector(turned_k_hat), R_sym(s * theta) * k)
by_rows = (q.T * R_sym(t * theta)).T
_ = must_differ("line 3 with rows: q R_t", numbers(by_rows), numbers(as_vector(turned_q_hat)))

# %% [markdown]
# **Line 4** is why complex numbers help. The inner product of two vectors is the real part of the
# *first times the conjugate of the second*:
#
# $$\langle q, k \rangle = q_1 k_1 + q_2 k_2 = \mathrm{Re}(\hat q\,\hat k^*). \tag{4.5}$$
#
# Which factor is conjugated does not matter, but only one may be: the conjugate *of the product*,
# as the appendices word it, is something else.

# %%
of_the_second = sp.re(sp.expand(q_hat * sp.conjugate(k_hat)))
of_the_first = sp.re(sp.expand(sp.conjugate(q_hat) * k_hat))
of_the_product = sp.re(sp.expand(sp.conjugate(q_hat * k_hat)))
identity("line 4: ⟨q, k⟩ = Re(q̂ k̂*)", q.dot(k), of_the_second)
identity("line 4: ⟨q, k⟩ = Re(q̂* k̂)", q.dot(k), of_the_first)
_ = must_differ("line 4 with (q̂ k̂)*", numbers(of_the_product), numbers(q.dot(k)))

# %% [markdown]
# ### Lines 5 to 7: the function of the distance
#
# By line 4 the inner product of the turned vectors is
#
# $$G(q, k, t - s) = \mathrm{Re}\big[\hat q\,\hat k^*\, e^{\mathtt{i}(t-s)\theta}\big], \tag{4.6}$$
#
# because $e^{\mathtt{i}t\theta}$ times the conjugate of $e^{\mathtt{i}s\theta}$ is
# $e^{\mathtt{i}(t-s)\theta}$ (line 5): here the two positions become one distance. Line 6
# multiplies the contents.

# %%
delta = t - s
same, cross = q1 * k1 + q2 * k2, q2 * k1 - q1 * k2
two_angles = sp.exp(sp.I * t * theta) * sp.conjugate(sp.exp(sp.I * s * theta))
identity("line 5: two angles become one", two_angles, sp.exp(sp.I * delta * theta))
contents = q_hat * sp.conjugate(k_hat)
identity("line 6: the product of the contents", contents, same + sp.I * cross)

# %% [markdown]
# Line 7 takes the real part of the product with $e^{\mathtt{i}(t-s)\theta}$:

# %%
G = sp.re(sp.expand(contents * sp.exp(sp.I * delta * theta), complex=True))
with_minus = same * sp.cos(delta * theta) - cross * sp.sin(delta * theta)
with_plus = same * sp.cos(delta * theta) + cross * sp.sin(delta * theta)
identity("line 7: the real part", G, with_minus)
_ = must_differ("line 7 with a plus", numbers(with_plus), numbers(G))

# %% [markdown]
# ### Lines 8 to 11: the inner product in coordinates
#
# Now from the other side: take the inner product of the two vectors of line 2, multiply out into
# eight terms (line 8), and collect them (line 9).

# %%
inner = (R_sym(t * theta) * q).dot(R_sym(s * theta) * k)
eight_terms = (
    q1 * ct * k1 * cs - q1 * ct * k2 * ss - q2 * st * k1 * cs + q2 * st * k2 * ss
    + q2 * ct * k2 * cs + q2 * ct * k1 * ss + q1 * st * k2 * cs + q1 * st * k1 * ss
)  # fmt: skip
collected = (
    q1 * k1 * (ct * cs + st * ss) + q1 * k2 * (st * cs - ct * ss)
    + q2 * k1 * (ct * ss - st * cs) + q2 * k2 * (st * ss + ct * cs)
)  # fmt: skip
identity("line 8: eight terms", inner, eight_terms)
identity("line 9: collected by the contents", inner, collected)

# %% [markdown]
# The formulas for the difference of two angles (line 10) turn what stands in the brackets into
# cosine and sine of $(t-s)\theta$, and the sum into $G$ (line 11).

# %%
identity("line 10: cosine of a difference", ct * cs + st * ss, sp.cos(delta * theta))
identity("line 10: sine of a difference", st * cs - ct * ss, sp.sin(delta * theta))
sine_of_the_sum, sine = numbers(st * cs + ct * ss), numbers(sp.sin(delta * theta))
_ = must_differ("line 10: sine of the sum", sine_of_the_sum, sine)
identity("line 11: the inner product is G", inner, G)

# %% [markdown]
# So $\langle E_t(q), E_s(k)\rangle = G(q, k, t-s)$: on the right, $t$ and $s$ stand only in
# $(t-s)\theta$. Up to here the printed proof holds (but for the words about the conjugate).
#
# ### Lines 12 and 13: the matrix
#
# The last two lines write it with matrices. The appendices end with
#
# > $\begin{bmatrix} \cos((j-i)\theta) & -\sin((j-i)\theta) \\ \sin((j-i)\theta) &
# > \cos((j-i)\theta)\end{bmatrix}$ — OTCE, Appendix A, after "Finally, we get"; likewise eq. 11,
# > eq. 12 for Q and K, and WM Appendix A
#
# between $C^\top$ and $B$, which is $R_{t-s}$. Their own line before it (our line 12) multiplies
# out to the transpose, $R_{s-t}$, as equation 4.3 has it. So line 13 is where the sign goes wrong.

# %%
product = R_sym(t * theta).T * R_sym(s * theta)
identity("line 12: R_tᵀ R_s = R_(s-t)", product, R_sym((s - t) * theta))
true = (q.T * R_sym((s - t) * theta) * k)[0]
printed = (q.T * R_sym((t - s) * theta) * k)[0]
identity("line 13: the inner product is qᵀ R_(s-t) k", inner, true)
_ = must_differ("line 13 as printed: qᵀ R_(t-s) k", numbers(printed), numbers(inner))

# %% [markdown]
# How wrong is the printed sign? It is the right formula for a reader at $s$ and a writer at $t$:
# the two have changed places. True and printed differ by $2\,(q_2 k_1 - q_1 k_2)
# \sin((t-s)\theta)$: they agree at distance 0, after half turns, and where $q$ and $k$ lie on one
# line. So a test with $q = k$ sees nothing.

# %%
exchanged = inner.subs({t: s, s: t}, simultaneous=True)  # at once: t becomes s while s becomes t
identity("the printed formula has reader and writer exchanged", printed, exchanged)
identity(
    "printed minus true = 2 (q₂k₁ - q₁k₂) sin(t-s)θ",
    printed - inner,
    2 * cross * sp.sin(delta * theta),
)
alike = {k1: q1, k2: q2}
identity("with q = k the two agree", printed.subs(alike), inner.subs(alike))

# %% [markdown]
# The smallest case: $q = (1, 0)$, $k = (0, 1)$, a quarter turn apart.

# %%
quarter = {q1: 1, q2: 0, k1: 0, k2: 1, t: 1, s: 0, theta: sp.pi / 2}
truth, as_printed = inner.subs(quarter), printed.subs(quarter)
assert (truth, as_printed) == (1, -1)
print("a quarter turn apart: truth", truth, "  as printed", as_printed)

# %% [markdown]
# ## 3 · Wider vectors: many wheels
#
# A vector of even width $d$ is cut into $d/2$ pairs, and each pair turns in a plane of its own,
# like a wheel. An inner product is the sum over the pairs, so equation 4.3 holds for the sum as for
# each term. What is left to choose is how fast each pair turns:
#
# $$\theta_i = \text{base}^{-2i/d}, \qquad i = 0, 1, \dots, d/2 - 1. \tag{4.7}$$

# %%
by_formula = torch.tensor([10_000.0 ** (-2 * i / 8) for i in range(4)])
check("equation 4.7 = rope_frequencies", rope_frequencies(8), by_formula)
for dim, base in ((64, 10_000.0), (64, 500_000.0), (8, 10_000.0), (8, 100.0)):
    rounds = 2 * math.pi / rope_frequencies(dim, base)  # in tokens
    print(f"d {dim:2}, base {base:7,.0f}: a round takes {rounds[0]:.1f} tokens for the first pair,"
          f" {rounds[-1]:9,.0f} for the last")  # fmt: skip

# %% [markdown]
# Like the hands of a clock, the pairs tell different things. The first turns by a whole radian per
# token and tells neighbours apart; the last, with the usual base of 10,000, needs thousands of
# tokens for one round and tells near from far. One pair alone would not do: after 44 tokens the
# first has made seven rounds, nearly to the dot, and cannot tell this distance from none.

# %%
one_pair = torch.cos(44 * rope_frequencies(2)).mean()
four_pairs = torch.cos(44 * rope_frequencies(8)).mean()
assert one_pair > 0.999 and four_pairs < 0.7
print(f"(1, …, 1) at distance 44, where distance 0 gives 1: {one_pair:.4f} with one pair,"
      f" {four_pairs:.4f} with four")  # fmt: skip

# %% [markdown]
# As code, a rotation is "cosine times the vector, plus sine times the vector a quarter turn ahead".
# The quarter turn takes $(x_1, x_2)$ to $(-x_2, x_1)$. If the first members of all pairs stand in
# the first half of the vector and the second members in the second half, that is one line:


# %%
def turn_halves(x, angles):
    """Turn pairs (x[i], x[i + d/2]) by angles[i]: x (..., d), angles (..., d/2)."""
    first, second = x.chunk(2, dim=-1)
    quarter_turn = torch.cat([-second, first], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)  # (..., d)
    return angles.cos() * x + angles.sin() * quarter_turn


# %% [markdown]
# The package does it in two steps, `rope_cos_sin` (angles, once for all heads) and `apply_rope`.
# Two rows of tokens at different positions:

# %%
dim = 8
x = random(2, 6, 3, dim, seed=2)  # (b, l, h, d)
positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 7, 8, 1000, 99_999]])
angles = positions[:, :, None, None] * rope_frequencies(dim)  # (b, l, 1, d/2)

cosine, sine = rope_cos_sin(positions, dim, dtype=torch.float64)
turned = apply_rope(x, cosine, sine)
check("apply_rope = turn_halves", turned, turn_halves(x, angles), tol=1e-12)
_ = must_differ("turned the other way", turn_halves(x, -angles), turned)
check("position 0 changes nothing", turned[:, 0], x[:, 0])
check("no vector changes its length", turned.norm(dim=-1), x.norm(dim=-1))

# %% [markdown]
# As a matrix it is `rotation_matrix`, which takes negative positions too (`rope_cos_sin` refuses
# them), and with complex numbers one product:

# %%
matrices = torch.stack([rotation_matrix(int(t), dim) for t in positions.flatten()])
by_matrix = einsum("tij,thj->thi", matrices, x.flatten(0, 1))  # t runs over both rows
check("apply_rope = rotation matrices", turned.flatten(0, 1), by_matrix, tol=1e-12)

x_hat = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * angles)
by_complex = torch.cat([x_hat.real, x_hat.imag], dim=-1)
check("apply_rope = complex exponentials", turned, by_complex, tol=1e-12)

# %% [markdown]
# ### Which coordinates are a pair?
#
# The formulas of the papers turn coordinates 0 and 1 together, 2 and 3, and so on (*interleaved*):
# the matrix then has its $d/2$ small rotations along the diagonal. Meta's own Llama code and
# weights do it so. The papers' listings and transformers turn coordinates $i$ and $i + d/2$
# together (*half*), as we did above. Only the numbering of the coordinates differs: with $P$ the
# permutation that sorts even coordinates before odd ones,
#
# $$R^{\text{half}} = P\,R^{\text{interleaved}}\,P^\top. \tag{4.8}$$

# %%
order = pairing_permutation(dim)
print("half layout takes the interleaved coordinates in the order", order.tolist())
P = torch.eye(dim)[order]
half = rotation_matrix(7, dim, base=100.0)
interleaved = rotation_matrix(7, dim, base=100.0, pairing="interleaved")
check("half = P interleaved Pᵀ", half, P @ interleaved @ P.T, tol=1e-14)

# %% [markdown]
# (With a base of 100, and at position 7, so that no cosine or sine is near 0.) Where the entries
# other than 0 are:

# %%
row, column = torch.arange(dim)[:, None], torch.arange(dim)
assert torch.equal(interleaved != 0, row // 2 == column // 2)
assert torch.equal(half != 0, row % 4 == column % 4)
assert half[half != 0].abs().min() > 0.2
diagonals = (column - row)[half != 0].unique().tolist()
print("interleaved: four blocks of 2 by 2 on the diagonal;  half: on the diagonals", diagonals)

# %% tags=["figure"]
fig, _ = plotting.heatmaps(
    {"interleaved: $R_7$": interleaved, "$P$": P, "half: $P R_7 P^T$": half}, limit=1.0
)
plotting.save(
    fig,
    "04_pairings",
    "Three 8 by 8 matrices. Interleaved: four 2 by 2 blocks on the diagonal. P: a permutation "
    "that puts even coordinates first. Half: the same numbers on three diagonals, coordinate i "
    "paired with i + 4.",
)

# %% [markdown]
# Weights that were trained with one pairing and run with the other give other scores, and no error
# message. Permuted by $P$, they give the same. (The script that brings Meta's Llama weights to
# transformers permutes the rows of the query and key projections so.)

# %%
q, k = random(2, dim, seed=3)
trained = (rotation_matrix(9, dim, pairing="interleaved") @ q) @ (
    rotation_matrix(3, dim, pairing="interleaved") @ k
)
permuted = (rotation_matrix(9, dim) @ P @ q) @ (rotation_matrix(3, dim) @ P @ k)
unchanged = (rotation_matrix(9, dim) @ q) @ (rotation_matrix(3, dim) @ k)
check("interleaved, permuted, halves turned: same score", permuted, trained)
_ = must_differ("interleaved, not permuted, halves turned", unchanged, trained)
print(f"score {trained:.3f}, permuted {permuted:.3f}, not permuted {unchanged:.3f}")

# %% [markdown]
# ## 4 · Attention: scores that know the distance
#
# Our texts are short, so in this section, and where `rotation`, `scores` and `turn_at` are used,
# the base is 100 where nothing else is said: the slowest of four pairs then takes 199 tokens for a
# round, not 6,283. (The package's functions and layers have the usual base, 10,000.)


# %%
def scores(q, k, positions):
    """Inner products of turned queries and keys: (l, d), (l, d), (l,) -> (l, l)."""
    cosine, sine = rope_cos_sin(positions[None], q.shape[-1], base=100.0, dtype=q.dtype)
    q = apply_rope(q[None, :, None], cosine, sine)[0, :, 0]  # as (b, l, h, d) and back
    k = apply_rope(k[None, :, None], cosine, sine)[0, :, 0]
    return q @ k.T


# %% [markdown]
# Give every token the *same* query and the same key. Without rotation all scores are one number.
# With it, the score depends on $t - s$ only, so the matrix is constant along each diagonal: a
# *Toeplitz* matrix. (All of it is shown, keys later than the query too; from §5 on $s \le t$.)

# %%
l, dim = 48, 16
q, k = random(2, l, dim, seed=4)
same_q, same_k = q[:1].expand(l, dim), k[:1].expand(l, dim)
positions = torch.arange(l)

flat, toeplitz = same_q @ same_k.T, scores(same_q, same_k, positions)
assert (flat - flat[0, 0]).abs().max() < 1e-12
diagonals = [toeplitz.diagonal(offset) for offset in range(-l + 1, l)]
assert max((line - line[0]).abs().max() for line in diagonals) < 1e-12
print(f"same contents, not turned: {flat[0, 0]:.3f} everywhere")
print(f"turned: one number along each of the {len(diagonals)} diagonals,"
      f" from {toeplitz.min():.3f} to {toeplitz.max():.3f}")  # fmt: skip

# %% [markdown]
# With contents that differ it is not Toeplitz any more, but moving all tokens to other positions
# still changes nothing.

# %%
mixed = scores(q, k, positions)
_ = must_differ("any contents: not Toeplitz", mixed.diagonal()[1:], mixed.diagonal()[:-1])
check("any contents: all positions moved by 1,000", scores(q, k, positions + 1000), mixed)
with_gap = positions + 8 * (positions >= 24)
_ = must_differ("a gap of 8 in the middle", scores(q, k, with_gap), mixed)
_ = must_differ("positions left out", q @ k.T, mixed)

# %% tags=["figure"]
pictures = {
    "same contents, not turned": flat,
    "same contents, turned": toeplitz,
    "any contents, turned": mixed,
}
fig, _ = plotting.heatmaps(pictures, xlabel="key s", ylabel="query t", limit=8.0)
plotting.save(
    fig,
    "04_toeplitz",
    "Three score matrices of 48 tokens. Same contents without rotation: one flat colour. Same "
    "contents, rotated: stripes parallel to the diagonal. Different contents, rotated: no stripes.",
)

# %% [markdown]
# ### Does the score fade with distance?
#
# For $q = k = (1, \dots, 1)$ the inner product is $2\sum_i \cos(\delta\,\theta_i)$: at distance 0
# all cosines are 1, further away they are scattered, those of the fast pairs first.


# %%
def fade(distances, dim, base):
    """⟨R_t q, R_s k⟩ / d of vectors of ones, at each distance."""
    return torch.cos(distances[:, None] * rope_frequencies(dim, base)).mean(1)


ones, near = torch.ones(64), torch.arange(5)
by_matrix = torch.stack([ones @ rotation_matrix(-int(delta), 64) @ ones / 64 for delta in near])
check("mean of the cosines = inner product / width", fade(near, 64, 10_000.0), by_matrix)

# %% [markdown]
# How fast does it fade? Count a pair as still near 1 while it has turned by less than a radian,
# $\delta\,\text{base}^{-2i/d} < 1$, and as 0 on average afterwards. The share of the pairs that
# have turned by more is $\ln\delta / \ln\text{base}$, so as a rough estimate
#
# $$\frac{1}{d}\,\langle R_t q, R_s k\rangle \approx 1 - \frac{\ln \delta}{\ln \text{base}},
# \qquad q = k = (1, \dots, 1),\; 1 \le \delta \le \text{base}.$$
#
# It falls with the *logarithm* of the distance, and the larger the base, the slower; beyond the
# base it is 0. It is a little high: near a radian the cosine is 0.54 already, and soon negative.
# Averaged over the distances from 50 to 256:

# %%
distances, fading = torch.arange(257), {}
for base in (100.0, 10_000.0, 1_000_000.0):
    curve = fade(distances, 64, base)
    estimate = (1 - distances[50:].log() / math.log(base)).clamp(min=0).mean()
    far = curve[50:]
    assert curve[0] == 1 and curve[1:].max() < 1 and 0.05 < estimate - far.mean() < 0.1
    print(f"base {base:9,.0f}: {far.mean():5.2f} on average (estimate {estimate:.2f}),"
          f" between {far.min():5.2f} and {far.max():.2f}")  # fmt: skip
    fading[f"base {base:,.0f}"] = curve

# %% tags=["figure"]
fig, ax = plotting.figure(size=(10, 4.2))
plotting.lines(
    ax, distances, fading, xlabel="distance t − s", ylabel="inner product / width", legend="right"
)
plotting.level(ax, 0)
plotting.save(
    fig,
    "04_distance",
    "Inner product of two equal vectors of ones, of width 64, against the distance of their "
    "positions, for three bases. All start at 1 and fall while they ripple. From distance 50 on "
    "they lie between -0.30 and 0.11 for base 100, between 0.17 and 0.59 for base 10,000, and "
    "between 0.39 and 0.72 for base 1,000,000.",
)

# %% [markdown]
# This is a tendency of *these* vectors, not a law: with the same $k$, another $q$ has its largest
# inner product 8 tokens back (exercise 5).
#
# ## 5 · The same for C and B inside SSD
#
# In chapter 03 the output of SSD was $y_t = \sum_{s \le t} L_{ts}\,(C_t \cdot B_s)\,\Delta_s x_s$.
# The decay $L_{ts} = \exp(A\,(\Delta_{s+1} + \dots + \Delta_t))$ is *one number*, so it stands
# outside the inner product. Turn $C_t$ by $R_t$ and $B_s$ by $R_s$:
#
# $$y_t = \sum_{s \le t} L_{ts}\,\langle R_t C_t,\; R_s B_s\rangle\,\Delta_s x_s
#       = \sum_{s \le t} L_{ts}\,\big(C_t^\top R_{s-t}\,B_s\big)\,\Delta_s x_s. \tag{4.9}$$
#
# Positions enter by their difference only. And since C and B are turned *before* SSD sees them, its
# forms work as they are. Inputs to try it on, and the turning:


# %%
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


# %% [markdown]
# Entries of the matrix $M$ of chapter 03, with $y = Mx$, against equation 4.9. Row 0 of the batch,
# head 3, whose C and B are those of group 1:

# %%
x, dt, A, B, C = inputs()
positions = torch.arange(40)
M = ssd.semiseparable_matrix(dt, A, turn_at(B, positions), turn_at(C, positions))  # (b, h, t, s)
for t, s in ((30, 30), (30, 12), (7, 0)):
    L = (A[3] * dt[0, s + 1 : t + 1, 3].sum()).exp()
    inner = C[0, t, 1] @ rotation_matrix(s - t, 8, 100.0) @ B[0, s, 1]
    check(f"M[{t}, {s}] = L · Cᵀ R_(s-t) B · Δ", M[0, 3, t, s], L * inner * dt[0, s, 3])

# %% [markdown]
# ### Three forms and a kernel


# %%
def rotary(function, offset=0):
    """A form of SSD with C and B turned by their positions, counted from offset."""

    def run(x, dt, A, B, C):
        positions = offset + torch.arange(x.shape[1], device=x.device)
        return function(x, dt, A, turn_at(B, positions), turn_at(C, positions), chunk_size=16)

    return run


y = rotary(ssd.ssd_recurrent)(x, dt, A, B, C)
check("quadratic = recurrence, with rotations", rotary(ssd.ssd_quadratic)(x, dt, A, B, C), y)
check("chunked = recurrence, with rotations", rotary(ssd.ssd_chunked)(x, dt, A, B, C), y)
_ = must_differ("only B turned", ssd.ssd_recurrent(x, dt, A, turn_at(B, positions), C), y)
_ = must_differ("nothing turned", ssd.ssd_recurrent(x, dt, A, B, C), y)

# %% [markdown]
# The gradients agree as well, those of the *unturned* B and C: the rotation is part of the
# function.

# %%
check_gradients(
    "chunked = recurrence, with rotations",
    rotary(ssd.ssd_chunked),
    rotary(ssd.ssd_recurrent),
    inputs(),
)

# %% [markdown]
# And the last rung of chapter 03's ladder: mamba-ssm's kernel, in float32, where there is no GPU in
# Triton's interpreter:

# %%
status = kernel_status()
device = "cuda" if status.mode == "cuda" else "cpu"
singles = [tensor.float() for tensor in inputs(b=1)]
doubles = [tensor.double() for tensor in singles]
truth = rotary(ssd.ssd_recurrent, offset=100)(*doubles).float()
if status.available:
    on_device = [tensor.to(device) for tensor in singles]
    got = rotary(ssd.ssd_kernel, offset=100)(*on_device).cpu()
    check("kernel: rotary SSD = recurrence in float64", got, truth, tol=1e-4)
    _ = must_differ("kernel: nothing turned", ssd.ssd_kernel(*on_device).cpu(), truth)
    print("kernel rung: mamba-ssm's kernels and the recurrence agree")
else:
    print("kernel rung: not run here.", status.reason)

# %% [markdown]
# ### The theorem, executed
#
# Move the whole text by 1, by 1,000, by 100,000 positions. The turned C and B change, and the
# output does not:

# %%
for offset in (1, 1_000, 100_000):
    moved = rotary(ssd.ssd_recurrent, offset)(x, dt, A, B, C)
    check(f"moved by {offset:7,}: same output, recurrence", moved, y)
moved = rotary(ssd.ssd_chunked, 100_000)(x, dt, A, B, C)
check("moved by 100,000: same output, chunked", moved, y)
_ = must_differ("turned B itself", turn_at(B, positions + 1), turn_at(B, positions))
with_gap = positions + 3 * (positions >= 20)
gap = ssd.ssd_recurrent(x, dt, A, turn_at(B, with_gap), turn_at(C, with_gap))
_ = must_differ("a gap of three positions in the middle", gap, y)

# %% [markdown]
# ### How far can one count?
#
# On paper the invariance is exact. In a computer the angle $t\,\theta_i$ is rounded, and the
# rounding grows with $t$: between 524,288 and 1,048,576 the float32 numbers are 1/16 apart. In
# sixteen bits even the positions themselves collapse:

# %%
half_a_million = torch.tensor(524_288.0, dtype=torch.float32)
following = torch.nextafter(half_a_million, torch.tensor(math.inf, dtype=torch.float32))
assert following - half_a_million == 1 / 16
print("float32: after 524,288 comes", following.item())
counted = torch.arange(8192)
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    different = counted.to(dtype).unique().numel()
    print(f"{dtype!s:15} tells {different:5} of 8192 positions apart")

# %% [markdown]
# So the package computes angles in float64 for a float64 model and in float32 for every other, also
# where the model itself runs in bfloat16:

# %%
for dtype in (torch.float64, torch.float32, torch.bfloat16):
    cosine, _ = rope_cos_sin(positions[None], 8, dtype=dtype)
    assert cosine.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    print(f"a model in {dtype!s:14} gets angles in {cosine.dtype}")

# %% [markdown]
# What does that give? The picture shows how much the output of a rotary SSD (32 tokens, 64 states)
# changes when the text is moved, for three precisions of the angles; bfloat16 only to show why the
# package does not use it. It is drawn from a record (`python book/records.py 04_shift_error`),
# since rounding noise differs between machines.

# %%
record = read_record("04_shift_error")
single, narrow = record["errors"]["angles in float32"], record["errors"]["angles in bfloat16"]
assert max(record["errors"]["angles in float64"]) < 1e-10
assert single[0] < 1e-6 and 3e-3 < single[-1] < 5e-3
assert all(0.4 < error < 0.9 for error in narrow[4:]) and record["shifts"][4] == 256
for name, errors in record["errors"].items():
    start, middle, end = errors[0], errors[4], errors[-1]
    print(f"{name:18}: moved by 1 {start:.0e}, by 256 {middle:.0e}, by 2^20 {end:.0e}")

# %% tags=["figure"]
fig, ax = plotting.figure(size=(10, 4.6))
axis = dict(xscale="log", yscale="log", ylim=(3e-17, 30), legend="right", marker="o")
names = dict(xlabel="all positions moved by", ylabel="relative change of the output")
plotting.lines(ax, record["shifts"], record["errors"], **names, **axis)
plotting.level(ax, 1, "as large as the output", side="left")
plotting.save(
    fig,
    "04_shift_error",
    "Relative change of the output against the shift of all positions, both logarithmic. With "
    "angles in float64 it stays below 1e-10 up to a shift of a million; in float32 it grows from "
    "below 1e-6 to 4e-3; in bfloat16 it is between 0.4 and 0.9 from a shift of 256 on.",
)

# %% [markdown]
# Live, the cosines behind it, at eight positions from 1,048,576 on. SymPy gives the true ones to 30
# digits:


# %%
def exact_cosine(t, i):
    """cos(t θ_i) for d = 64 and base 10,000, to 30 digits before it is rounded to float64."""
    theta_i = sp.Integer(10) ** sp.Rational(-i, 8)  # 10,000^(-2i/64)
    return float(sp.cos(t * theta_i).evalf(30))


far = torch.arange(1_048_576, 1_048_576 + 8)[None]
exact = torch.tensor([[exact_cosine(t, i) for i in range(32)] for t in far[0].tolist()])
by_float64 = rope_cos_sin(far, 64, dtype=torch.float64)[0][0, :, :32]  # (position, pair)
check("float64 at position a million = 30 digits by SymPy", by_float64, exact)

# %% [markdown]
# In float32 the first pair is spared: with $\theta_0 = 1$ its angle is the position itself, which
# is not rounded. The next pairs are off by up to 0.02 at these eight positions. Slow pairs have
# smaller angles, which float32 stores in finer steps: here less than 0.002 from pair 10 on, and
# less than 0.0001 from pair 22 on.

# %%
by_float32 = rope_cos_sin(far, 64, dtype=torch.float32)[0][0, :, :32].double()
error = (by_float32 - exact).abs().amax(0)  # of each pair, (32,)
assert error[0] < 1e-6 and 0.01 < error[1:10].max() < 0.02
assert error[10:].max() < 2e-3 and error[22:].max() < 1e-4
for i in (0, 1, 4, 10, 22, 31):
    print(f"pair {i:2}: cosine off by up to {error[i]:.5f}")

# %% [markdown]
# ## 6 · Decoding carries absolute positions
#
# The output depends on distances, but what is *stored* does not. The state holds
# $\sum_s L_{ts}\,\Delta_s x_s\,(R_s B_s)^\top$: writes turned by their absolute position $s$. The
# next token must be turned by its own absolute position, counted from the same start. The cache
# of attention is no different: it holds turned keys.
#
# The layer `SSD` has rotations built in (`position="rope"`, its default) and is told the positions
# in every call:

# %%
_ = torch.manual_seed(0)
layer = ssd.SSD(32, n_heads=4, n_groups=2, d_state=16, position="rope").requires_grad_(False)
_ = layer.D.zero_()  # no skip connection: what comes out comes from the state
text, positions = random(1, 60, 32, seed=20), torch.arange(60)[None]

whole, whole_cache = layer(text, positions)
_, cache = layer(text[:, :40], positions[:, :40])
rest, _ = layer(text[:, 40:], positions[:, 40:], cache=cache)
check("40 tokens, then 20 with their own positions = one pass", rest, whole[:, 40:])

# %% [markdown]
# If the second call starts again at 0, its own tokens still have the right distances among
# themselves; what it reads from the state is wrong. The error is given as its norm divided by that
# of the output:

# %%
restarted, _ = layer(text[:, 40:], positions[:, :20], cache=cache)
off_by_one, _ = layer(text[:, 40:], positions[:, 40:] + 1, cache=cache)
_ = must_differ("positions started again at 0", restarted, rest, at_least=0.02)
_ = must_differ("positions off by one", off_by_one, rest, at_least=0.01)
for name, wrong in (("restarted at 0", restarted), ("off by one", off_by_one)):
    error = (wrong - rest)[0].norm(dim=-1) / rest[0].norm(dim=-1)  # of each token, (20,)
    assert error[0] > 3 * error[-1]
    print(f"{name}: {(wrong - rest).norm() / rest.norm():.2f} over all 20 tokens,"
          f" {error[0]:.2f} for the first, {error[-1]:.2f} for the last")  # fmt: skip

# %% [markdown]
# Its own tokens, without the state:

# %%
alone, _ = layer(text[:, 40:], positions[:, :20])
alone_later, _ = layer(text[:, 40:], positions[:, 40:])
check("without a state the start does not matter", alone, alone_later)

# %% [markdown]
# One token at a time, each with its position:

# %%
outputs, cache = [], None
for t in range(60):
    y_t, cache = layer(text[:, t : t + 1], positions[:, t : t + 1], cache=cache)
    outputs.append(y_t)
check("60 tokens one by one = one pass", torch.cat(outputs, 1), whole)

# %% [markdown]
# The same text 1,000 positions later: the output is the same, the state is not.

# %%
moved, moved_cache = layer(text, positions + 1000)
check("moved by 1,000: same output", moved, whole)
_ = must_differ("moved by 1,000: another state", moved_cache.state, whole_cache.state)

# %% [markdown]
# ## 7 · The state that turns
#
# There is a second way to see rotary SSD, without any absolute position. Write
# $\alpha_t = e^{\Delta_t A}$ for the decay factor of a token (the papers' $a_t$), $h_t$ for the
# state with turned writes, and look at the state through the reader's eyes:
# $\tilde h_t = h_t R_t$. Then $y_t = h_t R_t C_t = \tilde h_t C_t$, and
#
# $$\tilde h_t = \big(\alpha_t\, h_{t-1} + \Delta_t x_t B_t^\top R_t^\top\big) R_t
#   = \alpha_t\,\tilde h_{t-1}\,R_1 + \Delta_t\, x_t B_t^\top, \qquad y_t = \tilde h_t\, C_t.
#   \tag{4.10}$$
#
# C and B are not turned any more. Instead the *state* turns by one step each token, together with
# the decay: each of its rows, seen as a column, is multiplied by $\alpha_t R_1^\top = \alpha_t
# R_{-1}$. The further back a write lies, the further it has been turned. (Here $y$ is without the
# skip connection.) In code, with the angles of each token as an argument:


# %%
def turning_state(x, dt, A, B, C, angles):
    """Equation 4.10; at token t the pairs of the state turn by angles[t], (n/2,)."""
    heads = x.shape[2] // B.shape[2]  # in each group
    B, C = B.repeat_interleave(heads, dim=2), C.repeat_interleave(heads, dim=2)  # (b, l, h, n)
    decay = torch.exp(dt * A)[..., None, None]  # (b, l, h, 1, 1)
    state, outputs = torch.zeros(*x[:, 0].shape, B.shape[-1]), []  # (b, h, p, n)
    for t in range(x.shape[1]):
        write = einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        state = decay[:, t] * turn_halves(state, -angles[t]) + write
        outputs.append(einsum("bhpn,bhn->bhp", state, C[:, t]))
    return torch.stack(outputs, 1)


# %% [markdown]
# With the fixed angles $\theta_i$ at every token it is rotary SSD:

# %%
x, dt, A, B, C = inputs()
reference = rotary(ssd.ssd_recurrent)(x, dt, A, B, C)
theta = rope_frequencies(8, 100.0).expand(40, -1)  # the same angles at every token
check("state that turns = C and B that turn", turning_state(x, dt, A, B, C, theta), reference)
other_way = turning_state(x, dt, A, B, C, -theta)
still = turning_state(x, dt, A, B, C, 0 * theta)
_ = must_differ("state turned the other way", other_way, reference)
_ = must_differ("state that does not turn", still, reference)

# %% [markdown]
# ### A complex state space model
#
# Read each pair of columns of the state as one complex number. Then turning is multiplying by
# $e^{-\mathtt{i}\theta_i}$, and each pair obeys a scalar recurrence with the complex decay
# $\alpha_t\,e^{-\mathtt{i}\theta_i}$:
#
# $$z_{t,i} = \alpha_t\,e^{-\mathtt{i}\theta_i}\, z_{t-1,i} + \Delta_t\,x_t\,\hat B_{t,i}, \qquad
#   y_t = \sum_i \mathrm{Re}(z_{t,i}\,\hat C_{t,i}^*), \tag{4.11}$$
#
# with $\hat B_{t,i}$ and $\hat C_{t,i}$ the pair $i$ of $B_t$ and $C_t$ as complex numbers, and
# $z_{t,i}$ a vector of $p$ complex numbers.


# %%
def as_complex(vectors):
    """Entries i and i + n/2 as one complex number: (..., n) -> (..., n/2)."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.complex(first, second)


def complex_recurrence(x, dt, A, B_hat, C_hat, theta):
    """Equation 4.11 for one head: x (l, p), dt (l,), A (), B_hat, C_hat (l, n/2) -> (l, p)."""
    z, outputs = torch.zeros(x.shape[1], len(theta), dtype=torch.complex128), []  # (p, n/2)
    for t in range(len(x)):
        write = dt[t] * x[t, :, None] * B_hat[t]
        z = torch.exp(dt[t] * A) * torch.exp(-1j * theta) * z + write
        outputs.append((z * C_hat[t].conj()).real.sum(-1))
    return torch.stack(outputs)


# %% [markdown]
# Against row 0, head 3 (group 1) of the same inputs:

# %%
B_hat, C_hat = as_complex(B[0, :, 1]), as_complex(C[0, :, 1])
head = (x[0, :, 3], dt[0, :, 3], A[3], B_hat, C_hat)
by_complex = complex_recurrence(*head, theta[0])
check("complex diagonal recurrence = turned C and B", by_complex, reference[0, :, 3])
_ = must_differ("turned the other way", complex_recurrence(*head, -theta[0]), reference[0, :, 3])

# %% [markdown]
# What one write does over time: it spirals inwards. Decay alone only shrinks it; turning changes
# its direction too, which a reader can ask for. (After a round the directions come again, which is
# why there are many pairs: §3.) With a decay factor of 0.96 per token:

# %%
paths = {}
for name, phi in (("decay only", 0.0), ("decay, slow turn", 0.15), ("decay, fast turn", 0.8)):
    paths[name] = torch.exp((math.log(0.96) - 1j * phi) * torch.arange(61))
    rounds = 60 * phi / (2 * math.pi)
    print(f"{name:16}: after 60 tokens {rounds:.2f} rounds, length {paths[name][-1].abs():.3f}")
assert paths["decay only"].imag.abs().max() == 0


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


# %% tags=["figure"]
fig, axes = plotting.figure(1, 3, size=(12, 4.4))
for ax, (title, path) in zip(axes, paths.items(), strict=True):
    draw_path(ax, path, title)
axes[0].legend(loc="lower left", fontsize=12)
plotting.save(
    fig,
    "04_turning_state",
    "The path of one write in the complex plane over 60 tokens, marked after 0, 10 and 30 tokens. "
    "With decay only it slides along a line towards the origin; with a slow turn it spirals in "
    "over about one round and a half; with a fast turn over more than seven rounds.",
)

# %% [markdown]
# ### From fixed angles to learned ones
#
# In equation 4.10 nothing needs the angles to be the same at each token. Let token $t$ turn the
# pairs of the state by angles $\varphi_t$ of its own. Multiply 4.10 from the right by the
# rotation *back* by the running sum $\Phi_t = \varphi_1 + \dots + \varphi_t$, and the steps that
# led to 4.10 run backwards: C and B are turned by $\Phi_t$ instead of $t\theta$, and
# $\langle R(\Phi_t)\, C_t, R(\Phi_s)\, B_s\rangle$ sees $\Phi_t - \Phi_s$, the angles that lie
# between. Rotary positions are the case $\varphi_t = \theta$. Mamba-3 (Lahoti et al., 2026)
# computes $\varphi_t$ from the token, and calls it a data-dependent rotary embedding.

# %%
phi = random(40, 4, seed=30)  # an angle for each token and pair
Phi = phi.cumsum(0)[:, None]  # (l, 1, n/2)
by_sums = ssd.ssd_recurrent(x, dt, A, turn_halves(B, Phi), turn_halves(C, Phi))
by_state = turning_state(x, dt, A, B, C, phi)
check("angles that differ: state that turns = C, B turned by sums", by_state, by_sums)
_ = must_differ(
    "the same angles in another order", turning_state(x, dt, A, B, C, phi.flip(0)), by_sums
)

# %% [markdown]
# What is gained? A state that turns by half a round for every 1 and not at all for every 0 counts
# ones modulo two, the *parity* of a bit string. It keeps its length however long the string is.
# Here the angles are set by hand, without training:


# %%
def parity_by_turning(bits):
    """One complex number, written once and never decayed, turned by π at every 1: its signs."""
    z, signs = torch.ones((), dtype=torch.complex128), []
    for bit in bits:
        z = torch.exp(-1j * math.pi * bit.to(torch.complex128)) * z
        signs.append(int(z.real < 0))
    return signs, z.abs()


bits = torch.randint(0, 2, (200,), generator=torch.Generator().manual_seed(31))
truth = (bits.cumsum(0) % 2).tolist()
parity, length = parity_by_turning(bits)
assert parity == truth and abs(length - 1) < 1e-12
print(f"parity of 200 bits, {int(bits.sum())} of them ones: right after every bit")
print(f"length of the state at the end: {length:.3f}")

# %% [markdown]
# A fixed angle of half a round counts tokens, not ones:

# %%
every_token, _ = parity_by_turning(torch.ones_like(bits))
right = sum(sign == true for sign, true in zip(every_token, truth, strict=True))
assert right < 120
print(f"turned by π at every token: right after {right} of 200 bits")

# %% [markdown]
# ## 8 · Where the theorem fails
#
# In equation 4.9 the decay could be pulled out of the inner product because it is one number per
# head. OTCE's Algorithm 4 turns B and C of S6, the selective scan of Mamba-1. It is the same
# recurrence as SSD (chapter 01), but with a rate of decay for *each* entry of the state:
# $A_1, \dots, A_n$. From $s$ to $t$ passes the time $\tau = \Delta_{s+1} + \dots + \Delta_t$, and
# the decay over it is a diagonal matrix that stands *between* the two rotations:
#
# $$C_t^\top R_t^\top\, \Lambda\, R_s\, B_s, \qquad
#   \Lambda = \mathrm{diag}(e^{A_1\tau}, \dots, e^{A_n\tau}). \tag{4.12}$$
#
# Take a reader $\delta$ tokens after the writer: $R_{s+\delta}^\top \Lambda R_s =
# R_\delta^\top\,(R_s^\top \Lambda R_s)$. For all C and B this is free of the position $s$ only if
# $R_s^\top \Lambda R_s$ is what it is at $s = 0$, namely $\Lambda$: if $\Lambda R_s = R_s \Lambda$.
# For one pair, with $\Lambda_1$ and $\Lambda_2$ on the diagonal of $\Lambda$:

# %%
Lambda_1, Lambda_2, phi = sp.symbols("Lambda1 Lambda2 phi", real=True)
Lambda, turned = sp.diag(Lambda_1, Lambda_2), R_sym(phi)
commutator = (Lambda * turned - turned * Lambda).applyfunc(sp.factor)
expected = (Lambda_2 - Lambda_1) * sp.sin(phi) * sp.Matrix([[0, 1], [1, 0]])
assert (commutator - expected).applyfunc(sp.simplify).is_zero_matrix
print("Λ R - R Λ =", commutator.tolist())

# %% [markdown]
# That is zero for all angles if $\Lambda_1 = \Lambda_2$, and for no other decays. So the theorem
# needs $A$ to be *equal within each pair that turns together*; between the pairs it may differ. S6
# with turned B and C:


# %%
def rotary_scan(offset, x, dt, A, B, C):
    """S6 on one channel, positions from offset on: x, dt (1, l, 1), A (n,), B, C (1, l, n)."""
    positions = offset + torch.arange(x.shape[1])
    B = turn_at(B[:, :, None], positions)[:, :, 0]  # as one group, and back
    C = turn_at(C[:, :, None], positions)[:, :, 0]
    return selective_scan(x, dt, A[None], B, C)


# %% [markdown]
# With $A$ tied in pairs, moving the text changes nothing; with a rate per entry it does:

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

# %% [markdown]
# Tied in pairs means the pairs of the convention at hand. Rates that are equal in entries $2i$ and
# $2i + 1$ do not serve pairs $(i, i + n/2)$:

# %%
neighbours = -torch.arange(1.0, 5.0).repeat_interleave(2)
y, moved = rotary_scan(0, x, dt, neighbours, B, C), rotary_scan(7, x, dt, neighbours, B, C)
_ = must_differ("A tied for the other pairing, moved by 7", moved, y, at_least=0.01)
print(f"norm of the change / norm of the output {(moved - y).norm() / y.norm():.2f}")

# %% [markdown]
# The smallest case: one pair that turns by a radian per token, its entries keeping 0.9 and 0.5 per
# token, a reader two tokens after the writer, $\Delta_s = 1$. Tied (0.9 and 0.9), the entry
# $M_{s+2,\,s}$ is the same wherever the two stand; untied, it depends on the position of the
# writer.


# %%
def entry(decays, s, C_t, B_s):
    """C_tᵀ R_tᵀ Λ R_s B_s for t = s + 2, from what the two entries keep per token."""
    Lambda = torch.tensor(decays).pow(2).diag()  # over two tokens
    return (rotation_matrix(s + 2, 2) @ C_t) @ Lambda @ (rotation_matrix(s, 2) @ B_s)


C_t, B_s = torch.tensor([1.0, 0.5]), torch.tensor([-0.3, 1.0])
entries, spread = {}, {}
for decays in ((0.9, 0.5), (0.9, 0.9)):
    name = f"decays {decays[0]} and {decays[1]}"
    entries[name] = torch.stack([entry(decays, s, C_t, B_s) for s in range(41)])
    low, high = entries[name].min(), entries[name].max()
    spread[decays] = high - low
    print(f"{name}: from {low:.3f} to {high:.3f}")
assert spread[0.9, 0.5] > 0.3 and spread[0.9, 0.9] < 1e-12

# %% tags=["figure"]
fig, ax = plotting.figure(size=(10, 3.8))
names = dict(xlabel="position s of the writer", ylabel="M[s + 2, s] for Δ = 1")
plotting.lines(ax, range(41), entries, **names, ylim=(0, 1.1), marker="o", legend="right")
plotting.save(
    fig,
    "04_untied",
    "One entry of M, two tokens apart, against the position of the writer. With equal decays in "
    "the pair it is a flat line; with decays 0.9 and 0.5 it swings up and down with the position.",
)

# %% [markdown]
# SSD has one $A$ per head, so in this architecture the condition holds.
#
# ## 9 · Three sources of position
#
# A recurrence is not blind to order even without rotations. WM Table 1 compares three sources, and
# the layer `SSD` has all three behind one option:
#
# | `position` | what tells tokens at different distances $\delta$ apart | as in |
# |---|---|---|
# | `"decay"` | how much is left of each, $L_{ts}$: near or far | Mamba-2's $\alpha_t$ |
# | `"conv"` | the tap of a short convolution that each meets; and decay | Mamba-2 |
# | `"rope"` | the angles of $n/2$ pairs; and decay | WM, Cheems, OTCE |
#
# The *short convolution* stands between the projections and SSD: each channel of x, of B *and* of C
# is replaced by a mix of its own values at the four newest tokens, with learned weights (*taps*),
# followed by SiLU. So $x_t$, $B_t$ and $C_t$ know tokens $t - 3$ to $t$. (Mamba convolves x alone,
# and computes B and C from the result, with the same reach.)
#
# Where do the three differ? Take a plain task that is about nothing but distance: *name the token
# that stood $\delta$ tokens ago*, among random tokens. The model is one embedding, one SSD layer,
# one linear map. A different model is trained for each lag $\delta$.


# %%
def look_back_model(position, vocabulary=16):
    """Embedding, SSD layer, linear map, in float32."""
    parts = {
        "embedding": torch.nn.Embedding(vocabulary, 32),
        "mixer": ssd.SSD(32, n_heads=4, d_state=32, position=position, rope_base=100.0),
        "head": torch.nn.Linear(32, vocabulary, bias=False),
    }
    return torch.nn.ModuleDict(parts).float()


def look_back_batch(model, lag, texts, generator, length=64):
    """Random texts through the model: logits from token `lag` on, and the tokens to be named."""
    ids = torch.randint(model["embedding"].num_embeddings, (texts, length), generator=generator)
    positions = torch.arange(length).expand(texts, -1)
    y, _ = model["mixer"](model["embedding"](ids), positions)
    return model["head"](y)[:, lag:], ids[:, : length - lag]


# %% [markdown]
# Training is AdamW with a learning rate that falls to 0, on 16 new texts of 64 tokens per step:


# %%
def train_to_look_back(position, lag, steps, seed=0):
    """Train to name the token `lag` tokens ago: share named right in new texts, and the model."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = look_back_model(position)
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
# Live, for a lag of 8, where a model that guesses names 1 in 16:

# %%
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads
right = {}
for position in ("rope", "conv", "decay"):
    right[position], _ = train_to_look_back(position, lag=8, steps=200)
assert right["rope"] > 0.5 and right["conv"] < 1 / 3 and right["decay"] < 1 / 3
print("8 tokens back after 200 steps: rope names more than half, conv and decay under a third")

# %% [markdown]
# For other lags, from a record: `python book/records.py 04_three_sources` trains 99 models with
# these functions, three seeds each, for 300 steps. Medians of the seeds:

# %%
record = read_record("04_three_sources")
lags, accuracy = record["lags"], record["accuracy"]
print("lag   " + "".join(f"{lag:6}" for lag in lags))
for position, shares in accuracy.items():
    print(f"{position:6}" + "".join(f"{share:6.2f}" for share in shares))

# %% [markdown]
# After 300 steps, from lag 2 to 6 the convolution names more than rope does. At 7 it falls behind,
# and from 8 on it names less than half as many as rope, from 16 on even fewer than decay. Decay
# alone names the token just before; from lag 2 on it names about a quarter or less.

# %%
at = {position: dict(zip(lags, shares, strict=True)) for position, shares in accuracy.items()}
assert at["rope"][1] == 1 and at["rope"][8] > 0.7 and 0.55 < at["rope"][24] < 0.65
assert min(at["conv"][lag] for lag in range(1, 7)) > 0.9 and 0.6 < at["conv"][7] < 0.7
assert max(at["conv"][lag] for lag in lags if lag >= 8) < 0.3
assert at["decay"][1] == 1 and all(0.13 < at["decay"][lag] < 0.26 for lag in lags if lag > 1)
assert all(at["conv"][lag] < 0.5 * at["rope"][lag] for lag in lags if lag >= 8)
assert all(at["conv"][lag] < at["decay"][lag] for lag in lags if lag >= 16)
ahead = [lag for lag in lags if at["conv"][lag] > at["rope"][lag]]
assert ahead == [2, 3, 4, 5, 6]
print("the convolution is ahead of rope at the lags", ahead)

# %% [markdown]
# Between convolution and decay this is speed of learning. After 1,500 steps (one seed, from the
# record of `python book/records.py 04_detour`) convolution is no longer behind decay:

# %%
detour = read_record("04_detour")
longer = detour["accuracy"]
print("lag   " + "".join(f"{lag:6}" for lag in detour["lags"]))
for position, shares in longer.items():
    print(f"{position:6}" + "".join(f"{share:6.2f}" for share in shares))
assert all(c > d for c, d in zip(longer["conv"], longer["decay"], strict=True))

# %% [markdown]
# Why is decay above chance, 1 in 16, at far lags? Counting is nearly enough for that. A rule that
# names the token that occurred most often so far is right about as often:

# %%
texts = torch.randint(16, (4096, 64), generator=torch.Generator().manual_seed(74))
most_often = F.one_hot(texts, 16).cumsum(1).argmax(-1)  # up to each token, (texts, 64)
counting = {lag: (most_often[:, lag:] == texts[:, :-lag]).double().mean() for lag in (16, 24)}
for lag, share in counting.items():
    assert abs(share - at["decay"][lag]) < 0.02
    print(f"lag {lag}: counting {share:.2f}, decay {at['decay'][lag]:.2f}")

# %% [markdown]
# And why does lag 1 succeed where 2 fails, with the token itself as the newest write? $y_t$ is a
# sum over the tokens. The part of the token itself, $C_t \cdot B_t\,\Delta_t x_t$ and the skip
# connection, is a function of that token alone, and training can make it smaller than the newest.
# Of the rest, decay makes the newest stand out. For lag 2 the newest is in the way, and $C_t$, a
# function of its own token alone, knows nothing of it. In a decay model trained for lag 1 the parts
# vary the logits by so much:

# %%
for delta, part in enumerate(detour["parts"]):
    print(f"{delta} tokens back: standard deviation {part:.1f}")
own, newest, *older = detour["parts"]
assert newest > 1.5 * own and newest > 2.5 * max(older)

# %% [markdown]
# What do the models trained for lag 8 look at (those of the first seed)? Take a random mix of the
# numbers in the last output, and its gradient with respect to each token. The norm of the gradient
# says how much the output depends on that token; the norms for the 24 newest tokens, divided by
# their sum, are the *share of the influence*. Rope has a second peak at the token itself, and conv
# one at 3, the end of its own reach:

# %%
influence = record["influence"]
for position, shares in influence.items():
    peak = shares.index(max(shares))
    print(f"{position:5}: most influence {peak} tokens back, with a share of {shares[peak]:.3f};"
          f" at 8 it is {shares[8]:.3f}")  # fmt: skip
    assert peak == {"rope": 8, "conv": 7, "decay": 0}[position]
rope, conv = influence["rope"], influence["conv"]
assert sorted(rope)[-2] == rope[0] and conv[3] > max(conv[:3] + conv[4:7])
print(f"rope at 0: {rope[0]:.3f}; conv at 3: {conv[3]:.3f}")

# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.4))
titles = "after 300 steps", "trained for lag 8: what is looked at"
first = dict(title=titles[0], xlabel="lag", ylabel="share named right", ylim=(0, 1.05))
second = dict(title=titles[1], xlabel="tokens back", ylabel="share of the influence")
plotting.lines(axes[0], lags, accuracy, **first, marker="o")
plotting.level(axes[0], 1 / 16, "chance", side="left")
plotting.lines(axes[1], range(24), influence, **second, marker=".")
axes[1].axvline(8, color=plotting.QUIET, linewidth=1)
plotting.save(
    fig,
    "04_three_sources",
    "Left: share of tokens named right after 300 steps against the lag, for three sources of "
    "position. Rope falls from 1 at lag 1 to about 0.6 at 24; conv is above 0.9 up to lag 6, about "
    "0.65 at 7 and below 0.3 from 8 on; decay is 1 at lag 1 and below 0.26 from 2 on. Right: "
    "influence of tokens on models trained for lag 8. Rope has its peak at 8 and a second one at "
    "0, conv at 7 and a lower one at 3, decay at the token itself.",
)

# %% [markdown]
# ### How does a convolution of 4 tokens reach 7?
#
# In the model trained for lag 7 with 1,500 steps, here is the mean weight $M_{t,t-\delta}$ with
# which a token reads what was written $\delta$ tokens before:

# %%
print("δ     " + "".join(f"{delta:7}" for delta in range(12)))
for head, weights in enumerate(detour["weights"]):
    print(f"head {head}" + "".join(f"{weight:7.2f}" for weight in weights))
    assert max(weights) == weights[4] > 3 * max(map(abs, weights[:4]))
    assert weights[4] > weights[5] > weights[6]
assert longer["conv"][0] > 0.8 and longer["conv"][1] < 0.4

# %% [markdown]
# In all four heads the largest weight is that of $\delta = 4$. This is what one expects of a
# detour, as at lag 1 without convolution: $C_t$ knows the four newest tokens, and can give little
# weight to writes like theirs. Of the rest, decay makes the newest stand out, the write at $t - 4$.
# And $x_{t-4}$, being convolved too, knows tokens back to $t - 7$. Further than $4 + 3$ this detour
# does not lead, and indeed, after 1,500 steps, the accuracy drops from 0.89 at lag 7 to 0.34 at 8.
#
# ### What the papers report
#
# That is one layer and a toy; stacked layers can hand positions on. The papers compare the
# perplexity (the exponential of the mean loss per token) of language models on texts of 8,192
# tokens:
#
# > "[…] the perplexity performance of all combined modules shows that $RoPE$ is better than
# > $Conv1d + D$ and $a_t$." — WM Table 1
#
# Here $a_t$ is the decay alone, and $Conv1d + D$ the short convolution with the skip connection.
# Ch Table 2 has two of the comparisons as well:

# %%
sources = ("Conv1d + D", "a_t", "RoPE")
wm = {"SSD": (8.56, 8.62, 8.33), "SSD + attention": (8.48, 8.56, 8.18)}
cheems = {"SSD": (2.56, 2.62, 2.33), "SSD + attention": (2.48, 2.56, 2.18)}
print(f"{'':16}" + "".join(f"{source:>12}" for source in sources))
for name, row in wm.items():
    conv, decay, rope = row
    assert rope < conv < decay
    differences = [round(in_wm - in_ch, 2) for in_wm, in_ch in zip(row, cheems[name], strict=True)]
    assert differences == [6.0, 6.0, 6.0]
    print(f"{name:16}" + "".join(f"{number:12.2f}" for number in row))
    print(f"{'minus Ch':16}" + "".join(f"{number:12.2f}" for number in differences))

# %% [markdown]
# Each of these numbers is lower by 6.00 in Ch. Nothing here can settle which is meant; the order of
# the three is the same in both.
#
# ### A trained model, moved
#
# The theorem holds for any weights: a model that was trained on positions 0 to 63 works at
# other positions as well, up to rounding. (The theorem moves a text. It does not lengthen it:
# distances above 63 were never trained.)

# %%
_, model = train_to_look_back("rope", lag=2, steps=20)
model = model.double().requires_grad_(False)
tokens = model["embedding"](torch.randint(16, (4, 64), generator=torch.Generator().manual_seed(40)))
here, _ = model["mixer"](tokens, torch.arange(64).expand(4, -1))
there, _ = model["mixer"](tokens, 50_000 + torch.arange(64).expand(4, -1))
check("trained on positions below 64, used from 50,000 on: same output", there, here)

# %% [markdown]
# ## 10 · As printed
#
# The sign of the final matrix (§2) and Algorithm 4 (§8) have been dealt with. Here is the rest.
#
# ### The last block of the matrix (Ch eq. 4, WM §3.1, OTCE Appendix A)
#
# The printed matrix begins with $\theta_0$ and has $\theta_{d/2}$ and $\theta_{d/2-1}$ mixed in its
# last block, while the angles are counted from 1:
#
# > $\cos i\theta_{d/2},\; -\sin i\theta_{d/2-1};\quad \sin i\theta_{d/2},\; \cos i\theta_{d/2-1}$
# > — Ch eq. 4, last block
#
# > $\Theta = \{\theta_i = n^{-2(i-1)/d},\; i \in [1, 2, \dots, d/2]\}$ — Ch eq. 3
#
# ($n$ is the base there, and $i$ in eq. 4 the position.) Taken literally, and with $\theta_0$ from
# the formula of eq. 3 as well:


# %%
def matrix_as_printed(position, dim, base=10_000.0):
    """Ch eq. 3 and 4 taken literally, (dim, dim)."""
    theta = [base ** (-2 * (i - 1) / dim) for i in range(dim // 2 + 1)]
    blocks = [R(position * theta[i]) for i in range(dim // 2 - 1)]
    last, before = position * theta[dim // 2], position * theta[dim // 2 - 1]
    mixed = [[math.cos(last), -math.sin(before)], [math.sin(last), math.cos(before)]]
    return torch.block_diag(*blocks, torch.tensor(mixed))


# %% [markdown]
# The last block is no rotation: $R^\top R$ is not the identity. With one index in the block it is.

# %%
for dim, at_least in ((8, 0.5), (64, 0.1)):
    identities = torch.eye(dim).expand(200, -1, -1)
    printed = torch.stack([matrix_as_printed(t, dim) for t in range(0, 5000, 25)])
    name = f"as printed, dim {dim}: RᵀR = I"
    off = must_differ(name, printed.mT @ printed, identities, at_least=at_least)
    right = [rotation_matrix(t, dim, pairing="interleaved") for t in range(0, 5000, 25)]
    right = torch.stack(right)
    check(f"one index, dim {dim}: RᵀR = I", right.mT @ right, identities)
    print(f"as printed, dim {dim}: RᵀR is off by up to {off:.2f}")

# %% [markdown]
# So positions leak. Two vectors that lie in the last pair, six tokens apart, at 200 positions of
# the writer:

# %%
dim = 8
q, k = torch.zeros(dim), torch.zeros(dim)
q[-2:], k[-2:] = torch.tensor([0.6, 0.8]), torch.tensor([-0.8, 0.6])
leaking, right = [], []
for s in range(0, 5000, 25):
    leaking.append((matrix_as_printed(s + 6, dim) @ q) @ (matrix_as_printed(s, dim) @ k))
    reader = rotation_matrix(s + 6, dim, pairing="interleaved")
    writer = rotation_matrix(s, dim, pairing="interleaved")
    right.append((reader @ q) @ (writer @ k))
leaking, right = torch.stack(leaking), torch.stack(right)
check("one index: the same score everywhere", right, right[:1].expand(200))
_ = must_differ("as printed: the same score everywhere", leaking, leaking[:1].expand(200))
print(f"as printed: scores from {leaking.min():.2f} to {leaking.max():.2f}")

# %% [markdown]
# And since eq. 3 counts from 1, its formula gives $\theta_0 = \text{base}^{2/d}$, which for $d = 8$
# and a base of 10,000 is 10: the first pair turns by ten radians per token, not by one.

# %%
first_block = matrix_as_printed(1, 8)[:2, :2]
check("as printed, dim 8: the first pair turns by 10 per token", first_block, R(10.0))
_ = must_differ("as printed: by 1", first_block, R(1.0))

# %% [markdown]
# ### Turned by the number of the head (WM Listing 7)
#
# Listing 7 lays Q and K out as (b, h, l, d) and calls `apply_QK_rotary_pos_emb` with its default
# `unsqueeze_dim=2`, which is meant for (b, l, h, d):


# %%
def apply_as_printed(q, cosine, sine, unsqueeze_dim=2):
    """WM Listing 1's application, which broadcasts along whatever axis it is given."""
    first, second = q.chunk(2, dim=-1)
    quarter_turn = torch.cat([-second, first], dim=-1)
    return q * cosine.unsqueeze(unsqueeze_dim) + quarter_turn * sine.unsqueeze(unsqueeze_dim)


# %% [markdown]
# What happens depends on the numbers of heads and of tokens:

# %%
cosine, sine = rope_cos_sin(torch.arange(12).expand(2, -1), 8, dtype=torch.float64)  # (b, l, d)
outcomes = []
for heads in (4, 1, 12):
    q = random(2, heads, 12, 8, seed=52)  # (b, h, l, d)
    try:
        outcomes.append(str(tuple(apply_as_printed(q, cosine, sine).shape)))
    except RuntimeError:
        outcomes.append("does not run")
    print(f"h = {heads:2}, l = 12: {tuple(q.shape)} becomes: {outcomes[-1]}")
assert outcomes == ["does not run", "(2, 12, 12, 8)", "(2, 12, 12, 8)"]
one = [t[:, 7:8] for t in (cosine, sine)]  # one token at position 7, as in decoding
q = random(2, 4, 1, 8, seed=53)
right = apply_rope(q.transpose(1, 2), *one).transpose(1, 2)
check("h = 4, l = 1: right all the same", apply_as_printed(q, *one), right)

# %% [markdown]
# With one head, which is what WM Table 6 uses, an axis of length $l$ appears out of nothing. With
# as many heads as tokens the code runs, and turns every token by the number of its head. So the
# scores hold no position at all:

# %%
q, k = random(2, 12, 12, 8, seed=52), random(2, 12, 12, 8, seed=57)  # (b, h, l, d) with h = l
printed, printed_k = apply_as_printed(q, cosine, sine), apply_as_printed(k, cosine, sine)
by_head = torch.stack([q[:, head] @ rotation_matrix(head, 8).T for head in range(12)], dim=1)
check("h = l: turned by the number of the head", printed, by_head)
check("h = l: the scores are those without positions", printed @ printed_k.mT, q @ k.mT)
right = apply_rope(q.transpose(1, 2), cosine, sine).transpose(1, 2)
check("unsqueeze_dim=1 repairs the listing", apply_as_printed(q, cosine, sine, 1), right)
_ = must_differ("h = l: as printed", printed, right)

# %% [markdown]
# The package has one layout, (b, l, h, d), and refuses the other where the numbers give it away.
# With $h = l$ they do not, and it is misled as the listing is:

# %%
check("h = l: apply_rope on the wrong layout", apply_rope(q, cosine, sine), printed)

# %% tags=["raises-exception"]
apply_rope(random(2, 4, 12, 8, seed=53), cosine, sine)

# %% [markdown]
# ### A base that moves under a cache (WM Listing 1)
#
# To read beyond the length of the training, the listing stretches the base, and takes the length
# $l$ from the largest position *of the current call*. This is *dynamic NTK*, named after the neural
# tangent kernel, which its first proposal argued with:
#
# $$\text{base}' = \text{base} \cdot \Big(\rho\,\frac{l}{l_0} - (\rho - 1)\Big)^{d/(d-2)}
#   \quad\text{for } l > l_0, \tag{4.13}$$
#
# with $l_0$ the length in training and $\rho \ge 1$ a stretching factor. Where does it come from?
# The last pair turns by $\theta_{d/2-1} = \text{base}^{-(d-2)/d}$ per token. To make it slower by
# the bracket, set $\text{base}'^{-(d-2)/d} = \text{base}^{-(d-2)/d} / \text{bracket}$ and solve for
# $\text{base}'$. The first pair stays as it was, $\theta_0 = 1$. At $l = l_0$ the bracket is 1, so
# nothing jumps; at $l = 4\,l_0$ it is $3\rho + 1$:

# %%
slowest = rope_frequencies(16)[-1]
for rho in (1, 2, 4):
    base = ntk_base(4 * 64, 16, max_positions=64, scaling_factor=rho)
    slower = slowest / rope_frequencies(16, base)[-1]
    check(f"ρ = {rho}: the slowest pair is slower by 3ρ + 1", slower, torch.tensor(3.0 * rho + 1))
    print(f"four times the length, ρ = {rho}: {slower:.1f} times slower, first pair"
          f" {rope_frequencies(16, base)[0]:.1f}")  # fmt: skip

# %% [markdown]
# As a formula it does what it should. But a cache holds keys that were turned with an older base.
# Here are the scores of a text's last query, with $\rho = 1$, when each key was turned on its
# arrival, and when all were turned with one base:


# %%
def last_scores(length, moving, seed=54, trained=64, dim=16):
    """Scores (length,) of the last query; each key turned when it came, or all with one base."""
    q, k = random(2, length, dim, seed=seed)
    final = ntk_base(length, dim, max_positions=trained)
    keys = []
    for s in range(length):
        base = ntk_base(s + 1, dim, max_positions=trained) if moving else final
        keys.append(rotation_matrix(s, dim, base) @ k[s])
    return torch.stack(keys) @ (rotation_matrix(length - 1, dim, final) @ q[-1]) / math.sqrt(dim)


check("up to the training length: no difference", last_scores(64, True), last_scores(64, False))
_ = must_differ("one token beyond it", last_scores(65, True), last_scores(65, False), at_least=0.01)

# %% [markdown]
# At three times the length, the share of the attention that lies elsewhere (half the sum of the
# absolute differences of the weights), over ten texts:

# %%
elsewhere = []
for seed in range(10):
    decoded = last_scores(192, True, seed).softmax(-1)
    prefilled = last_scores(192, False, seed).softmax(-1)
    elsewhere.append((decoded - prefilled).abs().sum() / 2)
elsewhere = torch.stack(elsewhere)
assert elsewhere.mean() > 0.1
print(f"elsewhere: {elsewhere.mean():.2f} of the attention on average,"
      f" from {elsewhere.min():.2f} to {elsewhere.max():.2f}")  # fmt: skip

# %% [markdown]
# Keys could be turned again, one by one. A state of SSD is one sum of writes turned with different
# bases, and cannot be taken apart. So `ntk_base` is a function of a length that the caller fixes
# once per text. Decoding token by token, with a base for each length:


# %%
def decode(layer, text, base_at):
    """Token by token, with the base base_at(length so far) in each call."""
    cache, outputs = None, []
    positions = torch.arange(text.shape[1])[None]
    for t in range(text.shape[1]):
        layer.rope_base = base_at(t + 1)
        y, cache = layer(text[:, t : t + 1], positions[:, t : t + 1], cache=cache)
        outputs.append(y)
    return torch.cat(outputs, 1)


# %% [markdown]
# The truth for each token is one pass over the text up to it, all of it turned with the base that
# the token itself uses:


# %%
def read_anew(layer, text, base_at):
    """Each token from one pass over the text up to it, with the base base_at(length so far)."""
    outputs = []
    for length in range(1, text.shape[1] + 1):
        layer.rope_base = base_at(length)
        y, _ = layer(text[:, :length], torch.arange(length)[None])
        outputs.append(y[:, -1:])
    return torch.cat(outputs, 1)


def stretched(length):
    """The base that dynamic NTK takes for this length, trained on 64."""
    return ntk_base(length, 16, max_positions=64)


# %% [markdown]
# With one base for all, the two agree. With the base of the current length they agree up to the
# training length, and not beyond it (without the skip connection, as in §6):

# %%
_ = torch.manual_seed(0)
layer = ssd.SSD(32, n_heads=4, d_state=16).requires_grad_(False)
_ = layer.D.zero_()
text = random(1, 192, 32, seed=55)
once = [f(layer, text, lambda length: stretched(192)) for f in (decode, read_anew)]
check("base fixed up front: decoding = reading anew", *once)
decoded, anew = (f(layer, text, stretched) for f in (decode, read_anew))
check("base of the current length: the first 64 tokens", decoded[:, :64], anew[:, :64])
decoded, anew = decoded[:, 64:], anew[:, 64:]
_ = must_differ("base of the current length: the tokens beyond", decoded, anew, at_least=0.01)
print(
    f"beyond 64: norm of the error / norm of the output {(decoded - anew).norm() / anew.norm():.2f}"
)

# %% [markdown]
# ### Log scaling in a linear model (OTCE Appendix A)
#
# In a text of $l$ tokens the distance 0 occurs $l$ times and the distance $l - 1$ once: long
# distances are rare in training. OTCE calls the long ones the *high bit* of the
# positions, says that they generalise less well, and multiplies C by $\max(1, \log_{l_0} l)$ (with
# other letters),
#
# > "[…] so that the problem of insufficient generalization ability of the high bit can be solved."
# > — OTCE, Appendix A
#
# with $l_0$ the mean length of the texts in training. That is one factor for a whole text. Who
# decodes does not know its length yet. So the package gives the reader at position $t$ the factor
# of the $t + 1$ tokens that it sees,
#
# $$\lambda_t = \max(1, \log_{l_0}(t + 1)),$$
#
# which is 1 up to position $l_0 - 1$ and 2 where $t + 1 = l_0^2$:

# %%
positions = torch.arange(64)[None]
scale = log_length_scale(positions, base_length=8, dtype=torch.float64)  # (b, l)
assert (scale[0, :8] == 1).all() and abs(scale[0, 63] - 2) < 1e-12
for t in (0, 7, 8, 20, 63):
    print(f"l₀ = 8: factor at position {t:2}: {scale[0, t]:.3f}")

# %% [markdown]
# In the softmax of attention such a factor on the query does something. Over more tokens the
# weights flatten; larger scores make them more peaked again. The mean entropy of the weights over
# random scores, in nats (the natural logarithm of the number of tokens if all weights are equal):


# %%
def entropy(weights):
    """In nats, along the last axis."""
    return -(weights * weights.log()).sum(-1)


few, many = random(256, 8, seed=58), random(256, 64, seed=56)
short, long = entropy(few.softmax(-1)).mean(), entropy(many.softmax(-1)).mean()
sharpened = entropy((scale[0, 63] * many).softmax(-1)).mean()
assert short < sharpened < long - 0.5
print(
    f"over 8 tokens {short:.2f}, over 64 tokens {long:.2f}, over 64 with factor 2: {sharpened:.2f}"
)

# %% [markdown]
# SSD is linear in C. There the factor multiplies what comes out of the state, from near and from
# far alike: the *choice* among the tokens stays what it was, with one factor for the text (here 2)
# as with one for each reader.

# %%
x, dt, A, B, C = inputs(l=64)
factor = scale[..., None, None]  # (b, l, 1, 1)
plain = ssd.ssd_chunked(x, dt, A, B, C)
scaled = ssd.ssd_chunked(x, dt, A, B, factor * C)
check("C times the factor = output times the factor", scaled, factor * plain)
check("one factor for the text: the same", ssd.ssd_chunked(x, dt, A, B, 2 * C), 2 * plain)
_ = must_differ("C times the factor = the output unchanged", scaled, plain)

# %% [markdown]
# A norm directly behind the state removes even that. With the skip connection $D\,x_t$ added before
# the norm, something is left: the mix of the state and the skip connection changes.


# %%
def normed(y):
    """The norm of all heads together: (b, l, h, p) -> (b, l, h p)."""
    return F.rms_norm(y.flatten(2), (y.shape[2] * y.shape[3],), eps=1e-12)


check("behind a norm nothing is left of the factor", normed(scaled), normed(plain))
_ = must_differ("with a skip connection the mix changes", normed(scaled + x), normed(plain + x))

# %% [markdown]
# ### Not printed, but near: rows instead of columns
#
# Ch eq. 1 turns columns, $R_t W x$; from eq. 5 on, the same text writes rows, $XW$. The papers do
# not write a rotation of rows. Whoever does must take the *transpose*, $x W R_t^\top$; $x W R_t$
# turns backwards.

# %%
q, k = random(2, 8, seed=51)
row = q @ rotation_matrix(3, 8)
check("row times R = turned by the negative angle", row, rotation_matrix(-3, 8) @ q)
_ = must_differ("row times R = R times column", row, rotation_matrix(3, 8) @ q)

# %% [markdown]
# If both vectors are turned so, distances still come out, with past and future exchanged. The
# scores of weights that were trained the other way are wrong:

# %%
forwards = (rotation_matrix(9, 8) @ q) @ (rotation_matrix(3, 8) @ k)
backwards = (q @ rotation_matrix(9, 8)) @ (k @ rotation_matrix(3, 8))
exchanged = (rotation_matrix(3, 8) @ q) @ (rotation_matrix(9, 8) @ k)
check("both backwards: reader and writer exchanged", backwards, exchanged)
_ = must_differ("both backwards: the score", backwards, forwards)
print(f"score {forwards:.3f}, both backwards {backwards:.3f}")

# %% [markdown]
# ## Summary
#
# - $\langle R_t q, R_s k\rangle = q^\top R_{s-t}\,k$: two properties of rotations and one line.
#   The published proof says the same in thirteen lines, and the last has the sign turned round.
# - A wide vector is many pairs that turn at different speeds. Which coordinates make a pair is a
#   convention that weights depend on.
# - SSD inherits the theorem because its decay is one number per head. Where the decay differs
#   within a pair, as it can in S6, it fails.
# - The output knows distances, the cache knows absolute positions: go on counting.
# - Turned C and B are a state that turns: a complex state space model with fixed angles. With an
#   angle from each token, as in Mamba-3, such a state can compute the parity of a bit string.
# - In the toy task, after 300 steps, decay alone found the token just before; a convolution of four
#   tokens reached 7, and was ahead of rotations from 2 to 6; rotations reached furthest.
#
# | as printed | what happens | what holds |
# |---|---|---|
# | $R_{t-s}$ between C and B | reader and writer exchanged | $R_{s-t}$ |
# | conjugate of the product | another number | product with *one* conjugate |
# | $\theta_{d/2}$, $\theta_{d/2-1}$ in one block | no rotation; positions leak | one index |
# | `unsqueeze_dim=2` on (b, h, l, d), l > 1 | no run, or no position | `unsqueeze_dim=1` |
# | base from the current length | cache and query disagree | one base per text |
# | log scaling of C in SSD | scales the output, chooses nothing | scale Q of attention |
# | RoPE with a full diagonal A | positions leak | A tied in pairs, or one A |
#
# ## Exercises

# %% [markdown]
# **1 · easy.** After how many tokens has pair $i$ of width `dim` made one full round? Which pairs
# have made less than one round over a text of `length` tokens?


# %% tags=["exercise"]
def rounds(length, dim, base=10_000.0):
    """Tokens per round of each pair, (dim/2,), and a list of the pairs that make less than one."""
    ### BEGIN SOLUTION
    tokens = 2 * math.pi * base ** (2 * torch.arange(dim // 2) / dim)
    return tokens, [i for i in range(dim // 2) if tokens[i] > length]
    ### END SOLUTION


# %% tags=["check"]
cases = {
    (4096, 64, 10_000.0): range(23, 32),
    (64, 16, 100.0): range(5, 8),
    (6, 64, 50.0): range(32),
}
for (length, dim, base), expected in cases.items():
    tokens, slow = rounds(length, dim, base)
    check("tokens per round, times θ_i = 2π", tokens * rope_frequencies(dim, base),
          torch.full((dim // 2,), 2 * math.pi))  # fmt: skip
    assert slow == list(expected)
    print(f"width {dim}, base {base:,.0f}, {length:,} tokens: pairs {slow[0]} to {slow[-1]}")
assert rounds(4096, 64)[1] == list(range(23, 32))

# %% [markdown]
# **2 · easy.** GPT-NeoX turns only the first `r` coordinates of a vector and leaves the rest alone.
# Write it with `apply_rope`: a vector of width `r` of its own. Does the theorem still hold, and
# why?


# %% tags=["exercise"]
def partial_rope(x, positions, r, base=10_000.0):
    """x (b, l, h, d), positions (b, l); the first r coordinates turn, r even. Returns x's shape."""
    ### BEGIN SOLUTION
    cosine, sine = rope_cos_sin(positions, r, base, dtype=x.dtype)
    return torch.cat([apply_rope(x[..., :r], cosine, sine), x[..., r:]], dim=-1)
    ### END SOLUTION


# %% tags=["check"]
x, positions = random(2, 10, 2, 12, seed=60), torch.stack([torch.arange(10), torch.arange(3, 13)])
for r, base in ((8, 10_000.0), (4, 100.0)):
    turned = partial_rope(x, positions, r, base)
    matrices = [rotation_matrix(int(t), r, base) for t in positions.flatten()]
    first = einsum("tij,thj->thi", torch.stack(matrices), x[..., :r].flatten(0, 1))
    check(f"the first {r} coordinates turn", turned[..., :r].flatten(0, 1), first)
    check("the rest is left alone", turned[..., r:], x[..., r:])
here, there = partial_rope(x, positions, 8), partial_rope(x, positions + 500, 8)
products = [einsum("blhd,bshd->bhls", turned, turned) for turned in (here, there)]
check("inner products at these positions and 500 later", products[1], products[0])
print("The theorem holds: a coordinate that is left alone turns by 0 per token.")

# %% [markdown]
# **3 · medium.** A conversation is cut at the front, and the cached keys of the tokens that stay
# must move from their old positions to new ones, `offset` positions earlier. The unturned keys are
# gone. Move the turned keys. (Hint: $R_{s - \text{offset}} = R_{-\text{offset}}\,R_s$, and
# `rotation_matrix` takes negative positions; keys are rows. Only positions move so: above the first
# layer of a deep model the keys go on holding what their tokens read from the part that is cut
# off.)


# %% tags=["exercise"]
def move_keys(turned, offset, base=10_000.0):
    """turned (b, l, h, d): keys turned by positions s; the keys turned by s - offset."""
    ### BEGIN SOLUTION
    return turned @ rotation_matrix(-offset, turned.shape[-1], base).T
    ### END SOLUTION


# %% tags=["check"]
keys, positions = random(1, 10, 2, 12, seed=61), torch.arange(100, 110)[None]
for offset, base in ((100, 10_000.0), (37, 100.0)):
    old = apply_rope(keys, *rope_cos_sin(positions, 12, base, dtype=torch.float64))
    new = apply_rope(keys, *rope_cos_sin(positions - offset, 12, base, dtype=torch.float64))
    moved = move_keys(old, offset, base)
    check(f"keys moved by {offset} = keys turned by the new positions", moved, new)
    _ = must_differ("not moved", old, new)

# %% [markdown]
# **4 · medium.** The state of rotary SSD holds writes turned by absolute positions. Move the *whole
# state* to other positions, so that a prompt that was read from position 0 on can stand at position
# 500, with nothing before it. (Hint: each row of the state is a weighted sum of turned vectors B.
# In a deep model it serves every layer: a moved text gives the same output in each.)


# %% tags=["exercise"]
def move_state(state, offset, base=100.0):
    """state (b, h, p, n), written from position 0 on; the same as if written from offset on."""
    ### BEGIN SOLUTION
    return state @ rotation_matrix(offset, state.shape[-1], base).T
    ### END SOLUTION


# %% tags=["check"]
x, dt, A, B, C = inputs()
for offset, base in ((500, 100.0), (7, 10_000.0)):
    states = []
    for start in (0, offset):
        turned = [turn_at(vectors, start + torch.arange(40), base) for vectors in (B, C)]
        states.append(ssd.ssd(x, dt, A, *turned, return_final_state=True)[1])
    moved = move_state(states[0], offset, base)
    check(f"state moved by {offset} = state of the moved text", moved, states[1])
    _ = must_differ("not moved", states[0], states[1])

_ = torch.manual_seed(0)
here = there = random(1, 40, 32, seed=62)
for number in (1, 2):
    layer = ssd.SSD(32, n_heads=4, d_state=16, rope_base=100.0).requires_grad_(False)
    here, cache = layer(here, torch.arange(40)[None])
    there, later = layer(there, 500 + torch.arange(40)[None])
    check(f"two layers, state of layer {number}", move_state(cache.state, 500), later.state)

# %% [markdown]
# **5 · hard.** A reader wants to see the token 8 tokens back and no other, whatever it holds: find
# a query $q$ such that $\langle R_t q, R_s k\rangle$, with $k = (1, \dots, 1)$, is close to 1 at
# distance 8 and to 0 at all other distances from 0 to 63, as far as that can be had. At distance
# $\delta$ the inner product is $q \cdot R_{-\delta} k$, so the vectors $R_{-\delta} k$ are the rows
# of a system of 64 linear equations. Some of them nearly depend on others, and the plain least
# squares solution has entries above 10,000. Take the truncated one, `torch.linalg.pinv(rows,
# rtol=1e-3)`, which leaves out the directions whose singular value is below a thousandth of the
# largest. What does the reader see with 8 pairs, what with 32?


# %% tags=["exercise"]
def query_for(distance, dim, base=100.0, reach=64):
    """The query (dim,) that sees `distance` out of 0, …, reach - 1, with pinv at rtol=1e-3."""
    ### BEGIN SOLUTION
    k = torch.ones(dim)
    rows = torch.stack([rotation_matrix(-delta, dim, base) @ k for delta in range(reach)])
    wanted = torch.zeros(reach)
    wanted[distance] = 1
    return torch.linalg.pinv(rows, rtol=1e-3) @ wanted
    ### END SOLUTION


# %% tags=["check"]
def seen_by(distance, dim, base=100.0):
    """The inner products at distances 0 to 63, and those of torch's own truncated least squares."""
    angles = torch.arange(64)[:, None] * rope_frequencies(dim, base)
    rows = torch.cat([angles.cos() + angles.sin(), angles.cos() - angles.sin()], dim=1)
    wanted = F.one_hot(torch.tensor(distance), 64).double()[:, None]
    best = torch.linalg.lstsq(rows, wanted, rcond=1e-3, driver="gelsd").solution[:, 0]
    return rows @ query_for(distance, dim, base), rows @ best


for distance, dim, base in ((8, 16, 100.0), (8, 64, 100.0), (20, 32, 1000.0)):
    check(f"distance {distance}, {dim // 2} pairs", *seen_by(distance, dim, base))
bumps = {dim // 2: seen_by(8, dim)[0] for dim in (16, 64)}
assert all(bump.argmax() == 8 for bump in bumps.values())
assert bumps[32][8] > bumps[8][8] and bumps[32][11] < bumps[8][11]
for pairs, bump in bumps.items():
    print(f"{pairs:2} pairs, distances 6 to 11:", [round(x, 3) for x in bump[6:12].tolist()])

# %% [markdown]
# A bump about distance 8, not one token; with more pairs it is higher and narrower.
#
# ## Further reading
#
# - Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding* (2021): the idea, and
#   a bound on how scores fade.
# - Shi et al., *Wonderful Matrices*, §3.1, Table 1 and Appendix A; *OTCE*, §3.1 and Appendix A.
# - Dao and Gu, *Transformers are SSMs* (2024): the convolution and the decay as Mamba-2 has them.
# - Lahoti et al., *Mamba-3: Improved Sequence Modeling using State Space Principles* (2026):
#   complex states, and angles that are learned from data.
# - Peng et al., *YaRN* (2023): what to do with the base when texts grow longer.
# - `cheems_ref/rope.py`: the listing this notebook arrives at.
