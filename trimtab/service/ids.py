"""Names: how ids are built, which characters a client may use, what makes two requests the same.

    session     a uuid4
    model       S:train:n         n the session's model_seq_id
    sampler     S:sample:n        n the session's sampling_session_seq_id
    request     <model or sampler>:<seq_id>, and <model>:unload
    sequence    <request of a sample>:<i>

Knows no store: whether a well-formed id exists is for its room to say.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from trimtab.errors import Invalid
from trimtab.types import Request, SaveWeightsForSampler

CLONE = 1_000_000_000  # a cloned sampling client counts its seq_ids from clone * CLONE
MAX_SEQ = 2**63 - 1


def model_id(session_id: str, model_seq_id: int) -> str:
    return f"{session_id}:train:{model_seq_id}"


def sampler_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


def request_id(key: str, seq_id: int) -> str:
    return f"{key}:{seq_id}"


def sequence_ids(request: str, num_samples: int) -> tuple[str, ...]:
    return tuple(f"{request}:{i}" for i in range(num_samples))


def request_of(sequence_id: str) -> tuple[str, int]:
    """The request and index a sequence id names; ("", -1) when it has no such form.

    `request_of("S:sample:0:7:2") == ("S:sample:0:7", 2)`
    """
    request, colon, index = sequence_id.rpartition(":")
    if not colon or not (index.isascii() and index.isdigit()) or len(index) > 9:
        return "", -1
    return request, int(index)


def well_formed(value: str, longest: int) -> bool:
    """Printable, without spaces, of 1 to `longest` characters."""
    return 0 < len(value) <= longest and value.isprintable() and " " not in value


def check_seq(field: str, value: int) -> int:
    if not 0 <= value <= MAX_SEQ:
        raise Invalid(f"{field} must lie between 0 and 2^63 - 1, found {value}")
    return value


def digest(request: Request, body: bytes) -> bytes:
    """What two submits under one id must share. The body's own digest; but a retried unnamed
    save_weights_for_sampler carries a new sampling_session_seq_id, which therefore does not count.
    """
    if isinstance(request, SaveWeightsForSampler) and request.name is None:
        body = repr(replace(request, sampling_session_seq_id=None)).encode()
    return hashlib.sha256(body).digest()
