# %% [markdown]
# # 01 · State space models
#
# **A few numbers that follow an input over time: a tank, a spring, a memory of all that was heard.
# This chapter makes them discrete, fast, and finally selective.** When you are through you can
#
# - turn a linear differential equation into a recurrence, exactly or nearly, and measure the error;
# - compute the same map as a recurrence and as a convolution, and say when to use which;
# - say what the HiPPO matrix remembers, derive its entries, and draw the past that it holds;
# - train a model on sound at 16 kHz and run it at 8 kHz without training it again;
# - show why a model that chooses what to keep has no convolution, and derive the scan that takes
#   its place;
# - build the Mamba layer, and see it learn what its time-invariant twin does not.
#
# Assumes: derivatives, matrix products, eigenvalues, the complex exponential, a little PyTorch.
#
# How to read ✓, ✗ and *As printed*: chapter 00.
#
# Sources: lecture 22 of CMU's *Generative AI* (L22), Gormley and Nayebi (2025); *OTCE: Hybrid SSM
# and Attention with Cross Domain Mixture of Experts to construct
# Observer-Thinker-Conceiver-Expresser* (OTCE), Shi et al. (2024), §2.1; *Wonderful Matrices* (WM),
# §2; Gu et al., *HiPPO* (2020), *S4* (2022) and *S4D* (2022); Gu and Dao, *Mamba* (2023). The code
# that this notebook builds up to is `cheems_ref/state_space.py` and `cheems_ref/mamba.py`.

# %% tags=["setup"]
import json
import math
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.polynomial.legendre import Legendre, leggauss, legval
from torch import einsum

from cheems_ref import plotting
from cheems_ref.convolution import short_convolution
from cheems_ref.mamba import Mamba, selective_scan, selective_scan_parallel
from cheems_ref.state_space import (
    S4D,
    discretize_bilinear,
    discretize_zoh,
    hippo_legs,
    ssm_convolution,
    ssm_kernel,
    ssm_recurrent,
)
from cheems_ref.verify import check, check_gradients, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(values, form=".3f"):
    """A row of numbers, to be printed."""
    return "  ".join(format(float(value), form) for value in values)


def read_record(name):
    """What a longer run of this chapter's own functions has measured (book/records.py)."""
    return json.loads(Path(f"../figures/records/{name}.json").read_text())


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## Why this matters
#
# A model that reads a sequence has to carry what it has read. Three ways, and what they cost for a
# sequence of length $l$:
#
# | | in training | to produce the next token | memory while producing |
# |---|---|---|---|
# | recurrent network | $l$ steps, one after the other | one step | one state |
# | attention | all at once, $l^2$ products | looks at all $l$ tokens | grows with $l$ |
# | state space model | all at once, about $l \log l$ | one step | one state |
#
# The last row is bought with two restrictions: the recurrence is *linear*, and *the same at every
# step*. From §7 on the second restriction falls, and with it the convolution; the first is enough
# for a scan.
#
# ## 1 · Two systems you can picture
#
# **A tank with a hole.** Water runs in from a tap at $x(t)$ litres per second, and out through a
# hole, the faster the more there is. With $h(t)$ litres in the tank,
#
# $$h'(t) = -\tfrac{1}{2}\,h(t) + x(t). \tag{1.1}$$
#
# With the tap closed, the tank loses half of its content per second *at the present rate*, so it
# empties like $e^{-t/2}$. Such a system is called a *leaky integrator*: it adds up its input and
# forgets.
#
# **A weight on a spring.** The spring pulls back with 9 times the place of the weight, friction
# brakes with 0.6 times its speed, and a force $x$ pushes from outside:
#
# $$\text{place}' = \text{speed}, \qquad
#   \text{speed}' = -9\,\text{place} - 0.6\,\text{speed} + x. \tag{1.2}$$
#
# Two numbers now, and each change depends on both. Collect them in a *state* $h = (\text{place},
# \text{speed})$. Then both systems are the same equation:
#
# $$h'(t) = A\,h(t) + B\,x(t), \qquad y(t) = C\,h(t). \tag{1.3}$$
#
# $A$ ($n \times n$) says how the $n$ numbers of the state change by themselves, $B$ ($n$) how the
# input enters, $C$ ($n$) what is read out. One input number, one output number at a time. (L22 adds
# $D\,x(t)$ to the output. It remembers nothing; we leave it out until we need it.)


# %%
def tank():
    """A, B and C of equation 1.1."""
    return torch.tensor([[-0.5]]), torch.tensor([1.0]), torch.tensor([1.0])


def spring():
    """A, B and C of equation 1.2; the state is (place, speed)."""
    A = torch.tensor([[0.0, 1.0], [-9.0, -0.6]])
    B = torch.tensor([0.0, 1.0])  # the force changes the speed
    C = torch.tensor([1.0, 0.0])  # we watch the place
    return A, B, C


# %% [markdown]
# To know what is true, we follow the equation in very small steps, by the rule of Runge and Kutta:
# four looks at the slope per step, slow, but good for any $A$ and any input.


# %%
def integrate(A, B, x, h, start, end, steps=150):
    """Follow h' = A h + B x(t) from start to end, beginning with the state h."""
    step = (end - start) / steps
    for i in range(steps):
        t = start + i * step
        slope_1 = A @ h + B * x(t)
        slope_2 = A @ (h + step / 2 * slope_1) + B * x(t + step / 2)
        slope_3 = A @ (h + step / 2 * slope_2) + B * x(t + step / 2)
        slope_4 = A @ (h + step * slope_3) + B * x(t + step)
        h = h + step / 6 * (slope_1 + 2 * slope_2 + 2 * slope_3 + slope_4)
    return h


# %% [markdown]
# With the tap open from the start, $x = 1$, equation 1.1 is solved by $h(t) = 2\,(1 - e^{-t/2})$:
# its derivative $e^{-t/2}$ is indeed $1 - h/2$.

# %%
A, B, _ = tank()
filled = integrate(A, B, lambda t: 1.0, torch.zeros(1), 0.0, 3.0, steps=1000)
solved = 2 * (1 - torch.exp(torch.tensor([-1.5])))
check("small steps = 2 (1 - exp(-t/2)) at t = 3", filled, solved)
_ = must_differ("the hole forgotten", torch.tensor([3.0]), filled)
print(f"h(3) = {filled.item():.4f} litres of the 3 that came in")

# %% [markdown]
# For the spring we need the *eigenvalues* of $A$. They are a complex pair: the real part is the
# rate of fading, the imaginary part the angle per second. ($\mathtt{i}$ is the imaginary unit, $i$
# an index.)

# %%
A, B, _ = spring()
rates = torch.linalg.eigvals(A)
fading, turning = rates.real[0].item(), rates.imag.abs()[0].item()
print(f"eigenvalues {fading:.3f} ± {turning:.3f} i")

start, period = torch.tensor([1.0, 0.0]), 2 * math.pi / turning
swung = integrate(A, B, lambda t: 0.0, start, 0.0, period, steps=2000)
check("let go, after one period: the same state, smaller", swung, math.exp(fading * period) * start)
half = integrate(A, B, lambda t: 0.0, start, 0.0, period / 2)
_ = must_differ("after half a period", half, swung)
print(f"period {period:.3f}, and then {swung[0].item():.3f} of the swing is left")

# %% [markdown]
# **What such a system can do by itself.** Where $A$ has $n$ different eigenvalues $\lambda_i$,
# every state is a sum of their eigenvectors, and each of these *modes* is multiplied by
# $e^{\lambda_i t}$: it fades (or grows), and turns. So what the layers below remember is a sum of
# *fading tones*; the tank's has the frequency 0. (Where eigenvectors are missing, there is more. A
# body that moves freely, $\text{place}' = \text{speed}$, $\text{speed}' = x$, has the eigenvalue 0
# twice and one eigenvector, and by itself its place goes on like $t$.)
#
# Now both systems under an input: a tap that is open twice, and one short push.


# %%
def follow(system, x, times):
    """The output at each of the times, in small steps, from rest."""
    A, B, C = system
    h, y = torch.zeros(len(B)), [torch.tensor(0.0)]
    for start, end in pairwise(times.tolist()):
        h = integrate(A, B, x, h, start, end, steps=4)
        y.append(C @ h)
    return torch.stack(y)


def tap(t):
    return 1.0 if 1 <= t < 3 or 6 <= t < 7 else 0.0


def push(t):
    return 8.0 if 1 <= t < 1.25 else 0.0


# %%
times = torch.linspace(0, 10, 201)
tap_open = torch.tensor([tap(t) for t in times.tolist()])
pushed = torch.tensor([push(t) / 8 for t in times.tolist()])
content, place = follow(tank(), tap, times), follow(spring(), push, times)

changes, is_open = content.diff()[20:], tap_open[20:-1] == 1  # from t = 1 on
assert (changes[is_open] > 0).all() and (changes[~is_open] < 0).all()

# %%
inside = place[1:-1]
peaks = ((inside > place[:-2]) & (inside > place[2:])).nonzero()[:, 0] + 1
assert (place[peaks].diff() < 0).all() and (times[peaks].diff() - 2.1).abs().max() < 0.06
print(f"most in the tank: {content.max().item():.2f} litres")
print(
    "peaks of the swing at", numbers(times[peaks], ".2f"), "  heights", numbers(place[peaks], ".2f")
)

# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
curves = {"tap x, litres/s": tap_open, "content h, litres": content}
plotting.lines(axes[0], times, curves, title="a tank with a hole", xlabel="seconds")
curves = {"push x / 8": pushed, "place y": place}
plotting.lines(axes[1], times, curves, title="a weight on a spring", xlabel="seconds")
plotting.save(
    fig,
    "01_two_systems",
    "Left: the content of a tank rises while the tap is open, and falls while it is closed. Right: "
    "a weight on a spring is pushed once and swings with a period of about two seconds, each peak "
    "lower than the one before.",
)

# %% [markdown]
# ## 2 · From time to samples: hold the input
#
# Data are not functions of time. They are *samples* $x_0, x_1, x_2, \dots$, a step $\Delta$ apart
# (in code `dt`). (In brackets, as in $x(t)$, $t$ is a time in seconds; as an index, as in $x_t$, it
# is the number of a sample or a token, here and in all other chapters.) What does the input do in
# between? The simplest answer is: nothing. Sample $x_t$ *is held* until the next one comes, so that
# the input is a staircase. This is the *zero-order hold*, ZOH.
#
# Under a constant input the tank's equation can be solved on paper. Take $A = -\frac12$ and $B = 1$
# as plain numbers. The rest point is $-Bx/A$ (where $h' = 0$), and the distance from rest shrinks
# by $e^{\Delta A}$ in a step:
#
# $$h(t + \Delta) = e^{\Delta A}\,h(t) + \frac{e^{\Delta A} - 1}{A}\,B\,x. \tag{1.4}$$
#
# For a matrix nothing changes, if we read $e^{\Delta A}$ as the series $I + \Delta A +
# (\Delta A)^2/2! + \dots$ and division as the inverse:
#
# $$h_t = \bar A\,h_{t-1} + \bar B\,x_t, \qquad \bar A = e^{\Delta A}, \qquad
#   \bar B = A^{-1}(\bar A - I)\,B. \tag{1.5}$$
#
# $h_t$ is the state at the *end* of the step in which $x_t$ was held. (OTCE §2.1 prints $\bar B =
# (\Delta A)^{-1}(e^{\Delta A} - I)\cdot\Delta B$. The two $\Delta$ cancel.)

# %%
A, B, C = spring()
dt = 0.25
A_bar = torch.linalg.matrix_exp(dt * A)
B_bar = torch.linalg.solve(A, (A_bar - torch.eye(2)) @ B)

check("Ā of equation 1.5 = discretize_zoh", A_bar, discretize_zoh(A, B, dt)[0])
check("B̄ of equation 1.5 = discretize_zoh", B_bar, discretize_zoh(A, B, dt)[1])
_ = must_differ("Δ left in B̄", dt * B_bar, B_bar)
print("Ā =", numbers(A_bar[0]), " B̄ =", numbers(B_bar[:1]))
print("   ", numbers(A_bar[1]), "     ", numbers(B_bar[1:]))

# %% [markdown]
# Under the staircase this is exact, for any step, as the next check shows. What ZOH does *not* know
# is what the input did between the samples. Here is a smooth input of which ZOH is told one value
# every 0.8 seconds:


# %%
def smooth(t):
    return 1 + math.sin(1.3 * t)


def follow_held(system, samples, hold, pieces=16):
    """The output under held samples, `pieces` times per sample, in small steps, from rest."""
    A, B, C = system
    h, y = torch.zeros(len(B)), [torch.tensor(0.0)]
    for x_t in samples.tolist():
        for _ in range(pieces):
            h = integrate(A, B, lambda t, x_t=x_t: x_t, h, 0.0, hold / pieces, steps=4)
            y.append(C @ h)
    return torch.stack(y)


# %%
A, B, C = tank()
hold, times = 0.8, torch.linspace(0, 9.6, 193)  # 16 times per sample
samples = torch.tensor([smooth(t * hold) for t in range(12)])
dots = ssm_recurrent(*discretize_zoh(A, B, hold), C, samples[None])[0]
under_smooth, under_held = follow(tank(), smooth, times), follow_held(tank(), samples, hold)
wave = [smooth(t) for t in times.tolist()]
staircase = samples[(times / hold + 1e-9).long().clamp(max=11)]

ends = torch.arange(16, 193, 16)  # where a hold ends
check("the dots of ZOH lie on the curve of the held input", under_held[ends], dots)
_ = must_differ("compared with the smooth input's curve", under_smooth[ends], dots, at_least=0.05)
print(f"off the smooth input's curve by up to {(under_smooth[ends] - dots).abs().max().item():.2f}")

# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
curves = {"smooth": wave, "held": staircase}
plotting.lines(axes[0], times, curves, title="two inputs, same samples", xlabel="seconds")
curves = {"under the smooth input": under_smooth, "under the held input": under_held}
plotting.lines(axes[1], times, curves, title="the tank", xlabel="seconds")
plotting.lines(axes[1], times[ends], {"ZOH": dots}, joined=False, title="the tank")
plotting.save(
    fig,
    "01_held_input",
    "Left: a smooth wave and the staircase that holds its samples. Right: the tank under both. The "
    "dots that ZOH computes lie on the curve of the held input, and beside the curve of the smooth "
    "one.",
)

# %% [markdown]
# **When $A$ has no inverse.** For the free body of §1, equation 1.5 cannot be evaluated: its $A$ is
# singular. The way out: a held input is one more number of the state, one that does not change.
#
# $$\begin{bmatrix} h \\ x \end{bmatrix}' = \begin{bmatrix} A & B \\ 0 & 0 \end{bmatrix}
#   \begin{bmatrix} h \\ x \end{bmatrix} \quad\Longrightarrow\quad
#   \exp\left(\Delta \begin{bmatrix} A & B \\ 0 & 0 \end{bmatrix}\right) =
#   \begin{bmatrix} \bar A & \bar B \\ 0 & 1 \end{bmatrix}. \tag{1.6}$$
#
# One exponential, no division: this is how the package does it.

# %%
A, B = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([0.0, 1.0])
assert torch.linalg.det(A) == 0  # so that equation 1.5 cannot be evaluated
block = torch.tensor([[0.0, 1, 0], [0, 0, 1], [0, 0, 0]])  # A with B beside it, zeros below
whole = torch.linalg.matrix_exp(3.0 * block)
A_bar, B_bar = discretize_zoh(A, B, 3.0)
check("equation 1.6 = discretize_zoh", torch.cat([A_bar, B_bar[:, None]], 1), whole[:2])
check("force 1 for a time of 3: place t²/2, speed t", B_bar, torch.tensor([4.5, 3.0]))
_ = must_differ("Δ B for B̄: place 0", 3.0 * B, B_bar)

# %% [markdown]
# ## 3 · The bilinear rule
#
# ZOH needs a matrix exponential. The first S4 avoided it. Integrate equation 1.3 over one step, and
# take for the mean of $Ah$ the average of its two ends, which is the *trapezoidal rule*. The input
# needs no such guess: it is held, so it gives exactly $\Delta B\,x_t$.
#
# $$h_t - h_{t-1} = \tfrac{\Delta}{2}A\,(h_{t-1} + h_t) + \Delta B\,x_t \tag{1.7}$$
#
# Solve for $h_t$:
#
# $$\bar A = \big(I - \tfrac{\Delta}{2}A\big)^{-1}\big(I + \tfrac{\Delta}{2}A\big), \qquad
#   \bar B = \big(I - \tfrac{\Delta}{2}A\big)^{-1}\Delta B. \tag{1.8}$$

# %%
A, B, C = spring()
identity, dt = torch.eye(2), 0.25
A_bar = torch.linalg.solve(identity - dt / 2 * A, identity + dt / 2 * A)
B_bar = torch.linalg.solve(identity - dt / 2 * A, dt * B)
check("Ā of equation 1.8 = discretize_bilinear", A_bar, discretize_bilinear(A, B, dt)[0])
check("B̄ of equation 1.8 = discretize_bilinear", B_bar, discretize_bilinear(A, B, dt)[1])

h_0, x_1 = random(2, seed=1), 0.7
h_1 = A_bar @ h_0 + B_bar * x_1
check("it solves equation 1.7", h_1 - h_0, dt / 2 * A @ (h_0 + h_1) + dt * B * x_1)
_ = must_differ("ZOH's Ā in its place", discretize_zoh(A, B, dt)[0], A_bar, at_least=1e-2)

# %% [markdown]
# What has happened to the exponential? For a single rate, with $z = \Delta A$, the rule puts a
# fraction in the place of $e^z$, a so-called Padé approximation:
#
# $$e^z \approx \frac{1 + z/2}{1 - z/2} = 1 + z + \frac{z^2}{2} + \frac{z^3}{4} + \dots, \qquad
#   e^z = 1 + z + \frac{z^2}{2} + \frac{z^3}{6} + \dots \tag{1.9}$$
#
# They part at the cube, by $z^3/12$. A still cheaper rule, *Euler's*, stops after $1 + z$. When the
# step is not small:

# %%
z = -torch.arange(61.0) / 10
factors = {"ZOH": z.exp(), "bilinear": (1 + z / 2) / (1 - z / 2), "Euler": 1 + z}
for name, factor in factors.items():
    print(f"{name:>8} at -z = 1, 2, 3, 6:  {numbers(factor[[10, 20, 30, 60]], '+.3f')}")
assert (factors["ZOH"] > 0).all() and (factors["bilinear"].abs() <= 1).all()
assert (factors["Euler"][z < -2.01] < -1).all()

small = torch.tensor(-1e-3)
error = (1 + small / 2) / (1 - small / 2) - small.exp()
check("bilinear - exp = z³/12, for a small z", error / (small**3 / 12), torch.tensor(1.0), tol=2e-3)

# %% tags=["figure"]
fig, ax = plotting.figure(size=(9, 4.2))
plotting.lines(ax, -z, factors, xlabel="rate of decay × step, −z", ylabel="factor per step",
               ylim=(-2.1, 1.3), legend="upper right")  # fmt: skip
plotting.level(ax, 0)
plotting.level(ax, -1, "factors below this line: the state grows")
plotting.save(
    fig,
    "01_factors",
    "The factor by which a decaying state is multiplied in one step, against the rate of decay "
    "times the step. The exponential falls towards zero. The bilinear rule falls through zero to "
    "-0.5 at 6. Euler's rule is a straight line that passes -1 at 2.",
)

# %% [markdown]
# Under the bilinear rule, what decays still decays, at any step: for a negative $z$ the numerator
# is the smaller one in absolute value. (Exercise 2 takes the complex $z$.) Under Euler's rule,
# above a rate times step of 2, a tank that empties becomes an explosion.
#
# **Error against the step.** The input is held, for 0.8 seconds at a time, and each hold is cut
# into smaller and smaller steps.


# %%
def discretize_euler(A, B, dt):
    return torch.eye(len(B)) + dt * A, dt * B


def error_of(rule, system, samples, dt, truth):
    """The distance of the last state to the truth."""
    A, B, _ = system
    A_bar, B_bar = rule(A, B, dt)
    h = torch.zeros(len(B))
    for x_t in samples:
        h = A_bar @ h + B_bar * x_t
    return (h - truth).norm().item()


rules = {"ZOH": discretize_zoh, "bilinear": discretize_bilinear, "Euler": discretize_euler}

# %%
held, hold, cuts = random(5, seed=2), 0.8, (4, 8, 16, 32, 64, 128)
A, B, _ = spring()
truth = torch.zeros(2)
for x_t in held:
    truth = integrate(A, B, lambda t, x_t=x_t: x_t, truth, 0.0, hold, steps=300)

of_held = {
    name: [error_of(rule, spring(), held.repeat_interleave(m), hold / m, truth) for m in cuts]
    for name, rule in rules.items()
}
assert max(of_held["ZOH"]) < 1e-10
print("step           1/5      1/10     1/20     1/40     1/80     1/160")
print("ZOH           below 1e-10 at every step")
for name, smallest in (("bilinear", 4), ("Euler", 2)):
    print(f"{name:12} ", numbers(of_held[name], ".1e"))
    assert abs(of_held[name][-2] / of_held[name][-1] - smallest) < 0.1

# %% [markdown]
# At the small steps, half the step leaves a quarter of the bilinear error (*second order*) and half
# of Euler's (*first order*). ZOH has no error to begin with.
#
# Where the input is not held but smooth, and sampled, every rule has the error of the staircase as
# well.

# %% [markdown]
# ## 4 · One map, two ways to compute it
#
# From here on the input is held, the step is fixed, and $\bar A$, $\bar B$ are given. By hand, with
# one number of state, $\bar A = 0.5$ and $\bar B = C = 1$:

# %%
h, y = 0.0, []
for t, x_t in enumerate((1.0, 2.0, 0.0, 3.0)):
    h = 0.5 * h + x_t
    y.append(h)
    print(f"t = {t}   x = {x_t:.0f}   h = y = {h:.3f}")
assert y == [1.0, 2.5, 1.25, 3.625]

# %% [markdown]
# **Unroll it.** Put the line for $h_{t-1}$ into the line for $h_t$, and go on until $h_{-1} = 0$:
#
# $$y_0 = C\bar B x_0, \quad y_1 = C\bar A\bar B x_0 + C\bar B x_1, \quad
#   y_2 = C\bar A^2\bar B x_0 + C\bar A\bar B x_1 + C\bar B x_2, \;\dots \tag{1.10}$$
#
# A sample of $\delta$ steps ago arrives with the factor $C\bar A^\delta\bar B$, whichever step it
# is now. So the outputs are a *convolution* of the input with one list of numbers, the *kernel*,
# which is the answer to a single 1:
#
# $$y_t = \sum_{\delta=0}^{t} K_\delta\,x_{t-\delta}, \qquad
#   K_\delta = C\,\bar A^\delta\,\bar B. \tag{1.11}$$
#
# (In continuous time the kernel is $K(t) = C e^{tA} B$. Under ZOH $\bar B = \int_0^\Delta e^{\tau
# A} B\,d\tau$, so $K_\delta$ is the integral of $K(t)$ from $\delta\Delta$ to
# $(\delta+1)\Delta$.)
#
# $y_3$ above is $1 \cdot 3 + 0.5 \cdot 0 + 0.25 \cdot 2 + 0.125 \cdot 1$. For the spring:

# %%
l = 60
A, B, C = spring()
A_bar, B_bar = discretize_zoh(A, B, 0.1)
x = random(l, seed=3)
y = ssm_recurrent(A_bar, B_bar, C, x[None])[0]

K = torch.stack([C @ torch.linalg.matrix_power(A_bar, delta) @ B_bar for delta in range(l)])
by_sum = torch.stack([K[: t + 1].flip(0) @ x[: t + 1] for t in range(l)])
check("convolution = recurrence", by_sum, y)
check("ssm_kernel = equation 1.11", ssm_kernel(A_bar, B_bar, C, l), K)
not_turned = torch.stack([K[: t + 1] @ x[: t + 1] for t in range(l)])
_ = must_differ("kernel not turned round", not_turned, y)

# %% [markdown]
# As a matrix, $y = Mx$ with $M_{ts} = K_{t-s}$ and zeros above the diagonal: the same number all
# along a diagonal (a *Toeplitz* matrix). Chapter 03 starts from such a matrix.

# %%
delta = torch.arange(l)[:, None] - torch.arange(l)  # (target t, source s): t - s
M = torch.where(delta >= 0, K[delta.clamp(min=0)], 0.0)
check("y = M x", M @ x, y)
_ = must_differ("y = Mᵀ x", M.T @ x, y)
peaks = K.unfold(0, 21, 21).abs().amax(1)  # over one period after the other
assert (peaks.diff() < 0).all()
print("largest |K| in each period of 21 steps:", numbers(peaks))

# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.6))
plotting.lines(axes[0], range(l), {"_K": K}, joined=False, xlabel="steps δ since the sample",
               title="the kernel $K_δ$ of the spring")  # fmt: skip
plotting.level(axes[0], 0)
plotting.heatmap(axes[1], M, title="as a matrix: $M_{ts} = K_{t-s}$", xlabel="sample s",
                 ylabel="output t")  # fmt: skip
plotting.save(
    fig,
    "01_kernel",
    "Left: the kernel of the spring, a wave that fades over 60 steps. Right: the lower triangular "
    "matrix that has it in every column, starting at the diagonal: stripes parallel to the "
    "diagonal.",
)

# %% [markdown]
# What is gained? In the recurrence each step waits for the one before. In the sum no term waits,
# but there are $l(l+1)/2$ of them. The *fast Fourier transform* (FFT) needs about $l \log_2 l$
# products. Read the sequences as the coefficients of two polynomials; a convolution is the product
# of the polynomials; and where both are known by their *values*, those are multiplied one by one.
# The FFT goes from coefficients to values, at points on the unit circle, and back. Three transforms
# of twice the length: for $l$ = 65,536 that is 6.7 million products instead of 2.1 billion terms.
#
# Why twice? The points are the `size` roots of 1, so what would come after the last coefficient
# comes round to the first, like hours after twelve. With `size` $= 2l$, half of it zeros, there is
# room:


# %%
def by_fft(K, x, size):
    product = torch.fft.rfft(K, size) * torch.fft.rfft(x, size)
    return torch.fft.irfft(product, size)[: len(x)]


check("FFT of size 2 l = recurrence", by_fft(K, x, 2 * l), y)
check("ssm_convolution = recurrence", ssm_convolution(K, x[None])[0], y)
wrapped = by_fft(K, x, l)
_ = must_differ("FFT of size l: the end wraps round", wrapped, y, at_least=0.01)

# %% [markdown]
# So one map has two forms. *In training*, all inputs are known: convolve. *In use*, the next input
# depends on the last output: step the recurrence, which costs the same at the millionth sample as
# at the first.

# %% [markdown]
# ## 5 · A memory worth having
#
# Which $A$? Drawn at random, normal numbers divided by $\sqrt n$, it explodes:

# %%
for seed in range(3):
    A = random(8, 8, seed=seed) / math.sqrt(8)
    largest = torch.linalg.eigvals(A).real.max().item()
    growth = math.exp(20 * largest)
    print(f"seed {seed}: largest real part {largest:+.2f}, growth by t = 20: {growth:.0e}")
    assert growth > 1e5

# %% [markdown]
# *HiPPO* (*high-order polynomial projection operators*, Gu et al., 2020) begins with the wish, and
# finds $A$ afterwards: at every time $t$, the $n$ numbers of the state shall be the best summary of
# the whole input so far. *Summary*: the coefficients of a polynomial of degree below $n$. *Best*:
# the one that is closest to the input, in the mean square.
#
# Stretch the past over $[0, 1]$: 0 is the beginning, 1 is now. Let $P_0, P_1, P_2, \dots$ be the
# *Legendre polynomials* there, $P_i$ of degree $i$, scaled so that the mean of $P_i P_j$ over $[0,
# 1]$ is 1 for $i = j$ and 0 otherwise. (Those of the tables end in $P_i(1) = 1$; ours, which are
# scaled, in $\sqrt{2i+1}$, as a cell below checks.) In such a basis the best coefficients are plain
# averages:
#
# $$h_i(t) = \frac1t \int_0^t x(s)\; P_i(s/t)\; ds. \tag{1.12}$$

# %%
n = 8
P = [math.sqrt(2 * i + 1) * Legendre.basis(i, domain=[0, 1]) for i in range(n)]
nodes, weights = leggauss(n)  # Gauss's rule: exact for polynomials of degree below 2n
xi, w = torch.tensor((nodes + 1) / 2), torch.tensor(weights / 2)


def at(functions, points):
    """The values of each function at the points: (functions, points)."""
    return torch.tensor(np.stack([f(np.asarray(points)) for f in functions]))


values = at(P, xi)
check("means of products P_i P_j", (values * w) @ values.T, torch.eye(n))
of_tables = values / torch.arange(1, 2 * n, 2).sqrt()[:, None]
_ = must_differ(
    "with the polynomials of the tables, which end in 1",
    (of_tables * w) @ of_tables.T,
    torch.eye(n),
)

# %% [markdown]
# **The equation.** When time goes on, how do the averages change? Differentiate equation 1.12. The
# factor $1/t$ gives $-h_i/t$. The upper end of the integral gives $x(t)\,P_i(1)/t$: the newest
# input comes in. And every old sample, at $s/t$, moves towards 0, by the chain rule
#
# $$\frac{\partial}{\partial t}\,P_i(s/t) = -\frac{s}{t^2}\,P_i'(s/t) = -\frac1t\;\xi\,P_i'(\xi),
#   \qquad \xi = s/t.$$
#
# Now $\xi\,P_i'(\xi)$ is a polynomial of degree $i$ again, so it is a sum $\sum_{j \le i}
# G_{ij}\,P_j(\xi)$, and its mean with $x$ is $\sum_j G_{ij}\,h_j$. Together:
#
# $$h'(t) = \frac1t\,\big(A\,h(t) + B\,x(t)\big), \qquad A = -(I + G), \qquad B_i = P_i(1).
#   \tag{1.13}$$

# %%
slopes = at([P_i.deriv() for P_i in P], xi) * xi  # xi P_i'(xi)
G = (slopes * w) @ values.T  # the mean of xi P_i'(xi) P_j(xi)
A, B = hippo_legs(n)
check("A = -(I + G): the HiPPO matrix", A, -(torch.eye(n) + G))
check("B = P_i(1)", B, at(P, [1.0])[:, 0])
_ = must_differ("the stretching forgotten", -torch.eye(n), A)

# %% [markdown]
# **Its entries** come from integrating by parts. $G_{ij}$ is the mean of $P_i'(\xi) \cdot \xi
# P_j(\xi)$, and
#
# $$G_{ij} = \int_0^1 P_i' \cdot \xi P_j\,d\xi
#   = P_i(1)\,P_j(1) - \int_0^1 P_i \cdot (P_j + \xi P_j')\,d\xi.$$
#
# *Below the diagonal*, $j < i$: the bracket has a degree below $i$, and $P_i$ is orthogonal to all
# of those. What remains is $P_i(1)P_j(1) = \sqrt{(2i+1)(2j+1)}$. *On it*, $j = i$: the first term
# of the bracket gives 1, the second $G_{ii}$ itself. So $G_{ii} = (2i+1) - 1 - G_{ii}$, which is
# $G_{ii} = i$. *Above it*, $j > i$, $G_{ij} = 0$: $\xi P_i'$ has the degree $i$. Hence $A$ has
# $-\sqrt{(2i+1)(2j+1)}$ below the diagonal, $-(i+1)$ on it, and zeros above.

# %%
i = torch.arange(1.0 * n)
roots = (2 * i + 1).sqrt()
by_parts = torch.outer(roots, roots).tril(-1) + torch.diag(i)
check("entries by integration by parts = G", by_parts, G)
_ = must_differ("the second integral dropped on the diagonal", by_parts + torch.diag(i), G)
for row in A[:3, :3]:
    print(numbers(row + 0.0, "7.3f"))  # + 0.0 turns -0 into 0

# %% [markdown]
# For samples, hold the input again, one unit of time each. Take $\tau = \log t$ for the clock:
# $dh/d\tau = t\,h'$, the $1/t$ disappears, and the equation is the plain 1.3. While sample $t$ is
# held, from time $t$ to $t + 1$, that clock advances by $\log\frac{t+1}{t}$. So ZOH is exact here
# too. For the first sample this step is infinite, and still harmless: all eigenvalues of $A$ (its
# diagonal) are negative, so $e^{\infty A} = 0$ and $\bar B = -A^{-1}B = (1, 0, \dots, 0)$. A
# constant has its mean, and nothing else. (And another unit of time only moves the clock: the same
# input at a third of the speed leaves the same states, three times as late.)


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
check("the first step: B̄ = (1, 0, ..., 0)", torch.linalg.solve(A, -B), torch.eye(n)[0])
length = 240
edges = torch.arange(length + 1) / length
signal = torch.sin(2 * math.pi * 3 * edges[1:] ** 2) + (edges[1:] > 0.62)  # a sweep and a jump
memory = legs_memory(signal, 64)  # (length, 64)

# The truth: each P_i integrated over the piece of the past that a sample covers.
pieces = at([P_i.integ() for P_i in P], edges).diff(dim=1)  # (n, length)
check("legs_memory = averages of the past", memory[-1, :n], pieces @ signal)
_ = must_differ("one sample less", pieces[:, 1:] @ signal[:-1], memory[-1, :n])

# %% [markdown]
# What does it remember? Reconstruct a signal with a jump from 8 and from 64 numbers, as $\sum_i h_i
# P_i(s/t)$, at three times. The past is never cut off; but as more of it has to fit into 8 numbers,
# its first third becomes coarser from one time to the next. Of the last third, which swings
# fastest, they know next to nothing in the end: its plain mean would be closer.


# %%
def legs_reconstruct(coefficients, past):
    """The polynomial with these averages, at the fractions `past` of the time so far."""
    scaled = coefficients * (2 * torch.arange(len(coefficients)) + 1).sqrt()
    return torch.from_numpy(legval(2 * past.numpy() - 1, scaled.numpy()))


def rms_error(memory, signal, size, now):
    """Root mean square error at the time `now`, for every 80 samples so far, at their middles."""
    middles = (torch.arange(now) + 0.5) / now
    gap = legs_reconstruct(memory[now - 1, :size], middles) - signal[:now]
    return gap.view(-1, 80).square().mean(1).sqrt()


# %%
print("root mean square error   by thirds of the signal, as far as they are past")
errors = {
    size: [rms_error(memory, signal, size, now) for now in (80, 160, 240)] for size in (8, 64)
}
for size, at_times in errors.items():
    for now, by_thirds in zip((80, 160, 240), at_times, strict=True):
        print(f"{size:2} numbers, t = {now:3}      {numbers(by_thirds, '.2f')}")
deviation = signal.view(3, 80).std(1, correction=0)
print("off each third's mean   ", numbers(deviation, ".2f"))

# %%
first_third = torch.stack([by_thirds[0] for by_thirds in errors[8]])
eight, many = errors[8][-1], errors[64][-1]  # at t = 240
assert (first_third.diff() > 0).all() and eight[2] > deviation[2]
assert max(errors[8][0], errors[64][0]) < 0.01 and (many < 0.1).all()
assert torch.allclose(eight, torch.tensor([0.26, 0.66, 0.69]), atol=0.005)


# %% tags=["figure"]
def draw_memory(ax, signal, memory, now):
    """The signal, and what 8 and 64 numbers know of it at the time `now`."""
    past = torch.linspace(0, 1, 241)
    plotting.lines(ax, torch.arange(1, 241), {"signal": signal}, legend=None)
    held = {f"{n} numbers": legs_reconstruct(memory[now - 1, :n], past) for n in (64, 8)}
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
    "01_hippo",
    "A signal that swings faster and faster and has a jump, and its reconstruction at three times, "
    "each from the beginning up to a line that marks now. At t = 80 all three curves coincide. At "
    "t = 240 that of 64 numbers is within 0.1 of the signal in each third (root mean square); that "
    "of 8 numbers is 0.26 off in the slow first third, and 0.66 and 0.69 in the others.",
)

# %% [markdown]
# **S4 leaves out the $1/t$.** S4 (*structured state space sequence model*) takes HiPPO's $A$ and
# $B$ in the plain equation $h' = Ah + Bx$, with a fixed step. What is remembered then? On the clock
# $\tau = \log t$ the equation was that plain one already, so read equation 1.12 on this clock. An
# input that came at $s$ has the *age* $a = \log t - \log s$. So $s = t\,e^{-a}$, $ds =
# -t\,e^{-a}\,da$, and
#
# $$h_i = \int_0^t x\,P_i(s/t)\,\frac{ds}{t} = \int_0^\infty x\,P_i(e^{-a})\,e^{-a}\,da,
#   \qquad\text{so}\qquad \big(e^{aA} B\big)_i = P_i(e^{-a})\,e^{-a}. \tag{1.14}$$
#
# The same polynomials, on a past that is squeezed: the last moment in detail, what is long gone
# crowded together near 0, and fading.

# %%
ages, points = torch.linspace(0, 6, 121), torch.linspace(0, 1, 121)
kernels = torch.stack([torch.linalg.matrix_exp(age * A) @ B for age in ages.tolist()], dim=1)
squeezed = at(P, torch.exp(-ages)) * torch.exp(-ages)  # both (n, ages)
check("kernels of HiPPO's A = squeezed polynomials", kernels, squeezed)
_ = must_differ("the second factor forgotten", at(P, torch.exp(-ages)), kernels)
ends = at(P, [0.0, 1.0]).abs()
assert torch.allclose(ends[:, 0], ends[:, 1])  # the beginning weighs as much as the end
print("weights at age 0:", numbers(kernels[:4, 0]), "  at age 6:", numbers(kernels[:4, -1], ".4f"))

# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
left = {f"i = {i}": at(P, points)[i] for i in range(4)}
plotting.lines(axes[0], 1 - points, left, xlabel="age, as a share of the time so far",
               ylabel="weight", title="HiPPO: all of the past", ylim=(-2.9, 5.4),
               legend="upper right")  # fmt: skip
right = {f"i = {i}": kernels[i] for i in range(4)}
plotting.lines(axes[1], ages, right, xlabel="age, in units of time", title="S4: no 1/t, it fades")
plotting.save(
    fig,
    "01_hippo_kernels",
    "Left: the first four Legendre polynomials over the age as a share of the time so far; at the "
    "beginning they are as large as at the end. Right: the same polynomials squeezed onto ages "
    "from 0 to 6, and fading.",
)

# %% [markdown]
# **A diagonal $A$.** A full $A$ is expensive: $n^2$ products per step, and matrix powers for the
# kernel. If $A = V \Lambda V^{-1}$ with a diagonal $\Lambda$, the change of coordinates can go into
# $B$ and $C$, and each entry of the state lives for itself, as one fading tone. HiPPO's $A$ has $n$
# different eigenvalues, so on paper this can be done; but its $V$ is so skew that digits are lost,
# as many as its condition number has. S4's trick: add a matrix of *rank one*, $\frac12 BB^\top$,
# with the entries $\frac12 \sqrt{(2i+1)(2j+1)}$.
#
# $$\big(A + \tfrac12 BB^\top\big)_{ij} = \tfrac12\sqrt{(2i+1)(2j+1)} \cdot
#   \begin{cases} -1 & j < i \\ +1 & j > i \end{cases}, \qquad
#   \big(A + \tfrac12 BB^\top\big)_{ii} = -(i+1) + \tfrac{2i+1}{2} = -\tfrac12.$$
#
# That is $-\frac12 I$ plus an antisymmetric matrix, whose eigenvectors are perpendicular and whose
# eigenvalues are imaginary:

# %%
for size in (8, 12, 16):
    A, B = hippo_legs(size)
    skew = torch.linalg.cond(torch.linalg.eig(A).eigenvectors).item()
    rates, vectors = torch.linalg.eig(A + torch.outer(B, B) / 2)
    check(f"n = {size:2}: all rates have the real part -1/2", rates.real, torch.full((size,), -0.5))
    now = torch.linalg.cond(vectors).item()
    assert now < 1.001 < 1e4 < skew
    print(f"   condition number of V: 10^{math.log10(skew):.1f} before, {now:.3f} now")
_ = must_differ("rank-one part forgotten", torch.linalg.eigvals(A).real, rates.real)

# %% [markdown]
# S4 carries the rank-one part along with some effort. *S4D* drops it and keeps the diagonal. That
# is another memory than HiPPO's, and still one of fading tones (its authors report results close to
# S4's). There are $n/2$ complex rates $\lambda_i = -\frac12 + \mathtt{i}\,\omega_i$, each counted
# together with its conjugate, so that the output is real. Which frequencies? Those of the matrix
# above (`init="legs"` in the package, for scaled Legendre), or
# simply $\omega_i = \pi i$, whole and half turns per unit of time ("lin", which is what the package
# takes unless told, and what follows uses). "lin" begins with $\omega_0 = 0$: no tone, but a plain
# leak.
#
# With $B = 1$, everything becomes a
# formula for one number, applied to each:
#
# $$\bar A_i = e^{\Delta\lambda_i}, \qquad
#   \bar B_i = \frac{e^{\Delta\lambda_i} - 1}{\lambda_i}, \qquad
#   K_\delta = 2\,\mathrm{Re} \sum_i C_i\,\bar B_i\,\bar A_i^{\,\delta}. \tag{1.15}$$
#
# `S4D` is a layer of $d$ such models, one for each of the $d$ numbers of a token (a *channel*),
# each with its own step $\Delta$, its own rates and its own $C$, and with a weight $D$ for a direct
# path from $x$ to $y$. All of these are learned. (The package keeps $\log(-\mathrm{Re}\,\lambda)$
# as `A_log`, so that every tone fades, $\mathrm{Im}\,\lambda$ as `A_imag`, $\log\Delta$ as
# `log_dt`, and $C$ as its two parts.)
#
# > "We can take H copies of the 1D recurrent representation" — L22, "SSM as a Neural Network Layer"
# (its $H$ is our $d$)

# %%
_ = torch.manual_seed(0)
layer = S4D(3, d_state=8).requires_grad_(False)  # three channels, four rates each
rates = torch.complex(-layer.A_log.exp(), layer.A_imag)  # (d, n/2)
check("lin: ω_i = π i", layer.A_imag, math.pi * torch.arange(4.0).expand(3, 4))
z = layer.log_dt.exp()[:, None] * rates
C, B_bar = torch.view_as_complex(layer.C), (z.exp() - 1) / rates
delta = torch.arange(50)[:, None, None]
K = 2 * (C * B_bar * z.exp() ** delta).sum(-1).real.T  # (50, d, n/2) -> (d, 50)
check("equation 1.15 = the kernel of S4D", layer.kernel(50), K)
_ = must_differ("the conjugates forgotten", K / 2, K)

# %% [markdown]
# ## 6 · Train as a convolution, run as a recurrence, at any rate
#
# The layer has both forms: `layer(x)` convolves, `layer.step(x_t, state)` takes one sample. The
# state is $d \cdot n/2$ complex numbers, whatever the length:

# %%
_ = torch.manual_seed(0)
layer = S4D(3, d_state=8).requires_grad_(False)
x = random(2, 40, 3, seed=4)  # (b, l, d)
state, outputs = layer.initial_state(2), []
for x_t in x.unbind(1):
    y_t, state = layer.step(x_t, state)
    outputs.append(y_t)
check("40 steps of the recurrence = one convolution", torch.stack(outputs, 1), layer(x))
_ = must_differ("D forgotten", torch.stack(outputs, 1) - layer.D * x, layer(x))
print("state after 40 samples:", tuple(state.shape), "complex numbers")

# %% [markdown]
# Here is what the differential equation is good for. $A$ is a rate *per unit of time*, and only
# $\Delta$ knows how far apart the samples are. If they come half as often, double $\Delta$:
#
# > "As well, they elegantly transition between different granularities of representation for the
# > input (e.g. sound at 16KHz vs. 8KHz)" — L22, "Motivation"
#
# How good is that? One step of $2\Delta$ with an input is two steps of $\Delta$ with the same input
# twice. So the kernel at the double step is, exactly, the sum of neighbours in the old one:
#
# $$K_\delta(2\Delta) = K_{2\delta}(\Delta) + K_{2\delta+1}(\Delta). \tag{1.16}$$
#
# (The package's argument `rate` multiplies $\Delta$: `rate=2` is *half* the sampling rate.)

# %%
fine = layer.kernel(80)
check("equation 1.16", layer.kernel(40, rate=2), fine[:, ::2] + fine[:, 1::2])
_ = must_differ("every second entry of the kernel", fine[:, ::2], layer.kernel(40, rate=2))

# %% [markdown]
# What is left is the difference between a signal and its staircase: no more than its slope times
# the distance of the samples.
#
# **Now with learning.** The task: name the pitch of a short damped tone in noise. Eight pitches,
# from 250 Hz upwards, four to the octave; each signal lasts 32 milliseconds, begins at a random
# moment, and fades at a random rate. The model sees only samples at 16 kHz: 512 per signal. *The
# data:*


# %%
def tones(count, generator, khz=16.0, noise=0.3):
    """Damped tones of 8 pitches in noise, 32 ms at so many kHz: waves (count, l), pitches."""
    pitch = torch.randint(8, (count, 1), generator=generator)
    phase, begin, fade = torch.rand(3, count, 1, generator=generator)
    t = torch.arange(int(32 * khz)) / khz - 8 * begin  # milliseconds since the tone began
    wave = torch.sin(2 * math.pi * (0.25 * 2 ** (pitch / 4) * t + phase))
    wave = wave * torch.exp(-t.clamp(min=0) / (4 + 8 * fade)) * (t >= 0)
    wave = wave + noise * torch.randn(wave.shape, generator=generator)
    return wave.float(), pitch[:, 0]


# %% [markdown]
# *The model:* a filter bank that is learned, and then a nonlinear measure of how strongly each
# filter answers. GELU is a smooth $\max(x, 0)$: $x$ times the probability that a standard normal
# number is below $x$.


# %%
class ToneListener(torch.nn.Module):
    """How strongly does each channel of an S4D layer answer? Waves (b, l) -> logits (b, 8)."""

    def __init__(self, d=24):
        super().__init__()
        self.encoder = torch.nn.Linear(1, d)
        self.s4d = S4D(d, d_state=16)
        self.decoder = torch.nn.Linear(d, 8)

    def forward(self, wave, rate=1.0):
        y = self.s4d(self.encoder(wave[..., None]), rate=rate)
        return self.decoder(F.gelu(y).mean(1))  # a mean: about the same from half the samples


# %% [markdown]
# *The training:* 200 steps of 24 tones each.


# %%
def train_on_tones(steps=200, seed=0):
    """A listener trained at 16 kHz, and the generator for more tones."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = ToneListener().float()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        waves, pitches = tones(24, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(waves), pitches).backward()
        optimizer.step()
        schedule.step()
    return model, generator


# %% [markdown]
# *The result* is a table of which pitch was named as which:


# %%
def named_as(model, waves, pitches, rate):
    """How often each pitch is named as each: (8, 8), rows sum to 1."""
    with torch.no_grad():
        named = model(waves, rate).argmax(-1)
    table = torch.zeros(8, 8).index_put((pitches, named), torch.tensor(1.0), accumulate=True)
    return table / table.sum(1, keepdim=True)


def share_right(table):
    return table.diagonal().mean().item()


# %%
listener, generator = train_on_tones()
half = tones(400, generator, khz=8.0)
at_16 = named_as(listener, *tones(400, generator), rate=1)
at_8, untold = (named_as(listener, *half, rate=rate) for rate in (2, 1))
assert share_right(at_16) > 0.95 and share_right(at_8) > 0.9 and share_right(untold) < 0.25
print("trained at 16 kHz.  16 kHz: over 95 % right.  8 kHz with rate=2: over 90 %, no training.")
print("8 kHz, and nobody tells the model: under 25 % right (chance: 12.5 %)")

# %% [markdown]
# The last case can be predicted: with half as many samples per swing, each tone sounds an *octave*
# higher to a model that counts samples, four pitches too high, which the upper four cannot be. Five
# models (`python book/records.py 01_sampling_rate`, with these very functions), medians of the
# shares named right:

# %%
listening = read_record("01_sampling_rate")
right = listening["right"]
print("kHz      ", numbers(listening["khz"], "5.1f"))
print("told     ", numbers(right["told"], "5.2f"))
print("not told ", numbers(right["not told"], "5.2f"))
assert min(right["told"]) > 0.95
assert [r > 0.85 for r in right["not told"]] == [15 <= khz <= 17 for khz in listening["khz"]]

# %% [markdown]
# Not told, it does worse than guessing at several rates: whoever hears every tone moved by the same
# interval names nearly all of them wrong. At 8 kHz, the median of the five models:

# %%
told, not_told = (torch.tensor(table) for table in listening["at 8 kHz"].values())
octave_up = not_told[:4].diagonal(4)  # pitch i named as pitch i + 4
highest = not_told[4:, 6] + not_told[4:, 7]
print("told:", numbers(told.diagonal()))
print("not told, an octave up:", numbers(octave_up), "  upper four, as the highest two:",
      numbers(highest))  # fmt: skip
assert told.diagonal().min() > 0.98 and octave_up.min() > 0.7 and highest.min() > 0.99
assert min(right["not told"]) < 0.02

# %% tags=["figure"]
fig, axes = plotting.heatmaps(
    {"8 kHz, told (rate = 2)": told, "8 kHz, not told": not_told},
    xlabel="named as, in Hz", ylabel="pitch in Hz", signed=False, limit=1.0, unit="share",
)  # fmt: skip
for ax in axes:
    ax.set_xticks(range(8), listening["hertz"], rotation=90)
    ax.set_yticks(range(8), listening["hertz"])
plotting.save(
    fig,
    "01_octave",
    "Two tables of pitch against named pitch at 8 kHz, for a model trained at 16 kHz. With the "
    "rate given, over 98 percent on the diagonal in each row. Without it, most of the lower four "
    "lie four places to the right of the diagonal, an octave too high, and the upper four are "
    "named as one of the two highest.",
)

# %% [markdown]
# For S4 on spoken words, L22 shows 98.32 % at 16 kHz and 96.30 % at 8 kHz ("S4 Results: Train and
# test on different input granularities"). Our 0.96 at 4 kHz is not all a price of coarse sampling:
# the noise is drawn per *sample*, so there is four times as much of it per hertz as at 16 kHz. With
# half the strength, the same per hertz:

# %%
quiet = tones(400, generator, khz=4.0, noise=0.15)
assert share_right(named_as(listener, *quiet, rate=4)) > 0.98
print("4 kHz, told, noise as at 16 kHz per hertz: over 98 % right")

# %% [markdown]
# ## 7 · What a fixed kernel cannot do
#
# So far, what a sample does to a later output depends on nothing but the distance. "Keep the name,
# skip the filler" treats two tokens differently *because of what they are*. (From here on a sample
# is called a *token*, and a sequence of tokens a *text*, whatever they stand for.)
#
# Here is such a task in its plainest form. Every token has two numbers, value and mark, and the
# output shall be *the last value that was marked*. A state that can do it needs to keep and to
# replace. The knob for that is the step size: with $\Delta_t = 0$ no time passes for the state, so
# it keeps; with a very large $\Delta_t$ everything old fades, so it is replaced. So let the *token*
# turn the knob. That is *selection*:
#
# $$h_t = e^{\Delta_t A}\,h_{t-1} + \Delta_t B_t\,x_t, \qquad y_t = C_t\,h_t, \qquad
#   \Delta_t, B_t, C_t \text{ functions of the token at } t. \tag{1.17}$$
#
# ($\Delta_t B_t$ is what ZOH's $\bar B$ is for small steps. §10 says how far that goes.)


# %%
def keep_last_marked(tokens):
    """(b, l, 2) -> (b, l): a selective model by hand, one channel, one number of state."""
    value, mark = tokens.unbind(-1)
    dt = 40 * mark  # the knob: 0 keeps; 40 replaces, as exp(-40) is nothing
    ones = torch.ones_like(value)[..., None]  # B = 1/40 undoes the factor dt of the write
    y = selective_scan(value[..., None], dt[..., None], -torch.ones(1, 1), ones / 40, ones)
    return y[..., 0]


def leaky(tokens):
    """A time-invariant counterpart: values are poured into a tank; 15 % runs out every step."""
    ones = torch.ones(1)
    return ssm_recurrent(0.85 * torch.ones(1, 1), ones, ones, tokens[..., 0])


# %%
value, mark = random(1, 12, seed=5), torch.zeros(1, 12)
mark[0, [2, 5, 9]] = 1
tokens = torch.stack([value, mark], -1)
last = torch.tensor([0] * 2 + [value[0, 2]] * 3 + [value[0, 5]] * 4 + [value[0, 9]] * 3)
check("the last marked value, by selection", keep_last_marked(tokens)[0], last)
_ = must_differ("by a tank", leaky(tokens)[0], last)
for name, row in (("values", value), ("marks", mark), ("kept", keep_last_marked(tokens))):
    print(f"{name:7}", numbers(row[0], "5.2f"))

# %% [markdown]
# **No sum.** The convolution rests on a law, called *superposition*: the answer to a sum of inputs
# is the sum of the answers. The selective model breaks it, on purpose: a second marked value does
# not *add* to the first, it *replaces* it.

# %%
first, second = torch.zeros(2, 1, 12, 2)
first[0, 2] = torch.tensor([1.0, 1.0])  # value 1, marked, at token 2
second[0, 7] = torch.tensor([0.6, 1.0])  # value 0.6, marked, at token 7
both = first + second
check("tank: answer to the sum = sum of the answers", leaky(both), leaky(first) + leaky(second))
total = keep_last_marked(first) + keep_last_marked(second)
_ = must_differ(
    "selective: answer to the sum = sum of the answers", total, keep_last_marked(both), at_least=0.5
)
print("at token 7, sum of the answers:", numbers(total[0, 7:8], ".2f"),
      " answer to the sum:", numbers(keep_last_marked(both)[0, 7:8], ".2f"))  # fmt: skip


# %% tags=["figure"]
def draw_sum(ax, model, first, second, title):
    """The answers to two texts, their sum, and the answer to the two in one text."""
    one, two, both = (model(text)[0] for text in (first, second, first + second))
    curves = {"1 at token 2": one, "0.6 at token 7": two, "sum of the two answers": one + two}
    plotting.lines(ax, range(12), curves, xlabel="token", title=title, ylim=(-0.08, 2.7))
    ax.plot(both, "o", color=plotting.INK, label="both in one text")
    ax.legend(loc="upper left", fontsize=12)


# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
draw_sum(axes[0], leaky, first, second, "time-invariant: a tank")
draw_sum(axes[1], keep_last_marked, first, second, "selective: keep the last marked")
plotting.save(
    fig,
    "01_no_sum",
    "Answers to a 1 at token 2, to a 0.6 at token 7, their sum, and as dots the answer to both "
    "together. For the tank the dots lie on the sum. For the selective model the sum climbs to 1.6 "
    "at token 7, and the dots drop to 0.6.",
)

# %% [markdown]
# **No kernel.** For a *given* text the marks are given numbers, and equation 1.17 is linear in the
# values: $y = Mx$. In the time-invariant model this matrix has one number per diagonal. In the
# selective one $M_{ts}$ depends on the marks *from* $s$ *to* $t$, both included: it is 1 where $s$
# is the last marked token up to $t$, and 0 elsewhere.


# %%
def matrix_of(model, mark):
    """M of y = M x for given marks: one column per token."""
    columns = torch.eye(len(mark))
    return model(torch.stack([columns, mark.expand(len(mark), -1)], -1)).T


def is_toeplitz(M):
    """Whether M has one number per diagonal."""
    return all((d := M.diagonal(-i)).max() - d.min() < 1e-12 for i in range(len(M)))


# %%
other = torch.zeros(12)
other[[1, 4, 6, 10]] = 1
matrices = {
    "tank: any text": matrix_of(leaky, other),
    "selective: marks at 2, 5, 9": matrix_of(keep_last_marked, mark[0]),
    "selective: at 1, 4, 6, 10": matrix_of(keep_last_marked, other),
}
check("M x = what the model answers", matrices["selective: marks at 2, 5, 9"] @ value[0], last)
_ = must_differ("the other text's M", matrices["selective: at 1, 4, 6, 10"] @ value[0], last)

# %% [markdown]
# Of all $2^{12}$ ways to mark twelve tokens two give a matrix with one number per diagonal: no mark
# ($M = 0$) and every mark ($M = I$).

# %%
patterns = torch.tensor(list(product((0.0, 1.0), repeat=12)))
toeplitz = [pattern for pattern in patterns if is_toeplitz(matrix_of(keep_last_marked, pattern))]
assert is_toeplitz(matrices["tank: any text"])
assert [pattern.sum().item() for pattern in toeplitz] == [0, 12]
print(f"one number per diagonal: {len(toeplitz)} of {len(patterns):,} patterns of marks")

# %% tags=["figure"]
fig, axes = plotting.heatmaps(
    matrices, xlabel="token s", ylabel="output t", signed=False, limit=1.0
)
plotting.save(
    fig,
    "01_no_kernel",
    "Three lower triangular matrices. The tank's fades evenly away from the diagonal, the same "
    "along each diagonal. The selective model's has a bar below each marked token that ends where "
    "the next marked token begins; other marks, other bars.",
)

# %% [markdown]
# **The knob is a gate.** In Mamba, $\Delta_t = \mathrm{softplus}(\zeta_t)$, with $\zeta_t$ linear
# in the token and $\mathrm{softplus}(\zeta) = \log(1 + e^\zeta)$, which keeps it positive. For $A =
# -1$ and $B = 1$, ZOH then gives the gate of gated recurrent networks (Mamba, theorem 1), with the
# sigmoid $\sigma(\zeta) = 1/(1 + e^{-\zeta})$:
#
# $$h_t = \big(1 - \sigma(\zeta_t)\big)\,h_{t-1} + \sigma(\zeta_t)\,x_t. \tag{1.18}$$

# %%
for zeta in (-4.0, 0.0, 3.0):
    step = F.softplus(torch.tensor(zeta)).item()
    A_bar, B_bar = discretize_zoh(-torch.ones(1, 1), torch.ones(1), step)
    gate = torch.sigmoid(torch.tensor([zeta]))
    check(f"ζ = {zeta:+.0f}: Ā = 1 - σ(ζ)", A_bar[0], 1 - gate)
    check(f"ζ = {zeta:+.0f}: B̄ = σ(ζ)", B_bar, gate)
    print(f"   Δ = {step:.3f}, gate {gate.item():.3f}")
_ = must_differ("Euler's write", torch.tensor([step]), gate)


# %% [markdown]
# Mamba's selective model is called *S6* (S4, selective, with a scan). It is equation 1.17 for $d$
# channels: `x` and `dt` (b, l, d), each channel with a diagonal $A$ of its own (d, n), and $B_t$,
# $C_t$ (b, l, n) shared by all channels. As a loop:


# %%
def scan_inputs(b=2, l=21, d=3, n=4):
    """x, dt, A, B and C of a selective scan, drawn at random."""
    x, B, C = random(b, l, d, seed=6), random(b, l, n, seed=7), random(b, l, n, seed=8)
    dt, A = random(b, l, d, seed=9).abs() / 4, -torch.arange(1.0, n + 1).expand(d, n)
    return x, dt, A, B, C


x, dt, A, B, C = scan_inputs()
h, y = torch.zeros(2, 3, 4), []  # h (b, d, n)
for t in range(21):
    decay = torch.exp(dt[:, t, :, None] * A)  # (b, d, 1) * (d, n)
    write = (dt * x)[:, t, :, None] * B[:, t, None, :]  # (b, d, 1) * (b, 1, n)
    h = decay * h + write
    y.append(einsum("bdn,bn->bd", h, C[:, t]))
check("selective_scan = equation 1.17", selective_scan(x, dt, A, B, C), torch.stack(y, 1))
forgotten = selective_scan(x / dt, dt, A, B, C)
_ = must_differ("step size forgotten in the write", forgotten, torch.stack(y, 1))

# %% [markdown]
# The write is $\Delta_t B_t x_t$ and not ZOH's $\bar B$: Mamba's code takes Euler's rule here. That
# is the last entry in "As printed" below.
#
# ## 8 · The scan lives
#
# Without a kernel there is no FFT. Are we back at $l$ steps, one after the other? No. Linear is
# still linear. Write $\alpha_t$ for the decay factor of a token and $w_t$ for what it writes ($w$
# with one index; the attention weights of later chapters have two). One step is the map $h \mapsto
# \alpha\,h + w$, and two steps in a row are such a map again:
#
# $$\alpha_2\,(\alpha_1 h + w_1) + w_2 = (\alpha_2 \alpha_1)\,h + (\alpha_2 w_1 + w_2)
#   \quad\Longrightarrow\quad
#   (\alpha_1, w_1) \bullet (\alpha_2, w_2) = (\alpha_2 \alpha_1,\; \alpha_2 w_1 + w_2).
#   \tag{1.19}$$
#
# Running maps one after the other is *associative*: it does not matter which neighbours are joined
# first. (The order of the steps does matter: it is not commutative.)


# %%
def combine(first, second):
    """Two steps in a row as one: (α_1, w_1) • (α_2, w_2)."""
    (alpha_1, w_1), (alpha_2, w_2) = first, second
    return alpha_2 * alpha_1, alpha_2 * w_1 + w_2


one, two, three = random(3, 2, 1000, seed=10)  # a thousand pairs (α, w) each
left, right = combine(combine(one, two), three), combine(one, combine(two, three))
check("associative", torch.stack(left), torch.stack(right))
_ = must_differ("commutative", combine(two, one)[1], combine(one, two)[1])

# %% [markdown]
# So it can go *as a tree*. In round one, each token joins with its left neighbour and now stands
# for two steps. In round two it joins with the token two to the left, and stands for four.
# After $\lceil \log_2 l \rceil$ rounds every token stands for all steps up to itself, and its $w$
# is the state (with $h_{-1} = 0$). In each round all tokens work at once.


# %%
def scan_by_doubling(alpha, w):
    """All h_t of h_t = α_t h_{t-1} + w_t, and the number of rounds."""
    reach, rounds = 1, 0
    while reach < len(alpha):
        earlier = F.pad(alpha[:-reach], (reach, 0), value=1.0), F.pad(w[:-reach], (reach, 0))
        alpha, w = combine(earlier, (alpha, w))
        reach, rounds = 2 * reach, rounds + 1
    return w, rounds


def scan_one_by_one(alpha, w):
    """The same, from left to right."""
    h = [torch.tensor(0.0)]
    for alpha_t, w_t in zip(alpha, w, strict=True):
        h.append(alpha_t * h[-1] + w_t)
    return torch.stack(h[1:])


# %%
for length in (1, 2, 8, 21, 1000):
    alpha, w = torch.sigmoid(random(length, seed=11)), random(length, seed=12)
    h, rounds = scan_by_doubling(alpha, w)
    assert rounds == math.ceil(math.log2(length))
    check(f"l = {length:4}: {rounds:2} rounds = {length:4} steps", h, scan_one_by_one(alpha, w))
_ = must_differ("the last step left out", F.pad(h[:-1], (1, 0)), h)


# %% tags=["figure"]
def draw_tree(ax):
    """Which steps each of eight tokens stands for, after each round; returns what a round adds."""
    drawn = [[], [], [], []]  # the start, then three rounds
    for row, reach in enumerate((1, 2, 4)):
        down = [-row, -row - 1]
        for t in range(8):
            drawn[row + 1] += ax.plot([t, t], down, color=plotting.QUIET, linewidth=1)
            if t >= reach:
                color = plotting.COLORS[row]
                drawn[row + 1] += ax.plot([t - reach, t], down, color=color, linewidth=1.8)
    for row, (right, up) in enumerate(((0, 0.2), (0.1, 0.13), (0.1, 0.13), (0, -0.25))):
        drawn[row] += ax.plot(range(8), [-row] * 8, "o", color=plotting.INK, markersize=9)
        for t in range(8):
            span = f"{max(0, t - 2**row + 1)}–{t}" if row and t else f"{t}"
            side = "left" if right else "center"
            drawn[row].append(ax.text(t + right, up - row, span, fontsize=13, ha=side, va="center"))
    rounds = ["start", "round 1: join 1 back", "round 2: join 2 back", "round 3: join 4 back"]
    ax.set_yticks([0, -1, -2, -3], rounds, fontsize=13)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(-0.3, 7.7), ylim=(-3.45, 0.4))
    return [[*new, label] for new, label in zip(drawn, ax.get_yticklabels(), strict=True)][1:]


# %% tags=["figure"]
fig, ax = plotting.figure(size=(10, 5))
rounds = draw_tree(ax)
plotting.save(
    fig,
    "01_scan",
    "Eight tokens in four rows. Between the rows lines join each token with the one that is 1, 2 "
    "and 4 to its left. The labels say which steps a token stands for: after three rounds token 7 "
    "stands for steps 0 to 7.",
    stages=rounds,
)

# %% [markdown]
# This form does about $l \log_2 l$ joins in $\log_2 l$ rounds. (The package needs fewer than $2l$
# joins, in about twice the rounds: join neighbours two by two, scan the *half as long* list that
# results, and fill in the tokens between, one join each. Each such level costs at most $l$ joins
# and two rounds, and the next is half as long.)

# %%
inputs = scan_inputs()
y = selective_scan(*inputs)
check("parallel scan = sequential scan", selective_scan_parallel(*inputs), y)
check_gradients(
    "parallel scan = sequential scan", selective_scan_parallel, selective_scan, list(inputs)
)
_ = must_differ("parallel scan, turned round", selective_scan_parallel(*inputs).flip(1), y)

# %% [markdown]
# Rounds are not all that counts on a GPU. The parallel form writes all states to memory, (b, l, d,
# n), which is $n$ times the input: for one text of 8192 tokens with $d = 2048$ and $n = 16$ in
# float32, 1 GiB for an input of 64 MiB. Mamba's kernel (Gu and Dao, 2023) keeps them in the fast
# memory of the chip and writes only $y$. (Chapter 03: where all $n$ numbers of a state share one
# decay, matrix products do the work.)
#
# > "We can no longer compute the kernel K once up front. Instead we perform an efficient scan
# > implementation" — L22, "Mamba's Scan Implementation" (two bullets)

# %% [markdown]
# ## 9 · Mamba, and a task for it
#
# The layer around the scan has two more parts: a *short convolution* that lets each channel see the
# last four tokens before anything is decided, and a *gate* on the way out. With $u$ for the
# channels of the scan ($2d$ of them):
#
# $$\begin{aligned}
#   u &= \mathrm{SiLU}(\mathrm{conv}(xW_x)), \\
#   (\eta, B, C) &= u\,W, \qquad \Delta = \mathrm{softplus}(\eta\,W_\Delta + \text{bias}), \\
#   y &= \Big(\big(\mathrm{scan}(u, \Delta, A, B, C) + D \circ u\big) \circ
#   \mathrm{SiLU}(xW_z)\Big)\, W_o.
# \end{aligned} \tag{1.20}$$
#
# $\mathrm{SiLU}(x) = x\,\sigma(x)$ is another smooth $\max(x, 0)$. *conv* replaces each number of a
# channel by a weighted sum of the last four of that channel, itself included; the weights are
# learned, a set for each channel, and no later token is looked at. Every $W$ is a matrix of
# weights. $\eta$ is only a few numbers wide (`dt_rank`), so that the map from $u$ to $\Delta$ stays
# small; $\eta W_\Delta + \text{bias}$ is the $\zeta$ of equation 1.18. $D$ is one weight per
# channel for the direct path, and $\circ$ multiplies entry by entry. (In the package
# `in_proj` holds $W_x$ and $W_z$, `x_proj` $W$, `dt_proj` $W_\Delta$, `out_proj` $W_o$, `A_log`
# $\log(-A)$; `short_convolution` is conv and SiLU in one.)

# %%
_ = torch.manual_seed(1)
mixer = Mamba(8, d_state=4).requires_grad_(False)
x = random(2, 15, 8, seed=14)

xW_x, xW_z = mixer.in_proj(x).chunk(2, dim=-1)
taps = F.pad(xW_x, (0, 0, 3, 0)).unfold(1, 4, 1)  # (b, l, 2d, 4): the last four of each channel
u = F.silu((taps * mixer.conv).sum(-1))
check("SiLU(conv) = short_convolution", short_convolution(xW_x, mixer.conv)[0], u)

eta, B, C = mixer.x_proj(u).split([1, 4, 4], dim=-1)  # dt_rank, n, n
dt = F.softplus(mixer.dt_proj(eta) + mixer.dt_bias)
scanned = selective_scan(u, dt, -mixer.A_log.exp(), B, C) + mixer.D * u
by_hand = mixer.out_proj(scanned * F.silu(xW_z))
check("equation 1.20 = Mamba", mixer(x)[0], by_hand)
_ = must_differ("gate forgotten", mixer.out_proj(scanned), by_hand)

# %% [markdown]
# For decoding, the layer hands out a cache: the state, and the last three inputs of the
# convolution. Its size does not depend on how much has been read.

# %%
y, cache = mixer(x)
memory, outputs = None, []
for t in range(15):
    y_t, memory = mixer(x[:, t : t + 1], cache=memory)
    outputs.append(y_t)
check("token by token, from its cache = one pass", torch.cat(outputs, 1), y)
_ = must_differ("cache forgotten", torch.cat([mixer(x_t[:, None])[0] for x_t in x.unbind(1)], 1), y)

size = sum(t[0].numel() for t in cache)
print("numbers in the cache per row:", size)
assert size == 16 * 4 + 3 * 16  # state, and last inputs

# %% [markdown]
# ### Selective copying
#
# This is one of the two small tasks that Mamba was introduced with. A text consists of blanks, with
# three letters at random places; then three question marks follow, and the model has to name the
# letters, in their order:
#
#     · · e · · · · a · · · · · h · · ? ? ?     →   e a h
#
# At places that are the same in every text a convolution would do: "the token 14 ago". *The data:*


# %%
def copying_texts(count, generator, length=16):
    """Texts (count, length + 3) of blanks 8, three letters 0 to 7 and ? 9; answers (count, 3)."""
    ids = torch.full((count, length + 3), 8)
    places = torch.rand(count, length, generator=generator).argsort(1)[:, :3].sort(1).values
    letters = torch.randint(8, (count, 3), generator=generator)
    ids.scatter_(1, places, letters)
    ids[:, length:] = 9
    return ids, letters


# %% [markdown]
# *The model,* and as a control the very same layer with `selective=False`: there, $\Delta$, $B$ and
# $C$ are learned numbers, the same for all tokens.


# %%
class Copier(torch.nn.Module):
    """Embedding, Mamba layers, a linear map to the letters."""

    def __init__(self, selective, layers=1, d_conv=4):
        super().__init__()
        options = dict(selective=selective, d_conv=d_conv, scan="sequential")
        self.embedding = torch.nn.Embedding(10, 32)
        self.mixers = torch.nn.ModuleList(Mamba(32, **options) for _ in range(layers))
        self.head = torch.nn.Linear(32, 8, bias=False)

    def mix(self, ids):
        x = self.embedding(ids)
        for mixer in self.mixers:
            x, _ = mixer(x)
        return x[:, -3:]  # at the question marks

    def forward(self, ids):
        return self.head(self.mix(ids))


# %% [markdown]
# *The training,* with a look at fresh texts every so many steps:


# %%
def copied(model, ids, letters):
    """The share of letters named right."""
    with torch.no_grad():
        return (model(ids).argmax(-1) == letters).double().mean().item()


def train_to_copy(selective, steps=400, seed=0, every=100, **options):
    """The trained model, its share of letters named right every so many steps, the generator."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Copier(selective, **options).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    curve = []
    for step in range(1, steps + 1):
        ids, letters = copying_texts(32, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), letters.flatten()).backward()
        optimizer.step()
        schedule.step()
        if step % every == 0:
            curve.append(copied(model, *copying_texts(512, generator)))
    return model, curve, generator


# %% [markdown]
# *The result.* What the control names is nearly always *one* of the three letters of the text, but
# seldom are the three that it names the right three:

# %%
_, with_selection, _ = train_to_copy(True)
invariant, without, generator = train_to_copy(False)
assert with_selection[-1] > 0.95 and without[-1] < 0.7
print("after 400 steps: selective over 95 % of the letters, time-invariant under 70 %")

# %%
ids, letters = copying_texts(4096, generator)
with torch.no_grad():
    named = invariant(ids).argmax(-1)
among = (named[:, :, None] == letters[:, None]).any(-1).double().mean()  # (b, answer, letter)
right_set = (named.sort(1).values == letters.sort(1).values).all(1).double().mean()
assert among > 0.95 and right_set < 0.3
print("time-invariant: over 95 % of what it names is among the three letters of the text;")
print("the right three, in any order, in under 30 % of the texts")

# %% [markdown]
# **Letters add.** Between the convolution (four tokens) and the gate (one token) the control is
# linear. So what a letter contributes at the question marks depends on no letter at least four
# tokens away, and on its own place only through the distance to the question mark, except where the
# convolution reaches over an end of the text.


# %%
def contribution(model, ids, place, letter):
    """What a letter adds at the question marks where it replaces a blank."""
    written = ids.clone()
    written[0, place] = letter
    with torch.no_grad():
        return model.mix(written) - model.mix(ids)


# %%
control, blank = invariant.double(), torch.tensor([[8] * 16 + [9] * 3])
far, near = blank.clone(), blank.clone()
far[0, 7], near[0, 5] = 1, 1  # another letter, four tokens or two after the one at 3
alone, in_far, in_near = (contribution(control, ids, 3, 4) for ids in (blank, far, near))
check("alone = with another letter four tokens on", in_far, alone)
_ = must_differ("with another letter two tokens on", in_near, alone)

for name, place in (("inside", 8), ("end", 15)):
    here = contribution(control, blank, place, 4)[:, 1:]  # at the 2nd and 3rd question mark
    before = contribution(control, blank, place - 1, 4)[:, :2]  # the same distances
    if name == "inside":
        check("inside the text: same distance, same contribution", here, before)
_ = must_differ("at the end of the text: the same", here, before)

# %% [markdown]
# **What can adding do?** Let the answer to a question mark be the letter with the largest sum of
# weights, where the weight depends on the letter's place. For the *first* letter let the weights
# fall from place to place, to less than half: the earliest wins, even against two that are equal.
# For the *last* let them rise. For the *middle* one, in every text, no weights will do: it would
# have to outweigh an earlier letter (so the weights rise) and a later one (so they fall). And *one
# kernel* for all three question marks, a function of the distance, cannot rise and fall either.
#
# (Weights that differ from letter to letter do not name all letters either. If they named all
# letters right in every text, so would they after any renaming of the letters, and so would the
# mean over all renamings, in which all letters are alike.) We fit 48 free weights, one per place
# and answer, and one kernel of 18 numbers, one per distance:


# %%
def place_weights(weights):
    """The weight of place s in answer i, (3, 16): 48 free numbers, or 18 of one kernel."""
    if len(weights) == 48:
        return weights.view(3, 16)
    distance = 16 + torch.arange(3)[:, None] - torch.arange(16)  # from place s to question mark i
    return weights[distance - 1]


def add_up(weights, ids):
    """Logits (b, 3, 8): for each answer and letter, the weights of the places where it stands."""
    stands = F.one_hot(ids[:, :16], 10)[..., :8].double()  # (b, place, letter)
    return einsum("is,bsv->biv", place_weights(weights), stands)


# %% [markdown]
# Both are fitted with a quasi-Newton method:


# %%
def train_to_add(count, seed=0):
    """The share named right of the first, the middle and the last letter, from `count` weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(count, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")
    ids, letters = copying_texts(4096, generator)

    def loss():
        optimizer.zero_grad()
        value = F.cross_entropy(add_up(weights, ids).flatten(0, 1), letters.flatten())
        value = value + 1e-6 * weights.square().sum()  # the best weights would be infinite
        value.backward()
        return value

    optimizer.step(loss)
    ids, letters = copying_texts(8192, generator)
    return (add_up(weights.detach(), ids).argmax(-1) == letters).double().mean(0).tolist()


# %%
free, one_kernel = train_to_add(48), train_to_add(18)
assert min(free[0], free[2]) > 0.95 and 0.5 < free[1] < 0.7 and 0.45 < sum(one_kernel) / 3 < 0.55
print("shares of the first, the middle and the last letter, to one decimal:")
print("48 free weights", numbers(free, ".1f"), "  one kernel", numbers(one_kernel, ".1f"))

# %% [markdown]
# So superposition forbids the middle letter: 86 % in the mean of the three. One kernel for three
# question marks leaves 50 %. Five seeds of each, and of the models, from
# `python book/records.py 01_selective_copy` (600 steps, these very functions; "no convolution":
# `d_conv=1`, one weight per channel for the token itself, then SiLU as before):

# %%
copying = read_record("01_selective_copy")
ends, adding = copying["at the end"], copying["adding"]
for name, shares in (ends | adding).items():
    print(f"{name:30}", numbers(shares))
for name, shares in copying["adding: first, middle, last"].items():
    print(f"first, middle, last: {name:24}", numbers(shares))

kernel, free = adding["adding, one kernel"], adding["adding, 48 free weights"]
without = ends["time-invariant, no convolution"]
assert all(abs(share - 0.5) < 0.02 for share in kernel + without)
assert all(abs(share - 0.86) < 0.01 for share in free)

# %% [markdown]
# The control *without* its convolution ends where one kernel does, at 50 %; *with* it, at about
# 60 %. The argument does not hold where the convolution reaches over the end of the text, and there
# the control above is indeed better:

# %%
near_end = (ids[:, 13:16] < 8).any(1)  # a letter in the last three places before the first ?
share_near, share_far = ((named == letters)[rows].double().mean() for rows in (near_end, ~near_end))
assert share_far < 0.53 and share_near > 0.57
print("with a letter in the last three places: over 57 % right; in other texts: under 53 %")

# %% [markdown]
# *Two* time-invariant layers, with a gate and a SiLU between them, come to about 85 to 91 % on
# texts this short: what a time-invariant model cannot do, it cannot do *in one linear pass*. And
# the selective layer learns faster with its short convolution: without it, after these 600 steps,
# the five seeds stand anywhere from 57 to 86 %, and are still climbing.

# %%
bounds = {
    "selective": (0.99, 1),
    "time-invariant": (0.57, 0.62),
    "time-invariant, two layers": (0.85, 0.91),
    "selective, no convolution": (0.56, 0.87),
}
middle = copying["right"]["selective, no convolution"]["median"]
assert middle[-1] > middle[-9] + 0.04  # still climbing in the last 200 steps
for name, (low, high) in bounds.items():
    assert low <= min(ends[name]) and max(ends[name]) <= high, name
    print(f"{name:28} {min(ends[name]):.2f} to {max(ends[name]):.2f}")


# %% tags=["figure"]
def draw_copying(axes, copying):
    """Left: the middle of five seeds, over training. Right: all five at the end."""
    names = list(copying["right"])
    for i, (name, runs) in enumerate(copying["right"].items()):
        plotting.lines(axes[0], copying["steps"], {name: runs["median"]}, legend=None)
        plotting.band(axes[0], copying["steps"], runs["low"], runs["high"])
        ends = copying["at the end"][name]
        plotting.lines(axes[1], ends, {name: [i] * len(ends)}, joined=False, legend=None)
    plotting.level(axes[0], 1 / 8, "chance")
    axes[0].set(xlabel="training steps", ylabel="letters named right", ylim=(0, 1.05))
    axes[0].set_title("median, band: 2nd to 4th of 5 seeds", fontsize=13)
    axes[1].set(xlabel="letters named right", ylim=(4.5, -0.5), xlim=(0.45, 1.03))
    axes[1].set_title("all five seeds, at the end", fontsize=13)
    axes[1].set_yticks(range(5), names)
    for i, label in enumerate(axes[1].get_yticklabels()):
        label.set_color(plotting.COLORS[i])


# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.4))
draw_copying(axes, copying)
plotting.save(
    fig,
    "01_selective_copy",
    "Share of letters named right against training steps, median and second to fourth of five "
    "seeds, and all five at the end. The selective layer reaches 1. The time-invariant layer "
    "stays at about 0.6, without its convolution at 0.5; two such layers, stacked, climb "
    "to nearly 0.9. The selective layer without its convolution ends between 0.57 and 0.86.",
)

# %% [markdown]
# ## 10 · As printed
#
# ### A step late (L22, "1D Discrete Recurrent Representation")
#
# > $\mathbf{h}_{k+1} = \bar{\mathbf{A}}\mathbf{h}_k + \bar{\mathbf{B}}x_k, \quad
# > y_k = \bar{\mathbf{C}}\mathbf{h}_k + \bar{\mathbf{D}}x_k$
#
# (Its $k$ is our $t$.) Here $y_k$ is read *before* $x_k$ is written. A few slides later the
# unrolled form begins with $h_0 = \bar Bx_0$ and $y_0 = \bar C\bar B x_0$: that is $h_k = \bar A
# h_{k-1} + \bar B x_k$, and the term $\bar D x_k$ is gone. Run both:

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
# For sound, one sample of delay is next to nothing. In a language model it makes a different model:
# a token sees itself only through $\bar D$, past the state.
#
# ### ZOH under the name of the bilinear rule (L22, "How to discretize a continuous SSM?")
#
# > "S4 uses a bilinear transformation to discretize the continuous SSM" — L22
#
# On the first of two slides, $\bar A = e^{\Delta A}$ and $\bar B = A^{-1}(e^{\Delta A} - I)B$
# follow. These are the formulas of ZOH. The caption below them says "exactly equivalent" and "on
# the held signal", which is true of them (§2) and not of the bilinear rule (§3). The slide's last
# line, $e^x \approx \frac{1+x/2}{1-x/2}$, is the bridge: put the fraction in the place of the
# exponential, and since $\frac{1+z/2}{1-z/2} - 1 = \frac{z}{1-z/2}$, the first pair of formulas
# turns into the second, which *is* the bilinear rule (equation 1.8).
#
# ### A transpose too many (L22, "Selective State Space Models")
#
# > $h_t = Ah_{t-1} + Bx_t, \quad y_t = C^\top h_t$
#
# On the first slides $\mathbf{C} \in \mathbb{R}^{1 \times N}$ is a row, read as $Ch$. Its transpose
# has the shape of $h$, $N \times 1$, and $C^\top h$ is no product (for $N > 1$). With a column $C$,
# as in Mamba's paper, $C^\top h$ is right. (The recurrence has $A$ and $B$ where $\bar A$ and
# $\bar B$ are meant.)
#
# ### Two rules for what a token writes (OTCE §2.1 against WM §2 and Mamba's code)
#
# > "The most common is the zero-order hold (ZOH) rule, defined as $\bar{A} = \exp(\Delta A)$ and
# > $\bar{B} = (\Delta A)^{-1}(\exp(\Delta A) - I) \cdot \Delta B$." — OTCE §2.1
#
# WM (Listing 3) and the code of Mamba write $\Delta_t B_t x_t$ instead, which is Euler's rule,
# beside a decay that is exact. For one rate $A$ the two differ by the factor
#
# $$\frac{\Delta}{(e^{\Delta A} - 1)/A} = \frac{z}{e^z - 1}, \qquad z = \Delta A. \tag{1.21}$$

# %%
for step, a, printed in ((0.1, -1.0, "1.051"), (0.69, -1.0, "1.384"), (0.69, -16.0, "11.04")):
    _, B_bar = discretize_zoh(torch.tensor([[a]]), torch.ones(1), step)
    ratio, z = step / B_bar, torch.tensor([step * a])
    check(f"Δ = {step}, A = {a:.0f}: equation 1.21", ratio, z / (torch.exp(z) - 1))
    assert f"{ratio.item():.4g}" == printed
    print(f"   Euler writes {printed} times as much as ZOH")

# %% [markdown]
# Both have a parallel scan. For one rate and a constant $\Delta$ a learned $B$ absorbs the factor.
# Where $\Delta$ depends on the token so does the factor, and how much is written no longer fits the
# time that has passed: under a constant input of 1 and $A = -1$, ZOH rests at 1 for every step
# size, Euler's write at $\Delta / (1 - e^{-\Delta})$. (And the second half of equation 1.18 becomes
# $\mathrm{softplus}(\zeta)$, a gate that does not stop at 1.)


# %% [markdown]
# ## Summary
#
# - A linear differential equation with a held input is a recurrence, exactly. Where its $A$ has $n$
#   different eigenvalues, its modes are tones that fade or grow.
# - The bilinear rule puts a fraction in the place of the exponential: off by $z^3/12$ per step, and
#   stable at any step.
# - Constant $\bar A$, $\bar B$, $C$: the recurrence is a convolution. Train with one, run with the
#   other.
# - HiPPO's $A$ keeps the coefficients of the polynomial that is closest to all of the past.
# - $\Delta$ carries the unit of time. Samples twice as far apart: $2\Delta$, and no new training.
# - Selection lets the token set $\Delta$, $B$ and $C$. Superposition goes, and with it the kernel;
#   associativity stays, and with it a scan: $\log_2 l$ rounds by doubling, or about $2\log_2 l$
#   with fewer than $2l$ joins.
# - Selective copying: one kernel that adds up letters names 50 % of them, one time-invariant layer
#   with its convolution about 60 %, the selective layer all.
#
# | as printed | what it does when run | what holds |
# |---|---|---|
# | $h_{k+1} = \bar Ah_k + \bar Bx_k$ | late, but for $D$ | $h_t = \bar Ah_{t-1} + \bar Bx_t$ |
# | "bilinear", with $e^{\Delta A}$ | is ZOH, and exact | the fraction of equation 1.8 |
# | $C^\top h$ with $C \in \mathbb{R}^{1 \times N}$ | does not run | $Ch$ |
# | $\bar B$ of ZOH, or $\Delta B$ | elevenfold at $\Delta A = -11$ | say which is meant |
#
# ## Exercises
#
# **1 · easy.** A drug is infused into the blood at $x(t)$ mg per hour. It leaves the body at `away`
# times what is in the blood (mg per hour), goes into the tissue at `out` times what is in the
# blood, and comes back at `back` times what is in the tissue: `away`, `out` and `back` are *rates*,
# in 1/hour. State: (mg in the blood, mg in the tissue). Write $A$ and $B$, and use the package to
# give both amounts at the end of each hour, for a list of hourly infusion rates.


# %% tags=["exercise"]
def amounts(away, out, back, infusion):
    """Rates per hour, and infusion (l,) in mg per hour -> the state at the end of hours (l, 2)."""
    ### BEGIN SOLUTION
    A, B = torch.tensor([[-away - out, back], [out, -back]]), torch.tensor([1.0, 0.0])
    A_bar, B_bar = discretize_zoh(A, B, 1.0)
    each = [ssm_recurrent(A_bar, B_bar, row, infusion[None])[0] for row in torch.eye(2)]
    return torch.stack(each, -1)
    ### END SOLUTION


# %% tags=["check"]
def by_flows(away, out, back, infusion, steps=400):
    """The amounts by the midpoint rule, flow by flow."""

    def flows(blood, tissue):
        return away * blood, out * blood - back * tissue

    blood, tissue, hourly = 0.0, 0.0, []
    for hour in infusion.tolist():
        for _ in range(steps):
            lost, moved = flows(blood, tissue)
            middle = blood + (hour - lost - moved) / 2 / steps, tissue + moved / 2 / steps
            lost, moved = flows(*middle)
            blood, tissue = blood + (hour - lost - moved) / steps, tissue + moved / steps
        hourly.append([blood, tissue])
    return torch.tensor(hourly)


infusion = torch.tensor([10.0, 10, 0, 0, 5, 0])
for rates in ((0.4, 0.8, 0.3), (0.1, 0.2, 1.5), (0.0, 0.8, 0.3)):
    check(f"rates {rates}", amounts(*rates, infusion), by_flows(*rates, infusion), tol=1e-4)
given = amounts(0.0, 0.8, 0.3, infusion)
check("nothing leaves: all that came in is there", given.sum(-1), infusion.cumsum(0))

# %% [markdown]
# **2 · easy.** Under Euler's rule a mode with the complex rate $\lambda$, $\mathrm{Re}\,\lambda <
# 0$, is multiplied by $1 + \Delta\lambda$ in a step. Find the step that gives this factor the
# absolute value 1. And on paper: show that under the bilinear rule the factor stays below 1 in
# absolute value at *every* step. (Hint: $|1 + z/2|$ is the distance of $z/2$ to $-1$, $|1 - z/2|$
# that to $+1$. The check prints the largest factor among a thousand rates.)


# %% tags=["exercise"]
def largest_euler_step(rates):
    """Complex rates, any shape -> the step at which |1 + step · rate| = 1, same shape, real."""
    ### BEGIN SOLUTION
    # |1 + Δλ|² = 1 + 2 Δ Re λ + Δ² |λ|². For the bilinear rule: left of the imaginary axis, z/2 is
    # nearer to -1 than to +1.
    return -2 * rates.real / rates.abs() ** 2
    ### END SOLUTION


# %% tags=["check"]
real, imaginary = random(2, 1000, seed=40)
rates = torch.complex(-real.abs() - 1e-3, 3 * imaginary)
steps = largest_euler_step(rates)
check("Euler at its limit: |1 + Δλ| = 1", (1 + steps * rates).abs(), torch.ones(1000))
assert ((1 + 0.9 * steps * rates).abs() < 1).all() and ((1 + 1.1 * steps * rates).abs() > 1).all()
for step in (0.01, 1.0, 100.0):
    factors = ((1 + step * rates / 2) / (1 - step * rates / 2)).abs()
    assert (factors < 1).all()
    print(f"bilinear, step {step:6.2f}: largest factor {factors.max().item():.6f}")

# %% [markdown]
# **3 · medium.** A pushed spring: solve $y'' = -\omega^2 y - 2\gamma y'$ with $y(0) = 0$, $y'(0) =
# 1$ and $\gamma < \omega$ on paper. (Hint: try $e^{\lambda t}$; two rates, and two conditions.)
# This is the continuous kernel $K(t)$ of §4; the check integrates yours.


# %% tags=["exercise"]
def spring_kernel(t, omega, gamma):
    """K(t) for times t: any shape -> the same shape."""
    ### BEGIN SOLUTION
    turns = math.sqrt(omega**2 - gamma**2)
    return torch.exp(-gamma * t) * torch.sin(turns * t) / turns
    ### END SOLUTION


# %% tags=["check"]
nodes, weights = leggauss(8)  # Gauss's rule on [-1, 1]
for omega, gamma in ((3.0, 0.3), (1.0, 0.9)):
    A = torch.tensor([[0.0, 1.0], [-(omega**2), -2 * gamma]])
    K = ssm_kernel(*discretize_zoh(A, torch.tensor([0.0, 1.0]), 0.2), torch.tensor([1.0, 0.0]), 30)
    inside = 0.2 * (torch.arange(30)[:, None] + torch.tensor(nodes + 1) / 2)  # (δ, nodes)
    integrals = 0.2 * spring_kernel(inside, omega, gamma) @ torch.tensor(weights / 2)
    check(f"ω = {omega}, γ = {gamma}", integrals, K)

# %% [markdown]
# **4 · medium.** The scan is not bound to sums and products. A best-path search has the recurrence
# $h_t = \max(h_{t-1} + g_t,\; w_t)$: go on from the best so far with the gain $g_t$, or start anew
# with $w_t$. Find the pair that two steps in a row make, so that the doubling scan works for it.


# %% tags=["exercise"]
def combine_best(first, second):
    """(g_1, w_1) • (g_2, w_2) for h -> max(h + g, w); all of one shape."""
    ### BEGIN SOLUTION
    (g_1, w_1), (g_2, w_2) = first, second
    return g_1 + g_2, torch.maximum(w_1 + g_2, w_2)
    ### END SOLUTION


# %% tags=["check"]
one, two, three = random(3, 2, 100, seed=41)
left = combine_best(combine_best(one, two), three)
check("associative", torch.stack(left), torch.stack(combine_best(one, combine_best(two, three))))
g, w = random(2, 37, seed=42)
h = [torch.tensor(-math.inf)]
for g_t, w_t in zip(g, w, strict=True):
    h.append(torch.maximum(h[-1] + g_t, w_t))
reach = 1
while reach < 37:
    before = F.pad(g[:-reach], (reach, 0)), F.pad(w[:-reach], (reach, 0), value=-math.inf)
    g, w = combine_best(before, (g, w))
    reach *= 2
check("best path by doubling = one by one", w, torch.stack(h[1:]))

# %% [markdown]
# **5 · hard.** Build selective copying by hand. Tokens have three numbers: value, mark (1 at values
# to be kept), ask (1 where an answer is wanted). The $i$-th asking token shall give the $i$-th
# marked value, for up to `n` of them, exactly. Choose `dt`, `A`, `B` and `C` for `selective_scan`
# with one channel. Before the $i$-th mark, and where nothing is asked, the answer is 0. (Hint: one
# number of the state for each, which must not fade: $A$ may be 0. Which one a token belongs to is a
# running count of marks, or of questions: a state space model with $\bar A = 1$.)


# %% tags=["exercise"]
def copy_by_hand(tokens, n):
    """tokens (b, l, 3) -> y (b, l): 0 where nothing is asked."""
    ### BEGIN SOLUTION
    value, mark, ask = tokens.unbind(-1)
    slots = torch.arange(1, n + 1)
    B = (mark.cumsum(1)[..., None] == slots) * mark[..., None]
    C = (ask.cumsum(1)[..., None] == slots) * ask[..., None]
    # A = 0 forgets nothing, dt = 1 at marks writes the value once, dt = 0 lets no time pass
    return selective_scan(value[..., None], mark[..., None], torch.zeros(1, n), B, C)[..., 0]
    ### END SOLUTION


# %% tags=["check"]
def answers_to(tokens):
    """The answers, kept in a list: (b, l)."""
    answers = torch.zeros(tokens.shape[:2])
    for row, text in enumerate(tokens.tolist()):
        kept, asked = [], 0
        for t, (value, mark, ask) in enumerate(text):
            kept += [value] if mark else []
            if ask:
                asked += 1
                answers[row, t] = kept[asked - 1] if asked <= len(kept) else 0.0
    return answers


generator = torch.Generator().manual_seed(43)
for n, l in ((4, 20), (6, 31), (1, 5)):  # blanks, marks and questions in any order
    tokens = torch.zeros(8, l, 3)
    tokens[..., 0] = random(8, l, seed=44 + n)
    kinds = torch.rand(8, l, generator=generator)
    marks, asks = kinds < 0.3, kinds > 0.6
    tokens[..., 1] = marks & (marks.cumsum(1) <= n)  # up to n marks
    tokens[..., 2] = asks
    check(f"n = {n}: copied in order", copy_by_hand(tokens, n), answers_to(tokens))

# %% [markdown]
# ## Further reading
#
# - Gormley and Nayebi, *10-423/623/723 Generative AI*, lecture 22 (2025): the slides this chapter
#   runs.
# - Gu et al., *HiPPO* (2020): memory as projection; theorem 2 is equation 1.13, with the
#   other sign of $A$.
# - Gu, Goel and Ré, *Efficiently Modeling Long Sequences with Structured State Spaces* (2022): S4;
#   Gu et al., *On the Parameterization and Initialization of Diagonal State Space Models* (2022):
#   S4D.
# - Rush and Karamcheti, *The Annotated S4*: the same road, with JAX.
# - Blelloch, *Prefix Sums and Their Applications* (1990): what else a scan can do.
# - Gu and Dao, *Mamba* (2023): selection, selective copying, and the kernel.
# - `cheems_ref/state_space.py` and `cheems_ref/mamba.py`: the listings this notebook arrives at.
#   Chapter 02 drops the softmax of attention and arrives at such recurrences from the other side;
#   chapter 03 joins the two.
