"""Variants of `stable_reinforce` for the open questions: the weight of tokens with A >= 0, the
decay of the trace. Private to the benchmark; the server offers none of them.

r = p/q compares the learner of now with the sampler; `fresh` tokens were drawn from the learner's
current weights; s = p/p_v and b = q/p_v split r = s/b into what the weights' age did and what the
sampler's numerics did, p_v being the learner's own arithmetic on the sampling weights (the input
`scored_logprobs`, which costs one more forward pass a sequence).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimtab.losses import LOSSES
from trimtab.losses.base import Loss, LossInputs, LossOutputs
from trimtab.losses.record import RecordedRows, kl_penalty, record_metrics, recorded_rows
from trimtab.losses.rows import clamp_log_ratio
from trimtab.losses.stable_reinforce import (
    SPEC,
    Constants,
    centring_coefficients,
    leaky_trace,
    with_constants,
)

SCORED = "scored_logprobs"


@dataclass(frozen=True)
class Rows:
    """What a positive weight may look at, all (N,) and detached."""

    r: Tensor
    s: Tensor
    b: Tensor
    fresh: Tensor


Weight = Callable[[Rows], Tensor]

POSITIVE: dict[str, Weight] = {
    "one": lambda x: torch.ones_like(x.r),
    "min(1,8r)": lambda x: (8 * x.r).clamp(max=1),
    "min(1,4r)": lambda x: (4 * x.r).clamp(max=1),
    "min(1,2r)": lambda x: (2 * x.r).clamp(max=1),
    "min(1,1.25r)": lambda x: (1.25 * x.r).clamp(max=1),
    "min(1,sqrt r)": lambda x: x.r.sqrt().clamp(max=1),
    "min(r,2)": lambda x: x.r.clamp(max=2),
    "fresh min(r,2), stale min(1,2r)": lambda x: torch.where(
        x.fresh, x.r.clamp(max=2), (2 * x.r).clamp(max=1)
    ),
    "min(1,2s)/b": lambda x: (2 * x.s).clamp(max=1) * (1 / x.b).clamp(max=2),
    "1/b": lambda x: (1 / x.b).clamp(max=2),
}


def positive_variant(name: str, weight: Weight) -> Loss:
    def fn(inputs: LossInputs, config: Mapping[str, float]) -> LossOutputs:
        rows = recorded_rows(inputs)
        weight_N = _weight(rows, inputs, weight)
        A_N = rows.advantages_N
        moved_NK = rows.head_logp_NK - rows.head_logp_NK.detach()
        trace_N = leaky_trace(rows.log_ratio_N.detach(), rows.sequence_N, 0.9)
        centring_N = (centring_coefficients(rows) * moved_NK).sum(-1)
        centring_N = torch.where(A_N < 0, A_N * trace_N, 0.0) * centring_N
        negative_N = trace_N * rows.log_ratio_N.detach().exp().clamp(max=1)
        weight_N = torch.where(A_N < 0, negative_N, weight_N)
        loss = -(A_N * weight_N * rows.logp_N - centring_N).sum()
        loss = loss + kl_penalty(rows, config["kl_coeff"])
        return LossOutputs(loss, record_metrics(rows, inputs, config["kl_coeff"]))

    return Loss(SPEC, fn)


@torch.no_grad()
def _weight(rows: RecordedRows, inputs: LossInputs, weight: Weight) -> Tensor:
    stability = inputs.stability
    assert stability is not None
    scored_N = inputs.tensors.get(SCORED, rows.logq_N)
    log_b_N = torch.where(rows.recorded_N, rows.logq_N - scored_N, 0.0)
    r_N = rows.log_ratio_N.exp()
    b_N = clamp_log_ratio(log_b_N).exp()
    fresh_N = stability.version_step_N == stability.learner_step
    return weight(Rows(r_N, r_N * b_N, b_N, fresh_N))


def gspo_within(share: float) -> Loss:
    """GSPO with thresholds for short answers: the served ones are the paper's, made for answers of
    thousands of tokens, where a mean log-ratio is tiny."""
    gspo = LOSSES["gspo"]
    limits = {"clip_low_threshold": 1 - share, "clip_high_threshold": 1 + share}
    config = {name: replace(gspo.spec.config[name], default=limits[name]) for name in limits}
    return Loss(replace(gspo.spec, config=config), gspo.fn)


VARIANTS: dict[str, Loss] = {
    "gspo 5%": gspo_within(0.05),
    **{name: positive_variant(name, weight) for name, weight in POSITIVE.items()},
    **{
        f"decay {decay}": with_constants(Constants(trace_decay=decay)) for decay in (0.0, 0.8, 0.97)
    },
}
