"""Train, compare and evaluate small language models of the Cheems family, generate text with them,
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

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its status; None for the arguments of the process."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # where it is not UTF-8, a ? for what it lacks
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # during the imports, which take a second
        return 130


def _main(words):
    import cheems_ref
    from cheems_lab.commands import budget, compare, evaluate, export, generate, train
    from cheems_lab.console import report_errors
    from cheems_lab.options import Parser

    parser = Parser(prog="cheems", description=__doc__, formatter_class=Parser.layout)
    parser.add_argument("--version", action="version", version=f"cheems {cheems_ref.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="name")
    for module in (train, generate, compare, budget, evaluate, export):
        module.add_options(commands)

    def run():
        a = parser.parse_args(words)
        a.words = words
        return a.command(a)

    return report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
