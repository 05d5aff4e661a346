"""Order and resends over raw HTTP: requests run by seq_id and once, whatever arrives how often."""

import httpx
import numpy as np
import pytest
import zstandard
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

from .kit import MODEL, batch, close, logprobs


class Hand:
    """A model driven by hand: each method posts one request under the seq_id it is given."""

    def __init__(self, http):
        self.http = http
        session = http.post("/create_session", json={}).json()["session_id"]
        self.session = session
        lora = {"rank": 4, "seed": 1}
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        self.model = http.post("/create_model", json=body).json()["model_id"]

    def forward_backward(self, seq_id, data, forward_only=False, compress=False):
        given = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
        request = ForwardBackwardRequest(
            forward_backward_input=given, model_id=self.model, seq_id=seq_id
        )
        message = forward_backward_request_to_proto(request)
        message.forward_only = forward_only
        body, headers = message.SerializeToString(), {}
        if compress:
            body, headers = zstandard.compress(body), {"Content-Encoding": "zstd"}
        return self.http.post("/forward_backward", content=body, headers=headers)

    def optim_step(self, seq_id, rate=0.01):
        params = {"learning_rate": rate}
        body = {"model_id": self.model, "seq_id": seq_id, "adam_params": params}
        return self.http.post("/optim_step", json=body)

    def result(self, response, timeout=30):
        request_id = response.json()["request_id"]
        body = {"request_id": request_id}
        return self.http.post("/retrieve_future", json=body, timeout=timeout)

    def weights_seen(self, seq_id):
        """What the model makes of a fixed batch: equal numbers mean equal weights."""
        answer = self.result(self.forward_backward(seq_id, batch(2, seed=9), forward_only=True))
        return logprobs(deserialize_forward_backward_output(answer.content))


@pytest.fixture
def hand(http):
    return Hand(http)


def test_requests_run_by_seq_id_in_whatever_order_they_arrive(hand, http):
    """Chunks B and C and the step come first, chunk A last; nothing runs before A is there."""
    a, b, c = batch(3)
    second = hand.forward_backward(2, [b])
    third = hand.forward_backward(3, [c])
    step = hand.optim_step(4)
    with pytest.raises(httpx.ReadTimeout):
        hand.result(second, timeout=0.3)
    hand.forward_backward(1, [a])
    assert hand.result(step).json()["metrics"]["grad_norm"] > 0
    sizes = [
        logprobs(deserialize_forward_backward_output(hand.result(found).content))[0].size
        for found in (second, third)
    ]
    assert sizes == [4, 5]

    other = Hand(http)
    for seq_id, datum in enumerate((a, b, c), start=1):
        other.forward_backward(seq_id, [datum])
    other.optim_step(4)
    close(hand.weights_seen(5), other.weights_seen(5), 0)


def test_a_resend_joins_the_first_and_runs_nothing(hand, http):
    """Before the first is done, and after; compressed or not."""
    data = batch(2)
    first = [hand.forward_backward(1, data, compress=packed) for packed in (False, True)]
    assert first[0].json() == first[1].json()
    steps = [hand.optim_step(2), hand.optim_step(2)]
    metrics = hand.result(steps[0]).json()
    steps.append(hand.optim_step(2))
    assert len({response.json()["request_id"] for response in steps}) == 1
    assert hand.result(steps[2]).json() == metrics

    other = Hand(http)
    other.forward_backward(1, data)
    other.optim_step(2)
    close(hand.weights_seen(3), other.weights_seen(3), 0)


def test_a_used_id_with_another_body_is_refused(hand):
    hand.forward_backward(1, batch(1))
    hand.optim_step(2, rate=0.01)
    for again in (hand.optim_step(2, rate=0.02), hand.forward_backward(1, batch(1, seed=3))):
        assert again.status_code == 400 and "seq_id" in again.json()["detail"]
    assert "grad_norm" in hand.result(hand.optim_step(2, rate=0.01)).json()["metrics"]


def test_a_retried_unnamed_save_may_name_another_sampling_session(hand):
    """The SDK draws a new sampling_session_seq_id for each attempt, under one seq_id."""
    found = []
    for number in (0, 1):
        body = {"model_id": hand.model, "seq_id": 1, "sampling_session_seq_id": number}
        response = hand.http.post("/save_weights_for_sampler", json=body)
        assert response.status_code == 200, response.text
        found.append(hand.result(response).json()["sampling_session_id"])
    assert found[0] == found[1]


def test_samples_are_told_apart_by_sampling_session_and_number(hand):
    """Two sampling sessions each begin with 0, and a clone of the first with 10**9."""
    samplers = []
    for number in (0, 1):
        body = {"session_id": hand.session, "sampling_session_seq_id": number, "base_model": MODEL}
        made = hand.http.post("/create_sampling_session", json=body)
        samplers.append(made.json()["sampling_session_id"])

    def asample(sampler, seq_id, token):
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"tokens": [token]}]},
            "sampling_params": {"max_tokens": 1},
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 1,
        }
        return hand.http.post("/asample", json=body)

    asked = [
        asample(samplers[0], 0, 5),
        asample(samplers[1], 0, 6),
        asample(samplers[0], 10**9, 7),
        asample(samplers[0], 0, 5),
    ]
    ids = [response.json()["sample_sequence_ids"][0] for response in asked]
    assert len(set(ids[:3])) == 3 and ids[3] == ids[0]
    for response in asked:
        read = deserialize_sample_response(hand.result(response).content)
        assert np.isnan(read.prompt_logprobs_np).tolist() == [True]
        assert len(read.sequences[0].tokens) == 1
    assert asample(samplers[0], 0, 9).status_code == 400
