"""Over real sockets: routes, keys, statuses, limits, and polls that are held."""

import json
import re
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import tinker
import zstandard

from trimtab import errors
from trimtab.service.core import Outcome
from trimtab.wire import trimtab_pb2 as pb
from trimtab.wire.app import BASE, ROUTES
from trimtab.wire.calls import WireSettings
from trimtab.wire.sessions import OLDER, TESTED_SDK, client_flags

from .conftest import EARLY

STEP = {"model_id": "S:train:0", "seq_id": 2, "adam_params": {}}


def detail(response, status):
    """The one form an error has: JSON with a sentence, whole, with its length, and never empty."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content) > 0
    assert set(response.json()) == {"detail"}
    return response.json()["detail"]


def test_the_sdk_named_in_404s_is_the_one_the_tests_run_with():
    assert tinker.__version__ == TESTED_SDK


def test_every_switch_is_one_the_sdk_knows():
    known = set(tinker.types.ClientConfigResponse.model_fields)
    assert set(client_flags(WireSettings())) - set(OLDER) <= known
    assert not set(OLDER) & known, "no longer an older one's alone"


def test_the_docs_have_a_row_for_each_route_and_no_other():
    rows = re.findall(
        r"^\| `(GET|POST|PUT|DELETE) (/api/v1\S+)`", Path("docs/protocol.md").read_text(), re.M
    )
    assert rows == [(route.method, BASE + route.path) for route in ROUTES]


# ------------------------------------------------------------------ routes and keys


def test_unknown_routes_and_methods_are_told_in_json(server):
    text = detail(server.client.get("/train_runs"), 404)
    assert (
        text == f"GET /api/v1/train_runs: not found; this server was tested with SDK {TESTED_SDK}"
    )
    response = server.client.get("/optim_step")
    assert "method not allowed" in detail(response, 405)
    assert response.headers["allow"] == "POST"
    assert "tested with SDK" in detail(httpx.get(server.url), 404)


def test_a_key_is_asked_for_except_by_healthz(server):
    assert server.client.get("/healthz", headers={"X-API-Key": ""}).json() == {"status": "ok"}
    assert "required" in detail(server.client.post("/telemetry", headers={"X-API-Key": ""}), 401)
    assert "starts with tml-" in detail(
        server.client.post("/telemetry", headers={"X-API-Key": "sk-1"}), 401
    )
    server.client.post("/cancel_future", json={"request_id": "r"})
    assert server.service.calls == [("cancel", "local", "r")]


def test_configured_keys_own_what_they_make_and_others_are_refused(running):
    with running(WireSettings(api_keys=("tml-a", "tml-b"))) as box:
        owners = []
        for key in ("tml-a", "tml-b", "tml-a"):
            body = {"request_id": "r"}
            box.client.post("/cancel_future", json=body, headers={"X-API-Key": key})
            owners.append(box.service.calls[-1][1])
        assert owners[0] == owners[2] != owners[1]
        assert "tml-" not in "".join(owners)
        response = box.client.post("/cancel_future", headers={"X-API-Key": "tml-"})
        assert detail(response, 401) == "X-API-Key: this server does not know the key"
        assert len(box.service.calls) == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.Invalid("x: no"), 400),
        (errors.NotFound("x: no"), 404),
        (errors.Gone("x: no"), 410),
        (errors.Busy("x: no"), 429),
        (errors.Stopping("x: no"), 503),
        (errors.Lost("x: no"), 500),
    ],
)
def test_each_error_has_its_status_and_its_sentence(server, error, status):
    server.service.raises = error
    assert (
        detail(server.client.post("/session_heartbeat", json={"session_id": "S"}), status)
        == "x: no"
    )


def test_no_error_of_ours_has_a_status_the_client_would_wait_on():
    found = [e for e in vars(errors).values() if isinstance(e, type)]
    assert not {402, 409} & {e.status for e in found}


def test_what_nobody_foresaw_is_logged_with_its_number_and_kept_from_the_client(server, caplog):
    server.service.raises = ZeroDivisionError("secret")
    response = server.client.post("/session_heartbeat", json={"session_id": "S"})
    number = response.headers["x-request-id"]
    assert detail(response, 500) == f"internal error; the server's log has it as request {number}"
    assert number in caplog.text and "ZeroDivisionError: secret" in caplog.text


def test_before_the_service_is_there_everything_is_503(running):
    with running(opened=False) as box:
        assert "loading" in detail(box.client.get("/healthz"), 503)
        assert "loading" in detail(box.client.post("/client/config", json={}), 503)


# ------------------------------------------------------------------ bodies


def test_a_body_over_the_limit_is_refused_on_its_length_unread(server):
    """The body never comes: an answer at all shows that nobody waited for it."""
    host, port = server.listener.getsockname()[:2]
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(
            b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-x\r\n"
            b"Content-Length: 1000000000\r\n\r\n{"
        )
        answer = b""
        while part := connection.recv(65536):  # until the server closes the connection
            answer += part
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body: 1000000000 bytes; the limit is 100000" in answer


def test_a_body_without_length_is_refused_when_the_count_passes_the_limit(server):
    sent = 0

    def endless():
        nonlocal sent
        while sent < 200 * 2**20:
            sent += 65536
            yield bytes(65536)

    response = server.client.post("/asample", content=endless())
    assert detail(response, 413) == "body: more than 100000 bytes"
    assert sent < 50 * 2**20
    assert server.service.calls == []


def test_a_large_upload_by_a_client_that_sends_before_it_reads_still_gets_its_413(server):
    response = server.client.post("/asample", content=bytes(64 * 2**20))
    assert "the limit is 100000" in detail(response, 413)
    assert server.client.get("/healthz").status_code == 200


def test_json_is_small_and_only_training_data_large():
    assert {r.path for r in ROUTES if r.most > 8 * 2**20} == {"/forward_backward"}


def test_a_bad_body_uses_up_its_place(server):
    body = STEP | {"adam_params": {"learning_rate": "fast"}}
    words = "adam_params.learning_rate: a number is required, found text"
    assert detail(server.client.post("/optim_step", json=body), 400) == words
    (call,) = server.service.calls
    assert call[:5] == ("reject", "local", "optim_step", "S:train:0", 2)
    assert str(call[5]) == words
    assert json.loads(call[6]) == body


def test_a_bad_body_that_came_before_another_gets_a_promise_instead(server):
    body = STEP | {"seq_id": EARLY, "adam_params": {"learning_rate": "fast"}}
    response = server.client.post("/optim_step", json=body)
    assert response.status_code == 200
    assert response.json() == {"request_id": f"S:train:0:{EARLY}", "model_id": "S:train:0"}


def test_a_torn_compressed_body_uses_up_its_place(server):
    message = pb.ForwardBackwardRequest(model_id="S:train:0", seq_id=5, loss_fn="x" * 5000)
    plain = message.SerializeToString()
    torn = zstandard.ZstdCompressor().compress(plain + bytes(range(256)) * 99)[:-9]
    headers = {"Content-Encoding": "zstd", "Content-Type": "application/x-protobuf"}
    response = server.client.post("/forward_backward", content=torn, headers=headers)
    assert "broken zstd" in detail(response, 400)
    response = server.client.post("/forward_backward", content=plain[:-9])
    assert "broken protobuf" in detail(response, 400)
    assert [call[:5] for call in server.service.calls] == [
        ("reject", "local", "forward_backward", "S:train:0", 5)
    ]


def test_a_bomb_is_refused_and_uses_up_its_place(server):
    message = pb.ForwardBackwardRequest(model_id="S:train:0", seq_id=5).SerializeToString()
    bomb = zstandard.ZstdCompressor(level=19).compress(message + bytes(10**8))
    headers = {"Content-Encoding": "zstd"}
    response = server.client.post("/forward_backward", content=bomb, headers=headers)
    assert "after decompression" in detail(response, 413)
    (call,) = server.service.calls
    assert call[:5] == ("reject", "local", "forward_backward", "S:train:0", 5)
    assert call[6] == bomb


def test_a_compressed_body_is_journalled_plain(server):
    plain = pb.ForwardBackwardRequest(model_id="S:train:0", seq_id=5).SerializeToString()
    response = server.client.post(
        "/forward_backward",
        content=zstandard.ZstdCompressor().compress(plain),
        headers={"Content-Encoding": "zstd"},
    )
    assert response.json() == {"request_id": "S:train:0:1", "model_id": "S:train:0"}
    assert server.service.calls[0][3:] == ("forward_backward", plain)


# ------------------------------------------------------------------ answers


def test_a_sample_promises_its_sequence_ids(server):
    body = {
        "sampling_session_id": "S:sample:0",
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1]}]},
    }
    assert server.client.post("/asample", json=body).json() == {
        "request_id": "S:train:0:1",
        "sample_sequence_ids": ["S:sample:0:0:0", "S:sample:0:0:1"],
    }


def test_the_small_answers(server):
    post, get = server.client.post, server.client.get
    session = post("/create_session", json={"tags": ["a"], "sdk_version": "0.38.0"})
    assert session.json() == {"type": "create_session", "session_id": "S"}
    newer = post("/create_session", json={"sdk_version": "0.40.1"}).json()["warning_message"]
    assert "0.38.0" in newer and "0.40.1" in newer
    assert post("/telemetry", json={"events": []}).json() == {"status": "accepted"}
    beat = post("/session_heartbeat", json={"session_id": "S"})
    assert beat.json() == {"type": "session_heartbeat"}
    finish = {"reason": {"type": "success"}, "detail": None}
    assert post("/sessions/S/finish", json=finish).status_code == 200
    assert server.service.calls[-1] == ("finish_session", "local", "S", "success", None)
    join = post("/join_sampling_session", json={"sampling_session_id": "S:sample:0"})
    assert join.json()["client_counter"] == 1
    sampler = get("/samplers/S:sample:0").json()
    assert sampler == {"sampler_id": "S:sample:0", "base_model": "org/tiny"}
    (offered,) = get("/get_server_capabilities").json()["supported_models"]
    assert offered == {
        "model_name": "org/tiny", "max_context_length": 128, "trainable": True, "sampleable": True
    }  # fmt: skip


def test_get_info_echoes_what_is_in_force(running):
    settings = WireSettings(tokenizer_ids={"org/tiny": "/srv/tiny"})
    with running(settings) as box:
        info = box.client.post("/get_info", json={"model_id": "S:train:0"}).json()
    read = tinker.types.GetInfoResponse.model_validate(info)
    assert read.model_data.model_name == "org/tiny" and read.model_data.tokenizer_id == "/srv/tiny"
    assert read.lora_rank == 4 and read.is_lora
    assert info["lora_config"] == {
        "rank": 4, "seed": 7, "train_attn": True, "train_mlp": False, "train_unembed": True
    }  # fmt: skip


def test_the_batched_poll(server):
    body = {
        "target": {"type": "sampling_session", "sampling_session_id": "S:sample:0"},
        "prev_cursor": 1,
        "timeout": 0,
        "retrieved_request_ids": ["r1"],
    }
    assert server.client.post("/retrieve_futures", json=body).json() == {
        "completions": [
            {"state": "finished", "request_id": "a", "response_payload_uncompressed_size": 812},
            {"state": "failed", "request_id": "b"},
        ],
        "cursor": 2,
    }
    assert server.service.calls[-1] == (
        "retrieve_many", "local", "S:sample:0", 0, 1, 0.0, ("r1",)
    )  # fmt: skip
    for timeout, asked in ((None, 0.2), (99, 0.2), (-1, 0.0)):
        server.client.post("/retrieve_futures", json=body | {"timeout": timeout})
        assert server.service.calls[-1][5] == asked


# ------------------------------------------------------------------ results


def retrieve(server, **fields):
    return server.client.post("/retrieve_future", json={"request_id": "r"} | fields)


def test_a_pending_result_is_held_and_then_asked_for_again(server):
    started = time.monotonic()
    response = retrieve(server)
    assert 0.15 < time.monotonic() - started < 2
    assert response.status_code == 408
    assert response.json()["type"] == "try_again" and response.json()["queue_state"] == "active"


def test_a_result_is_sent_as_it_lies(server):
    server.service.outcomes["r"] = Outcome("done", b"\x08\x01", "application/x-protobuf")
    response = retrieve(server, allow_metadata_only=True)
    assert (response.content, response.headers["content-type"]) == (
        b"\x08\x01",
        "application/x-protobuf",
    )


def test_a_failed_result_is_a_200_with_its_category(server):
    server.service.outcomes["r"] = Outcome("failed", error="no room", category="server")
    response = retrieve(server)
    assert (response.status_code, response.json()) == (
        200, {"error": "no room", "category": "server"}
    )  # fmt: skip


def test_a_big_result_is_announced_first(server):
    body = bytes(2**20 + 1)
    server.service.outcomes["r"] = Outcome("done", body, "application/x-protobuf")
    assert retrieve(server, allow_metadata_only=True).json() == {
        "status": "complete_metadata",
        "response_payload_size": len(body),
    }
    assert retrieve(server, allow_metadata_only=False).content == body


def until(condition, seconds=3.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_a_client_that_leaves_frees_its_poll(running):
    with running(WireSettings(hold_seconds=30)) as box:
        with pytest.raises(httpx.ReadTimeout):
            box.client.post("/retrieve_future", json={"request_id": "r"}, timeout=0.2)
        until(lambda: box.service.waiting == 0)
        assert box.client.get("/healthz").status_code == 200


def test_closing_the_gate_ends_held_polls_at_once(running):
    with running(WireSettings(hold_seconds=30)) as box:
        host, port = box.listener.getsockname()[:2]
        body = b'{"request_id": "r"}'
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(
                b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-x\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            until(lambda: box.service.waiting == 1)
            box.loop.call_soon_threadsafe(box.gate.close)
            assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        assert "stopping" in detail(box.client.get("/healthz"), 503)


def test_hundreds_of_polls_cost_no_thread(running):
    with running(WireSettings(hold_seconds=30)) as box:
        host, port = box.listener.getsockname()[:2]
        body = b'{"request_id": "r"}'
        request = (
            b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-x\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        before = threading.active_count()
        connections = []
        for _ in range(400):
            connection = socket.create_connection((host, port), timeout=5)
            connection.sendall(request)
            connections.append(connection)
        until(lambda: box.service.waiting == 400, 10)
        assert threading.active_count() == before
        assert box.client.get("/healthz").status_code == 200
        for connection in connections:
            connection.close()
        until(lambda: box.service.waiting == 0, 10)
