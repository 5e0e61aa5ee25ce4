"""Training over several processes: equal to one, and to be stopped, killed and resumed.

What needs several processes is in ranks.py, and is asked once for all; the command is run as users
run it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_commands import TEXT, numbers, run, settings, succeeds
from training import ROOT, step, until

from cheems_lab import checkpoint
from cheems_lab.checkpoint import load_model
from cheems_ref.verify import check

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

SIZES = ["--batch-size", 6, "--seq-len", 16, "--device", "cpu", "--precision", "float32"]


def torchrun(n, *words):
    """n processes, in a group of their own."""
    words = ["--standalone", "--nproc-per-node", n, *words]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
        cwd=ROOT,
        env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONIOENCODING="utf-8"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(started, seconds=200):
    """Its status and what it said; nothing of it goes on."""
    try:
        out, err = started.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    return started.returncode, out, err


def verdicts(script, folder):
    """What a program beside this file says on two processes of the properties that it asks."""
    status, _, err = ended(torchrun(2, Path(__file__).with_name(script), folder))
    assert status == 0, err[-3000:]
    return json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))


def training(folder, *more, name="run"):
    """The arguments of a run, with a text."""
    text = folder / "text"
    text.write_text(TEXT, encoding="utf-8")
    model = ["--pattern", "SEIM", *settings(numbers("SEIM"))]
    return ["train", "--text", text, "--run", folder / name, *SIZES, *model, *more]


def losses_in(folder):
    """Of the last checkpoint in a run's directory, and its evaluations."""
    newest = checkpoint.newest_checkpoint(folder)
    record = checkpoint.read_record(newest)
    tensors = {"losses": torch.empty(record["step"], dtype=torch.float64)}
    checkpoint._load(newest, tensors, torch.nn.Linear(1, 1))
    return tensors["losses"].float(), torch.tensor(record["evaluations"])


# --- several processes ------------------------------------------------------------------------


@pytest.mark.program
def test_what_holds_on_two_processes_and_what_is_caught(tmp_path):
    said = verdicts("ranks.py", tmp_path)
    assert len(said) >= 15, "not all were asked"
    for title, objection in said.items():
        assert bool(objection) == title.startswith("planted: "), f"{title}: {objection!r}"


@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
@pytest.mark.program
def test_the_command_on_two_processes_is_that_on_one_and_ctrl_c_saves(tmp_path):
    """Each line is printed once, and all stop after one update."""
    words = ["--evaluate-every", 5, "--decay-steps", 100, "--checkpoint-every", 7, "--steps"]
    one, two = tmp_path / "one", tmp_path / "two"
    started = torchrun(
        2, "-m", "--", "cheems_lab", *training(tmp_path, *words, 100_000, name="two")
    )
    succeeds(run(*training(tmp_path, *words, 10, name="one")))
    until(lambda: any(two.glob("step-*")) and checkpoint.newest_checkpoint(two).name >= step(14))
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    status, out, err = ended(started)
    newest = checkpoint.newest_checkpoint(two)
    assert status != 0 and err.count("stopping after this step") == 1, err
    assert err.count(f"stopped; the last checkpoint is {newest}") == 1 and "Warning" not in err, err
    assert "2 processes: sharded" in out
    assert out.count("training on ") == out.count("\nstep 5 of") == 1, out
    for got, want in zip(losses_in(two), losses_in(one), strict=True):
        check("two processes as one", got[: len(want)], want, tol=1e-5)
    assert load_model(two).config == load_model(one).config


@pytest.mark.usefixtures("unchecked")
def test_a_connection_that_is_lost_is_said_in_our_words(monkeypatch):
    """Gloo names a line of its source, NCCL a number; a user's own error stays as it is."""
    gloo = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:23: Connection reset by peer"
    for error, message in (
        (RuntimeError(gloo), "cheems: another process of this run has died or cannot be reached"),
        (RuntimeError("NCCL error: remote process exited"), "cheems: another process of this run"),
        (RuntimeError("mat1 and mat2"), "cheems: mat1 and mat2"),
    ):

        def fail(_, error=error):
            raise error

        monkeypatch.setattr("cheems_lab.commands.budget.run", fail)
        done = run("budget", "--pattern", "S")
        assert done.status == 1 and done.err.startswith(message), done.err


# One process of two gets another text, which is not there.
MISLED = """
import os, sys
from cheems_lab.__main__ import main
words = sys.argv[1:]
if os.environ["RANK"] == "1":
    words[words.index("--text") + 1] = "nowhere"
sys.exit(main(words))
"""


@pytest.mark.program
def test_a_process_that_fails_is_named_by_both(tmp_path):
    program = tmp_path / "misled.py"
    program.write_text(MISLED)
    status, _, err = ended(torchrun(2, "--", program, *training(tmp_path, "--steps", 2)))
    lines = [line for line in err.splitlines() if line.startswith("cheems:")]
    assert status != 0 and len(lines) == 2, err[-2000:]
    said = "\n".join(lines)
    assert "cheems: process 1: [Errno 2] No such file" in said, said
    assert "cheems: another process of this run has died or cannot be reached" in said, said
