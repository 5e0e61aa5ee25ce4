# %% [markdown]
# # 10 · Where time and memory go
#
# **Two models have the same number of parameters, and one reads twice as many tokens per second.
# What does the other do meanwhile?** When you are through you can
#
# - take a pass apart into its operators, and say of each what it computes and what it moves;
# - predict from three numbers of a machine how long a pass takes, and say how far that is off;
# - say where a state layer overtakes attention, and what the length of its chunks has to do with
#   it;
# - say what grows with the text: time, memory, and the time of one more token;
# - read a kernel of three programs line by line, and name what each loads, keeps and writes.
#
# Assumes: chapters 03, 06 and 07.
#
# Sources: *Wonderful Matrices* (WM) §4.2 and Figure 6; *Cheems* (Ch) §4.2, App. B.2 and Figure 5;
# Williams, Waterman and Patterson (2009), *Roofline*. The code that this notebook uses is
# `cheems_ref/roofline.py`, `budget.py` and `triton_ssd.py`; the records are written by
# `tests/bench/bench_efficiency.py`.
#
# How to read ✓ and ✗: chapter 00.

# %% tags=["setup"]
import json
import math
from functools import partial
from pathlib import Path
from statistics import median

import torch

from cheems_ref import plotting
from cheems_ref.attention import attention
from cheems_ref.budget import (
    activation_bytes,
    cache_bytes,
    count_flops,
    count_parameters,
    fit_d_ff,
)
from cheems_ref.experts import MLP, MoE
from cheems_ref.model import ModelConfig
from cheems_ref.retrieval import PEER
from cheems_ref.roofline import Machine, Recorder, pass_operators
from cheems_ref.ssd import ssd_chunked, ssd_quadratic, ssd_recurrent
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_num_threads(1)  # as the record's
RECORD = json.loads((Path("..") / "figures" / "records" / "10_efficiency.json").read_text())
MEASURED = RECORD["parts"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% tags=["setup"]
SIZES = dict(d_model=128, n_heads=4, d_state=64, n_values=16, k_values=2, k_experts=1)
TWO_MILLION = 2_000_000
SYSTEMS = {
    "LlaMa": dict(pattern="AH × 8"),
    "Mamba-2": dict(pattern="SH × 8", position="conv"),
    "Jamba": dict(pattern="SH × 4 + AH + SH × 3", position="conv"),
    "OTCE": dict(pattern="SD SX SX SX AX SX SD AD"),
    "Cheems": dict(pattern="SE × 7 + IE"),
}


def sized(name):
    """A system with the d_ff that brings it nearest to two million parameters."""
    return fit_d_ff(ModelConfig(**SYSTEMS[name], **SIZES), TWO_MILLION)


INNER = {
    "attention": dict(pattern="(SK × 3 + AK) × 2"),
    "retrieved": dict(pattern="(SK × 3 + IK) × 2", inner="retrieved"),
    "SSD": dict(pattern="(SK × 3 + IK) × 2", inner="ssd"),
}


def sized_inner(name):
    """The pattern of Ch's Figure 6 with an inner function, at two million parameters."""
    return fit_d_ff(ModelConfig(**INNER[name], **SIZES), TWO_MILLION)


# %% tags=["setup"]
def make_ssd(length, device="cpu"):
    """The tensors of one state layer: four heads of 32 channels, a state of 64."""
    how = dict(generator=seeded(0))
    x, B, C = (torch.randn(1, length, *sizes, **how) for sizes in ((4, 32), (1, 64), (1, 64)))
    dt, A = torch.rand(1, length, 4, **how) / 10, -torch.arange(1.0, 5)
    return [t.to(device) for t in (x, dt, A, B, C)]


def make_forms(length, device="cpu"):
    """Operators to compare, as calls without arguments: 128 channels in and out."""
    ssd = make_ssd(length, device)
    x = ssd[0]
    _ = torch.manual_seed(0)
    layers = {"MLP": MLP(128, 512), "routed": MoE(128, 128, n_experts=4, k=1)}
    layers["retrieved"] = PEER(128, n_experts=1024, n_heads=1, k=8, d_query=128)
    forms = {"SSD, one by one": partial(ssd_recurrent, *ssd)}
    forms |= {
        f"SSD, chunks of {q}": partial(ssd_chunked, *ssd, chunk_size=q) for q in (16, 64, 256)
    }
    forms["SSD, all at once"] = partial(ssd_quadratic, *ssd)
    forms["attention"] = partial(attention, x, x, x)
    tokens = x.flatten(2)
    return forms | {name: partial(layer.to(device), tokens) for name, layer in layers.items()}


def make_chunks(length, device="cpu"):
    """SSD by size of its chunks: a call forward, and one with all five gradients."""
    tensors = [t.requires_grad_() for t in make_ssd(length, device)]

    def both(q):
        return torch.autograd.grad(ssd_chunked(*tensors, chunk_size=q).sum(), tensors)

    return {
        q: (partial(ssd_chunked, *tensors, chunk_size=q), partial(both, q))
        for q in (8, 16, 32, 64, 128, 256, 512)
    }

# %% [markdown]
# ## Why this matters
#
# WM's Figure 6 and Ch's Figure 5 draw how many tokens per second an architecture reads, against the
# length of the text. The curves cross, and the papers say at which length. Why there, and where they
# would cross on another machine or in another size, a curve does not say. A model of the pass does:
# three numbers of the machine, and a count.
#
# ## 1 · What a pass is made of
#
# To torch a layer is a list of *operators*: a product of matrices, a sum, an exponential. Each
# reads its tensors from memory, computes, and writes a new tensor. (A *view*, another shape for the
# same memory, reads and writes nothing.) One can write along while a layer runs. SSD in chunks, on
# 512 tokens:

# %%
with Recorder() as recorder:
    _ = ssd_chunked(*make_ssd(512))
called = recorder.operators
print(f"{len(called)} operators; those with the most bytes:")
for one in sorted(called, key=lambda one: one.moved)[:-6:-1]:
    print(f"  {one.name:12} {one.flops / 1e6:6.2f} million operations, {one.moved / 1e6:5.2f} MB")
products = [one for one in called if one.flops]
assert [one.name for one in products] == ["bmm"] * 4

# %% [markdown]
# Four are products of matrices, one for each of the four steps of chapter 03. All others are there
# for decays, masks and sums, compute next to nothing, and move most of the bytes:

# %%
operations, moved = sum(one.flops for one in called), sum(one.moved for one in called)
in_products = sum(one.moved for one in products)
print(f"{operations / 1e6:.1f} million operations; {moved / 1e6:.1f} MB,"
      f" of them {in_products / moved:.0%} by products")  # fmt: skip
assert in_products < 0.4 * moved

# %% [markdown]
# Nothing has to be computed to write along: it is enough to know the shapes. `pass_operators` runs
# each layer of a model on tensors that have shapes and no contents, so that a model of any size can
# be taken apart on a laptop. Its products are those that `count_flops` counts by formula; with the
# backward pass there are three for each (and torch's fused attention computes its scores once
# more):

# %%
for name in SYSTEMS:
    config = sized(name)
    counts = count_flops(config, 512)
    passes = [pass_operators(config, 512, training=t) for t in (False, True)]
    for part, flops in counts.items():
        forward, both = (sum(one.flops for one in listed[part]) for listed in passes)
        assert forward == flops.total() - flops.rows
        assert both >= 3 * forward
    numbers = [sum(len(listed) for listed in one.values()) for one in passes]
    print(f"{name:8} {numbers[0]:5} operators forward, {numbers[1]:5} with the backward pass")
