"""Low-rank adapters over packed rows: y = base(x) + scale * (x A^T) B^T, each row under its own.

M packed rows, r rank, `in`/`out` features of a linear. Adapters stay in float32 and unmerged,
whatever the base computes in, so that any number of them share one set of base weights.
Knows nothing of optimizers or of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.engine.context import current
from trimtab.types import LoraConfig

ALPHA = 32.0

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """`pairs` maps a module's name to A (r, in) and B (out, r).

    Example: `Adapter(LoraConfig(rank=8), {"model.layers.0.self_attn.q_proj": (A, B)})`, scale 4.
    """

    config: LoraConfig
    pairs: Mapping[str, Pair]

    @property
    def scale(self) -> float:
        return ALPHA / self.config.rank

    def parameters(self) -> Iterator[Tensor]:
        """A, B, A, B, ... in the order of `pairs`."""
        for pair in self.pairs.values():
            yield from pair


AdapterPlan = Sequence[tuple[Adapter | None, int, int]]
"""(adapter, first row, past the last row): disjoint, in order; rows in no entry have no adapter."""


class LoraLinear(nn.Module):
    """A linear of the base model, known by its full name, under the adapters of the running pass.

    `base` may be replaced by anything that maps (..., in) to (..., out): a quantised or a packed
    linear, for instance.
    """

    def __init__(self, name: str, base: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        this = current()
        rows = x.numel() // x.shape[-1]
        assert rows == this.rows, f"{self.name} got {rows} rows of a pass of {this.rows}"
        return apply_adapters(self.name, x, self.base(x), this.adapters)


def apply_adapters(name: str, x: Tensor, y: Tensor, plan: AdapterPlan) -> Tensor:
    """`y` plus what each adapter of `plan` adds to its rows for the module `name`. `y` is fresh
    from the base linear and may be written to."""
    entries = [(a.pairs[name], a.scale, i, j) for a, i, j in plan if a and name in a.pairs]
    if not entries:
        return y
    x_MI, y_MO = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    if len(entries) == 1 and entries[0][2:] == (0, len(y_MO)):
        (pair, scale, _, _) = entries[0]
        return add_low_rank(x_MI, y_MO, pair, scale).view_as(y)
    for pair, scale, i, j in entries:
        y_MO[i:j] = add_low_rank(x_MI[i:j], y_MO[i:j], pair, scale)
    return y_MO.view_as(y)


def add_low_rank(x_MI: Tensor, y_MO: Tensor, pair: Pair, scale: float) -> Tensor:
    """y + scale * (x A^T) B^T, computed in the adapter's dtype and returned in y's."""
    A, B = pair
    h_Mr = x_MI.to(A.dtype) @ A.t()
    if y_MO.dtype == A.dtype:
        return torch.addmm(y_MO, h_Mr, B.t(), alpha=scale)
    return (y_MO + (h_Mr @ B.t()) * scale).to(y_MO.dtype)
