"""Keys and tokens: who is let in, as whom, for how long, and what the SDK makes of it."""

import asyncio
import base64
import json
import os
import stat
import time
from types import SimpleNamespace

import httpx
import jwt
import pytest
import tinker
from tinker.lib._jwt_auth import JwtAuthProvider

from trimtab.errors import Invalid, NotFound, Unauthorized
from trimtab.service.keys import FILE, Keys
from trimtab.wire.access import LINK_SECONDS, TOKEN_SECONDS, Access, InvalidToken
from trimtab.wire.calls import WireSettings

from .live import MODEL, connected


class Clock:
    def __init__(self):
        self.now = 1_800_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def keys(tmp_path, clock):
    keys = Keys(tmp_path / "data", clock)
    yield keys
    keys.close()


# ------------------------------------------------------------------ stored keys


def test_a_key_is_known_by_its_hash_alone(keys, tmp_path):
    _, secret = keys.create("alice", "laptop")
    assert secret.startswith("tml-") and len(secret) == 4 + 43
    assert (keys.find(secret).owner, keys.find(secret).name) == ("alice", "laptop")
    assert keys.find(secret + "x") is None
    keys.close()
    files = list((tmp_path / "data").iterdir())
    assert files and not any(secret[4:].encode() in file.read_bytes() for file in files)
    assert stat.S_IMODE(os.stat(tmp_path / "data" / FILE).st_mode) == 0o600


def test_a_revoked_key_is_refused_at_once_by_whoever_has_the_file_open(keys, tmp_path, clock):
    key, secret = keys.create("alice")
    beside = Keys(tmp_path / "data", clock)  # as `trimtab keys` opens it
    assert keys.find(secret) and keys.live(key.key_id)
    beside.revoke(key.key_id)
    assert keys.find(secret) is None and keys.live(key.key_id) is None
    clock.now += 5
    assert beside.revoke(key.key_id).revoked_at == clock.now - 5
    assert keys.ever() and not keys.some_live()
    with pytest.raises(NotFound, match="key 99 is unknown"):
        beside.revoke(99)
    beside.close()


def test_the_last_use_is_noted_once_a_minute(keys, clock):
    key, secret = keys.create("alice")
    assert keys.get(key.key_id).last_used_at is None
    keys.find(secret)
    first = clock.now
    clock.now += 59
    keys.find(secret)
    assert keys.get(key.key_id).last_used_at == first
    clock.now += 1
    keys.find(secret)
    assert keys.get(key.key_id).last_used_at == first + 60


@pytest.mark.parametrize("owner", ["", "a/b", "../x", "a b", "x" * 65, "é", "-a", "a\0"])
def test_an_owner_has_a_plain_name(keys, owner):
    with pytest.raises(Invalid, match="is no owner's name"):
        keys.create(owner)


# ------------------------------------------------------------------ who calls


def test_each_kind_of_key_has_its_owner(keys):
    access = Access(("tml-a",), keys)
    _, secret = keys.create("alice")
    assert access.caller(secret).owner == "alice"
    # The owner that earlier journals know: the first 64 bits of the key's SHA-256.
    assert access.caller("tml-a").owner == "7c875ea51d6621fb"
    with pytest.raises(Unauthorized, match="does not know the key"):
        access.caller("tml-b")
    assert Access().caller("tml-anything").owner == "local"


def test_keys_are_asked_for_from_the_first_one_on_and_after_the_last(keys):
    access = Access((), keys)
    assert access.caller("tml-x").owner == "local"
    key, _ = keys.create("alice")
    with pytest.raises(Unauthorized):
        access.caller("tml-x")
    keys.revoke(key.key_id)
    with pytest.raises(Unauthorized):
        access.caller("tml-x")


# ------------------------------------------------------------------ tokens


def claims_of(token):
    payload = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))


def test_a_token_is_its_keys_holder_for_an_hour(keys, clock):
    access = Access(("tml-a",), keys, clock)
    _, secret = keys.create("alice")
    token = access.token(access.caller(secret))
    found = claims_of(token)
    assert (found["sub"], found["org_id"], found["email"]) == ("tml:user:alice", "trimtab", "")
    assert found["exp"] - found["iat"] == TOKEN_SECONDS
    held = access.caller(token)
    assert (held.owner, held.token) == ("alice", token)
    assert access.token(held) == token  # a token prolongs nothing
    clock.now += TOKEN_SECONDS - 1
    access.caller(token)
    clock.now += 1
    with pytest.raises(InvalidToken, match="has expired"):
        access.caller(token)


def test_a_tokens_signature_is_checked_once_and_a_link_is_no_token_after_it(clock, monkeypatch):
    access, checked = Access((), None, clock), []
    decode = jwt.decode
    monkeypatch.setattr(jwt, "decode", lambda *a, **k: checked.append(a[0]) or decode(*a, **k))
    token = access.token(access.caller("tml-x"))
    assert {access.caller(token).owner for _ in range(3)} == {"local"}
    assert checked == [token]
    with pytest.raises(NotFound):
        access.linked(token, "path")
    link, _ = access.link({"path": "x"})
    assert access.linked(link, "path") == {"path": "x"}
    with pytest.raises(InvalidToken):
        access.caller(link)


def test_a_token_ends_with_its_key(keys, clock):
    access = Access((), keys, clock)
    opened = access.token(access.caller("tml-x"))
    assert access.caller(opened).owner == "local"
    key, secret = keys.create("alice")
    token = access.token(access.caller(secret))
    keys.revoke(key.key_id)
    for ended in (token, opened):
        with pytest.raises(InvalidToken, match="not taken any more"):
            access.caller(ended)


def test_a_token_outlives_a_restart_but_not_its_configured_key(keys, clock):
    token = Access(("tml-a",), keys, clock).token(Access(("tml-a",), keys, clock).caller("tml-a"))
    assert Access(("tml-a", "tml-b"), keys, clock).caller(token).owner == "7c875ea51d6621fb"
    with pytest.raises(InvalidToken):
        Access(("tml-b",), keys, clock).caller(token)


def forged(access, **changes):
    """A token as this server signs them, but for `changes`."""
    now = int(access._clock())
    times = {"iat": now, "exp": now + 60, "iss": "trimtab", "aud": "trimtab-token"}
    claims = times | {"sub": "tml:user:local", "key": "open"} | changes
    return {name: value for name, value in claims.items() if value is not None}


def test_forgeries_are_refused(clock):
    access = Access(clock=clock)
    good = forged(access)
    assert access.caller(jwt.encode(good, access._secret, "HS256")).owner == "local"
    bad = {
        "another secret": jwt.encode(good, b"x" * 32, "HS256"),
        "no algorithm": jwt.encode(good, None, "none"),
        "another algorithm": jwt.encode(good, access._secret * 2, "HS512"),
        "no signature": jwt.encode(good, access._secret, "HS256").rsplit(".", 1)[0] + ".",
        "no time": jwt.encode(forged(access, exp=None), access._secret, "HS256"),
        "no key": jwt.encode(forged(access, key=None), access._secret, "HS256"),
        "a link": access.link({"sub": "tml:user:local", "key": "open"})[0],
        "an unknown key": jwt.encode(forged(access, key="stored:1"), access._secret, "HS256"),
        "no JWT": "eyJ",
        "garbage": "eyJ0.eyJ0.\x00",
    }
    changed = jwt.encode(good, access._secret, "HS256").split(".")
    payload = json.dumps(good | {"key": "stored:1"}).encode()
    changed[1] = base64.urlsafe_b64encode(payload).rstrip(b"=").decode()
    bad["changed claims"] = ".".join(changed)
    for name, token in bad.items():
        with pytest.raises(InvalidToken):
            access.caller(token)
            pytest.fail(name)


def test_a_link_opens_what_it_names_and_is_no_token(clock):
    access = Access(clock=clock)
    link, until = access.link({"path": "tinker://a/external_weights/b", "file": "c"})
    assert until == clock.now + LINK_SECONDS
    assert access.linked(link, "path", "file") == {
        "path": "tinker://a/external_weights/b",
        "file": "c",
    }
    token = access.token(access.caller("tml-x"))
    clock.now += LINK_SECONDS
    for wrong in (link, token, "x"):
        with pytest.raises(NotFound, match="this link is unknown or has expired"):
            access.linked(wrong, "path", "file")


# ------------------------------------------------------------------ over the wire


def test_a_refused_token_says_so_in_its_header_and_a_refused_key_does_not(running):
    with running(WireSettings(api_keys=("tml-a",), jwt_auth=True)) as box:
        assert box.client.post("/client/config", headers={"X-API-Key": "tml-a"}).json()[
            "pjwt_auth_enabled"
        ]
        refused = box.client.post("/telemetry", headers={"X-API-Key": "eyJx.y.z"})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == 'Bearer error="invalid_token"'
        refused = box.client.post("/telemetry", headers={"X-API-Key": "tml-z"})
        assert refused.status_code == 401 and "www-authenticate" not in refused.headers
        token = box.client.post("/auth/token", headers={"X-API-Key": "tml-a"}).json()["jwt"]
        assert box.client.post("/telemetry", headers={"X-API-Key": token}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "a.b.c.", "1.2.3.4.com"])
def test_without_keys_a_page_of_another_name_gets_nowhere(running, host):
    with running() as box:
        answer = box.client.post("/telemetry", headers={"Host": host})
        assert answer.status_code == 401 and "is another machine's name" in answer.text
        mirrored = f"{box.url}/org/tiny/resolve/main/config.json"
        assert httpx.get(mirrored, headers={"Host": host}).status_code == 401
        for near in ("localhost:1", "127.0.0.1:1", "[::1]:1", "x", "a.localhost", "10.0.0.7"):
            assert box.client.post("/telemetry", headers={"Host": near}).status_code == 200
    with running(WireSettings(api_keys=("tml-a",))) as box:
        headers = {"Host": host, "X-API-Key": "tml-a"}
        assert box.client.post("/telemetry", headers=headers).status_code == 200


def rest(shared, key):
    return tinker.RestClient(base_url=shared.url, api_key=key)


def test_whoami_through_the_sdk(shared):
    found = rest(shared, shared.alice).whoami().result()
    assert (found.user_urn, found.org_urn) == ("tml:user:alice", "tml:organization:trimtab")
    assert found.email is None


def test_the_sdk_refreshes_its_token_and_replaces_a_rejected_one(shared):
    """The SDK's own provider against our exchange: one replay after a 401, one refresh when the
    token is near its end."""

    async def scenario():
        async with httpx.AsyncClient(base_url=f"{shared.url}/api/v1") as client:
            exchanged = []

            class Exchange:
                async def auth_token(self):
                    headers = {"X-API-Key": shared.alice}
                    answer = await client.post("/auth/token", headers=headers)
                    exchanged.append(answer.json()["jwt"])
                    return SimpleNamespace(jwt=exchanged[-1])

            class Service:
                service = Exchange()

                def __enter__(self):
                    return self

                def __exit__(self, *_):
                    pass

            auth = JwtAuthProvider(Service)
            first = await client.get("/get_server_capabilities", auth=auth)
            assert first.status_code == 200 and len(exchanged) == 1
            auth._token = jwt.encode({"exp": time.time() + 600}, b"x" * 32, "HS256")  # a stranger's
            again = await client.get("/get_server_capabilities", auth=auth)
            assert again.status_code == 200 and len(exchanged) == 2
            auth._token = jwt.encode({"exp": time.time() + 5}, b"x" * 32, "HS256")  # near its end
            third = await client.get("/get_server_capabilities", auth=auth)
            assert third.status_code == 200 and len(exchanged) == 3
            await auth.close()

    asyncio.run(scenario())


def test_a_client_whose_token_is_refused_in_mid_session_goes_on(shared):
    with connected(shared.server, shared.alice) as client:
        client.create_sampling_client(base_model=MODEL).result()
        auth = client.holder._default_auth
        stranger = jwt.encode({"exp": time.time() + 600}, b"x" * 32, "HS256")
        auth._token = stranger
        client.create_sampling_client(base_model=MODEL).result()
        assert auth._token != stranger
        assert claims_of(auth._token)["sub"] == "tml:user:alice"


def test_a_key_made_and_revoked_beside_a_running_server(shared):
    key, secret = shared.keys.create("carol")
    client = tinker.ServiceClient(base_url=shared.url, api_key=secret)
    sampler = client.create_sampling_client(base_model=MODEL).result()
    assert sampler.get_base_model() == MODEL
    shared.keys.revoke(key.key_id)
    with pytest.raises(tinker.AuthenticationError):
        client.create_sampling_client(base_model=MODEL).result()


def test_a_key_describes_itself_and_can_end_itself(shared):
    key, secret = shared.keys.create("dave", "ci")
    with httpx.Client(base_url=f"{shared.url}/api/v1", headers={"X-API-Key": secret}) as http:
        found = http.get("/auth/apikey/me").json()
        assert (found["key_id"], found["name"], found["note"]) == (key.key_id, "ci", "stored")
        assert found["details"]["user_details"]["email"] == "dave"
        assert http.delete("/auth/apikey/me").status_code == 200
        assert http.get("/auth/apikey/me").status_code == 401


def test_a_configured_key_cannot_be_ended_from_outside(running):
    with running(WireSettings(api_keys=("tml-a",))) as box:
        box.client.headers["X-API-Key"] = "tml-a"
        refused = box.client.delete("/auth/apikey/me")
        assert refused.status_code == 400 and "is not kept by the server" in refused.text
        assert box.client.get("/auth/apikey/me").json()["key_id"] == int("7c875ea51d66", 16)
