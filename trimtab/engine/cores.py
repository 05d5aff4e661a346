"""Who uses which cores: the policy that learner and sampler share this machine by.

OpenMP, which runs torch's operations on several cores, keeps a team of threads for every thread
that ever asked for one, busy or not. While all teams together have no more threads than there are
cores, a team waits for its next operation awake, else asleep, and an operation of a small model
takes less time than to wake up. So on a CPU:

  * a thread that computes ends when it has nothing to do, and its team with it: the learner's after
    each request, the sampler's after IDLE seconds;
  * the learner always takes all the cores, so that what it computes never depends on what else
    goes on; the sampler takes all of them alone, and half while a learner computes.

Knows nothing of models.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

IDLE = 0.02
"""Seconds. A client that samples in turns comes back sooner, one that goes on to learn later."""


class Cores:
    """`total` cores (None: torch's choice) for the learners and samplers of one process.

    >>> cores = Cores(4)
    >>> with cores.learning():
    ...     cores.sample()  # the calling thread now uses 2 cores inside one operation
    """

    def __init__(self, total: int | None = None) -> None:
        self.total = torch.get_num_threads() if total is None else total
        self._learning = 0
        self._changing = threading.Lock()

    @contextmanager
    def learning(self) -> Iterator[None]:
        """The calling thread learns, with all the cores."""
        with self._changing:
            self._learning += 1
        try:
            _use(self.total)
            yield
        finally:
            with self._changing:
                self._learning -= 1

    def sample(self) -> None:
        """The calling thread takes a step of sampling."""
        _use(max(1, self.total // 2) if self._learning else self.total)


def _use(threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
