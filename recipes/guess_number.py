"""Guess a number from 0 to 9 in a few turns: `python -m recipes.guess_number`, minutes on a CPU.

The reward is higher the sooner the number is found, so that the model learns to halve what is left.
What the game answers is in the model's context but never trained on. Without model= a tiny model is
made and shown random guesses; with one: `trimtab train recipes/guess_number.py model=...`.
"""

from __future__ import annotations

import random
import sys

from trimtab.trainer.completion import Completion
from trimtab.trainer.task import Item

TURNS = 5
OPENING = "0-9?\n"

# Every number as often as any other. The prompt does not give it away, so held out means sampled
# anew: what can be learned is the way of guessing.
prompts = [{"prompt": OPENING, "number": n} for n in range(10) for _ in range(10)]
held_out = [{"prompt": OPENING, "number": n} for n in range(10)]
stop = ["\n"]
defaults = {
    "steps": 30,
    "groups_per_batch": 16,
    "group_size": 4,
    "learning_rate": 1e-3,
    "max_tokens": 3,
    "max_turns": TURNS,
    "eval_every": 10,
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
    """1 for the first guess, a fifth less for each further one, 0 when it was not found."""
    if answer(completion, item["number"]) is not None:
        return 0.0
    return 1.0 - (len(completion.turns) - 1) / TURNS


def demonstrate(rng: random.Random) -> list[tuple[str, bool]]:
    """Guesses at random, each from what is still possible half of the time."""
    number, low, high = rng.randrange(10), 0, 9
    segments = [(OPENING, False)]
    for _ in range(TURNS):
        guess = rng.randint(low, high) if rng.random() < 0.5 else rng.randrange(10)
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
