"""A downloaded adapter put into its base model: W + (alpha / rank) B A, saved for transformers.

Computed in float32 and stored in the base model's dtype, unless another is asked for; in bfloat16
the sum is rounded, so answers then differ from the served adapter's by that rounding. Knows PEFT's
two files and no server.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trimtab.errors import Invalid

MODEL_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
HEAD = "base_model.model."
COPIED = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template.*")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def merge(adapter: Path, base: Path, out: Path, dtype: str = "auto") -> None:
    """Write into `out`, a new folder, the model that `base` is with `adapter` in it.

    `merge(Path("run_weights_final"), Path("/models/Qwen3-0.6B"), Path("merged"))`
    """
    if out.exists():
        raise Invalid(f"{str(out)!r} exists; name a folder that does not")
    config = read_config(adapter)
    pairs = read_pairs(adapter)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", use_safetensors=True)
    stored = model.dtype if dtype == "auto" else DTYPES[dtype]
    model = model.to(torch.float32)
    untie(model, pairs)
    with torch.no_grad():
        for name, (A, B) in pairs.items():
            add(module_of(model, name), name, config["lora_alpha"] / config["r"] * (B @ A))
    model.to(stored).save_pretrained(out)
    for pattern in COPIED:
        for file in base.glob(pattern):
            shutil.copy(file, out / file.name)


def read_config(adapter: Path) -> dict[str, Any]:
    try:
        config = json.loads((adapter / CONFIG_FILE).read_bytes())
        kind, rank = config["peft_type"], config["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Invalid(f"{str(adapter)!r} holds no adapter ({CONFIG_FILE}: {error!r})") from None
    if kind != "LORA" or type(rank) is not int or rank < 1 or config.get("bias") != "none":
        raise Invalid(f"{str(adapter)!r}: only a plain LoRA adapter can be merged")
    return config


def read_pairs(adapter: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A (r, in) and B (out, r) by the module's name."""
    if not (adapter / MODEL_FILE).is_file():
        raise Invalid(f"{str(adapter)!r} has no {MODEL_FILE}; encrypted files are decrypted first")
    found = load_file(adapter / MODEL_FILE)
    modules = {name.removeprefix(HEAD).rsplit(".lora_", 1)[0] for name in found}
    return {
        name: (found[f"{HEAD}{name}.lora_A.weight"], found[f"{HEAD}{name}.lora_B.weight"])
        for name in sorted(modules)
    }


def untie(model: PreTrainedModel, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Give the output head weights of its own where it alone is adapted."""
    head = model.get_output_embeddings()
    adapted = any(module_of(model, name) is head for name in pairs)
    if adapted and head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.get_text_config().tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def module_of(model: PreTrainedModel, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise Invalid(f"the adapter has {name!r}, which the base model has not") from None


def add(module: nn.Module, name: str, delta_OI: Tensor) -> None:
    """Add to a linear's weights; GPT-2's lie the other way round."""
    delta = delta_OI.t() if isinstance(module, Conv1D) else delta_OI
    if module.weight.shape != delta.shape:
        raise Invalid(
            f"the adapter's {name!r} is made for weights of shape {tuple(delta.shape)}; the base"
            f" model's has {tuple(module.weight.shape)}"
        )
    module.weight += delta
