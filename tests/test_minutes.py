"""The README has the minutes that are counted from the chapters."""

import minutes
import pytest
from build import read_source
from minutes import Section, count, sections, sittings
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
plotting.save(fig, "03_a", "words")

# %% [markdown]
# ## Exercises
#
# **1 · easy.** Do it.

# %% [markdown]
# **2 · hard.** Do more.
"""


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
    ],
)
def test_items_of_a_cell(cell, items):
    assert tuple(count(cell).values()) == items


def test_sittings_are_even_and_in_order():
    parts = [Section(str(i), size, 0) for i, size in enumerate((40, 35, 0, 60, 15, 50, 25))]
    titles = [[part.title for part in sitting] for sitting in sittings(parts)]
    assert titles == [["0", "1"], ["3", "4"], ["5", "6"]]


def test_a_chapter_s_minutes_are_counted_and_written_once(tmp_path, capsys):
    (tmp_path / "notebooks").mkdir()
    source, readme = tmp_path / "notebooks" / "03_a.py", tmp_path / "README.md"
    lines = "\n\n".join(f"x = {i}" for i in range(330))
    source.write_text(SOURCE.format(words="it's " * 1430, lines=lines))
    readme.write_text("| 03 | [A](notebooks/03_a.ipynb) | `a` | 1 minute |\nWords.\n")
    first = [
        round(1433 / per["words"] + 330 / per["lines"] + 1 / per["equations"] + 1 / per["figures"])
        for per in minutes.PER_MINUTE.values()
    ]
    exercises = minutes.EXERCISE["easy"] + minutes.EXERCISE["hard"]
    parts = [Section("Opening", 1, 1), Section("1 · First", *first)]
    assert sections(read_source(source).cells) == [*parts, Section("Exercises", 0, exercises)]
    assert minutes.main(["--check"], tmp_path) == 1
    assert "README.md: other minutes" in capsys.readouterr().out
    for _ in range(2):
        assert minutes.main([], tmp_path) == 0 and minutes.main(["--check"], tmp_path) == 0
    teach, alone = minutes.total(sections(read_source(source).cells))
    assert readme.read_text().endswith(f"| `a` | {teach} / {alone} |\nWords.\n")
