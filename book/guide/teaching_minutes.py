"""How many minutes each section takes, counted from its text.

    python -m book.guide.teaching_minutes [--check]

This script writes the sums into the README's table of chapters; lecturer_guide.py puts the minutes
of each section into the lecturer's guide. `--check` writes nothing and exits with 1 if a number in
the README is out of date.

To teach means to say the prose and to show pictures and unfolded cells (cells tagged `setup`,
`guard` or `figure` are folded), with time for questions. Alone means to read the prose, follow
every unfolded line and do the exercises. The rates to teach were doubled after fresh readers had
estimated all chapters, 22 times: most said within a quarter of the count, the furthest 38 % more.
No chapter takes longer than a lecture.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

from nbformat import NotebookNode

from book.notebooks.build_notebooks import ROOT, read_source

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


def count(cell: NotebookNode) -> dict[str, int]:
    """How many of each item a cell holds."""
    items = dict.fromkeys(ITEMS, 0)
    tags = set(cell.metadata.get("tags", []))
    if cell.cell_type == "markdown":
        prose = EQUATION.sub(" ", cell.source)
        items["equations"] = len(EQUATION.findall(cell.source))
        items["words"] = len(re.findall(r"\w[\w'’-]*", MATHS.sub(" x ", prose)))
    elif "plotting.save(" in cell.source:
        items["figures"] = 1
    elif not tags & {"setup", "guard", "figure", "versions", "exercise", "check"}:
        items["lines"] = sum(bool(line.strip()) for line in cell.source.splitlines())
    return items


def sections(cells: list[NotebookNode]) -> list[Section]:
    """The parts of a chapter under `## ` headings; what comes before the first is "Opening"."""
    parts = [("Opening", [])]
    for cell in cells:
        if cell.cell_type != "markdown":
            parts[-1][1].append(cell)
            continue
        before, *rest = re.split(r"^## (?=.)", cell.source, flags=re.MULTILINE)
        texts = [(None, before)] + [(text.partition("\n")[0], text) for text in rest]
        for title, text in texts:
            if title:
                parts.append((title, []))
            if text.strip():
                parts[-1][1].append(NotebookNode(cell_type="markdown", source=text, metadata={}))
    return [timed(title, cells) for title, cells in parts]


def timed(title: str, cells: list[NotebookNode]) -> Section:
    items = {item: sum(count(cell)[item] for cell in cells) for item in ITEMS}
    minutes = {
        who: sum(items[item] / rates[item] for item in ITEMS) for who, rates in PER_MINUTE.items()
    }
    grades = [grade for cell in cells for grade in GRADE.findall(cell.source)]
    if grades:  # nobody teaches the exercises
        return Section(title, 0, sum(EXERCISE[grade] for grade in grades))
    if title == "Further reading":
        return Section(title, 0, max(1, round(minutes["alone"])))
    return Section(title, *(max(1, round(minutes[who])) for who in PER_MINUTE))


def total(parts: list[Section]) -> tuple[int, int]:
    """To teach and alone, rounded to five minutes."""
    return tuple(5 * round(sum(part[i] for part in parts) / 5) for i in (1, 2))


def readme_with_minutes(text: str, folder: Path) -> str:
    """The README with the sums in its table of chapters."""
    for source in sorted(folder.glob("*.py")):
        teach, alone = total(sections(read_source(source).cells))
        row = re.compile(rf"^(\|.*notebooks/{source.stem}\.ipynb.*\| )[^|]*\|$", re.MULTILINE)
        text = row.sub(rf"\g<1>{teach} / {alone} |", text)
    return text


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m book.guide.teaching_minutes",
        description="Count the minutes for the README.",
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, readme = parser.parse_args(arguments).check, root / "README.md"
    wanted = readme_with_minutes(readme.read_text(), root / "notebooks")
    if readme.read_text() == wanted:
        return 0
    print("README.md: other minutes" if check else "README.md: minutes written")
    if not check:
        readme.write_text(wanted)
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
