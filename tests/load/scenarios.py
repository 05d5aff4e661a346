"""Four loads, each a coroutine against a running server that returns what it measured.

Every one of them asserts that all it asked for came; times are reported, never asserted here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from .heartbeats import heartbeats
from .raw import KEY, MODEL, Connection, quantile

Measured = dict[str, float]


async def storm(
    url: str,
    samples: int,
    rounds: int,
    draw: Callable[[int], Awaitable[None]],
    *,
    sessions: int,
    pid: int | None = None,
) -> Measured:
    """`draw(i)` for `samples` values of i at once, `rounds` times, while `sessions` sessions send a
    heartbeat every 0.5 s and a model is trained step after step. `loop_busy` is what the event
    loop of process `pid` computed while a heartbeat was on its way."""
    done, clock = asyncio.Event(), asyncio.get_running_loop().time
    steps = asyncio.ensure_future(training(url, done))
    async with heartbeats(url, sessions, pid) as found:
        started = clock()
        for number in range(rounds):
            await asyncio.gather(*(draw(samples * number + i) for i in range(samples)))
        seconds = clock() - started
    done.set()
    clocked, busy = (sorted(column) for column in zip(*found, strict=True))
    return {
        "samples": samples * rounds,
        "seconds": seconds,
        "optimizer_steps": await steps,
        "heartbeats": len(found),
        "heartbeat_p50_ms": 1000 * quantile(clocked, 0.5),
        "heartbeat_p99_ms": 1000 * quantile(clocked, 0.99),
        "heartbeat_max_ms": 1000 * clocked[-1],
        "loop_busy_p99_ms": 1000 * quantile(busy, 0.99),
    }


async def training(url: str, done: asyncio.Event) -> int:
    """Optimizer steps until `done`."""
    async with Connection(url) as connection:
        model = await connection.model(await connection.session())
        for step in itertools.count(1):
            await connection.forward_backward(model, 2 * step - 1)
            await connection.result(await connection.optim_step(model, 2 * step))
            if done.is_set():
                return step
    raise AssertionError


@asynccontextmanager
async def raw_draw(url: str) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """One sample of one token, on a connection of its own."""
    async with Connection(url) as connection:
        sampler = await connection.sampler(await connection.session())

    async def draw(seq_id: int) -> None:
        async with Connection(url) as connection:
            await connection.result(await connection.sample(sampler, seq_id))

    yield draw


@asynccontextmanager
async def sdk_draw(url: str) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """The same through the official SDK: one sampling client, as a user would have."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    sampler = await service.create_sampling_client(base_model=MODEL)
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=1)

    async def draw(number: int) -> None:
        found = await sampler.sample(prompt, num_samples=1, sampling_params=params)
        assert len(found.sequences[0].tokens) == 1

    yield draw
    await asyncio.to_thread(lambda: service.close("success").result(10))


# ------------------------------------------------------------------ polls


async def polls(url: str, count: int, use: Callable[[], Any]) -> Measured:
    """Hold `count` polls at once, each of a request that waits for the first one of its model; then
    send that one, and all are answered. `use` says what the server uses."""
    async with Connection(url) as first:
        model = await first.model(await first.session())
        before = use()
        connections = [Connection(url) for _ in range(count)]
        asked = [
            await c.forward_backward(model, seq_id, forward_only=True)
            for seq_id, c in enumerate(connections, 2)
        ]
        parked = use()
        waiting = [
            asyncio.ensure_future(c.result(request_id))
            for c, request_id in zip(connections, asked, strict=True)
        ]
        await asyncio.sleep(3.0)
        held = use()
        assert not any(task.done() for task in waiting)
        await first.forward_backward(model, 1, forward_only=True)
        answers = await asyncio.gather(*waiting)
        for connection in connections:
            await connection.close()
    assert len(answers) == count and all(answers)
    return {
        "polls": count,
        "memory_before_mib": before.memory_mib,
        "memory_held_mib": held.memory_mib,
        "kib_a_poll": 1024 * (held.memory_mib - parked.memory_mib) / count,
        "threads_before": before.threads,
        "threads_held": held.threads,
        "files_held": held.files,
    }


# ------------------------------------------------------------------ many models, and too much


async def models(url: str, count: int, steps: int, use: Callable[[], Any]) -> Measured:
    """That many models on one base, each trained a few steps at the same time as the others."""
    async with Connection(url) as connection:
        session = await connection.session()
    before, clock = use(), asyncio.get_running_loop().time
    started = clock()

    async def one(number: int) -> None:
        async with Connection(url) as connection:
            model = await connection.model(session, number, rank=8)
            for step in range(steps):
                await connection.forward_backward(model, 2 * step + 1)
                await connection.result(await connection.optim_step(model, 2 * step + 2))

    await asyncio.gather(*(one(number) for number in range(count)))
    after = use()
    return {
        "models": count,
        "optimizer_steps": count * steps,
        "seconds": clock() - started,
        "mib_a_model": (after.memory_mib - before.memory_mib) / count,
        "threads_before": before.threads,
        "threads_after": after.threads,
    }
