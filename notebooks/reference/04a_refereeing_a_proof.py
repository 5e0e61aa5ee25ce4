# %% [markdown]
# # 04a · Refereeing a printed proof
#
# **The appendices of OTCE and WM prove the theorem of chapter 04 and end with the wrong sign. This
# page goes through the proof line by line, and runs what else is printed about rotations.** It's a
# page to look things up: the list of claims links to its sections. There is nothing to solve here.
#
# - Sections 2 to 5: the thirteen lines of the proof. As equations, twelve of them hold. The last
#   one has the wrong sign.
# - Section 6: a matrix with two indices in one block, a swapped axis, rows instead of columns.
#
# You need chapter 04, sections 1 to 3.
#
# Sources: *OTCE* eqs. 11 and 12, Appendix A; *Wonderful Matrices* (WM) §3.1, Appendix A, Listings 1
# and 7; *Cheems* (Ch) eqs. 1, 3 and 4.

# %% tags=["setup"]
import math

import sympy as sp
import torch

from cheems_ref.rope import apply_rope, rope_cos_sin, rotation_matrix
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def R(phi):
    """Equation 4.2, (2, 2)."""
    return torch.tensor([[math.cos(phi), -math.sin(phi)], [math.sin(phi), math.cos(phi)]])


# %% [markdown]
# ## 1 · Two referees
#
# Every line of the proof goes before two referees. *Algebra*: SymPy subtracts the two sides and
# simplifies, and what is left must be zero. Not small, zero. *Numbers*: `check` compares both sides
# at random values of the symbols. `identity` asks both; where we expect a line to be wrong,
# `must_differ` compares the two sides numerically. We don't reprint the appendix: the line numbers
# are ours, and the two arguments after a check's name are the two sides of that line. Folded cells
# define the symbols: `q_hat` is $\hat q$, and `ct`, `st`, `cs`, `ss` are the cosines and sines of
# $t\theta$ and $s\theta$.

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
# ## 2 · Lines 1 to 4: what is turned
#
# Read a pair of real numbers $(q_1, q_2)$ as the complex number $\hat q = q_1 + \mathtt{i}q_2$.
# Multiplying by $e^{\mathtt{i}\varphi}$ rotates it by $\varphi$:
#
# $$E_t(q) = (q_1 + \mathtt{i}q_2)\,e^{\mathtt{i}t\theta}, \qquad
#   E_s(k) = (k_1 + \mathtt{i}k_2)\,e^{\mathtt{i}s\theta}. \tag{4.4}$$
#
# Lines 1 and 2 expand the exponential and multiply out.

# %% tags=["setup"]
q1, q2, k1, k2, t, s, theta = SYMBOLS
q, k = sp.Matrix([q1, q2]), sp.Matrix([k1, k2])
q_hat, k_hat = q1 + sp.I * q2, k1 + sp.I * k2  # sp.I is the imaginary unit
turned_q_hat = q_hat * sp.exp(sp.I * t * theta)
turned_k_hat = k_hat * sp.exp(sp.I * s * theta)

# %% tags=["setup"]
ct, st = sp.cos(t * theta), sp.sin(t * theta)
cs, ss = sp.cos(s * theta), sp.sin(s * theta)

# %%
identity("line 1: Euler's formula", sp.exp(sp.I * t * theta), ct + sp.I * st)
identity("line 2: q̂, times it", turned_q_hat, (q1 * ct - q2 * st) + sp.I * (q2 * ct + q1 * st))
identity("line 2: k̂, alike", turned_k_hat, (k1 * cs - k2 * ss) + sp.I * (k2 * cs + k1 * ss))

# %% [markdown]
# Line 3 reads real and imaginary part as a vector again. It's the rotation matrix (4.2), applied to
# a column.


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
# Line 4 is why complex numbers help. An inner product is the real part of the first *times the
# conjugate of the second*. The appendices speak of the conjugate *of the product*, and that is
# something else:
#
# $$\langle q, k \rangle = q_1 k_1 + q_2 k_2 = \mathrm{Re}(\hat q\,\hat k^*). \tag{4.5}$$

# %%
of_the_second = sp.re(sp.expand(q_hat * sp.conjugate(k_hat)))
of_the_first = sp.re(sp.expand(sp.conjugate(q_hat) * k_hat))
of_the_product = sp.re(sp.expand(sp.conjugate(q_hat * k_hat)))
identity("line 4: ⟨q, k⟩ = Re(q̂ k̂*)", q.dot(k), of_the_second)
identity("line 4: ⟨q, k⟩ = Re(q̂* k̂)", q.dot(k), of_the_first)
_ = must_differ("line 4 with (q̂ k̂)*", numbers(of_the_product), numbers(q.dot(k)))

# %% [markdown]
# ## 3 · Lines 5 to 7: the function of the distance
#
# $e^{\mathtt{i}t\theta}$ times the conjugate of $e^{\mathtt{i}s\theta}$ is
# $e^{\mathtt{i}(t-s)\theta}$, and two positions become one distance:
#
# $$G(q, k, t - s) = \mathrm{Re}\big[\hat q\,\hat k^*\, e^{\mathtt{i}(t-s)\theta}\big]. \tag{4.6}$$

# %% tags=["setup"]
delta = t - s
same, cross = q1 * k1 + q2 * k2, q2 * k1 - q1 * k2

# %%
two_angles = sp.exp(sp.I * t * theta) * sp.conjugate(sp.exp(sp.I * s * theta))
identity("line 5: two angles become one", two_angles, sp.exp(sp.I * delta * theta))
contents = q_hat * sp.conjugate(k_hat)
identity("line 6: the product of the contents", contents, same + sp.I * cross)

# %% tags=["setup"]
G = sp.re(sp.expand(q_hat * sp.conjugate(k_hat) * sp.exp(sp.I * delta * theta), complex=True))

# %%
with_minus = same * sp.cos(delta * theta) - cross * sp.sin(delta * theta)
with_plus = same * sp.cos(delta * theta) + cross * sp.sin(delta * theta)
identity("line 7: the real part", G, with_minus)
_ = must_differ("line 7 with a plus", numbers(with_plus), numbers(G))

# %% [markdown]
# ## 4 · Lines 8 to 11: the inner product in coordinates
#
# Now from the other side. Multiply the two vectors of line 2 out into eight terms, collect them,
# and use the formulas for a difference of angles.

# %% tags=["setup"]
inner = (R_sym(t * theta) * q).dot(R_sym(s * theta) * k)

# %%
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

# %%
identity("line 10: cosine of a difference", ct * cs + st * ss, sp.cos(delta * theta))
identity("line 10: sine of a difference", st * cs - ct * ss, sp.sin(delta * theta))
sine_of_the_sum, sine = numbers(st * cs + ct * ss), numbers(sp.sin(delta * theta))
_ = must_differ("line 10: sine of the sum", sine_of_the_sum, sine)
identity("line 11: the inner product is G", inner, G)

# %% [markdown]
# So far the printed proof holds, apart from the words about the conjugate.
#
# ## 5 · Lines 12 and 13: the matrix
#
# The appendices end with
#
# > $\begin{bmatrix} \cos((j-i)\theta) & -\sin((j-i)\theta) \\ \sin((j-i)\theta) &
# > \cos((j-i)\theta)\end{bmatrix}$ — OTCE, Appendix A, after "Finally, we get"; likewise eq. 11,
# > eq. 12 for Q and K, and WM Appendix A
#
# between $C^\top$ and $B$. That is $R_{t-s}$. Their own line before it multiplies out to the
# transpose. Here is the sign:

# %% tags=["setup"]
product = R_sym(t * theta).T * R_sym(s * theta)

# %%
identity("line 12: R_tᵀ R_s = R_(s-t)", product, R_sym((s - t) * theta))
true = (q.T * R_sym((s - t) * theta) * k)[0]
printed = (q.T * R_sym((t - s) * theta) * k)[0]
identity("line 13: the inner product is qᵀ R_(s-t) k", inner, true)
_ = must_differ("line 13 as printed: qᵀ R_(t-s) k", numbers(printed), numbers(inner))

# %% [markdown]
# How bad is it? The printed formula is right with reader and writer swapped. It agrees with the
# truth at distance 0, after half turns, and whenever $q$ and $k$ lie on one line. So a test with
# $q = k$ sees nothing.

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

# %%
quarter = {q1: 1, q2: 0, k1: 0, k2: 1, t: 1, s: 0, theta: sp.pi / 2}
truth, as_printed = inner.subs(quarter), printed.subs(quarter)
assert (truth, as_printed) == (1, -1)
print("a quarter turn apart: truth", truth, "  as printed", as_printed)

# %% [markdown]
# ## 6 · As printed
#
# ### The last block of the matrix (Ch eq. 4, WM §3.1, OTCE Appendix A)
#
# The printed matrix starts with $\theta_0$ and mixes $\theta_{d/2}$ and $\theta_{d/2-1}$ in its
# last block, while the angles are counted from 1:
#
# > $\cos i\theta_{d/2},\; -\sin i\theta_{d/2-1};\quad \sin i\theta_{d/2},\; \cos i\theta_{d/2-1}$
# > — Ch eq. 4, last block
#
# > $\Theta = \{\theta_i = n^{-2(i-1)/d},\; i \in [1, 2, \dots, d/2]\}$ — Ch eq. 3
#
# Taken literally, the last block isn't a rotation, and positions leak into the score:


# %%
def matrix_as_printed(position, dim, base=10_000.0):
    """Ch eq. 3 and 4 taken literally, (dim, dim)."""
    theta = [base ** (-2 * (i - 1) / dim) for i in range(dim // 2 + 1)]
    blocks = [R(position * theta[i]) for i in range(dim // 2 - 1)]
    last, before = position * theta[dim // 2], position * theta[dim // 2 - 1]
    mixed = [[math.cos(last), -math.sin(before)], [math.sin(last), math.cos(before)]]
    return torch.block_diag(*blocks, torch.tensor(mixed))


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
# (The right score is 0.006 everywhere.) And since eq. 3 counts from 1, its formula makes the first
# pair turn by ten radians per token for $d = 8$, and not by one:

# %%
first_block = matrix_as_printed(1, 8)[:2, :2]
check("as printed, dim 8: the first pair turns by 10 per token", first_block, R(10.0))
_ = must_differ("as printed: by 1", first_block, R(1.0))

# %% [markdown]
# ### Turned by the number of the head (WM Listing 7)
#
# Listing 7 has Q and K as (b, h, l, d) and calls `apply_QK_rotary_pos_emb` with `unsqueeze_dim=2`,
# which is meant for (b, l, h, d). What happens depends on the numbers of heads and tokens:


# %%
def apply_as_printed(q, cosine, sine, unsqueeze_dim=2):
    """WM Listing 1's application, which broadcasts along whatever axis it is given."""
    first, second = q.chunk(2, dim=-1)
    quarter_turn = torch.cat([-second, first], dim=-1)
    return q * cosine.unsqueeze(unsqueeze_dim) + quarter_turn * sine.unsqueeze(unsqueeze_dim)


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
# With one head, which WM Table 6 uses, an axis of length $l$ appears out of nothing. With as many
# heads as tokens the code runs, and rotates every token by the number of its *head*. The scores
# then contain no position at all:

# %%
cosine, sine = rope_cos_sin(torch.arange(12).expand(2, -1), 8, dtype=torch.float64)
q, k = random(2, 12, 12, 8, seed=52), random(2, 12, 12, 8, seed=57)  # (b, h, l, d) with h = l
printed, printed_k = apply_as_printed(q, cosine, sine), apply_as_printed(k, cosine, sine)
by_head = torch.stack([q[:, head] @ rotation_matrix(head, 8).T for head in range(12)], dim=1)
check("h = l: turned by the number of the head", printed, by_head)
check("h = l: the scores are those without positions", printed @ printed_k.mT, q @ k.mT)
right = apply_rope(q.transpose(1, 2), cosine, sine).transpose(1, 2)
check("unsqueeze_dim=1 repairs the listing", apply_as_printed(q, cosine, sine, 1), right)
_ = must_differ("h = l: as printed", printed, right)

# %% [markdown]
# The package has one layout, (b, l, h, d), and rejects the other one when the shapes reveal it.
# When $h = l$ they don't, and the package is fooled, too.
#
# ### Rows instead of columns (Ch eq. 1)
#
# Ch eq. 1 rotates columns, $R_t W x$; from eq. 5 on, the text writes rows, $XW$. If you write
# vectors as rows, use the transpose:

# %%
q, k = random(2, 8, seed=51)
row = q @ rotation_matrix(3, 8)
check("row times R = turned by the negative angle", row, rotation_matrix(-3, 8) @ q)
_ = must_differ("row times R = R times column", row, rotation_matrix(3, 8) @ q)

forwards = (rotation_matrix(9, 8) @ q) @ (rotation_matrix(3, 8) @ k)
backwards = (q @ rotation_matrix(9, 8)) @ (k @ rotation_matrix(3, 8))
exchanged = (rotation_matrix(3, 8) @ q) @ (rotation_matrix(9, 8) @ k)
check("both backwards: reader and writer exchanged", backwards, exchanged)
_ = must_differ("both backwards: the score", backwards, forwards)
print(f"score {forwards:.3f}, both backwards {backwards:.3f}")

# %% [markdown]
# ## Summary
#
# - Give every line two referees, and test a sign with inputs that aren't symmetric.
# - The printed theorem has reader and writer swapped; its matrix has two indices in one block; one
#   listing doesn't run, or gains an axis, and where $h = l$ it rotates by the number of the head.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0], " SymPy version", sp.__version__)
