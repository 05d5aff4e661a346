"""What sampler tests share: requests, random adapters on disk, and plain transformers' numbers.

P prompt tokens, T sampled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.engine import checkpoint
from trimtab.engine.adapters import new_adapter
from trimtab.engine.base import SampleWork
from trimtab.engine.cores import Cores
from trimtab.engine.lora import Adapter
from trimtab.engine.models import BaseModel
from trimtab.engine.sampling_limits import SamplerLimits
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.types import (
    LoraConfig,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingParams,
    WeightsRef,
)

WAIT = 60.0
SCORING = {
    "prompt_logprobs",
    "prompt_logprobs_last_n",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
}


def tokens(count: int, seed: int = 0, vocab: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, vocab, count).astype(np.int32)


def request(prompt: np.ndarray, num_samples: int = 1, **options: Any) -> Sample:
    """A request with seed 0 that runs through EOS unless told otherwise."""
    scoring = {name: options.pop(name) for name in SCORING & options.keys()}
    params = SamplingParams(**({"seed": 0, "ignore_eos": True} | options))
    return Sample("s", 0, np.asarray(prompt), num_samples, params, **scoring)


@contextmanager
def sampling(base: BaseModel, *, run: bool = True, **limits: int) -> Iterator[TorchSampler]:
    """A sampler with the base model published as "base"; not `run`: the test calls `step`."""
    sampler = TorchSampler(base, limits=SamplerLimits(**limits), cores=Cores(1))
    sampler.publish("base", WeightsRef("base", base.info.name))
    if run:
        sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


@torch.inference_mode()
def step(sampler: TorchSampler, times: int = 1) -> None:
    """Run the sampler's thread's loop here, as long as there is something to do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(times):
        if sampler._inbox or sampler._loop.busy:
            sampler._next_work()
            sampler._loop.step()
    torch.set_num_threads(threads)


def submit(
    sampler: TorchSampler,
    sample: Sample,
    target: str = "base",
    head_k: int = 0,
    owner: str = "",
) -> Future[SampleResult]:
    return sampler.submit(SampleWork(sample, target, head_k, owner))


def draw(
    sampler: TorchSampler,
    sample: Sample,
    target: str = "base",
    head_k: int = 0,
    owner: str = "",
) -> SampleResult:
    return submit(sampler, sample, target, head_k, owner).result(WAIT)


def random_adapter(base: BaseModel, seed: int) -> Adapter:
    """Rank 4 on every linear, B of a size that moves log-probabilities by tenths."""
    adapter = new_adapter(base.sampler_net, LoraConfig(rank=4, seed=seed), base.device)
    generator = torch.Generator().manual_seed(seed)
    for _, B in adapter.pairs.values():
        B.normal_(0, 0.05, generator=generator)
    return adapter


def save_adapter(base: BaseModel, folder: Path, seed: int) -> Path:
    checkpoint.write(folder, base.info.name, random_adapter(base, seed), steps=0)
    return folder


@torch.no_grad()
def full_logprobs(model: Any, ids: Any, temperature: float = 1.0) -> Tensor:
    """(len, V): log-softmax(logits / temperature) of one plain forward pass."""
    logits = model(input_ids=torch.tensor(ids)[None].long(), use_cache=False).logits[0]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def expected(
    model: Any, prompt: np.ndarray, sequence: SampledSequence, temperature: float = 1.0
) -> Tensor:
    """(T, V): what each sampled token was drawn from."""
    ids = [*prompt.tolist(), *sequence.tokens.tolist()]
    return full_logprobs(model, ids, temperature)[len(prompt) - 1 : -1]


def gap(
    model: Any, prompt: np.ndarray, sequence: SampledSequence, temperature: float = 1.0
) -> float:
    """The worst difference of a sequence's log-probabilities from plain transformers'."""
    full_TV = expected(model, prompt, sequence, temperature)
    at_T = full_TV.gather(1, torch.tensor(sequence.tokens).long()[:, None])[:, 0]
    return float((at_T - torch.tensor(sequence.logprobs)).abs().max())


def same(a: SampledSequence, b: SampledSequence) -> bool:
    return a.tokens.tolist() == b.tokens.tolist()
