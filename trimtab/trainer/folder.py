"""The folder of a run: who owns it, what it holds, how it survives a kill.

    config.json        the resolved options
    state.json         where the run stands: replaced whole, so that it is never half written
    metrics.jsonl      a line a step
    transcripts.jsonl  some completions of each step
    failures.jsonl     completions that got no reward, and why
    run.lock           held while a process trains here; a killed process lets go of it

Lines that belong to a step which the checkpoint does not know are dropped on resume, for that step
runs again. Knows no server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trimtab.errors import Invalid
from trimtab.trainer.stopped import Stopped, told

LINES = ("metrics.jsonl", "transcripts.jsonl", "failures.jsonl")


@dataclass(frozen=True)
class State:
    """`step` steps are done and in `checkpoint` (weights and optimizer). The next prompt is number
    `position` in the order that `seed` gives; every random stream is a function of seed and step,
    so there is nothing more of them to save. `algorithm` holds running statistics.
    `superseded` checkpoints are still to be deleted."""

    step: int
    checkpoint: str
    position: int
    seed: int
    seconds: float = 0.0
    algorithm: dict[str, Any] | None = None
    superseded: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> State:
        return cls(**{**stored, "superseded": tuple(stored["superseded"])})


class Folder:
    """`with Folder(path) as folder:` owns it until the end of the block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def __enter__(self) -> Folder:
        with told(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / "run.lock", "a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Invalid(
                f"{self.path} is in use by a run of {_owner(lock)}; wait for it, or choose "
                "another folder with log_path="
            ) from error
        self._lock = lock
        try:
            with told(self.path / "run.lock"):
                lock.truncate(0)
                lock.write(f"process {os.getpid()}")
                lock.flush()
        except Stopped:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):  # what a full disk left unwritten
                self._lock.close()
            self._lock = None

    # ---- what a run leaves

    def config(self) -> dict[str, Any] | None:
        return self._read("config.json")

    def state(self) -> State | None:
        stored = self._read("state.json")
        return None if stored is None else State.from_json(stored)

    def write_config(self, config: Mapping[str, Any]) -> None:
        self._replace("config.json", config)

    def write_state(self, state: State) -> None:
        self._replace("state.json", state.to_json())

    def append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Whole lines in one write: a kill leaves all of them or a piece that resume drops."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        path = self.path / name
        with told(path), open(path, "a", encoding="utf-8") as file:
            file.write(text)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Those that are whole."""
        path = self.path / name
        if not path.exists():
            return []
        found = [_parsed(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [line for line in found if line is not None]

    def rewind(self, step: int) -> None:
        """Forget the lines of this step and later ones."""
        for name in LINES:
            if (self.path / name).exists():
                kept = [line for line in self.lines(name) if line["step"] < step]
                self._replace_text(
                    name, "".join(json.dumps(k, ensure_ascii=False) + "\n" for k in kept)
                )

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        if not path.exists():
            return None
        found = _parsed(path.read_text(encoding="utf-8"))
        if found is None:
            raise Invalid(
                f"{path} is damaged (it is no JSON object); put a copy in its place, or start "
                "another run with log_path="
            )
        return found

    def _replace(self, name: str, value: Mapping[str, Any]) -> None:
        self._replace_text(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def _replace_text(self, name: str, text: str) -> None:
        path, beside = self.path / name, self.path / f"{name}.new"
        with told(path):
            with open(beside, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)


def _owner(lock: IO[str]) -> str:
    with lock:
        lock.seek(0)
        return lock.read().strip() or "another process"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:  # cut off by a kill
        return None
    return found if isinstance(found, dict) else None
