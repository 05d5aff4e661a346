"""Guess a number from 1 to 7 in three turns: `python -m recipes.guess_number`, minutes on a CPU.

Whoever halves what is left finds every number in time; whoever guesses finds fewer than half. What
the game answers is in the model's context but never trained on. Without model= a tiny model is made
and shown careless guesses; with one: `trimtab train recipes/guess_number.py model=...`.
"""

from __future__ import annotations

import random
import sys

from trimtab.trainer.completion import Completion
from trimtab.trainer.task import Item

NUMBERS = range(1, 8)
TURNS = 3
OPENING = "1-7?\n"

# Every number as often as any other. The prompt does not give it away: what can be learned is the
# way of guessing, so the held-out games are of the same numbers.
prompts = [{"prompt": OPENING, "number": n} for n in NUMBERS for _ in range(10)]
held_out = [{"prompt": OPENING, "number": n} for n in NUMBERS]
stop = ["\n"]
defaults = {
    "algorithm": "reinforce_pp_baseline",
    "steps": 40,
    "groups_per_batch": 14,
    "group_size": 8,
    "learning_rate": 2e-3,
    "max_tokens": 3,
    "max_turns": TURNS,
    "eval_every": 10,
    "eval_samples": 8,
}


def answer(guess: str, number: int) -> str | None:
    """What the game says to a guess: None when it is right.

    >>> answer("3", 7), answer("7", 7), answer("x", 7)
    ('>\\n', None, '!\\n')
    """
    if not guess.strip().isdigit():
        return "!\n"
    guessed = int(guess)
    return None if guessed == number else (">\n" if guessed < number else "<\n")


def reply(completion: Completion, item: Item) -> str | None:
    return answer(completion, item["number"])


def reward(completion: Completion, item: Item) -> float:
    """Found in time or not."""
    return float(answer(completion, item["number"]) is None)


def demonstrate(rng: random.Random) -> list[tuple[str, bool]]:
    """Guesses at random, half of the time among what is still possible."""
    number, low, high = rng.choice(NUMBERS), NUMBERS[0], NUMBERS[-1]
    segments = [(OPENING, False)]
    for _ in range(TURNS):
        guess = rng.randint(low, high) if rng.random() < 0.5 else rng.choice(NUMBERS)
        segments.append((f"{guess}\n", True))
        said = answer(str(guess), number)
        if said is None:
            break
        segments.append((said, False))
        low, high = (max(low, guess + 1), high) if said == ">\n" else (low, min(high, guess - 1))
    return segments


if __name__ == "__main__":
    from recipes.warm_up import run

    sys.exit(run(__file__, sys.argv[1:], demonstrate, steps=120))
