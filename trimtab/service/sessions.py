"""Sessions: opened once a key, kept alive by heartbeats, ended once.

    open ──► finished    the client said so; its first reason stands
      └────► expired     no heartbeat for `session_seconds`

Open ones are held in memory; a heartbeat is written behind. Silence is what a client kept while the
server was there to be talked to: a server that was down, stopped or asleep heard nobody. What an
end means for models and samplers is `core`'s to do. Knows no futures.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab.errors import Busy, Gone, NotFound
from trimtab.service.settings import ServiceSettings
from trimtab.service.store import Store


@dataclass(slots=True)
class Session:
    """`heard_at` is on the clock of silence: see `clock.Awake`."""

    session_id: str
    owner: str
    heard_at: float


class Sessions:
    def __init__(
        self,
        store: Store,
        settings: ServiceSettings,
        clock: Callable[[], float],
        awake: Callable[[], float],
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._awake = awake
        self._open: dict[str, Session] = {}

    def load(self) -> None:
        """Take up the open sessions of an earlier process. They get a full grace: nobody could
        send a heartbeat to a server that was down."""
        now = self._awake()
        for row in self._store.read("SELECT * FROM sessions WHERE state = 'open'"):
            self._open[row["session_id"]] = Session(row["session_id"], row["owner"], now)

    async def create(
        self,
        owner: str,
        *,
        idempotency_key: str | None,
        tags: tuple[str, ...],
        user_metadata: Mapping[str, str],
        sdk_version: str,
        project_id: str | None,
        display_name: str | None,
    ) -> str:
        mine = sum(session.owner == owner for session in self._open.values())
        if mine >= self._settings.max_sessions:
            raise Busy(f"{mine} sessions are open; allowed are {self._settings.max_sessions}")
        now = self._clock()
        row = (
            str(uuid.uuid4()),
            owner,
            idempotency_key,
            json.dumps(list(tags)),
            json.dumps(dict(user_metadata)),
            sdk_version,
            project_id,
            display_name,
            now,
            now,
        )

        def write(db: sqlite3.Connection) -> str:
            known = db.execute(
                "SELECT session_id FROM sessions WHERE owner = ? AND idempotency_key = ?",
                (owner, idempotency_key),
            ).fetchone()
            if known is not None:
                return str(known["session_id"])
            db.execute(
                "INSERT INTO sessions (session_id, owner, idempotency_key, tags, user_metadata,"
                " sdk_version, project_id, display_name, created_at, heartbeat_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            return row[0]

        session_id = await self._store.write(write)
        if session_id == row[0]:
            self._open[session_id] = Session(session_id, owner, self._awake())
        return session_id

    def get(self, owner: str, session_id: str) -> Session:
        """An open session of this owner; NotFound for others', Gone for one that has ended."""
        session = self._open.get(session_id)
        if session is not None and session.owner == owner:
            if not self.overdue(session):
                return session
            raise Gone(f"session {session_id!r} has expired: {self._silence()}")
        row = self._store.row(
            "SELECT owner, state, reason FROM sessions WHERE session_id = ?", (session_id,)
        )
        if row is None or row["owner"] != owner:
            raise NotFound(f"session {session_id!r} is unknown")
        saved = self._saved(session_id)
        if row["state"] == "expired":
            raise Gone(f"session {session_id!r} has expired: {self._silence()}{saved}")
        why = f"is finished ({row['reason']}); create a new one"
        raise Gone(f"session {session_id!r} {why}{saved}")

    def _saved(self, session_id: str) -> str:
        """Where the weights of an ended session's models are."""
        rows = self._store.read(
            "SELECT saved, state FROM models WHERE session_id = ? ORDER BY created_at, model_id",
            (session_id,),
        )
        paths = [repr(row["saved"]) for row in rows if row["saved"]]
        said = f". Its models were saved: {', '.join(paths)}" if paths else ""
        left = sum(row["state"] in ("creating", "ready") for row in rows)
        return said + (f". {left} of its models are still being saved" if left else "")

    def owned(self, owner: str, session_id: str) -> bool:
        """Whether this owner has, or had, the session."""
        row = self._store.row("SELECT owner FROM sessions WHERE session_id = ?", (session_id,))
        return row is not None and row["owner"] == owner

    def _silence(self) -> str:
        return f"no heartbeat for {self._settings.session_seconds / 3600:g} h; create a new one"

    def heartbeat(self, owner: str, session_id: str) -> None:
        """Keep a session alive. Written behind: after a crash every open session starts afresh."""
        session = self.get(owner, session_id)
        now, session.heard_at = self._clock(), self._awake()
        self._store.submit(
            lambda db: db.execute(
                "UPDATE sessions SET heartbeat_at = ? WHERE session_id = ?", (now, session_id)
            )
        )

    def overdue(self, session: Session) -> bool:
        return self._awake() - session.heard_at > self._settings.session_seconds

    def expired(self) -> list[Session]:
        return [session for session in self._open.values() if self.overdue(session)]

    async def end(self, session_id: str, state: str, reason: str, detail: str | None) -> bool:
        """End a session; False if it had ended before, with its first reason untouched."""
        session = self._open.pop(session_id, None)
        if session is None:
            return False
        ended = False
        try:
            await self._store.write(
                lambda db: db.execute(
                    "UPDATE sessions SET state = ?, reason = ?, detail = ?, ended_at = ?"
                    " WHERE session_id = ? AND state = 'open'",
                    (state, reason, detail, self._clock(), session_id),
                )
            )
            ended = True
        finally:
            if not ended:  # a full disk: the next sweep, or the client, tries again
                self._open[session_id] = session
        return True
