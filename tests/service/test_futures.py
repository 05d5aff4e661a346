"""Results: waited for cheaply, kept across restarts, counted by cursors, dropped when told to."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from trimtab.errors import Gone, NotFound
from trimtab.service.core import Completion, Completions

from .support import (
    OWNER,
    World,
    forward_backward,
    new_model,
    new_sampler,
    outcome,
    run,
    sample,
    submit,
)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_2000_waiting_polls_cost_no_thread_and_no_task(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            world.learner.gate.clear()
            promise = await submit(service, forward_backward(m, 1, [1]))
            threads = threading.active_count()
            polls = [asyncio.ensure_future(outcome(service, promise, 30.0)) for _ in range(2000)]
            await asyncio.sleep(0.05)
            assert threading.active_count() <= threads
            mine = len(asyncio.all_tasks())
            started = time.perf_counter()
            again = [asyncio.ensure_future(outcome(service, promise, 0.01)) for _ in range(2000)]
            states = {found.state for found in await asyncio.gather(*again)}
            assert states == {"pending"} and time.perf_counter() - started < 2.0
            for poll in polls[:1000]:
                poll.cancel()
            await asyncio.sleep(0.05)
            assert len(asyncio.all_tasks()) == mine - 1000
            live = service._parts.futures._live[promise.request_id]
            assert len(live.waiters) == 1000
            world.learner.gate.set()
            found = await asyncio.gather(*polls[1000:])
            assert {f.state for f in found} == {"done"} and len({f.body for f in found}) == 1

    run(script())


def test_results_are_served_byte_for_byte_after_a_restart(world):
    async def before():
        async with world.service() as service:
            m = await new_model(service)
            promise = await submit(service, forward_backward(m, 1, [1, 2]))
            return promise, await outcome(service, promise)

    async def after(promise):
        async with world.restarted() as service:
            return await outcome(service, promise)

    promise, told = run(before())
    assert run(after(promise)) == told


def test_never_existed_and_no_longer_kept_differ(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            promise = await submit(service, forward_backward(m, 1, [1]))
            await outcome(service, promise)
            with pytest.raises(NotFound):
                await outcome(service, f"{m}:2")
            await service.finish_session(OWNER, session, "success")
            world.clock.now += 24 * 3600 - 1
            await service.sweep()
            assert (await outcome(service, promise)).state == "done"
            world.clock.now += 120
            await service.sweep()
            with pytest.raises(Gone):
                await outcome(service, promise)
            world.clock.now += 31 * 24 * 3600
            await service.sweep()
            with pytest.raises(NotFound):
                await outcome(service, promise)

    run(script())


def test_cursors_list_what_finished_and_acks_drop_it(world):
    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            other = await new_sampler(service)
            for i in range(3):
                await outcome(service, await submit(service, sample(s, i)))
            await outcome(service, await submit(service, sample(s, 1_000_000_000)))
            await outcome(service, await submit(service, sample(other, 0)))
            found = await service.retrieve_many(OWNER, s, 0, 0, 0.0)
            assert [item.request_id for item in found.items] == [f"{s}:{i}" for i in range(3)]
            size = len((await outcome(service, f"{s}:0")).body)
            assert found.items[0] == Completion(f"{s}:0", "finished", size)
            clone = await service.retrieve_many(OWNER, s, 1, 0, 0.0)
            assert [item.request_id for item in clone.items] == [f"{s}:1000000000"]
            nothing = Completions((), found.cursor)
            assert await service.retrieve_many(OWNER, s, 0, found.cursor, 0.0) == nothing

            acked = [f"{s}:0", f"{other}:0"]  # of another session: not its to drop
            await service.retrieve_many(OWNER, s, 0, found.cursor, 0.0, acked)
            with pytest.raises(Gone):
                await outcome(service, f"{s}:0")
            assert (await outcome(service, f"{other}:0")).state == "done"
            rest = await service.retrieve_many(OWNER, s, 0, 0, 0.0)
            assert [item.request_id for item in rest.items] == [f"{s}:1", f"{s}:2"]
            with pytest.raises(NotFound):
                await service.retrieve_many("you", s, 0, 0, 0.0)

    run(script())


def test_a_held_poll_of_many_wakes_when_one_finishes(world):
    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            world.sampler.held = True
            await submit(service, sample(s, 0))
            poll = asyncio.ensure_future(service.retrieve_many(OWNER, s, 0, 0, 20.0))
            await asyncio.sleep(0.02)
            assert not poll.done()
            await service.cancel(OWNER, f"{s}:0")
            found = await asyncio.wait_for(poll, 5.0)
            assert found.items == (Completion(f"{s}:0", "failed", 0),)
            assert service._parts.futures._listeners == {}

    run(script())


def test_cursors_go_on_after_a_restart(world):
    async def before():
        async with world.service() as service:
            s = await new_sampler(service)
            await outcome(service, await submit(service, sample(s, 0)))
            return s, await service.retrieve_many(OWNER, s, 0, 0, 0.0)

    async def after(s, told):
        async with world.restarted() as service:
            assert await service.retrieve_many(OWNER, s, 0, 0, 0.0) == told
            await outcome(service, await submit(service, sample(s, 1)))
            more = await service.retrieve_many(OWNER, s, 0, told.cursor, 0.0)
            assert [i.request_id for i in more.items] == [f"{s}:1"] and more.cursor > told.cursor

    run(after(*run(before())))
