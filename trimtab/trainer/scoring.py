"""Log-probabilities of what was sampled, by somebody else: π_old by the learner, π_ref by a
sampling client. Knows no loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import tinker

from trimtab.trainer.datums import datum, returned_logprobs
from trimtab.trainer.trajectory import Floats, Trajectory, rows


async def learner_logprobs(
    client: tinker.TrainingClient, trajectories_D: Sequence[Trajectory]
) -> list[Floats]:
    """log p of every row by the learner as it is now, from a forward pass (no gradient)."""
    data = [datum(t, {"weights": np.zeros(t.tokens.size - 1)}) for t in trajectories_D]
    output = await client.forward(data, "cross_entropy")
    return returned_logprobs(output, trajectories_D)


async def reference_logprobs(
    client: tinker.SamplingClient, trajectories_D: Sequence[Trajectory]
) -> list[Floats]:
    """log π_ref of the sampled rows, 0 elsewhere."""
    return list(await asyncio.gather(*(_reference(client, t) for t in trajectories_D)))


async def _reference(client: tinker.SamplingClient, trajectory: Trajectory) -> Floats:
    tokens = trajectory.tokens
    # Scoring begins at the first sampled token: the prompt before it can come from a cache.
    wanted = tokens.size - trajectory.turns[0].before.size
    found = await client.compute_logprobs(
        tinker.ModelInput.from_ints(tokens.tolist()), prompt_logprobs_last_n=wanted
    )
    scored = np.array([np.nan if value is None else value for value in found[1:]])
    return np.where(rows(trajectory).mask_N, scored, 0.0)
