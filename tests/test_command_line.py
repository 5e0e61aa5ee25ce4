"""The command line: what is said, what is written, what is refused, and planted mistakes.

As in test_train.py, the properties are functions of a module `m` and of a folder; the negative
controls hand them a copy of `cheems_ref.command_line` with one planted mistake, in it or in
`arguments` below it. Most commands run in this process; the last ones in processes of their own.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
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

from cheems_ref import arguments, command_line, kernels, watch
from cheems_ref.budget import training_bytes
from cheems_ref.config import LAYERS
from cheems_ref.model import PRESETS, CausalLM, ModelConfig, Sampling, generate, preset
from cheems_ref.text import ids_to_text, read_text, text_to_ids
from cheems_ref.train import TrainConfig, load_model, train

TEXT = "the café sat on the mat, and the dog lay on the log. " * 20
NUMBERS = dict(d_model=16, n_heads=2, d_ff=16, d_state=4, chunk_size=8, n_values=4, d_query=8)
SHORT = ["--steps", "4", "--batch-size", "2", "--length", "16", "--device", "cpu"]


pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it


class Done(NamedTuple):
    status: int
    out: str
    err: str
    screen: Screen


def lower_room(m, room=arguments):
    """A room below m: a planted one, or the package's own."""
    return getattr(m, "copied", {}).get(room.__name__.rpartition(".")[2], room)


def run(m, *words, terminal=False):
    """A command in this process, as a shell would see it."""
    out, err = Screen(terminal), Screen(terminal)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = m.carry_out(lower_room(m).parse([str(word) for word in words]))
        except SystemExit as end:
            status = end.code
    return Done(status, out.getvalue(), err.getvalue(), out)


def numbers(pattern):
    """Those of a small model that the letters of a pattern use."""
    config = ModelConfig(pattern=pattern)
    return {k: n for k, n in NUMBERS.items() if arguments.FIELDS[k].is_used(config)}


def settings(changes):
    return [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]


def training(folder, *more, pattern="AM", name="run"):
    """The arguments of a run of 4 updates on a text of a thousand bytes."""
    text = folder / "text"
    folder.mkdir(exist_ok=True)
    text.write_text(TEXT, encoding="utf-8")
    sizes = settings(numbers(pattern or "SESESEIE"))
    pattern = ["--pattern", pattern] if pattern else []
    return ["train", "--text", text, "--run", folder / name, *SHORT, *pattern, *sizes, *more]


def succeeds(done):
    assert done.status == 0 and not done.err, f"status {done.status}: {done.err}"
    return done


def record(folder, name="run"):
    return record_of(max((folder / name).glob("step-*")))


# --- train ------------------------------------------------------------------------------------


def says_what_it_does(m, folder):
    """Sizes before; after it the loss, the place, and a command that can be pasted."""
    where = folder / "my run"
    done = succeeds(run(m, *training(folder, "--held-out", 0.25, "--steps", 3, name=where.name)))
    model, bytes_ = load_model(where), len(TEXT.encode("utf-8"))
    kept, nats = bytes_ - math.ceil(bytes_ / 4), record(folder, where.name)["evaluations"][-1][1]
    n = sum(p.numel() for p in model.parameters())
    for part in (
        f"AM: {n:,} parameters, all of them at work on every byte; on cpu\n",
        f"{kept:,} bytes to train on, {bytes_ - kept:,} held out; 32 per update, 3 updates\n",
        f"held-out loss {nats:.3f} nats = {nats / math.log(2):.3f} bits per byte; "
        f"saved in {where / step(3)} (of checkpoints the last two are kept)\n",
    ):
        assert part in done.out, f"{part!r} is not said in: {done.out}"
    assert "going on" not in done.out and "finished" not in done.out
    python, *following = pasted(done.out, "next: ")
    assert python == sys.executable, f"{python} may not have this package"
    assert succeeds(run(m, *following, "--device", "cpu")).out.startswith("Once")


def pasted(said, before):
    """The interpreter and the arguments of a command that is printed, as a shell takes it."""
    python, *module, command = re.search(
        f"^{before}(\\S+) (-m cheems_ref) (.*)$", said, re.M
    ).groups()
    assert module == ["-m cheems_ref"]
    return [python, *shlex.split(command)]


def says_what_is_at_work(m, folder):
    """Of experts only the chosen ones are; a long pattern is cut."""
    words = ("--steps", 1, "--set", "k_experts=1")
    done = succeeds(run(m, *training(folder, *words, pattern="AR")))
    config = load_model(folder / "run").config
    routed = sum(p.numel() for p in LAYERS["R"].make(config).experts.parameters())
    n = sum(p.numel() for p in load_model(folder / "run").parameters())
    said = f"{n:,} parameters, {n - routed * 3 // 4:,} of them at work on a byte (of experts, "
    assert said in done.out, f"{said!r} is not said in: {done.out}"
    done = succeeds(run(m, *training(folder, "--steps", 1, pattern="AM x 40", name="long")))
    assert f"{'AM' * 32}... (80 layers): " in done.out, done.out


def hands_on_every_option(m, folder):
    """To the run and to its record; the seed is that of the weights too."""
    options = dict(steps=3, batch_size=3, length=12, learning_rate=0.01, held_out=0.2, seed=5)
    options |= dict(evaluate_every=2, checkpoint_every=1, precision="bfloat16", schedule=2)
    words = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    succeeds(run(m, *training(folder, *words)))
    assert record(folder)["training"] == json.loads(json.dumps(vars(TrainConfig(**options))))
    torch.manual_seed(5)
    model = CausalLM(ModelConfig(pattern="AM", **numbers("AM")))
    want = train(model, text_to_ids(TEXT), TrainConfig(**options), bar=False)
    assert record(folder)["losses"] == want.losses, "not the run of this model with this seed"
    assert record(folder)["evaluations"] == want.evaluations
    assert names(folder / "run") == [step(2), step(3)]


def one_update(m, folder, *words, pattern=None):
    succeeds(run(m, *training(folder, *words, "--steps", 1, pattern=pattern)))
    return record(folder)["model"]


# The pattern, the settings, and what they change in the configuration.
CHANGES = [
    (None, (), {}),
    ("AM x 2", (), dict(pattern="AMAM")),
    ("SM + AM", (), dict(pattern="SMAM")),
    ("S", ("--set", "position=conv"), dict(position="conv")),
    ("S", ("--set", 'position="conv"'), dict(position="conv")),
    ("A", ("--set", "n_kv_heads=1"), dict(n_kv_heads=1)),
    ("A", ("--set", "n_kv_heads=null"), {}),
    ("A", ("--set", "rope_base=500.5"), dict(rope_base=500.5)),
    ("A", ("--set", "tie_embeddings=false"), dict(tie_embeddings=False)),
    ("A", ("--set", "tie_embeddings=False"), dict(tie_embeddings=False)),
    ("A", ("--set", "n_kv_heads=None"), {}),
    ("S", ("--set", "position='conv'"), dict(position="conv")),
    (None, ("--set", "pattern=SEIE"), dict(pattern="SEIE")),
]


def takes_any_model(m, folder):
    """A preset, a pattern, and single fields as words, JSON or Python; a vocabulary of bytes."""
    for i, (pattern, words, changes) in enumerate(CHANGES):
        spelled = pattern or "SESESEIE"
        want = ModelConfig(**dict(pattern=spelled, **numbers(spelled)) | changes)
        got = one_update(m, folder / str(i), *words, pattern=pattern)
        assert got == dataclasses.asdict(want), f"{pattern} {words}"
    tiny = dataclasses.replace(preset("cheems-tiny"), **NUMBERS)
    got = one_update(m, folder / "tiny", "--preset", "cheems-tiny")
    assert got == dataclasses.asdict(tiny), "--preset"
    sizes = NUMBERS | dict(pattern="SEIE", n_neurons=16)
    got = one_update(m, folder / "large", "--preset", "cheems-320m", *settings(sizes))
    want = dataclasses.replace(preset("cheems-320m"), **sizes, vocab_size=256)
    assert got == dataclasses.asdict(want), "--preset with --set"


# --- runs that are stopped, go on, and go on for longer -----------------------------------------


@contextlib.contextmanager
def struck(m, *steps):
    """Ctrl-C during each of these updates of a run of m, before it can be answered."""

    def train_it(*words, after_step, **options):
        def strike(run):
            if run.step in steps:
                os.kill(os.getpid(), signal.SIGINT)
            after_step(run)

        return train(*words, **options, after_step=strike)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(m, "train", train_it)
            yield
            now = signal.getsignal(signal.SIGINT)
            assert now is signal.default_int_handler, "Ctrl-C stays as it was during the run"
    finally:
        signal.signal(signal.SIGINT, before)


def stopped_at(m, command, *steps):
    with struck(m, *steps):
        try:
            done = run(m, *command)
        except KeyboardInterrupt as error:
            raise AssertionError("Ctrl-C is not caught") from error
    assert done.status == 130, f"status {done.status}: {done.err}"
    return done


def goes_on_from_where_it_was_stopped(m, folder):
    """Ctrl-C saves, says where, and how to go on: to the same weights and losses."""
    command = training(folder, "--steps", 6, "--checkpoint-every", 2, "--evaluate-every", 2)
    done = stopped_at(m, command, 5)
    kept = folder / "run" / step(5)
    assert f"stopped after update 5 of 6; the last checkpoint is {kept}\n" in done.err, done.err
    assert names(folder / "run") == [step(4), step(5)]
    _, *words = pasted(done.err, "to go on: ")
    again = succeeds(run(m, *words))
    assert f"going on from {kept}, after 5 of 6 updates\n" in again.out, again.out
    whole = succeeds(run(m, *training(folder, *command[5:], name="whole")))
    for name in ("run", "whole"):
        assert "schedule" not in again.out + whole.out, f"{name}: nothing has changed"
    end = [(folder / name / step(6)).read_bytes() for name in ("run", "whole")]
    assert end[0] == end[1], "the last checkpoint is another"
    assert again.out.split("held-out")[-1].split(";")[0] in whole.out


def is_stopped_where_it_was_just_saved(m, folder):
    """And in its last update it goes to its end."""
    command = training(folder, "--steps", 6, "--checkpoint-every", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_room(m, watch), "save", lambda *_: pytest.fail("it is saved twice"))
        stopped_at(m, command, 4)
    assert names(folder / "run") == [step(2), step(4)]
    with struck(m, 6):
        done = run(m, *command)
    assert done.status == 0 and "next: " in done.out, done.err


def the_second_ctrl_c_stops_at_once(m, folder):
    """And without a checkpoint that is said."""

    def strike_twice(*_, at_start, **__):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it does not stop")

    with struck(m), pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "train", strike_twice)
        done = run(m, *training(folder))
    said = "stopped before the first update; no checkpoint was written yet\n"
    assert done.status == 130 and said in done.err, done.err


def a_finished_run_says_so(m, folder):
    command = training(folder)
    first = succeeds(run(m, *command))
    files = content(folder / "run")
    again = succeeds(run(m, *command))
    said = f"{folder / 'run'} is finished: 4 updates are done; --steps N trains on\n"
    assert said in again.out and "going on" not in again.out, again.out
    assert again.out.split("held-out loss")[1] == first.out.split("held-out loss")[1]
    assert content(folder / "run") == files, "a finished run is written to"


def trains_longer(m, folder):
    """As a run that was made for it: its schedule is that of the first command, and is kept."""
    command = training(folder, "--checkpoint-every", 3)
    succeeds(run(m, *command))
    longer = succeeds(run(m, *command, "--steps", 7))
    assert f"going on from {folder / 'run' / step(4)}, after 4 of 7 updates\n" in longer.out
    said = "keeps its schedule of 4 updates and stays at its end; another --run has one of 7\n"
    assert said in longer.out, longer.out
    without = succeeds(run(m, *[word for word in command if word not in ("--steps", "4")]))
    assert "finished: 7 updates are done" in without.out, "--steps is not that of the run"
    succeeds(run(m, *training(folder, "--steps", 7, "--schedule", 4, name="whole")))
    assert record(folder)["training"]["schedule"] == 4
    same_run(folder, "run", "whole")
    fails(run(m, *command), "--steps 4 is too few: 7 updates are done in")


def same_run(folder, *runs):
    """To the last bit, as `same` in training.py: both were made in this process."""
    one, other = (max((folder / name).glob("step-*")) for name in runs)
    assert record_of(one)["losses"] == record_of(other)["losses"], "the losses differ"
    got, want = (load_model(path).state_dict() for path in (one, other))
    assert all(torch.equal(got[name], t) for name, t in want.items()), "the weights differ"


def what_changes_no_loss_may_change(m, folder):
    """How often is evaluated and saved, of a run that was stopped."""
    command = training(folder, "--steps", 6, "--checkpoint-every", 2)
    stopped_at(m, command, 3)
    words = ("--evaluate-every", 1, "--checkpoint-every", 5)
    succeeds(run(m, *command, *words))
    assert names(folder / "run") == [step(5), step(6)]
    assert [pair[0] for pair in record(folder)["evaluations"]] == [4, 5, 6]
    succeeds(run(m, *training(folder, "--steps", 6, name="whole")))
    same_run(folder, "run", "whole")


def is_evaluated_where_it_was_stopped(m, folder):
    """If it is asked for no more than the updates that are done."""
    command = training(folder, "--steps", 6)
    stopped_at(m, command, 3)
    done = succeeds(run(m, *command, "--steps", 3))
    assert "is finished: 3 updates are done" in done.out
    succeeds(run(m, *training(folder, "--steps", 3, "--schedule", 6, name="whole")))
    nats = record(folder, "whole")["evaluations"][-1][1]
    assert f"held-out loss {nats:.3f} nats" in done.out, done.out


# --- what is shown ------------------------------------------------------------------------------


def the_bar_is_as_told(m, folder):
    """Where there is none there are lines, so that a log is never silent."""
    by_itself, told = ((), False, False), (["--bar"], False, True)
    for words, terminal, shown in (by_itself, ((), True, True), told, (["--no-bar"], True, False)):
        place, where = folder / f"{words} {terminal}", f"{words}, terminal {terminal}"
        done = run(m, *training(place, *words), terminal=terminal)
        assert done.status == 0 and ("4/4" in done.err) is shown, where
        assert shown or not done.err
        assert ("\nupdate 4 of 4: " in done.out) is not shown, f"{where}: {done.out}"


def a_terminal_without_columns_has_lines(m, folder):
    for columns, shown in ((80, True), (0, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Screen, "fileno", lambda _: 2)
            size = os.terminal_size((columns, 24))
            patch.setattr(os, "get_terminal_size", lambda _, size=size: size)
            done = run(m, *training(folder / str(columns)), terminal=True)
        assert ("4/4" in done.err) is shown, f"{columns} columns"
        assert ("update 4 of 4: " in done.out) is not shown, f"{columns} columns"


def lines_say_where_it_is(m, folder):
    """After the first update, each evaluation, and a silence: each at once."""
    clock = itertools.count(0, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_room(m, watch).time, "monotonic", lambda: next(clock))
        done = succeeds(run(m, *training(folder, "--steps", 9, "--evaluate-every", 3)))
        slow = succeeds(run(m, *training(folder, "--steps", 9, name="slow")))
    losses = record(folder)["losses"]
    held_out = dict(record(folder)["evaluations"])

    def line(n, rest="", loss=losses):
        return f"update {n} of 9: loss {loss[n - 1]:.3f}{rest}"

    want = [line(1, " nats")] + [
        line(n, f", held out {held_out[n]:.3f} nats; 3 bytes/s, about 0:0{left} to go")
        for n, left in ((3, "1:00"), (6, "0:30"), (9, "0:00"))
    ]
    assert [x for x in done.out.splitlines() if x.startswith("update")] == want
    assert all(any(shown.endswith(x + "\n") for shown in done.screen.flushed) for x in want)
    said = re.findall(r"^update (\d)", slow.out, re.M)
    assert said == ["1", "4", "7", "9"], "not after each 30 seconds"


def says_that_the_interpreter_runs(m, folder):
    def stop(*_, **__):
        raise KeyboardInterrupt

    for mode, backend, warned in (
        ("interpreter", "kernel", True),
        ("interpreter", "auto", False),
        ("cuda", "kernel", False),
    ):
        status = kernels.KernelStatus(True, mode, "")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "kernel_status", lambda status=status: status)
            patch.setattr(m, "train", stop)
            words = training(folder, "--set", f"backend={backend}", pattern="S")
            assert ("Triton's interpreter" in run(m, *words).out) is warned, f"{mode}, {backend}"


def says_that_it_learned_nothing(m, folder):
    """A loss that is a number, and far above that of a guess."""
    words = ("--learning-rate", 3, "--steps", 20)
    done = succeeds(run(m, *training(folder, *words, pattern="AM")))
    nats = record(folder)["evaluations"][-1][1]
    assert nats > 2 * math.log(256), f"{nats}: the run does not diverge"
    said = "far worse than a guess, 5.545 nats: training diverged; try a smaller --learning-rate"
    assert said in done.out, done.out


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
        (folder / "run").mkdir(parents=True)
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
    "two patterns": (["--pattern", "AM", "--set", "pattern=SM"], "--pattern or --set pattern="),
    "unknown preset": (["--preset", "gpt"], "no preset 'gpt'; there are .*cheems-tiny"),
    "unknown letter": (["--pattern", "AQ"], "unknown letter 'Q' at place 2"),
    "nothing that mixes": (["--pattern", "MM"], "no token would see another"),
    "no number of times": (["--pattern", "SE ×"], "'×' must be followed by a number, at place 4"),
    "too many times": (["--pattern", "SE x 100000"], "'x 100000' makes 200,000 layers at place 4 "
                       ".*10,000 are the most"),
    "times of times": (["--pattern", "(SE x 99) x 99"], "'x 99' makes 19,602 layers at place 11"),
    "a name that is near": (["--set", "d_modle=3"],
                            "--set d_modle=3: there is no field 'd_modle'; did you mean d_model"),
    "unknown name": (["--set", "wings=4"], "no field 'wings'; there are pattern, d_model, n_heads"),
    "no value": (["--set", "n_heads"], "NAME=VALUE, 'n_heads' is not"),
    "no setting": (["--set", ""], "NAME=VALUE, '' is not"),
    "not a number": (["--set", "d_ff=wide"], "d_ff must be a whole number, got 'wide'"),
    "a fraction": (["--set", "d_ff=1.5"], r"d_ff must be a whole number, got 1\.5"),
    "past 32 bits": (["--set", f"d_ff={10**20}"], r"d_ff must be less than 2\^31, got 10{20}$"),
    "sizes that do not fit": (["--set", "n_heads=3"], r"letter S .*d_model = 16 .* n_heads = 3"),
    "an unknown word": (["--set", "position=up"], "position must be .*'up'"),
    "a vocabulary": (["--set", "vocab_size=50257"], "vocab_size: .* reads bytes, it is 256"),
    "a mask for nobody": (["--set", "pattern=SE", "--set", "mask=content"],
                          "--set .* has no effect on SE: it is for I"),
    "a width for nobody": (["--set", "d_conv=3"], "d_conv has no effect .* for S with position=c"),
    "no rate": (["--learning-rate", "0"], r"learning_rate must be .* in \(0, inf\), got 0\.0"),
    "no steps": (["--steps", "0"], "steps must be at least 1, got 0"),
    "no held-out text": (["--held-out", "0"], r"held_out must be .* in \(0, 1\), got 0\.0"),
    "windows longer than the text": (["--length", "2000"], "1080 tokens: too few for .* 2001"),
    "windows longer than the table": (["--set", "mask=gate", "--set", "max_positions=15"],
                                      "--length 16 is longer .* max_positions = 15"),
    "more than there is room for": (["--batch-size", f"{10**18}"],
                                    r"at least [\d,.]+ GB .*and cpu has [\d.]+ GB: take a smaller"),
    "a seed of many digits": (["--seed", f"{10**20}"], r"--seed must be .* -2\^63 .*, got 10{20}$"),
    "no such device": (["--device", "abacus"], "--device abacus cannot be used here; there is cpu"),
    "a device for nothing": (["--device", "meta"], "--device meta cannot .*; there is cpu"),
    "no file": (["--text", "nowhere.txt"], "^cheems_ref: No such file or directory: nowhere.txt$"),
    "a directory": (["--text", "."], r"directory.*\."),
    **{f"an empty {name}": ([f"--{name}", ""], f"--{name} is empty")
       for name in ("run", "text", "pattern", "preset", "device")},
}
GENERATING = {
    "no run": (["--run", "nowhere"], "nowhere holds no checkpoint"),
    "an empty run": (["--run", ""], "--run is empty"),
    "a negative temperature": (["--temperature", "-1"], r"temperature must be .* got -1\.0"),
    "no letters to choose from": (["--top-k", "0"], "top_k must be at least 1, got 0"),
    "more letters than there are": (["--top-k", f"{10**20}"], "at most 256, .* got 10{20}$"),
    "too much probability": (["--top-p", "1.5"], r"top_p must be .* in \(0, 1\], got 1\.5"),
    "a choice of one": (["--temperature", "0", "--top-k", "5"], "--top-k has no effect with"),
    "no prompt": (["--prompt", ""], "--prompt is empty: leave it out"),
    "half a letter": (["--prompt", "a\udcff"], "--prompt is not UTF-8: letter 2 is invalid"),
    "a negative length": (["--max-new-tokens", "-1"], "--max-new-tokens must be .* got -1"),
    "a seed of many digits": (["--seed", f"{10**20}"], r"--seed must be .* -2\^63 .*, got 10{20}$"),
    "no such device": (["--device", "mps:7"], "--device mps:7 cannot be used here; there is cpu"),
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
    return done


def refuses_wrong_settings(m, folder):
    (folder / "here").mkdir()
    with contextlib.chdir(folder / "here"):
        for words, message in SETTINGS.values():
            fails(run(m, *training(folder, *words, pattern=None)), message)
            assert not (folder / "run").exists(), f"something is written: {words}"
            assert not names(Path.cwd()), f"something is written: {words}"


def refuses_to_write_nonsense(m, folder):
    """Before anything is written."""
    command = a_run(folder)
    for words, message in GENERATING.values():
        done = fails(run(m, *command, *words), message)
        assert not done.out, f"{words}: {done.out!r} is written"


def refuses_to_write_past_the_table(m, folder):
    """Of mask=gate, of which the last byte that is written needs no place."""
    gate = settings(dict(mask="gate", max_positions=20))
    succeeds(run(m, *training(folder, *gate, pattern="IM")))
    command = ["generate", "--run", folder / "run", "--device", "cpu", "--prompt", "abc"]
    succeeds(run(m, *command, "--max-new-tokens", 18))
    for n, prompt, message in (
        (19, "abc", r"3 \+ 19 bytes, .* max_positions = 20: --max-new-tokens may be at most 18"),
        (1, "a" * 21, r"21 \+ 1 bytes, .* take a shorter --prompt"),
    ):
        done = fails(run(m, *command, "--max-new-tokens", n, "--prompt", prompt), message)
        assert not done.out, f"{done.out!r} is written"
    succeeds(run(m, *command, "--max-new-tokens", 0, "--prompt", "a" * 22))


def refuses_wrong_use(m):
    for words, message in WRONG_USE.values():
        fails(run(m, *words), message, status=2)


def refuses_runs_of_another_kind(m, folder):
    """Without saying before that it goes on, and with what to do."""
    command = training(folder)
    succeeds(run(m, *command))
    way_out = ". Go on with its settings, or take another directory .--run"
    for words, message in (
        (["--set", "d_ff=8"], r"d_ff \(16, now 8\)" + way_out),
        (["--schedule", "9"], r"schedule \(4, now 9\)" + way_out),
        (["--seed", "1"], r"seed \(0, now 1\)" + way_out),
    ):
        done = fails(run(m, *command, *words), message)
        assert "going on" not in done.out, done.out
    other = folder / "other"
    other.write_text(TEXT + "!", encoding="utf-8")
    done = fails(run(m, *command, "--text", other), "another text; .* or take another directory")
    assert "going on" not in done.out, done.out
    (folder / "run" / step(4)).write_bytes(b"")
    for words in (command, a_run(folder)):
        fails(run(m, *words), f"{step(4)} is damaged.* There is none before it: begin anew")
    fails(run(m, *training(folder, name="text")), "--run .*text is a file; it takes a directory")
    fails(run(m, *training(folder, name="text/run")), "Not a directory: .*text/run$")


def foresees_memory(m, folder):
    """Before any is taken: as much as parameters, gradients and moments are, 16 bytes for each."""
    words = training(folder, "--preset", "llama-2-7b", pattern=None)
    words = [w for w in words if w != "--set" and w not in settings(NUMBERS)]

    def allocate(config):
        assert config.d_model < 4096, "a large model is made"
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nat line 1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "CausalLM", allocate)
        for there in (100e9, 1e9):
            patch.setattr(m, "_memory", lambda _, there=there: there)
            said = rf"at least 103\.7 GB .* of 6,478,368,768 .*cpu has {there / 1e9:.1f} GB"
            fails(run(m, *words), said)
        large = [*training(folder), "--batch-size", 2_000_000, "--length", 256]
        patch.setattr(m, "_memory", lambda _: 100e9)
        said = "at least 1,048.6 GB .* of 2,000,000 windows .* take a smaller model, --micro-batch"
        fails(run(m, *large), said)
        fails(run(m, *large, "--micro-batch", 8), "there is not enough memory")  # allocate
        small = training(folder)
        patch.setattr(m, "_memory", lambda _: None)
        done = fails(run(m, *small), "there is not enough memory: take a smaller model, --batch")
        assert "cannot be seen" not in done.out, done.out
        patch.setattr(m, "CausalLM", out_of_memory)
        done = fails(run(m, *words), "there is not enough memory")
        assert re.search(r"at least 103\.7 GB .*; how much cpu has cannot be seen here", done.out)


@pytest.mark.parametrize(
    ("micro_batch", "processes", "windows"),
    [(None, 1, 9), (9, 1, 9), (8, 1, 5), (2, 1, 2), (None, 2, 5), (4, 2, 3), (2, 2, 2)],
)
def test_memory_is_counted_for_what_is_read_at_a_time(monkeypatch, micro_batch, processes, windows):
    """Of 9 windows: 8 at most are 5 and 4, and two processes share them as 5 and 4."""
    config = ModelConfig("AM", **numbers("AM"))
    how = TrainConfig(batch_size=9, length=8, micro_batch=micro_batch)
    monkeypatch.setattr(command_line, "_memory", lambda _: 1)
    monkeypatch.setattr(command_line, "_gigabytes", lambda n: f"{n} bytes")
    needed = processes * training_bytes(config, tokens=8 * windows)  # which share the machine
    with pytest.raises(ValueError, match=f"at least {needed} bytes .* of {windows} windows at a"):
        command_line._must_fit(config, how, torch.device("cpu"), 10, processes, "data")


def out_of_memory(*_):
    raise MemoryError


@pytest.mark.skipif(command_line.resource is None, reason="Windows has no limits")
def test_the_memory_is_that_of_the_machine_or_a_lower_limit(monkeypatch):
    cpu = torch.device("cpu")
    there = command_line._memory(cpu)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < there <= pages
    for limit, want in ((7 * 10**8, 7 * 10**8), (-1, there), (2**62, there)):
        limits = (limit, limit)
        monkeypatch.setattr(command_line.resource, "getrlimit", lambda _, pair=limits: pair)
        assert command_line._memory(cpu) == want
    monkeypatch.setattr(command_line, "resource", None)
    monkeypatch.setattr(os, "sysconf_names", {})
    monkeypatch.setattr(Path, "read_text", lambda *_: "max\n")
    assert command_line._memory(cpu) is None, "as on Windows"


def test_a_run_that_diverges_is_one_line(tmp_path):
    words = training(tmp_path, "--learning-rate", 1e9, pattern="SM")
    done = fails(
        run(command_line, *words), r"diverged in update 2: .*\(--learning-rate\) than 1e\+09"
    )
    assert "5." in done.err, "the loss before is not said"


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


def test_a_text_is_held_as_bytes(monkeypatch, tmp_path):
    """And not as int64, which takes eight for each."""
    seen = []

    def train_it(model, ids, *rest, **options):
        seen.append(ids)
        return train(model, ids, *rest, **options)

    monkeypatch.setattr(command_line, "train", train_it)
    succeeds(run(command_line, *training(tmp_path)))
    assert [ids.dtype for ids in seen] == [torch.uint8]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_line(tmp_path):
    fails(run(command_line, *training(tmp_path), "--device", "cuda"), "(?i)cuda")


def test_a_missing_kernel_is_one_line(tmp_path, monkeypatch):
    status = kernels.KernelStatus(False, "none", "there is no kernel: get one")
    monkeypatch.setattr(kernels, "kernel_status", lambda: status)
    words = training(tmp_path, "--set", "backend=kernel", pattern="S")
    fails(run(command_line, *words), "no kernel: get one")


@pytest.mark.parametrize("word", ["FALSE", "no", "0.5"])
def test_a_word_is_not_taken_for_true(tmp_path, word):
    """As every word but false and False would be."""
    done = run(command_line, *training(tmp_path, "--set", f"tie_embeddings={word}"))
    fails(done, rf"tie_embeddings must be .* got '?{word}")


# --- help -------------------------------------------------------------------------------------


def helps(m):
    """Every command says what it takes, with examples that are commands of its own."""
    for command in ((), ("train",), ("generate",), ("budget",), ("export",)):
        done = run(m, *command, "--help")
        assert done.status == 0 and not done.err, f"{command} --help: {done.err}"
        examples = examples_in(done.out)
        assert len(examples) >= 2, f"there are no examples in {command} --help"
        for words in examples:
            assert words[: len(command)] == [*command], words
            assert ("--run" in words) != ("budget" in words), words
    told = run(m, "train", "--help").out
    for name in PRESETS:
        assert name in re.sub(r"\s+", "", told), name
    for letter, layer in LAYERS.items():
        assert re.search(rf"(^|  ){letter} {layer.name}(  |$)", told, re.M), f"{letter} is not told"
    for field in dataclasses.fields(ModelConfig):
        default = json.dumps(field.default).strip('"')
        if field.name not in ("pattern", "vocab_size"):
            assert re.search(rf"^  {field.name}={re.escape(default)} +\w", told, re.M), field.name
    told = re.sub(r"\s+", " ", told.split("options:")[1])
    for field in dataclasses.fields(TrainConfig):
        if field.name not in ("final", "warmup", "betas", "weight_decay", "clip"):
            others = dict(schedule="--steps", micro_batch="all")
            default = others.get(field.name, re.escape(str(field.default)))
            option = field.name.replace("_", "-")
            assert re.search(rf"--{option} [^()]*\(default:? {default}[,)]", told), option


def examples_in(shown):
    lines = re.findall(r"^  python -m cheems_ref (.*)$", shown, re.MULTILINE)
    return [shlex.split(re.sub(r" {3}\(.*| > .*", "", line)) for line in lines]


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
        assert succeeds(done).out.startswith("It was" if "--prompt" in words else "\n")


# Two values of each field that --set takes; of some, what else has to be set for a difference.
# fmt: off
VALUES = dict(
    n_kv_heads=(1, 2), d_head=(4, 8), n_groups=(1, 2), d_state=(4, 8), position=("rope", "decay"),
    d_conv=(2, 3), rope_base=(10.0, 20.0), inner=("ssd", "linear"), n_values=(4, 5),
    k_values=(1, 2), mask=(None, "content"), max_positions=(20, 30), keep=(1, 2), d_ff=(8, 12),
    n_experts=(3, 4), k_experts=(1, 2), n_neurons=(9, 16), k_neurons=(1, 2),
    n_retrieval_heads=(1, 2), d_query=(4, 8), d_private=(2, 4), d_model=(16, 32), n_heads=(2, 4),
    tie_embeddings=(True, False), norm_eps=(1e-6, 1e-2),
)
# fmt: on
VARIANTS = [
    *({"pattern": f"{letter}A" if letter not in "SI" else letter} for letter in LAYERS),
    *({"pattern": "S", "position": position} for position in ("conv", "decay")),
    *({"pattern": "I", "inner": inner} for inner in ("ssd", "linear")),
    *({"pattern": "I", "mask": mask} for mask in ("gate", "content")),
]


def differs(name, variant):
    """Whether a field changes what a model with the same random numbers computes."""
    found = []
    sizes = dict(d_model=16, n_heads=2, d_ff=8, d_state=4, n_values=4, n_neurons=16, d_query=8)
    sizes |= dict(max_positions=20) if variant.get("mask") == "gate" else {}
    for value in VALUES[name]:
        torch.manual_seed(0)
        model = CausalLM(ModelConfig(**sizes | variant | {name: value}))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
            logits = model(torch.arange(40).reshape(2, 20) % 7)[0]
        found.append(([p.shape for p in model.parameters()], logits))
    (shapes, logits), (others, other) = found
    return shapes != others or not torch.equal(logits, other)


def fields_have_the_effect_that_is_told(m):
    fields = lower_room(m).FIELDS
    for variant, name in itertools.product(VARIANTS, VALUES):
        if name in variant or (name == "keep" and variant.get("mask") != "content"):
            continue  # the layer itself refuses to keep without that mask
        config = ModelConfig(**variant | ({"max_positions": 20} if "mask" in variant else {}))
        assert fields[name].is_used(config) is differs(name, variant), f"{name}, {variant}"
    beside = {field.name for field in dataclasses.fields(ModelConfig)} - {*VALUES}
    assert beside == {"pattern", "vocab_size", "chunk_size", "backend"}, "fields are not tried"
    for name in ("chunk_size", "backend"):  # of which all values compute the same
        assert fields[name].used == (("S", {}),)


# --- real processes ---------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
@pytest.mark.usefixtures("ctrl_c_works")
def test_as_processes_they_say_the_same_and_ctrl_c_saves(tmp_path):
    words = training(tmp_path, "--steps", 100_000, "--checkpoint-every", 10)
    started = process(*words)
    until = time.monotonic() + 60
    while not any((tmp_path / "run").glob("step-*")) and time.monotonic() < until:
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    there = ended(started)
    done = len(record(tmp_path)["losses"])
    assert there.status == 130 and done >= 10, there
    assert f"stopped after update {done} of 100000; the last" in there.err
    assert "stopping after this update; Ctrl-C again stops at once\n" in there.err
    assert str(tmp_path / "run" / step(done)) in there.err
    here = stopped_at(command_line, training(tmp_path, *words[5:], name="here"), 1)
    first, *lines = there.out.splitlines()
    assert first == f"training on {tmp_path / 'text'}, checkpoints in {tmp_path / 'run'}"
    assert lines[:3] == here.out.splitlines()[:3]
    words = [*a_run(tmp_path / "other"), "--seed", 1, "--prompt", "é"]
    assert succeeds(ended(process(*words))).out == run(command_line, *words).out


# As torch/__init__.py, this takes as long to import as a test may wait.
SLOW_IMPORT = "import time; time.sleep(60)"


@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
@pytest.mark.usefixtures("ctrl_c_works")
def test_the_first_word_comes_before_torch_and_ctrl_c_is_quiet_meanwhile(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SLOW_IMPORT)
    started = process("train", "--run", tmp_path / "run", path=tmp_path)
    try:
        said = started.stdout.readline().decode("utf-8")
        time.sleep(0.3)
        started.send_signal(signal.SIGINT)
    finally:
        done = ended(started)
    assert said == f"training on Python's own manual, checkpoints in {tmp_path / 'run'}\n"
    assert done.status == -signal.SIGINT and not done.err and not done.out, done


@pytest.mark.parametrize("terminal", [True, False])
def test_the_first_word_of_a_text_is_for_a_terminal_alone(tmp_path, terminal):
    parsed = arguments.parse([str(word) for word in a_run(tmp_path)])
    out, err = Screen(terminal), Screen(terminal)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        arguments.first_word(parsed)
    said = f"reading {tmp_path / 'run'}\n" if terminal else ""
    assert (out.getvalue(), err.getvalue()) == ("", said)


def test_help_and_refusals_do_without_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    assert examples_in(succeeds(ended(process("train", "--help", path=tmp_path))).out)
    done = ended(process("train", "--run", "", path=tmp_path))
    assert (done.status, done.err) == (1, "cheems_ref: --run is empty\n")


def test_a_reader_who_leaves_is_no_error(tmp_path):
    started = process(*a_run(tmp_path), "--max-new-tokens", 2000)
    started.stdout.close()
    started.stdout = None
    assert started.communicate(timeout=120)[1] == b"" and started.returncode == 141


# As a sitecustomize.py, this is a disk on which no file can grow past a size.
SMALL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


@pytest.mark.skipif(command_line.resource is None, reason="Windows has no limits")
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path):
    """Checkpoints grow by 8 bytes per loss: that of update 4 fits, that of update 20 does not."""
    words = training(tmp_path, "--checkpoint-every", 4)
    succeeds(run(command_line, *words, "--steps", 20))
    small, large = (p.stat().st_size for p in sorted((tmp_path / "run").glob("step-*")))
    (tmp_path / "sitecustomize.py").write_text(SMALL_DISK.format((small + large) // 2))
    words = training(tmp_path, "--checkpoint-every", 16, "--steps", 20, name="full")
    done = ended(process(*words, path=tmp_path))
    kept = tmp_path / "full" / step(16)
    fails(done, f"of update 20 cannot be written to .*full .*; the last one is whole: {kept}$")
    assert names(tmp_path / "full") == [kept.name], "half a checkpoint stays"
    assert succeeds(run(command_line, *words)).out.count(f"going on from {kept}") == 1


def ended(started):
    try:
        out, err = started.communicate(timeout=120)
    finally:
        started.kill()  # which does nothing where it has ended
    return Done(started.returncode, out.decode("utf-8"), err.decode("utf-8"), None)
