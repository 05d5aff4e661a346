"""Runs recipes of tinker-cookbook, as installed, each in a process, and reads their logs.

Knows the command line and the files of the cookbook; nothing of the server but its address.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KEY = "tml-local"
TIMEOUT = 1800  # seconds a recipe may take
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
        return self._run(*self._command(module, log, options), folder=self.runs / log)

    def killed(self, module: str, log: str, checkpoints: int, /, **options: object) -> Run:
        """Run a recipe and kill it, by SIGKILL, once it has noted `checkpoints` checkpoints."""
        notes = self.runs / log / "checkpoints.jsonl"

        def noted() -> bool:
            return notes.exists() and notes.read_text().count("\n") >= checkpoints

        return self._run(*self._command(module, log, options), folder=self.runs / log, until=noted)

    def module(self, name: str, *words: str) -> Run:
        """Run a module with the words given."""
        return self._run("-m", name, *words, folder=self.runs)

    def script(self, text: str, *words: str) -> Run:
        """Run Python text; `words` are its sys.argv[1:]."""
        return self._run("-c", text, *words, folder=self.runs)

    def _command(self, module: str, log: str, options: dict[str, object]) -> list[str]:
        words = [f"{key}={value}" for key, value in options.items()]
        return ["-m", f"tinker_cookbook.recipes.{module}", *words, f"log_path={self.runs / log}"]

    def _run(self, *words: str, folder: Path, until: Callable[[], bool] | None = None) -> Run:
        """Run Python with `words` to its end, or kill it when `until` holds."""
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                [str(self.python), *words], cwd=self.data, env=self._environment(), text=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                ended = _wait(process, until)
            finally:
                process.kill()
                process.wait()
            out.seek(0)
            run = Run(folder, out.read(), time.monotonic() - began)
        print(f"{run.seconds:.0f} s: {' '.join(words)[:300]}\n{run.printed[-1500:]}")
        if ended:
            assert until is None, "it ended before it was killed: " + run.printed[-4000:]
            assert process.returncode == 0, run.printed[-4000:]
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


def _wait(process: subprocess.Popen[str], until: Callable[[], bool] | None) -> bool:
    """Whether it ended by itself; False when `until` held first."""
    for _ in range(10 * TIMEOUT):
        if process.poll() is not None:
            return True
        if until is not None and until():
            return False
        time.sleep(0.1)
    raise TimeoutError(f"{process.args}: no end within {TIMEOUT} s")
