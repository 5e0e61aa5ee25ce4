"""The options of every command: names, ranges, defaults and help texts.

This module and `console` import neither torch nor any other large library, so `cheems --help`, and
the answer to a mistyped option, come at once. `options` turns parsed options into settings.
"""

import argparse
import ast
import difflib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cheems_lab.console import print_error
from cheems_lab.files import check_name
from cheems_ref import __version__
from cheems_ref.presets import PRESETS

PATTERN = "SESESEIE"  # the default of the commands
BYTES = 256
TASKS = ("cheems_held_out", "cheems_cloze", "cheems_recall", "cheems_needle")
LARGEST = 10**12  # of a size
CHECKPOINT_EVERY = 200  # steps

# --- types of options -----------------------------------------------------------------------------


class Whole:
    """The type of an option that takes a whole number from least to most."""

    def __init__(self, least: int = 1, most: int = LARGEST):
        self.least, self.most = least, most

    def __call__(self, word: str) -> int:
        try:
            number = int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {_cut(word)}") from None
        if not self.least <= number <= self.most:
            most = f" and at most {self.most}" if number > self.most or self.most != LARGEST else ""
            raise argparse.ArgumentTypeError(
                f"must be at least {self.least}{most}, got {_cut(word)}"
            )
        return number

    def __str__(self) -> str:
        return f"from {self.least}" if self.most == LARGEST else f"{self.least} to {self.most}"


class Real:
    """The type of an option that takes a number in an interval such as "(0, 1]"."""

    def __init__(self, interval: str):
        self.interval = interval

    def __call__(self, word: str) -> float:
        try:
            number = float(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {_cut(word)}") from None
        low, high = map(float, self.interval[1:-1].split(","))
        inside = low < number < high
        inside |= number == low and self.interval[0] == "["
        inside |= number == high and self.interval[-1] == "]"
        if not inside:
            raise argparse.ArgumentTypeError(f"must be in {self.interval}, got {_cut(word)}")
        return number

    def __str__(self) -> str:
        return f"in {self.interval}"


SIZE = Whole()
POSITIVE = Real("(0, inf)")
SEED = Whole(-(2**63), 2**64 - 1)  # the seeds that torch takes


def nonempty(word: str) -> str:
    """The type of an option that takes a word or a path."""
    if not word:
        raise argparse.ArgumentTypeError("is empty")
    return word


def directory(word: str) -> Path:
    """The type of --run."""
    return Path(nonempty(word))


def new_directory(word: str) -> Path:
    """The type of --to."""
    path = directory(word)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise argparse.ArgumentTypeError(f"{path} already exists and is not empty")
    return path


def text_bytes(word: str) -> bytes:
    """The type of --prompt: any bytes of the command line, since the models read bytes."""
    try:
        data = nonempty(word).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"cannot be encoded: {error.reason}") from error
    if 0 in data:
        raise argparse.ArgumentTypeError(f"has byte 0 at place {data.index(0)}, which no text has")
    return data


def preset_name(word: str) -> str:
    """The type of --preset."""
    if word not in PRESETS:
        hint = did_you_mean(word, PRESETS)
        raise argparse.ArgumentTypeError(
            f"there is no preset {_cut(word)!r}{hint}; there are {', '.join(PRESETS)}"
        )
    return word


def setting(word: str) -> tuple[str, Any]:
    """The type of --set: NAME=VALUE, a field of the model. Values are JSON's or Python's."""
    name, equals, value = word.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"takes NAME=VALUE, {_cut(word)!r} is not")
    for parse in (json.loads, ast.literal_eval):
        try:
            return name, parse(value)
        except (ValueError, SyntaxError):
            continue
        except (RecursionError, MemoryError):
            raise argparse.ArgumentTypeError(f"{name}: brackets are nested too deeply") from None
    return name, value  # a word, such as position=conv


class RowOption(NamedTuple):
    """A parsed --row: its name, its fields (the pattern among them), its learning rate."""

    name: str
    fields: dict[str, Any]
    learning_rate: float | None


def row(word: str) -> RowOption:
    """The type of --row."""
    name, _, rest = word.partition("=")
    pattern, *words = rest.split(",")
    if not (name and pattern):
        raise argparse.ArgumentTypeError(
            f"takes NAME=PATTERN,FIELD=VALUE,..., {_cut(word)!r} is not"
        )
    try:
        check_name(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    fields, rate = {"pattern": pattern}, None
    for one in words:
        key, equals, value = one.partition("=")
        try:
            if key in fields or (key == "learning_rate" and rate is not None):
                raise argparse.ArgumentTypeError(f"{key} is given twice")
            if key == "learning_rate" and equals:
                rate = POSITIVE(value)
            else:
                fields[key] = setting(one)[1]
        except argparse.ArgumentTypeError as error:
            where = f"{key} " if key == "learning_rate" and rate is None else ""
            raise argparse.ArgumentTypeError(f"{_cut(name)}: {where}{error}") from None
    return RowOption(name, fields, rate)


def tasks(word: str) -> list[str]:
    """The type of --tasks."""
    names = list(dict.fromkeys(word.split(",")))
    for name in names:
        if name not in TASKS:
            hint = did_you_mean(name, TASKS)
            raise argparse.ArgumentTypeError(f"{_cut(name)!r}{hint}; there is {', '.join(TASKS)}")
    return names


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" if a word is close to a known one, else ""."""
    found = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _cut(word):
    return word if len(word) <= 60 else f"{word[:60]}... ({len(word):,} characters)"


# --- the parser -----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong option in one line, and shows its texts as they are written."""

    def __init__(self, **named):
        super().__init__(**named, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        print_error(message)
        self.exit(2)

    def format_help(self) -> str:
        """Return the help text; the letters and fields that it may list come from the model."""
        if self.description and "{fields}" in self.description:
            from cheems_lab import options  # which imports torch

            filled = dict(letters=options.letters(), fields=options.fields())
            self.description = self.description.format(**filled)
        return super().format_help()

    def options(self) -> list[str]:
        """Return the names of all options."""
        return [name for action in self._actions for name in action.option_strings]


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the arguments of the process, or exit: with status 2 after an error, 0 after a help.

    The namespace has `name`, the name of the command.
    """
    parser, commands = make_parser()
    first = words[0] if words else ""
    if first and not first.startswith("-") and first not in commands:
        known = ", ".join(commands)
        parser.error(
            f"no command is named {_cut(first)!r}{did_you_mean(first, commands)}; there are {known}"
        )
    if first.startswith("-") and first.partition("=")[0] not in parser.options():
        hint = did_you_mean(first, parser.options())
        parser.error(f"unrecognized option {_cut(first)}{hint}; a command comes first")
    if first in commands:
        _check_options(parser, commands[first].options(), words[1:])
    a = parser.parse_args(words)
    _check_fields(parser, a)
    return a


def _check_options(parser, known, words):
    """Exit with an error for an option that a command does not have, before others are missing."""
    for word in words:
        name = word.partition("=")[0]
        if name == "--":
            return
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            parser.error(f"unrecognized option {_cut(name)}{did_you_mean(name, known)}")


def _check_fields(parser, a):
    """Exit with an error for a field of --set or --row that is unknown, or given twice."""
    given = [("--set", [name for name, _ in getattr(a, "set", [])])]
    given += [(f"--row {one.name}", list(one.fields)) for one in getattr(a, "row", [])]
    for option, names in given:
        for name in names:
            if names.count(name) > 1:
                parser.error(f"argument {option}: {_cut(name)} is given twice")
    if not any(names for option, names in given if option == "--set" or len(names) > 1):
        return
    from cheems_lab.options import FIELDS  # which imports torch

    for option, names in given:
        for name in names:
            if name not in FIELDS:
                hint = did_you_mean(name, FIELDS)
                parser.error(
                    f"argument {option}: no field is named {_cut(name)!r}{hint}; there are "
                    f"{', '.join(FIELDS)}"
                )


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and the parser of each command."""
    parser = Parser(prog="cheems", description=CHEEMS)
    parser.add_argument("-V", "--version", action="version", version=f"cheems {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="name")
    made = {}
    for name, (text, add_options) in COMMANDS.items():
        summary = text.splitlines()[0].rstrip(".")
        made[name] = commands.add_parser(name, help=summary, description=text)
        add_options(made[name].add_argument)
    return parser, made


# --- options of training --------------------------------------------------------------------------


class Setting(NamedTuple):
    """An option that sets a field of `TrainConfig`: its type, its default, its meaning."""

    kind: Callable[[str], Any]
    default: Any
    meaning: str


# The defaults are TrainConfig's, which cannot be imported without torch; a test compares them.
TRAINING = {
    "steps": Setting(SIZE, 1000, "optimiser steps"),
    "batch_size": Setting(SIZE, 8, "windows per step"),
    "seq_len": Setting(SIZE, 256, "bytes per window"),
    "learning_rate": Setting(POSITIVE, 2e-3, "largest learning rate"),
    "warmup": Setting(Real("[0, 1]"), 0.1, "share of the steps in which the learning rate rises"),
    "min_lr_ratio": Setting(Real("[0, 1]"), 0.1, "last learning rate over the largest"),
    "betas": Setting(Real("[0, 1)"), (0.9, 0.999), "AdamW's two decay rates"),
    "weight_decay": Setting(Real("[0, inf)"), 0.01, "AdamW's weight decay, of matrices"),
    "max_grad_norm": Setting(POSITIVE, 1.0, "norm to which gradients are clipped"),
    "eval_fraction": Setting(Real("(0, 1)"), 0.1, "share of the text kept for evaluation"),
    "evaluate_every": Setting(SIZE, 200, "steps between two evaluations"),
}


def add_training(add: Callable) -> None:
    """Add the options of training that `train` and `compare` share."""
    for name, one in TRAINING.items():
        option, pair = f"--{name.replace('_', '-')}", isinstance(one.default, tuple)
        default = " ".join(map(str, one.default)) if pair else one.default
        text = f"{one.meaning} (default {default}; {one.kind})"
        if pair:
            add(option, type=one.kind, nargs=2, metavar=("BETA1", "BETA2"), help=text)
        else:
            add(option, type=one.kind, help=text)
    add("--checkpoint-every", type=SIZE,
        help=f"steps between two checkpoints (default {CHECKPOINT_EVERY}; {SIZE})")  # fmt: skip
    add("--micro-batch-size", type=SIZE, help=f"windows read at a time (default: all; {SIZE})")
    add("--precision", choices=["auto", "float32", "bfloat16"],
        help="of the products: auto is bfloat16 on a GPU that has it, else float32 "
        "(default auto)")  # fmt: skip
    add_machine(add)


# --- options that several commands share ----------------------------------------------------------


def add_run(add: Callable) -> None:
    """Add --run, of a run that is there."""
    add("--run", required=True, type=nonempty, metavar="DIRECTORY",
        help="a run, or one of its checkpoints")  # fmt: skip


def add_machine(add: Callable) -> None:
    """Add --device and --threads."""
    add("--device", type=nonempty, help="cpu, cuda, mps (default: the fastest there is)")
    threads = Whole(1, 1024)
    add("--threads", type=threads, help=f"threads of a CPU (default: torch's own; {threads})")


def add_model(add: Callable) -> None:
    """Add the options that choose a model."""
    add("--pattern", type=nonempty, help=f"letters of the layers (default {PATTERN})")
    add("--preset", type=preset_name, metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    add("--set", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="a field of the model")  # fmt: skip


# --- the commands ---------------------------------------------------------------------------------

CHEEMS = """\
Train, compare and evaluate small language models of the Cheems family, generate text with them,
export them to Hugging Face's transformers, and compute the needs of a model of any size.

examples:
  cheems train --text book.txt --run runs/book
  cheems generate --run runs/book --prompt "It was"
  cheems compare --run runs/order --row SA=SMAM --row AS=AMSM
  cheems export --run runs/book --to exported/book
  cheems budget --preset cheems-1.3b --context 131072
  cheems evaluate --run runs/book --text book.txt

Texts are read as bytes, so any file in UTF-8 will do. "cheems train --help" lists the letters of a
pattern and the fields of a model.
"""

TRAIN = """\
Train a language model on a text, byte by byte.

The model is a preset, or a pattern of letters, one for each layer:
{letters}

examples:
  cheems train --text book.txt --run runs/book
  cheems train --run runs/book                        (resumes it)
  cheems train --run runs/book --steps 2000           (trains it longer)
  cheems train --text book.txt --run runs/llama --pattern "AM x 4" --steps 500
  cheems train --text book.txt --run runs/big --set d_model=256 --set d_ff=512
  cheems train --text manual --run runs/manual        (Python's own manual as the text)

Stop it at any time: Ctrl-C, SIGTERM and SIGHUP save a checkpoint first, and even a kill leaves the
last two checkpoints. A resumed run takes the options that you don't give from its directory (all
but --device, --threads, --progress-bar and --plot), and reaches the same losses as a run that was
never stopped (on another number of processes, but for rounding). --no-compile and --sample-every 0
switch off what it was started with. With a larger --steps it trains longer, and the learning rate
stays at the end of its schedule. An option that would change a loss is rejected. If the text has
moved, --text says where it is now.

The directory also holds losses.csv: step, loss, and the held-out loss where it was evaluated.

{fields}
"""


def add_train(add: Callable) -> None:
    """Add the options of `train`."""
    add("--text", type=nonempty, metavar="FILE",
        help='UTF-8 text; "manual" (the default with --pattern or --preset): Python\'s own '
        "manual")  # fmt: skip
    add("--run", required=True, type=directory, metavar="DIRECTORY",
        help="where checkpoints and losses are kept")  # fmt: skip
    add_model(add)
    add_training(add)
    add("--decay-steps", type=SIZE, metavar="STEPS",
        help=f"steps of the learning rate's schedule (default: --steps; {SIZE})")  # fmt: skip
    add("--seed", type=SEED, help="of the weights and the windows (default 0)")
    add("--parallel", choices=["sharded", "data"],
        help="with torchrun: shard the parameters (default), or copy them")  # fmt: skip
    add("--compile", action=argparse.BooleanOptionalAction,
        help="compile the model with torch.compile (default: don't)")  # fmt: skip
    often = Whole(0)
    add("--sample-every", type=often, metavar="STEPS",
        help=f"print a generated text (default 0: never; {often})")  # fmt: skip
    add("--progress-bar", action=argparse.BooleanOptionalAction, help="default: on a terminal")
    add("--plot", type=Path, metavar="FILE",
        help="draw the losses after the training: .svg, .png or .pdf")  # fmt: skip


COMPARE = """\
Compare models, with intervals over seeds.

All rows are trained on the same windows in the same order, with several seeds. The table has the
held-out loss in nats per byte with Student's 95 % interval over the seeds, and the difference to
the first row, taken seed by seed. A difference is claimed only where Holm's rule calls it, a rule
that corrects for the number of rows.

A row is NAME=PATTERN, then fields of the model (see "train --help") and learning_rate:
  cheems compare --run runs/s --row conv=SM,position=conv --row rope=SM --seeds 5

The same command resumes after a stop, and you can add rows and seeds; an option that would change
the loss of a finished row is rejected. Each evaluation is a line, and the table comes at the end;
comparison.json keeps the evaluations of finished runs.
"""


def add_compare(add: Callable) -> None:
    """Add the options of `compare`."""
    add("--row", type=row, action="append", required=True, metavar="NAME=PATTERN,...",
        help="see above")  # fmt: skip
    add("--run", required=True, type=directory, metavar="DIRECTORY",
        help="where evaluations are kept")  # fmt: skip
    add("--text", type=nonempty, metavar="FILE or DIRECTORY",
        help="UTF-8; of a directory some files are held out whole (default: Python's manual and "
        "standard library)")  # fmt: skip
    add("--seeds", type=SIZE, default=3, help=f"runs per row (default 3; {SIZE})")
    add("--set", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="a field of all rows")  # fmt: skip
    add_training(add)
    add("--plot", type=Path, metavar="FILE",
        help="draw held-out loss against steps: .svg, .png or .pdf")  # fmt: skip
    add("--json", action="store_true", help="print the table as JSON, all else as errors")


GENERATE = """\
Generate text after a prompt, with a model that "train" made.

examples:
  cheems generate --run runs/book --prompt "It was"
  cheems generate --run runs/book --prompt "It was" --temperature 0   (most likely)
  cheems generate --run runs/book --max-new-tokens 2000 --seed 1 > text
"""


def add_generate(add: Callable) -> None:
    """Add the options of `generate`."""
    add_run(add)
    add("--prompt", type=text_bytes, default="\n",
        help="the text to continue, any bytes (default: a new line)")  # fmt: skip
    length, id_count = Whole(0), Whole(1, BYTES)
    temperature, share = Real("[0, inf)"), Real("(0, 1]")
    add("--max-new-tokens", type=length, default=400,
        help=f"bytes to generate (default 400; {length})")  # fmt: skip
    add("--temperature", type=temperature, default=0.8,
        help=f"0: most likely (default 0.8; {temperature})")  # fmt: skip
    add("--top-k", type=id_count,
        help=f"choose among the k most probable bytes (default: all; {id_count})")  # fmt: skip
    add("--top-p", type=share,
        help=f"choose among the bytes that hold this share (default: all; {share})")  # fmt: skip
    add("--seed", type=SEED,
        help="the same seed generates the same text (default: another each time)")  # fmt: skip
    add_machine(add)


BUDGET = """\
Compute what a model needs: parameters, operations, memory, and the speed a machine allows.

The model is not made. Tables are by letter, memory is for decoding and for
training, and the speed is an upper bound.

examples:
  cheems budget --preset cheems-1.3b --context 131072
  cheems budget --preset jamba-1.3b --batch 8 --flops 9.9e14 --bandwidth 3.35e12
  cheems budget --pattern "SM x 3 + AM" --set d_model=512
  cheems budget --preset cheems-1.3b --seq-len 2048 --batch 64 --processes 8
  cheems budget --preset cheems-1.3b --json

Operations are products that are summed. Activations are what torch keeps on a CPU for the backward
pass, with S in its chunked form; the fused kernels of a GPU keep less.
"""


def add_budget(add: Callable) -> None:
    """Add the options of `budget`."""
    add_model(add)
    context = Whole(0)
    add("--context", type=context, default=4096,
        help=f"tokens in the cache (default 4096; {context})")  # fmt: skip
    add("--seq-len", type=SIZE, help=f"tokens per sequence of a step (default: --context; {SIZE})")
    add("--batch", type=SIZE, default=1, help=f"sequences (default 1; {SIZE})")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16",
        help="of the model (default bfloat16)")  # fmt: skip
    add("--processes", type=SIZE, default=1,
        help=f"that share a step and its parameters (default 1; {SIZE})")  # fmt: skip
    add("--memory", type=POSITIVE, default=24, metavar="GB",
        help=f"memory there is (default 24; {POSITIVE})")  # fmt: skip
    unknown = f"(default: unknown, no speed is computed; {POSITIVE})"
    add("--flops", type=POSITIVE, help=f"operations per second of the machine {unknown}")
    add("--bandwidth", type=POSITIVE, help=f"bytes per second of its memory {unknown}")
    add("--json", action="store_true", help="print the numbers as JSON, in bytes and operations")


EVALUATE = """\
Evaluate a model with lm-evaluation-harness, without the network.

  cheems_held_out   bits per byte of the text
  cheems_cloze      which of four continuations belongs to a passage (chance: 0.25)
  cheems_recall     which value belongs to a key, among eight pairs (chance: 0.125)
  cheems_needle     the code in a sentence planted in the text, byte for byte

examples:
  cheems evaluate --run runs/book --text book.txt
  cheems evaluate --run runs/manual --tasks cheems_cloze,cheems_needle --limit 50

Of the run's own text only the held-out part is used, of any other text all of it. For the papers'
tasks, which need data, and for the harness's own, see "Evaluation" in book/manual/training.md.

It takes the extra "evaluate": python -m pip install -c constraints.txt -e ".[evaluate]"
"""


def add_evaluate(add: Callable) -> None:
    """Add the options of `evaluate`."""
    add_run(add)
    add("--tasks", type=tasks, default=",".join(TASKS), metavar="NAME,NAME",
        help="(default %(default)s)")  # fmt: skip
    add("--text", type=nonempty, metavar="FILE",
        help="UTF-8 text of the tasks; without it, Python's own manual")  # fmt: skip
    add("--seq-len", type=SIZE, help=f"bytes per window (default: as in training; {SIZE})")
    add("--limit", type=SIZE, metavar="N", help=f"documents of each task (default: all; {SIZE})")
    add_machine(add)


EXPORT = """\
Export a model to Hugging Face's transformers.

The directory gets weights, configuration, a tokenizer whose ids are the bytes of a text, a model
card, and the one-line file that trust_remote_code=True runs.

examples:
  cheems export --run runs/book --to exported/book
  cheems export --run runs/book/step-00000800 --to exported/early

It takes transformers: pip install "cheems-ref[hub]". Nothing is overwritten: the directory must be
new, or empty.
"""


def add_export(add: Callable) -> None:
    """Add the options of `export`."""
    add_run(add)
    add("--to", required=True, type=new_directory, metavar="DIRECTORY", help="new or empty")


COMMANDS = {
    "train": (TRAIN, add_train),
    "generate": (GENERATE, add_generate),
    "compare": (COMPARE, add_compare),
    "budget": (BUDGET, add_budget),
    "evaluate": (EVALUATE, add_evaluate),
    "export": (EXPORT, add_export),
}
