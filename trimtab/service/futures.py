"""Requests and what became of them: opened once, finished once, waited for by anybody's poll.

    once     the same (id, body) runs one acceptance, whoever resends it and whenever
    open     the journal row; a promise may leave only after its commit
    finish, fail   the outcome and whatever must be true with it, in one transaction
    wait     a future of the loop and a timer: no thread, no task, nothing left behind by a poll
    ack      a result that the client holds need not be held here

Results lie in the store alone; memory holds what is pending. Knows no lanes and no engines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trimtab.errors import Gone, Invalid, NotFound, Stopping, TooLarge, TrimtabError, UserError
from trimtab.service import ids
from trimtab.service.records import Completion, Completions, Outcome, Promise
from trimtab.service.store import Store

log = logging.getLogger(__name__)
T = TypeVar("T")
SqlWrite = Callable[[sqlite3.Connection], object]
PENDING = Outcome("pending")
CANCELLED = "the request was cancelled"
INLINE = 1 << 20  # bytes of a result that the loop reads itself
PAGE = 1000  # completions in one answer
NOTHING, GRADIENT, STEP = 0, 1, 2  # what a request does to its model, as far as a replay must know
FULL = frozenset({5, 6, 7, 8, 10, 13, 14})  # SQLite: busy, locked, memory, read-only, I/O, full
RETRY = 0.5  # seconds until an outcome that could not be written is written again
REFUSED: dict[int, type[UserError]] = {400: Invalid, 404: NotFound, 410: Gone, 413: TooLarge}


@dataclass(frozen=True, slots=True)
class Entry:
    """A request as the journal keeps it. `key` is the model or sampling session it belongs to."""

    request_id: str
    kind: str
    owner: str
    session_id: str
    key: str
    seq_id: int
    digest: bytes
    body: bytes = b""
    seed: int | None = None
    samples: int = 0
    effect: int = NOTHING

    @property
    def promise(self) -> Promise:
        return promise_of(self.request_id, self.kind, self.key, self.samples)


def promise_of(request_id: str, kind: str, key: str, samples: int) -> Promise:
    if kind == "sample":
        return Promise(request_id, None, ids.sequence_ids(request_id, samples))
    return Promise(request_id, None if kind == "create_custom_loss" else key)


@dataclass(slots=True)
class _Live:
    """A request that is being accepted or is pending."""

    owner: str
    kind: str
    digest: bytes
    accepted: asyncio.Task[Promise] | None = None
    waiters: set[asyncio.Future[Outcome]] = field(default_factory=set)


class Futures:
    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._releasing = False
        self._unwritten: dict[str, tuple[str, Outcome]] = {}  # outcomes the store could not take
        self._listeners: dict[tuple[str, int], set[asyncio.Future[None]]] = {}
        row = store.row("SELECT MAX(cursor) AS newest FROM requests")
        self._cursor = (row and row["newest"]) or 0  # touched by the writer's thread alone

    # ---- opening

    async def once(self, entry: Entry, accept: Callable[[], Awaitable[Promise]]) -> Promise:
        """The promise of `accept()`, run at most once for this id. It goes on if the caller is
        cancelled, so a lost connection never leaves a request half accepted."""
        live = self._live.get(entry.request_id)
        if live is not None:
            _same(entry, live.kind, live.digest)
            if live.accepted is None:
                return entry.promise
            return await asyncio.shield(live.accepted)
        row = self._row(entry.request_id)
        if row is not None:
            return _again(entry, row)
        live = self._live[entry.request_id] = _Live(entry.owner, entry.kind, entry.digest)
        live.accepted = asyncio.ensure_future(self._accept(entry.request_id, accept))
        return await asyncio.shield(live.accepted)

    async def _accept(self, request_id: str, accept: Callable[[], Awaitable[Promise]]) -> Promise:
        done = False
        try:
            promise = await accept()
            done = True
            return promise
        finally:
            if not done:
                self._settle(request_id, Outcome("failed", error="refused", category="user"))

    async def open(self, entry: Entry, writes: Sequence[SqlWrite] = ()) -> None:
        """Journal a pending request and what its acceptance changes."""
        self._live.setdefault(entry.request_id, _Live(entry.owner, entry.kind, entry.digest))
        now = self._clock()

        def write(db: sqlite3.Connection) -> None:
            _insert(db, entry, "pending", now)
            db.execute(
                "INSERT INTO bodies VALUES (?, ?, ?, ?, ?)",
                (entry.request_id, entry.key, entry.seq_id, len(entry.body), entry.body),
            )
            for other in writes:
                other(db)

        await self._store.write(write)

    async def open_failed(self, entry: Entry, error: str, category: str, status: int = 0) -> None:
        """Journal a request that is over before it began: refused with `status`, or (0) accepted
        for a model that is gone."""
        now = self._clock()

        def write(db: sqlite3.Connection) -> None:
            _insert(db, entry, "failed", now)
            db.execute(
                "UPDATE requests SET error = ?, category = ?, rejected = ?, finished_at = ?"
                " WHERE request_id = ?",
                (error, category, status, now, entry.request_id),
            )
            if not status:
                self._number(db, entry.request_id)

        await self._store.write(write)
        self._settle(entry.request_id, Outcome("failed", error=error, category=category))
        self._tell(entry.key, entry.seq_id)

    def kind(self, owner: str, request_id: str) -> str:
        """What kind of request this owner's id is."""
        live = self._live.get(request_id)
        if live is not None and live.owner == owner:
            return live.kind
        row = self._row(request_id)
        if row is None or row["owner"] != owner:
            raise _unknown(request_id)
        return str(row["kind"])

    def adopt(self, request_id: str, owner: str, kind: str, digest: bytes) -> None:
        """Hold a journalled pending request that this process will finish (after a restart)."""
        self._live[request_id] = _Live(owner, kind, digest)

    # ---- finishing

    async def finish(
        self, entry: Entry, body: bytes, content_type: str, writes: Sequence[SqlWrite] = ()
    ) -> Outcome:
        """Journal a result, then tell it. Answers what was told: a result that the journal cannot
        take at all is a failure."""
        now = self._clock()

        def write(db: sqlite3.Connection) -> None:
            for other in writes:
                other(db)
            db.execute("INSERT INTO results VALUES (?, ?)", (entry.request_id, body))
            db.execute(
                "UPDATE requests SET state = 'done', content_type = ?, size = ?, finished_at = ?"
                " WHERE request_id = ?",
                (content_type, len(body), now, entry.request_id),
            )
            self._close(db, entry, again=entry.effect != NOTHING)

        return await self._conclude(entry, write, Outcome("done", body, content_type))

    async def fail(
        self, entry: Entry, error: str, category: str, writes: Sequence[SqlWrite] = ()
    ) -> None:
        outcome = Outcome("failed", error=error, category=category)

        def write(db: sqlite3.Connection) -> None:
            for other in writes:
                other(db)
            self._fail(db, entry, outcome)

        await self._conclude(entry, write, outcome)

    def _fail(self, db: sqlite3.Connection, entry: Entry, outcome: Outcome) -> None:
        db.execute(
            "UPDATE requests SET state = 'failed', error = ?, category = ?, finished_at = ?"
            " WHERE request_id = ?",
            (outcome.error, outcome.category, self._clock(), entry.request_id),
        )
        self._close(db, entry, again=entry.effect == STEP)

    async def _conclude(self, entry: Entry, write: SqlWrite, outcome: Outcome) -> Outcome:
        try:
            await self.persist(f"the outcome of {entry.request_id}", write)
        except Stopping:
            outcome = PENDING
        except (TrimtabError, sqlite3.Error) as error:
            outcome = await self._misfiled(entry, error)
        self._settle(entry.request_id, outcome)
        self._tell(entry.key, entry.seq_id)
        return outcome

    async def persist(self, what: str, write: SqlWrite) -> None:
        """Write, and while the disk is full wait for it. Told means committed: until its outcome
        is, a request is pending, and nothing that comes after it runs."""
        told = False
        while True:
            try:
                await self._store.write(write)
                return
            except (TrimtabError, sqlite3.Error) as error:
                if not _passes(error):
                    raise
                if self._releasing:
                    raise Stopping("the server is stopping") from error
                if not told:
                    log.error("%s waits for the disk: %s", what, error)
                told = True
            await asyncio.sleep(RETRY)

    async def _misfiled(self, entry: Entry, error: Exception) -> Outcome:
        """An outcome that could not be written is a failure; when that cannot be written either, it
        is told for as long as this process lives."""
        category = getattr(error, "category", "server")
        outcome = Outcome("failed", error=f"{error}", category=category)
        try:
            await self._store.write(lambda db: self._fail(db, entry, outcome))
        except (TrimtabError, sqlite3.Error):
            self._unwritten[entry.request_id] = (entry.owner, outcome)
        return outcome

    def _close(self, db: sqlite3.Connection, entry: Entry, *, again: bool) -> None:
        """`again`: a replay will need what the request was."""
        if not again:
            for table in ("bodies", "pins"):
                db.execute(f"DELETE FROM {table} WHERE request_id = ?", (entry.request_id,))
        self._number(db, entry.request_id)

    def _number(self, db: sqlite3.Connection, request_id: str) -> None:
        """Give a finished request its place in the order that cursors count."""
        self._cursor += 1
        db.execute(
            "UPDATE requests SET cursor = ? WHERE request_id = ?", (self._cursor, request_id)
        )

    # ---- waiting

    async def wait(self, owner: str, request_id: str, timeout: float) -> Outcome:
        live = self._live.get(request_id)
        if live is None:
            return await self._settled(owner, request_id)
        if live.owner != owner:
            raise _unknown(request_id)
        if timeout <= 0:
            return PENDING
        return await _held(live.waiters, timeout, PENDING)

    async def _settled(self, owner: str, request_id: str) -> Outcome:
        if (kept := self._unwritten.get(request_id)) is not None and kept[0] == owner:
            return kept[1]
        row = self._row(request_id)
        if row is None or row["owner"] != owner:
            raise _unknown(request_id)
        if row["state"] == "pending":
            return PENDING
        if row["state"] == "failed":
            return Outcome("failed", error=row["error"], category=row["category"])
        query = ("SELECT body FROM results WHERE request_id = ?", (request_id,))
        large = row["size"] > INLINE
        result = (
            await asyncio.to_thread(self._store.row, *query) if large else (self._store.row(*query))
        )
        if result is None:
            raise Gone(f"the result of request {request_id!r} is no longer kept")
        return Outcome("done", result["body"], row["content_type"])

    async def wait_many(self, key: str, clone: int, after: int, timeout: float) -> Completions:
        """What finished for one sampling client after a cursor; held while there is nothing."""
        found = self._completions(key, clone, after)
        if found.items or timeout <= 0:
            return found
        listeners = self._listeners.setdefault((key, clone), set())
        try:
            await _held(listeners, timeout, None)
        finally:
            if not listeners:
                self._listeners.pop((key, clone), None)
        return self._completions(key, clone, after)

    def _completions(self, key: str, clone: int, after: int) -> Completions:
        rows = self._store.read(
            "SELECT request_id, state, size, cursor FROM requests WHERE key = ? AND clone = ?"
            f" AND cursor > ? AND state IN ('done', 'failed') ORDER BY cursor LIMIT {PAGE}",
            (key, clone, after),
        )
        items = tuple(
            Completion(r["request_id"], "finished" if r["state"] == "done" else "failed", r["size"])
            for r in rows
        )
        return Completions(items, rows[-1]["cursor"] if rows else after)

    async def ack(self, key: str, request_ids: Iterable[str]) -> None:
        """Drop results that the client says it holds; only of requests under `key`."""
        named = json.dumps(list(request_ids))

        def write(db: sqlite3.Connection) -> None:
            rows = db.execute(
                "SELECT request_id FROM requests WHERE key = ? AND state IN ('done', 'failed')"
                " AND request_id IN (SELECT value FROM json_each(?))",
                (key, named),
            ).fetchall()
            trim(db, [row["request_id"] for row in rows])

        await self._store.write(write)

    def release(self) -> None:
        """Let every held poll go with what is known: the server is stopping."""
        self._releasing = True
        for live in self._live.values():
            _wake(live.waiters, PENDING)
        for waiters in self._listeners.values():
            _wake(waiters, None)

    # ---- inside

    def _row(self, request_id: str) -> sqlite3.Row | None:
        return self._store.row("SELECT * FROM requests WHERE request_id = ?", (request_id,))

    def _settle(self, request_id: str, outcome: Outcome) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            _wake(live.waiters, outcome)

    def _tell(self, key: str, seq_id: int) -> None:
        _wake(self._listeners.get((key, seq_id // ids.CLONE), ()), None)


def trim(db: sqlite3.Connection, request_ids: Sequence[str]) -> None:
    """Drop results and bodies; the rows stay, so that the ids are gone rather than unknown."""
    named = json.dumps(request_ids)
    where = "WHERE request_id IN (SELECT value FROM json_each(?))"
    db.execute(f"DELETE FROM results {where}", (named,))
    db.execute(f"DELETE FROM bodies {where}", (named,))
    db.execute(f"UPDATE requests SET state = 'trimmed' {where} AND state = 'done'", (named,))
    db.execute(f"UPDATE requests SET cursor = NULL {where}", (named,))


def _insert(db: sqlite3.Connection, entry: Entry, state: str, now: float) -> None:
    db.execute(
        "INSERT INTO requests (request_id, kind, owner, session_id, key, seq_id, clone, samples,"
        " digest, seed, effect, state, created_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            entry.request_id,
            entry.kind,
            entry.owner,
            entry.session_id,
            entry.key,
            entry.seq_id,
            entry.seq_id // ids.CLONE,
            entry.samples,
            entry.digest,
            None if entry.seed is None else str(entry.seed),
            entry.effect,
            state,
            now,
        ),
    )


def _same(entry: Entry, kind: str, digest: bytes) -> None:
    if digest != entry.digest or kind != entry.kind:
        raise Invalid(
            f"seq_id {entry.seq_id} of {entry.key!r} was already used by a {kind} with body"
            f" {digest.hex()[:12]}; this {entry.kind} has body {entry.digest.hex()[:12]}:"
            " use a new seq_id"
        )


def _again(entry: Entry, row: sqlite3.Row) -> Promise:
    """Answer a resend of a journalled request as the first submit was answered."""
    _same(entry, row["kind"], row["digest"])
    if row["rejected"]:
        raise REFUSED.get(row["rejected"], Invalid)(row["error"])
    return promise_of(row["request_id"], row["kind"], row["key"], row["samples"])


def _passes(error: Exception) -> bool:
    """Whether an error is of the disk or the machine, and may be over in a moment."""
    found: BaseException | None = error
    while found is not None:
        if getattr(found, "sqlite_errorcode", 0) & 255 in FULL:
            return True
        found = found.__cause__
    return False


def _unknown(request_id: str) -> NotFound:
    return NotFound(f"request {request_id!r} is unknown")


async def _held(waiters: set[asyncio.Future[T]], timeout: float, otherwise: T) -> T:
    """Wait in `waiters` until woken, at most `timeout` seconds. Costs a future and a timer."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[T] = loop.create_future()
    timer = loop.call_later(timeout, _resolve, waiter, otherwise)
    waiters.add(waiter)
    try:
        return await waiter
    finally:
        timer.cancel()
        waiters.discard(waiter)


def _resolve(waiter: asyncio.Future[T], value: T) -> None:
    if not waiter.done():
        waiter.set_result(value)


def _wake(waiters: Iterable[asyncio.Future[T]], value: T) -> None:
    for waiter in tuple(waiters):
        _resolve(waiter, value)
