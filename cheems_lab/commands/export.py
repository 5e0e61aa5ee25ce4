"""The command `export`: a run for Hugging Face's transformers."""

import argparse
import os
from pathlib import Path

from cheems_lab.checkpoint import RECORD, newest_checkpoint, read_record
from cheems_lab.console import print_once


def run(a: argparse.Namespace) -> int:
    """Export, and print how to load it."""
    path = newest_checkpoint(a.run) or Path(a.run)
    if not (path / RECORD).exists():  # transformers takes many seconds to import
        read_record(path)  # says what is wrong with the path
    # transformers reads this when it is imported, and shows bars for what takes a moment.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from cheems_lab import hub  # which says what to install

    written = sorted(path.name for path in hub.export(a.run, a.to).iterdir())
    print_once(f"written: {', '.join(written)}")
    arguments = f"{str(a.to.absolute())!r}, trust_remote_code=True"
    print_once(f"to load it: AutoModelForCausalLM.from_pretrained({arguments})")
    return 0
