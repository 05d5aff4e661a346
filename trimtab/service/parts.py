"""The rooms of one service, joined once and handed to whoever needs several of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trimtab.service.checkpoints import Checkpoints
from trimtab.service.clock import Awake
from trimtab.service.customs import CustomLosses
from trimtab.service.futures import Futures
from trimtab.service.lanes import Lanes
from trimtab.service.models import Models
from trimtab.service.publish import Publisher
from trimtab.service.records import Codec, Engine
from trimtab.service.samplers import Samplers
from trimtab.service.sequences import Sequences
from trimtab.service.sessions import Sessions
from trimtab.service.settings import ServiceSettings
from trimtab.service.snapshots import Snapshots
from trimtab.service.store import Store


@dataclass(frozen=True, slots=True)
class Parts:
    """`pool` runs what would hold up the loop: checks of large requests, encoding, files."""

    settings: ServiceSettings
    clock: Callable[[], float]
    store: Store
    engines: Mapping[str, Engine]
    codec: Codec
    sessions: Sessions
    models: Models
    samplers: Samplers
    sequences: Sequences
    checkpoints: Checkpoints
    publisher: Publisher
    futures: Futures
    lanes: Lanes
    snapshots: Snapshots
    customs: CustomLosses
    pool: ThreadPoolExecutor

    def aside(self, task: Callable[[], None]) -> None:
        """Do a small thing with files off the loop; if it fails, the next start does it."""
        with contextlib.suppress(RuntimeError):  # the pool is shut: the server is stopping
            self.pool.submit(task)


def join(
    settings: ServiceSettings,
    store: Store,
    engines: Mapping[str, Engine],
    codec: Codec,
    clock: Callable[[], float],
) -> Parts:
    checkpoints = Checkpoints(store, settings, clock)
    awake = Awake(clock, settings.pause_seconds)
    return Parts(
        settings=settings,
        clock=clock,
        store=store,
        engines=engines,
        codec=codec,
        sessions=Sessions(store, settings, clock, awake),
        models=Models(store),
        samplers=Samplers(store),
        sequences=Sequences(store, settings.record_cache_bytes),
        checkpoints=checkpoints,
        publisher=Publisher(store, engines, checkpoints.home, settings.max_published, clock),
        futures=Futures(store, clock),
        lanes=Lanes(
            tuple(engines),
            awake,
            gap_seconds=settings.gap_seconds,
            max_parked=settings.max_parked,
            max_bytes=settings.max_parked_bytes,
        ),
        snapshots=Snapshots(store, settings, clock),
        customs=CustomLosses(store, codec),
        pool=ThreadPoolExecutor(2, "trimtab-service"),
    )
