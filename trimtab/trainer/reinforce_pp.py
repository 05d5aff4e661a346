"""REINFORCE++: from scores and log-probabilities to an advantage for every action token.

`advantages` composes, in this order, the steps of `reward_shaping` (one number a sequence) and of
`returns` (one number a token):

    truncation rule -> group baseline -> normalise -> clip -> scale
    -> R on the last action token, less kl_coef KL on each -> reward-to-go -> whiten

Call it once a rollout batch, before any mini-batch is cut: its statistics are those of the whole
batch. Knows no prompts, no service and no loss. D sequences of the batch, T tokens of one sequence,
`_D_T` a ragged list over D of (T,) arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import Invalid
from trimtab.trainer import reinforce_pp_metrics as report
from trimtab.trainer.reinforce_pp_config import ReinforcePPConfig
from trimtab.trainer.reinforce_pp_state import ReinforcePPState
from trimtab.trainer.returns import Bools, clamp, place_rewards, returns_to_go, whiten
from trimtab.trainer.reward_shaping import (
    clip,
    replace_truncated,
    scale_factor,
    standardize,
    subtract_group_mean,
)
from trimtab.trainer.rollout_batch import Ragged, RolloutBatch, check
from trimtab.trainer.stats import Floats, moments

__all__ = ["Advantages", "ReinforcePPConfig", "ReinforcePPState", "advantages"]


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """`advantages` and `action_mask` have one array a sequence; the mask is the caller's without
    the sequences that were left out (`left_out`), and advantages are 0 outside it. Divide by
    `action_mask` sums over an optimizer step for the token mean. `returns` is before whitening."""

    advantages: list[Floats]
    returns: list[Floats]
    action_mask: list[Bools]
    left_out: NDArray[np.bool_]
    metrics: dict[str, float]
    state: ReinforcePPState


def advantages(
    rewards: Iterable[object],
    logprobs: Ragged,
    ref_logprobs: Ragged | None,
    action_mask: Ragged,
    *,
    config: ReinforcePPConfig,
    group_ids: Iterable[Hashable] | None = None,
    truncated: Iterable[object] | None = None,
    token_rewards: Ragged | None = None,
    state: ReinforcePPState | None = None,
) -> Advantages:
    """One score a sequence; `logprobs` are log pi_old, `ref_logprobs` log pi_ref, aligned with
    `action_mask`. Rows outside the mask may hold anything.

    A sequence without action tokens enters no statistic and is counted; so does a truncated one
    under `mask_truncated`, and one whose group has nobody else left under `group_baseline`.
    `token_rewards` are added to the tokens as they are, beside the KL term. A non-finite reward, or
    a batch with nothing to train on, is an error.

    >>> result = advantages([1.0, 0.0], [[-1.0, -1.0], [-2.0]], None, [[1, 1], [1]],
    ...                     config=ReinforcePPConfig())
    >>> [array.round(3).tolist() for array in result.advantages]
    [[0.707, 0.707], [-1.414]]
    """
    batch = check(
        rewards,
        logprobs,
        ref_logprobs,
        action_mask,
        group_ids=group_ids,
        truncated=truncated,
        token_rewards=token_rewards,
    )
    _require(config, batch)
    kept_D, counts = _kept(config, batch)
    mask_D_T = [mask_T & kept for mask_T, kept in zip(batch.mask_D_T, kept_D, strict=True)]
    scores_D, state, shaped = _shape(config, batch, kept_D, state or ReinforcePPState())
    returns_D_T = _returns(config, batch, scores_D, mask_D_T)
    if config.whiten == "none":
        whitened_D_T = [returns_T.copy() for returns_T in returns_D_T]
    else:
        whitened_D_T = whiten(returns_D_T, mask_D_T, config.whiten)
    metrics = counts | shaped
    metrics |= report.kl(batch.log_ratio_D_T, mask_D_T, config.kl_clamp)
    metrics |= report.tokens("return", returns_D_T, mask_D_T)
    metrics |= report.tokens("advantage", whitened_D_T, mask_D_T)
    return Advantages(whitened_D_T, returns_D_T, mask_D_T, ~kept_D, metrics, state)


def _require(config: ReinforcePPConfig, batch: RolloutBatch) -> None:
    """What these options need of the data."""
    if config.kl_coef > 0 and batch.log_ratio_D_T is None:
        raise Invalid(f"ref_logprobs: found None, expected arrays, as kl_coef is {config.kl_coef}")
    truncation = config.mask_truncated or config.truncated_reward is not None
    if truncation and batch.truncated_D is None:
        name = "mask_truncated" if config.mask_truncated else "truncated_reward"
        raise Invalid(f"truncated: found None, expected a flag for each sequence, as {name} is set")
    if config.group_baseline:
        _require_groups(batch)


def _require_groups(batch: RolloutBatch) -> None:
    if batch.group_D is None:
        raise Invalid("group_ids: found None, expected one a reward, as group_baseline is on")
    alone = np.flatnonzero(np.bincount(batch.group_D)[batch.group_D] == 1)
    if alone.size:
        raise Invalid(
            f"group_ids[{alone[0]}]: found a group of one, expected at least two sequences of each "
            "prompt, as group_baseline is on"
        )


def _kept(config: ReinforcePPConfig, batch: RolloutBatch) -> tuple[Bools, dict[str, float]]:
    """Which sequences enter losses and statistics, and why the others do not."""
    empty_D = np.array([not mask_T.any() for mask_T in batch.mask_D_T])
    cut_D = np.zeros_like(empty_D)
    if config.mask_truncated and batch.truncated_D is not None:
        cut_D = batch.truncated_D & ~empty_D
    kept_D = ~(empty_D | cut_D)
    alone_D = np.zeros_like(empty_D)
    if config.group_baseline and batch.group_D is not None:
        left = np.bincount(batch.group_D, weights=kept_D)
        alone_D = kept_D & (left[batch.group_D] == 1)
    reasons = {"empty": empty_D, "truncated": cut_D, "alone": alone_D}
    kept_D = kept_D & ~alone_D
    if not kept_D.any():
        found = ", ".join(f"{int(rows.sum())} {name}" for name, rows in reasons.items())
        raise Invalid(f"action_mask: found no action token to train on ({kept_D.size}: {found})")
    return kept_D, report.counts(batch.mask_D_T, kept_D, batch.truncated_D, reasons)


def _shape(
    config: ReinforcePPConfig, batch: RolloutBatch, kept_D: Bools, state: ReinforcePPState
) -> tuple[Floats, ReinforcePPState, dict[str, float]]:
    """The steps on scores, over the kept sequences alone; 0 for the others."""
    rewards = batch.rewards_D[kept_D]
    metrics = report.scores("raw", rewards)
    if config.truncated_reward is not None and batch.truncated_D is not None:
        rewards = replace_truncated(rewards, batch.truncated_D[kept_D], config.truncated_reward)
        metrics |= report.scores("truncation", rewards)
    if config.group_baseline and batch.group_D is not None:
        rewards = subtract_group_mean(rewards, batch.group_D[kept_D])
        metrics |= report.scores("baseline", rewards)
    steps = (_clip, _normalize) if config.clip_before_norm else (_normalize, _clip)
    for step in (*steps, _scale):
        rewards, state, found = step(config, rewards, state)
        metrics |= found
    scores_D = np.zeros(kept_D.size)
    scores_D[kept_D] = rewards
    return scores_D, state, metrics


Shaped = tuple[Floats, ReinforcePPState, dict[str, float]]


def _normalize(config: ReinforcePPConfig, rewards: Floats, state: ReinforcePPState) -> Shaped:
    mean, std = config.reward_mean, config.reward_std
    if config.reward_norm == "none":
        return rewards, state, {}
    if config.reward_norm == "running":
        state = ReinforcePPState(state.scores.merge(rewards), state.returns)
        mean, std = state.scores.mean, state.scores.var**0.5
    if mean is None or std is None:
        mean, var = moments(rewards)
        std = var**0.5
    rewards = standardize(rewards, mean, std)
    used = {"reward/norm_mean": mean, "reward/norm_std": std}
    return rewards, state, report.scores("norm", rewards) | used


def _clip(config: ReinforcePPConfig, rewards: Floats, state: ReinforcePPState) -> Shaped:
    if config.reward_clip is None:
        return rewards, state, {}
    clipped = clip(rewards, *config.reward_clip)
    fraction = {"reward/clip_frac": float(np.mean(clipped != rewards))}
    return clipped, state, report.scores("clip", clipped) | fraction


def _scale(config: ReinforcePPConfig, rewards: Floats, state: ReinforcePPState) -> Shaped:
    factor = scale_factor(config.reward_scale)
    if config.reward_scale_mode == "running_return_std":
        state = ReinforcePPState(state.scores, state.returns.merge(rewards))
        factor = scale_factor(config.reward_scale, state.returns.var)
    rewards = rewards * factor
    return rewards, state, report.scores("scale", rewards) | {"reward/scale_factor": factor}


def _returns(
    config: ReinforcePPConfig, batch: RolloutBatch, scores_D: Floats, mask_D_T: list[Bools]
) -> list[Floats]:
    """KL, token rewards and reward-to-go of each sequence."""
    returns_D_T = []
    for i, mask_T in enumerate(mask_D_T):
        kl_T = extra_T = None
        if batch.log_ratio_D_T is not None:
            kl_T = clamp(batch.log_ratio_D_T[i], config.kl_clamp)
        if batch.token_rewards_D_T is not None:
            extra_T = batch.token_rewards_D_T[i]
        rewards_T = place_rewards(float(scores_D[i]), kl_T, mask_T, config.kl_coef, extra_T)
        returns_D_T.append(returns_to_go(rewards_T, mask_T, config.gamma))
    return returns_D_T
