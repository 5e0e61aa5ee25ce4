"""What the command line takes: its options, its help, and the values that no command can use.

Nothing here imports PyTorch, which takes seconds to load: help and refusals come at once. The
letters and the fields of `ModelConfig` therefore stand here once more, in words for the help; a
test compares them with `config`.
"""

import argparse
import ast
import contextlib
import difflib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from cheems_ref import evaluation_tasks, help_texts
from cheems_ref.presets import PRESETS

PATTERN = "SESESEIE"  # the default of the command line
RATE = ("learning_rate",)  # what a row of a comparison may set beside fields of the model
BYTES = 256
SEEDS = range(-(2**63), 2**64)  # those that torch takes

LETTERS = {
    "S": "SSD",
    "A": "attention",
    "I": "inner-function attention",
    "M": "MLP",
    "G": "gated MLP",
    "D": "DGLU",
    "R": "routed MoE",
    "H": "MoE with shared expert",
    "C": "cohesive MoE",
    "X": "expansive MoE",
    "P": "PEER",
    "K": "CDMMoE",
    "E": "CDMoE",
}


class Field(NamedTuple):
    """A field of ModelConfig: its default, what it is, and for which letters.

    used: pairs (letters, what else must be set); None where every model has it.
    """

    default: Any
    meaning: str
    used: tuple[tuple[str, dict[str, str]], ...] | None = None

    def is_used(self, config: Any) -> bool:
        """Tell whether a model of this ModelConfig depends on the field."""
        return self.used is None or any(
            set(letters) & set(config.pattern)
            and all(getattr(config, name) == value for name, value in others.items())
            for letters, others in self.used
        )

    def users(self) -> str:
        """Name the letters in words: "S; I with inner=ssd"."""
        return "; ".join(
            ", ".join(letters) + "".join(f" with {name}={value}" for name, value in others.items())
            for letters, others in self.used or ()
        )


_RETRIEVED = (("I", {"inner": "retrieved"}),)
# fmt: off
FIELDS = {
    "pattern": Field(PATTERN, "as --pattern"),
    "d_model": Field(128, "width of the stream between the layers"),
    "n_heads": Field(4, "heads of S, A and I"),
    "n_kv_heads": Field(None, "groups of keys; null: one per head", (("AI", {}),)),
    "d_head": Field(None, "width of a head; null: d_model / n_heads", (("S", {}),)),
    "n_groups": Field(1, "groups of B and C", (("S", {}),)),
    "d_state": Field(32, "state width", (("S", {}), ("I", {"inner": "ssd"}))),
    "position": Field("rope", "source of position: rope, conv or decay", (("S", {}),)),
    "d_conv": Field(4, "tokens that a convolution sees", (("S", {"position": "conv"}),)),
    "rope_base": Field(10000.0, "base of the rotary angles",
                       (("AI", {}), ("S", {"position": "rope"}))),
    "chunk_size": Field(64, "tokens per chunk", (("S", {}),)),
    "backend": Field("auto", "auto, chunked, kernel, quadratic or recurrent", (("S", {}),)),
    "inner": Field("retrieved", "inner function: ssd, retrieved or linear", (("I", {}),)),
    "n_values": Field(16, "rows of its table", _RETRIEVED),
    "k_values": Field(2, "how many of them a byte takes", _RETRIEVED),
    "mask": Field(None, "dynamic mask: gate, content or null", (("I", {}),)),
    "max_positions": Field(None, "longest text", (("I", {"mask": "gate"}),)),
    "keep": Field(None, "keys that each query keeps", (("I", {"mask": "content"}),)),
    "d_ff": Field(256, "width inside", (("MGDRHCXKE", {}),)),
    "n_experts": Field(4, "experts", (("RHCX", {}),)),
    "k_experts": Field(2, "how many of them a byte takes", (("RHCX", {}),)),
    "n_neurons": Field(256, "experts of one neuron, a square", (("PKE", {}),)),
    "k_neurons": Field(4, "how many of them each head takes", (("PKE", {}),)),
    "n_retrieval_heads": Field(2, "heads of the retrieval", (("PKE", {}),)),
    "d_query": Field(32, "width of its queries", (("PKE", {}),)),
    "d_private": Field(None, "width of what its experts see; null: d_model / 2", (("K", {}),)),
    "tie_embeddings": Field(True, "whether the embedding is the matrix of the logits too"),
    "norm_eps": Field(1e-6, "added to the mean square in RMSNorm"),
}
# fmt: on


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read a command; None for the arguments of the process.

    Raises:
        SystemExit: after help (status 0), a command that is none (2), a value that cannot be (1).
    """
    words = sys.argv[1:] if arguments is None else arguments
    parsed = _parser().parse_args(words)
    try:
        _look_at(parsed)
    except (ValueError, OSError) as error:
        sys.exit(complain(error))
    parsed.words = words
    return parsed


def complain(error: Exception | str) -> int:
    """Say in one line what is wrong, and return the status of a command that failed."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        said = f"{error.strerror}: {error.filename}"
    lines = said.splitlines() or [type(error).__name__]
    rank = os.environ.get("RANK", "0")
    whose = "" if rank == "0" else f"process {rank}: "
    print(f"cheems_ref: {whose}{lines[0]}", file=sys.stderr)
    return 1


def first_word(parsed: argparse.Namespace) -> None:
    """Say what is going to be done, before PyTorch is loaded; of several processes the first."""
    if os.environ.get("RANK", "0") != "0":
        return
    if parsed.name == "train":
        source = parsed.text or "Python's own manual"
        print(f"training on {source}, checkpoints in {parsed.run}", flush=True)
    elif parsed.name == "compare":
        source = parsed.text or "Python's manual and standard library"
        print(f"comparing on {source}, kept in {parsed.run}", flush=True)
    elif parsed.name == "export":
        print(f"exporting {parsed.run} to {parsed.to}", flush=True)
    elif parsed.name == "budget":
        return
    elif sys.stderr.isatty():  # on standard output is the text
        print(f"reading {parsed.run}", file=sys.stderr)


def _look_at(a):
    """Refuse what can be seen to be wrong without a model; --set becomes a dict."""
    for name in ("run", "text", "pattern", "preset", "device", "to"):
        if getattr(a, name, None) == "":
            raise ValueError(f"--{name} is empty")
    if a.name == "compare":
        _look_at_rows(a)
    elif getattr(a, "seed", None) is not None and a.seed not in SEEDS:
        raise ValueError(f"--seed must be from -2^63 to 2^64 - 1, got {a.seed}")
    if a.name in ("train", "budget"):
        if a.preset is not None and a.pattern is not None:
            raise ValueError("give --preset or --pattern, not both; --set changes single numbers")
        others = ("vocab_size",) if a.name == "budget" else ()
        a.set = dict(_setting(words, others=others) for words in a.set)
        if a.pattern is not None and "pattern" in a.set:
            raise ValueError("give --pattern or --set pattern=..., not both")
    if a.name == "evaluate":
        evaluation_tasks.look_at(a)
    elif a.name == "generate":
        _look_at_writing(a)
    elif a.name == "budget":
        _look_at_sizes(a)
    elif a.name == "export":
        if (to := Path(a.to)).is_file() or (to.is_dir() and any(to.iterdir())):
            raise ValueError(f"--to {to} is there already; it takes a directory, new or empty")
    elif (run := Path(a.run)).exists() and not run.is_dir():
        raise ValueError(f"--run {run} is a file; it takes a directory, old or new")


def _look_at_rows(a):
    """a.row becomes a dict: the name of each row, and its fields."""
    rows = {}
    for words in a.row:
        name, equals, rest = words.partition("=")
        pattern, *fields = rest.split(",")
        if not (name and equals and pattern):
            raise ValueError(f"--row takes NAME=PATTERN,FIELD=VALUE,..., {words!r} is not")
        if name in rows:
            raise ValueError(f"--row {name} is given twice")
        settings = dict(_setting(field, f"--row {name}:", RATE) for field in fields)
        rows[name] = {"pattern": pattern, **settings}
    a.row, a.set = rows, dict(_setting(words) for words in a.set)
    if a.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {a.seeds}")
    _look_at_plot(a)


def _look_at_sizes(a):
    for name, least in (("context", 0), ("length", 1), ("batch", 1), ("processes", 1)):
        if (size := getattr(a, name)) is not None and size < least:
            raise ValueError(f"--{name} must be at least {least}, got {size}")
    a.length = max(1, a.context) if a.length is None else a.length
    for name in ("memory", "flops", "bandwidth"):
        if (value := getattr(a, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be positive, got {value}")
    _look_at_plot(a)


def _look_at_plot(a):
    if a.plot is not None and Path(a.plot).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot takes a file that ends in .png, .svg or .pdf, got {a.plot}")


def _look_at_writing(a):
    if not a.prompt:
        raise ValueError("--prompt is empty: leave it out to begin with a new line")
    try:
        a.prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"--prompt is not UTF-8: letter {error.start + 1} is invalid") from error
    if a.max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens must be at least 0, got {a.max_new_tokens}")
    for name, value in (("top-k", a.top_k), ("top-p", a.top_p)):
        if value is not None and a.temperature == 0:
            raise ValueError(f"--{name} has no effect with --temperature 0, the most likely byte")
    if a.top_k is not None and a.top_k > BYTES:
        raise ValueError(f"--top-k must be at most {BYTES}, the number of bytes, got {a.top_k}")


def _setting(words, option="--set", others=()):
    """The name and the value of NAME=VALUE, a field of the model or one of some others."""
    name, equals, value = words.partition("=")
    if not equals:
        raise ValueError(f"{option} takes NAME=VALUE, {words!r} is not")
    if name == "vocab_size" and name not in others:
        raise ValueError(f"{option} vocab_size: a model of this command reads bytes, it is {BYTES}")
    if name not in FIELDS and name not in others:
        near = difflib.get_close_matches(name, [*FIELDS, *others], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FIELDS)}"
        raise ValueError(f"{option} {words}: there is no field {name!r}; {hint}")
    if name == "pattern":
        return name, value
    for read in (json.loads, ast.literal_eval):  # false and null, or Python's False and None
        with contextlib.suppress(ValueError, SyntaxError):
            return name, read(value)
    return name, value  # a word, such as position=conv


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m cheems_ref",
        description=help_texts.OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command", dest="name")
    _add_train(commands)
    _add_generate(commands)
    _add_compare(commands)
    _add_budget(commands)
    evaluation_tasks.add_options(
        _command(commands, "evaluate", "ask a model what it can", help_texts.EVALUATE)
    )
    _add_export(commands)
    return parser


def _command(commands, name, what, description, **more):
    """Add a command whose texts are shown as they are written; return what adds its options."""
    layout = argparse.RawDescriptionHelpFormatter
    more |= dict(help=what, description=description, formatter_class=layout)
    return commands.add_parser(name, **more).add_argument


def _add_train(commands):
    fields = "\n".join(_described(*pair) for pair in FIELDS.items())
    text, settings = help_texts.TRAIN.format(letters=_letters()), help_texts.SETTINGS
    add = _command(commands, "train", "train a model", text, epilog=settings.format(fields=fields))
    add("--text", metavar="FILE", help="UTF-8 text; without it, Python's own manual")
    add("--run", required=True, metavar="DIRECTORY", help="where the last two checkpoints are kept")
    _add_model(add)
    add("--steps", type=int, help="updates (default 1000, or those of the run)")
    _add_training(add)
    add("--schedule", type=int, metavar="STEPS", help="in which the rate rises and falls; then it "
        "stays (default: --steps)")  # fmt: skip
    add("--seed", type=int, help="of the weights and the windows (default 0)")
    add("--parallel", choices=["sharded", "data"], help="with torchrun: a part of each parameter "
        "on each process (default), or all of it")  # fmt: skip
    add(
        "--bar",
        action=argparse.BooleanOptionalAction,
        help="progress bar (default: on a terminal); without it, lines",
    )


def _add_training(add):
    """What training one model and comparing several have in common."""
    add("--batch-size", type=int, help="windows per update (default 8)")
    add("--length", type=int, help="bytes per window (default 256)")
    add("--learning-rate", type=float, help="the largest (default 0.002)")
    add("--micro-batch", type=int, metavar="WINDOWS", help="read at a time (default: all)")
    add("--held-out", type=float, help="share kept for evaluation (default 0.1)")
    add("--evaluate-every", type=int, metavar="STEPS", help="(default 200)")
    add("--checkpoint-every", type=int, metavar="STEPS", help="(default 200)")
    add("--precision", choices=["auto", "float32", "bfloat16"], help="(default auto)")
    add("--device", help="cpu, cuda, mps (default: the fastest there is)")


def _add_generate(commands):
    add = _command(commands, "generate", "write with a model", help_texts.GENERATE)
    add("--run", required=True, metavar="DIRECTORY", help="of a run or a checkpoint")
    add("--prompt", default="\n", help="what to write on from (default: a new line)")
    add("--max-new-tokens", type=int, default=400, help="bytes to write (default %(default)s)")
    add("--temperature", type=float, default=0.8, help="0: most likely (default %(default)s)")
    add("--top-k", type=int, help="choose among the k most probable bytes")
    add("--top-p", type=float, help="choose among the bytes that hold this probability")
    add("--seed", type=int, help="the same seed writes the same text")
    add("--device", help="cpu, cuda, mps (default: the fastest there is)")


def _add_compare(commands):
    add = _command(
        commands, "compare", "compare models, with intervals over seeds", help_texts.COMPARE
    )
    add("--row", action="append", required=True, metavar="NAME=PATTERN,...", help="see above")
    add("--run", required=True, metavar="DIRECTORY", help="where evaluations are kept")
    add("--text", metavar="FILE or DIRECTORY", help="UTF-8; without it, Python's manual and "
        "standard library, of which whole texts are held out, as of a directory")  # fmt: skip
    add("--seeds", type=int, default=3, help="runs of each row (default %(default)s)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of all rows")
    add("--steps", type=int, help="updates (default 1000)")
    _add_training(add)
    add("--plot", metavar="FILE", help="draw held-out loss against updates")


def _add_budget(commands):
    add = _command(commands, "budget", "say what a model takes", help_texts.BUDGET)
    _add_model(add)
    add("--context", type=int, default=4096, help="tokens in the cache (default %(default)s)")
    add("--length", type=int, help="tokens per row of an update (default: --context)")
    add("--batch", type=int, default=1, help="rows (default %(default)s)")
    types = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=types, default="bfloat16", help="of the model (default %(default)s)")
    add("--processes", type=int, default=1, help="that share an update and its parameters")
    add("--memory", type=float, default=24, metavar="GB", help="there is (default %(default)s)")
    add("--flops", type=float, help="floating-point operations per second of the machine")
    add("--bandwidth", type=float, help="bytes per second that its memory gives")
    add("--plot", metavar="FILE", help="draw memory against context")


def _add_export(commands):
    add = _command(commands, "export", "write a model for transformers", help_texts.EXPORT)
    add("--run", required=True, metavar="DIRECTORY", help="a run, or one of its checkpoints")
    add("--to", required=True, metavar="DIRECTORY", help="new or empty")


def _add_model(add):
    """What model it is."""
    add("--pattern", help=f"letters of the layers (default {PATTERN})")
    add("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the model")


def _letters():
    """In columns of three."""
    cells = [f"{letter} {name}" for letter, name in LETTERS.items()]
    rows = [cells[i : i + 3] for i in range(0, len(cells), 3)]
    return "\n".join("  " + "".join(f"{cell:<28}" for cell in row).rstrip() for row in rows)


def _described(name, field):
    setting = f"{name}={json.dumps(field.default)}".replace('"', "")
    users = f" ({field.users()})" if field.used else ""
    return f"  {setting:<22} {field.meaning}{users}"
