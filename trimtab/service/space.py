"""Room on the disk: below a floor no more work is taken, so that what was taken can be finished.

Looks once a second at most. Knows one directory and nothing of what fills it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from trimtab.errors import Busy

MIB = 2**20
LOOK_SECONDS = 1.0


class Space:
    """`Space(Path("trimtab-data"), 256 * MIB).check()`"""

    def __init__(self, folder: Path, floor: int, now: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._floor = floor
        self._now = now
        self._looked_at = float("-inf")
        self._free = 0

    def check(self) -> None:
        """Busy where fewer bytes are free than the floor: a client waits, and goes on by itself
        once there is room."""
        if not self._floor:
            return
        if self._now() - self._looked_at >= LOOK_SECONDS:
            self._free = shutil.disk_usage(self._folder).free
            self._looked_at = self._now()
        if self._free < self._floor:
            raise Busy(
                f"the disk of the data directory has {self._free // MIB} MiB left; no more work is"
                f" taken below {self._floor // MIB} MiB (min_free_mib): delete checkpoints or make"
                " room"
            )
