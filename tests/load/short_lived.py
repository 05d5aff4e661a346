"""`trimtab serve` where a silent session expires within seconds; nothing else differs.

python -m tests.load.short_lived SECONDS --model org/tiny=./tiny
"""

from __future__ import annotations

import functools
import sys

from trimtab.cli import app
from trimtab.service import core


def shorten(seconds: float) -> None:
    """Every service made from now on forgets silent sessions after that long."""
    core.ServiceSettings = functools.partial(core.ServiceSettings, session_seconds=seconds)


if __name__ == "__main__":
    shorten(float(sys.argv[1]))
    sys.argv[1:] = ["serve", *sys.argv[2:]]
    app()
