"""What only a machine with a GPU can tell: tests, cross-checks, measurements, in 20 minutes.

    python tests/bench/on_gpu.py [--dry-run]

Step by step, each by itself: one that fails or takes too long does not stop the others, and what it
has measured until then is kept in its record under figures/records. Without a GPU, or asked to,
the steps are walked through on the CPU, tiny and with the kernels in Triton's interpreter, to see
that they run; then nothing is kept.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "figures" / "records"
TESTS = ("tests/test_kernels.py", "tests/test_triton_ssd.py", "tests/test_ssd.py")
BENCH = "tests/bench/bench_efficiency.py"


class Step(NamedTuple):
    """A command, its record if it writes one, the minutes it may take, and how it is rehearsed."""

    what: str
    command: list[str]
    record: str
    minutes: float
    rehearsed: list[str]


def sweep(size, minutes):
    """Whole systems of one size of the papers: throughput, decoding, memory, compiled."""
    options = ["--systems", size, "--turns", "3", "--lengths", "1024", "4096", "16384"]
    options += ["--parts", "rates", "systems", "decoding", "memory", "compiled", "batches"]
    dry = ["--systems", "tiny", "--quick", "--parts", "rates", "systems", "decoding", "memory"]
    return Step(
        f"systems of {size}", [BENCH, *options], f"10_gpu_{size}.json", minutes, [BENCH, *dry]
    )


STEPS = [
    Step(
        "tests",
        ["-m", "pytest", "-q", *TESTS],
        "",
        6,
        ["-m", "pytest", "-q", TESTS[1], "-k", "odd"],
    ),
    Step(
        "kernels side by side",
        ["tests/bench/bench_kernel.py"],
        "10_gpu_kernels.json",
        4,
        ["tests/bench/bench_kernel.py", "--rehearse"],
    ),
    sweep("320m", 4),
    sweep("1.3b", 6),
]


def carry_out(step, folder, dry):
    """Run one step; whether it ended well."""
    command = [sys.executable, *(step.rehearsed if dry else step.command)]
    if step.record:
        command += ["--json", str(folder / step.record)]
    print(f"\n{step.what}: {' '.join(command[1:])}", flush=True)
    start = time.perf_counter()
    try:
        status = subprocess.run(command, cwd=ROOT, timeout=60 * step.minutes).returncode
    except subprocess.TimeoutExpired:
        status = f"stopped after {step.minutes} minutes"
    print(f"{step.what}: {time.perf_counter() - start:.0f} s, status {status}", flush=True)
    return status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="walk through it on the CPU")
    dry = parser.parse_args().dry_run or not torch.cuda.is_available()
    print("a dry run on the CPU: no measurements" if dry else torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if dry else RECORDS
        done = {step.what: carry_out(step, folder, dry) for step in STEPS}
        written = sorted(path.name for path in folder.glob("10_gpu_*.json"))
    print(f"\nrecords {'of the rehearsal' if dry else 'written'}: {', '.join(written) or 'none'}")
    if failed := [what for what, well in done.items() if not well]:
        raise SystemExit(f"did not end well: {', '.join(failed)}")


if __name__ == "__main__":
    main()
