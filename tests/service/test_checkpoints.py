"""Names, paths, files that appear whole or not at all, overwriting, time to live, loading."""

from __future__ import annotations

import asyncio

import pytest

from trimtab.errors import Invalid, NotFound
from trimtab.service import paths
from trimtab.types import LoadWeights, SaveWeights, SaveWeightsForSampler

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


def folders(world):
    home = world.path / "checkpoints"
    return sorted(p.name for p in home.iterdir()) if home.exists() else []


async def removed(world, left):
    """Wait for what is removed off the loop."""
    async with asyncio.timeout(10):
        while len(folders(world)) > left:
            await asyncio.sleep(0.01)


async def step(service, m, seq, amount):
    await result(service, forward_backward(m, seq, [amount]))
    await result(service, optim_step(m, seq + 1))


BAD_NAMES = [
    "",
    "a/b",
    "..",
    "a..b",
    ".",
    "a\x00",
    "a\nb",
    " a",
    "a\\b",
    "x" * 129,
    "\x7f",
    "\u202e",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_refused(name):
    with pytest.raises(Invalid, match="checkpoint name"):
        paths.check_name(name, 128)


def test_names_and_paths_that_are_taken():
    for name in ("a", "x" * 128, "step 10", "ümlaut", "a:b", "000010", ".hidden"):
        path = paths.path_of("S:train:0", "weights", paths.check_name(name, 128))
        assert paths.parse_path(path, 128) == ("S:train:0", "weights", name)


@pytest.mark.parametrize(
    "path",
    [
        "S:train:0/weights/a",
        "tinker://S:train:0/weights",
        "tinker://S:train:0/weights/a/b",
        "tinker:///weights/a",
        "tinker://S:train:0/other/a",
        "tinker://S:train:0/weights/..",
        "tinker://S:train:0/weights/",
        "",
        "/etc/passwd",
    ],
)
def test_paths_that_are_refused(path):
    with pytest.raises(Invalid):
        paths.parse_path(path, 128)


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    def fail(folder):
        folder.mkdir()
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        paths.write_folder(tmp_path, fail)
    assert list(tmp_path.iterdir()) == []

    def fill(folder):
        folder.mkdir()
        return (folder / "a").write_text("abc")

    name, size = paths.write_folder(tmp_path, fill)
    assert size == 3 and (tmp_path / name / "a").read_text() == "abc"
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_save_and_load_go_on_where_they_were(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            await step(service, m, 1, 5)
            saved = await result(service, SaveWeights(m, 3, "a"))
            assert saved.path == f"tinker://{m}/weights/a"
            await step(service, m, 4, 7)
            assert world.learner.weights[m] == 17
            await error(service, await submit(service, forward_backward(m, 6, [BAD])))
            loaded = await result(service, LoadWeights(saved.path, True, model_id=m, seq_id=7))
            assert loaded.path == saved.path and loaded.model_id == m
            assert world.learner.weights[m] == 5
            await step(service, m, 8, 2)  # the load has cleared the spoiled window

            second = LoadWeights(saved.path, False, session_id=session, model_seq_id=1)
            created = await result(service, second)
            assert created.model_id == f"{session}:train:1"
            assert ("load_state", created.model_id, False) in world.learner.calls
            record = await service.get_info(OWNER, created.model_id)
            assert record.lora == (await service.get_info(OWNER, m)).lora
            await step(service, created.model_id, 1, 1)
            assert world.learner.weights[created.model_id] == 11
            info = await service.weights_info(OWNER, saved.path)
            assert (info.base_model, info.lora.rank, info.step) == ("tiny", 4, 1)

    run(script())


def test_a_clash_is_refused_unless_nothing_changed(world):
    """A resend is the same save; the same name after a step is another one."""

    async def script():
        async with world.service() as service:
            m = await new_model(service)
            first = await submit(service, SaveWeights(m, 1, "s1"))
            assert await submit(service, SaveWeights(m, 1, "s1")) == first
            await outcome(service, first)
            again = await result(service, SaveWeights(m, 2, "s1"))  # same contents
            assert again.path == f"tinker://{m}/weights/s1" and len(folders(world)) == 1
            with pytest.raises(Invalid, match="exists with other contents"):
                await submit(service, SaveWeights(m, 3, "s1", user_metadata={"a": "b"}))
            await step(service, m, 4, 1)
            with pytest.raises(Invalid, match="exists with other contents"):
                await submit(service, SaveWeights(m, 6, "s1"))
            before = folders(world)
            await result(service, SaveWeights(m, 7, "s1", overwrite=True, user_metadata={"a": "b"}))
            await removed(world, 1)
            assert len(folders(world)) == 1 and folders(world) != before
            info = await service.weights_info(OWNER, again.path)
            assert info.user_metadata == {"a": "b"} and info.step == 1

    run(script())


def test_a_clash_behind_pending_work_fails_in_its_turn(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            late = await submit(service, SaveWeights(m, 3, "a"))  # 1 and 2 have not arrived
            await result(service, SaveWeights(m, 1, "a"))
            await submit(service, forward_backward(m, 2, [1]))
            assert (await outcome(service, late)).state == "done"  # nothing changed in between
            later = await submit(service, SaveWeights(m, 6, "a"))
            await step(service, m, 4, 1)
            assert "exists with other contents" in await error(service, later)

    run(script())


def test_a_name_is_made_where_none_is_given(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            saved = await result(service, SaveWeights(m, 1, None))
            assert saved.path == f"tinker://{m}/weights/checkpoint-000001"

    run(script())


def test_time_to_live(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            for seq, bad in enumerate((3599, 10**9, 0, -1), 1):
                with pytest.raises(Invalid, match="ttl_seconds must lie between 3600"):
                    await submit(service, SaveWeights(m, seq, "a", ttl_seconds=bad))
            saved = await result(service, SaveWeights(m, 5, "a", ttl_seconds=3600))
            named = await result(service, SaveWeightsForSampler(m, 6, "a", None, ttl_seconds=3600))
            world.clock.now += 3599
            await service.weights_info(OWNER, saved.path)
            world.clock.now += 2
            for path in (saved.path, named.path):
                with pytest.raises(NotFound, match="is unknown"):
                    await service.weights_info(OWNER, path)
            assert len(folders(world)) == 2
            await service.sweep()
            assert folders(world) == []
            await result(service, SaveWeights(m, 7, "a"))  # the name is free again

    run(script())


def test_checkpoints_of_others_are_unknown(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)
            saved = await result(service, SaveWeights(m, 1, "a"))
            with pytest.raises(NotFound) as theirs:
                await service.weights_info("you", saved.path)
            with pytest.raises(NotFound) as nobodys:
                await service.weights_info("you", saved.path + "b")
            assert theirs.value.message == nobodys.value.message.replace("/ab'", "/a'")
            session = await service.create_session("you")
            load = LoadWeights(saved.path, True, session_id=session, model_seq_id=0)
            with pytest.raises(NotFound, match="is unknown"):
                await submit(service, load, owner="you")

    run(script())


def test_loads_that_are_refused(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            path = f"tinker://{m}/weights/none"
            missing = await submit(service, LoadWeights(path, True, model_id=m, seq_id=1))
            assert "is unknown" in await error(service, missing)
            with pytest.raises(Invalid, match="not of the form"):
                await submit(service, LoadWeights("a", True, model_id=m, seq_id=2))
            saved = await result(service, SaveWeights(m, 3, "a"))
            other = LoadWeights(saved.path, True, None, None, session, 1, base_model="huge")
            with pytest.raises(Invalid, match="'huge' does not fit"):
                await submit(service, other)
            family = LoadWeights(saved.path, True, None, None, session, 2, optimizer_family="adamw")
            with pytest.raises(Invalid, match="only with optimizer=false"):
                await submit(service, family)

    run(script())


def test_a_crash_between_files_and_row_leaves_nothing_visible(world):
    """The process dies after the rename, before the commit: the next one has neither, and saves."""

    async def before():
        service = world.build()
        await service.start()
        m = await new_model(service)
        parts = service._parts
        kept = await result(service, SaveWeights(m, 1, "kept"))
        finish = parts.futures.finish

        async def die(entry, *rest):
            if entry.seq_id != 2:
                await finish(entry, *rest)

        parts.futures.finish = die
        await submit(service, SaveWeights(m, 2, "lost"))
        for _ in range(500):
            if len([f for f in folders(world) if "partial" not in f]) == 2:
                break
            await asyncio.sleep(0.01)
        (world.path / "checkpoints" / "0123.partial").mkdir()  # and one in the middle of a write
        await service.stop()
        return m, kept.path

    async def after(m, kept):
        async with world.restarted() as service:
            assert (await outcome(service, f"{m}:2")).state == "done"
            assert len(folders(world)) == 2  # the kept one, and the one made now
            await service.weights_info(OWNER, kept)
            await service.weights_info(OWNER, f"tinker://{m}/weights/lost")

    run(after(*run(before())))


def test_a_failing_save_fails_its_future_and_leaves_no_file(world):
    async def script():
        async with world.service() as service:
            m = await new_model(service)

            def full():
                raise OSError(28, "No space left on device")

            world.learner.on_save = full
            text = await error(service, await submit(service, SaveWeights(m, 1, "a")))
            assert text.startswith("server: ") and "No space left" in text
            assert folders(world) == []
            world.learner.on_save = lambda: None
            await result(service, SaveWeights(m, 2, "a"))

    run(script())


def test_save_for_sampler_takes_a_name_or_a_session(world):
    async def script():
        async with world.service() as service:
            session = await service.create_session(OWNER)
            m = await new_model(service, session)
            for i, (name, number) in enumerate([(None, None), ("a", 1)]):
                with pytest.raises(Invalid, match="either path or sampling_session_seq_id"):
                    await submit(service, SaveWeightsForSampler(m, i + 1, name, number))
            await result(service, SaveWeightsForSampler(m, 3, None, 0))
            clash = await submit(service, SaveWeightsForSampler(m, 4, None, 0))
            assert "sampling_session_seq_id 0 is in use" in await error(service, clash)
            await result(service, SaveWeightsForSampler(m, 5, "a", None))
            await step(service, m, 6, 1)
            with pytest.raises(Invalid, match="exists with other contents"):
                await submit(service, SaveWeightsForSampler(m, 8, "a", None))

    run(script())
