"""`make fuzz`: malformed requests by the hundred thousand, each named by the seed and its number.

    python -m tests.fuzz.campaign --requests 100000 --seed 0 --out tests/fuzz/results.json

Prints and writes counts by status, faults (none, it is hoped), the memory of the process on the
way, and the rows of the journal. Ends with status 1 where there was a fault. `--only 417` sends the
request of that number alone, from a fresh server: what was before it may matter, then the whole
run repeats it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from .app import App, Sent, with_app
from .bodies import World, new_world
from .judge import faults_of, leftovers, rows
from .mutate import malformed

WORLD = 500  # requests about the same session and model


@dataclass
class Report:
    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    by_route: dict[str, Counter[int]] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")
    faults: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)

    def note(self, sent: Sent, status: int, seconds: float) -> None:
        self.requests += 1
        self.statuses[status] += 1
        route = sent.path.removeprefix("/api/v1").split("/")[1:2]
        self.by_route.setdefault(route[0][:24] if route else "", Counter())[status] += 1
        if seconds > self.slowest[0]:
            self.slowest = (seconds, sent.shown()[:300])


def resident_mib() -> float:
    """Memory of this process that is in use, from the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def fuzz(app: App, requests: int, seed: int, report: Report, only: int | None = None) -> None:
    world = new_world(app)
    for number in range(requests) if only is None else (only,):
        if number % WORLD == 0 and number:
            report.faults += [f"before request {number}: {text}" for text in end(app, world)]
            report.memory_mib.append(round(resident_mib(), 1))
            world = new_world(app)
        sent = malformed(world, Random(f"{seed}:{number}"))
        try:
            answer = app.send(sent)
        except Exception as error:  # whatever it was, it is the finding
            report.faults.append(f"request {number} raised {error!r}: {sent.shown()}")
            continue
        report.note(sent, answer.status, answer.seconds)
        for text in faults_of(app, sent, answer):
            report.faults.append(f"request {number}: {text}; it was {sent.shown()}")
    report.faults += end(app, world)
    report.memory_mib.append(round(resident_mib(), 1))


def end(app: App, world: World) -> list[str]:
    """Finish the sessions there are, and look at what is left."""
    for session in list(app.service._parts.sessions._open):
        app.run(app.service.finish_session("local", session, "success"))
    found = leftovers(app)
    app.run(gone(app))
    return found


async def gone(app: App) -> None:
    """Models leave a moment after their session; the next world has their place."""
    import asyncio

    for _ in range(500):
        if not len(app.service._parts.models):
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{len(app.service._parts.models)} models outlive their sessions")


def told(report: Report, app: App, seed: int, seconds: float) -> dict[str, Any]:
    slow, what = report.slowest
    return {
        "seed": seed,
        "requests": report.requests,
        "seconds": round(seconds, 1),
        "statuses": {str(k): report.statuses[k] for k in sorted(report.statuses)},
        "faults": report.faults,
        "slowest_seconds": round(slow, 3),
        "slowest_request": what,
        "memory_mib": report.memory_mib,
        "rows": rows(app),
        "by_route": {
            name: {str(k): counts[k] for k in sorted(counts)}
            for name, counts in sorted(report.by_route.items())
            if sum(counts.values()) >= 50
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    app = with_app(folder)
    report, started = Report(), time.monotonic()
    try:
        fuzz(app, options.requests, options.seed, report, options.only)
        found = told(report, app, options.seed, time.monotonic() - started)
    finally:
        app.close()
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None and options.only is None:
        options.out.write_text(text + "\n")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
