"""Direct preference optimisation: the cookbook's loss is a custom one."""

import math

import pytest

from .kit import SMOLLM2, TINY

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
