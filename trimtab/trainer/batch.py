"""A batch as algorithms see it: numbers by sequence, no tokens, no server.

Building it is where sequences without a reward leave, each counted.
Shape letters: D sequences of the batch, `_D_N` a ragged list over D of (N,) row arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trimtab.trainer.trajectory import Bools, Floats, Group, Ints, Trajectory, rows


@dataclass(frozen=True, eq=False)
class Batch:
    """`old_D_N` is log π_old, `ref_D_N` log π_ref (None: no reference), `sampled_D_N` log q; all
    are 0 outside `mask_D_N`."""

    trajectories_D: tuple[Trajectory, ...]
    rewards_D: Floats
    group_D: Ints
    truncated_D: Bools
    mask_D_N: list[Bools]
    sampled_D_N: list[Floats]
    old_D_N: list[Floats]
    ref_D_N: list[Floats] | None = None

    @property
    def size(self) -> int:
        return len(self.trajectories_D)

    @property
    def action_tokens(self) -> int:
        return int(sum(mask_N.sum() for mask_N in self.mask_D_N))

    def with_old(self, old_D_N: Sequence[NDArray[np.float64]]) -> Batch:
        return replace(self, old_D_N=self._masked(old_D_N))

    def with_reference(self, ref_D_N: Sequence[NDArray[np.float64]]) -> Batch:
        return replace(self, ref_D_N=self._masked(ref_D_N))

    def with_rewards(self, rewards_D: Floats) -> Batch:
        return replace(self, rewards_D=rewards_D)

    def _masked(self, values_D_N: Sequence[NDArray[np.float64]]) -> list[Floats]:
        return [np.where(m, v, 0.0) for m, v in zip(self.mask_D_N, values_D_N, strict=True)]


def build(
    groups: Sequence[Group], *, smallest_group: int = 1, mask_truncated: bool = False
) -> tuple[Batch, dict[str, int]]:
    """The sequences that have a reward, and counts of those that were left out.

    `smallest_group` 2 leaves out a sequence whose group lost all others, since a baseline taken
    over itself alone would be its own reward.
    """
    kept: list[tuple[int, Trajectory]] = []
    left_out: Counter[str] = Counter()
    for group in groups:
        good: list[Trajectory] = []
        for trajectory in group.trajectories:
            reason = _left_out(trajectory, mask_truncated)
            if reason:
                left_out[reason] += 1
            else:
                good.append(trajectory)
        if len(good) < smallest_group:
            left_out["alone_in_group"] += len(good)
            good = []
        kept += [(group.index, trajectory) for trajectory in good]
    return _batch(kept), {reason: count for reason, count in left_out.items() if count}


def _left_out(trajectory: Trajectory, mask_truncated: bool) -> str:
    if trajectory.reward is None:
        return trajectory.failure.partition(":")[0]
    return "truncated" if mask_truncated and trajectory.completion.truncated else ""


def _batch(kept: Sequence[tuple[int, Trajectory]]) -> Batch:
    trajectories_D = tuple(trajectory for _, trajectory in kept)
    rows_D = [rows(trajectory) for trajectory in trajectories_D]
    sampled_D_N = [row.logprobs_N for row in rows_D]
    return Batch(
        trajectories_D=trajectories_D,
        rewards_D=np.array([t.reward for t in trajectories_D], dtype=np.float64),
        group_D=np.array([index for index, _ in kept], dtype=np.int64),
        truncated_D=np.array([t.completion.truncated for t in trajectories_D], dtype=bool),
        mask_D_N=[row.mask_N for row in rows_D],
        sampled_D_N=sampled_D_N,
        old_D_N=sampled_D_N,
    )
