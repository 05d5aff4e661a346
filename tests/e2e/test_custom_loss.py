"""Custom losses run by the server: what the SDK computes on the client's side, in one call."""

import dataclasses

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from .kit import KEY, MODEL, close, logprobs


def clipped(logprobs, old, advantages, scale):
    ratio = torch.exp(logprobs - old)
    low = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -low.sum() * scale, {"custom/ratio:mean": ratio.mean(), "custom/low:sum": low.sum()}


# Loading into a live client is deprecated, and the shortest way back to the same weights.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
RANKS = {"logprobs": 1, "old": 1, "advantages": 1, "scale": 0}


def data(count=5):
    """More than one chunk of two datums; every length differs."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        tokens = rng.integers(0, 256, 5 + i).tolist()
        rows = len(tokens) - 1
        inputs = {
            "target_tokens": tokens[1:],
            "old": np.full(rows, -5.5, np.float32),
            "advantages": rng.normal(size=rows).astype(np.float32),
            "scale": types.TensorData(data=[0.5 + i], dtype="float32", shape=[]),
        }
        model_input = types.ModelInput.from_ints(tokens[:-1])
        made.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return made


@pytest.fixture(scope="module")
def handle(service):
    """A session makes a loss once."""
    return service.create_custom_loss(clipped, RANKS).result()


def test_the_server_computes_what_the_client_would(handle, trained):
    assert handle.loss_id is not None
    here = dataclasses.replace(handle, loss_id=None)  # without an id the SDK runs it itself
    path = trained.save_state("before-custom", overwrite=True).result().path
    outcomes = []
    for loss in (handle, here):
        found = trained.forward_backward_custom(data(), loss).result()
        norm = trained.optim_step(types.AdamParams(learning_rate=0.01)).result().metrics
        outcomes.append((found, norm["grad_norm"]))
        trained.load_state_with_optimizer(path).result()
    (server, left), (client, right) = outcomes
    assert left == pytest.approx(right, rel=1e-4)
    for name in ("loss:sum", "custom/ratio:mean", "custom/low:sum"):
        assert server.metrics[name] == pytest.approx(client.metrics[name], rel=1e-4), name
    close(logprobs(server), logprobs(client), 1e-5)


def test_a_loss_belongs_to_its_session(handle, server):
    other = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    stranger = other.create_lora_training_client(MODEL, rank=4, seed=1).result()
    words = []
    for loss_id in (handle.loss_id, handle.loss_id.rsplit(":", 1)[0] + ":999"):
        with pytest.raises(tinker.BadRequestError) as told:
            stranger.forward_backward(data(1), "custom", {"loss_id": loss_id}).result()
        words.append(str(told.value).replace(loss_id, "ID"))
    assert words[0] == words[1] and "is unknown in session" in words[0]
    other.close("success").result(10)


def post(http, session_id, number=700, **changes):
    body = {
        "session_id": session_id,
        "custom_loss_seq_id": number,
        "name": "mine",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {
            "format": 1,
            "nodes": [
                {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
                {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "logprobs"}]},
                {
                    "op": "output",
                    "name": "output",
                    "target": "output",
                    "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}],
                },
            ],
        },
    }
    return http.post("/create_custom_loss", json=body | changes)


@pytest.fixture
def session_id(http):
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    return http.post("/create_session", json=body).json()["session_id"]


def test_a_resend_is_the_first_and_another_body_is_refused(http, session_id):
    first, again = post(http, session_id).json(), post(http, session_id).json()
    assert first == again
    found = http.post("/retrieve_future", json={"request_id": first["request_id"]}).json()
    assert found == {"type": "create_custom_loss", "loss_id": f"{session_id}:loss:700"}
    other = post(http, session_id, name="another")
    assert other.status_code == 400 and "create_custom_loss" in other.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"graph": None}, "graph: an object is required"),
        ({"graph": {"format": 2, "nodes": []}}, "graph.format: 2"),
        ({"graph": {"format": 1, "nodes": []}}, "0 nodes"),
        ({"graph": {"format": 1, "nodes": [7]}}, "graph.nodes[0]: an object is required"),
        ({"inputs": []}, "inputs must begin with logprobs"),
        ({"inputs": [{"name": "logprobs", "rank": 3}]}, "ranks are 0, 1 or 2"),
        (
            {"graph": {"nodes": [{"op": "call_function", "name": "f", "target": "os.system"}]}},
            "node 'f' calls 'os.system', which is not allowed",
        ),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_refused_with_its_place(http, session_id, changes, words):
    refused = post(http, session_id, **changes)
    assert refused.status_code == 400
    assert words in refused.json()["detail"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "takes one loss_fn_config key, 'loss_id'"),
        ({"loss_id": "x"}, "is unknown"),
        ({"loss_id": 1.0}, "takes one"),
    ],
)
def test_a_custom_loss_is_named_by_its_id(trained, config, words):
    with pytest.raises(tinker.BadRequestError, match=words):
        trained.forward_backward(data(1), "custom", config).result()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.loss_fn_inputs.pop("scale"), "lacks 'scale'"),
        (lambda d: d.loss_fn_inputs.update(extra=d.loss_fn_inputs["old"]), "has 'extra'"),
        (lambda d: d.loss_fn_inputs.update(scale=d.loss_fn_inputs["old"]), "declared rank 0"),
    ],
)
def test_a_datum_brings_what_the_loss_reads(handle, trained, change, words):
    [datum] = data(1)
    change(datum)
    with pytest.raises(tinker.BadRequestError, match=words):
        trained.forward_backward([datum], "custom", {"loss_id": handle.loss_id}).result()
