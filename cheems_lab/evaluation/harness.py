"""lm-evaluation-harness on a run, without the network.

The tasks are the YAML files beside this one, their documents those of `documents`. What the harness
has a model read:

    held out        window i = 0, 1, ... is bytes i·length to (i + 1)·length, each predicted once.
                    The first window is read after a new line, every other after the last byte of
                    the one before it; a last window that is shorter is filled up with what stands
                    before it.
    a continuation  behind its context, in one piece; white space at the end of a context is counted
                    with the continuation. Documents are no longer than length.
    RULER's         the end of a question, with room for 128 bytes of an answer; of the first
                    sentences, which say what is asked for, some bytes have no room
"""

import contextlib
import importlib.util
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
# Our tasks, and whether they ask about a text.
TASKS = dict(cheems_held_out=True, cheems_cloze=True, cheems_recall=False, cheems_needle=True)
# The harness's tasks that need no data.
RULER = ("niah_single_1", "niah_multikey_2", "niah_multikey_3")
RULER_LEAST = 600  # bytes in which each of their documents has room
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
NEW_LINE = 10  # what a text that has no beginning begins with, as in `generate`
BATCH = 16
RULER_LENGTH = 4096  # what RULER reads where nobody says otherwise
NOT_ASKED = -1  # RULER's score for this length, if it was given another
INSTALL = 'install the extra: python -m pip install -c constraints.txt -e ".[evaluate]"'


class Score(NamedTuple):
    """A line of the table; stderr is None where the harness has none."""

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
    """Evaluate a run on tasks of one kind: those of this package, or those of RULER.

    Args:
        run: its directory, or a checkpoint.
        tasks: their names.
        text: bytes (l,) of what held out, cloze and needle ask about; None for Python's manual.
        length: bytes that the model reads at a time, and of the documents.
        limit: documents of each task; None for all.
        device: where the model is.

    Raises:
        ModuleNotFoundError: the harness is not installed; the message says what to do.
        CheckpointError: there is no checkpoint, or one that cannot be read.
        ValueError: a document has no room in the length, the text is too short, or the model has
            fewer ids than there are bytes.
    """
    check_installed(tasks)
    os.environ.update(dict.fromkeys(OFFLINE, "1"), TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as folder, _quiet():
        results = _harness(run, tasks, text, length, limit, device, Path(folder))
    return [one for task in tasks for one in _scores_of(task, results)]


def _scores_of(task, results):
    """Of a task's results, in which a metric bears the name of its filter, here none."""
    numbers, documents = results["results"][task], results["n-samples"][task]["effective"]
    for name, value in numbers.items():
        metric, comma, _ = name.partition(",")
        if comma and not metric.endswith("_stderr") and value != NOT_ASKED:
            stderr = numbers[name.replace(",", "_stderr,")]
            yield Score(task, metric, value, None if stderr == "N/A" else stderr, documents)


def check_installed(tasks):
    needed = ["lm_eval", "accelerate", "transformers"]
    needed += ["wonderwords", "nltk"] if set(tasks) & set(RULER) else []
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} is not installed; {INSTALL}", name=name)


def _harness(run, tasks, text, length, limit, device, folder):
    """What lm_eval.simple_evaluate returns, of the run as a model of transformers."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from cheems_lab.hub import byte_tokenizer, from_run

    model, tokenizer = from_run(run, device=device), byte_tokenizer()
    if (n := model.config.vocab_size) < BYTES:
        raise ValueError(f"the model of {run} has {n} ids, and a text has {BYTES} bytes")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    metadata, tasks_in = {"length": length}, FOLDER
    if text is not None:
        metadata["text"] = str(folder / "text")
        (folder / "text").write_bytes(_whole_characters(text))
    if set(tasks) & set(RULER):
        metadata = _for_ruler(tokenizer, folder) | {"max_seq_lengths": [length]}
        tasks_in = Path(lm_eval.__file__).parent / "tasks" / "ruler"
    model = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=BATCH,
        max_length=length,
        prefix_token_id=NEW_LINE,
        softmax_dtype=torch.promote_types(model.dtype, torch.float32),
    )
    manager = TaskManager(include_path=tasks_in, include_defaults=False, metadata=metadata)
    return lm_eval.simple_evaluate(model, tasks=list(tasks), limit=limit, task_manager=manager)


def _for_ruler(tokenizer, folder):
    """RULER counts tokens with a tokenizer that it loads. When it is imported, it fetches NLTK's
    model of sentences, which these tasks do not use, unless there is a folder of that name.
    """
    import nltk

    tokenizer.save_pretrained(folder)
    (folder / "tokenizers" / "punkt_tab").mkdir(parents=True)
    nltk.data.path.append(str(folder))
    return {"tokenizer": str(folder)}


def _whole_characters(ids):
    """The bytes without those of a letter that is cut through."""
    return bytes(ids.tolist()).decode("utf-8", errors="ignore").encode("utf-8")


@contextlib.contextmanager
def _quiet():
    """Keep the harness's remarks from the screen, git's too, which it starts; a bar may be seen."""
    with open(os.devnull, "w") as nowhere, os.fdopen(os.dup(2), "w") as screen:
        os.dup2(nowhere.fileno(), 2)
        try:
            with contextlib.redirect_stderr(screen if sys.stderr.isatty() else nowhere):
                yield
        finally:
            os.dup2(screen.fileno(), 2)
