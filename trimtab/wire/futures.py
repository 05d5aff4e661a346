"""Results: the long poll for one, the cursor for many, and cancelling.

A poll is held, not answered early: the client asks again without a pause. It costs no thread.
"""

from __future__ import annotations

from starlette.responses import Response

from trimtab.errors import Invalid
from trimtab.service.core import Completion, Outcome
from trimtab.wire.calls import Call, answer


async def retrieve_future(call: Call) -> Response:
    fields = call.fields()
    request_id = fields.text("request_id")
    metadata_only = fields.flag("allow_metadata_only", False)
    hold = call.settings.hold_seconds
    outcome = await call.held(call.service.retrieve(call.owner, request_id, hold))
    await call.gate.turnstile.enter()  # many polls may end at one moment
    if outcome.state == "pending":
        return _try_again(request_id)
    if outcome.state == "failed":
        return answer({"error": outcome.error, "category": outcome.category})
    if metadata_only and len(outcome.body) > call.settings.inline_result_bytes:
        return _metadata(outcome)
    return Response(outcome.body, media_type=outcome.content_type)


def _try_again(request_id: str) -> Response:
    """408 is the silent form; with a 200 the client logs a warning each time."""
    return answer(
        {
            "type": "try_again",
            "request_id": request_id,
            "queue_state": "active",
            "queue_state_reason": None,
        },
        status=408,
    )


def _metadata(outcome: Outcome) -> Response:
    """The client makes room for this many bytes and then asks for them."""
    return answer({"status": "complete_metadata", "response_payload_size": len(outcome.body)})


async def retrieve_futures(call: Call) -> Response:
    fields = call.fields()
    target = fields.sub("target")
    if target is None:
        raise fields.wrong("target", "an object")
    kind = target.text("type") if target.has("type") else "sampling_session"
    if kind != "sampling_session":
        raise Invalid(f"target.type: {kind!r} is not offered; this server has 'sampling_session'")
    hold = call.settings.hold_seconds
    found = await call.held(
        call.service.retrieve_many(
            call.owner,
            target.text("sampling_session_id"),
            target.integer("cloned_sampler_id", 0),
            fields.integer("prev_cursor", 0),
            min(max(fields.number("timeout", hold), 0.0), hold),
            fields.texts("retrieved_request_ids"),
        )
    )
    completions = [_completion(item) for item in found.items]
    return answer({"completions": completions, "cursor": found.cursor})


def _completion(item: Completion) -> dict[str, object]:
    content: dict[str, object] = {"state": item.state, "request_id": item.request_id}
    if item.state == "finished":
        content["response_payload_uncompressed_size"] = item.size
    return content


async def cancel_future(call: Call) -> Response:
    await call.service.cancel(call.owner, call.fields().text("request_id"))
    return answer({})
