"""The curves of a run, as matplotlib figures. Knows metrics by name and nothing else."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Lines = Sequence[Mapping[str, Any]]

COLORS = ("#3b6ea8", "#c8553d", "#4f8a5b", "#8a6bb1", "#b8860b", "#5b6770", "#a0527a")


@dataclass(frozen=True)
class Panel:
    """`curves` are (metric, label); those without values are left out, and so is a panel without
    any. `stacked`: areas on top of each other."""

    title: str
    curves: tuple[tuple[str, str], ...]
    unit: str = ""
    stacked: bool = False
    log: bool = False


PANELS = (
    Panel(
        "Reward",
        (
            ("env/all/reward/total", "training, sampled"),
            ("test/greedy/reward/total", "held out, greedy"),
            ("test/env/all/reward/total", "held out, sampled"),
        ),
    ),
    Panel(
        "Length",
        (
            ("env/all/ac_tokens_per_turn", "tokens a turn"),
            ("env/all/turns_per_episode", "turns"),
        ),
    ),
    Panel(
        "Truncated and ungraded",
        (
            ("env/all/frac_truncated", "share truncated"),
            ("env/all/reward_failures", "completions without a reward"),
        ),
    ),
    Panel(
        "KL",
        (
            ("optim/kl_sample_train_v1", "sampler to learner, k1"),
            ("optim/kl_sample_train_v2", "sampler to learner, k2"),
            ("kl_policy_base", "policy to reference"),
            ("kl_pre_post_v1", "of the update"),
        ),
        "nats a token",
    ),
    Panel("Entropy", (("optim/entropy", "of what was sampled"),), "nats a token"),
    Panel(
        "Clip fractions",
        (
            ("optim/clip_frac_low", "low"),
            ("optim/clip_frac_high", "high"),
            ("optim/clip_frac_dual", "dual"),
            ("kl_clamp_frac", "KL clamp"),
            ("reward/clip_frac", "reward"),
        ),
    ),
    Panel(
        "Weights and trace",
        (
            ("optim/is_weight", "ratio"),
            ("optim/positive_weight", "weight, A > 0"),
            ("optim/negative_weight", "weight, A < 0"),
            ("optim/negative_trace", "trace, A < 0"),
        ),
    ),
    Panel("Gradient norm", (("optim/grad_norm", "before clipping"),), log=True),
    Panel(
        "Staleness",
        (("staleness/mean", "mean"), ("staleness/max", "largest")),
        "steps",
    ),
    Panel(
        "Time of a step",
        (
            ("time/sampling", "waiting for samples"),
            ("time/old_logprobs", "π_old"),
            ("time/reference", "π_ref"),
            ("time/train", "training"),
            ("time/publish", "publishing"),
            ("time/save", "saving"),
            ("time/evaluate", "evaluating"),
        ),
        "seconds",
        stacked=True,
    ),
)


def series(lines: Lines, metric: str) -> tuple[list[int], list[float]]:
    """Steps and values where the metric was reported."""
    found = [(line["step"], line[metric]) for line in lines if metric in line]
    return [step for step, _ in found], [value for _, value in found]


def present(lines: Lines) -> list[Panel]:
    return [p for p in PANELS if any(series(lines, metric)[0] for metric, _ in p.curves)]


def svg(panel: Panel, lines: Lines) -> str:
    """One panel as an SVG element with its text as text."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title}):
        figure = _figure(5.2, 3.0)
        _draw(figure.add_subplot(), panel, lines)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def png(lines: Lines, title: str) -> bytes:
    """All panels on one sheet."""
    panels = present(lines)
    columns = 2
    rows = max(1, -(-len(panels) // columns))
    figure = _figure(5.2 * columns, 2.9 * rows + 0.4)
    for i, panel in enumerate(panels):
        _draw(figure.add_subplot(rows, columns, i + 1), panel, lines)
    figure.suptitle(title, fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw(axes: Any, panel: Panel, lines: Lines) -> None:
    curves = [(label, metric, *series(lines, metric)) for metric, label in panel.curves]
    curves = [curve for curve in curves if curve[2]]
    if panel.stacked:
        _stack(axes, [(label, metric) for label, metric, *_ in curves], lines)
    else:
        for color, (label, _, steps, values) in zip(COLORS, curves, strict=False):
            marker = "o" if len(steps) < 25 else ""
            axes.plot(steps, values, label=label, color=color, lw=1.4, marker=marker, ms=3)
    if panel.log and all(value > 0 for *_, values in curves for value in values):
        axes.set_yscale("log")
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(panel.curves) > 1:
        axes.legend(fontsize=7, frameon=False)


def _stack(axes: Any, curves: Sequence[tuple[str, str]], lines: Lines) -> None:
    """A metric that a step did not report counts 0 there."""
    used = [line for line in lines if any(metric in line for _, metric in curves)]
    heights = [[line.get(metric, 0.0) for line in used] for _, metric in curves]
    labels = [label for label, _ in curves]
    steps = [line["step"] for line in used]
    axes.stackplot(steps, heights, labels=labels, colors=COLORS, alpha=0.85)
