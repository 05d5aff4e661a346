"""Wrong protobuf made from right protobuf, field by field, below what a library would write.

A message is taken apart into nodes by its descriptor, one node is spoilt, and all is written again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
from google.protobuf.message import Message

from .mutate_json import spot

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
LARGE = (0, 1, 2, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Node:
    """A field: `inside` where its bytes are a message, `data` else (a varint's number as int).
    `size` lies about the length; `raw` is written in the place of everything."""

    number: int
    wire: int
    data: bytes | int = b""
    inside: tuple[Node, ...] | None = None
    size: int | None = None
    raw: bytes | None = None

    def written(self) -> bytes:
        if self.raw is not None:
            return self.raw
        tag = varint(self.number << 3 | self.wire)
        if self.inside is not None:
            data = b"".join(node.written() for node in self.inside)
            return tag + varint(len(data) if self.size is None else self.size) + data
        if isinstance(self.data, int):
            return tag + varint(self.data)
        if self.wire != BYTES:
            return tag + self.data
        return tag + varint(len(self.data) if self.size is None else self.size) + self.data


def varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def parsed(data: bytes, descriptor: Any) -> tuple[Node, ...]:
    """The fields of a well-formed message."""
    found, at = [], 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        field = descriptor.fields_by_number[number]
        if wire == VARINT:
            value, at = _varint(data, at)
            found.append(Node(number, wire, value))
        elif wire == BYTES:
            size, at = _varint(data, at)
            inner, at = data[at : at + size], at + size
            message = field.message_type
            inside = None if message is None else parsed(inner, message)
            found.append(Node(number, wire, inner, inside))
        else:
            width = 8 if wire == FIXED64 else 4
            found.append(Node(number, wire, data[at : at + width]))
            at += width
    return tuple(found)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def changed(message: Message, rng: Random) -> bytes:
    """The message's bytes with one field spoilt somewhere in it."""
    nodes = parsed(message.SerializeToString(), message.DESCRIPTOR)
    return b"".join(node.written() for node in _spoilt(nodes, rng))


def _spoilt(nodes: tuple[Node, ...], rng: Random) -> tuple[Node, ...]:
    if not nodes:
        return (_any_field(rng),)
    at = rng.randrange(len(nodes))
    node = nodes[at]
    if node.inside is not None and rng.randrange(5):
        return (*nodes[:at], replace(node, inside=_spoilt(node.inside, rng)), *nodes[at + 1 :])
    kind = rng.randrange(8)
    if kind == 0:
        return nodes[:at] + nodes[at + 1 :]
    if kind == 1:
        return (*nodes[:at], *[node] * rng.choice((2, 3, 70)), *nodes[at + 1 :])
    if kind == 2:
        return (*nodes[:at], _any_field(rng), *nodes[at:])
    if kind == 3:
        return (*nodes[at:], *nodes[:at])
    return (*nodes[:at], _wrong(node, rng), *nodes[at + 1 :])


def _any_field(rng: Random) -> Node:
    number = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 2**28, 2**29 - 1))
    wire = rng.randrange(8)
    return Node(number, wire, raw=varint(number << 3 | wire) + rng.randbytes(rng.randrange(12)))


def _wrong(node: Node, rng: Random) -> Node:
    kind = rng.randrange(6)
    if kind == 0:
        return replace(node, number=rng.choice((0, 1, 2, 3, 4, 5, 7, 99, 2**29 - 1)))
    if kind == 1:
        return replace(node, wire=rng.randrange(8))
    if kind == 2 and node.wire == BYTES:
        size = len(node.data) if isinstance(node.data, bytes) else 0
        return replace(node, size=rng.choice((max(0, size - 1), size + 1, *LARGE)))
    if kind == 3:  # deeper than any reader goes, or a number that never ends
        return Node(node.number, node.wire, raw=rng.choice((
            varint(node.number << 3 | 3) * 300,
            (varint(node.number << 3 | 2) + b"\x7f") * 300,
            varint(node.number << 3) + b"\xff" * 12,
            varint(node.number << 3),
        )))  # fmt: skip
    return replace(node, data=_data(node, rng), inside=None)


def _data(node: Node, rng: Random) -> bytes | int:
    if isinstance(node.data, int):
        return rng.choice((*LARGE, rng.getrandbits(64)))
    if node.wire != BYTES:
        specials = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-310, 1e300, 1.5, -1.0])
        return rng.choice(specials).tobytes() if node.wire == FIXED64 else rng.randbytes(4)
    return _packed(node.data, rng)


def _packed(data: bytes, rng: Random) -> bytes:
    """Arrays and texts: cut, lengthened, or with a value no one should send."""
    kind = rng.randrange(7)
    if kind == 0:
        return data[: spot(rng, len(data) + 1)]
    if kind == 1:
        return data + rng.randbytes(rng.choice((1, 3, 4, 8)))
    if kind == 2:
        return b""
    if kind == 3:
        return data * rng.choice((2, 100, 3000))
    if kind == 4:
        return rng.choice((b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b"..", b"a" * 70_000))
    width = rng.choice((4, 8))
    values = bytearray(data)
    if len(values) < width:
        return rng.randbytes(width)
    at = spot(rng, len(values) // width) * width
    values[at : at + width] = _special(width, rng)
    return bytes(values)


def _special(width: int, rng: Random) -> bytes:
    if rng.randrange(2):
        found = rng.choice((np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0, 89.0, -1e4))
        return np.array(found, f"<f{width}").tobytes()
    top = 2 ** (8 * width - 1)
    value = rng.choice((0, -1, 1, 320, 319, 10**6, top - 1, -top))
    return np.array(value, f"<i{width}").tobytes()
