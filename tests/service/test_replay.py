"""A model after a kill is the model that was: whatever was asked of it, wherever it was cut."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from trimtab.errors import Invalid, UserError
from trimtab.types import (
    AdamParams,
    Datum,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    SampledSpan,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)

from .support import (
    BAD,
    OWNER,
    QUIET,
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

NEVER = replace(QUIET, snapshot_seconds=1e9)
ALWAYS = replace(QUIET, snapshot_seconds=0.0, snapshot_share=1e9, max_body_bytes=1)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, NEVER)


async def kill(world, service):
    """What SIGKILL leaves: what was committed. Nothing else is written from here on."""
    service._parts.store.close()
    world.learner.stopping.set()
    world.sampler.stop()
    for task in [*service._tasks, *service._parts.lanes._settling]:
        task.cancel()
    for learner in service._parts.lanes._learners.values():
        learner.task.cancel()
    await asyncio.sleep(0)


async def alive(world):
    world.learner, world.sampler = type(world.learner)(), type(world.sampler)()
    service = world.build()
    await service.start()
    return service


async def begun(service, session):
    """The id of a model whose creation has been accepted."""
    async with asyncio.timeout(10):
        while not service._parts.models.of_session(session):
            await asyncio.sleep(0.002)
    return f"{session}:train:0"


def restores(world):
    return [call[0] for call in world.learner.calls if call[0] in ("create", "restore")]


# ------------------------------------------------------------------ the whole, at random


def requests(m, seed):
    """Some forty requests of all kinds, good and bad, by seq_id."""
    rng, seq = random.Random(seed), count(1)
    made, saved = [], []
    for _ in range(40):
        kind = rng.choice(["fb"] * 5 + ["step"] * 4 + ["bad", "refused", "fwd", "rate", "save"] +
                          ["publish", "load"])  # fmt: skip
        n = next(seq)
        if kind == "fb":
            made.append(forward_backward(m, n, [rng.randrange(1, 12)]))
        elif kind == "step":
            made.append(optim_step(m, n))
        elif kind == "bad":
            made.append(forward_backward(m, n, [BAD]))
        elif kind == "refused":
            made.append(forward_backward(m, n, [99], forward_only=rng.random() < 0.3))
        elif kind == "fwd":
            made.append(forward_backward(m, n, [5], forward_only=True))
        elif kind == "rate":
            made.append(OptimStep(m, n, AdamParams(learning_rate=-1.0)))
        elif kind == "save":
            saved.append(f"tinker://{m}/weights/s{n}")
            made.append(SaveWeights(m, n, f"s{n}"))
        elif kind == "publish":
            made.append(SaveWeightsForSampler(m, n, None, n, rng.choice(["snapshot", "inflight"])))
        else:
            path = rng.choice(saved) if saved else f"tinker://{m}/weights/none"
            made.append(LoadWeights(path, rng.random() < 0.5, model_id=m, seq_id=n))
    return made


async def send(service, request):
    with suppress(UserError):  # it is journalled, and compared there
        await submit(service, request)


def journal(service, m):
    rows = service._parts.store.read(
        "SELECT seq_id, r.kind, state, rejected, error, effect, x.body FROM requests r"
        " LEFT JOIN results x USING (request_id) WHERE key = ? ORDER BY seq_id",
        (m,),
    )
    return json.loads(json.dumps([list(map(str, row)) for row in rows]).replace(m[:36], "S"))


async def settled(service, m):
    """Wait until nothing of the model is pending."""
    lanes = service._parts.lanes
    async with asyncio.timeout(20):
        while lanes.get(m).before or lanes.get(m).queued or service._parts.store.read(
            "SELECT 1 FROM requests WHERE state = 'pending' AND key = ?", (m,)
        ):  # fmt: skip
            await asyncio.sleep(0.002)


def state(world, service, m):
    model, learner = service._parts.models.find(m), world.learner
    failed = sorted(set(model.window.failed))
    contents = model.contents.replace(m, "M")
    return learner.weights[m], learner.windows[m], learner.steps[m], contents, failed


async def undisturbed(path, seed):
    world = World(path, NEVER)
    service = await alive(world)
    m = await new_model(service)
    for request in requests(m, seed):
        await send(service, request)
    await settled(service, m)
    ended = state(world, service, m), journal(service, m)
    await kill(world, service)
    return ended


async def disturbed(path, settings, seed, cuts):
    """The same requests, some of them sent in the wrong order, with a kill before each cut: either
    at rest, or with what was sent last still to be run."""
    world, rng = World(path, settings), random.Random(seed + 1000)
    service = await alive(world)
    m = await new_model(service)
    made = requests(m, seed)
    for i in range(len(made)):
        if i in cuts:
            if rng.random() < 0.5:
                await settled(service, m)
            await kill(world, service)
            service = await alive(world)
        if i + 1 < len(made) and rng.random() < 0.3 and i + 1 not in cuts:
            made[i], made[i + 1] = made[i + 1], made[i]
        await send(service, made[i])
    await settled(service, m)
    ended = state(world, service, m), journal(service, m)
    await kill(world, service)
    return ended


@pytest.mark.parametrize("settings", [NEVER, ALWAYS], ids=["replay", "snapshots"])
@pytest.mark.parametrize("seed", range(6))
def test_kills_anywhere_leave_the_same_model_and_the_same_journal(tmp_path, settings, seed):
    cuts = set(random.Random(seed).sample(range(1, 40), 8))
    weights, rows = run(undisturbed(tmp_path / "a", seed))
    found, again = run(disturbed(tmp_path / "b", settings, seed, cuts))
    assert found == weights
    for mine, theirs in zip(again, rows, strict=True):
        # an id refused early gets a promise that has failed, in its turn a 400
        assert mine[:3] + mine[4:] == theirs[:3] + theirs[4:]


# ------------------------------------------------------------------ what comes back from what


def test_snapshots_are_taken_between_steps_and_let_bodies_go(tmp_path):
    world = World(tmp_path, replace(QUIET, max_body_bytes=4000, snapshot_seconds=1e9))

    async def script():
        service = await alive(world)
        m = await new_model(service)
        for seq in range(1, 20, 2):
            await result(service, forward_backward(m, seq, [3]))
            await result(service, optim_step(m, seq + 1))
        await service._parts.snapshots.stop(5.0)
        snapshot = service._parts.snapshots.find(m)
        assert snapshot.seq_id % 2 == 0 and snapshot.contents == f"{m}:{snapshot.seq_id}"
        bodies = service._parts.store.read("SELECT seq_id FROM bodies WHERE key = ?", (m,))
        assert [row["seq_id"] for row in bodies] == list(range(snapshot.seq_id + 1, 21))
        assert [f.name for f in (tmp_path / "snapshots").iterdir()] == [snapshot.folder]
        before = state(world, service, m)
        await kill(world, service)
        service = await alive(world)
        await settled(service, m)
        assert state(world, service, m) == before and restores(world) == ["restore"]
        ran = [call for call in world.learner.calls if call[0] == "optim_step"]
        assert len(ran) == (20 - snapshot.seq_id) // 2
        await service.stop()

    run(script())


def test_a_window_that_goes_on_for_long_gets_a_snapshot_too(tmp_path):
    world = World(tmp_path, replace(QUIET, max_body_bytes=3000, snapshot_seconds=1e9))

    async def script():
        service = await alive(world)
        m = await new_model(service)
        for seq in range(1, 21):
            await result(service, forward_backward(m, seq, [seq % 10]))
        await service._parts.snapshots.stop(5.0)
        held = service._parts.store.row("SELECT SUM(size) AS size FROM bodies WHERE key = ?", (m,))
        assert service._parts.snapshots.find(m) is not None and held["size"] < 9000
        before = state(world, service, m)
        assert before[1] == 90  # the gradient, and no step yet
        await kill(world, service)
        service = await alive(world)
        await settled(service, m)
        assert state(world, service, m) == before
        await service.stop()

    run(script())


def test_a_load_depends_on_its_checkpoint_no_longer(world):
    async def script():
        service = await alive(world)
        m = await new_model(service)
        await result(service, forward_backward(m, 1, [7]))
        await result(service, optim_step(m, 2))
        await result(service, SaveWeights(m, 3, "a"))
        path = f"tinker://{m}/weights/a"
        await result(service, LoadWeights(path, True, model_id=m, seq_id=4))
        child = LoadWeights(path, True, session_id=m[:36], model_seq_id=1)
        second = (await result(service, child)).model_id
        await result(service, forward_backward(second, 1, [2]))
        await result(service, SaveWeights(m, 5, "a", overwrite=True, user_metadata={"b": "c"}))
        old = service._parts.checkpoints.find(path).folder
        await service._parts.store.write(lambda db: db.execute("DELETE FROM checkpoints"))
        service._parts.checkpoints.remove(old)
        await kill(world, service)
        service = await alive(world)
        await settled(service, m)
        await settled(service, second)
        assert world.learner.weights == {m: 7.0, second: 7.0}
        assert world.learner.windows == {m: 0.0, second: 2.0}
        loads = [call[0] for call in world.learner.calls]
        assert "create" not in loads and loads.count("load_state") == 2
        await service.stop()

    run(script())


def test_a_creation_that_was_cut_is_made_again_with_its_seed(world):
    async def before():
        service = await alive(world)
        session = await service.create_session(OWNER)
        world.learner.gate.clear()
        making = asyncio.ensure_future(new_model(service, session))
        m = await begun(service, session)
        behind = await submit(service, forward_backward(m, 1, [4]))
        seed = (await service.get_info(OWNER, m)).lora.seed
        making.cancel()
        await kill(world, service)
        return m, seed, behind

    async def after(m, seed, behind):
        service = await alive(world)
        made = pickle.loads((await outcome(service, f"{m}:0")).body)
        assert made.model_id == m and (await outcome(service, behind)).state == "done"
        assert (await service.get_info(OWNER, m)).lora.seed == seed
        await result(service, optim_step(m, 2))
        assert world.learner.weights[m] == 4
        await service.stop()

    run(after(*run(before())))


def test_what_was_refused_behind_a_creation_keeps_its_place(world):
    async def before():
        service = await alive(world)
        session = await service.create_session(OWNER)
        world.learner.gate.clear()
        making = asyncio.ensure_future(new_model(service, session))
        m = await begun(service, session)
        with pytest.raises(Invalid):
            await submit(service, forward_backward(m, 1, [99]))
        making.cancel()
        await kill(world, service)
        return m

    async def after(m):
        service = await alive(world)
        text = await error(service, await submit(service, optim_step(m, 2)))
        assert "seq_id 1 failed" in text
        await result(service, forward_backward(m, 3, [4]))
        await service.stop()

    run(after(run(before())))


def test_an_unload_that_was_cut_is_finished(world):
    async def before():
        service = await alive(world)
        m = await new_model(service)
        world.learner.gate.clear()
        await submit(service, forward_backward(m, 1, [4]))
        promise = await submit(service, UnloadModel(m))
        await kill(world, service)
        return m, promise

    async def after(m, promise):
        service = await alive(world)
        assert (await outcome(service, promise)).state == "done"
        assert (await outcome(service, f"{m}:1")).state == "done"
        assert "was unloaded" in await error(service, await submit(service, optim_step(m, 2)))
        for table in ("bodies", "snapshots", "pins"):
            assert service._parts.store.read(f"SELECT * FROM {table}") == []
        await service.stop()

    run(after(*run(before())))


# ------------------------------------------------------------------ gaps


def test_an_id_that_was_given_up_on_stays_given_up(world):
    async def before():
        service = await alive(world)
        m = await new_model(service)
        await result(service, forward_backward(m, 1, [4]))
        waiting = [await submit(service, forward_backward(m, 3, [1])),
                   await submit(service, optim_step(m, 4))]  # fmt: skip
        world.clock.now += 601.0
        await service.sweep()
        for promise in waiting:
            assert "seq_id 2, which comes before it" in await error(service, promise)
        await kill(world, service)
        return m

    async def after(m):
        service = await alive(world)
        with pytest.raises(Invalid, match="too late"):
            await submit(service, forward_backward(m, 2, [1]))
        text = await error(service, await submit(service, optim_step(m, 5)))
        assert "seq_id 2, 3 failed" in text
        await result(service, forward_backward(m, 6, [9]))
        await result(service, optim_step(m, 7))
        assert world.learner.weights[m] == 9
        await service.stop()

    run(after(run(before())))


def test_a_gap_is_waited_for_again(world):
    async def before():
        service = await alive(world)
        m = await new_model(service)
        with pytest.raises(Invalid):
            await submit(service, forward_backward(m, 1, [99]))
        parked = await submit(service, optim_step(m, 3))
        early = await submit(service, forward_backward(m, 4, [99]))  # refused, with a promise
        await kill(world, service)
        return m, parked, early

    async def after(m, parked, early):
        service = await alive(world)
        assert (await outcome(service, parked, 0.0)).state == "pending"
        await result(service, forward_backward(m, 2, [1]))
        assert "seq_id 1 failed" in await error(service, parked)
        assert (await outcome(service, early)).state == "failed"
        text = await error(service, await submit(service, optim_step(m, 5)))
        assert "seq_id 4 failed" in text
        await service.stop()

    run(after(*run(before())))


# ------------------------------------------------------------------ what a replay is fed


def claim(m, seq, name, drawn):
    tokens = drawn.sequences[0].tokens
    inputs = {
        "target_tokens": tokens.astype(np.int64),
        "logprobs": np.full(4, -1.0, np.float32),
        "advantages": np.ones(4, np.float32),
    }
    spans = (SampledSpan(name, 0, 4),)
    datum = Datum(tokens, inputs, spans, spans)
    return ForwardBackward(m, seq, (datum,), "stable_reinforce", {})


def test_records_stay_until_a_snapshot_covers_their_use(world):
    async def before():
        service = await alive(world)
        session = await service.create_session(OWNER)
        m, s = await new_model(service, session), await new_sampler(service, session)
        drawn = await result(service, sample(s, 0, record=True))
        await result(service, claim(m, 1, f"{s}:0:0", drawn))
        told = world.learner.batches[-1].data[0].stability
        world.clock.now += 3 * 86400.0
        service._parts.sessions._open[session].heard_at = service._parts.sessions._awake()
        await service.sweep()  # its day is over, but it is pinned
        world.learner.gate.clear()
        await kill(world, service)
        return m, session, told

    async def after(m, session, told):
        service = await alive(world)
        await settled(service, m)
        for name in ("logprobs_N", "head_ids_NK", "head_logprobs_NK", "version_step_N"):
            again = getattr(world.learner.batches[-1].data[0].stability, name)
            np.testing.assert_array_equal(again, getattr(told, name))
        await result(service, SaveWeights(m, 2, "a"))
        path = f"tinker://{m}/weights/a"
        await result(service, LoadWeights(path, True, model_id=m, seq_id=3))  # is a snapshot
        assert service._parts.store.read("SELECT * FROM pins") == []
        await service.sweep()
        assert service._parts.store.read("SELECT * FROM sequences") == []
        await service.stop()

    run(after(*run(before())))


def test_a_result_the_journal_cannot_take_is_no_part_of_a_step(tmp_path):
    """Told as failed, it spoils its window, and no snapshot has it."""
    world = World(tmp_path, ALWAYS)

    async def script():
        service = await alive(world)
        m = await new_model(service)
        row = (f"{m}:1",)
        await service._parts.store.write(
            lambda db: db.execute("INSERT INTO results VALUES (?, x'00')", row)
        )
        failed = await submit(service, forward_backward(m, 1, [4]))
        assert "UNIQUE constraint" in await error(service, failed)
        await asyncio.sleep(0.05)
        assert service._parts.snapshots.find(m) is None
        assert service._parts.models.find(m).window.failed == [1]
        await kill(world, service)
        service = await alive(world)
        text = await error(service, await submit(service, optim_step(m, 2)))
        assert "seq_id 1 failed" in text
        await service.stop()

    run(script())


def test_another_result_than_before_is_an_error_in_the_log(world, caplog):
    async def script():
        service = await alive(world)
        m = await new_model(service)
        await result(service, forward_backward(m, 1, [4]))
        await kill(world, service)
        service = await alive(world)
        await settled(service, m)
        assert "gives another result" not in caplog.text
        await service._parts.store.write(lambda db: db.execute("UPDATE results SET body = x'00'"))
        await kill(world, service)
        service = await alive(world)
        await settled(service, m)
        assert f"request {m}:1 gives another result" in caplog.text
        await service.stop()

    run(script())


# ------------------------------------------------------------------ what cannot come back


DAMAGE = {
    "its body is gone": "DELETE FROM bodies WHERE seq_id = 5",
    "its body is damaged": "UPDATE bodies SET body = x'0102' WHERE seq_id = 5",
    "its snapshot is gone": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_model_that_cannot_come_back_names_its_last_checkpoint(world, damage):
    async def before():
        service = await alive(world)
        session = await service.create_session(OWNER)
        m, other = await new_model(service, session), await new_model(service, session, 1)
        await result(service, forward_backward(other, 1, [6]))
        await result(service, SaveWeights(m, 1, "a"))
        world.clock.now += 1.0
        await result(service, SaveWeights(m, 2, "b"))
        path = f"tinker://{m}/weights/b"
        await result(service, LoadWeights(path, True, model_id=m, seq_id=3))
        await result(service, forward_backward(m, 4, [1]))
        await result(service, forward_backward(m, 5, [1]))
        world.learner.gate.clear()
        waiting = [await submit(service, forward_backward(m, 6, [1])),
                   await submit(service, optim_step(m, 8))]  # fmt: skip
        if DAMAGE[damage] is None:
            folder = service._parts.snapshots.find(m).folder
            (world.path / "snapshots" / folder / "state.json").unlink()
        else:
            await service._parts.store.write(lambda db: db.execute(DAMAGE[damage]))
        await kill(world, service)
        return m, other, waiting

    async def after(m, other, waiting):
        service = await alive(world)
        text = await error(service, waiting[0])
        assert text.startswith(f"server: model {m!r} lost its weights when the server restarted (")
        end = f"its last checkpoint is 'tinker://{m}/weights/b': load it into a new model to go on"
        assert text.endswith(end)
        assert await error(service, waiting[1]) == text
        assert await error(service, await submit(service, forward_backward(m, 7, [1]))) == text
        await result(service, optim_step(other, 2))
        assert world.learner.weights[other] == 6  # the neighbour came back
        await kill(world, service)
        service = await alive(world)
        assert await error(service, waiting[0]) == text
        bodies = service._parts.store.read("SELECT key FROM bodies")
        assert {row["key"] for row in bodies} == {other}
        await service.stop()

    run(after(*run(before())))


def test_a_model_whose_base_is_not_served_waits(world):
    async def script():
        service = await alive(world)
        m = await new_model(service)
        await result(service, forward_backward(m, 1, [4]))
        world.learner.gate.clear()
        pending = await submit(service, forward_backward(m, 2, [3]))
        await kill(world, service)
        await service._parts.snapshots.stop(0.1)

        service = World(world.path, NEVER).build()
        service._parts.engines.pop("tiny")
        await service.start()
        with pytest.raises(Exception, match="'tiny' is not served now; start the server with it"):
            await submit(service, optim_step(m, 3))
        assert (await outcome(service, pending, 0.0)).state == "pending"
        service._parts.store.close()

        service = await alive(world)
        assert (await outcome(service, pending)).state == "done"
        await result(service, optim_step(m, 3))
        assert world.learner.weights[m] == 7
        await service.stop()

    run(script())


def test_models_come_back_in_turn_and_the_loop_is_free(world):
    """A slow model to restore holds up neither a heartbeat nor another model for long."""

    async def script():
        service = await alive(world)
        session = await service.create_session(OWNER)
        models = [await new_model(service, session, i) for i in range(8)]
        for m in models:
            for seq in range(1, 9):
                await result(service, forward_backward(m, seq, [1]))
        await kill(world, service)
        world.learner, world.sampler = type(world.learner)(), type(world.sampler)()
        world.learner.gate.clear()
        service = world.build()
        async with asyncio.timeout(2.0):  # nothing has been restored, and the service serves
            await service.start()
            await service.heartbeat(OWNER, session)
            later = await submit(service, optim_step(models[-1], 9))
        world.learner.gate.set()
        await outcome(service, later)
        order = [call[1] for call in world.learner.calls if call[0] == "forward_backward"]
        assert set(order[:8]) == set(models)  # one request of each before the second of any
        await service.stop()

    run(script())
