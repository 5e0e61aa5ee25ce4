"""The long records: what was run is kept, and not run again after a stop."""

import dataclasses
import json
import types

import pytest

from cheems_ref.text import read_text, text_to_ids
from experiments import runner
from experiments.runner import from_notebook, resumed

JOBS = [dict(number=number) for number in range(4)]
SQUARES = [{"square": number**2} for number in range(4)]
NAMES = {
    runner.CHAPTER_7: [runner.RECALL],
    runner.CHAPTER_8: [runner.RECALL_GRID, runner.FOUND_RUN],
    runner.LAB_8A: [runner.NEEDLE_RUN],
    runner.CHAPTER_9: [runner.ABLATION_RUN],
    runner.LAB_9A: [runner.READING_RUN],
    "12_scaling_out": [("timed",)],
}


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


@pytest.mark.usefixtures("torch_as_before")
def test_functions_and_constants_come_from_a_notebook(monkeypatch, tmp_path):
    for chapter, groups in NAMES.items():
        for names in groups:
            assert len(from_notebook(chapter, *names)) == len(names)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/x.py").write_text(
        "import math\nA, B = 2, 3\nprint(1 / 0)\n\ndef f():\n    return math.pi + B\n"
        "\ndef g():\n    pass\n\ng = [1]\n"
    )
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    b, f = from_notebook("x", "B", "f")
    assert b == 3 and 6 < f() < 7
    with pytest.raises(ValueError, match="x defines one of g twice"):
        from_notebook("x", "g")
    with pytest.raises(ValueError, match="x does not define questions"):
        from_notebook("x", "questions")


@pytest.mark.usefixtures("torch_as_before")
def test_runs_of_the_ablations_in_small(monkeypatch):
    """Two updates on a part of Python's manual: the same again, and other losses in another run."""
    (settings,) = from_notebook(runner.CHAPTER_9, "TRAINING")
    brief = dataclasses.replace(settings, steps=2, evaluate_every=1, seq_len=128)
    part = types.SimpleNamespace(ids=text_to_ids(read_text())[:24_000], eval_fraction=0.1)
    monkeypatch.setattr(runner, "ablation_settings", lambda steps: brief)
    monkeypatch.setattr(runner, "ablation_corpus", lambda: part)

    def job(**fields):
        return dict(row="x", fields=fields, rate=1e-3, seed=3, steps=2)

    small = dict(d_model=32, target=60_000)
    first, again, unturned = (
        runner.ablation_run(job(pattern="SR AH", **small, **more))
        for more in ({}, {}, dict(turned=False))
    )
    assert first["nats"] == again["nats"] and [step for step, _ in first["nats"]] == [1, 2]
    assert 4 < first["nats"][1][1] < first["nats"][0][1] < 5.6
    assert first["parameters"] == unturned["parameters"] and first["nats"] != unturned["nats"]
    # Experts that have hardly learned give four unrelated answers, with a quarter in common.
    assert len(first["in common"]) == 2 and all(0.2 < s < 0.45 for s in first["in common"])
    run = runner.reading_run(job(pattern="AM SM", objective="two-way"))
    (((steps, nats),), places) = run["nats"], run["by place"]
    assert steps == 2 and 4 < nats < 6 and min(places) <= nats <= max(places)
