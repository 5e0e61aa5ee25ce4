# %% [markdown]
# # 08a · The needle
#
# **Hide one sentence in a long text and ask for it at the end. How far beyond its training does a
# model still find it, and which repair helps?** You will be able to
#
# - read a needle heat map, and say what its numbers rest on;
# - say which models lose early needles and which lose all of them;
# - apply two repairs that need no training, and find where one of them backfires.
#
# You need chapter 08 and lab 04b.
#
# Sources: *OTCE* Figure 10 and §4.5; *Wonderful Matrices* (WM) Table 7; `cheems_ref/tasks.py`.

# %% tags=["setup"]
import copy
import json
from pathlib import Path

import torch
import torch.nn.functional as F

from cheems_ref import plotting
from cheems_ref.attention import QCAttn
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.rope import log_length_scale, ntk_base
from cheems_ref.tasks import needle
from cheems_ref.text import ids_to_text, read_text, text_to_ids
from cheems_ref.train import split_text
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
RECORD = json.loads(Path("../../experiments/records/08_needle.json").read_text())


# %% [markdown]
# ## 1 · One sentence in a haystack
#
# OTCE maps how often a model finds a *needle*, by the length of the text and by the depth of the
# sentence (Figure 10). Our needle gives a name a four-digit code, and the text ends with the
# question:

# %%
hay = text_to_ids("hay " * 40)
ids, targets = needle(1, 120, depth=0.5, haystack=hay, generator=torch.Generator().manual_seed(4))
row, wanted = ids_to_text(ids[0]), ids_to_text(targets[0][targets[0] >= 0])
print(f"{row}\nanswer: {wanted}")
assert row.count("The code of") == 2 and f" is {wanted}. " in row and row.endswith(wanted[:3])

# %% [markdown]
# Each digit is predicted from the true digits before it, so a guess is right one time in ten. There
# is only one needle, so the model can ignore the name and just find the phrase.
#
# ## 2 · Four small systems
#
# We take four small systems modelled on WM's, with 0.3 million parameters each: LlaMa (AM × 4),
# Mamba-2 (SM × 4), Jamba (SM SR AM SR, with routed experts R) and Cheems (SE × 3 + IE). They are
# trained on *short* texts of 64 to 256 bytes. The
# loss counts the answer alone.

# %% tags=["setup", "experiment"]
FOUR = {
    "LlaMa": dict(pattern="AM × 4", d_ff=422),
    "Mamba-2": dict(pattern="SM × 4", position="conv", d_ff=415),
    "Jamba": dict(pattern="SM SR AM SR", position="conv", d_ff=119),
    "Cheems": dict(pattern="SE × 3 + IE", d_ff=128),
}
WINDOWS = {"short": (64, 128, 256), "long": (64, 128, 256, 512, 1024)}  # here: short
DEPTHS, ASKED = (0, 0.25, 0.5, 0.75, 1), (128, 256, 512, 1024, 2048)
VARIANTS = {
    "as trained": dict(),
    "base": dict(base=True),
    "sharper": dict(sharper=True),
    "both": dict(base=True, sharper=True),
}


# %% tags=["experiment"]
def needle_model(system, seed):
    """One of the four systems, with 0.3 million parameters."""
    _ = torch.manual_seed(seed)
    sizes = dict(d_model=64, n_heads=2, d_state=64, n_values=8, n_neurons=256, k_neurons=8)
    return CausalLM(ModelConfig(**sizes, **FOUR[system])).float()


counts = {system: sum(p.numel() for p in needle_model(system, 0).parameters()) for system in FOUR}
print("parameters:", *(f"{system} {count:,}" for system, count in counts.items()))
assert max(counts.values()) < 1.002 * min(counts.values())

# %% [markdown]
# All experts of Jamba and Cheems are counted, although a token uses only some of them.


# %% tags=["setup", "experiment"]
def answers(model, ids, targets):
    """Logits and targets where there is one."""
    asked = targets >= 0
    return model.logits(model.hidden_states(ids, use_cache=False)[0][asked]), targets[asked]


@torch.no_grad()
def digits_right(model, length, depth, haystack, n_rows=16):
    """The share of the digits that are right, in texts of this length with a needle this deep."""
    rows = needle(
        n_rows, length, depth, haystack=haystack, generator=torch.Generator().manual_seed(999)
    )
    logits, targets = answers(model, *rows)
    return (logits.argmax(-1) == targets).double().mean().item()


# %% tags=["setup", "experiment"]
def needle_loss(model, ids, targets, with_text):
    """Nats per digit of the answer; with_text adds the nats per byte of the text."""
    x, asked = model.hidden_states(ids, use_cache=False)[0], targets >= 0
    loss = F.cross_entropy(model.logits(x[asked]), targets[asked])
    if with_text:
        loss = loss + F.cross_entropy(model.logits(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    return loss


# %% tags=["setup", "experiment"]
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


# %% tags=["setup"]
def runs_of(system):
    """The runs on short texts with seeds 1 and 2. Seed 0 chose the rate, so it doesn't count."""
    runs = [run for run in RECORD["grid"] if run["kind"] == "short"]
    return [run for run in runs if run["system"] == system and run["seed"] in (1, 2)]


def got_there(run):
    return min(run["right"][-1]) >= 0.98


# %% [markdown]
# Each run takes at most 2,500 updates of 2,048 bytes, and stops when 98 % of the digits are right
# at every trained length, averaged over three depths in the training text (`python -m experiments
# 08_needle`). Each rate is the best of three, chosen with seed 0. The best of several runs was
# probably also lucky, so seed 0 doesn't count, which leaves two runs of each system.

# %%
print("updates until 0.98 at every trained length, or (the least share after 2,500)")
for system in FOUR:
    runs, rate = runs_of(system), RECORD["best"][system]
    told = [
        f"{100 * len(r['right']):,}" if got_there(r) else f"({min(r['right'][-1]):.2f})"
        for r in runs
    ]
    print(f"{system:8} rate {rate:<6g} seeds 1 and 2:", *(f"{one:>7}" for one in told))
there = {system: sum(map(got_there, runs_of(system))) for system in FOUR}
assert there == {"LlaMa": 0, "Mamba-2": 1, "Jamba": 2, "Cheems": 1}

# %% [markdown]
# Four of eight runs got there, neither of LlaMa's among them. So what follows isn't a ranking of
# systems. It's a look at *how* models fail.
#
# ## 3 · The heat map
#
# We ask at up to eight times the trained length, with 16 held-out texts of four digits per cell.
# How far can you trust such a share?
#
# **Fill in 1.** Give its standard error twice: if all 64 digits are right or wrong independently,
# and if the four digits of a text always go together.


# %% tags=["exercise"]
def standard_errors(share, texts=16, digits=4):
    """The standard error of a share: digits independent, and all digits of a text alike."""
    ### BEGIN SOLUTION
    one = (share * (1 - share)) ** 0.5
    return one / (texts * digits) ** 0.5, one / texts**0.5
    ### END SOLUTION


# %% tags=["check"]
drawn = torch.rand(20_000, 16, 4, generator=torch.Generator().manual_seed(6))
for share in (0.1, 0.5, 0.8):
    apart = (drawn < share).double().mean((1, 2)).std().item()
    alike = (drawn[:, :, 0] < share).double().mean(1).std().item()
    for mine, trial in zip(standard_errors(share), (apart, alike), strict=True):
        assert abs(mine - trial) < 0.003, f"share {share}: {mine:.3f}, and {trial:.3f} in a trial"
print("half right: a standard error of {:.2f}, or {:.3f}".format(*standard_errors(0.5)))

# %% [markdown]
# So don't read much into differences below 0.15. All cells ask for the same 16 codes, so cells that
# only guess are often alike.
#
# Before you look: where will attention alone fail, and where will states?


# %% tags=["figure"]
def draw_heat(ax, run):
    """A run's heat map, and a line after the longest text that it was trained on."""
    heat = torch.tensor(run["heat"]["as trained"]).T  # depths, lengths
    title = f"{run['system']}, seed {run['seed']}" + ("" if got_there(run) else " (not learned)")
    labels = dict(xticks=ASKED, yticks=DEPTHS)
    plotting.heatmap(ax, heat, title=title, signed=False, limit=1.0, colorbar=False, **labels)
    for i, shares in enumerate(heat):
        for j, share in enumerate(shares):
            color = "white" if share > 0.6 else plotting.INK
            ax.text(j, i, f"{100 * share:.0f}", ha="center", va="center", color=color, fontsize=13)
    ax.axvline(ASKED.index(WINDOWS["short"][-1]) + 0.5, color=plotting.INK, linewidth=2)


# %% tags=["figure"]
fig, axes = plotting.figure(2, 4, size=(16, 8))
for column, system in zip(axes.T, FOUR, strict=True):
    for ax, run in zip(column, runs_of(system), strict=True):
        draw_heat(ax, run)
_ = fig.supxlabel("length of the text in bytes; trained up to the line")
_ = fig.supylabel("depth of the needle (top: first; bottom: next to the question)")
plotting.save(
    fig,
    "08a_needle",
    "Eight heat maps of the percentage of digits right, two runs of each of four systems; rows for "
    "five depths of the needle, columns for texts of 128 to 2,048 bytes, a line after 256. LlaMa "
    "is at 5 to 17 percent from 1,024 on, at every depth. Mamba-2, Jamba and Cheems keep 70 to 100 "
    "percent at 2,048 where the needle is last, and have 9 to 36 where it is first.",
)

# %% tags=["guard"]
at_2048 = {s: [(r["heat"]["as trained"][-1]) for r in runs_of(s)] for s in FOUR}
for system in ("Mamba-2", "Jamba", "Cheems"):
    for row in at_2048[system]:
        assert row[-1] >= 0.7 and row[0] < 0.37
far = torch.tensor([run["heat"]["as trained"][3:] for run in runs_of("LlaMa")])
assert far.min() > 0.04 and far.max() < 0.175
assert all(row[0] < 0.12 for row in at_2048["Cheems"])
(lucky,) = [
    r for r in RECORD["grid"] if (r["kind"], r["system"], r["seed"]) == ("short", "LlaMa", 0)
]
assert min(lucky["right"][-1]) == 0.99 and round(sum(lucky["heat"]["as trained"][3]) / 5, 2) == 0.12
asked = [
    needle(16, n, d, generator=torch.Generator().manual_seed(999))[1] for n in ASKED for d in (0, 1)
]
assert all(torch.equal(one[one >= 0], asked[0][asked[0] >= 0]) for one in asked)
four_times = {s: [sum(r["heat"]["as trained"][3]) / len(DEPTHS) for r in runs_of(s)] for s in FOUR}
every = [share for shares in four_times.values() for share in shares]
print(f"at four times the trained length: {min(every):.2f} to {max(every):.2f} right")
assert max(four_times["LlaMa"]) < 0.14 and min(every[2:]) > 0.4 and max(every) < 0.7505

# %% [markdown]
# - **Attention alone** is close to guessing from four times the trained length on, wherever the
#   needle is. Neither of its runs had quite learned the trained lengths (0.86 and 0.92 at the
#   worst). But neither had Mamba-2's second run (0.86). And LlaMa's seed 0, which had (0.99), finds
#   just 0.12 of the digits at four times the length.
# - **With states**, the needle next to the question survives in these runs, even at eight times the
#   length (in seed 0 of Jamba and Cheems only 0.61 of it). Early needles are lost first.
#
# Have the states *forgotten* the early needle, or can't the model read it? The maps can't tell.
#
# ## 4 · Two repairs without training
#
# Lab [04b](04b_longer_than_trained.ipynb) has two. Multiplying the *base* by $(l/l_0)^{d/(d-2)}$
# slows the rotation down; here $l$ is the length of the text, $l_0$ the trained length, and $d$ the
# width that is rotated. Multiplying a query by $\log_{l_0} n$ once it sees $n > l_0$ tokens keeps
# the softmax *sharper*.


# %% tags=["experiment"]
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


# %% tags=["setup", "experiment"]
def heat_map(model, window, haystack, **remedies):
    """Shares of digits right: a row for each length asked, a column for each depth."""
    rows = []
    for length in ASKED:
        reader = stretched(model, length, window, **remedies) if length > window else model
        rows.append([digits_right(reader, length, depth, haystack) for depth in DEPTHS])
    return rows


# %% [markdown]
# At the trained length neither changes anything. Beyond it, each does:

# %%
model, generator = needle_model("Cheems", 0), torch.Generator().manual_seed(5)
ids = needle(4, 512, 0.5, generator=generator)[0]
both = VARIANTS["both"]
within = stretched(model, 256, 256, **both)(ids[:, :256])[0]
check("both repairs at the trained length", within, model(ids[:, :256])[0])
for name in ("base", "sharper", "both"):
    beyond = stretched(model, 512, 256, **VARIANTS[name])(ids)[0]
    _ = must_differ(f"{name}, twice the trained length", beyond, model(ids)[0], at_least=1e-4)

# %% [markdown]
# Our Mamba-2 has a convolution instead of a rotation, and no attention, so nothing can change
# there. Jamba has the same state layers, so there only attention can change.

# %%
model = needle_model("Mamba-2", 0)
after = stretched(model, 512, 256, **both)
check("Mamba-2: both repairs change nothing", after(ids)[0], model(ids)[0])

# %%
print("asked at 1,024 bytes                ", *(f"{variant:>10}" for variant in VARIANTS))
change = {}
for system in ("LlaMa", "Jamba", "Cheems"):
    for name, at in (("first", slice(0, 1)), ("last", slice(4, 5)), ("all depths", slice(0, 5))):
        shares = [[r["heat"][v][3][at] for v in VARIANTS] for r in runs_of(system)]
        change[system, name] = [[sum(cells) / len(cells) for cells in run] for run in shares]
        for seed, run in enumerate(change[system, name], start=1):
            told = (f"{share:10.2f}" for share in run)
            print(f"{system:6} seed {seed}, needle {name:10}     ", *told)

# %% tags=["guard"]
for a, base, sharper, b in change["LlaMa", "all depths"]:
    assert base > 2 * a and abs(sharper - a) < 0.03 and b > base + 0.09
assert all(b < base + 0.03 for _, base, _, b in change["Jamba", "all depths"])
for a, _, sharper, b in change["Jamba", "all depths"]:
    assert b > a + 0.05 and sharper < a + 0.03
assert all(b < a - 0.6 for a, *_, b in change["Cheems", "last"])
assert all(b < a for a, *_, b in change["Cheems", "all depths"])
assert [round(64 * (b - a)) for a, *_, b in change["Jamba", "first"]] == [8, 15]
assert change["LlaMa", "last"][0][0] == change["LlaMa", "last"][0][3] < 0.13
base_alone = [run["heat"]["base"][3][4] for run in runs_of("Cheems")]
sharper_alone = [run["heat"]["sharper"][3][4] for run in runs_of("Cheems")]
assert max(base_alone) < 0.32 and min(sharper_alone) > 0.9
for _, base, _, b in change["Cheems", "all depths"]:
    assert abs(b - base) < 0.03
assert min(runs_of("Mamba-2")[1]["right"][-1]) == 0.865
chose = {r["system"]: r["heat"] for r in RECORD["grid"] if (r["kind"], r["seed"]) == ("short", 0)}
mean = {s: {v: sum(rows[3]) / 5 for v, rows in heat.items()} for s, heat in chose.items()}
assert all(round(chose[system]["as trained"][4][4], 2) == 0.61 for system in ("Jamba", "Cheems"))
gains = [sum(r["heat"]["base"][3]) - sum(r["heat"]["as trained"][3]) for r in runs_of("Jamba")]
assert [round(gain / 5, 2) for gain in gains] == [0.09, 0.06]
assert [round(mean["Jamba"][v], 2) for v in VARIANTS] == [0.42, 0.88, 0.62, 0.96]
assert mean["Cheems"]["both"] > mean["Cheems"]["as trained"] + 0.09
assert mean["LlaMa"]["base"] > 3 * mean["LlaMa"]["as trained"]
assert chose["Cheems"]["base"][3][4] < chose["Cheems"]["as trained"][3][4] - 0.2

# %% [markdown]
# - **LlaMa** finds twice as many digits with the larger base. Sharper queries alone change little;
#   both repairs reach 0.37 and 0.53 over all depths. The last needle of seed 1 stays at guessing.
# - **Jamba** does about as well with the base alone as with both. With both it finds 8 and 15 more
#   of the first needle's 64 digits; the 8 may be noise. Only its attention changed, so this can't
#   tell whether the states had lost the needle.
# - **Cheems** gets worse. It loses the very needle that it almost always found, the one next to the
#   question. The base alone does that. It slows the rotation of the *states* as well as of
#   attention. We didn't test which of the two does the damage.
#
# The mean over all depths hides the most important line of this table.
#
# **Fill in 2.** Find the depth at which a repair does the most damage.


# %% tags=["exercise"]
def most_damage(before, after):
    """The place of the depth where the share fell most, and by how much."""
    ### BEGIN SOLUTION
    fell = [b - a for b, a in zip(before, after, strict=True)]
    return fell.index(max(fell)), max(fell)
    ### END SOLUTION


# %% tags=["check"]
assert most_damage([0.5, 0.75, 0.25], [0.5, 0.25, 0.75]) == (1, 0.5), "the second fell by 0.5"
assert most_damage([0.5, 0.25], [1.0, 0.5])[0] == 1, "none fell: the one that rose least"
for run in runs_of("Cheems"):
    place, fell = most_damage(run["heat"]["as trained"][3], run["heat"]["both"][3])
    print(f"Cheems, seed {run['seed']}: the most at depth {DEPTHS[place]}, by {fell:.2f}")
    assert DEPTHS[place] == 1 and fell > 0.6

# %% [markdown]
# Seed 0, which chose the rates, disagrees in part. Over all depths, its Jamba goes from 0.42 to
# 0.88 with the base and to 0.62 with sharper queries, and its Cheems gains a little with both. In
# all three seeds the base helps LlaMa and Jamba (Jamba by only 0.09 and 0.06 in two of them), and
# costs Cheems much of its last needle.
#
# ## 5 · Claimed and seen
#
# > "OTCE can recall information across 128K context length (our maximum extended sequence length),
# > and has excellent performance on the Needle in a haystack evaluation." (OTCE Figure 10)
#
# - **We can't tell at this scale.** OTCE was trained on 128K (§4.5), so the claim is about trained
#   lengths.
#
# ## Summary
#
# - At four times the trained length, attention alone is close to guessing (neither of its two runs
#   had quite learned the trained lengths: 0.86 and 0.92). Models with states lose the early needles
#   first.
# - At that length the larger base helps LlaMa and Jamba. Sharper queries add something in LlaMa, on
#   top of that base.
# - A repair can break what worked, as in Cheems: read the heat map by depth, and not its mean.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
