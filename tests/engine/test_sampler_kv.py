"""Pools keep their rows packed and their memory within the budget."""

from dataclasses import dataclass

import numpy as np
import torch

from trimtab.engine.kv import KVLayout, KVMemory, Shape, rounded
from trimtab.engine.prefix import Scope, Source, Version

LAYOUT = KVLayout(((2, 4, 4), (1, 8, 6)), torch.float32, torch.device("cpu"))


@dataclass(eq=False)
class Owner:
    name: float
    slot: int = -1
    used: int = 5


def written(pool, owner):
    """Every layer's first places in the owner's row."""
    return {float(x) for t in pool.keys + pool.values for x in t[owner.slot, :, :5].unique()}


def write(pool, owner):
    for tensor in pool.keys + pool.values:
        tensor[owner.slot, :, :5] = owner.name


def test_rows_move_together_with_what_they_hold():
    memory = KVMemory(LAYOUT, budget=1000)
    group = memory.group(Shape(64, 32, 4))
    owners = [Owner(float(i)) for i in range(1, 8)]
    for owner in owners:
        memory.add(group.rows, [owner])
        write(group.rows, owner)
    for leaving in (owners[0], owners[6], owners[3], owners[1]):
        memory.remove(group, group.rows, leaving)
        owners.remove(leaving)
        assert sorted(o.slot for o in owners) == list(range(len(owners)))
        assert all(written(group.rows, o) == {o.name} for o in owners)
    group.rows.clear(owners[0])
    assert written(group.rows, owners[0]) == {0.0} and written(group.rows, owners[1]) != {0.0}
    for owner in owners:
        memory.remove(group, group.rows, owner)
    assert memory.allocated() == 0 and not memory.groups


def test_what_is_allocated_never_exceeds_the_budget():
    memory = KVMemory(LAYOUT, budget=10 * 32)
    first, second = memory.group(Shape(0, 32, 1)), memory.group(Shape(0, 64, 1))
    rows = [Owner(1.0) for _ in range(5)]
    for row in rows:
        assert memory.reserve(32)
        memory.add(first.rows, [row])
        write(first.rows, row)
        assert memory.allocated() <= memory.budget
    assert first.rows.capacity == 8  # doubled, as long as there is room
    for _ in range(2):
        assert memory.reserve(64)
        memory.add(second.rows, [Owner(2.0)])
        assert memory.allocated() <= memory.budget
    assert first.rows.capacity == 5 and all(written(first.rows, r) == {1.0} for r in rows)
    assert not memory.reserve(64) and memory.reserve(32)
    memory.add(first.rows, [Owner(1.0)])
    assert memory.allocated() == memory.budget and first.rows.capacity == 6


def test_what_is_kept_gives_way_to_reservations_and_to_pools():
    memory = KVMemory(LAYOUT, budget=10 * 32, free=lambda: 2**40)
    rows = memory.group(Shape(0, 32, 1)).rows
    assert memory.reserve(32)
    memory.add(rows, [Owner(1.0)])
    for name in range(20):
        tokens = np.full(32, name, np.int32)
        memory.keep(Scope("", Version("", None)), tokens, [Source(rows, 0, 0, 32)])
    assert memory.prefixes.places == 288  # all but the row's own places
    assert memory.reserve(32) and memory.prefixes.places == 256
    memory.add(rows, [Owner(2.0)])
    assert memory.reserve(32) and memory.prefixes.places == 224
    memory.add(rows, [Owner(3.0)])
    assert rows.capacity == 4 and memory.prefixes.places == 192  # a pool doubles all the same
    assert memory.may_keep(192) and not memory.may_keep(193)
    assert memory.reserve(7 * 32) and memory.prefixes.places == 0


def test_shapes_are_few_and_waste_at_most_a_half():
    sizes = [rounded(n, 4096) for n in range(1, 4097)]
    assert len(set(sizes)) == 15
    assert all(n <= size <= max(32, 1.5 * n) for n, size in enumerate(sizes, 1))
    assert rounded(700, 720) == 720
    assert Shape.of(0, 9, 5, 100) == Shape(0, 32, 8)


def test_a_token_costs_what_its_layers_hold():
    assert LAYOUT.bytes_per_token == 4 * (2 * 8 + 14)
