"""The sequence registry: what was sampled, kept for a day after sampling and after each use.

A sequence has a row only once its request is done, written with the result in one transaction.
Before that (or after its day) the registry says which of these holds, and only to the session that
sampled it; to any other session an id is unknown.

Bytes a token: 4 for the token itself, and with a stability part 4 for log q and 8 a head entry
(68 at K = 8). Knows no spans and no losses: `provenance.py` judges claims.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from trimtab.service import ids
from trimtab.service.futures import CANCELLED
from trimtab.service.store import Store
from trimtab.types import Sample, SampledSequence

Absence = Literal["unknown", "foreign", "pending", "cancelled", "failed", "expired"]
Run = tuple[str, int, int, str]  # weights version, tokens drawn from it, its step, its model
SqlWrite = Callable[[sqlite3.Connection], object]


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one sequence of T tokens. `logprobs` and the head are None without a
    stability part; `temperature` is never 0 (0 is scored, and recorded, as 1)."""

    sequence_id: str
    prompt: np.ndarray
    tokens: np.ndarray
    temperature: float = 1.0
    versions: tuple[Run, ...] = ()
    logprobs: np.ndarray | None = None
    head_ids_TK: np.ndarray | None = None
    head_logprobs_TK: np.ndarray | None = None

    @property
    def size(self) -> int:
        parts = (self.prompt, self.tokens, self.logprobs, self.head_ids_TK, self.head_logprobs_TK)
        return sum(part.nbytes for part in parts if part is not None) + 500


@dataclass(frozen=True, slots=True)
class Held:
    """What the registry holds. `tokens` counts sampled tokens, `recorded` those with a head;
    `array_bytes` is their ids, log-probabilities and heads (68 bytes of a recorded token with 8
    alternatives are its stability part, 4 its id)."""

    sequences: int
    tokens: int
    recorded: int
    array_bytes: int


def recorded(
    request_id: str,
    session_id: str,
    request: Sample,
    sequences: Sequence[SampledSequence],
    runs: Sequence[tuple[Run, ...]],
    *,
    now: float,
    expires_at: float,
) -> SqlWrite:
    """The write that records a finished request: its prompt once, each sequence by its id."""
    names = ids.sequence_ids(request_id, len(sequences))
    tau = float(request.params.temperature) or 1.0
    rows, arrays = [], []
    for i, (name, sequence) in enumerate(zip(names, sequences, strict=True)):
        head = sequence.head
        k = None if head is None else int(head.ids.shape[1])
        length = len(sequence.tokens)
        stated = (request_id, session_id, i, length, tau, json.dumps(runs[i]), k, now, expires_at)
        rows.append((name, *stated))
        arrays.append((name, *_blobs(sequence)))
    blob = _bytes(request.prompt, np.int32)

    def write(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO prompts VALUES (?, ?)", (request_id, blob))
        db.executemany("INSERT INTO sequences VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        db.executemany("INSERT INTO arrays VALUES (?, ?, ?, ?, ?)", arrays)

    return write


def touched(session_id: str, names: Collection[str], *, now: float, expires_at: float) -> SqlWrite:
    """The write that restarts the day of those `names` that this session holds and are alive."""
    named = json.dumps(list(names))

    def write(db: sqlite3.Connection) -> None:
        db.execute(
            "UPDATE sequences SET expires_at = MAX(expires_at, ?) WHERE session_id = ?"
            " AND expires_at >= ? AND sequence_id IN (SELECT value FROM json_each(?))",
            (expires_at, session_id, now, named),
        )

    return write


def pinned(request_id: str, names: Collection[str]) -> SqlWrite:
    """The write that keeps sequences for a request that may have to be run (again)."""
    rows = [(name, request_id) for name in names]
    return lambda db: db.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", rows)


NAMED = """
SELECT q.*, sampled.owner = asking.owner AS owned FROM sequences q
LEFT JOIN sessions sampled ON sampled.session_id = q.session_id
LEFT JOIN sessions asking ON asking.session_id = ?
WHERE q.sequence_id IN (SELECT value FROM json_each(?))
"""  # `owned`: the session that sampled it is of the same owner as the one that asks


class Sequences:
    """Reads of the registry, with the most recently read arrays kept decoded. Thread-safe."""

    def __init__(self, store: Store, cache_bytes: int) -> None:
        self._store = store
        self._room = cache_bytes
        self._used = 0
        self._cache: OrderedDict[str, Record] = OrderedDict()
        self._lock = threading.Lock()

    def find(
        self, session_id: str, names: Collection[str], now: float
    ) -> tuple[dict[str, Record], dict[str, Absence]]:
        """Every name either with its record or with why there is none. Example:
        `({"S:sample:0:0:0": Record(...)}, {"S:sample:0:1:0": "pending"})`."""
        rows = self._store.read(NAMED, (session_id, json.dumps(list(names))))
        absent: dict[str, Absence] = {}
        alive: dict[str, sqlite3.Row] = {}
        for row in rows:
            if row["session_id"] != session_id:
                absent[row["sequence_id"]] = "foreign" if row["owned"] else "unknown"
            elif row["expires_at"] < now:
                absent[row["sequence_id"]] = "expired"
            else:
                alive[row["sequence_id"]] = row
        missing = [name for name in names if name not in alive and name not in absent]
        absent.update(self._why(session_id, missing))
        records = self._records(alive)
        for name in alive.keys() - records.keys():  # swept between the two reads
            absent[name] = "expired"
        return records, absent

    def pinned(
        self, request_id: str, names: Collection[str]
    ) -> tuple[dict[str, Record], dict[str, Absence]]:
        """What `find` answered when the request was accepted, whatever has expired since: its pins
        kept what was alive then."""
        rows = self._store.read(
            "SELECT s.* FROM sequences s JOIN pins p USING (sequence_id) WHERE p.request_id = ?",
            (request_id,),
        )
        records = self._records({row["sequence_id"]: row for row in rows})
        return records, {name: "expired" for name in names if name not in records}

    def _records(self, rows: Mapping[str, sqlite3.Row]) -> dict[str, Record]:
        with self._lock:
            found = {name: self._cache[name] for name in rows if name in self._cache}
            for name in found:
                self._cache.move_to_end(name)
        fresh = self._read({name: row for name, row in rows.items() if name not in found})
        with self._lock:
            for name, record in fresh.items():
                self._keep(name, record)
        return found | fresh

    def _keep(self, name: str, record: Record) -> None:
        if name not in self._cache:
            self._used += record.size
        self._cache[name] = record
        while self._used > self._room and self._cache:
            self._used -= self._cache.popitem(last=False)[1].size

    def _read(self, rows: Mapping[str, sqlite3.Row]) -> dict[str, Record]:
        if not rows:
            return {}
        prompts = {
            row["request_id"]: _array(row["tokens"], np.int32)
            for row in self._store.read(
                "SELECT * FROM prompts WHERE request_id IN (SELECT value FROM json_each(?))",
                (json.dumps(sorted({row["request_id"] for row in rows.values()})),),
            )
        }
        arrays = self._store.read(
            "SELECT * FROM arrays WHERE sequence_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(rows)),),
        )
        found = {}
        for row in arrays:
            stated = rows[row["sequence_id"]]
            prompt = prompts.get(stated["request_id"])
            if prompt is not None:
                found[row["sequence_id"]] = _record(stated, row, prompt)
        return found

    def _why(self, session_id: str, names: Sequence[str]) -> dict[str, Absence]:
        """Why these have no row, from the requests their ids name."""
        if not names:
            return {}
        requests = {
            row["request_id"]: row
            for row in self._store.read(
                "SELECT request_id, samples, state, error FROM requests WHERE session_id = ?"
                " AND kind = 'sample' AND rejected = 0"
                " AND request_id IN (SELECT value FROM json_each(?))",
                (session_id, json.dumps(sorted({ids.request_of(name)[0] for name in names}))),
            )
        }
        return {name: _absence(requests, name) for name in names}

    def held(self) -> Held:
        """What is held, for a person to look at; reads every row of the small table."""
        row = self._store.row(HELD)
        assert row is not None
        return Held(row["n"], row["tokens"], row["recorded"], row["bytes"])


HELD = (
    "SELECT COUNT(*) AS n, COALESCE(SUM(length), 0) AS tokens,"
    " COALESCE(SUM(length * (head_k IS NOT NULL)), 0) AS recorded,"
    " COALESCE(SUM(length * COALESCE(8 + 8 * head_k, 4)), 0) AS bytes FROM sequences"
)


def held_in(database: Path) -> Held:
    """What a journal holds, read from the file while a server may be writing to it."""
    db = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        return Held(*db.execute(HELD).fetchone())
    finally:
        db.close()


def sweep(db: sqlite3.Connection, before: float, batch: int) -> int:
    """Drop up to `batch` sequences whose day ended before then and that no pin keeps, and prompts
    nothing names any more. How many went."""
    rows = db.execute(
        "SELECT sequence_id, request_id FROM sequences s WHERE expires_at < ?"
        " AND NOT EXISTS (SELECT 1 FROM pins p WHERE p.sequence_id = s.sequence_id)"
        " ORDER BY expires_at LIMIT ?",
        (before, batch),
    ).fetchall()
    if not rows:
        return 0
    names = json.dumps([row["sequence_id"] for row in rows])
    requests = json.dumps(sorted({row["request_id"] for row in rows}))
    for table in ("arrays", "sequences"):
        db.execute(
            f"DELETE FROM {table} WHERE sequence_id IN (SELECT value FROM json_each(?))", (names,)
        )
    db.execute(
        "DELETE FROM prompts WHERE request_id IN (SELECT value FROM json_each(?))"
        " AND NOT EXISTS (SELECT 1 FROM sequences s WHERE s.request_id = prompts.request_id)",
        (requests,),
    )
    return len(rows)


def _absence(requests: Mapping[str, sqlite3.Row], name: str) -> Absence:
    request_id, index = ids.request_of(name)
    row = requests.get(request_id)
    if row is None or index >= row["samples"] or name != f"{request_id}:{index}":
        return "unknown"
    if row["state"] == "pending":
        return "pending"
    if row["state"] == "failed":
        return "cancelled" if row["error"] == CANCELLED else "failed"
    return "expired"


def _record(row: sqlite3.Row, arrays: sqlite3.Row, prompt: np.ndarray) -> Record:
    k = row["head_k"]
    recorded = k is not None
    return Record(
        sequence_id=row["sequence_id"],
        prompt=prompt,
        tokens=_array(arrays["tokens"], np.int32),
        temperature=row["temperature"],
        versions=tuple((v, n, step, model) for v, n, step, model in json.loads(row["versions"])),
        logprobs=_array(arrays["logprobs"], np.float32) if recorded else None,
        head_ids_TK=_array(arrays["head_ids"], np.int32).reshape(-1, k) if recorded else None,
        head_logprobs_TK=(
            _array(arrays["head_logprobs"], np.float32).reshape(-1, k) if recorded else None
        ),
    )


def _blobs(sequence: SampledSequence) -> tuple[bytes, bytes | None, bytes | None, bytes | None]:
    tokens = _bytes(sequence.tokens, np.int32)
    if sequence.head is None:
        return tokens, None, None, None
    return (
        tokens,
        _bytes(sequence.logprobs, np.float32),
        _bytes(sequence.head.ids, np.int32),
        _bytes(sequence.head.logprobs, np.float32),
    )


def _bytes(array: np.ndarray, dtype: type[np.generic]) -> bytes:
    return np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()


def _array(blob: bytes, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(blob, dtype=np.dtype(dtype).newbyteorder("<"))
