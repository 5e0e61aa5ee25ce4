# %% [markdown]
# # 08 · Associative recall
#
# A row lists key–value pairs and later shows each key again; a model that returns its value has
# recalled it. Which layers learn that? You'll be able to
#
# - predict how many pairs a state holds;
# - set layers to recall by hand;
# - judge a comparison.
#
# Assumes: chapter 07 to section 4; lab 04b for section 9, chapter 02 for exercise 4.
#
# Sources: *Wonderful Matrices* (WM) §4.1, Figure 5, App. C.1, Tables 5 and 6; *OTCE* Figure 10;
# Arora et al. (2024), *Zoology: Measuring and Improving Recall in Efficient Language Models*;
# `cheems_ref/tasks.py`.
#
# How to read ✓, ✗ and *As printed*: chapter 00.

# %% tags=["setup"]
import copy
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from cheems_ref import plotting
from cheems_ref.attention import QCAttn, causal_mask
from cheems_ref.compare import interval
from cheems_ref.config import ModelConfig
from cheems_ref.linear_attention import delta_rule
from cheems_ref.model import CausalLM
from cheems_ref.rope import (
    apply_rope,
    log_length_scale,
    ntk_base,
    rope_cos_sin,
    rope_frequencies,
)
from cheems_ref.ssd import ssd
from cheems_ref.tasks import multi_query_recall, needle
from cheems_ref.text import ids_to_text, read_text, text_to_ids
from cheems_ref.train import split_text
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)  # for the constructions; training is in float32
torch.set_num_threads(1)  # models as small as these gain little from more


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def read_record(name):
    return json.loads(Path(f"../figures/records/{name}.json").read_text())


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## Why this matters
#
# A text names a person on page one and mentions her again on page nine. Attention can look back; a
# state must have stored the right thing before it knew the question.
#
# ## 1 · What recall asks
#
# A row begins with pairs of a key and a value. Later each key appears again as a *query*, and the
# model must answer with its value. The rest is *fill*. Here are two pairs:

# %%
ids, targets = multi_query_recall(1, 8, 2, 12, generator=seeded(1))
print("token  ", *(f"{i:3}" for i in ids[0].tolist()))
print("answer ", *(f"{i:3}" if i >= 0 else "  ." for i in targets[0].tolist()))
assert ids.shape == (1, 8) and (targets >= 0).sum() == 2

# %% [markdown]
# Ids 1 to 5 are keys and 6 to 11 values; fill is never a key or value of its row. A dot is −100,
# which the loss leaves out. By hand you find the earlier place with the same token, and answer with
# the next:


# %%
def look_up(row):
    """For every token: the token after the last earlier place where it stood, or -100."""
    after, answers = {}, []
    for before, token in zip([None, *row], row, strict=False):
        if before is not None:
            after[before] = token
        answers.append(after.get(token, -100))
    return answers


ids, targets = multi_query_recall(256, 64, 16, 256, generator=seeded(2))
looked_up = torch.tensor([look_up(row) for row in ids.tolist()])
asked = targets >= 0
check("looking up = what is asked for", looked_up[asked], targets[asked])
late = torch.tensor([[*look_up(row[1:]), -100] for row in ids.tolist()])
_ = must_differ("looking up one place late", late[asked].double(), targets[asked].double())

# %% [markdown]
# So recall takes two steps: compare *contents*, then move one *position* on. Skip the comparison
# and guess one of the row's values, and you're right once in as many times as there are pairs:

# %%
values = ids[:, 1:32:2]  # (rows, 16)
some = values[torch.arange(256)[:, None], torch.randint(16, ids.shape, generator=seeded(3))]
right = (some == targets)[asked].double().mean().item()
print(f"naming some value of the row: {right:.3f} right; one in 16 is {1 / 16:.3f}")
assert abs(right - 1 / 16) < 0.012  # 4,096 answers scatter by 0.004

# %% [markdown]
# WM makes the task of Arora et al. harder (App. C.1): random fill instead of zeros, a quarter as
# many pairs as tokens, longer rows. In both papers queries follow a power law: where they are few,
# they come early. $T/4$ queries in $T$ tokens, as in our tests, fill every second place.

# %%
_, targets = multi_query_recall(2000, 256, 16, 256, generator=seeded(4))
place = (targets >= 0).nonzero()[:, 1]
by_place = torch.bincount((place - 32) // 28, minlength=8) / len(place)
print("share of the queries in each eighth of the rest of the row:")
print(*(f"{share:.2f}" for share in by_place.tolist()))
assert by_place[0] > 0.4 and (by_place.diff() < 0).all()

# %% [markdown]
# ## 2 · What a state can hold
#
# Write $v_i \otimes k_i$ into a state for each pair $i$, and read it with a key of length one:
#
# $$y_i = \sum_j v_j\,(k_j \cdot k_i) = v_i + \sum_{j \ne i} v_j\,(k_j \cdot k_i) \tag{8.1}$$
#
# You get the value, plus every other one weighted by the similarity of the keys. That is `ssd` with
# $\Delta = 1$ and $A = 0$; $B$ writes the keys and $C$ reads them.


# %%
def read_back(keys, values, queries):
    """Write all pairs into one state of SSD, then read with each query: (queries, p)."""
    (pairs, n), asked = keys.shape, len(queries)
    x = torch.cat([values, values.new_zeros(asked, values.shape[1])])
    B = torch.cat([keys, keys.new_zeros(asked, n)])
    C = torch.cat([keys.new_zeros(pairs, n), queries])
    x, B, C = (tensor[None, :, None] for tensor in (x, B, C))  # one row, one head
    return ssd(x, torch.ones(1, pairs + asked, 1), torch.zeros(1), B, C)[0, pairs:, 0]


keys, values = F.normalize(torch.randn(24, 16, generator=seeded(5)), dim=1), torch.eye(24)
check("reading = equation (8.1)", read_back(keys, values, keys), keys @ keys.T @ values)
unread = read_back(keys, values, keys.roll(1, 0))
_ = must_differ("reading with the key of another pair", unread, keys @ keys.T @ values)

# %% [markdown]
# How many pairs fit? Take random values, and two kinds of keys of width $n$:
#
# - *random* keys of length one: two of them have an inner product of mean square $1/n$, so $u$
#   pairs leave a squared error of $(u-1)/n$ of the value's own square;
# - *orthogonal* keys: no error up to $u = n$. Beyond that, the keys are the rows of a $u \times n$
#   matrix with orthonormal columns, a *tight frame*, no longer orthogonal. Reading projects the
#   values onto $n$ of $u$ dimensions: an error of $1 - n/u$.
#
# No keys chosen before the values do better: reading has rank at most $n$, and random values have
# no preferred directions. This is the *counting bound*.


# %%
def keys_of(kind, pairs, n, generator):
    """Keys (pairs, n): at random, of length one; or orthogonal, as far as there is room."""
    drawn = torch.randn(pairs, n, generator=generator)
    if kind == "random":
        return F.normalize(drawn, dim=1)
    return torch.linalg.qr(drawn).Q if pairs > n else torch.linalg.qr(drawn.T).Q.T


def squared_error(kind, pairs, n, p=32, seeds=20):
    """The square of what is read wrong, over the square of the values; the mean over seeds."""
    errors = []
    for seed in range(seeds):
        generator = seeded(seed)
        keys = keys_of(kind, pairs, n, generator)
        values = torch.randn(pairs, p, generator=generator)
        wrong = read_back(keys, values, keys) - values
        errors.append((wrong.square().sum() / values.square().sum()).item())
    return sum(errors) / seeds


# %%
n, counts = 64, (8, 16, 32, 48, 64, 72, 80, 96, 128, 192, 256)
kinds = ("random", "orthogonal")
error = {kind: [squared_error(kind, pairs, n) for pairs in counts] for kind in kinds}
theory = {
    "random": [(pairs - 1) / n for pairs in counts],
    "orthogonal": [max(0.0, 1 - n / pairs) for pairs in counts],
}
print("pairs   random: error, theory   orthogonal: error, theory")
for i, pairs in enumerate(counts):
    found = {kind: (error[kind][i], theory[kind][i]) for kind in error}
    print(f"{pairs:5} {found['random'][0]:16.2f} {found['random'][1]:7.2f}", end="")
    print(f" {abs(found['orthogonal'][0]):19.2f} {found['orthogonal'][1]:7.2f}")
    for got, expected in found.values():
        assert abs(got - expected) < 0.01 + 0.03 * expected


# %% tags=["figure"]
fig, ax = plotting.figure(size=(7.4, 4))
lines = {f"{kind} keys": [max(e, 0.0) for e in errors] for kind, errors in error.items()}
told = dict(xlabel="pairs in the state", ylabel="squared error", ylim=(-0.1, 4.1))
plotting.lines(ax, counts, lines, marker="o", title="A state of width 64", **told)
ax.axvline(n, color=plotting.QUIET, linewidth=1)
plotting.save(
    fig,
    "08_capacity",
    "Squared error of what a state of width 64 gives back, against the number of pairs, from 8 on. "
    "With orthogonal keys it is 0 up to 64 pairs, where a vertical line stands, and then rises, to "
    "0.75 at 256. With random keys it rises in a straight line: 1 at 64 pairs, 3.9 at 256.",
)

# %% [markdown]
# With orthogonal keys the knee is at $u = n$. Does an error of one mean that nothing is recalled?
# No: the right value need only be the nearest to the reading. We decode random keys that way:


# %%
def recalled(pairs, n, p, n_values, seed):
    """The share of pairs whose value is nearest to what is read, of n_values to choose from."""
    generator = seeded(seed)
    code = F.normalize(torch.randn(n_values, p, generator=generator), dim=1)
    value = torch.randperm(n_values, generator=generator)[:pairs]
    keys = keys_of("random", pairs, n, generator)
    return ((read_back(keys, code[value], keys) @ code.T).argmax(1) == value).double().mean().item()


def mean_recalled(*sizes, seeds=5):
    return sum(recalled(*sizes, seed) for seed in range(seeds)) / seeds


# %%
print("recalled with random keys, of 128 values")
print("  n    p   pairs:", *(f"{pairs:5}" for pairs in (16, 32, 64)))
for n in (32, 128):
    for p in (32, 64, 128):
        shares = [mean_recalled(pairs, n, p, 128) for pairs in (16, 32, 64)]
        print(f"{n:3} {p:4}         ", *(f"{share:5.2f}" for share in shares))
        assert n == 32 or min(shares) > 0.99
assert mean_recalled(64, 32, 32, 128) < 0.85

# %% [markdown]
# A state of width 128 (WM's size) holds the 64 pairs of our longest rows at every width we train,
# if the fill stays out. At WM's 512 pairs of 4,096 values a narrow model fails:

# %%
many = (64, 128, 256, 512)
print("recalled with random keys, n = 128, of 4,096 values")
print("   p   pairs:", *(f"{pairs:5}" for pairs in many))
for p in (32, 64, 128, 256):
    shares = [mean_recalled(pairs, 128, p, 4096, seeds=2) for pairs in many]
    print(f"{p:4}         ", *(f"{share:5.2f}" for share in shares))
    assert shares[0] > 0.95 and (shares[-1] < 0.3) == (p == 32) and (shares[-1] > 0.9) == (p >= 128)

# %% [markdown]
# ## 3 · Attention, by hand
#
# Attention compares contents, but the answer is one place after the key. Two layers find it:
#
# 1. **shift**: every token copies the token before it into a separate slot;
# 2. **look up**: a query finds the place whose *slot* holds its own token, and takes the token
#    there.
#
# We set the weights of a `CausalLM` with the pattern AA. Its stream has three slots of one
# coordinate per id, and a constant one.

# %% tags=["setup"]
IDS, WIDTH = 64, 256  # how many ids there are, and the width of the stream
TOKEN, BEFORE, ANSWER = slice(0, IDS), slice(IDS, 2 * IDS), slice(2 * IDS, 3 * IDS)
ONE = 3 * IDS  # a coordinate that is 1 in every token


# %% [markdown]
# The shift's query and key read only the constant coordinate, and we turn the key one position
# further. By chapter 04 the score is, up to a factor,
#
# $$q \cdot k = \sum_i \cos\big((t - s - 1)\,\theta_i\big), \tag{8.2}$$
#
# which is largest at $s = t - 1$. We use the sixteen fastest pairs of coordinates.


# %%
def shift(layer, by=1, waves=16, sharpness=8.0):
    """Let every token look at the one `by` places before it."""
    i, theta = torch.arange(waves), rope_frequencies(WIDTH, layer.rope_base)[:waves]
    layer.q_proj.weight[i, ONE] = sharpness
    layer.k_proj.weight[i, ONE] = sharpness * (by * theta).cos()
    layer.k_proj.weight[i + WIDTH // 2, ONE] = sharpness * (by * theta).sin()


# %% [markdown]
# In the look-up the query is the token and the key is the slot. Rotation disturbs the comparison
# least in slow pairs of coordinates, so we start at the 64th: at base $10^6$ a distance of 256
# turns it by about a quarter of a radian. The first token copies itself; subtracting the token from
# the slot makes its key zero.


# %%
def look_up_after(layer, sharpness=8.0):
    """Let every token look for the places that have this token before them."""
    slow = WIDTH // 4 + torch.arange(IDS)
    layer.q_proj.weight[slow, TOKEN] = sharpness * torch.eye(IDS)
    layer.k_proj.weight[slow, BEFORE] = sharpness * torch.eye(IDS)
    layer.k_proj.weight[slow, TOKEN] = -sharpness * torch.eye(IDS)


def carry(layer, source, target, norm):
    """Let the layer add to slot `target` what stands in slot `source` where it looks.

    In QCAttn `inner` makes a token's value (chapter 05).
    """
    layer.inner.weight[:IDS, source] = torch.eye(IDS)
    layer.out_proj.weight[target, :IDS] = torch.eye(IDS) / norm


# %% [markdown]
# Each block sees a normalised stream. Two coordinates at 1 (token and ONE) come out multiplied by
# $\sqrt{256/2}$, three by $\sqrt{256/3}$; `carry` divides by that factor.


# %%
def by_hand(by=1):
    """A language model of two layers of attention that recalls, no parameter of it trained."""
    sizes = dict(vocab_size=IDS, d_model=WIDTH, n_heads=1, rope_base=1e6, tie_embeddings=False)
    model = CausalLM(ModelConfig("AA", **sizes)).requires_grad_(False)
    for matrix in (p for p in model.parameters() if p.ndim == 2):
        _ = matrix.zero_()
    model.embedding.weight[:, TOKEN], model.embedding.weight[:, ONE] = torch.eye(IDS), 1
    first, second = (block.layer for block in model.blocks)
    shift(first, by)
    carry(first, TOKEN, BEFORE, (WIDTH / 2) ** 0.5)
    look_up_after(second)
    carry(second, TOKEN, ANSWER, (WIDTH / 3) ** 0.5)
    model.lm_head.weight[:, ANSWER] = torch.eye(IDS)
    return model


# %%
def share_of(model, length, n_pairs, n_rows):
    """The share of the answers that the model gives rightly, on rows of IDS ids."""
    ids, targets = multi_query_recall(n_rows, length, n_pairs, IDS, generator=seeded(6))
    found = model(ids)[0].argmax(-1)
    return (found == targets)[targets >= 0].double().mean().item()


for length, pairs, rows in ((16, 4, 64), (64, 16, 64), (256, 28, 64), (1024, 28, 4)):
    shares = [share_of(by_hand(by), length, pairs, rows) for by in (1, 0, 2)]
    print(f"{length:5} tokens, {pairs:2} pairs: {shares[0]:.2f} right", end="")
    print(f"; with a shift of 0 or 2: {shares[1]:.2f}, {shares[2]:.2f}")
    assert shares[0] > 0.99 and max(shares[1:]) < 0.01

# %% [markdown]
# One model recalls at all four lengths. Its layers look here, in a row with 4 pairs:


# %%
def weights(layer, x):
    """What a layer of one head looks at: (t, s), from its input (1, l, d)."""
    q, k = (f(x)[:, :, None] for f in (layer.q_proj, layer.k_proj))
    positions = torch.arange(x.shape[1])[None]
    cos, sin = rope_cos_sin(positions, q.shape[-1], layer.rope_base, dtype=x.dtype)
    q, k = (apply_rope(t, cos, sin)[0, :, 0] for t in (q, k))
    scores = (q @ k.T) / q.shape[-1] ** 0.5
    return scores.masked_fill(~causal_mask(len(q), len(q)), -torch.inf).softmax(-1)


def looks_at(model, ids):
    """The weights of every attention layer of a model, on one row."""
    x, positions, maps = model.embedding(ids), torch.arange(ids.shape[1])[None], []
    for block in model.blocks:
        if block.letter == "A":
            maps.append(weights(block.layer, block.norm(x)))
        x = block(x, positions)[0]
    return maps


# %%
ids, targets = multi_query_recall(1, 24, 4, IDS, generator=seeded(7))
with torch.no_grad():
    first, second = looks_at(by_hand(), ids)
queries = (targets[0] >= 0).nonzero()[:, 0]
answer_at = [ids[0, :8].tolist().index(value) for value in targets[0, queries].tolist()]
print("layer 1: least weight on the token before", f"{first.diagonal(-1).min():.3f}")
print("layer 2: least weight of a query on its answer", f"{second[queries, answer_at].min():.3f}")
assert first.diagonal(-1).min() > 0.99 and second[queries, answer_at].min() > 0.99
for t, token in enumerate(ids[0].tolist()[1:], start=1):
    before = ids[0, :t].tolist()
    if token in before:  # a query, or fill that was in the row before
        assert second[t, before.index(token) + 1] > 0.99
    else:  # evenly over all before it
        assert (t * second[t, :t] - 1).abs().max() < 0.01


# %% tags=["figure"]
maps = {"layer 1: shift": first, "layer 2: look up": second}
told = dict(xlabel="looks at token", ylabel="token", signed=False, limit=1.0, unit="weight")
fig, axes = plotting.heatmaps(maps, size=(10, 4.2), **told)
_ = axes[1].scatter([24] * len(queries), queries, marker="<", color=plotting.INK)
plotting.save(
    fig,
    "08_by_hand",
    "Attention weights of two layers on 24 tokens. Left, in layer 1, every token but the first "
    "looks at the one before it: a line beside the diagonal. Right, in layer 2, four queries, "
    "marked by arrows, look each at one of the first eight tokens, the value of its key. A token "
    "of the fill that was in the row before looks at the place after that; the weight of each of "
    "the others, the first excepted, is spread evenly over all before it.",
)

# %% [markdown]
# ## 4 · A state, by hand
#
# A state can take the same two steps. To write *value under key*, the value ($x_s$) and the key
# ($B_s$) must come from neighbouring tokens. With a short convolution before $B$ (chapter 03), one
# layer is enough:


# %%
def recall_with_a_state(ids, code, dt):
    """Scores (b, l, v): x is this token, B the one before, C this one as a question."""
    tokens = code[ids][:, :, None]  # (b, l, 1, n)
    before = F.pad(tokens[:, :-1], (0, 0, 0, 0, 1, 0))
    x = F.one_hot(ids, len(code)).double()[:, :, None]
    return ssd(x, dt[..., None], torch.zeros(1), before, tokens)[:, :, 0]


ids, targets = multi_query_recall(64, 64, 16, IDS, generator=seeded(8))
asked, always = targets >= 0, torch.ones(64, 64)
always[:, 0] = 0  # the first token has none before it
scores = recall_with_a_state(ids, torch.eye(IDS), always)
found = scores.argmax(-1)
check("one key, one coordinate: recalled = asked for", found[asked], targets[asked])
scores = recall_with_a_state(ids.flip(1), torch.eye(IDS), always)
_ = must_differ("the row backwards", scores.argmax(-1).flip(1)[asked] * 1.0, targets[asked] * 1.0)

# %% [markdown]
# With random keys of width $n$ the state holds every pair of neighbours up to the query, and
# section 2 predicts a squared error of their number, less one, over $n$. *Selection* helps: write
# ($\Delta = 1$) only where a value follows a key.


# %%
def error_and_share(dt, n=8, seeds=10):
    """With random keys of width n: squared error of what is read, and the share recalled."""
    errors, shares = [], []
    for seed in range(seeds):
        code = F.normalize(torch.randn(IDS, n, generator=seeded(seed)), dim=1)
        scores = recall_with_a_state(ids, code, dt)[asked]
        errors.append((scores - F.one_hot(targets[asked], IDS)).square().sum(1).mean().item())
        shares.append((scores.argmax(-1) == targets[asked]).double().mean().item())
    return sum(errors) / seeds, sum(shares) / seeds


is_value = ids >= IDS // 2
after_key = (is_value & ~F.pad(is_value[:, :-1], (1, 0), value=True)).double()
for name, dt in (("all neighbours", always), ("values after keys", after_key)):
    error, share = error_and_share(dt)
    written = dt.cumsum(1)[asked].mean().item()  # up to the query
    print(f"written: {name:17} {written:4.1f} before a query; ", end="")
    print(f"squared error {error:.1f}, by theory {(written - 1) / 8:.1f}; recalled {share:.2f}")
    assert abs(error - (written - 1) / 8) < 0.1 * error and (share > 0.95) == (dt is after_key)

# %% [markdown]
# Without the convolution, an earlier layer must bring the neighbour in. Could a rotary state? If
# $B$ and $C$ don't depend on the token, the weight at distance $\delta$ is a sum of waves under a
# rate of forgetting $\lambda$,
#
# $$w_\delta = e^{-\lambda\delta} \sum_i
# (a_i \cos\delta\theta_i + b_i \sin\delta\theta_i) \tag{8.3}$$
#
# How near does it come to "the token before and no other" at $n = 128$? A *ridge*, a penalty on
# their squares, keeps the coefficients small:


# %%
def nearest_to_a_shift(forgetting, ridge, n=128, distances=64):
    """The weights at each distance that come nearest to 1 at distance 1 and 0 elsewhere."""
    distance = torch.arange(distances)[:, None]
    angles = distance * rope_frequencies(n)
    waves = torch.cat([angles.cos(), angles.sin()], 1) * torch.exp(-forgetting * distance)
    wanted = (distance[:, 0] == 1).double()
    return waves @ torch.linalg.solve(waves.T @ waves + ridge * torch.eye(n), waves.T @ wanted)


print("weight of the token before, and the root of the sum of the others' squares")
for ridge in (1e-2, 1e-4):
    shares = []
    for forgetting in (0.0, 0.2, 1.0):
        found = nearest_to_a_shift(forgetting, ridge)
        rest = (found.square().sum() - found[1].square()).sqrt()
        shares.append((found[1].item(), -rest.item()))
        print(f"ridge {ridge:.0e}, λ = {forgetting}: {found[1]:.2f}, {rest:.2f}")
    assert shares == sorted(shares) and shares[-1][0] > 0.85 > 0.65 > shares[0][0]

# %% [markdown]
# Of these three rates the fastest comes nearest. So one rotary layer might forget and shift, and a
# second look up.
#
# ## 5 · The experiment
#
# WM Table 6 compares two layers, each a sequence mixer with one head and a state mixer, without
# convolution or gated MLP. We add other sources of position (S rotates by default) and both orders
# of S and A:

# %% tags=["setup"]
LENGTHS = (32, 64, 128, 256)
SYSTEMS = {
    "QCAttn": dict(pattern="AMAM"),
    "SSD": dict(pattern="SMSM", d_state=128),
    "InnerFuncAttn": dict(pattern="IMIM", n_values=2, k_values=2),
    "InnerFuncAttn, mask": dict(
        pattern="IMIM", n_values=2, k_values=2, mask="gate", max_positions=256
    ),
}

# %% tags=["setup"]
WITH_POSITION = {
    "SSD, convolution": dict(pattern="SMSM", d_state=128, position="conv"),
    "SSD, decay": dict(pattern="SMSM", d_state=128, position="decay"),
    "SSD, attention": dict(pattern="SMAM", d_state=128),
    "SSD, attention, convolution": dict(pattern="SMAM", d_state=128, position="conv"),
    "SSD, attention, decay": dict(pattern="SMAM", d_state=128, position="decay"),
    "attention, SSD": dict(pattern="AMSM", d_state=128),
    "attention, SSD, convolution": dict(pattern="AMSM", d_state=128, position="conv"),
    "QCAttn": dict(pattern="AMAM"),
    "SSD": dict(pattern="SMSM", d_state=128),
    "one SSD, convolution": dict(pattern="SM", d_state=128, position="conv"),
}
RATES = {32: 4e-3, 64: 3e-3, 128: 2e-3}  # ten times WM Table 6's


# %%
def recall_model(d, seed, **options):
    """WM Table 6's shape: layers with one head, each with an MLP after it."""
    _ = torch.manual_seed(seed)
    sizes = dict(vocab_size=256, d_model=d, n_heads=1, d_ff=2 * d, tie_embeddings=False)
    return CausalLM(ModelConfig(**sizes, **options)).float()


# %%
print("parameters      d =", *(f"{d:8}" for d in RATES))
for name, options in SYSTEMS.items():
    sizes = [sum(p.numel() for p in recall_model(d, 0, **options).parameters()) for d in RATES]
    print(f"{name:20}", *(f"{size:8,}" for size in sizes))

# %% [markdown]
# In *InnerFuncAttn* a value is the token times a mixture of two rows of a table (chapter 05);
# *mask* is WM's dynamic mask, a gate for every place; QCAttn is plain attention. At $d = 32$ SSD
# has over a third more parameters than QCAttn.
#
# | | WM Tables 5 and 6 | here |
# |---|---|---|
# | ids | 8,192 | 256: 127 keys and 128 values |
# | length $T$ of the rows | 256, 512, 1,024, 2,048 | 64, 128, 256 |
# | pairs in training | $T/4$ | 2, 4, 8, …, $T/4$, mixed; asked with $T/4$ |
# | rows in training | one length per model | one model, lengths 32 to 256 in turn |
# | steps | up to 64 times $2^{18}$ rows, 256 a step at $T = 256$ | 3,000, of 4,096 tokens at most |
# | widths $d$ | 32, 64, 128, 256 | 32, 64, 128 |
# | rates | 4e-4, 3e-4, 2e-4, 1e-4 | ten times that |
# | width of the MLP | not given | $2d$ |
#
# Our runs see at most a three-hundredth of WM's tokens. Mixed lengths help, as the second cell
# shows for attention at $d = 64$:

# %%
wm_tokens, our_tokens = 64 * 2**18 * 256, 3000 * 4096
print(f"tokens: WM at T = 256 up to {wm_tokens:.1e}, here up to {our_tokens:.1e}")
assert 300 < wm_tokens / our_tokens < 400
assert all(map(math.isclose, RATES.values(), (4e-3, 3e-3, 2e-3)))

# %%
alone = [run["right"][-1][0] for run in read_record("08_rates")["alone"]]
print("trained on rows of 256 tokens alone, right after 3,000 steps:", *(f"{x:.2f}" for x in alone))
mixed = [
    run for run in read_record("08_recall")["grid"] if (run["system"], run["d"]) == ("QCAttn", 64)
]
print(
    "on all lengths:", *(f"{r['right'][-1][-1]:.2f} after {100 * len(r['right']):,}" for r in mixed)
)
assert max(alone) < 0.5 and min(run["right"][-1][-1] for run in mixed) >= 0.99


# %%
def recall_batch(length, generator):
    """Rows of one length, about 4,096 tokens in all: with 2, 4, 8, ... and length / 4 pairs."""
    counts = [2**i for i in range(1, 8) if 2**i <= length // 4]
    rows = 4096 // length // len(counts)
    parts = [multi_query_recall(rows, length, n, 256, generator=generator) for n in counts]
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


for length in LENGTHS:
    ids, targets = recall_batch(length, seeded(0))
    pairs = sorted(set((targets >= 0).sum(1).tolist()))
    print(f"{length:3} tokens: {len(ids):3} rows a step, pairs: {pairs}")
    assert 3000 <= ids.numel() <= 4096 and pairs[-1] == length // 4


# %% [markdown]
# We count answers at the queries only:


# %%
def answers(model, ids, targets):
    """Logits and targets at the queries alone."""
    asked = targets >= 0
    return model.logits(model.hidden_states(ids, use_cache=False)[0][asked]), targets[asked]


@torch.no_grad()
def share_right(model, length):
    """The share of 4,096 answers that are right: rows of this length, length / 4 pairs each."""
    rows = multi_query_recall(
        4 * 4096 // length, length, length // 4, 256, generator=torch.Generator().manual_seed(999)
    )
    logits, targets = answers(model, *rows)
    return (logits.argmax(-1) == targets).double().mean().item()


# %% [markdown]
# Training stops once 99 % of the answers are right at every length:


# %%
def learn_to_recall(d, steps, rate, seed=0, lengths=LENGTHS, every=100, **options):
    """Train on rows of each length in turn: the model, and its share right at each, over time."""
    generator = torch.Generator().manual_seed(seed)
    model = recall_model(d, seed, **options)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    right = []
    for step in range(steps):
        logits, targets = answers(model, *recall_batch(lengths[step % len(lengths)], generator))
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 50)
        optimizer.zero_grad()
        F.cross_entropy(logits, targets).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            right.append([share_right(model, length) for length in lengths])
            if min(right[-1]) >= 0.99:
                break
    return model, right


# %% [markdown]
# ## 6 · Two small ones, live
#
# One model has a state layer with a convolution below attention, the other two layers of attention.
# Guess which one recalls after 200 steps:

# %%
LIVE = "SSD, attention, convolution", "QCAttn"
recorded = {name: [] for name in LIVE}
for run in read_record("08_rates")["live"]:
    recorded[run["system"]].append(run["right"][-1][0])
trained = {}
for name in LIVE:
    trained[name], right = learn_to_recall(32, 200, RATES[32], 0, (32,), **WITH_POSITION[name])
    low, high = min(recorded[name]), max(recorded[name])
    print(f"{name:27} in the record, five seeds: {low:.2f} to {high:.2f}; here within 0.1 of that")
    assert low - 0.1 < right[-1][0] < high + 0.1
assert min(recorded[LIVE[0]]) > 0.85 and max(recorded[LIVE[1]]) < 0.4

# %% [markdown]
# The hybrid recalls; attention does no better than naming some value of the row. Does the hybrid
# use our construction? Then its attention should look one place after the queried key:

# %%
ids, targets = multi_query_recall(64, 32, 8, 256, generator=seeded(9))
on_answer, on_key = [], []
for row, wanted in zip(ids, targets, strict=True):
    with torch.no_grad():
        (found,) = looks_at(trained[LIVE[0]], row[None])
    for t in (wanted >= 0).nonzero()[:, 0].tolist():
        at = row[:16].tolist().index(wanted[t].item())
        on_answer.append(found[t, at].item())
        on_key.append(found[t, at - 1].item())
on_answer, on_key = (sum(shares) / len(shares) for shares in (on_answer, on_key))
print("mean weight of a query on the place of its answer: more than 0.6; on its key: less than 0.1")
assert on_answer > 0.6 and on_key < 0.1

# %% [markdown]
# It does. Only the state layer below can have told attention about a token's neighbour.

# %% [markdown]
# ## 7 · The table that WM draws
#
# We train four systems at three widths with three seeds, and test each model at three lengths $T$
# with $T/4$ pairs. A run stops when 99 % are right at every length, or after 3,000 steps (`python
# book/records.py 08_recall`).


# %%
def last_share(run, length):
    return run["right"][-1][run["lengths"].index(length)]


def steps_to(run, share=0.9):
    """Steps until that share is right at the longest rows; infinity if it never was."""
    reached = [right[-1] >= share for right in run["right"]]
    return 100 * (reached.index(True) + 1) if any(reached) else math.inf


def runs_of(system, d):
    """The runs of a system in the grid, in the order of their seeds."""
    return [r for r in read_record("08_recall")["grid"] if (r["system"], r["d"]) == (system, d)]


# %%
print("right at T = 256, three seeds, and steps until 0.9 are")
for name in SYSTEMS:
    for d in RATES:
        runs = runs_of(name, d)
        shares = " ".join(f"{last_share(run, 256):.2f}" for run in runs)
        print(f"{name:20} d = {d:3}: {shares}   steps", *(f"{steps_to(run):5}" for run in runs))
        assert len(runs) == 3

# %%
ends = {name: [last_share(r, 256) for d in RATES for r in runs_of(name, d)] for name in SYSTEMS}
assert min(ends["QCAttn"] + ends["InnerFuncAttn"]) >= 0.99
masked = sorted(ends["InnerFuncAttn, mask"])
assert masked[0] < 0.03 and masked[1] >= 0.99
begun = {d: [round(16 * last_share(run, 64), 1) for run in runs_of("SSD", d)] for d in RATES}
print("SSD at T = 64, times as often right as by naming some value of the row:")
print(*(f"   d = {d}: {times}" for d, times in begun.items()))
assert max(ends["SSD"]) < 0.05 and max(begun[32] + begun[128]) < 2
assert [min(begun[64]), max(begun[64])] == [2.3, 3.7]

# %% [markdown]
# Every run of QCAttn and InnerFuncAttn reaches 99 % at every length, and so do eight of nine with
# the mask. The ninth, at $d = 32$, ends little above naming some value, as does SSD at $d = 32$ and
# $d = 128$. At $d = T = 64$ SSD is right 2.3 to 3.7 times as often as that.


# %% tags=["figure"]
def draw_by_width(ax, figure_of, title):
    """One figure of every run against width: a line through the medians, a point for every run."""
    for i, name in enumerate(SYSTEMS):
        at = [[figure_of(run) for run in runs_of(name, d)] for d in RATES]
        places = [place + 0.07 * (i - 1.5) for place in range(3)]
        plotting.lines(ax, places, {name: [sorted(three)[1] for three in at]}, legend=None)
        for place, three in zip(places, at, strict=True):
            ax.plot([place] * 3, three, "o", color=ax.lines[-1].get_color(), markersize=5)
    ax.set(title=title, xticks=range(3), xticklabels=RATES)


def at_most(run):
    return min(steps_to(run), 3000)


# %% tags=["figure"]
fig, axes = plotting.figure(1, 4, size=(14, 4.4))
for ax, length in zip(axes, (64, 128, 256), strict=False):
    draw_by_width(ax, lambda run, length=length: last_share(run, length), f"right at T = {length}")
    ax.set_ylim(-0.03, 1.05)
    plotting.level(ax, 4 / length)
draw_by_width(axes[3], at_most, "steps until 0.9 at T = 256")
_ = fig.supxlabel("width of the model, d")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
plotting.save(
    fig,
    "08_grid",
    "Four panels against the width of the model, three runs of each system. In three of them the "
    "share right at T = 64, 128 and 256: QCAttn, InnerFuncAttn and the same with mask at 0.99, but "
    "for one run with mask at width 32. That one and SSD are near the line of naming some value of "
    "the row, SSD at most at 0.23. In the fourth the steps until 0.9: 1,000 to 2,500 for those "
    "that come there; 3,000, the end, for SSD and the one run with mask.",
)

# %% [markdown]
# Lines join medians; equal runs of one system share a point. "Never" counts as 3,000 steps.

# %% [markdown]
# Do the three that learn differ? Runs stop at 0.99, so we compare steps, seed by seed, because runs
# with one seed saw the same rows. We print the geometric mean of three ratios with its 95 %
# interval (Student's $t$ on logarithms). An interval that includes a run that never got there no
# longer has 95 % coverage.


# %%
def times_as_many(one, other, d):
    """Steps of one system over those of another: the mean over seeds, and its interval."""
    pairs = zip(runs_of(one, d), runs_of(other, d), strict=True)
    logs = [math.log2(min(steps_to(a), 3000) / min(steps_to(b), 3000)) for a, b in pairs]
    mean, half = interval(logs)
    return 2**mean, 2 ** (mean - half), 2 ** (mean + half)


for one, other in (("InnerFuncAttn", "QCAttn"), ("InnerFuncAttn, mask", "InnerFuncAttn")):
    print(f"{one}: times as many steps until 0.9 as {other}")
    for d in RATES:
        mean, low, high = times_as_many(one, other, d)
        verdict = "none shown" if low <= 1 <= high else "a difference"
        print(f"   d = {d:3}: {mean:.2f}, between {low:.2f} and {high:.2f}: {verdict}")
        assert verdict == "none shown"

# %% [markdown]
# Three seeds show no difference between the inner function and plain attention, nor between the
# inner function with its mask and without. At $d = 32$ the ratio to QCAttn may be 0.69 or 2.65; at
# $d = 64$ and 128 the intervals end at 1.50 or below.

# %% [markdown]
# ### Is it the rate?
#
# A rate that suits one system need not suit another. At the smallest size we try four, from WM's
# own to thirty times that (`python book/records.py 08_rates`):


# %%
def runs_at(rate, system):
    runs = read_record("08_rates")["rates"]
    return [run for run in runs if run["system"] == system and math.isclose(run["rate"], rate)]


print("d = 32, T = 64: right after 2,000 steps or at 0.99, three seeds")
at_rate = {}
for name in ("SSD", "QCAttn"):
    for times in (1, 10 / 3, 10, 30):
        shares = sorted(last_share(run, 64) for run in runs_at(4e-4 * times, name))
        at_rate[name, round(times)] = shares
        print(f"{name:6} {times:4.1f} times WM's rate:", *(f"{share:5.2f}" for share in shares))

# %%
assert all(min(at_rate["QCAttn", times]) >= 0.99 for times in (10, 30))
assert min(at_rate["QCAttn", 3]) > 0.75 and max(at_rate["QCAttn", 1]) < 0.08
assert all(max(at_rate["SSD", times]) < 0.09 for times in (1, 10, 30))
assert 0.7 < at_rate["SSD", 3][-1] < 0.8 and at_rate["SSD", 3][1] < 0.15
slower, longer = read_record("08_rates")["slower"], read_record("08_rates")["longer"][0]
print("SSD, d = 32, 3.3 times WM's rate: right at T = 64 after more steps, three seeds")
for steps in (1000, 2000, 3000, 4000, 5000, 6000):
    at = [run["right"][min(steps // 100, len(run["right"])) - 1][1] for run in slower]
    print(f"{steps:6}", *(f"{share:5.2f}" for share in at))
print(f"SSD, d = 64, 10 times WM's rate: {last_share(longer, 64):.2f} after 20,000 steps (one run)")
last = sorted(last_share(run, 64) for run in slower)
assert last[2] > 0.9 and 0.2 < last[1] < 0.3 and last[0] < 0.1 and last_share(longer, 64) < 0.1

# %% [markdown]
# At $d = 32$ attention learns at 3.3, 10 and 30 times WM's rate. Rotary SSD learns only at 3.3
# times, in one run of three; another reaches 0.25 after 6,000 steps. So section 7's rate suits
# attention better at this size. At $d = 64$ and ten times WM's rate, seed 0 is at 0.09 after 20,000
# steps; in section 8 another seed reaches 0.35. At WM's own rate neither begins in 2,000; WM may
# take 65,536.

# %% [markdown]
# ## 8 · Position, and the order of the layers
#
# Sections 3 and 4 suggest three things. A state below attention can do the shift, and attention the
# look-up. A state layer with a convolution can do both. Without one it needs another layer.
#
# We train at $d = 64$ on rows of 32 and 64 tokens, for at most 2,000 steps, at section 7's rate,
# tuned for none of these models.

# %%
PANELS = [
    ["SSD, convolution", "SSD", "SSD, decay"],
    ["SSD, attention, convolution", "SSD, attention", "SSD, attention, decay"],
    ["attention, SSD, convolution", "attention, SSD", "QCAttn"],
]


def positions_of(name):
    return [run for run in read_record("08_recall")["positions"] if run["system"] == name]


def steps_with(name):
    return [steps_to(run) for run in positions_of(name)]


print("d = 64, T = 64: right at the end, three seeds, and steps until 0.9 are")
for name in WITH_POSITION:
    runs = positions_of(name)
    shares = " ".join(f"{last_share(run, 64):.2f}" for run in runs)
    print(f"{name:28} {shares}   steps", *(f"{steps_to(run):5}" for run in runs))

# %%
steps = {name: steps_with(name) for name in WITH_POSITION}
ends = {name: [last_share(run, 64) for run in positions_of(name)] for name in WITH_POSITION}
below = [count for name, runs in steps.items() if "SSD, attention" in name for count in runs]
above = [share for name, runs in ends.items() if "attention, SSD" in name for share in runs]
assert len(below) == 9 and max(below) <= 600 and set(steps["QCAttn"]) <= {700, 800}
assert len(above) == 6 and max(above) < 0.15 and max(ends["SSD, decay"]) < 0.1
assert sum(share > 0.11 for share in ends["attention, SSD, convolution"]) == 2
assert max(steps["SSD, convolution"] + steps["one SSD, convolution"]) <= 400
assert [round(share, 1) for share in sorted(ends["SSD"])] == [0.1, 0.1, 0.4]


# %% tags=["figure"]
def draw_runs(ax, runs, title):
    """Share right at T = 64 against steps, a line for each seed."""
    for i, run in enumerate(runs):
        shares = [right[-1] for right in run["right"]]
        steps = [100 * (n + 1) for n in range(len(shares))]
        plotting.lines(ax, steps, {f"seed {i}": shares}, marker=".", legend=None)
    ax.set(title=title, ylim=(0, 1.05), xlim=(0, 2000))
    plotting.level(ax, 1 / 16)


# %% tags=["figure"]
fig, axes = plotting.figure(3, 3, size=(12, 8.4))
for panels, row in zip(axes, PANELS, strict=True):
    for ax, name in zip(panels, row, strict=True):
        plain = name.startswith(("SSD", "attention")) and name.endswith(("SSD", "attention"))
        draw_runs(ax, positions_of(name), f"{name}, rotation" if plain else name)
axes[1, 0].set_ylabel("share right")
axes[2, 1].set_xlabel("training step")
fig.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plotting.save(
    fig,
    "08_positions",
    "Nine panels: share right at T = 64 against training steps, up to 2,000, three runs in each; "
    "most of those that learn end where 99 % are right. Upper row, two layers of SSD: with "
    "convolution all runs end so after 300 or 400 steps; with rotation two stay at 0.08 and one "
    "rises to 0.35; with decay all stay at 0.07. Middle row, SSD below attention: all nine runs "
    "pass 0.9 within 600 steps. Lower row: attention below SSD ends between 0.07 and 0.13, with a "
    "small rise at the end in two runs with convolution; two layers of attention pass 0.9 after "
    "700 or 800 steps.",
)

# %% [markdown]
# - **A state below attention** learns the task in all nine runs, within 200 to 600 steps. Two
#   layers of attention take 700 or 800.
# - **State layers alone** learn it within 400 steps with a convolution, even a single layer. With
#   rotation one run of three has started by step 2,000, with decay none.
# - **Attention below a state** doesn't learn it in 2,000 steps, though two of three runs with the
#   convolution have begun to rise. These runs don't tell us why.
#
# At this rate, order matters as in chapter 07. Why two rotary layers don't learn is not settled. WM
# compares without a convolution:
#
# > "For fairness, the SSD algorithm is different from the validation structure in Mamba2 … and we
# > remove the one-dimensional causal convolution and gated MLP." (WM Table 6)
#
# So section 7 says nothing about SSD as Mamba-2 has it.

# %% [markdown]
# ## 9 · The needle
#
# OTCE hides one sentence, a *needle*, in a long text, and maps how often the model finds it, by
# length of the text and depth of the sentence (Figure 10). Our needle gives a name a four-digit
# code, and the text ends with the question:

# %%
hay = text_to_ids("hay " * 40)
ids, targets = needle(1, 120, depth=0.5, haystack=hay, generator=seeded(4))
row, wanted = ids_to_text(ids[0]), ids_to_text(targets[0][targets[0] >= 0])
print(f"{row}\nasked for: {wanted}")
assert row.count("The code of") == 2 and f" is {wanted}. " in row and row.endswith(wanted[:3])

# %% [markdown]
# Each digit is predicted from the true earlier ones; guessing is right once in ten. The model can
# ignore the name.
#
# We train four small systems, in the layer order of WM Table 7 (chapter 07), on *short* texts of up
# to 256 bytes or *long* ones of up to 1,024, and test them on up to 2,048:

# %% tags=["setup"]
FOUR = {
    "LlaMa": dict(pattern="AM × 4", d_ff=422),
    "Mamba-2": dict(pattern="SM × 4", position="conv", d_ff=415),
    "Jamba": dict(pattern="SM SR AM SR", position="conv", d_ff=119),
    "Cheems": dict(pattern="SE × 3 + IE", d_ff=128),
}
WINDOWS = {"short": (64, 128, 256), "long": (64, 128, 256, 512, 1024)}
DEPTHS, ASKED = (0, 0.25, 0.5, 0.75, 1), (128, 256, 512, 1024, 2048)
VARIANTS = {
    "as trained": dict(),
    "base": dict(base=True),
    "sharper": dict(sharper=True),
    "both": dict(base=True, sharper=True),
}


# %%
def needle_model(system, seed):
    """One of the four systems, with 0.3 million parameters."""
    _ = torch.manual_seed(seed)
    sizes = dict(d_model=64, n_heads=2, d_state=64, n_values=8, n_neurons=256, k_neurons=8)
    return CausalLM(ModelConfig(**sizes, **FOUR[system])).float()


counts = {system: sum(p.numel() for p in needle_model(system, 0).parameters()) for system in FOUR}
print("parameters:", *(f"{system} {count:,}" for system, count in counts.items()))
assert max(counts.values()) < 1.002 * min(counts.values())

# %% [markdown]
# The counts include experts that a token doesn't use. The loss counts
# the answer alone.


# %%
@torch.no_grad()
def digits_right(model, length, depth, haystack, n_rows=16):
    """The share of the digits that are right, in texts of this length with a needle this deep."""
    rows = needle(
        n_rows, length, depth, haystack=haystack, generator=torch.Generator().manual_seed(999)
    )
    logits, targets = answers(model, *rows)
    return (logits.argmax(-1) == targets).double().mean().item()


def needle_loss(model, ids, targets, with_text):
    """Nats per digit of the answer; with_text adds the nats per byte of the text."""
    x, asked = model.hidden_states(ids, use_cache=False)[0], targets >= 0
    loss = F.cross_entropy(model.logits(x[asked]), targets[asked])
    if with_text:
        loss = loss + F.cross_entropy(model.logits(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    return loss


# %%
def learn_needles(system, windows, steps, rate, seed=0, with_text=False, every=100):
    """Train on texts of each length in turn: the model, and its share right at each, over time."""
    generator, model = torch.Generator().manual_seed(seed), needle_model(system, seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    haystack, right = split_text(text_to_ids(read_text()), 0.1)[0], []
    for step in range(steps):
        length, depth = windows[step % len(windows)], torch.rand((), generator=generator).item()
        rows = needle(2048 // length, length, depth, haystack=haystack, generator=generator)
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 50)
        optimizer.zero_grad()
        needle_loss(model, *rows, with_text).backward()
        _ = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % every == 0:
            at = [[digits_right(model, n, d, haystack, 8) for d in (0, 0.5, 1)] for n in windows]
            right.append([sum(shares) / 3 for shares in at])
            if min(right[-1]) >= 0.98:
                break
    return model, right


# %% [markdown]
# Lab [04b](labs/04b_longer_than_trained.ipynb) has two remedies for longer texts. A larger *base*
# slows the rotation (4.13). A query that grows with the logarithm of the tokens it sees keeps the
# softmax *sharper*. Neither needs training:


# %%
def stretched(model, length, window, base=False, sharper=False):
    """A copy for texts of a length beyond the window: slower rotations, sharper queries."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if base and hasattr(layer, "rope_base"):
            width = 64 // layer.n_heads if isinstance(layer, QCAttn) else 64  # of what is turned
            layer.rope_base = ntk_base(length, width, layer.rope_base, max_positions=window)
        if sharper and isinstance(layer, QCAttn):
            scale = log_length_scale(torch.arange(length)[None], window)[..., None]
            layer.q_proj.register_forward_hook(lambda _, __, q, scale=scale: q * scale)
    return model


def heat_map(model, window, haystack, **remedies):
    """Shares of digits right: a row for each length asked, a column for each depth."""
    rows = []
    for length in ASKED:
        reader = stretched(model, length, window, **remedies) if length > window else model
        rows.append([digits_right(reader, length, depth, haystack) for depth in DEPTHS])
    return rows


# %% [markdown]
# Up to the trained length neither remedy changes anything; beyond it each does:

# %%
model, ids = needle_model("Cheems", 0), needle(4, 512, 0.5, generator=seeded(5))[0]
both = VARIANTS["both"]
within = stretched(model, 256, 256, **both)(ids[:, :256])[0].double()
check("both remedies at the trained length", within, model(ids[:, :256])[0].double())
for name, remedies in VARIANTS.items():
    if remedies:
        beyond = stretched(model, 512, 256, **remedies)(ids)[0]
        _ = must_differ(f"{name}, twice the trained length", beyond, model(ids)[0], at_least=1e-4)

# %% [markdown]
# They change nothing in Mamba-2, and in Jamba only the layer of attention:

# %%
model = needle_model("Mamba-2", 0)
after = stretched(model, 512, 256, **both)
check("Mamba-2: both remedies change nothing", after(ids)[0].double(), model(ids)[0].double())
model = needle_model("Jamba", 0)
after = stretched(model, 512, 256, **both)
x, places = torch.randn(1, 512, 64, generator=seeded(6)).float(), torch.arange(512)[None]
for old, new in zip(model.blocks, after.blocks, strict=True):
    moved = (old(x, places)[0] - new(x, places)[0]).abs().max()
    assert moved > 1e-3 if old.letter == "A" else moved < 1e-5
print("Jamba: of eight layers the one with letter A alone gives another output")

# %% [markdown]
# ### What they learned
#
# We train three seeds for at most 2,500 updates of 2,048 bytes, or until 98 % of the digits are
# right at every trained length, in 24 texts each (`python book/records.py 08_needle`). Each rate is
# the best of three on short texts at seed 0, which favours the counts, because seed 0 is also in
# the table. For Cheems a still lower rate may be better.


# %%
def needle_runs(system, kind, part="grid"):
    """The runs of a system on short or long texts, in the order of their seeds."""
    runs = read_record("08_needle")[part]
    return [run for run in runs if (run["system"], run["kind"]) == (system, kind)]


def updates(run):
    """Updates until 0.98 at every trained length; in brackets the least share after 2,500."""
    least = min(run["right"][-1])
    return f"{100 * len(run['right']):,}" if least >= 0.98 else f"({least:.2f})"


print("updates until 0.98 at every trained length, or (the least share after 2,500), three seeds")
for kind in WINDOWS:
    for system in FOUR:
        rate = read_record("08_needle")["best"][system]
        runs = needle_runs(system, kind)
        print(f"{kind:5} {system:8} rate {rate:<6g}", *(f"{updates(run):>7}" for run in runs))
        assert len(runs) == 3
assert read_record("08_needle")["best"]["Cheems"] == 3e-4

# %%
learned = {
    kind: [sum(min(run["right"][-1]) >= 0.98 for run in needle_runs(s, kind)) for s in FOUR]
    for kind in WINDOWS
}
print(
    "runs that got there:",
    *(f"{kind} {dict(zip(FOUR, n, strict=True))}" for kind, n in learned.items()),
)
assert learned == {"short": [1, 2, 3, 1], "long": [0, 0, 1, 0]}

# %% [markdown]
# On long texts eleven of twelve runs did not get there, so the maps below do not rank the systems.
#
# Does training on the answer alone suit everyone? Here we train the text too, at the same weight
# and rate (one run each, seed 0):

# %%
for system in FOUR:
    (run,) = needle_runs(system, "short", "with text")
    shares = " ".join(f"{share:.2f}" for share in run["right"][-1])
    print(f"{system:8} right at 64, 128, 256 bytes after {100 * len(run['right']):,}: {shares}")
    without = needle_runs(system, "short")[0]["right"][:10][-1]  # seed 0, up to 1,000 updates
    print(f"{'':8} on the answer alone, as many at most: {' '.join(f'{s:.2f}' for s in without)}")
    there = min(run["right"][-1]) >= 0.98, min(without) >= 0.98
    assert there == {"LlaMa": (True, False), "Jamba": (True, True)}.get(system, (False, False))
    if not there[0]:
        assert max(run["right"][-1]) < 0.15 and (min(without) >= 0.6) == (system == "Mamba-2")

# %% [markdown]
# No. In these single runs LlaMa gets there only when the text is trained too, and Mamba-2 reaches
# 0.60 or more only when it isn't. Our choice seems to hold LlaMa back.

# %% [markdown]
# ### The heat map


# %%
def mean_heat(system, kind, variant="as trained"):
    """Shares right, the mean of three seeds: a row for each depth, a column for each length."""
    return torch.tensor([run["heat"][variant] for run in needle_runs(system, kind)]).mean(0).T


# %%
def mean_by_length(run, variant):
    """Shares right at each length asked, the mean over depths."""
    return [sum(row) / len(row) for row in run["heat"][variant]]


def judged_at(system, kind, variant, length):
    """The share right at a length, for every seed."""
    at = ASKED.index(length)
    return [mean_by_length(run, variant)[at] for run in needle_runs(system, kind)]


# %% tags=["figure"]
def draw_heat(ax, system, kind, variant="as trained"):
    """A system's heat map, and a line behind the longest text that it was trained on."""
    got_there = sum(min(run["right"][-1]) >= 0.98 for run in needle_runs(system, kind))
    heat, title = mean_heat(system, kind, variant), f"{system}, {kind} ({got_there} of 3)"
    labels = dict(xticks=ASKED, yticks=DEPTHS)
    plotting.heatmap(ax, heat, title=title, signed=False, limit=1.0, colorbar=False, **labels)
    for i, shares in enumerate(heat):
        for j, share in enumerate(shares):
            color = "white" if share > 0.6 else plotting.INK
            ax.text(j, i, f"{share:.0%}", ha="center", va="center", color=color)
    ax.tick_params(labelsize=10)
    ax.axvline(ASKED.index(WINDOWS[kind][-1]) + 0.5, color=plotting.INK, linewidth=2)


# %% tags=["figure"]
fig, axes = plotting.figure(2, 4, size=(15, 7.6))
for row, kind in zip(axes, WINDOWS, strict=True):
    for ax, system in zip(row, FOUR, strict=True):
        draw_heat(ax, system, kind)
_ = fig.supxlabel("share of digits right, by length of the text in bytes; trained up to the line")
_ = fig.supylabel("depth of the needle")
plotting.save(
    fig,
    "08_needle",
    "Eight heat maps of the share of digits right, the mean of three seeds, rows for five depths "
    "of the needle, columns for texts of 128 to 2,048 bytes, a line behind the longest in "
    "training. Trained on short texts, up to 256 bytes: LlaMa falls to 9 to 14 percent from 1,024"
    " on; Mamba-2, Jamba and Cheems keep 83 to 89 percent at 2,048 where the needle is last, and "
    "have 11 to 25 where it is first. Trained on long texts, up to 1,024: all four have less at "
    "128 than before, LlaMa and Jamba more at 1,024; from 256 on LlaMa has least where the needle "
    "is last.",
)

# %% [markdown]
# A field is the mean of three seeds with 16 held-out texts each. Brackets count the runs that got
# there.

# %%
maps = {(kind, system): mean_heat(system, kind) for kind in WINDOWS for system in FOUR}
print("trained on short texts, asked at 2,048: mean share right with the needle first, and last")
for system in FOUR:
    first, last = maps["short", system][[0, -1], -1].tolist()
    print(f"{system:8} {first:.2f} {last:.2f}")
    if system != "LlaMa":
        assert 0.105 < first < 0.255 and 0.825 < last < 0.895
alone = {n: judged_at("LlaMa", "short", "as trained", n) for n in (512, 1024, 2048)}
assert min(alone[512]) > 0.4 and max(alone[1024] + alone[2048]) < 0.15
far = maps["short", "LlaMa"][:, 3:]
assert far.min() > 0.085 and far.max() < 0.145

# %%
for system in FOUR:
    longer = (maps["long", system] - maps["short", system]).mean(0)
    assert longer[0] < -0.05 and (longer[3] > 0.2) == (system in ("LlaMa", "Jamba"))
assert all(maps["long", "LlaMa"][:, length].argmin() == 4 for length in range(1, 5))

# %% [markdown]
# - **Attention alone** (LlaMa), trained on short texts, guesses at four times the length.
# - **With states**, needles far from the question are lost first.

# %% [markdown]
# ### Beyond the trained length
#
# Now we apply both remedies to the models trained on short texts:

# %% tags=["figure"]
fig, axes = plotting.figure(1, 3, size=(12, 4.3))
for ax, system in zip(axes, ("LlaMa", "Jamba", "Cheems"), strict=True):
    draw_heat(ax, system, "short", "both")
_ = fig.supxlabel("share of digits right with both remedies, by length of the text in bytes")
_ = fig.supylabel("depth of the needle")
plotting.save(
    fig,
    "08_remedies",
    "Three heat maps as before, with both remedies. LlaMa has 33 to 57 percent at 1,024 and 11 to"
    " 47 at 2,048; Jamba 67 to 100 and 61 to 97; Cheems 23 to 60 and 14 to 49, at both lengths "
    "less with the needle last than at depth 0.75.",
)

# %%
for system, ends in (
    ("LlaMa", (33, 57, 11, 47)),
    ("Jamba", (67, 100, 61, 97)),
    ("Cheems", (23, 60, 14, 49)),
):
    beyond = 100 * mean_heat(system, "short", "both")[:, 3:]
    found = [f(beyond[:, length]).item() for length in (0, 1) for f in (torch.min, torch.max)]
    assert [round(share) for share in found] == list(ends), found
assert (beyond[-1] < beyond[-2]).all()


# %%
def at_depth(system, variant, depth, length=1024):
    """The share right at one depth and length, of the models of short texts, for every seed."""
    at = ASKED.index(length), DEPTHS.index(depth)
    return [run["heat"][variant][at[0]][at[1]] for run in needle_runs(system, "short")]


print("trained on short texts, asked at 1,024, three seeds: as trained -> with both remedies")
for system in ("LlaMa", "Jamba", "Cheems"):
    for depth, name in ((0, "first"), (1, "last")):
        pairs = zip(*(at_depth(system, v, depth) for v in ("as trained", "both")), strict=True)
        print(f"{system:6} needle {name:5}", *(f"{a:.2f} -> {b:.2f}  " for a, b in pairs))

# %%
print("mean over the depths, less as trained; mean of three seeds with its 95 % interval")
gains = {}
for system in ("LlaMa", "Jamba", "Cheems"):
    for name in ("base", "sharper", "both"):
        new, old = (judged_at(system, "short", v, 1024) for v in (name, "as trained"))
        gains[system, name] = [a - b for a, b in zip(new, old, strict=True)]
        mean, half = interval(gains[system, name])
        seeds = " ".join(f"{gain:+.2f}" for gain in gains[system, name])
        print(f"{system:6} {name:7} {mean:+.2f} ± {half:.2f}   seeds {seeds}")

# %%
excluding = [which for which, gain in gains.items() if not interval(gain).holds_zero]
assert excluding == [("LlaMa", "both")] and min(gains["Jamba", "both"]) > 0.05
assert 0.45 < sum(judged_at("LlaMa", "short", "both", 1024)) / 3 < 0.55
assert sum(gain < 0 for gain in gains["Cheems", "both"]) == 2
for depth in (0, 0.25):
    for system in ("Jamba", "Cheems"):
        new, old = (at_depth(system, v, depth) for v in ("both", "as trained"))
        assert all(a > b for a, b in zip(new, old, strict=True))
for name in ("base", "both"):
    new, old = (at_depth("Cheems", v, 1) for v in (name, "as trained"))
    assert all(a < b - 0.2 for a, b in zip(new, old, strict=True))

# %% [markdown]
# - **LlaMa** guessed at this length, and finds about half of the digits with both remedies. Of nine
#   intervals only this one excludes zero.
# - **Jamba** finds early needles more often in all three runs, though the interval holds zero. Only
#   its attention changed, so part of the failure was attention's.
# - **Cheems** loses the needle just before the question (from 1.00 to 0.23 in one run). Early
#   needles clearly improve in one run only; 0.12 and 0.17 of 64 digits are hardly above guessing.

# %% [markdown]
# ## 10 · Claimed and seen
#
# We tested WM's claims on rows of up to 256 tokens with 64 pairs, 256 ids, widths up to 128, 3,000
# steps and three seeds. WM names no number of seeds.
#
# > "We can see that when the model dimension reaches 128, and InnerFuncAttn allocates 64 dimensions
# > for each V, InnerFuncAttn is more accurate than QCAttn and SSD." (WM §4.1)
#
# - Than SSD: **seen** at the rates of section 7: nine runs at 0.99, nine below 0.05 at $T = 256$.
#   But at the smallest size that rate suits SSD badly, and *with* a convolution ($d = T = 64$) SSD
#   takes about half QCAttn's steps.
# - Than QCAttn: **not seen**. At $d = 128$ both answer 99 %, with a ratio of steps of 1.00, between
#   0.84 and 1.19.
#
# > "When the sequence length is extended to 2048, the contact recall capabilities of the three
# > structures are limited by sequence noise, but InnerFuncAttn with Dynamic Mask still maintains
# > good performance." (WM §4.1)
#
# - **Cannot be told at this scale.** At 256 tokens three seeds show no difference by the mask.
#   Section 3's fixed weights recall 28 pairs among 1,024 tokens; noise alone isn't the limit there.
#
# > "InnerFuncAttn with Dynamic Mask maintains good performance in most cases." (WM Figure 5)
#
# - **Seen**, on shorter rows than WM's, in eight of nine runs; without the mask, and with QCAttn,
#   in nine of nine.
#
# > "OTCE can recall information across 128K context length (our maximum extended sequence length),
# > and has excellent performance on the Needle in a haystack evaluation." (OTCE Figure 10)
#
# - **Cannot be told at this scale.** OTCE was trained on 128K (a fifth of the pre-training, and the
#   fine-tuning; §4.5), so the claim is about trained lengths.
# - The paper doesn't say how far a model reaches *beyond* its training. Here no run, as trained,
#   finds more than three quarters of the digits at four times the length, on average over depths.

# %%
at_four_times = [x for system in FOUR for x in judged_at(system, "short", "as trained", 1024)]
print(
    f"at four times the trained length: {min(at_four_times):.2f} to {max(at_four_times):.2f} right"
)
assert 0.7 < max(at_four_times) <= 0.7505  # shares in the record are rounded
steps = {
    s: [len(r["right"]) for r in needle_runs(s, "short") if min(r["right"][-1]) >= 0.98]
    for s in FOUR
}
assert max(steps["Jamba"]) < min(steps["LlaMa"] + steps["Mamba-2"] + steps["Cheems"])

# %%
mean, low, high = times_as_many("InnerFuncAttn", "QCAttn", 128)
assert f"{mean:.2f} {low:.2f} {high:.2f}" == "1.00 0.84 1.19"
half = [a / b for a in steps_with("SSD, convolution") for b in steps_with("QCAttn")]
print(f"SSD with convolution: {min(half):.2f} to {max(half):.2f} of the steps of QCAttn")
assert min(half) > 0.35 and max(half) < 0.6

# %% [markdown]
# ## Summary
#
# - A look-up is a comparison of contents and one step in positions.
# - A state of width $n$ returns $n$ pairs exactly under orthogonal keys, and $u$ pairs with a
#   squared error of $(u - 1)/n$ under random ones. Keys chosen before the values leave at least
#   $1-n/u$.
# - Set by hand, two layers of attention recall, or one state layer with a convolution.
# - Trained at $d = 64$ and $T = 64$, a state below attention recalls within 600 steps, SSD with a
#   convolution within 400, two layers of attention within 800. At this untuned rate, two rotary
#   layers do not within 2,000.
# - At four times the trained length attention alone guesses; both remedies bring back about half of
#   the digits.
# - Three seeds show large differences only. Not seen is not refuted.
#
# ## Exercises

# %% [markdown]
# **1 · easy.** Picture three models. The first knows which ids are values and nothing else, and
# names one of all values at random. The second names a value of this row. The third learns after
# each query which value was right, and names one of the row's others. Which share of the answers
# does each get right, for `n_pairs` pairs and `n_values` values in all? (Each key appears once as a
# query.)


# %% tags=["exercise"]
def lines_to_beat(n_pairs, n_values):
    """Three shares: some value; some value of the row; some value of the row that is left."""
    ### BEGIN SOLUTION
    left = sum(1 / (n_pairs - asked) for asked in range(n_pairs)) / n_pairs
    return 1 / n_values, 1 / n_pairs, left
    ### END SOLUTION


# %% tags=["check"]
def guess_what_is_left(n_rows, n_pairs, generator):
    """The share right for a guess among the row's values that were not yet asked for."""
    right = 0
    for _ in range(n_rows):
        order = torch.randperm(n_pairs, generator=generator).tolist()
        for asked in range(n_pairs):
            left = order[asked:]
            guess = left[torch.randint(len(left), (), generator=generator)]
            right += guess == order[asked]
    return right / n_rows / n_pairs


mine = lines_to_beat(16, 128)
assert math.isclose(mine[0], 1 / 128) and math.isclose(mine[1], 1 / 16), f"got {mine[:2]}"
measured = guess_what_is_left(2000, 16, seeded(0))
assert abs(mine[2] - measured) < 0.01, f"{mine[2]:.3f}, and {measured:.3f} in a trial"
for got, share in zip(lines_to_beat(4, 10), (0.1, 0.25, 25 / 48), strict=True):
    assert math.isclose(got, share), f"4 pairs, 10 values: {got} instead of {share}"
print("three lines to beat with 16 pairs:", *(f"{share:.3f}" for share in mine))

# %% [markdown]
# **2 · easy.** How many pairs does a state of width $n$ hold, if the mean squared error may be at
# most `error` of the value's own square? Give both answers of section 2: with random keys, and the
# most that any keys chosen before the values allow (for an error below 1).


# %% tags=["exercise"]
def pairs_that_fit(n, error):
    """The largest whole numbers of pairs: with random keys, and by the counting bound."""
    ### BEGIN SOLUTION
    return math.floor(error * n + 1e-9) + 1, math.floor(n / (1 - error) + 1e-9)
    ### END SOLUTION


# %% tags=["check"]
for n, error in ((64, 0.25), (128, 0.5), (64, 0.4), (64, 0.9), (100, 0.1)):
    at_random, bound = pairs_that_fit(n, error)
    assert (at_random - 1) / n <= error + 1e-9 < at_random / n, f"random keys: {at_random}"
    assert 1 - n / bound <= error + 1e-9 < 1 - n / (bound + 1), f"the bound: {bound}"
    print(f"n = {n:3}, error {error}: {at_random} with random keys, {bound} at most")

# %% [markdown]
# **3 · medium.** In another task the value comes two places after its key: key, fill, value. Set
# a model by hand that recalls there, and in general with the value `gap` places after its key.
# (Nearly everything from section 3 can stay. The first places of a row have no token `gap` places
# back; the check uses keys further on.)


# %% tags=["exercise"]
def recall_at(gap):
    """A model of two layers, set by hand: the value stands `gap` places after its key."""
    ### BEGIN SOLUTION
    return by_hand(by=gap)
    ### END SOLUTION


# %% tags=["check"]
for gap in (1, 2, 3):
    for seed in range(5):
        drawn = 1 + torch.randperm(IDS - 1, generator=seeded(seed))[:48]  # no id twice
        for at in (5, 11, 40):  # the place of the key that is asked for
            row = torch.cat([drawn, drawn[at : at + 1]])
            with torch.no_grad():
                answer = recall_at(gap)(row[None])[0][0, -1].argmax().item()
            assert answer == drawn[at + gap], f"gap {gap}, key at {at}: {answer}"
    print(f"gap {gap}: right in all five rows, wherever the key stood")

# %% [markdown]
# **4 · medium.** Some keys come several times in this exercise, and the *last* value counts. A sum
# of writes (8.1) returns all of them; the delta rule (chapter 02) replaces. Use `delta_rule` to
# recall, for keys and values that are given as vectors, pair by pair.


# %% tags=["exercise"]
def last_values(keys, values, queries):
    """Keys (u, n) of length one, values (u, p), queries (i, n): the last values written, (i, p)."""
    ### BEGIN SOLUTION
    (u, n), i = keys.shape, len(queries)
    k = torch.cat([keys, keys.new_zeros(i, n)])[None, :, None]
    v = torch.cat([values, values.new_zeros(i, values.shape[1])])[None, :, None]
    q = torch.cat([keys.new_zeros(u, n), queries])[None, :, None]
    beta = torch.cat([torch.ones(u), torch.zeros(i)])[None, :, None]
    return delta_rule(q, k, v, beta)[0, u:, 0]
    ### END SOLUTION


# %% tags=["check"]
basis, drawn = torch.eye(8), torch.randn(12, 5, generator=seeded(1))
order = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 2, 5, 2, 0])  # key 2 three times
newest = torch.stack([drawn[(order == key).nonzero().max()] for key in range(8)])
check("the last value of each key", last_values(basis[order], drawn, basis), newest)
_ = must_differ("a sum of writes", read_back(basis[order], drawn, basis), newest)
near, state = F.normalize(torch.randn(6, 8, generator=seeded(2)), dim=1), torch.zeros(5, 8)
for key, value in zip(near, drawn, strict=False):  # what the key returns is exchanged
    state = state + torch.outer(value - state @ key, key)
check(
    "keys that are not orthogonal: all of them", last_values(near, drawn[:6], near), near @ state.T
)

# %% [markdown]
# **5 · hard.** Intervals decide what section 7 may call a difference. Seeds are few, and Student's
# $t$ assumes that the differences are normally distributed. Write a test for paired differences
# without that assumption: if the two systems were alike, every difference might as well have had
# the other sign. The share of all choices of signs whose mean is at least as far from 0 as the
# observed one is the *p-value*. What is the smallest p-value that three seeds can give, and five?


# %% tags=["exercise"]
def sign_flip_p(differences):
    """The p-value of paired differences under all choices of signs (two-sided)."""
    ### BEGIN SOLUTION
    x = torch.tensor(differences)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * len(x)).view(-1, len(x))
    means = (signs * x).mean(1).abs()
    return (means >= x.mean().abs() - 1e-12).double().mean().item()
    ### END SOLUTION


# %% tags=["check"]
assert sign_flip_p([1.0, 2.0, 3.0]) == 0.25, "three of one sign: 2 of 8 choices"
assert sign_flip_p([1.0, 2.0, 3.0, 0.5, 0.1]) == 0.0625, "five of one sign: 2 of 32 choices"
assert sign_flip_p([1.0, -1.0, 0.0]) == 1.0, "a mean of 0 is as near as can be"
assert sign_flip_p([3.0, -1.0, 2.0]) == 0.5, "4 of 8 choices are at least as far from 0"
assert sign_flip_p([10.0, -1.0, -2.0, 0.5]) == 0.875, "sizes count, not ranks"
by_chance = [
    sign_flip_p(torch.randn(5, generator=seeded(seed)).tolist()) <= 0.0625 for seed in range(800)
]
assert abs(sum(by_chance) / 800 - 0.0625) < 0.03, "it must be right about chance"
print("the smallest p-value of three seeds: 0.25; of five: 0.0625")

# %% [markdown]
# ## Further reading
#
# - Arora et al. (2024), *Zoology: Measuring and Improving Recall in Efficient Language Models*: the
#   task, and why gated convolutions fail at it.
# - Arora et al. (2024), *Simple Linear Attention Language Models Balance the Recall-Throughput
#   Tradeoff*: recall against the size of the state.
# - Jelassi et al. (2024), *Repeat After Me: Transformers are Better than State Space Models at
#   Copying*: a counting bound for copying.
# - Olsson et al. (2022), *In-context Learning and Induction Heads*: the shift and the look-up, in
#   trained models.
