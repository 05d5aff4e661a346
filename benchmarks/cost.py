"""What stable_reinforce costs: its loss beside importance_sampling, and recording while sampling.

    learning     tokens a second and peak memory of the two losses on one batch, 32 x 128 tokens
    recording    samples through HTTP and the official SDK with and without record_stability_info,
                 and the bytes the service then holds
    sweeping     the same samples while the service drops 20,000 expired sequences, and while it
                 has none to drop

The two of a pair take turns in one run, so that the ratios hold on a machine that does other things
too; medians over the rounds. Peak memory is measured in a process of its own for each loss.

    python -m benchmarks.cost                          # a tiny random Qwen3 shape, 3.3M parameters
    python -m benchmarks.cost --model FOLDER --rounds 3 --no-recording
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import tinker

import trimtab
from benchmarks.learning import peak_megabytes
from benchmarks.sampling import Contender, tiny_qwen3, versus
from trimtab.engine.models import BaseModel
from trimtab.engine.torch_learner import TorchLearner
from trimtab.service.store import FILE
from trimtab.types import AdamParams, LoraConfig, Stability, TrainingBatch, TrainingDatum

RANK, HEAD_K = 32, 8
EXPIRED = 20_000
LOSSES = ("stable_reinforce", "importance_sampling")


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or tiny_qwen3(Path(folder))
        report: dict[str, object] = {"model": str(options.model or "tiny qwen3")}
        report |= learning(path, options)
        if options.recording and options.rounds:
            report |= recording(path, options)
    for name, value in report.items():
        print(f"  {name:44}{value if isinstance(value, str) else f'{value:10.3f}'}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder that transformers loads")
    parser.add_argument("--datums", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a datum")
    parser.add_argument("--new", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=7, help="0: peak memory alone")
    parser.add_argument("--recording", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    return parser.parse_args()


# ------------------------------------------------------------------ learning


def learning(path: Path, options: argparse.Namespace) -> dict[str, float]:
    shape = (options.datums, options.tokens)
    found = {}
    if options.rounds:
        ours, theirs = (step(path, loss, shape) for loss in LOSSES)
        speed = versus(ours, theirs, options.rounds, time.perf_counter)
        found = {
            "learning: stable_reinforce, tok/s": speed["one, tok/s"],
            "learning: importance_sampling, tok/s": speed["other, tok/s"],
            "learning: ratio of speeds": speed["ratio"],
        }
    peaks = [peak_of(path, loss, shape) for loss in LOSSES]
    return found | {
        "learning: stable_reinforce peak MB": peaks[0],
        "learning: importance_sampling peak MB": peaks[1],
        "learning: ratio of peaks": peaks[0] / peaks[1],
    }


def step(path: Path, loss: str, shape: tuple[int, int]) -> Contender:
    """One forward_backward and one optim_step."""
    base = BaseModel.load("bench", path, learner_dtype="float32")
    learner = TorchLearner(base)
    learner.create("m", LoraConfig(rank=RANK, seed=0, train_unembed=False))
    config = {"kl_coeff": 0.01} if loss == "stable_reinforce" else {}
    batch = TrainingBatch(1, data(base.info.vocab_size, shape), loss, config)

    def run() -> int:
        learner.forward_backward("m", batch)
        learner.optim_step("m", AdamParams(learning_rate=1e-5))
        return shape[0] * shape[1]

    return run


def data(vocabulary: int, shape: tuple[int, int]) -> tuple[TrainingDatum, ...]:
    """Random sequences, all of it sampled, with a record of random heads."""
    rng = np.random.default_rng(0)
    datums, n = shape
    made = []
    for _ in range(datums):
        ids = rng.integers(0, vocabulary, n + 1)
        logprobs_N = np.full(n, -np.log(vocabulary), np.float32)
        stability = Stability(
            sequence_N=np.zeros(n, np.int32),
            recorded_N=np.ones(n, bool),
            logprobs_N=logprobs_N,
            head_ids_NK=rng.integers(0, vocabulary, (n, HEAD_K)).astype(np.int32),
            head_logprobs_NK=np.full((n, HEAD_K), -3.0, np.float32),
            temperature_N=np.ones(n, np.float32),
            version_step_N=np.zeros(n, np.float32),
        )
        inputs = {
            "target_tokens": ids[1:],
            "logprobs": logprobs_N,
            "advantages": rng.choice([-1.0, 1.0], n).astype(np.float32),
        }
        made.append(TrainingDatum(ids[:-1].astype(np.int32), inputs, stability))
    return tuple(made)


def peak_of(path: Path, loss: str, shape: tuple[int, int]) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (path, loss, shape))


def _peak(path: Path, loss: str, shape: tuple[int, int]) -> float:
    run = step(path, loss, shape)
    run()
    run()
    return peak_megabytes()


# ------------------------------------------------------------------ recording


def recording(path: Path, options: argparse.Namespace) -> dict[str, float]:
    """16 prompts of 64 tokens, 4 samples each, through the service."""
    name = "bench/model"
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        served = f"{name}={path}"
        with trimtab.local(model=served, data_dir=data_dir, prefix_cache=False) as service:
            made = [client(service, name, record, options.new) for record in (True, False)]
            speed = versus(made[0], made[1], options.rounds, time.perf_counter)
            swept = sweeping(made[0], data_dir / FILE, options.rounds)
        kept = kept_in(data_dir / FILE)
    return {
        "recording: with, tok/s": speed["one, tok/s"],
        "recording: without, tok/s": speed["other, tok/s"],
        "recording: ratio of speeds": speed["ratio"],
        "recording: bytes of a token's stability part": kept,
        "sweeping: ratio of speeds": swept["ratio"],
        "sweeping: sequences dropped a run": swept["dropped"],
    }


def kept_in(database: Path) -> float:
    """Bytes of log-probabilities and heads that the journal holds for a recorded token."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as db:
        [(size, tokens)] = db.execute(
            "SELECT SUM(LENGTH(logprobs) + LENGTH(head_ids) + LENGTH(head_logprobs)),"
            " SUM(LENGTH(tokens)) / 4 FROM arrays WHERE head_ids IS NOT NULL"
        )
    return float(size / tokens)


def sweeping(run: Contender, database: Path, rounds: int) -> dict[str, float]:
    """Fill the journal with copies of what it holds, sample, let them expire, and sample while they
    are dropped."""
    ratios, dropped = [], []
    for _ in range(rounds):
        fill(database, EXPIRED)
        quiet = seconds(run)
        with sqlite3.connect(database, timeout=60) as db:
            db.execute("UPDATE sequences SET expires_at = 0 WHERE request_id = 'swept'")
        ratios.append(quiet / seconds(run))
        dropped.append(EXPIRED - left(database))
        while left(database):
            time.sleep(0.2)
    return {"ratio": statistics.median(ratios), "dropped": statistics.median(dropped)}


def seconds(run: Contender) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def fill(database: Path, count: int) -> None:
    with sqlite3.connect(database, timeout=60) as db:
        [(name,)] = db.execute(
            "SELECT MAX(sequence_id) FROM arrays WHERE head_ids IS NOT NULL"
            " AND sequence_id NOT LIKE 'swept:%'"
        )
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
        columns = "idx, length, temperature, versions, head_k, finished_at"
        db.execute(
            f"{numbers} INSERT INTO sequences SELECT 'swept:' || i, 'swept', session_id, {columns},"
            " expires_at FROM n, sequences WHERE sequence_id = ?",
            (count, name),
        )
        db.execute(
            f"{numbers} INSERT INTO arrays SELECT 'swept:' || i, tokens, logprobs, head_ids,"
            " head_logprobs FROM n, arrays WHERE sequence_id = ?",
            (count, name),
        )


def left(database: Path) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as db:
        [(count,)] = db.execute("SELECT COUNT(*) FROM sequences WHERE request_id = 'swept'")
    return int(count)


def client(service: tinker.ServiceClient, name: str, record: bool, new: int) -> Contender:
    made = service.create_sampling_client(base_model=name, record_stability_info=record)
    sampler = made.result()
    rng = np.random.default_rng(0)
    prompts = [tinker.ModelInput.from_ints(rng.integers(3, 500, 64).tolist()) for _ in range(16)]
    params = tinker.SamplingParams(max_tokens=new, seed=0, stop=[])

    def run() -> int:
        futures = [sampler.sample(prompt, 4, params) for prompt in prompts]
        return sum(len(s.tokens) for f in futures for s in f.result().sequences)

    return run


if __name__ == "__main__":
    main()
