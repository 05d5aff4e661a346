"""A service with real SQLite and engines whose arithmetic can be done in the head.

The learner keeps one number a model: forward_backward adds the sum of its target tokens to the
window, optim_step adds learning_rate * window to the weight. So the order and the number of calls
show in the weight. The sampler draws token i of sample s as (seed + s + i) mod V, on a thread.
"""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from trimtab.engine.base import SampleWork
from trimtab.errors import Busy, Invalid, NotFound, Stopping
from trimtab.service.core import Engine, Outcome, Promise, Service, ServiceSettings, Store
from trimtab.types import (
    AdamParams,
    BaseModelInfo,
    ConfigKey,
    CreateModel,
    Datum,
    ForwardBackward,
    ForwardBackwardResult,
    LoraConfig,
    LossSpec,
    OptimStep,
    OptimStepResult,
    Request,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingParams,
    TopK,
    TrainingBatch,
    WeightsRef,
)

T = TypeVar("T")
V = 64
BAD = 13  # a target token that makes the learner fail in execution
OWNER = "me"
# Sweeps are called by hand, and a clock that is moved on has been heard ticking all the while.
QUIET = ServiceSettings(sweep_seconds=3600.0, pause_seconds=math.inf)
RATIO = {"target_tokens": "required", "logprobs": "required", "advantages": "required"}
LOSSES = {
    spec.name: spec
    for spec in (
        LossSpec(
            "cross_entropy",
            {"target_tokens": "required", "weights": "optional"},
            allows_alternatives=True,
        ),
        LossSpec("importance_sampling", RATIO, finite_where="advantages"),
        LossSpec(
            "ppo",
            RATIO,
            {"low": ConfigKey(0.8, low=0.0), "high": ConfigKey(1.2, low=0.0)},
            finite_where="advantages",
            ordered=(("low", "high"),),
        ),
        LossSpec(
            "stable_reinforce",
            RATIO,
            {"kl_coeff": ConfigKey(0.01, low=0.0)},
            needs_stability=True,
            finite_where="sampled",
        ),
    )
}


def info(name: str = "tiny") -> BaseModelInfo:
    return BaseModelInfo(name, Path("/"), "llama", V, 32, (1,), 1, "float32", "float32", 16)


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class PickleCodec:
    def encode(self, result: object) -> tuple[bytes, str]:
        return pickle.dumps(result), "application/x-test"

    def decode(self, kind: str, body: bytes) -> Request:
        return pickle.loads(body)


@dataclass
class SumLearner:
    info: BaseModelInfo = field(default_factory=info)
    losses: dict = field(default_factory=lambda: dict(LOSSES))
    weights: dict = field(default_factory=dict)
    windows: dict = field(default_factory=dict)
    steps: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    batches: list = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)
    on_save: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.gate.set()

    def _pass(self) -> None:
        while not self.gate.wait(0.01):
            if self.stopping.is_set():
                raise Stopping("stopping")

    def check_lora(self, config: LoraConfig) -> None:
        if not 1 <= config.rank <= 16:
            raise Invalid(f"lora_config.rank must lie between 1 and 16, found {config.rank}")

    def create(self, model_id: str, config: LoraConfig) -> None:
        self._pass()
        self.calls.append(("create", model_id))
        self.weights[model_id], self.steps[model_id] = 0.0, 0
        self.windows[model_id] = 0.0

    def forward_backward(self, model_id: str, batch: TrainingBatch) -> ForwardBackwardResult:
        self._pass()
        self.calls.append(("forward_backward", model_id, batch.seq_id))
        self.batches.append(batch)
        targets = [datum.inputs["target_tokens"] for datum in batch.data]
        if any((t == BAD).any() for t in targets):
            raise RuntimeError("bad token")
        total = float(sum(t.sum() for t in targets))
        if not batch.forward_only:
            self.windows[model_id] += total
        logprobs = tuple(np.zeros(t.shape, np.float32) for t in targets)
        return ForwardBackwardResult(logprobs, {"loss:sum": total})

    def optim_step(self, model_id: str, params: AdamParams) -> OptimStepResult:
        self._pass()
        self.calls.append(("optim_step", model_id))
        self.weights[model_id] = self.weights[model_id] * 2 + self.windows[model_id]
        self.windows[model_id] = 0.0
        self.steps[model_id] += 1
        return OptimStepResult({"weight": self.weights[model_id]})

    def check_step(self, params: AdamParams) -> None:
        if params.learning_rate < 0:
            raise Invalid(f"adam_params.learning_rate is {params.learning_rate}")

    def clear_window(self, model_id: str) -> None:
        self.calls.append(("clear_window", model_id))
        self.windows[model_id] = 0.0

    def step_count(self, model_id: str) -> int:
        return self.steps[model_id]

    def save_state(self, model_id: str, folder: Path) -> int:
        folder.mkdir()
        state = {"weight": self.weights[model_id], "step": self.steps[model_id]}
        self.on_save()
        return (folder / "state.json").write_text(json.dumps(state))

    save_adapter = save_state

    def snapshot(self, model_id: str) -> Callable[[Path], int]:
        kept = {
            "weight": self.weights[model_id],
            "step": self.steps[model_id],
            "window": self.windows[model_id],
        }

        def write(folder: Path) -> int:
            folder.mkdir()
            self.on_save()
            return (folder / "state.json").write_text(json.dumps(kept))

        return write

    def restore(self, model_id: str, folder: Path) -> None:
        self.calls.append(("restore", model_id))
        state = json.loads((folder / "state.json").read_text())
        self.weights[model_id], self.steps[model_id] = state["weight"], state["step"]
        self.windows[model_id] = state["window"]

    def load_state(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        self.calls.append(("load_state", model_id, optimizer))
        state = json.loads((folder / "state.json").read_text())
        self.weights[model_id], self.steps[model_id] = state["weight"], state["step"]
        self.windows[model_id] = 0.0

    def unload(self, model_id: str) -> None:
        self.calls.append(("unload", model_id))
        self.weights.pop(model_id, None)

    def stop(self) -> None:
        self.stopping.set()


class CountSampler:
    """`held` keeps work waiting; `limit` bounds it."""

    def __init__(self) -> None:
        self.info = info()
        self.targets: dict[str, WeightsRef] = {}
        self.published: list[tuple[str, str]] = []
        self.work: list[SampleWork] = []
        self.held = False
        self.limit = 10_000
        self._waiting: list[tuple[SampleWork, Future]] = []
        self._queue: SimpleQueue = SimpleQueue()
        self._thread: threading.Thread | None = None

    def publish(self, target: str, ref: WeightsRef) -> None:
        if ref.path is not None and not (ref.path / "state.json").exists():
            raise NotFound(f"{ref.path} holds no adapter")
        self.targets[target] = ref
        self.published.append((target, ref.version))

    def retire(self, target: str) -> None:
        self.targets.pop(target)

    def check(self, request: Sample) -> None:
        if not 1 <= len(request.prompt) < self.info.max_context:
            raise Invalid(f"prompt has {len(request.prompt)} tokens; allowed are 1 to 31")

    def submit(self, work: SampleWork) -> Future:
        if len(self._waiting) >= self.limit:
            raise Busy("the sampler's queue is full")
        self.work.append(work)
        future: Future = Future()
        if self.held:
            self._waiting.append((work, future))
        else:
            self._queue.put((work, future))
        return future

    def let_go(self) -> None:
        self.held = False
        for item in self._waiting:
            self._queue.put(item)
        self._waiting.clear()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        for _, future in self._waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(Stopping("stopping"))
        self._waiting.clear()
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            if future.set_running_or_notify_cancel():
                future.set_result(self._sample(work))

    def _sample(self, work: SampleWork) -> SampleResult:
        request, ref = work.request, self.targets[work.target]
        length = request.params.max_tokens or 4
        sequences = []
        for s in range(request.num_samples):
            tokens = ((request.params.seed or 0) + s + np.arange(length)) % (V - 20) + 20
            head = None
            if work.head_k:
                ids = (tokens[:, None] + np.arange(work.head_k)) % V
                logprobs = np.tile(-1.0 - np.arange(work.head_k), (length, 1))
                head = TopK(ids.astype(np.int32), logprobs.astype(np.float32))
            sequences.append(
                SampledSequence(
                    tokens.astype(np.int32),
                    np.full(length, -1.0, np.float32),
                    "length",
                    head=head,
                    versions=((ref.version, length),),
                )
            )
        return SampleResult(tuple(sequences))


@dataclass
class World:
    """One data directory, over which services come and go."""

    path: Path
    settings: ServiceSettings = QUIET
    clock: Clock = field(default_factory=Clock)
    learner: SumLearner = field(default_factory=SumLearner)
    sampler: CountSampler = field(default_factory=CountSampler)

    def build(self) -> Service:
        engine = Engine(info(), self.learner, self.sampler)
        store = Store(self.path)
        return Service(self.settings, store, {"tiny": engine}, PickleCodec(), self.clock)

    @asynccontextmanager
    async def service(self) -> AsyncIterator[Service]:
        service = self.build()
        await service.start()
        try:
            yield service
        finally:
            await service.stop()

    @asynccontextmanager
    async def restarted(self) -> AsyncIterator[Service]:
        """A new process: engines remember nothing."""
        self.learner, self.sampler = SumLearner(), CountSampler()
        async with self.service() as service:
            yield service


def run(coroutine: Coroutine[object, object, T]) -> T:
    return asyncio.run(coroutine)


# --------------------------------------------------------------------------- requests


def datum(targets: list[int], **inputs: list[float]) -> Datum:
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    tokens = np.asarray([20, *targets[:-1]], np.int32)
    return Datum(tokens, {"target_tokens": np.asarray(targets, np.int64), **arrays})


def forward_backward(
    model_id: str, seq_id: int, targets: list[int], *, forward_only: bool = False
) -> ForwardBackward:
    data = (datum(targets),)
    return ForwardBackward(model_id, seq_id, data, "cross_entropy", {}, forward_only)


def optim_step(model_id: str, seq_id: int) -> OptimStep:
    return OptimStep(model_id, seq_id, AdamParams())


def sample(
    sampler: str,
    seq_id: int,
    *,
    n: int = 1,
    seed: int | None = 3,
    prompt: tuple[int, ...] = (20, 21, 22),
    tokens: int = 4,
    temperature: float = 1.0,
    record: bool = False,
) -> Sample:
    params = SamplingParams(tokens, seed, temperature)
    return Sample(
        sampler, seq_id, np.asarray(prompt, np.int32), n, params, record_stability_info=record
    )


KIND = {
    "CreateModel": "create_model",
    "ForwardBackward": "forward_backward",
    "OptimStep": "optim_step",
    "SaveWeights": "save_weights",
    "SaveWeightsForSampler": "save_weights_for_sampler",
    "LoadWeights": "load_weights",
    "UnloadModel": "unload_model",
    "Sample": "sample",
}


async def submit(
    service: Service, request: Request, *, owner: str = OWNER, body: bytes | None = None
) -> Promise:
    body = pickle.dumps(request) if body is None else body
    return await service.submit(owner, request, KIND[type(request).__name__], body)


async def outcome(service: Service, promise: Promise | str, timeout: float = 5.0) -> Outcome:
    request_id = promise if isinstance(promise, str) else promise.request_id
    return await service.retrieve(OWNER, request_id, timeout)


async def result(service: Service, request: Request) -> object:
    """Submit, wait, and read what came back; a failed future fails the test."""
    found = await outcome(service, await submit(service, request))
    assert found.state == "done", found
    return pickle.loads(found.body)


async def error(service: Service, promise: Promise | str) -> str:
    found = await outcome(service, promise)
    assert found.state == "failed", found
    return f"{found.category}: {found.error}"


async def new_model(service: Service, session: str | None = None, number: int = 0) -> str:
    session = session or await service.create_session(OWNER)
    created = await result(service, CreateModel(session, number, "tiny", LoraConfig(4)))
    return created.model_id


async def new_sampler(service: Service, session: str | None = None, number: int = 0) -> str:
    session = session or await service.create_session(OWNER)
    return await service.create_sampling_session(OWNER, session, number, base_model="tiny")
