"""The lecturer's guide says what is so: minutes, links, breaks and the exam's answers.

A break is a line of a chapter with another in its place, and the check that then fails. Its section
is run with nothing before it but the chapter's `setup` cells, imports, functions and classes, and
stops at that check.
"""

import contextlib
import io
import re
import shutil
import traceback
from functools import cache
from pathlib import Path

import pytest
from lessons import definitions, tags

from book.guide import lecturer_guide
from book.guide.lecturer_guide import (
    BOARD,
    EXERCISES,
    GUIDE,
    Break,
    cells_by_section,
    rows,
)
from book.project import ROOT, anchor
from book.project import headings as headings_in

NOTEBOOKS = ROOT / "notebooks"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(GUIDE.glob("*.md"))}
PAGES = {path.name[:2]: TEXTS[path.name] for path in lecturer_guide.pages().values()}
PASSED_OVER = {"exercise", "check", "versions", "raises-exception", "figure"}


@pytest.fixture(autouse=True)
def in_the_notebooks_folder(monkeypatch, torch_as_before):
    monkeypatch.chdir(NOTEBOOKS)


@cache
def cells_of(source: Path) -> list:
    return list(cells_by_section(source))


def exchanged(source: str, line: str, becomes: str) -> str:
    """A cell's source with one line in the place of another, as far in as it was."""
    lines = source.splitlines()
    return "\n".join(one.replace(line, becomes) if one.strip() == line else one for one in lines)


def said(error: Exception, source: str) -> str:
    """The line that the class sees last: the error's first line, or the assertion that has none."""
    if str(error):
        return str(error).splitlines()[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<cell>"]
    return source.splitlines()[frames[-1].lineno - 1].strip()


def outcome(source: Path, one: Break) -> str:
    """The message of the first cell that fails in the broken section."""
    namespace, inside = {"__name__": "__main__"}, False
    for title, cell in cells_of(source):
        if inside and title != one.section:
            break
        if cell.cell_type != "code" or tags(cell) & PASSED_OVER:
            continue
        inside, code = title == one.section, definitions(cell)
        if inside and "setup" not in tags(cell):
            code = exchanged(cell.source, one.line, one.becomes)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, "<cell>", "exec"), namespace)
        except Exception as error:
            return said(error, code)
    return "nothing fails"


BREAKS = [
    pytest.param(lecturer_guide.sources()[chapter], one, id=f"{chapter} {one.section} {one.fails}")
    for chapter, text in PAGES.items()
    for one in lecturer_guide.breaks(text)
]


@pytest.mark.parametrize("source, one", BREAKS)
def test_a_broken_line_is_seen_by_the_check_that_is_named(source, one):
    section = [cell for title, cell in cells_of(source) if title == one.section]
    code = [c.source for c in section if c.cell_type == "code" and "setup" not in tags(c)]
    found = [line.strip() for line in "\n".join(code).splitlines()]
    assert found.count(one.line) == 1, f"{one.section}: {one.line}"
    seen = outcome(source, one)
    assert seen == one.fails or seen.startswith(f"{one.fails}:")


def test_minutes_are_as_counted_and_what_was_typed_is_seen_and_filled_in(tmp_path):
    assert lecturer_guide.main(["--check"]) == 0, "run `python -m book.guide`"
    assert list(PAGES) == list(lecturer_guide.sources())
    guide = shutil.copytree(GUIDE, tmp_path / "guide")
    name = "03_state_space_duality.md"
    typed = re.sub(r"^\| (\d+) \| \d+ \|", r"| \1 | 99 |", TEXTS[name], count=1, flags=re.M)
    (guide / name).write_text(typed, encoding="utf-8")
    assert lecturer_guide.main(["--check"], guide) == 1
    assert lecturer_guide.main([], guide) == 0 and (guide / name).read_text("utf-8") == TEXTS[name]


@cache
def board(chapter: str) -> list[str]:
    """The titles of the sections that are taught."""
    parts = [part for part in lecturer_guide.parts_of(chapter) if part.teach]
    return [part.title for part in parts if part.title != "Further reading"]


@pytest.mark.parametrize("chapter", PAGES)
def test_a_page_has_its_parts(chapter):
    """Every section that is taught on the board, misconceptions with question and answer, breaks,
    and only equations and sections that exist.
    """
    page, parts = PAGES[chapter], lecturer_guide.parts_of(chapter)
    planned = rows(page, BOARD)
    assert [title for _, _, title, _ in planned] == board(chapter)
    assert all(words for *_, words in planned)
    heads = page.partition("## Misconceptions\n")[2].partition("\n## ")[0]
    items = [" ".join(item.split()) for item in re.split(r"^- ", heads, flags=re.MULTILINE)[1:]]
    for item in items:
        assert re.match(r'\*\*".+"\*\* \(\*(reader|planted|printed|likely)\*', item), item
        assert item.count("*Ask:*") == item.count("*Hope for:*") == 1, item
    assert items and lecturer_guide.breaks(page)
    exercises = [row[0] for row in rows(page, EXERCISES)]
    assert "## Leave out" in page and exercises == list("12345" * (chapter != "00"))
    course = "".join(path.read_text(encoding="utf-8") for path in lecturer_guide.sources().values())
    for number in re.findall(r"\((\d+\.\d+)\)", page):
        assert f"\\tag{{{number}}}" in course, number
    for number in re.findall(r"[Ss]ections? (\d+)(?! of chapter)", page):
        assert lecturer_guide.named(parts, f"§{number}") is not None, number


@cache
def headings(path: Path) -> set[str]:
    """The anchors of a page, or of a notebook as it is stored."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = cells_of(path.with_suffix(".py"))
        text = "\n".join(cell.source for _, cell in cells if cell.cell_type == "markdown")
    return {anchor(title) for _, title in headings_in(text)}


def test_links_lead_to_headings_that_exist():
    for name, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"`[^`]*`", "", text)):
            path, _, anchor = target.partition("#")
            assert (GUIDE / path).is_file(), f"{name}: {target}"
            assert not anchor or anchor in headings(GUIDE / path), f"{name}: {target}"


EXAM = TEXTS["exam.md"]
FOUND = list(lecturer_guide.QUESTION.finditer(EXAM))
ENDS = [*(match.start() for match in FOUND[1:]), len(EXAM)]
QUESTIONS = {
    f"{match[1]}.{match[2]}": (match[3], EXAM[match.start() : end])
    for match, end in zip(FOUND, ENDS, strict=True)
}


def test_the_exam_has_its_kinds_in_every_chapter_and_answers_are_what_their_lines_print(capsys):
    given = sorted((name[:2], kind) for name, (kind, _) in QUESTIONS.items())
    assert sorted({*given}) == [
        (c, kind) for c in PAGES for kind in ("compute", "explain", "mistake")
    ]
    for name, (kind, text) in QUESTIONS.items():
        [solution] = lecturer_guide.SOLUTION.findall(text)
        [answer] = re.findall(r"^\*Answer\.\* (.+)$", solution, re.MULTILINE)
        snippets = re.findall(r"^```python\n(.*?)^```$", solution, re.MULTILINE | re.DOTALL)
        assert len(snippets) == (kind == "compute" or answer.startswith("`")), name
        for snippet in snippets:
            exec(snippet, {"__name__": "__main__"})
            assert f"`{capsys.readouterr().out.strip()}`" == answer, name


def test_twelve_weeks_have_each_chapter_once_and_the_exam_a_question_of_each():
    syllabus = TEXTS["syllabus.md"]
    assert [row[1][:2] for row in rows(syllabus, "| week ")] == [*PAGES][1:]
    names, points = re.search(r"(\| 01\.\d .*)\n.*\n(.*)\n", syllabus).groups()
    asked = lecturer_guide.cells(names)
    assert [name[:2] for name in asked] == [*PAGES][1:] and set(asked) <= set(QUESTIONS)
    assert sum(map(int, lecturer_guide.cells(points))) == 90


def test_students_see_questions_and_no_answers(tmp_path):
    file = tmp_path / "exam.md"
    assert lecturer_guide.main(["--students", str(file)]) == 0
    theirs = file.read_text(encoding="utf-8")
    assert not re.search(r"Answer|SOLUTION|```python|instructor", theirs)
    for name, (kind, text) in QUESTIONS.items():
        asked = lecturer_guide.SOLUTION.sub("", text).partition("\n## ")[0].strip()
        assert f"**{name} · {kind}.**" in asked and asked in theirs and len(asked) > 80
