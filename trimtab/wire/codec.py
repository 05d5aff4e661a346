"""The one value service is handed to read and write bodies with, and what wire itself needs to find
out about a body it cannot read. The whole of what an SDK bump touches is `decode` and `encode`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import orjson
import zstandard

from trimtab.errors import Invalid, TooLarge, UserError
from trimtab.types import Request, Result
from trimtab.wire import encode
from trimtab.wire.decode import DECODERS
from trimtab.wire.tensors import Budget

# Which fields name the queue a body belongs to: a bad body uses up its place there.
KEYS = {
    "forward_backward": "model_id",
    "optim_step": "model_id",
    "save_weights": "model_id",
    "save_weights_for_sampler": "model_id",
    "save_weights_external": "model_id",
    "load_weights": "model_id",
    "sample": "sampling_session_id",
}
_SLICE = 1024  # compressed bytes at a time: at worst 32 MiB come out of one slice


@dataclass(frozen=True, slots=True)
class WireCodec:
    """Implements service's Codec. `max_bytes` bounds what a body may unfold into.

    `WireCodec().decode("optim_step", b'{"model_id":"S:train:0","seq_id":2,"adam_params":{}}')`
    gives `OptimStep("S:train:0", 2, AdamParams())`.
    """

    max_bytes: int = 128 * 2**20

    def decode(self, kind: str, body: bytes) -> Request:
        return DECODERS[kind](body, Budget(self.max_bytes))

    def encode(self, result: Result) -> tuple[bytes, str]:
        return encode.encode(result)


# ------------------------------------------------------------------ compressed bodies


def inflate(body: bytes, encoding: str, limit: int) -> tuple[bytes, UserError | None]:
    """A body as it was before its Content-Encoding, or what came out of it before the error."""
    if encoding in ("", "identity"):
        return body, None
    if encoding != "zstd":
        return b"", Invalid(f"Content-Encoding: {encoding!r} is neither zstd nor identity")
    return _unzstd(body, limit)


def _unzstd(body: bytes, limit: int) -> tuple[bytes, UserError | None]:
    too_large = TooLarge(f"body: more than {limit} bytes after decompression")
    stream = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    parts: list[bytes] = []
    size = 0
    try:
        for start in range(0, len(body), _SLICE):
            parts.append(stream.decompress(body[start : start + _SLICE]))
            size += len(parts[-1])
            if size > limit:
                return b"".join(parts)[:limit], too_large
            if stream.eof:
                break
    except (zstandard.ZstdError, zlib.error) as error:
        return b"".join(parts), Invalid(f"body: broken zstd ({error})")
    if not stream.eof:
        return b"".join(parts), Invalid("body: broken zstd (it ends in the middle of a frame)")
    if stream.unused_data or start + _SLICE < len(body):
        return b"".join(parts), Invalid("body: broken zstd (bytes follow its frame)")
    return b"".join(parts), None


# ------------------------------------------------------------------ what a bad body was meant for


def place(kind: str, body: bytes) -> tuple[str, int] | None:
    """The queue and seq_id of a body that cannot be decoded, where they can still be read."""
    if kind not in KEYS:
        return None
    key, seq_id = _proto_place(body) if kind == "forward_backward" else _json_place(kind, body)
    if isinstance(key, str) and type(seq_id) is int and 0 <= seq_id < 2**63:
        return key, seq_id
    return None


def _json_place(kind: str, body: bytes) -> tuple[object, object]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None, None
    if not isinstance(fields, dict):
        return None, None
    return fields.get(KEYS[kind]), fields.get("seq_id")


def _proto_place(body: bytes) -> tuple[object, object]:
    """Fields 1 (text) and 2 (varint), which writers put first, however the rest is broken."""
    try:
        at = _expect(body, 0, tag=1 << 3 | 2)
        size, at = _varint(body, at)
        key = body[at : at + size].decode()
        at = _expect(body, at + size, tag=2 << 3 | 0)
        seq_id, _ = _varint(body, at)
    except (IndexError, UnicodeDecodeError):
        return None, None
    return key, seq_id


def _expect(body: bytes, at: int, tag: int) -> int:
    if body[at] != tag:
        raise IndexError
    return at + 1


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError
