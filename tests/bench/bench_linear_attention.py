"""Measure how the rules of linear attention grow with the length, and time them against fla's.

    python tests/bench/bench_linear_attention.py [--repeats N] [--parts NAME ...]
                                                 [--quick] [--json FILE]

The gated rule, the delta rule and the gated delta rule in chunks of 64, forward and backward.
Their exponent is fitted to time against length, from 1,024 to 16,384 tokens. The peers are
flash-linear-attention's plain PyTorch references in chunks of the same size (`fla.ops.*.naive`),
up to 4,096 tokens, for the backward pass of their loops over chunks is quadratic. All get the same
tensors and run in turns (see timing.py); a ratio is the median of the ratios within a turn. A
run only reports: a missed target does not change the exit status.
"""

import argparse
import importlib
import json
import math
import shlex
import sys
import warnings
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import linear_regression, median

import torch
import torch.nn.functional as F
from timing import (
    THREADS,
    describe_machine,
    note_target,
    paired_ratio,
    print_row,
    relative_error,
    time_in_turns,
)

from cheems_ref.linear_attention import delta_rule, gated_delta_rule, gated_linear_attention

SEED, CHUNK = 0, 64
BATCH, HEADS, WIDTH, STATE = 1, 8, 64, 64
SCALE = STATE**-0.5  # what fla's delta rule always takes
LENGTHS, PEER_LENGTHS = [1024, 2048, 4096, 8192, 16384], [1024, 2048, 4096]
EXPONENT, ERROR = 1.1, 1e-5  # the targets
PARTS = ("agreement", "growth", "peers")

GATED, DELTA, GATED_DELTA = RULES = ("gated rule", "delta rule", "gated delta rule")
OURS, FLA = "in chunks", "fla's naive"


def ours(rule, q, k, v, g, beta, chunk_size=CHUNK):
    options = dict(chunk_size=chunk_size, scale=SCALE)
    if rule == GATED:
        return gated_linear_attention(q, k, v, g, **options)
    if rule == DELTA:
        return delta_rule(q, k, v, beta, **options)
    return gated_delta_rule(q, k, v, g, beta, **options)


def load_peers():
    """Return fla's references as o = f(q, k, v, g, beta), one per rule, or none without fla."""

    def gated(q, k, v, g, beta):
        naive = fla("simple_gla").naive_chunk_simple_gla
        return naive(q, k, v, g, chunk_size=CHUNK, scale=SCALE)[0]

    def delta(q, k, v, g, beta):
        heads_first = (t.transpose(1, 2) for t in (q, k, v, beta))
        return fla("delta_rule").delta_rule_chunkwise(*heads_first, CHUNK)[0].transpose(1, 2)

    def gated_delta(q, k, v, g, beta):
        naive = fla("gated_delta_rule").naive_chunk_gated_delta_rule
        return naive(q, k, v, g, beta, chunk_size=CHUNK, scale=SCALE)[0]

    def fla(rule):
        return importlib.import_module(f"fla.ops.{rule}.naive")

    try:
        with warnings.catch_warnings(action="ignore"):
            fla("gated_delta_rule")
    except ModuleNotFoundError:
        return {}
    return {GATED: gated, DELTA: delta, GATED_DELTA: gated_delta}


def make_inputs(rule, length):
    """Draw q, unit k, v, g, beta, and the gradient that comes back to o."""
    torch.manual_seed(SEED)
    q, k = torch.randn(2, BATCH, length, HEADS, STATE).unbind()
    v, do = torch.randn(2, BATCH, length, HEADS, WIDTH).unbind()
    g, beta = torch.randn(2, BATCH, length, HEADS).unbind()
    given = q, F.normalize(k, dim=-1), v, F.logsigmoid(g + 3), beta.sigmoid()
    return [t.detach().requires_grad_() for t in given], do


def make_task(rule, function, length):
    """Return a call without arguments: forward, and back to all inputs that the rule takes."""
    inputs, do = make_inputs(rule, length)
    q, k, v, g, beta = inputs
    leaves = [q, k, v] + [g] * (rule != DELTA) + [beta] * (rule != GATED)
    return lambda: torch.autograd.grad(function(*inputs), leaves, do)


def report_agreement(peers, length):
    """Compare o and all gradients with those of the definition in float64."""
    print(f"\nLargest error over largest value, against the rule token by token, l = {length}.")
    print_row("", "o   gradients", target="target")
    results = {}
    for rule in RULES:
        inputs, do = make_inputs(rule, length)
        exact, exact_do = [t.detach().double().requires_grad_() for t in inputs], do.double()
        forms = {OURS: partial(ours, rule)} | ({FLA: peers[rule]} if peers else {})
        definition = partial(ours, rule, chunk_size=None)

        def derive(function, inputs, do):
            o = function(*inputs)
            gradients = torch.autograd.grad(o, inputs, do, allow_unused=True)
            return o, [gradient for gradient in gradients if gradient is not None]

        truth_o, truth = derive(definition, exact, exact_do)
        for name, function in forms.items():
            o, gradients = derive(function, inputs, do)
            errors = relative_error(o, truth_o), max(map(relative_error, gradients, truth))
            figures = "{:.1e}{:12.1e}".format(*errors)
            met, words = (max(errors) <= ERROR, f"<= {ERROR:g}") if name == OURS else (None, "none")
            print_row(f"{rule:18}{name}", figures, met, words)
            results[f"{rule}, {name}"] = errors
    return {"length": length, "o, gradients": results}


def report_peers(peers, lengths, repeats):
    print(f"\nForward + backward, median of {repeats} turns; how much faster ours is (paired).")
    print_row("                        l", "ms   paired", target="target")
    if not peers:
        print(f"  {FLA:28}not measured: fla-core is not installed (make test installs it)")
        return []
    times = []
    for rule in RULES:
        for length in lengths:
            tasks = {
                OURS: make_task(rule, partial(ours, rule), length),
                FLA: make_task(rule, peers[rule], length),
            }
            seconds = time_in_turns(tasks, repeats, f"{rule}, l = {length}")
            times.append({"rule": rule, "length": length, "seconds": seconds})
            what = f"{rule:18}{length:7}  "
            print_row(what + OURS, f"{1e3 * median(seconds[OURS]):.1f}" + " " * 9, target="")
            faster = paired_ratio(seconds[FLA], seconds[OURS])
            print_row(what + FLA, f"{1e3 * median(seconds[FLA]):.1f}{faster:8.2f}x")
    return times


def report_growth(lengths, repeats):
    """Fit time ~ l ** exponent by least squares of the logarithms."""
    print(f"\nForward + backward in chunks, median of {repeats} turns, ms by length, and exponent.")
    print(f"  {'':18}" + "".join(f"{length:>9,}" for length in lengths) + "  exponent  target")
    figures = {}
    for rule in RULES:
        tasks = {length: make_task(rule, partial(ours, rule), length) for length in lengths}
        seconds = time_in_turns(tasks, repeats, f"growth, {rule}")
        times = [median(seconds[length]) for length in lengths]
        logs = [[math.log(value) for value in axis] for axis in (lengths, times)]
        slope = linear_regression(*logs).slope
        met = slope <= EXPONENT if lengths == LENGTHS else None
        target = note_target(f"{rule}, growth", f"{slope:.3f}", met, f"<= {EXPONENT}")
        cells = "".join(f"{1e3 * time:9.1f}" for time in times)
        print(f"  {rule:18}{cells}{slope:10.3f}  {target}")
        figures[rule] = {"seconds": times, "exponent": slope}
    return {"lengths": lengths, "rules": figures}


def main():
    parser = argparse.ArgumentParser(description="Measure the rules of linear attention.")
    parser.add_argument("--repeats", type=int, default=7, help="turns per measurement")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a record there")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("repeats must be at least 1")
    lengths, peer_lengths, repeats = (
        (LENGTHS[:2], PEER_LENGTHS[:1], 2)
        if options.quick
        else (LENGTHS, PEER_LENGTHS, options.repeats)
    )

    torch.set_num_threads(THREADS)
    machine, date = describe_machine(), datetime.now(UTC).isoformat(timespec="seconds")
    try:
        machine["versions"]["fla-core"] = version("fla-core")
    except PackageNotFoundError:
        machine["versions"]["fla-core"] = "not installed"
    setting = f"b={BATCH} h={HEADS} p={WIDTH} n={STATE}, float32, chunk {CHUNK}"
    print(f"linear attention, {setting}, {THREADS} threads, {date}")
    print(f"{machine['cpu']}, {machine['cores']} cores, load before {machine['load before']:.1f}")
    print(", ".join(f"{name} {number}" for name, number in machine["versions"].items()))
    peers = load_peers()
    reports = {
        "agreement": partial(report_agreement, peers, 512),
        "growth": partial(report_growth, lengths, repeats),
        "peers": partial(report_peers, peers, peer_lengths, repeats),
    }
    results = {part: reports[part]() for part in options.parts}
    if options.json:
        command = shlex.join(["python", "tests/bench/bench_linear_attention.py", *sys.argv[1:]])
        record = {"command": command, "date": date, "machine": machine, "setting": setting}
        record |= {"threads": THREADS, "seed": SEED, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
