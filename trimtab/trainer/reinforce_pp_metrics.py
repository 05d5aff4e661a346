"""What `advantages` reports, under the cookbook's names where it has one. docs/reinforce_pp.md
defines each. Knows no config; every value is a float.

D sequences, T tokens of one sequence, `_D_T` a ragged list over D of (T,) arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trimtab.trainer.kl import k2, k3
from trimtab.trainer.returns import Bools, action_values
from trimtab.trainer.stats import Floats, moments

K3_LIMIT = 30.0  # a metric must not overflow on one token


def counts(
    mask_D_T: Sequence[Bools],
    kept_D: Bools,
    truncated_D: Bools | None,
    reasons: Mapping[str, Bools],
) -> dict[str, float]:
    """Sequences and action tokens that count, and how many sequences were left out for what."""
    tokens_D = np.array([mask_T.sum() for mask_T in mask_D_T])
    found = {
        "batch/sequences": float(kept_D.size),
        "batch/sequences_kept": float(kept_D.sum()),
        "batch/action_tokens": float(tokens_D[kept_D].sum()),
    }
    for name, rows_D in reasons.items():
        found[f"batch/left_out_{name}"] = float(rows_D.sum())
    if truncated_D is not None:
        found["env/all/frac_truncated"] = float(truncated_D.mean())
    return found


def scores(step: str, rewards: Floats) -> dict[str, float]:
    """Scores of the kept sequences after `step`."""
    return _summary(f"reward/{step}", rewards)


def tokens(name: str, values_D_T: Sequence[Floats], mask_D_T: Sequence[Bools]) -> dict[str, float]:
    """Over all action tokens that count."""
    return _summary(name, action_values(values_D_T, mask_D_T))


def kl(
    log_ratio_D_T: Sequence[Floats] | None, mask_D_T: Sequence[Bools], bound: float | None
) -> dict[str, float]:
    """KL(pi_old || pi_ref) by three estimators, unclamped, and how often the clamp acts."""
    if log_ratio_D_T is None:
        return {}
    l = action_values(log_ratio_D_T, mask_D_T)
    beyond = np.abs(l) > (np.inf if bound is None else bound)
    return {
        "kl_policy_base": moments(l)[0],
        "kl_policy_base_v2": moments(k2(l))[0],
        "kl_policy_base_v3": moments(k3(np.clip(l, -K3_LIMIT, K3_LIMIT)))[0],
        "kl_policy_base_max": float(np.abs(l).max()),
        "kl_clamp_frac": float(beyond.mean()),
    }


def _summary(name: str, values: Floats) -> dict[str, float]:
    mean, var = moments(values)
    return {
        f"{name}/mean": mean,
        f"{name}/std": var**0.5,
        f"{name}/min": float(values.min()),
        f"{name}/max": float(values.max()),
    }
