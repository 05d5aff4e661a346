"""`make soak`: sessions open, work and vanish for minutes; afterwards the server is as before.

    python -m tests.load.soak --minutes 10 --out tests/load/results/soak.json --plot docs/soak.png

Two hundred sessions, evenly over the time, ten or so at once. Each trains a model, saves weights,
samples from them and lives on heartbeats; then one of four is finished and the others vanish: in
silence, in the middle of a poll, or with requests that will never have their turn. The server
is the shipped one, but for a session's time to expire (15 s instead of 2 h).

Memory, open files and threads come from the kernel, open sessions and loaded models from the
journal. Ends with status 1 unless, at the end, no session is open, no model is loaded, memory is
within 5 % of what it was after the first quarter, and files and threads are no more than then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .process import Process, serving
from .raw import Connection

SESSION_SECONDS = 15.0
ALIVE = 10  # sessions at once, about
AFTER = 15.0  # seconds of quiet at the end
COMMAND = ("-m", "tests.load.short_lived", f"{SESSION_SECONDS:g}")


@dataclass(frozen=True, slots=True)
class Point:
    seconds: float
    memory_mib: float
    files: int
    threads: int
    sessions: int
    models: int
    disk_mib: float


async def visit(url: str, number: int, life: float) -> None:
    """One session from its birth to however it ends."""
    until = time.monotonic() + life
    async with Connection(url) as c, Connection(url) as other:
        session = await c.session()
        model = await c.model(session)
        for step in range(3):
            await c.forward_backward(model, 2 * step + 1, rows=64)
            await c.result(await c.optim_step(model, 2 * step + 2))
        saved = await c.post(
            "save_weights_for_sampler", model_id=model, seq_id=7, sampling_session_seq_id=1
        )
        sampler = json.loads(await c.result(saved["request_id"]))["sampling_session_id"]
        for request_id in [await c.sample(sampler, i, max_tokens=8) for i in range(4)]:
            await c.result(request_id)
        while time.monotonic() < until:
            await c.post("session_heartbeat", session_id=session)
            await asyncio.sleep(2.0)
        await leave(c, other, number % 4, session, model)


async def leave(c: Connection, other: Connection, how: int, session: str, model: str) -> None:
    if how == 0:
        await c.post(f"sessions/{session}/finish", reason={"type": "success"})
    elif how == 1:  # in the middle of a poll
        parked = await c.forward_backward(model, 9)
        poll = asyncio.ensure_future(other.result(parked))
        await asyncio.sleep(0.5)
        poll.cancel()
    elif how == 2:  # behind a seq_id that never comes
        for seq_id in range(9, 29):
            await c.forward_backward(model, seq_id)


async def watched(process: Process, data: Path, done: asyncio.Event) -> list[Point]:
    """A point a second until `done`."""
    started, points = time.monotonic(), []
    while not done.is_set():
        points.append(await asyncio.to_thread(seen, process, data, time.monotonic() - started))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 1.0)
    return points


def seen(process: Process, data: Path, seconds: float) -> Point:
    use = process.use()
    with contextlib.closing(sqlite3.connect(data / "trimtab.sqlite3", timeout=30)) as db:
        db.execute("PRAGMA query_only = ON")
        (sessions,) = db.execute("SELECT COUNT(*) FROM sessions WHERE state = 'open'").fetchone()
        (models,) = db.execute(
            "SELECT COUNT(*) FROM models WHERE state IN ('creating', 'ready')"
        ).fetchone()
    disk = sum(_size(Path(folder) / name) for folder, _, names in os.walk(data) for name in names)
    return Point(round(seconds, 1), use.memory_mib, use.files, use.threads, sessions, models,
                 round(disk / 2**20, 1))  # fmt: skip


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # files come and go meanwhile
        return path.stat().st_size
    return 0


async def soak(process: Process, data: Path, sessions: int, seconds: float) -> list[Point]:
    done, life = asyncio.Event(), ALIVE * seconds / sessions
    watching = asyncio.ensure_future(watched(process, data, done))
    visits = []
    for number in range(sessions):
        visits.append(asyncio.ensure_future(visit(process.url, number, life)))
        await asyncio.sleep(seconds / sessions)
    await asyncio.gather(*visits)
    await emptied(data)
    await asyncio.sleep(AFTER)
    done.set()
    return await watching


async def emptied(data: Path) -> None:
    """Wait until the last session has expired and its model is gone."""
    until = time.monotonic() + 8 * SESSION_SECONDS
    with contextlib.closing(sqlite3.connect(data / "trimtab.sqlite3", timeout=30)) as db:
        while db.execute(
            "SELECT (SELECT COUNT(*) FROM sessions WHERE state = 'open') + (SELECT COUNT(*) FROM"
            " models WHERE state IN ('creating', 'ready'))"
        ).fetchone() != (0,):
            if time.monotonic() > until:
                return
            await asyncio.sleep(0.5)


def judged(points: list[Point]) -> dict[str, float]:
    """Medians of the tenth of the run that follows its first quarter, and of the end."""
    quarter = len(points) // 4
    warm, last = points[quarter : quarter + len(points) // 10 + 1], points[-10:]

    def middle(part: list[Point], name: str) -> float:
        return statistics.median(getattr(point, name) for point in part)

    return {
        f"{name}_{when}": middle(part, name)
        for name in ("memory_mib", "files", "threads", "sessions", "models")
        for when, part in (("warm", warm), ("end", last))
    }


def flat(found: dict[str, float]) -> bool:
    return (
        found["memory_mib_end"] <= 1.05 * found["memory_mib_warm"]
        and found["files_end"] <= found["files_warm"]
        and found["threads_end"] <= found["threads_warm"]
        and found["sessions_end"] == found["models_end"] == 0
    )


def plot(points: list[Point], sessions: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [point.seconds / 60 for point in points]
    figure, (top, low) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    top.plot(minutes, [point.memory_mib for point in points], color="tab:blue")
    top.set(ylabel="resident memory (MiB)", ylim=(0, 1.2 * max(p.memory_mib for p in points)))
    top.set_title(f"{sessions} sessions open, work and vanish")
    for name, label in (("files", "open files"), ("threads", "threads"),
                        ("sessions", "open sessions"), ("models", "loaded models")):  # fmt: skip
        low.plot(minutes, [getattr(point, name) for point in points], label=label)
    low.set(xlabel="minutes", ylim=(0, 1.35 * max(p.files for p in points)))
    low.legend(ncols=4, loc="upper center", fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder, "--log-level", "warning", command=COMMAND) as process:
            work = soak(process, folder / "data", options.sessions, 60 * options.minutes)
            points = asyncio.run(work)
    found = judged(points)
    print(json.dumps(found, indent=1))
    if options.out is not None:
        run = {"minutes": options.minutes, "sessions": options.sessions}
        text = {**run, **found, "points": [list(asdict(p).values()) for p in points[::2]],
                "columns": list(asdict(points[0]))}  # fmt: skip
        options.out.write_text(json.dumps(text) + "\n")
    if options.plot is not None:
        plot(points, options.sessions, options.plot)
    return 0 if flat(found) else 1


if __name__ == "__main__":
    sys.exit(main())
