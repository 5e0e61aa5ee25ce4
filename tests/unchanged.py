"""Notebooks that need not run again: nothing that they depend on has changed since they passed.

A notebook depends on its source, the modules that it imports, from there on all that these import,
the files it names, and the packages that are installed. Their hash is kept when every cell has
passed, in pytest's cache, and so on this machine alone. All notebooks run in CI, with
--all (`make test ALL=1`), and where one is named on the command line.
"""

import ast
import hashlib
import json
import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from sysconfig import get_path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cheems_ref", "cheems_lab")
PASSED = "cheems/notebooks"  # in pytest's cache: hashes by the names of notebooks
# Files that notebooks read, if they name them; a command that they start may read any module.
NAMED = (
    "experiments/records/*.json",
    "figures/drawings/*.py",
    "book/*.toml",
    "examples/*.py",
    "*.md",
)
ALWAYS = ("constraints.txt", "pyproject.toml", "tests/nbval_sanitize.cfg", "tests/unchanged.py")


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules of our packages that a file imports, and names that may be modules."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(name for name in names if name.partition(".")[0] in PACKAGES)


def modules_of(name: str) -> list[Path]:
    """The files of a module: of a package its __init__."""
    path = ROOT.joinpath(*name.split("."))
    return [p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()]


def depends_on(notebook: Path) -> set[Path]:
    """All files of ours that can change what a notebook prints."""
    source = notebook.with_suffix(".py").read_text(encoding="utf-8")
    files = {notebook, notebook.with_suffix(".py"), *(ROOT / name for name in ALWAYS)}
    files |= {path for pattern in NAMED for path in ROOT.glob(pattern) if path.stem in source}
    if "subprocess" in source or "-m cheems" in source or "importlib" in source:
        return files | {path for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    if ".glob(" in source:  # of the other notebooks
        files |= set(notebook.parent.glob("*.py"))
    waiting = {*imported(notebook.with_suffix(".py"))}
    while waiting:
        for path in modules_of(waiting.pop()):
            if path not in files:
                files.add(path)
                waiting |= imported(path)
    return files


def hashes() -> dict[str, str]:
    """A hash for each notebook, by its name."""
    installed = sorted(path.name for path in Path(get_path("purelib")).glob("*.dist-info"))
    around = hashlib.sha256("\n".join([sys.version, *installed]).encode()).hexdigest()
    found = {}
    for notebook in sorted((ROOT / "notebooks").rglob("*.ipynb")):
        if notebook.with_suffix(".py").exists():
            digest = hashlib.sha256(around.encode())
            for path in sorted(depends_on(notebook)):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
            found[notebook.relative_to(ROOT).as_posix()] = digest.hexdigest()
    return found


def everything(config: pytest.Config) -> bool:
    """Whether all is asked for, by --all or by a CI service."""
    return config.getoption("--all") or bool(os.environ.get("CI"))


class Unchanged:
    """A pytest plugin: leaves unchanged notebooks out, and keeps the hashes of those that pass."""

    def __init__(self, config: pytest.Config):
        self.config, self.hashes, self.passed = config, hashes(), Counter()
        known = config.cache.get(PASSED, {})
        named = {Path(str(name).partition("::")[0]).resolve() for name in config.args}
        self.left_out = {
            name
            for name, value in self.hashes.items()
            if not everything(config) and known.get(name) == value and ROOT / name not in named
        }

    def pytest_ignore_collect(self, collection_path, config):
        name = collection_path.is_relative_to(ROOT) and collection_path.relative_to(ROOT).as_posix()
        return True if name in self.left_out else None

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed[report.nodeid.partition("::")[0]] += 1

    def pytest_sessionfinish(self, session):
        if hasattr(self.config, "workerinput"):  # of xdist, whose controller sees all reports
            return
        kept = self.config.cache.get(PASSED, {})
        for name, value in self.hashes.items():
            cells = json.loads((ROOT / name).read_text(encoding="utf-8"))["cells"]
            if self.passed[name] == sum(cell["cell_type"] == "code" for cell in cells):
                kept[name] = value
        self.config.cache.set(PASSED, {name: kept[name] for name in kept if name in self.hashes})

    def pytest_terminal_summary(self, terminalreporter):
        if self.left_out:
            names = ", ".join(sorted(Path(name).stem for name in self.left_out))
            terminalreporter.write_line(f"not run, unchanged since they passed here: {names}")
            terminalreporter.write_line("`make test ALL=1` runs all notebooks")
