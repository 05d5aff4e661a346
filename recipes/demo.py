"""A language model learns a task by reinforcement, through nothing but the official SDK.

    python -m recipes.demo                    a tiny model: demonstrations, then RL, and a control
    python -m recipes.demo --model smollm2    a pretrained model: RL alone

Two algorithms start from the same weights and run side by side: REINFORCE++ and StableReinforce.
`warm_up` and `improve` are what a script of yours would look like; `tasks.py` has prompts and
rewards, `demo_view.py` what is shown. The control gets advantages that belong to other
completions: what it gains, reinforcement did not teach.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal

import tinker

import trimtab
from recipes.demo_view import Run, View
from recipes.tasks import Problem, Task, reward, sorting, sums
from trimtab import modelstore, tiny
from trimtab.trainer.reinforce_pp import ReinforcePPConfig, advantages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True)
class Knobs:
    """A step of RL draws `groups` problems, samples each `group_size` times and updates once, from
    weights `stale` updates old. Warm-up: `warm_steps` batches of `warm_batch` demonstrations.
    `algorithms` are names in ALGORITHMS; a control goes by the last of them."""

    task: Task
    rank: int
    steps: int
    groups: int
    group_size: int
    learning_rate: float
    warm_steps: int = 0
    warm_batch: int = 128
    warm_rate: float = 5e-3
    algorithms: tuple[str, ...] = ("reinforce_pp", "stable_reinforce")
    stale: int = 4
    held_out: int = 200
    eval_every: int = 10


TINY = Knobs(
    task=sorting(), rank=64, steps=60, groups=32, group_size=16, learning_rate=3e-4, warm_steps=250
)
PRETRAINED = Knobs(
    task=sums(),
    rank=16,
    steps=30,
    groups=8,
    group_size=8,
    learning_rate=3e-4,
    algorithms=("stable_reinforce",),
    held_out=64,
)


@dataclass(frozen=True)
class Rollout:
    """One sampled completion of `problem`, and what it earned."""

    problem: Problem
    prompt: list[int]
    sequence: tinker.SampledSequence
    reward: float


Groups = Sequence[Sequence[Rollout]]


# ------------------------------------------------------------------ demonstrations


async def warm_up(
    service: tinker.ServiceClient, model: str, knobs: Knobs, seed: int, view: View
) -> str:
    """Imitate demonstrations with cross_entropy; the path of the saved weights."""
    client = await service.create_lora_training_client(model, rank=knobs.rank, seed=seed)
    words, random = client.get_tokenizer(), Random(f"warm-up {seed}")
    submitted: deque[tuple[int, tinker.APIFuture[tinker.ForwardBackwardOutput]]] = deque()
    for step in range(1, knobs.warm_steps + 1):
        problems = knobs.task.problems(knobs.warm_batch, random)
        data = [demonstration(words, knobs.task, problem, random) for problem in problems]
        rate = knobs.warm_rate * min(1, step / 8) * (1 - step / (knobs.warm_steps + 1))
        submitted.append((step, client.forward_backward(data, "cross_entropy")))
        client.optim_step(tinker.AdamParams(learning_rate=rate))
        while len(submitted) > (2 if step < knobs.warm_steps else 0):  # keep the server busy
            done, result = submitted.popleft()
            view.warmed(seed, done, await result)
    return (await client.save_state(f"warm-{seed}")).path


def demonstration(words: Tokenizer, task: Task, problem: Problem, random: Random) -> tinker.Datum:
    """Learn the completion, not the prompt."""
    prompt = words.encode(problem.prompt)
    tokens = prompt + words.encode(task.demonstrate(problem, random))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt)),
        },
    )


# ------------------------------------------------------------------ reinforcement


async def improve(
    client: tinker.TrainingClient, knobs: Knobs, run: Run, view: View, *, algorithm: Algorithm
) -> None:
    """Sample, reward, update, publish; `knobs.steps` times."""
    seed, kind = run
    words, random = client.get_tokenizer(), Random(f"rl {seed}")
    held_out = knobs.task.problems(knobs.held_out, Random("held out"), held_out=True)
    samplers: deque[tinker.SamplingClient] = deque(maxlen=knobs.stale + 1)
    for step in range(knobs.steps + 1):
        samplers.append(
            await client.save_weights_and_get_sampling_client(
                record_stability_info=algorithm.loss_fn == "stable_reinforce"
            )
        )
        if step % knobs.eval_every == 0 or step == knobs.steps:
            groups = await sample(samplers[-1], words, held_out, knobs.task.max_tokens)
            view.evaluated(run, step, [group[0] for group in groups], words)
        if step == knobs.steps:
            return
        groups = await sample(
            samplers[0],
            words,
            knobs.task.problems(knobs.groups, random),
            knobs.task.max_tokens,
            size=knobs.group_size,
            seed=random.randrange(2**31),
        )
        rollouts = [rollout for group in groups for rollout in group]
        advantages_D_T = algorithm.advantages(groups)
        if kind == "control":
            advantages_D_T = dealt(advantages_D_T, random)
        data = [datum(r, a_T) for r, a_T in zip(rollouts, advantages_D_T, strict=True) if any(a_T)]
        metrics: dict[str, float] = {"age": len(samplers) - 1}
        if data:  # else every group agreed with itself: nothing to learn
            trained = client.forward_backward(data, algorithm.loss_fn)
            rate = knobs.learning_rate * (1 - step / knobs.steps)
            updated = client.optim_step(tinker.AdamParams(learning_rate=rate))
            metrics |= (await trained).metrics | ((await updated).metrics or {})
        view.stepped(run, step + 1, rollouts, data, metrics)


async def sample(
    sampler: tinker.SamplingClient,
    words: Tokenizer,
    problems: Sequence[Problem],
    max_tokens: int,
    *,
    size: int = 1,
    seed: int | None = None,
) -> list[list[Rollout]]:
    """A group of `size` rollouts of each problem, all problems at once; greedy without a seed."""

    async def group(index: int, problem: Problem) -> list[Rollout]:
        prompt = words.encode(problem.prompt)
        params = tinker.SamplingParams(
            max_tokens=max_tokens,
            stop=["\n"],
            temperature=0.0 if seed is None else 1.0,
            seed=0 if seed is None else seed + index,
        )
        response = await sampler.sample(tinker.ModelInput.from_ints(prompt), size, params)
        return [
            Rollout(problem, prompt, sequence, reward(words.decode(sequence.tokens), problem))
            for sequence in response.sequences
        ]

    return await asyncio.gather(*(group(i, problem) for i, problem in enumerate(problems)))


def whitened(groups: Groups) -> list[list[float]]:
    """REINFORCE++: rewards spread over the sampled tokens, whitened over those of the batch."""
    rollouts = [rollout for group in groups for rollout in group]
    found = advantages(
        [rollout.reward for rollout in rollouts],
        [rollout.sequence.logprobs for rollout in rollouts],
        None,  # no reference, so no KL in the reward
        [[1] * len(rollout.sequence.tokens) for rollout in rollouts],
        config=ReinforcePPConfig(),
    )
    return [advantages_T.tolist() for advantages_T in found.advantages]


def above_the_mean(groups: Groups) -> list[list[float]]:
    """Each reward less its group's mean, on every token."""
    found = []
    for group in groups:
        mean = sum(rollout.reward for rollout in group) / len(group)
        found += [[rollout.reward - mean] * len(rollout.sequence.tokens) for rollout in group]
    return found


@dataclass(frozen=True)
class Algorithm:
    """Advantages for the tokens of each rollout, and the loss that takes them."""

    advantages: Callable[[Groups], list[list[float]]]
    loss_fn: Literal["ppo", "stable_reinforce"]


ALGORITHMS = {
    "reinforce_pp": Algorithm(whitened, "ppo"),
    "stable_reinforce": Algorithm(above_the_mean, "stable_reinforce"),
}


def dealt(advantages_D_T: Sequence[Sequence[float]], random: Random) -> list[list[float]]:
    """The same advantages, one a sequence, on completions that did not earn them."""
    firsts = [advantages_T[0] for advantages_T in advantages_D_T]
    random.shuffle(firsts)
    return [[a] * len(old_T) for a, old_T in zip(firsts, advantages_D_T, strict=True)]


def datum(rollout: Rollout, advantages_T: Sequence[float]) -> tinker.Datum:
    """The whole sequence, an advantage on each sampled token, and where each token came from."""
    prompt, sequence = rollout.prompt, rollout.sequence
    before, sampled, name = len(prompt) - 1, len(sequence.tokens), sequence.sequence_id
    prompt_span, sampled_span = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": prompt[1:] + sequence.tokens,
            "logprobs": [0.0] * before + sequence.logprobs,
            "advantages": [0.0] * before + list(advantages_T),
        },
    ).with_provenance(
        model_input=[
            prompt_span(sequence_id=name, length=before + 1),
            sampled_span(sequence_id=name, length=sampled - 1),
        ],
        loss_fn_inputs=[
            prompt_span(sequence_id=name, offset=1, length=before),
            sampled_span(sequence_id=name, length=sampled),
        ],
    )


# ------------------------------------------------------------------ the run


async def run(
    service: tinker.ServiceClient,
    model: str,
    knobs: Knobs,
    view: View,
    *,
    seeds: Sequence[int],
    control: bool,
) -> None:
    """For each seed: warm up if the knobs say so, then learn, all side by side."""
    kinds = {name: name for name in knobs.algorithms}
    if control:
        kinds["control"] = knobs.algorithms[-1]
    for seed in seeds:
        warm = await warm_up(service, model, knobs, seed, view) if knobs.warm_steps else None
        clients = [await learner(service, model, knobs, seed, warm) for _ in kinds]
        await asyncio.gather(
            *(
                improve(client, knobs, (seed, kind), view, algorithm=ALGORITHMS[name])
                for client, (kind, name) in zip(clients, kinds.items(), strict=True)
            )
        )


async def learner(
    service: tinker.ServiceClient, model: str, knobs: Knobs, seed: int, warm: str | None
) -> tinker.TrainingClient:
    """A LoRA of its own, from the warm weights where there are any."""
    if warm is None:
        return await service.create_lora_training_client(model, rank=knobs.rank, seed=seed)
    return await service.create_training_client_from_state(warm)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    small = given.model == "tiny"
    knobs = TINY if small else PRETRAINED
    knobs = replace(
        knobs,
        stale=given.stale,
        steps=given.steps or knobs.steps,
        algorithms=tuple(given.algorithm or knobs.algorithms),
    )
    control = small if given.control is None else given.control
    seeds = range(given.seeds)
    server = {"model": given.model, "sampler_dtype": given.sampler_dtype}
    if small:
        # Matrices this small are no work to share: one thread an operation is the fastest.
        server |= {"model": f"trimtab/tiny={tiny_model(given.out / 'model')}", "threads": 1}
    elif found := modelstore.resolve(given.model):
        server["model"] = "{}={}".format(*found)
    name = server["model"].partition("=")[0]
    with View(given.out, knobs, seeds, control) as view, trimtab.local(**server) as service:
        asyncio.run(run(service, name, knobs, view, seeds=seeds, control=control))
    view.summary()


def tiny_model(folder: Path) -> Path:
    """Random weights, 160 thousand of them, and a token a character: where the warm-up starts."""
    return tiny.build(
        folder, layers=3, kv_heads=4, tokenizer="characters", characters="0123456789=\n"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.demo", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="tiny", help="tiny, or what `trimtab serve` accepts")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run")
    parser.add_argument("--control", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--steps", type=int, help="RL steps")
    parser.add_argument(
        "--algorithm", action="append", choices=ALGORITHMS, help="may be given more than once"
    )
    parser.add_argument("--stale", type=int, default=4, help="updates the sampler lags behind")
    parser.add_argument("--sampler-dtype", default="int8", help="what the sampler computes in")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where results go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
