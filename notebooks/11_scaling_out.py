# %% [markdown]
# # 11 · One text, several processes
#
# **Suppose you split a long text across four processes. What do they have to tell each other? For
# the state of SSD, very little. A pair describes all that a slice does to it, and the pair is no
# bigger for ten million tokens than for ten.** By the end you will have read the whole exchange,
# some thirty lines, and you will be able to
#
# - describe what a slice does to a state, join slices, and say which update rules allow it;
# - split a whole model across processes, and steer clear of two traps in the backward pass;
# - work out when a state layer sends fewer bytes than attention.
#
# You need chapters 01 to 05, 07, and section 8 of 10.
#
# Sources: Dao and Gu, *Transformers are SSMs* (2024), §8.2; Sun et al., *LASP-2* (2025); Liu et
# al., *Ring Attention* (2023). The package's code is `cheems_ref/distributed.py`. How to read ✓ and
# ✗: chapter 00.
#
# The picture shows two ways to cut a text along its tokens: hand on one small pair per slice, or
# pass all keys and values around.

# %% tags=["setup"]
import inspect
import json
import multiprocessing
import sys
from collections import Counter
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from time import monotonic, process_time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.patches import Rectangle
from torch import einsum
from torch.distributed.nn.functional import all_gather  # deprecated, but so far the public one

from cheems_ref import plotting
from cheems_ref.attention import attention
from cheems_ref.config import preset
from cheems_ref.convolution import short_convolution
from cheems_ref.distributed import SequenceParallel, sum_gradients
from cheems_ref.linear_attention import RULES
from cheems_ref.model import CausalLM, ModelConfig
from cheems_ref.roofline import Recorder
from cheems_ref.ssd import expand_groups, ssd_chunked, ssd_recurrent
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(b=2, l=29, h=4, p=5, g=2, n=3, dt=0.3):
    """Random inputs of SSD as in chapter 03, and an initial state after them."""
    return [
        random(b, l, h, p, seed=0),
        dt * random(b, l, h, seed=1).abs(),
        -1.0 - 7.0 * torch.arange(h) / max(h - 1, 1),
        random(b, l, g, n, seed=2),
        random(b, l, g, n, seed=3),
        random(b, h, p, n, seed=5),
    ]


# %% slide_title="A state sends one pair per slice, attention all keys and values" tags=["figure"]
plotting.show_drawing(
    "11_pairs",
    "A state layer hands on one small pair per slice, attention all keys and values. A text is cut "
    "over four ranks. Above, each rank turns its slice into a decay and a state, drawn as a grid, "
    "and an arrow leads from each to the next rank. Below, ring attention: the keys and values of "
    "every slice travel from rank to rank and around.",
)

# %% [markdown]
# A pair has a fixed size, while keys and values grow with the text. We'll build the upper way, with
# one gather in place of the chain, and compare the two.
#
# A *rank* is a process's number, from 0 to $N - 1$, and rank $i$ gets slice $i$. $l$ is the length
# of a slice, and the state is called $S$, since $h$ counts the heads. (An upright S or A is a
# layer, as in a pattern.) The others are chapter 03's: $A$ is a head's rate, $\Delta$ a step, $B$
# writes and $C$ reads.

# %% [markdown] slide_title="Why stop at chunks? Slices of any length work the same way"
# ## 1 · A slice is a pair
#
# In step 3 of chapter 03 we went from chunk to chunk: fade the state by the chunk's decay, then add
# what the chunk wrote. But why stop at chunks? Any slice $i$, however long, fades the state before
# it by $a_i$, and adds $W_i$, the state it would leave behind if it started from an empty one:
#
# $$S_{\text{after } i} = a_i\, S_{\text{before } i} + W_i, \qquad
#   a_i = \exp\Big(A \sum_{t \in i} \Delta_t\Big). \tag{11.1}$$
#
# So the pair $(a_i, W_i)$ is all that later tokens need to know about the slice: $1 + pn$ numbers
# for each head and each text of the batch.


# %% tags=["setup"]
def fade(decay, state):
    """A state (b, h, p, n) times a decay (b, h)."""
    return decay[..., None, None] * state


# %% slide_title="A slice fades the state, and adds what it writes"
def pair_of(x, dt, A, B, C):
    """The decay over a slice (b, h), and what it writes (b, h, p, n)."""
    _, written = ssd_chunked(x, dt, A, B, C, return_final_state=True)
    return (dt.sum(1) * A).exp(), written


*tokens, before = inputs()
decay, written = pair_of(*tokens)
_, after = ssd_recurrent(*tokens, initial_state=before, return_final_state=True)
print("a:", tuple(decay.shape), "  W:", tuple(written.shape))
check("fade, and add what was written = recurrence", fade(decay, before) + written, after)

# %% tags=["guard"]
x, dt, A, B, C = tokens


def positive(start, end):
    """Some tokens as positive numbers, so that shades add up; few, so that the old state shows."""
    return x[:, start:end].abs(), dt[:, start:end], A, B[:, start:end].abs(), C[:, start:end]


part = positive(0, 5)
a, W = pair_of(*part)
old = before.abs()
shown = [state[0, 0] for state in (old, fade(a, old), W, fade(a, old) + W)]  # row 0, head 0
_, reached = ssd_recurrent(*part, initial_state=old, return_final_state=True)
assert (shown[3] - reached[0, 0]).abs().max() < 1e-12 and 0.2 < a[0, 0] < 0.8
assert min(state.min() for state in shown) >= 0
a_j, W_j = pair_of(*positive(5, 7))
joint = [state[0, 0] for state in (W, fade(a_j, W), W_j, fade(a_j, W) + W_j)]
assert (joint[3] - pair_of(*positive(0, 7))[1][0, 0]).abs().max() < 1e-12


# %% tags=["figure"]
def draw_affine(ax, states, names, colors, row=2, column=1):
    """A state, the same faded, what comes in addition, and the sum: one cell with its number."""
    largest = max(state.max().item() for state in states)
    for i, (state, name, color) in enumerate(zip(states, names, colors, strict=True)):
        left, look = 0.4 + 3.2 * i, dict(color=plotting.COLORS[color], largest=largest)
        plotting.state_grid(ax, left, 1.4, state.tolist(), cell=0.6, **look)
        place = (left + 0.6 * column, 1.4 + 0.6 * (len(state) - 1 - row))
        ax.add_patch(Rectangle(place, 0.6, 0.6, fill=False, ec=plotting.INK, lw=3))
        ax.text(left + 0.9, 4.65, name, ha="center", fontsize=20)
        ax.text(left + 0.9, 0.7, f"{state[row, column]:.3f}", ha="center", fontsize=20)
        for y in (0.65, 2.75):
            ax.text(left + 2.5, y, ("→", "+", "=", "")[i], ha="center", fontsize=28)


# %% slide_title="After a slice: the old state, faded, plus a new one" tags=["figure", "slide"]
fig, ax = plotting.canvas(12.4, 5.2)
names = ("$S$ before", "$a\\,S$: faded", "$W$: written", "$S$ after")
draw_affine(ax, shown, names, colors=(2, 2, 4, 2))
plotting.save(
    fig,
    "11_one_slice",
    "Four grids of 5 by 3 cells. The green state before a slice becomes paler, the orange state "
    "that the slice writes is added, and the result is the green state after the slice. One cell "
    "is framed in all four, and its number stands below each.",
)

# %% [markdown] slide_title="Two neighbouring slices are one slice: join their pairs"
# **Two slices are one slice.** Now let slice $j$ follow slice $i$. If you plug (11.1) for $i$ into
# (11.1) for $j$, you get the same form again, so a single pair describes both:
#
# $$(a_i, W_i) \cdot (a_j, W_j) = (a_i\,a_j,\;\; a_j\,W_i + W_j). \tag{11.2}$$
#
# The earlier slice is on the left. With three slices, does it matter which two you join first? Can
# you swap two of them? And what's the pair of a slice with no tokens at all? Guess before you
# run this.


# %%
def joined(first, second):
    """Equation 11.2: the pair of two slices, one after the other."""
    return first[0] * second[0], fade(second[0], first[1]) + second[1]


# %% tags=["setup"]
def slices_of(tensors, cut):
    """x, dt, A, B, C of each slice; A has no tokens, and is the same for all."""
    x, dt, A, B, C = tensors
    pieces = zip(*(t.split(cut, 1) for t in (x, dt, B, C)), strict=True)
    return [(x, dt, A, B, C) for x, dt, B, C in pieces]


# %%
*tokens, before = inputs()
one, two, three = (pair_of(*part) for part in slices_of(tokens, (5, 14, 10)))
whole = pair_of(*tokens)
left, right = joined(joined(one, two), three), joined(one, joined(two, three))
check("(one · two) · three: the decay of the whole", left[0], whole[0])
check("(one · two) · three: what the whole writes", left[1], whole[1])
check("one · (two · three), the same", right[1], whole[1])
_ = must_differ("two · one · three", joined(joined(two, one), three)[1], whole[1])
empty = pair_of(*slices_of(tokens, (0, 29))[0])
assert (empty[0] == 1).all() and (empty[1] == 0).all()
print("an empty slice: decay 1, nothing written")

# %% slide_title="A join fades the first write, and adds the second" tags=["figure", "slide"]
fig, ax = plotting.canvas(12.4, 5.2)
draw_affine(ax, joint, ("$W_i$", "$a_j W_i$: faded", "$W_j$", "of both"), colors=(4, 4, 4, 4))
plotting.save(
    fig,
    "11_joined",
    "Four orange grids of 5 by 3 cells. What the first of two slices wrote becomes paler, what the "
    "second wrote is added, and the result is what both wrote. One cell is framed in all four, and "
    "its number stands below each.",
)

# %% [markdown]
# The grouping doesn't matter, but the order does. The scan of chapter 01 joined two tokens the same
# way.

# %% [markdown] slide_title="A rank needs to know what the earlier slices did to the state"
# ## 2 · Run first, read later
#
# Rank $i$ needs the state just before its slice.
#
# The initial state after the pairs of all earlier slices, but not that of slice $i$ itself, is
# called an *exclusive prefix*:


# %% slide_title="If ranks wait for their states, one works at a time" slide_figure="11_run_first:1"
def states_between(pairs, state):
    """The state before each slice, and the one after the last."""
    states = [state]
    for decay, written in pairs:
        states.append(fade(decay, states[-1]) + written)
    return states


# %% [markdown] slide_title="No rank has to wait: it reads later"
# Does a rank have to wait for that state? No. A token reads the state after its own fade (step 4 of
# chapter 03), so the incoming state reaches token $t$ faded by all decays of the slice up to and
# including its own.
#
# A slice can run alone, from an empty state, and add this read afterwards, because the faded state
# from before adds to what the slice wrote, and a read is linear:
#
# $$y_t = y_t^{\text{alone}} +
#   \underbrace{e^{A(\Delta_{\text{start}} + \dots + \Delta_t)}}_{\text{up to and including } t}\;
#   S_{\text{before } i}\, C_t. \tag{11.3}$$


# %%
def reads(dt, A, C, state):
    """The last term of (11.3), for all tokens of a slice."""
    left = (dt * A).cumsum(1).exp()
    return einsum("blh,blhn,bhpn->blhp", left, expand_groups(C, len(A)), state)


# %% tags=["setup"]
def in_slices(parts, states):
    """Equation 11.3 for every slice, with the slices put back together."""
    y = [
        ssd_chunked(x, dt, A, B, C) + reads(dt, A, C, state)
        for (x, dt, A, B, C), state in zip(parts, states, strict=True)
    ]
    return torch.cat(y, dim=1)


# %% slide_title="All ranks run at once; pairs and reads come after" tags=["figure", "slide"]
plotting.show_drawing(
    "11_run_first",
    "Two schedules for four ranks. On the left each rank starts when the one before has finished. "
    "On the right all run their slices at once, exchange pairs, and ranks 1 to 3 add their reads.",
)

# %% [markdown]
# So most of the work is done before anything is exchanged. Let's try it on some awkward cuts,
# uneven or with empty slices. The mistake to watch for is an *inclusive* prefix, the state after a
# slice instead of the state before it.

# %%
*tokens, initial = inputs()
y = ssd_recurrent(*tokens, initial_state=initial)
for cut in ((29,), (1, 0, 20, 8), (0, 28, 0, 1), (8, 7, 9, 5)):
    parts = slices_of(tokens, cut)
    states = states_between([pair_of(*part) for part in parts], initial)
    check(f"slices of {cut}: one pass", in_slices(parts, states[:-1]), y)
_ = must_differ("inclusive prefix", in_slices(parts, states[1:]), y)

# %% [markdown] slide_title="All five rules of chapter 02 treat the old state as an affine map"
# ## 3 · Which update rules have a pair?
#
# Section 1 used one fact about SSD: the state after a slice is an affine function of the state
# before it. That's true of all five rules of chapter 02. In general a matrix multiplies the state
# from the right,
#
# $$S_{\text{after } i} = S_{\text{before } i}\, M_i + W_i, \qquad
#   (M_i, W_i) \cdot (M_j, W_j) = (M_i M_j,\;\; W_i M_j + W_j), \tag{11.4}$$
#
# and for SSD, $M_i = a_i I$. To find $M_i$ for another rule, start it with the identity as its
# state and write nothing but zeros: by (11.4), $I M_i + 0 = M_i$ is left. The identity has $n$ rows
# instead of $p$, but a rule treats each row of a state by itself. For $W_i$, start it with zeros
# and write the values.


# %% tags=["setup"]
def final_state(name, k, v, gates, state=None):
    """The state after a slice, by a rule of chapter 02; gates: its log decay g, its step beta."""
    rule = RULES[name]
    gates = [gates[gate] for gate in rule.takes]
    # the query doesn't touch the state, so k stands in for it
    return rule.function(k, k, v, *gates, initial_state=state, return_final_state=True)[1]


# %% slide_title="Start a rule from the identity, write zeros, and out comes its matrix"
def general_pair(name, k, v, gates):
    """(M, W) of a slice: (b, h, n, n) and (b, h, p, n)."""
    b, _, h, n = k.shape
    eye = torch.eye(n).expand(b, h, n, n)
    M = final_state(name, k, torch.zeros_like(k), gates, eye)
    return M, final_state(name, k, v, gates)


# %% [markdown]
# How much of $M$ really has to travel? Take a slice of 6 tokens, with keys of 16 numbers, and let
# $c$ be the product of its decays (1 if the rule has none). Keep an eye on the matrix rank of $M -
# cI$.

# %% tags=["aside"]
k, v = F.normalize(random(1, 6, 1, 16, seed=20), dim=-1), random(1, 6, 1, 4, seed=21)
gates = dict(g=-random(1, 6, 1, seed=22).abs(), beta=random(1, 6, 1, seed=23).sigmoid())
old = random(1, 1, 4, 16, seed=24)
ranks, sizes = {}, {}
for name, rule in RULES.items():
    M, W = general_pair(name, k, v, gates)
    check(f"{name}: S M + W", old @ M + W, final_state(name, k, v, gates, old))
    kept = gates["g"].sum().exp() if "g" in rule.takes else 1.0
    ranks[name] = torch.linalg.matrix_rank(M - kept * torch.eye(16), atol=1e-9).item()
    sizes[name] = torch.linalg.svdvals(M / kept - torch.eye(16))[0, 0].tolist()
    assert ranks[name] == (6 if "beta" in rule.takes else 0)
print("matrix rank of M - cI:", *(f"{name} {rank}" for name, rank in ranks.items()), sep="\n  ")

# %% tags=["guard"]
for name, rule in RULES.items():  # a token reads the old state through the M up to the token
    taken = [gates[gate] for gate in rule.takes]
    y = [rule.function(k, k, v, *taken, initial_state=state) for state in (old, 0 * old)]
    for l in range(1, 7):
        M, _ = general_pair(name, k[:, :l], v[:, :l], {g: gates[g][:, :l] for g in gates})
        read = einsum("bhpn,bhn->bhp", old @ M, k[:, l - 1])
        assert torch.allclose((y[0] - y[1])[:, l - 1], read)
assert [min(2 * l * 128 + 1, 128**2) for l in (6, 63, 64, 65)] == [1537, 16_129, 16_384, 16_384]
for found in (sizes[name] for name, rank in ranks.items() if rank):
    assert found[5] > 0.01 > 1e-9 > found[6]
assert torch.allclose(*(torch.tensor(sizes[name]) for name in ("DeltaNet", "Gated DeltaNet")))


# %% tags=["figure"]
def draw_ranks(ax, sizes):
    """Dots: the singular values of two rules, hollow where they are zero."""
    for name, color in (("Longhorn", plotting.COLORS[0]), ("DeltaNet", plotting.COLORS[2])):
        ax.plot(range(1, 7), sizes[name][:6], "o", color=color, ms=13)
        ax.plot(range(7, 17), sizes[name][6:], "o", color=color, ms=13, mfc="w", mew=2.5)
    ax.axvline(6.5, color=plotting.QUIET, linestyle=":")
    ax.text(1.3, 0.68, "DeltaNet, gated or not", color=plotting.COLORS[2], fontsize=18, va="center")
    ax.text(0.8, 0.38, "Longhorn", color=plotting.COLORS[0], fontsize=18, va="center")
    ax.text(8, 0.3, "all the others are 0", fontsize=18), ax.set_xticks(range(1, 17))


# %% slide_title="Six delta-rule tokens leave a correction of rank 6" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(10, 4.4))
draw_ranks(ax, sizes)
ax.set_xlabel("singular values of $M/c - I$, the largest first", fontsize=18)
ax.set_ylabel("size", fontsize=18)
ax.tick_params(labelsize=18)
plotting.save(
    fig,
    "11_rank",
    "Dots: the 16 singular values of M/c - I after six tokens, for the rules that have a step. Six "
    "are above zero, and ten, hollow, are zero. Those of DeltaNet and Gated DeltaNet are equal.",
)

# %% [markdown] slide_title="Softmax attention has no pair, so its keys and values travel instead"
# Linear attention and Mamba-2 only scale the old state. The three rules with a step $\beta$ also
# correct it along each token's key. Why rank 6? Multiply out six factors of the form $I - \beta k
# k^\top$. Every term but $I$ begins with one of six keys, so all columns of the rest are
# combinations of six keys: it has rank 6 at most. (Decays scale $I$ and the rest alike.)
#
# This correction can travel as two factors of $6n$ numbers each, unless it's cheaper to send all
# $n^2$. For $n = 128$ that's $2 \cdot 6 \cdot 128 = 1{,}536$ numbers after 6 tokens, and one more
# for $c$; from 64 tokens on it's 16,384. The $pn$ numbers of $W$ come on top:
#
# | rule | its matrix $M_i$ | numbers of $M_i$ |
# |---|---|---|
# | linear attention | $I$ | 0 |
# | Mamba-2, SSD | $a_i I$ | 1 |
# | Longhorn, DeltaNet, Gated DeltaNet | $cI$ + rank $l$ or less | at most $\min(2ln + 1, n^2)$ |
# | softmax attention | none, and no $W$ | all keys and values instead |
#
# So a delta rule's pair stops growing too, at $n^2 + pn$ numbers where SSD has about $pn$. But to
# join two of them takes a product of matrices, and to read later, token $t$ needs the matrix of the
# slice up to $t$ instead of the single decay in (11.3). A recurrent network with a tanh has no such
# pair: a tanh isn't affine.
#
# Then how can ranks share a softmax? *For one query*, a slice of keys has a summary too: its
# largest score, its sum of exponentials, and its weighted sum of values. To join two such triples,
# rescale the sums of both to the larger score, then add (chapter 10). In *ring attention* (Liu et
# al.) the keys and values go from rank to rank, and each rank joins one more triple for each of its
# queries. **A pair doesn't know the query, so it can be computed once and sent. A triple does, so
# the keys have to travel.** (You could send the queries round, but there are at least as many heads
# of queries as of keys, and their triples would have to come back.)

# %% slide_title="In a ring, keys and values visit every rank in turn" tags=["figure", "slide"]
plotting.show_drawing(
    "11_ring",
    "Four ranks in four steps. At step 0 each rank holds its own keys and values, then those of "
    "the rank before, and so on. Keys of later slices, which no query there may see, are grey.",
)

# %% [markdown]
# ## 4 · Four processes
#
# Now each slice gets its own process. The processes form a *group* and talk through
# *collectives*, calls that all members make together.
#
# In an `all_gather`, every rank contributes a tensor and gets everybody's tensors. In a
# `reduce_scatter`, every rank contributes one tensor *per rank* and gets the sum of those addressed
# to it. That's how gradients travel back through an `all_gather`: every rank has used rank $j$'s
# tensor, so rank $j$ needs the sum of all their gradients. In an `all_reduce`, every rank
# contributes a tensor and gets the sum of them all.

# %% slide_title="Gather, scatter sums, or sum for all" tags=["figure", "slide"]
plotting.show_drawing(
    "11_collectives",
    "Three collectives on three ranks, whose numbers are blue, orange and green. In an all_gather, "
    "each gives one number and gets all three. In a reduce_scatter, each gives a row of three, and "
    "rank i gets the sum of column i. In an all_reduce, each gives one, and all get the sum.",
)

# %% [markdown]
# Now we need four processes. Our helper `on_ranks` starts them, as `torchrun` would. `work(rank,
# ...)` runs on every rank, and we get back a list of the results. A rank knows nothing of this
# notebook, so `on_ranks` also sends it the source of every helper that `work` calls. The ranks use
# *gloo*, torch's backend for CPUs.

# %% tags=["setup"]
RANK = """
import faulthandler, os
from collections import Counter
from datetime import timedelta
from functools import partial
from time import monotonic, process_time
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import einsum
from torch.distributed.nn.functional import all_gather
from cheems_ref.distributed import SequenceParallel, sum_gradients
from cheems_ref.model import CausalLM, ModelConfig
from cheems_ref.ssd import expand_groups, ssd_chunked

faulthandler.dump_traceback_later(60, exit=True)
os.dup2(os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)  # stderr
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
store = dist.FileStore(f"{folder}/meeting", 4)
dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
"""
END = """
torch.save(globals()[work](rank, **given), f"{folder}/{rank}.pt")
dist.barrier()  # who leaves early ends the waiting of others
"""

# %% tags=["setup"]
# A process forked from one that has imported torch needn't import it again.
processes = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
processes.set_forkserver_preload(["torch.distributed.nn", "torch._dynamo", "cheems_ref.model"])


def on_ranks(work, *helpers, **given):
    """What work(rank, **given) returns on each of four processes; work may call the helpers."""
    program = "\n\n".join([RANK, *map(inspect.getsource, (*helpers, work)), END])
    with TemporaryDirectory() as folder:
        known = dict(folder=folder, work=work.__name__, given=given)
        ranks = [
            processes.Process(target=exec, args=(program, known | {"rank": rank}))
            for rank in range(4)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError("the ranks failed:\n" + Path(folder, "log").read_text()[-1600:])
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(4)]


# %% [markdown]
# If pairs went from rank to rank, as in the drawing, each rank would wait for its predecessor. So
# we make one collective call instead: gather all pairs on all ranks, and let each rank work out its
# own prefix.

# %% slide_title="A chain sends less than a gather, and takes longer" tags=["figure", "slide"]
plotting.show_drawing(
    "11_chain",
    "Left, a gather: each of four ranks sends its pair to the three others, in one step. Right, a "
    "chain: rank 0 sends to 1, then 1 to 2, then 2 to 3.",
)


# %% [markdown] slide_title="One gather replaces the chain, and each rank joins its own prefix"
# Here is what one rank does, (11.1) and (11.3). `packed` makes one tensor of a pair, and `unpacked`
# undoes it. Ignore `tie` until section 5:


# %% tags=["setup"]
def packed(decay, written):
    """A pair as one tensor (b, h, 1 + p n)."""
    return torch.cat([decay[..., None], written.flatten(2)], -1)


def unpacked(pair, p):
    """(a, W) of a packed pair."""
    return pair[..., 0], pair[..., 1:].unflatten(-1, (p, -1))


def leaves_of(tensors, cut, rank):
    """A rank's slice of x, dt, B and C, and all of A, with respect to which we differentiate."""
    return [t.clone().requires_grad_() for t in slices_of(tensors, cut)[rank]]


# %%
def by_hand(x, dt, A, B, C, rank, gather, tie=False):
    """y of this slice, from the pairs of the ranks before."""
    y, written = ssd_chunked(x, dt, A, B, C, return_final_state=True)
    mine = packed((dt.sum(1) * A).exp(), written)  # one tensor
    pairs = gather(mine)
    earlier = [unpacked(pair, x.shape[-1]) for pair in pairs[:rank]]
    states = states_between(earlier, torch.zeros_like(written))
    if tie:
        y = y + 0 * sum(pair.sum() for pair in pairs)
    return y + reads(dt, A, C, states[-1])


# %% tags=["setup"]
HELPERS = slices_of, fade, states_between, reads, leaves_of, packed, unpacked, by_hand

# %% [markdown]
# Does it work on four processes, for uneven and empty slices? We use the `all_gather` of
# `torch.distributed.nn`, because gradients can pass through it.


# %%
def read_slice(rank, tensors, cut):
    """y of this rank's slice."""
    return by_hand(*leaves_of(tensors, cut, rank), rank, all_gather).detach()


*tokens, _ = inputs()
y = ssd_recurrent(*tokens)
for cut in ((8, 7, 9, 5), (1, 0, 20, 8), (0, 28, 0, 1)):
    ranks = on_ranks(read_slice, *HELPERS, tensors=tokens, cut=cut)
    check(f"slices of {cut}: four processes = one pass", torch.cat(ranks, 1), y)

# %% [markdown] slide_title="The forward pass is right, but the backward pass has two traps"
# ## 5 · Two traps in the backward pass
#
# The forward pass is right. Can we train with it? Let each rank differentiate the sum of its $y^2$.
# Autograd only goes back through what this sum depends on, and going back through an `all_gather`
# is itself a collective. We set a timeout of two seconds, so that a rank that waits in vain raises
# an error.


# %% tags=["setup"]
def differentiated(rank, tensors, cut, tie):
    """Gradients of this rank's sum of y²; and the seconds until the backward pass timed out."""
    leaves = leaves_of(tensors, cut, rank)
    group = dist.new_group(timeout=timedelta(seconds=2))
    y = by_hand(*leaves, rank, partial(all_gather, group=group), tie)
    begun = monotonic()
    try:
        x, _, A, *_ = torch.autograd.grad(y.square().sum(), leaves)
    except RuntimeError:
        return dict(waited=monotonic() - begun)
    return dict(x=x, A=A, waited=0.0)


# %% [markdown] slide_title="Rank 0 finishes its backward pass, and the others wait for it"
# So which ranks will finish their backward pass?

# %% slide_figure="11_silent_rank:1"
*tokens, _ = inputs()
given = dict(tensors=tokens, cut=(8, 7, 9, 5))
ranks = on_ranks(differentiated, *HELPERS, tie=False, **given)
for rank, found in enumerate(ranks):
    print(f"rank {rank}, backward:", "waited until the timeout" if found["waited"] else "done")

# %% tags=["guard"]
assert ranks[0]["waited"] == 0 and min(found["waited"] for found in ranks[1:]) > 1.9
x, *others = [t.clone().requires_grad_() for t in tokens]
(by_x,) = torch.autograd.grad(ssd_recurrent(x, *others).square().sum(), x)
own, others = (by_x[:, :8] - ranks[0]["x"]).abs(), by_x[:, :8].abs()
assert own.max() > 0.01 * others.max()  # without what later ranks did with its pair
assert dist.distributed_c10d.default_pg_timeout == timedelta(minutes=30)


# %% slide_title="Rank 0 skips the collective in which ranks 1 to 3 wait" tags=["figure"]
plotting.show_drawing(
    "11_silent_rank",
    "Rank 0 finishes its backward pass without a collective, and ranks 1 to 3 wait for it there. "
    "Until then, on four time lines, all ranks run their slice, gather, and add their reads.",
)

# %% [markdown]
# **Trap one: a rank that skips the collective.** On rank 0, `pairs[:rank]` is empty. The output
# doesn't depend on what was gathered, so autograd leaves the collective out. The others wait, with
# gloo's default timeout for half an hour (unless rank 0 dies or calls another collective). And rank
# 0's gradient is wrong: it lacks what later ranks did with its pair.
#
# The cure is `tie`, a zero (for finite pairs) that makes $y$ depend on all pairs, on every rank.
# And a rank that has no loss still has to call backward, on `(0 * y).sum()`. With the tie, every
# rank finishes.

# %% [markdown]
# But every rank has $A$. Does each now have its gradient?

# %% tags=["aside"]
ranks = on_ranks(differentiated, *HELPERS, tie=True, **given)
x, dt, A, B, C = leaves = [t.clone().requires_grad_() for t in tokens]
by_x, by_A = torch.autograd.grad(ssd_recurrent(*leaves).square().sum(), (x, A))
check("gradient of x = one pass", torch.cat([found["x"] for found in ranks], 1), by_x)
_ = must_differ("gradient of A on rank 0", ranks[0]["A"], by_A)
check("gradient of A, summed over the ranks", sum(found["A"] for found in ranks), by_A)

# %% tags=["guard"]
assert all(found["waited"] == 0 for found in ranks)
for rank in (1, 2, 3):
    assert (ranks[rank]["A"] - ranks[rank - 1]["A"]).abs().max() > 1e-3


# %% tags=["figure"]
def draw_parts(ax, parts, whole):
    """The gradient of A of head 0: a bar for each rank's part, one for their sum, and the truth."""
    bars = {f"rank {rank}": part.item() for rank, part in enumerate(parts)}
    ax.bar(list(bars), list(bars.values()), color=plotting.COLORS[0])
    ax.bar(["sum"], [sum(bars.values())], color=plotting.COLORS[2])
    plotting.level(ax, whole.item())
    ax.text(1.5, 0.94 * whole.item(), "one process", ha="center", va="top", fontsize=18)
    ax.tick_params(labelsize=18)
    ax.set_ylabel("gradient of $A$, head 0", fontsize=18)


# %% slide_title="Each rank has a part; only the sum is the gradient" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(9, 4.2))
draw_parts(ax, [found["A"][0] for found in ranks], by_A[0])
plotting.save(
    fig,
    "11_parts",
    "Four bars, the gradients of A on ranks 0 to 3, and their sum, which reaches the line of one "
    "process. None of the four does.",
)

# %% [markdown]
# The gradient of $x$ is right, and that of $A$ is right once it's summed over the ranks.
#
# **Trap two: gradients of shared tensors come in parts.** Every rank has its own copy of $A$, and
# the gradient of that copy covers only what passes through its slice: all outputs of the slice, and
# its pair in the reads of later ranks. You won't see an error. Each rank just makes a different
# update, and the models drift apart. So sum the parts with an `all_reduce` before you update.

# %% [markdown]
# ## 6 · A whole model
#
# Feed-forward and expert layers, norms, the embedding and the head look at one token at a time, so
# they don't notice the cut. (The balancing loss (6.3) would: it multiplies averages over all
# tokens.) Four things in the S, A and I layers of chapter 07 do.
#
# **The state** of an S layer, or of the SSD in an I layer: done.
#
# **The convolution** of an S layer (chapter 04) looks at the $d_\text{conv} - 1$ tokens before each
# token. At the start of a slice, earlier ranks have to send them: the *halo*.
#
# **Positions** count from the start of the text: how long are all earlier slices?
#
# **Attention**, in A and I layers, has no pair, so the ranks gather keys and values.

# %% slide_title="Pair, halo, position and keys cross the border" tags=["figure", "slide"]
plotting.show_drawing(
    "11_reach",
    "Four times two slices of eight tokens, and what rank 0 sends to rank 1: a decay and a small "
    "state for an S layer, the last three tokens for its convolution, the number of tokens for "
    "positions, and two vectors of each token, its key and value, for attention.",
)

# %% [markdown] slide_title="Without a halo, a slice's first tokens come out wrong"
# Let's look at the halo. Cut 20 tokens into slices of 8, 1 and 11, and take four taps. Which tokens
# come out wrong without a halo? And which ranks send rank 2's?

# %% slide_figure="11_halo:0"
u, taps = random(2, 20, 6, seed=7), random(6, 4, seed=8)
whole, _ = short_convolution(u, taps)
cut, d_conv = (8, 1, 11), taps.shape[1]
padded = F.pad(u, (0, 0, d_conv - 1, 0))  # three zeros, so token t is at t + 3
starts = [0, *accumulate(cut)][:-1]
halos = [padded[:, start : start + d_conv - 1] for start in starts]
pieces = [short_convolution(part, taps, history=halo)[0]
          for part, halo in zip(u.split(cut, 1), halos, strict=True)]  # fmt: skip
check("slices with a halo of 3 tokens = one pass", torch.cat(pieces, 1), whole)
alone = torch.cat([short_convolution(part, taps)[0] for part in u.split(cut, 1)], 1)
wrong = (alone - whole).abs().amax((0, 2)) > 1e-10
print("wrong without a halo: tokens", *wrong.nonzero().flatten().tolist())
assert wrong.nonzero().flatten().tolist() == [8, 9, 10, 11]


# %% tags=["figure"]
def draw_halo(ax, cut, start, wrong):
    """The tokens of three slices, wrong ones in vermilion; below, the last one's halo: returned."""
    owners = [rank for rank, tokens in enumerate(cut) for _ in range(tokens)]
    for t, rank in enumerate(owners):
        place, color = (0.4 + 0.6 * t + 0.2 * rank, 1.5), plotting.COLORS[1 if wrong[t] else 0]
        ink = plotting.ON_COLOR if wrong[t] else "white"
        ax.add_patch(Rectangle(place, 0.6, 0.7, fc=color, ec="white"))
        ax.text(place[0] + 0.3, 1.85, t, ha="center", va="center", fontsize=17, color=ink)
    for rank, x in enumerate((2.8, 5.5, 9.9)):
        ax.text(x, 2.4, f"rank {rank}", ha="center", fontsize=18)
    red, green = plotting.COLORS[1:3]
    ax.text(6.7, 2.95, "wrong without a halo", ha="center", fontsize=18, color=red)
    x = 0.4 + 0.6 * start
    line = ax.plot([x, x, x + 1.95, x + 1.95], [1.4, 1.2, 1.2, 1.4], color=green)
    return *line, ax.text(x + 1.0, 0.7, "halo of rank 2", ha="center", fontsize=18, color=green)


# %% slide_title="Rank 2's halo comes from two ranks" tags=["figure", "slide"]
fig, ax = plotting.canvas(13.2, 3.5)
sent = draw_halo(ax, cut, starts[2] - d_conv + 1, wrong)
plotting.save(
    fig,
    "11_halo",
    "Twenty tokens in slices of 8, 1 and 11. Without a halo tokens 8 to 11 come out wrong. The "
    "halo of rank 2, tokens 6 to 8, covers two tokens of rank 0 and the one of rank 1.",
    stages=[sent],
)

# %% [markdown]
# Rank 1 has only token 8, so rank 2's halo, tokens 6 to 8, comes from two ranks. Rank 0's tokens
# are right even without a halo, so a test that only looks at rank 0 misses the mistake.
#
# `SequenceParallel(model)` takes care of all four and of trap one. For trap two, call
# `sum_gradients(model)` before each update:


# %% tags=["setup"]
def tiny():
    """The same small model on every rank."""
    torch.manual_seed(0)
    sizes = dict(d_model=32, n_heads=4, n_kv_heads=2, d_state=8, n_neurons=16, chunk_size=4)
    return CausalLM(ModelConfig("S + A + IE", position="conv", inner="ssd", **sizes))


def gradients_of(model):
    """The gradients of all parameters, one after the other; zero where there is none."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


# %%
def read_text(rank, ids, targets, cut):
    """A slice's logits and loss, and the gradient summed over ranks."""
    model = tiny()
    logits = SequenceParallel(model)(ids.split(cut, 1)[rank])
    own = targets.split(cut, 1)[rank].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), own, reduction="sum")
    loss.backward()
    sum_gradients(model)
    found = dict(logits=logits.detach(), loss=loss.detach())
    return found | dict(gradient=gradients_of(model))


# %% [markdown] slide_title="Four processes give the logits, loss and gradient of one"
# Our model has one layer each of S, A, I and experts, E. Here is a text on one process, then on
# four, cut in two ways:

# %%
ids, targets = torch.randint(256, (2, 2, 20), generator=torch.Generator().manual_seed(12))
model = tiny()
logits, _ = model(ids)
loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
loss.backward()
logits, loss, gradient = logits.detach(), loss.detach(), gradients_of(model)
print(f"{model.config.pattern}: {gradient.numel()} parameters")
for cut in ((6, 4, 7, 3), (8, 1, 0, 11)):
    given = dict(ids=ids, targets=targets, cut=cut)
    ranks = on_ranks(read_text, tiny, gradients_of, **given)
    check(f"slices of {cut}: logits", torch.cat([found["logits"] for found in ranks], 1), logits)
    check("  losses, summed over the ranks", sum(found["loss"] for found in ranks), loss)
    gradients = torch.stack([found["gradient"] for found in ranks])
    check("  the gradient, on every rank", gradients, gradient.expand(4, -1))

# %% [markdown]
# All of it agrees, empty slice or not.

# %% [markdown] slide_title="How much do the ranks exchange? Count the bytes"
# ## 7 · What travels
#
# How much do the ranks exchange? Let's count the bytes of floating-point data that each rank
# *hands* to torch's collectives, since those calls we can intercept. After that we'll count what
# crosses the wire. With $N$ ranks, $b$ rows, $h$ heads of width $p$ and state width $n$, SSD should
# hand over
#
# $$\underbrace{b\,h\,(pn + 1)}_{\text{forward: its pair}} \qquad\text{and}\qquad
#   \underbrace{N\,b\,h\,(pn + 1)}_{\text{backward: a gradient for every pair}} \tag{11.5}$$
#
# numbers: a rank received all $N$ pairs, and returns a gradient for each. Neither depends on $l$.
# Keys and values do: with $g$ heads of keys and equal slices, they take $2\,b\,l\,g\,p$ numbers
# forward, and $N$ times as many backward. Take a model of one layer, S or A, first with 8 tokens on
# each rank, then with 40. Which one's numbers will grow?


# %% tags=["setup"]
COLLECTIVES = ("all_gather_single", "reduce_scatter_single")


def counted_in(notes, name):
    """Make a collective record how many bytes its rank hands over, ignoring integers."""
    original = getattr(dist, name)

    def noting(*tensors, group):
        given = tensors[-1]
        if given.is_floating_point():
            notes[name] += given.numel() * given.element_size()
        return original(*tensors, group=group)

    setattr(dist, name, noting)
    return original


# %% tags=["setup"]
def count(rank, models, lengths, names):
    """Bytes that a rank hands over, forward and backward: for each model and number of tokens."""
    notes, found = Counter(), []
    originals = {name: counted_in(notes, name) for name in names}
    for config in models:
        reader = SequenceParallel(CausalLM(ModelConfig(**config)))
        for length in lengths:
            reader(torch.zeros(2, length).long()).sum().backward()
            found.append([notes.pop(name) for name in names])
    for name, original in originals.items():
        setattr(dist, name, original)
    return found


# %% slide_title="Attention's bytes grow with the slice; those of SSD don't"
b, h, p, n, N = 2, 4, 8, 16, 4
models = [dict(pattern=pattern, d_model=h * p, n_heads=h, d_state=n) for pattern in "SA"]
given = dict(models=models, lengths=[8, 40], names=COLLECTIVES)
ranks = on_ranks(count, counted_in, **given)
names = [f"{pattern}, {l} tokens" for pattern in "SA" for l in (8, 40)]
for name, (forward, backward) in zip(names, ranks[0], strict=True):
    print(f"{name:12} forward {forward:6,} bytes, backward {backward:7,}")

# %% tags=["guard"]
pair, keys = 8 * b * h * (p * n + 1), [8 * 2 * b * l * h * p for l in (8, 40)]  # in float64
assert all(found == [[once, N * once] for once in (pair, pair, *keys)] for found in ranks)
patterns = {preset(f"cheems-{size}").pattern for size in ("320m", "1.3b")}
assert {pattern[::2] for pattern in patterns} == {"SSSSSSSI" * 3}

# %% [markdown] slide_title="From 64 to 512 tokens per rank on, a ring sends more than SSD"
# Only attention's numbers grow. A number of float64 has eight bytes, so a pair has $8 \cdot 2 \cdot
# 4 \cdot (8 \cdot 16 + 1) = 8{,}256$. (This S layer rotates, so it has no halo.) But what does a
# rank *send* over the wire? A rank's contribution to an `all_gather` must reach each of the other
# $N - 1$, and in ring attention, keys and values take $N - 1$ steps around the ring. So in a
# forward pass, each rank sends this many numbers:
#
# $$\text{SSD: } (N-1)\,b\,h\,(pn + 1), \qquad
#   \text{ring attention: } (N-1)\,2\,b\,l\,g\,p. \tag{11.6}$$

# %% [markdown] slide_title="From 64 to 512 tokens per rank on, a ring sends more than SSD"
# Keys can be stored in sixteen bits, while the package keeps states in float32, and often several
# heads share a key head. Let a pair's numbers take four bytes. Then the two send the same number of
# bytes when each rank has
#
# $$l^* = \frac{4}{s} \cdot \frac{h}{g} \cdot \frac{pn + 1}{2p} \tag{11.7}$$
#
# tokens, if a number of a key or value takes $s$ bytes and $g$ heads have keys. That's about $n/2$,
# times $4/s$, times $h/g$. Beyond $l^*$, ring attention sends $l/l^*$ times as much. Below we take
# $h = 32$ heads with $p = 64$ and $n = 128$, and $g = 32$ or 8 heads of keys.

# %% [markdown] tags=["aside"]
# Both have a cheaper variant. *Ulysses* (Jacobs et al.) is attention that swaps tokens for heads,
# and so reads the whole text with $h/N$ heads on each rank. For every token, a rank has a query and
# an output for each of $h$ heads, and a key and a value for each of $g$. It keeps an $N$th of them
# and sends the rest, $\frac{N-1}{N}\,2\,b\,l\,p\,(h + g)$ numbers. The factor $\frac{N-1}{N}$ stays
# below 1, while a gather of pairs grows with $N - 1$. But pairs can go down a *chain*: each rank
# joins the prefix with its own pair and sends one pair on, and has to wait for its neighbour.


# %% tags=["setup"]
def ulysses_crossing(h, p, n, g, size, N, pairs):
    """Tokens per rank at which Ulysses sends as many bytes as SSD that sends so many pairs."""
    per_token = size * 2 * p * (h + g) * (N - 1) / N  # q and y of h heads, k and v of g
    return pairs * 4 * h * (p * n + 1) / per_token


# %% tags=["aside"]
def crossing(h, p, n, g, size):
    """Equation 11.7: tokens per rank at which SSD and attention send the same number of bytes."""
    return 4 / size * h / g * (p * n + 1) / (2 * p)


KEYS = {"every head has keys, float32": (32, 4)}  # heads of keys, and bytes of a number
KEYS |= {"every head has keys, 16 bits": (32, 2), "4 heads share keys, 16 bits": (8, 2)}
for name, (g, size) in KEYS.items():
    l = crossing(32, 64, 128, g, size)
    print(f"{name}: equal at {l:.0f} tokens; at 131,072 {131_072 / l:,.0f} times as many bytes")


for N in (2, 4, 8):  # 4 heads share keys, 16 bits
    gathered, chain = (ulysses_crossing(32, 64, 128, 8, 2, N, pairs) for pairs in (N - 1, 1))
    print(f"Ulysses, {N} ranks: equal at {gathered:.0f} tokens; to a chain at {chain:.0f}")


# %% tags=["figure"]
def draw_bytes(ax, lengths, ssd, equal):
    """SSD sends the same number of bytes for any length; attention begins below and ends above."""
    looks = [(plotting.COLORS[1], dash) for dash in ("-", "--", ":")] + [(plotting.COLORS[3], "-.")]
    for (name, at), (color, dash) in zip(equal.items(), looks, strict=True):
        ax.plot(lengths, [ssd * l / at for l in lengths], color=color, linestyle=dash, label=name)
        drop = dict(arrowstyle="-", color=plotting.QUIET)
        ax.annotate(f"{at:.0f}", (at, ssd), (at, 1.6e5), ha="center", fontsize=15, arrowprops=drop)
    ax.axhline(
        ssd, color=plotting.COLORS[2], linewidth=4, label="SSD, float32: 7 pairs, of 8 ranks"
    )
    ax.set(xscale="log", yscale="log", xlim=(16, 131_072), ylim=(1e5, 3e10))
    ax.legend(loc="upper left", fontsize=15)
    ax.tick_params(labelsize=16)


# %% slide_title="SSD sends the same for any length, and the others end up above" tags=["figure"]
fig, ax = plotting.figure(size=(9.6, 5))
equal = {f"ring, {name}": crossing(32, 64, 128, g, size) for name, (g, size) in KEYS.items()}
equal["Ulysses, 4 heads share keys, 16 bits"] = ulysses_crossing(32, 64, 128, 8, 2, 8, pairs=7)
ssd = 7 * 4 * 32 * (64 * 128 + 1)  # equation 11.6 for 8 ranks and one row, in bytes
draw_bytes(ax, [2**e for e in range(4, 18)], ssd, equal)
ax.set_xlabel("tokens per rank", fontsize=16)
ax.set_ylabel("bytes sent, forward", fontsize=16)
plotting.save(
    fig,
    "11_bytes",
    "SSD sends the same number of bytes for any length, and attention soon more. Bytes that each "
    "of 8 ranks sends in a forward pass against tokens per rank, both logarithmic. SSD is a level "
    "line. Three lines of ring attention and one of Ulysses rise in proportion to the tokens. They "
    "cross the level line at 64, 128, 512 and 819 tokens.",
)

# %% [markdown]
# With grouped keys in sixteen bits, ring attention sends less up to 512 tokens per rank, and 256
# times as much at 131,072. *Ulysses*, attention that swaps tokens for heads, sends more beyond 819
# tokens if there are 8 ranks, or beyond 117 if the pairs go down a chain, each rank sending one
# instead of seven. In Cheems itself, three of the 24 mixers are I layers, and their keys and values
# still have to travel.

# %% [markdown]
# More bytes needn't mean more time, because a rank can compute while it sends. In a step of the
# ring it sends $2\,l\,g\,p$ numbers of $s$ bytes, and computes $4\,l^2\,h\,p$ operations, if
# nothing is masked. So computing takes longer from $l = \frac{s}{2} \cdot \frac{g}{h} \cdot
# \frac{\text{rate}}{\text{link}}$ on. With 8 key heads of 32 in 16 bits, a link of 50 GB/s and $5
# \cdot 10^{14}$ operations per second, computing takes longer from 2,500 tokens per rank on. Here
# are 16,384:

# %% tags=["aside"]
l, link, rate = 16_384, 50e9, 5e14
sending = 2 * 2 * l * 8 * 64 / link  # k and v of 8 heads, in 2 bytes
computing = 4 * l**2 * 32 * 64 / rate  # two products, 32 heads
print("milliseconds of a step of the ring, to send and to compute:", end=" ")
print(f"{1e3 * sending:.2f}, {1e3 * computing:.1f}")
assert sending < computing / 6 and 2 / 2 * 8 / 32 * rate / link == 2500

# %% slide_title="A ring can hide its sending behind its products" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(10, 3.4))
for step in range(3):
    for y, time, color in ((1, sending, plotting.COLORS[1]), (0, computing, plotting.COLORS[0])):
        ax.barh(y, 1e3 * time, left=1e3 * computing * step, color=color, ec="white", lw=3)
ax.set_yticks([1, 0], ["send", "compute"])
ax.set_xlabel("milliseconds: three steps of the ring", fontsize=18)
ax.tick_params(labelsize=18)
plotting.save(
    fig,
    "11_hidden",
    "Three steps of a ring on a time line. In each, a rank computes for 4.4 milliseconds, and its "
    "keys and values are sent in the first 0.67 of them.",
)

# %% [markdown]
# The sending hides behind the products. On this assumed machine, keys that travel cost time only up
# to 2,500 tokens per rank. Beyond that a ring is slow because attention computes a square.

# %% [markdown] slide_title="Fewer bytes don't yet mean less time"
# ## 8 · And the time?
#
# Bytes aren't time. Do two processes get through a text any faster than one? We take models of a
# single layer, an S layer or an A layer, and time a forward and a backward pass. First one process
# reads a whole text, then two processes read half of it each. Which layer couldn't get twice as
# fast even if nothing had to travel?


# %% tags=["setup", "experiment"]
def timed(rank, pattern, length, turns):
    """Rank 0 alone, then ranks 0 and 1, in turn: seconds that pass, and that this rank computes."""
    pair, seconds = dist.new_group([0, 1]), []  # every rank has to call new_group
    if rank > 1:
        return seconds
    model = CausalLM(ModelConfig(pattern, d_model=256, n_heads=4, d_state=64)).float()
    reader, ids = SequenceParallel(model, pair), torch.zeros(1, length).long()
    for turn in range(2 * turns):
        dist.barrier(pair)
        begun, worked = monotonic(), process_time()
        if turn % 2:  # odd turns: both ranks; even turns: rank 0 alone
            reader(ids.chunk(2, 1)[rank]).sum().backward()
        elif rank == 0:
            model(ids, use_cache=False)[0].sum().backward()
        dist.barrier(pair)
        seconds.append((monotonic() - begun, process_time() - worked))
    return seconds


# %% [markdown] slide_title="Two processes pay off for an S layer and a long text"
# Here is our record (`python -m experiments 11_two_processes`, float32, two cores, 11 turns).
# *Wall* is wall-clock time. *Busiest rank* counts only the processor time of the busier process.

# %% tags=["aside"]
record = json.loads(Path("../experiments/records/11_two_processes.json").read_text())


def speedups(seconds):
    """Quartiles of how many times faster two processes are, over the turns."""
    return quantiles([one / two for one, two in zip(seconds[0::2], seconds[1::2], strict=True)])


for name in ("wall", "busiest rank"):
    for pattern, by_length in record[name].items():
        times = (f"{l}: {speedups(seconds)[1]:.2f}" for l, seconds in by_length.items())
        print(f"{name}, {pattern}, median speedup at", *times, sep="   ")

# %% tags=["guard"]
assert [len(found) for found in on_ranks(timed, pattern="S", length=256, turns=2)] == [4, 4, 0, 0]
wall, work = (
    {p + l: speedups(seconds) for p in "SA" for l, seconds in record[name][p].items()}
    for name in ("wall", "busiest rank")
)
assert [round(wall[f"S{l}"][1], 2) for l in (512, 2048, 4096)] == [0.89, 1.25, 1.65]
assert round(work["S512"][1], 2) == 1.18
assert wall["S512"][2] < 1 < wall["S2048"][0]
assert all(low < 1 < high for name, (low, _, high) in wall.items() if name[0] == "A")
q, k, v = (random(1, 64, 1, 8, seed=i) for i in range(3))
operations = []
for queries in (q, q[:, 32:]):  # all tokens, and the second half of them
    with Recorder() as recorder:
        _ = attention(queries, k, v)
    operations.append(sum(operator.flops for operator in recorder.operators))
assert 0.98 < operations[1] / operations[0] < 1


# %% tags=["figure"]
def draw_speedups(ax, wall):
    """The median speedup by the wall clock, with its quartiles: S in green, A in vermilion."""
    for pattern, color, aside in (
        ("S", plotting.COLORS[2], -0.12),
        ("A", plotting.COLORS[1], 0.12),
    ):
        found = [wall[f"{pattern}{l}"] for l in (512, 2048, 4096)]
        for i, (low, middle, high) in enumerate(found):
            ax.plot([i + aside] * 2, [low, high], color=color, linewidth=4)
            ax.plot(i + aside, middle, "o", color=color, ms=12)
        ax.text(2 + aside, high + 0.05, f"{pattern} layer", ha="center", fontsize=20, color=color)
    plotting.level(ax, 1.0)
    ax.text(-0.45, 1.04, "one process", fontsize=17, color=plotting.QUIET)
    ax.set_xticks(range(3), ["512 tokens", "2,048", "4,096"], fontsize=18)
    ax.tick_params(axis="y", labelsize=18)


# %% slide_title="On a long text two processes speed up S, and not A" tags=["figure", "slide"]
fig, ax = plotting.figure(size=(10, 4.6))
draw_speedups(ax, wall)
ax.set(xlim=(-0.5, 2.5), ylim=(0, 2.2), yticks=[0, 0.5, 1, 1.5, 2])
ax.set_ylabel("times as fast", fontsize=18)
plotting.save(
    fig,
    "11_speedup",
    "How many times faster two processes are than one, median and quartiles. For S it is below 1 "
    "at 512 tokens and above 1 at 2,048 and 4,096. For A the quartiles lie on both sides of 1.",
)

# %% [markdown]
# For the S layer, two processes lose at 512 tokens (0.89 by the wall clock) and win at 4,096
# (1.65). At 512 the busier one does compute less than a single process (1.18), but it also waits.
# The A layer shows no gain: at every length, the quartiles of the wall-clock speedup lie on both
# sides of 1.
#
# Halves of equal length aren't equal work for attention. In the picture, the second half has 100 of
# 136 query–key pairs; by pairs, two ranks are at best 1.36 times as fast. The usual cure is called
# *zig-zag*: cut the text into $2N$ slices and give rank $i$ the slices $i$ and $2N - 1 - i$, an
# early one and a late one. `SequenceParallel` doesn't do this. And torch's causal mask fits only as
# many queries as keys: elsewhere our `attention` computes masked products, too. So rank 1, with
# $T/2$ queries and all $T$ keys of a text, computes $T^2/2$, as many as one process does for the
# whole text, and attention gains nothing.

# %% slide_title="Give each rank an early and a late slice, for equal work" tags=["figure", "slide"]
plotting.show_drawing(
    "11_halves",
    "The query–key pairs of 16 tokens, a triangle, coloured by the rank that has the query. Cut in "
    "halves, rank 0 has 36 pairs and rank 1 has 100. In zig-zag each has 68.",
)

# %% [markdown]
# Now try it on your machine. How long must a text be before two processes win?
#
# ```python
# turns = on_ranks(timed, pattern="S", length=1024, turns=11)[0]  # rank 0's
# speedups([wall for wall, _ in turns])  # quartiles
# ```

# %% [markdown] slide_title="For a state, one pair per slice is all that travels"
# ## Summary
#
# - A slice acts on a state through a pair: fade the state, then add what the slice wrote. You can
#   join neighbours in any grouping.
# - Each rank runs its slice from an empty state, all ranks exchange pairs, and each adds the read
#   of its prefix. Four processes gave the same results and gradients as one.
# - Every rank has to take part in the backward pass, or the others wait for it.
# - Gradients of shared tensors come in parts. Sum them before you update.
# - A whole model also needs a halo, the right positions, and the earlier ranks' keys and values.
# - A pair doesn't grow with the text. With $p = 64$, $n = 128$, states in float32, keys in sixteen
#   bits and four heads to a key head, it's smaller than keys and values once a rank has more than
#   512 tokens.
#
# The lab *Shards, replicas and a killed rank* splits the rows and the parameters instead of the
# text.
#
# ## Exercises
#
# **1 · easy.** *The positions of a rank.* What positions do a rank's own tokens have? Every rank
# knows how long all the slices are.
#
# <details><summary>Hint</summary>
#
# How many tokens come before the slice?
#
# </details>


# %% tags=["exercise"]
def positions_of(lengths, rank):
    """Positions of a rank's tokens: the lengths of all slices, a rank -> (l,)."""
    ### BEGIN SOLUTION
    return sum(lengths[:rank]) + torch.arange(lengths[rank])
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import as_tensor

for lengths in ((5,), (8, 7, 9, 5), (1, 0, 20, 8), (0, 3, 0)):
    found = [as_tensor(positions_of(lengths, rank)) for rank in range(len(lengths))]
    got = [len(part) for part in found]
    assert got == list(lengths), f"slices of {lengths}: {got} positions"
    check(f"slices of {lengths}", torch.cat(found), as_tensor(range(sum(lengths))))

# %% [markdown]
# **2 · easy.** *When a state is the smaller message.* From what length on is a state the smaller
# message? With pencil and paper: suppose a delta rule hands over the $M$ and $W$ of every head
# (section 3), all in four-byte numbers. How many tokens must a rank have before that's less than
# the keys and values of attention? Write $l^*$ as in (11.7), for $g$ heads of keys and $s$ bytes.
# If $p = n$, it should be about twice that of SSD.
#
# <details><summary>Hint</summary>
#
# Count the numbers first. $M$ is $(n, n)$ and $W$ is $(p, n)$, for each of $h$ heads. A token of
# attention has $g$ keys and $g$ values of width $p$.
#
# </details>


# %% tags=["exercise"]
def delta_crossing(h, p, n, g, size):
    """Tokens per rank at which a delta rule and attention send the same number of bytes."""
    ### BEGIN SOLUTION
    return 4 / size * h / g * (p * n + n * n) / (2 * p)
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import check_numbers

for h, p, n, g, size in ((1, 8, 8, 1, 4), (32, 64, 128, 8, 2), (4, 128, 16, 4, 4)):
    M, W = (torch.empty(h, rows, n, dtype=torch.float32, device="meta") for rows in (n, p))
    half = torch.float16 if size == 2 else torch.float32
    key = value = torch.empty(g, p, dtype=half, device="meta")  # of one token
    even = (M.nbytes + W.nbytes) / (key.nbytes + value.nbytes)
    case = f"h = {h}, p = {p}, n = {n}, g = {g}, {size} bytes"
    check_numbers(delta_crossing(h, p, n, g, size), {case: even})

# %% [markdown]
# **3 · medium.** *The halo.* Piece together the `count` tokens before a rank's slice. Every rank
# sends the last `count` tokens of its slice, or everything it has if that's fewer. From the tails
# of all ranks, piece together the `count` tokens before slice `rank`, with zeros where the text
# hasn't begun yet.
#
# <details><summary>Hint</summary>
#
# An earlier rank may have sent only one token, or none. So where do the zeros go?
#
# </details>


# %% tags=["exercise"]
def halo(tails, rank, count):
    """tails: of each rank (b, at most count, d) -> the tokens before a slice, (b, count, d)."""
    ### BEGIN SOLUTION
    before = torch.cat([tails[0][:, :0], *tails[:rank]], dim=1)
    return F.pad(before, (0, 0, count, 0))[:, before.shape[1] :]  # the last ones
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none

u = random(2, 20, 6, seed=20)
for count, cut in (
    (3, (20,)),
    (3, (8, 1, 11)),
    (3, (1, 1, 1, 17)),
    (3, (2, 0, 0, 18)),
    (1, (0, 5, 15)),
):
    parts, taps = u.split(cut, 1), random(6, count + 1, seed=21)
    whole, _ = short_convolution(u, taps)
    tails = [part[:, max(0, part.shape[1] - count) :] for part in parts]
    before = [not_none(halo(tails, rank, count)) for rank in range(len(cut))]
    pieces = [short_convolution(part, taps, history=history)[0]
              for part, history in zip(parts, before, strict=True)]  # fmt: skip
    check(f"slices of {cut}: one convolution", torch.cat(pieces, 1), whole)

# %% [markdown]
# **4 · medium.** *Two deadlocks.* Change a loss so that no rank waits forever. Change the loss
# below so that every rank enters `gather` once forward and once backward, but leave its value
# alone. It hangs in two ways. A rank without tokens returns before the gather, so the others wait.
# And even if every rank has tokens, only the last rank's loss depends on what was gathered, so that
# rank waits in the backward pass. Here `gather` takes a pair as a tensor and returns one tensor of
# all pairs.
#
# <details><summary>Hint</summary>
#
# A tensor times zero is zero, and still hangs on what it was computed from.
#
# </details>
#
# ```python
# def hanging_loss(pair, y, rank, ranks, gather):
#     if y.shape[1] == 0:
#         return torch.zeros((), requires_grad=True)
#     pairs = gather(pair)
#     loss = (y * pairs[:rank].sum()).square().sum()
#     return loss if rank == ranks - 1 else 0 * y.sum()
# ```


# %% tags=["exercise"]
def mended_loss(pair, y, rank, ranks, gather):
    """A loss on every rank: y (b, l, h, p) squared, times earlier pairs; 0 but on the last."""
    ### BEGIN SOLUTION
    pairs = gather(pair)
    loss = (y * pairs[:rank].sum()).square().sum()
    return loss * (rank == ranks - 1) + 0 * pairs.sum()
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import not_none


class Entered(torch.autograd.Function):
    """A gather that notes when it is entered, forward and backward."""

    @staticmethod
    def forward(ctx, pair, others, notes):
        ctx.notes = notes
        notes.append("forward")
        return others + 0 * pair

    @staticmethod
    def backward(ctx, gradient):
        ctx.notes.append("backward")
        return gradient.sum(0), None, None


for lengths in ((5, 2, 4), (5, 0, 4), (0, 3, 4), (2, 2, 0), (5, 3)):
    ranks, others = len(lengths), random(len(lengths), 4, seed=30)
    for rank, length in enumerate(lengths):
        notes, pair = [], others[rank].clone().requires_grad_()
        y = random(1, length, 2, 3, seed=31).requires_grad_()
        gather = lambda pair, all=others, n=notes: Entered.apply(pair, all, n)  # noqa: E731
        loss = not_none(mended_loss(pair, y, rank, ranks, gather))
        loss.backward()
        assert notes == ["forward", "backward"], f"slices of {lengths}, rank {rank}: {notes}"
        want = (rank == ranks - 1) * (y * others[:rank].sum()).square().sum()
        assert torch.allclose(loss, want), f"slices of {lengths}, rank {rank}: the loss changed"
    print(f"slices of {lengths}: every rank enters twice")

# %% [markdown]
# **5 · hard.** *The backward pass.* Work out the gradients across ranks without autograd. For one
# head, slice $i$ receives the state $S_i$, with $S_0 = 0$ and $S_{i+1} = a_i S_i + W_i$. Rank $i$
# knows how its own loss changes with the state it received, $G_i = \partial \text{loss}_i /
# \partial S_i$. How does the sum of all losses change with each $a_i$ and each $W_i$? Work it out
# without autograd, in one loop up the ranks and one back down.
#
# <details><summary>Hint</summary>
#
# Which losses does $W_i$ reach, and how much has it faded by then? In which order do you need the
# ranks?
#
# </details>


# %% tags=["exercise"]
def pairs_backward(a, W, G):
    """a (N,), W and G (N, p, n) -> gradients of the summed losses in a (N,) and W (N, p, n)."""
    ### BEGIN SOLUTION
    handed = [torch.zeros_like(W[0])]
    for i in range(len(a) - 1):
        handed.append(a[i] * handed[-1] + W[i])
    by_W = [torch.zeros_like(W[0])]  # nobody reads what the last rank writes
    for i in reversed(range(1, len(a))):
        by_W.insert(0, G[i] + a[i] * by_W[0])
    by_W = torch.stack(by_W)
    return (by_W * torch.stack(handed)).sum((1, 2)), by_W
    ### END SOLUTION


# %% tags=["check"]
from cheems_ref.exercises import as_tensor, forbidden, not_none

for N in (1, 2, 5):
    a, W, G = (random(N, seed=30).sigmoid(), random(N, 4, 3, seed=31), random(N, 4, 3, seed=32))
    with forbidden(torch.autograd.grad, torch.autograd.backward):
        got = not_none(pairs_backward(a.clone(), W.clone(), G.clone()))
    leaves = [a.clone().requires_grad_(), W.clone().requires_grad_()]
    state, loss = torch.zeros(4, 3), 0.0
    for a_i, W_i, G_i in zip(*leaves, G, strict=True):
        loss, state = loss + (G_i * state).sum(), a_i * state + W_i
    want = torch.autograd.grad(loss + 0 * state.sum(), leaves)
    check(f"N = {N}: gradient of the decays", as_tensor(got[0]), want[0])
    check(f"N = {N}: gradient of the writes", as_tensor(got[1]), want[1])

# %% [markdown]
# ## Further reading
#
# - Dao and Gu, *Transformers are SSMs: Generalized Models and Efficient Algorithms Through
#   Structured State Space Duality* (2024), §8: cutting layers by heads and by tokens.
# - Sun et al., *LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid*
#   (2025): one gather of the states.
# - Liu, Zaharia and Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite Context*
#   (2023).
# - Jacobs et al., *DeepSpeed Ulysses* (2023): attention that changes from tokens to heads and back.
# - Blelloch, *Prefix Sums and Their Applications* (1990): prefixes of any associative operation.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
