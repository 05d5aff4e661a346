"""The learner's attention: packed segments, some of which share the rows they begin with.

M packed rows, Hq query heads, Hkv key/value heads, D head size, P rows of a shared prefix, S
segments of L rows each of their own.

A softmax over [prefix | own] is two softmaxes weighed by their log-sum-exps, so a prefix is neither
computed nor held once a segment. The derivative needs no more: with the joint output and the joint
log-sum-exp, each part's backward kernel gives that part's share of it. Where the kernel for it is
missing (an accelerator, a softcap, a window), the prefix's keys are put before each segment's own.
Knows nothing of datums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.engine.attention import PackedCausal, Rule, Segments, runs, split

# torch's own attention on CPUs, with grouped heads and with its log-sum-exp.
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
FLASH_BACKWARD: Any = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None
)


class SharedCausal:
    """Segments one after another, each causal in itself and after the prefix it shares.

    >>> SharedCausal([Segments(3, (2, 4)), Segments(0, (5,))]).rows
    14
    """

    def __init__(self, segments: Sequence[Segments]) -> None:
        self.segments = tuple(segments)
        self.rows = sum(each.rows for each in segments)
        self._longest = max((each.longest for each in segments), default=0)
        self._plain = PackedCausal([])

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        rule = Rule(scale, window, softcap)
        if FLASH is not None and q.device.type == "cpu" and rule.plain(self._longest):
            return _Flash.apply(q, k, v, self.segments, scale)
        return self._by_copies(q, k, v, rule)

    def _by_copies(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        sizes = [*chain(*(sizes_of(each) for each in self.segments))]
        parts = zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True)
        out = []
        for each in self.segments:
            before: list[tuple[Tensor, Tensor]] = []
            if each.prefix:
                q_P, k_P, v_P = next(parts)
                out.append(self._plain.segments(q_P, k_P, v_P, rule))
                before = [(k_P, v_P)]
            for start, stop, length in runs(each.own):
                q_S, k_S, v_S = (split(x, length) for x in next(parts))
                count = (stop - start) // length
                for head_k, head_v in before:
                    k_S = torch.cat([head_k.expand(count, -1, -1, -1), k_S], dim=2)
                    v_S = torch.cat([head_v.expand(count, -1, -1, -1), v_S], dim=2)
                out.append(self._plain.segments(q_S, k_S, v_S, rule))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def sizes_of(each: Segments) -> Iterator[int]:
    """Rows of the prefix, if any, and of each run of segments of one length."""
    if each.prefix:
        yield each.prefix
    for start, stop, _ in runs(each.own):
        yield stop - start


@dataclass(frozen=True, slots=True)
class Piece:
    """One kernel call: queries `rows` against keys `keys`, both ranges of packed rows, in segments
    of `length` rows each; `adds` to what these queries have already seen."""

    rows: slice
    keys: slice
    length: int | None
    adds: bool

    @property
    def causal(self) -> bool:
        return self.length is not None

    def of(self, x: Tensor, rows: slice) -> Tensor:
        """(1, H, M, D) -> (S, H, L, D), a view."""
        x = x[:, :, rows]
        return x if self.length is None else split(x, self.length)

    def lse(self, lse_MH: Tensor) -> Tensor:
        """(M, H) -> (S, H, L), a view."""
        lse_HM = lse_MH[self.rows].t()
        return (
            lse_HM[None]
            if self.length is None
            else split(lse_HM[None, ..., None], self.length)[..., 0]
        )


def pieces(segments: Sequence[Segments]) -> Iterator[Piece]:
    at = 0
    for each in segments:
        own = at + each.prefix
        prefix = slice(at, own)
        if each.prefix:
            yield Piece(prefix, prefix, each.prefix, adds=False)
        for start, stop, length in runs(each.own):
            rows = slice(own + start, own + stop)
            yield Piece(rows, rows, length, adds=False)
        at += each.rows
        if each.prefix and at > own:
            yield Piece(slice(own, at), prefix, None, adds=True)


class _Flash(torch.autograd.Function):
    """q (1, Hq, M, D), k and v (1, Hkv, M, D) -> (1, M, Hq, D)."""

    @staticmethod
    def forward(ctx, q, k, v, segments, scale):  # noqa: PLR0917
        out = q.new_empty(1, q.shape[2], q.shape[1], q.shape[3])
        lse_MH = out.new_empty(out.shape[1:3], dtype=torch.float32)
        heads = out.transpose(1, 2)
        plan = [*pieces(segments)]
        for piece in plan:
            parts = piece.of(q, piece.rows), piece.of(k, piece.keys), piece.of(v, piece.keys)
            found, lse = FLASH(*parts, 0.0, piece.causal, scale=scale)
            mine, mine_lse = piece.of(heads, piece.rows), piece.lse(lse_MH)
            if piece.adds:
                both = torch.logaddexp(mine_lse, lse)
                share = (lse - both).exp_().to(found.dtype)
                found = torch.lerp(mine, found, share[..., None])
                lse = both
            mine.copy_(found)
            mine_lse.copy_(lse)
        ctx.save_for_backward(q, k, v, out, lse_MH)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse_MH = ctx.saved_tensors
        heads, grad_heads = out.transpose(1, 2), grad.transpose(1, 2)
        # Heads innermost but one, as the linears before have them.
        grads = [
            x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v)
        ]
        for piece in pieces(ctx.segments):
            rows = piece.rows, piece.keys, piece.keys
            parts = (piece.of(x, r) for x, r in zip((q, k, v), rows, strict=True))
            found = FLASH_BACKWARD(
                piece.of(grad_heads, piece.rows),
                *parts,
                piece.of(heads, piece.rows),
                piece.lse(lse_MH),
                0.0,
                piece.causal,
                scale=ctx.scale,
            )
            for mine, r, more in zip(grads, rows, found, strict=True):
                if piece.adds:
                    piece.of(mine, r).add_(more)
                else:
                    piece.of(mine, r).copy_(more)
        return *grads, None, None
