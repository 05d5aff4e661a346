"""Samples: ids, seeds, records, back-pressure and cancelling."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from trimtab.errors import Busy, Gone, Invalid, NotFound
from trimtab.service.core import ServiceSettings
from trimtab.types import LoadWeights, SaveWeightsForSampler

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


def arrays(service, name):
    return service._parts.store.row("SELECT * FROM arrays WHERE sequence_id = ?", (name,))


def row(service, name):
    return service._parts.store.row("SELECT * FROM sequences WHERE sequence_id = ?", (name,))


def test_the_promise_carries_one_id_a_sample(world):
    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            promise = await submit(service, sample(s, 5, n=3))
            assert promise.request_id == f"{s}:5"
            assert promise.sequence_ids == (f"{s}:5:0", f"{s}:5:1", f"{s}:5:2")
            assert await submit(service, sample(s, 5, n=3)) == promise
            await outcome(service, promise)
            assert await submit(service, sample(s, 5, n=3)) == promise
            assert len(world.sampler.work) == 1
            with pytest.raises(Invalid, match="used by a sample"):
                await submit(service, sample(s, 5, n=2))

    run(script())


def test_two_samplers_may_use_one_seq_id(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            a, b = await new_sampler(service, session, 0), await new_sampler(service, session, 1)
            seen = set()
            for sampler, seq, prompt in [(a, 0, (20,)), (b, 0, (21,)), (a, 1_000_000_000, (22,))]:
                promise = await submit(service, sample(sampler, seq, prompt=prompt))
                assert (await outcome(service, promise)).state == "done"
                seen.add(promise.sequence_ids)
            assert len(seen) == 3
            assert sorted(int(w.request.prompt[0]) for w in world.sampler.work) == [20, 21, 22]

    run(script())


def test_every_sample_is_recorded_and_the_head_only_when_asked(world):
    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            await result(service, sample(s, 0, tokens=5, record=False))
            drawn = await result(service, sample(s, 1, n=2, tokens=5, record=True))
            plain, kept = arrays(service, f"{s}:0:0"), arrays(service, f"{s}:1:1")
            assert len(plain["tokens"]) == 5 * 4
            assert plain["logprobs"] is plain["head_ids"] is plain["head_logprobs"] is None
            parts = ("logprobs", "head_ids", "head_logprobs")
            assert sum(len(kept[part]) for part in parts) == 5 * 68
            tokens = np.frombuffer(kept["tokens"], "<i4")
            np.testing.assert_array_equal(tokens, drawn.sequences[1].tokens)
            assert service.held() == type(service.held())(3, 15, 10, 15 * 4 + 10 * 68)
            prompts = service._parts.store.read("SELECT * FROM prompts")
            assert [len(p["tokens"]) for p in prompts] == [12, 12]  # once a request

    run(script())


def test_temperature_0_is_recorded_as_1(world):
    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            for seq, tau in enumerate([0.0, 0.5]):
                await result(service, sample(s, seq, temperature=tau))
            assert [row(service, f"{s}:{i}:0")["temperature"] for i in (0, 1)] == [1.0, 0.5]

    run(script())


def test_a_seed_is_drawn_and_journalled_where_none_is_given(world):
    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            for seq, seed in enumerate([None, None, 2**63 - 1]):
                await result(service, sample(s, seq, seed=seed))
            used = [work.request.params.seed for work in world.sampler.work]
            rows = service._parts.store.read("SELECT seed FROM requests ORDER BY seq_id")
            assert [int(r["seed"]) for r in rows] == used
            assert used[2] == 2**63 - 1 and used[0] != used[1]

    run(script())


def test_a_full_queue_is_busy_and_leaves_no_trace(world):
    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            world.sampler.held, world.sampler.limit = True, 1
            await submit(service, sample(s, 0))
            with pytest.raises(Busy):
                await submit(service, sample(s, 1))
            with pytest.raises(NotFound):
                await outcome(service, f"{s}:1")
            world.sampler.let_go()
            await result(service, sample(s, 1))

    run(script())


def test_the_service_bounds_pending_samples_itself(tmp_path):
    world = World(tmp_path, ServiceSettings(sweep_seconds=3600.0, max_pending_samples=2))

    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            world.sampler.held = True
            for i in range(2):
                await submit(service, sample(s, i))
            with pytest.raises(Busy):
                await submit(service, sample(s, 2))
            world.sampler.let_go()

    run(script())


def test_a_refused_sample_is_refused_again_alike(world):
    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            for bad, words in [
                (sample(s, 0, prompt=()), "0 tokens"),
                (sample(s, 1, n=0), "num_sam"),
            ]:
                for _ in range(2):
                    with pytest.raises(Invalid, match=words):
                        await submit(service, bad)
            with pytest.raises(Invalid, match="not a list"):
                await service.reject(OWNER, "sample", s, 2, Invalid("prompt: not a list"), b"{}")
            assert await error(service, f"{s}:2") == "user: prompt: not a list"
            found = await service.retrieve_many(OWNER, s, 0, 0, 0.0)
            assert found.items == ()  # a refusal was answered at once; no poll waits for it

    run(script())


def test_cancel_fails_the_future_and_only_its_owner_may(world):
    async def script():
        async with world.service() as service:
            s = await new_sampler(service)
            world.sampler.held = True
            promise = await submit(service, sample(s, 0))
            with pytest.raises(NotFound):
                await service.cancel("you", promise.request_id)
            await service.cancel(OWNER, promise.request_id)
            assert await error(service, promise) == "user: the request was cancelled"
            assert row(service, promise.sequence_ids[0]) is None
            await service.cancel(OWNER, promise.request_id)  # finished: stays as it is
            m = await new_model(service)
            with pytest.raises(Invalid, match="only samples"):
                await service.cancel(OWNER, f"{m}:0")

    run(script())


def test_snapshots_stay_and_inflight_moves(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            kinds = [("snapshot", 0), ("inflight", 1), ("inflight", 2)]
            samplers = []
            for i, (kind, number) in enumerate(kinds):
                seq = 3 * i + 1
                await result(service, forward_backward(m, seq, [i + 1]))
                await result(service, optim_step(m, seq + 1))
                saved = await result(service, SaveWeightsForSampler(m, seq + 2, None, number, kind))
                assert saved.path is None
                assert saved.sampling_session_id == f"{session}:sample:{number}"
                samplers.append(saved.sampling_session_id)
            versions = []
            for s in samplers:
                drawn = await result(service, sample(s, 0))
                versions.append(drawn.sequences[0].versions[0][0])
            assert versions == [f"{m}:3", f"{m}:9", f"{m}:9"]  # both inflight: the newest
            kept = pickle.loads(pickle.dumps(row(service, f"{samplers[1]}:0:0")["versions"]))
            assert kept == f'[["{m}:9", 4, 3, "{m}"]]'

    run(script())


def test_a_retried_unnamed_save_may_carry_a_new_session_number(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            first = await submit(service, SaveWeightsForSampler(m, 1, None, 4))
            assert await submit(service, SaveWeightsForSampler(m, 1, None, 7)) == first
            saved = pickle.loads((await outcome(service, first)).body)
            assert saved.sampling_session_id == f"{session}:sample:4"
            with pytest.raises(Invalid):
                await submit(service, SaveWeightsForSampler(m, 1, None, 7, "inflight"))
            with pytest.raises(NotFound):
                await service.get_sampler(OWNER, f"{session}:sample:7")

    run(script())


def test_named_weights_make_sampling_sessions(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            saved = await result(service, SaveWeightsForSampler(m, 1, "first", None))
            assert saved.path == f"tinker://{m}/sampler_weights/first"
            s = await service.create_sampling_session(OWNER, session, 3, model_path=saved.path)
            assert s == f"{session}:sample:3"
            again = await service.create_sampling_session(OWNER, session, 3, model_path=saved.path)
            assert again == s
            both = await service.create_sampling_session(
                OWNER, session, 4, base_model="tiny", model_path=saved.path
            )
            record = await service.get_sampler(OWNER, both)
            assert (record.base_model, record.model_path) == ("tiny", saved.path)
            with pytest.raises(Invalid, match="'small'; model_path is a checkpoint of 'tiny'"):
                await service.create_sampling_session(
                    OWNER, session, 5, base_model="small", model_path=saved.path
                )
            with pytest.raises(Invalid, match="exists with model_path"):
                await service.create_sampling_session(OWNER, session, 3, base_model="tiny")
            record = await service.get_sampler(OWNER, s)
            assert (record.base_model, record.model_path) == ("tiny", saved.path)
            await result(service, sample(s, 0))
            with pytest.raises(NotFound):
                await service.get_sampler("you", s)
            with pytest.raises(Invalid, match="only weights can be loaded"):
                await submit(service, LoadWeights(saved.path, True, model_id=m, seq_id=2))

    run(script())


def test_joining_counts_up_across_a_restart(world):
    async def before():
        async with world.service() as service:
            s = await new_sampler(service)
            return s, [await service.join_sampling_session(OWNER, s) for _ in range(2)]

    async def after(s):
        async with world.restarted() as service:
            return await service.join_sampling_session(OWNER, s)

    s, counts = run(before())
    assert counts == [1, 2] and run(after(s)) == 3


def test_weights_out_of_memory_come_back_from_disk(tmp_path):
    world = World(tmp_path, ServiceSettings(sweep_seconds=3600.0, max_published=2))

    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            for i in (1, 2, 3):
                await result(service, SaveWeightsForSampler(m, i, None, i))
            for i in (1, 2, 1, 3, 1, 2):  # 3 drives out 2, used longer ago than 1
                await result(service, sample(f"{session}:sample:{i}", len(world.sampler.work)))
            assert [int(t[-1]) for t, _ in world.sampler.published] == [1, 2, 3, 2]
            assert sorted(world.sampler.targets) == [f"{m}:1", f"{m}:2"]

    run(script())


def test_unnamed_weights_are_dropped_when_idle_but_not_the_newest(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            for i in (1, 2):
                await result(service, SaveWeightsForSampler(m, i, None, i))
                await result(service, sample(f"{session}:sample:{i}", 0))
                world.clock.now += 1.0
            assert len(list((world.path / "checkpoints").iterdir())) == 2
            for _ in range(25):
                world.clock.now += 3600.0
                await service.heartbeat(OWNER, session)
            await service.sweep()
            assert len(list((world.path / "checkpoints").iterdir())) == 1
            await result(service, sample(f"{session}:sample:2", 1))
            with pytest.raises(Gone, match="no longer kept"):
                await submit(service, sample(f"{session}:sample:1", 1))

    run(script())
