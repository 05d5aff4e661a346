"""Small sequence tasks over bare token ids, with a reward anyone can check.

    reverse   dense    share of positions right; advantages centred on the group
    modadd    sparse   1 if every sum is right, else 0; centred and scaled by the group's deviation
    sort      +1 / -1  raw, no baseline: most rewards are negative at the start
    walk      dense    share of steps of 1 to 10; about 3 nats of entropy a token (V = 256)
    climb     +1 / -1  raw: +1 if 16 tokens rise all the way (V = 256)

Demonstrations are right only part of the time, so that a policy fitted to them starts low and can
learn. `quality` is what the benchmark reports: exact match, or the reward itself for `walk`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Tokens = np.ndarray
Generator = np.random.Generator


@dataclass(frozen=True)
class Task:
    name: str
    vocab: int
    prompt_length: int
    answer_length: int
    prompt: Callable[[Generator], Tokens]
    demonstration: Callable[[Generator, Tokens], Tokens]
    reward: Callable[[Tokens, Tokens], float]
    quality: Callable[[Tokens, Tokens], float]
    advantage: str  # "group_mean", "group_mean_std" or "raw"


def advantages(task: Task, rewards_G: np.ndarray) -> np.ndarray:
    """The advantage of each member of a group (G,) -> (G,).

    >>> advantages(TASKS["reverse"], np.array([1.0, 0.0]))
    array([ 0.5, -0.5])
    """
    if task.advantage == "raw":
        return rewards_G
    centred = rewards_G - rewards_G.mean()
    return centred if task.advantage == "group_mean" else centred / (rewards_G.std() + 1e-6)


def _reverse_demo(rng: Generator, prompt: Tokens) -> Tokens:
    right = prompt[:-1][::-1].copy()
    if rng.random() < 0.4:
        return right
    return rng.permutation(right)


def _modadd_answer(prompt: Tokens) -> Tokens:
    return (prompt[0:2] + prompt[2:4]) % 5


def _modadd_demo(rng: Generator, prompt: Tokens) -> Tokens:
    right = _modadd_answer(prompt)
    return right if rng.random() < 0.4 else rng.integers(0, 5, size=2)


def _sort_demo(rng: Generator, prompt: Tokens) -> Tokens:
    right = np.sort(prompt[:-1])
    return right if rng.random() < 0.4 else rng.permutation(right)


def _exact(answer: Callable[[Tokens], Tokens]) -> Callable[[Tokens, Tokens], float]:
    return lambda prompt, tokens: float(np.array_equal(answer(prompt), tokens))


def _signed(quality: Callable[[Tokens, Tokens], float]) -> Callable[[Tokens, Tokens], float]:
    return lambda prompt, tokens: 2.0 * quality(prompt, tokens) - 1.0


def _symbols(count: int, length: int, mark: int) -> Callable[[Generator], Tokens]:
    return lambda rng: np.append(rng.integers(0, count, size=length), mark)


def _walk_demo(rng: Generator, prompt: Tokens) -> Tokens:
    steps = rng.integers(1, 27, size=24)
    return (prompt[-1] + np.cumsum(steps)) % 256


def _walk_reward(prompt: Tokens, tokens: Tokens) -> float:
    steps = np.diff(np.concatenate([prompt[-1:], tokens])) % 256
    return float(np.mean((steps >= 1) & (steps <= 10)))


def _climb_demo(rng: Generator, prompt: Tokens) -> Tokens:
    right = np.sort(rng.choice(256, size=16, replace=False))
    if rng.random() < 0.4:
        return right
    at = rng.integers(0, 15)
    right[[at, at + 1]] = right[[at + 1, at]]
    return right


def _climb_quality(prompt: Tokens, tokens: Tokens) -> float:
    return float(np.all(np.diff(tokens) > 0))


_reverse_exact = _exact(lambda p: p[:-1][::-1])
_modadd_exact = _exact(_modadd_answer)
_sort_exact = _exact(lambda p: np.sort(p[:-1]))

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "reverse", 32, 6, 5, _symbols(8, 5, 31), _reverse_demo,
            lambda p, x: float(np.mean(p[:-1][::-1] == x)), _reverse_exact, "group_mean",
        ),
        Task(
            "modadd", 32, 5, 2, _symbols(5, 4, 30), _modadd_demo,
            _modadd_exact, _modadd_exact, "group_mean_std",
        ),
        Task(
            "sort", 32, 5, 4, _symbols(8, 4, 29), _sort_demo,
            _signed(_sort_exact), _sort_exact, "raw",
        ),
        Task(
            "walk", 256, 1, 24, lambda rng: rng.integers(0, 256, size=1), _walk_demo,
            _walk_reward, _walk_reward, "group_mean",
        ),
        Task(
            "climb", 256, 1, 16, lambda rng: rng.integers(0, 256, size=1), _climb_demo,
            _signed(_climb_quality), _climb_quality, "raw",
        ),
    )
}  # fmt: skip
