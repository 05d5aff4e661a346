"""What is left when a session ends: weights that a new one can load, and words that say where."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from trimtab.errors import Gone
from trimtab.service.clock import Awake, steady
from trimtab.service.core import ServiceSettings
from trimtab.types import LoadWeights, SaveWeights

from .support import (
    OWNER,
    QUIET,
    World,
    forward_backward,
    new_model,
    optim_step,
    result,
    run,
    submit,
)
from .test_replay import alive, kill


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, replace(QUIET, retry_seconds=0.02))


async def trained(service, session, number=0, amount=3):
    m = await new_model(service, session, number)
    await result(service, forward_backward(m, 1, [amount]))
    await result(service, optim_step(m, 2))
    return m


async def gone(service, m):
    async with asyncio.timeout(10):
        while service._parts.lanes.get(m) is not None:
            await asyncio.sleep(0.01)


async def loaded(world, service, path):
    """The weight of a checkpoint, in a new session of the same owner."""
    session = await service.create_session(OWNER)
    load = LoadWeights(path, True, session_id=session, model_seq_id=0)
    return world.learner.weights[(await result(service, load)).model_id]


async def refusal(service, session, m):
    with pytest.raises(Gone) as told:
        await submit(service, optim_step(m, 9))
    with pytest.raises(Gone) as heard:
        await service.heartbeat(OWNER, session)
    assert told.value.message == heard.value.message
    return told.value.message


def test_an_expired_session_says_where_its_weights_are(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            a, b = await trained(service, session), await trained(service, session, 1, amount=5)
            await result(service, forward_backward(b, 3, [7]))  # of a window no step closed
            world.clock.now += 7201
            await service.sweep()
            await gone(service, a)
            await gone(service, b)
            paths = [f"tinker://{m}/weights/session-end" for m in (a, b)]
            assert await refusal(service, session, a) == (
                f"session {session!r} has expired: no heartbeat for 2 h; create a new one. Its"
                f" models were saved: '{paths[0]}', '{paths[1]}'"
            )
            assert [await loaded(world, service, path) for path in paths] == [3, 5]
            found = await service.weights_info(OWNER, paths[0])
            assert found.expires_at - world.clock.now == 30 * 86400.0
            assert a not in world.learner.weights

    run(script())


def test_what_was_not_trained_or_is_saved_already_is_not_saved(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            await new_model(service, session, 0)
            m = await trained(service, session, 1)
            await result(service, SaveWeights(m, 3, "mine"))
            await service.finish_session(OWNER, session, "success")
            await gone(service, m)
            assert await refusal(service, session, m) == (
                f"session {session!r} is finished (success); create a new one. Its models were"
                f" saved: 'tinker://{m}/weights/mine'"
            )
            rows = service._parts.store.read("SELECT path FROM checkpoints")
            assert [row["path"] for row in rows] == [f"tinker://{m}/weights/mine"]

    run(script())


def test_a_client_that_took_the_name_keeps_it(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await trained(service, session)
            await result(service, SaveWeights(m, 3, "session-end"))
            await result(service, forward_backward(m, 4, [1]))
            await result(service, optim_step(m, 5))
            await service.finish_session(OWNER, session, "success")
            await gone(service, m)
            text = await refusal(service, session, m)
            assert text.endswith(f"were saved: 'tinker://{m}/weights/session-end-2'")
            assert await loaded(world, service, f"tinker://{m}/weights/session-end") == 3
            assert await loaded(world, service, f"tinker://{m}/weights/session-end-2") == 7

    run(script())


def test_weights_that_cannot_be_saved_stay_until_they_can(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await trained(service, session)
            tries = []

            def full():
                tries.append(1)
                raise OSError(28, "No space left on device")

            world.learner.on_save = full
            await service.finish_session(OWNER, session, "success")
            async with asyncio.timeout(10):
                while len(tries) < 2:
                    await asyncio.sleep(0.01)
            assert "1 of its models are still being saved" in await refusal(service, session, m)
            world.learner.on_save = lambda: None
            await gone(service, m)
            assert "session-end" in await refusal(service, session, m)

    run(script())


@pytest.mark.parametrize("cut", ["before anything is run", "between the files and the row"])
def test_an_end_that_was_cut_is_finished_once(world, cut):
    async def before():
        service = await alive(world)
        session = await service.create_session(OWNER)
        m = await trained(service, session)
        if cut == "before anything is run":
            world.learner.gate.clear()
            await submit(service, forward_backward(m, 3, [1]))
            await service.finish_session(OWNER, session, "success")
        else:
            closed = asyncio.Event()

            def die(model_id):
                service._parts.store.close()
                loop.call_soon_threadsafe(closed.set)

            loop, world.learner.unload = asyncio.get_running_loop(), die
            await service.finish_session(OWNER, session, "success")
            await closed.wait()
        await kill(world, service)
        return session, m

    async def after(session, m):
        service = await alive(world)
        await gone(service, m)
        assert "session-end'" in await refusal(service, session, m)
        assert await loaded(world, service, f"tinker://{m}/weights/session-end") == 3
        home = world.path / "checkpoints"
        assert len(list(home.iterdir())) == 1
        await service.stop()

    run(after(*run(before())))


# ------------------------------------------------------------------ silence, and clocks that jump


def test_a_pause_of_the_server_is_nobodys_silence(tmp_path):
    """Asleep, stopped or blocked for a day: sessions keep the time they had, less a minute."""
    world = World(tmp_path, ServiceSettings(sweep_seconds=3600.0))

    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            parked = await submit(service, forward_backward(m, 2, [1]))  # 1 is on its way
            world.clock.now += 86400.0
            await service.sweep()
            await service.heartbeat(OWNER, session)
            await result(service, forward_backward(m, 1, [1]))
            assert (await service.retrieve(OWNER, parked.request_id, 5.0)).state == "done"
            for _ in range(121):  # but a client that is silent while it could be heard is gone
                world.clock.now += 60.0
                await service.sweep()
            with pytest.raises(Gone, match="no heartbeat for 2 h"):
                await service.heartbeat(OWNER, session)

    run(script())


def test_awake_counts_a_pause_as_the_longest_it_believes():
    now = [100.0]
    awake = Awake(lambda: now[0], 60.0)
    for step, total in [(5.0, 5.0), (1000.0, 65.0), (-50.0, 65.0), (10.0, 75.0)]:
        now[0] += step
        assert awake() == total


def test_the_calendar_does_not_follow_the_system_clock(world, monkeypatch):
    async def script():
        service = world.build()
        clock = steady(service._parts.store)
        assert abs(clock() - time.time()) < 1.0
        for jump in (86400.0, -86400.0):
            real = time.time() + jump
            monkeypatch.setattr(time, "time", lambda now=real: now)
            assert abs(clock() - real + jump) < 5.0
            monkeypatch.undo()
        await service.start()
        world.clock.now = time.time() + 3600.0  # what the journal saw last
        await service.create_session(OWNER)
        assert 3590.0 < steady(service._parts.store)() - time.time() <= 3600.0
        await service.stop()

    run(script())
