"""The editions outside this repository: nbgrader takes the instructor's copy as a course, with its
own commands on one chapter; and the students' zip is enough to run chapters.
"""

import csv
import os
import shutil
import subprocess
import sys
import zipfile
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("nbgrader", reason="nbgrader is missing: make test-book installs it")

from nbgrader.preprocessors import CheckCellMetadata, ClearOutput, ClearSolutions, LockCells
from nbgrader.utils import get_username

from book.project import ROOT

GRADED = [path.stem for path in sorted((ROOT / "notebooks").glob("*.py"))]
(CHAPTER,) = [name for name in GRADED if name.startswith("01")]  # the one that runs fastest
NUMBER, NOTEBOOK = CHAPTER[:2], f"{CHAPTER}.ipynb"
SOLVED = get_username()  # who hands in through the exchange, which goes by the name of the account
WORTH = 9
POINTS = {"wrong": 0, SOLVED: 7}
GRADES = {"wrong": "0.0", SOLVED: "21.0"}
MISTAKE = "def by_pencil():\n    return (1.0, 2.0, 1.0, 3.5), (1.0, 0.5, 0.25)"
ENDLESS = "def combine_best(first, second):\n    while True:\n        pass"


def read(path):
    return nbformat.read(path, as_version=4)


def run(*command, cwd, **environment):
    finished = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        env=os.environ | dict(OMP_NUM_THREADS="1") | environment,  # the other test has a core, too
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def marked(notebook, name):
    """The cell that nbgrader knows by a name, such as 2_check."""
    marks = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in notebook.cells]
    return notebook.cells[marks.index(f"{NUMBER}_exercise_{name}")]


def failed(notebook):
    """The tags of the cells that ended in an error or wrote to stderr."""
    return [
        cell.metadata.tags[0] if cell.metadata.get("tags") else cell.source
        for cell in notebook.cells
        if any(
            output.output_type == "error" or output.get("name") == "stderr"
            for output in cell.get("outputs", [])
        )
    ]


def test_students_get_what_nbgrader_would_release(editions):
    """Cell by cell: sources, outputs, what is locked, and the marks, but for their checksums."""
    for name in GRADED:
        notebook = read(editions / f"instructor/source/{name[:2]}/{name}.ipynb")
        for step in (LockCells, ClearSolutions, ClearOutput, CheckCellMetadata):
            notebook, _ = step().preprocess(notebook, {"nbgrader": {}})
        assert notebook == read(editions / f"student/notebooks/{name}.ipynb"), name


def handed_in(editions):
    """The notebooks of two students. One is wrong, and has changed a check. The other has solved
    all but one, which never ends; a check was deleted, another was copied, and so was an exercise.
    """
    wrong = read(editions / "student/notebooks" / NOTEBOOK)
    marked(wrong, "1").source = MISTAKE
    marked(wrong, "2_check").source = "print('solved, really')"
    solved = read(editions / "instructor/notebooks" / NOTEBOOK)
    solved.cells.remove(marked(solved, "2_check"))
    for name in ("3_check", "1"):
        place = solved.cells.index(marked(solved, name))
        solved.cells.insert(place, deepcopy(solved.cells[place]))
        solved.cells[place].id = f"copy-of-{name}"
    marked(solved, "4").source = ENDLESS
    return wrong, solved


@pytest.fixture(scope="module")
def course(editions, tmp_path_factory):
    """A folder in which a chapter was released, fetched, submitted, collected and graded.

    One student does this through nbgrader's exchange; it knows students by the name of their
    account, so the other's notebook is put where it collects them.
    """
    root = tmp_path_factory.mktemp("course")
    folder, student, exchange = root / "instructor", root / "student", root / "exchange"
    shutil.copytree(editions / "instructor", folder)
    shutil.copytree(editions / "student", student)
    names = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"]
    around = dict.fromkeys(names, str(tmp_path_factory.mktemp("settings")))
    around["PYTHONPATH"] = str(folder)  # for the package that the folder carries
    beside = str(Path(sys.executable).parent)  # nbgrader starts alembic by its name
    around["PATH"] = os.pathsep.join([beside, os.environ["PATH"]])

    def nbgrader(command, *options, cwd=folder):
        run("nbgrader", command, *options, cwd=cwd, **around)

    exchange.mkdir()
    exchange.chmod(0o777)  # as nbgrader wants it: all students write there
    at, theirs = f"--Exchange.root={exchange}", "--course=cheems"
    nbgrader("generate_assignment", NUMBER)
    nbgrader("release_assignment", NUMBER, at)
    nbgrader("fetch_assignment", NUMBER, at, theirs, cwd=student)
    assert read(student / NUMBER / NOTEBOOK).cells  # a student's copy, beside notebooks/
    wrong, solved = handed_in(editions)
    nbformat.write(solved, student / NUMBER / NOTEBOOK)
    nbgrader("submit", NUMBER, at, theirs, cwd=student)
    nbgrader("collect", NUMBER, at)
    (folder / "submitted" / "wrong" / NUMBER).mkdir(parents=True)
    nbformat.write(wrong, folder / "submitted" / "wrong" / NUMBER / NOTEBOOK)
    nbgrader("autograde", NUMBER, "--create", "--Execute.timeout=8")
    nbgrader("export")
    nbgrader("generate_feedback", NUMBER)
    run("course_grades", cwd=folder, **around)
    return folder


def rows(path):
    """The rows of a table by the student in its first or second column."""
    with open(path) as file:
        listed = list(csv.DictReader(file))
    return {row.get("student_id") or row["student"]: row for row in listed}


def test_solutions_get_all_points_and_gaps_none(course):
    """While it grades nothing fails but the checks of gaps: the chapter finds what it reads. An
    endless loop costs its own exercise and no other; a check that was deleted or copied costs none.
    """
    points = rows(course / "grades.csv")
    assert {name: float(row["score"]) for name, row in points.items()} == POINTS
    assert {float(row["max_score"]) for row in points.values()} == {WORTH}
    meant = failed(read(ROOT / "notebooks" / NOTEBOOK))
    assert set(meant) <= {"raises-exception"}
    for name, wrong in {"wrong": 5, SOLVED: 1}.items():
        graded = read(course / "autograded" / name / NUMBER / NOTEBOOK)
        assert failed(graded) == meant + ["check"] * wrong


def test_the_grades_are_those_of_the_syllabus(course):
    """One week so far: 40 percent for exercises 3 and 4, and one for exercise 5."""
    grades = rows(course / "course_grades.csv")
    assert {name: row["total"] for name, row in grades.items()} == GRADES
    solved = {"wrong": "0.00", SOLVED: "0.50"}
    assert {name: row[NUMBER] for name, row in grades.items()} == solved


def test_feedback_shows_the_sentence_and_not_the_frames(course):
    pages = {
        name: (course / "feedback" / name / NUMBER / f"{CHAPTER}.html").read_text(encoding="utf-8")
        for name in POINTS
    }
    assert "not right yet: output 1, output 2, output 3" in pages["wrong"]
    assert "most recent call last" not in pages["wrong"]
    assert "KeyboardInterrupt" in pages[SOLVED]


def test_nbgrader_gives_the_chapter_out(course):
    """Its exchange asks for the name of the course."""
    given = course.parent.glob(f"exchange/cheems/outbound/{NUMBER}/*.ipynb")
    assert [path.name for path in given] == [NOTEBOOK]


def test_the_zip_is_enough_to_run_a_chapter_up_to_the_gaps(editions, tmp_path):
    """Of chapter 12, which reads records, claims, and what other chapters have printed."""
    with zipfile.ZipFile(editions / "student.zip") as packed:
        packed.extractall(tmp_path)
    folder = tmp_path / "cheems_student"
    (path,) = (folder / "notebooks").glob("12_*.ipynb")
    execute = ["nbconvert", "--to", "notebook", "--execute", "--allow-errors", "--inplace"]
    run(*execute, path, cwd=path.parent, PYTHONPATH=str(folder))
    found = failed(read(path))
    assert set(found) <= {"raises-exception", "check"} and found.count("check") == 5
