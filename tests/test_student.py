"""The editions: nothing of a solution reaches students, and nothing else is lost on the way.

tests/test_exercises.py runs the exercises of both editions, and tests/book has nbgrader.
"""

import datetime
import os
import re
import zipfile

import pytest
from lessons import stored, tags

from book.editions import build_editions, course_grades
from book.notebooks.build_notebooks import read_source
from book.project import ROOT

SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
LABS = sorted((ROOT / "notebooks/labs").glob("*.py"))
CHAPTERS = SOURCES
every_chapter = pytest.mark.parametrize("source", CHAPTERS, ids=lambda path: path.stem)
BEGIN, END = "    ### BEGIN SOLUTION\n", "    ### END SOLUTION"
GAP = "    # YOUR CODE HERE\n    raise NotImplementedError()"


def with_gaps(text):
    """Cut the solutions out of a source without the regular expression of build_editions.py."""
    first, *parts = text.split(BEGIN)
    return first + "".join(GAP + part.split(END)[1] for part in parts)


@pytest.mark.parametrize("source", SOURCES + LABS, ids=lambda path: path.stem)
def test_students_get_all_but_solutions_and_outputs(editions, source):
    text = source.read_text(encoding="utf-8")
    folder = editions / "student" / source.parent.relative_to(ROOT)
    assert "SOLUTION" not in with_gaps(text) and not (folder / source.name).exists()
    notebook = stored(folder / f"{source.stem}.ipynb")
    for cell, original in zip(notebook.cells, read_source(source).cells, strict=True):
        assert cell.source == with_gaps(original.source)
        assert (cell.id, tags(cell)) == (original.id, tags(original))
        assert cell.get("execution_count") is None and not cell.get("outputs")
        assert source not in LABS or "nbgrader" not in cell.metadata  # a lab gives no points


@every_chapter
def test_instructors_get_the_chapter_as_it_was_run(editions, source):
    name, folder = f"{source.stem}.ipynb", editions / "instructor"
    whole = stored(source.with_suffix(".ipynb"))
    for path in (folder / "notebooks" / name, folder / "source" / source.stem[:2] / name):
        for cell, original in zip(stored(path).cells, whole.cells, strict=True):
            added = {"nbgrader", "deletable", "editable"}
            kept = {key: value for key, value in cell.metadata.items() if key not in added}
            assert cell | {"metadata": kept} == original
    assert (folder / "notebooks" / source.name).read_bytes() == source.read_bytes()


@every_chapter
def test_exercises_are_marked_as_nbgrader_says(editions, source):
    """An exercise holds a solution; its check is locked, and gives the points of its grade."""
    grades = re.findall(r"\*\*\d · (easy|medium|hard)\.\*\*", source.read_text(encoding="utf-8"))
    notebook = stored(editions / "student/notebooks" / f"{source.stem}.ipynb")
    told = {"exercise": dict(grade=False, locked=False, solution=True)}
    told["check"] = dict(grade=True, locked=True, solution=False)
    wanted = []
    for number, grade in enumerate(grades, start=1):
        points, name = {"easy": 1, "medium": 2, "hard": 3}[grade], f"_exercise_{number}"
        wanted += [("exercise", name, {}), ("check", f"{name}_check", dict(points=points))]
    cells = [cell for cell in notebook.cells if "nbgrader" in cell.metadata]
    for cell, (tag, name, more) in zip(cells, wanted, strict=True):
        marks = dict(schema_version=3, task=False, grade_id=source.stem[:2] + name)
        assert tags(cell) == {tag} and cell.metadata.nbgrader == marks | told[tag] | more
        assert cell.metadata.deletable is False
        assert cell.metadata.get("editable", True) is (tag == "exercise")


def graded(got, weeks):
    """The grade for points under names such as `03_4`, exercise 4 of chapter 03."""
    most = {"3": 2.0, "4": 2.0, "5": 3.0}
    points = [
        course_grades.Points(name[:2], int(name[3]), number, most.get(name[3], 1.0))
        for name, number in got.items()
    ]
    return course_grades.grade(points, weeks)


def test_grades_are_those_of_the_syllabus():
    """40 percent for exercises 3 and 4 of the ten best weeks; one for an exercise 5, up to five."""
    syllabus = " ".join((ROOT / "book/guide/syllabus.md").read_text(encoding="utf-8").split())
    assert "exercises 3 and 4, of the ten best weeks" in syllabus and "| 40 % |" in syllabus
    assert "An exercise 5 that passes its check is worth one percent, up to five." in syllabus
    weeks = [f"{week:02}" for week in range(1, 13)]
    all_right = {f"{week}_{number}": 2.0 for week in weeks for number in "34"}
    assert graded(all_right, weeks).total == 40
    ten = {name: 0.0 if name[:2] in ("04", "09") else got for name, got in all_right.items()}
    assert graded(ten, weeks).exercises == 40  # two weeks may be missed
    nine = {name: 0.0 if name[:2] == "01" else got for name, got in ten.items()}
    assert graded(nine, weeks).exercises == pytest.approx(36)
    assert graded(nine | {"00_3": 2.0}, ["00", *weeks]).exercises == pytest.approx(36)  # no week
    assert graded({f"{week}_{number}": 1.0 for week in weeks for number in "12"}, weeks).total == 0
    assert graded({"01_3": 2.0, "01_4": 0.0, "02_3": 2.0, "02_4": 2.0}, weeks[:2]).exercises == 30
    assert graded({"02_3": 2.0, "02_4": 2.0}, weeks[:2]).exercises == 20  # 01 was not handed in
    fifths = {f"{week}_5": 3.0 for week in weeks}
    for solved, bonus in ((0, 0), (3, 3), (7, 5)):
        assert graded(dict([*fifths.items()][:solved]), weeks).bonus == bonus
    assert graded({"01_5": 2.0}, weeks).bonus == 0  # not all of its points
    assert graded({}, weeks).total == graded({}, []).total == 0
    assert course_grades.exercise_of("03_exercise_4_check") == ("03", 4)
    assert course_grades.exercise_of("03_exercise_4") is None


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_both_editions_hold_what_the_chapters_need_and_the_zip_is_the_students(editions):
    carried = {"LICENSE", "constraints.txt", "pyproject.toml"}
    carried |= {"book/claims.toml", "book/tables.toml"}
    chapters = [*SOURCES, *(ROOT / "notebooks").glob("[lr]*/*.py")]  # labs and reference
    folders = ("cheems_ref/**/*", "cheems_lab/**/*", "book/manual/*")
    for pattern in (*folders, "experiments/records/*", "figures/drawings/*"):
        paths = [path for path in ROOT.glob(pattern) if path.is_file()]
        carried |= {p.relative_to(ROOT).as_posix() for p in paths if "__pycache__" not in p.parts}
    carried |= {path.relative_to(ROOT).with_suffix(".ipynb").as_posix() for path in chapters}
    assert files(editions / "student") == carried | {"README.md"}
    more = {path for path in files(editions / "instructor") if not path.startswith("book/guide/")}
    sources = {f"source/{path.stem[:2]}/{path.stem}.ipynb" for path in CHAPTERS}
    sources |= {path.relative_to(ROOT).as_posix() for path in chapters}
    assert more == carried | sources | {"README.md", "nbgrader_config.py", "course_grades.py"}
    with zipfile.ZipFile(editions / "student.zip") as packed:
        names = {name.removeprefix("cheems_student/") for name in packed.namelist()}
    assert names == files(editions / "student")


def test_the_zip_of_the_same_files_has_the_same_bytes(tmp_path):
    """Whatever their order, their modes and their dates."""
    for name, order in (("one", 1), ("two", -1)):
        for path in ["b/c.txt", "a.txt", "b.txt"][::order]:
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(path * 100)
    (tmp_path / "two/a.txt").chmod(0o600)
    os.utime(tmp_path / "two/a.txt", (1e9, 1e9))
    one, two = (build_editions.pack(tmp_path / name) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as packed:
        assert packed.read("cheems_student/b/c.txt") == b"b/c.txt" * 100
        dates = {entry.date_time for entry in packed.infolist()}
    [date] = dates
    assert date[3:] == (0, 0, 0) and date[0] >= 2026  # of the edition, not of the file's making
    assert f"date-released: {datetime.date(*date[:3])}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_folder_is_made_anew_unless_it_has_a_gradebook(tmp_path):
    folder = tmp_path / "instructor"
    folder.mkdir()
    (folder / "old.ipynb").touch()
    build_editions.begin(folder, "instructor.md")
    assert not (folder / "old.ipynb").exists()
    (folder / "gradebook.db").touch()
    with pytest.raises(SystemExit, match="has a gradebook"):
        build_editions.begin(folder, "instructor.md")
    assert (folder / "gradebook.db").exists()


def test_the_readmes_say_what_is_so(editions):
    """Points, and files."""
    text = " ".join((ROOT / "book/manual/setting_up.md").read_text(encoding="utf-8").split())
    paths = (editions / "instructor/source").glob("*/*.ipynb")
    marks = [cell.metadata.get("nbgrader", {}) for path in paths for cell in stored(path).cells]
    graded = [mark["points"] for mark in marks if "points" in mark]
    assert f"The {len(graded)} exercises give {sum(graded)} points." in text
    for edition in ("student", "instructor"):
        page = (ROOT / f"book/editions/{edition}.md").read_text(encoding="utf-8")
        said = r"An easy exercise gives (\d) points?, a medium one (\d),?(?: and)? a hard one (\d)"
        assert re.findall(said, " ".join(page.split())) == [("1", "2", "3")]
        assert set(re.findall(r'-e "\.\[([\w,]+)\]"', page)) == {"course,kernels"}
        named = set(re.findall(r"`((?:[\w.]+/)*\w+\.(?:ipynb|py)|[\w.]+/)`", page))
        named -= {"release/", "submitted/"}  # nbgrader's, later
        named -= {"submitted/NAME/03/03_state_space_duality.ipynb"}
        folder = editions / edition
        assert named
        for path in named:
            assert any([*folder.glob(path), *folder.glob(f"*/{path}")]), path
