"""What the commands print: lines, tables, numbers with a unit, and errors in one line."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from cheems_lab.processes import is_first, started_by_torchrun

LOST = ("Connection closed", "Connection reset", "Read error", "connectFullMesh")
MAX_LETTERS = 64  # of a pattern that is shown


def print_once(line: str, file=None) -> None:
    """Print a line now, if this is the first process."""
    if is_first():
        print(line, file=file, flush=True)


def print_error(error: BaseException | str) -> int:
    """Print what is wrong in one line, and return the status of a command that failed."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    lines = text.splitlines() or [type(error).__name__]
    rank = os.environ.get("RANK", "0")
    whose = "" if rank == "0" else f"process {rank}: "
    print(f"cheems: {whose}{lines[0]}", file=sys.stderr)
    return 1


def report_errors(command: Callable[..., int], *arguments) -> int:
    """Run a command, report a user's mistake in one line, and return the status."""
    try:
        return command(*arguments)
    except BrokenPipeError:  # the reader of the output has gone: `head`, for one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (MemoryError, RuntimeError) as error:
        return print_error(_out_of_memory(error) or _lost_peer(error) or error)
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as error:
        return print_error(error)
    except KeyboardInterrupt:
        print_once("\nstopped", file=sys.stderr)
        return 130


def _lost_peer(error):
    if started_by_torchrun() and any(word in str(error) for word in LOST):
        return "another process exited; see its error message"
    return None


def _out_of_memory(error):
    is_one = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_one or "DefaultCPUAllocator" in str(error):
        return "out of memory: take a smaller model, --batch-size, --micro-batch-size or --seq-len"
    return None


def shell_command(*words: object) -> str:
    """Return a `cheems` command, quoted for the shell."""
    words = ["cheems", *map(str, words)]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return the lines of a table: the first columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True))
        .rstrip()
        for row in rows
    ]  # fmt: skip


def si(number: float, unit: str = "") -> str:
    """Return three digits and a prefix: 1.30 GB, 34.6 T, 0 B."""
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    number = float(f"{number:.3g}")
    i = min(len(prefixes) - 1, (len(str(int(number))) - 1) // 3)
    digits = f"{number / 1000**i:.3g}" if i else f"{number:.0f}"
    return f"{digits} {prefixes[i]}{unit}".rstrip()


def short(pattern: str) -> str:
    """Return a pattern as it is shown: the first letters of a long one, and their number."""
    if len(pattern) <= MAX_LETTERS:
        return pattern
    return f"{pattern[:MAX_LETTERS]}... ({len(pattern):,} layers)"
