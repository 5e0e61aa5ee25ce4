# %% [markdown]
# # 00 · How to read this course
#
# **The course takes a family of language models, Cheems, apart: state space layers, rotary
# positions, attention over computed values, experts. Every chapter after this one derives something
# and then runs it. This one explains the signs: what a line with ✓ says and what it does not, the
# letters, two small languages for tensors, how to run the cells, and where to begin.** When you are
# through you can
#
# - read the line that a check prints, find the deliberate mistake beside it, and say what the two
#   show together;
# - name the axes of any tensor in the course by its letters, and the few letters that mean two
#   things;
# - read and write `einsum` and `rearrange` patterns;
# - run, change and repair a chapter;
# - choose a way through the chapters, and the place to begin.
#
# Assumes: matrix products, a little Python and PyTorch. No other chapter is needed.
#
# Sources: the checks are `cheems_ref/verify.py`. `einsum` is torch's; `rearrange` and `repeat` come
# from the package einops (Rogozhnikov, 2022).

# %% [markdown]
# **Minutes.** To teach, with the cells folded: about 35. Alone: about 55.
#
# | section | to teach | alone |
# |---|---|---|
# | Opening | 1 | 2 |
# | 1 · What a ✓ says | 2 | 3 |
# | 2 · What a ✗ says: the planted mistake | 4 | 6 |
# | 3 · As printed | 2 | 3 |
# | 4 · Letters | 4 | 7 |
# | 5 · `einsum` on one page | 3 | 5 |
# | 6 · einops: cutting and joining axes | 3 | 5 |
# | 7 · Running it | 2 | 4 |
# | 8 · The map | 6 | 9 |
# | 9 · Where to begin: a self-test | 5 | 8 |
# | Summary | 1 | 1 |

# %% tags=["setup"]
import json
import math
import re
from pathlib import Path

import torch
from einops import rearrange, repeat
from torch import einsum

from cheems_ref import plotting
from cheems_ref.compare import interval
from cheems_ref.config import expand_pattern
from cheems_ref.linear_attention import delta_rule, longhorn
from cheems_ref.retrieval import PEER
from cheems_ref.roofline import Recorder
from cheems_ref.rope import rope_frequencies
from cheems_ref.ssd import semiseparable_matrix, ssd_chunked
from cheems_ref.state_space import discretize_bilinear, ssm_kernel
from cheems_ref.tasks import multi_query_recall
from cheems_ref.verify import TOLERANCE, check, check_gradients, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## 1 · What a ✓ says
#
# A derivation ends in an equality: two ways to compute one thing. The cell after it computes both
# and hands them to `check`, with a name for what is shown:

# %%
x = random(1000, seed=0)
check("Σ x² = x · x", x.square().sum(), x @ x)

# %% [markdown]
# The line says: *the two tensors have the same shape and dtype, hold no NaN and no infinity, and*
#
# $$\max |\text{actual} - \text{expected}| \;\le\;
#   \text{tolerance} \cdot \max |\text{expected}|, \tag{0.1}$$
#
# *in the number format named in brackets.* The error is relative to the largest entry, however
# small that entry is. Where the expected result is zero, or the rounding of larger numbers, a check
# also allows an absolute error, `atol`. A check may name another tolerance than the usual one of
# its number format. The line says both. The error that was measured is not printed, for it is
# rounding and differs between machines. Where a check does not hold it raises, and the notebook
# stops: a line with ✓ in these pages has run.

# %%
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    one = torch.finfo(dtype).eps  # the distance from 1 to the next number
    print(f"{dtype!s:15} rounding {one:.1e}   tolerance {TOLERANCE[dtype]:g}")

# %% [markdown]
# A cell that is meant to fail shows its error. The message names the theorem, the largest error,
# and where it is:

# %% tags=["raises-exception"]
check("a sum is a mean", torch.tensor([1.0, 2.0, 6.0]).sum(), torch.tensor([1.0, 2.0, 6.0]).mean())

# %% [markdown]
# ## 2 · What a ✗ says: the planted mistake
#
# A check that cannot fail shows nothing. So beside the checks stand *controls*: a mistake that one
# could make is *planted*, made on purpose, and `must_differ` demands that some entry of the result
# changes by more than the amount in its brackets, relative to the largest entry of the right result
# (or to 1 if all are zero), or becomes NaN or infinite. That amount lies above the usual tolerance.
# The line begins with ✗ and ends with *caught*. **That is good news**: the mistake is wrong, and
# the check beside it would have seen it.

# %%
a, b = random(2, 50, 50, seed=1)
check("(A B)ᵀ = Bᵀ Aᵀ", (a @ b).T, b.T @ a.T)
_ = must_differ("planted: the order kept", a.T @ b.T, (a @ b).T)

# %% [markdown]
# Both lines speak of the inputs that were tried, and of nothing else. That matters more than it
# seems. Here is the same planted mistake on inputs that hide it: two diagonal matrices, whose
# product does not depend on the order.

# %%
a, b = random(50, seed=2).diag(), random(50, seed=3).diag()
check("blind: the wrong order passes on diagonal matrices", a.T @ b.T, (a @ b).T)

# %% [markdown]
# A ✓ alone would have sold the mistake as a theorem. So ask two things of every check in the
# course: *which mistake does it catch?* and *do its inputs tell right from wrong?* Chapter 03 runs
# a published listing whose mistake no test with a single chunk can see.
#
# Two functions may agree in value at the points tried, and not in slope. `check_gradients` compares
# what backpropagation gives for every input. It weights all outputs with the same random numbers
# and differentiates the sum. The steady form of $\log \sum_i e^{x_i}$, which takes the maximum off
# first, has the gradient of the plain one. If the maximum is detached where it is put back, the
# value is the same and the gradient is not:


# %%
def log_sum_exp(x):
    return x.exp().sum().log()


def steady(x):
    top = x.max()
    return (x - top).exp().sum().log() + top


def half_detached(x):
    """The same value, and a wrong gradient."""
    top = x.max()
    return (x - top).exp().sum().log() + top.detach()


x = random(6, seed=4)
check("steady log-sum-exp = plain", steady(x), log_sum_exp(x))
check("half detached = plain, in value", half_detached(x), log_sum_exp(x))
check_gradients("steady log-sum-exp = plain", steady, log_sum_exp, [x])

# %% tags=["raises-exception"]
check_gradients("half detached = plain", half_detached, log_sum_exp, [random(6, seed=4)])

# %% [markdown]
# ## 3 · As printed
#
# Where an equation, a listing or a table of a paper does not hold, a section *As printed* runs it
# the way it is printed, where it can be run, prints by how much it is off, and shows what holds. A
# quotation stands in a block like this one, with its place:
#
# > a sentence of the paper — WM §3.1
#
# The package contains the form that holds. Four documents have short names: **WM** is *Wonderful
# Matrices*, **Ch** is *Cheems*, **OTCE** is the paper of that name, all by Shi et al.; **L22** is
# lecture 22 of CMU's *Generative AI*. A number in brackets, such as (3.2), is an equation of this
# course: chapter 3, the second.
#
# What takes minutes, or differs between machines (timings, trained text), is not run while you
# read: it is drawn from a *record*, a file that names the command which wrote it. Where
# seconds suffice, a smaller run of the same claim is made and asserted live. These are the records:

# %%
for path in sorted(Path("../figures/records").glob("*.json")):
    record = json.loads(path.read_text())
    print(f"{path.stem:22} {record['command']}")

# %% [markdown]
# ## 4 · Letters
#
# A shape is a word of letters: $(b, l, h, p)$ is *batch, length, heads, head width*. Comments in
# the code carry shapes, the names of axes in `einsum` and `rearrange` are these letters. What
# these tables name means the same in every chapter; where a chapter needs one of the letters for
# something else, it says so there.
#
# | axis | | axis | |
# |---|---|---|---|
# | $b$ | rows of a batch | $n$ | state size: width of keys and queries in a state |
# | $l$ | length in tokens | $c$ | number of chunks; $l_c$: tokens per chunk |
# | $t$ | the token that reads (target, query) | $k$ | how many are chosen (top-$k$) |
# | $s$ | the token that writes (source, key) | $e$ | number of experts |
# | $d$ | width of the model | $r$ | product keys per half: $e = r^2$ |
# | $h$ | heads | $m$ | width of half a query |
# | $g$ | groups of heads | $f$ | width of a feed-forward layer |
# | $p$ | width of a head | $i, j$ | indices: of an entry, a rotary pair, an expert |
#
# | vector, matrix, rate | meaning |
# |---|---|
# | $x_t$, $y_t$ | input and output at token $t$ |
# | $q_t$, $k_s$, $v_s$ | query (reads), key (is found by), value (is read) |
# | $C_t$, $B_s$ | the query and the key of a state space model: what reads, what writes |
# | $h_t$ | the state after token $t$; the literature of chapter 02 writes $S_t$ |
# | $A$ | the rate at which a state decays, $\le 0$; in chapter 01 first a matrix |
# | $\Delta_t$ (`dt`) | step size: how much time token $t$ takes |
# | $\alpha_t = e^{g_t}$ | the share of a state left after token $t$, and its log $g_t$ |
# | $\beta_t$ | strength of a write |
# | $D$ | the skip connection past a state |
# | $K$, $M$, $L$ | a kernel; a whole layer as a matrix, $y = Mx$; the decays in it |
# | $\theta_i$, $\varphi$, $\Phi_t$ | angle per token of a rotary pair; another; summed |
# | $\delta = t - s$ | distance in tokens |
# | base, $l_0$, $\rho$ | the base of rotary angles; the training length; a stretching factor |
# | $w_{ts}$, $\mu_s$ | an attention weight; what a learned mask adds before the softmax |
# | $\kappa$ | a key of a table that is looked up in |
# | $\sigma$ | the sigmoid; SiLU is written out |
#
# **Letters with two meanings.** The papers use some for two things, and so do we: $h$ counts heads,
# and $h_t$ is the state. $k$ counts the chosen, and $k_s$ is a key. $e$ counts experts, and $e^x$
# is the exponential. $g$ counts groups, $g_t$ is a log decay, and $g_i$ the gate of an expert. $T$
# is a matrix, and $^\top$ transposes. The capitals S, A, I, M, E … of a *pattern* (chapter 07) name
# layers. Other letters, such as λ, ω, η, τ, u, z, belong to the section that introduces them.
#
# **Words.** A *token* is one element of a sequence, whatever it stands for; its *position* is its
# number among the real tokens of its row, from 0. A *layer* is one letter of
# a model's pattern (chapter 07). A *pair* in chapter 04 is two coordinates that turn together.
#
# The one rule to know by heart: head $i$, counted from 0, uses group $\lfloor i / (h/g) \rfloor$,
# so heads of a group are neighbours.

# %%
h, g = 6, 2
print("heads 0 to 5 use the groups", [i // (h // g) for i in range(h)])

# %% [markdown]
# ## 5 · `einsum` on one page
#
# `einsum` multiplies tensors and sums. Name the axes of each input and of the output:
#
# - a letter that the output lacks is summed over;
# - a letter that occurs in several inputs runs through them together;
# - the order of the output's letters is the order of its axes.
#
# So the scores of attention, $\sum_n q_{bthn}\, k_{bshn}$ for every $b, h, t, s$, are five nested
# loops or one line:

# %%
q, k = random(2, 3, 2, 4, seed=5), random(2, 5, 2, 4, seed=6)  # (b, t, h, n) and (b, s, h, n)
scores = torch.zeros(2, 2, 3, 5)
for b, h, t, s in torch.cartesian_prod(*(torch.arange(size) for size in scores.shape)):
    for n in range(4):
        scores[b, h, t, s] += q[b, t, h, n] * k[b, s, h, n]

check("einsum = loops", einsum("bthn,bshn->bhts", q, k), scores)
wrong = einsum("bthn,bsgn->bhts", q, k)  # two letters for one axis: the key's heads are summed
_ = must_differ("planted: h and g for the same axis", wrong, scores)

# %% [markdown]
# The planted mistake runs without complaint: a new letter means "another axis", and one that the
# output lacks is summed away. When a result is wrong, look for a letter that stands in one place
# only.
#
# Some patterns, each beside what it replaces:

# %%
u, w, M, X = random(4, seed=7), random(4, seed=8), random(4, 4, seed=9), random(3, 4, seed=10)
check("inner product", einsum("i,i->", u, w), (u * w).sum())
check("outer product", einsum("i,j->ij", u, w), u[:, None] * w[None, :])
check("matrix times vector", einsum("ij,j->i", M, w), M @ w)
check("vector times matrix", einsum("i,ij->j", u, M), M.T @ u)
check("rows times a matrix", einsum("li,ij->lj", X, M), X @ M)
check("entry by entry, then summed", einsum("ij,ij->", M, M), M.square().sum())
check("weights on the diagonal", einsum("ij,j->ij", M, w), M @ w.diag())

# %% [markdown]
# A state and what is read from it, as in chapters 01 to 03: write the outer
# product $x\,B^\top$ for every row and head, read with $C$.

# %%
b, h, p, n = 2, 3, 4, 4  # p = n, so that a mistake in the axes has the right shape
x, B, C = random(b, h, p, seed=11), random(b, h, n, seed=12), random(b, h, n, seed=13)
state = einsum("bhp,bhn->bhpn", x, B)
y = einsum("bhpn,bhn->bhp", state, C)
print("state", tuple(state.shape), "  read", tuple(y.shape))
by_hand = x * (B * C).sum(-1, keepdim=True)  # (x Bᵀ) C = x (B · C)
check("written, then read = x (B · C)", y, by_hand)
_ = must_differ("planted: read along p", einsum("bhpn,bhp->bhn", state, C), by_hand)

# %% [markdown]
# ## 6 · einops: cutting and joining axes
#
# `rearrange` renames, moves, cuts and joins axes and changes no number. Brackets join: `(h p)` is
# one axis that runs through $p$ for each $h$, the *last* letter fastest.

# %%
x = torch.arange(12.0)[None, None]  # (b, l, d) = (1, 1, 12)
heads = rearrange(x, "b l (h p) -> b l h p", h=3)
print("head by head:    ", heads[0, 0].int().tolist())
interleaved = rearrange(x, "b l (p h) -> b l h p", h=3)
print("planted, (p h):  ", interleaved[0, 0].int().tolist())
check("cut and joined again = unchanged", rearrange(heads, "b l h p -> b l (h p)"), x)
check("cut by unflatten = cut by rearrange", x.unflatten(-1, (3, 4)), heads)
_ = must_differ("planted: the letters in the other order", interleaved, heads)

# %% [markdown]
# Both run, and both have the right shape. The same slip with the groups of section 4 is the
# difference between *repeat each* and *tile*; mamba-ssm and this course repeat each.

# %%
B = torch.tensor([10.0, 20.0])[None, None, :, None]  # (b, l, g, n) = (1, 1, 2, 1)
each = repeat(B, "b l g n -> b l (g i) n", i=3)
tiled = repeat(B, "b l g n -> b l (i g) n", i=3)
print(
    "B of heads 0 to 5:",
    each.flatten().int().tolist(),
    "  planted, (i g):",
    tiled.flatten().int().tolist(),
)
by_rule = torch.stack([B[:, :, i // 3] for i in range(6)], dim=2)
check("repeat (g i) = head i uses group i // (h/g)", each, by_rule)
_ = must_differ("planted: tiled", tiled, by_rule)

# %% [markdown]
# Chunks are the same cut along the length: `(c l)` is chunk by chunk, and `l` in the bracket is the
# place within a chunk, of which there are $l_c$.

# %%
x = torch.arange(6.0)[None, :, None]  # (b, l, d) = (1, 6, 1)
chunks = rearrange(x, "b (c l) d -> b c l d", l=3)  # l_c = 3 tokens per chunk
print("chunks:", chunks[0, ..., 0].int().tolist())
check("chunk 1 = tokens 3 to 5", chunks[:, 1], x[:, 3:])
_ = must_differ("planted: (l c)", rearrange(x, "b (l c) d -> b c l d", l=3), chunks)

# %% [markdown]
# ## 7 · Running it
#
# - `make lab` opens the notebooks in JupyterLab. Run cells with Shift+Enter, from the top: a
#   section uses its own variables, what `setup` cells define, and functions from above.
# - `make course` runs every chapter and writes the notebooks and figures anew; `make test` runs all
#   of them again and compares what they print, letter by letter, but for the one cell of versions
#   and the verdicts on mamba-ssm's kernel, which may be missing.
# - Cells tagged `setup` (imports, constants, tools, reading a record) and `figure` (drawing) can be
#   folded in a lecture; nothing is derived in them.
# - A red-white-blue heat map is signed: red above zero, blue below. White to blue starts at zero.
# - Exercises end each chapter from 01 on, graded easy, medium, hard. Write your solution between
#   the marks `### BEGIN SOLUTION` and `### END SOLUTION`, in place of the one that stands there,
#   and run the check cell below it.
# - Numbers come in float64 in derivations, since there an error of $10^{-10}$ is a mistake and not
#   rounding. Experiments that train have fixed seeds, many use float32, and their bounds have
#   room: training is not the same to the last digit on every machine.
#
# *A check fails on your machine?* Read which theorem, and how large the error is against the
# tolerance. Just above it: rounding, please report it. Far above: something was changed; run the
# notebook from the top. *You changed a chapter?* Its source is the `.py` file beside the notebook.
#
# The same seed gives the same numbers, and another seed others:

# %%
check("seed 0 twice", random(3, seed=0), random(3, seed=0))
_ = must_differ("seed 1", random(3, seed=1), random(3, seed=0))

# %% [markdown]
# ## 8 · The map
#
# Which chapter builds on which, as the line "Assumes" at the head of each chapter has it. (Single
# remarks look back further, in 02 at 01, and in 03 at 01 and 02.) Where other arrows lead the same
# way round, none is drawn.


# %% tags=["setup"]
def title(path):
    """A chapter's number and title, from its first line of text."""
    return re.search(r"^# # (\d\d · .+)$", path.read_text(), re.MULTILINE)[1]


def assumed(path):
    """The numbers of the chapters in the first sentence of what a chapter says it assumes."""
    sentence = re.search(r"Assumes:(.*?)\.\s", path.read_text(), re.DOTALL)[1]
    ranges = re.findall(r"chapters (\d\d) to (\d\d)", sentence)
    between = {f"{i:02}" for first, last in ranges for i in range(int(first), int(last) + 1)}
    listed = re.findall(r"chapters? (\d\d(?:(?:,| and) \d\d)*)", sentence)
    return sorted(between | set(re.findall(r"\d\d", " ".join(listed))))


# %%
chapters = sorted(Path(".").glob("*.py"))
needs = {path.name[:2]: assumed(path) for path in chapters}
for path in chapters:
    print(f"{title(path):52} builds on", ", ".join(needs[path.name[:2]]) or "none")
assert all(first < number for number, direct in needs.items() for first in direct)


# %%
def before(number):
    """All chapters that a chapter builds on, directly or by way of another."""
    return set(needs[number]).union(*map(before, needs[number]))


round_about = {number: set().union(*map(before, direct)) for number, direct in needs.items()}
arrows = [(a, number) for number in needs for a in needs[number] if a not in round_about[number]]


# %% tags=["figure"]
def draw_map(ax, spots, arrows):
    """Names at their spots, and an arrow from each chapter to those that build on it."""
    place_of = {name[:2]: place for name, place in spots.items()}
    for name, place in spots.items():
        ax.text(*place, name, ha="center", va="center", fontsize=16)
    for first, number in arrows:
        style = dict(arrowstyle="->", shrinkA=52, shrinkB=56, lw=1.6)
        ax.annotate("", place_of[number], place_of[first], arrowprops=style)
    ax.set(xlim=(-0.4, 5.4), ylim=(-0.9, 2.5))
    ax.axis("off")


# %% tags=["figure"]
spots = {"01 states": (0, 2.2), "02 updates": (0, 1.4), "11 claims": (4, 2.1)}
spots |= {"03 duality": (0, 0), "04 rotary": (1, 0), "05 attention": (2, 0), "06 experts": (2, 0.9)}
spots |= {"07 models": (3, 0.45), "08 recall": (4, 0.45), "09 ablations": (5, 0.45)}
spots |= {"10 efficiency": (4, -0.6), "12 ranks": (4, 1.3)}
fig, ax = plotting.figure(size=(14, 3.8))
draw_map(ax, spots, arrows)
plotting.save(fig, "00_map", "; ".join(f"an arrow from {a} to {z}" for a, z in arrows))

# %% [markdown]
# **For a lecturer.** The second cell of each chapter has the minutes of its sections, to teach with
# the cells folded and to study alone. They are counted from the text at fixed rates (words, lines,
# equations, figures, exercises), fitted to what one or two readers of each of chapters 01 to 07
# needed: you may well be faster or slower by a third. Here the course is cut into 19 sittings
# of 50 to 90 minutes, which leaves little room for questions; *As printed* is what can be left to
# the class.


# %% tags=["setup"]
def timetable(path):
    """The sections of a chapter: (chapter, section, to teach, alone), from its minutes."""
    rows = re.findall(r"^# \| (.+) \| (\d+|–) \| (\d+) \|$", path.read_text(), re.MULTILINE)
    return [
        (path.name[:2], name, 0 if teach == "–" else int(teach), int(alone))
        for name, teach, alone in rows
    ]


def sittings(sections, number):
    """Sections in order, in a number of sittings of which the longest is as short as can be."""
    for limit in range(max(teach for *_, teach, _ in sections), 1000):
        packed = [[]]
        for section in sections:
            if sum(teach for *_, teach, _ in packed[-1]) + section[2] > limit:
                packed.append([])
            packed[-1].append(section)
        if len(packed) <= number:
            return packed


def places(sitting):
    """The chapters of a sitting, each with its numbered sections: "03 §8 to §13"."""
    numbers = {}
    for chapter, name, *_ in sitting:
        numbers.setdefault(chapter, []).extend(re.findall(r"^\d+(?= ·)", name))
    return "; ".join(f"{chapter} §{n[0]} to §{n[-1]}" for chapter, n in numbers.items() if n)


# %%
sections = [section for path in chapters for section in timetable(path)]
plan = {("00", "01"): 2, ("02",): 2, ("03", "04"): 3, ("05",): 2, ("06", "07"): 3, ("08", "09"): 3}
plan |= {("10", "11"): 3, ("12",): 1}
print("sitting  minutes  sections")
number = 0
for group, count in plan.items():
    taught = [section for section in sections if section[0] in group and section[2]]
    for sitting in sittings(taught, count):
        number, total = number + 1, sum(teach for *_, teach, _ in sitting)
        print(f"{number:7}  {total:7}  {places(sitting)}")
        assert 50 <= total <= 90
assert number == 19

# %% [markdown]
# **Alone at night.** An hour and a half an evening. Whoever wants to arrive at a working Cheems
# soonest takes this page and 03 to 07, and leaves out *As printed* and the exercises. Whoever came
# for state spaces takes 01 to 03.

# %%
ways = {
    "all, with the exercises": (list(needs), ""),
    "a working Cheems, soonest": (["00", "03", "04", "05", "06", "07"], "As printed|Exercises"),
    "state spaces": (["00", "01", "02", "03"], ""),
}
for name, (way, without) in ways.items():
    assert set(way) >= {first for number in way for first in needs[number]}
    kept = [s for s in sections if s[0] in way and not (without and re.search(without, s[1]))]
    hours = sum(alone for *_, alone in kept) / 60
    print(f"{name:26} {', '.join(way)}: {hours:.0f} hours, {math.ceil(hours / 1.5)} evenings")

# %% [markdown]
# ## 9 · Where to begin: a self-test
#
# Seventeen small questions: two to warm up, the others on the chapters. Fill in
# numbers (fractions such as `1 / 3` are fine), run the cells below, and `news` lists the chapters
# with a question that you did not answer; the others may still hold something new. The right
# answers are computed by the package, in a folded cell; do not look before you have tried.
#
# - **a.** `einsum("bln,bsn->bls", q, k)` with b = 2, l = 3, s = 4, n = 5: how many numbers come
#   out?
# - **b.** What is the gradient of $\sum_i x_i^2$ with respect to an entry $x_i = 3$?
# - **c.** A state obeys $h' = -h$. By which factor does the *bilinear* rule multiply it in a step
#   of length 1?
# - **d.** $\bar A = \tfrac12$, $\bar B = C = 1$. What is the entry $K_3$ of the kernel $K_0, K_1,
#   \dots$?
# - **e.** Under the key $(1, 0)$ a state holds the value 2. The delta rule with $\beta = 1$ writes
#   5 under the same key. What does the key read?
# - **f.** Longhorn makes the same write with $\beta = 1$. What does the key read?
# - **g.** One head of SSD has $A = -\ln 2$, and $\Delta = B = C = 1$ at every token. What is the
#   entry $M_{31}$ of $y = Mx$, tokens counted from 0?
# - **h.** SSD with 4 heads of width 64, 2 groups, state size 16, and 1,024 tokens in chunks of 128:
#   how many numbers does the state of one row hold?
# - **i.** Rotary positions with base 10,000 for vectors of width 64: by which angle per token, in
#   radians, does pair 16 turn (the first pair is pair 0)?
# - **j.** Two keys have equal scores. A mask adds $-\ln 2$ to the first. What is its weight?
# - **k.** Product keys for 10,000 experts: how many inner products with keys does one query need?
# - **l.** How many layers has the pattern `SE × 7 + IE`?
# - **m.** A row of multi-query recall has 16 pairs. How often is an answer right that names one of
#   the row's values at random?
# - **n.** Two models were trained with three seeds each. Seed by seed the losses differ by −0.03,
#   −0.01 and −0.02, and Student's factor for three is 4.30. Does the 95 % interval of the mean
#   difference hold zero (1 for yes, 0 for no)?
# - **o.** The product of two matrices of 60 × 60 numbers of four bytes: how many operations does it
#   have per byte that it reads or writes?
# - **p.** An accuracy over 19 questions is printed as 42.11 percent. How many were answered right?
# - **q.** A text is cut into slices of 2,000 tokens. How many numbers tell what one of them does to
#   the state of a head of width 64, with $n = 128$?

# %%
answers = {"a": None, "b": None, "c": None, "d": None, "e": None, "f": None}
answers |= {"g": None, "h": None, "i": None, "j": None, "k": None, "l": None, "m": None, "n": None}
answers |= {"o": None, "p": None, "q": None}


# %% tags=["setup"]
def state_space_answers():
    """Of questions c, d, g and h."""
    one, steps = torch.ones(1, 1), torch.ones(1, 4, 1)
    M = semiseparable_matrix(
        steps, torch.tensor([-math.log(2)]), steps[..., None], steps[..., None]
    )
    x, keys = torch.zeros(1, 1024, 4, 64), torch.zeros(1, 1024, 2, 16)
    wide = dict(chunk_size=128, return_final_state=True)
    return {
        "c": discretize_bilinear(-one, one[0], 1.0)[0].item(),
        "d": ssm_kernel(0.5 * one, one[0], one[0], 4)[3].item(),
        "g": M[0, 0, 3, 1].item(),
        "h": ssd_chunked(x, x[..., 0], torch.zeros(4), keys, keys, **wide)[1].numel(),
    }


# %% tags=["setup"]
def truth():
    """The answers, computed."""
    x = torch.tensor(3.0, requires_grad=True)
    key = torch.tensor([1.0, 0.0])[None, None, None]
    write = (key, key, torch.full((1, 1, 1, 1), 5.0), torch.ones(1, 1, 1))
    held = dict(initial_state=2 * key)
    experts = PEER(8, n_experts=10_000, n_heads=1, k=1, d_query=8)
    with Recorder() as recorder:
        _ = torch.ones(60, 60).float() @ torch.ones(60, 60).float()
    product = recorder.operators[-1]
    return state_space_answers() | {
        "a": einsum("bln,bsn->bls", random(2, 3, 5, seed=0), random(2, 4, 5, seed=0)).numel(),
        "b": torch.autograd.grad(x.square(), x)[0].item(),
        "e": delta_rule(*write, **held).item(),
        "f": longhorn(*write, **held).item(),
        "i": rope_frequencies(64)[16].item(),
        "j": torch.tensor([-math.log(2), 0.0]).softmax(0)[0].item(),
        "k": experts.keys[..., 0].numel(),
        "l": len(expand_pattern("SE × 7 + IE")),
        "m": 1 / int((multi_query_recall(1, 64, 16, 64)[1] >= 0).sum()),
        "n": int(interval([-0.03, -0.01, -0.02]).holds_zero),
        "o": product.flops / product.moved,
        "p": round(42.11 * 19 / 100),
        "q": 1 + 64 * 128,
    }


# %%
asks_of = {"a": "00", "b": "00", "c": "01", "d": "01", "e": "02", "f": "02"}
asks_of |= {"g": "03", "h": "03", "i": "04", "j": "05", "k": "06", "l": "07", "m": "08", "n": "09"}
asks_of |= {"o": "10", "p": "11", "q": "12"}


def news(answers, asks_of):
    """The chapters with a question that is not answered, or not answered right."""
    right = truth()
    wrong = [q for q in right if answers[q] is None or abs(answers[q] - right[q]) > 1e-6]
    return sorted({asks_of[question] for question in wrong})


# %%
print("something new for you in", *news(answers, asks_of) or ["no chapter"])
assert news(truth(), asks_of) == []
assert news(truth() | {"e": 7, "i": 0.1}, asks_of) == ["02", "04"]

# %% [markdown]
# If the list is empty, read what you like. Else begin with the first chapter that it names, and
# read before it what it builds on (section 8). Chapters 01, 02, 03 and 06 can be begun without any
# other. 00 stands for sections 5 and 6 here (question a) and for the gradients of PyTorch (b).
#
# ## Summary
#
# - ✓ names an equality that was run, with its tolerance; ✗ names a planted mistake that the check
#   beside it would catch. Both speak of the inputs tried.
# - *As printed* runs what a paper prints and measures it. What takes long, or is not the same on
#   every machine, is drawn from a record.
# - The tables of section 4 hold in every chapter; $h$, $k$, $e$, $g$ and $T$ have two meanings.
# - In `einsum` and `rearrange`, look for the letter that stands in one place only, and for the
#   order in a bracket.
