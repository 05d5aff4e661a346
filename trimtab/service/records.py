"""The values that pass between the service and its two neighbours, wire and the composition root.

Knows no SQL and no asyncio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trimtab.engine.base import Learner, Sampler
from trimtab.types import BaseModelInfo, LoraConfig, Request, Result, Text


@dataclass(frozen=True, slots=True)
class Engine:
    """One base model: what it is, who trains it, who samples it; `text` where it has a
    tokenizer."""

    info: BaseModelInfo
    learner: Learner
    sampler: Sampler
    text: Text | None = None


class Codec(Protocol):
    """How results leave and how journalled bodies come back. Both are pure and thread-safe."""

    def encode(self, result: Result) -> tuple[bytes, str]:
        """(body, content type) as `retrieve_future` sends them."""

    def decode(self, kind: str, body: bytes) -> Request:
        """The request a journalled body was. `kind` is one of KINDS."""


KINDS = (
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
    "unload_model",
    "sample",
)


@dataclass(frozen=True, slots=True)
class Promise:
    """What a submit answers. `sequence_ids` has num_samples entries for a sample, else none."""

    request_id: str
    model_id: str | None = None
    sequence_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a request: `body` and `content_type` when done, `error` and `category`
    ("user", "server") when failed."""

    state: Literal["pending", "done", "failed"]
    body: bytes = b""
    content_type: str = ""
    error: str = ""
    category: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    request_id: str
    state: Literal["finished", "failed"]
    size: int


@dataclass(frozen=True, slots=True)
class Completions:
    """What finished after a cursor, oldest first, and the cursor to ask with next."""

    items: tuple[Completion, ...]
    cursor: int


@dataclass(frozen=True, slots=True)
class SamplerRecord:
    sampler_id: str
    base_model: str
    model_path: str | None = None


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """`lora.seed` is the seed in force, drawn by the server where the client gave none."""

    model_id: str
    base_model: str
    lora: LoraConfig
    optimizer: str = "adamw"
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """`kind` is the middle segment of `path`: "weights" (adapter and optimizer), "sampler_weights"
    (adapter alone) or "external_weights" (for use elsewhere). `public`: every owner may read it."""

    path: str
    kind: str
    model_id: str
    base_model: str
    lora: LoraConfig
    optimizer: str = "adamw"
    size_bytes: int = 0
    step: int = 0
    created_at: float = 0.0
    expires_at: float | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    public: bool = False
