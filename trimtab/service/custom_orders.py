"""The request that creates a custom loss: checked and done at once, and a future like any other.

Knows no graphs: a learner says which are allowed.
"""

from __future__ import annotations

import asyncio

from trimtab.errors import Busy, UserError
from trimtab.service import ids
from trimtab.service.customs import KIND, created
from trimtab.service.futures import Entry
from trimtab.service.parts import Parts
from trimtab.service.records import Promise
from trimtab.types import CreateCustomLoss, CreateCustomLossResult

MOST = 1_000  # custom losses a session may have


class CustomOrders:
    """Lives on the service's loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def submit(self, owner: str, request: CreateCustomLoss, body: bytes) -> Promise:
        parts, number = self._parts, request.custom_loss_seq_id
        ids.check_seq("custom_loss_seq_id", number)
        parts.sessions.get(owner, request.session_id)
        entry = Entry(
            request_id=f"{request.session_id}:loss:{number}",
            kind=KIND,
            owner=owner,
            session_id=request.session_id,
            key=request.session_id,
            seq_id=number,
            digest=ids.digest(request, body),
            body=body,
        )
        return await parts.futures.once(entry, lambda: self._accept(entry, request))

    async def _accept(self, entry: Entry, request: CreateCustomLoss) -> Promise:
        parts = self._parts
        try:
            await self._check(request)
        except UserError as error:
            await parts.futures.open_failed(entry, error.message, error.category, error.status)
            raise
        await parts.futures.open(entry)
        await self._store(entry, entry.body)
        return entry.promise

    async def _check(self, request: CreateCustomLoss) -> None:
        parts = self._parts
        if parts.customs.count(request.session_id) >= MOST:
            raise Busy(f"the session has {MOST} custom losses; allowed are that many")
        learner = next(iter(parts.engines.values())).learner
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(parts.pool, learner.check_custom, request.loss)

    async def _store(self, entry: Entry, body: bytes) -> None:
        result = CreateCustomLossResult(entry.request_id)
        encoded, content_type = self._parts.codec.encode(result)
        writes = [created(entry.request_id, entry.session_id, body)]
        await self._parts.futures.finish(entry, encoded, content_type, writes)

    async def resume(self, entry: Entry) -> None:
        """Finish what an earlier process accepted."""
        row = self._parts.store.row(
            "SELECT body FROM bodies WHERE request_id = ?", (entry.request_id,)
        )
        if row is None:
            await self._parts.futures.fail(entry, "the request's body is missing", "server")
        else:
            await self._store(entry, row["body"])
