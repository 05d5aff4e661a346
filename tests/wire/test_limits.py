"""Each limit is a knob, and beyond it the answer says which."""

from types import SimpleNamespace

import httpx
import pytest
import zstandard

from trimtab.config import load_config
from trimtab.errors import Busy
from trimtab.service.space import MIB, Space
from trimtab.wire import trimtab_pb2 as pb
from trimtab.wire.app import BASE

from .live import MODEL, serving
from .test_isolation import training_data

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


@pytest.fixture(scope="module")
def small(model_folder, tmp_path_factory):
    """A client of a server with little room, a model and a sampling session on it."""
    config = {
        "model": (f"{MODEL}={model_folder}",), "data_dir": tmp_path_factory.mktemp("small"),
        "max_body_mib": 1, "max_datums": 1, "max_request_tokens": 8, "max_spans": 4,
        "max_samples": 2, "max_sessions": 2, "max_models": 1, "hold_seconds": 5,
    }  # fmt: skip
    headers = {"X-API-Key": "tml-x"}
    with serving(**config) as server, httpx.Client(
        base_url=f"{server.url}{BASE}", headers=headers, timeout=20
    ) as http:  # fmt: skip
        session = http.post("/create_session", json={}).json()["session_id"]
        made = http.post("/create_model", json=new_model(session, 0)).json()
        http.post("/retrieve_future", json={"request_id": made["request_id"]})
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        http.post("/create_sampling_session", json=body)
        yield http, session


def new_model(session, number):
    lora = {"rank": 2}
    return {"session_id": session, "model_seq_id": number, "base_model": MODEL, "lora_config": lora}


def several(body, count):
    """The datums of a message, `count` times: repeated fields add up when messages are joined."""
    return body + b"".join(body[body.index(b"\x1a") :] for _ in range(count - 1))


def refused(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["detail"]


def test_the_client_is_told_to_stay_below(small):
    http, _ = small
    flags = http.post("/client/config", json={}).json()
    assert flags["fwdbwd_max_chunk_len"] == 1
    assert flags["fwdbwd_max_chunk_bytes_count"] == MIB // 2


def test_bodies_as_sent_and_as_inflated(small):
    http, _ = small
    wide = b" " * (MIB + 1)
    assert "the limit is 1048576" in refused(http.post("/forward_backward", content=wide), 413)
    small_body = zstandard.ZstdCompressor().compress(bytes(MIB + 1))
    answer = http.post(
        "/forward_backward", content=small_body, headers={"Content-Encoding": "zstd"}
    )
    assert "more than 1048576 bytes after decompression" in refused(answer, 413)


def test_what_a_training_request_may_hold(small):
    http, session = small
    run, post = f"{session}:train:0", "/forward_backward"
    message = several(training_data(run, 1), 2)
    text = refused(http.post(post, content=message), 413)
    assert text == "data has 2 datums; one request may have 1"


def test_how_many_tokens_and_spans(small):
    http, session = small
    run, post = f"{session}:train:0", "/forward_backward"
    message = pb.ForwardBackwardRequest.FromString(training_data(run, 2, "x:0:0"))
    datum = message.data[0]
    span = datum.loss_fn_input_spans[0]
    datum.loss_fn_input_spans.extend([span, span])
    text = refused(http.post(post, content=message.SerializeToString()), 400)
    assert text == "data carries 5 provenance spans; the limit of a request is 4"
    message = pb.ForwardBackwardRequest.FromString(training_data(run, 3))
    message.data[0].model_input[0].encoded_text.tokens = bytes(4 * 9)
    text = refused(http.post(post, content=message.SerializeToString()), 413)
    assert text == "data has 9 input tokens; one request may have 8"


def test_how_many_samples(small):
    http, session = small
    body = {
        "sampling_session_id": f"{session}:sample:0", "seq_id": 0, "num_samples": 3,
        "prompt": PROMPT, "sampling_params": {"max_tokens": 1},
    }  # fmt: skip
    text = refused(http.post("/asample", json=body), 400)
    assert text == "num_samples must lie between 1 and 2, found 3"


def test_how_many_models_and_sessions(small):
    http, session = small
    text = refused(http.post("/create_model", json=new_model(session, 1)), 429)
    assert "models are loaded; allowed are" in text
    assert http.post("/create_session", json={}).status_code == 200
    text = refused(http.post("/create_session", json={}), 429)
    assert text == "2 sessions are open; allowed are 2"


def test_little_room_on_the_disk_asks_clients_to_wait(model_folder, tmp_path):
    config = {"model": (f"{MODEL}={model_folder}",), "data_dir": tmp_path / "data"}
    with serving(**config, min_free_mib=2**40) as server, httpx.Client(
        base_url=f"{server.url}{BASE}", headers={"X-API-Key": "tml-x"}, timeout=20
    ) as http:  # fmt: skip
        session = http.post("/create_session", json={}).json()["session_id"]
        text = refused(http.post("/create_model", json=new_model(session, 0)), 429)
        assert "no more work is taken below 1099511627776 MiB (min_free_mib)" in text
        beat = http.post("/session_heartbeat", json={"session_id": session})
        assert beat.status_code == 200


def test_room_is_looked_at_once_a_second(tmp_path, monkeypatch):
    now, looks = [0.0], []

    def disk_usage(folder):
        looks.append(folder)
        return SimpleNamespace(free=10 * MIB if len(looks) > 1 else 2 * MIB)

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    space = Space(tmp_path, 5 * MIB, lambda: now[0])
    for _ in range(3):
        with pytest.raises(Busy, match="has 2 MiB left"):
            space.check()
    assert len(looks) == 1
    now[0] = 1.0
    space.check()
    assert looks == [tmp_path] * 2


def test_the_knobs_have_bounds():
    for name in ("max_datums", "max_spans", "max_models", "max_sessions", "max_samples"):
        with pytest.raises(ValueError, match=name):
            load_config(None, {"model": ["a/b"], name: "0"}, {})
    assert load_config(None, {"model": ["a/b"], "min_free_mib": "0"}, {}).min_free_mib == 0
