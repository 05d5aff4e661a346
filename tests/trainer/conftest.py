"""One server in another process, with one tiny random model, for all of the trainer's tests."""

import os
import re
import subprocess
import sys
import time

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
    """Its output goes to files: with a pipe that nobody reads the server would end at a print."""
    command = [sys.executable, "-m", "trimtab.cli", "serve", "--model", f"{MODEL}={model}"]
    command += ["--port", str(port), "--data-dir", str(data_dir)]
    said = log.with_suffix(".out")
    with open(log, "ab") as errors, open(said, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
    while not (found := re.search(r"at (http://\S+)\n", said.read_text())):
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    return process, found[1]


@pytest.fixture(autouse=True)
def _local_service(monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("NO_PROXY", os.environ.get("NO_PROXY", "") + ",127.0.0.1")
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
