"""What snapshots and commits cost: `python -m crash.cost [NAME=FOLDER]` in tests/.

Trains one model on one base model through the learner alone, and measures a step (a
forward_backward of `--tokens` tokens and an optim_step) without snapshots and with them as often as
the server takes them, written by a thread as there, in turn. Then times commits in both of
SQLite's modes. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from trimtab import tiny
from trimtab.engine.cores import Cores
from trimtab.engine.models import BaseModel
from trimtab.engine.torch_learner import TorchLearner
from trimtab.service import paths
from trimtab.service.settings import ServiceSettings
from trimtab.service.store import Store
from trimtab.types import AdamParams, LoraConfig, TrainingBatch, TrainingDatum


def batch(vocabulary: int, tokens: int, length: int, seq_id: int) -> TrainingBatch:
    rng = np.random.default_rng(seq_id)
    data = []
    for _ in range(max(1, tokens // length)):
        ids = rng.integers(0, vocabulary, length + 1)
        inputs = {"target_tokens": ids[1:].astype(np.int64), "weights": np.ones(length, "float32")}
        data.append(TrainingDatum(ids[:-1].astype(np.int32), inputs))
    return TrainingBatch(seq_id, tuple(data), "cross_entropy", {})


def training(base: BaseModel, tokens: int, rank: int, seconds: float, home: Path) -> dict:
    """Blocks of work with and without snapshots in turn, so that a slow machine is slow to both."""
    learner = TorchLearner(base, cores=Cores(1))
    learner.create("m", LoraConfig(rank=rank, seed=1))
    settings, writer, numbers = ServiceSettings(), ThreadPoolExecutor(1), iter(range(10**9))
    copies, writes, works, times = [], [], [], {True: [], False: []}
    length = min(128, base.info.max_context - 1)

    def step() -> None:
        learner.forward_backward("m", batch(base.info.vocab_size, tokens, length, next(numbers)))
        learner.optim_step("m", AdamParams())

    def snapshot() -> None:
        began = time.perf_counter()
        write = learner.snapshot("m")
        copies.append(time.perf_counter() - began)

        def kept() -> None:
            began, worked = time.perf_counter(), time.thread_time()
            name, _ = paths.write_folder(home, write)
            writes.append(time.perf_counter() - began)
            works.append(time.thread_time() - worked)
            paths.remove_folder(home, name)

        writer.submit(kept)

    step()
    snapshot()
    writer.submit(lambda: None).result()
    cost = copies[0] + works[0]
    apart = max(settings.snapshot_seconds, cost / settings.snapshot_share)  # as the server has it
    end, snapshots = time.monotonic() + seconds, False
    while time.monotonic() < end:
        began, steps = time.perf_counter(), 0
        if snapshots:
            snapshot()
        while time.perf_counter() - began < apart:
            step()
            steps += 1
        times[snapshots].append((time.perf_counter() - began) / steps)
        snapshots = not snapshots
    writer.shutdown()
    plain, kept = (statistics.median(times[which]) for which in (False, True))
    cost = statistics.median(copies) + statistics.median(works)
    return {
        "model": base.info.name, "rank": rank, "tokens": tokens, "blocks": len(times[True]),
        "step_ms": round(1e3 * plain, 1), "step_ms_with_snapshots": round(1e3 * kept, 1),
        "slower_percent": round(100 * (kept / plain - 1), 2),
        "copy_ms": round(1e3 * statistics.median(copies), 2),
        "write_ms": round(1e3 * statistics.median(writes), 1),
        "write_cpu_ms": round(1e3 * statistics.median(works), 1),
        "apart_s": round(apart, 1), "cost_percent": round(100 * cost / apart, 2),
    }  # fmt: skip


def commits(home: Path, count: int = 300) -> dict:
    found = {}
    for mode in ("NORMAL", "FULL"):
        store = Store(home / mode, synchronous=mode)
        times = []
        for i in range(count):
            began = time.perf_counter()
            store.submit(lambda db, i=i: db.execute(
                "INSERT INTO results VALUES (?, zeroblob(2000))", (str(i),))).result()  # fmt: skip
            times.append(time.perf_counter() - began)
        store.close()
        found[f"commit_ms_{mode}"] = round(1e3 * statistics.median(times), 3)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", nargs="?", help="NAME=FOLDER; a tiny random model otherwise")
    options.add_argument("--tokens", type=int, default=1024)
    options.add_argument("--rank", type=int, default=32)
    options.add_argument("--seconds", type=float, default=60.0)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        name, _, path = (chosen.model or f"tiny={tiny.build(home / 'tiny')}").partition("=")
        base = BaseModel.load(name, Path(path), learner_dtype="float32", sampler_dtype="float32")
        found = training(base, chosen.tokens, chosen.rank, chosen.seconds, home / "snapshots")
        print(json.dumps(found | commits(home)))


if __name__ == "__main__":
    main()
