"""The command `export`: what it writes is the model of the run, and nothing is written over."""

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_command_line import a_run, content, ended, examples_in, fails, run, succeeds, training
from training import process, step

import cheems_ref
from cheems_ref import command_line, export_command, shards
from cheems_ref.checkpoint import load_model, read_record
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
    weights = dict(want.named_parameters())
    for name, p in got.named_parameters():
        assert torch.equal(p, weights[name.removeprefix("model.")]), f"another {name} is written"
    check("logits of the model that is written", got(prompt).logits, want(prompt)[0])


def the_run_is_written(m, folder):
    """Into a folder that is new, or empty, also where its name has blanks."""
    a_run(folder)
    for name in ("an export", "empty"):
        to = folder / name
        to.mkdir() if name == "empty" else None
        done = succeeds(run(m, "export", "--run", folder / "run", "--to", to))
        assert sorted(path.name for path in to.iterdir()) == WRITTEN
        assert f"written: {', '.join(WRITTEN)}\n" in done.out
        is_of(loaded(done.out), load_model(folder / "run"))


def the_checkpoint_that_is_named_is_written(m, folder):
    """Of a run the newest; else the one that is asked for."""
    words = ("--steps", 2, "--checkpoint-every", 1)
    succeeds(run(command_line, *training(folder, *words)))
    kept = [load_model(folder / "run" / step(i)) for i in (1, 2)]
    for name, want in ((f"run/{step(1)}", kept[0]), (f"run/{step(2)}", kept[1]), ("run", kept[1])):
        to = folder / f"out of {name.replace('/', ' ')}"
        is_of(loaded(run(m, "export", "--run", folder / name, "--to", to).out), want)


# fmt: off
REFUSED = {
    "no such run": (["nowhere", "new"], "nowhere holds no checkpoint"),
    "a run without checkpoints": (["empty", "new"], "empty holds no checkpoint"),
    "a text for a run": (["text", "new"], "text is damaged, or no checkpoint"),
    "no run": (["", "new"], "--run is empty"),
    "no place": (["run", ""], "--to is empty"),
    "its own run": (["run", "run"], "--to run is there already; it takes .* new or empty"),
    "another run": (["run", "other"], "--to other is there already"),
    "other files": (["run", "full"], "--to full is there already"),
    "a file": (["run", "text"], "--to text is there already"),
    "below a file": (["run", "text/new"], "Not a directory: .*text/new"),
}
# fmt: on


def what_cannot_be_written_is_refused(m, folder):
    """In one line, and nothing is changed."""
    a_run(folder)
    shutil.copytree(folder / "run", folder / "other")
    (folder / "text").write_text("a text of more than eight bytes")
    for name in ("empty", "full"):
        (folder / name).mkdir()
    for name in ("b", "a"):
        (folder / "full" / name).write_text("kept")
    before = content(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for (of, to), message in REFUSED.values():
            fails(run(m, "export", "--run", of, "--to", to), message)
            assert content(folder) == before, f"something is written: {to}"
            assert not (folder / "new").exists()
        (folder / "run" / step(1)).write_bytes(b"")
        fails(run(m, "export", "--run", "run", "--to", "new"), f"{step(1)} is damaged")
        assert not (folder / "new").exists()


def without_the_library_it_says_what_to_install(m, folder):
    a_run(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(cheems_ref, "hub", raising=False)
        patched.delitem(sys.modules, "cheems_ref.hub", raising=False)
        patched.setitem(sys.modules, "transformers", None)
        done = run(m, "export", "--run", folder / "run", "--to", folder / "new")
    fails(done, r'cheems_ref.hub needs transformers: pip install "cheems-ref\[hub\]"$')
    assert not (folder / "new").exists()


HELD = (
    the_run_is_written,
    the_checkpoint_that_is_named_is_written,
    what_cannot_be_written_is_refused,
    without_the_library_it_says_what_to_install,
)


@pytest.mark.parametrize("has_property", HELD, ids=lambda has_property: has_property.__name__)
def test_the_command_has_the_property(has_property, tmp_path):
    has_property(export_command, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # off, where parts are written
def test_a_checkpoint_of_several_processes_will_do(tmp_path):
    """A folder in place of a file."""
    a_run(tmp_path)
    want, file = load_model(tmp_path / "run"), tmp_path / "run" / step(1)
    parts = file.with_suffix("")
    shards.write(load_file(file), read_record(file), parts, want)
    file.unlink()
    for i, name in enumerate((parts, tmp_path / "run")):
        done = run(export_command, "export", "--run", name, "--to", tmp_path / str(i))
        is_of(loaded(succeeds(done).out), want)


def test_as_a_process_it_says_what_it_does_and_draws_no_bar(tmp_path):
    a_run(tmp_path)
    done = succeeds(ended(process("export", "--run", tmp_path / "run", "--to", tmp_path / "out")))
    first, *rest = done.out.splitlines()
    assert first == f"exporting {tmp_path / 'run'} to {tmp_path / 'out'}" and len(rest) == 2
    is_of(loaded(done.out), load_model(tmp_path / "run"))


def test_the_examples_are_taken(tmp_path, monkeypatch):
    """As they stand, where the runs are there."""
    a_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in examples_in(run(export_command, "export", "--help").out):
        of = tmp_path / words[words.index("--run") + 1]
        of.parent.mkdir(parents=True, exist_ok=True)
        source = tmp_path / "run" / step(1)
        shutil.copytree(source.parent, of) if not of.suffix else shutil.copy(source, of)
        succeeds(run(export_command, *words))
