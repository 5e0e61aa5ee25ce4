"""The minutes that chapters and README claim are those counted from the text."""

from pathlib import Path

import minutes
import pytest
from minutes import Section, count, readme_with_minutes, sections, sittings, table, with_minutes
from nbformat.v4 import new_code_cell, new_markdown_cell

SOURCE = """\
# %% [markdown]
# # 03 · Title
#
# One two three.

# %% tags=["setup"]
import torch

# %% [markdown]
# ## 1 · First
#
# {words}
# $$x = 1$$

# %%
{lines}

# %% tags=["figure"]
draw()
plotting.save(fig, "03_a", "words")

# %% [markdown]
# ## Exercises
#
# **1 · easy.** Do it.

# %% tags=["exercise"]
def f(x):
    pass

# %% [markdown]
# **2 · hard.** Do more.
"""


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "notebooks").mkdir()
    path = tmp_path / "notebooks" / "03_a.py"
    lines = "\n\n".join(f"x = {i}" for i in range(330))
    path.write_text(SOURCE.format(words="it's " * 1430, lines=lines))
    row = "| 03 | [A](notebooks/03_a.ipynb) | `a` | 1 minute |\n"
    (tmp_path / "README.md").write_text(f"| | | | |\n{row}Words.\n")
    return path


def test_the_course_claims_what_is_counted():
    assert minutes.main(["--check"]) == 0, "run `python book/minutes.py`"


@pytest.mark.parametrize(
    "cell, items",
    [
        (new_markdown_cell("It's a well-known $x + y$, 3 times."), (6, 0, 0, 0)),
        (new_markdown_cell("So\n$$a$$\nand\n$$b\nc$$"), (2, 0, 2, 0)),
        (new_code_cell("x = 1\n\n# why\ny = 2"), (0, 3, 0, 0)),
        (new_code_cell("import torch", metadata={"tags": ["setup"]}), (0, 0, 0, 0)),
        (new_code_cell("plotting.save(fig)", metadata={"tags": ["figure"]}), (0, 0, 0, 1)),
        (new_code_cell("def draw(): 1", metadata={"tags": ["figure"]}), (0, 0, 0, 0)),
        (new_code_cell("def f(): 1", metadata={"tags": ["exercise"]}), (0, 0, 0, 0)),
    ],
)
def test_items_of_a_cell(cell, items):
    assert tuple(count(cell).values()) == items


def test_sections_by_the_rates(source):
    assert sections(source) == [
        Section("Opening", 1, 1),
        Section("1 · First", *(round(1433 / r["words"] + 330 / r["lines"] + 1 / r["equations"]
                                     + 1 / r["figures"]) for r in minutes.PER_MINUTE.values())),
        Section("Exercises", 0, minutes.EXERCISE["easy"] + minutes.EXERCISE["hard"]),
    ]  # fmt: skip


def test_sittings_are_even_and_in_order():
    parts = [Section(str(i), size, 0) for i, size in enumerate((40, 35, 0, 60, 15, 50, 25))]
    assert [[part.title for part in sitting] for sitting in sittings(parts)] == [
        ["0", "1"],
        ["3", "4"],
        ["5", "6"],
    ]
    assert sittings(parts[:1]) == [parts[:1]]


def test_a_long_chapter_says_where_to_cut():
    parts = [Section(f"§{i}", 30, 40) for i in range(4)]
    assert "cut before *§2*." in table(parts)
    assert "cut before" not in table(parts[:2])


def test_written_once_and_again_the_same(source, capsys):
    root = source.parents[1]
    assert minutes.main(["--check"], root) == 1
    assert "other minutes: README.md" in capsys.readouterr().out
    assert minutes.main([], root) == 0 and minutes.main(["--check"], root) == 0
    text = source.read_text()
    assert text.count(minutes.TITLE) == 1 and text.index(minutes.TITLE) < text.index("import torch")
    assert with_minutes(source) == text
    teach, alone = minutes.total(sections(source))
    assert f"| `a` | {teach} / {alone} |\nWords." in (root / "README.md").read_text()


def test_a_changed_chapter_has_other_minutes(source):
    root = source.parents[1]
    minutes.main([], root)
    source.write_text(source.read_text() + "\n# %% [markdown]\n# ## 2\n#\n# " + "word " * 999)
    assert minutes.main(["--check"], root) == 1
    assert readme_with_minutes("nothing", source.parent) == "nothing"
