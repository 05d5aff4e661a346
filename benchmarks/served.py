"""A `trimtab serve` in a process of its own that also says what its threads have computed.

The server's own threads are those with a Python name (the event loop, the journal, decoding); the
learner's and the sampler's, and the ones torch starts for them, are the engine's. Those end when
idle, so the engine's part is the process' time less what the others took.

    with served(path) as server:
        service = server.client()
        before = server.computed()
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker

NAME, KEY = "bench/model", "tml-bench"
ENGINE = ("sampler", "trimtab-learner")


@dataclass(frozen=True, slots=True)
class Computed:
    """CPU seconds of a server so far."""

    own: float
    engine: float

    def since(self, before: Computed) -> Computed:
        return Computed(self.own - before.own, self.engine - before.engine)


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: subprocess.Popen[str]

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=KEY)

    def computed(self) -> Computed:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        total, own = json.loads(heard(self.process, "computed:"))
        return Computed(own, total - own)


def heard(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(what):
            return line.removeprefix(what).strip()
    raise RuntimeError(f"the server ended with status {process.wait()}")


@contextmanager
def served(path: Path, **config: Any) -> Iterator[Server]:
    """The server of the model in `path` until the block ends; `config` are ServerConfig's knobs."""
    os.environ["TINKER_TELEMETRY"] = "0"
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        knobs = {"model": [f"{NAME}={path}"], "port": 0, "data_dir": folder, "log_level": "warning"}
        words = [sys.executable, "-m", "benchmarks.served", json.dumps(knobs | config)]
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                yield Server(heard(process, "url:"), process)
            finally:
                process.terminate()


# ------------------------------------------------------------------ inside the server's process


def main() -> None:
    from trimtab.config import load_config
    from trimtab.server import Server as Served
    from trimtab.server import run

    def ready(server: Served) -> None:
        print(f"url:{server.url}", flush=True)
        threading.Thread(target=answer, name="benchmark", daemon=True).start()

    config = load_config(flags=json.loads(sys.argv[1]), environment={})
    run(config, ready=ready, progress=lambda what, done: None)


def answer() -> None:
    for _ in sys.stdin:
        own = sum(seconds for name, seconds in threads() if not name.startswith(ENGINE))
        print(f"computed:{json.dumps([time.process_time(), own])}", flush=True)


def threads() -> list[tuple[str, float]]:
    """(name, CPU seconds) of every thread that Python knows."""
    found = []
    for thread in threading.enumerate():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            task = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            found.append((thread.name, int(task.read_text().split()[0]) / 1e9))
    return found


if __name__ == "__main__":
    main()
