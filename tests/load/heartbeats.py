"""Heartbeats of many sessions, in a process of their own, so that no other client delays them.

    python -m tests.load.heartbeats http://127.0.0.1:8000 8 0.5 [PID]

Says "ready" once every session exists, and when its input ends, as JSON, what each heartbeat took:
seconds by the clock, and seconds that the server's main thread, its event loop, computed meanwhile.
The second number does not count what the machine did for others.
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


def computed(pid: int | None) -> float:
    """Seconds of processor time of a process' main thread; 0 where nobody says."""
    if pid is None:
        return 0.0
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def beating(
    url: str, sessions: int, every: float, pid: int | None
) -> list[tuple[float, float]]:
    took: list[tuple[float, float]] = []
    done, clock = asyncio.Event(), asyncio.get_running_loop().time
    connections = [Connection(url) for _ in range(sessions)]
    names = [await connection.session() for connection in connections]
    print("ready", flush=True)

    async def one(number: int) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), every * number / sessions)
        while not done.is_set():
            started, before = clock(), computed(pid)
            await connections[number].post("session_heartbeat", session_id=names[number])
            took.append((clock() - started, computed(pid) - before))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), every)

    beats = asyncio.gather(*(one(number) for number in range(sessions)))
    await asyncio.to_thread(sys.stdin.read)
    done.set()
    await beats
    for connection in connections:
        await connection.close()
    return took


@asynccontextmanager
async def heartbeats(
    url: str, sessions: int, pid: int | None, every: float = 0.5
) -> AsyncIterator[list[tuple[float, float]]]:
    """Send them while the block runs; the list is filled at its end."""
    words = [sys.executable, "-m", "tests.load.heartbeats", url, str(sessions), str(every)]
    words += [] if pid is None else [str(pid)]
    pipe, found = asyncio.subprocess.PIPE, []
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, cwd=ROOT)
    assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
    try:
        yield found
    finally:
        told, _ = await process.communicate(b"")
        found += json.loads(told)


if __name__ == "__main__":
    url, sessions, every, *pid = sys.argv[1:]
    work = beating(url, int(sessions), float(every), int(pid[0]) if pid else None)
    print(json.dumps(asyncio.run(work)))
