"""The command `evaluate`: lm-evaluation-harness, without the network."""

import argparse

from torch import Tensor

from cheems_lab import options
from cheems_lab.checkpoint import newest_checkpoint, read_record
from cheems_lab.console import print_once, table
from cheems_lab.evaluation.harness import TASKS, scores
from cheems_ref.text import fingerprint, read_ids
from cheems_ref.train import split_text


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


def _text(a, record) -> Tensor:
    """The held-out part of the run's own text; all of any other."""
    ids = read_ids(a.text)
    if fingerprint(ids) == record["text"]:
        held_out = split_text(ids, record["training"]["eval_fraction"])[1]
        print_once(f"on the last {len(held_out):,} bytes of its own text, which were held out")
        return held_out
    source = a.text or "Python's manual"
    print_once(f"on all {len(ids):,} bytes of {source}, which is not the text of the run")
    return ids
