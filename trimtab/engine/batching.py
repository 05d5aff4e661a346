"""Datums packed one after another into micro-batches, and results taken apart again. No padding.

N rows of a datum, M packed rows of a micro-batch, K ids asked of the head at each row: the target
(or its alternatives), then the recorded head. Knows nothing of models, losses or gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import Invalid
from trimtab.types import Stability, TrainingDatum


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


def halves(micro: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """The same datums as two micro-batches."""
    middle = len(micro.data) // 2
    left = MicroBatch(micro.first, micro.data[:middle])
    return left, MicroBatch(micro.first + middle, micro.data[middle:])


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


@dataclass(frozen=True, slots=True)
class Joined:
    """Neighbouring datums of one form as a single one, for a loss to take at once. `datum_N` says
    which of them a row belongs to; sequences keep numbers of their own."""

    datum: TrainingDatum
    lengths: tuple[int, ...]
    datum_N: np.ndarray


def joined(micro: MicroBatch) -> list[Joined]:
    """The micro-batch in as few pieces as its datums' forms allow: one, as a rule."""
    return [_join(tuple(run)) for _, run in groupby(micro.data, key=_form)]


def _form(datum: TrainingDatum) -> tuple[object, ...]:
    if any(x.shape[:1] != datum.tokens.shape for x in datum.inputs.values()):
        return (id(datum),)  # a custom loss's, and not a row for each token: it stands alone
    head = None if datum.stability is None else datum.stability.head_ids_NK.shape[1]
    return tuple((n, x.dtype, x.shape[1:]) for n, x in sorted(datum.inputs.items())), head


def _join(data: tuple[TrainingDatum, ...]) -> Joined:
    lengths = tuple(len(datum.tokens) for datum in data)
    datum_N = np.repeat(np.arange(len(data)), lengths)
    if len(data) == 1:
        return Joined(data[0], lengths, datum_N)
    inputs = {n: np.concatenate([datum.inputs[n] for datum in data]) for n in data[0].inputs}
    tokens = np.concatenate([datum.tokens for datum in data])
    stability = _join_stability([x for datum in data if (x := datum.stability) is not None])
    return Joined(TrainingDatum(tokens, inputs, stability), lengths, datum_N)


def _join_stability(parts: Sequence[Stability]) -> Stability | None:
    if not parts:
        return None
    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(Stability)
    }
    columns["sequence_N"] = _numbered_apart([part.sequence_N for part in parts])
    return Stability(**columns)


def _numbered_apart(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Numbers of several datums so that no two datums share one; -1 stays.

    >>> _numbered_apart([np.array([-1, 0]), np.array([0, 1])])
    array([-1,  0,  1,  2])
    """
    counts = [int(part.max(initial=-1)) + 1 for part in parts]
    starts = np.cumsum([0, *counts[:-1]])
    shifted = [np.where(part < 0, -1, part + at) for part, at in zip(parts, starts, strict=True)]
    return np.concatenate(shifted)


def unpack(x_MK: Tensor, pieces: Sequence[Joined]) -> list[Tensor]:
    """(M, K) -> (N, K) of each piece, with the columns it asked for."""
    parts = x_MK.split([sum(piece.lengths) for piece in pieces])
    return [part[:, : width(piece.datum)] for part, piece in zip(parts, pieces, strict=True)]


def width(datum: TrainingDatum) -> int:
    targets = datum.inputs["target_tokens"]
    own = 1 if targets.ndim == 1 else targets.shape[1]
    return own + (0 if datum.stability is None else datum.stability.head_ids_NK.shape[1])


def to(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of its own memory: arrays of a request may be read-only."""
    return torch.tensor(array, device=device)
