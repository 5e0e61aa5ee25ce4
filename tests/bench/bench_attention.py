"""Measure what the inner functions of attention cost, against ordinary attention of the same size.

    python tests/bench/bench_attention.py [--contexts L ...] [--repeats N] [--quick] [--json FILE]

One layer of width 512 with 8 heads. Decoding: one token, with a cache of so many. Training: a
forward and a backward pass over so many tokens. The contestants run in turns (see timing.py),
and what is printed is the median of the ratios within a turn. Ch B.2 says that its attention with
inner functions is about 4 % slower; it does not say what was timed. Last, one query of 32 heads
that share 4 groups of cached keys, against torch's own grouping. A run only reports.
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
from timing import THREADS, describe_machine, paired_ratio, print_row, time_in_turns

from cheems_ref.attention import InnerFuncAttn, attention

WIDTH, HEADS = 512, 8
PLAIN = "linear"  # ordinary attention
GROUPED = 1.1  # times torch's own grouping, at the most
LAYERS = {
    PLAIN: dict(inner="linear"),
    "retrieved": dict(inner="retrieved"),
    "ssd": dict(inner="ssd"),
    "linear, gate": dict(inner="linear", mask="gate", max_positions=16_384),
    "linear, content": dict(inner="linear", mask="content"),
    "linear, content, keep 256": dict(inner="linear", mask="content", k_keys=256),
}


def make_layers():
    torch.manual_seed(0)
    return {
        name: InnerFuncAttn(WIDTH, n_heads=HEADS, **options) for name, options in LAYERS.items()
    }


def decoding(layer, context):
    """Return a call that decodes one token after so many, without gradients."""
    x, ids = torch.randn(1, context + 1, WIDTH), torch.arange(context + 1)[None]
    with torch.no_grad():
        _, cache = layer(x[:, :-1], ids[:, :-1])
    return torch.no_grad()(lambda: layer(x[:, -1:], ids[:, -1:], cache=cache))


def training(layer, length):
    """Return a call that goes forward and backward over so many tokens."""
    x, ids = torch.randn(1, length, WIDTH), torch.arange(length)[None]

    def step():
        layer.zero_grad()
        layer(x, ids)[0].sum().backward()

    return step


def report(title, make_task, sizes, repeats):
    print(
        f"\n{title}, median of {repeats} turns; x is against ordinary attention in the same turn."
    )
    print(f"  {'':28}" + "".join(f"{size:>18,}" for size in sizes))
    columns = []
    for size in sizes:
        tasks = {name: make_task(layer, size) for name, layer in make_layers().items()}
        columns.append(time_in_turns(tasks, repeats, f"{title}, {size}"))
    ratios = {}
    for name in LAYERS:
        ratios[name] = [round(paired_ratio(column[name], column[PLAIN]), 2) for column in columns]
        cells = [
            f"{1e3 * median(column[name]):9.2f} ms{ratio:5.2f}x"
            for column, ratio in zip(columns, ratios[name], strict=True)
        ]
        print(f"  {name:28}" + "".join(f"{cell:>18}" for cell in cells))
    return {title: {"sizes": sizes, "ratios": ratios}}


@torch.no_grad()
def report_grouped(context, repeats, h=32, g=4, p=64):
    """Our attention on a cache (b, s, g, p), torch's on that and on its own layout (b, g, s, p)."""
    q, (k, v) = torch.randn(1, 1, h, p), torch.randn(2, 1, context, g, p)
    Q, K, V = (t.transpose(1, 2) for t in (q, k, v))
    copies = K.contiguous(), V.contiguous()
    fused = F.scaled_dot_product_attention
    tasks = {
        "attention": lambda: attention(q, k, v),
        "torch's enable_gqa, the same layout": lambda: fused(Q, K, V, enable_gqa=True),
        "torch's enable_gqa, its own layout": lambda: fused(Q, *copies, enable_gqa=True),
    }
    (name, ours), *peers = time_in_turns(tasks, repeats, "grouped").items()
    print(f"\nDecoding with grouped keys, h = {h}, g = {g}, {context:,} cached; ours / it, paired.")
    print_row("", "ms   ours / it", target="target")
    print_row(name, f"{1e3 * median(ours):.2f}" + " " * 12)
    for name, its in peers:
        ratio = paired_ratio(ours, its)
        figures = f"{1e3 * median(its):.2f}{ratio:11.2f}x"
        print_row(name, figures, ratio <= GROUPED, f"<= {GROUPED}x")


def main():
    parser = argparse.ArgumentParser(description="Measure the inner functions of attention.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=31, help="turns per measurement")
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ratios there")
    options = parser.parse_args()
    contexts, repeats = ([256], 2) if options.quick else (options.contexts, options.repeats)

    torch.set_num_threads(THREADS)
    machine = describe_machine()
    print(f"attention, b=1 d={WIDTH} h={HEADS}, float32, {THREADS} threads")
    print(f"{machine['cpu']}, {machine['cores']} cores, load before {machine['load before']:.1f}")
    times = report("Decoding one token after", decoding, contexts, repeats)
    report_grouped(4096, repeats)
    lengths = [length for length in contexts if length <= 1024]  # the masks take length² each
    times |= report("A training step over", training, lengths, max(2, repeats // 3))
    if options.json:
        command = shlex.join(["python", "tests/bench/bench_attention.py", *sys.argv[1:]])
        date = datetime.now(UTC).date().isoformat()
        record = {"command": command, "date": date, "machine": machine, "times": times}
        options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
