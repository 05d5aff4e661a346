"""Models: which exist, whose they are, and whether their weights are in a learner now.

    creating ──► ready ──┬► unloaded   asked for, or the session ended
        └──► failed      └► lost       could not be restored after a restart

What is not creating or ready stays so, with the sentence every later request is answered with.
Live models are held in memory, the others read when asked for. Knows no lanes and no learners.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field

from trimtab.errors import NotFound
from trimtab.service.checkpoints import lora_columns, lora_of
from trimtab.service.futures import SqlWrite
from trimtab.service.records import ModelRecord
from trimtab.service.store import Store
from trimtab.types import LoraConfig

LIVE = ("creating", "ready")


@dataclass(slots=True)
class Window:
    """What the next optim_step must know: the seq_ids since the last one that added nothing to its
    gradient though they should have."""

    failed: list[int] = field(default_factory=list)

    def add(self, seq_id: int) -> None:
        self.failed.append(seq_id)

    def take(self) -> list[int]:
        failed, self.failed = sorted(set(self.failed)), []
        return failed


@dataclass(slots=True, eq=False)
class Model:
    """`contents` names the state of weights and optimizer: it changes with each step and load.
    `changing` counts accepted requests that will change it; `why` says why a model is not live;
    `saved` is the checkpoint made of it when its session ended."""

    record: ModelRecord
    session_id: str
    owner: str
    state: str = "creating"
    why: str = ""
    contents: str = ""
    changing: int = 0
    saved: str = ""
    window: Window = field(default_factory=Window)

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def fault(self) -> str:
        """The category of `why`: nobody asked for a loss."""
        return "server" if self.state == "lost" else "user"


class Models:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._live: dict[str, Model] = {}

    def __len__(self) -> int:
        return len(self._live)

    def get(self, owner: str, model_id: str) -> Model:
        model = self.find(model_id)
        if model is None or model.owner != owner:
            raise NotFound(f"model {model_id!r} is unknown")
        return model

    def find(self, model_id: str) -> Model | None:
        if (model := self._live.get(model_id)) is not None:
            return model
        row = self._store.row("SELECT * FROM models WHERE model_id = ?", (model_id,))
        return None if row is None else model_of(row)

    def of_session(self, session_id: str) -> list[Model]:
        return [model for model in self._live.values() if model.session_id == session_id]

    def add(self, model: Model) -> None:
        self._live[model.record.model_id] = model

    def created(self, model: Model, now: float) -> SqlWrite:
        record = model.record
        values = (
            record.model_id,
            model.session_id,
            model.owner,
            record.base_model,
            *lora_columns(record.lora),
            record.optimizer,
            json.dumps(dict(record.user_metadata)),
            model.state,
            now,
        )
        return lambda db: db.execute(
            "INSERT INTO models (model_id, session_id, owner, base_model, rank, seed, train_attn,"
            " train_mlp, train_unembed, optimizer, user_metadata, state, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )

    def left(self, model: Model, state: str, why: str) -> None:
        """Take a model out of memory; `moved` is the write that goes with it."""
        model.state, model.why = state, why
        self._live.pop(model.record.model_id, None)


def moved(model_id: str, state: str, why: str = "") -> SqlWrite:
    def write(db: sqlite3.Connection) -> None:
        db.execute(
            "UPDATE models SET state = ?, why = ? WHERE model_id = ?", (state, why, model_id)
        )

    return write


def model_of(row: sqlite3.Row) -> Model:
    record = ModelRecord(
        model_id=row["model_id"],
        base_model=row["base_model"],
        lora=lora_of(row),
        optimizer=row["optimizer"],
        user_metadata=json.loads(row["user_metadata"]),
    )
    return Model(record, row["session_id"], row["owner"], row["state"], row["why"] or "")


def drawn(lora: LoraConfig, seed: int) -> LoraConfig:
    """The configuration in force: the client's, with a seed where it gave none."""
    if lora.seed is not None:
        return lora
    return LoraConfig(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
