"""`make load`: a server under many clients at once, in processes of their own.

    python -m tests.load.load --out tests/load/results/load.json

Four loads (`scenarios.py`): 600 samples of one token at once, over and over, beside heartbeats and
training, by raw HTTP and by the SDK; 2,000 polls held at once; 64 models on one base; and samples
beyond the queue's bound, which the suite shows too. Ends with status 1 where a heartbeat's p99 is
200 ms or more, a poll costs a thread, or anything did not come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from . import scenarios
from .process import Process, serving
from .scenarios import Measured

LIMIT_MS = 200.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--polls", type=int, default=2000)
    parser.add_argument("--models", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    _allow_many_connections()
    os.environ["TINKER_TELEMETRY"] = "0"
    loads: dict[str, Callable[[Process], Awaitable[Measured]]] = {
        "storm, raw HTTP": lambda p: raw(p, options.samples, options.rounds),
        "storm, SDK": lambda p: sdk(p, options.samples, options.rounds),
        "held polls": lambda p: scenarios.polls(p.url, options.polls, p.use),
        "models": lambda p: scenarios.models(p.url, options.models, 4, p.use),
    }
    found = {name: measured(load) for name, load in loads.items()}
    found["beyond the bound"] = measured(lambda p: sdk(p, 200, 1), "--max-pending-samples", "16")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any([too_slow(name, load) for name, load in found.items()]) else 0


def measured(load: Callable[[Process], Awaitable[Measured]], *options: str) -> Measured:
    """What one load measures on a server that is new."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), "--log-level", "warning", *options) as process,
    ):
        found = asyncio.run(_awaited(load(process)))
        found = {name: round(value, 2) for name, value in found.items()}
        print(json.dumps(found), flush=True)
        return found


async def _awaited(work: Awaitable[Measured]) -> Measured:
    return await work


async def raw(process: Process, samples: int, rounds: int) -> Measured:
    async with scenarios.raw_draw(process.url) as draw:
        return await scenarios.storm(
            process.url, samples, rounds, draw, sessions=8, pid=process.pid
        )


async def sdk(process: Process, samples: int, rounds: int) -> Measured:
    async with scenarios.sdk_draw(process.url) as draw:
        return await scenarios.storm(
            process.url, samples, rounds, draw, sessions=8, pid=process.pid
        )


def too_slow(name: str, found: Measured) -> bool:
    slow = found.get("heartbeat_p99_ms", 0.0) >= LIMIT_MS
    threads = found.get("threads_held", 0) > found.get("threads_before", 0) + 8
    if slow or threads:
        print(f"{name}: beyond what is allowed: {found}", file=sys.stderr)
    return slow or threads


def _allow_many_connections() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
