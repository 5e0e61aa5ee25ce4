"""The `cheems` command: train and generate, what they print, reject and resume."""

import argparse
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from training import Broken, Screen, content, names, process, record_of, same, step, tensors_of

import cheems_ref
from cheems_lab import files, memory, options, progress
from cheems_lab.__main__ import main
from cheems_lab.checkpoint import load_model
from cheems_lab.commands import generate as generate_command
from cheems_lab.commands import train as train_command
from cheems_lab.options import is_used, users
from cheems_lab.parser import add_model
from cheems_lab.training import train
from cheems_ref.budget import training_memory
from cheems_ref.config import ModelConfig, make_layer, preset
from cheems_ref.model import CausalLM, Sampling, generate
from cheems_ref.text import ids_to_text, read_text, text_to_ids
from cheems_ref.train import TrainConfig

TEXT = "the café sat on the mat, and the dog lay on the log. " * 20
NUMBERS = dict(d_model=16, n_heads=2, d_ff=16, d_state=4, chunk_size=8, n_values=4, d_query=8)
SHORT = ["--steps", "4", "--batch-size", "2", "--seq-len", "16", "--device", "cpu"]

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it


# --- running a command in this process; other files import these functions ------------------------


class Done(NamedTuple):
    status: int
    out: str
    err: str
    screen: Screen


def run(*words, terminal=False):
    """A command in this process, as a shell would see it."""
    out, err = Screen(terminal), Screen(terminal)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
    return Done(status, out.getvalue(), err.getvalue(), out)


def numbers(pattern):
    """The sizes of a small model that its pattern uses."""
    config = ModelConfig(pattern=pattern)
    return {name: n for name, n in NUMBERS.items() if is_used(name, config)}


def settings(changes):
    return [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]


def training(folder, *more, pattern="AM", name="run"):
    """The arguments of a run of 4 steps on a text of a thousand bytes."""
    text = folder / "text"
    folder.mkdir(exist_ok=True)
    text.write_text(TEXT, encoding="utf-8")
    given = {word.partition("=")[0] for word in map(str, more)}
    sizes = numbers(pattern or "SESESEIE").items()
    sizes = settings({name: n for name, n in sizes if name not in given})
    pattern = ["--pattern", pattern] if pattern else []
    return ["train", "--text", text, "--run", folder / name, *SHORT, *pattern, *sizes, *more]


def succeeds(done):
    assert done.status == 0 and not done.err, f"status {done.status}: {done.err}"
    return done


def fails(done, message, status=1):
    """One line on standard error, and no traceback."""
    assert done.status == status, f"status {done.status}, not {status}: {done.err or done.out}"
    assert re.search(message, done.err), f"{message!r} is not in: {done.err!r}"
    assert done.err.startswith("cheems: ") and done.err.count("\n") == 1, done.err
    return done


def record(folder, name="run"):
    return record_of(max((folder / name).glob("step-*")))


def pasted(printed, before):
    """The arguments of a command that is printed, as a shell takes it."""
    program, *words = shlex.split(re.search(f"^{before}(.*)$", printed, re.M)[1])
    assert program == "cheems"
    return words


def examples_in(shown):
    """The commands that a help text gives as examples."""
    lines = re.findall(r"^  cheems (.*)$", shown, re.MULTILINE)
    return [shlex.split(re.sub(r" {3}\(.*| > .*", "", line)) for line in lines]


@contextlib.contextmanager
def struck(*steps, number=signal.SIGINT, where=train_command):
    """A signal during each of these steps of a run, before it can be answered."""

    def train_it(*words, after_step=lambda run: None, **how):
        def strike(run):
            if run.step in steps:
                os.kill(os.getpid(), number)
            after_step(run)

        return train(*words, **how, after_step=strike)

    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # it may have been ignored
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, "train", train_it)
            yield
            assert signal.getsignal(number) is usual, "the handler of the run stays"
    finally:
        signal.signal(number, before)


# --- train ----------------------------------------------------------------------------------------


def test_train_prints_sizes_first_and_the_loss_last(tmp_path):
    where = tmp_path / "my run"
    words = ("--eval-fraction", 0.25, "--steps", 3, "--set", "k_experts=1")
    done = succeeds(run(*training(tmp_path, *words, name=where.name, pattern="AR")))
    model, n_bytes = load_model(where), len(TEXT.encode("utf-8"))
    kept = n_bytes - math.ceil(n_bytes / 4)
    nats = record(tmp_path, where.name)["evaluations"][-1][1]
    routed = sum(p.numel() for p in make_layer("R", model.config).experts.parameters())
    n = sum(p.numel() for p in model.parameters())
    for part in (
        f"AR: {n:,} parameters, {n - routed * 3 // 4:,} active per byte; cpu\n",
        f"{kept:,} bytes to train on, {n_bytes - kept:,} held out; 32 per step, 3 steps\n",
        f"held-out loss {nats:.3f} nats = {nats / math.log(2):.3f} bits per byte after step 3\n",
        f"saved in {where / step(3)} (the last two checkpoints are kept)\n",
    ):
        assert part in done.out, f"{part!r} is not in: {done.out}"
    assert "resuming" not in done.out and "finished" not in done.out
    assert succeeds(run(*pasted(done.out, "next: "), "--device", "cpu")).out.startswith("Once")


def test_every_option_reaches_the_run(tmp_path):
    """And its record, and losses.csv; the seed is that of the weights too."""
    given = dict(steps=3, batch_size=3, seq_len=12, learning_rate=0.01, eval_fraction=0.2, seed=5)
    given |= dict(evaluate_every=2, precision="bfloat16", decay_steps=2, micro_batch_size=2)
    words = [w for k, v in given.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    succeeds(run(*training(tmp_path, *words, "--checkpoint-every", 1)))
    options = dict(text=str(tmp_path / "text"), checkpoint_every=1)
    assert record(tmp_path)["options"] == options
    assert record(tmp_path)["training"] == json.loads(json.dumps(vars(TrainConfig(**given))))
    torch.manual_seed(5)
    model = CausalLM(ModelConfig(pattern="AM", **numbers("AM")))
    want = train(model, text_to_ids(TEXT), TrainConfig(**given), progress_bar=False)
    assert record(tmp_path)["losses"] == want.losses, "not the run of this model with this seed"
    assert names(tmp_path / "run") == ["losses.csv", step(2), step(3)]
    with (tmp_path / "run" / "losses.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert [float(row["loss"]) for row in rows] == pytest.approx(want.losses, rel=1e-5)
    assert [bool(row["held_out"]) for row in rows] == [False, True, True]


# The pattern, a setting, and what they change in the configuration.
CHANGES = [
    (None, "pattern=SEIE", dict(pattern="SEIE")),
    ("SM + AM", None, dict(pattern="SMAM")),
    ("S", "position=conv", dict(position="conv")),
    ("A", "n_kv_heads=null", {}),
    ("A", "rope_base=500.5", dict(rope_base=500.5)),
    ("A", "tie_embeddings=False", dict(tie_embeddings=False)),
]


def model_of(*words):
    """The configuration that the options of a model describe."""
    parser = argparse.ArgumentParser()
    add_model(parser.add_argument)
    return options.model_config(parser.parse_args([str(word) for word in words]))


def test_set_takes_words_json_and_python_and_changes_a_preset():
    for pattern, setting, changes in CHANGES:
        sizes = numbers(pattern or "SESESEIE")
        given = ["--pattern", pattern] * bool(pattern) + ["--set", setting] * bool(setting)
        want = ModelConfig(**dict(pattern=pattern, **sizes) | changes)
        assert model_of(*given, *settings(sizes)) == want, f"{pattern}, {setting}"
    assert model_of("--preset", "cheems-tiny") == preset("cheems-tiny")
    sizes = NUMBERS | dict(pattern="SEIE", n_neurons=16)
    want = dataclasses.replace(preset("cheems-320m"), **sizes, vocab_size=256)
    assert model_of("--preset", "cheems-320m", *settings(sizes)) == want


# --- stopping and resuming ------------------------------------------------------------------------


def same_run(folder, *runs):
    """Whether the newest checkpoints of two runs hold the same numbers."""
    one, other = (max((folder / name).glob("step-*")) for name in runs)
    same("two runs", tensors_of(one), tensors_of(other))


def logged_losses(folder, name):
    """The lines of losses.csv, without the last column."""
    lines = (folder / name / "losses.csv").read_text().splitlines()
    return [line.rsplit(",", 1)[0] for line in lines]


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
def test_a_signal_saves_and_the_run_resumes_from_its_directory_alone(tmp_path):
    succeeds(run(*training(tmp_path, "--steps", 6, name="whole")))
    every = ("--steps", 6, "--checkpoint-every", 2, "--evaluate-every", 2)
    for number in (signal.SIGINT, signal.SIGTERM):
        name = number.name
        with struck(5, number=number):
            done = run(*training(tmp_path, *every, name=name))
        assert done.status == 130, f"{name}: status {done.status}: {done.err}"
        kept = tmp_path / name / step(5)
        assert f"stopped; the last checkpoint is {kept}\n" in done.err, done.err
        words = pasted(done.err, "to resume: ")
        assert words == ["train", "--run", str(tmp_path / name)]
        again = succeeds(run(*words, "--device", "cpu"))
        assert f"resuming from {kept}, after 5 of 6 steps\n" in again.out, again.out
        same_run(tmp_path, name, "whole")
        assert logged_losses(tmp_path, name) == logged_losses(tmp_path, "whole")


class Killed(BaseException):
    """What a kill is to a process: nothing is saved."""


@contextlib.contextmanager
def killed_in_the_next_save():
    """A run that ends as if killed when it first wants to write a checkpoint."""

    def kill(*_):
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr("cheems_lab.training.save", kill)
        yield


def test_a_run_killed_before_its_first_checkpoint_starts_again_from_its_options(tmp_path):
    succeeds(run(*training(tmp_path, "--seed", 3, name="whole")))
    with killed_in_the_next_save():
        run(*training(tmp_path, "--seed", 3))
    assert names(tmp_path / "run") == ["losses.csv", "options.json"]
    succeeds(run("train", "--run", tmp_path / "run", "--device", "cpu"))
    same_run(tmp_path, "run", "whole")
    fails(run("train", "--run", tmp_path / "run", "--text", tmp_path / "gone"), "No such file")


def test_the_second_ctrl_c_stops_at_once(tmp_path, monkeypatch):
    def strike_twice(*_, at_start, **__):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it does not stop")

    with struck():
        monkeypatch.setattr(train_command, "train", strike_twice)
        done = run(*training(tmp_path))
    assert done.status == 130 and "the last checkpoint is not there yet\n" in done.err, done.err


def test_a_finished_run_says_so_and_trains_longer_with_its_schedule(tmp_path):
    """Also at other intervals."""
    command = training(tmp_path, "--checkpoint-every", 3)
    first = succeeds(run(*command))
    files = content(tmp_path / "run")
    again = succeeds(run(*command))
    text = f"{tmp_path / 'run'} is finished: 4 steps are done; --steps N trains on\n"
    assert text in again.out and "resuming" not in again.out, again.out
    assert again.out.split("held-out loss")[1] == first.out.split("held-out loss")[1]
    assert content(tmp_path / "run") == files, "a finished run is written to"
    words = ["--run", tmp_path / "run", "--steps", 7, "--evaluate-every", 1]
    longer = succeeds(run("train", *words, "--checkpoint-every", 6, "--device", "cpu"))
    assert f"resuming from {tmp_path / 'run' / step(4)}, after 4 of 7 steps\n" in longer.out
    assert names(tmp_path / "run")[1:] == [step(6), step(7)]
    assert [pair[0] for pair in record(tmp_path)["evaluations"]] == [4, 5, 6, 7]
    succeeds(run(*training(tmp_path, "--steps", 7, "--decay-steps", 4, name="whole")))
    same_run(tmp_path, "run", "whole")
    fails(run(*command), "--steps 4 is too few: 7 are done in")


def test_a_resumed_run_switches_off_what_it_was_started_with(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(CausalLM, "compile", lambda model: compiled.append(model))
    succeeds(run(*training(tmp_path, "--sample-every", 1, "--compile")))
    again = ["train", "--run", tmp_path / "run", "--device", "cpu", "--steps"]
    assert "--- step 5" in succeeds(run(*again, 5)).out and len(compiled) == 2
    off = succeeds(run(*again, 6, "--no-compile", "--sample-every", 0)).out
    assert "--- step" not in off + succeeds(run(*again, 7)).out and len(compiled) == 2
    with killed_in_the_next_save():  # and what was changed last holds, saved or not
        run(*again, 8, "--compile", "--sample-every", 1)
    assert "--- step 8" in succeeds(run(*again[:-1])).out and len(compiled) == 4


def test_an_extension_that_dies_before_its_first_checkpoint_resumes_toward_its_end(tmp_path):
    succeeds(run(*training(tmp_path)))
    again = ["train", "--run", tmp_path / "run", "--device", "cpu"]
    with killed_in_the_next_save():
        run(*again, "--steps", 7, "--evaluate-every", 2)
    done = succeeds(run(*again))
    assert f"resuming from {tmp_path / 'run' / step(4)}, after 4 of 7 steps\n" in done.out
    assert "finished" not in done.out
    succeeds(run(*training(tmp_path, "--steps", 7, "--decay-steps", 4, name="whole")))
    same_run(tmp_path, "run", "whole")
    assert [pair[0] for pair in record(tmp_path)["evaluations"]] == [4, 6, 7]
    with killed_in_the_next_save():
        run(*again, "--steps", 9)
    assert "is finished: 7 steps" in succeeds(run(*again, "--steps", 7)).out  # thought better of it
    assert "is finished: 7 steps" in succeeds(run(*again)).out


def test_a_mistyped_directory_starts_nothing(tmp_path, monkeypatch):
    """Neither another model nor another text; a text, a pattern or a preset starts a run."""
    monkeypatch.chdir(tmp_path)
    succeeds(run(*training(tmp_path)))
    for more in ([], ["--steps", 2000], ["--set", "d_model=16", "--seed", 1]):
        said = "there is no run in rum to resume; to start one, give --text FILE, --pattern or"
        fails(run("train", "--run", "rum", *more), said, status=2)
    assert not (tmp_path / "rum").exists()
    sizes = settings(numbers("SESESEIE"))
    done = run("train", "--run", "rum", "--text", "manual", *SHORT, *sizes, "--steps", 1)
    assert "training on Python's own manual, in rum\n" in succeeds(done).out
    assert "text" not in record(tmp_path, "rum")["options"]
    assert "Python's own manual" in succeeds(run("train", "--run", "rum", "--device", "cpu")).out


def test_damaged_options_and_a_text_that_has_moved_are_named(tmp_path):
    succeeds(run(*training(tmp_path)))
    again, file = ["train", "--run", tmp_path / "run"], tmp_path / "run" / "options.json"
    model, plan = record(tmp_path)["model"], record(tmp_path)["training"]
    good = dict(options={}, model=model, training=plan)
    texts = ["", "[", "[" * 100_000, "5", "[]", "{}", json.dumps(good | dict(model=5))]
    texts += [
        json.dumps(good | dict(training=plan | dict(steps="x"))),
        json.dumps({**good, "options": 5}),
    ]
    for text in texts:
        file.write_text(text)
        fails(
            run(*again),
            rf"{file} is damaged .*; remove it to resume with the settings of .*{step(4)}",
        )
        file.unlink()
    for wrong in (dict(text=5), dict(sample_every="x"), dict(compile="yes"), dict(more=1)):
        file.write_text(json.dumps(good | dict(options=wrong)))
        fails(run(*again), f"the settings of .* have {next(iter(wrong))} = ")
    file.unlink()
    (tmp_path / "text").rename(tmp_path / "moved")
    fails(run(*again), "text, the text of this run, is not there; if it has moved, --text FILE")
    succeeds(run(*again, "--text", tmp_path / "moved", "--device", "cpu"))


# --- output that fails ----------------------------------------------------------------------------


def tried(screen, err, *words):
    """The status of a command that prints to a screen of the test's own."""
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(err):
        return main([str(word) for word in words])


def test_output_that_fails_costs_no_step(tmp_path, monkeypatch):
    """A closed pipe, a full disk, a closed terminal, a full losses.csv: saved first, then told."""
    succeeds(run(*training(tmp_path, name="whole")))
    full = OSError(28, "No space left on device")
    for name, error, word, steps in (
        ("pipe", BrokenPipeError(32, "Broken pipe"), "step 2 of", 2),
        ("disk", full, "--- step 3", 3),
        ("closed", ValueError("I/O operation on closed file"), "step 1 of", 1),
    ):
        words = training(tmp_path, "--evaluate-every", 2, "--sample-every", 3, name=name)
        screen, err, saved = Broken(error, word), Screen(), tmp_path / name / step(steps)
        assert tried(screen, err, *words) == 1 and saved.exists(), err.getvalue()
        said = f"the run has stopped after step {steps}, saved in {saved}\n"
        assert err.getvalue().endswith(said) and str(error) in err.getvalue(), err.getvalue()
    succeeds(run(*training(tmp_path, name="pipe")))
    same_run(tmp_path, "pipe", "whole")

    def append(path, text):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(progress, "append_text", append)
        said = (
            r"No space left on device: '.*losses\.csv'; the run has stopped after step 1, saved in"
        )
        fails(run(*training(tmp_path, name="losses")), said)
    assert (tmp_path / "losses" / step(1)).exists()


def test_a_terminal_that_is_closed_with_its_signal_loses_nothing(tmp_path):
    """SIGHUP comes in a step that prints, and neither output can be written any more."""
    words = training(tmp_path, "--evaluate-every", 1)
    closed = OSError(5, "Input/output error")
    with struck(2, number=signal.SIGHUP):
        status = tried(Broken(closed, "step 2 of"), Broken(closed, ""), *words)
    assert status == 1 and (tmp_path / "run" / step(2)).exists()


def test_errors_of_files_name_the_file(tmp_path, monkeypatch):
    """A full disk under options.json or losses.csv, which the system's own message doesn't name."""
    for file in ("options.json", "losses.csv"):
        opened = files.open_text

        def full(path, mode, file=file, opened=opened):
            if file in path.name:
                raise OSError(28, "No space left on device")
            return opened(path, mode)

        with monkeypatch.context() as patch:
            patch.setattr(files, "open_text", full)
            done = run(*training(tmp_path, name=file[:3]))
        fails(done, rf"No space left on device: '.*{file}'$")
        assert not [*(tmp_path / file[:3]).glob("*partial*")]


@pytest.mark.skipif(os.name == "nt", reason="links take a right there")
def test_nothing_is_written_through_a_link(tmp_path):
    """losses.csv as a link to another file: it is replaced, and the other file stays."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run").mkdir()
    for name in ("losses.csv", ".losses.csv.partial", "options.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / "losses.csv").symlink_to(tmp_path / "victim")
    succeeds(run(*training(tmp_path)))
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "run" / "losses.csv").is_symlink()
    (tmp_path / "run" / ".losses.csv.partial").symlink_to(tmp_path / "victim")
    assert run(*training(tmp_path, "--steps", 5)).status == 1
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_screen_without_the_letters_shows_question_marks(tmp_path, tiny_run):
    """By main(), which the installed script calls: every command that prints such letters."""
    for encoding in ("cp1252", "cp437", "ascii", "gbk"):
        for words in (
            ["budget", "--pattern", "SM"],
            [
                "generate",
                "--run",
                tiny_run,
                "--device",
                "cpu",
                "--prompt",
                "é — ☃ \N{REPLACEMENT CHARACTER}",
            ],
            training(tmp_path, "--sample-every", 2, name=encoding),
        ):
            out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
            err = Screen()
            assert tried(out, err, *words) == 0, f"{encoding}: {err.getvalue()}"
            out.flush()
            assert out.buffer.getvalue().decode(encoding)


def test_a_clock_that_stands_still_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: 5.0)
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    done = run(*training(tmp_path, "--progress-bar"))
    assert done.status == 0 and "4/4" in done.err and "/s" not in done.err.split("tokens")[-1][:9]


def test_a_bar_that_cannot_be_drawn_is_switched_off(tmp_path, monkeypatch):
    """Drawn as often as it may be, it fails at the second step; nothing is drawn afterwards."""
    drawn = []

    def draw(bar, n=1):
        drawn.append(n)
        if len(drawn) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("cheems_ref.train.tqdm.update", draw)
    done = run(*training(tmp_path, "--progress-bar"))
    assert done.status == 0 and (tmp_path / "run" / step(4)).exists(), done.err
    assert "4/4" not in done.err


# --- errors of our own ----------------------------------------------------------------------------


def test_a_bug_can_be_traced(monkeypatch):
    """One line without CHEEMS_TRACEBACK; with it, the error itself."""

    def buggy(error, monkeypatch=monkeypatch):
        def fail(_):
            raise error

        monkeypatch.setattr(generate_command, "run", fail)
        return ["generate", "--run", "nowhere"]

    said = r"a bug of cheems, please report it: {}: .*\(test_commands.py, line \d+\); CHEEMS_"
    bugs = [KeyError("x"), AttributeError("no such"), IndexError("out"), RecursionError("deep")]
    for error in bugs:
        fails(run(*buggy(error)), said.format(type(error).__name__))
    users = [ValueError("a value"), TypeError("a type"), OSError("a file"), RuntimeError("torch's")]
    for error in users:
        fails(run(*buggy(error)), f"^cheems: {error}$")
    monkeypatch.setenv("CHEEMS_TRACEBACK", "1")
    for error in bugs + users:
        with pytest.raises(type(error)):
            run(*buggy(error))


def test_an_error_in_the_options_themselves_is_no_traceback(monkeypatch):
    def fail(*_):
        raise RecursionError("too deep")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", fail)
    fails(run("budget"), "a bug of cheems, please report it: RecursionError: too deep")


# --- what is shown --------------------------------------------------------------------------------


def test_there_is_a_bar_or_there_are_lines(tmp_path, monkeypatch):
    """Lines after the first step, an evaluation, and half a minute of silence."""
    for i, (words, terminal, bar) in enumerate(
        (([], True, True), (["--progress-bar"], False, True), (["--no-progress-bar"], True, False))
    ):
        done = run(*training(tmp_path, *words, name=str(i)), terminal=terminal)
        assert done.status == 0 and ("4/4" in done.err) is bar, words
        assert ("\nstep 4 of 4: " in done.out) is not bar, done.out
    clock = itertools.count(0, 10)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    done = succeeds(run(*training(tmp_path, "--steps", 9, "--evaluate-every", 6)))
    losses, held_out = record(tmp_path)["losses"], dict(record(tmp_path)["evaluations"])
    lines = [f"step 1 of 9: loss {losses[0]:.3f} nats"]
    lines += [
        f"step 6 of 9: loss {losses[5]:.3f}, held out {held_out[6]:.3f} nats; 3 bytes/s, about"
    ]
    assert re.findall(r"^step (\d)", done.out, re.M) == ["1", "4", "6", "9"]
    for line in lines:
        assert any(line in shown.splitlines()[-1] for shown in done.screen.flushed if shown), line


def test_samples_do_not_change_the_run_and_compile_compiles(tmp_path, monkeypatch):
    done = succeeds(run(*training(tmp_path, "--sample-every", 2)))
    assert re.findall(r"^--- step (\d)$", done.out, re.M) == ["2", "4"]
    compiled = []
    monkeypatch.setattr(CausalLM, "compile", lambda model: compiled.append(model))
    succeeds(run(*training(tmp_path, "--compile", name="plain")))
    same_run(tmp_path, "run", "plain")
    assert len(compiled) == 1 and compiled[0].config.pattern == "AM"
    longer = ["--steps", 6, "--device", "cpu"]  # a resumed run keeps both options
    assert "--- step 6" in succeeds(run("train", "--run", tmp_path / "run", *longer)).out
    succeeds(run("train", "--run", tmp_path / "plain", *longer))
    assert len(compiled) == 2


# --- generate -------------------------------------------------------------------------------------


def generating(of, *more):
    return run("generate", "--run", of, "--device", "cpu", "--max-new-tokens", 40, *more)


def test_generate_writes_what_the_model_does(tiny_run):
    model = load_model(tiny_run)
    for words, prompt, how in (
        ((), "\n", {}),
        (("--prompt", "the café", "--temperature", 0), "the café", dict(temperature=0)),
        (("--top-k", 3, "--top-p", 0.9), "\n", dict(top_k=3, top_p=0.9)),
        (("--max-new-tokens", 7, "--prompt", "a"), "a", dict(n=7)),
    ):
        n, how = how.pop("n", 40), dict(temperature=0.8) | how
        generator, ids = torch.Generator().manual_seed(3), text_to_ids(prompt)[None]
        want = generate(model, ids, n, Sampling(generator=generator, **how))[0]
        done = succeeds(generating(tiny_run, "--seed", 3, *words))
        assert done.out == prompt + ids_to_text(want) + "\n", f"{words}: {done.out!r}"
    named = succeeds(generating(tiny_run / step(1), "--temperature", 0))
    assert named.out == generating(tiny_run, "--temperature", 0).out
    assert generating(tiny_run).out != generating(tiny_run).out, "without a seed"


def test_characters_are_never_torn(tiny_run, monkeypatch):
    """A character of several bytes is shown with its last byte; half of one as a mark."""
    for data, want in (
        ("é😀".encode(), ["a", "", "é", "", "", "", "😀", "\n"]),
        ("xé".encode()[:2], ["a", "x", "", "\N{REPLACEMENT CHARACTER}\n"]),
        (b"\xff!", ["a", "\N{REPLACEMENT CHARACTER}", "!", "\n"]),
    ):
        monkeypatch.setattr(
            generate_command, "stream", lambda *_, data=data, **__: map(torch.tensor, zip(data))
        )
        screen = succeeds(generating(tiny_run, "--prompt", "a")).screen
        assert screen.writes == want, f"{data} is written as {screen.writes}"
        for n in range(2, len(want)):
            assert "".join(want[:n]) in screen.flushed, f"{want[n - 1]!r} is shown too late"


def test_a_reader_who_leaves_is_no_error(tiny_run):
    """As `| head` does."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as out, contextlib.redirect_stdout(out):
        assert main(["generate", "--run", str(tiny_run), "--device", "cpu"]) == 141


# --- what is rejected -----------------------------------------------------------------------------

# fmt: off
OPTIONS = [  # with status 2, before a file is looked at
    ("eat", "no command is named 'eat'; there are train"),
    ("train --run r --layers 3", "unrecognized option --layers$"),
    ("train --run r --steps 0", "--steps.*: must be at least 1, got 0"),
    (f"train --run r --seed {10**20}", r"must be at least -9.* and at most 18.*, got 10{20}$"),
    ("train --run r --set n_heads", "--set.*: takes NAME=VALUE, 'n_heads' is not"),
    ("train --run r --set d_modle=3", "'d_modle'; did you mean d_model.; there are .*d_model"),
    ("generate --run r --top-p 1.5", r"--top-p: must be in \(0, 1\], got 1\.5$"),
    ("generate --run r --top-k 0", "--top-k.*: must be at least 1 and at most 256, got 0"),
]
SETTINGS = [
    ("--preset cheems-tiny --pattern AM", "--preset or --pattern, not both"),
    ("--pattern AM --set pattern=SM", "--pattern or --set pattern="),
    ("--set n_heads=3", r"letter S .*d_model = 16 .* n_heads = 3"),
    ("--set vocab_size=50257", "vocab_size: .* reads bytes, it is 256"),
    ("--set pattern=SE --set mask=content", "--set .* no effect on SE: it is for I"),
    ("--set d_conv=3", "d_conv has no effect .* for S with position=c"),
    ("--seq-len 2000", "1080 tokens: too few for .* 2001"),
    (f"--batch-size {10**11}", r"needs .*B of memory .*cpu has [\d.]+ GB free: take"),
    ("--device abacus", "--device abacus cannot be used here; there is cpu"),
    ("--text nowhere.txt", "No such file or directory: .*nowhere.txt"),
    ("--text ../empty", "empty is empty"),
    ("--text ../latin", "latin is not UTF-8 text: byte 3"),
    ("--parallel data", "start with torchrun"),
]
GENERATING = [
    ("--run nowhere", "no checkpoint at nowhere"),
]
# fmt: on


def test_what_is_wrong_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, tiny_run):
    (tmp_path / "here").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes("café".encode("latin-1") * 300)
    monkeypatch.chdir(tmp_path / "here")
    for words, message in OPTIONS:
        fails(run(*words.split()), message, status=2)
    for words, message in SETTINGS:
        fails(run(*training(tmp_path, *words.split(), pattern=None)), message)
    for words, message in GENERATING:
        done = fails(generating(tiny_run, *words.split()), message)
        assert not done.out, "something is printed"
    assert not (tmp_path / "run").exists() and not names(Path.cwd()), "something is written"


def test_a_run_that_cannot_go_on_or_diverges_is_one_line(tmp_path):
    """Nothing says that it resumes; what to do is said."""
    command = training(tmp_path)
    succeeds(run(*command))
    other = training(tmp_path, "--set", "d_ff=8")
    done = fails(run(*other), r"d_ff \(16, now 8\). Resume with its settings")
    assert "resuming" not in done.out
    (tmp_path / "run" / step(4) / "record.json").write_bytes(b"")
    for words in (command, ["generate", "--run", tmp_path / "run"]):
        fails(run(*words), f"{step(4)} is damaged.* There is none before it: start again")
    fails(run(*training(tmp_path, name="text")), "exists: .*text")
    words = training(tmp_path, "--learning-rate", 1e9, pattern="SM", name="other")
    fails(run(*words), r"diverged in update 2: .*a smaller learning_rate than 1e\+09")


def test_memory_is_checked_before_any_is_taken(monkeypatch):
    """By the sum that `cheems budget` prints, for the windows that are read at a time."""
    config, cpu = ModelConfig("SE × 2", d_model=64), torch.device("cpu")
    plan = TrainConfig(batch_size=6, seq_len=8, micro_batch_size=2)
    whole = dataclasses.replace(plan, micro_batch_size=None)
    assert 0 < memory.free_memory(cpu) < 2**45
    needed = training_memory(config, 8, batch=2).total()
    said = r"needs .* free: take a smaller model, --micro-batch-size, --batch-size or"
    for free, fit, fails in (
        (needed, (plan, cpu), (whole, cpu)),
        # Of three processes on a CPU each takes its share, and all of them take it.
        (3 * needed, (whole, cpu, 3, "data"), (whole, cpu, 4, "data")),
    ):
        monkeypatch.setattr(memory, "free_memory", lambda _, free=free: free)
        memory.check_memory(config, *fit)
        with pytest.raises(ValueError, match=said):
            memory.check_memory(config, *fails)
    monkeypatch.setattr(memory, "free_memory", lambda _: needed - 1)
    with pytest.raises(ValueError, match=said):
        memory.check_memory(config, plan, cpu)


def test_a_short_text_is_refused_before_memory_is_estimated(tmp_path, monkeypatch):
    def estimate(*_, **__):
        raise AssertionError("the memory is estimated first")

    monkeypatch.setattr(memory, "training_memory", estimate)
    message = r"1080 tokens: too few for windows of seq_len \+ 1 = 1000000001"
    fails(run(*training(tmp_path, "--seq-len", 10**9)), message)
    words = ["compare", "--run", tmp_path / "c", "--text", tmp_path / "text", "--row", "a=S"]
    fails(run(*words, "--seq-len", 10**9), message)


def test_memory_counts_the_text(tmp_path, monkeypatch):
    """By its size on the disk: nothing of it is read."""
    config, plan, cpu = ModelConfig("S", d_model=32), TrainConfig(seq_len=8), torch.device("cpu")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10**10)  # a hole, which takes no disk
    size = memory.check_text(tmp_path / "large", plan)
    assert size == 10**10 and memory.check_text(None, plan) == 0
    assert memory.check_text(tmp_path, plan) == 4 * 10**10
    needed = training_memory(config, 8, batch=plan.batch_size).total()
    monkeypatch.setattr(memory, "free_memory", lambda _: needed + size)
    memory.check_memory(config, plan, cpu, text_bytes=size)
    with pytest.raises(ValueError, match="the text 10 GB"):
        memory.check_memory(config, plan, cpu, text_bytes=size + 1)


def test_a_text_that_has_moved_is_found_again(tmp_path):
    command = training(tmp_path)
    succeeds(run(*command))
    (tmp_path / "text").rename(tmp_path / "moved")
    again = ["train", "--run", tmp_path / "run", "--device", "cpu", "--steps", 5]
    fails(run(*again), "text, the text of this run, is not there; if it has moved, --text FILE")
    assert "after 4 of 5 steps" in succeeds(run(*again, "--text", tmp_path / "moved")).out


def test_a_prompt_may_be_any_bytes(tiny_run, monkeypatch):
    """As the system hands them over: a byte that is no UTF-8 is a lone surrogate."""
    seen = []

    def stream(model, ids, *_):
        seen.append(ids)
        return iter(())

    monkeypatch.setattr(generate_command, "stream", stream)
    prompt = b"caf\xe9 \xc3\xa9".decode("utf-8", "surrogateescape")
    done = succeeds(generating(tiny_run, "--prompt", prompt))
    assert seen[0].tolist() == [[*b"caf\xe9 \xc3\xa9"]]
    assert done.out == "caf\N{REPLACEMENT CHARACTER} é\n"


def test_a_missing_library_is_named_with_what_installs_it(tmp_path, monkeypatch):
    """And Python's missing manual with what helps there; matplotlib before anything is trained."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = fails(run(*training(tmp_path, "--plot", tmp_path / "p.svg")), "matplotlib")
    assert done.err.endswith('; to install it: pip install "cheems-ref[course]"\n')
    assert not (tmp_path / "run").exists()
    for name in ("pydoc_data", "pydoc_data.topics"):
        monkeypatch.setitem(sys.modules, name, None)
    done = fails(run("train", "--run", tmp_path / "manual", "--text", "manual"), "--text FILE")
    assert "pip" not in done.err and "--help" not in done.err


def test_out_of_memory_names_options_that_the_command_has(tiny_run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(generate_command, "load_model", fail)
    assert fails(generating(tiny_run), "out of memory$").err.count("--") == 0
    monkeypatch.setattr(train_command, "train", fail)
    fails(run(*training(tmp_path)), "out of memory; take a smaller model, --batch-size")


# --- help -----------------------------------------------------------------------------------------


def test_the_examples_of_train_and_generate_work(tmp_path, monkeypatch):
    """As they stand, but for the size of the run; without a text it is the manual of Python."""
    assert succeeds(run("--version")).out == f"cheems {cheems_ref.__version__}\n"
    for command in ([], ["compare"], ["evaluate"]):
        assert examples_in(succeeds(run(*command, "--help")).out), command
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    for words in examples_in(run("train", "--help").out):
        done = run(*words, *SHORT, "--steps", 1, "--eval-fraction", 0.005)
        n = len((read_text() if "runs/manual" in words else TEXT).encode("utf-8"))
        held_out = math.ceil(0.005 * n)
        text = f"{n - held_out:,} bytes to train on, {held_out:,} held out"
        assert text in succeeds(done).out, f"{text!r} is not in: {done.out}"
    for words in examples_in(run("generate", "--help").out):
        done = run(*words, "--device", "cpu", "--max-new-tokens", 3)
        assert succeeds(done).out.startswith("It was" if "--prompt" in words else "\n")


# --- options without effect -----------------------------------------------------------------------

# Fields that a layer uses under a condition: two values, a pattern, where it holds and where not.
CONDITIONS = {
    "d_state": ((4, 8), "I", dict(inner="ssd"), dict(inner="linear")),
    "d_conv": ((2, 3), "S", dict(position="conv"), dict(position="decay")),
    "rope_base": ((10.0, 20.0), "S", dict(position="rope"), dict(position="conv")),
    "n_values": ((4, 5), "I", dict(inner="retrieved"), dict(inner="linear")),
    "k_values": ((1, 2), "I", dict(inner="retrieved"), dict(inner="ssd")),
    "max_positions": ((20, 30), "I", dict(mask="gate"), dict(mask=None)),
    "k_keys": ((1, 2), "I", dict(mask="content"), None),  # else the layer refuses it
}


def computed(options):
    """The shapes and the logits of a model with the same random numbers."""
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(**dict(d_model=16, n_heads=2, d_state=4, n_values=4) | options))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        return [p.shape for p in model.parameters()], model(torch.arange(40).reshape(2, 20) % 7)[0]


def test_a_field_has_an_effect_where_it_is_used():
    """So `--set` refuses just those fields that would change nothing."""
    assert CONDITIONS.keys() == {name for name in options.FIELDS if any(users(name).values())}
    for name, (values, pattern, *where) in CONDITIONS.items():
        for condition, holds in zip(where, (True, False), strict=True):
            if condition is not None:
                made = [dict(pattern=pattern) | condition | {name: value} for value in values]
                (shapes, one), (others, other) = map(computed, made)
                changed = shapes != others or bool((one - other).abs().max() > 1e-6)
                assert changed == holds == is_used(name, ModelConfig(**made[0])), (name, condition)


# --- real processes -------------------------------------------------------------------------------


# As torch/__init__.py, this takes as long to import as a test may wait.
SLOW_IMPORT = "import sys, time; print('importing', flush=True); time.sleep(60)"


@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_is_quiet_while_torch_is_imported(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SLOW_IMPORT)
    started = process("train", "--run", tmp_path / "run", path=tmp_path)
    try:
        assert started.stdout.readline() == b"importing\n"
        time.sleep(0.3)
        started.send_signal(signal.SIGINT)
    finally:
        _, err = started.communicate(timeout=60)
    assert started.returncode == 130 and not err, err
