"""Which weights a target means now: names, the versions behind them, and the loaded adapters.

A target in use follows what is published under its name; a version never changes. Adapters are
read once and kept for as long as something draws from them, and the last few beyond that. Safe to
call from any thread. Knows nothing of requests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimtab.engine.lora import Adapter
from trimtab.engine.prefix import Version
from trimtab.errors import NotFound
from trimtab.types import WeightsRef

ReadAdapter = Callable[[Path], Adapter]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """One version, in memory; `path` None is the base model."""

    version: str
    adapter: Adapter | None
    path: Path | None = None

    @property
    def identity(self) -> Version:
        return Version(self.version, self.path)


@dataclass(slots=True, eq=False)
class Target:
    """What a name means. `weights` is set while `users` requests draw from it; it is replaced as a
    whole, so a reader on another thread sees one version or the next."""

    name: str
    ref: WeightsRef
    users: int = 0
    weights: Weights | None = None


class WeightsShelf:
    """
    >>> shelf = WeightsShelf(read_adapter, keep=8)
    >>> shelf.publish("sampler-1", WeightsRef("v3", "tiny", Path("/data/v3")))
    >>> target = shelf.find("sampler-1")
    >>> shelf.hold(target).version
    'v3'
    """

    def __init__(self, read: ReadAdapter, keep: int) -> None:
        self._read = read
        self._keep = keep
        self._targets: dict[str, Target] = {}
        self._loaded: OrderedDict[tuple[str, Path], Weights] = OrderedDict()
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self.changes = 0

    def publish(self, name: str, ref: WeightsRef) -> None:
        """Reads the adapter, so that a bad folder raises here and the target stays as it was."""
        with self._publishing:
            weights = self._load(ref)
            with self._lock:
                target = self._targets.setdefault(name, Target(name, ref))
                target.ref = ref
                target.weights = weights if target.users else None
                self.changes += 1

    def retire(self, name: str) -> None:
        with self._lock:
            self._targets.pop(name, None)
            self.changes += 1

    def meant(self) -> set[Version]:
        """What the targets mean now; another answer only after `changes` has grown."""
        with self._lock:
            return {Version(t.ref.version, t.ref.path) for t in self._targets.values()}

    def find(self, name: str) -> Target:
        with self._lock:
            target = self._targets.get(name)
        if target is None:
            raise NotFound(f"no weights are published as {name!r}")
        return target

    def hold(self, target: Target) -> Weights:
        """Count a user in; raises what reading the adapter raises if it has to be read again."""
        while True:
            with self._lock:
                if target.weights is not None:
                    target.users += 1
                    return target.weights
                ref = target.ref
            weights = self._load(ref)
            with self._lock:
                if target.ref is ref and target.weights is None:
                    target.weights = weights

    def release(self, target: Target) -> None:
        with self._lock:
            target.users -= 1
            if target.users == 0:
                target.weights = None

    def _load(self, ref: WeightsRef) -> Weights:
        if ref.path is None:
            return Weights(ref.version, None)
        key = (ref.version, ref.path)
        with self._lock:
            weights = self._loaded.get(key)
            if weights is not None:
                self._loaded.move_to_end(key)
                return weights
        weights = Weights(ref.version, self._read(ref.path), ref.path)
        with self._lock:
            self._loaded[key] = weights
            while len(self._loaded) > self._keep:
                self._loaded.popitem(last=False)
        return weights
