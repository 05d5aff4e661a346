"""The losses that need nothing recorded: a row per formula of docs/losses.md.

Every one sums over the rows of one datum. A row whose advantage (or weight) is 0 contributes
exactly nothing, to value and gradient, whatever its log-probabilities are. `sg` in a docstring is
stop-gradient, written `.detach()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from trimtab.losses.base import Loss, LossInputs, LossOutputs, Metrics
from trimtab.losses.metrics import counts, means
from trimtab.losses.rows import (
    PolicyRows,
    clamp_log_ratio,
    inert,
    policy_rows,
    ratio_metrics,
    row_metrics,
)
from trimtab.types import ConfigKey, LossSpec

Config = Mapping[str, float]


def cross_entropy(inputs: LossInputs, config: Config) -> LossOutputs:
    """-sum w log p(x), for (N,) or (N, K) targets; without `weights`, w = 1.

    Weights may be any real numbers: w = [0, 2] on log p = [-1, -3] gives 6 and gradient [0, -2].
    """
    target = inputs.target_logprobs
    weights = inputs.tensors.get("weights")
    weights = torch.ones_like(target) if weights is None else weights.to(target.dtype)
    active = weights != 0
    loss = -(weights * inert(active, target)).sum()
    return LossOutputs(loss, counts({"active_tokens": active.flatten()}))


def importance_sampling(inputs: LossInputs, config: Config) -> LossOutputs:
    """-sum r A. Gradient -r A on log p(x); r is bounded by its clamp alone."""
    rows = policy_rows(inputs)
    loss = -(rows.log_ratio_N.exp() * rows.advantages_N).sum()
    return LossOutputs(loss, _metrics(rows))


def ppo(inputs: LossInputs, config: Config) -> LossOutputs:
    """-sum min(r A, clip(r, lo, hi) A). Gradient -r A, or 0 where the clipped branch is the lower:
    r > hi with A > 0, r < lo with A < 0."""
    rows = policy_rows(inputs)
    return _clipped(rows, rows.log_ratio_N.exp(), config, _metrics(rows))


def cispo(inputs: LossInputs, config: Config) -> LossOutputs:
    """-sum sg[clip(r, lo, hi)] A log p(x)."""
    rows = policy_rows(inputs)
    lo, hi = _bounds(config)
    ratio_N = rows.log_ratio_N.detach().exp()
    loss = -(ratio_N.clamp(lo, hi) * rows.advantages_N * rows.logp_N).sum()
    clip = _clip_metrics(rows, rows.active_N & (ratio_N < lo), rows.active_N & (ratio_N > hi))
    return LossOutputs(loss, _metrics(rows) | clip)


def dro(inputs: LossInputs, config: Config) -> LossOutputs:
    """-sum (A log p(x) - beta/2 (log r)^2), over rows with an advantage."""
    rows = policy_rows(inputs)
    penalty_N = 0.5 * config["beta"] * rows.log_ratio_N.square()
    loss = -(rows.advantages_N * rows.logp_N - penalty_N).sum()
    return LossOutputs(loss, _metrics(rows))


def gspo(inputs: LossInputs, config: Config) -> LossOutputs:
    """-sum min(s_t A, clip(s_t, lo, hi) A) with s_t = sg[s / p(x)] p(x) and s = exp of the mean
    log r over the datum's rows of `sequence_ratio_mask` (1 if there are none).

    A row acts by its advantage, inside the mask or not; a row inside the mask enters s whatever its
    advantage. Gradient -s A, or 0 on the clipped branch.
    """
    rows = policy_rows(inputs)
    mask_N = inputs.tensors["sequence_ratio_mask"] != 0
    target_N = inert(mask_N, inputs.target_logprobs.detach())
    sampled_N = inert(mask_N, inputs.tensors["logprobs"].to(target_N.dtype))
    datum_N = inputs.datum_N
    datum_N = torch.zeros_like(mask_N, dtype=torch.int64) if datum_N is None else datum_N
    log_ratio_N = clamp_log_ratio(target_N - sampled_N)
    total_D = log_ratio_N.new_zeros(int(datum_N[-1]) + 1).index_add(0, datum_N, log_ratio_N)
    count_D = torch.zeros_like(total_D).index_add(0, datum_N, mask_N.to(total_D.dtype))
    mean_D = total_D / count_D.clamp(min=1)
    ratio_N = (mean_D[datum_N] + rows.logp_N - rows.logp_N.detach()).exp()
    both_N = rows.active_N & mask_N
    metrics = {
        **row_metrics(rows.active_N, rows.advantages_N, rows.clamped_N),
        **ratio_metrics(rows.log_ratio_N, rows.logq_N, both_N),
        "sequence_ratio/num:sum": mean_D.exp().sum().float(),
        "sequence_ratio/den:sum": float(len(mean_D)),
    }
    return _clipped(rows, ratio_N, config, metrics)


def _bounds(config: Config) -> tuple[float, float]:
    return config["clip_low_threshold"], config["clip_high_threshold"]


def _clipped(rows: PolicyRows, ratio_N: Tensor, config: Config, metrics: Metrics) -> LossOutputs:
    """-sum min(ratio A, clip(ratio) A), written by its branches: at a bound the gradient passes."""
    lo, hi = _bounds(config)
    low_N = (rows.advantages_N < 0) & (ratio_N < lo)
    high_N = (rows.advantages_N > 0) & (ratio_N > hi)
    kept_N = torch.where(low_N | high_N, ratio_N.detach().clamp(lo, hi), ratio_N)
    loss = -(kept_N * rows.advantages_N).sum()
    return LossOutputs(loss, metrics | _clip_metrics(rows, low_N, high_N))


@torch.no_grad()
def _clip_metrics(rows: PolicyRows, low_N: Tensor, high_N: Tensor) -> Metrics:
    shares = {"clip_frac_low": low_N.float(), "clip_frac_high": high_N.float()}
    return means(rows.active_N, shares)


def _metrics(rows: PolicyRows) -> Metrics:
    counts = row_metrics(rows.active_N, rows.advantages_N, rows.clamped_N)
    return counts | ratio_metrics(rows.log_ratio_N, rows.logq_N, rows.active_N)


def _clip_keys(low: float, high: float) -> dict[str, ConfigKey]:
    return {
        "clip_low_threshold": ConfigKey(low, low=0.0, doc="lower bound of the ratio itself"),
        "clip_high_threshold": ConfigKey(high, low=0.0, doc="upper bound of the ratio itself"),
    }


_RATIO_INPUTS: Mapping[str, Literal["required", "optional"]] = {
    "target_tokens": "required",
    "logprobs": "required",
    "advantages": "required",
}
_CLIP_ORDER = (("clip_low_threshold", "clip_high_threshold"),)

POLICY_LOSSES = (
    Loss(
        LossSpec(
            "cross_entropy",
            inputs={"target_tokens": "required", "weights": "optional"},
            allows_alternatives=True,
            doc="weighted negative log-likelihood",
        ),
        cross_entropy,
    ),
    Loss(
        LossSpec(
            "importance_sampling",
            inputs=_RATIO_INPUTS,
            finite_where="advantages",
            doc="the exact ratio, unclipped",
        ),
        importance_sampling,
    ),
    Loss(
        LossSpec(
            "ppo",
            inputs=_RATIO_INPUTS,
            config=_clip_keys(0.8, 1.2),
            finite_where="advantages",
            ordered=_CLIP_ORDER,
            doc="the ratio, clipped where clipping lowers the objective",
        ),
        ppo,
    ),
    Loss(
        LossSpec(
            "cispo",
            inputs=_RATIO_INPUTS,
            config=_clip_keys(0.0, 4.0),
            finite_where="advantages",
            ordered=_CLIP_ORDER,
            doc="REINFORCE weighted with the clipped ratio",
        ),
        cispo,
    ),
    Loss(
        LossSpec(
            "dro",
            inputs=_RATIO_INPUTS,
            config={"beta": ConfigKey(0.05, low=0.0, doc="weight of the squared log-ratio")},
            finite_where="advantages",
            doc="direct reward optimisation: REINFORCE and a squared pull to the sampler",
        ),
        dro,
    ),
    Loss(
        LossSpec(
            "gspo",
            inputs={**_RATIO_INPUTS, "sequence_ratio_mask": "required"},
            config=_clip_keys(0.9997, 1.0004),
            finite_where="sequence_ratio_mask",
            ordered=_CLIP_ORDER,
            doc="PPO with one ratio for the whole datum, the geometric mean over its mask",
        ),
        gspo,
    ),
)
