"""Downloads by signed link: external weights and traces. A link names its file, opens it for an
hour and asks for no key, as the SDK fetches it with a plain GET.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import orjson
from starlette.responses import FileResponse, Response

from trimtab.errors import NotFound
from trimtab.service.paths import path_of
from trimtab.service.usage import Event
from trimtab.wire import query
from trimtab.wire.calls import Call, answer

WEIGHTS, TRACE = "external_weights", "trace"


async def external_weights_urls(call: Call) -> Response:
    path = path_of(call.path["run"], WEIGHTS, call.path["name"])
    names = await call.service.keeping.files(call.owner, path)
    links = {name: _link(call, WEIGHTS, path, name) for name in names}
    until = min(expires for _, expires in links.values())
    urls = {name: url for name, (url, _) in links.items()}
    return answer({"urls": urls, "expires": query.stamp(until)})


async def trace_export(call: Call) -> Response:
    """A trace is made when it is fetched, so it is ready at once."""
    session_id = call.path["session_id"]
    await call.service.listing.session(call.owner, session_id)
    url, _ = _link(call, TRACE, session_id, f"{session_id}.pftrace")
    return answer({"status": "ready", "url": url})


def _link(call: Call, kind: str, of: str, name: str) -> tuple[str, float]:
    token, until = call.access.link({"kind": kind, "of": of, "name": name})
    return f"{call.request.base_url}api/v1/downloads/{quote(name)}?token={token}", until


async def download(call: Call) -> Response:
    token = query.text(call, "token") or ""
    claims = call.access.linked(token, "kind", "of", "name")
    if claims["name"] != call.path["name"]:
        raise NotFound("this link is unknown or has expired; ask for a new one")
    if claims["kind"] == TRACE:
        events = await call.service.usage.trace(claims["of"])
        body = await asyncio.to_thread(perfetto, events)
        return Response(body, media_type="application/json")
    file = await asyncio.to_thread(call.service.keeping.file, claims["of"], claims["name"])
    return FileResponse(file, media_type="application/octet-stream")


def perfetto(events: list[Event]) -> bytes:
    """The JSON form of a trace that Perfetto opens: a line for each model and sampling session, a
    block for each request from its acceptance to its result, times in microseconds."""
    lines = {key: number for number, key in enumerate(dict.fromkeys(e.key for e in events), 1)}
    named: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": key}}
        for key, number in lines.items()
    ]
    blocks = [
        {
            "ph": "X",
            "name": event.kind,
            "pid": 1,
            "tid": lines[event.key],
            "ts": event.created_at * 1e6,
            "dur": ((event.finished_at or event.created_at) - event.created_at) * 1e6,
            "args": {"request_id": event.request_id, "state": event.state},
        }
        for event in events
    ]
    return orjson.dumps({"traceEvents": named + blocks})
