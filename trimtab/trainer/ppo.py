"""PPO's clipped objective on token arrays, its gradient written out, and which branch each took.

The server computes the loss it trains with; this one is for checking by hand, for clip fractions
from returned log-probabilities, and for the dual clip. N tokens; rho = pi_theta / pi_old.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab.errors import Invalid
from trimtab.trainer.stats import Floats

LOG_RATIO_LIMIT = 30.0  # as in every loss of the server: exp(30) still squares within float32

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PPOTerms:
    """`loss_N` to be summed; `gradient_N` of that sum with respect to log pi_theta; and the tokens
    on which a bound took the gradient away."""

    loss_N: Floats
    gradient_N: Floats
    clipped_low_N: Bools
    clipped_high_N: Bools
    dual_clipped_N: Bools


def ppo_terms(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    dual_clip: float | None = None,
) -> PPOTerms:
    """loss = -min(rho A, clip(rho, low, high) A); with `dual_clip` c, for A < 0, at most c |A|.

    The thresholds bound the ratio itself, as in the service's `ppo`. A token with A = 0 is inert,
    whatever its log-probabilities are; at a bound the gradient passes. For log rho = [0.1, -0.3]
    and A = [1, -1]: loss [-1.1052, 0.8], gradient [-1.1052, 0].
    """
    _check(clip_low_threshold, clip_high_threshold, dual_clip)
    A_N = np.asarray(advantages, dtype=np.float64)
    active_N = A_N != 0
    log_ratio_N = _difference(logprobs, old_logprobs, active_N)
    ratio_N = np.exp(np.clip(log_ratio_N, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    low_N = (A_N < 0) & (ratio_N < clip_low_threshold)
    high_N = (A_N > 0) & (ratio_N > clip_high_threshold)
    dual_N = (A_N < 0) & (ratio_N > (np.inf if dual_clip is None else dual_clip))
    kept_N = np.where(low_N, clip_low_threshold, np.where(high_N, clip_high_threshold, ratio_N))
    if dual_clip is not None:
        kept_N = np.where(dual_N, dual_clip, kept_N)
    loss_N = -kept_N * A_N
    flat_N = low_N | high_N | dual_N | (np.abs(log_ratio_N) > LOG_RATIO_LIMIT)
    return PPOTerms(loss_N, np.where(flat_N, 0.0, loss_N), low_N, high_N, dual_N)


def _difference(logprobs: ArrayLike, old_logprobs: ArrayLike, active_N: Bools) -> Floats:
    new_N, old_N = np.asarray(logprobs, np.float64), np.asarray(old_logprobs, np.float64)
    if not new_N.shape == old_N.shape == active_N.shape:
        raise Invalid(
            f"logprobs, old_logprobs, advantages: found shapes {new_N.shape}, {old_N.shape}, "
            f"{active_N.shape}, expected one shape"
        )
    new_N, old_N = np.where(active_N, new_N, 0.0), np.where(active_N, old_N, 0.0)
    for name, values_N in (("logprobs", new_N), ("old_logprobs", old_N)):
        if not np.isfinite(values_N).all():
            i = int(np.argmin(np.isfinite(values_N)))
            raise Invalid(
                f"{name}[{i}]: found {values_N.flat[i]}, expected a finite number where A != 0"
            )
    return new_N - old_N


def _check(low: float, high: float, dual_clip: float | None) -> None:
    if not 0 <= low <= 1 <= high:
        raise Invalid(
            f"clip_low_threshold, clip_high_threshold: found {low}, {high}, "
            "expected bounds of the ratio with 0 <= low <= 1 <= high"
        )
    if dual_clip is not None and not 1 < dual_clip < np.inf:
        raise Invalid(f"dual_clip: found {dual_clip}, expected None or a number above 1")
