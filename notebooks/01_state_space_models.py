# %% [markdown]
# # 01 · State space models
#
# **A few numbers that follow an input over time: a tank, a spring, a memory of all that was heard.
# This chapter makes them discrete, fast, and finally selective.** When you are through you can
#
# - turn a linear differential equation into a recurrence, exactly or nearly, and measure the error;
# - compute the same map as a recurrence and as a convolution, and say when to use which;
# - say what the HiPPO matrix remembers, derive it, and draw the past that it holds;
# - train a model on sound at 16 kHz and run it at 8 kHz without training it again;
# - show why a model that chooses what to keep has no convolution, and derive the scan that
#   takes its place;
# - build the Mamba layer, and see it learn what its time-invariant twin does not.
#
# Time: about 120 minutes; for two lectures, cut before §7. Assumes: derivatives, matrix products,
# eigenvalues, the complex exponential, a little PyTorch. No other chapter is needed.
#
# Sources: lecture 22 of CMU's *Generative AI* (L22), Gormley and Nayebi (2025); *OTCE* §2.1; Gu et
# al., *HiPPO* (2020), *S4* (2022) and *S4D* (2022); Gu and Dao, *Mamba* (2023). The code that this
# notebook builds up to is `cheems_ref/state_space.py` and `cheems_ref/mamba.py`.

# %%
import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.polynomial.legendre import Legendre, leggauss

from cheems_ref import plotting
from cheems_ref.convolution import short_convolution
from cheems_ref.state_space import (
    S4D,
    Mamba,
    discretize_bilinear,
    discretize_zoh,
    hippo_legs,
    legs_memory,
    legs_reconstruct,
    selective_scan,
    selective_scan_parallel,
    ssm_convolution,
    ssm_kernel,
    ssm_recurrent,
)
from cheems_ref.verify import check, check_gradients, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
# The last row looks too good to be true. It is bought with one restriction: the recurrence must be
# *linear*. Then it can be rearranged, and everything in this chapter is such a rearrangement. The
# price of the restriction, and the way in which Mamba pays it back, come in the second half.
#
# ## 1 · Two systems you can picture
#
# **A tank with a hole.** Water runs in from a tap at $x(t)$ litres per second, and out through a
# hole, the faster the more there is. With $h(t)$ litres in the tank,
#
# $$h'(t) = -\tfrac{1}{2}\,h(t) + x(t). \tag{1.1}$$
#
# $h'$ is the change per second. With the tap closed, the tank loses half of its content per second
# *at the present rate*, so it empties like $e^{-t/2}$. Such a system is called a *leaky
# integrator*: it adds up its input and forgets.
#
# **A weight on a spring.** Let $q$ be the place of the weight, $v$ its speed. The spring pulls back
# with $9q$, friction brakes with $0.6\,v$, and a force $x$ pushes from outside:
#
# $$q' = v, \qquad v' = -9\,q - 0.6\,v + x. \tag{1.2}$$
#
# Two numbers now, and each change depends on both. Collect them in a *state* $h = (q, v)$. Then
# both systems are the same equation:
#
# $$h'(t) = A\,h(t) + B\,x(t), \qquad y(t) = C\,h(t). \tag{1.3}$$
#
# $A$ ($n \times n$) says how the $n$ numbers of the state change by themselves, $B$ ($n$) how the
# input enters, $C$ ($n$) what is read out. One input number, one output number at a time. (L22 and
# others add $D\,x(t)$ to the output. It remembers nothing, so we leave it out until we need it.)

# %%
tank = (torch.tensor([[-0.5]]), torch.tensor([1.0]), torch.tensor([1.0]))
spring = (
    torch.tensor([[0.0, 1.0], [-9.0, -0.6]]),
    torch.tensor([0.0, 1.0]),  # the force changes the speed
    torch.tensor([1.0, 0.0]),  # we watch the place
)

# %% [markdown]
# To know what is true, we follow the equation in very small steps. The rule of Runge and Kutta
# takes four looks at the slope per step: slow, but it works for any $A$ and any input, and its
# error is far below what we will measure.


# %%
def integrate(A, B, x, h, start, end, steps=150):
    """Follow h' = A h + B x(t) from start to end, beginning with the state h."""
    step = (end - start) / steps
    for i in range(steps):
        t = start + i * step
        k_1 = A @ h + B * x(t)
        k_2 = A @ (h + step / 2 * k_1) + B * x(t + step / 2)
        k_3 = A @ (h + step / 2 * k_2) + B * x(t + step / 2)
        k_4 = A @ (h + step * k_3) + B * x(t + step)
        h = h + step / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)
    return h


A, B, _ = tank
filled = integrate(A, B, lambda t: 1.0, torch.zeros(1), 0.0, 3.0, steps=1000)
check(
    "tank, tap open from the start: 2 (1 - exp(-t/2)) litres", filled, 2 - 2 * torch.exp(A[0] * 3)
)

A, B, _ = spring
rates = torch.linalg.eigvals(A)
rate = rates[rates.imag.argmax()]  # one of the pair, -0.3 ± i 2.98
period = 2 * math.pi / rate.imag.item()
start = torch.tensor([1.0, 0.0])
swung = integrate(A, B, lambda t: 0.0, start, 0.0, period, steps=2000)
check(
    "spring, let go: after a period the same, smaller", swung, torch.exp(rate.real * period) * start
)

# %% [markdown]
# The second check used the *eigenvalues* of $A$. For the spring they are a complex pair, about
# $-0.3 \pm 2.98\,\mathrm{i}$: the real part is the rate of fading, the imaginary part the angle per
# second. That is all a linear system can do by itself: its modes fade (or grow), and turn. Keep
# that in mind for the layers to come: what they remember is a sum of *fading tones* (the tank's has
# the frequency 0).

# %%
times = torch.linspace(0, 10, 201)


def follow(system, x):
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


fig, axes = plotting.figure(1, 2, size=(12, 4.2))
for ax, system, x, names, title in (
    (axes[0], tank, tap, ("tap x", "content h"), "a tank with a hole"),
    (axes[1], spring, push, ("push x / 8", "place y"), "a weight on a spring"),
):
    inputs = torch.tensor([x(t) for t in times.tolist()])
    ax.fill_between(times, inputs / max(1, inputs.max()), color=plotting.QUIET, alpha=0.35, lw=0,
                    label=names[0], step="post")  # fmt: skip
    ax.plot(times, follow(system, x), label=names[1])
    ax.axhline(0, color=plotting.QUIET, linewidth=0.8)
    ax.set(xlabel="seconds", title=title)
    ax.legend(loc="upper right")
plotting.save(
    fig,
    "01_two_systems",
    "Left: the content of a tank rises along a bending curve while the tap is open, and falls off "
    "exponentially when it is closed. Right: a weight on a spring is pushed once and swings with "
    "a period of about two seconds, less and less.",
)

# %% [markdown]
# ## 2 · From time to samples: hold the input
#
# Data are no functions of time. They are *samples* $x_0, x_1, x_2, \dots$, a step $\Delta$ apart
# (in code `dt`). To feed them to equation 1.3 we have to say what the input does in between. The
# simplest answer is: nothing. Sample $x_k$ *is held* until the next one comes, so that the input is
# a staircase. This is the *zero-order hold*, ZOH.
#
# Under a constant input the tank can be solved on paper. With $a = -\frac12$ for its $A$ and $b =
# 1$ for its $B$, its rest point is $-bx/a$ (where $h' = 0$), and the distance from rest shrinks by
# $e^{a\Delta}$ in a step:
#
# $$h(t + \Delta) = e^{a\Delta}\,h(t) + \frac{e^{a\Delta} - 1}{a}\,b\,x. \tag{1.4}$$
#
# For a matrix nothing changes, if we read $e^{\Delta A}$ as the series $I + \Delta A +
# (\Delta A)^2/2! + \dots$ and division as the inverse:
#
# $$h_k = \bar A\,h_{k-1} + \bar B\,x_k, \qquad \bar A = e^{\Delta A}, \qquad
#   \bar B = A^{-1}(\bar A - I)\,B. \tag{1.5}$$
#
# $h_k$ is the state at the *end* of the step in which $x_k$ was held. (OTCE §2.1 prints $\bar B =
# (\Delta A)^{-1}(e^{\Delta A} - I)\cdot\Delta B$. The two $\Delta$ cancel.)

# %%
dt = 0.25
A, B, C = spring
A_bar = torch.linalg.matrix_exp(dt * A)
B_bar = torch.linalg.solve(A, (A_bar - torch.eye(2)) @ B)

x = random(20, seed=0)
h, small_steps, recurrence = torch.zeros(2), [torch.zeros(2)], []
for x_k in x:
    small_steps.append(integrate(A, B, lambda t, x_k=x_k: x_k, small_steps[-1], 0.0, dt))
    h = A_bar @ h + B_bar * x_k
    recurrence.append(h)
check("ZOH = the differential equation under a held input",
      torch.stack(recurrence), torch.stack(small_steps[1:]))  # fmt: skip

for name, ours, theirs in zip(("Ā", "B̄"), (A_bar, B_bar), discretize_zoh(A, B, dt), strict=True):
    check(f"equation 1.5 = discretize_zoh, {name}", ours, theirs)

# %% [markdown]
# Not "nearly": for a held input the recurrence passes through the very states of the differential
# equation, however large the step is. What ZOH does *not* know is what the input did between the
# samples. Both can be seen in one picture:

# %%
A, B, C = tank
wide = 0.8


def smooth(t):
    return 1 + math.sin(1.3 * t)


samples = torch.tensor([smooth(k * wide) for k in range(13)])
A_bar, B_bar = discretize_zoh(A, B, wide)
dots = ssm_recurrent(A_bar, B_bar, C, samples[None])[0]

held = follow(tank, lambda t: samples[min(int(t / wide + 1e-9), 12)].item())
ends = torch.arange(16, 201, 16)  # in `times`, where a hold ends
check("dots of ZOH on the curve of the held input", held[ends], dots[:12], tol=5e-3)
_ = must_differ("the smooth input's curve", follow(tank, smooth)[ends], dots[:12], at_least=0.05)

fig, axes = plotting.figure(1, 2, size=(12, 4.2))
axes[0].plot(times, [smooth(t) for t in times.tolist()], "--", label="smooth")
axes[0].step([k * wide for k in range(14)], [*samples, samples[-1]], where="post", label="held")
axes[0].set_title("two inputs with the same samples")
axes[0].set(ylim=(-0.1, 2.9))
axes[1].plot(times, follow(tank, smooth), "--", label="under the smooth input")
axes[1].plot(times, held, label="under the held input")
axes[1].plot([(k + 1) * wide for k in range(12)], dots[:12], "o", color=plotting.INK, label="ZOH")
axes[1].set_title("the tank, and what ZOH computes")
axes[1].set(ylim=(-0.1, 4.9))
for ax in axes:
    ax.set(xlabel="seconds", xlim=(0, 10))
    ax.legend(loc="upper right", ncols=2, fontsize=12)
plotting.save(
    fig,
    "01_held_input",
    "Left: a smooth wave and the staircase that holds its samples. Right: the tank under both. The "
    "dots that ZOH computes lie exactly on the curve of the held input, and beside the curve of "
    "the smooth one.",
)

# %% [markdown]
# **When $A$ has no inverse.** Take the friction and the spring away. What is left is a body that
# moves freely, $q' = v$, $v' = x$, and its $A$ is singular: equation 1.5 cannot be evaluated. But
# nothing is wrong with a falling body. The way out: a held input is one more number of
# the state, one that does not change.
#
# $$\begin{bmatrix} h \\ x \end{bmatrix}' = \begin{bmatrix} A & B \\ 0 & 0 \end{bmatrix}
#   \begin{bmatrix} h \\ x \end{bmatrix} \quad\Longrightarrow\quad
#   \exp\left(\Delta \begin{bmatrix} A & B \\ 0 & 0 \end{bmatrix}\right) =
#   \begin{bmatrix} \bar A & \bar B \\ 0 & 1 \end{bmatrix}. \tag{1.6}$$
#
# One exponential, no division. This is how the package does it.

# %%
A, B = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([0.0, 1.0])
whole = torch.linalg.matrix_exp(3.0 * torch.tensor([[0.0, 1, 0], [0, 0, 1], [0, 0, 0]]))
A_bar, B_bar = discretize_zoh(A, B, 3.0)
check("equation 1.6 = discretize_zoh", torch.cat([A_bar, B_bar[:, None]], 1), whole[:2])
check("at t = 3: place t²/2, speed t", B_bar, torch.tensor([4.5, 3.0]))
assert torch.linalg.det(A) == 0  # so that equation 1.5 cannot be evaluated

# %% [markdown]
# ## 3 · The bilinear rule
#
# ZOH needs a matrix exponential. The first S4 avoided it. Integrate equation 1.3 over one step, and
# take for the mean of $Ah$ the average of its two ends, which is the *trapezoidal rule*:
#
# $$h_k - h_{k-1} = \tfrac{\Delta}{2}A\,(h_{k-1} + h_k) + \Delta B\,x_k \tag{1.7}$$
#
# Solve for $h_k$:
#
# $$\bar A = \big(I - \tfrac{\Delta}{2}A\big)^{-1}\big(I + \tfrac{\Delta}{2}A\big), \qquad
#   \bar B = \big(I - \tfrac{\Delta}{2}A\big)^{-1}\Delta B. \tag{1.8}$$

# %%
A, B, C = spring
identity = torch.eye(2)
A_bar = torch.linalg.solve(identity - dt / 2 * A, identity + dt / 2 * A)
B_bar = torch.linalg.solve(identity - dt / 2 * A, dt * B)
for name, ours, theirs in zip(
    ("Ā", "B̄"), (A_bar, B_bar), discretize_bilinear(A, B, dt), strict=True
):
    check(f"equation 1.8 = discretize_bilinear, {name}", ours, theirs)
h_0, x_1 = random(2, seed=1), 0.7
h_1 = A_bar @ h_0 + B_bar * x_1
check("it solves equation 1.7", h_1 - h_0, dt / 2 * A @ (h_0 + h_1) + dt * B * x_1)
_ = must_differ("bilinear is not ZOH", A_bar, discretize_zoh(A, B, dt)[0], at_least=1e-2)

# %% [markdown]
# What has happened to the exponential? For a single rate, with $z = a\Delta$, the rule puts a
# fraction in the place of $e^z$, a so-called Padé approximation:
#
# $$e^z \approx \frac{1 + z/2}{1 - z/2} = 1 + z + \frac{z^2}{2} + \frac{z^3}{4} + \dots, \qquad
#   e^z = 1 + z + \frac{z^2}{2} + \frac{z^3}{6} + \dots \tag{1.9}$$
#
# They part at the cube, by $z^3/12$. And there is a still cheaper rule, *Euler's*, that stops after
# $1 + z$. How they behave when the step is not small:

# %%
z = torch.linspace(0, -6, 61)
factors = {"$e^z$ (ZOH)": z.exp(), "bilinear": (1 + z / 2) / (1 - z / 2), "$1 + z$ (Euler)": 1 + z}
assert (factors["bilinear"].abs() <= 1).all() and factors["$1 + z$ (Euler)"].min() == -5
small = torch.tensor(-1e-3)
error = (1 + small / 2) / (1 - small / 2) - small.exp()
check("bilinear - exp = z³/12, for a small z", error / (small**3 / 12), torch.tensor(1.0), tol=2e-3)

fig, ax = plotting.figure(size=(9, 4.2))
ax.axhspan(-1, 1, color=plotting.QUIET, alpha=0.2, lw=0)
for (name, factor), style in zip(factors.items(), ("-", "--", ":"), strict=True):
    ax.plot(-z, factor, style, label=name)
ax.text(5.95, 0.7, "fades", color=plotting.INK, ha="right")
ax.text(5.95, -1.5, "grows, with a change of sign every step", color=plotting.INK, ha="right")
ax.set(xlabel="rate of decay × step, −z", ylabel="factor per step", ylim=(-2.1, 1.6))
ax.legend(loc="lower left")
plotting.save(
    fig,
    "01_factors",
    "The factor by which a decaying state is multiplied in one step, against the rate of decay "
    "times the step. The exponential falls to zero. The bilinear rule falls through zero to -0.5 "
    "but stays above -1. Euler's rule is a straight line that leaves the band between -1 and 1 "
    "at 2.",
)

# %% [markdown]
# Under the bilinear rule, what decays still decays, at any step (exercise 3). Under Euler's rule,
# above a rate times step of 2, a tank that empties becomes an explosion.
#
# **Error against the step.** Two questions hide here that are often taken for one.
#
# *First: the input really is held*, here for 0.8 seconds at a time, and we cut each hold into
# smaller and smaller steps. ZOH has no error to begin with. The bilinear rule has one that falls to
# a quarter when the step is halved (*second order*), Euler's to a half (*first order*).


# %%
def discretize_euler(A, B, dt):
    return torch.eye(len(B)) + dt * A, dt * B


def error_of(rule, samples, dt, truth):
    """The distance of the last state to the truth, for the spring."""
    A_bar, B_bar = rule(*spring[:2], dt)
    h = torch.zeros(2)
    for x_k in samples:
        h = A_bar @ h + B_bar * x_k
    return (h - truth).norm().item()


def falls_by(errors):
    return errors[-2] / errors[-1]


rules = {"ZOH": discretize_zoh, "bilinear": discretize_bilinear, "Euler": discretize_euler}
held, hold, cuts = random(5, seed=2), 0.8, (4, 8, 16, 32, 64, 128)
truth = torch.zeros(2)
for x_k in held:
    truth = integrate(*spring[:2], lambda t, x_k=x_k: x_k, truth, 0.0, hold, steps=300)
of_held = {
    name: [error_of(rule, held.repeat_interleave(m), hold / m, truth) for m in cuts]
    for name, rule in rules.items()
}
assert max(of_held["ZOH"]) < 1e-10
assert abs(falls_by(of_held["bilinear"]) - 4) < 0.05 and abs(falls_by(of_held["Euler"]) - 2) < 0.1
print("half the step, held input: ZOH exact at any step; bilinear a quarter, Euler a half")

# %% [markdown]
# *Second: the input is smooth*, and all we have are its samples. Now ZOH has an error too, that of
# the staircase. If each sample is taken in the *middle* of its step, both rules are of second
# order; if at its beginning or its end, both are of first order. For small steps, where one samples
# matters more than by which rule.

# %%
truth = integrate(*spring[:2], smooth, torch.zeros(2), 0.0, 5 * hold, steps=2000)
of_smooth = {}
for place, name in ((0.5, "middle"), (0.0, "beginning"), (1.0, "end")):
    for rule in ("ZOH", "bilinear"):
        errors = []
        for m in cuts:
            samples = [smooth((k + place) * hold / m) for k in range(5 * m)]
            errors.append(error_of(rules[rule], samples, hold / m, truth))
        of_smooth[rule, name] = errors
        assert abs(falls_by(errors) - (4 if name == "middle" else 2)) < 0.2
print("half the step, smooth input, both rules: sampled in the middle a quarter, else a half")

# %%
steps = [hold / m for m in cuts]
fig, axes = plotting.figure(1, 2, size=(12, 4.8))
for name, marker, color in (("Euler", "^", 2), ("bilinear", "s", 1)):
    line = dict(marker=marker, color=plotting.COLORS[color])
    axes[0].loglog(steps, of_held[name], label=name, **line)
axes[0].text(0.0065, 6e-7, "ZOH: below 1e-10", color=plotting.COLORS[0])
axes[0].set_title("the input is held")
for (rule, place), errors in of_smooth.items():
    if place == "end":
        continue  # nearly the same line as for the beginning
    line = dict(marker="so"[rule == "ZOH"], color=plotting.COLORS[rule == "bilinear"])
    style = "-" if place == "middle" else "--"
    axes[1].loglog(steps, errors, style, label=f"{rule}, {place}", **line)
axes[1].set_title("the input is smooth, and sampled")
for ax in axes:
    ax.set(xlabel="step in seconds", ylim=(3e-7, 20))
    ax.set_xticks(steps[::-1], [f"1/{m * 5 // 4}" for m in cuts[::-1]])
    ax.minorticks_off()
    ax.legend(loc="upper left", fontsize=12, ncols=2)
axes[0].set_ylabel("error of the state after 4 s")
plotting.save(
    fig,
    "01_error_against_step",
    "Error against step, both logarithmic. Left, a held input: Euler's error falls with slope 1, "
    "the bilinear one with slope 2, ZOH has none. Right, a sampled smooth input: ZOH and the "
    "bilinear rule fall in parallel, with slope 2 where the samples are taken in the middle of "
    "their steps, and with slope 1 where they are taken at the beginnings.",
)

# %% [markdown]
# ## 4 · One map, two ways to compute it
#
# From here on the input is held, the step is fixed, and $\bar A$, $\bar B$ are given. By hand, with
# one number of state, $\bar A = 0.5$ and $\bar B = C = 1$:

# %%
h, y = 0.0, []
for k, x_k in enumerate((1.0, 2.0, 0.0, 3.0)):
    h = 0.5 * h + x_k
    y.append(h)
    print(f"k = {k}   x = {x_k:.0f}   h = y = {h:.3f}")
assert y == [1.0, 2.5, 1.25, 3.625]

# %% [markdown]
# **Unroll it.** Put the line for $h_{k-1}$ into the line for $h_k$, and go on until $h_{-1} = 0$:
#
# $$y_0 = C\bar B x_0, \quad y_1 = C\bar A\bar B x_0 + C\bar B x_1, \quad
#   y_2 = C\bar A^2\bar B x_0 + C\bar A\bar B x_1 + C\bar B x_2, \;\dots \tag{1.10}$$
#
# A sample of $i$ steps ago arrives with the factor $C\bar A^i\bar B$, whichever step it is now. So
# the outputs are a *convolution* of the input with one list of numbers, the *kernel*:
#
# $$y_k = \sum_{i=0}^{k} K_i\,x_{k-i}, \qquad K_i = C\,\bar A^i\,\bar B. \tag{1.11}$$
#
# $y_3$ above is $1 \cdot 3 + 0.5 \cdot 0 + 0.25 \cdot 2 + 0.125 \cdot 1$. The kernel is what one
# single 1, and then nothing, makes the system say: its *impulse response*. For the spring, the
# three lines that are equation 1.11:

# %%
l = 60
A, B, C = spring
A_bar, B_bar = discretize_zoh(A, B, 0.1)
x = random(l, seed=3)
y = ssm_recurrent(A_bar, B_bar, C, x[None])[0]

powers = [torch.linalg.matrix_power(A_bar, i) for i in range(l)]
K = torch.stack([C @ power @ B_bar for power in powers])
by_sum = torch.stack([K[: k + 1].flip(0) @ x[: k + 1] for k in range(l)])

check("convolution = recurrence", by_sum, y)
check("ssm_kernel = equation 1.11", ssm_kernel(A_bar, B_bar, C, l), K)
impulse = F.one_hot(torch.tensor(0), l).double()
check("the kernel is the answer to one 1", ssm_recurrent(A_bar, B_bar, C, impulse[None])[0], K)
_ = must_differ("kernel not turned round",
                torch.stack([K[: k + 1] @ x[: k + 1] for k in range(l)]), y)  # fmt: skip

# %% [markdown]
# As a matrix, $y = Tx$ with $T_{ks} = K_{k-s}$ and zeros above the diagonal: the same numbers along
# every diagonal (a *Toeplitz* matrix). Chapter 03 starts from such a matrix.

# %%
place = torch.arange(l)[:, None] - torch.arange(l)
T = torch.where(place >= 0, K[place.clamp(min=0)], 0.0)
check("y = T x", T @ x, y)

fig, axes = plotting.figure(1, 2, size=(12, 4.6))
axes[0].axhline(0, color=plotting.QUIET, linewidth=0.8)
axes[0].vlines(range(l), 0, K, color=plotting.COLORS[0], linewidth=1.6)
axes[0].plot(K, "o", markersize=5)
axes[0].set(xlabel="steps i since the sample", title="the kernel $K_i$ of the spring")
plotting.heatmap(axes[1], T, title="as a matrix: $T_{ks} = K_{k-s}$")
axes[1].set(xlabel="sample s", ylabel="output k")
plotting.save(
    fig,
    "01_kernel",
    "Left: the kernel of the spring, a wave that fades over 60 steps. Right: the lower triangular "
    "matrix that has it in every column, starting at the diagonal: stripes parallel to the "
    "diagonal.",
)

# %% [markdown]
# What is gained? The recurrence takes $l$ steps, each waiting for the one before. In the sum no
# term waits for another, but there are $l(l+1)/2$ of them. The *fast Fourier transform* (FFT)
# brings it down to about $l \log_2 l$. The reason in two lines: read the sequences as the
# coefficients of two polynomials; a convolution is the product of the polynomials; and a product is
# cheap where both are known by their *values*, for values are multiplied one by one. The FFT goes
# from coefficients to values, at points on the unit circle, and back.
#
# There is a trap. On the circle $z^{\text{size}} = 1$, so what would come after the last
# coefficient comes round to the first, like hours after twelve. With `size` $= l$ the end of the
# text leaks into its beginning. With $2l$ places, half of them zeros, there is room:


# %%
def by_fft(K, x, size):
    product = torch.fft.rfft(K, size) * torch.fft.rfft(x, size)
    return torch.fft.irfft(product, size)[: len(x)]


check("FFT with 2 l places = recurrence", by_fft(K, x, 2 * l), y)
check("ssm_convolution = recurrence", ssm_convolution(K, x[None])[0], y)
check_gradients(
    "convolution = recurrence",
    lambda *t: ssm_convolution(ssm_kernel(*t[:3], l), t[3]),
    ssm_recurrent,
    [A_bar, B_bar, C, x[None]],
)
wrapped = by_fft(K, x, l)
_ = must_differ("FFT with l places: the end wraps round", wrapped, y, at_least=0.01)
tail = torch.stack([K[k + 1 :].flip(0) @ x[k + 1 :] for k in range(l)])
check("what is too much = the future, one round earlier", wrapped - y, tail)

for length in (1_024, 65_536):
    terms, fft = length * (length + 1) // 2, length * int(math.log2(length))
    print(f"l = {length:6,}: {terms:13,} terms in the sum, l log l = {fft:9,}")

# %% [markdown]
# The planted mistake is a leak of the future, and with a kernel that fades and a long text a small
# one: `y` looks right except at its beginning.
#
# So one map has two forms. *In training*, all inputs are known: convolve. *In use*, the next input
# depends on the last output: step the recurrence, which costs the same at the millionth token as at
# the first. This is the table at the top, and it needed nothing but the constancy of $\bar A$,
# $\bar B$ and $C$.
#
# ## 5 · A memory worth having
#
# Which $A$? Trained from a random start, such models were bad at remembering: the modes of a random
# matrix fade or explode, and a kernel that has faded passes on neither signals nor gradients.
# *HiPPO* (Gu et al., 2020) asks first what a good memory would be, and finds the $A$ afterwards.
#
# **The wish.** At every time $t$, the $n$ numbers of the state shall be the best summary of the
# whole input so far, from 0 to $t$. *Summary*: the coefficients of a polynomial of degree below
# $n$. *Best*: the one that is closest to the input, in the mean square.
#
# Stretch the past over $[0, 1]$: place 0 is the beginning, place 1 is now. Let $p_0, p_1, p_2,
# \dots$ be the *Legendre polynomials* there, $p_i$ of degree $i$, scaled so that the mean of $p_i
# p_j$ over $[0, 1]$ is 1 for $i = j$ and 0 otherwise. In such a basis the best coefficients are
# plain averages:
#
# $$c_i(t) = \frac1t \int_0^t x(s)\; p_i(s/t)\; ds. \tag{1.12}$$

# %%
n = 8
p = [math.sqrt(2 * i + 1) * Legendre.basis(i, domain=[0, 1]) for i in range(n)]
nodes, weights = leggauss(n)  # Gauss's rule: exact for what comes below
u, w = (nodes + 1) / 2, torch.tensor(weights / 2)


def at(functions, places):
    """The values of each function at the places: (functions, places)."""
    return torch.tensor(np.stack([f(np.asarray(places)) for f in functions]))


values = at(p, u)
check("means of products p_i p_j", (values * w) @ values.T, torch.eye(n))

# %% [markdown]
# **The equation.** When time goes on, how do the averages change? Differentiate equation 1.12. The
# factor $1/t$ gives $-c_i/t$. The upper end of the integral gives $x(t)\,p_i(1)/t$: the newest
# input comes in. And the stretching, since the place $s/t$ of every old sample moves towards 0,
# gives the mean of $-x \cdot u\,p_i'(u)$, over $t$. Now $u\,p_i'(u)$ is a polynomial of degree $i$
# again, so it is a sum $\sum_{j \le i} G_{ij}\,p_j(u)$, and its mean with $x$ is $\sum_j
# G_{ij}\,c_j$. Together:
#
# $$c'(t) = \frac1t\,\big(A\,c(t) + B\,x(t)\big), \qquad A = -(I + G), \qquad B_i = p_i(1).
#   \tag{1.13}$$

# %%
slopes = at([p_i.deriv() for p_i in p], u) * torch.tensor(u)  # u p_i'(u)
G = (slopes * w) @ values.T
A, B = hippo_legs(n)
check("A = -(I + G): the HiPPO matrix", A, -(torch.eye(n) + G))
check("B = p_i(1)", B, at(p, [1.0])[:, 0])
check("G has no entry above the diagonal", G.triu(1), torch.zeros(n, n))
_ = must_differ("the stretching forgotten", -torch.eye(n), A)

# %% [markdown]
# So the matrix is no magic: it is the derivative of "average over all of the past". Its entries:
# $-\sqrt{(2i+1)(2j+1)}$ below the diagonal, $-(i+1)$ on it, zero above.
#
# For samples, hold the input again. With $\tau = \log t$ for the clock, the $1/t$ disappears
# ($dc/d\tau = t\,c'$), and the step from sample $k$ to sample $k + 1$ takes $\log\frac{k+1}{k}$ on
# that clock. So ZOH is exact here too. This is `legs_memory`; the truth to compare with are the
# averages of equation 1.12, each $p_i$ integrated over the piece of the past that a sample covers:

# %%
length = 240
edges = torch.arange(length + 1) / length
signal = torch.sin(2 * math.pi * 3 * edges[1:] ** 2) + (edges[1:] > 0.62)  # a sweep and a jump
pieces = at([p_i.integ() for p_i in p], edges).diff(dim=1)  # (n, length)
memory = legs_memory(signal[None], 64)[0]  # (length, 64)

check("memory = averages of the past", memory[-1, :n], pieces @ signal)
check("the first coefficients know nothing of how many follow",
      legs_memory(signal[None], n)[0], memory[:, :n])  # fmt: skip
held_longer = legs_memory(signal[:20].repeat_interleave(3)[None], n)[0, 2::3]
check("no unit of time: every sample three times, same memory", held_longer, memory[:20, :n])

# %% [markdown]
# *The best* can be tested as well. If $c$ is the best, then moving it by any $\delta$ raises the
# mean squared distance, and for an orthonormal basis by exactly $|\delta|^2$:


# %%
def distance(c):
    """Mean square of signal minus polynomial, exact: Gauss's rule inside every held piece."""
    past = ((torch.arange(length)[:, None] + torch.tensor(u)) / length).flatten()
    gap = signal.repeat_interleave(n) - legs_reconstruct(c, past)
    return (gap.square() * (w.repeat(length) / length)).sum()


for seed in range(3):
    delta = 0.1 * random(n, seed=seed)
    moved, best = distance(memory[-1, :n] + delta), distance(memory[-1, :n])
    check("moved off the best: farther by |δ|²", moved - best, delta @ delta)

# %% [markdown]
# What does it remember? Here are the reconstructions of a signal with a jump, at three times, from
# 8 and from 64 numbers. The past is never cut off; when more of it has to fit into the same
# numbers, all of it becomes a little coarser.

# %%
fig, axes = plotting.figure(1, 3, size=(12, 4.4))
for ax, now in zip(axes, (80, 160, 240), strict=True):
    past = torch.linspace(0, 1, 241)
    ax.plot(edges[1:], signal, color=plotting.QUIET, linewidth=1.6)
    for size, color, style in ((8, 1, "--"), (64, 0, "-")):
        line = legs_reconstruct(memory[now - 1, :size], past)
        ax.plot(past * now / length, line, style, color=plotting.COLORS[color], lw=2,
                label=f"{size} numbers")  # fmt: skip
    ax.axvline(now / length, color=plotting.INK, linewidth=1)
    ax.set(title=f"at t = {now}", ylim=(-1.4, 3.1), xlim=(-0.02, 1.02), xlabel="time")
    ax.set_xticks([0, 1 / 3, 2 / 3, 1], ["0", "80", "160", "240"])
axes[0].legend(loc="upper right")

errors = [
    (legs_reconstruct(memory[-1, :s], (edges[1:] + edges[:-1]) / 2) - signal) for s in (8, 64)
]
rms = [e.square().mean().sqrt().item() for e in errors]
assert rms[0] > 0.25 and rms[1] < 0.12
plotting.save(
    fig,
    "01_hippo",
    "A signal that swings faster and faster and has a jump, and its reconstruction at three times, "
    "each from the beginning up to a line that marks now. With 8 numbers the slow part is "
    "followed and the fast part is not; with 64 numbers all but the edge of the jump.",
)
print("240 samples from 64 numbers: root mean square error under 0.12; from 8: over 0.25")

# %% [markdown]
# **S4 leaves out the $1/t$.** It takes HiPPO's $A$ and $B$ in the plain equation $c' = Ac + Bx$,
# with a fixed step. What is remembered then? On the clock $\tau = \log t$ the equation was that
# plain one already, and the place $s/t$ is $e^{-(\tau - \tau_s)}$. So an input of *age* $\tau$
# enters coefficient $i$ with the weight
#
# $$\big(e^{\tau A} B\big)_i = p_i(e^{-\tau})\; e^{-\tau}. \tag{1.14}$$
#
# The same polynomials, on a past that is squeezed: the last moment in detail, what is long gone
# crowded together near 0, and fading.

# %%
ages = torch.linspace(0, 6, 121)
kernels = torch.stack([torch.linalg.matrix_exp(age * A) @ B for age in ages], dim=1)  # (n, ages)
squeezed = at(p, torch.exp(-ages)) * torch.exp(-ages)
check("kernels of HiPPO's A = squeezed polynomials", kernels, squeezed)

places = torch.linspace(0, 1, 121)
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
for i, style in enumerate(("-", "--", "-.", ":")):
    axes[0].plot(1 - places, at(p, places)[i], style, label=f"i = {i}")
    axes[1].plot(ages, kernels[i], style)
axes[0].set(xlabel="age, as a share of the time so far", title="HiPPO: all of the past alike")
axes[1].set(xlabel="age, in units of time", title="S4: without 1/t, the past fades")
axes[0].legend(ncols=2)
for ax in axes:
    ax.axhline(0, color=plotting.QUIET, linewidth=0.8)
plotting.save(
    fig,
    "01_hippo_kernels",
    "Left: the first four Legendre polynomials over the age as a share of the time so far; they "
    "weigh the beginning as much as the end. Right: the same polynomials squeezed onto ages from "
    "0 to 6 and fading exponentially.",
)

# %% [markdown]
# **Diagonal is enough.** A full $A$ is expensive: $n^2$ products per step, and matrix powers for
# the kernel. If $A = V \Lambda V^{-1}$ with a diagonal $\Lambda$, the change of coordinates can go
# into $B$ and $C$, and each entry of the state lives for itself, as one fading tone. HiPPO's $A$
# can be diagonalised on paper but not in a computer: its $V$ is so skew that the digits are lost.
# S4's trick: $A$ plus a matrix of *rank one* is a diagonal $-\frac12$ plus an antisymmetric matrix,
# whose eigenvectors are perpendicular.

# %%
for size in (8, 16, 32):
    A, B = hippo_legs(size)
    skew = torch.linalg.cond(torch.linalg.eig(A).eigenvectors)
    normal = A + torch.outer(B, B) / 2
    rates, vectors = torch.linalg.eig(normal)
    check(f"n = {size}: all rates have the real part -1/2", rates.real, torch.full((size,), -0.5))
    assert torch.linalg.cond(vectors) < 1.001 and skew > 1e4
    lost = "some" if skew < 1e8 else "most" if skew < 1e14 else "all"
    print(f"   digits lost by diagonalising A itself: {lost}; with the rank-one part added: none")

# %% [markdown]
# S4 carries the rank-one part along with some effort. *S4D* drops it and keeps the diagonal: $n/2$
# complex rates, each with its conjugate, so that the output is real. It turned out to be nearly as
# good. With the rates $\lambda_k = -\frac12 + \mathrm{i}\omega_k$ and $B = 1$, everything becomes a
# formula for one number, applied to each:
#
# $$\bar A_k = e^{\Delta\lambda_k}, \qquad
#   \bar B_k = \frac{e^{\Delta\lambda_k} - 1}{\lambda_k}, \qquad
#   K_i = 2\,\mathrm{Re} \sum_k C_k\,\bar B_k\,\bar A_k^{\,i}. \tag{1.15}$$
#
# `S4D` is a layer of $d$ such models, one per channel, each with its own step $\Delta$, its own
# rates and its own $C$, and with a weight $D$ for a direct path from $x$ to $y$. All of these are
# learned.
#
# > "We can take H copies of the 1D recurrent representation" — L22, "SSM as a Neural Network Layer"

# %%
_ = torch.manual_seed(0)
layer = S4D(3, d_state=8)  # three channels, four tones each
rates = torch.complex(-layer.A_log.exp(), layer.A_imag)  # (d, n/2)
z = layer.log_dt.exp()[:, None] * rates
C = torch.view_as_complex(layer.C)
K = 2 * (C * torch.expm1(z) / rates * z.exp() ** torch.arange(50)[:, None, None]).sum(-1).real.T
with torch.no_grad():
    check("equation 1.15 = the kernel of S4D", layer.kernel(50), K)

A = torch.tensor([[-0.5, -math.pi], [math.pi, -0.5]])  # tone 1 of channel 0, as a real pair
A_bar, B_bar = discretize_zoh(A, torch.tensor([1.0, 0.0]), layer.log_dt[0].exp().item())
tone = ssm_kernel(A_bar, B_bar, 2 * torch.stack([C[0, 1].real, -C[0, 1].imag]).detach(), 50)
one = 2 * (C[0, 1] * torch.expm1(z[0, 1]) / rates[0, 1] * z[0, 1].exp() ** torch.arange(50)).real
check("one complex tone = a spring of two real numbers", one.detach(), tone)

# %% [markdown]
# ## 6 · Train as a convolution, run as a recurrence, at any rate
#
# The layer has both forms: `layer(x)` convolves, `layer.step(x_k, state)` takes one sample. The
# state is $d \cdot n/2$ complex numbers, whatever the length:

# %%
x = random(2, 40, 3, seed=4)  # (b, l, d)
with torch.no_grad():
    state, outputs = layer.initial_state(2), []
    for x_k in x.unbind(1):
        y_k, state = layer.step(x_k, state)
        outputs.append(y_k)
    check("40 steps of the recurrence = one convolution", torch.stack(outputs, 1), layer(x))
print("state after 40 samples:", tuple(state.shape), "complex numbers")

# %% [markdown]
# And here is what most sequence models do not have. $A$ is a rate *per unit of time*, and only
# $\Delta$ knows how far apart the samples are. If they come half as often, double $\Delta$:
#
# > "As well, they elegantly transition between different granularities of representation for the
# > input (e.g. sound at 16KHz vs. 8KHz)" — L22, "Motivation"
#
# How good is that? A sample that is held over two steps does in both of them what it does in one,
# so the kernel at the double step is, exactly, the sum of neighbours in the old one:
#
# $$K_i(2\Delta) = K_{2i}(\Delta) + K_{2i+1}(\Delta). \tag{1.16}$$
#
# What is left is the difference between a signal and its staircase, small for what changes slowly:

# %%
with torch.no_grad():
    fine = layer.kernel(80)
    check("equation 1.16", layer.kernel(40, rate=2), fine[:, ::2] + fine[:, 1::2])
    _ = must_differ("every second entry of the kernel", fine[:, ::2], layer.kernel(40, rate=2))

    for period in (64, 128, 256):
        wave = torch.sin(2 * math.pi * torch.arange(1024) / period)[None, :, None].expand(1, -1, 3)
        full = layer(wave)[:, 1::2]
        errors = [
            ((layer(wave[:, 1::2], rate=rate) - full).norm(dim=1) / full.norm(dim=1)).max()
            for rate in (2, 1)
        ]
        assert errors[0] < 0.05 and errors[1] > 0.15
print("every second sample, waves of 64 to 256 samples: with rate=2 off by less than 5 %,")
print("                                                without it by more than 15 %")

# %% [markdown]
# Now with learning. The task: name the pitch of a short damped tone in noise. Eight pitches, from
# 250 Hz upwards, four to the octave; each signal lasts 32 milliseconds, begins at a random moment,
# and fades at a random rate. The model sees only samples at 16 kHz: 512 per signal.


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


class ToneListener(torch.nn.Module):
    """A filter bank that is learned: how strongly does each channel of an S4D layer answer?"""

    def __init__(self, d=24):
        super().__init__()
        self.encoder = torch.nn.Linear(1, d)
        self.s4d = S4D(d, d_state=16)
        self.decoder = torch.nn.Linear(d, 8)

    def forward(self, wave, rate=1.0):
        y = self.s4d(self.encoder(wave[..., None]), rate=rate)
        return self.decoder(F.gelu(y).mean(1))  # a mean over time does not depend on the rate


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


def named_as(model, waves, pitches, rate):
    """How often each pitch is named as each: (8, 8), rows sum to 1."""
    with torch.no_grad():
        named = model(waves, rate).argmax(-1)
    table = torch.zeros(8, 8).index_put((pitches, named), torch.tensor(1.0), accumulate=True)
    return table / table.sum(1, keepdim=True)


def share_right(table):
    return table.diagonal().mean().item()


listener, generator = train_on_tones()
half = tones(400, generator, khz=8.0)
at_16 = share_right(named_as(listener, *tones(400, generator), rate=1))
at_8 = share_right(named_as(listener, *half, rate=2))
not_told = share_right(named_as(listener, *half, rate=1))
assert at_16 > 0.95 and at_8 > 0.9 and not_told < 0.25
print("trained at 16 kHz.  16 kHz: over 95 % right.  8 kHz with rate=2: over 90 %, no training.")
print("8 kHz, and nobody tells the model: under 25 % right (chance: 12.5 %)")

# %% [markdown]
# What goes wrong in the last case is no accident. With half as many samples per swing, each tone
# sounds an *octave* higher to a model that counts samples; four to the octave, so it should be
# named four pitches too high, and the upper four are outside of what the model knows:

# %%
told, untold = named_as(listener, *half, rate=2), named_as(listener, *half, rate=1)
octave_up = untold[:4].diagonal(4).mean()
assert octave_up > 0.7
print("of the lower four pitches, named exactly an octave too high: over 70 %")

# %%
record = json.loads(Path("../figures/records/01_sampling_rate.json").read_text())
fig, axes = plotting.figure(1, 3, size=(12, 4.4))
for ax, name in zip(axes, ("rate = 2", "not told"), strict=False):
    table = torch.tensor(record["at 8 kHz"][name])
    plotting.heatmap(ax, table, title=f"8 kHz, {name}", signed=False, limit=1.0, colorbar=False)
    ax.set_xticks(range(8), record["hertz"], rotation=90)
    ax.set_yticks(range(8), record["hertz"])
    ax.set(xlabel="named as, in Hz")
axes[0].set_ylabel("pitch in Hz")
for name, marker in (("told", "o"), ("not told", "s")):
    axes[2].plot(record["khz"], record["right"][name], marker=marker, label=name)
axes[2].axhline(1 / 8, color=plotting.QUIET, linewidth=1)
axes[2].text(33, 0.15, "chance", color=plotting.QUIET, fontsize=12)
axes[2].set_xscale("log")
axes[2].set_xticks([4, 8, 16, 32], ["4", "8", "16", "32"])
axes[2].minorticks_off()
axes[2].set(xlabel="kHz", title="named right, of all", ylim=(0, 1.05))
axes[2].legend(loc="center left")
plotting.save(
    fig,
    "01_sampling_rate",
    "Two tables of pitch against named pitch at 8 kHz, for a model trained at 16 kHz. With the "
    "rate given, nearly all on the diagonal; without it, the lower four pitches lie four places to "
    "the right of the diagonal, an octave too high, and the upper four are named as one of the two "
    "highest. Beside it, the share named right against the sampling rate: with the rate above 0.95 "
    "from 4 to 44 kHz; without it a narrow peak at 16 kHz.",
)

# %% [markdown]
# (From a record, `python book/records.py 01_sampling_rate`: medians of five models, trained at 16
# kHz with this very function.) For S4 on spoken words, L22 shows 98.32 % at 16 kHz and 96.30 % at 8
# kHz ("S4 Results: Train and test on different input granularities").
#
# At the end of training the model is a recurrence as well, and can listen live, sample by sample:

# %%
live, waves = listener.double(), tones(4, generator)[0].double()
with torch.no_grad():
    state, heard = live.s4d.initial_state(4), torch.zeros(4, 24)
    for sample in waves.unbind(1):
        y_k, state = live.s4d.step(live.encoder(sample[:, None]), state)
        heard += F.gelu(y_k)
    check("512 samples one by one = one pass", live.decoder(heard / 512), live(waves))

# %% [markdown]
# ## 7 · What a fixed kernel cannot do
#
# A tone listener needs the same filter at every moment. A reader does not. "Keep the name, skip the
# filler" treats two tokens differently *because of what they are*. So far, $\Delta$, $B$ and $C$
# are the same for all samples, and what a sample does to a later output depends on nothing but the
# distance.
#
# Here is a task in its plainest form. Every token is a pair $(\text{value}, \text{mark})$, and the
# output shall be *the last value that was marked*. A state that can do it needs two modes, keep and
# replace. We have a knob for that, which is the step size: with $\Delta_t = 0$ no time passes for
# the state, so it keeps; with a very large $\Delta_t$ everything old fades, so it is replaced. So
# let the *token* turn the knob. That is all there is to *selection*:
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


value, mark = random(1, 12, seed=5), torch.zeros(1, 12)
mark[0, [2, 5, 9]] = 1
tokens = torch.stack([value, mark], -1)
last = torch.tensor([0] * 2 + [value[0, 2]] * 3 + [value[0, 5]] * 4 + [value[0, 9]] * 3)
check("the last marked value, by selection", keep_last_marked(tokens)[0], last)
_ = must_differ("by a tank", leaky(tokens)[0], last)

# %% [markdown]
# **No sum.** The convolution rests on a law, called *superposition*: the answer to a sum of inputs
# is the sum of the answers. One kernel is enough because every input is a sum of single samples.
# The selective model breaks the law, on purpose: a second marked value does not *add* to the first,
# it *replaces* it.

# %%
first, second = torch.zeros(2, 1, 12, 2)
first[0, 2] = torch.tensor([1.0, 1.0])  # value 1, marked, at token 2
second[0, 7] = torch.tensor([0.6, 1.0])  # value 0.6, marked, at token 7
both = first + second
one, two = random(2, 1, 12, 2, seed=6)
check("tank: answer to the sum = sum of the answers", leaky(both), leaky(first) + leaky(second))
check("and so for any two texts", leaky(one + two), leaky(one) + leaky(two))
answers = keep_last_marked(first) + keep_last_marked(second)
_ = must_differ("superposition, if selective", answers, keep_last_marked(both), at_least=0.5)

fig, axes = plotting.figure(1, 2, size=(12, 4.2))
for ax, model, title in (
    (axes[0], leaky, "time-invariant: a tank"),
    (axes[1], keep_last_marked, "selective: keep the last marked"),
):
    total = model(first) + model(second)
    ax.plot(total[0], color=plotting.QUIET, lw=8, alpha=0.4, label="sum of the two")
    for text, name, style in ((first, "1 at token 2", ":"), (second, "0.6 at token 7", "--")):
        ax.plot(model(text)[0], style, label=name)
    ax.plot(model(both)[0], "o-", color=plotting.INK, lw=1.4, ms=5, label="both in one text")
    ax.set(xlabel="token", title=title, ylim=(-0.08, 2.4))
    ax.legend(loc="upper left", ncols=2)
plotting.save(
    fig,
    "01_no_sum",
    "Answers to a 1 at token 2, to a 0.6 at token 7, their sum, and the answer to both together. "
    "For the tank the last two are the same line. For the selective model the sum climbs to 1.6 at "
    "token 7, and the answer to both drops to 0.6.",
)

# %% [markdown]
# **No kernel.** For a *given* text the gates are given numbers, and equation 1.17 is linear in the
# values: $y = Mx$. In the time-invariant model this matrix has one number per diagonal. In the
# selective one it depends on the text *between* $s$ and $t$. There is a matrix for every text, and
# no list of numbers from which all of them could be made.


# %%
def matrix_of(model, mark):
    """M of y = M x for given marks: one column per token."""
    columns = torch.eye(len(mark))
    return model(torch.stack([columns, mark.expand(len(mark), -1)], -1)).T


other = torch.zeros(12)
other[[1, 4, 6, 10]] = 1
fixed = matrix_of(leaky, other)
chosen = [matrix_of(keep_last_marked, m) for m in (mark[0], other)]


def is_toeplitz(M):
    return all((d := M.diagonal(-i)).max() - d.min() < 1e-12 for i in range(len(M)))


assert is_toeplitz(fixed) and not any(is_toeplitz(M) for M in chosen)
print("one number per diagonal: tank", is_toeplitz(fixed), "  selective", is_toeplitz(chosen[0]))

fig, axes = plotting.figure(1, 3, size=(12, 4.6))
titles = ("tank: any text", "selective: marks at 2, 5, 9", "selective: at 1, 4, 6, 10")
for ax, M, title in zip(axes, (fixed, *chosen), titles, strict=True):
    plotting.heatmap(ax, M, title=title, signed=False, limit=1.0, colorbar=False)
    ax.set_xlabel("token s")
axes[0].set_ylabel("output t")
plotting.save(
    fig,
    "01_no_kernel",
    "Three lower triangular matrices. The tank's fades evenly away from the diagonal, the same "
    "along each diagonal. The selective model's has a bar below each marked token that ends where "
    "the next marked token begins; other marks, other bars.",
)

# %% [markdown]
# One thing remains: if the *whole text* moves by a step, so do its answers, since the gates look at
# tokens and not at a clock. What is lost is superposition, not the indifference to when the text
# begins.

# %%
later = F.pad(tokens, (0, 0, 1, 0))[:, :-1]
for model in (leaky, keep_last_marked):
    check(f"{model.__name__}: text one later, answers one later",
          model(later), F.pad(model(tokens), (1, 0))[:, :-1])  # fmt: skip

# %% [markdown]
# **The knob is a gate.** In Mamba, $\Delta_t = \mathrm{softplus}(z_t)$, with $z_t$ linear in the
# token and $\mathrm{softplus}(z) = \log(1 + e^z)$, which keeps it positive. For $A = -1$ and $B =
# 1$, ZOH then gives the gate of gated recurrent networks (Mamba, theorem 1), with the sigmoid
# $\sigma(z) = 1/(1 + e^{-z})$:
#
# $$h_t = (1 - g_t)\,h_{t-1} + g_t\,x_t, \qquad g_t = \sigma(z_t). \tag{1.18}$$

# %%
for z in (-4.0, 0.0, 3.0):
    step = F.softplus(torch.tensor(z)).item()
    A_bar, B_bar = discretize_zoh(-torch.ones(1, 1), torch.ones(1), step)
    gate = torch.sigmoid(torch.tensor([z]))
    check(f"z = {z:+.0f}: Ā = 1 - σ(z)", A_bar[0], 1 - gate)
    check(f"z = {z:+.0f}: B̄ = σ(z)", B_bar, gate)

# %% [markdown]
# The selective model of Mamba, also called *S6*, is equation 1.17 for $d$ channels: `x` and `dt`
# (b, l, d), each channel with a diagonal $A$ of its own (d, n), and $B_t$, $C_t$ (b, l, n) shared
# by all channels. As a loop:

# %%
b, l, d, n = 2, 21, 3, 4
x, B, C = random(b, l, d, seed=6), random(b, l, n, seed=7), random(b, l, n, seed=8)
dt, A = random(b, l, d, seed=9).abs() / 4, -torch.arange(1.0, n + 1).expand(d, n)

h, y = torch.zeros(b, d, n), []
for t in range(l):
    decay = torch.exp(dt[:, t, :, None] * A)
    write = dt[:, t, :, None] * B[:, t, None, :] * x[:, t, :, None]
    h = decay * h + write
    y.append((h * C[:, t, None, :]).sum(-1))
y = torch.stack(y, 1)
check("selective_scan = equation 1.17", selective_scan(x, dt, A, B, C), y)
_ = must_differ("step size forgotten in the write", selective_scan(x / dt, dt, A, B, C), y)

# %% [markdown]
# The write is $\Delta_t B_t x_t$ and not ZOH's $\bar B$: Mamba's code takes Euler's rule here. That
# is the last entry in "As printed" below.
#
# ## 8 · The scan lives
#
# Without a kernel there is no FFT. Are we back at $l$ steps, one after the other? No. Linear is
# still linear. One step is the map $h \mapsto a\,h + b$, and two steps in a row are such a map
# again:
#
# $$a_2\,(a_1 h + b_1) + b_2 = (a_2 a_1)\,h + (a_2 b_1 + b_2)
#   \quad\Longrightarrow\quad
#   (a_1, b_1) \bullet (a_2, b_2) = (a_2 a_1,\; a_2 b_1 + b_2). \tag{1.19}$$
#
# Running maps one after the other is *associative*: it does not matter which neighbours are joined
# first. (It is not commutative: the order of the steps does matter.)


# %%
def combine(first, second):
    (a_1, b_1), (a_2, b_2) = first, second
    return a_2 * a_1, a_2 * b_1 + b_2


one, two, three = random(3, 2, 1000, seed=10)  # a thousand pairs (a, b) each
left, right = combine(combine(one, two), three), combine(one, combine(two, three))
check("associative", torch.stack(left), torch.stack(right))
_ = must_differ("but not commutative", combine(two, one)[1], combine(one, two)[1])

# %% [markdown]
# What is associative need not go from left to right; it can go *as a tree*. In round one, each
# token joins with its left neighbour and now stands for two steps. In round two it joins with the
# token two places to the left, and stands for four. After $\lceil \log_2 l \rceil$ rounds every
# token stands for all steps up to itself, and its $b$ is the state (with $h_{-1} = 0$). In each
# round all tokens work at once.


# %%
def scan_by_doubling(a, b):
    """All h_t of h_t = a_t h_{t-1} + b_t, and the number of rounds."""
    reach, rounds = 1, 0
    while reach < len(a):
        earlier = F.pad(a[:-reach], (reach, 0), value=1.0), F.pad(b[:-reach], (reach, 0))
        a, b = combine(earlier, (a, b))
        reach, rounds = 2 * reach, rounds + 1
    return b, rounds


for length in (1, 2, 8, 21, 1000):
    a, b = torch.sigmoid(random(length, seed=11)), random(length, seed=12)
    h, one_by_one = torch.tensor(0.0), []
    for a_t, b_t in zip(a, b, strict=True):
        h = a_t * h + b_t
        one_by_one.append(h)
    states, rounds = scan_by_doubling(a, b)
    check(f"l = {length:4}: {rounds:2} rounds = {length:4} steps", states, torch.stack(one_by_one))
    assert rounds == math.ceil(math.log2(length))

# %%
fig, ax = plotting.figure(size=(10, 5))
for row, reach in enumerate((1, 2, 4)):
    for t in range(8):
        ax.plot([t, t], [-row, -row - 1], color=plotting.QUIET, linewidth=1)
        if t >= reach:
            ax.plot([t - reach, t], [-row, -row - 1], color=plotting.COLORS[row], linewidth=1.8)
for row, (right, up) in enumerate(((0, 0.2), (0.1, 0.13), (0.1, 0.13), (0, -0.25))):
    ax.plot(range(8), [-row] * 8, "o", color=plotting.INK, markersize=9)
    for t in range(8):
        span = f"{max(0, t - 2**row + 1)}–{t}" if row and t else f"{t}"
        side = "left" if right else "center"
        ax.text(t + right, up - row, span, fontsize=13, ha=side, va="center")
rounds = ["start", "round 1: join 1 back", "round 2: join 2 back", "round 3: join 4 back"]
ax.set_yticks([0, -1, -2, -3], rounds, fontsize=13)
ax.set_xticks([])
ax.tick_params(length=0)
ax.spines[:].set_visible(False)
ax.set(xlim=(-0.3, 7.7), ylim=(-3.45, 0.4))
plotting.save(
    fig,
    "01_scan",
    "Eight tokens in four rows. Between the rows lines join each token with the one 1, 2 and 4 "
    "places to its left. The labels say which steps a token stands for: after three rounds token 7 "
    "stands for steps 0 to 7.",
)

# %% [markdown]
# This simple form does $l \log_2 l$ joins. With one idea more it is fewer than $2l$: join
# neighbours two by two, scan the *half as long* list that results, and from there fill the places
# between, one step each. With $W$ for the number of joins, $W(l) \approx \frac l2 + W(\frac l2) +
# \frac l2$. The package does it so, for all channels at once. One trap to avoid, which looks so
# much simpler: with the running product $P_t = a_0 a_1 \cdots a_t$ one may write $h_t = P_t \sum_{s
# \le t} b_s / P_s$. It is right on paper; but $P_t$ falls below the smallest number that a computer
# has, and then it is divided by.


# %%
def joins(l):
    return 0 if l <= 1 else l // 2 + joins(l // 2) + (l - 1) // 2


for length in (8, 1024, 65_536):
    doubling = sum(length - 2**r for r in range(int(math.log2(length))))
    print(f"l = {length:6,}: {doubling:9,} joins by doubling, {joins(length):7,} by halving")
    assert joins(length) < 2 * length

a, b = torch.sigmoid(random(2000, seed=11)), random(2000, seed=12)
P = a.cumprod(0)
_ = must_differ("dividing by running products", P * (b / P).cumsum(0), scan_by_doubling(a, b)[0])

check("parallel scan = sequential scan", selective_scan_parallel(x, dt, A, B, C), y)
check_gradients("parallel scan = sequential scan", selective_scan_parallel, selective_scan,
                [x, dt, A, B, C])  # fmt: skip

# %% [markdown]
# *Steps* are what counts where thousands of products can be made at once. We count how many
# operations torch is asked for. The loop needs a fixed number for every *token*, the parallel scan
# a fixed number for every *doubling* of the length:

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class CountOperations(TorchDispatchMode):
    """Counts the operations that make new tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations(scan, length):
    tensors = [random(1, length, size, seed=13) for size in (d, d, n, n)]
    with CountOperations() as counter:
        scan(tensors[0], tensors[1].abs(), A, *tensors[2:])
    return counter.count


counts = {
    scan: [operations(scan, l) for l in (64, 128, 256, 512)]
    for scan in (selective_scan, selective_scan_parallel)
}
per_token = [
    (m - k) / l for (k, m), l in zip(pairwise(counts[selective_scan]), (64, 128, 256), strict=True)
]
per_doubling = [m - k for k, m in pairwise(counts[selective_scan_parallel])]
assert per_token[0] == per_token[1] == per_token[2] >= 4
assert per_doubling[0] == per_doubling[1] == per_doubling[2] < 20
print("sequential: as many operations for every further token")
print("parallel:   as many operations for every doubling of the length")

# %% [markdown]
# On a GPU there is a second bill to pay. The parallel form writes all states to memory, (b, l, d,
# n), which is $n$ times the input. Mamba's kernel keeps them in the fast memory of the chip and
# writes only $y$. (Chapter 03 finds a way that needs neither: a state with one decay per head can
# be computed with matrix products.)
#
# > "We can no longer compute the kernel K once up front. Instead we perform an efficient scan
# > implementation" — L22, "Mamba's Scan Implementation" (two bullets)

# %%
l, d_inner, n = 8192, 2048, 16
print(f"one text of {l:,} tokens, {d_inner:,} channels, n = {n}, float32:")
print(
    f"input {l * d_inner * 4 / 2**20:5,.0f} MiB, all states {l * d_inner * n * 4 / 2**20:5,.0f} MiB"
)

# %% [markdown]
# ## 9 · Mamba, and a task for it
#
# The layer around the scan has two more parts: a *short convolution* that lets each channel see the
# last four tokens before anything is decided, and a *gate* on the way out. With $u$ for the
# channels of the scan ($d_{\text{inner}} = 2d$ of them):
#
# $$\begin{aligned}
#   u &= \mathrm{silu}(\mathrm{conv}(xW_x)), \qquad (\delta, B, C) = u\,W, \qquad
#   \Delta = \mathrm{softplus}(\delta\,W_\Delta + \text{bias}), \\
#   y &= \Big(\big(\mathrm{scan}(u, \Delta, A, B, C) + D \circ u\big) \circ
#   \mathrm{silu}(xW_z)\Big)\, W_o.
# \end{aligned} \tag{1.20}$$
#
# Every $W$ is a matrix of weights. $\delta$ is only a few numbers wide, so that the map from $u$ to
# $\Delta$ stays small. $D$ is one weight per channel for the direct path.

# %%
_ = torch.manual_seed(1)
mixer = Mamba(8, d_state=4)
x = random(2, 15, 8, seed=14)
with torch.no_grad():
    u, z = mixer.in_proj(x).chunk(2, dim=-1)
    u, _ = short_convolution(u, mixer.conv)
    delta, B, C = mixer.x_proj(u).split(mixer.widths, dim=-1)
    dt = F.softplus(mixer.dt_proj(delta) + mixer.dt_bias)
    by_hand = selective_scan(u, dt, -mixer.A_log.exp(), B, C) + mixer.D * u
    by_hand = mixer.out_proj(by_hand * F.silu(z))
    y, cache = mixer(x)
    check("equation 1.20 = Mamba", y, by_hand)

    memory, tokens = None, []
    for t in range(15):
        y_t, memory = mixer(x[:, t : t + 1], cache=memory)
        tokens.append(y_t)
    check("token by token, from its cache = one pass", torch.cat(tokens, 1), y)
    _, longer = mixer(random(2, 500, 8, seed=15))
sizes = [sum(t[0].numel() for t in c) for c in (cache, longer)]
print(f"numbers in the cache per row, after 15 and after 500 tokens: {sizes}")
assert sizes[0] == sizes[1]

# %% [markdown]
# **Selective copying** is one of the two small tasks that Mamba was introduced with. A text
# consists of blanks, with three letters at random places; then three question marks follow, and the
# model has to name the letters, in their order:
#
#     · · e · · · · a · · · · · h · · ? ? ?     →   e a h
#
# At fixed places a convolution would do: "the token 14 ago". At random places the model must look
# at *what* a token is, and pass over the blanks. As a control we train the very same layer with
# `selective=False`: there, $\Delta$, $B$ and $C$ are learned numbers, the same for all tokens.
# Convolution, gate, sizes and training are the same.


# %%
def copying_texts(count, generator, length=16):
    """Texts (count, length + 3) of blanks 8, three letters 0 to 7 and ? 9; answers (count, 3)."""
    ids = torch.full((count, length + 3), 8)
    places = torch.rand(count, length, generator=generator).argsort(1)[:, :3].sort(1).values
    letters = torch.randint(8, (count, 3), generator=generator)
    ids.scatter_(1, places, letters)
    ids[:, length:] = 9
    return ids, letters


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


def copied(model, ids, letters):
    with torch.no_grad():
        return (model(ids).argmax(-1) == letters).double().mean().item()


selective, with_selection, generator = train_to_copy(True)
invariant, without, _ = train_to_copy(False)
assert with_selection[-1] > 0.95 and without[-1] < 0.7
print("after 400 steps: selective over 95 % of the letters, time-invariant under 70 %")

# %% [markdown]
# What does the control do instead? It *does* learn which three letters there were. What it cannot
# tell is their order:

# %%
ids, letters = copying_texts(512, generator)
with torch.no_grad():
    named = invariant(ids).argmax(-1)
one_of_three = (named[:, :, None] == letters[:, None]).any(-1).double().mean()
assert one_of_three > 0.95
print("time-invariant: over 95 % of the letters it names are among the three of the text")

# %% [markdown]
# Superposition says why. Between the convolution (four tokens) and the gate (one token) the
# control is linear. So letters that stand at least four places apart *add*: what a letter
# contributes at the question mark depends on which letter it is and on where it stands, never on
# what else was there. "Is it the second one?" is a question about what else was there.

# %%
blank = torch.full((1, 19), 8)
blank[:, 16:] = 9
first, second, both = blank.clone(), blank.clone(), blank.clone()
first[0, 3] = both[0, 3] = 4
second[0, 10] = both[0, 10] = 1
for model, name in ((invariant.double(), "time-invariant"), (selective.double(), "selective")):
    with torch.no_grad():
        alone = model.mix(first) - model.mix(blank)
        beside = model.mix(both) - model.mix(second)
    if model is invariant:
        check(f"{name}: a letter adds the same, alone or with another", beside, alone)
    else:
        _ = must_differ(f"{name}: a letter adds the same", beside, alone, at_least=0.1)


# %%
def exchanged(model, generator, count=256):
    """How often answer j changes when the i-th letter is exchanged for another: (3, 3)."""
    ids, letters = copying_texts(count, generator)
    places = (ids < 8).nonzero()[:, 1].view(count, 3)
    with torch.no_grad():
        before, rows = model(ids).argmax(-1), []
        for i in range(3):
            moved = ids.clone()
            moved.scatter_(1, places[:, i : i + 1], (letters[:, i : i + 1] + 3) % 8)
            rows.append((model(moved).argmax(-1) != before).double().mean(0))
    return torch.stack(rows)


by_selective, by_invariant = exchanged(selective, generator), exchanged(invariant, generator)
off_diagonal = ~torch.eye(3, dtype=torch.bool)
assert by_selective.diagonal().min() > 0.9 and by_selective[off_diagonal].max() < 0.15
assert by_invariant[off_diagonal].mean() > 0.25
print("exchange the i-th letter: the selective model changes its i-th answer and no other,")
print("the control changes others as well")

# %%
record = json.loads(Path("../figures/records/01_selective_copy.json").read_text())
fig, ax = plotting.figure(size=(10, 4.8))
for (name, runs), style in zip(record["right"].items(), ("-", "--", "-.", ":"), strict=True):
    line = ax.plot(record["steps"], runs["median"], style, label=name)[0]
    ax.fill_between(record["steps"], runs["low"], runs["high"], color=line.get_color(), alpha=0.15,
                    lw=0)  # fmt: skip
ax.axhline(1 / 8, color=plotting.QUIET, linewidth=1)
ax.text(600, 0.06, "chance", color=plotting.QUIET, ha="right", fontsize=12)
ax.set(xlabel="training steps", ylabel="letters named right", ylim=(0, 1.03))
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 0.9))
ends = record["at the end"]
assert min(ends["selective"]) > 0.99 and max(ends["time-invariant"]) < 0.7
assert 0.8 < max(ends["time-invariant, two layers"]) < 0.95
assert sum(end < 0.2 for end in ends["selective, no convolution"]) == 1
plotting.save(
    fig,
    "01_selective_copy",
    "Share of letters named right against training steps, median and middle three of five seeds. "
    "The selective layer reaches 1 within 300 steps. The time-invariant layer stays below 0.65; "
    "two of them climb slowly to 0.9. The selective layer without its convolution comes to 0.8.",
)

# %%
fig, axes = plotting.figure(1, 2, size=(9, 4.2))
for ax, (name, table) in zip(axes, record["exchanged"].items(), strict=True):
    plotting.heatmap(ax, torch.tensor(table), title=name, signed=False, limit=1.0, colorbar=False)
    for i, row in enumerate(table):
        for j, share in enumerate(row):
            ax.text(j, i, f"{share:.0%}", ha="center", va="center", fontsize=14,
                    color="white" if share > 0.6 else plotting.INK)  # fmt: skip
    ax.set_xticks(range(3), ["1st", "2nd", "3rd"])
    ax.set_yticks(range(3), ["1st", "2nd", "3rd"])
    ax.set_xlabel("answer that changes")
axes[0].set_ylabel("letter that is exchanged")
plotting.save(
    fig,
    "01_exchanged",
    "How often each answer changes when one letter is exchanged. For the selective model: nearly "
    "always the answer of the same number, and next to never another. For the time-invariant one "
    "all nine entries lie between a quarter and five sixths.",
)

# %% [markdown]
# (Both from a record, `python book/records.py 01_selective_copy`: five seeds, 600 steps; the shaded
# bands hold the middle three of them.) Two things are worth a second look.
#
# *Two time-invariant layers*, one on top of the other, come to nearly 90 % on texts this short.
# There is a gate and a silu between them, so together they are not linear any more, and
# superposition does not bind them. What a time-invariant model cannot do, it cannot do *in one
# linear pass*.
#
# *The short convolution is no ornament.* Without it the selective layer learns far more slowly, and
# one seed in five had learned nothing at all by the end.
#
# ## 10 · As printed
#
# ### A step late (L22, "1D Discrete Recurrent Representation")
#
# > $\mathbf{h}_{k+1} = \bar{\mathbf{A}}\mathbf{h}_k + \bar{\mathbf{B}}x_k, \quad
# > y_k = \bar{\mathbf{C}}\mathbf{h}_k + \bar{\mathbf{D}}x_k$
#
# Here $y_k$ is read *before* $x_k$ is written. A few slides later the unrolled form begins with
# $h_0 = \bar Bx_0$ and $y_0 = \bar C\bar B x_0$: that is $h_k = \bar A h_{k-1} + \bar B x_k$, and
# the term $\bar D x_k$ is gone. Run both:

# %%
A_bar, B_bar = discretize_zoh(*spring[:2], 0.1)
C, D, x = spring[2], 0.03, random(40, seed=16)
h, by_slide = torch.zeros(2), []
for x_k in x:
    by_slide.append(C @ h + D * x_k)
    h = A_bar @ h + B_bar * x_k
by_slide = torch.stack(by_slide)
convolved = ssm_convolution(ssm_kernel(A_bar, B_bar, C, 40), x[None])[0]

_ = must_differ("slide's recurrence, slide's convolution", by_slide, convolved, at_least=0.01)
delayed = F.pad(convolved, (1, 0))[:-1]
check("as printed = one step late, plus D x", by_slide, delayed + D * x)

# %% [markdown]
# For sound, one sample of delay is next to nothing. In a language model, a token that cannot see
# itself makes a different model.
#
# ### ZOH under the name of the bilinear rule (L22, "How to discretize a continuous SSM?")
#
# > "S4 uses a bilinear transformation to discretize the continuous SSM" — L22
#
# On the first of two slides, $\bar A = e^{\Delta A}$ and $\bar B = A^{-1}(e^{\Delta A} - I)B$
# follow. These are the formulas of ZOH. The caption below them says "exactly equivalent" and "on
# the held signal", which is true of them and not of the bilinear rule. One step, from rest, under
# an input of 1:

# %%
for step in (0.4, 0.2, 0.1, 0.05):
    exact = integrate(*spring[:2], lambda t: 1.0, torch.zeros(2), 0.0, step, steps=400)
    errors = [(rule(*spring[:2], step)[1] - exact).norm() for rule in list(rules.values())[:2]]
    assert errors[0] < 1e-12 and errors[1] > 1e-6
    print(f"step {step:4}: ZOH exact, bilinear off by {errors[1]:.1e}")

# %% [markdown]
# The slide's last line, $e^x \approx \frac{1+x/2}{1-x/2}$, is the bridge. Put the fraction in the
# place of the exponential, and the first pair of formulas turns into the second, which *is*
# the bilinear rule (equation 1.8):

# %%
A, B, dt = *spring[:2], 0.25
fraction = torch.linalg.solve(identity - dt / 2 * A, identity + dt / 2 * A)
replaced = torch.linalg.solve(A, (fraction - identity) @ B)
check("ZOH's B̄ with the fraction = bilinear B̄", replaced, discretize_bilinear(A, B, dt)[1])

# %% [markdown]
# ### A transpose too many (L22, "Selective State Space Models")
#
# > $h_t = Ah_{t-1} + Bx_t, \quad y_t = C^\top h_t$
#
# On the first slides $\mathbf{C} \in \mathbb{R}^{1 \times N}$ is a row, and then it is $Ch$. With a
# column $C$, as in Mamba's paper, it is $C^\top h$. Both are fine; the mixture is not:

# %%
C, h = random(1, 5, seed=17), random(5, 1, seed=18)  # as on the first slides
print("C h has the shape", tuple((C @ h).shape))
try:
    C.T @ h
except RuntimeError as error:
    print("Cᵀ h:", type(error).__name__, "for shapes", tuple(C.T.shape), "and", tuple(h.shape))

# %% [markdown]
# (The recurrence also has $A$ and $B$ where $\bar A$ and $\bar B$ are meant.)
#
# ### Two rules for what a token writes (OTCE §2.1 against WM §2 and Mamba's code)
#
# > "The most common is the zero-order hold (ZOH) rule, defined as $\bar{A} = \exp(\Delta A)$ and
# > $\bar{B} = (\Delta A)^{-1}(\exp(\Delta A) - I) \cdot \Delta B$." — OTCE §2.1
#
# *Wonderful Matrices* (Listing 3) and the code of Mamba write $\Delta_t B_t x_t$ instead, which is
# Euler's rule, beside a decay that is exact. For one rate $A$ the two differ by the factor
#
# $$\frac{\Delta}{(e^{\Delta A} - 1)/A} = \frac{z}{1 - e^{-z}}, \qquad z = -\Delta A. \tag{1.21}$$

# %%
for step, a, printed in ((0.1, -1.0, "1.051"), (0.69, -1.0, "1.384"), (0.69, -16.0, "11.04")):
    _, B_bar = discretize_zoh(torch.tensor([[a]]), torch.ones(1), step)
    ratio = step / B_bar
    z = torch.tensor([-step * a])
    check(f"Δ = {step}, A = {a:.0f}: equation 1.21", ratio, z / (1 - torch.exp(-z)))
    assert f"{ratio.item():.4g}" == printed
    print(f"   Euler writes {printed} times as much as ZOH")

# %% [markdown]
# Both are models in their own right, and both have a parallel scan. For one rate and a constant
# $\Delta$ a learned $B$ absorbs the factor. Where $\Delta$ depends on the token it cannot, and a
# property of §6 is lost: how much is written no longer fits the time that has passed. Under a
# constant input of 1 the differential equation comes to rest at $-B/A$. ZOH rests there for every
# step size, Euler's write elsewhere. (And the second half of equation 1.18 becomes
# $\mathrm{softplus}(z)$, a gate that does not stop at 1.)

# %%
A, B, C, x = -torch.ones(1, 1), torch.ones(1, 400, 1), torch.ones(1, 400, 1), torch.ones(1, 400, 1)
for step in (0.1, 0.69, 3.0):
    dt = torch.full((1, 400, 1), step)
    euler = selective_scan(x, dt, A, B, C)[0, -1]
    zoh = selective_scan(x, dt, A, B * -torch.expm1(-dt) / dt, C)[0, -1]
    check(f"Δ = {step}: ZOH rests at -B/A", zoh, torch.ones(1))
    check(f"Δ = {step}: Euler at Δ / (1 - exp(-Δ))", euler, dt[0, 0] / (1 - torch.exp(-dt[0, 0])))
    _ = must_differ(f"Δ = {step}: the two", euler, zoh, at_least=0.02)

# %% [markdown]
# ## Summary
#
# - A linear differential equation with a held input is a recurrence, exactly. Its modes are fading
#   tones.
# - The bilinear rule puts a fraction in the place of the exponential: off by $z^3/12$ per step, and
#   stable at any step.
# - Constant $\bar A$, $\bar B$, $C$: the recurrence is a convolution. Train with one, run with the
#   other.
# - HiPPO's $A$ is the derivative of "average over all of the past, seen by polynomials".
# - $\Delta$ carries the unit of time. Samples twice as far apart: $2\Delta$, and no new training.
# - Selection lets the token set $\Delta$, $B$ and $C$. Superposition goes, and with it the
#   kernel; associativity stays, and with it a scan of $\log_2 l$ rounds.
#
# | as printed | what it does when run | what holds |
# |---|---|---|
# | $h_{k+1} = \bar Ah_k + \bar Bx_k$ | answers one step late | $h_k = \bar Ah_{k-1} + \bar Bx_k$ |
# | "bilinear", with $e^{\Delta A}$ | is ZOH, and exact | the fraction of equation 1.8 |
# | $C^\top h$ with $C \in \mathbb{R}^{1 \times N}$ | does not run | $Ch$ |
# | $\bar B$ of ZOH, or $\Delta B$ | elevenfold at $\Delta A = -11$ | say which is meant |
#
# ## Exercises
#
# **1.** A drug is infused into the blood at $x(t)$ mg per hour. Per hour, a share `away` of what is
# in the blood leaves the body, a share `out` goes into the tissue, and a share `back` of what is in
# the tissue returns. State: (mg in the blood, mg in the tissue). Write $A$ and $B$, and use the
# package to give the amounts after each of a list of hourly infusion rates.


# %% tags=["exercise"]
def compartments(away, out, back):
    """A (2, 2) and B (2,)."""
    ### BEGIN SOLUTION
    return torch.tensor([[-away - out, back], [out, -back]]), torch.tensor([1.0, 0.0])
    ### END SOLUTION


def amounts(A, B, infusion):
    """The state at the end of every hour: infusion (l,) -> (l, 2)."""
    ### BEGIN SOLUTION
    A_bar, B_bar = discretize_zoh(A, B, 1.0)
    each = [ssm_recurrent(A_bar, B_bar, row, infusion[None])[0] for row in torch.eye(2)]
    return torch.stack(each, -1)
    ### END SOLUTION


# %% tags=["check"]
infusion = torch.tensor([10.0, 10, 0, 0, 5, 0])
system = compartments(0.4, 0.8, 0.3)
h, hourly = torch.zeros(2), []
for rate in infusion:
    h = integrate(*system, lambda t, rate=rate: rate, h, 0.0, 1.0, steps=200)
    hourly.append(h)
check("amounts = small steps", amounts(*system, infusion), torch.stack(hourly))
kept = amounts(*compartments(0.0, 0.8, 0.3), infusion).sum(-1)
check("nothing leaves: all that came in is there", kept, infusion.cumsum(0))

# %% [markdown]
# **2.** A pushed spring: solve $q'' = -\omega^2 q - 2\gamma q'$ with $q(0) = 0$, $q'(0) = 1$ and
# $\gamma < \omega$ on paper. This is the *continuous* kernel $\kappa(t)$. The discrete kernel under
# ZOH is $K_i = \int_{i\Delta}^{(i+1)\Delta} \kappa(t)\,dt$; the grader integrates yours.


# %% tags=["exercise"]
def spring_kernel(t, omega, gamma):
    """κ(t) for times t (any shape)."""
    ### BEGIN SOLUTION
    turns = math.sqrt(omega**2 - gamma**2)
    return torch.exp(-gamma * t) * torch.sin(turns * t) / turns
    ### END SOLUTION


# %% tags=["check"]
for omega, gamma in ((3.0, 0.3), (1.0, 0.9)):
    A = torch.tensor([[0.0, 1.0], [-(omega**2), -2 * gamma]])
    K = ssm_kernel(*discretize_zoh(A, torch.tensor([0.0, 1.0]), 0.2), torch.tensor([1.0, 0.0]), 30)
    inside = 0.2 * (torch.arange(30)[:, None] + torch.tensor(nodes + 1) / 2)  # Gauss's nodes
    integrals = 0.2 * spring_kernel(inside, omega, gamma) @ torch.tensor(weights / 2)
    check(f"ω = {omega}, γ = {gamma}", integrals, K)

# %% [markdown]
# **3.** Show that under the bilinear rule a mode with $\mathrm{Re}\,\lambda < 0$ has a factor of
# absolute value below 1 at every step size; then find the largest step for which Euler's factor
# $1 + \Delta\lambda$ has. (For the first, compare the distances of $\Delta\lambda/2$ to $-1$ and to
# $+1$.)


# %% tags=["exercise"]
def bilinear_factor(rate, dt):
    """What a mode with this (complex) rate is multiplied by in one step."""
    ### BEGIN SOLUTION
    # |1 + z/2| is the distance of z/2 to -1, |1 - z/2| that to +1. Left of the imaginary axis -1 is
    # nearer, so the fraction is below 1.
    z = dt * rate
    return (1 + z / 2) / (1 - z / 2)
    ### END SOLUTION


def largest_euler_step(rate):
    """The step at which |1 + dt · rate| = 1."""
    ### BEGIN SOLUTION
    # |1 + dt λ|² = 1 + 2 dt Re λ + dt² |λ|²
    return -2 * rate.real / abs(rate) ** 2
    ### END SOLUTION


# %% tags=["check"]
real, imaginary = random(2, 1000, seed=40)
rates = torch.complex(-real.abs() - 1e-3, 3 * imaginary)
for step in (0.01, 1.0, 100.0):
    assert (bilinear_factor(rates, step).abs() < 1).all()
one = rates[0].item()
A = torch.tensor([[one.real, -one.imag], [one.imag, one.real]])
eigenvalues = torch.linalg.eigvals(discretize_bilinear(A, torch.ones(2), 0.7)[0])
nearest = eigenvalues[(eigenvalues.imag - bilinear_factor(rates[0], 0.7).imag).abs().argmin()]
check("bilinear factor = eigenvalue of Ā", bilinear_factor(rates[0], 0.7), nearest)
at_limit = (1 + largest_euler_step(rates) * rates).abs()
check("Euler at its limit", at_limit, torch.ones(1000))

# %% [markdown]
# **4.** The scan is not bound to sums and products. A best-path search has the recurrence $h_t =
# \max(h_{t-1} + a_t,\; b_t)$: go on from the best so far, or start anew. Find the pair that two
# steps in a row make, so that the doubling scan works for it.


# %% tags=["exercise"]
def combine_best(first, second):
    """(a_1, b_1) • (a_2, b_2) for h -> max(h + a, b)."""
    ### BEGIN SOLUTION
    (a_1, b_1), (a_2, b_2) = first, second
    return a_1 + a_2, torch.maximum(b_1 + a_2, b_2)
    ### END SOLUTION


# %% tags=["check"]
one, two, three = random(3, 2, 100, seed=41)
left = combine_best(combine_best(one, two), three)
check("associative", torch.stack(left), torch.stack(combine_best(one, combine_best(two, three))))
a, b = random(2, 37, seed=42)
h, one_by_one, reach = torch.tensor(-math.inf), [], 1
for a_t, b_t in zip(a, b, strict=True):
    h = torch.maximum(h + a_t, b_t)
    one_by_one.append(h)
while reach < 37:
    before = F.pad(a[:-reach], (reach, 0)), F.pad(b[:-reach], (reach, 0), value=-math.inf)
    a, b = combine_best(before, (a, b))
    reach *= 2
check("best path by doubling = one by one", b, torch.stack(one_by_one))

# %% [markdown]
# **5.** Build selective copying by hand. Tokens have three numbers: value, mark (1 at values to be
# kept), ask (1 where an answer is wanted). The $i$-th asking token shall give the $i$-th marked
# value, for up to `n` of them, exactly. Choose `dt`, `A`, `B` and `C` for `selective_scan` with one
# channel. (Hint: one place of the state for each. Which place a token belongs to is a running count
# of marks: a time-invariant state space model with $\bar A = 1$.)


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
generator = torch.Generator().manual_seed(43)
tokens, answers = torch.zeros(5, 20, 3), torch.zeros(5, 4)
tokens[..., 0] = random(5, 20, seed=44)
tokens[:, 16:, 2] = 1
for row in range(5):
    places = torch.randperm(16, generator=generator)[:4].sort().values
    tokens[row, places, 1] = 1
    answers[row] = tokens[row, places, 0]
check("copied in order", copy_by_hand(tokens, 4)[:, 16:], answers)
check("silent where nothing is asked", copy_by_hand(tokens, 4)[:, :16], torch.zeros(5, 16))

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
