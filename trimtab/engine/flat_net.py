"""A net for learning: the Llama family's decoder written flat, with its backward pass by hand.

M packed rows, d hidden size, D head size.

Which models it fits is not decided by name: a decoder of this structure is tried on a probe and
taken only if its hidden states are those of the net it replaces. Any other runs through
transformers and autograd. Knows nothing of datums or losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trimtab.engine.attention import AttentionPlan, Rule
from trimtab.engine.fast_net import agrees, rules_of
from trimtab.engine.flat_layer import FlatLayer, normed
from trimtab.engine.joint import Joint
from trimtab.engine.lora import AdapterPlan
from trimtab.engine.net import Net
from trimtab.engine.structure import Parts, RmsNorm


@torch.no_grad()
def flat(net: Net) -> Net:
    """A FlatNet with the numbers of `net`, or `net` itself where its decoder is another kind."""
    try:
        found = FlatNet(net)
        return found if agrees(found, net) else net
    except (AttributeError, KeyError, TypeError, RuntimeError, ValueError):
        return net  # not of this structure


class FlatNet(Net):
    """`net` with another way to its hidden states."""

    def __init__(self, net: Net) -> None:
        super().__init__(net.decoder, net.head, net.linears)
        rules = rules_of(net)
        self._norm = RmsNorm.of(net.decoder.norm)
        self._layers = [layer_of(each, *rules[i]) for i, each in enumerate(net.decoder.layers)]

    def hidden(
        self,
        tokens_M: Tensor,
        positions_M: Tensor,
        attention: AttentionPlan,
        adapters: AdapterPlan,
    ) -> Tensor:
        """(M,) int64 tokens and positions -> (M, d), what the head takes."""
        if len(adapters) > 1 or any(entry[1:] != (0, len(tokens_M)) for entry in adapters):
            return super().hidden(tokens_M, positions_M, attention, adapters)
        adapter = adapters[0][0] if adapters else None
        x_Md = self.decoder.embed_tokens(tokens_M)
        cos, sin = self.decoder.rotary_emb(x_Md[None], positions_M[None])
        half = cos.shape[-1] // 2
        turn = cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous()
        for i, layer in enumerate(self._layers):
            x_Md = layer.forward(i, x_Md, turn, attention, adapter)
        return normed(x_Md, self._norm)


def layer_of(layer: Any, rule: Rule, queries: int, keys: int) -> FlatLayer:
    """TypeError for a layer of another structure."""
    parts = Parts.of(layer, queries, keys)
    probe = torch.linspace(-8, 8, 99)
    if not torch.allclose(parts.act(probe), F.silu(probe)):
        raise TypeError("another activation")
    return FlatLayer(
        before=parts.before,
        qkv=Joint.of(*parts.qkv),
        heads=parts.heads,
        out=Joint.of(parts.out),
        between=parts.between,
        gate_up=Joint.of(*parts.gate_up),
        down=Joint.of(parts.down),
        queries=queries,
        keys=keys,
        rule=rule,
    )
