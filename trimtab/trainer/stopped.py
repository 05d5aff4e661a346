"""A run that cannot go on now, told in a sentence with the way to resume. Knows no server."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.errors import TrimtabError

RESUME = "go on with the same command and --resume"


class Stopped(TrimtabError):
    """Nothing is wrong with the request; what the last checkpoint holds is safe."""


class ServerLost(Stopped):
    """The server, or what it knew of this run, is gone; a new session can go on."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"{cause}; see that the server runs, then {RESUME}")
        self.cause = cause


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Say what a failed write means. A full disk is the usual reason."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Stopped(
                f"the disk is full, so {path} could not be written; free some space there and "
                f"{RESUME}"
            ) from error
        raise Stopped(f"{path} could not be written ({error.strerror}); {RESUME}") from error
