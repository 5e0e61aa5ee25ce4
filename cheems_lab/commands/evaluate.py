"""Evaluate a model with lm-evaluation-harness, without the network.

  cheems_held_out   bits per byte of the text
  cheems_cloze      which of four continuations belongs to a passage (chance: 0.25)
  cheems_recall     which value belongs to a key, among eight pairs (chance: 0.125)
  cheems_needle     the code in a sentence planted in the text, byte for byte

examples:
  cheems evaluate --run runs/book --text book.txt
  cheems evaluate --run runs/manual --tasks cheems_cloze,cheems_needle --limit 50

Of the run's own text only the held-out part is used, of any other text all of it. For the papers'
tasks, which need data, and for the harness's own, see "Evaluation" in book/manual/training.md.

It takes the extra "evaluate": python -m pip install -c constraints.txt -e ".[evaluate]"
"""

import argparse

from torch import Tensor

from cheems_lab import options
from cheems_lab.checkpoint import newest_checkpoint, read_record
from cheems_lab.console import print_once, table
from cheems_lab.evaluation.harness import TASKS, scores
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
        help="UTF-8 text of the tasks; without it, Python's own manual")  # fmt: skip
    add("--seq-len", type=options.at_least(1), help="bytes per window (default: as in training)")
    add("--limit", type=options.at_least(1), metavar="N", help="documents of each task")
    options.add_device(add)


def run(a: argparse.Namespace) -> int:
    """Evaluate, and print a table."""
    reads_text = any(TASKS[name] for name in a.tasks)
    if a.text is not None and not reads_text:
        raise ValueError(f"--text has no effect on {', '.join(a.tasks)}")
    device, record = options.device(a), read_record(newest_checkpoint(a.run) or a.run)
    text = _text(a, record) if reads_text else None
    length = a.seq_len or record["training"]["seq_len"]
    rows = [("task", "metric", "value", "stderr", "documents")]
    for score in scores(a.run, a.tasks, text=text, length=length, limit=a.limit, device=device):
        stderr = "" if score.stderr is None else f"{score.stderr:.4f}"
        rows.append((*score[:2], f"{score.value:.4f}", stderr, f"{score.documents:,}"))
    print_once(table(rows, left=2))
    return 0


def _tasks(word):
    """The type of --tasks."""
    names = list(dict.fromkeys(word.split(",")))
    for name in names:
        if name not in TASKS:
            raise argparse.ArgumentTypeError(f"{name!r}: there is {', '.join(TASKS)}")
    return names


def _text(a, record) -> Tensor:
    """The held-out part of the run's own text; all of any other."""
    ids = text_to_ids(read_text(a.text))
    if fingerprint(ids) == record["text"]:
        held_out = split_text(ids, record["training"]["eval_fraction"])[1]
        print_once(f"on the last {len(held_out):,} bytes of its own text, which were held out")
        return held_out
    source = a.text or "Python's manual"
    print_once(f"on all {len(ids):,} bytes of {source}, which is not the text of the run")
    return ids
