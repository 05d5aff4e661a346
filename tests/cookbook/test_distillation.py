"""Distillation: on policy, a student goes back to the teacher that it was trained away from; of two
teachers each is asked about its own prompts; off policy, the student copies what was written."""

import pytest

from .hubdata import conversations
from .kit import SMOLLM2, TINY

pytestmark = pytest.mark.nightly

MODEL = {"model_name": SMOLLM2, "renderer_name": "qwen3_instruct"}


@pytest.fixture(scope="module")
def moved(cookbook, real, tmp_path_factory):
    """The last checkpoint of a model that was trained away from its base, and not too far to come
    back: from 5 nats a token, at a rate of 1e-3, one run of three fell silent instead."""
    chats = conversations(tmp_path_factory.mktemp("moved") / "chats.jsonl")
    run = cookbook.recipe(
        "chat_sl.train", "moved", **TINY | MODEL | {"learning_rate": 1e-3 if real else 5e-3},
        dataset=chats, batch_size=4, max_steps=6, lr_schedule="constant",
    )  # fmt: skip
    return run.checkpoints()[-1]


def test_a_student_approaches_its_teacher(cookbook, moved, real):
    rate = {"learning_rate": 3e-4 if real else 1e-3}
    run = cookbook.recipe(
        "distillation.on_policy_distillation", "distillation", **TINY | MODEL | rate,
        teacher_model=SMOLLM2, load_checkpoint_path=moved["state_path"],
        groups_per_batch=4, group_size=4, max_tokens=16, max_steps=6,
    )  # fmt: skip
    kl = run.steps("teacher_kl")
    assert kl[0] > 0.1
    assert sum(kl[-2:]) < 0.8 * sum(kl[:2]), kl
    assert run.steps("optim/kl_sample_train_v1") == pytest.approx([0.0] * 6, abs=1e-3)


def test_each_teacher_is_asked_about_its_own_prompts(cookbook, moved):
    """The first is the student as it starts; the second is the one that was trained away."""
    run = cookbook.recipe(
        "distillation.on_policy_multi_teacher", "teachers", **TINY | MODEL,
        deepmath_teacher_model=SMOLLM2, deepmath_groups_per_batch=2,
        tulu3_teacher_model=SMOLLM2, tulu3_teacher_checkpoint=moved["sampler_path"],
        tulu3_groups_per_batch=2, group_size=4, max_tokens=16, max_steps=1,
    )  # fmt: skip
    assert run.steps("teacher_kl/dataset_0") == pytest.approx([0.0], abs=1e-3)
    assert run.steps("teacher_kl/dataset_1")[0] > 0.1
    assert run.steps("optim/kl_sample_train_v1") == pytest.approx([0.0], abs=1e-3)


def test_reasoning_off_policy(cookbook):
    """From a stream of a data set."""
    run = cookbook.recipe(
        "distillation.off_policy_reasoning", "reasoning", **TINY | MODEL,
        batch_size=4, max_prompts=32, buffer_size=32, max_length=128, max_steps=4,
    )  # fmt: skip
    losses = run.steps("train_mean_nll")
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1, losses
