"""The command line: train a model on a text of yours, let it write, compare, evaluate, say what
models take, and hand them to transformers.

    python -m cheems_ref train --text FILE --run DIRECTORY
    python -m cheems_ref generate --run DIRECTORY --prompt "Once"
    python -m cheems_ref compare --run DIRECTORY --row NAME=PATTERN --row NAME=PATTERN
    python -m cheems_ref budget --preset NAME --context TOKENS
    python -m cheems_ref evaluate --run DIRECTORY
    python -m cheems_ref export --run DIRECTORY --to DIRECTORY

Texts are read as bytes, so any language and any file in UTF-8 will do. What it takes is in
`arguments`, what it does in `command_line` and in `compare_command`, `budget_command`,
`evaluate_command` and `export_command`.
"""

import contextlib
import signal
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; None for the arguments of the process."""
    with _quiet_at_ctrl_c():
        from cheems_ref.arguments import first_word, parse

        parsed = parse(arguments)
        first_word(parsed)  # for what follows loads PyTorch
        if parsed.name == "compare":
            from cheems_ref.compare_command import carry_out
        elif parsed.name == "budget":
            from cheems_ref.budget_command import carry_out
        elif parsed.name == "evaluate":
            from cheems_ref.evaluate_command import carry_out
        elif parsed.name == "export":
            from cheems_ref.export_command import carry_out
        else:
            from cheems_ref.command_line import carry_out
    return carry_out(parsed)


@contextlib.contextmanager
def _quiet_at_ctrl_c():
    """Let Ctrl-C end the process without a traceback, of whatever is being imported."""
    before = signal.getsignal(signal.SIGINT)
    mine = __name__ == "__main__" and before is signal.default_int_handler
    if mine:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # where it is not UTF-8
    sys.exit(main())
