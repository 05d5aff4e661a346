"""One lane a model: strictly by seq_id, each once, whatever arrives when."""

from __future__ import annotations

import asyncio

import pytest

from trimtab.errors import Busy, Gone, Invalid, NotFound
from trimtab.service.core import ServiceSettings
from trimtab.types import CreateModel, LoraConfig, UnloadModel

from .support import (
    BAD,
    OWNER,
    World,
    error,
    forward_backward,
    new_model,
    optim_step,
    outcome,
    result,
    run,
    submit,
)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_chunks_that_arrive_2_3_4_1_run_1_2_3_4(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            late = [
                await submit(service, forward_backward(m, 2, [2, 2])),
                await submit(service, forward_backward(m, 3, [3])),
                await submit(service, optim_step(m, 4)),
            ]
            for promise in late:
                assert (await outcome(service, promise, timeout=0.0)).state == "pending"
            first = await submit(service, forward_backward(m, 1, [1, 1, 1]))
            for promise in [first, *late]:
                assert (await outcome(service, promise)).state == "done"
            assert [c[2] for c in world.learner.calls if c[0] == "forward_backward"] == [1, 2, 3]
            assert world.learner.weights[m] == 1 * 3 + 2 * 2 + 3
            assert first.request_id == f"{m}:1" and first.model_id == m

    run(script())


def test_a_resend_joins_its_first_promise_and_runs_once(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            await result(service, forward_backward(m, 1, [5]))
            world.learner.gate.clear()
            first = await submit(service, optim_step(m, 2))
            assert await submit(service, optim_step(m, 2)) == first  # while it runs
            world.learner.gate.set()
            await outcome(service, first)
            assert await submit(service, optim_step(m, 2)) == first  # when it is done
            assert world.learner.steps[m] == 1 and world.learner.weights[m] == 5

    run(script())


def test_concurrent_resends_are_one_request(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            promises = await asyncio.gather(
                *(submit(service, forward_backward(m, 1, [7])) for _ in range(20))
            )
            assert len(set(promises)) == 1
            await outcome(service, promises[0])
            assert world.learner.windows[m] == 7

    run(script())


def test_a_used_id_with_another_body_names_both(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            await result(service, forward_backward(m, 1, [5]))
            with pytest.raises(
                Invalid, match=r"seq_id 1 .* used by a forward_backward .* optim_st"
            ):
                await submit(service, optim_step(m, 1))
            with pytest.raises(Invalid, match="body"):
                await submit(service, forward_backward(m, 1, [6]))
            assert world.learner.windows[m] == 5
            await result(service, optim_step(m, 2))

    run(script())


def test_a_refused_id_is_used_up_and_refused_again_alike(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            bad = forward_backward(m, 1, [99])
            with pytest.raises(Invalid) as first:
                await submit(service, bad)
            with pytest.raises(Invalid) as again:
                await submit(service, bad)
            assert first.value.message == again.value.message
            assert "target_tokens[0] is 99" in first.value.message
            assert await error(service, f"{m}:1") == f"user: {first.value.message}"
            await result(service, forward_backward(m, 2, [4]))  # the lane did not wait for 1

    run(script())


def test_a_refused_early_id_waits_for_its_turn(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            early = await submit(service, forward_backward(m, 2, [99]))
            third = await submit(service, optim_step(m, 3))
            await result(service, forward_backward(m, 1, [4]))
            assert "token ids" in await error(service, early)
            assert "seq_id 2 failed" in await error(service, third)

    run(script())


def test_wire_can_use_up_an_id_it_could_not_read(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            why = Invalid("broken protobuf")
            for _ in range(2):
                with pytest.raises(Invalid, match="broken protobuf"):
                    await service.reject(OWNER, "forward_backward", m, 1, why, b"\x00")
            with pytest.raises(NotFound):
                await service.reject("you", "forward_backward", m, 2, why, b"\x00")
            assert await error(service, f"{m}:1") == "user: broken protobuf"
            step = await submit(service, optim_step(m, 2))
            assert "seq_id 1 failed" in await error(service, step)

    run(script())


def test_a_bad_chunk_that_comes_early_does_not_keep_the_first_one_away(world):
    """The client sends chunk 1 only after all the others were taken: a refused one would leave its
    id missing for ever. A bad chunk gets a promise that has failed; the first one is refused."""

    async def script():
        async with world.service() as service:
            m = await new_model(service)
            why = Invalid("broken protobuf")
            second = await submit(service, forward_backward(m, 2, [99]))
            third = await service.reject(OWNER, "forward_backward", m, 3, why, b"\x00")
            assert await submit(service, forward_backward(m, 2, [99])) == second
            assert "token ids" in await error(service, second)  # at once: nothing has run yet
            assert await error(service, third) == "user: broken protobuf"
            with pytest.raises(Invalid, match="token ids"):
                await submit(service, forward_backward(m, 1, [99]))
            await result(service, forward_backward(m, 4, [4]))
            assert "seq_id 1, 2, 3" in await error(service, await submit(service, optim_step(m, 5)))

    run(script())


def test_an_id_far_ahead_is_refused_and_costs_nothing(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            for far in (2**40, 2**62):
                with pytest.raises(Invalid, match="too far ahead: the next in turn is 1"):
                    await submit(service, optim_step(m, far))
            await result(service, forward_backward(m, 1, [4]))
            await result(service, UnloadModel(m))  # walks over every id that is missing

    run(script())


def test_a_missing_id_fails_what_waits_after_the_gap_timeout(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            waiting = [
                await submit(service, forward_backward(m, 2, [2])),
                await submit(service, optim_step(m, 3)),
            ]
            world.clock.now += 599.0
            await service.sweep()
            assert (await outcome(service, waiting[0], 0.0)).state == "pending"
            waiting.append(await submit(service, forward_backward(m, 4, [4])))  # no new patience
            world.clock.now += 2.0
            await service.sweep()
            for promise in waiting:
                text = await error(service, promise)
                assert text.startswith("user: ") and "seq_id 1, which comes before it" in text
            with pytest.raises(Invalid, match=r"seq_id 1 .* too late"):
                await submit(service, forward_backward(m, 1, [1]))
            step = await submit(service, optim_step(m, 5))  # the lane goes on, its window spoiled
            assert "seq_id 1, 2, 4 failed" in await error(service, step)
            await result(service, forward_backward(m, 6, [5]))
            await result(service, optim_step(m, 7))
            assert world.learner.weights[m] == 5

    run(script())


def test_a_gap_counts_from_when_the_lane_stood_still(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            third = await submit(service, forward_backward(m, 3, [3]))
            world.clock.now += 500.0
            world.learner.gate.clear()
            first = await submit(service, forward_backward(m, 1, [1]))
            world.clock.now += 700.0
            await service.sweep()  # 1 still runs: nobody waits for 2 yet
            world.learner.gate.set()
            await outcome(service, first)
            await service.sweep()
            assert (await outcome(service, third, 0.0)).state == "pending"
            await result(service, forward_backward(m, 2, [2]))
            assert (await outcome(service, third)).state == "done"

    run(script())


def test_a_failed_forward_backward_fails_the_next_step_and_clears_the_window(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            await result(service, forward_backward(m, 1, [1]))
            failed = await submit(service, forward_backward(m, 2, [BAD]))
            assert (await error(service, failed)).startswith("server: internal error: RuntimeError")
            text = await error(service, await submit(service, optim_step(m, 3)))
            assert text.startswith("user: ") and "seq_id 2 failed" in text
            assert ("clear_window", m) in world.learner.calls
            await result(service, forward_backward(m, 4, [4]))
            await result(service, optim_step(m, 5))
            assert world.learner.weights[m] == 4  # neither 1 nor 2 is in it

    run(script())


def test_a_failed_forward_spoils_nothing(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            await result(service, forward_backward(m, 1, [1]))
            await error(
                service, await submit(service, forward_backward(m, 2, [BAD], forward_only=True))
            )
            with pytest.raises(Invalid):
                await submit(service, forward_backward(m, 3, [99], forward_only=True))
            await result(service, optim_step(m, 4))
            assert world.learner.weights[m] == 1

    run(script())


def test_lanes_are_served_in_turn(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            a = await new_model(service, session, 0)
            b = await new_model(service, session, 1)
            world.learner.gate.clear()
            many = [await submit(service, forward_backward(a, i, [1])) for i in range(1, 6)]
            one = await submit(service, forward_backward(b, 1, [1]))
            world.learner.gate.set()
            for promise in [*many, one]:
                await outcome(service, promise)
            order = [c[1] for c in world.learner.calls if c[0] == "forward_backward"]
            assert order.index(b) <= 1

    run(script())


def test_a_full_lane_is_busy_but_takes_the_next_in_turn(tmp_path):
    world = World(tmp_path, ServiceSettings(sweep_seconds=3600.0, max_parked=2))

    async def script():
        async with world.service() as service:
            m = await new_model(service)
            await submit(service, forward_backward(m, 2, [2]))
            await submit(service, forward_backward(m, 3, [3]))
            with pytest.raises(Busy):
                await submit(service, forward_backward(m, 4, [4]))
            await result(service, forward_backward(m, 1, [1]))
            await outcome(service, f"{m}:3")
            await result(service, forward_backward(m, 4, [4]))  # busy did not use the id up
            assert world.learner.windows[m] == 10

    run(script())


def test_create_is_idempotent_by_session_and_number(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            request = CreateModel(session, 0, "tiny", LoraConfig(4))
            first = await submit(service, request)
            assert first.request_id == f"{session}:train:0:0"
            assert await submit(service, request) == first
            with pytest.raises(Invalid, match="create_model"):
                await submit(service, CreateModel(session, 0, "tiny", LoraConfig(8)))
            await outcome(service, first)
            assert world.learner.calls == [("create", f"{session}:train:0")]
            record = await service.get_info(OWNER, f"{session}:train:0")
            assert record.lora.rank == 4 and record.lora.seed is not None

    run(script())


def test_bad_creations_are_refused(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            for i, (request, words) in enumerate(
                [
                    (CreateModel(session, 0, "huge"), "base_model 'huge' .* allowed are tiny"),
                    (CreateModel(session, 1, "tiny", LoraConfig(0)), "rank"),
                    (CreateModel(session, 2, "tiny", LoraConfig(4), "dimuon"), "'dimuon' .* adamw"),
                ]
            ):
                with pytest.raises(Invalid, match=words):
                    await submit(service, request)
                with pytest.raises(NotFound):
                    await service.get_info(OWNER, f"{session}:train:{i}")

    run(script())


def test_a_creation_that_fails_takes_what_waits_with_it(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = f"{session}:train:0"

            def fail(*_):
                world.learner._pass()
                raise MemoryError("no room for the adapter")

            world.learner.create = fail
            world.learner.gate.clear()
            await submit(service, CreateModel(session, 0, "tiny", LoraConfig(4)))
            behind = await submit(service, forward_backward(m, 1, [1]))
            early = await submit(service, forward_backward(m, 3, [1]))
            world.learner.gate.set()
            text = await error(service, f"{m}:0")
            assert text == "server: internal error: MemoryError: no room for the adapter"
            assert f"model {m!r} was not created" in await error(service, behind)
            assert "seq_id 2" in await error(service, early)
            late = await error(service, await submit(service, optim_step(m, 4)))
            assert late.startswith(f"user: model {m!r} was not created")
            async with asyncio.timeout(10):
                while service._parts.lanes._lanes:
                    await asyncio.sleep(0.01)
            assert len(service._parts.models) == 0

    run(script())


def test_ids_of_others_are_unknown(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            world.learner.gate.clear()
            promise = await submit(service, forward_backward(m, 1, [1]))
            with pytest.raises(NotFound, match="is unknown"):  # while it is pending
                await service.retrieve("you", promise.request_id, 0.0)
            world.learner.gate.set()
            await outcome(service, promise)
            with pytest.raises(NotFound) as theirs:
                await service.retrieve("you", promise.request_id, 0.0)
            with pytest.raises(NotFound) as nobodys:
                await service.retrieve("you", f"{m}:9", 0.0)
            said = theirs.value.message.replace(promise.request_id, "X")
            assert said == nobodys.value.message.replace(f"{m}:9", "X")
            with pytest.raises(NotFound, match="is unknown"):
                await submit(service, optim_step(m, 2), owner="you")
            with pytest.raises(NotFound, match="is unknown"):
                await service.get_info("you", m)

    run(script())


def test_unload_runs_what_can_run_and_refuses_the_rest(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            world.learner.gate.clear()
            runs = await submit(service, forward_backward(m, 1, [1]))
            waits = await submit(service, forward_backward(m, 3, [3]))
            gone = await submit(service, UnloadModel(m))
            assert "seq_id 2" in await error(service, waits)
            world.learner.gate.set()
            assert (await outcome(service, runs)).state == "done"
            assert (await outcome(service, gone)).state == "done"
            assert world.learner.calls[-1] == ("unload", m)
            text = await error(service, await submit(service, forward_backward(m, 4, [4])))
            assert "was unloaded" in text

    run(script())


def test_the_end_of_a_session_unloads_its_models(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            waiting = await submit(service, forward_backward(m, 2, [2]))
            world.clock.now += 7201.0
            await service.sweep()
            assert "seq_id 1, which comes before it, did not arrive" in await error(
                service, waiting
            )
            with pytest.raises(Gone, match="expired"):
                await submit(service, forward_backward(m, 1, [1]))
            for _ in range(100):
                if ("unload", m) in world.learner.calls:
                    break
                await asyncio.sleep(0.01)
            assert ("unload", m) in world.learner.calls

    run(script())


@pytest.mark.parametrize("end", ["lost", "unloaded"])
def test_a_model_that_ends_while_a_request_is_written_down_says_why(world, end):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            model, opened = service._parts.models.find(m), service._parts.futures.open

            async def slow(entry, writes):
                await opened(entry, writes)
                service._parts.futures.open = opened
                if end == "unloaded":
                    await result(service, UnloadModel(m))
                else:
                    service._parts.models.left(model, "lost", "its weights are lost")
                    await service._parts.lanes.abandon(m, model.why, "server")

            service._parts.futures.open = slow
            caught = await submit(service, forward_backward(m, 1, [1]))
            lost, unloaded = "server: its weights are lost", f"user: model {m!r} was unloaded"
            assert (await error(service, caught)).startswith(lost if end == "lost" else unloaded)

    run(script())
