"""API keys: created, found, listed and revoked, in an SQLite file beside the journal.

Only a key's SHA-256 is kept: keys are 256 random bits, which no dictionary holds. The file is not
the journal's, so that `trimtab keys` works beside a running server; the server looks a key up for
each request, and a revocation counts from its commit on. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import Invalid, NotFound

FILE = "keys.sqlite3"
PREFIX = "tml-"
USE_SECONDS = 60.0  # how far behind `last_used_at` may be; a write a request would be too many
OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    key_id       INTEGER PRIMARY KEY AUTOINCREMENT,
    digest       BLOB NOT NULL UNIQUE,
    owner        TEXT NOT NULL,
    name         TEXT NOT NULL,
    created_at   REAL NOT NULL,
    last_used_at REAL,
    revoked_at   REAL
);
CREATE TABLE IF NOT EXISTS secrets (
    name         TEXT PRIMARY KEY,
    value        BLOB NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a key; times in seconds since 1970. `last_used_at` is up to a minute old."""

    key_id: int
    owner: str
    name: str
    created_at: float
    last_used_at: float | None = None
    revoked_at: float | None = None


class Keys:
    """The keys of one data directory. Thread-safe, and safe beside other processes.

    keys = Keys(Path("trimtab-data"))
    key, secret = keys.create("alice", "laptop")     # the only time the secret is known
    keys.find(secret).owner == "alice"
    """

    def __init__(self, data_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._noted: dict[int, float] = {}
        file = Path(data_dir).absolute() / FILE
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA busy_timeout = 5000")
            self._db.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise Invalid(f"data directory {data_dir}: {FILE} cannot be opened ({error})") from None

    # ---- what `trimtab keys` does

    def create(self, owner: str, name: str = "") -> tuple[Key, str]:
        """A new key and its secret, which is not kept. Keys of one owner see the same things."""
        if not OWNER.fullmatch(owner):
            raise Invalid(
                f"owner: {owner!r} is no owner's name; allowed are 1 to 64 letters, digits, '.',"
                " '_', '@' and '-', a letter or digit first"
            )
        if len(name) > 100 or not name.isprintable():
            raise Invalid("name: up to 100 printable characters are allowed")
        secret = PREFIX + secrets.token_urlsafe(32)
        key_id = self._write(
            "INSERT INTO keys (digest, owner, name, created_at) VALUES (?, ?, ?, ?)",
            (_digest(secret), owner, name, self._clock()),
        )
        key = self.get(key_id)
        assert key is not None
        return key, secret

    def all(self) -> list[Key]:
        """Every key there ever was, oldest first."""
        return [_key(row) for row in self._rows("SELECT * FROM keys ORDER BY key_id")]

    def revoke(self, key_id: int) -> Key:
        """Refuse a key from now on. Twice is fine; NotFound for a number no key has."""
        self._write(
            "UPDATE keys SET revoked_at = COALESCE(revoked_at, ?) WHERE key_id = ?",
            (self._clock(), key_id),
        )
        key = self.get(key_id)
        if key is None:
            raise NotFound(f"key {key_id} is unknown; `trimtab keys list` shows those there are")
        return key

    # ---- what a server asks

    def find(self, secret: str) -> Key | None:
        """The live key that `secret` is; notes its use."""
        rows = self._rows("SELECT * FROM keys WHERE digest = ?", (_digest(secret),))
        return self._live(rows)

    def live(self, key_id: int) -> Key | None:
        """The key of this number, unless it is revoked; notes its use."""
        return self._live(self._rows("SELECT * FROM keys WHERE key_id = ?", (key_id,)))

    def get(self, key_id: int) -> Key | None:
        rows = self._rows("SELECT * FROM keys WHERE key_id = ?", (key_id,))
        return _key(rows[0]) if rows else None

    def ever(self) -> bool:
        """Whether a key was ever created: from then on keys are asked for, revoked or not."""
        return bool(self._rows("SELECT 1 FROM keys LIMIT 1"))

    def some_live(self) -> bool:
        return bool(self._rows("SELECT 1 FROM keys WHERE revoked_at IS NULL LIMIT 1"))

    def signing_secret(self) -> bytes:
        """32 random bytes, drawn once a data directory, so that tokens outlive a restart."""
        self._write(
            "INSERT OR IGNORE INTO secrets VALUES ('signing', ?)", (secrets.token_bytes(32),)
        )
        (row,) = self._rows("SELECT value FROM secrets WHERE name = 'signing'")
        return bytes(row["value"])

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # ---- inside

    def _live(self, rows: list[sqlite3.Row]) -> Key | None:
        key = _key(rows[0]) if rows else None
        if key is None or key.revoked_at is not None:
            return None
        now = self._clock()
        if now - self._noted.get(key.key_id, 0.0) >= USE_SECONDS:
            self._noted[key.key_id] = now
            # A lock held by `trimtab keys`, or a full disk, must not cost a request.
            with contextlib.suppress(sqlite3.OperationalError):
                self._write("UPDATE keys SET last_used_at = ? WHERE key_id = ?", (now, key.key_id))
        return key

    def _rows(self, sql: str, parameters: tuple[object, ...] = ()) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(sql, parameters).fetchall()

    def _write(self, sql: str, parameters: tuple[object, ...]) -> int:
        with self._lock:
            return self._db.execute(sql, parameters).lastrowid or 0


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _key(row: sqlite3.Row) -> Key:
    return Key(
        key_id=row["key_id"],
        owner=row["owner"],
        name=row["name"],
        created_at=row["created_at"],
        last_used_at=row["last_used_at"],
        revoked_at=row["revoked_at"],
    )
