"""Training checkpoints of a run: two rolling ones that take turns, and those that are kept.

The rolling one that a resume would need is never the one being written. Knows no folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tinker

from trimtab.trainer.config import Config
from trimtab.trainer.stopped import Stopped


def due(config: Config, done: int) -> bool:
    """After so many steps: every `save_every`, and at the end."""
    return done % config.save_every == 0 or done >= config.steps


def name(config: Config, done: int, current: str | None) -> str:
    """Of the next checkpoint, `current` being the path that the run's folder names.

    >>> name(Config(keep_every=50), 7, "tinker://a:train:0/weights/rolling-1")
    'rolling-2'
    >>> name(Config(keep_every=50), 100, None)
    'step-000100'
    """
    if done >= config.steps or (config.keep_every and done % config.keep_every == 0):
        return f"step-{done:06}"
    return "rolling-2" if current is not None and current.endswith("/rolling-1") else "rolling-1"


async def save(client: tinker.TrainingClient, name: str) -> str:
    """Weights and optimizer as they are; the path. A rolling one takes its old one's place."""
    return str((await client.save_state(name, overwrite=True)).path)


def left_behind(before: str | None, after: str) -> tuple[str, ...]:
    """The rolling checkpoint of an earlier session, which nothing will ever write over."""
    if before is None or before.rpartition("/")[0] == after.rpartition("/")[0]:
        return ()
    return (before,) if "/rolling-" in before else ()


async def start(
    service: tinker.ServiceClient, config: Config, model: str, checkpoint: str | None
) -> tinker.TrainingClient:
    """A training client that goes on from a checkpoint, begins from one, or is new."""
    client: tinker.TrainingClient
    if checkpoint is not None:
        with _known(f"the run's checkpoint {checkpoint}", "base_url="):
            client = await service.create_training_client_from_state_with_optimizer(checkpoint)
    elif config.start_from is not None:
        with _known(f"start_from={config.start_from}", "start_from="):
            client = await service.create_training_client_from_state(config.start_from)
    else:
        client = await service.create_lora_training_client(
            model, rank=config.lora_rank, seed=config.seed
        )
    return client


@contextmanager
def _known(what: str, option: str) -> Iterator[None]:
    """A checkpoint that the server has never seen, or no longer has, is not worth another try."""
    try:
        yield
    except tinker.NotFoundError as error:
        raise Stopped(
            f"the server does not know {what}; name another with {option}, or begin anew in "
            "another folder with log_path="
        ) from error


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
