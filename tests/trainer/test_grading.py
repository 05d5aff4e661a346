"""Whatever a reward does, the run knows what it was and goes on."""

import asyncio
import threading
import time

import numpy as np
import pytest

from trimtab.trainer.completion import Completion
from trimtab.trainer.grading import Failure, Grader, check_reward
from trimtab.trainer.task import Task

ITEM = {"prompt": "p", "answer": "7"}


def graded(reward, *, timeout=5.0, text="7"):
    async def go():
        grader = Grader(Task(["p"], reward), timeout=timeout)
        return await grader.reward(Completion(text), ITEM)

    return asyncio.run(go())


def test_plain_and_async_rewards():
    async def later(completion, item):
        await asyncio.sleep(0)
        return float(completion == item["answer"])

    assert graded(lambda c, item: c == item["answer"]) == 1.0
    assert graded(later) == 1.0
    assert graded(later, text="8") == 0.0
    assert graded(lambda c, i: later(c, i | {"answer": "9"})) == 0.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, 1.0), (3, 3.0), (np.float32(0.5), 0.5), (np.bool_(False), 0.0), (np.int64(-2), -2.0)],
)
def test_numbers(value, expected):
    assert check_reward(value) == expected


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (None, "none", "returned None"),
        ("1.0", "type", "'1.0' (a str); it must return a number"),
        ([1.0], "type", "a list"),
        (float("nan"), "nan", "returned nan"),
        (float("inf"), "nan", "returned inf"),
    ],
)
def test_what_is_not_a_number(value, kind, words):
    found = check_reward(value)
    assert isinstance(found, Failure)
    assert found.kind == kind
    assert words in found.message


def test_a_reward_that_raises_names_its_line():
    def reward(completion, item):
        raise KeyError("missing")

    found = graded(reward)
    assert found.kind == "raised"
    assert "reward raised KeyError: 'missing'" in found.message
    assert "test_grading.py:" in found.message


def leave(completion, item):
    raise SystemExit(3)


async def leave_later(completion, item):
    raise SystemExit(3)


@pytest.mark.parametrize("reward", [leave, leave_later])
def test_a_reward_that_exits_is_no_exit(reward):
    found = graded(reward)
    assert found.kind == "raised"
    assert found.message.startswith("reward raised SystemExit: 3 (")
    assert "test_grading.py:" in found.message


def test_a_reward_may_raise_what_a_future_cannot_carry():
    found = graded(lambda c, i: next(iter(())))
    assert (found.kind, "StopIteration" in found.message) == ("raised", True)


def test_a_reward_s_own_timeout_is_not_ours():
    def plain(completion, item):
        raise TimeoutError("the judge is slow")

    async def later(completion, item):
        raise TimeoutError("the judge is slow")

    for reward in (plain, later):
        found = graded(reward)
        assert found.kind == "raised"
        assert "TimeoutError: the judge is slow" in found.message


def test_a_reward_that_hangs_does_not_hold_up_the_others():
    release = threading.Event()

    def reward(completion, item):
        release.wait(30) if completion == "hang" else None
        return 1.0

    async def go():
        grader = Grader(Task(["p"], reward), timeout=0.2)
        texts = ["hang", *["7"] * 40]
        return await asyncio.gather(*(grader.reward(Completion(t), ITEM) for t in texts))

    begun = time.monotonic()
    found = asyncio.run(go())
    assert time.monotonic() - begun < 5
    release.set()
    assert found[0].kind == "timeout"
    assert "within 0.2 s" in found[0].message
    assert found[1:] == [1.0] * 40


def test_an_async_reward_that_hangs():
    async def reward(completion, item):
        await asyncio.sleep(60)

    assert graded(reward, timeout=0.05).kind == "timeout"


def test_replies_are_checked_too():
    async def go(value):
        task = Task(["p"], lambda c, i: 0.0, reply=lambda c, i: value)
        return await Grader(task, timeout=1).reply(Completion(""), ITEM)

    assert asyncio.run(go("more")) == "more"
    assert asyncio.run(go(None)) is None
    assert asyncio.run(go({"role": "tool", "content": "3"})) == {"role": "tool", "content": "3"}
    assert asyncio.run(go(5)).kind == "type"
