"""The command `export`: what it writes is the model of the run, and nothing is written over."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from test_commands import content, examples_in, fails, run, succeeds, training
from training import step

from cheems_lab.checkpoint import _seal, load_model
from cheems_ref.text import text_to_ids
from cheems_ref.verify import check

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it
transformers.utils.logging.disable_progress_bar()

WRITTEN = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
WRITTEN += ["modeling_cheems_ref.py", "tokenizer.json", "tokenizer_config.json"]


def loaded(said):
    """The model, by the line that is printed."""
    (call,) = re.findall(r"^to load it: (.*)$", said, re.M)
    quoted = re.fullmatch(r"AutoModelForCausalLM.from_pretrained\(('.*'), trust_\w+=True\)", call)
    assert quoted and Path(ast.literal_eval(quoted[1])).is_absolute(), call
    return eval(call, dict(AutoModelForCausalLM=transformers.AutoModelForCausalLM))


def test_the_checkpoint_that_is_named_is_written(tmp_path):
    """Of a run the newest; into a folder that is new, or empty, also where its name has blanks."""
    succeeds(run(*training(tmp_path, "--steps", 2, "--checkpoint-every", 1)))
    (tmp_path / "empty").mkdir()
    prompt = text_to_ids("the café")[None]
    for name, n, to in ((f"run/{step(1)}", 1, "an export"), ("run", 2, "empty")):
        done = succeeds(run("export", "--run", tmp_path / name, "--to", tmp_path / to))
        assert sorted(path.name for path in (tmp_path / to).iterdir()) == WRITTEN
        assert f"written: {', '.join(WRITTEN)}\n" in done.out
        want = load_model(tmp_path / "run" / step(n))
        with torch.no_grad():
            check("the logits of the run", loaded(done.out)(prompt).logits, want(prompt)[0])


REFUSED = [
    ("nowhere", "new", "no checkpoint at nowhere", 1),
    ("run", "run", "--to: run already exists and is not empty", 2),
    ("run", "text", "--to: text already exists", 2),
    ("run", "text/new", "Not a directory: .*text/new|File exists: .*text", 1),
]


def test_what_cannot_be_written_is_refused(tiny_run, tmp_path, monkeypatch):
    """In one line, and nothing is changed."""
    shutil.copytree(tiny_run, tmp_path / "run")
    (tmp_path / "text").write_text("a text of more than eight bytes")
    monkeypatch.chdir(tmp_path)
    before = content(tmp_path)
    for of, to, message, status in REFUSED:
        fails(run("export", "--run", of, "--to", to), message, status)
        assert content(tmp_path) == before, f"something is written: {to}"


def test_the_examples_are_taken(tiny_run, tmp_path, monkeypatch):
    """As they stand, where the runs are there."""
    monkeypatch.chdir(tmp_path)
    for words in examples_in(run("export", "--help").out):
        of = tmp_path / words[words.index("--run") + 1]
        of.parent.mkdir(parents=True, exist_ok=True)
        if of.name.startswith("step-"):
            shutil.copytree(tiny_run / step(1), of)
            record = json.loads((of / "record.json").read_text())
            del record["sha256"]
            record["step"] = int(of.name[5:])
            (of / "record.json").write_text(json.dumps(record | {"sha256": _seal(record)}))
        else:
            shutil.copytree(tiny_run, of)
        succeeds(run(*words))
