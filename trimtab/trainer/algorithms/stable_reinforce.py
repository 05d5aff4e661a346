"""REINFORCE with a group-mean baseline under the loss `stable_reinforce`.

The loss weighs each token by what was recorded when it was sampled, so the run stays stable when
sampler and learner differ: asynchronous runs, low precision. It needs sampling clients that record
(`record_stability_info`) and q itself as `logprobs`, never a recomputed π_old.
"""

from __future__ import annotations

import numpy as np

from trimtab.trainer.algorithms import groups
from trimtab.trainer.algorithms.base import Algorithm, Estimate, State
from trimtab.trainer.batch import Batch
from trimtab.trainer.config import Config


def advantages(batch: Batch, config: Config, state: State | None) -> Estimate:
    """Rewards [1, 0] of one group: advantages ±0.5. No division: it would undo β's scale."""
    scores_D = groups.scores(batch, config)
    advantages_D = np.empty_like(scores_D)
    for indices in groups.members(batch):
        advantages_D[indices] = scores_D[indices] - scores_D[indices].mean()
    return groups.estimate(batch, advantages_D, config)


ALGORITHM = Algorithm(
    "stable_reinforce",
    "reward against its group's mean, under a loss that tolerates an old or imprecise sampler",
    loss="stable_reinforce",
    old_logprobs="sampler",
    smallest_group=2,
    advantages=advantages,
)
