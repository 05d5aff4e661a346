"""Which cells there are, and running them: resumable, a JSON line a finished cell."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.stability.cells import HEAD_K, Cell

LOSSES = ("importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce")
ALTERNATIVES = ("ctr", "dppo", "topr", "gspo 5%")
TASKS = ("reverse", "modadd", "sort")
STALENESS = (0, 1, 4, 16, 64)
SEEDS = (0, 1, 2)
HELD_OUT_SEEDS = (11, 12)
HEADS = (2, 4, HEAD_K, 20)
DECAYS = (0.0, 0.8, 0.97)  # beside 0.9


def quick() -> list[Cell]:
    """8 cells, minutes: two tasks, fresh and stale, int8, two losses, one seed."""
    return [
        Cell(task, loss, staleness, "int8", 0)
        for task in ("reverse", "sort")
        for staleness in (0, 16)
        for loss in ("importance_sampling", "stable_reinforce")
    ]


def full(losses: tuple[str, ...] = LOSSES) -> list[Cell]:
    """Every staleness and loss at int8; the other numerics at staleness 4; a spread of learning
    rates at staleness 0 and 16 (first seed)."""
    return list(dict.fromkeys(_full(losses)))


def _full(losses: tuple[str, ...]) -> Iterator[Cell]:
    for seed in SEEDS:
        for task in TASKS:
            for loss in losses:
                for staleness in STALENESS:
                    yield Cell(task, loss, staleness, "int8", seed)
                for numerics in ("float32", "bfloat16", "int4"):
                    yield Cell(task, loss, 4, numerics, seed)
                if seed == SEEDS[0]:
                    for staleness in (0, 16):
                        for scale in (1 / 3, 3.0):
                            yield Cell(task, loss, staleness, "int8", seed, lr_scale=scale)


def held_out(losses: tuple[str, ...] = LOSSES) -> list[Cell]:
    """Seeds nobody tuned on: staleness 16 and 64 at int8."""
    return [
        Cell(task, loss, staleness, "int8", seed)
        for seed in HELD_OUT_SEEDS
        for task in TASKS
        for loss in losses
        for staleness in (16, 64)
    ]


def bias_and_staleness(variants: tuple[str, ...]) -> list[Cell]:
    """The two named columns: a rounding bias that never closes (`walk`, under the served int4 and
    under merged weights rounded to 3 bits) against staleness on raw rewards (`climb`, int8)."""
    columns = [("walk", "int4", s) for s in (0, 4)]
    columns += [("walk", "merged 3 bit", s) for s in (0, 4)]
    columns += [("climb", "int8", s) for s in (4, 16, 64)]
    return [
        Cell(task, loss, staleness, numerics, seed)
        for seed in SEEDS[:2]
        for task, numerics, staleness in columns
        for loss in variants
    ]


def positives(variants: tuple[str, ...] = ("one", "min(1,8r)", "1/b")) -> list[Cell]:
    """The weights of positive tokens that did well in both columns, on the grid's own tasks."""
    return [
        Cell(task, loss, staleness, "int8", seed)
        for seed in SEEDS[:2]
        for loss in variants
        for staleness in (64, 16, 4, 0)
        for task in TASKS
    ]


def alternatives(losses: tuple[str, ...] = ALTERNATIVES) -> list[Cell]:
    """The losses that are not served, beside ours: every staleness at int8 and int4 at 4,
    on the first seed."""
    points = [(staleness, "int8") for staleness in STALENESS] + [(4, "int4")]
    return [
        Cell(task, loss, staleness, numerics, SEEDS[0])
        for task in TASKS
        for loss in ("stable_reinforce", *losses)
        for staleness, numerics in points
    ]


def constants() -> list[Cell]:
    """The size of the head and the decay of the trace, where each had the most to say: answers of
    16 and 24 tokens over 256 symbols."""
    climb = [("climb", "int8", staleness) for staleness in (4, 16, 64)]
    walk = [("walk", "int4", 4)]
    heads = [("stable_reinforce", k) for k in HEADS]
    decays = [(f"decay {decay}", HEAD_K) for decay in DECAYS]
    return [
        Cell(task, loss, staleness, numerics, seed, head_k=k)
        for seed in SEEDS[:2]
        for loss, k in heads + decays
        for task, numerics, staleness in climb + walk
    ]


def finished(results: Path) -> dict[str, dict[str, object]]:
    """What a results file holds, by cell."""
    if not results.exists():
        return {}
    rows = [json.loads(line) for line in results.read_text().splitlines() if line]
    return {row["cell"]: row for row in rows}


def run_cells(cells: list[Cell], results: Path, cache: Path, workers: int) -> None:
    """Run what is not in `results` yet, `workers` processes of one thread each."""
    from benchmarks.stability.policy import base_policy

    todo = [cell for cell in cells if cell.key not in finished(results)]
    for task in sorted({cell.task for cell in todo}):
        base_policy(task, cache)
    results.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        Progress(*columns, TimeRemainingColumn()) as progress,
        results.open("a") as out,
    ):
        bar = progress.add_task("cells", total=len(todo))
        for done in as_completed([pool.submit(_one, cell, cache) for cell in todo]):
            print(json.dumps(done.result()), file=out, flush=True)
            progress.advance(bar)


def _one(cell: Cell, cache: Path) -> dict[str, object]:
    import torch

    from benchmarks.stability.run import run

    torch.set_num_threads(1)
    started = time.monotonic()
    figures = run(cell, cache)
    return {"cell": cell.key, **figures, "seconds": round(time.monotonic() - started, 1)}
