"""`python -m benchmarks.stability`: run a set of cells, print the tables, draw the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.stability import grid, report

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False)


@app.command()
def main(
    what: Annotated[str, typer.Argument(help="quick, full, held-out, columns or report")] = "quick",
    results: Annotated[Path | None, typer.Option(help="JSON lines, appended to")] = None,
    losses: Annotated[
        str, typer.Option(help="separated by semicolons; default: the served ones")
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
        "columns": lambda: grid.bias_and_staleness(chosen),
        "report": list,
    }
    if what not in sets:
        raise typer.BadParameter(f"{what!r} is not one of {', '.join(sets)}", param_hint="what")
    path = results or Path(f"runs/stability/{what}.jsonl")
    cells = sets[what]()
    if cells:
        grid.run_cells(cells, path, cache, workers)
    rows = list(grid.finished(path).values())
    if cells:
        keys = {cell.key for cell in cells}
        rows = [row for row in rows if row["cell"] in keys]
    report.print_report(rows, Console(width=150))
    report.draw(rows, path.with_suffix(".png"))
    print(f"{len(rows)} cells in {path}; picture: {path.with_suffix('.png')}")


if __name__ == "__main__":
    app()
