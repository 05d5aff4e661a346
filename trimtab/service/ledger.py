"""What was done, counted by the hour, and what became of checkpoints, line by line: the writes.

Counts are written with the result they belong to, in one transaction, so they are exact: what was
computed twice, in a replay after a crash, counts once. Knows nothing of who reads them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable

SqlWrite = Callable[[sqlite3.Connection], object]
HOUR = 3600
AUDIT_SECONDS = 400 * 24 * 3600.0  # how long a line is kept

TRAINING, PREFILL, CACHED, SAMPLED, CHECKPOINTS = (
    "training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "checkpoint",
)  # fmt: skip


def counted(
    owner: str, session_id: str, base_model: str, amounts: dict[str, int], now: float
) -> SqlWrite:
    """The write that adds `amounts`, by kind, to the hour of `now`."""
    hour = int(now // HOUR) * HOUR
    rows = [(hour, owner, session_id, base_model, k, n) for k, n in amounts.items() if n]

    def write(db: sqlite3.Connection) -> None:
        db.executemany(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
            rows,
        )

    return write


def audited(owner: str, event: str, path: str, now: float, **details: str) -> SqlWrite:
    """The write of one line about a checkpoint of `owner`'s."""

    def write(db: sqlite3.Connection) -> None:
        db.execute(
            "INSERT INTO audit VALUES (?, ?, ?, ?, ?)",
            (now, owner, event, path, json.dumps(details)),
        )
        db.execute("DELETE FROM audit WHERE owner = ? AND at < ?", (owner, now - AUDIT_SECONDS))

    return write
