"""Who calls: a key or a token becomes an owner, or the call is refused.

    open         no key was ever configured: any key that starts with tml- is the owner "local"
    configured   --api-key: the owner is the first 64 bits of the key's SHA-256, as 16 hex digits
    stored       `trimtab keys create`: the owner is the name given there

A token is a JWT (HS256, an hour) that the SDK exchanges its key for; `whoami` reads its claims. It
opens exactly what its key opens, and no longer than its key does. A link is a token of another
audience that opens one file. Knows no route.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from trimtab.errors import Invalid, NotFound, Unauthorized
from trimtab.service.keys import Keys

ISSUER = "trimtab"
ORGANISATION = "trimtab"
TOKEN, LINK = "trimtab-token", "trimtab-link"  # audiences: neither passes for the other
TOKEN_SECONDS = 3600
LINK_SECONDS = 3600  # clients want more than five minutes left
ALGORITHM = "HS256"
OPEN, CONFIGURED, STORED = "open", "configured", "stored"
REMEMBERED = 1024  # tokens whose signature was checked: every call carries one


def names_another(host: str) -> bool:
    """Whether a Host header names a domain, which this machine has none of. A page of that domain,
    whose name was pointed at 127.0.0.1 meanwhile, would else do here as it likes.

    >>> [names_another(host) for host in ("localhost:8000", "127.0.0.1:8000", "a.example:8000")]
    [False, False, True]
    """
    name = host.rsplit(":", 1)[0] if host.count(":") == 1 else host
    name = name.rstrip(".").lower()
    numbers = name.startswith("[") or name.replace(".", "").isdigit()
    return "." in name and not numbers and not name.endswith(".localhost")


class InvalidToken(Unauthorized):
    """The token, not the key behind it, is at fault: the SDK exchanges its key once more."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who holds a credential. `kind` is open, configured or stored; `token` is the credential
    where that was a token."""

    owner: str
    kind: str
    key_id: int = 0
    name: str = ""
    token: str | None = None

    @property
    def key(self) -> str:
        """Names the key inside a token: `stored:3`, `configured:5feceb66ffc86f38`, `open`."""
        if self.kind == OPEN:
            return OPEN
        return f"{self.kind}:{self.key_id if self.kind == STORED else self.owner}"

    @property
    def urn(self) -> str:
        return f"tml:user:{self.owner}"


class Access:
    """The keys of one server, and the secret its tokens are signed with.

    `Access(("tml-a",)).caller("tml-a").owner == "7c875ea51d6621fb"`
    """

    def __init__(
        self,
        api_keys: tuple[str, ...] = (),
        keys: Keys | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._configured = {_digest(key): _owner(_digest(key)) for key in api_keys}
        self._keys = keys
        self._clock = clock
        self._secret = secrets.token_bytes(32) if keys is None else keys.signing_secret()
        self._signed_right: dict[tuple[str, str], dict[str, Any]] = {}  # by audience and token

    def open(self) -> bool:
        """Whether any key will do: none was ever configured or created."""
        return not self._configured and not (self._keys and self._keys.ever())

    # ---- who calls

    def caller(self, credential: str | None) -> Caller:
        """Who holds `credential`, a key or a token. Unauthorized if nobody does."""
        if not credential:
            raise Unauthorized("X-API-Key: required")
        if credential.startswith("eyJ"):
            return self._token_holder(credential)
        if self.open():
            if credential.startswith("tml-"):
                return Caller("local", OPEN)
            raise Unauthorized("X-API-Key: a key starts with tml-")
        found = self._configured_holder(credential) or self._stored_holder(credential)
        if found is None:
            raise Unauthorized("X-API-Key: this server does not know the key")
        return found

    def _configured_holder(self, key: str) -> Caller | None:
        """Compared as digests and against every key, so time tells nothing."""
        digest = _digest(key)
        known = [hmac.compare_digest(digest, each) for each in self._configured]
        return _configured(_owner(digest)) if any(known) else None

    def _stored_holder(self, key: str) -> Caller | None:
        found = self._keys.find(key) if self._keys else None
        return None if found is None else Caller(found.owner, STORED, found.key_id, found.name)

    # ---- tokens

    def token(self, caller: Caller) -> str:
        """A token for `caller`. One that holds a token already gets that very one: only a key
        can prolong."""
        if caller.token is not None:
            return caller.token
        return self._signed(
            TOKEN,
            TOKEN_SECONDS,
            {"sub": caller.urn, "org_id": ORGANISATION, "email": "", "key": caller.key},
        )

    def _token_holder(self, token: str) -> Caller:
        """Who holds a token: its signature and times are right and its key still opens."""
        try:
            claims = self._verified(token, TOKEN, ("sub", "key"))
        except jwt.ExpiredSignatureError:
            raise InvalidToken("X-API-Key: the token has expired") from None
        except jwt.InvalidTokenError:
            raise InvalidToken("X-API-Key: the token is not one of this server's") from None
        kind, _, which = str(claims["key"]).partition(":")
        found = self._of_key(kind, which)
        if found is None:
            raise InvalidToken("X-API-Key: the key behind the token is not taken any more")
        return Caller(found.owner, found.kind, found.key_id, found.name, token)

    def _of_key(self, kind: str, which: str) -> Caller | None:
        if kind == OPEN:
            return Caller("local", OPEN) if self.open() else None
        if kind == CONFIGURED:
            return _configured(which) if which in self._configured.values() else None
        found = self._keys.live(int(which)) if self._keys and which.isdecimal() else None
        return None if found is None else Caller(found.owner, STORED, found.key_id, found.name)

    # ---- the key itself

    def forget(self, caller: Caller) -> None:
        """Revoke the key that `caller` holds, where this server keeps it."""
        if caller.kind != STORED or self._keys is None:
            raise Invalid(
                "this key is not kept by the server, so it cannot be deleted; it opens for as long"
                " as the server's configuration lets it"
            )
        self._keys.revoke(caller.key_id)

    # ---- links

    def link(self, claims: Mapping[str, str]) -> tuple[str, float]:
        """A token that opens what `claims` name, and until when (seconds since 1970)."""
        return self._signed(LINK, LINK_SECONDS, claims), self._clock() + LINK_SECONDS

    def linked(self, token: str, *names: str) -> dict[str, str]:
        """The claims of a link. NotFound, whatever is wrong with it."""
        try:
            claims = self._verified(token, LINK, names)
        except jwt.InvalidTokenError:
            raise NotFound("this link is unknown or has expired; ask for a new one") from None
        return {name: str(claims[name]) for name in names}

    # ---- signing

    def _signed(self, audience: str, seconds: int, claims: Mapping[str, str]) -> str:
        now = int(self._clock())
        times = {"iss": ISSUER, "aud": audience, "iat": now, "exp": now + seconds}
        return jwt.encode({**claims, **times}, self._secret, algorithm=ALGORITHM)

    def _verified(self, token: str, audience: str, names: tuple[str, ...]) -> dict[str, Any]:
        """The claims, of which `names` are there. Only the time is looked at again: what was signed
        right once stays so."""
        claims = self._signed_right.get((audience, token))
        if claims is None or not claims.keys() >= {*names}:
            claims = self._decoded(token, audience, names)
            if len(self._signed_right) >= REMEMBERED:
                self._signed_right.clear()
            self._signed_right[audience, token] = claims
        if not isinstance(claims["exp"], int) or claims["exp"] <= self._clock():
            raise jwt.ExpiredSignatureError
        return claims

    def _decoded(self, token: str, audience: str, names: tuple[str, ...]) -> dict[str, Any]:
        """The claims; the one algorithm that is taken is ours, whatever the token's head says."""
        required = ["exp", "iat", "iss", "aud", *names]
        options: Any = {"require": required, "verify_exp": False, "verify_iat": False}
        claims: dict[str, Any] = jwt.decode(
            token,
            self._secret,
            algorithms=[ALGORITHM],
            audience=audience,
            issuer=ISSUER,
            options=options,
        )
        return claims


def _configured(owner: str) -> Caller:
    return Caller(owner, CONFIGURED, int(owner[:12], 16), "configured key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _owner(digest: bytes) -> str:
    return digest.hex()[:16]
