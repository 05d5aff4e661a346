"""Heartbeats of many sessions, in a process of their own, so that no other client delays them.

    python -m tests.load.heartbeats http://127.0.0.1:8000 8 0.5

Says "ready" once every session exists, and when its input ends the seconds that each heartbeat
took, sorted, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from .raw import Connection

ROOT = Path(__file__).parents[2]


async def beating(url: str, sessions: int, every: float) -> list[float]:
    took: list[float] = []
    done, clock = asyncio.Event(), asyncio.get_running_loop().time
    connections = [Connection(url) for _ in range(sessions)]
    names = [await connection.session() for connection in connections]
    print("ready", flush=True)

    async def one(number: int) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), every * number / sessions)
        while not done.is_set():
            started = clock()
            await connections[number].post("session_heartbeat", session_id=names[number])
            took.append(clock() - started)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), every)

    beats = asyncio.gather(*(one(number) for number in range(sessions)))
    await asyncio.to_thread(sys.stdin.read)
    done.set()
    await beats
    for connection in connections:
        await connection.close()
    return sorted(took)


@asynccontextmanager
async def heartbeats(url: str, sessions: int, every: float = 0.5) -> AsyncIterator[list[float]]:
    """Send them while the block runs; the list is filled at its end."""
    words = [sys.executable, "-m", "tests.load.heartbeats", url, str(sessions), str(every)]
    pipe, found = asyncio.subprocess.PIPE, []
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, cwd=ROOT)
    assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
    try:
        yield found
    finally:
        told, _ = await process.communicate(b"")
        found += json.loads(told)


if __name__ == "__main__":
    url, sessions, every = sys.argv[1:]
    print(json.dumps(asyncio.run(beating(url, int(sessions), float(every)))))
