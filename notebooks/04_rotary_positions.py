# %% [markdown]
# # 04 · Rotary positions
#
# **One source of position for attention and for SSD: turn every vector by an angle that grows with
# its place in the text. What an inner product then sees is the distance.** When you are through
# you can
#
# - prove, line by line, that the inner product of turned vectors depends on the distance only, and
#   let a computer check each line as algebra and as numbers;
# - say which pairs of coordinates turn together in which library, and convert between the two;
# - turn C and B of SSD and show that all its forms, and mamba-ssm's kernel, still agree;
# - decode with rotations, and say what goes wrong when positions start again at 0;
# - read rotary SSD as a recurrence whose state turns, and say what Mamba-3 makes of that;
# - name the case in which the theorem fails, and what repairs it.
#
# Time: about 75 minutes. Assumes: chapter 03, sine and cosine, complex numbers.
#
# Sources: *Wonderful Matrices* (WM) §3.1, Table 1, Appendix A and Listing 1; *OTCE* §3.1 and
# Appendix A; *Cheems* (Ch) §3.1; Su et al., *RoFormer* (2021), where rotary positions come from.
# The code that this notebook builds up to is `cheems_ref/rope.py`, and the option `position` of
# the layer in `cheems_ref/ssd.py`.

# %%
import json
import math
from pathlib import Path

import sympy as sp
import torch
import torch.nn.functional as F
from torch import einsum

from cheems_ref import plotting, ssd
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

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0], " SymPy version", sp.__version__)

# %% [markdown]
# ## Why this matters
#
# *The dog bit the man* and *the man bit the dog* hold the same words. Attention compares a query
# with every key by an inner product, and an inner product knows two vectors, not where they stand.
# Without a further source of position, each query reads the tokens that it may see as a bag.
#
# What should such a source give? In language the *distance* matters more than the place: an
# adjective is bound to the next noun on page 1 as on page 700. So we look for a way to write the
# place $t$ into a query $q$ and the place $s$ into a key $k$, each for itself and before they
# meet, such that their inner product is a function of the contents and of the distance alone:
#
# $$\langle f(q, t),\; f(k, s) \rangle = g(q, k, t - s). \tag{4.1}$$
#
# *Each for itself* is what makes it cheap: nothing of size $l \times l$ is added. *The distance
# alone* is what makes it useful. Rotations do both, and chapter 03 showed that C and B of SSD meet
# in an inner product just as Q and K do. So they can share one source of position; that is the
# first claim of *Wonderful Matrices*, and this chapter settles it.
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
    return torch.tensor(
        [[math.cos(phi), -math.sin(phi)], [math.sin(phi), math.cos(phi)]],
    )


right, up = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
check("a quarter turn takes right to up", R(math.pi / 2) @ right, up)
check("and up to left", R(math.pi / 2) @ up, -right)

# %% [markdown]
# Three properties carry everything that follows. Turning twice adds the angles. Turning back is
# turning by the negative angle, and it is the transpose. And no vector changes its length.

# %%
a, b = 0.7, 2.1
vector = random(2, seed=0)
check("angles add up", R(a) @ R(b), R(a + b))
check("the transpose turns back", R(a).T, R(-a))
check("lengths stay", (R(a) @ vector).norm(), vector.norm())
_ = must_differ("turning back is not turning on", R(a).T @ R(b), R(a + b))

# %% [markdown]
# With them the theorem for the plane takes one line. Let one step of position turn by $\theta$, so
# that position $t$ turns by $t\theta$, and write $R_t$ for $R(t\theta)$. Then
#
# $$\langle R_t\,c,\; R_s\,b \rangle = c^\top R_t^\top R_s\, b = c^\top R_{s-t}\, b. \tag{4.3}$$
#
# Turn both arms of a compass by the same angle, and it stays open as it was:

# %%
theta = 0.25
c, b = torch.tensor([1.6, 0.5]), torch.tensor([1.1, -0.7])

fig, axes = plotting.figure(1, 3, size=(12, 4.6))
for ax, (t, s) in zip(axes, ((4, 1), (9, 6), (15, 12)), strict=True):
    turned_c, turned_b = R(t * theta) @ c, R(s * theta) @ b
    check(f"positions {t} and {s}: same inner product", turned_c @ turned_b, c @ R(-3 * theta) @ b)
    for v, color in ((c, 0), (b, 1)):
        ax.plot([0, v[0]], [0, v[1]], color=plotting.COLORS[color], alpha=0.25)
    for v, name, color in ((turned_c, f"$R_{{{t}}}c$", 0), (turned_b, f"$R_{{{s}}}b$", 1)):
        ax.plot([0, v[0]], [0, v[1]], color=plotting.COLORS[color], marker="o", markevery=[1])
        beyond = v * (1 + 0.3 / v.norm())
        ax.annotate(name, beyond, ha="center", va="center", color=plotting.COLORS[color])
    arc = torch.linspace(0, 1, 30)[:, None]
    arc = F.normalize((1 - arc) * F.normalize(turned_b, dim=0) + arc * F.normalize(turned_c, dim=0))
    ax.plot(0.5 * arc[:, 0], 0.5 * arc[:, 1], color=plotting.INK, linewidth=1.2)
    ax.set(xlim=(-2.2, 2.2), ylim=(-2.2, 2.2), aspect="equal")
    ax.set_title(f"t = {t}, s = {s}: product {turned_c @ turned_b:.2f}")
    ax.axhline(0, color=plotting.QUIET, linewidth=0.6)
    ax.axvline(0, color=plotting.QUIET, linewidth=0.6)
plotting.save(
    fig,
    "04_turning_pair",
    "Two vectors in the plane at three pairs of positions, each three steps apart. Both turn as the"
    " positions grow; the angle between them, marked by an arc, and their inner product are the "
    "same in all three pictures. The vectors before turning are drawn faintly.",
)

# %% [markdown]
# ## 2 · The same with complex numbers
#
# The papers prove equation 4.1 with complex numbers, since multiplying by
# $e^{\mathrm{i}\varphi}$ *is* turning by $\varphi$. We go through that proof (OTCE Appendix A, WM
# Appendix A) line by line, and let two referees look at every line:
#
# - **SymPy**, a computer algebra system, subtracts the two sides and simplifies. What is left must
#   be zero: not small, zero.
# - **Numbers**: both sides are evaluated at 500 random points and compared by the verifier.
#
# The referee must be able to say no, so a second function expects a line to be wrong.

# %%
c1, c2, b1, b2, t, s, theta = SYMBOLS = sp.symbols("c1 c2 b1 b2 t s theta", real=True)
POINTS = random(500, len(SYMBOLS), seed=1)


def entries(expression):
    return list(expression) if isinstance(expression, sp.MatrixBase) else [expression]


def at_points(expression):
    """The values of an expression, or of each entry of a matrix, at the random points."""
    functions = [sp.lambdify(SYMBOLS, entry, "numpy") for entry in entries(expression)]
    return torch.stack(
        [
            torch.tensor([complex(f(*point)) for point in POINTS.tolist()], dtype=torch.complex128)
            for f in functions
        ]
    )


def difference(left, right):
    return [
        sp.simplify(sp.expand(x - y, complex=True))
        for x, y in zip(entries(left), entries(right), strict=True)
    ]


def identity(name, left, right):
    """left = right for all real values of the symbols: as algebra, and in numbers."""
    assert all(d == 0 for d in difference(left, right)), f"{name}: {difference(left, right)}"
    check(name, at_points(left), at_points(right), tol=1e-12)


def no_identity(name, left, right):
    """left = right does not hold: neither as algebra nor in numbers."""
    assert any(d != 0 for d in difference(left, right)), name
    must_differ(name, at_points(left), at_points(right))


# %% [markdown]
# A pair of real numbers $(c_1, c_2)$ is the complex number $c_1 + \mathrm{i}c_2$. The reader C
# stands at position $t$, the writer B at position $s$ (the papers call them $j$ and $i$):
#
# $$f_C(c, t) = (c_1 + \mathrm{i}c_2)\,e^{\mathrm{i}t\theta}, \qquad
#   f_B(b, s) = (b_1 + \mathrm{i}b_2)\,e^{\mathrm{i}s\theta}. \tag{4.4}$$
#
# **Lines 1 and 2** resolve the exponential by Euler's formula and multiply out.

# %%
i = sp.I
cos, sin = sp.cos, sp.sin
C = sp.Matrix([c1, c2])
B = sp.Matrix([b1, b2])
f_C = (c1 + i * c2) * sp.exp(i * t * theta)
f_B = (b1 + i * b2) * sp.exp(i * s * theta)

identity("line 1: Euler's formula", sp.exp(i * t * theta), cos(t * theta) + i * sin(t * theta))
identity(
    "line 2: multiplied out, C",
    f_C,
    (c1 * cos(t * theta) - c2 * sin(t * theta)) + i * (c2 * cos(t * theta) + c1 * sin(t * theta)),
)
identity(
    "line 2: multiplied out, B",
    f_B,
    (b1 * cos(s * theta) - b2 * sin(s * theta)) + i * (b2 * cos(s * theta) + b1 * sin(s * theta)),
)

# %% [markdown]
# **Line 3** reads real and imaginary part as a vector again. It is the rotation matrix of equation
# 4.2, applied to a column.


# %%
def rotation(angle):
    return sp.Matrix([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]])


def as_vector(z):
    return sp.Matrix([sp.re(z), sp.im(z)]).applyfunc(lambda e: sp.expand(e, complex=True))


identity("line 3: times exp(itθ) = times R_t, C", as_vector(f_C), rotation(t * theta) * C)
identity("line 3: times exp(isθ) = times R_s, B", as_vector(f_B), rotation(s * theta) * B)
no_identity("line 3 with rows: C R_t", as_vector(f_C), (C.T * rotation(t * theta)).T)

# %% [markdown]
# The same line, against the package. With `dim = 2` there is one pair and $\theta = 1$:

# %%
for position in (0, 1, 5, 1000):
    z = torch.complex(*random(2, seed=position)) * torch.exp(torch.tensor(1j * position))
    turned = rotation_matrix(position, 2) @ random(2, seed=position)
    check(
        f"rotation_matrix({position}, 2) = complex product", turned, torch.stack([z.real, z.imag])
    )

# %% [markdown]
# **Line 4** is what makes complex numbers worth the trouble. The inner product of two vectors is
# the real part of the *first times the conjugate of the second*:
#
# $$\langle z, w \rangle = z_1 w_1 + z_2 w_2 = \mathrm{Re}(z\,w^*). \tag{4.5}$$
#
# Which factor is conjugated does not matter, but only one may be: the conjugate *of the product*,
# as the appendices word it, is something else.

# %%
z, w = c1 + i * c2, b1 + i * b2
identity("line 4: inner product = Re(z w*)", C.dot(B), sp.re(sp.expand(z * sp.conjugate(w))))
no_identity(
    "line 4 with the conjugate of the product", C.dot(B), sp.re(sp.expand(sp.conjugate(z * w)))
)

# %% [markdown]
# ## 3 · The proof, line by line
#
# **Lines 5 to 7** say what $g$ is. By line 4 the inner product of the turned vectors is
#
# $$g(c, b, t - s) = \mathrm{Re}\big[(c_1 + \mathrm{i}c_2)(b_1 - \mathrm{i}b_2)\,
#   e^{\mathrm{i}(t-s)\theta}\big], \tag{4.6}$$
#
# because $e^{\mathrm{i}t\theta}$ times the conjugate of $e^{\mathrm{i}s\theta}$ is
# $e^{\mathrm{i}(t-s)\theta}$: here the two positions become one distance. In code $\delta =
# (t-s)\theta$ is `delta`.

# %%
delta = (t - s) * theta
same, cross = c1 * b1 + c2 * b2, c2 * b1 - c1 * b2

identity(
    "line 5: two angles become one",
    sp.exp(i * t * theta) * sp.conjugate(sp.exp(i * s * theta)),
    sp.exp(i * delta),
)
identity("line 6: the product of the contents", z * sp.conjugate(w), same + i * cross)
g = sp.re(sp.expand(z * sp.conjugate(w) * sp.exp(i * delta), complex=True))
identity("line 7: its real part", g, same * cos(delta) - cross * sin(delta))
no_identity("line 7 with a plus", g, same * cos(delta) + cross * sin(delta))

# %% [markdown]
# **Lines 8 to 11** come from the other side: take the inner product of the two vectors of line 2,
# multiply out into eight terms, collect, use the formulas for the difference of two angles, and
# meet $g$.

# %%
turned_C, turned_B = rotation(t * theta) * C, rotation(s * theta) * B
inner = turned_C.dot(turned_B)
ct, st, cs, ss = cos(t * theta), sin(t * theta), cos(s * theta), sin(s * theta)

identity(
    "line 8: eight terms",
    inner,
    c1 * ct * b1 * cs - c1 * ct * b2 * ss - c2 * st * b1 * cs + c2 * st * b2 * ss
    + c2 * ct * b2 * cs + c2 * ct * b1 * ss + c1 * st * b2 * cs + c1 * st * b1 * ss,
)  # fmt: skip
identity(
    "line 9: collected by the contents",
    inner,
    c1 * b1 * (ct * cs + st * ss) + c1 * b2 * (st * cs - ct * ss)
    + c2 * b1 * (ct * ss - st * cs) + c2 * b2 * (st * ss + ct * cs),
)  # fmt: skip
identity("line 10: cosine of a difference", ct * cs + st * ss, cos(delta))
identity("line 10: sine of a difference", st * cs - ct * ss, sin(delta))
no_identity("line 10: sine of the sum", st * cs + ct * ss, sin(delta))
identity("line 11: the inner product is g", inner, g)

# %% [markdown]
# So $\langle f_C(c,t), f_B(b,s)\rangle = g(c, b, t-s)$, and the proof is done: on the right, $t$
# and $s$ stand only in $\delta = (t-s)\theta$.
#
# **Lines 12 and 13** write it with matrices, and here is the first place where the printed
# appendices slip. They end with
#
# > $\begin{bmatrix} \cos((j-i)\theta) & -\sin((j-i)\theta) \\ \sin((j-i)\theta) &
# > \cos((j-i)\theta)\end{bmatrix}$ — OTCE, Appendix A, after "Finally, we get"; likewise eq. 11,
# > eq. 12 for Q and K, and WM Appendix A
#
# between $C^\top$ and $B$, which is $R_{t-s}$. Their own line before it multiplies out to the
# transpose, $R_{s-t}$, as our one-line proof 4.3 has it.

# %%
identity(
    "line 12: the transpose turns back, and angles add up",
    rotation(t * theta).T * rotation(s * theta),
    rotation((s - t) * theta),
)
identity("line 13: c·R_(s-t)·b", inner, (C.T * rotation((s - t) * theta) * B)[0])
no_identity("line 13 as printed: c·R_(t-s)·b", inner, (C.T * rotation((t - s) * theta) * B)[0])

# %% [markdown]
# How wrong is the printed sign? It is the right formula for a reader at $s$ and a writer at $t$:
# the two have changed places. For $c = (1, 0)$, $b = (0, 1)$ and a distance of a quarter turn the
# truth is $+1$ and the printed formula gives $-1$. The two differ by $2\,(c_2 b_1 - c_1
# b_2)\sin((t-s)\theta)$: they agree at distance 0, after half turns, and where $c$ and $b$ lie on
# one line. So a test with $c = b$ sees nothing.

# %%
printed = (C.T * rotation((t - s) * theta) * B)[0]
swapped = inner.subs({t: s, s: t}, simultaneous=True)
identity("the printed formula is the theorem with reader and writer swapped", printed, swapped)
identity("printed minus true", printed - inner, 2 * cross * sin(delta))
quarter = {c1: 1, c2: 0, b1: 0, b2: 1, t: 1, s: 0, theta: sp.pi / 2}
print("a quarter turn apart: truth", inner.subs(quarter), "  as printed", printed.subs(quarter))

# %% [markdown]
# ## 4 · Wider vectors: many wheels
#
# A vector of even width $d$ is cut into $d/2$ pairs, and each pair turns in a plane of its own. An
# inner product is the sum over the pairs, so equation 4.3 holds for the sum as for each term. What
# is left to choose is how fast each pair turns:
#
# $$\theta_k = \text{base}^{-2k/d}, \qquad k = 0, 1, \dots, d/2 - 1. \tag{4.7}$$
#
# Like the hands of a clock: the first pair turns by a whole radian per token and tells neighbours
# apart, the last needs thousands of tokens for one round and tells near from far. With a single
# pair, positions a full turn apart would look almost the same.

# %%
theta_k = torch.tensor([10_000.0 ** (-2 * k / 8) for k in range(4)])
check("equation 4.7 = rope_frequencies", rope_frequencies(8), theta_k)
for dim, base in ((64, 10_000.0), (64, 500_000.0), (8, 10_000.0)):
    wave = 2 * math.pi / rope_frequencies(dim, base)
    print(
        f"dim {dim:3}, base {base:9,.0f}: one round takes",
        f"{wave[0]:.1f} tokens for the first pair, {wave[-1]:,.0f} for the last",
    )

# %% [markdown]
# As code, a rotation is "cosine times the vector, plus sine times the vector a quarter turn ahead".
# The quarter turn takes $(x_1, x_2)$ to $(-x_2, x_1)$. If the first members of all pairs stand in
# the first half of the vector and the second members in the second half, that is one line:


# %%
def turn_halves(x, angles):
    """Turn pairs (x[k], x[k + d/2]) by angles[k]: x (..., d), angles (..., d/2)."""
    first, second = x.chunk(2, dim=-1)
    quarter_turn = torch.cat([-second, first], dim=-1)
    cosine, sine = (torch.cat([f, f], dim=-1) for f in (angles.cos(), angles.sin()))
    return cosine * x + sine * quarter_turn


dim = 8
x = random(2, 6, 3, dim, seed=2)  # (b, l, h, d)
positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 7, 8, 1000, 99_999]])
angles = positions[:, :, None, None] * rope_frequencies(dim)

cosine, sine = rope_cos_sin(positions, dim, dtype=torch.float64)
turned = apply_rope(x, cosine, sine)
check("apply_rope = the four lines", turned, turn_halves(x, angles), tol=1e-12)
_ = must_differ("turned the other way", turn_halves(x, -angles), turned)
check("position 0 changes nothing", turned[:, 0], x[:, 0])
check("no vector changes its length", turned.norm(dim=-1), x.norm(dim=-1))

# %% [markdown]
# The package's two functions are those four lines, with angles made once for all heads. As a matrix
# it is `rotation_matrix`, and with complex numbers one product:

# %%
by_matrix = torch.stack(
    [
        torch.stack([x[row, n] @ rotation_matrix(int(p), dim).T for n, p in enumerate(line)])
        for row, line in enumerate(positions)
    ]
)
check("apply_rope = rotation matrices", turned, by_matrix, tol=1e-12)
z = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * angles)
check("apply_rope = complex exponentials", turned, torch.cat([z.real, z.imag], -1), tol=1e-12)

# %% [markdown]
# ### Which coordinates are a pair?
#
# The formulas of the papers turn coordinates 0 and 1 together, 2 and 3, and so on (*interleaved*):
# the matrix then has its $d/2$ small rotations along the diagonal. Meta's own Llama code and
# weights do it so. The papers' listings and transformers turn coordinates $k$ and $k + d/2$
# (*half*), as we did above: it saves shuffling. Both are $d/2$ wheels; only the numbering of the
# coordinates differs. With $P$ the permutation that sorts even coordinates before odd ones,
#
# $$R^{\text{half}} = P\,R^{\text{interleaved}}\,P^\top. \tag{4.8}$$

# %%
order = pairing_permutation(dim)
print("half layout takes the interleaved coordinates in the order", order.tolist())
P = torch.eye(dim)[order]
half = rotation_matrix(5, dim)
interleaved = rotation_matrix(5, dim, pairing="interleaved")
check("half = P interleaved Pᵀ", half, P @ interleaved @ P.T, tol=1e-14)

u, v = random(2, dim, seed=3)
R3, R9 = (rotation_matrix(n, dim, pairing="interleaved") for n in (3, 9))
H3, H9 = (rotation_matrix(n, dim) for n in (3, 9))
check(
    "same scores, once the weights are permuted", (H3 @ P @ u) @ (H9 @ P @ v), (R3 @ u) @ (R9 @ v)
)
_ = must_differ("interleaved weights, halves turned", (H3 @ u) @ (H9 @ v), (R3 @ u) @ (R9 @ v))

# %%
fig, axes = plotting.figure(1, 3, size=(12, 4.6))
for ax, matrix, title in zip(
    axes, (interleaved, P, half), ("interleaved: $R_5$", "P", "half: $P R_5 P^T$"), strict=True
):
    plotting.heatmap(ax, matrix, title=title, limit=1.0, colorbar=False)
    ax.set_xticks(range(dim))
    ax.set_yticks(range(dim))
plotting.save(
    fig,
    "04_pairings",
    "Three 8 by 8 matrices. Interleaved: four 2 by 2 blocks on the diagonal. P: a permutation "
    "that puts even coordinates first. Half: the same numbers on three diagonals, coordinate k "
    "paired with k + 4.",
)

# %% [markdown]
# Weights trained with one pairing and run with the other give wrong scores without any error
# message. That is why the script that brings Meta's Llama weights to transformers permutes the rows
# of the query and key projections.
#
# ## 5 · Attention: scores that know the distance
#
# Give every token the *same* query and the same key. Without rotation all scores are one number.
# With it, the score depends on $t - s$ only: the matrix is constant along each diagonal, a
# *Toeplitz* matrix. With contents that differ it is not Toeplitz any more, but moving all tokens
# to other positions still changes nothing.

# %%
l, dim = 48, 16


def scores(q, k, positions):
    """Inner products of turned queries and keys: (l, d), (l, d), (l,) -> (l, l)."""
    cosine, sine = rope_cos_sin(positions[None], q.shape[-1], base=100.0, dtype=q.dtype)
    q, k = (apply_rope(v[None, :, None], cosine, sine)[0, :, 0] for v in (q, k))
    return q @ k.T


q, k = random(2, l, dim, seed=4)
same_q, same_k = (v[:1].expand(l, dim) for v in (q, k))
positions = torch.arange(l)

toeplitz = scores(same_q, same_k, positions)
for n in range(-l + 1, l):
    diagonal = toeplitz.diagonal(n)
    assert (diagonal - diagonal[0]).abs().max() < 1e-12
print(f"same contents: constant along each of the {2 * l - 1} diagonals, so Toeplitz")

mixed = scores(q, k, positions)
check("any contents: all positions moved by 1,000", scores(q, k, positions + 1000), mixed)
uneven = positions + 8 * (positions >= 24)
_ = must_differ("a gap of 8 in the middle", scores(q, k, uneven), mixed)
_ = must_differ("positions left out", q @ k.T, mixed)

# %%
fig, axes = plotting.figure(1, 3, size=(12, 4.6))
for ax, matrix, title in zip(
    axes,
    (same_q @ same_k.T, toeplitz, mixed),
    ("same contents, not turned", "same contents, turned", "any contents, turned"),
    strict=True,
):
    plotting.heatmap(ax, matrix, title=title, colorbar=False)
    ax.set_xlabel("key s")
axes[0].set_ylabel("query t")
plotting.save(
    fig,
    "04_toeplitz",
    "Three score matrices of 48 tokens. Same contents without rotation: one flat colour. Same "
    "contents, rotated: stripes parallel to the diagonal. Different contents, rotated: no stripes.",
)

# %% [markdown]
# **Does the score fade with distance?** For $c = b = (1, \dots, 1)$ the inner product is
# $2\sum_k \cos((t-s)\,\theta_k)$: at distance 0 all wheels agree, further away they are scattered,
# the fast ones first. So for vectors that agree in all pairs it fades, not evenly, and the base
# says how fast. This is a tendency of *these* vectors, not a law: a model that wants to look 20
# tokens back can choose $c$ and $b$ that peak there (exercise 4).

# %%
distances = torch.arange(0, 257)
ones = torch.ones(64)
fig, ax = plotting.figure(size=(9, 4.2))
for base, style in ((100.0, "-"), (10_000.0, "--"), (1_000_000.0, ":")):
    g_of_d = torch.cos(distances[:, None] * rope_frequencies(64, base)).mean(1)
    by_matrix = torch.stack(
        [ones @ rotation_matrix(-int(n), 64, base) @ ones / 64 for n in range(5)]
    )
    check(f"base {base:,.0f}: sum of cosines = inner product", g_of_d[:5], by_matrix)
    assert g_of_d[0] == 1 and g_of_d[1:].max() < 1
    ax.plot(distances, g_of_d, style, label=f"base {base:,.0f}", linewidth=1.8)
ax.axhline(0, color=plotting.QUIET, linewidth=0.8)
ax.set(xlabel="distance t − s", ylabel="inner product / width")
ax.legend()
plotting.save(
    fig,
    "04_distance",
    "Inner product of two equal vectors of ones, of width 64, against the distance of their "
    "positions, for three bases. All start at 1 and fall while they ripple: for base 100 to 0 "
    "within 50 tokens and to between 0 and -0.3 after; for base 10,000 to about 0.4, for base "
    "1,000,000 to about 0.6.",
)

# %% [markdown]
# ## 6 · The same for C and B inside SSD
#
# In chapter 03 the output of SSD was $y_t = \sum_{s \le t} L_{ts}\,(C_t \cdot B_s)\,\Delta_s x_s$.
# The decay $L_{ts} = \exp(A\,(\Delta_{s+1} + \dots + \Delta_t))$ is *one number*, so it stands
# outside the inner product. Turn $C_t$ by $R_t$ and $B_s$ by $R_s$:
#
# $$y_t = \sum_{s \le t} L_{ts}\,\langle R_t C_t,\; R_s B_s\rangle\,\Delta_s x_s
#       = \sum_{s \le t} L_{ts}\,\big(C_t^\top R_{s-t}\,B_s\big)\,\Delta_s x_s. \tag{4.9}$$
#
# Positions enter by their difference only; and since C and B are turned *before* SSD sees them,
# every form of it, and every kernel, works as it is.


# %%
def inputs(b=2, l=40, h=4, p=5, g=2, n=8, dt=0.1, seed=10):
    """Random inputs of SSD, with step sizes around dt."""
    A = -1.0 - 7.0 * torch.arange(h) / max(h - 1, 1)
    return (
        random(b, l, h, p, seed=seed),
        dt * random(b, l, h, seed=seed + 1).abs(),
        A,
        random(b, l, g, n, seed=seed + 2),
        random(b, l, g, n, seed=seed + 3),
    )


def turn(v, positions, base=100.0):
    """Turn the vectors (b, l, g, n) of tokens at positions (l,), the same in every row."""
    ids = positions.expand(v.shape[:2])
    return apply_rope(v, *rope_cos_sin(ids, v.shape[-1], base, dtype=v.dtype))


x, dt, A, B, C = inputs()
n, positions = B.shape[-1], torch.arange(40)
M = ssd.semiseparable_matrix(dt, A, turn(B, positions), turn(C, positions))

back = torch.stack([rotation_matrix(-distance, n, 100.0) for distance in range(40)])
for row, reader, writer in ((0, 30, 30), (0, 30, 12), (1, 7, 0)):
    head, group = 3, 1
    L = (A[head] * dt[row, writer + 1 : reader + 1, head].sum()).exp()
    entry = C[row, reader, group] @ back[reader - writer] @ B[row, writer, group]
    check(
        f"M[{reader}, {writer}] = L · CᵀR₍s₋t₎B · Δ",
        M[row, head, reader, writer],
        L * entry * dt[row, writer, head],
    )

# %% [markdown]
# All forms on turned C and B, with gradients (of the *unturned* B and C: the rotation is part of
# the function):


# %%
def rotary(function, offset=0):
    """A form of SSD with C and B turned by their positions, counted from offset."""

    def run(x, dt, A, B, C):
        positions = offset + torch.arange(x.shape[1], device=x.device)
        return function(x, dt, A, turn(B, positions), turn(C, positions), chunk_size=16)

    return run


everything = inputs()
y = rotary(ssd.ssd_recurrent)(*everything)
check("quadratic = recurrence, with rotations", rotary(ssd.ssd_quadratic)(*everything), y)
check("chunked = recurrence, with rotations", rotary(ssd.ssd_chunked)(*everything), y)
check_gradients(
    "chunked = recurrence, with rotations",
    rotary(ssd.ssd_chunked),
    rotary(ssd.ssd_recurrent),
    everything,
)
_ = must_differ("only B turned", ssd.ssd_recurrent(x, dt, A, turn(B, positions), C), y)
_ = must_differ("nothing turned", ssd.ssd_recurrent(x, dt, A, B, C), y)

# %% [markdown]
# And mamba-ssm's kernel, in float32, through the interpreter where there is no GPU:

# %%
from cheems_ref.kernels import kernel_status

status = kernel_status()
device = "cuda" if status.mode == "cuda" else "cpu"
singles = [v.float() for v in inputs(b=1)]
truth = rotary(ssd.ssd_recurrent, offset=100)(*(v.double() for v in singles)).float()
if status.available:
    on_device = [v.to(device) for v in singles]
    got = rotary(ssd.ssd_kernel, offset=100)(*on_device).cpu()
    check("kernel: rotary SSD = recurrence in float64", got, truth, tol=1e-4)
    _ = must_differ("kernel: nothing turned", ssd.ssd_kernel(*on_device).cpu(), truth)
    print("kernel rung: mamba-ssm's kernels and the recurrence agree")
else:
    print("kernel rung: not run here.", status.reason)

# %% [markdown]
# **The theorem, executed.** Move the whole text by 1, by 1,000, by 100,000 positions. Every angle
# changes, every turned C and B changes, and the output does not:

# %%
reference = rotary(ssd.ssd_recurrent)(*everything)
for offset in (1, 7, 1_000, 100_000):
    for name, function in (
        ("recurrent", ssd.ssd_recurrent),
        ("quadratic", ssd.ssd_quadratic),
        ("chunked", ssd.ssd_chunked),
    ):
        moved = rotary(function, offset)(*everything)
        check(f"moved by {offset:7,}, {name}", moved, reference)
_ = must_differ("turned B itself", turn(B, positions + 1), turn(B, positions))
uneven = torch.arange(40) + 3 * (torch.arange(40) >= 20)
gap = ssd.ssd_recurrent(x, dt, A, turn(B, uneven), turn(C, uneven))
_ = must_differ("a gap of three positions in the middle", gap, reference)

# %% [markdown]
# ### How far can one count?
#
# On paper the invariance is exact. In a computer the angle $t\,\theta_k$ is rounded, and the
# rounding grows with $t$. (Only the first pair is spared: with $\theta_0 = 1$ its angle is the
# position itself.) Between 524,288 and 1,048,576 the float32 numbers are 1/16 apart, and so are the
# angles of the next pairs. In sixteen bits even the positions themselves collapse:

# %%
counted = torch.arange(8192)
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    different = counted.to(dtype).unique().numel()
    print(f"{dtype!s:15} tells {different:5} of 8192 positions apart")

# %% [markdown]
# So the package computes angles in float64 for a float64 model and in float32 for every other,
# also when the model itself runs in bfloat16. What that gives, for a rotary SSD (32 tokens, 64
# states), against the distance by which the text is moved; and what angles in bfloat16 would give,
# which the package refuses. (Drawn from a record, since rounding noise differs between machines.)

# %%
record = json.loads(Path("../figures/records/04_shift_error.json").read_text())
fig, ax = plotting.figure(size=(9, 4.8))
for (name, errors), marker in zip(record["errors"].items(), "os^", strict=True):
    ax.loglog(record["shifts"], errors, marker=marker, label=name)
ax.axhline(1, color=plotting.QUIET, linewidth=0.8)
ax.text(1.2, 1.5, "as large as the output", color=plotting.QUIET)
ax.set(xlabel="all positions moved by", ylabel="relative change of the output", ylim=(3e-17, 30))
ax.legend(loc="center right")
plotting.save(
    fig,
    "04_shift_error",
    "Relative change of the output against the shift of all positions, both logarithmic. With "
    "angles in float64 it stays below 1e-10 up to a shift of a million; in float32 it grows from "
    "below 1e-6 to 4e-3; in bfloat16 it is about as large as the output from a few hundred on.",
)

# %% [markdown]
# The record was written by `python book/records.py 04_shift_error`. Live, the same claim at its
# far end, position 1,048,576:

# %%
far = torch.arange(1_048_576, 1_048_576 + 8)[None]
exact, _ = rope_cos_sin(far, 64, dtype=torch.float64)
digits = [
    [sp.cos(int(t) * sp.Integer(10) ** sp.Rational(-k, 8)).evalf(30) for k in range(32)]
    for t in far[0]
]
digits = torch.tensor([[float(d) for d in row] for row in digits])
check("float64 at position a million = 30 digits by SymPy", exact[0, :, :32], digits)

single, _ = rope_cos_sin(far, 64, dtype=torch.float32)
error = (single[0, :, :32].double() - digits).abs().amax(0)  # of each pair
assert error[0] < 1e-6 and 1e-3 < error.max() < 0.1
print(
    "float32 at position a million: first pair exact to rounding, others off in the second decimal"
)

# %% [markdown]
# ## 7 · Decoding carries absolute positions
#
# The output depends on distances, but what is *stored* does not. The state holds
# $\sum_s L_{ts}\,\Delta_s x_s\,(R_s B_s)^\top$: writes turned by their absolute position $s$. The
# next token must be turned by its own absolute position, counted from the same start. The cache
# of attention is no different: it holds turned keys.
#
# The next call restarted at 0 would still agree with itself, since its tokens have the right
# distances among themselves. What it reads from the state is wrong.
#
# The layer `SSD` has rotations built in (`position="rope"`, its default) and is told the positions
# in every call:

# %%
_ = torch.manual_seed(0)
layer = ssd.SSD(32, n_heads=4, n_groups=2, d_state=16, position="rope")
_ = layer.D.data.zero_()  # no skip connection: what comes out comes from the state
text = random(1, 60, 32, seed=20)
positions = torch.arange(60)[None]

with torch.no_grad():
    whole, _ = layer(text, positions)
    prompt, cache = layer(text[:, :40], positions[:, :40])
    rest, _ = layer(text[:, 40:], positions[:, 40:], cache=cache)
    restarted, _ = layer(text[:, 40:], positions[:, :20], cache=cache)
    off_by_one, _ = layer(text[:, 40:], positions[:, 40:] + 1, cache=cache)
check("prompt, then the rest with its own positions = one pass", rest, whole[:, 40:])
_ = must_differ("positions started again at 0", restarted, whole[:, 40:], at_least=0.02)
_ = must_differ("positions off by one", off_by_one, whole[:, 40:], at_least=0.01)
for name, wrong in (("restarted at 0", restarted), ("off by one", off_by_one)):
    error = (wrong - whole[:, 40:]).norm() / whole[:, 40:].norm()
    print(f"{name}: {error:.1g} of the output is wrong")

tokens, memory = [], None
with torch.no_grad():
    for t in range(60):
        y_t, memory = layer(text[:, t : t + 1], positions[:, t : t + 1], cache=memory)
        tokens.append(y_t)
check("60 tokens one by one = one pass", torch.cat(tokens, 1), whole)
with torch.no_grad():
    moved, moved_cache = layer(text, positions + 1000)
check("moved by 1,000: same output", moved, whole)
_ = must_differ("moved by 1,000: another state", moved_cache.state, memory.state)

# %% [markdown]
# ## 8 · The state that turns
#
# There is a second way to see rotary SSD, without any position at all. Write $h_t$ for the state
# with turned writes, and look at it through the reader's eyes: $\tilde h_t = h_t R_t$. Then
# $y_t = h_t R_t C_t = \tilde h_t C_t$, and
#
# $$\tilde h_t = \big(a_t\, h_{t-1} + \Delta_t x_t B_t^\top R_t^\top\big) R_t
#   = a_t\,\tilde h_{t-1}\,R_1 + \Delta_t\, x_t B_t^\top, \qquad y_t = \tilde h_t\, C_t.
#   \tag{4.10}$$
#
# C and B are not turned any more. Instead the *state* turns by one step each token, together with
# the decay: each of its rows, seen as a column, is multiplied by $a_t R_1^\top = a_t R_{-1}$. The
# further back a write lies, the further it has been turned. (Here $y$ is without the skip
# connection.)

# %%
x, dt, A, B, C = inputs()
B, C = (v.repeat_interleave(2, dim=2) for v in (B, C))  # one for each of the four heads
decays = torch.exp(dt * A)
n = B.shape[-1]


def turning_state(step):
    """Equation 4.10 with a matrix `step` in place of R_1."""
    state, outputs = torch.zeros(2, 4, 5, n), []
    for t in range(40):
        write = einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        state = decays[:, t, :, None, None] * state @ step + write
        outputs.append(einsum("bhpn,bhn->bhp", state, C[:, t]))
    return torch.stack(outputs, 1)


R_1 = rotation_matrix(1, n, 100.0)
check("state that turns = C and B that turn", turning_state(R_1), reference)
_ = must_differ("state turned the other way", turning_state(R_1.T), reference)
_ = must_differ("state that does not turn", turning_state(torch.eye(n)), reference)

# %% [markdown]
# **It is a complex state space model.** Read each pair of columns of the state as one complex
# number. Then turning is multiplying by $e^{-\mathrm{i}\theta_k}$, and each pair obeys a scalar
# recurrence with the complex decay $a_t\,e^{-\mathrm{i}\theta_k}$:
#
# $$z_{t,k} = a_t\,e^{-\mathrm{i}\theta_k}\, z_{t-1,k} + \Delta_t\,x_t\,\beta_{t,k}, \qquad
#   y_t = \sum_k \mathrm{Re}(z_{t,k}\,\gamma_{t,k}^*), \tag{4.11}$$
#
# with $a_t = e^{\Delta_t A}$ as in chapter 03, $\beta_{t,k}$ and $\gamma_{t,k}$ the pair $k$ of
# $B_t$ and $C_t$ as complex numbers, and $z_{t,k}$ a vector of $p$ complex numbers.


# %%
def as_complex(v):
    """Pairs k and k + n/2 as one complex number: (..., n) -> (..., n/2)."""
    first, second = v.chunk(2, dim=-1)
    return torch.complex(first, second)


turn_back = torch.exp(-1j * rope_frequencies(n, 100.0))
beta, gamma = as_complex(B), as_complex(C)
values = (dt[..., None] * x).to(torch.complex128)

z, outputs = torch.zeros(2, 4, 5, n // 2, dtype=torch.complex128), []
for t in range(40):
    write = einsum("bhp,bhk->bhpk", values[:, t], beta[:, t])
    z = decays[:, t, :, None, None] * turn_back * z + write
    outputs.append(einsum("bhpk,bhk->bhp", z, gamma[:, t].conj()).real)
check("complex diagonal recurrence = turned C and B", torch.stack(outputs, 1), reference)

# %% [markdown]
# What one write does over time: it spirals inwards. Decay alone only shrinks; turning gives each
# moment of the past a direction of its own, which a reader can ask for.

# %%
fig, axes = plotting.figure(1, 3, size=(12, 4.4))
steps = torch.arange(0, 61)
for ax, (angle, title) in zip(
    axes, ((0.0, "decay only"), (0.15, "decay and a slow turn"), (0.8, "a fast turn")), strict=True
):
    z_t = torch.exp((math.log(0.96) - 1j * angle) * steps)
    ax.plot(z_t.real, z_t.imag, color=plotting.QUIET, linewidth=1)
    for after, color in ((0, 0), (10, 1), (30, 2)):
        point = z_t[after]
        name = f"after {after} tokens" if after else "written"
        ax.plot(
            point.real, point.imag, "o", color=plotting.COLORS[color], markersize=10, label=name
        )
    ax.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", title=title)
    ax.axhline(0, color=plotting.QUIET, linewidth=0.6)
    ax.axvline(0, color=plotting.QUIET, linewidth=0.6)
axes[0].legend(loc="lower left", fontsize=12)
plotting.save(
    fig,
    "04_turning_state",
    "The path of one write in the complex plane over 60 tokens, marked after 0, 10 and 30 tokens. "
    "With decay only it slides along a line to the origin; with a slow turn it spirals in within a "
    "round and a half; with a fast turn in many rounds.",
)

# %% [markdown]
# **From fixed angles to learned ones.** In equation 4.10 nothing needs the angle to be the same at
# each step. Let step $t$ turn by $\varphi_t$; then C and B are turned by the *running sum*
# $\Phi_t = \varphi_1 + \dots + \varphi_t$, since $\langle R(\Phi_t) c, R(\Phi_s) b\rangle$ sees
# $\Phi_t - \Phi_s$, the angles that lie between. Rotary positions are the case $\varphi_t =
# \theta$. Mamba-3 (Lahoti et al., 2026) computes $\varphi_t$ from the token, and calls it a
# data-dependent rotary embedding.

# %%
phi = random(40, seed=30)
c, b, values = gamma[0, :, 0, 0], beta[0, :, 0, 0], x[0, :, 0, 0]

z, by_state = torch.zeros((), dtype=torch.complex128), []
for t in range(40):
    z = 0.9 * torch.exp(-1j * phi[t]) * z + b[t] * values[t]
    by_state.append((z * c[t].conj()).real)

c_turned, b_turned = (v * torch.exp(1j * phi.cumsum(0)) for v in (c, b))
L = 0.9 ** (torch.arange(40)[:, None] - torch.arange(40)).clamp(min=0)
by_sums = (L * (c_turned[:, None].conj() * b_turned).real).tril() @ values
check(
    "angles that differ: state that turns = C and B turned by sums", torch.stack(by_state), by_sums
)

# %% [markdown]
# What is gained? A state that turns by half a round for every 1 and not at all for every 0 counts
# ones modulo two, the *parity* of a bit string. It stays of length one however long the string, and
# needs no training here. A fixed angle of half a round counts tokens, not ones:

# %%
bits = torch.randint(0, 2, (200,), generator=torch.Generator().manual_seed(31))
z = torch.ones((), dtype=torch.complex128)  # written once, before the text
parity = []
for bit in bits:
    z = torch.exp(-1j * math.pi * bit.to(torch.complex128)) * z
    parity.append(int(z.real < 0))
assert parity == (bits.cumsum(0) % 2).tolist()
steps_only = [(t + 1) % 2 for t in range(200)]  # what an angle of π at every token gives
assert steps_only != parity
print("parity of 200 bits from the angle of one complex number: right at every position")

# %% [markdown]
# ## 9 · Where the theorem fails
#
# In equation 4.9 the decay could be pulled out of the inner product because it is one number per
# head. OTCE's Algorithm 4 turns B and C of Mamba-1 (S6), whose $A$ holds a *different* rate for
# each state. Its decay is then a diagonal matrix $\Lambda = \mathrm{diag}(e^{A_1\Delta},
# e^{A_2\Delta}, \dots)$ that stands *between* the two rotations,
#
# $$C_t^\top R_t^\top\, \Lambda\, R_s\, B_s, \tag{4.12}$$
#
# For a reader $\delta$ tokens after the writer, $R_{s+\delta}^\top \Lambda R_s =
# R_\delta^\top\,(R_s^\top \Lambda R_s)$. For all C and B that is free of the place $s$ only if
# $R_s^\top \Lambda R_s$ is what it is at $s = 0$, namely $\Lambda$: if $\Lambda R_s = R_s \Lambda$.
# For one pair:

# %%
a1, a2, angle = sp.symbols("a1 a2 phi", real=True)
Lambda = sp.diag(a1, a2)
commutator = (Lambda * rotation(angle) - rotation(angle) * Lambda).applyfunc(sp.factor)
expected = (a2 - a1) * sp.sin(angle) * sp.Matrix([[0, 1], [1, 0]])
assert (commutator - expected).applyfunc(sp.simplify) == sp.zeros(2, 2)
assert commutator.subs(a2, a1) == sp.zeros(2, 2)
print("Λ R - R Λ =", commutator.tolist(), "  zero for all angles exactly where a1 = a2")

# %% [markdown]
# So the theorem needs $A$ to be *equal within each pair that turns together*; between the pairs it
# may differ. A selective scan with an $A$ per state, as a loop, shows both:


# %%
def selective_scan(x, dt, A, B, C):
    """S6 for one channel, as a loop: x, dt (l,), A (n,), B and C (l, n) -> y (l,)."""
    state, y = torch.zeros(len(A)), []
    for x_t, dt_t, B_t, C_t in zip(x, dt, B, C, strict=True):
        state = torch.exp(dt_t * A) * state + dt_t * x_t * B_t
        y.append(C_t @ state)
    return torch.stack(y)


def moved_by(offset, A):
    positions = offset + torch.arange(40)
    turned = (turn(v[:1, :, :1], positions)[0, :, 0] for v in (B, C))
    return selective_scan(x[0, :, 0, 0], dt[0, :, 0], A, *turned)


per_state = -torch.arange(1.0, 9.0)  # as Mamba-1 starts
tied = -torch.arange(1.0, 5.0).repeat(2)  # equal in coordinates k and k + n/2
neighbours = -torch.arange(1.0, 5.0).repeat_interleave(2)  # tied for the other pairing
for offset in (1, 7, 50, 1000):
    _ = must_differ(
        f"A per state, moved by {offset}", moved_by(offset, per_state), moved_by(0, per_state)
    )
    check(f"A tied in pairs, moved by {offset}", moved_by(offset, tied), moved_by(0, tied))
_ = must_differ("A tied for the other pairing", moved_by(7, neighbours), moved_by(0, neighbours))

# %% [markdown]
# The smallest case, drawn: one pair, decays 0.9 and 0.5 per token, a reader two tokens after the
# writer. Tied (0.9 and 0.9) the entry of $M$ is the same wherever the two stand; untied it swings
# with the absolute position.

# %%
c, b = torch.tensor([1.0, 0.5]), torch.tensor([-0.3, 1.0])
places = list(range(0, 41))
fig, ax = plotting.figure(size=(9, 3.8))
for (first, second), marker in (((0.9, 0.5), "o"), ((0.9, 0.9), "s")):
    between = torch.tensor([first, second]).pow(2).diag()
    entry = [
        (rotation_matrix(place + 2, 2) @ c) @ between @ (rotation_matrix(place, 2) @ b)
        for place in places
    ]
    spread = max(entry) - min(entry)
    assert spread < 1e-12 if first == second else spread > 0.3
    ax.plot(places, entry, marker=marker, markersize=4, label=f"decays {first} and {second}")
ax.set(xlabel="position s of the writer", ylabel="M[s + 2, s]", ylim=(0, 1.1))
ax.legend(loc="upper right", ncols=2)
plotting.save(
    fig,
    "04_untied",
    "One entry of M, two tokens apart, against the position of the writer. With equal decays in "
    "the pair it is a flat line; with decays 0.9 and 0.5 it swings up and down with the position.",
)

# %% [markdown]
# SSD has one $A$ per head, so in this architecture the condition always holds.
#
# ## 10 · Three sources of position
#
# A recurrence is not blind to order even without rotations. WM Table 1 compares three sources, and
# the layer `SSD` has all three behind one option:
#
# | `position` | a token at distance $t - s$ is told by | as in |
# |---|---|---|
# | `"decay"` | how much of it is left, $L_{ts}$: near or far | Mamba-2's $a_t$ |
# | `"conv"` | the tap of a short convolution (4 tokens) that it meets; and decay | Mamba, Mamba-2 |
# | `"rope"` | the angles of $n/2$ wheels; and decay | WM, Cheems, OTCE |
#
# Where do they differ? Take the plainest task that is about nothing but distance: *name the token
# that stood $k$ places ago*, among random tokens. The model is one embedding, one SSD layer, one
# linear map. A different model is trained for each $k$.


# %%
def train_to_look_back(position, lag, steps, seed=0, vocabulary=16, length=64):
    """Train a one-layer model to name the token `lag` places ago: accuracy on new texts, model."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(vocabulary, 32),
            "mixer": ssd.SSD(32, n_heads=4, d_state=32, position=position, rope_base=100.0),
            "head": torch.nn.Linear(32, vocabulary, bias=False),
        }
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def logits_and_targets(texts):
        ids = torch.randint(vocabulary, (texts, length), generator=generator)
        y, _ = model["mixer"](model["embedding"](ids), torch.arange(length).expand(texts, -1))
        return model["head"](y)[:, lag:], ids[:, : length - lag]

    for _ in range(steps):
        logits, targets = logits_and_targets(16)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logits, targets = logits_and_targets(64)
    return (logits.argmax(-1) == targets).float().mean().item(), model


torch.set_num_threads(1)  # tensors as small as these gain nothing from threads
accuracy = {p: train_to_look_back(p, lag=8, steps=200)[0] for p in ("rope", "conv", "decay")}
assert accuracy["rope"] > 0.5 and accuracy["conv"] < 1 / 3 and accuracy["decay"] < 1 / 3
print("8 places back after 200 steps: rope names more than half, conv and decay under a third")

# %% [markdown]
# For other lags (the median of three seeds), and what the models trained for a lag of 8 look at:
# the size of the gradient of a random mix of the last output with respect to the token so many
# places back, as a share of all 24. It is drawn from a record: `python book/records.py
# 04_three_sources` trains 99 models with this very function, for 300 steps each.

# %%
record = json.loads(Path("../figures/records/04_three_sources.json").read_text())
fig, axes = plotting.figure(1, 2, size=(12, 4.4))
for position, marker in (("rope", "o"), ("conv", "s"), ("decay", "^")):
    axes[0].plot(record["lags"], record["accuracy"][position], marker=marker, label=position)
    axes[1].plot(record["influence"][position], marker=marker, markersize=4)
axes[0].axhline(1 / 16, color=plotting.QUIET, linewidth=1)
axes[0].text(1, 0.012, "chance", color=plotting.QUIET, fontsize=12)
axes[0].set(xlabel="lag k", ylabel="tokens named right", ylim=(0, 1.05))
axes[0].set_title("how far each can look, after 300 steps")
axes[0].legend()
axes[1].axvline(8, color=plotting.QUIET, linewidth=1, linestyle=":")
axes[1].set(xlabel="places back", ylabel="share of the influence")
axes[1].set_title("trained for lag 8: what is looked at")
plotting.save(
    fig,
    "04_three_sources",
    "Left: share of tokens named right against the lag, for three sources of position. Rope falls "
    "slowly from 1; conv is above 0.9 up to lag 6, 0.7 at 7 and below 0.3 from 8 on; decay is "
    "perfect at lag 1 only. Right: influence of earlier tokens on models trained for lag 8. Rope "
    "has its peak at 8, the other two have none there.",
)

# %% [markdown]
# Each source has its reach.
#
# - **Decay** can single out the token just before, by forgetting what came earlier. Beyond that it
#   blurs neighbours together.
# - **The convolution** is exact within its taps, 3 tokens back, and reaches 7 by a detour, shown
#   below.
# - **The rotations** reach far, because a sum of waves can be made to peak at any distance; less
#   sharply the further away, for 16 wheels must do for all distances.
#
# How does a convolution of 4 tokens reach 7 places back? In a model trained for that lag, here is
# the mean weight $M_{t,t-d}$ with which a token reads what was written $d$ places before (from a
# record, `python book/records.py 04_detour`):

# %%
detour = json.loads(Path("../figures/records/04_detour.json").read_text())
print("head   " + "".join(f"d = {d:<6}" for d in range(7)))
for head, weights in enumerate(detour["weights"]):
    print(f"   {head}   " + "".join(f"{weight:<10.2f}" for weight in weights))
    assert max(weights) == weights[4] > 3 * max(map(abs, weights[:4]))

# %% [markdown]
# $C_t$ has seen the four newest tokens and gives writes like theirs little weight. The decay then
# makes the newest of the others stand out, which is $t - 4$, and the value written there has itself
# seen 3 tokens further back. At 4 + 3 it ends.
#
# That is one layer and a toy; stacked layers hand positions on. What the papers compare is the
# perplexity of language models on 8,192 tokens:
#
# > "[…] the perplexity performance of all combined modules shows that 𝑅𝑜𝑃𝐸 is better than 𝐶𝑜𝑛𝑣1𝑑 +
# > 𝐷 and 𝑎𝑡." — WM Table 1
#
# For SSD with attention it prints 8.18 (rope), 8.48 (convolution) and 8.56 (decay). Ch Table 2 has
# the same comparison, each number lower by exactly 6.00. Nothing here can settle which is meant;
# the order of the three is the same in both.
#
# What a trained model has by the theorem: it was trained on positions 0 to 63 and works at any
# other place exactly as well. (The theorem moves a text. It does not lengthen it: distances above
# 63 were never trained.)

# %%
_, model = train_to_look_back("rope", lag=2, steps=20)
ids = torch.randint(16, (4, 64), generator=torch.Generator().manual_seed(40))
model = model.double()
with torch.no_grad():
    here, there = (
        model["mixer"](model["embedding"](ids), (start + torch.arange(64)).expand(4, -1))[0]
        for start in (0, 50_000)
    )
check("trained on positions below 64, used from 50,000 on: same output", there, here)

# %% [markdown]
# ## 11 · As printed
#
# The sign of the final matrix was the first (§3), Algorithm 4 the second (§9). Here are the others.
#
# ### The last block of the matrix (Ch eq. 4, WM §3.1, OTCE Appendix A)
#
# The printed matrix begins with $\theta_0$ and has $\theta_{d/2}$ and $\theta_{d/2-1}$ mixed in its
# last block:
#
# > $\cos i\theta_{d/2},\; -\sin i\theta_{d/2-1};\quad \sin i\theta_{d/2},\; \cos i\theta_{d/2-1}$
# > — Ch eq. 4, last block
#
# while Ch eq. 3 defines $\theta_1$ to $\theta_{d/2}$. Built as printed (with eq. 3 also giving
# $\theta_0$), the last block is no rotation at all:


# %%
def matrix_as_printed(position, dim, base=10_000.0):
    """Ch eq. 3 and 4 taken literally, k counted from 0 in the matrix."""
    theta = [base ** (-2 * (k - 1) / dim) for k in range(dim // 2 + 1)]
    blocks = [R(position * theta[k]) for k in range(dim // 2 - 1)]
    last, before = position * theta[dim // 2], position * theta[dim // 2 - 1]
    blocks.append(
        torch.tensor([[math.cos(last), -math.sin(before)], [math.sin(last), math.cos(before)]])
    )
    return torch.block_diag(*blocks)


for dim, enough in ((8, 0.5), (64, 0.1)):
    places = range(0, 5000, 25)
    gram = torch.stack([(m := matrix_as_printed(p, dim)).T @ m for p in places])
    name = f"as printed, dim {dim}: RᵀR is not the identity"
    _ = must_differ(name, gram, torch.eye(dim).expand(200, -1, -1), at_least=enough)

    u, v = torch.zeros(2, dim)
    u[-2:], v[-2:] = torch.tensor([0.6, 0.8]), torch.tensor([-0.8, 0.6])  # in the last pair
    entry = [(matrix_as_printed(p + 6, dim) @ u) @ (matrix_as_printed(p, dim) @ v) for p in places]
    entry = torch.stack(entry)
    name = f"as printed, dim {dim}: six places apart, anywhere"
    _ = must_differ(name, entry, entry[:1].expand(200), at_least=0.05)

R_printed = torch.stack([matrix_as_printed(p, 8)[:6, :6] for p in (1, 2)])
_ = must_differ(
    "as printed: the first wheel turns by θ₀ = 10 per token, not by 1",
    R_printed[:, :2, :2],
    torch.stack([R(1.0), R(2.0)]),
)

# %% [markdown]
# ### Rows or columns: what going from Ch eq. 1 to eq. 5 invites
#
# Ch eq. 1 turns columns, $R_t W x$; with eq. 5 the same text goes over to rows, $XW$. A row must be
# turned by the *transpose*, $x W R_t^\top$. The papers do not write that line; a reader who writes
# $x W R_t$ turns backwards. If both C and B
# are turned so, distances still come out, with past and future exchanged; where only the code is
# changed and not the weights, or where two implementations meet, the scores are wrong.

# %%
u, v = random(2, 8, seed=51)
row = u @ rotation_matrix(3, 8)
check("row times R = turned by the negative angle", row, rotation_matrix(-3, 8) @ u)
_ = must_differ("row times R is not R times column", row, rotation_matrix(3, 8) @ u)


def both_backwards(reader, writer):
    return (u @ rotation_matrix(reader, 8)) @ (v @ rotation_matrix(writer, 8))


check("both backwards: still by distance", both_backwards(109, 103), both_backwards(9, 3))
forwards = (rotation_matrix(9, 8) @ u) @ (rotation_matrix(3, 8) @ v)
_ = must_differ("both backwards: another score", both_backwards(9, 3), forwards)

# %% [markdown]
# ### Turned by the number of the head (WM Listing 7)
#
# Listing 7 lays Q and K out as (b, h, l, d) and calls `apply_QK_rotary_pos_emb` with its default
# `unsqueeze_dim=2`, which is meant for (b, l, h, d). What happens depends on how many heads there
# are:


# %%
def apply_as_printed(q, cosine, sine, unsqueeze_dim=2):
    """WM Listing 1's application, which broadcasts along whatever axis it is given."""
    first, second = q.chunk(2, dim=-1)
    quarter_turn = torch.cat([-second, first], dim=-1)
    return q * cosine.unsqueeze(unsqueeze_dim) + quarter_turn * sine.unsqueeze(unsqueeze_dim)


outcomes = []
for h in (4, 1, 12):
    q = random(2, h, 12, 8, seed=52)  # (b, h, l, d)
    cosine, sine = rope_cos_sin(torch.arange(12).expand(2, -1), 8, dtype=torch.float64)
    try:
        printed = apply_as_printed(q, cosine, sine)
    except RuntimeError:
        outcomes.append(f"h = {h:2}, l = 12: does not run")
    else:
        outcomes.append(f"h = {h:2}, l = 12: {tuple(q.shape)} becomes {tuple(printed.shape)}")
print("\n".join(outcomes))

by_head = torch.stack([q[:, n] @ rotation_matrix(n, 8).T for n in range(12)], dim=1)
check("h = l: every token is turned by the number of its head", printed, by_head)
check("h = l: so the scores hold no position", printed @ printed.mT, q @ q.mT)
right = apply_rope(q.transpose(1, 2), cosine, sine).transpose(1, 2)
check("unsqueeze_dim=1 repairs the listing", apply_as_printed(q, cosine, sine, 1), right)
_ = must_differ("h = l: as printed", printed, right)

# %% [markdown]
# With one head, which is what WM Table 6 uses, an axis of length $l$ appears out of nothing. With
# as many heads as tokens the code runs and contains no position at all. The package has one layout
# and says what it expects:

# %% tags=["raises-exception"]
apply_rope(random(2, 4, 12, 8, seed=53), cosine, sine)

# %% [markdown]
# ### A base that moves under a cache (WM Listing 1)
#
# To read beyond the length of the training, the listing stretches the base, and takes the length
# from the largest position *of the current call*:
#
# $$\text{base}' = \text{base} \cdot \Big(\sigma\,\frac{l}{l_0} - (\sigma - 1)\Big)^{d/(d-2)}
#   \quad\text{for } l > l_0, \tag{4.13}$$
#
# with $l_0$ the length in training and $\sigma$ a factor of 1 or more. The last pair turns by
# $\text{base}^{-(d-2)/d}$ per token, so the exponent makes it slower by exactly the bracket, and
# the first pair stays as it was. As a formula it is sound: continuous at the training length, and
# at four times that length the slowest wheel turns exactly four times slower. But a cache holds
# keys that were turned with an older base.

# %%
trained, dim = 64, 16
bases = [ntk_base(length, dim, max_positions=trained) for length in (64, 65, 256)]
slowest = [rope_frequencies(dim, base)[-1].item() for base in bases]
check("at 4 times the length the slowest pair turns 4 times slower",
      torch.tensor(4 * slowest[2]), torch.tensor(slowest[0]))  # fmt: skip
assert bases[0] == 10_000 and abs(bases[1] / bases[0] - 1) < 0.05  # no jump


def last_scores(length, moving, seed=54):
    """Scores of a text's last query; each key turned when it came, or all with one base."""
    q, k = random(2, length, dim, seed=seed)
    final = ntk_base(length, dim, max_positions=trained)
    keys = []
    for t in range(length):
        base = ntk_base(t + 1, dim, max_positions=trained) if moving else final
        keys.append(rotation_matrix(t, dim, base) @ k[t])
    return torch.stack(keys) @ (rotation_matrix(length - 1, dim, final) @ q[-1]) / math.sqrt(dim)


check("up to the training length: no difference", last_scores(64, True), last_scores(64, False))
decoded, prefilled = last_scores(65, True), last_scores(65, False)
_ = must_differ("one token beyond it, from a cache", decoded, prefilled, at_least=1e-2)

elsewhere = []
for seed in range(10):
    decoded, prefilled = (last_scores(192, m, seed).softmax(-1) for m in (True, False))
    elsewhere.append((decoded - prefilled).abs().sum() / 2)
print(f"three times the length: {torch.stack(elsewhere).mean():.1g} of the attention is elsewhere")

# %% [markdown]
# The state of SSD is worse off: it is a sum of writes turned with different bases, and cannot be
# turned again. So `ntk_base` is a function of a length that the caller fixes once per text. With
# one base for all, prefill and decoding agree:

# %%
_ = torch.manual_seed(0)
stretched = ssd.SSD(32, n_heads=4, d_state=16, rope_base=ntk_base(200, 16, max_positions=64))
listing = ssd.SSD(32, n_heads=4, d_state=16)
listing.load_state_dict(stretched.state_dict())
text, positions = random(1, 200, 32, seed=55), torch.arange(200)[None]


def decode(layer, base_at):
    cache, outputs = None, []
    with torch.no_grad():
        for n in range(200):
            layer.rope_base = base_at(n)
            y, cache = layer(text[:, n : n + 1], positions[:, n : n + 1], cache=cache)
            outputs.append(y)
    return torch.cat(outputs, 1)


with torch.no_grad():
    one_pass, _ = stretched(text, positions)
check("base fixed up front: decoding = one pass",
      decode(stretched, lambda n: stretched.rope_base), one_pass)  # fmt: skip
moving = decode(listing, lambda n: ntk_base(n + 1, 16, max_positions=64))
_ = must_differ("base of the current length: decoding", moving, one_pass, at_least=1e-2)

# %% [markdown]
# ### Log scaling in a linear model (OTCE Appendix A)
#
# OTCE multiplies C by $\max(1, \log_{\text{base}} n)$ where the text is longer than in training,
#
# > "[…] so that the problem of insufficient generalization ability of the high bit can be solved."
# > — OTCE, Appendix A
#
# In the softmax of attention such a factor does something: larger scores make a distribution more
# peaked. SSD is linear in C. There the factor multiplies what comes out of the state, and the
# *choice* among the tokens stays what it was. A norm directly behind the state, as Mamba-2 has it,
# removes even that. With the skip connection in between, the mix of the two changes.

# %%
x, dt, A, B, C = inputs()
scale = log_length_scale(torch.arange(40).expand(2, -1), base_length=8, dtype=torch.float64)
assert (scale[:, :8] == 1).all() and scale[0, -1] > 1.5
plain = ssd.ssd_chunked(x, dt, A, B, C)
scaled = ssd.ssd_chunked(x, dt, A, B, scale[..., None, None] * C)
check("scaled C = scaled output", scaled, scale[..., None, None] * plain)

with_norm = [F.rms_norm(y.flatten(2), (20,), eps=1e-12) for y in (scaled, plain)]
check("after a norm nothing is left of it", *with_norm)


D = torch.ones(4)
skipped = [F.rms_norm((y + D[:, None] * x).flatten(2), (20,), eps=1e-12) for y in (scaled, plain)]
_ = must_differ("with the skip connection the mix changes", *skipped)


def entropy(weights):
    return -(weights * weights.log()).sum(-1)


logits = random(256, 40, seed=56)
sharper, before = (entropy((factor * logits).softmax(-1)).mean() for factor in (scale[0, -1], 1.0))
assert sharper < before - 0.2
print("in a softmax over 40 tokens the same factor lowers the entropy by more than 0.2 nats")

# %% [markdown]
# ## Summary
#
# - $\langle R_t c, R_s b\rangle = c^\top R_{s-t}\,b$: two properties of rotations and one line.
#   Thirteen lines of algebra say the same in coordinates, and each of them was checked.
# - A wide vector is many wheels of different speeds. Which coordinates share a wheel is a
#   convention that weights depend on.
# - SSD inherits the theorem because its decay is one number per head. Where the decay differs
#   within a pair, as in S6, it fails.
# - The output knows distances, the cache knows absolute positions: go on counting.
# - Turned C and B are a state that turns: a complex state space model with fixed angles. Angles
#   from the data are the next step, and they count.
# - Decay knows near and far, a convolution its few taps, rotations any distance, less sharply the
#   further away.
#
# | as printed | what happens | what holds |
# |---|---|---|
# | $R_{t-s}$ between C and B | reader and writer swapped | $R_{s-t}$ |
# | $\theta_{d/2}$, $\theta_{d/2-1}$ in one block | no rotation; places leak | one index |
# | columns in eq. 1, rows in eq. 5 | $xWR_t$ would turn backwards | $xWR_t^\top$ |
# | `unsqueeze_dim=2` on (b, h, l, d) | no run, or no position | `unsqueeze_dim=1` |
# | base from the current length | cache and query disagree | one base per text |
# | log scaling of C in SSD | scales the output, chooses nothing | scale Q of attention |
# | RoPE with a full diagonal A | places leak | A tied in pairs, or one A |
#
# ## Exercises
#
# **1.** After how many tokens has pair $k$ of width `dim` made one full round? Which pairs have
# made less than one round over a text of `length` tokens?


# %% tags=["exercise"]
def wave_length(k, dim, base=10_000.0):
    ### BEGIN SOLUTION
    return 2 * math.pi * base ** (2 * k / dim)
    ### END SOLUTION


def slow_pairs(length, dim, base=10_000.0):
    """The pairs k that have made less than one round, as a list."""
    ### BEGIN SOLUTION
    return [k for k in range(dim // 2) if wave_length(k, dim, base) > length]
    ### END SOLUTION


# %% tags=["check"]
assert abs(wave_length(0, 64) - 2 * math.pi) < 1e-12
for k in (0, 5, 31):
    full = rotation_matrix(wave_length(k, 64), 64)
    assert abs(full[k, k] - 1) < 1e-9 and abs(full[k, k + 32]) < 1e-9
assert slow_pairs(4096, 64) == list(range(23, 32))

# %% [markdown]
# **2.** GPT-NeoX turns only the first `r` coordinates and leaves the rest alone. Write it with
# `apply_rope`. Does the theorem still hold?


# %% tags=["exercise"]
def partial_rope(x, positions, r, base=10_000.0):
    """x (b, l, h, d), positions (b, l); the first r coordinates turn, r even."""
    ### BEGIN SOLUTION
    cosine, sine = rope_cos_sin(positions, r, base, dtype=x.dtype)
    return torch.cat([apply_rope(x[..., :r], cosine, sine), x[..., r:]], dim=-1)
    ### END SOLUTION


# %% tags=["check"]
x = random(1, 10, 2, 12, seed=60)
positions = torch.arange(10)[None]
here, there = (partial_rope(x, positions + start, 8) for start in (0, 500))
check("the rest is left alone", here[..., 8:], x[..., 8:])
products = [einsum("blhd,bmhd->bhlm", v, v) for v in (here, there)]
check("partly turned vectors: the theorem holds", products[1], products[0])
_ = must_differ("something turned", here[:, 1:, :, :8], x[:, 1:, :, :8])

# %% [markdown]
# **3.** A conversation is cut at the front, and the cached keys of the tokens that stay must move
# from their old positions to new ones, `offset` positions earlier. The unturned keys are gone. Move
# the turned keys.


# %% tags=["exercise"]
def move_keys(turned, offset, base=10_000.0):
    """turned (b, l, h, d): keys turned by position p; return them turned by p - offset."""
    ### BEGIN SOLUTION
    return turned @ rotation_matrix(-offset, turned.shape[-1], base).T
    ### END SOLUTION


# %% tags=["check"]
x, positions = random(1, 10, 2, 12, seed=61), torch.arange(100, 110)[None]
old, new = (
    apply_rope(x, *rope_cos_sin(positions - by, 12, dtype=torch.float64)) for by in (0, 100)
)
check("moved keys = keys turned by the new positions", move_keys(old, 100), new)

# %% [markdown]
# **4.** A reader wants to see exactly the token 8 places back, whatever it holds: find a query
# $c$ such that $\langle R_t c, R_s b\rangle$, with $b = (1, \dots, 1)$, is as close as possible to
# 1 at distance 8 and to 0 at all other distances from 0 to 63, in the sense of least squares and
# with entries of moderate size. How well can it be done with 8 pairs, how well with 32?


# %% tags=["exercise"]
def query_for(distance, dim, base=100.0, reach=64):
    """The query c (dim,), by torch.linalg.pinv with rtol=1e-3, which keeps its entries moderate."""
    ### BEGIN SOLUTION
    b = torch.ones(dim)
    rows = torch.stack([rotation_matrix(-d, dim, base) @ b for d in range(reach)])
    wanted = torch.zeros(reach)
    wanted[distance] = 1
    return torch.linalg.pinv(rows, rtol=1e-3) @ wanted
    ### END SOLUTION


# %% tags=["check"]
peaks = {}
for dim in (16, 64):
    seen = torch.stack(
        [query_for(8, dim) @ rotation_matrix(-d, dim, 100.0) @ torch.ones(dim) for d in range(64)]
    )
    assert seen.argmax() == 8
    peaks[dim] = seen[8].item()
assert peaks[16] < 0.25 < 0.3 < peaks[64]  # a blurred view, sharper with more pairs

# %% [markdown]
# **5.** The state of rotary SSD holds writes turned by absolute positions. Move the *whole state*
# to other positions, so that a prompt that was read from position 0 on can stand at position 500.
# (In a deep model this serves the first layer only: what the others have read depends on what came
# before.)


# %% tags=["exercise"]
def move_state(state, offset, base=100.0):
    """state (b, h, p, n), written from position 0 on; the same as if written from offset on."""
    ### BEGIN SOLUTION
    return state @ rotation_matrix(offset, state.shape[-1], base).T
    ### END SOLUTION


# %% tags=["check"]
x, dt, A, B, C = inputs()
states = []
for offset in (0, 500):
    turned = (turn(v, offset + torch.arange(40)) for v in (B, C))
    states.append(ssd.ssd(x, dt, A, *turned, return_final_state=True)[1])
check("moved state = state of the moved text", move_state(states[0], 500), states[1])
_ = must_differ("not moved", states[0], states[1])

# %% [markdown]
# ## Further reading
#
# - Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding* (2021): the idea, and
#   the bound on how scores fade.
# - Shi et al., *Wonderful Matrices*, §3.1, Table 1 and Appendix A; *OTCE*, §3.1 and Appendix A.
# - Dao and Gu, *Transformers are SSMs* (2024): the convolution and the decay as Mamba-2 has them.
# - Lahoti et al., *Mamba-3: Improved Sequence Modeling using State Space Principles* (2026):
#   complex states, and angles that are learned from data.
# - Peng et al., *YaRN* (2023): what to do with the base when texts grow longer.
# - `cheems_ref/rope.py`: the listing this notebook arrives at.
