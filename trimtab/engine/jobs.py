"""One request in the sampler, and the rows that are its samples.

P prompt tokens, T sampled tokens, k alternatives recorded a token. A row never holds a tensor: what
it keeps a token is a few Python numbers and a piece of bytes. Knows nothing of models or threads.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from trimtab.engine.base import SampleWork
from trimtab.engine.kv import Pool, PromptKV
from trimtab.engine.scoring import PromptScorer
from trimtab.engine.stops import Decode, Stops
from trimtab.engine.streams import UniformStream
from trimtab.engine.weights import Target, Weights
from trimtab.errors import ServerError
from trimtab.types import SampledSequence, SampleResult, TopK


class Job:
    """A request from submission to its result. `granted` counts the samples whose row was given
    memory, `begun` those whose row exists or existed, `open_rows` what is still to be given back;
    `prefilled` counts the prompt tokens computed."""

    def __init__(
        self,
        work: SampleWork,
        target: Target,
        *,
        limit: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        decode: Decode | None,
    ) -> None:
        request = work.request
        self.future: Future[SampleResult] = Future()
        self.request = request
        self.target = target
        self.limit = limit
        self.prompt: list[int] = request.prompt.tolist()
        self.stops = Stops.of(request.params, eos_token_ids, self.prompt, decode)
        asked = request.params.seed
        self.seed = secrets.randbits(64) if asked is None else asked
        self.head_k = min(work.head_k, vocab_size)
        self.top_k = max(self.head_k, request.topk_sample_logprobs)
        self.scorer = PromptScorer(request, self.seed)
        self.kv: PromptKV | None = None
        self.holds_prompt = False
        self.prefilled = 0
        self.granted = 0
        self.begun = 0
        self.open_rows = 0
        self.rows: list[Row] = []
        self.sequences: dict[int, SampledSequence] = {}

    @property
    def samples(self) -> int:
        return self.request.num_samples

    @property
    def context_rows(self) -> int:
        """Prompt tokens computed before sampling: all but the last, which the first step takes."""
        return len(self.prompt) - 1

    @property
    def row_tokens(self) -> int:
        """Places a row needs: every token but the last one drawn."""
        return self.context_rows + self.limit

    def begin_row(self, weights: Weights, pool: Pool, slot: int) -> Row:
        row = Row(self, self.begun, weights.version, pool, slot)
        self.begun += 1
        self.rows.append(row)
        return row

    def finish_row(self, row: Row) -> bool:
        """Keep the row's sequence; is the request complete?"""
        self.rows.remove(row)
        self.sequences[row.index] = row.sequence()
        return len(self.sequences) == self.samples

    def result(self) -> SampleResult:
        return SampleResult(
            sequences=tuple(self.sequences[i] for i in range(self.samples)),
            prompt_logprobs=self.scorer.logprobs,
            topk_prompt_logprobs=self.scorer.topk,
            target_prompt_logprobs=self.scorer.targets,
            target_layout=self.request.target_layout,
            prompt_alt_tokens=self.scorer.alt_tokens,
            prompt_alt_logprobs=self.scorer.alt_logprobs,
        )

    def succeed(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.result())

    def fail(self, error: BaseException) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Row:
    """One sample being drawn, at place `slot` of `pool`."""

    job: Job
    index: int
    version: str
    pool: Pool
    slot: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: bytearray = field(default_factory=bytearray)
    top_logprobs: bytearray = field(default_factory=bytearray)
    stream: UniformStream = field(init=False)
    stopped: bool = False
    runs: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = UniformStream(self.job.seed, self.index)

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.job.prompt[-1]

    @property
    def end(self) -> int:
        """The place, and the position, of the token it takes next."""
        return self.job.context_rows + len(self.tokens)

    def accept(self, token: int, logprob: float) -> bool:
        """Take a drawn token; does the sequence end with it?"""
        if math.isnan(logprob):
            raise ServerError(
                f"the weights {self.version!r} gave a log-probability that is not a number for "
                f"token {len(self.tokens)} of sample {self.index}"
            )
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = self.job.stops.end(self.tokens)
        return self.stopped or len(self.tokens) >= self.job.limit

    def switch(self, version: str) -> None:
        """From the next token on the weights are another version."""
        if version != self.version:
            self._close_run()
            self.version = version

    def sequence(self) -> SampledSequence:
        self._close_run()
        top = self._top()
        asked, head = self.job.request.topk_sample_logprobs, self.job.head_k
        return SampledSequence(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            stop_reason="stop" if self.stopped else "length",
            topk=_first(top, asked) if asked else None,
            head=_first(top, head) if head else None,
            versions=tuple(self.runs),
        )

    def _close_run(self) -> None:
        count = len(self.tokens) - sum(n for _, n in self.runs)
        if count:
            self.runs.append((self.version, count))

    def _top(self) -> TopK:
        shape = (len(self.tokens), self.job.top_k)
        return TopK(
            np.frombuffer(bytes(self.top_ids), np.int32).reshape(shape),
            np.frombuffer(bytes(self.top_logprobs), np.float32).reshape(shape),
        )


def _first(top: TopK, k: int) -> TopK:
    if top.ids.shape[1] == k:
        return top
    return TopK(np.ascontiguousarray(top.ids[:, :k]), np.ascontiguousarray(top.logprobs[:, :k]))
