"""One server in another process, with one tiny random model, for all of the trainer's tests."""

import os
import re
import subprocess
import sys

import pytest

from trimtab import tiny

MODEL = "trimtab/tiny"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return tiny.build(folder, tokenizer="characters", hidden=32, context=128)


@pytest.fixture(scope="session")
def server(tiny_model, tmp_path_factory):
    """The URL of `trimtab serve`."""
    log = tmp_path_factory.mktemp("server") / "log"
    process, url = serve(tiny_model, tmp_path_factory.mktemp("data"), log)
    yield url
    process.terminate()
    process.wait(timeout=20)


def serve(model, data_dir, log, port=0):
    command = [sys.executable, "-m", "trimtab.cli", "serve", "--model", f"{MODEL}={model}"]
    command += ["--port", str(port), "--data-dir", str(data_dir)]
    with open(log, "ab") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    with process.stdout:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"{line}\n{log.read_text()}"
        for _ in range(2):
            process.stdout.readline()
    return process, found[0]


@pytest.fixture(autouse=True)
def _local_service(monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("NO_PROXY", os.environ.get("NO_PROXY", "") + ",127.0.0.1")
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
