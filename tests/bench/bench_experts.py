"""Measure PEER against PEER-pytorch, and against a routed MoE of the same active parameters.

    python tests/bench/bench_experts.py [--repeats N] [--quick] [--json FILE]

All get the same 512 tokens of width 256; ours and theirs hold the same weights, 4 heads and 16
experts per head. PEER-pytorch runs with `non_competing_scores=False`, since by default it keeps one
expert per head. The bound of the forward pass is what cannot be left out: the products of tokens
with the queries' map and of queries with keys, and one reading of the chosen rows of both tables.
The contestants run in turns (see timing.py), and a ratio is the median of the ratios within a
turn. A run only reports: a missed target does not change the exit status.
"""

import argparse
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from einops import rearrange
from timing import (
    THREADS,
    describe_machine,
    paired_ratio,
    peak_bytes,
    print_row,
    relative_error,
    time_in_turns,
)

from cheems_ref.experts import MLP, PEER, MoE

TOKENS, WIDTH, HEADS, K, QUERY = 512, 256, 4, 16, 256
OURS, THEIRS, DENSE = "product keys, bags", "PEER-pytorch", "dense MLP of as many neurons"
BOUND = "its matrix products and row reads"
SMALL, MIDDLE, LARGE = 2**12, 2**16, 2**20
FORWARD, BOTH = "forward", "forward+backward"

# The targets: the bound as a share of the forward pass, at the least; memory against PEER-pytorch
# and growth with the number of experts, at the most.
BOUND_SHARE = {LARGE: 0.55}
MEMORY, GROWTH = 0.25, 4


def make_pair(n_experts):
    """Return our layer and theirs with the same weights, or only ours where theirs is missing."""
    torch.manual_seed(0)
    ours = PEER(WIDTH, n_experts=n_experts, n_heads=HEADS, k=K, d_query=QUERY)
    try:
        from PEER_pytorch import PEER as Theirs
    except ImportError:
        return {OURS: ours}
    theirs = Theirs(
        WIDTH,
        heads=HEADS,
        num_experts=4,
        num_experts_per_head=K,
        product_key_topk=min(K, ours.keys.shape[2]),
        dim_key=QUERY // 2,
        activation=torch.nn.SiLU,
        non_competing_scores=False,
    )
    theirs.num_experts, theirs.num_keys = n_experts, ours.keys.shape[2]
    queries = rearrange(ours.query_proj.weight.data, "(h z m) d -> (z h m) d", h=HEADS, z=2)
    theirs.to_queries[0].weight = torch.nn.Parameter(queries)
    theirs.keys = torch.nn.Parameter(rearrange(ours.keys.data, "h z r m -> h r z m").contiguous())
    theirs.weight_down_embed.weight = torch.nn.Parameter(ours.down.data)
    theirs.weight_up_embed.weight = torch.nn.Parameter(ours.up.data)
    return {OURS: ours, THEIRS: theirs}


def make_task(layer, x, kind):
    if kind == FORWARD:
        return torch.no_grad()(lambda: layer(x))

    def both():
        layer.zero_grad()
        layer(x).sum().backward()

    return both


@torch.no_grad()
def make_bound(layer, x):
    """Return a call that multiplies and reads what the layer has to, and does nothing else."""
    n_heads, r = layer.n_heads, layer.keys.shape[2]
    rows = layer.route(x)[1].flatten(0, 1).flatten(1)
    scores = torch.empty(n_heads, 2, TOKENS, r)

    @torch.no_grad()
    def bound():
        queries = layer.query_proj(x).view(TOKENS, n_heads, 2, -1).permute(1, 2, 0, 3)
        torch.matmul(queries, layer.keys.mT, out=scores)
        return [F.embedding_bag(rows, table, mode="sum") for table in (layer.down, layer.up)]

    return bound


def report_speed(x, repeats, sizes):
    print(f"\nTime, median of {repeats} turns, and as a multiple of ours (paired).")
    print_row("", "ms   paired", target="target")
    for n_experts in sizes:
        layers = make_pair(n_experts)
        with torch.no_grad():
            outputs = [layer(x) for layer in layers.values()]
        for kind in (FORWARD, BOTH)[: 2 if n_experts < LARGE else 1]:
            tasks = {name: make_task(layer, x, kind) for name, layer in layers.items()}
            if kind == FORWARD:
                tasks[BOUND] = make_bound(layers[OURS], x)
            seconds = time_in_turns(tasks, repeats, f"{kind}, {n_experts}")
            for name, its in seconds.items():
                what, ratio = f"{kind:17}{n_experts:9,}  {name}", paired_ratio(its, seconds[OURS])
                target = BOUND_SHARE.get(n_experts) if name == BOUND else None
                met, words = (ratio >= target, f">= {target}x") if target else (None, "none")
                print_row(what, f"{1e3 * median(its):.1f}{ratio:8.2f}x", met, words)
        if len(outputs) == 2:
            error = relative_error(*(y.detach() for y in outputs[::-1]))
            print(f"  {n_experts:,} experts: outputs agree to {error:.0e} of the largest")
        else:
            print("  PEER-pytorch is not installed (make bench installs it): not measured")


def report_memory(x, n_experts):
    print(f"\nPeak memory of {BOTH}, {n_experts:,} experts, beyond parameters and gradients.")
    print_row("", "MiB   ours / it", target="target")
    layers, peaks = make_pair(n_experts), {}
    for name, layer in layers.items():
        gradients = sum(p.numel() * p.element_size() for p in layer.parameters())
        peaks[name] = peak_bytes(make_task(layer, x, BOTH)) - gradients
        ratio = peaks[OURS] / peaks[name]
        met, words = (ratio <= MEMORY, f"<= {MEMORY}x") if name == THEIRS else (None, "none")
        print_row(name, f"{peaks[name] / 2**20:.1f}{ratio:11.2f}x", met, words)


def report_routed(x, repeats):
    """MoE with as many active weights per token: 2 of 64 experts of 21 hidden neurons each."""
    active, n_experts, k = 2 * HEADS * K * WIDTH, 64, 2
    d_ff = round(active / (3 * WIDTH * k))
    layers = {
        OURS: make_pair(SMALL)[OURS],
        f"MoE, {k} of {n_experts} experts of width {d_ff}": MoE(
            WIDTH, d_ff, n_experts=n_experts, k=k
        ),
    }
    print(f"\nThe same active weights per token ({active:,}), routing not counted.")
    for kind in (FORWARD, BOTH):
        tasks = {name: make_task(layer, x, kind) for name, layer in layers.items()}
        seconds = time_in_turns(tasks, repeats, kind)
        for name, its in seconds.items():
            figures = f"{1e3 * median(its):.1f}{paired_ratio(its, seconds[OURS]):8.2f}x"
            print_row(f"{kind:17} {name}", figures)


def report_growth(x, repeats, sizes):
    print("\nGrowth of the forward pass with the number of experts, ms.")
    milliseconds = {OURS: [], THEIRS: [], DENSE: []}
    for n_experts in sizes:
        layers = make_pair(n_experts)
        if n_experts <= SMALL * 4:
            layers[DENSE] = MLP(WIDTH, n_experts)
        tasks = {name: make_task(layer, x, FORWARD) for name, layer in layers.items()}
        seconds = time_in_turns(tasks, repeats, f"growth, {n_experts}")
        for name, its in seconds.items():
            milliseconds[name].append(float(f"{1e3 * median(its):.3g}"))
    print_row("", "".join(f"{size:>11,}" for size in sizes))
    for name, times in milliseconds.items():
        print_row(name, "".join(f"{time:11.1f}" for time in times))
    if SMALL in sizes and LARGE in sizes:
        ours = dict(zip(sizes, milliseconds[OURS], strict=True))
        ratio = ours[LARGE] / ours[SMALL]
        print_row("2^20 against 2^12", f"{ratio:.2f}x", ratio <= GROWTH, f"<= {GROWTH}x")
    return {"experts": sizes, "milliseconds": milliseconds}


def main():
    parser = argparse.ArgumentParser(description="Measure product keys and retrieved neurons.")
    parser.add_argument("--repeats", type=int, default=9, help="turns per measurement")
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the growth there")
    options = parser.parse_args()
    repeats = 2 if options.quick else options.repeats
    sizes = [2**8, SMALL] if options.quick else [2**i for i in range(8, 21, 2)]

    torch.set_num_threads(THREADS)
    machine = describe_machine()
    print(f"PEER, {TOKENS} tokens, d={WIDTH}, {HEADS} heads, k={K}, float32, {THREADS} threads")
    print(f"{machine['cpu']}, {machine['cores']} cores, load before {machine['load before']:.1f}")
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    report_speed(x, repeats, [SMALL] if options.quick else [SMALL, MIDDLE, LARGE])
    report_memory(x, SMALL)
    report_routed(x, repeats)
    growth = report_growth(x, repeats, sizes)
    if options.json:
        command = shlex.join(["python", "tests/bench/bench_experts.py", *sys.argv[1:]])
        date = datetime.now(UTC).date().isoformat()
        record = {"command": command, "date": date, "machine": machine, **growth}
        options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
