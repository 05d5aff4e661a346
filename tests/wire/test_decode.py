"""Request bodies as the SDK writes them, read back; and what is refused, by name."""

import json

import numpy as np
import pytest
import torch
from tinker import types as sdk
from tinker.proto import tinker_public_pb2 as theirs
from tinker.proto.request_conv import forward_backward_request_to_proto

from trimtab import types
from trimtab.errors import Invalid
from trimtab.wire import trimtab_pb2 as ours
from trimtab.wire.codec import WireCodec

CODEC = WireCodec()
MODEL = "3f1c:train:0"


def sdk_body(data, loss_fn="cross_entropy", config=None, seq_id=3, forward_only=False):
    request = sdk.ForwardBackwardRequest(
        forward_backward_input=sdk.ForwardBackwardInput(
            data=data, loss_fn=loss_fn, loss_fn_config=config
        ),
        model_id=MODEL,
        seq_id=seq_id,
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def prompt_run(offset, length):
    return sdk.PromptProvenanceSpan(sequence_id="s:0:0", offset=offset, length=length)


def sampled_run(offset, length):
    return sdk.SampledProvenanceSpan(sequence_id="s:0:0", offset=offset, length=length)


def message(**fields):
    return ours.ForwardBackwardRequest(model_id=MODEL, seq_id=1, **fields)


def datum(**inputs):
    return ours.Datum(loss_fn_inputs=inputs)


def decode(body, kind="forward_backward"):
    return CODEC.decode(kind, body)


def test_the_schema_has_the_field_numbers_of_the_sdk():
    def fields(file, message):
        found = file.message_types_by_name[message].fields
        return {(f.number, f.name, f.type, f.is_repeated) for f in found}

    same = [
        "ForwardBackwardRequest",
        "Datum",
        "Chunk",
        "EncodedTextChunk",
        "Tensor",
        "SparseCsr",
        "ProvenanceSpan",
        "LossConfigValue",
        "ForwardBackwardOutput",
        "ArrayRecord",
        "BatchedTensor",
        "SampleResponse",
        "SampledSequence",
        "TopkLogprobs",
        "PromptAltTokens",
        "DmelChunk",
    ]
    for name in same:
        assert fields(ours.DESCRIPTOR, name) == fields(theirs.DESCRIPTOR, name), name
    for span in ("PromptProvenanceSpan", "SampledProvenanceSpan"):
        assert fields(ours.DESCRIPTOR, "TokenSpan") == fields(theirs.DESCRIPTOR, span)
    assert dict(ours.DType.items()) == dict(theirs.DType.items())
    assert dict(ours.StopReason.items()) == dict(theirs.StopReason.items())


def test_a_datum_of_the_sdk_arrives_as_it_was():
    logprobs = np.array([-0.5, -1.25, -3.0], np.float32)
    given = sdk.Datum(
        model_input=sdk.ModelInput.from_ints([5, 6]).append_int(7),
        loss_fn_inputs={
            "target_tokens": [6, 7, 8],
            "logprobs": logprobs,
            "advantages": [1.0, -1.0, 0.0],
        },
        model_input_spans=[prompt_run(0, 3)],
        loss_fn_input_spans=[
            prompt_run(1, 2),
            sampled_run(0, 1),
        ],
    )
    config = {"clip_low_threshold": 0.8, "mode": "x"}
    got = decode(sdk_body([given], "ppo", config, seq_id=7, forward_only=True))
    assert (got.model_id, got.seq_id, got.loss_fn) == (MODEL, 7, "ppo")
    assert got.forward_only
    assert dict(got.loss_fn_config) == config
    (read,) = got.data
    assert read.tokens.tolist() == [5, 6, 7] and read.tokens.dtype == np.int32
    assert read.inputs["target_tokens"].tolist() == [6, 7, 8]
    assert read.inputs["target_tokens"].dtype == np.int64
    np.testing.assert_array_equal(read.inputs["logprobs"], logprobs)
    assert read.model_input_spans == (types.PromptSpan("s:0:0", 0, 3),)
    assert read.loss_fn_input_spans[1] == types.SampledSpan("s:0:0", 0, 1)


def test_sparse_tensors_are_made_dense_each_by_its_own_pattern():
    """The SDK drops zeros from ids and from weights separately: other cells, other counts."""
    targets = torch.zeros(4, 6, dtype=torch.int64)
    targets[0, 1], targets[2, 5] = 9, 4
    weights = torch.zeros(4, 6)
    weights[1, 0], weights[3, 2] = 0.5, -2.0
    given = sdk.Datum(
        model_input=sdk.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    assert given.loss_fn_inputs["weights"].sparse_crow_indices is not None
    (read,) = decode(sdk_body([given])).data
    np.testing.assert_array_equal(read.inputs["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(read.inputs["weights"], weights.numpy())


def test_the_older_map_of_numbers_is_read_when_the_newer_is_empty():
    body = message(loss_fn="dro", loss_fn_config={"beta": 0.1}).SerializeToString()
    assert dict(decode(body).loss_fn_config) == {"beta": 0.1}


def test_narrow_dtypes_are_widened():
    ids = ours.Tensor(dense=np.array([1, -2], "<i4").tobytes(), dtype=ours.DTYPE_INT32)
    halves = np.array([1.5, -0.25], np.float32).view(np.uint32) >> 16
    values = ours.Tensor(dense=halves.astype("<u2").tobytes(), dtype=ours.DTYPE_BFLOAT16)
    (read,) = decode(message(data=[datum(a=ids, b=values)]).SerializeToString()).data
    assert read.inputs["a"].tolist() == [1, -2] and read.inputs["a"].dtype == np.int64
    assert read.inputs["b"].tolist() == [1.5, -0.25] and read.inputs["b"].dtype == np.float32


def csr(shape, crow, col, values=(1.0,)):
    packed = ours.SparseCsr(
        values=np.array(values, "<f4").tobytes(),
        crow_indices=np.array(crow, "<i8").tobytes(),
        col_indices=np.array(col, "<i8").tobytes(),
    )
    return ours.Tensor(sparse_csr=packed, dtype=ours.DTYPE_FLOAT32, shape=shape)


F32 = ours.DTYPE_FLOAT32
BAD_TENSORS = {
    "no dtype": (ours.Tensor(dense=b"1234"), "dtype: 0 is none of"),
    "torn": (
        ours.Tensor(dense=b"12345", dtype=F32),
        "dense: 5 bytes are no whole number of 4-byte",
    ),
    "shape": (ours.Tensor(dense=b"12345678", dtype=F32, shape=[3]), "shape: [3] does not hold 2"),
    "negative": (ours.Tensor(dense=b"12345678", dtype=F32, shape=[-1, -2]), "shape: [-1, -2] does"),
    "csr in 1-D": (csr([2], [0, 1], [0]), "shape: a sparse tensor needs two sizes"),
    "csr column": (csr([2, 2], [0, 1, 1], [2]), "col_indices: must lie in 0 to 1"),
    "csr rows": (csr([2, 2], [0, 1], [0]), "need 3 crow_indices and 1 col_indices, found 2 and 1"),
    "csr order": (
        csr([1, 3], [0, 2], [1, 1], (1.0, 2.0)),
        "col_indices: must rise within each row",
    ),
    "csr falls": (csr([2, 2], [0, 2**62, 1], [0]), "crow_indices: must rise from 0 to the 1"),
    "csr bomb": (csr([1, 2**50], [0, 1], [0]), "may take 134217728 bytes when made dense"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_broken_tensor_is_refused_by_name(case):
    tensor, words = BAD_TENSORS[case]
    with pytest.raises(Invalid) as found:
        decode(message(data=[datum(), datum(weights=tensor)]).SerializeToString())
    assert "data[1].loss_fn_inputs['weights']" in str(found.value)
    assert words in str(found.value)


def test_only_text_is_read():
    picture = ours.Chunk(image=ours.ImageChunk(data=b"png", format="png"))
    sound = ours.Chunk(dmel=ours.DmelChunk(dmel=b"x"))
    for chunk, words in (
        (picture, "holds image"),
        (sound, "holds dmel"),
        (ours.Chunk(), "holds nothing"),
    ):
        body = message(data=[ours.Datum(model_input=[chunk])]).SerializeToString()
        with pytest.raises(Invalid, match=rf"data\[0\].model_input\[0\]: {words}"):
            decode(body)


def test_broken_protobuf_and_too_many_datums_are_refused():
    with pytest.raises(Invalid, match="broken protobuf"):
        decode(b"\xff\xff\xff")
    with pytest.raises(Invalid, match="data: 16385 datums"):
        decode(message(data=[ours.Datum()] * 16_385).SerializeToString())


# ------------------------------------------------------------------ JSON


def asample(**changes):
    request = sdk.SampleRequest(
        sampling_session_id="S:sample:0",
        seq_id=4,
        prompt=sdk.ModelInput.from_ints([1, 2, 3]).append_int(9),
        sampling_params=sdk.SamplingParams(max_tokens=5, temperature=0.5, top_k=3, top_p=0.9),
    )
    return json.loads(request.model_dump_json(exclude_none=True)) | changes


def sample(**changes):
    return decode(json.dumps(asample(**changes)).encode(), "sample")


def test_a_sample_of_the_sdk_arrives_as_it_was():
    got = sample(num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=2, newer_field=[1])
    assert (got.sampling_session_id, got.seq_id, got.num_samples) == ("S:sample:0", 4, 2)
    assert got.prompt.tolist() == [1, 2, 3, 9] and got.prompt.dtype == np.int32
    assert got.params == types.SamplingParams(5, None, 0.5, 3, 0.9)
    assert got.prompt_logprobs and got.topk_prompt_logprobs == 2
    assert not got.record_stability_info


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, ((), (), False)),
        ("end", (("end",), (), False)),
        (["a", "b"], (("a", "b"), (), False)),
        ([5, 0], ((), (5, 0), False)),
        ([], ((), (), True)),
    ],
)
def test_stop_in_all_its_forms(stop, expected):
    params = sample(sampling_params={"stop": stop}).params
    assert (params.stop_strings, params.stop_token_ids, params.ignore_eos) == expected


def test_a_seed_is_folded_into_63_bits():
    assert sample(sampling_params={"seed": 2**64 - 1}).params.seed == 2**63 - 1
    assert sample(sampling_params={"seed": 7}).params.seed == 7


def test_prompt_targets_keep_their_layout_and_fill_with_minus_one():
    sparse = {
        "data": [7, 8], "dtype": "int64", "shape": [3, 2],
        "sparse_crow_indices": [0, 1, 1, 2], "sparse_col_indices": [1, 0],
    }  # fmt: skip
    got = sample(target_prompt_logprobs=sparse)
    assert got.target_prompt_logprobs.tolist() == [[-1, 7], [-1, -1], [8, -1]]
    assert got.target_layout.crow_indices.tolist() == [0, 1, 1, 2]
    dense = sample(target_prompt_logprobs={"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1]})
    assert dense.target_prompt_logprobs.tolist() == [[1], [2], [3]]
    assert dense.target_layout is None


BAD_SAMPLES = {
    "prompt: an object is required, found null": {"prompt": None},
    "prompt.chunks: a list is required, found null": {"prompt": {}},
    "prompt.chunks[0].type: 'image'": {"prompt": {"chunks": [{"type": "image", "data": "x"}]}},
    "prompt.chunks[0].tokens[1]: an integer is required, found text": {
        "prompt": {"chunks": [{"tokens": [1, "2"]}]}
    },
    "prompt.chunks[0].tokens[0]: an integer is required, found true or false": {
        "prompt": {"chunks": [{"tokens": [True]}]}
    },
    "prompt.chunks[0].tokens: ids must lie in -2147483648 to 2147483647": {
        "prompt": {"chunks": [{"tokens": [2**31]}]}
    },
    "seq_id: an integer is required, found text": {"seq_id": "4"},
    "num_samples: an integer is required, found a number": {"num_samples": 1.5},
    "sampling_session_id: text is required, found null": {"sampling_session_id": None},
    "sampling_params.temperature: a number is required": {"sampling_params": {"temperature": "1"}},
    "sampling_params.min_p: unknown; allowed are": {"sampling_params": {"min_p": 0.1}},
    "sampling_params.stop: an empty text": {"sampling_params": {"stop": ["a", ""]}},
    "sampling_params.stop[1]: all texts or all token ids": {"sampling_params": {"stop": [1, "a"]}},
    "sampling_params.seed: an integer is required": {"sampling_params": {"seed": -(2**63) - 1}},
    "prompt_logprobs: true or false is required": {"prompt_logprobs": 1},
    "target_prompt_logprobs.dtype: token ids are int64": {
        "target_prompt_logprobs": {"data": [1.0], "dtype": "float32", "shape": [1, 1]}
    },
    "target_prompt_logprobs.data[0]: an integer is required": {
        "target_prompt_logprobs": {"data": [1.5], "dtype": "int64", "shape": [1, 1]}
    },
}


@pytest.mark.parametrize("words", BAD_SAMPLES)
def test_a_wrong_field_is_refused_by_name(words):
    with pytest.raises(Invalid) as found:
        sample(**BAD_SAMPLES[words])
    assert str(found.value).startswith(words)


def of_sdk(kind, request):
    return decode(json.dumps(request.model_dump(mode="json", exclude_none=True)).encode(), kind)


def test_the_other_requests_of_the_sdk_arrive_as_they_were():
    lora = sdk.LoraConfig(rank=4, seed=1, train_mlp=False)
    created = of_sdk(
        "create_model",
        sdk.CreateModelRequest(
            session_id="S", model_seq_id=0, base_model="org/tiny", lora_config=lora,
            user_metadata={"a": "b"},
        ),
    )  # fmt: skip
    assert created == types.CreateModel(
        "S", 0, "org/tiny", types.LoraConfig(4, 1, True, False, True), "adamw", {"a": "b"}
    )
    step = of_sdk(
        "optim_step",
        sdk.OptimStepRequest(
            optim_params=sdk.AdamParams(learning_rate=0.01, grad_clip_norm=1.0),
            model_id=MODEL, seq_id=2,
        ),
    )  # fmt: skip
    assert step == types.OptimStep(MODEL, 2, types.AdamParams(0.01, grad_clip_norm=1.0))
    saved = of_sdk("save_weights", sdk.SaveWeightsRequest(model_id=MODEL, seq_id=3, path="a"))
    assert saved == types.SaveWeights(MODEL, 3, "a")
    published = of_sdk(
        "save_weights_for_sampler",
        sdk.SaveWeightsForSamplerRequest(
            model_id=MODEL, seq_id=4, sampling_session_seq_id=2, kind="inflight"
        ),
    )
    assert published == types.SaveWeightsForSampler(MODEL, 4, None, 2, "inflight")
    loaded = of_sdk(
        "load_weights",
        sdk.LoadWeightsRequest(session_id="S", model_seq_id=1, path="tinker://x", optimizer=True),
    )
    assert loaded == types.LoadWeights("tinker://x", True, session_id="S", model_seq_id=1)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "optimizer_params.type: 'dimuon'"),
        ("optim_step", {}, "adam_params: an object is required, found null"),
        ("optim_step", {"adam_params": {"lr": 1}}, "adam_params.lr: unknown; allowed are learning"),
        ("create_model", {"lora_config": {"alpha": 1}}, "lora_config.alpha: unknown; allowed are"),
        ("create_model", {"optimizer_config": {"type": "sgd"}}, "optimizer_config.type: 'sgd' is"),
        ("create_model", {"user_metadata": {"a": 1}}, "user_metadata.a: text is required, found"),
        ("load_weights", {"path": "x"}, "optimizer: true or false is required, found null"),
        ("load_weights", {"optimizer": False}, "path: text is required, found null"),
        ("save_weights_for_sampler", {"kind": "x"}, "kind: 'x' is neither 'snapshot' nor"),
    ],
)
def test_options_that_would_not_be_honoured_are_refused(kind, fields, words):
    base = {"model_id": MODEL, "seq_id": 1, "session_id": "S", "model_seq_id": 0, "base_model": "b"}
    with pytest.raises(Invalid) as found:
        decode(json.dumps(base | fields).encode(), kind)
    assert str(found.value).startswith(words)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"[" * 5000, b'{"a": 1e999}'])
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(Invalid, match="body: "):
        decode(body, "optim_step")
