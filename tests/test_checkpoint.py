"""Checkpoints: runs killed and resumed, damaged and foreign files, and planted mistakes."""

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import stat
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from training import (
    MODELS,
    a_model,
    a_text,
    config,
    content,
    everything,
    names,
    process,
    record_of,
    same,
    step,
    trained,
)

import cheems_ref.train as train
from cheems_ref import checkpoint
from cheems_ref.__main__ import main
from cheems_ref.verify import check

# --- runs that go on ------------------------------------------------------------------------------


def goes_on_as_if_never_stopped(m, folder, kind="tied"):
    """In a new model, with other numbers in it, to the last bit."""
    train_it = partial(trained, m, evaluate_every=2)
    whole = train_it(folder / "whole", model=a_model(**MODELS[kind]))
    for stop in (4, 6, 11):
        place = folder / f"stopped at {stop}"
        train_it(place, stop=stop, model=a_model(**MODELS[kind]))
        try:
            again = train_it(place, model=a_model(seed=9, **MODELS[kind]))
        except FloatingPointError as error:
            raise AssertionError("a resumed run has losses that are no numbers") from error
        same(f"stopped at {stop}, resumed", everything(again), everything(whole))
    assert content(place) == content(folder / "whole"), "files of a resumed run"


def a_finished_run_is_left_as_it_is(m, folder):
    run = trained(m, folder)
    files = content(folder)
    assert run.step == 12
    same("run again", everything(trained(m, folder, model=a_model(9))), everything(run))
    assert content(folder) == files


def resumed(m, folder, **changes):
    """The run in a folder, with another model to begin with; it is not refused."""
    try:
        return trained(m, folder, model=a_model(9), **changes)
    except m.CheckpointError as error:
        raise AssertionError(f"it is refused: {error}") from error


def trains_longer_as_if_it_had_been_made_for_it(m, folder):
    """With the schedule that it was made for, to the last bit."""
    trained(m, folder)
    longer = resumed(m, folder, steps=15, schedule=12, checkpoint_every=5)
    want = trained(m, steps=15, schedule=12)
    same("12 updates, then 3 more", everything(longer), everything(want))
    assert want.losses[:12] == trained(m).losses, "more updates change those before"
    assert names(folder) == [step(12), step(15)]
    same("once more", everything(resumed(m, folder, steps=15, schedule=12)), everything(want))


def a_run_stopped_may_be_saved_and_evaluated_otherwise(m, folder):
    for changes, evaluations in (
        (dict(evaluate_every=1), [3, 6, 7, 8, 9, 10, 11, 12]),
        (dict(checkpoint_every=12), [3, 6, 9, 12]),
    ):
        trained(m, folder / str(changes), stop=6, checkpoint_every=2)
        again = resumed(m, folder / str(changes), **dict(checkpoint_every=2) | changes)
        assert again.losses == trained(m).losses
        assert [pair[0] for pair in again.evaluations] == evaluations


def runs_without_a_schedule_in_their_record_go_on(m, folder):
    """They were written before there was one."""
    trained(m, folder, stop=6, checkpoint_every=2)
    forge(folder / step(6), lambda record, _: record["training"].pop("schedule") and None)
    again = resumed(m, folder, checkpoint_every=2)
    same("goes on", everything(again), everything(trained(m, checkpoint_every=2)))


def restores_all(m, folder):
    """Into a run that is elsewhere: parameters, moments, random numbers, losses."""
    model, again = (a_model(seed, dtype=torch.float64) for seed in (0, 9))
    run, other = trained(m, stop=7, model=model), trained(m, stop=10, model=again)
    m.restore(other, m.save(run, folder))
    same("restored", everything(other), everything(run))
    windows = [m.random_windows(a_text(), r.config, r.generator) for r in (run, other)]
    assert torch.equal(*windows), "the next windows differ"


def loads_the_same_model(m, folder, kind="tied"):
    """From the run, from its checkpoint, and from an older one."""
    weights, logits, text = {}, {}, a_text()[None]

    def note(run):
        weights[run.step] = {k: p.detach().clone() for k, p in run.model.named_parameters()}
        logits[run.step] = run.model(text)[0].detach()

    model = a_model(**MODELS[kind])
    m.train(model, text[0], config(m), directory=folder, bar=False, after_step=note)
    for path, n in ((folder, 12), (folder / step(12), 12), (folder / step(8), 8)):
        loaded = m.load_model(path)
        assert loaded.config == model.config and loaded.training
        assert all(p.requires_grad for p in loaded.parameters())
        assert len([*loaded.parameters()]) == len([*model.parameters()]), "what is shared is not"
        same(f"weights of update {n}", dict(loaded.named_parameters()), weights[n])
        check(f"logits of update {n}", loaded(text)[0].detach(), logits[n])
    assert m.load_model(str(folder)).config == model.config


def room(m):
    """The room of checkpoints below m: a planted one, or the package's own."""
    return getattr(m, "copied", {}).get("checkpoint", checkpoint)


class Crash(Exception):
    """What a kill is to a process."""


def crash_in_save(m, run, folder, at):
    """Save, killed in the middle of the at-th thing that it does; False if it does fewer."""
    calls = itertools.count(1)

    def crashing(function, half):
        def call(*arguments, **options):
            if next(calls) == at:
                half(*arguments)
                raise Crash
            return function(*arguments, **options)

        return call

    def nothing(*_):
        pass

    things = [
        (room(m), "save_file", lambda _, path, *__: path.write_bytes(b"torn")),
        (json, "dumps", nothing),
        (os, "fsync", nothing),
        *((Path, name, nothing) for name in ("mkdir", "open", "rename", "replace", "unlink")),
        (Path, "write_bytes", lambda path, _: path.touch()),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for where, name, half in things:
            patch.setattr(where, name, crashing(getattr(where, name), half))
        try:
            m.save(run, folder)
        except Crash:
            return True
    return False


def whole_ones(m, folder, other):
    """The updates of the checkpoints in a folder, all of which can be read."""
    found = []
    for path in sorted(folder.glob("step-*")):
        try:
            m.restore(other, path)
        except m.CheckpointError as error:
            raise AssertionError(f"half a checkpoint: {error}") from error
        assert path.name == step(other.step)
        found.append(other.step)
    return found


def later(run, steps):
    """A run as if it had gone on."""
    run.losses += [1.0] * (steps - run.step)
    return run


def save_again(m, run, folder):
    try:
        m.save(run, folder)
    except OSError as error:
        raise AssertionError(f"it cannot be saved again: {error}") from error


def survives_a_crash_anywhere_in_save(m, folder):
    run, other = trained(m, stop=4), trained(m, stop=1, model=a_model(9))
    base = folder / "base"
    for steps in (4, 8):
        m.save(later(run, steps), base)
    later(run, 12)
    (base / f"partial-{step(2)}").write_bytes(b"torn")
    for at in itertools.count(1):
        place = folder / str(at)
        shutil.copytree(base, place)
        crashed = crash_in_save(m, run, place, at)
        found = whole_ones(m, place, other)
        assert found in ([4, 8], [4, 8, 12], [8, 12]), f"after a crash there are {found}"
        assert m.newest_checkpoint(place).name == step(found[-1])
        if not crashed:
            break
        save_again(m, run, place)
        assert names(place) == [step(8), step(12)]
    assert at > 9, f"save does only {at - 1} things"


def survives_a_crash_when_it_is_saved_again(m, folder):
    """The only checkpoint, in whatever way: there is one to go on from, and it is whole."""
    run, other = trained(m, stop=4), trained(m, stop=1, model=a_model(9))
    m.save(run, folder / "base")
    for at in itertools.count(1):
        place = folder / str(at)
        shutil.copytree(folder / "base", place)
        crashed = crash_in_save(m, run, place, at)
        newest = m.newest_checkpoint(place)
        assert newest is not None, f"crash {at}: the only checkpoint is gone"
        try:
            m.restore(other, newest)
        except m.CheckpointError as error:
            raise AssertionError(f"crash {at}: half a checkpoint: {error}") from error
        assert other.step == 4
        if not crashed:
            break


def may_be_saved_twice(m, folder):
    """And the second counts."""
    run, other = trained(m, stop=6), trained(m, stop=1, model=a_model(9))
    m.save(run, folder)
    first = content(folder)
    save_again(m, run, folder)
    assert content(folder) == first, "the same run is saved otherwise"
    with torch.no_grad():
        run.model.norm.weight.add_(1)
    save_again(m, run, folder)
    assert whole_ones(m, folder, other) == [6] and names(folder) == [step(6)]
    same("saved twice", everything(other), everything(run))


def is_on_the_disk_before_it_has_its_name(m, folder):
    """All of it is written through, then the file is renamed, then its name is written through."""
    done, sync, replace = [], os.fsync, Path.replace

    def note_sync(descriptor):
        held = os.fstat(descriptor)
        is_file = stat.S_ISREG(held.st_mode)
        done.append(os.pread(descriptor, held.st_size, 0) if is_file else held.st_ino)
        sync(descriptor)

    def note_replace(path, target):
        done.append("renamed")
        return replace(path, target)

    run = trained(m, stop=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note_sync)
        patch.setattr(Path, "replace", note_replace)
        path = m.save(run, folder)
    want = [path.read_bytes(), "renamed", folder.stat().st_ino]
    assert done == want, "not the whole file, its new name, and the directory"


NO_ROOM = OSError(28, "No space left on device")


def a_full_disk_leaves_what_was_there(m, folder):
    """Wherever in `save` the room is gone: nothing half is left, and the last one is named."""
    run, other = trained(m, stop=4), trained(m, stop=1, model=a_model(9))

    def fail(*_, error, **__):
        raise error

    def torn(_, path, *__, error):
        path.write_bytes(b"torn")
        raise error

    for i, (where, name, failing) in enumerate((
        (room(m), "save_file", partial(torn, error=SafetensorError("No space left on device"))),
        (Path, "touch", partial(fail, error=NO_ROOM)),
        (os, "fsync", partial(fail, error=NO_ROOM)),
        (Path, "replace", partial(fail, error=NO_ROOM)),
    )):  # fmt: skip
        for before in ([], [3]):
            place = folder / f"{i} {before}"
            place.mkdir()
            kept = [m.save(trained(m, stop=n), place) for n in before]
            files = content(place)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(where, name, failing)
                said = not_written(m, run, place)
            end = f"the last one is whole: {kept[0]}" if kept else "there is none before it"
            assert "of update 4 cannot be written" in said and "No space left" in said, said
            assert said.endswith(end), said
            assert content(place) == files, "half a checkpoint is left"
            save_again(m, run, place)
            assert whole_ones(m, place, other) == [*before, 4]


def not_written(m, run, folder):
    try:
        m.save(run, folder)
    except OSError as error:
        return str(error)
    except SafetensorError as error:
        raise AssertionError("it is refused in the words of safetensors") from error
    raise AssertionError("it is not refused")


def whoever_may_read_files_may_read_it(m, folder):
    """As the umask has it."""
    for mask, want in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            path = m.save(trained(m, stop=1), folder / f"{mask:o}")
        finally:
            os.umask(before)
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == want, f"mode {mode:o} under umask {mask:o}"


def partial_checkpoints_are_never_read(m, folder):
    (folder / "run").mkdir()
    path = m.save(trained(m, stop=8, seed=7), folder / "other")
    shutil.copy(path, folder / "run" / f"partial-{path.name}")
    shutil.copy(path, folder / "run" / ".tmpAb3x9Z")  # as safetensors leaves it, killed
    assert m.newest_checkpoint(folder / "run") is None, "half a checkpoint is taken for one"
    run = trained(m, folder / "run", stop=5)
    assert names(folder / "run") == [step(4)], "what is left of a killed run stays"
    assert run.losses == trained(m, stop=5).losses


EVIL = "unpickled"


class Evil:
    def __reduce__(self):
        return (os.mkdir, (os.path.join(os.environ["EVIL_FOLDER"], EVIL),))


def nothing_is_unpickled(m, folder):
    """Neither by a run, nor where a pickle has the name of a checkpoint."""

    def refuse(*_, **__):
        raise AssertionError("something is unpickled")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVIL_FOLDER", str(folder))
        for where, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
            patch.setattr(where, name, refuse)
        patch.setattr(torch, "load", refuse)
        trained(m, folder / "run", stop=6)
        trained(m, folder / "run", model=a_model(9), stop=9)
        m.load_model(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVIL_FOLDER", str(folder))
        path = m.newest_checkpoint(folder / "run")
        path.write_bytes(pickle.dumps(Evil()))
        for read in (m.load_model, partial(m.restore, trained(m, stop=1))):
            assert f"{path} is damaged" in complaint(m, partial(read, path))
            assert not (folder / EVIL).exists(), "a pickle is unpickled"


def test_a_run_is_the_same_with_and_without_checkpoints(tmp_path):
    want = everything(trained(train))
    for place in (tmp_path / "as" / "deep", str(tmp_path / "text")):
        same("with checkpoints", everything(trained(train, place)), want)


def test_a_run_hashes_its_text_once(monkeypatch, tmp_path):
    """However many checkpoints it writes; a run that goes on hashes it once more."""
    hashed, fingerprint = [], checkpoint.fingerprint
    monkeypatch.setattr(checkpoint, "fingerprint", lambda ids: hashed.append(1) or fingerprint(ids))
    trained(train, tmp_path, checkpoint_every=1, stop=6)
    assert len(hashed) == 1, f"the text is hashed {len(hashed)} times for 6 checkpoints"
    trained(train, tmp_path, checkpoint_every=1)
    assert len(hashed) == 2, f"the text is hashed {len(hashed)} times in two runs"


def test_the_fingerprint_is_that_of_the_ids_as_int64():
    """As earlier versions wrote it, whatever the dtype and however long the text."""
    ids = a_text(2**21 + 5)
    want = hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
    for dtype in (torch.uint8, torch.int32, torch.int64):
        assert checkpoint.fingerprint(ids.to(dtype)) == want
    assert checkpoint.fingerprint(ids[:0]) == hashlib.sha256(b"").hexdigest()


@pytest.mark.usefixtures("unchecked")
def test_a_model_with_numbers_of_numpy_is_saved_and_goes_on(tmp_path):
    sizes = dict(d_model=np.int64(8), n_heads=np.int64(2), norm_eps=np.float32(1e-5))
    steps = dict(steps=np.int64(12), learning_rate=np.float32(1e-3), seed=np.int64(1))
    trained(train, tmp_path, stop=6, model=a_model(**sizes), **steps)
    run = trained(train, tmp_path, model=a_model(9, **sizes), **steps)
    assert run.step == 12 and train.load_model(tmp_path).config == run.model.config


def test_a_checkpoint_is_complete_and_plain(tmp_path):
    run = trained(train, tmp_path, model=a_model(tie_embeddings=False))
    tensors, record = load_file(tmp_path / step(12)), record_of(tmp_path / step(12))
    parameters = dict(run.model.named_parameters())
    kinds = ("model", "exp_avg", "exp_avg_sq")
    want = {f"{kind}.{name}" for kind in kinds for name in parameters}
    assert tensors.keys() == want | {"losses", "random_state"}
    for name, p in parameters.items():
        assert torch.equal(tensors[f"model.{name}"], p)
    assert record["losses"] == run.losses and record["step"] == 12
    assert record["evaluations"] == run.evaluations
    assert checkpoint.read_record(tmp_path / step(12)) | {"losses": run.losses} == record
    for key, c in (("training", run.config), ("model", run.model.config)):
        assert record[key] == json.loads(json.dumps(dataclasses.asdict(c)))
    blank = (tmp_path / step(12)).read_bytes().replace(record["sha256"].encode(), b"0" * 64)
    assert record["sha256"] == hashlib.sha256(blank).hexdigest()


def test_the_header_does_not_grow_with_the_losses(tmp_path):
    """For safetensors reads none of more than a hundred million letters."""
    run, other = (trained(train, stop=n, model=a_model(n)) for n in (4, 1))
    path = train.save(later(run, 100_000), tmp_path)
    assert int.from_bytes(path.read_bytes()[:8], "little") < 10_000
    train.restore(other, path)
    assert other.losses == run.losses


# --- checkpoints that are refused -------------------------------------------------------------


def forge(path, change):
    """Change the record and the tensors, as one would who knows how they are guarded."""
    record, tensors = record_of(path), {name: t.clone() for name, t in load_file(path).items()}
    del record["losses"]
    record["sha256"] = checkpoint.shards.BLANK
    write(path, change(record, tensors) or record, tensors)


def write(path, record, tensors):
    save_file(tensors, path, {"record": json.dumps(record)})
    if checkpoint.shards.BLANK.encode() in path.read_bytes():
        checkpoint._seal(path)


def complaint(m, read):
    """What the CheckpointError says; any other end is a failure of the property."""
    try:
        read()
    except m.CheckpointError as error:
        return str(error)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        name = type(error).__name__
        raise AssertionError(f"it is refused with a {name}, not a CheckpointError") from error
    raise AssertionError("it is not refused")


def refused(m, run, path, *messages):
    """With a CheckpointError that says so; the run and the files are left as they were."""
    before, files = everything(run), content(path.parent)
    random = torch.get_rng_state()
    said = complaint(m, partial(m.restore, run, path))
    for message in (re.escape(str(path)), *messages):
        assert re.search(message, said), f"{message!r} is not said in: {said}"
    same("refused", everything(run), before)
    assert content(path.parent) == files, "the files are changed"
    assert torch.equal(torch.get_rng_state(), random)


@functools.cache
def a_run():
    """After update 7, to be saved and not to be changed."""
    return trained(train, stop=7)


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip(path, at=0.5):
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)


def replace_by(data):
    return lambda path: path.write_bytes(data)


DAMAGE = {
    "cut short": cut,
    "one bit flipped": flip,
    "first bit flipped": partial(flip, at=0),
    "last bit flipped": lambda path: flip(path, 1 - 1 / len(path.read_bytes())),
    "empty": replace_by(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "missing": Path.unlink,
    "a pickle": replace_by(pickle.dumps({"embedding.weight": [1.0]})),
    "a list": replace_by(b"[1, 2]"),
    "null": replace_by(b"null"),
    "a word": replace_by(b'"cheems_ref checkpoint 2"'),
    "other JSON": replace_by(b'{"model": {}}'),
    "not UTF-8": lambda path: path.write_bytes(path.read_bytes().replace(b"text", b"te\xfft")),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}


def damaged_files_are_refused(m, folder):
    run = trained(m, stop=3)
    for name, damage in DAMAGE.items():
        path = m.save(a_run(), folder / name)
        damage(path)
        refused(m, run, path, "holds no checkpoint" if name == "missing" else "is damaged")
        assert str(path) in complaint(m, partial(m.load_model, path))


def the_way_back_is_named(m, folder):
    """To the checkpoint before one that is damaged, in whatever way; or that there is none."""
    run, last = trained(m, stop=3), trained(m, stop=8)
    for name in ("empty", "one bit flipped"):
        first, second, third = (m.save(one, folder / name) for one in (run, a_run(), last))
        assert not first.exists(), "more than two are kept"
        DAMAGE[name](third)
        refused(m, run, third, rf"Move it away .* {re.escape(str(second))}$")
        DAMAGE[name](second)
        refused(m, run, second, "There is none before it: begin anew, in another directory")


def every_byte_is_guarded(m, folder):
    """One bit is flipped in every 13th byte of the header, and in every 91st of the tensors."""
    path, run = m.save(a_run(), folder), trained(m, stop=3)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    places = (*range(0, end, 13), *range(end, len(data), 91))
    changes = {at: data[at] ^ 1 << at % 8 for at in places}
    spaces = [end - 1] if data[end - 1] == ord(" ") else []
    changes |= {at: ord("\n") for at in spaces}  # which JSON does not tell apart
    for at, byte in changes.items():
        path.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
        try:
            complaint(m, partial(m.restore, run, path))
        except AssertionError as error:
            raise AssertionError(f"byte {at} of {len(data)}: {error}") from error


def files_that_do_not_fit_are_refused(m, folder):
    """With the right checksum: what was forged, or written by a mistake of ours."""
    run = trained(m, stop=3)

    def change(record, tensors, key, kind):
        t = tensors.pop(key)
        if kind == "other shape":
            tensors[key] = t[:-1].clone()
        elif kind == "other dtype":
            tensors[key] = t.to(torch.bfloat16)
        elif kind == "other name":
            tensors[key + "x"] = t

    keys = ("model.norm.weight", "exp_avg_sq.norm.weight", "losses", "random_state")
    for key, kind in itertools.product(
        keys, ("missing", "other name", "other shape", "other dtype")
    ):
        path = m.save(a_run(), folder / f"{kind}, {key}")
        forge(path, partial(change, key=key, kind=kind))
        refused(m, run, path, f"not fit.*{re.escape(key)}")
        if key == "model.norm.weight":
            said = complaint(m, partial(m.load_model, path))
            assert re.search(rf"not fit.*{re.escape(key)}", said), said


def other_runs_are_refused(m, folder):
    """Another model, configuration or text: the message names what differs, then and now."""
    path = m.save(trained(m, stop=7), folder / "run")

    def fresh(model=None, ids=None, **changes):
        return trained(m, stop=3, model=model, ids=ids, **changes)

    text = a_text()
    text[-1] = (text[-1] + 1) % 16
    for run, message in (
        (fresh(a_model(pattern="SM")), r"pattern \(AM, now SM\)"),
        (fresh(a_model(d_ff=12)), r"d_ff \(8, now 12\)"),
        (fresh(a_model(tie_embeddings=False)), r"tie_embeddings \(True, now False\)"),
        (fresh(a_model(norm_eps=1e-5, rope_base=7)), r"rope_base \(.*7\), norm_eps \(1e-06, now"),
        (fresh(steps=13), r"schedule \(12, now 13\)\. Go on with its settings, or take another d"),
        (fresh(steps=13, schedule=11), r"schedule \(12, now 11\)"),
        (fresh(betas=(0.9, 0.98)), r"betas \(\[0\.9, 0\.999\], now \[0\.9, 0\.98\]\)"),
        (fresh(seed=3, clip=0.5), r"clip \(1\.0, now 0\.5\), seed \(0, now 3\)"),
        (fresh(ids=text), "another text; go on with its text, or take another directory"),
        (fresh(ids=a_text(201)), "another text"),
    ):
        refused(m, run, path, message)


def without(key):
    def change(record, tensors):
        (record if key in record else tensors).pop(key)

    return change


def having(**changes):
    return lambda record, _: record.update(changes)


def inside(key, **changes):
    return lambda record, _: record[key].update(changes)


def lacking(part, key):
    return lambda record, _: record[part].pop(key) and None


def with_tensor(name, change):
    return lambda _, tensors: tensors.update({name: change(tensors[name])})


def instead(record):
    return lambda *_: record


# One row, one record that is not ours: how it is changed, and what has to be said.
# fmt: off
RECORDS = {
    "nothing in it": (lambda record, _: record.clear(), "does not say"),
    "another format": (having(format="cheems_ref checkpoint 0"), "does not say"),
    "a format that is a list": (having(format=["cheems_ref checkpoint 2"]), "does not say"),
    "no format": (without("format"), "does not say"),
    "a model of another version": (inside("model", n_wings=2), r"n_wings \(2, now None\)"),
    "a run of another version": (inside("training", wind=0.5), r"wind \(0\.5, now None\)"),
    "a model without d_ff": (lacking("model", "d_ff"), r"d_ff \(None, now 8"),
    "a run without a seed": (lacking("training", "seed"), r"seed \(None, now 0"),
    "a run without steps": (lacking("training", "steps"), r"schedule \(None, now 12"),
    "no checksum": (having(sha256=None), "damaged"),
}
OTHER_JSON = {"a list": [1, 2], "a word": "cheems_ref checkpoint 2", "other JSON": {"model": {}},
              "a number": 2, "true": True}
UNREADABLE = {
    **{f"no {key}": (without(key), f"lacks {key}") for key in (
        "model", "training", "text", "step", "evaluations")},
    **{f"no {key}": (without(key), f"not fit.*{key}") for key in ("losses", "random_state")},
    "no sha256": (without("sha256"), "damaged"),
    "a model that is a list": (having(model=["AM"]), "lacks model"),
    "a training that is a number": (having(training=3), "lacks training"),
    "a checksum that is a list": (having(sha256=[]), "damaged"),
    "a checksum that is half of one": (having(sha256="0" * 32), "damaged"),
    "a step that is a word": (having(step="seven"), "lacks step"),
    "more updates than losses": (having(step=8), "not fit.*losses"),
    "less updates than none": (having(step=-1), "not fit.*losses"),
    "losses that are letters": (with_tensor("losses", Tensor.byte), "not fit.*losses"),
    "losses that are a number": (with_tensor("losses", Tensor.sum), "not fit.*losses"),
    "evaluations that are a number": (having(evaluations=7), "lacks evaluations"),
    "a random state cut short": (
        with_tensor("random_state", lambda t: t[:-1].clone()), "not fit.*random_state"),
    "a random state of other numbers": (
        with_tensor("random_state", Tensor.char), "not fit.*random_state"),
    "a random state that is a number": (
        with_tensor("random_state", lambda t: t[0].clone()), "not fit.*random_state"),
}
UNLOADABLE = ("no model", "no sha256", "a model that is a list", "a checksum that is a list")
# fmt: on


def forged(m, folder, change):
    path = m.save(a_run(), folder)
    forge(path, change)
    return path


def foreign_records_are_refused(m, folder):
    run = trained(m, stop=3)
    for name, (change, message) in RECORDS.items():
        refused(m, run, forged(m, folder / name, change), message)
    for name, other in OTHER_JSON.items():
        refused(m, run, forged(m, folder / f"{name} for a record", instead(other)), "does not say")


def unreadable_records_are_refused(m, folder):
    run, wrong = trained(m, stop=3), []
    for name, (change, message) in UNREADABLE.items():
        path = forged(m, folder / name, change)
        try:
            refused(m, run, path, message)
            if name in UNLOADABLE:
                complaint(m, partial(m.load_model, path))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


def files_of_others_are_refused(m, folder):
    """Safetensors files that hold no record, or one that is no JSON."""
    tensors = {"weight": torch.ones(3)}
    for name, metadata in (("none", None), ("theirs", {"format": "pt"}), ("torn", {"record": "{"})):
        (folder / name).mkdir()
        path = folder / name / step(7)
        save_file(tensors, path, metadata)
        refused(m, trained(m, stop=3), path, "damaged" if name == "torn" else "does not say")


def an_older_format_is_named(m, folder):
    """And neither passed over, as if the run had not begun, nor touched."""
    old = folder / "run" / "step-00000011"
    old.mkdir(parents=True)
    (old / "checkpoint.json").write_text('{"format": "cheems_ref checkpoint 1"}')
    save_file({"norm.weight": torch.ones(8)}, old / "model.safetensors")
    files, run = content(folder), trained(m, stop=3)
    reads = [partial(m.restore, run, old), partial(trained, m, folder / "run")]
    reads += [partial(m.load_model, path) for path in (old, folder / "run")]
    for read in reads:
        said = complaint(m, read)
        assert f"{old} is a directory, of the format 'cheems_ref checkpoint 1'" in said, said
    assert content(folder) == files, "the files are changed"
    for n in (10, 12):  # what is newer is read; both are kept, and the old one stays
        m.save(later(run, n), folder / "run")
    assert names(folder / "run") == [step(10), old.name, step(12)]
    assert m.newest_checkpoint(folder / "run") == folder / "run" / step(12)


def place(path, key):
    """Where in a file a value of the record begins, or a tensor."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if key in header:
        return 8 + size + header[key]["data_offsets"][0]
    return re.compile(b"[1-8]").search(data, data.index(f'\\"{key}\\"'.encode())).start()


@pytest.mark.parametrize("key", ["step", "losses", "evaluations", "random_state"])
def test_one_changed_character_of_what_the_run_went_through_is_seen(tmp_path, key):
    path = train.save(a_run(), tmp_path)
    data, at = bytearray(path.read_bytes()), place(path, key)
    data[at] += 1
    path.write_bytes(data)
    with safe_open(path, "pt") as file:
        json.loads(file.metadata()["record"])
    refused(train, trained(train, stop=3), path, "damaged")


@pytest.mark.parametrize("damage", [cut, flip, DAMAGE["empty"], DAMAGE["a pickle"]])
def test_a_run_does_not_go_on_from_a_damaged_checkpoint(tmp_path, damage):
    trained(train, tmp_path, stop=9)
    damage(tmp_path / step(8))
    files, model = content(tmp_path), a_model(9)
    before = copy.deepcopy(model)
    with pytest.raises(train.CheckpointError, match=f"{step(8)} is .* Move it away .*{step(4)}"):
        trained(train, tmp_path, model=model)
    assert content(tmp_path) == files, "the files are changed"
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q) and p.grad is None, "the model is changed"
    (tmp_path / step(8)).unlink()  # moving it away, as the message says
    want = everything(trained(train))
    same("from the one before it", everything(trained(train, tmp_path, model=model)), want)


@pytest.mark.parametrize("name", ["step-00000008-damaged.safetensors", "old-" + step(8)])
def test_a_damaged_checkpoint_is_moved_away_by_giving_it_another_name(tmp_path, name):
    trained(train, tmp_path, stop=9)
    cut(tmp_path / step(8))
    (tmp_path / step(8)).rename(tmp_path / name)
    assert train.newest_checkpoint(tmp_path) == tmp_path / step(4)


def test_a_hundred_million_updates_are_more_than_ten(tmp_path):
    for n in (10, 99_999_999, 100_000_000):
        (tmp_path / step(n)).touch()
    assert train.newest_checkpoint(tmp_path) == tmp_path / step(100_000_000)


def test_no_model_is_loaded_where_there_is_none(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere" / step(4)):
        with pytest.raises(train.CheckpointError, match=f"{path} holds no checkpoint"):
            train.load_model(path)
    (tmp_path / "file").write_text("text")
    with pytest.raises(train.CheckpointError, match=f"{tmp_path / 'file'} is .*no checkpoint"):
        train.load_model(tmp_path / "file")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (inside("model", n_wings=2), "n_wings"),
        (inside("model", pattern="Q"), "unknown letter 'Q'"),
        (inside("model", d_model="8"), "d_model must be a whole number"),
        (having(dtype="float7"), "float7"),
    ],
)
def test_a_model_of_another_version_is_refused_with_the_reason(tmp_path, change, message):
    path = forged(train, tmp_path, change)
    with pytest.raises(train.CheckpointError, match=f"no model of this version.*{message}"):
        train.load_model(path)


def test_checkpoint_errors_are_value_errors():
    assert issubclass(train.CheckpointError, ValueError)


# --- real processes ---------------------------------------------------------------------------

# As a sitecustomize.py, this makes every write-through take so long that a kill can strike it.
SLOW_DISK = """
import os, time
sync = os.fsync
def slow(descriptor):
    time.sleep(0.2)
    sync(descriptor)
os.fsync = slow
"""


def kill_when(condition, started):
    """With SIGKILL, which no process can answer."""
    until = time.monotonic() + 60
    while not (seen := condition()) and started.poll() is None and time.monotonic() < until:
        time.sleep(0.001)
    started.kill()
    said = started.communicate()
    assert started.returncode == -signal.SIGKILL and seen, said


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_a_process_killed_while_it_writes_goes_on_as_if_never_killed(tmp_path, capsys):
    text, run, slow = (tmp_path / name for name in ("text", "run", "slow"))
    text.write_text("the cat sat on the mat, and the dog lay on the log. " * 20)
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_DISK)
    arguments = ["train", "--text", str(text), "--pattern", "SM", "--steps", "50"]
    arguments += ["--batch-size", "4", "--length", "16", "--checkpoint-every", "10"]
    arguments += ["--evaluate-every", "10", "--device", "cpu", "--no-bar"]
    for setting in ("d_model=16", "d_ff=16", "d_state=4", "chunk_size=8"):
        arguments += ["--set", setting]
    assert main([*arguments, "--run", str(tmp_path / "whole")]) == 0
    arguments += ["--run", str(run)]

    def is_writing():
        return (run / step(20)).exists() and any(run.glob("partial-*"))

    kill_when(is_writing, process(*arguments, path=slow))
    assert any(run.glob("partial-*")), "the kill came too late to strike the writing"
    killed = train.newest_checkpoint(run)
    assert step(20) <= killed.name < step(50)
    capsys.readouterr()
    assert main(arguments) == 0
    assert f"going on from {killed}" in capsys.readouterr().out
    assert names(run) == [step(40), step(50)]
    record = record_of(run / step(50))
    assert len(record["losses"]) == 50 and len(record["evaluations"]) == 5
    for name, t in load_file(tmp_path / "whole" / step(50)).items():
        check(f"killed = whole: {name}", load_file(run / step(50))[name], t)  # of two processes


# --- what hides a mistake ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_goes_on_as_if_never_stopped(tmp_path, kind):
    goes_on_as_if_never_stopped(train, tmp_path, kind)


def test_a_model_with_frozen_parameters_goes_on_as_if_never_stopped(tmp_path):
    def frozen(seed=0):
        model = a_model(seed)
        model.embedding.weight.requires_grad_(False)
        return model

    whole = trained(train, model=frozen())
    trained(train, tmp_path, stop=6, model=frozen())
    again = trained(train, tmp_path, model=frozen(9))
    assert again.losses == whole.losses
    assert torch.equal(again.model.embedding.weight, frozen().embedding.weight)


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_is_loaded_as_it_was(tmp_path, kind):
    loads_the_same_model(train, tmp_path, kind)
