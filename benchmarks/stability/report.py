"""From finished cells to tables, verdicts and a picture. Knows nothing of the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
OURS = "stable_reinforce"


def collapsed(row: Row) -> bool:
    """Ended below where it began (by 0.03), or met a non-finite gradient."""
    return bool(row["non_finite"]) or row["final"] < row["start"] - 0.03


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of one set of cells.

    gain and area are over the start; max_grad and max_kl are the median cell's maximum and the
    worst cell's.
    """
    gains = np.array([r["final"] - r["start"] for r in rows])
    return {
        "cells": len(rows),
        "final": float(np.mean([r["final"] for r in rows])),
        "gain": float(gains.mean()),
        "area": float(np.mean([r["area"] - r["start"] for r in rows])),
        "collapse": float(np.mean([collapsed(r) for r in rows])),
        "max_grad": float(np.median([r["max_grad_norm"] for r in rows])),
        "worst_grad": float(np.max([r["max_grad_norm"] for r in rows])),
        "max_kl": float(np.median([r["max_kl"] for r in rows])),
        "worst_kl": float(np.max([r["max_kl"] for r in rows])),
    }


def paired(rows: Sequence[Row], other: str, *, draws: int = 10_000) -> tuple[float, float, float]:
    """Mean of (ours - other) in final quality over the cells both have, with a 95% bootstrap
    interval over cells."""
    by_loss: dict[str, dict[tuple[Any, ...], float]] = defaultdict(dict)
    for row in rows:
        by_loss[row["loss"]][_pair_key(row)] = row["final"]
    shared = sorted(by_loss[OURS].keys() & by_loss[other].keys())
    gaps = np.array([by_loss[OURS][k] - by_loss[other][k] for k in shared])
    if not len(gaps):
        return (float("nan"),) * 3
    rng = np.random.default_rng(0)
    means = gaps[rng.integers(0, len(gaps), (draws, len(gaps)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(gaps.mean()), float(low), float(high)


def _pair_key(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("task", "staleness", "numerics", "seed", "lr_scale", "head_k"))


def print_report(rows: Sequence[Row], console: Console) -> None:
    losses = sorted({r["loss"] for r in rows}, key=lambda name: (name != OURS, name))
    _print_losses(rows, losses, console)
    working = [r for r in rows if r["lr_scale"] == 1]
    int8 = [r for r in working if r["numerics"] == "int8"]
    _print_split(int8, losses, "staleness", "int8 sampler, by staleness: final (collapse)", console)
    at_4 = [r for r in working if r["staleness"] == 4]
    _print_split(at_4, losses, "numerics", "staleness 4, by sampler: final (collapse)", console)
    _print_split(working, losses, "head_k", "by size of the head: final (collapse)", console)
    _print_split(rows, losses, "task", "by task: final (collapse)", console)
    if OURS in losses:
        for other in losses:
            if other != OURS:
                gap, low, high = paired(rows, other)
                console.print(f"{OURS} - {other}: {gap:+.3f} [{low:+.3f}, {high:+.3f}]")
        for name, passed, detail in verdicts(rows):
            console.print(f"{'pass' if passed else 'FAIL'}  {name}: {detail}")


def _print_losses(rows: Sequence[Row], losses: Iterable[str], console: Console) -> None:
    table = Table(title="all cells")
    names = list(summary(rows))
    for column in ("loss", *names):
        table.add_column(column, justify="right" if column != "loss" else "left")
    for loss in losses:
        figures = summary([r for r in rows if r["loss"] == loss])
        table.add_row(loss, *(f"{figures[n]:.3g}" for n in names))
    console.print(table)


def _print_split(
    rows: Sequence[Row], losses: Iterable[str], key: str, title: str, console: Console
) -> None:
    values = sorted({r[key] for r in rows})
    if len(values) < 2:
        return
    table = Table(title=title)
    for column in ("loss", *map(str, values)):
        table.add_column(column, justify="right" if column != "loss" else "left")
    for loss in losses:
        cells = [[r for r in rows if r["loss"] == loss and r[key] == v] for v in values]
        table.add_row(loss, *(_final_and_collapse(c) for c in cells))
    console.print(table)


def _final_and_collapse(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    figures = summary(rows)
    return f"{figures['final']:.3f} ({figures['collapse']:.2f})"


def verdicts(rows: Sequence[Row]) -> list[tuple[str, bool, str]]:
    """The criteria of README.md as (name, passed, figures), over the cells where on-policy training
    at the same rate does not collapse."""
    ours = [r for r in rows if r["loss"] == OURS]
    fresh = {
        _rate_key(r): r
        for r in ours
        if r["staleness"] == 0 and r["numerics"] == "int8" and not collapsed(r)
    }
    held = [r for r in ours if _rate_key(r) in fresh]
    out = [_no_collapse(held)]
    out += [_final_share(held, fresh, k, s) for k, s in ((4, 0.95), (16, 0.90), (64, 0.75))]
    out += [_gradients(held, fresh), _end_kl(held)]
    out += [_no_worse(rows, ours, other) for other in ("importance_sampling", "ppo")]
    out += [_on_policy(rows)]
    return [verdict for verdict in out if verdict is not None]


Verdict = tuple[str, bool, str] | None


def _rate_key(row: Row) -> tuple[Any, ...]:
    return row["task"], row["seed"], row["lr_scale"]


def _no_collapse(held: Sequence[Row]) -> Verdict:
    near = [r for r in held if r["staleness"] <= 16]
    broken = sum(map(collapsed, near))
    return "no collapse up to staleness 16", broken == 0, f"{broken} of {len(near)} cells"


def _final_share(
    held: Sequence[Row], fresh: dict[tuple[Any, ...], Row], staleness: int, share: float
) -> Verdict:
    cells = [r for r in held if r["staleness"] == staleness and r["numerics"] == "int8"]
    if not cells:
        return None
    ratio = _mean(cells, "final") / _mean([fresh[_rate_key(r)] for r in cells], "final")
    text = f"{ratio:.0%} of on-policy, at least {share:.0%}"
    return f"final at staleness {staleness}", ratio >= share, text


def _gradients(held: Sequence[Row], fresh: dict[tuple[Any, ...], Row]) -> Verdict:
    if not held:
        return None
    ratios = [r["max_grad_norm"] / fresh[_rate_key(r)]["max_grad_norm"] for r in held]
    ratio = float(np.median(ratios))
    return "largest gradient", ratio <= 2, f"{ratio:.2f} times on-policy (median), at most 2"


def _end_kl(held: Sequence[Row]) -> Verdict:
    if not held:
        return None
    worst = max(r["end_kl"] for r in held)
    return "KL at the end", worst < 0.5, f"{worst:.3f} nats a token at most, below 0.5"


def _no_worse(rows: Sequence[Row], ours: Sequence[Row], other: str) -> Verdict:
    theirs = [r for r in rows if r["loss"] == other]
    if not theirs or not ours:
        return None
    gap, low, high = paired(rows, other)
    rates = [float(np.mean([*map(collapsed, group)])) for group in (ours, theirs)]
    text = f"final {gap:+.3f} [{low:+.3f}, {high:+.3f}], collapse {rates[0]:.2f} : {rates[1]:.2f}"
    return f"no worse than {other}", low > 0 and rates[0] <= rates[1], text


def _on_policy(rows: Sequence[Row]) -> Verdict:
    """Beyond the noise: the whole interval of the paired gaps to the best other lies below 0."""
    fresh = [r for r in rows if r["staleness"] == 0 and r["numerics"] == "int8"]
    fresh = [r for r in fresh if r["lr_scale"] == 1]
    others = sorted({r["loss"] for r in fresh} - {OURS})
    if not others or len(others) == len({r["loss"] for r in fresh}):
        return None
    best = max(others, key=lambda name: _mean([r for r in fresh if r["loss"] == name], "final"))
    gap, low, high = paired(fresh, best)
    text = f"final {gap:+.3f} [{low:+.3f}, {high:+.3f}] against {best}, the best other"
    return "on policy no worse than the best", high >= 0, text


def _mean(rows: Sequence[Row], key: str) -> float:
    return float(np.mean([r[key] for r in rows]))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Two heat maps: gain by loss and staleness (int8), and by loss and sampler (staleness 4)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    working = [r for r in rows if r["lr_scale"] == 1]
    losses = sorted({r["loss"] for r in rows}, key=lambda name: (name != OURS, name))
    figure, axes = plt.subplots(1, 2, figsize=(12, 0.6 * len(losses) + 2), layout="constrained")
    int8 = [r for r in working if r["numerics"] == "int8"]
    _heat(axes[0], int8, losses, "staleness", "int8 sampler, by staleness (optimizer steps)")
    at_4 = [r for r in working if r["staleness"] == 4]
    image = _heat(axes[1], at_4, losses, "numerics", "staleness 4, by the sampler's numerics")
    figure.colorbar(image, ax=axes, label="gain in quality over the start")
    figure.suptitle("Gain (and share of runs that collapsed), mean over tasks and seeds")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _heat(axis: Any, rows: Sequence[Row], losses: list[str], key: str, title: str) -> Any:
    values = sorted({r[key] for r in rows})
    cell: Callable[[str, Any], list[Row]] = lambda loss, v: [  # noqa: E731
        r for r in rows if r["loss"] == loss and r[key] == v
    ]
    gains = np.array(
        [[summary(c)["gain"] if (c := cell(l, v)) else np.nan for v in values] for l in losses]
    )
    image = axis.imshow(gains, cmap="RdYlGn", vmin=-0.3, vmax=0.6, aspect="auto")
    axis.set_xticks(range(len(values)), [str(v) for v in values])
    axis.set_yticks(range(len(losses)), losses)
    axis.set_title(title)
    for i, loss in enumerate(losses):
        for j, value in enumerate(values):
            if found := cell(loss, value):
                figures = summary(found)
                text = f"{figures['gain']:+.2f}\n({figures['collapse']:.2f})"
                axis.text(j, i, text, ha="center", va="center", fontsize=8)
    return image
