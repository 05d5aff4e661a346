"""`stable_reinforce`: REINFORCE that stays stable when the sampler q is not the learner p.

Our own objective inside the published contract; docs/stable_reinforce.md derives it in the symbols
used here. A row's weights are detached and compare tempered p with recorded q; its gradient runs
through the untempered log p. Knows nothing of spans, ids or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trimtab.losses.base import Loss, LossInputs, LossOutputs, Metrics
from trimtab.losses.metrics import means
from trimtab.losses.record import RecordedRows, kl_penalty, record_metrics, recorded_rows
from trimtab.types import ConfigKey, LossSpec


@dataclass(frozen=True, slots=True)
class Constants:
    """What the stability benchmark varies. `trace_decay` λ: how long a shortfall is remembered;
    `positive_factor` c in min(1, c r), the weight of tokens with A >= 0 (inf: always 1)."""

    trace_decay: float = 0.9
    positive_factor: float = 2.0


DEFAULT = Constants()


def stable_reinforce(
    inputs: LossInputs, config: Mapping[str, float], constants: Constants = DEFAULT
) -> LossOutputs:
    """Sum over the recorded rows, and the penalty over all rows under sampled spans:

        A >= 0:  -A min(1, 2 r) log p(x)
        A <  0:  -A T [min(1, r) log p(x) - sum_k m_k log p_k]      k over head and rest
        penalty: +beta (log q(x) - log p(x))

    r = p(x)/q(x), T the leaky trace of the sequence so far, m_k = min(p_k, q_k). The sum over k
    enters with its gradient and the value 0. For one row with p(x) = q(x) = 0.5, A = 1 and
    beta = 0 the loss is log 2, as REINFORCE's.
    """
    rows = recorded_rows(inputs)
    A_N = rows.advantages_N
    weight_N, trace_N = _weights(rows, constants)
    negative_N = A_N < 0
    centring_N = torch.where(negative_N, A_N * trace_N, 0.0) * _centring(rows)
    loss = -(A_N * weight_N * rows.logp_N - centring_N).sum()
    if config["kl_coeff"] > 0:
        loss = loss + kl_penalty(rows, config["kl_coeff"])
    metrics = record_metrics(rows, inputs, config["kl_coeff"]) | _metrics(rows, trace_N, constants)
    return LossOutputs(loss, metrics)


@torch.no_grad()
def _weights(rows: RecordedRows, constants: Constants) -> tuple[Tensor, Tensor]:
    """(weight of log p(x), trace), both (N,)."""
    ratio_N = rows.log_ratio_N.exp()
    trace_N = leaky_trace(rows.log_ratio_N, rows.sequence_N, constants.trace_decay)
    positive_N = (constants.positive_factor * ratio_N).clamp(max=1)
    negative_N = trace_N * ratio_N.clamp(max=1)
    return torch.where(rows.advantages_N < 0, negative_N, positive_N), trace_N


def leaky_trace(log_ratio_N: Tensor, sequence_N: Tensor, decay: float) -> Tensor:
    """T_t = exp(sum over s < t of its sequence of decay^(t-s) min(0, log r_s)).

    By doubling: a window of d rows and the window before it make one of 2 d, so that N rows take
    log2 N vector operations, with no power of decay beyond decay^d and nothing to overflow.

    leaky_trace([-1, 1, -2, -5], [0, 0, 0, 1], 0.5) = exp([0, -1/2, -1/4, 0])
    """
    shortfall_N = log_ratio_N.clamp(max=0)
    total_N = decay * _earlier(shortfall_N, sequence_N, 1)
    window = 1
    while window < len(total_N):
        total_N = total_N + decay**window * _earlier(total_N, sequence_N, window)
        window *= 2
    return total_N.exp()


def _earlier(values_N: Tensor, sequence_N: Tensor, rows: int) -> Tensor:
    """`values_N` of so many rows before, 0 where that row is of another sequence."""
    moved_N = torch.zeros_like(values_N)
    same_N = sequence_N[rows:] == sequence_N[:-rows]
    moved_N[rows:] = torch.where(same_N, values_N[:-rows], 0.0)
    return moved_N


def centring_coefficients(rows: RecordedRows) -> Tensor:
    """(N, K) m_k - rho p_k, with rho = min(1, q_rest/p_rest) and 1 where nothing is left over.

    sum_k (m_k - rho p_k) grad log p_k = sum_k m_k grad log p_k + m_rest grad log p_rest, because
    p_rest grad log p_rest = -sum_k p_k grad log p_k: the same gradient without the logarithm of a
    difference, and coefficients that are 0, not nearly 0, where p = q.

    That last sum runs over tempered p and untempered gradients, and so the identity holds at
    temperature 1 only. At another one the rest is left out (rho = 1), which misses no more than
    the mass outside the head; a rho < 1 would push along the whole of tempered p - p.
    """
    whole_N = rows.tempered_N | (rows.p_rest_N == 0)
    rho_N = rows.q_rest_N / torch.where(whole_N, 1.0, rows.p_rest_N)
    rho_N = torch.where(whole_N, 1.0, rho_N.clamp(max=1))
    return torch.minimum(rows.p_NK, rows.q_NK) - rho_N[:, None] * rows.p_NK


def _centring(rows: RecordedRows) -> Tensor:
    """(N,) zeros whose gradient is sum_k m_k grad log p_k over head and rest."""
    moved_NK = rows.head_logp_NK - rows.head_logp_NK.detach()
    return (centring_coefficients(rows) * moved_NK).sum(-1)


@torch.no_grad()
def _metrics(rows: RecordedRows, trace_N: Tensor, constants: Constants) -> Metrics:
    ratio_N = rows.log_ratio_N.exp()
    positive_weight_N = (constants.positive_factor * ratio_N).clamp(max=1)
    negative = {"negative_weight": ratio_N.clamp(max=1), "negative_trace": trace_N}
    return {
        **means(rows.advantages_N < 0, negative),
        **means(rows.advantages_N > 0, {"positive_weight": positive_weight_N}),
    }


SPEC = LossSpec(
    "stable_reinforce",
    inputs={"target_tokens": "required", "logprobs": "required", "advantages": "required"},
    config={"kl_coeff": ConfigKey(0.01, low=0.0, doc="beta of the penalty; 0 leaves it out")},
    needs_stability=True,
    finite_where="sampled",
    doc="REINFORCE made stable off policy by what was recorded at sampling",
)


def with_constants(constants: Constants) -> Loss:
    """The same loss under other constants, for the stability benchmark."""
    return Loss(SPEC, partial(stable_reinforce, constants=constants))


STABLE_REINFORCE = with_constants(DEFAULT)
