"""Learning: ours against a plain transformers + PEFT training loop.

The same float32 weights, the same batch, rank 32 on every linear layer but the output, AdamW; the
two take turns in one process, so that the ratio holds on a machine that does other things too.
Medians over the rounds. Peak memory is measured in a process of its own for each.

    python -m benchmarks.learning                    # a tiny random Qwen3 shape, 3.3M parameters
    python -m benchmarks.learning --model FOLDER --rounds 3 --json out.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.sampling import tiny_qwen3
from trimtab.engine.models import BaseModel
from trimtab.engine.torch_learner import TorchLearner
from trimtab.types import AdamParams, LoraConfig, TrainingBatch, TrainingDatum

RANK, RATE = 32, 1e-4

Contender = Callable[[], float]  # one forward_backward and one optim_step; returns the loss


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or tiny_qwen3(Path(folder))
        report: dict[str, object] = {"model": str(options.model or "tiny qwen3")}
        report |= {"datums": options.datums, "tokens": options.tokens}
        ids = tokens(path, options.datums, options.tokens)
        report |= compare({name: make(path, ids) for name, make in MAKERS.items()}, options)
        if options.memory:
            report |= {f"{name} peak MB": peak_of(name, path, ids) for name in MAKERS}
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder that transformers loads")
    parser.add_argument("--datums", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a datum")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    return parser.parse_args()


def tokens(path: Path, datums: int, length: int) -> np.ndarray:
    """Random ids, one more than the inputs, so that every input has a target."""
    config = json.loads((path / "config.json").read_text())
    return np.random.default_rng(0).integers(3, config["vocab_size"], (datums, length + 1))


# ------------------------------------------------------------------ the contenders


def ours(path: Path, ids: np.ndarray) -> Contender:
    learner = TorchLearner(BaseModel.load("bench", path, learner_dtype="float32"))
    learner.create("m", LoraConfig(rank=RANK, seed=0, train_unembed=False))
    data = tuple(
        TrainingDatum(
            row[:-1].astype(np.int32),
            {"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)},
        )
        for row in ids
    )
    batch = TrainingBatch(1, data, "cross_entropy", {})

    def run() -> float:
        result = learner.forward_backward("m", batch)
        learner.optim_step("m", AdamParams(learning_rate=RATE))
        return float(result.metrics["loss:sum"])

    return run


def peft_loop(path: Path, ids: np.ndarray) -> Contender:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(model, PeftConfig(r=RANK, lora_alpha=32, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0)
    inputs, targets = torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:])

    def run() -> float:
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


MAKERS: dict[str, Callable[[Path, np.ndarray], Contender]] = {
    "ours": ours,
    "transformers + peft": peft_loop,
}

# ------------------------------------------------------------------ measuring


def compare(contenders: dict[str, Contender], options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of each and the median of the ratios within a round."""
    losses = {name: run() for name, run in contenders.items()}  # also warms both up
    first, second = losses.values()
    if abs(first - second) > 1e-4 * abs(second):
        sys.exit(f"the two compute different losses before the first update: {losses}")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(options.rounds):
        # Turned around every second round, so that no one always follows the same neighbour.
        for name, run in list(contenders.items())[:: 1 if i % 2 else -1]:
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    trained = options.datums * options.tokens
    speeds = {f"{name} tok/s": trained / statistics.median(s) for name, s in seconds.items()}
    a, b = seconds.values()
    return speeds | {"ratio": statistics.median(y / x for x, y in zip(a, b, strict=True))}


def peak_of(name: str, path: Path, ids: np.ndarray) -> float:
    """The most memory a process that takes two steps ever holds, in MB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (name, path, ids))


def _peak(name: str, path: Path, ids: np.ndarray) -> float:
    run = MAKERS[name](path, ids)
    run()
    run()
    return peak_megabytes()


def peak_megabytes() -> float:
    """Of this process. Linux's ru_maxrss would count what the parent held when it started us."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def show(report: dict[str, object]) -> None:
    print(f"{report['model']}, {report['datums']} x {report['tokens']} tokens, rank {RANK}")
    for name, value in report.items():
        if isinstance(value, float):
            print(f"  {name:30}{value:10.2f}" if name == "ratio" else f"  {name:30}{value:10.0f}")


if __name__ == "__main__":
    main()
