"""The command `budget`: parameters, operations, memory and speed, without making the model."""

import argparse
import dataclasses
import json
import math
from typing import NamedTuple

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


class Passes(NamedTuple):
    """What a pass over the sequences of a step takes, by part, and a token after the context."""

    flops: dict[str, Flops]
    kept: dict[str, int]
    token: dict[str, Flops]


def run(a: argparse.Namespace) -> int:
    """Print the tables, or the same numbers as JSON."""
    dtype = getattr(torch, a.dtype)
    a.seq_len = max(1, a.context) if a.seq_len is None else a.seq_len
    config = options.model_config(a, vocab_size=None)
    passes = Passes(
        flops=count_flops(config, a.seq_len, batch=a.batch),
        kept=activation_bytes(config, a.seq_len, batch=a.batch, dtype=dtype),
        token=count_flops(config, 1, context=a.context, batch=a.batch),
    )
    decoding = _decoding(a, config, dtype, passes)
    training = _training(a, config, dtype, passes)
    if a.json:
        print(json.dumps(_as_json(a, config, passes, decoding, training), indent=1))
        return 0
    print(f"{config.pattern}, a vocabulary of {config.vocab_size:,}, {a.dtype}")
    _print_decoding(a, decoding)
    print(f"\na pass over {a.batch:,} × {a.seq_len:,} tokens:")
    head = ("part", "layers", "parameters", "active", "operations", "activations")
    print(table([head, *by_part(config, passes.flops, passes.kept)]))
    _print_training(a, training)
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


def _decoding(a, config, dtype, passes):
    """Memory in bytes, operations and traffic of one step, and the speed that a machine allows."""
    cache = cache_bytes(config, a.context, batch=a.batch, dtype=dtype)
    weights = sum(part.total for part in count_parameters(config).values()) * dtype.itemsize
    work = sum(part.total() for part in passes.token.values())
    moved = step_bytes(config, a.context, batch=a.batch, dtype=dtype)
    times = {"operations": a.flops and work / a.flops, "bytes": a.bandwidth and moved / a.bandwidth}
    times = {what: seconds for what, seconds in times.items() if seconds}
    limit = max(times, key=times.get) if times else None
    return {
        "weights": weights,
        "keys_values": cache.keys_values,
        "states": cache.total() - cache.keys_values,
        "operations": work,
        "moved": moved,
        "tokens_per_second": a.batch / times[limit] if limit else None,
        "limited_by": limit,
    }


def _training(a, config, dtype, passes):
    """Memory of a process in bytes, operations of a step, and the speed that a machine allows."""
    rows = math.ceil(a.batch / a.processes)
    needed = training_memory(config, a.seq_len, batch=rows, dtype=dtype, processes=a.processes)
    work = sum(3 * part.total() + part.pairs // 2 for part in passes.flops.values()) // a.processes
    return {
        "parameters": needed.parameters,
        "activations": needed.activations,
        "logits": needed.logits,
        "operations": work,
        "tokens_per_second": a.batch * a.seq_len / (work / a.flops) if a.flops else None,
    }


def _as_json(a, config, passes, decoding, training):
    counts = count_parameters(config)
    parts = {
        part: {
            "layers": config.pattern.count(part) if part in LAYERS else None,
            "parameters": count.total,
            "active": count.active,
            "operations": passes.flops[part].total() if part in passes.flops else 0,
            "activations": passes.kept.get(part, 0),
        }
        for part, count in counts.items()
    }
    given = ("context", "seq_len", "batch", "dtype", "processes", "memory", "flops", "bandwidth")
    return {
        "model": dataclasses.asdict(config),
        "options": {name: getattr(a, name) for name in given},
        "parts": parts,
        "decoding": decoding,
        "training": training,
    }


def _print_decoding(a, found):
    print(f"\nto decode after {a.batch:,} × {a.context:,} tokens:")
    parts = [("weights", found["weights"]), ("keys and values", found["keys_values"])]
    _print_sum([*parts, ("states, the rest", found["states"])], a.memory)
    tokens = "a token" if a.batch == 1 else f"{a.batch:,} tokens, one in each sequence"
    work, moved = si(found["operations"]), si(found["moved"], "B")
    print(f"  {tokens}: {work} operations, {moved} moved at least")
    if found["limited_by"]:
        speed = f"{found['tokens_per_second']:,.0f}"
        print(f"  at most {speed} tokens per second, by the {found['limited_by']}")


def _print_training(a, found):
    each = f", each of {a.processes:,} processes" if a.processes > 1 else ""
    tokens = f"{a.batch:,} × {a.seq_len:,} tokens per step"
    print(f"\nto train on {tokens}, with AdamW in float32{each}:")
    parts = [("parameters, gradients, moments", found["parameters"])]
    parts += [(f"activations, in {a.dtype}", found["activations"])]
    _print_sum([*parts, ("gradient of the logits", found["logits"])], a.memory)
    print(f"  a step: {si(found['operations'])} operations")
    if found["tokens_per_second"]:
        print(f"  at most {found['tokens_per_second']:,.0f} tokens per second")


def _print_sum(parts, memory):
    """Print the parts of a memory, in bytes, their sum, and whether it fits."""
    size = sum(part for _, part in parts)
    fits = "fits" if size <= memory * 1e9 else "does not fit"
    for name, part in parts:
        print(f"  {name:<30}{si(part, 'B'):>10}")
    print(f"  {'together':<30}{si(size, 'B'):>10}, {fits} into {memory:g} GB")
