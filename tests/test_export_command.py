"""The command `export`: what it writes is the model of the run, and nothing is written over."""

import ast
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from test_commands import a_run, content, examples_in, fails, run, succeeds, training
from training import step

from cheems_lab.checkpoint import load_model
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


def is_of(got, want):
    prompt = text_to_ids("the café")[None]
    with torch.no_grad():
        check("the logits of the run", got(prompt).logits, want(prompt)[0])


def the_run_is_written(folder):
    """Into a folder that is new, or empty, also where its name has blanks."""
    a_run(folder)
    for name in ("an export", "empty"):
        to = folder / name
        to.mkdir() if name == "empty" else None
        done = succeeds(run("export", "--run", folder / "run", "--to", to))
        assert sorted(path.name for path in to.iterdir()) == WRITTEN
        assert f"written: {', '.join(WRITTEN)}\n" in done.out
        is_of(loaded(done.out), load_model(folder / "run"))


def the_checkpoint_that_is_named_is_written(folder):
    """Of a run the newest; else the one that is asked for."""
    words = ("--steps", 2, "--checkpoint-every", 1)
    succeeds(run(*training(folder, *words)))
    kept = [load_model(folder / "run" / step(i)) for i in (1, 2)]
    for name, want in ((f"run/{step(1)}", kept[0]), (f"run/{step(2)}", kept[1]), ("run", kept[1])):
        to = folder / f"out of {name.replace('/', ' ')}"
        is_of(loaded(run("export", "--run", folder / name, "--to", to).out), want)


# fmt: off
REFUSED = {
    "no such run": (["nowhere", "new"], "no checkpoint at nowhere", 1),
    "a text for a run": (["text", "new"], "no checkpoint at text", 1),
    "no run": (["", "new"], "--run: is empty", 2),
    "no place": (["run", ""], "--to: is empty", 2),
    "its own run": (["run", "run"], "--to: run already exists and is not empty", 2),
    "other files": (["run", "full"], "--to: full already exists", 2),
    "a file": (["run", "text"], "--to: text already exists", 2),
    "below a file": (["run", "text/new"], "Not a directory: .*text/new|File exists: .*text", 1),
}
# fmt: on


def what_cannot_be_written_is_refused(folder):
    """In one line, and nothing is changed."""
    a_run(folder)
    (folder / "text").write_text("a text of more than eight bytes")
    for name in ("empty", "full"):
        (folder / name).mkdir()
    for name in ("b", "a"):
        (folder / "full" / name).write_text("kept")
    before = content(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for (of, to), message, status in REFUSED.values():
            fails(run("export", "--run", of, "--to", to), message, status)
            assert content(folder) == before, f"something is written: {to}"
            assert not (folder / "new").exists()
        (folder / "run" / step(1) / "record.json").write_bytes(b"")
        fails(run("export", "--run", "run", "--to", "new"), f"{step(1)} is damaged")
        assert not (folder / "new").exists()


HELD = (
    the_run_is_written,
    the_checkpoint_that_is_named_is_written,
    what_cannot_be_written_is_refused,
)


@pytest.mark.parametrize("has_property", HELD, ids=lambda has_property: has_property.__name__)
def test_the_command_has_the_property(has_property, tmp_path):
    has_property(tmp_path)


def test_the_examples_are_taken(tmp_path, monkeypatch):
    """As they stand, where the runs are there."""
    a_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in examples_in(run("export", "--help").out):
        of = tmp_path / words[words.index("--run") + 1]
        of.parent.mkdir(parents=True, exist_ok=True)
        source = tmp_path / "run" / step(1)
        shutil.copytree(source if of.name.startswith("step-") else source.parent, of)
        succeeds(run(*words))
