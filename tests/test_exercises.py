"""Exercises: five per chapter, each solvable, and each check able to tell.

A check runs after its exercise with nothing but the chapter's imports, `setup` cells, functions and
classes at hand. It passes on the solution, and fails where the solution is missing, whether the
gap says so or returns nothing. The cells are those that students and instructors are given, and run
in the folder of the student edition.
"""

import ast
import contextlib
import io
import re
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import torch
from build import read_source
from lessons import tags

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.py"))
CHAPTERS = [path for path in SOURCES if not path.stem.startswith("00")]  # 00 has a self-test
GRADES = ["easy", "medium", "hard"]
HEADING = re.compile(r"^\*\*(\d) · (\w+)\.\*\*", re.MULTILINE)
SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?### END SOLUTION", re.MULTILINE | re.DOTALL)


def exercises(path: Path) -> list[tuple[str, str]]:
    """The pairs of an exercise cell and the check cell after it, in a source or a notebook."""
    read = read_source if path.suffix == ".py" else partial(nbformat.read, as_version=4)
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    pairs = zip(cells, [*cells[1:], None], strict=True)
    return [(cell.source, check.source) for cell, check in pairs if "exercise" in tags(cell)]


@pytest.fixture
def chapter(request, editions, monkeypatch):
    """What the exercises of a chapter may use, in a namespace of its own."""
    monkeypatch.chdir(editions / "student/notebooks")
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    namespace = {"__name__": "__main__"}
    for cell in nbformat.read(f"{request.param.stem}.ipynb", as_version=4).cells:
        if cell.cell_type != "code" or tags(cell) & {"exercise", "check", "versions"}:
            continue
        kept = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
        body = ast.parse(cell.source).body
        if "setup" not in tags(cell):
            body = [statement for statement in body if isinstance(statement, kept)]
        exec(compile(ast.Module(body, []), request.param.name, "exec"), namespace)
    yield namespace
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def passes(namespace: dict, exercise: str, check: str) -> bool:
    namespace = dict(namespace)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(exercise, namespace)
            exec(check, namespace)
    except (Exception, SystemExit):  # whatever a check says no with
        return False
    return True


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_five_exercises_of_rising_difficulty(path):
    text = "\n".join(c.source for c in read_source(path).cells if c.cell_type == "markdown")
    headings = HEADING.findall(text)
    assert [number for number, _ in headings] == list("12345")
    grades = [GRADES.index(grade) for _, grade in headings]
    assert grades == sorted(grades) and set(grades) == {0, 1, 2}
    assert len(exercises(path)) == 5


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_an_exercise_is_a_function_with_a_solution_and_a_check(path):
    cells = [cell for cell in read_source(path).cells if cell.cell_type == "code"]
    following = [tags(after) for cell, after in pairwise(cells) if "exercise" in tags(cell)]
    assert following == [{"check"}] * 5
    assert Counter(tag for cell in cells for tag in tags(cell))["check"] == 5
    for source, _ in exercises(path):
        assert len(SOLUTION.findall(source)) == 1, source
        definition = ast.parse(source).body[-1]
        assert isinstance(definition, (ast.FunctionDef, ast.ClassDef)), source
        assert ast.get_docstring(definition), source


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem, indirect=True)
def test_a_check_tells_the_solution_from_the_gap(chapter, editions, request, number):
    name = request.node.callspec.params["chapter"].stem
    gap, check = exercises(editions / f"student/notebooks/{name}.ipynb")[number]
    solution, same = exercises(editions / f"instructor/source/{name[:2]}/{name}.ipynb")[number]
    assert "raise NotImplementedError()" in gap and check == same
    assert not passes(chapter, gap, check), "passes where it is untouched"
    nothing = SOLUTION.sub(r"\1pass", solution)
    assert not passes(chapter, nothing, check), "passes where nothing is returned"
    namespace = dict(chapter)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(solution, namespace)
        exec(check, namespace)
