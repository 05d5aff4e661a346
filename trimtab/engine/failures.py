"""What a request in the sampler fails with."""

from __future__ import annotations

import logging

from trimtab.engine.memory import first_line, is_out_of_memory
from trimtab.errors import ServerError, TrimtabError

log = logging.getLogger(__name__)


def as_server_error(what: str, error: Exception) -> TrimtabError:
    """One of ours as it is; anything else logged, and a ServerError that names it."""
    if isinstance(error, TrimtabError):
        return error
    if is_out_of_memory(error):
        return ServerError(f"{what}: memory does not suffice ({first_line(error)})")
    log.error("%s", what, exc_info=error)
    wrapped = ServerError(f"{what}: {type(error).__name__}: {error}")
    # Without its frames, which would keep a step's tensors alive with the future.
    wrapped.__cause__ = error.with_traceback(None)
    return wrapped
