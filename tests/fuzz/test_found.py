"""What fuzzing has found, each by its name."""

import json
import shutil

import pytest

from .app import BASE, MODEL, Sent
from .bodies import JSON_BODIES, done, headers, post
from .judge import MOST


def refused(app, path, body, status):
    answer = app.send(Sent("POST", BASE + path, body, headers()))
    assert answer.status == status, answer
    assert len(answer.body) < MOST
    return json.loads(answer.body)["detail"]


def test_a_refusal_does_not_repeat_a_megabyte(app, world):
    """It did, into answer, journal and log; now the ends stay, and the rule with them."""
    long = "x" * 900_000
    detail = refused(app, "/get_info", json.dumps({"model_id": long}).encode(), 404)
    assert detail.startswith("model 'xxx") and "characters left out" in detail
    body = {"model_id": world.model, "seq_id": world.next_training(), "adam_params": {long: 1}}
    detail = refused(app, "/optim_step", json.dumps(body).encode(), 400)
    assert detail.endswith("allowed are learning_rate, beta1, beta2, eps, weight_decay, "
                           "grad_clip_norm")  # fmt: skip
    longest = app.store.row("SELECT MAX(LENGTH(error)) AS n FROM requests")["n"]
    assert 1000 < longest < MOST


def test_a_field_name_does_not_break_the_line(app, world):
    body = {"model_id": world.model, "seq_id": world.next_training(), "adam_params": {"a\nb": 1}}
    detail = refused(app, "/optim_step", json.dumps(body).encode(), 400)
    assert detail.startswith(r"adam_params.'a\nb': unknown")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_slash_too_many_is_no_redirect(app, method):
    """The redirect had no body and went wherever the Host header said."""
    sent = Sent(method, f"{BASE}/healthz/", headers=(*headers(), (b"host", b"elsewhere.example")))
    answer = app.send(sent)
    assert answer.status == 404 and b"location" not in answer.headers


def test_a_stop_id_of_65_bits(app, world):
    """It was an internal error: no array of 64-bit integers holds it."""
    body = JSON_BODIES["/asample"](world)
    body["sampling_params"]["stop"] = [0, 2**63]
    detail = refused(app, "/asample", json.dumps(body).encode(), 400)
    assert detail.startswith("sampling_params.stop[1]: 9223372036854775808 is outside")


def test_a_checkpoint_deleted_while_it_is_loaded(app, world, monkeypatch):
    """It was an internal error; the model is as before, and so is the server."""
    saved = post(app, "save_weights", model_id=world.model, seq_id=world.next_training(), path="b")
    path = json.loads(done(app, saved["request_id"]))["path"]
    learner = app.service._parts.engines[MODEL].learner
    load_state = learner.load_state

    def late(model_id, folder, *, optimizer):
        shutil.rmtree(folder)
        return load_state(model_id, folder, optimizer=optimizer)

    monkeypatch.setattr(learner, "load_state", late)
    sent = post(app, "load_weights", model_id=world.model, seq_id=world.next_training(),
                path=path, optimizer=True)  # fmt: skip
    found = json.loads(done(app, sent["request_id"]))
    assert found["category"] == "user"
    assert found["error"] == f"checkpoint {path!r} was deleted while it was being loaded"


def test_the_same_world_still_works(app, world):
    assert post(app, "get_info", model_id=world.model)["model_id"] == world.model
