"""Lifetimes and ownership of sequences, through a real service and across its restarts."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace

import numpy as np
import pytest

from trimtab.errors import Invalid
from trimtab.service.core import Held
from trimtab.types import Datum, ForwardBackward, PromptSpan, SampledSpan

from .support import (
    OWNER,
    QUIET,
    World,
    new_model,
    new_sampler,
    outcome,
    result,
    run,
    sample,
    submit,
)

DAY = 24 * 3600.0


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def train(model_id, seq_id, name, drawn, *, loss="stable_reinforce", advantage=1.0):
    """The datum of one sampled sequence behind the prompt 20 21 22."""
    tokens = drawn.sequences[0].tokens
    n = len(tokens)
    row = np.zeros(2 + n, np.float32)
    advantages, logprobs = row.copy(), row.copy()
    advantages[2:], logprobs[2:] = advantage, drawn.sequences[0].logprobs
    datum = Datum(
        np.concatenate([[20, 21, 22], tokens[:-1]]).astype(np.int32),
        {
            "target_tokens": np.concatenate([[0, 0], tokens]).astype(np.int64),
            "logprobs": logprobs,
            "advantages": advantages,
        },
        (PromptSpan(name, 0, 3), SampledSpan(name, 0, n - 1)),
        (PromptSpan(name, 1, 2), SampledSpan(name, 0, n)),
    )
    return ForwardBackward(model_id, seq_id, (datum,), loss, {})


async def prepared(world, service, **options):
    """(session, model, sequence id, what was drawn)."""
    session = await service.create_session(OWNER)
    m = await new_model(service, session)
    s = await new_sampler(service, session)
    drawn = await result(service, sample(s, 0, record=True, **options))
    return session, m, f"{s}:0:0", drawn


async def another(service, session):
    """A new model for the session: those of before a restart are lost."""
    rows = service._parts.store.read("SELECT * FROM models")
    return await new_model(service, session, len(rows))


def test_recorded_and_trained_on(world):
    async def script():
        async with world.service() as service:
            _, m, name, drawn = await prepared(world, service)
            found = await result(service, train(m, 1, name, drawn))
            assert found.metrics["provenance_unverified:sum"] == 0.0
            (part,) = [datum.stability for datum in world.learner.batches[-1].data]
            head = drawn.sequences[0].head
            np.testing.assert_array_equal(part.head_ids_NK[2:], head.ids)
            np.testing.assert_array_equal(part.head_logprobs_NK[2:], head.logprobs)
            assert part.version_step_N[2] == 0.0 and world.learner.batches[-1].loss_fn_config

    run(script())


@pytest.mark.parametrize(("after", "lives"), [(DAY - 1, True), (DAY + 1, False)])
def test_a_day_to_the_second_across_a_restart(world, after, lives):
    async def before():
        async with world.service() as service:
            return await prepared(world, service)

    async def then(session, _, name, drawn):
        world.clock.now += after
        async with world.restarted() as service:
            m = await another(service, session)
            if lives:
                await result(service, train(m, 1, name, drawn))
                return
            with pytest.raises(Invalid, match="has expired"):
                await submit(service, train(m, 1, name, drawn))
            found = await result(service, train(m, 2, name, drawn, loss="importance_sampling"))
            assert found.metrics["provenance_unverified:sum"] == 4.0

    run(then(*run(before())))


def test_each_accepted_use_restarts_the_day_and_a_refused_one_does_not(world):
    async def first():
        async with world.service() as service:
            session, m, name, drawn = await prepared(world, service)
            world.clock.now += DAY - 10
            return session, m, name, drawn

    async def use(session, m, name, drawn):
        """At day 1 - 10 s: accepted, so alive until day 2 - 10 s."""
        async with world.restarted() as service:
            m = await another(service, session)
            await result(service, train(m, 1, name, drawn, loss="importance_sampling"))
        world.clock.now += DAY - 10  # day 2 - 20 s: refused
        async with world.restarted() as service:
            m = await another(service, session)
            wrong = train(m, 1, name, drawn)
            wrong.data[0].inputs["logprobs"][4] = -9.0
            with pytest.raises(Invalid, match="logprobs"):
                await submit(service, wrong)
        world.clock.now += 20  # day 2: the refused use did not help
        async with world.restarted() as service:
            m = await another(service, session)
            with pytest.raises(Invalid, match="has expired"):
                await submit(service, train(m, 1, name, drawn))

    run(use(*run(first())))


def test_forward_alone_restarts_the_day(world):
    async def first():
        async with world.service() as service:
            session, _, name, drawn = await prepared(world, service)
            world.clock.now += DAY - 10
            return session, name, drawn

    async def then(session, name, drawn):
        async with world.restarted() as service:
            m = await another(service, session)
            request = train(m, 1, name, drawn)
            forward = ForwardBackward(m, 1, request.data, request.loss_fn, {}, forward_only=True)
            await result(service, forward)
        world.clock.now += DAY - 10
        async with world.restarted() as service:
            await result(service, train(await another(service, session), 1, name, drawn))

    run(then(*run(first())))


def test_acceptance_pins_what_expires_in_the_queue(world):
    async def script():
        async with world.service() as service:
            _, m, name, drawn = await prepared(world, service)
            promise = await submit(service, train(m, 2, name, drawn))  # parked behind 1
            world.clock.now += 3600.0
            store = service._parts.store
            await store.write(lambda db: db.execute("DELETE FROM sequences"))
            await store.write(lambda db: db.execute("DELETE FROM arrays"))
            await result(service, train(m, 1, name, drawn, loss="importance_sampling"))
            assert (await outcome(service, promise)).state == "done"

    run(script())


def test_another_session_is_told_what_a_stranger_is_told(world):
    async def script():
        async with world.service() as service:
            _, _, name, drawn = await prepared(world, service)
            other = await new_model(service)
            with pytest.raises(Invalid) as theirs:
                await submit(service, train(other, 1, name, drawn))
            never = name.replace(":0:0", ":7:0")
            with pytest.raises(Invalid) as nobodys:
                await submit(service, train(other, 2, never, drawn))
            assert theirs.value.message == nobodys.value.message.replace(never, name)
            with pytest.raises(Invalid, match="did not sample"):  # whatever the loss
                await submit(service, train(other, 3, name, drawn, loss="importance_sampling"))
            await result(service, train(other, 4, never, drawn, loss="importance_sampling"))

    run(script())


def test_pending_cancelled_and_failed_are_told_apart_only_at_home(world):
    async def script():
        async with world.service() as service:
            _, m, name, drawn = await prepared(world, service)
            s = name.rsplit(":", 2)[0]
            other = await new_model(service)
            world.sampler.held = True
            for seq in (1, 2):
                await submit(service, sample(s, seq))
            await service.cancel(OWNER, f"{s}:2")
            await outcome(service, f"{s}:2")
            cases = [(1, "still being sampled"), (2, "was cancelled"), (9, "did not sample")]
            for i, (seq, words) in enumerate(cases):
                claimed = train(m, 1 + i, f"{s}:{seq}:0", drawn)
                with pytest.raises(Invalid, match=words):
                    await submit(service, claimed)
                claimed = train(other, 1 + i, f"{s}:{seq}:0", drawn)
                with pytest.raises(Invalid, match="did not sample"):
                    await submit(service, claimed)
            for seq, odd in enumerate((f"{s}:1:1", f"{s}:1:00", f"{s}:1", s), 4):
                with pytest.raises(Invalid, match="did not sample"):
                    await submit(service, train(m, seq, odd, drawn))

    run(script())


def test_storage_is_bounded_and_swept_in_batches(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            s = await new_sampler(service, session)
            for seq in range(3):
                await result(service, sample(s, seq, n=400, record=True))
                world.clock.now += 3600.0
                await service.heartbeat(OWNER, session)
            assert service.held().sequences == 1200
            world.clock.now += DAY - 2 * 3600.0 + 61.0
            await service.sweep()
            assert service.held() == Held(400, 1600, 1600, 1600 * 72)
            rows = service._parts.store.read("SELECT request_id FROM prompts")
            assert [row["request_id"] for row in rows] == [f"{s}:2"]
            world.clock.now += 3600.0
            await service.sweep()
            assert service.held() == Held(0, 0, 0, 0)
            for table in ("arrays", "prompts"):
                assert service._parts.store.read(f"SELECT * FROM {table}") == []

    run(script())


def test_a_prompt_stays_as_long_as_one_of_its_sequences(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m, s = await new_model(service, session), await new_sampler(service, session)
            drawn = await result(service, sample(s, 0, n=2, record=True))
            second = type(drawn)(drawn.sequences[1:])
            world.clock.now += 3600.0
            await service.heartbeat(OWNER, session)
            await result(service, train(m, 1, f"{s}:0:1", second))
            world.clock.now += DAY - 1800.0
            service._parts.sessions._open[session].heard_at = service._parts.sessions._awake()
            await service.sweep()
            assert service.held().sequences == 1
            assert len(service._parts.store.read("SELECT * FROM prompts")) == 1
            await result(service, train(m, 2, f"{s}:0:1", second))
            with pytest.raises(Invalid, match="has expired"):
                await submit(service, train(m, 3, f"{s}:0:0", drawn))

    run(script())


def test_records_beyond_their_bound_go_early(tmp_path):
    settings = replace(QUIET, max_record_bytes=10 * 4 * 72, sweep_batch=2)
    world = World(tmp_path, settings)

    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            for seq in range(15):
                await result(service, sample(s, seq, record=True))
                world.clock.now += 5.0
            await service.sweep()
            rows = service._parts.store.read("SELECT sequence_id FROM sequences")
            assert 8 <= len(rows) <= 10 and f"{s}:14:0" in [r["sequence_id"] for r in rows]

    run(script())


def test_the_bound_spares_what_a_replay_may_need(tmp_path):
    world = World(tmp_path, replace(QUIET, max_record_bytes=0, storage_seconds=0.0))

    async def script():
        async with world.service() as service:
            _, m, name, drawn = await prepared(world, service)
            await result(service, sample(name.rsplit(":", 2)[0], 1, record=True))
            await result(service, train(m, 1, name, drawn))
            await service.sweep()
            rows = service._parts.store.read("SELECT sequence_id FROM sequences")
            assert [row["sequence_id"] for row in rows] == [name]

    run(script())


def test_a_request_of_many_sequences_reads_few_times(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m, s = await new_model(service, session), await new_sampler(service, session)
            drawn = await result(service, sample(s, 0, n=1000, tokens=20, record=True))
            data = []
            for i, sequence in enumerate(drawn.sequences):
                one = type(drawn)((sequence,))
                data.extend(train(m, 1, f"{s}:0:{i}", one).data)
            sequences, reads = service._parts.sequences, []
            read = service._parts.store.read
            service._parts.store.read = lambda *a: reads.append(a) or read(*a)
            started = time.perf_counter()
            names = {f"{s}:0:{i}" for i in range(1000)}
            records, absent = sequences.find(session, names, world.clock())
            assert len(reads) == 3 and len(records) == 1000 and not absent
            sequences.find(session, names, world.clock())
            assert len(reads) == 4  # the arrays are in memory now
            request = ForwardBackward(m, 1, tuple(data), "stable_reinforce", {})
            await result(service, request)
            assert time.perf_counter() - started < 3.0
            assert len(pickle.dumps(request)) > 100_000

    run(script())
