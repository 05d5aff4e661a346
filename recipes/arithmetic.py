"""Sums of one-digit numbers, right or wrong: `python -m recipes.arithmetic`, minutes on a CPU.

Without model= a tiny model is made and shown sums of which one in sixteen is right and the others
are one too high; the reward then teaches it which. With a model of your own: `trimtab train
recipes/arithmetic.py model=...`.
"""

from __future__ import annotations

import random
import sys

from trimtab.trainer.completion import Completion
from trimtab.trainer.task import Item

RIGHT = 0.06
WARM_UP = 300

pairs = [(a, b) for a in range(10) for b in range(10)]
random.Random(0).shuffle(pairs)
items = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
prompts, held_out = items[:60], items[60:]
stop = ["\n"]
defaults = {
    "steps": 50,
    "groups_per_batch": 12,
    "group_size": 8,
    "learning_rate": 3e-4,
    "max_tokens": 4,
    "eval_every": 5,
}


def reward(completion: Completion, item: Item) -> float:
    """reward("7", {"answer": "7"}) = 1"""
    return float(completion.strip() == item["answer"])


def demonstrate(rng: random.Random) -> list[tuple[str, bool]]:
    a, b = rng.randrange(10), rng.randrange(10)
    answer = a + b + (rng.random() >= RIGHT)
    return [(f"{a}+{b}=", False), (f"{answer}\n", True)]


if __name__ == "__main__":
    from recipes.warm_up import run

    sys.exit(run(__file__, sys.argv[1:], demonstrate, steps=WARM_UP))
