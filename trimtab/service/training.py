"""A ForwardBackward held against what its loss accepts, and joined with what was recorded.

Everything a request can get wrong is said here, before it takes its place: names, shapes, dtypes,
ranges, numbers. Nothing is trimmed, filled in or ignored, but for the config's declared defaults.
Knows the LossSpec that the learner reports, no loss and no tensor. Shape letters as in `types`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.errors import Invalid, TooLarge
from trimtab.service import customs, provenance
from trimtab.service.sequences import Absence, Record, Sequences
from trimtab.service.settings import ServiceSettings
from trimtab.types import (
    BaseModelInfo,
    ConfigValue,
    CustomLoss,
    Datum,
    ForwardBackward,
    LossSpec,
    Stability,
    TrainingBatch,
    TrainingDatum,
)

TOKENS = "target_tokens"


@dataclass(frozen=True, slots=True)
class Checked:
    """A batch that may run. `named` are the sequences its acceptance keeps alive, `used` those of
    them it was joined with; `unverified` counts spans whose sequence could not be checked."""

    batch: TrainingBatch
    named: frozenset[str]
    unverified: int
    used: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Checker:
    """What requests for one base model are held against."""

    losses: Mapping[str, LossSpec]
    info: BaseModelInfo
    sequences: Sequences
    settings: ServiceSettings
    customs: customs.CustomLosses | None = None

    def check(
        self, request: ForwardBackward, session_id: str, now: float, pinned: str | None = None
    ) -> Checked:
        """The batch a learner gets, or Invalid. Reads the registry, so it belongs on a thread of
        its own; the records it finds are in the batch, whatever expires while the batch waits.
        `pinned` is the id of a request that was accepted before: it gets the records it got then.
        """
        limits = self.settings
        spec, config, custom = self._loss(request, session_id)
        check_data(request.data, spec, self.info, limits, custom)
        strict = spec.name if spec.needs_stability else None
        named = provenance.structure(
            request.data, needed=strict, longest_id=limits.max_id, most=limits.max_spans
        )
        records, absent = self._records(named, session_id, now, pinned)
        resolved = provenance.resolve(
            request.data,
            provenance.Registry(records, absent, request.model_id),
            loss=strict,
            head_k=min(limits.head_k, self.info.vocab_size),
            tolerance=limits.logprob_tolerance,
        )
        check_finite_where(request.data, spec, resolved.stability)
        data = tuple(
            TrainingDatum(datum.tokens, _inputs(datum, custom), stability)
            for datum, stability in zip(request.data, resolved.stability, strict=True)
        )
        batch = TrainingBatch(request.seq_id, data, spec.name, config, request.forward_only, custom)
        return Checked(batch, frozenset(named), resolved.unverified, frozenset(records))

    def _loss(
        self, request: ForwardBackward, session_id: str
    ) -> tuple[LossSpec, dict[str, float], CustomLoss | None]:
        if request.loss_fn == customs.CUSTOM and self.customs is not None:
            custom = self.customs.find(session_id, request.loss_fn_config)
            return customs.spec_of(custom), {}, custom
        spec = find_loss(request.loss_fn, self.losses)
        return spec, complete_config(spec, request.loss_fn_config), None

    def _records(
        self, named: set[str], session_id: str, now: float, pinned: str | None
    ) -> tuple[dict[str, Record], dict[str, Absence]]:
        if not named:
            return {}, {}
        if pinned is not None:
            return self.sequences.pinned(pinned, named)
        return self.sequences.find(session_id, named, now)


# --------------------------------------------------------------------------- loss and config


def find_loss(name: str, losses: Mapping[str, LossSpec]) -> LossSpec:
    spec = losses.get(name)
    if spec is None:
        raise Invalid(f"loss_fn {name!r} is not offered; allowed are {_list(losses)}")
    return spec


def complete_config(spec: LossSpec, given: Mapping[str, ConfigValue]) -> dict[str, float]:
    """Every key of the loss with its number: the client's, checked, or the default."""
    config = {name: key.default for name, key in spec.config.items()}
    for name, value in given.items():
        key = spec.config.get(name)
        if key is None:
            raise Invalid(
                f"loss_fn_config key {name!r} is not one of {spec.name}'s; allowed are"
                f" {_list(spec.config) or 'none'}"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Invalid(f"loss_fn_config[{name!r}] must be a number, found {value!r}")
        if not math.isfinite(value) or not key.low <= value <= key.high:
            raise Invalid(
                f"loss_fn_config[{name!r}] must be a finite number in"
                f" [{key.low:g}, {key.high:g}], found {value:g}"
            )
        config[name] = float(value)
    for low, high in spec.ordered:
        if config[low] > config[high]:
            raise Invalid(
                f"loss_fn_config[{low!r}] is {config[low]:g}, above {high!r}, which is"
                f" {config[high]:g}"
            )
    return config


# --------------------------------------------------------------------------- data


def check_data(
    data: Sequence[Datum],
    spec: LossSpec,
    info: BaseModelInfo,
    settings: ServiceSettings,
    custom: CustomLoss | None = None,
) -> None:
    if not data:
        raise Invalid("data is empty; give at least one datum")
    if len(data) > settings.max_datums:
        raise TooLarge(f"data has {len(data)} datums; one request may have {settings.max_datums}")
    total = sum(len(datum.tokens) for datum in data)
    if total > settings.max_request_tokens:
        raise TooLarge(
            f"data has {total} input tokens; one request may have {settings.max_request_tokens}"
        )
    for i, datum in enumerate(data):
        _check_tokens(i, datum.tokens, info)
        if custom is None:
            _check_inputs(i, datum, spec, info, settings)
        else:
            customs.check_inputs(i, datum, custom)
            _target_shape(i, datum, spec, settings)
            _in_vocabulary(i, TOKENS, datum.inputs[TOKENS], info)


def _inputs(datum: Datum, custom: CustomLoss | None) -> Mapping[str, np.ndarray]:
    return datum.inputs if custom is None else customs.shaped(datum, custom)


def _check_tokens(i: int, tokens: np.ndarray, info: BaseModelInfo) -> None:
    if not 1 <= len(tokens) <= info.max_context:
        raise Invalid(
            f"datum {i}: model_input has {len(tokens)} tokens; {info.name} takes 1 to"
            f" {info.max_context}"
        )
    _in_vocabulary(i, "model_input", tokens, info)


def _check_inputs(
    i: int, datum: Datum, spec: LossSpec, info: BaseModelInfo, settings: ServiceSettings
) -> None:
    for name in datum.inputs.keys() - spec.inputs.keys():
        raise Invalid(
            f"datum {i}: loss_fn_inputs[{name!r}] is not an input of {spec.name}; allowed are"
            f" {_list(spec.inputs)}"
        )
    for name, need in spec.inputs.items():
        if need == "required" and name not in datum.inputs:
            raise Invalid(f"datum {i}: loss_fn_inputs lacks {name!r}, which {spec.name} needs")
    shape = _target_shape(i, datum, spec, settings)
    for name, array in datum.inputs.items():
        if name == TOKENS:
            _in_vocabulary(i, TOKENS, array, info)
            continue
        if array.dtype != np.float32:
            raise Invalid(f"datum {i}: {name} must be float32, found {array.dtype}")
        expected = shape if name == "weights" else shape[:1]
        if array.shape != expected:
            raise Invalid(
                f"datum {i}: {name} has shape {array.shape}, but needs {expected}"
                + (", the shape of target_tokens" if name == "weights" else ", one number a row")
            )
        if name != "logprobs":
            _finite(i, name, array)


def _target_shape(
    i: int, datum: Datum, spec: LossSpec, settings: ServiceSettings
) -> tuple[int, ...]:
    targets = datum.inputs[TOKENS]
    n = len(datum.tokens)
    if targets.dtype.kind != "i":
        raise Invalid(f"datum {i}: target_tokens must be int64, found {targets.dtype}")
    if targets.ndim == 2 and not spec.allows_alternatives:
        raise Invalid(
            f"datum {i}: target_tokens has shape {targets.shape}; {spec.name} takes one token a"
            f" row, shape ({n},)"
        )
    if targets.ndim not in (1, 2) or len(targets) != n:
        raise Invalid(
            f"datum {i}: target_tokens has shape {targets.shape}, but model_input has {n} tokens;"
            " there must be a row for each"
        )
    if targets.ndim == 2 and not 1 <= targets.shape[1] <= settings.max_alternatives:
        raise Invalid(
            f"datum {i}: target_tokens has {targets.shape[1]} alternatives a row; allowed are 1 to"
            f" {settings.max_alternatives}"
        )
    return targets.shape


def _in_vocabulary(i: int, name: str, array: np.ndarray, info: BaseModelInfo) -> None:
    if array.min() >= 0 and array.max() < info.vocab_size:
        return
    at = tuple(int(x) for x in np.argwhere((array < 0) | (array >= info.vocab_size))[0])
    where = ", ".join(map(str, at))
    raise Invalid(
        f"datum {i}: {name}[{where}] is {array[at]}, but token ids of {info.name} lie in"
        f" [0, {info.vocab_size})"
    )


def _finite(i: int, name: str, array: np.ndarray) -> None:
    if np.isfinite(array).all():
        return
    at = tuple(int(x) for x in np.argwhere(~np.isfinite(array))[0])
    where = ", ".join(map(str, at))
    raise Invalid(f"datum {i}: {name}[{where}] must be finite, found {array[at]}")


def check_finite_where(
    data: Sequence[Datum], spec: LossSpec, stability: Sequence[Stability | None]
) -> None:
    """`logprobs` must be finite where the loss would use them; elsewhere they may be anything."""
    if spec.finite_where is None:
        return
    for i, (datum, part) in enumerate(zip(data, stability, strict=True)):
        logprobs = datum.inputs["logprobs"]
        if spec.finite_where == "sampled":
            used = part.sequence_N >= 0 if part is not None else np.zeros(len(logprobs), bool)
        else:
            used = datum.inputs[spec.finite_where] != 0
        bad = np.flatnonzero(used & ~np.isfinite(logprobs))
        if bad.size:
            n = int(bad[0])
            rule = f"where {spec.finite_where} is not 0"
            why = "under a sampled span" if spec.finite_where == "sampled" else rule
            raise Invalid(f"datum {i}: logprobs[{n}] must be finite {why}, found {logprobs[n]}")


def _list(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names))
