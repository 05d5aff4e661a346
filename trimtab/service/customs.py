"""Custom losses: stored when they are created, found when a request names one, and what a datum
must bring to them.

    losses = CustomLosses(store, codec)
    loss = losses.find(session_id, {"loss_id": f"{session_id}:loss:0"})

A loss belongs to its session; another session's id is an unknown one. Whether a graph is allowed is
the learner's to say (`custom_orders`). Knows no tensors.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from trimtab.errors import Invalid
from trimtab.service.futures import SqlWrite
from trimtab.service.records import Codec
from trimtab.service.store import Store
from trimtab.types import (
    ConfigValue,
    CreateCustomLoss,
    CustomLoss,
    Datum,
    LossSpec,
)

KIND = "create_custom_loss"
CUSTOM = "custom"
KEPT = 256  # losses in memory


class CustomLosses:
    """The store of them. Thread-safe."""

    def __init__(self, store: Store, codec: Codec) -> None:
        self._store = store
        self._codec = codec
        self._known: OrderedDict[str, CustomLoss] = OrderedDict()

    def find(self, session_id: str, config: Mapping[str, ConfigValue]) -> CustomLoss:
        """The loss that a request's `loss_fn_config` names."""
        loss_id = config.get("loss_id")
        if config.keys() != {"loss_id"} or not isinstance(loss_id, str):
            raise Invalid(
                "loss_fn 'custom' takes one loss_fn_config key, 'loss_id', which"
                f" create_custom_loss answered; found {dict(config)!r:.200}"
            )
        found = self._known.get(loss_id) if loss_id.startswith(f"{session_id}:") else None
        if found is None:
            found = self._read(session_id, loss_id)
            self._known[loss_id] = found
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    def _read(self, session_id: str, loss_id: str) -> CustomLoss:
        row = self._store.row(
            "SELECT body FROM custom_losses WHERE loss_id = ? AND session_id = ?",
            (loss_id, session_id),
        )
        if row is None:
            raise Invalid(f"loss_id {loss_id[:200]!r} is unknown in session {session_id!r}")
        request = self._codec.decode(KIND, row["body"])
        assert isinstance(request, CreateCustomLoss)
        return request.loss

    def count(self, session_id: str) -> int:
        row = self._store.row(
            "SELECT COUNT(*) AS n FROM custom_losses WHERE session_id = ?", (session_id,)
        )
        return 0 if row is None else int(row["n"])


def created(loss_id: str, session_id: str, body: bytes) -> SqlWrite:
    def write(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO custom_losses VALUES (?, ?, ?)", (loss_id, session_id, body))

    return write


# --------------------------------------------------------------------------- data


def spec_of(loss: CustomLoss) -> LossSpec:
    names = ["target_tokens", *(i.name for i in loss.inputs[1:])]
    return LossSpec(
        CUSTOM,
        inputs=dict.fromkeys(names, "required"),
        allows_alternatives=loss.inputs[0].rank == 2,
    )


def check_inputs(i: int, datum: Datum, loss: CustomLoss) -> None:
    """Datum `i` has each input the loss reads, at its rank, and nothing else. Values may be
    anything: what they mean is the loss's own."""
    ranks = {"target_tokens": loss.inputs[0].rank, **{x.name: x.rank for x in loss.inputs[1:]}}
    for name in sorted(datum.inputs.keys() ^ ranks.keys()):
        state = "lacks" if name in ranks else "has"
        raise Invalid(
            f"datum {i}: loss_fn_inputs {state} {name!r}; custom loss {loss.name!r} reads"
            f" {', '.join(sorted(ranks))}"
        )
    for name, rank in ranks.items():
        one = rank == 0 and datum.inputs[name].size == 1  # the wire has no shape of no dimensions
        if datum.inputs[name].ndim != rank and not one:
            raise Invalid(
                f"datum {i}: {name} has shape {datum.inputs[name].shape}, but custom loss"
                f" {loss.name!r} declared rank {rank}"
            )


def shaped(datum: Datum, loss: CustomLoss) -> Mapping[str, np.ndarray]:
    """The inputs, those of rank 0 without a dimension."""
    numbers = {x.name: datum.inputs[x.name].reshape(()) for x in loss.inputs[1:] if x.rank == 0}
    return {**datum.inputs, **numbers}
