"""Wrong JSON made from right JSON: in its values, in its structure, in its text."""

from __future__ import annotations

import json
from random import Random
from typing import Any

DEEP = 5000
NUMBERS = (
    0, -1, 1, 2, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**62, 2**63 - 1, 2**63,
    -(2**63), 2**64, 10**30, 0.5, -0.0, 1e-320, 1e38, 1e39, 1e308, -1e308, 1_000_000_000,
    float("nan"), float("inf"), float("-inf"), 131_071, 131_073, 10**6,
)  # fmt: skip
TEXTS = (
    "", " ", "\x00", "a\x00b", "\n", "..", "../../x", "/etc/passwd", "%2f", "x" * 300, "x" * 70_000,
    "\ud800", "\udfff\ud800", "é", "\U0001f600", "\u202e", "null", "0", "-1", "tinker://", "NaN",
    "tinker://x/weights/a", "file:///x", "a:b:c", ":", "org/tiny", "true", "int64", "float32", "'",
    "'; DROP TABLE requests; --",
)  # fmt: skip
OTHERS = (None, True, False, [], {}, [[]], [{}], {"": ""}, [None], [1, "a", None], {"type": "x"})


def any_value(rng: Random) -> Any:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice(OTHERS)
    if kind == 3:
        return [rng.choice(NUMBERS) for _ in range(rng.randrange(5))]
    return nested(rng.choice((3, 50)), rng.choice(("list", "object")))


def nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands: () is the whole."""
    found = [path]
    if isinstance(value, dict):
        for name, inner in value.items():
            found += places(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


def changed(value: Any, rng: Random) -> Any:
    """Like `value`, with one thing wrong in it."""
    place = rng.choice(places(value)[1:] or [()])
    if not place:
        return any_value(rng)
    value = json.loads(json.dumps(value))
    holder = value
    for step in place[:-1]:
        holder = holder[step]
    last, kind = place[-1], rng.randrange(6)
    if kind == 0:
        del holder[last]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(last)
    elif kind == 1:
        holder.insert(last, any_value(rng))
    elif kind == 2:
        holder[last] = rng.choice(([holder[last]], {"a": holder[last]}, f"{holder[last]}"))
    elif kind == 3 and isinstance(holder[last], list):
        holder[last] = holder[last] * rng.choice((0, 2, 50, 2000))
    else:
        holder[last] = any_value(rng)
    return value


def spot(rng: Random, size: int) -> int:
    """One of `size` places; what is drawn does not depend on how many there are, so that hypothesis
    can draw it again when the numbers in a body have got longer."""
    return int(rng.random() * size)


def text(value: Any) -> bytes:
    """NaN and lone surrogates come out as other writers would write them."""
    return json.dumps(value, ensure_ascii=True).encode()


def mangled(body: bytes, rng: Random) -> bytes:
    """A body whose text is wrong, whatever it says."""
    at = spot(rng, len(body) + 1)
    kind = rng.randrange(9)
    if kind == 0:
        return body[:at]
    if kind == 1:
        return body[:at] + rng.randbytes(rng.randrange(1, 9)) + body[at:]
    if kind == 2:
        return body[:at] + rng.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00")) + body[at:]
    if kind == 3:
        return rng.choice((b"\xef\xbb\xbf" + body, body.decode().encode("utf-16")))
    if kind == 4:
        return rng.choice((b"[", b'{"a":')) * DEEP + body
    if kind == 5:
        return body.replace(b"1", rng.choice((b"1e999", b"9" * 5000, b"0x1", b"1.", b"+1", b"01")))
    if kind == 6:
        return body[:-1] + b"," + body[1:] if len(body) > 2 else b"{}{}"  # every key twice
    if kind == 7:
        return body + rng.choice((b"\x00", b"{}", b" ", b"]", body))
    return body[:at] + body[at + 1 :]
