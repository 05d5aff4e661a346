"""Datums packed one after another into micro-batches, and results taken apart again. No padding.

N rows of a datum or of several, M packed rows of a micro-batch, K ids asked of the head at each of
N: the target (or its alternatives), then the recorded head. M < N where datums share a prefix.
Knows nothing of models, losses or gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from trimtab.engine.attention import Segments
from trimtab.engine.sharing import common
from trimtab.errors import Invalid
from trimtab.types import Stability, TrainingDatum


@dataclass(frozen=True, slots=True)
class Sharing:
    """Datums `indices` of a request, whose first `prefix` tokens are the same."""

    prefix: int
    indices: tuple[int, ...]
    data: tuple[TrainingDatum, ...]

    def cut(self, start: int, stop: int) -> Sharing:
        prefix = self.prefix if stop - start > 1 else 0
        return Sharing(prefix, self.indices[start:stop], self.data[start:stop])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Datums of a request that are computed at once. Each stands for N rows of results; what the
    datums of a Sharing begin with alike is packed once."""

    parts: tuple[Sharing, ...]

    @staticmethod
    def of(first: int, data: Sequence[TrainingDatum]) -> MicroBatch:
        """Datums `first`, `first + 1`, ... with nothing shared."""
        return MicroBatch(tuple(Sharing(0, (first + i,), (d,)) for i, d in enumerate(data)))

    @property
    def data(self) -> list[TrainingDatum]:
        return [datum for part in self.parts for datum in part.data]

    @property
    def indices(self) -> list[int]:
        """Of `data`, in the request."""
        return [index for part in self.parts for index in part.indices]

    @property
    def segments(self) -> list[Segments]:
        """How the packed rows attend: a Sharing each, neighbours without a prefix as one."""
        out = []
        for alone, run in groupby(self.parts, key=lambda part: part.prefix == 0):
            each = [
                Segments(part.prefix, tuple(len(d.tokens) - part.prefix for d in part.data))
                for part in run
            ]
            out += [Segments(0, tuple(n for s in each for n in s.own))] if alone else each
        return out

    @property
    def asked(self) -> int:
        """Rows of results: M would be as many if nothing were shared."""
        return sum(len(datum.tokens) for datum in self.data)


def micro_batches(data: Sequence[TrainingDatum], tokens: int) -> Iterator[MicroBatch]:
    """Cut a request before the datum that would pass `tokens` packed rows; a longer datum stands
    alone. Datums that share a prefix stand together, else they keep their order. The cuts depend
    on the request only, so a replay gives the same bits.

    >>> [len(m.data) for m in micro_batches(data_of_lengths(3, 3, 9, 2), 6)]
    [2, 1, 1]
    """
    parts: list[Sharing] = []
    rows = 0
    for each in common([datum.tokens for datum in data]):
        whole = Sharing(each.prefix, each.members, tuple(data[i] for i in each.members))
        start = 0  # of what the running micro-batch takes of it
        for i, datum in enumerate(whole.data):
            more = len(datum.tokens) - (whole.prefix if i > start else 0)
            if rows and rows + more > tokens:
                if i > start:
                    parts.append(whole.cut(start, i))
                yield MicroBatch(tuple(parts))
                parts, start, rows, more = [], i, 0, len(datum.tokens)
            rows += more
        parts.append(whole.cut(start, len(whole.data)))
    yield MicroBatch(tuple(parts))


def halves(micro: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """The same datums as two micro-batches."""
    middle = len(micro.data) // 2
    left: list[Sharing] = []
    right: list[Sharing] = []
    at = 0
    for part in micro.parts:
        cut = min(max(middle - at, 0), len(part.data))
        left += [part.cut(0, cut)] if cut else []
        right += [part.cut(cut, len(part.data))] if cut < len(part.data) else []
        at += len(part.data)
    return MicroBatch(tuple(left)), MicroBatch(tuple(right))


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
    """Tokens (M,) and positions (M,) int64: of each Sharing its prefix, then what each datum has
    of its own."""
    tokens, positions = [], []
    for part in micro.parts:
        for start, row in ((0, part.data[0].tokens[: part.prefix]), *_own(part)):
            tokens.append(row)
            positions.append(np.arange(start, start + len(row)))
    return (
        to(np.concatenate(tokens).astype(np.int64), device),
        to(np.concatenate(positions), device),
    )


def _own(part: Sharing) -> Iterator[tuple[int, np.ndarray]]:
    for datum in part.data:
        yield part.prefix, datum.tokens[part.prefix :]


def rows_of(micro: MicroBatch, device: torch.device) -> Tensor | None:
    """(N,) the packed row of each row of results; None when each has one of its own."""
    if all(part.prefix == 0 for part in micro.parts):
        return None
    out, at = [], 0
    for part in micro.parts:
        prefix = np.arange(at, at + part.prefix)
        at += part.prefix
        for _, row in _own(part):
            out += [prefix, np.arange(at, at + len(row))]
            at += len(row)
    return to(np.concatenate(out), device)


def ids_of(datum: TrainingDatum) -> np.ndarray:
    """(N, K) int64: the target ids and, where there is a record, the recorded head's."""
    targets = datum.inputs["target_tokens"].astype(np.int64)
    columns = [targets.reshape(len(targets), -1)]
    if datum.stability is not None:
        columns.append(datum.stability.head_ids_NK.astype(np.int64))
    return np.concatenate(columns, axis=1)


def asked_ids(micro: MicroBatch, device: torch.device) -> Tensor:
    """(N, K) int64 for the whole micro-batch; narrower datums are filled up with id 0, which
    `unpack` takes off again."""
    each = [ids_of(datum) for datum in micro.data]
    wide = max(ids.shape[1] for ids in each)
    filled = [np.pad(ids, ((0, 0), (0, wide - ids.shape[1]))) for ids in each]
    return to(np.concatenate(filled), device)


def temperatures(micro: MicroBatch, device: torch.device) -> Tensor | None:
    """(N,) float32 of the records, 1 where there is none; None when no datum has a record."""
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
    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    datum_N: np.ndarray


def joined(micro: MicroBatch) -> list[Joined]:
    """The micro-batch in as few pieces as its datums' forms allow: one, as a rule."""
    numbered = zip(micro.indices, micro.data, strict=True)
    return [
        _join(*zip(*run, strict=True)) for _, run in groupby(numbered, key=lambda x: _form(x[1]))
    ]


def _form(datum: TrainingDatum) -> tuple[object, ...]:
    if any(x.shape[:1] != datum.tokens.shape for x in datum.inputs.values()):
        return (id(datum),)  # a custom loss's, and not a row for each token: it stands alone
    head = None if datum.stability is None else datum.stability.head_ids_NK.shape[1]
    return tuple((n, x.dtype, x.shape[1:]) for n, x in sorted(datum.inputs.items())), head


def _join(indices: tuple[int, ...], data: tuple[TrainingDatum, ...]) -> Joined:
    lengths = tuple(len(datum.tokens) for datum in data)
    datum_N = np.repeat(np.arange(len(data)), lengths)
    if len(data) == 1:
        return Joined(data[0], indices, lengths, datum_N)
    inputs = {n: np.concatenate([datum.inputs[n] for datum in data]) for n in data[0].inputs}
    tokens = np.concatenate([datum.tokens for datum in data])
    stability = _join_stability([x for datum in data if (x := datum.stability) is not None])
    return Joined(TrainingDatum(tokens, inputs, stability), indices, lengths, datum_N)


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


def unpack(x_NK: Tensor, pieces: Sequence[Joined]) -> list[Tensor]:
    """(N, K) of all -> (N, K) of each piece, with the columns it asked for."""
    parts = x_NK.split([sum(piece.lengths) for piece in pieces])
    return [part[:, : width(piece.datum)] for part, piece in zip(parts, pieces, strict=True)]


def width(datum: TrainingDatum) -> int:
    targets = datum.inputs["target_tokens"]
    own = 1 if targets.ndim == 1 else targets.shape[1]
    return own + (0 if datum.stability is None else datum.stability.head_ids_NK.shape[1])


def to(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of its own memory: arrays of a request may be read-only."""
    return torch.tensor(array, device=device)
