"""One HTTP call as a handler sees it, and the gate all calls pass. Knows no route.

The gate is shut while models load and again once the server stops: nothing reaches service then,
and long polls that are held end at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from trimtab.errors import Stopping, TooLarge, UserError
from trimtab.service.core import Service
from trimtab.service.keys import Keys
from trimtab.wire.access import Access, Caller
from trimtab.wire.codec import WireCodec, inflate
from trimtab.wire.fields import Fields
from trimtab.wire.turnstile import Turnstile

T = TypeVar("T")

CALLS_A_TURN = 8  # let in between two looks at the sockets; each takes about a millisecond
_INLINE = 64 * 2**10  # larger bodies are read on a worker thread


@dataclass(frozen=True, slots=True)
class WireSettings:
    """What the composition root decides for this room. `api_keys` and `keys` are the keys that
    open it (see `access.py`); with `jwt_auth` the client exchanges its key for a token.
    `tokenizer_ids` names a tokenizer by base model, where the base model's own name would not find
    it; `mirror` finds the folder of a repository whose tokenizer is given out."""

    api_keys: tuple[str, ...] = ()
    keys: Keys | None = None
    jwt_auth: bool = False
    max_body_bytes: int = 128 * 2**20
    hold_seconds: float = 25.0
    inline_result_bytes: int = 2**20
    chunk_datums: int = 1024
    max_concurrent_samples: int = 1000
    compress: bool = False
    tokenizer_ids: Mapping[str, str] = field(default_factory=dict)
    mirror: Callable[[str], Path | None] = lambda repo: None


class Gate:
    """Holds the service between `open` and `close`."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self.closing = asyncio.Event()
        self.turnstile = Turnstile(CALLS_A_TURN)

    def open(self, service: Service) -> None:
        self._service = service

    def close(self) -> None:
        self._service = None
        self.closing.set()

    @property
    def service(self) -> Service:
        if self._service is None:
            stops = self.closing.is_set()
            raise Stopping(
                "the server is stopping" if stops else "the server is loading its models"
            )
        return self._service


class ClientLeft(Exception):
    """The connection closed while its answer was waited for; there is nobody to tell."""


@dataclass(slots=True)
class Call:
    """A request whose key has been checked. `body` is as it came, still compressed if it was."""

    request: Request
    gate: Gate
    service: Service
    settings: WireSettings
    codec: WireCodec
    access: Access
    caller: Caller
    body: bytes = b""

    @property
    def owner(self) -> str:
        return self.caller.owner

    @property
    def path(self) -> dict[str, str]:
        return self.request.path_params

    def fields(self) -> Fields:
        """The JSON object in the body; an empty body is an empty object."""
        return Fields.parse(self.body or b"{}")

    async def inflated(self) -> tuple[bytes, UserError | None]:
        """The body as it was before its Content-Encoding; see `codec.inflate`."""
        encoding = self.request.headers.get("content-encoding", "").lower()
        if not encoding:
            return self.body, None
        limit = self.settings.max_body_bytes
        return await asyncio.to_thread(inflate, self.body, encoding, limit)

    async def aside(self, function: Callable[[str, bytes], T], kind: str, body: bytes) -> T:
        """Read `body`, on a worker thread where it is large enough to hold the loop up."""
        if len(body) < _INLINE:
            return function(kind, body)
        return await asyncio.to_thread(function, kind, body)

    async def held(self, work: Coroutine[Any, Any, T]) -> T:
        """A long poll: the answer, or an end as soon as the client leaves or the server stops."""
        answer = asyncio.ensure_future(work)
        left = asyncio.ensure_future(self._left())
        closing = asyncio.ensure_future(self.gate.closing.wait())
        try:
            await asyncio.wait({answer, left, closing}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ClientLeft if left.done() else Stopping("the server is stopping")
        finally:
            for task in (answer, left, closing):
                task.cancel()

    async def _left(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass


# ------------------------------------------------------------------ answers


def answer(content: object, status: int = 200) -> Response:
    """A JSON answer, whole and with its length."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def failure(status: int, detail: str) -> Response:
    """An error body. Never empty: a client takes an empty 400 for a proxy's and sends it again."""
    return answer({"detail": detail}, status)


# ------------------------------------------------------------------ what they send


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, refused unread on its length or as soon as the count passes the limit."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise TooLarge(f"body: {declared} bytes; the limit is {limit}")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLarge(f"body: more than {limit} bytes")
        parts.append(part)
    return b"".join(parts)
