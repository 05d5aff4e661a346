"""What a forward_backward is refused for: the field, what was found, what is allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimtab.errors import Invalid, TooLarge
from trimtab.service.settings import ServiceSettings
from trimtab.service.training import Checker
from trimtab.types import ForwardBackward

from .support import LOSSES, datum, info

CHECKER = Checker(LOSSES, info(), None, ServiceSettings(max_datums=3, max_request_tokens=40))


def good(**changes):
    inputs = {"logprobs": [-1.0, -2.0], "advantages": [0.0, 1.0]} | changes
    return datum([5, 6], **inputs)


def check(*data, loss="importance_sampling", config=None):
    request = ForwardBackward("S:train:0", 1, data, loss, config or {})
    return CHECKER.check(request, "S", 0.0).batch


def refusal(*data, **options):
    with pytest.raises(Invalid) as caught:
        check(*data, **options)
    return caught.value.message


def put(datum, **arrays):
    return replace(datum, inputs={**datum.inputs, **arrays})


def test_a_good_batch_keeps_its_arrays_and_gets_its_defaults():
    one = good()
    batch = check(one, loss="ppo", config={"high": 1.5})
    assert batch.loss_fn_config == {"low": 0.8, "high": 1.5}
    assert batch.data[0].tokens is one.tokens and batch.data[0].inputs is one.inputs
    assert batch.data[0].stability is None and not batch.forward_only


def test_loss_and_config():
    assert refusal(good(), loss="importance").endswith(
        "allowed are cross_entropy, importance_sampling, ppo, stable_reinforce"
    )
    text = refusal(good(), loss="ppo", config={"hihg": 1.2})
    assert "'hihg' is not one of ppo's; allowed are high, low" in text
    assert "allowed are none" in refusal(good(), config={"x": 1.0})
    assert "must be a number, found 'x'" in refusal(good(), loss="ppo", config={"low": "x"})
    assert "must be a number, found True" in refusal(good(), loss="ppo", config={"low": True})
    for bad in (-0.1, float("nan"), float("inf"), -float("inf")):
        text = refusal(good(), loss="stable_reinforce", config={"kl_coeff": bad})
        assert f"'kl_coeff'] must be a finite number in [0, inf], found {bad:g}" in text
    assert "above 'high'" in refusal(good(), loss="ppo", config={"low": 2.0})


def test_data_and_lengths():
    assert refusal() == "data is empty; give at least one datum"
    with pytest.raises(TooLarge, match="4 datums; one request may have 3"):
        check(*[good()] * 4)
    long = replace(good(), tokens=np.zeros(33, np.int32))
    assert "model_input has 33 tokens; tiny takes 1 to 32" in refusal(long)
    assert "has 0 tokens" in refusal(replace(good(), tokens=np.zeros(0, np.int32)))
    with pytest.raises(TooLarge, match="42 input tokens; one request may have 40"):
        check(*[replace(good(), tokens=np.zeros(14, np.int32))] * 3)
    off = replace(good(), tokens=np.asarray([20, 64], np.int32))
    assert "datum 1: model_input[1] is 64, but token ids of tiny lie in [0, 64)" in refusal(
        good(), off
    )


def test_inputs_by_name_and_shape():
    extra = put(good(), mask=np.ones(2, np.float32))
    assert "loss_fn_inputs['mask'] is not an input of importance_sampling" in refusal(extra)
    lacking = replace(good(), inputs={"target_tokens": good().inputs["target_tokens"]})
    assert "lacks 'logprobs'" in refusal(lacking)
    assert "logprobs has shape (3,), but needs (2,)" in refusal(good(logprobs=[0, 0, 0]))
    wide = put(good(), target_tokens=np.zeros((2, 2), np.int64))
    assert "takes one token a row, shape (2,)" in refusal(wide)
    three = put(good(), target_tokens=np.zeros(3, np.int64))
    assert "but model_input has 2 tokens" in refusal(three)
    for shape in ((), (2, 2, 2), (2, 0), (2, 1025)):
        odd = datum([5, 6])
        odd = put(odd, target_tokens=np.zeros(shape, np.int64))
        assert "target_tokens has" in refusal(odd, loss="cross_entropy")


def test_alternatives_and_their_weights():
    wide = put(datum([5, 6]), target_tokens=np.zeros((2, 3), np.int64))
    check(wide, loss="cross_entropy")
    check(put(wide, weights=np.ones((2, 3), np.float32)), loss="cross_entropy")
    text = refusal(put(wide, weights=np.ones(2, np.float32)), loss="cross_entropy")
    assert "weights has shape (2,), but needs (2, 3), the shape of target_tokens" in text


def test_dtypes():
    text = refusal(put(good(), target_tokens=np.zeros(2, np.float32)))
    assert text == "datum 0: target_tokens must be int64, found float32"
    text = refusal(put(good(), advantages=np.zeros(2, np.int64)))
    assert text == "datum 0: advantages must be float32, found int64"


def test_ids_and_numbers():
    for bad in (-1, 64, 2**40):
        text = refusal(put(good(), target_tokens=np.asarray([5, bad], np.int64)))
        assert f"target_tokens[1] is {bad}, but token ids of tiny lie in [0, 64)" in text
    for bad in (np.nan, np.inf):
        text = refusal(good(), good(advantages=[0, bad]))
        assert text == f"datum 1: advantages[1] must be finite, found {bad}"
        text = refusal(datum([5, 6], weights=[bad, 0]), loss="cross_entropy")
        assert text == f"datum 0: weights[0] must be finite, found {bad}"
        text = refusal(good(logprobs=[0, bad]))
        assert text.startswith("datum 0: logprobs[1] must be finite where advantages is not 0")
        check(good(logprobs=[bad, 0]))  # no advantage, no use of it
