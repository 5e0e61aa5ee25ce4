"""Intervals for the comparison of models: means over seeds, and differences seed by seed.

    paired       with one seed all rows see the same windows; differences are taken seed by seed
    interval     mean ± t s / √n over n seeds: Student's, 95 %

Notebook 09 compares with them; `cheems_lab.comparison` trains the models.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Student's t for 1, 2, ... degrees of freedom, 97.5 %; `_student` computes the others.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)
T95 += (2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056)
T95 += (2.052, 2.048, 2.045, 2.042)


class Interval(NamedTuple):
    """mean ± half_width; half_width is infinite for a single number."""

    mean: float
    half_width: float

    @property
    def holds_zero(self) -> bool:
        """Whether there may be no difference."""
        return abs(self.mean) <= self.half_width


def interval(numbers: Sequence[float]) -> Interval:
    """Return Student's 95 % interval for the mean of numbers that scatter independently.

    Raises:
        ValueError: there is no number.
    """
    if not len(numbers):
        raise ValueError("an interval needs at least one number")
    mean, n = statistics.fmean(numbers), len(numbers)
    if n == 1:
        return Interval(mean, math.inf)
    return Interval(mean, _student(n - 1) * statistics.stdev(numbers) / math.sqrt(n))


def _student(degrees):
    """Student's t, 97.5 %: from the table, beyond it by the series about the normal distribution's.

    Source: Abramowitz & Stegun 26.7.5, whose first omitted term is below 2e-6 from 31 degrees on.
    """
    if degrees <= len(T95):
        return T95[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def difference(losses: Mapping[str, Mapping[int, float]], row: str, baseline: str) -> Interval:
    """Return the interval of a row's losses less the baseline's, over the seeds that both have.

    Args:
        losses: as `last_losses` returns them.
        row, baseline: two of its names.

    Raises:
        ValueError: they have no seed in common.
    """
    seeds = sorted(losses[row].keys() & losses[baseline].keys())
    if not seeds:
        raise ValueError(f"rows {row} and {baseline} have no seed in common")
    return interval([losses[row][seed] - losses[baseline][seed] for seed in seeds])
