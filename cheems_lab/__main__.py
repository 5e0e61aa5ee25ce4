"""The `cheems` command. Its options are in parser.py, its commands in commands/."""

import importlib
import sys

from cheems_lab.console import report_errors
from cheems_lab.parser import parse


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its status; None for the arguments of the process."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # where it is not UTF-8, a ? for what it lacks
    words = sys.argv[1:] if arguments is None else arguments
    return report_errors(_run, words)


def _run(words):
    a = parse(words)
    a.words = words
    try:
        command = importlib.import_module(f"cheems_lab.commands.{a.name}")
    except KeyboardInterrupt:  # torch's import takes a second, and there is nothing to stop yet
        return 130
    if getattr(a, "threads", None):
        import torch

        torch.set_num_threads(a.threads)
    return command.run(a)


if __name__ == "__main__":
    sys.exit(main())
