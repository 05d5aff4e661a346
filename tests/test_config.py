"""Where values come from, what is refused, and that the page about it is complete."""

import re
from pathlib import Path

import pytest

from trimtab.config import ServerConfig, load_config, model_source
from trimtab.errors import Invalid
from trimtab.server import Server
from trimtab.service.keys import Keys

MODEL = {"model": ["org/tiny"]}


def load(file=None, flags=None, environment=None):
    return load_config(file, MODEL | (flags or {}), environment or {})


def refusal(**changes):
    with pytest.raises(Invalid) as found:
        load(**changes)
    return str(found.value)


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path):
    file = tmp_path / "trimtab.toml"
    file.write_text('port = 1\nthreads = 2\nmodel = "a/b"\nmax_context = 64\n')
    environment = {"TRIMTAB_PORT": "3", "TRIMTAB_MAX_CONTEXT": "128", "HOME": "/"}
    config = load_config(file, {"port": "5"}, environment)
    assert (config.port, config.max_context, config.threads) == (5, 128, 2)
    assert config.host == "127.0.0.1" and config.model == ("a/b",)


def test_lists_from_the_environment_have_commas():
    environment = {"TRIMTAB_MODEL": "a/b,c/d", "TRIMTAB_API_KEY": "tml-1,tml-2"}
    config = load_config(None, {}, environment)
    assert config.model == ("a/b", "c/d") and config.api_key == ("tml-1", "tml-2")


def test_unknown_knobs_are_refused_and_their_source_is_named(tmp_path):
    file = tmp_path / "trimtab.toml"
    file.write_text("prot = 1\n")
    assert refusal(file=file).startswith(f"prot (from {file}): unknown; the knobs are model, host")
    assert "colour (from the environment)" in refusal(environment={"TRIMTAB_COLOUR": "red"})
    assert "x (from the command line)" in refusal(flags={"x": 1})
    assert load(environment={"TRIMTAB_HOME": "/"}).port == 8000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": "70000"}, "port (from the command line): input should be less than or equal"),
        ({"dtype": "int3"}, "dtype (from the command line): input should be 'auto', 'float32' or"),
        ({"api_key": ["secret"]}, "api_key (from the command line): a key starts with tml-"),
        ({"model": ["a/b", "a/b"]}, "two models are named 'a/b'"),
        ({"model": ["a/b=/nowhere"]}, "'a/b=/nowhere': there is no folder '/nowhere'"),
        ({"model": ["./nowhere"]}, "there is no folder"),
        ({"model": ["a/b/c/d"]}, "'a/b/c/d' is no name like org/model"),
        ({"model": [".."]}, "choose one with NAME=FOLDER"),
        ({"hold_seconds": "40"}, "hold_seconds (from the command line): input should be less than"),
    ],
)
def test_a_wrong_value_is_a_sentence(flags, words, monkeypatch, tmp_path):
    (tmp_path / "a b" / "c").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a b" / "c")
    assert words in refusal(flags=flags)
    assert "secret" not in refusal(flags=flags)


def test_a_missing_or_broken_file_is_a_sentence(tmp_path):
    assert "cannot be read" in refusal(file=tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("port = = 1")
    assert "is not valid TOML" in refusal(file=tmp_path / "bad.toml")


def served(path, **flags):
    """A server that is built and listens nowhere for long: its host."""
    config = load(flags={"data_dir": path, "port": 0} | flags)
    server = Server(config)
    server._listener.close()
    server._keys.close()
    return config.host


def test_other_machines_may_connect_with_a_key_alone(tmp_path):
    with pytest.raises(Invalid, match=r"host: 0.0.0.0 can be reached from other machines"):
        served(tmp_path / "a", host="0.0.0.0")
    assert served(tmp_path / "a", host="0.0.0.0", api_key=["tml-1"]) == "0.0.0.0"
    for host in ("localhost", "127.0.0.2"):
        assert served(tmp_path / "a", host=host) == host
    keys = Keys(tmp_path / "b")
    key, _ = keys.create("alice")
    assert served(tmp_path / "b", host="0.0.0.0") == "0.0.0.0"
    keys.revoke(key.key_id)
    keys.close()
    with pytest.raises(Invalid, match="create a key: `trimtab keys create OWNER"):
        served(tmp_path / "b", host="0.0.0.0")


def test_what_a_model_is_called(tmp_path, monkeypatch):
    folder = tmp_path / "Qwen" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    assert model_source(str(folder)).name == "Qwen/Qwen3-0.6B"
    named = model_source(f"my/name={folder}")
    assert (named.name, named.path, named.folder) == ("my/name", folder, True)
    hub = model_source("Qwen/Qwen3-0.6B")
    assert (hub.name, hub.path, hub.folder) == ("Qwen/Qwen3-0.6B", Path("Qwen/Qwen3-0.6B"), False)
    monkeypatch.chdir(tmp_path)
    assert model_source("Qwen/Qwen3-0.6B").path == folder


def test_the_page_lists_every_knob_with_its_default_and_its_words():
    page = Path("docs/configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", page, re.M)
    expected = []
    for name, field in ServerConfig.model_fields.items():
        default = "required" if field.is_required() else field.get_default()
        shown = "none" if default in (None, ()) else str(default)
        expected.append((name, shown, field.description))
    assert rows == expected
