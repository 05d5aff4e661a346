"""What can befall a server but death: run in a child of nursery.py, before its main function."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

DAY = 86400.0


def full_disk() -> None:
    """While a file `full` stands beside the data directory, the journal has no room left: SQLite's
    own error, from a file that may not grow and has no free page."""
    from trimtab.service.store import Store

    commit = Store._commit

    def fill(db) -> None:
        (used,) = db.execute("PRAGMA page_count").fetchone()
        db.execute("CREATE TABLE IF NOT EXISTS ballast (x)")
        db.execute(f"PRAGMA max_page_count = {used + 8}")
        for size in (3000, 300, 30):
            with contextlib.suppress(sqlite3.OperationalError):
                while True:
                    db.execute("INSERT INTO ballast VALUES (zeroblob(?))", (size,))

    def _commit(self, group) -> None:
        full = (Path(self.data_dir).parent / "full").exists()
        held = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'ballast'").fetchone()
        if full and held is None:
            fill(self._db)
        if held is not None and not full:
            self._db.execute(f"PRAGMA max_page_count = {2**30}")
            self._db.execute("DROP TABLE ballast")
        commit(self, group)

    Store._commit = _commit


def jumping_clock() -> None:
    """The system clock is set two days on, two days back, and right again, all the time."""
    real = time.time
    began = real()

    def jumping() -> float:
        return real() + (0.0, 2 * DAY, -2 * DAY)[int((real() - began) / 0.3) % 3]

    time.time = jumping


def short_sessions() -> None:
    """Sessions expire after two seconds of silence; the SDK's heartbeats come every ten."""
    from trimtab.service.sessions import Sessions

    Sessions.overdue = lambda self, session: self._awake() - session.heard_at > 2.0
