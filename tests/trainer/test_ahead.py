"""Staleness and work in flight are bounded, and nothing is lost."""

import asyncio

import pytest

from trimtab.trainer.ahead import Ahead, ages


class Sampler:
    """Records what ran with which weights, and how many ran at once."""

    def __init__(self, delays=None):
        self.delays = delays or {}
        self.running = self.most = 0
        self.seen = []

    async def __call__(self, client, version, group):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delays.get(group, 0))
        self.running -= 1
        self.seen.append((group, version))
        return group, version, client


def run(sampler, *, steps=6, first=0, train=0.0, **options):
    async def go():
        ahead = Ahead(sampler, groups_per_batch=2, first=first, last=steps, **options)
        ahead.publish("w0", first)
        batches = []
        for step in range(first, steps):
            batches.append(await ahead.batch(step))
            await asyncio.sleep(train)
            ahead.publish(f"w{step + 1}", step + 1)
        assert not ahead.tasks
        return batches

    return asyncio.run(go())


def test_in_turns_every_batch_is_fresh():
    sampler = Sampler()
    batches = run(sampler, max_steps_off_policy=0)
    assert [[g[1] for g in batch] for batch in batches] == [[s, s] for s in range(6)]
    assert sampler.most == 2


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_ahead_by_k_steps_and_never_more(lag):
    sampler = Sampler()
    batches = run(sampler, max_steps_off_policy=lag, train=0.002)
    found = [ages(step, [g[1] for g in batch]) for step, batch in enumerate(batches)]
    assert max(a.high for a in found) == min(lag, 5)
    assert all(a.high <= lag for a in found)
    assert sampler.most <= 2 * (lag + 1)


def test_every_group_once_and_in_order():
    sampler = Sampler(delays={0: 0.01, 3: 0.005})
    batches = run(sampler, max_steps_off_policy=3)
    assert [g[0] for batch in batches for g in batch] == list(range(12))
    assert sorted(g for g, _ in sampler.seen) == list(range(12))


def test_work_in_flight_can_be_bounded_further():
    sampler = Sampler(delays=dict.fromkeys(range(12), 0.002))
    batches = run(sampler, max_steps_off_policy=3, max_in_flight=1)
    assert sampler.most == 1
    # Groups that waited for a place took the newest weights there were.
    assert all(ages(s, [g[1] for g in b]).high <= 3 for s, b in enumerate(batches))


def test_a_resumed_run_begins_with_its_own_batch():
    batches = run(Sampler(), max_steps_off_policy=2, first=4)
    assert [g[0] for batch in batches for g in batch] == [8, 9, 10, 11]
    assert batches[0][0][1] == 4


def test_a_failure_reaches_the_trainer_and_close_cancels_the_rest():
    async def fail(client, version, group):
        if group == 1:
            raise RuntimeError("gone")
        await asyncio.sleep(60)

    async def go():
        ahead = Ahead(fail, groups_per_batch=2, max_steps_off_policy=1, first=0, last=3)
        ahead.publish("w", 0)
        with pytest.raises(RuntimeError, match="gone"):
            await ahead.batch(0)
        await ahead.close()
        assert not ahead.tasks

    asyncio.run(go())
