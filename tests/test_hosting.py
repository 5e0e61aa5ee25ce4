"""What the files for a public forge and a devcontainer name exists here."""

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = (ROOT / ".github/workflows/course.yml").read_text()
CONTAINER = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
JOBS = yaml.safe_load(WORKFLOW)["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]
COMMANDS = [step["run"].removeprefix("${{ matrix.before }} ") for step in STEPS if "run" in step]


def test_targets_of_make_exist():
    known = {*re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE), ".venv/.ready"}
    told = [command for command in COMMANDS if command.startswith("make ")]
    told.append(CONTAINER["postCreateCommand"])
    targets = {word for line in told for word in line.split()[1:] if "=" not in word}
    assert "test" in targets and targets <= known


def test_actions_are_pinned_and_rights_are_few():
    """Commits with their versions; to read, and for Pages, from main alone, what it takes."""
    used = re.findall(r"uses: (.*)$", WORKFLOW, re.MULTILINE)
    pinned = r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
    assert used and [one for one in used if not re.fullmatch(pinned, one)] == []
    assert yaml.safe_load(WORKFLOW)["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert rights == {"pages": {"pages": "write", "id-token": "write"}}
    assert "github.ref == 'refs/heads/main'" in JOBS["pages"]["if"]
    assert "pull_request_target" not in WORKFLOW
    assert all("timeout-minutes" in job for job in JOBS.values())
    checkouts = [step for step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts and all(step["with"] == {"persist-credentials": False} for step in checkouts)
