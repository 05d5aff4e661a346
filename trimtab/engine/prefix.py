"""The prefix cache: keys and values of sequences that were computed, for others that begin alike.

n tokens of a node, H key/value heads, D head size.

A tree a scope, and no scope sees another's. A node holds the tokens by which a sequence leaves the
ones before it, and a copy of what they left behind; the copy lies outside the pools, so giving it
up moves nothing. Who was used longest ago goes first, and always before who it continues. Safe to
call from any thread. Knows nothing of requests or budgets.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.engine.sharing import shared_tokens

if TYPE_CHECKING:
    from trimtab.engine.kv import KVLayout, Pool

LEAST = 16
"""Tokens below which copying is not worth its many small calls: shorter heads are computed again,
and a sequence that adds fewer is not kept."""


class Version(NamedTuple):
    """The weights that computed something."""

    name: str
    path: Path | None


class Scope(NamedTuple):
    """Whose tokens they are, and under which weights: only equals share."""

    owner: str
    version: Version


class Source(NamedTuple):
    """Where positions [first, stop) of a sequence lie: in row `slot` of `pool`, from place 0 on."""

    pool: Pool
    slot: int
    first: int
    stop: int


class Node:
    """Tokens that follow the first `key[0]` of the parent's; `key[1]` is the first of them."""

    __slots__ = ("children", "key", "keys", "parent", "tokens", "values")

    def __init__(self, parent: Node | None, key: tuple[int, int], tokens_n: np.ndarray) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens_n
        self.children: dict[tuple[int, int], Node] = {}
        self.keys: list[Tensor] = []  # (H, n, D) a layer
        self.values: list[Tensor] = []


class Root(Node):
    """Where the sequences of a scope begin; holds no token."""

    __slots__ = ("scope",)

    def __init__(self, scope: Scope) -> None:
        super().__init__(None, (0, 0), np.empty(0, np.int32))
        self.scope = scope


class PrefixCache:
    """
    >>> cache.add(scope, [5, 6, 7, ...], [Source(group.prompts, prompt.slot, 0, 40)], room=4096)
    >>> cache.copy(scope, [5, 6, 7, ..., 9], group.prompts, other.slot)
    40
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._roots: dict[Scope, Root] = {}
        self._order: OrderedDict[Node, None] = OrderedDict()  # a node before the one it continues
        self.places = 0

    def held(self, scope: Scope, tokens: np.ndarray) -> int:
        """How many tokens of this sequence's head `copy` would bring; 0 for fewer than LEAST."""
        with self._lock:
            return _worth(self._walk(scope, tokens))

    def copy(self, scope: Scope, tokens: np.ndarray, pool: Pool, slot: int) -> int:
        """Put the longest head that is here at the beginning of a pool's row; how long is it?"""
        with self._lock:
            path = self._walk(scope, tokens)
            if not _worth(path):
                return 0
            self._touch(path)
            start = 0
            for node, n in path:
                for kept, there in ((node.keys, pool.keys), (node.values, pool.values)):
                    for layer, tensor in enumerate(kept):
                        there[layer][slot, :, start : start + n] = tensor[:, :n]
                start += n
            return start

    def add(
        self, scope: Scope, tokens: np.ndarray, sources: Sequence[Source], *, room: int
    ) -> None:
        """Keep a sequence whose positions lie in `sources`, within `room` places for all that is
        kept. What is here of it counts as used; it is not given up for its own continuation."""
        with self._lock:
            path = self._walk(scope, tokens)
            self._touch(path)
            known = sum(n for _, n in path)
            need = len(tokens) - known
            if need < LEAST or not self._make_room(room - need, {node for node, _ in path}):
                return
            # copied first: an allocation that fails leaves the tree as it was
            keys, values = _gathered(self._layout, known, len(tokens), sources)
            parent, at = path[-1] if path else (self._root(scope), 0)
            node = Node(parent, (at, int(tokens[known])), tokens[known:].copy())
            node.keys, node.values = keys, values
            parent.children[node.key] = node
            self._order[node] = None
            self._touch([*path, (node, need)])
            self.places += need

    def shrink(self, places: int) -> None:
        """Give up what was used longest ago until no more than `places` are kept."""
        if self.places > places:
            with self._lock:
                self._make_room(places, ())

    def clear(self) -> None:
        self.shrink(0)

    def keep_only(self, versions: Collection[Version]) -> None:
        """Give up what other weights computed."""
        with self._lock:
            for scope in [s for s in self._roots if s.version not in versions]:
                for node in _below(self._roots.pop(scope)):
                    del self._order[node]
                    self.places -= len(node.tokens)

    def _walk(self, scope: Scope, tokens: np.ndarray) -> list[tuple[Node, int]]:
        """The nodes that spell the longest known head, each with how many of its tokens do."""
        path: list[tuple[Node, int]] = []
        known, at = 0, 0
        node: Node | None = self._roots.get(scope)
        while node is not None and known < len(tokens):
            node = node.children.get((at, int(tokens[known])))
            if node is not None:
                at = shared_tokens(node.tokens, tokens[known:])
                path.append((node, at))
                known += at
        return path

    def _touch(self, path: Sequence[tuple[Node, int]]) -> None:
        for node, _ in reversed(path):
            self._order.move_to_end(node)

    def _root(self, scope: Scope) -> Root:
        if scope not in self._roots:
            self._roots[scope] = Root(scope)
        return self._roots[scope]

    def _make_room(self, places: int, spared: Collection[Node]) -> bool:
        """Come down to `places` without giving up any of `spared`; False if that can't be."""
        if places < 0:
            return False
        while self.places > places:
            oldest = next(iter(self._order))
            if oldest in spared:
                return False
            self._drop(oldest)
        return True

    def _drop(self, node: Node) -> None:
        """The oldest of all: nothing continues it, as that would be older."""
        assert node.parent is not None and not node.children, "a leaf is older than its parent"
        del self._order[node]
        del node.parent.children[node.key]
        self.places -= len(node.tokens)
        if isinstance(node.parent, Root) and not node.parent.children:
            del self._roots[node.parent.scope]


def _worth(path: Sequence[tuple[Node, int]]) -> int:
    known = sum(n for _, n in path)
    return known if known >= LEAST else 0


def _below(root: Node) -> Iterator[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        if node is not root:
            yield node


def _gathered(
    layout: KVLayout, start: int, stop: int, sources: Sequence[Source]
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values (H, n, D) a layer of positions [start, stop), all in one piece of memory."""
    n = stop - start
    sizes = [h * n * d for h, dk, dv in layout.layers for d in (dk, dv)]
    parts = iter(torch.empty(sum(sizes), dtype=layout.dtype, device=layout.device).split(sizes))
    keys, values = [], []
    for h, dk, dv in layout.layers:
        keys.append(next(parts).view(h, n, dk))
        values.append(next(parts).view(h, n, dv))
    for source in sources:
        first, last = max(start, source.first), min(stop, source.stop)
        if first >= last:
            continue
        to = slice(first - start, last - start)
        places = slice(first - source.first, last - source.first)
        for layer in range(len(layout.layers)):
            keys[layer][:, to] = source.pool.keys[layer][source.slot, :, places]
            values[layer][:, to] = source.pool.values[layer][source.slot, :, places]
    return keys, values
