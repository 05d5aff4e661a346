"""Where a step's metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio.

Each through its own library, imported when it was asked for and not before. A run that goes on
after an interruption goes on there as well: `run-id` in its folder says under which name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import chz

from trimtab.errors import Invalid
from trimtab.trainer.config import Config
from trimtab.trainer.stopped import told


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def sinks(config: Config, folder: Path) -> list[Sink]:
    """Those that the options ask for."""
    made: list[Sink] = []
    if config.tensorboard:
        made.append(TensorBoard(folder / "tensorboard"))
    if config.wandb_project:
        made.append(wandb(config.wandb_project, config, folder))
    if config.trackio_project:
        made.append(trackio(config.trackio_project, config, folder))
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
    """A run begun with wandb, or with trackio, which has the same calls."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.library.log(dict(metrics), step=step)

    def close(self) -> None:
        self.library.finish()


def wandb(project: str, config: Config, folder: Path) -> Tracker:
    """Its files stay in the run's folder; with WANDB_MODE=offline nothing leaves the machine."""
    library = _library("wandb")
    try:
        library.init(
            project=project,
            name=folder.name,
            id=run_id(folder),
            resume="allow",
            dir=str(folder),
            config=chz.asdict(config),
        )
    except library.Error as error:
        raise Invalid(
            f"wandb could not begin a run ({error}); put that right, set WANDB_MODE=offline, or "
            "leave out wandb_project"
        ) from error
    return Tracker(library)


def trackio(project: str, config: Config, folder: Path) -> Tracker:
    """Trackio finds a run by its name, so the name says which of several folders it is."""
    library = _library("trackio")
    name = f"{folder.name}-{run_id(folder)}"
    library.init(project=project, name=name, resume="allow", config=chz.asdict(config))
    return Tracker(library)


def run_id(folder: Path) -> str:
    """The same each time a run goes on: "3f9c01ab"."""
    path = folder / "run-id"
    with told(path):
        if not path.exists():
            path.write_text(uuid4().hex[:8], encoding="utf-8")
        return path.read_text(encoding="utf-8")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Invalid(_missing(name, f"leave out {name}_project")) from error


def _missing(library: str, otherwise: str) -> str:
    return (
        f"logging to {library} needs the package {library}; install it with "
        f"`pip install {library}`, or {otherwise}"
    )
