"""What students hand in: right answers in other styles, wrong ones, and short cuts.

tests/candidates/NN.txt has them, each below a line that says what to expect of the check:

    == 3 right: as one convolution
    == 3 wrong: forgets the decay → at index (1, 0)
    == 3 short cut: calls the package → your answer calls delta_rule
    == 3 passes: a loop for show, which no check can tell

The number is that of the exercise. After the arrow stands a part of the message that the student
gets; it must be there, so that nobody is refused for a mistyped name. `passes` marks the short cuts
and wrong answers that we know of and can't refuse; it fails when a check learns to refuse them.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from lessons import NOTEBOOKS
from test_exercises import at_hand, exercises

from book.notebooks.build_notebooks import read_source

FOLDER = Path(__file__).parent / "candidates"
HEAD = re.compile(r"^== (\d) (right|wrong|short cut|passes): ([^→\n]+?)(?: → (.+))?$", re.MULTILINE)
FILES = sorted(FOLDER.glob("*.txt"))


class Candidate(NamedTuple):
    """An answer to an exercise, and what its check should say."""

    exercise: int
    kind: str
    name: str
    message: str
    code: str


def candidates(path: Path) -> list[Candidate]:
    """The answers in a file."""
    text = path.read_text(encoding="utf-8")
    heads = [*HEAD.finditer(text)]
    assert len(heads) == len(re.findall("^==", text, re.MULTILINE)), f"{path}: a line with =="
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return [
        Candidate(int(head[1]), head[2], head[3], head[4] or "", text[head.end() : end])
        for head, end in zip(heads, ends, strict=True)
    ]


def answer_of(check: str, candidate: Candidate, namespace: dict) -> str:
    """What the check says: the last line of its error, or "" where it passes."""
    with contextlib.redirect_stdout(io.StringIO()):
        here = dict(namespace)
        exec(candidate.code, here)
        try:
            exec(check, here)
        except Exception as error:  # an answer may raise anything
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("torch_as_before")
def test_a_check_takes_what_the_words_allow_and_nothing_else(path, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS)
    (source,) = NOTEBOOKS.glob(f"{path.stem}_*.py")
    notebook = read_source(source)
    namespace, checks = at_hand(notebook), [check for _, check in exercises(notebook)]
    surprises = []
    for one in candidates(path):
        said = answer_of(checks[one.exercise - 1], one, namespace)
        if one.kind in ("right", "passes"):
            as_expected = not said
        else:
            as_expected = bool(said) and one.message in said
        if not as_expected:
            surprises.append(f"{one.exercise} {one.kind}: {one.name}: {said or 'passes'}")
    assert not surprises, "\n".join(surprises)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_exercise_has_a_right_answer_and_two_wrong_ones(path):
    listed = candidates(path)
    for number in range(1, 6):
        kinds = [one.kind for one in listed if one.exercise == number]
        assert kinds.count("right") >= 1 and kinds.count("wrong") >= 2, f"exercise {number}"
    for one in listed:
        assert bool(one.message) == (one.kind in ("wrong", "short cut")), one.name


def test_few_short_cuts_pass():
    """Of the 34 that a teaching assistant found, and those found since."""
    kinds = [one.kind for path in FILES for one in candidates(path)]
    assert kinds.count("passes") <= 8 < 34 <= kinds.count("passes") + kinds.count("short cut")
