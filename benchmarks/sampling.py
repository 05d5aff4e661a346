"""Sampling: ours against transformers `generate`, and recording against not recording.

The same float32 weights and the same prompts, the contenders taking turns in one process, so that
the ratios hold on a machine that does other things too. Medians over the rounds.

    python benchmarks/sampling.py                    # a tiny random Qwen3 shape, 3.3M parameters
    python benchmarks/sampling.py --model FOLDER --new 16 --rounds 3 --json out.json
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
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.types import Sample, SamplingParams, WeightsRef

Contender = Callable[[], int]  # runs once, returns the tokens it made


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or tiny_qwen3(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        base = BaseModel.load("bench", path, learner_dtype="float32", sampler_dtype="float32")
    sampler = TorchSampler(base)
    sampler.publish("base", WeightsRef("base", base.info.name))
    sampler.start()
    report = {"model": str(options.model or "tiny qwen3"), "parameters": base.info.parameters}
    for name, prompts, samples in (("16x4", 16, 4), ("one stream", 1, 1)):
        ids = np.random.default_rng(0).integers(3, base.info.vocab_size, (prompts, options.prompt))
        contenders = {
            "ours": ours(sampler, ids, samples, options.new, head_k=0),
            "ours, recording": ours(sampler, ids, samples, options.new, head_k=8),
            "generate": generate(model, ids, samples, options.new),
        }
        report[name] = compare(contenders, options.rounds if prompts > 1 else 2 * options.rounds)
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


def compare(contenders: dict[str, Contender], rounds: int) -> dict[str, float]:
    """Tokens a second of each, its median over rounds in which each takes its turn once, and the
    medians of the ratios within a round."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for i in range(rounds):
        # Turned around every second round, so that no one always follows the same neighbour.
        for name, run in list(contenders.items())[:: 1 if i % 2 else -1]:
            started = time.perf_counter()
            made = run()
            speeds[name].append(made / (time.perf_counter() - started))
    result = {name: statistics.median(values) for name, values in speeds.items()}
    result["ours / generate"] = ratio(speeds["ours"], speeds["generate"])
    result["recording / not"] = ratio(speeds["ours, recording"], speeds["ours"])
    return result


def ratio(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def show(title: str, result: dict[str, float]) -> None:
    print(title)
    for name, value in result.items():
        unit = "" if "/" in name else " tok/s"
        print(f"  {name:16}{value:10.3f}{unit}" if not unit else f"  {name:16}{value:10.0f}{unit}")


if __name__ == "__main__":
    main()
