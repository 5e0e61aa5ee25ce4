"""Make the student edition and the instructor's copy.

    python -m book.editions

`build/student` has the chapters without solutions and outputs, and all that they need to run: the
package, its pins, the records and the claims. `build/student.zip` is the same folder, and the same
bytes whenever it is made: its files bear the date that CITATION.cff gives this edition. In
`build/instructor` the chapters are whole, and `source` has them once more in nbgrader's layout,
beside settings for it and the program that computes the grades of the syllabus.

In both, the cells of an exercise carry nbgrader's metadata, so that what is handed in from the one
is graded in the other. All of it comes from the sources: an exercise is a cell tagged `exercise`,
its solution stands between nbgrader's marks, the cell tagged `check` after it grades it, and the
heading above them says how hard it is. The exercises of a lab have gaps, too, but neither headings
nor points.
"""

import re
import shutil
import sys
import zipfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from book.notebooks.build_notebooks import read_source
from book.project import ROOT, chapter_number, chapters, lectures, without_solutions

EDITIONS = ROOT / "book" / "editions"
# What the chapters read and import, and what installs that.
CARRIED = ["LICENSE", "constraints.txt", "pyproject.toml", "cheems_ref", "cheems_lab"]
CARRIED += ["experiments/records", "figures/drawings", "book/manual"]
CARRIED += ["book/claims.toml", "book/tables.toml"]
NEVER = shutil.ignore_patterns("__pycache__", "*.egg-info")
PAGES_ONLY = shutil.ignore_patterns("__pycache__", "*.py")  # of the guide

HEADING = re.compile(r"^\*\*(\d) · (\w+)\.\*\*", re.MULTILINE)
POINTS = {"easy": 1, "medium": 2, "hard": 3}


def mark(notebook: NotebookNode, chapter: str) -> int:
    """Give the exercises nbgrader's metadata, in place.

    Args:
        notebook: of a chapter, with or without its solutions.
        chapter: its number, `03`, with which the names of its cells begin.

    Returns:
        The points that the chapter gives.
    """
    total = 0
    for cell in notebook.cells:
        for number, grade in HEADING.findall(cell.source):
            name, points = f"{chapter}_exercise_{number}", POINTS[grade]
        tags = cell.metadata.get("tags", [])
        if "exercise" in tags:
            told = dict(grade_id=name, solution=True, grade=False, locked=False)
        elif "check" in tags:
            told = dict(grade_id=f"{name}_check", solution=False, grade=True, locked=True)
            told["points"] = points
            total += points
            cell.metadata.editable = False
        else:
            continue
        cell.metadata.deletable = False
        cell.metadata.nbgrader = NotebookNode(schema_version=3, task=False, **told)
    return total


def write(notebook: NotebookNode, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")


def student_chapter(source: Path, folder: Path) -> None:
    """Write a chapter without solutions and outputs. Students get no .py that looks like it."""
    notebook = read_source(source)
    for cell in notebook.cells:
        cell.source = without_solutions(cell.source)
    if source in lectures():  # a lab is for oneself: it has gaps, and gives no points
        mark(notebook, chapter_number(source))
    place = folder / source.parent.relative_to(ROOT)
    write(notebook, place / f"{source.stem}.ipynb")


def instructor_chapter(source: Path, folder: Path) -> int:
    """Write a chapter with solutions and outputs; returns its points, 0 where nothing is graded."""
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    points, name = 0, f"{source.stem}.ipynb"
    if source in lectures():
        points = mark(notebook, chapter_number(source))
    place = folder / source.parent.relative_to(ROOT)
    write(notebook, place / name)
    shutil.copy(source, place)
    if points:
        write(notebook, folder / "source" / source.stem[:2] / name)
    return points


def begin(folder: Path, readme: str) -> None:
    """Make a folder anew, with all but the chapters."""
    if (folder / "gradebook.db").exists():
        sys.exit(f"{folder} has a gradebook: move the folder elsewhere, then make a new one")
    shutil.rmtree(folder, ignore_errors=True)
    for name in CARRIED:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=NEVER)
        else:
            shutil.copy(ROOT / name, target)
    shutil.copy(EDITIONS / readme, folder / "README.md")


def released() -> tuple[int, int, int]:
    """Year, month and day of this edition, from CITATION.cff."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    year, month, day = re.search(r"^date-released: (\d+)-(\d+)-(\d+)$", text, re.MULTILINE).groups()
    return int(year), int(month), int(day)


def pack(folder: Path) -> Path:
    """Zip a folder: in one order, with one date and one mode, so that the bytes are the same."""
    archive, date = folder.with_suffix(".zip"), released()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        files = (path for path in folder.rglob("*") if path.is_file())
        for name in sorted(path.relative_to(folder).as_posix() for path in files):
            entry = zipfile.ZipInfo(f"cheems_student/{name}", (*date, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, (folder / name).read_bytes(), zipfile.ZIP_DEFLATED)
    return archive


def make(build: Path) -> dict[str, int]:
    """Make both editions in the folder `build`; returns the points of each chapter."""
    student, instructor = build / "student", build / "instructor"
    begin(student, "student.md")
    begin(instructor, "instructor.md")
    shutil.copytree(ROOT / "book" / "guide", instructor / "book" / "guide", ignore=PAGES_ONLY)
    for name in ("nbgrader_config.py", "course_grades.py"):
        shutil.copy(EDITIONS / name, instructor)
    points = {}
    for source in chapters():
        student_chapter(source, student)
        points[source.stem] = instructor_chapter(source, instructor)
    pack(student)
    return points


def main() -> None:
    found = make(ROOT / "build")
    print(f"{sum(map(bool, found.values()))} chapters with exercises, {sum(found.values())} points")
    print("build/student.zip is for students, build/instructor for nbgrader; each has a README.")
