# %% [markdown]
# # 04c · State tracking
#
# **Is the number of ones so far odd? Where is the queen after 300 swaps of three cards? To know, a
# model has to keep a state that never fades, and change it exactly. Most linear recurrences can't,
# at every length.** You will be able to
#
# - prove that decays in $[0, 1]$ don't count parity, however many layers you stack;
# - build recurrences that track a state, from mirrors and from turns;
# - tell what a recurrence can represent from what training finds.
#
# You need chapters 02 and 04. Three cells are for you to fill in.
#
# Sources: Sarrof, Veitsman and Hahn (2024) and Grazzi et al. (2024) for the limits of decays; Siems
# et al., *DeltaProduct* (2025), for several mirrors per token; Lahoti et al., *Mamba-3* (2026), for
# turns that the token sets.

# %% tags=["setup"]
import cmath
import itertools
import json
import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from cheems_ref import plotting
from cheems_ref.linear_attention import delta_rule
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# %% [markdown]
# ## 1 · Two machines
#
# A machine is a table. Its rows are states, its columns are tokens, and each entry is the state
# that comes next. The first machine has two states and reads bits: a 1 changes the state, a 0
# doesn't. The second one watches three cards. They have six arrangements, and a token swaps two
# places:

# %% tags=["setup", "experiment"]
ARRANGEMENTS = list(itertools.permutations(range(3)))
SWAPS = [(1, 0, 2), (0, 2, 1), (2, 1, 0)]  # who stands at each place afterwards


def after(arrangement, swap):
    """The number of the arrangement after a swap of two places."""
    return ARRANGEMENTS.index(tuple(arrangement[place] for place in swap))


# a row for each state, a column for each token: the next state
MACHINES = {
    "parity": torch.tensor([[0, 1], [1, 0]]),
    "three swaps": torch.tensor([[after(a, swap) for swap in SWAPS] for a in ARRANGEMENTS]),
}


# %% tags=["setup", "experiment"]
def texts_and_answers(machine, texts, length, generator):
    """Random tokens (texts, length), and the machine's state after each."""
    ids = torch.randint(machine.shape[1], (texts, length), generator=generator)
    state, states = torch.zeros(texts, dtype=torch.long), []
    for token in ids.unbind(1):
        state = machine[state, token]
        states.append(state)
    return ids, torch.stack(states, dim=1)


# %%
ids, answers = texts_and_answers(MACHINES["parity"], 1, 12, torch.Generator().manual_seed(0))
print("bits  ", *ids[0].tolist(), "\nparity", *answers[0].tolist())
for state, (zero, one) in enumerate(MACHINES["parity"].tolist()):
    print(f"parity {state}: bit 0 -> {zero}, bit 1 -> {one}")
for state, row in enumerate(MACHINES["three swaps"].tolist()):
    print(f"cards {ARRANGEMENTS[state]}: swap 0, 1 or 2 ->", *(ARRANGEMENTS[i] for i in row))

# %% [markdown]
# Both are small enough for a child. But the answer depends on *every* token of the text, and no
# token ever loses its say. A memory that fades is no use here.
#
# ## 2 · Why decays fail
#
# Chapters 01 and 03 have recurrences whose state fades, entry by entry: $h_t = a_t h_{t-1} + b_t$,
# where $a_t \ge 0$ and $b_t$ are computed from the token. In a computer, each step is rounded.
#
# **Theorem.** Stack any number of such layers, with anything in between that looks at one token or
# at a few of its neighbours. On a long enough text of ones, the output stops changing. So the stack
# doesn't count parity at every length.
#
# *Proof.* In the first layer, every token reads the same (after the first few, if it looks at
# neighbours), so $a$ and $b$ stay the same. The map $f(h) = \mathrm{round}(a h + b)$ never turns
# the order around: if $h \le h'$, then $f(h) \le f(h')$. That needs $a \ge 0$. Suppose $h_0 \le
# h_1$. Then $h_1 = f(h_0) \le f(h_1) = h_2$, and so on: the state only climbs (or only sinks).
# There are finitely many floating-point numbers, so it comes to a stop. From there on, the next
# layer reads the same input at every token, and stops for the same reason. In the end the stack
# says the same after $N$ ones and after $N + 1$, for some large $N$. Parity doesn't. ∎
#
# The argument doesn't care how large the model is or how it was trained. It does need $h$ to be
# rounded and the text to be long enough. With $a = b = 1$ the state counts the ones, and a reader
# that takes $h$ modulo 2 knows their parity, in float32 up to $2^{24}$ ones, where the counter
# stops. That's the theorem at work, but it's far away.
#
# The delta rule's transitions aren't diagonal. For $\beta \le 1$ their eigenvalues aren't negative
# either, and Grazzi et al. prove the same for them.
#
# Let's watch it happen in three layers of random weights. `fade`, in a folded cell, is the
# recurrence that section 6 trains:


# %% tags=["guard"]
counter = torch.tensor([2.0**24 - 1, 2.0**24], dtype=torch.float32)
assert (counter + 1 - counter).tolist() == [1, 0] and (counter % 2).tolist() == [1, 0]


# %% tags=["setup", "experiment"]
def fade(state, write, steer):
    """A decay in (0, 1) for each of 16 numbers."""
    return (steer + 3).sigmoid() * state + write


# %%
def stacked(bits, layers=3):
    """Layers of `fade` with random weights, tanh in between: the last layer's states (l, 16)."""
    x = F.one_hot(bits, 2).float()
    for layer in range(layers):
        weights = random(x.shape[1], 32, seed=layer).float() / 4
        write, steer = (x[:, :, None] * weights).sum(1).chunk(2, dim=-1)
        state, states = torch.zeros(16, dtype=torch.float32), []
        for t in range(len(bits)):
            state = fade(state, write[t], steer[t])
            states.append(state)
        x = torch.stack(states).tanh()
    return torch.stack(states)


states = stacked(torch.ones(4001, dtype=torch.long))
assert torch.equal(states[-1], states[-2]) and not torch.equal(states[0], states[1])
print("after 4,000 and after 4,001 ones, the state is the same to the last bit")

# %% [markdown]
# ## 3 · Mirrors and turns
#
# The proof needed $a \ge 0$ and nothing else. Put $a = -1$, and $f$ turns the order around: the
# state swings between two values for ever. Chapter 04 had two ways to get a $-1$. A *mirror* is
# the delta rule at $\beta = 2$ with a unit key, $I - 2kk^\top$. Half a *turn* is a factor of
# $e^{\mathtt{i}\pi}$. Both stay where the token is a 0. Here are 300 bits:

# %%
bits = torch.randint(2, (300,), generator=torch.Generator().manual_seed(0))
one, start = torch.ones(1, 300, 1, 1), torch.ones(1, 1, 1, 1)
mirror = delta_rule(one, one, 0 * one, 2.0 * bits[None, :, None], initial_state=start)
half_turn = torch.exp(1j * math.pi * bits).cumprod(0).real
parity = bits.cumsum(0) % 2
check("mirrors count parity", mirror.flatten(), 1.0 - 2 * parity)
check("half turns count parity", half_turn, 1.0 - 2 * parity)
fading = delta_rule(one, one, 0 * one, 1.9 * bits[None, :, None], initial_state=start)
_ = must_differ("β = 1.9: the sign is right, the size is gone", fading.flatten(), mirror.flatten())
print(f"after {bits.sum()} ones: β = 2 leaves {mirror.flatten()[-1].abs():.0f},"
      f" β = 1.9 leaves {fading.flatten()[-1].abs():.0e}")  # fmt: skip

# %% [markdown]
# A mirror undoes itself, so it can only count to two. Turns count further.
#
# **Fill in 1.** Count ones modulo $m$ with one complex number: it starts at 1 and is multiplied by
# your factor for each token. The check reads the remainder off its angle, counterclockwise.


# %% tags=["exercise"]
def factor(bit, m):
    """The complex number that multiplies the state at a token `bit`, 0 or 1."""
    ### BEGIN SOLUTION
    return cmath.exp(2j * math.pi * bit / m)
    ### END SOLUTION


# %% tags=["check"]
bits = torch.randint(2, (300,), generator=torch.Generator().manual_seed(7))
for m in (2, 3, 7):
    state, seen = 1 + 0j, []
    for bit in bits.tolist():
        state *= factor(bit, m)
        seen.append(round(m * cmath.phase(state) / (2 * math.pi)) % m)
    wrong = [t for t in range(300) if seen[t] != bits[: t + 1].sum() % m]
    assert not wrong, f"m = {m}: the first wrong remainder is at place {wrong[0]}"
    assert abs(abs(state) - 1) < 1e-9, f"m = {m}: the state has grown or faded"
print("right at all 300 places, modulo 2, 3 and 7")

# %% [markdown]
# ## 4 · Two mirrors are a turn
#
# Put three cards on the corners of a triangle. A mirror through a corner swaps the other two cards.
# Before you look at the last picture: where is the ace after both mirrors?

# %% tags=["figure"]
plotting.show_drawing(
    "04c_mirrors",
    "A triangle with the cards A, K and Q on its corners, three times. The first mirror goes "
    "through K and swaps A and Q. The second goes through Q, at the top, and swaps K and A. "
    "Afterwards each card has moved on by one corner, a turn by 120 degrees.",
)

# %% [markdown]
# The cards have all moved on by one corner: two mirrors that stand 60° apart are a turn by 120°.
# This is why *DeltaProduct* takes several delta-rule steps per token. One mirror per token can't
# turn.
#
# **Fill in 2.** Predict, then build: two mirrors in the plane whose product turns by a fifth of a
# full turn.


# %% tags=["exercise"]
def two_keys():
    """Two unit keys (2,); the mirror of the first comes first."""
    ### BEGIN SOLUTION
    half = math.pi / 5  # the mirrors stand half as far apart
    return torch.tensor([1.0, 0.0]), torch.tensor([math.cos(half), math.sin(half)])
    ### END SOLUTION


# %% tags=["check"]
chosen = [torch.as_tensor(k).double() for k in two_keys()]
first, second = (torch.eye(2) - 2 * torch.outer(k, k) for k in chosen)
turn_by = second @ first
for k in chosen:
    assert abs(k.norm() - 1) < 1e-9, "a key isn't a unit vector"
powers = [torch.linalg.matrix_power(turn_by, n) for n in range(1, 6)]
away = [(power - torch.eye(2)).abs().max().item() for power in powers]
assert away[-1] < 1e-9, "five such turns don't come back to the start"
assert min(away[:-1]) > 0.5, "it's back before the fifth"
assert abs(turn_by[0, 0] - math.cos(2 * math.pi / 5)) < 1e-9, "that's two fifths of a turn"
print("a fifth of a turn, out of two mirrors")

# %% [markdown]
# ## 5 · Three cards
#
# In three dimensions, the mirror with the key $k = (e_i - e_j)/\sqrt 2$ swaps entries $i$ and $j$
# of a vector and leaves the third alone. So let the state be a row of three numbers, the
# arrangement itself, and give each token its key. Nothing is ever written. A call takes one query
# per token, and entry $i$ of the state is read with the query $e_i$. So three copies run as a
# batch, and copy $i$ asks for place $i$:

# %%
ids, answers = texts_and_answers(MACHINES["three swaps"], 1, 300, torch.Generator().manual_seed(1))
pairs = torch.tensor([[1.0, -1, 0], [0, 1, -1], [1, 0, -1]]) / math.sqrt(2)
keys = pairs[ids[0]][None, :, None].expand(3, -1, -1, -1)  # (b, l, h, n), a row for each place
places = torch.eye(3)[:, None, None].expand_as(keys)
beta, nothing = torch.full((3, 300, 1), 2.0), torch.zeros(3, 300, 1, 1)
cards = torch.arange(3.0).expand(3, 1, 1, 3)  # the state at the start: 0, 1, 2
seen = delta_rule(places, keys, nothing, beta, initial_state=cards)[..., 0, 0].T
truth = torch.tensor([ARRANGEMENTS[a] for a in answers[0].tolist()]).double()
check("one mirror per swap follows the cards for 300 swaps", seen, truth)

# %% [markdown]
# And turns? Any two turns of a pair commute. Swaps don't: the first two swaps in one
# order and in the other give different arrangements. So a product of turns can't follow the cards,
# as long as nothing is written. (What a stack of layers with writes could do is another question.)

# %%
swaps = MACHINES["three swaps"]
one_order, other_order = swaps[swaps[0, 0], 1], swaps[swaps[0, 1], 0]
assert one_order != other_order
a, b = cmath.exp(0.7j), cmath.exp(2.1j)  # any two angles
assert a * b == b * a
print("swaps 0, 1:", ARRANGEMENTS[one_order], "  swaps 1, 0:", ARRANGEMENTS[other_order])

# %% [markdown]
# **Fill in 3.** Now a token is any of the six rearrangements: `order[i]` says whose place the card
# at place $i$ had before. Swaps take one mirror, but the two rearrangements that move all cards
# need two. Give the keys of at most two mirrors for each. (Hint: sort by swaps, and mind the
# order.)


# %% tags=["exercise"]
def mirrors(order):
    """At most two unit keys (3,), first mirror first; together they rearrange by `order`."""
    ### BEGIN SOLUTION
    left, keys = list(order), []
    for place in range(3):
        if left[place] != place:
            other = left.index(place)
            keys.append((torch.eye(3)[place] - torch.eye(3)[other]) / math.sqrt(2))
            left[place], left[other] = left[other], left[place]
    return keys[::-1]  # the swaps that sort, undone: the last one first
    ### END SOLUTION


# %% tags=["check"]
for order in ARRANGEMENTS:
    state = torch.tensor([5.0, 6.0, 7.0])
    keys = [torch.as_tensor(k).double() for k in mirrors(order)]
    assert len(keys) <= 2, f"{order}: {len(keys)} mirrors"
    for k in keys:
        assert abs(k.norm() - 1) < 1e-9, f"{order}: a key isn't a unit vector"
        state = state - 2 * (state @ k) * k
    right = torch.tensor([5.0, 6.0, 7.0])[list(order)]
    assert torch.allclose(state, right), f"{order} becomes {state.round().int().tolist()}"
print("all six rearrangements, with at most two mirrors each")

# %% [markdown]
# ## 6 · Does training find it?
#
# That something can be represented doesn't mean that it's learned. So we trained one layer on texts
# of 40 tokens, with 16 numbers of state and a small network that reads them: decays, turns, and the
# delta rule with $\beta$ up to 1 or up to 2 (`python -m experiments 04_state_tracking`, folded
# cells). Our prediction was written down first. A recurrence that can't do a task stays below 0.6
# on parity and below 0.5 on the cards, where one in three is right by the text's length alone. One
# that can is above 0.95 at places 201 to 300 on at least three of five seeds. Where would you bet?


# %% tags=["setup", "experiment"]
def turn(state, write, steer):
    """Eight pairs; each fades by a decay in (0, 1) and turns by an angle, both from the token."""
    decay, angle = steer.chunk(2, dim=-1)
    first, second = state.chunk(2, dim=-1)
    cosine, sine = angle.cos(), angle.sin()
    turned = torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    return (decay + 3).sigmoid().repeat(1, 2) * turned + write


def correct(state, write, steer, most):
    """The delta rule on a 4 × 4 state: a unit key, a value, and a β between 0 and `most`."""
    S, k = state.unflatten(-1, (4, 4)), F.normalize(steer[:, :4], dim=-1)
    beta = most * steer[:, 4:5].sigmoid()
    error = write[:, :4] - (S @ k[..., None])[..., 0]
    return (S + (beta * error)[..., None] * k[:, None]).flatten(1)


# %% tags=["setup", "experiment"]
STEPS = {
    "decays": fade,
    "turns": turn,
    "β up to 1": partial(correct, most=1),
    "β up to 2": partial(correct, most=2),
}


class Tracker(torch.nn.Module):
    """An embedding, a recurrence with 16 numbers of state, a small network that reads them."""

    def __init__(self, kind, n_tokens, n_answers):
        super().__init__()
        self.step = STEPS[kind]
        self.embedding = torch.nn.Embedding(n_tokens, 16)
        self.write, self.steer = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.start = torch.nn.Parameter(torch.randn(16) / 4)
        parts = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, n_answers)
        self.read = torch.nn.Sequential(*parts)

    def forward(self, ids):
        x, state, states = self.embedding(ids), self.start.expand(len(ids), 16), []
        for write, steer in zip(self.write(x).unbind(1), self.steer(x).unbind(1), strict=True):
            state = self.step(state, write, steer)
            states.append(state)
        return self.read(torch.stack(states, dim=1))


# %% tags=["setup", "experiment"]
def train_to_track(task, kind, steps, rate, seed, length=40):
    """Train on 40 tokens; the shares right at places 31 to 40 and 201 to 300, and the model."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    machine = MACHINES[task]
    model = Tracker(kind, machine.shape[1], len(machine)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        ids, answers = texts_and_answers(machine, 64, length, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        ids, answers = texts_and_answers(machine, 256, 300, generator)
        right = (model(ids).argmax(-1) == answers).double().mean(0)
    return right[30:40].mean().item(), right[200:].mean().item(), model


def betas(model):
    """The β that a model with β up to 2 gives each token."""
    steer = model.steer(model.embedding.weight)
    return (2 * steer[:, 4].sigmoid()).tolist()


# %%
record = json.loads(Path("../../experiments/records/04_state_tracking.json").read_text())
print("right at places      31 to 40                     201 to 300, five seeds")
for row in record["table"]:
    within, beyond = (sorted(run[p] for run in row["runs"]) for p in ("trained", "beyond"))
    print(f"{row['task']:11} {row['kind']:9}", *(f"{s:5.2f}" for s in within), end="  ")
    print(*(f"{s:5.2f}" for s in beyond))

# %% tags=["guard"]
found = {(row["task"], row["kind"]): row["runs"] for row in record["table"]}
for task, chance in (("parity", 0.5), ("three swaps", 1 / 6)):
    for kind in ("decays", "β up to 1"):
        runs = found[task, kind]
        assert all(abs(run[p] - chance) < 0.03 for run in runs for p in ("trained", "beyond"))
turns = found["three swaps", "turns"]
assert all(0.3 < run["trained"] < 0.36 and run["beyond"] < 0.26 for run in turns)
allowed = [("parity", "turns"), ("parity", "β up to 2"), ("three swaps", "β up to 2")]
assert all(run["trained"] > 0.99 for pair in allowed for run in found[pair])
held = [sum(run["beyond"] > 0.95 for run in found[pair]) for pair in allowed]
assert held == [2, 4, 1]
swap_betas = [beta for run in found["three swaps", "β up to 2"] for beta in run["beta"]]
assert min(swap_betas) > 1.984 and max(swap_betas) < 1.998
print(f"β of a swap from {min(swap_betas):.3f} to {max(swap_betas):.3f}")

# %% [markdown]
# Decays and $\beta$ up to 1 stayed at chance even *within* the trained length, as predicted. Turns
# got one in three of the cards right, which takes no cards: an even number of swaps allows only
# three of the six arrangements, and an odd number the other three. All fifteen runs that could
# learn their task did so on 40 tokens. But we expected it to hold at 300 in three of five, and it
# did so for parity by mirrors (four of five), not for parity by turns (two) or for the cards (one).
#
# What do the cards lose by? A sigmoid never reaches its end: in these runs the $\beta$ of a swap is
# between 1.984 and 1.997, so a mirror keeps 98.4 to 99.7 % of what it turns around. That would be a
# fading memory again. But is it the reason? The keys may also be inexact. So we trained the five
# models again, set every $\beta$ to 2, and changed nothing else (`python -m experiments
# 04_exact_mirrors`):

# %%
record = json.loads(Path("../../experiments/records/04_exact_mirrors.json").read_text())
print("the prediction:", record["prediction"])
for key, name in (("again", "as trained"), ("with two", "every β is 2")):
    print(f"{name:13}", *(f"{run[key]:5.2f}" for run in record["runs"]))

# %% tags=["guard"]
assert min(run["with two"] for run in record["runs"]) > 0.98
assert max(abs(run["again"] - run["beyond"]) for run in record["runs"]) < 0.03  # other texts

# %% [markdown]
# We were wrong: all five are above 0.98 now. It was the fading, and the keys were good enough. What
# training misses is a number that a sigmoid can't reach.
#
# ## Summary
#
# - $h \mapsto ah + b$ with $a \ge 0$ never turns the order around. On equal tokens a rounded state
#   comes to a stop, and so does any stack of such layers. Parity doesn't.
# - A mirror ($\beta = 2$) or half a turn per 1 counts parity exactly. Turns count modulo any
#   number. Mirrors of different directions don't commute, and follow cards. Two mirrors are a turn.
# - A trained mirror is only almost a mirror, and that's why it loses the cards after 300 swaps. Set
#   its β to 2, and it holds.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
