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
from typing import Literal

import numpy as np

from trimtab.engine.base import SampleWork
from trimtab.engine.kv import Group, Shape
from trimtab.engine.prefix import Scope
from trimtab.engine.scoring import PromptScorer
from trimtab.engine.stops import Decode, Stops
from trimtab.engine.streams import UniformStream
from trimtab.engine.weights import Target, Weights
from trimtab.errors import ServerError
from trimtab.types import Drawn, SampledSequence, SampleResult, TopK


class Prompt:
    """A request's prompt in memory: `used` of its tokens are there, in row `slot` of a pool, `hit`
    of them copied from the prefix cache. All but the last will be; that one is the first token of
    each row. `scope` is whose they are and under which weights they began, `mixed` whether others
    went on."""

    __slots__ = ("hit", "known", "mixed", "scope", "slot", "tokens", "used")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.known = len(tokens) - 1
        self.slot = -1
        self.used = 0
        self.hit = 0
        self.scope: Scope | None = None
        self.mixed = False

    @property
    def complete(self) -> bool:
        return self.used == self.known


class Job:
    """A request from submission to its result. `granted` counts the samples whose row was given
    memory, `begun` those whose row exists or existed, `open_rows` what is still to be given back;
    `reusable` is the head of its prompt that need not be computed, as nobody asked for its scores.
    """

    def __init__(
        self,
        work: SampleWork,
        target: Target,
        *,
        limit: int,
        longest: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        decode: Decode | None,
    ) -> None:
        request = work.request
        self.future: Future[SampleResult] = Future()
        self.request = request
        self.target = target
        self.limit = limit
        self.owner = work.owner
        self.ids = request.prompt.astype(np.int32)
        self.prompt = Prompt(request.prompt.tolist())
        self.shape = Shape.of(self.prompt.known, limit, request.num_samples, longest)
        self.stops = Stops.of(request.params, eos_token_ids, self.prompt.tokens, decode)
        asked = request.params.seed
        self.seed = secrets.randbits(64) if asked is None else asked
        self.on_token = work.on_token
        self.head_k = min(work.head_k, vocab_size)
        self.top_k = max(self.head_k, request.topk_sample_logprobs)
        self.scorer = PromptScorer(request, self.seed)
        self.reusable = self.ids[: min(self.prompt.known, self.scorer.first_wanted)]
        self.group: Group | None = None  # where its prompt and its rows are
        self.granted = 0
        self.begun = 0
        self.open_rows = 0
        self.rows: list[Row] = []
        self.sequences: dict[int, SampledSequence] = {}

    @property
    def samples(self) -> int:
        return self.request.num_samples

    def scope(self, weights: Weights) -> Scope:
        return Scope(self.owner, weights.identity)

    def next_rows(self, count: int, version: str) -> list[Row]:
        return [Row(self, i, version) for i in range(self.begun, self.begun + count)]

    def begin(self, rows: list[Row]) -> None:
        self.begun += len(rows)
        self.rows += rows

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
            prompt_cache_hit_tokens=self.prompt.hit,
        )

    @property
    def places(self) -> int:
        """What it keeps of the memory for keys and values."""
        return self.shape.prompt + self.open_rows * self.shape.row

    def succeed(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.result())

    def fail(self, error: BaseException) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Row:
    """One sample being drawn, in row `slot` of its group's pool. It remembers the prompt's last
    token and all its own but the newest."""

    job: Job
    index: int
    version: str
    slot: int = -1
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
        return self.tokens[-1] if self.tokens else self.job.prompt.tokens[-1]

    @property
    def used(self) -> int:
        return len(self.tokens)

    @property
    def position(self) -> int:
        """Of the token it takes next."""
        return self.job.prompt.known + len(self.tokens)

    def accept(self, token: int, logprob: float) -> bool:
        """Take a drawn token; does the sequence end with it?"""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if math.isnan(logprob):
            raise ServerError(
                f"the weights {self.version!r} gave a log-probability that is not a number for "
                f"token {len(self.tokens) - 1} of sample {self.index}"
            )
        self.stopped = self.job.stops.end(self.tokens)
        ended = self.stopped or len(self.tokens) >= self.job.limit
        if self.job.on_token is not None:
            self.job.on_token(self._drawn(ended))
        return ended

    def _drawn(self, ended: bool) -> Drawn:
        """The newest token; what was recorded of its step is already here."""
        asked, width = self.job.request.topk_sample_logprobs, 4 * self.job.top_k
        top: tuple[tuple[int, float], ...] = ()
        if asked:
            ids = np.frombuffer(self.top_ids[-width:], np.int32)[:asked]
            logprobs = np.frombuffer(self.top_logprobs[-width:], np.float32)[:asked]
            top = tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
        reason: Literal["stop", "length"] = "stop" if self.stopped else "length"
        end = reason if ended else None
        return Drawn(self.index, self.tokens[-1], self.logprobs[-1], top, end)

    def rewind(self) -> None:
        """Forget what a step drew that did not come to its end."""
        self.stream = UniformStream(self.job.seed, self.index)
        for _ in self.tokens:
            self.stream.next()

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
