"""What only a machine with a GPU can tell: tests, cross-checks and measurements, in 45 minutes.

    python tests/bench/on_gpu.py [--steps NAME ...] [--to FOLDER] [--dry-run]

Step by step, each by itself: one that fails or takes too long does not stop the others, and what it
has measured until then is kept in its record, under experiments/records if no other folder is
named. A record that is there is gone on with, if it was made by the same settings on the same
machine. Half of the time is for compilers: the first two steps launch mamba-ssm's kernels in
float32, for which each shape is compiled anew, and in all configurations of 16 bits, forward and
backward. A second run finds them in Triton's cache.
Without a GPU, or asked to, the steps are walked through on the CPU, tiny and with the kernels in
Triton's interpreter, to see that they run; then nothing is kept.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[2]
BENCH = "tests/bench/bench_efficiency.py"
PARTS = ("--parts", "rates", "systems", "decoding", "memory", "batches", "compiled")
PYTEST = ("-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider")


class Step(NamedTuple):
    """A command, the minutes it may take, how it is rehearsed, and its record if it writes one."""

    command: tuple[str, ...]
    minutes: float
    rehearsed: tuple[str, ...]
    record: str = ""


def sweep(size, minutes, rehearsed=PARTS):
    """Whole systems of one size of the papers: throughput, decoding, memory, batches, compiled."""
    options = ("--systems", size, "--turns", "3", "--lengths", "1024", "4096", "16384")
    small = (BENCH, "--systems", "tiny", "--quick", *rehearsed)
    return Step((BENCH, *options, *PARTS), minutes, small, f"10_gpu_{size}.json")


TESTS = (*PYTEST, "tests/test_kernels.py", "tests/test_triton_ssd.py", "tests/test_ssd.py")
STEPS = {
    "tests": Step(TESTS, 15, (*TESTS, "--collect-only")),
    "kernels": Step(
        ("tests/bench/bench_kernel.py",),
        15,
        ("tests/bench/bench_kernel.py", "--rehearse"),
        "10_gpu_kernels.json",
    ),
    "320m": sweep("320m", 4.5, rehearsed=PARTS[:-1]),
    "1.3b": sweep("1.3b", 6, rehearsed=PARTS[:2]),
}


def carry_out(name, folder, dry):
    """Run one step; whether it ended well."""
    step, start = STEPS[name], time.perf_counter()
    command = [sys.executable, *(step.rehearsed if dry else step.command)]
    if step.record:
        command += ["--json", str(folder / step.record)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    around = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if dry:
        around["CUDA_VISIBLE_DEVICES"] = ""
    print(f"\n{name}: {' '.join(command[1:])}", flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env=around, start_new_session=True)
    try:
        status = process.wait(timeout=60 * step.minutes)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        process.wait()
        status = f"stopped after {step.minutes} minutes"
    print(f"{name}: {time.perf_counter() - start:.0f} s, status {status}", flush=True)
    return status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME")
    parser.add_argument(
        "--to", type=Path, default=ROOT / "experiments" / "records", metavar="FOLDER"
    )
    parser.add_argument("--dry-run", action="store_true", help="walk through it on the CPU")
    a = parser.parse_args()
    dry = a.dry_run or not torch.cuda.is_available()
    print("a dry run on the CPU: no measurements" if dry else torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if dry else a.to.resolve()
        done = {name: carry_out(name, folder, dry) for name in a.steps}
        there = [STEPS[name].record for name in a.steps if STEPS[name].record]
        there = [record for record in there if (folder / record).exists()]
    print(f"\nrecords {'of the rehearsal' if dry else 'in ' + str(folder)}: {', '.join(there)}")
    if failed := [name for name, well in done.items() if not well]:
        raise SystemExit(f"did not end well: {', '.join(failed)}")


if __name__ == "__main__":
    main()
