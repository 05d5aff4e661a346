"""The one SQLite file: who may open it, who writes, who reads.

One thread writes. Everybody else queues a function of the connection and gets a future; all that
is queued when the thread looks goes into one transaction (group commit), so a burst of 600 small
writes costs a handful of commits. A function that raises is rolled back alone. Readers use a
connection of their own per thread and see what has been committed.

Durability: WAL with `synchronous=NORMAL`. A commit survives the death of the process, SIGKILL
included. After a power failure the file is intact, but commits since the last WAL checkpoint may be
missing; `synchronous="FULL"` closes that gap for one fsync a group commit.

Knows no sessions and no requests: only connections, functions and futures.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

from trimtab.errors import Invalid, ServerError, Stopping
from trimtab.service.migrations import MIGRATIONS

T = TypeVar("T")
Write = Callable[[sqlite3.Connection], T]
FILE = "trimtab.sqlite3"
Parameters = Sequence[object] | Mapping[str, object]
GROUP = 512  # writes in one transaction at most, so that the first of them never waits long


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    write: Write[T]
    future: Future[T]


@dataclass(frozen=True, slots=True)
class _Reader:
    """A thread's connection for reading. `used` is held by that thread alone, until the end."""

    db: sqlite3.Connection
    used: threading.Lock = field(default_factory=threading.Lock)


class Store:
    """`Store(data_dir)` takes the directory for this process, opens the file and brings its schema
    up to date.

        store = Store(Path("trimtab-data"))
        await store.write(lambda db: db.execute("INSERT INTO results VALUES ('r', x'00')"))
        store.read("SELECT body FROM results WHERE request_id = ?", ("r",))
        store.close()
    """

    def __init__(
        self, data_dir: Path, *, synchronous: Literal["NORMAL", "FULL"] = "NORMAL"
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        with _told(self.data_dir):
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.data_dir)
        self._file = self.data_dir / FILE
        self._synchronous = synchronous
        self._readers = threading.local()
        self._open_readers: list[_Reader] = []
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._closing = threading.Lock()
        try:
            with _told(self.data_dir):
                self._db = self._connect()
                migrate(self._db)
        except BaseException:
            os.close(self._lock)
            raise
        self._thread = threading.Thread(target=self._run, name="trimtab-store", daemon=True)
        self._thread.start()

    # ---- writing

    def submit(self, write: Write[T]) -> Future[T]:
        """Queue a write from any thread; the future resolves after its commit."""
        future: Future[T] = Future()
        with self._closing:
            self._open()
            self._jobs.put(_Job(write, future))
        return future

    async def write(self, write: Write[T]) -> T:
        """Queue a write and wait for its commit. The write happens even if the waiter is gone."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(write)))

    def sync(self) -> None:
        """Put what has been committed on disk, where a loss of power cannot take it back: before a
        file goes that an older state of the journal names. From any thread."""
        with contextlib.suppress(FileNotFoundError), open(f"{self._file}-wal", "rb") as log:
            os.fsync(log.fileno())

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            group, last = self._gather(job)
            self._commit(group)
            if last:
                return

    def _gather(self, first: _Job[Any]) -> tuple[list[_Job[Any]], bool]:
        group = [first]
        while len(group) < GROUP:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return group, True
            group.append(job)
        return group, False

    def _commit(self, group: list[_Job[Any]]) -> None:
        """One transaction; each write in a savepoint of its own."""
        answers: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for job in group:
                if job.future.set_running_or_notify_cancel():
                    answers.append((job.future, *self._attempt(job.write)))
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            failure = ServerError(f"the store could not commit: {error}")
            failure.__cause__ = error
            answers = [(job.future, None, failure) for job in group if not job.future.cancelled()]
        for future, value, problem in answers:
            if problem is None:
                future.set_result(value)
            else:
                future.set_exception(problem)

    def _attempt(self, write: Write[Any]) -> tuple[Any, BaseException | None]:
        self._db.execute("SAVEPOINT one")
        try:
            value = write(self._db)
        except Exception as problem:  # handed to the caller through its future, whatever it is
            if not self._db.in_transaction:  # SQLite gave up the whole transaction (disk full)
                raise sqlite3.OperationalError(str(problem)) from problem
            self._db.execute("ROLLBACK TO one")
            self._db.execute("RELEASE one")
            return None, problem
        self._db.execute("RELEASE one")
        return value, None

    # ---- reading

    def read(self, sql: str, parameters: Parameters = ()) -> list[sqlite3.Row]:
        """All rows, on this thread's own connection."""
        with self._reading() as db:
            return db.execute(sql, parameters).fetchall()

    def row(self, sql: str, parameters: Parameters = ()) -> sqlite3.Row | None:
        with self._reading() as db:
            return cast("sqlite3.Row | None", db.execute(sql, parameters).fetchone())

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """This thread's connection, which `close` leaves alone while it is in use."""
        reader: _Reader | None = getattr(self._readers, "mine", None)
        if reader is None:
            with self._closing:
                self._open()
                reader = self._readers.mine = _Reader(self._connect(read_only=True))
                self._open_readers.append(reader)
        with reader.used:
            self._open()
            yield reader.db

    def _open(self) -> None:
        if self._closed:
            raise Stopping("the store is closed: the server is shutting down")

    # ---- opening and closing

    def _connect(self, *, read_only: bool = False) -> sqlite3.Connection:
        db = sqlite3.connect(self._file, isolation_level=None, check_same_thread=False)
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA busy_timeout = 10000")
        if read_only:
            db.execute("PRAGMA query_only = ON")
        else:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA synchronous = {self._synchronous}")
        return db

    def close(self) -> None:
        """Commit what is queued, end the thread, give the directory back. Twice is fine."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
        for reader in self._open_readers:
            with reader.used:
                reader.db.close()
        self._db.close()
        os.close(self._lock)


def migrate(db: sqlite3.Connection) -> None:
    """Apply the steps the file has not seen; `PRAGMA user_version` remembers the last one."""
    (at,) = db.execute("PRAGMA user_version").fetchone()
    newest = MIGRATIONS[-1][0]
    if at > newest:
        raise Invalid(
            f"the data directory was written by a newer trimtab (schema {at}, this one knows "
            f"{newest}): start that version, or choose another data directory"
        )
    for number, sql in MIGRATIONS:
        if number > at:
            db.executescript(f"BEGIN IMMEDIATE; {sql}; PRAGMA user_version = {number}; COMMIT;")


@contextlib.contextmanager
def _told(data_dir: Path) -> Iterator[None]:
    """A directory that cannot be used is a sentence for whoever chose it."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise Invalid(f"data_dir: {data_dir} cannot be written ({why})") from error
    except sqlite3.Error as error:
        file = data_dir / FILE
        raise Invalid(f"data_dir: the journal {file} cannot be used ({error})") from error


def _lock(data_dir: Path) -> int:
    """Take the directory: an flock that ends with the process, however it ends."""
    handle = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(handle, 64).decode(errors="replace").strip()
        os.close(handle)
        raise Invalid(
            f"data directory {data_dir} is in use by another trimtab server"
            + (f" (process {holder})" if holder else "")
            + ": stop it, or choose another data directory"
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    return handle
