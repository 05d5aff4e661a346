"""Bad input over raw HTTP: each is answered at once, with a status and a sentence that names the
field and the rule, while another client trains on undisturbed.
"""

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import zstandard
from tinker import types

from trimtab.wire import trimtab_pb2 as pb

from .kit import KEY, MODEL, batch

F32, I64 = pb.DTYPE_FLOAT32, pb.DTYPE_INT64


@pytest.fixture(scope="module", autouse=True)
def neighbour(service):
    """Trains and samples all the while; whatever it meets is raised at the end."""
    client = service.create_lora_training_client(MODEL, rank=4, seed=2).result()
    done, steps = threading.Event(), []

    def work():
        while not done.is_set():
            client.forward_backward(batch(2), "cross_entropy")
            steps.append(client.optim_step(types.AdamParams(learning_rate=1e-4)).result(30))
            time.sleep(0.1)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        yield
        done.set()
        working.result(30)
    assert len(steps) >= 2


@pytest.fixture(scope="module")
def ids(http):
    """A session, a model and a sampling session made by hand."""
    session = http.post("/create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
    promise = http.post("/create_model", json=body).json()
    model = http.post("/retrieve_future", json=promise).json()["model_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = http.post("/create_sampling_session", json=body).json()["sampling_session_id"]
    counters = {
        "train": itertools.count(1),
        "sample": itertools.count(),
        "models": itertools.count(),
    }
    return {"session": session, "model": model, "sampler": sampler, **counters}


def refused(response, status, words):
    """The answer itself refuses: status, one sentence, its length, nothing else."""
    assert response.status_code == status, response.text
    assert int(response.headers["content-length"]) == len(response.content) > 0
    text = response.json()["detail"]
    assert words in text, text
    assert "\n" not in text and "Traceback" not in text


def failed(http, response, words):
    """Accepted, as only its turn could tell, and then failed as the user's fault."""
    assert response.status_code == 200, response.text
    request_id = response.json()["request_id"]
    found = http.post("/retrieve_future", json={"request_id": request_id})
    assert found.status_code == 200 and found.json()["category"] == "user"
    assert words in found.json()["error"], found.text


# ------------------------------------------------------------------ forward_backward


def ints(values, shape=()):
    return pb.Tensor(dense=np.array(values, "<i8").tobytes(), dtype=I64, shape=shape)


def floats(values, shape=()):
    return pb.Tensor(dense=np.array(values, "<f4").tobytes(), dtype=F32, shape=shape)


def chunk(*tokens):
    return pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array(tokens, "<i4").tobytes()))


def datum(tokens=(5, 6), **inputs):
    inputs = {"target_tokens": ints([6, 7])} | inputs
    return pb.Datum(model_input=[chunk(*tokens)], loss_fn_inputs=inputs)


def rl(**inputs):
    return datum(**{"logprobs": floats([-1, -1]), "advantages": floats([1, 1])} | inputs)


def span(kind, sequence_id, offset, length):
    run = pb.TokenSpan(sequence_id=sequence_id, offset=offset, length=length)
    return pb.ProvenanceSpan(**{kind: run})


WRONG_DATA = {
    "empty data": ([], "cross_entropy", {}, "data"),
    "empty input": ([datum(tokens=())], "cross_entropy", {}, "model_input has 0 tokens"),
    "over the context": (
        [datum(tokens=(1,) * 300, target_tokens=ints([1] * 300))], "cross_entropy", {}, "256"
    ),
    "id too large": ([datum(tokens=(5, 320))], "cross_entropy", {}, "320"),
    "id negative": ([datum(tokens=(-1, 5))], "cross_entropy", {}, "-1"),
    "target too large": ([datum(target_tokens=ints([6, 10**12]))], "cross_entropy", {}, "target"),
    "wrong length": ([datum(target_tokens=ints([6]))], "cross_entropy", {}, "target_tokens"),
    "wrong weights": ([datum(weights=floats([1] * 3))], "cross_entropy", {}, "weights"),
    "wrong dtype": ([datum(target_tokens=floats([6, 7]))], "cross_entropy", {}, "target_tokens"),
    "weights of ids": ([datum(weights=ints([1, 1]))], "cross_entropy", {}, "weights"),
    "weight NaN": ([datum(weights=floats([1, np.nan]))], "cross_entropy", {}, "weights"),
    "weight inf": ([datum(weights=floats([1, np.inf]))], "cross_entropy", {}, "weights"),
    "advantage NaN": ([rl(advantages=floats([1, np.nan]))], "ppo", {}, "advantages"),
    "advantage inf": ([rl(advantages=floats([-np.inf, 1]))], "dro", {}, "advantages"),
    "no advantages": ([datum(logprobs=floats([-1, -1]))], "cispo", {}, "advantages"),
    "unknown input": ([datum(mask=floats([1, 1]))], "cross_entropy", {}, "mask"),
    "unknown loss": ([datum()], "crossentropy", {}, "crossentropy"),
    "no such custom loss": ([datum()], "custom", {"loss_id": "x"}, "loss_id"),
    "unknown key": ([rl()], "ppo", {"clip_hihg_threshold": 1.2}, "clip_high_threshold"),
    "text for a number": ([rl()], "ppo", {"clip_high_threshold": "x"}, "clip_high_threshold"),
    "NaN in the config": ([rl()], "dro", {"beta": float("nan")}, "beta"),
    "one span list": (
        [pb.Datum(
            model_input=[chunk(5, 6)], loss_fn_inputs={"target_tokens": ints([6, 7])},
            model_input_spans=[span("prompt_tokens", "x:sample:0:0:0", 0, 2)],
        )],
        "cross_entropy", {}, "loss_fn_input_spans",
    ),
    "nothing in a span": (
        [pb.Datum(model_input=[chunk(5)], model_input_spans=[pb.ProvenanceSpan()])],
        "cross_entropy", {}, "data[0].model_input_spans[0]",
    ),
    "a picture": (
        [pb.Datum(model_input=[pb.Chunk(image=pb.ImageChunk(data=b"x", format="png"))])],
        "cross_entropy", {}, "data[0].model_input[0]",
    ),
}  # fmt: skip


def message(ids, data, loss_fn="cross_entropy", config=None):
    made = pb.ForwardBackwardRequest(
        model_id=ids["model"], seq_id=next(ids["train"]), data=data, loss_fn=loss_fn
    )
    for name, value in (config or {}).items():
        if isinstance(value, str):
            made.loss_fn_config_v2[name].text = value
        else:
            made.loss_fn_config_v2[name].number = value
    return made


def forward_backward(http, body, **headers):
    return http.post("/forward_backward", content=body, headers=headers)


@pytest.mark.parametrize("case", WRONG_DATA)
def test_wrong_training_data(http, ids, case):
    data, loss_fn, config, words = WRONG_DATA[case]
    refused(
        forward_backward(http, message(ids, data, loss_fn, config).SerializeToString()), 400, words
    )


def test_a_refused_request_uses_up_its_id_and_the_next_one_runs(http, ids):
    forward_backward(http, message(ids, []).SerializeToString())
    forward_backward(http, message(ids, [datum()]).SerializeToString()[:-3])
    promise = forward_backward(http, message(ids, [datum()]).SerializeToString()).json()
    response = http.post("/retrieve_future", json={"request_id": promise["request_id"]}, timeout=10)
    assert response.headers["content-type"] == "application/x-protobuf"


def test_broken_bodies(http, ids):
    body = message(ids, [datum()]).SerializeToString()
    refused(forward_backward(http, body[:-3]), 400, "broken protobuf")
    refused(forward_backward(http, b"\xff" * 50), 400, "broken protobuf")
    refused(forward_backward(http, b""), 404, "model")
    torn = zstandard.ZstdCompressor().compress(body * 50)[:-5]
    refused(forward_backward(http, torn, **{"Content-Encoding": "zstd"}), 400, "broken zstd")
    refused(forward_backward(http, body, **{"Content-Encoding": "zstd"}), 400, "broken zstd")
    refused(forward_backward(http, body, **{"Content-Encoding": "gzip"}), 400, "Content-Encoding")


def test_numbers_no_queue_has(http, ids):
    for number in (-1, 0, 2**63, 2**64 - 1):
        body = {"model_id": ids["model"], "seq_id": number, "adam_params": {}}
        found = http.post("/optim_step", json=body)
        assert found.status_code == 400 and "seq_id" in found.json()["detail"], found.text
    for kind, extra in (("forward_backward", b"\xff"), ("forward_backward", b"")):
        made = pb.ForwardBackwardRequest(model_id=ids["model"], seq_id=-1, data=[datum()])
        assert http.post(f"/{kind}", content=made.SerializeToString() + extra).status_code == 400


def test_a_bomb_and_a_gigabyte(http, server, ids):
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(200 * 2**20))
    started = time.monotonic()
    refused(forward_backward(http, bomb, **{"Content-Encoding": "zstd"}), 413, "134217728")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        head = f"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n"
        connection.sendall(f"{head}Content-Length: {2**30}\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    assert time.monotonic() - started < 15


# ------------------------------------------------------------------ models, weights, ids


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"lora_config": {"rank": 0}}, 400, "rank"),
        ({"lora_config": {"rank": 10**6}}, 400, "128"),
        ({"lora_config": {"rank": -1}}, 400, "rank"),
        ({"lora_config": {"rank": "4"}}, 400, "lora_config.rank: an integer is required"),
        (
            {"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}},
            400, "train_",
        ),
        ({"base_model": "org/other"}, 400, f"'org/other' is not served here; allowed are {MODEL}"),
        ({"base_model": ""}, 400, "base_model"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, 400, "dimuon"),
        ({"session_id": "0b8fd3f2-0000-4000-8000-000000000000"}, 404, "session"),
        ({"session_id": "x" * 5000}, 404, "session"),
        ({"session_id": "a\x00b"}, 404, "session"),
        ({"model_seq_id": -1}, 400, "model_seq_id"),
    ],
)  # fmt: skip
def test_wrong_models(http, ids, changes, status, words):
    number = 100 + next(ids["models"])
    body = {"session_id": ids["session"], "model_seq_id": number, "base_model": MODEL} | changes
    refused(http.post("/create_model", json=body), status, words)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a\x00b", "x" * 300, "", " ", "a\nb"])
def test_wrong_names(http, ids, name):
    for route in ("save_weights", "save_weights_for_sampler"):
        body = {"model_id": ids["model"], "seq_id": next(ids["train"]), "path": name}
        refused(http.post(f"/{route}", json=body), 400, "checkpoint name")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tinker://{model}/weights/../a", "path"),
        ("tinker://{model}/weights/..", "'..'"),
        ("tinker://{model}/other/a", "path"),
        ("/etc/passwd", "path"),
        ("tinker://", "path"),
        ("tinker://{model}/weights/a\x00", "control character"),
        ("", "path"),
    ],
)
def test_wrong_paths(http, ids, path, words):
    path = path.format(**ids)
    body = {"model_id": ids["model"], "seq_id": next(ids["train"]), "path": path}
    refused(http.post("/load_weights", json=body | {"optimizer": False}), 400, words)
    refused(http.post("/weights_info", json={"tinker_path": path}), 400, words)


@pytest.mark.parametrize("path", ["tinker://x:train:0/weights/a", "tinker://{model}/weights/none"])
def test_paths_of_nothing(http, ids, path):
    path = path.format(**ids)
    body = {"model_id": ids["model"], "seq_id": next(ids["train"]), "path": path}
    failed(http, http.post("/load_weights", json=body | {"optimizer": False}), path)
    refused(http.post("/weights_info", json={"tinker_path": path}), 404, path)


def test_ids_nobody_has(http, ids):
    nobody = "0b8fd3f2-0000-4000-8000-000000000000"
    step = {"model_id": f"{nobody}:train:0", "seq_id": 1, "adam_params": {}}
    refused(http.post("/optim_step", json=step), 404, "model")
    refused(http.post("/get_info", json={"model_id": "x"}), 404, "model")
    refused(http.get("/samplers/x:sample:0"), 404, "sampl")
    refused(http.post("/session_heartbeat", json={"session_id": nobody}), 404, "session")
    for request_id in ("nothing", f"{ids['model']}:99999", "a\x00", "x" * 5000):
        refused(http.post("/retrieve_future", json={"request_id": request_id}), 404, "request")
    target = {"type": "sampling_session", "sampling_session_id": f"{nobody}:sample:0"}
    refused(http.post("/retrieve_futures", json={"target": target}), 404, "sampl")
    refused(http.post("/join_sampling_session", json={"sampling_session_id": "x"}), 404, "sampl")


@pytest.mark.parametrize("params", [
    {"learning_rate": -1}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": -1e-8},
    {"weight_decay": -1}, {"grad_clip_norm": -1},
])  # fmt: skip
def test_wrong_steps(http, ids, params):
    def step(params):
        body = {"model_id": ids["model"], "seq_id": next(ids["train"]), "adam_params": params}
        return http.post("/optim_step", json=body)

    step({})  # whatever failed before it has dropped its window by now
    forward_backward(http, message(ids, [datum()]).SerializeToString())
    failed(http, step(params), next(iter(params)))


# ------------------------------------------------------------------ samples


WRONG_SAMPLES = {
    "empty prompt": ({"prompt": {"chunks": []}}, "prompt"),
    "over the context": ({"prompt": {"chunks": [{"tokens": [1] * 300}]}}, "256"),
    "fills the context": ({"prompt": {"chunks": [{"tokens": [1] * 256}]}}, "256"),
    "id too large": ({"prompt": {"chunks": [{"tokens": [320]}]}}, "320"),
    "id negative": ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "-1"),
    "id of 65 bits": ({"prompt": {"chunks": [{"tokens": [2**63]}]}}, "prompt.chunks[0].tokens"),
    "no samples": ({"num_samples": 0}, "num_samples"),
    "a million samples": ({"num_samples": 10**6}, "num_samples"),
    "no tokens": ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
    "cold": ({"sampling_params": {"temperature": -1}}, "temperature"),
    "top_p 0": ({"sampling_params": {"top_p": 0}}, "top_p"),
    "top_p 2": ({"sampling_params": {"top_p": 2}}, "top_p"),
    "top_k": ({"sampling_params": {"top_k": -2}}, "top_k"),
    "stop id": ({"sampling_params": {"stop": [99999]}}, "stop"),
    "last_n alone": ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
    "last_n long": ({"prompt_logprobs": True, "prompt_logprobs_last_n": 9}, "logprobs_last_n"),
    "topk": ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
    "topk negative": ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
    "alternatives": ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
    "targets": (
        {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}},
        "target_prompt_logprobs",
    ),
    "target id": (
        {"target_prompt_logprobs": {"data": [999], "dtype": "int64", "shape": [1, 1]}},
        "target_prompt_logprobs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_SAMPLES)
def test_wrong_samples(http, ids, case):
    changes, words = WRONG_SAMPLES[case]
    body = {
        "sampling_session_id": ids["sampler"],
        "seq_id": next(ids["sample"]),
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 2},
    } | changes
    refused(http.post("/asample", json=body), 400, words)


def test_a_sampler_of_nothing(http, ids):
    def create(**fields):
        body = {"session_id": ids["session"], "sampling_session_seq_id": 9} | fields
        return http.post("/create_sampling_session", json=body)

    refused(create(base_model="org/other"), 400, MODEL)
    refused(create(model_path="tinker://x/sampler_weights/a"), 404, "tinker://x")
    refused(create(model_path="file:///etc"), 400, "path")
    refused(create(), 400, "base_model")


def test_somebody_elses_ids_are_unknown_ids(serving, model_folder, tmp_path):
    """The same words, so that nobody learns what others have."""
    keys = ("tml-a", "tml-b")
    config = {"model": (f"{MODEL}={model_folder}",), "data_dir": tmp_path, "api_key": keys}
    with serving(**config) as server:
        a, b = (
            httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": key})
            for key in keys
        )
        session = a.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
        model = a.post("/create_model", json=body).json()["model_id"]
        for mine, nobodys in ((model, model.replace(session, "0" * 36)), (model, "x")):
            answers = [
                b.post("/get_info", json={"model_id": i}).json()["detail"].replace(i, "")
                for i in (mine, nobodys)
            ]
            assert answers[0] == answers[1]
        refused(b.post("/retrieve_future", json={"request_id": f"{model}:0"}), 404, "request")
        refused(b.post("/session_heartbeat", json={"session_id": session}), 404, "session")
        assert a.post("/get_info", json={"model_id": model}).status_code == 200
        a.close()
        b.close()
