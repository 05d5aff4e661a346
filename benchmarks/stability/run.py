"""One cell: reinforcement learning of one small policy, through trimtab's own engine.

The sampler draws from the weights of `staleness` optimizer steps ago, in the cell's numerics; the
learner stays in float32. What the server's provenance would hand the loss (the record of each
sequence) is built here from the same records. Every random stream hangs on the cell's seed alone,
so that cells of one seed see the same prompts whatever their loss.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from benchmarks.stability.cells import Cell
from benchmarks.stability.merged import BITS, MergedSampler
from benchmarks.stability.policy import base_policy
from benchmarks.stability.tasks import TASKS, Task, advantages
from benchmarks.stability.variants import SCORED, VARIANTS
from trimtab.engine.base import SampleWork
from trimtab.engine.models import BaseModel
from trimtab.engine.torch_learner import TorchLearner
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.losses import LOSSES
from trimtab.losses.experimental import EXPERIMENTAL
from trimtab.types import (
    AdamParams,
    LoraConfig,
    Sample,
    SampledSequence,
    SamplingParams,
    Stability,
    TrainingBatch,
    TrainingDatum,
    WeightsRef,
)

PROMPTS, GROUP, STEPS, WARMUP = 6, 6, 96, 8
EVALUATE_EVERY, EVALUATION_PROMPTS = 8, 96
LEARNING_RATE = 3e-3
RANK = 32


def _load(folder: Path, numerics: str) -> BaseModel:
    return BaseModel.load("bench/policy", folder, learner_dtype="float32", sampler_dtype=numerics)


def _sampler(numerics: str, folder: Path, scratch: Path) -> TorchSampler | MergedSampler:
    if numerics in BITS:
        return MergedSampler(folder, scratch, numerics, RANK)
    return TorchSampler(_load(folder, numerics))


class Policy:
    """Learner, the coarse sampler it is trained with, and the exact one it is judged with."""

    def __init__(self, cell: Cell, cache: Path, scratch: Path) -> None:
        folder = base_policy(cell.task, cache)
        self.exact_base = _load(folder, "float32")
        losses = LOSSES | EXPERIMENTAL | VARIANTS
        self.learner = TorchLearner(
            self.exact_base, micro_batch_tokens=4096, max_lora_rank=128, losses=losses
        )
        self.config = {k: v.default for k, v in losses[cell.loss].spec.config.items()}
        self.sampler = _sampler(cell.numerics, folder, scratch)
        self.exact = TorchSampler(self.exact_base)
        self.scratch, self.cell = scratch, cell
        self.learner.create("policy", LoraConfig(rank=RANK, seed=cell.seed))

    def __enter__(self) -> Policy:
        self.sampler.start()
        self.exact.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.sampler.stop()
        self.exact.stop()

    def publish(self, step: int) -> None:
        folder = self.scratch / f"v{step}"
        self.learner.save_adapter("policy", folder)
        ref = WeightsRef(f"v{step}", "bench/policy", folder, step)
        self.sampler.publish(ref.version, ref)
        self.exact.publish("newest", ref)
        self.sampler.retire(f"v{step - self.cell.staleness - 2}")

    def scored(self, data: list[TrainingDatum], version: int) -> list[TrainingDatum]:
        """The data with what the learner's arithmetic gives on the sampling weights."""
        self.learner.load_state("scorer", self.scratch / f"v{version}", optimizer=False)
        zeros = [
            replace(d, inputs={**d.inputs, "advantages": 0 * d.inputs["advantages"]}) for d in data
        ]
        batch = TrainingBatch(0, tuple(zeros), "importance_sampling", {}, forward_only=True)
        logprobs = self.learner.forward_backward("scorer", batch).logprobs
        return [
            replace(d, inputs={**d.inputs, SCORED: p}) for d, p in zip(data, logprobs, strict=True)
        ]


SCORING = {name for name in VARIANTS if "/b" in name}


def run(cell: Cell, cache: Path) -> dict[str, object]:
    """Train one cell and return its figures (a flat JSON-able dict)."""
    task = TASKS[cell.task]
    with tempfile.TemporaryDirectory() as scratch, Policy(cell, cache, Path(scratch)) as policy:
        policy.publish(0)
        curve, norms, kls, log = [evaluate(task, policy, 0)], [], [], []
        for step in range(STEPS):
            version = max(0, step - cell.staleness)
            data = rollouts(task, policy, step, version)
            if cell.loss in SCORING:
                data = policy.scored(data, version)
            result = policy.learner.forward_backward(
                "policy", TrainingBatch(step, tuple(data), cell.loss, policy.config)
            )
            rate = LEARNING_RATE * cell.lr_scale * min(1.0, (step + 1) / WARMUP)
            try:
                stepped = policy.learner.optim_step("policy", AdamParams(learning_rate=rate))
            except ValueError as error:  # a non-finite gradient: the run is over, and counted
                log.append(str(error))
                break
            norms.append(stepped.metrics["grad_norm"])
            kls.append(kl_of(data, result.logprobs))
            policy.publish(step + 1)
            if (step + 1) % EVALUATE_EVERY == 0:
                curve.append(evaluate(task, policy, step + 1))
    final = float(np.mean(curve[-3:])) if not log else 0.0
    return asdict(cell) | {
        "start": curve[0],
        "final": final,
        "area": float(np.mean(curve)),
        "curve": curve,
        "max_grad_norm": float(np.max(norms, initial=0.0)),
        "max_kl": float(np.max(kls, initial=0.0)),
        "end_kl": float(np.mean(kls[-8:])) if kls else math.nan,
        "non_finite": bool(log),
    }


def rollouts(task: Task, policy: Policy, step: int, version: int) -> list[TrainingDatum]:
    rng = np.random.default_rng([policy.cell.seed, 11, step])
    prompts = [task.prompt(rng).astype(np.int32) for _ in range(PROMPTS)]
    futures = [
        policy.sampler.submit(
            SampleWork(_request(task, p, GROUP, int(rng.integers(2**62))), f"v{version}",
                       policy.cell.head_k)
        )
        for p in prompts
    ]  # fmt: skip
    data = []
    for prompt, pending in zip(prompts, futures, strict=True):
        sequences = pending.result().sequences
        rewards_G = np.array([task.reward(prompt, s.tokens) for s in sequences])
        for sequence, advantage in zip(sequences, advantages(task, rewards_G), strict=True):
            data.append(datum(prompt, sequence, float(advantage), version))
    return data


def _request(task: Task, prompt: np.ndarray, samples: int, seed: int) -> Sample:
    params = SamplingParams(max_tokens=task.answer_length, seed=seed, ignore_eos=True)
    return Sample("bench", 0, prompt, samples, params, record_stability_info=True)


def datum(prompt: np.ndarray, s: SampledSequence, advantage: float, version: int) -> TrainingDatum:
    """What a client and the server's provenance make of one sampled sequence."""
    before = len(prompt) - 1

    def rows(values: np.ndarray, fill: float, dtype: str) -> np.ndarray:
        padding = np.full((before, *values.shape[1:]), fill, dtype)
        return np.concatenate([padding, values.astype(dtype)])

    n = len(s.tokens)
    assert s.head is not None
    return TrainingDatum(
        tokens=np.concatenate([prompt, s.tokens[:-1]]).astype(np.int32),
        inputs={
            "target_tokens": np.concatenate([prompt[1:], s.tokens]).astype(np.int64),
            "logprobs": rows(s.logprobs, 0, "float32"),
            "advantages": rows(np.full(n, advantage), 0, "float32"),
            "sequence_ratio_mask": rows(np.ones(n), 0, "float32"),
        },
        stability=Stability(
            sequence_N=rows(np.zeros(n), -1, "int32"),
            recorded_N=rows(np.ones(n, bool), 0, "bool"),
            logprobs_N=rows(s.logprobs, math.nan, "float32"),
            head_ids_NK=rows(s.head.ids, 0, "int32"),
            head_logprobs_NK=rows(s.head.logprobs, -math.inf, "float32"),
            temperature_N=rows(np.ones(n), 1, "float32"),
            version_step_N=rows(np.full(n, version), math.nan, "float32"),
        ),
    )


def kl_of(data: list[TrainingDatum], logprobs: tuple[np.ndarray, ...]) -> float:
    """Mean log q - log p over the sampled tokens of the batch, in nats."""
    gaps = [
        (d.inputs["logprobs"] - p)[d.inputs["sequence_ratio_mask"] > 0]
        for d, p in zip(data, logprobs, strict=True)
    ]
    return float(np.mean(np.concatenate(gaps)))


def evaluate(task: Task, policy: Policy, step: int) -> float:
    """Mean quality of the float32 learner at temperature 1, one sample for each of 96 prompts."""
    rng = np.random.default_rng([policy.cell.seed, 12])
    prompts = [task.prompt(rng).astype(np.int32) for _ in range(EVALUATION_PROMPTS)]
    futures = [
        policy.exact.submit(SampleWork(_request(task, p, 1, 7_000 + i), "newest"))
        for i, p in enumerate(prompts)
    ]
    return float(
        np.mean(
            [
                task.quality(p, f.result().sequences[0].tokens)
                for p, f in zip(prompts, futures, strict=True)
            ]
        )
    )
