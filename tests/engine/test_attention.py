"""Packed attention against a dense mask, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.engine import attention
from trimtab.engine.attention import PackedCausal, refuse_unknown
from trimtab.errors import Invalid


def dense(q, k, v, lengths, *, scale, window, softcap):
    """One softmax over all rows, everything a row may not see masked out."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i = torch.arange(len(segment))
    sees = (segment[:, None] == segment) & (i[:, None] >= i)
    if window is not None:
        sees &= i[:, None] - i < window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("block", [3, 256])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_packed_segments_equal_a_dense_mask(window, softcap, block, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    lengths = [3, 5, 5, 5, 1, 9]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 28, 8, generator=generator) for h in (4, 2, 2))
    plan = PackedCausal(lengths)
    found = plan.attend(0, q, k, v, scale=0.3, window=window, softcap=softcap)
    expected = dense(q, k, v, lengths, scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "asked, name",
    [
        ({"others": {"s_aux": torch.ones(4)}}, "s_aux"),
        ({"others": {"position_bias": torch.ones(4)}}, "position_bias"),
        ({"mask": torch.ones(4)}, "attention_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_what_a_plan_does_not_honour_is_refused(asked, name):
    usual = {"mask": None, "dropout": 0.0, "is_causal": None, "others": {"position_ids": 1}}
    refuse_unknown(nn.Identity(), **usual)
    with pytest.raises(Invalid, match=name):
        refuse_unknown(nn.Identity(), **usual | asked)
