"""Sampling that runs ahead of training by a bounded number of steps.

Groups are numbered through the run; group j belongs to batch j // groups_per_batch, which training
step j // groups_per_batch consumes. Group j may start once its batch is at most K steps ahead of
the published weights, and takes the newest ones. So nothing is discarded, no batch is older than K
steps when it is trained on, and at most (K + 1) batches are in flight. With K = 0 sampling and
training take turns. Knows no rewards and no training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")
R = TypeVar("R")

Sample = Callable[[C, int, int], Awaitable[R]]  # (client, version, group number)


@dataclass(frozen=True)
class Ages:
    """How old a batch is when it is trained on, in steps.

    >>> ages(7, [5, 7, 6, 6])
    Ages(low=0, mean=1.0, high=2)
    """

    low: int
    mean: float
    high: int


def ages(step: int, versions: list[int]) -> Ages:
    found = [step - version for version in versions]
    return Ages(min(found), sum(found) / len(found), max(found))


class Ahead(Generic[C, R]):
    """ahead = Ahead(sample, groups_per_batch=16, max_steps_off_policy=1, first=0, last=100)
    ahead.publish(client, version=0); batch = await ahead.batch(0); ahead.publish(client, 1); ...

    `last` batches in all: nothing is sampled that no step will use.
    """

    def __init__(
        self,
        sample: Sample[C, R],
        *,
        groups_per_batch: int,
        max_steps_off_policy: int,
        first: int,
        last: int,
        max_in_flight: int = 0,
    ) -> None:
        self.sample = sample
        self.groups_per_batch = groups_per_batch
        self.lag = max_steps_off_policy
        self.next_group = first * groups_per_batch
        self.end = last * groups_per_batch
        # Unlimited means: limited by K alone.
        self.places = asyncio.Semaphore(max_in_flight or (self.lag + 1) * groups_per_batch)
        self.tasks: dict[int, asyncio.Task[R]] = {}
        self.client: C
        self.version = -1

    def publish(self, client: C, version: int) -> None:
        """New weights, those after `version` training steps: groups that start from now on use
        them, and one more batch may start."""
        self.client, self.version = client, version
        limit = min(self.end, (version + self.lag + 1) * self.groups_per_batch)
        while self.next_group < limit:
            group = self.next_group
            self.tasks[group] = asyncio.create_task(self._run(group))
            self.next_group += 1

    async def batch(self, step: int) -> list[R]:
        """The groups of this step, in their order. The first failure among them is raised."""
        numbers = range(step * self.groups_per_batch, (step + 1) * self.groups_per_batch)
        groups = await asyncio.gather(*(self.tasks[number] for number in numbers))
        for number in numbers:
            del self.tasks[number]
        return groups

    async def _run(self, group: int) -> R:
        async with self.places:
            return await self.sample(self.client, self.version, group)

    async def close(self) -> None:
        """Cancel what is still in flight."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.tasks.clear()
