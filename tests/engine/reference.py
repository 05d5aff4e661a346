"""The independent third: plain transformers and PEFT, and the requests that tests send.

N rows of a datum, K alternatives.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from trimtab.engine.torch_learner import TorchLearner
from trimtab.types import AdamParams, ForwardBackwardResult, TrainingBatch, TrainingDatum

RAGGED = (3, 7, 11, 2, 11)


def random_data(
    lengths: Sequence[int] = RAGGED, *, vocab: int = 300, alternatives: int = 0, seed: int = 0
) -> list[TrainingDatum]:
    """cross_entropy datums of random tokens and weights in [0, 1)."""
    rng = np.random.default_rng(seed)
    data = []
    for n in lengths:
        shape = (n, alternatives) if alternatives else (n,)
        inputs = {
            "target_tokens": rng.integers(0, vocab, shape),
            "weights": rng.random(shape, dtype=np.float32),
        }
        data.append(TrainingDatum(rng.integers(0, vocab, n).astype(np.int32), inputs))
    return data


def forward_backward(
    learner: TorchLearner,
    data: Sequence[TrainingDatum],
    *,
    model_id: str = "m",
    seq_id: int = 1,
    loss_fn: str = "cross_entropy",
    forward_only: bool = False,
    **config: float,
) -> ForwardBackwardResult:
    spec = learner.losses[loss_fn]
    full = {name: key.default for name, key in spec.config.items()} | config
    batch = TrainingBatch(seq_id, tuple(data), loss_fn, full, forward_only)
    return learner.forward_backward(model_id, batch)


def train(learner: TorchLearner, steps: int, *, model_id: str = "m", seed: int = 0) -> None:
    """A few large steps, so that A and B are far from where they began."""
    for i in range(steps):
        forward_backward(learner, random_data(seed=seed + i), model_id=model_id)
        learner.optim_step(model_id, AdamParams(learning_rate=0.02))


def window_of(learner: TorchLearner, model_id: str = "m") -> Tensor:
    """The accumulated gradient as one vector."""
    return torch.cat([g.flatten() for g in learner._models[model_id].window.gradients])


def weights_of(learner: TorchLearner, model_id: str = "m") -> Tensor:
    return torch.cat([p.detach().flatten() for p in learner._models[model_id].parameters])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def plain(folder: Path, adapter: Path | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model, eager, and with the adapter of a checkpoint PEFT's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if adapter is None:
        return model.eval()
    tensors = load_file(adapter / "adapter.safetensors")
    modules = sorted({n.removeprefix("base_model.model.").split(".lora_")[0] for n in tensors})
    rank = next(t.shape[0] for n, t in tensors.items() if ".lora_A." in n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's on tied heads
        config = PeftConfig(r=rank, lora_alpha=32, target_modules=modules)
        model = get_peft_model(model, config).eval()
    named = {n.replace(".weight", ".default.weight"): t for n, t in tensors.items()}
    found = model.load_state_dict(named, strict=False)
    assert not found.unexpected_keys
    return model.to(dtype)


def plain_logprobs(model: Any, datum: TrainingDatum) -> Tensor:
    """log-softmax at the targets, shaped like them, one datum alone and unpadded."""
    tokens = torch.tensor(datum.tokens, dtype=torch.long)
    targets = torch.tensor(datum.inputs["target_tokens"])
    logprobs_NV = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
    return logprobs_NV.gather(1, targets.reshape(len(tokens), -1)).view(targets.shape)
