"""What the recorded head and the trace do on a real vocabulary and on long completions.

`python -m benchmarks.stability.real_model --model PATH` samples completions from a pretrained model
in the sampler's numerics, trains the learner a few steps past them, and computes with the whole
vocabulary what the loss only sees a head of:

    head mass   q's mass on its top k
    drift       L1 norm of the mean push on the logits of a row with A = -1, E_q[w (e_x - p)], less
                the centring over the top k and the rest (k = 0: no centring); 0 would be no drift
    trace       mean T of the tokens, for several decays, by position
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.stability.run import datum
from trimtab.engine.attention import PackedCausal
from trimtab.engine.base import SampleWork
from trimtab.engine.lora import AdapterPlan
from trimtab.engine.models import BaseModel
from trimtab.engine.net import Net
from trimtab.engine.torch_learner import TorchLearner
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.losses.stable_reinforce import leaky_trace
from trimtab.types import (
    AdamParams,
    LoraConfig,
    Sample,
    SampledSequence,
    SamplingParams,
    TrainingBatch,
    WeightsRef,
)

HEADS = (0, 2, 4, 8, 20)
DECAYS = (0.8, 0.9, 0.97)
PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue to a child.",
    "List ten uses for a paper clip.",
    "Describe how to bake bread, step by step.",
)


@torch.no_grad()
def logprobs(net: Net, tokens: np.ndarray, start: int, plan: AdapterPlan) -> Tensor:
    """(T, V) float64 log-probabilities of the rows that predict tokens[start:]."""
    tokens_M = torch.as_tensor(tokens[:-1].astype(np.int64))
    hidden = net.hidden(tokens_M, torch.arange(len(tokens_M)), PackedCausal([len(tokens_M)]), plan)
    rows = [(adapter, 0, len(tokens_M) - start + 1) for adapter, _, _ in plan]
    return net.head.logits(hidden[start - 1 :], rows).double().log_softmax(-1)


def drift(p: Tensor, q: Tensor, k: int) -> Tensor:
    """(T,) L1 norm of the mean push on the logits that centring over the top k leaves."""
    least = torch.minimum(p, q)
    push = least - least.sum(-1, keepdim=True) * p
    if k:
        ids = q.topk(k, -1).indices
        head = torch.zeros_like(p, dtype=torch.bool).scatter_(1, ids, True)
        p_rest = p.masked_fill(head, 0)
        m_rest = torch.minimum(p_rest.sum(-1), q.masked_fill(head, 0).sum(-1))
        cells = torch.where(head, least, 0)
        cells = cells + p_rest / p_rest.sum(-1, keepdim=True).clamp(min=1e-300) * m_rest[:, None]
        push = push - (cells - cells.sum(-1, keepdim=True) * p)
    return push.abs().sum(-1)


def sequences(base: BaseModel, count: int, length: int) -> list[tuple[np.ndarray, SampledSequence]]:
    sampler = TorchSampler(base)
    sampler.start()
    sampler.publish("v0", WeightsRef("v0", base.info.name))
    futures = []
    for i, text in enumerate(PROMPTS):
        chat = [{"role": "user", "content": text}]
        ids = base.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        prompt = np.array(ids["input_ids"] if hasattr(ids, "keys") else ids, np.int32)
        params = SamplingParams(max_tokens=length, seed=i, ignore_eos=True)
        request = Sample("bench", i, prompt, count, params, record_stability_info=True)
        futures.append((prompt, sampler.submit(SampleWork(request, "v0", 20))))
    out = [(prompt, s) for prompt, future in futures for s in future.result().sequences]
    sampler.stop()
    return out


def main(  # noqa: PLR0917 (options of a command)
    model: Annotated[Path, typer.Option(help="folder of a pretrained model with a chat template")],
    sampler_dtype: Annotated[str, typer.Option()] = "int8",
    steps: Annotated[int, typer.Option(help="optimizer steps the learner is ahead")] = 16,
    learning_rate: Annotated[float, typer.Option()] = 1e-4,
    samples: Annotated[int, typer.Option(help="completions of each of 4 prompts")] = 4,
    length: Annotated[int, typer.Option(help="tokens of a completion")] = 256,
) -> None:
    """Head mass, drift and trace of a real model, stale and coarse."""
    base = BaseModel.load("bench/real", model, learner_dtype="float32", sampler_dtype=sampler_dtype)
    learner = TorchLearner(base)
    learner.create("m", LoraConfig(rank=16, seed=0))
    drawn = sequences(base, samples, length)
    report = {"fresh": measure(base, learner, drawn)}
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], len(drawn))
    data = tuple(datum(p, s, a, 0) for (p, s), a in zip(drawn, signs, strict=True))
    for step in range(steps):
        batch = TrainingBatch(step, data, "stable_reinforce", {"kl_coeff": 0.01})
        learner.forward_backward("m", batch)
        learner.optim_step("m", AdamParams(learning_rate=learning_rate))
    report[f"{steps} steps ahead"] = measure(base, learner, drawn)
    print(
        json.dumps({"model": base.info.architecture, "sampler": sampler_dtype} | report, indent=1)
    )


def measure(
    base: BaseModel, learner: TorchLearner, drawn: list[tuple[np.ndarray, SampledSequence]]
) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        adapter = load_adapter(base, learner, Path(folder) / "a")
    mass, drifts = {k: [] for k in HEADS[1:]}, {k: [] for k in HEADS}
    traces, kls = {d: [] for d in DECAYS}, []
    for prompt, sequence in drawn:
        tokens = np.concatenate([prompt, sequence.tokens])
        log_q = logprobs(base.sampler_net, tokens, len(prompt), [])
        log_p = logprobs(base.learner_net, tokens, len(prompt), [(adapter, 0, len(tokens) - 1)])
        q, p = log_q.exp(), log_p.exp()
        kls.append(float((q * (log_q - log_p)).sum(-1).mean()))
        for k in HEADS:
            drifts[k].append(drift(p, q, k).mean().item())
            if k:
                mass[k].append(q.topk(k, -1).values.sum(-1).mean().item())
        x = torch.as_tensor(sequence.tokens.astype(np.int64))[:, None]
        log_r = (log_p.gather(1, x) - log_q.gather(1, x))[:, 0]
        for decay in DECAYS:
            traces[decay].append(leaky_trace(log_r, torch.zeros(len(x), dtype=torch.int32), decay))
    quarter = len(log_r) // 4
    return {
        "KL(q||p)": float(np.mean(kls)),
        "head mass": {k: float(np.mean(v)) for k, v in mass.items()},
        "drift L1": {k: float(np.mean(v)) for k, v in drifts.items()},
        "trace, first and last quarter": {
            d: [float(torch.stack(v)[:, s].mean()) for s in (slice(quarter), slice(-quarter, None))]
            for d, v in traces.items()
        },
    }


def load_adapter(base: BaseModel, learner: TorchLearner, folder: Path):  # type: ignore[no-untyped-def]
    from trimtab.engine import checkpoint

    learner.save_adapter("m", folder)
    saved = checkpoint.read(
        folder,
        base.learner_net,
        base.info.name,
        max_rank=128,
        device=base.device,
        optimizer=False,
    )
    return saved.adapter


if __name__ == "__main__":
    typer.run(main)
