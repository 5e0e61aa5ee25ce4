"""How many minutes each section takes, counted from its text.

`python -m book.guide` writes the sums into the README's table of chapters, and the minutes of each
section into the lecturer's guide.

To teach means to say the prose and to show pictures and unfolded cells (cells tagged `setup`,
`guard` or `figure` are folded), with time for questions. A figure that is also tagged `slide`
draws what was just said or printed, so it takes no time of its own. Alone means to read the prose,
follow every unfolded line and do the exercises. The rates to teach were doubled after fresh readers
had estimated all chapters, 22 times: most said within a quarter of the count, the furthest 38 %
more. No chapter takes longer than a lecture.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from book.notebooks.build_notebooks import read_source
from book.project import lectures, text_of
from book.project import sections as sections_of

SITTING = 90  # minutes: a lecture
ITEMS = ("words", "lines", "equations", "figures")
PER_MINUTE = {  # how many of each item one minute holds
    "to teach": dict(words=60, lines=6, equations=2, figures=0.25),
    "alone": dict(words=80, lines=6.5, equations=4, figures=0.5),
}
EXERCISE = {"easy": 8, "medium": 14, "hard": 22}  # minutes alone

EQUATION = re.compile(r"\$\$.*?\$\$", re.DOTALL)
MATHS = re.compile(r"\$[^$]+\$")
GRADE = re.compile(r"^\*\*\d · (\w+)\.\*\*", re.MULTILINE)


class Section(NamedTuple):
    title: str
    teach: int
    alone: int


def count(cell: Mapping) -> dict[str, int]:
    """How many of each item a cell holds."""
    items, source = dict.fromkeys(ITEMS, 0), text_of(cell)
    tags = set(cell["metadata"].get("tags", []))
    if cell["cell_type"] == "markdown":
        prose = EQUATION.sub(" ", source)
        items["equations"] = len(EQUATION.findall(source))
        items["words"] = len(re.findall(r"\w[\w'’-]*", MATHS.sub(" x ", prose)))
    elif "slide" in tags:
        pass
    elif "plotting.save(" in source or "plotting.show_drawing(" in source:
        items["figures"] = 1
    elif not tags & {"setup", "guard", "figure", "versions", "exercise", "check"}:
        items["lines"] = sum(bool(line.strip()) for line in source.splitlines())
    return items


def sections(cells: list[Mapping]) -> list[Section]:
    """The sections of a chapter with their minutes."""
    return [timed(title, cells) for title, cells in sections_of(cells)]


def timed(title: str, cells: list[Mapping]) -> Section:
    items = {item: sum(count(cell)[item] for cell in cells) for item in ITEMS}
    minutes = {
        who: sum(items[item] / rates[item] for item in ITEMS) for who, rates in PER_MINUTE.items()
    }
    grades = [grade for cell in cells for grade in GRADE.findall(text_of(cell))]
    if grades:  # nobody teaches the exercises
        return Section(title, 0, sum(EXERCISE[grade] for grade in grades))
    if title == "Further reading":
        return Section(title, 0, max(1, round(minutes["alone"])))
    return Section(title, *(max(1, round(minutes[who])) for who in PER_MINUTE))


def total(parts: list[Section]) -> tuple[int, int]:
    """To teach and alone, rounded to five minutes."""
    return tuple(5 * round(sum(part[i] for part in parts) / 5) for i in (1, 2))


def readme_with_minutes(text: str, root: Path) -> str:
    """The README with the sums in its table of chapters."""
    for source in lectures(root):
        teach, alone = total(sections(read_source(source).cells))
        row = re.compile(
            rf"^(\| \d\d \|.*notebooks/{source.stem}\.ipynb.*\| )[^|]*\|$", re.MULTILINE
        )
        text = row.sub(rf"\g<1>{teach} / {alone} |", text)
    return text
