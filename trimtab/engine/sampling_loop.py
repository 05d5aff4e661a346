"""The sampler's schedule: who is admitted, which prompts are computed, which rows decode.

One `step` admits requests in order, computes a bounded piece of prompts, starts rows, and decodes
one token for every row. A request joins at any step and leaves at any step. Used from one thread;
knows nothing of queues, names of weights, or tokens' meaning.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import torch

from trimtab.engine.decoding import DecodeBatch, rows_of
from trimtab.engine.failures import as_server_error
from trimtab.engine.fast_net import FastNet
from trimtab.engine.jobs import Job, Row
from trimtab.engine.keeping import keep_row
from trimtab.engine.kv import Group, KVMemory
from trimtab.engine.memory import is_out_of_memory
from trimtab.engine.net import Net
from trimtab.engine.prefill import Prefill
from trimtab.engine.sampling_limits import SamplerLimits
from trimtab.engine.weights import Target, Weights, WeightsShelf
from trimtab.errors import TrimtabError
from trimtab.types import SampleResult

_LOGITS = 6  # copies of a step's logits, counted in float32, that choosing tokens takes


class SamplingLoop:
    def __init__(
        self,
        net: Net | FastNet,
        memory: KVMemory,
        shelf: WeightsShelf,
        limits: SamplerLimits,
        device: torch.device,
        *,
        ask: Callable[[int], None] = lambda need: None,
    ) -> None:
        """`ask` raises where that many bytes are not free."""
        self._ask = ask
        self._net = net
        self._memory = memory
        self._shelf = shelf
        self._limits = limits
        self._device = device
        self._queue: deque[Job] = deque()  # not yet given all their rows, in order of arrival
        self._prefill = Prefill(net, memory, limits, device, self._fail)
        self._ready: list[Job] = []  # prompt computed, rows still to begin
        self._active: dict[Job, None] = {}  # holding weights and memory
        self._open_rows = 0
        self._batch: DecodeBatch | None = None
        self._batch_weights: dict[Target, Weights] = {}
        self._cancelled = False  # whether some future was since the last step
        self._meant = -1  # how often targets had changed when the prefix cache was last swept

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._active)

    @property
    def memory(self) -> KVMemory:
        return self._memory

    def add(self, job: Job) -> None:
        self._queue.append(job)
        job.future.add_done_callback(self._note_cancelled)

    def rest(self) -> None:
        """There is nothing to do: let go of what the last batch was decoded with."""
        self._batch, self._batch_weights = None, {}
        if isinstance(self._net, FastNet):
            self._net.forget()

    def step(self) -> None:
        self._drop_cancelled()
        self._drop_outdated()
        self._admit()
        self._ready += self._prefill.step(idle=not self._decoding())
        self._begin_rows()
        self._decode()

    def abandon(self, error: TrimtabError) -> None:
        """Fail everything, whatever state it is in; the loop is not to be used again."""
        for job in self._active:
            self._shelf.release(job.target)
        for job in dict.fromkeys([*self._active, *self._queue]):
            job.fail(error)

    # ----------------------------------------------------------------------- joining and leaving

    def _admit(self) -> None:
        """In order, and each with all its rows before the next begins: what is waited for always
        belongs to requests that run, so memory comes free and no request waits for ever."""
        while self._queue and self._reserve(self._queue[0]):
            self._queue.popleft()

    def _reserve(self, job: Job) -> bool:
        """Take memory for the job's prompt and rows; is that all of it?"""
        if job not in self._active and not self._begin(job):
            return False
        while job in self._active and job.granted < job.samples:
            if not self._reserve_row(job):
                return False
        return True

    def _begin(self, job: Job) -> bool:
        """Take the prompt and the first row together, so that what is begun can always go on."""
        if not self._memory.reserve(job.shape.prompt):
            return False
        if not self._reserve_row(job):
            self._memory.release(job.shape.prompt)
            return False
        try:
            self._shelf.hold(job.target)
        except Exception as error:  # the adapter may be unreadable in any way; only it fails
            self._release(job)
            job.fail(as_server_error("the weights could not be read", error))
            return True
        self._active[job] = None
        self._prefill.add(job)
        return True

    def _reserve_row(self, job: Job) -> bool:
        if self._open_rows >= self._limits.rows or not self._memory.reserve(job.shape.row):
            return False
        self._open_rows += 1
        job.open_rows += 1
        job.granted += 1
        return True

    def _release_row(self, job: Job) -> None:
        self._memory.release(job.shape.row)
        self._open_rows -= 1
        job.open_rows -= 1

    def _release(self, job: Job) -> None:
        """All the memory that a begun job still has."""
        while job.open_rows:
            self._release_row(job)
        self._memory.release(job.shape.prompt)

    def _note_cancelled(self, future: Future[SampleResult]) -> None:
        """Called on whatever thread cancels (or completes) a future."""
        if future.cancelled():
            self._cancelled = True

    def _drop_cancelled(self) -> None:
        if not self._cancelled:
            return
        self._cancelled = False
        for job in [j for j in itertools.chain(self._queue, self._active) if j.future.cancelled()]:
            if job in self._active or job in self._queue:  # it may stand in both
                self._clear(job)
                self._leave(job)
                job.future.set_running_or_notify_cancel()

    def _drop_outdated(self) -> None:
        """Give up prefixes of weights that no target means any more."""
        changes = self._shelf.changes
        if changes != self._meant:
            self._meant = changes
            self._memory.prefixes.keep_only(self._shelf.meant())

    def _fail(self, job: Job, error: BaseException) -> None:
        self._clear(job)
        self._leave(job)
        job.fail(error)

    def _leave(self, job: Job) -> None:
        """Forget a job wherever it stands; twice does no harm."""
        for row in job.rows:
            self._remove(row)
        job.rows.clear()
        for place in (self._queue, self._ready):
            if job in place:
                place.remove(job)
        self._prefill.drop(job)
        if job not in self._active:
            return
        del self._active[job]
        if job.group is not None:
            self._memory.remove(job.group, job.group.prompts, job.prompt)
            self._batch = None
        self._release(job)
        self._shelf.release(job.target)

    def _remove(self, row: Row) -> None:
        group = row.job.group
        assert group is not None, "a row has a group"
        self._memory.remove(group, group.rows, row)
        self._batch = None

    # ----------------------------------------------------------------------- decoding

    def _begin_rows(self) -> None:
        for job in list(self._ready):
            count = job.granted - job.begun
            if count == 0:
                continue
            try:
                self._place(job, count)
            except Exception as error:  # no memory for the pool: only this request needs it
                self._fail(job, as_server_error("making room for its samples failed", error))
                continue
            if job.begun == job.samples:
                self._ready.remove(job)

    def _place(self, job: Job, count: int) -> None:
        assert job.target.weights is not None, "an active job holds its target"
        rows = job.next_rows(count, job.target.weights.version)
        self._memory.add(self._prefill.group(job).rows, rows)
        job.begin(rows)
        self._batch = None

    def _decode(self) -> None:
        groups = self._decoding()
        if groups:
            self._advance(groups)

    def _advance(self, groups: list[Group]) -> None:
        """A token for every row of these groups. Where that fails each group is tried by itself;
        where one fails alone for lack of memory, its largest request goes and the rest try again in
        the next step; for another reason, all of the group's."""
        failure, short = None, False
        try:
            batch = self._current_batch(groups)
            ids, logprobs, best = batch.step()
        except Exception as error:
            if len(groups) == 1:
                failure = as_server_error("a decode step failed", error)
                short = is_out_of_memory(error)
            batch = None
        if batch is None:  # outside the handler, whose traceback keeps what the step computed
            self._advance_apart(groups, failure, short)
            return
        if best is not None:
            batch.record(best)
        self._accept(batch.rows, ids, logprobs)

    def _advance_apart(
        self, groups: list[Group], failure: TrimtabError | None, short: bool
    ) -> None:
        self._batch = None
        for row in rows_of(groups):
            row.rewind()
        if failure is None:
            for group in groups:
                self._advance([group])
                self._batch = None
            return
        jobs = list(dict.fromkeys(row.job for row in rows_of(groups)))
        for job in [max(jobs, key=lambda job: job.places)] if short else jobs:
            self._fail(job, failure)

    def _decoding(self) -> list[Group]:
        return [group for group in self._memory.groups.values() if group.rows.owners]

    def _current_batch(self, groups: list[Group]) -> DecodeBatch:
        changed = any(t.weights is not w for t, w in self._batch_weights.items())
        if self._batch is None or changed:
            self._batch = self._new_batch(groups)
        return self._batch

    def _new_batch(self, groups: list[Group]) -> DecodeBatch:
        rows = rows_of(groups)
        now: dict[Target, Weights] = {}
        for row in rows:
            target = row.job.target
            if target not in now:
                assert target.weights is not None
                now[target] = target.weights
            row.switch(now[target].version)
        self._batch_weights = now
        weights = [now[row.job.target] for row in rows]
        self._ask(len(rows) * self._net.head.vocab_size * 4 * _LOGITS)
        return DecodeBatch(self._net, groups, weights, self._device)

    def _accept(self, rows: Iterable[Row], ids: list[int], logprobs: list[float]) -> None:
        """Give every row its token, and only then let any leave: a row that moves must count all
        that the step remembered."""
        ended: list[Row] = []
        failed: dict[Job, Exception] = {}
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            try:
                if row.accept(token, logprob):
                    ended.append(row)
            except Exception as error:  # a tokenizer, or numbers that are none: only this request
                failed.setdefault(row.job, error)
        for job, error in failed.items():
            self._fail(job, as_server_error("taking a token failed", error))
        for row in ended:
            if row.job in self._active:
                self._finish(row)

    def _clear(self, job: Job) -> None:
        """Leave no number behind that is none: who ends without a result may have left some that
        no step has come upon yet, and its places are others' next."""
        if job not in self._active or job.group is None:  # it has no places
            return
        job.group.prompts.clear(job.prompt)
        for row in job.rows:
            job.group.rows.clear(row)

    def _finish(self, row: Row) -> None:
        job = row.job
        keep_row(self._memory, row)
        self._remove(row)
        self._release_row(job)
        if job.finish_row(row):
            self._leave(job)
            job.succeed()
