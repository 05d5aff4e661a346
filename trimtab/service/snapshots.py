"""Snapshots: what a model in training was after one of its requests, so that a new process starts
there and runs again only what came later.

    look     after a job, on the learner's thread: copy the model when a snapshot is due
    write    in the background: folder (temporary, synced, renamed), then the row
    row      with it the bodies and pins of what it covers go; the folder before it goes last
    linked   a load is its own snapshot: the checkpoint's files under another name, row and result
             in one commit, so that nothing depends on the checkpoint afterwards

A snapshot is due when its cost, measured each time, is at most `snapshot_share` of the work since
the last one (both in seconds of a core); between two steps where that can be had (no gradient to
write), within a window when it goes on for long. Knows no order and no requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab.engine.base import Learner
from trimtab.errors import TrimtabError
from trimtab.service import paths
from trimtab.service.futures import SqlWrite
from trimtab.service.models import Model
from trimtab.service.settings import ServiceSettings
from trimtab.service.store import Store

log = logging.getLogger(__name__)
Form = Literal["snapshot", "state", "weights"]
Row = Callable[[sqlite3.Connection], str | None]
AT_ONCE = 2  # copies waiting to be written; a model whose turn it is otherwise waits
LONG = 4  # times the usual work, after which a snapshot is taken in mid-window


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row. It holds the model after `seq_id`; `failed` are the ids that spoiled its window. How
    it is read is its `form`: a snapshot, or a checkpoint loaded with ("state") or without
    ("weights") its optimizer."""

    model_id: str
    seq_id: int
    folder: str
    form: Form
    contents: str
    failed: tuple[int, ...] = ()


@dataclass(slots=True)
class _Tally:
    """Work since a model's last snapshot, and what that one cost, in seconds."""

    seconds: float = 0.0
    bytes: int = 0
    cost: float = 0.0
    writing: bool = False


class Snapshots:
    def __init__(self, store: Store, settings: ServiceSettings, clock: Callable[[], float]) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self.home: Path = store.data_dir / "snapshots"
        self._tallies: dict[str, _Tally] = {}
        self._lock = threading.Lock()  # guards the tallies: learners' threads and the loop
        self._writer = ThreadPoolExecutor(1, "trimtab-snapshots")
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, model_id: str) -> Snapshot | None:
        row = self._store.row("SELECT * FROM snapshots WHERE model_id = ?", (model_id,))
        if row is None:
            return None
        failed = tuple(json.loads(row["failed"]))
        return Snapshot(
            model_id, row["seq_id"], row["folder"], row["form"], row["contents"], failed
        )

    def sweep_orphans(self) -> None:
        """Remove what a crash left between a rename and its row, or a row and a removal."""
        named = {row["folder"] for row in self._store.read("SELECT folder FROM snapshots")}
        paths.sweep_orphans(self.home, named)

    # ---- taking one

    def look(  # noqa: PLR0917 (on the learner's thread: all that is known of the job that ran)
        self, model: Model, seq_id: int, learner: Learner, seconds: float, size: int, between: bool
    ) -> Callable[[], None] | None:
        """Count a job that ran. Where a snapshot is due, copy the model now and return what writes
        the copy: to be called on the loop once the job's result is committed."""
        model_id = model.record.model_id
        with self._lock:
            tally = self._tallies.setdefault(model_id, _Tally())
            tally.seconds += seconds
            tally.bytes += size
            busy = sum(other.writing for other in self._tallies.values()) >= AT_ONCE
            if tally.writing or busy or not self._due(tally, between):
                return None
            work, tally.seconds, tally.bytes, tally.writing = (tally.seconds, 0.0, 0, True)
        began = time.perf_counter()
        write = learner.snapshot(model_id)
        failed = tuple(sorted(set(model.window.failed)))
        taken = Snapshot(model_id, seq_id, "", "snapshot", model.contents, failed)
        copied = time.perf_counter() - began
        return lambda: self._spawn(taken, write, tally, copied, work)

    def _due(self, tally: _Tally, between: bool) -> bool:
        settings = self._settings
        enough = max(settings.snapshot_seconds, tally.cost / settings.snapshot_share)
        if between:
            return tally.seconds >= enough or 2 * tally.bytes >= settings.max_body_bytes
        return tally.seconds >= LONG * enough or tally.bytes >= settings.max_body_bytes

    def _spawn(
        self,
        taken: Snapshot,
        write: Callable[[Path], int],
        tally: _Tally,
        copied: float,
        work: float,
    ) -> None:
        task = asyncio.create_task(self._keep(taken, write, tally, copied, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(
        self,
        taken: Snapshot,
        write: Callable[[Path], int],
        tally: _Tally,
        copied: float,
        work: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        cost = max(2 * tally.cost, 1.0)  # of a try that fails: the next one waits
        try:
            folder, size, worked = await loop.run_in_executor(self._writer, self._write, write)
            cost = copied + worked
            old = await self._store.write(self.row(taken, folder))
            await loop.run_in_executor(self._writer, self.replaced, folder, old)
            log.debug(
                "snapshot of %s after %d: %d bytes, %.3f s, after %.1f s of work",
                taken.model_id, taken.seq_id, size, cost, work,
            )  # fmt: skip
        except (TrimtabError, sqlite3.Error, OSError) as error:
            log.warning("no snapshot of %s was kept: %s", taken.model_id, error)
            with self._lock:
                tally.seconds += work
        finally:
            with self._lock:
                tally.cost, tally.writing = cost, False

    def _write(self, write: Callable[[Path], int]) -> tuple[str, int, float]:
        """A snapshot's folder and size, and the processor's time that writing it took: waiting for
        the disk keeps nobody from working."""
        began = time.thread_time()
        folder, size = paths.write_folder(self.home, write)
        return folder, size, time.thread_time() - began

    # ---- rows

    def linked(
        self, model: Model, seq_id: int, source: Path, *, optimizer: bool
    ) -> tuple[str, Row]:
        """The files of a checkpoint as the snapshot of the model that loads it. Returns the new
        folder and the write of its row, which answers like `row`'s."""
        folder, _ = paths.write_folder(self.home, lambda temporary: _link(source, temporary))
        form: Form = "state" if optimizer else "weights"
        contents = f"{model.record.model_id}:{seq_id}"
        taken = Snapshot(model.record.model_id, seq_id, "", form, contents)
        return folder, self.row(taken, folder)

    def row(self, taken: Snapshot, folder: str) -> Row:
        """The write that puts a snapshot in force and lets go of what it covers. Answers the folder
        it took the place of ("" for none), or None where it is not wanted any more: the model is
        gone or has a later one, or the result it was taken after could not be journalled."""
        now = self._clock()

        def write(db: sqlite3.Connection) -> str | None:
            alive = db.execute(
                "SELECT 1 FROM models WHERE model_id = ? AND state IN ('creating', 'ready')",
                (taken.model_id,),
            ).fetchone()
            old = db.execute(
                "SELECT seq_id, folder FROM snapshots WHERE model_id = ?", (taken.model_id,)
            ).fetchone()
            if alive is None or (old is not None and old["seq_id"] >= taken.seq_id):
                return None
            if taken.form == "snapshot" and not _told(db, taken):
                return None
            db.execute(
                "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    taken.model_id,
                    taken.seq_id,
                    folder,
                    taken.form,
                    taken.contents,
                    json.dumps(taken.failed),
                    now,
                ),
            )
            release(db, taken.model_id, taken.seq_id)
            return "" if old is None else str(old["folder"])

        return write

    def replaced(self, folder: str, old: str | None) -> None:
        """Remove the folder that is not in force, once the row that says so is on disk."""
        if old is None:
            paths.remove_folder(self.home, folder)
        elif old:
            self._store.sync()
            paths.remove_folder(self.home, old)

    # ---- the end

    def forget(self, model_id: str) -> None:
        """Remove the folder of a model that is gone, after `forgotten` was committed."""
        with self._lock:
            self._tallies.pop(model_id, None)

    def remove(self, folder: str) -> None:
        paths.remove_folder(self.home, folder)

    async def stop(self, seconds: float) -> None:
        """Give what is being written `seconds` to end; the rest is left to the next start."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        self._writer.shutdown(wait=False, cancel_futures=True)


def _told(db: sqlite3.Connection, taken: Snapshot) -> bool:
    """Whether the request a snapshot was taken after is done, as the journal has it."""
    row = db.execute(
        "SELECT state FROM requests WHERE request_id = ?", (f"{taken.model_id}:{taken.seq_id}",)
    ).fetchone()
    return row is not None and row["state"] == "done"


def release(db: sqlite3.Connection, model_id: str, seq_id: int) -> None:
    """Let go of the bodies and pins of a model's requests up to `seq_id`."""
    covered = "SELECT request_id FROM bodies WHERE key = ? AND seq_id BETWEEN 0 AND ?"
    db.execute(f"DELETE FROM pins WHERE request_id IN ({covered})", (model_id, seq_id))
    db.execute("DELETE FROM bodies WHERE key = ? AND seq_id BETWEEN 0 AND ?", (model_id, seq_id))


def forgotten(model_id: str) -> SqlWrite:
    """Drop all that a replay of this model would read: it is gone for good."""

    def write(db: sqlite3.Connection) -> None:
        named = "SELECT request_id FROM bodies WHERE key = ?"
        db.execute(f"DELETE FROM pins WHERE request_id IN ({named})", (model_id,))
        db.execute("DELETE FROM bodies WHERE key = ?", (model_id,))
        db.execute("DELETE FROM snapshots WHERE model_id = ?", (model_id,))
        db.execute("DELETE FROM gaps WHERE model_id = ?", (model_id,))

    return write


def _link(source: Path, folder: Path) -> int:
    """The same files under another name; copies where the file system has no hard links."""
    folder.mkdir(parents=True)
    size = 0
    for file in source.iterdir():
        try:
            os.link(file, folder / file.name)
        except OSError:
            shutil.copyfile(file, folder / file.name)
        size += file.stat().st_size
    return size


RESTORE: Mapping[Form, Callable[[Learner, str, Path], None]] = {
    "snapshot": lambda learner, model_id, folder: learner.restore(model_id, folder),
    "state": lambda learner, model_id, folder: learner.load_state(model_id, folder, optimizer=True),
    "weights": lambda learner, model_id, folder: learner.load_state(
        model_id, folder, optimizer=False
    ),
}
