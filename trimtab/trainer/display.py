"""What a run shows while it goes: one table that stays in place, or a line a step.

Knows no server and no files.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.trainer.config import Progress

WARNINGS_SHOWN = 3  # of each kind; after that they are counted

# Label, metric, format: what a step is summed up by. The first one present of each.
COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("env/all/reward/total",), "{:.3f}"),
    ("test", ("test/greedy/reward/total",), "{:.3f}"),
    ("KL", ("optim/kl_sample_train_v1",), "{:.4f}"),
    ("KL ref", ("kl_policy_base",), "{:.4f}"),
    ("entropy", ("optim/entropy",), "{:.3f}"),
    ("grad", ("optim/grad_norm",), "{:.3g}"),
    ("length", ("env/all/ac_tokens_per_turn",), "{:.1f}"),
    ("tok/s", ("time/tokens_per_second",), "{:.0f}"),
    ("stale", ("staleness/mean",), "{:.1f}"),
    ("s/step", ("time/total",), "{:.2f}"),
    ("ungraded", ("env/all/reward_failures",), "{:.0f}"),
)


def cells(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics of a step that are shown, formatted.

    >>> cells({"env/all/reward/total": 0.5, "env/all/reward_failures": 2.0})
    {'reward': '0.500', 'ungraded': '2'}
    """
    found = {}
    for label, names, form in COLUMNS:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None and not (label == "ungraded" and value == 0):
            found[label] = form.format(value)
    return found


def duration(seconds: float) -> str:
    """duration(3725) = "1:02:05", duration(65) = "1:05" """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display:
    """`with Display("auto", title="...", steps=100) as display: display.step(3, metrics)`"""

    def __init__(
        self,
        kind: Progress,
        *,
        title: str,
        steps: int,
        first: int = 0,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.kind = kind if kind != "auto" else ("live" if sys.stderr.isatty() else "plain")
        self.title, self.steps, self.done = title, steps, first
        self.recent: deque[tuple[int, dict[str, str]]] = deque(maxlen=8)
        self.latest: dict[str, str] = {}
        self.ends: deque[float] = deque([time.monotonic()], maxlen=21)
        self.phase = "starting"
        self.warned: dict[str, int] = {}
        self.live: Live | None = None

    def __enter__(self) -> Self:
        if self.kind == "live":
            self.live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4)
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, text: str) -> None:
        if self.kind != "none":
            self.console.print(Text(text), soft_wrap=True)

    def warn(self, kind: str, text: str) -> None:
        """The first few of a kind are told; the rest are counted where they are counted."""
        self.warned[kind] = self.warned.get(kind, 0) + 1
        if self.kind == "none" or self.warned[kind] > WARNINGS_SHOWN:
            return
        more = (
            " (further ones only in failures.jsonl)" if self.warned[kind] == WARNINGS_SHOWN else ""
        )
        self.console.print(Text(f"warning: {text}{more}", style="yellow"), soft_wrap=True)

    def working(self, phase: str) -> None:
        self.phase = phase

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done = step + 1
        self.ends.append(time.monotonic())
        shown = cells(metrics)
        self.latest |= shown
        self.recent.append((step, shown))
        if self.kind == "plain":
            parts = [f"{label} {value}" for label, value in shown.items()]
            left = self.time_left()
            tail = f", {left} left" if left else ""
            self.say(f"step {step + 1}/{self.steps}: {', '.join(parts)}{tail}")

    def time_left(self) -> str:
        """From the pace of the last 20 steps."""
        if len(self.ends) < 2 or self.done >= self.steps:
            return ""
        pace = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        return duration(pace * (self.steps - self.done))

    def render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="bold")
        labels = [label for label, _, _ in COLUMNS if label in self.latest]
        table.add_column("step", justify="right")
        for label in labels:
            table.add_column(label, justify="right")
        for step, shown in self.recent:
            table.add_row(str(step + 1), *(shown.get(label, "") for label in labels))
        left = self.time_left()
        head = Text.assemble(
            (self.title, "bold"),
            f"  step {self.done}/{self.steps}  {self.phase}",
            f"  {left} left" if left else "",
        )
        return Group(head, ProgressBar(total=self.steps, completed=self.done, width=60), table)
