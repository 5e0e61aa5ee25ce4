"""One list of requirements: pyproject names, constraints pin, conda and make install from these."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
PINS = {pin.name: pin for pin in CONSTRAINTS if not pin.marker or pin.marker.evaluate()}
MADE = ("course", "test", "kernels", "evaluate")  # the extras that make installs
INSTALLED = PROJECT["dependencies"] + [need for extra in MADE for need in EXTRAS[extra]]
OTHERS = [need for extra in EXTRAS if extra not in MADE for need in EXTRAS[extra]]
NEEDED = [need for need in map(Requirement, INSTALLED) if not need.marker or need.marker.evaluate()]
ROOMS = {path.stem for path in (ROOT / "cheems_ref").glob("*.py")}
# The import names of the extra `course`. (torch installs SymPy as well.)
COURSE = {"matplotlib", "IPython", "ipykernel", "jupyterlab", "jupyter_client", "jupytext"}
COURSE |= {"nbclient", "nbformat", "PIL", "sympy", "traitlets", "zmq"}


def test_conda_installs_what_make_installs():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    *packages, pip = conda["dependencies"]
    extras = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert packages == ["python=3.11", "pip"]
    assert " ".join(pip["pip"]) == f"-c constraints.txt -e .[{extras[1]}]"
    assert extras[1] == ",".join(MADE)
    assert PROJECT["requires-python"] == ">=3.11"


def test_exact_versions_are_portable_and_stand_in_the_constraints_alone():
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text and "@" not in text
    for pin in CONSTRAINTS:
        (spec,) = pin.specifier
        assert spec.operator == "==" and "+" not in spec.version, str(pin)
    for need in map(Requirement, INSTALLED + OTHERS):
        assert {spec.operator for spec in need.specifier} == {">="}, str(need)
    assert "==" not in (ROOT / "Makefile").read_text() + (ROOT / "environment.yml").read_text()
    lacking = "no requirement names mamba-ssm, so a fresh list of pins lacks it"
    assert "mamba-ssm" in {pin.name for pin in CONSTRAINTS}, lacking


def test_every_requirement_is_pinned_within_its_range_and_installed():
    """The requirements of `make course` and `make test`; of the others only the pins are there."""
    for need in [*NEEDED, *map(Requirement, OTHERS)]:
        (pin,) = PINS[need.name].specifier
        assert need.specifier.contains(pin.version), str(need)
    installed = {dist.metadata["Name"].lower().replace("_", "-"): dist for dist in distributions()}
    for need in NEEDED:
        (pin,) = PINS[need.name].specifier
        assert need.name.lower() in installed, f"{need.name} is not installed: run make course"
        found = installed[need.name.lower()].version.split("+")[0]
        assert found == pin.version, f"{need.name} {found} is installed: run make course"


def test_the_package_needs_nothing_of_the_course():
    """Every room imports where the extra `course` is not installed, but for the one that draws,
    which says what it lacks.
    """
    program = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {COURSE!r}:
            raise ModuleNotFoundError(f"no {{name}}", name=name)

sys.meta_path.insert(0, Absent())
for room in {sorted(ROOMS - {"plotting"})!r}:
    importlib.import_module("cheems_ref." + room)
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_a_python_that_is_named_is_not_ignored(tmp_path):
    """make keeps a .venv of another version only if nobody has named a PYTHON."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.99\n")  # its answer to the question for its version
    python.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", ".venv/.ready"):  # the last one is newest
        (tmp_path / name).touch()
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())

    def make(*words: str) -> subprocess.CompletedProcess:
        command = ["make", "-n", "-o", ".venv/.ready", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    refused = make("course", f"PYTHON={sys.executable}")
    assert refused.returncode and "was made with Python 3.99" in refused.stderr
    for words in (
        ["course"],
        ["clean", f"PYTHON={sys.executable}"],
        ["course", f"PYTHON={python}"],
    ):
        assert make(*words).returncode == 0
