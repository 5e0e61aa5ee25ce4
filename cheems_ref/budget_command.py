"""What `python -m cheems_ref budget` says of a model that is not made."""

import dataclasses

import torch

from cheems_ref.arguments import BYTES, PATTERN
from cheems_ref.budget import (
    activation_bytes,
    cache_bytes,
    count_flops,
    count_parameters,
    step_bytes,
    training_bytes,
)
from cheems_ref.command_line import guarded
from cheems_ref.config import LAYERS, ModelConfig, preset

SHOWN = 64  # letters of a pattern that are shown


def carry_out(parsed) -> int:
    """Say it, and return the status of the process."""
    return guarded(_budget, parsed)


def by_part(config: ModelConfig, length: int, batch: int, dtype: torch.dtype) -> list[str]:
    """Return the lines of a table: parameters, operations of a pass, bytes kept, by part.

    Args:
        config: of the model.
        length, batch: tokens of a row, and rows, of the pass.
        dtype: of the model.
    """
    counts = count_parameters(config)
    flops = count_flops(config, length, batch=batch)
    kept = activation_bytes(config, length, batch=batch, dtype=dtype)
    head = ("part", "layers", "parameters", "at work", "forward pass", "kept of it")
    lines, sums = [head], [0, 0, 0, 0]
    for part, count in counts.items():
        name = f"{part} {LAYERS[part].name}" if part in LAYERS else part
        numbers = (count.total, count.active, flops[part].total() if part in flops else 0)
        numbers += (kept.get(part, 0),)
        sums = [one + other for one, other in zip(sums, numbers, strict=True)]
        lines.append((name, str(config.pattern.count(part) if part in LAYERS else ""), *numbers))
    lines.append(("all", str(len(config.pattern)), *sums))
    return _aligned([line if line is head else _in_words(line) for line in lines])


def _in_words(line):
    name, layers, total, active, flops, kept = line
    return name, layers, f"{total:,}", f"{active:,}", f"{flops / 1e9:,.1f} G", _gigabytes(kept)


def _aligned(lines):
    """Names to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def _budget(a):
    dtype = getattr(torch, a.dtype)
    config = preset(a.preset) if a.preset else ModelConfig(a.pattern or PATTERN, vocab_size=BYTES)
    config = dataclasses.replace(config, **a.set)
    pattern = config.pattern
    shown = pattern if len(pattern) <= SHOWN else f"{pattern[: SHOWN - 3]}..."
    print(f"{shown}, a vocabulary of {config.vocab_size:,}, {a.dtype}")
    print(f"a pass over {_times(a.batch, a.length)} tokens:")
    print(*by_part(config, a.length, a.batch, dtype), sep="\n")
    _writing(a, config, dtype)
    _training(a, config, dtype)
    if a.plot is not None:
        _plot(a, config, dtype)
        print(f"drawn: {a.plot}")
    return 0


def _writing(a, config, dtype):
    weights = sum(part.total for part in count_parameters(config).values()) * dtype.itemsize
    cache = cache_bytes(config, a.context, batch=a.batch, dtype=dtype)
    print(f"\nto write on after {_times(a.batch, a.context)} tokens:")
    print(f"  weights           {_gigabytes(weights):>10}")
    print(f"  keys and values   {_gigabytes(cache.keys_values):>10}")
    print(f"  states, the rest  {_gigabytes(cache.total() - cache.keys_values):>10}")
    print(f"  together          {_gigabytes(weights + cache.total()):>10}", end=", ")
    print(_fits(weights + cache.total(), a.memory))
    flops = count_flops(config, 1, context=a.context, batch=a.batch)
    work = sum(part.total() for part in flops.values())
    moved = step_bytes(config, a.context, batch=a.batch, dtype=dtype)
    print(f"  a token of each row: {work / 1e9:,.2f} G operations, {_gigabytes(moved)} moved")
    times = {"operations": a.flops and work / a.flops, "bytes": a.bandwidth and moved / a.bandwidth}
    if times := {what: seconds for what, seconds in times.items() if seconds}:
        what = max(times, key=times.get)
        print(f"  at most {a.batch / times[what]:,.0f} tokens per second, by the {what}")


def _training(a, config, dtype):
    states = training_bytes(config)
    kept = sum(activation_bytes(config, a.length, batch=a.batch, dtype=dtype).values())
    work = 3 * sum(part.total() for part in count_flops(config, a.length, batch=a.batch).values())
    print(f"\nto train on {_times(a.batch, a.length)} tokens per update, with AdamW in float32:")
    print(f"  parameters, gradients, moments  {_gigabytes(states):>10}")
    print(f"  kept for the backward pass      {_gigabytes(kept):>10}")
    print(f"  together                        {_gigabytes(states + kept):>10}", end=", ")
    print(_fits(states + kept, a.memory))
    print(f"  an update: {work / 1e12:,.2f} T operations")
    if a.flops:
        print(f"  at most {a.batch * a.length / (work / a.flops):,.0f} tokens per second")


def _fits(size, memory):
    return f"{'fits' if size <= memory * 1e9 else 'does not fit'} into {memory:g} GB"


def _times(batch, length):
    return f"{batch:,} × {length:,}"


def _gigabytes(size):
    return f"{size / 1e9:,.3f} GB"


def _plot(a, config, dtype):
    """Memory to write on, against the context, beside what there is."""
    from cheems_ref import plotting

    weights = sum(part.total for part in count_parameters(config).values()) * dtype.itemsize
    contexts = [2**i for i in range(8, max(18, a.context.bit_length() + 1))]
    caches = [cache_bytes(config, n, batch=a.batch, dtype=dtype).total() for n in contexts]
    fig, ax = plotting.figure(size=(7, 4.5))
    curves = {
        "weights": [weights / 1e9] * len(contexts),
        "cache": [size / 1e9 for size in caches],
        "together": [(weights + size) / 1e9 for size in caches],
    }
    plotting.lines(ax, contexts, curves, xlabel="tokens read", ylabel="GB")
    plotting.level(ax, a.memory, "memory")
    ax.set(xscale="log", yscale="log")
    fig.savefig(a.plot)
