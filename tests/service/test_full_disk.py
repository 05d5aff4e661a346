"""A full disk is a pause: SQLite's own error, from a file that may not grow."""

from __future__ import annotations

import asyncio
import json

import pytest

from trimtab.errors import ServerError
from trimtab.types import ForwardBackward

from .support import (
    World,
    datum,
    forward_backward,
    new_model,
    new_sampler,
    optim_step,
    outcome,
    result,
    run,
    sample,
    submit,
)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def wide(m, seq, token):
    """A request whose result has pages of its own."""
    data = tuple(datum([token] * 30) for _ in range(60))
    return ForwardBackward(m, seq, data, "cross_entropy", {})


async def pages(service, sql):
    """Bound the file, or let it grow again, as a quota would."""
    return await service._parts.store.write(lambda db: db.execute(sql).fetchone()[0])


async def fill(service):
    used = await pages(service, "PRAGMA page_count")
    await pages(service, f"PRAGMA max_page_count = {used}")

    def wedge(db):  # the pages that are free already
        for _ in range(20):
            db.execute("INSERT INTO results VALUES (hex(randomblob(8)), zeroblob(3000))")

    for _ in range(50):
        try:
            await service._parts.store.write(wedge)
        except Exception:
            return


def test_an_outcome_waits_for_room_and_nothing_runs_ahead_of_it(world, caplog):
    async def script():
        async with world.service() as service:
            session = await service.create_session("me")
            m, s = await new_model(service, session), await new_sampler(service, session)
            world.learner.gate.clear()
            world.sampler.held = True
            first = await submit(service, wide(m, 1, 3))
            second = await submit(service, optim_step(m, 2))
            drawn = await submit(service, sample(s, 0, tokens=4000))
            await fill(service)
            world.learner.gate.set()
            world.sampler.let_go()
            async with asyncio.timeout(10):
                while caplog.text.count("waits for the disk") < 2:
                    await asyncio.sleep(0.01)
            for promise in (first, second, drawn):
                assert (await outcome(service, promise, 0.0)).state == "pending"
            assert ("optim_step", m) not in world.learner.calls
            assert "waits for the disk" in caplog.text and "full" in caplog.text
            with pytest.raises(ServerError):  # which the client sends again
                await submit(service, wide(m, 3, 1))
            await pages(service, "PRAGMA max_page_count = 1000000")
            for promise in (first, second, drawn):
                assert (await outcome(service, promise)).state == "done"
            await result(service, wide(m, 3, 1))
            assert (world.learner.weights[m], world.learner.windows[m]) == (5400.0, 1800.0)

    run(script())


def test_a_kill_on_a_full_disk_loses_nothing(world, caplog):
    from .test_replay import alive, kill, settled

    async def script():
        service = await alive(world)
        m = await new_model(service)
        world.learner.gate.clear()
        first = await submit(service, wide(m, 1, 3))
        await fill(service)
        world.learner.gate.set()
        async with asyncio.timeout(10):
            while "waits for the disk" not in caplog.text:
                await asyncio.sleep(0.01)
        assert world.learner.windows[m] == 5400.0  # it ran, and nobody was told
        await kill(world, service)
        service = await alive(world)
        await settled(service, m)
        assert (await outcome(service, first)).state == "done"
        await result(service, optim_step(m, 2))
        assert world.learner.weights[m] == 5400.0
        await service.stop()

    run(script())


def test_a_snapshot_that_cannot_be_written_is_taken_later(tmp_path, caplog):
    from .test_replay import ALWAYS, alive

    world = World(tmp_path, ALWAYS)

    async def script():
        service = await alive(world)
        m = await new_model(service)

        def full():
            raise OSError(28, "No space left on device")

        world.learner.on_save = full
        await result(service, forward_backward(m, 1, [3]))
        await result(service, optim_step(m, 2))
        async with asyncio.timeout(10):
            while "no snapshot" not in caplog.text:
                await asyncio.sleep(0.01)
        assert service._parts.snapshots.find(m) is None and "No space left" in caplog.text
        kept = service._parts.store.read("SELECT seq_id FROM bodies WHERE key = ?", (m,))
        assert [row["seq_id"] for row in kept] == [1, 2]  # so it can be run again all the same
        world.learner.on_save = lambda: None
        await result(service, forward_backward(m, 3, [3]))
        await result(service, optim_step(m, 4))
        await service._parts.snapshots.stop(5.0)
        snapshot = service._parts.snapshots.find(m)
        file = tmp_path / "snapshots" / snapshot.folder / "state.json"
        assert json.loads(file.read_text())["step"] >= 1
        assert [f.name for f in (tmp_path / "snapshots").iterdir()] == [snapshot.folder]
        await service.stop()

    run(script())
