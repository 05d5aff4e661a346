"""Where keys and values lie between steps: one store a prompt, and pools of equally long rows.

R rows of a pool, H key/value heads, L places of a row, D head size, P prompt tokens.

A prompt is computed once and copied to the rows that continue it. A row gets a place for every
token it may ever hold, in the pool of the next length class, so a decoding row never waits and
never moves to another pool; rows stay packed at a pool's front. All is counted against one budget
of places. Knows nothing of requests, tokens or attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SHORTEST = 64


def length_class(places: int, longest: int) -> int:
    """The next of 64, 96, 128, 192, 256, 384, ... that holds `places`, at most `longest`.

    >>> length_class(130, 4096), length_class(4000, 4096)
    (192, 4096)
    """
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

    def zeros(self, *shape: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of every layer, (*shape[:-1], H, shape[-1], D)."""
        *outer, places = shape
        keys, values = [], []
        for heads, key_size, value_size in self.layers:
            for into, size in ((keys, key_size), (values, value_size)):
                into.append(
                    torch.zeros(*outer, heads, places, size, dtype=self.dtype, device=self.device)
                )
        return keys, values


class PromptKV:
    """Keys and values (H, P, D) a layer of one prompt."""

    def __init__(self, layout: KVLayout, places: int) -> None:
        self.places = places
        self.keys, self.values = layout.zeros(places)


class Pool:
    """Keys and values (R, H, L, D) a layer; the first `used` of the R rows are taken.

    Attention multiplies what a row does not have by zero, so every place must hold a finite number:
    it begins as zero, and `clear` makes it so again."""

    def __init__(self, layout: KVLayout, length: int) -> None:
        self.length = length
        self.used = 0
        self.capacity = 0
        self.keys, self.values = layout.zeros(0, length)

    def resize(self, capacity: int) -> None:
        """A tensor at a time, so that growing never holds two copies of the pool."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = old.new_zeros(capacity, *old.shape[1:])
                new[: self.used] = old[: self.used]
                tensors[layer] = new
        self.capacity = capacity

    def fill(self, row: int, count: int, prompt: PromptKV) -> None:
        """Copy a prompt to `count` rows from `row` on, zeros behind it: what a masked product
        does not look at must still be a number, whatever the row held before."""
        for mine, theirs in ((self.keys, prompt.keys), (self.values, prompt.values)):
            for into, source in zip(mine, theirs, strict=True):
                into[row : row + count, :, : prompt.places] = source
                into[row : row + count, :, prompt.places :] = 0

    def clear(self, row: int) -> None:
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[row] = 0

    def move(self, source: int, into: int) -> None:
        """Copy a row over another, whole."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[into] = tensor[source]


class KVMemory:
    """The pools and the budget. `reserve` and `release` count places; what is allocated never
    exceeds the budget as long as every prompt and every row was reserved.

    >>> memory = KVMemory(layout, budget=4096, longest=512)
    >>> memory.reserve(memory.row_places(100))
    True
    """

    def __init__(self, layout: KVLayout, budget: int, longest: int) -> None:
        self.layout = layout
        self.budget = budget
        self.longest = longest
        self.reserved = 0
        self.prompts = 0
        self.pools: dict[int, Pool] = {}

    def row_places(self, places: int) -> int:
        """What a row that needs `places` takes of the budget."""
        return length_class(places, self.longest)

    def reserve(self, places: int) -> bool:
        if self.reserved + places > self.budget:
            return False
        self.reserved += places
        return True

    def release(self, places: int) -> None:
        self.reserved -= places
        assert self.reserved >= 0

    def new_prompt(self, places: int) -> PromptKV:
        if self.allocated() + places > self.budget:
            self._give_up_spare_rows(self.pools.values())
        self.prompts += places
        return PromptKV(self.layout, places)

    def drop_prompt(self, prompt: PromptKV) -> None:
        self.prompts -= prompt.places

    def add_rows(self, length: int, count: int) -> tuple[Pool, int]:
        """Take `count` reserved rows: their pool and the first of their numbers in it."""
        pool = self.pools.get(length)
        if pool is None:
            pool = self.pools[length] = Pool(self.layout, length)
        first = pool.used
        if first + count > pool.capacity:
            pool.resize(self._grown(pool, first + count))
        pool.used += count
        return pool, first

    def remove_row(self, pool: Pool, row: int, places: int) -> None:
        """Give a row back; the last row, holding `places`, takes its number."""
        pool.used -= 1
        if row != pool.used:
            pool.move(pool.used, row)
        if pool.used == 0:
            del self.pools[pool.length]
        elif pool.used <= pool.capacity // 4:
            pool.resize(pool.capacity // 2)

    def allocated(self, pools: Iterable[Pool] | None = None) -> int:
        """Places in memory now."""
        of = self.pools.values() if pools is None else pools
        return self.prompts + sum(p.capacity * p.length for p in of)

    def _grown(self, pool: Pool, needed: int) -> int:
        others = [p for p in self.pools.values() if p is not pool]
        room = (self.budget - self.allocated(others)) // pool.length
        if room < needed:
            self._give_up_spare_rows(others)
            room = (self.budget - self.allocated(others)) // pool.length
        assert room >= needed, "rows were taken that were not reserved"
        return min(room, max(needed, 2 * pool.capacity))

    def _give_up_spare_rows(self, pools: Iterable[Pool]) -> None:
        for pool in pools:
            if pool.capacity > pool.used:
                pool.resize(pool.used)
