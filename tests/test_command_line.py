"""The command line: what is said, what is written, what is refused, and planted mistakes.

As in test_train.py, the properties are functions of a module `m` and of a folder; the negative
controls hand them a copy of `cheems_ref.__main__` with one planted mistake. Most commands run in
this process, with `main([...])`; the last ones in processes of their own.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from training import (
    Screen,
    content,
    names,
    process,
    record_of,
    step,
)

import cheems_ref.__main__ as command_line
from cheems_ref import kernels
from cheems_ref.model import PRESETS, CausalLM, ModelConfig, Sampling, generate, preset
from cheems_ref.text import ids_to_text, read_text, text_to_ids
from cheems_ref.train import TrainConfig, load_model, train

TEXT = "the café sat on the mat, and the dog lay on the log. " * 20
NUMBERS = dict(d_model=16, n_heads=2, d_ff=16, d_state=4, chunk_size=8, n_values=4, d_query=8)
SIZES = [word for name, n in NUMBERS.items() for word in ("--set", f"{name}={n}")]
SHORT = ["--steps", "4", "--batch-size", "2", "--length", "16", "--device", "cpu"]


pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it


class Done(NamedTuple):
    status: int
    out: str
    err: str
    screen: Screen


def run(m, *arguments, terminal=False):
    """A command in this process, as a shell would see it."""
    out, err = Screen(), Screen(terminal)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = m.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
    return Done(status, out.getvalue(), err.getvalue(), out)


def training(folder, *more, pattern="AM", name="run"):
    """The arguments of a run of 4 updates on a text of a thousand bytes."""
    text = folder / "text"
    folder.mkdir(exist_ok=True)
    text.write_text(TEXT, encoding="utf-8")
    pattern = ["--pattern", pattern] if pattern else []
    return ["train", "--text", text, "--run", folder / name, *SHORT, *pattern, *SIZES, *more]


def succeeds(done):
    assert done.status == 0 and not done.err, f"status {done.status}: {done.err}"
    return done


def record(folder, name="run"):
    return record_of(max((folder / name).glob("step-*")))


# --- train ------------------------------------------------------------------------------------


def says_what_it_does(m, folder):
    """Sizes before; after it the loss, the place, and a command that works."""
    done = succeeds(run(m, *training(folder, "--held-out", "0.25", "--steps", 3)))
    model, bytes_ = load_model(folder / "run"), len(TEXT.encode("utf-8"))
    kept, nats = bytes_ - math.ceil(bytes_ / 4), record(folder)["evaluations"][-1][1]
    n = sum(p.numel() for p in model.parameters())
    for part in (
        f"AM: {n:,} parameters, {n:,} of them active per token; on cpu\n",
        f"{kept:,} bytes to train on, {bytes_ - kept:,} held out; 32 per update, 3 updates\n",
        f"held-out loss {nats:.3f} nats = {nats / math.log(2):.3f} bits per byte; "
        f"saved in {folder / 'run' / step(3)}\n",
    ):
        assert part in done.out, f"{part!r} is not said in: {done.out}"
    assert "going on" not in done.out
    following = shlex.split(re.search("next: python -m cheems_ref (.*)", done.out)[1])
    assert succeeds(run(m, *following, "--device", "cpu")).out.startswith("...")


def hands_on_every_option(m, folder):
    """To the run and to its record; the seed is that of the weights too."""
    options = dict(steps=3, batch_size=3, length=12, learning_rate=0.01, held_out=0.2, seed=5)
    options |= dict(evaluate_every=2, checkpoint_every=1, precision="bfloat16")
    words = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    succeeds(run(m, *training(folder, *words)))
    assert record(folder)["training"] == json.loads(json.dumps(vars(TrainConfig(**options))))
    torch.manual_seed(5)
    model = CausalLM(ModelConfig(pattern="AM", **NUMBERS))
    want = train(model, text_to_ids(TEXT), TrainConfig(**options), bar=False)
    assert record(folder)["losses"] == want.losses, "not the run of this model with this seed"
    assert record(folder)["evaluations"] == want.evaluations
    assert names(folder / "run") == [step(2), step(3)]


def one_update(m, folder, *words, pattern=None):
    succeeds(run(m, *training(folder, *words, "--steps", 1, pattern=pattern)))
    return record(folder)["model"]


# The pattern, the settings, and what they change in the configuration.
FIELDS = [
    (None, (), {}),
    ("AM x 2", (), dict(pattern="AMAM")),
    ("SM + AM", (), dict(pattern="SMAM")),
    ("S", ("--set", "position=conv"), dict(pattern="S", position="conv")),
    ("S", ("--set", 'position="conv"'), dict(pattern="S", position="conv")),
    ("A", ("--set", "n_kv_heads=1"), dict(pattern="A", n_kv_heads=1)),
    ("A", ("--set", "n_kv_heads=null"), dict(pattern="A")),
    ("A", ("--set", "rope_base=500.5"), dict(pattern="A", rope_base=500.5)),
    ("A", ("--set", "tie_embeddings=false"), dict(pattern="A", tie_embeddings=False)),
    ("A", ("--set", "pattern=S"), dict(pattern="S")),
]


def takes_any_model(m, folder):
    """A preset, a pattern, and single fields as words or as JSON; the vocabulary is the bytes."""
    small = dataclasses.asdict(ModelConfig(pattern="SESESEIE", **NUMBERS))
    for i, (pattern, words, want) in enumerate(FIELDS):
        got = one_update(m, folder / str(i), *words, pattern=pattern)
        assert got == small | want, f"{pattern} {words}"
    tiny = dataclasses.replace(preset("cheems-tiny"), **NUMBERS)
    got = one_update(m, folder / "tiny", "--preset", "cheems-tiny")
    assert got == dataclasses.asdict(tiny), "--preset"
    large = dict(pattern="AH", n_kv_heads=1)
    words = [word for name, value in large.items() for word in ("--set", f"{name}={value}")]
    got = one_update(m, folder / "large", "--preset", "llama-320m", *words)
    want = dataclasses.replace(preset("llama-320m"), **NUMBERS, **large, vocab_size=256)
    assert got == dataclasses.asdict(want), "--preset with --set"


def goes_on_from_where_it_was_stopped(m, folder):
    """By Ctrl-C: status 130 and one word; the same command goes on, and says from where."""
    command = training(folder, "--steps", 6, "--checkpoint-every", 2, "--evaluate-every", 2)

    def stopped(*arguments, **options):
        def stop(run):
            if run.step == 5:
                raise KeyboardInterrupt

        return train(*arguments, **options, after_step=stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "train", stopped)
        try:
            done = run(m, *command)
        except KeyboardInterrupt as error:
            raise AssertionError("Ctrl-C is not caught") from error
    assert (done.status, done.err) == (130, "\nstopped\n"), f"{done.status}: {done.err!r}"
    again = succeeds(run(m, *command))
    assert f"going on from {folder / 'run' / step(4)}\n" in again.out, again.out
    whole = succeeds(run(m, *training(folder, *command[5:], name="whole")))
    assert content(folder / "run") == content(folder / "whole")
    assert again.out.split("going on")[1].split("held-out", 1)[1].split(";")[0] in whole.out
    finished = succeeds(run(m, *command))  # once more: nothing is left to do
    assert f"going on from {folder / 'run' / step(6)}\n" in finished.out
    assert again.out.split("held-out loss")[1] == finished.out.split("held-out loss")[1]
    assert content(folder / "run") == content(folder / "whole"), "a finished run is written to"


def the_bar_is_as_told(m, folder):
    by_itself, told = ((), False, False), (["--bar"], False, True)
    for words, terminal, shown in (by_itself, ((), True, True), told, (["--no-bar"], True, False)):
        place = folder / f"{words} {terminal}"
        done = run(m, *training(place, *words), terminal=terminal)
        assert done.status == 0 and ("4/4" in done.err) is shown, f"{words}, terminal {terminal}"
        assert shown or not done.err


# --- generate ---------------------------------------------------------------------------------


@functools.cache
def updated_once():
    """The files of a run of one update."""
    with tempfile.TemporaryDirectory() as folder:
        succeeds(run(command_line, *training(Path(folder), "--steps", 1)))
        return content(Path(folder))


def a_run(folder):
    """A run of one update, whose model writes any bytes; the arguments to write with it."""
    if not (folder / "run").exists():
        (folder / "run").mkdir()
        for name, data in updated_once().items():
            (folder / name).write_bytes(data)
    return ["generate", "--run", folder / "run", "--device", "cpu", "--max-new-tokens", 40]


def writes_what_the_model_does(m, folder):
    command = a_run(folder)
    model = load_model(folder / "run")
    for words, prompt, options in (
        ((), "\n", dict(temperature=0.8)),
        (("--prompt", "the café"), "the café", dict(temperature=0.8)),
        (("--temperature", 0), "\n", dict(temperature=0)),
        (("--temperature", 2.5), "\n", dict(temperature=2.5)),
        (("--top-k", 3), "\n", dict(temperature=0.8, top_k=3)),
        (("--top-p", 0.05), "\n", dict(temperature=0.8, top_p=0.05)),
        (("--max-new-tokens", 7, "--prompt", "a"), "a", dict(temperature=0.8, n=7)),
        (("--max-new-tokens", 0, "--prompt", "a"), "a", dict(n=0)),
    ):
        n = options.pop("n", 40)
        generator, ids = torch.Generator().manual_seed(3), text_to_ids(prompt)[None]
        want = generate(model, ids, n, Sampling(generator=generator, **options))[0]
        done = succeeds(run(m, *command, "--seed", 3, *words))
        assert done.out == prompt + ids_to_text(want) + "\n", f"{words}: {done.out!r}"


def the_seed_decides(m, folder):
    command = [*a_run(folder), "--temperature", 1.5]
    seeded = [run(m, *command, "--seed", seed).out for seed in (0, 0, 1)]
    free = [run(m, *command).out for _ in range(2)]
    cold = [run(m, *a_run(folder), "--temperature", 0).out for _ in range(2)]
    assert seeded[0] == seeded[1], "the same seed writes another text"
    assert len({*seeded, *free}) == 4, "another seed, or none, writes the same text"
    assert cold[0] == cold[1], "temperature 0 depends on chance"


def letters_are_never_torn(m, folder):
    """A letter of several bytes is shown when its last byte is there; half a one as a mark."""
    command = [*a_run(folder), "--prompt", "a"]
    for data, want in (
        ("é😀".encode(), ["a", "", "é", "", "", "", "😀", "\n"]),
        ("xé".encode()[:2], ["a", "x", "", "\N{REPLACEMENT CHARACTER}\n"]),
        (b"\xff!", ["a", "\N{REPLACEMENT CHARACTER}", "!", "\n"]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(m, "stream", lambda *_, data=data, **__: map(torch.tensor, zip(data)))
            screen = succeeds(run(m, *command)).screen
        assert screen.writes == want, f"{data} is written as {screen.writes}"
        for n in range(2, len(want)):
            assert "".join(want[:n]) in screen.flushed, f"{want[n - 1]!r} is shown too late"


def test_a_checkpoint_will_do_as_a_run(tmp_path):
    command = [*a_run(tmp_path), "--seed", 0]
    want = succeeds(run(command_line, *command)).out
    command[2] = tmp_path / "run" / step(1)
    assert succeeds(run(command_line, *command)).out == want


# --- what is refused --------------------------------------------------------------------------


# fmt: off
SETTINGS = {
    "preset and pattern": (["--preset", "cheems-tiny", "--pattern", "AM"],
                           "--preset or --pattern, not both"),
    "unknown preset": (["--preset", "gpt"], "no preset 'gpt'; there are .*cheems-tiny"),
    "unknown letter": (["--pattern", "AQ"], "unknown letter 'Q' at place 2"),
    "nothing that mixes": (["--pattern", "MM"], "no token would see another"),
    "unknown name": (["--set", "heads=4"], "NAME=VALUE, 'heads=4' is not; names: .*'n_heads'"),
    "no value": (["--set", "n_heads"], "NAME=VALUE, 'n_heads' is not"),
    "not a number": (["--set", "d_ff=wide"], "d_ff must be a whole number, got 'wide'"),
    "a fraction": (["--set", "d_ff=1.5"], r"d_ff must be a whole number, got 1\.5"),
    "sizes that do not fit": (["--set", "n_heads=3"], r"letter S .*d_model = 16 .* n_heads = 3"),
    "an unknown word": (["--pattern", "S", "--set", "position=up"], "position must be .*'up'"),
    "a small vocabulary": (["--set", "vocab_size=100"], r"ids must be in \[0, 100\) everywhere"),
    "no rate": (["--learning-rate", "0"], r"learning_rate must be .* in \(0, inf\), got 0\.0"),
    "no steps": (["--steps", "0"], "steps must be at least 1, got 0"),
    "no held-out text": (["--held-out", "0"], r"held_out must be .* in \(0, 1\), got 0\.0"),
    "windows longer than the text": (["--length", "2000"], "1080 tokens: too few for .* 2001"),
    "no file": (["--text", "nowhere.txt"], "No such file.*nowhere.txt"),
    "a directory": (["--text", "."], r"directory.*\."),
}
GENERATING = {
    "no run": (["--run", "nowhere"], "nowhere holds no checkpoint"),
    "a negative temperature": (["--temperature", "-1"], r"temperature must be .* got -1\.0"),
    "no letters to choose from": (["--top-k", "0"], "top_k must be at least 1, got 0"),
    "too much probability": (["--top-p", "1.5"], r"top_p must be .* in \(0, 1\], got 1\.5"),
    "no prompt": (["--prompt", ""], "at least one real token to go on from"),
    "a negative length": (["--max-new-tokens", "-1"], "max_new_tokens must be .* got -1"),
}
WRONG_USE = {
    "no command": ([], r"usage: python -m cheems_ref .*\n.*required: command"),
    "an unknown command": (["eat"], "invalid choice: 'eat'"),
    "no run": (["train"], "required: --run"),
    "no run to write with": (["generate"], "required: --run"),
    "a word for a number": (["train", "--run", "r", "--steps", "many"], "--steps: invalid int"),
    "an unknown precision": (["train", "--run", "r", "--precision", "int8"], "invalid choice"),
    "an unknown option": (["train", "--run", "r", "--layers", "3"], "unrecognized.*--layers 3"),
}
# fmt: on


def fails(done, message, status=1):
    """One line on standard error, and no traceback."""
    assert done.status == status, f"status {done.status}, not {status}: {done.err or done.out}"
    assert re.search(message, done.err), f"{message!r} is not said in: {done.err!r}"
    assert "Traceback" not in done.err
    if status == 1:
        assert done.err.startswith("cheems_ref: ") and done.err.count("\n") == 1, done.err


def refuses_wrong_settings(m, folder):
    for words, message in SETTINGS.values():
        fails(run(m, *training(folder, *words, pattern=None)), message)
        assert not (folder / "run").exists(), f"something is written: {words}"


def refuses_to_write_nonsense(m, folder):
    command = a_run(folder)
    for words, message in GENERATING.values():
        fails(run(m, *command, *words), message)


def refuses_wrong_use(m):
    for words, message in WRONG_USE.values():
        fails(run(m, *words), message, status=2)


def refuses_runs_of_another_kind(m, folder):
    command = training(folder)
    succeeds(run(m, *command))
    for words, message in (
        (["--set", "d_ff=8"], r"d_ff \(16, now 8\)"),
        (["--steps", "9"], r"steps \(4, now 9\)"),
        (["--seed", "1"], r"seed \(0, now 1\)"),
    ):
        fails(run(m, *command, *words), message)
    other = folder / "other"
    other.write_text(TEXT + "!", encoding="utf-8")
    fails(run(m, *command, "--text", other), "another text")
    (folder / "run" / step(4)).write_bytes(b"")
    fails(run(m, *command), f"{step(4)} is damaged")
    fails(run(m, *a_run(folder)), f"{step(4)} is damaged")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "text is empty"),
        ("café".encode("latin-1") * 300, "text is not UTF-8 text: byte 3"),
        (b"short", "5 tokens: too few"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, data, message):
    command = training(tmp_path)
    (tmp_path / "text").write_bytes(data)
    fails(run(command_line, *command), message)


def test_a_loss_that_is_no_number_is_one_line(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise FloatingPointError("the loss of update 3 is nan")

    monkeypatch.setattr(command_line, "train", fail)
    fails(run(command_line, *training(tmp_path)), "update 3 is nan")


@pytest.mark.parametrize("command", ["train", "generate"])
def test_an_unknown_device_is_one_line(tmp_path, command):
    words = training(tmp_path) if command == "train" else a_run(tmp_path)
    fails(run(command_line, *words, "--device", "abacus"), "abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_line(tmp_path):
    fails(run(command_line, *training(tmp_path), "--device", "cuda"), "(?i)cuda")


def test_a_missing_kernel_is_one_line(tmp_path, monkeypatch):
    status = kernels.KernelStatus(False, "none", "there is no kernel: get one")
    monkeypatch.setattr(kernels, "kernel_status", lambda: status)
    words = training(tmp_path, "--set", "backend=kernel", pattern="S")
    fails(run(command_line, *words), "no kernel: get one")


@pytest.mark.parametrize("word", ["False", "no", "0.5"])
def test_a_word_is_not_taken_for_true(tmp_path, word):
    """Which every word would be: only JSON's false is."""
    done = run(command_line, *training(tmp_path, "--set", f"tie_embeddings={word}"))
    fails(done, rf"tie_embeddings must be .* got '?{word}")


# --- help -------------------------------------------------------------------------------------


def helps(m):
    """Every command says what it takes, with examples that are commands of its own."""
    overview = run(m, "--help")
    assert overview.status == 0 and "train" in overview.out and "generate" in overview.out
    for command in ("train", "generate"):
        done = run(m, command, "--help")
        assert done.status == 0 and not done.err, f"{command} --help: {done.err}"
        examples = examples_in(done.out)
        assert len(examples) >= 2, "there are no examples"
        for words in examples:
            assert words[0] == command and "--run" in words, words
    for name in PRESETS:
        assert name in re.sub(r"\s+", "", run(m, "train", "--help").out), name
    for field in ("steps", "batch-size", "length", "learning-rate", "seed", "device", "bar"):
        assert f"--{field}" in run(m, "train", "--help").out


def examples_in(shown):
    lines = re.findall(r"^  python -m cheems_ref (.*)$", shown, re.MULTILINE)
    return [shlex.split(re.sub(r" {3}\(.*", "", line)) for line in lines]


def test_the_examples_of_train_work(tmp_path, monkeypatch):
    """As they stand, but for the size of the run; without a text it is the manual of Python."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    for words in examples_in(run(command_line, "train", "--help").out):
        done = run(command_line, *words, *SHORT, "--steps", 1, "--held-out", 0.005)
        n = len((TEXT if "--text" in words else read_text()).encode("utf-8"))
        held_out = math.ceil(0.005 * n)
        said = f"{n - held_out:,} bytes to train on, {held_out:,} held out"
        assert said in succeeds(done).out, f"{said!r} is not said in: {done.out}"
    shown = run(command_line, "generate", "--help").out
    for words in examples_in(shown):
        done = run(command_line, *words, "--device", "cpu", "--max-new-tokens", 3)
        assert succeeds(done).out.startswith("It was")


# --- real processes ---------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
def test_as_processes_they_say_the_same_and_ctrl_c_ends_with_status_130(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
    try:
        words = training(tmp_path, "--steps", 100_000, "--checkpoint-every", 10)
        started = process(*words)
    finally:
        signal.signal(signal.SIGINT, before)
    until = time.monotonic() + 60
    while not any((tmp_path / "run").glob("step-*")) and time.monotonic() < until:
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    there = ended(started)
    assert (there.status, there.err) == (130, "\nstopped\n")
    assert load_model(tmp_path / "run").config.pattern == "AM"

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "train", stop)
    here = run(command_line, *training(tmp_path, *words[5:], name="here"))
    assert (there.status, there.out, there.err) == (here.status, here.out, here.err)
    words = [*a_run(tmp_path), "--seed", 1, "--prompt", "é"]
    assert succeeds(ended(process(*words))).out == run(command_line, *words).out


def ended(started):
    try:
        out, err = started.communicate(timeout=120)
    finally:
        started.kill()  # which does nothing where it has ended
    return Done(started.returncode, out.decode("utf-8"), err.decode("utf-8"), None)
