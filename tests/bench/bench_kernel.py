"""Measure mamba-ssm's kernels and ours by hand against ssd_chunked, plain and compiled, on a GPU.

    python tests/bench/bench_kernel.py [--lengths L ...] [--repeats N] [--json FILE] [--rehearse]

Without a GPU it measures nothing and says so. `--rehearse` walks through the same code on the
CPU, at one tiny length and with the kernels in Triton's interpreter, to see that it runs; what it
prints then are no measurements.
"""

import argparse
import json
import os
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from timing import describe_machine, waiting
from torch.utils.flop_counter import FlopCounterMode

from cheems_ref.kernels import kernel_status
from cheems_ref.ssd import ssd_chunked, ssd_kernel, ssd_recurrent

SEED, CHUNK = 0, 64
BATCH, HEADS, WIDTH, GROUPS, STATE = 1, 8, 64, 1, 64
BY_HAND = "by hand"
COMPILED, LONGEST_COMPILED = "compiled", 4096  # longer graphs take minutes to compile
LENGTHS = [1024 * 4**i for i in range(4)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def seconds(task, device):
    """The time of one call, from an idle device to an idle device."""
    wait = waiting(device)
    wait()
    start = time.perf_counter()
    task()
    wait()
    return time.perf_counter() - start


def machine_rates(device, size):
    """Bytes per second of a copy, and FLOPs per second of a square matrix product per dtype."""
    source = torch.empty(size * size, device=device)
    target = torch.empty_like(source)
    copies = [seconds(lambda: target.copy_(source), device) for _ in range(10)]
    rates = {"copy": 2 * source.nbytes / median(copies)}
    for name, dtype in DTYPES.items():
        square = torch.randn(size, size, device=device, dtype=dtype)
        products = [seconds(lambda square=square: square @ square, device) for _ in range(10)]
        rates[name] = 2 * size**3 / median(products)
    return rates


def make_inputs(length, dtype, device, heads=HEADS):
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x, B, C = (
        normal(BATCH, length, *sizes).to(dtype)
        for sizes in ((heads, WIDTH), (GROUPS, STATE), (GROUPS, STATE))
    )
    dt = F.softplus(normal(BATCH, length, heads) - 3)
    tensors = (x, dt, -torch.linspace(1, 16, heads), B, C)
    return [t.to(device).requires_grad_() for t in tensors]


def make_task(form, inputs, backward):
    def forward():
        with torch.no_grad():
            form(*inputs, chunk_size=CHUNK)

    def forward_and_backward():
        torch.autograd.grad(form(*inputs, chunk_size=CHUNK).float().sum(), inputs)

    return forward_and_backward if backward else forward


def check_agreement(forms, device, length=200, heads=HEADS):
    """Refuse to time what does not agree with the float64 recurrence."""
    for name, dtype in DTYPES.items():
        inputs = make_inputs(length, dtype, device, heads)
        inputs = [t.detach() for t in inputs]
        truth = ssd_recurrent(*(t.double() for t in inputs))
        for form, function in forms.items():
            error = (function(*inputs, chunk_size=CHUNK) - truth).abs().max() / truth.abs().max()
            if not error.item() <= TOLERANCE[name]:
                raise SystemExit(f"{form}, {name}: relative error {error.item():.1e}")


def measure(forms, lengths, repeats, device, rates, keep, heads=HEADS, warm_up=2):
    """The rows of all dtypes and lengths; `keep` is handed those that there are, after each."""
    rows = []
    for name, dtype in DTYPES.items():
        for length in lengths:
            inputs = make_inputs(length, dtype, device, heads)
            with FlopCounterMode(display=False) as counter:
                ssd_chunked(*inputs, chunk_size=CHUNK)
            least_bytes = sum(t.nbytes for t in inputs) + inputs[0].nbytes  # all in once, y out
            for backward in (False, True):
                # Every length and dtype is another graph; after eight torch goes on uncompiled.
                torch.compiler.reset()
                taken = {
                    form: f
                    for form, f in forms.items()
                    if not (form == COMPILED and length > LONGEST_COMPILED)
                }
                tasks = {form: make_task(f, inputs, backward) for form, f in taken.items()}
                times = {form: [] for form in taken}
                for turn in range(warm_up + repeats):  # the first two compile and tune
                    for form, task in tasks.items():
                        spent = seconds(task, device)
                        if turn >= warm_up:
                            times[form].append(spent)
                flops = counter.get_total_flops() * (3 if backward else 1)
                for form, spent in times.items():
                    rows.append(
                        {
                            "dtype": name,
                            "length": length,
                            "pass": "fwd+bwd" if backward else "fwd",
                            "form": form,
                            "ms": 1e3 * median(spent),
                            "speed-up": median(times["chunked"]) / median(spent),
                            "matmul": flops / median(spent) / rates[name],
                            "copy": None
                            if backward
                            else least_bytes / median(spent) / rates["copy"],
                        }
                    )
                keep(rows)
    return rows


def report(rows):
    print("dtype     length   pass     form               ms   vs chunked   of matmul    of copy")
    for row in rows:
        copy = "" if row["copy"] is None else f"{row['copy']:11.1%}"
        print(
            f"{row['dtype']:9}{row['length']:7}   {row['pass']:8} {row['form']:9}"
            f"{row['ms']:12.3f}{row['speed-up']:12.2f}x{row['matmul']:12.1%}{copy}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="L")
    parser.add_argument("--repeats", type=int, default=20, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record of the run")
    parser.add_argument("--rehearse", action="store_true", help="walk through it on the CPU")
    options = parser.parse_args()

    status = kernel_status()
    print(f"mamba-ssm's kernels: {status.mode}. {status.reason}")
    if status.mode != "cuda" and not (options.rehearse and status.available):
        print("kernel, chunked and compiled chunked on a GPU: not measured")
        raise SystemExit(1 if options.json else 0)
    from cheems_ref.triton_ssd import ssd_triton  # which needs Triton

    device = "cuda" if status.mode == "cuda" else "cpu"
    forms = {"kernel": ssd_kernel, BY_HAND: ssd_triton, "chunked": ssd_chunked}
    small = {}
    if options.rehearse:
        options.lengths, options.repeats, small = [64], 1, dict(heads=1)
        check_agreement(forms, device, length=70, **small)
    else:
        forms[COMPILED] = torch.compile(ssd_chunked)
        check_agreement(forms, device)
    rates = machine_rates(device, 512 if options.rehearse else 8192)
    record = {
        "command": shlex.join(["python", "tests/bench/bench_kernel.py", *given(options.json)]),
        "machine": describe_machine(),
        "kernels": status._asdict(),
        "rehearsal": options.rehearse,
        "seed": SEED,
        "date": datetime.now(UTC).date().isoformat(),
        "rates": rates,
    }

    def keep(rows):
        if options.json:
            partial = options.json.with_suffix(".partial")
            partial.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
            os.replace(partial, options.json)

    small |= dict(warm_up=0) if options.rehearse else {}
    report(measure(forms, options.lengths, options.repeats, device, rates, keep, **small))


def given(path):
    """The options of this call, whatever the name of the record."""
    return ["FILE" if one == str(path) else one for one in sys.argv[1:]]


if __name__ == "__main__":
    main()
