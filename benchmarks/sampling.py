"""Sampling: ours against transformers `generate`, and recording against not recording.

The same float32 weights and the same prompts, the contenders taking turns in one process, so that
the ratios hold on a machine that does other things too. Medians over the rounds. All rounds ask the
same prompts, so the prefix cache is off. On a very busy machine count CPU seconds on one thread
instead of the clock's.

    python benchmarks/sampling.py                    # a tiny random Qwen3 shape, 3.3M parameters
    python benchmarks/sampling.py --model FOLDER --new 16 --rounds 3 --json out.json
    python benchmarks/sampling.py --cpu
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
from transformers import AutoModelForCausalLM

from trimtab import tiny
from trimtab.engine.base import SampleWork
from trimtab.engine.models import BaseModel
from trimtab.engine.sampling_limits import SamplerLimits
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.types import Sample, SamplingParams, WeightsRef

Contender = Callable[[], int]  # runs once, returns the tokens it made


def main() -> None:
    options = arguments()
    if options.cpu:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or tiny_qwen3(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        base = BaseModel.load("bench", path, learner_dtype="float32", sampler_dtype="float32")
    sampler = TorchSampler(base, limits=SamplerLimits(prefix_cache=False))
    sampler.publish("base", WeightsRef("base", base.info.name))
    sampler.start()
    report = {"model": str(options.model or "tiny qwen3"), "parameters": base.info.parameters}
    clock = time.process_time if options.cpu else time.perf_counter
    for name, prompts, samples in (("16x4", 16, 4), ("one stream", 1, 1)):
        ids = np.random.default_rng(0).integers(3, base.info.vocab_size, (prompts, options.prompt))
        plain = ours(sampler, ids, samples, options.new, head_k=0)
        recording = ours(sampler, ids, samples, options.new, head_k=8)
        theirs = generate(model, ids, samples, options.new)
        rounds = options.rounds if prompts > 1 else 2 * options.rounds
        report[name] = {
            "ours / generate": versus(plain, theirs, rounds, clock),
            "recording / not": versus(recording, plain, rounds, clock),
        }
        show(f"{name}x{options.new} (prompt {options.prompt})", report[name])
    sampler.stop()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder that transformers loads")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="one thread, CPU time")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    return parser.parse_args()


def tiny_qwen3(folder: Path) -> Path:
    return tiny.build(
        folder / "tiny",
        architecture="qwen3",
        hidden=256,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate=768,
        vocab_size=512,
        context=2048,
        tied=False,
        init_std=0.02,
    )


def ours(sampler: TorchSampler, ids: np.ndarray, samples: int, new: int, head_k: int) -> Contender:
    params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
    requests = [
        Sample("bench", i, prompt.astype(np.int32), samples, params) for i, prompt in enumerate(ids)
    ]

    def run() -> int:
        futures = [sampler.submit(SampleWork(r, "base", head_k)) for r in requests]
        return sum(len(s.tokens) for f in futures for s in f.result().sequences)

    return run


def generate(model: torch.nn.Module, ids: np.ndarray, samples: int, new: int) -> Contender:
    prompts = torch.tensor(ids)

    def run() -> int:
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            num_return_sequences=samples,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        return out[:, prompts.shape[1] :].numel()

    return run


def versus(
    one: Contender, other: Contender, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Tokens a second of each, and the median over rounds of one's speed over the other's. A round
    is one, other, other, one, so that neither always finds the other's data in the caches."""
    speeds: dict[Contender, list[float]] = {one: [], other: []}
    one(), other()
    for _ in range(rounds):
        seconds = {one: 0.0, other: 0.0}
        for run in (one, other, other, one):
            started = clock()
            made = run()
            seconds[run] += clock() - started
        for run in (one, other):
            speeds[run].append(2 * made / seconds[run])
    pairs = zip(speeds[one], speeds[other], strict=True)
    return {
        "one, tok/s": statistics.median(speeds[one]),
        "other, tok/s": statistics.median(speeds[other]),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def show(title: str, results: dict[str, dict[str, float]]) -> None:
    print(title)
    for name, found in results.items():
        one, other, ratio = found.values()
        print(f"  {name:16} {one:8.0f} / {other:.0f} tok/s = {ratio:.3f}")


if __name__ == "__main__":
    main()
