"""The composition root: joins engine, service and wire, and runs them from socket to farewell.

The heavy rooms are imported when a server starts, so that importing this module is cheap. What a
server does while it lives is the rooms' business; here is only when it begins and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.config import ModelSource, ServerConfig, is_loopback
from trimtab.errors import Invalid

if TYPE_CHECKING:
    import uvicorn

    from trimtab.engine.cores import Cores
    from trimtab.engine.memory import Memory
    from trimtab.service.core import Engine, Service, Store
    from trimtab.service.keys import Keys
    from trimtab.types import BaseModelInfo
    from trimtab.wire.calls import Gate, WireSettings
    from trimtab.wire.codec import WireCodec

Progress = Callable[[str, float], None]

log = logging.getLogger(__name__)
MIB = 2**20
LINGER_SECONDS = 2  # what connections get to finish their answers


# ------------------------------------------------------------------ joining


def load_engines(config: ServerConfig, progress: Progress) -> dict[str, Engine]:
    """A learner and a sampler for each model. Takes as long as reading the weights does."""
    progress("importing torch and transformers", 0.0)
    import torch

    from trimtab.engine.cores import Cores
    from trimtab.engine.memory import Memory
    from trimtab.tiny import quiet

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    sources = config.models()
    memory = Memory(None if config.memory_mib is None else config.memory_mib * MIB, device)
    machine = Machine(device, memory, Cores(config.threads))
    engines = {}
    for index, source in enumerate(sources):

        def part(what: str, done: float, before: int = index) -> None:
            progress(what, (before + done) / len(sources))

        with quiet():
            engines[source.name] = load_engine(config, source, machine, part)
    return engines


class Machine(NamedTuple):
    """What all engines of a process share."""

    device: str
    memory: Memory
    cores: Cores


def load_engine(
    config: ServerConfig, source: ModelSource, machine: Machine, progress: Progress
) -> Engine:
    from trimtab.engine.models import BaseModel
    from trimtab.engine.sampling_limits import SamplerLimits
    from trimtab.engine.text import TokenizerText
    from trimtab.engine.torch_learner import TorchLearner
    from trimtab.engine.torch_sampler import TorchSampler
    from trimtab.service.core import Engine

    base = BaseModel.load(
        source.name,
        source.path,
        device=machine.device,
        learner_dtype=config.dtype,
        sampler_dtype=config.sampler_dtype,
        max_context=config.max_context,
        max_lora_rank=config.max_lora_rank,
        progress=progress,
    )
    if machine.memory.free() <= 0:
        limit = machine.memory.limit // MIB
        raise Invalid(f"memory_mib: {limit} MiB do not suffice for the weights of {source.name}")
    limits = SamplerLimits(
        kv_bytes=config.kv_cache_mib * MIB,
        rows=config.sampling_rows,
        waiting=config.max_pending_samples,
        prefix_cache=config.prefix_cache,
    )
    learner = TorchLearner(
        base,
        micro_batch_tokens=config.micro_batch_tokens,
        cores=machine.cores,
        memory=machine.memory,
    )
    sampler = TorchSampler(base, limits=limits, cores=machine.cores, memory=machine.memory)
    return Engine(learner.info, learner, sampler, TokenizerText.of(base.tokenizer))


def build(config: ServerConfig, store: Store, engines: dict[str, Engine]) -> Service:
    """The service over its store. Quick; call it on the loop that will run it."""
    from trimtab.service.core import Service, ServiceSettings

    settings = ServiceSettings(
        head_k=config.stability_top_k,
        hold_seconds=config.hold_seconds,
        max_pending_samples=config.max_pending_samples,
        max_datums=config.max_datums,
        max_request_tokens=config.max_request_tokens,
        max_spans=config.max_spans,
        max_samples=config.max_samples,
        max_sessions=config.max_sessions,
        max_models=config.max_models,
        min_free_bytes=config.min_free_mib * MIB,
    )
    return Service(settings, store, engines, codec(config))


def codec(config: ServerConfig) -> WireCodec:
    from trimtab.wire.codec import WireCodec

    return WireCodec(config.max_body_mib * MIB)


def wire_settings(config: ServerConfig, keys: Keys | None = None) -> WireSettings:
    from trimtab.wire.calls import WireSettings

    near = is_loopback(config.host)
    return WireSettings(
        api_keys=config.api_key,
        keys=keys,
        jwt_auth=config.jwt_auth,
        max_body_bytes=config.max_body_mib * MIB,
        hold_seconds=config.hold_seconds,
        chunk_datums=min(config.chunk_datums, config.max_datums),
        compress=not near,
        mirror=_mirror(config),
        tokenizer_ids={m.name: str(m.path) for m in config.models() if near and _readable(m)},
    )


def _mirror(config: ServerConfig) -> Callable[[str], Path | None]:
    """Where the tokenizer of a name lies that the SDK looks up for one of the models."""
    sources = {tokenizer_name(model.name): model for model in config.models()}

    def find(repo: str) -> Path | None:
        model = sources.get(repo)
        return None if model is None else _on_disk(model)

    return find if config.hub_mirror else lambda repo: None


def tokenizer_name(model: str) -> str:
    """The repository in which the SDK looks for the tokenizer of a model.

    >>> tokenizer_name("org/name/variant")
    'org/name'
    """
    if model.startswith("meta-llama/Llama-3"):
        return "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
    return model.rsplit("/", 1)[0] if model.count("/") == 2 else model


def _on_disk(model: ModelSource) -> Path | None:
    """A model's folder; for one of a hub's, where its files were put when it was loaded."""
    if model.folder:
        return model.path
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(model.path), "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _readable(model: ModelSource) -> bool:
    """Whether clients of this machine find the tokenizer there; they cut ids at a colon."""
    return model.folder and ":" not in str(model.path)


# ------------------------------------------------------------------ running


class Server:
    """One server. `serve` returns once `stop` was called and everything has ended.

    server = Server(ServerConfig(model=("org/tiny=./tiny",), port=0), ready=print)
    asyncio.run(server.serve())
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        ready: Callable[[Server], None] = lambda server: None,
        progress: Progress = lambda what, done: None,
    ) -> None:
        self.config = config
        self._ready = ready
        self._progress = progress
        self._keys = _keys(config)
        self._listener = _listen(config.host, config.port)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self.models: tuple[BaseModelInfo, ...] = ()
        self.serving = threading.Event()

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients must hold a key that was configured or created."""
        return bool(self.config.api_key) or self._keys.ever()

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self) -> None:
        """Ask for the end, from any thread, at any time, any number of times."""
        if self._loop is None:
            self._stopped.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stopped.set)

    async def serve(self) -> None:
        from trimtab.wire.app import create_app
        from trimtab.wire.calls import Gate

        self._loop = asyncio.get_running_loop()
        gate = Gate()
        settings = wire_settings(self.config, self._keys)
        app = create_app(gate, settings, codec(self.config))
        http = _http_server(app)
        listening = asyncio.ensure_future(http.serve([self._listener]))
        try:
            await self._live(gate)
        finally:
            gate.close()
            http.should_exit = True
            await listening
            self._listener.close()
            self._keys.close()

    async def _live(self, gate: Gate) -> None:
        """Take the data directory, load, open, wait for the end, close."""
        from trimtab.service.core import Store

        store = Store(self.config.data_dir)  # first: loading is long, and another may have it
        try:
            engines = await self._loaded()
            if engines is not None:
                await self._serving(gate, build(self.config, store, engines))
        finally:
            store.close()

    async def _loaded(self) -> dict[str, Engine] | None:
        """The engines, or None when the end came first: loading goes to its end all the same."""
        from trimtab.service.lanes import on_its_own

        stop = asyncio.ensure_future(self._stopped.wait())
        loading = on_its_own("trimtab-load", lambda: load_engines(self.config, self._progress))
        either: set[asyncio.Future[Any]] = {stop, loading}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return None if stop.done() else loading.result()

    async def _serving(self, gate: Gate, service: Service) -> None:
        try:
            await service.start()
            self.models = service.models()
            self._ready(self)
            gate.open(service)
            self.serving.set()
            await self._stopped.wait()
        finally:
            gate.close()
            await service.stop()


def _keys(config: ServerConfig) -> Keys:
    """The stored keys; refuses an address that others reach where no key would keep them out."""
    from trimtab.service.keys import Keys

    keys = Keys(config.data_dir)
    if not (config.api_key or is_loopback(config.host) or keys.some_live()):
        keys.close()
        raise Invalid(
            f"host: {config.host} can be reached from other machines; give an api_key, listen on"
            f" 127.0.0.1, or create a key: `trimtab keys create OWNER --data-dir {config.data_dir}`"
        )
    return keys


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Invalid(f"port: cannot listen on {host}:{port} ({error.strerror})") from None
    return listener


def _http_server(app: object) -> uvicorn.Server:
    import uvicorn

    class HttpServer(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are `run`'s

    return HttpServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=120,  # longer than a client keeps an idle connection
            timeout_graceful_shutdown=LINGER_SECONDS,
        )
    )


# ------------------------------------------------------------------ the command


def run(config: ServerConfig, *, ready: Callable[[Server], None], progress: Progress) -> None:
    """Serve until SIGINT or SIGTERM, then stop cleanly; a second signal ends the process at once.

    Returns within 10 s of the signal. Does not return if a thread of the engine hangs on: the
    process then exits with status 0, as everything that matters is on disk.
    """
    logging.basicConfig(
        level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    _allow_many_connections()

    def loaded(server: Server) -> None:
        _keep_what_is_loaded()
        ready(server)

    server = Server(config, ready=loaded, progress=progress)
    asyncio.run(_serve_until_signal(server))
    sys.stdout.flush()
    sys.stderr.flush()
    others = (t for t in threading.enumerate() if t is not threading.main_thread())
    if not all(thread.daemon for thread in others):
        os._exit(0)


async def _serve_until_signal(server: Server) -> None:
    loop = asyncio.get_running_loop()
    asked = False

    def on_signal(number: int) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        log.info("stopping; once more to stop at once")
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    await server.serve()


def _keep_what_is_loaded() -> None:
    """Tell the garbage collector that the libraries and models are here to stay. Looking through
    them all takes it a fifth of a second, in which every thread stands still."""
    gc.collect()
    gc.freeze()


def _allow_many_connections() -> None:
    """Every held poll is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
