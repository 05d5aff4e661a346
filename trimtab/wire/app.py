"""The application: every route once, and what all calls share. An error's status is in errors.py.

Built over a shut gate, so that a server can answer while its models load. Knows no handler's
business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab.errors import Stopping, TooLarge, TrimtabError, Unauthorized
from trimtab.wire import (
    account,
    files,
    futures,
    hub,
    openai,
    reports,
    runs,
    sampling,
    sessions,
    training,
)
from trimtab.wire.access import OPEN, Access, Caller, InvalidToken, names_another
from trimtab.wire.calls import (
    Call,
    ClientLeft,
    Gate,
    WireSettings,
    failure,
    read_body,
)
from trimtab.wire.codec import WireCodec

log = logging.getLogger(__name__)

BASE = "/api/v1"
LINGER_SECONDS = 2.0
JSON_BYTES = 8 * 2**20  # a prompt of a million tokens; parsing holds the interpreter meanwhile


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Callable[[Call], Awaitable[Response]]
    open: bool = False  # no key asked for
    bearer: bool = False  # the key comes as a hub's token does; none where any key will do
    owned: bool = False  # it comes that way and must name its owner
    refuse: Callable[[int, str], Response] = failure  # how an error is told
    most: int = JSON_BYTES  # a body's bytes, beside the server's own limit


CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
ROUTES = (
    Route("GET", "/healthz", sessions.healthz, open=True),
    Route("POST", "/client/config", sessions.client_config),
    Route("POST", "/client/dynamic_config", sessions.dynamic_config),
    Route("GET", "/get_server_capabilities", sessions.get_server_capabilities),
    Route("POST", "/telemetry", sessions.telemetry),
    Route("POST", "/auth/token", account.auth_token),
    Route("GET", "/auth/apikey/me", account.get_own_key),
    Route("DELETE", "/auth/apikey/me", account.delete_own_key),
    Route("POST", "/create_session", sessions.create_session),
    Route("POST", "/session_heartbeat", sessions.session_heartbeat),
    Route("GET", "/sessions", reports.list_sessions),
    Route("POST", "/sessions/search", reports.search_sessions),
    Route("GET", "/sessions/{session_id}", reports.get_session),
    Route("POST", "/sessions/{session_id}/finish", sessions.finish_session),
    Route("PUT", "/sessions/{session_id}/project", reports.assign_project),
    Route("GET", "/sessions/{session_id}/trace_export", files.trace_export),
    Route("POST", "/create_model", training.create_model),
    Route("POST", "/get_info", training.get_info),
    Route("POST", "/create_custom_loss", training.create_custom_loss),
    Route("POST", "/forward_backward", training.forward_backward, most=2**63),
    Route("POST", "/optim_step", training.optim_step),
    Route("POST", "/save_weights", training.save_weights),
    Route("POST", "/save_weights_for_sampler", training.save_weights_for_sampler),
    Route("POST", "/save_weights_external", training.save_weights_external),
    Route("POST", "/load_weights", training.load_weights),
    Route("POST", "/unload_model", training.unload_model),
    Route("GET", "/training_runs", runs.list_runs),
    Route("GET", "/training_runs/{run}", runs.get_run),
    Route("GET", "/training_runs/{run}/checkpoints", runs.list_run_checkpoints),
    Route("DELETE", f"{CHECKPOINT}", runs.delete_checkpoint),
    Route("POST", f"{CHECKPOINT}/publish", runs.publish_checkpoint),
    Route("DELETE", f"{CHECKPOINT}/publish", runs.unpublish_checkpoint),
    Route("PUT", f"{CHECKPOINT}/ttl", runs.set_checkpoint_ttl),
    Route(
        "GET",
        "/training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls",
        files.external_weights_urls,
    ),
    Route("GET", "/checkpoints", runs.list_checkpoints),
    Route("POST", "/weights_info", runs.weights_info),
    Route("POST", "/copy_weights", runs.copy_weights),
    Route("GET", "/downloads/{name}", files.download, open=True),
    Route("POST", "/create_sampling_session", sampling.create_sampling_session),
    Route("POST", "/join_sampling_session", sampling.join_sampling_session),
    Route("GET", "/samplers/{sampler_id}", sampling.get_sampler),
    Route("POST", "/asample", sampling.asample),
    Route("POST", "/retrieve_future", futures.retrieve_future),
    Route("POST", "/retrieve_futures", futures.retrieve_futures),
    Route("POST", "/cancel_future", futures.cancel_future),
    Route("GET", "/billing/usage/events", reports.usage_events),
    Route("GET", "/billing/usage/checkpoints/current", reports.stored_checkpoints),
    Route("GET", "/audit", reports.audit),
)


# What clients of OpenAI's API call, under a base URL of its own.
OPENAI_BASE = "/oai/api/v1"
_as_openai: dict[str, Any] = {"bearer": True, "owned": True, "refuse": openai.refusal}
OPENAI = (
    Route("GET", "/models", openai.models, **_as_openai),
    Route("GET", "/models/{model:path}", openai.model, **_as_openai),
    Route("POST", "/completions", openai.completions, **_as_openai),
    Route("POST", "/chat/completions", openai.chat_completions, **_as_openai),
)

# Beside the API, not under its prefix: what a hub's client asks a hub for.
HUB = (
    Route("GET", "/api/models/{repo:path}/tree/{rest:path}", hub.tree, bearer=True),
    Route("GET", "/api/models/{repo:path}/revision/{revision}", hub.model_info, bearer=True),
    Route("GET", "/api/models/{repo:path}", hub.model_info, bearer=True),
    Route("GET", "/{repo:path}/resolve/{revision}/{file:path}", hub.resolve, bearer=True),
)


PROMPT = frozenset({f"{BASE}/session_heartbeat", f"{BASE}/healthz"})
# Routes are tried one by one, so what is called all the time stands first.
OFTEN = frozenset(
    {"/retrieve_futures", "/retrieve_future", "/asample", "/forward_backward", "/optim_step"}
)


class Queued:
    """Lets calls in a few at a turn of the loop, before anything is done for them, so that those
    that say somebody is alive (PROMPT) need not wait behind a burst of hundreds."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._turnstile = gate.turnstile

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROMPT:
            await self._turnstile.enter()
        await self._app(scope, receive, send)


def create_app(gate: Gate, settings: WireSettings, codec: WireCodec) -> Starlette:
    """The ASGI application. It answers 503 until `gate.open(service)`."""
    access = Access(settings.api_keys, settings.keys)
    routes = [
        StarletteRoute(
            prefix + route.path,
            _endpoint(route, gate, settings, codec, access),
            methods=[route.method],
        )
        for prefix, table in ((BASE, ROUTES), (OPENAI_BASE, OPENAI), ("", HUB))
        for route in sorted(table, key=lambda route: route.path not in OFTEN)
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Queued, gate=gate)],
        exception_handlers={HTTPException: _unrouted},
    )
    app.router.redirect_slashes = False  # a redirect of ours would go where the Host header says
    return app


def _endpoint(
    route: Route, gate: Gate, settings: WireSettings, codec: WireCodec, access: Access
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        number = uuid.uuid4().hex[:12]
        try:
            caller = _caller(route, request, access)
            call = Call(request, gate, gate.service, settings, codec, access, caller)
            call.body = await read_body(request, min(route.most, settings.max_body_bytes))
            response = await route.handler(call)
        except TrimtabError as error:
            response = _refusal(error, request, route.refuse)
        except (ClientLeft, ClientDisconnect):
            response = Response(status_code=499)
        except Exception:
            # The only place that catches what nobody foresaw: told in full to the log alone.
            log.exception("%s %s failed (request %s)", route.method, request.url.path, number)
            told = f"internal error; the server's log has it as request {number}"
            response = route.refuse(500, told)
        response.headers["X-Request-Id"] = number
        return response

    return endpoint


def _caller(route: Route, request: Request, access: Access) -> Caller:
    if route.open:
        return Caller("", OPEN)
    host = request.headers.get("host", "")
    if names_another(host) and access.open():
        raise Unauthorized(
            f"Host: {host[:100]!r} is another machine's name; without keys only this machine is"
            " served: create one with `trimtab keys create`"
        )
    if not route.bearer:
        return access.caller(request.headers.get("x-api-key"))
    if access.open() and not route.owned:
        return Caller("", OPEN)
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    try:
        return access.caller(token if scheme.lower() == "bearer" else None)
    except Unauthorized as error:
        where = error.message.replace("X-API-Key", "Authorization: Bearer")
        raise type(error)(where) from None


class Lingering(Response):
    """Answers at once and goes on listening for a moment: closing on a client that is still sending
    would reset the connection under the answer. What arrives is thrown away."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _refusal(
    error: TrimtabError, request: Request, refuse: Callable[[int, str], Response]
) -> Response:
    response = refuse(error.status, error.message)
    if isinstance(error, TooLarge) and "content-length" in request.headers:  # else it may not end
        response = Lingering(response.body, error.status, media_type="application/json")
    if isinstance(error, InvalidToken):
        response.headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
    if isinstance(error, TooLarge | Stopping):
        # The rest of the body stays unread, and a stopping server keeps no connection.
        response.headers["Connection"] = "close"
    return response


async def _unrouted(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    sdk = f"this server was tested with SDK {sessions.TESTED_SDK}"
    response = failure(error.status_code, f"{what}: {error.detail.lower()}; {sdk}")
    response.headers.update(error.headers or {})
    return response
