"""Nobody else's: every route, asked with another owner's ids, answers as for ids that never were.

All ids begin with the id of their session, so putting a fresh uuid in its place makes an id of the
same form that is unknown.
"""

import ast
import gc
import itertools
import json
import re
import uuid
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import pytest
import tinker

from trimtab.wire import trimtab_pb2 as pb
from trimtab.wire.app import BASE, OPENAI, OPENAI_BASE, ROUTES

from .live import MODEL, connected, prompt

# ------------------------------------------------------------------ the matrix
# Route: its probes, from the ids under attack (t) and the caller's own (m). A probe is the values
# of the path and a body. A route without an id of anybody's has no probe.

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


def training_data(model_id, seq_id, sequence_id="", loss="cross_entropy", loss_id=""):
    """A forward_backward of three tokens; with a sequence, spans say that it was sampled there."""
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss)
    datum = message.data.add()
    chunk = datum.model_input.add()
    chunk.encoded_text.tokens = b"".join(n.to_bytes(4, "little") for n in (3, 1, 1))
    tensors = {"target_tokens": (pb.DTYPE_INT64, (1, 1, 1))}
    if loss == "stable_reinforce":
        tensors |= {n: (pb.DTYPE_FLOAT32, (0, 0, 0)) for n in ("logprobs", "advantages")}
    for name, (dtype, values) in tensors.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = dtype
        width = 8 if dtype == pb.DTYPE_INT64 else 4
        tensor.dense = b"".join(v.to_bytes(width, "little") for v in values)
    if loss_id:
        message.loss_fn_config_v2["loss_id"].text = loss_id
    if sequence_id:
        span = datum.model_input_spans.add().prompt_tokens
        span.sequence_id, span.offset, span.length = sequence_id, 2, 1
        for offset, spans in ((0, datum.model_input_spans), (0, datum.loss_fn_input_spans)):
            span = spans.add().sampled_tokens
            span.sequence_id, span.offset = sequence_id, offset
            span.length = 2 if spans is datum.model_input_spans else 3
    return message.SerializeToString()


def path_values(t, kind="weights"):
    return {"run": t.run, "kind": kind, "name": "a"}


MATRIX = {
    "GET /healthz": lambda t, m: [],
    "POST /client/config": lambda t, m: [],
    "POST /client/dynamic_config": lambda t, m: [],
    "GET /get_server_capabilities": lambda t, m: [],
    "POST /telemetry": lambda t, m: [],
    "POST /auth/token": lambda t, m: [],
    "GET /auth/apikey/me": lambda t, m: [],
    "POST /create_session": lambda t, m: [],
    "POST /session_heartbeat": lambda t, m: [({}, {"session_id": t.session})],
    "GET /sessions": lambda t, m: [],
    "POST /sessions/search": lambda t, m: [({}, {"session_id": t.session})],
    "GET /sessions/{session_id}": lambda t, m: [({"session_id": t.session}, None)],
    "PUT /sessions/{session_id}/project": lambda t, m: [
        ({"session_id": t.session}, {"project_id": "p"})
    ],
    "GET /sessions/{session_id}/trace_export": lambda t, m: [({"session_id": t.session}, None)],
    "POST /create_model": lambda t, m: [
        ({}, {"session_id": t.session, "model_seq_id": m.place(), "base_model": MODEL,
              "lora_config": {"rank": 2}}),
    ],
    "POST /get_info": lambda t, m: [({}, {"model_id": t.run})],
    "POST /create_custom_loss": lambda t, m: [
        ({}, {"session_id": t.session, "custom_loss_seq_id": m.place(), "name": "mine",
              "inputs": [], "graph": {"nodes": []}}),
    ],
    "POST /forward_backward": lambda t, m: [
        ({}, training_data(t.run, t.next())),
        ({}, training_data(m.run, m.next(), t.sequence)),
        ({}, training_data(m.run, m.next(), t.sequence, "stable_reinforce")),
        ({}, training_data(m.run, m.next(), loss="custom", loss_id=f"{t.session}:loss:0")),
    ],
    "POST /optim_step": lambda t, m: [
        ({}, {"model_id": t.run, "seq_id": t.next(), "adam_params": {}})
    ],
    "POST /save_weights": lambda t, m: [
        ({}, {"model_id": t.run, "seq_id": t.next(), "path": "b"})
    ],
    "POST /save_weights_for_sampler": lambda t, m: [
        ({}, {"model_id": t.run, "seq_id": t.next(), "path": "b"})
    ],
    "POST /save_weights_external": lambda t, m: [
        ({}, {"model_id": t.run, "seq_id": t.next(), "path": "b"})
    ],
    "POST /load_weights": lambda t, m: [
        ({}, {"model_id": t.run, "seq_id": t.next(), "path": m.weights, "optimizer": False}),
        ({}, {"model_id": m.run, "seq_id": m.next(), "path": t.weights, "optimizer": False}),
        ({}, {"session_id": t.session, "model_seq_id": m.place(), "path": m.weights,
              "optimizer": True}),
        ({}, {"session_id": m.session, "model_seq_id": m.place(), "path": t.weights,
              "optimizer": True}),
    ],
    "GET /training_runs": lambda t, m: [],
    "GET /training_runs/{run}": lambda t, m: [({"run": t.run}, None)],
    "GET /training_runs/{run}/checkpoints": lambda t, m: [({"run": t.run}, None)],
    f"POST {CHECKPOINT}/publish": lambda t, m: [(path_values(t), None)],
    f"DELETE {CHECKPOINT}/publish": lambda t, m: [(path_values(t), None)],
    f"PUT {CHECKPOINT}/ttl": lambda t, m: [(path_values(t), {"ttl_seconds": None})],
    "GET /training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls": (
        lambda t, m: [(path_values(t), None)]
    ),
    "GET /checkpoints": lambda t, m: [],
    "POST /weights_info": lambda t, m: [
        ({}, {"tinker_path": t.weights}), ({}, {"tinker_path": t.sampler_weights}),
    ],
    "POST /copy_weights": lambda t, m: [
        ({}, {"source_path": t.weights, "destination_project_id": "p"}),
        ({}, {"source_path": t.weights, "session_id": m.session, "model_seq_id": m.place()}),
        ({}, {"source_path": m.weights, "session_id": t.session, "model_seq_id": m.place()}),
    ],
    "GET /downloads/{name}": lambda t, m: [],
    "POST /create_sampling_session": lambda t, m: [
        ({}, {"session_id": t.session, "sampling_session_seq_id": m.place(), "base_model": MODEL}),
        ({}, {"session_id": m.session, "sampling_session_seq_id": m.place(),
              "model_path": t.sampler_weights}),
    ],
    "POST /join_sampling_session": lambda t, m: [({}, {"sampling_session_id": t.sampler})],
    "GET /samplers/{sampler_id}": lambda t, m: [({"sampler_id": t.sampler}, None)],
    "POST /asample": lambda t, m: [
        ({}, {"sampling_session_id": t.sampler, "seq_id": 40, "prompt": PROMPT,
              "sampling_params": {"max_tokens": 1}}),
    ],
    "POST /retrieve_future": lambda t, m: [
        ({}, {"request_id": t.request}), ({}, {"request_id": t.sample}),
    ],
    "POST /retrieve_futures": lambda t, m: [
        ({}, {"target": {"sampling_session_id": t.sampler}, "timeout": 0}),
        ({}, {"target": {"sampling_session_id": m.sampler}, "timeout": 0,
              "retrieved_request_ids": [t.sample, t.request]}),
    ],
    "POST /cancel_future": lambda t, m: [
        ({}, {"request_id": t.request}), ({}, {"request_id": t.sample}),
    ],
    "GET /billing/usage/events": lambda t, m: [],
    "GET /billing/usage/checkpoints/current": lambda t, m: [],
    "GET /audit": lambda t, m: [],
    f"DELETE {CHECKPOINT}": lambda t, m: [
        (path_values(t, kind), None) for kind in ("weights", "sampler_weights", "external_weights")
    ],
    "POST /unload_model": lambda t, m: [({}, {"model_id": t.run})],
    "POST /sessions/{session_id}/finish": lambda t, m: [
        ({"session_id": t.session}, {"reason": {"type": "success"}})
    ],
    "DELETE /auth/apikey/me": lambda t, m: [],
}  # fmt: skip

# The same under the other base URL, where the key is a bearer token.
OPENAI_MATRIX = {
    "GET /models": lambda t, m: [],
    "GET /models/{model:path}": lambda t, m: [({"model": t.sampler_weights}, None)],
    "POST /completions": lambda t, m: [
        ({}, {"model": t.sampler_weights, "prompt": [1, 2], "max_tokens": 1}),
        ({}, {"model": t.sampler_weights, "prompt": [1, 2], "max_tokens": 1, "stream": True}),
    ],
    "POST /chat/completions": lambda t, m: [
        ({}, {"model": t.sampler_weights, "max_tokens": 1,
              "messages": [{"role": "user", "content": "a"}]}),
    ],
}  # fmt: skip

# The same to everybody: ids that are only acknowledged, and a loss that nobody has made.
SILENT = {("POST /retrieve_futures", 1), ("POST /forward_backward", 3)}
# A loss that takes what it cannot check answers the same and counts; see `provenance_unverified`.
COUNTED = {("POST /forward_backward", 1)}


def ids_of(training, sampling):
    """Everything a session has, and a counter of its model's seq_ids, four of which are used."""
    run, sampler = training.model_id, sampling._sampling_session_id
    counter, places = itertools.count(4), itertools.count(50)
    return SimpleNamespace(
        session=run.split(":")[0], run=run, sampler=sampler,
        weights=f"tinker://{run}/weights/a", sampler_weights=f"tinker://{run}/sampler_weights/a",
        request=f"{run}:1", sample=f"{sampler}:0", sequence=f"{sampler}:0:0",
        next=lambda: next(counter), place=lambda: next(places),
    )  # fmt: skip


def unknown(ids):
    """The same ids, of a session that never was."""
    fresh = str(uuid.uuid4())
    changed = {
        name: value.replace(ids.session, fresh)
        for name, value in vars(ids).items() if isinstance(value, str)
    }  # fmt: skip
    return SimpleNamespace(**changed, next=lambda: 99)


@pytest.fixture(scope="module")
def two(shared):
    """A session each of alice's and bob's, with one of everything."""
    with connected(shared.server, shared.alice) as alice, connected(shared.server, shared.bob) as b:
        found = []
        for client in (alice, b):
            training = client.create_lora_training_client(MODEL, rank=2).result()
            training.save_state("a").result()
            training.save_weights_for_sampler("a").result()
            training.save_weights_external("a").result()
            sampling = client.create_sampling_client(base_model=MODEL).result()
            sampling.sample(prompt(1, 2, 3), 1, tinker.SamplingParams(max_tokens=3)).result()
            found.append(ids_of(training, sampling))
        yield SimpleNamespace(alice=found[0], bob=found[1])


@pytest.fixture
def ask(shared):
    """Sends one probe with a key; the status and the words, a promise's those of its result."""
    with httpx.Client(base_url=f"{shared.url}{BASE}", timeout=40) as http:

        def ask(key, route, values, body):
            method, template = route.split(" ")
            url = template.format(**{name: quote(value, safe="") for name, value in values.items()})
            content = body if isinstance(body, bytes | None) else json.dumps(body)
            http.headers["X-API-Key"] = key
            answer = http.request(method, url, content=content)
            if answer.status_code == 200 and is_promise(answer.content):
                body = {"request_id": answer.json()["request_id"]}
                answer = http.post("/retrieve_future", json=body)
            return answer.status_code, answer.text

        yield ask


def is_promise(content):
    if not content.startswith(b'{"request_id"'):
        return False
    return set(json.loads(content)) <= {"request_id", "model_id", "sample_sequence_ids"}


def test_the_matrix_has_a_row_for_each_route_and_no_other():
    assert sorted(MATRIX) == sorted(f"{route.method} {route.path}" for route in ROUTES)


def test_another_owners_checkpoints_are_unknown_to_openais_clients_too(shared, two):
    assert sorted(OPENAI_MATRIX) == sorted(f"{route.method} {route.path}" for route in OPENAI)

    def asked(http, key, route, target):
        method, template = route.split(" ")
        http.headers["Authorization"] = f"Bearer {key}"
        for values, body in OPENAI_MATRIX[route](target, two.bob):
            quoted = {name: quote(value, safe="") for name, value in values.items()}
            url = template.replace(":path", "").format(**quoted)
            answer = http.request(method, url, json=body)
            yield answer.status_code, answer.text.replace(target.session, "S")

    with httpx.Client(base_url=f"{shared.url}{OPENAI_BASE}", timeout=40) as http:
        for route in OPENAI_MATRIX:
            of_alice = list(asked(http, shared.bob, route, two.alice))
            assert of_alice == list(asked(http, shared.bob, route, unknown(two.alice))), route
            assert all(status == 404 and "is unknown" in text for status, text in of_alice), route
            assert all(status == 200 for status, _ in asked(http, shared.alice, route, two.alice))
        http.headers["Authorization"] = f"Bearer {shared.bob}"
        assert two.alice.session not in http.get("/models").text


def test_another_owners_ids_are_unknown_ids(shared, two, ask):
    """Bob asks; then alice asks the same of her own, and is told something else."""
    theirs = SimpleNamespace(**{**vars(two.alice), "next": lambda: 99})
    never = unknown(two.alice)
    for route, probes in MATRIX.items():
        told = []
        for target in (theirs, never):
            told.append([])
            for values, body in probes(target, two.bob):
                status, text = ask(shared.bob, route, values, body)
                told[-1].append((status, text.replace(target.session, "S")))
        for number, (of_alice, of_nobody) in enumerate(zip(*told, strict=True)):
            where = (route, number)
            assert scrubbed(of_alice) == scrubbed(of_nobody), where
            if where not in SILENT | COUNTED and route != "POST /sessions/search":
                assert of_alice[0] in (200, 400, 404), where
                assert re.search("is unknown|did not sample", of_alice[1]), of_alice
    for route, probes in MATRIX.items():
        for number, (values, body) in enumerate(probes(two.alice, two.alice)):
            status, text = ask(shared.alice, route, values, body)
            if (route, number) not in SILENT | COUNTED:
                assert not re.search("is unknown|did not sample", text), (route, number, text)
                assert status in (200, 400, 408, 410), (route, number, status, text)


def scrubbed(answer):
    """Without what differs between any two requests of one client: their numbers."""
    status, text = answer
    return status, re.sub(r":(train|sample):\d+(:\d+)?|seq_id \d+", ":id", text)


def test_lists_hold_nothing_of_others(shared, alices):
    headers = {"X-API-Key": shared.bob}
    scope = {"access_scope": "accessible", "starting_on": "2026-01-01T00:00:00Z",
             "ending_before": "2026-01-02T00:00:00Z"}  # fmt: skip
    with httpx.Client(base_url=f"{shared.url}{BASE}", headers=headers, params=scope) as http:
        for route in ROUTES:
            if route.method == "GET" and "{" not in route.path:
                answer = http.get(route.path)
                assert answer.status_code == 200, (route.path, answer.text)
                assert alices.session not in answer.text and "alice" not in answer.text


# ------------------------------------------------------------------ names and paths

REFUSED = (
    "..", ".", "a/../b", "../../etc/passwd", "/etc/passwd", "a..b", "a\\b", "a\0b", "a\nb", "",
    " a", "a ", "x" * 129, "\u202eevil", "\x7f", "..\\..\\x",
)  # fmt: skip
TAKEN = ("%2e%2e", "..%2f..%2fx".replace("..", "%2e%2e"), "é漢字🙂", "con", "nul.txt", "-rf",
         "x" * 128, "~", "$HOME", "a?b#c", "a;b", "lock", "keys.sqlite3", "*")  # fmt: skip


def outside(shared):
    """Every path that a name could have made where none belongs."""
    entries = {str(path.relative_to(shared.data_dir)) for path in shared.data_dir.rglob("*")}
    return {
        entry for entry in entries
        if not re.fullmatch(r"(checkpoints|snapshots)(/[0-9a-f]{32}(\.partial)?(/[\w.]+)?)?", entry)
    }  # fmt: skip


def test_names_never_leave_the_data_directory(shared, two, ask):
    before = outside(shared)
    parents = set(shared.data_dir.parent.iterdir())
    with connected(shared.server, shared.bob) as client:
        training = client.create_lora_training_client(MODEL, rank=2).result()
        for name in REFUSED:
            with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="name"):
                training.save_state(name).result()
        for name in TAKEN:
            assert training.save_state(name).result().path.endswith(f"/weights/{name}")
        run = training.model_id
        listed = ask(shared.bob, "GET /training_runs/{run}/checkpoints", {"run": run}, None)
        found = {each["checkpoint_id"] for each in json.loads(listed[1])["checkpoints"]}
        assert found == {f"weights/{name}" for name in TAKEN}
        for name in TAKEN:
            values = {"run": run, "kind": "weights", "name": name}
            assert ask(shared.bob, f"DELETE {CHECKPOINT}", values, None)[0] == 200, name
        for name in REFUSED:
            values = {"run": run, "kind": "weights", "name": name}
            assert ask(shared.bob, f"DELETE {CHECKPOINT}", values, None)[0] in (400, 404, 405), name
    assert outside(shared) == before
    assert set(shared.data_dir.parent.iterdir()) == parents


@pytest.mark.parametrize(
    "path",
    ["", "tinker://", "tinker://a", "tinker://a/weights", "tinker://a/weights/b/c", "file:///etc",
     "tinker://../weights/a", "tinker://a/../../etc", "tinker://a/weights/..", "a/weights/b",
     "tinker://a/optimizer/b", "tinker:///weights/a", "tinker://a/weights/" + "x" * 5000,
     "tinker://a/weights/a\0b"],
)  # fmt: skip
def test_paths_are_three_plain_segments(shared, ask, path):
    for route, body in (
        ("POST /weights_info", {"tinker_path": path}),
        ("POST /copy_weights", {"source_path": path, "destination_project_id": "p"}),
    ):
        status, text = ask(shared.bob, route, {}, body)
        assert status in (400, 404) and len(text) < 1000, text


# ------------------------------------------------------------------ nothing is run that was stored


@pytest.fixture
def uncollected():
    """No garbage is collected meanwhile: Python 3.11's parser counts wrongly when a finalizer runs
    in the middle of it (https://github.com/python/cpython/issues/106905)."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_nothing_stored_is_ever_executed():
    """Only safetensors and JSON come back from disk: no pickle, marshal, shelve, eval or exec, and
    no torch.load, anywhere in the package."""
    for file in sorted(Path("trimtab").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "marshal", "shelve", "dill", "joblib"}, file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "compile"), (file, called)
                assert not called.endswith("np.load"), (file, called)
