"""The REST client of the SDK against a whole server: runs, checkpoints, sessions, counts."""

import json
import urllib.error
import urllib.request
import warnings
from datetime import UTC, datetime, timedelta

import httpx
import numpy as np
import pyrage
import pytest
import tinker
from tinker import types

from .live import MODEL, connected, datum, prompt

# load_state is deprecated in the SDK and still called; PEFT asks transformers by an old name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*load_state:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture(scope="module")
def alice(shared):
    return tinker.RestClient(base_url=shared.url, api_key=shared.alice)


@pytest.fixture(scope="module")
def bob(shared):
    return tinker.RestClient(base_url=shared.url, api_key=shared.bob)


def near(moment, seconds=120):
    return abs((moment - datetime.now(UTC)).total_seconds()) < seconds


@pytest.fixture
def run(shared):
    """A run of alice's for one test, with a checkpoint of each kind named `a`."""
    with connected(shared.server, shared.alice) as client:
        training = client.create_lora_training_client(MODEL, rank=4).result()
        training.save_state("a").result()
        training.save_weights_for_sampler("a").result()
        yield training


# ------------------------------------------------------------------ runs and checkpoints


def test_runs_in_pages_newest_first(alice, alices, run):
    page = alice.list_training_runs(limit=1).result()
    assert [each.training_run_id for each in page.training_runs] == [run.model_id]
    total = page.cursor.total_count
    assert (page.cursor.limit, page.cursor.offset) == (1, 0) and total >= 2
    everything = alice.list_training_runs(limit=100).result().training_runs
    assert len(everything) == total and alices.run in [r.training_run_id for r in everything]
    assert not alice.list_training_runs(project_id="nobody's").result().training_runs


def test_a_run_tells_what_it_is_and_its_last_checkpoints(alice, alices):
    found = alice.get_training_run_by_tinker_path(alices.weights).result()
    assert (found.training_run_id, found.base_model) == (alices.run, MODEL)
    assert (found.model_owner, found.is_lora, found.lora_rank) == ("alice", True, 4)
    assert not found.corrupted and near(found.last_request_time)
    assert found.user_metadata == {"recipe": "test"}
    assert found.last_checkpoint.tinker_path == alices.weights
    assert found.last_sampler_checkpoint.checkpoint_id == "sampler_weights/first"


def test_checkpoints_of_a_run_and_of_an_owner(alice, alices):
    found = alice.list_checkpoints(alices.run).result().checkpoints
    assert {each.tinker_path: each.checkpoint_type for each in found} == {
        alices.weights: "training",
        alices.sampler: "sampler",
        alices.external: "external",
    }
    assert all(each.size_bytes > 1000 and not each.public for each in found)
    assert all(near(each.time) and each.expires_at is None for each in found)
    mine = alice.list_user_checkpoints(limit=1000).result()
    assert {each.tinker_path for each in found} <= {c.tinker_path for c in mine.checkpoints}
    assert mine.cursor.total_count == len(mine.checkpoints)


def test_weights_info(alice, alices):
    info = alice.get_weights_info_by_tinker_path(alices.weights).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (MODEL, 4, True)


def test_deleting_takes_row_and_files(alice, run, shared):
    home = shared.data_dir / "checkpoints"
    before = {path.name for path in home.iterdir()}
    path = run.save_state("gone").result().path
    (folder,) = {path.name for path in home.iterdir()} - before
    alice.delete_checkpoint_from_tinker_path(path).result()
    assert folder not in {path.name for path in home.iterdir()}
    with pytest.raises(tinker.NotFoundError, match="is unknown"):
        alice.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.RequestFailedError, match="is unknown"):
        run.load_state(path).result()


def test_a_deleted_sampler_checkpoint_can_no_longer_be_sampled_from(alice, shared, run):
    path = f"tinker://{run.model_id}/sampler_weights/a"
    with connected(shared.server, shared.alice) as client:
        sampling = client.create_sampling_client(model_path=path).result()
        sampling.compute_logprobs(prompt(1, 2, 3)).result()
        alice.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            client.create_sampling_client(model_path=path).result()


def test_time_to_live_is_set_and_lifted(alice, run):
    path = f"tinker://{run.model_id}/weights/a"
    alice.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    (found,) = [
        c for c in alice.list_checkpoints(run.model_id).result().checkpoints
        if c.tinker_path == path
    ]  # fmt: skip
    assert near(found.expires_at - timedelta(seconds=7200))
    alice.set_checkpoint_ttl_from_tinker_path(path, None).result()
    last = alice.get_training_run(run.model_id).result().last_checkpoint
    assert last.expires_at is None
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds must lie between 3600"):
        alice.set_checkpoint_ttl_from_tinker_path(path, 60).result()


def test_published_is_readable_by_all_and_changeable_by_its_owner(alice, bob, run, shared):
    path = f"tinker://{run.model_id}/weights/a"
    with pytest.raises(tinker.NotFoundError):
        bob.get_weights_info_by_tinker_path(path).result()
    for _ in range(2):  # twice is fine
        alice.publish_checkpoint_from_tinker_path(path).result()
    assert bob.get_weights_info_by_tinker_path(path).result().base_model == MODEL
    seen = bob.list_checkpoints(run.model_id).result().checkpoints
    assert [(each.tinker_path, each.public) for each in seen] == [(path, True)]
    assert bob.get_training_run(run.model_id, "accessible").result().last_sampler_checkpoint is None
    for refused in (
        bob.get_training_run(run.model_id),
        bob.delete_checkpoint_from_tinker_path(path),
        bob.unpublish_checkpoint_from_tinker_path(path),
        bob.set_checkpoint_ttl_from_tinker_path(path, None),
    ):
        with pytest.raises(tinker.NotFoundError):
            refused.result()
    with connected(shared.server, shared.bob) as client:
        loaded = client.create_training_client_from_state(path).result()
        loaded.forward_backward([datum([1, 2, 3])], "cross_entropy").result()
        alice.unpublish_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.RequestFailedError, match="is unknown"):
            loaded.load_state(path).result()


# ------------------------------------------------------------------ copies


def test_a_copy_is_a_checkpoint_of_its_own_and_no_model(alice, alices, shared):
    path = alice.copy_weights(alices.weights, "archive", ttl_seconds=3600).result()
    assert path.endswith("/weights/first") and path != alices.weights
    run_id = path.split("/")[2]
    (copied,) = alice.list_checkpoints(run_id).result().checkpoints
    assert near(copied.expires_at - timedelta(hours=1)) and copied.size_bytes > 1000
    runs = alice.list_training_runs(project_id="archive").result().training_runs
    assert [each.training_run_id for each in runs] == [run_id]
    with connected(shared.server, shared.alice) as client:
        here = client.create_training_client_from_state_with_optimizer(path).result()
        there = client.create_training_client_from_state_with_optimizer(alices.weights).result()
        one, other = (
            t.forward([datum([5, 6, 7])], "cross_entropy").result().metrics for t in (here, there)
        )
        assert one["loss:sum"] == other["loss:sum"]


def test_a_copy_outlives_its_source_and_shares_its_bytes(alice, run, shared):
    source = f"tinker://{run.model_id}/sampler_weights/a"
    path = alice.copy_weights(source, "archive").result()
    shared_files = [
        file for file in (shared.data_dir / "checkpoints").rglob("*")
        if file.is_file() and file.stat().st_nlink == 2
    ]  # fmt: skip
    assert shared_files
    alice.delete_checkpoint_from_tinker_path(source).result()
    with connected(shared.server, shared.alice) as client:
        sampling = client.create_sampling_client(model_path=path).result()
        assert len(sampling.compute_logprobs(prompt(1, 2, 3)).result()) == 3


def test_a_copy_takes_the_place_of_a_model_once(shared, alices):
    headers = {"X-API-Key": shared.alice, "X-Idempotency-Key": "once"}
    with httpx.Client(base_url=f"{shared.url}/api/v1", headers=headers) as http:
        session = http.post("/create_session", json={}).json()["session_id"]
        body = {"source_path": alices.weights, "session_id": session, "model_seq_id": 3}
        first, again = (http.post("/copy_weights", json=body).json() for _ in range(2))
        assert first == again == {"tinker_path": f"tinker://{session}:train:3/weights/first"}
        http.headers["X-Idempotency-Key"] = "twice"
        taken = http.post("/copy_weights", json=body)
        assert taken.status_code == 400 and "model_seq_id: 3 is in use already" in taken.text
        model = {"session_id": session, "model_seq_id": 3, "base_model": MODEL}
        taken = http.post("/create_model", json=model)
        assert taken.status_code == 400 and "already used by a copy_weights" in taken.text
        step = {"model_id": f"{session}:train:3", "seq_id": 1, "adam_params": {}}
        promise = http.post("/optim_step", json=step).json()
        failed = http.post("/retrieve_future", json={"request_id": promise["request_id"]}).json()
        assert failed["category"] == "user" and "is a copied checkpoint" in failed["error"]
        token = http.post("/copy_weights", json=body | {"weights_access_token": "x"})
        assert token.status_code == 400 and "weights_access_token: not offered" in token.text


# ------------------------------------------------------------------ external weights


def fetched(urls):
    """Every file, by a plain GET without a key."""
    return {name: urllib.request.urlopen(url, timeout=20).read() for name, url in urls.items()}


def test_external_weights_load_in_transformers_and_peft_and_answer_the_same(
    alice, alices, model_folder, tmp_path
):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    answer = alice.get_external_weights_urls(alices.external).result()
    assert answer.expires - datetime.now(UTC) > timedelta(minutes=50)
    for name, content in fetched(answer.urls).items():
        (tmp_path / name).write_bytes(content)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        logprobs = model(tokens).logits.log_softmax(-1)[0]
        plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        untrained = plain(tokens).logits.log_softmax(-1)[0]
    ours = np.array(alices.logprobs[1:], np.float32)
    theirs = logprobs[torch.arange(4), tokens[0, 1:]].numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(ours - untrained[torch.arange(4), tokens[0, 1:]].numpy()).max() > 0.01


def test_encrypted_external_weights_open_to_their_recipients_alone(alice, run):
    mine, other = (pyrage.x25519.Identity.generate() for _ in range(2))
    path = run.save_weights_external(
        "sealed", age_encryption_recipients=[str(mine.to_public())]
    ).result().path  # fmt: skip
    files = fetched(alice.get_external_weights_urls(path).result().urls)
    assert set(files) == {"adapter_config.json.age", "adapter_model.safetensors.age"}
    sealed = files["adapter_config.json.age"]
    assert json.loads(pyrage.decrypt(sealed, [mine]))["peft_type"] == "LORA"
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed, [other])
    with pytest.raises(tinker.BadRequestError, match=r"age_encryption_recipients\[0\]: 'age1x'"):
        run.save_weights_external("bad", age_encryption_recipients=["age1x"]).result()


def test_external_weights_have_names_like_any_checkpoint(alice, run):
    first = run.save_weights_external("x").result()
    assert run.save_weights_external("x").result() == first
    run.forward_backward([datum([1, 2, 3])], "cross_entropy").result()
    run.optim_step(tinker.AdamParams()).result()
    with pytest.raises(tinker.BadRequestError, match="exists with other contents"):
        run.save_weights_external("x").result()
    with pytest.raises(tinker.BadRequestError, match="only weights can be loaded"):
        run.load_state(first.path).result()


def test_a_link_opens_its_own_file_and_no_other(alice, alices):
    urls = alice.get_external_weights_urls(alices.external).result().urls
    url = urls["adapter_config.json"]
    for wrong in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("adapter_config.json", "..%2f..%2fkeys.sqlite3"),
        url[:-3] + "abc",
        url.split("?")[0],
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(wrong, timeout=20)
        assert refused.value.code == 404


# ------------------------------------------------------------------ sessions


def test_sessions_are_listed_and_told(alice, alices):
    assert alices.session in alice.list_sessions(limit=100).result().sessions
    found = alice.get_session(alices.session).result()
    assert found.training_run_ids == [alices.run]
    assert alices.sampler_id in found.sampler_ids
    assert found.user_metadata == {"team": "red"}
    sampler = alice.get_sampler(alices.sampler_id).result()
    assert (sampler.base_model, sampler.model_path) == (MODEL, alices.sampler)


def search(client, **request):
    with warnings.catch_warnings():  # that it is experimental
        warnings.simplefilter("ignore")
        return client.search_sessions(types.SessionSearchRequest(**request)).result()


def test_sessions_are_sought(alice, bob, alices, shared):
    (found,) = search(alice, session_id=alices.session).sessions
    assert (found.owner, found.project_id) == ("tml:user:alice", "default")
    assert found.checkpoints_count == 3 and found.checkpoint_storage_bytes > 3000
    assert found.status.type == "active" and near(found.created_at, 600)
    assert not search(bob, session_id=alices.session).sessions
    red = search(alice, user_metadata={"team": "red"}).sessions
    assert alices.session in [each.session_id for each in red]
    assert not search(alice, user_metadata={"team": "blue"}).sessions
    with connected(shared.server, shared.bob, display_name="Nightly run 7", project_id="p") as c:
        session = c.create_sampling_client(base_model=MODEL).result()._sampling_session_id
    session = session.split(":")[0]
    done = [{"type": "client_finished", "reasons": ["success"]}]
    for request in (
        {"display_name": "run night"},
        {"project_ids": ["p"]},
        {"statuses": done, "display_name": "nightly"},
    ):
        assert [each.session_id for each in search(bob, **request).sessions] == [session]
    for request in (
        {"display_name": "run 8"},
        {"statuses": [{"type": "active"}], "project_ids": ["p"]},
    ):
        assert not search(bob, **request).sessions
    bob.assign_session_project(session, "q").result()
    assert not search(bob, project_ids=["p"]).sessions
    assert search(bob, project_ids=["q"]).sessions


@pytest.mark.parametrize(
    "request_",
    [
        {"display_name": "a " * 51},
        {"user_metadata": {str(n): "" for n in range(51)}},
        {"statuses": [{"type": "active"}] * 51},
    ],
)
def test_a_search_has_bounds(alice, request_):
    (name,) = request_
    with pytest.raises(tinker.BadRequestError, match=f"{name}: 51 conditions"):
        search(alice, **request_)


def test_a_search_is_paged(alice):
    everything = [each.session_id for each in search(alice, limit=200).sessions]
    seen, cursor = [], None
    while True:
        page = search(alice, limit=2, cursor=cursor)
        seen += [each.session_id for each in page.sessions]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == everything and len(seen) >= 3


def test_a_trace_has_a_block_for_each_request(alice, alices):
    url = alice.export_session_trace(alices.session).result()
    events = json.loads(urllib.request.urlopen(url, timeout=20).read())["traceEvents"]
    blocks = [event for event in events if event["ph"] == "X"]
    assert [block["name"] for block in blocks][:3] == [
        "create_model", "forward_backward", "optim_step",
    ]  # fmt: skip
    assert all(block["dur"] >= 0 for block in blocks)
    assert {"thread_name"} == {event["name"] for event in events if event["ph"] == "M"}


# ------------------------------------------------------------------ counts


def test_usage_counts_what_was_done(shared, alices):
    admin = tinker.AdminClient(base_url=shared.url, api_key=shared.alice)
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = (hour - timedelta(hours=1), hour + timedelta(hours=1))
    found = admin.get_billing_usage(*window).result()
    mine = [event for event in found.data if event.session_id == alices.session]
    counts = {}
    for event in mine:
        info = event.event_info
        key = (info.type, getattr(info, "cached", None))
        counts[key] = counts.get(key, 0) + getattr(info, "token_count", getattr(info, "count", 0))
        assert (event.base_model, event.user_name, event.estimated_cost_usd) == (
            MODEL, "alice", None,
        )  # fmt: skip
    assert counts[("training", None)] == 3
    assert counts[("checkpoint", None)] == 3
    assert counts[("sampling_sample", None)] == alices.sampled + 1
    prefill = counts[("sampling_prefill", False)] + counts.get(("sampling_prefill", True), 0)
    assert prefill == 3 + 5
    assert found.sessions[alices.session].user_metadata == {"team": "red"}
    with pytest.raises(tinker.BadRequestError, match="14 days at most"):
        admin.get_billing_usage(hour - timedelta(days=20), hour).result()


def test_storage_now_and_an_audit_of_today(shared, alices, alice, bob):
    admin = tinker.AdminClient(base_url=shared.url, api_key=shared.alice)
    (stored,) = [
        item for item in admin.get_current_checkpoint_storage_usage().result().data
        if item.project_id == "default"
    ]  # fmt: skip
    mine = alice.list_user_checkpoints(limit=1000).result().checkpoints
    assert stored.checkpoint_count >= 3 and stored.org_user_urn == "tml:user:alice"
    assert stored.size_bytes <= sum(each.size_bytes for each in mine)
    lines = admin.get_audit_log("checkpoints").result().entries
    events = [(line.event, line.tinker_path) for line in lines]
    assert ("checkpoint_create", alices.weights) in events
    assert all(near(line.timestamp, 3600) for line in lines)
    assert not admin.get_audit_log("teams").result().entries
    theirs = tinker.AdminClient(base_url=shared.url, api_key=shared.bob)
    assert not [
        e for e in theirs.get_audit_log().result().entries if e.tinker_path == alices.weights
    ]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/training_runs?limit=x", "limit: an integer is required, found 'x'"),
        ("/training_runs?limit=1001", "limit must lie between 1 and 1000, found 1001"),
        ("/training_runs?offset=-1", "offset must not be negative"),
        ("/training_runs?access_scope=all", "access_scope: 'all' is neither"),
        ("/billing/usage/events?starting_on=now&ending_before=x", "starting_on: a time like"),
        ("/audit?day=2026-02-31", "day: a day like 2026-07-13 is required"),
        ("/audit?event_type=x", "event_type: 'x' is not one of all"),
    ],
)
def test_wrong_parameters_are_named(shared, path, words):
    request = urllib.request.Request(
        f"{shared.url}/api/v1{path}", headers={"X-API-Key": shared.alice}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    assert refused.value.code == 400 and words in json.load(refused.value)["detail"]
