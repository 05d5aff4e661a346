"""Time as the service counts it: a calendar that no jump of the system clock moves, and a measure
of how long the server was there to be talked to.

Knows no sessions and no lanes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trimtab.service.store import Store


def steady(store: Store) -> Callable[[], float]:
    """Seconds since the epoch: the system's time at the start, and from there on the seconds that
    passed. A system clock that is set, or runs while the machine sleeps, ends nobody's day. Never
    earlier than what the journal has seen, so a clock that went back while the server was down
    does not lengthen one either.
    """
    row = store.row("SELECT MAX(heartbeat_at) AS newest FROM sessions")
    start = max(time.time(), (row and row["newest"]) or 0.0) - time.monotonic()
    return lambda: start + time.monotonic()


class Awake:
    """Seconds in which a client could have been heard, counted from the last call to this one.

    A pause of the whole process (stopped, asleep, its loop blocked) counts as `longest` at most:
    nobody's heartbeat could arrive in it. Used from the loop alone, at least once a sweep.
    """

    def __init__(self, clock: Callable[[], float], longest: float) -> None:
        self._clock = clock
        self._longest = longest
        self._last = clock()
        self._total = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._total += min(max(now - self._last, 0.0), self._longest)
        self._last = now
        return self._total
