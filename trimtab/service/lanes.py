"""One lane a model, strictly by seq_id; one thread a learner, which serves its lanes in turn.

    open     a lane begins at an id; after a restart some jobs come before it (the replay)
    put      a job takes its place; early ones are parked
    use_up   a refused id takes its turn with nothing to run
    close    no more jobs; what can still run does, then the last job (unload) runs
    abandon  no more jobs; everything waiting fails, at once

A job runs when everything before it has run and been journalled. A lane that has run a job goes to
the back of its learner's queue, so no model waits behind more than one job of each other model.
What waits behind an id that never arrived fails after the gap timeout, naming that id.

Here stands the room's one broad `except`: whatever a job raises becomes its failed future.
Knows no SQL, no HTTP, and not what the jobs do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from trimtab.errors import Busy, Invalid, Stopping, TrimtabError
from trimtab.service.futures import SqlWrite

T = TypeVar("T")
log = logging.getLogger(__name__)

FAR = 2**17  # ids a request may be ahead of the next in turn: giving up walks over what is missing


@dataclass(frozen=True, slots=True)
class Done:
    """What a job leaves: the encoded result, and the writes that must be true with it. `after` runs
    on the loop once both are committed."""

    body: bytes
    content_type: str
    writes: tuple[SqlWrite, ...] = ()
    after: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """`ran`: the job itself failed, not something before it."""

    error: str
    category: str
    ran: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """`run` happens on the learner's thread, `settle` (journal the outcome) on the loop.
    `failed` hears, on the loop, with which words the job failed; `size` is its body's."""

    seq_id: int
    run: Callable[[], Done] | None
    settle: Callable[[Done | Failed], Awaitable[None]]
    failed: Callable[[str], None] = lambda error: None
    size: int = 0


GaveUp = Callable[[int, int, Sequence[int]], Awaitable[None]]
"""Hears at once that a lane gave up on the first id, goes on after the second, and which ids
between them never came; what it returns is awaited before anything that waited is told."""


@dataclass(eq=False, slots=True)
class Lane:
    model_id: str
    learner: str
    next_seq: int = 0
    before: deque[Job] = field(default_factory=deque)
    parked: dict[int, Job] = field(default_factory=dict)
    bytes: int = 0
    queued: bool = False  # in its learner's queue, or running
    blocked_at: float | None = None
    gave_up: GaveUp | None = None
    last: Job | None = None
    closed: bool = False

    @property
    def ready(self) -> bool:
        if self.before or self.next_seq in self.parked:
            return True
        return self.last is not None and not self.parked and not self.closed

    def take(self) -> Job:
        if self.before:
            return self.before.popleft()
        job = self.parked.pop(self.next_seq, None)
        if job is None:
            assert self.last is not None
            self.closed = True
            return self.last
        self.bytes -= job.size
        self.next_seq += 1
        return job


@dataclass(eq=False, slots=True)
class _Learner:
    name: str
    lanes: asyncio.Queue[Lane]
    task: asyncio.Task[None] | None = None


class Lanes:
    def __init__(
        self,
        learners: tuple[str, ...],
        clock: Callable[[], float],
        *,
        gap_seconds: float,
        max_parked: int,
        max_bytes: int,
    ) -> None:
        self._clock = clock
        self._gap = gap_seconds
        self._max_parked = max_parked
        self._max_bytes = max_bytes
        self._lanes: dict[str, Lane] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._learners = {
            name: _Learner(f"trimtab-learner-{name}", asyncio.Queue()) for name in learners
        }

    # ---- the life of the threads

    def start(self) -> None:
        for learner in self._learners.values():
            learner.task = asyncio.create_task(self._serve(learner))

    async def stop(self, seconds: float) -> None:
        """Begin no job; give running ones `seconds` to come back."""
        self._stopping = True
        tasks = [learner.task for learner in self._learners.values() if learner.task]
        for learner in self._learners.values():
            learner.lanes.put_nowait(_STOP)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        if self._settling:
            await asyncio.wait(self._settling, timeout=seconds)

    async def _serve(self, learner: _Learner) -> None:
        while (lane := await learner.lanes.get()) is not _STOP and not self._stopping:
            job = lane.take()
            outcome: Done | Failed | None = None
            if job.run is not None:
                outcome = await on_its_own(learner.name, partial(_attempt, job, lane.model_id))
                if outcome is None:  # stopping: the job stays pending in the journal
                    continue
            self._after(lane, job, outcome)

    def _after(self, lane: Lane, job: Job, outcome: Done | Failed | None) -> None:
        self._spawn(self._settle(lane, job, outcome))

    def _spawn(self, settling: Coroutine[None, None, None]) -> None:
        """What is journalled while the lanes go on: a full disk must not hold up all of them."""
        task = asyncio.create_task(settling)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, lane: Lane, job: Job, outcome: Done | Failed | None) -> None:
        """Journal an outcome, then let the lane go on: n is on disk before n + 1 runs."""
        try:
            if outcome is not None:
                if isinstance(outcome, Failed):
                    job.failed(outcome.error)
                await job.settle(outcome)
                if isinstance(outcome, Done) and outcome.after is not None:
                    outcome.after()
        finally:
            lane.queued = False
            self._look(lane)

    # ---- lanes

    def open(
        self,
        model_id: str,
        learner: str,
        gave_up: GaveUp,
        *,
        next_seq: int = 0,
        before: Iterable[Job] = (),
    ) -> None:
        """`before` run first, in turn with other lanes' jobs, and take no id."""
        lane = Lane(model_id, learner, next_seq, deque(before), gave_up=gave_up)
        self._lanes[model_id] = lane
        self._look(lane)

    def get(self, model_id: str) -> Lane | None:
        return self._lanes.get(model_id)

    def drop(self, model_id: str) -> None:
        self._lanes.pop(model_id, None)

    def admit(self, model_id: str, seq_id: int, size: int) -> None:
        """Raise if there is no place for this id: its turn has passed (Invalid), or too much is
        waiting already (Busy). The id whose turn is next is always let in."""
        lane = self._lanes.get(model_id)
        if lane is None or lane.last is not None:
            raise Invalid(f"model {model_id!r} is being unloaded")
        if seq_id < lane.next_seq:
            raise Invalid(
                f"seq_id {seq_id} of model {model_id!r} comes too late: the model waited for it,"
                f" gave up, and goes on with seq_id {lane.next_seq}"
            )
        if seq_id - lane.next_seq > FAR:
            raise Invalid(
                f"seq_id {seq_id} of model {model_id!r} is too far ahead: the next in turn is"
                f" {lane.next_seq}, and no more than {FAR} may lie between"
            )
        full = len(lane.parked) >= self._max_parked or lane.bytes + size > self._max_bytes
        if full and seq_id != lane.next_seq:
            raise Busy(
                f"model {model_id!r} has {len(lane.parked)} requests ({lane.bytes} bytes) waiting;"
                f" allowed are {self._max_parked} ({self._max_bytes} bytes)"
            )

    def early(self, model_id: str, seq_id: int) -> bool:
        """Is an id before this one still to come?

        The client sends the chunks of one batch at once and the first of them last, and only if
        none of the others was refused: refusing an early one would keep the first from ever coming.
        """
        lane = self._lanes.get(model_id)
        if lane is None:
            return False
        ahead = seq_id - lane.next_seq
        return sum(1 for parked in lane.parked if parked < seq_id) < ahead <= FAR

    async def put(self, model_id: str, job: Job) -> None:
        """Park a job until its turn. If the lane was closed in the meantime, or has gone past its
        id (the gap timeout struck between admission and here), the job fails."""
        lane = self._lanes.get(model_id)
        if lane is None or lane.last is not None or job.seq_id < lane.next_seq:
            closed = lane is None or lane.last is not None
            why = "is being unloaded" if closed else "gave up waiting for it"
            error = f"seq_id {job.seq_id} of model {model_id!r} was not run: the model {why}"
            job.failed(error)
            await job.settle(Failed(error, "user"))
            return
        lane.parked[job.seq_id] = job
        lane.bytes += job.size
        self._look(lane)

    def use_up(self, model_id: str, seq_id: int, failed: Callable[[str], None]) -> None:
        """A refused id takes its turn: `failed` is called then, nothing runs."""
        lane = self._lanes.get(model_id)
        if lane is None or lane.last is not None:
            return
        if 0 <= seq_id - lane.next_seq <= FAR:  # beyond, its turn never comes
            lane.parked[seq_id] = Job(seq_id, None, _nothing, failed)
            self._look(lane)

    async def close(self, model_id: str, last: Job, why: str) -> bool:
        """Run what can still run, then `last`; what waits behind a missing id fails now. False if
        the lane is closing already."""
        lane = self._lanes.get(model_id)
        if lane is None or lane.last is not None:
            return False
        lane.last = last
        reach = lane.next_seq
        while reach in lane.parked:
            reach += 1
        await self._give_up(lane, reach, why)
        self._look(lane)
        return True

    async def abandon(self, model_id: str, error: str, category: str) -> None:
        """The model is lost: what waits fails with these words, and the lane is gone."""
        lane = self._lanes.pop(model_id, None)
        if lane is None:
            return
        waiting = [job for _, job in sorted(lane.parked.items()) if job.run is not None]
        if lane.last is not None and not lane.closed:
            waiting.append(lane.last)
        lane.before.clear()
        lane.parked.clear()
        lane.last, lane.closed = None, True
        await asyncio.gather(*(job.settle(Failed(error, category)) for job in waiting))

    def again(self, model_id: str) -> None:
        """Run a lane's last job once more: it failed."""
        lane = self._lanes.get(model_id)
        if lane is not None and lane.last is not None:
            lane.closed = False
            self._look(lane)

    def _look(self, lane: Lane) -> None:
        """Queue a lane that can run; note since when one cannot."""
        if lane.queued:
            return
        while not lane.before and _refused(lane.parked.get(lane.next_seq)):
            lane.take().failed("refused")
        if lane.ready:
            lane.queued, lane.blocked_at = True, None
            self._learners[lane.learner].lanes.put_nowait(lane)
        elif not lane.parked:
            lane.blocked_at = None
        elif lane.blocked_at is None:
            lane.blocked_at = self._clock()

    # ---- gaps

    async def sweep(self) -> None:
        """Fail what has waited too long behind an id that did not arrive."""
        now = self._clock()
        for lane in list(self._lanes.values()):
            if lane.blocked_at is not None and now - lane.blocked_at >= self._gap:
                why = f"did not arrive within {self._gap:g} s"
                await self._give_up(lane, lane.next_seq, why)
                self._look(lane)

    async def _give_up(self, lane: Lane, missing: int, why: str) -> None:
        """Everything parked behind `missing` fails; the lane goes on after the last of it."""
        late = {seq: job for seq, job in lane.parked.items() if seq > missing}
        if not late:
            return
        for seq in late:
            lane.bytes -= lane.parked.pop(seq).size
        after = max(late) + 1
        missed = [seq for seq in range(missing, after) if seq not in late]
        if lane.next_seq == missing:
            lane.next_seq = after
        lane.blocked_at = None
        failed = {seq: not_run(lane.model_id, seq, missing, why) for seq in sorted(late)}
        for seq, error in failed.items():
            late[seq].failed(error)
        settled = [late[seq].settle(Failed(error, "user")) for seq, error in failed.items()]
        gap = None if lane.gave_up is None else lane.gave_up(missing, after, missed)
        self._spawn(_in_turn(gap, settled))


def not_run(model_id: str, seq_id: int, missing: int, why: str) -> str:
    return (
        f"seq_id {seq_id} of model {model_id!r} was not run: seq_id {missing}, which comes before"
        f" it, {why}"
    )


_STOP = Lane("", "")


async def _in_turn(gap: Awaitable[None] | None, settled: Sequence[Awaitable[None]]) -> None:
    """The gap first: a replay that finds the failures must find what they come from."""
    if gap is not None:
        await gap
    await asyncio.gather(*settled)


def _refused(job: Job | None) -> bool:
    return job is not None and job.run is None


async def _nothing(_: Done | Failed) -> None:
    """A refused request is in the journal already."""


def on_its_own(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Run on a thread that ends with it, and with it what an engine keeps for each thread."""
    executor = ThreadPoolExecutor(1, name)
    future = asyncio.get_running_loop().run_in_executor(executor, function)
    executor.shutdown(wait=False)
    return future


def _attempt(job: Job, model_id: str) -> Done | Failed | None:
    """Run a job; whatever it raises is its outcome. None: the server is stopping."""
    assert job.run is not None
    try:
        return job.run()
    except Stopping:
        return None
    except TrimtabError as error:
        return Failed(error.message, error.category, ran=True)
    except Exception as error:  # the one broad except of this room
        log.exception("model %s: request %d failed", model_id, job.seq_id)
        return Failed(f"internal error: {type(error).__name__}: {error}", "server", ran=True)
