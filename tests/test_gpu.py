"""`make gpu` without a GPU: every step is walked through, and nothing of it is kept."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "tests/bench/on_gpu.py", "--dry-run"]


@pytest.mark.program
def test_the_rehearsal_walks_through_every_step_and_keeps_nothing():
    records = ROOT / "experiments" / "records"
    before = sorted(records.iterdir())
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = [line for line in done.stdout.splitlines() if line.endswith("status 0")]
    assert [line.partition(":")[0] for line in ended] == ["tests", "kernels", "320m", "1.3b"]
    written = "10_gpu_kernels.json, 10_gpu_320m.json, 10_gpu_1.3b.json"
    assert f"records of the rehearsal: {written}" in done.stdout
    assert " failed: " not in done.stdout
    assert sorted(records.iterdir()) == before
    if not torch.cuda.is_available():
        assert done.stdout.startswith("a dry run on the CPU: no measurements")


def test_make_runs_it():
    command = ["make", "-n", "gpu"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "tests/bench/on_gpu.py" in said.stdout and "pip install" not in said.stdout
