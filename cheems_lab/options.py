"""Options that several commands share: parsing, help and validation."""

import argparse
import ast
import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

from cheems_lab.console import print_error, short
from cheems_lab.processes import started_by_torchrun
from cheems_ref.config import LAYERS, ModelConfig, is_used, preset, users
from cheems_ref.presets import PRESETS
from cheems_ref.train import TrainConfig, default_device

PATTERN = "SESESEIE"  # the default of the commands
BYTES = 256
FIELDS = {field.name: field for field in dataclasses.fields(ModelConfig)}
SEEDS = range(-(2**63), 2**64)  # the seeds that torch takes


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong option in one line, and shows its texts as they are written."""

    layout = argparse.RawDescriptionHelpFormatter

    def error(self, message: str) -> NoReturn:
        print_error(message)
        self.exit(2)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, epilog: str = ""
) -> Callable:
    """Add a command; return what adds its options. The first line of its text is its summary."""
    parser = commands.add_parser(
        name,
        help=text.splitlines()[0].rstrip("."),
        description=text,
        epilog=epilog,
        formatter_class=Parser.layout,
    )
    parser.set_defaults(command=run)
    return parser.add_argument


# --- types of options -----------------------------------------------------------------------------


def at_least(least: float | int, most: float | int = math.inf) -> Callable[[str], int]:
    """The type of an option that takes a whole number from least to most."""

    def parse(word):
        try:
            number = int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {word!r}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
        if number > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {number}")
        return number

    return parse


def positive(word: str) -> float:
    """The type of an option that takes a finite number above 0."""
    try:
        number = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {word!r}") from None
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, got {word}")
    return number


def seed(word: str) -> int:
    """The type of --seed."""
    number = at_least(-math.inf)(word)
    if number not in SEEDS:
        raise argparse.ArgumentTypeError(f"must be from -2^63 to 2^64 - 1, got {number}")
    return number


def nonempty(word: str) -> str:
    """The type of an option that takes a word or a path."""
    if not word:
        raise argparse.ArgumentTypeError("is empty")
    return word


def directory(word: str) -> Path:
    """The type of --run."""
    path = Path(nonempty(word))
    if path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is a file, not a directory")
    return path


def plot_file(word: str) -> Path:
    """The type of --plot."""
    if Path(word).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, got {word}")
    return Path(word)


def setting(word: str) -> tuple[str, Any]:
    """The type of --set: NAME=VALUE, a field of the model. Values are JSON's or Python's."""
    name, equals, value = word.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"takes NAME=VALUE, {word!r} is not")
    if name not in FIELDS and name != "learning_rate":
        near = difflib.get_close_matches(name, [*FIELDS, "learning_rate"], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FIELDS)}"
        raise argparse.ArgumentTypeError(f"{word}: there is no field {name!r}; {hint}")
    if name == "pattern":
        return name, value
    for parse in (json.loads, ast.literal_eval):
        try:
            return name, parse(value)
        except (ValueError, SyntaxError):
            continue
    return name, value  # a word, such as position=conv


# --- groups of options ----------------------------------------------------------------------------


def add_run(add: Callable, meaning: str) -> None:
    """Add --run."""
    add("--run", required=True, type=directory, metavar="DIRECTORY", help=meaning)


def add_device(add: Callable) -> None:
    """Add --device."""
    add("--device", type=nonempty, help="cpu, cuda, mps (default: the fastest there is)")


def add_model(add: Callable) -> None:
    """Add the options that choose a model."""
    add("--pattern", type=nonempty, help=f"letters of the layers (default {PATTERN})")
    add("--preset", type=nonempty, metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    add("--set", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="a field of the model")  # fmt: skip


def add_training(add: Callable) -> None:
    """Add the options of training that `train` and `compare` share."""
    c, size = TrainConfig(), at_least(1)
    add("--steps", type=size, help=f"optimiser steps (default {c.steps})")
    add("--batch-size", type=size, help=f"windows per step (default {c.batch_size})")
    add("--seq-len", type=size, help=f"bytes per window (default {c.seq_len})")
    add("--learning-rate", type=positive, help=f"the largest (default {c.learning_rate})")
    add("--micro-batch-size", type=size, metavar="WINDOWS", help="read at a time (default: all)")
    add(
        "--eval-fraction",
        type=positive,
        help=f"share kept for evaluation (default {c.eval_fraction})",
    )
    add("--evaluate-every", type=size, metavar="STEPS", help=f"(default {c.evaluate_every})")
    add("--checkpoint-every", type=size, metavar="STEPS", help=f"(default {c.checkpoint_every})")
    add("--precision", choices=["auto", "float32", "bfloat16"], help="(default auto)")
    add_device(add)


def letters() -> str:
    """Return the letters of a pattern for a help text, in columns of three."""
    cells = [f"{letter} {layer.name}" for letter, layer in LAYERS.items()]
    rows = [cells[i : i + 3] for i in range(0, len(cells), 3)]
    return "\n".join("  " + "".join(f"{cell:<28}" for cell in row).rstrip() for row in rows)


def fields() -> str:
    """Return the fields of a model for a help text: default, meaning, and who uses it."""
    lines = ["fields of --set, with their defaults (a preset has its own) and who uses them:"]
    for name, field in FIELDS.items():
        if name == "vocab_size":
            continue
        default = PATTERN if name == "pattern" else field.default
        by = by_letters(name)
        lines.append(f"  {f'{name}={default}':<22} {field.metadata['meaning']}{by and f' ({by})'}")
    return "\n".join(lines)


def by_letters(name: str) -> str:
    """Return the letters that use a field, in words: "S; I with inner=ssd"; "" for all models."""
    by_condition: dict[str, list[str]] = {}
    for letter, condition in users(name).items():
        by_condition.setdefault(condition, []).append(letter)
    return "; ".join(
        ", ".join(found) + (f" with {condition}" if condition else "")
        for condition, found in by_condition.items()
    )


# --- what the options say ------------------------------------------------------------------------


def model_config(a: argparse.Namespace, *, vocab_size: int | None = BYTES) -> ModelConfig:
    """Return the configuration that --preset or --pattern and --set describe.

    Args:
        a: the options.
        vocab_size: of the model, whatever a preset has; None to let --set choose it.

    Raises:
        ValueError, TypeError: an invalid field, or one that the pattern does not use.
    """
    if a.preset and a.pattern:
        raise ValueError("give --preset or --pattern, not both; --set changes single numbers")
    if a.pattern and any(name == "pattern" for name, _ in a.set):
        raise ValueError("give --pattern or --set pattern=..., not both")
    base = preset(a.preset) if a.preset else ModelConfig(pattern=a.pattern or PATTERN)
    config = with_fields(base, dict(a.set), vocab_size)
    check_used(dict(a.set), config)
    return config


def with_fields(
    base: ModelConfig, given: dict[str, Any], vocab_size: int | None = BYTES
) -> ModelConfig:
    """Return a configuration with some fields changed; vocab_size as in `model_config`."""
    if "learning_rate" in given:
        raise ValueError("learning_rate is not a field of the model")
    if vocab_size is None:
        return dataclasses.replace(base, **given)
    if "vocab_size" in given:
        raise ValueError(f"vocab_size: a model of this command reads bytes, it is {BYTES}")
    return dataclasses.replace(base, vocab_size=vocab_size, **given)


def check_used(names: Iterable[str], *configs: ModelConfig, option: str = "--set") -> None:
    """Raise ValueError for a field that none of the models uses.

    Args:
        names: of the fields that were given.
        configs: the models that they were given for.
        option: where they were given, for the message.
    """
    for name in names:
        if not any(is_used(name, config) for config in configs):
            patterns = ", ".join(dict.fromkeys(short(config.pattern) for config in configs))
            users = by_letters(name)
            raise ValueError(f"{option} {name} has no effect on {patterns}: it is for {users}")


def training_options(a: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of `TrainConfig` that were given."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    return {name: value for name, value in vars(a).items() if name in names and value is not None}


def device(a: argparse.Namespace) -> torch.device:
    """Return the device that --device names, or the fastest there is; of several GPUs one each."""
    name = a.device or default_device().type
    if name == "cuda" and started_by_torchrun() > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    elif a.device is None:
        return torch.device(name)
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        found += [kind, *(f"{kind}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in found:
        raise ValueError(f"--device {name} cannot be used here; there is {', '.join(found)}")
    return torch.device(name)
