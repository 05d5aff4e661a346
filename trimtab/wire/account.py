"""What a client may ask of its own key: a token for it, what it is, and its end."""

from __future__ import annotations

from starlette.responses import Response

from trimtab.wire.access import ORGANISATION
from trimtab.wire.calls import Call, answer


async def auth_token(call: Call) -> Response:
    return answer({"jwt": call.access.token(call.caller)})


async def get_own_key(call: Call) -> Response:
    """What `tinker auth login` shows. Nobody here has an address, so the owner stands in for it."""
    caller = call.caller
    return answer(
        {
            "key_id": caller.key_id,
            "name": caller.name or caller.kind,
            "note": caller.kind,
            "details": {
                "org_details": {"name": ORGANISATION},
                "user_details": {"email": caller.owner},
            },
        }
    )


async def delete_own_key(call: Call) -> Response:
    call.access.forget(call.caller)
    return answer({})
