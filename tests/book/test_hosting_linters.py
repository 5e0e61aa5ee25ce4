"""The hosting files before linters of their kind, none of which takes the network.

check-jsonschema brings GitHub's schema of a workflow; repo2docker, which Binder runs, says what it
would build.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("check_jsonschema", reason="it is missing: make test-book installs it")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github/workflows/course.yml"


def run(*command, cwd=ROOT):
    command = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def lint(path):
    return run("check_jsonschema", "--builtin-schema", "vendor.github-workflows", path)


def test_the_workflow_follows_the_schema():
    finished = lint(WORKFLOW)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("runs-on: macos-latest", "runs_on: macos-latest"),
        ("timeout-minutes: 90", "timeout-minutes: long"),
        ("    needs: linux\n", "    needs:\n"),
        ("contents: read", "contents: reed"),
    ],
)
def test_a_mistake_in_the_workflow_is_found(right, wrong, tmp_path):
    text = WORKFLOW.read_text()
    assert right in text
    (tmp_path / "course.yml").write_text(text.replace(right, wrong, 1))
    assert lint(tmp_path / "course.yml").returncode == 1


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The lines of the Dockerfile that Binder would build from these files."""
    folder = tmp_path_factory.mktemp("binder") / "repository"
    folder.mkdir()
    shutil.copytree(ROOT / ".binder", folder / ".binder")
    for name in ("pyproject.toml", "constraints.txt", "environment.yml"):
        shutil.copy(ROOT / name, folder)
    finished = run("repo2docker", "--no-build", "--debug", ".", cwd=folder)
    assert finished.returncode == 0, finished.stderr
    lines = (finished.stdout + finished.stderr).splitlines()
    return [line.strip() for line in lines]


def test_binder_takes_this_python_and_no_other_list_of_requirements(image):
    python = (ROOT / ".binder/runtime.txt").read_text().strip().replace("-", "=")
    assert f"Building conda environment for {python}" in image
    assert not any("environment.yml" in line for line in image if not line.startswith("#"))


def test_binder_installs_when_the_repository_is_there_and_then_runs_the_script(image):
    pip = "RUN ${KERNEL_PYTHON_PREFIX}/bin/pip install --no-cache-dir -r"
    steps = ["COPY --chown=0:0 src/ ${REPO_DIR}/", f'{pip} ".binder/requirements.txt"']
    steps.append("RUN ./.binder/postBuild")
    assert [line for line in image if line in steps] == steps
