"""Datums packed one after another into micro-batches, and results taken apart again. No padding.

N rows of a datum, M packed rows of a micro-batch, K ids asked of the head at each row: the target
(or its alternatives), then the recorded head. Knows nothing of models, losses or gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import Invalid
from trimtab.types import TrainingDatum


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Datums `first`, `first + 1`, ... of a request."""

    first: int
    data: tuple[TrainingDatum, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(datum.tokens) for datum in self.data]


def micro_batches(data: Sequence[TrainingDatum], tokens: int) -> Iterator[MicroBatch]:
    """Cut a request, in its order, before the datum that would pass `tokens` rows; a longer datum
    stands alone. The cuts depend on the request only, so a replay gives the same bits.

    >>> [len(m.data) for m in micro_batches(data_of_lengths(3, 3, 9, 2), 6)]
    [2, 1, 1]
    """
    first, rows = 0, 0
    for i, datum in enumerate(data):
        if i > first and rows + len(datum.tokens) > tokens:
            yield MicroBatch(first, tuple(data[first:i]))
            first, rows = i, 0
        rows += len(datum.tokens)
    yield MicroBatch(first, tuple(data[first:]))


def check_data(data: Sequence[TrainingDatum], vocab_size: int, max_context: int) -> None:
    """Raise Invalid for what only the engine can know: ids beyond the vocabulary, rows beyond the
    context."""
    if not data:
        raise Invalid("data is empty; at least one datum is needed")
    for i, datum in enumerate(data):
        rows, targets = len(datum.tokens), datum.inputs.get("target_tokens")
        if not 1 <= rows <= max_context:
            raise Invalid(
                f"data[{i}]: model_input has {rows} tokens; allowed are 1 to {max_context}"
            )
        if targets is None or targets.ndim not in (1, 2) or len(targets) != rows:
            found = "missing" if targets is None else f"of shape {targets.shape}"
            raise Invalid(
                f"data[{i}]: target_tokens is {found}; ({rows},) or ({rows}, K) is needed"
            )
        for field, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
            if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
                raise Invalid(
                    f"data[{i}]: {field} holds ids from {ids.min()} to {ids.max()}; allowed are 0 "
                    f"to {vocab_size - 1}"
                )


def packed(micro: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (M,) and positions (M,) int64, each datum counted from 0."""
    tokens = np.concatenate([datum.tokens for datum in micro.data])
    positions = np.concatenate([np.arange(n) for n in micro.lengths])
    return to(tokens.astype(np.int64), device), to(positions, device)


def ids_of(datum: TrainingDatum) -> np.ndarray:
    """(N, K) int64: the target ids and, where there is a record, the recorded head's."""
    targets = datum.inputs["target_tokens"].astype(np.int64)
    columns = [targets.reshape(len(targets), -1)]
    if datum.stability is not None:
        columns.append(datum.stability.head_ids_NK.astype(np.int64))
    return np.concatenate(columns, axis=1)


def asked_ids(micro: MicroBatch, device: torch.device) -> Tensor:
    """(M, K) int64 for the whole micro-batch; narrower datums are filled up with id 0, which
    `unpack` takes off again."""
    each = [ids_of(datum) for datum in micro.data]
    wide = max(ids.shape[1] for ids in each)
    filled = [np.pad(ids, ((0, 0), (0, wide - ids.shape[1]))) for ids in each]
    return to(np.concatenate(filled), device)


def temperatures(micro: MicroBatch, device: torch.device) -> Tensor | None:
    """(M,) float32 of the records, 1 where there is none; None when no datum has a record."""
    if all(datum.stability is None for datum in micro.data):
        return None
    each = [
        np.ones(len(datum.tokens), np.float32)
        if datum.stability is None
        else datum.stability.temperature_N
        for datum in micro.data
    ]
    return to(np.concatenate(each), device)


def unpack(x_MK: Tensor, micro: MicroBatch) -> list[Tensor]:
    """(M, K) -> (N, K) of each datum, with the columns it asked for."""
    parts = x_MK.split(micro.lengths)
    return [part[:, : width(datum)] for part, datum in zip(parts, micro.data, strict=True)]


def width(datum: TrainingDatum) -> int:
    targets = datum.inputs["target_tokens"]
    own = 1 if targets.ndim == 1 else targets.shape[1]
    return own + (0 if datum.stability is None else datum.stability.head_ids_NK.shape[1])


def to(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of its own memory: arrays of a request may be read-only."""
    return torch.tensor(array, device=device)
