# %% [markdown]
# # 06a · Who fires for what
#
# **Nobody tells a router what a digit is. Do characters of one kind find the same experts anyway?**
# You will be able to
#
# - measure to what extent two characters use the same experts;
# - say what such a number has to be compared with;
# - find experts that no token can reach, and check a claim about parameters.
#
# You need chapter 06.
#
# Sources: *Wonderful Matrices* (WM) Listing 8, Table 7; *Cheems* (Ch) §3.3, Listing 4;
# `cheems_ref/experts.py`.

# %% tags=["setup"]
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from cheems_ref import plotting, text
from cheems_ref.experts import DGLU, MLP, CDMMoE, CDMoE, ExpansiveMoE

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # models as small as these gain little from more


def read_record(name):
    return json.loads(Path(f"../../experiments/records/{name}.json").read_text())


# %% [markdown]
# ## 1 · Overlap
#
# We train a small model with 1,024 experts to predict the next byte of Python's manual from the
# current one alone.


# %% tags=["setup", "experiment"]
def byte_model():
    """From bytes (b, l) to logits (b, l, 256), each byte by itself."""
    return torch.nn.Sequential(
        torch.nn.Embedding(256, 32),
        CDMoE(32, d_ff=64, n_experts=1024, n_heads=4, k=4, d_query=16),
        torch.nn.RMSNorm(32),
        torch.nn.Linear(32, 256),
    ).float()


# %% tags=["setup", "experiment"]
def train_on_bytes(steps, seed=0):
    """Train on windows of 64 bytes of the manual; the losses and the model."""
    torch.manual_seed(seed)
    ids = text.text_to_ids(text.read_text())
    generator, model, losses = torch.Generator().manual_seed(seed), byte_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 65, (16,), generator=generator)
        window = torch.stack([ids[s : s + 65] for s in starts])
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


# %% [markdown]
# The *overlap* of two characters is the sum over experts of the smaller of their shares: 1 if they
# use the same experts with the same weights, 0 without a common expert. Here is its mean before
# training and after 1,500 updates, for seed 0. The record (`python -m experiments 06_fires`) keeps
# only the 60 experts used most, so the trained overlaps are lower bounds.


# %% tags=["experiment"]
def fires_for(model, characters):
    """The share of each character's gates that falls on each expert: (characters, experts)."""
    with torch.no_grad():
        tokens = model[0](torch.tensor(list(characters.encode())))[None]
        gates, indices = model[1].route(tokens)
    share = torch.zeros(len(characters), 1024)
    return share.scatter_add(1, indices[0].flatten(1), gates[0].flatten(1).double() / 4)


trained = torch.tensor(read_record("06_fires")["share"])[1:23]  # (22, 60)
untrained = fires_for(train_on_bytes(0)[1], "etaoinshrdlu0123456789")
for name, share in (("untrained", untrained), ("1,500 steps", trained)):
    overlap = torch.minimum(share[:, None], share).sum(-1).fill_diagonal_(0)
    letters, digits = overlap[:12, :12].sum() / (12 * 11), overlap[12:, 12:].sum() / (10 * 9)
    print(f"{name:12} letters {letters:.2f}, digits {digits:.2f},", end=" ")
    print(f"between {overlap[:12, 12:].mean():.2f}")

# %% [markdown]
# ## 2 · Kinship
#
# Both overlaps within a kind rose. But overlap can rise everywhere, if the router uses fewer
# experts for everything. So we subtract: *kinship* is the average of the two overlaps within a
# kind, minus that between the kinds, over all 1,024 experts, not just 60. It needs a control, 200
# random splits of the same characters into 12 and 10. We wrote this before the first run (`python
# -m experiments 06_kinship`):

# %%
kinship = read_record("06_kinship")
print(kinship["prediction"])
for steps in (0, 300, 1500):
    rows = [row for row in kinship["table"] if row["steps"] == steps]
    values = ", ".join(f"{row['kinship']:.3f}" for row in rows)
    above = [row["seed"] for row in rows if row["kinship"] > row["at random, largest of 200"]]
    print(f"{steps:5} updates: kinship {values}; above all random splits:", end=" ")
    print(f"seeds {above}" if above else "none")
assert above == [0, 1, 2, 4] and all(abs(row["at random"]) < 0.02 for row in kinship["table"])
assert all(row["kinship"] < 0.03 for row in kinship["table"] if row["steps"] == 0)
failed = [row for row in kinship["table"] if row["steps"] == 300 and row["kinship"] <= 0.08]
assert [(row["seed"], round(row["kinship"], 3)) for row in failed] == [(3, 0.034)]


# %% tags=["figure"]
def draw_kinship(fires, kinship):
    """Overlaps of all characters at one seed; kinship of five seeds beside random splits."""
    fig, (left, right) = plotting.figure(1, 2, size=(12.5, 5.4))
    share = torch.tensor(fires["share"])
    overlap = torch.minimum(share[:, None], share).sum(-1)
    plotting.heatmap(left, overlap, title="overlap, seed 0", signed=False, limit=0.5)
    for axis in (left.xaxis, left.yaxis):
        axis.set_ticks([0, 6.5, 17.5, 25], ["space", "letters", "digits", "signs"])
    for row in kinship["table"]:
        x = (0, 300, 1500).index(row["steps"]) + 0.12 * (row["seed"] - 2)
        right.plot([x, x], [0, row["at random, largest of 200"]], color=plotting.QUIET, lw=4)
        right.plot(x, row["kinship"], "o", color=plotting.COLORS[row["seed"] == 3], ms=9)
    right.set_xticks([0, 1, 2], ["0 updates", "300", "1,500"])
    right.set(title="kinship (orange: seed 3); grey: 200 random splits", ylim=(-0.02, 0.18))
    return fig


# %% tags=["figure"]
plotting.save(
    draw_kinship(read_record("06_fires"), kinship),
    "06a_kinship",
    "Left, a heat map of the overlaps of 28 characters at seed 0: the block of digits is darker "
    "than the rest, that of letters only in part. Right, the kinship of five seeds at 0, 300 and "
    "1,500 updates, with bars up to the largest of 200 random splits. After training, four seeds "
    "lie above their bars, and seed 3, in orange, does not.",
)

# %% tags=["guard"]
manual = text.read_text()
assert min(map(manual.count, "etaoinshrdlu")) > 10 * max(map(manual.count, "0123456789"))

# %% [markdown]
# The first and the last part of the prediction held, the middle one **failed**: on seed 3 kinship
# is 0.034 after 300 updates. Even after 1,500, some random split has a larger one there. The other
# four seeds lie above every random split. But the kinship may be one of frequency, not of kind: our
# rarest letter is over ten times as frequent as any digit.
#
# ## 3 · Who never fires
#
# Two lists of $r$ product keys make $r^2$ experts. But WM Table 7 has 3,072 and 8,192, and neither
# is a square. Ch Listing 4 rounds $\sqrt e$ down. How many experts can no token reach?

# %%
for e, lost in ((3072, 47), (8192, 92)):
    r = int(math.sqrt(e))
    print(f"{e} experts: {r} keys per half reach {r * r}; {e - r * r} are never asked for")
    assert e - r * r == lost

# %% [markdown]
# The two lists don't have to be equally long. Lists of 48 and 64 keys, or 64 and 128, reach every
# expert, and the search is the same: a folded cell compares it with brute force.

# %% tags=["guard"]
for r_1, r_2 in ((48, 64), (64, 128)):
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(r_1, generator=generator), torch.randn(r_2, generator=generator)
    (scores, i), (others, j) = first.topk(8), second.topk(8)
    best = (scores[:, None] + others).flatten().topk(8).indices
    numbers = (i[:, None] * r_2 + j).flatten()[best]
    assert torch.equal(numbers, (first[:, None] + second).flatten().topk(8).indices)

# %% [markdown]
# ## 4 · 1,024 times as many experts
#
# Ch §3.3 goes from OTCE's 4 experts to 4,096, "while maintaining the same number of parameters". In
# both layers the shared dimension is 4,096 and the private one 2,048: the width inside OTCE's
# experts, and what Cheems' neurons read. It doesn't say how wide a token is (we take OTCE's 1,024,
# and twice that), or how many heads there are. What do more heads cost, if each needs its own map
# from those 2,048 numbers to a query of as many?


# %%
def parameters(make):
    """Count the parameters of a module on torch's meta device, which makes no numbers."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


two, three = parameters(lambda: MLP(1024, 2048)), parameters(lambda: DGLU(1024, 2048))
print(f"d = 1024, f = 2048: MLP {two:,} parameters, DGLU {three:,}")
# Exchange the package's shared expert, as wide as the private ones, for one twice as wide.
four = parameters(lambda: ExpansiveMoE(1024, 2048, n_experts=4, k=1)) + three
print(f"OTCE's layer, 4 experts: {four:,} parameters")
sizes = dict(d_ff=4096, d_private=2048, n_experts=4096, k=8, d_query=2048)
for h, expected in ((1, 0.95), (2, 1.06), (4, 1.26), (8, 1.67)):
    count = parameters(lambda h=h: CDMMoE(1024, n_heads=h, **sizes))
    print(f"CDMMoE, {h} head(s): {count:,} parameters, {count / four:.2f} times as many,", end=" ")
    print(f"{h * 2048 * 2048 / count:.0%} of them for queries")
    assert abs(count / four - expected) < 0.01
layers = (lambda: ExpansiveMoE(2048, 2048, n_experts=4, k=1), lambda: DGLU(2048, 2048))
wider = parameters(lambda: CDMMoE(2048, n_heads=8, **sizes)) / sum(map(parameters, layers))
print(f"d = 2048, 8 heads: {wider:.2f} times as many")
assert 0.96 < wider < 0.98
assert three / two == 1.5

# %% [markdown]
# So at OTCE's width the claim holds within 6 % for one or two heads, at twice that for eight: it
# can't be checked without both numbers. And an *expert* is 2,048 neurons in OTCE's layer,
# and one in Cheems'.
#
# ## Summary
#
# - Compare an overlap within a kind with that between kinds, and with random splits.
# - After training, kinship lay above that of all 200 random splits, on four of five seeds.
# - A square root rounded down puts 47 of 3,072 experts, and 92 of 8,192, out of reach.
# - "The same number of parameters" depends on widths and heads that the paper doesn't give.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
