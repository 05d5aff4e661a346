"""PPO with a dual clip and a k2 loss to a reference, computed on the client.

The server returns log-probabilities, this side differentiates, the server takes the gradient
(`forward_backward_custom`): one forward pass more than a loss on the server. The one module of the
trainer that needs torch, imported when it is used.

N rows of a datum. r = p / π_old, A the advantage, both as in the server's `ppo`:

    -min(r A, clip(r, low, high) A), for A < 0 at most c |A|, plus λ ½ (log p - log π_ref)²
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tinker

from trimtab.trainer.ppo import LOG_RATIO_LIMIT

Loss = Callable[[list[tinker.Datum], list[Any]], tuple[Any, dict[str, float]]]


@dataclass(frozen=True)
class PPOTerms:
    """`kl_loss_coef` λ comes divided as the advantages are. None: no dual clip."""

    clip_low_threshold: float
    clip_high_threshold: float
    dual_clip: float | None
    kl_loss_coef: float


def ppo_loss(terms: PPOTerms) -> Loss:
    """For `forward_backward_custom`. A datum's inputs: `logprobs` (log π_old), `advantages`, `mask`
    and, where λ > 0, `ref_logprobs`."""

    def loss(data: list[tinker.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        pairs = [
            datum_loss(terms, {k: t.to_torch() for k, t in d.loss_fn_inputs.items()}, p_N)
            for d, p_N in zip(data, logprobs, strict=True)
        ]
        return sum(value for value, _ in pairs), _sum([metrics for _, metrics in pairs])

    return loss


def datum_loss(
    terms: PPOTerms, inputs: dict[str, Any], logp_N: Any
) -> tuple[Any, dict[str, float]]:
    """The loss of one datum and its metrics, as numerators and denominators."""
    import torch

    A_N, mask_N = inputs["advantages"], inputs["mask"] > 0
    active_N = A_N != 0
    logp_active_N = torch.where(active_N, logp_N, 0.0)
    log_ratio_N = logp_active_N - torch.where(active_N, inputs["logprobs"], 0.0)
    r_N = log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    low_N = (A_N < 0) & (r_N < terms.clip_low_threshold)
    high_N = (A_N > 0) & (r_N > terms.clip_high_threshold)
    dual_N = (A_N < 0) & (r_N > (terms.dual_clip or torch.inf))
    kept_N = torch.where(low_N, terms.clip_low_threshold, r_N)
    kept_N = torch.where(high_N, terms.clip_high_threshold, kept_N)
    kept_N = torch.where(dual_N, terms.dual_clip or 0.0, kept_N)
    # `0 * logp_N` ties the loss to every row: a datum without advantages still has a gradient.
    loss = -(kept_N * A_N).sum() + 0.0 * torch.nan_to_num(logp_N).sum()
    columns = {
        "clip_frac_low": (low_N, active_N),
        "clip_frac_high": (high_N, active_N),
        "clip_frac_dual": (dual_N, active_N),
        "is_weight": (torch.where(active_N, r_N, 0.0), active_N),
    }
    if terms.kl_loss_coef > 0:
        l_N = torch.where(mask_N, logp_N, 0.0) - torch.where(mask_N, inputs["ref_logprobs"], 0.0)
        loss = loss + terms.kl_loss_coef * 0.5 * l_N.square().sum()
        columns["kl_loss_k2"] = (0.5 * l_N.square(), mask_N)
    return loss, _pairs(columns)


def _pairs(columns: dict[str, tuple[Any, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, (values_N, rows_N) in columns.items():
        found[f"{name}/num:sum"] = float(values_N.detach().sum())
        found[f"{name}/den:sum"] = float(rows_N.sum())
    return found


def _sum(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(found[name] for found in metrics) for name in metrics[0]}
