"""A server inside this process, for notebooks, tests and recipes: `trimtab.local`.

The client it hands out is the official SDK's and speaks HTTP to the server like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimtab.errors import ServerError

if TYPE_CHECKING:
    import tinker

KEY = "tml-local"
NO_PROXY = ("NO_PROXY", "no_proxy")


@contextlib.contextmanager
def local(
    *, model: str | tuple[str, ...] | list[str], **config: Any
) -> Iterator[tinker.ServiceClient]:
    """Serve `model` on a free port of this machine while the block runs, and yield a client of it.

    `config` takes the knobs of ServerConfig. Without `data_dir` everything the server stored is
    gone afterwards.

        with trimtab.local(model="org/tiny=./tiny") as service_client:
            training_client = service_client.create_lora_training_client("org/tiny", rank=8)
    """
    import tinker

    with contextlib.ExitStack() as stack:
        if "data_dir" not in config:
            config["data_dir"] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = (model,) if isinstance(model, str) else tuple(model)
        url = stack.enter_context(_served({"port": 0, "model": models} | config))
        stack.enter_context(_unproxied())
        keys = config.get("api_key") or (KEY,)
        client = tinker.ServiceClient(base_url=url, api_key=keys[0])
        status: Literal["success", "errored"] = "errored"
        try:
            yield client
            status = "success"
        finally:
            client.close(status).result()


@contextlib.contextmanager
def _served(config: dict[str, Any]) -> Iterator[str]:
    """Run a server on a thread with a loop of its own; its URL, once it answers."""
    from trimtab.config import load_config
    from trimtab.server import Server

    server = Server(load_config(flags=config, environment={}))
    thread = ThreadPoolExecutor(1, thread_name_prefix="trimtab-local")
    running = thread.submit(lambda: asyncio.run(server.serve()))
    running.add_done_callback(lambda _: server.serving.set())
    try:
        server.serving.wait()
        if running.done():
            running.result()
            raise ServerError("the server ended before it was ready")
        yield server.url
    finally:
        server.stop()
        thread.shutdown()


@contextlib.contextmanager
def _unproxied() -> Iterator[None]:
    """Keep clients made in the block from asking a proxy for this machine's own address."""
    before = {name: os.environ.get(name) for name in NO_PROXY}
    for name, value in before.items():
        os.environ[name] = ",".join(filter(None, (value, "127.0.0.1")))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
