"""Run the benchmarks one after another, and print their targets, the missed ones last.

    python tests/bench/run.py [--full] [--minutes N] [NAME ...]

Without --full, every benchmark takes fewer turns and sizes, and none compiles a model. When the
minutes are over, the running benchmark is stopped and the remaining benchmarks are left out; the
last lines name them. With --full there is no limit.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from timing import ROWS, print_row

HERE = Path(__file__).parent


class Benchmark(NamedTuple):
    """The options of a benchmark, for a short run and for a full run."""

    short: tuple[str, ...]
    full: tuple[str, ...] = ()


# Benchmarks with targets come first. If time runs out, tables without a target are missing.
BENCHMARKS = {
    "ssd": Benchmark(
        ("--lengths", "4096", "--repeats", "3", "--parts", "agreement", "speed", "memory", "growth")
    ),
    "experts": Benchmark(("--repeats", "3")),
    "model": Benchmark(
        ("--contexts", "256", "1024", "--lengths", "256", "--repeats", "7", "--no-compiled")
    ),
    "linear_attention": Benchmark(("--repeats", "2", "--parts", "agreement", "growth")),
    "attention": Benchmark(("--contexts", "256", "4096", "--repeats", "7")),
    "kernel": Benchmark(()),
    "efficiency": Benchmark(
        ("--parts", "rates", "systems", "--lengths", "256", "1024", "--turns", "1"),
        ("--lengths", "256", "1024", "4096", "--turns", "3"),
    ),
}


def run_one(name, options, rows, seconds):
    """Run one benchmark; return what came of it, "" if it ended well."""
    command = [sys.executable, str(HERE / f"bench_{name}.py"), *options]
    print(f"\n=== {' '.join(['bench_' + name, *options])}", flush=True)
    process = subprocess.Popen(command, env=os.environ | {ROWS: str(rows)}, start_new_session=True)
    try:
        status = process.wait(timeout=seconds)
    except BaseException as end:
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        process.wait()
        if not isinstance(end, subprocess.TimeoutExpired):
            raise
        return "stopped: the time was over"
    return "" if status == 0 else f"failed with status {status}"


def print_targets(rows):
    """Print every row that has a target, the missed ones last; return how many are missed."""
    targets = [row for row in rows if row["met"] is not None]
    missed = [row for row in targets if not row["met"]]
    met = [row for row in targets if row["met"]]
    print(f"\n=== Targets: {len(met)} of {len(targets)} met")
    for title, some in (("met", met), ("missed", missed)):
        if some:
            print(f"\n{title}:")
        for row in some:
            figures = " ".join(row["figures"].split())
            print_row(
                f"{row['program']}: {' '.join(row['what'].split())}", figures, None, row["target"]
            )
    return len(missed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--full", action="store_true", help="all sizes and turns, without a limit")
    parser.add_argument("--minutes", type=float, default=9.5, help="limit of a short run")
    a = parser.parse_args()
    if unknown := [name for name in a.names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {', '.join(unknown)}")
    started, outcomes = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        for name in a.names or BENCHMARKS:
            left = None if a.full else 60 * a.minutes - (time.monotonic() - started)
            if left is not None and left <= 0:
                outcomes[name] = "left out: the time was over"
                continue
            options = BENCHMARKS[name].full if a.full else BENCHMARKS[name].short
            outcomes[name] = run_one(name, options, rows, left)
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    missed = print_targets(found)
    for name, outcome in outcomes.items():
        if outcome:
            print(f"bench_{name} {outcome}")
    took = (time.monotonic() - started) / 60
    print(f"{took:.1f} minutes, {missed} missed" + ("" if a.full else "; FULL=1 measures the rest"))
    sys.exit(any(outcome.startswith("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
