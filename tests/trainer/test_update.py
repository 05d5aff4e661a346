"""Mini-batches, the token mean, and what a request carries."""

import numpy as np
import pytest
from trainer_builders import group

from trimtab.trainer.batch import build
from trimtab.trainer.config import Config, learning_rate
from trimtab.trainer.objective import objective
from trimtab.trainer.update import datums, divisor, minibatches

BATCH, _ = build([group(0, [1.0, 0.0], lengths=[2, 5]), group(1, [1.0, 0.0], lengths=[3, 1])])
ONES = [mask.astype(float) for mask in BATCH.mask_D_N]


def test_minibatches_cover_every_sequence_once():
    parts = minibatches(10, 3, np.random.default_rng(0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    assert sorted(map(len, parts)) == [3, 3, 4]
    assert np.concatenate(parts).tolist() != list(range(10))


def test_more_parts_than_sequences_are_as_many_as_sequences():
    assert [len(p) for p in minibatches(2, 4, np.random.default_rng(0))] == [1, 1]


def test_the_token_mean_counts_the_step_s_own_tokens():
    """Two optimizer steps of 7 and 4 tokens: the advantages of each add up to 1."""
    for indices, tokens in (([0, 1], 7), ([2, 3], 4)):
        divided_by = divisor(BATCH, np.array(indices), token_mean=True)
        assert divided_by == tokens
        made = datums(BATCH, ONES, np.array(indices), objective(Config()), divided_by)
        total = sum(d.loss_fn_inputs["advantages"].to_numpy().sum() for d in made)
        assert total == pytest.approx(1.0)
    assert divisor(BATCH, np.array([0, 1]), token_mean=False) == 1.0


def test_a_zero_advantage_still_counts_as_a_token():
    zeros = [np.zeros_like(values) for values in ONES]
    made = datums(BATCH, zeros, np.array([1]), objective(Config()), 1.0)
    assert not made[0].loss_fn_inputs["advantages"].to_numpy().any()
    assert divisor(BATCH, np.array([1]), token_mean=True) == 5


def test_logprobs_are_the_old_policy_s():
    batch = BATCH.with_old([np.full(m.size, -7.0) for m in BATCH.mask_D_N])
    (made,) = datums(batch, ONES, np.array([0]), objective(Config()), 1.0)
    assert made.loss_fn_inputs["logprobs"].to_numpy().tolist() == [0, -7, -7]
    (made,) = datums(BATCH, ONES, np.array([0]), objective(Config()), 1.0)
    assert made.loss_fn_inputs["logprobs"].to_numpy().tolist() == [0, -1, -1]


def test_gspo_gets_its_mask_and_a_custom_loss_its_reference():
    (made,) = datums(BATCH, ONES, np.array([0]), objective(Config(loss="gspo")), 1.0)
    assert made.loss_fn_inputs["sequence_ratio_mask"].to_numpy().tolist() == [0, 1, 1]
    batch = BATCH.with_reference([np.full(m.size, -2.0) for m in BATCH.mask_D_N])
    goal = objective(Config(kl_loss_coef=0.1, reference="base"))
    (made,) = datums(batch, ONES, np.array([0]), goal, 1.0)
    assert made.loss_fn_inputs["ref_logprobs"].to_numpy().tolist() == [0, -2, -2]


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 0, [1, 0.853553, 0.5, 0.146447]),
        ("constant", 2, [0.5, 1, 1, 1]),
    ],
)
def test_learning_rates(schedule, warmup, expected):
    config = Config(learning_rate=1.0, steps=4, lr_schedule=schedule, warmup_steps=warmup)
    assert [learning_rate(config, i) for i in range(4)] == pytest.approx(expected, abs=1e-6)
