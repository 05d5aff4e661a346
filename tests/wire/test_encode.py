"""Results as the SDK's own decoder reads them."""

import json
import math

import numpy as np
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from trimtab import types
from trimtab.wire.codec import WireCodec

PROTOBUF = "application/x-protobuf"


def encoded(result):
    body, content_type = WireCodec().encode(result)
    return content_type, body


def test_forward_backward_keeps_ragged_arrays_and_metrics():
    rng = np.random.default_rng(0)
    widths = [(2,), (5,), (4, 3), (1, 3), (2, 2), (0,)]
    arrays = tuple(rng.normal(size=shape).astype(np.float32) for shape in widths)
    result = types.ForwardBackwardResult(arrays, {"loss:sum": 2.5, "kl:max": math.inf})
    content_type, body = encoded(result)
    assert content_type == PROTOBUF
    read = deserialize_forward_backward_output(body)
    assert read.loss_fn_output_type == "ArrayRecord"
    assert read.metrics == {"loss:sum": 2.5, "kl:max": math.inf}
    assert len(read.loss_fn_outputs) == len(arrays)
    for output, array in zip(read.loss_fn_outputs, arrays, strict=True):
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), array)
        assert output["logprobs"].shape == list(array.shape)


def sequence(tokens, stop_reason="stop", topk=None):
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return types.SampledSequence(np.array(tokens, np.int32), logprobs, stop_reason, topk)


def test_a_sample_reads_back_whole():
    topk = types.TopK(
        np.array([[3, 1], [4, 0]], np.int32), np.array([[-0.1, -2], [-0.5, -99999]], np.float32)
    )
    first_row_empty = types.TopK(
        np.array([[0], [6], [7]], np.int32), np.array([[-99999], [-1], [-2]], np.float32)
    )
    result = types.SampleResult(
        sequences=(sequence([3, 4], topk=topk), sequence([9], "length")),
        prompt_logprobs=np.array([np.nan, -1, -2], np.float32),
        topk_prompt_logprobs=first_row_empty,
        target_prompt_logprobs=np.array([[0, -1.5], [-2.5, 0]], np.float32),
        prompt_alt_tokens=np.array([[1, 2], [3, 4]], np.int32),
        prompt_alt_logprobs=np.array([[-1, -2], [-3, -4]], np.float32),
        prompt_cache_hit_tokens=2,
    )
    content_type, body = encoded(result)
    assert content_type == PROTOBUF
    read = deserialize_sample_response(body)
    assert [s.tokens for s in read.sequences] == [[3, 4], [9]]
    assert [s.stop_reason for s in read.sequences] == ["stop", "length"]
    assert read.sequences[0].logprobs == [-1.0, -2.0]
    assert [[token for token, _ in row] for row in read.sequences[0].topk_logprobs] == [[3, 1], [4]]
    assert read.prompt_logprobs == [None, -1.0, -2.0]
    assert read.topk_prompt_logprobs == [None, [(6, -1.0)], [(7, -2.0)]]
    np.testing.assert_array_equal(
        read.target_prompt_logprobs.to_numpy(), result.target_prompt_logprobs
    )
    assert read.prompt_alt_tokens.tokens.to_numpy().tolist() == [[1, 2], [3, 4]]
    assert read.prompt_alt_tokens.tokens.dtype == "int64"
    assert read.prompt_alt_tokens.logprobs.to_numpy().tolist() == [[-1, -2], [-3, -4]]
    assert read.prompt_cache_hit_tokens == 2


def test_prompt_targets_asked_in_csr_are_answered_in_the_same_cells():
    layout = types.CsrLayout(np.array([0, 1, 1, 3]), np.array([1, 0, 1]))
    dense = np.array([[0, -1], [0, 0], [-2, -3]], np.float32)
    result = types.SampleResult(
        (sequence([1]),), target_prompt_logprobs=dense, target_layout=layout
    )
    read = deserialize_sample_response(encoded(result)[1]).target_prompt_logprobs
    assert read.sparse_crow_indices == [0, 1, 1, 3] and read.sparse_col_indices == [1, 0, 1]
    assert read.data == [-1.0, -2.0, -3.0] and read.shape == [3, 2]


def test_what_was_not_asked_for_is_absent():
    read = deserialize_sample_response(encoded(types.SampleResult((sequence([1]),)))[1])
    assert read.prompt_logprobs is None and read.topk_prompt_logprobs is None
    assert read.target_prompt_logprobs is None and read.prompt_alt_tokens is None
    assert read.sequences[0].topk_logprobs is None


def test_the_rest_is_json_without_the_words_that_mean_something_else():
    results = {
        types.CreateModelResult("S:train:0"): {"type": "create_model", "model_id": "S:train:0"},
        types.SaveWeightsResult("tinker://a"): {"type": "save_weights", "path": "tinker://a"},
        types.SaveWeightsForSamplerResult("tinker://a", None): {
            "type": "save_weights_for_sampler",
            "path": "tinker://a",
        },
        types.SaveWeightsForSamplerResult(None, "S:sample:0"): {
            "type": "save_weights_for_sampler",
            "sampling_session_id": "S:sample:0",
        },
        types.LoadWeightsResult("tinker://a", "S:train:1"): {
            "type": "load_weights",
            "path": "tinker://a",
            "model_id": "S:train:1",
        },
        types.UnloadModelResult("S:train:1"): {"type": "unload_model", "model_id": "S:train:1"},
    }
    for result, expected in results.items():
        content_type, body = encoded(result)
        assert content_type == "application/json"
        assert json.loads(body) == expected
        assert not {"error", "status"} & set(expected)


def test_metrics_of_a_step_keep_numbers_that_json_has_no_word_for():
    content_type, body = encoded(
        types.OptimStepResult({"grad_norm": np.float32(0.5), "x": math.inf})
    )
    assert content_type == "application/json"
    assert json.loads(body) == {"metrics": {"grad_norm": 0.5, "x": math.inf}}


def test_equal_results_are_equal_bytes_in_every_process():
    """A replay compares what it gets with what was told by the process before it."""
    names = [f"m{i}:sum" for i in range(40)]
    made = [
        encoded(types.ForwardBackwardResult((np.zeros(3, "f4"),), dict.fromkeys(order, 1.0)))
        for order in (names, names[::-1])
    ]
    assert made[0] == made[1]
