"""The small real policy of a task: a 2-layer Llama fitted to part-wrong demonstrations, cached.

The fit trains every parameter in plain torch; what comes after, in `run.py`, trains LoRA adapters
on the frozen result through trimtab's engine.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.stability.tasks import TASKS, Task

STEPS = {"reverse": 1500, "modadd": 1500, "sort": 250, "walk": 300, "climb": 900}
BATCH = 64


def base_policy(task_name: str, cache: Path, *, seed: int = 0) -> Path:
    """The folder of the fitted model, made at the first call (about 10 s of one core)."""
    folder = cache / f"{task_name}-{seed}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as tmp:
            _fit(TASKS[task_name], Path(tmp) / "model", seed)
            os.rename(Path(tmp) / "model", folder)
    return folder


def _fit(task: Task, folder: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, 1])
    config = LlamaConfig(
        vocab_size=task.vocab,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(STEPS[task.name]):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50)
        tokens_BT = torch.as_tensor(np.stack([_example(task, rng) for _ in range(BATCH)]))
        logits_BTV = model(tokens_BT[:, :-1]).logits
        start = task.prompt_length - 1
        loss = torch.nn.functional.cross_entropy(
            logits_BTV[:, start:].flatten(0, 1), tokens_BT[:, start + 1 :].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _example(task: Task, rng: np.random.Generator) -> np.ndarray:
    prompt = task.prompt(rng)
    return np.concatenate([prompt, task.demonstration(rng, prompt)]).astype(np.int64)
