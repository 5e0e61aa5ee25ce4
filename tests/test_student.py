"""The editions: nothing of a solution reaches students, and nothing else is lost on the way.

A property is a function of `m`, book/student.py or a copy of it with a planted mistake, and of an
empty folder. tests/test_exercises.py runs the exercises of both editions, and tests/book nbgrader.
"""

import os
import re
import shutil
import stat
import zipfile
from pathlib import Path

import nbformat
import pytest
import student
from build import read_source
from lessons import tags

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
(CHAPTER,) = [path for path in SOURCES if path.stem.startswith("03")]
BEGIN, END = "    ### BEGIN SOLUTION\n", "    ### END SOLUTION"
GAP = "    # YOUR CODE HERE\n    raise NotImplementedError()"


def notebook_at(path):
    return nbformat.read(path, as_version=4)


def of_students(m, folder, source=CHAPTER):
    """The notebook of a chapter in the student edition, and its text."""
    m.student_chapter(source, folder)
    written = folder / "notebooks" / source.name
    return notebook_at(written.with_suffix(".ipynb")), written.read_text(encoding="utf-8")


def of_instructors(m, folder, source=CHAPTER):
    m.instructor_chapter(source, folder)
    return notebook_at(folder / "source" / source.stem[:2] / f"{source.stem}.ipynb")


def solutions(text):
    """What stands between the marks, each as its lines."""
    parts = text.split(BEGIN)[1:]
    assert len(parts) == 5 and all(part.count(END) == 1 for part in parts)
    return [part.split(END)[0].splitlines() for part in parts]


def with_gaps(text):
    """A source with its solutions cut out, by another way than that of the edition."""
    first, *parts = text.split(BEGIN)
    return first + "".join(GAP + part.split(END)[1] for part in parts)


# --- properties -----------------------------------------------------------------------------------


def no_solution_is_left(m, folder, source=CHAPTER):
    text = source.read_text(encoding="utf-8")
    lines = {line.strip() for solution in solutions(text) for line in solution if line.strip()}
    told = lines - {line.strip() for line in with_gaps(text).splitlines()}
    assert len(told) > 5, "the chapter has solutions of its own to look for"
    notebook, plain = of_students(m, folder, source)
    seen = {line.strip() for cell in notebook.cells for line in cell.source.splitlines()}
    seen |= {line.strip() for line in plain.splitlines()}
    assert not told & seen
    assert not any("SOLUTION" in line for line in seen)


def the_gaps_are_all_that_differs(m, folder, source=CHAPTER):
    notebook, plain = of_students(m, folder, source)
    before = read_source(source)
    assert plain == with_gaps(source.read_text(encoding="utf-8"))
    assert notebook.metadata == before.metadata
    for cell, original in zip(notebook.cells, before.cells, strict=True):
        assert cell.source == with_gaps(original.source)
        assert (cell.id, cell.cell_type, tags(cell)) == (
            original.id,
            original.cell_type,
            tags(original),
        )
        assert cell.source == original.source or "exercise" in tags(cell)


def nothing_has_run(m, folder, source=CHAPTER):
    for cell in of_students(m, folder, source)[0].cells:
        assert cell.cell_type != "code" or (cell.execution_count is None and not cell.outputs)


def exercises_are_marked(m, folder, source=CHAPTER):
    """As nbgrader's documentation says of its metadata, in both editions alike."""
    both = of_students(m, folder, source)[0], of_instructors(m, folder, source)
    for notebook in both:
        marked = [cell for cell in notebook.cells if "nbgrader" in cell.metadata]
        named = [cell.metadata.nbgrader.grade_id for cell in marked]
        chapter = source.stem[:2]
        assert named == [
            f"{chapter}_exercise_{number}{part}"
            for number in range(1, 6)
            for part in ("", "_check")
        ]
        for cell in marked:
            told, is_check = cell.metadata.nbgrader, "check" in tags(cell)
            assert is_check != ("exercise" in tags(cell))
            assert told.schema_version == 3 and told.task is False
            assert told.grade is told.locked is is_check and told.solution is not is_check
            assert ("points" in told) is is_check
            assert cell.metadata.get("deletable") is False
            assert ("editable" in cell.metadata) is is_check


def points_follow_the_grades(m, folder, source=CHAPTER):
    """Read from the text of the source, where a check follows its heading."""
    text = source.read_text(encoding="utf-8")
    grades = re.findall(r"\*\*\d · (easy|medium|hard)\.\*\*", text)
    points = [{"easy": 1, "medium": 2, "hard": 3}[grade] for grade in grades]
    for notebook in (of_students(m, folder, source)[0], of_instructors(m, folder, source)):
        told = [cell.metadata.get("nbgrader", {}) for cell in notebook.cells]
        assert [one.points for one in told if "points" in one] == points
    assert m.instructor_chapter(source, folder) == sum(points)


def the_instructor_has_all(m, folder, source=CHAPTER):
    """The executed notebook, with no more than the marks added, and its source."""
    stored = notebook_at(source.with_suffix(".ipynb"))
    for notebook in (
        of_instructors(m, folder, source),
        notebook_at(folder / "notebooks" / f"{source.stem}.ipynb"),
    ):
        for cell in notebook.cells:
            for name in ("nbgrader", "deletable", "editable"):
                cell.metadata.pop(name, None)
        assert notebook == stored
    assert (folder / "notebooks" / source.name).read_bytes() == source.read_bytes()


def a_folder_is_made_anew(m, folder):
    (folder / "student").mkdir()
    (folder / "student/old.ipynb").touch()
    (folder / "student/notes").mkdir()
    m.begin(folder / "student", "student.md")
    assert not (folder / "student/old.ipynb").exists()
    assert not (folder / "student/notes").exists()


def a_gradebook_is_left_alone(m, folder):
    kept = folder / "instructor/gradebook.db"
    kept.parent.mkdir()
    kept.touch()
    try:
        m.begin(folder / "instructor", "instructor.md")
    except SystemExit as stopped:
        assert "has a gradebook" in str(stopped.code)
    assert kept.exists()


def what_the_chapters_need_is_carried(m, folder):
    """And nothing else: from a repository in which Python has run, and pip has installed."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(m, "ROOT", folder / "repository")
        leave = shutil.ignore_patterns(".*", "notebooks", "tests", "build", "runs", "__pycache__")
        shutil.copytree(ROOT, folder / "repository", ignore=leave)
        for name in ("cheems_ref/__pycache__", "cheems_ref/cheems_ref.egg-info"):
            (folder / "repository" / name).mkdir()
            (folder / "repository" / name / "left").touch()
        m.begin(folder / "student", "student.md")
    written = {
        path.relative_to(folder / "student").as_posix()
        for path in (folder / "student").rglob("*")
        if path.is_file()
    }
    package = {
        path
        for name in ("cheems_ref", "cheems_lab")
        for path in (ROOT / name).rglob("*")
        if path.is_file()
    }
    package = {p.relative_to(ROOT).as_posix() for p in package if "__pycache__" not in p.parts}
    records = {path.relative_to(ROOT).as_posix() for path in (ROOT / "figures").glob("*/*.json")}
    assert written == package | records | {
        "LICENSE",
        "README.md",
        "book/claims.toml",
        "book/tables.toml",
        "constraints.txt",
        "pyproject.toml",
    }
    assert (folder / "student/README.md").read_text().startswith("# Cheems Reference, student")


def the_zip_is_the_folder(m, folder):
    """Its files, their bytes, one date, one mode: two of the same folder are the same bytes."""
    for name, order in (("one", 1), ("two", -1)):
        for path in ["b/c.txt", "a.txt", "b.txt"][::order]:
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(path * 100)
    (folder / "two/a.txt").chmod(0o600)
    os.utime(folder / "two/a.txt", (1e9, 1e9))
    one, two = (m.pack(folder / name) for name in ("one", "two"))
    assert one == folder / "one.zip" and one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as packed:
        files = {entry.filename: packed.read(entry) for entry in packed.infolist()}
        modes = {stat.S_IMODE(entry.external_attr >> 16) for entry in packed.infolist()}
    assert modes == {0o644}
    assert [*files] == sorted(files) and all(files)
    assert files == {f"cheems_student/{p}": p.encode() * 100 for p in ("a.txt", "b.txt", "b/c.txt")}
    assert one.stat().st_size < sum(map(len, files.values()))


WITH_A_CHAPTER = [
    no_solution_is_left,
    the_gaps_are_all_that_differs,
    nothing_has_run,
    exercises_are_marked,
    points_follow_the_grades,
    the_instructor_has_all,
]
OTHERS = [
    a_folder_is_made_anew,
    a_gradebook_is_left_alone,
    what_the_chapters_need_is_carried,
    the_zip_is_the_folder,
]


@pytest.mark.parametrize("source", SOURCES[1:], ids=lambda path: path.stem)
@pytest.mark.parametrize("has_property", WITH_A_CHAPTER, ids=lambda f: f.__name__)
def test_every_chapter_with_exercises(has_property, source, tmp_path):
    has_property(student, tmp_path, source)


@pytest.mark.parametrize("has_property", OTHERS, ids=lambda f: f.__name__)
def test_folders_and_the_zip(has_property, tmp_path):
    has_property(student, tmp_path)


# --- both editions, whole -------------------------------------------------------------------------


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.iterdir())


def test_every_chapter_is_in_both_editions(editions):
    notebooks = names(ROOT / "notebooks")
    ours = [name for name in notebooks if name.endswith((".py", ".ipynb"))]
    assert names(editions / "student/notebooks") == names(editions / "instructor/notebooks") == ours
    graded = [path.stem[:2] for path in SOURCES if not path.stem.startswith("00")]
    assert names(editions / "instructor/source") == graded
    students = {"LICENSE", "README.md", "constraints.txt", "pyproject.toml"}
    students |= {"book", "cheems_lab", "cheems_ref", "figures", "notebooks"}
    assert set(names(editions / "student")) == students
    assert set(names(editions / "instructor")) == students | {"nbgrader_config.py", "source"}


def test_no_name_of_a_cell_is_there_twice(editions):
    told = [
        cell.metadata.nbgrader.grade_id
        for path in sorted((editions / "student/notebooks").glob("*.ipynb"))
        for cell in notebook_at(path).cells
        if "nbgrader" in cell.metadata
    ]
    assert len(told) == len(set(told)) == 2 * 5 * 12


def test_the_readme_counts_exercises_and_points(editions):
    told = [
        cell.metadata.nbgrader.points
        for path in (editions / "instructor/source").glob("*/*.ipynb")
        for cell in notebook_at(path).cells
        if "points" in cell.metadata.get("nbgrader", {})
    ]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"The {len(told)} exercises give {sum(told)} points." in readme


def test_the_zip_is_of_the_student_edition(editions):
    with zipfile.ZipFile(editions / "student.zip") as packed:
        sizes = {entry.filename: entry.file_size for entry in packed.infolist()}
    folder = editions / "student"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sizes == {
        f"cheems_student/{path.relative_to(folder).as_posix()}": path.stat().st_size
        for path in files
    }
    assert not any(re.search(r"__pycache__|\.venv|/build/", name) for name in sizes)


def test_made_again_it_is_the_same(editions, tmp_path):
    student.make(tmp_path)
    assert (tmp_path / "student.zip").read_bytes() == (editions / "student.zip").read_bytes()
    for path in (editions / "instructor").rglob("*"):
        again = tmp_path / path.relative_to(editions)
        assert path.is_dir() or again.read_bytes() == path.read_bytes(), again


# --- what the READMEs say -------------------------------------------------------------------------

PAGES = ["student.md", "instructor.md"]


def page(name):
    return (ROOT / "book/editions" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_points_are_as_the_page_says(name):
    said = r"An easy exercise gives (\d) points?, a medium one (\d),?(?: and)? a hard one (\d)"
    (told,) = re.findall(said, " ".join(page(name).split()))
    assert [*map(int, told)] == [*student.POINTS.values()]


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_are_there(name, editions):
    folder = editions / name.removesuffix(".md")
    named = set(re.findall(r"`((?:[\w.]+/)*\w+\.(?:ipynb|py)|[\w.]+/)`", page(name)))
    named -= {"release/", "submitted/NAME/03/03_state_space_duality.ipynb"}  # nbgrader's, later
    assert named
    for path in named:
        assert any([*folder.glob(path), *folder.glob(f"*/{path}")]), path


def test_the_pages_install_what_the_chapters_take():
    for name in PAGES:
        (extras,) = set(re.findall(r'-e "\.\[([\w,]+)\]"', page(name)))
        assert extras == "course,kernels"
