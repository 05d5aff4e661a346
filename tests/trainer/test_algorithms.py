"""What each algorithm makes of a small batch, against numbers worked out by hand."""

import numpy as np
import pytest
from trainer_builders import group

from trimtab.trainer.algorithms import ALGORITHMS
from trimtab.trainer.batch import build
from trimtab.trainer.config import Config

GROUPS = [group(0, [1.0, 0.0, 0.0]), group(1, [1.0, 1.0], lengths=[1, 3])]


def by_sequence(name, groups=GROUPS, **options):
    """The advantage of each sequence: the same on all its action tokens, 0 on the prompt's row."""
    batch, _ = build(groups, smallest_group=ALGORITHMS[name].smallest_group)
    reference = options.pop("reference_logprobs", None)
    if reference is not None:
        batch = batch.with_reference([np.full(m.size, reference) for m in batch.mask_D_N])
        options["reference"] = "base"
    found = ALGORITHMS[name].advantages(batch, Config(algorithm=name, **options), None)
    for values, mask in zip(found.advantages_D_N, batch.mask_D_N, strict=True):
        assert not values[~mask].any()
        assert mask.sum() > 0
    return [
        values[mask].round(6).tolist()
        for values, mask in zip(found.advantages_D_N, batch.mask_D_N, strict=True)
    ]


def test_rloo_leaves_itself_out():
    found = by_sequence("rloo")
    assert found == [[1, 1], [-0.5, -0.5], [-0.5, -0.5], [0], [0, 0, 0]]


def test_stable_reinforce_takes_the_group_mean():
    found = by_sequence("stable_reinforce")
    third = 0.333333
    assert found == [[0.666667] * 2, [-third] * 2, [-third] * 2, [0], [0, 0, 0]]


def test_grpo_divides_by_the_population_deviation():
    """Group [1, 0, 0]: mean 1/3, deviation sqrt(2)/3, so 1.414211 and -0.707105 with its 1e-6."""
    found = by_sequence("grpo")
    assert found == [[1.414211] * 2, [-0.707105] * 2, [-0.707105] * 2, [0], [0, 0, 0]]
    assert by_sequence("grpo", group_std=False)[0] == [0.666667] * 2


def test_reinforce_pp_whitens_over_all_tokens():
    """Token returns 1 1 0 0 0 0 1 1 1 1: mean 0.6, deviation sqrt(0.24)."""
    found = by_sequence("reinforce_pp")
    up, down = round(0.4 / 0.24**0.5, 6), round(-0.6 / 0.24**0.5, 6)
    assert found == [[up] * 2, [down] * 2, [down] * 2, [up], [up] * 3]


def test_reinforce_pp_baseline_centres_then_whitens():
    """Returns 2/3 2/3 -1/3 -1/3 -1/3 -1/3 0 0 0 0: mean 0, variance (2·4/9 + 4/9)/10."""
    found = by_sequence("reinforce_pp_baseline")
    scale = ((2 * 4 / 9 + 4 / 9) / 10) ** -0.5
    assert found[0] == pytest.approx([2 / 3 * scale] * 2, abs=1e-6)
    assert found[1] == pytest.approx([-1 / 3 * scale] * 2, abs=1e-6)
    assert found[4] == [0, 0, 0]


def test_kl_is_taken_off_the_reward_before_the_baseline():
    """log π_old -1, log π_ref -3: KL 2 a token; with β 0.1 rewards 1 - 0.2 and 1 - 0.6."""
    found = by_sequence(
        "rloo", [group(0, [1.0, 1.0], lengths=[1, 3])], reference_logprobs=-3.0, kl_penalty_coef=0.1
    )
    assert found == [[0.4], [-0.4] * 3]


def test_reinforce_pp_has_kl_to_go():
    """KL 2 a token, β 0.1: returns 0.6 0.8 and -0.4 -0.2, so differences of 0.2 along a sequence
    and mean 0.2, deviation sqrt(0.26)."""
    found = by_sequence(
        "reinforce_pp", [group(0, [1.0, 0.0])], reference_logprobs=-3.0, kl_penalty_coef=0.1
    )
    expected = (np.array([[0.6, 0.8], [-0.4, -0.2]]) - 0.2) / 0.26**0.5
    assert found == pytest.approx(expected, abs=1e-5)


def test_sequences_without_a_reward_do_not_count():
    assert by_sequence("rloo", [group(0, [1.0, None, 0.0])]) == [[1, 1], [-1, -1]]


def test_a_sequence_left_alone_has_no_baseline():
    batch, left_out = build([group(0, [1.0, None]), group(1, [1.0, 0.0])], smallest_group=2)
    assert batch.rewards_D.tolist() == [1, 0]
    assert left_out == {"none": 1, "alone_in_group": 1}


def test_running_statistics_pass_through_json():
    config = Config(reward_norm="running")
    first, _ = build([group(0, [0.0, 1.0]), group(1, [1.0, 0.0])])
    second, _ = build([group(2, [25.0, -3.0])])
    advantages = ALGORITHMS["reinforce_pp"].advantages
    state = advantages(first, config, None).state
    state = advantages(second, config, state).state
    assert state["scores"]["mean"] == pytest.approx(3.99993333)
    assert state["scores"]["count"] == pytest.approx(6.0001)


def test_every_algorithm_names_a_loss_and_a_file_of_its_own():
    for name, found in ALGORITHMS.items():
        assert found.name == name
        assert found.advantages.__module__.endswith(f".{name}")
