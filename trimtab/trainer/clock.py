"""Where the seconds of a step went. Knows no server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trimtab.trainer.display import Display
from trimtab.trainer.metrics import Metrics


class Clock:
    """Seconds of a step and of its phases."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, display: Display) -> Iterator[None]:
        display.working(name)
        begun = time.monotonic()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - begun

    def metrics(self, found: Metrics) -> Metrics:
        total = time.monotonic() - self.begun
        rate = found.get("env/all/total_ac_tokens", 0.0) / total if total > 0 else 0.0
        return {
            "time/total": total,
            "time/tokens_per_second": rate,
            **{f"time/{name}": seconds for name, seconds in self.phases.items()},
        }
