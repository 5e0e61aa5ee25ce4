"""examples/train_with_trainer.py: its training equals a loop in torch alone, on one process and on
two; it goes on after a stop, loads as it says, and refuses what it cannot do in one line.

What is asked is in trainer_runs.py.
"""

import json
import re
from pathlib import Path

import pytest
from test_processes import ended, torchrun
from trainer_runs import (
    evaluates_as_by_hand,
    example,
    goes_on,
    keeps_runs_apart,
    refuses,
    says_how_it_is_loaded,
    says_the_loss_per_byte,
    trains_as_by_hand,
)

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it

HELD = [
    trains_as_by_hand,
    evaluates_as_by_hand,
    goes_on,
    says_how_it_is_loaded,
    says_the_loss_per_byte,
    keeps_runs_apart,
]

# What is asked for, beside a small run, and what is said.
REFUSED = {
    "no steps": (["--steps", "0"], "steps must be at least 1, got 0"),
    "no windows": (["--batch-size", "0"], "batch_size must be at least 1"),
    "no learning": (["--learning-rate", "nan"], r"learning_rate must be a number in \(0, inf\)"),
    "a letter that is none": (["--pattern", "SEQ"], "Q"),
    "a text that is too short": (["--seq-len", "6000"], "6008 bytes: too few for .* = 6001"),
    "too few windows apart": (["--batch-size", "40"], "batch_size = 40"),
    "a text that is not there": (["--text", "nowhere"], "nowhere"),
    "one process, sharded": (["--sharded"], "start with torchrun"),
}


@pytest.mark.parametrize("has_property", HELD, ids=lambda p: p.__name__)
def test_the_example(has_property, tmp_path):
    has_property(example, tmp_path)


def test_what_holds_on_two_processes(tmp_path):
    status, _, err = ended(torchrun(2, Path(__file__).with_name("trainer_runs.py"), tmp_path))
    assert status == 0, err[-3000:]
    verdicts = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))
    assert len(verdicts) >= 9 and not any(verdicts.values()), verdicts


@pytest.mark.parametrize(("more", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, more, message):
    refuses(example, tmp_path, message, *more)


def test_windows_are_shared_out_evenly_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    refuses(example, tmp_path, "batch_size = 4 must be a multiple of processes = 3")


def test_a_sharded_run_that_cannot_go_on_is_left_as_it_is(tmp_path):
    run = dict(sharded=True)
    assert example.newest(tmp_path / "run", run) is None
    (tmp_path / "run" / "checkpoint-3").mkdir()
    (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").touch()
    with pytest.raises(ValueError, match="cannot go on"):
        example.newest(tmp_path / "run", run)


def test_several_gpus_take_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(example.TrainingArguments, "n_gpu", 2)
    refuses(example, tmp_path, "several GPUs")


def test_its_commands_are_those_that_it_takes(capsys):
    """And several processes are started by torchrun."""
    commands = re.findall(r"^    ((?:python|torchrun) .*)$", example.__doc__, re.M)
    assert len(commands) == 3
    for command in commands:
        program, _, options = command.partition("examples/train_with_trainer.py ")
        assert program in ("python ", "torchrun --nproc-per-node 2 ")
        assert ("--sharded" in options) <= (program != "python ")
        with pytest.raises(SystemExit):
            example.main([*options.split(), "--steps", "0"])
        assert "steps must be at least 1" in capsys.readouterr().err
