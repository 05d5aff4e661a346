"""Every choice of REINFORCE++, declared once. docs/reinforce_pp.md gives the reasons.

Knows no arrays. A config that contradicts itself is refused when it is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trimtab.errors import Invalid

RewardNorm = Literal["none", "batch", "running", "fixed"]
ScaleMode = Literal["constant", "running_return_std"]
Whiten = Literal["full", "no_std", "none"]

LIMIT = 1e30  # of any number that enters: products and squares then stay finite in float64


def _doc(text: str) -> dict[str, str]:
    return {"doc": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePPConfig:
    """The defaults suit a verifiable reward without a reference model; with a reward model, give
    `kl_coef` 0.01. Each field's `metadata["doc"]` says what it does.

    >>> ReinforcePPConfig(kl_coef=0.01).reward_norm
    'none'
    >>> ReinforcePPConfig(gamma=1.5)
    Traceback (most recent call last):
    trimtab.errors.Invalid: gamma: found 1.5, expected a number from 0 to 1
    """

    truncated_reward: float | None = field(
        default=None,
        metadata=_doc("the score of a truncated sequence instead of its own (None: its own)"),
    )
    mask_truncated: bool = field(
        default=False,
        metadata=_doc("leave truncated sequences out of loss, baseline and every statistic"),
    )
    group_baseline: bool = field(
        default=False,
        metadata=_doc("subtract the mean score of the sequence's group (REINFORCE++-baseline)"),
    )
    reward_norm: RewardNorm = field(
        default="none",
        metadata=_doc(
            "z-score of the scores: over this batch, over the run so far (running), or with "
            "reward_mean and reward_std (fixed)"
        ),
    )
    reward_mean: float | None = field(
        default=None, metadata=_doc("mean of the scores for reward_norm='fixed'")
    )
    reward_std: float | None = field(
        default=None, metadata=_doc("standard deviation of the scores for reward_norm='fixed'")
    )
    reward_clip: tuple[float, float] | None = field(
        default=(-10.0, 10.0), metadata=_doc("bounds (low, high) of the scores (None: unbounded)")
    )
    clip_before_norm: bool = field(
        default=False, metadata=_doc("clip, then normalise (default: normalise, then clip)")
    )
    reward_scale: float = field(
        default=1.0,
        metadata=_doc("multiplies the clipped scores: the exchange rate of reward against KL"),
    )
    reward_scale_mode: ScaleMode = field(
        default="constant",
        metadata=_doc(
            "running_return_std also divides by the standard deviation of the clipped scores of "
            "the run so far"
        ),
    )
    kl_coef: float = field(
        default=0.0, metadata=_doc("β: weight of the reference KL taken from each token's reward")
    )
    kl_clamp: float | None = field(
        default=10.0, metadata=_doc("bound of a token's |log ratio| in that KL (None: unbounded)")
    )
    gamma: float = field(default=1.0, metadata=_doc("γ: discount for each action token"))
    whiten: Whiten = field(
        default="full",
        metadata=_doc("z-score over all action tokens of the batch; no_std only centres"),
    )

    @classmethod
    def source(cls, **changes: Any) -> ReinforcePPConfig:
        """The REINFORCE++ page taken literally: scores z-scored over the batch, clipped, scaled,
        with a token-level KL penalty; `changes` on top."""
        preset: dict[str, Any] = {"reward_norm": "batch", "kl_coef": 0.01}
        return cls(**(preset | changes))

    @classmethod
    def baseline(cls, **changes: Any) -> ReinforcePPConfig:
        """REINFORCE++-baseline: group mean subtracted, no KL in the reward (it is a k2 loss)."""
        preset: dict[str, Any] = {"group_baseline": True}
        return cls(**(preset | changes))

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_numbers(self)
        _check_clip(self)
        _check_together(self)


def _check_choices(config: ReinforcePPConfig) -> None:
    choices = {"reward_norm": RewardNorm, "reward_scale_mode": ScaleMode, "whiten": Whiten}
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in get_args(allowed):
            raise _refused(name, value, "one of " + ", ".join(get_args(allowed)))
    for name in ("mask_truncated", "group_baseline", "clip_before_norm"):
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise _refused(name, value, "true or false")


def _check_numbers(config: ReinforcePPConfig) -> None:
    for name in ("truncated_reward", "reward_mean"):
        value = getattr(config, name)
        if value is not None and not is_number(value):
            raise _refused(name, value, "None or a finite number")
    for name in ("reward_std", "kl_clamp"):
        value = getattr(config, name)
        if value is not None and not (is_number(value) and value > 0):
            raise _refused(name, value, "None or a finite number above 0")
    if not (is_number(config.reward_scale) and config.reward_scale > 0):
        raise _refused("reward_scale", config.reward_scale, "a finite number above 0")
    if not (is_number(config.kl_coef) and config.kl_coef >= 0):
        raise _refused("kl_coef", config.kl_coef, "a finite number of 0 or more")
    if not (is_number(config.gamma) and 0 <= config.gamma <= 1):
        raise _refused("gamma", config.gamma, "a number from 0 to 1")


def _check_clip(config: ReinforcePPConfig) -> None:
    found = config.reward_clip
    if found is None:
        return
    pair = tuple(found) if isinstance(found, (tuple, list)) else ()
    if len(pair) != 2 or not all(map(is_number, pair)) or not pair[0] < pair[1]:
        raise _refused("reward_clip", found, "None or two finite numbers (low, high), low < high")
    object.__setattr__(config, "reward_clip", pair)  # a list, when it came from JSON


def _check_together(config: ReinforcePPConfig) -> None:
    for name in ("reward_mean", "reward_std"):
        value, fixed = getattr(config, name), config.reward_norm == "fixed"
        if fixed and value is None:
            raise _refused(name, value, "a number, because reward_norm is 'fixed'")
        if value is not None and not fixed:
            raise _refused(name, value, f"None, because reward_norm is {config.reward_norm!r}")
    if config.mask_truncated and config.truncated_reward is not None:
        raise _refused(
            "truncated_reward", config.truncated_reward, "None, because mask_truncated drops them"
        )


def is_number(value: object) -> bool:
    """A finite int or float of magnitude at most LIMIT; no bool, no string."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and abs(value) <= LIMIT


def _refused(name: str, found: object, expected: str) -> Invalid:
    return Invalid(f"{name}: found {found!r}, expected {expected}")
