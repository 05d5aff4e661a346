"""The flat net and its packed weights give the numbers of the net they stand for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trimtab.engine.attention import PackedCausal
from trimtab.engine.fast_net import FastNet, agrees, faster
from trimtab.engine.models import BaseModel
from trimtab.engine.net import Net
from trimtab.engine.packed import PackedLinear, can_pack, operators_work

from .sampling import random_adapter

LENGTHS = (12, 5, 9)


def outputs(net, adapters):
    """Logits of ragged random sequences."""
    tokens = torch.randint(300, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    with torch.inference_mode():
        hidden = net.hidden(tokens, positions, PackedCausal(LENGTHS), adapters)
        return net.head.logits(hidden, adapters)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("packed_bytes", [0, 2**30])
def test_numbers_are_the_nets_with_and_without_adapters(base_of, architecture, packed_bytes):
    base = base_of(architecture)
    net = faster(base.sampler_net, packed_bytes=packed_bytes)
    assert isinstance(net, FastNet)
    assert isinstance(net.head.base, PackedLinear) == (packed_bytes > 0 and operators_work())
    one, other = (random_adapter(base, seed) for seed in (1, 2))
    for adapters in ([], [(one, 0, 26)], [(None, 0, 4), (one, 4, 12), (other, 17, 26)]):
        expected = outputs(base.sampler_net, adapters)
        assert (outputs(net, adapters) - expected).abs().max() < 1e-4


def test_another_structure_or_other_numbers_keep_the_net_they_have(base_of, llama, monkeypatch):
    for architecture in ("gemma2", "gemma3"):
        net = base_of(architecture).sampler_net
        assert faster(net) is net
    fast = faster(llama.sampler_net)
    assert isinstance(llama.sampler_net, Net) and agrees(fast, llama.sampler_net)
    fast.layers[1] = fast.layers[0]
    assert not agrees(fast, llama.sampler_net)


def test_quantised_linears_are_used_as_they_are(folder_of):
    base = BaseModel.load("q", folder_of("qwen3"), sampler_dtype="int8")
    net = faster(base.sampler_net, packed_bytes=2**30)
    assert isinstance(net, FastNet) and net.head.base is base.sampler_net.head.base
    assert (outputs(net, []) - outputs(base.sampler_net, [])).abs().max() < 1e-3


def test_packed_linears_stand_side_by_side():
    if not operators_work():
        pytest.skip("this torch has no oneDNN operators")
    first, second = nn.Linear(40, 24), nn.Linear(40, 8)
    packed = PackedLinear.of(first, second)
    for shape in ((40,), (1, 40), (3, 7, 40), (200, 40)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        expected = torch.cat([first(x), second(x)], -1)
        torch.testing.assert_close(packed(x), expected, atol=1e-5, rtol=1e-5)
    plain = nn.Linear(40, 8, bias=False)
    x = torch.ones(2, 40)
    torch.testing.assert_close(PackedLinear.of(plain)(x), F.linear(x, plain.weight))
    assert can_pack(plain) and not can_pack(plain.double()) and not can_pack(nn.Identity())
