"""Alternatives to `stable_reinforce` for the stability benchmark. Not in `LOSSES`: a server offers
them only when a setting asks for it.

Each is built on the same record, takes the same inputs and adds the same penalty. Weights are
detached and compare tempered p with recorded q. `s` is a sequence of the datum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.losses.base import Loss, LossInputs, LossOutputs
from trimtab.losses.record import (
    RecordedRows,
    head_tv,
    kl_penalty,
    record_metrics,
    recorded_rows,
)
from trimtab.losses.rows import clamp_log_ratio
from trimtab.losses.stable_reinforce import SPEC
from trimtab.types import LossSpec

TAIL_FLOOR = 1e-6
DPPO_DELTA, DPPO_CAP = 0.15, 10.0

PerRow = Callable[[RecordedRows], Tensor]


@dataclass(frozen=True, slots=True)
class Centred:
    """Constants of the objectives that centre both signs: `cap` of the ratio, `delta_negative`
    beyond which q - p drops a negative token, `delta_sequence` the mean TV that a sequence may show
    before it is scaled down. `truncate` False is plain score centring (weight 1 everywhere)."""

    cap: float = 2.0
    delta_negative: float = 0.5
    delta_sequence: float = 0.1
    truncate: bool = True


def reinforce(rows: RecordedRows) -> Tensor:
    """-A log p(x): no correction at all."""
    return -rows.advantages_N * rows.logp_N


def topr_token(rows: RecordedRows) -> Tensor:
    """-A w log p(x), w = 1 for A >= 0, min(1, r) for A < 0."""
    return _topr(rows, rows.log_ratio_N)


def topr(rows: RecordedRows) -> Tensor:
    """As topr_token, with the ratio of the whole sequence (Le Roux et al., 2025)."""
    index_N, count = _sequences(rows.sequence_N)
    sum_S = rows.log_ratio_N.new_zeros(count).index_add(0, index_N, rows.log_ratio_N)
    return _topr(rows, clamp_log_ratio(sum_S)[index_N])


def _topr(rows: RecordedRows, log_ratio_N: Tensor) -> Tensor:
    weight_N = log_ratio_N.exp().clamp(max=1)
    weight_N = torch.where(rows.advantages_N < 0, weight_N, 1.0)
    return -rows.advantages_N * weight_N * rows.logp_N


def dppo(rows: RecordedRows) -> Tensor:
    """-A min(r, 10) log p(x), dropped where the update would carry p further from q and the TV over
    the recorded cells is above 0.15 already (Divergence PPO, top-K form)."""
    ratio_N = rows.log_ratio_N.exp()
    away_N = torch.where(rows.advantages_N > 0, ratio_N > 1, ratio_N < 1)
    kept_N = ~(away_N & (head_tv(rows) > DPPO_DELTA))
    return -rows.advantages_N * ratio_N.clamp(max=DPPO_CAP) * kept_N * rows.logp_N


def centred(rows: RecordedRows, constants: Centred) -> Tensor:
    """-G_s A (w_x log p(x) - sum over the head of kappa_v log p_v), which subtracts the mean push
    E_q[w grad log p] for both signs of A; kappa_v = q_v w_v - alpha p_v, alpha that of the tail."""
    A_N = rows.advantages_N
    weight_N, kappa_NK = _kappa(rows, constants)
    gate_N = torch.ones_like(A_N)
    if constants.truncate:
        gate_N = sequence_gate(head_tv(rows), rows, constants.delta_sequence)
    centring_N = (kappa_NK * rows.head_logp_NK).sum(-1)
    return -gate_N * A_N * (weight_N * rows.logp_N - centring_N)


def _kappa(rows: RecordedRows, constants: Centred) -> tuple[Tensor, Tensor]:
    """(weight of x (N,), kappa (N, K))."""
    tail_q_N, tail_p_N = (rest.clamp(min=TAIL_FLOOR) for rest in (rows.q_rest_N, rows.p_rest_N))
    rho_N = tail_q_N / tail_p_N
    if not constants.truncate:
        alpha_N = rho_N.clamp(max=10)
        return torch.ones_like(rho_N), rows.q_NK - alpha_N[:, None] * rows.p_NK
    q_N = rows.logq_N.exp()
    r_N = rows.log_ratio_N.exp()
    negative_N = rows.advantages_N < 0
    kept_N = ~(negative_N & (q_N - q_N * r_N >= constants.delta_negative))
    kept_NK = ~(negative_N[:, None] & (rows.q_NK - rows.p_NK >= constants.delta_negative))
    push_NK = torch.minimum(rows.p_NK, constants.cap * rows.q_NK) * kept_NK
    alpha_N = (constants.cap * rho_N).clamp(max=1)
    return r_N.clamp(max=constants.cap) * kept_N, push_NK - alpha_N[:, None] * rows.p_NK


def sequence_gate(tv_N: Tensor, rows: RecordedRows, delta: float) -> Tensor:
    """(N,) min(1, delta / mean TV of the row's sequence)."""
    index_N, count = _sequences(rows.sequence_N)
    zeros_S = tv_N.new_zeros(count)
    mean_S = zeros_S.index_add(0, index_N, tv_N)
    mean_S = mean_S / zeros_S.index_add(0, index_N, torch.ones_like(tv_N))
    return (delta / mean_S.clamp(min=delta))[index_N]


def _sequences(sequence_N: Tensor) -> tuple[Tensor, int]:
    """Numbers 0 to S-1 for the sequences of a datum (rows outside any share one)."""
    numbers, index_N = torch.unique(sequence_N, return_inverse=True)
    return index_N, len(numbers)


def recorded_loss(name: str, per_row: PerRow, doc: str) -> Loss:
    """A loss from its row terms: their sum over recorded rows, the penalty and the metrics."""

    def fn(inputs: LossInputs, config: Mapping[str, float]) -> LossOutputs:
        rows = recorded_rows(inputs)
        loss = per_row(rows).sum()
        if config["kl_coeff"] > 0:
            loss = loss + kl_penalty(rows, config["kl_coeff"])
        return LossOutputs(loss, record_metrics(rows, inputs, config["kl_coeff"]))

    spec = LossSpec(
        name,
        inputs=SPEC.inputs,
        config=SPEC.config,
        needs_stability=True,
        finite_where="sampled",
        doc=doc,
    )
    return Loss(spec, fn)


def centred_loss(name: str, constants: Centred, doc: str) -> Loss:
    return recorded_loss(name, lambda rows: centred(rows, constants), doc)


EXPERIMENTAL: dict[str, Loss] = {
    loss.spec.name: loss
    for loss in (
        recorded_loss("reinforce", reinforce, "no correction"),
        recorded_loss("topr", topr, "negatives weighted with the sequence's ratio, at most 1"),
        recorded_loss("topr_token", topr_token, "negatives weighted with the token's ratio"),
        recorded_loss("dppo", dppo, "the ratio, masked by TV over the recorded head"),
        centred_loss("ctr", Centred(), "truncated ratio, centred for both signs, sequence gate"),
        centred_loss("score_centring", Centred(truncate=False), "weight 1, centred"),
    )
}
