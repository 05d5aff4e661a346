"""Which datums begin with the same tokens, so that what they share is computed once.

A request is cut into sets: members that share their first `prefix` tokens, or datums of their own
(prefix 0). Two levels, no more: what some members share beyond the prefix is computed for each.
Sets are joined from the longest common beginnings to the shorter, wherever that saves rows. Knows
nothing of models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 8
"""Tokens below which sharing is not worth a segment of its own."""


@dataclass(frozen=True, slots=True)
class Common:
    """`members` (positions in the request, ascending) begin with the same `prefix` tokens."""

    prefix: int
    members: tuple[int, ...]

    @property
    def saved(self) -> int:
        return self.prefix * (len(self.members) - 1)


def joined(depth: int, sets: list[Common]) -> list[Common]:
    """Sets that all begin with the same `depth` tokens: those that gain by it become one."""
    joining = [each for each in sets if depth * len(each.members) > each.saved]
    members = sorted(m for each in joining for m in each.members)
    one = Common(depth, tuple(members))
    if depth < LEAST or one.saved <= sum(each.saved for each in joining):
        return sets
    return [each for each in sets if each not in joining] + [one]


def common(sequences: Sequence[np.ndarray]) -> list[Common]:
    """The sets of a request in the order of their first members.

    >>> common([np.arange(20), np.full(9, 7), np.r_[np.arange(12), 99]])
    [Common(prefix=12, members=(0, 2)), Common(prefix=0, members=(1,))]
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes())
    path: list[tuple[int, list[Common]]] = [(0, [])]  # tokens shared so far, and the sets there
    for at, i in enumerate(order):
        after = order[at + 1] if at + 1 < len(order) else None
        shared = 0 if after is None else shared_tokens(sequences[i], sequences[after])
        sets = [Common(0, (i,))]
        while path[-1][0] > shared:
            depth, more = path.pop()
            sets = joined(depth, more + sets)
        if path[-1][0] < shared:
            path.append((shared, []))
        path[-1][1].extend(sets)
    return sorted(path[0][1], key=lambda each: each.members[0])


def shared_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike.

    >>> shared_tokens(np.array([4, 5, 6]), np.array([4, 5, 7, 8]))
    2
    """
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
