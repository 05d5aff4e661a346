"""A decoder layer for learning: attention and a gated MLP, backward by hand.

M packed rows, d hidden size, Hq query and H key/value heads, D head size, O columns of queries,
keys and values together, f columns of the MLP.

autograd would keep every elementwise result and read it again. Each half of a layer is one node
here, which keeps what a product made (queries, keys, values, gate, up) and the stream between, and
makes the rest again, a block of rows at a time, so that it stays in the cache. Attention between
the two halves is the plan's. Knows nothing of models by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trimtab.engine.attention import AttentionPlan, Rule
from trimtab.engine.joint import Bound, Joint
from trimtab.engine.lora import Adapter
from trimtab.engine.structure import RmsNorm

BLOCK = 1024
"""Rows whose intermediate results are alive at a time."""

Turn = tuple[Tensor, Tensor]
"""cos and sin (M, 1, D/2) of a row's position."""


def blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, BLOCK):
        yield slice(start, min(start + BLOCK, rows))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_Md, norm):
        ctx.save_for_backward(x_Md)
        ctx.norm = norm
        return norm(x_Md)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_Md):
        return ctx.norm.backward(dy_Md.clone(), *ctx.saved_tensors), None


def normed(x_Md: Tensor, norm: RmsNorm) -> Tensor:
    """`norm` of x with its gradient."""
    return _Norm.apply(x_Md, norm)


def turned(x_MHD: Tensor, turn: Turn, out_MHD: Tensor, *, back: bool = False) -> None:
    """Rotary embedding of x, or its inverse, into `out`."""
    cos, sin = turn
    a, b = x_MHD.chunk(2, -1)
    out_a, out_b = out_MHD.chunk(2, -1)
    sign = -1 if back else 1
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)


@dataclass(frozen=True, slots=True, eq=False)
class FlatLayer:
    """`heads` norms queries and keys, where the model does: weights (Hq + H, D)."""

    before: RmsNorm
    qkv: Joint
    heads: RmsNorm | None
    out: Joint
    between: RmsNorm
    gate_up: Joint
    down: Joint
    queries: int
    keys: int
    rule: Rule

    def forward(
        self, index: int, x_Md: Tensor, turn: Turn, plan: AttentionPlan, adapter: Adapter | None
    ) -> Tensor:
        """(M, d) -> (M, d)."""
        keep = torch.is_grad_enabled()
        scale = adapter.scale if adapter is not None else 1.0
        q, k, v = _Before.apply(x_Md, self, turn, scale, keep, *self.qkv.parameters(adapter))
        rule = {
            "scale": self.rule.scale,
            "window": self.rule.window,
            "softcap": self.rule.softcap,
        }
        seen = plan.attend(index, *(x.transpose(0, 1)[None] for x in (q, k, v)), **rule)
        after = [
            x for joint in (self.out, self.gate_up, self.down) for x in joint.parameters(adapter)
        ]
        return _After.apply(x_Md, seen[0].flatten(1), self, scale, keep, *after)


class _Before(torch.autograd.Function):
    """x (M, d) -> q (M, Hq, D), k and v (M, H, D), ready for attention."""

    @staticmethod
    def forward(ctx, x_Md, layer, turn, scale, keep, *ABs):  # noqa: PLR0917
        rows, count = len(x_Md), layer.queries + layer.keys
        qkv = Bound(layer.qkv, ABs, scale, rows)
        size = layer.qkv.outside // (count + layer.keys)
        made = x_Md.new_empty(rows, count + layer.keys, size)
        turned_MHD = made[:, :count] if layer.heads is None else torch.empty_like(made[:, :count])
        for part in blocks(rows):
            qkv.add_to(made[part].flatten(1), layer.before(x_Md[part]))
            qk_MHD = made[part, :count]
            qk_MHD = qk_MHD.clone() if layer.heads is None else layer.heads(qk_MHD)
            turned(qk_MHD, cut(turn, part), turned_MHD[part])
        # Norms of heads need what they were made from.
        raw = made[:, :count] if keep and layer.heads is not None else None
        ctx.save_for_backward(x_Md, raw, *turn, *ABs)
        ctx.layer, ctx.scale = layer, scale
        return turned_MHD[:, : layer.queries], turned_MHD[:, layer.queries :], made[:, count:]

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        x_Md, raw, cos, sin, *ABs = ctx.saved_tensors
        layer, rows = ctx.layer, len(x_Md)
        count = layer.queries + layer.keys
        qkv = Bound(layer.qkv, ABs, ctx.scale, rows)
        qkv.begin_gradients()
        dx_Md = torch.empty_like(x_Md) if ctx.needs_input_grad[0] else None
        for part in blocks(rows):
            dy_MHD = dq.new_empty(part.stop - part.start, count + layer.keys, dq.shape[2])
            turn = cut((cos, sin), part)
            turned(dq[part], turn, dy_MHD[:, : layer.queries], back=True)
            turned(dk[part], turn, dy_MHD[:, layer.queries : count], back=True)
            dy_MHD[:, count:] = dv[part]
            if raw is not None:
                dy_MHD[:, :count] = layer.heads.backward(dy_MHD[:, :count], raw[part])
            x = x_Md[part]
            dx = qkv.backward(dy_MHD.flatten(1), layer.before(x), input_too=dx_Md is not None)
            if dx_Md is not None:
                dx_Md[part] = layer.before.backward(dx, x)
        return dx_Md, None, None, None, None, *qkv.gradients()


class _After(torch.autograd.Function):
    """x (M, d) and what attention saw (M, Hq*D) -> x + out(seen), plus the MLP of that."""

    @staticmethod
    def forward(ctx, x_Md, seen_MO, layer, scale, keep, *ABs):  # noqa: PLR0917
        rows, wide = len(x_Md), layer.gate_up.outside
        out, gate_up, down = bound(layer, ABs, scale, rows)
        y_Md, between_Md = torch.empty_like(x_Md), torch.empty_like(x_Md)
        both_Mf = x_Md.new_empty(rows if keep else min(rows, BLOCK), wide)
        for part in blocks(rows):
            x = out.add_to(between_Md[part], seen_MO[part], x_Md[part])
            both = both_Mf[part] if keep else both_Mf[: len(x)]
            gate, up = gate_up.add_to(both, layer.between(x)).chunk(2, -1)
            down.add_to(y_Md[part], F.silu(gate).mul_(up), x)
        ctx.save_for_backward(between_Md, seen_MO, both_Mf, *ABs)
        ctx.layer, ctx.scale = layer, scale
        return y_Md

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_Md):
        between_Md, seen_MO, both_Mf, *ABs = ctx.saved_tensors
        layer, rows = ctx.layer, len(dy_Md)
        out, gate_up, down = bound(layer, ABs, ctx.scale, rows)
        for each in (out, gate_up, down):
            each.begin_gradients()
        dx_Md, dseen_MO = torch.empty_like(dy_Md), torch.empty_like(seen_MO)
        for part in blocks(rows):
            x, dy = between_Md[part], dy_Md[part]
            gate, up = both_Mf[part].chunk(2, -1)
            open_Mf = F.silu(gate)
            dproduct = down.backward(dy, open_Mf * up)
            dboth = torch.empty_like(both_Mf[part])
            dgate, dup = dboth.chunk(2, -1)
            torch.mul(dproduct, open_Mf, out=dup)
            torch.ops.aten.silu_backward.grad_input(dproduct.mul_(up), gate, grad_input=dgate)
            dx = layer.between.backward(gate_up.backward(dboth, layer.between(x)), x)
            dx_Md[part] = dx.add_(dy)
            dseen_MO[part] = out.backward(dx, seen_MO[part])
        gradients = [g for each in (out, gate_up, down) for g in each.gradients()]
        return dx_Md, dseen_MO, None, None, None, *gradients


def bound(layer: FlatLayer, ABs: Any, scale: float, rows: int) -> list[Bound]:
    """The joints after attention, each under its share of `ABs`."""
    found, at = [], 0
    for joint in (layer.out, layer.gate_up, layer.down):
        stop = at + 2 * len(joint.parts)
        found.append(Bound(joint, ABs[at:stop], scale, rows))
        at = stop
    return found


def cut(turn: Turn, part: slice) -> Turn:
    return turn[0][part], turn[1][part]
