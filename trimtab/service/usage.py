"""What the ledger says of an owner: usage by the hour, stored checkpoints, the audit, a session's
trace. Reads only; `ledger.py` writes. Nothing here has a price.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from trimtab.errors import Invalid
from trimtab.service.ledger import HOUR
from trimtab.service.parts import Parts

LONGEST = 14 * 24 * HOUR  # seconds one answer may span


@dataclass(frozen=True, slots=True)
class Used:
    """`amount` tokens, or checkpoints, of one session in the hour from `hour` on (seconds)."""

    hour: int
    session_id: str
    project_id: str | None
    base_model: str
    kind: str
    amount: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The live checkpoints of one project."""

    project_id: str | None
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """One request: when it was accepted and when it was done or had failed."""

    request_id: str
    kind: str
    key: str
    state: str
    created_at: float
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened to a checkpoint; `details` says by whom and what for."""

    at: float
    event: str
    path: str
    details: dict[str, str]


class Usage:
    """What an owner's sessions used."""

    def __init__(self, parts: Parts) -> None:
        self._store = parts.store
        self._clock = parts.clock

    async def hours(self, owner: str, start: float, end: float) -> list[Used]:
        """Every count from `start` to `end`, both on the hour, at most 14 days apart."""
        if start % HOUR or end % HOUR:
            raise Invalid("starting_on and ending_before must lie on the hour, UTC")
        if not 0 < end - start <= LONGEST:
            raise Invalid("ending_before must lie after starting_on, by 14 days at most")
        rows = await asyncio.to_thread(
            self._store.read,
            "SELECT u.*, s.project_id FROM usage u LEFT JOIN sessions s USING (session_id)"
            " WHERE u.owner = ? AND u.hour >= ? AND u.hour < ? ORDER BY u.hour, u.amount DESC",
            (owner, int(start), int(end)),
        )
        return [
            Used(
                hour=row["hour"],
                session_id=row["session_id"],
                project_id=row["project_id"],
                base_model=row["base_model"],
                kind=row["kind"],
                amount=row["amount"],
            )
            for row in rows
        ]

    async def metadata(self, owner: str, session_ids: set[str]) -> dict[str, dict[str, str]]:
        """The user_metadata of these sessions."""
        rows = await asyncio.to_thread(
            self._store.read,
            "SELECT session_id, user_metadata FROM sessions WHERE owner = ?"
            " AND session_id IN (SELECT value FROM json_each(?))",
            (owner, json.dumps(sorted(session_ids))),
        )
        return {row["session_id"]: json.loads(row["user_metadata"]) for row in rows}

    async def stored(self, owner: str, project_id: str | None) -> list[Stored]:
        """Live checkpoints now, by project."""
        rows = await asyncio.to_thread(
            self._store.read,
            "SELECT s.project_id, COUNT(*) AS n, SUM(c.size_bytes) AS size FROM checkpoints c"
            " LEFT JOIN models m USING (model_id) LEFT JOIN sessions s USING (session_id)"
            " WHERE c.owner = ? AND (c.expires_at IS NULL OR c.expires_at > ?)"
            " AND (? IS NULL OR s.project_id = ?) GROUP BY s.project_id ORDER BY s.project_id",
            (owner, self._clock(), project_id, project_id),
        )
        return [Stored(row["project_id"], row["n"], row["size"]) for row in rows]

    async def audit(self, owner: str, start: float, end: float) -> list[Line]:
        rows = await asyncio.to_thread(
            self._store.read,
            "SELECT * FROM audit WHERE owner = ? AND at >= ? AND at < ? ORDER BY at",
            (owner, start, end),
        )
        return [Line(r["at"], r["event"], r["path"], json.loads(r["details"])) for r in rows]

    async def trace(self, session_id: str, most: int = 200_000) -> list[Event]:
        """The session's requests in the order they came, those of the last 30 days at least."""
        rows = await asyncio.to_thread(
            self._store.read,
            "SELECT request_id, kind, key, state, created_at, finished_at FROM requests"
            " WHERE session_id = ? ORDER BY created_at LIMIT ?",
            (session_id, most),
        )
        return [Event(*row) for row in rows]
