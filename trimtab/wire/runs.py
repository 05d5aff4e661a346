"""Training runs and checkpoints as the REST client and the command line see them."""

from __future__ import annotations

from starlette.responses import Response

from trimtab.errors import Invalid
from trimtab.service.core import CheckpointRecord
from trimtab.service.keeping import Copy
from trimtab.service.listing import Page, RunRecord
from trimtab.service.paths import path_of
from trimtab.wire import query
from trimtab.wire.calls import Call, answer

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


# ------------------------------------------------------------------ training runs


async def list_runs(call: Call) -> Response:
    page = await call.service.listing.runs(
        call.owner,
        query.whole(call, "limit", 20),
        query.whole(call, "offset", 0),
        query.text(call, "project_id"),
        accessible=query.accessible(call),
    )
    return answer({"training_runs": [_run(run) for run in page.items], "cursor": cursor(page)})


async def get_run(call: Call) -> Response:
    scope = query.accessible(call)
    return answer(
        _run(await call.service.listing.run(call.owner, call.path["run"], accessible=scope))
    )


def _run(run: RunRecord) -> dict[str, object]:
    last, last_sampler = run.weights, run.sampler_weights
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": True,
        "lora_rank": run.rank,
        "corrupted": run.broken,
        "last_request_time": query.stamp(run.last_request_at),
        "last_checkpoint": None if last is None else _checkpoint(last),
        "last_sampler_checkpoint": None if last_sampler is None else _checkpoint(last_sampler),
        "user_metadata": dict(run.user_metadata) or None,
    }


def cursor(page: Page[object]) -> dict[str, int]:
    return {"offset": page.offset, "limit": page.limit, "total_count": page.total}


# ------------------------------------------------------------------ checkpoints


async def list_run_checkpoints(call: Call) -> Response:
    found = await call.service.listing.run_checkpoints(call.owner, call.path["run"])
    return answer({"checkpoints": [_checkpoint(each) for each in found], "cursor": None})


async def list_checkpoints(call: Call) -> Response:
    page = await call.service.listing.checkpoints(
        call.owner, query.whole(call, "limit", 100), query.whole(call, "offset", 0)
    )
    found = [_checkpoint(each) for each in page.items]
    return answer({"checkpoints": found, "cursor": cursor(page)})


def _checkpoint(record: CheckpointRecord) -> dict[str, object]:
    return {
        "checkpoint_id": "/".join(record.path.rsplit("/", 2)[1:]),
        "checkpoint_type": TYPES[record.kind],
        "time": query.stamp(record.created_at),
        "tinker_path": record.path,
        "size_bytes": record.size_bytes,
        "public": record.public,
        "user_metadata": dict(record.user_metadata) or None,
        "expires_at": None if record.expires_at is None else query.stamp(record.expires_at),
    }


async def delete_checkpoint(call: Call) -> Response:
    await call.service.keeping.delete(call.owner, _path(call))
    return answer({})


async def publish_checkpoint(call: Call) -> Response:
    await call.service.keeping.publish(call.owner, _path(call), True)
    return answer({})


async def unpublish_checkpoint(call: Call) -> Response:
    await call.service.keeping.publish(call.owner, _path(call), False)
    return answer({})


async def set_checkpoint_ttl(call: Call) -> Response:
    fields = call.fields()
    if "ttl_seconds" not in fields.values:
        raise Invalid("ttl_seconds: required; null lets a checkpoint stay for good")
    seconds = fields.integer_or_none("ttl_seconds")
    await call.service.keeping.set_ttl(call.owner, _path(call), seconds)
    return answer({})


def _path(call: Call) -> str:
    return path_of(call.path["run"], call.path["kind"], call.path["name"])


async def weights_info(call: Call) -> Response:
    record = await call.service.weights_info(call.owner, call.fields().text("tinker_path"))
    return answer(
        {
            "base_model": record.base_model,
            "optimizer_config": {"type": record.optimizer},
            "is_lora": True,
            "lora_rank": record.lora.rank,
            "train_attn": record.lora.train_attn,
            "train_mlp": record.lora.train_mlp,
            "train_unembed": record.lora.train_unembed,
        }
    )


async def copy_weights(call: Call) -> Response:
    fields = call.fields()
    header = call.request.headers.get("x-tinker-weights-access-token")
    if header or fields.has("weights_access_token"):
        raise Invalid("weights_access_token: not offered; a checkpoint opens to its owner's key")
    copy = Copy(
        source_path=fields.text("source_path"),
        destination_project_id=fields.text_or_none("destination_project_id"),
        session_id=fields.text_or_none("session_id"),
        model_seq_id=fields.integer_or_none("model_seq_id"),
        ttl_seconds=fields.integer_or_none("ttl_seconds"),
    )
    key = call.request.headers.get("x-idempotency-key")
    return answer({"tinker_path": await call.service.keeping.copy(call.owner, copy, key)})
