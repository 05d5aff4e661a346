"""REINFORCE++ against values worked out by hand, and every refusal by its sentence."""

import json
import math

import numpy as np
import pytest

from trimtab.errors import Invalid
from trimtab.trainer import reward_shaping
from trimtab.trainer.reinforce_pp import ReinforcePPConfig, ReinforcePPState, advantages
from trimtab.trainer.returns import place_rewards, returns_to_go, whiten
from trimtab.trainer.stats import RunningStats, moments

NAN = math.nan


def close(found, expected, atol=1e-8):
    assert len(found) == len(expected)
    for found_T, expected_T in zip(found, expected, strict=True):
        np.testing.assert_allclose(found_T, expected_T, rtol=0, atol=atol)


def run(rewards, lengths, **kwargs):
    """Advantages of sequences made of action tokens alone, without a reference."""
    ones = [np.ones(n) for n in lengths]
    config = kwargs.pop("config", ReinforcePPConfig())
    return advantages(rewards, ones, None, ones, config=config, **kwargs)


# ------------------------------------------------------------------ worked values

TWO = {
    "rewards": [1.0, -0.5],
    "logprobs": [[-0.5, -1.2, -0.3], [-0.9, -0.1]],
    "ref_logprobs": [[-0.7, -1.0, -0.4], [-0.6, -0.3]],
    "action_mask": [[1, 1, 1], [1, 1]],
}


def test_kl_in_the_reward_reward_to_go_and_population_whitening():
    found = advantages(**TWO, config=ReinforcePPConfig(kl_coef=0.1))
    close(found.returns, [[0.99, 1.01, 0.99], [-0.49, -0.52]])
    close(
        found.advantages,
        [[0.80732757, 0.83451031, 0.80732757], [-1.20419566, -1.24496978]],
    )
    metrics = found.metrics
    assert metrics["return/mean"] == pytest.approx(0.396)
    assert metrics["return/std"] == pytest.approx(math.sqrt(0.541344))
    assert metrics["kl_policy_base"] == pytest.approx(0.0)  # .2 - .2 + .1 - .3 + .2
    assert metrics["kl_policy_base_v2"] == pytest.approx(0.5 * 0.22 / 5)
    assert metrics["kl_policy_base_max"] == pytest.approx(0.3)
    assert metrics["batch/action_tokens"] == 5 and metrics["kl_clamp_frac"] == 0
    rewards_T = place_rewards(1.0, np.array([0.2, -0.2, 0.1]), np.ones(3, bool), 0.1)
    close([rewards_T], [[-0.02, 0.02, 0.99]])


def test_without_a_reference_or_with_beta_zero_every_token_carries_the_score():
    for reference in (None, TWO["ref_logprobs"]):
        found = advantages(**TWO | {"ref_logprobs": reference}, config=ReinforcePPConfig())
        close(found.returns, [[1.0] * 3, [-0.5] * 2])
        assert ("kl_policy_base" in found.metrics) == (reference is not None)


SIX = [0.0, 1.0, 1.0, 0.0, 25.0, -3.0]
Z_SIX = [-0.42163702, -0.31622777, -0.31622777, -0.42163702, 2.21359436, -0.73786479]


def shaped(**options):
    config = ReinforcePPConfig(whiten="none", **options)
    return np.concatenate(run(SIX, [1] * 6, config=config).advantages)


def test_scores_are_normalised_then_clipped_then_scaled():
    close([shaped(reward_norm="batch", reward_clip=None)], [Z_SIX])
    clipped = [*Z_SIX[:4], 2.0, Z_SIX[5]]
    close([shaped(reward_norm="batch", reward_clip=(-2, 2))], [clipped])
    halved = shaped(reward_norm="batch", reward_clip=(-2, 2), reward_scale=0.5)
    close([halved], [np.array(clipped) / 2])
    other = shaped(reward_norm="batch", reward_clip=(-2, 2), clip_before_norm=True)
    close([other], [[-0.26726124, 0.53452248, 0.53452248, -0.26726124, 1.3363062, -1.87082868]])


def test_fixed_normalisation_uses_what_it_is_given():
    found = shaped(reward_norm="fixed", reward_mean=5.0, reward_std=2.5)
    close([found], [[-2.0, -1.6, -1.6, -2.0, 8.0, -3.2]], atol=1e-7)


def test_gamma_discounts_inclusively_from_the_last_action():
    mask = np.ones(4, bool)
    rewards_T = place_rewards(1.0, np.array([0.2, -0.1, 0.3, 0.05]), mask, 0.05)
    close([rewards_T], [[-0.01, 0.005, -0.015, 0.9975]])
    close([returns_to_go(rewards_T, mask, 0.9)], [[0.7095275, 0.799475, 0.88275, 0.9975]])
    close([returns_to_go(rewards_T, mask, 1.0)], [[0.9775, 0.9875, 0.9825, 0.9975]])


def test_running_statistics_are_merged_before_use_and_survive_json():
    config = ReinforcePPConfig(reward_norm="running", reward_clip=None, whiten="none")
    state, values = None, []
    for batch in (SIX[:4], SIX[4:]):
        found = run(batch, [1] * len(batch), config=config, state=state)
        values.append(np.concatenate(found.advantages))
        state = ReinforcePPState.from_json(json.loads(json.dumps(found.state.to_json())))
        assert state == found.state
    stats = state.scores
    assert (stats.mean, stats.var) == pytest.approx((3.99993333, 89.99878335), abs=1e-8)
    assert stats.count == 6.0001 and state.returns == RunningStats()
    close([values[1]], [(np.array([25.0, -3.0]) - stats.mean) / (stats.var**0.5 + 1e-8)])


def test_running_return_std_scales_without_centring():
    config = ReinforcePPConfig(
        reward_scale_mode="running_return_std", reward_scale=2.0, reward_clip=None, whiten="none"
    )
    found = run(SIX, [1] * 6, config=config)
    assert found.state.returns == RunningStats().merge(np.array(SIX))
    assert found.state.scores == RunningStats()
    factor = 2 / math.sqrt(found.state.returns.var + 1e-8)
    close([np.concatenate(found.advantages)], [np.array(SIX) * factor])
    assert found.metrics["reward/scale_factor"] == pytest.approx(factor)


def test_scaling_the_score_is_dividing_beta():
    scaled = advantages(**TWO, config=ReinforcePPConfig(kl_coef=0.1, reward_scale=4.0))
    softer = advantages(**TWO, config=ReinforcePPConfig(kl_coef=0.025))
    close(scaled.advantages, softer.advantages)


def test_baseline_variant_centres_by_group_then_whitens_by_token():
    found = run(
        [1, 0, 0, 1, 1, 0],
        [2, 3, 1, 2, 1, 2],
        config=ReinforcePPConfig.baseline(),
        group_ids="aaabbb",
    )
    third = 1 / 3
    close([[r[0] for r in found.returns]], [[2 * third, -third, -third, third, third, -2 * third]])
    assert found.metrics["return/mean"] == pytest.approx(-0.03030303)
    assert found.metrics["return/std"] == pytest.approx(0.48104569)
    each = [1.44886381, -0.62994079, -0.62994079, 0.75592895, 0.75592895, -1.32287566]
    close([[a[0] for a in found.advantages]], [each])
    assert [a.size for a in found.advantages] == [2, 3, 1, 2, 1, 2]


# ------------------------------------------------------------------ masks and populations

GAP = [1, 1, 0, 1, 1, 0]
GAP_KL = np.array([0.2, 0.4, 9, 0.2, 0, 7])


def test_masked_gaps_neither_cut_the_return_nor_leak_their_kl():
    mask = np.array(GAP, bool)
    rewards_T = place_rewards(2.0, GAP_KL, mask, 0.5)
    close([returns_to_go(rewards_T, mask, 1.0)], [[1.6, 1.7, 0, 1.9, 2.0, 0]])
    config = ReinforcePPConfig(kl_coef=0.5)
    for junk in (GAP_KL, np.where(mask, GAP_KL, NAN)):
        found = advantages([2.0], [junk - 1], [np.full(6, -1.0)], [GAP], config=config)
        close(found.returns, [[1.6, 1.7, 0, 1.9, 2.0, 0]])
        close(found.advantages, [[-1.264911, -0.632456, 0, 0.632456, 1.264911, 0]], atol=1e-6)


def test_gamma_counts_action_tokens_and_not_the_gap():
    mask = np.array(GAP, bool)
    found = returns_to_go(place_rewards(8.0, None, mask, 0.0), mask, 0.5)
    close([found], [[1, 2, 0, 4, 8, 0]])


def test_one_value_and_equal_values_whiten_to_exact_zeros():
    for value in (0.1, 1e9, 0.0):
        assert [a.tolist() for a in run([value], [1]).advantages] == [[0.0]]
        found = run([value] * 4, [3, 1, 2, 7])
        assert all((a == 0).all() for a in found.advantages)
    for norm in ("batch", "running"):
        config = ReinforcePPConfig(reward_norm=norm)
        found = run([1, 1, 1, 1], [1, 2, 3, 4], config=config)
        assert all((a == 0).all() for a in found.advantages)
        assert norm == "running" or found.metrics["reward/norm/max"] == 0


def test_a_mini_batch_of_its_own_would_give_other_advantages():
    returns = [np.full(2, 1.0), np.full(2, 3.0), np.full(1, 8.0)]
    masks = [np.ones(r.size, bool) for r in returns]
    std = math.sqrt(6.56)  # of 1 1 3 3 8, whose mean is 3.2
    close(whiten(returns, masks), [[-2.2 / std] * 2, [-0.2 / std] * 2, [4.8 / std]])
    close(whiten(returns[:2], masks[:2]), [[-1.0] * 2, [1.0] * 2])


def test_no_std_only_centres_and_none_leaves_returns():
    for mode, expected in (("no_std", [[0.5], [-0.5]]), ("none", [[1.0], [0.0]])):
        close(run([1, 0], [1, 1], config=ReinforcePPConfig(whiten=mode)).advantages, expected)
    found = run([1, 0], [1, 1], config=ReinforcePPConfig(whiten="none"))
    found.advantages[0] /= 4
    assert found.returns[0] == [1.0]


def test_each_step_on_scores_is_reported_in_order():
    config = ReinforcePPConfig(reward_clip=(-5, 5), reward_scale=0.5)
    metrics = run([0, 10], [1, 1], config=config).metrics
    steps = [
        name.split("/")[1] for name in metrics if name.startswith("reward/") and "/max" in name
    ]
    assert steps == ["raw", "clip", "scale"]
    assert [metrics[f"reward/{step}/max"] for step in steps] == [10.0, 5.0, 2.5]
    assert [metrics[f"reward/{step}/mean"] for step in steps] == [5.0, 2.5, 1.25]
    assert metrics["reward/clip_frac"] == 0.5 and metrics["reward/scale_factor"] == 0.5
    assert all(type(value) is float for value in metrics.values())
    both = ReinforcePPConfig(reward_clip=(-5, 5), reward_norm="batch", clip_before_norm=True)
    metrics = run([0, 10], [1, 1], config=both).metrics
    steps = [
        name.split("/")[1] for name in metrics if name.startswith("reward/") and "/max" in name
    ]
    assert steps == ["raw", "clip", "norm", "scale"]
    assert (metrics["reward/norm_mean"], metrics["reward/norm_std"]) == (2.5, 2.5)


# ------------------------------------------------------------------ left out, and counted


def test_a_sequence_without_action_tokens_enters_no_statistic():
    config = ReinforcePPConfig.baseline(whiten="none")
    masks = [[1], [1, 1], [0, 0], [1], [1]]
    found = advantages(
        [1.0, 0.0, 9.0, 2.0, 4.0], masks, None, masks, config=config, group_ids=[7, 7, 7, 8, 8]
    )
    close(found.advantages, [[0.5], [-0.5] * 2, [0, 0], [-1], [1]])
    assert found.left_out.tolist() == [False, False, True, False, False]
    assert found.metrics["batch/left_out_empty"] == 1 and found.metrics["batch/sequences"] == 5
    assert found.metrics["reward/raw/max"] == 4.0
    config = ReinforcePPConfig(reward_norm="running")
    found = advantages([1.0, 9.0], [[1], [0]], None, [[1], [0]], config=config)
    assert found.state.scores == RunningStats().merge(np.array([1.0]))


def test_truncated_sequences_are_scored_masked_or_given_a_score():
    flags = [False, False, True, False]
    rewards, lengths = [1.0, 0.0, 5.0, 0.5], [1, 1, 3, 1]
    plain = run(rewards, lengths, truncated=flags)
    assert plain.metrics["env/all/frac_truncated"] == 0.25 and plain.advantages[2][0] > 0
    masked = run(rewards, lengths, truncated=flags, config=ReinforcePPConfig(mask_truncated=True))
    kept = run([1.0, 0.0, 0.5], [1, 1, 1])
    close([masked.advantages[i] for i in (0, 1, 3)], kept.advantages)
    assert not masked.action_mask[2].any() and not masked.advantages[2].any()
    assert masked.metrics["batch/left_out_truncated"] == 1
    assert masked.metrics["batch/action_tokens"] == 3
    config = ReinforcePPConfig(truncated_reward=-1.0, whiten="none")
    close(
        run(rewards, lengths, truncated=flags, config=config).advantages,
        [[1.0], [0.0], [-1.0] * 3, [0.5]],
    )


def test_the_last_one_left_of_its_group_is_left_out_too():
    config = ReinforcePPConfig.baseline(mask_truncated=True)
    found = run(
        [1, 0, 1, 0],
        [1, 1, 1, 1],
        config=config,
        group_ids=[0, 0, 1, 1],
        truncated=[False, False, False, True],
    )
    close(found.advantages, [[1], [-1], [0], [0]])
    assert found.metrics["batch/left_out_alone"] == 1
    assert found.left_out.tolist() == [False, False, True, True]


def test_kl_is_clamped_token_by_token_and_counted():
    config = ReinforcePPConfig(kl_coef=1.0, kl_clamp=2.0, whiten="none")
    found = advantages(
        [0.0], [[-1.0, -50.0, -1.0]], [[-2.0, -1.0, -9.0]], [[1, 1, 1]], config=config
    )
    close(found.returns, [[-1 + 2 - 2, 2 - 2, -2]])
    assert found.metrics["kl_clamp_frac"] == pytest.approx(2 / 3)
    assert found.metrics["kl_policy_base"] == pytest.approx((1 - 49 + 8) / 3)


def test_token_rewards_join_as_they_are():
    config = ReinforcePPConfig(reward_scale=10.0, whiten="none")
    found = advantages(
        [1.0], [[0.0] * 4], None, [GAP[:4]], config=config, token_rewards=[[0, 0.5, NAN, 0.25]]
    )
    close(found.returns, [[10.75, 10.75, 0, 10.25]])


def test_masks_and_scores_come_in_any_ordinary_type():
    masks = [np.array([True]), [1.0], (np.int64(1),)]
    found = advantages(
        [True, np.float32(0.5), np.array(0)], [[-1]] * 3, None, masks, config=ReinforcePPConfig()
    )
    assert found.advantages[0].dtype == np.float64
    close(found.returns, [[1.0], [0.5], [0.0]])


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, None, "1", 1e31, 10**400, [1.0], "x"])
def test_a_score_that_is_no_finite_number_is_refused_by_its_index(bad):
    with pytest.raises(Invalid, match=r"^rewards\[2\]: found .*, expected a finite number"):
        run([1.0, 0.0, bad, NAN], [1, 1, 1, 1])
    with pytest.raises(Invalid, match=r"^rewards\[0\]"):
        advantages([bad, 1.0], [[0.0], [0.0]], None, [[0], [1]], config=ReinforcePPConfig())


BASELINE = ReinforcePPConfig.baseline()
BETA = ReinforcePPConfig(kl_coef=0.1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rewards": []}, r"rewards: found an empty batch"),
        ({"action_mask": [[1, 1]]}, r"action_mask: found 1 entries, expected 2"),
        ({"action_mask": [[1, 1], [1, 2]]}, r"action_mask\[1\]: expected a 1-D array of 0 and 1"),
        ({"action_mask": [[1, 1], [1, NAN]]}, r"action_mask\[1\]"),
        ({"action_mask": [[1, 1], [[1]]]}, r"action_mask\[1\]"),
        ({"action_mask": [[0, 0], [0, 0]]}, r"action_mask: found no action token to train on"),
        ({"logprobs": [[0, 0], [0]]}, r"logprobs\[1\]: found shape \(1,\), expected \(2,\)"),
        ({"ref_logprobs": None, "config": BETA}, r"ref_logprobs: found None.*kl_coef is 0.1"),
        ({"ref_logprobs": [[0, 0]]}, r"ref_logprobs: found 1 entries, expected 2"),
        ({"ref_logprobs": [[0, 0], [0, -math.inf]]}, r"ref_logprobs\[1\]\[1\]: found -inf"),
        ({"logprobs": [[NAN, 0], [0, 0]]}, r"logprobs\[0\]\[0\]: found nan on an action token"),
        ({"token_rewards": [[0, NAN], [0, 0]]}, r"token_rewards\[0\]\[1\]: found nan"),
        ({"config": BASELINE}, r"group_ids: found None"),
        ({"config": BASELINE, "group_ids": ["a", "b"]}, r"group_ids\[0\]: found a group of one"),
        ({"config": BASELINE, "group_ids": ["a"]}, r"group_ids: found 1 entries, expected 2"),
        ({"config": ReinforcePPConfig(mask_truncated=True)}, r"truncated: found None.*mask_trunc"),
        ({"config": ReinforcePPConfig(truncated_reward=0.0)}, r"truncated: found None.*_reward"),
        ({"truncated": [True]}, r"truncated: found 1 entries"),
        ({"truncated": [True, "no"]}, r"truncated\[1\]: found 'no'"),
        (
            {"config": ReinforcePPConfig(mask_truncated=True), "truncated": [True, True]},
            r"no action token to train on \(2: 0 empty, 2 truncated, 0 alone\)",
        ),
    ],
)
def test_unusable_arguments_are_refused_in_a_sentence(arguments, sentence):
    two = [[0.0, 0.0], [0.0, 0.0]]
    good = {"rewards": [1, 0], "logprobs": two, "ref_logprobs": two, "action_mask": [[1, 1]] * 2}
    good["config"] = ReinforcePPConfig()
    advantages(**good)
    with pytest.raises(Invalid, match=sentence):
        advantages(**good | arguments)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kl_coef": -0.1}, "kl_coef: found -0.1, expected a finite number of 0 or more"),
        ({"kl_coef": "0.1"}, "kl_coef: found '0.1'"),
        ({"kl_clamp": 0}, "kl_clamp: found 0, expected None or a finite number above 0"),
        ({"gamma": 1.01}, "gamma: found 1.01, expected a number from 0 to 1"),
        ({"gamma": True}, "gamma: found True"),
        ({"reward_norm": "zscore"}, "reward_norm: found 'zscore', expected one of none, batch, "),
        ({"whiten": True}, "whiten: found True, expected one of full, no_std, none"),
        ({"group_baseline": 1}, "group_baseline: found 1, expected true or false"),
        ({"reward_clip": (1, -1)}, r"reward_clip: found \(1, -1\), expected None or two finite"),
        ({"reward_clip": (-1, NAN)}, "reward_clip"),
        ({"reward_clip": 5}, "reward_clip: found 5"),
        ({"reward_scale": 0}, "reward_scale: found 0, expected a finite number above 0"),
        ({"reward_norm": "fixed", "reward_mean": 0.0}, "reward_std: found None, expected a number"),
        (
            {"reward_std": 1.0},
            "reward_std: found 1.0, expected None, because reward_norm is 'none'",
        ),
        ({"reward_norm": "fixed", "reward_mean": 0.0, "reward_std": 0.0}, "reward_std: found 0.0"),
        ({"mask_truncated": True, "truncated_reward": 0.0}, "truncated_reward: found 0.0"),
    ],
)
def test_a_config_names_the_field_it_refuses(options, sentence):
    with pytest.raises(Invalid, match=f"^{sentence}"):
        ReinforcePPConfig(**options)


def test_presets_and_a_clip_read_from_json():
    source = ReinforcePPConfig.source(gamma=0.99)
    assert (source.reward_norm, source.kl_coef, source.gamma) == ("batch", 0.01, 0.99)
    assert source.reward_clip == (-10, 10) and not source.clip_before_norm
    plain = ReinforcePPConfig()
    assert (plain.reward_norm, plain.kl_coef, plain.gamma, plain.whiten) == ("none", 0, 1, "full")
    assert ReinforcePPConfig.baseline(kl_coef=0.1).group_baseline
    assert ReinforcePPConfig(reward_clip=[-1, 1]) == ReinforcePPConfig(reward_clip=(-1, 1))


@pytest.mark.parametrize("stored", [{}, None, {"scores": {"mean": 0.0}}, "x"])
def test_a_damaged_state_is_refused(stored):
    with pytest.raises(Invalid, match=r"^state: found"):
        ReinforcePPState.from_json(stored)
    broken = ReinforcePPState().to_json()
    broken["scores"]["mean"] = NAN
    with pytest.raises(Invalid, match=r"^state: found"):
        ReinforcePPState.from_json(broken)


def test_single_steps_by_hand():
    assert moments(np.array([2.0, 4.0])) == (3.0, 1.0)
    assert reward_shaping.standardize(np.array([7.0]), 7.0, 0.0).tolist() == [0.0]
    assert reward_shaping.clip(np.array([-12.0, 3.0]), -10, 10).tolist() == [-10.0, 3.0]
