"""Custom losses in the learner: the gradient of the served loss that says the same, and means over
the datums of a request however it is cut up."""

from __future__ import annotations

import numpy as np
import pytest

from tests.custom_losses import encoded
from trimtab.engine.torch_learner import TorchLearner
from trimtab.errors import Invalid
from trimtab.types import (
    LoraConfig,
    TrainingBatch,
    TrainingDatum,
)

from .reference import random_data, relative, train, window_of


def weighted(logprobs, weights, scale):
    return -(weights * logprobs).sum() * scale, {"custom/scale:mean": scale.clone()}


@pytest.fixture
def trained(learner: TorchLearner) -> TorchLearner:
    learner.create("m", LoraConfig(rank=4, seed=1))
    train(learner, 2)
    return learner


def test_weighted_log_probabilities_are_cross_entropy(trained):
    """Scalars a datum as well; more datums than one micro-batch holds."""
    data = random_data((3, 7, 11, 2, 11, 5, 16, 1), seed=4)
    scales = np.linspace(0.5, 2, len(data)).astype(np.float32)
    rows = [np.float32(s) * d.inputs["weights"] for d, s in zip(data, scales, strict=True)]
    expected = [
        TrainingDatum(d.tokens, {**d.inputs, "weights": w}) for d, w in zip(data, rows, strict=True)
    ]
    given = [
        TrainingDatum(d.tokens, {**d.inputs, "scale": s}) for d, s in zip(data, scales, strict=True)
    ]
    trained.clear_window("m")
    plain = trained.forward_backward("m", TrainingBatch(1, tuple(expected), "cross_entropy", {}))
    window = window_of(trained)
    trained.clear_window("m")
    loss = encoded(weighted, logprobs=1, weights=1, scale=0)
    batch = TrainingBatch(1, tuple(given), "custom", {}, custom=loss)
    found = trained.forward_backward("m", batch)
    assert relative(window_of(trained), window) < 1e-6
    assert found.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    assert found.metrics["custom/scale:mean"] == pytest.approx(np.mean(scales), rel=1e-6)


def test_a_loss_that_fails_at_run_time_names_its_node_and_adds_nothing(trained):
    def wrong(logprobs, weights):
        return (logprobs + weights[:2]).sum(), {}

    trained.clear_window("m")
    data = tuple(random_data((5,), seed=1))
    batch = TrainingBatch(1, data, "custom", {}, custom=encoded(wrong, logprobs=1, weights=1))
    with pytest.raises(Invalid, match="'wrong', node 'add'"):
        trained.forward_backward("m", batch)
    assert trained._models["m"].window.gradients is None
