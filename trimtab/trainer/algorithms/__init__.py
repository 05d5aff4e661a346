"""The algorithms by name.

To add one: a file with a function (Batch, Config, State | None) -> Estimate and an ALGORITHM, and a
line here. Everything else (sampling, π_old, π_ref, mini-batches, token mean, the loss) is the
trainer's.
"""

from __future__ import annotations

from trimtab.errors import Invalid
from trimtab.trainer.algorithms import (
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    stable_reinforce,
)
from trimtab.trainer.algorithms.base import Algorithm, Estimate, State

__all__ = ["ALGORITHMS", "Algorithm", "Estimate", "State", "algorithm"]

ALGORITHMS: dict[str, Algorithm] = {
    module.ALGORITHM.name: module.ALGORITHM
    for module in (reinforce_pp, reinforce_pp_baseline, stable_reinforce, grpo, rloo)
}


def algorithm(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise Invalid(f"algorithm is {name!r}; it must be one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
