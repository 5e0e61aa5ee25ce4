# %% [markdown]
# # 09 · Ablations
#
# **One part of a model is exchanged, all else stays, and the loss moves in the third digit. Was it
# the part?** When you are through you can
#
# - say how far two runs of one model lie apart, and which difference so many seeds can show;
# - compare models so that text, order and number of parameters are the same and the learning rate
#   is each one's own;
# - read a table of losses with its intervals, and say of a claim whether it is seen, not seen,
#   reversed, or cannot be told;
# - train a model to fill in blanks, and say what a layer that cannot look ahead makes of them.
#
# Assumes: chapter 07 up to its section 5; section 7 of chapter 08 for paired intervals.
#
# Sources: *OTCE* §4.1 and §4.2, Tables 1 and 2; *Cheems* (Ch) App. B.2, Figure 6; Du et al. (2022),
# *GLM: General Language Model Pretraining with Autoregressive Blank Infilling*. The code that this
# notebook uses is `cheems_ref/compare.py` and `cheems_ref/tasks.py`.
#
# How to read ✓ and ✗: chapter 00.

# %% tags=["setup"]
import json
import math
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils.flop_counter import FlopCounterMode

from cheems_ref import plotting
from cheems_ref.attention import QCAttn, attention
from cheems_ref.compare import T95, Row, compare, difference, interval
from cheems_ref.model import CausalLM, ModelConfig, count_parameters
from cheems_ref.tasks import blank_infilling
from cheems_ref.text import read_text, text_to_ids
from cheems_ref.train import TrainConfig, random_windows
from cheems_ref.verify import check, must_differ


# %% tags=["setup"]
def seeded(seed):
    return torch.Generator().manual_seed(seed)


def read_record(name):
    return json.loads((Path("..") / "figures" / "records" / f"{name}.json").read_text())


# %% tags=["versions", "nbval-ignore-output"]
print("torch", torch.__version__)

# %% [markdown]
# ## Why this matters
#
# The papers' evidence for the parts of the architecture are tables of perplexities, one number per
# row, of which none says from how many runs. Many of the differences are small. Before such a table
# can be repeated in small, one has to know how large a difference chance alone makes.

# %% [markdown]
# ## 1 · The same model twice
#
# The loss of a trained model depends on the numbers that its weights start from and on the pieces
# of text that it happens to see, both drawn by a *seed*. Suppose that the losses of many seeds are
# normally distributed. From $n$ of them one knows the mean only up to an interval,
#
# $$\bar x \pm t_{n-1}\,\frac{s}{\sqrt n}, \tag{9.1}$$
#
# with $s$ the standard deviation of the $n$ numbers and $t_{n-1}$ Student's factor. With a true
# standard deviation the factor would be 1.96; $s$, from few numbers, is itself uncertain, and often
# too small. How often does the interval hold the true mean?


# %%
def covered(n, factor, trials=50_000):
    """The share of intervals (9.1), each from n normal numbers, that hold the true mean, 0."""
    x = torch.randn(trials, n, generator=seeded(n))
    return (x.mean(1).abs() <= factor * x.std(1) / math.sqrt(n)).double().mean().item()


for n in (2, 3, 5, 8, 30):
    student, normal = covered(n, T95[n - 2]), covered(n, 1.96)
    print(f"{n:2} seeds: Student's {student:.2f} of the intervals, 1.96 {normal:.2f}")
    assert abs(student - 0.95) < 0.006 and normal < student

# %% [markdown]
# Student's intervals keep their word with any number of seeds. With three seeds and 1.96 one is
# wrong every fifth time.
#
# The half width of (9.1) says which difference can be shown. In units of the standard deviation:

# %%
for n in (2, 3, 5, 8, 16):
    half = T95[n - 2] / math.sqrt(n)
    x = torch.randn(50_000, n, generator=seeded(n)) + half
    shown = (x.mean(1) > half * x.std(1)).double().mean().item()
    print(f"{n:2} seeds: {half:.2f} standard deviations; a difference so large is shown"
          f" {shown:.0%} of the time")  # fmt: skip
    assert 0.5 < shown < 0.7

# %% [markdown]
# Three seeds show differences of 2.5 standard deviations, and that two times in three; eight those
# of 0.84. To find none says little: a table from few seeds can say "seen", and rarely "not there".

# %% [markdown]
# ## 2 · What has to be equal
#
# Every model of this chapter has a million parameters and is trained by 300 updates, each on four
# windows of 512 bytes of Python's manual and standard library.

# %% tags=["setup"]
SIZES = dict(d_model=128, n_heads=4, d_state=64, n_values=16, k_values=2)
TRAINING = TrainConfig(
    steps=300, batch_size=4, length=512, held_out=0.03, evaluate_every=150, checkpoint_every=300
)
RATES = (1e-3, 3e-3, 1e-2)
MILLION = 1_000_000

# %% tags=["setup"]
INNER = {
    "linear": dict(pattern="SM × 3 + AM"),
    "retrieved": dict(pattern="SM × 3 + IM", inner="retrieved"),
    "SSD": dict(pattern="SM × 3 + IM", inner="ssd"),
}
ORDERS = {
    "Jamba": dict(pattern="SMSMSMSM AMSMSMSM", position="conv", d_model=96),
    "OTCE": dict(pattern="SMSMSMSM AMSMSMAM", position="conv", d_model=96),
    "two, not last": dict(pattern="SMAMSMSM AMSMSMSM", position="conv", d_model=96),
}

# %% [markdown]
# **Parameters.** What a part takes away or adds is made up for by the width of the MLPs, of which
# the number of parameters is a linear function. Two points give the line:


# %%
def parameters(config):
    """The number of all parameters of a model."""
    return sum(part.total for part in count_parameters(config).values())


def fitted(pattern, target=MILLION, **fields):
    """A configuration whose d_ff brings the number of parameters nearest to the target."""

    def sized(d_ff):
        return ModelConfig(pattern, **(SIZES | fields), d_ff=d_ff)

    first, second = (parameters(sized(d_ff)) for d_ff in (1, 2))
    return sized(1 + round((target - first) / (second - first)))


for name, fields in (INNER | ORDERS).items():
    config = fitted(**fields)
    print(f"{name:13} {config.pattern:17} d_ff {config.d_ff}: {parameters(config):,} parameters")
    assert abs(parameters(config) / MILLION - 1) < 0.001


# %% [markdown]
# **Compute** is then not equal. The FLOPs of one pass over 512 tokens, counted by torch:


# %%
def flops(config, length=512):
    """Floating point operations of a forward pass, per token."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        _ = CausalLM(config)(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    return counter.get_total_flops() / length


for rows in (INNER, ORDERS):
    counted = {name: flops(fitted(**fields)) for name, fields in rows.items()}
    least = min(counted.values())
    print(*(f"{name} {count / least:.3f}" for name, count in counted.items()), sep=", ")
    assert 1.01 < max(counted.values()) / least < 1.1

# %% [markdown]
# They differ by a few percent here. A table that compares at equal parameters has to say so; one
# that compared at equal compute would have other models in it.
#
# **Text and order.** All rows read the same windows in the same order. Each run draws them from a
# generator of its own, with the same seed. Three tiny models, two seeds, ten updates, and the state
# of the generator after each:

# %%
tiny = dict(d_model=32, n_heads=2, d_state=16, target=40_000)
rows = {name: Row(fitted(**fields, **tiny)) for name, fields in INNER.items()}
brief = TrainConfig(steps=10, batch_size=4, length=64, held_out=0.02, evaluate_every=10)
manual = text_to_ids(read_text())


def watched(rows):
    """Compare, and keep the state of the generator of windows after every update."""
    states = {}

    def note(name, run):
        states[name, run.config.seed, run.step] = run.generator.get_state()

    with TemporaryDirectory() as folder:
        found = compare(rows, manual, brief, seeds=(0, 1), directory=folder, after_step=note)
    return found, states


# %%
found, states = watched(rows)
for (_, seed, step), state in states.items():
    assert torch.equal(state, states["linear", seed, step])
assert not torch.equal(states["linear", 0, 10], states["linear", 1, 10])
backwards = dict(reversed(rows.items()))
again, _ = watched(backwards)
assert sorted(again) == sorted(found) and len(found) == 6
print("three models, two seeds: the same windows for all, other windows for another seed;")
print("again, in the opposite order of rows: the same losses to the last digit")

# %% [markdown]
# What if all runs drew from one generator, one after the other? Then each would see other text, and
# a lucky draw would count for the model:

# %%
own = [random_windows(manual, brief, seeded(0)) for _ in range(2)]
one_for_all = seeded(0)
shared = [random_windows(manual, brief, one_for_all) for _ in range(2)]
check("a generator each: the second model reads what the first did", *(w.double() for w in own))
_ = must_differ("one generator for all", *(w.double() for w in reversed(shared)))

# %% [markdown]
# **The learning rate** is each row's own. Chapter 08 saw a state layer fail at a rate that suits
# attention; and a comparison at one rate is one at the rate that somebody chose for one of them.
# Here every row is tried at three rates with seed 0. The best of them is taken for the seeds that
# count, and seed 0 does not count: the best of several runs was also lucky. By how much, if the
# rate made no difference at all?

# %%
x = torch.randn(100_000, 3, generator=seeded(7))
luck = x.min(1).values.mean().item()
print(f"the best of three equal runs: {-luck:.2f} standard deviations below the mean")
assert abs(luck + 3 / (2 * math.sqrt(math.pi))) < 0.01


# %%
def one_run(name, config, rate, seed, training, ids):
    """Train one row with one seed: held-out nats per byte over time."""
    rows = {name: Row(config, rate)}
    with TemporaryDirectory() as folder:
        found = compare(rows, ids, training, seeds=[seed], directory=folder)
    return [(evaluation.step, evaluation.nats) for evaluation in found]


# %% [markdown]
# What the record keeps of a comparison, and how it is read:


# %%
def losses_of(name):
    """For every row of a record and every seed that counts: held-out nats per byte at the end."""
    losses = {}
    for run in read_record(name)["runs"]:
        losses.setdefault(run["row"], {})[run["seed"]] = run["nats"][-1][1]
    return losses


def print_table(name, baseline):
    """Nats of every row with its interval (9.1), and its difference to the baseline's."""
    losses = losses_of(name)
    for row, nats in losses.items():
        mean, half = interval([*nats.values()])
        line = f"{row:26} rate {read_record(name)['best'][row]:<6g} {mean:.3f} ± {half:.3f}"
        if row != baseline:
            apart = difference(losses, row, baseline)
            verdict = "no difference shown" if apart.holds_zero else "a difference"
            line += f"   less {baseline}: {apart.mean:+.3f} ± {apart.half_width:.3f}, {verdict}"
        print(line)


# %% [markdown]
# ## 3 · Three inner functions
#
# **Question.** Ch compares ordinary attention with attention whose values are computed by an inner
# function:
#
# > "[…] with almost the same model parameter, the loss curve of Inner Function Attn is reduced by
# > more than 40% compared to the loss curve of Attention." — Ch, App. B.2
#
# (Figure 6, of 1.3 billion parameters, in fine-tuning.)
#
# **What the chapters lead one to expect.** Chapter 05 found tasks that an inner function makes
# easier in one layer. Here three state layers and four MLPs stand around the one layer of
# attention, which may do as well what the inner function would. So: little.
#
# **What was run.** Three rows, six seeds (`python book/records.py 09_inner`):

# %%
print_table("09_inner", "linear")

# @@VERDICT@@


# %% tags=["figure"]
def draw_runs(ax, losses):
    """The loss of every run against its seed, a line for each row."""
    for row, nats in losses.items():
        plotting.lines(ax, [*nats], {row: [*nats.values()]}, marker="o")
    ax.set(xlabel="seed", ylabel="held-out nats per byte", title="runs of one seed move together")


def draw_differences(ax, losses, baseline):
    """Each row's differences to the baseline, seed by seed, and their mean with its interval."""
    others = [row for row in losses if row != baseline]
    for place, row in enumerate(others):
        apart = [losses[row][seed] - losses[baseline][seed] for seed in losses[row]]
        mean, half = interval(apart)
        ax.plot([place - 0.1] * len(apart), apart, "o", color=plotting.QUIET)
        ax.errorbar(place + 0.1, mean, half, fmt="s", color=plotting.COLORS[place + 1], capsize=6)
    plotting.level(ax, 0)
    ax.set(xticks=range(len(others)), xticklabels=others, xlim=(-0.6, len(others) - 0.4))
    ax.set(title=f"less {baseline}, seed by seed")


# %% tags=["figure"]
fig, (left, right) = plotting.figure(1, 2, size=(12, 4.2))
draw_runs(left, losses_of("09_inner"))
draw_differences(right, losses_of("09_inner"), "linear")
plotting.save(fig, "09_inner", "@@ALT@@")

# @@INNER@@

# %% [markdown]
# ## 4 · Attention before the output
#
# **Question.** OTCE's models end in attention where Jamba's end in a state layer; all else is the
# same. OTCE's Table 2 has one number for each:
#
# > "[…] the difference in perplexity between Jamba and OTCE in the pre-training stage is negligible
# > […] but in the SFT fine-tuning stage, the perplexity of OTCE is significantly lower than Jamba."
# > — OTCE §4.2 and Table 2
#
# (2.53 and 2.51 in pre-training, 1.98 and 1.69 in fine-tuning; 283 and 281 million parameters.)
#
# The two differ in more than the order: OTCE has a second layer of attention. So a third row has
# two as well, and ends in a state layer.
#
# **What the chapters lead one to expect.** Chapter 07 (section 4) saw that a state layer behind
# attention is no obstacle to recall with the convolution. So on text a second layer of attention
# among eight may help a little, and that it stands *last* should matter little.
#
# **What was run.** The two patterns of OTCE Table 1 and the third with a million parameters, four
# seeds (`python book/records.py 09_orders`). A here has rotary positions, which the paper's does
# not.

# %%
print_table("09_orders", "Jamba")
# @@ORDERS@@

# %% [markdown]
# ## 5 · Filling in blanks
#
# Left to right is not how the papers' models were trained:
#
# > "[…] MASK spans in the training text sequence, with autoregressive filling as the training
# > target, requiring the model to predict the masked token." — OTCE §4.1
#
# This is the objective of GLM. Spans are cut out of a text and a mask put in place of each (part
# A). Behind the text stand the spans, in an order drawn at random (part B), and each is written
# from left to right.

# %%
MASK, START, END = 256, 257, 258
SIGNS = {MASK: "▢", START: "⟨", END: "⟩"}


def cut_out(text, generator):
    """A text with blanks: 15 % of it, in spans of three bytes on average."""
    return blank_infilling(text, mask_id=MASK, start_id=START, end_id=END, generator=generator)


def shown(ids):
    """Ids as characters, with signs for the three that are no bytes."""
    return "".join(SIGNS.get(i, chr(i)) for i in ids.tolist())


sentence = text_to_ids("a state keeps what it is told to keep, and forgets by itself")
blanks = cut_out(sentence, seeded(5))
part_b = blanks.targets >= 0
print("part A:", shown(blanks.input_ids[~part_b]))
print("part B:", shown(blanks.input_ids[part_b]))
print("asked: ", shown(blanks.targets[part_b]))
assert (blanks.input_ids == MASK).sum() == (blanks.input_ids == START).sum() == 3

# %% [markdown]
# Two kinds of positions tell where a token of part B belongs: the place of its blank in part A, and
# its place within the blank. Together with the lengths of the other spans the first says where it
# stood in the text:


# %%
def places_cut_out(blanks):
    """For every byte of part B, in its order: where it stood in the text."""
    begins = (blanks.input_ids == START).nonzero()[:, 0]
    ends = torch.cat([begins[1:], begins.new_tensor([len(blanks.input_ids)])])
    lengths, blank = ends - begins - 1, blanks.position_ids[begins]
    before = ((lengths - 1) * (blank < blank[:, None])).sum(1)  # what blanks further left hid
    spans = zip((blank + before).tolist(), lengths.tolist(), strict=True)
    return torch.cat([start + torch.arange(length) for start, length in spans])


# %%
for seed in range(20):
    blanks = cut_out(manual[1000 * seed :][:400], seeded(seed))
    asked = blanks.targets[(blanks.targets >= 0) & (blanks.targets != END)]
    assert torch.equal(manual[1000 * seed :][:400][places_cut_out(blanks)], asked)
    assert 60 <= len(asked) < 75 and len(set(places_cut_out(blanks).tolist())) == len(asked)
print("20 texts of 400 bytes: 60 to 74 bytes cut out, each asked for once, and from its place")

# %% [markdown]
# ### Who sees whom
#
# Part A is given, so it may be seen both ways; part B sees all of part A and what stands before it
# in part B. For the sentence above:

# %% tags=["figure"]
blanks = cut_out(sentence, seeded(5))
fig, ax = plotting.figure(size=(6.2, 5.4))
plotting.heatmap(ax, blanks.visible.double(), signed=False, colorbar=False)
ax.set(title="who (row) sees whom (column)", xlabel="token", ylabel="token")
plotting.save(
    fig,
    "09_visible",
    "A square of as many rows and columns as there are tokens. The columns of part A are dark in "
    "every row. In the columns of part B the field is dark on and below the diagonal.",
)

# %%
a, l = int((blanks.targets < 0).sum()), len(blanks.input_ids)
everyone, own = blanks.visible[:, :a], blanks.visible[a:, a:]
assert everyone.all() and not blanks.visible[:a, a:].any() and torch.equal(own, own.tril())
assert own.sum() == (l - a) * (l - a + 1) // 2
print(f"part A, {a} tokens: seen by all, sees no other; part B, {l - a}: itself and before itself")

# %% [markdown]
# Attention takes such a mask. A state cannot: it reads from left to right, whatever a mask says.


# %%
def let_see(model, visible):
    """Let every layer of attention look where `visible` (l, l) allows; None for back only."""
    allowed = None if visible is None else visible[None, None]
    for layer in model.modules():
        if isinstance(layer, QCAttn):
            layer._read = lambda q, cache: attention(q, cache.k, cache.v, allowed=allowed)


# %%
class Reader(torch.nn.Module):
    """A language model with a table for the places within a blank."""

    def __init__(self, config):
        super().__init__()
        self.model = CausalLM(config)
        self.in_blank = torch.nn.Embedding(64, config.d_model)

    def forward(self, blanks, visible=None):
        """What the logits are read from (l, d), for one text with blanks."""
        let_see(self.model, visible)
        places = blanks.block_position_ids.clamp(max=63)
        x = (self.model.embedding(blanks.input_ids) + self.in_blank(places))[None]
        for block in self.model.blocks:
            x, _ = block(x, blanks.position_ids[None])
        return self.model.norm(x[0])


# %% [markdown]
# Three untrained models of four layers, and a token exchanged: the last of part A, then the last of
# part B. Which outputs move?


# %%
def moved(reader, blanks, at, visible):
    """Which outputs move when the token at place `at` becomes another."""
    ids = blanks.input_ids.clone()
    ids[at] = (ids[at] + 1) % 256
    with torch.no_grad():
        before, after = (reader(b, visible) for b in (blanks, blanks._replace(input_ids=ids)))
    return (before - after).abs().amax(1) > 1e-9


def tiny_reader(pattern):
    _ = torch.manual_seed(0)
    sizes = dict(vocab_size=259, d_model=32, n_heads=2, d_state=16, d_ff=32)
    return Reader(ModelConfig(pattern, **sizes)).double()


# %%
READERS = {"SSD": "SMSM", "hybrid": "SMAM", "attention": "AMAM"}
for name, pattern in READERS.items():
    for way, visible in (("one-way", None), ("two-way", blanks.visible)):
        by_end_of_a = moved(tiny_reader(pattern), blanks, a - 1, visible)
        by_end_of_b = moved(tiny_reader(pattern), blanks, l - 1, visible)
        in_a, in_b = by_end_of_a[: a - 1].sum().item(), by_end_of_a[a:].sum().item()
        print(f"{name:9} {way}: the end of A moves {in_a:2} of the {a - 1} before it,"
              f" {in_b} of the {l - a} of part B")  # fmt: skip
        assert by_end_of_b.sum() == 1 and by_end_of_b[-1] and in_b == l - a
        assert in_a == (a - 1 if way == "two-way" and name != "SSD" else 0)

# %% [markdown]
# The last token of part B moves nothing before it, in no model: what is asked for does not leak.
# And a mask that lets it leak is caught:

# %%
all_seen = torch.ones_like(blanks.visible)
leaks = moved(tiny_reader("AMAM"), blanks, l - 1, all_seen)
print(f"everyone sees everyone: the last token moves {leaks.sum().item()} of {len(leaks)}")
assert leaks.all()

# %% [markdown]
# **What does it mean that a state cannot look ahead?** Less than it seems. Part B stands behind all
# of part A. So whoever writes a span has read what follows the blank, in every model, with or
# without the mask: in the SSD too the end of part A moves all of part B. What a one-way model lacks
# is that the tokens *of part A* know what follows them; and a state, unlike attention, has to have
# kept what stands around the blank until part B comes to ask for it. What each of the two costs in
# nats is a question for training runs, which this chapter does not have yet.

# %% [markdown]
# ## 6 · Claimed and seen
#
# @@BOX@@

# %% [markdown]
# ## Summary
#
# @@SUMMARY@@
#
# ## Exercises

# %% [markdown]
# **1 · easy.** Two models were trained with the same seeds. Write the difference of their losses
# with its 95 % interval, pair by pair, as (9.1) has it: mean and half width.


# %% tags=["exercise"]
def paired(losses, baseline):
    """Mean and half width of the differences of two lists of losses, seed by seed."""
    ### BEGIN SOLUTION
    apart = [one - other for one, other in zip(losses, baseline, strict=True)]
    n = len(apart)
    return statistics.fmean(apart), T95[n - 2] * statistics.stdev(apart) / math.sqrt(n)
    ### END SOLUTION


# %% tags=["check"]
mean, half = paired([1.0, 2.0, 3.0], [1.5, 2.0, 2.5])
assert math.isclose(mean, 0, abs_tol=1e-12), f"the mean difference is 0, got {mean}"
assert math.isclose(half, 4.303 * 0.5 / math.sqrt(3)), f"three seeds, s = 0.5: got {half:.3f}"
mean, half = paired([2.31, 2.40, 2.28, 2.52], [2.33, 2.43, 2.29, 2.54])
assert math.isclose(mean, -0.02) and abs(half - 0.013) < 0.0005, f"got {mean:.3f} ± {half:.4f}"
print("the last four pairs: -0.020 ± 0.013, a difference although the losses range over 0.24")

# %% [markdown]
# **2 · easy.** How many seeds will it take? Return the smallest $n$ from 2 to 31 for which the half
# width of (9.1) is no more than `apart`, if differences between paired runs have the standard
# deviation `deviation`; None if 31 are not enough.


# %% tags=["exercise"]
def seeds_for(apart, deviation):
    """The fewest seeds with which a difference `apart` exceeds the half width."""
    ### BEGIN SOLUTION
    for n in range(2, len(T95) + 2):
        if T95[n - 2] * deviation / math.sqrt(n) <= apart:
            return n
    return None
    ### END SOLUTION


# %% tags=["check"]
for apart, deviation, n in ((0.02, 0.01, 4), (0.01, 0.01, 7), (0.1, 0.01, 2), (0.001, 0.01, None)):
    got = seeds_for(apart, deviation)
    assert got == n, f"apart {apart}, deviation {deviation}: {got} instead of {n}"
assert seeds_for(0.005, 0.01) == 18, f"half a deviation: {seeds_for(0.005, 0.01)} instead of 18"
print("a difference of two deviations takes 4 seeds, of one 7, of a half 18")

# %% [markdown]
# **3 · medium.** A table reports the best of $k$ runs for one model and a single run for another.
# Both are the same model, and losses are normal with the standard deviation 1. How far apart do the
# two numbers lie on average, and how often is the best of $k$ the lower one? (By thought or by
# drawing; 0.02 is near enough.)


# %% tags=["exercise"]
def best_against_one(k):
    """Mean of (best of k) - (one), and the share in which the best of k is lower."""
    ### BEGIN SOLUTION
    x = torch.randn(200_000, k + 1, generator=seeded(11))
    best, one = x[:, :k].min(1).values, x[:, k]
    return (best - one).mean().item(), (best < one).double().mean().item()
    ### END SOLUTION


# %% tags=["check"]
for k, mean in ((1, 0.0), (2, -1 / math.sqrt(math.pi)), (3, -1.5 / math.sqrt(math.pi))):
    apart, share = best_against_one(k)
    assert abs(apart - mean) < 0.02, f"k = {k}: {apart:.3f} instead of {mean:.3f}"
    assert abs(share - k / (k + 1)) < 0.02, f"k = {k}: better {share:.2f} of the time"
assert abs(best_against_one(10)[0] + 1.539) < 0.02, "the best of ten"
print("the best of three beats the same model in three comparisons of four")

# %% [markdown]
# **4 · medium.** In a table of seventeen rows that are all alike the best row will look good. Given
# the p-values of many comparisons, *Holm's* rule says which may be called differences so that, if
# none is one, the chance of calling any is at most `level`. Go through them from the smallest on,
# compare the $i$-th of $m$ (from 0) with level/(m − i), and stop at the first that is larger.


# %% tags=["exercise"]
def called(p_values, level=0.05):
    """For every p-value, in its order, whether Holm's rule calls it a difference."""
    ### BEGIN SOLUTION
    verdicts, m = [False] * len(p_values), len(p_values)
    for i, at in enumerate(sorted(range(m), key=p_values.__getitem__)):
        if p_values[at] > level / (m - i):
            break
        verdicts[at] = True
    return verdicts
    ### END SOLUTION


# %% tags=["check"]
assert called([0.01, 0.04, 0.03]) == [True, False, False], called([0.01, 0.04, 0.03])
assert called([0.04, 0.01, 0.02]) == [True, True, True], called([0.04, 0.01, 0.02])
assert called([0.03, 0.001, 0.5, 0.2]) == [False, True, False, False]
assert called([0.02, 0.03]) == [True, True] and called([0.03, 0.03]) == [False, False]
drawn = torch.rand(4000, 17, generator=seeded(12)).tolist()
any_called = sum(any(called(p)) for p in drawn) / len(drawn)
naive = sum(min(p) < 0.05 for p in drawn) / len(drawn)
assert any_called < 0.065, f"seventeen rows alike: something called {any_called:.2f} of the time"
print(f"seventeen rows alike: each by itself finds a difference {naive:.2f} of the time,")
print(f"Holm's rule {any_called:.2f}")
assert 0.55 < naive < 0.61

# %% [markdown]
# **5 · hard.** Put a filled text together again: from a `Blanks` and the tokens that a model wrote
# for part B (given here as the right ones or others), return the text without blanks. Every mask of
# part A is replaced by its span, whose order in part B is not that of the masks. (The ends of spans
# are among what was written.)


# %% tags=["exercise"]
def put_together(blanks, written):
    """Part A with its blanks filled by `written` (j,), the tokens for part B in its order."""
    ### BEGIN SOLUTION
    part_a = blanks.input_ids[blanks.targets < 0].tolist()
    blank_of = blanks.position_ids[blanks.targets >= 0].tolist()
    spans = {}
    for at, token in zip(blank_of, written.tolist(), strict=True):
        spans.setdefault(at, []).append(token)
    text = []
    for at, token in enumerate(part_a):
        text += [t for t in spans[at] if t != END] if token == MASK else [token]
    return torch.tensor(text)
    ### END SOLUTION


# %% tags=["check"]
manual = text_to_ids(read_text())
for seed in range(20):
    original = manual[777 * seed :][:300]
    blanks = cut_out(original, seeded(seed))
    right = blanks.targets[blanks.targets >= 0]
    assert torch.equal(put_together(blanks, right), original), f"text {seed}: not put together"
    starred = torch.where(right == END, END, ord("*"))  # as if a model had written only stars
    stars = put_together(blanks, starred)
    at = places_cut_out(blanks)
    assert (stars[at] == ord("*")).all() and len(stars) == 300, f"text {seed}: spans misplaced"
print("20 texts of 300 bytes: whole again, and what was written stands where it was cut out")

# %% [markdown]
# ## Further reading
#
# - Du et al. (2022), *GLM*: the objective, with the mask of section 5 and two kinds of positions.
# - Holm (1979), *A Simple Sequentially Rejective Multiple Test Procedure*: the rule of exercise 4.
# - Dodge et al. (2020), *Fine-Tuning Pretrained Language Models: Weight Initializations, Data
#   Orders, and Early Stopping*: what a seed does.
# - Melis, Dyer and Blunsom (2018), *On the State of the Art of Evaluation in Neural Language
#   Models*: what is left of differences when every model has been tuned.
