"""One training step's optimizer steps: mini-batches of whole sequences, token mean, Adam.

Requests are all submitted before the first is waited for; the server runs them in order. Knows no
rewards; advantages arrive finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker

from trimtab.trainer.batch import Batch
from trimtab.trainer.config import Config
from trimtab.trainer.custom_loss import PPOTerms, ppo_loss
from trimtab.trainer.datums import datum, returned_logprobs
from trimtab.trainer.metrics import Metrics, join, learner_metrics
from trimtab.trainer.objective import CLIP_HIGH, CLIP_LOW, Objective
from trimtab.trainer.trajectory import Floats, Ints


@dataclass(frozen=True, eq=False)
class Updated:
    """`learner_D_N`: log p of every row when the first epoch's gradient was taken at it."""

    metrics: Metrics
    learner_D_N: list[Floats]
    optimizer_steps: int


@dataclass(frozen=True, eq=False)
class Updater:
    """`await Updater(client, config, objective).update(batch, advantages, rate, rng)`"""

    client: tinker.TrainingClient
    config: Config
    objective: Objective

    async def update(
        self,
        batch: Batch,
        advantages_D_N: Sequence[Floats],
        learning_rate: float,
        rng: np.random.Generator,
    ) -> Updated:
        """`epochs` passes over the batch in `minibatches` optimizer steps each."""
        adam = self._adam(learning_rate)
        submitted = []
        for _ in range(self.config.epochs):
            for indices in minibatches(batch.size, self.config.minibatches, rng):
                gradient = self._forward_backward(batch, advantages_D_N, indices)
                submitted.append((indices, gradient, self.client.optim_step(adam)))
        outputs = [(i, await gradient, await stepped) for i, gradient, stepped in submitted]
        first_epoch = outputs[: len(outputs) // self.config.epochs]
        return Updated(
            metrics=learner_metrics(join([output.metrics for _, output, _ in outputs]))
            | _optimizer_metrics([stepped.metrics or {} for _, _, stepped in outputs]),
            learner_D_N=_in_order(batch, [(i, output) for i, output, _ in first_epoch]),
            optimizer_steps=len(outputs),
        )

    def _adam(self, learning_rate: float) -> tinker.AdamParams:
        return tinker.AdamParams(
            learning_rate=learning_rate,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
            grad_clip_norm=self.config.grad_clip_norm,
        )

    def _forward_backward(
        self, batch: Batch, advantages_D_N: Sequence[Floats], indices: Ints
    ) -> tinker.APIFuture[tinker.ForwardBackwardOutput]:
        tokens = divisor(batch, indices, token_mean=self.config.token_mean)
        data = datums(batch, advantages_D_N, indices, self.objective, tokens)
        if self.objective.custom:
            return self.client.forward_backward_custom(data, ppo_loss(self._terms(tokens)))
        loss: Any = self.objective.loss
        return self.client.forward_backward(data, loss, self.objective.loss_config(tokens))

    def _terms(self, tokens: float) -> PPOTerms:
        return PPOTerms(
            self.objective.thresholds.get("clip_low_threshold", CLIP_LOW),
            self.objective.thresholds.get("clip_high_threshold", CLIP_HIGH),
            self.config.dual_clip,
            self.config.kl_loss_coef / tokens,
        )


def minibatches(sequences: int, parts: int, rng: np.random.Generator) -> list[Ints]:
    """A shuffled split into parts whose sizes differ by one at most: none is dropped or padded.

    >>> [len(part) for part in minibatches(7, 3, np.random.default_rng(0))]
    [3, 2, 2]
    """
    order = rng.permutation(sequences)
    return [part for part in np.array_split(order, parts) if part.size]


def divisor(batch: Batch, indices: Ints, *, token_mean: bool) -> float:
    """What advantages (and penalties) of an optimizer step are divided by: its action tokens."""
    return float(sum(batch.mask_D_N[i].sum() for i in indices)) if token_mean else 1.0


def datums(
    batch: Batch,
    advantages_D_N: Sequence[Floats],
    indices: Ints,
    objective: Objective,
    divided_by: float,
) -> list[tinker.Datum]:
    """The requests' datums: advantages divided, and log π_old (for stable_reinforce: log q)."""
    made = []
    for i in indices:
        inputs: dict[str, Any] = {
            "logprobs": batch.old_D_N[i],
            "advantages": advantages_D_N[i] / divided_by,
        }
        if objective.loss == "gspo":
            inputs["sequence_ratio_mask"] = batch.mask_D_N[i]
        if objective.custom:
            inputs["mask"] = batch.mask_D_N[i]
            if batch.ref_D_N is not None:
                inputs["ref_logprobs"] = batch.ref_D_N[i]
        made.append(datum(batch.trajectories_D[i], inputs))
    return made


def _optimizer_metrics(found: Sequence[dict[str, float]]) -> Metrics:
    """The optimizer's own, averaged over the optimizer steps; the norm also at its largest."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    values = {name: [m[name] for m in found if name in m] for name in names}
    shown = {f"optim/{_base(name)}": float(np.mean(v)) for name, v in values.items()}
    norms = [v for name, v in values.items() if _base(name) == "grad_norm"]
    return shown | ({"optim/grad_norm_max": float(max(norms[0]))} if norms else {})


def _base(name: str) -> str:
    return name.partition(":")[0]


def _in_order(
    batch: Batch, outputs: Sequence[tuple[Ints, tinker.ForwardBackwardOutput]]
) -> list[Floats]:
    """The returned log-probabilities, sequence by sequence of the batch."""
    found: dict[int, Floats] = {}
    for indices, output in outputs:
        logprobs = returned_logprobs(output, [batch.trajectories_D[i] for i in indices])
        found |= dict(zip(indices.tolist(), logprobs, strict=True))
    return [found[i] for i in range(batch.size)]
