"""Compare models over several seeds: intervals, p-values, and which differences to call.

    interval     Student's 95 % interval for a mean over n seeds, mean ± t s / √n
    pooled       one standard deviation for a whole table of rows and seeds
    verdicts     a family of differences: intervals, p-values, and Holm's rule

A table is {row: {seed: loss}}. With one seed all rows see the same windows, so differences are
taken seed by seed. Notebook 09 derives all this; `cheems_lab.comparison` trains the models.
"""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from cheems_ref import check

Losses = Mapping[str, Mapping[int, float]]  # of every row, with every seed
Family = Mapping[str, Mapping[str, float]]  # by name the weights of rows in a difference


class Interval(NamedTuple):
    """mean ± half_width; half_width is infinite for a single number."""

    mean: float
    half_width: float

    @property
    def holds_zero(self) -> bool:
        """Whether the interval contains zero."""
        return abs(self.mean) <= self.half_width


class Verdict(NamedTuple):
    """A difference with its 95 % interval and p-value; `called` if Holm's rule calls it."""

    interval: Interval
    p_value: float
    called: bool


def interval(numbers: Sequence[float]) -> Interval:
    """Return Student's 95 % interval for the mean of independent numbers.

    Raises:
        ValueError: no numbers, or one that is NaN or infinite.
    """
    if not len(numbers):
        raise ValueError("an interval needs at least one number")
    check.numbers("(-inf, inf)", **{f"numbers[{i}]": x for i, x in enumerate(numbers)})
    mean, n = statistics.fmean(numbers), len(numbers)
    if n == 1:
        return Interval(mean, math.inf)
    return Interval(mean, student_t(n - 1) * statistics.stdev(numbers) / math.sqrt(n))


def student_p(t: float, degrees: int) -> float:
    """Return how often Student's t is at least as far from zero as `t`.

    Source: Abramowitz & Stegun 26.7.3 and 26.7.4.
    """
    angle, odd = math.atan2(abs(t), math.sqrt(degrees)), degrees % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for i in range(odd, degrees - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (i + 1) / (i + 2)
    total *= math.sin(angle)
    return 1 - (2 / math.pi * (angle + total) if odd else total)


@functools.cache
def student_t(degrees: int, level: float = 0.05) -> float:
    """Return Student's factor of a 1 - `level` interval: the t whose `student_p` is the level.

    The level of a 95 % interval is 0.05. Found by doubling, then by bisection.
    """
    low, high = 0.0, 1.0
    while student_p(high, degrees) > level:
        low, high = high, 2 * high
    for _ in range(60):
        t = (low + high) / 2
        low, high = (t, high) if student_p(t, degrees) > level else (low, t)
    return high


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Return which of a family of differences to call, with at most this chance of a false call.

    Source: Holm (1979).
    """
    called, m = [False] * len(p_values), len(p_values)
    for i, at in enumerate(sorted(range(m), key=p_values.__getitem__)):
        if p_values[at] > level / (m - i):
            break
        called[at] = True
    return called


def pooled(losses: Losses) -> tuple[float, int]:
    """Return the standard deviation of a loss around the means of its row and its seed.

    Returns:
        The deviation, assumed to be the same in all rows; and its (rows - 1)(seeds - 1) degrees of
        freedom.

    Raises:
        ValueError: fewer than two rows or seeds, or rows with different seeds.
    """
    seeds = {row: sorted(by_seed) for row, by_seed in losses.items()}
    if len({*map(tuple, seeds.values())}) != 1 or min(len(seeds), *map(len, seeds.values())) < 2:
        raise ValueError(f"losses need two rows and two seeds at least, the same for all: {seeds}")
    table = [[losses[row][seed] for seed in seeds[row]] for row in losses]
    x = torch.tensor(table, dtype=torch.float64)
    left = x - x.mean(1, keepdim=True) - x.mean(0) + x.mean()
    degrees = (x.shape[0] - 1) * (x.shape[1] - 1)
    return math.sqrt(left.square().sum().item() / degrees), degrees


def minus(row: str, baseline: str) -> dict[str, dict[str, int]]:
    """Return the contrast of a row with a baseline, by its name, for a family of `verdicts`."""
    return {f"{row} minus {baseline}": {row: 1, baseline: -1}}


def verdicts(losses: Losses, family: Family, *, pool: bool = False) -> dict[str, Verdict]:
    """Judge a family of differences within one table, corrected for their number.

    Args:
        losses: the table.
        family: such as {"a minus b": {"a": 1, "b": -1}}.
        pool: take the deviation from the whole table (`pooled`); else every difference has its own,
            over the seeds that its rows share.

    Raises:
        ValueError: no seed in common, or a table that can't be pooled.
    """
    found = {}
    for name, weights in family.items():
        seeds = sorted(set.intersection(*(set(losses[row]) for row in weights)))
        if not seeds:
            raise ValueError(f"rows {', '.join(weights)} have no seed in common")
        apart = [sum(w * losses[row][seed] for row, w in weights.items()) for seed in seeds]
        mean, n = statistics.fmean(apart), len(apart)
        error, degrees = (statistics.stdev(apart), n - 1) if n > 1 else (math.inf, 1)
        if pool:
            error, degrees = pooled(losses)
            error *= math.hypot(*weights.values())
        error /= math.sqrt(n)
        p = student_p(mean / error, degrees) if error else float(mean == 0)
        found[name] = Interval(mean, student_t(degrees) * error), p
    calls = holm([p for _, p in found.values()])
    return {name: Verdict(*found[name], yes) for name, yes in zip(found, calls, strict=True)}
