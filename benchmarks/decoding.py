"""A decode step beside its floor, at batches of 1, 4, 16 and 64; int8 beside float32 at 1 and 4.

A step's time is what a request of many tokens takes beyond one of few, over the difference: the
whole loop with its Python, no prompt. The floor (floors.py) is measured in every round, right
before what it is held against; shares are medians of the rounds' shares.

    python -m benchmarks.decoding
    python -m benchmarks.decoding --model smollm2 --steps 12
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from pathlib import Path

from benchmarks.engines import drawing, load, prompts_of, sampling
from benchmarks.floors import Meter, Rates, Shape
from benchmarks.report import Report, arguments, finish, model_folder, new_report, read, with_cpu
from benchmarks.turns import Contender, on_its_own, seconds_of

BATCHES = {1: (1, 1), 4: (4, 1), 16: (16, 1), 64: (16, 4)}  # rows: prompts, samples of each
FEW = 4  # tokens of the short request
INT8 = (1, 4)


def main() -> None:
    parser = with_cpu(arguments(__doc__, rounds=5))
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, help="steps timed; 48, or 12 on a real model")
    options = read(parser)
    steps = options.steps or (48 if options.model == "tiny" else 12)
    report = new_report(options)
    with model_folder(options.model) as path, contextlib.ExitStack() as stack:
        samplers = {}
        for dtype in ("float32", "int8"):
            base = load(path, dtype)
            samplers[dtype] = stack.enter_context(sampling(base))
        measure = Measure(path, options, steps)
        vocabulary = base.info.vocab_size
        for rows, (prompts, samples) in BATCHES.items():
            fresh = prompts_of(vocabulary, prompts, options.prompt)
            pairs = {
                dtype: (drawing(s, fresh, samples, FEW), drawing(s, fresh, samples, FEW + steps))
                for dtype, s in samplers.items()
                if dtype == "float32" or rows in INT8
            }
            report[f"batch {rows}"] = measure(prompts, samples, pairs)
    finish(report, options.json)


class Measure:
    def __init__(self, path: Path, options: argparse.Namespace, steps: int) -> None:
        self._shape = Shape.of(path)
        self._clock = options.clock
        self._meter = Meter(self._shape.weight_bytes, self._clock)
        self._prompt, self._steps, self._rounds = options.prompt, steps, options.rounds

    def __call__(
        self, prompts: int, samples: int, pairs: dict[str, tuple[Contender, Contender]]
    ) -> Report:
        for few, many in pairs.values():
            on_its_own(few)(), on_its_own(many)()
        rates: list[Rates] = []
        steps: dict[str, list[float]] = {dtype: [] for dtype in pairs}
        for _ in range(self._rounds):
            rates.append(self._meter())
            for dtype, pair in pairs.items():
                steps[dtype].append(self._step(*pair))
        middle = FEW + self._steps // 2
        floors = [
            self._shape.decode_seconds(r, prompts, samples, self._prompt, middle) for r in rates
        ]
        share = [max(f) / s for f, s in zip(floors, steps["float32"], strict=True)]
        report: Report = {
            "step, ms": 1000 * statistics.median(steps["float32"]),
            "floor, ms": 1000 * statistics.median(max(f) for f in floors),
            "floor is": "bytes" if floors[0][0] > floors[0][1] else "FLOPs",
            "share of the floor": statistics.median(share),
            "read, GB/s": statistics.median(r.bandwidth for r in rates) / 1e9,
            "matmul, GFLOP/s": statistics.median(r.flops for r in rates) / 1e9,
        }
        if "int8" in steps:
            both = zip(steps["float32"], steps["int8"], strict=True)
            report["int8 step, ms"] = 1000 * statistics.median(steps["int8"])
            report["int8 over float32, ratio"] = statistics.median(a / b for a, b in both)
        return report

    def _step(self, few: Contender, many: Contender) -> float:
        """Seconds of a step: many, few, few, many."""
        taken = [seconds_of(run, self._clock) for run in (many, few, few, many)]
        return (taken[0] - taken[1] - taken[2] + taken[3]) / (2 * self._steps)


if __name__ == "__main__":
    main()
