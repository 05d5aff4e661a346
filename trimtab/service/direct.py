"""Samples for a caller that waits on the line, token by token.

Checked, queued and bounded like every other sample and counted in usage; but no session holds them,
nothing is journalled, and no sequence is recorded: they can't be trained on. When the caller leaves
they are cancelled, and what was drawn until then is counted. Knows no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from trimtab.errors import NotFound, ServerError, TrimtabError
from trimtab.service import ledger, paths
from trimtab.service.parts import Parts
from trimtab.service.publish import BASE
from trimtab.service.records import SamplerRecord
from trimtab.service.samplers import SamplingSession
from trimtab.service.sampling import Sampling
from trimtab.types import BaseModelInfo, Drawn, Sample, SampleResult, Text

SESSION = "openai"  # stands in usage where a session's id would


@dataclass(frozen=True, slots=True)
class Drawable:
    """What a model's name means to this owner. `created_at` is a checkpoint's, else 0."""

    info: BaseModelInfo
    text: Text | None
    sampler: SamplingSession
    created_at: float = 0.0


class Drawing:
    """Requests being drawn. Iterating gives (number of the request, token) as they come; it raises
    what the first of them fails with. Close it, whatever happened."""

    def __init__(self, direct: Direct, owner: str, model: Drawable) -> None:
        self._direct = direct
        self._owner = owner
        self._model = model
        self._requests: list[Sample] = []
        self._futures: list[Future[SampleResult]] = []
        self._tokens: deque[tuple[int, Drawn]] = deque()
        self._drawn: dict[int, int] = {}  # request: tokens so far
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def add(self, request: Sample) -> None:
        """Queue a request. Invalid or Busy, as for any sample."""
        tell = partial(self._tell, len(self._requests))
        future = await self._direct.sampling.draw_aside(self._model.sampler, request, tell)
        self._requests.append(request)
        self._futures.append(future)
        future.add_done_callback(lambda _: self._wake())

    def _tell(self, number: int, drawn: Drawn) -> None:
        """On the sampler's thread. One call to the loop for all that lies unread."""
        self._drawn[number] = self._drawn.get(number, 0) + 1
        self._tokens.append((number, drawn))
        if len(self._tokens) == 1:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(self._news.set)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Drawn]]:
        while True:
            self._news.clear()
            over = all(future.done() for future in self._futures)  # then no token comes after
            while self._tokens:
                yield self._tokens.popleft()
            for future in self._futures:
                if future.done() and not future.cancelled() and future.exception() is not None:
                    raise told(future.exception())
            if over:
                return
            await self._news.wait()

    async def close(self) -> None:
        """Stop what still runs and count what was drawn, once."""
        for future in self._futures:
            future.cancel()
        amounts = self._amounts()
        self._futures.clear()
        if amounts:
            await asyncio.shield(self._direct.count(self._owner, self._model, amounts))

    def _amounts(self) -> dict[str, int]:
        drawn = dict(self._drawn)
        prompts = sum(len(self._requests[number].prompt) for number in drawn)
        done = [
            f.result()
            for f in self._futures
            if f.done() and not f.cancelled() and not f.exception()
        ]
        hits = sum(result.prompt_cache_hit_tokens for result in done)
        if not drawn or not self._futures:
            return {}
        return {
            ledger.PREFILL: prompts - hits,
            ledger.CACHED: hits,
            ledger.SAMPLED: sum(drawn.values()),
        }


class Direct:
    def __init__(self, parts: Parts, sampling: Sampling) -> None:
        self._parts = parts
        self.sampling = sampling

    def find(self, owner: str, model: str) -> Drawable:
        """A base model, or a sampler checkpoint that this owner may read. NotFound otherwise."""
        engines, base_model = self._parts.engines, model
        target, path, created_at = BASE, None, 0.0
        if model.startswith(paths.SCHEME):
            found = self._parts.checkpoints.get(owner, model, "sampler_weights")
            base_model, created_at = found.record.base_model, found.record.created_at
            target, path = found.version or "", model
        if base_model not in engines:
            allowed = ", ".join(sorted(engines))
            raise NotFound(
                f"model {base_model[:300]!r} is not served here; allowed are {allowed}, and"
                " tinker://…/sampler_weights/… paths"
            )
        engine = engines[base_model]
        sampler = SamplingSession(SamplerRecord("", base_model, path), SESSION, owner, target)
        return Drawable(engine.info, engine.text, sampler, created_at)

    async def draw(self, owner: str, model: Drawable, requests: Sequence[Sample]) -> Drawing:
        """Queue these requests, all or none; one without a seed gets one."""
        drawing = Drawing(self, owner, model)
        queued = False
        try:
            for request in requests:
                await drawing.add(_seeded(request))
            queued = True
        finally:
            if not queued:
                await drawing.close()
        return drawing

    def count(self, owner: str, model: Drawable, amounts: dict[str, int]) -> asyncio.Task[None]:
        """Write a count; the service waits for it when it stops."""
        now = self._parts.clock()
        write = ledger.counted(owner, SESSION, model.info.name, amounts, now)

        async def written() -> None:
            await self._parts.store.write(write)

        return self.sampling.keep(written())


def _seeded(request: Sample) -> Sample:
    if request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=secrets.randbits(63)))


def told(error: BaseException | None) -> TrimtabError:
    """What a future failed with, as one of ours."""
    if isinstance(error, TrimtabError):
        return error
    return ServerError(f"internal error: {type(error).__name__}: {error}")
