"""A server in a process of its own, and what the kernel says it uses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trimtab import tiny

from .raw import MODEL

SHIPPED = ("-m", "trimtab.cli", "serve")
ROOT = Path(__file__).parents[2]
READY = "export TINKER_BASE_URL="


@dataclass(frozen=True, slots=True)
class Use:
    """Resident memory in MiB, open files and threads."""

    memory_mib: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Process:
    url: str
    pid: int

    def use(self) -> Use:
        proc = Path(f"/proc/{self.pid}")
        fields = dict(
            line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
        )
        memory = int(fields["VmRSS"].split()[0]) / 1024
        return Use(round(memory, 1), len(list((proc / "fd").iterdir())), int(fields["Threads"]))


@contextmanager
def serving(folder: Path, *options: str, command: Sequence[str] = SHIPPED) -> Iterator[Process]:
    """`trimtab serve` with a tiny model, data in `folder`, until the block ends."""
    model = tiny.build(folder / "model", context=256)
    words = [sys.executable, *command, "--model", f"{MODEL}={model}", "--port", "0"]
    words += ["--data-dir", str(folder / "data"), "--threads", "1", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if READY in line:
                    yield Process(line.strip().rpartition(READY)[2], process.pid)
                    break
            else:
                raise RuntimeError("the server ended before it was ready")
        finally:
            process.terminate()
