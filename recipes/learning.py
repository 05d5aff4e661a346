"""Does it learn? Trains with each algorithm and several seeds, and with rewards dealt at random,
which must not learn; prints the held-out greedy reward before and after.

    python -m recipes.learning                   a tiny model, `arithmetic.py`, 18 runs
    python -m recipes.learning model=smollm2     a pretrained model, `capitals.py`, 18 runs

model= takes what `trimtab serve --model` takes, and with it task= another recipe's file.
results=FILE.jsonl adds a line a run. seeds=0,1,2, algorithms=a,b and rewards=true,shuffled choose
among the runs; other key=value words are options of the trainer.
docs/trainer.md quotes the tables.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tinker

import trimtab
from recipes import arithmetic, capitals
from recipes.warm_up import NAME, warm_up
from trimtab import modelstore, tiny
from trimtab.trainer import train
from trimtab.trainer.options import config
from trimtab.trainer.task import Task, from_file

ALGORITHMS = ("reinforce_pp", "reinforce_pp_baseline", "stable_reinforce")
REWARDS = ("true", "shuffled")
METRIC = "test/greedy/reward/total"


@dataclass(frozen=True)
class Case:
    """One run. A control's rewards are dealt to completions at random."""

    algorithm: str
    seed: int
    control: bool


@dataclass(frozen=True)
class Outcome:
    """Held-out greedy reward; `cpu_seconds` of this process, server included."""

    model: str
    task: str
    algorithm: str
    seed: int
    control: bool
    before: float
    after: float
    cpu_seconds: float

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Ground:
    """Where every run begins: a served model, its task, and the trainer's options for both."""

    service: tinker.ServiceClient
    model: str
    task: Task
    options: dict[str, Any]


@contextmanager
def tiny_model(folder: Path) -> Iterator[Ground]:
    """The arithmetic recipe's, made and warmed up on the spot."""
    model = tiny.build(folder / "model", tokenizer="characters", context=128)
    task = from_file(Path(arithmetic.__file__))
    with trimtab.local(model=f"{NAME}={model}", data_dir=folder / "server") as service:
        start = warm_up(service, arithmetic.demonstrate, steps=arithmetic.WARM_UP)["start_from"]
        yield Ground(service, NAME, task, {"model": NAME, "start_from": start})


@contextmanager
def pretrained(model: str, task: str) -> Iterator[Ground]:
    """As it is, without demonstrations."""
    found = modelstore.resolve(model)
    served = "{}={}".format(*found) if found else model
    with trimtab.local(model=served) as service:
        yield Ground(service, served.partition("=")[0], from_file(Path(task)), {})


def cases(
    seeds: Sequence[int], algorithms: Sequence[str], rewards: Sequence[str] = REWARDS
) -> list[Case]:
    """A run of each algorithm and seed, and a control of each.

    >>> [(case.algorithm, case.control) for case in cases([0], ["a", "b"])]
    [('a', False), ('b', False), ('a', True), ('b', True)]
    """
    return [
        Case(algorithm, seed, control=bool(REWARDS.index(dealt)))
        for seed in seeds
        for dealt in rewards
        for algorithm in algorithms
    ]


def measure(
    ground: Ground, chosen: Sequence[Case], folder: Path, words: dict[str, str]
) -> Iterator[Outcome]:
    """Each case from the same weights."""
    for case in chosen:
        own = {
            "algorithm": case.algorithm,
            "seed": case.seed,
            "shuffle_rewards": case.control,
            "log_path": str(folder / f"{case.algorithm}-{case.seed}-{case.control}"),
            "progress": "none",
            "report": False,
            "eval_samples": 0,
            "eval_every": 1000,  # before the first step and after the last
            "save_every": 1000,
        }
        options = config(ground.task.defaults, ground.options, own, words)
        begun = time.process_time()
        result = train(options, ground.task, service=ground.service)
        spent = round(time.process_time() - begun, 1)
        found = [line[METRIC] for line in result.metrics if METRIC in line]
        yield Outcome(
            ground.model, ground.task.name, **asdict(case),
            before=found[0], after=found[-1], cpu_seconds=spent,
        )  # fmt: skip


def main(words: Sequence[str]) -> int:
    given = dict(word.split("=", 1) for word in words)
    model, results = given.pop("model", ""), given.pop("results", "")
    if not model and "task" in given:
        raise SystemExit("task= goes with model=; the tiny model is made for arithmetic.py")
    task = given.pop("task", capitals.__file__)
    seeds = [int(seed) for seed in given.pop("seeds", "0,1,2").split(",")]
    algorithms = given.pop("algorithms", ",".join(ALGORITHMS)).split(",")
    rewards = given.pop("rewards", ",".join(REWARDS)).split(",")
    print("| algorithm | seed | rewards | before | after | gain | CPU s |\n" + "|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with pretrained(model, task) if model else tiny_model(folder) as ground:
            for outcome in measure(ground, cases(seeds, algorithms, rewards), folder, given):
                print(row(outcome), flush=True)
                if results:
                    keep(Path(results), outcome)
    return 0


def row(found: Outcome) -> str:
    dealt = REWARDS[found.control]
    return (
        f"| {found.algorithm} | {found.seed} | {dealt} | {found.before:.3f} | "
        f"{found.after:.3f} | {found.gain:+.3f} | {found.cpu_seconds:.0f} |"
    )


def keep(path: Path, outcome: Outcome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
