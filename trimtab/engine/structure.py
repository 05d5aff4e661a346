"""The structure that the flat nets are written for: attention and a gated MLP, each after an RMS
norm. Which models have it is found by looking, not by name.

d features, Hq query and H key/value heads, D head size. Knows nothing of adapters or caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class RmsNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last axis, in five operations of torch, whose
    own takes nine on a CPU."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = torch.tensor(eps, device=weight.device)

    @staticmethod
    def of(*modules: Any, repeats: tuple[int, ...] = ()) -> RmsNorm:
        """A module's; with `repeats`, the norms of so many heads of each module, one below the
        other."""
        epsilons = {getattr(m, "variance_epsilon", None) or m.eps for m in modules}
        if len(epsilons) > 1:
            raise ValueError("norms of one input differ in eps")
        weights = [m.weight for m in modules]
        if repeats:
            rows = zip(weights, repeats, strict=True)
            weights = [torch.cat([w.expand(n, -1) for w, n in rows])]
        return RmsNorm(weights[0], epsilons.pop())

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mul(x, self._scale(x)).mul_(self.weight)

    def _scale(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()

    def backward(self, dy: Tensor, x: Tensor) -> Tensor:
        """d x; consumes `dy`."""
        scale = self._scale(x)
        dy.mul_(self.weight)
        along = torch.linalg.vecdot(dy, x)[..., None].mul_(scale**3).div_(x.shape[-1])
        return dy.mul_(scale).addcmul_(x, along, value=-1)


class Parts(NamedTuple):
    """A layer's, by what they do. `heads` norms queries and keys, where the model does: weights
    (Hq + H, D)."""

    before: RmsNorm
    qkv: tuple[Any, Any, Any]
    heads: RmsNorm | None
    out: Any
    between: RmsNorm
    gate_up: tuple[Any, Any]
    down: Any
    act: Any

    @staticmethod
    def of(layer: Any, queries: int, keys: int) -> Parts:
        """TypeError for a layer of another structure."""
        attention, mlp = layer.self_attn, layer.mlp
        inside = {name for name, _ in attention.named_children()}
        if (
            {name for name, _ in layer.named_children()} != LAYER
            or inside - NORMS != ATTENTION
            or {name for name, _ in mlp.named_children()} != MLP
        ):
            raise TypeError("another structure")
        heads = None
        if inside & NORMS:
            heads = RmsNorm.of(attention.q_norm, attention.k_norm, repeats=(queries, keys))
        return Parts(
            before=RmsNorm.of(layer.input_layernorm),
            qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
            heads=heads,
            out=attention.o_proj,
            between=RmsNorm.of(layer.post_attention_layernorm),
            gate_up=(mlp.gate_proj, mlp.up_proj),
            down=mlp.down_proj,
            act=mlp.act_fn,
        )
