"""The hosting files pass their linters, without the network.

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


def run(*command, cwd=ROOT):
    command = [sys.executable, "-m", *map(str, command)]
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def test_the_workflow_follows_the_schema():
    workflow = ROOT / ".github/workflows/course.yml"
    run("check_jsonschema", "--builtin-schema", "vendor.github-workflows", workflow)


def test_binder_takes_this_python_installs_the_requirements_and_runs_the_script(tmp_path):
    """In this order, once the repository is there, and no other list of requirements."""
    shutil.copytree(ROOT / ".binder", tmp_path / ".binder")
    for name in ("pyproject.toml", "constraints.txt", "environment.yml"):
        shutil.copy(ROOT / name, tmp_path)
    said = run("repo2docker", "--no-build", "--debug", ".", cwd=tmp_path).splitlines()
    image = [line.strip() for line in said]
    python = (ROOT / ".binder/runtime.txt").read_text().strip().replace("-", "=")
    assert f"Building conda environment for {python}" in image
    assert not any("environment.yml" in line for line in image if not line.startswith("#"))
    pip = "RUN ${KERNEL_PYTHON_PREFIX}/bin/pip install --no-cache-dir -r"
    steps = ["COPY --chown=0:0 src/ ${REPO_DIR}/", f'{pip} ".binder/requirements.txt"']
    steps.append("RUN ./.binder/postBuild")
    assert [line for line in image if line in steps] == steps
