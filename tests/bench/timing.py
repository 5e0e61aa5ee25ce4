"""What the benchmarks of this folder share: turns, the rates of a machine, memory, a row to print.

A turn is one run of every contestant, in rotating order, so that whatever else the machine does
falls on all of them alike.
"""

import json
import math
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import cheems_ref  # isort: skip  # before the profiler, which imports Triton

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's remarks

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

THREADS = 2
ROWS = "CHEEMS_BENCH_ROWS"  # the file of the rows that have a target, where run.py wants them


def waiting(device):
    """What has to be called before a clock is read: a GPU goes on by itself."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def time_in_turns(tasks, repeats, what, device="cpu"):
    """Run every task twice per turn, in rotating order; return the seconds of each second run.

    The first run brings caches and heap to where the task itself leaves them. Without it, a task
    would pay for what its predecessor did: one that frees much memory hands it back to the system,
    and whoever comes next waits to get it again.
    """
    names, seconds, wait = list(tasks), {name: [] for name in tasks}, waiting(device)
    for turn in tqdm(range(repeats), desc=what, leave=False, disable=None):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            tasks[name]()
            wait()
            start = time.perf_counter()
            tasks[name]()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def paired_ratio(seconds, over):
    """Return the median of the ratios within a turn."""
    return median(a / b for a, b in zip(seconds, over, strict=True))


def peak_bytes(call):
    """Return the most bytes that tensors made during a call take at once.

    Every allocation of torch's CPU allocator counts, and every release of what was allocated during
    the call, so temporaries inside operators and the returned gradients do, too; what the process
    keeps beyond live tensors does not.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def relative_error(ours, truth):
    return ((ours.double() - truth).abs().max() / truth.abs().max()).item()


def print_row(what, figures, met=None, target="none"):
    """Print one row; `met` is None where there is no target."""
    end = note_target(what, figures, met, target) if met is not None else target
    print(f"  {what:56}{figures:>24}  {end}".rstrip())


def note_target(what, figures, met, target):
    """Return how a row with a target ends, and pass the row on to run.py; "none" if met is None."""
    if met is None:
        return "none"
    if ROWS in os.environ:
        row = dict(what=what, figures=figures, met=bool(met), target=target)
        row["program"] = Path(sys.argv[0]).stem.removeprefix("bench_")
        with open(os.environ[ROWS], "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return f"{target}  {'ok' if met else 'MISSED'}"


def describe_machine():
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    versions = {"python": platform.python_version(), "cheems_ref": cheems_ref.__version__}
    for package in ("torch", "triton", "mamba-ssm", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    machine = {"cpu": cpu, "cores": os.cpu_count(), "load before": load, "versions": versions}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        machine["gpu"] = {"name": gpu.name, "bytes": gpu.total_memory, "cuda": torch.version.cuda}
    return machine
