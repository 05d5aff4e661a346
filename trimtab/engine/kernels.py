"""Linears of lower precision for a sampler's net. The learner keeps its own weights.

    int8   W8A8: weights symmetric int8 with a scale an output channel, activations quantised anew
           for each row (symmetric, one scale a row), int32 sums. A row's numbers depend on that row
           alone, so batch-mates change nothing.
    int4   weights only: symmetric levels -7..7 with a scale for each group of 32 inputs, held and
           computed as float32 (a storage format: the rounding is real, the speed is float32's).

Adapters stay float32 and unmerged around them. I input, O output features, M rows.
Knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.engine.net import Net

GROUP = 32


class Int8Linear(nn.Module):
    """x (..., I) -> (..., O) float32, by `torch._int_mm` where that beats float32 on this machine,
    else by float32 products of the same integers (equal up to 2^24, which I <= 1040 never reaches).
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, integer: bool) -> None:
        super().__init__()
        q_OI, self.scale_O = quantise_rows(weight_OI.float())
        self.q_OI = q_OI if integer else q_OI.float()
        self.bias_O = bias_O
        self.integer = integer

    def forward(self, x: Tensor) -> Tensor:
        q_MI, scale_M = quantise_rows(x.reshape(-1, x.shape[-1]).float())
        if self.integer:
            y_MO = torch._int_mm(q_MI, self.q_OI.t()).float()
        else:
            y_MO = q_MI.float() @ self.q_OI.t()
        y_MO.mul_(scale_M[:, None]).mul_(self.scale_O)
        if self.bias_O is not None:
            y_MO += self.bias_O
        return y_MO.view(*x.shape[:-1], -1)


def quantise_rows(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (R, C) and scale (R,) float32 with x ~ q * scale, |q| <= 127.

    >>> quantise_rows(torch.tensor([[127.0, -63.6]]))
    (tensor([[127, -64]], dtype=torch.int8), tensor([1.]))
    """
    scale_R = x_RC.abs().amax(dim=1).clamp_(min=1e-30).div_(127)
    return (x_RC / scale_R[:, None]).round_().to(torch.int8), scale_R


def round_to_int4(weight_OI: Tensor) -> Tensor:
    """The weights after rounding to 15 levels a group of 32 inputs, as float32.

    >>> round_to_int4(torch.tensor([[7.0, 3.4, -0.6]]))
    tensor([[ 7.,  3., -1.]])
    """
    outputs, inputs = weight_OI.shape
    padded = F.pad(weight_OI.float(), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    scale = padded.abs().amax(dim=2, keepdim=True).clamp_(min=1e-30).div_(7)
    return (padded / scale).round_().mul_(scale).view(outputs, -1)[:, :inputs].contiguous()


def int8_linear(linear: nn.Module) -> nn.Module:
    return Int8Linear(weight_of(linear), linear.bias, integer=integer_is_faster())


def int4_linear(linear: nn.Module) -> nn.Module:
    weight_OI = round_to_int4(weight_of(linear))
    out = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    out.weight = nn.Parameter(weight_OI, requires_grad=False)
    out.bias = linear.bias
    return out


QUANTISED: dict[str, Callable[[nn.Module], nn.Module]] = {"int8": int8_linear, "int4": int4_linear}


def quantise(net: Net, dtype: str) -> None:
    """Replace every linear of `net`'s decoder layers, and its head, by one of `dtype`."""
    convert = QUANTISED[dtype]
    for linear in net.linears.values():
        linear.base = convert(linear.base)
    net.head.base = convert(net.head.base)


def weight_of(linear: nn.Module) -> Tensor:
    """(O, I) of an nn.Linear or of GPT-2's transposed Conv1D."""
    weight: Tensor = linear.weight
    return weight if isinstance(linear, nn.Linear) else weight.t()


@cache
def integer_is_faster(rows: int = 4, inputs: int = 512, outputs: int = 1024) -> bool:
    """Does an int8 product beat float32 here? Not without integer dot-product units."""
    x, w = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    q, v = x.to(torch.int8), w.to(torch.int8)
    return _best(lambda: torch._int_mm(q, v.t())) < _best(lambda: F.linear(x, w))


def _best(call: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(8):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times[2:])
