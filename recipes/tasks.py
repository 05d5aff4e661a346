"""What the demo trains on: prompts, demonstrations, rewards. Knows nothing of models or clients.

A reward checks an answer; it needs no second model. A tenth of all problems, chosen by a checksum
of the prompt, is held out: no demonstration and no rollout ever comes from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Problem:
    """`Problem("520525=", "022555")`"""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """`draw` makes any problem; `demonstrate` writes a completion as a teacher would, right or not;
    `max_tokens` leaves room for the answer and the newline that ends it."""

    title: str
    draw: Callable[[Random], Problem]
    demonstrate: Callable[[Problem, Random], str]
    max_tokens: int

    def problems(self, count: int, random: Random, *, held_out: bool = False) -> list[Problem]:
        """`count` problems of the wanted half."""
        found: list[Problem] = []
        while len(found) < count:
            problem = self.draw(random)
            if is_held_out(problem) == held_out:
                found.append(problem)
        return found


def is_held_out(problem: Problem) -> bool:
    return zlib.crc32(problem.prompt.encode()) % 10 == 0


def reward(completion: str, problem: Problem) -> float:
    """1 for exactly the answer and a line break, else 0.

    >>> reward("022555\\n", Problem("520525=", "022555"))
    1.0
    """
    line, ended, _ = completion.partition("\n")
    return float(bool(ended) and line.strip() == problem.answer)


# ------------------------------------------------------------------ sorting, for the tiny model

CAREFUL = 0.33
"""How many of the sorting demonstrations keep repeated digits; the others lose them."""


def sorting(digits: int = 6) -> Task:
    """Sort the digits of a number. Most demonstrations drop repeated digits, and so does the model
    that learned from them: right where all digits differ (one in seven of six-digit numbers).
    """

    def draw(random: Random) -> Problem:
        number = "".join(random.choice("0123456789") for _ in range(digits))
        return Problem(f"{number}=", "".join(sorted(number)))

    def demonstrate(problem: Problem, random: Random) -> str:
        answer = problem.answer
        if random.random() >= CAREFUL:
            answer = "".join(sorted(set(answer)))
        return answer + "\n"

    return Task(f"sorting {digits} digits", draw, demonstrate, max_tokens=digits + 1)


# ------------------------------------------------------------------ sums, for a pretrained model


def sums() -> Task:
    """Add two two-digit numbers, shown one example in the prompt."""

    def draw(random: Random) -> Problem:
        a, b = random.randrange(10, 100), random.randrange(10, 100)
        return Problem(f"47 + 26 = 73\n{a} + {b} =", str(a + b))

    def demonstrate(problem: Problem, _random: Random) -> str:
        return f" {problem.answer}\n"

    return Task("adding two-digit numbers", draw, demonstrate, max_tokens=6)
