"""PPO's clipped objective and the KL estimators: worked values, and gradients against the truth."""

import math

import numpy as np
import pytest

from trimtab.errors import Invalid
from trimtab.trainer.kl import ESTIMATORS
from trimtab.trainer.ppo import ppo_terms


def close(found, expected, atol=1e-8):
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


OLD = [-0.5, -1.2, -0.3, -0.9, -0.1]
NEW = [-0.4, -1.5, -0.3, -1.2, -0.05]
A = [0.80732757, 0.83451031, 0.80732757, -1.20419566, -1.24496978]


def test_ppo_value_gradient_and_clip_fraction_by_hand():
    found = ppo_terms(NEW, OLD, A)
    close(found.loss_N, [-0.89223495, -0.61822044, -0.80732757, 0.96335653, 1.30880075])
    close(found.gradient_N, [-0.89223495, -0.61822044, -0.80732757, 0, 1.30880075])
    close(found.loss_N.sum(), -0.04562568, 2e-8)  # A is rounded
    close(found.loss_N.mean(), -0.00912514)
    assert found.clipped_low_N.tolist() == [False, False, False, True, False]
    assert not found.clipped_high_N.any()


HIGHER_OLD, HIGHER_NEW = [-1, -2, -0.2, -3], [-0.7, -2.4, -0.25, -1.2]
HIGHER_A = [1.2, -0.8, 0.5, -0.8]


def test_clip_higher_and_dual_clip_by_hand():
    options = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    found = ppo_terms(HIGHER_NEW, HIGHER_OLD, HIGHER_A, **options)
    close(found.loss_N, [-1.536, 0.64, -0.47561471, 4.83971797])
    close(found.gradient_N, [0, 0, -0.47561471, 4.83971797])
    assert found.clipped_high_N.tolist() == [True, False, False, False]
    found = ppo_terms(HIGHER_NEW, HIGHER_OLD, HIGHER_A, **options, dual_clip=3.0)
    close(found.loss_N, [-1.536, 0.64, -0.47561471, 2.4])
    close(found.gradient_N, [0, 0, -0.47561471, 0])
    assert found.dual_clipped_N.tolist() == [False, False, False, True]


def test_ppo_is_the_least_of_both_branches_and_its_gradient_the_slope():
    random = np.random.default_rng(0)
    old, new = -random.exponential(1.0, 400), -random.exponential(1.0, 400)
    advantages, ratio = random.normal(size=400), np.exp(new - old)
    for dual in (None, 2.0):
        best = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
        if dual is not None:
            best = np.where(advantages < 0, np.maximum(best, dual * advantages), best)
        found = ppo_terms(new, old, advantages, dual_clip=dual)
        close(found.loss_N, -best, 1e-12)
        up = ppo_terms(new + 1e-6, old, advantages, dual_clip=dual).loss_N
        down = ppo_terms(new - 1e-6, old, advantages, dual_clip=dual).loss_N
        close((up - down) / 2e-6, found.gradient_N, 1e-4)


def test_on_a_first_update_clipping_is_inert_and_the_gradient_is_reinforce():
    found = ppo_terms(OLD, OLD, A, dual_clip=3.0)
    close(found.gradient_N, -np.array(A), 0)
    assert not (found.clipped_low_N | found.clipped_high_N | found.dual_clipped_N).any()


def test_a_zero_advantage_is_inert_and_a_huge_ratio_finite():
    found = ppo_terms([math.nan, -1.0, 0.0], [-1.0, -math.inf, -91.0], [0.0, 0.0, -1.0])
    assert found.loss_N.tolist() == [0.0, 0.0, math.exp(30)]
    assert found.gradient_N.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"clip_low_threshold": 1.1}, "clip_low_threshold, clip_high_threshold: found 1.1, 1.2"),
        ({"clip_high_threshold": 0.2}, "found 0.8, 0.2, expected bounds of the ratio"),
        ({"dual_clip": 1.0}, "dual_clip: found 1.0, expected None or a number above 1"),
        ({"advantages": [1.0]}, r"found shapes \(2,\), \(2,\), \(1,\), expected one shape"),
        ({"logprobs": [0.0, math.nan]}, r"logprobs\[1\]: found nan"),
    ],
)
def test_ppo_refuses_in_a_sentence(changes, sentence):
    good = {"logprobs": [-1.0, -1.0], "old_logprobs": [-1.0, -1.0], "advantages": [1.0, -1.0]}
    ppo_terms(**good)
    with pytest.raises(Invalid, match=sentence):
        ppo_terms(**good | changes)


def test_kl_estimators_by_hand():
    l = np.array([0.2, -0.9, 0.15, 1.3])
    values = {
        "k1": l,
        "k2": [0.02, 0.405, 0.01125, 0.845],
        "k3": [0.01873075, 0.55960311, 0.01070798, 0.57253179],
    }
    gradients = {
        "k1": [1, 1, 1, 1],
        "k2": l,
        "k3": [0.18126925, -1.45960311, 0.13929202, 0.72746821],
    }
    for name, (value, gradient) in ESTIMATORS.items():
        close(value(l), values[name])
        close(gradient(l), gradients[name])


def softmax(logits_V):
    p_V = np.exp(logits_V - logits_V.max())
    return p_V / p_V.sum()


def slope(function, logits_V):
    """Central differences."""
    steps = np.eye(logits_V.size) * 1e-6
    return np.array([(function(logits_V + h) - function(logits_V - h)) / 2e-6 for h in steps])


def test_what_each_estimator_estimates_and_which_gradient_it_gives_as_a_loss():
    """Expectations over the whole of a small vocabulary, samples drawn from the trained policy."""
    random = np.random.default_rng(1)
    logits_V, ref_V = random.normal(size=7), softmax(random.normal(size=7))
    p_V = softmax(logits_V)
    l_V = np.log(p_V / ref_V)

    def reverse(z_V):
        return float(softmax(z_V) @ np.log(softmax(z_V) / ref_V))

    def forward(z_V):
        return float(ref_V @ np.log(ref_V / softmax(z_V)))

    for name in ("k1", "k3"):
        assert float(p_V @ ESTIMATORS[name][0](l_V)) == pytest.approx(reverse(logits_V))
    score_VV = np.eye(7) - p_V  # row x: gradient of log p(x) with respect to the logits
    expected = {"k1": np.zeros(7), "k2": slope(reverse, logits_V), "k3": slope(forward, logits_V)}
    for name, gradient_V in expected.items():
        close((p_V * ESTIMATORS[name][1](l_V)) @ score_VV, gradient_V, 1e-7)
    k1_in_reward = (p_V * l_V) @ score_VV
    close(k1_in_reward, slope(reverse, logits_V), 1e-7)
