"""A whole RL step: through the official SDK and HTTP, by our engine called directly, and by TRL.

A step publishes the weights, samples 16 prompts x 4 x `--new` tokens from them, and learns from all
of it: one forward_backward of importance_sampling and one optim_step, LoRA of rank 32. The server
is a process of its own, as it is for users. Each pair takes turns; medians over the rounds. TRL's
step is RLOOTrainer's, without a reference model, in an environment of its own
(benchmarks/README.md), and is left out where there is none. The last line is the SDK's step with
`stable_reinforce`, recording and provenance included, against importance_sampling.

    python -m benchmarks.rl_step
    python -m benchmarks.rl_step --model smollm2 --rounds 1
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import tinker

from benchmarks.engines import Prompts, load, prompts_of, sampling
from benchmarks.peers import peer
from benchmarks.report import Report, arguments, finish, model_folder, new_report
from benchmarks.served import NAME, served
from benchmarks.turns import Contender, versus
from trimtab.engine.base import SampleWork
from trimtab.engine.models import BaseModel
from trimtab.engine.torch_learner import TorchLearner
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.types import (
    AdamParams,
    LoraConfig,
    Sample,
    SampledSequence,
    SamplingParams,
    TrainingBatch,
    TrainingDatum,
    WeightsRef,
)

RANK, RATE = 32, 1e-5
PROMPTS, SAMPLES = 16, 4
Loss = Literal["importance_sampling", "stable_reinforce"]


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, help="tokens of a sample; 64, or 16 on a real model")
    options = parser.parse_args()
    if options.new is None:
        options.new = 64 if options.model == "tiny" else 16
    report = new_report(options)
    report["step"] = f"{PROMPTS} x {SAMPLES} x {options.new}, prompts of {options.prompt}"
    with model_folder(options.model) as path:
        report |= measured(path, options)
    finish(report, options.json)


def measured(path: Path, options: argparse.Namespace) -> Report:
    setup = {"model": str(path), "prompts": PROMPTS, "samples": SAMPLES}
    setup |= {"prompt": options.prompt, "new": options.new}
    report: Report = {}
    with served(path) as server:
        service = server.client()
        base = load(path)
        prompts = prompts_of(base.info.vocab_size, PROMPTS, options.prompt)
        sdk = through_sdk(service, prompts, options.new, "importance_sampling")
        with sampling(base) as sampler, tempfile.TemporaryDirectory() as folder:
            direct = called(base, sampler, Path(folder), prompts, options.new)
            report["against the engine called directly"] = told(
                versus(sdk, direct, options.rounds), "engine", options
            )
        with peer("trl", "trl_step.py", setup) as trl:
            if trl is not None:
                pair = versus(sdk, lambda: trl.turn({}), options.rounds)
                report["against TRL"] = told(pair, "TRL", options)
        stable = through_sdk(service, prompts, options.new, "stable_reinforce")
        pair = versus(stable, sdk, options.rounds)
        report["stable_reinforce against importance_sampling, ratio"] = pair["ratio"]
        service.close("success").result()
    return report


def told(pair: dict[str, float], name: str, options: argparse.Namespace) -> Report:
    tokens = PROMPTS * SAMPLES * options.new
    return {
        "SDK and HTTP, s": tokens / pair["one, tok/s"],
        f"{name}, s": tokens / pair["other, tok/s"],
        "ratio": pair["ratio"],
    }


# ------------------------------------------------------------------ through the SDK


def through_sdk(service: tinker.ServiceClient, prompts: Prompts, new: int, loss: Loss) -> Contender:
    made = service.create_lora_training_client(NAME, rank=RANK, train_unembed=False)
    trainer = made.result()
    params = tinker.SamplingParams(max_tokens=new, stop=[])
    record = loss == "stable_reinforce"

    def run() -> int:
        saved = trainer.save_weights_and_get_sampling_client(record_stability_info=record)
        sampler = saved.result()
        rows = prompts().tolist()
        futures = [sampler.sample(tinker.ModelInput.from_ints(r), SAMPLES, params) for r in rows]
        sampled = [(r, s) for r, f in zip(rows, futures, strict=True) for s in f.result().sequences]
        data = [
            datum(row, sequence, 1.0 if i % 2 else -1.0, record)
            for i, (row, sequence) in enumerate(sampled)
        ]
        trained = trainer.forward_backward(data, loss)
        stepped = trainer.optim_step(tinker.AdamParams(learning_rate=RATE))
        trained.result()
        stepped.result()
        return sum(len(s.tokens) for _, s in sampled)

    return run


def datum(
    prompt: list[int], sequence: tinker.SampledSequence, advantage: float, provenance: bool
) -> tinker.Datum:
    before, n, name = len(prompt) - 1, len(sequence.tokens), sequence.sequence_id
    made = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": prompt[1:] + sequence.tokens,
            "logprobs": [0.0] * before + sequence.logprobs,
            "advantages": [0.0] * before + [advantage] * n,
        },
    )
    if not provenance:
        return made
    prompt_span, sampled_span = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
    return made.with_provenance(
        model_input=[
            prompt_span(sequence_id=name, length=before + 1),
            sampled_span(sequence_id=name, length=n - 1),
        ],
        loss_fn_inputs=[
            prompt_span(sequence_id=name, offset=1, length=before),
            sampled_span(sequence_id=name, length=n),
        ],
    )


# ------------------------------------------------------------------ the engine


def called(
    base: BaseModel,
    sampler: TorchSampler,
    folder: Path,
    prompts: Prompts,
    new: int,
) -> Contender:
    learner = TorchLearner(base)
    learner.create("m", LoraConfig(rank=RANK, seed=0, train_unembed=False))
    params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
    numbers = itertools.count()

    def run() -> int:
        version = f"v{next(numbers)}"
        learner.save_adapter("m", folder / version)
        sampler.publish(version, WeightsRef(version, base.info.name, folder / version))
        rows = prompts().astype(np.int32)
        futures = [
            sampler.submit(SampleWork(Sample("bench", i, row, SAMPLES, params), version))
            for i, row in enumerate(rows)
        ]
        sampled = [(r, s) for r, f in zip(rows, futures, strict=True) for s in f.result().sequences]
        sampler.retire(version)
        data = tuple(
            training_datum(row, s, 1.0 if i % 2 else -1.0) for i, (row, s) in enumerate(sampled)
        )
        learner.forward_backward("m", TrainingBatch(1, data, "importance_sampling", {}))
        learner.optim_step("m", AdamParams(learning_rate=RATE))
        return sum(len(s.tokens) for _, s in sampled)

    return run


def training_datum(prompt: np.ndarray, sequence: SampledSequence, advantage: float):
    tokens = np.concatenate([prompt, sequence.tokens])
    before = len(prompt) - 1
    quiet = np.zeros(before, np.float32)
    inputs = {
        "target_tokens": tokens[1:].astype(np.int64),
        "logprobs": np.concatenate([quiet, sequence.logprobs]),
        "advantages": np.concatenate([quiet, np.full(len(sequence.tokens), advantage, np.float32)]),
    }
    return TrainingDatum(tokens[:-1], inputs)


if __name__ == "__main__":
    main()
