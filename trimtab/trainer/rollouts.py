"""Samples a group of completions of one prompt, turn by turn, and has each graded.

Knows sampling clients, not training; whether a run is synchronous is not visible from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tinker

from trimtab.trainer.completion import Completion
from trimtab.trainer.grading import Failure, Grader
from trimtab.trainer.renderer import Renderer
from trimtab.trainer.task import Item, Message
from trimtab.trainer.trajectory import Group, Trajectory, Turn

SeedOf = Callable[[int, int], int]  # (completion, turn) -> seed


@dataclass(frozen=True)
class Limits:
    """`context` None: the server does not say."""

    max_tokens: int
    max_turns: int
    context: int | None = None

    def room(self, prompt_tokens: int) -> int:
        """Tokens that may be sampled after such a prompt. One place stays free, so that a
        reference can score the whole sequence and still draw its one token.

        >>> Limits(64, 1, context=100).room(50)
        49
        """
        if self.context is None:
            return self.max_tokens
        return min(self.max_tokens, self.context - prompt_tokens - 1)


@dataclass(frozen=True)
class Draw:
    """Who samples, how hot, and the seed of each (completion, turn)."""

    client: tinker.SamplingClient
    temperature: float
    seed_of: SeedOf


@dataclass(frozen=True)
class Roller:
    """`await roller.group(Draw(client, 1.0, seed_of), item, size=4)`"""

    renderer: Renderer
    grader: Grader
    limits: Limits

    async def group(
        self, draw: Draw, item: Item, *, size: int, index: int = 0, version: int = 0
    ) -> Group:
        """`size` completions, graded. Only a server's failure is raised."""
        begun = time.monotonic()
        prompt = self.renderer.prompt(item)
        params = self._params(draw, len(prompt), 0, 0)
        response = await draw.client.sample(tinker.ModelInput.from_ints(prompt), size, params)
        episodes = [_Episode(self.renderer, prompt, s) for s in response.sequences]
        finished = await asyncio.gather(
            *(self._finish(draw, item, episode, i) for i, episode in enumerate(episodes))
        )
        return Group(index, version, tuple(finished), time.monotonic() - begun)

    async def _finish(self, draw: Draw, item: Item, episode: _Episode, number: int) -> Trajectory:
        """Further turns, if the task has any, then the reward."""
        while self.grader.task.reply is not None and len(episode.turns) < self.limits.max_turns:
            answer = await self.grader.reply(episode.completion(), item)
            if isinstance(answer, Failure):
                return episode.trajectory(item, answer)
            if answer is None:
                break
            before = self.renderer.reply(item, answer, episode.turns[-1].tokens_T.tolist())
            prompt = [*episode.tokens(), *before]
            if self.limits.room(len(prompt)) < 1:
                episode.truncated = True
                break
            params = self._params(draw, len(prompt), number, len(episode.turns))
            response = await draw.client.sample(tinker.ModelInput.from_ints(prompt), 1, params)
            episode.add(answer, before, response.sequences[0])
        return episode.trajectory(item, await self.grader.reward(episode.completion(), item))

    def _params(
        self, draw: Draw, prompt_tokens: int, number: int, turn: int
    ) -> tinker.SamplingParams:
        return tinker.SamplingParams(
            max_tokens=self.limits.room(prompt_tokens),
            temperature=draw.temperature,
            seed=draw.seed_of(number, turn),
            stop=list(self.renderer.stop) or None,
        )


class _Episode:
    """The turns so far of one completion."""

    def __init__(
        self, renderer: Renderer, prompt: Sequence[int], first: tinker.SampledSequence
    ) -> None:
        self.renderer = renderer
        self.turns: list[Turn] = []
        self.texts: list[str] = []
        self.replies: list[str] = []
        self._append(prompt, first)

    def add(
        self, answer: str | Message, before: Sequence[int], sequence: tinker.SampledSequence
    ) -> None:
        shown = answer if isinstance(answer, str) else str(answer.get("content", ""))
        self.replies.append(shown)
        self._append(before, sequence)

    def _append(self, before: Sequence[int], sequence: tinker.SampledSequence) -> None:
        self.turns.append(
            Turn(
                before=np.asarray(before, dtype=np.int64),
                tokens_T=np.asarray(sequence.tokens, dtype=np.int64),
                logprobs_T=np.asarray(sequence.logprobs, dtype=np.float64),
                sequence_id=sequence.sequence_id,
            )
        )
        stopped = sequence.stop_reason == "stop"
        self.texts.append(self.renderer.text(sequence.tokens, stopped=stopped))
        self.truncated = not stopped

    def tokens(self) -> list[int]:
        return [t for turn in self.turns for t in (*turn.before.tolist(), *turn.tokens_T.tolist())]

    def completion(self) -> Completion:
        return Completion(
            self.texts[-1], turns=self.texts, replies=self.replies, truncated=self.truncated
        )

    def trajectory(self, item: Item, reward: float | Failure) -> Trajectory:
        turns, completion = tuple(self.turns), self.completion()
        if isinstance(reward, Failure):
            return Trajectory(item, turns, completion, None, f"{reward.kind}: {reward.message}")
        return Trajectory(item, turns, completion, reward)
