"""Random streams that belong to a sample, not to a batch: one for each (seed, sample index).

Each stream is the counter-based Philox 4x64 keyed by (seed, index), read as 53-bit uniforms in
[0, 1). Sample i of a seed draws the same numbers whatever `num_samples` is and whatever decodes
beside it. Knows nothing of tokens.
"""

from __future__ import annotations

import numpy as np

ALTERNATIVES = 1 << 63
"""The index of the stream that draws a prompt's alternative tokens; no sample index reaches it."""

_WORD = (1 << 64) - 1
_BLOCK = 64


class UniformStream:
    """The numbers of (seed, index), in order. Any integer seed is folded to 64 bits.

    >>> UniformStream(7, 0).next() == UniformStream(7 + 2**64, 0).next()
    True
    """

    __slots__ = ("_bits", "_block", "_used")

    def __init__(self, seed: int, index: int) -> None:
        key = np.array([seed & _WORD, index & _WORD], dtype=np.uint64)
        self._bits = np.random.Philox(key=key)
        self._block: list[float] = []
        self._used = 0

    def next(self) -> float:
        if self._used == len(self._block):
            self._block = self.take(_BLOCK).tolist()
            self._used = 0
        self._used += 1
        return self._block[self._used - 1]

    def take(self, count: int) -> np.ndarray:
        """(count,) float64, straight from the stream; not to be mixed with `next`."""
        # Raw words, not Generator.random: numpy keeps bit generators stable, not distributions.
        return (self._bits.random_raw(count) >> np.uint64(11)) * 2.0**-53
