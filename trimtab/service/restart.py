"""What a new process makes of the journal of the one before.

Sessions that were open go on. A model's lane begins with what brings the model back (`replay`), and
goes on with what was pending on it, each request in its turn; the loop is free meanwhile, and new
requests are taken. A model that cannot be brought back is lost: its pending requests fail with one
sentence that names its last checkpoint. Samples that were pending are drawn again from their
journalled body and seed: their weights are on disk. Files that no row names are removed. Finished
results need nothing: they are read where they lie.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from trimtab.errors import ServerError, Stopping, TrimtabError
from trimtab.service import paths
from trimtab.service.custom_orders import CustomOrders
from trimtab.service.customs import KIND
from trimtab.service.futures import Entry
from trimtab.service.jobs import Run
from trimtab.service.lanes import Done, Failed, Job, not_run
from trimtab.service.lives import UNLOAD, all_of
from trimtab.service.models import Model, model_of, moved
from trimtab.service.orders import Orders
from trimtab.service.parts import Parts
from trimtab.service.replay import Plan, Replay, plan
from trimtab.service.sampling import Sampling
from trimtab.service.snapshots import Snapshot, forgotten
from trimtab.types import CreateModel, LoadWeights

log = logging.getLogger(__name__)

PENDING = "SELECT * FROM requests WHERE state = 'pending' ORDER BY created_at, seq_id"
LIVE = (
    "SELECT m.*, s.state AS session_state FROM models m JOIN sessions s USING (session_id)"
    " WHERE m.state IN ('creating', 'ready') ORDER BY m.created_at, m.model_id"
)
SINCE = (
    "SELECT r.request_id, r.kind, r.seq_id, r.state, r.effect, COALESCE(b.size, 0) AS size"
    " FROM requests r LEFT JOIN bodies b USING (request_id)"
    " WHERE r.key = ? AND r.kind != 'sample' AND r.seq_id >= ? ORDER BY r.seq_id"
)


async def recover(parts: Parts, orders: Orders, customs: CustomOrders) -> list[Entry]:
    """Settle everything but the pending samples, which are returned for `resume`. Does no
    arithmetic: models come back in their lanes."""
    parts.sessions.load()
    _sweep_folders(parts)
    pending: dict[str, list[Entry]] = defaultdict(list)
    samples = []
    for row in parts.store.read(PENDING):
        entry = _entry(row)
        parts.futures.adopt(entry.request_id, entry.owner, entry.kind, entry.digest)
        if entry.kind == "sample":
            samples.append(entry)
        elif entry.kind == KIND:
            await customs.resume(entry)
        else:
            pending[entry.key].append(entry)
    for row in parts.store.read(LIVE):
        waiting = pending.pop(row["model_id"], [])
        if row["base_model"] not in parts.engines:
            log.warning("model %s waits: %s is not served", row["model_id"], row["base_model"])
            continue
        model = model_of(row)
        await TakeUp(parts, orders, model).start(waiting)
        if row["session_state"] != "open":
            await orders.lives.unload(model, f"its session {row['session_state']}")
    await _fail_left(parts, [entry for entries in pending.values() for entry in entries])
    return samples


async def resume(parts: Parts, sampling: Sampling, entries: list[Entry]) -> None:
    """Put the pending samples back, one by one. One that cannot be drawn fails by itself."""
    for entry in entries:
        try:
            await _draw(parts, sampling, entry)
        except Stopping:
            return  # it stays pending
        except (TrimtabError, OSError, sqlite3.Error) as error:
            log.error("sample %s cannot be drawn again: %s", entry.request_id, error)
            await parts.futures.fail(entry, f"it cannot be drawn again: {error}", "server")


async def _draw(parts: Parts, sampling: Sampling, entry: Entry) -> None:
    row = parts.store.row("SELECT body FROM bodies WHERE request_id = ?", (entry.request_id,))
    if row is None:
        raise ServerError("the request's body is missing in the journal")
    await sampling.resume(entry, row["body"])


class TakeUp:
    """One model that was live when the process before this one ended."""

    def __init__(self, parts: Parts, orders: Orders, model: Model) -> None:
        self._parts = parts
        self._orders = orders
        self._model = model
        self._replay = Replay(parts, orders, model)

    async def start(self, pending: Sequence[Entry]) -> None:
        """Open the model's lane: first what brings it back, then what was pending."""
        parts, model = self._parts, self._model
        model_id, base = model.record.model_id, model.record.base_model
        parts.models.add(model)
        created = model.state != "creating"
        snapshot = parts.snapshots.find(model_id) if created else None
        first = int(created) if snapshot is None else snapshot.seq_id + 1
        rows = self._rows(first)
        found = plan(rows, self._gaps(), first)
        before = self._before(snapshot, found) if created else ()
        gave_up = self._orders.lives.gave_up(model)
        parts.lanes.open(model_id, base, gave_up, next_seq=found.next_seq, before=before)
        log.info("model %s comes back: %d requests to run again", model_id, len(found.steps))
        for seq_id, effect in found.refused:
            self._orders.use_up(model, seq_id, effect)
        sizes = {row["seq_id"]: row["size"] for row in rows}
        await self._take(pending, dict(found.doomed), sizes)

    def _rows(self, first: int) -> list[sqlite3.Row]:
        return self._parts.store.read(SINCE, (self._model.record.model_id, first))

    def _gaps(self) -> list[sqlite3.Row]:
        return self._parts.store.read(
            "SELECT * FROM gaps WHERE model_id = ?", (self._model.record.model_id,)
        )

    def _before(self, snapshot: Snapshot | None, found: Plan) -> Iterable[Job]:
        yield Job(0, self._replay.begin(snapshot), self._settle, self._failed)
        for step in found.steps:
            yield Job(step.seq_id, self._replay.step(step), self._settle, self._failed)

    def _failed(self, error: str) -> None:
        """A model that cannot be what it was must not go on as something else."""
        self._parts.models.left(self._model, "lost", lost(self._parts, self._model, error))

    async def _settle(self, outcome: Done | Failed) -> None:
        if isinstance(outcome, Done):
            return
        parts, model = self._parts, self._model
        model_id = model.record.model_id
        log.error("%s", model.why)
        snapshot = parts.snapshots.find(model_id)
        writes = [moved(model_id, "lost", model.why), forgotten(model_id)]
        await parts.futures.persist(f"the loss of {model_id}", all_of(writes))
        await parts.lanes.abandon(model_id, model.why, "server")
        if snapshot is not None:
            parts.aside(partial(parts.snapshots.remove, snapshot.folder))

    async def _take(
        self, pending: Sequence[Entry], doomed: dict[int, int], sizes: dict[int, int]
    ) -> None:
        """Every request that was pending gets its place again."""
        parts, orders, model = self._parts, self._orders, self._model
        model_id = model.record.model_id
        for entry in sorted(pending, key=lambda entry: (entry.seq_id == UNLOAD, entry.seq_id)):
            if entry.seq_id in doomed:
                error = not_run(model_id, entry.seq_id, doomed[entry.seq_id], "did not arrive")
                await parts.futures.fail(entry, error, "user")
            elif entry.kind == "unload_model":
                await orders.lives.unload(model, "the model is being unloaded", entry)
            elif entry.seq_id == 0:
                job = orders.lives.creation_job(entry, model, self._creation(entry))
                await parts.lanes.put(model_id, job)
            else:
                run = orders.journalled(entry.request_id, entry.kind, model)
                await orders.park(orders.job(entry, model, run, sizes[entry.seq_id]), model)

    def _creation(self, entry: Entry) -> Run:
        def run() -> Done:
            request = self._orders.read(entry.request_id, entry.kind)
            assert isinstance(request, (CreateModel, LoadWeights))
            return self._orders.lives.creation(self._model, request)()

        return run


def lost(parts: Parts, model: Model, why: str) -> str:
    model_id = model.record.model_id
    path = parts.checkpoints.newest(model_id)
    saved = (
        f"its last checkpoint is {path!r}: load it into a new model to go on"
        if path
        else "it had not been saved"
    )
    return f"model {model_id!r} lost its weights when the server restarted ({why}); {saved}"


async def _fail_left(parts: Parts, entries: Sequence[Entry]) -> None:
    """Requests that are pending on models that are not: their own end was not written."""
    fails = []
    for entry in entries:
        model = parts.models.find(entry.key)
        why = f"model {entry.key!r} is gone" if model is None else model.why
        fails.append(parts.futures.fail(entry, why, "server"))
    await asyncio.gather(*fails)


def _sweep_folders(parts: Parts) -> None:
    named = {
        row["folder"]
        for row in parts.store.read(
            "SELECT folder FROM checkpoints UNION SELECT folder FROM weights"
            " WHERE folder IS NOT NULL"
        )
    }
    if orphans := paths.sweep_orphans(parts.checkpoints.home, named):
        log.info("removed %d unfinished checkpoint folders", len(orphans))
    parts.snapshots.sweep_orphans()


def _entry(row: sqlite3.Row) -> Entry:
    return Entry(
        request_id=row["request_id"],
        kind=row["kind"],
        owner=row["owner"],
        session_id=row["session_id"],
        key=row["key"],
        seq_id=row["seq_id"],
        digest=row["digest"],
        seed=None if row["seed"] is None else int(row["seed"]),
        samples=row["samples"],
        effect=row["effect"],
    )
