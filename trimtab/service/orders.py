"""Requests that a model runs in order: whose they are, whether they may run, and their place.

    placed     the owner's model and the id; a resend of a known id ends here
    checked    Invalid uses the id up: journalled as failed, it still takes its turn in the lane;
               one that came early gets a promise that has failed, any other is refused (400)
    journalled and parked in the lane; only then does the promise leave

Knows no HTTP and no arithmetic: what a job does is `jobs.py`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab.errors import Busy, Invalid, NotFound, UserError
from trimtab.service import ids, paths
from trimtab.service.checkpoints import exists_error, same
from trimtab.service.futures import Entry, SqlWrite
from trimtab.service.jobs import Jobs, Run
from trimtab.service.lanes import Done, Failed, Job
from trimtab.service.models import Model, drawn, moved
from trimtab.service.parts import Parts
from trimtab.service.records import ModelRecord, Promise
from trimtab.service.sequences import touched
from trimtab.service.training import Checker
from trimtab.types import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    LoraConfig,
    OptimStep,
    Request,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)

OPTIMIZERS = ("adamw",)
UNLOAD = -1  # the place of an unload_model, which has no seq_id: after everything else


@dataclass(frozen=True, slots=True)
class Order:
    """A checked request: what runs, what its acceptance writes, and whether it changes weights or,
    when it fails, spoils the window."""

    run: Run
    writes: tuple[SqlWrite, ...] = ()
    changes: bool = False
    spoils: bool = False


class Orders:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._checkers = {
            name: Checker(engine.learner.losses, engine.info, parts.sequences, parts.settings)
            for name, engine in parts.engines.items()
        }

    # ---- submitting

    async def submit(self, owner: str, request: Request, kind: str, body: bytes) -> Promise:
        assert not isinstance(request, Sample)
        creating = isinstance(request, CreateModel) or (
            isinstance(request, LoadWeights) and request.model_id is None
        )
        if creating:
            assert isinstance(request, (CreateModel, LoadWeights))
            return await self._submit_creation(owner, request, kind, body)
        model = self._model(owner, _model_id(request))
        entry = self._entry(model, request, kind, body)
        return await self._parts.futures.once(entry, lambda: self._accept(entry, model, request))

    def _model(self, owner: str, model_id: str) -> Model:
        model = self._parts.models.get(owner, model_id)
        self._parts.sessions.get(owner, model.session_id)
        return model

    def _entry(self, model: Model, request: Request, kind: str, body: bytes) -> Entry:
        model_id = model.record.model_id
        if isinstance(request, UnloadModel):
            request_id, seq_id = f"{model_id}:unload", UNLOAD
        else:
            seq_id = getattr(request, "seq_id", None) or 0
            if not 1 <= seq_id <= ids.MAX_SEQ:
                raise Invalid(f"seq_id must be 1 or more, found {seq_id}")
            request_id = ids.request_id(model_id, seq_id)
        return Entry(
            request_id=request_id,
            kind=kind,
            owner=model.owner,
            session_id=model.session_id,
            key=model_id,
            seq_id=seq_id,
            digest=ids.digest(request, body),
            body=body,
        )

    async def _accept(self, entry: Entry, model: Model, request: Request) -> Promise:
        if not model.live:
            category = "server" if model.state == "lost" else "user"
            await self._parts.futures.open_failed(entry, model.why, category)
            return entry.promise
        try:
            if isinstance(request, UnloadModel):
                return await self._unload(entry, model)
            self._parts.lanes.admit(model.record.model_id, entry.seq_id, len(entry.body))
            order = await self._check(entry, model, request)
        except UserError as error:
            return await self._refuse(entry, model, error, spoils=_spoils(request))
        await self._parts.futures.open(entry, order.writes)
        model.changing += order.changes
        await self._parts.lanes.put(model.record.model_id, self._job(entry, model, order))
        return entry.promise

    async def _refuse(
        self, entry: Entry, model: Model, error: UserError, *, spoils: bool
    ) -> Promise:
        """Journal a bad request and use its id up. Raises `error`, unless it came early."""
        model_id = model.record.model_id
        early = self._parts.lanes.early(model_id, entry.seq_id)
        status = 0 if early else error.status
        await self._parts.futures.open_failed(entry, error.message, error.category, status)
        spoil = _spoil(model, entry.seq_id) if spoils else _ignore
        self._parts.lanes.use_up(model_id, entry.seq_id, spoil)
        if early:
            return entry.promise
        raise error

    def _job(self, entry: Entry, model: Model, order: Order) -> Job:
        futures = self._parts.futures

        async def settle(outcome: Done | Failed) -> None:
            model.changing -= order.changes
            if isinstance(outcome, Done):
                await futures.finish(entry, outcome.body, outcome.content_type, outcome.writes)
            else:
                await futures.fail(entry, outcome.error, outcome.category)

        spoil = _spoil(model, entry.seq_id) if order.spoils else _ignore
        return Job(entry.seq_id, order.run, settle, spoil, len(entry.body))

    async def reject(
        self, owner: str, kind: str, model_id: str, seq_id: int, *, why: UserError, body: bytes
    ) -> Promise:
        """Use up a seq_id whose body could not be read. Raises `why`, unless it came early."""
        model = self._model(owner, model_id)
        if not 1 <= seq_id <= ids.MAX_SEQ:
            raise why
        entry = Entry(
            request_id=ids.request_id(model_id, seq_id),
            kind=kind,
            owner=owner,
            session_id=model.session_id,
            key=model_id,
            seq_id=seq_id,
            digest=hashlib.sha256(body).digest(),
        )

        async def accept() -> Promise:
            return await self._refuse(entry, model, why, spoils=kind == "forward_backward")

        return await self._parts.futures.once(entry, accept)

    # ---- checking

    async def _check(self, entry: Entry, model: Model, request: Request) -> Order:
        jobs = Jobs(self._parts, model)
        if isinstance(request, ForwardBackward):
            return await self._check_forward_backward(jobs, model, request)
        if isinstance(request, OptimStep):
            return Order(jobs.optim_step(request), changes=True)
        if isinstance(request, SaveWeights):
            self._check_save(jobs, model, request)
            return Order(jobs.save_weights(request))
        if isinstance(request, SaveWeightsForSampler):
            self._check_save_for_sampler(jobs, model, request)
            return Order(jobs.save_weights_for_sampler(request))
        assert isinstance(request, LoadWeights)
        if request.optimizer_family is not None:
            raise Invalid(
                "optimizer_config belongs to a load that creates a model; this one names model_id"
            )
        self._check_loadable(request.path)
        return Order(jobs.load(request, entry.seq_id), changes=True)

    async def _check_forward_backward(
        self, jobs: Jobs, model: Model, request: ForwardBackward
    ) -> Order:
        parts = self._parts
        now, checker = parts.clock(), self._checkers[model.record.base_model]
        loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(
            parts.pool, checker.check, request, model.session_id, now
        )
        until = now + parts.settings.sequence_seconds
        touch = touched(model.session_id, checked.named, now=now, expires_at=until)
        writes = (touch,) if checked.named else ()
        return Order(jobs.forward_backward(checked), writes, spoils=_spoils(request))

    def _check_save(
        self, jobs: Jobs, model: Model, request: SaveWeights | SaveWeightsForSampler
    ) -> None:
        """Name, time to live, and a clash that is certain already; a later one fails the future."""
        checkpoints = self._parts.checkpoints
        checkpoints.check_ttl(request.ttl_seconds)
        if request.name is not None:
            paths.check_name(request.name, self._parts.settings.max_name)
        wanted = jobs.checkpoint(request)
        standing = checkpoints.find(wanted.record.path)
        if standing is None or (isinstance(request, SaveWeights) and request.overwrite):
            return
        if model.changing or not same(standing, wanted):
            raise exists_error(wanted.record.path)

    def _check_save_for_sampler(
        self, jobs: Jobs, model: Model, request: SaveWeightsForSampler
    ) -> None:
        number = request.sampling_session_seq_id
        if (request.name is None) == (number is None):
            raise Invalid("save_weights_for_sampler takes either path or sampling_session_seq_id")
        if request.kind not in ("snapshot", "inflight"):
            raise Invalid(f"kind {request.kind!r} is not offered; allowed are inflight, snapshot")
        if number is not None:
            ids.check_seq("sampling_session_seq_id", number)
            self._parts.checkpoints.check_ttl(request.ttl_seconds)
        else:
            self._check_save(jobs, model, request)

    def _check_loadable(self, path: str) -> None:
        """The form of a path that is loaded later; whether it exists is settled in its turn."""
        _, kind, _ = paths.parse_path(path, self._parts.settings.max_name)
        if kind != "weights":
            raise Invalid(f"path {path!r} names {kind}; only weights can be loaded into a model")

    # ---- creating and unloading

    async def _submit_creation(
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
        jobs = Jobs(parts, model)
        run = jobs.create if isinstance(request, CreateModel) else jobs.load(request, 0)
        await parts.futures.open(entry, [parts.models.created(model, parts.clock())])
        parts.models.add(model)
        parts.lanes.open(entry.key, model.record.base_model, model.window.add)
        await parts.lanes.put(entry.key, self._creation_job(entry, model, run))
        return entry.promise

    def _creation_job(self, entry: Entry, model: Model, run: Run) -> Job:
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

    async def _unload(self, entry: Entry, model: Model) -> Promise:
        await self._parts.futures.open(entry)
        if not await self.unload(model, "the model is being unloaded", entry):
            error = f"model {entry.key!r} is being unloaded already"
            await self._parts.futures.fail(entry, error, "user")
        return entry.promise

    async def unload(self, model: Model, why: str, entry: Entry | None = None) -> bool:
        """Let a model's runnable jobs run, then forget it; what waits behind a missing id fails."""
        parts, model_id = self._parts, model.record.model_id
        gone = f"model {model_id!r} was unloaded: {why}"

        async def settle(outcome: Done | Failed) -> None:
            parts.models.left(model, "unloaded", gone)
            parts.lanes.drop(model_id)
            writes = [moved(model_id, "unloaded", gone), forget_bodies(model_id)]
            if entry is None:
                await parts.store.write(lambda db: [write(db) for write in writes])
            elif isinstance(outcome, Done):
                body, content_type = outcome.body, outcome.content_type
                await parts.futures.finish(entry, body, content_type, writes)
            else:
                await parts.futures.fail(entry, outcome.error, outcome.category, writes)

        last = Job(UNLOAD, Jobs(parts, model).unload, settle)
        return await parts.lanes.close(model_id, last, f"did not arrive before {why}")


def forget_bodies(model_id: str) -> SqlWrite:
    """Drop journalled bodies that nothing can be replayed from any more."""
    return lambda db: db.execute("DELETE FROM bodies WHERE key = ?", (model_id,))


def _model_id(request: Request) -> str:
    model_id = getattr(request, "model_id", None)
    if not isinstance(model_id, str):
        raise NotFound(f"model {model_id!r} is unknown")
    return model_id


def _spoils(request: Request) -> bool:
    """Whether a failure leaves the gradient of its window incomplete."""
    return isinstance(request, ForwardBackward) and not request.forward_only


def _spoil(model: Model, seq_id: int) -> Callable[[str], None]:
    return lambda error: model.window.add(seq_id)


def _ignore(error: str) -> None:
    """A failure that spoils nothing."""
