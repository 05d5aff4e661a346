"""The cookbook's reinforcement learning, a few steps each, by the metrics it logs itself.

`optim/kl_sample_train_v1` is the mean of log q - log p over the sampled tokens and `_v2` half the
mean of its square: q as the sampler returned it, p as forward_backward did.
"""

import math

import pytest

from .kit import FIXED, SMOLLM2, TINY

pytestmark = pytest.mark.nightly

ARITHMETIC = TINY | {
    "model_name": SMOLLM2, "renderer_name": "qwen3_instruct",
    "groups_per_batch": 2, "group_size": 4, "max_tokens": 5,
}  # fmt: skip
ON_POLICY = {"abs": 1e-3}


def on_policy(run, steps):
    """Sampler and learner are the same distribution at every step, to float error."""
    kl, square = run.steps("optim/kl_sample_train_v1"), run.steps("optim/kl_sample_train_v2")
    assert kl == pytest.approx([0.0] * steps, **ON_POLICY)
    assert square == pytest.approx([0.0] * steps, abs=1e-6)


def test_rl_loop_trains_by_its_default_loss(cookbook, real):
    options = {key: value for key, value in TINY.items() if key != "eval_every"}
    run = cookbook.recipe(
        "rl_loop", "rl_loop",
        **options | {"model_name": FIXED, "batch_size": 2, "group_size": 16, "max_tokens": 24},
        max_steps=3,
    )  # fmt: skip
    rewards = run.steps("reward/total")
    assert len(rewards) == 3
    if real:  # a random model earns nothing, and the recipe then skips the update
        assert rewards[-1] > rewards[0], rewards
        assert run.steps("grad_norm")[0] > 0
    final = run.checkpoints()[-1]
    assert final["state_path"].endswith("/weights/final")
    assert final["sampler_path"].endswith("/sampler_weights/final")


def test_rl_basic(cookbook):
    """Its command line takes another size of batch only with the whole builder named again."""
    builder = {
        "dataset_builder": "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
        "dataset_builder.batch_size": 2, "dataset_builder.group_size": 2,
        "dataset_builder.renderer_name": "qwen3_instruct",
        "dataset_builder.model_name_for_tokenizer": FIXED,
    }  # fmt: skip
    run = cookbook.recipe(
        "rl_basic", "rl_basic", **TINY, **builder, model_name=FIXED, max_tokens=16, max_steps=2
    )
    on_policy(run, 2)


def test_math_rl_synchronous(cookbook):
    run = cookbook.recipe("math_rl.train", "math_sync", **ARITHMETIC, max_steps=3)
    on_policy(run, 3)
    assert all(math.isfinite(norm) and norm > 0 for norm in run.steps("grad_norm"))


def test_math_rl_asynchronous(cookbook):
    """Off policy by up to two updates: the learner has moved on, and the loss still runs."""
    run = cookbook.recipe(
        "math_rl.train", "math_async", **ARITHMETIC, max_steps=5, max_steps_off_policy=2
    )
    kl = run.steps("optim/kl_sample_train_v2")
    assert len(kl) == 5
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert max(kl) > 1e-4
    assert all(math.isfinite(norm) for norm in run.steps("grad_norm"))


def test_math_rl_streams_minibatches(cookbook):
    streamed = {"groups_per_batch": 2, "num_minibatches": 2}
    run = cookbook.recipe(
        "math_rl.train", "math_stream", **ARITHMETIC, max_steps=2,
        **{f"stream_minibatch_config.{key}": value for key, value in streamed.items()},
    )  # fmt: skip
    on_policy(run, 2)


def test_math_rl_resumes_where_it_was_killed(cookbook):
    """Killed in earnest when its checkpoint of two updates is noted, and started again by the same
    command: the third and fourth batch follow, with the checkpoint's weights and optimizer."""
    options = ARITHMETIC | {"save_every": 2, "behavior_if_log_dir_exists": "resume"}
    killed = cookbook.killed("math_rl.train", "math_resumed", 1, **options, max_steps=4)
    resumed = cookbook.recipe("math_rl.train", "math_resumed", **options, max_steps=4)
    assert "Resumed training from " + str(killed.checkpoints()[0]["state_path"]) in resumed.printed
    batches = resumed.steps("progress/batch")
    assert batches in ([0, 2, 3], [0, 1, 2, 3])  # killed before or after it logged its second
    assert resumed.steps("optimizer_step") == [batch + 1 for batch in batches]
    gradients, averages = resumed.steps("grad_norm"), resumed.steps("exp_avg_norm")
    fresh = [average / norm for average, norm in zip(averages, gradients, strict=True)]
    assert fresh[0] == pytest.approx(0.1)  # 1 - beta1: the average of one gradient
    assert fresh[-2] != pytest.approx(0.1, rel=1e-3)
    on_policy(resumed, len(batches))
    assert [(note["name"], note["batch"]) for note in resumed.checkpoints()] == [
        ("000002", 2), ("000004", 4), ("final", 4),
    ]  # fmt: skip


GAME = TINY | {"model_name": SMOLLM2, "renderer_name": "qwen3_instruct"}
GAME = {key: value for key, value in GAME.items() if key != "lora_rank"}


def test_guess_number_takes_many_turns(cookbook):
    run = cookbook.recipe(
        "multiplayer_rl.guess_number.train", "guess", **GAME,
        batch_size=1, group_size=2, max_tokens=8, max_steps=1,
    )  # fmt: skip
    on_policy(run, 1)
    assert run.steps("env/all/turns_per_episode") == [10.0]


def test_twenty_questions_are_answered_by_another_model(cookbook, thinking):
    run = cookbook.recipe(
        "multiplayer_rl.twenty_questions.train", "questions", **GAME,
        batch_size=1, group_size=2, max_tokens=8, max_steps=1, num_epochs=1,
    )  # fmt: skip
    on_policy(run, 1)
    assert run.steps("env/all/turns_per_episode")[0] > 1


def test_shorter_makes_answers_shorter(cookbook, real):
    options = {key: value for key, value in GAME.items() if key != "save_every"}
    run = cookbook.recipe(
        "preference.shorter.train", "shorter", **options,
        batch_size=1, group_size=8, max_tokens=24, max_steps=6,
    )  # fmt: skip
    on_policy(run, 6)
    lengths = run.steps("env/all/ac_tokens_per_turn")
    assert not real or sum(lengths[-2:]) < sum(lengths[:2]), lengths
