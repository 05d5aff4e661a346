"""Held-out reward of the weights as they are: greedy and sampled. Knows no training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import tinker

from trimtab.trainer.config import Config
from trimtab.trainer.metrics import Metrics
from trimtab.trainer.order import sampling_seed
from trimtab.trainer.rollouts import Draw, Roller, SeedOf
from trimtab.trainer.task import Item
from trimtab.trainer.trajectory import Group


async def evaluate(
    roller: Roller, client: tinker.SamplingClient, items: Sequence[Item], config: Config
) -> Metrics:
    """`test/greedy/...` at temperature 0 and `test/env/all/...` sampled, each over every prompt.
    The seeds are the same every time, so differences come from the weights."""
    used = items[: config.eval_limit or None]

    async def roll(temperature: float, size: int) -> list[Group]:
        draws = [Draw(client, temperature, _seeds(config.seed, n)) for n in range(len(used))]
        pairs = zip(draws, used, strict=True) if size else ()
        groups = (roller.group(d, item, size=size, index=n) for n, (d, item) in enumerate(pairs))
        return list(await asyncio.gather(*groups))

    greedy, sampled = await asyncio.gather(
        roll(0.0, 1), roll(config.temperature, config.eval_samples)
    )
    return summary(greedy, "test/greedy") | summary(sampled, "test/env/all")


def _seeds(seed: int, number: int) -> SeedOf:
    return lambda completion, turn: sampling_seed(seed, "evaluate", number, completion, turn)


def summary(groups: Sequence[Group], prefix: str) -> Metrics:
    """Mean reward of the graded, and how many could not be graded."""
    everything = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in everything if t.reward is not None]
    metrics = {f"{prefix}/reward_failures": float(len(everything) - len(rewards))}
    if rewards:
        metrics[f"{prefix}/reward/total"] = float(np.mean(rewards))
    return metrics if everything else {}
