"""What the algorithms with a group baseline share: scores, spreading to rows, metrics."""

from __future__ import annotations

import numpy as np

from trimtab.trainer import reinforce_pp_metrics as report
from trimtab.trainer.algorithms.base import Estimate
from trimtab.trainer.batch import Batch
from trimtab.trainer.config import Config
from trimtab.trainer.returns import clamp, log_ratio
from trimtab.trainer.trajectory import Floats


def scores(batch: Batch, config: Config) -> Floats:
    """R - β Σ_t (log π_old - log π_ref): the whole sequence's KL, taken off before the baseline."""
    if config.kl_penalty_coef == 0:
        return batch.rewards_D
    kl_D_N = [clamp(l_N, config.kl_clamp) for l_N in _log_ratios(batch)]
    return batch.rewards_D - config.kl_penalty_coef * np.array([kl_N.sum() for kl_N in kl_D_N])


def members(batch: Batch) -> list[np.ndarray]:
    """The indices of each group's sequences."""
    return [np.flatnonzero(batch.group_D == group) for group in np.unique(batch.group_D)]


def estimate(batch: Batch, advantages_D: Floats, config: Config) -> Estimate:
    """Every action token of a sequence carries the sequence's advantage."""
    spread = [np.where(m, a, 0.0) for m, a in zip(batch.mask_D_N, advantages_D, strict=True)]
    metrics = report.tokens("advantage", spread, batch.mask_D_N)
    if batch.ref_D_N is not None:
        metrics |= report.kl(_log_ratios(batch), batch.mask_D_N, config.kl_clamp)
    return Estimate(spread, metrics)


def _log_ratios(batch: Batch) -> list[Floats]:
    assert batch.ref_D_N is not None
    parts = zip(batch.old_D_N, batch.ref_D_N, batch.mask_D_N, strict=True)
    return [log_ratio(old_N, ref_N, mask_N) for old_N, ref_N, mask_N in parts]
