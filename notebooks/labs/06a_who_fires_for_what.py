# %% [markdown]
# # 06a · Who fires for what
#
# **Nobody tells a router what a digit is. Do characters of one kind find the same experts anyway?**
# You will be able to
#
# - measure to what extent two characters use the same experts;
# - say what such a number has to be compared with, and which control tells kind from frequency;
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


kinship, frequency = read_record("06_kinship"), read_record("06_frequency")
TOP = "at random, largest of 200"
GREY = dict(color=plotting.QUIET, alpha=0.25, lw=0)


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
# kind, minus the overlap between the kinds.
#
# **Fill in 1.** Break the first measure: give shares with all overlaps 1 and a kinship of 0. Then
# give shares with a kinship of 1.


# %% tags=["exercise"]
def shares_for(kinship):
    """Shares (12 letters + 10 digits, 8 experts) with a kinship of 0 or 1; rows sum to 1."""
    ### BEGIN SOLUTION
    share = torch.zeros(22, 8)
    share[:, 0] = 1.0  # all use expert 0
    if kinship == 1:
        share[12:] = share[12:].roll(1, dims=1)  # the digits use expert 1
    return share
    ### END SOLUTION


# %% tags=["check"]
for wanted in (0, 1):
    shares = torch.as_tensor(shares_for(wanted)).double()
    assert shares.shape == (22, 8) and shares.min() >= 0, "22 rows of 8 shares are asked for"
    assert (shares.sum(1) - 1).abs().max() < 1e-9, "the shares of a character sum to 1"
    overlap = torch.minimum(shares[:, None], shares).sum(-1)
    inside = (overlap[:12, :12].sum() - 12) / 132, (overlap[12:, 12:].sum() - 10) / 90
    found = sum(inside) / 2 - overlap[:12, 12:].mean()
    assert abs(found - wanted) < 1e-9, f"the kinship is {found:.2f} instead of {wanted}"
    assert wanted or overlap.min() > 1 - 1e-9, f"an overlap is {overlap.min():.2f} instead of 1"
    print(f"overlaps of letters and digits {overlap[0, 21]:.0f}, kinship {wanted}")

# %% [markdown]
# A kinship needs something to be compared with: 200 random splits of the same characters. We wrote
# this before the first run (`python -m experiments 06_kinship`), for all 1,024 experts:

# %%
print(kinship["prediction"])
for steps in (0, 300, 1500):
    rows = [row for row in kinship["table"] if row["steps"] == steps]
    values = ", ".join(f"{row['kinship']:.3f}" for row in rows)
    above = [row["seed"] for row in rows if row["kinship"] > row["at random, largest of 200"]]
    print(f"{steps:5} updates: kinship {values}; above all random splits:", end=" ")
    print(f"seeds {above}" if above else "none")
assert above == [0, 1, 2, 4] and all(abs(row["at random"]) < 0.02 for row in kinship["table"])

# %% [markdown]
# The first and the last part of the prediction held, the middle one **failed**: on seed 3 kinship
# is 0.034 after 300 updates. The other four seeds lie above every random split.
#
# ## 3 · Kind, or frequency?
#
# But is it the kind that counts? Our rarest letter is over ten times as frequent as any digit.
# Maybe the router sorts its characters by how often it sees them. Two controls can tell:
#
# - *frequent against rare letters*: one kind, other frequencies. The ten rarest small letters
#   take the place of the digits;
# - *digits against capitals*: other kinds, the same frequencies. Each of ten capitals is about as
#   frequent as one of the digits.
#
# **Fill in 2.** Choose the ten capitals yourself: for each digit, one whose count in the manual is
# within a factor of 2 of the digit's. (`manual.count("E")` counts the E.)

# %% tags=["setup"]
manual = text.read_text()


# %% tags=["exercise"]
def capitals_for(digits):
    """As many different capitals as there are digits, each about as frequent as its digit."""
    ### BEGIN SOLUTION
    left, chosen = set("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), ""
    for digit in digits:
        nearest = min(left, key=lambda c: abs(math.log(manual.count(c) / manual.count(digit))))
        left.remove(nearest)
        chosen += nearest
    return chosen
    ### END SOLUTION


# %% tags=["check"]
chosen = "".join(capitals_for("0123456789"))
assert len(chosen) == 10 and len(set(chosen)) == 10, f"ten different capitals, not {chosen!r}"
assert chosen.isascii() and chosen.isalpha() and chosen.isupper(), f"{chosen!r} aren't capitals"
for digit, capital in zip("0123456789", chosen, strict=True):
    ratio = manual.count(capital) / manual.count(digit)
    assert 1 / 2 < ratio < 2, f"{capital} is {ratio:.2f} times as frequent as {digit}"
print("ten capitals as frequent as the ten digits")

# %% [markdown]
# Before you look: which of the two controls should have a kinship, if it is one of frequency? Here
# is the same model after 1,500 updates, with our prediction (`python -m experiments 06_frequency`):

# %%
print(frequency["prediction"])
SPLIT_LABELS = [
    "letters\nand digits",
    "frequent and\nrare letters:\nsame kind",
    "digits and\ncapitals: same\nfrequency",
]
SPLITS = {
    "letters, digits": "letters and digits",
    "frequent letters, rare letters": "only the frequency differs",
    "digits, capitals": "only the kind differs",
}
above = {}
for name, words in SPLITS.items():
    rows = [row[name] for row in frequency["table"]]
    above[name] = sum(row["kinship"] > row["at random, largest of 200"] for row in rows)
    values = ", ".join(f"{row['kinship']:.3f}" for row in rows)
    print(f"{words:27} {values}; above all random splits: {above[name]} of 5 seeds")


# %% tags=["figure"]
def draw_seeds(ax):
    """Kinship of letters and digits: one line per seed, and what random splits reach."""
    for seed in range(5):
        values = [row["kinship"] for row in kinship["table"] if row["seed"] == seed]
        ax.plot(range(3), values, "o-", color=plotting.COLORS[0])
    tops = [max(row[TOP] for row in kinship["table"][i : i + 5]) for i in (0, 5, 10)]
    ax.fill_between(range(3), -0.01, tops, **GREY)
    ax.text(1.02, 0.062, "random splits\nreach this far", fontsize=15)
    ax.set_xticks(range(3), ["0", "300", "1,500"])
    ax.set(ylim=(-0.01, 0.17), xlabel="updates", ylabel="kinship", title="letters and digits")


def draw_controls(ax):
    """Kinship of three pairs of kinds: five dots each, and what random splits reach."""
    for i, name in enumerate(SPLITS):
        rows = [row[name] for row in frequency["table"]]
        ax.fill_between([i - 0.35, i + 0.35], -0.01, max(row[TOP] for row in rows), **GREY)
        places = [i + 0.1 * (seed - 2) for seed in range(5)]
        values = [row["kinship"] for row in rows]
        ax.plot(places, values, "o", color=plotting.COLORS[2 if i else 0], ms=10)
    ax.set_xticks(range(3), SPLIT_LABELS)
    ax.set(ylim=(-0.01, 0.17), yticks=[], title="three pairs, 1,500 updates")


# %% tags=["figure"]
fig, (left, right) = plotting.figure(1, 2, size=(12.5, 5.2))
draw_seeds(left)
draw_controls(right)
plotting.save(
    fig,
    "06a_kinship",
    "Left, the kinship of letters and digits at 0, 300 and 1,500 updates, a line for each of five "
    "seeds, and a grey area up to the largest of the random splits: four lines leave it, and one "
    "stays inside. Right, five dots for each of three pairs of kinds after 1,500 updates. Where "
    "only the frequency differs, all lie within the grey area. Where only the kind differs, "
    "four of five lie above it.",
)

# %% tags=["guard"]
assert min(map(manual.count, "etaoinshrdlu")) > 10 * max(map(manual.count, "0123456789"))
for digit, capital in zip("1032456789", "ECFRWLGHVY", strict=True):  # of the record
    assert 1 / 2 < manual.count(capital) / manual.count(digit) < 2
again = [row["letters, digits"]["kinship"] for row in frequency["table"]]
first = [row["kinship"] for row in kinship["table"] if row["steps"] == 1500]
assert [seed for seed in range(5) if again[seed] != first[seed]] == [3]
assert (first[3], again[3]) == (0.0399, 0.0354)
small = sorted(map(chr, range(97, 123)), key=manual.count)
assert set(small[:10]) == set("bgywxvkjqz")
assert above == {"letters, digits": 4, "frequent letters, rare letters": 0, "digits, capitals": 4}
by_frequency, by_kind = (
    sorted(row[name]["kinship"] for row in frequency["table"])
    for name in ("frequent letters, rare letters", "digits, capitals")
)
assert by_frequency[-1] < 0.04 and round(by_frequency[-1], 3) == 0.036
assert by_kind == [0.0215, 0.0716, 0.0873, 0.0917, 0.0992]
failed = [row for row in kinship["table"] if row["steps"] == 300 and row["kinship"] <= 0.08]
assert [(row["seed"], round(row["kinship"], 3)) for row in failed] == [(3, 0.034)]
assert all(row["kinship"] < 0.03 for row in kinship["table"] if row["steps"] == 0)

# %% [markdown]
# It is the kind. Where only the frequency differs, kinship is 0.036 at most, and no seed exceeds
# its random splits. Where only the kind differs, four seeds do. The first half of our prediction
# held. The second **failed**: we predicted 0.08 on four seeds, and only three reach it (the
# fourth has 0.072). With the same frequencies, kinship is also smaller than between letters and
# digits, so frequency may add to it. (The first row repeats the runs of Section 2. Only seed 3 came
# out differently, at 0.035 instead of 0.040.)
#
# ## 4 · Who never fires
#
# Two lists of $r$ product keys make $r^2$ experts. But WM Table 7 has 3,072 and 8,192, and neither
# is a square. Ch Listing 4 rounds $\sqrt e$ down. How many experts can no token reach?

# %%
for e, lost in ((3072, 47), (8192, 92)):
    r = int(math.sqrt(e))
    print(f"{e} experts: {r} keys per half reach {r * r}; {e - r * r} are never asked for")
    assert e - r * r == lost

# %% [markdown]
# The two lists don't have to be equally long.
#
# **Fill in 3.** Choose two lengths that reach every expert with as few keys as possible.


# %% tags=["exercise"]
def two_lengths(e):
    """The lengths (r_1, r_2) of two lists of keys for exactly e experts, r_1 ≤ r_2."""
    ### BEGIN SOLUTION
    r_1 = max(r for r in range(1, math.isqrt(e) + 1) if e % r == 0)
    return r_1, e // r_1
    ### END SOLUTION


# %% tags=["check"]
for e in (3072, 8192, 1024, 7, 90):
    r_1, r_2 = two_lengths(e)
    assert r_1 <= r_2 and r_1 * r_2 == e, f"{r_1} and {r_2} keys reach {r_1 * r_2} of {e} experts"
    fewest = min(i + e // i for i in range(1, e + 1) if e % i == 0)
    assert r_1 + r_2 == fewest, f"{e} experts: {r_1 + r_2} keys, {fewest} would do"
    print(f"{e:5} experts: {r_1} and {r_2} keys")

# %% [markdown]
# The search is the same: a folded cell compares it with brute force.

# %% tags=["guard"]
for r_1, r_2 in ((48, 64), (64, 128)):
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(r_1, generator=generator), torch.randn(r_2, generator=generator)
    (scores, i), (others, j) = first.topk(8), second.topk(8)
    best = (scores[:, None] + others).flatten().topk(8).indices
    numbers = (i[:, None] * r_2 + j).flatten()[best]
    assert torch.equal(numbers, (first[:, None] + second).flatten().topk(8).indices)

# %% [markdown]
# ## 5 · 1,024 times as many experts
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
# - After training, letters and digits had a kinship above all 200 random splits, on four of five
#   seeds. So had digits and capitals of the same frequencies; frequent and rare letters had none.
# - A square root rounded down puts 47 of 3,072 experts, and 92 of 8,192, out of reach.
# - "The same number of parameters" depends on widths and heads that the paper doesn't give.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
