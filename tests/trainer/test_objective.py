"""Loss, thresholds and π_old, and what is refused."""

import pytest

from trimtab.errors import Invalid
from trimtab.trainer.config import Config
from trimtab.trainer.objective import objective


def test_the_token_mean_divides_the_penalty_of_stable_reinforce():
    goal = objective(Config(algorithm="stable_reinforce"))
    assert goal.loss_config(50.0) == {"kl_coeff": pytest.approx(0.01 / 50)}
    goal = objective(Config(algorithm="stable_reinforce", kl_coeff=0.5))
    assert goal.loss_config(4.0) == {"kl_coeff": 0.125}
    assert goal.loss_config(1.0) == {"kl_coeff": 0.5}


def test_thresholds_bound_the_ratio_and_are_not_divided():
    goal = objective(Config(clip_high_threshold=1.28))
    assert (goal.loss, goal.loss_config(50.0)) == ("ppo", {"clip_high_threshold": 1.28})


@pytest.mark.parametrize(
    ("algorithm", "loss", "old"),
    [
        ("reinforce_pp", "ppo", "recompute"),
        ("reinforce_pp_baseline", "ppo", "recompute"),
        ("stable_reinforce", "stable_reinforce", "sampler"),
        ("grpo", "ppo", "sampler"),
        ("rloo", "importance_sampling", "sampler"),
    ],
)
def test_defaults(algorithm, loss, old):
    goal = objective(Config(algorithm=algorithm))
    assert (goal.loss, goal.old_logprobs, goal.custom) == (loss, old, False)
    assert goal.records == (loss == "stable_reinforce")


def test_a_loss_of_another_algorithm_brings_its_needs():
    goal = objective(Config(algorithm="reinforce_pp", loss="stable_reinforce"))
    assert goal.records
    assert goal.old_logprobs == "sampler"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "rloo", "group_size": 1}, "group_size is 1; use group_size=2"),
        ({"algorithm": "grpo2"}, "must be one of reinforce_pp, "),
        ({"loss": "dpo"}, "must be one of importance_sampling, ppo"),
        (
            {"algorithm": "rloo", "clip_low_threshold": 0.9},
            "does not take it; it is for ppo, cispo",
        ),
        ({"loss": "cispo", "dual_clip": 3.0}, "for ppo only, but the loss is cispo"),
        ({"dual_clip": 0.5}, "above 1"),
        ({"loss": "stable_reinforce", "old_logprobs": "recompute"}, "use old_logprobs=sampler"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, words):
    with pytest.raises(Invalid, match=words):
        objective(Config(**options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl_penalty_coef": 0.01}, "set reference=base"),
        ({"kl_loss_coef": 0.01}, "no reference to measure KL against"),
        ({"temperature": 0.0}, "nothing could be learned"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"minibatches": 65}, "only 64 sequences"),
        ({"reference": "org/other"}, "base, or a tinker:// path"),
        ({"reward_norm": "fixed"}, "reward_mean"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(options, words):
    with pytest.raises(Invalid, match=words):
        Config(**options)
