"""A turnstile on the event loop: a burst of hundreds must not keep everybody else waiting.

Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets `most` callers in at a turn of the loop, first come, first served. Between two turns the
    loop looks at its sockets, so a heartbeat waits for a few callers, not for all of them.

    await turnstile.enter()
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _turn(self) -> None:
        self._left = self._most
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():  # else its caller has left
                place.set_result(None)
                self._left -= 1
        self._turning = self._left < self._most
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
