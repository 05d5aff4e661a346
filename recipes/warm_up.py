"""A tiny model made on the spot, taught a little, so that a recipe runs on any CPU in minutes.

The model is random; a few hundred steps of `cross_entropy` on mediocre demonstrations give it
something for a reward to improve. A recipe that is given model= or base_url= does none of this.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chz
import numpy as np
import tinker

import trimtab
from trimtab import tiny
from trimtab.trainer import cli, train
from trimtab.trainer.folder import Folder

NAME = "trimtab/tiny"
Segments = Sequence[tuple[str, bool]]  # text, and whether the model learns to write it
Demonstrate = Callable[[random.Random], Segments]


def run(file: str, words: Sequence[str], demonstrate: Demonstrate, *, steps: int) -> int:
    """What a recipe's `__main__` does; the exit code."""
    elsewhere = any(w.startswith(("model=", "base_url=")) for w in words)
    if elsewhere or os.environ.get("TINKER_BASE_URL") or "--help" in words:
        return cli.main(words, file)
    return cli.told(lambda: _run_tiny(file, words, demonstrate, steps))


def _run_tiny(file: str, words: Sequence[str], demonstrate: Demonstrate, steps: int) -> int:
    config, task = cli.prepare(words, file)
    folder = Path(config.log_path)
    model = tiny.build(folder / "model", tokenizer="characters", context=128)
    with trimtab.local(model=f"{NAME}={model}", data_dir=folder / "server") as service:
        saved = Folder(folder).config() if config.resume else None
        started = _saved_start(saved) or warm_up(service, demonstrate, steps=steps)
        if config.kl_penalty_coef == 0:
            started.pop("reference")
        cli.announce(train(chz.replace(config, model=NAME, **started), task, service=service))
    return 0


def _saved_start(saved: dict[str, Any] | None) -> dict[str, str]:
    return {name: saved[name] for name in ("start_from", "reference")} if saved else {}


def warm_up(
    service: tinker.ServiceClient,
    demonstrate: Demonstrate,
    *,
    steps: int,
    batch: int = 48,
    rate: float = 3e-3,
    rank: int = 32,
) -> dict[str, str]:
    """The options `start_from` and `reference` of a run that begins with the taught model."""
    client = service.create_lora_training_client(NAME, rank=rank, seed=0).result()
    tokenizer, rng = client.get_tokenizer(), random.Random(0)
    for step in range(steps):
        data = [_datum(tokenizer, demonstrate(rng), batch) for _ in range(batch)]
        learned = client.forward_backward(data, "cross_entropy")
        left = min(1.0, 2 * (1 - step / steps))
        stepped = client.optim_step(tinker.AdamParams(learning_rate=rate * left, eps=1e-8))
        loss = learned.result().metrics["loss:sum"]
        stepped.result()
        if (step + 1) % 50 == 0:
            print(f"warm-up {step + 1}/{steps}: loss {loss:.3f} a demonstration", flush=True)
    state = client.save_state("warm-up").result().path
    return {
        "start_from": str(state),
        "reference": str(client.save_weights_for_sampler("warm-up").result().path),
    }


def _datum(tokenizer: Any, segments: Segments, batch: int) -> tinker.Datum:
    tokens: list[int] = []
    weights: list[float] = []
    for text, learned in segments:
        piece = tokenizer.encode(text, add_special_tokens=False)
        tokens += piece
        weights += [learned / batch] * len(piece)
    inputs: Any = {
        "target_tokens": np.array(tokens[1:]),
        "weights": np.array(weights[1:], dtype=np.float32),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
