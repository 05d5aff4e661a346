"""Saved and loaded: bit for bit, or refused with the reason."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimtab.engine import checkpoint
from trimtab.engine.torch_learner import TorchLearner
from trimtab.errors import Invalid, NotFound
from trimtab.types import AdamParams, LoraConfig

from .reference import forward_backward, random_data, train, weights_of, window_of


@pytest.fixture
def saved(learner, tmp_path):
    """Model "m" after three steps and the folder it was saved in."""
    learner.create("m", LoraConfig(rank=4, seed=1))
    train(learner, 3)
    folder = tmp_path / "state"
    size = learner.save_state("m", folder)
    assert size == sum(path.stat().st_size for path in folder.iterdir())
    return learner, folder


def one_step(learner: TorchLearner, model_id: str) -> dict[str, float]:
    forward_backward(learner, random_data(seed=50), model_id=model_id)
    return learner.optim_step(model_id, AdamParams(learning_rate=0.02)).metrics


def test_resumed_with_optimizer_is_uninterrupted_bit_for_bit(saved, llama):
    learner, folder = saved
    other = TorchLearner(llama, micro_batch_tokens=16)
    other.load_state("with", folder, optimizer=True)
    other.load_state("without", folder, optimizer=False)
    assert torch.equal(weights_of(other, "with"), weights_of(learner))
    on, resumed, fresh = one_step(learner, "m"), one_step(other, "with"), one_step(other, "without")
    assert torch.equal(weights_of(other, "with"), weights_of(learner))
    assert resumed == on
    assert not torch.equal(weights_of(other, "without"), weights_of(learner))
    assert fresh["exp_avg_norm"] != on["exp_avg_norm"]
    assert learner.step_count("m") == other.step_count("with") == other.step_count("without") == 4


def test_a_state_saved_before_the_first_step_resumes(learner, tmp_path):
    learner.create("m", LoraConfig(rank=4, seed=1))
    learner.save_state("m", tmp_path / "s")
    learner.load_state("again", tmp_path / "s", optimizer=True)
    assert one_step(learner, "again") == one_step(learner, "m")
    assert torch.equal(weights_of(learner, "again"), weights_of(learner))


def test_saving_keeps_the_window_and_loading_clears_it(saved):
    learner, folder = saved
    forward_backward(learner, random_data())
    kept = window_of(learner)
    learner.save_state("m", folder.parent / "second")
    assert torch.equal(window_of(learner), kept)
    learner.load_state("m", folder, optimizer=True)
    with pytest.raises(Invalid, match="no gradient"):
        learner.optim_step("m", AdamParams())


def test_an_adapter_alone_has_no_optimizer(saved):
    learner, folder = saved
    learner.save_adapter("m", folder.parent / "a")
    assert sorted(p.name for p in (folder.parent / "a").iterdir()) == [
        "adapter.safetensors",
        "state.json",
    ]
    learner.load_state("n", folder.parent / "a", optimizer=False)
    assert torch.equal(weights_of(learner, "n"), weights_of(learner))
    with pytest.raises(Invalid, match="holds no optimizer"):
        learner.load_state("n", folder.parent / "a", optimizer=True)


def resign(folder, name, tensors):
    """Rewrite a tensor file and its description, so that only its contents are wrong."""
    save_file(tensors, folder / name)
    state = json.loads((folder / "state.json").read_text())
    state["files"][name] = checkpoint.describe(folder / name)
    (folder / "state.json").write_text(json.dumps(state))


def edit(folder, **fields):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | fields))


HEAD_B = "base_model.model.lm_head.lora_B.weight"


def cut(folder):
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = folder / "adapter.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def reshape(folder):
    tensors = load_file(folder / "adapter.safetensors")
    resign(folder, "adapter.safetensors", {**tensors, HEAD_B: torch.zeros(5, 4)})


def leave_out(folder):
    tensors = load_file(folder / "adapter.safetensors")
    del tensors[HEAD_B]
    resign(folder, "adapter.safetensors", tensors)


def add(folder):
    tensors = load_file(folder / "adapter.safetensors")
    resign(folder, "adapter.safetensors", {**tensors, "zzz": torch.zeros(1)})


@pytest.mark.parametrize(
    "damage, error, message",
    [
        (cut, Invalid, "optimizer.safetensors is damaged"),
        (flip, Invalid, "adapter.safetensors is damaged"),
        (reshape, Invalid, r"lm_head.lora_B.weight is torch.float32 of shape \(5, 4\)"),
        (leave_out, Invalid, "lacks base_model.model.lm_head.lora_B.weight"),
        (add, Invalid, "holds zzz"),
        (lambda f: (f / "adapter.safetensors").unlink(), Invalid, "has no adapter.safetensors"),
        (lambda f: (f / "state.json").unlink(), NotFound, "has no state.json"),
        (lambda f: (f / "state.json").write_text("{"), Invalid, "not readable JSON"),
        (lambda f: edit(f, format=2), Invalid, "has format 2; this version reads 1"),
        (lambda f: edit(f, base_model="qwen3"), Invalid, "made on base model 'qwen3'"),
        (lambda f: edit(f, lora={"rank": "4"}), Invalid, "lora rank is '4'"),
    ],
)
def test_what_is_not_whole_or_does_not_fit_is_refused_and_changes_nothing(
    saved, damage, error, message
):
    learner, folder = saved
    before = weights_of(learner)
    damage(folder)
    with pytest.raises(error, match=message):
        learner.load_state("m", folder, optimizer=True)
    assert torch.equal(weights_of(learner), before)


def test_a_checkpoint_of_another_rank_goes_into_a_new_model_only(saved):
    learner, folder = saved
    learner.create("wide", LoraConfig(rank=8, seed=1))
    with pytest.raises(Invalid, match="lora rank is 4, this model's is 8"):
        learner.load_state("wide", folder, optimizer=True)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("window", [False, True])
def test_a_snapshot_restores_weights_optimizer_and_window_bit_for_bit(
    learner, llama, tmp_path, steps, window
):
    learner.create("m", LoraConfig(rank=4, seed=1))
    train(learner, steps)
    if window:
        forward_backward(learner, random_data(seed=7), seq_id=41)
    write = learner.snapshot("m")
    expected = one_step(learner, "m")  # the copy does not move with the model
    write(tmp_path / "s")
    other = TorchLearner(llama, micro_batch_tokens=16)
    other.restore("m", tmp_path / "s")
    assert other._models["m"].window.seq_ids == ([41] if window else [])
    assert one_step(other, "m") == expected
    assert torch.equal(weights_of(other, "m"), weights_of(learner, "m"))


def test_a_snapshot_cut_short_is_refused(learner, tmp_path):
    learner.create("m", LoraConfig(rank=4, seed=1))
    forward_backward(learner, random_data())
    learner.snapshot("m")(tmp_path / "s")
    file = tmp_path / "s" / checkpoint.WINDOW
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Invalid, match=r"window\.safetensors is damaged"):
        learner.restore("m", tmp_path / "s")
