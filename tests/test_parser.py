"""The options of the commands: what they import, what they say of themselves, what they refuse."""

import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from test_commands import fails, run, succeeds, training
from training import ROOT

from cheems_lab import parser
from cheems_lab.checkpoint import newest_checkpoint, read_record
from cheems_lab.evaluation.harness import TASKS
from cheems_ref.budget import (
    activation_bytes,
    cache_bytes,
    count_flops,
    count_parameters,
    training_memory,
)
from cheems_ref.config import LAYERS, preset
from cheems_ref.train import TrainConfig

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it

# --- what is imported -----------------------------------------------------------------------------

# Runs commands, then prints which of some libraries were imported.
PROGRAM = """
import contextlib, io, json, sys
from cheems_lab.__main__ import main

for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
    print("status", status, " ".join(words))
print("imported", *sorted({"torch", "transformers", "lm_eval", "matplotlib"} & {*sys.modules}))
"""
AT_ONCE = [
    ("--version", 0),
    ("-V", 0),
    ("--help", 0),
    ("--foo", 2),
    ("trian", 2),
    ("train", 2),
    ("compare --help", 0),
    ("generate --help", 0),
    ("budget --help", 0),
    ("evaluate --help", 0),
    ("export --help", 0),
    ("train --run r --txet t", 2),
    ("train --run r --set d_model=3 --warmpu 0.2", 2),
    ("train --run r --preset cheems-1.3", 2),
    ("train --run r --steps 0", 2),
    ("train --run r --learning-rate nan", 2),
    ("compare --run r --row a=S,learning_rate=x", 2),
    ("generate --run r --top-p 2", 2),
    ("evaluate --run r --tasks mmlu", 2),
]


def imported_by(*commands):
    """The large libraries that a new process imports to run some commands."""
    words = json.dumps([line.split() for line, _ in commands])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *statuses, last = done.stdout.splitlines()
    assert statuses == [f"status {status} {line}" for line, status in commands]
    return last.split()[1:]


def test_help_and_a_wrong_option_are_answered_without_torch():
    assert imported_by(*AT_ONCE) == []


def test_a_wrong_run_is_answered_without_transformers():
    commands = [("export --run /nowhere --to new", 1), ("evaluate --run /nowhere", 1)]
    assert imported_by(*commands) == ["torch"]


# --- help texts -----------------------------------------------------------------------------------


def commands():
    """The parser of each command."""
    return parser.make_parser()[1]


def test_options_of_training_are_those_of_the_loop():
    """Defaults and ranges are written down a second time, since TrainConfig imports torch."""
    config, known = TrainConfig(), vars(TrainConfig())
    assert {*parser.TRAINING} < {*known}
    assert {*known} - {*parser.TRAINING} == {"seed", "precision", "micro_batch_size", "decay_steps"}
    values = (-math.inf, -1.0, 0.0, 1e-300, 0.5, 1.0, 1.5, math.inf, math.nan)
    for name, setting in parser.TRAINING.items():
        assert setting.default == getattr(config, name), name
        whole = isinstance(setting.default, int)
        for value in (-1, 0, 1, 2) if whole else values:
            pair = (value, 0.5) if name == "betas" else value
            assert accepts(setting.kind, str(value), parser.argparse.ArgumentTypeError) == accepts(
                lambda pair, name=name: TrainConfig(**{name: pair}), pair, ValueError
            ), f"{name} = {value}"


def accepts(function, value, refusal):
    try:
        function(value)
    except refusal:
        return False
    return True


def test_the_lists_of_the_parser_are_those_of_the_modules():
    assert tuple(TASKS) == parser.TASKS
    assert {*parser.PATTERN} < {*LAYERS}
    for name in parser.PRESETS:
        assert preset(parser.preset_name(name)).pattern


def test_every_option_tells_its_default_and_its_range():
    for (name, command), width in itertools.product(commands().items(), (80,)):
        for action in command._actions:
            option, told = f"{name} {action.option_strings}", action.help or ""
            if isinstance(action.type, parser.Whole | parser.Real):
                assert str(action.type) in told or action.type is parser.SEED, option
                assert "default" in told or action.dest == "sample_every", f"{option}, {width}"
            if action.default not in (None, False, [], "==SUPPRESS==", "\n"):
                shown = told % {"default": action.default}
                assert f"default {action.default}" in shown, option
        help_text = succeeds(run(name, "--help")).out
        assert all(action.option_strings[-1] in help_text for action in command._actions)


# --- what is refused ------------------------------------------------------------------------------

REFUSED = [
    (["--foo"], "unrecognized option --foo; a command comes first"),
    (["--versoin"], "--versoin; did you mean --version"),
    (["trian"], "no command is named 'trian'; did you mean train"),
    (["generate", "--rnu", "r"], "--rnu; did you mean --run"),
    (["train", "--run", "r", "--learning_rate", "1"], "did you mean --learning-rate"),
    (["budget", "--preset", "cheems-1.3"], "did you mean cheems-1.3b.; there are llama-320m"),
    (["budget", "--set", "n_head=3"], "argument --set: .*'n_head'; did you mean n_heads"),
    (["budget", "--set", "d_model=32", "--set", "d_model=64"], "--set: d_model is given twice"),
    (["budget", "--set", f"d_model={'[' * 3000}"], "--set: d_model: .* nested too deeply"),
    (["budget", "--set", "x" * 5000], r"--set: takes NAME=VALUE, 'x{60}\.\.\. \(5,000"),
    (["budget", "--flops", "inf"], r"--flops: must be in \(0, inf\), got inf"),
    (["budget", "--context", "9" * 30], "--context: must be at least 0 and at most 10*, got 9"),
    (["budget", "--batch", "9" * 5000], "--batch: must be .*characters"),
    (["budget", "--batch", "9e29"], "--batch: must be a whole number, got 9e29"),
    (["train", "--run", "r", "--seq-len", "9" * 30], "--seq-len: must be .* got 9{30}$"),
    (["generate", "--run", "r", "--prompt", "a\0"], "--prompt: has byte 0 at place 1"),
    (["generate", "--run", "r", "--prompt", "\ud800"], "--prompt: cannot be encoded"),
    (["evaluate", "--run", "r", "--tasks", "cheems_clozee"], "did you mean cheems_cloze"),
]


def test_what_is_refused_is_named():
    for words, message in REFUSED:
        done = fails(run(*words), message, status=2)
        assert len(done.err) < 1000, f"{len(done.err)} characters of an error"


def test_a_pattern_in_small_letters_is_recognised():
    done = fails(run("budget", "--pattern", "se x 2"), "letters are capitals.*mean 'SE X 2'")
    assert "'s' in pattern" in done.err
    words = ["budget", "--set", "d_model=2147483644"]
    fails(run(*words), r"letter S \(SSD\): d_model = 2147483644 makes a tensor too large")


# --- what is given --------------------------------------------------------------------------------


def test_the_optimiser_s_options_reach_the_run(tmp_path):
    given = dict(warmup=0.5, min_lr_ratio=0.2, weight_decay=0.3, max_grad_norm=0.7)
    words = [w for k, v in given.items() for w in (f"--{k.replace('_', '-')}", v)]
    succeeds(run(*training(tmp_path, *words, "--betas", 0.8, 0.95)))
    found = read_record(newest_checkpoint(tmp_path / "run"))["training"]
    assert {name: found[name] for name in given} == given and found["betas"] == [0.8, 0.95]
    fails(run(*training(tmp_path, "--weight-decay", 0.1)), r"weight_decay \(0.3, now 0.1\)")


def test_threads_are_set(tiny_run, torch_as_before):
    words = ["generate", "--run", tiny_run, "--device", "cpu", "--max-new-tokens", 1]
    before = torch.get_num_threads()
    succeeds(run(*words))
    assert torch.get_num_threads() == before
    succeeds(run(*words, "--threads", before + 1))
    assert torch.get_num_threads() == before + 1


def test_budget_as_json_has_the_numbers_of_the_functions():
    words = ["budget", "--preset", "cheems-tiny", "--context", 300, "--seq-len", 200, "--batch", 3]
    found = json.loads(succeeds(run(*words, "--json", "--flops", 1e12)).out)
    config, counts = preset("cheems-tiny"), count_parameters(preset("cheems-tiny"))
    assert found["model"]["pattern"] == config.pattern
    flops = count_flops(config, 200, batch=3)
    kept = activation_bytes(config, 200, batch=3, dtype=torch.bfloat16)
    for part, count in counts.items():
        row = found["parts"][part]
        assert (row["parameters"], row["active"]) == count
        assert row["operations"] == (flops[part].total() if part in flops else 0)
        assert row["activations"] == kept.get(part, 0)
    cache = cache_bytes(config, 300, batch=3)
    assert found["decoding"]["keys_values"] == cache.keys_values
    assert found["decoding"]["limited_by"] == "operations"
    needed = training_memory(config, 200, batch=3, dtype=torch.bfloat16)
    assert {name: found["training"][name] for name in needed._fields} == needed._asdict()
    assert found["options"]["seq_len"] == 200


def test_the_losses_are_drawn(tmp_path):
    for end in ("svg", "png"):
        plot = tmp_path / f"losses.{end}"
        words = ("--plot", plot, "--evaluate-every", 2)
        done = succeeds(run(*training(tmp_path, *words, name=end)))
        assert f"drawn: {plot}\n" in done.out and plot.stat().st_size > 5000
    drawn = (tmp_path / "losses.svg").read_text()
    assert "training" in drawn and "held out" in drawn and "nats per byte" in drawn
    for plot, message in (("p.bmp", "must end in .svg"), ("no/p.svg", "there is no folder no")):
        done = fails(run(*training(tmp_path, "--plot", plot, name="late")), message)
        assert not (tmp_path / "late").exists(), "it trains first"
