"""The wheel: what is in it, what it asks for, and that it works away from the checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for name in ("cheems_ref", "cheems_lab") for path in (ROOT / name).rglob("*.*")]
ROOMS = {path.relative_to(ROOT).as_posix() for path in FILES if path.suffix == ".py"}
DATA = {path.relative_to(ROOT).as_posix() for path in FILES if path.suffix == ".yaml"}
DATA |= {"cheems_lab/model_card.md", "cheems_ref/figures.mplstyle"}
DATA |= {"cheems_lab/py.typed", "cheems_ref/py.typed"}  # without it, editors ignore annotations
ELSEWHERE = """
import sys
import torch
from cheems_ref import ssd

assert ssd.__file__.startswith(sys.argv[1]), ssd.__file__
y, _ = ssd.SSD(8, n_heads=2, d_state=4)(torch.randn(1, 5, 8), torch.arange(5)[None])
assert y.shape == (1, 5, 8) and y.isfinite().all()
print("it runs")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built offline and from a copy, since setuptools leaves a folder build/ beside the source."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=left_out)
    assert (folder / "source/notebooks").exists() and (folder / "source/tests").exists()
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder]
    finished = subprocess.run([*command, folder / "source"], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_it_holds_every_room_and_nothing_else(wheel):
    assert re.fullmatch(r"cheems_ref-[\d.]+-py3-none-any\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    beside = {name for name in names if ".dist-info/" in name}
    assert names - beside == ROOMS | DATA
    assert any(name.endswith("licenses/LICENSE") for name in beside)


def test_the_citation_names_the_version_of_the_wheel(wheel):
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (version,) = re.findall(r"^version: (.+)$", citation, re.MULTILINE)
    assert wheel.name.startswith(f"cheems_ref-{version}-")


def test_it_works_away_from_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    around = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    finished = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=around)
    assert finished.stdout == "it runs\n", finished.stderr
