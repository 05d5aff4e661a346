"""What one forward pass works under: whose rows, under which adapters, through which attention.

transformers calls attention functions and linears without our arguments, so the running pass is
kept for the thread that runs it. Each thread has its own: a learner and a sampler never meet here.
Knows nothing of models.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.engine.attention import AttentionPlan
    from trimtab.engine.lora import AdapterPlan


@dataclass(slots=True, eq=False)
class Pass:
    """One forward pass over `rows` packed rows."""

    rows: int
    attention: AttentionPlan
    adapters: AdapterPlan


_local = threading.local()


def current() -> Pass:
    """The pass this thread is in."""
    running: Pass | None = getattr(_local, "running", None)
    assert running is not None, "a trimtab module was called outside Net.hidden"
    return running


@contextmanager
def running(this: Pass) -> Iterator[None]:
    """Make `this` the pass of the calling thread."""
    _local.running = this
    try:
        yield
    finally:
        _local.running = None
