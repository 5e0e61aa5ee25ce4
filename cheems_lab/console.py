"""Output of the commands: lines, tables, numbers with a unit, and errors in one line.

Nothing here imports torch, so that a mistyped option is answered at once.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence

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


def is_first() -> bool:
    """Return whether this is the only process, or number 0 of several."""
    return os.environ.get("RANK", "0") == "0"


def print_once(line: str, file=None) -> None:
    """Print a line now, if this is the first process."""
    if is_first():
        print(line, file=file, flush=True)


def print_error(error: BaseException | str) -> int:
    """Print what is wrong in one line, and return the status of a command that failed."""
    lines = str(error).splitlines() or [type(error).__name__]
    prefix = "" if is_first() else f"process {os.environ['RANK']}: "
    print(f"cheems: {prefix}{lines[0]}", file=sys.stderr)
    return 1


def report_errors(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command, report a user's mistake in one line, and return the status."""
    try:
        return command(options)
    except BrokenPipeError:  # `head`, for example, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (MemoryError, RuntimeError) as error:
        memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        memory = memory or "DefaultCPUAllocator" in str(error)
        smaller = SMALLER.get(getattr(options, "name", ""), "")
        return print_error(f"out of memory{smaller}" if memory else error)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        hint = f'; to install it: pip install "cheems-ref[{extra}]"' if extra else ""
        return print_error(f"{error}{hint}")
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        return print_error(error)
    except KeyboardInterrupt:
        print_once("\nstopped", file=sys.stderr)
        return 130


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
