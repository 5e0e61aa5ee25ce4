"""What `python -m cheems_ref export` does: a run's model becomes a folder for transformers."""

import os
from pathlib import Path

from cheems_ref.command_line import guarded
from cheems_ref.watch import say


def carry_out(parsed) -> int:
    """Write it, and return the status of the process."""
    return guarded(_export, parsed)


def _export(a):
    # The library reads this as it is imported, and draws bars for what takes a moment.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from cheems_ref import hub  # which says what to install

    written = sorted(path.name for path in hub.export(a.run, a.to).iterdir())
    say(f"written: {', '.join(written)}")
    place = str(Path(a.to).absolute())
    say(f"to load it: AutoModelForCausalLM.from_pretrained({place!r}, trust_remote_code=True)")
    return 0
