"""Kills at random times: `make crash KILLS=500`.

A client trains for some cycles over a server that is killed again and again, at a random moment of
its life: while it starts, brings its model back, or serves. Then all is compared with a run that
was never disturbed, and the next client begins, until there were enough kills. The outcome is
written to results/kills.json; the status is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crash.chain import Chain
from crash.kit import Home, Nursery
from trimtab import tiny

RESULTS = Path(__file__).parent / "results" / "kills.json"
CYCLES = 6
MOST = 25  # kills of one client's server
STILLBORN = 0.25  # of the servers, killed before they can serve


class Storm(Chain):
    """Kills after random times instead of at points. `seed` gives the times."""

    def __init__(self, home: Home, seed: int) -> None:
        super().__init__(home, (), CYCLES)
        self._random = random.Random(seed)
        self.starting = 0  # kills before the server answered

    def _kill(self, done: threading.Event) -> None:
        """A client that finds nobody waits up to 30 s before it asks again, so most servers get to
        serve for a moment, and the last of them lives."""
        while len(self.hit) < MOST:
            served, chance = self._served(), self._random.random()
            if chance > STILLBORN:
                end = time.monotonic() + 60
                while self._served() == served and time.monotonic() < end:
                    if self.home.dead or done.wait(0.01):
                        break
            if done.wait(self._random.uniform(0.0, 1.0 if chance <= STILLBORN else 3.0)):
                return
            if self.home.dead:
                self.trouble.append(f"the server died by itself: {self.home.tail()}")
                return
            self.starting += self._served() == served
            self.home.kill()
            self.home.wait(60)
            self.hit.append("anywhere")
            self.home.start()

    def _served(self) -> int:
        return self.home.log.read_text().count("HF_ENDPOINT") if self.home.log.exists() else 0


def storms(kills: int, seed: int, at_once: int) -> dict[str, object]:
    """Run clients until there were `kills` kills; what came of it."""
    nursery = Nursery()
    began = time.monotonic()
    found: dict[str, object] = {"kills": 0, "starting": 0, "runs": 0, "differences": []}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as threads:
        model = tiny.build(Path(folder) / "tiny", context=256)
        calm = Chain(Home(nursery, model, Path(folder) / "calm"), (), CYCLES).run().compared()

        def one(number: int) -> None:
            if found["kills"] >= kills:
                return
            storm = Storm(Home(nursery, model, Path(folder) / str(number)), seed + number)
            try:
                storm.run()
                other = storm.compared()
                wrong = [what for what in calm if calm[what] != other[what]] + storm.trouble
            except Exception as error:  # a client that was hurt is a result too
                wrong = [f"{type(error).__name__}: {error}", *storm.trouble]
            found["kills"] += len(storm.hit)
            found["starting"] += storm.starting
            found["runs"] += 1
            if wrong:
                found["differences"].append({"seed": seed + number, "what": wrong})
            print(f"{found['kills']} kills: {wrong or 'no difference'}", flush=True)
            if not storm.home.dead:
                storm.home.kill()

        list(threads.map(one, range(10 * kills)))
    nursery.close()
    return found | {"seconds": round(time.monotonic() - began)}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=500)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--at-once", type=int, default=3, help="clients at the same time")
    options.add_argument("--out", type=Path, default=RESULTS)
    chosen = options.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")
    found = storms(chosen.kills, chosen.seed, chosen.at_once)
    found |= {"seed": chosen.seed, "python": platform.python_version()}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    outcome = found["differences"] or "no difference"
    print(f"{found['kills']} kills in {found['runs']} runs: {outcome}")
    return 1 if found["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
