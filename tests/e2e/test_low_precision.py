"""A sampler of low precision in the served path: its mismatch is real, told, and trained with."""

import re
from contextlib import contextmanager

import numpy as np
import pytest
import tinker
from tinker import types

from trimtab.engine.models import BaseModel

from .kit import KEY, MODEL
from .test_process import serve
from .test_stable_reinforce import PROMPT, data_of, draw, turn

GOOD = 64  # tokens below it, a quarter of the vocabulary, are rewarded


def test_the_mismatch_of_a_low_precision_sampler_is_printed(model_folder, tmp_path):
    flags = ("--model", f"{MODEL}={model_folder}", "--port", 0, "--data-dir", tmp_path / "data")
    with serve(*flags, "--sampler-dtype", "int4") as process:
        told = process.stdout.readline()
    [found] = re.findall(r"sampler int4, learner float32; .* is (\S+) nats a token", told)
    base = BaseModel.load(MODEL, model_folder, learner_dtype="float32", sampler_dtype="int4")
    assert float(found) == pytest.approx(base.info.sampler_kl, rel=0.1)
    assert base.info.sampler_kl > 1e-6


@pytest.mark.parametrize(
    ("numerics", "bounds"),
    [("float32", (0, 1e-11)), ("int8", (1e-9, 1e-3)), ("int4", (1e-3, 1e-1))],
)
def test_the_metrics_show_what_the_numerics_do_on_policy(
    serving, model_folder, tmp_path, numerics, bounds
):
    """Fresh weights, so that rounding is all the difference: v2 is half the mean squared gap of the
    log-probabilities that client and learner see."""
    with served(serving, model_folder, tmp_path, numerics) as client:
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        sequences = draw(sampler, max_tokens=30)
        result = client.forward_backward(data_of(sequences), "stable_reinforce").result()
    gaps = np.concatenate(
        [
            out["logprobs"].to_numpy()[len(PROMPT) - 1 :] - sequence.logprobs
            for out, sequence in zip(result.loss_fn_outputs, sequences, strict=True)
        ]
    )
    v2 = result.metrics["kl_sample_train_v2/num:sum"] / result.metrics["kl_sample_train_v2/den:sum"]
    assert v2 == pytest.approx(np.mean(gaps**2) / 2, rel=1e-3, abs=1e-12)
    assert bounds[0] <= v2 <= bounds[1]


@pytest.mark.parametrize("numerics", ["int8", "int4"])
def test_a_policy_learns_from_samples_of_a_low_precision_sampler(
    serving, model_folder, tmp_path, numerics
):
    """Reward: the share of good tokens. Three steps stale, all samples rounded ones."""
    with served(serving, model_folder, tmp_path, numerics) as client:
        samplers, shares = [], []
        for step in range(28):
            samplers.append(
                client.save_weights_and_get_sampling_client(record_stability_info=True).result()
            )
            sequences = draw(samplers[max(0, step - 3)], n=16, max_tokens=6, seed=step)
            rewards = np.array([np.mean(s.tokens_np < GOOD) for s in sequences])
            shares.append(rewards.mean())
            advantages = rewards - rewards.mean()
            data = [turn(PROMPT, s, a) for s, a in zip(sequences, advantages, strict=True)]
            client.forward_backward(data, "stable_reinforce")
            client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    assert np.mean(shares[:4]) < 0.3 and np.mean(shares[-3:]) > 0.7, shares


@contextmanager
def served(serving, model_folder, folder, numerics):
    """A training client of a server whose sampler has these numerics."""
    config = {"model": (f"{MODEL}={model_folder}",), "data_dir": folder / "data", "threads": 1}
    with serving(**config, sampler_dtype=numerics) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        yield service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        service.close("success").result(10)
