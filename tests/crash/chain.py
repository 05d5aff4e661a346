"""One client over a server that is killed again and again, at one point after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .kit import Home, Script, journal, nothing_left_over, records, weights

PATIENCE = 8.0  # seconds for a point to be reached before the server is killed anywhere


@dataclass
class Chain:
    """`hit` is every point reached, in order; `anywhere` counts kills where none was reached in
    time (a replay with nothing to replay): the point is then tried again."""

    home: Home
    points: Sequence[str]
    cycles: int
    hit: list[str] = field(default_factory=list)
    anywhere: int = 0
    trouble: list[str] = field(default_factory=list)

    def run(self) -> Chain:
        """Run the client to its end while a thread of its own sees to the dying."""
        done = threading.Event()
        killer = threading.Thread(target=self._kill, args=(done,), daemon=True)
        self.home.start(*self.points[:1])
        killer.start()
        self.script = Script(self.home.url)
        try:
            self.script.begin()
            while self.script.cycles < self.cycles:
                self.script.cycle()
            self.script.end()
        finally:
            done.set()
            killer.join(30)
        if self.home.dead:
            self.trouble.append(f"the server died by itself: {self.home.tail()}")
        self.home.served()
        self._ended()
        status = self.home.stop()
        if status != 0:
            self.trouble.append(f"the last server ended with {status}: {self.home.tail()}")
        if "gives another result" in self.home.log.read_text():
            self.trouble.append(f"a replay gave another result: {self.home.tail()}")
        return self

    def _kill(self, done: threading.Event) -> None:
        for number, point in enumerate(self.points):
            if not self._die_at(point, done):
                return
            self.home.start(*self.points[number + 1 : number + 2])

    def _die_at(self, point: str, done: threading.Event) -> bool:
        while True:
            end = time.monotonic() + PATIENCE
            while not self.home.dead and time.monotonic() < end and not done.is_set():
                time.sleep(0.01)
            if not self.home.dead and done.is_set() and not point.startswith("end:"):
                return False
            if not self.home.dead:
                if point.startswith("end:"):
                    continue
                self.anywhere += 1
                self.home.kill()
                self.home.wait(10)
                self.home.start(point)
                continue
            status = self.home.buried()
            if status != -9 or not self.home.mark.exists():
                self.trouble.append(f"died of {status} before {point}: {self.home.tail()}")
                return False
            self.hit.append(self.home.mark.read_text())
            return True

    def _ended(self) -> None:
        """Wait until the ended session's model is unloaded."""
        end = time.monotonic() + 20
        while self.home.read("SELECT 1 FROM models WHERE state IN ('creating', 'ready')"):
            if time.monotonic() > end:
                self.trouble.append("a model of the ended session is still there")
                return
            time.sleep(0.05)

    def compared(self) -> dict[str, object]:
        """All that must be as if nothing had happened."""
        nothing_left_over(self.home)
        return {
            "told": self.script.told,
            "weights": weights(self.home, self.script),
            "journal": journal(self.home, self.script),
            "records": records(self.home),
        }
