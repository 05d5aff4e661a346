"""What an algorithm is: a batch in, an advantage for every action token out. Knows no loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.trainer.batch import Batch
from trimtab.trainer.config import Config
from trimtab.trainer.trajectory import Floats

State = dict[str, Any]  # what a checkpoint stores of it, as JSON


@dataclass(frozen=True, eq=False)
class Estimate:
    """`advantages_D_N` are 0 outside the batch's mask."""

    advantages_D_N: list[Floats]
    metrics: dict[str, float] = field(default_factory=dict)
    state: State | None = None


@dataclass(frozen=True)
class Algorithm:
    """`loss` and `old_logprobs` are defaults that a Config may override. `smallest_group` 2 says
    that a baseline is taken over a prompt's other completions."""

    name: str
    doc: str
    loss: str
    old_logprobs: Literal["sampler", "recompute"]
    smallest_group: int
    advantages: Callable[[Batch, Config, State | None], Estimate]
