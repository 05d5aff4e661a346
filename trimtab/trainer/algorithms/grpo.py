"""GRPO (arXiv 2402.03300): a reward against its group, in the group's standard deviations.

A = (R - mean) / (std + 1e-6) with the population's deviation, or R - mean with group_std=False
(arXiv 2503.20783). Differences from the paper: the token mean is over the optimizer step, not
over each sequence, and KL to a reference is taken off the reward; for a loss of its own there is
kl_loss_coef. Loss: ppo against the sampler's log-probabilities.
"""

from __future__ import annotations

import numpy as np

from trimtab.trainer.algorithms import groups
from trimtab.trainer.algorithms.base import Algorithm, Estimate, State
from trimtab.trainer.batch import Batch
from trimtab.trainer.config import Config

STD_EPS = 1e-6


def advantages(batch: Batch, config: Config, state: State | None) -> Estimate:
    """Rewards [1, 0] of one group: advantages ±1 (±0.5 without the deviation)."""
    scores_D = groups.scores(batch, config)
    advantages_D = np.empty_like(scores_D)
    for indices in groups.members(batch):
        scores_G = scores_D[indices]
        deviation = scores_G.std() + STD_EPS if config.group_std else 1.0
        advantages_D[indices] = (scores_G - scores_G.mean()) / deviation
    return groups.estimate(batch, advantages_D, config)


ALGORITHM = Algorithm(
    "grpo",
    "reward against its group's mean, in the group's standard deviations",
    loss="ppo",
    old_logprobs="sampler",
    smallest_group=2,
    advantages=advantages,
)
