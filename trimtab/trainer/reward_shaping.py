"""Steps on whole-sequence scores: truncation rule, group baseline, z-score, clip, scale.

Pure, one number a sequence in and out, float64. Knows no tokens. D sequences of the batch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trimtab.trainer.stats import Floats, moments

STD_EPS = 1e-8


def replace_truncated(rewards_D: Floats, truncated_D: NDArray[np.bool_], reward: float) -> Floats:
    """`reward` where a sequence was cut by its length limit."""
    return np.where(truncated_D, reward, rewards_D)


def subtract_group_mean(rewards_D: Floats, group_D: NDArray[np.int64]) -> Floats:
    """Each score less the mean of its group, itself included.

    >>> subtract_group_mean(np.array([1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 1, 1])).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    centred_D = np.empty_like(rewards_D)
    for group in np.unique(group_D):
        members = group_D == group
        centred_D[members] = rewards_D[members] - moments(rewards_D[members])[0]
    return centred_D


def standardize(rewards_D: Floats, mean: float, std: float) -> Floats:
    """(R - mean) / (std + 1e-8): equal scores give 0, one score gives 0."""
    return (rewards_D - mean) / (std + STD_EPS)


def clip(rewards_D: Floats, low: float, high: float) -> Floats:
    """Into [low, high]. clip([-12, 3], -10, 10) = [-10, 3]"""
    return np.clip(rewards_D, low, high)


def scale_factor(constant: float, return_var: float | None = None) -> float:
    """What scores are multiplied by: `constant`, over the running standard deviation if given.
    Nothing is centred.

    >>> scale_factor(0.5), round(scale_factor(0.5, return_var=4.0), 6)
    (0.5, 0.25)
    """
    return constant if return_var is None else constant / math.sqrt(return_var + STD_EPS)
