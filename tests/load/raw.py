"""A client that costs little: HTTP/1.1 on asyncio streams, so that what is measured is the server.

It says what the SDK says on the wire, without the SDK's threads and models. Knows the few calls
that loads are made of.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any

import numpy as np

from trimtab.wire import trimtab_pb2 as pb

KEY = "tml-local"
MODEL = "org/tiny"
Json = dict[str, Any]


class Connection:
    """One connection, opened at the first call, one call at a time."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self._key = key
        host, _, port = url.removeprefix("http://").partition(":")
        self._at = host, int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.close()

    async def close(self) -> None:
        if self._streams is not None:
            writer = self._streams[1]
            self.vanish()
            await writer.wait_closed()

    def vanish(self) -> None:
        """Close without a word."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def send(
        self, route: str, body: bytes, content: str = "application/json"
    ) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._at)
        reader, writer = self._streams
        head = (
            f"POST /api/v1/{route} HTTP/1.1\r\nHost: x\r\nX-API-Key: {self._key}\r\n"
            f"Content-Type: {content}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.vanish()
        return int(lines[0].split()[1]), answer

    async def post(self, route: str, **fields: Any) -> Json:
        status, body = await self.send(route, json.dumps(fields).encode())
        assert status == 200, (route, status, body)
        return dict(json.loads(body))

    async def outcome(self, request_id: str) -> bytes:
        """Poll until there is one, a result or an error."""
        ask = json.dumps({"request_id": request_id}).encode()
        while (found := await self.send("retrieve_future", ask))[0] == 408:
            pass
        assert found[0] == 200, found
        return found[1]

    async def result(self, request_id: str) -> bytes:
        """Poll until there is one; AssertionError where the request failed."""
        body = await self.outcome(request_id)
        assert not body.startswith(b'{"error"'), body
        return body

    # ---- the calls of a session

    async def session(self) -> str:
        return str((await self.post("create_session", sdk_version="0.38.0"))["session_id"])

    async def model(self, session: str, number: int = 0, rank: int = 4) -> str:
        made = await self.post(
            "create_model", session_id=session, model_seq_id=number, base_model=MODEL,
            lora_config={"rank": rank, "seed": number},
        )  # fmt: skip
        await self.result(made["request_id"])
        return str(made["model_id"])

    async def sampler(self, session: str, number: int = 0) -> str:
        made = await self.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=number,
            base_model=MODEL,
        )  # fmt: skip
        return str(made["sampling_session_id"])

    async def forward_backward(
        self, model: str, seq_id: int, *, forward_only: bool = False, rows: int = 8
    ) -> str:
        body = cross_entropy(model, seq_id, forward_only, rows)
        status, answer = await self.send("forward_backward", body, "application/x-protobuf")
        assert status == 200, answer
        return str(json.loads(answer)["request_id"])

    async def optim_step(self, model: str, seq_id: int) -> str:
        adam = {"learning_rate": 1e-3}
        made = await self.post("optim_step", model_id=model, seq_id=seq_id, adam_params=adam)
        return str(made["request_id"])

    async def sample(self, sampler: str, seq_id: int, max_tokens: int = 1) -> str:
        made = await self.post(
            "asample", sampling_session_id=sampler, seq_id=seq_id,
            prompt={"chunks": [{"tokens": [5, 6]}]},
            sampling_params={"max_tokens": max_tokens, "stop": []},
        )  # fmt: skip
        return str(made["request_id"])


def cross_entropy(model: str, seq_id: int, forward_only: bool, rows: int) -> bytes:
    """A request of one datum: predict 1, 2, 3, ... from 0, 1, 2, ..."""
    tokens = np.arange(rows, dtype="<i4").tobytes()
    targets = np.arange(1, rows + 1, dtype="<i8").tobytes()
    datum = pb.Datum(
        model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens))],
        loss_fn_inputs={"target_tokens": pb.Tensor(dense=targets, dtype=pb.DTYPE_INT64)},
    )
    return pb.ForwardBackwardRequest(
        model_id=model, seq_id=seq_id, data=[datum], loss_fn="cross_entropy",
        forward_only=forward_only,
    ).SerializeToString()  # fmt: skip


def quantile(values: list[float], q: float) -> float:
    """Of sorted values."""
    return values[round(q * (len(values) - 1))]
