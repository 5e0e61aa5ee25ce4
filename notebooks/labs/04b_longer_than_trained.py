# %% [markdown]
# # 04b · Longer than it was trained on
#
# **On paper, positions can be as large as you like. This lab counts until the numbers give out, and
# looks at two ways to read past a model's training length.** You will be able to
#
# - say how far float32 and bfloat16 can count;
# - explain why a base that changes during decoding spoils the cache, and a state beyond repair;
# - say why scaling a query sharpens attention, and in a linear model only rescales what comes out
#   of the state.
#
# You need chapter 04. Two cells are for you to fill in.
#
# Sources: *Wonderful Matrices* (WM) Listing 1; *OTCE*, Appendix A; Peng et al., *YaRN* (2023).

# %% tags=["setup"]
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from cheems_ref import plotting, ssd
from cheems_ref.rope import (
    log_length_scale,
    ntk_base,
    rope_frequencies,
    rotation_matrix,
)
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(b=2, l=40, h=4, p=5, g=2, n=8, dt=0.1, seed=10):
    """Random x (b, l, h, p), step sizes (b, l, h) around dt, A (h,), B and C (b, l, g, n)."""
    x = random(b, l, h, p, seed=seed)
    step_sizes = dt * random(b, l, h, seed=seed + 1).abs()
    A = -1.0 - 7.0 * torch.arange(h) / max(h - 1, 1)
    B, C = random(b, l, g, n, seed=seed + 2), random(b, l, g, n, seed=seed + 3)
    return x, step_sizes, A, B, C


# %% [markdown]
# ## 1 · How far can one count?
#
# On paper the invariance is exact. In a computer the angle $t\,\theta_i$ is rounded, $\theta_i$
# itself is rounded, and both errors grow with $t$. In sixteen bits even the positions themselves
# collapse.
#
# **Fill in 1.** Predict, before you see it printed: bfloat16 stores 7 bits behind the leading one,
# float16 has 10, float32 has 23. How far does each count without skipping a number?


# %% tags=["exercise"]
def counts_to(bits):
    """The largest n such that 0, 1, …, n are all exact with so many stored bits of mantissa."""
    ### BEGIN SOLUTION
    return 2 ** (bits + 1)  # the leading one isn't stored
    ### END SOLUTION


# %% tags=["check"]
for dtype, bits in ((torch.bfloat16, 7), (torch.float16, 10), (torch.float32, 23)):
    n = int(counts_to(bits))
    near = torch.arange(max(0, n - 100), n + 2)
    exact = near.to(dtype).double() == near
    assert exact[:-1].all(), f"{dtype} skips a number before yours"
    assert not exact[-1], f"{dtype} counts further than that"
print("right for all three types")

# %% [markdown]
# Now count:

# %%
counted = torch.arange(8192)
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    different = counted.to(dtype).unique().numel()
    exact = round(2 / torch.finfo(dtype).eps)  # the next whole number is rounded to this one
    assert torch.tensor(exact + 1).to(dtype) == torch.tensor(exact).to(dtype)
    print(f"{dtype!s:15} tells {different:5} of 8192 positions apart")
    print(f"{'':15} skips none up to {exact:,}")

# %% [markdown]
# So the package computes angles in float64 for a float64 model and in float32 for every other, even
# if the model runs in bfloat16. Here is how much the output of a rotary SSD changes when the text
# is moved (`python -m experiments 04_shift_error`):

# %%
record = json.loads(Path("../../experiments/records/04_shift_error.json").read_text())
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
    "04b_shift_error",
    "Relative change of the output against the shift of all positions, both logarithmic. With "
    "angles in float64 it stays below 1e-10 up to a shift of a million; in float32 it grows from "
    "below 1e-6 to 4e-3; in bfloat16 it is between 0.4 and 0.9 from a shift of 256 on.",
)

# %% [markdown]
# At a shift of a million, float32 angles change the output by 0.4 %. With bfloat16 angles, a shift
# of one costs 1 %, and one of 256 about half.
#
# ## 2 · A base that moves under a cache (WM Listing 1)
#
# To read past the training length, the listing stretches the base, and takes the length $l$ from
# the largest position *of the current call*. This is *dynamic NTK*:
#
# $$\text{base}' = \text{base} \cdot \Big(\rho\,\frac{l}{l_0} - (\rho - 1)\Big)^{d/(d-2)}
#   \quad\text{for } l > l_0, \tag{4.12}$$
#
# with the training length $l_0$ and a factor $\rho \ge 1$. The idea is good: the slowest pair is
# slowed down by the bracket, the first pair stays as it was, and at $l = l_0$ nothing jumps.

# %%
rho = 4
base = ntk_base(4 * 64, 16, max_positions=64, scaling_factor=rho)
slower = rope_frequencies(16)[-1] / rope_frequencies(16, base)[-1]
check(f"ρ = {rho}: the slowest pair is slower by 3ρ + 1", slower, torch.tensor(3.0 * rho + 1))
print(f"four times the length, ρ = {rho}: {slower:.1f} times slower, first pair"
      f" {rope_frequencies(16, base)[0]:.1f}")  # fmt: skip

# %% [markdown]
# The trouble is the cache. It holds keys that were rotated with an older base. (And in a batch, the
# base depends on the longest of the *other* texts.) Here are the scores of a text's last query,
# once with each key rotated on its arrival, once with a single base. Behind a softmax, we measure
# how much of the attention has moved: half the sum of the absolute differences of the weights.


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
# For random queries and keys at three times the training length, a fifth of the attention goes to
# the wrong places.
#
# **Fill in 2.** Repair the cache: rotate a stored key back with the base it was written with, and
# forward with the new one.


# %% tags=["exercise"]
def rebased(key, position, old, new):
    """A key (d,) that was rotated to its position with base `old`, rotated with base `new`."""
    ### BEGIN SOLUTION
    back = rotation_matrix(position, len(key), old).T
    return rotation_matrix(position, len(key), new) @ back @ key
    ### END SOLUTION


# %% tags=["check"]
for position, old, new in ((5, 10_000.0, 20_000.0), (300, 10_000.0, 90_000.0), (7, 50.0, 10.0)):
    plain = random(16, seed=position)
    stored = rotation_matrix(position, 16, old) @ plain
    wanted = rotation_matrix(position, 16, new) @ plain
    check(f"position {position}: the key as if written with the new base",
          rebased(stored, position, old, new), wanted)  # fmt: skip

# %% [markdown]
# Keys can be repaired, one by one. A *state* is a single sum of writes rotated with different
# bases, and can't be taken apart. So `ntk_base` is a function of a length that you fix once per
# text:


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
# ## 3 · Log scaling in a linear model (OTCE Appendix A)
#
# Long distances are rare in training. OTCE multiplies C by $\max(1, \log_{l_0} l)$ for a text of
# length $l$,
#
# > "[…] so that the problem of insufficient generalization ability of the high bit can be solved."
# > — OTCE, Appendix A
#
# While you decode, the final length is unknown, so the package scales the query at position $t$ by
# the $t + 1$ tokens seen so far. Does it help? In a softmax, it does something: over more tokens
# the weights flatten, and a factor on the query sharpens them again.

# %% tags=["setup"]
positions = torch.arange(64)[None]
scale = log_length_scale(positions, base_length=8, dtype=torch.float64)  # (b, l)

# %%
assert (scale[0, :8] == 1).all() and abs(scale[0, 63] - 2) < 1e-12
for t in (0, 7, 8, 20, 63):
    print(f"l₀ = 8: factor at position {t:2}: {scale[0, t]:.3f}")


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
# SSD is linear in C. The factor multiplies everything that comes out of the state, near and far
# alike, and the *choice* among tokens stays what it was. A norm behind the state removes even the
# factor. (With a skip connection in between, the mix changes.)

# %%
x, dt, A, B, C = inputs(l=64)
factor = scale[..., None, None]  # (b, l, 1, 1)
plain = ssd.ssd_chunked(x, dt, A, B, C)
scaled = ssd.ssd_chunked(x, dt, A, B, factor * C)
check("C times the factor = output times the factor", scaled, factor * plain)
check("one factor for the text: the same", ssd.ssd_chunked(x, dt, A, B, 2 * C), 2 * plain)
_ = must_differ("C times the factor = the output unchanged", scaled, plain)


def normed(y):
    """The norm of all heads together: (b, l, h, p) -> (b, l, h p)."""
    return F.rms_norm(y.flatten(2), (y.shape[2] * y.shape[3],), eps=1e-12)


check("behind a norm nothing is left of the factor", normed(scaled), normed(plain))
_ = must_differ("with a skip connection the mix changes", normed(scaled + x), normed(plain + x))

# %% [markdown]
# ## Summary
#
# - Compute angles in float32 at least, whatever the model runs in.
# - Fix the base once per text. A cache, and even more a state, remembers the base it was written
#   with.
# - Scaling queries sharpens a softmax. In a linear model it rescales what comes out of the state. A
#   norm right behind the state undoes that. With a skip connection the mix changes.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
