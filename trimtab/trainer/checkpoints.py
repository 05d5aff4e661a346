"""Training checkpoints of a run: saved on the server, the old ones deleted. Knows no folder."""

from __future__ import annotations

from collections.abc import Sequence

import tinker

from trimtab.trainer.config import Config


def due(config: Config, done: int) -> bool:
    """After so many steps: every `save_every`, and at the end."""
    return done % config.save_every == 0 or done >= config.steps


def kept(config: Config, done: int) -> bool:
    """Whether a later checkpoint does not replace this one."""
    return bool(config.keep_every) and done % config.keep_every == 0


async def save(client: tinker.TrainingClient, done: int) -> str:
    """Weights and optimizer after so many steps; the path."""
    return str((await client.save_state(f"step-{done:06}")).path)


async def start(
    service: tinker.ServiceClient, config: Config, model: str, checkpoint: str | None
) -> tinker.TrainingClient:
    """A training client that goes on from a checkpoint, begins from one, or is new."""
    if checkpoint is not None:
        made = service.create_training_client_from_state_with_optimizer(checkpoint)
    elif config.start_from is not None:
        made = service.create_training_client_from_state(config.start_from)
    else:
        made = service.create_lora_training_client(model, rank=config.lora_rank, seed=config.seed)
    client: tinker.TrainingClient = await made
    return client


async def delete(rest: tinker.RestClient, paths: Sequence[str]) -> tuple[str, ...]:
    """Delete them; those that are left over, to be tried again. One that is gone is done."""
    left = []
    for path in paths:
        try:
            await rest.delete_checkpoint_from_tinker_path(path)
        except tinker.NotFoundError:
            continue
        except tinker.TinkerError:
            left.append(path)
    return tuple(left)
