"""The command as a process: what it prints, when it answers, how it ends."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest
import tinker
from tinker import types

from .helpers import MODEL, datum, offered, prompt


@contextmanager
def serve(*flags, **environment):
    command = [sys.executable, "-m", "trimtab.cli", "serve", *map(str, flags)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def flags(model_folder, tmp_path):
    return ("--model", f"{MODEL}={model_folder}", "--port", 0, "--data-dir", tmp_path / "data")


def address(process):
    """Read the lines a user is meant to copy."""
    lines = [process.stdout.readline().strip() for _ in range(3)]
    assert lines[0].startswith(f"trimtab serves {MODEL} at http://127.0.0.1:")
    url = lines[1].removeprefix("export TINKER_BASE_URL=")
    assert lines[0].endswith(url) and lines[2] == "export TINKER_API_KEY=tml-local"
    return url


def test_it_prints_where_it_is_and_answers_and_stops_cleanly(flags):
    with serve(*flags) as process:
        url = address(process)
        deadline = time.monotonic() + 5
        while httpx.get(f"{url}/api/v1/healthz").status_code != 200:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert "reading the weights" in process.stderr.read()


def test_a_term_during_a_long_step_a_sample_and_a_held_poll(flags):
    """Everything at once, and still gone within 10 s, with status 0."""
    with serve(*flags, "--micro-batch-tokens", 256) as process:
        url = address(process)
        service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        training = service.create_lora_training_client(MODEL, rank=4).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        long = [datum([1 + i % 250 for i in range(250)]) for _ in range(1000)]
        futures = [training.forward_backward(long, "cross_entropy") for _ in range(3)]
        params = types.SamplingParams(max_tokens=240, stop=[])
        samples = [sampler.sample(prompt(5), 256, params) for _ in range(3)]
        time.sleep(1.5)
        assert not futures[-1].future().done() and not samples[-1].future().done()
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - asked < 10
        assert "Traceback" not in process.stderr.read()
        for future in (*futures, *samples):
            future.future().cancel()
        service.holder.close()


def test_a_second_signal_ends_it_at_once(flags):
    with serve(*flags, "--micro-batch-tokens", 256) as process:
        url = address(process)
        service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        training = service.create_lora_training_client(MODEL, rank=4).result()
        future = training.forward_backward([datum([1] * 250) for _ in range(500)], "cross_entropy")
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.wait(2)
        future.future().cancel()
        service.holder.close()


def test_a_term_while_loading(flags):
    with serve(*flags) as process:
        line = process.stderr.readline()
        assert "reading" in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_what_cannot_be_served_is_a_sentence(flags, tmp_path):
    for extra, words in (
        (("--port", "99999"), "port (from the command line)"),
        (("--host", "0.0.0.0"), "give an api_key"),
        (("--dtype", "int3"), "dtype (from the command line)"),
        (("--model", "a/b=/nowhere"), "there is no folder '/nowhere'"),
    ):
        with serve(*flags, *extra) as process:
            assert process.wait(20) == 1
            text = process.stderr.read()
            assert words in text and "Traceback" not in text
    with serve("--model", tmp_path, "--port", 0, "--data-dir", tmp_path) as process:
        assert process.wait(60) == 1
        text = process.stderr.read()
        assert "config.json" in text and "Traceback" not in text
    with serve(*flags, TRIMTAB_COLOUR="red") as process:
        assert process.wait(20) == 1
        assert "colour (from the environment): unknown" in process.stderr.read()


def test_one_data_directory_has_one_server(flags):
    with serve(*flags) as first:
        address(first)
        with serve(*flags) as second:
            assert second.wait(60) == 1
            text = second.stderr.read()
            assert "data" in text and "Traceback" not in text


def test_a_client_that_comes_before_the_server_is_ready_waits(flags):
    with serve(*flags[:2], "--port", (port := free_port()), *flags[4:]) as process:
        assert offered(f"http://127.0.0.1:{port}")[0].model_name == MODEL
        assert process.poll() is None


def free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
