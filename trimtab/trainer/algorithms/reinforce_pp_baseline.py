"""REINFORCE++-baseline: the group's mean off each reward, then whitening over the whole batch.

KL to a reference is a k2 loss of its own (`kl_loss_coef`), not a part of the reward. Otherwise as
reinforce_pp.
"""

from __future__ import annotations

from trimtab.trainer.algorithms import reinforce_pp
from trimtab.trainer.algorithms.base import Algorithm, Estimate, State
from trimtab.trainer.batch import Batch
from trimtab.trainer.config import Config


def advantages(batch: Batch, config: Config, state: State | None) -> Estimate:
    """Rewards [1, 0, 1, 1] of two groups: centred [0.5, -0.5, 0, 0], then whitened."""
    return reinforce_pp.advantages(batch, config, state, group_baseline=True)


ALGORITHM = Algorithm(
    "reinforce_pp_baseline",
    "reward against its group's mean, then whitened over all tokens of the batch",
    loss="ppo",
    old_logprobs="recompute",
    smallest_group=2,
    advantages=advantages,
)
