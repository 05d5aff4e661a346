"""CPU that the server spends on a request, beside what its engine spends computing.

Two counts. "own threads": what every thread of the server computed but the learner's, the
sampler's and torch's: HTTP, decoding, checks, journal. "beyond the engine": all that the process
computed, less what the same work takes when the engine is called directly; it includes what the
service does on the engine's threads (encoding results, telling futures), and one stray millisecond
of computing as well. One thread an operation, so that CPU time is work, not waiting; the idle
server's own ticking is part of it. Told for a call of the SDK with all its polls, and for a request
over HTTP.

    python -m benchmarks.overhead
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
import torch

from benchmarks.engines import TARGET, load, prompts_of, sampling
from benchmarks.report import Report, arguments, finish, model_folder, new_report, read
from benchmarks.rl_step import (
    PROMPTS,
    RANK,
    RATE,
    called,
    datum,
    through_sdk,
    training_datum,
)
from benchmarks.served import NAME, Computed, Server, served
from trimtab.engine.base import SampleWork
from trimtab.engine.torch_learner import TorchLearner
from trimtab.types import (
    AdamParams,
    LoraConfig,
    Sample,
    SampledSequence,
    SamplingParams,
    TrainingBatch,
)

Work = Callable[[], object]
PROMPT, NEW = 64, 16
ONE, MANY = "sample of one token", "sample of 64 tokens"
LEARN = "forward_backward and optim_step, one datum"
STEP = f"RL step: {PROMPTS} samples x 4 x {NEW}, and 3 more"


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--requests", type=int, default=40, help="of a kind and round")
    options = read(parser)
    torch.set_num_threads(1)
    count_requests()
    report = new_report(options, cpu=True)
    with model_folder(options.model) as path, served(path, threads=1) as server:
        service = server.client()
        idle = computed_in(server, lambda: time.sleep(2.0))
        report["idle, ms of CPU a second"] = 500 * idle.own
        with engine_works(path) as direct:
            for name, (work, requests) in sdk_works(service).items():
                each = options.requests // requests + 1
                pair = Pair(work, direct[name], requests * each)
                report[name] = compare(server, pair, each, options.rounds)
        service.close("success").result()
    finish(report, options.json)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work by the server and by the engine called directly; `count` calls a round."""

    work: Work
    direct: Work
    count: int


def compare(server: Server, pair: Pair, each: int, rounds: int) -> Report:
    """`each` runs of both a round."""
    pair.work(), pair.direct()
    own, beyond, engine, sent = [], [], [], []
    for _ in range(rounds):
        before = len(SENT)
        found = computed_in(server, lambda: [pair.work() for _ in range(each)])
        started = time.process_time()
        for _ in range(each):
            pair.direct()
        sent.append((len(SENT) - before) / pair.count)
        alone = time.process_time() - started
        own.append(1000 * found.own / pair.count)
        engine.append(1000 * alone / pair.count)
        beyond.append(1000 * (found.own + found.engine - alone) / pair.count)
    requests = statistics.median(sent)
    return {
        "requests over HTTP, a call": requests,
        "own threads, ms a request": statistics.median(own) / requests,
        "own threads, ms a call": statistics.median(own),
        "beyond the engine, ms a call": statistics.median(beyond),
        "the engine called directly, ms a call": statistics.median(engine),
    }


SENT: list[str] = []  # every request over HTTP of this process


def count_requests() -> None:
    """Note what the SDK sends from now on."""
    send = httpx.AsyncClient.send

    async def noted(client: httpx.AsyncClient, request: httpx.Request, **how: Any) -> Any:
        SENT.append(request.url.path)
        return await send(client, request, **how)

    httpx.AsyncClient.send = noted  # type: ignore[method-assign]


def computed_in(server: Server, work: Work) -> Computed:
    before = server.computed()
    work()
    return server.computed().since(before)


# ------------------------------------------------------------------ the same work, twice


def sdk_works(service: tinker.ServiceClient) -> dict[str, tuple[Work, int]]:
    """Name: what is done, and how many requests that is."""
    trainer = service.create_lora_training_client(NAME, rank=RANK, train_unembed=False).result()
    sampler = service.create_sampling_client(base_model=NAME, record_stability_info=True).result()
    row = list(range(3, 3 + PROMPT))
    prompt = tinker.ModelInput.from_ints(row)

    def sample(new: int) -> list[tinker.SampledSequence]:
        params = tinker.SamplingParams(max_tokens=new, stop=[], seed=0)
        return list(sampler.sample(prompt, 1, params).result().sequences)

    [sequence] = sample(PROMPT)
    data = [datum(row, sequence, 1.0, True)]

    def learn() -> None:
        trained = trainer.forward_backward(data, "importance_sampling")
        stepped = trainer.optim_step(tinker.AdamParams(learning_rate=RATE))
        trained.result(), stepped.result()

    step = through_sdk(service, prompts_of(500, PROMPTS, PROMPT), NEW, "importance_sampling")
    return {
        ONE: (lambda: sample(1), 1),
        MANY: (lambda: sample(64), 1),
        LEARN: (learn, 2),
        STEP: (step, PROMPTS + 3),
    }


@contextmanager
def engine_works(path: Path) -> Iterator[dict[str, Work]]:
    """The same by the names of `sdk_works`, from the engine itself."""
    base = load(path)
    learner = TorchLearner(base)
    learner.create("m", LoraConfig(rank=RANK, seed=0, train_unembed=False))
    row = np.arange(3, 3 + PROMPT, dtype=np.int32)
    numbers = itertools.count()

    def sample(new: int) -> SampledSequence:
        params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
        request = Sample("bench", next(numbers), row, 1, params)
        return sampler.submit(SampleWork(request, TARGET, 8)).result().sequences[0]

    def learn() -> None:
        learner.forward_backward("m", TrainingBatch(1, data, "importance_sampling", {}))
        learner.optim_step("m", AdamParams(learning_rate=RATE))

    with sampling(base) as sampler, tempfile.TemporaryDirectory() as folder:
        data = (training_datum(row, sample(PROMPT), 1.0),)
        prompts = prompts_of(500, PROMPTS, PROMPT)
        step = called(base, sampler, Path(folder), prompts, NEW)
        yield {ONE: lambda: sample(1), MANY: lambda: sample(64), LEARN: learn, STEP: step}


if __name__ == "__main__":
    main()
