"""Results to the bodies that retrieve_future sends: protobuf for samples and forward_backward,
JSON for the rest. Knows nothing of who asks for them or when.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np

from trimtab.types import (
    CreateCustomLossResult,
    CreateModelResult,
    ForwardBackwardResult,
    LoadWeightsResult,
    OptimStepResult,
    Result,
    SampledSequence,
    SampleResult,
    SaveWeightsExternalResult,
    SaveWeightsForSamplerResult,
    SaveWeightsResult,
    TopK,
    UnloadModelResult,
)
from trimtab.wire import trimtab_pb2 as pb
from trimtab.wire.tensors import batched, tensor_message

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
RECORD = "ArrayRecord"
STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def encode(result: Result) -> tuple[bytes, str]:
    """The body and its content type."""
    if isinstance(result, ForwardBackwardResult):
        return forward_backward(result).SerializeToString(deterministic=True), PROTOBUF
    if isinstance(result, SampleResult):
        return sample(result).SerializeToString(deterministic=True), PROTOBUF
    # Not orjson: a step's metrics may hold inf or nan, which the client's reader accepts.
    return json.dumps(_plain(result)).encode(), JSON


def _plain(
    result: CreateModelResult
    | OptimStepResult
    | SaveWeightsResult
    | SaveWeightsForSamplerResult
    | SaveWeightsExternalResult
    | LoadWeightsResult
    | UnloadModelResult
    | CreateCustomLossResult,
) -> dict[str, object]:
    match result:
        case CreateModelResult(model_id):
            return {"type": "create_model", "model_id": model_id}
        case OptimStepResult(metrics):
            return {"metrics": {name: float(value) for name, value in metrics.items()}}
        case SaveWeightsResult(path):
            return {"type": "save_weights", "path": path}
        case SaveWeightsForSamplerResult(path, sampling_session_id):
            found = {"path": path, "sampling_session_id": sampling_session_id}
            given = {name: value for name, value in found.items() if value is not None}
            return {"type": "save_weights_for_sampler", **given}
        case SaveWeightsExternalResult(path, size_bytes):
            return {"type": "save_weights_external", "path": path, "size_bytes": size_bytes}
        case LoadWeightsResult(path, model_id):
            return {"type": "load_weights", "path": path, "model_id": model_id}
        case CreateCustomLossResult(loss_id):
            return {"type": "create_custom_loss", "loss_id": loss_id}
        case UnloadModelResult(model_id):
            return {"type": "unload_model", "model_id": model_id}


def forward_backward(result: ForwardBackwardResult) -> pb.ForwardBackwardOutput:
    """One record, or one for each run of datums whose log-probabilities have the same width K."""
    runs = itertools.groupby(result.logprobs, key=lambda array: array.shape[1:])
    return pb.ForwardBackwardOutput(
        loss_fn_output_type=RECORD,
        loss_fn_outputs=[_record(list(arrays)) for _, arrays in runs],
        metrics={name: float(value) for name, value in result.metrics.items()},
    )


def _record(logprobs: Sequence[np.ndarray]) -> pb.ArrayRecord:
    return pb.ArrayRecord(
        type_tag=RECORD, fields={"logprobs": batched(logprobs)}, num_datums=len(logprobs)
    )


def sample(result: SampleResult) -> pb.SampleResponse:
    message = pb.SampleResponse(
        sequences=[_sequence(sequence) for sequence in result.sequences],
        prompt_cache_hit_tokens=result.prompt_cache_hit_tokens,
    )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _floats(result.prompt_logprobs)
    if result.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(result.topk_prompt_logprobs))
    if result.target_prompt_logprobs is not None:
        targets = tensor_message(result.target_prompt_logprobs, result.target_layout)
        message.target_prompt_logprobs.CopyFrom(targets)
    if result.prompt_alt_tokens is not None and result.prompt_alt_logprobs is not None:
        message.prompt_alt_tokens.tokens.CopyFrom(tensor_message(result.prompt_alt_tokens))
        message.prompt_alt_tokens.logprobs.CopyFrom(tensor_message(result.prompt_alt_logprobs))
    return message


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    message = pb.SampledSequence(
        stop_reason=STOP_REASONS[sequence.stop_reason],
        tokens=_ints(sequence.tokens),
        logprobs=_floats(sequence.logprobs),
    )
    if sequence.topk is not None:
        message.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk))
    return message


def _topk(topk: TopK) -> pb.TopkLogprobs:
    length, k = topk.ids.shape
    return pb.TopkLogprobs(
        token_ids=_ints(topk.ids), logprobs=_floats(topk.logprobs), k=k, length=length
    )


def _ints(array: np.ndarray) -> bytes:
    return array.astype("<i4", copy=False).tobytes()


def _floats(array: np.ndarray) -> bytes:
    return array.astype("<f4", copy=False).tobytes()
