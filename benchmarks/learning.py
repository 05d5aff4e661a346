"""Learning: ours against a plain transformers + PEFT training loop, and beside the matmul floor.

The same float32 weights, the same batch, rank 32 on every linear layer but the output, AdamW; the
two take turns, each in a process of its own, so that the ratio holds on a machine that does other
things too. Medians over the rounds. Peak memory is that of a process after two steps.

Batches are 32 datums of 128 tokens: unrelated ones, or 8 groups of 4 that share a prompt as long as
their completions. The loop computes every datum whole, as such loops do. For `stable_reinforce` the
loop takes importance_sampling's gradient, which costs it what cross_entropy's does.

    python -m benchmarks.learning                    # a tiny random Qwen3 shape, 3.3M parameters
    python -m benchmarks.learning --model smollm2 --rounds 2 --json out.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

from benchmarks.engines import load, plain
from benchmarks.floors import Meter, Shape
from benchmarks.report import Report, arguments, finish, model_folder, new_report, read, with_cpu
from benchmarks.turns import Turn, apart, in_a_process, peak_megabytes
from trimtab.engine.torch_learner import TorchLearner
from trimtab.types import AdamParams, LoraConfig, Stability, TrainingBatch, TrainingDatum

RANK, RATE, HEAD_K, MEMBERS = 32, 1e-4, 8, 4
CASES = (
    ("cross_entropy", "unrelated"),
    ("stable_reinforce", "unrelated"),
    ("cross_entropy", "groups"),
    ("stable_reinforce", "groups"),
)

Step = Callable[[], float]  # one forward_backward and one optim_step; returns the loss


def main() -> None:
    parser = with_cpu(arguments(__doc__, rounds=5))
    parser.add_argument("--datums", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a datum")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    options = read(parser)
    report = new_report(options)
    report |= {"datums": options.datums, "tokens": options.tokens, "rank": RANK}
    with model_folder(options.model) as path:
        made = batches(path, options.datums, options.tokens)
        for loss, form in CASES:
            report[f"{loss}, {form}"] = compare(path, loss, made[form], options)
        if options.memory:
            ids = made["unrelated"]
            peaks = {name: in_a_process(_peak, name, path, ids) for name in MAKERS}
            report["peak memory"] = {f"{name}, MB": peak for name, peak in peaks.items()}
            report["peak memory"]["ratio"] = peaks["ours"] / peaks["transformers + peft"]
    finish(report, options.json)


def batches(path: Path, datums: int, length: int) -> dict[str, np.ndarray]:
    """(datums, length + 1) random ids each: one more than the inputs, so that each has a target."""
    vocabulary = Shape.of(path).vocabulary
    rng = np.random.default_rng(0)
    unrelated = rng.integers(3, vocabulary, (datums, length + 1))
    groups = rng.integers(3, vocabulary, (datums, length + 1))
    for first in range(0, datums, MEMBERS):
        groups[first : first + MEMBERS, : length // 2] = groups[first, : length // 2]
    return {"unrelated": unrelated, "groups": groups}


# ------------------------------------------------------------------ the contenders


def ours(path: Path, ids: np.ndarray, loss: str = "cross_entropy", prompt: int = 0) -> Step:
    """`prompt` inputs of each datum are nobody's to learn."""
    base = load(path)
    learner = TorchLearner(base)
    learner.create("m", LoraConfig(rank=RANK, seed=0, train_unembed=False))
    make = {"cross_entropy": weighted, "stable_reinforce": recorded}[loss]
    data = tuple(make(row, max(0, prompt - 1), base.info.vocab_size) for row in ids)
    config = {"kl_coeff": 0.01} if loss == "stable_reinforce" else {}
    batch = TrainingBatch(1, data, loss, config)

    def run() -> float:
        result = learner.forward_backward("m", batch)
        learner.optim_step("m", AdamParams(learning_rate=RATE))
        return float(result.metrics["loss:sum"])

    return run


def weighted(row: np.ndarray, before: int, vocabulary: int) -> TrainingDatum:
    inputs = {"target_tokens": row[1:], "weights": learned(len(row) - 1, before)}
    return TrainingDatum(row[:-1].astype(np.int32), inputs)


def learned(n: int, before: int) -> np.ndarray:
    return (np.arange(n) >= before).astype(np.float32)


def recorded(row: np.ndarray, before: int, vocabulary: int) -> TrainingDatum:
    """A sampled sequence with a record of random heads, as `stable_reinforce` takes it."""
    n = len(row) - 1
    rng = np.random.default_rng(int(row.sum()))
    sampled_N = learned(n, before).astype(bool)
    logprobs_N = np.where(sampled_N, -np.log(vocabulary), 0.0).astype(np.float32)
    stability = Stability(
        sequence_N=np.where(sampled_N, 0, -1).astype(np.int32),
        recorded_N=sampled_N,
        logprobs_N=np.where(sampled_N, logprobs_N, np.nan).astype(np.float32),
        head_ids_NK=rng.integers(0, vocabulary, (n, HEAD_K)).astype(np.int32),
        head_logprobs_NK=np.where(sampled_N[:, None], -3.0, -np.inf)
        .astype(np.float32)
        .repeat(HEAD_K, 1),
        temperature_N=np.ones(n, np.float32),
        version_step_N=np.where(sampled_N, 0.0, np.nan).astype(np.float32),
    )
    advantages = (sampled_N * rng.choice([-1.0, 1.0])).astype(np.float32)
    inputs = {"target_tokens": row[1:], "logprobs": logprobs_N, "advantages": advantages}
    return TrainingDatum(row[:-1].astype(np.int32), inputs, stability)


def peft_loop(path: Path, ids: np.ndarray, loss: str = "cross_entropy", prompt: int = 0) -> Step:
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    config = PeftConfig(r=RANK, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(plain(path), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0)
    inputs, targets = torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:])
    weights = torch.tensor(learned(targets.shape[1], max(0, prompt - 1))).expand(targets.shape)

    def run() -> float:
        logits = model(inputs).logits
        nll = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        )
        if loss != "cross_entropy":
            nll = -(nll.detach() - nll).exp()  # the ratio to the sampler, on policy
        total = (nll * weights.flatten()).sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return run


MAKERS: dict[str, Callable[..., Step]] = {"ours": ours, "transformers + peft": peft_loop}

# ------------------------------------------------------------------ measuring


def compare(path: Path, loss: str, ids: np.ndarray, options: argparse.Namespace) -> Report:
    """Tokens a second of each, the median of the ratios within a round, and our share of the
    floor measured in that round."""
    shared = shared_tokens(ids)
    own = options.tokens - shared
    groups = [(shared, [own] * MEMBERS)] * (len(ids) // MEMBERS)
    alone = [(0, [own])] * len(ids)
    needed = Shape.of(path).learning_flops(groups if shared else alone, RANK)
    with ExitStack() as stack:
        steps = [
            stack.enter_context(apart(make, path, ids, loss, shared)) for make in MAKERS.values()
        ]
        return _compare(steps, loss, needed, options)


def _compare(
    steps: list[Callable[[], Turn]], loss: str, needed: float, options: argparse.Namespace
) -> Report:
    first, second = (run().value for run in steps)  # also warms both up
    if loss == "cross_entropy" and abs(first - second) > 1e-4 * abs(second):
        sys.exit(f"the two compute different losses before the first update: {first}, {second}")
    meter, seconds, shares = Meter(4096, options.clock), [], []
    for i in range(options.rounds):
        rates = meter()
        pair = [0.0, 0.0]
        for j in (0, 1, 1, 0) if i % 2 else (1, 0, 0, 1):
            turn = steps[j]()
            pair[j] += (turn.cpu if options.cpu else turn.wall) / 2
        seconds.append(pair)
        shares.append(needed / rates.flops / pair[0])
    a, b = (statistics.median(column) for column in zip(*seconds, strict=True))
    trained = options.datums * options.tokens
    return {
        "ours, tok/s": trained / a,
        "transformers + peft, tok/s": trained / b,
        "ratio": statistics.median(y / x for x, y in seconds),
        "share of the floor": statistics.median(shares),
        "needed, GFLOP": needed / 1e9,
    }


def shared_tokens(ids: np.ndarray) -> int:
    """Inputs that the first group's members begin with alike."""
    same = (ids[:MEMBERS] == ids[0]).all(0)
    return int(same.argmin()) if not same.all() else ids.shape[1] - 1


def _peak(name: str, path: Path, ids: np.ndarray) -> float:
    """Of a process that loads the model and takes two steps."""
    run = MAKERS[name](path, ids)
    run()
    run()
    return peak_megabytes()


if __name__ == "__main__":
    main()
