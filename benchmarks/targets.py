"""What the benchmarks are held to, beside what they last measured: one table, read from results/.

    python -m benchmarks.targets                         # as Markdown
    python -m benchmarks.targets --into docs/performance.md    # between the page's two markers

Ends with status 0 whatever the numbers are: a shared machine's numbers are read, not asserted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, number

BEGIN, END = "<!-- benchmarks.targets begin -->", "<!-- benchmarks.targets end -->"


@dataclass(frozen=True, slots=True)
class Target:
    """`path` leads through the JSON of `benchmark`, a name that starts with a `*` standing for the
    one key that contains the rest. The value must be at least `least`, or at most `most`."""

    what: str
    benchmark: str
    model: str
    path: tuple[str, ...]
    least: float | None = None
    most: float | None = None

    def value(self) -> float | None:
        file = RESULTS / f"{self.benchmark}-{self.model}.json"
        found: Any = json.loads(file.read_text()) if file.exists() else None
        for step in self.path:
            if not isinstance(found, dict):
                return None
            found = found.get(_key(found, step))
        return found if isinstance(found, int | float) else None

    def bound(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )


def _key(found: dict[str, Any], step: str) -> str:
    if not step.startswith("*"):
        return step
    return next((key for key in found if step[1:] in key), step)


def targets() -> Iterator[Target]:
    for model, bound in (("smollm2", 2.5), ("tiny", 2.0)):
        ratio = ("*16 x 4", "against generate", "ratio")
        yield Target("sampling 16 × 4, over `generate`", "sampling", model, ratio, least=bound)
    for model in ("smollm2", "tiny"):
        for rows, least in ((1, 0.45), (4, 0.45), (16, 0.45), (64, 0.6)):
            path = (f"batch {rows}", "share of the floor")
            what = f"decode step, batch {rows}: share of the floor"
            yield Target(what, "decoding", model, path, least=least)
    for rows in (1, 4):
        path = (f"batch {rows}", "int8 over float32, ratio")
        what = f"int8 sampler over float32, batch {rows}"
        yield Target(what, "decoding", "smollm2", path, least=1.3)
    for model in ("smollm2", "tiny"):
        for loss in ("cross_entropy", "stable_reinforce"):
            for form, least in (("unrelated", 1.15), ("groups", 1.5)):
                case = f"{loss}, {form}"
                what = f"learning, `{loss}`, {form}: over the PEFT loop"
                yield Target(what, "learning", model, (case, "ratio"), least=least)
            path = (f"{loss}, unrelated", "share of the floor")
            what = f"learning, `{loss}`: share of the floor"
            yield Target(what, "learning", model, path, least=0.75)
        what = "learning: peak memory over the loop's"
        yield Target(what, "learning", model, ("peak memory", "ratio"), most=0.6)
    for model in ("smollm2", "tiny"):
        trl, engine = ("against TRL", "ratio"), ("against the engine called directly", "ratio")
        yield Target("RL step by SDK and HTTP, over TRL's", "rl_step", model, trl, least=2.5)
        what = "RL step by SDK and HTTP, over the engine's"
        yield Target(what, "rl_step", model, engine, least=0.9)
    for request in ("sample of one", "sample of 64", "forward_backward", "RL step"):
        path = (f"*{request}", "own threads, ms a request")
        what = f"server CPU a request, ms: {request}"
        yield Target(what, "overhead", "tiny", path, most=2.0)
    for kind in ("sessions", "spans"):
        path = (f"*{kind}", "most over least")
        yield Target(f"growth in {kind}: most over least", "growth", "tiny", path, most=1.15)
    for model in ("smollm2", "tiny"):
        path = ("*adapters", "the 64th's share of the first")
        yield Target("the n-th adapter over the first", "growth", model, path, most=0.05)
    yield Target("`trimtab --help`, s", "startup", "tiny", ("trimtab --help, s",), most=0.5)
    path = ("trimtab serve: first step, s",)
    yield Target("`trimtab serve` to the first training step, s", "startup", "tiny", path, most=10)


def table() -> str:
    lines = ["| what | model | target | measured | |", "|---|---|---|---|---|"]
    for target in targets():
        value = target.value()
        shown = "–" if value is None else number(float(value))
        met = "" if value is None else ("met" if target.met(value) else "missed")
        lines.append(f"| {target.what} | {target.model} | {target.bound()} | {shown} | {met} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, help="a page with the two markers")
    page = parser.parse_args().into
    if page is None:
        print(table())
        return
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
