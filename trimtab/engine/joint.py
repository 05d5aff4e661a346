"""Linears of one input under one adapter, forward and backward by hand.

M rows, I input and O output features (of all linears of a joint together), r rank, n linears.

    y = x W^T + s (x A^T) B^T          dx = dy W + s (dy B) A
    dA = s (dy B)^T x                  dB = s dy^T (x A^T)

Nothing but x is kept for backward, and no gradient of W is ever made. For many rows the adapter is
first added to the weights (W + s B A, for the duration of one layer): that costs 2 r I O and saves
2 r (I + O) a row, there and in the backward pass. Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.engine.lora import Adapter, LoraLinear


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """Linears of one input, side by side in the output: `parts` are their columns."""

    names: tuple[str, ...]
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    parts: tuple[slice, ...]

    @staticmethod
    def of(*linears: LoraLinear) -> Joint:
        """TypeError for anything but nn.Linear in float32."""
        bases = [linear.base for linear in linears]
        if not all(type(b) is nn.Linear and b.weight.dtype == torch.float32 for b in bases):
            raise TypeError("another kind of linear")
        parts, stop = [], 0
        for base in bases:
            start, stop = stop, stop + base.out_features
            parts.append(slice(start, stop))
        return Joint(
            tuple(linear.name for linear in linears),
            tuple(base.weight for base in bases),
            tuple(base.bias for base in bases),
            tuple(parts),
        )

    @property
    def inside(self) -> int:
        return self.weights[0].shape[1]

    @property
    def outside(self) -> int:
        return self.parts[-1].stop

    def parameters(self, adapter: Adapter | None) -> list[Tensor | None]:
        """A, B of each linear, None where the adapter has none."""
        none = (None, None)
        pairs = adapter.pairs if adapter is not None else {}
        return [x for name in self.names for x in pairs.get(name, none)]

    def merging_pays(self, rows: int) -> bool:
        """Adding the adapter to the weights costs as much as so many rows save."""
        return rows * (self.inside + self.outside) > 2 * self.inside * self.outside


class Bound:
    """A joint under the adapter of one pass: `ABs` is A, B, A, B, ... or None for each linear."""

    def __init__(self, joint: Joint, ABs: Sequence[Tensor | None], scale: float, rows: int) -> None:
        self.joint, self.scale = joint, scale
        self.pairs = [
            (part, ABs[2 * i], ABs[2 * i + 1])
            for i, part in enumerate(joint.parts)
            if ABs[2 * i] is not None
        ]
        self.at = [i for i in range(len(joint.parts)) if ABs[2 * i] is not None]
        self.merged = bool(self.pairs) and joint.merging_pays(rows)
        self.weights = self._weights(ABs)

    def _weights(self, ABs: Sequence[Tensor | None]) -> list[tuple[slice, Tensor]]:
        """(columns, weight (O, I)): all linears' in one where a copy is made anyway."""
        joint = self.joint
        if not self.merged:
            return list(zip(joint.parts, joint.weights, strict=True))
        W_OI = joint.weights[0].new_empty(joint.outside, joint.inside)
        for i, (part, W) in enumerate(zip(joint.parts, joint.weights, strict=True)):
            A, B = ABs[2 * i : 2 * i + 2]
            if A is None:
                W_OI[part] = W
            else:
                torch.addmm(W, B, A, alpha=self.scale, out=W_OI[part])
        return [(slice(0, joint.outside), W_OI)]

    def add_to(self, y_MO: Tensor, x_MI: Tensor, base_MO: Tensor | None = None) -> Tensor:
        """Write `base` (none: zero) plus the linears of x into y."""
        for part, W in self.weights:
            if base_MO is None:
                torch.mm(x_MI, W.t(), out=y_MO[:, part])
            else:
                torch.addmm(base_MO[:, part], x_MI, W.t(), out=y_MO[:, part])
        for part, bias in zip(self.joint.parts, self.joint.biases, strict=True):
            if bias is not None:
                y_MO[:, part] += bias
        if not self.merged:
            for part, A, B in self.pairs:
                y_MO[:, part].addmm_(x_MI @ A.t(), B.t(), alpha=self.scale)
        return y_MO

    def begin_gradients(self) -> None:
        """Zero the sums that `backward` adds to, block of rows by block of rows."""
        self.A_nrI = torch.cat([A for _, A, _ in self.pairs]) if self.pairs else None
        self.grad_A_nrI = None if self.A_nrI is None else torch.zeros_like(self.A_nrI)
        # (r, O): products come out faster this way round.
        self.grads_B = [B.new_zeros(B.shape[::-1]) for _, _, B in self.pairs]

    def backward(self, dy_MO: Tensor, x_MI: Tensor, *, input_too: bool = True) -> Tensor | None:
        """d x (M, I), and the gradients of A and B added to their sums."""
        dx_MI = None
        if input_too:
            for part, W in self.weights:
                dx_MI = dy_MO[:, part] @ W if dx_MI is None else dx_MI.addmm_(dy_MO[:, part], W)
        if not self.pairs:
            return dx_MI
        h_Mnr = x_MI @ self.A_nrI.t()
        dh_Mnr = torch.empty_like(h_Mnr)
        rank = self.pairs[0][1].shape[0]
        for i, (part, _, B) in enumerate(self.pairs):
            mine = slice(i * rank, (i + 1) * rank)
            torch.mm(dy_MO[:, part], B, out=dh_Mnr[:, mine])
            self.grads_B[i].addmm_(h_Mnr[:, mine].t(), dy_MO[:, part], alpha=self.scale)
        self.grad_A_nrI.addmm_(dh_Mnr.t(), x_MI, alpha=self.scale)
        if dx_MI is not None and not self.merged:
            dx_MI.addmm_(dh_Mnr, self.A_nrI, alpha=self.scale)
        return dx_MI

    def gradients(self) -> list[Tensor | None]:
        """In the order of `Joint.parameters`."""
        out: list[Tensor | None] = [None] * (2 * len(self.joint.parts))
        if self.pairs:
            rank = self.pairs[0][1].shape[0]
            grads_A = self.grad_A_nrI.split(rank)
            for i, grad_A, grad_B in zip(self.at, grads_A, self.grads_B, strict=True):
                out[2 * i : 2 * i + 2] = grad_A, grad_B.t().contiguous()
        return out
