"""README and manual tell the truth: examples run, links lead somewhere, commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "book/manual/training.md",
    "book/manual/setting_up.md",
    "book/manual/reading_the_course.md",
]


def test_the_examples_run(capsys):
    exec("".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)), {})
    printed = capsys.readouterr().out
    assert printed.startswith("✓ prompt, then the rest = one pass")
    assert "✓ is causal" in printed and "✓ padding changes nothing" in printed
    assert printed.endswith("4.0 GiB\n")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_make_commands_exist(page):
    text, makefile = (ROOT / page).read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"\]\((?!https:)([^)#]+)\)", text)
    assert [t for t in targets if not (ROOT / page).parent.joinpath(t).exists()] == []
    named = set(re.findall(r"(?:`|    )make ([a-z-]+)", text))
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_every_chapter_is_in_the_map():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"(notebooks/{notebook.name})" in README


def test_the_example_of_the_manual_runs():
    page = (ROOT / "book/manual/training.md").read_text()
    exec("".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), made := {})
    assert made["beams"].shape == (1, 26)
