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
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from trimtab.errors import Invalid, NotFound, ServerError, UserError
from trimtab.service import ids, paths
from trimtab.service.checkpoints import exists_error, same
from trimtab.service.external import check_recipients
from trimtab.service.futures import GRADIENT, NOTHING, STEP, Entry, SqlWrite
from trimtab.service.jobs import Jobs, Run
from trimtab.service.lanes import Done, Failed, Job
from trimtab.service.lives import UNLOAD, Lives
from trimtab.service.models import Model
from trimtab.service.parts import Parts
from trimtab.service.records import Promise
from trimtab.service.sequences import pinned, touched
from trimtab.service.training import Checker
from trimtab.types import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Request,
    Sample,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    UnloadModel,
)


@dataclass(frozen=True, slots=True)
class Order:
    """A checked request: what runs, and what its acceptance writes."""

    run: Run
    writes: tuple[SqlWrite, ...] = ()


class Orders:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.lives = Lives(parts)
        self._checkers = {
            name: Checker(
                engine.learner.losses, engine.info, parts.sequences, parts.settings, parts.customs
            )
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
            return await self.lives.submit(owner, request, kind, body)
        model = self._model(owner, _model_id(request))
        entry = self._entry(model, request, kind, body)
        return await self._parts.futures.once(entry, lambda: self._accept(entry, model, request))

    def _model(self, owner: str, model_id: str) -> Model:
        model = self._parts.models.get(owner, model_id)
        self._parts.sessions.get(owner, model.session_id)
        base = model.record.base_model
        if model.live and base not in self._parts.engines:
            raise ServerError(
                f"model {model_id!r} waits on disk: its base model {base!r} is not served now;"
                " start the server with it, and the model goes on"
            )
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
            effect=effect_of(request),
        )

    async def _accept(self, entry: Entry, model: Model, request: Request) -> Promise:
        if not model.live:
            await self._parts.futures.open_failed(entry, model.why, model.fault)
            return entry.promise
        try:
            if isinstance(request, UnloadModel):
                return await self.lives.submit_unload(entry, model)
            self._parts.lanes.admit(model.record.model_id, entry.seq_id, len(entry.body))
            order = await self._check(entry, model, request)
        except UserError as error:
            return await self._refuse(entry, model, error)
        await self._parts.futures.open(entry, order.writes)
        await self.park(self.job(entry, model, order.run), model)
        return entry.promise

    async def park(self, job: Job, model: Model) -> None:
        """Give an accepted request its place. The model may have ended while it was written down:
        it is answered as every later one is."""
        if model.live:  # one read before a restart had taken the models up is another object
            model = self._parts.models.find(model.record.model_id) or model
        if model.live:
            await self._parts.lanes.put(model.record.model_id, job)
        else:
            await job.settle(Failed(model.why, model.fault))

    async def _refuse(self, entry: Entry, model: Model, error: UserError) -> Promise:
        """Journal a bad request and use its id up. Raises `error`, unless it came early."""
        model_id = model.record.model_id
        early = self._parts.lanes.early(model_id, entry.seq_id)
        status = 0 if early else error.status
        effect = GRADIENT if entry.effect == GRADIENT else NOTHING  # a step that never ran is none
        entry = replace(entry, effect=effect)
        await self._parts.futures.open_failed(entry, error.message, error.category, status)
        self.use_up(model, entry.seq_id, effect)
        if early:
            return entry.promise
        raise error

    def use_up(self, model: Model, seq_id: int, effect: int) -> None:
        """A refused id takes its turn."""
        spoil = _spoil(model, seq_id) if effect == GRADIENT else _ignore
        self._parts.lanes.use_up(model.record.model_id, seq_id, spoil)

    def job(self, entry: Entry, model: Model, run: Run, size: int | None = None) -> Job:
        """An accepted request in its lane. `run` may be of this process or of one before it, whose
        entry comes without the body; `size` is the body's."""
        futures = self._parts.futures
        size = len(entry.body) if size is None else size
        changes = entry.effect == STEP or entry.kind == "load_weights"
        model.changing += changes
        if entry.effect != NOTHING:
            between = entry.effect == STEP
            run = Jobs(self._parts, model).kept(run, entry.seq_id, size, between=between)

        spoil = _spoil(model, entry.seq_id) if entry.effect == GRADIENT else _ignore

        async def settle(outcome: Done | Failed) -> None:
            model.changing -= changes
            if isinstance(outcome, Done):
                body, content_type = outcome.body, outcome.content_type
                told = await futures.finish(entry, body, content_type, outcome.writes)
                if told.state == "failed":  # its gradient is in the window, and nobody knows
                    spoil(told.error)
                return
            left = [] if outcome.ran or entry.effect != STEP else [partial(_never_ran, entry)]
            await futures.fail(entry, outcome.error, outcome.category, left)

        return Job(entry.seq_id, run, settle, spoil, size)

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
            effect=GRADIENT if kind == "forward_backward" else NOTHING,
        )
        return await self._parts.futures.once(entry, lambda: self._refuse(entry, model, why))

    # ---- checking

    async def _check(self, entry: Entry, model: Model, request: Request) -> Order:
        jobs = Jobs(self._parts, model)
        if isinstance(request, ForwardBackward):
            return await self._check_forward_backward(entry, jobs, model, request)
        if isinstance(request, SaveWeights):
            self._check_save(jobs, model, request)
        if isinstance(request, SaveWeightsForSampler):
            self._check_publish(jobs, model, request)
        if isinstance(request, SaveWeightsExternal):
            check_recipients(request.recipients)
            self._check_save(jobs, model, request)
        if isinstance(request, LoadWeights):
            if request.optimizer_family is not None:
                raise Invalid(
                    "optimizer_config belongs to a load that creates a model; this one names"
                    " model_id"
                )
            self._check_loadable(request.path)
        return Order(jobs.run_of(request))

    async def _check_forward_backward(
        self, entry: Entry, jobs: Jobs, model: Model, request: ForwardBackward
    ) -> Order:
        parts = self._parts
        now, checker = parts.clock(), self._checkers[model.record.base_model]
        loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(
            parts.pool, checker.check, request, model.session_id, now
        )
        run = jobs.forward_backward(checked)
        if not checked.named:
            return Order(run)
        until = now + parts.settings.sequence_seconds
        touch = touched(model.session_id, checked.named, now=now, expires_at=until)
        return Order(run, (touch, pinned(entry.request_id, checked.used)))

    def journalled(self, request_id: str, kind: str, model: Model) -> Run:
        """What a request does that an earlier process accepted: read, checked and run when its
        turn comes, on the learner's thread."""

        def run() -> Done:
            jobs, request = Jobs(self._parts, model), self.read(request_id, kind)
            if not isinstance(request, ForwardBackward):
                return jobs.run_of(request)()
            checker, now = self._checkers[model.record.base_model], self._parts.clock()
            checked = checker.check(request, model.session_id, now, request_id)
            return jobs.forward_backward(checked)()

        return run

    def read(self, request_id: str, kind: str) -> Request:
        """A request as its journalled body tells it."""
        row = self._parts.store.row("SELECT body FROM bodies WHERE request_id = ?", (request_id,))
        if row is None:
            raise ServerError(f"the body of request {request_id!r} is missing in the journal")
        return self._parts.codec.decode(kind, row["body"])

    def _check_save(
        self,
        jobs: Jobs,
        model: Model,
        request: SaveWeights | SaveWeightsForSampler | SaveWeightsExternal,
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

    def _check_publish(self, jobs: Jobs, model: Model, request: SaveWeightsForSampler) -> None:
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


def _never_ran(entry: Entry, db: sqlite3.Connection) -> None:
    db.execute("UPDATE requests SET effect = 0 WHERE request_id = ?", (entry.request_id,))


def _model_id(request: Request) -> str:
    model_id = getattr(request, "model_id", None)
    if not isinstance(model_id, str):
        raise NotFound(f"model {model_id!r} is unknown")
    return model_id


def effect_of(request: Request) -> int:
    """What a request does to its model that a replay has to do again. A load is its own snapshot,
    and a save leaves the model as it was."""
    if isinstance(request, ForwardBackward):
        return NOTHING if request.forward_only else GRADIENT
    return STEP if isinstance(request, OptimStep) else NOTHING


def _spoil(model: Model, seq_id: int) -> Callable[[str], None]:
    return lambda error: model.window.add(seq_id)


def _ignore(error: str) -> None:
    """A failure that spoils nothing."""
