"""The flat net for learning: the values and gradients of the net it replaces, where it does."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from trimtab.engine import flat_layer
from trimtab.engine.adapters import new_adapter
from trimtab.engine.flat_net import FlatNet, flat
from trimtab.engine.models import BaseModel
from trimtab.engine.shared_attention import Segments, SharedCausal
from trimtab.tiny import quiet
from trimtab.types import LoraConfig

from .reference import relative

SEGMENTS = [Segments(9, (5, 5, 0, 8)), Segments(0, (6, 11))]
FEW, MANY = 1, 6  # times the segments: under and over where adapters are added to the weights


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory) -> BaseModel:
    """Biases on queries, keys and values."""
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("qwen2")
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    return BaseModel.load("qwen2", folder, learner_dtype="float32", sampler_dtype="float32")


@pytest.fixture(params=["llama", "qwen3", "qwen2"])
def base(request, base_of, qwen2) -> BaseModel:
    return qwen2 if request.param == "qwen2" else base_of(request.param)


def test_it_is_taken_for_its_structure_alone(base_of, qwen2):
    assert type(flat(qwen2.learner_net)) is FlatNet
    taken = {name for name in ("llama", "qwen3", "gemma2") if flat_of(base_of(name)) is not None}
    assert taken == {"llama", "qwen3"}


def flat_of(base: BaseModel) -> FlatNet | None:
    found = flat(base.learner_net)
    return found if isinstance(found, FlatNet) else None


def adapter_of(base: BaseModel, **flags: bool):
    adapter = new_adapter(base.learner_net, LoraConfig(rank=4, seed=1, **flags), base.device)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        parameter.requires_grad_(True)
    return adapter


def hidden(net, adapter, segments):
    rows = sum(each.rows for each in segments)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 300, (rows,), generator=generator)
    positions = torch.cat(
        [
            torch.arange(start, start + n)
            for each in segments
            for start, n in ((0, each.prefix), *((each.prefix, own) for own in each.own))
        ]
    )
    return net.hidden(tokens, positions, SharedCausal(segments), [(adapter, 0, rows)])


@pytest.mark.parametrize("times", [FEW, MANY])
@pytest.mark.parametrize("flags", [{}, {"train_attn": False}, {"train_mlp": False}], ids=str)
def test_values_and_gradients_are_those_of_autograd(base, flags, times, monkeypatch):
    """Blocks of seven rows; adapters in the weights and beside them; linears without one."""
    monkeypatch.setattr(flat_layer, "BLOCK", 7)
    segments, adapter = SEGMENTS * times, adapter_of(base, train_unembed=False, **flags)
    found = hidden(flat(base.learner_net), adapter, segments)
    expected = hidden(base.learner_net, adapter, segments)
    assert relative(found.detach(), expected.detach()) < 1e-5
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    mine, theirs = (gradient((x * weight).sum(), adapter) for x in (found, expected))
    assert relative(mine, theirs) < 1e-5


def gradient(loss, adapter):
    found = torch.autograd.grad(loss, [*adapter.parameters()])
    return torch.cat([each.flatten() for each in found])


def test_both_ways_to_add_an_adapter_are_tried_above(base_of):
    layer = flat(base_of("llama").learner_net)._layers[0]
    rows = [times * sum(each.rows for each in SEGMENTS) for times in (FEW, MANY)]
    for joint in (layer.qkv, layer.out, layer.gate_up, layer.down):
        assert [joint.merging_pays(n) for n in rows] == [False, True]


def test_without_gradients_it_gives_the_same_and_keeps_nothing(base_of):
    base = base_of("qwen3")
    net, adapter = flat(base.learner_net), adapter_of(base)
    expected = hidden(net, adapter, SEGMENTS)
    with torch.no_grad():
        found = hidden(net, adapter, SEGMENTS)
    assert expected.requires_grad and not found.requires_grad
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
