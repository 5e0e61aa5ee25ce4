"""Evaluate a model with lm-evaluation-harness, without the network.

  cheems_held_out   bits per byte of the text, of which a run's own is held out at its end
  cheems_cloze      which of four continuations is a passage's own (chance: 0.25)
  cheems_recall     which value belongs to a key, among those of eight pairs (chance: 0.125)
  cheems_needle     the code in a sentence planted in the text, byte for byte

examples:
  cheems evaluate --run runs/book --text book.txt
  cheems evaluate --run runs/manual --tasks cheems_cloze,cheems_needle --limit 50
  cheems evaluate --run runs/manual --tasks niah_single_1 --limit 10

Of the run's own text only the held-out part is used, of any other text all of it. RULER's tasks
are niah_single_1, niah_multikey_2 and niah_multikey_3, at 4096 bytes or at --seq-len. For the
papers' tasks, which need data, see "Evaluate it" in the README.

It takes the extra "evaluate": python -m pip install -c constraints.txt -e ".[evaluate]"
"""

import argparse

from torch import Tensor

from cheems_lab import options
from cheems_lab.checkpoint import newest_checkpoint, read_record
from cheems_lab.console import print_once, table
from cheems_lab.evaluation.harness import (
    RULER,
    RULER_LEAST,
    RULER_LENGTH,
    TASKS,
    Score,
    check_installed,
    scores,
)
from cheems_ref.text import fingerprint, read_text, text_to_ids
from cheems_ref.train import split_text


def add_options(commands) -> None:
    """Add the command to a parser."""
    add = options.add_command(commands, "evaluate", run, __doc__)
    add("--run", required=True, type=options.nonempty, metavar="DIRECTORY",
        help="a run, or one of its checkpoints")  # fmt: skip
    add("--tasks", type=_tasks, default=",".join(TASKS), metavar="NAME,NAME",
        help="(default %(default)s)")  # fmt: skip
    add("--text", type=options.nonempty, metavar="FILE",
        help="UTF-8 text to ask about; without it, Python's own manual")  # fmt: skip
    add(
        "--seq-len", type=options.at_least(1), help="bytes read at a time (default: as in training)"
    )
    add("--limit", type=options.at_least(1), metavar="N", help="documents of each task")
    options.add_device(add)


def run(a: argparse.Namespace) -> int:
    """Evaluate, and print a table."""
    own, ruler = ([name for name in a.tasks if name in kind] for kind in (TASKS, RULER))
    if a.text is not None and not any(TASKS[name] for name in own):
        raise ValueError(f"--text has no effect on {', '.join(a.tasks)}")
    if ruler and a.seq_len is not None and a.seq_len < RULER_LEAST:
        least = f"at least {RULER_LEAST} for {', '.join(ruler)}"
        raise ValueError(f"--seq-len must be {least}, got {a.seq_len}")
    check_installed(a.tasks)
    device, record = options.device(a), read_record(newest_checkpoint(a.run) or a.run)
    found, how = [], dict(limit=a.limit, device=device)
    if own:
        text = _text(a, record) if any(TASKS[name] for name in own) else None
        length = a.seq_len or record["training"]["seq_len"]
        found += scores(a.run, own, text=text, length=length, **how)
    if ruler:
        found += scores(a.run, ruler, length=a.seq_len or RULER_LENGTH, **how)
    print_once("\n".join(lines(found)))
    return 0


def lines(found: list[Score]) -> list[str]:
    """Return the lines of a table of scores."""
    rows = [("task", "metric", "value", "stderr", "documents")]
    for one in found:
        stderr = "" if one.stderr is None else f"{one.stderr:.4f}"
        rows.append((one.task, one.metric, f"{one.value:.4f}", stderr, f"{one.documents:,}"))
    return table(rows, left=2)


def _tasks(word):
    """The type of --tasks."""
    names = list(dict.fromkeys(word.split(",")))
    for name in names:
        if name not in TASKS and name not in RULER:
            known = ", ".join((*TASKS, *RULER))
            raise argparse.ArgumentTypeError(f"{name!r}: there is {known}")
    return names


def _text(a, record) -> Tensor:
    """The held-out part of the run's own text; all of any other."""
    ids = text_to_ids(read_text(a.text))
    if fingerprint(ids) == record["text"]:
        held_out = split_text(ids, record["training"]["eval_fraction"])[1]
        print_once(f"on the last {len(held_out):,} bytes of its own text, which were held out")
        return held_out
    if a.text is None:
        raise ValueError(
            f"{a.run} was trained on another text than the manual of this Python: name that text, "
            "or another one, with --text FILE"
        )
    print_once(f"on all {len(ids):,} bytes of {a.text}, which is not the text of the run")
    return ids
