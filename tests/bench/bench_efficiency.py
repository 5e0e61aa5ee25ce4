"""Measure where time and memory go: what a machine can do, operators, and whole systems by length.

    python tests/bench/bench_efficiency.py [--parts NAME ...] [--systems {small,tiny,320m,1.3b}]
                                           [--lengths L ...] [--turns N] [--device D] [--quick]
                                           [--keep-memory] [--json FILE]

The systems are those of chapter 10, which draws its figures from this record: five of two million
parameters each, or presets of one size. On a CPU one thread computes in float32; the papers'
presets are in bfloat16. The contestants of a part run in turns (see timing.py). With `--json` the
record is written after every measurement; a second call goes on with the parts that are not whole,
and refuses a record of other settings. A part that fails says why in the record, and the next one
is measured. A run only reports.

Chapter 10's record also holds a control: why SSD is so slow in chunks of 256 and 512. Two more runs
of a few parts, minutes apart on another day, one as usual and one with `--keep-memory`, which tells
glibc to keep freed memory, so that large tensors need no fresh pages. The records of both were put
together by hand, under "control". The machine was half as fast that day: compare only the two.
"systems anew" is that part once more, on another such day, when product keys had become faster.
"""

import argparse
import functools
import json
import math
import os
import shlex
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from timing import describe_machine, paired_ratio, peak_bytes, time_in_turns, waiting

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

from cheems_ref.attention import attention
from cheems_ref.budget import fit_d_ff
from cheems_ref.config import ModelConfig, preset
from cheems_ref.experts import MLP, MoE
from cheems_ref.kernels import kernel_status
from cheems_ref.model import CausalLM
from cheems_ref.retrieval import PEER
from cheems_ref.roofline import Operator, Recorder, _Call
from cheems_ref.ssd import ssd_chunked, ssd_quadratic, ssd_recurrent
from experiments.runner import KEEP_MEMORY, from_notebook

CHAPTER, SEED = "10_efficiency", 0
LENGTHS = [2**i for i in range(8, 15)]
FORWARD, BOTH = PASSES = "evaluation", "training"
PRESETS = {"LlaMa": "llama", "Mamba-2": "mamba2", "Jamba": "jamba", "Cheems": "cheems"}
DTYPES = {"tiny": torch.float32, "320m": torch.bfloat16, "1.3b": torch.bfloat16}  # of presets
STEPS = 8  # tokens per timed call
INNER = {
    "attention": dict(pattern="(SK × 3 + AK) × 2"),
    "retrieved": dict(pattern="(SK × 3 + IK) × 2", inner="retrieved"),
    "SSD": dict(pattern="(SK × 3 + IK) × 2", inner="ssd"),
}


def chapter_10():
    """Functions and constants of chapter 10, for models of float32."""
    chapter = from_notebook(CHAPTER)
    torch.set_default_dtype(torch.float32)
    return chapter


def configs_of(systems):
    """The configurations by name: those of the chapter, or the papers' presets of one size."""
    if systems == "small":
        chapter = chapter_10()
        return {name: chapter.sized(name) for name in chapter.SYSTEMS}
    return {name: preset(f"{family}-{systems}") for name, family in PRESETS.items()}


def in_turns(tasks, a, what):
    """Seconds of every turn by name; None for what does not fit into memory."""
    fit = {name: task for name, task in tasks.items() if fits(task)}
    seconds = time_in_turns(fit, a.turns, what, a.device) if fit else {}
    rounded = {name: [float(f"{s:.4g}") for s in spent] for name, spent in seconds.items()}
    return {name: rounded.get(name) for name in tasks}


def fits(task):
    """Run a task once, and say whether the memory was enough."""
    try:
        task()
    except torch.OutOfMemoryError:
        enough = False
    else:
        enough = True
    if not enough:  # where the failed pass is no longer held by the exception
        torch.cuda.empty_cache()
    return enough


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
        times = max(1, (1024 // n) ** 2) * (1 if a.device == "cpu" else 50)
        products.append([n, repeated(call, times, a.device)])
    sums = []
    for power in range(12, 20 if a.quick else 27):
        one, other = torch.ones(2, 2**power // a.dtype.itemsize, **how).unbind()
        call = functools.partial(torch.add, one, other)
        times = max(1, 2**22 >> power) * (1 if a.device == "cpu" else 20)
        sums.append([3 * one.nbytes, repeated(call, times, a.device)])
    smallest = torch.ones(1, **how)
    launch = repeated(functools.partial(torch.add, smallest, smallest), 1000, a.device)
    for n, seconds in products:
        print(f"  product {n:5} x {n:<5} {2e-9 * n**3 / seconds:10.1f} GFLOP/s")
    for size, seconds in sums[::4]:
        print(f"  sum {size / 2**20:12.3f} MiB  {1e-9 * size / seconds:10.1f} GB/s")
    print(f"  smallest sum         {1e6 * launch:10.2f} µs")
    return {"products": products, "sums": sums, "launch": launch}


def make_forms(ssd):
    """Operators to compare, as calls without arguments: 128 channels in and out."""
    x = ssd[0]
    tokens = x.flatten(2)
    _ = torch.manual_seed(0)
    layers = {"MLP": MLP(128, 512), "routed": MoE(128, 128, n_experts=4, k=1)}
    layers["retrieved"] = PEER(128, n_experts=1024, n_heads=1, k=8, d_query=128)
    calls = {"SSD, one by one": functools.partial(ssd_recurrent, *ssd)}
    for q in (16, 64, 256):
        calls[f"SSD, chunks of {q}"] = functools.partial(ssd_chunked, *ssd, chunk_size=q)
    calls["SSD, all at once"] = functools.partial(ssd_quadratic, *ssd)
    calls["attention"] = functools.partial(attention, x, x, x)
    for name, layer in layers.items():
        calls[name] = functools.partial(layer.to(x.device), tokens)
    return calls


def forms(a):
    """Seconds of several operators, forward, on equal sizes."""
    make = chapter_10().make_ssd
    found = {}
    for length in (256,) if a.quick else (2048,):
        calls = make_forms(make(length, a.device))
        tasks = {name: torch.no_grad()(call) for name, call in calls.items()}
        found[length] = in_turns(tasks, a, f"forms, {length}")
        report(found[length])
    return found


def chunks(a):
    """Seconds of SSD in chunks of several sizes, forward and with its gradients."""
    make = chapter_10().make_chunks
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
        logits, _ = net(ids[:, :-1], use_cache=False)
        F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        net.zero_grad()

    return forward if kind == FORWARD else both


@functools.cache
def models_of(systems, device, dtype):
    """The models, made where they run."""
    torch.manual_seed(SEED)
    with torch.device(device):
        made = {name: CausalLM(config) for name, config in configs_of(systems).items()}
    return {name: net.to(dtype) for name, net in made.items()}


def nets(a):
    return models_of(a.systems, a.device, a.dtype)


def systems(a):
    """Seconds of whole systems, evaluation and training, by length."""
    found, models = {kind: {} for kind in PASSES}, nets(a)
    for length in a.lengths:
        for kind in PASSES:
            tasks = {name: a_pass(net, length, kind) for name, net in models.items()}
            found[kind][length] = in_turns(tasks, a, f"{kind}, {length}")
            report(found[kind][length], f"{kind}, {length:,} tokens", length)
            a.keep(found)
    return found


def inner(a):
    """Seconds of training passes of the pattern of Ch's Figure 6, by inner function and length."""
    chapter = chapter_10()
    torch.manual_seed(SEED)
    configs = {
        name: fit_d_ff(ModelConfig(**inner, **chapter.SIZES), chapter.TWO_MILLION)
        for name, inner in INNER.items()
    }
    models, found = {name: CausalLM(c).to(a.device) for name, c in configs.items()}, {}
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
        a.keep({"length": length, "seconds": found})
    return {"length": length, "seconds": found}


def updates(a):
    """Seconds of training passes of chapter 09's systems, on batches as they learned from."""
    chapter = from_notebook("09_ablations")
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(SEED)
    rows = {name: chapter.SYSTEMS[name] for name in chapter_10().SYSTEMS}
    models = {name: CausalLM(chapter.fitted(**row)).to(a.device) for name, row in rows.items()}
    length, batch = (64, 2) if a.quick else (512, 4)
    tasks = {name: a_pass(net, length, BOTH, batch) for name, net in models.items()}
    c = models["LlaMa"].config
    heads = torch.randn(3, batch, c.n_heads, length, c.d_model // c.n_heads, device=a.device)

    def attention_alone():
        q, k, v = (part.requires_grad_() for part in heads.unbind())
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    tasks["attention, one layer of LlaMa"] = attention_alone
    found = in_turns(tasks, a, "updates")
    report(found, f"batch of {batch}, {length} tokens each", batch * length)
    return {"length": length, "batch": batch, "seconds": found}


class Timed(Recorder):
    """Also record the seconds of each operator."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        start = time.perf_counter()
        result = function(*args, **kwargs)
        took = time.perf_counter() - start
        call = _Call(function, args, kwargs, result)
        if call.written and not call.is_view():
            self.operators.append(Operator(call.name, *call.counts()))
            self.seconds.append(took)
        return result


def operators(a):
    """Median seconds of every operator of four layers, forward, on a CPU: for the roofline."""
    chapter, length, found = chapter_10(), 64 if a.quick else 512, {}
    torch.manual_seed(SEED)
    position_ids = torch.arange(length)[None]
    net = CausalLM(ModelConfig("SMAE", **chapter.SIZES, d_ff=512))
    for block in net.blocks:
        x, rounds = torch.randn(1, length, net.config.d_model), []
        for _ in range(2 if a.quick else 16):
            with torch.no_grad(), Timed() as timed:
                block(x, position_ids)
            rounds.append(timed.seconds)
        took = [median(several) for several in zip(*rounds[1:], strict=True)]
        found[block.letter] = [
            [*one, float(f"{seconds:.3g}")]
            for one, seconds in zip(timed.operators, took, strict=True)
        ]
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
        found[context] = {
            name: several and [s / STEPS for s in several] for name, several in spent.items()
        }
        report(found[context], f"a token after {context:,}")
        a.keep(found)
    return found


def memory(a):
    """The most bytes that a training pass takes at once, by length; None if it does not fit."""
    found, models = {}, nets(a)
    for length in [n for n in a.lengths if n <= 4096]:
        passes = {name: a_pass(net, length, BOTH) for name, net in models.items()}
        found[length] = {
            name: peak(call, a) if fits(call) else None for name, call in passes.items()
        }
        words = (
            f"{name} {(size or math.nan) / 2**20:,.0f} MiB" for name, size in found[length].items()
        )
        print(f"  {length:7,} tokens", *words)
        a.keep(found)
    return found


def peak(call, a):
    """Bytes of a call, above what was there before."""
    if a.device == "cpu":
        return peak_bytes(call)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def compiled(a):
    """Seconds of evaluation of Cheems, its state layers in chunks: as it is, and compiled."""
    length = 64 if a.quick else 1024
    config = replace(configs_of(a.systems)["Cheems"], backend="chunked")
    torch.manual_seed(SEED)
    with torch.device(a.device):
        net = CausalLM(config).to(a.dtype)
    whole = torch.compile(net, fullgraph=True, backend="eager" if a.quick else "inductor")
    tasks = {"as it is": a_pass(net, length, FORWARD)}
    tasks["compiled"] = a_pass(whole, length, FORWARD)
    found = {"Cheems": in_turns(tasks, a, "compiled, Cheems")}
    report(found["Cheems"], f"Cheems, {length:,} tokens", length)
    return {"length": length, "seconds": found}


PARTS = {
    part.__name__: part
    for part in (
        *(rates, forms, chunks, systems, inner, decoding, memory, batches, compiled),
        *(updates, operators),
    )
}


def report(seconds, title="", tokens=0):
    """Print medians, the ratio to the first in the same turns, and tokens per second."""
    if title:
        print(f"  {title}")
    there = {name: spent for name, spent in seconds.items() if spent}
    for name in seconds.keys() - there.keys():
        print(f"    {name!s:24} does not fit into memory")
    first = next(iter(there), None)
    for name, spent in there.items():
        rate = f"{tokens / median(spent):12,.0f} tokens/s" if tokens else ""
        ratio = paired_ratio(spent, there[first])
        print(f"    {name!s:24}{1e3 * median(spent):12.3f} ms{ratio:8.2f}x{rate}")


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--systems", choices=("small", *DTYPES), default="small")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--turns", type=int, default=5)
    gpu = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=gpu)
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    parser.add_argument("--keep-memory", action="store_true", help="glibc keeps freed memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record there")
    a = parser.parse_args()
    if a.turns < 1 or min(a.lengths) < 1:
        parser.error("--turns and --lengths must be at least 1")
    if a.quick:
        a.lengths, a.turns = [64, 128], 1
    a.dtype = DTYPES.get(a.systems, torch.float32)
    return a


def settings(a):
    """All that two calls must have in common to write one record."""
    return {
        "systems": a.systems,
        "lengths": a.lengths,
        "turns": a.turns,
        "quick": a.quick,
        "device": a.device,
        "dtype": str(a.dtype),
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "kernels": kernel_status().mode,
    } | ({"memory": "kept"} if a.keep_memory else {})


def opened(a):
    """The record that is there, or a new one."""
    given = ["FILE" if one == str(a.json) else one for one in sys.argv[1:]]
    new = {
        "command": shlex.join(["python", "tests/bench/bench_efficiency.py", *given]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "settings": settings(a),
        "parts": {},
        "whole": [],
    }
    if a.json is None or not a.json.exists():
        return new
    record = json.loads(a.json.read_text())
    for what in ("settings", "machine"):
        mine, theirs = (dict(one[what]) for one in (new, record))
        mine.pop("load before", None), theirs.pop("load before", None)
        if mine != theirs:
            raise SystemExit(f"{a.json} was written with other {what}: {theirs}, now {mine}")
    return record


def write(record, path):
    """As a whole or not at all."""
    if path is not None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record) + "\n")
        os.replace(partial, path)


def main():
    a = options()
    if a.keep_memory and not KEEP_MEMORY.items() <= os.environ.items():  # read as a program starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    torch.set_num_threads(1)
    record = opened(a)
    for part in a.parts:
        if part in record["whole"]:
            print(f"{part}: is there")
            continue

        def keep(found, part=part):
            record["parts"][part] = found
            write(record, a.json)

        a.keep = keep
        print(f"{part}: {PARTS[part].__doc__}", flush=True)
        try:
            found = PARTS[part](a)
        except Exception as error:
            found = record["parts"].get(part, {}) | {"failed": f"{type(error).__name__}: {error}"}
            print(f"{part} failed: {error}")
        else:
            record["whole"].append(part)
        keep(found)


if __name__ == "__main__":
    main()
