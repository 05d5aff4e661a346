"""A valid request for every route of the table, about things that exist.

A route that is new here gets an empty object for a body and known ids in its path; that is enough
to be mutated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from trimtab.wire import trimtab_pb2 as pb
from trimtab.wire.app import ROUTES, Route

from .app import BASE, KEY, MODEL, App, Sent

Json = dict[str, Any]


@dataclass
class World:
    """A session with a model, a sampler, a checkpoint and a recorded sequence."""

    session: str
    spare: str  # a session that may be finished
    model: str
    sampler: str
    path: str
    sequence: str
    tokens: list[int]
    next_sample: int = 0  # the newest id a sample was sent with
    numbers: int = 0
    next_training: Callable[[], int] = field(default=lambda: 1)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def sample_id(self) -> int:
        self.next_sample += 1
        return self.next_sample


def post(app: App, route: str, **fields: Any) -> Json:
    answer = app.send(Sent("POST", f"{BASE}/{route}", json.dumps(fields).encode()))
    assert answer.status == 200, answer
    return json.loads(answer.body)


def done(app: App, request_id: str) -> bytes:
    body = json.dumps({"request_id": request_id}).encode()
    while (answer := app.send(Sent("POST", f"{BASE}/retrieve_future", body))).status == 408:
        pass
    assert answer.status == 200, answer
    return answer.body


def new_world(app: App) -> World:
    session, spare = (
        post(app, "create_session", sdk_version="0.38.0")["session_id"] for _ in range(2)
    )
    model = post(app, "create_model", session_id=session, model_seq_id=0, base_model=MODEL,
                 lora_config={"rank": 2})  # fmt: skip
    saved = post(app, "save_weights", model_id=model["model_id"], seq_id=1, path="a")
    path = json.loads(done(app, saved["request_id"]))["path"]
    made = post(app, "create_sampling_session", session_id=session, sampling_session_seq_id=0,
                base_model=MODEL)  # fmt: skip
    sampler = made["sampling_session_id"]
    sampled = post(
        app, "asample", sampling_session_id=sampler, seq_id=0, record_stability_info=True,
        prompt={"chunks": [{"tokens": [5, 6]}]}, sampling_params={"max_tokens": 3, "stop": []},
    )  # fmt: skip
    result = pb.SampleResponse.FromString(done(app, sampled["request_id"]))
    tokens = np.frombuffer(result.sequences[0].tokens, "<i4").tolist()
    world = World(
        session, spare, model["model_id"], sampler, path, sampled["sample_sequence_ids"][0], tokens
    )
    lanes = app.service._parts.lanes

    def next_training() -> int:
        lane = lanes.get(world.model)
        return 1 if lane is None else lane.next_seq + len(lane.parked)

    world.next_training = next_training
    return world


# ------------------------------------------------------------------ JSON bodies by path


def adam(world: World) -> Json:
    return {
        "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }  # fmt: skip


def sampling(world: World) -> Json:
    return {
        "type": "sample",
        "sampling_session_id": world.sampler,
        "seq_id": world.sample_id(),
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {
            "max_tokens": 3, "seed": 7, "temperature": 1.0, "top_k": -1, "top_p": 1.0,
            "stop": ["ab"],
        },
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
        "prompt_alt_tokens_k": 1,
        "prompt_logprobs_last_n": 1,
        "record_stability_info": True,
        "target_prompt_logprobs": {
            "data": [5, 6], "dtype": "int64", "shape": [2, 8],
            "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [5, 6],
        },
    }  # fmt: skip


JSON_BODIES: dict[str, Callable[[World], Json]] = {
    "/client/config": lambda w: {"sdk_version": "0.38.0"},
    "/client/dynamic_config": lambda w: {"sdk_version": "0.38.0"},
    "/telemetry": lambda w: {"events": [{"event": "x"}], "session_id": w.session},
    "/create_session": lambda w: {
        "tags": ["a", "b"], "user_metadata": {"k": "v"}, "sdk_version": "0.38.0",
        "project_id": "p", "display_name": "d",
    },
    "/session_heartbeat": lambda w: {"session_id": w.session},
    "/sessions/{session_id}/finish": lambda w: {"reason": {"type": "success"}, "detail": None},
    "/create_model": lambda w: {
        "session_id": w.session, "model_seq_id": 100 + w.number(), "base_model": MODEL,
        "user_metadata": {"a": "b"}, "optimizer_config": {"type": "adamw"},
        "lora_config": {"rank": 2, "seed": 3, "train_attn": True, "train_mlp": True,
                        "train_unembed": True},
    },
    "/get_info": lambda w: {"model_id": w.model},
    "/optim_step": lambda w: {
        "model_id": w.model, "seq_id": w.next_training(), "adam_params": adam(w)
    },
    "/save_weights": lambda w: {
        "model_id": w.model, "seq_id": w.next_training(), "path": f"n{w.number()}",
        "ttl_seconds": 3600, "overwrite": False, "user_metadata": {"a": "b"},
    },
    "/save_weights_for_sampler": lambda w: {
        "model_id": w.model, "seq_id": w.next_training(), "kind": "snapshot",
        "sampling_session_seq_id": 1000 + w.number(), "ttl_seconds": 3600,
        "user_metadata": {"a": "b"},
    },
    "/load_weights": lambda w: {
        "model_id": w.model, "seq_id": w.next_training(), "path": w.path, "optimizer": True
    },
    "/save_weights_external": lambda w: {
        "model_id": w.model, "seq_id": w.next_training(), "path": f"n{w.number()}",
        "ttl_seconds": 3600, "age_encryption_recipients": [],
    },
    "/weights_info": lambda w: {"tinker_path": w.path},
    "/copy_weights": lambda w: {
        "source_path": w.path, "destination_project_id": "p", "ttl_seconds": 3600
    },
    "/training_runs/{run}/checkpoints/{kind}/{name}/ttl": lambda w: {"ttl_seconds": 3600},
    "/sessions/{session_id}/project": lambda w: {"project_id": "p"},
    "/sessions/search": lambda w: {
        "session_id": w.session, "project_ids": ["p"], "user_metadata": {"k": "v"},
        "display_name": "d", "owner": {"type": "own"}, "limit": 3,
        "statuses": [{"type": "client_finished", "reasons": ["success"]}, {"type": "active"}],
        "cursor": {"last_created_at": "2026-01-01T00:00:00+00:00", "last_session_id": "x"},
    },
    "/unload_model": lambda w: {"model_id": w.model + "9"},
    "/create_sampling_session": lambda w: {
        "session_id": w.session, "sampling_session_seq_id": 2000 + w.number(),
        "base_model": MODEL,
    },
    "/join_sampling_session": lambda w: {"sampling_session_id": w.sampler},
    "/asample": sampling,
    "/retrieve_future": lambda w: {
        "request_id": f"{w.sampler}:{w.next_sample}", "allow_metadata_only": True
    },
    "/retrieve_futures": lambda w: {
        "target": {"type": "sampling_session", "sampling_session_id": w.sampler,
                   "cloned_sampler_id": 0},
        "prev_cursor": 0, "timeout": 0.01, "retrieved_request_ids": [f"{w.sampler}:1"],
    },
    "/cancel_future": lambda w: {"request_id": f"{w.sampler}:{w.next_sample}"},
}  # fmt: skip

# ------------------------------------------------------------------ protobuf bodies


def ints(values: list[int]) -> pb.Tensor:
    return pb.Tensor(dense=np.array(values, "<i8").tobytes(), dtype=pb.DTYPE_INT64)


def floats(values: list[float]) -> pb.Tensor:
    return pb.Tensor(dense=np.array(values, "<f4").tobytes(), dtype=pb.DTYPE_FLOAT32)


def chunk(tokens: list[int]) -> pb.Chunk:
    return pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array(tokens, "<i4").tobytes()))


def span(kind: str, sequence_id: str, offset: int, length: int) -> pb.ProvenanceSpan:
    run = pb.TokenSpan(sequence_id=sequence_id, offset=offset, length=length)
    return pb.ProvenanceSpan(**{kind: run})


def plain(world: World) -> pb.ForwardBackwardRequest:
    weights = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[3, 4])
    weights.sparse_csr.values = np.array([1, 0.5, 2], "<f4").tobytes()
    weights.sparse_csr.crow_indices = np.array([0, 1, 2, 3], "<i8").tobytes()
    weights.sparse_csr.col_indices = np.array([0, 1, 3], "<i8").tobytes()
    many = pb.Tensor(dense=np.arange(12, dtype="<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[3, 4])
    simple = {"target_tokens": ints([6, 7, 8]), "weights": floats([1, 1, 0])}
    return request(world, "cross_entropy", [
        pb.Datum(model_input=[chunk([5, 6, 7])], loss_fn_inputs=simple),
        pb.Datum(model_input=[chunk([5]), chunk([6, 7])],
                 loss_fn_inputs={"target_tokens": many, "weights": weights}),
    ])  # fmt: skip


def policy(world: World) -> pb.ForwardBackwardRequest:
    inputs = {
        "target_tokens": ints([6, 7]), "logprobs": floats([-1, -2]), "advantages": floats([1, -1])
    }  # fmt: skip
    made = request(world, "ppo", [pb.Datum(model_input=[chunk([5, 6])], loss_fn_inputs=inputs)])
    made.loss_fn_config_v2["clip_low_threshold"].number = 0.8
    made.loss_fn_config["clip_high_threshold"] = 1.2
    return made


def traced(world: World) -> pb.ForwardBackwardRequest:
    """Names the recorded sequence: prompt 5 6, then three sampled tokens."""
    tokens = [5, 6, *world.tokens]
    rows = len(tokens) - 1
    inputs = {
        "target_tokens": ints(tokens[1:]), "logprobs": floats([0.0] + [-5.0] * (rows - 1)),
        "advantages": floats([0.0] + [1.0] * (rows - 1)),
    }  # fmt: skip
    sampled = len(world.tokens)
    return request(world, "importance_sampling", [pb.Datum(
        model_input=[chunk(tokens[:-1])], loss_fn_inputs=inputs,
        model_input_spans=[span("prompt_tokens", world.sequence, 0, 2),
                           span("sampled_tokens", world.sequence, 0, sampled - 1)],
        loss_fn_input_spans=[span("prompt_tokens", world.sequence, 1, 1),
                             span("sampled_tokens", world.sequence, 0, sampled)],
    )])  # fmt: skip


def request(world: World, loss_fn: str, data: list[pb.Datum]) -> pb.ForwardBackwardRequest:
    return pb.ForwardBackwardRequest(
        model_id=world.model, seq_id=world.next_training(), data=data, loss_fn=loss_fn
    )


PROTO_BODIES = (plain, policy, traced)


# ------------------------------------------------------------------ whole requests

_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")


def path_of(route: Route, world: World) -> str:
    """The route's path with this world's ids in the places that have a name for them."""
    known = {"session_id": world.spare, "sampler_id": world.sampler, "model_id": world.model}
    known |= {"kind": "weights", "name": "a"}

    def fill(found: re.Match[str]) -> str:
        return known.get(found[1], world.model)

    return BASE + _PARAMETER.sub(fill, route.path)


def is_proto(route: Route) -> bool:
    return route.path == "/forward_backward"


def headers(proto: bool = False) -> tuple[tuple[bytes, bytes], ...]:
    kind = b"application/x-protobuf" if proto else b"application/json"
    return ((b"x-api-key", KEY), (b"content-type", kind))


def any_route(rng: Random) -> Route:
    """Training and sampling bodies have the most to get wrong: they come more often."""
    weight = {"/forward_backward": 10, "/asample": 5, "/optim_step": 2}
    return rng.choices(ROUTES, [weight.get(route.path, 1) for route in ROUTES])[0]
