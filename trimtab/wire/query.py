"""Reading what follows the question mark, and writing times as the SDK reads them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from trimtab.errors import Invalid
from trimtab.wire.calls import Call


def text(call: Call, name: str) -> str | None:
    """A parameter, or None where there is none or it is empty."""
    return call.request.query_params.get(name) or None


def whole(call: Call, name: str, default: int) -> int:
    value = text(call, name)
    if value is None:
        return default
    if not value.lstrip("-").isdecimal() or len(value) > 19:
        raise Invalid(f"{name}: an integer is required, found {value[:40]!r}")
    return int(value)


def accessible(call: Call) -> bool:
    """Whether what others have published is asked for as well."""
    scope = text(call, "access_scope") or "owned"
    if scope not in ("owned", "accessible"):
        raise Invalid(f"access_scope: {scope[:40]!r} is neither 'owned' nor 'accessible'")
    return scope == "accessible"


def moment(call: Call, name: str) -> float:
    """A time in RFC 3339, in seconds since 1970; without a zone it is UTC."""
    value = text(call, name)
    if value is None:
        raise Invalid(f"{name}: required, a time like 2026-07-13T00:00:00Z")
    try:
        return _utc(datetime.fromisoformat(value)).timestamp()
    except (ValueError, OverflowError):
        raise Invalid(
            f"{name}: a time like 2026-07-13T00:00:00Z is required, found {value[:40]!r}"
        ) from None


def day(call: Call, name: str) -> tuple[float, float]:
    """The beginning and end of a day (today where there is none), UTC."""
    value = text(call, name)
    try:
        found = datetime.now(UTC).date() if value is None else date.fromisoformat(value)
        start = datetime(found.year, found.month, found.day, tzinfo=UTC)
        return start.timestamp(), (start + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError):
        raise Invalid(f"{name}: a day like 2026-07-13 is required, found {value!r:.40}") from None


def stamp(seconds: float) -> str:
    """`stamp(0.0) == "1970-01-01T00:00:00+00:00"`"""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _utc(value: datetime) -> datetime:
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
