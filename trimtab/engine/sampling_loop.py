"""The sampler's schedule: who is admitted, which prompts are computed, which rows decode.

One `step` admits requests in order, computes a bounded piece of prompts, starts rows, and decodes
one token for every row. A request joins at any step and leaves at any step. Used from one thread;
knows nothing of queues, names of weights, or tokens' meaning.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.engine.cached_attention import Piece, PrefillPlan
from trimtab.engine.decoding import DecodeBatch, runs
from trimtab.engine.jobs import Job, Row
from trimtab.engine.kv import KVMemory, Pool
from trimtab.engine.net import Net
from trimtab.engine.sampling_limits import SamplerLimits
from trimtab.engine.weights import Target, Weights, WeightsShelf
from trimtab.errors import ServerError, TrimtabError

_IDLE_PREFILL = 4  # pieces at once while nothing decodes


class _Part(NamedTuple):
    """`rows` tokens of a job's prompt, computed in one pass with others."""

    job: Job
    weights: Weights
    rows: int


class SamplingLoop:
    def __init__(
        self,
        net: Net,
        memory: KVMemory,
        shelf: WeightsShelf,
        limits: SamplerLimits,
        device: torch.device,
    ) -> None:
        self._net = net
        self._memory = memory
        self._shelf = shelf
        self._limits = limits
        self._device = device
        self._queue: deque[Job] = deque()  # not yet given all their rows, in order of arrival
        self._prefilling: deque[Job] = deque()
        self._ready: list[Job] = []  # prompt computed, rows still to begin
        self._active: dict[Job, None] = {}  # holding weights and memory
        self._placed: dict[Pool, list[Row]] = {}
        self._open_rows = 0
        self._batch: DecodeBatch | None = None
        self._batch_weights: dict[Target, Weights] = {}

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._active)

    def places(self, prompt: int, tokens: int) -> tuple[int, int]:
        """Memory that `tokens` after `prompt` computed ones need, and all there is, in tokens."""
        return prompt + self._memory.row_places(prompt + tokens), self._memory.budget

    def add(self, job: Job) -> None:
        self._queue.append(job)

    def step(self) -> None:
        self._drop_cancelled()
        self._admit()
        self._prefill()
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
        if not self._memory.reserve(job.context_rows):
            return False
        if not self._reserve_row(job):
            self._memory.release(job.context_rows)
            return False
        job.holds_prompt = True
        try:
            self._shelf.hold(job.target)
        except Exception as error:  # the adapter may be unreadable in any way; only it fails
            self._release_memory(job)
            job.fail(as_server_error("the weights could not be read", error))
            return True
        self._active[job] = None
        self._prefilling.append(job)
        return True

    def _reserve_row(self, job: Job) -> bool:
        places = self._memory.row_places(job.row_tokens)
        if self._open_rows >= self._limits.rows or not self._memory.reserve(places):
            return False
        self._open_rows += 1
        job.open_rows += 1
        job.granted += 1
        return True

    def _release_memory(self, job: Job) -> None:
        """Whatever of it the job still has."""
        self._release_prompt(job)
        while job.open_rows:
            self._release_row(job)

    def _release_prompt(self, job: Job) -> None:
        if job.kv is not None:
            self._memory.drop_prompt(job.kv)
            job.kv = None
        if job.holds_prompt:
            self._memory.release(job.context_rows)
            job.holds_prompt = False

    def _release_row(self, job: Job) -> None:
        self._memory.release(self._memory.row_places(job.row_tokens))
        self._open_rows -= 1
        job.open_rows -= 1

    def _drop_cancelled(self) -> None:
        for job in [j for j in itertools.chain(self._queue, self._active) if j.future.cancelled()]:
            self._leave(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        self._leave(job)
        job.fail(error)

    def _leave(self, job: Job) -> None:
        """Forget a job wherever it stands; twice does no harm."""
        for row in job.rows:
            self._remove(row)
        job.rows.clear()
        for place in (self._queue, self._prefilling, self._ready):
            if job in place:
                place.remove(job)
        if job in self._active:
            del self._active[job]
            self._release_memory(job)
            self._shelf.release(job.target)

    def _remove(self, row: Row) -> None:
        """Take a row out of its pool; the pool's last row moves to its place."""
        rows = self._placed[row.pool]
        last = rows.pop()
        self._memory.remove_row(row.pool, row.slot, last.end)
        if last is not row:
            rows[row.slot] = last
            last.slot = row.slot
        if not rows:
            del self._placed[row.pool]
        self._batch = None

    # ----------------------------------------------------------------------- prompts

    def _prefill(self) -> None:
        parts = self._next_parts()
        if not parts:
            return
        try:
            hidden = self._forward(parts)
        except (
            Exception
        ) as error:  # out of memory, most likely: those in the pass fail, others go on
            for part in parts:
                self._fail(part.job, as_server_error("computing the prompt failed", error))
            return
        start = 0
        for part in parts:
            self._prefilled(part, hidden[start : start + part.rows])
            start += part.rows

    def _next_parts(self) -> list[_Part]:
        """The first prompts' next tokens, as many as one step may compute."""
        room = self._limits.prefill_tokens * (1 if self._placed else _IDLE_PREFILL)
        parts = []
        for job in self._prefilling:
            rows = min(room, job.context_rows - job.prefilled)
            weights = job.target.weights
            assert weights is not None, "an active job holds its target"
            parts.append(_Part(job, weights, rows))
            room -= rows
            if room == 0:
                break
        return parts

    def _forward(self, parts: list[_Part]) -> Tensor:
        """(M, hidden) of the parts one after another."""
        pieces, tokens, positions, adapters = [], [], [], []
        for job, weights, rows in parts:
            if job.kv is None:
                job.kv = self._memory.new_prompt(job.context_rows)
            span = range(job.prefilled, job.prefilled + rows)
            pieces.append(Piece(job.kv, span.start, rows))
            tokens += job.prompt[span.start : span.stop]
            positions += span
            adapters += [weights.adapter] * rows
        if not tokens:
            return torch.empty(0)
        return self._net.hidden(
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            PrefillPlan([p for p in pieces if p.rows]),
            runs(adapters),
        )

    def _prefilled(self, part: _Part, hidden: Tensor) -> None:
        job = part.job
        if job.scorer.anything:
            try:
                job.scorer.score(
                    job.prefilled,
                    hidden,
                    self._net.head,
                    part.weights.adapter,
                    self._limits.score_bytes,
                )
            except Exception as error:  # only this request asked for it
                self._fail(job, as_server_error("scoring the prompt failed", error))
                return
        job.prefilled += part.rows
        if job.prefilled == job.context_rows:
            self._prefilling.remove(job)
            self._ready.append(job)

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
                self._release_prompt(job)
                self._ready.remove(job)

    def _place(self, job: Job, count: int) -> None:
        length = self._memory.row_places(job.row_tokens)
        pool, first = self._memory.add_rows(length, count)
        assert job.target.weights is not None
        rows = [
            job.begin_row(job.target.weights, pool, slot) for slot in range(first, first + count)
        ]
        self._placed.setdefault(pool, []).extend(rows)
        if job.kv is not None:
            pool.fill(first, count, job.kv)
        self._batch = None

    # ----------------------------------------------------------------------- decoding

    def _decode(self) -> None:
        if not self._placed:
            return
        try:
            batch = self._current_batch()
            ids, logprobs, best = batch.step()
        except (
            Exception
        ) as error:  # out of memory, most likely: those in the step fail, others go on
            self._batch = None
            for job in {row.job: None for rows in self._placed.values() for row in rows}:
                self._fail(job, as_server_error("a decode step failed", error))
            return
        if best is not None:
            batch.record(best)
        self._accept(batch.rows, ids, logprobs)

    def _current_batch(self) -> DecodeBatch:
        changed = any(t.weights is not w for t, w in self._batch_weights.items())
        if self._batch is None or changed:
            self._batch = self._new_batch()
        return self._batch

    def _new_batch(self) -> DecodeBatch:
        pools = list(self._placed.items())
        rows = [row for _, rows in pools for row in rows]
        now: dict[Target, Weights] = {}
        for row in rows:
            target = row.job.target
            if target not in now:
                assert target.weights is not None
                now[target] = target.weights
            row.switch(now[target].version)
        self._batch_weights = now
        weights = [now[row.job.target] for row in rows]
        return DecodeBatch(self._net, pools, weights, self._device)

    def _accept(self, rows: Iterable[Row], ids: list[int], logprobs: list[float]) -> None:
        ended: list[Row] = []
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            try:
                if row.accept(token, logprob):
                    ended.append(row)
            except Exception as error:  # a tokenizer, or numbers that are none: only this request
                for each in row.job.rows:
                    each.pool.clear(each.slot)
                self._fail(row.job, as_server_error("taking a token failed", error))
        for row in ended:
            if row.job in self._active:
                self._finish(row)

    def _finish(self, row: Row) -> None:
        job = row.job
        self._remove(row)
        self._release_row(job)
        if job.finish_row(row):
            self._leave(job)
            job.succeed()


def as_server_error(what: str, error: Exception) -> TrimtabError:
    """One of ours as it is; anything else as a ServerError that names it."""
    if isinstance(error, TrimtabError):
        return error
    wrapped = ServerError(f"{what}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
