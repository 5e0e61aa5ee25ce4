"""The lecturer's guide says what is so: minutes, links, weeks, breaks and the exam's answers.

A break is a line of a chapter with another in its place, and the check that then fails. Its section
is run twice, with nothing before it but the chapter's `setup` cells, imports, functions and
classes: with the line changed it stops at that check, and as it stands it does not.
"""

import ast
import contextlib
import io
import re
import shutil
import traceback
from collections import Counter
from functools import cache
from pathlib import Path

import lecturer
import minutes
import pytest
import torch
from lecturer import BOARD, EXERCISES, GUIDE, Break, cells_by_section, rows, slug, weeks
from lessons import tags

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(GUIDE.glob("*.md"))}
PAGES = {path.name[:2]: TEXTS[path.name] for path in lecturer.pages().values()}
PLANS = weeks(TEXTS["syllabus.md"])
KEPT = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
PASSED_OVER = {"exercise", "check", "versions", "raises-exception", "figure"}


@pytest.fixture(autouse=True)
def in_the_notebooks_folder(monkeypatch):
    """As a notebook runs; what it sets for torch is set back."""
    monkeypatch.chdir(NOTEBOOKS)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


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


def outcome(source: Path, one: Break, up_to: int | None = None) -> tuple[int, str]:
    """The number of the section's cell that fails, and what it says; up to a cell, unchanged."""
    namespace, number = {"__name__": "__main__"}, 0
    for title, cell in cells_by_section(source):
        if cell.cell_type != "code" or tags(cell) & PASSED_OVER:
            continue
        code = cell.source
        if title == one.section and "setup" not in tags(cell):
            number += 1
            code = code if up_to else exchanged(code, one.line, one.becomes)
        elif "setup" not in tags(cell):
            body = [statement for statement in ast.parse(code).body if isinstance(statement, KEPT)]
            code = ast.unparse(ast.Module(body, []))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, "<cell>", "exec"), namespace)
        except Exception as error:
            return number, said(error, code)
        if number == up_to:
            break
    return number, ""


BREAKS = [
    pytest.param(chapter, one, id=f"{chapter} {one.section[:20]} {one.fails[:24]}")
    for chapter, page in lecturer.pages().items()
    for one in lecturer.breaks(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("chapter, one", BREAKS)
def test_a_broken_line_is_seen_by_the_check_that_is_named(chapter, one):
    source = lecturer.sources()[chapter]
    found = [line.strip() for title, cell in cells_by_section(source)
             if title == one.section and cell.cell_type == "code" and "setup" not in tags(cell)
             for line in cell.source.splitlines()]  # fmt: skip
    assert found.count(one.line) == 1, f"{one.section}: {one.line}"
    number, seen = outcome(source, one)
    assert seen == one.fails or seen.startswith(f"{one.fails}:"), seen or "nothing fails"
    assert outcome(source, one, up_to=number) == (number, "")


def test_every_page_has_the_minutes_links_and_weeks_that_are_counted():
    assert lecturer.main(["--check"]) == 0, "run `python book/lecturer.py`"
    assert list(PAGES) == list(lecturer.sources())


def test_what_was_typed_is_seen_and_filled_in(tmp_path, capsys):
    guide = shutil.copytree(GUIDE, tmp_path / "guide")
    page, syllabus = guide / "03_state_space_duality.md", guide / "syllabus.md"
    right = page.read_text(encoding="utf-8"), syllabus.read_text(encoding="utf-8")
    row = re.compile(r"^\| (\d+) \| \d+ \|", re.MULTILINE)  # its first two cells
    page.write_text(row.sub(r"| \1 | 99 |", right[0], count=1), encoding="utf-8")
    syllabus.write_text(row.sub(r"| \1 | 99 |", right[1], count=1), encoding="utf-8")
    assert lecturer.main(["--check"], guide) == 1
    assert capsys.readouterr().out.count("not as it should be") == 2
    assert lecturer.main([], guide) == 0 and lecturer.main(["--check"], guide) == 0
    assert (page.read_text(encoding="utf-8"), syllabus.read_text(encoding="utf-8")) == right


@pytest.mark.parametrize("chapter", PAGES)
def test_a_page_plans_every_section_that_is_taught(chapter):
    parts = [part for part in lecturer.parts_of(chapter) if part.teach]
    board = [row[2] for row in rows(PAGES[chapter], BOARD)]
    assert board == [part.title for part in parts if part.title != "Further reading"]
    assert all(words for *_, words in rows(PAGES[chapter], BOARD))


@pytest.mark.parametrize("chapter", PAGES)
def test_a_page_has_misconceptions_with_questions_and_breaks(chapter):
    [_, heads, *_] = re.split(r"^## What goes wrong in heads$|^## Break it live$",
                              PAGES[chapter], flags=re.MULTILINE)  # fmt: skip
    items = re.split(r"^- ", heads, flags=re.MULTILINE)[1:]
    marks = "reader", "planted", "printed", "likely"
    for item in items:
        words = " ".join(item.split())
        assert re.match(rf'\*\*".+"\*\* \(\*({"|".join(marks)})\*', words), words
        assert words.count("*Ask:*") == words.count("*Hope for:*") == 1, words
    assert len(items) >= 5 and len(lecturer.breaks(PAGES[chapter])) >= 2
    assert "## Leave out" in PAGES[chapter]


@pytest.mark.parametrize("chapter", [chapter for chapter in PAGES if chapter != "00"])
def test_a_page_places_the_five_exercises(chapter):
    placed = rows(PAGES[chapter], EXERCISES)
    assert [row[0] for row in placed] == list("12345")
    [twelve, *_] = PLANS.values()
    given = {one: i for i, week in enumerate(twelve) for one in week.sections}
    parts = lecturer.parts_of(chapter)
    for number, row in enumerate(placed, start=1):
        [due] = [i for i, week in enumerate(twelve) if (chapter, number) in week.exercises]
        after = parts[lecturer.named(parts, row[3])].title
        assert given[chapter, after] <= due, f"{chapter}.{number} before {after}"
        for plan in list(PLANS.values())[1:]:
            weeks_due = [i for i, week in enumerate(plan) if (chapter, number) in week.exercises]
            taught = [i for i, week in enumerate(plan) if (chapter, after) in week.sections]
            assert not weeks_due or (taught and taught <= weeks_due), f"{chapter}.{number}"


@cache
def headings(path: Path) -> set[str]:
    """The anchors of a page, or of a notebook as it is stored."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(c.source for _, c in cells_by_section(path.with_suffix(".py"))
                         if c.cell_type == "markdown")  # fmt: skip
    return {slug(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_headings_that_exist(name):
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"`[^`]*`", "", TEXTS[name])):
        path, _, anchor = target.partition("#")
        assert (GUIDE / path).is_file(), target
        assert not anchor or anchor in headings(GUIDE / path), target


@pytest.mark.parametrize("chapter", PAGES)
def test_equations_and_sections_that_are_named_exist(chapter):
    everything = "".join(path.read_text(encoding="utf-8") for path in lecturer.sources().values())
    for number in re.findall(r"\((\d+\.\d+)\)", PAGES[chapter]):
        assert f"\\tag{{{number}}}" in everything, number
    for number in re.findall(r"[Ss]ections? (\d+)(?! of chapter)", PAGES[chapter]):
        assert lecturer.named(lecturer.parts_of(chapter), f"§{number}"), number


@pytest.mark.parametrize("heading", PLANS)
def test_no_week_has_more_than_its_syllabus_says(heading):
    text = TEXTS["syllabus.md"].partition(f"## {heading}\n")[2].partition("\n## ")[0]
    [at_most] = re.findall(r"at\s+most\s+(\d+)\s+minutes", text)
    assert int(at_most) < 2 * minutes.SITTING
    assert f"sittings of {minutes.SITTING} minutes" in " ".join(text.split())
    for week in PLANS[heading]:
        assert week.name == "left" or 60 <= lecturer.taught(week.sections) <= int(at_most), week
    order = [
        chapter for week in PLANS[heading] if week.name != "left" for chapter, _ in week.sections
    ]
    assert order == sorted(order)


def test_the_two_syllabi_have_their_weeks():
    twelve, four = PLANS.values()
    assert [week.name for week in twelve] == [*map(str, range(1, 13)), "left"]
    assert [week.name for week in four] == [*map(str, range(1, 5))]


def test_twelve_weeks_have_each_section_and_each_exercise_once():
    [twelve, *_] = PLANS.values()
    given = Counter(one for week in twelve for one in week.sections)
    every = [
        (chapter, part.title)
        for chapter in PAGES
        for part in lecturer.parts_of(chapter)
        if part.teach and part.title != "Further reading"
    ]
    assert given == Counter(every)
    exercises = Counter(one for week in twelve for one in week.exercises)
    chapters = [chapter for chapter in PAGES if chapter != "00"]
    assert exercises == Counter((chapter, n) for chapter in chapters for n in range(1, 6))


def test_no_minute_is_typed_beside_those_that_are_counted():
    for name, text in TEXTS.items():
        text = lecturer.TIME.sub("", text)
        typed = set(re.findall(r"(\d+)\s+minutes", text)) - {str(minutes.SITTING)}
        if name == "syllabus.md":
            typed -= set(re.findall(r"at\s+most\s+(\d+)\s+minutes", text))
        assert not typed, name


EXAM = TEXTS["exam.md"]
FOUND = list(lecturer.QUESTION.finditer(EXAM))
ENDS = [*(match.start() for match in FOUND[1:]), len(EXAM)]
QUESTIONS = {
    f"{match[1]}.{match[2]}": (match[3], EXAM[match.start() : end])
    for match, end in zip(FOUND, ENDS, strict=True)
}


def test_the_exam_has_its_kinds_in_every_chapter():
    for chapter in PAGES:
        kinds = [kind for name, (kind, _) in QUESTIONS.items() if name.startswith(chapter)]
        assert set(kinds) == {"compute", "explain", "mistake"}, chapter
        assert len(kinds) == (3 if chapter == "00" else 4), chapter
    assert len(QUESTIONS) == 4 * len(PAGES) - 1


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_is_what_its_lines_print(name, capsys):
    kind, text = QUESTIONS[name]
    [solution] = lecturer.SOLUTION.findall(text)
    [answer] = re.findall(r"^\*Answer\.\* (.+)$", solution, re.MULTILINE)
    snippets = re.findall(r"^```python\n(.*?)^```$", solution, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 1 if kind == "compute" or answer.startswith("`") else not snippets
    for snippet in snippets:
        assert answer == answer.strip() and answer[0] == answer[-1] == "`"
        exec(snippet, {"__name__": "__main__"})
        assert capsys.readouterr().out.strip() == answer.strip("`")


def test_students_see_questions_and_no_answers(tmp_path):
    file = tmp_path / "exam.md"
    assert lecturer.main(["--students", str(file)]) == 0
    theirs = file.read_text(encoding="utf-8")
    assert not re.search(r"Answer|SOLUTION|```python|instructor", theirs)
    for name, (kind, text) in QUESTIONS.items():
        asked = lecturer.SOLUTION.sub("", text).partition("\n## ")[0].strip()
        assert f"**{name} · {kind}.**" in asked and asked in theirs and len(asked) > 80


def test_the_minutes_are_those_of_the_chapters_own_tables():
    told = {}  # read off the second cell of each chapter, and added up here
    for chapter, source in lecturer.sources().items():
        text = source.read_text(encoding="utf-8")
        told |= {
            (chapter, title): int(teach)
            for title, teach in re.findall(r"^# \| (.+) \| (\d+) \| \d+ \|$", text, re.MULTILINE)
        }
    for chapter, page in PAGES.items():
        at = 0
        for begins, teach, title, _ in rows(page, BOARD):
            assert int(teach) == told[chapter, title]
            assert int(begins) in (0, at)
            at = int(begins) + int(teach)
    printed = [int(row[1]) for row in rows(TEXTS["syllabus.md"], lecturer.WEEKS)]
    planned = [week.sections for plan in PLANS.values() for week in plan]
    assert printed == [sum(told[one] for one in given) for given in planned]
