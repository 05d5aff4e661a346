"""The three single-sample estimators of KL(a || b), and what each does as a loss.

For samples drawn from a, l = log a - log b. As a loss, with a trained and the sample fixed, the
gradient is `<name>_gradient(l)` times that of log a. Elementwise; knows no masks.

    k1  in the reward (detached): the right score-function form. As a loss on one's own samples its
        expected gradient is zero whatever b is: no regularisation, only noise.
    k2  as a loss on one's own samples: exactly the gradient of KL(a || b).
    k3  as a loss: the gradient of the other direction, KL(b || a); equal to first order only, and
        exp(-l) explodes where a << b. In the reward it is biased.

Samples of another distribution q need the weight a/q on any of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from trimtab.trainer.stats import Floats


def k1(l: Floats) -> Floats:
    """Unbiased, either sign. k1([0.2, -0.9]) = [0.2, -0.9]"""
    return np.asarray(l, dtype=np.float64)


def k1_gradient(l: Floats) -> Floats:
    return np.ones_like(l, dtype=np.float64)


def k2(l: Floats) -> Floats:
    """Biased, never negative. k2([0.2, -0.9]) = [0.02, 0.405]"""
    return 0.5 * np.square(k1(l))


def k2_gradient(l: Floats) -> Floats:
    return k1(l)


def k3(l: Floats) -> Floats:
    """Unbiased, never negative. k3([0.2, -0.9]) = [0.0187, 0.5596]"""
    return np.expm1(-k1(l)) + k1(l)


def k3_gradient(l: Floats) -> Floats:
    return -np.expm1(-k1(l))


Estimator = Callable[[Floats], Floats]

ESTIMATORS: Mapping[str, tuple[Estimator, Estimator]] = {
    "k1": (k1, k1_gradient),
    "k2": (k2, k2_gradient),
    "k3": (k3, k3_gradient),
}
