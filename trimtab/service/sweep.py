"""What is dropped, when: the one place where the store and the disk shrink.

    sequences     after their day, or early beyond a size of all of them
    results       24 h after their session ended; their requests stay known as gone for 30 days
    bodies        when nothing would be run again from them: see `snapshots`
    checkpoints   after their time to live
    weights       unnamed ones: superseded, long unused, or of a session long over

Each step is a small transaction, so nobody waits long behind it. Folders go after their rows: a
crash between the two leaves a folder that the next start removes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections.abc import Callable
from functools import partial

from trimtab.service import sequences
from trimtab.service.futures import trim
from trimtab.service.parts import Parts

log = logging.getLogger(__name__)
Step = Callable[[sqlite3.Connection], int]
PAUSE = 0.005  # seconds between two steps of one sweep, or
SHARE = 4  # times as long as the step took: a long sweep leaves most of the writer to the others
GRACE = (
    60.0  # seconds an expired sequence stays on disk: a use of its last moment may be on its way
)
SUPERSEDED = 60.0  # seconds an inflight version is kept after the next one took its place


async def sweep_sequences(parts: Parts) -> None:
    before, batch = parts.clock() - GRACE, parts.settings.sweep_batch
    await _repeat(parts, lambda db: sequences.sweep(db, before, batch))


async def sweep_storage(parts: Parts) -> None:
    """The slower rest."""
    now, settings = parts.clock(), parts.settings
    await _shrink_records(parts)
    await _checkpoints(parts, now)
    await _weights(parts, now)
    await _repeat(parts, lambda db: _results(db, now - settings.result_seconds, parts))
    await _repeat(parts, lambda db: _history(db, now - settings.history_seconds, parts))


async def _shrink_records(parts: Parts) -> None:
    """Keep the records under their bound: those nearest to the end of their day go first."""
    loop, batch = asyncio.get_running_loop(), parts.settings.sweep_batch
    while True:
        held = await loop.run_in_executor(parts.pool, parts.sequences.held)
        over = held.array_bytes - parts.settings.max_record_bytes
        if over <= 0:
            return
        log.warning("sequence records hold %d bytes too many; dropping the oldest", over)
        mean = held.array_bytes / held.sequences
        for _ in range(1 + int(over / mean / batch)):
            if not await _took(parts, lambda db: sequences.sweep(db, math.inf, batch)):
                return  # the rest is pinned


async def _repeat(parts: Parts, step: Step) -> None:
    while await _took(parts, step):
        pass


async def _took(parts: Parts, step: Step) -> int:
    """One step and the pause after it."""
    started = time.monotonic()
    count = await parts.store.write(step)
    if count:
        await asyncio.sleep(max(PAUSE, SHARE * (time.monotonic() - started)))
    return count


# --------------------------------------------------------------------------- requests


def _results(db: sqlite3.Connection, before: float, parts: Parts) -> int:
    """Results and bodies of one session that ended before then."""
    return _forget(db, before, parts, settled=0, done=trim)


def _history(db: sqlite3.Connection, before: float, parts: Parts) -> int:
    return _forget(db, before, parts, settled=1, done=_delete)


def _forget(
    db: sqlite3.Connection,
    before: float,
    parts: Parts,
    *,
    settled: int,
    done: Callable[[sqlite3.Connection, list[str]], None],
) -> int:
    """One step for one session: a batch of its requests, or, when none is left, its next stage."""
    session = db.execute(
        "SELECT session_id FROM sessions WHERE state IN ('finished', 'expired') AND settled = ?"
        " AND ended_at < ? LIMIT 1",
        (settled, before),
    ).fetchone()
    if session is None:
        return 0
    which = "state = 'done'" if settled == 0 else "state != 'pending'"
    rows = db.execute(
        f"SELECT request_id FROM requests WHERE session_id = ? AND {which} LIMIT ?",
        (session["session_id"], parts.settings.sweep_batch),
    ).fetchall()
    if rows:
        done(db, [row["request_id"] for row in rows])
    else:
        db.execute(
            "UPDATE sessions SET settled = ? WHERE session_id = ?",
            (settled + 1, session["session_id"]),
        )
        db.execute("DELETE FROM custom_losses WHERE session_id = ?", (session["session_id"],))
    return 1


def _delete(db: sqlite3.Connection, request_ids: list[str]) -> None:
    trim(db, request_ids)
    db.executemany("DELETE FROM requests WHERE request_id = ?", [(r,) for r in request_ids])


# --------------------------------------------------------------------------- files


async def _checkpoints(parts: Parts, now: float) -> None:
    """Time is up: row, weights row, folder."""
    rows = parts.store.read(
        "SELECT path, folder, version, base_model FROM checkpoints WHERE expires_at <= ?", (now,)
    )
    for row in rows:
        await parts.store.write(partial(_drop_checkpoint, row))
        await _drop_files(parts, row["base_model"], row["version"], row["folder"])


def _drop_checkpoint(row: sqlite3.Row, db: sqlite3.Connection) -> None:
    db.execute(
        "DELETE FROM checkpoints WHERE path = ? AND folder = ?", (row["path"], row["folder"])
    )
    _drop_weights(row["version"], db)


def _drop_weights(version: str | None, db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM weights WHERE version = ?", (version,))


async def _weights(parts: Parts, now: float) -> None:
    """Unnamed sampler weights that nobody can want any more."""
    settings, publisher = parts.settings, parts.publisher
    rows = parts.store.read(
        CANDIDATES,
        {
            "now": now,
            "superseded": now - SUPERSEDED,
            "idle": now - settings.ephemeral_idle_seconds,
            "ended": now - settings.result_seconds,
        },
    )
    for row in rows:
        used = publisher.used_at(row["version"])
        if row["only_idle"] and now - used < settings.ephemeral_idle_seconds:
            continue
        await parts.store.write(partial(_drop_weights, row["version"]))
        await _drop_files(parts, row["base_model"], row["version"], row["folder"])


CANDIDATES = """
WITH w AS (
    SELECT weights.*,
        version IN (SELECT version FROM targets) AS current,
        EXISTS (SELECT 1 FROM samplers s WHERE s.target = weights.version) AS sampled,
        created_at = (SELECT MAX(o.created_at) FROM weights o
                      WHERE o.model_id = weights.model_id AND o.ephemeral) AS newest,
        (SELECT s.ended_at FROM models m JOIN sessions s USING (session_id)
         WHERE m.model_id = weights.model_id) AS ended_at
    FROM weights WHERE ephemeral
)
SELECT version, base_model, folder,
    NOT (COALESCE(expires_at <= :now, 0) OR COALESCE(ended_at < :ended, 0)
         OR (NOT current AND NOT sampled)) AS only_idle
FROM w
WHERE COALESCE(expires_at <= :now, 0)
   OR COALESCE(ended_at < :ended, 0)
   OR (NOT current AND NOT sampled AND created_at < :superseded)
   OR (NOT current AND NOT newest AND created_at < :idle)
"""


async def _drop_files(parts: Parts, base_model: str, version: str | None, folder: str) -> None:
    loop = asyncio.get_running_loop()
    if version is not None and base_model in parts.engines:
        await loop.run_in_executor(parts.pool, parts.publisher.retire, base_model, version)
    await loop.run_in_executor(parts.pool, parts.checkpoints.remove, folder)
