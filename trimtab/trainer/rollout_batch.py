"""What a caller hands to `advantages`, checked and made float64. Knows no algorithm.

Everything wrong is told with the index where it stands. D sequences, T tokens of one sequence,
`_D_T` a ragged list over D of (T,) arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab.errors import Invalid
from trimtab.trainer.reinforce_pp_config import LIMIT
from trimtab.trainer.returns import Bools, log_ratio
from trimtab.trainer.stats import Floats

Ragged = Sequence[ArrayLike]


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """`log_ratio_D_T` is log pi_old - log pi_ref (None without a reference); it and
    `token_rewards_D_T` are finite on action tokens. `group_D` numbers the groups from 0."""

    rewards_D: Floats
    mask_D_T: list[Bools]
    log_ratio_D_T: list[Floats] | None
    token_rewards_D_T: list[Floats] | None
    group_D: NDArray[np.int64] | None
    truncated_D: Bools | None


def check(
    rewards: Iterable[object],
    logprobs: Ragged,
    ref_logprobs: Ragged | None,
    action_mask: Ragged,
    *,
    group_ids: Iterable[Hashable] | None,
    truncated: Iterable[object] | None,
    token_rewards: Ragged | None,
) -> RolloutBatch:
    """The arguments of `advantages`, or one sentence on the first thing wrong with them.

    check([1.0], [[-0.5, nan]], None, [[1, 0]], ...).mask_D_T == [array([True, False])]
    """
    rewards_D = _rewards(rewards)
    mask_D_T = [_mask(i, mask) for i, mask in enumerate(action_mask)]
    _same_length("action_mask", len(mask_D_T), rewards_D.size)
    old_D_T = _ragged("logprobs", logprobs, mask_D_T)
    extra_D_T = None
    if token_rewards is not None:
        extra_D_T = _ragged("token_rewards", token_rewards, mask_D_T)
        _finite("token_rewards", extra_D_T, mask_D_T)
    return RolloutBatch(
        rewards_D=rewards_D,
        mask_D_T=mask_D_T,
        log_ratio_D_T=_log_ratios(old_D_T, ref_logprobs, mask_D_T),
        token_rewards_D_T=extra_D_T,
        group_D=None if group_ids is None else _groups(group_ids, rewards_D.size),
        truncated_D=None if truncated is None else _flags(truncated, rewards_D.size),
    )


def _rewards(rewards: Iterable[object]) -> Floats:
    values = [_reward(i, value) for i, value in enumerate(rewards)]
    if not values:
        raise Invalid("rewards: found an empty batch, expected at least one sequence")
    return np.array(values, dtype=np.float64)


def _reward(i: int, found: object) -> float:
    number = np.nan
    if not isinstance(found, (str, bytes)) and np.ndim(found) == 0:  # type: ignore[arg-type]
        with suppress(TypeError, ValueError, OverflowError):
            number = float(found)  # type: ignore[arg-type]
    if not abs(number) <= LIMIT:
        raise Invalid(
            f"rewards[{i}]: found {found!r}, expected a finite number; leave a failed sample out "
            "of the batch, or give it 0 and no action token"
        )
    return number


def _mask(i: int, mask: ArrayLike) -> Bools:
    values_T = np.asarray(mask)
    if values_T.ndim != 1 or not np.isin(values_T, (0, 1)).all():
        raise Invalid(f"action_mask[{i}]: expected a 1-D array of 0 and 1 (or of booleans)")
    return values_T.astype(np.bool_)


def _ragged(name: str, arrays: Ragged, mask_D_T: list[Bools]) -> list[Floats]:
    _same_length(name, len(arrays), len(mask_D_T))
    out = []
    for i, (array, mask_T) in enumerate(zip(arrays, mask_D_T, strict=True)):
        values_T = np.asarray(array, dtype=np.float64)
        if values_T.shape != mask_T.shape:
            raise Invalid(
                f"{name}[{i}]: found shape {values_T.shape}, expected {mask_T.shape} "
                "as its action_mask"
            )
        out.append(values_T)
    return out


def _log_ratios(
    old_D_T: list[Floats], ref_logprobs: Ragged | None, mask_D_T: list[Bools]
) -> list[Floats] | None:
    if ref_logprobs is None:
        return None
    ref_D_T = _ragged("ref_logprobs", ref_logprobs, mask_D_T)
    _finite("logprobs", old_D_T, mask_D_T)
    _finite("ref_logprobs", ref_D_T, mask_D_T)
    return [log_ratio(*rows) for rows in zip(old_D_T, ref_D_T, mask_D_T, strict=True)]


def _finite(name: str, values_D_T: list[Floats], mask_D_T: list[Bools]) -> None:
    for i, (values_T, mask_T) in enumerate(zip(values_D_T, mask_D_T, strict=True)):
        bad = np.flatnonzero(mask_T & ~(np.abs(values_T) <= LIMIT))
        if bad.size:
            t = int(bad[0])
            raise Invalid(
                f"{name}[{i}][{t}]: found {values_T[t]} on an action token, "
                "expected a finite number"
            )


def _groups(group_ids: Iterable[Hashable], size: int) -> NDArray[np.int64]:
    numbers: dict[Hashable, int] = {}
    group_D = np.array([numbers.setdefault(g, len(numbers)) for g in group_ids], dtype=np.int64)
    _same_length("group_ids", group_D.size, size)
    return group_D


def _flags(truncated: Iterable[object], size: int) -> Bools:
    flags = list(truncated)
    _same_length("truncated", len(flags), size)
    for i, flag in enumerate(flags):
        if not isinstance(flag, (bool, np.bool_)):
            raise Invalid(f"truncated[{i}]: found {flag!r}, expected true or false")
    return np.array(flags, dtype=np.bool_)


def _same_length(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise Invalid(f"{name}: found {found} entries, expected {expected}, one for each reward")
