"""Compressed bodies, their limits, and the place a broken body still had in its queue."""

import json
import time

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import Invalid, TooLarge, UserError
from trimtab.wire import trimtab_pb2 as pb
from trimtab.wire.codec import WireCodec, inflate, place
from trimtab.wire.decode import DECODERS

LIMIT = 10**6


def body_of(model_id="S:train:0", seq_id=7, datums=3):
    return pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=[pb.Datum()] * datums, loss_fn="cross_entropy"
    ).SerializeToString()


def test_zstd_with_and_without_a_declared_size_is_undone():
    plain = bytes(range(256)) * 1000
    declared = zstandard.ZstdCompressor().compress(plain)
    stream = zstandard.ZstdCompressor().compressobj()
    undeclared = stream.compress(plain) + stream.flush()
    for compressed in (declared, undeclared):
        assert inflate(compressed, "zstd", LIMIT) == (plain, None)
    assert inflate(plain, "", LIMIT) == (plain, None)


def test_a_bomb_stops_at_the_limit():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(500 * 10**6))
    assert len(bomb) < 50_000
    found, error = inflate(bomb, "zstd", LIMIT)
    assert isinstance(error, TooLarge) and str(LIMIT) in str(error)
    assert len(found) <= LIMIT


def test_broken_zstd_gives_what_came_out_before():
    plain = body_of(datums=100_000)
    compressed = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(plain)
    for broken, words in (
        (compressed[:-6], "ends in the middle"),
        (b"nonsense", "broken zstd"),
        (compressed + b"more", "bytes follow"),
        (b"", "ends in the middle"),
    ):
        _, error = inflate(broken, "zstd", LIMIT)
        assert isinstance(error, Invalid) and words in str(error)
    prefix, _ = inflate(compressed[:-6], "zstd", LIMIT)
    assert place("forward_backward", prefix) == ("S:train:0", 7)


def test_another_encoding_is_refused_by_name():
    assert "'br'" in str(inflate(b"x", "br", LIMIT)[1])


@pytest.mark.parametrize("cut", [14, 20, 30])
def test_a_torn_message_still_tells_its_place(cut):
    body = body_of()[:cut]
    assert place("forward_backward", body) == ("S:train:0", 7)


def test_a_body_without_a_place_has_none():
    assert place("forward_backward", b"") is None
    assert place("forward_backward", body_of()[:5]) is None
    assert place("forward_backward", b"\xff" * 20) is None
    started = time.monotonic()
    assert place("forward_backward", bytes(10**8)) is None
    assert time.monotonic() - started < 0.5
    assert place("optim_step", b"{") is None
    assert place("optim_step", b'{"model_id": 3, "seq_id": 1}') is None
    assert place("forward_backward", body_of(seq_id=-1)) is None
    assert place("optim_step", b'{"model_id": "a", "seq_id": 18446744073709551615}') is None
    assert place("create_model", b'{"model_id": "a", "seq_id": 1}') is None
    body = json.dumps({"sampling_session_id": "S:sample:0", "seq_id": 5, "prompt": 1}).encode()
    assert place("sample", body) == ("S:sample:0", 5)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_user_error(kind, body):
    place(kind, body)
    try:
        WireCodec(10**6).decode(kind, body)
    except UserError as error:
        assert str(error)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_message_with_one_byte_changed_raises_nothing_but_a_user_error(data):
    tensor = pb.Tensor(dense=b"12345678", dtype=pb.DTYPE_INT64, shape=[1])
    csr = pb.Tensor(
        sparse_csr=pb.SparseCsr(values=b"1234", crow_indices=bytes(16), col_indices=b""),
        dtype=pb.DTYPE_FLOAT32,
        shape=[1, 2],
    )
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"12345678"))
    span = pb.ProvenanceSpan(sampled_tokens=pb.TokenSpan(sequence_id="s", offset=1, length=2))
    datum = pb.Datum(
        model_input=[chunk], loss_fn_inputs={"a": tensor, "b": csr}, model_input_spans=[span]
    )
    body = bytearray(pb.ForwardBackwardRequest(model_id="m", data=[datum]).SerializeToString())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        WireCodec(10**6).decode("forward_backward", bytes(body))
    except UserError as error:
        assert str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "session_id",
        "model_seq_id",
        "base_model",
        "lora_config",
        "model_id",
        "seq_id",
        "adam_params",
        "path",
        "optimizer",
        "prompt",
        "sampling_params",
        "sampling_session_id",
        "target_prompt_logprobs",
        "user_metadata",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(DECODERS)), st.dictionaries(NAMES, JSON, max_size=8))
def test_no_json_raises_anything_but_a_user_error(kind, fields):
    try:
        WireCodec(10**6).decode(kind, json.dumps(fields).encode())
    except UserError as error:
        assert str(error)
