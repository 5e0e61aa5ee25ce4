"""Output of the commands: lines, tables, numbers with a unit, and errors in one line.

Nothing here imports torch, so that a mistyped option is answered at once.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

# Options that take less memory, by command; the other commands have none.
SMALLER = {
    "train": "; take a smaller model, --batch-size, --micro-batch-size or --seq-len",
    "compare": "; take smaller models, --batch-size, --micro-batch-size or --seq-len",
    "evaluate": "; take a smaller --seq-len",
}
# The extra of this package that installs a library.
EXTRAS = {
    "accelerate": "evaluate",
    "datasets": "evaluate",
    "lm_eval": "evaluate",
    "matplotlib": "course",
    "tokenizers": "hub",
    "transformers": "hub",
}
LOST_PROCESS = (
    "another process of this run has died or cannot be reached; its own line, if it could print "
    "one, starts with cheems:, and the checkpoints are as they were"
)
# Parts of the messages of torch's Gloo and NCCL when the other side of a connection is gone.
CONNECTION = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")


def is_first() -> bool:
    """Return whether this is the only process, or number 0 of several."""
    return os.environ.get("RANK", "0") == "0"


def print_once(line: str, file=None) -> None:
    """Print a line now, if this is the first process.

    Raises:
        OSError: standard output cannot be written; the error names it.
    """
    if not is_first():
        return
    try:
        print(line, file=file, flush=True)
    except OSError as error:
        if error.filename is None:
            error.filename = "standard output" if file is None else "standard error"
        raise


def print_error(error: BaseException | str) -> int:
    """Print what is wrong in one line, and return the status of a command that failed."""
    lines = str(error).splitlines() or [type(error).__name__]
    prefix = "" if is_first() else f"process {os.environ['RANK']}: "
    with contextlib.suppress(OSError):  # standard error is closed: nobody can be told
        print(f"cheems: {prefix}{lines[0]}", file=sys.stderr, flush=True)
    return 1


def report_errors(command: Callable[[list[str]], int], words: list[str]) -> int:
    """Run a command line, report an error in one line, and return the status.

    With CHEEMS_TRACEBACK=1 in the environment, errors are raised instead, with the place in the
    code where they come from.
    """
    try:
        status = command(words)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal is closed
            print_once("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `head`, for example, has closed the pipe
        return 141
    except REPORTED as error:
        if os.environ.get("CHEEMS_TRACEBACK"):
            raise
        return print_error(_in_words(error, words[0] if words else ""))
    finally:
        _drop_output()


REPORTED = (ValueError, TypeError, OSError, ArithmeticError, MemoryError, RuntimeError)
REPORTED += (ModuleNotFoundError, LookupError, AttributeError, AssertionError)


def _in_words(error, command):
    """An error as a user reads it; what no user can have caused is called a bug."""
    text = str(error)
    if isinstance(error, LookupError | AttributeError | AssertionError | RecursionError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}, line {last.lineno}"
        return (
            f"a bug of cheems, please report it: {type(error).__name__}: {text} ({place}); "
            "CHEEMS_TRACEBACK=1 in the environment shows how it came about"
        )
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        return f'{text}; to install it: pip install "cheems-ref[{extra}]"' if extra else text
    memory = isinstance(error, MemoryError) or "DefaultCPUAllocator" in text
    if memory or type(error).__name__ == "OutOfMemoryError":  # torch's, if torch is imported
        return f"out of memory{SMALLER.get(command, '')}"
    if isinstance(error, RuntimeError) and any(part in text for part in CONNECTION):
        return LOST_PROCESS
    return text


def _drop_output():
    """Drop what standard output could not take, so that Python doesn't try again at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shell_command(*words: object) -> str:
    """Return a `cheems` command, quoted for the shell."""
    words = ["cheems", *map(str, words)]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table as text, its first columns aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:left] = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def si(number: float, unit: str = "") -> str:
    """Return three digits and a prefix: 1.30 GB, 34.6 T, 0 B."""
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    number = float(f"{number:.3g}")
    i = min(len(prefixes) - 1, (len(str(int(number))) - 1) // 3)
    digits = f"{number / 1000**i:.3g}" if i else f"{number:.0f}"
    return f"{digits} {prefixes[i]}{unit}".rstrip()
