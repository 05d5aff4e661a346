"""Tokenizers without a hub: the files of served models, and nothing else of them."""

import json
import os
import subprocess
import sys

import httpx
import pytest

from trimtab.server import tokenizer_name

from .live import MODEL


@pytest.fixture
def hub(shared):
    """As the hub's client asks: the key as a bearer token."""
    headers = {"Authorization": f"Bearer {shared.alice}"}
    with httpx.Client(base_url=shared.url, headers=headers) as http:
        yield http


CLIENT = f"""
import tinker
client = tinker.ServiceClient()
sampling = client.create_sampling_client(base_model={MODEL!r}).result()
tokenizer = sampling.get_tokenizer()
print(tokenizer.encode("the cat sat"), tokenizer.name_or_path)
print(tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}], tokenize=False))
client.close("success").result()
"""


def test_a_sampling_client_finds_its_tokenizer_on_the_server_alone(shared, model_folder, tmp_path):
    """In a process of its own: the hub's client reads its address once, at import."""
    environment = {
        **os.environ, "TINKER_BASE_URL": shared.url, "TINKER_API_KEY": shared.alice,
        "HF_ENDPOINT": shared.url, "HF_TOKEN": shared.alice, "HF_HOME": str(tmp_path),
        "NO_PROXY": "127.0.0.1", "TINKER_TELEMETRY": "0",
    }  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLIENT],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(model_folder).encode("the cat sat")
    told = done.stdout.splitlines()
    assert told[:2] == [f"{expected} {MODEL}", "<|im_start|>user"]
    cached = {path.name for path in tmp_path.rglob("*") if "snapshots" in path.parts}
    assert "tokenizer.json" in cached and not [n for n in cached if n.endswith(".safetensors")]


def test_a_repository_lists_what_is_given_out(hub, model_folder):
    for url in (f"/api/models/{MODEL}", f"/api/models/{MODEL}/revision/main"):
        info = hub.get(url).json()
        names = {sibling["rfilename"] for sibling in info["siblings"]}
        assert (info["id"], len(info["sha"])) == (MODEL, 40)
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert (model_folder / "model.safetensors").exists() and "model.safetensors" not in names


def test_a_file_comes_whole_with_its_digest(hub, model_folder):
    url = f"/{MODEL}/resolve/main/tokenizer.json"
    content = (model_folder / "tokenizer.json").read_bytes()
    head, got = hub.head(url), hub.get(url)
    assert got.content == content and head.content == b""
    for answer in (head, got):
        assert int(answer.headers["content-length"]) == len(content)
        assert answer.headers["etag"] == got.headers["etag"]
        assert len(answer.headers["x-repo-commit"]) == 40
    json.loads(got.content)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (f"/{MODEL}/resolve/main/model.safetensors", "EntryNotFound"),
        (f"/{MODEL}/resolve/main/none.json", "EntryNotFound"),
        (f"/{MODEL}/resolve/main/..%2f..%2fkeys.sqlite3", "EntryNotFound"),
        (f"/{MODEL}/resolve/main/%2fetc%2fpasswd", "EntryNotFound"),
        (f"/{MODEL}/resolve/main/a%00b", "EntryNotFound"),
        (f"/{MODEL}/resolve/../tokenizer.json%2f..%2fmodel.safetensors", None),
        ("/org/other/resolve/main/tokenizer.json", "RepoNotFound"),
        ("/..%2f..%2fetc/resolve/main/passwd", "RepoNotFound"),
        ("/api/models/org/other", "RepoNotFound"),
        (f"/api/models/{MODEL}/tree/main/additional_chat_templates", "EntryNotFound"),
        (f"/api/datasets/{MODEL}", None),
    ],
)
def test_nothing_else_is_given_out(hub, url, code):
    answer = hub.get(url)
    assert answer.status_code == 404
    assert answer.headers.get("x-error-code") == code


def test_a_key_is_asked_for_as_everywhere(shared):
    url = f"{shared.url}/{MODEL}/resolve/main/config.json"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"Authorization": "Bearer hf_x"}).status_code == 401
    assert httpx.get(url, headers={"X-API-Key": shared.alice}).status_code == 401
    good = httpx.get(url, headers={"Authorization": f"Bearer {shared.bob}"})
    assert good.status_code == 200


def test_names_are_looked_up_as_the_sdk_derives_them():
    assert tokenizer_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert tokenizer_name("org/name/variant") == "org/name"
    assert tokenizer_name("gpt2") == "gpt2"
    llama = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
    assert tokenizer_name("meta-llama/Llama-3.2-1B") == llama
