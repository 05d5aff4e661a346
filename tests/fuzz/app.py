"""The real application over a real service and a tiny real engine, called without a socket.

One event loop, turned by `Runner`: everything happens while a request is being answered, so that a
fault belongs to what was just sent. Limits are small, so that passing them is cheap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from trimtab import tiny
from trimtab.config import ServerConfig
from trimtab.server import codec, load_engines, wire_settings
from trimtab.service.core import Service, ServiceSettings, Store
from trimtab.wire.app import create_app
from trimtab.wire.calls import Gate

T = TypeVar("T")
MODEL = "org/tiny"
KEY = b"tml-local"
SECONDS = 20.0  # what any answer may take, on a machine busy with other things
HOLD = 0.02
BASE = "/api/v1"


@dataclass(frozen=True, slots=True)
class Sent:
    """One HTTP request. `path` is as on the wire, percent-encoded; `cut` splits the body in two;
    `leaves`: the client goes once the body is sent (or, with a cut, in its middle)."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ((b"x-api-key", KEY),)
    cut: int | None = None
    leaves: bool = False

    def shown(self) -> str:
        body = self.body if len(self.body) < 400 else self.body[:400] + b"..."
        leaves = ", leaves" if self.leaves else ""
        return f"{self.method} {self.path} {self.headers} cut={self.cut}{leaves} {body!r}"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    seconds: float


class Errors(logging.Handler):
    """What the server logged as an error: it logs a traceback there for a fault of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@dataclass
class App:
    """`with_app(folder)` makes one. `run` turns the loop until a coroutine is done."""

    runner: asyncio.Runner
    service: Service
    app: Any
    store: Store
    errors: Errors
    told: set[str] = field(default_factory=set)  # failures that were reported already

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def send(self, sent: Sent) -> Answer:
        return self.run(call(self.app, sent))

    def close(self) -> None:
        self.run(self.service.stop())
        self.runner.close()
        logging.getLogger("trimtab").removeHandler(self.errors)


def with_app(folder: Path) -> App:
    """An application over new data in `folder`."""
    model = tiny.build(folder / "model", hidden=16, layers=1, heads=2, kv_heads=1, context=64)
    config = ServerConfig(
        model=(f"{MODEL}={model}",), data_dir=folder / "data", threads=1, max_body_mib=1,
        dtype="float32", sampler_dtype="float32", max_lora_rank=8,
    )  # fmt: skip
    settings = ServiceSettings(
        gap_seconds=0.0, sweep_seconds=0.05, hold_seconds=HOLD, max_datums=64, max_spans=256,
        max_models=8, max_sessions=64, max_pending_samples=64, max_parked=64, max_samples=16,
    )  # fmt: skip
    errors = Errors()
    logging.getLogger("trimtab").addHandler(errors)
    runner = asyncio.Runner()

    async def start() -> App:
        store = Store(config.data_dir)
        engines = load_engines(config, lambda what, done: None)
        service = Service(settings, store, engines, codec(config))
        gate = Gate()
        wire = replace(wire_settings(config), hold_seconds=HOLD)
        await service.start()
        gate.open(service)
        return App(runner, service, create_app(gate, wire, codec(config)), store, errors)

    return runner.run(start())


async def call(app: Any, sent: Sent) -> Answer:
    """Send a request through the ASGI application, as uvicorn would hand it on."""
    path, _, query = sent.path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": sent.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": list(sent.headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    coming = _messages(sent)
    answer: dict[str, Any] = {"body": b""}

    async def receive() -> dict[str, Any]:
        if coming:
            return coming.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert "status" not in answer, "two answers"
            answer.update(status=message["status"], headers=dict(message["headers"]))
        else:
            answer["body"] += message.get("body", b"")

    started = time.monotonic()
    await asyncio.wait_for(app(scope, receive, send), SECONDS)
    return Answer(answer["status"], answer["headers"], answer["body"], time.monotonic() - started)


def _messages(sent: Sent) -> list[dict[str, Any]]:
    parts: Sequence[bytes] = (sent.body,)
    if sent.cut is not None:
        parts = (sent.body[: sent.cut], sent.body[sent.cut :])
    if sent.leaves and len(parts) == 2:
        return [_part(parts[0], True), {"type": "http.disconnect"}]
    found = [_part(part, i + 1 < len(parts)) for i, part in enumerate(parts)]
    return [*found, {"type": "http.disconnect"}] if sent.leaves else found


def _part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}
