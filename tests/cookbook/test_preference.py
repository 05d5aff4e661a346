"""Preferences: direct optimisation, whose loss is a custom one, and a model of them with RL."""

import math
from dataclasses import replace

import pytest

from .kit import FIXED, SMOLLM2, TINY

pytestmark = pytest.mark.nightly


def test_dpo_prefers_what_was_chosen(cookbook):
    """At first the model is its own reference: the loss is log 2 and the margin 0."""
    options = {key: TINY[key] for key in ("learning_rate",)}
    run = cookbook.recipe(
        "preference.dpo.train", "dpo", **options, lr_schedule="constant",
        model_name=SMOLLM2, renderer_name="qwen3_instruct", batch_size=2, max_steps=4,
    )  # fmt: skip
    losses, margins = run.steps("dpo_loss"), run.steps("margin")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert margins[0] == pytest.approx(0.0, abs=1e-2)
    assert losses[-1] < losses[0]
    assert margins[-1] > margins[0]


def test_rlhf_pipeline(cookbook):
    """A supervised stage, a model of preferences, and RL by duels that this model judges."""
    run = cookbook.module(
        "tinker_cookbook.recipes.preference.rlhf.rlhf_pipeline",
        "short_name=pipeline", f"base_model={FIXED}", "batch_size=4", "lora_rank=8",
        "sft_learning_rate=1e-3", "rm_learning_rate=1e-3", "max_length=256",
        "rl_max_tokens=8", "rl_group_size=2", "eval_every=0", "max_steps=3",
    )  # fmt: skip
    sft, judge, rl = (
        replace(run, folder=run.folder / "rlhf-pipeline" / stage) for stage in ("sft", "rm", "rl")
    )
    for supervised in (sft, judge):
        losses = supervised.steps("train_mean_nll")
        assert losses[-1] < losses[0] - 0.1, losses
    assert rl.steps("optim/kl_sample_train_v1") == pytest.approx([0.0] * 3, abs=1e-3)
    assert rl.steps("optimizer_step") == [4, 5, 6]  # counted on from the supervised stage
