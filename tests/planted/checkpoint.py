"""Mistakes that the properties of test_checkpoint.py must catch."""

from planting import mistakes
from test_checkpoint import (
    a_finished_run_is_left_as_it_is,
    a_full_disk_leaves_what_was_there,
    a_run_stopped_may_be_saved_and_evaluated_otherwise,
    an_older_format_is_named,
    damaged_files_are_refused,
    every_byte_is_guarded,
    files_of_others_are_refused,
    files_that_do_not_fit_are_refused,
    foreign_records_are_refused,
    goes_on_as_if_never_stopped,
    is_on_the_disk_before_it_has_its_name,
    loads_the_same_model,
    may_be_saved_twice,
    nothing_is_unpickled,
    other_runs_are_refused,
    partial_checkpoints_are_never_read,
    restores_all,
    runs_without_a_schedule_in_their_record_go_on,
    survives_a_crash_anywhere_in_save,
    survives_a_crash_when_it_is_saved_again,
    the_way_back_is_named,
    trains_longer_as_if_it_had_been_made_for_it,
    unreadable_records_are_refused,
    whoever_may_read_files_may_read_it,
)

from cheems_ref import checkpoint, train

ROOMS = (checkpoint, train)

NEWEST = "newest_checkpoint(path) or path"
COPY = '            parameter.copy_(tensors[f"model.{name}"])\n        for name'
MOMENT = 'tensors[f"{k}.{name}"].to(parameter, copy=True)'
STEP = 'torch.tensor(float(record["step"]), dtype=torch.float32)'
PARTIAL = 'final.with_name(f"partial-{final.name}")'
MODELS = '    _must_agree(checkpoint, mine, record["model"])\n'
SETTINGS = '    _must_agree(checkpoint, _deciding(mine), _deciding(record["training"]))\n'
CHECKED = 'if _sha256(path, str(record.get("sha256"))) != record.get("sha256"):'
LEFTOVER = "shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()"
FINAL = '    final = directory / f"step'
OPENED = '    try:\n        with safe_open(path, "pt") as file:\n'
FITS = "sorted({name for name, _ in found.items() ^ wanted.items()})"
DAMAGED = '        raise CheckpointError(\n            f"{path} is damaged: it is not what'
WHEN_SAVED = """\
            if directory is not None and _is_due(run, config.checkpoint_every):
                save(run, directory)
"""
WHEN_EVALUATED = "            if _is_due(run, config.evaluate_every):\n"

# fmt: off
MISTAKES = mistakes([
    (goes_on_as_if_never_stopped, {
        "windows from the start again": [
            ("run.generator.set_state(", "torch.Generator().set_state(")],
        "bias correction from the start again": [(STEP, "torch.tensor(0.0)")],
        "moments exchanged": [
            (MOMENT, MOMENT.replace("{k}", "{MOMENTS[1 - MOMENTS.index(k)]}"))],
        "moments from the start again": [(MOMENT, "torch.zeros_like(parameter)")],
        "moments left out": [
            ("            run.optimizer.state[parameter] = {", "            _ = {")],
        "parameters left out": [(COPY, "            pass\n        for name")],
        "losses left out": [
            ('= tensors["losses"].tolist(), record[', '= [0.0] * record["step"], record[')],
        "evaluations left out": [(', record["evaluations"]\n', ", []\n")],
        "no run goes on": [("        restore(run, newest)", "        pass")],
        "saved before it is evaluated": [
            (WHEN_SAVED, ""),
            (WHEN_EVALUATED, WHEN_SAVED + WHEN_EVALUATED)]}),
    (a_finished_run_is_left_as_it_is, {
        "one more update": [
            ("while run.step < config.steps:", "while run.step <= config.steps:")]}),
    (restores_all, {
        "the random state is that of torch": [
            ('    tensors = {\n        "random_state": run.generator.get_state(),',
             '    tensors = {\n        "random_state": torch.get_rng_state(),')],
        "losses in 32 bits": [
            ("torch.tensor(run.losses, dtype=torch.float64)",
             "torch.tensor(run.losses).double()")],
        "the second moments are the first": [
            ("held[moment] for moment", 'held["exp_avg"].clone() for moment')]}),
    (loads_the_same_model, {
        "the oldest": [(NEWEST, "next(iter(_checkpoints(path)), path)")],
        "always the newest": [
            (NEWEST, "newest_checkpoint(path) or newest_checkpoint(path.parent)")],
        "without its parameters": [
            ("            parameter.copy_(weights[name])\n    return model.to",
             "            pass\n    return model.to")]}),
    (survives_a_crash_anywhere_in_save, {
        "written in its place": [(PARTIAL, "final")],
        "renamed before it is sealed": [
            ("        _seal(partial)\n        partial.replace(final)",
             "        partial.replace(final)\n        _seal(final)")],
        "old ones are dropped first": [
            (FINAL,
             "    for old in _checkpoints(directory)[:-1]:\n        old.unlink()\n" + FINAL)],
        "old ones are emptied in their place": [
            ("        shards.drop(old)\n",
             '        old.write_bytes(b"")\n        shards.drop(old)\n')],
        "leftovers stay": [(LEFTOVER, "pass")]}),
    (survives_a_crash_when_it_is_saved_again, {
        "the first is dropped first": [
            ("        partial.replace(final)",
             "        final.unlink(missing_ok=True)\n"
             "        partial.replace(final)")]}),
    (may_be_saved_twice, {
        "the first is in the way": [
            ("        partial.replace(final)",
             "        os.link(partial, final)\n        partial.unlink()")],
        "the second is left out": [
            ("    partial = final",
             "    if final.exists():\n        return final\n"
             "    partial = final")]}),
    (is_on_the_disk_before_it_has_its_name, {
        "files": [("        os.fsync(file.fileno())\n", "        pass\n")],
        "all but the last bytes": [("        file.flush()\n", "")],
        "the name": [("    shards.to_disk(directory)\n", "")]}),
    (a_full_disk_leaves_what_was_there, {
        "half of it stays": [("        partial.unlink(missing_ok=True)\n", "")],
        "in the words of safetensors": [
            ("except (OSError, SafetensorError)", "except OSError", 2)],
        "in the words of the system": [
            ("except (OSError, SafetensorError)", "except SafetensorError", 2)],
        "old ones are dropped first": [
            (FINAL,
             "    for old in _checkpoints(directory):\n        old.unlink()\n" + FINAL)],
        "the last one is not named": [("the last one is whole: {last}", "sorry")]}),
    (whoever_may_read_files_may_read_it, {
        "one's own": [("        partial.chmod(mode)\n", "")],
        "everybody's": [("partial.chmod(mode)", "partial.chmod(0o644)")]}),
    (trains_longer_as_if_it_had_been_made_for_it, {
        "steps are compared": [('FREE = ("steps", ', "FREE = (")],
        "the schedule is not looked at": [
            ("n = config.schedule or config.steps", "n = config.steps")]}),
    (a_run_stopped_may_be_saved_and_evaluated_otherwise, {
        "evaluations are compared": [('("steps", "evaluate_every", "check', '("steps", "check')],
        "checkpoints are compared": [(', "checkpoint_every", "micro', ', "micro')]}),
    (runs_without_a_schedule_in_their_record_go_on, {
        "refused": [
            ('training.get("schedule") or training.get("steps")',
             'training.get("schedule", -1)')]}),
    (partial_checkpoints_are_never_read, {
        "all names": [
            ('directory.glob("step-*")', 'directory.glob("*step-*")'),
            ("if NAMED.fullmatch(path.name)", "if True"),
            ("int(path.stem[5:])", "path.stem[-8:]")],
        "leftovers of safetensors stay": [(', *directory.glob(".tmp??????"))', ",)")],
        "leftovers stay": [(LEFTOVER, "pass")]}),
    (nothing_is_unpickled, {
        "torch's own files": [
            ("tensors = load_file(path)", "tensors = torch.load(path, weights_only=False)")],
        "torch's own files, if they are": [
            (OPENED,
             "    if path.read_bytes()[:1] == b'\\x80':\n"
             "        return __import__('pickle').loads(path.read_bytes())\n" + OPENED)]}),
    (damaged_files_are_refused, {
        "checksums not compared": [(CHECKED, "if False:")],
        "sizes only": [(CHECKED, "if not path.stat().st_size:")],
        "a damaged file is removed": [(DAMAGED, "        path.unlink()\n" + DAMAGED)]}),
    (the_way_back_is_named, {
        "always": [("if path in found[1:]:", "if path in found:")],
        "never": [("if path in found[1:]:", "if False:")],
        "the newest": [("found[found.index(path) - 1]", "found[-1]")],
        "not of what cannot be read": [("checkpoint: {error}. {_way_back(path)}", "checkpoint")]}),
    (every_byte_is_guarded, {
        "the header left out": [("hashlib.sha256(size + header)", "hashlib.sha256()")],
        "the tensors left out": [("hashlib.file_digest(file, lambda: start)", "start")],
        "only what the record says": [
            (CHECKED, 'if record.pop("sha256", None) != _said(record, path):'),
            ("def _kinds(",
             "def _said(record, path):\n    return hashlib.sha256(json.dumps("
             "record).encode() + path.read_bytes()[-99:]).hexdigest()\n\n\ndef _kinds("),
            ("    digest = _sha256(path, shards.BLANK)\n",
             '    with safe_open(path, "pt") as file:\n'
             '        record = json.loads(file.metadata()["record"])\n'
             '    record.pop("sha256")\n    digest = _said(record, path)\n')]}),
    (files_that_do_not_fit_are_refused, {
        "names only": [(FITS, "sorted({*found} ^ {*wanted})")],
        "kinds of what is named": [
            (FITS, "[k for k, kind in found.items() if wanted.get(k, kind) != kind]")],
        "dtypes not compared": [
            ("(tuple(t.shape), t.dtype)", "(tuple(t.shape), torch.float64)")],
        "parameters change before all is looked at": [
            ("    _must_fit(checkpoint, found, _kinds(like) | losses)",
             '    [p.data.add_(1) for k, p in parameters.items() if f"model.{k}" in found]\n'
             "    _must_fit(checkpoint, found, _kinds(like) | losses)")]}),
    (other_runs_are_refused, {
        "texts not compared": [('if record["text"] != run.text:', "if False:")],
        "lengths of texts compared": [('piece.to("cpu", torch.int64)', "torch.tensor(len(piece))")],
        "configurations not compared": [("    if differ:", "    if False:")],
        "models not compared": [(MODELS, "")],
        "runs not compared": [(SETTINGS, "")],
        "schedules not compared": [
            ('    return kept | {"schedule": training.get("schedule") or training.get("steps")}',
             '    return {k: v for k, v in kept.items() if k != "schedule"}')],
        "without a way out": [("Go on with its settings,", "")],
        "only the first that differs": [("key in differ)", "key in differ[:1])")]}),
    (foreign_records_are_refused, {
        "formats not compared": [(' or record.get("format") != FORMAT:', ":")],
        "only what is known is compared": [
            ("for key in {**mine, **theirs} if", "for key in mine if")],
        "anything is a record": [
            ("not isinstance(record, dict) or record", "record and record")]}),
    (unreadable_records_are_refused, {
        "kinds not looked at": [("    if wrong:", "    if False:")]}),
    (files_of_others_are_refused, {
        "metadata of some kind": [
            ('(file.metadata() or {}).get("record", "{}")', 'file.metadata()["record"]')]}),
    (an_older_format_is_named, {
        "passed over": [('r"step-\\d{8,}(\\.safetensors)?"', 'r"step-\\d{8,}\\.safetensors"')],
        "not named": [('if (path / "checkpoint.json").is_file():', "if False:")],
        "counted among those that are kept": [
            ("    for old in mine[:-2]:",
             "    for old in [p for p in _checkpoints(directory)[:-2] if p.is_file()]:")]}),
])
