"""The command as a process: what it prints, when it answers, how it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import tinker
from tinker import types

from .kit import MODEL, datum, offered, prompt


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


def test_a_client_may_come_early_and_the_end_is_clean(flags):
    """A client that starts with the server simply waits for it."""
    port = free_port()
    with serve(*flags, "--port", port) as process, ThreadPoolExecutor(1) as thread:
        asking = thread.submit(offered, f"http://127.0.0.1:{port}")
        assert address(process) == f"http://127.0.0.1:{port}"
        assert asking.result(30)[0].model_name == MODEL
        assert httpx.get(f"http://127.0.0.1:{port}/api/v1/healthz").json() == {"status": "ok"}
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert "reading the weights" in process.stderr.read()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_term_during_a_long_step_a_sample_and_a_held_poll(flags):
    """Everything at once, and still gone within 10 s, with status 0."""
    with serve(*flags, "--micro-batch-tokens", 256) as process:
        url = address(process)
        service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        training = service.create_lora_training_client(MODEL, rank=4).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        long = [datum([1 + (i * n) % 250 for i in range(250)]) for n in range(1, 1001)]
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


def test_a_term_while_loading_and_one_server_a_data_directory(flags):
    with serve(*flags) as first:
        assert "importing torch" in first.stderr.readline()
        with serve(*flags) as second:
            assert second.wait(20) == 1
            text = second.stderr.read()
            assert "data" in text and "Traceback" not in text
        first.send_signal(signal.SIGTERM)
        assert first.wait(10) == 0


def test_a_client_outlives_the_server(serving, model_folder, tmp_path):
    """After a restart at the same address the same client gets what it was waiting for, from a
    model that is what it was, to the last bit."""
    config = {
        "model": (f"{MODEL}={model_folder}",),
        "data_dir": tmp_path,
        "port": free_port(),
        "micro_batch_tokens": 256,
    }
    data = [datum([1 + (i + j) % 250 for i in range(200)]) for j in range(60)]
    adam = types.AdamParams(learning_rate=0.01)

    def steps(training):
        training.forward_backward(data[:2], "cross_entropy").result()
        return training.optim_step(adam)

    with serving(**config) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        training = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        base = service.create_sampling_client(base_model=MODEL).result()
        steps(training).result()
        future = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(adam)
        time.sleep(0.3)
        assert not future.future().done()
    with serving(**config):
        gradient = future.result(60).metrics["loss:sum"], step.result(60).metrics
        params = types.SamplingParams(max_tokens=2)
        assert base.sample(prompt(5), 1, params).result(60).sequences[0].tokens
        other = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        steps(other).result()
        again = other.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        assert (again, other.optim_step(adam).result().metrics) == gradient
        assert steps(other).result().metrics == steps(training).result().metrics
        service.close("success").result(10)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--port", "99999"), "port (from the command line)"),
        (("--host", "0.0.0.0"), "give an api_key"),
        (("--dtype", "int3"), "dtype (from the command line)"),
        (("--model", "a/b=/nowhere"), "there is no folder '/nowhere'"),
        (("--config", "/nowhere.toml"), "/nowhere.toml"),
        (("--colour", "red"), "--colour"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(flags, extra, words):
    with serve(*flags, *extra) as process:
        assert process.wait(20) in (1, 2)
        text = process.stderr.read()
        assert words in text and "Traceback" not in text


def test_a_stray_variable_is_told(flags):
    with serve(*flags, TRIMTAB_COLOUR="red") as process:
        assert process.wait(20) == 1
        assert "colour (from the environment): unknown" in process.stderr.read()
