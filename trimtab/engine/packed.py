"""Float32 linears whose weights are laid out for oneDNN beforehand. CPU only.

M rows, I input and O output features. torch packs nothing by itself: F.linear reads row-major
weights at every call, which costs a third to two thirds of the time at M between 4 and 64. The
operators are private to torch, so they are tried before they are used. Knows nothing of models.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The batch the layout is chosen for; measured no worse at 1 and better from 4 to 256.
ROWS = 16
# With AVX-512 a product of 1 to 3 rows takes longer than one of 4, by 15 to 35% of the latter.
LEAST = 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


class PackedLinear(nn.Module):
    """x (..., I) -> (..., O), the weights of one or more linears side by side."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), ROWS)
        self.bias_O = bias_O
        self.out_features = weight_OI.shape[0]

    @staticmethod
    def of(*linears: nn.Linear) -> PackedLinear:
        weight_OI = torch.cat([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        return PackedLinear(weight_OI, None if biases[0] is None else torch.cat(biases))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows < LEAST:
            full = F.pad(x.reshape(rows, -1), (0, 0, 0, LEAST - rows))
            return self(full)[:rows].view(*x.shape[:-1], -1)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias_O, "none", [], "")


def can_pack(linear: nn.Module) -> bool:
    """Is it a plain float32 linear on a CPU whose torch has the operators?"""
    return (
        type(linear) is nn.Linear
        and linear.weight.dtype == torch.float32
        and linear.weight.device.type == "cpu"
        and operators_work()
    )


@cache
def operators_work() -> bool:
    """Tried once on a small product."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(24, 40, generator=generator)
    x_MI = torch.randn(5, 40, generator=generator)
    try:
        found = PackedLinear(weight_OI, None)(x_MI)
    except (AttributeError, RuntimeError):
        return False  # a torch built without oneDNN, or of a version that renamed them
    return torch.allclose(found, F.linear(x_MI, weight_OI), atol=1e-4)
