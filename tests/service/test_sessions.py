"""Sessions: opened once a key, kept by heartbeats, ended once, refused afterwards."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from trimtab.errors import Busy, Gone, Invalid, NotFound
from trimtab.service.core import ServiceSettings

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


def row(service, session):
    return service._parts.store.row("SELECT * FROM sessions WHERE session_id = ?", (session,))


def test_an_idempotency_key_opens_one_session_an_owner(world):
    async def script():
        async with world.service() as service:
            ids = await asyncio.gather(
                *(service.create_session(OWNER, idempotency_key="k") for _ in range(5))
            )
            assert len(set(ids)) == 1 and uuid.UUID(ids[0]).version == 4
            assert await service.create_session("you", idempotency_key="k") != ids[0]
            assert await service.create_session(OWNER) != await service.create_session(OWNER)

    run(script())


def test_expiry_two_hours_after_the_last_heartbeat(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            world.clock.now += 7199
            await service.heartbeat(OWNER, session)
            world.clock.now += 7199
            await service.sweep()
            await service.heartbeat(OWNER, session)
            world.clock.now += 7201
            with pytest.raises(Gone, match="no heartbeat for 2 h"):  # before any sweep
                await service.heartbeat(OWNER, session)
            await service.sweep()
            with pytest.raises(Gone, match="no heartbeat for 2 h"):
                await service.heartbeat(OWNER, session)
            assert row(service, session)["state"] == "expired"

    run(script())


def test_the_first_reason_wins_and_later_operations_are_refused(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            s = await new_sampler(service, session)
            promise = await submit(service, sample(s, 0))
            await outcome(service, promise)
            await service.finish_session(OWNER, session, "interrupted", "ctrl-c")
            await service.finish_session(OWNER, session, "success")
            found = row(service, session)
            assert (found["reason"], found["detail"]) == ("interrupted", "ctrl-c")
            refused = [
                lambda: service.heartbeat(OWNER, session),
                lambda: submit(service, sample(s, 1)),
                lambda: new_model(service, session),
                lambda: new_sampler(service, session, 1),
                lambda: service.join_sampling_session(OWNER, s),
            ]
            for call in refused:
                with pytest.raises(Gone, match=r"is finished \(interrupted\)"):
                    await call()
            assert (await outcome(service, promise)).state == "done"  # results stay

    run(script())


def test_sessions_of_others_are_unknown(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            for call in (
                service.heartbeat("you", session),
                service.finish_session("you", session, "success"),
                service.heartbeat("you", "nobody"),
                new_sampler(service, "nobody"),
            ):
                with pytest.raises(NotFound, match=r"session '.*' is unknown"):
                    await call
            await service.heartbeat(OWNER, session)

    run(script())


def test_open_sessions_get_a_full_grace_after_a_restart(world):
    async def before():
        async with world.service() as service:
            return await service.create_session(OWNER, idempotency_key="k")

    async def after(session):
        world.clock.now += 7 * 3600
        async with world.restarted() as service:
            await service.sweep()
            await service.heartbeat(OWNER, session)
            assert await service.create_session(OWNER, idempotency_key="k") == session

    run(after(run(before())))


def test_sessions_an_owner_are_bounded(tmp_path):
    world = World(tmp_path, ServiceSettings(sweep_seconds=3600.0, max_sessions=2))

    async def script():
        async with world.service() as service:
            first = await service.create_session(OWNER)
            await service.create_session(OWNER)
            with pytest.raises(Busy, match="2 sessions"):
                await service.create_session(OWNER)
            await service.create_session("you")
            await service.finish_session(OWNER, first, "success")
            await service.create_session(OWNER)

    run(script())


def test_sampling_sessions_that_are_refused(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            make = service.create_sampling_session
            with pytest.raises(Invalid, match="base_model or model_path"):
                await make(OWNER, session, 0)
            with pytest.raises(Invalid, match="'huge' is not served here; allowed are tiny"):
                await make(OWNER, session, 0, base_model="huge")
            with pytest.raises(Invalid, match="sampling_session_seq_id must lie"):
                await make(OWNER, session, -1, base_model="tiny")
            m = await new_model(service, session)
            with pytest.raises(Invalid, match="only sampler_weights will do"):
                await make(OWNER, session, 0, model_path=f"tinker://{m}/weights/a")
            with pytest.raises(NotFound):
                await make(OWNER, session, 0, model_path=f"tinker://{m}/sampler_weights/a")
            with pytest.raises(NotFound):
                await submit(service, sample(f"{session}:sample:0", 0))
            assert await outcome(service, await submit(service, forward_backward(m, 1, [1])))

    run(script())
