"""What a rollout is: prompt, turns, and the rows they become. Pure numpy; knows no server.

Shape letters: T tokens of one turn, N rows of a trajectory. A trajectory of L tokens has N = L - 1
rows; row i belongs to the prediction of token i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.trainer.completion import Completion
from trimtab.trainer.task import Item

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Turn:
    """One sampled sequence. `before` are the tokens that the environment put in front of it since
    the last turn (for the first turn: the prompt); its request's prompt is all that came before."""

    before: Ints
    tokens_T: Ints
    logprobs_T: Floats
    sequence_id: str


@dataclass(frozen=True, eq=False)
class Trajectory:
    """`reward` is None where there is none: then `failure` says why, and it is not trained on."""

    item: Item
    turns: tuple[Turn, ...]
    completion: Completion
    reward: float | None
    failure: str = ""

    @property
    def tokens(self) -> Ints:
        return np.concatenate([part for t in self.turns for part in (t.before, t.tokens_T)])

    @property
    def action_tokens(self) -> int:
        return sum(turn.tokens_T.size for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Everything not sampled: the prompt and the replies."""
        return sum(turn.before.size for turn in self.turns)


@dataclass(frozen=True, eq=False)
class Group:
    """The completions of one prompt. `version` is the number of training steps behind the weights
    that sampled it (with in-flight clients: at least)."""

    index: int
    version: int
    trajectories: tuple[Trajectory, ...]
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Rows:
    """A trajectory as the N rows of a datum. Log-probabilities are 0 outside `mask_N`.

    For prompt [5, 6] and a turn [7, 8] with log q [-1, -2]: inputs [5, 6, 7], targets [6, 7, 8],
    mask [F, T, T], logprobs [0, -1, -2].
    """

    inputs_N: Ints
    targets_N: Ints
    mask_N: Bools
    logprobs_N: Floats


def rows(trajectory: Trajectory) -> Rows:
    sampled = np.concatenate(
        [
            part
            for turn in trajectory.turns
            for part in (np.zeros(turn.before.size, bool), np.ones(turn.tokens_T.size, bool))
        ]
    )
    logprobs = np.concatenate(
        [
            part
            for turn in trajectory.turns
            for part in (np.zeros(turn.before.size), turn.logprobs_T)
        ]
    )
    tokens = trajectory.tokens
    return Rows(tokens[:-1], tokens[1:], sampled[1:], logprobs[1:])
