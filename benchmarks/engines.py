"""Our engine as the benchmarks call it: a base model, a sampler that runs, requests to it.

Prompts are new at every turn: what a cache remembers of the last turn would not be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.turns import Contender, on_its_own
from trimtab.engine.base import SampleWork
from trimtab.engine.models import BaseModel
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.tiny import quiet
from trimtab.types import Sample, SamplingParams, WeightsRef

Prompts = Callable[[], np.ndarray]  # (prompts, tokens) int64, others at every call
TARGET = "base"
_SEEDS = count()


@on_its_own
def load(path: Path, sampler_dtype: str = "float32") -> BaseModel:
    with quiet():
        return BaseModel.load("bench", path, learner_dtype="float32", sampler_dtype=sampler_dtype)


@on_its_own
def plain(path: Path) -> Any:
    """The model as transformers has it, in float32."""
    with quiet():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@contextmanager
def sampling(base: BaseModel) -> Iterator[TorchSampler]:
    """A sampler that draws from the base model as `TARGET` while the block runs."""
    sampler = on_its_own(TorchSampler)(base)
    sampler.publish(TARGET, WeightsRef(TARGET, base.info.name))
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def prompts_of(vocabulary: int, prompts: int, tokens: int) -> Prompts:
    """Those of one call begin like no other call's."""
    rng = np.random.default_rng(next(_SEEDS))
    return lambda: rng.integers(3, vocabulary, (prompts, tokens))


def drawing(
    sampler: TorchSampler,
    prompts: Prompts,
    samples: int,
    new: int,
    *,
    head_k: int = 0,
    targets: Sequence[str] = (TARGET,),
) -> Contender:
    """Draws `new` tokens for `samples` of each prompt, all at once, from `targets` in turn."""
    params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)

    def run() -> int:
        futures = [
            sampler.submit(
                SampleWork(
                    Sample("bench", i, prompt.astype(np.int32), samples, params),
                    targets[i % len(targets)],
                    head_k,
                )
            )
            for i, prompt in enumerate(prompts())
        ]
        return sum(len(s.tokens) for f in futures for s in f.result().sequences)

    return run
