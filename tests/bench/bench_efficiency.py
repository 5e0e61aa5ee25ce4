"""Measure where time and memory go: what a machine can do, operators, and whole systems by length.

    python tests/bench/bench_efficiency.py [--parts NAME ...] [--systems {small,tiny,320m,1.3b}]
                                           [--lengths L ...] [--turns N] [--device D] [--quick]
                                           [--json FILE]

The systems are those of chapter 10, which draws its figures from this record: five of two million
parameters each, or presets of one size. On a CPU one thread computes in float32; the papers'
presets are in bfloat16. The contestants of a part run in turns (see timing.py). With `--json` the
record is written after every part, and parts that it has are not measured again. A run only
reports.
"""

import argparse
import functools
import json
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from timing import describe_machine, paired_ratio, peak_bytes, time_in_turns, waiting

sys.path.insert(0, str(Path(__file__).parents[2] / "book"))

import torch
import torch.nn.functional as F
from records import from_notebook

from cheems_ref.model import CausalLM, preset

CHAPTER, SEED = "10_efficiency", 0
LENGTHS = [2**i for i in range(8, 15)]
FORWARD, BOTH = PASSES = "evaluation", "training"
PRESETS = {"LlaMa": "llama", "Mamba-2": "mamba2", "Jamba": "jamba", "Cheems": "cheems"}
DTYPES = {"tiny": torch.float32, "320m": torch.bfloat16, "1.3b": torch.bfloat16}  # of presets
STEPS = 8  # tokens per timed call


def of_chapter(*names):
    """Functions and constants of chapter 10, for models of float32."""
    found = from_notebook(CHAPTER, *names)
    torch.set_default_dtype(torch.float32)
    return found


def configs_of(systems):
    """The configurations by name: those of the chapter, or the papers' presets of one size."""
    if systems == "small":
        names, sized, *_ = of_chapter("SYSTEMS", "sized", "SIZES", "TWO_MILLION")
        return {name: sized(name) for name in names}
    return {name: preset(f"{family}-{systems}") for name, family in PRESETS.items()}


def in_turns(tasks, a, what):
    """Seconds of every turn by name, without what does not fit into memory."""
    for name, task in tasks.items():
        try:
            task()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            tasks = {other: t for other, t in tasks.items() if other != name}
    seconds = time_in_turns(tasks, a.turns, what, a.device) if tasks else {}
    return {name: [float(f"{s:.4g}") for s in spent] for name, spent in seconds.items()}


def repeated(call, times, device):
    """Median seconds of a call, from seven rounds of so many."""
    wait, rounds = waiting(device), []
    for _ in range(8):
        wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        rounds.append((time.perf_counter() - start) / times)
    return float(f"{median(rounds[1:]):.4g}")


def rates(a):
    """Seconds of square products, of sums of two tensors into a new one, and of the smallest."""
    how = dict(device=a.device, dtype=a.dtype)
    sizes = (64, 256) if a.quick else (64, 256, 1024) if a.device == "cpu" else (1024, 8192)
    products = []
    for n in sizes:
        one, other = torch.randn(2, n, n, **how).unbind()
        out = torch.empty_like(one)
        call = functools.partial(torch.mm, one, other, out=out)
        products.append([n, repeated(call, max(1, (1024 // n) ** 2), a.device)])
    sums = []
    for power in range(12, 20 if a.quick else 27):
        one, other = torch.ones(2, 2**power // a.dtype.itemsize, **how).unbind()
        call = functools.partial(torch.add, one, other)
        sums.append([3 * one.nbytes, repeated(call, max(1, 2**22 >> power), a.device)])
    smallest = torch.ones(1, **how)
    launch = repeated(functools.partial(torch.add, smallest, smallest), 1000, a.device)
    for n, seconds in products:
        print(f"  product {n:5} x {n:<5} {2e-9 * n**3 / seconds:10.1f} GFLOP/s")
    for size, seconds in sums[::4]:
        print(f"  sum {size / 2**20:12.3f} MiB  {1e-9 * size / seconds:10.1f} GB/s")
    print(f"  smallest sum         {1e6 * launch:10.2f} µs")
    return {"products": products, "sums": sums, "launch": launch}


def forms(a):
    """Seconds of the operators of the chapter, forward, on equal sizes."""
    make, *_ = of_chapter("make_forms", "make_ssd", "seeded")
    found = {}
    for length in (256,) if a.quick else (2048,):
        calls = make(length, a.device)
        tasks = {name: torch.no_grad()(call) for name, call in calls.items()}
        found[length] = in_turns(tasks, a, f"forms, {length}")
        report(found[length])
    return found


def chunks(a):
    """Seconds of SSD in chunks of several sizes, forward and with its gradients."""
    make, *_ = of_chapter("make_chunks", "make_ssd", "seeded")
    length, found = 512 if a.quick else 4096, {}
    calls = make(length, a.device)
    forward = {q: torch.no_grad()(call) for q, (call, _) in calls.items()}
    both = {q: backward for q, (_, backward) in calls.items()}
    for kind, tasks in zip(PASSES, (forward, both), strict=True):
        found[kind] = in_turns(tasks, a, f"chunks, {kind}")
        report(found[kind])
    return {"length": length, "seconds": found}


def a_pass(net, length, kind, batch=1):
    """A call: a forward pass over random ids, or one and its backward pass."""
    generator = torch.Generator().manual_seed(SEED)
    vocabulary, device = net.config.vocab_size, net.embedding.weight.device
    ids = torch.randint(vocabulary, (batch, length + 1), generator=generator).to(device)

    def forward():
        with torch.no_grad():
            net(ids[:, :-1], use_cache=False)

    def both():
        net.zero_grad()
        logits, _ = net(ids[:, :-1], use_cache=False)
        F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()

    return forward if kind == FORWARD else both


def nets(a):
    torch.manual_seed(SEED)
    return {name: CausalLM(c).to(a.device, a.dtype) for name, c in configs_of(a.systems).items()}


def systems(a):
    """Seconds of whole systems, evaluation and training, by length."""
    found, models = {}, nets(a)
    for kind in PASSES:
        found[kind] = {}
        for length in a.lengths:
            tasks = {name: a_pass(net, length, kind) for name, net in models.items()}
            found[kind][length] = in_turns(tasks, a, f"{kind}, {length}")
            report(found[kind][length], f"{kind}, {length:,} tokens", length)
    return found


def inner(a):
    """Seconds of training passes of the pattern of Ch's Figure 6, by inner function and length."""
    names, sized, *_ = of_chapter("INNER", "sized_inner", "SIZES", "TWO_MILLION")
    torch.manual_seed(SEED)
    models, found = {name: CausalLM(sized(name)).to(a.device) for name in names}, {}
    for length in (64,) if a.quick else (1024, 4096, 8192):
        tasks = {name: a_pass(net, length, BOTH) for name, net in models.items()}
        found[length] = in_turns(tasks, a, f"inner function, {length}")
        report(found[length], f"{length:,} tokens", length)
    return found


def batches(a):
    """Seconds of training passes over short texts, several at once."""
    found, models = {}, nets(a)
    length = 64 if a.quick else 256
    for batch in (1, 4) if a.quick else (1, 2, 4, 8, 16, 32):
        tasks = {name: a_pass(net, length, BOTH, batch) for name, net in models.items()}
        found[batch] = in_turns(tasks, a, f"batch {batch}")
        report(found[batch], f"batch of {batch}, {length} tokens each", batch * length)
    return {"length": length, "seconds": found}


def decoding(a):
    """Seconds of a token after so many, one row."""
    found, models = {}, nets(a)
    for context in (64, 128) if a.quick else LENGTHS:
        tasks = {}
        for name, net in models.items():
            ids = torch.randint(net.config.vocab_size, (1, context), device=a.device)
            with torch.inference_mode():
                cache = net(ids)[1]

            @torch.inference_mode()
            def step(net=net, after=cache, token=ids[:, :1]):
                for _ in range(STEPS):
                    _, after = net(token, cache=after)

            tasks[name] = step
        spent = in_turns(tasks, a, f"decoding, {context}")
        found[context] = {name: [s / STEPS for s in several] for name, several in spent.items()}
        report(found[context], f"a token after {context:,}")
    return found


def memory(a):
    """The most bytes that a training pass takes at once, by length."""
    found, models = {}, nets(a)
    for length in [n for n in a.lengths if n <= 4096]:
        found[length] = {}
        for name, net in models.items():
            call = a_pass(net, length, BOTH)
            call()
            if a.device == "cpu":
                found[length][name] = peak_bytes(call)
            else:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call()
                found[length][name] = torch.cuda.max_memory_allocated() - before
        print(
            f"  {length:7,} tokens",
            *(f"{n} {b / 2**20:,.0f} MiB" for n, b in found[length].items()),
        )
    return found


def compiled(a):
    """Seconds of evaluation as it is and compiled, of the systems whose graph is whole."""
    found, models = {}, nets(a)
    length = 64 if a.quick else 1024
    for name in ("Cheems",):
        net = models[name]
        tasks = {
            "as it is": a_pass(net, length, FORWARD),
            "compiled": a_pass(torch.compile(net, fullgraph=True), length, FORWARD),
        }
        found[name] = in_turns(tasks, a, f"compiled, {name}")
        report(found[name], f"{name}, {length:,} tokens", length)
    return {"length": length, "seconds": found}


PARTS = {
    part.__name__: part
    for part in (rates, forms, chunks, systems, inner, batches, decoding, memory, compiled)
}


def report(seconds, title="", tokens=0):
    """Print medians, the ratio to the first in the same turns, and tokens per second."""
    if title:
        print(f"  {title}")
    first = next(iter(seconds), None)
    for name, spent in seconds.items():
        rate = f"{tokens / median(spent):12,.0f} tokens/s" if tokens else ""
        ratio = paired_ratio(spent, seconds[first])
        print(f"    {name!s:24}{1e3 * median(spent):12.3f} ms{ratio:8.2f}x{rate}")


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--systems", choices=("small", *DTYPES), default="small")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record there")
    a = parser.parse_args()
    if a.quick:
        a.lengths, a.turns = [64, 128], 1
    a.dtype = DTYPES.get(a.systems, torch.float32)
    return a


def command(a):
    """How this was called, whatever the name of the record."""
    given = ["FILE" if one == str(a.json) else one for one in sys.argv[1:]]
    return shlex.join(["python", "tests/bench/bench_efficiency.py", *given])


def main():
    a = options()
    torch.set_num_threads(1)
    record = json.loads(a.json.read_text()) if a.json and a.json.exists() else {}
    if not record:
        record = {
            "command": command(a),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": describe_machine() | {"device": a.device},
            "seed": SEED,
            "threads": 1,
            "systems": a.systems,
        }
    for part in a.parts:
        if part in record.get("parts", {}):
            continue
        print(f"{part}: {PARTS[part].__doc__}", flush=True)
        record.setdefault("parts", {})[part] = PARTS[part](a)
        if a.json:
            a.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
