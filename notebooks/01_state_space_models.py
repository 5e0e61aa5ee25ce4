# %% [markdown]
# # 01 · State space models
#
# **Pour water into a leaky tank, and its level is a summary of everything you've poured in. That's
# a state space model: a few numbers pushed around by an input. This chapter turns it into Mamba, a
# layer whose tokens decide what gets remembered.** By the end you can
#
# - turn a differential equation into a recurrence that is exact for held input;
# - compute a fixed map as a recurrence or a convolution, a selective one by a parallel scan;
# - say what selection buys, what it destroys, and what survives.
#
# You need derivatives, eigenvalues, exponentials of complex numbers and matrices, and PyTorch.
#
# Sources: lecture 22 of CMU 10-423/623/723, *State Space Models + Hybrid Models* (L22); *OTCE* §2;
# Gu and Dao, *Mamba* (2023).

# %% tags=["setup"]
import json
import math
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import einsum

from cheems_ref import plotting
from cheems_ref.convolution import short_convolution
from cheems_ref.mamba import Mamba, selective_scan, selective_scan_parallel
from cheems_ref.state_space import (
    S4D,
    discretize_zoh,
    ssm_convolution,
    ssm_kernel,
    ssm_recurrent,
)
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(values, form=".3f"):
    """A row of numbers, to be printed."""
    return "  ".join(format(float(value), form) for value in values)


# %% [markdown]
# On the left the tank leaks: each step, 60 % of the water stays. At step 2,
# 0.6 of the first litre is left, and a second comes in. In the middle each level follows from the
# last: a recurrence. On the right each splash leaves an echo, and the echoes add up: a convolution.

# %% slide_title="One tank, seen three times" tags=["figure"]
plotting.show_drawing(
    "01_views",
    "Three panels over eight steps. The tank: bars of incoming water and a curve of its content. "
    "The recurrence: dots with an arrow from each to the next. The convolution: the fading echoes "
    "of steps 1, 2 and 5 stacked as bars, whose tops are the same dots.",
)

# %% [markdown]
# The first view is for thinking, the second for running a model, the third for training. Which
# survive if the input decides how fast the tank leaks?

# %% [markdown] slide_title="A few numbers, pushed around by an input: h′ = A h + B x"
# ## 1 · A tank with a hole
#
# Water runs in at $x(t)$ litres per second, and out through a hole, in proportion to what's there.
# With $h(t)$ litres in the tank,
#
# $$h'(t) = -\tfrac{1}{2}\,h(t) + x(t). \tag{1.1}$$
#
# Open the tap over an empty tank, $x = 1$, and you get $h(t) = 2\,(1 - e^{-t/2})$. A weight on a
# spring is almost as simple:
#
# $$\text{position}' = \text{speed}, \qquad
#   \text{speed}' = -9\,\text{position} - 0.6\,\text{speed} + x. \tag{1.2}$$
#
# Now it takes two numbers to say what's going on. Collect them in a *state* $h$, and let $A$ ($n
# \times n$) say how the state changes by itself, $B$ how the input gets in, and $C$ what we read
# off. Both systems become the same equation:
#
# $$h'(t) = A\,h(t) + B\,x(t), \qquad y(t) = C\,h(t). \tag{1.3}$$
#
# For the spring, $A$ has the rows $(0, 1)$ and $(-9, -0.6)$.


# %% tags=["setup"]
def tank():
    """A, B and C of equation 1.1."""
    return torch.tensor([[-0.5]]), torch.ones(1), torch.ones(1)


def spring():
    """A, B and C of equation 1.2; the state is (position, speed)."""
    A = torch.tensor([[0.0, 1.0], [-9.0, -0.6]])
    return A, torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])


# %% tags=["setup"]
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
# Left alone, what do the two systems do? If all $n$ eigenvalues $\lambda$ of $A$ differ, $A$ is
# diagonal in the basis of its eigenvectors, and the state is a sum of $n$ exponentials $e^{\lambda
# t}$. For ground truth we integrate with Runge–Kutta, in tiny steps:

# %% slide_title="Left alone, a tank decays and a spring rings"
A, B, _ = tank()
filled = integrate(A, B, lambda t: 1.0, torch.zeros(1), 0, 3, 1000)
check("small steps = 2 (1 - exp(-t/2)) at t = 3", filled, torch.tensor([2 * (1 - math.exp(-1.5))]))

A, B, _ = spring()
rates = torch.linalg.eigvals(A)
fading, turning = rates.real[0].item(), rates.imag.abs()[0].item()
print(f"eigenvalues of the spring: {fading:.3f} ± {turning:.3f}i")
start, period = torch.tensor([1.0, 0.0]), 2 * math.pi / turning
swung = integrate(A, B, lambda t: 0.0, start, 0.0, period, steps=2000)
check("let go, after one period: the same state, smaller", swung, math.exp(fading * period) * start)


# %% tags=["figure"]
def draw_alone(ax, system, title):
    """What is read of a system that starts at 1 and is left alone; e to the real part, dashed."""
    A, _, C = system
    times = torch.linspace(0, 10, 201)
    h = torch.stack([torch.linalg.matrix_exp(t * A) @ C for t in times])  # C reads 1 at the start
    fade = torch.exp(times * torch.linalg.eigvals(A).real.max())
    for sign in (1, -1) if len(A) > 1 else (1,):
        ax.plot(times, sign * fade, color=plotting.QUIET, linestyle="--", lw=1.5)
    ax.plot(times, h @ C, color=plotting.COLORS[2])
    ax.axhline(0, color=plotting.QUIET, lw=0.8)
    ax.set(title=title, xlabel="seconds", ylim=(-1.1, 1.1))


# %% slide_title="The tank only decays, the spring rings as it fades" tags=["figure", "slide"]
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
draw_alone(axes[0], tank(), "water in the tank")
draw_alone(axes[1], spring(), "position of the spring")
plotting.save(
    fig,
    "01_alone",
    "Two systems left alone for ten seconds. The tank's level decays along an exponential. The "
    "spring's position swings about zero, between two exponentials that close in on it.",
)

# %% [markdown]
# Minus the real part is how fast the spring fades, the imaginary part how fast it swings:
# $e^{(-0.3 + 2.985i)t} = e^{-0.3t}(\cos 2.985t + i \sin 2.985t)$. So a conjugate pair is a *fading
# tone*, as in the spring, and a negative real eigenvalue a plain decay, as in the tank.

# %% [markdown] slide_title="Hold the input, and the differential equation is solved exactly"
# ## 2 · From time to samples: hold the input
#
# Real data come as samples $x_0, x_1, x_2, \dots$, a step $\Delta$ apart (`dt` in code). What was
# the input doing in between? The simplest guess is that it stayed put. We *hold* each sample until
# the next one arrives. With a constant input we can solve (1.3) on paper, for numbers $A < 0$ and
# $B$. The level settles where $h' = 0$, at $h_\infty = -Bx/A$. Subtract that, and the distance
# obeys $(h - h_\infty)' = A\,(h - h_\infty)$. So each step multiplies it by $e^{\Delta A}$. Add
# $h_\infty$ again:
#
# $$h(t + \Delta) = e^{\Delta A}\,h(t) + \frac{e^{\Delta A} - 1}{A}\,B\,x. \tag{1.4}$$
#
# For matrices it's the same (without an inverse, too). This is the *zero-order hold*, ZOH:
#
# $$h_t = \bar A\,h_{t-1} + \bar B\,x_t, \qquad \bar A = e^{\Delta A}, \qquad
#   \bar B = A^{-1}(\bar A - I)\,B. \tag{1.5}$$
#
# Here $h_t$ is the state *after* $x_t$ has been held for one step.

# %% slide_title="Zero-order hold turns the equation into a recurrence" slide_figure="01_views:1"
A, B, C = spring()
dt = 0.25
A_bar = torch.linalg.matrix_exp(dt * A)
B_bar = torch.linalg.solve(A, (A_bar - torch.eye(2)) @ B)

check("Ā of equation 1.5 = discretize_zoh", A_bar, discretize_zoh(A, B, dt)[0])
check("B̄ of equation 1.5 = discretize_zoh", B_bar, discretize_zoh(A, B, dt)[1])

# %% [markdown]
# We turned a differential equation into a recurrence, and for held input it's exact.
#
# But ZOH has no idea what a smooth input did between the samples. The next picture shows one,
# sampled every 0.8 seconds, and the tank under it. On which side will ZOH's dots miss its level?


# %% tags=["setup"]
def follow(system, inputs, times):
    """The output at each of the times, from rest, in small steps; one input for each piece."""
    A, B, C = system
    h, y = torch.zeros(len(B)), [torch.tensor(0.0)]
    for x, (start, end) in zip(inputs, pairwise(times.tolist()), strict=True):
        h = integrate(A, B, x, h, start, end, steps=4)
        y.append(C @ h)
    return torch.stack(y)


def smooth(t):
    return 1 + math.sin(1.3 * t)


# %% tags=["setup"]
A, B, C = tank()
hold, times = 0.8, torch.linspace(0, 9.6, 193)  # 16 times per sample
samples = torch.tensor([smooth(t * hold) for t in range(12)])  # a wave
dots = ssm_recurrent(*discretize_zoh(A, B, hold), C, samples[None])[0]
staircase = samples.repeat_interleave(16)
under_smooth = follow(tank(), [smooth] * 192, times)  # in tiny steps
held = [lambda t, level=level: level for level in staircase]
under_held = follow(tank(), held, times)

ends = torch.arange(16, 193, 16)  # where a hold ends
check("the dots of ZOH lie on the curve of the held input", under_held[ends], dots)
print(f"off the smooth input's curve by up to {(under_smooth[ends] - dots).abs().max().item():.2f}")

# %% slide_title="ZOH hits the held input's curve, and misses the smooth one" tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
curves = {"smooth": [smooth(t) for t in times[:-1].tolist()], "held": staircase}
plotting.lines(axes[0], times[:-1], curves, title="two inputs, same samples", xlabel="seconds")
curves = {"under the smooth input": under_smooth, "under the held input": under_held}
plotting.lines(axes[1], times, curves, title="the tank", xlabel="seconds")
axes[1].plot(times[ends], dots, "o", color=plotting.COLORS[2], label="ZOH")
axes[1].legend()
plotting.save(
    fig,
    "01_held_input",
    "Left: a smooth wave and the staircase that holds its samples. Right: the tank under both. The "
    "dots that ZOH computes lie on the curve of the held input, and off the curve for the smooth "
    "input.",
)

# %% [markdown]
# The dots hit the curve of the held input, and come late for the other: on average, holding delays
# the wave by half a step, and the level with it. Cheaper rules (lab
# [01a](labs/01a_why_hippo.ipynb)) avoid the exponential.

# %% [markdown] slide_title="Unroll the recurrence, and a kernel appears"
# ## 3 · One map, two ways to compute it
#
# How do old samples reach the output? Let's unroll (1.5), starting from $h_{-1} = 0$:
#
# $$y_0 = C\bar B x_0, \quad y_1 = C\bar A\bar B x_0 + C\bar B x_1, \quad
#   y_2 = C\bar A^2\bar B x_0 + C\bar A\bar B x_1 + C\bar B x_2, \;\dots \tag{1.6}$$
#
# Do you see the pattern? A sample from $\delta$ steps ago always arrives with the factor $C\bar
# A^\delta\bar B$, so the output is a *convolution* with one list of numbers, the *kernel*:
#
# $$y_t = \sum_{\delta=0}^{t} K_\delta\,x_{t-\delta}, \qquad
#   K_\delta = C\,\bar A^\delta\,\bar B. \tag{1.7}$$

# %% slide_title="The same map is a convolution with one kernel" slide_figure="01_views"
l = 60
A, B, C = spring()
A_bar, B_bar = discretize_zoh(A, B, 0.1)
x = random(l, seed=3)
y = ssm_recurrent(A_bar, B_bar, C, x[None])[0]

powers = [A_bar.matrix_power(delta) for delta in range(l)]
K = torch.stack([C @ power @ B_bar for power in powers])
by_sum = torch.stack([K[: t + 1].flip(0) @ x[: t + 1] for t in range(l)])
check("convolution = recurrence", by_sum, y)
check("ssm_kernel = equation 1.7", ssm_kernel(A_bar, B_bar, C, l), K)

# %% [markdown]
# What does that buy us? In the convolution, no output waits for another. And it gets cheap once you
# write the signal as a sum of waves, since a convolution only multiplies each wave by a number. The
# *fast Fourier transform*, FFT, goes to the waves and back at a cost of order $l \log l$, not
# $l^2$. One trap: in an FFT of size $l$ the end runs into the beginning, as on a circle. Pad to
# twice the length.


# %% slide_title="The FFT needs room for twice the length"
def by_fft(K, x, size):
    product = torch.fft.rfft(K, size) * torch.fft.rfft(x, size)
    return torch.fft.irfft(product, size)[: len(x)]


check("FFT of size 2 l = recurrence", by_fft(K, x, 2 * l), y)
check("ssm_convolution = recurrence", ssm_convolution(K, x[None])[0], y)
wrapped = by_fft(K, x, l)
_ = must_differ("FFT of size l: the end wraps round", wrapped, y, at_least=0.01)

# %% [markdown]
# So train it as a convolution, while you know all the inputs, and run it as a recurrence, where the
# millionth sample costs no more than the first.

# %% [markdown] slide_title="S4D keeps exponentials, each with its own rate"
# ## 4 · Which A?
#
# *S4*, the structured
# state space sequence model of 2021, takes its answer from HiPPO (Gu et al., 2020): ask for the $n$
# numbers that best summarise the whole past, and derive the $A$ that keeps them up to date (lab
# [01a](labs/01a_why_hippo.ipynb)).
#
# *S4D* simply makes $A$ diagonal: without input, each entry $j$ of the state is an exponential with
# its own rate $\lambda_j$, complex and learned. Each entry has a twin, its complex conjugate. The
# two add up to $z + \bar z = 2\,\mathrm{Re}\,z$, so the kernel is real, and one of each pair is
# enough. $B$ is 1, since $C$ can carry the factor:
#
# $$\bar A_j = e^{\Delta\lambda_j}, \qquad
#   \bar B_j = \frac{e^{\Delta\lambda_j} - 1}{\lambda_j}, \qquad
#   K_\delta = 2\,\mathrm{Re} \sum_{j=0}^{n/2-1} C_j\,\bar B_j\,\bar A_j^{\,\delta}. \tag{1.8}$$
#
# The rates start out with real parts $-\frac12$ and imaginary parts $\pi j$, for $j = 0, 1, \dots,
# n/2 - 1$: a plain decay, then tones of period 2, 1, 2/3, …, all fading alike.  `S4D` is a layer of
# $d$ such models, one per channel, each with a learned $\Delta$ and weight $D$ for a direct path
# from $x$ to $y$.
#
# What if you trained on sound with 16,000 samples a second and now get 8,000? Double every
# $\Delta$. Holding a sample for $2\Delta$ is feeding it twice for $\Delta$. The coarse output
# $\delta$ ends with the fine step $2\delta + 1$, when the copies fed at steps 0 and 1 are
# $2\delta + 1$ and $2\delta$ steps old, so
#
# $$K_\delta(2\Delta) = K_{2\delta}(\Delta) + K_{2\delta+1}(\Delta). \tag{1.9}$$

# %% slide_title="Twice the distance between samples, twice the step"
_ = torch.manual_seed(0)
layer = S4D(3, d_state=8).requires_grad_(False)  # three channels
coarse, fine = layer.kernel(40, rate=2), layer.kernel(80)
neighbours = fine[:, ::2] + fine[:, 1::2]
check("equation 1.9", coarse, neighbours)

# %% tags=["guard"]
rates = torch.complex(-layer.A_log.exp(), layer.A_imag)  # (d, n/2)
z = layer.log_dt.exp()[:, None] * rates  # Δ times the rate
C, B_bar = torch.view_as_complex(layer.C), (z.exp() - 1) / rates  # C is stored as pairs
delta = torch.arange(50)[:, None, None]
K = 2 * (C * B_bar * z.exp() ** delta).sum(-1).real.T  # (50, d, n/2) -> (d, 50)
check("equation 1.8 = the kernel of S4D", layer.kernel(50), K)

x = random(2, 40, 3, seed=4)  # (b, l, d)
state, y = layer.initial_state(2), torch.zeros(2, 40, 3)
for t in range(40):
    y[:, t], state = layer.step(x[:, t], state)
check("40 steps of the recurrence = one convolution", y, layer(x))
_ = must_differ("D forgotten", y - layer.D * x, layer(x))
layer.A_log[0] += 0.3  # the rates of channel 0 alone
check("other rates in channel 0: channels 1 and 2 stay", layer(x)[..., 1:], y[..., 1:])
_ = must_differ("other rates in channel 0: channel 0", layer(x)[..., 0], y[..., 0])

# %% [markdown] slide_title="The step size is a valve, and each token sets it"
# ## 5 · What a fixed kernel cannot do
#
# So far, what a sample does to a later output depends only on the distance. But in a sentence you
# want to keep the name and skip the filler, *because of what they are*. Take the simplest task:
# each *token*, one position in a *text*, has a value and a mark, and the output should be *the last
# value that was marked*.
#
# How would you do that with a tank of $A = -1$? Look at $\Delta$. With $\Delta_t = 0$ no
# time passes, and the state is kept. With a very large $\Delta_t$, say 40, everything old drains
# away. So $\Delta$ is a valve, and we let each token set it:
#
# $$h_t = e^{\Delta_t A}\,h_{t-1} + \Delta_t B_t\,x_t, \qquad y_t = C_t\,h_t, \qquad
#   \Delta_t, B_t, C_t \text{ functions of the token at } t. \tag{1.10}$$
#
# This is *selection*. Mamba's code writes $\Delta_t B_t$ where ZOH has $\bar B$: for small steps
# the two agree, since $(e^{\Delta A} - 1)/A \approx \Delta$. $A$ needn't depend on the token, since
# the product $\Delta_t A$ already does.
#
# Take one number of state, $A = -1$, $B = 1$, and let a network choose $\Delta =
# \mathrm{softplus}(z) = \log(1 + e^z)$. Then $e^{-\Delta} = 1/(1 + e^z) = 1 - \sigma(z)$, and ZOH
# has $\bar B = 1 - e^{-\Delta} = \sigma(z)$ (for (1.10)'s $\Delta$). So the state moves a fraction
# $g = \sigma(z)$ of the way to the input. **The valve is a gate**, as in an LSTM or a GRU. But
# neither the gate nor what is written looks at the old state, so a step stays *affine* in $h$: a
# factor and an addition. Section 6 needs that:

# %% slide_title="The valve is a gate, as in an LSTM"
z, inputs, h, gated = random(30, seed=3), random(30, seed=4), torch.zeros(()), torch.zeros(())
for t in range(30):
    decay = torch.exp(-F.softplus(z[t]))
    h = decay * h + (1 - decay) * inputs[t]  # ZOH with A = -1, B = 1
    g = torch.sigmoid(z[t])
    gated = (1 - g) * gated + g * inputs[t]
check("a selective tank = a gate", h, gated)


# %% [markdown]
# By hand, for our task (`selective_scan(x, dt, A, B, C)` runs (1.10)):


# %% slide_title="Zero keeps, forty replaces: the last marked value by hand"
def keep_last_marked(tokens):
    """(b, l, 2) -> (b, l): a selective model by hand, one channel, one number of state."""
    value, mark = tokens.unbind(-1)
    dt = 40 * mark  # the valve: 0 keeps; 40 replaces, as exp(-40) is nothing
    ones = torch.ones_like(value)[..., None]  # B = 1/40 undoes the factor dt of the write
    y = selective_scan(value[..., None], dt[..., None], -torch.ones(1, 1), ones / 40, ones)
    return y[..., 0]


# %% [markdown]
# A marked token writes its value unchanged and wipes out the old state. Why $B = 1/40$? At $\Delta
# = 40$, (1.10) writes 40 times the value. Let's try twelve tokens, three of them marked:

# %% tags=["aside"]
value, mark = random(1, 12, seed=5), torch.zeros(1, 12)
mark[0, [2, 5, 9]] = 1
tokens = torch.stack([value, mark], -1)
last = torch.tensor([0] * 2 + [value[0, 2]] * 3 + [value[0, 5]] * 4 + [value[0, 9]] * 3)
check("the last marked value, by selection", keep_last_marked(tokens)[0], last)
for name, row in (("values", value), ("marks", mark), ("kept", keep_last_marked(tokens))):
    print(f"{name:7}", numbers(row[0], "5.2f"))


# %% tags=["figure"]
def draw_kept(ax, value, mark, kept):
    """Values as bars, the marked ones in colour; what the model returns as a line."""
    colors = [plotting.COLORS[4] if marked else "#d5d5d5" for marked in mark.tolist()]
    ax.bar(range(len(value)), value, 0.7, color=colors)
    for place in mark.nonzero()[:, 0].tolist():
        ax.text(place, -1.85, "marked", ha="center", va="center", fontsize=15)
    ax.step(range(len(kept)), kept, where="mid", color=plotting.COLORS[2], lw=4, label="kept")
    ax.axhline(0, color=plotting.INK, lw=0.8)
    ax.set(xlabel="token", ylabel="value", xticks=range(len(value)), ylim=(-2.1, 2.1))
    ax.legend(loc="upper right", fontsize=15)


# %% slide_title="The model keeps each marked value until the next" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(11, 4.4))
draw_kept(ax, value[0], mark[0], keep_last_marked(tokens)[0])
plotting.save(
    fig,
    "01_kept",
    "Twelve values as bars, of which tokens 2, 5 and 9 are marked. The line of what the model "
    "returns is 0 up to token 1, then stays at each marked value until the next one.",
)

# %% [markdown]
# Could a fixed kernel do that? A convolution obeys *superposition*: the answer to a sum of inputs
# is the sum of the answers. But here a second marked value should *replace* the first. Let's put
# our model beside a tank that loses 15 % of its water every step.


# %% tags=["setup"]
def leaky(tokens):
    """A time-invariant model: values are poured into a tank; 15 % runs out every step."""
    ones = torch.ones(1)
    return ssm_recurrent(0.85 * torch.ones(1, 1), ones, ones, tokens[..., 0])


# %% slide_title="A tank obeys superposition, selection doesn't"
first, second = torch.zeros(2, 1, 12, 2)
first[0, 2] = torch.tensor([1.0, 1.0])  # token 2: value 1, marked
second[0, 7] = torch.tensor([0.6, 1.0])  # token 7: value 0.6, marked
both = first + second
check("tank: answer to the sum = sum of the answers", leaky(both), leaky(first) + leaky(second))
total = keep_last_marked(first) + keep_last_marked(second)
answer = keep_last_marked(both)
_ = must_differ("selective: answer to the sum = sum of the answers", total, answer, at_least=0.5)


# %% tags=["figure"]
def draw_sum(ax, model, first, second, title):
    """The answers to two texts, their sum, and the answer to the two in one text."""
    one, two, both = (model(text)[0] for text in (first, second, first + second))
    curves = {"1 at token 2": one, "0.6 at token 7": two, "sum of the two answers": one + two}
    plotting.lines(ax, range(12), curves, xlabel="token", title=title, ylim=(-0.08, 2.7))
    ax.plot(both, "o", color=plotting.INK, label="both in one text")
    ax.legend(loc="upper left", fontsize=12)


# %% slide_title="On the right, the dots leave the sum: no kernel can do this" tags=["figure"]
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
# On the right, the dots leave the sum at token 7: no fixed kernel can do this task, and a model
# that can do it has no kernel. That's the end of superposition, of the convolution, and of the FFT.
#
# Mamba's model is (1.10) for $d$ channels: `x` and `dt` (b, l, d), a diagonal $A$ for each channel
# (d, n), and $B_t$, $C_t$ (b, l, n), shared by all channels. Each channel keeps its own $n$ numbers
# of state. Here it is as a loop.


# %% tags=["setup"]
def scan_inputs(b=2, l=21, d=3, n=4):
    """x, dt, A, B and C of a selective scan, drawn at random."""
    x, B, C = random(b, l, d, seed=6), random(b, l, n, seed=7), random(b, l, n, seed=8)
    dt, A = random(b, l, d, seed=9).abs() / 4, -torch.arange(1.0, n + 1).expand(d, n)
    return x, dt, A, B, C


# %% slide_title="Mamba's model is a loop over tokens"
x, dt, A, B, C = scan_inputs()
h, y = torch.zeros(2, 3, 4), []  # h (b, d, n)
for t in range(21):
    decay = torch.exp(dt[:, t, :, None] * A)  # (b, d, 1) * (d, n)
    write = einsum("bd,bn->bdn", (dt * x)[:, t], B[:, t])
    h = decay * h + write
    y.append(einsum("bdn,bn->bd", h, C[:, t]))
check("selective_scan = equation 1.10", selective_scan(x, dt, A, B, C), torch.stack(y, 1))

# %% [markdown] slide_title="Two affine steps in a row are one affine step"
# ## 6 · The scan lives
#
# Without a kernel there is no FFT. Are we back to one step at a time? No: a *scan* joins steps 0 to
# $t$, for every $t$ at once. True, the output is no longer linear in the input. But for a given
# text, each step is still affine in the state. Let $\alpha_t$ be the decay of a token and $w_t$ its
# write. (Both are numbers: $A$ is diagonal, so we can follow a single entry of the state.) One step
# is the map $h \mapsto \alpha\,h + w$, and two steps in a row make a map of the same kind:
#
# $$\alpha_2\,(\alpha_1 h + w_1) + w_2 = (\alpha_2 \alpha_1)\,h + (\alpha_2 w_1 + w_2)
#   \quad\Longrightarrow\quad
#   (\alpha_1, w_1) \bullet (\alpha_2, w_2) = (\alpha_2 \alpha_1,\; \alpha_2 w_1 + w_2).
#   \tag{1.11}$$


# %% slide_title="Joining steps is associative, not commutative"
def combine(first, second):
    """Two steps in a row as one: (α_1, w_1) • (α_2, w_2)."""
    (alpha_1, w_1), (alpha_2, w_2) = first, second
    return alpha_2 * alpha_1, alpha_2 * w_1 + w_2


one, two, three = random(3, 2, 1000, seed=10)  # 1000 pairs (α, w) each
left = combine(combine(one, two), three)
right = combine(one, combine(two, three))
check("associative", torch.stack(left), torch.stack(right))
_ = must_differ("commutative", combine(two, one)[1], combine(one, two)[1])

# %% [markdown]
# The operation is *associative*: you can join neighbours in any grouping, though not in any order.
#
# So we don't have to go from left to right. In round one, every token joins with its left neighbour
# and covers two steps. In round two, it joins with the token two to its left. So $\lceil \log_2 l
# \rceil$ rounds take up to $l \lceil \log_2 l \rceil$ joins, more than the $l$ steps of a loop, but
# within a round all tokens work at the same time. At the left end we pad with $(1, 0)$, the step
# that does nothing. We start from an empty state, so the write of all steps joined *is* the state:
# $h = \alpha \cdot 0 + w$.


# %% slide_title="Each round doubles the reach" slide_figure="01_scan:2"
def scan_by_doubling(alpha, w):
    """All h_t of h_t = α_t h_{t-1} + w_t, and the number of rounds."""
    reach, rounds = 1, 0
    while reach < len(alpha):
        earlier = F.pad(alpha[:-reach], (reach, 0), value=1.0), F.pad(w[:-reach], (reach, 0))
        alpha, w = combine(earlier, (alpha, w))
        reach, rounds = 2 * reach, rounds + 1
    return w, rounds


# %% tags=["setup"]
def scan_one_by_one(alpha, w):
    """The same, from left to right."""
    h = [torch.tensor(0.0)]
    for alpha_t, w_t in zip(alpha, w, strict=True):
        h.append(alpha_t * h[-1] + w_t)
    return torch.stack(h[1:])


# %% slide_title="Ten rounds do the work of a thousand steps"
for length in (1, 2, 8, 21, 1000):
    alpha, w = torch.sigmoid(random(length, seed=11)), random(length, seed=12)
    h, rounds = scan_by_doubling(alpha, w)
    assert rounds == math.ceil(math.log2(length))
    check(f"l = {length:4}: {rounds:2} rounds = {length:4} steps", h, scan_one_by_one(alpha, w))


# %% slide_title="After three rounds every token knows all eight" tags=["figure"]
plotting.show_drawing(
    "01_scan",
    "Eight tokens in four rows. Between the rows lines join each token with the one that is 1, 2 "
    "and 4 to its left. The labels say which steps a token stands for: after three rounds token 7 "
    "stands for steps 0 to 7.",
)

# %% [markdown]
# After the third round every token has joined all steps up to its own. This is the scan of Hillis
# and Steele. The package's scan, after Blelloch, does less work: it pairs neighbours and scans the
# pairs, which gives every second state, and one more step gives each state between:

# %% slide_title="The parallel scan gives what the loop gives"
inputs = scan_inputs()
y = selective_scan(*inputs)
check("parallel scan = sequential scan", selective_scan_parallel(*inputs), y)

# %% [markdown]
# Our parallel scan writes all states to memory, $n$ times as much as the input. Mamba's CUDA
# code keeps almost all of them on the chip.

# %% [markdown] slide_title="A short convolution before the scan, a gate behind it"
# ## 7 · Mamba
#
# Two ideas turn the scan into a layer. A *short convolution* lets each channel mix its last four
# values, so $\Delta$, $B$ and $C$ depend on four tokens. A second *gate*, on the way out, lets the
# layer hold back what it has read. Follow $x$ from left to right. At $W$ the token chooses:

# %% slide_title="The Mamba layer: the token chooses Δ, B and C" tags=["figure"]
plotting.show_drawing(
    "01_mamba_layer",
    "A block diagram. The input x of width d goes through W_x to width 2d, a convolution of four "
    "tokens and SiLU, which gives u. From u, a matrix W makes B and C, of n numbers each, and eta, "
    "which W_Delta and a softplus turn into Delta, of width 2d. The scan reads u, Delta, B and C. "
    "Its output, plus D times u, is multiplied by a gate, SiLU of x W_z, and W_o maps it to width "
    "d.",
)

# %% [markdown] slide_title="The Mamba layer, as equations"
# $D$ is a direct path, as in S4D. A full map from $u$ to $\Delta$ would be $2d \times 2d$. Through
# a few numbers, $\eta$, it's two thin ones. $\circ$ multiplies entry by entry:
#
# $$\begin{aligned}
#   u &= \mathrm{SiLU}(\mathrm{conv}(xW_x)), \\
#   (\eta, B, C) &= u\,W, \qquad \Delta = \mathrm{softplus}(\eta\,W_\Delta + \text{bias}), \\
#   y &= \Big(\big(\mathrm{scan}(u, \Delta, A, B, C) + D \circ u\big) \circ
#   \mathrm{SiLU}(xW_z)\Big)\, W_o.
# \end{aligned} \tag{1.12}$$
#
# All $W$, $A$, $D$, the bias and the convolution are learned. In code:

# %% slide_title="The whole layer fits in three equations" slide_figure="01_mamba_layer"
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
check("equation 1.12 = Mamba", mixer(x)[0], by_hand)

# %% [markdown]
# To generate text, the layer only keeps its state and the last three inputs of the convolution.

# %% [markdown] slide_title="Copy three letters from random places"
# ## 8 · Selective copying
#
# Here's a small version of a puzzle from Mamba's paper. A text consists of blanks, with three
# letters in random places. Then come three question marks, and the model has to name the letters in
# order:
#
#     · · e · · · · a · · · · · h · · ? ? ?     →   e a h
#
# The letters come at 2, 7 and 13, the questions at 16, 17 and 18. If it were always so, a fixed
# filter could do it: look 14, 10 and 5 tokens back. (At each question, two of the three land on
# blanks.) But letters move around. Our model is an embedding, one Mamba layer, and a linear map to
# the letters. The control is time-invariant (`selective=False`): one learned vector takes the place
# of the map to $\eta$, $B$ and $C$. Its layer has 22 % fewer parameters than the selective one, and
# two such layers have 57 % more.


# %% tags=["setup", "experiment"]
def copying_texts(count, generator, length=16):
    """Texts (count, length + 3) of blanks 8, three letters 0 to 7 and ? 9; answers (count, 3)."""
    ids = torch.full((count, length + 3), 8)
    places = torch.rand(count, length, generator=generator).argsort(1)[:, :3].sort(1).values
    letters = torch.randint(8, (count, 3), generator=generator)
    ids.scatter_(1, places, letters)
    ids[:, length:] = 9
    return ids, letters


# %% tags=["setup", "experiment"]
class Copier(torch.nn.Module):
    """Embedding, Mamba layers, a linear map to the letters."""

    def __init__(self, selective, layers=1, d_conv=4):
        super().__init__()
        options = dict(selective=selective, d_conv=d_conv, scan="sequential")
        self.embedding = torch.nn.Embedding(10, 32)
        self.mixers = torch.nn.ModuleList(Mamba(32, **options) for _ in range(layers))
        self.head = torch.nn.Linear(32, 8, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for mixer in self.mixers:
            x, _ = mixer(x)
        return self.head(x[:, -3:])  # at the question marks


# %% tags=["setup", "experiment"]
def copied(model, ids, letters):
    """The fraction of letters that the model gets right."""
    with torch.no_grad():
        return (model(ids).argmax(-1) == letters).double().mean().item()


def train_to_copy(selective, steps=400, seed=0, every=100, **options):
    """The trained model, its accuracy every so many steps, the generator."""
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


# %% [markdown] slide_title="In a time-invariant layer, distant letters add"
# How well will the control do? A time-invariant layer is linear, except for its gate, which sees
# the question mark and is the same in all texts, and its SiLU, which sees four tokens. Keep letters
# four tokens apart. Then no window holds two of them, so what the SiLU makes of a window depends on
# one letter at most. The rest only adds up windows. So letters *add*: a score is $f(a) + f(b) +
# f(c)$, a term for each letter and its distance. Look at the second question mark, which asks for
# the middle letter:
#
#     a · · · b · · · c · · · · · · · ? ? ?     →   b
#     · · · · b · · · c · · · a · · · ? ? ?     →   c
#
# Take the score of `b` minus the score of `c`, and swap the two letters:
#
# | text | answer | swapped | answer | so `b` minus `c` should |
# |---|---|---|---|---|
# | `a···b···c` | b | `a···c···b` | c | fall |
# | `····b···c···a` | c | `····c···b···a` | b | rise |
#
# But in both texts `b` and `c` hold the same two places, and only `a` has moved. A swap changes the
# terms of `b` and `c` alone. So the difference changes by the same amount in both.


# %% tags=["setup"]
def change(model, text):
    """How the scores at the question marks change if b and c change places in a text."""
    texts = [text, text.translate(str.maketrans("bc", "cb"))]
    ids = torch.tensor([["abcdefgh·?".index(token) for token in text] for text in texts])
    with torch.no_grad():
        scores = model(ids)
    return scores[1] - scores[0]


# %% slide_title="Both differences change alike, so one answer must be wrong"
_ = torch.manual_seed(0)
control = Copier(selective=False)  # embedding, one layer, linear map
first = change(control, "a···b···c·······???")
second = change(control, "····b···c···a···???")
check("'a' four tokens before b: the same change as four tokens after c", first, second)
_ = must_differ("'a' two tokens before b", change(control, "··a·b···c·······???"), second)

# %% [markdown]
# So no weights of the control get all four texts right.
#
# A *record* is a file that a longer run left. This one holds the accuracy of each model
# after 600 steps, for five seeds (`python -m experiments 01_selective_copy`). Before you credit
# selection with everything, look at the second and the third row.

# %% slide_title="After 600 steps: who copies?"
copying = json.loads(Path("../experiments/records/01_selective_copy.json").read_text())
ends = copying["at the end"]
for name, shares in ends.items():
    print(f"{name:30}", numbers(shares))


# %% tags=["figure"]
def draw_copying(ax, copying):
    """The median of five seeds over training, and the second to fourth as a band."""
    for name, runs in copying["right"].items():
        plotting.lines(ax, copying["steps"], {name: runs["median"]}, legend=None)
        plotting.band(ax, copying["steps"], runs["low"], runs["high"])
    plotting.level(ax, 1 / 8, "chance")
    ax.set(xlabel="training steps", ylabel="accuracy", ylim=(0, 1.05))
    ax.legend(*ax.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.0, 1.0))


# %% slide_title="Selection wins after 600 steps, but don't stop there" tags=["figure"]
fig, ax = plotting.figure(size=(11, 4.4))
draw_copying(ax, copying)
plotting.save(
    fig,
    "01_selective_copy",
    "Accuracy against training steps: the median of five seeds, with a band from the second to the "
    "fourth. The selective layer reaches 1. The time-invariant layer stays at about 0.6, without "
    "its convolution at 0.5; two such layers climb to nearly 0.9. The selective layer without its "
    "convolution ends near 0.77.",
)

# %% tags=["guard"]
bounds = {"selective": (0.99, 1), "time-invariant": (0.57, 0.62)}
bounds |= {"time-invariant, two layers": (0.85, 0.91), "selective, no convolution": (0.565, 0.865)}
for name, (low, high) in bounds.items():
    assert low <= min(ends[name]) and max(ends[name]) <= high, name
assert all(abs(share - 0.5) < 0.02 for share in ends["time-invariant, no convolution"])
one, other = (sum(p.numel() for p in Mamba(32, selective=s).parameters()) for s in (True, False))
assert f"{other / one:.2f} {2 * other / one:.2f}" == "0.78 1.57"
_, curve, _ = train_to_copy(True, steps=1, every=1)
assert len(curve) == 1
back = {16 + i - place: i == j for i in range(3) for j, place in enumerate((2, 7, 13))}
assert len(back) == 9 and [steps for steps, wanted in back.items() if wanted] == [14, 10, 5]

# %% [markdown]
# After 600 steps the selective layer solves the task. *Without* its short convolution it's at 57 to
# 86 %, depending on the seed, and two time-invariant layers are at 85 to 91 %. Can't they do
# it, or are they just slow? We wrote down a prediction, and then trained both for 2,000 steps, with
# one time-invariant layer beside them (`python -m experiments 01_copy_longer`):

# %% slide_title="One time-invariant layer still fails after 2,000 steps"
longer = json.loads(Path("../experiments/records/01_copy_longer.json").read_text())
print("the prediction:", longer["prediction"])
last = {}
for run in longer["runs"]:
    last.setdefault(run["model"], []).append(run["right"][-1])
for name, shares in last.items():
    print(f"{name:30}", numbers(shares))


# %% tags=["guard"]
assert min(last["selective, no convolution"]) > 0.99 and len(last) == 3
assert min(last["time-invariant, two layers"]) > 0.99
assert min(last["time-invariant"]) > 0.6 and max(last["time-invariant"]) < 0.65
assert all(len(shares) == 5 for shares in last.values())

# %% [markdown]
# We had predicted nine of these ten runs above 95 %. All ten are: they were slow. In the
# selective layer the convolution buys *speed*, not ability, and on this task a second layer can
# replace selection. One time-invariant layer stays below 65 %. No budget takes it to 100 %, because
# no weights get all four texts right. (Two layers escape: the second layer's gate and SiLU see what
# the first has summed up, so letters no longer just add.) After too few steps, a comparison tells
# you which model learns faster, not what either can do.
#
# Why does the control without convolution end at 50 %, on all five seeds? Suppose each letter votes
# for itself, with a weight for its distance. If all weights are equal, the most frequent letter
# wins: 45.3 % right. Judged by cross-entropy, the best weights count distances 3 to 16 equally and
# the others not at all: 50.2 % right. That makes sense: the letter they need is never at 1,
# 2, 17 or 18. All five runs end within two points of that. (We can't explain the ten points that
# the convolution adds.)

# %% tags=["guard"]
places = torch.combinations(torch.arange(16), 3).repeat_interleave(64, 0)
others = torch.cartesian_prod(torch.arange(8), torch.arange(8)).repeat(560, 1)
letters = F.pad(others, (1, 0))  # the first is letter 0, since names make no difference


def vote(weights):
    """The loss, and the share of right answers, of a vote with weights for distances 1 to 18."""
    losses, right = [], []
    for question in range(3):
        votes = torch.zeros(len(letters), 8)
        votes = votes.scatter_add(1, letters, weights[15 + question - places])
        losses.append(F.cross_entropy(votes, letters[:, question]))
        best = (votes == votes.amax(1, keepdim=True)).double()  # ties share the point
        right.append(best.gather(1, letters[:, question, None])[:, 0] / best.sum(1))
    return sum(losses), torch.stack(right).mean()


window = F.pad(torch.ones(14), (2, 2))  # distances 3 to 16
slope = torch.func.grad(lambda weights: vote(weights)[0])(3.2811 * window)
assert slope.abs().max() < 1e-4  # the loss is convex: without a slope, this is its minimum
shares = [f"{vote(weights)[1]:.1%}" for weights in (torch.ones(18), window)]
print("equal weights, and the window:", shares)
assert shares == ["45.3%", "50.2%"]
asked = {16 + i - place for i in range(3) for place in places[:, i].tolist()}
assert asked == {*range(3, 17)}

# %% [markdown] slide_title="You lose superposition and keep associativity"
# ## Summary
#
# - Hold the input, and a linear differential equation is a recurrence, exactly. If $A$ has $n$
#   different eigenvalues, all with negative real parts, its memory is a sum of $n$ exponentials:
#   tones and decays.
# - As long as $\bar A$, $\bar B$ and $C$ are constant, the recurrence is also a convolution. Train
#   with the convolution, run with the recurrence.
# - If your samples come twice as far apart, double $\Delta$.
# - With selection, each token sets $\Delta$, $B$ and $C$. You lose superposition, and the kernel
#   with it. You keep associativity, and with it a parallel scan.
# - On selective copying, one selective layer learns the task, and learns it faster with a
#   convolution. Two time-invariant layers also learn it. A single one can't, at any budget.
#
# ## Exercises
#
# **1 · easy.** *Four outputs by hand.* What does $\bar A = 0.5$, $\bar B = C = 1$ make of $(1, 2,
# 0, 3)$? With pencil and paper: what are the four outputs, and what are the first three entries of
# the kernel?
#
# <details><summary>Hint</summary>
#
# The state halves, then the input is added. The kernel is the answer to $(1, 0, 0)$.
#
# </details>


# %% tags=["exercise"]
def by_pencil():
    """Four outputs and three entries of the kernel."""
    ### BEGIN SOLUTION
    return [1.0, 2.5, 1.25, 3.625], [1.0, 0.5, 0.25]
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import check_numbers, forbidden

with forbidden(ssm_recurrent, ssm_kernel, ssm_convolution):
    mine = by_pencil()
half, one = torch.tensor([[0.5]]), torch.ones(1)
outputs = ssm_recurrent(half, one, one, torch.tensor([[1.0, 2.0, 0.0, 3.0]]))[0]
wanted = {f"output {t}": y for t, y in enumerate(outputs.tolist())}
wanted |= {f"K_{i}": entry for i, entry in enumerate(ssm_kernel(half, one, one, 3).tolist())}
check_numbers(mine, wanted)

# %% [markdown]
# **2 · easy.** *A drug in two places.* How much of a drug is where, hour by hour? The drug drips
# into the blood at $x(t)$ mg per hour. The state is (mg in the blood, mg in the tissue). Write down
# $A$ and $B$, and let the package work out both amounts at the end of each hour, for a list of
# hourly infusion rates. Some of the drug leaves the body, at a rate of `away` times the amount in
# the blood. Some moves into the tissue, at `out` times the amount in the blood, and some comes
# back, at `back` times the amount in the tissue.
#
# <details><summary>Hint</summary>
#
# Write the two flows as two differential equations. Each coefficient is an entry of $A$. The
# package returns one output $C h$ per call, so choose $C$ to read one of the two amounts.
#
# </details>


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
from cheems_ref.exercises import as_tensor

infusion = torch.tensor([10.0, 10, 0, 0, 5, 0])
for away, out, back in ((0.4, 0.8, 0.3), (0.1, 0.2, 1.5), (0.0, 0.8, 0.3)):
    hourly, blood, tissue = [], 0.0, 0.0  # by small steps, flow by flow
    for hour in infusion.tolist():
        for _ in range(2000):
            moved = out * blood - back * tissue
            blood += (hour - away * blood - moved) / 2000
            tissue += moved / 2000
        hourly.append([blood, tissue])
    found = as_tensor(amounts(away, out, back, infusion))
    name = f"away {away}, out {out}, back {back}: by small steps"
    check(name, found, torch.tensor(hourly), tol=2e-3)
everything = as_tensor(amounts(0.0, 0.8, 0.3, infusion)).sum(-1)
check("nothing leaves: all that came in is there", everything, infusion.cumsum(0), tol=1e-5)
steady = as_tensor(amounts(2.0, 0.0, 0.7, torch.full((6,), 3.0)))
exact = 1.5 * (1 - torch.exp(-2.0 * torch.arange(1.0, 7.0)))
check("nothing moves to the tissue: 1.5 - 1.5 exp(-2t), exactly", steady[:, 0], exact, tol=1e-5)

# %% [markdown]
# **3 · medium.** *The bell's missing C.* Find $C$ from the first samples of a struck bell. Train as
# a convolution, run as a recurrence. Somebody struck a bell once, and you heard the first samples.
# You know $\bar A$ and $\bar B$, but not $C$. What you heard is a kernel, $C \bar A^t \bar B$, so
# every sample is one linear equation for $C$ (`torch.linalg.lstsq` solves them). Then drop the
# kernel, step the state, and let the bell ring on.
#
# <details><summary>Hint</summary>
#
# The rows of the equations are the states $\bar A^t \bar B$, which you can step without knowing
# $C$.
#
# </details>


# %% tags=["exercise"]
def ring_on(A_bar, B_bar, heard, ahead):
    """heard (l,): the answer to a 1 at time 0; returns the next samples, (ahead,)."""
    ### BEGIN SOLUTION
    states, h = [], B_bar
    for _ in heard:
        states.append(h)
        h = A_bar @ h
    C = torch.linalg.lstsq(torch.stack(states), heard[:, None]).solution[:, 0]
    following = []
    for _ in range(ahead):
        following.append(C @ h)
        h = A_bar @ h
    return torch.stack(following)
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import as_tensor

springs = [torch.tensor([[-0.3, turn], [-turn, -0.2]]) for turn in (2.0, 3.1, 5.0)]
A_bar, B_bar = discretize_zoh(torch.block_diag(*springs), torch.ones(6), 0.1)
for seed, l, ahead in ((70, 40, 100), (71, 64, 30)):
    heard = ssm_kernel(A_bar, B_bar, random(6, seed=seed), l)
    found = as_tensor(ring_on(A_bar, B_bar, heard, ahead))
    bell = ssm_kernel(A_bar, B_bar, random(6, seed=seed), l + ahead)
    check(f"{l} samples heard, the next {ahead}", found, bell[l:], tol=1e-6)
print("trained as a convolution, run as a recurrence")

# %% [markdown]
# **4 · medium.** *A scan for the best path.* Make the scan find a best path instead of a sum. The
# scan isn't limited to sums and products. When you search for a best path, the recurrence is $h_t =
# \max(h_{t-1} + g_t,\; w_t)$: carry on from the best so far and gain $g_t$, or start afresh with
# $w_t$. Find the pair that two steps in a row make, so that the doubling scan works here too.
#
# <details><summary>Hint</summary>
#
# Apply the first step to $h$, then the second, and write the result in the form $\max(h + g, w)$
# again. Adding a number moves through a maximum.
#
# </details>


# %% tags=["exercise"]
def combine_best(first, second):
    """(g_1, w_1) • (g_2, w_2) for h -> max(h + g, w); all of one shape."""
    ### BEGIN SOLUTION
    (g_1, w_1), (g_2, w_2) = first, second
    return g_1 + g_2, torch.maximum(w_1 + g_2, w_2)
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none

one, two, three = random(3, 2, 100, seed=41)
left = not_none(combine_best(combine_best(one, two), three))
right = combine_best(one, combine_best(two, three))
check("associative", torch.stack(list(left)), torch.stack(list(right)))
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
# **5 · hard.** *Selective copying without training.* Choose the `dt`, `A`, `B` and `C` that copy
# what's marked. So you build selective copying by hand, for `selective_scan` with one channel. Each
# token has three numbers: a value, a mark (1 if the value should be kept), and an ask (1 if an
# answer is wanted). The $i$-th token that asks must return the $i$-th marked value, exactly, for up
# to `n` of them. Before the $i$-th mark, and at tokens that don't ask, the answer is 0. Call
# `selective_scan` once, and return what it returns.
#
# <details><summary>Hint</summary>
#
# Give each value its own entry of the state, one that never fades; $A$ may be 0. To find out which
# entry a token belongs to, keep a running count of the marks, or of the questions. Such a count is
# itself a state space model, with $\bar A = 1$.
#
# </details>


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
from cheems_ref.exercises import calls_of

generator = torch.Generator().manual_seed(43)
for n, l in ((4, 20), (6, 31), (1, 5)):  # blanks, marks and questions in any order
    tokens = torch.zeros(8, l, 3)
    tokens[..., 0] = random(8, l, seed=44 + n)
    kinds = torch.rand(8, l, generator=generator)
    marks, asks = kinds < 0.3, kinds > 0.6
    tokens[..., 1] = marks & (marks.cumsum(1) <= n)  # up to n marks
    tokens[..., 2] = asks
    wanted = torch.zeros(8, l)
    for row in range(8):
        kept, places = tokens[row, marks[row], 0][:n], asks[row].nonzero()[:, 0]
        for i, t in enumerate(places[: len(kept)]):  # the i-th question, if i values were marked
            wanted[row, t] = kept[i] if marks[row, : t + 1].sum() > i else 0.0
    with calls_of(selective_scan) as scans:
        mine = copy_by_hand(tokens, n)
    check(f"n = {n}: copied in order", mine, wanted)
    assert len(scans) == 1, f"selective_scan was called {len(scans)} times instead of once"
    scanned = scans[0][0] if isinstance(scans[0], tuple) else scans[0]
    check(f"n = {n}: the scan itself has copied", mine, scanned.view_as(mine))

# %% [markdown]
# ## Further reading
#
# - Gormley and Nayebi, *10-423/623/723 Generative AI*, lecture 22 (2025): the slides this chapter
#   follows.
# - Gu et al., *HiPPO* (2020): memory as projection; lab 01a derives it.
# - Gu, Goel and Ré, *Efficiently Modeling Long Sequences with Structured State Spaces* (2021): S4;
#   Gu et al., *On the Parameterization and Initialization of Diagonal State Space Models* (2022):
#   S4D.
# - Rush and Karamcheti, *The Annotated S4*: the same road, with JAX.
# - Smith, Warrington and Linderman, *Simplified State Space Layers* (2022): S5, one model with
#   several inputs and outputs in place of one per channel, trained with a parallel scan.
# - Orvieto et al., *Resurrecting Recurrent Neural Networks for Long Sequences* (2023): the LRU, a
#   linear recurrence with a complex diagonal that does without any differential equation.
# - Blelloch, *Prefix Sums and Their Applications* (1990): more uses of a scan.
# - Gu and Dao, *Mamba* (2023): selection, selective copying, and the CUDA code.
# - `cheems_ref/state_space.py` and `cheems_ref/mamba.py`: the package's versions.
#   Chapter 02 arrives at such recurrences from attention; chapter 03 joins the two.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
