"""Where keys and values lie between steps: prompts once for all their samples, and a row a sample.

R rows of a pool, H key/value heads, L places of a row, D head size.

A group holds requests of one shape: a pool of their prompts, a pool of their samples' own tokens.
A sample never copies its prompt. Each gets a place for every token it may ever hold when it is
admitted, so a decoding row never waits and never moves to another pool; rows stay packed at their
pool's front. All is counted against one budget of places; what nobody has reserved holds the prefix
cache, which gives way at once. Knows nothing of requests or attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from trimtab.engine.memory import is_out_of_memory
from trimtab.engine.prefix import PrefixCache, Scope, Source

SHORTEST = 32
_AT_ONCE = 16 * 2**20  # bytes asked for together for the prefix cache: asking costs like copying


class Owner(Protocol):
    """Who has a row: `slot` is its number, `used` how many of its places hold something."""

    slot: int

    @property
    def used(self) -> int: ...


class Shape(NamedTuple):
    """What requests of one group have in common: places of a prompt (0: no prompt to remember) and
    of a sample's own tokens, and about how many samples share a prompt."""

    prompt: int
    row: int
    samples: int

    @staticmethod
    def of(prompt: int, row: int, samples: int, longest: int) -> Shape:
        """Rounded up, so that few shapes are many requests' and little is wasted.

        >>> Shape.of(prompt=70, row=130, samples=3, longest=4096)
        Shape(prompt=96, row=192, samples=4)
        """
        return Shape(
            rounded(prompt, longest) if prompt else 0,
            rounded(row, longest),
            1 << (samples - 1).bit_length(),
        )


def rounded(places: int, longest: int) -> int:
    """The next of 32, 48, 64, 96, 128, 192, ... that holds `places`, at most `longest`."""
    size = SHORTEST
    while size < places:
        half = size + size // 2
        if half >= places:
            return min(half, longest)
        size *= 2
    return min(size, longest)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token leaves behind: (H, D of keys, D of values) of each layer by its index."""

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.dtype.itemsize * sum(h * (dk + dv) for h, dk, dv in self.layers)


class Pool:
    """Keys and values (R, H, L, D) a layer; the first rows are taken, each by one of `owners`.

    Attention multiplies what a row does not have by zero, so every place must hold a finite number:
    it begins as zero, and `clear` makes it so again."""

    def __init__(self, layout: KVLayout, length: int) -> None:
        self.length = length
        self.capacity = 0
        self.owners: list[Owner] = []
        options = {"dtype": layout.dtype, "device": layout.device}
        self.keys = [torch.zeros(0, h, length, dk, **options) for h, dk, _ in layout.layers]
        self.values = [torch.zeros(0, h, length, dv, **options) for h, _, dv in layout.layers]

    @property
    def places(self) -> int:
        return self.capacity * self.length

    def resize(self, capacity: int) -> None:
        """A tensor at a time, so that growing never holds two copies of the pool."""
        used = len(self.owners)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = old.new_zeros(capacity, *old.shape[1:])
                new[:used] = old[:used]
                tensors[layer] = new
        self.capacity = capacity

    def add(self, owner: Owner) -> None:
        owner.slot = len(self.owners)
        self.owners.append(owner)

    def remove(self, owner: Owner) -> None:
        """Give a row back; the last row takes its number."""
        last = self.owners.pop()
        if last is owner:
            return
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[owner.slot, :, : last.used] = tensor[last.slot, :, : last.used]
        last.slot = owner.slot
        self.owners[last.slot] = last

    def clear(self, owner: Owner) -> None:
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[owner.slot] = 0


class Group:
    """The prompts and the rows of requests of one shape."""

    def __init__(self, layout: KVLayout, shape: Shape) -> None:
        self.shape = shape
        self.prompts = Pool(layout, shape.prompt)
        self.rows = Pool(layout, shape.row)

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.prompts, self.rows


class KVMemory:
    """The groups and the budget. `reserve` and `release` count places; what is allocated never
    exceeds the budget as long as every prompt and every row was reserved. `taking` is asked for the
    bytes of each growth and raises where they are not to be had; `free` says how many there are,
    and without it nothing is kept for later requests.

        >>> memory = KVMemory(layout, budget=4096)
        >>> memory.reserve(shape.prompt) and memory.reserve(shape.row)
        True
        >>> group = memory.group(shape)
        >>> memory.add(group.prompts, [prompt])
    """

    def __init__(
        self,
        layout: KVLayout,
        budget: int,
        taking: Callable[[int], AbstractContextManager[None]] = lambda need: nullcontext(),
        free: Callable[[], int] | None = None,
    ) -> None:
        self.layout = layout
        self.budget = budget
        self._taking = taking
        self._free = free
        self._granted = 0  # bytes that were free when last asked, and are not yet taken
        self.reserved = 0
        self.groups: dict[Shape, Group] = {}
        self.prefixes = PrefixCache(layout)

    def reserve(self, places: int) -> bool:
        if self.reserved + places > self.budget:
            return False
        self.reserved += places
        self.prefixes.shrink(self.budget - self.reserved)
        return True

    def release(self, places: int) -> None:
        self.reserved -= places
        assert self.reserved >= 0, "more was released than reserved"

    def group(self, shape: Shape) -> Group:
        if shape not in self.groups:
            self.groups[shape] = Group(self.layout, shape)
        return self.groups[shape]

    @property
    def keeps(self) -> bool:
        """Whether anything is kept for later requests."""
        return self._free is not None

    def may_keep(self, places: int) -> bool:
        """Whether so many places could be the prefix cache's now."""
        return self.keeps and places <= self._unreserved()

    def keep(self, scope: Scope, tokens: np.ndarray, sources: Sequence[Source]) -> None:
        """Remember a sequence for later requests, where there is room that nobody needs."""
        if self._is_free(len(tokens) * self.layout.bytes_per_token):
            self.prefixes.add(scope, tokens, sources, room=self._unreserved())

    def _is_free(self, need: int) -> bool:
        assert self._free is not None, "nothing is kept here"
        if need > self._granted:
            self._granted = min(self._free(), max(need, _AT_ONCE))
        if need > self._granted:
            return False
        self._granted -= need
        return True

    def _unreserved(self) -> int:
        return self.budget - max(self.reserved, self.allocated())

    def add(self, pool: Pool, owners: list[Owner]) -> None:
        """Give each of `owners` a row that was reserved."""
        needed = len(pool.owners) + len(owners)
        if needed > pool.capacity:
            capacity = self._grown(pool, needed)
            more = (capacity - pool.capacity) * pool.length * self.layout.bytes_per_token
            with self._taking(more):
                pool.resize(capacity)
        for owner in owners:
            pool.add(owner)

    def remove(self, group: Group, pool: Pool, owner: Owner) -> None:
        pool.remove(owner)
        if not any(p.owners for p in group.pools):
            del self.groups[group.shape]
        elif len(pool.owners) <= pool.capacity // 4:
            self._shrink(pool)

    def _shrink(self, pool: Pool) -> None:
        """A smaller pool is a second one for a moment; without room for it, this one stays."""
        try:
            pool.resize(pool.capacity // 2)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise

    def allocated(self) -> int:
        """Places of the pools in memory now; what the prefix cache keeps comes on top."""
        return sum(pool.places for pool in self._pools())

    def _grown(self, pool: Pool, needed: int) -> int:
        if self._room_for(pool) < needed:
            for other in self._pools():
                if other is not pool and other.capacity > len(other.owners):
                    other.resize(len(other.owners))
        room = self._room_for(pool)
        assert room >= needed, "rows were taken that were not reserved"
        capacity = min(room, max(needed, 2 * pool.capacity))
        others = self.allocated() - pool.places
        self.prefixes.shrink(self.budget - others - capacity * pool.length)
        return capacity

    def _room_for(self, pool: Pool) -> int:
        """Rows that this pool could have, were the prefix cache empty."""
        return (self.budget - self.allocated() + pool.places) // max(1, pool.length)

    def _pools(self) -> Iterator[Pool]:
        for group in self.groups.values():
            yield from group.pools
