"""Mistakes in the command `export` that the properties of test_export_command.py must catch."""

from planting import mistakes
from test_export_command import (
    the_checkpoint_that_is_named_is_written,
    the_run_is_written,
    what_cannot_be_written_is_refused,
    without_the_library_it_says_what_to_install,
)

from cheems_ref import arguments, export_command

ROOMS = (arguments, export_command)
UNCHECKED = True
FULL = "(to.is_dir() and any(to.iterdir()))"

# fmt: off
MISTAKES = mistakes([
    (the_run_is_written, {
        "old folders are refused": [(FULL, "to.is_dir()")],
        "as it stands": [("{place!r}", "{place}")],
        "half of it": [("in hub.export(a.run, a.to).iterdir())",
                        "in hub.export(a.run, a.to).glob('*.json'))")]}),
    (the_checkpoint_that_is_named_is_written, {
        "always the newest": [("hub.export(a.run,", "hub.export(Path(a.run).parent if "
                               "Path(a.run).suffix else a.run,")]}),
    (what_cannot_be_written_is_refused, {
        "over anything": [(FULL, "False")],
        "over files of other names": [(FULL, "(to / 'config.json').exists()")],
        "over a file": [("if (to := Path(a.to)).is_file() or", "if (to := Path(a.to)) and")],
        "no name": [('"device", "to"):', '"device"):')]}),
    (without_the_library_it_says_what_to_install, {
        "from deep inside": [("    from cheems_ref import hub  #",
                              "    import transformers\n    from cheems_ref import hub  #")]}),
])
# fmt: on
