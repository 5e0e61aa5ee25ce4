"""The README has the minutes that are counted from the chapters."""

from nbformat.v4 import new_code_cell, new_markdown_cell

from book.guide import lecturer_guide, teaching_minutes
from book.guide.teaching_minutes import SITTING, Section, count, sections
from book.notebooks.build_notebooks import read_source
from book.project import ROOT, lectures

SOURCE = """\
# %% [markdown]
# # 03 · Title
#
# One two three.

# %% [markdown]
# ## 1 · First
#
# {words}
# $$x = 1$$

# %%
{lines}

# %% [markdown]
# ## Exercises
#
# **1 · easy.** Do it.
"""


def test_a_chapter_is_one_lecture():
    for path in lectures(ROOT):
        assert sum(part.teach for part in sections(read_source(path).cells)) <= SITTING, path.stem


def test_items_of_a_cell():
    """Words, lines, equations and figures."""
    setup, figure = (dict(metadata={"tags": [tag]}) for tag in ("setup", "figure"))
    for cell, items in (
        (new_markdown_cell("It's a well-known $x + y$, 3 times."), (6, 0, 0, 0)),
        (new_markdown_cell("So\n$$a$$\nand\n$$b\nc$$"), (2, 0, 2, 0)),
        (new_code_cell("x = 1\n\n# why\ny = 2"), (0, 3, 0, 0)),
        (new_code_cell("import torch", **setup), (0, 0, 0, 0)),
        (new_code_cell("plotting.save(fig)", **figure), (0, 0, 0, 1)),
    ):
        assert tuple(count(cell).values()) == items


def test_a_chapter_s_minutes_are_counted_and_written_once(tmp_path, monkeypatch, capsys):
    rates = dict(words=100, lines=10, equations=1, figures=1)
    monkeypatch.setattr(
        teaching_minutes, "PER_MINUTE", {"to teach": rates, "alone": rates | {"lines": 5}}
    )
    monkeypatch.setattr(teaching_minutes, "EXERCISE", {"easy": 8})
    (tmp_path / "notebooks").mkdir()
    source, readme = tmp_path / "notebooks" / "03_a.py", tmp_path / "README.md"
    source.write_text(SOURCE.format(words="it's " * 1900, lines="x = 1\n\n" * 300))
    other = "| derives A | [03](notebooks/03_a.ipynb) | `test_a` |\nWords.\n"  # no row of minutes
    readme.write_text(f"| 03 | [A](notebooks/03_a.ipynb) | `a` | 1 minute |\n{other}")
    parts = [Section("Opening", 1, 1), Section("1 · First", 50, 80), Section("Exercises", 0, 8)]
    assert sections(read_source(source).cells) == parts
    paths = tmp_path / "guide", tmp_path
    assert lecturer_guide.main(["--check"], *paths) == 1
    assert "not as it should be: README.md" in capsys.readouterr().out
    for _ in range(2):
        assert lecturer_guide.main([], *paths) == 0
        assert lecturer_guide.main(["--check"], *paths) == 0
    assert readme.read_text() == f"| 03 | [A](notebooks/03_a.ipynb) | `a` | 50 / 90 |\n{other}"
