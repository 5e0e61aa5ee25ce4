"""Exercises: five per chapter, a few per lab, each solvable, and each check able to tell.

A check needs its exercise and the chapter's imports, `setup` cells, functions and classes, nothing
else. It passes on the solution. It fails on the gap, and on a solution that returns nothing. The
cells come from the two editions and run in the folder of the student edition.
"""

import ast
import contextlib
import io
import re
from itertools import pairwise

import pytest
from lessons import NOTEBOOKS, definitions, stored, tags
from nbformat import NotebookNode

from book.notebooks.build_notebooks import read_source

CHAPTERS = sorted(NOTEBOOKS.glob("[01][0-9]_*.py"))
LABS = sorted(NOTEBOOKS.glob("labs/*.py"))
every_chapter = pytest.mark.parametrize("source", CHAPTERS, ids=lambda path: path.stem)
GRADES = ["easy", "medium", "hard"]
HEADING = re.compile(r"^# \*\*(\d) · (\w+)\.\*\*", re.MULTILINE)
SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?### END SOLUTION", re.MULTILINE | re.DOTALL)


def exercises(notebook: NotebookNode) -> list[tuple[str, str]]:
    """The pairs of an exercise cell and the check cell after it."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [(a.source, b.source) for a, b in pairwise(cells) if "exercise" in tags(a)]


@every_chapter
def test_five_exercises_of_rising_difficulty_each_with_a_solution_and_a_check(source):
    notebook = read_source(source)
    numbers, grades = zip(*HEADING.findall(source.read_text(encoding="utf-8")), strict=True)
    assert numbers == tuple("12345") and set(grades) == set(GRADES)
    assert list(grades) == sorted(grades, key=GRADES.index)
    marked = [tags(cell) for cell in notebook.cells if tags(cell) & {"exercise", "check"}]
    assert marked == 5 * [{"exercise"}, {"check"}] and len(exercises(notebook)) == 5
    for exercise, _ in exercises(notebook):
        assert len(SOLUTION.findall(exercise)) == 1, exercise
        definition = ast.parse(exercise).body[-1]
        assert isinstance(definition, (ast.FunctionDef, ast.ClassDef)), exercise
        assert ast.get_docstring(definition), exercise


def at_hand(notebook: NotebookNode) -> dict:
    """The names that the exercises of a chapter may use."""
    namespace = {"__name__": "__main__"}
    for cell in notebook.cells:
        if cell.cell_type == "code" and not tags(cell) & {"exercise", "check", "versions"}:
            exec(definitions(cell), namespace)
    return namespace


def run(namespace: dict, exercise: str, check: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        exec(f"{exercise}\n{check}", dict(namespace))


def must_tell(namespace: dict, solution: str, gap: str, check: str) -> None:
    """Run a check on a solution, on the gap, and on a solution that returns nothing."""
    run(namespace, solution, check)
    assert "raise NotImplementedError()" in gap
    for unsolved in (gap, SOLUTION.sub(r"\1pass", solution)):
        with pytest.raises((Exception, SystemExit)):  # a check may raise anything
            run(namespace, unsolved, check)
            pytest.fail(f"the check passes on\n{unsolved}")


@every_chapter
@pytest.mark.usefixtures("torch_as_before")
def test_a_check_tells_the_solution_from_the_gap(source, editions, monkeypatch):
    monkeypatch.chdir(editions / "student/notebooks")
    name = f"{source.stem}.ipynb"
    students = stored(editions / "student/notebooks" / name)
    instructors = stored(editions / "instructor/source" / name[:2] / name)
    namespace = at_hand(students)
    pairs = zip(exercises(students), exercises(instructors), strict=True)
    for (gap, check), (solution, same) in pairs:
        assert check == same
        must_tell(namespace, solution, gap, check)


@pytest.mark.parametrize("source", LABS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("torch_as_before")
def test_a_lab_has_such_exercises_without_grades(source, editions, monkeypatch):
    monkeypatch.chdir(editions / "student/notebooks/labs")
    students = stored(editions / "student/notebooks/labs" / f"{source.stem}.ipynb")
    whole = read_source(source)
    marked = [tags(cell) for cell in whole.cells if tags(cell) & {"exercise", "check"}]
    assert marked == len(marked) // 2 * [{"exercise"}, {"check"}]
    if marked:
        namespace = at_hand(students)
        for (gap, check), (solution, _) in zip(exercises(students), exercises(whole), strict=True):
            must_tell(namespace, solution, gap, check)
