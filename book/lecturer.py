"""The lecturer's guide: its minutes, its links, its breaks, and the students' copy of its exam.

    python book/lecturer.py [--check] [--students FILE]

The pages in book/guide are written by people, but for three kinds of cells of their tables: the
minutes, which are those that book/minutes.py counts, the links to sections of the notebooks, and
the weeks of exercises, which are those of the syllabus. This script fills these in; `--check`
writes nothing and exits with 1 where they are not as they should be. `--students` writes the exam
without its answers, and nothing else.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from build import ROOT, read_source
from minutes import EXERCISE, GRADE, Section, sections, total
from nbformat import NotebookNode

NOTEBOOKS, GUIDE = ROOT / "notebooks", ROOT / "book" / "guide"
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
TIME = re.compile(r"^\*\*Time\.\*\*.*$", re.MULTILINE)
TABLE = re.compile(r"^(\| [^\n]*\n\|[-|]+\n)((?:\|[^\n]*\n)+)", re.MULTILINE)
BOARD = "| at | min | section | on the board |"
EXERCISES = "| exercise | grade | min | after | week of 12 | week of 4 | it trains |"
WEEKS = "| week | min | sections | exercises | min at home |"
SPAN = re.compile(r"(\d\d) ([A-Z][\w ]*?|§\d+)(?: to ([A-Z][\w ]*|§\d+))?$")
BREAK = re.compile(r"^```toml\n(\[break\]\n.*?)^```$", re.MULTILINE | re.DOTALL)
QUESTION = re.compile(r"^\*\*(\d\d)\.(\d) · (\w+)\.\*\* ", re.MULTILINE)
SOLUTION = re.compile(r"^<!-- BEGIN SOLUTION -->\n.*?^<!-- END SOLUTION -->\n", re.M | re.S)


class Break(NamedTuple):
    """A line of a section to change before the class, and the check that then fails."""

    section: str
    line: str
    becomes: str
    fails: str


class Week(NamedTuple):
    """A row of a syllabus: sections as (chapter, title), exercises as (chapter, number)."""

    name: str
    sections: list[tuple[str, str]]
    exercises: list[tuple[str, int]]


@cache
def sources() -> dict[str, Path]:
    """The source of each chapter, by its number."""
    return {path.name[:2]: path for path in sorted(NOTEBOOKS.glob("*.py"))}


@cache
def parts_of(chapter: str) -> list[Section]:
    """The sections of a chapter with their minutes."""
    return sections(read_source(sources()[chapter]).cells)


def cells_by_section(source: Path) -> Iterator[tuple[str, NotebookNode]]:
    """Every cell of a chapter, with the title of the section that it stands in or begins."""
    title = "Opening"
    for cell in read_source(source).cells:
        if cell.cell_type == "markdown":
            title = [title, *re.findall(r"^## (.+)$", cell.source, re.MULTILINE)][-1]
        yield title, cell


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower().replace(" ", "-"))


def link(chapter: str, title: str, words: str) -> str:
    """Words that lead to a section of a chapter's notebook."""
    anchor = "" if title == "Opening" else f"#{slug(title)}"
    return f"[{words}](../../notebooks/{sources()[chapter].stem}.ipynb{anchor})"


def named(parts: list[Section], name: str) -> int:
    """The place of the section that is called so: by its title, or as §3."""
    begins = f"{name[1:]} · " if name.startswith("§") else name
    places = [i for i, part in enumerate(parts) if part.title.startswith(begins)]
    if len(places) != 1:
        raise ValueError(f"{name}: {len(places)} sections are called so")
    return places[0]


def cells(row: str) -> list[str]:
    """The cells of a row of a table, with words in place of links."""
    return [LINK.sub(r"\1", cell).strip() for cell in row.strip().strip("|").split("|")]


def rows(text: str, head: str) -> list[list[str]]:
    """The rows of all tables with this head."""
    found = [body for top, body in TABLE.findall(text) if top.startswith(head)]
    return [cells(row) for body in found for row in body.splitlines()]


def with_rows(text: str, head: str, filled: list[list[str]]) -> str:
    """The text with other rows in its tables of this head, taken in order."""
    left = iter(filled)

    def table(match: re.Match) -> str:
        if not match[1].startswith(head):
            return match[0]
        return match[1] + "".join(f"| {' | '.join(next(left))} |\n" for _ in match[2].splitlines())

    return TABLE.sub(table, text)


def weeks(syllabus: str) -> dict[str, list[Week]]:
    """The weeks of each syllabus, by its heading."""
    found = {}
    for part in re.split(r"^## ", syllabus, flags=re.MULTILINE)[1:]:
        plan = []
        for name, _, spans, exercises, _ in rows(part, WEEKS):
            given = [span for text in spans.split("; ") if text for span in of_span(text)]
            numbers = [tuple(one.split(".")) for one in exercises.split(", ") if one]
            plan.append(Week(name, given, [(chapter, int(n)) for chapter, n in numbers]))
        if plan:
            found[part.partition("\n")[0]] = plan
    return found


def of_span(text: str) -> list[tuple[str, str]]:
    """The sections that "03 §1 to §5" or "03 Summary" names."""
    if not (match := SPAN.match(text)):
        raise ValueError(f"{text}: not a chapter and its sections")
    parts = parts_of(match[1])
    first, last = named(parts, match[2]), named(parts, match[3] or match[2])
    return [(match[1], part.title) for part in parts[first : last + 1]]


def taught(given: list[tuple[str, str]]) -> int:
    """The minutes to teach of some sections."""
    return sum(p.teach for chapter, title in given for p in parts_of(chapter) if p.title == title)


@cache
def grades(chapter: str) -> list[str]:
    """The grades of a chapter's exercises, in their order."""
    return [grade for _, cell in cells_by_section(sources()[chapter])
            if cell.cell_type == "markdown" for grade in GRADE.findall(cell.source)]  # fmt: skip


def at_home(exercises: list[tuple[str, int]]) -> int:
    """The minutes of some exercises."""
    return sum(EXERCISE[grades(chapter)[number - 1]] for chapter, number in exercises)


def filled_syllabus(text: str) -> str:
    """The syllabus with its minutes and links."""
    plans, filled = [week for plan in weeks(text).values() for week in plan], []
    for week, row in zip(plans, rows(text, WEEKS), strict=True):
        spans = [span for span in row[2].split("; ") if span]
        linked = [link(span[:2], of_span(span)[0][1], span) for span in spans]
        minutes = [str(taught(week.sections)), str(at_home(week.exercises))]
        filled.append([week.name, minutes[0], "; ".join(linked), row[3], minutes[1]])
    return with_rows(text, WEEKS, filled)


def filled_page(chapter: str, text: str, syllabus: str) -> str:
    """The page of a chapter with its minutes, links and weeks."""
    parts, board = parts_of(chapter), []
    at = dict(
        zip((p.title for p in parts), accumulate([0, *(p.teach for p in parts)]), strict=False)
    )
    for *_, title, words in rows(text, BOARD):
        part = parts[named(parts, title)]
        board.append([str(at[title]), str(part.teach), link(chapter, title, title), words])
    text = with_rows(text, BOARD, board)
    teach, alone = total(parts)
    time = f"**Time.** About {teach} minutes to teach. A student alone: about {alone}."
    return with_exercises(chapter, TIME.sub(time, text, count=1), weeks(syllabus))


def with_exercises(chapter: str, text: str, plans: dict[str, list[Week]]) -> str:
    """The page with the grades, minutes and weeks of its exercises."""
    parts, filled = parts_of(chapter), []
    for row in rows(text, EXERCISES):
        number, after, trains = int(row[0]), row[3], row[6]
        grade = grades(chapter)[number - 1]
        due = [[week.name for week in plan if (chapter, number) in week.exercises]
               for plan in plans.values()]  # fmt: skip
        where = link(chapter, parts[named(parts, after)].title, after)
        names = [names[0] if names else "–" for names in due]
        filled.append([row[0], grade, str(EXERCISE[grade]), where, *names, trains])
    return with_rows(text, EXERCISES, filled)


def breaks(text: str) -> list[Break]:
    """The lines that a page says to break."""
    return [Break(**tomllib.loads(block)["break"]) for block in BREAK.findall(text)]


def students(exam: str) -> str:
    """The exam without what stands between its marks."""
    return SOLUTION.sub("", exam)


def pages(guide: Path = GUIDE) -> dict[str, Path]:
    """The page of each chapter, by its number."""
    return {path.name[:2]: path for path in sorted(guide.glob("[0-9][0-9]_*.md"))}


def wanted(guide: Path = GUIDE) -> dict[Path, str]:
    """The guide's pages as they should be."""
    syllabus = (guide / "syllabus.md").read_text(encoding="utf-8")
    texts = {chapter: path.read_text(encoding="utf-8") for chapter, path in pages(guide).items()}
    filled = {pages(guide)[c]: filled_page(c, text, syllabus) for c, text in texts.items()}
    return filled | {guide / "syllabus.md": filled_syllabus(syllabus)}


def main(arguments: list[str] | None = None, guide: Path = GUIDE) -> int:
    parser = argparse.ArgumentParser(description="Fill in the lecturer's guide.")
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    parser.add_argument("--students", type=Path, metavar="FILE", help="write the students' exam")
    options = parser.parse_args(arguments)
    if options.students:
        exam = (guide / "exam.md").read_text(encoding="utf-8")
        options.students.write_text(students(exam), encoding="utf-8")
        return 0
    different = {p: t for p, t in wanted(guide).items() if p.read_text(encoding="utf-8") != t}
    for path, text in different.items():
        print(f"{'not as it should be' if options.check else 'filled in'}: {path.name}")
        if not options.check:
            path.write_text(text, encoding="utf-8")
    return int(options.check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
