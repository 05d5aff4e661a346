"""A small read-only hub: tokenizer and configuration files of the models served, never weights.

With HF_ENDPOINT set to this server, `AutoTokenizer.from_pretrained("org/name")` needs no other hub,
and so neither does `SamplingClient.get_tokenizer()`, which knows nothing but the model's name.
Where keys are asked for, HF_TOKEN carries one. Knows no session.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path

from starlette.responses import FileResponse, Response

from trimtab.wire.calls import Call, answer

SERVED = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|chat_template|tekken)\.json"
    r"|(tokenizer|spiece|sentencepiece\.bpe)\.model|(vocab|merges)\.txt|chat_template\.jinja"
)


async def model_info(call: Call) -> Response:
    """What the hub says of a repository: a commit, and the names of its files."""
    folder = _folder(call)
    if folder is None:
        return _missing("RepoNotFound", f"{call.path['repo']!r} is not served here")
    names = await asyncio.to_thread(files_of, folder)
    content = {
        "id": call.path["repo"],
        "sha": await asyncio.to_thread(commit_of, folder, names),
        "siblings": [{"rfilename": name} for name in names],
    }
    return answer(content)


async def tree(call: Call) -> Response:
    """The listing of a folder inside a repository; there is none."""
    return _missing("EntryNotFound", "this server lists no folders")


async def resolve(call: Call) -> Response:
    """One file, whatever the revision; there is one."""
    folder, name = _folder(call), call.path["file"]
    if folder is None:
        return _missing("RepoNotFound", f"{call.path['repo']!r} is not served here")
    names = await asyncio.to_thread(files_of, folder)
    if name not in names:
        return _missing("EntryNotFound", f"{name[:100]!r} is no file that this server gives out")
    headers = {
        "ETag": f'"{await asyncio.to_thread(_digest, folder / name)}"',
        "X-Repo-Commit": await asyncio.to_thread(commit_of, folder, names),
    }
    return FileResponse(folder / name, headers=headers, media_type="application/octet-stream")


def files_of(folder: Path) -> tuple[str, ...]:
    """The files of a model that are given out, by name; none of a subfolder."""
    return tuple(
        sorted(e.name for e in os.scandir(folder) if SERVED.fullmatch(e.name) and e.is_file())
    )


def commit_of(folder: Path, names: tuple[str, ...]) -> str:
    """40 hex digits that change when a file does."""
    told = "\n".join(f"{name} {_digest(folder / name)}" for name in names)
    return hashlib.sha256(told.encode()).hexdigest()[:40]


def _digest(file: Path) -> str:
    state = file.stat()
    return _digest_of(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1024)
def _digest_of(file: Path, mtime_ns: int, size: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _folder(call: Call) -> Path | None:
    return call.settings.mirror(call.path["repo"])


def _missing(code: str, why: str) -> Response:
    """A 404 in the hub's own form: its clients read the code."""
    response = answer({"error": why}, 404)
    response.headers["X-Error-Code"] = code
    return response
