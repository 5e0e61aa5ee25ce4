"""Checkpoints: runs killed and resumed, damaged and foreign ones, two runs in one directory."""

import dataclasses
import functools
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
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
)

from cheems_lab import checkpoint, training
from cheems_lab.__main__ import main
from cheems_lab.checkpoint import CheckpointError, load_model, newest_checkpoint, restore, save
from cheems_ref.train import random_windows
from cheems_ref.verify import check

lab = functools.partial(trained, training)


@functools.cache
def a_run():
    """After step 7, to be saved and not to be changed."""
    return lab(stop=7)


def later(run, steps):
    """A run as if it had gone on."""
    run.losses += [1.0] * (steps - run.step)
    return run


# --- resuming -------------------------------------------------------------------------------------
# Bits are the subject: parameters are copied into memory that torch has aligned, as it was before.


@pytest.mark.parametrize("kind", MODELS)
def test_a_resumed_run_is_one_that_was_never_stopped(tmp_path, kind):
    whole = lab(tmp_path / "whole", model=a_model(**MODELS[kind]), evaluate_every=2)
    for stop in (4, 6, 11):
        place = tmp_path / f"stopped at {stop}"
        lab(place, stop=stop, model=a_model(**MODELS[kind]), evaluate_every=2)
        again = lab(place, model=a_model(seed=9, **MODELS[kind]), evaluate_every=2)
        same(f"stopped at {stop}, resumed", everything(again), everything(whole))
        assert names(place) == names(tmp_path / "whole")
        for one in (step(8), step(12)):
            same(one, tensors_of(place / one), tensors_of(tmp_path / "whole" / one))


def test_frozen_parameters_have_no_moments(tmp_path):
    def frozen(seed=0):
        model = a_model(seed)
        model.embedding.weight.requires_grad_(False)
        return model

    whole = lab(model=frozen())
    lab(tmp_path, stop=6, model=frozen())
    again = lab(tmp_path, model=frozen(9))
    assert again.losses == whole.losses
    assert torch.equal(again.model.embedding.weight, frozen().embedding.weight)


def test_more_steps_keep_the_schedule(tmp_path):
    lab(tmp_path)
    options = dict(steps=15, decay_steps=12, checkpoint_every=5)
    want = lab(steps=15, decay_steps=12)
    same("12 steps, then 3 more", everything(lab(tmp_path, model=a_model(9), **options)),
         everything(want))  # fmt: skip
    assert want.losses[:12] == lab().losses and names(tmp_path) == [step(12), step(15)]


def test_all_of_a_run_is_restored(tmp_path):
    model, again = (a_model(seed, dtype=torch.float64) for seed in (0, 9))
    run, other = lab(stop=7, model=model), lab(stop=10, model=again)
    restore(other, save(run, tmp_path))
    same("restored", everything(other), everything(run))
    windows = [random_windows(a_text(), r.config, r.generator) for r in (run, other)]
    assert torch.equal(*windows), "the next windows differ"


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_loaded_as_it_was(tmp_path, kind):
    logits, weights, text = {}, {}, a_text()[None]

    def note(run):
        logits[run.step] = run.model(text)[0].detach()
        weights[run.step] = {k: p.detach().clone() for k, p in run.model.named_parameters()}

    model = a_model(**MODELS[kind])
    config = training.TrainConfig(steps=12, batch_size=2, seq_len=8, checkpoint_every=4)
    training.train(model, text[0], config, directory=tmp_path, progress_bar=False, after_step=note)
    for path, n in ((tmp_path, 12), (tmp_path / step(8), 8)):
        loaded = load_model(path)
        assert loaded.config == model.config and loaded.training
        assert all(p.requires_grad for p in loaded.parameters())
        same(f"step {n}", {k: p.detach() for k, p in loaded.named_parameters()}, weights[n])
        check(f"logits of step {n}", loaded(text)[0].detach(), logits[n])
    assert load_model(str(tmp_path)).config == model.config


def test_a_checkpoint_is_complete_and_plain(tmp_path):
    run = lab(tmp_path, model=a_model(tie_embeddings=False))
    tensors, record = tensors_of(tmp_path / step(12)), record_of(tmp_path / step(12))
    parameters = dict(run.model.named_parameters())
    kinds = ("model", "exp_avg", "exp_avg_sq")
    want = {f"{kind}.{name}" for kind in kinds for name in parameters}
    assert tensors.keys() == want | {"losses", "random_state"}
    for name, p in parameters.items():
        assert torch.equal(tensors[f"model.{name}"], p)
    assert record["losses"] == run.losses and record["evaluations"] == run.evaluations
    for key, c in (("training", run.config), ("model", run.model.config)):
        assert record[key] == json.loads(json.dumps(dataclasses.asdict(c)))


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

    things = [(os, "fsync"), (json, "dumps"), (shutil, "rmtree")]
    things += [(Path, name) for name in ("mkdir", "rename", "write_text", "unlink")]
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

    run = lab(stop=6)
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    path = save(run, tmp_path)
    (tensors,) = path.glob("*.safetensors")
    written = [file.stat().st_ino for file in (tensors, path / "record.json", path)]
    assert done == [*written, "renamed", tmp_path.stat().st_ino]


@pytest.mark.parametrize(
    ("where", "name"),
    [(dcp.HuggingFaceStorageWriter, "write_data"), (Path, "mkdir"), (Path, "write_text"),
     (os, "fsync"), (Path, "rename")],
)  # fmt: skip
@pytest.mark.parametrize("before", [[], [3]])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, where, name, before):
    run, other = lab(stop=4), lab(stop=1, model=a_model(9))
    kept = [save(lab(stop=n), tmp_path) for n in before]
    files = content(tmp_path)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError) as error:
        patch.setattr(where, name, fail)
        save(run, tmp_path)
    end = f"the last whole checkpoint is {kept[0] if kept else None}"
    assert "step 4 cannot be written" in str(error.value) and str(error.value).endswith(end)
    assert "No space left" in str(error.value)
    assert content(tmp_path) == files, "half a checkpoint is left"
    restore(other, save(run, tmp_path))
    assert other.step == 4


# As a sitecustomize.py, this makes every fsync take so long that a kill can strike it.
SLOW_DISK = """
import os, time
sync = os.fsync
def slow(descriptor):
    time.sleep(0.2)
    sync(descriptor)
os.fsync = slow
"""


def command(folder, *more):
    """The arguments of a small run."""
    text = folder / "text"
    text.write_text("the cat sat on the mat, and the dog lay on the log. " * 20)
    words = ["train", "--text", str(text), "--pattern", "SM", "--steps", "50", "--no-progress-bar"]
    words += ["--batch-size", "4", "--seq-len", "16", "--checkpoint-every", "10", "--device", "cpu"]
    for setting in ("d_model=16", "d_ff=16", "d_state=4", "chunk_size=8"):
        words += ["--set", setting]
    return [*words, *map(str, more)]


def wait_for(condition, started, seconds=60):
    end = time.monotonic() + seconds
    while not (seen := condition()) and started.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    return seen


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_a_process_killed_while_it_saves_resumes_as_if_never_killed(tmp_path, capsys):
    slow, run = tmp_path / "slow", tmp_path / "run"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_DISK)
    assert main(command(tmp_path, "--run", tmp_path / "whole")) == 0
    words = command(tmp_path, "--run", run)
    started = process(*words, path=slow)

    def is_writing():
        return (run / step(20)).exists() and any(run.glob("partial-step-*"))

    assert wait_for(is_writing, started)
    with pytest.raises(training.RunningError, match="another process is training in"):
        lab(run)
    started.kill()
    started.communicate()
    assert any(run.glob("partial-step-*")), "the kill came too late to strike the writing"
    killed = newest_checkpoint(run)
    assert step(20) <= killed.name < step(50)
    capsys.readouterr()
    assert main(words) == 0  # a killed process holds no lock
    assert f"resuming from {killed}" in capsys.readouterr().out
    last = step(50)
    same("resumed", tensors_of(run / last), tensors_of(tmp_path / "whole" / last))
    digests = {"files": 0, "sha256": 0}
    assert record_of(run / last) | digests == record_of(tmp_path / "whole" / last) | digests


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoints of steps 7 and 8."""
    folder = tmp_path_factory.mktemp("saved")
    for run in (lab(stop=3), a_run(), lab(stop=8)):
        save(run, folder)
    assert names(folder) == [step(7), step(8)], "not the last two are kept"
    return folder


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


def flip(path, where):
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


# fmt: off
DAMAGE = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "first bit": lambda path: flip(path, 0),
    "some bit": lambda path: flip(path, 0.5),
    "last bit": lambda path: flip(path, 1),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"embedding.weight": [1.0]})),
    "other JSON": lambda path: path.write_bytes(b'{"model": {}}'),
    "a list": lambda path: path.write_bytes(b"[1, 2]"),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}
# fmt: on


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("file", ["*.safetensors", "record.json"])
def test_damage_is_named_with_the_way_back(saved, tmp_path, damage, file):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    run, (second, third) = lab(stop=3), sorted(tmp_path.glob("step-*"))
    damage(next(third.glob(file)))
    rejected(run, third, "is damaged", rf"Move it away .* {re.escape(str(second))}$")
    damage(next(second.glob(file)))
    rejected(run, second, "There is none before it: start again in another directory")


def test_a_run_does_not_resume_from_a_damaged_checkpoint(tmp_path):
    lab(tmp_path, stop=9)
    flip(next((tmp_path / step(8)).glob("*.safetensors")), 0.5)
    files, model = content(tmp_path), a_model(9)
    with pytest.raises(CheckpointError, match=f"{step(8)} is .* Move it away .*{step(4)}"):
        lab(tmp_path, model=model)
    assert content(tmp_path) == files, "the files are changed"
    (tmp_path / step(8)).rename(tmp_path / f"old-{step(8)}")  # as the message says
    same("from the one before it", everything(lab(tmp_path, model=model)), everything(lab()))


def test_a_file_that_does_not_belong_is_named(tmp_path):
    path = save(a_run(), tmp_path)
    save_file({"model.norm.weight": torch.ones(8)}, path / "other.safetensors")
    rejected(lab(stop=3), path, "other.safetensors differs from what was written")


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something is unpickled")

    for where, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(where, name, refuse)
    lab(tmp_path, stop=6)
    lab(tmp_path, model=a_model(9), stop=9)
    load_model(tmp_path)


def forge(path, change):
    """Change the record or the tensors, and seal them anew."""
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


@pytest.mark.parametrize("kind", ["missing", "other shape"])
def test_tensors_that_do_not_fit_are_named(tmp_path, kind):
    """As those of a model that has other layers in another version, under the same settings."""

    def change(_, tensors):
        t = tensors.pop("model.norm.weight")
        if kind == "other shape":
            tensors["model.norm.weight"] = t[:-1].clone()

    path = forge(save(a_run(), tmp_path), change)
    rejected(lab(stop=3), path, r"not fit.*model\.norm\.weight")
    with pytest.raises(CheckpointError, match=r"not fit.*model\.norm\.weight"):
        load_model(path)


def test_another_format_is_named(tmp_path):
    path = forge(save(a_run(), tmp_path), lambda record, _: record.update(format="checkpoint 0"))
    rejected(lab(stop=3), path, "has the format 'checkpoint 0'; this version reads")


def changed(text):
    text = text.clone()
    text[-1] = (text[-1] + 1) % 16
    return text


@pytest.mark.parametrize(("changes", "message"), [
    (dict(model=dict(pattern="SM")), r"pattern \(AM, now SM\)"),
    (dict(model=dict(d_ff=12)), r"d_ff \(8, now 12\)"),
    (dict(model=dict(norm_eps=1e-5, rope_base=7)), r"rope_base \(.*7\), norm_eps \(1e-06, now"),
    (dict(steps=13), r"decay_steps \(12, now 13\)\. Resume with its settings, or take another d"),
    (dict(steps=13, decay_steps=11), r"decay_steps \(12, now 11\)"),
    (dict(betas=(0.9, 0.98)), r"betas \(\[0\.9, 0\.999\], now \[0\.9, 0\.98\]\)"),
    (dict(seed=3, max_grad_norm=0.5), r"max_grad_norm \(1\.0, now 0\.5\), seed \(0, now 3\)"),
    (dict(ids=changed(a_text())), r"text \(\w{8}, now \w{8}\)"),
    (dict(ids=a_text(201)), "text "),
])  # fmt: skip
def test_other_runs_are_rejected_with_what_differs(tmp_path, changes, message):
    model = a_model(**changes.pop("model", {}))
    rejected(lab(stop=3, model=model, **changes), save(a_run(), tmp_path), message)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changes", "message"),
    [(dict(n_wings=2), "n_wings"), (dict(pattern="Q"), "unknown letter 'Q'"),
     (dict(d_model="8"), "d_model must be a whole number")],
)  # fmt: skip
def test_a_model_of_another_version_is_rejected_with_the_reason(tmp_path, changes, message):
    path = forge(save(a_run(), tmp_path), lambda record, _: record["model"].update(changes))
    with pytest.raises(CheckpointError, match=f"no model of this version.*{message}"):
        load_model(path)


def test_no_model_is_loaded_where_there_is_none(tmp_path):
    (tmp_path / "file").write_text("text")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere" / step(4), tmp_path / "file"):
        with pytest.raises(CheckpointError, match=f"no checkpoint at {path}"):
            load_model(path)
