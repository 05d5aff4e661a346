"""Small trajectories for the trainer's tests, by hand."""

import numpy as np

from trimtab.trainer.completion import Completion
from trimtab.trainer.trajectory import Group, Trajectory, Turn


def turn(before, tokens, logprobs=None, name="s:0:0"):
    logprobs = [-1.0] * len(tokens) if logprobs is None else logprobs
    return Turn(np.array(before), np.array(tokens), np.array(logprobs, dtype=float), name)


def trajectory(
    tokens=(7, 8), *, reward=1.0, prompt=(5, 6), failure="", truncated=False, turns=None
):
    turns = (turn(list(prompt), list(tokens)),) if turns is None else tuple(turns)
    text = Completion("text", truncated=truncated)
    return Trajectory({"prompt": "p"}, turns, text, reward, failure)


def group(index, rewards, version=0, lengths=None):
    lengths = [2] * len(rewards) if lengths is None else lengths
    made = [
        trajectory(range(10, 10 + n), reward=r, failure="" if r is not None else "none: no")
        for r, n in zip(rewards, lengths, strict=True)
    ]
    return Group(index, version, tuple(made))
