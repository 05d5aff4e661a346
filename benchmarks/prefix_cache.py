"""The prefix cache: what it saves where prompts begin alike, and what it costs where none do.

    apart          16 prompts of 64 tokens that share nothing, 4 samples of each: the cost
    at once        16 requests with one prompt of 256 tokens, sent together
    heads          16 prompts of 256 tokens, of which 192 are the same
    conversation   8 conversations of 4 turns, each 64 tokens longer; a turn draws 16 tokens

A sampler with the cache and one without take turns in one process; every round has new prompts.
Medians over the rounds. On a very busy machine count CPU seconds on one thread.

    python -m benchmarks.prefix_cache                  # a tiny random Qwen3 shape, 3.3M parameters
    python -m benchmarks.prefix_cache --model FOLDER --rounds 3 --cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import tiny_qwen3
from trimtab.engine.base import SampleWork
from trimtab.engine.models import BaseModel
from trimtab.engine.sampling_limits import SamplerLimits
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.types import Sample, SamplingParams, WeightsRef

Prompts = list[np.ndarray]
Turn = tuple[Prompts, int, int]  # prompts sent together, samples of each, new tokens


def main() -> None:
    options = arguments()
    if options.cpu:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or tiny_qwen3(Path(folder))
        base = BaseModel.load("bench", path, sampler_dtype="float32")
    samplers = [started(base, on) for on in (True, False)]
    clock = time.process_time if options.cpu else time.perf_counter
    rng = np.random.default_rng(0)
    report = {"model": str(options.model or "tiny qwen3"), "parameters": base.info.parameters}
    for load in (apart, at_once, heads, conversation):
        made = [load(rng, base.info.vocab_size, options.new) for _ in range(options.rounds + 1)]
        report[load.__name__] = found = compared(samplers, made, clock)
        print(
            f"{load.__name__:14} with {found['with, s']:.3f} s, without {found['without, s']:.3f}"
            f" s: x{found['ratio']:.2f}; {found['hit']:.0%} of the prompt tokens were hits"
        )
    for sampler in samplers:
        sampler.stop()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder that transformers loads")
    parser.add_argument("--new", type=int, default=64, help="tokens of a sample, where not said")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="one thread, CPU time")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    return parser.parse_args()


def apart(rng: np.random.Generator, vocab: int, new: int) -> list[Turn]:
    return [(list(rng.integers(3, vocab, (16, 64))), 4, new)]


def at_once(rng: np.random.Generator, vocab: int, new: int) -> list[Turn]:
    return [([rng.integers(3, vocab, 256)] * 16, 1, new)]


def heads(rng: np.random.Generator, vocab: int, new: int) -> list[Turn]:
    head = rng.integers(3, vocab, 192)
    return [([np.append(head, rng.integers(3, vocab, 64)) for _ in range(16)], 1, new)]


def conversation(rng: np.random.Generator, vocab: int, new: int) -> list[Turn]:
    whole = rng.integers(3, vocab, (8, 256))
    return [(list(whole[:, : 64 * turn]), 1, 16) for turn in range(1, 5)]


def started(base: BaseModel, on: bool) -> TorchSampler:
    sampler = TorchSampler(base, limits=SamplerLimits(prefix_cache=on))
    sampler.publish("base", WeightsRef("base", base.info.name))
    sampler.start()
    return sampler


def compared(
    samplers: list[TorchSampler], rounds: list[list[Turn]], clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds with and without, the median of their ratios, and the share of hits. The first round
    warms up; who begins changes."""
    seconds: list[tuple[float, float]] = []
    asked = hit = 0
    for number, turns in enumerate(rounds):
        spent = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            begun = clock()
            for turn in turns:
                hits = run(samplers[which], turn)
                asked, hit = asked + sum(map(len, turn[0])), hit + hits
            spent[which] = clock() - begun
        seconds.append((spent[0], spent[1]))
    with_, without = zip(*seconds[1:], strict=True)
    return {
        "with, s": statistics.median(with_),
        "without, s": statistics.median(without),
        "ratio": statistics.median(b / a for a, b in seconds[1:]),
        "hit": 2 * hit / asked,  # half of it was asked of the sampler without a cache
    }


def run(sampler: TorchSampler, turn: Turn) -> int:
    """Draw all of it; how many tokens were hits?"""
    prompts, samples, new = turn
    params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
    works = [
        SampleWork(Sample("bench", i, prompt.astype(np.int32), samples, params), "base")
        for i, prompt in enumerate(prompts)
    ]
    results = [future.result() for future in [sampler.submit(work) for work in works]]
    return sum(result.prompt_cache_hit_tokens for result in results)


if __name__ == "__main__":
    main()
