"""Comparisons: the same windows for all, nothing run twice, intervals that keep their word."""

import dataclasses
import math

import pytest
import torch

from cheems_lab import comparison
from cheems_lab.comparison import Evaluation, Row, last_losses
from cheems_lab.training import RunningError, locked
from cheems_ref import compare as intervals
from cheems_ref.compare import Interval, interval, minus, pooled, verdicts
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.text import text_to_ids
from cheems_ref.train import TrainConfig, train

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it

IDS = text_to_ids("the cat sat on the mat, and the dog lay on the log. " * 30)
SIZES = dict(d_model=16, n_heads=2, d_ff=16, d_state=4, chunk_size=8)
ROWS = {
    "attention": Row(ModelConfig("AM", **SIZES)),
    "states": Row(ModelConfig("SM", **SIZES), learning_rate=1e-3),
}
CONFIG = TrainConfig(steps=6, batch_size=2, seq_len=12, evaluate_every=2)


def run(directory, rows=ROWS, config=CONFIG, seeds=(0, 1), **options):
    how = dict(seeds=seeds, directory=directory, checkpoint_every=3) | options
    return comparison.compare(rows, IDS, config, **how)


# --- what is compared ---------------------------------------------------------------------------


def test_every_row_sees_the_same_windows(tmp_path):
    seen = {}

    def watch(name, run):
        key = name, sum(row == name for row, _ in seen)  # the first, then the second seed
        seen[key] = []
        run.model.embedding.register_forward_pre_hook(
            lambda _, inputs: (
                seen[key].append(inputs[0].clone())
                if torch.is_grad_enabled() and not inputs[0].is_floating_point()  # the tied head
                else None
            )
        )

    run(tmp_path / "windows", config=dataclasses.replace(CONFIG, evaluate_every=6), at_start=watch)
    order = [("attention", 0), ("states", 0), ("attention", 1), ("states", 1)]
    assert [*seen] == order, "not all rows come with the first seed"
    assert not list(tmp_path.rglob("*.safetensors")), "checkpoints of runs that are done are kept"
    first = {pair: torch.stack(windows[:6]) for pair, windows in seen.items()}
    for seed in (0, 1):
        assert torch.equal(first["attention", seed], first["states", seed])
    assert not torch.equal(first["attention", 0], first["attention", 1])


def test_a_run_is_that_of_train(tmp_path):
    evaluations = run(tmp_path / "as_train")
    for name, row in ROWS.items():
        for seed in (0, 1):
            torch.manual_seed(seed)
            rate = row.learning_rate or CONFIG.learning_rate
            config = dataclasses.replace(CONFIG, learning_rate=rate, seed=seed)
            wanted = train(CausalLM(row.config), IDS, config, progress_bar=False).evaluations
            found = [[e.step, e.nats] for e in evaluations if (e.row, e.seed) == (name, seed)]
            assert found == wanted  # to the last bit: one seed, one process, one path of code
            assert [step for step, _ in found] == [2, 4, 6]


# --- stopped, and gone on with ------------------------------------------------------------------


def stopped(directory, at, seeds=(0, 1)):
    """A comparison that is stopped after `at` updates in all."""
    updates = []

    def stop(*_):
        updates.append(1)
        if len(updates) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(directory, seeds=seeds, after_step=stop)


def test_one_that_was_stopped_comes_to_the_same(tmp_path):
    """To the last bit, as `same` in training.py."""
    whole = run(tmp_path / "whole")
    for at in (1, 5, 6, 23):
        directory = tmp_path / f"stopped_{at}"
        stopped(directory, at)
        assert run(directory) == whole
        assert sorted(comparison.read_evaluations(directory)) == sorted(whole) and len(whole) == 12


def test_finished_runs_are_not_run_again(tmp_path):
    whole, updates = run(tmp_path / "once"), []
    again = run(tmp_path / "once", after_step=lambda *_: updates.append(1))
    assert again == whole and not updates
    more = run(tmp_path / "once", seeds=(0, 1, 2), after_step=lambda *_: updates.append(1))
    assert len(updates) == 12 and more[: len(whole)] == whole
    stopped(tmp_path / "part", 10)
    run(tmp_path / "part", after_step=lambda *_: updates.append(1))
    assert len(updates) == 12 + 24 - 6 - 3  # the first run was done, of the second 3 updates saved


def test_another_row_of_the_same_name_is_refused(tmp_path):
    run(tmp_path / "rows", seeds=(0,))
    other = ROWS | {"states": Row(ModelConfig("SM", **SIZES | dict(d_state=8)), 1e-3)}
    with pytest.raises(ValueError, match=r"row states of .* another model: d_state = 4, now 8"):
        run(tmp_path / "rows", other)
    with pytest.raises(ValueError, match=r"row attention .* training: steps = 6, now 8"):
        run(tmp_path / "rows", config=dataclasses.replace(CONFIG, steps=8))
    with pytest.raises(ValueError, match=r"another training: learning_rate = 0.001, now 0.002"):
        run(tmp_path / "rows", ROWS | {"states": Row(ROWS["states"].config)})
    with pytest.raises(ValueError, match="another text"):
        comparison.compare(ROWS, IDS[1:], CONFIG, seeds=(0,), directory=tmp_path / "rows")
    often = dataclasses.replace(CONFIG, evaluate_every=3)
    more = {"gated": Row(ModelConfig("AG", **SIZES))} | ROWS
    again = run(tmp_path / "rows", more, often, seeds=(0,), checkpoint_every=2)
    assert len(again) == 2 + 3 + 3


def test_a_comparison_is_alone_in_its_directory(tmp_path):
    with locked(tmp_path), pytest.raises(RunningError, match="another process is training in"):
        run(tmp_path)


# --- intervals ----------------------------------------------------------------------------------


def student_below(t, degrees):
    """P(T < t) for Student's distribution, by Simpson's rule on its density."""
    c = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    x = torch.linspace(0, t, 20_001, dtype=torch.float64)
    density = c * (1 + x.square() / degrees) ** (-(degrees + 1) / 2)
    return 0.5 + t / 60_000 * (density[0] + density[-1] + 4 * density[1::2].sum()
                               + 2 * density[2:-1:2].sum()).item()  # fmt: skip


def test_student_s_factors_and_p_values():
    """By Simpson's rule, for even and odd degrees; and the normal distribution's far out."""
    for degrees in (1, 2, 3, 4, 7, 30, 31):
        t = intervals.student_t(degrees)
        assert abs(student_below(t, degrees) - 0.975) < 1e-6
        narrow = intervals.student_t(degrees, 0.4)
        assert abs(student_below(narrow, degrees) - 0.8) < 1e-6
        for t in (-2.5, 0.0, 0.3, 4.0):
            wanted = 2 - 2 * student_below(abs(t), degrees)
            assert abs(intervals.student_p(t, degrees) - wanted) < 1e-6
    assert abs(intervals.student_t(1000) - 1.9623) < 6e-5
    assert abs(intervals.student_t(2, 0.05 / 9) - 13.3604) < 1e-3  # beyond every factor at 0.05


def intervals_keep_their_word(m):
    """Of many intervals of normal numbers, 95 % hold the true mean."""
    for n in (2, 3, 5, 40):
        drawn = torch.randn(4000, n, generator=torch.Generator().manual_seed(n)) + 3
        intervals = [m.interval(row) for row in drawn.tolist()]
        share = sum(abs(mean - 3) <= half for mean, half in intervals) / len(intervals)
        assert abs(share - 0.95) < 0.015, (n, share)


def differences_are_paired(m):
    losses = {"a": {0: 1.0, 1: 2.0, 2: 4.0}, "b": {0: 0.5, 1: 1.5, 2: 3.5, 7: 0.0}}
    judged = m.verdicts(losses, m.minus("a", "b") | m.minus("b", "a"))
    assert judged["a minus b"] == ((0.5, 0.0), 0.0, True)
    assert judged["b minus a"] == ((-0.5, 0.0), 0.0, True)
    losses["a"][2] = 4.3
    ((mean, half), p, _) = m.verdicts(losses, m.minus("a", "b"))["a minus b"]
    assert math.isclose(mean, 0.6) and math.isclose(half, 4.30265 * 0.3 / 3, rel_tol=1e-5)
    assert math.isclose(p, 2 - 2 * student_below(6, 2), rel_tol=1e-4)


def of_many_calls_few_are_false(m):
    """Equal models: by Holm's rule at most 5 % of tables have a call, pooled or not."""
    drawn = torch.randn(1500, 6, 4, generator=torch.Generator().manual_seed(1))
    drawn += 3 * torch.randn(1500, 1, 4, generator=torch.Generator().manual_seed(2))  # by seed
    for pool in (False, True):
        false = 0
        for table in drawn.tolist():
            losses = {f"{i}": dict(enumerate(row)) for i, row in enumerate(table)}
            family = {k: v for i in range(1, 6) for k, v in m.minus(f"{i}", "0").items()}
            judged = m.verdicts(losses, family, pool=pool)
            false += any(verdict.called for verdict in judged.values())
        assert 0.015 < false / len(drawn) < 0.065, (pool, false)


def one_deviation_serves_a_table(m):
    """Without what rows and seeds add, the rest has the deviation that it was drawn with."""
    noise = torch.randn(30, 20, generator=torch.Generator().manual_seed(3)) / 2
    table = noise + 5 * torch.randn(30, 1) + 5 * torch.randn(20)
    losses = {f"{i}": dict(enumerate(row)) for i, row in enumerate(table.tolist())}
    deviation, degrees = m.pooled(losses)
    assert degrees == 29 * 19 and abs(deviation - 0.5) < 0.02
    half = {"mean": {"0": 0.5, "1": 0.5, "2": -1}}  # half of two rows, minus a third
    ((_, width), *_) = m.verdicts(losses, half, pool=True)["mean"]
    assert math.isclose(width, 1.9643 * deviation * math.sqrt(1.5 / 20), rel_tol=1e-4)


def holm_stops_at_the_first_that_fails(m):
    assert m.holm([0.03, 0.001, 0.02]) == [True, True, True]
    assert m.holm([0.03, 0.02, 0.026]) == [False] * 3
    assert m.holm([0.049, 0.017, 0.016]) == [True, True, True]
    assert m.holm([0.04, 0.001, 0.03]) == [False, True, False]
    assert m.holm([0.05, 0.025]) == [True, True]


def zero_is_looked_for_on_both_sides(m):
    for mean in (0.2, -0.2):
        assert m.Interval(mean, 0.2).holds_zero and m.Interval(mean, math.inf).holds_zero
        assert not m.Interval(mean, 0.19).holds_zero


def test_one_number_has_no_interval_and_none_is_refused():
    assert interval([2.0]) == Interval(2.0, math.inf)
    assert verdicts({"a": {0: 1.0}, "b": {0: 2.0}}, minus("a", "b"))["a minus b"].p_value == 1
    alike = {0: 1.0, 1: 2.0}
    assert verdicts({"a": alike, "b": alike}, minus("a", "b"))["a minus b"].p_value == 1
    with pytest.raises(ValueError, match="at least one number"):
        interval([])
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=r"numbers\[1\] must be a number in \(-inf, inf\)"):
            interval([1.0, bad])
    losses = last_losses([Evaluation("a", 0, 1, 1.0), Evaluation("b", 1, 1, 1.0)])
    with pytest.raises(ValueError, match="rows a, b have no seed in common"):
        verdicts(losses, minus("a", "b"))
    for table in (losses, {"a": {0: 1.0, 1: 2.0}}, {"a": {0: 1.0}, "b": {0: 1.0}}):
        with pytest.raises(ValueError, match="losses need two rows and two seeds"):
            pooled(table)
