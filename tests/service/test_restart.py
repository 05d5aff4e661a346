"""What a new process makes of the journal of the one before, and how a service stops."""

from __future__ import annotations

import asyncio
import pickle
import time

import numpy as np
import pytest

from trimtab.errors import Stopping
from trimtab.types import SaveWeightsForSampler

from .support import (
    OWNER,
    World,
    error,
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


def test_pending_samples_are_drawn_again_with_their_seed(world):
    async def before():
        async with world.service() as service:
            s = await new_sampler(service)
            told = await result(service, sample(s, 0, seed=None))
            world.sampler.held = True
            promise = await submit(service, sample(s, 1, n=2, seed=None))
            seed = world.sampler.work[-1].request.params.seed
            poll = asyncio.ensure_future(outcome(service, promise, 20.0))
            await asyncio.sleep(0.01)
            await service.stop()
            assert (await poll).state == "pending"
            return promise, seed, told, f"{s}:0"

    async def after(promise, seed, told, old):
        async with world.restarted() as service:
            drawn = pickle.loads((await outcome(service, promise)).body)
            assert world.sampler.work[0].request.params.seed == seed
            first = (seed + np.arange(4)) % 44 + 20
            np.testing.assert_array_equal(drawn.sequences[0].tokens, first)
            again = pickle.loads((await outcome(service, old)).body)
            np.testing.assert_array_equal(again.sequences[0].tokens, told.sequences[0].tokens)
            assert len(world.sampler.work) == 1  # what was told is not drawn again
            rows = service._parts.store.read("SELECT sequence_id FROM sequences ORDER BY 1")
            assert [r["sequence_id"] for r in rows][1:] == list(promise.sequence_ids)

    run(after(*run(before())))


def test_a_sample_that_cannot_be_drawn_again_fails_alone(world):
    async def before():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            for number in (0, 1):
                await result(service, SaveWeightsForSampler(m, number + 1, None, number))
            world.sampler.held = True
            samplers = [f"{session}:sample:{number}" for number in (0, 1, 1)]
            promises = [await submit(service, sample(s, i)) for i, s in enumerate(samplers)]
            gone = ("DELETE FROM bodies WHERE request_id = ?", (promises[1].request_id,))
            await service._parts.store.write(lambda db: db.execute(*gone))
            return promises

    async def after(promises):
        broken = world.sampler = type(world.sampler)()
        publish = broken.publish

        def publishing(target, ref):
            if target.endswith(":1"):
                raise OSError(5, "Input/output error")
            publish(target, ref)

        broken.publish = publishing
        async with world.service() as service:
            text = await error(service, promises[0])
            assert text.startswith("server: it cannot be drawn again: [Errno 5]")
            assert "body is missing" in await error(service, promises[1])
            assert (await outcome(service, promises[2])).state == "done"

    run(after(run(before())))


def test_published_weights_are_published_again_when_used(world):
    async def before():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            await result(service, SaveWeightsForSampler(m, 1, None, 0))
            await result(service, forward_backward(m, 2, [1]))
            await result(service, optim_step(m, 3))
            await result(service, SaveWeightsForSampler(m, 4, None, 1, "inflight"))
            path = (await result(service, SaveWeightsForSampler(m, 5, "named", None))).path
            await service.create_sampling_session(OWNER, session, 2, model_path=path)
            return session, m

    async def after(session, m):
        async with world.restarted() as service:
            assert world.sampler.published == []
            for number, version in [(1, 4), (0, 1), (2, 5)]:
                drawn = await result(service, sample(f"{session}:sample:{number}", 7))
                assert drawn.sequences[0].versions == ((f"{m}:{version}", 4),)
            assert len(world.sampler.published) == 3
            steps = [ref.step for ref in world.sampler.targets.values()]
            assert sorted(steps) == [0, 1, 1]

    run(after(*run(before())))


def test_stopping_leaves_what_runs_pending_and_takes_no_more(world):
    async def script():
        service = world.build()
        await service.start()
        m, s = await new_model(service), await new_sampler(service)
        world.learner.gate.clear()
        world.sampler.held = True
        running = await submit(service, forward_backward(m, 1, [1]))
        drawing = await submit(service, sample(s, 0))
        polls = [asyncio.ensure_future(outcome(service, p, 20.0)) for p in (running, drawing)]
        many = asyncio.ensure_future(service.retrieve_many(OWNER, s, 0, 0, 20.0))
        await asyncio.sleep(0.05)
        started = time.perf_counter()
        await service.stop()
        assert time.perf_counter() - started < 3.0
        assert [(await poll).state for poll in polls] == ["pending", "pending"]
        assert (await many).items == ()
        with pytest.raises(Stopping):
            await submit(service, optim_step(m, 2))
        await service.stop()  # twice is fine
        return m, s

    async def after(m, s):
        async with world.restarted() as service:
            await outcome(service, f"{m}:1")
            await outcome(service, f"{s}:0")
            assert world.learner.windows[m] == 1  # it ran once, in this process

    run(after(*run(script())))


def test_a_kill_in_the_middle_is_like_a_stop(world):
    """No stop at all: the store is closed as the kernel would, with requests open."""

    async def before():
        service = world.build()
        await service.start()
        m = await new_model(service)
        done = await submit(service, forward_backward(m, 1, [1]))
        told = await outcome(service, done)
        world.learner.gate.clear()
        await submit(service, optim_step(m, 2))
        service._parts.store.close()
        world.learner.stopping.set()
        world.sampler.stop()
        return m, told

    async def after(m, told):
        async with world.restarted() as service:
            assert await outcome(service, f"{m}:1") == told
            assert (await outcome(service, f"{m}:2")).state == "done"
            assert world.learner.weights[m] == 1

    run(after(*run(before())))
