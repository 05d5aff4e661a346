"""REINFORCE++ (arXiv 2501.03262): no critic, no group needed, PPO's stabilisers.

Token-level KL in the reward, reward-to-go, advantages whitened over all tokens of the batch; the
mathematics is trimtab.trainer.reinforce_pp. Loss: ppo against a recomputed π_old, because the
sampler's numbers are not the learner's: only then is the ratio 1 at the first update.
"""

from __future__ import annotations

from trimtab.trainer import reinforce_pp as pure
from trimtab.trainer.algorithms.base import Algorithm, Estimate, State
from trimtab.trainer.batch import Batch
from trimtab.trainer.config import Config, shaping


def advantages(
    batch: Batch, config: Config, state: State | None, *, group_baseline: bool = False
) -> Estimate:
    """Rewards [1, 0] of two sequences of one token: advantages ±1."""
    result = pure.advantages(
        batch.rewards_D.tolist(),
        batch.old_D_N,
        batch.ref_D_N,
        batch.mask_D_N,
        config=shaping(config, group_baseline=group_baseline),
        group_ids=batch.group_D.tolist(),
        truncated=batch.truncated_D.tolist(),
        state=None if state is None else pure.ReinforcePPState.from_json(state),
    )
    return Estimate(result.advantages, result.metrics, result.state.to_json())


ALGORITHM = Algorithm(
    "reinforce_pp",
    "advantages whitened over all tokens of the batch, KL to a reference in the reward",
    loss="ppo",
    old_logprobs="recompute",
    smallest_group=1,
    advantages=advantages,
)
