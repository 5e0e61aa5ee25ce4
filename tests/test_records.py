"""The long records: what was run is kept, and not run again after a stop."""

import dataclasses
import json
import types

import pytest
import torch
from records import (
    ABLATION_RUN,
    CHAPTER_8,
    CHAPTER_9,
    NEEDLE_RUN,
    READING_RUN,
    RECALL_GRID,
    RECALL_RUN,
    ablation_run,
    from_notebook,
    needle_run,
    order_recall_run,
    reading_run,
    resumed,
)

from cheems_ref.text import read_text, text_to_ids

JOBS = [dict(number=number) for number in range(4)]


@pytest.fixture
def float32_afterwards():
    yield
    torch.set_default_dtype(torch.float32)


def square(job):
    return {"square": job["number"] ** 2}


def squared_up_to_one(job):
    if job["number"] > 1:
        raise KeyboardInterrupt
    return square(job)


def forbidden(job):
    raise AssertionError(f"{job} is run again")


def squares(count):
    return [{"square": number**2} for number in range(count)]


def test_results_come_in_the_order_of_the_jobs(tmp_path):
    assert resumed("x", JOBS, square, tmp_path) == squares(4)
    assert resumed("x", JOBS[::-1], forbidden, tmp_path) == squares(4)[::-1]


def test_what_was_run_before_a_stop_is_not_run_again(tmp_path):
    assert resumed("x", JOBS[:2], squared_up_to_one, tmp_path) == squares(2)
    with pytest.raises(AssertionError, match="is run again"):
        resumed("x", JOBS, forbidden, tmp_path)
    assert resumed("x", JOBS, square, tmp_path) == squares(4)
    numbers = [json.loads(line)[0]["number"] for line in (tmp_path / "x.jsonl").open()]
    assert sorted(numbers) == [0, 1, 2, 3]


def test_a_line_that_was_not_finished_is_run_again(tmp_path):
    resumed("x", JOBS, square, tmp_path)
    path = tmp_path / "x.jsonl"
    path.write_text(path.read_text()[:-3])
    assert resumed("x", JOBS, square, tmp_path) == squares(4)
    assert len(path.read_text().splitlines()) == 4
    assert resumed("x", JOBS, forbidden, tmp_path) == squares(4)


def test_another_setting_is_another_job(tmp_path):
    resumed("x", JOBS, square, tmp_path)
    changed = [dict(job, steps=7) for job in JOBS]
    with pytest.raises(AssertionError, match="is run again"):
        resumed("x", changed, forbidden, tmp_path)


@pytest.mark.usefixtures("float32_afterwards")
def test_functions_and_constants_come_from_a_notebook(monkeypatch, tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "x.py").write_text(
        "import math\nA, B = 2, 3\nC = A\nprint(1 / 0)\n\ndef f():\n    return math.pi + B\n"
    )
    monkeypatch.setattr("records.ROOT", tmp_path)
    b, f = from_notebook("x", "B", "f")
    assert b == 3 and 6 < f() < 7


@pytest.mark.usefixtures("float32_afterwards")
@pytest.mark.parametrize(
    ("chapter", "names"),
    [(CHAPTER_8, RECALL_GRID), (CHAPTER_8, RECALL_RUN), (CHAPTER_8, NEEDLE_RUN),
     (CHAPTER_9, ABLATION_RUN), (CHAPTER_9, READING_RUN)],
)  # fmt: skip
def test_what_a_long_record_takes_is_in_its_chapter(chapter, names):
    assert len(from_notebook(chapter, *names)) == len(names)


@pytest.mark.usefixtures("float32_afterwards")
def test_a_name_that_is_defined_twice_or_never_is_refused(monkeypatch, tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "x.py").write_text("def answers():\n    pass\n\nanswers = [1]\n")
    monkeypatch.setattr("records.ROOT", tmp_path)
    with pytest.raises(ValueError, match="x defines one of answers twice"):
        from_notebook("x", "answers")
    with pytest.raises(ValueError, match="x does not define questions"):
        from_notebook("x", "questions")


@pytest.mark.usefixtures("float32_afterwards")
def test_a_run_of_the_needle_is_read_as_a_map():
    job = dict(system="Mamba-2", windows=[64], steps=1, rate=1e-3, seed=0, with_text=False)
    heat = needle_run(job)["heat"]["as trained"]
    assert len(heat) == 5 and all(len(row) == 5 and min(row) >= 0 for row in heat)
    assert max(map(max, heat)) < 0.35, "one update, and it finds needles"


@pytest.fixture
def two_updates(monkeypatch):
    """Runs of chapter 09 in small: two updates, on a part of Python's manual."""
    (settings,) = from_notebook(CHAPTER_9, "TRAINING")
    brief = dataclasses.replace(settings, steps=2, evaluate_every=1)
    part = types.SimpleNamespace(ids=text_to_ids(read_text())[:40_000], eval_fraction=0.1)
    monkeypatch.setattr("records.ablation_settings", lambda steps: brief)
    monkeypatch.setattr("records.ablation_corpus", lambda: part)
    yield
    torch.set_default_dtype(torch.float32)


def job(**fields):
    return dict(row="x", fields=fields, rate=1e-3, seed=3, steps=2)


@pytest.mark.usefixtures("two_updates")
def test_a_run_of_the_ablations_again_is_the_same():
    one = job(pattern="SM × 3 + IM", inner="ssd")
    first, again = (ablation_run(one)["nats"] for _ in range(2))
    assert first == again and [step for step, _ in first] == [1, 2]
    assert 4 < first[1][1] < first[0][1] < 5.6


@pytest.mark.usefixtures("two_updates")
def test_attention_that_is_told_no_positions_learns_something_else():
    pattern, small = "AM × 2", dict(d_model=32, target=30_000)
    turned, unturned = (
        ablation_run(job(pattern=pattern, **small, **told)) for told in ({}, {"turned": False})
    )
    assert turned["parameters"] == unturned["parameters"] and turned["nats"] != unturned["nats"]


@pytest.mark.usefixtures("two_updates")
def test_experts_that_have_hardly_learned_have_little_in_common():
    """Four unrelated answers: a quarter; of the expansive ones, too, which a layer precedes."""
    small = dict(d_model=32, target=60_000)
    assert "in common" not in ablation_run(job(pattern="SM AM", **small))
    for pattern in ("SR AH", "SC AX"):
        shares = ablation_run(job(pattern=pattern, **small))["in common"]
        assert len(shares) == 2 and all(0.2 < share < 0.45 for share in shares), shares


@pytest.mark.usefixtures("float32_afterwards")
def test_what_answers_have_in_common():
    """All of it, if they are equal; nothing, if they cancel; a part, if they are unrelated."""
    share, _ = from_notebook(CHAPTER_9, "common_share", "in_common")
    one = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    assert share(one.expand(4, 500)) == pytest.approx(1)
    assert share(torch.cat([one, -one])) == pytest.approx(0)
    unrelated = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1))
    assert share(unrelated) == pytest.approx(0.25, abs=0.02)


@pytest.mark.usefixtures("two_updates")
def test_runs_with_blanks():
    found = {}
    for objective in ("in order", "one-way", "two-way"):
        runs = [reading_run(job(pattern="AM SM", objective=objective)) for _ in range(2)]
        found[objective], again = ([run["nats"], run["by place"]] for run in runs)
        assert found[objective] == again
        ((steps, nats),), places = again
        assert steps == 2 and 4 < nats < 6 and min(places) <= nats <= max(places)
    assert found["in order"] != found["one-way"] != found["two-way"]


@pytest.mark.usefixtures("float32_afterwards")
def test_a_run_of_recall_keeps_every_25th_share():
    run = order_recall_run(dict(row="x", pattern="SM AM", steps=50, seed=0))
    assert len(run["right"]) == 2 and all(0 <= share <= 1 for share in run["right"])
