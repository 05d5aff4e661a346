"""Prompts that datums share: found, computed once, and of no consequence for any result."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from trimtab.engine import batching, sharing
from trimtab.engine.batching import micro_batches
from trimtab.engine.sharing import Common, common, shared_tokens
from trimtab.engine.torch_learner import TorchLearner
from trimtab.types import LoraConfig, TrainingDatum

from .reference import forward_backward, random_data, relative, train, window_of


def begins_alike(sequences, members):
    first = sequences[members[0]]
    return min([len(first), *(shared_tokens(first, sequences[m]) for m in members[1:])])


def most_saved(sequences, left):
    """By trying every partition."""
    if not left:
        return 0
    first, *others = left
    best = most_saved(sequences, others)
    for size in range(1, len(others) + 1):
        for more in combinations(others, size):
            rest = [m for m in others if m not in more]
            gain = begins_alike(sequences, (first, *more)) * size
            best = max(best, gain + most_saved(sequences, rest))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_saves_much_more(seed, monkeypatch):
    monkeypatch.setattr(sharing, "LEAST", 1)
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 9)) for _ in range(6)]
    found = common(sequences)
    assert sorted(m for each in found for m in each.members) == list(range(6))
    for each in found:
        assert each.prefix <= begins_alike(sequences, each.members)
    saved = sum(each.saved for each in found)
    assert saved >= 0.85 * most_saved(sequences, list(range(6)))


def test_short_beginnings_are_not_shared_and_the_order_is_kept():
    prompt = np.arange(20)
    sequences = [np.r_[7, 7, 7], prompt, np.r_[7, 7, 7, 1], np.r_[prompt[:12], 99], np.r_[5]]
    assert common(sequences) == [
        Common(0, (0,)),
        Common(12, (1, 3)),
        Common(0, (2,)),
        Common(0, (4,)),
    ]


def group(prompt: int, own: tuple[int, ...], seed: int) -> list[TrainingDatum]:
    """Datums of one prompt; targets and weights differ at every position, the shared ones too."""
    head, *data = random_data((prompt, *(prompt + n for n in own)), seed=seed)
    return [
        TrainingDatum(np.r_[head.tokens, d.tokens[prompt:]].astype(np.int32), d.inputs)
        for d in data
    ]


def mixed() -> list[TrainingDatum]:
    """Two groups interleaved, one with an empty and a repeated rest, among datums of their own."""
    a, b = group(12, (5, 0, 7, 5), seed=1), group(9, (3, 3, 0, 0), seed=2)
    c = random_data((4, 9), seed=3)
    return [a[0], c[0], b[0], a[1], b[1], a[2], b[2], c[1], a[3], b[3]]


@pytest.fixture
def learner(base):
    learner = TorchLearner(base, micro_batch_tokens=40)
    learner.create("m", LoraConfig(rank=4, seed=1))
    train(learner, 2)
    return learner


def run(learner, data):
    learner.clear_window("m")
    result = forward_backward(learner, data)
    return result, window_of(learner)


def test_shared_rows_change_no_logprob_loss_or_gradient(learner, monkeypatch):
    """For every architecture, so through every kind of attention, in one and in several cuts."""
    data = mixed()
    found, gradient = run(learner, data)
    monkeypatch.setattr(
        batching, "common", lambda each: [Common(0, (i,)) for i in range(len(each))]
    )
    expected, plain = run(learner, data)
    assert relative(gradient, plain) < 1e-5
    for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)


def test_a_prompt_is_packed_once_a_micro_batch():
    data = mixed()
    [whole] = micro_batches(data, 1000)
    assert sum(each.rows for each in whole.segments) == (12 + 17) + (9 + 6) + 4 + 9
    assert whole.asked == sum(len(d.tokens) for d in data)
    cuts = list(micro_batches(data, 30))
    assert sorted(i for cut in cuts for i in cut.indices) == list(range(10))
    assert all(sum(each.rows for each in cut.segments) <= 30 for cut in cuts)
    left, right = batching.halves(whole)
    assert left.indices + right.indices == whole.indices
