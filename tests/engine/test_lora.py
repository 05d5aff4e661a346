"""Which modules get adapters, how they begin, and that every row gets its own."""

from __future__ import annotations

import pytest
import torch

from trimtab.engine.adapters import check_lora, new_adapter
from trimtab.engine.attention import PackedCausal
from trimtab.engine.lora import Adapter
from trimtab.errors import Invalid
from trimtab.types import LoraConfig

CPU = torch.device("cpu")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    "flags, leaves",
    [
        ({}, ATTENTION | MLP | {"lm_head"}),
        ({"train_mlp": False, "train_unembed": False}, ATTENTION),
        ({"train_attn": False, "train_unembed": False}, MLP),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_flags_choose_the_modules_and_leave_their_draws_alone(base, flags, leaves):
    net = base.learner_net
    full = new_adapter(net, LoraConfig(rank=4, seed=1), CPU)
    part = new_adapter(net, LoraConfig(rank=4, seed=1, **flags), CPU)
    assert {name.split(".")[-1] for name in part.pairs} == leaves
    for name, (A, B) in part.pairs.items():
        assert torch.equal(A, full.pairs[name][0])
        assert not B.any()
        assert A.abs().max() <= A.shape[1] ** -0.5 < A.abs().max() * 1.2
    other = new_adapter(net, LoraConfig(rank=4, seed=2, **flags), CPU)
    assert all(not torch.equal(other.pairs[n][0], part.pairs[n][0]) for n in part.pairs)


def test_scale_is_alpha_over_rank():
    assert Adapter(LoraConfig(rank=8), {}).scale == 4.0


@pytest.mark.parametrize(
    "config, message",
    [
        (LoraConfig(rank=0), "rank is 0; allowed are 1 to 128"),
        (LoraConfig(rank=10**6), "rank is 1000000; allowed are 1 to 128"),
        (
            LoraConfig(train_attn=False, train_mlp=False, train_unembed=False),
            "at least one must be true",
        ),
    ],
)
def test_configurations_that_cannot_be_honoured_are_refused(llama, config, message):
    with pytest.raises(Invalid, match=message):
        check_lora(llama.learner_net, config, 128)


def test_a_flag_that_finds_no_module_is_refused(llama, monkeypatch):
    net = llama.learner_net
    monkeypatch.setattr(net, "linears", {n: m for n, m in net.linears.items() if "mlp" not in n})
    with pytest.raises(Invalid, match="train_mlp is true, but this model has no module for it"):
        check_lora(net, LoraConfig(), 128)
    check_lora(net, LoraConfig(train_mlp=False), 128)


def random_adapter(net, rank, seed):
    fresh = new_adapter(net, LoraConfig(rank=rank, seed=seed), CPU)
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        name: (A, torch.empty(B.shape).normal_(std=0.1, generator=generator))
        for name, (A, B) in fresh.pairs.items()
    }
    return Adapter(fresh.config, pairs)


def test_rows_of_several_adapters_in_one_pass_are_as_if_alone(base):
    net = base.sampler_net
    lengths = [4, 3, 5, 2]
    adapters = [random_adapter(net, 4, 1), None, random_adapter(net, 8, 2), None]
    tokens = torch.arange(14) * 7
    positions = torch.cat([torch.arange(n) for n in lengths])

    def logits(rows, plan_lengths, plan):
        attention = PackedCausal(plan_lengths)
        hidden = net.hidden(tokens[rows], positions[rows], attention, plan)
        return net.head.logits(hidden, plan)

    starts = [0, 4, 7, 12]
    plan = [(a, i, i + n) for a, i, n in zip(adapters, starts, lengths, strict=True)]
    with torch.no_grad():
        together = logits(slice(0, 14), lengths, plan[:3])  # the last rows are in no entry
        for adapter, i, j in plan:
            alone = logits(slice(i, j), [j - i], [(adapter, 0, j - i)])
            torch.testing.assert_close(together[i:j], alone, atol=1e-4, rtol=0)
            assert adapter is None or (alone - logits(slice(i, j), [j - i], [])).abs().max() > 0.1
