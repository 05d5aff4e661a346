"""The learner's log-probabilities and gradients are those of plain transformers with PEFT."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from trimtab.engine.models import BaseModel
from trimtab.engine.torch_learner import TorchLearner
from trimtab.tiny import quiet
from trimtab.types import LoraConfig

from .reference import (
    forward_backward,
    plain,
    plain_logprobs,
    random_data,
    relative,
    train,
    window_of,
)

RAGGED = (3, 7, 11, 2, 11, 30)


def gap(learner, model, model_id="m"):
    data = random_data(RAGGED, seed=9)
    found = forward_backward(learner, data, model_id=model_id, forward_only=True).logprobs
    with torch.no_grad():
        expected = [plain_logprobs(model, datum).numpy() for datum in data]
    return max(np.abs(f - e).max() for f, e in zip(found, expected, strict=True))


def test_logprobs_equal_transformers_and_peft_at_every_position(base, tmp_path):
    learner = TorchLearner(base, micro_batch_tokens=24)
    learner.create("m", LoraConfig(rank=4, seed=1))
    assert gap(learner, plain(base.info.path)) < 1e-5  # B is zero
    train(learner, 3)
    learner.save_adapter("m", tmp_path / "a")
    model = plain(base.info.path, tmp_path / "a")
    assert gap(learner, model) < 1e-4
    learner.load_state("again", tmp_path / "a", optimizer=False)
    assert gap(learner, model, "again") < 1e-4
    assert gap(learner, plain(base.info.path)) > 0.1  # the adapter matters


def test_absolute_positions_and_transposed_linears_agree_too(tmp_path):
    config = GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    base = BaseModel.load("gpt2", tmp_path, learner_dtype="float32", sampler_dtype="float32")
    learner = TorchLearner(base, micro_batch_tokens=24)
    learner.create("m", LoraConfig(rank=4, seed=1))
    train(learner, 3)
    learner.save_adapter("m", tmp_path / "a")
    assert gap(learner, plain(tmp_path, tmp_path / "a")) < 1e-4
    assert gap(learner, plain(tmp_path)) > 0.1


def test_alternatives_equal_transformers(base):
    learner = TorchLearner(base, micro_batch_tokens=24)
    learner.create("m", LoraConfig(rank=4, seed=1))
    data = random_data(alternatives=3) + random_data(alternatives=5)
    found = forward_backward(learner, data, forward_only=True).logprobs
    model = plain(base.info.path)
    for logprobs, datum in zip(found, data, strict=True):
        expected = plain_logprobs(model, datum).detach().numpy()
        assert logprobs.shape == datum.inputs["target_tokens"].shape
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_gradients_equal_float64_autograd_through_peft(base, tmp_path):
    learner = TorchLearner(base, micro_batch_tokens=24)
    learner.create("m", LoraConfig(rank=4, seed=1))
    train(learner, 2)
    learner.save_adapter("m", tmp_path / "a")
    data = random_data(RAGGED, seed=5)
    result = forward_backward(learner, data)

    model = plain(base.info.path, tmp_path / "a", dtype=torch.float64)
    losses = [
        -(plain_logprobs(model, datum) * torch.tensor(datum.inputs["weights"])).sum()
        for datum in data
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    named = dict(model.named_parameters())
    expected = [
        named[f"base_model.model.{module}.lora_{half}.default.weight"].grad.flatten()
        for module in learner._models["m"].adapter.pairs
        for half in "AB"
    ]
    assert relative(window_of(learner).double(), torch.cat(expected)) < 1e-5
    assert abs(result.metrics["loss:sum"] - loss.item()) < 1e-3
