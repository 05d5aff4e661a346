"""What a client claims of its tokens, held against what was recorded.

Two tiers. Any loss, where a datum carries spans: both lists tile their fields, ids are well formed
and this session's, ranges lie inside the record, and the tokens are the recorded ones (model input
under every span, 1-D targets under sampled spans; targets under prompt spans are free). A sequence
that is unknown or expired is let pass there, and counted. A loss with `needs_stability` also wants
both lists on every datum, at least one sampled span, whole sequences, every id alive, nonzero
advantages only on recorded rows, and the recorded log-probabilities.

Pure functions of arrays: no store, no clock, no session. Spans of length 0 cover nothing and
satisfy nothing. Shape letters as in `types`: N rows of a datum, K the recorded head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.errors import Invalid
from trimtab.service import ids
from trimtab.service.sequences import Absence, Record
from trimtab.types import Datum, PromptSpan, SampledSpan, Span, Stability

INPUT, LOSS = "model_input_spans", "loss_fn_input_spans"
_TILED = {INPUT: "model_input", LOSS: "target_tokens"}
MAX_OFFSET = 2**63 - 1
WHY: Mapping[Absence, str] = {
    "unknown": "which this session did not sample",
    "foreign": "which this session did not sample",  # the same words: ids of others are unknown
    "expired": "which has expired: its day ended without an accepted use",
    "pending": "which is still being sampled",
    "cancelled": "whose sampling was cancelled",
    "failed": "whose sampling failed",
}
TOLERATED: frozenset[Absence] = frozenset({"unknown", "expired"})


@dataclass(frozen=True, slots=True)
class Registry:
    """What was found for the ids of one request, and for whom: `model_id` is being trained."""

    records: Mapping[str, Record]
    absent: Mapping[str, Absence]
    model_id: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A Stability a datum (None for losses that need none), and how many spans named a sequence
    that could not be checked."""

    stability: tuple[Stability | None, ...]
    unverified: int


def structure(data: Sequence[Datum], *, needed: str | None, longest_id: int, most: int) -> set[str]:
    """Check what needs no record; return every id named. `needed` names a loss that needs spans."""
    named: set[str] = set()
    total = sum(len(d.model_input_spans) + len(d.loss_fn_input_spans) for d in data)
    if total > most:
        raise Invalid(f"data carries {total} provenance spans; the limit of a request is {most}")
    for i, datum in enumerate(data):
        inputs, targets = datum.model_input_spans, datum.loss_fn_input_spans
        if not inputs and not targets and needed is None:
            continue
        for field, spans in ((INPUT, inputs), (LOSS, targets)):
            if not spans:
                raise Invalid(
                    f"datum {i}: {field} is missing; "
                    + (f"{needed} needs both span lists" if needed else "give both lists or none")
                )
            _well_formed(i, field, spans, longest_id, named)
        _tiles(i, INPUT, inputs, len(datum.tokens), "input tokens")
        _tiles(i, LOSS, targets, len(datum.inputs["target_tokens"]), "rows of target_tokens")
    return named


def resolve(
    data: Sequence[Datum], registry: Registry, *, loss: str | None, head_k: int, tolerance: float
) -> Resolved:
    """Hold every datum against the registry, after `structure`. `loss` names a loss that needs
    stability; `head_k` is K where nothing of the request was recorded."""
    ks = [r.head_ids_TK.shape[1] for r in registry.records.values() if r.head_ids_TK is not None]
    k = max(ks, default=head_k)
    parts: list[Stability | None] = []
    unverified = 0
    for i, datum in enumerate(data):
        unverified += _present(i, datum, registry, strict=loss is not None)
        _same_tokens(i, datum, registry)
        if loss is None:
            parts.append(None)
            continue
        _whole_sequences(i, datum, registry, loss)
        stability = _align(datum, registry, k)
        _advantages(i, datum, stability, registry)
        _logprobs(i, datum, stability, tolerance)
        parts.append(stability)
    return Resolved(tuple(parts), unverified)


# --------------------------------------------------------------------------- without records


def _well_formed(
    i: int, field: str, spans: Sequence[Span], longest_id: int, named: set[str]
) -> None:
    for j, span in enumerate(spans):
        if span.sequence_id not in named:
            if not ids.well_formed(span.sequence_id, longest_id):
                raise Invalid(
                    f"datum {i}: {field}[{j}].sequence_id {span.sequence_id[:80]!r} is not a"
                    f" sequence id (1 to {longest_id} printable characters without spaces)"
                )
            named.add(span.sequence_id)
        for part, value in (("offset", span.offset), ("length", span.length)):
            if not 0 <= value <= MAX_OFFSET:
                raise Invalid(f"datum {i}: {field}[{j}].{part} must be 0 or more, found {value}")


def _tiles(i: int, field: str, spans: Sequence[Span], length: int, what: str) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise Invalid(
            f"datum {i}: {field} covers {covered} positions, but there are {length} {what};"
            " the spans must tile them exactly"
        )


# --------------------------------------------------------------------------- against the records


def _placed(spans: Sequence[Span]) -> Iterator[tuple[int, int, Span]]:
    """(index in the list, first position, span) of every span that covers something."""
    at = 0
    for j, span in enumerate(spans):
        if span.length:
            yield j, at, span
            at += span.length


def _present(i: int, datum: Datum, registry: Registry, *, strict: bool) -> int:
    """Refuse ids that cannot be trained on; count the spans that are let pass unchecked."""
    passed = 0
    for field, spans in ((INPUT, datum.model_input_spans), (LOSS, datum.loss_fn_input_spans)):
        for j, _, span in _placed(spans):
            why = registry.absent.get(span.sequence_id)
            if why is None:
                continue
            if strict or why not in TOLERATED:
                raise Invalid(
                    f"datum {i}: {field}[{j}] names sequence {span.sequence_id!r}, {WHY[why]}"
                )
            passed += 1
    return passed


def _same_tokens(i: int, datum: Datum, registry: Registry) -> None:
    targets = datum.inputs["target_tokens"]
    _match(i, INPUT, datum.model_input_spans, datum.tokens, registry)
    if targets.ndim == 1:
        _match(i, LOSS, datum.loss_fn_input_spans, targets, registry)
    else:  # alternatives a row: only the ranges can be held against the record
        for j, _, span in _placed(datum.loss_fn_input_spans):
            if (record := registry.records.get(span.sequence_id)) is not None:
                _source(i, LOSS, j, span, record)


def _match(
    i: int, field: str, spans: Sequence[Span], actual: np.ndarray, registry: Registry
) -> None:
    """Every token under a checkable span equals the record's; one comparison a field."""
    claimed = []
    for j, at, span in _placed(spans):
        record = registry.records.get(span.sequence_id)
        tokens = actual[at : at + span.length]
        if record is not None:
            source = _source(i, field, j, span, record)
            if field == INPUT or isinstance(span, SampledSpan):
                tokens = source[span.offset : span.offset + span.length]
        claimed.append(tokens)
    if not claimed:
        return
    recorded = np.concatenate(claimed)
    wrong = np.flatnonzero(recorded != actual)
    if wrong.size:
        n = int(wrong[0])
        j, at, span = next(p for p in _placed(spans) if p[1] <= n < p[1] + p[2].length)
        raise Invalid(
            f"datum {i}: {_TILED[field]}[{n}] is token {actual[n]}, but {field}[{j}] claims"
            f" position {span.offset + n - at} of the {_kind(span)} of sequence"
            f" {span.sequence_id!r}, where token {recorded[n]} was recorded"
        )


def _source(i: int, field: str, j: int, span: Span, record: Record) -> np.ndarray:
    """The recorded tokens a span points into, after checking that it stays inside them."""
    source = record.prompt if isinstance(span, PromptSpan) else record.tokens
    if span.offset + span.length > len(source):
        raise Invalid(
            f"datum {i}: {field}[{j}] claims positions {span.offset} to"
            f" {span.offset + span.length} of the {_kind(span)} of sequence {span.sequence_id!r},"
            f" of which {len(source)} were recorded"
        )
    return source


def _kind(span: Span) -> str:
    return "prompt" if isinstance(span, PromptSpan) else "sampled tokens"


# --------------------------------------------------------------------------- stability


def _sampled(spans: Sequence[Span]) -> Iterator[tuple[int, int, Span]]:
    return (placed for placed in _placed(spans) if isinstance(placed[2], SampledSpan))


def _whole_sequences(i: int, datum: Datum, registry: Registry, loss: str) -> None:
    found = False
    for j, _, span in _sampled(datum.loss_fn_input_spans):
        found = True
        whole = len(registry.records[span.sequence_id].tokens)
        if span.offset != 0 or span.length != whole:
            raise Invalid(
                f"datum {i}: {LOSS}[{j}] claims offset {span.offset} and length {span.length} of"
                f" sequence {span.sequence_id!r}; {loss} needs the whole sequence, offset 0 and"
                f" length {whole}"
            )
    if not found:
        raise Invalid(
            f"datum {i}: {LOSS} has no sampled span of at least one token; {loss} needs one"
        )


def _align(datum: Datum, registry: Registry, k: int) -> Stability:
    """Lay the records along the N rows. A sequence named twice counts as two."""
    n = len(datum.tokens)
    stability = Stability(
        sequence_N=np.full(n, -1, np.int32),
        recorded_N=np.zeros(n, bool),
        logprobs_N=np.full(n, np.nan, np.float32),
        head_ids_NK=np.zeros((n, k), np.int32),
        head_logprobs_NK=np.full((n, k), -np.inf, np.float32),
        temperature_N=np.ones(n, np.float32),
        version_step_N=np.full(n, np.nan, np.float32),
    )
    for number, (_, at, span) in enumerate(_sampled(datum.loss_fn_input_spans)):
        record = registry.records[span.sequence_id]
        rows = slice(at, at + span.length)
        stability.sequence_N[rows] = number
        stability.version_step_N[rows] = _steps(record, registry.model_id)
        if record.head_ids_TK is None or record.head_logprobs_TK is None:
            continue
        width = record.head_ids_TK.shape[1]
        stability.recorded_N[rows] = True
        stability.logprobs_N[rows] = record.logprobs
        stability.head_ids_NK[rows, :width] = record.head_ids_TK
        stability.head_logprobs_NK[rows, :width] = record.head_logprobs_TK
        stability.temperature_N[rows] = record.temperature
    return stability


def _steps(record: Record, model_id: str) -> np.ndarray:
    """Optimizer steps behind the weights of each token; NaN for weights of another model, whose
    steps cannot be compared. The base model itself has none behind it."""
    steps = [step if model in ("", model_id) else np.nan for _, _, step, model in record.versions]
    counts = [count for _, count, _, _ in record.versions]
    if sum(counts) != len(record.tokens):
        return np.full(len(record.tokens), np.nan, np.float32)
    return np.repeat(np.asarray(steps, np.float32), counts)


def _advantages(i: int, datum: Datum, stability: Stability, registry: Registry) -> None:
    """A nonzero advantage needs a row whose sequence has a stability part."""
    bad = np.flatnonzero((datum.inputs["advantages"] != 0) & ~stability.recorded_N)
    if not bad.size:
        return
    n = int(bad[0])
    spans = datum.loss_fn_input_spans
    j, _, span = next(p for p in _placed(spans) if p[1] <= n < p[1] + p[2].length)
    problem = (
        f"a prompt span of sequence {span.sequence_id!r}"
        if isinstance(span, PromptSpan)
        else f"sequence {span.sequence_id!r}, sampled without record_stability_info"
    )
    raise Invalid(
        f"datum {i}: advantages[{n}] is {datum.inputs['advantages'][n]:g}, but {LOSS}[{j}] puts"
        f" that row under {problem}; nonzero advantages need a recorded sequence"
    )


def _logprobs(i: int, datum: Datum, stability: Stability, tolerance: float) -> None:
    """The claimed log q is the recorded one."""
    claimed = datum.inputs["logprobs"]
    with np.errstate(invalid="ignore"):
        close = np.abs(claimed - stability.logprobs_N) <= tolerance
    bad = np.flatnonzero(stability.recorded_N & ~close)
    if bad.size:
        n = int(bad[0])
        spans = datum.loss_fn_input_spans
        j, at, span = next(p for p in _sampled(spans) if p[1] <= n < p[1] + p[2].length)
        raise Invalid(
            f"datum {i}: logprobs[{n}] is {claimed[n]:.6g}, but {LOSS}[{j}] claims position"
            f" {n - at} of sequence {span.sequence_id!r}, where {stability.logprobs_N[n]:.6g} was"
            f" recorded (tolerance {tolerance:g})"
        )
