# %% [markdown]
# # 12 · Out of one machine
#
# When several processes each hold one slice of a text, what must they send each other to compute
# exactly what one process would? You will be able to
#
# - describe what a slice does to a state, and join slices in any grouping;
# - cut a whole model over processes, and avoid two traps of the backward pass;
# - count what a state layer exchanges, and compare it with attention.
#
# Assumes: chapters 03 and 07.
#
# Sources: Dao and Gu, *Transformers are SSMs* (2024), §8.2; Sun and others, *LASP-2* (2025); Liu
# and others, *Ring Attention* (2023). The package's code is `cheems_ref/distributed.py`.
#
# How to read ✓ and ✗: chapter 00.

# %% tags=["setup"]
import inspect
import math
import os
import re
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import einsum
from torch.distributed.nn.functional import all_gather

# %% tags=["setup"]
from cheems_lab.checkpoint import newest_checkpoint
from cheems_lab.processes import shard_model
from cheems_lab.training import train
from cheems_ref import distributed, plotting
from cheems_ref.attention import attention
from cheems_ref.budget import count_parameters, training_bytes
from cheems_ref.config import ModelConfig, preset
from cheems_ref.convolution import short_convolution
from cheems_ref.distributed import SequenceParallel, ssd_sequence_parallel, sum_gradients
from cheems_ref.model import CausalLM
from cheems_ref.ssd import SSD, expand_groups, ssd_chunked, ssd_recurrent
from cheems_ref.train import TrainConfig
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(b=2, l=29, h=4, p=5, g=2, n=3, dt=0.3):
    """Random inputs of SSD as in chapter 03, and behind them D and an initial state."""
    return [
        random(b, l, h, p, seed=0),
        dt * random(b, l, h, seed=1).abs(),
        -1.0 - 7.0 * torch.arange(h) / max(h - 1, 1),
        random(b, l, g, n, seed=2),
        random(b, l, g, n, seed=3),
        random(h, seed=4),
        random(b, h, p, n, seed=5),
    ]


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## Why this matters
#
# If a long text doesn't fit into one process, we have to cut it along its tokens, but each token
# depends on all earlier ones. Our processes share one machine, so we count bytes and measure no
# times.
#
# **Letters of this chapter.** A *rank* is the number of a process, counted from 0; there are $N$.
# Slice $i$ belongs to rank $i$. In section 5 $l$ is the length of a slice; all other letters are as
# in chapter 03.

# %% [markdown]
# ## 1 · From a chunk boundary to a rank boundary
#
# Step 3 of chapter 03 went from chunk to chunk: fade the state by the decay over the chunk, and add
# what the chunk wrote. Any slice of the tokens, however long, turns the state before it into the
# state after it,
#
# $$h_{\text{after } i} = a_i\, h_{\text{before } i} + W_i, \qquad
#   a_i = \exp\Big(A \sum_{t \in i} \Delta_t\Big), \tag{12.1}$$
#
# where $W_i$ is the state that the slice leaves behind if it begins with an empty one. Later tokens
# need only the pair $(a_i, W_i)$: $1 + pn$ numbers per row and head.


# %%
def pair_of(x, dt, A, B, C):
    """(a, W) of a slice: the decay over it (b, h), and the state that it writes (b, h, p, n)."""
    _, written = ssd_chunked(x, dt, A, B, C, return_final_state=True)
    return (dt.sum(1) * A).exp(), written


def fade(decay, state):
    """A state (b, h, p, n) times a decay (b, h)."""
    return decay[..., None, None] * state


*tokens, D, before = inputs()
decay, written = pair_of(*tokens)
_, after = ssd_recurrent(*tokens, initial_state=before, return_final_state=True)
print("a:", tuple(decay.shape), "  W:", tuple(written.shape))
check("fade, and add what was written = recurrence", fade(decay, before) + written, after)
_ = must_differ("add without fading", before + written, after)

# %% [markdown]
# **Two slices are one.** Put (12.1) of slice $i$ into (12.1) of the next slice $j$. The result has
# the same form, with the pair
#
# $$(a_i, W_i) \cdot (a_j, W_j) = (a_i\,a_j,\;\; a_j\,W_i + W_j). \tag{12.2}$$


# %%
def joined(first, second):
    """Equation 12.2: the pair of two slices that follow one another."""
    return first[0] * second[0], fade(second[0], first[1]) + second[1]


def slices_of(tensors, cut):
    """x, dt, A, B, C of each slice; A has no tokens, and is the same for all."""
    x, dt, A, B, C = tensors
    pieces = zip(*(t.split(cut, 1) for t in (x, dt, B, C)), strict=True)
    return [(x, dt, A, B, C) for x, dt, B, C in pieces]


# %% [markdown]
# We can join three slices in either grouping, but not in another order. A slice without tokens has
# the pair $(1, 0)$.

# %%
*tokens, D, before = inputs()
one, two, three = (pair_of(*part) for part in slices_of(tokens, (5, 14, 10)))
whole = pair_of(*tokens)
left, right = joined(joined(one, two), three), joined(one, joined(two, three))
check("(one · two) · three: the decay of the whole", left[0], whole[0])
check("(one · two) · three: what the whole writes", left[1], whole[1])
check("one · (two · three), the same", right[1], whole[1])
_ = must_differ("two · one · three", joined(joined(two, one), three)[1], whole[1])
empty = pair_of(*slices_of(tokens, (0, 29))[0])
check("an empty slice: decay 1", empty[0], torch.ones(2, 4))
check("an empty slice: nothing written", empty[1], torch.zeros(2, 4, 5, 3))

# %% [markdown]
# The state before slice $i$ is the product of all pairs *before* it, an *exclusive prefix*, applied
# to the initial state.


# %%
def states_between(pairs, state):
    """The state before slice 0, 1, …, and behind the last: one more than there are pairs."""
    return list(
        accumulate(pairs, lambda state, pair: fade(pair[0], state) + pair[1], initial=state)
    )


*tokens, D, initial = inputs()
cut = (5, 14, 10)
states = states_between([pair_of(*part) for part in slices_of(tokens, cut)], initial)
for end, state in zip(accumulate(cut), states[1:], strict=True):
    x, dt, A, B, C = tokens
    seen = (x[:, :end], dt[:, :end], A, B[:, :end], C[:, :end])
    _, final = ssd_recurrent(*seen, initial_state=initial, return_final_state=True)
    name = "exclusive prefix" if end < 29 else "what is left behind the last slice"
    check(f"{name} = state after {end} tokens", state, final)

# %% [markdown]
# **How tokens read the incoming state.** By step 4 of chapter 03 it reaches a token faded by the
# decays since the start of the slice, including the token's own. So a slice runs alone, from an
# empty state, and adds the rest later:
#
# $$y_t = y_t^{\text{alone}} + e^{A(\Delta_{\text{start}} + \dots + \Delta_t)}\;
#   h_{\text{before } i}\, C_t. \tag{12.3}$$


# %%
def reads(dt, A, C, state):
    """The last term of (12.3) for all tokens of a slice: (b, l, h, p)."""
    left = (dt * A).cumsum(1).exp()
    return einsum("blh,blhn,bhpn->blhp", left, expand_groups(C, len(A)), state)


def in_slices(parts, states):
    """Equation 12.3 for every slice, and all slices side by side."""
    y = [
        ssd_chunked(x, dt, A, B, C) + reads(dt, A, C, state)
        for (x, dt, A, B, C), state in zip(parts, states, strict=True)
    ]
    return torch.cat(y, dim=1)


# %%
*tokens, D, initial = inputs()
y = ssd_recurrent(*tokens, initial_state=initial)
for cut in ((29,), (8, 7, 9, 5), (1, 0, 20, 8), (0, 28, 0, 1)):
    parts = slices_of(tokens, cut)
    states = states_between([pair_of(*part) for part in parts], initial)
    check(f"slices of {cut}: one pass", in_slices(parts, states[:-1]), y)

# %% [markdown]
# Uneven and empty slices need no special case in the forward pass. We plant two mistakes: a prefix
# that includes the slice's own pair, and pairs with the decay of the next slice.

# %%
cut = (8, 7, 9, 5)
parts = slices_of(tokens, cut)
pairs = [pair_of(*part) for part in parts]
states = states_between(pairs, initial)
_ = must_differ("inclusive prefix", in_slices(parts, states[1:]), y)

decays = [pair[0] for pair in pairs]
mixed = [(a, W) for a, (_, W) in zip(decays[1:] + decays[:1], pairs, strict=True)]
states = states_between(mixed, initial)
_ = must_differ("decay of the wrong rank", in_slices(parts, states[:-1]), y)

# %% [markdown]
# The second mistake hides if all slices have equal lengths and all steps equal sizes.

# %%
x, dt, A, B, C = tokens
even = x[:, :28], torch.full_like(dt[:, :28], 0.1), A, B[:, :28], C[:, :28]
parts = slices_of(even, (7, 7, 7, 7))
pairs = [pair_of(*part) for part in parts]
mixed = [(pairs[(i + 1) % 4][0], pairs[i][1]) for i in range(4)]
states = states_between(mixed, initial)
y = ssd_recurrent(*even, initial_state=initial)
check("blind: equal slices of equal steps", in_slices(parts, states[:-1]), y)

# %% [markdown]
# ## 2 · Four ranks
#
# Now each slice gets its own process. `torchrun` starts a program $N$ times, and
# `init_process_group` waits for all of them. Then they are a *group*, and can make *collectives*,
# calls that all members make together.
#
# - `all_gather`: every rank contributes a tensor and gets all of them.
# - `all_reduce`: every rank contributes a tensor and gets the sum.
# - `reduce_scatter`: every rank contributes one tensor *for each rank* and gets the sum of the
#   tensors meant for it. That's the backward pass of `all_gather`.
# - `barrier`: all ranks wait for each other.
#
# Our processes talk through *gloo*. They can't see this notebook's
# functions, so `on_ranks` writes a program from them, runs `work` on each rank, and collects the
# results. Each process ends itself after `timeout` seconds.

# %% tags=["setup"]
HEADER = """
import faulthandler, os, sys
from collections import Counter
from datetime import timedelta
from functools import partial
from time import monotonic
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import einsum
from torch.distributed.nn.functional import all_gather
from cheems_ref.convolution import short_convolution
from cheems_ref.distributed import SequenceParallel, ssd_sequence_parallel, sum_gradients
from cheems_lab.processes import shard_model
from cheems_lab.training import train
from cheems_ref.model import CausalLM, ModelConfig
from cheems_ref.ssd import SSD, expand_groups, ssd_chunked
from cheems_ref.train import TrainConfig
"""

# %% tags=["setup"]
ENDING = """
folder, timeout = sys.argv[1], float(sys.argv[2])
faulthandler.dump_traceback_later(timeout, exit=True)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
dist.init_process_group("gloo")
given = torch.load(f"{folder}/given.pt", weights_only=True)
torch.save(WORK(dist.get_rank(), **given), f"{folder}/{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


# %% tags=["setup"]
def ended(command, timeout):
    """Run torchrun; where it fails or takes too long, raise with what the ranks said last."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=environment, **quiet) as torchrun:
        try:
            _, said = torchrun.communicate(timeout=timeout)
        finally:
            torchrun.terminate()  # which ends the ranks; of no effect where all is over
    if torchrun.returncode:
        lines = said.splitlines()
        of_ranks = [line for line in lines if line.startswith(("[rank", "Timeout"))]
        raise RuntimeError("the ranks failed:\n" + "\n".join((of_ranks or lines)[-15:]))


# %% tags=["setup"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def program_of(work, helpers):
    """The source of a program that calls work(rank, ...), which may call the helpers."""
    sources = [inspect.getsource(function) for function in (*helpers, work)]
    return "\n\n".join([HEADER, *sources, ENDING.replace("WORK", work.__name__)])


def on_ranks(n, work, *helpers, timeout=40, **given):
    """What work(rank, **given) returns on each of n ranks, which are processes of their own."""
    with TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(program_of(work, helpers), encoding="utf-8")
        torch.save(given, program.with_name("given.pt"))
        command = [*TORCHRUN, f"--nproc-per-node={n}", str(program), folder, str(timeout)]
        ended(command, timeout + 15)
        saved = [program.with_name(f"{rank}.pt") for rank in range(n)]
        return [torch.load(path, weights_only=True) for path in saved]


# %% [markdown]
# Each rank runs `ssd_sequence_parallel`, the steps of section 1, on its slice and differentiates a
# loss. The loss is the sum over the ranks. Every rank has the final state, but only rank 0 puts it
# into its loss: otherwise it would count four times.


# %%
def leaves_of(tensors, cut, rank):
    """A rank's slice of x, dt, B and C, all of A, D and the state, to take gradients by."""
    x, dt, A, B, C, *rest = tensors
    x, dt, B, C = (t.split(cut, 1)[rank] for t in (x, dt, B, C))
    return [t.clone().requires_grad_() for t in (x, dt, A, B, C, *rest)]


def read_slices(rank, cuts, tensors, weights):
    """For each cut: y, final state and seven gradients; and the number of the process."""
    results = []
    for cut in cuts:
        x, dt, A, B, C, D, state = leaves = leaves_of(tensors, cut, rank)
        y, final = ssd_sequence_parallel(x, dt, A, B, C, D=D, initial_state=state, chunk_size=4)
        loss = (y * weights.split(cut, 1)[rank]).sum() + (rank == 0) * final.square().sum()
        results.append([y.detach(), final.detach(), *torch.autograd.grad(loss, leaves)])
    return results, os.getpid()


# %%
cuts = [(8, 7, 9, 5), (1, 0, 20, 8), (0, 28, 0, 1)]
weights = random(2, 29, 4, 5, seed=6)
by_rank = on_ranks(4, read_slices, leaves_of, cuts=cuts, tensors=inputs(), weights=weights)
processes = {process for _, process in by_rank}
assert len(processes) == 4 and os.getpid() not in processes
print(len(processes), "processes, none of them this one")

# %% [markdown]
# One process uses the definition.

# %%
x, dt, A, B, C, D, state = leaves = [t.clone().requires_grad_() for t in inputs()]
y, final = ssd_recurrent(x, dt, A, B, C, D=D, initial_state=state, return_final_state=True)
loss = (y * weights).sum() + final.square().sum()
want = [y.detach(), final.detach(), *torch.autograd.grad(loss, leaves)]

# %%
by_slice, shared = (0, 2, 3, 5, 6), (1, 4, 7, 8)  # y, x, dt, B, C; final state, A, D, state


def flat(tensors):
    """All numbers of some tensors, in one."""
    return torch.cat([t.flatten() for t in tensors])


for at, cut in enumerate(cuts):
    found = list(zip(*(results[at] for results, _ in by_rank), strict=True))
    together = flat(torch.cat(found[i], 1) for i in by_slice)
    check(
        f"slices of {cut}: y, and gradients of x, dt, B, C",
        together,
        flat(want[i] for i in by_slice),
    )
    on_each = torch.stack([flat(found[i][rank] for i in shared) for rank in range(4)])
    same = flat(want[i] for i in shared).expand(4, -1)
    check("  final state, and gradients of A, D, initial state, on each rank", on_each, same)

# %% [markdown]
# Tensors cut along the tokens have the gradients of their slice; shared tensors have the same,
# whole gradient on each rank.

# %% [markdown]
# ## 3 · Two traps
#
# Section 1 settles the forward pass, so let's write it for one rank in the obvious way and
# differentiate. torch's differentiable `all_gather` sends gradients back to the ranks they belong
# to, which add them up. The pair travels as one tensor: state, then log decay.


# %%
def by_hand(x, dt, A, B, C, group=None, all_take_part=False):
    """SSD on this rank's slice, from the pairs of the ranks before it: y."""
    y, written = ssd_chunked(x, dt, A, B, C, return_final_state=True)
    log_decay = (dt * A).cumsum(1)
    pairs = all_gather(torch.cat([written.flatten(2), log_decay[:, -1, :, None]], -1), group)
    state = torch.zeros_like(written)
    for pair in pairs[: dist.get_rank(group)]:
        a, W = pair[..., -1].exp(), pair[..., :-1].unflatten(-1, state.shape[2:])
        state = a[..., None, None] * state + W
    if all_take_part:
        y = y + 0 * sum(pair.sum() for pair in pairs)
    left, C = log_decay.exp(), expand_groups(C, len(A))
    return y + einsum("blh,blhn,bhpn->blhp", left, C, state)


# %% [markdown]
# Three ranks make four calls: `by_hand` with `all_take_part` (explained below), the package's
# function, the same with a loss on the last rank only, and plain `by_hand`. In the last call a rank
# that waits for three seconds raises an error.


# %%
def gradients_by(ssd, tensors, cut, rank, weight=1.0, group=None):
    """y, and the gradients of x and A; the rank's loss is the sum of y², times a weight."""
    leaves = leaves_of(tensors, cut, rank)
    y = ssd(*leaves, group=group)
    x, _, A, _, _ = torch.autograd.grad((weight * y.square()).sum(), leaves)
    return y.detach(), x, A


def package(*tensors, group):
    """The package's function, of which y is used alone."""
    y, _ = ssd_sequence_parallel(*tensors, group=group)
    return y


# %%
def four_calls(rank, tensors, cut):
    """What three calls compute, and how many seconds a fourth has waited before it gave up."""
    mine = partial(gradients_by, tensors=tensors, cut=cut, rank=rank)
    found = [mine(partial(by_hand, all_take_part=True)), mine(package)]
    found.append(mine(package, weight=float(rank == 2)))
    impatient = dist.new_group(timeout=timedelta(seconds=3))
    begun, waited = monotonic(), 0.0
    try:
        mine(by_hand, group=impatient)
    except RuntimeError:
        waited = monotonic() - begun
    dist.barrier()  # of all ranks, with more patience
    return *found, waited


# %%
*tokens, _, _ = inputs()
helpers = leaves_of, by_hand, gradients_by, package
by_rank = on_ranks(3, four_calls, *helpers, tensors=tokens, cut=(9, 8, 12))
hands, packages, of_last, waited = zip(*by_rank, strict=True)

x, dt, A, B, C = leaves = [t.clone().requires_grad_() for t in tokens]
y = ssd_recurrent(*leaves)
by_x, by_A = torch.autograd.grad(y.square().sum(), (x, A), retain_graph=True)
for name, found in (("by hand", hands), ("package", packages)):
    ys, xs, _ = zip(*found, strict=True)
    check(f"{name}: y = one pass", torch.cat(ys, 1), y.detach())
    check(f"{name}: gradient of x = one pass", torch.cat(xs, 1), by_x)

# %% [markdown]
# **The first trap: gradients of shared tensors come in parts.** Each rank has a copy of $A$, whose
# gradient covers only its own slice. Nothing fails, but every rank would make a different, wrong
# update.

# %%
parts = [part for _, _, part in hands]
for rank, part in enumerate(parts):
    _ = must_differ(f"by hand: gradient of A on rank {rank} alone", part, by_A)
_ = must_differ("by hand: other ranks, other gradients", parts[0], parts[1])
check("by hand: gradient of A, summed over the ranks", sum(parts), by_A)
for rank, (_, _, whole) in enumerate(packages):
    check(f"package: gradient of A on rank {rank}", whole, by_A)

# %% [markdown]
# The package passes `A`, `D` and the initial state through a function that changes nothing forward
# and sums gradients over the ranks on the way back.
#
# **The second trap: a rank with nothing to send.** On rank 0 `pairs[:rank]` is empty. Its $y$
# doesn't depend on the gathered pairs, so its backward pass never enters the collective. The others
# do, and wait.

# %%
for rank, seconds in enumerate(waited):
    print(f"rank {rank}: the backward pass", "waited until it gave up" if seconds else "ended")
assert waited[0] == 0 and min(waited[1:]) > 2.9

# %% [markdown]
# `all_take_part` adds a zero that ties $y$ of every rank to all pairs, and so brings every rank
# into the collective. The package ties $y$ to the final state instead, which contains all pairs:
# neither is differentiated without the other (`_Joined` in `cheems_ref/distributed.py`).
#
# All ranks run the backward pass together. A rank without a loss runs it with `(0 * y).sum()`.
# Ranks 0 and 1 did so in the third call, with a weight of 0.

# %%
last_x, last_A = torch.autograd.grad(y[:, -12:].square().sum(), (x, A))
_, xs, parts = zip(*of_last, strict=True)
check("package, loss of rank 2 alone: gradient of x", torch.cat(xs, 1), last_x)
for rank, part in enumerate(parts):
    check(f"package, loss of rank 2 alone: gradient of A, on rank {rank}", part, last_A)
assert all(part.abs().max() > 1e-3 for part in xs)
print("the loss of the last rank has a gradient in the tokens of every rank")

# %% [markdown]
# ## 4 · A whole model
#
# Most layers look at one token at a time, and a cut changes nothing for them. Four things look
# further.
#
# - **The state** of S, and of the SSD inside I: done.
# - **The convolution** of S (`position="conv"`, chapter 04) sees the $d_\text{conv} - 1$ tokens
#   before each token. Where a slice begins, earlier ranks send them: the *halo*.
# - **Positions** count from the start of the text, so a rank needs the lengths of all earlier
#   slices.
# - **Attention** (A and I) has no state of fixed size (chapter 02), so the ranks gather keys and
#   values.
#
# Here is the convolution in one process.

# %%
u, taps = random(2, 20, 6, seed=7), random(6, 4, seed=8)
whole, _ = short_convolution(u, taps)
cut, d_conv = (8, 1, 11), taps.shape[1]
padded = F.pad(u, (0, 0, d_conv - 1, 0))  # zeros before the text
starts = [0, *accumulate(cut)][:-1]
halos = [padded[:, start : start + d_conv - 1] for start in starts]
pieces = [short_convolution(part, taps, history=halo)[0]
          for part, halo in zip(u.split(cut, 1), halos, strict=True)]  # fmt: skip
check("slices with a halo of 3 tokens = one pass", torch.cat(pieces, 1), whole)

alone = torch.cat([short_convolution(part, taps)[0] for part in u.split(cut, 1)], 1)
_ = must_differ("no halo", alone, whole)
wrong = (alone - whole).abs().amax((0, 2)) > 1e-10
print("tokens that are wrong without it:", wrong.nonzero().flatten().tolist())
assert wrong.nonzero().flatten().tolist() == [8, 9, 10, 11]
first = sum(cut[:2])
print("the halo of rank 2: tokens", list(range(first - 3, first)))

# %% [markdown]
# Rank 1 has only token 8, so the halo of rank 2 comes from two ranks. For attention we pass all
# keys up to the slice's end. (`attention` takes its queries for the last of the keys.)

# %%
q, k, v = (random(2, 20, 4, 8, seed=seed) for seed in (9, 10, 11))
whole = attention(q, k, v)
ends = list(accumulate(cut))
pieces = [attention(part, k[:, :end], v[:, :end])
          for part, end in zip(q.split(cut, 1), ends, strict=True)]  # fmt: skip
check("queries of a slice, keys up to its end = one pass", torch.cat(pieces, 1), whole)
own = [attention(*parts) for parts in zip(*(t.split(cut, 1) for t in (q, k, v)), strict=True)]
_ = must_differ("keys of the own slice alone", torch.cat(own, 1), whole)

# %% [markdown]
# `SequenceParallel(model)` handles all four. Every rank collects the part of the parameters'
# gradients that passes through its slice, the first trap again, and `sum_gradients(model)` adds
# them up before each update. The last target of a slice is the first token of the next (ours are
# random). This model has no layer A, so it tests attention only inside I.


# %%
def tiny():
    """The same small model wherever it is made."""
    torch.manual_seed(0)
    sizes = dict(d_model=32, n_heads=4, d_state=8, d_ff=16, n_neurons=16, chunk_size=4)
    return CausalLM(ModelConfig("SE × 2 + IE", position="conv", inner="ssd", **sizes))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def gradients_of(model):
    """The gradients of all parameters, one after the other; zero where there is none."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


# %% [markdown]
# We plant two mistakes: a convolution without its halo, and positions counted from the start of the
# slice.


# %%
def planted(reader, mistake, start):
    """Make a reader wrong: "no halo", or "positions restart" (they should begin at `start`)."""
    if mistake == "no halo":
        for layer in reader.modules():
            if isinstance(layer, SSD):
                layer._convolve = short_convolution
    if mistake == "positions restart":
        for block in reader.model.blocks:
            block.register_forward_pre_hook(lambda block, given: (given[0], given[1] - start))
    return reader


# %%
def read_text(rank, ids, targets, cuts, mistakes):
    """Logits, loss, gradients before they are added up, and after; for each cut and mistake."""
    found = []
    for cut, mistake in zip(cuts, mistakes, strict=True):
        model = tiny()
        reader = planted(SequenceParallel(model), mistake, sum(cut[:rank]))
        logits = reader(ids.split(cut, 1)[rank])
        loss = loss_of(logits, targets.split(cut, 1)[rank])
        loss.backward()
        part = gradients_of(model)
        sum_gradients(model)
        found.append([logits.detach(), loss.detach(), part, gradients_of(model)])
    return found


# %%
ids, targets = torch.randint(256, (2, 2, 20), generator=torch.Generator().manual_seed(12))
cuts = [(7, 4, 9), (8, 1, 11), (12, 0, 8), (7, 4, 9), (7, 4, 9)]
mistakes = ["", "", "", "no halo", "positions restart"]
helpers = tiny, loss_of, gradients_of, planted
given = dict(ids=ids, targets=targets, cuts=cuts, mistakes=mistakes)
by_rank = on_ranks(3, read_text, *helpers, **given)

model = tiny()
logits, _ = model(ids)
loss = loss_of(logits, targets)
loss.backward()
logits, loss, gradient = logits.detach(), loss.detach(), gradients_of(model)
print(f"{model.config.pattern}: {gradient.numel()} parameters, 3 ranks")

# %%
runs = [list(zip(*(found[at] for found in by_rank), strict=True)) for at in range(len(cuts))]
for cut, (some, losses, _, sums) in zip(cuts[:3], runs, strict=False):
    check(f"slices of {cut}: logits = one process", torch.cat(some, 1), logits)
    check("  losses, summed over the ranks", sum(losses), loss)
    check(
        "  gradients, after sum_gradients, on every rank", torch.stack(sums), gradient.expand(3, -1)
    )

# %% [markdown]
# Nothing precedes rank 0, so its logits come out right in both mistakes. A test that looks only at
# rank 0 would miss them.

# %%
for mistake, (some, _, _, sums) in zip(mistakes[3:], runs[3:], strict=True):
    _ = must_differ(f"{mistake}: logits", torch.cat(some, 1), logits)
    _ = must_differ(f"{mistake}: gradients", sums[0], gradient)
    check(f"blind: {mistake}, seen from rank 0", some[0], logits[:, :7])
_, _, parts, _ = runs[0]
for rank, part in enumerate(parts):
    _ = must_differ(f"gradients of rank {rank}, not summed", part, gradient)
check("the parts add up", sum(parts), gradient)

# %% [markdown]
# ## 5 · What travels
#
# We count the bytes that a rank hands to each of the three collectives in `cheems_ref.distributed`.
# With $b$ rows, $h$ heads of width $p$, and a state of $n$, these are
#
# $$\underbrace{b\,h\,(pn + 1)}_{\text{forward: its pair}} \qquad\text{and}\qquad
#   \underbrace{N\,b\,h\,(pn + 1)}_{\text{backward: a gradient for every pair}} +
#   \underbrace{2h + b\,h\,p\,n}_{A,\ D,\ \text{initial state}} \tag{12.4}$$
#
# numbers, independent of $l$. The last term belongs to the bare function; a model instead sums the
# gradients of all its parameters, once per update. We don't count the halo or whole numbers
# (lengths, positions of keys).

# %%
source = inspect.getsource(distributed)
named = set(re.findall(r"\bdist\.([a-z]\w*)\(", source))
asks = {"get_rank", "get_world_size", "is_available", "is_initialized"}
print("collectives in cheems_ref/distributed.py:", *sorted(named - asks))
assert named - asks == {"all_gather_single", "reduce_scatter_single", "all_reduce"}


# %%
def predicted(b, h, p, n, ranks, size=8):
    """Equation 12.4 in bytes, by collective, for numbers of `size` bytes."""
    pair, shared = b * h * (p * n + 1), 2 * h + b * h * p * n
    numbers = {"all_gather_single": pair, "reduce_scatter_single": ranks * pair}
    return {name: size * many for name, many in (numbers | {"all_reduce": shared}).items()}


def counted_in(notes, name):
    """Let a collective note the bytes of what its rank hands in, but for whole numbers."""
    original = getattr(dist, name)

    def noting(*tensors, group):
        given = tensors[-1]
        if given.is_floating_point():
            notes[name] += given.numel() * given.element_size()
        return original(*tensors, group=group)

    setattr(dist, name, noting)


# %% [markdown]
# We run two and four ranks.


# %%
COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "all_reduce")


def count(rank, shapes, names):
    """Bytes by collective: of SSD of each shape, forward and backward."""
    notes, halves = Counter(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name in names:
        counted_in(notes, name)
    found = []
    for ranks, length, sizes in shapes:
        group = halves[rank // 2] if ranks == 2 else None
        x, dt, A, B, C, D, state = [t.requires_grad_() for t in inputs(l=length, **sizes)]
        options = dict(D=D, initial_state=state, group=group)
        ssd_sequence_parallel(x, dt, A, B, C, **options)[0].sum().backward()
        found.append(dict(notes))
        notes.clear()
    return found


# %%
sizes = [dict(b=2, h=4, p=5, g=2, n=3), dict(b=1, h=6, p=8, g=1, n=16)]
shapes = [(ranks, length, s) for ranks in (2, 4) for length in (8, 40) for s in sizes]
by_rank = on_ranks(4, count, random, inputs, counted_in, shapes=shapes, names=COLLECTIVES)
assert all(found == by_rank[0] for found in by_rank)
print("every rank hands in as much as every other")

for (ranks, length, s), found in zip(shapes, by_rank[0], strict=True):
    want = predicted(s["b"], s["h"], s["p"], s["n"], ranks)
    assert [*found] == [*COLLECTIVES] and found == want
    print(f"{ranks} ranks, {length:2} tokens each, h = {s['h']}:", *found.values(), "bytes")
print("handed to all_gather, reduce_scatter and all_reduce: as predicted, to the byte")

# %% [markdown]
# Keys and values do grow with $l$: $2hp$ numbers per token, with $h$ the number of groups if heads
# share them. In the forward pass a rank hands in the same for any $N$, so this process can count
# alone, for models of one layer.


# %%
def handed_in_by(configs, length):
    """Bytes that models hand to all_gather in a forward pass over slices of some tokens."""
    notes, original = Counter(), dist.all_gather_single
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    counted_in(notes, "all_gather_single")
    for config in configs:
        SequenceParallel(CausalLM(ModelConfig(**config)))(torch.zeros(2, length).long())
        yield notes.pop("all_gather_single")
    dist.all_gather_single = original
    dist.destroy_process_group()


# %%
b, h, p, n = 2, 4, 8, 16
width = dict(d_model=h * p, n_heads=h, d_state=n)
kinds = [dict(pattern="S"), dict(pattern="A"), dict(pattern="A", n_kv_heads=2)]
for length in (8, 40):
    found = list(handed_in_by([kind | width for kind in kinds], length))
    of_keys = 2 * b * length * h * p
    assert found == [8 * b * h * (p * n + 1), 8 * of_keys, 8 * of_keys // 2]
    print(f"{length:2} tokens: S {found[0]} bytes, A {found[1]}, A with 2 groups {found[2]}")
print("as predicted, to the byte")

# %% [markdown]
# The package gathers and holds all keys and values. In *ring attention* (Liu and others) each rank
# passes slices on while it computes with another. It sends as much, $N - 1$ slices' worth, but
# holds two slices instead of all. An all-gather also sends each pair to all $N - 1$ other ranks. So
# in the forward pass each rank sends, in numbers,
#
# $$\text{SSD: } (N-1)\,b\,h\,(pn + 1), \qquad
#   \text{attention: } (N-1)\,2\,b\,l\,h\,p. \tag{12.5}$$
#
# They are equal at $l = (pn + 1) / 2p$, just over $n/2$, for any $b$, $h$ and $N$.


# %%
def sent(ranks, b, l, h, p, n, size=4):
    """Equation 12.5 in bytes: what each rank sends, for SSD and for attention."""
    others = ranks - 1
    return others * b * h * (p * n + 1) * size, others * 2 * b * l * h * p * size


def smaller_from(ranks, b, h, p, n):
    """The fewest tokens per rank with which SSD sends less."""
    lengths = range(1, n + 2)
    return next(l for l in lengths if sent(ranks, b, l, h, p, n)[0] < sent(ranks, b, l, h, p, n)[1])


for p, n in ((32, 16), (64, 64), (64, 128), (64, 256)):
    found = {
        smaller_from(ranks, b, h, p, n) for ranks in (2, 8, 64) for b in (1, 4) for h in (1, 24)
    }
    assert found == {n // 2 + 1}
    print(f"p = {p}, n = {n:3}: SSD sends less from {n // 2 + 1} tokens per rank on")

# %% [markdown]
# This crossing assumes numbers of equal size and keys for every head. The package keeps states in
# float32: beside sixteen-bit keys the crossing moves to about $n$ tokens. With $g$ groups of keys
# for $h$ heads it moves up by $h/g$ on top. The next cells calculate (12.5) without either, in
# four-byte numbers, and only forward.

# %%
case = dict(ranks=8, b=1, h=24, p=64, n=128)
lengths = [2**e for e in range(4, 18)]
state_bytes, ring_bytes = zip(*(sent(l=l, **case) for l in lengths), strict=True)
for l in (16, 1024, 131_072):
    of_state, of_ring = (size / l / 1000 for size in sent(l=l, **case))
    print(f"{l:7,} tokens per rank: SSD {of_state:7.3f} kB per token, attention {of_ring:.2f}")
times = ring_bytes[-1] / state_bytes[-1]
print(f"at 131,072 tokens per rank attention sends {times:.0f} times as much")
assert times > 2000

# %%
assert len(set(state_bytes)) == 1
assert all(second == 2 * first for first, second in pairwise(ring_bytes))
assert smaller_from(ranks=8, b=1, h=24, p=64, n=128) == 65
print("SSD: the same at every length; attention: doubled with the length; they cross at 64 to 65")

# %% tags=["figure"]
fig, ax = plotting.figure(size=(7, 4.2))
curves = {"attention: keys and values": ring_bytes, "SSD: pairs": state_bytes}
plotting.lines(ax, lengths, curves, xscale="log", yscale="log")
ax.set(xlabel="tokens per rank", ylabel="bytes that a rank sends", title="forward, 8 ranks")
plotting.save(
    fig,
    "12_bytes",
    "Bytes that each of 8 ranks sends in a forward pass against tokens per rank. For attention a "
    "straight line that rises in proportion to the tokens; for SSD a level one. They cross just "
    "above 64 tokens, and at 131,072 they are more than 2,000 times apart.",
)

# %% [markdown]
# Bytes aren't time. And a pattern that ends in IE, like Cheems's, still sends keys and values.

# %% [markdown]
# ## 6 · Many rows
#
# Divide the rows of a batch among the ranks, and only gradients travel. Let rank $i$ read $b_i$ of
# $b$ rows, with mean loss $\ell_i$. The gradient of the mean over all rows is
#
# $$\nabla \ell = \frac1N \sum_i \frac{N\,b_i}{b}\, \nabla \ell_i . \tag{12.6}$$
#
# So a rank multiplies its loss by $N b_i / b$, and the ranks average their gradients. (Our rows
# have equally many targets; exercise 4 drops that.)

# %%
model, cut = tiny(), (3, 1, 1)
ids = torch.randint(256, (5, 17), generator=torch.Generator().manual_seed(40))


def gradient_of(model, losses):
    """The gradient of a mean of losses, all parameters one after the other."""
    model.zero_grad()
    (sum(losses) / len(losses)).backward()
    return gradients_of(model)


def mean_loss(model, ids):
    logits, _ = model(ids[:, :-1], use_cache=False)
    return loss_of(logits, ids[:, 1:]) / ids[:, 1:].numel()


whole = gradient_of(model, [mean_loss(model, ids)])
shares = ids.split(cut)
weighted = [len(cut) * len(part) / len(ids) * mean_loss(model, part) for part in shares]
check("shares of 3, 1 and 1 rows, weighted: one batch", gradient_of(model, weighted), whole)
plain = [mean_loss(model, part) for part in shares]
_ = must_differ("not weighted", gradient_of(model, plain), whole)

# %% [markdown]
# What does each rank hold for an update? There are two answers.
#
# - **data**: all parameters, their gradients, and the two moments that AdamW keeps of each.
# - **sharded**: some rows of every parameter, of its gradient and its moments. The ranks gather a
#   block's parameters each time it runs, and a `reduce_scatter` sums the gradients and gives each
#   rank its rows.
#
# Both are torch's `fully_shard`, on a grid of (replicas, parts): $(N, 1)$ for data and $(1, N)$ for
# sharded. `shard_model` calls it for every block. `to_local` is the part of a parameter that a rank
# holds, `full_tensor` all of it; `CommDebugMode` counts collectives. (`precision="float32"` only
# switches autocast off; the numbers are float64.)


# %%
def train_in_ways(rank, ids, ways, settings):
    """For each way: losses of a run, the shapes that this rank holds, and all parameters."""
    for way in ways:
        model = tiny()
        shard_model(model, way)
        run = train(model, ids, TrainConfig(**settings), progress_bar=False)
        held = {name: list(p.to_local().shape) for name, p in model.named_parameters()}
        moments = [state["exp_avg_sq"].to_local() for state in run.optimizer.state.values()]
        whole = torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])
        yield run.losses, held, sum(moment.numel() for moment in moments), whole


def parts_of(model):
    return [model.embedding, *model.blocks]


def is_whole(part):
    """Whether the parameters of a part are there as a whole."""
    return not any(hasattr(p, "to_local") for p in part.parameters())


def trained_in_ways(rank, **given):
    """All of it in a list, and how often the ranks talk in a pass and its way back."""
    from torch.distributed.tensor.debug import CommDebugMode

    found, model, whole = list(train_in_ways(rank, **given)), tiny(), []
    shard_model(model, "sharded")
    for block in model.blocks:  # while it runs: what is whole of the embedding and the blocks
        block.layer.register_forward_hook(
            lambda *_: whole.append([is_whole(part) for part in parts_of(model)])
        )
    with CommDebugMode() as calls:
        model(given["ids"][None, :9])[0].sum().backward()
    calls = {str(name).rpartition(".")[2]: n for name, n in calls.get_comm_counts().items()}
    return found, calls, whole


# %%
text = torch.randint(256, (600,), generator=torch.Generator().manual_seed(41))
settings = dict(steps=6, batch_size=5, seq_len=16, precision="float32", evaluate_every=3)
given = dict(ids=text, ways=["data", "sharded"], settings=settings)
helpers = tiny, train_in_ways, parts_of, is_whole
by_rank = on_ranks(2, trained_in_ways, *helpers, **given)
alone = train(tiny(), text, TrainConfig(**settings), progress_bar=False)
want = torch.tensor(alone.losses)
learnt = torch.cat([p.detach().flatten() for p in alone.model.parameters()])
for rank, (found, _, _) in enumerate(by_rank):
    for way, (losses, _, _, whole) in zip(given["ways"], found, strict=True):
        check(f"{way}: losses of 6 updates, told on rank {rank}", torch.tensor(losses), want)
        check("  all parameters after them", whole, learnt, tol=1e-6)

# %%
n = sum(p.numel() for p in alone.model.parameters())
numbers = {
    way: [sum(math.prod(shape) for shape in found[at][1].values()) for found, _, _ in by_rank]
    for at, way in enumerate(given["ways"])
}
for at, way in enumerate(given["ways"]):
    print(f"{way:8}: of {n} parameters the ranks hold", *numbers[way], end=", and ")
    moments = [found[at][2] for found, _, _ in by_rank]
    print("as many of each moment")
    assert moments == numbers[way]
assert numbers["data"] == [n, n] and sum(numbers["sharded"]) == n

# %%
units, calls, whole = len(alone.model.blocks) + 1, *by_rank[0][1:]
print(f"{units} units, gathered {calls['_allgather_base_']} times, ", end="")
print(f"summed and cut {calls['_reduce_scatter_base_']} times")
assert calls["_allgather_base_"] == 2 * units and calls["_reduce_scatter_base_"] == units
running = [[i for i, there in enumerate(row) if there] for row in whole]
print("whole while block 0 runs, block 1, …: embedding (0) and blocks (from 1)", *running)
assert running == [[0, i] for i in range(1, units)]

# %% [markdown]
# The units are the blocks, plus everything outside them: the embedding, which is also the matrix of
# the logits, and the last norm. In the forward pass the embedding stays whole, and of the blocks
# only the running one. The figure shows what each rank held.


# %%
def by_unit(held):
    """Numbers held of the embedding and of each block."""
    counts = Counter()
    for name, shape in held.items():
        unit = re.sub(r"blocks\.(\d+).*", r"block \1", name).partition(".")[0]
        counts[unit] += math.prod(shape)
    return counts


bars = {
    way: [by_unit(found[at][1]) for found, _, _ in by_rank] for at, way in enumerate(given["ways"])
}
assert [*bars["data"][0]] == ["embedding", *(f"block {i}" for i in range(6)), "norm"]
for name, of_all in bars["data"][0].items():
    halves = [counts[name] for counts in bars["sharded"]]
    assert bars["data"][1][name] == of_all and halves == [of_all / 2, of_all / 2]


# %% tags=["figure"]
def draw_held(axes, bars):
    """A panel for each way, a bar for each unit and rank."""
    for ax, (way, of_ranks) in zip(axes, bars.items(), strict=True):
        for rank, counts in enumerate(of_ranks):
            places = [y + 0.36 * rank - 0.18 for y in range(len(counts))]
            ax.barh(places, [*counts.values()], 0.34, label=f"rank {rank}")
        ax.set_yticks(range(len(counts)), [*counts])
        ax.invert_yaxis()
        ax.set(title=way, xlabel="numbers held", xlim=(0, 9000))


# %% tags=["figure"]
fig, axes = plotting.figure(1, 2, size=(10, 4.4))
draw_held(axes, bars)
axes[1].legend()
plotting.save(
    fig,
    "12_held",
    "Numbers of the embedding, six blocks and the last norm that two ranks hold. Data: both ranks "
    "hold all of each. Sharded: each holds half of each.",
)

# %% [markdown]
# **Sixteen bits.** `fully_shard` can give a block all its parameters in bfloat16. But $A$ and the
# bias of the step size sit in an exponent, times a number of tokens, so their rounding error grows.
# For one head, chosen by hand, it's 0.8 % after 400 tokens. The package keeps parameters in
# float32.

# %%
A_log, dt_bias = torch.tensor(0.9), torch.tensor(-6.9)


def decay_over(tokens, A_log, dt_bias):
    """The decay over some tokens, where the step size is its bias alone."""
    return (-tokens * F.softplus(dt_bias) * A_log.exp()).exp()


for tokens in (4, 40, 400):
    left = decay_over(tokens, A_log, dt_bias)
    coarse = decay_over(tokens, A_log.bfloat16().double(), dt_bias.bfloat16().double())
    print(f"{tokens:3} tokens: {left:.3f} is left; rounded, {coarse:.3f}: {coarse / left - 1:+.1%}")
_ = must_differ("A and the bias in bfloat16: the decay over 400 tokens", coarse, left)
assert 0.3 < left < 0.4

# %% [markdown]
# ## 7 · A rank dies
#
# When one process dies, `torchrun` ends the others, and the last checkpoint is all you have. Two
# ranks save every 4 updates, and rank 1 dies after update 6.


# %%
def train_in(rank, folder, ids, settings):
    """Train in a directory; rank 1 ends at once after update 6."""

    def after_step(run):
        if rank == 1 and run.step == 6:
            open(f"{folder}/ended after {run.step}", "w").close()
            os._exit(1)

    model = tiny()
    shard_model(model, "sharded")
    options = dict(directory=folder, progress_bar=False, after_step=after_step)
    train(model, ids, TrainConfig(**settings), **options)


# %% [markdown]
# A single process picks up from there.

# %%
text = torch.randint(256, (600,), generator=torch.Generator().manual_seed(42))
settings = dict(steps=10, batch_size=5, seq_len=16, precision="float32", checkpoint_every=4)
with TemporaryDirectory() as folder:
    try:
        on_ranks(2, train_in, tiny, folder=folder, ids=text, settings=settings)
    except RuntimeError:
        left = newest_checkpoint(folder)
        print("the run ended; left:", left.name, *sorted(path.name for path in left.iterdir()))
    assert Path(folder, "ended after 6").exists()
    begun = []
    options = dict(
        directory=folder, progress_bar=False, at_start=lambda run: begun.append(run.step)
    )
    run = train(tiny(), text, TrainConfig(**settings), **options)
    last = newest_checkpoint(folder)
    print("gone on after update", *begun, "and at the end:", last.name)
assert (left.name, last.name) == ("step-00000004", "step-00000010") and begun == [4]

# %%
alone = train(tiny(), text, TrainConfig(**settings), progress_bar=False)
check("begun by two ranks, ended by one: all losses = a run that was never stopped",
      torch.tensor(run.losses), torch.tensor(alone.losses))  # fmt: skip
for (name, p), want in zip(run.model.named_parameters(), alone.model.parameters(), strict=True):
    assert (p - want).abs().max() < 1e-8, name
print("and so are its parameters, to 1e-8")

# %% [markdown]
# The run repeated updates 5 and 6, and lost nothing else. Two ranks wrote the checkpoint and one
# read it: the checkpoint holds the state of the generator that draws windows, and readers cut
# parameters and moments anew.
#
# In a terminal, start the command of chapter 07 with `torchrun` (the README has the lines). With
# GPUs the ranks would talk through NCCL, which this course doesn't test.

# %% [markdown]
# ## 8 · What the papers' sizes hold
#
# Sharded parameters, gradients and two moments in float32 take $16/N$ bytes per parameter. The
# running block and everything outside the blocks don't shrink: `training_bytes` counts them whole,
# with their gradients. We measure no memory here.

# %%
SIZES, RANKS = ("cheems-320m", "cheems-1.3b"), (1, 2, 4, 8, 16, 32, 64)
memory = {
    name: [training_bytes(preset(name), processes=ranks) / 1e9 for ranks in RANKS] for name in SIZES
}
print("ranks      ", *(f"{ranks:6}" for ranks in RANKS))
for name, of_ranks in memory.items():
    print(f"{name:11}", *(f"{gigabytes:6.2f}" for gigabytes in of_ranks), "GB")

# %%
for name in SIZES:
    parts, c = count_parameters(preset(name)), preset(name)
    n = sum(part.total for part in parts.values())
    outside = parts["embedding"].total + parts["head"].total + c.d_model
    blocks = {m: parts[m].total // c.pattern.count(m) + c.d_model for m in {*c.pattern}}
    largest = max(blocks, key=blocks.get)
    for ranks, gigabytes in zip(RANKS[1:], memory[name][1:], strict=True):
        assert abs(gigabytes - (16 * n / ranks + 8 * (outside + blocks[largest])) / 1e9) < 1e-6
    assert memory[name][0] == 16 * n / 1e9
    print(f"{name}: whole are {8 * outside / 1e9:.2f} GB of what is outside of the blocks", end="")
    print(f" and {8 * blocks[largest] / 1e9:.2f} GB of a block {largest}, gradients included")

# %% [markdown]
# Activations come on top. This prints both:
# `python -m cheems_ref budget --preset cheems-1.3b --batch 64 --processes 8`.
#
# ## 9 · Experts on other ranks, on paper
#
# Instead of gathering parameters we can send tokens to the ranks that hold them: *expert
# parallelism*. Each rank holds $e/N$ whole experts. A token goes once to every rank that holds one
# of its $k$ choices, and that rank sends back the weighted sum of its experts. If choices are
# uniform and independent, a token reaches
#
# $$N \big(1 - (1 - 1/N)^k\big) \tag{12.7}$$
#
# ranks. A choice of $k$ *different* experts reaches a few more. On average
# $(N - 1)(1 - (1 - 1/N)^k)$ are other ranks. Each costs $d$ numbers out and $d$ back.


# %%
def ranks_reached(N, k):
    """Equation 12.7: how many of N ranks hold one of k choices, on average."""
    return N * (1 - (1 - 1 / N) ** k)


def simulated(N, k, e, tokens=20_000):
    """The same, of choices of k different ones of e experts, N of whose ranks hold e/N each."""
    generator = torch.Generator().manual_seed(43)
    chosen = torch.rand(tokens, e, generator=generator).topk(k).indices // (e // N)
    return F.one_hot(chosen, N).amax(1).sum(1).double().mean().item()


print("ranks of 8 reached by k choices of 64:")
for k in (1, 2, 4, 16):
    formula, found = ranks_reached(8, k), simulated(8, k, 64)
    print(f"k = {k:2}: formula {formula:.2f}, different experts {found:.2f}")
    assert abs(found - formula) < 0.02 if k == 1 else formula < found < 1.08 * formula

# %% [markdown]
# With few tokens it's cheaper to send tokens, with many to gather experts. A layer of $e$ experts
# with $f$ neurons each, of three matrices, has $3def$ numbers. Sharded training gathers them twice
# and sums them once (without micro-batches). A token costs $4d$ per other rank: out and back, in
# both passes.


# %%
def tokens_until_equal(N, k, e, f):
    """Tokens per rank and update above which sending experts moves less than sending tokens."""
    experts = 3 * (3 * e * f) * (N - 1) / N  # each, per d: twice gathered, once summed
    per_token = 4 * ranks_reached(N, k) * (N - 1) / N
    return experts / per_token


for k in (1, 2, 8):
    equal = tokens_until_equal(N=8, k=k, e=64, f=256)
    print(f"64 experts of f = 256 on 8 ranks, k = {k}: equal at {equal:,.0f} tokens per rank")
assert tokens_until_equal(8, 1, 64, 256) > 4 * tokens_until_equal(8, 8, 64, 256)
assert tokens_until_equal(8, 2, 128, 256) == 2 * tokens_until_equal(8, 2, 64, 256)
print("twice as many experts: equal at twice as many tokens")

# %% [markdown]
# In CDMoE an expert is two rows of $d$ numbers (chapter 06), twice the size of a token. With $K$
# choices (heads times $k$) a token fetches at most $2Kd(1 - 1/N)$ numbers in the forward pass, less
# if tokens of a rank share rows. Or it travels, $d$ numbers to each other rank and $d$ back. We
# sent no expert or token between processes.

# %%
for heads, k in ((2, 8), (4, 16)):
    choices = heads * k
    fetched, travelled = 2 * choices * 7 / 8, 2 * ranks_reached(8, choices) * 7 / 8
    print(f"{heads} heads, k = {k:2}, 8 ranks: fetch {fetched:5.1f} d, travel {travelled:5.2f} d")
    assert fetched > 2 * travelled

# %% [markdown]
# ## Summary
#
# - A slice acts on a state by a pair: it fades it, and adds what it writes. Pairs of neighbours
#   join in any grouping.
# - Each rank runs its slice from an empty state, all exchange pairs, and each adds the read of its
#   prefix. Real processes gave the results of one pass, gradients included.
# - Sum the gradients of shared tensors, and let every rank take part in the backward pass.
# - A model also needs a halo, continuing positions, and the keys and values of all ranks.
# - The size of a pair doesn't depend on the tokens. With keys for every head and numbers of equal
#   size, it is smaller than keys and values above about $n/2$ tokens per rank; sixteen-bit or
#   grouped keys raise this bound.
# - Sharded over two ranks, each held half of every parameter, with the losses of one process.
# - A dead rank costs the updates since the last checkpoint.
#
# ## Exercises
#
# **1 · easy.** Every rank knows how long all slices are. Which positions do its own tokens have?


# %% tags=["exercise"]
def positions_of(lengths, rank):
    """Positions of a rank's tokens: the lengths of all slices, a rank -> (l,), int64."""
    ### BEGIN SOLUTION
    return sum(lengths[:rank]) + torch.arange(lengths[rank])
    ### END SOLUTION


# %% tags=["check"]
for lengths in ((5,), (8, 7, 9, 5), (1, 0, 20, 8), (0, 3, 0)):
    found = [positions_of(lengths, rank) for rank in range(len(lengths))]
    assert [len(part) for part in found] == list(lengths)
    check(f"slices of {lengths}", torch.cat(found), torch.arange(sum(lengths)))

# %% [markdown]
# **2 · easy.** On how many ranks do parameters, gradients, moments and logits fit? `memory` is the
# memory of one rank, in bytes, and `tokens` counts the tokens of an update, over all ranks. Use
# `training_bytes`, which leaves out what layers keep for the backward pass; try 1, 2, 4, ….


# %% tags=["exercise"]
def ranks_needed(config, memory, tokens):
    """The smallest power of two that is enough; None if 1024 are not."""
    ### BEGIN SOLUTION
    for ranks in (2**e for e in range(11)):
        if training_bytes(config, tokens=tokens, processes=ranks) <= memory:
            return ranks
    return None
    ### END SOLUTION


# %% tags=["check"]
small = ModelConfig("SE × 4", d_model=64, n_neurons=64)
whole = training_bytes(small, tokens=1000)
assert ranks_needed(small, whole, 1000) == 1
assert ranks_needed(small, whole - 1, 1000) > 1
assert ranks_needed(small, 1000, 1000) is None
ranks = ranks_needed(preset("cheems-1.3b"), 24e9, 2048 * 64)
print("Cheems-1.3B, 64 windows of 2,048 tokens, 24 GB each: at least", ranks, "ranks")
assert training_bytes(preset("cheems-1.3b"), tokens=2048 * 64, processes=ranks) <= 24e9
assert training_bytes(preset("cheems-1.3b"), tokens=2048 * 64, processes=ranks // 2) > 24e9

# %% [markdown]
# **3 · medium.** Write the halo. Every rank sends the last `count` tokens of its slice, or all of
# them if there are fewer. From the tails of all ranks, put together the `count` tokens before slice
# `rank`, with zeros for tokens before the text. (Hint: an earlier rank may have sent one token, or
# none. Where do the zeros go?)


# %% tags=["exercise"]
def halo(tails, rank, count):
    """tails: of each rank (b, at most count, d) -> the tokens before a slice, (b, count, d)."""
    ### BEGIN SOLUTION
    before = torch.cat([tails[0][:, :0], *tails[:rank]], dim=1)
    return F.pad(before, (0, 0, count, 0))[:, before.shape[1] :]  # the last ones
    ### END SOLUTION


# %% tags=["check"]
u, taps = random(2, 20, 6, seed=20), random(6, 4, seed=21)
whole, _ = short_convolution(u, taps)
for cut in ((20,), (8, 1, 11), (1, 1, 1, 17), (2, 0, 0, 18), (0, 5, 15)):
    parts = u.split(cut, 1)
    tails = [part[:, max(0, part.shape[1] - 3) :] for part in parts]
    pieces = [short_convolution(part, taps, history=halo(tails, rank, 3))[0]
              for rank, part in enumerate(parts)]  # fmt: skip
    check(f"slices of {cut}: one convolution", torch.cat(pieces, 1), whole)

# %% [markdown]
# **4 · medium.** Rows of unequal length: rank $i$ has `counts[i]` tokens with a target, and their
# mean loss is $\ell_i$. By what must it multiply its loss for the averaged gradients to equal the
# gradient of the mean over all tokens? (A rank without tokens has no mean. With which loss does it
# take part in the backward pass? See section 3.)


# %% tags=["exercise"]
def factor(counts, rank):
    """The factor of a rank's mean loss."""
    ### BEGIN SOLUTION
    return len(counts) * counts[rank] / sum(counts)
    ### END SOLUTION


# %% tags=["check"]
w, errors = torch.ones(3, requires_grad=True), random(12, 3, seed=44)
(want,) = torch.autograd.grad((errors @ w).square().mean(), w)
for counts in ((12,), (4, 4, 4), (7, 1, 4), (0, 12)):
    losses = [(part @ w).square().mean() if len(part) else 0 * w.sum()
              for part in errors.split(counts)]  # fmt: skip
    weighted = [factor(counts, rank) * loss for rank, loss in enumerate(losses)]
    (got,) = torch.autograd.grad(sum(weighted) / len(counts), w)
    check(f"tokens per rank {counts}: the mean over all", got, want)

# %% [markdown]
# **5 · hard.** The backward pass. For one head, slice $i$ receives the state $h_i$, with $h_0 = 0$
# and $h_{i+1} = a_i h_i + W_i$. Rank $i$ knows how its loss changes with the state it received,
# $G_i = \partial \text{loss}_i / \partial h_i$. How does the sum of all losses change with each
# $a_i$ and $W_i$? Write it without autograd, in one loop up the ranks and one down. (Hint: which
# losses does $W_i$ reach, and faded by what? In which order do the ranks come?)


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
for N in (1, 2, 5):
    a, W, G = (random(N, seed=30).sigmoid(), random(N, 4, 3, seed=31), random(N, 4, 3, seed=32))
    leaves = [a.clone().requires_grad_(), W.clone().requires_grad_()]
    state, loss = torch.zeros(4, 3), 0.0
    for a_i, W_i, G_i in zip(*leaves, G, strict=True):
        loss, state = loss + (G_i * state).sum(), a_i * state + W_i
    want = torch.autograd.grad(loss + 0 * state.sum(), leaves)
    got = pairs_backward(a, W, G)
    check(f"N = {N}: gradient of the decays", got[0], want[0])
    check(f"N = {N}: gradient of the writes", got[1], want[1])

# %% [markdown]
# ## Further reading
#
# - Dao and Gu, *Transformers are SSMs: Generalized Models and Efficient Algorithms Through
#   Structured State Space Duality* (2024), §8: cutting layers by heads and by tokens.
# - Sun and others, *LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid*
#   (2025): one gather of the states.
# - Liu, Zaharia and Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite Context*
#   (2023).
# - Blelloch, *Prefix Sums and Their Applications* (1990): prefixes of any associative operation.
