"""Sampling sessions: which weights a sampling client draws from, and how many clients share it.

Rows never change but for the count of clients, so they are kept in memory once read. Knows no
sampler: what a target means is `publish.py`'s.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from dataclasses import dataclass

from trimtab.errors import Invalid, NotFound
from trimtab.service.futures import SqlWrite
from trimtab.service.records import SamplerRecord
from trimtab.service.store import Store

KEPT = 10_000  # rows in memory


@dataclass(frozen=True, slots=True)
class SamplingSession:
    record: SamplerRecord
    session_id: str
    owner: str
    target: str


class Samplers:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, SamplingSession] = OrderedDict()

    def find(self, sampler_id: str) -> SamplingSession | None:
        """Any owner's; from any thread (a learner's looks for ids in use)."""
        row = self._store.row("SELECT * FROM samplers WHERE sampler_id = ?", (sampler_id,))
        return None if row is None else _session(row)

    def get(self, owner: str, sampler_id: str) -> SamplingSession:
        found = self._known.get(sampler_id)
        if found is None and (found := self.find(sampler_id)) is not None:
            self._known[sampler_id] = found
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        if found is None or found.owner != owner:
            raise NotFound(f"sampling session {sampler_id!r} is unknown")
        return found

    async def create(self, sampler: SamplingSession, now: float) -> str:
        """The session's id; the same again for the same request, Invalid for another one."""
        standing = await self._store.write(lambda db: _create(db, sampler, now))
        if standing != sampler:
            raise Invalid(
                f"sampling session {sampler.record.sampler_id!r} exists with"
                f" {_drawn_from(standing)}; this request asks for {_drawn_from(sampler)}: use a new"
                " sampling_session_seq_id"
            )
        return sampler.record.sampler_id

    def written(self, sampler: SamplingSession, now: float) -> SqlWrite:
        return lambda db: _insert(db, sampler, now)

    async def join(self, sampler_id: str) -> int:
        def write(db: sqlite3.Connection) -> int:
            db.execute(
                "UPDATE samplers SET joined = joined + 1 WHERE sampler_id = ?", (sampler_id,)
            )
            row = db.execute("SELECT joined FROM samplers WHERE sampler_id = ?", (sampler_id,))
            return int(row.fetchall()[0]["joined"])

        return await self._store.write(write)


def _drawn_from(sampler: SamplingSession) -> str:
    record = sampler.record
    return f"model_path {record.model_path!r}" if record.model_path else record.base_model


def _create(db: sqlite3.Connection, sampler: SamplingSession, now: float) -> SamplingSession:
    row = db.execute(
        "SELECT * FROM samplers WHERE sampler_id = ?", (sampler.record.sampler_id,)
    ).fetchone()
    if row is not None:
        return _session(row)
    _insert(db, sampler, now)
    return sampler


def _insert(db: sqlite3.Connection, sampler: SamplingSession, now: float) -> None:
    record = sampler.record
    db.execute(
        "INSERT INTO samplers (sampler_id, session_id, owner, base_model, model_path, target,"
        " created_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            record.sampler_id,
            sampler.session_id,
            sampler.owner,
            record.base_model,
            record.model_path,
            sampler.target,
            now,
        ),
    )


def _session(row: sqlite3.Row) -> SamplingSession:
    record = SamplerRecord(row["sampler_id"], row["base_model"], row["model_path"])
    return SamplingSession(record, row["session_id"], row["owner"], row["target"])
