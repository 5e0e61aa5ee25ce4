# %% [markdown]
# # 11a · Shards, replicas and a killed rank
#
# **Chapter 11 cut a text. Most training cuts the batch instead, and then the parameters. This lab
# trains one model in both ways, kills a process, and picks up what is left.** You will be able to
#
# - weight the losses of uneven shares, so that their mean is the loss of the batch;
# - say what a rank holds, and what it holds for a moment, if parameters are sharded;
# - continue a run after the death of a rank, on another number of processes.
#
# You need chapters 07 and 11.
#
# Sources: torch's `fully_shard`; Zhao and others, *PyTorch FSDP* (2023).

# %% tags=["setup"]
import inspect
import multiprocessing
import os
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# %% tags=["setup"]
from cheems_lab.checkpoint import newest_checkpoint
from cheems_lab.processes import shard_model
from cheems_lab.training import train
from cheems_ref.budget import training_bytes
from cheems_ref.config import preset
from cheems_ref.model import CausalLM, ModelConfig
from cheems_ref.train import TrainConfig
from cheems_ref.verify import check, must_differ

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

# %% tags=["setup"]
RANK = """
import faulthandler, os, threading
from collections import Counter
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from cheems_lab.processes import shard_model
from cheems_lab.training import train
from cheems_ref.model import CausalLM, ModelConfig
from cheems_ref.train import TrainConfig
from tqdm import tqdm

tqdm.set_lock(threading.RLock())  # its lock between processes would outlive a killed one
faulthandler.dump_traceback_later(120, exit=True)
os.dup2(os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)  # stderr
os.environ["RANK"] = str(rank)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
store = dist.FileStore(f"{folder}/meeting", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""
END = 'torch.save(globals()[work](rank, **given), f"{folder}/{rank}.pt")'

# %% tags=["setup"]
# A process forked from one that has imported torch needn't import it again.
processes = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
processes.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "cheems_lab.training"])


def on_ranks(work, *helpers, **given):
    """What work(rank, **given) returns on each of two new processes; work may call the helpers."""
    program = "\n\n".join([RANK, *map(inspect.getsource, (*helpers, work)), END])
    with TemporaryDirectory() as folder:
        known = dict(folder=folder, work=work.__name__, given=given)
        ranks = [
            processes.Process(target=exec, args=(program, known | {"rank": rank}))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError("the ranks failed:\n" + Path(folder, "log").read_text()[-1600:])
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(2)]


# %% tags=["setup"]
def tiny():
    """The same small model wherever it is made."""
    torch.manual_seed(0)
    sizes = dict(d_model=32, n_heads=4, d_state=8, d_ff=16, n_neurons=16, chunk_size=4)
    return CausalLM(ModelConfig("SE × 2 + IE", position="conv", inner="ssd", **sizes))


# %% [markdown]
# ## 1 · Many rows
#
# Divide the rows of a batch among $N$ ranks, and only gradients travel. Let rank $i$ read $b_i$ of
# $b$ rows, with mean loss $\ell_i$. What must the ranks average to get the gradient of the mean
# loss over all rows? Not their own gradients, unless all shares are equal:
#
# $$\nabla \ell = \frac1N \sum_i \frac{N\,b_i}{b}\, \nabla \ell_i . \tag{11.8}$$
#
# So a rank multiplies its loss by $N b_i / b$, and the ranks average their gradients. (If some rows
# have more targets than others, count targets.)


# %%
def gradient_of(model, losses):
    """The gradient of a mean of losses, all parameters one after the other."""
    model.zero_grad()
    (sum(losses) / len(losses)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def mean_loss(model, ids):
    logits, _ = model(ids[:, :-1], use_cache=False)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


# %%
model, cut = tiny(), (3, 1, 1)
ids = torch.randint(256, (5, 17), generator=torch.Generator().manual_seed(40))
whole = gradient_of(model, [mean_loss(model, ids)])
shares = ids.split(cut)
weighted = [len(cut) * len(part) / len(ids) * mean_loss(model, part) for part in shares]
check("shares of 3, 1 and 1 rows, weighted: one batch", gradient_of(model, weighted), whole)
plain = [mean_loss(model, part) for part in shares]
_ = must_differ("not weighted", gradient_of(model, plain), whole)

# %% [markdown]
# **Your turn, 1.** In text, rows can have unequally many targets, since padding has none. Rank $i$
# has the mean loss over its own targets, and you know how many targets each rank has. By what must
# each rank multiply its loss, so that the ranks' average is the mean over all targets?


# %% tags=["exercise"]
def weights_for(targets):
    """One weight per rank, from the number of targets that each rank has."""
    ### BEGIN SOLUTION
    return [len(targets) * own / sum(targets) for own in targets]
    ### END SOLUTION


# %% tags=["check"]
for counts in ((3, 1, 1), (40, 16), (7,), (5, 0, 3)):
    losses = torch.rand(sum(counts), generator=torch.Generator().manual_seed(43))
    means = [part.mean() if len(part) else torch.tensor(0.0) for part in losses.split(counts)]
    weights = [float(weight) for weight in weights_for(list(counts))]
    assert len(weights) == len(counts), f"{len(counts)} ranks, and {len(weights)} weights"
    average = sum(w * mean for w, mean in zip(weights, means, strict=True)) / len(counts)
    check(f"targets {counts}: the mean over all", average, losses.mean())

# %% [markdown]
# ## 2 · Replicas and shards
#
# What must each rank store in order to update?
#
# - **data**: a replica. All parameters, their gradients, and the two moments that AdamW keeps of
#   each.
# - **sharded**: some rows of every parameter, of its gradient and its moments. The ranks gather a
#   block's parameters when the block runs, and a `reduce_scatter` averages the gradients and gives
#   each rank its rows.
#
# Both are torch's `fully_shard`, on what torch calls a device mesh, here of (replicas, parts): $(N,
# 1)$ for data and $(1, N)$ for sharded. `shard_model` calls it for every block. We train on two
# ranks, both ways, and once on one process.


# %%
def train_sharded(rank, way, ids, settings):
    """Losses of a run, numbers that this rank holds, and all parameters at the end."""
    model = tiny()
    shard_model(model, way)
    run = train(model, ids, TrainConfig(**settings), progress_bar=False)
    held = sum(p.to_local().numel() for p in model.parameters())
    moments = sum(state["exp_avg_sq"].to_local().numel() for state in run.optimizer.state.values())
    whole = torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])
    return dict(losses=run.losses, held=held, moments=moments, whole=whole)


# %% [markdown]
# Which numbers should agree to rounding, and which should halve? (`precision="float32"` only
# switches autocast off; the numbers are float64. AdamW amplifies rounding where gradients are
# small, so the parameters get a tolerance of 1e-6.)

# %%
text = torch.randint(256, (600,), generator=torch.Generator().manual_seed(41))
settings = dict(steps=6, batch_size=5, seq_len=16, precision="float32")
alone = train(tiny(), text, TrainConfig(**settings), progress_bar=False)
learnt = torch.cat([p.detach().flatten() for p in alone.model.parameters()])
for way, share in (("data", 1), ("sharded", 2)):
    ranks = on_ranks(train_sharded, tiny, way=way, ids=text, settings=settings)
    print(f"{way}: of {len(learnt):,} parameters each rank holds", *(f["held"] for f in ranks))
    for rank, found in enumerate(ranks):
        assert found["held"] == found["moments"] == len(learnt) // share
        losses = torch.tensor(found["losses"]), torch.tensor(alone.losses)
        check(f"  rank {rank}: losses of 6 updates", *losses)
        check(f"  rank {rank}: all parameters after them", found["whole"], learnt, tol=1e-6)

# %% [markdown]
# Five rows on two ranks are shares of 3 and 2, so (11.8) was at work. How often do the ranks talk
# in a sharded pass, and what is whole while a block runs? Every operator passes through a dispatch
# mode, which counts the collectives, and hooks look at the parameters.


# %%
def is_whole(part):
    """Whether the parameters of a part are there as a whole."""
    return not any(hasattr(p, "to_local") for p in part.parameters())


# %%
def counting(counts):
    """A mode that counts the operators of torch.distributed by their names."""

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "c10d":
                counts[operator._opname] += 1
            return operator(*args, **(kwargs or {}))

    return Collectives()


# %%
def talk(rank, ids):
    """The collectives of one pass forward and back; parts that are whole while each block runs."""
    model, whole = tiny(), []
    shard_model(model, "sharded")
    parts = [model.embedding, *model.blocks]
    for block in model.blocks:
        block.layer.register_forward_hook(
            lambda *_: whole.append([i for i, part in enumerate(parts) if is_whole(part)])
        )
    counts = Counter()
    with counting(counts):
        model(ids)[0].sum().backward()
    return dict(counts), whole


# %%
(counts, whole), _ = on_ranks(talk, tiny, is_whole, counting, ids=torch.zeros(1, 9).long())
units = len(tiny().blocks) + 1
gathered, summed = counts["_allgather_base_"], counts["_reduce_scatter_base_"]
print(f"{units} units: gathered {gathered} times, summed and cut {summed} times")
print("whole while block 1, 2, … runs: the embedding (0) and blocks", *whole)
assert (gathered, summed) == (2 * units, units)
assert whole == [[0, i] for i in range(1, units)]

# %% [markdown]
# The seven units are six blocks, and everything outside them: the embedding, which is also the
# matrix of the logits, and the last norm. Each unit is gathered twice, forward and back. In the
# forward pass the embedding stays whole, and of the blocks only the running one.
#
# What does that do to memory? With parameters, gradients and two moments in float32, a rank holds
# $16/N$ bytes per parameter, plus what is whole. `training_bytes` counts everything outside the
# blocks and the largest block whole, with their gradients. That's a lower bound: going back, torch
# may gather the next block early, and activations come on top. We didn't measure memory.

# %%
print("ranks      ", *(f"{ranks:6}" for ranks in (1, 2, 4, 8, 16, 32, 64)))
for name in ("cheems-320m", "cheems-1.3b"):
    held = [training_bytes(preset(name), processes=n) / 1e9 for n in (1, 2, 4, 8, 16, 32, 64)]
    print(f"{name:11}", *(f"{gigabytes:6.2f}" for gigabytes in held), "GB")
    assert all(after > before / 2 for before, after in pairwise(held))
    saved = [before - after for before, after in pairwise(held)]
    assert saved == sorted(saved, reverse=True) and saved[-1] > 0

# %% [markdown]
# Doubling the ranks never halves the bytes, because what is whole doesn't shrink. And each doubling
# saves less than the one before.
#
# ## 3 · A killed rank
#
# When one process dies, the others can't go on: their next collective has a member missing. The
# last checkpoint is all you have. Our two ranks save every 4 updates, and rank 1 is killed after
# update 6. What will be on disk?


# %%
def train_and_die(rank, folder, ids, settings):
    """Train in a directory; rank 1 kills itself after update 6."""

    def after_step(run):
        if rank == 1 and run.step == 6:
            os.kill(os.getpid(), 9)  # no cleanup

    model = tiny()
    shard_model(model, "sharded")
    options = dict(directory=folder, checkpoint_every=4, progress_bar=False, after_step=after_step)
    train(model, ids, TrainConfig(**settings), **options)


# %%
text = torch.randint(256, (600,), generator=torch.Generator().manual_seed(42))
settings = dict(steps=10, batch_size=5, seq_len=16, precision="float32")
with TemporaryDirectory() as folder:
    try:
        on_ranks(train_and_die, tiny, folder=folder, ids=text, settings=settings)
    except RuntimeError:
        print("the ranks failed")
    left = newest_checkpoint(folder)
    print("left:", left.name, *sorted(path.name for path in left.iterdir()))
    begun = []
    options = dict(
        directory=folder, progress_bar=False, at_start=lambda run: begun.append(run.step)
    )
    run = train(tiny(), text, TrainConfig(**settings), **options)
    last = newest_checkpoint(folder)
print("one process began after update", *begun, "and ended with", last.name)
assert (left.name, last.name) == ("step-00000004", "step-00000010") and begun == [4]

# %% [markdown]
# Is it the same run? The checkpoint holds parameters, moments, and the state of the generator that
# draws the windows, so it should be:

# %%
alone = train(tiny(), text, TrainConfig(**settings), progress_bar=False)
losses = torch.tensor(run.losses), torch.tensor(alone.losses)
check("begun by two ranks, ended by one: all losses = a run that was never stopped", *losses)
for (name, p), want in zip(run.model.named_parameters(), alone.model.parameters(), strict=True):
    assert (p - want).abs().max() < 1e-8, name
print("and so are its parameters, to 1e-8")

# %% [markdown]
# The run repeated updates 5 and 6, and lost nothing else. `torchrun` ends the other ranks for you
# when one dies ([Training](../../book/manual/training.md) has the commands). With GPUs the ranks
# would talk through NCCL, which this course doesn't test.

# %% [markdown]
# **Your turn, 2.** How often should a run save? Say that saving takes $c$ seconds, that a rank dies
# once in $T$ seconds on average, and that a death costs half the time $t$ between two checkpoints.
# Then the share of time lost is $c/t + t/(2T)$. Which $t$ makes it smallest?


# %% tags=["exercise"]
def seconds_between(saving, until_death):
    """The time between checkpoints that loses the smallest share."""
    ### BEGIN SOLUTION
    return (2 * saving * until_death) ** 0.5
    ### END SOLUTION


# %% tags=["check"]
for saving, until_death in ((30, 86_400), (5, 3600), (120, 1_000_000)):
    t = float(seconds_between(saving, until_death))
    lost = {factor: saving / (factor * t) + factor * t / (2 * until_death)
            for factor in (0.97, 1.0, 1.03)}  # fmt: skip
    best = min(lost, key=lost.get)
    assert best == 1.0, f"t = {t:,.0f}: {best} times as long would lose less"
    print(f"c = {saving}, T = {until_death:,}: t = {t:,.0f}")

# %% [markdown]
# ## Summary
#
# - With uneven shares of a batch, weight each rank's loss by its rows: $N b_i / b$.
# - A replica holds all numbers; a shard holds $1/N$ of them, and a few units whole for a moment.
#   Both gave the losses of one process.
# - A dead rank costs the updates since the last checkpoint. One process went on from what two had
#   written.

# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])
