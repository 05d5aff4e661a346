"""Base models: weights loaded once, checked against plain transformers, shared by two nets.

A folder of any decoder-only causal language model that transformers loads. The learner's and the
sampler's net are separate module trees around the same tensors, so that two threads may run at
once. Knows nothing of adapters' values, of training or of sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trimtab.engine.base import Progress
from trimtab.engine.kernels import QUANTISED, quantise
from trimtab.engine.net import Net, build_net, float32_output
from trimtab.engine.numerics import DTYPES, choose_dtype
from trimtab.engine.selfcheck import check_architecture, check_net, mismatch, reference
from trimtab.errors import Invalid, NotFound
from trimtab.types import BaseModelInfo

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
MAX_LORA_RANK = 128


@dataclass(frozen=True, eq=False)
class BaseModel:
    """One base model as both engines see it. `tokenizer` is None when the folder has none."""

    info: BaseModelInfo
    tokenizer: Any
    learner_net: Net
    sampler_net: Net
    device: torch.device

    @staticmethod
    def load(
        name: str,
        path: Path,
        *,
        device: str = "cpu",
        learner_dtype: str = "auto",
        sampler_dtype: str = "auto",
        max_context: int | None = None,
        max_lora_rank: int = MAX_LORA_RANK,
        progress: Progress | None = None,
    ) -> BaseModel:
        """Load `path`, a folder or else a hub id, and serve it as `name`.

        Refuses (Invalid) a folder whose weights are incomplete and a model whose numbers, on our
        packed path, are not those of plain transformers. dtype: auto, float32, bfloat16.

            >>> base = BaseModel.load("tiny", Path("/models/tiny"), learner_dtype="float32")
        """
        report = progress or (lambda _what, _done: None)
        where = torch.device(device)
        report(f"{name}: reading the configuration", 0.0)
        config = read_config(path)
        context = context_limit(config, max_context)
        stored = getattr(config, "dtype", None) or torch.float32
        learner = choose_dtype("learner_dtype", learner_dtype, where, stored)
        quantised = sampler_dtype in QUANTISED
        sampler = choose_dtype(
            "sampler_dtype", "float32" if quantised else sampler_dtype, where, stored
        )
        report(f"{name}: reading the weights", 0.05)
        model = read_weights(path, learner, where)
        report(f"{name}: computing what plain transformers computes", 0.7)
        expected = reference(model)
        report(f"{name}: building the nets", 0.8)
        output = float32_output(model)
        learner_net, sampler_net = build_net(model, output), build_net(model, output, sampler)
        report(f"{name}: checking the nets against it", 0.9)
        for net, dtype in ((learner_net, learner), (sampler_net, sampler)):
            seen = check_net(net, expected, dtype)
            check_architecture(model.config.get_text_config(), seen, context)
        if quantised:
            report(f"{name}: rounding the sampler's weights to {sampler_dtype}", 0.95)
            quantise(sampler_net, sampler_dtype)
        tokenizer = read_tokenizer(path)
        info = BaseModelInfo(
            name=name,
            path=path,
            architecture=type(model).__name__,
            vocab_size=learner_net.head.vocab_size,
            max_context=context,
            eos_token_ids=eos_token_ids(model, tokenizer),
            parameters=sum(p.numel() for p in model.parameters()),
            learner_dtype=str(learner).removeprefix("torch."),
            sampler_dtype=sampler_dtype if quantised else str(sampler).removeprefix("torch."),
            sampler_kl=mismatch(sampler_net, learner_net, where),
            max_lora_rank=max_lora_rank,
        )
        report(f"{name}: ready", 1.0)
        return BaseModel(info, tokenizer, learner_net, sampler_net, where)


def read_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=path.is_dir())
    except (OSError, ValueError) as error:
        raise NotFound(
            f"model {str(path)!r} is neither a folder with a config.json that transformers knows "
            f"nor a reachable hub id: {first_line(error)}"
        ) from error


def read_weights(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal language model in plain transformers' eager form, every weight from the file."""
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=path.is_dir(),
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise Invalid(
            f"model {str(path)!r} does not load as a causal language model from safetensors: "
            f"{first_line(error)}"
        ) from error
    absent = sorted(found["missing_keys"]) + sorted(str(x[0]) for x in found["mismatched_keys"])
    if absent:
        raise Invalid(
            f"model {str(path)!r} lacks {len(absent)} of its weights or has them in another shape, "
            f"{absent[0]} first"
        )
    return model.to(device).eval().requires_grad_(False)


def read_tokenizer(path: Path) -> Any:
    """The tokenizer, or None for a folder without the files of one."""
    if path.is_dir() and not any((path / name).exists() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=path.is_dir())


def context_limit(config: Any, asked: int | None) -> int:
    """Positions a sequence may take: the configuration's, no more than `asked`, and no more than
    the length up to which rotary scaling does not depend on the longest sequence of a batch."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None and asked is None:
        raise Invalid("the model's config has no max_position_embeddings; set max_context")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    return min(x for x in (limit, asked) if x is not None)


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """The stops of the generation config and of the tokenizer together, in order."""
    found: set[int] = set()
    for ids in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


__all__ = ["DTYPES", "MAX_LORA_RANK", "BaseModel"]
