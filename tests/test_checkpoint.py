"""Checkpoints: runs killed and resumed, damaged and foreign ones, two runs in one directory."""

import dataclasses
import functools
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from test_commands import run as main_run
from test_commands import succeeds
from test_commands import training as command
from training import (
    MODELS,
    a_model,
    a_text,
    content,
    everything,
    names,
    process,
    record_of,
    same,
    step,
    tensors_of,
    trained,
    until,
)

from cheems_lab import checkpoint, training
from cheems_lab.checkpoint import CheckpointError, load_model, newest_checkpoint, restore, save

lab = functools.partial(trained, training)


@functools.cache
def a_run(n=7):
    """After step n, to be saved and not to be changed."""
    return lab(stop=n)


def later(run, steps):
    """A run as if it had gone on."""
    run.losses += [1.0] * (steps - run.step)
    return run


# --- a record that says something else than its file ----------------------------------------------


def test_a_model_that_does_not_fit_its_file_is_refused_before_it_is_made(tmp_path, monkeypatch):
    """Even one of 10,000 layers, or with a table that no memory holds."""
    place = save(a_run(), tmp_path / "run")
    record, made = json.loads((place / "record.json").read_text()), []

    class Watched(checkpoint.CausalLM):
        def __init__(self, config):
            made.append((len(config.pattern), torch.get_default_device().type))
            super().__init__(config)

    monkeypatch.setattr(checkpoint, "CausalLM", Watched)
    layers = len(record["model"]["pattern"])
    for field, value, message, meta in (
        ("pattern", "S" * 10_000, f"has {layers} layers, and the pattern .* has 10000", 0),
        ("vocab_size", 2**31 - 1, "embedding.weight is .* record says .2147483647,", 1),
        ("d_ff", 2**30, r"does not fit the model: model\.blocks\.", 1),
    ):
        other = record | {"model": record["model"] | {field: value}}
        del other["sha256"]
        other["sha256"] = checkpoint._seal(other)
        (place / "record.json").write_text(json.dumps(other))
        with pytest.raises(CheckpointError, match=message):
            load_model(place)
        assert made == [(layers, "meta")] * meta
        made.clear()


# --- resuming -------------------------------------------------------------------------------------
# Bits are the subject: parameters are copied into memory that torch has aligned, as it was before.


def test_a_resumed_run_is_one_that_was_never_stopped(tmp_path):
    """Whatever its model; its last model is loaded as it was."""
    for kind, options in MODELS.items():
        whole = lab(tmp_path / kind, model=a_model(**options), evaluate_every=2)
        for stop in (4, 11) if kind == "tied" else (6,):
            place = tmp_path / f"{kind} stopped at {stop}"
            lab(place, stop=stop, model=a_model(**options), evaluate_every=2)
            again = lab(place, model=a_model(seed=9, **options), evaluate_every=2)
            same(f"{kind} stopped at {stop}, resumed", everything(again), everything(whole))
            assert names(place) == names(tmp_path / kind)
            for one in (step(8), step(12)):
                same(one, tensors_of(place / one), tensors_of(tmp_path / kind / one))
        loaded = load_model(tmp_path / kind)
        assert loaded.config == whole.model.config and loaded.training
        same(f"{kind}, loaded", loaded.state_dict(), whole.model.state_dict())


def test_a_checkpoint_is_complete_and_plain(tmp_path):
    """Of a parameter that is frozen there are no moments."""

    def frozen(seed=0):
        model = a_model(seed, tie_embeddings=False)
        model.embedding.weight.requires_grad_(False)
        return model

    run = lab(tmp_path, model=frozen())
    tensors, record = tensors_of(tmp_path / step(12)), record_of(tmp_path / step(12))
    parameters = dict(run.model.named_parameters())
    want = {f"model.{name}" for name in parameters}
    moments = ("exp_avg", "exp_avg_sq")
    want |= {f"{m}.{name}" for m in moments for name in parameters if "embedding" not in name}
    assert tensors.keys() == want | {"losses", "random_state"}
    for name, p in parameters.items():
        assert torch.equal(tensors[f"model.{name}"], p)
    assert record["losses"] == run.losses and record["evaluations"] == run.evaluations
    for key, c in (("training", run.config), ("model", run.model.config)):
        assert record[key] == json.loads(json.dumps(dataclasses.asdict(c)))
    lab(tmp_path / "stopped", stop=6, model=frozen())
    assert lab(tmp_path / "stopped", model=frozen(9)).losses == run.losses


# --- killed, and disks that are full --------------------------------------------------------------


class Crash(BaseException):
    """What a kill is to a process."""


def crash_in_save(run, folder, n):
    """Save, killed at the n-th call to the file system; False if there are fewer."""
    calls = itertools.count(1)

    def crashing(function):
        def call(*arguments, **options):
            if next(calls) == n:
                raise Crash
            return function(*arguments, **options)

        return call

    things = [(os, "fsync"), (os, "replace"), (json, "dumps")]
    things += [(Path, name) for name in ("mkdir", "rename", "unlink", "rmdir")]
    things += [(dcp.HuggingFaceStorageWriter, name) for name in ("write_data", "finish")]
    with pytest.MonkeyPatch.context() as patch:
        for where, name in things:
            patch.setattr(where, name, crashing(getattr(where, name)))
        try:
            save(run, folder)
        except (Crash, OSError):  # the latter from within torch's writer
            return True
    return False


def test_a_crash_anywhere_leaves_whole_checkpoints(tmp_path):
    run, other = lab(stop=4), lab(stop=1, model=a_model(9))
    base = tmp_path / "base"
    for steps in (4, 8):
        save(later(run, steps), base)
    later(run, 12)
    (base / f"partial-{step(2)}").mkdir()
    for n in itertools.count(1):
        place = tmp_path / str(n)
        shutil.copytree(base, place)
        crashed = crash_in_save(run, place, n)
        found = [path.name for path in sorted(place.glob("step-*"))]
        for name in found:
            restore(other, place / name)
            assert name == step(other.step)
        assert found in ([step(4), step(8)], [step(4), step(8), step(12)], [step(8), step(12)])
        if not crashed:
            break
        save(run, place)
        assert names(place)[-1] == step(12) and not any(place.glob("partial-step-*"))
    assert n > 8, f"save does only {n - 1} things"


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, sync, rename = [], os.fsync, Path.rename

    def note_sync(descriptor):
        done.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def note_rename(path, target):
        done.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    path = save(a_run(), tmp_path)
    (tensors,) = path.glob("*.safetensors")
    written = [file.stat().st_ino for file in (tensors, path / "record.json", path)]
    assert done == [*written, "renamed", tmp_path.stat().st_ino]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    for before, where in itertools.product((False, True), ("write_data", "fsync")):
        place = tmp_path / f"{before} {where}"
        place.mkdir()
        kept = save(a_run(3), place) if before else None
        files = content(place)
        said = f"step 4 cannot be written.*No space left.*the last whole checkpoint is {kept}$"
        with monkeypatch.context() as patch, pytest.raises(OSError, match=said):
            patch.setattr(os if where == "fsync" else dcp.HuggingFaceStorageWriter, where, fail)
            save(a_run(4), place)
        assert content(place) == files, "half a checkpoint is left"


# As a sitecustomize.py, this makes every fsync take so long that a kill can strike it.
SLOW_DISK = """
import os, time
sync = os.fsync
def slow(descriptor):
    time.sleep(0.1)
    sync(descriptor)
os.fsync = slow
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_a_process_killed_while_it_saves_resumes_as_if_never_killed(tmp_path):
    """While it runs, no other run may use its directory; a killed process holds no lock."""
    slow, run = tmp_path / "slow", tmp_path / "run"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_DISK)
    more = ("--steps", 30, "--checkpoint-every", 6)
    words = command(tmp_path, *more)
    started = process(*words, path=slow)
    succeeds(main_run(*command(tmp_path, *more, name="whole")))
    until(lambda: (run / step(12)).exists() and any(run.glob("partial-step-*")))
    with pytest.raises(training.RunningError, match="another process is training in"):
        lab(run)
    started.kill()
    started.communicate()
    assert any(run.glob("partial-step-*")), "the kill came too late to strike the writing"
    killed = newest_checkpoint(run)
    assert step(12) <= killed.name < step(30)
    assert f"resuming from {killed}" in succeeds(main_run(*words)).out
    last = step(30)
    same("resumed", tensors_of(run / last), tensors_of(tmp_path / "whole" / last))
    digests = {"files": 0, "sha256": 0}
    assert record_of(run / last) | digests == record_of(tmp_path / "whole" / last) | digests


def test_a_save_removes_only_what_a_save_has_made(tmp_path):
    """Files and folders of the user stay, whatever their names; so does what a link leads to."""
    mine = ["partial-results.csv", "partial-thesis/chapter", "step-00000001/note"]
    mine += [f"partial-{step(4)}/note", f"partial-dropped-{step(4)}/note", ".options.json.partial"]
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    left = tmp_path / f"partial-{step(2)}"  # by a save that was killed
    left.mkdir()
    (left / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / f"partial-{step(3)}").symlink_to(tmp_path / "partial-thesis")
    (tmp_path / "step-00000001").rename(tmp_path / "apart")
    run = lab(tmp_path)
    mine[2] = "apart/note"
    assert {(tmp_path / name).read_text() for name in mine} == {"mine"}
    assert not left.exists() and (tmp_path / f"partial-{step(3)}").is_symlink()
    for n in (8, 12):
        restore(lab(stop=1, model=a_model(9)), tmp_path / step(n))
    assert run.step == 12 and not (tmp_path / step(4)).exists()


def test_a_folder_s_name_is_not_taken_for_its_step(tmp_path):
    """A copy under a greater name is refused; one that comes while a run saves pushes none out."""
    path = save(a_run(3), tmp_path)
    for name in (step(99_999_998), step(99_999_999), step(1)):
        shutil.copytree(path, tmp_path / name)
    files = content(tmp_path)
    said = r"step-99999999 has the name of step 99999999, and holds step 3: move it away"
    for ask in (lambda: lab(tmp_path), lambda: load_model(tmp_path)):
        with pytest.raises(CheckpointError, match=said):
            ask()
    assert content(tmp_path) | {".lock": b""} == files | {".lock": b""}
    run = lab(stop=4)
    for n in (4, 8, 12):
        save(later(run, n), tmp_path)
    left = {step(n) for n in (1, 8, 12, 99_999_998, 99_999_999)}
    assert {found.name for found in tmp_path.glob("step-*")} == left
    (tmp_path / step(16)).mkdir()  # nobody's
    with pytest.raises(CheckpointError, match=f"{step(16)} is damaged"):
        save(later(run, 16), tmp_path)


def test_a_resumed_run_hashes_its_checkpoint_once(tmp_path, monkeypatch):
    words = command(tmp_path, "--steps", 2)
    succeeds(main_run(*words))
    hashed, digests = [], checkpoint._digests
    monkeypatch.setattr(checkpoint, "_digests", lambda path: hashed.append(path) or digests(path))
    succeeds(main_run("train", "--run", tmp_path / "run", "--steps", 3, "--device", "cpu"))
    assert [path.name for path in hashed] == [step(2), f"partial-{step(3)}"]


# --- checkpoints that are rejected ----------------------------------------------------------------


def rejected(run, path, *messages):
    """With a CheckpointError that says so; the run and the files are left as they were."""
    before, files, random = everything(run), content(path.parent), torch.get_rng_state()
    with pytest.raises(CheckpointError) as error:
        restore(run, path)
    for message in (re.escape(str(path)), *messages):
        assert re.search(message, str(error.value)), f"{message!r} is not in: {error.value}"
    same("rejected", everything(run), before)
    assert content(path.parent) == files, "the files are changed"
    assert torch.equal(torch.get_rng_state(), random)


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


DAMAGE = {
    "cut short": lambda data: data[:-20],
    "one bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "empty": lambda data: b"",
    "a pickle": lambda data: pickle.dumps({"embedding.weight": [1.0]}),
    "other JSON": lambda data: b'{"model": {}}',
}


def test_damage_is_named_with_the_way_back(tmp_path):
    """Also where the message is taken at its word; a file that does not belong is damage."""
    lab(tmp_path / "whole", stop=9)
    run, model = lab(stop=3), a_model(9)
    for file, kind in itertools.product(("*.safetensors", "record.json"), DAMAGE):
        place = tmp_path / f"{file[2:5]} {kind}"
        shutil.copytree(tmp_path / "whole", place)
        first, second = sorted(place.glob("step-*"))
        damage(next(second.glob(file)), DAMAGE[kind])
        rejected(run, second, "is damaged", rf"Move it away .* {re.escape(str(first))}$")
        next(first.glob(file)).unlink()
        rejected(run, first, "There is none before it: start again in another directory")
    place = tmp_path / "whole"
    save_file({"model.norm.weight": torch.ones(8)}, place / step(8) / "other.safetensors")
    files = content(place)
    with pytest.raises(CheckpointError, match=f"other.safetensors differs .*away .*{step(4)}"):
        lab(place, model=model)
    assert content(place) == files, "the files are changed"
    (place / step(8)).rename(place / f"old-{step(8)}")  # as the message says
    same("from the one before it", everything(lab(place, model=model)), everything(lab()))


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something is unpickled")

    for where, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(where, name, refuse)
    lab(tmp_path, stop=6)
    lab(tmp_path, model=a_model(9), stop=9)
    load_model(tmp_path)


def forge(folder, change):
    """A checkpoint whose record or tensors are changed, and sealed anew."""
    path = save(a_run(), folder)
    (file,) = path.glob("*.safetensors")
    record = json.loads((path / "record.json").read_text())
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    del record["sha256"]
    change(record, tensors)
    for name in (file, path / "record.json"):
        name.unlink()
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.save(tensors, storage_writer=writer, no_dist=True)
    shutil.move(path, path.with_name("partial-forged"))
    checkpoint._finish(path.with_name("partial-forged"), path, record)
    return path


@pytest.mark.usefixtures("unchecked")
def test_checkpoints_of_other_versions_are_rejected(tmp_path):
    """Of another format, with tensors that do not fit, with a model that is none here."""
    old = forge(tmp_path / "0", lambda record, _: record.update(format="checkpoint 0"))
    rejected(lab(stop=3), old, "has the format 'checkpoint 0'; this version reads")
    lacking = forge(tmp_path / "1", lambda _, tensors: tensors.pop("model.norm.weight"))
    shorter = {"model.norm.weight": torch.ones(7)}
    for path in (lacking, forge(tmp_path / "2", lambda _, tensors: tensors.update(shorter))):
        rejected(lab(stop=3), path, r"not fit.*model\.norm\.weight")
        with pytest.raises(CheckpointError, match=r"not fit.*model\.norm\.weight"):
            load_model(path)
    newer = forge(tmp_path / "newer", lambda record, _: record["model"].update(n_wings=2))
    with pytest.raises(CheckpointError, match=r"no model of this version.*n_wings"):
        load_model(newer)


# What is no record, though it is sealed; and what is said of it.
RECORDS = [
    *((dict(step=n), "step in .*record.json is") for n in ("7", 1.5, None, True)),
    (dict(step=-1), "holds step -1"),
    (dict(text=5), "text in"),
    (dict(dtype="load"), "dtype in .* is 'load'"),
    *((dict(evaluations=e), "evaluations") for e in (5, [[1]], [["a", "b"]], [[7, None]])),
    (dict(evaluations=[[7, math.nan]]), r"evaluations in .* have \[7, nan\]"),
    *(({key: wrong}, f"{key} in") for key in ("model", "training", "options") for wrong in ([], 5)),
    (dict(training={"steps": "x"}), "no model of this version.*steps"),
]


@pytest.mark.usefixtures("unchecked")
def test_records_with_values_of_other_kinds_are_rejected(tmp_path):
    run = lab(stop=3)
    for i, (changes, message) in enumerate(RECORDS):
        path = forge(tmp_path / str(i), lambda record, _, changes=changes: record.update(changes))
        rejected(run, path, message)
        with pytest.raises(CheckpointError, match=message):
            load_model(path)
    path = save(a_run(), tmp_path)
    for text in ("", "[" * 100_000, "5", "[]", "NaN", "{}"):
        (path / "record.json").write_text(text)
        rejected(run, path, "is damaged.*record.json")


def test_tensors_of_another_dtype_or_that_are_no_numbers_are_rejected(tmp_path):
    """The same bytes read as integers are garbage, which nothing else would notice."""
    whole = {"model.embedding.weight": torch.zeros(16, 8, dtype=torch.int32)}
    wrong = {"model.norm.weight": torch.full((8,), math.nan)}
    for i, (tensors, message) in enumerate((
        (whole, r"model\.embedding\.weight in shard\S+ has dtype I32, not F32"),
        (wrong, r"not all of its numbers are finite \(model\.norm\.weight\)"),
    )):  # fmt: skip
        path = forge(tmp_path / str(i), lambda _, held, tensors=tensors: held.update(tensors))
        rejected(lab(stop=3), path, message)
        with pytest.raises(CheckpointError, match=message):
            load_model(path)


def sealed_anew(path):
    """Seal a checkpoint whose files have changed."""
    record = json.loads((path / "record.json").read_text())
    del record["sha256"]
    record["files"] = checkpoint._digests(path)
    record["sha256"] = checkpoint._seal(record)
    (path / "record.json").write_text(json.dumps(record))


def test_files_that_are_no_safetensors_files_are_named(tmp_path, capfd):
    """Nothing else is printed, though torch would log a traceback."""
    for name, change in (
        ("empty", lambda data: b""),
        ("a length", lambda data: (2**62).to_bytes(8, "little") + data[8:]),
        ("no JSON", lambda data: (100).to_bytes(8, "little") + b"\xff" * 100),
        ("nested", lambda data: (100_000).to_bytes(8, "little") + b"[" * 100_000),
    ):
        path = save(a_run(), tmp_path / name)
        (file,) = path.glob("*.safetensors")
        damage(file, change)
        sealed_anew(path)
        rejected(lab(stop=3), path, f"is damaged: {file.name} is no safetensors file: ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_pipe_in_a_checkpoint_is_refused_not_waited_for(tmp_path):
    """Were it opened for reading, this test would hang."""
    path = save(a_run(), tmp_path)
    os.mkfifo(path / "z.safetensors")
    with pytest.raises(CheckpointError, match=r"damaged: z\.safetensors is not a regular file"):
        load_model(path)
    (path / "z.safetensors").unlink()
    (path / "record.json").unlink()
    os.mkfifo(path / "record.json")
    with pytest.raises(CheckpointError, match=r"record\.json is not a regular file"):
        load_model(path)


def test_other_runs_are_rejected_with_what_differs(tmp_path):
    path, text = save(a_run(), tmp_path), a_text()
    text[-1] = (text[-1] + 1) % 16
    for model, changes, message in (
        (dict(norm_eps=1e-5, rope_base=7), {}, r"rope_base \(.*7\), norm_eps \(1e-06, now"),
        ({}, dict(steps=13), r"decay_steps \(12, now 13\)\. Resume with its settings, or take ano"),
        ({}, dict(seed=3, max_grad_norm=0.5), r"max_grad_norm \(1\.0, now 0\.5\), seed \(0, now"),
        ({}, dict(ids=text), r"text \(\w{8}, now \w{8}\)"),
    ):
        rejected(lab(stop=3, model=a_model(**model), **changes), path, message)


def test_no_model_is_loaded_where_there_is_none(tmp_path):
    (tmp_path / "file").write_text("text")
    for path in (tmp_path, tmp_path / "nowhere" / step(4), tmp_path / "file"):
        with pytest.raises(CheckpointError, match=f"no checkpoint at {path}"):
            load_model(path)
