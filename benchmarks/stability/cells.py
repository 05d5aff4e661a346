"""What one cell is."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_K = 8


@dataclass(frozen=True)
class Cell:
    """`loss` names a served, experimental or variant loss; `lr_scale` multiplies the working rate;
    `numerics` is the sampler's dtype; `staleness` counts optimizer steps."""

    task: str
    loss: str
    staleness: int
    numerics: str
    seed: int
    lr_scale: float = 1.0
    head_k: int = HEAD_K

    @property
    def key(self) -> str:
        """One string a cell, the same in every run.

        >>> Cell("sort", "ppo", 4, "int8", 0).key
        'sort/ppo/K4/int8/seed0/lr1/k8'
        """
        return (
            f"{self.task}/{self.loss}/K{self.staleness}/{self.numerics}/seed{self.seed}"
            f"/lr{self.lr_scale:.3g}/k{self.head_k}"
        )
