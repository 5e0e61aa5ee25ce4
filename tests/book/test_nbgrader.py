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

from book.project import ROOT

GRADED = [path.stem for path in sorted((ROOT / "notebooks").glob("*.py"))[1:]]  # 00 has none
(CHAPTER,) = [name for name in GRADED if name.startswith("03")]
NUMBER, NOTEBOOK = CHAPTER[:2], f"{CHAPTER}.ipynb"
POINTS = {"untouched": 0, "solved": 10, "deleter": 10, "copier": 10}


def read(path):
    return nbformat.read(path, as_version=4)


def run(*command, cwd, **environment):
    finished = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        env=os.environ | environment,
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
        for output in cell.get("outputs", [])
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


def test_students_get_what_nbgrader_would_release(editions):
    """Cell by cell: sources, outputs, what is locked, and the marks, but for their checksums."""
    for name in GRADED:
        notebook = read(editions / f"instructor/source/{name[:2]}/{name}.ipynb")
        for step in (LockCells, ClearSolutions, ClearOutput, CheckCellMetadata):
            notebook, _ = step().preprocess(notebook, {"nbgrader": {}})
        assert notebook == read(editions / f"student/notebooks/{name}.ipynb"), name


@pytest.fixture(scope="module")
def course(editions, tmp_path_factory):
    """A folder with submissions that nbgrader has graded: all solved; nothing, but a check changed;
    solved, but one has deleted a check, and another has copied a check and an exercise.
    """
    folder = tmp_path_factory.mktemp("course") / "instructor"
    shutil.copytree(editions / "instructor", folder)
    names = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"]
    around = dict.fromkeys(names, str(tmp_path_factory.mktemp("settings")))
    around["PYTHONPATH"] = str(folder)  # for the package that the folder carries
    beside = str(Path(sys.executable).parent)  # nbgrader starts alembic by its name
    around["PATH"] = os.pathsep.join([beside, os.environ["PATH"]])
    untouched = read(editions / "student/notebooks" / NOTEBOOK)
    solved, deleter, copier = (read(folder / "notebooks" / NOTEBOOK) for _ in range(3))
    marked(untouched, "1_check").source = "print('solved, really')"
    deleter.cells.remove(marked(deleter, "2_check"))
    for name in ("2_check", "1"):
        place = copier.cells.index(marked(copier, name))
        copier.cells.insert(place, deepcopy(copier.cells[place]))
        copier.cells[place].id = f"copy-of-{name}"
    handed_in = dict(untouched=untouched, solved=solved, deleter=deleter, copier=copier)
    for name, notebook in handed_in.items():
        (folder / "submitted" / name / NUMBER).mkdir(parents=True)
        nbformat.write(notebook, folder / "submitted" / name / NUMBER / NOTEBOOK)
    run("nbgrader", "generate_assignment", NUMBER, cwd=folder, **around)
    exchange = folder.parent / "exchange"
    exchange.mkdir()
    exchange.chmod(0o777)  # as nbgrader wants it: all students write there
    give_out = ["nbgrader", "release_assignment", NUMBER, f"--Exchange.root={exchange}"]
    run(*give_out, cwd=folder, **around)
    run("nbgrader", "autograde", NUMBER, "--create", cwd=folder, **around)
    run("nbgrader", "export", cwd=folder, **around)
    return folder


def test_solutions_get_all_points_and_gaps_none(course):
    """While it grades nothing fails but the checks of gaps: the chapter finds what it reads."""
    with open(course / "grades.csv") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    assert {name: float(row["score"]) for name, row in rows.items()} == POINTS
    assert {float(row["max_score"]) for row in rows.values()} == {max(POINTS.values())}
    meant = failed(read(ROOT / "notebooks" / NOTEBOOK))
    assert set(meant) <= {"raises-exception"}
    for name, points in POINTS.items():
        checks = 5 * (points == 0)
        graded = read(course / "autograded" / name / NUMBER / NOTEBOOK)
        assert failed(graded) == meant + ["check"] * checks


def test_nbgrader_gives_the_chapter_out(course):
    """Its exchange asks for the name of the course."""
    given = course.parent.glob(f"exchange/cheems/outbound/{NUMBER}/*")
    assert [path.name for path in given] == [NOTEBOOK]


def test_the_zip_is_enough_to_run_chapters_up_to_the_gaps(editions, tmp_path):
    """Of the first, of one with kernels, and of 11, which reads what 03 has printed."""
    with zipfile.ZipFile(editions / "student.zip") as packed:
        packed.extractall(tmp_path)
    folder = tmp_path / "cheems_student"
    execute = ["nbconvert", "--to", "notebook", "--execute", "--allow-errors", "--inplace"]
    for number, checks in (("00", 5), ("03", 5), ("12", 5)):
        (path,) = (folder / "notebooks").glob(f"{number}_*.ipynb")
        run(*execute, path, cwd=path.parent, PYTHONPATH=str(folder))
        found = failed(read(path))
        assert set(found) <= {"raises-exception", "check"} and found.count("check") == checks
