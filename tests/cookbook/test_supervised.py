"""The cookbook's supervised learning: the loss falls, runs resume, checkpoints roll."""

import pytest

from .hubdata import conversations
from .kit import FIXED, SMOLLM2, TEACHER, TINY

pytestmark = pytest.mark.nightly


def falls(run, key="train_mean_nll"):
    values = run.steps(key)
    assert values[-1] < values[0] - 0.1, values


def test_sl_loop(cookbook):
    options = {key: value for key, value in TINY.items() if key != "eval_every"}
    run = cookbook.recipe(
        "sl_loop", "sl_loop", **options | {"model_name": FIXED, "batch_size": 4, "max_length": 128},
        max_steps=4,
    )  # fmt: skip
    falls(run)


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


def test_checkpoints_roll_and_a_run_resumes(cookbook):
    """Four steps; then as if it had stopped after the second, and on to the sixth: the two that are
    done again come out the same."""
    options = TINY | {
        "model_name": SMOLLM2, "renderer_name": "qwen3_instruct", "batch_size": 4,
        "save_every": 2, "rolling_save_every": 1, "rolling_ttl_seconds": 3600,
        "lr_schedule": "constant", "behavior_if_log_dir_exists": "resume",
    }  # fmt: skip
    first = cookbook.recipe("chat_sl.train", "chat_sl", **options, max_steps=4)
    losses, kept = first.steps("train_mean_nll"), first.checkpoints()
    falls(first)
    assert [(row["name"], row.get("rolling", False)) for row in kept] == [
        ("000001", True), ("000002", False), ("000003", True), ("final", False),
    ]  # fmt: skip
    assert ["sampler_path" in row for row in kept] == [False, True, False, True]
    assert "Failed to delete" not in first.printed

    first.forget_checkpoints_after(2)
    resumed = cookbook.recipe("chat_sl.train", "chat_sl", **options, max_steps=6)
    again = resumed.steps("train_mean_nll")[-4:]
    assert again[:2] == pytest.approx(losses[2:], rel=1e-5)
    assert again[-1] < losses[-1]


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
