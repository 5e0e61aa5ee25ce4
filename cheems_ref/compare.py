"""Confidence intervals for the comparison of models over several seeds.

    interval     Student's 95 % interval for a mean over n seeds, mean ± t s / √n
    difference   the interval of a paired difference: with one seed all rows see the same windows

Notebook 09 uses them; `cheems_lab.comparison` trains the models.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; `_student` computes the others.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)
T95 += (2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056)
T95 += (2.052, 2.048, 2.045, 2.042)


class Interval(NamedTuple):
    """mean ± half_width; half_width is infinite for a single number."""

    mean: float
    half_width: float

    @property
    def holds_zero(self) -> bool:
        """Whether the interval contains zero."""
        return abs(self.mean) <= self.half_width


def interval(numbers: Sequence[float]) -> Interval:
    """Return Student's 95 % interval for the mean of independent numbers.

    Raises:
        ValueError: no numbers.
    """
    if not len(numbers):
        raise ValueError("an interval needs at least one number")
    mean, n = statistics.fmean(numbers), len(numbers)
    if n == 1:
        return Interval(mean, math.inf)
    return Interval(mean, _student(n - 1) * statistics.stdev(numbers) / math.sqrt(n))


def _student(degrees):
    """Return the 97.5 % quantile of Student's t: from the table, or by a series in 1 / degrees.

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
    """Return the interval of row - baseline in loss, over the seeds that both have.

    Args:
        losses: by name and seed, as `last_losses` returns them.
        row, baseline: two of the names.

    Raises:
        ValueError: no seed in common.
    """
    seeds = sorted(losses[row].keys() & losses[baseline].keys())
    if not seeds:
        raise ValueError(f"rows {row} and {baseline} have no seed in common")
    return interval([losses[row][seed] - losses[baseline][seed] for seed in seeds])
