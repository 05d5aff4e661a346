"""Sessions, what the server offers, and the switches it sets in the client."""

from __future__ import annotations

from starlette.responses import Response

from trimtab.wire.calls import Call, WireSettings, answer

TESTED_SDK = "0.38.0"
CHUNK_BYTES = 5_000_000  # what the client would put in a request by itself

# For SDKs before 0.25, which else send forward_backward as JSON; newer ones know no other way.
OLDER = {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True}


def client_flags(settings: WireSettings) -> dict[str, object]:
    """What the client asks of us: each switch is on because its endpoint exists.

    Flags not named here keep the SDK's default.
    """
    return {
        "pjwt_auth_enabled": settings.jwt_auth,
        "parallel_fwdbwd_chunks": True,
        "fwdbwd_max_chunk_len": settings.chunk_datums,
        "fwdbwd_max_chunk_bytes_count": min(CHUNK_BYTES, settings.max_body_bytes // 2),
        "proto_compress_fwdbwd": settings.compress,
        "sample_use_retrieve_futures": True,
        "sample_join_sampling_session": True,
        "sample_max_concurrent_requests": settings.max_concurrent_samples,
        "custom_loss_server_side": True,
        **OLDER,
    }


async def healthz(call: Call) -> Response:
    """ok, once the service is ready; as on every route, 503 before that and while it stops."""
    return answer({"status": "ok"})


async def client_config(call: Call) -> Response:
    return answer(client_flags(call.settings))


async def dynamic_config(call: Call) -> Response:
    return answer(
        {
            "refresh_interval_sec": 300,
            "sample_cancel_enabled": True,
            "sample_cancel_max_batch_size": 64,
        }
    )


async def get_server_capabilities(call: Call) -> Response:
    models = [
        {
            "model_name": info.name,
            "max_context_length": info.max_context,
            "trainable": True,
            "sampleable": True,
        }
        for info in call.service.models()
    ]
    return answer({"supported_models": models})


async def create_session(call: Call) -> Response:
    fields = call.fields()
    sdk_version = fields.text_or_none("sdk_version") or ""
    session_id = await call.service.create_session(
        call.owner,
        idempotency_key=call.request.headers.get("x-idempotency-key"),
        tags=fields.texts("tags"),
        user_metadata=fields.text_map("user_metadata") or {},
        sdk_version=sdk_version,
        project_id=fields.text_or_none("project_id"),
        display_name=fields.text_or_none("display_name"),
    )
    return answer({"type": "create_session", "session_id": session_id} | _warning(sdk_version))


def _warning(sdk_version: str) -> dict[str, str]:
    """A line for the client's log when its minor version is another than the tested one."""
    if sdk_version.split(".")[:2] == TESTED_SDK.split(".")[:2]:
        return {}
    text = (
        f"This server was tested with SDK {TESTED_SDK}; you use {sdk_version or 'an unnamed one'}."
    )
    return {"warning_message": text}


async def session_heartbeat(call: Call) -> Response:
    await call.service.heartbeat(call.owner, call.fields().text("session_id"))
    return answer({"type": "session_heartbeat"})


async def finish_session(call: Call) -> Response:
    fields = call.fields()
    reason = fields.sub("reason")
    if reason is None:
        raise fields.wrong("reason", "an object")
    await call.service.finish_session(
        call.owner, call.path["session_id"], reason.text("type"), fields.text_or_none("detail")
    )
    return answer({})


async def telemetry(call: Call) -> Response:
    """Taken and dropped: nothing leaves this machine."""
    return answer({"status": "accepted"})
