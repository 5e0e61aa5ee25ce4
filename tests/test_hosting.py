"""What a public forge, Binder and a devcontainer are told is true of this repository.

tests/book has the linters; here it is asked whether what these files name is there.
"""

import ast
import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / ".github/workflows/course.yml"
CONTAINER = ROOT / ".devcontainer/devcontainer.json"
BINDER = [ROOT / ".binder" / name for name in ("requirements.txt", "runtime.txt", "postBuild")]
FILES = [WORKFLOW, CONTAINER, *BINDER]

MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
JOBS = yaml.safe_load(WORKFLOW.read_text())["jobs"]
STEPS = [(name, step) for name, job in JOBS.items() for step in job["steps"]]
BEFORE = "${{ matrix.before }} "
COMMANDS = [step["run"].removeprefix(BEFORE) for _, step in STEPS if "run" in step]
ROWS = JOBS["linux"]["strategy"]["matrix"]["include"]
USED = [step["uses"] for _, step in STEPS if "uses" in step]


def variable(name):
    """What the Makefile sets a variable to."""
    (value,) = re.findall(rf"^{name} :=\s*(.*)$", MAKEFILE, re.MULTILINE)
    return value


def versions_of_python():
    """Each with the file that names it."""
    container = json.loads(CONTAINER.read_text())["image"]
    yield "devcontainer", container.rpartition(":")[2]
    yield "Binder", BINDER[1].read_text().strip().removeprefix("python-")
    for name, step in STEPS:
        version = step.get("with", {}).get("python-version")
        if version == "${{ matrix.python }}":
            yield from ((name, row["python"]) for row in ROWS)
        elif version:
            yield name, version


def test_the_oldest_python_is_that_of_the_project():
    told = list(versions_of_python())
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert {place for place, _ in told} == {"devcontainer", "Binder", *JOBS} - {"pages"}
    assert {version for place, version in told if place != "linux"} == {oldest}
    assert min(version for place, version in told if place == "linux") == oldest
    assert all(re.fullmatch(r"3\.1\d", version) for _, version in told)


def test_linux_has_several_pythons_processors_and_numbers_of_threads():
    """A row says its name, its Python, and what goes before the command, and nothing twice."""
    assert all({"name", "python"} <= set(row) <= {"name", "python", "before"} for row in ROWS)
    assert {row["python"] for row in ROWS} == {"3.11", "3.12", "3.13"}
    assert len({row["name"] for row in ROWS}) == len(ROWS)
    before = [row["before"] for row in ROWS if "before" in row]
    assert sorted(before) == [
        "ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2",
        "ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2",
        "OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive",
        "taskset -c 0",
    ]
    assert f"{BEFORE}make test PYTHON=python" in [step.get("run") for _, step in STEPS]
    assert 'os.environ.get("OMP_NUM_THREADS", "1")' in (ROOT / "tests/conftest.py").read_text()


def test_the_container_says_only_what_the_specification_knows():
    container = json.loads(CONTAINER.read_text())
    kinds = dict(name=str, image=str, containerEnv=dict, hostRequirements=dict, forwardPorts=list)
    kinds |= dict(postCreateCommand=str, portsAttributes=dict, customizations=dict)
    assert {name: type(value) for name, value in container.items()} == kinds
    assert [*map(str, container["forwardPorts"])] == [*container["portsAttributes"]]


def test_targets_of_make_exist():
    known = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    known.add(variable("READY").replace("$(VENV)", variable("VENV")))
    told = [*COMMANDS, json.loads(CONTAINER.read_text())["postCreateCommand"]]
    targets = [
        word
        for command in told
        if command.startswith("make ")
        for word in command.split()[1:]
        if "=" not in word
    ]
    assert len(targets) > 4 and set(targets) <= known, set(targets) - known


def test_windows_runs_what_make_test_runs():
    """The same requirements and tools, and of pytest the same options but for what is left out."""
    install, *rest = [step["run"] for name, step in STEPS if name == "windows" and "run" in step]
    assert install.removeprefix("python -m pip install ").replace('"', "") == variable(
        "REQUIREMENTS"
    )
    (made,) = re.findall(r"^test: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    lines = [line.strip().removeprefix("$(BIN)/") for line in made.splitlines()]
    lines = [line.removeprefix("python -m ") for line in lines]
    assert [command.removeprefix("python -m ") for command in rest[:-1]] == lines[:-1]
    assert rest[-1].removeprefix("python -m ").startswith(f"{lines[-1]} -k ")


def test_what_windows_leaves_out_is_there():
    (command,) = [command for command in COMMANDS if "--ignore" in command]
    for path in re.findall(r"--ignore (\S+)", command):
        assert (ROOT / path).is_file(), path
    left_out = re.findall(r"--deselect (\S+)::(\w+)", command)
    assert len(left_out) == command.count("--deselect")
    for path, name in left_out:
        body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        assert name in [f.name for f in body if isinstance(f, ast.FunctionDef)], name
    (expression,) = re.findall(r'-k "not (\w+)"', command)
    assert [*(ROOT / "tests").glob(f"test_{expression}.py")]


def test_files_that_are_handed_on_are_made_by_the_step_before():
    """The paths of the artifacts, in the programs that write them."""
    uploaded = {step["with"]["path"] for _, step in STEPS if "path" in step.get("with", {})}
    programs = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "book").glob("*.py"))
    for path in uploaded:
        assert path in programs, path
    (made,) = [command for command in COMMANDS if command.startswith("make book")]
    assert made.split()[1:4] == ["book", "slides", "student"]


def test_actions_are_pinned_to_commits_and_say_which_version_that_is():
    text = WORKFLOW.read_text()
    told = dict(re.findall(r"uses: (\S+)@[0-9a-f]{40} # v(\d+\.\d+\.\d+)$", text, re.MULTILINE))
    assert len(re.findall(r"uses: ", text)) == len(USED)
    assert {action.partition("@")[0] for action in USED} == set(told)
    assert len(set(USED)) == len(told), "an action is used in two versions"
    assert all(action.startswith("actions/") for action in told)


def test_rights_are_few():
    """To read; and for Pages, from main alone, what its action asks for."""
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert [name for name, job in JOBS.items() if "permissions" in job] == ["pages"]
    assert JOBS["pages"]["permissions"] == {"pages": "write", "id-token": "write"}
    (from_main, *rest) = JOBS["pages"]["if"].split(" && ")
    assert from_main == "github.ref == 'refs/heads/main'"
    assert rest == ["github.event_name != 'pull_request'"]
    assert "pull_request_target" not in WORKFLOW.read_text()
    checkouts = [step for _, step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts and all(step["with"] == {"persist-credentials": False} for step in checkouts)
    assert all("timeout-minutes" in job for job in JOBS.values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_there_is_no_address(path):
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"https?://|\b[a-z-]+\.(?:com|org|io|net)\b", text)


def test_binder_installs_what_the_chapters_take():
    lines = [line for line in BINDER[0].read_text().splitlines() if not line.startswith("#")]
    options = dict(line.split(maxsplit=1) for line in lines if line.startswith("-"))
    assert (BINDER[0].parent / options["-c"]).resolve() == ROOT / "constraints.txt"
    extras = re.fullmatch(r"\.\[([\w,]+)\]", options["-e"])[1].split(",")
    assert set(extras) == {"course", "kernels"} and set(extras) <= set(
        PROJECT["optional-dependencies"]
    )
    (more,) = [line.split()[0] for line in lines if not line.startswith("-")]
    assert f"\n{more}==" in (ROOT / "constraints.txt").read_text()


def test_binder_builds_mamba_as_make_does():
    text = BINDER[2].read_text()
    assert variable("MAMBA") in text and variable("MAMBA_SSM") in text
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    assert os.name == "nt" or os.access(BINDER[2], os.X_OK)
