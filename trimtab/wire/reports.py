"""Sessions listed and sought, and what was used: counts without prices."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from starlette.responses import Response

from trimtab.errors import Invalid
from trimtab.service import ledger
from trimtab.service.listing import Search, SessionRecord
from trimtab.service.usage import Used
from trimtab.wire import query
from trimtab.wire.calls import Call, answer
from trimtab.wire.fields import Fields

PROJECT = "default"  # the project of a session that was given none
REASONS = ("success", "errored", "interrupted")
EVENTS = ("all", "checkpoints", "projects", "teams", "organizations")


# ------------------------------------------------------------------ sessions


async def list_sessions(call: Call) -> Response:
    query.accessible(call)  # of others' sessions none is published
    limit, offset = query.whole(call, "limit", 20), query.whole(call, "offset", 0)
    found = await call.service.listing.sessions(call.owner, limit, offset)
    return answer({"sessions": list(found)})


async def get_session(call: Call) -> Response:
    query.accessible(call)
    session, models, samplers = await call.service.listing.session(
        call.owner, call.path["session_id"]
    )
    return answer(
        {
            "training_run_ids": list(models),
            "sampler_ids": list(samplers),
            "user_metadata": dict(session.user_metadata) or None,
            "display_name": session.display_name,
        }
    )


async def assign_project(call: Call) -> Response:
    project_id = call.fields().text("project_id")
    await call.service.keeping.assign_project(call.owner, call.path["session_id"], project_id)
    return answer({})


async def search_sessions(call: Call) -> Response:
    search = _search(call.fields(), call.caller.urn)
    found = () if search is None else await call.service.listing.search(call.owner, search)
    more = search is not None and len(found) == search.limit
    after = {"last_created_at": query.stamp(found[-1].created_at),
             "last_session_id": found[-1].session_id} if more else None  # fmt: skip
    sessions = [_summary(session, call.caller.urn) for session in found]
    return answer({"sessions": sessions, "next_cursor": after})


def _search(fields: Fields, urn: str) -> Search | None:
    """What is sought; None where no session of the caller's can be meant."""
    owner = fields.sub("owner")
    kind = "own" if owner is None else owner.text("type")
    if kind not in ("own", "accessible", "user"):
        raise Invalid(f"owner.type: {kind[:40]!r} is not one of own, accessible, user")
    if owner is not None and kind == "user" and urn not in owner.texts("owner_urns"):
        return None
    cursor = fields.sub("cursor")
    return Search(
        session_id=fields.text_or_none("session_id"),
        display_name=fields.text_or_none("display_name"),
        project_ids=fields.texts("project_ids") if fields.has("project_ids") else None,
        user_metadata=fields.text_map("user_metadata") or {},
        states=_states(fields),
        after=None if cursor is None else _after(cursor),
        limit=fields.integer("limit", 50, range(1, 201)),
    )


def _states(fields: Fields) -> tuple[tuple[str, str | None], ...] | None:
    """Statuses as states of ours. None is ever cancelled or failed here."""
    if not fields.has("statuses"):
        return None
    found: list[tuple[str, str | None]] = []
    for index, value in enumerate(fields.items("statuses")):
        status = Fields.of(value, f"statuses[{index}]")
        kind = status.text("type")
        if kind == "active":
            found.append(("open", None))
        elif kind == "client_finished":
            reasons = status.texts("reasons") if status.has("reasons") else (None,)
            found += [("finished", reason) for reason in reasons]
        elif kind not in ("cancelled", "failed"):
            raise Invalid(f"{status.name('type')}: {kind!r} is not a status")
    return tuple(found)


def _after(cursor: Fields) -> tuple[int, str]:
    value = cursor.text("last_created_at")
    try:
        at = datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError):
        raise Invalid(f"{cursor.name('last_created_at')}: {value[:40]!r} is no time") from None
    return round(at * 1e6), cursor.text("last_session_id")


def _summary(session: SessionRecord, urn: str) -> dict[str, object]:
    return {
        "session_id": session.session_id,
        "created_at": query.stamp(session.created_at),
        "owner": urn,
        "project_id": session.project_id or PROJECT,
        "status": _status(session),
        "checkpoints_count": session.checkpoints,
        "checkpoint_storage_bytes": session.checkpoint_bytes,
        "display_name": session.display_name,
        "user_metadata": dict(session.user_metadata) or None,
    }


def _status(session: SessionRecord) -> dict[str, object] | None:
    if session.state == "open":
        return {"type": "active"}
    if session.state == "finished" and session.reason in REASONS:
        reason = {"type": session.reason}
        return {"type": "client_finished", "reason": reason, "detail": session.detail}
    return None


# ------------------------------------------------------------------ usage


async def usage_events(call: Call) -> Response:
    start, end = query.moment(call, "starting_on"), query.moment(call, "ending_before")
    found = await call.service.usage.hours(call.owner, start, end)
    sessions = await call.service.usage.metadata(call.owner, {used.session_id for used in found})
    return answer(
        {
            "data": [_event(used, call) for used in found],
            "sessions": {
                session_id: {"user_metadata": metadata or None}
                for session_id, metadata in sessions.items()
            },
            "cost_data_through": None,
        }
    )


def _event(used: Used, call: Call) -> dict[str, object]:
    return {
        "bucket_start": query.stamp(used.hour),
        "bucket_end": query.stamp(used.hour + ledger.HOUR),
        "base_model": used.base_model,
        "user_id": call.caller.urn,
        "user_name": call.owner,
        "session_id": used.session_id,
        "project_id": used.project_id or PROJECT,
        "event_info": _info(used),
    }


def _info(used: Used) -> Mapping[str, object]:
    if used.kind == ledger.CHECKPOINTS:
        return {"type": "checkpoint", "count": used.amount}
    if used.kind in (ledger.PREFILL, ledger.CACHED):
        cached = used.kind == ledger.CACHED
        return {"type": "sampling_prefill", "cached": cached, "token_count": used.amount}
    return {"type": used.kind, "token_count": used.amount}


async def stored_checkpoints(call: Call) -> Response:
    found = await call.service.usage.stored(call.owner, query.text(call, "project_id"))
    items = [
        {
            "project_id": stored.project_id or PROJECT,
            "org_user_urn": call.caller.urn,
            "user_name": call.owner,
            "checkpoint_count": stored.count,
            "size_bytes": stored.size_bytes,
            "size_gigabytes": stored.size_bytes / 1e9,
        }
        for stored in found
    ]
    return answer({"effective_rate_usd_per_gigabyte_month": None, "data": items})


async def audit(call: Call) -> Response:
    kind = query.text(call, "event_type") or "all"
    if kind not in EVENTS:
        raise Invalid(f"event_type: {kind[:40]!r} is not one of {', '.join(EVENTS)}")
    start, end = query.day(call, "day")
    lines = []
    if kind in ("all", "checkpoints"):
        lines = await call.service.usage.audit(call.owner, start, end)
    entries = [
        {
            "timestamp": query.stamp(line.at),
            "event": line.event,
            "event_details": {"tinker_path": line.path, **line.details},
            "tinker_path": line.path,
        }
        for line in lines
    ]
    return answer({"entries": entries})
