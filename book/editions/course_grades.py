"""The grades of the exercises, as the syllabus says, from nbgrader's gradebook.

    python course_grades.py

`nbgrader export` has one number per student and chapter, over all five exercises. The syllabus
counts other things: exercises 3 and 4 of each week, the ten best weeks, together 40 percent of the
course, and one percent for each exercise 5 that is solved, up to five. This program reads the
points of every exercise from `gradebook.db` in this folder, prints a line per student, and writes
`course_grades.csv`.

Change the numbers below if you change the syllabus.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

GRADED = (3, 4)  # the exercises of a week that are handed in
BONUS = 5  # the voluntary one
WEEKS = 10  # how many weeks count, the best ones
NO_WEEKS = ("00",)  # chapters that are read before the first week
SHARE = 40.0  # percent of the course
MOST_BONUS = 5  # percent: one for each exercise 5 that is solved
CHECK = re.compile(r"(\d+)_exercise_(\d)_check")  # nbgrader's name of a check


class Points(NamedTuple):
    """What a student got for one exercise, and what there was to get."""

    chapter: str
    exercise: int
    got: float
    most: float


class Grade(NamedTuple):
    """A student's grade for the exercises, in percent of the course."""

    weeks: dict[str, float]  # the part of exercises 3 and 4 that is solved, by chapter
    exercises: float
    bonus: int

    @property
    def total(self) -> float:
        return self.exercises + self.bonus


def grade(points: Iterable[Points], chapters: Iterable[str]) -> Grade:
    """The grade for the exercises.

    Args:
        points: of one student; what is missing was not handed in.
        chapters: the chapters graded so far. A chapter without points counts as a week with 0.
    """
    weeks = [chapter for chapter in chapters if chapter not in NO_WEEKS]
    got, most, bonus = dict.fromkeys(weeks, 0.0), dict.fromkeys(weeks, 0.0), 0
    for one in points:
        if one.chapter in NO_WEEKS:
            continue
        if one.exercise in GRADED:
            got[one.chapter] += one.got
            most[one.chapter] += one.most
        elif one.exercise == BONUS and one.got >= one.most > 0:
            bonus += 1
    solved = {week: got[week] / most[week] if most[week] else 0.0 for week in weeks}
    counted = min(WEEKS, len(weeks))
    best = sum(sorted(solved.values(), reverse=True)[:WEEKS])
    return Grade(solved, SHARE * best / counted if counted else 0.0, min(bonus, MOST_BONUS))


def read_gradebook(path: Path) -> tuple[dict[str, list[Points]], list[str]]:
    """The points of every student, and the chapters that the gradebook knows."""
    from nbgrader.api import Gradebook  # which the extra `grading` installs

    points: dict[str, list[Points]] = {}
    with Gradebook(f"sqlite:///{path.resolve()}") as book:
        chapters = sorted(assignment.name for assignment in book.assignments)
        for student in book.students:
            points[student.id] = [
                Points(*found, cell.score, cell.max_score)
                for submission in student.submissions
                for notebook in submission.notebooks
                for cell in notebook.grades
                if (found := exercise_of(cell.name))
            ]
    return points, chapters


def exercise_of(name: str) -> tuple[str, int] | None:
    """The chapter and the number of an exercise, from the name of its check."""
    found = CHECK.fullmatch(name)
    return (found[1], int(found[2])) if found else None


def write(grades: Mapping[str, Grade], chapters: list[str], path: Path) -> None:
    """Write one row per student."""
    weeks = [chapter for chapter in chapters if chapter not in NO_WEEKS]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["student", *weeks, "exercises", "bonus", "total"])
        for student, one in sorted(grades.items()):
            solved = [f"{one.weeks[week]:.2f}" for week in weeks]
            total = [f"{one.exercises:.1f}", one.bonus, f"{one.total:.1f}"]
            table.writerow([student, *solved, *total])


def main() -> None:
    points, chapters = read_gradebook(Path("gradebook.db"))
    grades = {student: grade(theirs, chapters) for student, theirs in points.items()}
    write(grades, chapters, Path("course_grades.csv"))
    for student, one in sorted(grades.items()):
        print(f"{student}: {one.exercises:.1f} of {SHARE:g} percent, bonus {one.bonus}")
    print(f"{len(chapters)} chapters; the weeks are in course_grades.csv")


if __name__ == "__main__":
    main()
