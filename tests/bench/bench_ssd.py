"""Measure ssd_chunked against its peers and print the figures with the targets beside them.

    python tests/bench/bench_ssd.py [--lengths L ...] [--repeats N] [--parts NAME ...]
                                    [--quick] [--json FILE]

All contestants get the same x, dt, A, B, C and return y; what one of them needs besides (x dt,
A dt, B and C per head) is made within its time. They run one after the other in every turn, in
rotating order, so that whatever else the machine does falls on all of them alike; each runs twice
in its turn, and the second run is timed. The peers are mamba-ssm's `ssd_minimal_discrete`, called
in two ways, and the torch path of transformers' Mamba2. A run only reports: a missed target does
not change the exit status.
"""

import argparse
import importlib.util
import inspect
import json
import math
import os
import shlex
import sys
import types
import warnings
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import linear_regression, median

# Triton and mamba-ssm read the first two while they are imported (torch's flop counter imports
# triton, too); no kernel runs here, so none is compiled or tuned. The last quiets the profiler.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("MAMBA_DETERMINISTIC", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from timing import (
    THREADS,
    describe_machine,
    paired_ratio,
    peak_bytes,
    print_row,
    relative_error,
    time_in_turns,
)
from torch.utils.flop_counter import FlopCounterMode

from cheems_ref.ssd import ssd_chunked, ssd_recurrent

SEED, CHUNK = 0, 64
BATCH, HEADS, WIDTH, GROUPS, STATE = 1, 8, 64, 1, 64
FORWARD, BOTH = PASSES = ("forward", "forward+backward")
OURS, MINIMAL, MAMBA2 = "ssd_chunked", "ssd_minimal_discrete", "transformers Mamba2"
PER_HEAD = MINIMAL + " per head"
LARGE, SMALL = "one 1024 x 1024", "128 of 64 x 64"  # the latter: 16 chunks of 8 heads

# The targets. How many times faster than ssd_minimal_discrete, at the least:
SPEEDUP = {(FORWARD, 4096): 1.8, (FORWARD, 16384): 3, (BOTH, 4096): 1.7, (BOTH, 16384): 2.5}
SPEEDUP_MAMBA2, MAMBA2_FROM = 4, 4096
MEMORY, MEMORY_LENGTH = 0.5, 16384  # of ssd_minimal_discrete's peak, at the most
EXPONENT, GROWTH_LENGTHS = 1.08, [2048 * 2**i for i in range(6)]
MATMUL_SHARE, SHARE_FROM = 0.25, 4096
COMPILED_SHARE, COMPILED_LENGTH = 0.6, 4096  # of the forward pass, with torch.compile
ERROR = 1e-5
PARTS = ("agreement", "speed", "compiled", "memory", "growth")


def load_minimal():
    """Import ssd_minimal_discrete past mamba_ssm/__init__.py, which needs a CUDA extension."""
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise ModuleNotFoundError(name="mamba_ssm")
    parent = types.ModuleType("mamba_ssm")
    parent.__path__ = list(spec.submodule_search_locations)
    sys.modules["mamba_ssm"] = parent
    try:
        with warnings.catch_warnings(action="ignore"):
            from mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete
    finally:
        del sys.modules["mamba_ssm"]  # nobody else is to take the empty parent for the package

    # Its own test hands it the B and C of one group, which its einsums broadcast.
    def one_group(x, dt, A, B, C):
        return ssd_minimal_discrete(x * dt[..., None], A * dt, B, C, CHUNK)[0]

    # Its docstring asks for B and C (b, l, h, n).
    def per_head(x, dt, A, B, C):
        B, C = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (B, C))
        return one_group(x, dt, A, B, C)

    return {MINIMAL: one_group, PER_HEAD: per_head}


def load_mamba2():
    """Take the torch function behind a decorator that would prefer mamba-ssm's GPU kernel."""
    from transformers.models.mamba2 import modeling_mamba2

    torch_path = inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)
    if torch_path.__code__.co_filename != modeling_mamba2.__file__:
        raise RuntimeError("transformers' mamba2_chunk_scan does not wrap its torch path any more")
    chunk_size = modeling_mamba2.Mamba2Config().chunk_size
    return {MAMBA2: partial(torch_path, chunk_size=chunk_size)}


def load_contestants():
    """Return the functions y = f(x, dt, A, B, C), ours first, and the packages others lack."""
    contestants, missing = {OURS: partial(ssd_chunked, chunk_size=CHUNK)}, {}
    for name, load in ((MINIMAL, load_minimal), (MAMBA2, load_mamba2)):
        try:
            contestants |= load()
        except ModuleNotFoundError as error:
            missing[name] = error.name.partition(".")[0].replace("_", "-")
    return contestants, missing


def make_inputs(length):
    """Draw x, dt, A, B, C, and the gradient that comes back to y."""
    torch.manual_seed(SEED)
    x, dy = torch.randn(2, BATCH, length, HEADS, WIDTH).unbind()
    dt = F.softplus(torch.randn(BATCH, length, HEADS) - 3)
    B, C = torch.randn(2, BATCH, length, GROUPS, STATE).unbind()
    return [t.requires_grad_() for t in (x, dt, -torch.linspace(1, 16, HEADS), B, C)], dy


def make_task(function, length, kind):
    """Return a call without arguments: the forward pass, or that and all five gradients."""
    inputs, dy = make_inputs(length)
    if kind == FORWARD:
        return torch.no_grad()(lambda: function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, dy)


def make_matmuls():
    """Return calls that do nothing but multiply matrices, several ms each."""
    a, b, out = torch.randn(3, 1024, 1024).unbind()
    c, d, outs = torch.randn(3, 128, 64, 64).unbind()
    return {
        LARGE: lambda: [torch.mm(a, b, out=out) for _ in range(4)],
        SMALL: lambda: [torch.bmm(c, d, out=outs) for _ in range(64)],
    }


def count_flops(call):
    """Return the floating-point operations of the matrix products in a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def print_missing(missing):
    for name, package in missing.items():
        print(f"  {name:30}not measured: {package} is not installed (make bench installs it)")


def report_agreement(contestants, missing, length):
    print(f"\nLargest error over largest value, against the float64 recurrence, l = {length}.")
    print_row("", "y   gradients", target="target")
    inputs, dy = make_inputs(length)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    y_exact = ssd_recurrent(*exact)
    truth = torch.autograd.grad(y_exact, exact, dy.double())
    results = {}
    for name, function in contestants.items():
        y = function(*inputs)
        gradients = torch.autograd.grad(y, inputs, dy)
        errors = relative_error(y, y_exact), max(map(relative_error, gradients, truth))
        print_row(name, "{:.1e}{:12.1e}".format(*errors), max(errors) <= ERROR, f"<= {ERROR:g}")
        results[name] = errors
    print_missing(missing)
    return {"length": length, "y, gradients": results}


def report_speed(contestants, missing, lengths, repeats):
    """Time everyone in turns; report ratios to ours, then our share of the matmul rate."""
    print(f"\nTime, median of {repeats} turns. How much faster ours is: the ratio of the medians,")
    print("and the median of the ratios within a turn (paired), which is what the target is for.")
    print_row("                       l", "ms   ratio  paired", target="target")
    times, shares, matmuls = [], [], make_matmuls()
    for kind in PASSES:
        for length in lengths:
            tasks = {name: make_task(f, length, kind) for name, f in contestants.items()}
            flops = count_flops(tasks[OURS])
            seconds = time_in_turns(tasks | matmuls, repeats, f"{kind}, l = {length}")
            times.append({"pass": kind, "length": length, "seconds": seconds})
            ours = seconds[OURS]
            for name in contestants:
                what, its = f"{kind:16}{length:8}  {name}", seconds[name]
                if name == OURS:
                    print_row(what, f"{1e3 * median(its):.1f}" + " " * 16, target="")
                    continue
                ratio, paired = median(its) / median(ours), paired_ratio(its, ours)
                target = SPEEDUP.get((kind, length))
                if name == MAMBA2:
                    target = SPEEDUP_MAMBA2 if length >= MAMBA2_FROM else None
                met, words = (paired >= target, f">= {target}x") if target else (None, "none")
                print_row(what, f"{1e3 * median(its):.1f}{ratio:7.2f}x{paired:7.2f}x", met, words)
            for name, matmul in matmuls.items():
                work = count_flops(matmul)
                share = paired_ratio(seconds[name], ours) * flops / work
                rates = flops / median(ours) / 1e9, work / median(seconds[name]) / 1e9
                shares.append((kind, length, name, *rates, share))
    print_missing(missing)

    print("\nGFLOP/s of ours (its matrix products, by torch's flop counter, over all its time)")
    print("and of matrix products alone, timed in the same turns; the ratio is paired.")
    print_row("                       l", "ours products  ratio", target="target")
    for kind, length, name, rate, pure, share in shares:
        met, words = None, "none"
        if name == LARGE and length >= SHARE_FROM:
            met, words = share >= MATMUL_SHARE, f">= {MATMUL_SHARE:.0%}"
        print_row(f"{kind:16}{length:8}  {name}", f"{rate:.1f}{pure:9.1f}{share:7.1%}", met, words)
    return {"times": times, "matmul": shares}


def report_compiled(length, repeats):
    """Compare the graph that torch.compile makes of ssd_chunked with ssd_chunked itself."""
    print(f"\nForward with torch.compile, l = {length} (compiling it takes a minute or two).")
    print_row("", "ms of matmul rate", target="target")
    ours = partial(ssd_chunked, chunk_size=CHUNK)
    functions = {OURS: ours, "compiled": torch.compile(ours, fullgraph=True)}
    tasks = {name: make_task(f, length, FORWARD) for name, f in functions.items()}
    (large, matmul), *_ = make_matmuls().items()
    flops = count_flops(tasks[OURS]), count_flops(matmul)
    seconds = time_in_turns(tasks | {large: matmul}, repeats, "compiled")
    shares = {}
    for name in functions:
        shares[name] = paired_ratio(seconds[large], seconds[name]) * flops[0] / flops[1]
        met, words = None, "none"
        if name == "compiled" and length == COMPILED_LENGTH:
            met, words = shares[name] >= COMPILED_SHARE, f">= {COMPILED_SHARE:.0%}"
        print_row(name, f"{1e3 * median(seconds[name]):.1f}{shares[name]:11.1%}", met, words)
    return {"length": length, "seconds": seconds, "shares": shares}


def report_memory(contestants, missing, length):
    print(f"\nPeak memory of {BOTH}, l = {length}: live tensors, without the inputs.")
    print_row("", "MiB     ours / it", target="target")
    peaks = {}
    for name, function in contestants.items():
        peaks[name] = peak_bytes(make_task(function, length, BOTH))
        figures, ratio = f"{peaks[name] / 2**20:.0f}", peaks[OURS] / peaks[name]
        if name == OURS:
            print_row(name, figures + " " * 14, target="")
        elif name == MAMBA2 or length != MEMORY_LENGTH:
            print_row(name, f"{figures}{ratio:13.2f}x")
        else:
            print_row(name, f"{figures}{ratio:13.2f}x", ratio <= MEMORY, f"<= {MEMORY}x")
    print_missing(missing)
    return {"length": length, "peak bytes": peaks}


def report_growth(lengths, repeats):
    """Fit figure ~ l ** exponent by least squares of the logarithms."""
    print(f"\nGrowth of ours with the length, from {lengths[0]} to {lengths[-1]} tokens.")
    print_row("", "first     last exponent", target="target")
    figures = {}
    for kind in PASSES:
        tasks = {length: make_task(ssd_chunked, length, kind) for length in lengths}
        seconds = time_in_turns(tasks, repeats, f"growth, {kind}")
        figures[f"ms, {kind}"] = [1e3 * median(seconds[length]) for length in lengths]
    figures[f"peak MiB, {BOTH}"] = [peak_bytes(call) / 2**20 for call in tasks.values()]
    for name, values in figures.items():
        logs = [[math.log(v) for v in axis] for axis in (lengths, values)]
        slope = linear_regression(*logs).slope
        met, words = None, "none"
        if lengths == GROWTH_LENGTHS:
            met, words = slope <= EXPONENT, f"<= {EXPONENT}"
        print_row(name, f"{values[0]:.1f}{values[-1]:9.1f}{slope:9.3f}", met, words)
    return {"lengths": lengths, "figures": figures}


def main():
    parser = argparse.ArgumentParser(description="Measure ssd_chunked against its peers.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=7, help="turns per measurement")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a record there")
    options = parser.parse_args()
    if options.repeats < 1 or any(n < CHUNK or n % CHUNK for n in options.lengths):
        parser.error(f"lengths must be multiples of {CHUNK}, and repeats at least 1")
    lengths, repeats, memory, growth, compiled = (
        ([1024], 2, 2048, GROWTH_LENGTHS[:2], 256)
        if options.quick
        else (options.lengths, options.repeats, MEMORY_LENGTH, GROWTH_LENGTHS, COMPILED_LENGTH)
    )

    torch.set_num_threads(THREADS)
    machine, date = describe_machine(), datetime.now(UTC).isoformat(timespec="seconds")
    setting = f"b={BATCH} h={HEADS} p={WIDTH} g={GROUPS} n={STATE}, float32, chunk {CHUNK}"
    print(f"ssd_chunked, {setting}, {THREADS} threads, {date}")
    print(f"{machine['cpu']}, {machine['cores']} cores, load before {machine['load before']:.1f}")
    print(", ".join(f"{name} {number}" for name, number in machine["versions"].items()))
    contestants, missing = load_contestants()
    reports = {
        "agreement": partial(report_agreement, contestants, missing, 512),
        "speed": partial(report_speed, contestants, missing, lengths, repeats),
        "compiled": partial(report_compiled, compiled, repeats),
        "memory": partial(report_memory, contestants, missing, memory),
        "growth": partial(report_growth, growth, repeats),
    }
    results = {part: reports[part]() for part in options.parts}
    if options.json:
        command = shlex.join(["python", "tests/bench/bench_ssd.py", *sys.argv[1:]])
        record = {"command": command, "date": date, "machine": machine, "setting": setting}
        record |= {"threads": THREADS, "seed": SEED, "missing": missing, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
