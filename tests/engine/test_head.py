"""The chunked head against a dense log-softmax and its autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.engine.head import Head
from trimtab.engine.lora import Adapter
from trimtab.types import LoraConfig

N, K, V, D, RANK = 9, 3, 23, 5, 2


def make(scale, softcap, dtype=torch.float64, **budget):
    torch.manual_seed(0)
    linear = nn.Linear(D, V, bias=True, dtype=dtype)
    head = Head("lm_head", linear.requires_grad_(False), (D, V), scale, softcap, **budget)
    A = torch.randn(RANK, D, dtype=dtype, requires_grad=True)
    B = torch.randn(V, RANK, dtype=dtype, requires_grad=True)
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, V, (N, K))
    ids[0] = ids[0, 0]  # the same id thrice
    return head, Adapter(LoraConfig(rank=RANK), {"lm_head": (A, B)}), hidden, ids


def dense(head, adapter, hidden, temperature=1.0):
    A, B = adapter.pairs["lm_head"]
    z = head.base(hidden) + adapter.scale * (hidden @ A.T) @ B.T
    z = z * head.scale
    if head.softcap:
        z = head.softcap * torch.tanh(z / head.softcap)
    return (z / temperature).log_softmax(-1)


# One row a chunk; two rows a chunk of which one chunk is kept; everything kept.
BUDGETS = [(1, 0), (2 * V * 4, 2 * V * 8), (2**20, 2**20)]


@pytest.mark.parametrize("chunk_bytes, kept_bytes", BUDGETS)
@pytest.mark.parametrize("scale, softcap", [(1.0, None), (0.25, None), (1.0, 3.0), (0.5, 2.0)])
def test_values_and_gradients_equal_the_dense_ones(scale, softcap, chunk_bytes, kept_bytes):
    head, adapter, hidden, ids = make(
        scale, softcap, chunk_bytes=chunk_bytes, kept_bytes=kept_bytes
    )
    weight = torch.randn(N, K, dtype=torch.float64)
    weight[4:7] = 0  # rows without a gradient
    found, _ = head.selected_logprobs(hidden, ids, [(adapter, 0, N)])
    expected = dense(head, adapter, hidden).gather(1, ids)
    torch.testing.assert_close(found, expected)
    inputs = [hidden, *adapter.parameters()]
    mine = torch.autograd.grad((found * weight).sum(), inputs, retain_graph=True)
    again = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for m, a, t in zip(mine, again, theirs, strict=True):
        torch.testing.assert_close(m, t)
        torch.testing.assert_close(a, t)
    assert not mine[0][4:7].any()


@pytest.mark.parametrize("chunk_bytes, kept_bytes", BUDGETS)
def test_a_row_that_several_ask_about_gets_the_sum_of_their_gradients(chunk_bytes, kept_bytes):
    head, adapter, hidden, ids = make(0.5, 3.0, chunk_bytes=chunk_bytes, kept_bytes=kept_bytes)
    rows = torch.tensor([3, 0, 3, 8, 0, 3, 5, 1, 4])
    temperature = torch.tensor([0.7, 1.0, 2.0, 0.7, 0.7, 1.0, 1.0, 3.0, 1.0])
    weight = torch.randn(N, K, dtype=torch.float64)
    weight[[2, 6]] = 0
    plan = [(adapter, 0, N)]
    found, tempered = head.selected_logprobs(hidden, ids, plan, temperature, rows)
    expected = dense(head, adapter, hidden)[rows].gather(1, ids)
    torch.testing.assert_close(found, expected)
    hot = dense(head, adapter, hidden[rows], temperature.double()[:, None]).gather(1, ids)
    torch.testing.assert_close(tempered, hot)
    inputs = [hidden, *adapter.parameters()]
    mine, theirs = (torch.autograd.grad((x * weight).sum(), inputs) for x in (found, expected))
    for m, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(m, t)


def test_tempered_values_are_those_of_scaled_logits_and_carry_no_gradient():
    head, adapter, hidden, ids = make(1.0, None, chunk_bytes=2 * V * 4)
    temperature = torch.tensor([1.0, 0.7, 2.0, 1.0, 1e-12, 1.0, 1.0, 0.7, 3.0])
    plan = [(adapter, 0, N)]
    plain, tempered = head.selected_logprobs(hidden, ids, plan, temperature)
    expected = dense(head, adapter, hidden, temperature.double()[:, None]).gather(1, ids)
    torch.testing.assert_close(tempered, expected)
    torch.testing.assert_close(plain, dense(head, adapter, hidden).gather(1, ids))
    assert plain.requires_grad
    assert not tempered.requires_grad
    assert torch.equal(head.selected_logprobs(hidden, ids, plan)[1], plain.detach())


def test_rows_without_an_adapter_get_none_and_both_kinds_get_their_gradient():
    head, adapter, hidden, ids = make(1.0, None)
    found, _ = head.selected_logprobs(hidden, ids, [(None, 0, 2), (adapter, 3, 6)])
    bare = head.base(hidden).log_softmax(-1)
    full = dense(head, adapter, hidden)
    expected = torch.cat([bare[:3], full[3:6], bare[6:]]).gather(1, ids)
    torch.testing.assert_close(found, expected)
    for m, t in zip(
        torch.autograd.grad(found.sum(), hidden),
        torch.autograd.grad(expected.sum(), hidden),
        strict=True,
    ):
        torch.testing.assert_close(m, t)


def test_logits_are_float32_and_agree_with_the_logprobs():
    head, adapter, hidden, ids = make(0.5, 2.0, dtype=torch.float32)
    logits = head.logits(hidden.bfloat16(), [(adapter, 0, N)])
    assert logits.dtype == torch.float32
    found, _ = head.selected_logprobs(hidden.bfloat16(), ids, [(adapter, 0, N)])
    torch.testing.assert_close(found, logits.log_softmax(-1).gather(1, ids))
