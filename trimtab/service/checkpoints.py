"""Checkpoints and sampling weights as rows: what is saved, under which path, for how long.

A checkpoint is visible from the commit of its row on, and only then; the row is written with the
result of the save, after its folder has been renamed into place. Two saves under one path are one
when nothing changed between them; otherwise the second needs `overwrite`.

Knows no engine: files are filled in by the learner that `jobs.py` calls.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import Invalid, NotFound
from trimtab.service import ledger, paths
from trimtab.service.futures import SqlWrite
from trimtab.service.records import CheckpointRecord
from trimtab.service.settings import ServiceSettings
from trimtab.service.store import Store
from trimtab.types import LoraConfig


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A row. `contents` names the state it holds: equal strings, equal weights. `version` is set
    for sampler weights."""

    record: CheckpointRecord
    owner: str
    folder: str
    contents: str
    version: str | None = None
    ttl_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """One immutable set of sampling weights. `ephemeral`: no checkpoint's, a sampling session's."""

    version: str
    model_id: str
    base_model: str
    folder: str
    step: int
    ephemeral: bool = False
    expires_at: float | None = None
    user_metadata: Mapping[str, str] | None = None


class Checkpoints:
    def __init__(self, store: Store, settings: ServiceSettings, clock: Callable[[], float]) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self.home: Path = store.data_dir / "checkpoints"

    # ---- looking up

    def find(self, path: str) -> Checkpoint | None:
        """The live checkpoint of any owner under a path."""
        row = self._store.row("SELECT * FROM checkpoints WHERE path = ?", (path,))
        if row is None or (row["expires_at"] is not None and row["expires_at"] <= self._clock()):
            return None
        return checkpoint_of(row)

    def get(self, owner: str, path: str, *kinds: str) -> Checkpoint:
        """A live checkpoint that this owner may read (its own, or a published one), of one of
        `kinds` where given."""
        _, kind, _ = paths.parse_path(path, self._settings.max_name)
        if kinds and kind not in kinds:
            raise Invalid(f"path {path!r} names {kind}; here only {', '.join(kinds)} will do")
        found = self.find(path)
        if found is None or not (found.owner == owner or found.record.public):
            raise NotFound(f"checkpoint {path!r} is unknown")
        return found

    def newest(self, model_id: str) -> str | None:
        """The path of a model's last training checkpoint."""
        row = self._store.row(
            "SELECT path FROM checkpoints WHERE model_id = ? AND kind = 'weights'"
            " AND (expires_at IS NULL OR expires_at > ?) ORDER BY created_at DESC LIMIT 1",
            (model_id, self._clock()),
        )
        return None if row is None else str(row["path"])

    def holding(self, model_id: str, contents: str) -> str | None:
        """The path of a training checkpoint of this model that holds just this and will stay."""
        row = self._store.row(
            "SELECT path FROM checkpoints WHERE model_id = ? AND kind = 'weights'"
            " AND contents = ? AND expires_at IS NULL ORDER BY created_at DESC LIMIT 1",
            (model_id, contents),
        )
        return None if row is None else str(row["path"])

    # ---- saving

    def check_ttl(self, ttl_seconds: int | None) -> None:
        low, high = self._settings.min_ttl_seconds, self._settings.max_ttl_seconds
        if ttl_seconds is not None and not low <= ttl_seconds <= high:
            raise Invalid(f"ttl_seconds must lie between {low} and {high}, found {ttl_seconds}")

    def expiry(self, ttl_seconds: int | None) -> float | None:
        return None if ttl_seconds is None else self._clock() + ttl_seconds

    def written(self, checkpoint: Checkpoint) -> SqlWrite:
        """The write that makes a checkpoint visible, in place of one under the same path."""
        return lambda db: _put(db, checkpoint)

    def weights_written(self, weights: Weights) -> SqlWrite:
        now = self._clock()
        return lambda db: _put_weights(db, weights, now)

    def remove(self, folder: str) -> None:
        paths.remove_folder(self.home, folder)


def same(standing: Checkpoint, wanted: Checkpoint) -> bool:
    """Whether saving `wanted` would leave its path as it is."""
    return (standing.contents, standing.ttl_seconds, standing.record.user_metadata) == (
        wanted.contents,
        wanted.ttl_seconds,
        wanted.record.user_metadata,
    )


def exists_error(path: str) -> Invalid:
    return Invalid(
        f"path {path!r} exists with other contents; choose another name or set overwrite"
    )


def checkpoint_of(row: sqlite3.Row) -> Checkpoint:
    return Checkpoint(
        CheckpointRecord(
            path=row["path"],
            kind=row["kind"],
            model_id=row["model_id"],
            base_model=row["base_model"],
            lora=lora_of(row),
            optimizer=row["optimizer"],
            size_bytes=row["size_bytes"],
            step=row["step"],
            created_at=row["created_at"],
            expires_at=row["expires_at"],
            user_metadata=json.loads(row["user_metadata"]),
            public=bool(row["public"]),
        ),
        owner=row["owner"],
        folder=row["folder"],
        contents=row["contents"],
        version=row["version"],
        ttl_seconds=row["ttl_seconds"],
    )


def lora_of(row: sqlite3.Row) -> LoraConfig:
    """The LoRA columns that models and checkpoints share. Seeds are text: they may need 64 bits."""
    return LoraConfig(
        rank=row["rank"],
        seed=None if row["seed"] is None else int(row["seed"]),
        train_attn=bool(row["train_attn"]),
        train_mlp=bool(row["train_mlp"]),
        train_unembed=bool(row["train_unembed"]),
    )


def lora_columns(lora: LoraConfig) -> tuple[object, ...]:
    seed = None if lora.seed is None else str(lora.seed)
    return lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed


def _put(db: sqlite3.Connection, checkpoint: Checkpoint) -> None:
    record = checkpoint.record
    db.execute(
        "INSERT OR REPLACE INTO checkpoints (path, kind, owner, model_id, base_model, rank, seed,"
        " train_attn, train_mlp, train_unembed, optimizer, folder, version, size_bytes, step,"
        " contents, ttl_seconds, created_at, expires_at, user_metadata)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.path,
            record.kind,
            checkpoint.owner,
            record.model_id,
            record.base_model,
            *lora_columns(record.lora),
            record.optimizer,
            checkpoint.folder,
            checkpoint.version,
            record.size_bytes,
            record.step,
            checkpoint.contents,
            checkpoint.ttl_seconds,
            record.created_at,
            record.expires_at,
            json.dumps(dict(record.user_metadata)),
        ),
    )
    ledger.audited(checkpoint.owner, "checkpoint_create", record.path, record.created_at)(db)
    row = db.execute(
        "SELECT session_id FROM models WHERE model_id = ?", (record.model_id,)
    ).fetchone()
    if row is not None:
        amounts = {ledger.CHECKPOINTS: 1}
        ledger.counted(
            checkpoint.owner, row["session_id"], record.base_model, amounts, record.created_at
        )(db)


def _put_weights(db: sqlite3.Connection, weights: Weights, now: float) -> None:
    db.execute(
        "INSERT INTO weights (version, model_id, base_model, folder, step, ephemeral, created_at,"
        " expires_at, user_metadata) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            weights.version,
            weights.model_id,
            weights.base_model,
            weights.folder,
            weights.step,
            weights.ephemeral,
            now,
            weights.expires_at,
            json.dumps(dict(weights.user_metadata or {})),
        ),
    )
