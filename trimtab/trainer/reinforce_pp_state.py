"""What a REINFORCE++ run remembers between batches, as a checkpoint stores it. Knows no files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.errors import Invalid
from trimtab.trainer.reinforce_pp_config import is_number
from trimtab.trainer.stats import RunningStats


@dataclass(frozen=True, slots=True)
class ReinforcePPState:
    """`scores` for reward_norm='running', `returns` for reward_scale_mode='running_return_std'.

    >>> ReinforcePPState.from_json(ReinforcePPState().to_json()) == ReinforcePPState()
    True
    """

    scores: RunningStats = field(default_factory=RunningStats)
    returns: RunningStats = field(default_factory=RunningStats)

    def to_json(self) -> dict[str, dict[str, float]]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Any) -> ReinforcePPState:
        if not _has_shape_of(stored, cls().to_json()):
            raise Invalid(f"state: found {stored!r}, expected what to_json() returned")
        return cls(**{name: RunningStats(**stats) for name, stats in stored.items()})


def _has_shape_of(found: Any, model: Any) -> bool:
    if not isinstance(model, dict):
        return is_number(found)
    if not isinstance(found, dict) or found.keys() != model.keys():
        return False
    return all(_has_shape_of(found[name], model[name]) for name in model)
