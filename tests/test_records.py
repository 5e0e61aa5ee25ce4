"""The long records: what was run is kept, and not run again after a stop."""

import ast
import builtins
import dataclasses
import importlib
import json
import re
import symtable
import types
from pathlib import Path

import pytest
from lessons import names_taken

from cheems_ref.text import read_text, text_to_ids
from experiments import chapter_09, runner
from experiments.__main__ import RECIPES
from experiments.runner import defined, from_notebook, resumed, tagged

ROOT = Path(__file__).parents[1]
JOBS = [dict(number=number) for number in range(4)]
SQUARES = [{"square": number**2} for number in range(4)]


def square(job):
    return {"square": job["number"] ** 2}


def square_up_to_one(job):
    if job["number"] > 1:
        raise KeyboardInterrupt
    return square(job)


def forbidden(job):
    raise AssertionError(f"{job} is run again")


def test_a_stopped_record_goes_on_where_it_was(tmp_path):
    """Results come in the order of the jobs; a line that was not finished is run again."""
    path = tmp_path / "x.jsonl"
    assert resumed("x", JOBS[:2], square_up_to_one, tmp_path) == SQUARES[:2]
    with pytest.raises(AssertionError, match="is run again"):
        resumed("x", JOBS, forbidden, tmp_path)
    assert resumed("x", JOBS, square, tmp_path) == SQUARES
    path.write_text(path.read_text()[:-3])
    assert resumed("x", JOBS, square, tmp_path) == SQUARES
    assert resumed("x", JOBS[::-1], forbidden, tmp_path) == SQUARES[::-1]
    assert sorted(json.loads(line)[0]["number"] for line in path.open()) == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="is run again"):
        resumed("x", [dict(job, steps=7) for job in JOBS], forbidden, tmp_path)


CHAPTERS = sorted((ROOT / "experiments").glob("chapter_*.py"))


def untagged(notebook, asked):
    """Names that these functions of a notebook need, directly or not, and no tagged cell has."""
    imports, taken = tagged(notebook)
    known = {alias.asname or alias.name for node in imports for alias in node.names}
    known |= {name.partition(".")[0] for name in known} | set(dir(builtins))
    statements = {name: statement for statement in taken for name in defined(statement)}
    waiting, seen, missing = {*asked}, set(), set()
    while waiting - seen:
        name = (waiting - seen).pop()
        seen.add(name)
        if name in statements:
            source = ast.unparse(statements[name])
            waiting |= names_taken(symtable.symtable(source, notebook, "exec")) - known
        else:
            missing.add(name)
    return missing


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_recipe_finds_what_it_needs_in_tagged_cells(path):
    """What a recipe takes from a chapter or a lab, and what that calls."""
    source = path.read_text(encoding="utf-8")
    module = importlib.import_module(f"experiments.{path.stem}")
    for function in re.split(r"^(?=def )", source, flags=re.MULTILINE)[1:]:
        asked = re.findall(r"from_notebook\((\w+)\)\.(\w+)", function)
        for variable, notebook in re.findall(r"(\w+) = from_notebook\((\w+)\)$", function, re.M):
            names = re.findall(rf"\b{variable}\.(\w+)", function)
            assert names, function
            asked += [(notebook, name) for name in names]
        for notebook, name in asked:
            assert untagged(getattr(module, notebook), [name]) == set(), f"{function}: {name}"


def test_every_record_has_a_recipe_or_names_a_measurement():
    """A record's command is what one runs today."""
    for path in sorted(runner.RECORDS.glob("*.json")):
        command = json.loads(path.read_text(encoding="utf-8"))["command"]
        if path.stem in RECIPES:
            assert command == f"python -m experiments {path.stem}"
        else:
            script = command.split()[1]
            assert script.startswith("tests/bench/") and (ROOT / script).exists(), path.name


@pytest.mark.usefixtures("torch_as_before")
def test_functions_classes_and_constants_come_from_tagged_cells(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()

    def taken(*cells):
        text = "# %% [markdown]\n# # A title\n\n# %%\nimport math\n\nA = 7\n" + "".join(cells)
        (tmp_path / "notebooks/x.py").write_text(text)
        return vars(from_notebook("x"))

    first = '# %% tags=["setup", "experiment"]\nA, B = 2, 3\nb = 1 / 0\nprint(1 / 0)\n'
    second = (
        '\n# %% tags=["experiment"]\ndef f():\n    return math.pi + B\n\n\nclass C:\n    pass\n'
    )
    found = taken(first, second, "# %%\ndef g():\n    return A\n")
    assert found.keys() == {"A", "B", "f", "C"} and (found["A"], found["B"]) == (2, 3)
    assert 6 < found["f"]() < 7
    with pytest.raises(ValueError, match="x defines A, B twice"):
        taken(first, first)
    with pytest.raises(ValueError, match="x has no cell tagged experiment"):
        taken("# %%\ndef g():\n    return A\n")


@pytest.mark.usefixtures("torch_as_before")
def test_runs_of_the_ablations_in_small(monkeypatch):
    """Two updates on a part of Python's manual: the same again, and other losses in another run."""
    settings = from_notebook(chapter_09.CHAPTER).TRAINING
    brief = dataclasses.replace(settings, steps=2, evaluate_every=1, seq_len=128)
    part = types.SimpleNamespace(ids=text_to_ids(read_text())[:24_000], eval_fraction=0.1)
    monkeypatch.setattr(chapter_09, "ablation_settings", lambda steps: brief)
    monkeypatch.setattr(chapter_09, "ablation_corpus", lambda: part)

    def job(**fields):
        return dict(row="x", fields=fields, rate=1e-3, seed=3, steps=2)

    small = dict(d_model=32, target=60_000)
    first, again, unturned = (
        chapter_09.ablation_run(job(pattern="SR AH", **small, **more))
        for more in ({}, {}, dict(turned=False))
    )
    assert first["nats"] == again["nats"] and [step for step, _ in first["nats"]] == [1, 2]
    assert 4 < first["nats"][1][1] < first["nats"][0][1] < 5.6
    assert first["parameters"] == unturned["parameters"] and first["nats"] != unturned["nats"]
    # Experts that have hardly learned give four unrelated answers, with a quarter in common.
    assert len(first["in common"]) == 2 and all(0.2 < s < 0.45 for s in first["in common"])
    run = chapter_09.reading_run(job(pattern="AM SM", objective="two-way"))
    (((steps, nats),), places) = run["nats"], run["by place"]
    assert steps == 2 and 4 < nats < 6 and min(places) <= nats <= max(places)
