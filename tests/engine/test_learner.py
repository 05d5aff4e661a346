"""What a window adds up to, what a step does with it, and what neither does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from trimtab.engine import torch_learner
from trimtab.engine.attention import PackedCausal
from trimtab.engine.torch_learner import TorchLearner
from trimtab.errors import Invalid, NotFound, Stopping
from trimtab.losses.base import Loss
from trimtab.types import AdamParams, LoraConfig, Stability, TrainingDatum

from .reference import (
    forward_backward,
    random_data,
    relative,
    train,
    weights_of,
    window_of,
)


@pytest.fixture
def trained(learner: TorchLearner) -> TorchLearner:
    """Model "m" after two steps, so that gradients reach A as well as B."""
    learner.create("m", LoraConfig(rank=4, seed=1))
    train(learner, 2)
    return learner


def gradient(learner: TorchLearner, *requests: list[TrainingDatum]) -> torch.Tensor:
    learner.clear_window("m")
    for i, data in enumerate(requests):
        forward_backward(learner, data, seq_id=i)
    return window_of(learner)


# --------------------------------------------------------------------------- adding up


def test_whole_chunked_and_datum_by_datum_give_one_gradient(trained, llama, tmp_path):
    data = random_data((3, 7, 11, 2, 11, 5, 16, 1), seed=4)
    whole = gradient(trained, data)
    assert relative(gradient(trained, data[:3], data[3:]), whole) < 1e-5
    assert relative(gradient(trained, *[[datum] for datum in data]), whole) < 1e-5
    trained.save_adapter("m", tmp_path / "a")
    roomy = TorchLearner(llama, micro_batch_tokens=10_000)
    roomy.load_state("m", tmp_path / "a", optimizer=False)
    assert relative(gradient(roomy, data), whole) < 1e-5


def test_two_calls_and_a_weightless_one_between_equal_one_call(trained):
    [d3, d7] = random_data((3, 7))
    zero = TrainingDatum(d7.tokens, {**d7.inputs, "weights": np.zeros(7, np.float32)})
    one = gradient(trained, [d3, d7])
    assert relative(gradient(trained, [d3], [zero], [d7]), one) < 1e-6
    losses = [forward_backward(trained, [d], forward_only=True) for d in (d3, d7)]
    both = forward_backward(trained, [d3, d7], forward_only=True)
    total = sum(result.metrics["loss:sum"] for result in losses)
    assert both.metrics["loss:sum"] == pytest.approx(total, rel=1e-6)


def test_logprobs_do_not_depend_on_what_is_packed_with_a_datum(trained):
    data = random_data((2, 5, 9))
    together = forward_backward(trained, data, forward_only=True).logprobs
    for datum, logprobs in zip(data, together, strict=True):
        [alone] = forward_backward(trained, [datum], forward_only=True).logprobs
        assert logprobs.shape == (len(datum.tokens),)
        np.testing.assert_allclose(logprobs, alone, atol=1e-5)


def test_a_row_sees_nothing_after_it_or_of_its_neighbours(trained):
    [a, b] = random_data((6, 6))
    changed = TrainingDatum(np.r_[b.tokens[:3], b.tokens[3:][::-1]].astype(np.int32), b.inputs)
    found = forward_backward(trained, [a, b], forward_only=True).logprobs
    other = forward_backward(trained, [a, changed], forward_only=True).logprobs
    np.testing.assert_array_equal(found[0], other[0])
    np.testing.assert_array_equal(found[1][:3], other[1][:3])
    assert np.abs(found[1][3:] - other[1][3:]).max() > 1e-3


def test_forward_only_leaves_the_window_empty(trained):
    forward_backward(trained, random_data(), forward_only=True)
    with pytest.raises(Invalid, match="no gradient since the last step"):
        trained.optim_step("m", AdamParams())


def test_two_runs_are_bit_equal(llama):
    runs = []
    for _ in range(2):
        learner = TorchLearner(llama, micro_batch_tokens=16)
        learner.create("m", LoraConfig(rank=4, seed=1))
        train(learner, 3)
        runs.append(weights_of(learner))
    assert torch.equal(*runs)


def test_models_do_not_share_weights_or_windows(trained):
    trained.create("other", LoraConfig(rank=4, seed=1))
    before = weights_of(trained, "other")
    forward_backward(trained, random_data())
    trained.optim_step("m", AdamParams())
    assert torch.equal(weights_of(trained, "other"), before)
    assert trained.step_count("m") == 3
    assert trained.step_count("other") == 0
    trained.unload("m")
    trained.unload("m")
    with pytest.raises(NotFound, match="'m'"):
        trained.step_count("m")


# --------------------------------------------------------------------------- the step


def test_steps_are_torch_adamw_with_clipping(trained):
    model = trained._models["m"]
    mine = [p.detach().clone().requires_grad_() for p in model.parameters]
    theirs = torch.optim.AdamW(mine, lr=1.0)
    state = model.optimizer.state_dict()
    theirs.load_state_dict(
        {
            **state,
            "state": {k: {n: t.clone() for n, t in v.items()} for k, v in state["state"].items()},
        }
    )
    for i, clip in enumerate((0.0, 0.5, 1e6)):
        params = AdamParams(
            learning_rate=0.01 / (i + 1),
            beta1=0.8,
            beta2=0.9,
            eps=1e-8,
            weight_decay=0.1,
            grad_clip_norm=clip,
        )
        forward_backward(trained, random_data(seed=20 + i))
        for p, g in zip(mine, model.window.gradients, strict=True):
            p.grad = g.clone()
        norm = torch.nn.utils.get_total_norm([p.grad for p in mine])
        if clip:
            torch.nn.utils.clip_grad_norm_(mine, clip)
        theirs.param_groups[0].update(
            lr=params.learning_rate, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1
        )
        before = torch.cat([p.detach().flatten() for p in mine])
        theirs.step()
        after = torch.cat([p.detach().flatten() for p in mine])
        metrics = trained.optim_step("m", params).metrics
        assert torch.equal(weights_of(trained), after)
        assert metrics["grad_norm"] == pytest.approx(float(norm))
        assert metrics["update_norm"] == pytest.approx(float((after - before).norm()), rel=1e-5)
        assert metrics["learning_rate"] == params.learning_rate


def test_defaults_of_the_step_are_those_of_the_service(trained):
    forward_backward(trained, random_data())
    trained.optim_step("m", AdamParams())
    [group] = trained._models["m"].optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (1e-4, (0.9, 0.95), 1e-12)
    assert group["weight_decay"] == 0.0


def test_zero_advantages_move_nothing_but_the_counter(learner):
    learner.create("m", LoraConfig(rank=4, seed=1))
    before = weights_of(learner)
    data = [
        TrainingDatum(d.tokens, {**d.inputs, "weights": np.zeros(len(d.tokens), np.float32)})
        for d in random_data()
    ]
    assert forward_backward(learner, data).metrics["loss:sum"] == 0.0
    assert not window_of(learner).any()
    assert learner.optim_step("m", AdamParams()).metrics["update_norm"] == 0.0
    assert torch.equal(weights_of(learner), before)
    assert learner.step_count("m") == 1


def test_no_metric_of_a_step_takes_the_name_under_which_loops_log_their_own(trained):
    """Loops merge these into their row of a step, whose number is its "step"."""
    before = trained.step_count("m")
    forward_backward(trained, random_data())
    metrics = trained.optim_step("m", AdamParams()).metrics
    assert "step" not in metrics
    assert metrics["optimizer_step"] == before + 1


def broken_datum(n: int = 5) -> TrainingDatum:
    """Its gradient overflows float32: a ratio near e^20 times 1e38."""
    inputs = {
        "target_tokens": np.arange(n),
        "logprobs": np.full(n, -25, np.float32),
        "advantages": np.full(n, 1e38, np.float32),
    }
    return TrainingDatum(np.arange(n, dtype=np.int32), inputs)


def sound_datum(n: int = 5) -> TrainingDatum:
    broken = broken_datum(n)
    ones = {"logprobs": np.full(n, -5, np.float32), "advantages": np.ones(n, np.float32)}
    return TrainingDatum(broken.tokens, {**broken.inputs, **ones})


def test_a_gradient_that_is_not_finite_is_refused_with_the_datums_named(trained):
    weights, moments = weights_of(trained), trained._models["m"].moments()
    moments = {n: {k: v.clone() for k, v in each.items()} for n, each in moments.items()}
    good, bad = sound_datum(), broken_datum()
    forward_backward(trained, [good, good], seq_id=7, loss_fn="importance_sampling")
    forward_backward(trained, [good, good, bad, good], seq_id=8, loss_fn="importance_sampling")
    with pytest.raises(Invalid, match=r"\(seq_id 8 datum 2\)"):
        trained.optim_step("m", AdamParams())
    assert torch.equal(weights_of(trained), weights)
    for name, each in trained._models["m"].moments().items():
        assert all(torch.equal(value, moments[name][part]) for part, value in each.items())
    with pytest.raises(Invalid, match="no gradient"):
        trained.optim_step("m", AdamParams())
    forward_backward(trained, [good], loss_fn="importance_sampling")
    trained.optim_step("m", AdamParams())
    assert trained.step_count("m") == 3


def test_a_step_to_weights_that_are_not_finite_changes_nothing(trained):
    before = trained._models["m"].moments()["base_model.model.lm_head.lora_B.weight"]
    before = {part: value.clone() for part, value in before.items()}
    forward_backward(trained, random_data())
    with torch.no_grad():
        trained._models["m"].parameters[0].fill_(1e38)
    weights = weights_of(trained)
    with pytest.raises(Invalid, match="would make the weights not finite"):
        trained.optim_step("m", AdamParams(learning_rate=1.0, weight_decay=1e5))
    assert torch.equal(weights_of(trained), weights)
    after = trained._models["m"].moments()["base_model.model.lm_head.lora_B.weight"]
    assert all(torch.equal(before[part], after[part]) for part in before)
    assert trained.step_count("m") == 2


@pytest.mark.parametrize(
    "field, value",
    [
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("learning_rate", 1e38),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", math.inf),
        ("weight_decay", -1.0),
        ("grad_clip_norm", math.nan),
    ],
)
def test_a_number_that_adamw_cannot_use_is_refused_and_the_window_kept(trained, field, value):
    forward_backward(trained, random_data())
    with pytest.raises(Invalid, match=field):
        trained.optim_step("m", AdamParams(**{field: value}))
    trained.optim_step("m", AdamParams())


# --------------------------------------------------------------------------- refusals


def test_stop_between_micro_batches_leaves_the_window_as_it_was(trained, monkeypatch):
    kept = gradient(trained, random_data(seed=3)).clone()
    loss = torch_learner.LOSSES["cross_entropy"]
    seen = []

    def stopping(inputs, config):
        seen.append(len(inputs.target_logprobs))
        trained.stop()
        return loss.fn(inputs, config)

    monkeypatch.setitem(torch_learner.LOSSES, "cross_entropy", Loss(loss.spec, stopping))
    with pytest.raises(Stopping):
        forward_backward(trained, random_data((16, 16, 16)))
    assert seen == [16]
    assert torch.equal(window_of(trained), kept)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: TrainingDatum(d.tokens + 300, d.inputs), r"data\[1\]: model_input holds ids"),
        (
            lambda d: TrainingDatum(d.tokens, {**d.inputs, "target_tokens": d.tokens - 300}),
            r"data\[1\]: target_tokens holds ids",
        ),
        (
            lambda d: TrainingDatum(d.tokens[1:], d.inputs),
            r"data\[1\]: target_tokens is of shape \(7,\)",
        ),
        (
            lambda d: TrainingDatum(np.zeros(65, np.int32), d.inputs),
            r"data\[1\]: model_input has 65 tokens; allowed are 1 to 64",
        ),
    ],
)
def test_data_the_model_cannot_take_is_refused_by_index(trained, change, message):
    kept = gradient(trained, random_data(seed=3)).clone()
    [d3, d7] = random_data((3, 7))
    with pytest.raises(Invalid, match=message):
        forward_backward(trained, [d3, change(d7)])
    assert torch.equal(window_of(trained), kept)


def test_empty_data_and_unknown_losses_are_refused(trained):
    with pytest.raises(Invalid, match="data is empty"):
        forward_backward(trained, [])
    batch = torch_learner.TrainingBatch(1, tuple(random_data()), "nonsense", {})
    with pytest.raises(Invalid, match="loss_fn is 'nonsense'; allowed are cross_entropy"):
        trained.forward_backward("m", batch)


# --------------------------------------------------------------------------- records


def on_policy(learner: TorchLearner, lengths, temperature: float, k: int = 8):
    """stable_reinforce datums with the record an exact sampler at `temperature` would have made."""
    rng = np.random.default_rng(0)
    net, adapter = learner._net, learner._models["m"].adapter
    data = []
    for n in lengths:
        tokens, targets = rng.integers(0, 300, (2, n))
        rows = torch.tensor(tokens)
        plan = [(adapter, 0, n)]
        attention = PackedCausal([n])
        with torch.no_grad():
            hidden = net.hidden(rows, torch.arange(n), attention, plan)
        q_NV = (net.head.logits(hidden, plan) / temperature).log_softmax(-1)
        head = q_NV.topk(k)
        logq = q_NV.gather(1, torch.tensor(targets)[:, None])[:, 0].numpy()
        record = Stability(
            sequence_N=np.zeros(n, np.int32),
            recorded_N=np.ones(n, bool),
            logprobs_N=logq,
            head_ids_NK=head.indices.int().numpy(),
            head_logprobs_NK=head.values.numpy(),
            temperature_N=np.full(n, temperature, np.float32),
            version_step_N=np.full(n, 2, np.float32),
        )
        inputs = {
            "target_tokens": targets,
            "logprobs": logq,
            "advantages": rng.choice([-1.0, 1.0], n).astype(np.float32),
        }
        data.append(TrainingDatum(tokens.astype(np.int32), inputs, record))
    return data


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_stable_reinforce_on_policy_is_reinforce(trained, temperature):
    data = on_policy(trained, (4, 9, 6), temperature)
    trained.clear_window("m")
    result = forward_backward(trained, data, loss_fn="stable_reinforce", kl_coeff=0.0)
    found = window_of(trained)
    weighted = [
        TrainingDatum(
            d.tokens,
            {"target_tokens": d.inputs["target_tokens"], "weights": d.inputs["advantages"]},
        )
        for d in data
    ]
    expected = gradient(trained, weighted)
    assert relative(found, expected) < 1e-4
    plain = forward_backward(trained, weighted, forward_only=True)
    assert result.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    for mine, theirs in zip(result.logprobs, plain.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)  # untempered, whatever the record


def test_a_request_may_mix_datums_with_and_without_a_record(trained):
    [a, b] = on_policy(trained, (4, 9), 0.7)
    wide = random_data((5,), alternatives=20)
    found = trained._logprobs(
        trained._models["m"].adapter, torch_learner.MicroBatch.of(0, (a, wide[0], b))
    )
    assert [tuple(x.shape) for _, x, _ in found] == [(4, 9), (5, 20), (9, 9)]
    [(_, alone, _)] = trained._logprobs(
        trained._models["m"].adapter, torch_learner.MicroBatch.of(0, (b,))
    )
    torch.testing.assert_close(found[2][1], alone, atol=1e-5, rtol=0)


def off_policy(learner: TorchLearner, lengths, loss_fn: str):
    """Datums of every kind of input, recorded before the learner moved on; the first rows of each
    are a prompt, and the longer ones hold two sequences."""
    data = on_policy(learner, lengths, 1.0)
    train(learner, 1, seed=5)
    rng = np.random.default_rng(1)
    spec = learner.losses[loss_fn]
    made = []
    for datum in data:
        n = len(datum.tokens)
        sampled = np.arange(n) >= 2
        inputs = {
            **datum.inputs,
            "advantages": datum.inputs["advantages"] * sampled,
            "sequence_ratio_mask": sampled.astype(np.float32),
            "weights": rng.random(n, dtype=np.float32),
        }
        record = datum.stability
        number = np.where(sampled, (np.arange(n) >= 5).astype(np.int32), -1)
        record = replace(record, sequence_N=number, recorded_N=sampled)
        inputs = {name: inputs[name] for name in spec.inputs}
        made.append(TrainingDatum(datum.tokens, inputs, record if spec.needs_stability else None))
    return made


@pytest.mark.parametrize("loss_fn", sorted(torch_learner.LOSSES))
def test_datums_taken_together_are_the_sum_of_each_alone(trained, loss_fn):
    data = off_policy(trained, (4, 9, 6, 3), loss_fn)
    trained.clear_window("m")
    together = forward_backward(trained, data, loss_fn=loss_fn)
    whole = window_of(trained)
    trained.clear_window("m")
    alone = [forward_backward(trained, [d], loss_fn=loss_fn) for d in data]
    assert relative(window_of(trained), whole) < 1e-5
    assert whole.abs().sum() > 0
    for name, value in together.metrics.items():
        parts = [result.metrics[name] for result in alone]
        joined = {"sum": sum, "max": max, "min": min}[name.split(":")[1]](parts)
        assert value == pytest.approx(joined, rel=2e-4, abs=1e-4), name
