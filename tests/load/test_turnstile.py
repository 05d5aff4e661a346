"""A burst passes in order, a few at a turn of the loop; those who leave give up their place."""

import asyncio
import itertools

from trimtab.wire.turnstile import Turnstile


def test_a_few_at_a_turn_in_order():
    async def work():
        turnstile, passed, seen = Turnstile(3), [], []

        async def caller(number):
            await turnstile.enter()
            passed.append(number)

        tasks = [asyncio.ensure_future(caller(number)) for number in range(20)]
        tasks[7].cancel()
        while len(passed) < 19:
            seen.append(len(passed))
            await asyncio.sleep(0)
        assert passed == [n for n in range(20) if n != 7]
        steps = [after - before for before, after in itertools.pairwise(seen)]
        assert max(steps) == 3
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):  # quiet again: nobody turns it, and the next burst finds it as it was
            await asyncio.sleep(0)
        assert not turnstile._turning
        await asyncio.gather(*(caller(number) for number in range(4)))
        assert passed[-4:] == [0, 1, 2, 3]

    asyncio.run(work())
