"""What a token costs as things grow: batch, context, adapters, sessions, spans a datum.

    batch      1 to 256 rows: a decode step, and learning from as many datums of 128 tokens
    context    64 to 4,096 tokens before: a decode step of 4 rows, and learning from one datum
    adapters   1 to 64 adapters of rank 32 in flight together: a decode step of 64 rows
    sessions   200 samples of 16 tokens spread over 1 to 200 open sessions: the server's CPU
    spans      1 to 1,000 provenance spans in a datum of 1,064 tokens: the server's CPU

All in CPU time with one thread an operation, so that what waits for others does not count: batch,
context and adapters of the engine; sessions and spans of a whole server process, SDK and HTTP
before it. "flat" is within 15 % of the least. `--only adapters,spans` runs some.

    python -m benchmarks.growth
    python -m benchmarks.growth --model smollm2 --rounds 1 --only batch,adapters
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tinker
import torch

from benchmarks.engines import TARGET, drawing, load, prompts_of, sampling
from benchmarks.learning import weighted
from benchmarks.report import Report, arguments, finish, model_folder, new_report, read
from benchmarks.served import NAME, Server, served
from benchmarks.turns import Contender, seconds_of
from trimtab.engine.models import BaseModel
from trimtab.engine.torch_learner import TorchLearner
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.types import LoraConfig, TrainingBatch, WeightsRef

FLAT, RANK, PROMPT, FEW, MANY = 1.15, 32, 64, 2, 26
BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (64, 256, 1024, 4000)
ADAPTERS, SESSIONS, SPANS = (1, 4, 16, 64), (1, 10, 50, 200), (1, 10, 100, 1000)
Costs = dict[int, float]  # of a token, by how much there was


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    options = read(parser)
    torch.set_num_threads(1)
    report = new_report(options, cpu=True)
    with model_folder(options.model) as path:
        for kind in options.only.split(","):
            print(f"growing {kind}", file=sys.stderr, flush=True)
            report |= KINDS[kind](path, options)
    finish(report, options.json)


def told(costs: Costs) -> Report:
    """Microseconds a token, and how much more than at the least."""
    least = min(costs.values())
    report: Report = {f"{n}, µs a token": 1e6 * cost for n, cost in costs.items()}
    report["most over least"] = max(costs.values()) / least
    report["flat"] = "yes" if report["most over least"] <= FLAT else "no"
    return report


def in_turn(cost_of: dict[int, Callable[[], float]], rounds: int) -> Costs:
    """Medians over rounds in which every size has its turn, after one to warm up."""
    for cost in cost_of.values():
        cost()
    found: dict[int, list[float]] = {n: [] for n in cost_of}
    for _ in range(rounds):
        for n, cost in cost_of.items():
            found[n].append(cost())
    return {n: statistics.median(costs) for n, costs in found.items()}


# ------------------------------------------------------------------ the engine


def batch(path: Path, options: argparse.Namespace) -> Report:
    base = load(path)
    with sampling(base) as sampler:
        decoding = in_turn(
            {n: token_cost(sampler, base, rows=n, prompt=PROMPT) for n in BATCHES}, options.rounds
        )
    learning = in_turn(
        {n: learning_cost(base, datums=n, length=128) for n in BATCHES}, options.rounds
    )
    return {"batch: decoding": told(decoding), "batch: learning": told(learning)}


def context(path: Path, options: argparse.Namespace) -> Report:
    base = load(path)
    with sampling(base) as sampler:
        decoding = in_turn(
            {n: token_cost(sampler, base, rows=4, prompt=n) for n in CONTEXTS}, options.rounds
        )
    learning = in_turn(
        {n: learning_cost(base, datums=1, length=n) for n in CONTEXTS}, options.rounds
    )
    return {"context: decoding": told(decoding), "context: learning": told(learning)}


def adapters(path: Path, options: argparse.Namespace) -> Report:
    """The n-th adapter's share is what it adds to a decode step, over the step with one."""
    base = load(path)
    rows = max(ADAPTERS)
    with sampling(base) as sampler, tempfile.TemporaryDirectory() as folder:
        names = published(base, sampler, Path(folder), rows)
        costs = in_turn(
            {
                n: token_cost(sampler, base, rows=rows, prompt=PROMPT, targets=names[:n])
                for n in ADAPTERS
            },
            options.rounds,
        )
    report = told(costs)
    for n in ADAPTERS[1:]:
        report[f"the {n}th's share of the first"] = (costs[n] / costs[1] - 1) / (n - 1)
    return {f"adapters: decoding {rows} rows": report}


def published(base: BaseModel, sampler: TorchSampler, folder: Path, count: int) -> list[str]:
    learner = TorchLearner(base)
    learner.create("m", LoraConfig(rank=RANK, seed=0, train_unembed=False))
    names = [f"v{i}" for i in range(count)]
    for name in names:
        learner.save_adapter("m", folder / name)
        sampler.publish(name, WeightsRef(name, base.info.name, folder / name))
    return names


def token_cost(
    sampler: TorchSampler,
    base: BaseModel,
    *,
    rows: int,
    prompt: int,
    targets: Sequence[str] = (TARGET,),
) -> Callable[[], float]:
    """Seconds a token of a decode step: what many tokens take beyond few."""
    fresh = prompts_of(base.info.vocab_size, rows, prompt)
    few, many = (drawing(sampler, fresh, 1, new, targets=targets) for new in (FEW, MANY))

    def cost() -> float:
        taken = [seconds_of(run, time.process_time) for run in (many, few, few, many)]
        return (taken[0] - taken[1] - taken[2] + taken[3]) / (2 * (MANY - FEW) * rows)

    return cost


def learning_cost(base: BaseModel, *, datums: int, length: int) -> Callable[[], float]:
    learner = TorchLearner(base)
    learner.create("m", LoraConfig(rank=RANK, seed=0, train_unembed=False))
    vocabulary = base.info.vocab_size
    ids = np.random.default_rng(0).integers(3, vocabulary, (datums, length + 1))
    data = tuple(weighted(row, 0, vocabulary) for row in ids)
    batch = TrainingBatch(1, data, "cross_entropy", {})

    def cost() -> float:
        taken = seconds_of(lambda: learner.forward_backward("m", batch), time.process_time)
        learner.clear_window("m")
        return taken / (datums * length)

    return cost


# ------------------------------------------------------------------ the server


def sessions(path: Path, options: argparse.Namespace) -> Report:
    requests, new = max(SESSIONS), 16
    with served(path, threads=1) as server:
        services = [server.client() for _ in range(requests)]
        made = [s.create_sampling_client(base_model=NAME) for s in services]
        samplers = [future.result() for future in made]
        costs = in_turn(
            {
                n: server_cost(server, spread(samplers[:n], requests, new), requests * new)
                for n in SESSIONS
            },
            options.rounds,
        )
        for service in services:
            service.close("success")
    return {"sessions: server's CPU": told(costs)}


def spread(samplers: Sequence[tinker.SamplingClient], requests: int, new: int) -> Contender:
    prompts = prompts_of(500, requests, PROMPT)
    params = tinker.SamplingParams(max_tokens=new, stop=[])

    def run() -> int:
        futures = [
            samplers[i % len(samplers)].sample(tinker.ModelInput.from_ints(row), 1, params)
            for i, row in enumerate(prompts().tolist())
        ]
        return sum(len(s.tokens) for f in futures for s in f.result().sequences)

    return run


def server_cost(server: Server, run: Callable[[], object], tokens: int) -> Callable[[], float]:
    def cost() -> float:
        before = server.computed()
        run()
        found = server.computed().since(before)
        return (found.own + found.engine) / tokens

    return cost


def spans(path: Path, options: argparse.Namespace) -> Report:
    sampled = max(SPANS)
    with served(path, threads=1) as server:
        service = server.client()
        made = service.create_lora_training_client(NAME, rank=RANK, train_unembed=False)
        trainer = made.result()
        client = service.create_sampling_client(base_model=NAME).result()
        prompt = list(range(3, 3 + PROMPT))

        def learning(count: int) -> Callable[[], object]:
            params = tinker.SamplingParams(max_tokens=sampled // count, stop=[], seed=0)
            asked = client.sample(tinker.ModelInput.from_ints(prompt), count, params)
            data = [spanned(prompt, asked.result().sequences)]
            return lambda: trainer.forward_backward(data, "importance_sampling").result()

        tokens = PROMPT + sampled - 1
        costs = in_turn(
            {n: server_cost(server, learning(n), tokens) for n in SPANS}, options.rounds
        )
        service.close("success").result()
    return {"spans: server's CPU": told(costs)}


def spanned(prompt: list[int], sequences: Sequence[tinker.SampledSequence]) -> tinker.Datum:
    """One datum of the prompt and of every sequence after it, each under a span of its own."""
    tokens = [t for s in sequences for t in s.tokens]
    logprobs = [p for s in sequences for p in s.logprobs or ()]
    before, first = len(prompt) - 1, sequences[0].sequence_id
    prompt_span, sampled_span = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
    whole = [sampled_span(sequence_id=s.sequence_id, length=len(s.tokens)) for s in sequences]
    last = sequences[-1]
    cut = sampled_span(sequence_id=last.sequence_id, length=len(last.tokens) - 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(prompt + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": prompt[1:] + tokens,
            "logprobs": [0.0] * before + logprobs,
            "advantages": [0.0] * before + [1.0] * len(tokens),
        },
    ).with_provenance(
        model_input=[prompt_span(sequence_id=first, length=before + 1), *whole[:-1], cut],
        loss_fn_inputs=[prompt_span(sequence_id=first, offset=1, length=before), *whole],
    )


KINDS: dict[str, Callable[[Path, argparse.Namespace], Report]] = {
    "batch": batch,
    "context": context,
    "adapters": adapters,
    "sessions": sessions,
    "spans": spans,
}

if __name__ == "__main__":
    main()
