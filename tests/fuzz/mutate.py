"""Any malformed request: a valid one with its body, its headers, its path or its manner spoilt.

All choices come from one `Random`, so that a seed names a request; hypothesis hands in one that it
can shrink.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import replace
from random import Random
from urllib.parse import quote

import zstandard

from trimtab.wire.app import Route

from . import mutate_json, mutate_proto
from .app import BASE, Sent
from .bodies import JSON_BODIES, PROTO_BODIES, World, any_route, headers, is_proto, path_of
from .mutate_json import spot


def malformed(world: World, rng: Random) -> Sent:
    route = any_route(rng)
    if rng.randrange(10) == 0:
        return astray(whole(route, world, rng), rng)
    if is_proto(route):
        sent = proto(route, world, rng)
    elif route.method == "GET":
        return astray(whole(route, world, rng), rng)
    else:
        sent = json_of(route, world, rng)
    return unusual(sent, rng) if rng.randrange(12) == 0 else sent


def whole(route: Route, world: World, rng: Random) -> Sent:
    """The valid request."""
    path = path_of(route, world)
    if is_proto(route):
        body = rng.choice(PROTO_BODIES)(world).SerializeToString()
        return Sent(route.method, path, body, headers(proto=True))
    if route.method == "GET":
        return Sent(route.method, path, b"", headers())
    value = JSON_BODIES.get(route.path, lambda world: {})(world)
    return Sent(route.method, path, mutate_json.text(value), headers())


# ------------------------------------------------------------------ bodies


def json_of(route: Route, world: World, rng: Random) -> Sent:
    value = JSON_BODIES.get(route.path, lambda world: {})(world)
    sent = Sent(route.method, path_of(route, world), headers=headers())
    if rng.randrange(4) == 0:
        return replace(sent, body=mutate_json.mangled(mutate_json.text(value), rng))
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = mutate_json.changed(value, rng) if isinstance(value, dict) else value
    return replace(sent, body=mutate_json.text(value))


def proto(route: Route, world: World, rng: Random) -> Sent:
    message = rng.choice(PROTO_BODIES)(world)
    sent = Sent(route.method, path_of(route, world), headers=headers(proto=True))
    kind = rng.randrange(8)
    if kind == 0:
        body = bytearray(message.SerializeToString())
        for _ in range(rng.choice((1, 2, 8))):
            body[spot(rng, len(body))] = rng.randrange(256)
        return replace(sent, body=bytes(body))
    if kind == 1:
        body_ = message.SerializeToString()
        return replace(sent, body=body_[: spot(rng, len(body_))])
    return replace(sent, body=mutate_proto.changed(message, rng))


# ------------------------------------------------------------------ everything around a body


def astray(sent: Sent, rng: Random) -> Sent:
    """To the wrong place, with the wrong word, or from nobody."""
    kind = rng.randrange(5)
    if kind == 0:
        methods = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "X")
        return replace(sent, method=rng.choice(methods))
    if kind == 1:
        text = rng.choice(mutate_json.TEXTS)[:200].encode("utf-8", "surrogatepass")
        return replace(sent, path=f"{sent.path.rpartition('/')[0]}/{quote(text, safe='')}")
    if kind == 2:
        tails = ("/", "//", "?a=b", "?limit=-1&offset=x", "/..", "%00", "%ff", ";x", "/a/b/c")
        return replace(sent, path=sent.path + rng.choice(tails))
    if kind == 3:
        return replace(sent, path=BASE + quote(rng.randbytes(rng.randrange(20)), safe="/"))
    keys = (b"", b"tml", b"\xff\xfe", b"tml-" + b"x" * 9000, b"tml-\xc3\xa9", b"Bearer tml-local",
            b"eyJhbGciOiJub25lIn0.e30.", b"\x00")  # fmt: skip
    others = tuple(pair for pair in sent.headers if pair[0] != b"x-api-key")
    return replace(sent, headers=(*others, (b"x-api-key", rng.choice(keys)))[rng.randrange(2) :])


def unusual(sent: Sent, rng: Random) -> Sent:
    """Compressed, mislabelled, in pieces, or given up half way."""
    kind = rng.randrange(6)
    if kind == 0:
        return compressed(sent, rng)
    if kind == 1:
        types = (b"text/html", b"", b"application/x-protobuf", b"multipart/form-data", b"\xff")
        return _with(sent, b"content-type", rng.choice(types))
    if kind == 2:
        lengths = (b"0", b"-1", b"x", b"1e9", b"99999999999999999999", b"1073741824", b"\xb2")
        return _with(sent, b"content-length", rng.choice(lengths))
    if kind == 3:
        keys = (b"", b"same", b"x" * 9000, b"\x00\xff", b"\xc3\xa9")
        return _with(sent, b"x-idempotency-key", rng.choice(keys))
    cut = spot(rng, len(sent.body) + 1)
    return replace(sent, cut=cut, leaves=kind == 5)


def compressed(sent: Sent, rng: Random) -> Sent:
    """Zstandard and others, whole, torn, twice, or a bomb."""
    body = rng.choice((sent.body, bytes(3 * 2**20)))
    kind = rng.randrange(4)
    if kind == 0:
        name, packed = b"gzip", gzip.compress(body, 1)
    elif kind == 1:
        name, packed = b"deflate", zlib.compress(body, 1)
    else:
        name, packed = b"zstd", zstandard.ZstdCompressor(level=1).compress(body)
    if rng.randrange(3) == 0:
        packed = packed[: spot(rng, len(packed) + 1)] + rng.randbytes(rng.randrange(4))
    odd = (b"zstd, zstd", b"ZSTD", b"identity", b"br", b"\xff", b"")
    name = rng.choice(odd) if rng.randrange(3) == 0 else name
    return replace(_with(sent, b"content-encoding", name), body=packed)


def _with(sent: Sent, name: bytes, value: bytes) -> Sent:
    others = tuple(pair for pair in sent.headers if pair[0] != name)
    return replace(sent, headers=(*others, (name, value)))
