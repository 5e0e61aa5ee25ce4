"""Compute what a model needs: parameters, operations, memory, and the speed a machine allows.

The model is not made. Tables are by letter, memory is for decoding and for
training, and the speed is an upper bound.

examples:
  cheems budget --preset cheems-1.3b --context 131072
  cheems budget --preset jamba-1.3b --batch 8 --flops 9.9e14 --bandwidth 3.35e12
  cheems budget --pattern "SM x 3 + AM" --set d_model=512
  cheems budget --preset cheems-1.3b --seq-len 2048 --batch 64 --processes 8

Operations are products that are summed. Activations are what torch keeps on a CPU for the backward
pass, with S in its chunked form; the fused kernels of a GPU keep less.
"""

import argparse
import math

import torch

from cheems_lab import options
from cheems_lab.console import si, table
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


def run(a: argparse.Namespace) -> int:
    """Print the tables."""
    dtype = getattr(torch, a.dtype)
    a.seq_len = max(1, a.context) if a.seq_len is None else a.seq_len
    config = options.model_config(a, vocab_size=None)
    print(f"{config.pattern}, a vocabulary of {config.vocab_size:,}, {a.dtype}")
    _decoding(a, config, dtype)
    flops = count_flops(config, a.seq_len, batch=a.batch)
    kept = activation_bytes(config, a.seq_len, batch=a.batch, dtype=dtype)
    print(f"\na pass over {a.batch:,} × {a.seq_len:,} tokens:")
    head = ("part", "layers", "parameters", "active", "operations", "activations")
    print(table([head, *by_part(config, flops, kept)]))
    _training(a, config, flops, dtype)
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


def _in_words(total, active, work, kept):
    return f"{total:,}", f"{active:,}", si(work), si(kept, "B")


def _decoding(a, config, dtype):
    weights = sum(part.total for part in count_parameters(config).values()) * dtype.itemsize
    cache = cache_bytes(config, a.context, batch=a.batch, dtype=dtype)
    print(f"\nto decode after {a.batch:,} × {a.context:,} tokens:")
    parts = [("weights", weights), ("keys and values", cache.keys_values)]
    _print_sum([*parts, ("states, the rest", cache.total() - cache.keys_values)], a.memory)
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
    tokens = f"{a.batch:,} × {a.seq_len:,} tokens per step"
    print(f"\nto train on {tokens}, with AdamW in float32{each}:")
    parts = [("parameters, gradients, moments", needed.parameters)]
    parts += [(f"activations, in {a.dtype}", needed.activations)]
    _print_sum([*parts, ("gradient of the logits", needed.logits)], a.memory)
    print(f"  a step: {si(work)} operations")
    if a.flops:
        print(f"  at most {a.batch * a.seq_len / (work / a.flops):,.0f} tokens per second")


def _print_sum(parts, memory):
    """Print the parts of a memory, in bytes, their sum, and whether it fits."""
    size = sum(part for _, part in parts)
    fits = "fits" if size <= memory * 1e9 else "does not fit"
    for name, part in parts:
        print(f"  {name:<30}{si(part, 'B'):>10}")
    print(f"  {'together':<30}{si(size, 'B'):>10}, {fits} into {memory:g} GB")
