"""Mistakes in the command `evaluate` that the properties of test_evaluate_command.py must catch."""

from planting import mistakes
from test_evaluate_command import (
    NUMBERS,
    any_other_text_is_asked_about_as_a_whole,
    choices_are_the_most_probable,
    everything_is_in_one_table,
    held_out_is_counted_in_windows,
    ruler_is_asked_by_name,
    sixteen_bits_are_summed_in_more,
    the_held_out_end_is_asked_about,
    the_network_is_left_alone,
    what_is_missing_is_named,
    what_is_remembered_is_found,
)

from cheems_ref import arguments, evaluate_command, evaluation_tasks

ROOMS = (evaluation_tasks, arguments, evaluate_command)
UNCHECKED = True
HELD = [has_property.__name__ for has_property in NUMBERS]

# fmt: off
MISTAKES = mistakes([
    (held_out_is_counted_in_windows, {
        "after a byte 0": [("NEW_LINE = 10", "NEW_LINE = 0")],
        "in windows as long as may be": [("        max_length=length,\n", "")],
        "in windows one shorter": [("max_length=length,", "max_length=length - 1,")],
        "of the manual": [("if text is not None:\n        metadata",
                           "if False:\n        metadata")],
        "a byte is lost": [("write_bytes(_whole_letters(text))",
                            "write_bytes(_whole_letters(text[:-1]) or b'e')")]}),
    (sixteen_bits_are_summed_in_more, {
        "in sixteen": [("torch.promote_types(model.dtype, torch.float32)", "model.dtype")]}),
    (choices_are_the_most_probable, {
        "of all documents": [("limit=limit, task_manager", "task_manager")],
        "documents of any length": [('{"length": length}, FOLDER', "{}, FOLDER")],
        "of another seed": [('{"length": length}, FOLDER',
                             '{"length": length, "seed": 1}, FOLDER')],
        "the error for the value": [("yield Score(task, metric, value,",
                                     "yield Score(task, metric, stderr,")],
        "no error": [("value, None if", "value, None if True or")]}),
    (what_is_remembered_is_found, {
        "half a text": [("max_length=length,", "max_length=length // 2,")],
        "half of the documents": [('["effective"]', '["effective"] // 2'),
                                  ("limit=limit, task_manager", "limit=40, task_manager")]}),
    (the_held_out_end_is_asked_about, {
        "what was trained on": [('record["training"]["held_out"])[1]',
                                 'record["training"]["held_out"])[0]')],
        "everything": [('if fingerprint(ids) == record["text"]:', "if False:")],
        "a letter that is none": [('errors="ignore"', 'errors="replace"')],
        "of another length": [('a.length or record["training"]["length"]', "a.length or 256")]}),
    (any_other_text_is_asked_about_as_a_whole, {
        "its end": [('if fingerprint(ids) == record["text"]:', "if True:")],
        "the length of training": [('a.length or record["training"]["length"]',
                                    'record["training"]["length"]')],
        "the manual for it": [("if a.text is None:", "if False:")]}),
    (everything_is_in_one_table, {
        "a task twice": [('list(dict.fromkeys(a.tasks.split(",")))', 'a.tasks.split(",")')],
        "sorted": [("for task in tasks for one", "for task in sorted(tasks) for one")],
        "all documents": [("length=length, limit=a.limit, device=device)\n    if ruler",
                           "length=length, device=device)\n    if ruler")]}),
    (the_network_is_left_alone, {
        "it may be asked": [('os.environ.update(dict.fromkeys(OFFLINE, "1"), ',
                             "os.environ.update(")]}),
    (ruler_is_asked_by_name, {
        "half of each": [("max_length=length,", "max_length=length // 2,")],
        "of 4096 bytes": [("length = a.length or RULER_LENGTH", "length = RULER_LENGTH")],
        "with lengths that nobody asked for": [(" and value != NOT_ASKED", "")],
        "fetching a model": [('    (folder / "tokenizers" / "punkt_tab").mkdir(parents=True)\n',
                              "")]}),
    (what_is_missing_is_named, {
        "none of all": [("if importlib.util.find_spec(name) is None:", "if False:")],
        "of RULER nothing": [('["wonderwords", "nltk"] if', "[] if")],
        "after the run is read": [("    _must_be_installed(a.tasks)\n    device", "    device")]}),
])
# fmt: on
