"""Runs recipes of tinker-cookbook, as installed, each in a process, and reads their logs.

Knows the command line and the files of the cookbook; nothing of the server but its address.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

KEY = "tml-local"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
FIXED = "Qwen/Qwen3-4B-Instruct-2507"
"""A name the cookbook knows, with the renderer that writes the chat form of SmolLM2: recipes that
take the renderer from the name and from nowhere else find SmolLM2 under it."""
ANSWERER = "Qwen/Qwen3.5-9B"
"""The name under which `twenty_questions` asks for the player that answers."""
TEACHER = "Qwen/Qwen3.6-35B-A3B"
"""The name under which `prompt_distillation` asks for the model that it distils."""

TINY = {"lora_rank": 8, "learning_rate": 1e-3, "save_every": 0, "eval_every": 0}
"""Options that most recipes share, for a few cheap steps."""

Metrics = dict[str, float]


@dataclass(frozen=True)
class Run:
    """What a recipe left: its folder, what it printed, how long it took in seconds."""

    folder: Path
    printed: str
    seconds: float

    def steps(self, key: str) -> list[float]:
        """The metric at each step that has it, in order."""
        return [row[key] for row in _rows(self.folder / "metrics.jsonl") if key in row]

    def checkpoints(self) -> list[dict[str, object]]:
        """What the run noted of its checkpoints, oldest first."""
        return _rows(self.folder / "checkpoints.jsonl")

    def forget_checkpoints_after(self, count: int) -> None:
        """Leave the notes of the first `count` checkpoints, as a run that was killed then would."""
        notes = self.folder / "checkpoints.jsonl"
        notes.write_text("".join(notes.read_text().splitlines(keepends=True)[:count]))


@dataclass(frozen=True)
class Cookbook:
    """The cookbook of the environment of `python`, against the server at `url`. Recipes run in
    `data`, where the data sets lie, and leave their logs below `runs`."""

    python: Path
    url: str
    data: Path
    runs: Path

    def recipe(self, module: str, log: str, /, **options: object) -> Run:
        """Run `tinker_cookbook.recipes.<module>` with its own command line; fail where it fails.

        `log` names the folder of the run; the same name again is the same folder.
        """
        folder = self.runs / log
        words = [f"{key}={value}" for key, value in options.items()]
        words.append(f"log_path={folder}")
        return self.module(f"tinker_cookbook.recipes.{module}", *words, folder=folder)

    def module(self, name: str, *words: str, folder: Path | None = None) -> Run:
        """Run a module with the words given."""
        return self._run("-m", name, *words, folder=folder or self.runs)

    def script(self, text: str, *words: str) -> Run:
        """Run Python text; `words` are its sys.argv[1:]."""
        return self._run("-c", text, *words, folder=self.runs)

    def _run(self, *words: str, folder: Path) -> Run:
        began = time.monotonic()
        done = subprocess.run(
            [str(self.python), *words],
            cwd=self.data, env=self._environment(), timeout=1800, check=False, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        run = Run(folder, done.stdout, time.monotonic() - began)
        print(f"{run.seconds:.0f} s: {' '.join(words)[:300]}\n{done.stdout[-1500:]}")
        assert done.returncode == 0, done.stdout[-4000:]
        return run

    def _environment(self) -> dict[str, str]:
        given = {key: value for key, value in os.environ.items() if not key.startswith("TRIMTAB_")}
        given.pop("HF_HUB_OFFLINE", None)
        return given | {
            "TINKER_BASE_URL": self.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0",
            "HF_ENDPOINT": self.url, "HF_TOKEN": KEY, "HF_HOME": str(self.runs / "hub-cache"),
            "TINKER_COOKBOOK_RUNS_DIR": str(self.runs), "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip


def _rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
