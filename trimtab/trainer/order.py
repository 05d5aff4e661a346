"""Which prompt comes when: a pure function of seed and position, so that the place in the data is
one integer and a resumed run goes on with the very next prompt. Knows no tasks.
"""

from __future__ import annotations

import numpy as np


class Order:
    """Position 0, 1, 2, ... to prompt numbers, reshuffled every pass over the prompts.

    >>> order = Order(3, seed=0)
    >>> sorted(order[i] for i in range(3)), sorted(order[i] for i in range(3, 6))
    ([0, 1, 2], [0, 1, 2])
    """

    def __init__(self, prompts: int, *, seed: int) -> None:
        self.prompts = prompts
        self.seed = seed
        self._passes: dict[int, np.ndarray] = {}

    def __getitem__(self, position: int) -> int:
        number, place = divmod(position, self.prompts)
        if number not in self._passes:
            # Asynchronous sampling reads two passes at most at once.
            self._passes = {n: p for n, p in self._passes.items() if n >= number - 1}
            self._passes[number] = stream(self.seed, "order", number).permutation(self.prompts)
        return int(self._passes[number][place])


_PURPOSES = {"order": 0, "sample": 1, "minibatch": 2, "evaluate": 3, "shuffle": 4}


def stream(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A generator of its own for each purpose and place: nothing to save, nothing to replay."""
    return np.random.default_rng(np.random.SeedSequence([seed, _PURPOSES[purpose], *numbers]))


def sampling_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed for one sampling request."""
    return int(stream(seed, purpose, *numbers).integers(2**63))
