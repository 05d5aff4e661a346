"""Does it learn? `python -m recipes.learning` trains the arithmetic recipe's tiny model with each
algorithm and three seeds, and once more with rewards dealt at random, which must not learn.

Prints a table of the held-out greedy reward before and after; docs/trainer.md quotes it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tinker

import trimtab
from recipes import arithmetic
from recipes.warm_up import NAME, warm_up
from trimtab import tiny
from trimtab.trainer import train
from trimtab.trainer.options import config
from trimtab.trainer.task import Task, from_file

ALGORITHMS = ("reinforce_pp", "reinforce_pp_baseline", "stable_reinforce")
METRIC = "test/greedy/reward/total"


@dataclass(frozen=True)
class Outcome:
    algorithm: str
    seed: int
    control: bool
    before: float
    after: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def measure(
    folder: Path, *, seeds: Sequence[int], algorithms: Sequence[str], words: dict[str, str]
) -> Iterator[Outcome]:
    """Every run starts from the same warmed-up weights."""
    model = tiny.build(folder / "model", tokenizer="characters", context=128)
    task = from_file(Path(arithmetic.__file__))
    with trimtab.local(model=f"{NAME}={model}", data_dir=folder / "server") as service:
        start = warm_up(service, arithmetic.demonstrate, steps=arithmetic.WARM_UP)["start_from"]
        for seed in seeds:
            for algorithm in algorithms:
                for control in (False, True):
                    yield _run(
                        service, task, folder, start, words,
                        algorithm=algorithm, seed=seed, control=control,
                    )  # fmt: skip


def _run(
    service: tinker.ServiceClient,
    task: Task,
    folder: Path,
    start: str,
    words: dict[str, str],
    *,
    algorithm: str,
    seed: int,
    control: bool,
) -> Outcome:
    options = {
        "model": NAME,
        "start_from": start,
        "algorithm": algorithm,
        "seed": seed,
        "shuffle_rewards": control,
        "log_path": str(folder / f"{algorithm}-{seed}-{control}"),
        "progress": "none",
        "report": False,
        "eval_samples": 0,
        "eval_every": 1000,  # before the first step and after the last
        "save_every": 1000,
    }
    result = train(config(task.defaults, options, words), task, service=service)
    found = [line[METRIC] for line in result.metrics if METRIC in line]
    return Outcome(algorithm, seed, control, found[0], found[-1])


def main(words: Sequence[str]) -> int:
    given = dict(word.split("=", 1) for word in words)
    seeds = range(int(given.pop("seeds", "3")))
    algorithms = given.pop("algorithms", ",".join(ALGORITHMS)).split(",")
    print("| algorithm | seed | rewards | before | after | gain |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(Path(folder), seeds=seeds, algorithms=algorithms, words=given):
            dealt = "shuffled" if found.control else "true"
            print(
                f"| {found.algorithm} | {found.seed} | {dealt} | {found.before:.3f} | "
                f"{found.after:.3f} | {found.gain:+.3f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
