# %% [markdown] slide_title="A loss is drawn by a seed: when may you blame the part?"
# # 09 · How to ablate on a laptop
#
# **Swap one part of a small model, match everything else as well as you can, and the loss changes
# by a few hundredths. When may you blame the part?** By the end you will be able to
#
# - say how small a difference a given number of seeds can detect;
# - set up a fair comparison, and correct for making several;
# - judge a table of losses, ours or a paper's.
#
# You need chapters 05 to 08.
#
# Sources: *Wonderful Matrices* (WM) §4 and Tables 1 and 2; *Cheems* (Ch) App. B.2, Table 1 and
# Figure 6; *OTCE* §4.2 to 4.4 and Tables 5 and 6. Code: `cheems_ref/compare.py`. How to read ✓ and
# ✗: chapter 00.

# %% tags=["setup"]
import json
import math
import statistics
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from cheems_lab.comparison import Row, compare
from cheems_ref import plotting
from cheems_ref.attention import QCAttn
from cheems_ref.budget import count_flops, count_parameters, fit_d_ff
from cheems_ref.compare import holm, interval, minus, pooled, student_t, verdicts
from cheems_ref.config import ModelConfig
from cheems_ref.experts import ExpansiveMoE, MoE
from cheems_ref.model import CausalLM
from cheems_ref.text import read_text, text_to_ids
from cheems_ref.train import TrainConfig, random_windows
from cheems_ref.verify import check, must_differ

torch.set_num_threads(1)  # models as small as these gain little from more


# %% tags=["setup"]
def seeded(seed):
    return torch.Generator().manual_seed(seed)


def read_record(name):
    return json.loads((Path("..") / "experiments" / "records" / f"{name}.json").read_text())


def losses_of(name):
    """For every row of a record and every seed that counts: held-out nats per byte at the end."""
    losses = {}
    for run in read_record(name)["runs"]:
        losses.setdefault(run["row"], {})[run["seed"]] = run["nats"][-1][1]
    return losses


# %% tags=["setup"]
NAMES = ("inner", "position", "shared", "gated", "systems", "orders", "routed", "experts")
inner, position, shared, gated, systems, orders, routed, experts = (
    losses_of(f"09_{name}") for name in NAMES
)


# %% tags=["figure"]
def draw_clouds(ax, losses, told):
    """Two rows as clouds of runs: a line joins the runs of one seed, squares are means."""
    names = [*losses]
    for seed in losses[names[0]]:
        nats, color = [losses[name][seed] for name in names], told.get(seed, plotting.QUIET)
        ax.plot([0, 1], nats, "o-", color=color, lw=2.5 if seed in told else 1, ms=8)
        if seed in told:
            better = names[nats.index(min(nats))]
            words = f"seed {seed} alone:\n{better} is better"
            ax.text(1.08, nats[1], words, color=color, fontsize=14, va="center")
    for place, name in enumerate(names):
        ax.plot(place - 0.1, interval([*losses[name].values()]).mean, "s", color="k", ms=10)
    ax.set(xlim=(-0.35, 1.95), ylim=(1.985, 2.073), ylabel="← better    held-out nats per byte")
    ax.set_title("joined by seed; squares: means of six")
    ax.set_xticks([0, 1], names, fontsize=14)


# %% tags=["figure"]
def draw_interval(ax, apart, words):
    """Differences seed by seed, and their mean with its interval."""
    mean, half = interval(apart)
    ax.plot([0] * len(apart), apart, "o", color=plotting.QUIET, ms=8)
    ax.errorbar(0.25, mean, half, fmt="ks", capsize=10, lw=2.5, ms=10)
    ax.text(0.33, mean, words, fontsize=14, va="center")
    plotting.level(ax, 0, "no difference")
    ax.set(xlim=(-0.2, 1.3), xticks=[])


# %% [markdown]
# Here are two real models of ours, six runs each. Which one is better?

# %% slide_title="Seed 1 prefers one model, seed 3 the other, six seeds neither" tags=["figure"]
fig, (left, right) = plotting.figure(1, 2, size=(12.8, 4.6))
two = {name: inner[name] for name in ("linear", "retrieved")}
draw_clouds(left, two, {1: plotting.COLORS[0], 3: plotting.COLORS[1]})
apart = [two["retrieved"][seed] - two["linear"][seed] for seed in two["linear"]]
draw_interval(right, apart, "the mean, and its\n95 % interval:\nno difference shown")
right.set_title("six runs each: retrieved minus linear")
assert interval(apart).holds_zero and apart[0] > 0 > apart[2]
plotting.save(
    fig,
    "09_two_clouds",
    "Left, held-out losses of two models, six runs each, joined by seed: with seed 1 alone linear "
    "is better, with seed 3 alone retrieved is. Right, the six differences on both sides of zero, "
    "with their mean and an interval that contains zero.",
)

# %% [markdown] slide_title="A handful of runs pins a mean down only to within an interval"
# With seed 1 alone, you'd publish linear; with seed 3, retrieved; with six seeds, neither. (One
# takes a layer's values from a matrix, the other from a table, as in chapter 05.) The papers'
# tables don't say how many runs are behind a number.
#
# **Seven kinds of experts, all significantly better than an MLP:** we nearly wrote that down.
# Section 5 has the control that takes most of their lead away, and sections 1 to 4 have what you
# need to judge it.
#
# **A warning.** Our language models have about a million parameters or fewer and stop after 100 to
# 1,000 updates on windows of 512 bytes. So we measure which model starts fastest on short texts.
# Nothing here can refute a claim about long texts or about models trained to convergence.
#
# ## 1 · How much is chance?
#
# A *seed* draws a model's initial weights and the windows of text it reads. The loss depends on
# both. If losses are normally distributed, then $n$ runs with mean $\bar x$ and standard deviation
# $s$ pin down the true mean, 95 % of the time, to within
#
# $$\bar x \pm t_{n-1}\,\frac{s}{\sqrt n}, \tag{9.1}$$
#
# where $t_{n-1}$ is Student's factor. If you knew the true standard deviation, you'd use 1.96. But
# you estimate it from the same few numbers. Before you run the cell: how often does
# $\pm\,1.96\,s/\sqrt n$ contain the true mean?


# %% slide_title="With three seeds and 1.96, one interval in five misses the mean"
def covered(n, factor, trials=50_000):
    """The share of intervals (9.1), each from n normal numbers, that hold the true mean, 0."""
    x = torch.randn(trials, n, generator=seeded(n))
    return (x.mean(1).abs() <= factor * x.std(1) / math.sqrt(n)).double().mean().item()


for n in (2, 3, 5, 8, 30):
    student, normal = covered(n, student_t(n - 1)), covered(n, 1.96)
    print(f"{n:2} seeds: Student's factor holds the mean {student:.0%}, 1.96 {normal:.0%}")
    assert abs(student - 0.95) < 0.006 and normal < student

# %% [markdown] slide_title="In pairs the seed cancels, but fewer numbers are left"
# Student's intervals cover the mean 95 % of the time. With three seeds and 1.96, nearly one
# interval in five misses. (Our losses are all on one held-out text. About other texts, such an
# interval says nothing.)
#
# To compare two models, take the *difference* $x$ of their losses, seed by seed. What does that
# buy? A seed can be unlucky for both models at once. Let a loss be its model's mean, plus what the
# seed adds to both models, plus noise.
#
# We simulate 300 seeds, twice, and draw model A's loss to the right, model B's upwards. On the left
# a seed adds nothing; in the middle 80 % of a run's variance is the seed's. In which of these
# clouds does B − A scatter less?


# %% tags=["setup"]
def two_models(share, seeds=300):
    """Losses of two models around their means, in standard deviations of a run, seed by seed."""
    by_seed, *noise = torch.randn(3, seeds, dtype=torch.float64, generator=seeded(5))
    return [share**0.5 * by_seed + (1 - share) ** 0.5 * one for one in noise]


TWICE = {0.0: two_models(0.0), 0.8: two_models(0.8)}


# %% tags=["figure"]
def draw_seeds(ax, share, color):
    """A dot for every seed; the diagonal, and across it two standard deviations of noise."""
    reach = (2 * (1 - share)) ** 0.5  # at 45 degrees this is 2 σ
    ax.plot(*TWICE[share], "o", color=color, ms=4, alpha=0.5, mew=0)
    ax.axline((0, 0), slope=1, color=plotting.QUIET, lw=1)
    how = dict(arrowstyle="<->", color=plotting.INK, lw=2.5, mutation_scale=18)
    ax.annotate("", (-2.2 - reach, reach - 2.2), (reach - 2.2, -2.2 - reach), arrowprops=how)
    words = f"± 2 σ, σ = {(1 - share) ** 0.5:.2f}"
    ax.text(reach - 2, -2.2 - reach, words, fontsize=14, va="center")
    if share:
        ax.text(2.75, 1.15, "what seeds add", fontsize=14, rotation=45, ha="center", va="center")
    ax.set(xlim=(-3.9, 3.9), ylim=(-3.9, 3.9), aspect="equal", xticks=[-2, 0, 2], yticks=[-2, 0, 2])
    ax.set(xlabel="A's loss, around its mean", ylabel="B's loss, around its mean")
    ax.set_title(f"seed's share of the variance: {share:g}", fontsize=15)


# %% slide_title="What a seed adds to both models cancels in pairs" tags=["figure", "slide"]
fig, (left, middle, right) = plotting.figure(1, 3, size=(13.5, 4.8))
for ax, (share, (a, b)), color in zip((left, middle), TWICE.items(), plotting.COLORS, strict=False):
    draw_seeds(ax, share, color)
    how = dict(histtype="stepfilled", color=color, alpha=0.55, label=f"share {share:g}")
    right.hist(b - a, bins=18, range=(-4.5, 4.5), **how)
right.set(xlabel="difference B − A", ylabel="seeds"), right.legend(loc="upper left")
plotting.save(
    fig,
    "09_pairs",
    "Two clouds of 300 simulated seeds, model B's loss against model A's: round if the seeds have "
    "no share, stretched along the diagonal with a share of 0.8, where the arrows across it are "
    "less than half as long. Beside them the differences B minus A: a wide hill and a narrow one.",
)

# %% [markdown] slide_title="In pairs the seed cancels, but fewer numbers are left"
# In the middle: what the seed adds runs along the diagonal, and the difference doesn't see it.
# Noise is left. It runs across the diagonal (arrows), with the standard deviation $\sigma$. If the
# seed's share of a run's variance is $\rho$, noise has the other $1 - \rho$. So pairs multiply the
# standard deviation of $x$ by $\sqrt{1 - \rho}$, here by 0.45.
#
# The price: six losses less two means leave four, three differences less one mean two. For three
# seeds, and with a run's standard deviation as the unit:
#
# | | degrees of freedom | Student's factor | standard deviation of the difference |
# |---|---|---|---|
# | apart: six runs, six seeds | $2 \cdot 3 - 2 = 4$ | 2.78 | $\sqrt 2$ |
# | in pairs, if a seed's share is $\rho$ | $3 - 1 = 2$ | 4.30 | $\sqrt 2 \cdot \sqrt{1 - \rho}$ |
#
# The width of an interval grows with the product of the last two columns. So pairing pays only if
# $\sqrt{1 - \rho} < 2.78 / 4.30$: the seed's share has to be above a bar, $\rho = 0.58$. (With five
# seeds the bar is lower.) Section 3 estimates our tables' shares, and it will turn out that we
# can't tell.
#
# From here on, the unit is the standard deviation of a pair's $x$, $\sigma\sqrt 2$. How large must
# a true difference be for pairs to detect it in 80 % of tries?


# %% tags=["setup"]
def bar(seeds):
    """The seed's share above which pairs give narrower intervals than twice as many seeds."""
    return 1 - (student_t(2 * seeds - 2) / student_t(seeds - 1)) ** 2


# %% slide_title="Three seeds detect 3.3 standard deviations"
def share_shown(apart, n, trials=50_000):
    """How often n differences, normal around `apart` with s = 1, have an interval above zero."""
    x = apart + torch.randn(trials, n, generator=seeded(n))
    return (x.mean(1) > student_t(n - 1) * x.std(1) / math.sqrt(n)).double().mean().item()


for n, apart in ((3, 3.3), (5, 1.7), (8, 1.2), (16, 0.75)):
    mostly = share_shown(apart, n)
    print(f"{n:2} seeds: {apart} standard deviations are detected {mostly:.0%} of the time")
    assert 0.77 < mostly < 0.83

# %% tags=["guard"]
# The table and its bars, and what is left across the diagonals of the picture.
assert [round(bar(seeds), 2) for seeds in (3, 5)] == [0.58, 0.31]
assert [round(student_t(degrees), 2) for degrees in (4, 2)] == [2.78, 4.30]
wide, narrow = (((b - a).std() / 2**0.5).item() for a, b in TWICE.values())
assert abs(wide - 1) < 0.05 and abs(narrow - 0.2**0.5) < 0.03 and round(0.2**0.5, 2) == 0.45

# %% [markdown] slide_title="Everything but the part has to be equal"
# Three seeds need 3.3 standard deviations, eight need 1.2. Most tables below have three, like the
# table of seven kinds of experts.
#
# ## 2 · What has to be equal
#
# All rows of a table share the text (Python's manual and standard library), the number of updates,
# the windows they read with each seed, and, to within 1 %, the parameter count.

# %% tags=["setup", "experiment"]
# AdamW; the rate warms up for a tenth of the updates and then falls as a cosine. The last 3 % of
# Python's manual and standard library are held out.
SIZES = dict(d_model=128, n_heads=4, d_state=64, n_values=16, k_values=2)
TRAINING = TrainConfig(steps=300, batch_size=4, seq_len=512, eval_fraction=0.03,
                       evaluate_every=150)  # fmt: skip
BY_STEPS = {n: replace(TRAINING, steps=n, evaluate_every=min(n, 200))
            for n in (100, 200, 600, 1000)}  # fmt: skip
RATES = (1e-3, 3e-3, 1e-2)
assert (TRAINING.weight_decay, TRAINING.warmup) == (0.01, 0.1)
MILLION = 1_000_000
INNER = {
    "linear": dict(pattern="SM × 3 + AM"),
    "retrieved": dict(pattern="SM × 3 + IM", inner="retrieved"),
    "SSD": dict(pattern="SM × 3 + IM", inner="ssd"),
}

# %% [markdown]
# **Parameters.** A part that costs parameters is paid for with `d_ff`, the width of MLPs and
# experts. So two things change, the part and the width. **Compute** changes too, by up to a third
# in sections 5 to 8, and a table should say so.


# %% tags=["guard", "experiment"]
# Section 2: parameters.
def parameters(config):
    """The number of all parameters of a model."""
    return sum(part.total for part in count_parameters(config).values())


def fitted(pattern, target=MILLION, **fields):
    """A configuration whose d_ff brings the number of parameters nearest to the target."""
    return fit_d_ff(ModelConfig(pattern, **(SIZES | fields)), target)


for fields in INNER.values():
    config = fitted(**fields)
    assert config.d_ff in (734, 739, 701) and abs(parameters(config) / MILLION - 1) < 0.001


# %% tags=["guard"]
# Section 2: compute, as all sections with tables count it.
def compute(rows):
    """For every row the operations of a pass over 512 tokens, as multiples of the first's."""
    counted = {}
    for name, fields in rows.items():
        config = fitted(**{key: value for key, value in fields.items() if key != "turned"})
        assert abs(parameters(config) / fields.get("target", MILLION) - 1) < 0.006
        counted[name] = sum(part.total() for part in count_flops(config, 512).values())
    return {name: count / counted[next(iter(rows))] for name, count in counted.items()}


times = compute(INNER)
assert times["retrieved"] < 1.001 and round(times["SSD"], 3) == 1.024

# %% [markdown]
# **Windows.** If all runs drew from one generator, seeded once "for reproducibility", the second
# model would read other windows than the first. A new generator with the run's seed gives every
# model the same windows:

# %% slide_title="Each model reads the same windows"
manual, brief = text_to_ids(read_text()), TrainConfig(5, 4, 64, eval_fraction=0.02)
one_for_all = seeded(0)
first, second = (random_windows(manual, brief, one_for_all).double() for _ in range(2))
_ = must_differ("one generator for all", second, first)
again = random_windows(manual, brief, seeded(0)).double()
check("a new generator with the same seed", again, first)


# %% tags=["setup", "experiment"]
def one_run(name, config, rate, seed, training, ids, at_start=None):
    """Train one row with one seed: held-out nats per byte over time."""
    how = dict(seeds=[seed], at_start=at_start, checkpoint_every=training.steps)
    with TemporaryDirectory() as folder:
        found = compare({name: Row(config, rate)}, ids, training, directory=folder, **how)
    return [(evaluation.step, evaluation.nats) for evaluation in found]


def unturned(model):
    """Let all attention of a model see every token at position 0."""
    for layer in model.modules():
        if isinstance(layer, QCAttn):
            _ = layer.register_forward_pre_hook(lambda _, given: (given[0], 0 * given[1]))


# %% tags=["setup", "experiment"]
def common_share(answers):
    """Of answers (e, …): the squared size of their mean over the mean of their squared sizes."""
    return (answers.mean(0).square().sum() / answers.square().flatten(1).sum(1).mean()).item()


# %% tags=["setup", "experiment"]
@torch.no_grad()
def in_common(model, ids):
    """For every layer of routed experts: what their answers to the same tokens have in common."""
    shares = []

    def ask_all(layer, given):
        x = layer.shared(given[0]) if isinstance(layer, ExpansiveMoE) else given[0]
        answers = [layer.expert(i, x.flatten(0, 1)) for i in range(len(layer.experts))]
        shares.append(common_share(torch.stack(answers)))

    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    hooks = [layer.register_forward_pre_hook(ask_all) for layer in layers]
    _ = model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return shares


# %% [markdown]
# **The learning rate** of a tuned row is its own best of three or four, found with a *tuning seed*.
# Is one tuning seed enough? Here is one model, section 5's MLP, at each rate:

# %% tags=["aside"]
tried, ours_for = {}, {"MLP": "S + A, rope"}  # the record's name for this row, and ours
for run in read_record("09_gated")["rates"]:
    if ours_for.get(run["row"]) == "S + A, rope":
        tried.setdefault(run["seed"], {})[run["rate"]] = run["nats"][-1][1]
for seed, ends in tried.items():
    print(f"seed {seed}:", ", ".join(f"rate {rate:g} {loss:.3f}" for rate, loss in ends.items()))

# %% slide_title="Seed 0 takes a rate that is far too high for seed 9" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(10, 4.4))
losses = {f"tuning seed {seed}": [*ends.values()] for seed, ends in tried.items()}
plotting.lines(ax, [*tried[0]], losses, marker="o", xlabel="learning rate", ylabel="nats per byte")
ax.set(xscale="log", xticks=[*tried[0]], xticklabels=[*tried[0]])
ax.minorticks_off()
plotting.save(
    fig,
    "09_rates",
    "The loss of one row against its learning rate, for two tuning seeds. With seed 0 it's lowest "
    "at 0.01, hardly higher at 0.003; with seed 9 it's lowest at 0.003 and much higher at 0.01.",
)

# %% tags=["guard"]
# What tuning chose: for this row, for 32 of 35 rows, and with which seeds.
assert {seed: min(ends, key=ends.get) for seed, ends in tried.items()} == {0: 0.01, 9: 0.003}
assert [round(ends[0.01] - ends[0.003], 3) for ends in tried.values()] == [-0.009, 0.106]
assert read_record("09_gated")["best"]["MLP"] == 0.003
tuned, best = ("inner", "position", "shared", "experts", "orders"), {}
for name in tuned:
    best |= {(name, row): rate for row, rate in read_record(f"09_{name}")["best"].items()}
del best["shared", "MLP"]  # S + A with rotation once more
assert len(best) == 35 and [*best.values()].count(0.003) == 32
for name in (*tuned, "systems", "gated"):
    seeds = {run["seed"] for run in read_record(f"09_{name}")["rates"]}
    assert seeds == {0} | {"systems": {6}, "gated": {9}}.get(name, set())

# %% [markdown]
# It isn't: seed 0 prefers 0.01 by 0.009 nats, and seed 9 prefers 0.003 by 0.106. A wrong rate is a
# bias that no interval over seeds shows. Section 5's first MLP still has the rate 0.01. Its new
# runs and section 7 take the rate with the lowest mean over two tuning seeds, other tables over one
# (it chose 0.003 for 32 of 35 rows, chapter 12's among them) or none. Tuning seeds don't count in a
# tuned table, since the best of several rates was also lucky with its seed (exercise 3).

# %% [markdown] slide_title="Holm's rule gives the smallest p-value the hardest test"
# ## 3 · Several comparisons
#
# Suppose you make seventeen independent comparisons of equally good models. Each interval is wrong
# one time in twenty. How often does at least one look real?
#
# The fix uses *p-values*. Divide a mean by its standard error $s/\sqrt n$. The mean's p-value is
# the chance (by Student's distribution with $n - 1$ degrees of freedom) of getting at least as far
# from zero if there were no true difference. **Holm's rule** goes through $m$ p-values from the
# smallest up and declares differences *significant* as long as
#
# $$p_{(i)} \le \frac{0.05}{m - i + 1}, \qquad i = 1, 2, \dots, m, \tag{9.2}$$
#
# and it stops at the first failure: p-values have to stay below a staircase from the first step on.
# Once the smallest has passed, there's one candidate fewer to be a fluke, so the next step is
# higher. Which pass on the left, which on the right?

# %% slide_title="One p-value above the staircase ends the walk" tags=["figure", "slide"]
plotting.show_drawing(
    "09_holm",
    "Two staircases with the steps 0.0167, 0.025 and 0.05. Left, the p-values 0.01, 0.02 and 0.04 "
    "are all below their steps and pass. Right, the first is 0.02, above its step: it fails, and "
    "the other two, 0.02 and 0.04, are never tested, although they are below their steps.",
)

# %% [markdown]
# All three pass on the left. On the right the first fails, so none does. The chance of declaring
# even one difference that isn't there is then at most 5 %. From here on, *significant* means after
# Holm's correction. We draw 4,000 tables of seventeen p-values where nothing is real:

# %% slide_title="Holm's rule keeps false findings at 5 % for a whole table"
drawn = torch.rand(4000, 17, generator=seeded(12)).tolist()
naive = sum(min(p) < 0.05 for p in drawn) / len(drawn)
by_rule = sum(any(holm(p)) for p in drawn) / len(drawn)
print(f"17 comparisons: something looks real {naive:.0%} of the time, by Holm's rule {by_rule:.0%}")
assert 0.55 < naive < 0.61 and by_rule < 0.065

# %% [markdown]
# The $m$ comparisons are a *family*: everything you wanted to know *before* you saw the results.
# State it with the prediction, and commit both (*preregister* them). We did for section 7 and for
# section 5's new seeds. For the other predictions and families you have only our word. A pair
# picked afterwards isn't a finding, only a reason for new runs.

# %% [markdown]
# **One standard deviation for a table.** Three runs give a poor $s$, but a table has many rows.
# Again, a loss is its row's mean, plus what its seed adds to all rows, plus noise with the same
# $\sigma$ in every row. Subtract the means of the $r$ rows, then those of the $n$ seeds. The rest,
# $e$, is noise. Here are nine losses, in hundredths of a nat:

# %% slide_title="Take out rows, take out seeds: what's left is noise" tags=["figure", "slide"]
plotting.show_drawing(
    "09_pooling",
    "A table of nine losses, three rows by three seeds, with its rows' means 210, 204 and 207. "
    "Without them the seeds have the means 3, −1 and −2. Without these as well, nine numbers from "
    "−1 to 1 are left. Each row and each column of them sums to zero, so four of them are free.",
)

# %% [markdown] slide_title="All rows of a table together estimate the noise"
# The nine squares sum to 6. Rows and columns sum to zero, so only $2 \cdot 2$ of the nine are free,
# and $\sigma^2 = 6/4$. Take a difference $\sum_i w_i\,\bar x_i$ of rows, such as 1 and $-1$ for a
# pair. Its weights sum to zero, so the seeds cancel, and it gets the interval
#
# $$\sum_i w_i\,\bar x_i \;\pm\; t_{(r-1)(n-1)}\,\sigma\,\sqrt{\sum_i w_i^2 / n}, \qquad \sigma^2 =
# \frac{\sum e^2}{(r - 1)(n - 1)}. \tag{9.3}$$
#
# For a pair $\sum_i w_i^2$ is 2, so this is (9.1) with $s = \sigma\sqrt 2$ and more degrees of
# freedom, which p-values now use as well. For an average of four pairs it's ½, and the interval is
# half as wide. Pooling is a better bargain: the seed still cancels, and nine rows with three seeds
# leave sixteen degrees of freedom. Now three seeds detect 1.7 standard deviations. Pairs alone need
# 3.3, and six seeds apart 2.5, if $\rho = 0.25$.


# %% tags=["setup"]
def detected(apart, degrees, noise=1.0, trials=20_000):
    """How often three seeds detect a difference of so many units, with so many degrees of freedom;
    `noise` is the standard deviation of x, in the same units.
    """
    drawn = torch.randn(trials, degrees + 1, generator=seeded(degrees))
    t = (apart * math.sqrt(3) / noise + drawn[:, 0]) / drawn[:, 1:].square().mean(1).sqrt()
    return (t > student_t(degrees)).double().mean().item()


# %% tags=["setup"]
APART = [i / 8 for i in range(41)]
THREE_WAYS = {  # degrees of freedom, and the standard deviation of x in units of a pair's
    "nine rows pooled": (16, 1.0),
    "six seeds apart, ρ = 0.25": (4, 0.75**-0.5),
    "pairs": (2, 1.0),
}
POWER = {name: [detected(one, *how) for one in APART] for name, how in THREE_WAYS.items()}

# %% slide_title="Pooling nine rows halves the difference we can detect" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(10, 4.6))
units = "true difference, in standard deviations of a pair's x"
plotting.lines(ax, APART, POWER, xlabel=units, ylabel="share of tries that detect it")
plotting.level(ax, 0.8)
for units in (1.7, 2.5, 3.3):
    ax.plot(units, 0.8, "ko"), ax.text(units - 0.08, 0.82, units, ha="right", fontsize=14)
plotting.save(
    fig,
    "09_power",
    "How often three seeds detect a difference, against its size in standard deviations of a "
    "pair's difference. Four times in five, nine rows pooled detect 1.7 of them, two separate "
    "samples need 2.5, and pairs need 3.3.",
)


# %% [markdown] slide_title="One rule for all tables, adopted after the first"
# **Our rule** for all tables:
#
# 1. A slope, or a table of two rows: (9.1).
# 2. Any other table: (9.3), *pooled*, if its rows have about equal noise, and (9.1) for each
#    difference, *not pooled*, if not. To decide, divide the noisiest row's $\sum e^2$ by the
#    quietest's, and see how many simulated tables with equal noise reach this ratio (*Hartley's
#    test*): we don't pool below 5 %.
# 3. Holm's rule corrects within the family. The intervals aren't corrected. So a difference can
#    lack significance even though its interval excludes zero.
#
# We adopted this rule *after* we had seen the tables of three seeds with (9.1) alone. So section 5
# asks its question again, on new seeds.
#
# Section 7's ratio is 40, which 3 % reach: not pooled. Section 5's nine rows have 86, but with
# three seeds 24 % reach it: pooled.


# %% tags=["setup"]
def ratios(tables):
    """Of tables (…, rows, seeds): the ratio of the rows' largest to their smallest variance."""
    left = tables - tables.mean(-1, True) - tables.mean(-2, True) + tables.mean((-1, -2), True)
    variance = left.square().sum(-1)
    return variance.amax(-1) / variance.amin(-1)


def hartley(losses, trials=4000):
    """Hartley's p: how often rows with equal variances have as large a ratio, by simulation."""
    x = torch.tensor([[*by_seed.values()] for by_seed in losses.values()], dtype=torch.float64)
    drawn = ratios(torch.randn(trials, *x.shape, generator=seeded(0)))
    return (drawn >= ratios(x)).double().mean().item()


# %% tags=["setup"]
def pools(losses):
    """Whether a table's differences use one standard deviation, by our rule."""
    return len(losses) > 2 and hartley(losses) >= 0.05


# %% tags=["setup"]
def judge(losses, family, only=None):
    """Judge a family of differences by our rule; print all, or only some without the rule's σ."""
    how, pool = "not pooled: ", pools(losses)
    if pool:
        how = "pooled: σ = {:.3f}, {} degrees of freedom, ".format(*pooled(losses))
    if only is None:
        print(how + (f"Hartley's p {hartley(losses):.2f}" if len(losses) > 2 else "two rows"))
    judged = verdicts(losses, family, pool=pool)
    for name, ((mean, half), p, yes) in judged.items():
        chance = "p < 0.0001" if p < 0.0001 else f"p {p:.4f}"
        verdict = "significant" if yes else "no difference shown"
        if only is None or name in only:
            print(f"{name}: {mean:+.3f} ± {half:.3f}, {chance}, {verdict}")
    return {name: verdict.called for name, verdict in judged.items()}


# %% tags=["setup"]
def common(losses):
    """Of the variance around the rows' means: the share that a seed adds to all rows alike."""
    noise, (rows, seeds) = pooled(losses)[0] ** 2, (len(losses), next(iter(losses.values())))
    means = [statistics.fmean(by_seed[seed] for by_seed in losses.values()) for seed in seeds]
    from_seed = statistics.variance(means) - noise / rows  # r rows' mean keeps 1/r of their noise
    return from_seed / (from_seed + noise)


# %% tags=["setup"]
def at_a_glance(name):
    """A table's rows and seeds, its tuning seeds, its rule, its seed's share, and the bar."""
    losses = losses_of(f"09_{name}")
    tuning = len({run["seed"] for run in read_record(f"09_{name}").get("rates", [])})
    how = "slope" if name in ("routed", "experts") else "pooled" if pools(losses) else "not pooled"
    seeds = len(next(iter(losses.values())))
    size = f"{len(losses):2} rows, {seeds} seeds, {tuning} for tuning"
    return f"{size}, {how:11} share {common(losses):.2f}, bar {bar(seeds):.2f}"


SECTIONS = {"inner": 3, "position": 4, "longer": 4, "shared": 5, "gated": 5, "routed": 6}
SECTIONS |= {"systems": 7, "systems_longer": 7, "experts": 8}

# %% [markdown]
# This list has our tables, with the seeds that count, the seeds that chose rates (0 if taken over),
# our rule's choice and, for section 1, the estimated share of the seed and the bar. Where do pairs
# pay?

# %% tags=["aside"]
for name, section in SECTIONS.items():
    print(f"section {section}, {name + ':':15} {at_a_glance(name)}")

# %% [markdown]
# Only in gated, section 5's new seeds. But such an estimate is rough. If the true share is 0.25, 95
# % of estimates from nine rows and three seeds lie between −0.11 and 0.66. So we can't tell. (Our
# rule doesn't ask.)


# %% [markdown] slide_title="Is the loss lower by 40 %?" slide_figure="09_two_clouds"
# **A first question: do inner functions help attention?** Ch says, of fine-tuning a model of 1.3
# billion parameters:
#
# > "[…] with almost the same model parameter, the loss curve of Inner Function Attn is reduced by
# > more than 40% compared to the loss curve of Attention." — Ch, App. B.2, of Figure 6
#
# *Prediction:* little, because the layers around attention can do the inner function's job.
# *Family:* two inner functions against linear values. *Runs:* six seeds, 300 updates (`python -m
# experiments 09_inner`). A negative number is good for the inner function, and `judge` applies our
# rule:

# %% slide_title="Inner functions change the loss by 2 %, at most" slide_figure="09_two_clouds"
family = minus("retrieved", "linear") | minus("SSD", "linear")
called = judge(inner, family)
far = max(abs(mean) + half for (mean, half), *_ in verdicts(inner, family).values())
print(f"no interval reaches further than {far:.3f} from zero, about {far / 2.03:.0%} of the loss")
assert not any(called.values()) and far < 0.1

# %% [markdown]
# Neither difference is significant, and each interval excludes an effect beyond about 2 % of the
# loss. That's far from 40 %, though fine-tuning a model of that size is another experiment. In
# section 5, the same rule will call seven differences of seven significant.

# %% tags=["guard"]
# The drawings of Holm's rule and of pooling, and the dots of 09_power.
assert all(holm([0.01, 0.02, 0.04])) and not any(holm([0.02, 0.02, 0.04]))
nine = {"a": (214, 208, 208), "b": (207, 204, 201), "c": (209, 206, 206)}
sigma, degrees = pooled({row: dict(enumerate(nats)) for row, nats in nine.items()})
assert degrees == 4 and abs(sigma**2 - 6 / 4) < 1e-9
for (name, how), needed in zip(THREE_WAYS.items(), (1.7, 2.5, 3.3), strict=True):
    assert 0.77 < detected(needed, *how) < 0.83, name

# %% tags=["guard"]
# Which shares are above the bar, and Hartley's test for the two tables that our rule tells of.
for name in SECTIONS:
    losses = losses_of(f"09_{name}")
    assert (common(losses) > bar(len(next(iter(losses.values()))))) == (name == "gated")
found = {}
for name, losses in (("systems", systems), ("shared", shared)):
    nats = torch.tensor([[*by_seed.values()] for by_seed in losses.values()], dtype=torch.float64)
    found[name] = round(ratios(nats).item()), round(hartley(losses), 2), nats.shape[1]
assert found == {"systems": (40, 0.03, 5), "shared": (86, 0.24, 3)}


# %% tags=["guard"]
# How rough an estimate of the seed's share is.
def estimates(rho, rows=9, seeds=3, trials=50_000):
    """Estimates of the seed's share, as `common` makes them, from simulated tables."""
    by_seed, noise = (torch.randn(trials, n, seeds, generator=seeded(n)) for n in (1, rows))
    x = rho**0.5 * by_seed + (1 - rho) ** 0.5 * noise
    left = x - x.mean(2, True) - x.mean(1, True) + x.mean((1, 2), True)
    noise = left.square().sum((1, 2)) / ((rows - 1) * (seeds - 1))
    from_seed = x.mean(1).var(1) - noise / rows
    return from_seed / (from_seed + noise)


low, high = (estimates(0.25).quantile(q).item() for q in (0.025, 0.975))
assert abs(low + 0.11) < 0.01 and abs(high - 0.66) < 0.01


# %% tags=["setup", "experiment"]
# Four orders of layers, on chapter 07's recall and on text; only chapter 12 tells of them.
ORDERS = {
    "Jamba": dict(pattern="SM SM SM SM AM SM SM SM", position="conv", d_model=96),
    "OTCE": dict(pattern="SM SM SM SM AM SM SM AM", position="conv", d_model=96),
    "two, not last": dict(pattern="SM SM AM SM AM SM SM SM", position="conv", d_model=96),
}
EARLY = {"one, early": "SM SM AM SM SM SM SM SM"}
RECALLING = {row: fields["pattern"] for row, fields in ORDERS.items()} | EARLY
ELIMINATION = 0.39  # the share right of a model that only rules out values it has seen asked


def recalled(row, steps):
    """The shares right at the end of this row's recall runs with so many updates."""
    runs = read_record("09_orders")["recall"]
    return [run["right"][-1] for run in runs if (run["row"], run["steps"]) == (row, steps)]


# %% tags=["guard", "quoted"]
# For the claims of chapter 12: how many of six runs recall, with each order.
def fisher(a, b, n=6):
    """How often two equal rows of n runs split a + b successes at least this unevenly."""
    ways = [math.comb(n, i) * math.comb(n, a + b - i) for i in range(a + b + 1)]
    return sum(way for way in ways if way <= ways[a]) / sum(ways)


past = {row: sum(right > ELIMINATION for right in recalled(row, 400)) for row in RECALLING}
pairs = list(combinations(reversed(RECALLING), 2))
chances = [fisher(past[one], past[other]) for one, other in pairs]
print("Chapter 12 quotes, of recall with other orders of layers:")
for (one, other), chance in zip(pairs, chances, strict=True):
    if chance == min(chances):
        print(f"{past[one]} ({one}) and {past[other]} ({other}) of six: {chance:.3f}")
assert not any(holm(chances)) and round(min(chances), 3) == 0.015 and len(pairs) == 6
assert [past[row] for row in RECALLING] == [0, 0, 5, 2]

# %% tags=["guard", "quoted"]
# For the claims of chapter 12: each run with these orders on recall, and their losses on text.
for steps, row in [(400, row) for row in ORDERS] + [(1200, "Jamba"), (1200, "OTCE")]:
    runs = " ".join(f"{right:.2f}" for right in recalled(row, steps))
    print(f"{RECALLING[row]}, {steps:4} updates: {runs}   {row}")
called = judge(orders, minus("OTCE", "Jamba") | minus("two, not last", "Jamba"))
assert not any(called.values())

# %% [markdown] slide_title="We bet against WM's table: the convolution comes first"
# ## 4 · One ablation in full
#
# **Question.** Should state layers take positions from a convolution, from their decay alone, or
# from rotation? In WM's Table 1, rotation has the lowest perplexity in each of four *modules* (at
# 8,192 tokens; lower is better):
#
# | | convolution | decay | rotation |
# |---|---|---|---|
# | state layers (S) | 8.56 | 8.62 | 8.33 |
# | with attention (S + A) | 8.48 | 8.56 | 8.18 |
# | with inner functions (S + I) | 8.43 | 8.49 | 8.12 |
# | with the mask as well | 8.36 | 8.42 | 7.96 |
# | attention alone (A) | | | 8.38 |
#
# **Runs.** 200 updates, three seeds (`python -m experiments 09_position`). Between columns, compute
# differs by under 0.5 %. Our mask has gates that learn; WM's never learns (chapter 05). Two rows of
# attention without positions count in $\sigma$, too.
#
# **Prediction.** Most of what predicts a byte of a short text is close by. So we bet on the
# convolution, then rotation, then the decay. **Family.** Two averages over the modules, rotation
# minus convolution and decay minus rotation. Positive means that the first-named source is worse,
# so if we win, both are positive:


# %% tags=["setup", "experiment"]
def position_rows():
    """The rows of WM's Table 1, and two in which attention gets no position information."""
    rows = {"A": dict(pattern="AM × 4")}
    for source in ("conv", "decay", "rope"):
        hybrid, inner = (dict(pattern=f"SM × 3 + {last}", position=source) for last in ("AM", "IM"))
        rows |= {
            f"S, {source}": dict(pattern="SM × 4", position=source),
            f"S + A, {source}": hybrid,
            f"S + I, {source}": inner,
            f"S + I + mask, {source}": inner | dict(mask="gate", max_positions=512),  # not WM's
        }
        if source != "decay":
            rows[f"S + A unturned, {source}"] = hybrid | dict(turned=False)
    return rows


# %% tags=["setup"]
MODULES = ("S", "S + A", "S + I", "S + I + mask")
SOURCES = (("rope", "conv"), ("decay", "rope"))
ONCE_MORE = {"after 600 updates: rope minus conv": {"S + A, rope": 1, "S + A, conv": -1}}


def averaged(one, other, modules=MODULES):
    """One source of position minus another, averaged over the modules."""
    weights = (one, 1 / len(modules)), (other, -1 / len(modules))
    return {f"{m}, {source}": weight for m in modules for source, weight in weights}


# %% slide_title="Rotation is behind the convolution in all four modules"
averages, by_module = {f"{a} minus {b} on average": averaged(a, b) for a, b in SOURCES}, {}
for a, b in SOURCES:
    modules = [minus(f"{m}, {a}", f"{m}, {b}") for m in MODULES]
    gaps = [gap for one in modules for gap, *_ in verdicts(position, one, pool=True).values()]
    by_module[f"{a} minus {b}"] = gaps
    print(f"{a} minus {b}, by module:", *(f"{mean:+.3f}" for mean, _ in gaps))
print(f"each of these eight ± {gaps[0].half_width:.3f}")
called = judge(position, averages)
assert [*called.values()] == [True, False]

# %% slide_title="Eight means have our sign, four are clear of zero" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(11, 4.6))
words = "rotation behind the convolution", "the decay behind rotation"
for i, (name, gaps) in enumerate(zip(words, by_module.values(), strict=True)):
    places, (means, halves) = [m + 0.2 * i - 0.1 for m in range(4)], zip(*gaps, strict=True)
    ax.errorbar(places, means, halves, fmt="os"[i], capsize=8, ms=10, lw=2.5, label=name)
plotting.level(ax, 0)
ax.set_xticks(range(4), MODULES)
ax.set(ylabel="loss higher by, nats per byte"), ax.legend()
plotting.save(
    fig,
    "09_modules",
    "For four modules, how far rotation's loss is above the convolution's and the decay's above "
    "rotation's, with intervals. All eight means are above zero. The four intervals against the "
    "convolution are clear of zero, the four against the decay contain it.",
)

# %% [markdown] slide_title="Two worries are left about one module"
# All eight means have the sign we bet on, but only the convolution's four are clear of zero. On
# average, only rotation against convolution is significant. By (9.1), with 2 degrees of freedom
# instead of 28, both would be significant: p is 0.0249 for the convolution (Holm asks for 0.025)
# and 0.038 for the decay. Our rule, adopted after we had seen this table, takes back the verdict on
# the decay.
#
# Two worries are left about S + A with rotation, the model of section 2's figure:
#
# - Tuning gave it the rate 0.01, the highest of three. With 0.03, which section 5 tried, the tuning
#   seed's loss is 0.14 higher.
# - There, the other tuning seed preferred 0.003.
#
# So **remove what worries you and look again**: the averages over the other three. (Its row still
# counts in $\sigma$.)

# %% slide_title="Without that module the decay's verdict changes"
rest = [m for m in MODULES if m != "S + A"]
undoubted = {f"without S + A: {a} minus {b}": averaged(a, b, rest) for a, b in SOURCES}
called = judge(position, undoubted)
assert all(called.values())

# %% [markdown]
# The gap to the convolution stays. The decay's verdict hangs on one module, so we don't know. (It
# also changes if the noisiest row, attention alone, leaves the table: p 0.023.)
#
# For the convolution, we trained the module once more, at rate 0.003 for 600 updates (`python -m
# experiments 09_longer`; two changes at once, on seeds already used, one of them for tuning). Will
# the gap close?

# %% slide_title="After 600 updates the gap is still there"
called = judge(losses_of("09_longer"), ONCE_MORE)
assert all(called.values())

# %% [markdown]
# The gap doesn't close. So in these small modules, on 512 bytes, early in training, **the
# convolution is ahead of rotation**.

# %% tags=["guard"]
# Compute between columns; both averages by (9.1) alone; the eight means; the seeds of both tables.
times = compute(position_rows())
for m in MODULES:
    columns = [times[f"{m}, {source}"] for source in ("conv", "decay", "rope")]
    assert max(columns) < 1.005 * min(columns)
by_itself = verdicts(position, averages).values()
assert [round(one.p_value, 4) for one in by_itself] == [0.0249, 0.0379]
assert all(one.called for one in by_itself)
eight = [gap for gaps in by_module.values() for gap in gaps]
assert [mean > half for mean, half in eight] == 4 * [True] + 4 * [False]
assert all(mean > 0 for mean, _ in eight)
without = {row: nats for row, nats in position.items() if row != "A"}
last = verdicts(without, averages, pool=pools(without))["decay minus rope on average"]
assert last.called and round(last.p_value, 3) == 0.023
table = torch.tensor([[*nats.values()] for nats in position.values()], dtype=torch.float64)
left = table - table.mean(1, True) - table.mean(0, True) + table.mean()
assert [*position][left.square().sum(1).argmax()] == "A"  # the noisiest row
assert {*losses_of("09_longer")["S + A, rope"]} == {0, 1, 2} and {*position["A"]} == {1, 2, 3}

# %% tags=["guard"]
# The doubtful rate: 0.01 was the highest that this table tried, and section 5 tried 0.03.
here, there = ({run["rate"]: run["nats"][-1][1] for run in read_record(f"09_{name}")["rates"]
                if (run["row"], run["seed"]) == (row, 0)}
               for name, row in (("position", "S + A, rope"), ("gated", "MLP")))  # fmt: skip
assert here == {rate: there[rate] for rate in RATES} and min(here, key=here.get) == max(RATES)
assert round(there[0.03] - there[0.01], 2) == 0.14

# %% tags=["guard", "quoted"]
# For the claims of chapter 12: attention that sees every token at position 0 ignores their order.
_ = torch.manual_seed(0)
one_layer = CausalLM(ModelConfig("AM", d_model=32, n_heads=2)).double()
text = text_to_ids("who stands where?")[None].long()
turned_round = torch.cat([text[:, :-1].flip(1), text[:, -1:]], 1)
with torch.no_grad():
    _ = must_differ("turned", *(one_layer(ids)[0][:, -1] for ids in (turned_round, text)))
    unturned(one_layer)
    check("unturned: any order", *(one_layer(ids)[0][:, -1] for ids in (turned_round, text)))

# %% tags=["guard", "quoted"]
# For the claims of chapter 12: single modules, attention alone or unturned, added parts.
eight, alone, without_turns, steps = {}, {}, {}, {}
for (a, b), m in product(SOURCES, MODULES):
    eight |= minus(f"{m}, {a}", f"{m}, {b}")
for source in ("conv", "decay", "rope"):
    alone |= minus("A", f"S + A, {source}")
    for before, after in pairwise(MODULES):
        steps |= minus(f"{after}, {source}", f"{before}, {source}")
for one, other in (("S + A unturned, conv", "S + A, conv"), ("S + A unturned, rope", "S + A, rope"),
                   ("S + A unturned, rope", "S + A unturned, conv")):  # fmt: skip
    without_turns |= minus(one, other)
print("Chapter 12 quotes, of single modules and parts:")
quoted = ["S + A, conv minus S, conv", "S + A, decay minus S, decay", "S, decay minus S, rope"]
quoted += ["A minus S + A, decay", *without_turns]
quoted += [name for name in (eight | steps) if name.startswith(("S, rope", "S + I", "S + I + mask"))
           and "rope minus" in name]  # fmt: skip
families = eight, alone, without_turns, steps
called = [[*judge(position, one, only=quoted).values()] for one in families]
assert called[0] == 4 * [True] + 4 * [False] and called[2] == [False, False, True]
assert all(called[1]) and not any(called[3])

# %% [markdown] slide_title="A part rarely comes alone: look for what came with it"
# ## 5 · The missing control
#
# **Question.** Chapter 06's experts share more or less of their weights: MoE's share none, cohesive
# ones the matrix $V$, expansive ones a DGLU before them. Do models with them beat a model of the
# same size with MLPs? **Prediction.** Shared parts learn from every token, so more sharing should
# be better.
#
# **Family.** The seven kinds against the MLP. **Runs.** Each kind fills two of the four layers
# behind the mixers, 200 updates, three seeds (`python -m experiments 09_shared`). The row MLP is
# section 4's S + A with rotation, at its doubtful rate of 0.01. All layers share one `d_ff`, so the
# MLPs in the other two layers differ: they are 734 wide in the row MLP, 209 beside MoE, 1,176
# beside PEER.
#
# Negative is good for the experts:

# %% tags=["setup", "experiment"]
SHARED = {
    "MLP": dict(pattern="SM SM SM AM"),
    "DGLU": dict(pattern="SM SD SD AM"),
    "MoE": dict(pattern="SM SR SR AM"),
    "MoE with shared expert": dict(pattern="SM SH SH AM"),
    "cohesive": dict(pattern="SM SC SC AM"),
    "expansive": dict(pattern="SM SX SX AM"),
    "PEER": dict(pattern="SM SP SP AM"),
    "CDMMoE": dict(pattern="SM SK SK AM"),
    "CDMoE": dict(pattern="SM SE SE AM"),
}


# %% tags=["setup"]
def against(baseline, rows):
    """The family of these rows against one baseline."""
    return {name: weights for row in rows for name, weights in minus(row, baseline).items()}


KINDS = [row for row in SHARED if row not in ("MLP", "DGLU")]
ROWS = ["MLP", *KINDS]  # of the figure
FIRST = {row: nats for row, nats in shared.items() if row != "DGLU"}  # the table as it was
SEI = "MoE with shared expert"
THREE_KINDS = ["MoE", SEI, "cohesive"]

# %% slide_title="All seven kinds of experts beat the MLP" slide_figure="09_shared:0"
called = judge(FIRST, against("MLP", KINDS))
assert all(called.values())

# %% [markdown]
# All seven kinds are significantly ahead of the MLP (by (9.1) alone two are, cohesive and PEER).
# Wouldn't you write "experts help" now? We nearly did. Then we asked what an expert is made of.
# Four of the seven kinds are built from DGLUs (chapter 06), so we added plain DGLUs, the missing
# row, and chose a second family, against them:

# %% slide_title="Plain DGLUs take most of the experts' lead away" slide_figure="09_shared:1"
called = judge(shared, against("DGLU", ["MLP", *KINDS]))
assert sum(called.values()) == 6


# %% tags=["guard"]
# The widths of the MLPs, both families on three seeds by (9.1) alone, and the means in words.
mlp = verdicts(shared, against("MLP", KINDS))
assert [name for name, one in mlp.items() if one.called] == ["cohesive minus MLP", "PEER minus MLP"]
widths = {row: fitted(**fields).d_ff for row, fields in SHARED.items()}
assert [widths[row] for row in ("MLP", "MoE", "PEER", "DGLU")] == [734, 209, 1176, 587]
assert shared["MLP"] == position["S + A, rope"]
dglu = verdicts(shared, against("DGLU", ["MLP", *KINDS]))
means = {name: verdict.interval.mean for name, verdict in dglu.items()}
assert [name for name, yes in called.items() if not yes] == [f"{x} minus DGLU" for x in KINDS[3:5]]
assert [name for name, one in dglu.items() if one.called] == ["CDMoE minus DGLU"]
assert all(-0.061 < means[f"{row} minus DGLU"] < -0.039 for row in THREE_KINDS)
assert all(0.048 < means[f"{row} minus DGLU"] < 0.061 for row in KINDS[-2:])
assert round(means["MLP minus DGLU"], 3) == 0.111

# %% [markdown] slide_title="We committed our prediction, then looked too early"
# The MLP is 0.111 behind the DGLU, which has no experts. The DGLU also beats CDMMoE and CDMoE. Only
# three kinds stay ahead, by 0.04 to 0.06. But we had picked this family *and* our rule after
# looking.
#
# So we asked again, on five new seeds. *Family:* the MLP and these three kinds, against the DGLU.
# *Prediction:* the MLP at its best rate is 0.05 to 0.15 behind, the three are 0.02 to 0.06 ahead,
# and the MLP and at least two of the three are significant (`experiments/preregistered.py`). On the
# way we made a mistake:
#
# | when | what we knew | the MLP's rate | what we did |
# |---|---|---|---|
# | 27 November, 21:12 | the two tables above | 0.01 | committed rule, family and prediction |
# | 22:54 | five seeds, one of two tuning seeds: the MLP is behind | 0.01 | looked too early |
# | that night | the other tuning seed | 0.003 | changed the rate |
# | 28 November, 01:40 | nothing new | 0.003 | ran the MLP again, and no other row |
#
# The new rate should help the MLP, against our prediction. But had the MLP been ahead, would we
# have kept tuning?
#
# Here is the result (`python -m experiments 09_gated`):

# %% slide_title="On new seeds three kinds keep some gain" slide_figure="09_shared"
called = judge(gated, against("DGLU", ["MLP", *THREE_KINDS]))
assert all(called.values())


# %% [markdown]
# In the figure, dots are seeds, and a square is their mean, filled if it's significant. Does any
# verdict change on the new seeds?


# %% tags=["figure"]
def draw_rows(ax, losses, family):
    """Differences seed by seed, and their means with intervals; filled where significant."""
    for name, ((mean, half), _, called) in verdicts(losses, family, pool=pools(losses)).items():
        place = ROWS.index(name.partition(" minus")[0])
        apart = [losses[name.partition(" minus")[0]][seed] - loss
                 for seed, loss in losses[name.partition("minus ")[2]].items()]  # fmt: skip
        color = plotting.COLORS[1] if called else plotting.INK
        ax.plot(apart, [place - 0.2] * len(apart), "o", color=plotting.QUIET, ms=7)
        how = dict(fmt="s", color=color, mfc=color if called else "w", ms=9, lw=2)
        ax.errorbar(mean, place + 0.12, xerr=half, **how)
    ax.axvline(0, color=plotting.QUIET, lw=1)
    first = ax.get_subplotspec().is_first_col()
    ax.set_yticks(range(len(ROWS)), ROWS if first else [], fontsize=15)
    ax.set(xlabel="← better    nats per byte", xlim=(-0.28, 0.18), ylim=(len(ROWS) - 0.5, -0.5))


# %% slide_title="Most of the experts' lead seems to be the DGLU's" tags=["figure"]
fig, (left, middle, right) = plotting.figure(1, 3, size=(13.5, 4.8))
draw_rows(left, FIRST, against("MLP", KINDS))
draw_rows(middle, shared, against("DGLU", ["MLP", *KINDS]))
draw_rows(right, gated, against("DGLU", ["MLP", *THREE_KINDS]))
left.set_title("minus MLP, 3 seeds")
middle.set_title("minus DGLU, 3 seeds")
right.set_title("minus DGLU, 5 seeds")
plotting.save(
    fig,
    "09_shared",
    "Left, seven kinds of experts minus the MLP, three seeds: all are below zero and significant. "
    "Middle, the same and the MLP minus the DGLU: three kinds are below zero; the MLP, CDMMoE and "
    "CDMoE are above, all six significant. Right, five new seeds: the MLP is above zero, the three "
    "kinds below, all significant.",
    stages=[[middle], [right]],
)

# %% [markdown]
# On the new seeds all four differences are significant, and the prediction holds, by the rule that
# we had committed. By (9.1) alone only the MLP and MoE are. If one row is much noisier than the
# others, pooling is too sure of it, and Hartley's test rarely warns us. DGLUs beat the MLP by 0.096
# nats, with the MLP at its best rate. Three of the four kinds built from them gain another 0.03 to
# 0.05, with 23 to 28 % less compute. Is the first gain larger than the second? Subtract them (we
# picked this family afterwards):

# %% slide_title="The DGLU gains more on the MLP than experts gain on the DGLU"
gains = {f"(MLP - DGLU) - (DGLU - {row})": {"MLP": 1, "DGLU": -2, row: 1} for row in THREE_KINDS}
called = judge(gated, gains)
assert all(called.values())


# %% [markdown]
# It is, for all three, though barely for the second: **most of their lead over the MLP seems to
# come from the DGLU, and some from the experts.**
#
# And our first prediction, that more sharing is better? We compare kinds that share with MoE, which
# shares nothing, and with each other (two families picked afterwards):

# %% tags=["aside"]
sharing = against("MoE", [SEI, "cohesive", "expansive"])
called = judge(gated, sharing, only=sharing)
assert [*called.values()] == [False, False, True]
others = against(SEI, ["expansive", "cohesive"]) | minus("expansive", "cohesive")
called = judge(gated, others, only=others)
assert [*called.values()] == [True, False, True]

# %% [markdown]
# Nothing shows it. Two kinds that share show no difference from MoE, and expansive experts are
# behind all three.


# %% tags=["guard"]
# For the claims of chapter 12, here and in section 6.
def print_table(name, rows):
    """For some rows of a record the rate, and the mean loss with a 95 % interval (9.1)."""
    best = read_record(name)["best"]
    for row, nats in ((row, losses_of(name)[row]) for row in rows):
        mean, half = interval([*nats.values()])
        print(f"{row:24} rate {best[row]:<6g} {mean:.3f} ± {half:.3f}")


# %% tags=["guard", "quoted"]
# The compute that experts save; and for the claims of chapter 12, losses.
times = compute(SHARED)
print("Chapter 12 quotes, here and below, of compute, losses and shared answers:")
print("compute:", *(f"{row} {share:.2f}" for row, share in times.items()), sep="  ")
print_table("09_shared", [*THREE_KINDS, "expansive", "CDMoE"])
kinds = ["DGLU", *THREE_KINDS]
assert [round(times[row], 2) for row in kinds] == [1, 0.72, 0.77, 0.76]

# %% tags=["guard"]
# The new seeds by (9.1) alone; expansive experts behind; Hartley's test rarely sees one row of 3 σ.
sharing |= minus("expansive", SEI) | minus("expansive", "cohesive")
behind = [one for name, one in verdicts(gated, sharing).items() if name.startswith("expansive")]
assert len(behind) == 3 and all(verdict.interval.mean > 0 for verdict in behind)
even, noisy = (torch.randn(100_000, 9, 3, generator=seeded(seed)) for seed in (1, 2))
noisy[:, 0] *= 3
found = (ratios(noisy) > ratios(even).quantile(0.95)).double().mean().item()
assert 0.105 < found < 0.12
new = verdicts(gated, against("DGLU", ["MLP", *THREE_KINDS]))
means = {name: verdict.interval.mean for name, verdict in new.items()}
assert round(means["MLP minus DGLU"], 3) == 0.096
assert all(-0.051 < means[f"{row} minus DGLU"] < -0.032 for row in THREE_KINDS)
assert [name.split(" minus")[0] for name, one in new.items() if one.called] == ["MLP", "MoE"]

# %% tags=["guard", "quoted"]
# For the claims of chapter 12: what the answers of four experts share, and the measure itself.
one = torch.ones(())
check("equal answers have all in common", torch.tensor(common_share(torch.ones(4, 9))), one)
unrelated = common_share(torch.randn(4, 10_000, generator=seeded(8)))
print(f"four unrelated answers: {unrelated:.2f}")
assert abs(unrelated - 0.25) < 0.01

# %% tags=["guard", "quoted"]
# For the claims of chapter 12: four experts of MoE, after training and before.
shares, again = {}, {}  # three seeds, and five new ones
for record, found in (("09_shared", shares), ("09_gated", again)):
    for run in read_record(record)["runs"]:
        if "in common" in run:
            found.setdefault(run["row"], {})[run["seed"]] = statistics.fmean(run["in common"])
print(f"{'MoE':24}", *(f"{share:.2f}" for share in shares["MoE"].values()))
print("MoE, five new seeds     ", *(f"{share:.2f}" for share in again["MoE"].values()))
fresh = []  # the same share before training, on random bytes
for seed in range(3):
    _ = torch.manual_seed(seed)
    model = CausalLM(fitted(**SHARED["MoE"]))
    fresh += in_common(model, torch.randint(256, (4, 512), generator=seeded(seed)))
print("MoE before training, three seeds, random bytes: between 0.24 and 0.27")
assert 0.24 < min(fresh) < max(fresh) < 0.27 < min(*shares["MoE"].values(), *again["MoE"].values())

# %% tags=["guard", "quoted"]
# For the claims of chapter 12: do other kinds' experts have more or less in common?
family = against("MoE", list(shares)[1:])
repeated = judge(shares, family, only=family)
print("the same, on five new seeds:")
anew = judge(again, family, only=family)
assert not any(repeated.values()) and not any(anew.values())

# %% [markdown] slide_title="A null is worth what its interval excludes"
# ## 6 · A null done well
#
# A null result is worth only as much as it excludes. OTCE's Table 5 has seventeen patterns with
# ordinary MoE (our R). Fit a line to it: from no experts to experts everywhere, the loss falls by
# 5.6 %. For us that would be 5.6 % of 2.55, or 0.14 nats.
#
# **Prediction.** A rise: in a short training each expert learns only from the tokens that reach it.
# **Family.** One number, the slope of such a line, fitted for each seed, and none of the 136 pairs.
# **Runs.** 0.4 million parameters, DGLUs in place of MLPs (section 5's lesson), 100 updates, three
# seeds (`python -m experiments 09_routed`).
#
# Here is the slope over seventeen patterns, from no experts to experts everywhere. Which falls does
# its interval (9.1) exclude? And what is its *power*: how often would such slopes reveal a fall?

# %% tags=["setup", "experiment"]
EXPERTS = {row: dict(pattern=row, d_model=96) for row in (
    "SM SM SM SM SM SM SM AM", "SE SM SM SM SM SM SM AM", "SM SM SM SM SM SM SM AE",
    "SE SM SM SM SM SM SM AE", "SM SE SE SE SE SE SE AM", "SE SE SE SE SE SE SE AE",
)}  # fmt: skip
ROUTED = {row: dict(pattern=row.replace("M", "D"), d_model=64, target=400_000) for row in (
    "SM SM SM SM AM SM SM AM", "SR SM SM SM AM SM SM AM", "SM SM SM SM AR SM SM AM",
    "SM SM SM SM AM SR SM AM", "SM SM SM SM AM SM SR AM", "SM SM SM SM AM SM SM AR",
    "SR SM SM SM AM SM SM AR", "SM SM SM SR AM SR SM AM", "SM SM SR SR AM SM SM AM",
    "SM SM SM SM AM SR SR AM", "SM SR SR SR AM SM SM AM", "SR SM SM SM AM SM SR AR",
    "SM SM SM SR AR SR SM AM", "SM SR SM SR AM SR SM SR", "SM SR SR SR AR SR SM AM",
    "SM SR SR SR AR SR SR AM", "SR SR SR SR AR SR SR AR",
)}  # fmt: skip


# %% tags=["setup"]
def share_of_experts(row):
    """Of the layers behind the mixers, how many are experts."""
    behind = [letter for letter in row if letter in "MRE"]
    return 1 - behind.count("M") / len(behind)


def slopes(losses):
    """For every seed what experts everywhere add to experts nowhere, by a line through all rows."""
    share = torch.tensor([share_of_experts(row) for row in losses]).double()
    away = share - share.mean()
    seeds = next(iter(losses.values()))
    nats = [torch.tensor([losses[row][seed] for row in losses]).double() for seed in seeds]
    return [(one @ away / away.square().sum()).item() for one in nats]


# %% tags=["figure"]
def draw_slope(ax, losses, slope):
    """The rows' mean losses by share of experts; our line and its interval, a fall of 5.6 %."""
    share = [share_of_experts(row) for row in losses]
    nats = [statistics.fmean(by_seed.values()) for by_seed in losses.values()]
    (slope, half), center = slope, (statistics.fmean(share), statistics.fmean(nats))
    start, ends = center[1] - slope * center[0], torch.tensor([0.0, 1.0])
    low, high = (center[1] + (slope + sign * half) * (ends - center[0]) for sign in (-1, 1))
    ax.fill_between(ends, low, high, color=plotting.COLORS[1], alpha=0.15, lw=0)
    ax.plot(share, nats, "o", color=plotting.QUIET, ms=9)
    ax.plot([0, 1], [start, start + slope], color=plotting.COLORS[1], lw=3)
    ax.plot([0, 1], [start, 0.944 * start], "--", color=plotting.COLORS[0], lw=3)
    ax.text(1.01, start + slope, "ours", color=plotting.COLORS[1], va="center")
    ax.text(1.01, 0.944 * start, "the paper's 5.6 %", color=plotting.COLORS[0], va="center")
    ax.set(xlim=(-0.03, 1.25), xlabel="share of layers with experts", ylabel="nats per byte")
    ax.set_xticks((0, 0.25, 0.5, 0.75, 1))


# %% slide_title="At this noise a fall of 0.08 would be seen, one of 0.02 would not"
found = slopes(routed)
mean, half = interval(found)
print(f"from no experts to experts everywhere: {mean:+.3f} ± {half:.3f} nats per byte")
for fall in (0.02, 0.08, 0.14):
    power = share_shown(fall / statistics.stdev(found), len(found))
    print(f"a fall of {fall:.2f} would be detected {power:.0%} of the time")
assert abs(mean) < half and power > 0.99


# %% slide_title="Seventeen patterns show neither our rise nor their fall" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(10, 4.6))
draw_slope(ax, routed, interval(found))
plotting.save(
    fig,
    "09_slope",
    "The mean loss of seventeen patterns against the share of experts behind their mixers. Our "
    "line through them rises by 0.02, inside a band of slopes that also holds a fall. The paper's "
    "line, dashed, falls by 0.14 from the same start, out of the band.",
)

# %% [markdown]
# Zero is in the interval, the paper's fall far outside. So this null says something: it excludes a
# fall of more than 0.027. (Our rise isn't shown; up to 0.071 stays possible.) Trust the power less,
# since three slopes give a poor standard deviation. Compute it *before* the runs.


# %% tags=["guard"]
# For the claims of chapter 12: how far the rows' means spread, against rows that are shuffled.
def spread_by_chance(losses, trials=4000):
    """The standard deviation of the rows' means, and how often shuffled rows spread as far."""
    seeds = next(iter(losses.values()))
    nats = torch.tensor([[losses[row][seed] for row in losses] for seed in seeds]).double()
    generator, spread = seeded(17), nats.mean(0).std()
    order = torch.rand(trials, *nats.shape, generator=generator).argsort(-1)
    dealt = nats.expand(trials, *nats.shape).gather(-1, order).mean(1).std(1)
    return spread.item(), (dealt >= spread).double().mean().item()


# %% tags=["guard", "quoted"]
# For the claims of chapter 12: compute, WM's slope, single rows, and how far rows spread.
none, *_, everywhere = ROUTED
times = compute(ROUTED)
print("Chapter 12 quotes, of both tables:")
print(f"compute: {times[everywhere]:.2f} to 1 of the row without experts")
assert round(times[everywhere], 2) == 0.78
print_table("09_experts", [*EXPERTS][-2:])
print_table("09_routed", ["SM SR SR SR AR SR SM AM"])
mean, half = interval(slopes(experts))
print(f"from no experts to experts everywhere: {mean:+.3f} ± {half:.3f} nats per byte")
assert abs(mean) < half
spread, share = spread_by_chance(routed)
print(f"the rows' means have a standard deviation of {spread:.3f};", end=" ")
print(f"by chance as large {share:.2f} of the time")
assert share > 0.8

# %% tags=["guard"]
# The ends of our interval.
mean, half = interval(found)
assert (round(mean - half, 3), round(mean + half, 3)) == (-0.027, 0.071)


# %% [markdown] slide_title="Swap everything at once, and you can't blame any part"
# ## 7 · Whole systems
#
# Swap everything at once, and you can't blame any part. In our first three seeds Jamba (`SH × 4 +
# AH + SH × 3`, where H has a shared expert) was ahead of Cheems (`SE × 7 + IE`). Jamba has a
# convolution where Cheems rotates. Is that why?
#
# **Runs.** Seven systems of sixteen layers, 200 updates (`python -m experiments 09_systems`). LlaMa
# takes 28 % more compute than Jamba, and Cheems 6 %. Seeds 4 and 5 are new, and so are Jamba with
# rotation and Cheems with a convolution.
#
# **Prediction**, committed before the new runs: position is most of it. With the same source, Jamba
# and Cheems are within 0.04, and not significantly apart. Jamba and OTCE do differ significantly.
#
# **Family.** Seven differences: LlaMa, Mamba-2, OTCE and Cheems minus Jamba; LlaMa minus Cheems;
# and Cheems minus Jamba twice more, both with a convolution and both with rotation:

# %% tags=["setup", "experiment"]
SYSTEMS = {
    name: dict(pattern=pattern, d_model=96, k_experts=1, **more)
    for name, pattern, more in (
        ("LlaMa", "AH × 8", {}),
        ("Mamba-2", "SH × 8", dict(position="conv")),
        ("Jamba", "SH × 4 + AH + SH × 3", dict(position="conv")),
        ("OTCE", "SD SX SX SX AX SX SD AD", {}),
        ("Cheems", "SE × 7 + IE", {}),
        ("Jamba, rotation", "SH × 4 + AH + SH × 3", {}),
        ("Cheems, convolution", "SE × 7 + IE", dict(position="conv")),
    )
}

# %% tags=["setup"]
WHOLE = against("Jamba", ["LlaMa", "Mamba-2", "OTCE", "Cheems"]) | minus("LlaMa", "Cheems")
WHOLE |= minus("Cheems, convolution", "Jamba") | minus("Cheems", "Jamba, rotation")
BOTH = {"rotation": ("Jamba, rotation", "Cheems"), "convolution": ("Jamba", "Cheems, convolution")}
turns, glides = BOTH.values()
CROSSED = {
    "with rotation": dict(zip(turns, (-1, 1), strict=True)),
    "with a convolution": dict(zip(glides, (-1, 1), strict=True)),
    "mean of both sources": dict(zip(turns + glides, (-0.5, 0.5, -0.5, 0.5), strict=True)),
    "in Jamba": {turns[0]: 1, glides[0]: -1},
    "in Cheems": {turns[1]: 1, glides[1]: -1},
    "mean of both systems": dict(zip(turns + glides, (0.5, 0.5, -0.5, -0.5), strict=True)),
}

# %% slide_title="Jamba is ahead of Cheems with either source of position"
whole = judge(systems, WHOLE)
assert [name for name, yes in whole.items() if not yes] == ["Mamba-2 minus Jamba"]

# %% [markdown]
# We had bet that with the same source Jamba and Cheems are close. We lost: Jamba is significantly
# ahead with either. It's also ahead of OTCE, as predicted. But looking, adding seeds and looking
# again isn't fair.
#
# How much of the gap is due to position? Look at the four means (we picked this split afterwards).
# If position were most of it, both lines would rise steeply, close together:


# %% tags=["figure"]
def draw_lines(ax):
    """The mean losses of both systems with either source of position, and their runs."""
    for i, system in enumerate(("Jamba", "Cheems")):
        color, rows = plotting.COLORS[i], [systems[pair[i]] for pair in reversed(BOTH.values())]
        for place, row in enumerate(rows):
            ax.plot([place] * len(row), [*row.values()], "o", color=color, ms=5, alpha=0.35, mew=0)
        means = [statistics.fmean(row.values()) for row in rows]
        ax.plot([0, 1], means, "s-", color=color, lw=3, ms=10)
        ax.text(1.08, means[1], system, color=color, fontsize=16, va="center")
    ax.set(xlim=(-0.3, 1.6), ylabel="← better    nats per byte", xticks=[0, 1])
    ax.set_xticklabels([*reversed(BOTH)])


# %% tags=["figure"]
def draw_crossed(ax, judged):
    """The differences along and across the lines, with their intervals."""
    for place, ((mean, half), *_) in enumerate(judged.values()):
        place += place > 2  # a gap between the two kinds
        how = dict(fmt="s", color=plotting.INK, ms=9, lw=2.5, capsize=7)
        ax.errorbar(mean, place, xerr=half, **how)
        words = f"{mean:+.3f} ± {half:.3f}".replace("-", "−")
        ax.text(0.3, place, words, fontsize=14, va="center")
    ax.axvline(0, color=plotting.QUIET, lw=1)
    ax.set_yticks([0, 1, 2, 4, 5, 6], judged, fontsize=14)
    for place, words in ((-0.8, "Cheems minus Jamba"), (3.2, "rotation minus convolution")):
        ax.text(-0.14, place, words, fontsize=15, weight="bold", va="center")
    ax.set(xlim=(-0.15, 0.5), ylim=(6.6, -1.3), xlabel="nats per byte", xticks=[-0.1, 0, 0.1, 0.2])


# %% slide_title="The gap is there with either source of position" tags=["figure", "slide"]
fig, (left, right) = plotting.figure(1, 2, size=(13.0, 5.0))
draw_lines(left), left.set_title("means, and five runs each")
draw_crossed(right, verdicts(systems, CROSSED, pool=pools(systems)))
plotting.save(
    fig,
    "09_crossed",
    "Left, two lines from convolution to rotation: Jamba's rises by 0.03; Cheems's, above it, "
    "falls by 0.03. Right, six intervals: Cheems minus Jamba is clear of zero with either source "
    "and in the mean; rotation minus convolution contains zero in either system and in the mean.",
)

# %% [markdown]
# The lines stay apart. Swap position first, in Jamba, and it takes 0.030 of the gap of 0.137; swap
# it last, in Cheems, and it takes −0.030. Neither is significant, and on average it's 0.000 ±
# 0.050. Next we'd try the experts: CDMoE was behind DGLUs.
#
# And after 1,000 updates? Our committed prediction: Cheems is behind Jamba by 0.04 to 0.12, and
# Mamba-2, within 0.04 of Jamba, isn't significantly behind. (When we knew the result above, but
# before these runs, we replaced an earlier prediction by this one. `python -m experiments
# 09_systems_longer`, three seeds.)

# %% slide_title="After 1,000 updates the gap has doubled"
called = judge(losses_of("09_systems_longer"), against("Jamba", ["Mamba-2", "Cheems"]))
assert [*called.values()] == [False, True]

# %% [markdown]
# We were right about Mamba-2 and wrong about Cheems: it doesn't catch up. With rates tuned for 200
# updates, the distance doubles to 0.270 nats.


# %% tags=["guard"]
# The 2 x 2; what seeds 4 and 5 add; and compute.
judged = {name: one.interval for name, one in verdicts(systems, CROSSED, pool=False).items()}
gap, share = judged["mean of both sources"], judged["mean of both systems"]
assert not pools(systems) and [round(x, 3) for x in (*gap, *share)] == [0.137, 0.035, 0, 0.050]
means = {row: statistics.fmean(nats.values()) for row, nats in systems.items()}
assert abs(gap.mean + share.mean - (means["Cheems"] - means["Jamba"])) < 1e-9
assert [round(judged[f"in {name}"].mean, 2) for name in ("Jamba", "Cheems")] == [0.03, -0.03]
assert [one.holds_zero for one in judged.values()] == 3 * [False] + 3 * [True]
assert means["Jamba, rotation"] < means["Cheems"] < means["Cheems, convolution"]
early = {row: {seed: nats[seed] for seed in (1, 2, 3)} for row, nats in systems.items()}
first = minus("LlaMa", "Jamba") | minus("Mamba-2", "Jamba") | minus("OTCE", "Jamba")
first |= minus("Cheems", "Jamba") | minus("LlaMa", "Cheems")
at_first = verdicts(early, first)
assert at_first["Cheems minus Jamba"].interval.mean > 0 and not at_first["OTCE minus Jamba"].called
times = compute(SYSTEMS)
assert [round(times[row] / times["Jamba"], 2) for row in ("Cheems", "LlaMa")] == [1.06, 1.28]


# %% [markdown] slide_title="A relative change of the loss has no unit" slide_figure="09_claims:0"
# ## 8 · Nine claims on one axis
#
# In nine cases a paper favours a part or a system, prints a lower loss with it than without, and we
# have run both rows. (The folded cell says what we leave out.) We put these claims into one family,
# named only now. Our losses are in nats per byte, the papers' in nats per token. If both models of
# a pair share a tokenizer, the bytes per token cancel, and a relative change of the loss has no
# unit:
#
# $$100\left(\frac{\log P_{\text{new}}}{\log P_{\text{old}}} - 1\right)\,\%, \tag{9.4}$$
#
# where $\log P$ is the loss in nats.
#
# Even so, their models are hundreds to a thousand times as large. So our verdict compares only the
# *sign*: a claim is **seen** if our difference is significant with the paper's sign, and **opposite
# here** if it's significant with the other.


# %% tags=["setup"]
def change(new, old):
    """Percent by which the loss changes from perplexity `old` to `new` (9.4)."""
    return 100 * (math.log(new) / math.log(old) - 1)


def ours(losses, weights):
    """A difference by our rule, in percent of what it starts from; its degrees of freedom; p."""
    pool, seeds = pools(losses), len(next(iter(losses.values())))
    ((mean, half), p, _) = verdicts(losses, {"": weights}, pool=pool)[""]
    means = {row: statistics.fmean(nats.values()) for row, nats in losses.items()}
    percent = -100 / sum(weight * means[row] for row, weight in weights.items() if weight < 0)
    return mean * percent, half * percent, pooled(losses)[1] if pool else seeds - 1, p


# %% tags=["setup"]
def our_slope(losses):
    """What experts everywhere add, in percent of the loss without experts, as in `ours`."""
    nowhere = statistics.fmean(losses[next(iter(losses))].values())
    slope = {"slope": dict(enumerate(slopes(losses)))}
    ((mean, half), p, _) = verdicts(slope, {"": {"slope": 1}})[""]
    return 100 * mean / nowhere, 100 * half / nowhere, len(slope["slope"]) - 1, p


# %% tags=["setup"]
def holm_widths(claims):
    """By how many Holm's rule divided 0.05 for each claim, until it stopped; half widths there."""
    widths, left, passed = {}, len(claims), True
    for i, name in enumerate(sorted(claims, key=lambda name: claims[name][-1])):
        _, _, half, degrees, p = claims[name]
        if passed:  # else Holm's rule has stopped
            left = len(claims) - i
            passed = p <= 0.05 / left
        widths[name] = left, half * student_t(degrees, 0.05 / left) / student_t(degrees)
    return widths


# %% tags=["setup"]
TABLE_1 = ((8.56, 8.62, 8.33), (8.48, 8.56, 8.18), (8.43, 8.49, 8.12), (8.36, 8.42, 7.96))
TABLE_2 = (8.18, 8.06, 8.12, 7.96, 7.52, 7.49)
TABLE_5 = (4.86, 4.83, 4.84, 4.82, 4.88, 4.92, 4.68, 4.68, 4.67)
TABLE_5 += (4.68, 4.77, 4.69, 4.63, 4.61, 4.48, 4.56, 4.54)


STATES = {"S + A, rope": 1, "A": -1}


def printed_slope(rows, table):
    """The slope of a table's changes against its first row, without experts."""
    return slopes({row: {0: change(p, table[0])} for row, p in zip(rows, table, strict=True)})[0]


# %% tags=["setup"]
CLAIMS = {  # the paper's change; ours, its half width, its degrees of freedom and its p-value
    "inner function (WM 1)": (change(8.12, 8.18), *ours(inner, {"retrieved": 1, "linear": -1})),
    "states for attention (WM 1)": (change(8.18, 8.38), *ours(position, STATES)),
}
for name, other, i in (("convolution", "conv", 0), ("decay", "decay", 1)):
    table = statistics.fmean(change(row[2], row[i]) for row in TABLE_1)
    CLAIMS[f"rotation for {name} (WM 1)"] = table, *ours(position, averaged("rope", other))
CLAIMS["CDMoE everywhere (WM 2)"] = printed_slope(EXPERTS, TABLE_2), *our_slope(experts)
CLAIMS["MoE everywhere (OTCE 5)"] = printed_slope(ROUTED, TABLE_5), *our_slope(routed)
for name, losses, row, base, new, old in (
    ("cohesive for shared (OTCE 6)", gated, "cohesive", SEI, 1.93, 1.99),
    ("expansive for shared (OTCE 6)", gated, "expansive", SEI, 1.88, 1.99),
    ("OTCE for Jamba (Ch 1)", systems, "OTCE", "Jamba", 2.10, 2.53),
):
    CLAIMS[name] = change(new, old), *ours(losses, {row: 1, base: -1})


# %% tags=["setup"]
# Left out: Ch's Cheems, another system; the mask, whose gates learn here; OTCE's Table 3, where
# rotation is added to the convolution; two differences that OTCE calls little or negligible; and
# what repeats or follows from the nine, such as Ch's Table 2.
WIDTHS, said = holm_widths(CLAIMS), {}
for name, yes in zip(CLAIMS, holm([p for *_, p in CLAIMS.values()]), strict=True):
    claimed, mean, *_ = CLAIMS[name]
    words = "seen" if (claimed < 0) == (mean < 0) else "opposite here"
    said[name] = words if yes else "no difference shown"

# %% [markdown]
# First walk up Holm's staircase. The nine p-values, from the smallest up, have to stay below it.
# Which is the first that doesn't?


# %% tags=["figure"]
def draw_walk(ax, claims, said):
    """The p-values from the smallest up, and Holm's thresholds; arrows are off the scale."""
    names, m = sorted(claims, key=lambda name: claims[name][-1]), len(claims)
    steps, edges = [0.05 / (m - i) for i in range(m)], [i - 0.5 for i in range(m + 1)]
    ax.stairs(steps, edges, baseline=None, color=plotting.INK, lw=3)
    first = next(i for i, name in enumerate(names) if "shown" in said[name])  # that fails
    for i, name in enumerate(names):
        p, kind = claims[name][-1], (i >= first) + (i > first)
        ax.text(i, steps[i] * 0.93, f"0.05/{m - i}", fontsize=13, ha="center", va="top")
        color = (plotting.COLORS[2], plotting.COLORS[1], plotting.QUIET)[kind]
        marker, fill = "ov"[p < 1e-3], "white" if kind == 2 else color
        ax.plot(i, max(p, 6e-4), marker, color=color, ms=11, mfc=fill)
        words = f"{p:.2g}" if p > 1e-4 else "< 0.0001"
        words += ("\npasses", "\nfails", "\nnot tested")[kind]
        how = dict(textcoords="offset points", ha="center", va="bottom", color=color, fontsize=13)
        ax.annotate(words, (i, max(p, 6e-4)), (0, 8), **how)
    words = [name.replace(" for ", "\nfor ").replace(" every", "\nevery") for name in names]
    ax.set(yscale="log", ylim=(3.5e-4, 2), ylabel="p", xticks=range(m), xlim=(-0.5, m - 0.5))
    ax.set_xticklabels([one.replace(" (", "\n(") for one in words], fontsize=13)


# %% slide_title="The fourth of nine p-values ends the walk" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(13.0, 5.0))
draw_walk(ax, CLAIMS, said)
plotting.save(
    fig,
    "09_walk",
    "Nine p-values from the smallest up, and a staircase from 0.05/9 to 0.05. Three are below "
    "their steps: states for attention, rotation for convolution, expansive for shared. The "
    "fourth, OTCE for Jamba, 0.0098, is above its step and fails. The other five aren't tested.",
)

# %% [markdown]
# OTCE's, the fourth: 0.0098 isn't below 0.05/6 = 0.0083. Three claims pass, and the other five
# aren't tested.
#
# Now the sizes, sorted by our result; in brackets, the paper and its table. The thick part of a bar
# is the interval (9.3), or (9.1). The thin part is the interval with 0.05/9, 0.05/8 and so on in
# place of 0.05 (from OTCE on 0.05/6). A claim is *seen* if the whole bar is on the shaded side,
# with the papers' diamonds. Which bar is clear of zero only without the correction?


# %% tags=["figure"]
def draw_claims(ax, claims, widths, said):
    """Every claim: the paper's change, ours with both widths, the verdict; returns what's ours."""
    drawn = []
    colors = {"seen": plotting.COLORS[2], "opposite here": plotting.COLORS[1]}
    names = sorted(claims, key=lambda name: claims[name][1])
    for place, name in enumerate(names):
        claimed, mean, half, *_ = claims[name]
        (_, wide), color = widths[name], colors.get(said[name], "#555555")
        for reach, width in ((wide, 1.5), (half, 6)):
            bar = dict(color=color, lw=width, solid_capstyle="butt")
            drawn += ax.plot([mean - reach, mean + reach], [place] * 2, **bar)
        drawn += ax.plot(mean, place, "o", color=color, ms=10)
        ax.plot(claimed, place, "D", color=plotting.COLORS[0], mfc="white", ms=9, mew=2)
        how = dict(color=color, fontsize=14, va="center")
        drawn += [ax.text(21, place, said[name], ha="right", **how)]
    ax.axvspan(-23, 0, color=plotting.COLORS[0], alpha=0.08, lw=0)
    ax.text(-18.5, len(names) - 1, "the papers' side", color=plotting.COLORS[0], va="center")
    ax.axvline(0, color=plotting.QUIET, lw=1)
    ax.set_yticks(range(len(names)), names, fontsize=14)
    ax.set(
        xlim=(-23, 22),
        xlabel="change of the loss, %; diamonds: the paper; dots: ours, thin: as Holm demands",
    )
    ax.invert_yaxis()
    return drawn


# %% slide_title="Corrected for nine, one claim is seen and two are opposite" tags=["figure"]
fig, ax = plotting.figure(size=(12.8, 4.5))
drawn = draw_claims(ax, CLAIMS, WIDTHS, said)
plotting.save(
    fig,
    "09_claims",
    "Nine claims on one axis, the change of the loss in percent, sorted by our result. Each bar is "
    "thick as far as its own interval reaches, and thin as far as Holm's rule demands. The papers' "
    "diamonds are all on the shaded side below zero. Three whole bars stay clear of zero: states "
    "for attention, far below, and, above, rotation for convolution and expansive experts for a "
    "shared one. The bar of OTCE for Jamba is clear of zero only in its thick part.",
    stages=[drawn],
)

# %% tags=["guard"]
# The verdicts, and that the thin bars show them.
print("The figure's numbers, change of the loss in %:")
print("                                     paper   ours")
for name, (claimed, mean, half, *_) in CLAIMS.items():
    print(f"{name:32} {claimed:9.1f} {mean:+7.1f} ± {half:4.1f}   {said[name]}")
    _, wide = WIDTHS[name]
    assert wide > half and (abs(mean) > wide) == ("shown" not in said[name])
opposite = ["rotation for convolution (WM 1)", "expansive for shared (OTCE 6)"]
assert [name for name, words in said.items() if words == "opposite here"] == opposite
seen = [name for name, words in said.items() if words == "seen"]
assert seen == ["states for attention (WM 1)"] and len(CLAIMS) == 9

# %% [markdown] slide_title="Of nine claims one is seen, two are opposite" slide_figure="09_claims"
# In its paper, each of the nine is an improvement. One of them is seen here, two are opposite:
#
# - **State layers in place of most attention: seen.** Ours is fourteen times the paper's change,
#   but after 200 updates only the sign is comparable. (Its row has section 4's doubtful rate.)
# - **Rotation ahead of the convolution: opposite here**, in section 4's modules. (In section 7's
#   systems no difference is shown. And WM reads 8,192 tokens, we 512 bytes.)
# - **Expansive experts ahead of a shared one: opposite here**, on section 5's new seeds.
#
# OTCE's thick bar is clear of zero, its thin bar isn't. Here, fourth of nine, it failed. In section
# 7, the sixth of seven, it had to be below 0.05/2 = 0.025, and passed: a verdict belongs to its
# family. And to its rule: pooled, its p would be 0.0018, *opposite here*. By (9.1) alone, only
# expansive experts pass.
#
# For the inner function, for rotation against the decay and for CDMoE the whole bar contains both
# zero and the diamond, so we can't tell. In the other three it excludes the paper's percentage.
# (CDMoE is compared with MLPs, as WM does it: the control that section 5 discredits.) Compute also
# differs: CDMoE everywhere takes 32 % less, attention alone 10 % more than with states.

# %% tags=["guard", "quoted"]
# For the claims of chapter 12: what the papers' tables say.
print("Chapter 12 quotes, of the papers' tables:")
for i, other in enumerate(("convolution", "decay")):
    ahead = [math.log(row[i] / row[2]) for row in TABLE_1]
    print(f"WM Table 1: rotation {min(ahead):.3f} to {max(ahead):.3f} nats ahead of the {other}")
print(f"in the tables: CDMoE {math.log(7.49 / 8.18):.3f} nats per token,", end=" ")
print(f"cohesive {math.log(1.93 / 1.99):.3f}, expansive {math.log(1.88 / 1.99):.3f}")
assert all(claimed < 0 for claimed, *_ in CLAIMS.values())

# %% tags=["guard"]
# The six that are left: which bars contain zero and the diamond? And the compute of two claims.
times = compute({row: position_rows()[row] for row in ("S + A, rope", "A")})
assert round(times["A"], 2) == 1.10 and round(min(compute(EXPERTS).values()), 2) == 0.68
left = {name: claim for name, claim in CLAIMS.items() if said[name] == "no difference shown"}
inside = [name for name, (claim, mean, *_) in left.items() if abs(claim - mean) < WIDTHS[name][1]]
assert inside == ["inner function (WM 1)", "rotation for decay (WM 1)", "CDMoE everywhere (WM 2)"]
assert len(left) == 6 and all(abs(left[name][1]) < WIDTHS[name][1] for name in left)
thick_only = [name for name, (_, mean, half, *_) in left.items() if half < abs(mean)]
assert thick_only == ["OTCE for Jamba (Ch 1)"]

# %% tags=["guard"]
# OTCE's place in both families, and all nine by (9.1) alone.
at_nine, otce = sorted(claim[-1] for claim in CLAIMS.values()), CLAIMS["OTCE for Jamba (Ch 1)"][-1]
assert at_nine.index(otce) == 3 and f"{otce:.4f}" == "0.0098" and round(0.05 / 6, 4) == 0.0083
at_seven = sorted(one.p_value for one in verdicts(systems, WHOLE, pool=pools(systems)).values())
assert abs(at_seven[5] - otce) < 1e-9 and len(at_seven) == 7
(expansive,) = verdicts(gated, minus("expansive", SEI)).values()
weights = STATES, averaged("rope", "conv"), averaged("rope", "decay")
by_itself = [expansive, *(verdicts(position, {"": one})[""] for one in weights)]
others = [claim[-1] for name, claim in left.items() if "decay" not in name]
called = holm([verdict.p_value for verdict in by_itself] + others)  # by (9.1) alone
assert called == [True] + 8 * [False]
(pooled_otce,) = verdicts(systems, minus("OTCE", "Jamba"), pool=True).values()
assert f"{pooled_otce.p_value:.4f}" == "0.0018" and pooled_otce.p_value < 0.05 / 6

# %% [markdown] slide_title="A difference is worth its interval, its family and its control"
# ## Summary
#
# - One run per row says little. Three seeds detect 3.3 standard deviations of the paired difference
#   four times in five; with one standard deviation for a table of nine rows, 1.7.
# - Share windows and seeds, match parameters, tune each row's rate on several seeds, report
#   compute.
# - State the family and the analysis before you look. A pair picked afterwards isn't a finding.
# - Look for the missing control. DGLUs seem to give most of three kinds' lead.
# - A null is worth what its interval excludes.
# - Compare like with like: a sign, or a number without a unit.
#
# **What came after.** Waleffe et al. (2024) trained a hybrid of Mamba-2 and a few attention layers
# with 8 billion parameters; it beat their Transformer on all twelve standard tasks, which points
# the same way as the one claim that we see. Poli et al. (2024) trained over 500 language models:
# scores on small synthetic tasks correlate with their perplexity. Miller (2024) brings paired
# differences and power to benchmark scores. Heineman et al. (2025) measure which benchmarks
# separate models by more than their noise.
#
# ## Exercises

# %% [markdown]
# **1 · easy.** *An interval from pairs.* How far apart are two models trained with the same seeds?
# Return the mean of the differences (losses minus baseline) and the half width of (9.1), with
# `student_t`.
#
# <details><summary>Hint</summary>
#
# Subtract first, seed by seed. The standard deviation is that of the differences, with $n - 1$
# below.
#
# </details>


# %% tags=["exercise"]
def paired(losses, baseline):
    """Mean and half width of losses minus baseline, seed by seed."""
    ### BEGIN SOLUTION
    apart = [one - other for one, other in zip(losses, baseline, strict=True)]
    n = len(apart)
    return statistics.fmean(apart), student_t(n - 1) * statistics.stdev(apart) / math.sqrt(n)
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import forbidden, not_none

with forbidden(interval, pooled, verdicts):
    mean, half = not_none(paired([1.0, 2.0, 3.0], [1.5, 2.0, 2.5]))
assert math.isclose(mean, 0, abs_tol=1e-12), f"the mean difference is 0, got {mean}"
assert math.isclose(half, 4.303 * 0.5 / math.sqrt(3), rel_tol=1e-3), (
    f"differences of -0.5, 0 and 0.5: the half width isn't {half:.3f}"
)
with forbidden(interval, pooled, verdicts):
    mean, half = paired([2.31, 2.40, 2.28, 2.52], [2.33, 2.43, 2.29, 2.54])
assert abs(mean + 0.02) < 1e-6 and abs(half - 0.013) < 0.0005, f"got {mean:.3f} ± {half:.4f}"
print("the last four pairs: -0.020 ± 0.013, a difference although the losses range over 0.24")

# %% [markdown]
# **2 · easy.** *How many seeds?* With how many seeds is an interval narrow enough? Differences
# between paired runs have the standard deviation `deviation`. Return the smallest $n$ from 2 to 31
# that makes the half width of (9.1) no more than `apart`, or None if 31 are not enough. (To
# *detect* a difference of `apart` four times in five, you need more.)
#
# <details><summary>Hint</summary>
#
# Try the numbers of seeds in order. (9.1) has $n - 1$ degrees of freedom.
#
# </details>


# %% tags=["exercise"]
def seeds_for(apart, deviation):
    """The fewest seeds with which the half width is no more than `apart`."""
    ### BEGIN SOLUTION
    for n in range(2, 32):
        if student_t(n - 1) * deviation / math.sqrt(n) <= apart:
            return n
    return None
    ### END SOLUTION


# %% tags=["check"]
for apart, deviation, n in ((0.02, 0.01, 4), (0.01, 0.01, 7), (0.1, 0.01, 2), (0.001, 0.01, None)):
    got = seeds_for(apart, deviation)
    assert got == n, f"apart {apart}, deviation {deviation}: {got} is not right"
assert seeds_for(0.005, 0.01) == 18, f"half of it: {seeds_for(0.005, 0.01)} is not right"
assert seeds_for(0.37, 1) == 31, "31 seeds are enough for 0.37 of it"
assert seeds_for(student_t(3) / 2, 1) == 4, "a half width of just `apart` is enough"
for n in range(2, 32):
    apart = 1.001 * student_t(n - 1) / math.sqrt(n)
    assert seeds_for(apart, 1) == n, f"apart {apart:.3f}, deviation 1: {seeds_for(apart, 1)}"
mostly = share_shown(1, 7)
assert 0.55 < mostly < 0.65
print(f"one standard deviation: 7 seeds make the interval, but detect it {mostly:.0%} of the time")

# %% [markdown]
# **3 · medium.** *The best of k against one.* How far does the best of $k$ runs beat one run? A
# table reports the best of $k$ runs for one model and a single run for another. Both are the same
# model, and losses are normal with standard deviation 1. Return both: how far apart the two numbers
# are on average, and how often the best of $k$ is lower. Derive it, or simulate with at least
# 100,000 draws. An error of 0.02 is fine.
#
# <details><summary>Hint</summary>
#
# All $k + 1$ runs are alike. How often is the lowest of them the single one?
#
# </details>


# %% tags=["exercise"]
def best_against_one(k):
    """Mean of (best of k) - (one), and the share in which the best of k is lower."""
    ### BEGIN SOLUTION
    x = torch.randn(200_000, k + 1, generator=seeded(11))
    best, one = x[:, :k].min(1).values, x[:, k]
    return (best - one).mean().item(), (best < one).double().mean().item()
    ### END SOLUTION


# %% tags=["check"]
import secrets

from cheems_ref.exercises import not_none

drawn = 11 + secrets.randbelow(30)  # a number of runs that no table knows
found = torch.randn(200_000, drawn, generator=seeded(13)).min(1).values.mean().item()
for k, mean in ((1, 0), (2, -0.5642), (3, -0.8463), (5, -1.163), (10, -1.5388), (drawn, found)):
    apart, share = not_none(best_against_one(k))
    assert abs(apart - mean) < 0.02, f"k = {k}: apart by {apart:.3f} is not right"
    assert abs(share - k / (k + 1)) < 0.02, f"k = {k}: lower {share:.2f} of the time is not right"
print("the best of three beats the same model in three comparisons of four")

# %% [markdown]
# **4 · medium.** *Flip the signs.* Test a difference without assuming normal losses. With equally
# good models, each paired difference could as well have had the other sign. Flip the signs in all
# $2^n$ ways, and return the share of ways whose mean is at least as far from zero as yours (up to
# rounding, $10^{-12}$). With pencil and paper: how small a p-value can three seeds reach?
#
# <details><summary>Hint</summary>
#
# Your own way of signs is one of the $2^n$, and so is the one with all of them flipped.
#
# </details>


# %% tags=["exercise"]
def sign_flip_p(apart):
    """The p-value of paired differences, by flipping their signs in all ways."""
    ### BEGIN SOLUTION
    x = torch.tensor(apart, dtype=torch.float64)
    ways = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * len(apart))
    means = (ways.view(-1, len(apart)) * x).mean(1).abs()
    return (means >= x.mean().abs() - 1e-12).double().mean().item()
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none

for apart, want in (([0.1, 0.2, 0.3], 0.25), ([-3.0, -1.0, -2.0], 0.25), ([1.0, -1.0], 1.0)):
    got = not_none(sign_flip_p(apart))
    assert abs(got - want) < 1e-6, f"{apart}: {got} is not the share of ways"
assert abs(sign_flip_p([0.1, 0.2, -0.3]) - 1) < 1e-6, "a mean of zero: no way is nearer to zero"
assert abs(sign_flip_p([0.3, 0.1, -0.1]) - 0.75) < 1e-6, "another mean that is as far from zero"
assert abs(sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0, -0.5]) - 0.0625) < 1e-6, "one small one against it"
assert abs(sign_flip_p([0.3] * 6) - 2 / 64) < 1e-6, "six seeds that agree"
print("three seeds never get below 0.25, six that agree reach 0.031: without normality, no small p")

# %% [markdown]
# **5 · hard.** *The pooled interval.* Write section 3's pooled interval yourself. Return mean and
# half width of a difference $\sum_i w_i\,\bar x_i$ of rows with the weights $w_i$. For $\sigma$,
# subtract the means of rows and of seeds, and add the total mean back. With pencil and paper: why
# aren't there $rn - 1$ degrees of freedom?
#
# <details><summary>Hint</summary>
#
# How many of the numbers that are left can you choose freely, if each row and each seed must sum to
# zero? The error of the sum of rows is $\sigma \sqrt{\sum_i w_i^2 / n}$.
#
# </details>


# %% tags=["exercise"]
def pooled_interval(losses, weights):
    """Mean and half width of a weighted sum of rows of {row: {seed: loss}}, with (9.3)."""
    ### BEGIN SOLUTION
    x = torch.tensor([[*by_seed.values()] for by_seed in losses.values()], dtype=torch.float64)
    left = x - x.mean(1, keepdim=True) - x.mean(0) + x.mean()
    r, n = x.shape
    degrees = (r - 1) * (n - 1)
    error = math.hypot(*weights.values()) * math.sqrt(left.square().sum().item() / degrees / n)
    mean = sum(weight * statistics.fmean(losses[row].values()) for row, weight in weights.items())
    return mean, student_t(degrees) * error
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import forbidden, not_none

flat = {"a": {1: 1.0, 2: 2.0}, "b": {1: 1.5, 2: 2.5}}
with forbidden(interval, pooled, verdicts):
    mean, half = not_none(pooled_interval(flat, {"a": 1, "b": -1}))
assert abs(mean + 0.5) < 1e-6 and abs(half) < 1e-6, "rows and seeds that only add up leave nothing"
for table, weights in ((shared, {"MoE": 1, "DGLU": -1}), (orders, {"OTCE": 1, "Jamba": -1}),
                       (position, averaged("rope", "conv"))):  # fmt: skip
    with forbidden(interval, pooled, verdicts):
        got = pooled_interval(table, weights)
    want = verdicts(table, {"": weights}, pool=True)[""].interval
    assert abs(got[0] - want[0]) < 1e-6, f"{[*weights]}: the mean {got[0]:.6f} is not right"
    assert abs(got[1] - want[1]) < 1e-6, f"{[*weights]}: the half width {got[1]:.6f} is not right"
print("as the package: {:+.3f} ± {:.3f} for an average over four modules".format(*want))

# %% [markdown]
# ## Further reading
#
# - Holm (1979), *A Simple Sequentially Rejective Multiple Test Procedure*: the rule of section 3.
# - Dodge et al. (2020), *Fine-Tuning Pretrained Language Models: Weight Initializations, Data
#   Orders, and Early Stopping*: how much a seed changes.
# - Melis, Dyer and Blunsom (2018), *On the State of the Art of Evaluation in Neural Language
#   Models*: which differences survive tuning.
# - Gelman and Loken (2013), *The Garden of Forking Paths*: pairs picked afterwards, everywhere.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
