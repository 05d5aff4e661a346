"""What a new process makes of the journal of the one before.

Open sessions go on. Models are lost, for their weights lived in memory: each gets one sentence that
names its last checkpoint, and what was pending on it fails with that sentence. Samples that were
pending are drawn again from their journalled body and seed: their weights are on disk. Files that
no row names are removed. Finished results need nothing: they are read where they lie.

Training bodies of lost models are kept until here, in order, beside the seeds that were drawn: a
replay would read them from `bodies` before `_lose` lets them go.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from trimtab.service import paths
from trimtab.service.futures import Entry, SqlWrite
from trimtab.service.models import moved
from trimtab.service.orders import forget_bodies
from trimtab.service.parts import Parts
from trimtab.service.sampling import Sampling

log = logging.getLogger(__name__)


async def recover(parts: Parts) -> list[Entry]:
    """Settle everything but the pending samples, which are returned for `resume`."""
    parts.sessions.load()
    _sweep_folders(parts)
    pending = [_entry(row) for row in parts.store.read(PENDING)]
    for entry in pending:
        parts.futures.adopt(entry.request_id, entry.owner, entry.kind, entry.digest)
    await _lose_models(parts, [entry for entry in pending if entry.kind != "sample"])
    return [entry for entry in pending if entry.kind == "sample"]


PENDING = "SELECT * FROM requests WHERE state = 'pending' ORDER BY created_at, seq_id"


async def resume(parts: Parts, sampling: Sampling, entries: list[Entry]) -> None:
    """Put the pending samples back, one by one."""
    for entry in entries:
        row = parts.store.row("SELECT body FROM bodies WHERE request_id = ?", (entry.request_id,))
        if row is None:
            await parts.futures.fail(entry, "the request's body is missing", "server")
        else:
            await sampling.resume(entry, row["body"])


async def _lose_models(parts: Parts, pending: list[Entry]) -> None:
    rows = parts.store.read("SELECT model_id FROM models WHERE state IN ('creating', 'ready')")
    why = {row["model_id"]: _sentence(parts, row["model_id"]) for row in rows}
    writes = [parts.store.write(_lose(model_id, text)) for model_id, text in why.items()]
    fails = []
    for entry in pending:
        text = why.get(entry.key) or _sentence(parts, entry.key)
        fails.append(parts.futures.fail(entry, text, "server"))
    await asyncio.gather(*writes, *fails)
    if why:
        log.warning("%d models lost their weights in the restart", len(why))


def _lose(model_id: str, why: str) -> SqlWrite:
    def write(db: sqlite3.Connection) -> None:
        moved(model_id, "lost", why)(db)
        forget_bodies(model_id)(db)

    return write


def _sentence(parts: Parts, model_id: str) -> str:
    path = parts.checkpoints.newest(model_id)
    saved = (
        f"its last checkpoint is {path!r}: load it into a new model to go on"
        if path
        else "it had not been saved"
    )
    return f"model {model_id!r} lost its weights when the server restarted; {saved}"


def _sweep_folders(parts: Parts) -> None:
    named = {
        row["folder"]
        for row in parts.store.read(
            "SELECT folder FROM checkpoints UNION SELECT folder FROM weights"
            " WHERE folder IS NOT NULL"
        )
    }
    if orphans := paths.sweep_orphans(parts.checkpoints.home, named):
        log.info("removed %d unfinished checkpoint folders", len(orphans))


def _entry(row: sqlite3.Row) -> Entry:
    return Entry(
        request_id=row["request_id"],
        kind=row["kind"],
        owner=row["owner"],
        session_id=row["session_id"],
        key=row["key"],
        seq_id=row["seq_id"],
        digest=row["digest"],
        seed=None if row["seed"] is None else int(row["seed"]),
        samples=row["samples"],
    )
