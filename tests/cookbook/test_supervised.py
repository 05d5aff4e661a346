"""The cookbook's supervised learning: the loss falls, runs resume, checkpoints roll."""

import pytest

from .hubdata import conversations
from .kit import FIXED, SMOLLM2, TEACHER, TINY

pytestmark = pytest.mark.nightly


def falls(run, key="train_mean_nll"):
    values = run.steps(key)
    assert values[-1] < values[0] - 0.1, values


def test_sl_loop_resumes_where_it_was_killed(cookbook):
    """Four steps; then as if it had been killed after its checkpoint of two, and on to the fourth:
    the two that are done again come out the same."""
    options = {key: value for key, value in TINY.items() if key != "eval_every"}
    options |= {"model_name": FIXED, "batch_size": 4, "max_length": 128, "save_every": 2}
    first = cookbook.recipe("sl_loop", "sl_loop", **options, max_steps=4)
    falls(first)
    losses = first.steps("train_mean_nll")
    assert first.steps("step")[:4] == [0, 1, 2, 3]
    first.forget_checkpoints_after(1)
    again = cookbook.recipe("sl_loop", "sl_loop", **options, max_steps=4)
    assert again.steps("train_mean_nll")[-2:] == pytest.approx(losses[2:], rel=1e-5)


def test_sl_basic(cookbook):
    common = "dataset_builder.common_config"
    builder = {
        "dataset_builder": "tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder",
        f"{common}.batch_size": 4, f"{common}.max_length": 128,
        f"{common}.renderer_name": "qwen3_instruct", f"{common}.model_name_for_tokenizer": FIXED,
    }  # fmt: skip
    run = cookbook.recipe(
        "sl_basic", "sl_basic", **TINY | {"eval_every": 3}, **builder, model_name=FIXED, max_steps=4
    )
    falls(run)
    falls(run, "test/nll")


ROLLING = TINY | {
    "model_name": SMOLLM2, "renderer_name": "qwen3_instruct", "batch_size": 4,
    "save_every": 2, "rolling_save_every": 1, "rolling_ttl_seconds": 3600,
}  # fmt: skip


def test_checkpoints_roll(cookbook):
    """As in the cookbook's own test. The state that a rolling one leaves is deleted after it."""
    run = cookbook.recipe("chat_sl.train", "chat_sl", **ROLLING, max_steps=4)
    falls(run)
    kept = run.checkpoints()
    assert [(row["name"], row.get("rolling", False)) for row in kept] == [
        ("000001", True), ("000002", False), ("000003", True), ("final", False),
    ]  # fmt: skip
    assert ["sampler_path" in row for row in kept] == [False, True, False, True]
    assert run.printed.count("Deleted rolling checkpoint") == 2


def test_a_killed_run_resumes_from_a_rolling_checkpoint(cookbook):
    options = ROLLING | {"behavior_if_log_dir_exists": "resume"}
    killed = cookbook.killed("chat_sl.train", "chat_sl_killed", 3, **options, max_steps=12)
    last = killed.checkpoints()[-1]
    batch = int(last["batch"])
    resumed = cookbook.recipe("chat_sl.train", "chat_sl_killed", **options, max_steps=batch + 2)
    assert f"Resumed training from {last['state_path']}" in resumed.printed
    losses = resumed.steps("train_mean_nll")
    assert len(losses) == batch + 2
    assert max(losses[batch:]) < losses[0] - 0.1, losses


def test_prompt_distillation(cookbook, thinking, tmp_path):
    """The data it samples from the prompted model, then training without the prompt."""
    made = tmp_path / "languages.jsonl"
    cookbook.module(
        "tinker_cookbook.recipes.prompt_distillation.create_data", f"output_file={made}"
    )
    assert made.exists()
    run = cookbook.recipe(
        "prompt_distillation.train", "prompt_distillation", **TINY,
        model_name=TEACHER, renderer_name="qwen3_instruct", batch_size=4, max_steps=4,
        file_path=conversations(tmp_path / "chats.jsonl"),
    )  # fmt: skip
    falls(run)
