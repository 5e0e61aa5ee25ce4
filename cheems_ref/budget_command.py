"""What `python -m cheems_ref budget` says of a model that is not made."""

import dataclasses
from collections.abc import Sequence

import torch

from cheems_ref.arguments import BYTES, PATTERN
from cheems_ref.budget import (
    Flops,
    activation_bytes,
    cache_bytes,
    count_flops,
    count_parameters,
    step_bytes,
    training_bytes,
)
from cheems_ref.command_line import check_fields_are_used, guarded
from cheems_ref.config import LAYERS, ModelConfig, preset

SHOWN = 64  # letters of a pattern that are shown


def carry_out(parsed) -> int:
    """Say it, and return the status of the process."""
    return guarded(_budget, parsed)


def by_part(
    config: ModelConfig, flops: dict[str, Flops], kept: dict[str, int]
) -> list[tuple[str, ...]]:
    """Return the rows of a table: parameters, operations of a pass, bytes kept of it, by part.

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
    """Compute what writing on takes after so many tokens, in GB: "weights", "cache", "together".

    Args:
        config: of the model.
        contexts: tokens in the cache.
        batch: rows.
        dtype: of the model.
    """
    weights = sum(part.total for part in count_parameters(config).values()) * dtype.itemsize / 1e9
    caches = [cache_bytes(config, n, batch=batch, dtype=dtype).total() / 1e9 for n in contexts]
    together = [weights + cache for cache in caches]
    return {"weights": [weights] * len(caches), "cache": caches, "together": together}


def _in_words(total, active, work, kept):
    return f"{total:,}", f"{active:,}", _si(work), _si(kept, "B")


def _aligned(rows):
    """Names to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _budget(a):
    dtype = getattr(torch, a.dtype)
    config = preset(a.preset) if a.preset else ModelConfig(a.pattern or PATTERN, vocab_size=BYTES)
    config = dataclasses.replace(config, **a.set)
    check_fields_are_used(a.set, config)
    pattern = config.pattern
    shown = pattern if len(pattern) <= SHOWN else f"{pattern[: SHOWN - 3]}..."
    print(f"{shown}, a vocabulary of {config.vocab_size:,}, {a.dtype}")
    _writing(a, config, dtype)
    flops = count_flops(config, a.length, batch=a.batch)
    kept = activation_bytes(config, a.length, batch=a.batch, dtype=dtype)
    print(f"\na pass over {a.batch:,} × {a.length:,} tokens:")
    head = ("part", "layers", "parameters", "at work", "operations", "kept")
    print(*_aligned([head, *by_part(config, flops, kept)]), sep="\n")
    _training(a, config, flops, sum(kept.values()))
    if a.plot is not None:
        _plot(a, config, dtype)
        print(f"drawn: {a.plot}")
    return 0


def _writing(a, config, dtype):
    weights = sum(part.total for part in count_parameters(config).values()) * dtype.itemsize
    cache = cache_bytes(config, a.context, batch=a.batch, dtype=dtype)
    print(f"\nto write on after {a.batch:,} × {a.context:,} tokens:")
    print(f"  weights           {_si(weights, 'B'):>10}")
    print(f"  keys and values   {_si(cache.keys_values, 'B'):>10}")
    print(f"  states, the rest  {_si(cache.total() - cache.keys_values, 'B'):>10}")
    print(f"  together          {_si(weights + cache.total(), 'B'):>10}", end=", ")
    print(_fits(weights + cache.total(), a.memory))
    flops = count_flops(config, 1, context=a.context, batch=a.batch)
    work = sum(part.total() for part in flops.values())
    moved = step_bytes(config, a.context, batch=a.batch, dtype=dtype)
    tokens = "a token" if a.batch == 1 else f"{a.batch:,} tokens, one in each row"
    print(f"  {tokens}: {_si(work)} operations, {_si(moved, 'B')} moved at the least")
    times = {"operations": a.flops and work / a.flops, "bytes": a.bandwidth and moved / a.bandwidth}
    if times := {what: seconds for what, seconds in times.items() if seconds}:
        what = max(times, key=times.get)
        print(f"  at most {a.batch / times[what]:,.0f} tokens per second, by the {what}")


def _training(a, config, flops, kept):
    parameters, share = training_bytes(config, processes=a.processes), a.batch / a.processes
    logits = int(4 * share * a.length * config.vocab_size)
    kept = kept // a.processes
    work = sum(3 * part.total() + part.pairs // 2 for part in flops.values()) // a.processes
    each = f", each of {a.processes:,} processes" if a.processes > 1 else ""
    print(
        f"\nto train on {a.batch:,} × {a.length:,} tokens per update, with AdamW in float32{each}:"
    )
    print(f"  parameters, gradients, moments  {_si(parameters, 'B'):>10}")
    print(f"  kept for the backward pass      {_si(kept, 'B'):>10}, in {a.dtype}")
    print(f"  gradient of the logits          {_si(logits, 'B'):>10}")
    print(f"  together                        {_si(parameters + kept + logits, 'B'):>10}", end=", ")
    print(_fits(parameters + kept + logits, a.memory))
    print(f"  an update: {_si(work)} operations")
    if a.flops:
        print(f"  at most {a.batch * a.length / (work / a.flops):,.0f} tokens per second")


def _fits(size, memory):
    return f"{'fits' if size <= memory * 1e9 else 'does not fit'} into {memory:g} GB"


def _si(number, unit=""):
    """Three digits and a prefix: 1.30 GB, 34.6 T, 0 B."""
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    number = float(f"{number:.3g}")
    at = min(len(prefixes) - 1, (len(str(int(number))) - 1) // 3)
    digits = f"{number / 1000**at:.3g}" if at else f"{number:.0f}"
    return f"{digits} {prefixes[at]}{unit}".rstrip()


def _plot(a, config, dtype):
    from cheems_ref import plotting

    contexts = [2**i for i in range(8, max(18, a.context.bit_length() + 1))]
    curves = memory_by_context(config, contexts, a.batch, dtype)
    fig, ax = plotting.figure(size=(7, 4.5))
    plotting.lines(ax, contexts, curves, xlabel="tokens read", ylabel="GB")
    plotting.level(ax, a.memory, "memory")
    ax.set(xscale="log", yscale="log")
    fig.savefig(a.plot)
