"""The sampler's record beside the learner, row by row: what `stable_reinforce` and its alternatives
are built from.

Knows sequences as numbers in `sequence_N`, and no spans or ids. N rows, K recorded head. p is the
learner and q the sampler; both are tempered wherever they are compared, and never renormalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.losses.base import LossInputs, Metrics, StabilityInputs
from trimtab.losses.metrics import highest, lowest, means
from trimtab.losses.rows import (
    LOG_RATIO_LIMIT,
    clamp_log_ratio,
    inert,
    ratio_metrics,
    row_metrics,
)


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """Only `logp_N` and `head_logp_NK` carry a gradient, and both are untempered.

    tempered_N     sampled at another temperature than 1
    sampled_N      under a sampled span           recorded_N   and with a stability part
    advantages_N   0 outside recorded rows        logp_N       0 outside sampled rows
    logprobs_N     the `logprobs` input, likewise logq_N       the record's log q(x), 0 elsewhere
    log_ratio_N    log p(x) - log q(x), tempered, clamped, 0 outside recorded rows
    p_NK, q_NK     the head's probabilities, 0 in cells that are empty or not recorded
    p_rest_N, q_rest_N     what the head leaves over
    """

    sequence_N: Tensor
    tempered_N: Tensor
    sampled_N: Tensor
    recorded_N: Tensor
    clamped_N: Tensor
    advantages_N: Tensor
    logp_N: Tensor
    logprobs_N: Tensor
    logq_N: Tensor
    log_ratio_N: Tensor
    p_NK: Tensor
    q_NK: Tensor
    p_rest_N: Tensor
    q_rest_N: Tensor
    head_logp_NK: Tensor


def recorded_rows(inputs: LossInputs) -> RecordedRows:
    """Read one datum. The caller has seen to it that rows under sampled spans are finite and that
    no row outside recorded ones has an advantage."""
    stability = inputs.stability
    if stability is None:
        raise ValueError("a loss that needs stability was called without StabilityInputs")
    target_N = inputs.target_logprobs
    dtype = target_N.dtype
    sampled_N = stability.sequence_N >= 0
    recorded_N = sampled_N & stability.recorded_N
    target_tempered_N = inert(recorded_N, stability.target_tempered_N.detach().to(dtype))
    logq_N = inert(recorded_N, stability.logprobs_N.to(dtype))
    p_NK, q_NK, head_logp_NK = _head(stability, recorded_N, dtype)
    return RecordedRows(
        sequence_N=stability.sequence_N,
        tempered_N=stability.temperature_N != 1,
        sampled_N=sampled_N,
        recorded_N=recorded_N,
        clamped_N=(target_tempered_N - logq_N).abs() > LOG_RATIO_LIMIT,
        advantages_N=inert(recorded_N, inputs.tensors["advantages"].to(dtype)),
        logp_N=inert(sampled_N, target_N),
        logprobs_N=inert(sampled_N, inputs.tensors["logprobs"].to(dtype)),
        logq_N=logq_N,
        log_ratio_N=clamp_log_ratio(target_tempered_N - logq_N),
        p_NK=p_NK,
        q_NK=q_NK,
        p_rest_N=(1 - p_NK.sum(-1)).clamp(min=0),
        q_rest_N=(1 - q_NK.sum(-1)).clamp(min=0),
        head_logp_NK=head_logp_NK,
    )


def _head(
    stability: StabilityInputs, recorded_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """p, q and the learner's log p (with gradient) of the head; all 0 in cells without a record,
    and log p also where p = 0, which moves nothing."""
    logq_NK = stability.head_logprobs_NK.to(dtype)
    filled_NK = recorded_N[:, None] & (logq_NK > -torch.inf)
    logp_NK = stability.head_target_tempered_NK.detach().to(dtype)
    p_NK = torch.where(filled_NK, logp_NK, -torch.inf).exp()
    q_NK = torch.where(filled_NK, logq_NK, -torch.inf).exp()
    head_NK = stability.head_target_logprobs_NK
    return p_NK, q_NK, torch.where(filled_NK & (p_NK > 0), head_NK, 0.0)


def kl_penalty(rows: RecordedRows, kl_coeff: float) -> Tensor:
    """beta sum (log q(x) - log p(x)) over every row under a sampled span, and no other. log q is
    the caller's `logprobs`; the gradient is -beta on log p(x) whatever the advantage."""
    return kl_coeff * (rows.logprobs_N - rows.logp_N).sum()


def head_tv(rows: RecordedRows) -> Tensor:
    """(N,) total variation of p and q over the cells of the head and `rest`: a lower bound of the
    full one, 0 outside recorded rows."""
    head_N = (rows.p_NK - rows.q_NK).abs().sum(-1)
    return 0.5 * (head_N + (rows.p_rest_N - rows.q_rest_N).abs())


@torch.no_grad()
def record_metrics(rows: RecordedRows, inputs: LossInputs, kl_coeff: float) -> Metrics:
    """What the record says about sampler and learner, the same for every loss built on it."""
    assert inputs.stability is not None
    stability = inputs.stability
    tv_N = head_tv(rows)
    stale_N = stability.learner_step - stability.version_step_N
    known_N = rows.sampled_N & ~stale_N.isnan()
    active_N = (rows.advantages_N != 0) | (rows.sampled_N & (kl_coeff > 0))
    return {
        **row_metrics(active_N, rows.advantages_N, rows.clamped_N),
        **ratio_metrics(rows.log_ratio_N, rows.logq_N, rows.recorded_N),
        **means(rows.recorded_N, {"tv": tv_N, "head_mass": rows.q_NK.sum(-1)}),
        **means(known_N, {"staleness": stale_N}),
        **highest("tv", tv_N, rows.recorded_N),
        **highest("staleness", stale_N, known_N),
        **lowest("staleness", stale_N, known_N),
        "kl_penalty:sum": kl_penalty(rows, kl_coeff).float() if kl_coeff > 0 else 0.0,
    }
