"""The learner when memory runs out, and when a neighbour's request is poison: what is too large is
split or fails alone, and nobody else's weights change by a bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimtab.engine import memory as memory_module
from trimtab.engine import torch_learner
from trimtab.engine.cores import Cores
from trimtab.engine.memory import Memory
from trimtab.engine.torch_learner import TorchLearner
from trimtab.errors import Invalid, ServerError, TooLarge
from trimtab.losses import LOSSES
from trimtab.losses.base import Loss
from trimtab.types import AdamParams, LoraConfig, TrainingDatum

from .reference import forward_backward, random_data, relative, weights_of, window_of

OUT_OF_MEMORY = (
    MemoryError(),
    torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
)


def raising(error, when):
    """`Net.hidden` of the learner, but for passes of which `when(tokens, adapter)` is true."""

    def patch(monkeypatch, learner):
        hidden, passes = learner._net.hidden, []

        def patched(tokens_M, positions_M, attention, plan):
            passes.append(len(tokens_M))
            if when(tokens_M, plan[0][0]):
                raise error
            return hidden(tokens_M, positions_M, attention, plan)

        monkeypatch.setattr(learner._net, "hidden", patched)
        return passes

    return patch


@pytest.fixture
def roomy(llama):
    """A learner that takes the standard data in one micro-batch; model "m" is one step old."""
    learner = TorchLearner(llama, micro_batch_tokens=1000)
    learner.create("m", LoraConfig(rank=4, seed=1))
    forward_backward(learner, random_data())
    learner.optim_step("m", AdamParams(learning_rate=0.02))
    return learner


# ------------------------------------------------------------------ splitting


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: type(e).__name__)
def test_an_allocation_that_fails_splits_the_micro_batch(roomy, monkeypatch, error):
    """34 rows in five datums; no more than 13 fit."""
    whole, gradient = forward_backward(roomy, random_data()), window_of(roomy)
    roomy.clear_window("m")
    passes = raising(error, lambda tokens, _: len(tokens) > 13)(monkeypatch, roomy)
    parts = forward_backward(roomy, random_data())
    assert passes == [34, 10, 24, 11, 13]
    assert relative(window_of(roomy), gradient) < 1e-5
    assert [len(x) for x in parts.logprobs] == [3, 7, 11, 2, 11]
    for left, right in zip(parts.logprobs, whole.logprobs, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-5)


def test_it_may_fail_in_the_backward_pass_too(roomy, monkeypatch):
    """What the forward pass had gathered by then is not counted twice."""
    whole, gradient = forward_backward(roomy, random_data()), window_of(roomy)
    roomy.clear_window("m")
    gradients_of, calls = torch_learner.gradients_of, []

    def patched(loss, parameters):
        calls.append(1)
        if len(calls) == 1:
            raise OUT_OF_MEMORY[-1]
        return gradients_of(loss, parameters)

    monkeypatch.setattr(torch_learner, "gradients_of", patched)
    parts = forward_backward(roomy, random_data())
    assert len(calls) == 3 and len(parts.logprobs) == len(whole.logprobs)
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-5)
    assert relative(window_of(roomy), gradient) < 1e-5


def test_a_pass_asks_before_it_runs(roomy, monkeypatch):
    """Nothing is allocated that was not asked for: with room for half of the rows, two passes."""
    model, data = roomy._model("m"), random_data((8, 8, 8, 8))
    [half] = torch_learner.micro_batches(data[:2], 1000)
    need = roomy._need(model, half, True)
    monkeypatch.setattr(memory_module, "resident_bytes", lambda: 0)
    roomy._memory = Memory(need + 1)
    passes = raising(None, lambda *_: False)(monkeypatch, roomy)
    forward_backward(roomy, data)
    assert passes == [16, 16]


def test_a_datum_too_large_fails_its_request_and_names_the_limit(roomy, monkeypatch):
    before = weights_of(roomy).clone()
    forward_backward(roomy, random_data((3,)), seq_id=1)
    window = window_of(roomy).clone()
    monkeypatch.setattr(memory_module, "resident_bytes", lambda: 0)
    monkeypatch.setattr(roomy, "_memory", Memory(64))
    with pytest.raises(ServerError, match=r"data\[0\]: memory does not suffice for its 3 tokens"):
        forward_backward(roomy, random_data(), seq_id=2)
    monkeypatch.setattr(roomy, "_room", 0)
    with pytest.raises(TooLarge, match="of the 0 MiB that memory_mib allows") as caught:
        forward_backward(roomy, random_data(), seq_id=3)
    assert caught.value.category == "user"
    monkeypatch.setattr(roomy, "_memory", Memory())
    assert torch.equal(window_of(roomy), window)
    assert roomy.optim_step("m", AdamParams()).metrics["optimizer_step"] == 2
    assert not torch.equal(weights_of(roomy), before)


@pytest.mark.parametrize("call", ["create", "optim_step"])
def test_calls_that_cannot_be_split_fail_alone(roomy, monkeypatch, call):
    forward_backward(roomy, random_data())
    before = weights_of(roomy).clone()
    monkeypatch.setattr(memory_module, "resident_bytes", lambda: 0)
    monkeypatch.setattr(roomy, "_memory", Memory(64))
    with pytest.raises(ServerError, match=r"memory does not suffice .*memory_mib"):
        if call == "create":
            roomy.create("other", LoraConfig(rank=4, seed=1))
        else:
            roomy.optim_step("m", AdamParams())
    assert "other" not in roomy._models and torch.equal(weights_of(roomy), before)


def test_a_step_that_runs_out_half_way_changes_nothing(roomy, monkeypatch):
    before = weights_of(roomy).clone()
    moments = {
        k: {p: t.clone() for p, t in v.items()} for k, v in roomy._model("m").moments().items()
    }
    forward_backward(roomy, random_data())
    step = torch.optim.AdamW.step

    def half(self, *arguments):
        step(self, *arguments)
        raise MemoryError

    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    with pytest.raises(ServerError, match="optim_step: memory does not suffice"):
        roomy.optim_step("m", AdamParams(learning_rate=0.1))
    assert torch.equal(weights_of(roomy), before)
    for name, parts in roomy._model("m").moments().items():
        assert all(torch.equal(parts[part], moments[name][part]) for part in parts)


# ------------------------------------------------------------------ two tenants


def rl(advantage: float, logprob: float = -1.0) -> list[TrainingDatum]:
    [datum] = random_data((6,))
    inputs = {
        "target_tokens": datum.inputs["target_tokens"],
        "logprobs": np.full(6, logprob, np.float32),
        "advantages": np.full(6, advantage, np.float32),
    }
    return [TrainingDatum(datum.tokens, inputs)]


def step_of(learner: TorchLearner, **params: float) -> None:
    learner.optim_step("theirs", AdamParams(**params))


def nan(learner: TorchLearner) -> None:
    forward_backward(learner, rl(np.nan), model_id="theirs", loss_fn="importance_sampling")
    with pytest.raises(Invalid, match="gradient is not finite"):
        step_of(learner)


def overflow(learner: TorchLearner) -> None:
    forward_backward(learner, rl(3e38), model_id="theirs", loss_fn="importance_sampling")
    with pytest.raises(Invalid, match="not finite"):
        step_of(learner)
    forward_backward(learner, rl(1e10), model_id="theirs", loss_fn="importance_sampling")
    step_of(learner, learning_rate=1e5)


def exception(learner: TorchLearner) -> None:
    with pytest.raises(ZeroDivisionError):
        forward_backward(learner, rl(1.0), model_id="theirs", loss_fn="dro")


def out_of_memory(learner: TorchLearner) -> None:
    adapter = learner._model("theirs").adapter
    with pytest.MonkeyPatch.context() as patch:
        raising(OUT_OF_MEMORY[-1], lambda _, running: running is adapter)(patch, learner)
        with pytest.raises(ServerError, match="memory does not suffice"):
            forward_backward(learner, random_data(), model_id="theirs")


def nothing(learner: TorchLearner) -> None:
    pass


def mine_beside(llama, poison) -> torch.Tensor:
    """My weights and moments after three steps, with `poison` between any two of my calls."""
    dro = LOSSES["dro"]
    broken = {**LOSSES, "dro": Loss(dro.spec, lambda inputs, config: 1 / 0)}
    learner = TorchLearner(llama, micro_batch_tokens=16, cores=Cores(1), losses=broken)
    learner.create("mine", LoraConfig(rank=4, seed=1))
    learner.create("theirs", LoraConfig(rank=4, seed=2))
    for i in range(3):
        poison(learner)
        forward_backward(learner, random_data(seed=i), model_id="mine", seq_id=2 * i)
        poison(learner)
        learner.optim_step("mine", AdamParams(learning_rate=0.02))
    moments = learner._model("mine").moments()
    state = [t.flatten().double() for parts in moments.values() for t in parts.values()]
    return torch.cat([weights_of(learner, "mine").double(), *state])


@pytest.mark.parametrize("poison", [nan, overflow, exception, out_of_memory])
def test_a_tenants_poison_leaves_anothers_weights_as_they_would_have_been(llama, poison):
    assert torch.equal(mine_beside(llama, poison), mine_beside(llama, nothing))


def test_a_poisoned_tenant_goes_on_too(llama):
    learner = TorchLearner(llama, cores=Cores(1))
    learner.create("theirs", LoraConfig(rank=4, seed=2))
    nan(learner)
    out_of_memory(learner)
    forward_backward(learner, random_data(), model_id="theirs")
    step_of(learner, learning_rate=0.01)
    assert torch.isfinite(weights_of(learner, "theirs")).all()
