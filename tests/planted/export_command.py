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
FULL = "if to.is_dir() and (there := min(to.iterdir(), default=None)) is not None:"

# fmt: off
MISTAKES = mistakes([
    (the_run_is_written, {
        "old folders are refused": [(FULL, "if to.is_dir() and (there := to):")],
        "as it stands": [("{place!r}", "{place}")],
        "half of it": [("in hub.export(a.run, a.to).iterdir())",
                        "in hub.export(a.run, a.to).glob('*.json'))")]}),
    (the_checkpoint_that_is_named_is_written, {
        "always the newest": [("hub.export(a.run,", "hub.export(Path(a.run).parent if "
                               "Path(a.run).suffix else a.run,")]}),
    (what_cannot_be_written_is_refused, {
        "over anything": [(FULL, "if False:")],
        "over files of other names": [
            (FULL, "if (there := to / 'config.json').exists():")],
        "a file is no place": [("if to.exists() and not to.is_dir():", "if False:")],
        "any file of it": [("min(to.iterdir(), default=None)", "max(to.iterdir(), default=None)")],
        "no name": [('"device", "to"):', '"device"):')]}),
    (without_the_library_it_says_what_to_install, {
        "from deep inside": [("    from cheems_ref import hub  #",
                              "    import transformers\n    from cheems_ref import hub  #")]}),
])
# fmt: on
