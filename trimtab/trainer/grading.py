"""Calls the user's functions, reward and reply, and survives whatever they do.

A call that raises, hangs, or returns what is not a finite number becomes a `Failure`; it is for the
caller to count it and to leave the sequence out. Never zero in silence. Knows no server.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from trimtab.trainer.completion import Completion
from trimtab.trainer.task import Answer, Item, Task

T = TypeVar("T")

THREADS = 32


@dataclass(frozen=True)
class Failure:
    """`kind` is one of raised, none, nan, type, timeout; `message` a sentence for people.

    >>> check_reward(None).kind
    'none'
    """

    kind: str
    message: str


class Grader:
    """`await Grader(task, timeout=60).reward(completion, item)` is a float or a Failure.

    A plain function runs on a daemon thread of its own: a hung one can't be stopped, but it neither
    holds up the run nor its end.
    """

    def __init__(self, task: Task, *, timeout: float) -> None:
        self.task = task
        self.timeout = timeout
        self.places = asyncio.Semaphore(THREADS)

    async def reward(self, completion: Completion, item: Item) -> float | Failure:
        found = await self._call("reward", self.task.reward, completion, item)
        return found if isinstance(found, Failure) else check_reward(found)

    async def reply(self, completion: Completion, item: Item) -> Answer | Failure:
        assert self.task.reply is not None
        found = await self._call("reply", self.task.reply, completion, item)
        if found is None or isinstance(found, str | dict | Failure):
            return found
        return Failure(
            "type",
            f"reply returned {_shown(found)}; it must return a string, a message, or None to end",
        )

    async def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        async with self.places:
            limit = asyncio.timeout(self.timeout)
            try:
                async with limit:
                    if inspect.iscoroutinefunction(function):
                        return await function(*arguments)
                    found = await in_thread(function, *arguments)
                    return await found if inspect.isawaitable(found) else found
            except (Exception, SystemExit) as error:  # a user's function may raise anything
                if limit.expired():
                    return Failure("timeout", f"{name} did not return within {self.timeout:g} s")
                return _raised(name, error.cause if isinstance(error, Left) else error)


def _raised(name: str, error: BaseException) -> Failure:
    at = traceback.extract_tb(error.__traceback__)[-1]
    told = f"{name} raised {type(error).__name__}: {error}"
    return Failure("raised", f"{told} ({at.filename}:{at.lineno})")


def check_reward(found: Any) -> float | Failure:
    """A float, or what is wrong with it. Booleans count as 1 and 0; a string is never a number."""
    if found is None:
        return Failure("none", "reward returned None; it must return a number")
    if not isinstance(found, numbers.Real | np.bool_):
        return Failure("type", f"reward returned {_shown(found)}; it must return a number")
    value = float(found)
    if not math.isfinite(value):
        return Failure("nan", f"reward returned {value}; it must return a finite number")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} (a {type(value).__name__})"


class Left(Exception):
    """What a function on a thread raised. It travels wrapped, for a future takes no StopIteration,
    and a SystemExit would end the event loop."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(repr(cause))
        self.cause = cause


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run on a new daemon thread. Cancelling stops the waiting, not the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # timed out meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as caught:  # carried to the waiting task
            error = Left(caught)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="trimtab-reward").start()
    return await future
