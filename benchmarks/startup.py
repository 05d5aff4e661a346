"""How long it takes to begin: `trimtab --help`, and `trimtab serve` up to a first training step.

The clock starts with the process. "ready" is when it says where it listens, "healthy" when
`/api/v1/healthz` says ok, "first step" when a forward_backward and an optim_step of a new model
(rank 32) have come back through the SDK (which is imported beforehand).

    python -m benchmarks.startup
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import tinker

from benchmarks.report import arguments, finish, model_folder, new_report, read

READY = "export TINKER_BASE_URL="
COMMAND = [sys.executable, "-m", "trimtab.cli"]
NAME, KEY = "bench/model", "tml-bench"


def main() -> None:
    options = read(arguments(__doc__, rounds=3))
    os.environ["TINKER_TELEMETRY"] = "0"
    report = new_report(options)
    helps = [helped() for _ in range(2 * options.rounds)]
    report["trimtab --help, s"], report["trimtab --help, CPU s"] = (
        statistics.median(column) for column in zip(*helps, strict=True)
    )
    with model_folder(options.model) as path:
        rounds = [started(path) for _ in range(options.rounds)]
    for name in rounds[0]:
        report[f"trimtab serve: {name}, s"] = statistics.median(found[name] for found in rounds)
    finish(report, options.json)


def helped() -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    begun, before = time.perf_counter(), children()
    subprocess.run([*COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun, children() - before


def children() -> float:
    """CPU seconds of the processes that have ended."""
    found = os.times()
    return found.children_user + found.children_system


def started(path: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        words = [*COMMAND, "serve", "--model", f"{NAME}={path}", "--port", "0"]
        words += ["--data-dir", folder, "--log-level", "warning"]
        begun = time.perf_counter()
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                return timed(process, begun)
            finally:
                process.terminate()


def timed(process: subprocess.Popen[str], begun: float) -> dict[str, float]:
    assert process.stdout is not None
    url = next(line.strip().partition(READY)[2] for line in process.stdout if READY in line)
    found = {"ready": time.perf_counter() - begun}
    while not healthy(url):
        time.sleep(0.01)
    found["healthy"] = time.perf_counter() - begun
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    trainer = service.create_lora_training_client(NAME, rank=32).result()
    tokens = list(range(3, 20))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    trained = trainer.forward_backward([datum], "cross_entropy")
    stepped = trainer.optim_step(tinker.AdamParams(learning_rate=1e-4))
    trained.result()
    stepped.result()
    found["first step"] = time.perf_counter() - begun
    found["CPU to the first step"] = computed(process.pid)
    service.close("success").result()
    return found


def computed(pid: int) -> float:
    """CPU seconds of a running process; 0 where the kernel does not say."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    ticks = stat.read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


if __name__ == "__main__":
    main()
