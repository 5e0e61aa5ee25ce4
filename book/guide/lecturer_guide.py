"""The lecturer's guide: its minutes, its links, its breaks, and the students' copy of its exam.

    python -m book.guide [--check] [--students FILE]

The pages beside this script are written by people, but for two kinds of cells of their tables: the
minutes, which teaching_minutes.py counts, and the links to sections of the notebooks. This script
fills these in, and the minutes in the README's table of chapters. `--check` writes nothing and
exits with 1 where they are not as they should be.
`--students` writes the exam without its answers, and nothing else.
"""

import argparse
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from nbformat import NotebookNode

from book.guide.teaching_minutes import (
    EXERCISE,
    GRADE,
    Section,
    readme_with_minutes,
    sections,
    total,
)
from book.notebooks.build_notebooks import read_source
from book.project import OPENING, ROOT, anchor, cells_under_headings, chapter_number, lectures

GUIDE = ROOT / "book" / "guide"
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
TIME = re.compile(r"^\*\*Time\.\*\*.*$", re.MULTILINE)
TABLE = re.compile(r"^(\| [^\n]*\n\|[-|]+\n)((?:\|[^\n]*\n)+)", re.MULTILINE)
BOARD = "| at | min | section | on the board |"
EXERCISES = "| exercise | grade | min | after | it trains |"
BREAK = re.compile(r"^```toml\n(\[break\]\n.*?)^```$", re.MULTILINE | re.DOTALL)
QUESTION = re.compile(r"^\*\*(\d\d)\.(\d) · (\w+)\.\*\* ", re.MULTILINE)
SOLUTION = re.compile(r"^<!-- BEGIN SOLUTION -->\n.*?^<!-- END SOLUTION -->\n", re.M | re.S)


class Break(NamedTuple):
    """A line of a section to change before the class, and the check that then fails."""

    section: str
    line: str
    becomes: str
    fails: str


@cache
def sources() -> dict[str, Path]:
    """The source of each chapter, by its number."""
    return {chapter_number(path): path for path in lectures()}


@cache
def parts_of(chapter: str) -> list[Section]:
    """The sections of a chapter with their minutes."""
    return sections(read_source(sources()[chapter]).cells)


def cells_by_section(source: Path) -> Iterator[tuple[str, NotebookNode]]:
    """Every cell of a chapter, with the title of the section that it stands in or begins."""
    for above, cell in cells_under_headings(read_source(source).cells):
        yield (above[0] if above else OPENING), cell


def link(chapter: str, title: str, words: str) -> str:
    """Words that lead to a section of a chapter's notebook."""
    place = "" if title == OPENING else f"#{anchor(title)}"
    return f"[{words}](../../notebooks/{sources()[chapter].stem}.ipynb{place})"


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


@cache
def grades(chapter: str) -> list[str]:
    """The grades of a chapter's exercises, in their order."""
    return [grade for _, cell in cells_by_section(sources()[chapter])
            if cell.cell_type == "markdown" for grade in GRADE.findall(cell.source)]  # fmt: skip


def filled_page(chapter: str, text: str) -> str:
    """The page of a chapter with its minutes and links."""
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
    return with_exercises(chapter, TIME.sub(time, text, count=1))


def with_exercises(chapter: str, text: str) -> str:
    """The page with the grades and minutes of its exercises."""
    parts, filled = parts_of(chapter), []
    for number, *_, after, trains in rows(text, EXERCISES):
        grade = grades(chapter)[int(number) - 1]
        where = link(chapter, parts[named(parts, after)].title, after)
        filled.append([number, grade, str(EXERCISE[grade]), where, trains])
    return with_rows(text, EXERCISES, filled)


def breaks(text: str) -> list[Break]:
    """The lines that a page says to break."""
    return [Break(**tomllib.loads(block)["break"]) for block in BREAK.findall(text)]


def students(exam: str) -> str:
    """The exam without what stands between its marks."""
    return SOLUTION.sub("", exam)


def pages(guide: Path = GUIDE) -> dict[str, Path]:
    """The page of each chapter, by its number."""
    return {chapter_number(path): path for path in sorted(guide.glob("[0-9][0-9]_*.md"))}


def wanted(guide: Path = GUIDE, root: Path = ROOT) -> dict[Path, str]:
    """The guide's pages and the README as they should be."""
    texts = {chapter: path.read_text(encoding="utf-8") for chapter, path in pages(guide).items()}
    found = {pages(guide)[c]: filled_page(c, text) for c, text in texts.items()}
    readme = root / "README.md"
    return found | {readme: readme_with_minutes(readme.read_text(encoding="utf-8"), root)}


def main(arguments: list[str] | None = None, guide: Path = GUIDE, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m book.guide", description="Fill in the lecturer's guide and the README."
    )
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    parser.add_argument("--students", type=Path, metavar="FILE", help="write the students' exam")
    options = parser.parse_args(arguments)
    if options.students:
        exam = (guide / "exam.md").read_text(encoding="utf-8")
        options.students.write_text(students(exam), encoding="utf-8")
        return 0
    different = {p: t for p, t in wanted(guide, root).items() if p.read_text(encoding="utf-8") != t}
    for path, text in different.items():
        print(f"{'not as it should be' if options.check else 'filled in'}: {path.name}")
        if not options.check:
            path.write_text(text, encoding="utf-8")
    return int(options.check and bool(different))
