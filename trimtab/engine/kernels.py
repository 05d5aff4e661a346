"""Linears of lower precision for a sampler's net. The learner keeps its own weights.

    int8   weights symmetric int8 with a scale an output channel. Where the processor has int8
           dot products, activations are split into two int8 digits a row (15 bits, one scale a
           row) and the sums are int32; elsewhere they stay float32 against the same weights.
           Either way the weights' rounding is the mismatch, and a row's numbers depend on that row
           alone. (8-bit activations would be twice as fast and, on small models with outlying
           channels, put more than ten times the KL between sampler and learner.)
    int4   weights only: 16 levels from the least to the greatest of each group of 32 inputs, held
           and computed as float32 (a storage format: the rounding is real, the speed is float32's).

Adapters stay float32 and unmerged around them. I input, O output features, M rows.
Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.engine.net import Net

GROUP = 32
BASE = 128


class Int8Linear(nn.Module):
    """x (..., I) -> (..., O) float32, by `torch._int_mm` if `integer`, else a float32 product."""

    def __init__(
        self, q_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None, *, integer: bool
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = q_OI.shape
        self.q_OI = q_OI if integer else q_OI.float()
        self.scale_O = scale_O
        self.bias_O = bias_O
        self.integer = integer

    @staticmethod
    def of(*linears: Int8Linear) -> Int8Linear:
        """Linears of one input as one, with the same numbers: a scale an output channel."""
        biases = [linear.bias_O for linear in linears]
        return Int8Linear(
            torch.cat([linear.q_OI for linear in linears]),
            torch.cat([linear.scale_O for linear in linears]),
            None if biases[0] is None else torch.cat(biases),
            integer=linears[0].integer,
        )

    def forward(self, x: Tensor) -> Tensor:
        x_MI = x.reshape(-1, x.shape[-1]).float()
        y_MO = self._integer_product(x_MI) if self.integer else x_MI @ self.q_OI.t()
        y_MO.mul_(self.scale_O)
        if self.bias_O is not None:
            y_MO += self.bias_O
        return y_MO.view(*x.shape[:-1], -1)

    def _integer_product(self, x_MI: Tensor) -> Tensor:
        digits_2MI, scale_M1 = digits(x_MI)
        high_MO, low_MO = torch._int_mm(digits_2MI, self.q_OI.t()).float().chunk(2)
        return low_MO.add_(high_MO, alpha=BASE).mul_(scale_M1)


def quantise_rows(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (R, C) and scale (R,) float32 with x ~ q * scale, |q| <= 127.

    >>> quantise_rows(torch.tensor([[127.0, -63.6]]))
    (tensor([[127, -64]], dtype=torch.int8), tensor([1.]))
    """
    scale_R = x_RC.abs().amax(dim=1).clamp_(min=1e-30).div_(127)
    return (x_RC / scale_R[:, None]).round_().to(torch.int8), scale_R


def digits(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (2 * M, I), high digits above low ones, and scale (M, 1) with x ~ (128 * high + low) *
    scale: 15 bits a value.

    >>> digits(torch.tensor([[16256.0, -130.0]]))[0]
    tensor([[127,  -1],
            [  0,  -2]], dtype=torch.int8)
    """
    most_M1 = torch.linalg.vector_norm(x_MI, torch.inf, dim=1, keepdim=True).clamp_(min=1e-30)
    low_MI = (x_MI * (127 * BASE / most_M1)).round_()
    high_MI = (low_MI * (1 / BASE)).round_()
    low_MI.sub_(high_MI, alpha=BASE)
    return torch.cat([high_MI, low_MI]).to(torch.int8), most_M1.div_(127 * BASE)


def round_to_int4(weight_OI: Tensor) -> Tensor:
    """The weights after rounding to 16 levels a group of 32 inputs, as float32.

    >>> round_to_int4(torch.tensor([[15.0, 3.4, 0.0]]))
    tensor([[15.,  3.,  0.]])
    """
    outputs, inputs = weight_OI.shape
    groups = F.pad(weight_OI.float(), (0, -inputs % GROUP), mode="replicate")
    groups = groups.view(outputs, -1, GROUP)
    least = groups.amin(dim=2, keepdim=True)
    scale = (groups.amax(dim=2, keepdim=True) - least).clamp_(min=1e-30).div_(15)
    rounded = ((groups - least) / scale).round_().mul_(scale).add_(least)
    return rounded.view(outputs, -1)[:, :inputs].contiguous()


def int8_linear(linear: nn.Module) -> nn.Module:
    weight_OI = weight_of(linear)
    integer = weight_OI.device.type == "cpu" and has_integer_units()
    return Int8Linear(*quantise_rows(weight_OI.float()), linear.bias, integer=integer)


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
def has_integer_units() -> bool:
    """Does this CPU have int8 dot products? Without them torch's int8 product is many times slower
    than float32's. Asked of the processor, not of a stopwatch: two starts must compute alike."""
    ask = getattr(torch.cpu, "get_capabilities", dict)
    found = ask()
    return any(found.get(unit) for unit in ("avx512_vnni", "avx_vnni", "amx_int8"))
