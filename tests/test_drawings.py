"""The drawings: each is shown by one chapter, and looks as its file in figures/ does."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from cheems_ref import plotting

ROOT = Path(__file__).parents[1]
DRAWINGS = sorted((ROOT / "figures" / "drawings").glob("*.py"))
ALT = re.compile(rb'aria-label="[^"]*"')
SHOWN = re.compile(r"^plotting\.show_drawing\(\s*\"([^\"]+)\"", re.MULTILINE)


def test_each_drawing_is_shown_once_by_the_chapter_whose_number_it_bears():
    chapters = sorted((ROOT / "notebooks").rglob("*.py"))
    shown = [
        (name, path.stem.partition("_")[0])
        for path in chapters
        for name in SHOWN.findall(path.read_text(encoding="utf-8"))
    ]
    assert sorted(shown) == [(path.stem, path.stem.partition("_")[0]) for path in DRAWINGS]


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_is_the_stored_figure(path, tmp_path, monkeypatch):
    """With torch's own dtype, float32, though most chapters have set float64 before they draw; only
    the alt text, which the chapter has, is left out.
    """
    assert torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(plotting, "display", lambda *shown, **how: None)
    monkeypatch.setenv(plotting.FIGURES, str(tmp_path))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.chdir(ROOT / "notebooks" / "labs")
    plotting.show_drawing(path.stem, "what there is to see")
    (made,) = tmp_path.iterdir()
    files = made, ROOT / "figures" / made.name
    drawn, stored = (ALT.sub(b"", file.read_bytes(), count=1) for file in files)
    assert drawn == stored


def test_a_drawing_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no figures/drawings/03_nothing\.py in"):
        plotting.show_drawing("03_nothing", "nothing")


def test_a_drawing_makes_a_figure_and_its_stages():
    for path in DRAWINGS:
        fig, stages = runpy.run_path(str(path))["draw"]()
        assert fig.axes and all(len(stage) for stage in stages), path.stem
