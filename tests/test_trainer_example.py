"""examples/train_with_trainer.py: its training equals a loop in torch alone, on one process and on
two; it goes on after a stop, loads as it says, and refuses what it cannot do in one line.

What is asked is in trainer_runs.py.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from planting import mistakes, plant
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_processes import ended, torchrun
from trainer_runs import (
    STEPS,
    evaluates_as_by_hand,
    example,
    goes_on,
    keeps_runs_apart,
    refuses,
    says_how_it_is_loaded,
    says_the_loss_per_byte,
    trains_as_by_hand,
    words,
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

# fmt: off
MISTAKES = mistakes([
    (trains_as_by_hand, {
        "a cosine to 0": [("min_lr_rate=0.1", "min_lr_rate=0.0")],
        "no warm-up": [("warmup_steps=0.1", "warmup_steps=0.0")],
        "more decay": [("weight_decay=0.01", "weight_decay=0.1")],
        "decay on vectors": [("parameter.ndim >= 2", "parameter.ndim >= 1")],
        "OTCE's betas": [("adam_beta2=0.999", "adam_beta2=0.98")],
        "windows in another order": [
            ('train_sampling_strategy="sequential"', 'train_sampling_strategy="random"')],
        "windows from the held-out part": [
            ("training - args.seq_len, (used", "n - args.seq_len, (used")],
        "other weights to start from": [("torch.manual_seed(0)\n", "torch.manual_seed(1)\n")],
        "labels moved twice": [("labels=read)", "labels=read.roll(-1, 1))")]}),
    (evaluates_as_by_hand, {
        "evaluates on what it trains on": [("range(training, n - 1,", "range(0, n - 1,")],
        "windows overlap": [
            ("range(training, n - 1, args.seq_len)", "range(training, n - 1, args.seq_len // 2)")],
        "only at the end": [('eval_strategy="steps"', 'eval_strategy="no"')]}),
    (goes_on, {
        "starts anew": [("resume_from_checkpoint=checkpoint", "resume_from_checkpoint=None")],
        "from the oldest": [("done[max(done)]", "done[min(done)]")],
        "from one that is not whole": [
            ("checkpoint-*/trainer_state.json", "checkpoint-*/config.json")],
        "moments start anew": [("save_only_model=args.sharded", "save_only_model=True")]}),
    (says_how_it_is_loaded, {
        "without a cache": [("model.config.use_cache = True", "pass")],
        "without a tokenizer": [("        byte_tokenizer().save_pretrained(args.out)\n", "")],
        "not the last weights": [("{args.out}\")'", "{args.out}/checkpoint-9\")'")]}),
    (says_the_loss_per_byte, {
        "nats for bits": [("nats / math.log(2)", "nats")]}),
    (keeps_runs_apart, {
        "any directory": [("any(out.iterdir())", "False")],
        "any text": [("text=fingerprint(ids)", "text=None")],
        "any run": [("there.get(name) != value", "False")]}),
    (refuses, "steps must be", "--steps=0", {
        "not looked at": [
            ("        TrainConfig(args.steps, args.batch_size, args.seq_len, args.learning_rate)",
             "        pass")]}),
])
# fmt: on


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


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.asked()}: {m.title}")
def test_a_planted_mistake_is_caught(mistake, tmp_path):
    with pytest.raises(AssertionError):
        mistake.has_property(plant(example, *mistake.edits), tmp_path, *mistake.arguments)


def test_what_holds_on_two_processes_and_what_is_caught(tmp_path):
    status, _, err = ended(torchrun(2, Path(__file__).with_name("trainer_runs.py"), tmp_path))
    assert status == 0, err[-3000:]
    verdicts = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))
    planted = {title: said for title, said in verdicts.items() if ": " in title}
    held = {title: said for title, said in verdicts.items() if title not in planted}
    assert len(held) >= 9 and len(planted) >= 5
    assert not any(held.values()), held
    assert all(planted.values()), [title for title, said in planted.items() if not said]


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


def test_tensorboard_is_asked_for_and_may_lack(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    refuses(example, tmp_path, "--tensorboard needs more: pip install", "--tensorboard")
    example.main(words(tmp_path, "--steps=1"))
    assert not [*tmp_path.rglob("events.out.*")]


def test_tensorboard_has_what_the_trainer_logs(tmp_path):
    trainer = example.main(words(tmp_path, "--tensorboard"))
    (events,) = {path.parent for path in tmp_path.rglob("events.out.*")}
    logged = EventAccumulator(str(events)).Reload()
    losses = [event.value for event in logged.Scalars("train/loss")]
    want = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == STEPS and losses == pytest.approx(want)
    assert logged.Scalars("eval/loss")


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
