"""lm-evaluation-harness on a run, without the network.

The tasks are the YAML files in this folder, with the documents of `documents`. The harness reads

    held out        windows i = 0, 1, ...: bytes i·length to (i + 1)·length, each predicted once.
                    The first window is read after a new line, the others after the byte before
                    them; a shorter last window is extended backwards to the full length.
    a continuation  after its context, in one piece, with the white space at the end of the context
"""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

BYTES = 256
FOLDER = Path(__file__).parent
# The names of the tasks, and whether they read a text.
TASKS = dict(cheems_held_out=True, cheems_cloze=True, cheems_recall=False, cheems_needle=True)
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
NEW_LINE = 10  # the prefix of a text, as in `generate`
BATCH = 16


class Score(NamedTuple):
    """A line of the table; a stderr of None is one that the harness does not compute."""

    task: str
    metric: str
    value: float
    stderr: float | None
    documents: int


def scores(
    run: str | Path,
    tasks: Sequence[str],
    *,
    text: Tensor | None = None,
    length: int = 256,
    limit: int | None = None,
    device: str | torch.device = "cpu",
) -> list[Score]:
    """Evaluate a run on tasks of this package.

    Args:
        run: its directory, or a checkpoint.
        tasks: their names.
        text: bytes (l,) for held out, cloze and needle; None for Python's manual.
        length: bytes that the model reads at a time, and of the documents.
        limit: documents of each task; None for all.
        device: of the model.

    Raises:
        ModuleNotFoundError: the harness is not installed.
        CheckpointError: there is no checkpoint, or it is damaged.
        ValueError: a document has no room in the length, the text is too short, or the model has
            fewer ids than there are bytes.
    """
    os.environ.update(dict.fromkeys(OFFLINE, "1"), TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as folder, _quiet():
        metadata = {"length": length}
        if text is not None:
            metadata["text"] = f"{folder}/text"
            whole = bytes(text.tolist()).decode("utf-8", errors="ignore")
            Path(folder, "text").write_text(whole, encoding="utf-8", newline="")
        results = _run_harness(run, tasks, metadata, limit, device)
    return [score for task in tasks for score in _scores_of(task, results)]


def _scores_of(task, results):
    """The scores of one task; the harness names them "metric,filter", here without a filter."""
    numbers, documents = results["results"][task], results["n-samples"][task]["effective"]
    for name, value in numbers.items():
        metric, comma, _ = name.partition(",")
        if comma and not metric.endswith("_stderr"):
            stderr = numbers[name.replace(",", "_stderr,")]
            yield Score(task, metric, value, None if stderr == "N/A" else stderr, documents)


def _run_harness(run, tasks, metadata, limit, device):
    """Run lm_eval.simple_evaluate on the model of a run."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from cheems_lab.hub import byte_tokenizer, from_run

    model = from_run(run, device=device)
    if (n := model.config.vocab_size) < BYTES:
        raise ValueError(f"the model of {run} has {n} ids, and a text has {BYTES} bytes")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(
        pretrained=model,
        tokenizer=byte_tokenizer(),
        batch_size=BATCH,
        max_length=metadata["length"],
        prefix_token_id=NEW_LINE,
        softmax_dtype=torch.promote_types(model.dtype, torch.float32),
    )
    manager = TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)
    return lm_eval.simple_evaluate(model, tasks=list(tasks), limit=limit, task_manager=manager)


@contextlib.contextmanager
def _quiet():
    """Silence the harness and the git that it starts; keep progress bars on a terminal."""
    with open(os.devnull, "w") as nowhere, os.fdopen(os.dup(2), "w") as screen:
        os.dup2(nowhere.fileno(), 2)
        try:
            with contextlib.redirect_stderr(screen if sys.stderr.isatty() else nowhere):
                yield
        finally:
            os.dup2(screen.fileno(), 2)
