"""What an owner does to checkpoints and sessions that exist: delete, publish, expire, copy, move.

A published checkpoint may be read by every owner (loaded, sampled from, copied, downloaded) and
changed by its own alone. Deleting takes the row first, then the files: what reads them meanwhile
reads on. Knows no learner: nothing here waits for a model's turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trimtab.errors import Invalid, Lost, NotFound
from trimtab.service import external, ids, paths
from trimtab.service.checkpoints import Checkpoint, Weights, lora_columns
from trimtab.service.futures import SqlWrite
from trimtab.service.ledger import audited
from trimtab.service.parts import Parts


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy into a project's new session, or into one of `session_id`'s places for a model."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    ttl_seconds: int | None = None


class Keeping:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    # ---- one checkpoint

    def owned(self, owner: str, path: str) -> Checkpoint:
        """A live checkpoint of this owner; a published one of another owner's is unknown here."""
        paths.parse_path(path, self._parts.settings.max_name)
        found = self._parts.checkpoints.find(path)
        if found is None or found.owner != owner:
            raise NotFound(f"checkpoint {path!r} is unknown")
        return found

    async def delete(self, owner: str, path: str) -> None:
        found = self.owned(owner, path)
        await self._write(owner, "checkpoint_delete", path, partial(_delete, found))
        parts, loop = self._parts, asyncio.get_running_loop()
        base = found.record.base_model
        if found.version is not None and base in parts.engines:
            await loop.run_in_executor(parts.pool, parts.publisher.retire, base, found.version)
        await loop.run_in_executor(parts.pool, parts.checkpoints.remove, found.folder)

    async def publish(self, owner: str, path: str, public: bool) -> None:
        """Open a checkpoint to every owner, or close it again. Twice is fine."""
        self.owned(owner, path)
        event = "checkpoint_publish" if public else "checkpoint_unpublish"
        await self._write(
            owner, event, path,
            lambda db: db.execute(
                "UPDATE checkpoints SET public = ? WHERE path = ?", (public, path)
            ),
        )  # fmt: skip

    async def set_ttl(self, owner: str, path: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire so many seconds from now, or (None) never."""
        self.owned(owner, path)
        self._parts.checkpoints.check_ttl(ttl_seconds)
        expires_at = self._parts.checkpoints.expiry(ttl_seconds)
        write = partial(_expire, path, ttl_seconds, expires_at)
        await self._write(owner, "checkpoint_set_ttl", path, write, ttl_seconds=str(ttl_seconds))

    async def files(self, owner: str, path: str) -> tuple[str, ...]:
        """The files of external weights, which their reader is about to download."""
        found = self._parts.checkpoints.get(owner, path, "external_weights")
        names = external.files_of(self._folder(found))
        await self._write(found.owner, "checkpoint_read", path, purpose="download", by=owner)
        return names

    def file(self, path: str, name: str) -> Path:
        """One of those files. NotFound once the checkpoint is gone."""
        found = self._parts.checkpoints.find(path)
        if found is None or name not in external.files_of(self._folder(found)):
            raise NotFound(f"checkpoint {path!r} is unknown")
        return self._folder(found) / name

    def _folder(self, found: Checkpoint) -> Path:
        folder = self._parts.checkpoints.home / found.folder
        if not folder.is_dir():
            raise Lost(f"the files of checkpoint {found.record.path!r} are missing on disk")
        return folder

    async def _write(
        self, owner: str, event: str, path: str, write: SqlWrite | None = None, **details: str
    ) -> None:
        line = audited(owner, event, path, self._parts.clock(), **details)

        def both(db: sqlite3.Connection) -> None:
            if write is not None:
                write(db)
            line(db)

        await self._parts.store.write(both)

    # ---- sessions

    async def assign_project(self, owner: str, session_id: str, project_id: str) -> None:
        if not self._parts.sessions.owned(owner, session_id):
            raise NotFound(f"session {session_id!r} is unknown")
        _check_project(project_id, self._parts.settings.max_id)
        await self._parts.store.write(
            lambda db: db.execute(
                "UPDATE sessions SET project_id = ? WHERE session_id = ?", (project_id, session_id)
            )
        )

    # ---- copies

    async def copy(self, owner: str, copy: Copy, idempotency_key: str | None) -> str:
        """The path of a copy, under a run of its own that cannot be trained. No bytes are
        duplicated: its files are second names of the source's. A resend gets the first path."""
        parts = self._parts
        source = parts.checkpoints.get(owner, copy.source_path)
        parts.checkpoints.check_ttl(copy.ttl_seconds)
        session_id, number = self._place(owner, copy)
        key = idempotency_key or uuid.uuid4().hex
        if (known := self._copied(owner, key)) is not None:
            return known
        model_id = ids.model_id(session_id, number)
        loop = asyncio.get_running_loop()
        folder, _ = await loop.run_in_executor(
            parts.pool, paths.write_folder, parts.checkpoints.home, _linking(self._folder(source))
        )
        made = self._made(owner, source, copy, model_id, folder)
        new = _new_session(owner, session_id, copy.destination_project_id, parts.clock())
        writes = [] if copy.session_id is not None else [new]
        writes += [_new_run(made, session_id, number, parts.clock()), *self._rows(made)]
        writes.append(lambda db: db.execute(
            "INSERT INTO copies VALUES (?, ?, ?)", (owner, key, made.record.path)
        ))  # fmt: skip
        written = False
        try:
            written = await self._insert(source, made, owner, writes)
        finally:
            if not written:
                parts.checkpoints.remove(folder)
        path = made.record.path if written else self._copied(owner, key)
        if path is None:
            raise Invalid(f"model_seq_id: {number} is in use already; choose another")
        return path

    async def _insert(
        self, source: Checkpoint, made: Checkpoint, owner: str, writes: list[SqlWrite]
    ) -> bool:
        """False where a row was there already: a resend, or a place that is taken."""

        def all_of_them(db: sqlite3.Connection) -> None:
            for each in writes:
                each(db)

        details = {"by": owner, "copy": made.record.path}
        try:
            await self._write(
                source.owner, "checkpoint_copy", source.record.path, all_of_them, **details
            )
        except sqlite3.IntegrityError:
            return False
        return True

    def _place(self, owner: str, copy: Copy) -> tuple[str, int]:
        """The session and the number of the run the copy will be."""
        longest = self._parts.settings.max_id
        if copy.session_id is not None:
            if copy.model_seq_id is None or copy.destination_project_id is not None:
                raise Invalid("copy_weights takes session_id with model_seq_id, or a project alone")
            self._parts.sessions.get(owner, copy.session_id)
            return copy.session_id, ids.check_seq("model_seq_id", copy.model_seq_id)
        if copy.destination_project_id is None:
            raise Invalid("destination_project_id: required where no session_id is given")
        _check_project(copy.destination_project_id, longest)
        return str(uuid.uuid4()), 0

    def _copied(self, owner: str, key: str) -> str | None:
        row = self._parts.store.row(
            "SELECT path FROM copies WHERE owner = ? AND idempotency_key = ?", (owner, key)
        )
        return None if row is None else str(row["path"])

    def _made(
        self, owner: str, source: Checkpoint, copy: Copy, model_id: str, folder: str
    ) -> Checkpoint:
        name = source.record.path.rsplit("/", 1)[1]
        record = replace(
            source.record,
            path=paths.path_of(model_id, source.record.kind, name),
            model_id=model_id,
            created_at=self._parts.clock(),
            expires_at=self._parts.checkpoints.expiry(copy.ttl_seconds),
            public=False,
        )
        version = None if source.version is None else ids.request_id(model_id, 0)
        return Checkpoint(record, owner, folder, source.contents, version, copy.ttl_seconds)

    def _rows(self, made: Checkpoint) -> list[SqlWrite]:
        checkpoints, record = self._parts.checkpoints, made.record
        rows = [checkpoints.written(made)]
        if made.version is not None:
            weights = Weights(
                made.version, record.model_id, record.base_model, made.folder, record.step
            )
            rows.append(checkpoints.weights_written(weights))
        return rows


def _delete(found: Checkpoint, db: sqlite3.Connection) -> None:
    db.execute(
        "DELETE FROM checkpoints WHERE path = ? AND folder = ?", (found.record.path, found.folder)
    )
    db.execute("DELETE FROM weights WHERE version = ?", (found.version,))


def _expire(
    path: str, ttl_seconds: int | None, expires_at: float | None, db: sqlite3.Connection
) -> None:
    db.execute(
        "UPDATE checkpoints SET ttl_seconds = ?, expires_at = ? WHERE path = ?",
        (ttl_seconds, expires_at, path),
    )


def _check_project(project_id: str, longest: int) -> None:
    if not ids.well_formed(project_id, longest):
        raise Invalid(f"project_id: 1 to {longest} printable characters without spaces are allowed")


def _linking(source: Path) -> Callable[[Path], int]:
    """Fill a folder with second names of a folder's files; whoever removes one leaves the other."""

    def fill(folder: Path) -> int:
        folder.mkdir()
        for name in external.files_of(source):
            os.link(source / name, folder / name)
        return external.size_of(folder)

    return fill


def _new_session(owner: str, session_id: str, project_id: str | None, now: float) -> SqlWrite:
    """A session that ends as it begins: nothing will be asked of it."""
    return lambda db: db.execute(
        "INSERT INTO sessions (session_id, owner, tags, user_metadata, sdk_version, project_id,"
        " created_at, heartbeat_at, state, reason, ended_at)"
        " VALUES (?, ?, '[]', '{}', '', ?, ?, ?, 'finished', 'success', ?)",
        (session_id, owner, project_id, now, now, now),
    )


def _new_run(made: Checkpoint, session_id: str, number: int, now: float) -> SqlWrite:
    """The run of a copy, and a request in its name: the place of a model can be taken once."""
    record = made.record
    why = f"model {record.model_id!r} is a copied checkpoint: load it into a new model to train on"

    def write(db: sqlite3.Connection) -> None:
        db.execute(
            "INSERT INTO models (model_id, session_id, owner, base_model, rank, seed, train_attn,"
            " train_mlp, train_unembed, optimizer, user_metadata, state, why, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'unloaded', ?, ?)",
            (
                record.model_id, session_id, made.owner, record.base_model,
                *lora_columns(record.lora), record.optimizer,
                json.dumps(dict(record.user_metadata)), why, now,
            ),
        )  # fmt: skip
        db.execute(
            "INSERT INTO requests (request_id, kind, owner, session_id, key, seq_id, digest,"
            " state, created_at, finished_at)"
            " VALUES (?, 'copy_weights', ?, ?, ?, 0, x'', 'trimmed', ?, ?)",
            (
                ids.request_id(record.model_id, 0), made.owner, session_id, record.model_id,
                now, now,
            ),
        )  # fmt: skip

    return write
