"""Mistakes in the editions that the properties of test_student.py must catch."""

import student
from planting import mistakes
from test_student import (
    a_folder_is_made_anew,
    a_gradebook_is_left_alone,
    exercises_are_marked,
    no_solution_is_left,
    nothing_has_run,
    points_follow_the_grades,
    the_gaps_are_all_that_differs,
    the_instructor_has_all,
    the_zip_is_the_folder,
    what_the_chapters_need_is_carried,
)

ROOMS = (student,)
CELL = "        cell.source = without_solutions(cell.source)\n"
TAGLESS = """notebook = read_source(source)
    for cell in notebook.cells:
        if "figure" in cell.metadata.get("tags", []):
            cell.metadata.clear()
"""
TEXT = 'text = without_solutions(source.read_text(encoding="utf-8"))'
EXECUTED = 'nbformat.read(source.with_suffix(".ipynb"), as_version=4)'
EXERCISE = "grade_id=name, solution=True, grade=False, locked=False"

# fmt: off
MISTAKES = mistakes([
    (no_solution_is_left, {
        "not in the notebook": [(CELL, CELL.replace("without_solutions(cell.source)",
                                                    "cell.source"))],
        "not in the text": [(TEXT, TEXT.replace("without_solutions(", "("))],
        "the first alone": [("SOLUTION.sub(GAP, source)", "SOLUTION.sub(GAP, source, count=1)")],
        "of one line alone": [(r"\n.*?###", r"\n[^\n]*\n *###")],
        "the marks alone": [("GAP, source)", 'lambda match: match[0].replace("#", ""), source)')]}),
    (the_gaps_are_all_that_differs, {
        "from the first mark to the last": [(r"\n.*?### END", r"\n.*### END")],
        "gaps not indented": [('r"\\1# YOUR', 'r"# YOUR')],
        "a gap that passes": [("raise NotImplementedError()", "pass")],
        "comments go, too": [(CELL, CELL.replace("cell.source)\n",
                                                 're.sub("  # .*", "", cell.source))\n'))],
        "tags go": [("notebook = read_source(source)\n", TAGLESS)]}),
    (nothing_has_run, {
        "the executed notebook": [("notebook = read_source(source)", f"notebook = {EXECUTED}")]}),
    (exercises_are_marked, {
        "the instructor's are not": [("points, name = mark(notebook, source.stem[:2]), ",
                                      "points, name = 10, ")],
        "the students' are not": [("    mark(notebook, source.stem[:2])\n", "")],
        "one name for all": [('f"{chapter}_exercise_{number}"', 'f"{chapter}_exercise"')],
        "one name in two chapters": [('f"{chapter}_exercise_{number}"', 'f"exercise_{number}"')],
        "a check has its exercise's name": [('f"{name}_check"', "name")],
        "a check may be changed": [("grade=True, locked=True", "grade=True, locked=False")],
        "or deleted": [("        cell.metadata.deletable = False\n", "")],
        "an exercise is locked": [(EXERCISE, EXERCISE.replace("locked=False", "locked=True"))],
        "an exercise is graded": [(EXERCISE, EXERCISE.replace("grade=False", "grade=True"))],
        "no exercise has a solution": [(EXERCISE, EXERCISE.replace("solution=True",
                                                                   "solution=False"))],
        "in an older form": [("schema_version=3", "schema_version=2")]}),
    (points_follow_the_grades, {
        "one for each": [("POINTS[grade]", "1")],
        "by the number": [("POINTS[grade]", "int(number)")],
        "a medium one is hard": [('"medium": 2', '"medium": 3')],
        "the sum is that of the last": [("total += points", "total = points")]}),
    (the_instructor_has_all, {
        "no outputs": [(EXECUTED, "read_source(source)")],
        "no solutions": [(EXECUTED, EXECUTED + "\n    for cell in notebook.cells:\n"
                                    "        cell.source = without_solutions(cell.source)")],
        "another text": [('shutil.copy(source, folder / "notebooks")',
                          'shutil.copy(EDITIONS / "student.md", folder / "notebooks" / source.name)'
                          )]}),
    (a_folder_is_made_anew, {
        "what was there stays": [("    shutil.rmtree(folder, ignore_errors=True)\n",
                                  "    folder.mkdir(exist_ok=True)\n")]}),
    (a_gradebook_is_left_alone, {
        "it goes": [('(folder / "gradebook.db").exists()', "False")],
        "another's stays": [('"gradebook.db"', '"grades.db"')]}),
    (what_the_chapters_need_is_carried, {
        "no pins": [('"constraints.txt", ', "")],
        "no licence": [('"LICENSE", ', "")],
        "no records": [('CARRIED += ["figures/records"]\n', "")],
        "no claims": [('"book/claims.toml", ', "")],
        "figures too": [('"figures/records"', '"figures"')],
        "all of book": [('["book/claims.toml", "book/tables.toml"]', '["book"]')],
        "caches too": [('shutil.ignore_patterns("__pycache__", "*.egg-info")', "None")],
        "the README of the repository": [('EDITIONS / readme, folder / "README.md"',
                                          'ROOT / "README.md", folder')]}),
    (the_zip_is_the_folder, {
        "dated today": [('zipfile.ZipInfo(f"cheems_student/{name}")',
                         'zipfile.ZipInfo.from_file(folder / name, f"cheems_student/{name}")')],
        "modes of the machine": [("0o644 << 16", "(folder / name).stat().st_mode << 16")],
        "from the last to the first": [("for path in files):\n", "for path in files)[::-1]:\n")],
        "files of folders below left out": [('folder.rglob("*")', 'folder.glob("*")')],
        "without a folder": [('f"cheems_student/{name}"', "name")],
        "stored, not packed": [("read_bytes(), zipfile.ZIP_DEFLATED", "read_bytes(), 0")]}),
], student)
# fmt: on
HELD = [mistake.asked() for mistake in MISTAKES]  # by test_student.py, in every chapter
