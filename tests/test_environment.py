"""One list of requirements: pyproject names, constraints pin, conda and make install from these."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
PINS = {pin.name: pin for pin in CONSTRAINTS if not pin.marker or pin.marker.evaluate()}
NEEDED = [
    need
    for need in map(Requirement, PROJECT["dependencies"] + EXTRAS["test"] + EXTRAS["kernels"])
    if not need.marker or need.marker.evaluate()
]


def test_conda_installs_what_make_installs():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    *packages, pip = conda["dependencies"]
    requirements = re.search(r"^REQUIREMENTS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert packages == ["python=3.11", "pip"]
    assert " ".join(pip["pip"]) == requirements[1]
    assert PROJECT["requires-python"] == ">=3.11"


def test_constraints_are_exact_and_portable():
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text and "@" not in text
    for pin in CONSTRAINTS:
        (spec,) = pin.specifier
        assert spec.operator == "==" and "+" not in spec.version, str(pin)


@pytest.mark.parametrize("need", NEEDED + [Requirement(r) for r in EXTRAS["bench"]], ids=str)
def test_every_requirement_is_pinned_within_its_range(need):
    (pin,) = PINS[need.name].specifier
    assert need.specifier.contains(pin.version)


@pytest.mark.parametrize("need", NEEDED, ids=str)
def test_the_environment_holds_the_pinned_version(need):
    try:
        installed = version(need.name)
    except PackageNotFoundError:
        pytest.fail(f"{need.name} is not installed: run make course")
    (pin,) = PINS[need.name].specifier
    assert installed.split("+")[0] == pin.version
