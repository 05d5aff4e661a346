"""Means and variances of a batch, and their running form. Knows nothing of rewards or tokens.

Sums are exactly rounded (`math.fsum`), so no order of the values changes a bit of the result, and
equal values have a deviation of exactly 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def moments(values: Floats) -> tuple[float, float]:
    """(mean, population variance) of at least one finite value.

    >>> moments(np.array([1.0, 2.0, 2.0, 3.0]))
    (2.0, 0.5)
    """
    low = float(values.min())
    above = values - low  # exact zeros where all values are equal
    shift = math.fsum(above.tolist()) / values.size
    variance = math.fsum(np.square(above - shift).tolist()) / values.size
    return low + shift, variance


@dataclass(frozen=True, slots=True)
class RunningStats:
    """Mean and population variance of everything merged so far, after a faint prior (0, 1).

    >>> first = RunningStats().merge(np.array([0.0, 1.0, 1.0, 0.0]))
    >>> both = first.merge(np.array([25.0, -3.0]))
    >>> round(both.mean, 6), round(both.var, 5), both.count
    (3.999933, 89.99878, 6.0001)
    """

    mean: float = 0.0
    var: float = 1.0
    count: float = 1e-4

    def merge(self, values: Floats) -> RunningStats:
        """Chan's parallel update: the result does not depend on how values are split into calls."""
        mean, var = moments(values)
        count = self.count + values.size
        delta = mean - self.mean
        squares = self.var * self.count + var * values.size
        squares += delta**2 * self.count * values.size / count
        return RunningStats(self.mean + delta * values.size / count, squares / count, count)
