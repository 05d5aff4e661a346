"""Where the numbers of a step go: metrics.jsonl, the display, transcripts, failures, sinks.

Knows no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.trainer.config import Config
from trimtab.trainer.display import Display
from trimtab.trainer.folder import Folder
from trimtab.trainer.metrics import Metrics
from trimtab.trainer.sinks import Sink
from trimtab.trainer.trajectory import Group, Trajectory


class Logbook:
    def __init__(
        self, config: Config, folder: Folder, display: Display, sinks: Sequence[Sink]
    ) -> None:
        self.config = config
        self.folder = folder
        self.display = display
        self.sinks = sinks

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Some completions, and every one that got no reward."""
        everything = [t for group in groups for t in group.trajectories]
        failed = [t for t in everything if t.failure]
        shown = _spread(everything, self.config.transcripts)
        self.folder.append("transcripts.jsonl", [_transcript(step, t) for t in shown])
        self.folder.append("failures.jsonl", [_failure(step, t) for t in failed])
        for trajectory in failed:
            kind, _, message = trajectory.failure.partition(": ")
            prompt = _short(trajectory.item["prompt"])
            self.display.warn(
                kind, f"{message}; prompt {prompt}: the completion is left out of training"
            )

    def step(self, step: int, metrics: Metrics) -> None:
        self.folder.append("metrics.jsonl", [{"step": step, **metrics}])
        for sink in self.sinks:
            sink.log(step, metrics)
        self.display.step(step, metrics)

    def end(self, step: int, metrics: Metrics) -> None:
        """What was measured after the last step."""
        self.folder.append("metrics.jsonl", [{"step": step, **metrics}])
        for sink in self.sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def _spread(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """`count` of them, evenly over the batch, so that they are of different prompts."""
    if count >= len(trajectories):
        return list(trajectories)
    return [trajectories[i * len(trajectories) // count] for i in range(count)]


def _transcript(step: int, trajectory: Trajectory) -> dict[str, Any]:
    completion = trajectory.completion
    return {
        "step": step,
        "prompt": trajectory.item["prompt"],
        "turns": list(completion.turns),
        "replies": list(completion.replies),
        "reward": trajectory.reward,
        "truncated": completion.truncated,
        "tokens": trajectory.action_tokens,
    }


def _failure(step: int, trajectory: Trajectory) -> dict[str, Any]:
    return {**_transcript(step, trajectory), "failure": trajectory.failure}


def _short(prompt: Any) -> str:
    text = repr(prompt if isinstance(prompt, str) else prompt[-1]["content"])
    return text if len(text) <= 80 else text[:77] + "..."
