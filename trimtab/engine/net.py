"""A transformers decoder run on one packed row: tokens and positions in, hidden states out.

M packed rows. The decoder keeps all it knows (embedding scale, rotary kinds, norms, windows); only
attention goes through a plan and every linear of its layers through `LoraLinear`. Knows nothing of
datums, prompts or caches.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trimtab.engine.attention import NAME, AttentionPlan
from trimtab.engine.context import Pass, running
from trimtab.engine.head import Head
from trimtab.engine.lora import AdapterPlan, LoraLinear
from trimtab.errors import Invalid


class Net:
    """One module tree and its head, for one thread. `linears` are the decoder's adaptable linears
    by full name; their `base` (and `head.base`) may be replaced by a faster one."""

    def __init__(self, decoder: nn.Module, head: Head, linears: dict[str, LoraLinear]) -> None:
        self.decoder = decoder
        self.head = head
        self.linears = linears

    def hidden(
        self,
        tokens_M: Tensor,
        positions_M: Tensor,
        attention: AttentionPlan,
        adapters: AdapterPlan,
    ) -> Tensor:
        """(M,) int64 tokens and positions -> (M, hidden), what the head takes."""
        with running(Pass(len(tokens_M), attention, adapters)):
            out = self.decoder(
                input_ids=tokens_M[None], position_ids=positions_M[None], use_cache=False
            )
        return out.last_hidden_state[0]


def build_net(model: PreTrainedModel, output: nn.Linear, dtype: torch.dtype | None = None) -> Net:
    """A Net of its own module tree around `model` and the float32 head weights `output`, sharing
    the model's tensors (converted to `dtype` where the model computes in another)."""
    tree = share(model, dtype or model.dtype)
    tree.set_attn_implementation(NAME)
    if tree.config.get_text_config()._attn_implementation != NAME:
        raise Invalid(
            f"the model's code ({type(model).__name__}) does not let its attention be replaced, so "
            "trimtab cannot run it"
        )
    decoder = tree.get_decoder()
    return Net(decoder, build_head(tree, output), wrap_linears(tree, decoder))


def share(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of the module tree around the same tensors, or around converted ones."""
    memo: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        same = parameter.dtype in (dtype, torch.float32) and model.dtype == dtype
        kept = parameter if same else nn.Parameter(parameter.to(dtype), requires_grad=False)
        memo[id(parameter)] = kept
    return copy.deepcopy(model, memo=memo).eval()


def wrap_linears(tree: nn.Module, decoder: nn.Module) -> dict[str, LoraLinear]:
    """Replace every linear of the decoder's layers by a LoraLinear around it."""
    prefixes = tuple(f"{name}." for name, module in tree.named_modules() if module is decoder)
    found = [
        (name, module)
        for name, module in tree.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name.startswith(prefixes)
    ]
    wrapped = {name: LoraLinear(name, module) for name, module in found}
    for name, module in wrapped.items():
        parent, _, leaf = name.rpartition(".")
        setattr(tree.get_submodule(parent), leaf, module)
    return wrapped


def build_head(tree: PreTrainedModel, output: nn.Linear) -> Head:
    """The output head on `output`, with what the configuration does to its logits."""
    linear = tree.get_output_embeddings()
    name = next(name for name, module in tree.named_modules() if module is linear)
    config = tree.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(name, output, features(output), scale, softcap)


def float32_output(model: PreTrainedModel) -> nn.Linear:
    """The linear that makes the logits, or a float32 copy when it is stored in less."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise Invalid(f"the model ({type(model).__name__}) has no linear output head")
    if linear.weight.dtype == torch.float32:
        return linear
    return copy.deepcopy(linear).float().requires_grad_(False)


def features(linear: nn.Module) -> tuple[int, int]:
    """(in, out) of an nn.Linear or of GPT-2's transposed Conv1D."""
    if isinstance(linear, Conv1D):
        return linear.nx, linear.nf
    return linear.in_features, linear.out_features
