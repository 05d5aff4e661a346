"""On-policy distillation: a student goes back to the teacher that it was trained away from."""

import pytest

from .hubdata import conversations
from .kit import SMOLLM2, TINY

pytestmark = pytest.mark.nightly

MODEL = {"model_name": SMOLLM2, "renderer_name": "qwen3_instruct"}


def test_a_student_approaches_its_teacher(cookbook, tmp_path):
    chats = conversations(tmp_path / "chats.jsonl")
    moved = cookbook.recipe(
        "chat_sl.train", "student", **TINY | MODEL | {"learning_rate": 5e-3},
        dataset=chats, batch_size=4, max_steps=6, lr_schedule="constant",
    )  # fmt: skip
    start = moved.checkpoints()[-1]["state_path"]
    run = cookbook.recipe(
        "distillation.on_policy_distillation", "distillation", **TINY | MODEL,
        teacher_model=SMOLLM2, load_checkpoint_path=start,
        groups_per_batch=4, group_size=4, max_tokens=16, max_steps=6,
    )  # fmt: skip
    kl = run.steps("teacher_kl")
    assert kl[0] > 0.1
    assert sum(kl[-2:]) < 0.8 * sum(kl[:2]), kl
    assert run.steps("optim/kl_sample_train_v1") == pytest.approx([0.0] * 6, abs=1e-3)
