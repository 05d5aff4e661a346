"""The wire room over real sockets, with a service that answers from a table and remembers calls."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import tinker

from trimtab import tiny, types
from trimtab.server import _http_server
from trimtab.service.core import (
    CheckpointRecord,
    Completion,
    Completions,
    ModelRecord,
    Outcome,
    Promise,
    SamplerRecord,
)
from trimtab.service.keys import Keys
from trimtab.wire.app import create_app
from trimtab.wire.calls import Gate, WireSettings
from trimtab.wire.codec import WireCodec

from .live import MODEL, connected, datum, prompt, serving

EARLY = 77  # a seq_id that comes before another one

INFO = types.BaseModelInfo(
    name="org/tiny", path=Path("/srv/tiny"), architecture="LlamaForCausalLM", vocab_size=64,
    max_context=128, eos_token_ids=(0,), parameters=1, learner_dtype="float32",
    sampler_dtype="float32", max_lora_rank=8,
)  # fmt: skip


class ScriptedService:
    """Stands where Service stands. `outcomes` are what retrieve finds; absent ids are pending."""

    def __init__(self):
        self.calls = []
        self.outcomes = {}
        self.waiting = 0
        self.raises = None

    def _note(self, *call):
        self.calls.append(call)
        if self.raises is not None:
            raise self.raises

    def models(self):
        return (INFO,)

    async def submit(self, owner, request, kind, body):
        self._note("submit", owner, request, kind, body)
        ids = ("S:sample:0:0:0", "S:sample:0:0:1") if kind == "sample" else ()
        return Promise("S:train:0:1", None if ids else "S:train:0", ids)

    async def reject(self, *arguments):
        self.calls.append(("reject", *arguments))
        _, _, key, seq_id, why, _ = arguments
        if seq_id == EARLY:
            return Promise(f"{key}:{seq_id}", key)
        raise why

    async def retrieve(self, owner, request_id, timeout):
        self._note("retrieve", owner, request_id, timeout)
        if request_id in self.outcomes:
            return self.outcomes[request_id]
        self.waiting += 1
        try:
            await asyncio.sleep(timeout)
        finally:
            self.waiting -= 1
        return Outcome("pending")

    async def retrieve_many(self, *arguments):
        self._note("retrieve_many", *arguments)
        return Completions((Completion("a", "finished", 812), Completion("b", "failed", 0)), 2)

    async def cancel(self, *arguments):
        self._note("cancel", *arguments)

    async def create_session(self, owner, **fields):
        self._note("create_session", owner, fields)
        return "S"

    async def heartbeat(self, *arguments):
        self._note("heartbeat", *arguments)

    async def finish_session(self, *arguments):
        self._note("finish_session", *arguments)

    async def create_sampling_session(self, *arguments):
        self._note("create_sampling_session", *arguments)
        return "S:sample:0"

    async def join_sampling_session(self, *arguments):
        self._note("join_sampling_session", *arguments)
        return 1

    async def get_sampler(self, *arguments):
        self._note("get_sampler", *arguments)
        return SamplerRecord("S:sample:0", "org/tiny", None)

    async def get_info(self, *arguments):
        self._note("get_info", *arguments)
        return ModelRecord("S:train:0", "org/tiny", types.LoraConfig(4, 7, train_mlp=False))

    async def weights_info(self, *arguments):
        self._note("weights_info", *arguments)
        lora = types.LoraConfig(4, 7, train_mlp=False)
        return CheckpointRecord("tinker://x", "weights", "S:train:0", "org/tiny", lora)


@contextmanager
def _running(settings=None, opened=True):
    """A server on a free port: its base URL, a client of it, its service and its gate."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    service, ready = ScriptedService(), threading.Event()
    box = SimpleNamespace(url=url, service=service, listener=listener)

    async def serve():
        box.loop, box.gate = asyncio.get_running_loop(), Gate()
        if opened:
            box.gate.open(service)
        settings_ = settings or WireSettings(hold_seconds=0.2, max_body_bytes=100_000)
        box.http = _http_server(create_app(box.gate, settings_, WireCodec()))
        box.loop.call_later(0.05, ready.set)
        await box.http.serve([listener])

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(asyncio.run, serve())
        ready.wait()
        try:
            with httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": "tml-x"}) as client:
                box.client = client
                yield box
        finally:
            box.http.should_exit = True
            done.result()


@pytest.fixture
def running():
    return _running


@pytest.fixture
def server():
    with _running() as box:
        yield box


# ------------------------------------------------------------------ a whole server


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("model") / "tiny", context=256)


@pytest.fixture(scope="session")
def shared(model_folder, tmp_path_factory):
    """One server for all: `url`, and a key of alice's and one of bob's, both stored."""
    data_dir = tmp_path_factory.mktemp("data")
    keys = Keys(data_dir)
    alice, bob = (keys.create(owner, f"{owner}'s laptop")[1] for owner in ("alice", "bob"))
    with serving(model=(f"{MODEL}={model_folder}",), data_dir=data_dir) as server:
        yield SimpleNamespace(
            server=server, url=server.url, data_dir=data_dir, keys=keys, alice=alice, bob=bob
        )
    keys.close()


@pytest.fixture(scope="session")
def alices(shared):
    """A session of alice's that has ended: a trained run, three checkpoints, a sampling client."""
    with connected(shared.server, shared.alice, user_metadata={"team": "red"}) as client:
        training = client.create_lora_training_client(
            MODEL, rank=4, seed=1, user_metadata={"recipe": "test"}
        ).result()
        training.forward_backward([datum([5, 6, 7, 8])], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        found = SimpleNamespace(
            run=training.model_id,
            session=training.model_id.split(":")[0],
            weights=training.save_state("first").result().path,
            sampler=training.save_weights_for_sampler("first").result().path,
            external=training.save_weights_external("first").result().path,
        )
        sampling = client.create_sampling_client(model_path=found.sampler).result()
        sample = sampling.sample(prompt(1, 2, 3), 2, tinker.SamplingParams(max_tokens=4)).result()
        found.sampled = sum(len(sequence.tokens) for sequence in sample.sequences)
        found.logprobs = sampling.compute_logprobs(prompt(5, 6, 7, 8, 9)).result()
        found.sampler_id = sampling._sampling_session_id
        yield found
