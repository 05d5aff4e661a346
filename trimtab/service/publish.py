"""Which weights a sampler's targets mean, and which of them are in its memory now.

    base                 the base model itself
    <version>            a snapshot: immutable, its own target
    <model>:inflight     shared by a model's inflight clients; moves with each inflight save

The store remembers what every target means, so after a restart a target is published again when it
is first sampled from. A sampler's memory is bounded: the target unused for longest is retired, and
comes back from disk the same way. Thread-safe; knows no sessions.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

from trimtab.errors import Gone
from trimtab.service.records import Engine
from trimtab.service.sequences import Run
from trimtab.service.store import Store
from trimtab.types import SampledSequence, WeightsRef

BASE = "base"


def inflight(model_id: str) -> str:
    return f"{model_id}:inflight"


class Publisher:
    def __init__(
        self,
        store: Store,
        engines: Mapping[str, Engine],
        home: Path,
        most: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._clock = clock
        self._since = clock()
        self._used: dict[str, float] = {}  # target: when it was last sampled from
        self._engines = engines
        self._home = home
        self._most = most
        self._lock = threading.Lock()  # guards the two tables
        self._publishing = threading.Lock()  # one publication at a time; may read files
        self._published: dict[str, OrderedDict[str, None]] = {b: OrderedDict() for b in engines}
        self._origins: dict[str, tuple[int, str]] = {}  # version: its step, its model

    def ready(self, base_model: str, target: str) -> bool:
        """Whether a target can be sampled from at once; counts as a use of it."""
        with self._lock:
            published = self._published[base_model]
            if target not in published:
                return False
            published.move_to_end(target)
            self._used[target] = self._clock()
            return True

    def used_at(self, target: str) -> float:
        """When a target was last sampled from, as far as this process knows."""
        with self._lock:
            return self._used.get(target, self._since)

    def ensure(self, base_model: str, target: str) -> None:
        """Publish a target that is not in memory. Gone if its weights are no longer kept."""
        with self._publishing:
            if not self.ready(base_model, target):
                self._publish(target, self._means(base_model, target))

    def publish(self, target: str, ref: WeightsRef, model_id: str) -> None:
        """Make a target mean `ref` from now on; the caller journals it."""
        with self._lock:
            self._origins[ref.version] = (ref.step, model_id)
        with self._publishing:
            self._publish(target, ref)

    def retire(self, base_model: str, target: str) -> None:
        with self._publishing, self._lock:
            known = self._published[base_model].pop(target, self) is None
            self._used.pop(target, None)
        if known:
            self._engines[base_model].sampler.retire(target)

    def runs(self, sequence: SampledSequence) -> tuple[Run, ...]:
        """A sequence's weights versions with the step and model behind each: no model ("") for a
        base model, "?" for weights nobody knows any more."""
        return tuple(
            (version, count, *self._origin(version)) for version, count in sequence.versions
        )

    def _publish(self, target: str, ref: WeightsRef) -> None:
        sampler = self._engines[ref.base_model].sampler
        sampler.publish(target, ref)
        published = self._published[ref.base_model]
        with self._lock:
            published[target] = None
            published.move_to_end(target)
            extra = [published.popitem(last=False)[0] for _ in range(len(published) - self._most)]
        for old in extra:
            sampler.retire(old)

    def _means(self, base_model: str, target: str) -> WeightsRef:
        if target == BASE:
            return WeightsRef(version=f"{BASE}:{base_model}", base_model=base_model)
        row = self._store.row(
            "SELECT * FROM weights WHERE version ="
            " COALESCE((SELECT version FROM targets WHERE target = ?), ?)",
            (target, target),
        )
        if row is None:
            raise Gone(f"the weights behind {target!r} are no longer kept")
        with self._lock:
            self._origins[row["version"]] = (row["step"], row["model_id"])
        folder = self._home / row["folder"]
        return WeightsRef(row["version"], row["base_model"], folder, row["step"])

    def _origin(self, version: str) -> tuple[int, str]:
        if version.startswith(f"{BASE}:"):
            return 0, ""
        with self._lock:
            known = self._origins.get(version)
        if known is not None:
            return known
        row = self._store.row("SELECT step, model_id FROM weights WHERE version = ?", (version,))
        return (0, "?") if row is None else (row["step"], row["model_id"])
