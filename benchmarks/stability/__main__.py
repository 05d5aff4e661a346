"""`python -m benchmarks.stability`: run a set of cells, print the tables, draw the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.stability import grid, report
from benchmarks.stability.variants import POSITIVE

WHAT = "quick, full, held-out, columns, positives, alternatives, constants or report"
app = typer.Typer(add_completion=False)


@app.command()
def main(
    what: Annotated[str, typer.Argument(help=WHAT)] = "quick",
    results: Annotated[
        Path, typer.Option(help="JSON lines, a finished cell each; appended to")
    ] = Path("runs/stability/cells.jsonl"),
    losses: Annotated[
        str, typer.Option(help="separated by semicolons; default: those of the set")
    ] = "",
    cache: Annotated[Path, typer.Option(help="where fitted policies are kept")] = Path(
        "runs/stability/policies"
    ),
    workers: Annotated[int, typer.Option(help="processes of one thread")] = 2,
) -> None:
    """Train small policies under stale and coarse samplers, and report how each loss held."""
    chosen = tuple(losses.split(";")) if losses else grid.LOSSES
    sets = {
        "quick": grid.quick,
        "full": lambda: grid.full(chosen),
        "held-out": lambda: grid.held_out(chosen),
        "columns": lambda: grid.bias_and_staleness(chosen if losses else tuple(POSITIVE)),
        "positives": grid.positives,
        "alternatives": grid.alternatives,
        "constants": grid.constants,
        "report": list,
    }
    if what not in sets:
        raise typer.BadParameter(f"{what!r} is not one of {', '.join(sets)}", param_hint="what")
    cells = sets[what]()
    if cells:
        grid.run_cells(cells, results, cache, workers)
    rows = list(grid.finished(results).values())
    if cells:
        keys = {cell.key for cell in cells}
        rows = [row for row in rows if row["cell"] in keys]
    report.print_report(rows, Console(width=150))
    picture = results.with_name(f"{what}.png")
    report.draw(rows, picture)
    print(f"{len(rows)} cells in {results}; picture: {picture}")


if __name__ == "__main__":
    app()
