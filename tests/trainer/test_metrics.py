"""Means from pairs, KL estimates, shares of groups."""

import math

import numpy as np
import pytest
from trainer_builders import group, trajectory

from trimtab.trainer.ahead import Ages
from trimtab.trainer.batch import build
from trimtab.trainer.evaluate import summary
from trimtab.trainer.metrics import (
    join,
    learner_metrics,
    rollout_metrics,
    sampler_gap,
    staleness_metrics,
    update_gap,
)
from trimtab.trainer.trajectory import Group


def test_pairs_are_added_before_they_are_divided():
    """Two optimizer steps of 1 and 3 rows: the mean is over the 4 rows, not of the two means."""
    found = join(
        [
            {"tv/num:sum": 1.0, "tv/den:sum": 1.0, "tv:max": 0.5, "loss:sum": 2.0},
            {"tv/num:sum": 0.0, "tv/den:sum": 3.0, "tv:max": 0.9, "loss:sum": -0.5},
        ]
    )
    assert found == {"tv": 0.25, "tv_max": 0.9, "loss:sum": 1.5}
    assert learner_metrics(found) == {"optim/tv": 0.25, "optim/tv_max": 0.9, "loss:sum": 1.5}


def test_a_mean_over_no_rows_is_not_shown():
    assert join([{"tv/num:sum": 0.0, "tv/den:sum": 0.0}]) == {}


def test_the_gap_of_sampler_and_learner():
    """log q -1, log p -1.5 and -0.5 on two action tokens; the prompt's row does not count."""
    batch, _ = build([group(0, [1.0])])
    found = sampler_gap(batch, [np.array([-99.0, -1.5, -0.5])])
    assert found["optim/kl_sample_train_v1"] == 0.0
    assert found["optim/kl_sample_train_v2"] == pytest.approx(0.125)
    expected = (math.exp(-0.5) - 1 + 0.5 + math.exp(0.5) - 1 - 0.5) / 2
    assert found["optim/kl_sample_train_v3"] == pytest.approx(expected)
    assert found["optim/entropy"] == 1.0
    moved = update_gap(batch.old_D_N, [np.array([0.0, -2.0, -2.0])], batch)
    assert moved == {"kl_pre_post_v1": 1.0, "kl_pre_post_v2": 0.5}


def test_rollouts_count_failures_apart_from_rewards():
    found = rollout_metrics([group(0, [1.0, None]), group(1, [0.0, 0.5], lengths=[1, 5])])
    assert found["env/all/reward/total"] == 0.5
    assert found["env/all/total_episodes"] == 4
    assert found["env/all/reward_failures"] == 1
    assert found["env/all/reward_failures/none"] == 1
    assert found["env/all/total_ac_tokens"] == 10
    assert found["env/all/ac_tokens_per_turn"] == 2.5
    assert found["env/all/by_group/frac_mixed"] == 0.5
    assert found["env/all/by_group/frac_all_good"] == 0.5


def test_a_batch_without_any_reward_has_no_mean():
    found = rollout_metrics([group(0, [None, None])])
    assert found["env/all/reward_failures"] == 2
    assert "env/all/reward/total" not in found


def test_truncation_is_counted():
    group_of_two = Group(0, 0, (trajectory(truncated=True), trajectory()))
    assert rollout_metrics([group_of_two])["env/all/frac_truncated"] == 0.5
    batch, left_out = build([group_of_two], mask_truncated=True)
    assert (batch.size, left_out) == (1, {"truncated": 1})


def test_staleness_is_in_steps():
    found = staleness_metrics(Ages(1, 1.5, 2), step=10)
    assert found["sampling_client/step_min"] == 8
    assert found["sampling_client/step_max"] == 9
    assert found["staleness/mean"] == 1.5


def test_an_evaluation_says_what_it_could_not_grade():
    assert summary([group(0, [1.0, None])], "test") == {
        "test/reward_failures": 1.0,
        "test/reward/total": 1.0,
    }
    assert summary([], "test") == {}
