"""Where the time goes: the operations of a decode step and of a forward and backward pass.

One thread an operation. Of each kind of work: the CPU time of a step, and each operation's share of
the time that torch's profiler saw in operations; Python between them is not in it. It explains the
other benchmarks and is compared with nothing.

    python -m benchmarks.shares
    python -m benchmarks.shares --model smollm2
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engines import drawing, load, prompts_of, sampling
from benchmarks.learning import RANK, weighted
from benchmarks.report import Report, arguments, finish, model_folder, new_report, read
from trimtab.engine.torch_learner import TorchLearner
from trimtab.types import LoraConfig, TrainingBatch

TOP = 8  # operations told by name
BATCHES = {1: (1, 1), 16: (16, 1), 64: (16, 4)}  # rows: prompts, samples of each


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--new", type=int, help="tokens of a sample; 33, or 9 on a real model")
    options = read(parser)
    torch.set_num_threads(1)
    new = options.new or (33 if options.model == "tiny" else 9)
    report = new_report(options, cpu=True)
    with model_folder(options.model) as path:
        base = load(path)
        with sampling(base) as sampler:
            for rows, (prompts, samples) in BATCHES.items():
                fresh = prompts_of(base.info.vocab_size, prompts, 2)
                run = drawing(sampler, fresh, samples, new)
                report[f"a decode step of {rows} rows"] = shares(run, new)
        report["a learner's pass over 16 x 128 tokens"] = shares(learning(base), 1)
    finish(report, options.json)


def learning(base) -> Callable[[], object]:
    learner = TorchLearner(base)
    learner.create("m", LoraConfig(rank=RANK, seed=0, train_unembed=False))
    vocabulary = base.info.vocab_size
    ids = np.random.default_rng(0).integers(3, vocabulary, (16, 129))
    data = tuple(weighted(row, 0, vocabulary) for row in ids)
    batch = TrainingBatch(1, data, "cross_entropy", {})
    return lambda: learner.forward_backward("m", batch)


def shares(run: Callable[[], object], steps: int) -> Report:
    """CPU milliseconds of a step, and the operations' shares of the time in operations."""
    run()
    started = time.process_time()
    run()
    total = time.process_time() - started
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as found:
        run()
    spent = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    whole = sum(spent.values())
    names = sorted(spent, key=lambda name: -spent[name])[:TOP]
    return {"CPU, ms": 1000 * total / steps} | {name: spent[name] / whole for name in names}


if __name__ == "__main__":
    main()
