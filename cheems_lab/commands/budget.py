"""Compute what a model needs: parameters, operations, memory, and the speed a machine allows.

The model is not made. Tables are by letter; memory is that of decoding and of training, and the
speed is an upper bound.

examples:
  cheems budget --preset cheems-1.3b --context 131072
  cheems budget --preset jamba-1.3b --batch 8 --flops 9.9e14 --bandwidth 3.35e12
  cheems budget --pattern "SM x 3 + AM" --set d_model=512 --plot memory.svg
  cheems budget --preset cheems-1.3b --seq-len 2048 --batch 64 --processes 8

Operations are products that are summed. Activations are what torch keeps on a CPU for the backward
pass, with S in its chunked form; the fused kernels of a GPU keep less.
"""

import argparse
import math
from collections.abc import Sequence

import torch

from cheems_lab import options
from cheems_lab.console import short, si, table
from cheems_ref.budget import (
    Flops,
    activation_bytes,
    cache_bytes,
    count_flops,
    count_parameters,
    step_bytes,
    training_memory,
)
from cheems_ref.config import LAYERS, ModelConfig


def add_options(commands) -> None:
    """Add the command to a parser."""
    add = options.add_command(commands, "budget", run, __doc__)
    options.add_model(add)
    size, default = options.at_least(1), "(default %(default)s)"
    add("--context", type=options.at_least(0), default=4096, help=f"tokens in the cache {default}")
    add("--seq-len", type=size, help="tokens per sequence of a step (default: --context)")
    add("--batch", type=size, default=1, help=f"sequences {default}")
    dtypes = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, default="bfloat16", help=f"of the model {default}")
    add("--processes", type=size, default=1, help="that share a step and its parameters")
    positive = options.at_least(1e-9, kind=float)
    add("--memory", type=positive, default=24, metavar="GB", help=f"available {default}")
    add("--flops", type=positive, help="operations per second of the machine")
    add("--bandwidth", type=positive, help="bytes per second of its memory")
    add("--plot", type=options.nonempty, metavar="FILE", help="draw memory against context")


def run(a: argparse.Namespace) -> int:
    """Print the tables."""
    dtype = getattr(torch, a.dtype)
    a.seq_len = max(1, a.context) if a.seq_len is None else a.seq_len
    config = options.model_config(a, vocab_size=None)
    print(f"{short(config.pattern)}, a vocabulary of {config.vocab_size:,}, {a.dtype}")
    _decoding(a, config, dtype)
    flops = count_flops(config, a.seq_len, batch=a.batch)
    kept = activation_bytes(config, a.seq_len, batch=a.batch, dtype=dtype)
    print(f"\na pass over {a.batch:,} × {a.seq_len:,} tokens:")
    head = ("part", "layers", "parameters", "active", "operations", "activations")
    print(table([head, *by_part(config, flops, kept)]))
    _training(a, config, flops, dtype)
    if a.plot is not None:
        _plot(a, config, dtype)
        print(f"drawn: {a.plot}")
    return 0


def by_part(
    config: ModelConfig, flops: dict[str, Flops], kept: dict[str, int]
) -> list[tuple[str, ...]]:
    """Return the rows of a table: parameters, operations and activations of a pass, by part.

    Args:
        config: of the model.
        flops, kept: of the pass, as `count_flops` and `activation_bytes` return them.
    """
    rows, sums = [], [0, 0, 0, 0]
    for part, count in count_parameters(config).items():
        layers = str(config.pattern.count(part)) if part in LAYERS else ""
        name = f"{part} {LAYERS[part].name}" if part in LAYERS else part
        work = flops[part].total() if part in flops else 0
        numbers = count.total, count.active, work, kept.get(part, 0)
        sums = [one + other for one, other in zip(sums, numbers, strict=True)]
        rows.append((name, layers, *_in_words(*numbers)))
    return [*rows, ("all", str(len(config.pattern)), *_in_words(*sums))]


def memory_by_context(
    config: ModelConfig, contexts: Sequence[int], batch: int, dtype: torch.dtype
) -> dict[str, list[float]]:
    """Compute the memory of decoding after so many tokens, in GB: "weights", "cache", "together".

    Args:
        config: of the model.
        contexts: tokens in the cache.
        batch: sequences.
        dtype: of the model.
    """
    weights = sum(part.total for part in count_parameters(config).values()) * dtype.itemsize / 1e9
    caches = [cache_bytes(config, n, batch=batch, dtype=dtype).total() / 1e9 for n in contexts]
    together = [weights + cache for cache in caches]
    return {"weights": [weights] * len(caches), "cache": caches, "together": together}


def _in_words(total, active, work, kept):
    return f"{total:,}", f"{active:,}", si(work), si(kept, "B")


def _decoding(a, config, dtype):
    weights = sum(part.total for part in count_parameters(config).values()) * dtype.itemsize
    cache = cache_bytes(config, a.context, batch=a.batch, dtype=dtype)
    print(f"\nto decode after {a.batch:,} × {a.context:,} tokens:")
    print(f"  weights           {si(weights, 'B'):>10}")
    print(f"  keys and values   {si(cache.keys_values, 'B'):>10}")
    print(f"  states, the rest  {si(cache.total() - cache.keys_values, 'B'):>10}")
    print(f"  together          {si(weights + cache.total(), 'B'):>10}", end=", ")
    print(_fits(weights + cache.total(), a.memory))
    flops = count_flops(config, 1, context=a.context, batch=a.batch)
    work = sum(part.total() for part in flops.values())
    moved = step_bytes(config, a.context, batch=a.batch, dtype=dtype)
    tokens = "a token" if a.batch == 1 else f"{a.batch:,} tokens, one in each sequence"
    print(f"  {tokens}: {si(work)} operations, {si(moved, 'B')} moved at least")
    times = {"operations": a.flops and work / a.flops, "bytes": a.bandwidth and moved / a.bandwidth}
    if times := {what: seconds for what, seconds in times.items() if seconds}:
        what = max(times, key=times.get)
        print(f"  at most {a.batch / times[what]:,.0f} tokens per second, by the {what}")


def _training(a, config, flops, dtype):
    rows = math.ceil(a.batch / a.processes)
    needed = training_memory(config, a.seq_len, batch=rows, dtype=dtype, processes=a.processes)
    work = sum(3 * part.total() + part.pairs // 2 for part in flops.values()) // a.processes
    each = f", each of {a.processes:,} processes" if a.processes > 1 else ""
    print(
        f"\nto train on {a.batch:,} × {a.seq_len:,} tokens per step, with AdamW in float32{each}:"
    )
    print(f"  parameters, gradients, moments  {si(needed.parameters, 'B'):>10}")
    print(f"  activations                     {si(needed.activations, 'B'):>10}, in {a.dtype}")
    print(f"  gradient of the logits          {si(needed.logits, 'B'):>10}")
    print(f"  together                        {si(needed.total(), 'B'):>10}", end=", ")
    print(_fits(needed.total(), a.memory))
    print(f"  a step: {si(work)} operations")
    if a.flops:
        print(f"  at most {a.batch * a.seq_len / (work / a.flops):,.0f} tokens per second")


def _fits(size, memory):
    return f"{'fits' if size <= memory * 1e9 else 'does not fit'} into {memory:g} GB"


def _plot(a, config, dtype):
    from cheems_ref import plotting

    contexts = [2**i for i in range(8, max(18, a.context.bit_length() + 1))]
    curves = memory_by_context(config, contexts, a.batch, dtype)
    fig, ax = plotting.figure(size=(7, 4.5))
    plotting.lines(ax, contexts, curves, xlabel="tokens read", ylabel="GB")
    plotting.level(ax, a.memory, "memory")
    ax.set(xscale="log", yscale="log")
    fig.savefig(a.plot)
