"""The cookbook's supervised learning: the loss falls, runs resume, checkpoints roll."""

import pytest

from .hubdata import conversations
from .kit import FIXED, SMOLLM2, TEACHER, TINY

pytestmark = pytest.mark.nightly


def falls(run, key="train_mean_nll"):
    values = run.steps(key)
    assert values[-1] < 0.8 * values[0], values


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
    """As in the cookbook's own test: 4 steps, then 2 more in the same folder."""
    options = TINY | {
        "model_name": SMOLLM2, "renderer_name": "qwen3_instruct", "batch_size": 4,
        "save_every": 2, "rolling_save_every": 1, "rolling_ttl_seconds": 3600,
        "lr_schedule": "constant",
    }  # fmt: skip
    first = cookbook.recipe(
        "chat_sl.train", "chat_sl", **options, max_steps=4, behavior_if_log_dir_exists="delete"
    )
    falls(first)
    kept = first.checkpoints()
    assert [row["name"] for row in kept if row.get("rolling")], kept
    assert not [row for row in kept if row.get("rolling") and "sampler_path" in row]
    assert [row["name"] for row in kept if "sampler_path" in row][-1] == "final"

    resumed = cookbook.recipe(
        "chat_sl.train", "chat_sl", **options, max_steps=6, behavior_if_log_dir_exists="resume"
    )
    losses = resumed.steps("train_mean_nll")
    assert len(losses) == 6
    assert max(losses[4:]) < losses[2]


def test_prompt_distillation(cookbook, tmp_path):
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
