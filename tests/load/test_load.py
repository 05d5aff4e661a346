"""Loads in small: all that was asked for comes. What it costs is `make load`'s to measure."""

import asyncio
import threading

import pytest

from trimtab.embedded import _served
from trimtab.errors import Busy
from trimtab.service.core import Service

from . import scenarios
from .process import Use
from .raw import MODEL


def here():
    """Threads are all that is looked at in a process that client and server share."""
    return Use(0.0, 0, threading.active_count())


def test_six_hundred_samples_beside_heartbeats_and_training(url):
    async def work():
        async with scenarios.sdk_draw(url) as draw:
            return await scenarios.storm(url, 600, 1, draw, sessions=2)

    found = asyncio.run(work())
    assert found["samples"] == 600
    assert found["heartbeats"] >= 2 and found["optimizer_steps"] >= 1


def test_held_polls_cost_no_threads(url):
    found = asyncio.run(scenarios.polls(url, 300, here))
    assert found["threads_held"] <= found["threads_before"] + 2


def test_models_share_a_base(url):
    found = asyncio.run(scenarios.models(url, 24, 2, here))
    assert found["optimizer_steps"] == 48
    assert found["threads_after"] <= found["threads_before"] + 2


@pytest.fixture
def refusals(monkeypatch):
    """How often a submit was answered 429."""
    count, submit = [0], Service.submit

    async def counted(self, *arguments):
        try:
            return await submit(self, *arguments)
        except Busy:
            count[0] += 1
            raise

    monkeypatch.setattr(Service, "submit", counted)
    return count


def test_beyond_the_queues_bound_clients_wait_and_all_completes(model_folder, tmp_path, refusals):
    """Answered 429, the SDK pauses and sends the same request again."""
    config = {
        "model": (f"{MODEL}={model_folder}",), "data_dir": tmp_path, "threads": 1, "port": 0,
        "max_pending_samples": 16,
    }  # fmt: skip

    async def work(url):
        async with scenarios.sdk_draw(url) as draw:
            await asyncio.gather(*(draw(i) for i in range(100)))

    with _served(config) as url:
        asyncio.run(work(url))
    assert refusals[0] > 0
