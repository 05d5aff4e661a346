"""Trajectories to the SDK's datums, with the provenance of every token. Knows no loss by name.

A datum of several turns names several sequences: prompt runs and sampled runs alternate. Among the
loss rows each sampled run covers its whole sequence, as stable_reinforce asks; the model input ends
one token earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tinker
from numpy.typing import ArrayLike
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

from trimtab.trainer.trajectory import Trajectory, rows

Spans = list[PromptProvenanceSpan | SampledProvenanceSpan]


def datum(trajectory: Trajectory, inputs: Mapping[str, ArrayLike]) -> tinker.Datum:
    """A datum of this trajectory with `target_tokens` and the (N,) `inputs`, as float32."""
    row = rows(trajectory)
    # Arrays are what the SDK accepts; its annotation names what it makes of them.
    tensors: dict[str, Any] = {n: np.asarray(v, dtype=np.float32) for n, v in inputs.items()}
    for name, values in tensors.items():
        if values.shape != row.targets_N.shape:
            raise ValueError(f"{name} has shape {values.shape}, expected {row.targets_N.shape}")
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row.inputs_N.tolist()),
        loss_fn_inputs={"target_tokens": row.targets_N} | tensors,
    ).with_provenance(model_input=input_spans(trajectory), loss_fn_inputs=target_spans(trajectory))


def target_spans(trajectory: Trajectory) -> Spans:
    """Runs over the rows: the first token of all is nobody's target."""
    return _spans(trajectory, first=1, last=0)


def input_spans(trajectory: Trajectory) -> Spans:
    """Runs over the input tokens: the last token of all is nobody's input."""
    return _spans(trajectory, first=0, last=1)


def _spans(trajectory: Trajectory, *, first: int, last: int) -> Spans:
    """Runs over the tokens less the `first` and the `last` so many. The prompt of the first turn
    has at least one token, so `first` never reaches a sampled run."""
    spans: Spans = []
    place = 0  # where the turn's `before` begins in its request's prompt
    turns = trajectory.turns
    for turn in turns:
        skipped = first if turn is turns[0] else 0
        cut = last if turn is turns[-1] else 0
        length = turn.before.size - skipped
        if length:
            spans.append(
                PromptProvenanceSpan(
                    sequence_id=turn.sequence_id, offset=place + skipped, length=length
                )
            )
        length = turn.tokens_T.size - cut
        if length:
            spans.append(
                SampledProvenanceSpan(sequence_id=turn.sequence_id, offset=0, length=length)
            )
        place += turn.before.size + turn.tokens_T.size
    return spans


def returned_logprobs(
    output: tinker.ForwardBackwardOutput, trajectories: Sequence[Trajectory]
) -> list[np.ndarray]:
    """The learner's (N,) log-probabilities of the targets, float64, a trajectory each."""
    found = [
        np.asarray(out["logprobs"].to_numpy(), dtype=np.float64) for out in output.loss_fn_outputs
    ]
    for values, trajectory in zip(found, trajectories, strict=True):
        expected = trajectory.tokens.size - 1
        if values.shape != (expected,):
            raise ValueError(f"the server returned {values.shape} log-probabilities for {expected}")
    return found
