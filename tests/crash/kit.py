"""Servers that die, the client that does not notice, and what is compared at the end."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import httpx
import numpy as np
import tinker
from e2e.kit import KEY, MODEL, batch, logprobs, prompt
from e2e.test_stable_reinforce import data_of
from tinker import types

TESTS = Path(__file__).parents[1]
PROMPT = [10, 20, 30]


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Nursery:
    """The client of nursery.py. Thread-safe; `wait` holds it up, so wait for what is dead."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                                    "PYTHONPATH": str(TESTS)}  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "crash.nursery"], cwd=TESTS, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._ready = False

    def ask(self, **request):
        with self._lock:
            if not self._ready:
                assert json.loads(self._process.stdout.readline()) == {"ready": True}
                self._ready = True
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


class Home:
    """A data directory and a port, over which servers come and go."""

    def __init__(self, nursery: Nursery, model: Path, path: Path, every: int = 2) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.nursery, self.path, self.every = nursery, path, every
        self.data, self.log, self.mark = path / "data", path / "log", path / "mark"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.args = ["--model", f"{MODEL}={model}", "--port", str(self.port), "--data-dir",
                     str(self.data), "--threads", "1", "--chunk-datums", "2",
                     "--log-level", "info"]  # fmt: skip
        self.pid = 0

    def start(self, point: str | None = None, times: int = 1, **more) -> None:
        self.mark.unlink(missing_ok=True)
        request = {"args": self.args, "log": str(self.log), "every": self.every}
        if point is not None:
            request |= {"point": point, "times": times, "mark": str(self.mark)}
        self.pid = self.nursery.ask(**(request | more))["pid"]

    @property
    def dead(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def buried(self) -> int:
        """The exit status of the server that is dead."""
        return self.nursery.ask(wait=self.pid)["status"]

    def wait(self, seconds: float = 60.0) -> int:
        end = time.monotonic() + seconds
        while not self.dead:
            assert time.monotonic() < end, f"still alive: {self.tail()}"
            time.sleep(0.02)
        return self.buried()

    def served(self, seconds: float = 60.0) -> None:
        """Wait until the server that was started last answers."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/api/v1/healthz").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"it does not answer: {self.tail()}")

    def stop(self) -> int:
        self.kill(signal.SIGTERM)
        return self.wait(20)

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def read(self, sql: str) -> list[tuple]:
        with closing(sqlite3.connect(self.data / "trimtab.sqlite3")) as db:
            return db.execute(sql).fetchall()


# ------------------------------------------------------------------ the client


class Script:
    """Training with everything in it, a cycle at a time; `told` is all that the client was told."""

    def __init__(self, url: str) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY)
        self.told: list[object] = []
        self.training = None
        self.sampler = None
        self.cycles = 0

    def begin(self) -> None:
        self.training = self.service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        self.session = self.training.model_id.split(":")[0]

    def cycle(self) -> None:
        """Publish, sample with a record, train on it with chunks in flight, save, load."""
        n, training = self.cycles, self.training
        sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
        params = types.SamplingParams(max_tokens=6, seed=n, stop=[])
        drawn = sampler.sample(prompt(*PROMPT), 4, params).result().sequences
        self.told += [(list(s.tokens), list(s.logprobs)) for s in drawn]
        adam = types.AdamParams(learning_rate=0.02)
        futures = [training.forward_backward(data_of(drawn), "stable_reinforce"),
                   training.optim_step(adam),
                   training.forward_backward(batch(3, seed=n), "cross_entropy"),
                   training.optim_step(adam)]  # fmt: skip
        saving = training.save_state(f"c{n}")
        for future in futures:
            self.note(future.result())
        path = saving.result().path
        self.told.append(self.same(path))
        if n % 2:
            training.load_state_with_optimizer(path).result()
        else:
            training.load_state(path).result()
        self.cycles += 1

    def same(self, text: str) -> str:
        return text.replace(self.session, "S")

    def note(self, result) -> None:
        if isinstance(result, types.ForwardBackwardOutput):
            self.told.append([np.asarray(x).tobytes() for x in logprobs(result)])
        self.told.append(sorted(result.metrics.items()))

    def end(self) -> None:
        self.last = self.training.save_state("last").result().path
        self.service.close("success").result(120)


# ------------------------------------------------------------------ what must be equal


def weights(home: Home, script: Script) -> dict[str, str]:
    """The files of the last checkpoint: adapter, AdamW's moments, and how many steps."""
    [(folder,)] = home.read(f"SELECT folder FROM checkpoints WHERE path = '{script.last}'")
    kept = home.data / "checkpoints" / folder
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in kept.iterdir()}


def journal(home: Home, script: Script) -> list[tuple]:
    """Every training request with what became of it, results byte for byte."""
    rows = home.read(
        "SELECT r.seq_id, r.kind, r.state, r.error, r.effect, hex(x.body) FROM requests r"
        " LEFT JOIN results x USING (request_id)"
        f" WHERE r.kind NOT IN ('sample', 'save_weights_for_sampler')"
        f" AND r.session_id = '{script.session}' ORDER BY r.seq_id"
    )
    named = script.session.encode().hex().upper()
    return [(*row[:5], (row[5] or "").replace(named, "")) for row in rows]


def records(home: Home) -> list[tuple]:
    """What was recorded of each sequence, in the order of sampling."""
    return home.read(
        "SELECT hex(tokens), hex(logprobs), hex(head_ids), hex(head_logprobs) FROM arrays"
        " JOIN sequences USING (sequence_id) ORDER BY finished_at, idx"
    )


def nothing_left_over(home: Home) -> None:
    """No row is pending, and no folder is there that no row names."""
    assert home.read("SELECT request_id FROM requests WHERE state = 'pending'") == []
    named = {row[0] for row in home.read("SELECT folder FROM checkpoints UNION"
                                         " SELECT folder FROM weights")}  # fmt: skip
    assert {entry.name for entry in (home.data / "checkpoints").iterdir()} == named
    assert list((home.data / "snapshots").iterdir()) == []
    for table in ("bodies", "pins", "snapshots"):
        assert home.read(f"SELECT * FROM {table}") == []
