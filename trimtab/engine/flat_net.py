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
from trimtab.engine.flat_layer import FlatLayer, RmsNorm, normed
from trimtab.engine.joint import Joint
from trimtab.engine.lora import AdapterPlan
from trimtab.engine.net import Net

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


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
    attention, mlp = layer.self_attn, layer.mlp
    inside = {name for name, _ in attention.named_children()}
    if (
        {name for name, _ in layer.named_children()} != LAYER
        or inside - NORMS != ATTENTION
        or {name for name, _ in mlp.named_children()} != MLP
    ):
        raise TypeError("another structure")
    probe = torch.linspace(-8, 8, 99)
    if not torch.allclose(mlp.act_fn(probe), F.silu(probe)):
        raise TypeError("another activation")
    heads = None
    if inside & NORMS:
        q, k = RmsNorm.of(attention.q_norm), RmsNorm.of(attention.k_norm)
        weight = torch.cat([q.weight.expand(queries, -1), k.weight.expand(keys, -1)])
        heads = RmsNorm(weight, q.eps)
    return FlatLayer(
        before=RmsNorm.of(layer.input_layernorm),
        qkv=Joint.of(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=heads,
        out=Joint.of(attention.o_proj),
        between=RmsNorm.of(layer.post_attention_layernorm),
        gate_up=Joint.of(mlp.gate_proj, mlp.up_proj),
        down=Joint.of(mlp.down_proj),
        queries=queries,
        keys=keys,
        rule=rule,
    )
