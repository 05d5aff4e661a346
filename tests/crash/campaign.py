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


class Storm(Chain):
    """Kills after random times instead of at points. `seed` gives the times."""

    def __init__(self, home: Home, seed: int) -> None:
        super().__init__(home, (), CYCLES)
        self._random = random.Random(seed)
        self.starting = 0  # kills before the server answered

    def _kill(self, done: threading.Event) -> None:
        ready = self.home.log
        while True:
            said = self._ready(ready)
            if done.wait(self._random.choice((0.2, 1.0, 3.0)) * self._random.random() + 0.1):
                return
            if self.home.dead:
                self.trouble.append(f"the server died by itself: {self.home.tail()}")
                return
            self.starting += self._ready(ready) == said
            self.home.kill()
            self.home.wait(10)
            self.hit.append("anywhere")
            self.home.start()

    def _ready(self, log: Path) -> int:
        return log.read_text().count("trimtab serves") if log.exists() else 0


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
            home = Home(nursery, model, Path(folder) / str(number))
            storm = Storm(home, seed + number)
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
            print(f"{found['kills']} kills, {len(found['differences'])} differences", flush=True)

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
