"""Service: the facade that wire calls and the composition root builds.

Lives on one asyncio loop. Every method takes the owner (who holds the API key) first; another
owner's id is answered with the words used for an unknown one. Knows no HTTP, no protobuf, no torch.

    service = Service(ServiceSettings(), Store(data_dir), {"tiny": engine}, codec)
    await service.start()
    session_id = await service.create_session("me", sdk_version="0.38.0")
    promise = await service.submit("me", CreateModel(session_id, 0, "tiny"), "create_model", body)
    outcome = await service.retrieve("me", promise.request_id, timeout=25.0)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from trimtab.service.records import (
    CheckpointRecord,
    Codec,
    Completion,
    Completions,
    Engine,
    ModelRecord,
    Outcome,
    Promise,
    SamplerRecord,
)
from trimtab.service.settings import ServiceSettings
from trimtab.service.store import Store
from trimtab.types import BaseModelInfo, Request

__all__ = [
    "CheckpointRecord",
    "Codec",
    "Completion",
    "Completions",
    "Engine",
    "ModelRecord",
    "Outcome",
    "Promise",
    "SamplerRecord",
    "Service",
    "ServiceSettings",
    "Store",
]


class Service:
    def __init__(
        self,
        settings: ServiceSettings,
        store: Store,
        engines: Mapping[str, Engine],
        codec: Codec,
        clock: Callable[[], float] = time.time,
    ) -> None:
        raise NotImplementedError

    # ---- life of the service

    async def start(self) -> None:
        """Start the samplers, settle what a previous process left unfinished, begin sweeping."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Engines stop at their next micro-batch or decode step; what is pending stays journalled
        as pending; the store is closed. Returns within 10 s."""
        raise NotImplementedError

    def models(self) -> tuple[BaseModelInfo, ...]:
        raise NotImplementedError

    # ---- sessions

    async def create_session(
        self,
        owner: str,
        *,
        idempotency_key: str | None = None,
        tags: tuple[str, ...] = (),
        user_metadata: Mapping[str, str] | None = None,
        sdk_version: str = "",
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> str:
        """A new session's id (uuid4); the same id again for an idempotency key seen before."""
        raise NotImplementedError

    async def heartbeat(self, owner: str, session_id: str) -> None:
        """Keep a session alive. Gone for a finished or expired one."""
        raise NotImplementedError

    async def finish_session(
        self, owner: str, session_id: str, reason: str, detail: str | None = None
    ) -> None:
        """End a session; the first reason wins, later operations are refused."""
        raise NotImplementedError

    # ---- requests with a future

    async def submit(self, owner: str, request: Request, kind: str, body: bytes) -> Promise:
        """Journal a request and queue it. A resend joins its first promise (or raises its first
        Invalid again); another body under a used id is Invalid."""
        raise NotImplementedError

    async def reject(  # noqa: PLR0917 (all six say what was refused)
        self, owner: str, kind: str, key: str, seq_id: int, message: str, body: bytes
    ) -> None:
        """Use up (key, seq_id) as a failed request; key is a model or sampling session."""
        raise NotImplementedError

    async def retrieve(self, owner: str, request_id: str, timeout: float) -> Outcome:
        """Wait up to `timeout` seconds. NotFound: never existed; Gone: no longer kept."""
        raise NotImplementedError

    async def retrieve_many(  # noqa: PLR0917 (the fields of the poll, in its order)
        self,
        owner: str,
        sampling_session_id: str,
        cloned_sampler_id: int,
        prev_cursor: int,
        timeout: float | None = None,
        retrieved_request_ids: Sequence[str] = (),
    ) -> Completions:
        """Sample requests of one client finished after `prev_cursor`; `timeout` None waits as long
        as the service holds a poll. Acknowledged results may be dropped."""
        raise NotImplementedError

    async def cancel(self, owner: str, request_id: str) -> None:
        """Stop a sample request; one that is finished stays as it is."""
        raise NotImplementedError

    # ---- sampling sessions, models, checkpoints

    async def create_sampling_session(
        self,
        owner: str,
        session_id: str,
        sampling_session_seq_id: int,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> str:
        raise NotImplementedError

    async def get_sampler(self, owner: str, sampling_session_id: str) -> SamplerRecord:
        raise NotImplementedError

    async def join_sampling_session(self, owner: str, sampling_session_id: str) -> int:
        """1, 2, ...: a number no other client of this sampling session was given."""
        raise NotImplementedError

    async def get_info(self, owner: str, model_id: str) -> ModelRecord:
        raise NotImplementedError

    async def weights_info(self, owner: str, tinker_path: str) -> CheckpointRecord:
        raise NotImplementedError
