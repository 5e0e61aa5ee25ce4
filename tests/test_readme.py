"""The README tells the truth: its example runs, its links lead somewhere, its commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run(capsys):
    exec("".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)), {})
    printed = capsys.readouterr().out
    assert printed.startswith("✓ prompt, then the rest = one pass")
    assert "✓ is causal" in printed and "✓ padding changes nothing" in printed
    assert printed.endswith("4.0 GiB\n")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere_and_make_commands_exist(page):
    text, makefile = (ROOT / page).read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"\]\((?!https:)([^)#]+)\)", text)
    assert [target for target in targets if not (ROOT / target).exists()] == []
    named = set(re.findall(r"(?:`|    )make ([a-z-]+)", text))
    assert named and named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_every_chapter_is_in_the_map():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"(notebooks/{notebook.name})" in README
