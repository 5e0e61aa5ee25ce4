# %% [markdown]
# # 07 · The Cheems language model
#
# **You can write a language model's architecture as a string of letters, and compute its costs by
# summing over them. By the end you'll have written the model as one loop, trained a small Cheems,
# and read what it writes.** You will be able to
#
# - add up a model's parameters and its cache letter by letter;
# - say what attention needs before it in a recall task;
# - check that a model with a cache computes the same as one without.
#
# You need chapters 03 to 06.
#
# Sources: *Wonderful Matrices* (WM) §3.4, Table 7, App. C.2; *Cheems* (Ch) §3.4, Table 2; Shi et
# al., *OTCE: Hybrid SSM and Attention with Cross Domain Mixture of Experts to construct
# Observer-Thinker-Conceiver-Expresser* (OTCE) §1, §3.3, Tables 1, 8; CMU 10-423 lecture 22 (L22).
# The code is in `cheems_ref/model.py` and `cheems_ref/train.py`. How to read ✓ and ✗: chapter 00.

# %% tags=["setup"]
import json
import math
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.utils.flop_counter import FlopCounterMode

from cheems_lab.training import train
from cheems_ref import plotting, text
from cheems_ref.budget import cache_bytes, count_parameters
from cheems_ref.config import SEQUENCE_MIXERS, ModelConfig, expand_pattern, preset
from cheems_ref.model import Block, CausalLM, Sampling, generate
from cheems_ref.presets import PRESETS
from cheems_ref.ssd import SSD
from cheems_ref.train import (
    TrainConfig,
    learning_rate,
    make_optimizer,
    random_windows,
    split_text,
)
from cheems_ref.verify import check, must_differ

torch.set_default_dtype(torch.float64)  # for the equalities; training is in float32
torch.set_num_threads(1)  # models as small as these gain little from more

# %% tags=["setup"]
FOUR = {"LlaMa": "llama", "Mamba-2": "mamba2", "Jamba": "jamba", "Cheems": "cheems"}


def tokens(*shape, seed=0, vocabulary=256):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def long_memory(model):
    """Let every state of a model decay e³ ≈ 20 times more slowly."""
    for module in model.modules():
        if isinstance(module, SSD):
            module.A_log.data -= 3
    return model


def read_record(name):
    return json.loads(Path(f"../experiments/records/{name}.json").read_text())


# %% [markdown]
# Here is the whole model. The upper row is its *pattern*, one letter per layer. The lower row is
# what each letter does.

# %% slide_title="One stream passes sixteen letters, and each adds something" tags=["figure"]
plotting.show_drawing(
    "07_stack",
    "A Cheems from left to right: bytes, embedding, sixteen letters S E S E and so on, the "
    "fifteenth an I, then norm, head, next byte. Below, one letter is opened: a copy of the stream "
    "z goes through norm and layer and is added back onto the stream.",
)

# %% [markdown] slide_title="Only S, A and I let tokens see each other"
# Here are the letters of this chapter:
#
# | letter | layer | in one line | chapter |
# |---|---|---|---|
# | S | SSD, the *state layer* | writes and reads a state that decays | 03, 04 |
# | A | attention | every token looks at itself and all tokens before it | 04, 05 |
# | I | inner-function attention | attention whose values are computed | 05 |
# | M, G | MLP, gated MLP | two maps, or three, around a nonlinearity | 06 |
# | R, H | routed experts | a router picks $k$ of $e$ experts per token; H adds a shared one | 06 |
# | E | CDMoE | retrieves single neurons behind a shared MLP | 06 |
#
# S, A and I are *sequence mixers*: in these layers tokens exchange information. All other layers
# process each token on its own. A **layer** is one letter, and a sequence mixer with the letter
# after it is a **pair**. The papers often count pairs: "24 layers" in WM Table 7 are 48 letters.

# %% [markdown] slide_title="Each layer adds to one stream, and none wrecks it"
# ## 1 · One block
#
# How do you stack forty layers so that each one adds something, and none wrecks what is already
# there? The *residual stream* carries one vector $z$ of width $d$ per token through the stack. A
# layer reads a normalised copy and adds its result:
#
# $$z \leftarrow z + \mathrm{layer}(\mathrm{norm}(z)), \qquad
#   \mathrm{norm}(z) = \frac{z}{\sqrt{\tfrac1d \sum_i z_i^2 + \varepsilon}} \circ w. \tag{7.1}$$
#
# This RMSNorm makes all vectors equally long, however large the stream has grown. Then each
# coordinate gets a learned weight $w$, which starts at 1.


# %% slide_title="A block adds what its layer makes of a normalised copy" slide_figure="07_stack"
def rms_norm(z, w, eps=1e-6):
    """Divide each vector by its root mean square, then weight it."""
    return z / (z.square().mean(-1, keepdim=True) + eps).sqrt() * w


# %% [markdown]
# A block is exactly equation 7.1. Normalising after the sum, as the first Transformers did, is
# a different function:

# %%
_ = torch.manual_seed(0)
block = Block("E", ModelConfig(pattern="SEIE", d_model=32, n_neurons=64, d_ff=64))
_ = torch.nn.init.uniform_(block.norm.weight, 0.5, 1.5)  # else a norm without w would pass
z = 3 * torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))  # (b, l, d)
with torch.no_grad():
    y, _ = block(z, torch.arange(5).expand(2, 5))  # E ignores the positions
    x = rms_norm(z, block.norm.weight)
    check("block = stream + layer(norm(stream))", y, z + block.layer(x))
    _ = must_differ("norm after the sum", rms_norm(z + block.layer(z), block.norm.weight), y)

# %% [markdown] slide_title="The whole model is one loop over letters"
# ## 2 · The whole model
#
# An embedding turns ids into vectors. The blocks work on the stream. A final norm and a matrix, the
# *head*, turn it into *logits*, one number per possible next id. If the head reuses the embedding,
# the two are *tied*.
#
# In code, the model is a loop over its letters:


# %%
def written_out(model, ids):
    """The logits (b, l, v), with tied embeddings, by equation 7.1."""
    z = model.embedding.weight[ids]  # (b, l, d)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    for block in model.blocks:  # one for each letter
        x = rms_norm(z, block.norm.weight)
        if block.letter in SEQUENCE_MIXERS:
            y, _ = block.layer(x, positions)
        else:
            y = block.layer(x)
        z = z + y
    return rms_norm(z, model.norm.weight) @ model.embedding.weight.T


# %% [markdown]
# The package computes the same, and it's causal: change the id of token 7, and none of the
# earlier logits change.

# %%
_ = torch.manual_seed(1)
model, ids = CausalLM(preset("cheems-tiny")), tokens(2, 12)
changed = ids.clone()
changed[:, 7] = (changed[:, 7] + 1) % 256
with torch.no_grad():
    for norm in [model.norm, *(block.norm for block in model.blocks)]:
        norm.weight.uniform_(0.5, 1.5)  # at 1, where they start, a forgotten one would not show
    (logits, _), (moved, _) = model(ids), model(changed)
    check("model = written out", written_out(model, ids), logits)
    check("nothing before token 7 moves with it", moved[:, :7], logits[:, :7])
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]
    _ = must_differ("the first two S exchanged", written_out(model, ids), logits)

# %% [markdown]
# ## 3 · Patterns as architecture
#
# Cheems has seven SSD modules for every InnerFuncAttn, and an expert layer after each (WM §3.4).
# WM Table 7 has 24 such pairs. Here they are in the order of §3.4, with the share of each letter in
# percent:

# %% tags=["aside"]
spelled = expand_pattern("(SE × 7 + IE) × 3")
print(spelled)
print({letter: 100 * spelled.count(letter) / len(spelled) for letter in "EIS"})
assert spelled == preset("cheems-320m").pattern and len(spelled) == 2 * 24

# %% tags=["guard"]
letters = expand_pattern("(SM × 3 + AM) × 2")  # the percentages of Ch Table 2 and Figure 6
print(
    "In percent, as in Ch Table 2, 3 : 1", {x: 100 * letters.count(x) / len(letters) for x in "AMS"}
)
assert [letters.count(x) / len(letters) for x in "AMS"] == [0.125, 0.5, 0.375]

# %% [markdown]
# Here are the first 24 sequence mixers of nine systems. On the right, how many state layers the
# whole model has for one layer of attention. Where does attention sit?

# %% slide_title="These hybrids begin with a state layer; the ratios vary" tags=["figure"]
plotting.show_drawing(
    "07_patterns",
    "Nine rows of 24 letters. In LlaMa every sequence mixer is A, in Mamba-2 every one is S. In "
    "Jamba the fifth of each eight is A, in Cheems the eighth is I; in OTCE numbers 13, 14 and 24 "
    "are A: 7 to 1 in all three. Below, Nemotron-H has A at 5, 11, 17 and 23, 6 to 1 in the whole "
    "model; Granite 4.0 at 6 and 16, 9 to 1; Qwen3-Next at every fourth place; Samba at every "
    "second. The ratios are headed S to A, whole model.",
)

# %% [markdown]
# Jamba puts its attention into the middle of each eight, Cheems at the end. The lower four rows are
# models that others ship, where S is any state layer (a gated delta rule in Qwen3-Next; Kimi Linear
# has the same row) and Samba's A sees only a window. All seven hybrids begin with a state layer.
# (LlaMa is WM's spelling.)
#
# **Why seven?** WM takes 7 : 1 from the Mamba-2 paper (§3.4), and Ch from "many studies". Neither
# varies it. The lower four rows run from 1 : 1 to 9 : 1. Two designs don't even fit into a row:
# Zamba uses the *same* attention block again and again, and Falcon-H1 runs S and A side by side.
# With fewer A there's less work and a smaller cache (sections 5 to 7). Recall may suffer (chapter
# 08).

# %% [markdown]
# ## 4 · What attention needs before it
#
# Why do these hybrids begin with a state layer? Ch says that a state layer filters what attention
# then reads (§3.4). So let's take a task with nothing to filter out. Does attention still need a
# state layer before it?
#
# A row lists eight key–value pairs, k₁ v₁ k₂ v₂ … k₈ v₈, then shows the keys again in another
# order. The model answers each key with its value: v₅ after k₅, v₁ after k₁.
#
# The question k₅ looks for the value that came after k₅. But attention makes its $k$ from the token
# alone, and the token $v_5$ doesn't contain $k_5$. A layer below has to tell it. Then one look by
# attention is enough.


# %% slide_title="A value can be found once it knows its key" tags=["figure", "slide"]
plotting.show_drawing(
    "07_neighbour",
    "Two pairs, k₄ v₄ and k₅ v₅, then k₅ again with a question mark. Attention's k of each value "
    "names only that value, so the question finds nothing. After a layer that tells each token its "
    "neighbour, the k of v₅ also says: k₅ stood before me. The question finds v₅.",
)


# %% tags=["setup", "experiment"]
def recall(batch, generator, pairs=8, kinds=32):
    """Keys 0..31 and values 32..63 in turn, then the keys again; targets -100 where none is."""
    keys = torch.rand(batch, kinds, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(kinds, 2 * kinds, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    asked, answers = keys.gather(1, order), values.gather(1, order)
    shown = torch.stack((keys, values), -1).flatten(1)  # (b, 2 pairs)
    questions = torch.stack((asked, answers), -1).flatten(1)  # an answer is shown after it is due
    targets = torch.full((batch, 4 * pairs), -100)
    targets[:, 2 * pairs :: 2] = answers
    return torch.cat([shown, questions], 1), targets


# %% [markdown]
# Now we train small models SA of width 64. S gets its positions either from rotation (chapter 04)
# or from a short convolution before it, and A rotates.
#
# Our control takes the state away. What can $v_3$ still learn about the tokens before it? To wipe
# the state, we fix `A_log`, chapter 03's $\log(-A)$, at 15. Then each token multiplies the state by
# $e^{-3.3\,\text{million}\cdot\Delta}$, which is 0. It still writes its own token and reads it at
# once, so it passes on what the convolution gave it, and nothing else.


# %% slide_title="A wiped state leaves only the convolution" tags=["figure"]
plotting.show_drawing(
    "07_wiped",
    "Eight tokens, k₁ v₁ to k₄ v₄, and a state above each. The links between states are crossed "
    "out. A frame around k₂ v₂ k₃ v₃ is what the convolution of v₃ sees.",
)


# %% tags=["setup", "experiment"]
def wipe(model):
    """Fix every decay at 0: a state forgets each token at once."""
    for module in model.modules():
        if isinstance(module, SSD):
            module.A_log.data.fill_(15.0)
            module.A_log.requires_grad_(False)
    return model


# %% tags=["setup", "experiment"]
def recall_model(pattern, position, seed, wiped=False):
    _ = torch.manual_seed(seed)
    sizes = dict(vocab_size=64, d_model=64, n_heads=2, d_state=16, tie_embeddings=False)
    model = CausalLM(ModelConfig(pattern=pattern, position=position, **sizes)).float()
    return wipe(model) if wiped else model


# %% tags=["setup", "experiment"]
def share_right(logits, targets):
    asked = targets >= 0
    return (logits.argmax(-1) == targets)[asked].double().mean().item()


def learn_to_recall(pattern, steps, position="conv", seed=0, wiped=False):
    """Train on `recall`: the model, and its share of right answers every 25 steps."""
    generator = torch.Generator().manual_seed(seed)
    model, right = recall_model(pattern, position, seed, wiped), []
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for step in range(steps):
        ids, targets = recall(32, generator)  # fresh rows in every step
        logits, _ = model(ids)
        right.append(share_right(logits, targets))
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return model, right[24::25]


# %% [markdown]
# The convolution still brings $k_3$ to $v_3$, so the key made there can hold it. A run has learned
# the task if it gets more than 0.9 of the answers right. Does SA learn it in 100 steps, with its
# state wiped?

# %% tags=["aside"]
_, right = learn_to_recall("SA", 100, seed=2, wiped=True)
print("SA, state wiped:", "learned" if right[-1] > 0.9 else "not learned")
assert right[-1] > 0.9

# %% [markdown]
# It does. The convolution shows each token its neighbour, and attention needs nothing more from the
# layer below. With rotation there is no convolution, and S can look back only through its state.
# There $C_t \cdot B_s$ depends on $t - s$ as well, so S can learn to single out the neighbour. What
# do you expect of SA with rotation and a wiped state?
#
# That was one run, so we recorded five of each kind, up to 1,000 steps long. Each dot is one
# (`python -m experiments 07_state_or_neighbour`). The dashed lines are guesses: one of the eight
# values, or the one not yet given that was listed most often (0.39).

# %% tags=["guard"]
ids, targets = recall(20_000, torch.Generator().manual_seed(7))
left, right = F.one_hot(ids[:, 1:16:2], 64).sum(1), []  # (rows, 64): how often each is left
for answer in targets[:, 16::2].T:
    right.append((left.argmax(1) == answer).double().mean().item())
    left = left - F.one_hot(answer, 64)
print(f"by elimination, over eight questions: {sum(right) / 8:.2f}")
assert abs(sum(right) / 8 - 0.39) < 0.01 and right[-1] == 1 and right == sorted(right)

both = torch.stack([ids[0], ids[0].index_fill(0, torch.tensor(0), 63)])
for position, notice in (("conv", [0, 1, 2, 3]), ("rope", [0])):
    model = recall_model("S", position, 0, wiped=True)
    with torch.no_grad():
        logits, _ = model(both)
    noticed = (logits[0] != logits[1]).any(-1).nonzero()[:, 0].tolist()
    print(f"{position}, state wiped: tokens {noticed} notice a change of token 0")
    assert noticed == notice

# %% tags=["guard"]
record = read_record("07_state_or_neighbour")
runs = {}
for run in record["table"]:
    assert run["steps"] == (400 if run["wiped"] and run["position"] == "conv" else 1000)
    name = run["pattern"] + (", wiped" if run["wiped"] else "")
    runs.setdefault((run["position"], name), []).append(run["right"])
ends = {row: sorted(run[-1] for run in five) for row, five in runs.items()}
assert 0.305 < ends["conv", "AA"][0] < ends["conv", "AA"][-1] < 0.36
assert ends.pop(("rope", "AA")) == ends["conv", "AA"]  # the same runs: A always rotates
for (position, name), five in ends.items():
    print(f"{position}  {name:10}", *(f"{end:6.2f}" for end in five))
found = {row: sum(end > 0.9 for end in five) for row, five in ends.items()}
assert all(found["conv", name] == 5 for name in ("SA", "SA, wiped", "SAS"))
assert [found["rope", name] for name in ("SA", "SAS", "SA, wiped")] == [3, 2, 0]
for run in runs["rope", "SA"] + runs["rope", "SAS"]:  # a point every 25 steps
    assert (max(run[:12]) > 0.9) == (run[-1] > 0.9)
assert max(max(five) for (_, name), five in ends.items() if name in ("AS", "AA", "SS")) < 0.46


# %% tags=["figure"]
def draw_runs(ax):
    """A dot for each run at the share it got right: four rows, and two baselines."""
    rows = [(name, place) for name in ("SA", "SA, wiped") for place in ("conv", "rope")]
    for row, (name, position) in enumerate(rows):
        shares = sorted(ends[position, name])
        high = [-row + 0.13 * (i - 2) for i in range(5)]
        ax.plot(shares, high, "o", color=plotting.COLORS[2], markersize=11, markeredgecolor="white")
    for share, words in ((1 / 8, "guess: 1/8"), (0.39, "guess among those left: 0.39")):
        ax.axvline(share, color=plotting.QUIET, lw=1.5, ls="--", zorder=0)
        ax.text(share + 0.01, 0.62, words, fontsize=17, va="center")
    words = [f"{n}, {p}" for n in ("S A", "S A, wiped") for p in ("convolution", "rotation")]
    ax.set(xlim=(0, 1.04), ylim=(-3.5, 0.85), xlabel="share right at the end, five runs each")
    ax.set_yticks(range(0, -4, -1), words, fontsize=17)


# %% slide_title="Wiped, S learns with a convolution, never with rotation" tags=["figure"]
fig, ax = plotting.figure(size=(11, 4.2))
draw_runs(ax)
plotting.save(
    fig,
    "07_wiped_runs",
    "Four rows of five dots, a run each, at the share it got right. S A with a convolution: all "
    "five near 1. With rotation: three at 1, one at 0.39 and one at 0.32. State wiped, with a "
    "convolution: all near 1. State wiped, with rotation: all from 0.11 to 0.18, near guessing.",
)

# %% [markdown]
# With a convolution you can take the state away and lose nothing. With rotation, wiping the state
# loses everything: the runs do little more than guess. So attention doesn't need a *state* below
# it. It needs a layer that **tells each token its neighbour**. Two runs with rotation and a state
# failed as well. At 0.32 and 0.39 they do no better than guessing among the values left.
#
# Chapter 05 (section 3) measured which of $q$, $k$ and $v$ has to know the neighbour: a convolution
# before attention's $k$ is enough, and one before $q$ or $v$ doesn't help.
#
# Another A below could pass the neighbour on: in chapter 08 (section 3) we set such weights by
# hand. We predicted that training finds them on some seeds. Here it never did in 1,000 updates
# (0.31 to 0.35). In chapter 08 A A learns its task in every run. That training differs from ours in
# several ways, and we haven't found out which one matters.

# %% [markdown] slide_title="A is four matrices, and shared heads narrow two"
# ## 5 · What it costs: parameters
#
# How many parameters does a pattern have? Each letter has its matrices, so let's count entries.
# Take A, in a model of width $d$, with $h$ heads of width $p = d/h$. In *grouped-query attention*
# several heads share keys and values. So there are only $g_k$ key heads and $g_k$ value heads, each
# still of width $p$. Queries and output projection take a $d \times d$ matrix each, keys and values
# a $d \times g_kp$ matrix each:
#
# $$\mathrm{A}: \quad 2\,d^2 + 2\,d\,g_kp. \tag{7.2}$$


# %% slide_title="A is four matrices, and shared heads narrow two" slide_figure="07_matrices:1"
def attention_parameters(config):
    """A of a configuration."""
    d, width = config.d_model, config.d_model // config.n_heads  # width is p
    keys = width * (config.n_kv_heads or config.n_heads)  # all key heads side by side
    return {"A": 2 * d * d + 2 * d * keys}


# %% [markdown]
# With one key head it's *multi-query* attention. If heads can share their values, attention doesn't
# lack values. So WM works on what a value contains (§1).

# %% slide_title="All heads can share one matrix of keys and one of values" tags=["figure", "slide"]
plotting.show_drawing(
    "07_matrices",
    "Attention's four matrices, to scale, for eight heads. With eight key heads all four are "
    "squares. With two, those of keys and values are a quarter as wide, and with one, an eighth.",
)

# %% [markdown]
# The other letters work the same way; a folded cell has them. Most of E (chapter 06) is in four
# matrices. Two belong to the shared MLP of width $f$, with $df$ entries each. The other two are
# tables with a row of $d$ entries for each of the $r^2$ neurons.


# %% tags=["guard"]
def feed_forward_parameters(c):
    """M, G, R, H and E of a configuration c."""
    d, df, r = c.d_model, c.d_model * c.d_ff, math.isqrt(c.n_neurons)
    routed = c.n_experts * (d + 3 * df)  # router and experts
    neurons = 2 * c.n_neurons * d + c.d_query * c.n_retrieval_heads * (d + r)  # 2 m is d_query
    return {"M": 2 * df, "G": 3 * df, "R": routed, "H": routed + 3 * df, "E": 2 * df + neurons}


def state_parameters(c):
    """S and I of a configuration c; the values of I come from a table."""
    d, h, p = c.d_model, c.n_heads, c.d_model // c.n_heads
    hp, gn, keys = h * (c.d_head or p), c.n_groups * c.d_state, p * (c.n_kv_heads or h)
    inputs = 2 * d * hp + 2 * d * gn + d * h + 3 * h  # x and way out; B, C; Δ; its bias, A, D
    convolution = c.d_conv * (hp + 2 * gn) if c.position == "conv" else 0
    values = h * (d * (p // 2) + c.n_values * (p // 2 + p))  # queries; keys and rows of a table
    return {"S": inputs + convolution, "I": 2 * d * d + d * keys + values}


# %% [markdown]
# A model is the sum over its letters. Around its $N$ layers there are $N + 1$ norms, the embedding
# of $v$ ids, and the head if it isn't tied:
#
# $$(N + 1)\,d + v\,d \quad\text{or}\quad (N + 1)\,d + 2\,v\,d. \tag{7.3}$$


# %% slide_title="Norms, the embedding and the head surround the layers" slide_figure="07_stack:0"
def parameters(config):
    """How many parameters each letter of a pattern adds, and what surrounds the layers."""
    one = attention_parameters(config) | state_parameters(config) | feed_forward_parameters(config)
    counts = {}
    for letter in sorted(set(config.pattern)):
        counts[letter] = config.pattern.count(letter) * one[letter]
    norms, tables = len(config.pattern) + 1, 1 if config.tie_embeddings else 2
    counts["around"] = (norms + tables * config.vocab_size) * config.d_model
    return counts


# %% tags=["aside"]
for part, count in parameters(preset("cheems-320m")).items():
    print(f"{part:6} {count:12,}")


# %% tags=["figure"]
def draw_parameters(ax, name, y=0):
    """A bar, a part for each letter and for what surrounds the layers, in shares of the model."""
    counts = parameters(preset(name))
    left, total = 0, sum(counts.values())
    shades = dict(
        A=plotting.COLORS[0], S=plotting.COLORS[2], I=plotting.COLORS[5], around="#dddddd"
    )
    names = dict(A="attention", G="gated MLPs", R="routed experts", E="expert layers E")
    names |= {"around": "embedding, norms"}
    for part, count in counts.items():
        share, color = count / total, "white" if part == "A" else plotting.INK
        ax.barh(y, share, 0.5, left=left, color=shades.get(part, "#bbbbbb"), edgecolor="white")
        words = f"{names.get(part, part)}\n{count / 1e6:,.0f} million"
        thin = 0.45 if share < 0.05 or part == "around" else -0.45 if share < 0.12 else 0
        style = dict(ha="center", va="center", fontsize=17, color=plotting.INK if thin else color)
        ax.text(max(left + share / 2, 0.09), y + thin, words, **style)
        left += share
    ax.set(xlim=(-0.06, 1.06), frame_on=False, xticks=[], yticks=[])


# %% slide_title="Most of Cheems-320M is experts" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(11, 3.6))
draw_parameters(ax, "cheems-320m")
ax.set_ylim(-0.7, 0.7)
plotting.save(
    fig,
    "07_parameters",
    "A bar of Cheems-320M's parameters in four parts: the expert layers E have 246 million, I 6, S "
    "29, and the embedding and norms around them 39.",
)

# %% [markdown]
# More than three quarters of Cheems-320M's parameters are in its expert layers.
#
# Does the sum agree with the published sizes of two famous models?

# %% tags=["aside"]
published = {"llama-2-7b": 6_738_415_616, "mixtral-8x7b": 46_702_792_704}
mine = torch.tensor([sum(parameters(preset(name)).values()) for name in published])
check("by hand = published", mine, torch.tensor([*published.values()]))

# %% slide_title="The sum over letters gives two published sizes exactly" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(12, 5))
for y, (name, size), total in zip((0, -1.8), published.items(), mine.tolist(), strict=True):
    draw_parameters(ax, name, y)
    words = f"{name}: {total:,} by hand, {size:,} published"
    ax.text(0, y + 0.82, words, fontsize=19)
ax.set_ylim(-2.3, 1.1)
plotting.save(
    fig,
    "07_published",
    "Bars of two models. Llama-2-7B: attention 2,147 million, gated MLPs 4,329 million, the rest "
    "around them. Mixtral-8x7B: nearly all is in routed experts. Both totals are the published "
    "ones, 6,738,415,616 and 46,702,792,704.",
)

# %% [markdown]
# It does, to the last digit. A folded cell compares the formula with sixteen of our presets. Our
# presets for WM Table 7 also match the sizes in their names, but the table doesn't give $f$, and we
# chose $f$ to make that happen.
#
# The **active** parameters take part in one token's logits. Experts that the token doesn't use
# don't count. Of E's parameters, 54 % are active in Cheems-320M, and 16 % in Cheems-1.3B, which has
# more neurons to choose from and a smaller shared MLP.

# %% tags=["guard"]
counts = parameters(preset("cheems-320m"))
assert 0.75 < counts["E"] / sum(counts.values()) < 0.8
# not Doge, whose masks have parameters
known = [n for n in PRESETS if set(preset(n).pattern) <= set("SAIMGRHE") and "doge" not in n]
by_hand = torch.tensor([sum(parameters(preset(name)).values()) for name in known])
counts = [count_parameters(preset(name)).values() for name in known]
counted = torch.tensor([sum(part.total for part in model) for model in counts])
check("parameters by hand = counted", by_hand, counted)
print(f"{len(known)} models, from {counted.min():,} to {counted.max():,} parameters")


# %% tags=["guard"]
def total_and_active(config):
    counts = count_parameters(config).values()
    return sum(part.total for part in counts), sum(part.active for part in counts)


for size, nominal in (("320m", 320e6), ("1.3b", 1.3e9)):
    both = {name: total_and_active(preset(f"{family}-{size}")) for name, family in FOUR.items()}
    assert all(abs(total / nominal - 1) < 0.01 for total, _ in both.values())
    assert (max(both, key=lambda name: both[name][1]) == "Cheems") == (size == "320m")
    assert (min(both, key=lambda name: both[name][1]) == "Cheems") == (size == "1.3b")
    c, experts = preset(f"cheems-{size}"), count_parameters(preset(f"cheems-{size}"))["E"]
    share = experts.active / experts.total
    assert f"{share:.0%}" == {"320m": "54%", "1.3b": "16%"}[size]
    print(f"{size}, E in Cheems: f = {c.d_ff:,}, {c.n_neurons:,} rows, {share:.0%} active", end="")
    print(" for a token: the shared MLP, and the neurons it retrieves")
for name, printed, missing in (("jamba-283m", 283, 98), ("otce-281m", 281, 97)):  # OTCE Table 1
    total, _ = total_and_active(preset(name))
    print(f"{name:10} {total / 1e6:.1f} M, {printed - total / 1e6:.0f} M less than printed in OTCE")
    assert round(printed - total / 1e6) == missing  # nearly the same: perhaps a larger vocabulary

# %% [markdown] slide_title="At 1,024 tokens, looking back is cheap: 4ld" slide_figure="07_flops:0"
# ## 6 · What it costs: FLOPs per token
#
# Which letters get more expensive as the text grows? Each entry of a matrix costs a token one
# multiplication and one addition, so a letter costs about twice its active parameters. Work
# *between* tokens comes on top. An attention layer that looks at $l$ tokens computes $l$ scores and
# sums $l$ values:
#
# $$2\,ld + 2\,ld = 4\,ld. \tag{7.4}$$
#
# That's for a token with $l$ tokens to look at. The mean over a text of $l$ tokens is about half.
#
# SSD compares tokens only within chunks of a fixed length, and hands a state of fixed size from
# chunk to chunk (chapter 03). So its cost per token doesn't depend on $l$. The folded cells sum all
# this over the letters. PyTorch multiplies first and masks afterwards, so its count has every token
# pay for all $l$, and otherwise agrees.


# %% tags=["guard"]
def flops_by_letter(c, context):
    """Operations per token of one layer of each letter, for a token that looks at so many."""
    d, hp = c.d_model, c.n_heads * (c.d_head or c.d_model // c.n_heads)
    c = replace(c, position="rope")  # no convolution
    entries = feed_forward_parameters(c) | attention_parameters(c) | state_parameters(c)
    asleep = 3 * (c.n_experts - c.k_experts) * d * c.d_ff  # of the experts that are not chosen
    unused = {"S": 3 * c.n_heads, "R": asleep, "H": asleep, "E": 2 * c.n_neurons * d}
    between = {"S": 2 * c.chunk_size * (c.n_groups * c.d_state + hp) + 4 * c.d_state * hp}
    between |= dict.fromkeys("AI", 4 * context * d)
    return {x: 2 * (entries[x] - unused.get(x, 0)) + between.get(x, 0) for x in entries}


def flops_per_token(c, context):
    """The sum over the letters, and the head; no norms, softmax, convolution or retrieved rows."""
    one = flops_by_letter(c, context)
    return sum(one[letter] for letter in c.pattern) + 2 * c.vocab_size * c.d_model


# %% tags=["guard"]
def counted_flops(config, length):
    """What torch counts per token in a prompt of so many tokens; MATH: masked pairs, too."""
    model, ids = CausalLM(config), tokens(1, length)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids)
    return counter.get_total_flops() / length


configs = [preset(f"{family}-tiny") for family in FOUR.values()]
configs.append(ModelConfig("SHAH", k_experts=1, n_kv_heads=2, n_groups=2))
cases = [*((config, 128) for config in configs), (configs[0], 64), (configs[3], 64)]
predicted = torch.tensor([flops_per_token(*case) for case in cases]).double()
counted = torch.tensor([counted_flops(*case) for case in cases]).double()
check("FLOPs by hand = counted", predicted, counted)
_ = must_differ("one operation per entry of a matrix", predicted / 2, counted)

# %% [markdown]
# We take the four systems of 320 million parameters. Whose cost doesn't grow?

# %% tags=["aside"]
contexts = [2**i for i in range(8, 21)]
presets = {name: preset(f"{family}-320m") for name, family in FOUR.items()}
gflop = {name: [flops_per_token(c, l) / 1e9 for l in contexts] for name, c in presets.items()}
for name, flops in gflop.items():
    print(f"{name:8} {flops[2]:.2f} GFLOP per token at 1,024 tokens, {flops[9]:5.2f} at 131,072")


# %% tags=["figure"]
def draw_flops(ax, context, down):
    """A bar for each system: what looks back so far, beside what does not."""
    for i, c in enumerate(presets.values()):
        fixed, total = (flops_per_token(c, l) / 1e9 for l in (0, context))
        ax.barh(-i - down, fixed, 0.36, color="#bbbbbb")
        ax.barh(-i - down, total - fixed, 0.36, left=fixed, color=plotting.COLORS[0])
        words = f"{total:.2f} at {context:,} tokens"
        ax.text(total + 0.1, -i - down, words, va="center", fontsize=18)
    ax.set_yticks(range(0, -4, -1), list(presets), fontsize=18)
    ax.set_xticks([0, 5, 10], ["0", "5", "10"], fontsize=18)
    ax.set_xlabel("GFLOP per token", fontsize=18)


# %% slide_title="A hybrid pays an eighth for looking back" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(9, 6.2))
draw_flops(ax, 1024, -0.2)
later = plotting.in_stages(ax, lambda ax: draw_flops(ax, 131_072, 0.2))
ax.text(9.3, -1.4, "looking back", color=plotting.COLORS[0], fontsize=19)
ax.text(9.3, -1.8, "everything else", color="#777777", fontsize=19)
ax.set(xlim=(0, 14.5), ylim=(-3.5, 0.5))
plotting.save(
    fig,
    "07_flops",
    "GFLOP per token of four systems at 1,024 and at 131,072 tokens, in two parts. What looks back "
    "is the whole of LlaMa's growth, to 10.03; an eighth of it in Jamba and Cheems; none in "
    "Mamba-2. Everything else is about 0.4 in each.",
    stages=later,
)

# %% [markdown]
# Only Mamba-2's cost doesn't grow. With 131,072 tokens instead of 1,024, LlaMa's grows by 9.6 GFLOP
# and Cheems's by 1.2. That's an eighth, and Cheems has an eighth of the attention layers. At a
# thousand tokens the four are within a quarter of each other. At 131,072 more than 95 % of LlaMa's
# operations go into looking back. These are operations. Milliseconds are another story, for chapter
# 10.

# %% tags=["guard"]
assert contexts[2] == 1024 and contexts[9] == 131_072
grows = {n: flops_per_token(c, 131_072) - flops_per_token(c, 0) for n, c in presets.items()}
assert grows["LlaMa"] == 8 * grows["Cheems"] == 8 * grows["Jamba"] and grows["Mamba-2"] == 0
added = {name: round(flops[9] - flops[2], 1) for name, flops in gflop.items()}
assert (added["LlaMa"], added["Cheems"]) == (9.6, 1.2)
assert grows["LlaMa"] > 0.95e9 * gflop["LlaMa"][9]
at_1024 = [flops[2] for flops in gflop.values()]
assert max(at_1024) < 1.25 * min(at_1024)
c = preset("mamba2-320m")
left_out, counted = 2 * c.d_conv * (c.d_model + 2 * c.d_state), flops_by_letter(c, 0)["S"]
print(f"S: {left_out:7,} left out, {counted:9,} counted")  # the convolution's
assert left_out < 0.003 * counted

# %% tags=["guard"]
timed = read_record("07_decoding")["decoding"]
print("tokens  ", *(f"{size:7,}" for size in timed["sizes"]))
for name, (low, high) in zip(FOUR, ((15.5, 15.7), (-1, 1), (2.8, 3), (2.8, 3)), strict=True):
    times = timed["milliseconds"][FOUR[name]]
    print(f"{name:8}", *(f"{time:7.2f}" for time in times), f"   {times[-1] - times[0]:5.1f} more")
    assert low < times[-1] - times[0] < high
assert timed["sizes"][::3] == [256, 8192]

# %% [markdown]
# ## 7 · What it remembers
#
# To write the next token, must the model read the whole text again? Attention needs all earlier
# keys and values, and a state layer its state. `model(ids)` returns its logits together with a
# `ModelCache` that holds all this, with one entry per letter and the number of tokens so far.
#
# Which of the shapes below grow with the text?

# %% slide_title="Twice the text: keys and values double, a state stays" tags=["figure", "slide"]
plotting.show_drawing(
    "07_two_caches",
    "What S and I keep after 13 tokens and after 26. The state of S and its three inputs are the "
    "same both times; the columns k and v of I are twice as high after 26.",
)

# %% tags=["aside"]
_ = torch.manual_seed(2)
config = ModelConfig("SE × 3 + IE", position="conv", chunk_size=16, d_model=64, n_neurons=64)
model = long_memory(CausalLM(config)).requires_grad_(False)
_, cache = model(tokens(2, 13))
for i in (0, 6):  # the first S, and I
    parts = {name: part for name, part in cache.layers[i]._asdict().items() if part is not None}
    print(cache.pattern[i], *(f"{name} {tuple(part.shape)}" for name, part in parts.items()))
print("n_tokens", cache.n_tokens.tolist())

# %% [markdown]
# Only I has an axis of 13 tokens: its keys and values are (texts, tokens, heads, width). S keeps a
# state, and here the last three inputs of its convolution, however long the text is.
#
# Feeding in the prompt is *prefill*; feeding in more of it, *continued prefill*; feeding in one
# token, *decoding*. However you cut the text, you must get the logits of a single pass. In a good
# test, the pieces straddle chunk boundaries (here every 16 tokens), and states outlive a chunk
# (`long_memory` slows their decay).

# %% tags=["aside"]
ids, pieces, cache = tokens(2, 150, seed=4), [], None
whole, _ = model(ids)
for piece in ids.split([61, 69, *[1] * 20], dim=1):
    logits, cache = model(piece, cache=cache)
    pieces.append(logits)
check("prompt, rest, single tokens = one pass", torch.cat(pieces, dim=1), whole)


# %% tags=["figure"]
def draw_pieces(ax, y, lengths, names, logits):
    """A text in pieces, each with its borders of chunks; arrows hand a cache on; logits below."""
    start = 0
    for place, length in enumerate(lengths):
        ax.barh(y, length, 0.5, left=start, color=plotting.COLORS[0], alpha=0.45, ec="white")
        ax.vlines(range(start + 16, start + length, 16), y + 0.28, y + 0.42, color="k", lw=2)
        if place:
            color = plotting.COLORS[2]
            plotting.arrow(ax, (start - 1.2, y + 0.55), (start + 1.2, y + 0.55), color=color)
        if place < len(names):
            ax.text(start + 2, y, names[place], va="center", fontsize=19)
        start += length
    shades = dict(cmap="RdBu_r", aspect="auto", interpolation="nearest", vmin=-1, vmax=1)
    ax.imshow(logits.T, extent=(0, start, y - 0.72, y - 0.32), **shades)


# %% slide_title="However you cut the text, the logits are the same" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(12, 4.6))
draw_pieces(ax, 1.3, [150], ["one pass over 150 tokens"], whole[0, :, :4])
names = ["prefill: 61 tokens", "continued: 69", "20 × 1"]
draw_pieces(ax, -0.5, [61, 69, *[1] * 20], names, torch.cat(pieces, dim=1)[0, :, :4])
words = "ticks: borders of chunks; green: the cache handed on; strips: four logits of every token"
ax.text(75, -1.5, words, fontsize=19, ha="center")
ax.text(75, 0.34, "the same logits", fontsize=19, ha="center", va="center")
ax.set(xlim=(0, 151), ylim=(-1.7, 1.9)), ax.axis("off")
plotting.save(
    fig,
    "07_cuts",
    "Two bars of 150 tokens. The upper one is a single pass. The lower one is cut into a prompt of "
    "61 tokens, 69 more, and 20 single ones, with the cache handed on at each cut. Chunks of 16 "
    "begin anew in each piece. The coloured strips below the bars, four logits of every token, are "
    "the same.",
)

# %% [markdown]
# ### Bytes
#
# The size of a cache is a sum over letters again: an attention layer keeps a key and a value per
# token and key head, and a state layer $h\,p\,n$ numbers. In the figure below a number of the first
# has 16 bits, and one of the second 32. `cache_bytes` adds them up, with positions and the inputs
# of convolutions, and a folded cell compares it with what running models hold.

# %% tags=["guard"]
held, predicted = [], []
for name in ("llama-tiny", "mamba2-tiny", "jamba-tiny", "cheems-tiny"):
    for context in (1, 100):
        with torch.no_grad():
            _, cache = CausalLM(preset(name))(tokens(3, context))
        held.append(cache.nbytes())
        predicted.append(cache_bytes(preset(name), context, batch=3, dtype=torch.float64).total())
    print(f"{name:14} of 3 rows: {held[-2]:9,} bytes at 1 token, {held[-1]:9,} at 100")
held, predicted = torch.tensor(held), torch.tensor(predicted)
check("cache_bytes = bytes of the tensors", predicted, held)

# %% [markdown]
# Which cache do you expect to be the smallest at 64 tokens?
#
# Here is how the cache grows, at 320 million parameters. Look at both ends.


# %% tags=["guard"]
def kept(name, context=256 * 1024):
    return cache_bytes(preset(name), context)


lecture = {"llama-2-7b": 128, "mistral-7b": 32, "mixtral-8x7b": 32, "jamba-52b": 4}
for name, printed in lecture.items():
    gib = kept(name).keys_values / 2**30
    print(f"{name:13} keys and values at 262,144 tokens in 16 bit: {gib:g} GiB")
    assert gib == printed
mistral = kept("mistral-7b", 4096).keys_values / 2**30  # it looks back no further
print(f"Mistral, the last 4,096 tokens: {mistral:g} GiB")
constant = (kept("jamba-52b").states + kept("jamba-52b").convolutions) / 2**20
print(f"Jamba, what does not grow with the context: {constant:.1f} MiB")
assert mistral == 0.5 and 15.2 < constant < 15.4

# %% tags=["setup"]
contexts, systems = [2**i for i in range(6, 21)], {n: f"{f}-320m" for n, f in FOUR.items()}
mib = {n: [kept(c, l).total() / 2**20 for l in contexts] for n, c in systems.items()}
curves = {"LlaMa": mib["LlaMa"], "Mamba-2": mib["Mamba-2"], "Jamba, Cheems": mib["Cheems"]}
largest = [max(mib, key=lambda name: mib[name][i]) for i in range(len(contexts))]
assert min(mib, key=lambda name: mib[name][0]) == "LlaMa" and {*largest[2:]} == {"LlaMa"}
assert all(abs(a / b - 1) < 0.02 for a, b in zip(mib["Jamba"], mib["Cheems"], strict=True))
assert contexts[2] == 256 and 7.9 < mib["LlaMa"][-1] / mib["Cheems"][-1] < 8


# %% tags=["figure"]
def size_of(mib):
    return f"{mib:.2g} MiB" if mib < 1024 else f"{mib / 1024:.2g} GiB"


def draw_ends(ax):
    """Each cache at both ends, with its size on the right, and those of two on the left."""
    for (name, sizes), color in zip(curves.items(), (0, 2, 5), strict=True):
        shade = plotting.COLORS[color]
        ax.plot(contexts, sizes, "o-", markevery=(0, 14), color=shade, lw=3, markersize=9)
        words = f"{size_of(sizes[-1])}  {name}"
        ax.text(contexts[-1] * 1.4, sizes[-1], words, va="center", fontsize=15)
        if name != "Jamba, Cheems":  # it begins almost where Mamba-2's does
            words = dict(ha="right", va="center", fontsize=15)
            ax.text(contexts[0] / 1.3, sizes[0], f"{name}  {size_of(sizes[0])}", **words)
    ax.set(xscale="log", yscale="log", xlabel="context, tokens", xlim=(1, 5e7))
    ax.set_xticks([64, 1024, 16_384, 2**20], ["64", "1,024", "16,384", "1,048,576"])
    ax.set_yticks([2**i for i in (3, 10, 17)], ["8 MiB", "1 GiB", "128 GiB"])
    ax.set(ylabel="cache, each tick × 128", ylim=(2, 2e5))
    middle = math.sqrt(curves["LlaMa"][-1] * curves["Jamba, Cheems"][-1])
    ax.text(contexts[-1] * 1.4, middle, "↕ eightfold", va="center", fontsize=15)
    ax.minorticks_off()


# %% slide_title="Attention has the smallest cache at 64 tokens, soon the largest" tags=["figure"]
fig, ax = plotting.figure(size=(11, 4.8))
draw_ends(ax)
plotting.save(
    fig,
    "07_cache",
    "Cache size against context, 64 to 1,048,576 tokens, both logarithmic, at 320 million "
    "parameters. LlaMa's grows from 4.5 MiB to 72 GiB, Mamba-2's stays at 9.1 MiB, and Jamba's and "
    "Cheems', the same to within 2 percent, begin at 8.5 MiB and end at 9 GiB, an eighth.",
)

# %% [markdown]
# At 64 tokens LlaMa's cache is the smallest, because the others already hold states. From 256
# tokens on it is the largest, and at a million tokens it is nearly eight times as large as Cheems'.
#
# ## 8 · Train it, let it write
#
# Now let's train a small model. Our text is Python's built-in reference manual, about 465,000
# bytes. An id is a byte, so we need no tokenizer. We hold out a tenth. The loss is the
# *cross-entropy*: the mean, over the bytes that came next, of $-\log p$, in *nats*.
#
# Before training, fix the baseline to beat: the *bigram* model, which predicts by counting which
# byte follows which. It gets 2.32 nats per byte where guessing gets 5.55.

# %% tags=["setup"]
manual = text.text_to_ids(text.read_text())
seen_part, held_out = split_text(manual, 0.1)
counts = torch.full((256, 256), 0.1)  # nothing is impossible
ones = torch.ones(len(seen_part) - 1)
_ = counts.index_put_((seen_part[:-1], seen_part[1:]), ones, accumulate=True)
shares = counts / counts.sum(dim=1, keepdim=True)
bigram = -shares[held_out[:-1], held_out[1:]].log().mean().item()  # nats per byte
print(f"guessing: log 256 = {math.log(256):.2f} nats per byte")
long_run = read_record("07_training")  # for the end of this section
recorded = long_run["bigram"]  # the text differs a little between Pythons
print(f"the bigram model: {recorded:.2f} (record), here the same to within 0.1")
assert abs(bigram - recorded) < 0.1 and round(recorded, 2) == 2.32

# %% [markdown]
# The model reads a *window* of the text. At each byte it predicts the next one.

# %% slide_title="Every byte of a window asks for the byte after it" tags=["figure", "slide"]
plotting.show_drawing(
    "07_shift",
    "The bytes of a window in a row, and below them the same bytes, one place to the left. An "
    "arrow leads from each byte, through the model, to the byte that it has to predict.",
)

# %% [markdown]
# Training is one short loop:


# %% tags=["aside"]
def train_by_hand(model, ids, config):
    """What `train` does, without checkpoints and evaluations: returns the loss of each step."""
    generator = torch.Generator().manual_seed(config.seed)
    optimizer, losses = make_optimizer(model, config), []  # AdamW
    for step in range(config.steps):
        windows = random_windows(ids, config, generator)  # (b, length + 1)
        logits, _ = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# How does the model generate text? Choose an id from the logits, append it, repeat, with the cache
# of section 7 so that each call reads one token. The largest logit would be the *greedy* choice. We
# draw from $\mathrm{softmax}(\text{logits}/T)$ instead, with the *temperature* $T = 0.8$.


# %% tags=["setup"]
def write(model, n=180):
    """What the model writes after "The ", with runs of white space as one space."""
    warm = Sampling(temperature=0.8, generator=torch.Generator().manual_seed(0))
    new = generate(model, text.text_to_ids("The ")[None], n, warm)
    words = " ".join(("The " + text.ids_to_text(new[0])).split())
    return "".join(c if c.isascii() and c.isprintable() else "·" for c in words)


# %% tags=["setup"]
home = Path("../runs/chapter_07")  # this run's checkpoints, and what the model writes
shutil.rmtree(home, ignore_errors=True)  # else `train` would go on from what it finds there

# %% [markdown]
# Our Cheems has two pairs of layers and trains for 160 steps of 512 bytes, which takes a few
# seconds. Here is what *your* model writes at first, and then whenever its budget has doubled. When
# does it find spaces, and when words? Rounding differs between machines, so nobody else gets your
# lines. A dot replaces anything that isn't printable ASCII.

# %% slide_title="Each doubling of the budget changes what your model writes"
settings = TrainConfig(steps=160, batch_size=8, seq_len=64, learning_rate=6e-3, evaluate_every=160)
_ = torch.manual_seed(0)
sizes = dict(d_model=96, d_ff=192, tie_embeddings=False)
cheems = CausalLM(ModelConfig(pattern="SE + IE", **sizes)).float()
wrote = {0: write(cheems)}


def keep_what_it_writes(run):
    if run.step in (10, 20, 40, 80, 160):
        wrote[run.step] = write(cheems)


run = train(
    cheems, manual, settings,
    directory=home, progress_bar=False, after_step=keep_what_it_writes,
)  # fmt: skip
for step, words in wrote.items():
    print(f"after {step} steps", f"│ {words[:64]}", sep="\n")

# %% [markdown]
# Ours has spaces after 10 steps, and hardly a real word after 160. Its loss is already more than
# 0.1 nats per byte below the bigram model's. To hear more, run
# `cheems generate --run runs/chapter_07 --prompt "The "`.

# %% tags=["guard"]
_ = torch.manual_seed(0)
twin = CausalLM(cheems.config).float()
ten = replace(settings, steps=10, decay_steps=160)
by_hand = torch.tensor(train_by_hand(twin, seen_part, ten))
gap = (by_hand - torch.tensor(run.losses[:10])).abs().max()
print("the loop by hand: its first ten losses are those of `train` to within 0.001")
assert gap < 0.001 < by_hand[0] - by_hand[-1]

# %% tags=["guard"]
_ = (home / "written.txt").write_text(wrote[160] + "\n", encoding="utf-8")
((_, loss),) = run.evaluations
assert loss < bigram - 0.1
print("after 160 steps: more than 0.1 nats per byte better than the bigram model")

# %% tags=["guard"]
exact = deepcopy(cheems).double()  # in float32, rounding may decide between two close logits
prompt = text.text_to_ids("The ")[None]
new = generate(exact, prompt, 60, Sampling(temperature=0))
with torch.no_grad():
    logits, _ = exact(torch.cat([prompt, new], dim=1))
logits = logits[:, prompt.shape[1] - 1 : -1]  # those from which the new ids were chosen
check("one at a time, with cache = argmax of one pass", new, logits.argmax(dim=-1))

# %% [markdown]
# What do a larger model and longer training buy? Here is what `SE × 7 + IE` writes after 2,500
# steps with windows of 256 bytes. (One seed: `python -m experiments 07_training`.)

# %% slide_title="A larger model sounds like a manual after 2,500 steps, and means nothing"
print(f"{long_run['pattern']}: {long_run['parameters']:,} parameters")
print("".join(long_run["samples"][0]))

# %% [markdown]
# Most words are real, some phrases hold together, and nothing means anything.

# %% tags=["guard"]
held_out_at = dict(long_run["evaluations"])
batches = sum(long_run["losses"][-25:]) / 25
print(f"held out: {held_out_at[125]:.2f} nats per byte after 125 steps, {held_out_at[1875]:.2f}")
print(f"after 1,875, {held_out_at[2500]:.2f} after 2,500; the last batches: {batches:.2f}")
assert held_out_at[125] < long_run["bigram"] and round(long_run["bigram"], 2) == 2.32
assert abs(held_out_at[2500] - held_out_at[1875]) < 0.02 and round(batches, 2) == 0.83

# %% tags=["guard"]
at, held = zip(*long_run["evaluations"], strict=True)
# one batch in five was kept: the mean of the 25 before each evaluation
read = [sum(long_run["losses"][t // 5 - 25 : t // 5]) / 25 for t in at]
assert list(at) == [125 * (i + 1) for i in range(20)]
gap = [a - b for a, b in zip(held, read, strict=True)]
assert gap[3] < 0.1 and gap[-1] > 0.3


# %% tags=["figure"]
def draw_gap(ax):
    """Both losses after the first steps, and what opens between them."""
    plotting.lines(ax, at, {"held-out text": held, "its own batches": read}, marker="o",
                   legend=None, ylim=(0.7, 2.6), xlim=(0, 3150))  # fmt: skip
    ax.fill_between(at, read, held, color=plotting.COLORS[1], alpha=0.15, lw=0)
    middle = (held[-1] + read[-1]) / 2
    words = {
        held[-1]: "held-out text",
        read[-1]: "text it has read",
        middle: f"{gap[-1]:.2f} apart",
    }
    for y, name in words.items():
        ax.text(at[-1] + 40, y, name, va="center", fontsize=15)
    ax.set(xlabel="training step", ylabel="nats per byte", xticks=range(0, 2501, 500))
    ax.spines["bottom"].set_bounds(0, 2500)


# %% [markdown]
# Here are the losses of this run on held-out text, and on its own batches just before. At first the
# dashed line is the higher one. It averages the 125 steps before, when the model was worse. Look at
# the right end. Is the model still learning?

# %% slide_title="After 1,875 steps it only gets better at what it has read" tags=["figure"]
fig, ax = plotting.figure(size=(10, 4.4))
draw_gap(ax)
plotting.level(ax, long_run["bigram"], "bigram model")
plotting.save(
    fig,
    "07_training",
    "Loss in nats per byte against training step, every 125 of 2,500 steps. On held-out text it "
    "is below the bigram model's 2.32 from the start and ends flat at 1.18. On the batches it goes "
    "on falling, to 0.83, and the gap between the two keeps opening.",
)

# %% [markdown]
# After 1,875 steps the held-out loss has stopped falling, at 1.17. On the last batches, from text
# that the model has read many times, the loss is 0.83.

# %% [markdown] slide_title="A model is a string; its costs are sums over letters"
# ## Summary
#
# - A model is a loop over letters: each layer adds to one stream.
# - For recall, attention needs a layer below that tells each token its neighbour.
# - That takes no state: with a convolution, 5 of 5 runs learn it with the state wiped.
# - Parameters, cache, and operations of matrix products are sums over letters.
# - Attention's costs grow with the context. A 7 : 1 hybrid pays an eighth of them.
# - Prefill, continued prefill and decoding agree with one full pass.

# %% [markdown]
# ## Exercises

# %% [markdown]
# **1 · easy.** *Nemotron-H as a string.* Write Nemotron-H's pattern of layers as a string.
# Nemotron-H consists mostly of Mamba-2 layers and MLPs, with only a few attention layers. Write the
# pattern of such a hybrid: `pairs` pairs, all SM except numbers `every`, 2 · `every`, … (counted
# from 1), which are AM. What share of the keys and values of AM, AM, … remains?
#
# <details><summary>Hint</summary>
#
# The pairs with attention are those whose number `every` divides. Spaces and `×` are allowed, as in
# the tables.
#
# </details>


# %% tags=["exercise"]
def hybrid(pairs, every):
    """A string of 2 · pairs letters; attention in pairs every, 2 · every, …, counted from 1."""
    ### BEGIN SOLUTION
    return "".join("AM" if i % every == 0 else "SM" for i in range(1, pairs + 1))
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none

for pairs, every in ((12, 4), (10, 3), (5, 1), (7, 9), (26, 13)):
    mine = expand_pattern(not_none(hybrid(pairs, every)))
    case, mixers, mlps = f"{pairs} pairs, every {every}", mine[::2], mine[1::2]
    assert len(mine) == 2 * pairs, f"{case}: {len(mine)} letters"
    assert set(mlps) == {"M"}, f"{case}: the second letter of a pair is M"
    assert set(mixers) <= {"S", "A"}, f"{case}: the first letter of a pair is S or A"
    attention = [pair for pair, letter in enumerate(mixers, start=1) if letter == "A"]
    assert attention == [*range(every, pairs + 1, every)], f"{case}: attention in {attention}"
mine, all_of_it = (cache_bytes(ModelConfig(p), 1000) for p in (hybrid(12, 4), "AM × 12"))
print(f"12 pairs, every 4th: {mine.keys_values / all_of_it.keys_values:.0%} of the keys and values")

# %% [markdown]
# **2 · easy.** *Where keys and values outweigh states.* At what context length do keys and values
# outweigh states? That is, from where on does the cache of Cheems-320M hold more bytes in keys and
# values? Write `crossing(config)`: the smallest such number of tokens, without a loop over
# contexts. (`cache_bytes(config, n)` has `keys_values` and `states`, in bytes.)
#
# <details><summary>Hint</summary>
#
# Keys and values grow by the same number of bytes with each token, states don't grow. *More* bytes,
# at equality, is not reached yet.
#
# </details>


# %% tags=["exercise"]
def crossing(config):
    """The smallest context at which keys and values take more bytes than states."""
    ### BEGIN SOLUTION
    per_token = cache_bytes(config, 1).keys_values
    return cache_bytes(config, 0).states // per_token + 1
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import calls_of, not_none

for name in ("cheems-320m", "jamba-283m", "otce-tiny", "otce-1b"):
    config = preset(name)
    with calls_of(cache_bytes) as counted:
        found = not_none(crossing(config))
    assert len(counted) <= 6, f"cache_bytes was called {len(counted)} times: no loop over contexts"
    at, before = cache_bytes(config, found), cache_bytes(config, found - 1)
    assert at.keys_values > at.states, f"{name}: at your context, not yet more"
    assert before.keys_values <= before.states, f"{name}: one token less is enough"
    print(f"{name}: from {found} tokens on")

# %% [markdown]
# **3 · medium.** *The width that makes the size.* Which feed-forward width brings a model to its
# named size? In the presets of WM Table 7, the feed-forward width $f$ brings each model to the size
# in its name. Find that width. By section 5, the number of parameters is linear in $f$, so two
# counts are enough. `replace(config, d_ff=…)` changes a configuration.
#
# <details><summary>Hint</summary>
#
# `count_parameters(config)` returns parts, each with its `total`. The difference of two counts is
# the slope of the line.
#
# </details>


# %% tags=["exercise"]
def fit_d_ff(config, goal):
    """The whole number d_ff that brings the parameter count closest to `goal`."""

    ### BEGIN SOLUTION
    def total(d_ff):
        return sum(part.total for part in count_parameters(replace(config, d_ff=d_ff)).values())

    return round(1 + (goal - total(1)) / (total(2) - total(1)))
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref import budget
from cheems_ref.exercises import forbidden, not_none

goals = {"llama-320m": 320e6, "cheems-320m": 320e6, "jamba-1.3b": 1.3e9, "llama-1.3b": 1.301e9}
for name, goal in goals.items():
    config = preset(name)
    with forbidden(budget.fit_d_ff):
        mine = not_none(fit_d_ff(config, goal))
    assert int(mine) == mine, f"{name}: {mine} is no whole number"
    mine = int(mine)
    sizes = {f: total_and_active(replace(config, d_ff=f))[0] for f in range(mine - 1, mine + 2)}
    off = {f: abs(size - goal) for f, size in sizes.items()}
    assert min(off, key=off.get) == mine, f"{name}: a neighbour of {mine} comes nearer"
    print(f"{name}: f = {mine}, off by {off[mine]:,.0f}; the preset, in steps of 16: {config.d_ff}")
    assert abs(mine - config.d_ff) <= 32, f"{name}: {mine} is far from the preset's width"

# %% [markdown]
# **4 · medium.** *Rows of a cache.* Write a function that selects rows of a cache. It's for any
# model, padded or not. (*Beam search* keeps the best few texts so far: at each step it drops some
# and continues others twice.) Our caches have one row per text, so you can select rows as you do in
# any tensor. Section 7 prints their fields. Some may be None. The cache of a model is a named
# tuple, too: a tuple of its layers' caches, `n_tokens`, and the pattern, a string.
#
# <details><summary>Hint</summary>
#
# One recursion handles everything: tensors, tuples, and what is neither. `type(cache)(*parts)`
# makes a named tuple, which is a tuple with `_fields`.
#
# </details>


# %% tags=["exercise"]
def choose_rows(cache, rows):
    """The ModelCache with its rows replaced by rows, a tensor of indices into the batch."""
    ### BEGIN SOLUTION
    if isinstance(cache, torch.Tensor):
        return cache[rows]
    if not isinstance(cache, tuple):  # None, or the pattern
        return cache
    parts = [choose_rows(part, rows) for part in cache]
    return type(cache)(*parts) if hasattr(cache, "_fields") else tuple(parts)
    ### END SOLUTION


# %% tags=["check"]
_ = torch.manual_seed(5)
texts, following = tokens(3, 10, seed=9), tokens(4, 1, seed=10)
mask = torch.arange(10) >= torch.tensor([[0], [2], [5]])  # 10, 8 and 5 real tokens
for name, rows in (("jamba-tiny", [2, 0, 0, 1]), ("cheems-v1-tiny", [1, 2, 1, 0])):
    model = long_memory(CausalLM(preset(name)))
    with torch.no_grad():
        _, cache = model(texts, padding_mask=mask)
        _, wanted = model(texts[rows], padding_mask=mask[rows])
        beam, kind = choose_rows(cache, torch.tensor(rows)), type(cache).__name__
        assert isinstance(beam, type(cache)), f"a {kind} is asked for, not a {type(beam).__name__}"
        check(f"{name}: rows", model(following, cache=beam)[0], model(following, cache=wanted)[0])
    assert beam.pattern == cache.pattern, "the pattern is that of the model"
    for mine, right in zip([beam, *beam.layers], [wanted, *wanted.layers], strict=True):
        for field in ("n_tokens", "position_ids", "real", "k", "v", "state", "conv"):
            if (part := getattr(right, field, None)) is not None:
                same = torch.allclose(getattr(mine, field).double(), part.double())
                assert same, f"{name}: `{field}` doesn't have the rows {rows}"

# %% [markdown]
# **5 · hard.** *Speculative decoding.* Let a small model guess, and the large one judge. Write
# *speculative decoding* for greedy choice: the ids must equal those of `generate(large, prompt, n,
# Sampling(temperature=0))`. A small model guesses several ids, and the large model judges them all
# in one call: its logits tell what it would have chosen after each guess. Keep the guesses up to
# the first that it would not have chosen, and replace that one by its choice. If all were right,
# add its choice after the last. So every call yields at least one id. The check guesses with
# `noisy` copies of the large model.
#
# <details><summary>Hint</summary>
#
# Pass the whole text in every call. A cache would have to be cut back to the accepted ids, and a
# state can't be cut back.
#
# </details>


# %%
def calls_needed(right, ahead):
    """How many calls a text takes, from where the helper is right: a list of bools."""
    calls = at = 0
    while at < len(right):
        accepted = [*right[at : at + ahead], False].index(False)
        at, calls = at + accepted + 1, calls + 1
    return calls


def noisy(model, size):
    """A copy of the model with noise on the matrix of its logits."""
    helper = CausalLM(model.config)
    helper.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(helper.lm_head.weight.shape, generator=generator)
    helper.lm_head.weight.data += size * noise
    return helper


# %% tags=["exercise"]
def speculate(large, small, prompt, n, ahead=4):
    """The greedy ids (1, n) of the large model, and how often it was called to judge."""
    ### BEGIN SOLUTION
    calls, ids = 0, prompt
    while ids.shape[1] < prompt.shape[1] + n:
        guess = generate(small, ids, ahead, Sampling(temperature=0))
        with torch.no_grad():
            logits, _ = large(torch.cat([ids, guess], dim=1))
        calls += 1
        choice = logits[:, -ahead - 1 :].argmax(-1)  # after the last id, and after each guess
        agree = int((choice[:, :-1] == guess).long().cumprod(1).sum())
        ids = torch.cat([ids, choice[:, : agree + 1]], dim=1)
    return ids[:, prompt.shape[1] :][:, :n], calls
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none

_ = torch.manual_seed(6)
large = long_memory(CausalLM(ModelConfig("SE × 2 + IE", tie_embeddings=False)))
made = []  # calls of the large model that really happen
large.embedding.register_forward_hook(lambda *_: made.append(1))
for size, ahead, start in ((0, 4, 5), (0.02, 4, 5), (0.02, 2, 9)):
    prompt = tokens(1, start, seed=start)
    helper = noisy(large, size)
    made.clear()
    written, calls = not_none(speculate(large, helper, prompt, 13, ahead=ahead))
    really = len(made)
    wanted = generate(large, prompt, 13, Sampling(temperature=0))
    with torch.no_grad():
        scores, _ = helper(torch.cat([prompt, wanted], dim=1))
    right = (scores[:, prompt.shape[1] - 1 : -1].argmax(-1) == wanted)[0].tolist()
    check("speculative = greedy", written, wanted)
    needed = calls_needed(right, ahead)
    assert calls == needed, f"{ahead} ahead, {sum(right)} of 13 right: not {calls} calls"
    assert really <= calls + 1, f"the large model was called {really} times, not {calls}"
    print(f"{sum(right)} of 13 guesses right, {ahead} ahead: {calls} calls")

# %% [markdown]
# ## Further reading
#
# - Lieber et al. (2024), *Jamba: A Hybrid Transformer-Mamba Language Model*.
# - Waleffe et al. (2024), *An Empirical Study of Mamba-based Language Models*.
# - Olsson et al. (2022), *In-context Learning and Induction Heads*.
# - Zhang and Sennrich (2019), *Root Mean Square Layer Normalization*.
# - Leviathan et al. (2023), *Fast Inference from Transformers via Speculative Decoding*.
# - [Training](../book/manual/training.md) in this project's manual: how to resume a run, compare
#   models, and use yours in transformers.
#
# **What came after.** Hybrids are in use at many ratios: *Nemotron-H* and *Granite 4.0* (2025) with
# Mamba-2, *Qwen3-Next* and *Kimi Linear* (2025) with gated delta rules. The rows of section 3 are
# from their published configurations.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
