"""Comparisons: the same windows for all, nothing run twice, intervals that keep their word."""

import contextlib
import dataclasses
import itertools
import math

import pytest
import torch

from cheems_lab import comparison
from cheems_lab.comparison import Evaluation, Row, last_losses
from cheems_lab.training import RunningError, locked
from cheems_ref import compare as intervals
from cheems_ref.compare import Interval, difference, interval
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.text import text_to_ids
from cheems_ref.train import TrainConfig, train

IDS = text_to_ids("the cat sat on the mat, and the dog lay on the log. " * 30)
SIZES = dict(d_model=16, n_heads=2, d_ff=16, d_state=4, chunk_size=8)
ROWS = {
    "attention": Row(ModelConfig("AM", **SIZES)),
    "states": Row(ModelConfig("SM", **SIZES), learning_rate=1e-3),
}
CONFIG = TrainConfig(steps=6, batch_size=2, seq_len=12, evaluate_every=2, checkpoint_every=3)


def run(m, directory, rows=ROWS, config=CONFIG, seeds=(0, 1), **options):
    return m.compare(rows, IDS, config, seeds=seeds, directory=directory, **options)


@contextlib.contextmanager
def nothing_refused():
    """So that a planted mistake that raises ValueError fails the property."""
    try:
        yield
    except ValueError as error:
        pytest.fail(str(error))


# --- what is compared ---------------------------------------------------------------------------


def every_row_sees_the_same_windows(m, folder):
    seen = {}

    def watch(name, run):
        key = name, sum(row == name for row, _ in seen)  # the first, then the second seed
        seen[key] = []
        run.model.embedding.register_forward_pre_hook(
            lambda _, inputs: (
                seen[key].append(inputs[0].clone())
                if torch.is_grad_enabled() and run.model.training
                else None
            )
        )

    run(m, folder / "windows", config=dataclasses.replace(CONFIG, evaluate_every=6), at_start=watch)
    first = {pair: torch.stack(windows[:6]) for pair, windows in seen.items()}
    for seed in (0, 1):
        assert torch.equal(first["attention", seed], first["states", seed])
    assert not torch.equal(first["attention", 0], first["attention", 1])


def a_run_is_that_of_train(m, folder):
    evaluations = run(m, folder / "as_train")
    for name, row in ROWS.items():
        for seed in (0, 1):
            torch.manual_seed(seed)
            rate = row.learning_rate or CONFIG.learning_rate
            config = dataclasses.replace(CONFIG, learning_rate=rate, seed=seed)
            wanted = train(CausalLM(row.config), IDS, config, progress_bar=False).evaluations
            found = [[e.step, e.nats] for e in evaluations if (e.row, e.seed) == (name, seed)]
            assert found == wanted  # to the last bit: one seed, one process, one path of code
            assert [step for step, _ in found] == [2, 4, 6]


def all_rows_come_with_the_first_seed(m, folder):
    began = []
    run(m, folder / "order", at_start=lambda name, run: began.append((name, run.config.seed)))
    assert began == [("attention", 0), ("states", 0), ("attention", 1), ("states", 1)]


# --- stopped, and gone on with ------------------------------------------------------------------


def stopped(m, directory, at, seeds=(0, 1)):
    """A comparison that is stopped after `at` updates in all."""
    updates = []

    def stop(*_):
        updates.append(1)
        if len(updates) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(m, directory, seeds=seeds, after_step=stop)


def one_that_was_stopped_comes_to_the_same(m, folder):
    """To the last bit, as `same` in training.py."""
    whole = run(m, folder / "whole")
    for at in (1, 4, 5, 6, 7, 11, 23):
        directory = folder / f"stopped_{at}"
        stopped(m, directory, at)
        assert run(m, directory) == whole
        assert sorted(m.read_evaluations(directory)) == sorted(whole) and len(whole) == 12


def finished_runs_are_not_run_again(m, folder):
    whole, updates = run(m, folder / "once"), []
    again = run(m, folder / "once", after_step=lambda *_: updates.append(1))
    assert again == whole and not updates
    more = run(m, folder / "once", seeds=(0, 1, 2), after_step=lambda *_: updates.append(1))
    assert len(updates) == 12 and more[: len(whole)] == whole
    stopped(m, folder / "part", 10)
    run(m, folder / "part", after_step=lambda *_: updates.append(1))
    assert len(updates) == 12 + 24 - 6 - 3  # the first run was done, of the second 3 updates saved


def another_row_of_the_same_name_is_refused(m, folder):
    run(m, folder / "rows", seeds=(0,))
    other = ROWS | {"states": Row(ModelConfig("SM", **SIZES | dict(d_state=8)), 1e-3)}
    with pytest.raises(ValueError, match=r"row states of .* another model: d_state = 4, now 8"):
        run(m, folder / "rows", other)
    with pytest.raises(ValueError, match=r"row attention .* training: steps = 6, now 8"):
        run(m, folder / "rows", config=dataclasses.replace(CONFIG, steps=8))
    with pytest.raises(ValueError, match=r"another training: learning_rate = 0.001, now 0.002"):
        run(m, folder / "rows", ROWS | {"states": Row(ROWS["states"].config)})
    with pytest.raises(ValueError, match="another text"):
        m.compare(ROWS, IDS[1:], CONFIG, seeds=(0,), directory=folder / "rows")
    often = dataclasses.replace(CONFIG, evaluate_every=3, checkpoint_every=2)
    more = {"gated": Row(ModelConfig("AG", **SIZES))} | ROWS
    with nothing_refused():
        assert len(run(m, folder / "rows", more, often, seeds=(0,))) == 2 + 3 + 3


def checkpoints_go_when_a_run_is_done(m, folder):
    run(m, folder / "clean", seeds=(0,))
    assert not list((folder / "clean").rglob("*.safetensors"))


PROPERTIES = [
    every_row_sees_the_same_windows,
    a_run_is_that_of_train,
    all_rows_come_with_the_first_seed,
    one_that_was_stopped_comes_to_the_same,
    finished_runs_are_not_run_again,
    another_row_of_the_same_name_is_refused,
    checkpoints_go_when_a_run_is_done,
]


@pytest.mark.parametrize("has_property", PROPERTIES)
@pytest.mark.usefixtures("unchecked")
def test_compare(has_property, tmp_path):
    has_property(comparison, tmp_path)


def test_a_comparison_is_alone_in_its_directory(tmp_path):
    with locked(tmp_path), pytest.raises(RunningError, match="another process is training in"):
        run(comparison, tmp_path)


# --- intervals ----------------------------------------------------------------------------------


def student_below(t, degrees):
    """P(T < t) for Student's distribution, by Simpson's rule on its density."""
    c = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    x = torch.linspace(0, t, 20_001, dtype=torch.float64)
    density = c * (1 + x.square() / degrees) ** (-(degrees + 1) / 2)
    return 0.5 + t / 60_000 * (density[0] + density[-1] + 4 * density[1::2].sum()
                               + 2 * density[2:-1:2].sum()).item()  # fmt: skip


def the_table_is_student_s(m):
    for degrees, t in enumerate(m.T95, start=1):
        assert abs(student_below(t, degrees) - 0.975) < 3e-5


def student_falls_to_the_normal_s(m):
    """Known values to four decimals, and no jump where the table ends."""
    t = {n - 1: m.interval([-1.0, 1.0] + [0.0] * (n - 2)).half_width for n in range(2, 1200)}
    for degrees in t:  # the deviation of these numbers is the root of 2 / degrees
        t[degrees] /= math.sqrt(2 / degrees / (degrees + 1))
    for degrees, known in ((31, 2.0395), (40, 2.0211), (60, 2.0003), (120, 1.9799), (1000, 1.9623)):
        assert abs(t[degrees] - known) < 6e-5, f"t of {degrees} is {t[degrees]}, not {known}"
    steps = [t[degrees] - t[degrees + 1] for degrees in range(4, 1198)]
    assert all(step > 0 for step in steps), "t rises"
    for before, after in itertools.pairwise(steps):
        assert after < before + 1.1e-3, "t jumps"  # the table has three decimals


def intervals_keep_their_word(m):
    """Of many intervals of normal numbers, 95 % hold the true mean."""
    for n in (2, 3, 5, 40):
        drawn = torch.randn(4000, n, generator=torch.Generator().manual_seed(n)) + 3
        intervals = [m.interval(row) for row in drawn.tolist()]
        share = sum(abs(mean - 3) <= half for mean, half in intervals) / len(intervals)
        assert abs(share - 0.95) < 0.015, (n, share)


def differences_are_paired(m):
    losses = {"a": {0: 1.0, 1: 2.0, 2: 4.0}, "b": {0: 0.5, 1: 1.5, 2: 3.5, 7: 0.0}}
    assert m.difference(losses, "a", "b") == (0.5, 0.0)
    assert m.difference(losses, "b", "a") == (-0.5, 0.0)
    losses["a"][2] = 4.3
    mean, half = m.difference(losses, "a", "b")
    assert math.isclose(mean, 0.6) and math.isclose(half, 4.303 * 0.3 / 3, rel_tol=1e-6)


def zero_is_looked_for_on_both_sides(m):
    for mean in (0.2, -0.2):
        assert m.Interval(mean, 0.2).holds_zero and m.Interval(mean, math.inf).holds_zero
        assert not m.Interval(mean, 0.19).holds_zero


INTERVALS = [
    the_table_is_student_s,
    student_falls_to_the_normal_s,
    intervals_keep_their_word,
    differences_are_paired,
    zero_is_looked_for_on_both_sides,
]


@pytest.mark.parametrize("has_property", INTERVALS)
def test_intervals(has_property):
    has_property(intervals)


def test_one_number_has_no_interval_and_none_is_refused():
    assert interval([2.0]) == Interval(2.0, math.inf)
    with pytest.raises(ValueError, match="at least one number"):
        interval([])
    with pytest.raises(ValueError, match="rows a and b have no seed in common"):
        difference(last_losses([Evaluation("a", 0, 1, 1.0), Evaluation("b", 1, 1, 1.0)]), "a", "b")
