"""Rows of one datum for the losses that compare a learner p with a sampler q at the target x.

Knows nothing of heads or sequences. N rows; `log_ratio` is log r = log p(x) - log q(x).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.losses.base import LossInputs, Metrics
from trimtab.losses.metrics import counts, highest, means

LOG_RATIO_LIMIT = 30.0  # exp(30) = 1e13 still squares and sums within float32


def inert(rows_N: Tensor, values_N: Tensor) -> Tensor:
    """`values_N` on `rows_N`, 0 elsewhere. Masking what goes *in* keeps both the value and the
    gradient of the other rows at exactly 0, whatever they hold: 0 * nan would be nan."""
    return torch.where(rows_N, values_N, 0.0)


def clamp_log_ratio(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """`active_N` has a nonzero advantage; the rest is 0 where a row is not active, so that
    log r = 0 and r = 1 there. `clamped_N` marks rows whose log r was beyond the limit, inert ones
    included as long as their `logprobs` says something (prompt rows carry 0)."""

    active_N: Tensor
    advantages_N: Tensor
    logp_N: Tensor
    logq_N: Tensor
    log_ratio_N: Tensor
    clamped_N: Tensor


def policy_rows(inputs: LossInputs) -> PolicyRows:
    target_N = inputs.target_logprobs
    advantages_N = inputs.tensors["advantages"].to(target_N.dtype)
    sampled_N = inputs.tensors["logprobs"].to(target_N.dtype)
    active_N = advantages_N != 0
    logp_N, logq_N = inert(active_N, target_N), inert(active_N, sampled_N)
    beyond_N = (target_N.detach() - sampled_N).abs() > LOG_RATIO_LIMIT  # False for nan
    return PolicyRows(
        active_N=active_N,
        advantages_N=advantages_N,
        logp_N=logp_N,
        logq_N=logq_N,
        log_ratio_N=clamp_log_ratio(logp_N - logq_N),
        clamped_N=beyond_N & (active_N | (sampled_N != 0)),
    )


@torch.no_grad()
def ratio_metrics(log_ratio_N: Tensor, logq_N: Tensor, rows_N: Tensor) -> Metrics:
    """How far learner and sampler are apart over `rows_N`; log r is clamped, so all is finite."""
    l_N = inert(rows_N, log_ratio_N.detach())
    q_N = inert(rows_N, logq_N)
    r_N = l_N.exp()
    values = {
        "kl_sample_train_v1": -l_N,
        "kl_sample_train_v2": 0.5 * l_N.square(),
        "kl_sample_train_v3": r_N - 1 - l_N,
        "entropy": -q_N,
        "tv_binary": q_N.exp() * torch.expm1(l_N).abs(),
        "is_weight": r_N,
        "is_weight_sq": r_N.square(),
    }
    return means(rows_N, values) | highest("is_weight", r_N, rows_N)


@torch.no_grad()
def row_metrics(active_N: Tensor, advantages_N: Tensor, clamped_N: Tensor) -> Metrics:
    """Counts that every RL loss reports."""
    return counts(
        {
            "active_tokens": active_N,
            "num_action_tokens": advantages_N != 0,
            "ratio_clamped": clamped_N,
        }
    )
