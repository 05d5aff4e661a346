"""Whether a folder's run may go on under these options. Knows no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chz

from trimtab.errors import Invalid
from trimtab.trainer.config import Config
from trimtab.trainer.folder import Folder, State

# What may differ when a run goes on: nothing that any step's numbers depend on.
MAY_CHANGE = (
    "base_url",
    "eval_every",
    "eval_limit",
    "eval_samples",
    "keep_every",
    "log_path",
    "max_groups_in_flight",
    "progress",
    "report",
    "resume",
    "reward_timeout",
    "save_every",
    "steps",
    "task",
    "tensorboard",
    "trackio_project",
    "transcripts",
    "wandb_project",
)


def default_path(config: Config, task: str) -> Path:
    """runs/TASK-ALGORITHM-SEED: the same command finds the same folder."""
    return Path("runs") / f"{task}-{config.algorithm}-{config.seed}"


def begin(folder: Folder, config: Config) -> State | None:
    """The state to go on from, or None for a fresh run. Refuses what would mix two runs."""
    state, stored = folder.state(), folder.config()
    if not config.resume:
        if state is not None:
            raise Invalid(
                f"{folder.path} holds a run at step {state.step}; go on with it with --resume, or "
                "choose another folder with log_path="
            )
    elif state is not None and stored is not None:
        _check_same(stored, config, folder.path)
    folder.write_config(chz.asdict(config))
    folder.rewind(0 if state is None else state.step)
    return state


def _check_same(stored: dict[str, Any], config: Config, path: Path) -> None:
    now = _plain(chz.asdict(config))
    for name, before in stored.items():
        if name in now and name not in MAY_CHANGE and now[name] != before:
            raise Invalid(
                f"{name} was {before!r} in the run of {path} and is {now[name]!r} now; a run goes "
                f"on as it began: leave {name} as it was, or start another in a new log_path"
            )


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
