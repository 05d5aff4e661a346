"""Every error trimtab raises on purpose.

    TrimtabError
    ├── UserError            the request is wrong: which field, what was found, what is allowed
    │   ├── Invalid          400 (also ValueError)
    │   ├── Unauthorized     401
    │   ├── NotFound         404 (also LookupError): unknown or somebody else's, in the same words
    │   ├── Gone             410: known once, results no longer kept
    │   └── TooLarge         413: beyond a limit that the sentence names
    ├── Busy                 429: the queue is full; the client backs off and resends
    └── ServerError          our fault or the machine's
        ├── Stopping         the server is shutting down; the work stays journalled
        └── Lost             the work cannot be finished; the sentence names the last checkpoint

There is no Conflict with a status of its own: the client retries 409 for five minutes, so a
permanent conflict is an Invalid. `category` is what a failed future carries.
"""

from __future__ import annotations

HEAD, TAIL = 2000, 1000  # characters of a longer message that are kept


class TrimtabError(Exception):
    """`message` is one sentence. It quotes what was sent, which may be megabytes, and it goes into
    the answer, the journal and the log: of a long one only the ends are kept."""

    status = 500
    category = "server"

    def __init__(self, message: str) -> None:
        left_out = len(message) - HEAD - TAIL
        if left_out > 0:
            message = f"{message[:HEAD]} ({left_out} characters left out) {message[-TAIL:]}"
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class UserError(TrimtabError):
    status = 400
    category = "user"


class Invalid(UserError, ValueError):
    pass


class Unauthorized(UserError):
    status = 401


class NotFound(UserError, LookupError):
    status = 404


class Gone(UserError):
    status = 410


class TooLarge(UserError):
    status = 413


class Busy(TrimtabError):
    status = 429


class ServerError(TrimtabError):
    pass


class Stopping(ServerError):
    status = 503


class Lost(ServerError):
    pass
