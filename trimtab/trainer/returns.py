"""Steps on tokens: KL to the reference, token rewards, reward-to-go, whitening.

A mask is True on action tokens: those the policy sampled. Rows outside it (prompt, tool output,
padding) hold anything, NaN included; they come out 0 and touch nothing. Knows no reward shaping.
T tokens of one sequence, D sequences of the batch, `_D_T` a ragged list over D of (T,) arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trimtab.trainer.stats import Floats, moments

Bools = NDArray[np.bool_]

VAR_FLOOR = 1e-8


def log_ratio(logprobs_T: Floats, ref_logprobs_T: Floats, mask_T: Bools) -> Floats:
    """log pi_old - log pi_ref, the k1 estimate of KL(pi_old || pi_ref) at each action token.

    >>> nan = math.nan
    >>> log_ratio(np.array([-1.0, nan]), np.array([-3.0, -1.0]), np.array([True, False])).tolist()
    [2.0, 0.0]
    """
    return scatter(mask_T, logprobs_T[mask_T] - ref_logprobs_T[mask_T])


def clamp(log_ratio_T: Floats, bound: float | None) -> Floats:
    """Into [-bound, bound]: one absurd token must not outweigh its sequence's score."""
    return log_ratio_T if bound is None else np.clip(log_ratio_T, -bound, bound)


def place_rewards(
    reward: float,
    kl_T: Floats | None,
    mask_T: Bools,
    kl_coef: float,
    extra_T: Floats | None = None,
) -> Floats:
    """r_t = [t is the last action token] R - kl_coef KL_t + extra_t, EOS or not.

    >>> place_rewards(1.0, np.array([0.25, 9.0, -0.5]), np.array([True, False, True]), 1.0).tolist()
    [-0.25, 0.0, 1.5]
    """
    rewards_T = np.zeros(mask_T.size)
    if kl_T is not None:
        rewards_T[mask_T] -= kl_coef * kl_T[mask_T]
    if extra_T is not None:
        rewards_T[mask_T] += extra_T[mask_T]
    rewards_T[np.flatnonzero(mask_T)[-1:]] += reward
    return rewards_T


def returns_to_go(rewards_T: Floats, mask_T: Bools, gamma: float) -> Floats:
    """G_t = r_t + gamma G of the next action token: inclusive, and carried over masked gaps, which
    neither cut nor discount it.

    >>> returns_to_go(np.array([1.0, 9.0, 4.0]), np.array([True, False, True]), 0.5).tolist()
    [3.0, 0.0, 4.0]
    """
    backwards = rewards_T[mask_T][::-1].tolist()
    returns = list(accumulate(backwards, lambda later, reward: reward + gamma * later))
    return scatter(mask_T, np.array(returns[::-1], dtype=np.float64))


def action_values(values_D_T: Sequence[Floats], mask_D_T: Sequence[Bools]) -> Floats:
    """All action tokens of the batch in one array, sequence after sequence."""
    return np.concatenate([v[m] for v, m in zip(values_D_T, mask_D_T, strict=True)])


def whiten(
    returns_D_T: Sequence[Floats],
    mask_D_T: Sequence[Bools],
    mode: Literal["full", "no_std"] = "full",
) -> list[Floats]:
    """(G - mean) / sqrt(max(var, 1e-8)) over all action tokens, population variance; `no_std` only
    subtracts the mean. Long sequences weigh more: the tokens are the population.

    >>> everything = np.array([True, True])
    >>> whiten([np.array([3.0, 3.0]), np.array([1.0, 1.0])], [everything, everything])[1].tolist()
    [-1.0, -1.0]
    """
    mean, var = moments(action_values(returns_D_T, mask_D_T))
    std = math.sqrt(max(var, VAR_FLOOR)) if mode == "full" else 1.0
    pairs = zip(returns_D_T, mask_D_T, strict=True)
    return [scatter(mask_T, (returns_T[mask_T] - mean) / std) for returns_T, mask_T in pairs]


def scatter(mask_T: Bools, values: Floats) -> Floats:
    """`values` on the True rows of `mask_T`, 0 elsewhere."""
    out_T = np.zeros(mask_T.size)
    out_T[mask_T] = values
    return out_T
