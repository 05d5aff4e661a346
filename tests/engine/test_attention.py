"""Packed and shared attention against a dense mask, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.engine import attention, shared_attention
from trimtab.engine.attention import PackedCausal, Segments, refuse_unknown
from trimtab.engine.shared_attention import SharedCausal
from trimtab.errors import Invalid


def dense(q, k, v, segments, *, scale, window, softcap):
    """One softmax over all rows, everything a row may not see masked out."""
    rows = sum(each.rows for each in segments)
    sees, position = torch.zeros(rows, rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.int64)
    start = 0
    for each in segments:
        prefix, at = list(range(start, start + each.prefix)), start + each.prefix
        for own in (0, *each.own):
            seen = prefix + list(range(at, at + own))
            for i, row in enumerate(seen):
                sees[row, seen[: i + 1]] = True
                position[row] = i
            at += own
        start = at
    if window is not None:
        sees &= position[:, None] - position < window
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
    alone = [Segments(0, tuple(lengths))]
    expected = dense(q, k, v, alone, scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("window, softcap", [(None, None), (4, None), (100, None), (None, 2.0)])
def test_shared_rows_are_seen_by_all_that_begin_with_them(window, softcap, kernel, monkeypatch):
    """Values and gradients, by torch's kernel for CPUs and without it."""
    if not kernel:
        monkeypatch.setattr(shared_attention, "FLASH", None)
    segments = [Segments(5, (3, 3, 0, 4)), Segments(0, (6, 6, 2)), Segments(4, (0, 0))]
    rows = sum(each.rows for each in segments)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, rows, 8, generator=generator).requires_grad_() for h in (4, 2, 2))
    rule = {"scale": 0.3, "window": window, "softcap": softcap}
    found = SharedCausal(segments).attend(0, q, k, v, **rule)
    expected = dense(q, k, v, segments, **rule)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(found.shape, generator=generator)
    mine, theirs = (torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (found, expected))
    for m, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(m, t)


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
