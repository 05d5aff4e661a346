"""How models begin and end: created, loaded into being, unloaded because asked or because their
session is over, and what is written with it.

A creation takes the place of seq_id 0; an unload comes after everything else, and what waits behind
a missing id fails. Knows no order between the two: that is the lane's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sqlite3
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial

from trimtab.errors import Busy, Invalid, UserError
from trimtab.service import ids
from trimtab.service.futures import Entry, SqlWrite
from trimtab.service.jobs import Jobs, Run
from trimtab.service.lanes import Done, Failed, GaveUp, Job
from trimtab.service.models import Model, drawn, moved
from trimtab.service.parts import Parts
from trimtab.service.records import ModelRecord, Promise
from trimtab.service.snapshots import forgotten
from trimtab.types import CreateModel, LoadWeights, LoraConfig

log = logging.getLogger(__name__)
OPTIMIZERS = ("adamw",)
UNLOAD = -1  # the place of an unload_model, which has no seq_id: after everything else


class Lives:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    # ---- creating

    async def submit(
        self, owner: str, request: CreateModel | LoadWeights, kind: str, body: bytes
    ) -> Promise:
        if request.session_id is None or request.model_seq_id is None:
            raise Invalid(f"{kind} needs model_id, or session_id and model_seq_id")
        ids.check_seq("model_seq_id", request.model_seq_id)
        self._parts.sessions.get(owner, request.session_id)
        model_id = ids.model_id(request.session_id, request.model_seq_id)
        entry = Entry(
            request_id=ids.request_id(model_id, 0),
            kind=kind,
            owner=owner,
            session_id=request.session_id,
            key=model_id,
            seq_id=0,
            digest=ids.digest(request, body),
            body=body,
        )
        return await self._parts.futures.once(entry, lambda: self._create(entry, request))

    async def _create(self, entry: Entry, request: CreateModel | LoadWeights) -> Promise:
        parts = self._parts
        try:
            model = self._new_model(entry, request)
        except UserError as error:
            await parts.futures.open_failed(entry, error.message, error.category, error.status)
            raise
        if len(parts.models) >= parts.settings.max_models:
            raise Busy(f"{len(parts.models)} models are loaded; allowed are that many")
        await parts.futures.open(entry, [parts.models.created(model, parts.clock())])
        parts.models.add(model)
        parts.lanes.open(entry.key, model.record.base_model, self.gave_up(model))
        run = self.creation(model, request)
        await parts.lanes.put(entry.key, self.creation_job(entry, model, run))
        return entry.promise

    def creation(self, model: Model, request: CreateModel | LoadWeights) -> Run:
        jobs = Jobs(self._parts, model)
        return jobs.create if isinstance(request, CreateModel) else jobs.load(request, 0)

    def gave_up(self, model: Model) -> GaveUp:
        """What hears of ids that the model's lane gave up on: they spoil its window, and a replay
        must know."""
        model_id = model.record.model_id

        def hear(first: int, after: int, missed: Sequence[int]) -> Awaitable[None]:
            for seq_id in missed:
                model.window.add(seq_id)
            row = (model_id, first, after, json.dumps(list(missed)))
            return self._parts.futures.persist(
                f"a gap of {model_id}",
                lambda db: db.execute("INSERT OR REPLACE INTO gaps VALUES (?, ?, ?, ?)", row),
            )

        return hear

    def creation_job(self, entry: Entry, model: Model, run: Run) -> Job:
        parts = self._parts

        async def settle(outcome: Done | Failed) -> None:
            if isinstance(outcome, Done):
                await parts.futures.finish(
                    entry, outcome.body, outcome.content_type, outcome.writes
                )
                return
            state = moved(entry.key, "failed", model.why)
            await parts.futures.fail(entry, outcome.error, outcome.category, [state])
            last = Job(UNLOAD, Jobs(parts, model).unload, forget)
            await parts.lanes.close(entry.key, last, "did not arrive before the creation failed")

        async def forget(_: Done | Failed) -> None:
            parts.lanes.drop(entry.key)

        def failed(error: str) -> None:
            parts.models.left(model, "failed", f"model {entry.key!r} was not created: {error}")

        return Job(0, run, settle, failed)

    def _new_model(self, entry: Entry, request: CreateModel | LoadWeights) -> Model:
        optimizer = request.optimizer if isinstance(request, CreateModel) else "adamw"
        if isinstance(request, LoadWeights):
            base_model, lora = self._lora_of(entry.owner, request)
        else:
            base_model, lora = request.base_model, request.lora
        engine = self._parts.engines.get(base_model)
        if engine is None:
            allowed = ", ".join(sorted(self._parts.engines))
            raise Invalid(f"base_model {base_model!r} is not served here; allowed are {allowed}")
        if optimizer not in OPTIMIZERS:
            raise Invalid(
                f"optimizer {optimizer!r} is not offered; allowed are {', '.join(OPTIMIZERS)}"
            )
        engine.learner.check_lora(lora)
        record = ModelRecord(
            model_id=entry.key,
            base_model=base_model,
            lora=drawn(lora, secrets.randbits(31)),
            optimizer=optimizer,
            user_metadata=dict(request.user_metadata or {}),
        )
        return Model(record, entry.session_id, entry.owner)

    def _lora_of(self, owner: str, request: LoadWeights) -> tuple[str, LoraConfig]:
        """Base model and adapter of the checkpoint a new model comes from."""
        family = request.optimizer_family
        if family is not None and (request.optimizer or family not in OPTIMIZERS):
            raise Invalid(
                "optimizer_config is taken only with optimizer=false, and must be one of"
                f" {', '.join(OPTIMIZERS)}; found {family!r} with optimizer={request.optimizer}"
            )
        found = self._parts.checkpoints.get(owner, request.path, "weights").record
        if request.base_model not in (None, found.base_model):
            raise Invalid(
                f"base_model {request.base_model!r} does not fit checkpoint {request.path!r}, which"
                f" belongs to {found.base_model!r}"
            )
        return found.base_model, replace(found.lora)

    # ---- unloading

    async def submit_unload(self, entry: Entry, model: Model) -> Promise:
        await self._parts.futures.open(entry)
        if not await self.unload(model, "the model is being unloaded", entry):
            error = f"model {entry.key!r} is being unloaded already"
            await self._parts.futures.fail(entry, error, "user")
        return entry.promise

    async def unload(self, model: Model, why: str, entry: Entry | None = None) -> bool:
        """Let a model's runnable jobs run, then forget it; what waits behind a missing id fails."""
        parts, model_id = self._parts, model.record.model_id

        async def settle(outcome: Done | Failed) -> None:
            if isinstance(outcome, Failed) and entry is None and model.live:
                self._again(model_id, outcome)
                return
            await self._gone(model, why, entry, outcome)

        jobs = Jobs(parts, model)
        last = Job(UNLOAD, jobs.end if entry is None else jobs.unload, settle)
        return await parts.lanes.close(model_id, last, f"did not arrive before {why}")

    def _again(self, model_id: str, outcome: Failed) -> None:
        """The weights of an ended session could not be saved; they stay until they can be."""
        seconds = self._parts.settings.retry_seconds
        log.error("model %s is not saved yet: %s; next in %g s", model_id, outcome.error, seconds)
        asyncio.get_running_loop().call_later(seconds, self._parts.lanes.again, model_id)

    async def _gone(
        self, model: Model, why: str, entry: Entry | None, outcome: Done | Failed
    ) -> None:
        parts, model_id = self._parts, model.record.model_id
        gone = f"model {model_id!r} was unloaded: {why}"
        if model.saved:
            gone += f"; its weights were saved as {model.saved!r}"
        if model.live:
            parts.models.left(model, "unloaded", gone)
        writes = [moved(model_id, model.state, model.why), forgotten(model_id)]
        if isinstance(outcome, Done):
            writes += outcome.writes
        snapshot = parts.snapshots.find(model_id)
        if entry is None:
            await parts.futures.persist(f"the end of {model_id}", all_of(writes))
        elif isinstance(outcome, Done):
            await parts.futures.finish(entry, outcome.body, outcome.content_type, writes)
        else:
            await parts.futures.fail(entry, outcome.error, outcome.category, writes)
        parts.lanes.drop(model_id)
        parts.snapshots.forget(model_id)
        if snapshot is not None:
            parts.aside(partial(parts.snapshots.remove, snapshot.folder))


def all_of(writes: Sequence[SqlWrite]) -> SqlWrite:
    def write(db: sqlite3.Connection) -> None:
        for one in writes:
            one(db)

    return write
