"""What an owner has: training runs, checkpoints, sessions, in pages, newest first. Reads only.

A training run is a model, loaded or not. Somebody else's run is unknown here, unless it holds a
published checkpoint and the caller asks for what is accessible; then it shows those alone.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trimtab.errors import Invalid, NotFound
from trimtab.service.checkpoints import checkpoint_of
from trimtab.service.parts import Parts
from trimtab.service.records import CheckpointRecord

T_co = TypeVar("T_co", covariant=True)
MOST = 1000  # entries of a page
MOST_CONDITIONS = 50  # of one kind in a search


@dataclass(frozen=True, slots=True)
class Page(Generic[T_co]):
    """`items` from `offset` on, of `total`."""

    items: tuple[T_co, ...]
    offset: int
    limit: int
    total: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A model as its owner sees it later. `broken`: it was not created, or lost its weights."""

    model_id: str
    owner: str
    base_model: str
    rank: int
    broken: bool
    last_request_at: float
    user_metadata: Mapping[str, str]
    weights: CheckpointRecord | None = None
    sampler_weights: CheckpointRecord | None = None


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """`state` is open, finished or expired; `reason` what a client finished it with."""

    session_id: str
    owner: str
    state: str
    reason: str | None
    detail: str | None
    created_at: float
    project_id: str | None
    display_name: str | None
    user_metadata: Mapping[str, str]
    checkpoints: int = 0
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Search:
    """Which sessions are sought. `session_id` and `display_name` widen each other, the rest
    narrows. `states` pairs a state with a reason (None: any). `after` is the last one of the page
    before: its time in whole microseconds and its id."""

    session_id: str | None = None
    display_name: str | None = None
    project_ids: tuple[str, ...] | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    states: tuple[tuple[str, str | None], ...] | None = None
    after: tuple[int, str] | None = None
    limit: int = 50


class Listing:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    # ---- training runs

    async def runs(
        self, owner: str, limit: int, offset: int, project_id: str | None, *, accessible: bool
    ) -> Page[RunRecord]:
        where, values = _owned("m.owner", owner, accessible)
        if project_id is not None:
            where, values = f"{where} AND s.project_id = ?", [*values, project_id]
        rows, total = await self._page(
            f"{RUNS} WHERE {where} ORDER BY m.created_at DESC, m.model_id",
            f"SELECT COUNT(*) AS n FROM models m JOIN sessions s USING (session_id) WHERE {where}",
            values, limit, offset,
        )  # fmt: skip
        found = await asyncio.to_thread(lambda: tuple(self._run(owner, row) for row in rows))
        return Page(found, offset, limit, total)

    async def run(self, owner: str, model_id: str, *, accessible: bool) -> RunRecord:
        where, values = _owned("m.owner", owner, accessible)
        row = self._parts.store.row(f"{RUNS} WHERE m.model_id = ? AND {where}", [model_id, *values])
        if row is None:
            raise _unknown_run(model_id)
        return self._run(owner, row)

    def _run(self, owner: str, row: sqlite3.Row) -> RunRecord:
        model_id = row["model_id"]
        public = row["owner"] != owner
        return RunRecord(
            model_id=model_id,
            owner=row["owner"],
            base_model=row["base_model"],
            rank=row["rank"],
            broken=row["state"] in ("failed", "lost"),
            last_request_at=row["last_request_at"] or row["created_at"],
            user_metadata={} if public else json.loads(row["user_metadata"]),
            weights=self._newest(model_id, "weights", public),
            sampler_weights=self._newest(model_id, "sampler_weights", public),
        )

    def _newest(self, model_id: str, kind: str, public: bool) -> CheckpointRecord | None:
        row = self._parts.store.row(
            f"SELECT * FROM checkpoints WHERE model_id = ? AND kind = ? AND {LIVE}"
            + (" AND public" if public else "")
            + " ORDER BY created_at DESC LIMIT 1",
            (model_id, kind, self._parts.clock()),
        )
        return None if row is None else checkpoint_of(row).record

    # ---- checkpoints

    async def run_checkpoints(self, owner: str, model_id: str) -> tuple[CheckpointRecord, ...]:
        """All of one's own run; the published ones of somebody else's."""
        now = self._parts.clock()
        mine = self._parts.store.row(
            "SELECT 1 FROM models WHERE model_id = ? AND owner = ?", (model_id, owner)
        )
        query = (
            f"SELECT * FROM checkpoints WHERE model_id = ? AND {LIVE}"
            + ("" if mine else " AND public")
            + " ORDER BY created_at DESC, path"
        )
        rows = await asyncio.to_thread(self._parts.store.read, query, (model_id, now))
        if not mine and not rows:
            raise _unknown_run(model_id)
        return tuple(checkpoint_of(row).record for row in rows)

    async def checkpoints(self, owner: str, limit: int, offset: int) -> Page[CheckpointRecord]:
        values = [owner, self._parts.clock()]
        rows, total = await self._page(
            f"SELECT * FROM checkpoints WHERE owner = ? AND {LIVE} ORDER BY created_at DESC, path",
            f"SELECT COUNT(*) AS n FROM checkpoints WHERE owner = ? AND {LIVE}",
            values, limit, offset,
        )  # fmt: skip
        return Page(tuple(checkpoint_of(row).record for row in rows), offset, limit, total)

    # ---- sessions

    async def sessions(self, owner: str, limit: int, offset: int) -> tuple[str, ...]:
        rows, _ = await self._page(
            "SELECT session_id FROM sessions WHERE owner = ? ORDER BY created_at DESC, session_id",
            "SELECT COUNT(*) AS n FROM sessions WHERE owner = ?",
            [owner], limit, offset,
        )  # fmt: skip
        return tuple(row["session_id"] for row in rows)

    async def session(
        self, owner: str, session_id: str
    ) -> tuple[SessionRecord, tuple[str, ...], tuple[str, ...]]:
        """The session, its models and its sampling sessions."""
        row = self._parts.store.row(
            "SELECT * FROM sessions WHERE session_id = ? AND owner = ?", (session_id, owner)
        )
        if row is None:
            raise NotFound(f"session {session_id!r} is unknown")
        ids = [
            self._parts.store.read(
                f"SELECT {column} FROM {table} WHERE session_id = ? ORDER BY created_at, {column}",
                (session_id,),
            )
            for column, table in (("model_id", "models"), ("sampler_id", "samplers"))
        ]
        models, samplers = (tuple(each[0] for each in rows) for rows in ids)
        return _session(row), models, samplers

    async def search(self, owner: str, search: Search) -> tuple[SessionRecord, ...]:
        where, values = _sought(owner, search)
        query = (
            f"{SUMMARIES} WHERE {' AND '.join(where)}"
            " ORDER BY created_us DESC, s.session_id DESC LIMIT ?"
        )
        now = self._parts.clock()
        parameters = [now, now, *values, search.limit]
        rows = await asyncio.to_thread(self._parts.store.read, query, parameters)
        return tuple(_session(row, row["checkpoints"], row["bytes"] or 0) for row in rows)

    async def _page(
        self, query: str, count: str, values: Sequence[object], limit: int, offset: int
    ) -> tuple[list[sqlite3.Row], int]:
        if not 1 <= limit <= MOST:
            raise Invalid(f"limit must lie between 1 and {MOST}, found {limit}")
        if not 0 <= offset < 2**62:
            raise Invalid(f"offset must not be negative, found {offset}")
        store = self._parts.store

        def read() -> tuple[list[sqlite3.Row], int]:
            (counted,) = store.read(count, values)
            return store.read(f"{query} LIMIT ? OFFSET ?", [*values, limit, offset]), counted["n"]

        return await asyncio.to_thread(read)


LIVE = "(expires_at IS NULL OR expires_at > ?)"

RUNS = """
SELECT m.*, (SELECT r.created_at FROM requests r WHERE r.key = m.model_id AND r.kind != 'sample'
             ORDER BY r.seq_id DESC LIMIT 1) AS last_request_at
FROM models m JOIN sessions s USING (session_id)
"""

SUMMARIES = """
SELECT s.*, CAST(ROUND(s.created_at * 1e6) AS INTEGER) AS created_us,
    (SELECT COUNT(*) FROM checkpoints c JOIN models m USING (model_id)
     WHERE m.session_id = s.session_id AND (c.expires_at IS NULL OR c.expires_at > ?))
        AS checkpoints,
    (SELECT SUM(c.size_bytes) FROM checkpoints c JOIN models m USING (model_id)
     WHERE m.session_id = s.session_id AND (c.expires_at IS NULL OR c.expires_at > ?)) AS bytes
FROM sessions s
"""


def _owned(column: str, owner: str, accessible: bool) -> tuple[str, list[object]]:
    if not accessible:
        return f"{column} = ?", [owner]
    return (
        f"({column} = ? OR m.model_id IN (SELECT model_id FROM checkpoints WHERE public))",
        [owner],
    )


def _sought(owner: str, search: Search) -> tuple[list[str], list[object]]:
    """The conditions of a search and their values; bounded, as SQLite's expressions are."""
    words = (search.display_name or "").lower().split()
    counts = {
        "user_metadata": len(search.user_metadata),
        "display_name": len(words),
        "statuses": len(search.states or ()),
    }
    for name, count in counts.items():
        if count > MOST_CONDITIONS:
            raise Invalid(f"{name}: {count} conditions; a search may have {MOST_CONDITIONS}")
    where: list[str] = ["s.owner = ?"]
    values: list[object] = [owner]
    named: list[str] = []
    if search.session_id is not None:
        named.append("s.session_id = ?")
        values.append(search.session_id)
    if search.display_name is not None:
        each = ["instr(lower(COALESCE(s.display_name, '')), ?) > 0" for _ in words]
        named.append(f"({' AND '.join(each) or '1'})")
        values += words
    if named:
        where.append(f"({' OR '.join(named)})")
    if search.project_ids is not None:
        where.append("COALESCE(s.project_id, 'default') IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(search.project_ids))
    for name, value in search.user_metadata.items():
        where.append("EXISTS (SELECT 1 FROM json_each(s.user_metadata) j"
                     " WHERE j.key = ? AND j.value = ?)")  # fmt: skip
        values += [name, value]
    if search.states is not None:
        each = []
        for state, reason in search.states:
            each.append("(s.state = ? AND (? IS NULL OR s.reason = ?))")
            values += [state, reason, reason]
        where.append(f"({' OR '.join(each) or '0'})")
    if search.after is not None:
        where.append("(CAST(ROUND(s.created_at * 1e6) AS INTEGER), s.session_id) < (?, ?)")
        values += search.after
    return where, values


def _session(row: sqlite3.Row, checkpoints: int = 0, size: int = 0) -> SessionRecord:
    return SessionRecord(
        session_id=row["session_id"],
        owner=row["owner"],
        state=row["state"],
        reason=row["reason"],
        detail=row["detail"],
        created_at=row["created_at"],
        project_id=row["project_id"],
        display_name=row["display_name"],
        user_metadata=json.loads(row["user_metadata"]),
        checkpoints=checkpoints,
        checkpoint_bytes=size,
    )


def _unknown_run(model_id: str) -> NotFound:
    return NotFound(f"training run {model_id!r} is unknown")
