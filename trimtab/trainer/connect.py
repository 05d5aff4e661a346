"""The server of a run: its address, its models, its checkpoints. Knows no tasks."""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import tinker
from tinker.lib.retryable_exception import RetryableException

from trimtab import modelstore
from trimtab.errors import Invalid
from trimtab.trainer.config import Config
from trimtab.trainer.stopped import RESUME, ServerLost, Stopped

LOCAL_KEY = "tml-local"  # a server on this machine takes any key, but the SDK wants one


def address(config: Config) -> str | None:
    return config.base_url or os.environ.get("TINKER_BASE_URL") or None


def reach(config: Config, timeout: float = 5.0) -> None:
    """Whether somebody listens there, before a run begins: the SDK would try for many minutes.
    Behind a proxy that cannot be seen from here, and the SDK has to find out."""
    url = urlsplit(address(config) or "")
    host = url.hostname
    if host is None or (urllib.request.getproxies() and not urllib.request.proxy_bypass(host)):
        return
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError as error:
        raise Stopped(
            f"nothing answers at {url.geturl()} ({error.strerror or error}); start the server "
            "there (`trimtab serve` prints its address), or name another with base_url="
        ) from error


def service_client(config: Config, purpose: str) -> tinker.ServiceClient:
    """A client of the server that the options or the environment name."""
    url = address(config)
    if url is None:
        raise Invalid(
            "there is no server; give base_url=http://HOST:PORT or set TINKER_BASE_URL (the "
            "command `trimtab train` starts one by itself)"
        )
    return tinker.ServiceClient(
        base_url=url, api_key=_key(url), user_metadata={"trimtab_task": purpose}
    )


def _key(url: str) -> str | None:
    known = any(os.environ.get(name) for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"))
    local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    return LOCAL_KEY if local and not known else None


@contextmanager
def serving(config: Config, folder: Path) -> Iterator[tinker.ServiceClient]:
    """A server in this process for one run, its checkpoints in the run's folder."""
    import trimtab

    if not config.model:
        raise Invalid(
            "there is no server and no model; give model=NAME to have one started here, or "
            "base_url=http://HOST:PORT"
        )
    with trimtab.local(model=config.model, data_dir=folder / "server") as service:
        yield service


@dataclass(frozen=True)
class Model:
    """`context` None: the server does not say."""

    name: str
    context: int | None


async def choose_model(rest: tinker.RestClient, wanted: str) -> Model:
    """The model of that name, or the only one that can be trained."""
    capabilities = await rest.get_server_capabilities()
    models = {
        m.model_name: Model(m.model_name, m.max_context_length)
        for m in capabilities.supported_models
        if m.model_name and m.trainable is not False
    }
    if not wanted and len(models) == 1:
        return next(iter(models.values()))
    if wanted in modelstore.KNOWN:
        wanted = modelstore.KNOWN[wanted].name
    if wanted in models:
        return models[wanted]
    # A server started for this run names its one model after `name=folder` or after the folder.
    if len(models) == 1 and ("=" in wanted or Path(wanted).expanduser().is_dir()):
        return next(iter(models.values()))
    offered = ", ".join(sorted(models)) or "none"
    if not wanted:
        raise Invalid(f"the server offers several models ({offered}); choose one with model=")
    raise Invalid(f"model is {wanted!r}; the server offers {offered}")


FINAL = (400, 401, 403, 413, 422)  # the same request would be refused again


@contextmanager
def reporting() -> Iterator[None]:
    """A failure of the server as one sentence with the way to go on."""
    try:
        yield
    except tinker.APIConnectionError as error:
        raise ServerLost(f"the server cannot be reached ({error.message})") from error
    except tinker.RequestFailedError as error:
        cause = f"the server failed a request ({_failed(error)})"
        if error.category == "user":
            raise Stopped(f"{cause}; once that is put right, {RESUME}") from error
        raise ServerLost(cause) from error
    except tinker.APIStatusError as error:
        cause = f"the server refused a request ({_detail(error)})"
        if error.status_code in FINAL:
            raise Stopped(cause) from error
        raise ServerLost(cause) from error
    except RetryableException as error:
        raise ServerLost(f"the server no longer knows a request ({error})") from error
    except ValueError as error:  # what the SDK makes of an unknown future
        if not str(error).startswith("Error retrieving result"):
            raise
        raise ServerLost(f"the server no longer knows a request ({error})") from error


def _failed(error: tinker.RequestFailedError) -> str:
    """What the server said, without what the SDK adds."""
    found = re.match(r"Request failed: (.*?) for self\.request_id=", error.message, re.DOTALL)
    return found[1] if found else error.message


def _detail(error: tinker.APIStatusError) -> str:
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("detail"), str):
        return str(body["detail"])
    return str(error).splitlines()[0]
