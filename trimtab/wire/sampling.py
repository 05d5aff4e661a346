"""Sampling sessions and asample. Sequence ids leave with the promise, before any token exists."""

from __future__ import annotations

from starlette.responses import Response

from trimtab.wire.calls import Call, answer
from trimtab.wire.training import submit


async def create_sampling_session(call: Call) -> Response:
    fields = call.fields()
    sampling_session_id = await call.service.create_sampling_session(
        call.owner,
        fields.text("session_id"),
        fields.integer("sampling_session_seq_id"),
        fields.text_or_none("base_model"),
        fields.text_or_none("model_path"),
    )
    return answer({"type": "create_sampling_session", "sampling_session_id": sampling_session_id})


async def get_sampler(call: Call) -> Response:
    record = await call.service.get_sampler(call.owner, call.path["sampler_id"])
    content = {"sampler_id": record.sampler_id, "base_model": record.base_model}
    if record.model_path is not None:
        content["model_path"] = record.model_path
    return answer(content)


async def join_sampling_session(call: Call) -> Response:
    sampling_session_id = call.fields().text("sampling_session_id")
    counter = await call.service.join_sampling_session(call.owner, sampling_session_id)
    return answer({"type": "join_sampling_session", "client_counter": counter})


async def asample(call: Call) -> Response:
    return await submit(call, "sample")
