"""Every limit and every clock of the service, declared once.

The composition root fills it from its configuration; nothing here reads files or the environment.
"""

from __future__ import annotations

from dataclasses import dataclass

HOUR = 3600.0
DAY = 24 * HOUR


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Times in seconds, sizes in bytes. Example: `ServiceSettings(head_k=4, gap_seconds=30.0)`."""

    # ---- recording
    head_k: int = 8
    """Alternatives recorded a token for a client that records (K of the head)."""
    max_record_bytes: int = 64 << 30
    """Arrays of sequences on disk; beyond it those nearest to the end of their day go early."""
    sequence_seconds: float = DAY
    """How long a sequence can be trained on after sampling and after each accepted use."""
    logprob_tolerance: float = 1e-3
    """How far a claimed sampling log-probability may lie from the recorded one."""
    record_cache_bytes: int = 64 << 20
    """Decoded sequence records kept in memory."""

    # ---- lifetimes
    session_seconds: float = 2 * HOUR
    """A session without a heartbeat for this long has expired."""
    pause_seconds: float = 60.0
    """A pause of the server itself (stopped, asleep, blocked) counts as this long at most when the
    silence of a session or the wait for a seq_id is measured."""
    ended_seconds: float = 30 * DAY
    """How long the weights are kept that were saved because their session ended."""
    retry_seconds: float = 60.0
    """How long until weights that could not be saved at their session's end are saved again."""
    gap_seconds: float = 600.0
    """How long requests wait behind a seq_id that has not arrived."""
    result_seconds: float = DAY
    """How long results are kept after their session has ended."""
    history_seconds: float = 30 * DAY
    """How long after its session's end a request is remembered as gone rather than unknown."""
    ephemeral_idle_seconds: float = DAY
    """Unnamed sampler weights unused for this long, and not a model's newest, are dropped."""
    sweep_seconds: float = 1.0
    """How often gaps, silent sessions and expired sequences are looked at."""
    storage_seconds: float = 60.0
    """How often results, bodies, checkpoints and weights are looked at."""
    hold_seconds: float = 25.0
    """How long a poll without a timeout of its own is held."""
    sweep_batch: int = 500
    """Rows one step of a sweep deletes, so that no writer waits long behind it."""
    stop_seconds: float = 6.0
    """How long `stop` waits for the engines."""

    # ---- requests
    max_datums: int = 16_384
    max_request_tokens: int = 8_000_000
    """Input tokens of one forward_backward, all datums together."""
    max_alternatives: int = 1024
    """K of (N, K) target_tokens."""
    max_spans: int = 200_000
    """Provenance spans of one request, both lists of all datums together."""
    max_samples: int = 1024
    """num_samples of one request."""
    max_name: int = 128
    """Characters of a checkpoint name."""
    max_id: int = 256
    """Characters of an id that a client names."""
    min_ttl_seconds: int = 3600
    max_ttl_seconds: int = 10 * 366 * 24 * 3600

    # ---- what the server holds
    min_free_bytes: int = 0
    """Free bytes on the disk of the data directory below which no more work is taken."""
    max_sessions: int = 4096
    """Open sessions an owner may have."""
    max_models: int = 256
    """Models loaded at once."""
    max_pending_samples: int = 8192
    """Sample requests accepted and not finished; beyond it clients are asked to wait."""
    max_parked: int = 65_536
    """Training requests of one model waiting for their turn."""
    max_parked_bytes: int = 2 << 30
    """Their bodies together."""
    max_published: int = 32
    """Sampler weights of one base model held in memory; the least recently used go first and are
    read again from disk when they are next sampled from."""
    max_body_bytes: int = 256 << 20
    """Bodies of finished training requests kept for one model until a snapshot covers them; beyond
    it one is taken, even in mid-window."""

    # ---- snapshots
    snapshot_seconds: float = 5.0
    """Work on one model between two snapshots of it; about what a restart has to do again."""
    snapshot_share: float = 0.02
    """The largest part of a model's work that its snapshots may take."""
