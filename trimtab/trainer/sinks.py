"""Where a step's metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio.

Each through its own library, imported when it was asked for and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import chz

from trimtab.errors import Invalid
from trimtab.trainer.config import Config


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def sinks(config: Config, folder: Path) -> list[Sink]:
    """Those that the options ask for."""
    made: list[Sink] = []
    if config.tensorboard:
        made.append(TensorBoard(folder / "tensorboard"))
    if config.wandb_project:
        made.append(Tracker("wandb", config.wandb_project, config, folder))
    if config.trackio_project:
        made.append(Tracker("trackio", config.trackio_project, config, folder))
    return made


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise Invalid(_missing("tensorboard", "tensorboard=false")) from error
        self.writer = Writer(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Tracker:
    """wandb, and trackio, which has the same calls."""

    def __init__(self, library: str, project: str, config: Config, folder: Path) -> None:
        import importlib

        try:
            self.library: Any = importlib.import_module(library)
        except ImportError as error:
            raise Invalid(_missing(library, f"leave out {library}_project")) from error
        self.library.init(project=project, name=folder.name, config=chz.asdict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.library.log(dict(metrics), step=step)

    def close(self) -> None:
        self.library.finish()


def _missing(library: str, otherwise: str) -> str:
    return (
        f"logging to {library} needs the package {library}; install it with "
        f"`pip install {library}`, or {otherwise}"
    )
