"""Prompts on their way into memory: copied as far as the prefix cache has them, computed beyond.

M packed rows of a pass, C rows of a prompt's piece.

Prompts come in order, a bounded piece of them a step. One that begins like a prompt being computed
waits for that and copies. Used from the sampler's thread; knows nothing of rows or queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.engine.cached_attention import Piece, PrefillPlan
from trimtab.engine.decoding import runs
from trimtab.engine.failures import as_server_error
from trimtab.engine.fast_net import FastNet
from trimtab.engine.jobs import Job
from trimtab.engine.keeping import keep_prompt
from trimtab.engine.kv import Group, KVMemory
from trimtab.engine.memory import is_out_of_memory
from trimtab.engine.net import Net
from trimtab.engine.prefix import LEAST
from trimtab.engine.sampling_limits import SamplerLimits
from trimtab.engine.sharing import shared_tokens
from trimtab.engine.weights import Weights
from trimtab.errors import TrimtabError

_IDLE = 4  # pieces at once while nothing decodes


class _Part(NamedTuple):
    """`rows` tokens of a job's prompt, computed in one pass with others."""

    job: Job
    weights: Weights
    rows: int


class Prefill:
    def __init__(
        self,
        net: Net | FastNet,
        memory: KVMemory,
        limits: SamplerLimits,
        device: torch.device,
        fail: Callable[[Job, TrimtabError], None],
    ) -> None:
        """`fail` ends a job, and comes back to `drop` it here."""
        self._net = net
        self._memory = memory
        self._limits = limits
        self._device = device
        self._fail = fail
        self._jobs: deque[Job] = deque()

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def drop(self, job: Job) -> None:
        """Forget a job; one that is not here does no harm."""
        if job in self._jobs:
            self._jobs.remove(job)

    def step(self, *, idle: bool) -> list[Job]:
        """Bring the first prompts on by as many tokens as one step may compute, `idle` saying that
        nothing decodes; the jobs whose prompt is in memory now."""
        parts = self._next_parts(self._limits.prefill_tokens * (_IDLE if idle else 1))
        if not parts:
            return []
        self._compute(parts)
        done = [part.job for part in parts if part.job in self._jobs and part.job.prompt.complete]
        for job in done:
            self._jobs.remove(job)
            keep_prompt(self._memory, job)
        return done

    def group(self, job: Job) -> Group:
        """The job's group, its prompt in it."""
        if job.group is None:
            group = self._memory.group(job.shape)
            self._memory.add(group.prompts, [job.prompt])
            job.group = group
        return job.group

    # ----------------------------------------------------------------------- what comes next

    def _next_parts(self, room: int) -> list[_Part]:
        parts: list[_Part] = []
        for job in list(self._jobs):
            weights = job.target.weights
            assert weights is not None, "an active job holds its target"
            if job.prompt.scope is None:
                if self._comes_soon(job, weights, parts):
                    continue
                if not self._begin(job, weights):
                    continue
            elif job.prompt.scope.version != weights.identity:
                job.prompt.mixed = True
            rows = min(room, job.prompt.known - job.prompt.used)
            parts.append(_Part(job, weights, rows))
            room -= rows
            if room == 0:
                break
        return parts

    def _comes_soon(self, job: Job, weights: Weights, parts: list[_Part]) -> bool:
        """Whether much of this prompt is computed in this step for another, and will be kept."""
        scope, head = job.scope(weights), job.reusable
        rivals = [p.job for p in parts if p.job.prompt.scope == scope and not p.job.prompt.mixed]
        if not rivals or len(head) < LEAST or not self._memory.may_keep(rivals[0].prompt.known):
            return False
        worth = self._memory.prefixes.held(scope, head) + LEAST
        return any(
            shared_tokens(rival.ids[: rival.prompt.known], head) >= worth for rival in rivals
        )

    def _begin(self, job: Job, weights: Weights) -> bool:
        """Give the prompt its place and what is known of it; False where that failed the job."""
        job.prompt.scope = job.scope(weights)
        if not self._memory.keeps or len(job.reusable) < LEAST:
            return True
        try:
            group = self.group(job)
            hit = self._memory.prefixes.copy(
                job.prompt.scope, job.reusable, group.prompts, job.prompt.slot
            )
        except Exception as error:  # no memory for the pool: only this request needs it
            self._fail(job, as_server_error("making room for its prompt failed", error))
            return False
        job.prompt.used = job.prompt.hit = hit
        return True

    # ----------------------------------------------------------------------- computing

    def _compute(self, parts: list[_Part]) -> None:
        """A pass over these parts. Where it fails each is tried by itself, and one too large for
        the memory in halves: only what fails alone has failed."""
        failure = None
        try:
            hidden = self._forward(parts)
        except Exception as error:  # out of memory, say
            if len(parts) == 1 and not (parts[0].rows > 1 and is_out_of_memory(error)):
                failure = as_server_error("computing the prompt failed", error)
            hidden = None
        if hidden is None:  # outside the handler, whose traceback keeps what the pass computed
            self._compute_apart(parts, failure)
            return
        # All counted before any is scored: where scoring fails a job, the prompt that takes its
        # place must bring what this pass computed of it.
        for part in parts:
            part.job.prompt.used += part.rows
        start = 0
        for part in parts:
            self._score(part, hidden[start : start + part.rows])
            start += part.rows

    def _compute_apart(self, parts: list[_Part], failure: TrimtabError | None) -> None:
        if failure is not None:
            self._fail(parts[0].job, failure)
        elif len(parts) == 1:
            self._compute([parts[0]._replace(rows=parts[0].rows // 2)])
        else:
            for part in parts:
                self._compute([part])

    def _forward(self, parts: list[_Part]) -> Tensor:
        """(M, hidden) of the parts one after another."""
        pieces, tokens, positions, adapters = [], [], [], []
        for job, weights, rows in parts:
            group = self.group(job)
            span = range(job.prompt.used, job.prompt.used + rows)
            pieces.append(Piece(group.prompts, job.prompt, span.start, rows))
            tokens += job.prompt.tokens[span.start : span.stop]
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

    def _score(self, part: _Part, hidden_Cd: Tensor) -> None:
        job = part.job
        if job.scorer.anything:
            try:
                job.scorer.score(
                    job.prompt.used - part.rows,
                    hidden_Cd,
                    self._net.head,
                    part.weights.adapter,
                    self._limits.score_bytes,
                )
            except Exception as error:  # only this request asked for it
                self._fail(job, as_server_error("scoring the prompt failed", error))
