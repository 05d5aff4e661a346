"""Service: the facade that wire calls and the composition root builds.

Lives on one asyncio loop. Every method takes the owner (who holds the API key) first; another
owner's id is answered with the words used for an unknown one. Knows no HTTP, no protobuf, no torch.

    service = Service(ServiceSettings(), Store(data_dir), {"tiny": engine}, codec)
    await service.start()
    session_id = await service.create_session("me", sdk_version="0.38.0")
    promise = await service.submit("me", CreateModel(session_id, 0, "tiny"), "create_model", body)
    outcome = await service.retrieve("me", promise.request_id, timeout=25.0)
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence

from trimtab.errors import Invalid, NotFound, Stopping, TrimtabError, UserError
from trimtab.service import ids, restart, sweep
from trimtab.service.clock import steady
from trimtab.service.custom_orders import CustomOrders
from trimtab.service.direct import Direct, Drawable, Drawing
from trimtab.service.keeping import Keeping
from trimtab.service.listing import Listing
from trimtab.service.orders import Orders
from trimtab.service.parts import join
from trimtab.service.records import (
    CheckpointRecord,
    Codec,
    Completion,
    Completions,
    Engine,
    ModelRecord,
    Outcome,
    Promise,
    SamplerRecord,
)
from trimtab.service.sampling import Sampling
from trimtab.service.sequences import Held
from trimtab.service.settings import ServiceSettings
from trimtab.service.space import Space
from trimtab.service.store import Store
from trimtab.service.usage import Usage
from trimtab.types import BaseModelInfo, CreateCustomLoss, Request, Sample, UnloadModel

__all__ = [
    "CheckpointRecord",
    "Codec",
    "Completion",
    "Completions",
    "Drawable",
    "Drawing",
    "Engine",
    "Held",
    "ModelRecord",
    "Outcome",
    "Promise",
    "SamplerRecord",
    "Service",
    "ServiceSettings",
    "Store",
]

log = logging.getLogger(__name__)


class Service:
    def __init__(
        self,
        settings: ServiceSettings,
        store: Store,
        engines: Mapping[str, Engine],
        codec: Codec,
        clock: Callable[[], float] | None = None,
    ) -> None:
        clock = steady(store) if clock is None else clock
        self._parts = join(settings, store, engines, codec, clock)
        self._orders = Orders(self._parts)
        self._sampling = Sampling(self._parts)
        self._customs = CustomOrders(self._parts)
        self.listing = Listing(self._parts)
        self.keeping = Keeping(self._parts)
        self.usage = Usage(self._parts)
        self._direct = Direct(self._parts, self._sampling)
        self._space = Space(store.data_dir, settings.min_free_bytes)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._storage_at = clock()

    # ---- life of the service

    async def start(self) -> None:
        """Start the samplers, settle what a previous process left unfinished, begin sweeping."""
        for engine in self._parts.engines.values():
            engine.sampler.start()
        self._parts.lanes.start()
        pending = await restart.recover(self._parts, self._orders, self._customs)
        self._tasks = [
            asyncio.create_task(restart.resume(self._parts, self._sampling, pending)),
            asyncio.create_task(self._sweep_forever()),
        ]

    async def stop(self) -> None:
        """Engines stop at their next micro-batch or decode step; what is pending stays journalled
        as pending; the store is closed. Returns within 10 s."""
        if self._stopping:
            return
        self._stopping = True
        parts, seconds = self._parts, self._parts.settings.stop_seconds
        for task in self._tasks:
            task.cancel()
        parts.futures.release()
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Future[None]] = []
        for engine in parts.engines.values():
            engine.learner.stop()
            ends.append(loop.run_in_executor(None, engine.sampler.stop))
        ends.append(asyncio.ensure_future(parts.lanes.stop(seconds)))
        done, _ = await asyncio.wait(ends, timeout=seconds + 1.0)
        for error in filter(None, (end.exception() for end in done)):
            log.error("an engine did not stop well", exc_info=error)
        await self._sampling.drain(1.0)
        await parts.snapshots.stop(1.0)
        parts.futures.release()
        parts.pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(parts.store.close)

    async def sweep(self) -> None:
        """Fail what waits for an id that never came, end sessions that fell silent, drop what is
        past its time. Runs by itself once a second."""
        parts = self._parts
        for session in parts.sessions.expired():
            await self._end(session.session_id, "expired", "no heartbeat", None)
        await parts.lanes.sweep()
        await sweep.sweep_sequences(parts)
        if parts.clock() - self._storage_at >= parts.settings.storage_seconds:
            self._storage_at = parts.clock()
            await sweep.sweep_storage(parts)

    async def _sweep_forever(self) -> None:
        while not self._stopping:
            await asyncio.sleep(self._parts.settings.sweep_seconds)
            try:
                await self.sweep()
            except (OSError, TrimtabError, sqlite3.Error):  # a full disk; the next sweep may do
                log.exception("a sweep failed")

    def models(self) -> tuple[BaseModelInfo, ...]:
        return tuple(engine.info for engine in self._parts.engines.values())

    def held(self) -> Held:
        """What the registry of sequences holds."""
        return self._parts.sequences.held()

    def _running(self) -> None:
        if self._stopping:
            raise Stopping("the server is stopping; what is pending stays journalled")

    # ---- sessions

    async def create_session(
        self,
        owner: str,
        *,
        idempotency_key: str | None = None,
        tags: tuple[str, ...] = (),
        user_metadata: Mapping[str, str] | None = None,
        sdk_version: str = "",
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> str:
        """A new session's id (uuid4); the same id again for an idempotency key seen before."""
        self._running()
        return await self._parts.sessions.create(
            owner,
            idempotency_key=idempotency_key,
            tags=tags,
            user_metadata=user_metadata or {},
            sdk_version=sdk_version,
            project_id=project_id,
            display_name=display_name,
        )

    async def heartbeat(self, owner: str, session_id: str) -> None:
        """Keep a session alive. Gone for a finished or expired one."""
        self._running()
        self._parts.sessions.heartbeat(owner, session_id)

    async def finish_session(
        self, owner: str, session_id: str, reason: str, detail: str | None = None
    ) -> None:
        """End a session; the first reason wins, later operations are refused. Its models finish
        what can still run and are unloaded."""
        self._running()
        if not self._parts.sessions.owned(owner, session_id):
            raise NotFound(f"session {session_id!r} is unknown")
        await self._end(session_id, "finished", reason, detail)

    async def _end(self, session_id: str, state: str, reason: str, detail: str | None) -> None:
        if not await self._parts.sessions.end(session_id, state, reason, detail):
            return
        for model in self._parts.models.of_session(session_id):
            await self._orders.lives.unload(model, f"its session {state} ({reason})")

    # ---- requests with a future

    async def submit(self, owner: str, request: Request, kind: str, body: bytes) -> Promise:
        """Journal a request and queue it. A resend joins its first promise (or raises its first
        Invalid again); another body under a used id is Invalid."""
        self._running()
        if not isinstance(request, UnloadModel):
            self._space.check()
        if isinstance(request, Sample):
            return await self._sampling.submit(owner, request, body)
        if isinstance(request, CreateCustomLoss):
            return await self._customs.submit(owner, request, body)
        return await self._orders.submit(owner, request, kind, body)

    async def reject(  # noqa: PLR0917 (all six say what was refused)
        self, owner: str, kind: str, key: str, seq_id: int, why: UserError, body: bytes
    ) -> Promise:
        """Use up (key, seq_id) as a failed request; key is a model or sampling session. Raises
        `why`, or promises its failure for a request that came before another (see Lanes.early)."""
        self._running()
        room = self._sampling if kind == "sample" else self._orders
        return await room.reject(owner, kind, key, seq_id, why=why, body=body)

    async def retrieve(self, owner: str, request_id: str, timeout: float) -> Outcome:
        """Wait up to `timeout` seconds. NotFound: never existed; Gone: no longer kept."""
        self._running()
        return await self._parts.futures.wait(owner, request_id, timeout)

    async def retrieve_many(  # noqa: PLR0917 (the fields of the poll, in its order)
        self,
        owner: str,
        sampling_session_id: str,
        cloned_sampler_id: int,
        prev_cursor: int,
        timeout: float | None = None,
        retrieved_request_ids: Sequence[str] = (),
    ) -> Completions:
        """Sample requests of one client finished after `prev_cursor`; `timeout` None waits as long
        as the service holds a poll. Acknowledged results may be dropped."""
        self._running()
        self._parts.samplers.get(owner, sampling_session_id)
        ids.check_seq("cloned_sampler_id", cloned_sampler_id)
        ids.check_seq("prev_cursor", prev_cursor)
        if retrieved_request_ids:
            await self._parts.futures.ack(sampling_session_id, retrieved_request_ids)
        hold = self._parts.settings.hold_seconds if timeout is None else timeout
        return await self._parts.futures.wait_many(
            sampling_session_id, cloned_sampler_id, prev_cursor, hold
        )

    async def cancel(self, owner: str, request_id: str) -> None:
        """Stop a sample request; one that is finished stays as it is."""
        self._running()
        if self._parts.futures.kind(owner, request_id) != "sample":
            raise Invalid(f"request {request_id!r} is not a sample; only samples can be cancelled")
        self._sampling.cancel(request_id)

    # ---- for a caller that waits on the line

    def drawable(self, owner: str, model: str) -> Drawable:
        """The base model or sampler checkpoint of that name, as far as this owner may read it."""
        self._running()
        return self._direct.find(owner, model)

    async def draw(self, owner: str, model: Drawable, requests: Sequence[Sample]) -> Drawing:
        """Tokens as they are drawn, recorded nowhere, counted in usage."""
        self._running()
        self._space.check()
        return await self._direct.draw(owner, model, requests)

    # ---- sampling sessions, models, checkpoints

    async def create_sampling_session(
        self,
        owner: str,
        session_id: str,
        sampling_session_seq_id: int,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> str:
        self._running()
        return await self._sampling.create_session(
            owner, session_id, sampling_session_seq_id, base_model, model_path
        )

    async def get_sampler(self, owner: str, sampling_session_id: str) -> SamplerRecord:
        return self._parts.samplers.get(owner, sampling_session_id).record

    async def join_sampling_session(self, owner: str, sampling_session_id: str) -> int:
        """1, 2, ...: a number no other client of this sampling session was given."""
        self._running()
        sampler = self._parts.samplers.get(owner, sampling_session_id)
        self._parts.sessions.get(owner, sampler.session_id)
        return await self._parts.samplers.join(sampling_session_id)

    async def get_info(self, owner: str, model_id: str) -> ModelRecord:
        return self._parts.models.get(owner, model_id).record

    async def weights_info(self, owner: str, tinker_path: str) -> CheckpointRecord:
        return self._parts.checkpoints.get(owner, tinker_path).record
