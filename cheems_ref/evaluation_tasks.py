"""What `evaluate` may be asked: the names of its tasks, its options, and what it cannot be.

As `arguments`, which imports it, it does without PyTorch.
"""

import argparse
from collections.abc import Callable

# Those of this package, and whether they ask about a text.
TASKS = dict(cheems_held_out=True, cheems_cloze=True, cheems_recall=False, cheems_needle=True)
# Those of lm-evaluation-harness that take no data.
RULER = ("niah_single_1", "niah_multikey_2", "niah_multikey_3")
RULER_LEAST = 600  # bytes in which each of their documents has room


def add_options(add: Callable) -> None:
    """Add the options of the command to a parser, by its `add_argument`."""
    add("--run", required=True, metavar="DIRECTORY", help="of a run or a checkpoint")
    add("--tasks", default=",".join(TASKS), metavar="NAME,NAME", help="(default %(default)s)")
    add("--text", metavar="FILE", help="UTF-8 text to ask about; without it, Python's own manual")
    add("--length", type=int, help="bytes read at a time (default: those of training)")
    add("--limit", type=int, metavar="N", help="ask of each task the first N documents alone")
    add("--device", help="cpu, cuda, mps (default: the fastest there is)")


def look_at(a: argparse.Namespace) -> None:
    """Make a.tasks a list, each task once.

    Raises:
        ValueError: there is no such task, or an option does not fit the tasks.
    """
    a.tasks = list(dict.fromkeys(a.tasks.split(",")))
    for name in a.tasks:
        if name not in TASKS and name not in RULER:
            raise ValueError(f"--tasks {name}: there is {', '.join((*TASKS, *RULER))}")
    if a.text is not None and not any(TASKS.get(name) for name in a.tasks):
        raise ValueError(f"--text has no effect on {', '.join(a.tasks)}")
    for name in ("limit", "length"):
        if (size := getattr(a, name)) is not None and size < 1:
            raise ValueError(f"--{name} must be at least 1, got {size}")
    ruler = [name for name in a.tasks if name in RULER]
    if ruler and a.length is not None and a.length < RULER_LEAST:
        least = f"at least {RULER_LEAST} for {', '.join(ruler)}"
        raise ValueError(f"--length must be {least}, got {a.length}")
