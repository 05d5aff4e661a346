"""One server for the whole suite, over a tiny random model, and the official SDK against it."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import tinker
from tinker import types

from trimtab import tiny
from trimtab.config import ServerConfig
from trimtab.server import Server

from .kit import KEY, MODEL, datum

# Reports of the SDK about itself: nothing here waits for them, and clients close faster without.
os.environ["TINKER_TELEMETRY"] = "0"


@contextmanager
def _serving(**config):
    server = Server(ServerConfig(**({"port": 0} | config)))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: asyncio.run(server.serve()))
        running.add_done_callback(lambda _: server.serving.set())
        server.serving.wait(60)
        try:
            if running.done():
                running.result()
            yield server
        finally:
            server.stop()
            running.result(20)


@pytest.fixture(scope="session")
def serving():
    return _serving


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("model") / "tiny", context=256)


@pytest.fixture(scope="session")
def server(model_folder, tmp_path_factory):
    """Chunks of two datums, so that an ordinary batch arrives in several requests."""
    config = {
        "model": (f"{MODEL}={model_folder}",),
        "data_dir": tmp_path_factory.mktemp("data"),
        "chunk_datums": 2,
        "threads": 1,
    }
    with _serving(**config) as server:
        yield server


@pytest.fixture(scope="session")
def service(server):
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield client
    client.close("success").result(10)


@pytest.fixture(scope="module")
def trained(service):
    """A training client of its own for a module, with weights that differ from the base model's."""
    client = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    client.forward_backward([datum([5, 6, 7, 8])], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.05)).result()
    return client


@pytest.fixture
def fresh(service):
    return service.create_lora_training_client(MODEL, rank=4, seed=1).result()


@pytest.fixture(scope="session")
def http(server):
    headers = {"X-API-Key": KEY}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=40) as client:
        yield client
