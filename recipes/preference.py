"""A score learned from preferences, with a KL penalty: `python -m recipes.preference`.

A reward model is fitted on the spot to pairs of texts of which a (simulated) reader liked one
better: the Bradley-Terry model, linear in the counts of letter pairs. It is only right near the
texts that it has seen, so the policy is held to where it began: β > 0, the reference being the
model before training. With kl_penalty_coef=0.05 the score climbs higher and the text falls apart:
"the hen ateateateate".
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from trimtab.trainer.completion import Completion
from trimtab.trainer.task import Item

ANIMALS = ("cat", "dog", "hen", "cow")
DOINGS = ("sat", "ran", "ate", "dug")
LETTERS = "abcdefghijklmnopqrstuvwxyz "
DIM = len(LETTERS) ** 2


def sentence(rng: random.Random) -> str:
    return f"the {rng.choice(ANIMALS)} {rng.choice(DOINGS)}"


def liked(text: str) -> float:
    """The reader's own taste, which the reward model never sees: hens, and eating."""
    return 2.0 * ("hen" in text) + 1.0 * ("ate" in text) - 1.0 * ("dug" in text)


def features(text: str) -> np.ndarray:
    """Counts of letter pairs."""
    found = np.zeros(DIM)
    for pair in pairwise(text):
        if pair[0] in LETTERS and pair[1] in LETTERS:
            found[LETTERS.index(pair[0]) * len(LETTERS) + LETTERS.index(pair[1])] += 1
    return found


def fit(pairs: Sequence[tuple[str, str]], *, rounds: int = 300, ridge: float = 1e-3) -> np.ndarray:
    """Weights w that make P(first liked better) = sigmoid(w · (f(first) - f(second))) likely."""
    differences = np.array([features(better) - features(worse) for better, worse in pairs])
    weights = np.zeros(DIM)
    for _ in range(rounds):
        surprise = 1 / (1 + np.exp(differences @ weights))
        weights += 0.5 * (differences.T @ surprise / len(pairs) - ridge * weights)
    return weights


def preferences(count: int, seed: int) -> list[tuple[str, str]]:
    """Pairs in the order of a reader who is not always sure."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        a, b = sentence(rng), sentence(rng)
        sure = 1 / (1 + np.exp(liked(b) - liked(a)))
        found.append((a, b) if rng.random() < sure else (b, a))
    return found


WEIGHTS = fit(preferences(500, seed=0))

prompts = ["> "] * 64
held_out = ["> "] * 8
stop = ["\n"]
defaults = {
    "algorithm": "reinforce_pp",
    "steps": 20,
    "groups_per_batch": 16,
    "group_size": 4,
    "learning_rate": 1e-3,
    "max_tokens": 20,
    "kl_penalty_coef": 0.2,
    "reference": "base",
    "reward_norm": "running",
    "eval_every": 10,
    "eval_samples": 8,
}


def reward(completion: Completion, item: Item) -> float:
    return float(features(completion.strip()) @ WEIGHTS)


def demonstrate(rng: random.Random) -> list[tuple[str, bool]]:
    return [("> ", False), (f"{sentence(rng)}\n", True)]


if __name__ == "__main__":
    from recipes.warm_up import run

    sys.exit(run(__file__, sys.argv[1:], demonstrate, steps=120))
