"""Export a model to Hugging Face's transformers.

The directory gets weights, configuration, a tokenizer whose ids are the bytes of a text, a model
card, and the one-line file that trust_remote_code=True runs.

examples:
  cheems export --run runs/book --to exported/book
  cheems export --run runs/book/step-00000800 --to exported/early

It takes transformers: pip install "cheems-ref[hub]". Nothing is overwritten: the directory must be
new, or empty.
"""

import argparse
import os
from pathlib import Path

from cheems_lab import options
from cheems_lab.console import print_once


def add_options(commands) -> None:
    """Add the command to a parser."""
    add = options.add_command(commands, "export", run, __doc__)
    add("--run", required=True, type=options.nonempty, metavar="DIRECTORY",
        help="a run, or one of its checkpoints")  # fmt: skip
    add("--to", required=True, type=_new_directory, metavar="DIRECTORY", help="new or empty")


def run(a: argparse.Namespace) -> int:
    """Export, and print how to load it."""
    # transformers reads this when it is imported, and shows bars for what takes a moment.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from cheems_lab import hub  # which says what to install

    written = sorted(path.name for path in hub.export(a.run, a.to).iterdir())
    print_once(f"written: {', '.join(written)}")
    arguments = f"{str(a.to.absolute())!r}, trust_remote_code=True"
    print_once(f"to load it: AutoModelForCausalLM.from_pretrained({arguments})")
    return 0


def _new_directory(word):
    path = Path(options.nonempty(word))
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise argparse.ArgumentTypeError(f"{path} already exists and is not empty")
    return path
