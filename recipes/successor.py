"""The number after a three-digit number, for a pretrained model: `trimtab train
recipes/successor.py model=smollm2`.

A small model sees the pattern in the example of the prompt and loses digits on the way, greedily in
two prompts of five and far more often when sampled, so that five steps show. No number that is held
out is ever trained on.
"""

from __future__ import annotations

import random
import sys

from trimtab.trainer.completion import Completion
from trimtab.trainer.task import Item

numbers = [n for n in range(100, 999) if n != 417]
random.Random(0).shuffle(numbers)
items = [
    {"prompt": f"417 + 1 = 418\n{number} + 1 =", "answer": str(number + 1)} for number in numbers
]
held_out, prompts = items[:100], items[100:]
stop = ["\n"]
defaults = {
    "steps": 5,
    "groups_per_batch": 8,
    "group_size": 6,
    "learning_rate": 4e-4,
    "lora_rank": 16,
    "max_tokens": 6,
    "eval_every": 1,
}


def reward(completion: Completion, item: Item) -> float:
    """reward(" 744", {"answer": "744"}) = 1"""
    return float(completion.strip() == item["answer"] and not completion.truncated)


if __name__ == "__main__":
    from trimtab.trainer.cli import main

    sys.exit(main(sys.argv[1:], __file__))
