"""What every answer must be, and what must be true once all is quiet again."""

from __future__ import annotations

import asyncio
import json
import time

from .app import SECONDS, Answer, App, Sent

STATUSES = {200, 400, 401, 404, 405, 408, 410, 413, 429, 499}
MOST = 16_384  # bytes of an error: it may quote what was sent, not repeat all of it


def faults_of(app: App, sent: Sent, answer: Answer) -> list[str]:
    """What is wrong with an answer; empty for a good one."""
    found = [f"logged: {text}" for text in app.errors.found]
    app.errors.found.clear()
    if answer.status not in STATUSES:
        found.append(f"status {answer.status}: {answer.body[:300]!r}")
    if answer.status == 499 and not sent.leaves:
        found.append("499 to a client that stayed")
    if answer.status >= 400 and answer.status not in (408, 499) and sent.method != "HEAD":
        found += _refusal_faults(answer)
    return found


def _refusal_faults(answer: Answer) -> list[str]:
    found = []
    if int(answer.headers.get(b"content-length", b"-1")) != len(answer.body) or not answer.body:
        found.append(f"{answer.status} without its length or body: {answer.headers}")
    try:
        detail = json.loads(answer.body)["detail"]
    except (ValueError, KeyError, TypeError):
        return [*found, f"{answer.status} without a detail: {answer.body[:300]!r}"]
    if "\n" in detail or "Traceback" in detail:
        found.append(f"no sentence: {detail[:300]!r}")
    if len(answer.body) > MOST:
        found.append(f"{len(answer.body)} bytes of an error: {detail[:200]!r}")
    return found


# ------------------------------------------------------------------ once all is quiet


def count(app: App, sql: str) -> int:
    found = app.store.row(f"SELECT COUNT(*) AS n FROM {sql}")
    assert found is not None
    return int(found["n"])


async def quiet(app: App) -> None:
    """Wait until nothing is pending; raises TimeoutError where something hangs, in the journal or
    in memory."""
    until, futures = time.monotonic() + SECONDS, app.service._parts.futures
    while count(app, "requests WHERE state = 'pending'") or futures._live:
        if time.monotonic() > until:
            rows = app.store.read("SELECT request_id, kind FROM requests WHERE state = 'pending'")
            held = [tuple(row) for row in rows] or list(futures._live)
            raise TimeoutError(f"pending for {SECONDS:g} s: {held[:5]}")
        await asyncio.sleep(0.02)


def leftovers(app: App) -> list[str]:
    """Faults of the engine that a client was told of, and what memory holds without a reason."""
    app.run(quiet(app))
    rows = app.store.read(
        "SELECT request_id, kind, error FROM requests WHERE state = 'failed' AND category != 'user'"
    )
    found = [f"failed as the server's fault: {tuple(row)}" for row in rows]
    for name in ("_live", "_listeners", "_unwritten"):
        held = getattr(app.service._parts.futures, name)
        if held:
            found.append(f"futures.{name} holds {list(held)[:5]} while nothing is pending")
    found += [f"logged: {text}" for text in app.errors.found]
    app.errors.found.clear()
    return found


def rows(app: App) -> dict[str, int]:
    tables = app.store.read("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {row["name"]: count(app, row["name"]) for row in tables}
