"""Tasks of the reasoning-gym package, by name: procedural puzzles with their own scoring.

The package is optional and imported only here. Knows no model and no server.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from trimtab.errors import Invalid
from trimtab.trainer.completion import Completion
from trimtab.trainer.task import Item, Task

INSTRUCTION = "Answer with the result alone."


def last_integer(text: str) -> str | None:
    """last_integer("It is 3 + 4 = 7.") = "7": small models answer in sentences."""
    found = re.findall(r"-?\d+", text)
    return found[-1] if found else None


def whole_text(text: str) -> str | None:
    return text.strip() or None


EXTRACT: dict[str, Callable[[str], str | None]] = {
    "last_integer": last_integer,
    "text": whole_text,
}


def reasoning_gym_task(
    name: str,
    *,
    size: int = 500,
    held_out: int = 50,
    seed: int = 0,
    extract: str = "text",
    instruction: str = INSTRUCTION,
    **options: Any,
) -> Task:
    """`reasoning_gym_task("chain_sum", extract="last_integer", min_digits=1, max_digits=1)`.

    `options` go to the task of reasoning-gym. The held-out prompts come from another seed.
    """
    if extract not in EXTRACT:
        raise Invalid(f"extract is {extract!r}; it must be one of {', '.join(EXTRACT)}")
    train = _dataset(name, size=size, seed=seed, **options)
    test = _dataset(name, size=held_out, seed=seed + 1_000_003, **options) if held_out else ()

    def reward(completion: Completion, item: Item) -> float:
        answer = EXTRACT[extract](completion)
        return float(train.score_answer(answer=answer, entry=item["entry"]))

    def item(entry: dict[str, Any]) -> Item:
        message = {"role": "user", "content": f"{entry['question']}\n{instruction}".strip()}
        return {"prompt": [message], "entry": entry}

    return Task(
        [item(entry) for entry in train],
        reward,
        held_out=[item(entry) for entry in test],
        name=name,
    )


def _dataset(name: str, **options: Any) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise Invalid(
            "reasoning_gym tasks need the package reasoning-gym; install it with "
            "`pip install reasoning-gym`"
        ) from error
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise Invalid(f"reasoning_gym has no task {name!r}; it has {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise Invalid(f"reasoning_gym task {name} refuses its options: {error}") from error
