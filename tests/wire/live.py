"""A whole server on a thread, over a tiny random model, for tests that need more than a script."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import tinker
from tinker import types

from trimtab.config import ServerConfig
from trimtab.server import Server

MODEL = "org/tiny"

# Reports of the SDK about itself: nothing here waits for them, and clients close faster without.
os.environ["TINKER_TELEMETRY"] = "0"


@contextmanager
def serving(**config):
    server = Server(ServerConfig(**({"port": 0, "threads": 1} | config)))
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


@contextmanager
def connected(server, key, **options):
    client = tinker.ServiceClient(base_url=server.url, api_key=key, **options)
    try:
        yield client
    finally:
        client.close("success").result(10)


def datum(tokens):
    """Predict each token from the ones before it."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def prompt(*tokens):
    return types.ModelInput.from_ints(list(tokens))
