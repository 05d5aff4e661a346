"""trimtab.trainer: from a reward function to a better model, over the Tinker API.

    from trimtab.trainer import Config, Task, train

    task = Task([{"prompt": "2+2=", "answer": "4"}], lambda c, item: float(c == item["answer"]))
    train(Config(base_url="http://127.0.0.1:8000", steps=50), task)

The client side only: nothing of the server is imported. Names load when they are first used,
because the SDK brings torch with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.trainer.completion import Completion
    from trimtab.trainer.config import Config
    from trimtab.trainer.loop import Result
    from trimtab.trainer.runs import train, train_async
    from trimtab.trainer.task import Item, Task

__all__ = ["Completion", "Config", "Item", "Result", "Task", "train", "train_async"]

_HOMES = {
    "Completion": "completion",
    "Config": "config",
    "Item": "task",
    "Result": "loop",
    "Task": "task",
    "train": "runs",
    "train_async": "runs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab.trainer' has no attribute {name!r}")
    return getattr(import_module(f"trimtab.trainer.{_HOMES[name]}"), name)
