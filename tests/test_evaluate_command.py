"""The command `evaluate`: its numbers are those of a computation with `CausalLM` alone.

What needs lm-evaluation-harness is skipped where the extra `evaluate` is not installed.
"""

import contextlib
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_commands import TEXT, fails, run, succeeds
from training import ROOT, a_model, trained

from cheems_lab import hub, training
from cheems_lab.checkpoint import load_model
from cheems_lab.evaluation import documents, harness
from cheems_lab.evaluation.harness import scores
from cheems_ref.tasks import NEEDLE
from cheems_ref.text import ids_to_text, text_to_ids
from cheems_ref.train import evaluate, split_text

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it

close = partial(pytest.approx, rel=0, abs=1e-6)
LENGTH = 64
HARNESS = "lm-evaluation-harness is not installed; the extra `evaluate` brings it"


@contextlib.contextmanager
def alone():
    """With the harness, or skipped; without the network."""
    for name in ("lm_eval", "accelerate"):
        pytest.importorskip(name, reason=HARNESS)

    asked = []

    def refuse(*where):
        asked.append(where)
        raise OSError("there is no network")

    with pytest.MonkeyPatch.context() as patched:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        patched.setattr(os, "environ", kept)  # which the command sets
        patched.setattr("torch.utils.collect_env.get_pretty_env_info", str)  # which runs pip
        patched.setattr(socket.socket, "connect", refuse)
        patched.setattr(socket, "getaddrinfo", refuse)
        yield patched
    assert not asked, f"the network is asked for {asked}"


def a_run(folder, text=TEXT, eval_fraction=0.2, dtype=torch.float64, model=None, **changes):
    """A run of two updates on a text."""
    model = a_model(vocab_size=256, dtype=dtype, **model or {})
    sizes = dict(steps=2, seq_len=LENGTH, learning_rate=0.02, eval_fraction=eval_fraction) | changes
    trained(training, folder / "run", model=model, ids=text_to_ids(text), **sizes)
    return folder / "run"


def the_score(where, name, text, length=LENGTH, **more):
    """Of one task."""
    with alone():
        (score,) = scores(where, [name], text=text_to_ids(text), length=length, **more)
    assert score.task == name
    return score


def asked(*words):
    with alone():
        return succeeds(run("evaluate", "--device", "cpu", *words))


# --- numbers ----------------------------------------------------------------------------------


def log_probability(model, read, n):
    """Of the last n bytes of those that are given, from the others on."""
    ids = torch.tensor([*read])
    logits, _ = model(ids[None, :-1])
    each = logits[0].log_softmax(-1).gather(1, ids[1:, None])
    return each[-n:].sum().item()


def bits_per_byte(model, text, length):
    """Windows as in training, after a new line; the rest is read with what stands before it."""
    data = b"\n" + text.encode()
    n = len(data) - 1
    whole = n // length * length
    nats = (
        evaluate(model, torch.tensor([*data[: whole + 1]]), seq_len=length) * whole if whole else 0
    )
    if n > whole:
        nats -= log_probability(model, data[max(0, n - length) :], n - whole)
    return nats / n / math.log(2)


def test_held_out_is_counted_in_windows(tmp_path):
    """Of a text that is a multiple of them, one that is not, and one that is shorter."""
    where = a_run(tmp_path)
    for text in (TEXT[:125], TEXT[:200], "é"):
        score = the_score(where, "cheems_held_out", text)
        assert (score.metric, score.stderr, score.documents) == ("bits_per_byte", None, 1)
        assert score.value == close(bits_per_byte(load_model(where), text, LENGTH))
    # Probabilities of a bfloat16 model in float32, as cross entropy has them where it trains.
    narrow, text = a_run(tmp_path / "narrow", dtype=torch.bfloat16), "the cat " * 40
    value = the_score(narrow, "cheems_held_out", text).value
    data = torch.tensor([*b"\n", *text.encode()]).unfold(0, LENGTH + 1, LENGTH)
    logits, _ = load_model(narrow)(data[:, :-1])
    assert logits.dtype == torch.bfloat16
    each = logits.float().log_softmax(-1).gather(2, data[:, 1:, None])
    assert value == close(-each.sum().item() / len(text) / math.log(2))


def is_chosen(model, context, choices, answer):
    """White space at the end of a context counts with the choice."""
    kept = context.rstrip()
    ends = [(context[len(kept) :] + choice).encode() for choice in choices]
    sums = [log_probability(model, kept.encode() + end, len(end)) for end in ends]
    return max(range(len(sums)), key=sums.__getitem__) == answer


def test_choices_are_the_most_probable(tmp_path):
    """Summed over bytes, as CausalLM has it; of a model that does not always choose the first."""
    where = a_run(tmp_path, steps=60)
    model, text = load_model(where), TEXT + TEXT.upper()
    (tmp_path / "text").write_text(text, encoding="utf-8")
    for name, found, context in (
        ("cheems_cloze", documents.cloze_task(tmp_path / "text", length=LENGTH), "passage"),
        ("cheems_recall", documents.recall_task(length=LENGTH), "row"),
    ):
        found, limit = found["test"].to_list(), 30
        right = [is_chosen(model, d[context], d["choices"], d["answer"]) for d in found[:limit]]
        value = sum(right) / limit
        score = the_score(where, name, text, limit=limit)
        assert (score.metric, score.documents) == ("acc", limit)
        assert 0 < value < 1, "a share that says nothing"
        assert score.value == close(value)
        assert score.stderr == close(math.sqrt(value * (1 - value) / (limit - 1)))


def copying(ids):
    """The logits of a model that goes on as the last five bytes did, if it saw them in 130."""
    logits = torch.zeros(*ids.shape, 256)
    for row, said in zip(ids.tolist(), logits, strict=True):
        for t in range(len(row)):
            seen = bytes(row[: t + 1][-130:])
            place = seen.rfind(seen[-5:], 0, len(seen) - 1)
            if place >= 0:
                said[t, seen[place + 5]] = 9.0
    return SimpleNamespace(logits=logits)


def test_a_needle_is_found_as_far_back_as_a_model_remembers(tmp_path, monkeypatch):
    where, length = a_run(tmp_path), 200
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    needles = documents.needle_task(tmp_path / "text", length=length)["test"].to_list()
    told = [NEEDLE.format(name=one["text"][-8:-4], code=one["code"]) for one in needles]
    seen = [needle in one["text"][-130:] for one, needle in zip(needles, told, strict=True)]
    assert sum(seen) == 60, "three of five depths"
    model = hub.from_run(where)
    model.forward = copying
    monkeypatch.setattr(hub, "from_run", lambda *_, **__: model)
    assert the_score(where, "cheems_needle", TEXT, length).value == close(0.6)


# --- the command ------------------------------------------------------------------------------


def test_the_held_out_end_is_asked_about_in_one_table(tmp_path):
    """Of the run's own text, or all of another; a letter that is cut through is left out."""
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    where = a_run(tmp_path, eval_fraction=0.1925)
    ids = split_text(text_to_ids(TEXT), 0.1925)[1]
    assert ids_to_text(ids[:1]) == "\ufffd", "the second byte of an é"
    tasks = "cheems_recall,cheems_held_out,cheems_recall"
    words = ["--run", where, "--text", tmp_path / "text", "--limit", 3, "--tasks", tasks]
    first, head, *rows = asked(*words).out.splitlines()
    assert f"on the last {len(ids):,} bytes of its own text" in first
    assert head.split() == ["task", "metric", "value", "stderr", "documents"]
    recall, held_out = (row.split() for row in rows)  # each once
    assert recall[:2] == ["cheems_recall", "acc"] and recall[-1] == "3" and len(recall) == 5
    bits = bits_per_byte(load_model(where), ids_to_text(ids[1:]), LENGTH)
    assert held_out == ["cheems_held_out", "bits_per_byte", f"{bits:.4f}", "1"]
    (tmp_path / "other").write_text(TEXT[30:], encoding="utf-8")
    words = ["--run", where, "--tasks", "cheems_held_out", "--text", tmp_path / "other"]
    done = asked(*words, "--seq-len", 32)
    assert f"on all {len(TEXT[30:].encode()):,} bytes of {tmp_path / 'other'}" in done.out
    assert f" {bits_per_byte(load_model(where), TEXT[30:], 32):.4f} " in done.out, done.out


def manual_s_command():
    """The words of the manual's lm_eval, and all tasks that it names, of C-Eval too."""
    said = (ROOT / "book" / "manual" / "training.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    \.venv/bin/(lm_eval (?:.*\\\n)*.*)\n", said, re.M)
    words = shlex.split(command.replace("\\\n", " "))
    names = words[words.index("--tasks") + 1].split(",")
    return words, names + re.findall(r"`--tasks (\S+) --num_fewshot", said)


def test_the_papers_tasks_are_there_by_the_manual_s_names():
    lm_eval = pytest.importorskip("lm_eval", reason=HARNESS)
    from lm_eval.tasks import TaskManager

    folders = ("mmlu/default", "triviaqa", "arc", "piqa", "hellaswag", "openbookqa", "winogrande")
    places = [Path(lm_eval.__file__).parent / "tasks" / name for name in (*folders, "ceval")]
    known = TaskManager(include_path=places, include_defaults=False).all_tasks
    _, named = manual_s_command()
    assert len(named) == len(places) and {*named} <= {*known}


@pytest.mark.program
def test_the_manual_s_command_runs_on_tasks_that_need_no_data(tmp_path):
    """In place of the papers': one that compares continuations, as most of these do. Its number is
    that of `evaluate`.
    """
    pytest.importorskip("lm_eval", reason=HARNESS)
    where = a_run(tmp_path, steps=60, dtype=torch.float32)
    hub.export(where, tmp_path / "exported")
    words, _ = manual_s_command()
    words[words.index("--tasks") + 1] = "cheems_recall"
    words += ["--include_path", str(harness.FOLDER), "--device", "cpu", "--limit", "12"]
    words += ["--batch_size", "12", "--output_path", "results.json"]
    offline = dict.fromkeys(harness.OFFLINE, "1")  # which counts before the library is imported
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=tmp_path,
        env=os.environ | offline | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("results*.json")
    results = json.loads(path.read_text())["results"]
    score = the_score(where, "cheems_recall", TEXT, length=256, limit=12)
    assert results["cheems_recall"]["acc,none"] == close(score.value)
    assert 0 < score.value < 1


# What is said, without a run and with the status of a wrong option, or of a run.
WRONG = [
    (
        "no-such-run --tasks cheems_close",
        "--tasks: 'cheems_close'; did you mean cheems_cloze?; there is cheems_held_out, ",
    ),
    ("no-such-run --limit 0", "--limit: must be at least 1, got 0"),
    ("no-such-run --tasks cheems_recall --text a", "--text has no effect on cheems_recall"),
    ("nowhere", "no checkpoint at nowhere"),
    ("run --text text --seq-len 40", "length = 40 has no room"),
    ("run --text blank", "different continuations"),
    ("run --text short --tasks cheems_needle", "haystack"),
    ("few --text text", "the model of few has 16 ids, and a text has 256"),
    ("gate --tasks cheems_recall --seq-len 64", "max_positions = 32"),
]


def test_what_cannot_be_done_is_refused_in_one_line(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason=HARNESS)
    monkeypatch.chdir(tmp_path)
    for name, text in dict(text=TEXT, blank=" \n" * 300, short="a cat").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    gated = dict(pattern="IM", mask="gate", max_positions=32)
    a_run(tmp_path, model=gated, seq_len=32).rename("gate")
    trained(training, tmp_path / "few", steps=1)
    a_run(tmp_path)
    for words, message in WRONG:
        done = run("evaluate", "--run", *words.split())
        fails(done, re.escape(message), done.status or 1)
