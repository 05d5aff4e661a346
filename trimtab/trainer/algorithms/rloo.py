"""RLOO (arXiv 2402.14740): a reward against the mean of the other completions of its prompt.

A_i = R_i - mean over j != i of R_j, an unbiased baseline. KL to a reference is taken off the
reward, sequence by sequence. Loss: importance_sampling against the sampler, which on policy is
REINFORCE.
"""

from __future__ import annotations

import numpy as np

from trimtab.trainer.algorithms import groups
from trimtab.trainer.algorithms.base import Algorithm, Estimate, State
from trimtab.trainer.batch import Batch
from trimtab.trainer.config import Config


def advantages(batch: Batch, config: Config, state: State | None) -> Estimate:
    """Rewards [1, 0, 0] of one group: advantages [1, -0.5, -0.5]."""
    scores_D = groups.scores(batch, config)
    advantages_D = np.empty_like(scores_D)
    for indices in groups.members(batch):
        scores_G = scores_D[indices]
        others = (scores_G.sum() - scores_G) / (len(indices) - 1)
        advantages_D[indices] = scores_G - others
    return groups.estimate(batch, advantages_D, config)


ALGORITHM = Algorithm(
    "rloo",
    "reward against the mean of the prompt's other completions",
    loss="importance_sampling",
    old_logprobs="sampler",
    smallest_group=2,
    advantages=advantages,
)
