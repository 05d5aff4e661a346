"""What a request leaves to the prefix cache: its prompt, and its prompt with each sample.

Only what one version of the weights computed from beginning to end is left. Used from the sampler's
thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.engine.jobs import Job, Row
from trimtab.engine.kv import KVMemory
from trimtab.engine.memory import is_out_of_memory
from trimtab.engine.prefix import Source


def keep_prompt(memory: KVMemory, job: Job) -> None:
    """Called once all of the prompt but its last token is in memory."""
    _keep(memory, job, job.ids[: job.prompt.known], _prompt(job))


def keep_row(memory: KVMemory, row: Row) -> None:
    """Called while the row of a sample that ended is still in memory. Its newest token never went
    through the model, so it is not part of what is left."""
    job = row.job
    assert job.group is not None and job.prompt.scope is not None, "a row has a group and a scope"
    if row.runs or row.version != job.prompt.scope.version.name:
        return
    sampled = np.array(row.tokens[:-1], np.int32)
    known = job.prompt.known
    own = Source(job.group.rows, row.slot, known, known + row.used)
    _keep(memory, job, np.concatenate([job.ids, sampled]), [*_prompt(job), own])


def _prompt(job: Job) -> list[Source]:
    assert job.group is not None, "a prompt in memory has a group"
    return [Source(job.group.prompts, job.prompt.slot, 0, job.prompt.known)]


def _keep(memory: KVMemory, job: Job, tokens: np.ndarray, sources: Sequence[Source]) -> None:
    if not memory.keeps or job.prompt.mixed:
        return
    assert job.prompt.scope is not None, "a computed prompt has a scope"
    try:
        memory.keep(job.prompt.scope, tokens, sources)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
