"""What a loss is: tensors of one or several datums in, one scalar and its metrics out.

Knows nothing of models, batches, spans or sequence ids. Shape letters: N rows of a datum, K the
recorded head (or, for `target_logprobs` of cross_entropy, alternatives a position).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from trimtab.types import LossSpec

Metrics = dict[str, float | Tensor]


@dataclass(frozen=True, slots=True)
class StabilityInputs:
    """What was recorded at sampling beside what the learner says now, row by row.

    "Tempered" is log-softmax(logits / temperature_N); the others are log-softmax(logits). Only
    `head_target_logprobs_NK` carries a gradient. Rows that are not recorded may hold anything.

    sequence_N              int, -1 outside sampled spans, else one number a whole sequence, whose
                            rows are contiguous and in order
    recorded_N              bool, the row's sequence has a stability part
    logprobs_N              log q(x) of the record
    head_ids_NK             int, the sampler's top-K ids
    head_logprobs_NK        log q of the head; -inf marks an empty cell
    target_tempered_N       the learner's tempered log p(x), detached
    head_target_logprobs_NK the learner's log p of the head ids
    head_target_tempered_NK the same, tempered and detached
    temperature_N           of the request that sampled the row
    version_step_N          optimizer steps behind the sampling weights, NaN if unknown
    target_ids_N            int, the sampled token x
    learner_step            optimizer steps behind the learner
    """

    sequence_N: Tensor
    recorded_N: Tensor
    logprobs_N: Tensor
    head_ids_NK: Tensor
    head_logprobs_NK: Tensor
    target_tempered_N: Tensor
    head_target_logprobs_NK: Tensor
    head_target_tempered_NK: Tensor
    temperature_N: Tensor
    version_step_N: Tensor
    target_ids_N: Tensor
    learner_step: float


@dataclass(frozen=True, slots=True)
class LossInputs:
    """`target_logprobs` (N,) or (N, K), full-vocabulary log-softmax with its gradient; `tensors`
    the dense inputs by name. Rows of several datums may stand one after another: `datum_N` then
    numbers the datums 0, 1, ... (None: all rows are of one). Example: `{"target_tokens": int64
    (N,), "logprobs": float32 (N,), "advantages": float32 (N,)}`. All shapes have been checked."""

    target_logprobs: Tensor
    tensors: Mapping[str, Tensor]
    stability: StabilityInputs | None = None
    datum_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """`loss` is a 0-d tensor, summed over rows (reported as `loss:sum` by the caller, not here).

    Metric names end in `:sum`, `:max` or `:min`; values are floats or detached 0-d tensors, joined
    over calls by `metrics.combine`. A `:max` (`:min`) over no rows is -inf (+inf) and is left out
    of what `combine` returns.
    """

    loss: Tensor
    metrics: Metrics


LossFn = Callable[[LossInputs, Mapping[str, float]], LossOutputs]


@dataclass(frozen=True, slots=True)
class Loss:
    """A named loss: `LOSSES["ppo"](inputs, {"clip_low_threshold": 0.8, ...})`, with
    every key of `spec.config` present."""

    spec: LossSpec
    fn: LossFn

    def __call__(self, inputs: LossInputs, config: Mapping[str, float]) -> LossOutputs:
        return self.fn(inputs, config)
