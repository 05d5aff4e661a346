"""Samples: ids and seed at submit, tokens from the sampler, record and result in one transaction.

Samples have no order; their ids are (sampling session, seq_id). Every sequence is recorded, with
its head where the client records stability, so that a claim made of it later can be checked.
Knows no spans and no tokens' meaning.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sqlite3
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace

from trimtab.engine.base import SampleWork
from trimtab.errors import Busy, Invalid, Stopping, TrimtabError, UserError
from trimtab.service import ids, ledger
from trimtab.service.futures import CANCELLED, Entry, SqlWrite
from trimtab.service.parts import Parts
from trimtab.service.publish import BASE
from trimtab.service.records import Promise, SamplerRecord
from trimtab.service.samplers import SamplingSession
from trimtab.service.sequences import recorded
from trimtab.types import Drawn, Sample, SampleResult

log = logging.getLogger(__name__)
RETRY = 0.2  # seconds between tries to put a journalled sample back into a full queue


class Sampling:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._running: dict[str, Future[SampleResult]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- sampling sessions

    async def create_session(
        self, owner: str, session_id: str, number: int, base_model: str | None, path: str | None
    ) -> str:
        parts = self._parts
        parts.sessions.get(owner, session_id)
        ids.check_seq("sampling_session_seq_id", number)
        if base_model is None and path is None:
            raise Invalid("create_sampling_session takes base_model or model_path, and has neither")
        target = BASE
        if path is not None:
            found = parts.checkpoints.get(owner, path, "sampler_weights")
            held = found.record.base_model
            if base_model not in (None, held):
                raise Invalid(f"base_model: {base_model!r}; model_path is a checkpoint of {held!r}")
            base_model, target = held, found.version or ""
        if base_model is None or base_model not in parts.engines:
            allowed = ", ".join(sorted(parts.engines))
            raise Invalid(f"base_model {base_model!r} is not served here; allowed are {allowed}")
        record = SamplerRecord(ids.sampler_id(session_id, number), base_model, path)
        sampler = SamplingSession(record, session_id, owner, target)
        return await parts.samplers.create(sampler, parts.clock())

    # ---- submitting

    async def submit(self, owner: str, request: Sample, body: bytes) -> Promise:
        parts = self._parts
        sampler = parts.samplers.get(owner, request.sampling_session_id)
        parts.sessions.get(owner, sampler.session_id)
        ids.check_seq("seq_id", request.seq_id)
        drawn = request.params.seed is None
        entry = self._entry(
            sampler,
            request.seq_id,
            digest=hashlib.sha256(body).digest(),
            body=body,
            seed=secrets.randbits(63) if drawn else request.params.seed,
            samples=max(request.num_samples, 0),
        )
        return await parts.futures.once(entry, lambda: self._accept(entry, sampler, request))

    def _entry(
        self,
        sampler: SamplingSession,
        seq_id: int,
        *,
        digest: bytes,
        body: bytes = b"",
        seed: int | None = None,
        samples: int = 0,
    ) -> Entry:
        return Entry(
            request_id=ids.request_id(sampler.record.sampler_id, seq_id),
            kind="sample",
            owner=sampler.owner,
            session_id=sampler.session_id,
            key=sampler.record.sampler_id,
            seq_id=seq_id,
            digest=digest,
            body=body,
            seed=seed,
            samples=samples,
        )

    async def _accept(self, entry: Entry, sampler: SamplingSession, request: Sample) -> Promise:
        parts = self._parts
        self._room()
        try:
            self._check(sampler, request)
            await self._publish(sampler)
        except UserError as error:
            await parts.futures.open_failed(entry, error.message, error.category, error.status)
            raise
        future = self._draw(entry, sampler, request)
        journalled = False
        try:
            await parts.futures.open(entry)
            journalled = True
        finally:
            if not journalled:
                self._running.pop(entry.request_id, None)
                future.cancel()
        self._watch(entry, request, future)
        return entry.promise

    def _room(self) -> None:
        if len(self._running) >= self._parts.settings.max_pending_samples:
            raise Busy(f"{len(self._running)} sample requests are waiting; try again")

    def _check(self, sampler: SamplingSession, request: Sample) -> None:
        base, most = sampler.record.base_model, self._parts.settings.max_samples
        if base not in self._parts.engines:
            raise Invalid(f"base_model {base!r} of this sampling session is not served any more")
        if not 1 <= request.num_samples <= most:
            raise Invalid(f"num_samples must lie between 1 and {most}, found {request.num_samples}")
        self._parts.engines[base].sampler.check(request)

    async def _publish(self, sampler: SamplingSession) -> None:
        """See that the target can be sampled from; after a restart, or a long pause, it is read
        back from disk."""
        publisher, base = self._parts.publisher, sampler.record.base_model
        while not publisher.ready(base, sampler.target):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._parts.pool, publisher.ensure, base, sampler.target)

    def _draw(
        self, entry: Entry, sampler: SamplingSession, request: Sample
    ) -> Future[SampleResult]:
        """Queue the work. Nothing is journalled yet: a full queue (Busy) leaves no trace."""
        engine = self._parts.engines[sampler.record.base_model]
        k = min(self._parts.settings.head_k, engine.info.vocab_size)
        seeded = replace(request, params=replace(request.params, seed=entry.seed))
        head_k = k if request.record_stability_info else 0
        future = engine.sampler.submit(SampleWork(seeded, sampler.target, head_k, sampler.owner))
        self._running[entry.request_id] = future
        return future

    async def draw_aside(
        self, sampler: SamplingSession, request: Sample, on_token: Callable[[Drawn], None]
    ) -> Future[SampleResult]:
        """A sample without journal and record: checked, bounded and queued like the others. Its
        seed is set; `on_token` is called on the sampler's thread."""
        self._room()
        self._check(sampler, request)
        await self._publish(sampler)
        work = SampleWork(request, sampler.target, owner=sampler.owner, on_token=on_token)
        future = self._parts.engines[sampler.record.base_model].sampler.submit(work)
        key = f"aside:{secrets.token_hex(8)}"
        self._running[key] = future
        future.add_done_callback(lambda _: self._running.pop(key, None))
        return future

    def keep(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """A task that `drain` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def reject(
        self, owner: str, kind: str, sampler_id: str, seq_id: int, *, why: UserError, body: bytes
    ) -> Promise:
        """Use up a seq_id whose body could not be read, and raise `why`."""
        sampler = self._parts.samplers.get(owner, sampler_id)
        self._parts.sessions.get(owner, sampler.session_id)
        if not 0 <= seq_id <= ids.MAX_SEQ:
            raise why
        entry = self._entry(sampler, seq_id, digest=hashlib.sha256(body).digest())

        async def accept() -> Promise:
            await self._parts.futures.open_failed(entry, why.message, why.category, why.status)
            raise why

        return await self._parts.futures.once(entry, accept)

    # ---- finishing

    def _watch(self, entry: Entry, request: Sample, future: Future[SampleResult]) -> None:
        loop = asyncio.get_running_loop()

        def done(future: Future[SampleResult]) -> None:
            loop.call_soon_threadsafe(self._spawn, entry, request, future)

        future.add_done_callback(done)

    def _spawn(self, entry: Entry, request: Sample, future: Future[SampleResult]) -> None:
        self.keep(self._finish(entry, request, future))

    async def _finish(self, entry: Entry, request: Sample, future: Future[SampleResult]) -> None:
        futures = self._parts.futures
        self._running.pop(entry.request_id, None)
        if future.cancelled():
            await futures.fail(entry, CANCELLED, "user")
            return
        if future.exception() is None:
            packing = self._parts.pool.submit(self._pack, entry, request, future.result())
            await asyncio.wait([asyncio.wrap_future(packing)])
            if packing.exception() is None:
                body, content_type, record = packing.result()
                await futures.finish(entry, body, content_type, (record,))
                return
            future_error = packing.exception()
        else:
            future_error = future.exception()
        await self._fail(entry, future_error)

    async def _fail(self, entry: Entry, error: BaseException | None) -> None:
        if isinstance(error, Stopping):
            return  # it stays pending in the journal
        if isinstance(error, TrimtabError):
            await self._parts.futures.fail(entry, error.message, error.category)
            return
        log.error("sample %s failed", entry.request_id, exc_info=error)
        text = f"internal error: {type(error).__name__}: {error}"
        await self._parts.futures.fail(entry, text, "server")

    def _pack(
        self, entry: Entry, request: Sample, result: SampleResult
    ) -> tuple[bytes, str, SqlWrite]:
        """The result as it will be sent, and the write that records its sequences."""
        now = self._parts.clock()
        if len(result.sequences) != entry.samples:
            raise ValueError(f"{len(result.sequences)} sequences for {entry.samples} samples")
        record = recorded(
            entry.request_id,
            entry.session_id,
            request,
            result.sequences,
            [self._parts.publisher.runs(sequence) for sequence in result.sequences],
            now=now,
            expires_at=now + self._parts.settings.sequence_seconds,
        )
        used = self._used(entry, request, result, now)

        def write(db: sqlite3.Connection) -> None:
            record(db)
            used(db)

        return (*self._parts.codec.encode(result), write)

    def _used(self, entry: Entry, request: Sample, result: SampleResult, now: float) -> SqlWrite:
        sampler = self._parts.samplers.find(entry.key)  # `get` is the loop's
        assert sampler is not None
        hits = result.prompt_cache_hit_tokens
        amounts = {
            ledger.PREFILL: len(request.prompt) - hits,
            ledger.CACHED: hits,
            ledger.SAMPLED: sum(len(sequence.tokens) for sequence in result.sequences),
        }
        return ledger.counted(
            entry.owner, entry.session_id, sampler.record.base_model, amounts, now
        )

    def cancel(self, request_id: str) -> None:
        future = self._running.get(request_id)
        if future is not None:
            future.cancel()

    # ---- after a restart

    async def resume(self, entry: Entry, body: bytes) -> None:
        """Draw a journalled sample again, with its journalled seed."""
        try:
            request = self._parts.codec.decode("sample", body)
            assert isinstance(request, Sample)
            sampler = self._parts.samplers.get(entry.owner, request.sampling_session_id)
            self._check(sampler, request)
            await self._publish(sampler)
            future = await self._draw_when_free(entry, sampler, request)
        except UserError as error:
            await self._parts.futures.fail(entry, error.message, error.category)
            return
        self._watch(entry, request, future)

    async def _draw_when_free(
        self, entry: Entry, sampler: SamplingSession, request: Sample
    ) -> Future[SampleResult]:
        while True:
            try:
                return self._draw(entry, sampler, request)
            except Busy:
                await asyncio.sleep(RETRY)

    async def drain(self, seconds: float) -> None:
        """Wait for results that are being written."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
