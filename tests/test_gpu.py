"""`make gpu` without a GPU: every step is walked through, and nothing of it is kept."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "tests/bench/on_gpu.py", "--dry-run"]
STEPS = ("tests", "kernels", "320m", "1.3b")


@pytest.fixture(scope="module")
def rehearsal():
    """The output of a dry run, and the names of the project's records before and after."""
    records = ROOT / "figures" / "records"
    before = sorted(records.iterdir())
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, timeout=280)
    return done, before, sorted(records.iterdir())


def test_all_steps_of_the_rehearsal_end_well(rehearsal):
    done, _, _ = rehearsal
    assert done.returncode == 0, done.stdout + done.stderr
    ended = [line for line in done.stdout.splitlines() if line.endswith("status 0")]
    assert [line.partition(":")[0] for line in ended] == list(STEPS)


def test_the_rehearsal_keeps_nothing(rehearsal):
    done, before, after = rehearsal
    assert before == after
    written = "10_gpu_kernels.json, 10_gpu_320m.json, 10_gpu_1.3b.json"
    assert f"records of the rehearsal: {written}" in done.stdout
    assert " failed: " not in done.stdout


def test_make_runs_it():
    said = subprocess.run(
        ["make", "-n", "gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "tests/bench/on_gpu.py" in said.stdout and "pip install" not in said.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_a_rehearsal(rehearsal):
    assert rehearsal[0].stdout.startswith("a dry run on the CPU: no measurements")
