"""Two tenants of one server, keys and all: whatever one of them sends, or makes the engine do, the
other's weights are those of a run without it, bit for bit, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from load.raw import MODEL, Connection
from safetensors.numpy import load_file

from trimtab import tiny
from trimtab.embedded import _served
from trimtab.engine.torch_learner import TorchLearner
from trimtab.errors import Invalid
from trimtab.wire import trimtab_pb2 as pb

MINE, THEIRS = "tml-mine", "tml-theirs"
ROWS = 6
REFUSED = b"refused"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("poison") / "model", context=64)


def policy_gradient(model: str, seq_id: int, advantage: float) -> bytes:
    tokens = np.arange(5, 5 + ROWS)
    text = pb.EncodedTextChunk(tokens=tokens.astype("<i4").tobytes())

    def floats(value: float) -> pb.Tensor:
        return pb.Tensor(dense=np.full(ROWS, value, "<f4").tobytes(), dtype=pb.DTYPE_FLOAT32)

    datum = pb.Datum(
        model_input=[pb.Chunk(encoded_text=text)],
        loss_fn_inputs={
            "target_tokens": pb.Tensor(dense=tokens.astype("<i8").tobytes(), dtype=pb.DTYPE_INT64),
            "logprobs": floats(-1.0),
            "advantages": floats(advantage),
        },
    )
    return pb.ForwardBackwardRequest(
        model_id=model, seq_id=seq_id, data=[datum], loss_fn="importance_sampling"
    ).SerializeToString()


class Tenant:
    """A model of somebody's, and its next seq_id."""

    def __init__(self, connection: Connection) -> None:
        self.c = connection

    async def begin(self) -> None:
        self.seq_id = 0
        self.model = await self.c.model(await self.c.session())

    def next(self) -> int:
        self.seq_id += 1
        return self.seq_id

    async def step(self, learning_rate: float = 1e-2) -> bytes:
        """The optimizer's answer, good or not."""
        made = await self.c.post("optim_step", model_id=self.model, seq_id=self.next(),
                                 adam_params={"learning_rate": learning_rate})  # fmt: skip
        return await self.c.outcome(made["request_id"])

    async def learn(self) -> bytes:
        made = await self.c.forward_backward(self.model, self.next())
        return await self.c.outcome(made)

    async def push(self, advantage: float) -> bytes:
        """A policy gradient with that advantage; refused ones use up their id as well."""
        body = policy_gradient(self.model, self.next(), advantage)
        status, answer = await self.c.send("forward_backward", body, "application/x-protobuf")
        if status == 400:
            return REFUSED
        return await self.c.outcome(json.loads(answer)["request_id"])

    async def sample(self) -> bytes:
        number = self.next()
        made = await self.c.post("save_weights_for_sampler", model_id=self.model, seq_id=number,
                                 sampling_session_seq_id=number)  # fmt: skip
        found = json.loads(await self.c.outcome(made["request_id"]))
        request_id = await self.c.sample(found["sampling_session_id"], 0, max_tokens=8)
        return await self.c.outcome(request_id)


# ------------------------------------------------------------------ the poisons


async def nan(theirs: Tenant) -> None:
    """What is not a number is refused; a gradient that is none is not applied."""
    assert await theirs.push(float("nan")) == REFUSED
    assert b"the gradient is incomplete" in await theirs.step()
    assert await theirs.push(3e38) != REFUSED
    assert b"the gradient is not finite" in await theirs.step()


async def overflow(theirs: Tenant) -> None:
    """Weights as large as anybody can make them, and samples from them."""
    await theirs.push(1e5)
    assert b"update_norm" in await theirs.step(learning_rate=9e5)
    await theirs.sample()


async def broken(theirs: Tenant) -> None:
    """The engine raises on every request of theirs (see `poisoned`)."""
    assert b"internal error: ZeroDivisionError" in await theirs.learn()
    assert b"the gradient is incomplete" in await theirs.step()


async def short(theirs: Tenant) -> None:
    """No memory for any request of theirs."""
    assert b"memory does not suffice for its 8 tokens" in await theirs.learn()


ERRORS = {
    broken: ZeroDivisionError("boom"),
    short: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"),
}


def poisoned(monkeypatch, model: str, error: Exception) -> None:
    """Every pass of this model raises `error`, in the engine."""
    plain = TorchLearner._pass

    def patched(self, training, *arguments):
        if self._models.get(model) is training:
            raise error
        return plain(self, training, *arguments)

    monkeypatch.setattr(TorchLearner, "_pass", patched)


# ------------------------------------------------------------------ the run


async def mine(url: str, folder: Path, poison, monkeypatch) -> dict[str, np.ndarray]:
    """My adapter after four steps, `poison` between any two of my requests."""
    async with Connection(url, MINE) as a, Connection(url, THEIRS) as b:
        me, theirs = Tenant(a), Tenant(b)
        await me.begin()
        await theirs.begin()
        if poison in ERRORS:
            poisoned(monkeypatch, theirs.model, ERRORS[poison])
        for request in (me.learn, me.step) * 4:
            if poison is not None:
                await poison(theirs)
            assert not (await request()).startswith(b'{"error"')
        saved = await a.post("save_weights", model_id=me.model, seq_id=me.next(), path="end")
        await a.result(saved["request_id"])
        monkeypatch.undo()
        await theirs.begin()  # the poisoned one goes on as well
        for request in (theirs.learn, theirs.step):
            assert not (await request()).startswith(b'{"error"')
    return load_file(saved_folder(folder) / "adapter.safetensors")


def saved_folder(data: Path) -> Path:
    with contextlib.closing(sqlite3.connect(data / "trimtab.sqlite3")) as db:
        query = "SELECT folder FROM checkpoints WHERE path LIKE '%/weights/end'"
        return data / "checkpoints" / db.execute(query).fetchone()[0]


def run(model_folder, folder, poison, monkeypatch):
    config = {
        "model": (f"{MODEL}={model_folder}",), "data_dir": folder, "threads": 1, "port": 0,
        "api_key": (MINE, THEIRS),
    }  # fmt: skip
    with _served(config) as url:
        return asyncio.run(mine(url, folder, poison, monkeypatch))


@pytest.fixture(scope="module")
def undisturbed(model_folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return run(model_folder, tmp_path_factory.mktemp("alone"), None, patch)


@pytest.mark.parametrize("poison", [nan, overflow, broken, short])
def test_their_poison_is_theirs(model_folder, tmp_path, undisturbed, monkeypatch, poison):
    found = run(model_folder, tmp_path, poison, monkeypatch)
    assert found.keys() == undisturbed.keys()
    for name, tensor in found.items():
        assert tensor.tobytes() == undisturbed[name].tobytes(), name


def test_a_limit_below_the_weights_is_said_at_the_start(model_folder, tmp_path):
    config = {"model": (f"{MODEL}={model_folder}",), "data_dir": tmp_path, "memory_mib": 64}
    words = f"memory_mib: 64 MiB do not suffice for the weights of {MODEL}"
    with pytest.raises(Invalid, match=words), _served({"port": 0} | config):
        pass
