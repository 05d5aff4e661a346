"""What the demo shows and keeps: progress bars, metrics.jsonl, a table, the reward curve.

Knows rollouts and results as values; calls no server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    import tinker

    from recipes.demo import Knobs, Rollout

Run = tuple[int, str]
"""(seed, "warm-up" | "control" | the name of an algorithm)"""

EXAMPLES = 6


class View:
    """`with View(Path("runs/demo"), knobs, seeds=[0], control=True) as view:`"""

    def __init__(self, folder: Path, knobs: Knobs, seeds: Sequence[int], control: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.title, self.steps = folder, knobs.task.title, knobs.steps
        self.rows: dict[Run, list[dict[str, Any]]] = {}
        self.answers: dict[Run, dict[int, list[str]]] = {}
        self._lengths: dict[Run, int] = {}
        for seed in seeds:
            if knobs.warm_steps:
                self._lengths[seed, "warm-up"] = knobs.warm_steps
            for kind in (*knobs.algorithms, "control") if control else knobs.algorithms:
                self._lengths[seed, kind] = knobs.steps
        self._file = (folder / "metrics.jsonl").open("w")
        self._console = Console()
        self._bars: dict[Run, TaskID] = {}
        self._printed: dict[Run, float] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        for run, length in self._lengths.items():
            self._bars[run] = self._progress.add_task(
                self._called(run), total=length, said="", start=False
            )
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._file.close()

    # ---- what happens

    def warmed(self, seed: int, step: int, result: tinker.ForwardBackwardOutput) -> None:
        tokens = sum(len(output["logprobs"].data) for output in result.loss_fn_outputs)
        self._note((seed, "warm-up"), step, {"tokens": tokens, **result.metrics})

    def evaluated(self, run: Run, step: int, rollouts: Sequence[Rollout], words: Any) -> None:
        """`rollouts` are the greedy answers to the held-out problems."""
        self.answers.setdefault(run, {})[step] = [
            words.decode(rollout.sequence.tokens).strip() for rollout in rollouts
        ]
        self._problems = [rollout.problem for rollout in rollouts]
        self._note(run, step, {"held_out": mean([rollout.reward for rollout in rollouts])})

    def stepped(
        self,
        run: Run,
        step: int,
        rollouts: Sequence[Rollout],
        data: Sequence[tinker.Datum],
        metrics: Mapping[str, float],
    ) -> None:
        tokens = sum(len(rollout.sequence.tokens) for rollout in rollouts)
        tokens += sum(datum.model_input.length for datum in data)
        values = {"reward": mean([rollout.reward for rollout in rollouts]), "tokens": tokens}
        self._note(run, step, {**values, **metrics})

    def _note(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        seconds = round(time.monotonic() - self._start, 3)
        # Last, because the server reports a `step` of its own.
        row = {**values, "seed": run[0], "run": run[1], "step": step, "seconds": seconds}
        rows = self.rows.setdefault(run, [])
        rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        said = " ".join(
            f"{name} {shown}" for name, shown in self._latest(rows).items() if shown is not None
        )
        if len(rows) == 1:
            self._progress.start_task(self._bars[run])
        self._progress.update(self._bars[run], completed=step, said=said)
        due = step == self._lengths[run] or seconds - self._printed.get(run, 0.0) > 10
        if not self._console.is_terminal and due and step:
            self._printed[run] = seconds
            self._console.print(f"{self._called(run):>24} {step:4d}/{self._lengths[run]} {said}")

    def _latest(self, rows: Sequence[Mapping[str, float]]) -> dict[str, str | None]:
        rewards = [row["reward"] for row in rows if "reward" in row]
        held_out = [row["held_out"] for row in rows if "held_out" in row]
        spent = rows[-1]["seconds"] - rows[0]["seconds"]
        tokens = sum(row.get("tokens", 0) for row in rows[1:])
        found = health(rows)
        return {
            "held-out": f"{held_out[-1]:.2f}" if held_out else None,
            "reward": f"{mean(rewards[-5:]):.2f}" if rewards else None,
            "KL": f"{found['KL']:.4f}" if found else None,
            "tokens/s": f"{tokens / spent:.0f}" if spent > 0 and tokens else None,
        }

    def _called(self, run: Run) -> str:
        several = len({seed for seed, _ in self._lengths}) > 1
        return f"{run[1]}, seed {run[0]}" if several else run[1]

    # ---- afterwards

    def summary(self) -> None:
        """The table, a few answers before and after, and where everything is."""
        print_ = self._console.print
        print_(self._table())
        print_(self._examples())
        seeds = len({seed for seed, _ in self.rows})
        title = self.title if seeds == 1 else f"{self.title}, {seeds} seeds"
        picture = curve(self.folder / "reward.png", title, self.rows)
        print_(f"\n{picture}  {self.folder / 'metrics.jsonl'}", soft_wrap=True)

    def _examples(self) -> Table:
        """Answers of the first seed before and after, a column an algorithm."""
        seed = min(seed for seed, _ in self.answers)
        kinds = [k for s, k in self.answers if s == seed and k != "control"]
        examples = Table("held-out problem", "before", *kinds, "answer", box=None)
        for i, problem in enumerate(self._problems[:EXAMPLES]):
            shown = [self.answers[seed, kinds[0]][0][i]]
            shown += [self.answers[seed, kind][self.steps][i] for kind in kinds]
            marked = [mark(text, problem.answer) for text in shown]
            examples.add_row(problem.prompt.rstrip().split("\n")[-1], *marked, problem.answer)
        return examples

    def _table(self) -> Table:
        took = time.monotonic() - self._start
        table = Table(
            title=f"{self.title}, held-out greedy reward ({took:.0f} s in all)",
            caption="KL(q‖p) a token at most; ESS at least; age in updates",
            box=SIMPLE,
        )
        table.add_column("run", no_wrap=True)
        for name in ("before", "after", "gain", "KL", "ESS", "age", "tokens/s"):
            table.add_column(name, justify="right", no_wrap=True)
        for run, rows in self.rows.items():
            held_out = [row["held_out"] for row in rows if "held_out" in row]
            cells = [""] * 6
            if held_out:
                gain = held_out[-1] - held_out[0]
                cells[:3] = [f"{held_out[0]:.3f}", f"{held_out[-1]:.3f}", f"{gain:+.3f}"]
            if each := [found for row in rows if (found := health([row]))]:
                cells[3] = f"{max(found['KL'] for found in each):.4f}"
                cells[4] = f"{min(found['ESS'] for found in each):.3f}"
                cells[5] = f"{mean([found['age'] for found in each]):.1f}"
            table.add_row(self._called(run), *cells, self._latest(rows)["tokens/s"])
        return table


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def health(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How far the learner p is from the sampler q, a token, over the last five updates: the KL, the
    share of samples that p/q leaves effective, the age of the weights; empty before the first."""
    rows = [row for row in rows if "is_weight/num:sum" in row][-5:]
    if not rows:
        return {}

    def per_token(name: str) -> float:
        weight = sum(row[f"{name}/den:sum"] for row in rows)
        return sum(row[f"{name}/num:sum"] for row in rows) / weight if weight else 0.0

    squared = per_token("is_weight_sq")
    return {
        "KL": per_token("kl_sample_train_v3"),
        "ESS": per_token("is_weight") ** 2 / squared if squared else 0.0,
        "age": mean([row["age"] for row in rows]),
    }


def mark(given: str, answer: str) -> str:
    return f"[green]{given}[/]" if given == answer else f"[red]{given}[/]"


# ------------------------------------------------------------------ the picture

COLOURS = {"reinforce_pp": "#0f9d76", "stable_reinforce": "#2563eb", "control": "#d97706"}
LINES = {"control": "control: shuffled advantages"}


def curve(path: Path, title: str, rows: Mapping[Run, Sequence[Mapping[str, float]]]) -> Path:
    """Held-out greedy reward by RL step, a colour an algorithm, with the control and the training
    reward; below, how far each learner is from the sampler it learns from."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    changes: dict[str, list[tuple[float, float]]] = {}
    for (_, kind), history in rows.items():
        if kind == "warm-up":
            continue
        colour, (steps, held_out) = COLOURS[kind], series(history, "held_out")
        changes.setdefault(kind, []).append((held_out[0], held_out[-1]))
        axes.plot(steps, held_out, color=colour, marker="o", ms=4.5, lw=2.2)
        if kind != "control":
            axes.plot(*smooth(*series(history, "reward")), color=colour, alpha=0.35, lw=1.2)
            below.plot(*divergence(history), color=colour, lw=1.2)
    _legend(axes, changes)
    axes.set(ylabel="reward", ylim=(0, 1.02))
    below.set(xlabel="RL step", ylabel="KL(q‖p)")
    below.set_ylim(bottom=0)
    for each in (axes, below):
        each.grid(axis="y", color="#e5e7eb")
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{title[0].upper()}{title[1:]}: reward on held-out problems", loc="left")
    figure.savefig(path)
    return path


def _legend(axes: Any, changes: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """One entry a kind of line, however many seeds, with its mean before and after."""
    handles, labels = [], []
    for kind in (kind for kind in COLOURS if kind in changes):
        before, after = (mean(values) for values in zip(*changes[kind], strict=True))
        handles += axes.plot([], [], color=COLOURS[kind], marker="o", ms=4.5, lw=2.2)
        labels.append(f"{LINES.get(kind, kind)}, {before:.2f} → {after:.2f}")
    handles += axes.plot([], [], color="#9ca3af", lw=1.2)
    labels.append("training problems, sampled (mean of 5 steps)")
    axes.legend(handles, labels, frameon=False, loc="upper left")


def series(history: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    found = [(row["step"], row[name]) for row in history if name in row]
    return [step for step, _ in found], [value for _, value in found]


def divergence(
    history: Sequence[Mapping[str, float]],
) -> tuple[list[float], list[float]]:
    """The KL of each update, a token."""
    name = "kl_sample_train_v3"
    found = [
        (row["step"], row[f"{name}/num:sum"] / row[f"{name}/den:sum"])
        for row in history
        if row.get(f"{name}/den:sum")
    ]
    return [step for step, _ in found], [value for _, value in found]


def smooth(steps: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """The mean of the last five values at each step."""
    return steps, [mean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
