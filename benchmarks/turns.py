"""Two contenders that take turns, and the most memory a process held.

Absolute speeds of a shared machine drift; the ratio of two that take turns within a second holds.
Each turn is taken on a thread that ends with it: what OpenMP keeps for a thread that has computed
would slow down the other contender (docs/performance.md, Threads). Knows nothing of models.
"""

from __future__ import annotations

import functools
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
Contender = Callable[[], int]  # runs once, returns the tokens it made
Maker = Callable[..., Callable[[], float]]


def on_its_own(function: Callable[P, T]) -> Callable[P, T]:
    """`function` on a thread that ends when it returns."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *args, **kwargs).result()

    return run


def versus(
    one: Contender,
    other: Contender,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Tokens a second of each, and the median over rounds of one's speed over the other's. A round
    is one, other, other, one, so that neither always finds the other's data in the caches."""
    one, other = on_its_own(one), on_its_own(other)
    speeds: dict[Contender, list[float]] = {one: [], other: []}
    one(), other()
    for _ in range(rounds):
        seconds = {one: 0.0, other: 0.0}
        for run in (one, other, other, one):
            started = clock()
            made = run()
            seconds[run] += clock() - started
        for run in (one, other):
            speeds[run].append(2 * made / seconds[run])
    pairs = zip(speeds[one], speeds[other], strict=True)
    return {
        "one, tok/s": statistics.median(speeds[one]),
        "other, tok/s": statistics.median(speeds[other]),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def seconds_of(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    run = on_its_own(run)
    started = clock()
    run()
    return clock() - started


class Turn(NamedTuple):
    value: float
    wall: float
    cpu: float


@contextmanager
def apart(make: Maker, *arguments: Any) -> Iterator[Callable[[], Turn]]:
    """`make(*arguments)` (of a module's top level) in a process of its own, so that neither what it
    sets for its process nor what it leaves in memory serves the other contender. Each call of what
    is yielded takes one turn there."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(
        target=_take_turns, args=(there, torch.get_num_threads(), make, arguments), daemon=True
    )
    process.start()
    there.close()

    def turn() -> Turn:
        here.send(True)
        return Turn(*here.recv())

    try:
        yield turn
    finally:
        here.close()
        process.join()


def _take_turns(pipe: Connection, threads: int, make: Maker, arguments: Any) -> None:
    torch.set_num_threads(threads)
    run = make(*arguments)
    with suppress(EOFError):
        while pipe.recv():
            wall, cpu = time.perf_counter(), time.process_time()
            value = run()
            pipe.send((value, time.perf_counter() - wall, time.process_time() - cpu))


def in_a_process(function: Callable[..., float], *arguments: Any) -> float:
    """What `function` (of a module's top level) returns in a new process: for peaks of memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def peak_megabytes() -> float:
    """Of this process. Linux's ru_maxrss would count what the parent held when it started us."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS
