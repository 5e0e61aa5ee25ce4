# %% [markdown]
# # 05a · Padding, empty rows and finite minima
#
# **A batch needs rows of equal length, so short texts are padded. Padding breaks attention in
# several ways. One of them leaks the future into real tokens, if a state-space layer comes next.**
# By the end you will be able to
#
# - say why masked padding can't be seen, and when it can;
# - follow a NaN from an empty row into every gradient;
# - say what a "large negative number" in place of $-\infty$ does to an empty row.
#
# You need chapter 05, sections 2 and 6.
#
# Sources: *Wonderful Matrices* (WM) Listings 3–6; *Cheems* (Ch) Listing 2.

# %% tags=["setup"]
import math

import torch
from matplotlib.patches import Rectangle

from cheems_ref import attention, plotting, ssd
from cheems_ref.attention import GateMask, QCAttn, causal_mask, naive_attention
from cheems_ref.verify import check, must_differ

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# %% [markdown]
# ## 1 · Why masked padding can't be seen
#
# No real query may read a padded key. Its weight is $e^{-\infty} = 0$, and $0 \cdot v$ is 0 for
# every finite $v$. So we fill the padding with large numbers and look for them:

# %%
q, k, v = random(3, 1, 6, 1, 4, seed=0)  # each (b, l, h, p)
in_front = torch.tensor([[False, False] + [True] * 6])  # 2 of padding, 6 real
padding = 1000 * random(3, 1, 2, 1, 4, seed=32)
front_q, front_k, front_v = torch.cat([padding, torch.stack([q, k, v])], dim=2)
whole, allowed = attention.attention(q, k, v), causal_mask(8, 8, real=in_front)

padded = attention.attention(front_q, front_k, front_v, allowed=allowed)
check("padding in front, masked = the text alone", padded[:, 2:], whole)
read = attention.attention(front_q, front_k, front_v)
_ = must_differ("padding that may be read", read[:, 2:], whole)

# %% [markdown]
# *Finite* is the word to watch. $0 \cdot \text{NaN}$ is NaN, so NaN in one masked value reaches
# every row:

# %%
front_v[:, 0] = math.nan
through = attention.attention(front_q, front_k, front_v, allowed=allowed)
print("NaN in a masked value: rows that are NaN:", int(through.isnan().any(-1).sum()), "of 8")
assert through.isnan().any(-1).all()

# %% [markdown]
# The package's layers therefore set padding to 0 first. And positions should count real tokens only
# (chapter 04). Does it matter? Not for padding before the text, because rotary attention sees only
# distances. For padding *between* tokens it does:

# %%
_ = torch.manual_seed(0)
layer, x, columns = QCAttn(8, n_heads=2), random(1, 6, 8, seed=33), torch.arange(8)[None]
alone, _ = layer(x, torch.arange(6)[None])
between = torch.tensor([[True, True, True, False, False, True, True, True]])
for name, real in (("in front", in_front), ("between tokens", between)):
    filled_up = torch.full((1, 8, 8), math.nan).masked_scatter(real[..., None], x)
    counted, _ = layer(filled_up, (real.cumsum(1) - 1).clamp(min=0), padding_mask=real)
    check(f"QCAttn, NaN in padding {name}, real tokens counted", counted[real], alone[0])
    by_column, _ = layer(filled_up, columns, padding_mask=real)
    if name == "in front":
        check("padding in front counted as positions: the same", by_column[real], alone[0])
_ = must_differ("padding between tokens counted as positions", by_column[between], alone[0])

# %% [markdown]
# ## 2 · Rows of −∞ (WM Listings 5 and 6)
#
# A padded first token has nothing to read. Its row is all $-\infty$, and softmax turns that into
# 0/0. The listings add the causal mask (0 or $-\infty$) to padding times gate (1 or 0), and mask
# again where the sum is exactly 0:
#
# | sum | real, gate open | padding, or gate shut |
# |---|---|---|
# | the key itself, and the past | 0 + 1 = 1 | 0 + 0 = 0, masked again |
# | the future | $-\infty$ + 1 | $-\infty$ + 0 |
#
# The sum only decides which keys to mask again. The listings then add the causal mask to the
# scores, with $-\infty$ at the padding as well.


# %%
def masked_as_printed(padding, gate=None):
    """WM Listings 5 and 6: (b, h or 1, t, s) of 0 and -∞; padding (b, s), 1 for real tokens."""
    l = padding.shape[1]
    causal = torch.full((l, l), -math.inf).triu(1)[None, None]
    weight = padding[:, None, None, :].double()
    if gate is not None:  # (h, positions)
        weight = weight * gate[None, :, None, :l]
    total = causal + weight
    return causal.expand_as(total).masked_fill(total == 0, -math.inf)


# %% [markdown]
# Nobody reads the padded rows, and the loss leaves them out. What are the loss's gradients?

# %%
front = torch.tensor([[False, False, True, True, True, True]])
print("keys left to each query:", (masked_as_printed(front)[0, 0] == 0).sum(1).tolist())
x, W = random(6, 4, seed=51).requires_grad_(), random(4, 4, seed=52).requires_grad_()
weights = (x @ x.T / 2 + masked_as_printed(front)[0, 0]).softmax(-1)
loss = (weights @ x @ W)[2:].square().sum()
of_x, of_W = torch.autograd.grad(loss, (x, W))
print(f"loss over the real tokens: {loss.item():.2f}")
print(f"gradient of x: {int(of_x.isnan().sum())} of {of_x.numel()} are NaN")
print(f"gradient of W: {int(of_W.isnan().sum())} of {of_W.numel()} are NaN")
assert loss.isfinite() and of_x.isnan().all() and of_W.isnan().all()

# %% [markdown]
# The loss is finite and every gradient is NaN, because the backward pass multiplies the NaN weights
# by 0. The package lets an empty row see its own token. The result means nothing, but no real token
# reads it:

# %%
x, W = random(6, 4, seed=51).requires_grad_(), random(4, 4, seed=52).requires_grad_()
one_head = [u[None, :, None] for u in (x, x, x @ W)]
front = torch.tensor([[False, False, True, True, True, True]])
allowed = causal_mask(6, 6, real=front)
assert allowed[0, 0].sum(1).tolist() == [1, 1, 1, 2, 3, 4] and not allowed[0, 0, 2:, :2].any()
ours = naive_attention(*one_head, allowed=allowed)[0, 2:, 0].square().sum()
check("a row that sees itself: the same loss", ours, loss.detach())
of_x, of_W = torch.autograd.grad(ours, (x, W))
print(f"and finite gradients: up to {of_x.abs().max():.1f} and {of_W.abs().max():.1f}")
assert of_x.isfinite().all() and of_W.isfinite().all()

# %% [markdown]
# **Fill in 1.** Write the repaired mask for one row of real tokens and padding. Which rows get an
# exception, and which key do they read?


# %% tags=["exercise"]
def repaired_mask(real):
    """(t, s), True where query t may read key s; real (l,) is True for real tokens."""
    ### BEGIN SOLUTION
    l = len(real)
    allowed = torch.ones(l, l, dtype=torch.bool).tril() & real
    empty = ~allowed.any(1)
    return allowed | torch.diag(empty)
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none

for pattern in ("001111", "110010", "000", "111", "010"):
    real = torch.tensor([digit == "1" for digit in pattern])
    mask = torch.as_tensor(not_none(repaired_mask(real.clone())))
    assert mask.shape == (len(real), len(real)), f"a row per query, a column per key: {mask.shape}"
    for t, row in enumerate(mask.tolist()):
        wanted = [s <= t and bool(real[s]) for s in range(len(real))]
        if not any(wanted):
            wanted[t] = True
        assert row == wanted, f"tokens {pattern}: query {t} should read {wanted}, not {row}"
print("right for five rows of tokens, one of them all padding")

# %% [markdown]
# Worse, even without padding, a gate shut by hand at position 0 makes the output of a real token
# NaN. The package's rounded gate leaves query 0 its own token:

# %%
shut = torch.ones(1, 6)
shut[0, 0] = 0.0
rows = masked_as_printed(torch.ones(1, 6, dtype=torch.bool), shut)[0, 0].softmax(-1)
nan_rows = rows.isnan().any(-1).nonzero().flatten().tolist()
print("gate of position 0 shut, as printed: rows that are NaN:", nan_rows)
assert nan_rows == [0]

_ = torch.manual_seed(0)
layer = QCAttn(8, n_heads=2, mask="gate", max_positions=6, hard=True)
layer.mask.logit.data[:, 0] = -2.0
y, cache = layer(random(1, 6, 8, seed=56), torch.arange(6)[None])
check("ours: token 0 reads itself", y[:, 0], layer.out_proj(cache.v[:, 0].flatten(1)))

# %% [markdown]
# ## 3 · A finite minimum, and the future leaks
#
# A common cure for the NaN is to write the most negative finite number in place of $-\infty$. Then
# the softmax is finite. What does an empty row read? Guess before you run the cell.


# %%
def weights_with(fill, x, real):
    """Attention weights (t, s) of x (l, d) with this number at each forbidden key."""
    allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril() & real
    return (x @ x.T / 2).masked_fill(~allowed, fill).softmax(-1)


x, real = random(6, 4, seed=51), torch.tensor([False, False, True, True, True, True])
lowest = torch.finfo(torch.float64).min
weights = weights_with(lowest, x, real)
for t in range(3):
    print(f"row {t}:", [round(weight, 3) for weight in weights[t].tolist()])
assert (weights[:2] - 1 / 6).abs().max() < 1e-12 and weights[2, 2] == 1


# %% tags=["figure"]
def draw_reads(ax, reads, title):
    """Which keys each query reads: blue its past, orange the future, with the padding hatched."""
    for t, row in enumerate(reads.tolist()):
        for s, read in enumerate(row):
            color = plotting.COLORS[4 if s > t else 0] if read else "white"
            ax.add_patch(Rectangle((s, 5 - t), 1, 1, fc=color, ec=plotting.QUIET, lw=1))
    ax.add_patch(Rectangle((0, 0), 2, 6, fill=False, hatch="//", ec=plotting.INK, lw=0))
    ax.text(4, 5, "the future" if reads[0, 5] else "", ha="center", va="center", fontsize=18)
    ax.set(title=title, xlabel="key s; hatched: padding", xlim=(0, 6), ylim=(0, 6), aspect="equal")
    ax.set_xticks([s + 0.5 for s in range(6)], range(6))
    ax.set_yticks([5.5 - t for t in range(6)], range(6))


# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(11, 5))
draw_reads(axes[0], causal_mask(6, 6, real=real[None])[0, 0], "−∞, empty rows see themselves")
draw_reads(axes[1], weights > 0, "finite minimum")
axes[0].set_ylabel("query t")
plotting.save(
    fig,
    "05a_empty_rows",
    "Which keys each of six queries reads, where tokens 0 and 1 are padding. With minus infinity "
    "and a repair, the padded queries read themselves only. With a finite minimum they read all "
    "six keys, the future (orange) included. The rows of real tokens are the same in both.",
)

# %% [markdown]
# All their scores are equal, so the two padded queries read *everything*, the future included.
#
# **Fill in 2.** Predict it for any row: how many keys does each query read, if masked scores are a
# finite minimum?


# %% tags=["exercise"]
def keys_read(real):
    """The number of keys that each query reads, a list of l numbers; real (l,) is boolean."""
    ### BEGIN SOLUTION
    before = real.cumsum(0).tolist()
    return [count or len(real) for count in before]  # an empty row reads everything
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import as_tensor, not_none

for pattern in ("001111", "1100", "00100", "10101", "000"):
    row = torch.tensor([digit == "1" for digit in pattern])
    tokens = random(len(row), 4, seed=70)
    found = weights_with(torch.finfo(torch.float64).min, tokens, row)
    expected = (found > 0).sum(1).tolist()
    mine = as_tensor(not_none(keys_read(row.clone()))).tolist()
    wrong = [
        t for t, (count, right) in enumerate(zip(mine, expected, strict=True)) if count != right
    ]
    assert not wrong, f"tokens {pattern}: {mine} isn't right for the queries {wrong}"
print("right for five rows of tokens")

# %% [markdown]
# You may say: so what? Nobody reads the outputs of padding. In a stack of attention layers with
# this mask that's true:


# %%
def outputs(x, real, fill):
    """One layer of attention, added to the stream (l, d)."""
    return x + weights_with(fill, x, real) @ x


last = random(6, 4, seed=51)
last[5] += 1.0  # another last token
twice = [outputs(outputs(u, real, lowest), real, lowest) for u in (x, last)]
once = [outputs(u, real, lowest) for u in (x, last)]
moved = (once[1] - once[0]).abs().amax(1)
print("last token changed, one layer:  moved:", (moved > 1e-9).long().tolist())
assert (moved[:2] > 0.01).all() and (moved[2:5] == 0).all()
check("two layers: tokens 2 to 4 stay", twice[1][2:5], twice[0][2:5])

# %% [markdown]
# But what if the next layer is a state-space layer that takes no padding mask, like the published
# listings (section 6)? A state takes in every token that comes before, padding included. And the
# padding now knows the future:

# %%
_ = torch.manual_seed(0)
layer, places = ssd.SSD(4, n_heads=2, d_state=8), torch.arange(6)[None]
layer.dt_bias.data.zero_()  # large steps
layer.A_log.data.fill_(-2.0)  # a slow decay
change = {}
for name, mask in (("read by the state", None), ("masked in the state", real[None])):
    then = [layer(u[None], places, padding_mask=mask)[0][0].detach() for u in once]
    change[name] = (then[1] - then[0]).abs().amax(1)[2:5]  # of real tokens before the last
    moved = [round(step, 3) for step in change[name].tolist()]
    print(f"padding {name:19}: real tokens before the last move by", moved)
assert change["read by the state"].min() > 1e-3 and change["masked in the state"].max() == 0

# %% [markdown]
# There is the leak. Tokens 2 to 4 change when token 5 does. Neither layer reads ahead in a text
# without padding, so a test without padding misses it. Either repair is enough: no empty rows in
# attention, or a state that ignores padding. The package does both. This check uses only the
# first:

# %%
safe = causal_mask(6, 6, real=real[None])[0, 0]
repaired = []
for u in (x, last):
    weights = (u @ u.T / 2).masked_fill(~safe, -math.inf).softmax(-1)
    repaired.append(layer((u + weights @ u)[None], places)[0][0].detach())
check("empty rows see themselves: tokens 2 to 4 stay", repaired[1][2:5], repaired[0][2:5])

# %% [markdown]
# ## 4 · A mask in the other convention (WM Listings 5 and 6)
#
# Some libraries write masks as 1 for *keep* and 0 for *drop*; others add 0 for *keep* and $-\infty$
# for *drop*. The listings expect the first. Given the second, they raise no error, mask the real
# tokens and read the padding. The package's mask is boolean, and it refuses another dtype.

# %% tags=["guard"]
additive = torch.tensor([[-math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0]])
inverted = masked_as_printed(additive)[0, 0]
readable = (inverted[5] == 0).nonzero().flatten().tolist()
print("keys that query 5 may read, as printed:", readable)
print("real tokens:", additive[0].isfinite().nonzero().flatten().tolist())
assert readable == [0, 1]

# %% [markdown]
# ## 5 · A gate that follows the column, not the token (WM Listing 6)
#
# The listing applies gate $j$ to *column* $j$. Leading padding moves every token to another gate,
# so the answer depends on the padding. Ours goes by position (folded cell).

# %%
gate = torch.ones(1, 8)
gate[0, 1] = 0.0  # shut for the second token
front = torch.tensor([[False, False, True, True, True, True]])
unpadded = masked_as_printed(torch.ones(1, 4, dtype=torch.bool), gate)[0, 0]
padded = masked_as_printed(front, gate)[0, 0, 2:, 2:]  # the four real tokens
both = {"alone": unpadded, "with padding in front": padded}
read = {name: (mask[3] == 0).nonzero().flatten().tolist() for name, mask in both.items()}
for name, keys in read.items():
    print(f"as printed, the last of four tokens, {name}, reads", keys)
assert read == {"alone": [0, 2, 3], "with padding in front": [0, 1, 2, 3]}

# %% tags=["guard"]
mask = GateMask(1, max_positions=8)
mask.logit.data[0, 1] = -2.0
counted = torch.tensor([[0, 0, 0, 1, 2, 3]])  # positions of the padded row
v = torch.zeros(1, 6, 1, 4)  # not used by a gate
alone = mask(v[:, :4], torch.arange(4)[None])
check("ours: the same gates with padding in front", mask(v, counted)[..., 2:], alone)
_ = must_differ("gates by column", mask(v, torch.arange(6)[None])[..., 2:], alone)

# %% [markdown]
# ## 6 · Padding in the state of SSD (Ch Listing 2, WM Listings 3 and 4)
#
# The SSD listings take no padding mask. Masking keys in attention doesn't help when the *values*
# come from a state that has read the padding. We draw the padding 30 times, without the skip
# connection $D$ (Ch Listing 2 has none) and with correct positions. *Masked* means that $\Delta$
# and $x$ are 0 at padding. We report the relative change in norm:

# %%
_ = torch.manual_seed(0)
layer = ssd.SSD(16, n_heads=2, d_state=8)
_ = layer.D.data.zero_()
x = random(1, 12, 16, seed=54)
clean, _ = layer(x, torch.arange(12)[None])
for pads in (1, 4):
    junk = torch.cat([random(30, pads, 16, seed=55), x.expand(30, -1, -1)], dim=1)
    real = (torch.arange(12 + pads) >= pads).expand(30, -1)
    ids = (real.cumsum(1) - 1).clamp(min=0)
    ignored = layer(junk, ids, padding_mask=real)[0][:, pads:]
    check(f"{pads} padding in front, masked: same values", ignored, clean.expand(30, -1, -1))
    read = layer(junk, ids)[0][:, pads:]  # as the listings: padding is a token like any other
    change = (read - clean).norm(dim=(1, 2)) / clean.norm()
    print(f"{pads} padding in front, read: values change by {change.median():.0%} in the median")
    assert change.min() > 0.01 and change.median() > 0.05
    skipped = (read - clean).norm(dim=(1, 2)) / (clean + layer.out_proj(layer.x_proj(x))).norm()
    assert round(skipped.median().item(), 2) == {1: 0.01, 4: 0.02}[pads]  # with D = 1

# %% [markdown]
# One padded token is enough to change the values. WM Listing 4 has $D = 1$, which passes $x$ on
# unchanged. With it the values change less, by 1 % and 2 %.
#
# **Fill in 3.** Make the functional `ssd.ssd` ignore padding. Change $x$ and $\Delta$ so that the
# real tokens give the same outputs as without padding. The padding of $x$ may be NaN.


# %% tags=["exercise"]
def ignore_padding(x, dt, real):
    """x (b, l, h, p) and dt (b, l, h) for ssd.ssd; real (b, l) is True for real tokens."""
    ### BEGIN SOLUTION
    # dt = 0 neither decays nor writes; 0 · NaN is NaN, so x has to be replaced, not multiplied
    return x.masked_fill(~real[..., None, None], 0.0), dt.masked_fill(~real[..., None], 0.0)
    ### END SOLUTION


# %% tags=["check"]
inputs = random(1, 5, 2, 3, seed=71), random(1, 5, 2, seed=72).exp()
A, B, C = -random(2, seed=73).exp(), random(1, 5, 1, 4, seed=74), random(1, 5, 1, 4, seed=75)
alone = ssd.ssd(*inputs, A, B, C)
for pattern in ("0011111", "1101011", "11111000"):
    row = torch.tensor([[digit == "1" for digit in pattern]])
    full = []
    for part in (*inputs, B, C):
        wide = torch.full((1, len(pattern), *part.shape[2:]), 7.0)
        wide[row] = part[0]
        full.append(wide)
    full[0][~row] = math.nan
    changed = ignore_padding(full[0], full[1], row)
    check(f"tokens {pattern}: the text alone", ssd.ssd(*changed, A, *full[2:])[row], alone[0])

# %% [markdown]
# ## Summary
#
# | what is written | what it does when run | the repair |
# |---|---|---|
# | rows of −∞ (Listings 5, 6) | finite loss, NaN gradients | such a row sees itself |
# | a finite minimum instead | padding reads the future; a state passes it on | the same |
# | 0/1 masks unchecked (Listings 5, 6) | the other convention is inverted | boolean, or refused |
# | gate by column (Listing 6) | depends on the padding | gate by position |
# | SSD without a padding mask | padding enters the values | $\Delta = 0$ at padding |

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
