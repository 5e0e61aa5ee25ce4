# %% [markdown]
# # 07 · The Cheems language model
#
# **Every system of the papers is a string of letters. This chapter turns the string into a model,
# counts what it costs, gives it a memory, trains it on real text, and lets it write.** When you are
# through you can
#
# - draw one block of the stack, and write the whole model out in eight lines;
# - read LlaMa, Mamba-2, Jamba, OTCE, Cheems and Doge as patterns, and build any other;
# - say why a state layer before attention helps, and what the case against one at the end rests on;
# - predict parameters, FLOPs and bytes of cache by part, and find them in the running model;
# - generate with a cache of constant size, of growing size, or of both, and check it token by
#   token;
# - train a small Cheems on a text of yours, kill the run, and resume it to the same losses.
#
# Time: about 90 minutes. Assumes: chapters 03 to 06, of each the first half: what S, A, I and E
# are.
#
# Sources: *Wonderful Matrices* (WM) §3.4, Tables 2 and 7, App. C.2; *Cheems* (Ch) §3.4; *OTCE*
# §3.3, Tables 1, 2, 5, 6 and 8; CMU 10-423 lecture 22 (L22). The code that this notebook builds up
# to is `cheems_ref/model.py` and `cheems_ref/train.py`.

# %%
import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from matplotlib.patches import FancyBboxPatch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cheems_ref import plotting, text
from cheems_ref.model import (
    LAYERS,
    Block,
    CausalLM,
    ModelConfig,
    Sampling,
    cache_bytes,
    count_parameters,
    expand_pattern,
    generate,
    preset,
    sample,
    stream,
)
from cheems_ref.train import TrainConfig, evaluate, learning_rate, split_text, train
from cheems_ref.verify import check, must_differ

torch.set_default_dtype(torch.float64)  # for the equalities; training is in float32
torch.set_num_threads(1)  # models as small as these gain little from more


def tokens(*shape, seed=0, vocabulary=256):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def record(name):
    return json.loads(Path(f"../figures/records/{name}.json").read_text())


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## Why this matters
#
# The chapters before this one each built a part and proved it. A part is not a system: in a stack
# of forty layers the questions are others. In which order? How many of each? What does it cost per
# token, at a thousand tokens and at a hundred thousand? Does it still compute the same when it runs
# one token at a time? And does it learn?
#
# ## 1 · One block
#
# Between the layers runs a *stream*: one vector of width $d$ per token. A layer $f$ never replaces
# it. It reads a normalised copy and adds what it has to say:
#
# $$x \leftarrow x + f(\mathrm{norm}(x)), \qquad
#   \mathrm{norm}(x) = \frac{x}{\sqrt{\tfrac1d \sum_i x_i^2 + \varepsilon}} \circ w. \tag{7.1}$$
#
# The norm is RMSNorm: the vector is divided by the root of the mean of its squares, and each
# coordinate multiplied by a learned weight $w$, which starts at 1. So a layer sees inputs of the
# same size wherever it stands, while the stream itself may grow.

# %%
config = ModelConfig(pattern="SE × 7 + IE", d_model=32, n_neurons=64, d_ff=64, d_state=16)
_ = torch.manual_seed(0)
block = Block("E", config)
_ = torch.nn.init.uniform_(block.norm.weight, 0.5, 1.5)  # else a norm without w would pass


def rms_norm(x, weight, eps=1e-6):
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


x = 3 * torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))  # (b, l, d)
positions = torch.arange(5).expand(2, 5)
with torch.no_grad():
    y, _ = block(x, positions)
    check(
        "block = stream + layer(norm(stream))", y, x + block.layer(rms_norm(x, block.norm.weight))
    )
    _ = must_differ("no norm", x + block.layer(x), y)
    _ = must_differ("norm after the sum", rms_norm(x + block.layer(x), block.norm.weight), y)
    _ = must_differ("the layer instead of the stream", block.layer(block.norm(x)), y)

# %% [markdown]
# The papers pair every *sequence mixer* (S, A, I: tokens look at one another) with a *state mixer*
# (M, E, …: each token by itself). Here is one such pair of the model, drawn while it runs: what is
# written on the arrows are the shapes that its modules returned a moment ago.


# %%
def shapes_of(model, ids, names):
    """Run the model once and note the shape that each named module returns."""
    seen = {}

    def note(name):
        def hook(_module, _inputs, output):
            seen[name] = tuple((output[0] if isinstance(output, tuple) else output).shape)

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(note(name)) for name in names]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


model = CausalLM(config)
inside_s = ["norm", "layer.x_proj", "layer.B_proj", "layer.C_proj", "layer.dt_proj", "layer"]
inside_e = ["norm", "layer.shared", "layer.experts", "layer"]
names = [f"blocks.0.{n}" for n in inside_s] + [f"blocks.1.{n}" for n in inside_e]
seen = shapes_of(model, tokens(2, 12), names)
assert seen["blocks.0.layer"] == seen["blocks.1.layer"] == (2, 12, 32)


def box(ax, x, y, words, width=2.0, colour="white", height=0.62):
    ax.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0.02,rounding_size=0.12",
            facecolor=colour,
            edgecolor=plotting.INK,
            linewidth=1.4,
        )
    )
    ax.text(x, y, words, ha="center", va="center", fontsize=13)


def arrow(ax, start, end):
    style = dict(arrowstyle="-|>", color=plotting.INK, linewidth=1.4, shrinkA=0, shrinkB=0)
    ax.annotate("", end, start, arrowprops=style)


fig, axes = plotting.figure(1, 2, size=(12, 6.2))
S_COLOUR, E_COLOUR = "#cfe3f3", "#f9dcc9"
plus = dict(ha="center", va="center", fontsize=20)
plus["bbox"] = dict(boxstyle="circle,pad=0.12", facecolor="white", edgecolor=plotting.INK)
for ax, title, block_name in (
    (axes[0], "S: tokens look back", "blocks.0"),
    (axes[1], "E: each token by itself", "blocks.1"),
):
    ax.set(xlim=(-1.3, 7.2), ylim=(-0.7, 7.4), title=title)
    ax.axis("off")
    arrow(ax, (0, 0), (0, 6.9))  # the stream
    ax.text(0.12, -0.45, f"stream {seen[block_name + '.layer']}", fontsize=12)
    ax.text(0, 5.75, "+", **plus)
    arrow(ax, (0, 0.55), (2.35, 0.55))
    box(ax, 3.6, 0.55, "RMSNorm", 2.4)
    arrow(ax, (3.6, 5.75), (0.38, 5.75))
    ax.text(1.9, 5.95, f"{seen[block_name + '.layer']}", fontsize=12, ha="center")
for i, name in enumerate(("x_proj", "B_proj", "C_proj", "dt_proj")):
    place = 0.75 + 1.72 * i
    label = {"x_proj": "x", "B_proj": "B", "C_proj": "C", "dt_proj": "dt"}[name]
    arrow(axes[0], (3.6, 0.88), (place + 0.55, 1.75))
    box(axes[0], place + 0.55, 2.08, label, 1.1, S_COLOUR)
    axes[0].text(place + 0.55, 2.55, f"{seen['blocks.0.layer.' + name]}", ha="center", fontsize=11)
    arrow(axes[0], (place + 0.55, 2.8), (3.6, 3.6))
box(axes[0], 3.6, 3.95, "state space dual, rotated B and C", 5.4, S_COLOUR)
arrow(axes[0], (3.6, 4.27), (3.6, 4.72))
box(axes[0], 3.6, 5.05, "out", 1.1, S_COLOUR)
arrow(axes[0], (3.6, 5.37), (3.6, 5.75))
arrow(axes[1], (3.6, 0.88), (3.6, 1.55))
box(axes[1], 3.6, 1.9, "shared MLP φ", 3.0, E_COLOUR)
axes[1].text(3.75, 2.48, f"{seen['blocks.1.layer.shared']}", fontsize=11)
arrow(axes[1], (3.6, 2.22), (3.6, 3.15))
box(axes[1], 3.6, 3.5, "retrieved neurons", 3.4, E_COLOUR)
axes[1].text(3.75, 4.08, f"{seen['blocks.1.layer.experts']}", fontsize=11)
arrow(axes[1], (3.6, 3.82), (3.6, 4.72))
axes[1].plot([3.6, 6.3, 6.3], [2.75, 2.75, 5.05], color=plotting.INK, linewidth=1.4)
arrow(axes[1], (6.3, 5.05), (3.98, 5.05))
axes[1].text(3.6, 5.05, "+", **plus)
arrow(axes[1], (3.6, 5.37), (3.6, 5.75))
plotting.save(
    fig,
    "07_block",
    "Two blocks of the stack side by side. Left, S: from the stream a copy goes through RMSNorm, "
    "then through four projections x, B, C and dt into the state space dual, and back onto the "
    "stream by a sum. Right, E: RMSNorm, a shared MLP, retrieved neurons added to it, and back.",
)

# %% [markdown]
# ## 2 · The whole model
#
# An embedding turns ids into vectors, the blocks work on the stream, a last norm and a matrix turn
# it into *logits*, one number per possible next id. When embedding and matrix are the same
# (*tied*), the model has one table of words instead of two. That is all:

# %%
ids = tokens(2, 12)


def written_out(model, ids):
    x = model.embedding.weight[ids]  # (b, l, d)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    for letter, block in zip(model.config.pattern, model.blocks, strict=True):
        h = rms_norm(x, block.norm.weight)
        y = block.layer(h, positions)[0] if letter in "SAI" else block.layer(h)
        x = x + y
    return rms_norm(x, model.norm.weight) @ model.embedding.weight.T  # (b, l, v)


with torch.no_grad():
    logits, _ = model(ids)
    check("model = its eight lines", written_out(model, ids), logits)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    check("nothing before token 7 moves with it", model(changed)[0][:, :7], logits[:, :7])
    _ = must_differ("token 7 and what follows", model(changed)[0][:, 7:], logits[:, 7:])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens(24, seed=3))
assert abs(loss.item() - math.log(256)) < 0.1
print("before training the loss is that of guessing, log 256, to within 0.1")

# %% [markdown]
# ## 3 · Patterns as architecture
#
# The papers write a model as a string: one letter per layer, spaces and × as it pleases them.
# `expand_pattern` spells it out. Cheems has seven SSD modules for every InnerFuncAttn, and an
# expert layer after each (WM §3.4); with the 24 layers of Table 7, where a layer is a pair of
# letters, that is seven pairs SE and one pair IE, three times over.

# %%
for name, layer in LAYERS.items():
    print(f"{name}  {layer.name}")
assert expand_pattern("(SE × 7 + IE) × 3") == 3 * "SESESESESESESEIE"
assert preset("cheems-320m").pattern == 3 * "SESESESESESESEIE"

# %%
systems = {
    "LlaMa": "AH × 24",
    "Mamba-2": "SH × 24",
    "Jamba": "(SH SH SH SH AH SH SH SH) × 3",
    "OTCE": "SM + SR × 11 + AR × 2 + SR × 8 + SM + AM",
    "Cheems": "(SE × 7 + IE) × 3",
    "Doge": "IEE × 16",
}
shades = {"S": 0, "A": 1, "I": 3, "M": 5, "R": 4, "H": 4, "E": 2}
fig, ax = plotting.figure(size=(12, 4.2))
for row, pattern in enumerate(systems.values()):
    for i, letter in enumerate(expand_pattern(pattern)):
        colour = plotting.COLORS[shades[letter]]
        mixes = letter in "SAI"
        ax.broken_barh([(i, 0.92)], (-row - 0.4, 0.8), facecolor=colour, alpha=1 if mixes else 0.35)
        ax.text(i + 0.46, -row, letter, ha="center", va="center", fontsize=9,
                color="white" if mixes else plotting.INK)  # fmt: skip
ax.set_yticks([-row for row in range(len(systems))], list(systems))
ax.set(xlim=(-0.3, 48.3), xlabel="layer")
ax.spines["left"].set_visible(False)
ax.tick_params(axis="y", length=0)
plotting.save(
    fig,
    "07_patterns",
    "Six rows of 48 coloured cells, one per layer, for LlaMa, Mamba-2, Jamba, OTCE, Cheems and "
    "Doge. LlaMa alternates attention and experts, Mamba-2 states and experts; Jamba, OTCE and "
    "Cheems are rows of states with few cells of attention: in the fifth pair of each eight, in "
    "the middle and at the end, and in the eighth pair.",
)

# %% [markdown]
# (Doge is described in one sentence, WM §5: several E after each I. Sizes and length are ours.)
#
# A table of the papers can now be checked for itself. WM Table 2 and OTCE Table 5 print, beside
# each row, which share of the layers are experts. OTCE's E is a routed mixture, R here.

# %%
wm_table_2 = {
    "SMSMSMSMSMSMSMAM": 0,
    "SE SMSMSMSMSMSMAM": 6.25,
    "SMSMSMSMSMSMSMAE": 6.25,
    "SE SMSMSMSMSMSMAE": 12.5,
    "SM SE SE SE SE SE SEAM": 37.5,
    "SE SE SE SE SE SE SE AE": 50,
}
otce_table_5 = {
    "SM SM SM SM AM SM SM AM": 0,
    "SE SM SM SM AM SM SM AM": 6.25,
    "SM SM SM SM AE SM SM AM": 6.25,
    "SE SM SM SM AM SM SM AE": 12.5,
    "SM SE SE SE AM SM SM AM": 18.75,
    "SM SE SM SE AM SE SM SE": 25,
    "SM SE SE SE AE SE SM AM": 31.25,
    "SM SE SE SE AE SE SE AM": 37.5,
    "SE SE SE SE AE SE SE AE": 50,
}
for row, printed in (wm_table_2 | otce_table_5).items():
    letters = expand_pattern(row.replace("E", "R") if row in otce_table_5 else row)
    share = 100 * sum(letter in "ER" for letter in letters) / len(letters)
    assert share == printed and len(letters) == 16
print(f"{len(wm_table_2)} rows of WM Table 2 and {len(otce_table_5)} of OTCE Table 5: ", end="")
print("8 pairs each, and the printed share of experts")
stranger = [row for row in otce_table_5 if expand_pattern(row)[-2] == "S"]
assert stranger == ["SM SE SM SE AM SE SM SE"]

# %% [markdown]
# One row of OTCE's table is not an OTCE: it ends in a state layer, where all others, and the
# paper's own argument, end in attention.
#
# A string can be wrong. What is wrong with it is said at once, and by name:

# %%
for pattern, changes in (
    ("SESQ", {}),
    ("ME × 4", {}),
    ("SE + × 2", {}),
    ("(SE × 2", {}),
    ("SEIE", dict(n_neurons=3072)),
    ("SRAR", dict(k_experts=5)),
):
    try:
        ModelConfig(pattern=pattern, **changes)
    except ValueError as error:
        print(f"{pattern:9} {str(error).partition('; there are')[0]}")

# %% [markdown]
# ## 4 · Why states before attention
#
# OTCE orders its layers by a story of reading: observe, think, conceive, express. Put plainly: a
# state layer gathers, attention picks out what was gathered. There is a task that shows it. A row
# holds keys and values in turn, then some keys again, and each has to be answered with its value:
#
# > k₁ v₁ k₂ v₂ … k₈ v₈ | k₅ → v₅, k₁ → v₁, …
#
# Attention finds a token by its content. But the token that holds the answer, $v_5$, does not
# contain $k_5$: its neighbour does. Someone has to tell $v_5$ first who stands before it. That is
# local work, and a state layer (here with its convolution, `position="conv"`) does it; after it,
# one look is enough. In the other order attention looks before anything was gathered, and the state
# layer behind it would have to keep eight pairs in a state of fixed size.


# %%
def recall(batch, generator, pairs=8, kinds=32):
    """Keys 0..31 and values 32..63 in turn, then the keys again; targets -100 where none is."""
    keys = torch.rand(batch, kinds, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(kinds, 2 * kinds, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    asked, answers = keys.gather(1, order), values.gather(1, order)
    shown, questions = (torch.stack(t, -1).flatten(1) for t in ((keys, values), (asked, answers)))
    targets = torch.full((batch, 4 * pairs), -100)
    targets[:, 2 * pairs :: 2] = answers
    return torch.cat([shown, questions], 1), targets


def learn_to_recall(pattern, steps, position="conv", seed=0):
    """Train two layers on `recall`; the share of right answers every 25 steps."""
    _ = torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = dict(vocab_size=64, d_model=64, n_heads=2, d_state=16, tie_embeddings=False)
    model = CausalLM(ModelConfig(pattern=pattern, position=position, **sizes)).float()
    optimizer = torch.optim.AdamW(model.parameters())
    right = []
    for step in range(steps):
        ids, targets = recall(32, generator)
        logits, _ = model(ids)
        if step % 25 == 24:
            right.append((logits.argmax(-1) == targets)[targets >= 0].double().mean().item())
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return right


assert learn_to_recall("SA", 200)[-1] > 0.8 > 0.4 > learn_to_recall("AS", 200)[-1]
print("after 200 steps: S before A answers more than 80 % rightly, A before S less than 40 %")

# %%
orders = record("07_orders")
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
for ax, position in zip(axes, ("conv", "rope"), strict=True):
    for i, (pattern, runs) in enumerate(orders["right"][position].items()):
        runs = torch.tensor(runs)
        at = [25 * (n + 1) for n in range(runs.shape[1])]
        ax.plot(at, runs.T, color=plotting.COLORS[i], linewidth=0.8, alpha=0.5)
        ax.plot(at, runs.median(0).values, color=plotting.COLORS[i], label=pattern)
    ax.axhline(1 / 8, color=plotting.QUIET, linewidth=1, linestyle=":")
    source = {"conv": "convolution", "rope": "rotation"}[position]
    ax.set(title=f"S knows positions by {source}", xlabel="training step", ylim=(0, 1.03))
axes[0].set_ylabel("answered rightly")
axes[0].legend(ncols=2, loc="center right")
plotting.save(
    fig,
    "07_orders",
    "Share of right answers against training steps for the patterns SA, AS, AA, SS, SAS, five runs "
    "each; left with a convolution in S, right with rotary positions. With the convolution SA and "
    "SAS are at 1 after 100 to 200 steps, the others stay near 0.2. With rotation SA gets there a "
    "little later, SAS in three runs of five.",
)

# %%
final = {
    position: {pattern: sorted(run[-1] for run in runs) for pattern, runs in patterns.items()}
    for position, patterns in orders["right"].items()
}
assert min(final["conv"]["SA"] + final["conv"]["SAS"]) > 0.9
assert min(final["rope"]["SA"]) > 0.9 and sum(right > 0.9 for right in final["rope"]["SAS"]) == 3
assert all(max(final[source][p]) < 0.5 for source in final for p in ("AS", "AA", "SS"))
print("in the record SA is above 0.9 in every run, SAS in every one with the convolution and in")
print("three of five with rotation; AS, AA and SS are below 0.5 in every run")

# %% [markdown]
# (`python book/records.py 07_orders`: five runs each, thin; the thick line is their median; dotted:
# guessing among the eight values shown.)
#
# Two things to read off. *State before attention is what matters*: SA learns what AS does not, with
# either source of position. (Two layers of attention could do it as well, one copying and one
# looking up; in 400 steps they do not find it.) And *a state layer at the end is no obstacle*: SAS
# ends where SA does, for the residual stream carries what attention found past the last layer. Only
# with rotation, two of its five runs have not found the way yet. OTCE argues that a model should
# not end in a state layer (§3.3), and so does Ch:
#
# > "Considering that the SSD module at the end of the model will lead to knowledge routing bias
# > within a certain range, the SSD module is not used at the end of the model." (Ch §3.4)
#
# The evidence is OTCE Table 2: two models of 8 pairs, SM at the end or AM, perplexity 2.53 and 2.51
# after pre-training and 1.98 and 1.69 after fine-tuning. That is one run of each, of a model that
# has one layer of attention against one that has two; it does not separate *where* from *how many*.
#
# ## 5 · What it costs: parameters
#
# A model of 320 million parameters cannot be looked at on a laptop, but it can be counted: every
# layer is a handful of matrices. On the *meta device* tensors have shapes and no contents, so
# `count_parameters` makes the layers without their memory. Beside it, the same by hand; $h$ heads
# of width $p$, $g$ groups of keys, $e = r^2$ neurons behind $h_r$ heads of queries of width $q$:


# %%
def by_hand(c, letter):
    """The parameters of one layer, from its equations."""
    d, f, h, p = c.d_model, c.d_ff, c.n_heads, c.d_model // c.n_heads
    key = (c.n_kv_heads or h) * p  # width of all keys together
    wide = h * (c.d_head or p)  # width inside S
    e, r, heads, q = c.n_neurons, math.isqrt(c.n_neurons), c.n_retrieval_heads, c.d_query

    def ssd(wide, groups, conv):
        channels = wide + 2 * groups * c.d_state
        return d * (channels + h) + wide * d + 3 * h + conv * channels

    def retrieval(width):
        return width * heads * q + heads * r * q

    value = {
        "retrieved": d * h * (p // 2) + h * c.n_values * (p // 2 + p),
        "ssd": ssd(d, 1, 0),
        "linear": d * key,
    }[c.inner]
    private = c.d_private or d // 2
    return {
        "S": ssd(wide, c.n_groups, c.d_conv if c.position == "conv" else 0),
        "A": 2 * d * d + 2 * d * key,
        "I": 2 * d * d + d * key + value + (d * h + 2 * h if c.mask == "content" else 0),
        "M": 2 * d * f,
        "G": 3 * d * f,
        "D": 3 * d * f,
        "R": c.n_experts * (d + 3 * d * f),
        "H": c.n_experts * (d + 3 * d * f) + 3 * d * f,
        "C": c.n_experts * (d + 2 * d * f) + d * f,
        "X": c.n_experts * (d + 3 * d * f + d * d) + 3 * d * f,
        "P": retrieval(d) + 2 * e * d,
        "K": 3 * d * f + d * private + retrieval(private) + e * (2 * private + d),
        "E": 2 * d * f + retrieval(d) + 2 * e * d,
    }[letter]


published = ["llama-2-7b", "mistral-7b", "mixtral-8x7b", "jamba-52b"]
papers = [
    f"{family}-{size}"
    for size in ("320m", "1.3b")
    for family in ("llama", "mamba2", "jamba", "cheems")
]
others = ["cheems-v1-1.3b", "doge-320m", "otce-281m", "jamba-283m", "otce-seimoe-1b"]
others += ["otce-ccdmoe-1b", "otce-ecdmoe-1b", "otce-1b", "jamba-1b"]
totals = {}
print(f"{'preset':16} {'layers':>6} {'parameters':>15} {'active per token':>17}")
for name in papers + others + published:
    c = preset(name)
    counts = count_parameters(c)
    for letter in set(c.pattern):
        assert counts[letter].total == c.pattern.count(letter) * by_hand(c, letter), (name, letter)
    totals[name] = tuple(sum(part[i] for part in counts.values()) for i in (0, 1))
    print(f"{name:16} {len(c.pattern):6} {totals[name][0]:15,} {totals[name][1]:17,}")

assert totals["llama-2-7b"][0] == 6_738_415_616  # as published
assert totals["mistral-7b"][0] == 7_241_732_096
assert totals["mixtral-8x7b"][0] == 46_702_792_704
for name in papers:
    size = 320e6 if "320m" in name else 1.3e9
    assert abs(totals[name][0] / size - 1) < 0.01

# %% [markdown]
# What these numbers say, and what they do not:
#
# - **Llama 2, Mistral and Mixtral** come out to the last digit. Their sizes are public, so this
#   checks the counting.
# - **The eight models of WM Table 7** lie within 1 % of their names *because we chose `d_ff` so*:
#   the table gives widths, heads, states and experts, but not the feed-forward width. That it can
#   be chosen says that the table is possible, no more. It also shows a price. The table's caption
#   wants total and active parameters of the four models to be close; in total they are, in activity
#   they are not. With 8,281 experts of width 2,048 in each of 24 layers, Cheems-1.3B has 814
#   million parameters in its tables of neurons, and 0.49 billion at work on a token, where
#   LlaMa-1.3B has 0.82.
# - **OTCE Table 1** gives all sizes but the vocabulary: 283M for its Jamba, 281M for OTCE. With
#   NeoX's vocabulary ours have 185M and 184M. The difference between the two, a state layer against
#   an attention layer, is 2M there and 1.1M here: Mamba's layer has a gate that ours does not.
# - **Jamba (52B)** comes to 50.5B for the same reason: 28 layers without the gate's 33.6M each.

# %%
tables = 24 * 2 * 8281 * 2048
assert round(tables / 1e6) == 814
difference = totals["jamba-283m"][0] - totals["otce-281m"][0]
assert round(difference / 1e5) == 11
gates = 28 * 4096 * 8192
assert 51.3e9 < totals["jamba-52b"][0] + gates < 52e9
print("the four remarks above hold")

# %% [markdown]
# ## 6 · What it costs: FLOPs per token
#
# A matrix of $m \times n$ parameters costs $2mn$ operations for a token that meets it: a
# multiplication and an addition per entry. Only what happens *between* tokens is not counted by
# parameters: attention's scores and sums, $4 l d$ per token at context $l$, and SSD's chunks (of
# $c$ tokens, say), $2(c\,g\,n + c\,hp + 2\,n\,hp)$, which know no $l$ at all. Torch can count the
# products of matrices that a run really makes:


# %%
def flops_by_hand(c, letter, length):
    """Operations per token in matrix products of one layer, over a sequence of this length."""
    d, h, p = c.d_model, c.n_heads, c.d_model // c.n_heads
    key, wide = (c.n_kv_heads or h) * p, h * (c.d_head or p)
    chunk, heads, r = c.chunk_size, c.n_retrieval_heads, math.isqrt(c.n_neurons)
    keys_of_neurons = heads * r * c.d_query
    match letter:
        case "S":
            maps = 2 * d * wide + 2 * d * c.n_groups * c.d_state + d * h
            return 2 * (maps + chunk * c.n_groups * c.d_state + (chunk + 2 * c.d_state) * wide)
        case "A":
            return 2 * (2 * d * d + 2 * d * key) + 4 * length * d
        case "I":  # with retrieved values: queries, scores and sums over the table
            table = d * h * (p // 2) + h * c.n_values * (p // 2 + p)
            return 2 * (2 * d * d + d * key + table) + 4 * length * d
        case "M":
            return 4 * d * c.d_ff
        case "R" | "H":
            experts = c.k_experts + (letter == "H")
            return 2 * (d * c.n_experts + 3 * experts * d * c.d_ff)
        case "E":
            return 2 * (2 * d * c.d_ff + d * heads * c.d_query + keys_of_neurons)


def counted(config, length):
    model, ids = CausalLM(config), tokens(1, length)
    # torch does not count its fused attention: MATH writes it as products
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids)
    return counter.get_total_flops() / length


def predicted(c, length):
    layers = sum(flops_by_hand(c, letter, length) for letter in c.pattern)
    return layers + 2 * c.vocab_size * c.d_model  # and the logits


for name in ("llama-tiny", "mamba2-tiny", "jamba-tiny", "cheems-tiny"):
    for length in (128, 256):
        assert predicted(preset(name), length) == counted(preset(name), length), name
print("FLOPs per token, by hand = counted: LlaMa, Mamba-2, Jamba, Cheems, at 128 and 256 tokens")

# %% [markdown]
# (The neurons that E retrieves are read by an embedding bag, which torch's counter does not count:
# $4 h_r k d$ per token and layer, about $2 \cdot 10^5$ for the 64 neurons of Cheems-320M, small
# beside the rest.)
#
# So the counting can be trusted where nothing can be run. Four systems of 320 million parameters:

# %%
parts = ["S", "A, I: maps", "A, I: looking back", "M, H, E", "logits"]
colours = dict(zip(parts, [plotting.COLORS[i] for i in (0, 3, 1, 2, 5)], strict=True))
four = {"LlaMa": "llama", "Mamba-2": "mamba2", "Jamba": "jamba", "Cheems": "cheems"}


def flops_by_part(c, length):
    total = dict.fromkeys(parts, 0.0)
    for letter in c.pattern:
        cost = flops_by_hand(c, letter, length)
        looking = 4 * length * c.d_model if letter in "AI" else 0
        total["A, I: looking back"] += looking
        part = {"S": "S", "A": "A, I: maps", "I": "A, I: maps"}.get(letter, "M, H, E")
        total[part] += cost - looking
    return total | {"logits": 2 * c.vocab_size * c.d_model}


fig, axes = plotting.figure(1, 3, size=(12, 4.4))
for ax, length in zip(axes, (1024, 16_384, 131_072), strict=True):
    for i, family in enumerate(four.values()):
        bottom = 0
        for part, flops in flops_by_part(preset(f"{family}-320m"), length).items():
            ax.bar(i, flops / 1e9, 0.7, bottom=bottom, color=colours[part],
                   label=part if i == 0 else None)  # fmt: skip
            bottom += flops / 1e9
    ax.set_xticks(range(4), list(four), rotation=30)
    ax.set_title(f"{length:,} tokens")
axes[0].set_ylabel("GFLOP per token")
axes[0].set_ylim(0, 0.95)
axes[0].legend(loc="upper right", fontsize=11)
plotting.save(
    fig,
    "07_flops",
    "Stacked bars of floating-point operations per token for LlaMa, Mamba-2, Jamba and Cheems of "
    "320 million parameters, at 1,024, 16,384 and 131,072 tokens. At 1,024 all are alike, near 0.4 "
    "GFLOP. At 131,072 LlaMa takes 10, nearly all of it in looking back, Jamba and Cheems 1.6, and "
    "Mamba-2 still 0.4.",
)
costs = {name: predicted(preset(f"{family}-320m"), 131_072) for name, family in four.items()}
assert 5 < costs["LlaMa"] / costs["Cheems"] < 8 and 4 < costs["Cheems"] / costs["Mamba-2"] < 5

# %% [markdown]
# At a thousand tokens the four cost about the same. At a hundred thousand LlaMa does little else
# than look back. Cheems has an eighth of its attention layers, and an eighth of that cost: less,
# and not none. (A prefill is counted as torch does it, with all $l^2$ scores; a kernel that leaves
# out the future halves the orange part.)
#
# ## 7 · What it remembers
#
# To write one more token a model needs what it has kept of those before. A layer of attention keeps
# a key and a value per token, a state layer one state. `model(ids)` returns all of it as one value,
# and takes it back:

# %%
config = replace(preset("cheems-tiny"), position="conv", inner="ssd")
_ = torch.manual_seed(2)
model = CausalLM(config)
ids = tokens(2, 20, seed=4)
with torch.no_grad():
    whole, _ = model(ids)
    start, cache = model(ids[:, :13])  # a prompt
    more, after = model(ids[:, 13:17], cache=cache)  # more of it
    steps = []
    for t in range(17, 20):  # token by token
        step, after = model(ids[:, t : t + 1], cache=after)
        steps.append(step)
    check("prompt, rest, single tokens = one pass", torch.cat([start, more, *steps], 1), whole)
    again, _ = model(ids[:, 13:17], cache=cache)
    check("a cache may be used twice", again, more)
    forgot, _ = model(ids[:, 13:17], cache=cache._replace(n_tokens=torch.zeros(2).long()))
    _ = must_differ("positions that start again at 0", forgot, more)
    caches = [layer for layer in cache.layers if layer is not None]
    print(f"{len(caches)} caches for {sum(c in 'SAI' for c in config.pattern)} mixers")

# %% [markdown]
# Prompts of different lengths go into one batch: the short one is filled up, on either side, and a
# mask says which tokens are real. What stands at the others makes no difference.

# %%
long, short = tokens(1, 9, seed=5), tokens(1, 6, seed=6)
filled = torch.cat([long, torch.cat([tokens(1, 3, seed=7), short], 1)])
mask = torch.tensor([[True] * 9, [False] * 3 + [True] * 6])
with torch.no_grad():
    both, cache = model(filled, padding_mask=mask)
    alone, cache_alone = model(short)
    check("padded = alone", both[1:, 3:], alone)
    next_both, _ = model(tokens(2, 1, seed=8), cache=cache)
    next_alone, _ = model(tokens(2, 1, seed=8)[1:], cache=cache_alone)
    check("and so is the token after it", next_both[1:], next_alone)
    _ = must_differ("a mask that was forgotten", model(filled)[0][1:, 3:], alone)
print("positions of the next tokens:", cache.n_tokens.tolist())

# %% [markdown]
# How large does that get? `cache_bytes` computes it from the config, part by part, and for the
# models above the prediction is the size of what they hold:

# %%
for name in ("llama-tiny", "mamba2-tiny", "jamba-tiny", "cheems-tiny", "cheems-v1-tiny"):
    model = CausalLM(preset(name))
    with torch.no_grad():
        for context in (1, 100):
            _, cache = model(tokens(3, context))
            bytes_ = cache_bytes(preset(name), context, batch=3, dtype=torch.float64)
            assert cache.nbytes() == bytes_.total(), name
print("cache_bytes = bytes of the tensors: 5 patterns, at 1 and 100 tokens")

lecture = {"llama-2-7b": 128, "mistral-7b": 32, "mixtral-8x7b": 32, "jamba-52b": 4}  # GB
for name, printed in lecture.items():
    gib = cache_bytes(preset(name), 256 * 1024).keys_values / 2**30
    print(f"{name:13} keys and values at 262,144 tokens in 16 bit: {gib:g} GiB")
    assert gib == printed

# %% [markdown]
# That is the lecture's table (L22, "Jamba"), to the digit, if GB is read as $2^{30}$ bytes. It
# counts keys and values only. What Jamba keeps besides in its 28 state layers is 16 MiB here,
# whatever the context; 9 MiB as published, where states are held in 16 bit. And Mistral looks back
# 4,096 tokens at most, so that a cache that drops the rest would need half a GiB.

# %%
jamba = cache_bytes(preset("jamba-52b"), 256 * 1024)
assert 15 < (jamba.states + jamba.convolutions) / 2**20 < 16
assert cache_bytes(preset("mistral-7b"), 4096).keys_values == 2**29

contexts = [2**i for i in range(6, 21)]
fig, ax = plotting.figure(size=(10, 4.8))
ends = {"LlaMa": 0, "Jamba": 6, "Cheems": -6, "Mamba-2": 0}
for i, (name, family) in enumerate(four.items()):
    config = preset(f"{family}-320m")
    mib = [cache_bytes(config, context).total() / 2**20 for context in contexts]
    over = dict(linestyle=(0, (3, 3)), zorder=3) if name == "Jamba" else {}
    ax.loglog(contexts, mib, color=plotting.COLORS[i], **over)
    ax.annotate(name, (contexts[-1], mib[-1]), (8, 2 * ends[name]), textcoords="offset points",
                color=plotting.COLORS[i], va="center")  # fmt: skip
ax.set(xlabel="context, tokens", ylabel="MiB of cache, 16 bit", xlim=(64, 4e6))
plotting.save(
    fig,
    "07_cache",
    "Cache size against context on logarithmic axes for models of 320 million parameters. LlaMa's "
    "grows in proportion from 5 MiB to 70 GiB, Mamba-2's stays at 9 MiB, and Jamba's and Cheems's, "
    "which nearly coincide, begin at 8 MiB and from some thousand tokens on run parallel to "
    "LlaMa's, eight times lower.",
)

# %% [markdown]
# ## 8 · Writing
#
# To write is to run the model, choose the next id from its logits, append it, and go on. With
# *greedy* choice, the largest logit, there is exactly one right answer, and a strict test of
# everything above: 200 ids, chosen one at a time with the cache, must be those that a single pass
# over the finished text would choose.

# %%
_ = torch.manual_seed(3)
model = CausalLM(preset("cheems-tiny"))
prompt = text.text_to_ids("The dog")[None]
greedy = Sampling(temperature=0)
new = generate(model, prompt, 200, greedy)
with torch.no_grad():
    logits, _ = model(torch.cat([prompt, new], dim=1))
chosen_at_once = logits[:, prompt.shape[1] - 1 : -1].argmax(dim=-1)
check("one at a time, with cache = argmax of one pass", new, chosen_at_once)
best = logits[:, prompt.shape[1] - 1 : -1].topk(2).values
assert (best[..., 0] - best[..., 1]).min() > 1e-8  # so no tie was decided by rounding

first = next(stream(model, prompt, 200, greedy))  # the same, id by id
assert first == new[0, 0]

# %% [markdown]
# Greedy text repeats itself. So one draws, from $\mathrm{softmax}(\text{logits}/T)$: a temperature
# $T$ below 1 sharpens. `top_k` keeps the $k$ likeliest ids, `top_p` the smallest set of them that
# holds the probability $p$: few where the model is sure, many where it is not.

# %%
logits = torch.tensor([[3.0, 2.5, 1.0, 0.5, -1.0, -2.0]])
many = logits.expand(20_000, -1)
fig, axes = plotting.figure(1, 3, size=(12, 3.8))
for ax, (title, options) in zip(
    axes,
    {
        "T = 1": {},
        "T = 0.5": dict(temperature=0.5),
        "T = 1, top_p = 0.8": dict(top_p=0.8),
    }.items(),
    strict=True,
):
    p = (logits[0] / options.get("temperature", 1)).softmax(0)
    keep = p.cumsum(0) - p < options.get("top_p", 1)  # the ids are sorted already
    p = p * keep / (p * keep).sum()
    drawn = sample(many, Sampling(generator=torch.Generator().manual_seed(0), **options))
    share = drawn.bincount(minlength=6) / len(drawn)
    assert (share - p).abs().max() < 0.015 and not share[~keep].any()
    ax.bar(range(6), p, color=plotting.COLORS[0])
    ax.set(title=title, xlabel="id", ylim=(0, 0.8))
axes[0].set_ylabel("probability")
plotting.save(
    fig,
    "07_sampling",
    "Three bar charts of the probabilities of six ids. With temperature 1 they fall from 0.54 to "
    "near 0; with temperature 0.5 the first has 0.72; with top_p 0.8 only the first two are left.",
)

# %% [markdown]
# ## 9 · Training on real text
#
# The text is the reference manual that Python carries inside itself, about 465,000 bytes of
# English and code; a model reads bytes, so there is no tokenizer to explain. The last tenth is held
# out. Before training, know what has to be beaten. The *bigram* model counts which byte follows
# which, and predicts by the counts:

# %%
manual = text.text_to_ids(text.read_text())
seen_part, held_out = split_text(manual, 0.1)

counts = torch.full((256, 256), 0.1)  # nothing is impossible
pairs = torch.ones(len(seen_part) - 1)
_ = counts.index_put_((seen_part[:-1], seen_part[1:]), pairs, accumulate=True)
shares = counts / counts.sum(dim=1, keepdim=True)
bigram = -shares[held_out[:-1], held_out[1:]].log().mean().item()  # nats per byte
assert 2.0 < bigram < 2.6
print(
    f"guessing: log 256 = {math.log(256):.2f} nats per byte; the bigram model: between 2.0 and 2.6"
)

# %% [markdown]
# The loop is the usual one: draw windows, compute the cross-entropy of each next byte, clip the
# gradient, let AdamW make its step. The learning rate climbs linearly for a tenth of the steps,
# then falls as a cosine to a tenth of its peak (WM App. C.2). `cheems_ref/train.py` is short enough
# to be read in one sitting.

# %%
settings = TrainConfig(steps=150, batch_size=8, length=128, learning_rate=4e-3, evaluate_every=150)
rates = [learning_rate(step, settings) for step in range(settings.steps)]
assert max(rates) == rates[14] == 4e-3 and math.isclose(rates[-1], 4e-4)
assert all(a < b for a, b in pairwise(rates[:15])) and all(a > b for a, b in pairwise(rates[15:]))

home = Path("../runs/cheems")  # this run's checkpoints, and what the model writes
shutil.rmtree(home, ignore_errors=True)
_ = torch.manual_seed(0)
config = ModelConfig(pattern="SE × 3 + IE", d_model=96, d_ff=192)
cheems = CausalLM(config).float()
run = train(cheems, manual, settings, directory=home, bar=False)

((_, loss),) = run.evaluations
assert loss < bigram - 0.05
print("after 150 steps a small Cheems predicts the held-out text better than the bigram model")

piece = held_out[:129]  # is that loss what we think it is? By hand, on one window:
with torch.no_grad():
    scores = cheems(piece[None, :-1])[0][0].double().log_softmax(dim=-1)
by_hand = -scores.gather(1, piece[1:, None]).mean()
measured = torch.tensor(evaluate(cheems, piece, length=128))
check("held-out loss = mean -log p of the next byte", measured, by_hand, tol=1e-5)
present = -scores.gather(1, piece[:-1, None]).mean()
_ = must_differ("p of the byte that was just read", present, by_hand)

# %%
prompt = text.text_to_ids("The ")[None]
warm = Sampling(temperature=0.7, generator=torch.Generator().manual_seed(0))
new = generate(cheems, prompt, 300, warm)
written = "The " + text.ids_to_text(new[0])
_ = (home / "written.txt").write_text(written + "\n", encoding="utf-8")
assert new.shape == (1, 300)
print("it wrote 300 bytes: runs/cheems/written.txt")

# %% [markdown]
# What it wrote is not shown here, for it depends on this machine's last digits; it stands in the
# file, and the model beside it. From the project's folder you can let it go on:
#
#     .venv/bin/python -m cheems_ref generate --run runs/cheems --prompt "The "
#
# A hundred and fifty steps are twenty seconds. The same loop for 2,500 steps, with the whole
# pattern of Cheems, was recorded:

# %%
long_run = record("07_training")
steps = [5 * i for i in range(len(long_run["losses"]))]
fig, ax = plotting.figure(size=(10, 4.6))
ax.plot(steps, long_run["losses"], color=plotting.COLORS[5], linewidth=1, label="one batch")
ax.plot(*zip(*long_run["evaluations"], strict=True), "o-", color=plotting.COLORS[0],
        markersize=4, label="held-out text")  # fmt: skip
ax.axhline(long_run["bigram"], color=plotting.COLORS[1], linestyle="--", label="bigram model")
ax.set(xlabel="training step", ylabel="nats per byte", ylim=(0, 4))
ax.legend()
plotting.save(
    fig,
    "07_training",
    "Loss in nats per byte against training step, for 2,500 steps. The held-out loss falls below "
    "that of the bigram model, 2.3, within the first 125 steps and ends at about 1.2; the losses "
    "of single batches scatter around it and end somewhat lower.",
)

# %%
final = long_run["evaluations"][-1][1]
assert final < 0.65 * long_run["bigram"]
print(f"{long_run['pattern']}: {long_run['parameters']:,} parameters")
print(f"{long_run['bytes']:,} bytes of text; held out: {final / math.log(2):.2f} bits per byte\n")
for start, continuation in long_run["samples"]:
    print(f"[{start}]{continuation}\n")

# %% [markdown]
# (`python book/records.py 07_training`, seed 0; in brackets the prompt, temperature 0.7, top_p
# 0.95.) Words, clauses, the manual's markup and its way of talking are there; sense is not. Four
# hundred thousand bytes, read a dozen times, teach the form of a language and not its matter. From
# the gap between the two curves you can also see the model begin to learn the text by heart.
#
# ### A run that is killed
#
# Training takes hours, machines fail. A checkpoint holds all that the next step depends on: the
# parameters, AdamW's two moments of each, the number of the step, and the state of the random
# numbers that draw the windows. It is written beside its place and renamed into it when it is
# complete. So a run that is killed and started again goes through *the same* losses, to the last
# bit:


# %%
class Killed(Exception):
    pass


def killed_at(step):
    def after_step(run):
        if run.step == step:
            raise Killed

    return after_step


def small_model():
    _ = torch.manual_seed(1)
    return CausalLM(ModelConfig(pattern="SEIE", d_model=32, n_neurons=64, d_ff=64)).float()


small = TrainConfig(steps=12, batch_size=2, length=32, checkpoint_every=4, evaluate_every=6)
short = manual[:20_000]
uninterrupted = train(small_model(), short, small, bar=False)
with TemporaryDirectory() as folder:
    try:
        train(small_model(), short, small, directory=folder, bar=False, after_step=killed_at(6))
    except Killed:
        print("killed after step 6; kept:", *sorted(path.name for path in Path(folder).iterdir()))
    resumed = train(small_model(), short, small, directory=folder, bar=False)
assert resumed.losses == uninterrupted.losses and len(resumed.losses) == 12
assert resumed.evaluations == uninterrupted.evaluations
print("resumed: the same 12 losses, bit for bit")
other_seed = train(small_model(), short, replace(small, seed=1), bar=False)
assert other_seed.losses != uninterrupted.losses
print("another seed draws other windows: other losses")

# %% [markdown]
# ## 10 · Time to write
#
# Section 7 said what a token has to be compared with: a state layer's state, always the same size;
# attention's keys and values, as many as there were tokens. The operations say it exactly:


# %%
def flops_of_one_more_token(config, context):
    model = CausalLM(config)
    with torch.no_grad():
        _, cache = model(tokens(1, context))
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(tokens(1, 1), cache=cache)
    return counter.get_total_flops()


for name in four.values():
    config = preset(f"{name}-tiny")
    near, far = (flops_of_one_more_token(config, context) for context in (64, 512))
    looking_layers = sum(letter in "AI" for letter in config.pattern)
    assert far - near == 4 * config.d_model * looking_layers * (512 - 64)
print("one more token, 448 tokens later: 4 d operations more per token and layer of attention")
print("in LlaMa, Jamba and Cheems; in Mamba-2 none")

# %%
decoding = record("07_decoding")["decoding"]
fig, ax = plotting.figure(size=(10, 4.6))
for i, (name, family) in enumerate(four.items()):
    times = decoding["milliseconds"][family]
    ax.semilogx(decoding["sizes"], times, "o-", color=plotting.COLORS[i])
    ax.annotate(name, (decoding["sizes"][-1], times[-1]), (10, 0), textcoords="offset points",
                color=plotting.COLORS[i], va="center")  # fmt: skip
ax.set(xlabel="context, tokens", ylabel="ms per token", xlim=(None, 2.4 * decoding["sizes"][-1]))
ax.set_ylim(0, None)
ax.set_xticks(decoding["sizes"], [f"{size:,}" for size in decoding["sizes"]])
ax.minorticks_off()
plotting.save(
    fig,
    "07_decoding",
    "Milliseconds per generated token against context, for four models of equal parameter count. "
    "LlaMa's time grows fourfold from 256 to 8,192 tokens, Mamba-2's stays level, Jamba's and "
    "Cheems's rise by half.",
)
times = {name: decoding["milliseconds"][family] for name, family in four.items()}
assert times["Mamba-2"][-1] < 1.15 * times["Mamba-2"][0]
assert times["LlaMa"][-1] / times["LlaMa"][0] > 2 > times["Cheems"][-1] / times["Cheems"][0]

# %% [markdown]
# (`python tests/bench/bench_model.py --json figures/records/07_decoding.json`: 7.9 million
# parameters each, batch 1, on 2 CPU cores.) At short contexts these small models mostly wait for
# Python: Cheems makes more, smaller steps per layer than Mamba-2, and it shows. What grows, grows
# in attention.
#
# ## 11 · As printed
#
# - WM App. C.2 names the smaller scale 360M; its tables say 320M. It gives 2e-4 as the
#   largest learning rate; Table 7 gives 3e-4 for the smaller models. `TrainConfig` names the
#   papers' 2e-4 and takes its own for models a hundred times smaller.
# - Ch Table 2 and Figure 6 are of models with 37.5 % state layers, 12.5 % attention and 50 %
#   feed-forward, that is 3 : 1. The architecture in the text is 7 : 1, which is not the same:

# %%
pattern = expand_pattern("SE × 7 + IE")
share = {letter: 100 * pattern.count(letter) / len(pattern) for letter in "SIE"}
print("Cheems, 7 : 1:", share)
assert share == {"S": 43.75, "I": 6.25, "E": 50}
pattern = expand_pattern("(SM × 3 + AM) × 2")
assert [100 * pattern.count(letter) / len(pattern) for letter in "SAM"] == [37.5, 12.5, 50]

# %% [markdown]
# - WM Table 7 gives Cheems 3,072 and 8,192 experts. Product keys need a square (chapter 06): with
#   $\lfloor\sqrt{e}\rfloor$ keys per half, as Listing 8 has it, 47 and 92 of them can never be
#   found. The presets have the next squares:

# %%
for printed, name in ((3072, "cheems-320m"), (8192, "cheems-1.3b")):
    r = math.isqrt(printed)
    print(f"{printed}: {printed - r * r} out of reach; the next square is {(r + 1) ** 2}")
    assert preset(name).n_neurons == (r + 1) ** 2

# %% [markdown]
# - OTCE Table 8 has Jamba's feed-forward width adjusted until both models are of one size, and does
#   not give it. It can be done: with `d_ff` 4,608 against 2,304 both have one billion parameters,
#   within 1 %, as the table in section 5 shows.
#
# ## Summary
#
# - A block adds to the stream what its layer makes of a normalised copy; a model is a loop over the
#   letters of a pattern.
# - The order of the letters matters: states gather what attention then finds.
# - Parameters, FLOPs and cache bytes are sums over letters, exact to the digit.
# - Attention's cost and cache grow with the context; a hybrid of 7 : 1 pays an eighth of that.
# - One call is prefill, continued prefill and decoding; greedy decoding equals one full pass.
# - A checkpoint that holds all the next step depends on makes a killed run end like one that was
#   not.
#
# ## Exercises
#
# **1.** (easy) Nemotron-H is mostly Mamba-2 layers and MLPs, with few layers of attention. Write a
# pattern of 24 letters: 12 pairs of a sequence mixer and M, attention in the fourth, eighth and
# twelfth pair, states in the others. What share of LlaMa's keys and values does it keep?

# %% tags=["exercise"]
pattern_of_mine = ...
### BEGIN SOLUTION
pattern_of_mine = "(SM × 3 + AM) × 3"
### END SOLUTION

# %% tags=["check"]
letters = expand_pattern(pattern_of_mine)
assert len(letters) == 24, "24 letters: 12 pairs"
assert [i for i in range(0, 24, 2) if letters[i] == "A"] == [6, 14, 22], "pairs 4, 8 and 12"
mine, llama = (
    cache_bytes(ModelConfig(pattern=pattern), 1000).keys_values for pattern in (letters, "AM × 12")
)
assert mine / llama == 1 / 4
print("a quarter")

# %% [markdown]
# **2.** (easy) From which context on does Cheems-320M's cache hold more bytes in keys and values
# than in states? Write `crossing(config)`: the smallest such number of tokens, without a loop over
# contexts.


# %% tags=["exercise"]
def crossing(config):
    ### BEGIN SOLUTION
    per_token = cache_bytes(config, 1).keys_values
    return cache_bytes(config, 0).states // per_token + 1
    ### END SOLUTION


# %% tags=["check"]
for name in ("cheems-320m", "jamba-1.3b"):
    config, t = preset(name), crossing(preset(name))
    assert cache_bytes(config, t).keys_values > cache_bytes(config, t).states, "not there yet"
    assert cache_bytes(config, t - 1).keys_values <= cache_bytes(config, t - 1).states, "not first"
print("crossed at the right token")

# %% [markdown]
# **3.** (medium) *Beam search* keeps the $w$ best texts so far, by the sum of their log
# probabilities. Our caches are values, with one row per text, so the rows of a cache can be
# chosen like those of any tensor. Write `choose_rows(cache, rows)` for a model of S and A layers
# without padding.


# %% tags=["exercise"]
def choose_rows(cache, rows):
    """The cache (a ModelCache) with its batch rows replaced by rows (a tensor of indices)."""

    ### BEGIN SOLUTION
    def chosen(part):
        if isinstance(part, torch.Tensor):
            return part[rows]
        if not isinstance(part, tuple):  # None, or the letters of the pattern
            return part
        parts = [chosen(inner) for inner in part]
        return tuple(parts) if type(part) is tuple else type(part)(*parts)

    return chosen(cache)
    ### END SOLUTION


# %% tags=["check"]
_ = torch.manual_seed(5)
model = CausalLM(preset("jamba-tiny"))
with torch.no_grad():
    _, cache = model(tokens(3, 10, seed=9))
    rows = torch.tensor([2, 0, 0, 1])
    ids = tokens(4, 1, seed=10)
    beam, _ = model(ids, cache=choose_rows(cache, rows))
    _, wanted = model(tokens(3, 10, seed=9)[rows])
    check("rows of a cache", beam, model(ids, cache=wanted)[0])

# %% [markdown]
# **4.** (hard) *Speculative decoding* writes several ids with a small model and lets the large one
# judge them all in one call: those are kept up to the first that the large model would not have
# chosen greedily, which is replaced by its choice. Write `speculate(large, small, prompt, n,
# ahead)` that returns exactly what `generate(large, prompt, n, Sampling(temperature=0))` does, with
# fewer calls of the large model. (The caches of S cannot be cut back; simplest is to go on from the
# last cache that is right, and to hand in the accepted ids once more.)


# %% tags=["exercise"]
def speculate(large, small, prompt, n, ahead=4):
    """Greedy ids (1, n) of the large model, and how often it was called."""
    ### BEGIN SOLUTION
    calls, ids = 0, prompt
    with torch.no_grad():
        _, before = large(prompt[:, :-1])  # of all but the last accepted id
        pending = prompt[:, -1:]  # accepted, but not yet in the cache
        while ids.shape[1] < prompt.shape[1] + n:
            guess = generate(small, ids, ahead, Sampling(temperature=0))
            logits, _ = large(torch.cat([pending, guess], 1), cache=before)
            calls += 1
            right = logits[:, pending.shape[1] - 1 :].argmax(-1)  # (1, ahead + 1)
            agree = int((right[:, :-1] == guess).long().cumprod(1).sum())
            accepted = right[:, : agree + 1]
            ids = torch.cat([ids, accepted], 1)
            pending = torch.cat([pending, accepted], 1)
            if pending.shape[1] > 16:  # carry the cache forward now and then
                _, before = large(pending[:, :-1], cache=before)
                pending = pending[:, -1:]
    return ids[:, prompt.shape[1] : prompt.shape[1] + n], calls
    ### END SOLUTION


# %% tags=["check"]
_ = torch.manual_seed(6)
large = CausalLM(preset("cheems-tiny"))
small = CausalLM(preset("mamba2-tiny"))
prompt = tokens(1, 5, seed=11)
wanted = generate(large, prompt, 24, Sampling(temperature=0))
for helper, at_most in ((large, 6), (small, 24)):
    written, calls = speculate(large, helper, prompt, 24)
    check("speculative = greedy", written, wanted)
    assert calls <= at_most, f"{calls} calls"
print("with a perfect helper 5 ids per call, with any helper the same ids")

# %% [markdown]
# ## Further reading
#
# - Lieber et al. (2024), *Jamba: A Hybrid Transformer-Mamba Language Model*. The first large
#   hybrid.
# - Waleffe et al. (2024), *An Empirical Study of Mamba-based Language Models*. Which ratio, and
#   why.
# - Zhang and Sennrich (2019), *Root Mean Square Layer Normalization*.
# - Leviathan et al. (2023), *Fast Inference from Transformers via Speculative Decoding*: exercise
#   4, with sampling.
# - Holtzman et al. (2020), *The Curious Case of Neural Text Degeneration*: why greedy text repeats,
#   and top_p.
