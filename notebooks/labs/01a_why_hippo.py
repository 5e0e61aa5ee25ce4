# %% [markdown]
# # 01a · Why HiPPO
#
# **Which matrix $A$ gives a state that remembers? This lab derives the matrix S4 started from,
# beginning with what we want the state to hold.** You will be able to
#
# - derive the HiPPO matrix (LegS) and say what its state holds;
# - say what S4 changes in it, and what a matrix of rank one does to its eigenvectors;
# - tell the bilinear rule from the zero-order hold.
#
# You need chapter 01, sections 1 to 4, and integration by parts.
#
# Sources: Gu et al., *HiPPO* (2020); lecture 22 of CMU 10-423/623/723 (L22); *OTCE* §2.1;
# *Wonderful Matrices* (WM) Listing 3.

# %% tags=["setup"]
import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.polynomial.legendre import Legendre, leggauss, legval

from cheems_ref import plotting
from cheems_ref.state_space import (
    S4D,
    discretize_bilinear,
    discretize_zoh,
    hippo_legs,
    ssm_convolution,
    ssm_kernel,
)
from cheems_ref.verify import check, must_differ

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spring():
    """A, B and C of equation 1.2; the state is (position, speed)."""
    A = torch.tensor([[0.0, 1.0], [-9.0, -0.6]])
    return A, torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])


# %% [markdown]
# ## 1 · The wish
#
# Start with what we want and find $A$ afterwards. At every time $t$, the $n$ numbers of the state
# should be the best summary of the input so far: the coefficients of the polynomial of degree below
# $n$ that is closest to it in the mean square. (HiPPO is a family, one member for each way to weigh
# the past. This is *LegS*, which weighs all of it equally.)
#
# Stretch the past over $[0, 1]$, where 0 is the beginning and 1 is now. Let $P_0, P_1, \dots$ be
# the *Legendre polynomials* there, scaled so that the mean of $P_i P_j$ is 1 for $i = j$ and 0
# otherwise. With an orthonormal basis, the best coefficients are inner products, and those are
# plain averages:
#
# $$h_i(t) = \frac1t \int_0^t x(s)\; P_i(s/t)\; ds. \tag{1.13}$$

# %% tags=["setup"]
n = 8
P = [math.sqrt(2 * i + 1) * Legendre.basis(i, domain=[0, 1]) for i in range(n)]


# %%
nodes, weights = leggauss(n)  # Gauss's rule: exact for polynomials of degree below 2n
xi, w = torch.tensor((nodes + 1) / 2), torch.tensor(weights / 2)


def at(functions, points):
    """The values of each function at the points: (functions, points)."""
    return torch.tensor(np.stack([f(np.asarray(points)) for f in functions]))


values = at(P, xi)
check("means of products P_i P_j", (values * w) @ values.T, torch.eye(n))

# %% [markdown]
# Now let time go on. Three things happen to the averages. The factor $1/t$ shrinks them. The newest
# input comes in with weight $P_i(1)/t$. And every old sample moves towards 0, because more and more
# past has to fit into $[0, 1]$:
#
# $$\frac{\partial}{\partial t}\,P_i(s/t) = -\frac1t\;\xi\,P_i'(\xi), \qquad \xi = s/t.$$
#
# This is why it works: $\xi\,P_i'(\xi)$ is again a polynomial of degree $i$, so it
# is a sum $\sum_{j \le i} G_{ij}\,P_j(\xi)$, and its average with $x$ is $\sum_j G_{ij}\,h_j$.
# Everything that happens can be computed from the state itself:
#
# $$h'(t) = \frac1t\,\big(A\,h(t) + B\,x(t)\big), \qquad A = -(I + G), \qquad B_i = P_i(1).
#   \tag{1.14}$$

# %%
slopes = at([P_i.deriv() for P_i in P], xi) * xi  # xi P_i'(xi)
G = (slopes * w) @ values.T  # the mean of xi P_i'(xi) P_j(xi)
A, B = hippo_legs(n)
check("A = -(I + G): the HiPPO matrix", A, -(torch.eye(n) + G))
check("B = P_i(1)", B, at(P, [1.0])[:, 0])
_ = must_differ("the stretching forgotten", -torch.eye(n), A)

# %% [markdown]
# Integrating $G_{ij}$ by parts gives the entries: $-\sqrt{(2i+1)(2j+1)}$ below the diagonal of $A$,
# $-(i+1)$ on it, and zeros above.
#
# **Fill in 1.** Write $A$ from its entries, without the package. On paper first: what is the
# smallest one, $n = 2$?


# %% tags=["exercise"]
def by_entries(n):
    """HiPPO's matrix, (n, n), entry by entry."""
    ### BEGIN SOLUTION
    roots = (2 * torch.arange(n) + 1.0).sqrt()
    return -torch.outer(roots, roots).tril(-1) - torch.diag(torch.arange(n) + 1.0)
    ### END SOLUTION


# %% tags=["check"]
for size in (1, 2, 7):
    filled = torch.as_tensor(by_entries(size)).double()
    assert filled.shape == (size, size), f"n = {size}: shape {tuple(filled.shape)}"
    assert not filled.triu(1).any(), f"n = {size}: above the diagonal there are zeros"
    check(f"your A, n = {size}", filled, hippo_legs(size)[0])

# %% [markdown]
# ## 2 · What it remembers
#
# For samples, hold the input for one unit of time each. With the clock $\tau = \log t$ the equation
# becomes $dh/d\tau = t\,h'(t) = A\,h + B\,x$, without the $1/t$. So ZOH is exact here as well, and
# one sample lasts $\log(t+1) - \log t$:


# %%
def legs_memory(x, n):
    """The n averages of the samples x (l,) so far, after each sample: (l, n)."""
    A, B = hippo_legs(n)
    memory = [F.pad(x[:1], (0, n - 1))]  # over its first unit of time the input is a constant
    for t, x_t in enumerate(x[1:], start=1):
        A_bar, B_bar = discretize_zoh(A, B, math.log1p(1 / t))
        memory.append(A_bar @ memory[-1] + x_t * B_bar)
    return torch.stack(memory)


# %%
A, B = hippo_legs(n)
length = 240
edges = torch.arange(length + 1) / length
signal = torch.sin(2 * math.pi * 3 * edges[1:] ** 2) + (edges[1:] > 0.62)  # a sweep and a jump
memory = legs_memory(signal, 64)  # (length, 64)

# The truth: each P_i integrated over the piece of the past that a sample covers.
pieces = torch.tensor(np.stack([p.integ()(edges.numpy()) for p in P])).diff(dim=1)  # (n, length)
check("legs_memory = averages of the past", memory[-1, :n], pieces @ signal)
_ = must_differ("the signal one sample late", pieces[:, 1:] @ signal[:-1], memory[-1, :n])

# %% [markdown]
# Reconstruct the signal from 8 and from 64 of these numbers. Before you look: where will 8 numbers
# fail first?


# %% tags=["figure"]
def draw_memory(ax, signal, memory, now):
    """The signal, and what 8 and 64 numbers know of it at the time `now`."""
    past = np.linspace(0, 1, 241)
    plotting.lines(ax, torch.arange(1, 241), {"signal": signal}, legend=None)
    held = {}
    for n in (64, 8):
        scaled = memory[now - 1, :n].numpy() * np.sqrt(2 * np.arange(n) + 1)
        held[f"{n} numbers"] = legval(2 * past - 1, scaled)
    plotting.lines(ax, past * now, held, title=f"at t = {now}", xlabel="time", ylim=(-1.4, 3.4),
                   legend="upper left" if now == 80 else None)  # fmt: skip
    ax.axvline(now, ymax=0.7, color=plotting.INK, linewidth=1)  # the legend is above


# %% tags=["figure"]
fig, axes = plotting.figure(1, 3, size=(12, 4.4))
for ax, now in zip(axes, (80, 160, 240), strict=True):
    draw_memory(ax, signal, memory, now)
axes[0].set_ylabel("input")
plotting.save(
    fig,
    "01a_hippo",
    "A signal that swings faster and faster and has a jump, and its reconstruction at three times, "
    "each up to a line that marks now. At t = 80 all three curves coincide. At t = 240 the curve "
    "of 64 numbers still follows the signal; that of 8 numbers follows the first two thirds "
    "roughly and the last not at all.",
)

# %% tags=["guard"]
middles = (np.arange(240) + 0.5) / 240
for size, low, high in ((8, 0.2, 0.8), (64, 0.0, 0.1)):
    scaled = memory[-1, :size].numpy() * np.sqrt(2 * np.arange(size) + 1)
    gap = torch.tensor(legval(2 * middles - 1, scaled)) - signal
    thirds = gap.view(3, 80).square().mean(1).sqrt()
    assert thirds.min() > low and thirds.max() < high

# %% [markdown]
# The past is never cut off. It only gets coarser as more of it has to fit into the same few
# numbers, and the fastest oscillations are lost first.
#
# ## 3 · What S4 made of it
#
# S4 takes HiPPO's $A$ and $B$ but leaves out the $1/t$. What is remembered then? With the clock
# $\tau = \log t$ the equation had no $1/t$ anyway. So read (1.13) with that clock, with the age $a
# = \log t - \log s$:
#
# $$h_i = \int_0^\infty x\,P_i(e^{-a})\,e^{-a}\,da,
#   \qquad \big(e^{aA} B\big)_i = P_i(e^{-a})\,e^{-a}. \tag{1.15}$$
#
# The second equation follows from the first: an impulse that arrived a time $a$ ago has become
# $e^{aA} B$, and the integral gives it the weight $P_i(e^{-a})\,e^{-a}$. These are the same
# polynomials, on a squeezed past: the last moment in detail, and old inputs crowded together and
# fading.

# %%
A, B = hippo_legs(n)
ages = torch.linspace(0, 6, 121)
kernels = torch.stack([torch.linalg.matrix_exp(age * A) @ B for age in ages.tolist()], dim=1)
values = torch.tensor(np.stack([p(np.exp(-ages.numpy())) for p in P]))  # (n, ages)
check("kernels of HiPPO's A = squeezed polynomials", kernels, values * torch.exp(-ages))
_ = must_differ("the second factor forgotten", values, kernels)

# %% [markdown]
# A full $A$ is expensive. A diagonal one would be cheap, and HiPPO's $A$ can be diagonalised. But
# the eigenvectors, the columns of $V$, are so ill-conditioned that at $n = 16$ you can lose up to
# eleven of your sixteen digits. S4's trick is to add a matrix of *rank one*, $\frac12 BB^\top$. The
# sum is $-\frac12 I$ plus an antisymmetric matrix, and has perpendicular eigenvectors:

# %%
size = 16
A, B = hippo_legs(size)
skew = torch.linalg.cond(torch.linalg.eig(A).eigenvectors).item()
rates, vectors = torch.linalg.eig(A + torch.outer(B, B) / 2)
check(f"n = {size}: all rates have the real part -1/2", rates.real, torch.full((size,), -0.5))
now = torch.linalg.cond(vectors).item()
print(f"condition number of V: 10^{math.log10(skew):.1f} before, {now:.3f} now")
_ = must_differ("rank-one part forgotten", torch.linalg.eigvals(A).real, rates.real)

legs, lin = (S4D(1, d_state=size, init=kind).A_imag[0].detach() for kind in ("legs", "lin"))
check("S4D, LegS: the same imaginary parts", legs, rates.imag[rates.imag > 0].sort().values)
_ = must_differ("S4D, Lin", lin, legs)

# %% [markdown]
# S4 writes $A$ as this sum minus $\frac12 BB^\top$, and handles the last term with Woodbury's
# formula. Two kinds of S4D drop it. *LegS* keeps the eigenvalues of the sum. *Lin*, in chapter 01,
# keeps only their real part $-\frac12$ and replaces the imaginary parts by $\pi j$. At finite $n$,
# neither remembers what HiPPO does.
#
# ## 4 · The bilinear rule
#
# The first S4 avoided the matrix exponential. Integrate over one step and replace $Ah$ by the
# average of its two ends. The input is held, so it contributes exactly $\Delta B\,x_t$:
#
# $$h_t - h_{t-1} = \tfrac{\Delta}{2}A\,(h_{t-1} + h_t) + \Delta B\,x_t \tag{1.16}$$
#
# $$\bar A = \big(I - \tfrac{\Delta}{2}A\big)^{-1}\big(I + \tfrac{\Delta}{2}A\big), \qquad
#   \bar B = \big(I - \tfrac{\Delta}{2}A\big)^{-1}\Delta B. \tag{1.17}$$

# %%
A, B, C = spring()
identity, dt = torch.eye(2), 0.25
A_bar = torch.linalg.solve(identity - dt / 2 * A, identity + dt / 2 * A)
B_bar = torch.linalg.solve(identity - dt / 2 * A, dt * B)
check("Ā of equation 1.17 = discretize_bilinear", A_bar, discretize_bilinear(A, B, dt)[0])
check("B̄ of equation 1.17 = discretize_bilinear", B_bar, discretize_bilinear(A, B, dt)[1])

h_0, x_1 = random(2, seed=1), 0.7
h_1 = A_bar @ h_0 + B_bar * x_1
check("it solves equation 1.16", h_1 - h_0, dt / 2 * A @ (h_0 + h_1) + dt * B * x_1)
_ = must_differ("ZOH's Ā in its place", discretize_zoh(A, B, dt)[0], A_bar, at_least=1e-2)

# %% [markdown]
# For a single rate, with $z = \Delta A$, a fraction takes the place of the exponential:
#
# $$e^z \approx \frac{1 + z/2}{1 - z/2} = 1 + z + \frac{z^2}{2} + \frac{z^3}{4} + \dots, \qquad
#   e^z = 1 + z + \frac{z^2}{2} + \frac{z^3}{6} + \dots \tag{1.18}$$
#
# For small $z$ they differ by about $z^3/12$. For large steps the fraction is a poor approximation.
# Decay still decays, since $|1 + z/2| < |1 - z/2|$. But as the step grows, the factor passes
# through 0 at $z = -2$ and then tends to $-1$. So with a large $\Delta$ a bilinear step flips the
# sign of the state, where ZOH resets it.
#
# **Predict 2.** A tank leaks at the rate $a < 0$. At which step does the bilinear rule empty it at
# once? Which step leaves minus half of what was there?


# %% tags=["exercise"]
def two_steps(a):
    """The step Δ that empties the tank, and the one that leaves -1/2 of its content."""
    ### BEGIN SOLUTION
    return -2 / a, -6 / a  # (1 + z/2) / (1 - z/2) is 0 at z = -2 and -1/2 at z = -6
    ### END SOLUTION


# %% tags=["check"]
for a in (-1.0, -0.25, -16.0):
    for step, wanted in zip(two_steps(a), (0.0, -0.5), strict=True):
        left = discretize_bilinear(torch.tensor([[a]]), torch.ones(1), step)[0].item()
        assert abs(left - wanted) < 1e-9, f"a = {a}, step {step}: {left:.3f} is left, not {wanted}"
print("emptied, and turned over")

# %% [markdown]
# Now watch both rules as the step grows:

# %%
small = torch.tensor(-1e-3)
error = (1 + small / 2) / (1 - small / 2) - small.exp()
check("bilinear - exp = z³/12, for a small z", error / (small**3 / 12), torch.tensor(1.0), tol=2e-3)
for size in (1.0, 2.0, 6.0, 60.0):
    fraction = (1 - size / 2) / (1 + size / 2)
    print(f"z = -{size:g}: exponential {math.exp(-size):.3f}, fraction {fraction:+.3f}")

# %% [markdown]
# ## 5 · As printed
#
# ### A step apart (L22, "1D Discrete Recurrent Representation")
#
# > $\mathbf{h}_{k+1} = \bar{\mathbf{A}}\mathbf{h}_k + \bar{\mathbf{B}}x_k, \quad
# > y_k = \bar{\mathbf{C}}\mathbf{h}_k + \bar{\mathbf{D}}x_k$
#
# Here $y_k$ is read *before* $x_k$ is written. In continuous time that is right: $h_k$ is the state
# at time $k\Delta$. A few slides later, the unrolled form starts with $y_0 = \bar C\bar B x_0$,
# which is our convention, one step ahead. Both conventions are common; the slides mix them:

# %%
A, B, C = spring()
A_bar, B_bar = discretize_zoh(A, B, 0.1)
D, x = 0.03, random(40, seed=16)
h, by_slide = torch.zeros(2), []
for x_t in x:
    by_slide.append(C @ h + D * x_t)
    h = A_bar @ h + B_bar * x_t
by_slide = torch.stack(by_slide)

convolved = ssm_convolution(ssm_kernel(A_bar, B_bar, C, 40), x[None])[0]
_ = must_differ("slide's recurrence, slide's convolution", by_slide, convolved, at_least=0.01)
delayed = F.pad(convolved, (1, 0))[:-1]
check("as printed = one step late, plus D x", by_slide, delayed + D * x)
print(f"weight of x_t in y_t: as printed D = {D}, unrolled C B̄ = {(C @ B_bar).item():.4f}")

# %% [markdown]
# In a language model, a token would then see itself only through $\bar D$, bypassing the state.
#
# ### Two rules for what a token writes (OTCE §2.1 against WM Listing 3 and Mamba's code)
#
# > "The most common is the zero-order hold (ZOH) rule, defined as $\bar{A} = \exp(\Delta A)$ and
# > $\bar{B} = (\Delta A)^{-1}(\exp(\Delta A) - I) \cdot \Delta B$." — OTCE §2.1
#
# WM and Mamba's code write $\Delta_t B_t x_t$ instead. That's Euler's rule, next to a
# decay that is exact. For one rate $A$ the two differ by
#
# $$\frac{\Delta}{(e^{\Delta A} - 1)/A} = \frac{z}{e^z - 1}, \qquad z = \Delta A. \tag{1.19}$$

# %%
for step, a, printed in ((0.1, -1.0, "1.051"), (0.69, -1.0, "1.384"), (0.69, -16.0, "11.04")):
    _, B_bar = discretize_zoh(torch.tensor([[a]]), torch.ones(1), step)
    ratio, z = step / B_bar, torch.tensor([step * a])
    check(f"Δ = {step}, A = {a:.0f}: equation 1.19", ratio, z / (torch.exp(z) - 1))
    assert f"{ratio.item():.4g}" == printed
    print(f"   Euler writes {printed} times as much as ZOH")

# %% [markdown]
# A learned $B$ can absorb a constant factor. But where $\Delta$ depends on the token, so does the
# factor: Mamba's write grows with the step size, and ZOH's stops at $-B/A$.
#
# ## Summary
#
# - HiPPO asks for the best polynomial summary of the past and finds that the state can update
#   itself.
# - S4 drops the $1/t$ and gets a squeezed, fading past. Adding a matrix of rank one makes its
#   eigenvectors perpendicular, so that it can be diagonalised safely.
# - The bilinear rule replaces the exponential by a fraction. It resets at one step size only; a
#   larger step overshoots.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
