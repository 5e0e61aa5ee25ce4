"""The wheel: what is in it, what it asks for, and that it works away from the checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FILES = [path for name in ("cheems_ref", "cheems_lab") for path in (ROOT / name).rglob("*.*")]
ROOMS = {path.relative_to(ROOT).as_posix() for path in FILES if path.suffix == ".py"}
DATA = {path.relative_to(ROOT).as_posix() for path in FILES if path.suffix == ".yaml"}
DATA |= {"cheems_lab/model_card.md", "cheems_ref/figures.mplstyle"}
ELSEWHERE = """
import importlib, sys
import torch

for room in sys.argv[2:]:
    module = importlib.import_module(room)
    assert module.__file__.startswith(sys.argv[1]), module.__file__

from cheems_ref import ssd

layer = ssd.SSD(8, n_heads=2, d_state=4)
y, _ = layer(torch.randn(1, 5, 8), torch.arange(5)[None])
assert y.shape == (1, 5, 8) and y.isfinite().all()
print("it runs")
"""


def pip(*arguments: str | Path) -> None:
    """Run pip without an index and without the network."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--no-index"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy, since setuptools leaves a folder build/ beside the source."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=left_out)
    assert (folder / "source/notebooks").exists() and (folder / "source/tests").exists()
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, folder / "source")
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_it_holds_every_room_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    beside = {name for name in names if ".dist-info/" in name}
    assert names - beside == ROOMS | DATA
    assert any(name.endswith("licenses/LICENSE") for name in beside)


def test_its_name_says_that_any_python_3_on_any_machine_will_do(wheel):
    assert re.fullmatch(r"cheems_ref-[\d.]+-py3-none-any\.whl", wheel.name)


def test_what_it_says_of_itself(metadata):
    assert metadata["Name"] == "cheems_ref"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    extras = {"course", "test", "hub", "trainer", "tensorboard", "evaluate"}
    extras |= {"kernels", "borrowed", "book", "browser", "grading", "bench"}
    assert set(metadata.get_all("Provides-Extra")) == extras


def test_it_asks_for_ranges(metadata):
    needs = [Requirement(need) for need in metadata.get_all("Requires-Dist")]
    base = {need.name for need in needs if not need.marker}
    assert base == {"torch", "numpy", "einops", "filelock", "jaxtyping", "safetensors", "tqdm"}
    assert all("extra ==" in str(need.marker) for need in needs if need.name not in base)
    assert {spec.operator for need in needs for spec in need.specifier} == {">="}


def test_it_works_away_from_the_checkout(wheel, tmp_path):
    site, cwd = tmp_path / "site", tmp_path / "cwd"
    cwd.mkdir()
    pip("install", "--target", site, wheel)
    rooms = [name.removesuffix(".py").replace("/", ".") for name in sorted(ROOMS)]
    rooms = [name.removesuffix(".__init__") for name in rooms]
    finished = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(site), *rooms],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert finished.stdout == "it runs\n", finished.stderr
