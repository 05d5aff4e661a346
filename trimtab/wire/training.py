"""Requests that answer with a promise: models, training, weights. The results are futures' matter.

A body that cannot be read still uses up its seq_id where that much can be read; the client goes on
with the next one, and service would wait for it in vain.
"""

from __future__ import annotations

from starlette.responses import Response

from trimtab.errors import UserError
from trimtab.service.records import Promise
from trimtab.types import Request
from trimtab.wire.calls import Call, answer
from trimtab.wire.codec import place


async def create_model(call: Call) -> Response:
    return await submit(call, "create_model")


async def create_custom_loss(call: Call) -> Response:
    return await submit(call, "create_custom_loss")


async def forward_backward(call: Call) -> Response:
    return await submit(call, "forward_backward")


async def optim_step(call: Call) -> Response:
    return await submit(call, "optim_step")


async def save_weights(call: Call) -> Response:
    return await submit(call, "save_weights")


async def save_weights_for_sampler(call: Call) -> Response:
    return await submit(call, "save_weights_for_sampler")


async def save_weights_external(call: Call) -> Response:
    return await submit(call, "save_weights_external")


async def load_weights(call: Call) -> Response:
    return await submit(call, "load_weights")


async def unload_model(call: Call) -> Response:
    return await submit(call, "unload_model")


async def submit(call: Call, kind: str) -> Response:
    """Read the body, hand it to service, answer its promise."""
    service = call.service
    found = await _read(call, kind)
    if isinstance(found, Promise):
        promise = found
    else:
        body, request = found
        promise = await service.submit(call.owner, request, kind, body)
    content: dict[str, object] = {"request_id": promise.request_id}
    if promise.model_id is not None:
        content["model_id"] = promise.model_id
    if kind == "sample":
        content["sample_sequence_ids"] = list(promise.sequence_ids)
    return answer(content)


async def _read(call: Call, kind: str) -> tuple[bytes, Request] | Promise:
    """The plain body, as it is journalled, and the request in it; or, for a bad body that came
    before another one it must not hold up, a promise that has failed."""
    body, error = await call.inflated()
    if error is None:
        try:
            return body, await call.aside(call.codec.decode, kind, body)
        except UserError as found:
            error = found
    return await _use_up(call, kind, body, error)


async def _use_up(call: Call, kind: str, body: bytes, error: UserError) -> Promise:
    """Journal the place of a bad body, with the body as it came: a bomb stays small."""
    found = await call.aside(place, kind, body)
    if found is None:
        raise error
    key, seq_id = found
    try:
        return await call.service.reject(call.owner, kind, key, seq_id, error, call.body)
    except UserError:  # somebody else's model, or an id already used: it is a bad body either way
        raise error from None


async def get_info(call: Call) -> Response:
    record = await call.service.get_info(call.owner, call.fields().text("model_id"))
    info = next((m for m in call.service.models() if m.name == record.base_model), None)
    lora = record.lora
    return answer(
        {
            "type": "get_info",
            "model_id": record.model_id,
            "model_name": record.base_model,
            "model_data": {
                "arch": None if info is None else info.architecture,
                "model_name": record.base_model,
                "tokenizer_id": call.settings.tokenizer_ids.get(record.base_model),
            },
            "optimizer_config": {"type": record.optimizer},
            "is_lora": True,
            "lora_rank": lora.rank,
            "lora_config": {
                "rank": lora.rank,
                "seed": lora.seed,
                "train_attn": lora.train_attn,
                "train_mlp": lora.train_mlp,
                "train_unembed": lora.train_unembed,
            },
        }
    )
