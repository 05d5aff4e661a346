"""The tree of kept prefixes, against a set of all prefixes; each place holds its prefix' number."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.engine.kv import KVLayout, Pool
from trimtab.engine.prefix import LEAST, PrefixCache, Scope, Source, Version
from trimtab.engine.sharing import shared_tokens

LAYOUT = KVLayout(((2, 3, 1), (1, 2, 2)), torch.float32, torch.device("cpu"))
LONGEST = 96


class Prefixes:
    """A number for each prefix, which is what its last token leaves behind."""

    def __init__(self):
        self.numbers = {}
        self.fresh = count(1)

    def of(self, tokens):
        prefixes = (tuple(tokens[: i + 1]) for i in range(len(tokens)))
        return torch.tensor([self.numbers.setdefault(p, next(self.fresh)) for p in prefixes])


@pytest.fixture
def pool():
    found = Pool(LAYOUT, LONGEST)
    found.resize(2)
    return found


def write(pool, slot, numbers):
    for tensor in pool.keys + pool.values:
        tensor[slot] = -1.0
        tensor[slot, :, : len(numbers)] = numbers.float()[:, None]


def sources(pool, numbers, cut):
    """The sequence in two rows, as a prompt and a sample's own tokens."""
    write(pool, 0, numbers[:cut])
    write(pool, 1, numbers[cut:])
    return [Source(pool, 0, 0, cut), Source(pool, 1, cut, len(numbers))]


def copied(cache, scope, tokens, pool):
    """How many tokens of the head came, all of them checked in every layer."""
    write(pool, 0, torch.empty(0))
    n = cache.copy(scope, tokens, pool, 0)
    for tensor in pool.keys + pool.values:
        assert (tensor[0, :, n:] == -1).all()
    assert all(t[0, :, :n].equal(pool.keys[0][0, :1, :n, :1].expand(t[0, :, :n].shape))
               for t in pool.keys + pool.values)  # fmt: skip
    return n, pool.keys[0][0, 0, :n, 0].long()


def sequence(rng, earlier):
    """Continues some head of an earlier one, or begins anew."""
    head = rng.choice(earlier)[: rng.randrange(LONGEST)] if earlier and rng.random() < 0.8 else []
    more = rng.randrange(1, LONGEST - len(head) + 1)
    return [*head, *(rng.randrange(3) for _ in range(more))]


@pytest.mark.parametrize("room", [10**6, 500, 120])
def test_the_longest_kept_head_comes_back_whole(pool, room):
    rng, prefixes = random.Random(room), Prefixes()
    cache, earlier = PrefixCache(LAYOUT), []
    scopes = [Scope(owner, Version(v, None)) for owner, v in ("av", "bv", "aw")]
    kept = {scope: set() for scope in scopes}
    for _ in range(400):
        scope, tokens = rng.choice(scopes), sequence(rng, earlier)
        ids, numbers = np.array(tokens, np.int32), prefixes.of(tokens)
        known, found = copied(cache, scope, ids, pool)
        assert found.equal(numbers[:known])
        mine = {tuple(tokens[: i + 1]) for i in range(len(tokens))}
        longest = max((len(p) for p in mine & kept[scope]), default=0)
        if room == 10**6:
            assert known == (longest if longest >= LEAST else 0)
        cache.add(scope, ids, sources(pool, numbers, rng.randrange(len(tokens) + 1)), room=room)
        assert cache.places <= room
        if room >= 500:  # then a sequence always fits beside the nodes it continues
            assert len(tokens) - cache.held(scope, ids) < 2 * LEAST
        if len(tokens) - longest >= LEAST:
            kept[scope] |= mine
        earlier.append(tokens)
    assert cache.places > 0
    cache.clear()
    assert cache.places == 0 and not cache._order and not cache._roots


MINE = Scope("a", Version("v", None))


def keep(cache, pool, tokens, room, scope=MINE):
    cache.add(scope, tokens, [Source(pool, 0, 0, len(tokens))], room=room)


def run(name, length):
    return np.full(length, name, np.int32)


def test_what_was_used_longest_ago_goes_first_and_a_head_after_what_continues_it(pool):
    cache = PrefixCache(LAYOUT)
    one, two, longer = run(1, 40), run(2, 40), np.append(run(1, 40), run(7, 20))
    for tokens in (one, two, longer):
        keep(cache, pool, tokens, 100)

    def held():
        return [cache.held(MINE, x) for x in (one, longer, two)]

    assert held() == [40, 60, 40] and cache.places == 100
    assert cache.copy(MINE, two, pool, 1) == 40  # a use; asking what is held is none
    keep(cache, pool, run(3, 20), 100)
    assert held() == [40, 40, 40] and cache.places == 100
    keep(cache, pool, run(4, 16), 100)
    assert held() == [0, 0, 40] and cache.places == 76
    cache.shrink(76)
    cache.shrink(75)
    assert held() == [0, 0, 0] and cache.places == 36  # two was used before 3 and 4 came
    keep(cache, pool, one, 76)
    keep(cache, pool, longer, 59)  # not for its own continuation
    assert held() == [40, 40, 0] and cache.places == 40
    keep(cache, pool, run(5, 96), 95)  # could never fit: costs nobody anything
    assert held() == [40, 40, 0]


def test_only_the_versions_that_are_meant_stay(pool):
    cache, tokens = PrefixCache(LAYOUT), run(1, 30)
    scopes = [
        MINE, Scope("b", Version("v", None)),
        Scope("a", Version("v", Path("/w"))), Scope("a", Version("w", None)),
    ]  # fmt: skip
    for scope in scopes:
        keep(cache, pool, tokens, 1000, scope)
    cache.keep_only({Version("v", None), Version("x", None)})
    assert [cache.held(scope, tokens) for scope in scopes] == [30, 30, 0, 0]
    assert cache.places == 60
    cache.shrink(30)
    assert cache.places == 30


def test_common_heads():
    a = np.array([1, 2, 3])
    assert [shared_tokens(a, np.array(b)) for b in ([], [2], [1], [1, 2, 3, 4], [1, 2, 4])] == [
        0, 0, 1, 3, 2,
    ]  # fmt: skip
